"""Readers of ragged and sparse fields, from end to end: h5py and SciPy say what is right."""

from __future__ import annotations

import json
import warnings
from typing import Any

import h5py
import numpy as np
import pytest
from conftest import require_extra
from hypothesis import given, settings
from hypothesis import strategies as st

from h5async import (
    AsyncReader,
    ConfigError,
    Csr,
    DatasetError,
    Field,
    H5AsyncError,
    PostprocessError,
    Ragged,
    RaggedField,
    SparseField,
    Split,
)

SEED = 20160704
COLUMNS = 13
STORAGES = ("contiguous", "gzip", "virtual", "big-endian", "shuffled")
KINDS = ("ends", "lengths", "offsets", "vlen", "strings", "bytes", "csr", "dense", "some", "padded")


# --- what is written, and what has to come -----------------------------------------------------


def put(file, name, values, storage, **rest):
    """Write a dataset as `storage` says."""
    if storage == "gzip":
        return file.create_dataset(
            name,
            data=values,
            chunks=(7, *values.shape[1:]),
            **rest,
            compression="gzip",
            maxshape=(None, *values.shape[1:]),
        )
    if storage == "shuffled":
        return file.create_dataset(
            name,
            data=values,
            chunks=(5, *values.shape[1:]),
            **rest,
            shuffle=True,
            maxshape=(None, *values.shape[1:]),
        )
    if storage == "big-endian":
        return file.create_dataset(name, data=values.astype(values.dtype.newbyteorder(">")))
    if storage == "virtual" and len(values) > 2:
        cut = len(values) // 3
        layout = h5py.VirtualLayout(values.shape, values.dtype)
        for number, (a, b) in enumerate(((0, cut), (cut, len(values)))):
            part = file.create_dataset(f"{name}_parts/{number}", data=values[a:b])
            layout[a:b] = h5py.VirtualSource(part)
        return file.create_virtual_dataset(name, layout)
    return file.create_dataset(name, data=values)


def put_sparse(file, name, matrix, storage):
    """Write a sparse matrix as AnnData does."""
    group = file.create_group(name)
    group.attrs["encoding-type"] = "csr_matrix"
    group.attrs["encoding-version"] = "0.1.0"
    group.attrs["shape"] = matrix.shape
    put(group, "data", matrix.data, storage)
    put(group, "indices", matrix.indices, storage)
    group["indptr"] = matrix.indptr
    return group


class Truth:
    """The samples of a field, one by one.

    Parameters
    ----------
    field
        As a reader is given it.
    samples
        Of all files: arrays, strings, or dense rows.
    """

    def __init__(self, field: Any, samples: list[Any]) -> None:
        self.field, self.samples = field, samples


def write(path, lengths, kinds, storage, userblock=0):
    """Write a file with a field of each kind; return what has to come of each."""
    scipy = require_extra("scipy.sparse")
    rng = np.random.default_rng([SEED, *lengths])
    ends = np.cumsum(lengths, dtype=np.int64)
    begins = ends - lengths
    total = int(ends[-1]) if len(lengths) else 0
    count = len(lengths)
    found = {}
    with h5py.File(path, "w", userblock_size=userblock) as file:
        for kind in kinds:
            if kind in ("ends", "lengths", "offsets", "padded"):
                values = rng.integers(-99, 99, (total + 4 * (kind == "offsets"), 2)).astype("i4")
                put(file, kind, values, storage)
                shift = 3 if kind == "offsets" else 0  # values before and behind are in no sample
                own = [values[a + shift : b + shift] for a, b in zip(begins, ends, strict=True)]
                file[f"{kind}_at"] = {
                    "ends": ends.astype("i4"),
                    "lengths": np.asarray(lengths, "u2"),
                    "offsets": np.append(0, ends) + shift,
                    "padded": np.append(0, ends),
                }[kind]
                how = kind if kind != "padded" else "offsets"
                options = {"pad_to": 3} if kind == "padded" else {}
                field = RaggedField(kind, offsets=f"{kind}_at", offsets_kind=how, **options)
                found[kind] = Truth(field, own)
            elif kind in ("vlen", "bytes"):
                dtype = np.dtype(">f4" if kind == "vlen" else "u1")
                more = {"chunks": (4,), "compression": "gzip"} if storage == "gzip" else {}
                if more:
                    more["maxshape"] = (None,)
                node = file.create_dataset(kind, (count,), h5py.vlen_dtype(dtype), **more)
                own = [rng.integers(0, 255, n).astype(dtype.newbyteorder("=")) for n in lengths]
                for number, one in enumerate(own):
                    node[number] = one
                found[kind] = Truth(kind, own)
            elif kind == "strings":
                own = ["ä" * n for n in lengths]
                node = file.create_dataset(kind, (count,), h5py.string_dtype())
                for number, one in enumerate(own):
                    node[number] = one
                found[kind] = Truth(kind, own)
            else:
                matrix = scipy.csr_matrix(
                    (
                        rng.normal(size=total).astype("f4"),
                        np.concatenate(
                            [np.sort(rng.permutation(COLUMNS * 9)[:n]) for n in lengths]
                            or [np.zeros(0, int)]
                        ).astype("i4"),
                        np.append(0, ends),
                    ),
                    (count, COLUMNS * 9),
                )
                put_sparse(file, kind, matrix, storage)
                dense = matrix.toarray()
                options = {"csr": {}, "dense": {"dense": True}, "some": {"columns": [5, 0, 7]}}
                own = list(dense[:, [5, 0, 7]] if kind == "some" else dense)
                found[kind] = Truth(SparseField(kind, **options[kind]), own)
        file["plain"] = np.arange(count * 3, dtype="f8").reshape(count, 3) + len(lengths)
        found["plain"] = Truth("plain", list(file["plain"][()]))
    return found


def check(batch, truths):
    """Check all fields of a batch."""
    for name, truth in truths.items():
        wanted, found = [truth.samples[i] for i in batch.index], batch[name]
        if name == "strings":
            assert found.to_strings() == wanted
        elif name == "padded":
            assert found.shape == (len(wanted), 3, 2)
            mask = batch["padded_mask"]
            for row, there, one in zip(found, mask, wanted, strict=True):
                assert there.tolist() == [i < len(one) for i in range(3)]
                np.testing.assert_array_equal(row[there], one[:3])
                assert not row[~there].any()
        elif name in ("csr", "some"):
            assert isinstance(found, Csr)
            assert found.shape == (len(wanted), wanted[0].size)
            np.testing.assert_array_equal(found.to_scipy().toarray(), np.array(wanted))
        elif name in ("dense", "plain"):
            np.testing.assert_array_equal(found, np.array(wanted))
        else:
            assert isinstance(found, Ragged)
            assert found.lengths.tolist() == [len(one) for one in wanted]
            assert found.dtype == wanted[0].dtype
            for mine, one in zip(found, wanted, strict=True):
                np.testing.assert_array_equal(mine, one)


def several(tmp_path_factory, files, kinds, storage, userblock=0):
    """Write files; return their paths and the truths over all."""
    folder = tmp_path_factory.mktemp("ragged")
    paths, truths = [], {}
    for number, lengths in enumerate(files):
        paths.append(folder / f"{number}.h5")
        for name, one in write(paths[-1], lengths, kinds, storage, userblock).items():
            truths.setdefault(name, Truth(one.field, [])).samples.extend(one.samples)
    return paths, truths


def fields_of(truths):
    return {name: truth.field for name, truth in truths.items()}


def lengths_of_samples(most=9):
    some = st.lists(st.integers(0, most), max_size=30)
    return st.builds(
        lambda a, long, b: [*a, *long, *b], some, st.lists(st.just(COLUMNS * 8), max_size=1), some
    )


# --- values ------------------------------------------------------------------------------------


@pytest.mark.slow
@given(data=st.data())
@settings(max_examples=60)
def test_any_fields_are_what_is_in_the_files(tmp_path_factory, data):
    draw = data.draw
    kinds = draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=4, unique=True))
    files = draw(st.lists(lengths_of_samples(), min_size=1, max_size=3))
    storage = draw(st.sampled_from(STORAGES))
    paths, truths = several(
        tmp_path_factory, files, kinds, storage, draw(st.sampled_from([0, 512]))
    )
    options = {
        "batch_size": draw(st.integers(1, 40)),
        "shuffle": draw(st.sampled_from([False, "full", "window"])),
        "num_threads": draw(st.sampled_from([0, 2])),
        "drop_last": draw(st.booleans()),
        "copy": draw(st.booleans()),
        "prefetch": draw(st.integers(1, 3)),
    }
    count = sum(map(len, files))
    with AsyncReader(hdf5_path=paths, fields=fields_of(truths), device="cpu", **options) as reader:
        assert reader.num_samples == count
        for _ in range(2):
            seen = []
            for batch in reader:
                check(batch, truths)
                seen += batch.index.tolist()
            if options["drop_last"]:
                assert len(set(seen)) == len(seen) == count - count % options["batch_size"]
            else:
                assert sorted(seen) == list(range(count))
        if count:
            some = [0, count - 1, 0, count // 2]
            check(reader.read(some), truths)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """Two files and an empty one, with a field of each kind."""
    rng = np.random.default_rng(SEED)
    files = [rng.integers(0, 9, 41).tolist(), [], [*rng.integers(0, 4, 20).tolist(), 100]]
    return several(tmp_path_factory, files, KINDS, "gzip")


def reader_of(mixed, **options):
    paths, truths = mixed
    options = {"batch_size": 8, "num_threads": 2, "device": "cpu"} | options
    return AsyncReader(hdf5_path=paths, fields=fields_of(truths), **options)


@pytest.mark.parametrize("shuffle", [False, "full", "window"])
def test_ranks_share_the_samples(mixed, shuffle):
    seen = []
    for rank in range(3):
        with reader_of(mixed, shuffle=shuffle, rank=rank, world_size=3) as reader:
            for batch in reader:
                check(batch, mixed[1])
                seen += batch.index.tolist()
    assert sorted(set(seen)) == list(range(62))


@pytest.mark.parametrize("shuffle", [False, "full", "window"])
def test_a_resumed_reader_gives_the_rest(mixed, shuffle):
    with reader_of(mixed, shuffle=shuffle) as reader:
        batches = iter(reader)
        seen = next(batches).index.tolist() + next(batches).index.tolist()
        state = json.loads(json.dumps(reader.state_dict()))
        wanted = [batch.index.tolist() for batch in batches]
    with reader_of(mixed, shuffle=shuffle) as reader:
        reader.load_state_dict(state)
        found = []
        for batch in reader:
            check(batch, mixed[1])
            found.append(batch.index.tolist())
    assert found == wanted
    assert sorted(seen + [i for some in found for i in some]) == list(range(62))


@pytest.mark.parametrize(
    "options",
    [
        {"indices": slice(3, 60, 2)},
        {"indices": Split("train", {"train": 0.5, "val": 0.5}), "shuffle": "window"},
        {"weights": np.r_[np.zeros(61), 1.0], "epoch_samples": 50},  # the longest one, always
        {"weights": np.arange(62.0), "epoch_samples": 50},
        {"sampler": [61, 61, 61, 61, 61, 61, 61, 61, 61, 3]},
        {"sampler": [[61] * 8, [0, 1], [61, 61, 2]]},
    ],
)
@pytest.mark.parametrize("num_threads", [0, 2])
def test_selected_drawn_and_sampled_samples(mixed, options, num_threads):
    with reader_of(mixed, **options, num_threads=num_threads) as reader:
        for _ in range(2):
            for batch in reader:
                check(batch, mixed[1])


@pytest.mark.parametrize("num_threads", [0, 2])
def test_given_samples(mixed, num_threads):
    with reader_of(mixed, num_threads=num_threads) as reader:
        reader.fetch_data([61, 3, 3, 40])
        check(reader.get_next_batch(), mixed[1])
        check(reader.read([61] * 20), mixed[1])
        with pytest.raises(ConfigError, match=r"have 800 values, .* room for .*read\(\)"):
            reader.fetch_data([61] * 8)
        check(reader.get_next_batch(), mixed[1])


def test_batches_that_last(mixed):
    with reader_of(mixed, copy=True) as reader:
        for batch in list(reader):
            check(batch, mixed[1])
    with reader_of(mixed) as reader:
        for batch in [batch.copy() for batch in reader]:
            check(batch, mixed[1])


def test_batches_that_are_used_after_their_life_are_poison(mixed):
    with reader_of(mixed, debug_lifetimes=True, shuffle="full") as reader:
        batches = iter(reader)
        first = next(batches)
        check(first, mixed[1])
        ragged, sparse = first["ends"], first["csr"]
        second = next(batches)
        check(second, mixed[1])
        with pytest.raises(H5AsyncError, match="was used after"):
            first["ends"]
        assert (ragged.values == -1).all()
        assert (ragged.offsets == -1).all()
        assert np.isnan(sparse.data).all()
        assert (sparse.indices == -1).all()
        assert (sparse.indptr == -1).all()


# --- postprocess -------------------------------------------------------------------------------


@pytest.mark.parametrize("num_threads", [0, 2])
def test_postprocess_in_place(mixed, num_threads):
    def double(ends, csr, plain):
        assert isinstance(ends, Ragged)
        assert isinstance(csr, Csr)
        ends.values *= 2
        csr.data *= 2
        plain *= 2

    paths, truths = mixed
    fields = {name: truths[name].field for name in ("ends", "csr", "plain")}
    twice = {name: Truth(None, [2 * s for s in truths[name].samples]) for name in fields}
    with AsyncReader(
        hdf5_path=paths,
        fields=fields,
        batch_size=8,
        num_threads=num_threads,
        device="cpu",
        postprocess=double,
    ) as reader:
        for batch in reader:
            check(batch, twice)
        check(reader.read([3, 61]), twice)


@pytest.mark.parametrize("num_threads", [0, 2])
def test_postprocess_may_return_arrays_and_the_samples_as_they_are(mixed, num_threads):
    def changed(ends, csr, plain):
        return csr.to_dense(), ends, csr

    paths, truths = mixed
    fields = {name: truths[name].field for name in ("ends", "csr", "plain")}
    with AsyncReader(
        hdf5_path=paths,
        fields=fields,
        batch_size=8,
        num_threads=num_threads,
        device="cpu",
        postprocess=changed,
    ) as reader:
        for batch in reader:
            rows = np.array([truths["csr"].samples[i] for i in batch.index])
            np.testing.assert_array_equal(batch["ends"], rows)
            assert isinstance(batch["csr"], Ragged)
            assert isinstance(batch["plain"], Csr)
            lengths = [len(truths["ends"].samples[i]) for i in batch.index]
            assert batch["csr"].lengths.tolist() == lengths
            np.testing.assert_array_equal(batch["plain"].to_dense(), rows)


def test_postprocess_that_returns_other_numbers_of_samples(mixed):
    paths, truths = mixed
    fields = {name: truths[name].field for name in ("ends", "plain")}
    with (
        AsyncReader(
            hdf5_path=paths,
            fields=fields,
            batch_size=8,
            device="cpu",
            postprocess=lambda ends, plain: (ends[:3], plain),
        ) as reader,
        pytest.raises(PostprocessError, match="unequal numbers of rows"),
    ):
        reader.get_next_batch()


# --- what a reader says of itself --------------------------------------------------------------


def test_bytes_are_those_of_the_values(mixed):
    paths, truths = mixed
    fields = {name: truths[name].field for name in ("ends", "csr", "vlen", "plain")}
    total = sum(len(one) for one in truths["ends"].samples)
    nbytes = total * 8 + total * (4 + 4) + total * 4 + 62 * 24
    with AsyncReader(hdf5_path=paths, fields=fields, batch_size=8, device="cpu") as reader:
        assert reader.nbytes == nbytes
        for _ in reader:
            pass
        assert reader.stats().nbytes == nbytes
        assert reader.stats().direct_share == 1
    chosen = {"indices": [0, 1, 61], "batch_size": 8, "device": "cpu"}
    with AsyncReader(hdf5_path=paths, fields={"x": truths["ends"].field}, **chosen) as reader:
        assert reader.nbytes == sum(len(truths["ends"].samples[i]) * 8 for i in (0, 1, 61))


def test_users_see_one_entry_for_each_field(mixed):
    paths, truths = mixed
    fields = {name: truths[name].field for name in ("csr", "some", "plain")}
    with AsyncReader(hdf5_path=paths, fields=fields, batch_size=8, device="cpu") as reader:
        assert list(reader.layouts) == list(fields)
        assert reader.layouts["csr"].path == "csr/data"
        assert list(reader.stats().ways) == list(fields)
        assert "\0" not in f"{reader!r} {reader.stats()} {next(iter(reader))!r}"


# --- errors ------------------------------------------------------------------------------------


def sparse_file(path, rows=6, columns=4):
    scipy = require_extra("scipy.sparse")
    matrix = scipy.csr_matrix(np.arange(rows * columns, dtype="f4").reshape(rows, columns))
    with h5py.File(path, "w") as file:
        put_sparse(file, "X", matrix, "contiguous")
        file["y"] = np.arange(rows)
    return path


def test_dense_and_padded_arrays_lie_in_the_slot(tmp_path):
    path = sparse_file(tmp_path / "a.h5", 9, 50)
    with h5py.File(path, "r+") as file:
        file["v"], file["at"] = np.arange(30), np.arange(10) * 3
    fields = {
        "x": SparseField("X", dense=True),
        "v": RaggedField("v", offsets="at", pad_to=5),
    }
    wanted = np.arange(450.0).reshape(9, 50), np.zeros((9, 5), int)
    wanted[1][:, :3] = np.arange(27).reshape(9, 3)
    options = {"hdf5_path": path, "fields": fields, "batch_size": 4, "device": "cpu"}
    for num_threads in (0, 2):
        with AsyncReader(prefetch=1, num_threads=num_threads, **options) as reader:
            places = set()
            kept = reader.read([1, 2])
            for batch in reader:
                places.add((batch.x.ctypes.data, batch.v.ctypes.data))
                for found, all_of_it in zip(batch[:2], wanted, strict=True):
                    np.testing.assert_array_equal(found, all_of_it[batch.index])
            assert len(places) == 1
            np.testing.assert_array_equal(kept.x, wanted[0][1:3])
    with pytest.raises(ConfigError, match="max_batch_bytes"):
        AsyncReader(max_batch_bytes=2 * 4 * 50 * 4, **options)


def flat_file(path, offsets, values=10):
    with h5py.File(path, "w") as file:
        file["v"] = np.arange(values)
        file["at"] = np.asarray(offsets)
        file["y"] = np.arange(3)
    return path


@pytest.mark.parametrize(
    ("kind", "offsets", "message"),
    [
        ("offsets", [0, 5, 3, 10], r'"at" .*sample 1 would begin at value 5 and end at value 3'),
        ("offsets", [0, 5, 11], r'"at" .*end at value 11, and there are 10 values'),
        ("offsets", [-1, 5, 6], r'"at" .*begin at value -1'),
        ("offsets", np.zeros(0, int), r'"at" .*is empty'),
        ("offsets", [0.0, 5.0], r'"at" .*must hold integers, found float64'),
        ("offsets", np.array([0, 1 << 63], "u8"), r'"at" .*above 2\*\*63'),
        ("ends", [5, 3], r'"at" .*sample 1 would begin at value 5'),
        ("ends", [-1, 3], r'"at" .*sample 0 would begin at value 0 and end at value -1'),
        ("ends", [5, 11], r'"at" .*end at value 11'),
        ("lengths", [5, 6], r'"at" .*end at value 11'),
        ("lengths", [5, -1], r'"at" .*length below 0: -1'),
        ("lengths", [1 << 62, 1 << 62, 1 << 62, 1 << 62, 3], r'"at" .*'),
        ("lengths", np.array([(1 << 63) + 5, 3], "u8"), r'"at" .*'),
    ],
)
def test_offsets_that_lie(tmp_path, kind, offsets, message):
    path = flat_file(tmp_path / "a.h5", offsets)
    field = RaggedField("v", offsets="at", offsets_kind=kind)
    with pytest.raises(DatasetError, match=r"a\.h5.*" + message):
        AsyncReader(hdf5_path=path, fields={"x": field})


def test_numbers_of_samples_that_differ(tmp_path):
    path = flat_file(tmp_path / "a.h5", [0, 5, 10])
    with pytest.raises(DatasetError, match=r"has 2 samples.* has 3"):
        AsyncReader(hdf5_path=path, fields={"x": RaggedField("v", offsets="at"), "y": "y"})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"x": RaggedField("v", offsets="none")}, 'no dataset "none"'),
        ({"x": RaggedField("none", offsets="at")}, 'no dataset "none"'),
        ({"x": RaggedField("none")}, 'no dataset "none"'),
        ({"x": RaggedField("v")}, "not of a variable-length datatype; give the path of its off"),
        ({"x": SparseField("v")}, "not the group of a sparse matrix"),
        ({"x": SparseField("none")}, "not the group of a sparse matrix"),
    ],
)
def test_paths_that_lead_to_something_else(tmp_path, fields, message):
    path = flat_file(tmp_path / "a.h5", [0, 5, 10])
    with pytest.raises(DatasetError, match=rf"a\.h5.*{message}"):
        AsyncReader(hdf5_path=path, fields=fields)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"offsets_kind": "ends"}, "offsets_kind needs offsets"),
        ({"offsets": "at", "offsets_kind": "starts"}, "offsets_kind"),
        ({"pad_to": -1}, "pad_to"),
        ({"steps": range(3)}, "steps"),
        ({"num_dim": 1}, "num_dim must be 0"),
    ],
)
def test_options_that_do_not_fit(options, message):
    with pytest.raises(ConfigError, match=message):
        RaggedField("v", **options)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ([0, 4], "numbers from 0 to 3, found 0 to 4"),
        ([-1], "numbers from 0 to 3"),
        ([1, 1], "twice"),
        ([True, False], "a value for each of the 4"),
        (3, "columns"),
        ("a", "columns"),
        ([0.5], "columns"),
    ],
)
def test_columns_that_are_none(tmp_path, columns, message):
    path = sparse_file(tmp_path / "a.h5")
    with pytest.raises(ConfigError, match=message):
        AsyncReader(hdf5_path=path, fields={"x": SparseField("X", columns=columns)})


@pytest.mark.parametrize(
    "options", [{}, {"dense": True}, {"columns": [1, 0]}, {"columns": [2], "dense": True}]
)
@pytest.mark.parametrize("number", [4, -1, -(1 << 31)])
@pytest.mark.parametrize("num_threads", [0, 2])
def test_an_index_that_is_no_column_names_file_and_sample(tmp_path, options, number, num_threads):
    paths = [sparse_file(tmp_path / name) for name in ("a.h5", "b.h5")]
    with h5py.File(paths[1], "r+") as file:
        row = file["X/indptr"][4]
        file["X/indices"][row + 1] = number
    with AsyncReader(
        hdf5_path=paths,
        fields={"x": SparseField("X", **options), "y": "y"},
        batch_size=3,
        num_threads=num_threads,
        device="cpu",
    ) as reader:
        for _ in range(3):
            reader.get_next_batch()
        message = rf'b\.h5: group "X": row 4 \(sample 10\) has the index {number}, .* 4 columns'
        with pytest.raises(DatasetError, match=message):
            reader.get_next_batch()
        with pytest.raises(DatasetError, match=message):
            reader.read([10, 1])
        assert reader.get_next_batch().y.tolist() == [0, 1, 2]


def test_a_second_file_with_other_columns(tmp_path):
    paths = [sparse_file(tmp_path / "a.h5"), sparse_file(tmp_path / "b.h5", columns=5)]
    with pytest.raises(DatasetError, match=r"b\.h5.* has 5 columns, and .*a\.h5.* has 4; .*names"):
        AsyncReader(hdf5_path=paths, fields={"x": "X"})


def test_columns_by_name_over_files_that_differ(tmp_path):
    paths = [sparse_file(tmp_path / "a.h5"), sparse_file(tmp_path / "b.h5", columns=5)]
    for path, names in zip(paths, ["abcd", "ecbxa"], strict=True):
        with h5py.File(path, "r+") as file:
            file["var/_index"] = list(names)
    field = SparseField("X", columns=["c", "x", "a"], dense=True)
    with AsyncReader(hdf5_path=paths, fields={"x": field}, batch_size=12, device="cpu") as reader:
        found = reader.get_next_batch().x
    first = np.arange(24.0).reshape(6, 4)
    second = np.arange(30.0).reshape(6, 5)
    zero = np.zeros(6)
    np.testing.assert_array_equal(found[:6], np.c_[first[:, 2], zero, first[:, 0]])
    np.testing.assert_array_equal(found[6:], second[:, [1, 3, 4]])


@pytest.mark.parametrize("missing", ["zero", "error"])
def test_a_column_that_no_file_has_is_an_error(tmp_path, missing):
    paths = [sparse_file(tmp_path / "a.h5"), sparse_file(tmp_path / "b.h5")]
    for path, names in zip(paths, [["GAPDH", "CD3E", "XIST", "d"], list("abcd")], strict=True):
        with h5py.File(path, "r+") as file:
            file["var/_index"] = names

    def refused(columns, several):
        field = SparseField("X", columns=columns, missing=missing)
        with pytest.raises(DatasetError) as caught:
            AsyncReader(hdf5_path=several, fields={"x": field}, device="cpu")
        return str(caught.value)

    first = f'{paths[0]}: group "X"'
    remedy = "the most similar: CD3E; correct its name, or leave it out of columns"
    assert refused(["CD3G", "d"], paths[0]).startswith(f'{first} has no column "CD3G"; {remedy}')
    others = "" if missing == "error" else ", like all other files,"
    found = refused(["d", "CD3G", "?"], paths)
    assert found.startswith(f'{first}{others} has no column "CD3G", and 1 more; {remedy}')


def test_compressed_columns_are_refused_with_a_command(tmp_path):
    path = sparse_file(tmp_path / "a.h5")
    with h5py.File(path, "r+") as file:
        file["X"].attrs["encoding-type"] = "csc_matrix"
    with pytest.raises(DatasetError, match=r"compressed columns .*python -c"):
        AsyncReader(hdf5_path=path, fields={"x": "X"})


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("cache", "device"),
    ],
)
def test_options_that_are_refused_for_now(tmp_path, option, value):
    path = sparse_file(tmp_path / "a.h5")
    with pytest.raises(ConfigError, match=rf'"X" \(x\).*{option}'):
        AsyncReader(hdf5_path=path, fields={"x": SparseField("X")}, **{option: value})


def test_kinds_in_toml(tmp_path):
    sparse_file(tmp_path / "a.h5")
    options = tmp_path / "options.toml"
    options.write_text(
        f"hdf5_path = '{tmp_path / 'a.h5'}'\nbatch_size = 6\n"
        'device = "cpu"\n'
        'fields.x = {path = "X", kind = "sparse", columns = [3, 0], dense = true}\n'
    )
    with AsyncReader(options) as reader:
        wanted = np.arange(24).reshape(6, 4)[:, [3, 0]]
        np.testing.assert_array_equal(reader.get_next_batch().x, wanted)
    options.write_text(
        f'hdf5_path = \'{tmp_path / "a.h5"}\'\nfields.x = {{path = "X", kind = "rugged"}}\n'
    )
    with pytest.raises(ConfigError, match=r"kind: must be one of audio, image, ragged, sparse"):
        AsyncReader(options)


def test_a_file_without_samples(tmp_path_factory):
    paths, truths = several(tmp_path_factory, [[]], KINDS, "contiguous")
    with AsyncReader(hdf5_path=paths, fields=fields_of(truths), device="cpu") as reader:
        assert (reader.num_samples, reader.nbytes, list(reader)) == (0, 0, [])


def test_the_command_line_reads_and_lists_them(mixed):
    from typer.testing import CliRunner

    from h5async.cli import app

    path, fields = str(mixed[0][0]), [f"{name}={name}" for name in ("csr", "vlen", "strings")]
    options = [word for field in fields for word in ("--field", field)]
    read = CliRunner().invoke(app, ["read", path, *options, "--batch-size", "7"])
    assert read.exit_code == 0, read.output
    assert "csr/data" in read.output
    assert "\0" not in read.output
    assert "nan" not in read.output
    listed = CliRunner().invoke(app, ["inspect", path])
    assert listed.exit_code == 0, listed.output
    lines = {line.split()[0]: line for line in listed.output.splitlines() if line}
    assert "direct, by" in lines["csr/data"]
    for name, what in (("vlen", ">f4 of any length"), ("strings", "text of any length")):
        assert what in lines[name]
        assert "(41,)" in lines[name]
        assert "direct, by the core; as Ragged, " in lines[name]
        assert lines[name].endswith(" values each")
    assert "(41, 117)" in lines["csr"]
    assert "as Csr, " in lines["csr"]


# --- columns of tables -------------------------------------------------------------------------


def annotated(path, kinds, seed=0):
    """Write a file by anndata, whose cells are of these kinds; return its ``obs``."""
    anndata, pandas = require_extra("anndata"), require_extra("pandas")
    scipy = require_extra("scipy.sparse")
    rng, count = np.random.default_rng(seed), len(kinds)
    numbers = pandas.array(rng.integers(0, 9, count), dtype="Int16")
    numbers[::5] = None
    flags = pandas.array(rng.integers(0, 2, count).astype(bool), dtype="boolean")
    flags[::3] = None
    obs = pandas.DataFrame(
        {
            "kind": pandas.Categorical(np.array(kinds, object)),
            "donor": pandas.Categorical(rng.integers(5, 8, count), categories=[5, 6, 7]),
            "amount": numbers,
            "flag": flags,
            "plain": rng.random(count),
        },
        index=[f"cell{i}" for i in range(count)],
    )
    x = scipy.csr_matrix(rng.integers(0, 3, (count, 7)).astype("f4"))
    found = anndata.AnnData(x, obs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found.write_h5ad(path)
    return found


OBS = {name: f"obs/{name}" for name in ("kind", "donor", "amount", "flag", "plain")}


def check_obs(batch, categories, obs):
    rows = obs.iloc[batch.index]
    for name in ("kind", "donor"):
        names = np.array([*categories[name], None], object)
        wanted = [None if v != v or v is None else v for v in rows[name].tolist()]
        assert names[batch[name]].tolist() == wanted
    for name in ("amount", "flag"):
        mask = rows[name].isna().to_numpy()
        np.testing.assert_array_equal(batch[f"{name}_mask"], mask)
        wanted = rows[name][~mask].to_numpy(dtype=batch[name].dtype)
        np.testing.assert_array_equal(batch[name][~mask], wanted)
    np.testing.assert_array_equal(batch.plain, rows["plain"].to_numpy())


@pytest.mark.parametrize("with_x", [False, True])
@pytest.mark.parametrize("num_threads", [0, 2])
def test_columns_of_obs(tmp_path, with_x, num_threads):
    found = annotated(tmp_path / "a.h5ad", ["T", "B", None, "Mönozyt", "T", "B"] * 5)
    fields = OBS | ({"x": "X"} if with_x else {})
    with AsyncReader(
        hdf5_path=tmp_path / "a.h5ad",
        fields=fields,
        batch_size=7,
        shuffle="full",
        num_threads=num_threads,
        device="cpu",
    ) as reader:
        assert reader.categories == {"kind": ("B", "Mönozyt", "T"), "donor": (5, 6, 7)}
        for batch in reader:
            check_obs(batch, reader.categories, found.obs)
            assert batch.kind.dtype == np.int8
            if with_x:
                wanted = found.X[batch.index].toarray()
                np.testing.assert_array_equal(batch.x.to_dense(), wanted)
        check_obs(reader.read([3, 3, 29]), reader.categories, found.obs)


@pytest.mark.parametrize("num_threads", [0, 2])
def test_categories_of_files_that_differ_are_united(tmp_path, num_threads):
    pandas = require_extra("pandas")
    kinds = [["T", None, "B"] * 4, ["NK", "T", None, "A", "B"] * 3, ["B"] * 4]
    paths = [tmp_path / f"{i}.h5ad" for i in range(3)]
    several = [annotated(p, k, i).obs for i, (p, k) in enumerate(zip(paths, kinds, strict=True))]
    obs = pandas.concat([one.astype({"kind": object}) for one in several])
    with AsyncReader(
        hdf5_path=paths,
        fields=OBS,
        batch_size=8,
        shuffle="full",
        num_threads=num_threads,
        device="cpu",
    ) as reader:
        assert reader.categories["kind"] == ("B", "T", "A", "NK")
        for _ in range(2):
            for batch in reader:
                check_obs(batch, reader.categories, obs)
        check_obs(reader.read([30, 0, 13]), reader.categories, obs)


def test_a_code_that_is_no_category_names_file_and_sample(tmp_path):
    paths = [tmp_path / "a.h5ad", tmp_path / "b.h5ad"]
    annotated(paths[0], ["A", "B"] * 3)
    annotated(paths[1], ["C", "B"] * 3)
    with h5py.File(paths[1], "r+") as file:
        file["obs/kind/codes"][2] = 9
    with (
        AsyncReader(hdf5_path=paths, fields={"kind": "obs/kind"}, device="cpu") as reader,
        pytest.raises(DatasetError, match=r'b\.h5ad.*obs/kind": row 2 \(sample 8\) .* code 9'),
    ):
        reader.get_next_batch()


def test_columns_that_are_refused(tmp_path):
    paths = [tmp_path / "a.h5ad", tmp_path / "b.h5ad"]
    annotated(paths[0], ["A", "B"] * 3)
    annotated(paths[1], ["C", "B"] * 3)
    for options, message in (
        ({"fields": {"k": Field("obs/kind", scale=2)}}, "scale is not supported"),
        ({"fields": {"k": "obs/kind"}, "cache": "device"}, 'cache="device" is not supported'),
        ({"fields": {"n": "obs/amount", "n_mask": "obs/plain"}}, '"n_mask", and there is a field'),
    ):
        with pytest.raises(ConfigError, match=message):
            AsyncReader(hdf5_path=paths, **options)
    with h5py.File(paths[1], "r+") as file:
        del file["obs/kind"]
        file["obs/kind/codes"] = np.zeros(6, "i1")
    with pytest.raises(DatasetError, match=r"b\.h5ad.*is not a categorical column"):
        AsyncReader(hdf5_path=paths, fields={"k": "obs/kind"})
