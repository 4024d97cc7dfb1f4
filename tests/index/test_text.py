"""Strings that end with a NUL, or are padded with spaces: read directly, as HDF5 converts them."""

import h5py
import numpy as np
import pytest
from h5py import h5d, h5p, h5s, h5t
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from h5async import AsyncReader

PADDINGS = {"null": h5t.STR_NULLPAD, "term": h5t.STR_NULLTERM, "space": h5t.STR_SPACEPAD}
ALPHABET = np.frombuffer(b"\0\0  a\xff", np.uint8)


def string(nbytes, padding, cset=h5t.CSET_ASCII):
    made = h5t.C_S1.copy()
    made.set_size(nbytes)
    made.set_strpad(PADDINGS[padding])
    made.set_cset(cset)
    return made


def compound(*members, gap=0):
    sizes = [member.get_size() for member in members]
    made = h5t.create(h5t.COMPOUND, sum(sizes) + gap)
    for number, member in enumerate(members):
        made.insert(f"m{number}".encode(), sum(sizes[:number]), member)
    return made


def store(path, stored, shape, seed=0, *, chunks=None, filters=(), fill=None, compact=False):
    """Store bytes that are likely to hold NULs and spaces anywhere."""
    plist = h5p.create(h5p.DATASET_CREATE)
    if chunks:
        plist.set_chunk(chunks)
    if compact:
        plist.set_layout(h5d.COMPACT)
    for number in filters:
        plist.set_filter(number, 0, (1,) if number == 1 else ())
    if fill is not None:
        plist.set_fill_value(np.array(fill))
    rng = np.random.default_rng(seed)
    raw = rng.choice(ALPHABET, (*shape, stored.get_size()))
    with h5py.File(path, "w") as file:
        data = h5d.create(file.id, b"data", stored, h5s.create_simple(shape), plist)
        if fill is None:
            data.write(h5s.ALL, h5s.ALL, raw, mtype=stored)


def assert_reads_like_h5py(path, *, name="data", direct=True, num_dim=0, **options):
    paths = path if isinstance(path, list) else [path]
    truth = []
    for one in paths:
        with h5py.File(one) as file:
            dataset, *member = name.split("/")
            values = file[dataset][:]
            for part in member:
                values = values[part]
            truth.append(np.moveaxis(values, num_dim, 0))
    truth = np.concatenate(truth)
    for threads in (0, 2):
        with AsyncReader(
            hdf5_path=path,
            data_field=name,
            labels_field=None,
            num_threads=threads,
            num_dim=num_dim,
            batch_size=7,
            device="cpu",
            **options,
        ) as reader:
            found = np.concatenate([batch.data.copy() for batch in reader])
            assert (reader.fallback_reads == 0) == direct
    assert found.dtype == truth.dtype.newbyteorder("=")
    assert found.shape == truth.shape
    assert bits(found) == bits(truth.astype(truth.dtype.newbyteorder("=")))


def bits(values):
    return np.ascontiguousarray(values).tobytes()


@st.composite
def types(draw, depth=0):
    kinds = ["string"] * 3 + (["compound", "array", "number"] if depth else ["compound", "array"])
    kind = draw(st.sampled_from(kinds if depth < 2 else ["string", "number"]))
    if kind == "string":
        cset = draw(st.sampled_from([h5t.CSET_ASCII, h5t.CSET_UTF8]))
        return string(draw(st.integers(1, 9)), draw(st.sampled_from(list(PADDINGS))), cset)
    if kind == "number":
        return draw(st.sampled_from([h5t.STD_I32LE, h5t.STD_U8LE, h5t.STD_I16BE]))
    if kind == "array":
        shape = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=2)))
        return h5t.array_create(draw(types(depth + 1)), shape)
    return compound(*[draw(types(depth + 1)) for _ in range(draw(st.integers(1, 3)))])


STORAGE = [
    {},
    {"chunks": (3, 2)},
    {"chunks": (4, 4), "filters": (1,)},
    {"chunks": (4, 1), "filters": (2, 1)},
    {"compact": True},
]


@pytest.mark.slow
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    stored=types(),
    storage=st.sampled_from(STORAGE),
    num_dim=st.integers(0, 1),
    seed=st.integers(0, 1 << 30),
)
def test_any_type(tmp_path_factory, stored, storage, num_dim, seed):
    path = tmp_path_factory.mktemp("text") / "a.h5"
    store(path, stored, (9, 4), seed, **storage)
    assert_reads_like_h5py(path, num_dim=num_dim)


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("nbytes", [1, 2, 300])
@pytest.mark.parametrize("shuffle", [False, "full", "window"])
def test_strings(tmp_path, padding, nbytes, shuffle):
    path = tmp_path / "a.h5"
    store(path, string(nbytes, padding), (3000,), chunks=(100,), filters=(1,))
    with h5py.File(path) as file:
        truth = file["data"][:]
    with AsyncReader(
        hdf5_path=path, labels_field=None, shuffle=shuffle, batch_size=999, device="cpu"
    ) as reader:
        for batch in reader:
            assert bits(batch.data) == bits(truth[batch.index])
        assert reader.fallback_reads == 0


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("fill", [b"ab", b"a  ", b"abcde"])
def test_fill_values(tmp_path, padding, fill):
    path = tmp_path / "a.h5"
    store(path, string(5, padding), (9, 4), chunks=(3, 2), fill=np.array(fill, "S5"))
    assert_reads_like_h5py(path)


@pytest.mark.parametrize("name", ["data/m0", "data/m1", "data/m2"])
def test_members(tmp_path, name):
    path = tmp_path / "a.h5"
    stored = compound(string(4, "term"), h5t.STD_I32LE, string(3, "space"))
    store(path, stored, (9,), chunks=(4,), filters=(1,))
    assert_reads_like_h5py(path, name=name)


@pytest.mark.parametrize("pads", [("term", "term"), ("space", "space")])
def test_files_whose_strings_end_alike(tmp_path, pads):
    paths = [tmp_path / f"{number}.h5" for number in range(2)]
    for number, (path, padding) in enumerate(zip(paths, pads, strict=True)):
        store(path, string(5, padding), (9,), number)
    assert_reads_like_h5py(paths)


@pytest.mark.parametrize("pads", [("term", "null"), ("null", "space"), ("space", "term")])
def test_files_whose_strings_end_otherwise(tmp_path, pads):
    """A NUL within a string that is padded with NULs must stay."""
    paths = [tmp_path / f"{number}.h5" for number in range(2)]
    for number, (path, padding) in enumerate(zip(paths, pads, strict=True)):
        store(path, string(5, padding), (9,), number)
    assert_reads_like_h5py(paths, direct=False)


@pytest.mark.parametrize("padding", ["term", "space"])
def test_sources_of_a_virtual_dataset(tmp_path, padding):
    store(tmp_path / "source.h5", string(5, padding), (9,))
    layout = h5py.VirtualLayout((9,), "S5")
    layout[:] = h5py.VirtualSource("source.h5", "data", (9,))
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_virtual_dataset("data", layout)
    assert_reads_like_h5py(tmp_path / "a.h5")


def test_gaps_between_members(tmp_path):
    path = tmp_path / "a.h5"
    store(path, compound(string(4, "term"), h5t.STD_I32LE, gap=3), (9,))
    with (
        h5py.File(path) as file,
        AsyncReader(hdf5_path=path, labels_field=None, num_threads=0) as reader,
    ):
        assert reader.layouts["data"].fallback_reason is None
        assert np.array_equal(reader.get_next_batch().data, file["data"][:])


@pytest.mark.parametrize("cache", [None, "host"])
@pytest.mark.parametrize("workers", ["thread", "process"])
def test_epochs_of_kept_samples(tmp_path, workers, cache):
    path = tmp_path / "a.h5"
    store(path, string(5, "term"), (50,))
    with h5py.File(path) as file:
        truth = file["data"][:]
    options = {"labels_field": None, "shuffle": "full", "device": "cpu", "num_threads": 2}
    with AsyncReader(
        hdf5_path=path, workers=workers, cache=cache, batch_size=8, **options
    ) as reader:
        for _ in range(3):
            for batch in reader:
                assert bits(batch.data) == bits(truth[batch.index])
        assert reader.fallback_reads == 0


@pytest.mark.parametrize("axes", [(0, 1, 2), (0, 2, 1), (2, 0, 1)])
def test_strings_that_are_permuted(tmp_path, axes):
    path = tmp_path / "a.h5"
    store(path, compound(string(3, "term"), h5t.STD_I16BE, string(2, "space")), (9, 4, 5))
    with h5py.File(path) as file:
        truth = file["data"][:].transpose(axes)
    truth = truth.astype(truth.dtype.newbyteorder("="))
    field = {"path": "data", "axes": axes, "num_dim": axes[0]}
    with AsyncReader(hdf5_path=path, fields={"x": field}, batch_size=9, device="cpu") as reader:
        assert bits(reader.get_next_batch().x) == bits(truth)
        assert reader.fallback_reads == 0
