"""Batches of samples that consist of several rows, against NumPy: steps, pads, sequences."""

from __future__ import annotations

import itertools

import h5py
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from h5async import (
    AsyncReader,
    ConfigError,
    DatasetError,
    Field,
    H5AsyncError,
    Sequences,
    Split,
    UnsafeFileError,
)

COUNTS = (83, 0, 1, 46)  # rows of each file
ENDS = ((5, 5, 40, 77), (), (1,), (46,))  # of sequences; rows behind the last are in none


def write_fields(file: h5py.File, count: int, rng: np.random.Generator) -> None:
    """Write datasets of all ways in which rows may lie."""
    image = rng.integers(0, 255, (count, 4, 5, 3), dtype=np.uint8)
    file["image"] = image
    if count:
        chunks = min(7, count)
        file.create_dataset("zipped", data=image, chunks=(chunks, 4, 2, 3), compression="gzip")
        file.create_dataset("whole", data=image[:, 0], chunks=(chunks, 5, 3), compression="lzf")
        file.create_dataset("wide", data=np.moveaxis(image, 0, 2), chunks=(2, 3, chunks, 3))
        sparse = file.create_dataset("sparse", (count, 3), "i2", chunks=(chunks, 3), fillvalue=7)
        sparse[count // 2 :] = image[count // 2 :, 0, 0]
        rounded = {"scaleoffset": 0, "chunks": (chunks, 2)}
        file.create_dataset("h5pys", data=image[:, 0, 0, :2].astype("i4"), **rounded)
    else:
        for name, row in {"zipped": (4, 5, 3), "whole": (5, 3), "sparse": (3,)}.items():
            file.create_dataset(name, (0, *row), "i2" if name == "sparse" else "u1")
        file.create_dataset("wide", (4, 5, 0, 3), "u1")
        file.create_dataset("h5pys", (0, 2), "i4")
    file["big"] = image[:, 0, 0].astype(">f4")
    file["flag"] = image[:, 0, 0, 0] > 100
    file["name"] = np.array([f"row {n} " for n in range(count)], "S8")
    layout = h5py.VirtualLayout((count, 4, 5, 3), "u1")
    if count:
        layout[:] = h5py.VirtualSource(file["zipped"])
    file.create_virtual_dataset("virtual", layout)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder, rng = tmp_path_factory.mktemp("steps"), np.random.default_rng(0)
    paths = []
    for number, (count, ends) in enumerate(zip(COUNTS, ENDS, strict=True)):
        paths.append(folder / f"{number}.h5")
        with h5py.File(paths[-1], "w") as file:
            write_fields(file, count, rng)
            ends = np.array(ends, np.int64)
            file["ends"] = ends
            file["lengths"] = np.diff(ends, prepend=0)
            file["starts"] = np.append(0, ends)[: len(ends)] if count else ends
            ids = np.searchsorted(ends, np.arange(count), side="right")
            file["ids"] = ids % 3
            file.create_dataset("id_names", data=[f"e{i}" for i in ids], dtype=h5py.string_dtype())
            file["terminals"] = np.isin(np.arange(count), ends - 1) & (np.arange(count) % 2 == 0)
            file["timeouts"] = (np.isin(np.arange(count), ends - 1)).astype("u1")
    return paths


def bounds_of(kind: str) -> list[tuple[int, int]]:
    """Return the first row of each sequence, over all files, and the row behind it."""
    found, first = [], 0
    for count, ends in zip(COUNTS, ENDS, strict=True):
        edges = [0, *ends]
        if kind in ("starts", "ids", "id_names", "last") and count and edges[-1] < count:
            edges.append(count)
        if kind == "starts" and len(edges) > len(ends) + 1:
            edges = [*edges[: len(ends)], count]  # the last start lasts to the end
        if kind is None or kind == "files":
            edges = [0, count]
        pairs = list(itertools.pairwise(edges))
        if kind in ("ids", "id_names", "last"):
            pairs = [pair for pair in pairs if pair[0] < pair[1]]
        found += [(first + a, first + b) for a, b in pairs]
        first += count
    return found


KINDS = {
    "files": None,
    "ends": {"ends": "ends"},
    "starts": {"starts": "starts"},
    "lengths": {"lengths": "lengths"},
    "ids": {"ids": "ids"},
    "id_names": {"ids": "id_names"},
    "last": {"last": ["terminals", "timeouts"]},
}
FIELDS = "image zipped whole wide sparse h5pys big flag name virtual".split()


@pytest.fixture(scope="module")
def truth(files):
    found: dict[str, list[np.ndarray]] = {name: [] for name in FIELDS}
    for path in files:
        with h5py.File(path) as file:
            for name in FIELDS:
                values = file[name][()]
                found[name].append(np.moveaxis(values, 2, 0) if name == "wide" else values)
    return {name: np.concatenate(several) for name, several in found.items()}


def check(batch, fields: dict[str, Field], truth, bounds) -> None:
    """Compare a batch with rows that a loop takes."""
    starts = [a for a, _ in bounds]
    for i, sample in enumerate(batch.index.tolist()):
        number = max(n for n, a in enumerate(starts) if a <= sample and bounds[n][1] > sample)
        first, behind = bounds[number]
        assert (batch.sequence[i], batch.step[i]) == (number, sample - first)
        for name, field in fields.items():
            rows = truth[field.path]
            if field.steps is None:
                assert batch[name][i].tobytes() == rows[sample].astype(batch[name].dtype).tobytes()
                continue
            wanted = sample + np.array(field.steps)
            inside = (wanted >= first) & (wanted < behind)
            expected = rows[np.clip(wanted, first, behind - 1)]
            if field.pad == "zero":
                expected[~inside] = np.zeros((), rows.dtype)
            assert batch[name][i].tobytes() == expected.astype(batch[name].dtype).tobytes()
            if field.pad_mask is not None:
                assert (batch[field.pad_mask][i] == inside).all()


def expected_samples(fields: dict[str, Field], bounds, every: int) -> list[int]:
    found = []
    for first, behind in bounds:
        for sample in range(first, behind, every):
            if all(
                field.pad != "drop"
                or field.steps is None
                or all(first <= sample + step < behind for step in field.steps)
                for field in fields.values()
            ):
                found.append(sample)
    return found


steps = st.one_of(
    st.builds(range, st.integers(-4, 0), st.integers(1, 5)),
    st.builds(range, st.integers(-30, 0), st.integers(1, 50)),
    st.lists(st.integers(-5, 5), min_size=1, max_size=4),
    st.none(),
)


@st.composite
def field_sets(draw: st.DrawFn) -> dict[str, Field]:
    names = draw(st.lists(st.sampled_from(FIELDS), min_size=1, max_size=4, unique=True))
    found = {}
    for name in names:
        taken = draw(steps)
        options = {} if taken is None else {"steps": taken, "pad": draw(st.sampled_from(PADS))}
        if taken is not None and draw(st.booleans()):
            options["pad_mask"] = f"{name}_mask"
        found[name] = Field(name, 2 if name == "wide" else 0, **options)
    return found


PADS = ("drop", "edge", "zero")
WAYS = (
    {"num_threads": 0},
    {"num_threads": 2},
    {"num_threads": 2, "cache": "host"},
    {"num_threads": 1, "io": "pread", "prefetch": 3},
    {"num_threads": 2, "copy": True},
)


@given(
    field_sets(),
    st.sampled_from(list(KINDS)),
    st.sampled_from([False, "full", "window"]),
    st.integers(1, 3),
    st.sampled_from(WAYS),
    st.integers(1, 40),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_batches_of_steps(files, truth, fields, kind, shuffle, every, way, batch_size):
    options = {**(KINDS[kind] or {}), "every": every}
    bounds = bounds_of(kind)
    with AsyncReader(
        hdf5_path=[str(path) for path in files],
        fields=fields,
        sequences=options,
        shuffle=shuffle,
        batch_size=batch_size,
        device="cpu",
        **way,
    ) as reader:
        expected = expected_samples(fields, bounds, every)
        assert reader.num_samples == len(expected)
        for _ in range(2):
            seen = []
            for batch in reader:
                check(batch, fields, truth, bounds)
                seen += batch.index.tolist()
            assert (sorted(seen) if shuffle else seen) == expected


def windows(**options):
    return {
        "images": Field("zipped", steps=range(-3, 1), pad="edge"),
        "actions": Field("big", steps=range(4), pad="zero", pad_mask="mask"),
        "label": Field("flag"),
    } | options


def reader_of(files, fields=None, **options):
    options = {"device": "cpu", "num_threads": 0, "batch_size": 8} | options
    fields = windows() if fields is None else fields
    return AsyncReader(hdf5_path=[str(path) for path in files], fields=fields, **options)


@pytest.mark.parametrize("shuffle", ["full", "window"])
@pytest.mark.parametrize("world_size", [1, 3])
def test_a_state_and_ranks(files, truth, shuffle, world_size):
    fields, bounds = windows(), bounds_of("ends")
    options = {"shuffle": shuffle, "sequences": {"ends": "ends"}, "world_size": world_size}
    seen = []
    for rank in range(world_size):
        with reader_of(files, fields, rank=rank, **options) as reader:
            seen.append([batch.index.tolist() for batch in reader])
        with reader_of(files, fields, rank=rank, **options) as reader:
            for _ in range(2):
                reader.get_next_batch()
            state = reader.state_dict()
        with reader_of(files, fields, rank=rank, num_threads=2, **options) as reader:
            reader.load_state_dict(state)
            rest = []
            for batch in reader:
                check(batch, fields, truth, bounds)
                rest.append(batch.index.tolist())
        assert rest == seen[-1][2:]
    flat = [sample for several in seen for batch in several for sample in batch]
    assert set(flat) == set(expected_samples(fields, bounds, 1))


def test_given_samples_and_read(files, truth):
    fields, bounds = windows(), bounds_of("ends")
    with reader_of(files, fields, sequences={"ends": "ends"}) as reader:
        given_samples = [76, 3, 3, 84, 0]
        reader.fetch_data(given_samples)
        batch = reader.get_next_batch()
        assert batch.index.tolist() == given_samples
        check(batch, fields, truth, bounds)
        batch = reader.read(given_samples * 5)
        assert batch.index.tolist() == given_samples * 5
        check(batch, fields, truth, bounds)
        assert batch.keys() == ["images", "actions", "label", "mask"]
        for row in (77, 82):  # behind the last sequence of the first file
            with pytest.raises(ConfigError, match=f"row {row} is not a sample"):
                reader.read([0, row])


def test_a_sample_whose_steps_leave_its_sequence_cannot_be_given(files):
    fields = {"images": Field("image", steps=range(-3, 1))}
    with reader_of(files, fields, sequences={"ends": "ends"}) as reader:
        assert reader.read([3, 8]).sequence.tolist() == [0, 2]
        for row in (2, 5, 7):
            with pytest.raises(ConfigError, match="its steps leave"):
                reader.fetch_data([row])


def test_selections_are_of_what_is_possible(files, truth):
    fields = {"images": Field("image", steps=range(-3, 1))}
    possible = expected_samples(fields, bounds_of("ends"), 1)
    options = {"sequences": {"ends": "ends"}}
    for indices, expected in {
        "10:60": [n for n in possible if 10 <= n < 60],
        (60, 6, 2, 43, 40, 8): [60, 43, 8],
    }.items():
        given_indices = indices if isinstance(indices, str) else list(indices)
        with reader_of(files, fields, indices=given_indices, **options) as reader:
            assert [n for batch in reader for n in batch.index.tolist()] == expected
    parts = {"train": 0.7, "val": 0.3}
    found = {}
    for by in (None, "sequence"):
        for name in parts:
            split = Split(name, parts, by=by)
            with reader_of(files, fields, indices=split, **options) as reader:
                batches = list(reader) if reader.num_samples else []
                found[by, name] = {n for batch in batches for n in batch.index.tolist()}
                found[by, name, "numbers"] = {n for b in batches for n in b.sequence.tolist()}
        assert sorted(found[by, "train"] | found[by, "val"]) == possible
        assert not found[by, "train"] & found[by, "val"]
    assert not found["sequence", "train", "numbers"] & found["sequence", "val", "numbers"]
    assert found[None, "train", "numbers"] & found[None, "val", "numbers"]


def test_transforms_are_of_rows(files, truth):
    fields = {
        "first": Field("zipped", axes=(0, 3, 1, 2), scale=[0.5, 2, 3], steps=[0, -1], pad="edge"),
        "zero": Field("image", offset=1, scale=0.5, steps=[-1], pad="zero"),
    }
    for num_threads in (0, 2):
        with reader_of(files, fields, num_threads=num_threads) as reader:
            for batch in reader:
                rows = truth["image"][batch.index].astype("f4").transpose(0, 3, 1, 2)
                expected = rows * np.array([0.5, 2, 3], "f4")[:, None, None]
                assert (batch.first[:, 0] == expected).all()
                assert (batch.zero[batch.step == 0] == 1).all()


def doubled(images, actions, label, *, rng, index):
    assert images.shape[:2] == (index.size, 4)
    return images * 2.0, actions + rng.random(), label


@pytest.mark.parametrize("workers", ["thread", "process"])
def test_postprocess_and_a_helper(files, truth, workers):
    options = {"postprocess": doubled, "workers": workers, "num_threads": 1}
    with reader_of(files, sequences={"ends": "ends"}, **options) as reader:
        for batch in reader:
            assert batch.images.shape == (batch.size, 4, 4, 5, 3)
            assert (batch.images[:, -1] == truth["zipped"][batch.index] * 2.0).all()
            assert batch.mask.shape == (batch.size, 4)


# --- groups, and two dimensions ----------------------------------------------------------------


@pytest.fixture(scope="module")
def demos(tmp_path_factory):
    """Files of groups, as robomimic makes them; observations have a row more, as Minari's."""
    folder, rng = tmp_path_factory.mktemp("demos"), np.random.default_rng(1)
    paths, values = [], []
    for number, lengths in enumerate(([7, 3, 12, 1, *[4] * 8], [5, 9])):
        paths.append(folder / f"{number}.h5")
        with h5py.File(paths[-1], "w") as file:
            for demo, length in enumerate(lengths):
                group = file.create_group(f"data/demo_{demo}")
                group.attrs["num_samples"] = length
                found = {
                    "obs/image": rng.integers(0, 255, (length + 1, 6, 6, 3), dtype=np.uint8),
                    "actions": rng.random((length, 2)),
                    "done": np.arange(length) == length - 1,
                }
                chunks = (min(3, length), 6, 4, 3)
                group.create_dataset("obs/image", data=found["obs/image"], chunks=chunks)
                group["actions"], group["done"] = found["actions"], found["done"]
                values.append((number, demo, found))
            names = [f"demo_{n}" for n in (2, 1, 0, 10) if n < len(lengths)]
            file["mask/train"] = np.array(names, "S10")
            file.create_dataset("mask/valid", data=names[:1], dtype=h5py.string_dtype())
            file["data/no_demo"] = np.zeros(3)
            file["data/demo_x"] = np.zeros(3)  # no group
    return paths, values


@pytest.mark.parametrize("only", [None, "mask/train", "mask/valid"])
@pytest.mark.parametrize("shuffle", [False, "full", "window"])
@pytest.mark.parametrize("pad", PADS)
@pytest.mark.parametrize("cached", [False, True])
def test_groups(demos, tmp_path, only, shuffle, pad, cached):
    paths, values = demos
    wanted = {None: range(99), "mask/train": (0, 1, 2, 10), "mask/valid": (2, 1)}[only]
    names = [(n, d) for n, d, _ in values if d in wanted]
    if only == "mask/valid":  # the second file names another one
        names = [(0, 2), (1, 1)]
    chosen = [found for n, d, found in values if (n, d) in names]
    fields = {
        "now": Field("obs/image", steps=range(2), pad=pad),
        "actions": Field("actions", steps=[-1, 0, 3], pad=pad, pad_mask="mask"),
        "done": "done",
    }
    options = {"index_cache": tmp_path / "saved.h5idx"} if cached else {}
    for _ in range(1 + cached):
        with reader_of(
            paths,
            fields,
            sequences=Sequences(groups="data/demo_*", only=only),
            shuffle=shuffle,
            num_threads=2,
            **options,
        ) as reader:
            count = 0
            for batch in reader:
                for i in range(batch.size):
                    found, step = chosen[batch.sequence[i]], batch.step[i]
                    length = len(found["done"])
                    assert step < length
                    assert (batch.now[i] == found["obs/image"][step : step + 2]).all()
                    taken = step + np.array([-1, 0, 3])
                    inside = (taken >= 0) & (taken < length)
                    expected = found["actions"][np.clip(taken, 0, length - 1)]
                    if pad == "zero":
                        expected[~inside] = 0
                    assert (batch.actions[i] == expected).all()
                    assert (batch.mask[i] == inside).all()
                    assert batch.done[i] == found["done"][step]
                count += batch.size
            lengths = [len(found["done"]) for found in chosen]
            dropped = [max(0, n - 4) if pad == "drop" else n for n in lengths]
            assert count == reader.num_samples == sum(dropped)


def test_groups_that_do_not_fit(demos, tmp_path):
    paths, _ = demos
    groups = Sequences(groups="data/demo_*")
    for fields, sequences, message in (
        ({"a": "actions"}, Sequences(groups="data/episode_*"), 'no group matches "data/episode_*"'),
        ({"a": "nothing"}, groups, 'there is no dataset "data/demo_0/nothing"'),
        ({"a": "actions"}, Sequences(groups="data/demo_*", only="mask/test"), "only"),
        ({"a": "actions"}, Sequences(groups="data/demo_*", only="data/no_demo"), "names of groups"),
        ({"a": "actions"}, Sequences(groups="data/demo_?", only="mask/train"), '"demo_10"'),
    ):
        with pytest.raises(H5AsyncError) as caught:
            reader_of(paths, fields, sequences=sequences)
        assert message in str(caught.value)
        assert paths[0].name in str(caught.value)
    with h5py.File(tmp_path / "short.h5", "w") as file:
        for n in range(2):
            file[f"demo_{n}/a"], file[f"demo_{n}/b"] = np.zeros(9), np.zeros(9 - 2 * n)
    with pytest.raises(DatasetError, match="a and b have 9 and 7 rows in sequence 1"):
        reader_of([tmp_path / "short.h5"], {"a": "a", "b": "b"}, sequences={"groups": "demo_*"})
    with h5py.File(tmp_path / "unlike.h5", "w") as file:
        file["demo_0/a"], file["demo_1/a"] = np.zeros((9, 2), "f4"), np.zeros((9, 2), "i8")
    message = r'unlike\.h5: dataset "demo_0/a" has .* float32, but "demo_1/a" .* int64; groups can'
    with pytest.raises(DatasetError, match=message):
        reader_of([tmp_path / "unlike.h5"], {"a": "a"}, sequences={"groups": "demo_*"})


@pytest.mark.parametrize("axes", [(0, 1), (1, 0), (-4, 1)])
@pytest.mark.parametrize("way", ["contiguous", "one", "several", "compact", "virtual"])
def test_samples_along_two_dimensions(tmp_path, way, axes):
    rng = np.random.default_rng(2)
    values = rng.integers(0, 99, (5, 7, 2, 3)).astype("i2")
    stored = np.swapaxes(values, 0, 1) if axes == (1, 0) else values
    with h5py.File(tmp_path / "well.h5", "w") as file:
        options = {
            "one": {"chunks": (1, 3, 2, 2), "compression": "gzip"},
            "several": {"chunks": (2, 4, 1, 3), "compression": "gzip", "shuffle": True},
        }.get(way, {})
        if way == "compact":
            plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
            plist.set_layout(h5py.h5d.COMPACT)
            space, kind = h5py.h5s.create_simple(stored.shape), h5py.h5t.NATIVE_INT16
            made = h5py.h5d.create(file.id, b"x", kind, space, plist)
            made.write(h5py.h5s.ALL, h5py.h5s.ALL, np.ascontiguousarray(stored))
        elif way == "virtual":
            file.create_dataset("y", data=stored, chunks=(2, 4, 1, 3), compression="gzip")
            layout = h5py.VirtualLayout(stored.shape, "i2")
            layout[:] = h5py.VirtualSource(file["y"])
            file.create_virtual_dataset("x", layout)
        else:
            file.create_dataset("x", data=stored, **options)
    fields = {
        "input": Field("x", axes, steps=range(-3, 1)),
        "target": Field("x", axes, steps=[1], pad="zero"),
        "turned": Field("x", axes, axes=(*axes, 3, 2)),
    }
    for options in {"num_threads": 0}, {"num_threads": 2, "cache": "host"}:
        with reader_of([tmp_path / "well.h5"], fields, shuffle="full", **options) as reader:
            assert reader.num_samples == 5 * 4
            for batch in reader:
                for i, (s, t) in enumerate(zip(batch.sequence, batch.step, strict=True)):
                    assert (batch.input[i] == values[s, t - 3 : t + 1]).all()
                    assert (batch.target[i, 0] == (values[s, t + 1] if t < 6 else 0)).all()
                    assert (batch.turned[i] == values[s, t].transpose(1, 0)).all()


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("ends", [3, 2], "must ascend"),
        ("ends", [3, 11], "row 11, and the file has 10"),
        ("starts", [-1, 4], "row -1"),
        ("lengths", [4, -2], "a length below 0"),
        ("lengths", [4, 9], "row 13"),
        ("ends", [1.5], "must hold integers"),
        ("ids", [1, 2], "must have a value for each of the 10 samples"),
        ("last", [True], "must have a value for each of the 10 samples"),
    ],
)
def test_sequences_that_do_not_fit(tmp_path, name, values, message):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["data"], file["given"] = np.arange(10), values
    with pytest.raises(DatasetError, match=message):
        reader_of([tmp_path / "a.h5"], {"data": "data"}, sequences={name: "given"})
    with pytest.raises(DatasetError, match=r'sequences: .*there is no dataset "nothing"'):
        reader_of([tmp_path / "a.h5"], {"data": "data"}, sequences={name: "nothing"})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"fields": {"a": Field("a")}, "sequences": {"groups": "x", "ends": "y"}},
            "groups or ends",
        ),
        ({"sequences": {"only": "x"}}, "only needs groups"),
        ({"sequences": {"every": 0}}, "every"),
        ({"sequences": "data/*"}, "must be Sequences, or a mapping"),
        ({"num_dim": (0, 1), "sequences": {"ids": "x"}}, "leave out ids"),
        ({"num_dim": (1, 1)}, "must name two dimensions"),
        ({"num_dim": (0, 1, 2)}, "a pair of them"),
        ({"fields": {"a": {"path": "a", "num_dim": (0, 1)}, "b": "b"}}, "for all fields"),
        ({"fields": {"a": {"path": "a", "steps": []}}}, "must be a range or a list"),
        ({"fields": {"a": {"path": "a", "steps": "3"}}}, "must be a range or a list"),
        ({"fields": {"a": {"path": "a", "steps": [0.5]}}}, "must be a range or a list"),
        ({"fields": {"a": {"path": "a", "pad": "edge"}}}, "pad needs steps"),
        ({"fields": {"a": {"path": "a", "pad_mask": "m"}}}, "pad_mask needs steps"),
        ({"fields": {"a": {"path": "a", "steps": [0], "pad": "wrap"}}}, "pad"),
        (
            {"fields": {"a": {"path": "a", "steps": [0], "pad_mask": "a"}}},
            "delivers 'a', which already exists",
        ),
        ({"fields": {"a": {"path": "a", "steps": [0], "pad_mask": "step"}}}, "'step'"),
    ],
)
def test_options_that_do_not_fit(options, message):
    with pytest.raises(ConfigError) as caught:
        AsyncReader(hdf5_path="a.h5", **options)
    assert message in str(caught.value)


def test_a_toml_file(files, truth, tmp_path):
    names = ", ".join(f"'{path}'" for path in files)
    text = f"""
        hdf5_path = [{names}]
        device = "cpu"
        batch_size = 8
        sequences = {{ ends = "ends", every = 2 }}
        [fields]
        label = "flag"
        images = {{ path = "image", steps = "-3:1", pad = "edge", pad_mask = "mask" }}
    """
    (tmp_path / "reader.toml").write_text(text)
    with AsyncReader(tmp_path / "reader.toml") as reader:
        fields = {"label": Field("flag")}
        fields["images"] = Field("image", steps=range(-3, 1), pad="edge", pad_mask="mask")
        for batch in reader:
            check(batch, fields, truth, bounds_of("ends"))
            assert (batch.step % 2 == 0).all()


def test_batches_know_their_sequences_without_steps(files):
    with reader_of(files, {"label": "flag"}, batch_size=500) as reader:
        batch = reader.get_next_batch()
        assert batch.sequence.tolist() == [n for n, c in enumerate(COUNTS) for _ in range(c)]
        assert batch.step.tolist() == [step for c in COUNTS for step in range(c)]
        assert batch.copy().step.tolist() == batch.step.tolist()


@pytest.mark.gpu
@pytest.mark.parametrize("cache", [None, "device", "host"])
@pytest.mark.parametrize("workers", ["thread", "process"])
def test_steps_on_a_gpu(files, truth, cache, workers):
    pytest.importorskip("cupy")
    fields = {
        "image": Field("zipped", steps=range(-2, 1), pad="zero", axes=(0, 3, 1, 2), scale=0.5),
        "raw": Field("image", steps=[0, 2, -1], pad="edge", pad_mask="mask"),
        "channels": Field("sparse", steps=range(2), pad="edge", scale=[1, 2, 3]),
        "big": Field("big", steps=[1], pad="zero"),
        "flag": Field("flag", steps=range(3), pad="edge"),
        "plain": Field("virtual"),
    }
    options = {"sequences": {"ends": "ends"}, "shuffle": "window", "batch_size": 16}
    with (
        reader_of(files, fields, **options) as expected,
        reader_of(
            files, fields, device="cuda", num_threads=2, cache=cache, workers=workers, **options
        ) as reader,
    ):
        for _ in range(2):
            for batch, other in zip(reader, expected, strict=True):
                assert (batch.index == other.index).all()
                for name in other.keys():
                    assert batch[name].dtype == other[name].dtype
                    assert batch[name].get().tobytes() == other[name].tobytes(), name
        if workers == "thread":
            sample = reader.read([3, 84])
            assert sample.image.get().tobytes() == expected.read([3, 84]).image.tobytes()


def test_each_chunk_is_decoded_once_in_a_window(tmp_path):
    """Though windows of 10 rows share chunks of 16, which most of them reach beyond."""
    values = np.arange(20 * 96 * 50).reshape(20, 96, 50).astype("i4")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for n in range(20):
            file.create_dataset(f"e{n}/x", data=values[n], chunks=(16, 50), compression="gzip")
    fields = {"x": Field("x", steps=range(10), pad="edge")}
    options = {"sequences": {"groups": "e*"}, "window_bytes": 100_000, "num_threads": 0}
    with reader_of([tmp_path / "a.h5"], fields, shuffle="window", **options) as reader:
        seen = []
        for batch in reader:
            rows = np.minimum(batch.step[:, None] + np.arange(10), 95)
            assert (batch.x == values[batch.sequence[:, None], rows]).all()
            seen += batch.index.tolist()
        assert sorted(seen) == list(range(20 * 96))
        assert seen[:500] != sorted(seen[:500])
        if "core" in reader.stats().ways.values():
            assert reader.stats().decoded_chunks == 120


@pytest.mark.parametrize("num_threads", [0, 2])
def test_packed_values_of_several_files(tmp_path, num_threads):
    """Each file has its own attributes, and steps do not lead into another one."""
    rng, paths, found = np.random.default_rng(5), [], []
    for number, length in enumerate((9, 14)):
        paths.append(tmp_path / f"{number}.nc")
        stored = rng.integers(-50, 50, (length, 3)).astype("i2")
        with h5py.File(paths[-1], "w") as file:
            file["t"] = stored
            file["t"].attrs.update(scale_factor=0.5 + number, add_offset=10.0 * number)
        found.append(stored * (0.5 + number) + 10.0 * number)
    fields = {"t": Field("t", decode_cf=True, steps=range(-2, 1), pad="edge")}
    with reader_of(paths, fields, shuffle="full", num_threads=num_threads) as reader:
        for batch in reader:
            for i, (number, step) in enumerate(zip(batch.sequence, batch.step, strict=True)):
                rows = np.maximum(step + np.arange(-2, 1), 0)
                assert (batch.t[i] == found[number][rows]).all()


# --- what a review found ------------------------------------------------------------------------


@pytest.mark.parametrize("batches", [False, True])
def test_a_sampler_draws_rows_and_not_positions(files, truth, batches):
    drawn = [8, 60, 3, 90, 76, 8]
    fields = {"images": Field("image", steps=range(-3, 1))}
    sampler = [drawn[:4], drawn[4:]] if batches else drawn
    with reader_of(files, fields, sequences={"ends": "ends"}, sampler=sampler) as reader:
        for _ in range(2):
            assert [n for batch in reader for n in batch.index.tolist()] == drawn
    for odd in (6, 78):
        with pytest.raises(ConfigError, match=f"sampler: row {odd} is not a sample"):
            reader_of(files, fields, sequences={"ends": "ends"}, sampler=[8, odd])


def test_a_chunk_of_one_row_is_decoded_once_in_a_window(tmp_path):
    """As most files of frames have them."""
    values = np.arange(120 * 64).reshape(120, 64).astype("i4")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", data=values, chunks=(1, 64), compression="gzip")
    fields = {"x": Field("x", steps=range(-9, 1), pad="edge")}
    with reader_of([tmp_path / "a.h5"], fields, shuffle="window", num_threads=2) as reader:
        seen = []
        for batch in reader:
            rows = np.maximum(batch.index[:, None] + np.arange(-9, 1), 0)
            assert (batch.x == values[rows]).all()
            seen += batch.index.tolist()
        assert sorted(seen) == list(range(120))
        if "core" in reader.stats().ways.values():
            assert reader.stats().decoded_chunks <= 240


def test_zeros_are_unpacked_as_the_samples_own_rows(tmp_path):
    for number, offset in enumerate((100.0, -20.0)):
        with h5py.File(tmp_path / f"{number}.h5", "w") as file:
            file["t"] = np.arange(5, dtype="i2")
            file["t"].attrs.update(scale_factor=2.0, add_offset=offset)
    fields = {"t": Field("t", decode_cf=True, steps=[-1, 0], pad="zero")}
    for num_threads in (0, 2):
        paths = sorted(tmp_path.iterdir())
        with reader_of(paths, fields, num_threads=num_threads, batch_size=10) as reader:
            (batch,) = reader
            assert batch.t[0, 0] == 100
            assert batch.t[5, 0] == -20


def test_which_groups_are_meant(tmp_path):
    path = tmp_path / "a.h5"
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["demo_9/x"] = np.full(3, 9)
    with h5py.File(path, "w") as file:
        for parent in "ab":
            for demo in range(2):
                file[f"{parent}/demo_{demo}/x"] = np.full(2 + demo, ord(parent))
                file[f"runs/{parent}{demo}/traj/x"] = np.arange(2)
        file.create_group("runs/empty")
        file["none"] = np.array([], "S8")
        file["first"] = np.array(["demo_0"], "S8")
        file["links/soft"] = h5py.SoftLink("/a/demo_1")
        file["links/to_data"] = h5py.SoftLink("/a/demo_1/x")
        file["links/nowhere"] = h5py.SoftLink("/a/demo_7")
        file["outside"] = h5py.ExternalLink(str(tmp_path / "deeper" / "o.h5"), "/")
        file["beside"] = h5py.ExternalLink("other.h5", "/")

    def samples(**sequences):
        with reader_of([path], {"x": "x"}, sequences=sequences, batch_size=99) as reader:
            return [] if not reader.num_samples else reader.get_next_batch().x.tolist()

    assert samples(groups="[ab]/demo_*") == [97] * 5 + [98] * 5
    assert samples(groups="[ab]/demo_*", only="first") == [97, 97, 98, 98]
    assert samples(groups="runs/*/traj") == [0, 1] * 4
    assert samples(groups="links/*") == [97] * 3
    assert samples(groups="beside/demo_*") == [9] * 3
    assert samples(groups="a/demo_1") == [97] * 3
    for sequences, message in (
        ({"groups": "a/demo_*", "only": "none"}, "names no group"),
        ({"groups": "a/demo_7"}, 'no group matches "a/demo_7"'),
        ({"groups": "a/demo_1/x"}, "no group matches"),
    ):
        with pytest.raises(DatasetError, match=message):
            samples(**sequences)
    (tmp_path / "deeper").mkdir()
    with h5py.File(tmp_path / "deeper" / "o.h5", "w") as file:
        file["demo_0/x"] = np.zeros(2)
    with h5py.File(path, "a") as file:
        del file["outside"]
        file["outside"] = h5py.ExternalLink(str(tmp_path.parent / "far.h5"), "/")
    with h5py.File(tmp_path.parent / "far.h5", "w") as file:
        file["demo_0/x"] = np.zeros(2)
    with pytest.raises(UnsafeFileError, match=r"far\.h5"):
        samples(groups="outside/demo_*")


def test_zeros_and_ones_as_indices_are_refused(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"], file["keep"] = np.arange(9), (np.arange(9) % 2).astype("i1")
        file["names"] = np.array(["a"] * 9, "S1")
    with pytest.raises(DatasetError, match="store a mask as bools"):
        reader_of([tmp_path / "a.h5"], {"x": "x"}, indices="keep")
    with pytest.raises(DatasetError, match="must hold bools, or integers"):
        reader_of([tmp_path / "a.h5"], {"x": "x"}, sequences={"last": "names"})


@pytest.mark.parametrize("steps", [range(10**9), "0:1000000000", range(5, 5)])
def test_steps_without_number(steps):
    with pytest.raises(ConfigError, match="steps"):
        Field("x", steps=steps)


def masked(images, actions, label, *, mask, index):
    assert mask.shape == actions.shape[:2]
    return images, actions * mask[..., None], label


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["thread", 2])
def test_postprocess_is_given_masks(files, workers):
    options = {"postprocess": masked, "workers": workers, "num_threads": 2}
    with reader_of(files, sequences={"ends": "ends"}, **options) as reader:
        for batch in reader:
            assert (batch.actions[~batch.mask] == 0).all()
