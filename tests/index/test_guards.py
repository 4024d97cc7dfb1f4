"""HDF5's traps: files in which a careless reader finds wrong values, and no error.

Each file is made by a function named after its quirk. Where a guard of the library can be taken
away, a test does so and sees values or errors go wrong: so the test of that guard can fail.
"""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import math
import subprocess
import sys
import warnings
import zlib
from types import SimpleNamespace

import h5py
import numpy as np
import pytest
from cases import each
from conftest import SAMPLE, assert_reads_like_h5py, assert_same_bits, poison, truth
from corpus import float_of, integer_of
from h5py import h5d, h5p, h5s, h5t, h5z
from hdf5files import type_for_h5py

from h5async import AsyncReader, DatasetError, FileChangedWarning, ReadError, UnsafeFileError
from h5async.index import chunks, datasets, hdf5, metadata, virtual, visits
from h5async.index.layout import DatasetLayout
from h5async.index.links import Located, Reach
from h5async.read import fallback

HDF5 = ctypes.CDLL(h5py.h5p.__file__)
DONT_FILTER_PARTIAL_CHUNKS = 2
GZIP = {"compression": "gzip", "compression_opts": 1}
ALL_THREE = {"shuffle": True, "fletcher32": True, **GZIP}
SEED = 1969


# --- helpers -------------------------------------------------------------------------------------


def check(path, name="data", **options):
    """Compare with h5py along every dimension: all orders, in the caller and in threads.

    A sample of the tests reads in order in the caller, and shuffled in threads.
    """
    with h5py.File(path, "r") as file:
        rank = file[name].ndim
    caller, threads = {"num_threads": 0, "prefetch": 1, "batch_size": 3}, {"num_threads": 2}
    if SAMPLE != "all":
        caller["orders"], threads["orders"] = [False], ["full"]
    for num_dim in range(rank):
        for ways in (caller, threads):
            assert_reads_like_h5py(path, name, num_dim=num_dim, **ways, **options)


def reader_of(path, **options):
    options = {"labels_field": None, "num_threads": 0, "device": "cpu", **options}
    return AsyncReader(hdf5_path=path, **options)


def goes_wrong(path, **options):
    """Tell whether the direct way now gives wrong values or an error."""
    try:
        with reader_of(path, batch_size=10_000, **options) as reader:
            assert reader.layouts["data"].fallback_reason is None, "the guard is still there"
            poison(reader)
            found = reader.get_next_batch()["data"].copy()
    except ReadError:
        return True
    try:
        assert_same_bits(found, truth(path, options.get("data_field", "data")))
    except AssertionError:
        return True
    return False


@pytest.fixture
def no_rules(monkeypatch):
    """Take away the rules that send a dataset to h5py for its type, its index and so on."""
    monkeypatch.setattr(datasets.Indexer, "_require_direct", lambda *_: None)
    monkeypatch.setattr(chunks, "positions_of", lambda *_: None)


def raw_dataset(file, stored_type, values, *, plist=None, maxshape=None):
    """Store the bytes of `values` as elements of any HDF5 type."""
    space = h5s.create_simple(
        values.shape, maxshape and tuple(m or h5s.UNLIMITED for m in maxshape)
    )
    dataset = h5d.create(file.id, b"data", stored_type, space, plist)
    dataset.write(h5s.ALL, h5s.ALL, values, mtype=stored_type)
    return dataset


def dataset_plist(chunks=None, filters=()):
    plist = h5p.create(h5p.DATASET_CREATE)
    if chunks:
        plist.set_chunk(chunks)
    for number in filters:
        plist.set_filter(number, h5z.FLAG_OPTIONAL, (1,) if number == h5z.FILTER_DEFLATE else ())
    return plist


def no_library(monkeypatch):
    """Let HDF5 answer nothing but what h5py asks it."""
    monkeypatch.setattr(hdf5, "hdf5_function", lambda name, *types: None)


def encoded_by_hdf5(values, **options):
    """Return the stored bytes of a chunk of `values`."""
    with h5py.File("encoder", "w", driver="core", backing_store=False) as file:
        dataset = file.create_dataset("x", data=values, chunks=values.shape, **options)
        file.flush()
        mask, encoded = dataset.id.read_direct_chunk((0,) * values.ndim)
        assert mask == 0
        return encoded


def numbers(*shape, dtype="i4"):
    """Return values that all differ, none of them zero; eight bytes each, LZF compresses them."""
    return (1 + np.arange(math.prod(shape))).reshape(shape).astype(dtype)


# --- trap 1: wrong chunk coordinates -------------------------------------------------------------


def only_one_axis_is_unlimited(path, axis, shape=(4, 9, 5), libver="latest", **options):
    chunks = tuple(min(2 + a, extent) for a, extent in enumerate(shape))
    maxshape = tuple(None if a == axis else extent for a, extent in enumerate(shape))
    with h5py.File(path, "w", libver=libver) as file:
        dataset = file.create_dataset(
            "data", data=numbers(*shape), chunks=chunks, maxshape=maxshape, **options
        )
        return index_type(dataset)


def chunk_that_is_reported_in_another_place(path, libver="latest"):
    """The one chunk that was written is reported at (0, 2), which exists too."""
    with h5py.File(path, "w", libver=libver) as file:
        dataset = file.create_dataset("data", (8, 8), "i4", chunks=(2, 2), maxshape=(8, None))
        dataset[2:4, 0:2] = 1


@pytest.mark.parametrize("options", [{}, GZIP, ALL_THREE])
@pytest.mark.parametrize("axis", [1, 2])
@pytest.mark.parametrize("libver", ["v110", "latest"])
def test_extensible_index_of_another_axis_is_read_directly(tmp_path, libver, axis, options):
    path = tmp_path / "a.h5"
    kind = only_one_axis_is_unlimited(path, axis, libver=libver, **options)
    assert kind == EXTENSIBLE_ARRAY
    check(path)


@pytest.mark.parametrize("axis", [1, 2])
def test_extensible_index_that_another_hdf5_reports_otherwise(tmp_path, monkeypatch, axis):
    path = tmp_path / "a.h5"
    only_one_axis_is_unlimited(path, axis)
    monkeypatch.setattr(visits, "_counts_positions", lambda: False)
    check(path, fallback=f"only dimension {axis} is unlimited")


@pytest.mark.parametrize("options", [{}, GZIP, ALL_THREE])
@pytest.mark.parametrize("axis", [1, 2])
@pytest.mark.parametrize("libver", ["earliest", ("earliest", "v108")])
def test_b_tree_of_another_axis_is_read_directly(tmp_path, libver, axis, options):
    """Its chunks are where it says, whichever dimension may grow."""
    path = tmp_path / "a.h5"
    assert only_one_axis_is_unlimited(path, axis, libver=libver, **options) == B_TREE_1
    check(path)


def test_chunk_in_a_b_tree_is_not_misplaced(tmp_path):
    path = tmp_path / "a.h5"
    chunk_that_is_reported_in_another_place(path, libver="earliest")
    check(path)


@pytest.mark.parametrize("libver", ["earliest", "latest"])
def test_index_whose_kind_hdf5_does_not_tell_is_left_to_h5py(tmp_path, monkeypatch, libver):
    path = tmp_path / "a.h5"
    only_one_axis_is_unlimited(path, 1, libver=libver)
    no_library(monkeypatch)
    check(path, fallback="only dimension 1 is unlimited")


def test_extensible_index_of_axis_0_is_read_directly(tmp_path):
    path = tmp_path / "a.h5"
    assert only_one_axis_is_unlimited(path, 0) == EXTENSIBLE_ARRAY
    check(path)


def test_misplaced_chunk(tmp_path):
    path = tmp_path / "a.h5"
    chunk_that_is_reported_in_another_place(path)
    check(path)


def test_misplaced_chunk_unguarded(tmp_path, no_rules):
    path = tmp_path / "a.h5"
    chunk_that_is_reported_in_another_place(path)
    assert goes_wrong(path)


def test_chunks_outside_the_dataset_are_a_second_sign(tmp_path, no_rules):
    path = tmp_path / "a.h5"
    only_one_axis_is_unlimited(path, 1)
    check(path, fallback="reports chunks outside the dataset")


# --- trap 2: unfiltered edge chunks --------------------------------------------------------------


def unfiltered_edge_chunks(
    path, filters, *, flag=DONT_FILTER_PARTIAL_CHUNKS, shape=(7, 5), maxshape=None, libver="latest"
):
    plist = dataset_plist((3, 2), filters)
    assert HDF5.H5Pset_chunk_opts(ctypes.c_int64(plist.id), ctypes.c_uint(flag)) >= 0
    with h5py.File(path, "w", libver=libver) as file:
        raw_dataset(file, h5t.STD_I32LE, numbers(*shape), plist=plist, maxshape=maxshape)


EDGE_FILTERS = {
    "shuffle": (h5z.FILTER_SHUFFLE,),  # its chunks are of equal size, encoded or not
    "gzip": (h5z.FILTER_DEFLATE,),
    "lzf": (h5z.FILTER_LZF,),
    "fletcher32": (h5z.FILTER_FLETCHER32,),
    "three": (h5z.FILTER_SHUFFLE, h5z.FILTER_DEFLATE, h5z.FILTER_FLETCHER32),
}


@each("libver", ["earliest", "latest"])
@pytest.mark.parametrize("filters", EDGE_FILTERS.values(), ids=EDGE_FILTERS)
def test_unfiltered_edge_chunks(tmp_path, filters, libver):
    path = tmp_path / "a.h5"
    unfiltered_edge_chunks(path, filters, libver=libver)
    with h5py.File(path) as file:
        edge = file["data"].id.get_chunk_info_by_coord((6, 4))
        assert (edge.size, edge.filter_mask) == (24, 0), "stored raw, and said to be filtered"
    check(path)


@pytest.mark.parametrize("filters", EDGE_FILTERS.values(), ids=EDGE_FILTERS)
def test_filtered_edge_chunks(tmp_path, filters):
    path = tmp_path / "a.h5"
    unfiltered_edge_chunks(path, filters, flag=0)
    check(path)


@pytest.mark.parametrize("filters", EDGE_FILTERS.values(), ids=EDGE_FILTERS)
def test_unfiltered_edge_chunks_unguarded(tmp_path, monkeypatch, filters):
    path = tmp_path / "a.h5"
    unfiltered_edge_chunks(path, filters)
    monkeypatch.setattr(hdf5.Opened, "edges_are_raw", False)
    assert goes_wrong(path)


@pytest.mark.parametrize("now", [(9, 6), (8, 6), (12, 12), (6, 4), (4, 3)])
def test_edge_chunks_that_were_resized(tmp_path, now):
    """What was an edge becomes whole, and the other way round."""
    path = tmp_path / "a.h5"
    unfiltered_edge_chunks(path, EDGE_FILTERS["three"], maxshape=(None, None))
    with h5py.File(path, "r+") as file:
        file["data"].resize(now)
    check(path)


@pytest.mark.parametrize("filters", EDGE_FILTERS.values(), ids=EDGE_FILTERS)
def test_edge_chunks_go_to_h5py_where_hdf5_does_not_tell(tmp_path, monkeypatch, filters):
    path = tmp_path / "a.h5"
    unfiltered_edge_chunks(path, filters)
    no_library(monkeypatch)
    check(path, fallback="HDF5 gives no result for H5Pget_chunk_opts")


# --- trap 3: what looks unallocated --------------------------------------------------------------


def external_storage(path):
    values = numbers(6, 4)
    (path.parent / "values.raw").write_bytes(b"head" + values.tobytes())
    with h5py.File(path, "w") as file:
        file.create_dataset(
            "data", (6, 4), "i4", external=[(path.parent / "values.raw", 4, values.nbytes)]
        )


def virtual_dataset(path):
    sources = h5py.VirtualLayout((6, 4), "i4", maxshape=(None, 4))
    for half in range(2):
        source = path.parent / f"half{half}.h5"
        with h5py.File(source, "w") as file:
            file["x"] = numbers(3, 4) * (half + 1)
        sources[3 * half : 3 * half + 3] = h5py.VirtualSource(source, "x", (3, 4))
    with h5py.File(path, "w", libver="latest") as file:
        file.create_virtual_dataset("data", sources, fillvalue=-7)


def virtual_dataset_without_its_sources(path):
    virtual_dataset(path)
    (path.parent / "half1.h5").unlink()


def compact_storage(path):
    plist = dataset_plist()
    plist.set_layout(h5d.COMPACT)
    with h5py.File(path, "w") as file:
        raw_dataset(file, h5t.STD_I32LE, numbers(6, 4), plist=plist)


LOOKS_UNALLOCATED = {  # how it is made -> what the reader must be told
    external_storage: lambda folder: {"allow_external": [folder]},
    virtual_dataset: lambda folder: {},
    virtual_dataset_without_its_sources: lambda folder: {"allow_missing": True},
    compact_storage: lambda folder: {},
}


@pytest.mark.parametrize(("make", "options"), LOOKS_UNALLOCATED.items())
def test_what_looks_unallocated_is_read_directly(tmp_path, make, options):
    path = tmp_path / "a.h5"
    make(path)
    check(path, **options(tmp_path))


@pytest.mark.parametrize("make", LOOKS_UNALLOCATED)
def test_what_looks_unallocated_unguarded(tmp_path, monkeypatch, make):
    path = tmp_path / "a.h5"
    make(path)
    monkeypatch.setattr(datasets, "_storage", lambda plist: "contiguous")
    assert goes_wrong(path)


def test_external_storage_is_read_only_where_it_is_allowed(tmp_path):
    """A file must not make its reader deliver any other file of the machine."""
    path = tmp_path / "a.h5"
    external_storage(path)
    for roots in ([], [tmp_path / "elsewhere"]):
        with pytest.raises(UnsafeFileError, match=r'"data".*values\.raw'):
            reader_of(path, allow_external=roots)


def test_external_storage_that_is_short(tmp_path):
    """HDF5 puts zeros for what is missing."""
    path = tmp_path / "a.h5"
    external_storage(path)
    with (tmp_path / "values.raw").open("r+b") as file:
        file.truncate(4 + 3 * 16)
    assert not truth(path)[3:].any()
    with pytest.raises(ReadError, match=r'"data".*values\.raw, which has 52 bytes'):
        reader_of(path, allow_external=[tmp_path])


# --- virtual datasets ----------------------------------------------------------------------------


def virtual_of(path, shape, dtype, pairs, **options):
    """Sources are given as (where they go, values), each in a file of its own."""
    sources = h5py.VirtualLayout(shape, dtype)
    for number, (where, values) in enumerate(pairs):
        source = path.parent / f"source{number}.h5"
        with h5py.File(source, "w") as file:
            file["x"] = values
        sources[where] = h5py.VirtualSource(source, "x", values.shape)
    with h5py.File(path, "w", libver="latest") as file:
        file.create_virtual_dataset("data", sources, **options)


def virtual_with_gaps(path):
    """Neither all samples nor all of a sample is mapped."""
    pairs = [(np.s_[0:2, 1:4], numbers(2, 3)), (np.s_[4:6, 1:4], -numbers(2, 3))]
    virtual_of(path, (8, 5), "i4", pairs, fillvalue=-7)


def virtual_whose_sources_overlap(path):
    """The source that is mapped last wins, and its samples come first."""
    pairs = [(np.s_[2:6, :], numbers(4, 5)), (np.s_[0:4, :], -numbers(4, 5))]
    virtual_of(path, (6, 5), "i4", pairs)


def virtual_that_narrows(path):
    """To HDF5, what is too large is the largest there is; to NumPy, its low bits."""
    virtual_of(path, (4, 5), "i2", [(np.s_[:], numbers(4, 5) * 70_000)])


def test_source_that_is_missing(tmp_path):
    """HDF5 says nothing, and gives the fill value."""
    path = tmp_path / "a.h5"
    virtual_dataset_without_its_sources(path)
    assert (truth(path)[3:] == -7).all()
    with pytest.raises(DatasetError, match=r'"data".*half1\.h5, which is missing.*allow_missing'):
        reader_of(path)


def test_virtual_with_gaps(tmp_path):
    path = tmp_path / "a.h5"
    virtual_with_gaps(path)
    check(path)


def test_virtual_with_gaps_unguarded(tmp_path, monkeypatch):
    path = tmp_path / "a.h5"
    virtual_with_gaps(path)
    monkeypatch.setattr(DatasetLayout, "has_gaps", False)
    assert goes_wrong(path)


VIRTUAL_GUARDS = [
    (virtual_whose_sources_overlap, "_require_disjoint", "mappings overlap"),
    (virtual_that_narrows, "_require_convertible", "int16 whose source has int32"),
]


@pytest.mark.parametrize(("make", "_", "reason"), VIRTUAL_GUARDS)
def test_virtual_that_is_left_to_h5py(tmp_path, make, _, reason):
    path = tmp_path / "a.h5"
    make(path)
    check(path, fallback=reason)


@pytest.mark.parametrize(("make", "guard", "_"), VIRTUAL_GUARDS)
def test_virtual_unguarded(tmp_path, monkeypatch, make, guard, _):
    path = tmp_path / "a.h5"
    make(path)
    monkeypatch.setattr(virtual, guard, lambda *_: None)
    assert goes_wrong(path)


# --- trap 4: chunks of a wrong length; damaged chunks --------------------------------------------

ROWS, COLUMNS, DAMAGED = 4, 50, 2  # of a chunk; the chunk that is not well


def chunk_that_was_replaced(path, replace, **options):
    """Three chunks of four rows; the last one is made anew from its values by `replace`."""
    values = numbers(12, COLUMNS, dtype="i8")
    with h5py.File(path, "w") as file:
        dataset = file.create_dataset("data", data=values, chunks=(ROWS, COLUMNS), **options)
        chunk = values[DAMAGED * ROWS :]
        dataset.id.write_direct_chunk((DAMAGED * ROWS, 0), replace(np.ascontiguousarray(chunk)))


def short(**options):
    return lambda values: encoded_by_hdf5(values[:-1], **options)


def long(**options):
    return lambda values: encoded_by_hdf5(np.concatenate([values, values]), **options)


def with_a_flipped_byte(at, **options):
    def flip(values):
        encoded = bytearray(encoded_by_hdf5(values, **options))
        encoded[at] ^= 0x55
        return bytes(encoded)

    return flip


def cut_off(**options):
    return lambda values: encoded_by_hdf5(values, **options)[:-7]


LZF = {"compression": "lzf"}
SHUFFLE = {"shuffle": True}
FLETCHER = {"fletcher32": True}
PIPELINES = {"gzip": GZIP, "lzf": LZF, "shuffle": SHUFFLE, "fletcher32": FLETCHER, "3": ALL_THREE}
DAMAGES = {
    **{f"{name} too short": (short(**o), o, ".") for name, o in PIPELINES.items()},
    **{f"{name} too long": (long(**o), o, ".") for name, o in PIPELINES.items()},
    **{f"{name} cut off": (cut_off(**o), o, ".") for name, o in PIPELINES.items()},
    "checksum of fletcher32": (with_a_flipped_byte(-1, **FLETCHER), FLETCHER, "fletcher32"),
    "value under fletcher32": (with_a_flipped_byte(3, **FLETCHER), FLETCHER, "fletcher32"),
    "header of gzip": (with_a_flipped_byte(0, **GZIP), GZIP, "."),
    "checksum of gzip": (with_a_flipped_byte(-1, **GZIP), GZIP, "."),
    "inside of three": (with_a_flipped_byte(9, **ALL_THREE), ALL_THREE, "fletcher32"),
    "no gzip at all": (lambda values: b"\0" * 30, GZIP, "."),
    "no lzf at all": (lambda values: b"\xff" * 30, LZF, "."),
    "gzip of nothing": (lambda values: zlib.compress(b""), GZIP, "."),
}


def assert_only_the_damaged_chunk_fails(path, message, **options):
    expected = numbers(12, COLUMNS, dtype="i8")
    with reader_of(path, batch_size=ROWS, **options) as reader:
        poison(reader)
        assert reader.layouts["data"].fallback_reason is None
        for _ in range(2):
            for number in range(3):
                if number == DAMAGED:
                    with pytest.raises(ReadError, match=message) as caught:
                        reader.get_next_batch()
                    text = str(caught.value)
                    assert str(path) in text
                    assert '"data"' in text
                    assert f"chunk ({DAMAGED * ROWS}, 0)" in text
                    assert f"samples {DAMAGED * ROWS} to {DAMAGED * ROWS + ROWS - 1}" in text
                    assert pickled_text(caught.value) == text
                else:
                    batch = reader.get_next_batch()
                    assert_same_bits(batch.data, expected[batch.index])
        assert reader.fallback_reads == 0


def pickled_text(error):
    import pickle

    return str(pickle.loads(pickle.dumps(error)))


@pytest.mark.parametrize(("replace", "options", "message"), DAMAGES.values(), ids=DAMAGES)
@each("num_threads", [0, 2])
def test_damaged_chunk(tmp_path, replace, options, message, num_threads):
    path = tmp_path / "a.h5"
    chunk_that_was_replaced(path, replace, **options)
    assert_only_the_damaged_chunk_fails(path, message, num_threads=num_threads)


def test_a_long_chunk_is_no_error_to_hdf5(tmp_path):
    path = tmp_path / "a.h5"
    chunk_that_was_replaced(path, long(**GZIP), **GZIP)
    assert np.array_equal(truth(path), numbers(12, COLUMNS, dtype="i8"))


def test_unfiltered_chunk_that_is_too_short(tmp_path):
    """A version 1 B-tree says of each chunk how long it is."""
    path = tmp_path / "a.h5"
    chunk_that_was_replaced(path, lambda values: values.tobytes()[:40])
    with (
        pytest.raises(ReadError, match="got 40"),
        reader_of(path, batch_size=12) as reader,
    ):
        reader.get_next_batch()


@each("batch_size", [2, 4, 12])
@each("columns", [COLUMNS, 20])
@each("change", [-8, 8])
def test_masked_chunk_of_another_length(tmp_path, change, columns, batch_size):
    """No filter was applied to it, so no decoder sees that its length is wrong."""
    path = tmp_path / "a.h5"
    values = numbers(12, COLUMNS, dtype="i8")
    with h5py.File(path, "w") as file:
        dataset = file.create_dataset("data", data=values, chunks=(ROWS, columns), **GZIP)
        chunk = values[:ROWS, :columns].tobytes()
        chunk = chunk[:change] if change < 0 else chunk + bytes(change)
        dataset.id.write_direct_chunk((0, 0), chunk, 1)
    message = rf"chunk \(0, 0\).* expected \d+ bytes, got {len(chunk)}"
    with reader_of(path, batch_size=batch_size) as reader:
        poison(reader)
        with pytest.raises(ReadError, match=message):
            reader.get_next_batch()


def test_bytes_after_the_end_of_gzip_are_ignored(tmp_path):
    path = tmp_path / "a.h5"
    chunk_that_was_replaced(path, lambda v: encoded_by_hdf5(v, **GZIP) + b"junk", **GZIP)
    check(path)


# --- trap 4, where elements are converted: HDF5 does not notice a short chunk ---------------------

SHORT_ROWS, SHORT_COLUMNS = 4, 64  # of a chunk: large enough for HDF5 to reuse memory


ONLY_H5PY = {  # stored type, and what makes elements of it out of small numbers
    "enum of 40 bits": (lambda: type_for_h5py(40, h5t.STD_U64LE).id, lambda n: n.astype("<u8")),
    "enum of 12 bits": (lambda: type_for_h5py(12, h5t.STD_U16LE).id, lambda n: n.astype("<u2")),
}
BY_CORE = {
    "40 bits": (lambda: integer_of(h5t.STD_U64LE, 40), lambda n: n.astype("<u8")),
    "bfloat16": (lambda: float_of(2, 8, 7, 127), lambda n: (0x4000 + n).astype("<u2")),
    "12 bits": (lambda: integer_of(h5t.STD_U16LE, 12), lambda n: n.astype("<u2")),
}
CONVERTED = ONLY_H5PY | BY_CORE


def reason_of(name):
    return DIFFERS if name in ONLY_H5PY else None


def stored_with_conversion(path, name, filters, damage=lambda encoded, elements: encoded):
    """Three chunks of elements to convert; the last one as `damage` makes it."""
    make_type, element = CONVERTED[name]
    elements = element(1 + np.arange(3 * SHORT_ROWS * SHORT_COLUMNS))
    elements = elements.reshape(3 * SHORT_ROWS, SHORT_COLUMNS)
    plist = dataset_plist((SHORT_ROWS, SHORT_COLUMNS), filters)
    with h5py.File(path, "w") as file:
        dataset = raw_dataset(
            file, make_type(), elements.view(f"V{elements.itemsize}"), plist=plist
        )
    with h5py.File(path, "r+") as file:
        dataset = file["data"].id
        corner = (DAMAGED * SHORT_ROWS, 0)
        mask, encoded = dataset.read_direct_chunk(corner)
        damaged = damage(encoded, elements[corner[0] :])
        dataset.write_direct_chunk(corner, damaged, mask)


def half_of_the_rows(encoded, elements):
    return zlib.compress(elements[: SHORT_ROWS // 2].tobytes())


def twice_the_rows(encoded, elements):
    return zlib.compress(np.concatenate([elements, elements]).tobytes())


ONLY_GZIP = (h5z.FILTER_DEFLATE,)


@each("num_threads", [0, 2])
@each("damage", [half_of_the_rows, twice_the_rows])
@pytest.mark.parametrize("name", CONVERTED)
def test_converted_chunk_of_wrong_length(tmp_path, name, damage, num_threads):
    path = tmp_path / "a.h5"
    stored_with_conversion(path, name, ONLY_GZIP, damage)
    expected = truth(path)  # no error; what is wrong comes last
    with reader_of(path, batch_size=SHORT_ROWS, num_threads=num_threads) as reader:
        assert (reader.layouts["data"].fallback_reason is None) == (name in BY_CORE)
        poison(reader)
        for _ in range(2):
            for number in range(3):
                if number == DAMAGED:
                    with pytest.raises(ReadError, match=r'"data".* chunk \(8, 0\)') as caught:
                        reader.get_next_batch()
                    assert str(path) in str(caught.value)
                    assert "samples 8 to 11" in str(caught.value)
                else:
                    batch = reader.get_next_batch()
                    assert_same_bits(batch.data, expected[batch.index])


@pytest.mark.slow
@each("shuffle", [False, "full"])
@each("filters", [ONLY_GZIP, EDGE_FILTERS["three"], EDGE_FILTERS["lzf"]])
@pytest.mark.parametrize("name", CONVERTED)
def test_sound_converted_chunks(tmp_path, name, filters, shuffle):
    path = tmp_path / "a.h5"
    stored_with_conversion(path, name, filters)
    check(path, fallback=reason_of(name))


@pytest.mark.parametrize("name", ONLY_H5PY)
def test_short_chunk_that_h5py_reads_unguarded(tmp_path, monkeypatch, name):
    """Its second half is what HDF5's heap held: no error comes, and no value that was written."""
    path = tmp_path / "a.h5"
    stored_with_conversion(path, name, ONLY_GZIP)
    right = truth(path)
    stored_with_conversion(path, name, ONLY_GZIP, half_of_the_rows)
    monkeypatch.setattr(fallback.ChunkCheck, "of", lambda *_: None)
    with reader_of(path, batch_size=12) as reader:
        found = reader.get_next_batch().data
        assert_same_bits(found[:-2], right[:-2])
        assert found[-2:].tobytes() != right[-2:].tobytes()


def test_each_chunk_that_h5py_reads_is_checked_once(tmp_path, monkeypatch):
    path = tmp_path / "a.h5"
    stored_with_conversion(path, "enum of 40 bits", ONLY_GZIP)
    checked = []
    check_chunk = fallback.ChunkCheck._check

    def count(self, dataset, corner, *memory):
        checked.append(corner)
        check_chunk(self, dataset, corner, *memory)

    monkeypatch.setattr(fallback.ChunkCheck, "_check", count)
    with reader_of(path, batch_size=3, shuffle="full") as reader:
        for _ in range(3):
            assert len(list(reader)) == 4
    assert sorted(checked) == [(0, 0), (SHORT_ROWS, 0), (2 * SHORT_ROWS, 0)]


@pytest.mark.slow
@each("name", CONVERTED)
@pytest.mark.parametrize("filters", EDGE_FILTERS.values(), ids=EDGE_FILTERS)
def test_converted_raw_edge_chunks(tmp_path, filters, name):
    """They are not filtered, whatever their mask says: no check may take them for damaged."""
    path = tmp_path / "a.h5"
    plist = dataset_plist((3, 2), filters)
    options = ctypes.c_int64(plist.id), ctypes.c_uint(DONT_FILTER_PARTIAL_CHUNKS)
    assert HDF5.H5Pset_chunk_opts(*options) >= 0
    make_type, element = CONVERTED[name]
    elements = element(numbers(7, 5))
    with h5py.File(path, "w", libver="latest") as file:
        raw_dataset(file, make_type(), elements.view(f"V{elements.itemsize}"), plist=plist)
    check(path, fallback=reason_of(name))


class UnluckyDataset:
    """A dataset's identifier. Of a chunk that was never written, h5py does not learn the length.

    It then takes memory for whatever number its own happened to hold: often far too much.
    """

    def __init__(self, identifier):
        self._id = identifier

    def __getattr__(self, name):
        return getattr(self._id, name)

    def read_direct_chunk(self, corner):
        if self._id.get_chunk_info_by_coord(corner).byte_offset is None:
            raise MemoryError
        return self._id.read_direct_chunk(corner)


@pytest.mark.slow
@each("written", [0, 5])
@each("shape", [(12,), (12, 5), (12, 1, 5)])
@each("name", CONVERTED)
@pytest.mark.parametrize("filters", [ONLY_GZIP, EDGE_FILTERS["lzf"]], ids=["gzip", "lzf"])
def test_converted_unwritten_chunks(tmp_path, monkeypatch, filters, name, shape, written):
    path = tmp_path / "a.h5"
    plist = dataset_plist((2, *(3 if n > 1 else 1 for n in shape[1:])), filters)
    with h5py.File(path, "w") as file:
        stored = CONVERTED[name][0]()
        h5d.create(file.id, b"data", stored, h5s.create_simple(shape), plist)
        file["data"][:written] = 7
    run = fallback.ChunkCheck.run
    monkeypatch.setattr(
        fallback.ChunkCheck,
        "run",
        lambda self, dataset, *rest: run(
            self, SimpleNamespace(id=UnluckyDataset(dataset.id)), *rest
        ),
    )
    check(path, fallback=reason_of(name))


# --- filter masks of single chunks ---------------------------------------------------------------


def every_filter_mask(path, *, compression):
    """Eight chunks, each with another of the eight masks of three filters."""
    with h5py.File(path, "w") as file:
        dataset = file.create_dataset(
            "data", (24, 60), "i8", chunks=(3, 60), shuffle=True, fletcher32=True, **compression
        )
        for mask, values in enumerate(numbers(8, 3, 60, dtype="i8")):
            kept = {} if mask & 1 else dict(SHUFFLE)
            kept |= {} if mask & 2 else compression
            kept |= {} if mask & 4 else FLETCHER
            dataset.id.write_direct_chunk((3 * mask, 0), encoded_by_hdf5(values, **kept), mask)
        plist = dataset.id.get_create_plist()
        assert plist.get_nfilters() == 3
        assert plist.get_filter(2)[0] == h5z.FILTER_FLETCHER32


@pytest.mark.parametrize("compression", [GZIP, LZF])
def test_filter_masks(tmp_path, compression):
    path = tmp_path / "a.h5"
    every_filter_mask(path, compression=compression)
    assert np.array_equal(truth(path), numbers(24, 60))
    check(path)


def test_filter_masks_unguarded(tmp_path, monkeypatch):
    path = tmp_path / "a.h5"
    every_filter_mask(path, compression=GZIP)
    read_chunk_table = chunks.read_chunk_table

    def without_masks(*args):
        table = read_chunk_table(*args)
        return dataclasses.replace(table, filter_mask=np.zeros_like(table.filter_mask))

    monkeypatch.setattr(chunks, "read_chunk_table", without_masks)
    assert goes_wrong(path)


def test_bits_of_filters_that_are_not_there_are_ignored(tmp_path):
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        dataset = file.create_dataset("data", (4, 6), "i4", chunks=(4, 6), **GZIP)
        encoded = encoded_by_hdf5(numbers(4, 6), **GZIP)
        dataset.id.write_direct_chunk((0, 0), encoded, 0xFFFFFFFE)
    assert np.array_equal(truth(path), numbers(4, 6))
    check(path)


def test_hdf5_itself_masks_what_does_not_compress(tmp_path):
    path = tmp_path / "a.h5"
    noise = np.random.default_rng(SEED).integers(0, 256, (12, 600), np.uint8)
    noise[::2] = 1
    with h5py.File(path, "w") as file:
        file.create_dataset("data", data=noise, chunks=(1, 600), **LZF)
    with h5py.File(path) as file:
        masks = [file["data"].id.get_chunk_info(i).filter_mask for i in range(12)]
    assert set(masks) == {0, 1}
    check(path)


# --- fill values ---------------------------------------------------------------------------------


def partly_written(path, *, fill_time, fill, chunks=(2, 5), filters=(), written=5):
    """Only the first rows were ever written."""
    plist = dataset_plist(chunks, filters)
    plist.set_fill_time(fill_time)
    if fill is None:
        undefine_fill_value(plist)
    else:
        plist.set_fill_value(np.array(fill, "i4"))
    with h5py.File(path, "w") as file:
        h5d.create(file.id, b"data", h5t.STD_I32LE, h5s.create_simple((12, 5)), plist)
        if written:
            file["data"][:written] = numbers(written, 5)


def undefine_fill_value(plist):
    args = ctypes.c_int64(plist.id), ctypes.c_int64(h5t.STD_I32LE.id), None
    assert HDF5.H5Pset_fill_value(*args) >= 0
    assert plist.fill_value_defined() == h5d.FILL_VALUE_UNDEFINED


FILLS = {
    "never": {"fill_time": h5d.FILL_TIME_NEVER, "fill": -7},
    "undefined": {"fill_time": h5d.FILL_TIME_IFSET, "fill": None},
    "if set": {"fill_time": h5d.FILL_TIME_IFSET, "fill": -7},
    "at allocation": {"fill_time": h5d.FILL_TIME_ALLOC, "fill": -7},
}
FILL_LAYOUTS = {
    "rows": {},
    "split rows": {"chunks": (2, 3)},
    "gzip": {"filters": (h5z.FILTER_DEFLATE,)},
    "split gzip": {"chunks": (2, 3), "filters": (h5z.FILTER_DEFLATE,)},
}


@pytest.mark.parametrize("how", FILL_LAYOUTS.values(), ids=FILL_LAYOUTS)
@each("fill", FILLS.values())
def test_unwritten_samples(tmp_path, fill, how):
    path = tmp_path / "a.h5"
    partly_written(path, **fill, **how)
    check(path)


@pytest.mark.parametrize("chunks", [None, (2, 5), (2, 3)])
@each("fill", FILLS.values())
def test_dataset_that_was_never_written(tmp_path, fill, chunks):
    path = tmp_path / "a.h5"
    partly_written(path, **fill, chunks=chunks, written=0)
    if fill["fill"] is None:
        with pytest.raises(OSError, match="no data can be read"):
            truth(path)
        with reader_of(path) as reader, pytest.raises(ReadError, match="no data can be read"):
            reader.get_next_batch()
    else:
        check(path)


@pytest.mark.parametrize("how", FILL_LAYOUTS.values(), ids=FILL_LAYOUTS)
@each("num_threads", [0, 1])
def test_rows_of_older_batches_do_not_leak(tmp_path, how, num_threads):
    """One slot for all batches: the first ones hold values, the later ones none."""
    path = tmp_path / "a.h5"
    partly_written(path, **FILLS["never"], **how)
    with reader_of(path, batch_size=4, prefetch=1, num_threads=num_threads) as reader:
        batches = [batch.copy() for batch in reader]
    assert batches[0].data.all()
    assert not batches[2].data.any()


def test_fill_time_never_unguarded(tmp_path, monkeypatch):
    path = tmp_path / "a.h5"
    partly_written(path, **FILLS["never"])
    monkeypatch.setattr(datasets, "fill_value", lambda *_: np.asarray(-7, "i4"))
    assert goes_wrong(path)


def test_fill_value_of_an_array_type_is_left_to_h5py(tmp_path):
    path = tmp_path / "a.h5"
    stored = h5t.array_create(h5t.STD_I32LE, (2,))
    plist = dataset_plist((2,))
    fill = np.array([3, 4], "i4")
    ids = [ctypes.c_int64(i) for i in (plist.id, stored.id)]
    assert HDF5.H5Pset_fill_value(*ids, fill.ctypes.data_as(ctypes.c_void_p)) >= 0
    with h5py.File(path, "w") as file:
        h5d.create(file.id, b"data", stored, h5s.create_simple((5,)), plist)
    assert truth(path)[4].tolist() == [3, 4]
    check(path, fallback="an array type with a fill value")


# --- where the dataset lies: user blocks and links -----------------------------------------------


@pytest.mark.parametrize("libver", ["earliest", "latest"])
@pytest.mark.parametrize("fillvalue", [None, 7])
def test_values_that_were_never_written_behind_a_user_block(tmp_path, libver, fillvalue):
    """HDF5 says that they begin one byte before the end of the user block."""
    path = tmp_path / "a.h5"
    with h5py.File(path, "w", userblock_size=1024, libver=libver) as file:
        data = file.create_dataset("data", (7, 5), "i4", fillvalue=fillvalue)
        assert data.id.get_offset() == 1023
        assert data.id.get_storage_size() == 0
    check(path)


def external_links(path):
    """Leads to another file, in which the dataset lies elsewhere; here there are values too."""
    with h5py.File(path.parent / "other.h5", "w") as file:
        file["padding"] = numbers(500)
        file["group/x"] = -numbers(7, 5)
    with h5py.File(path, "w") as file:
        file["here"] = numbers(4000)
        file["link"] = h5py.ExternalLink("other.h5", "/group/x")
        file["ext_group"] = h5py.ExternalLink("other.h5", "/group")
        file["soft"] = h5py.SoftLink("/ext_group/x")


EXTERNAL_LINKS = ["link", "ext_group/x", "soft"]


@pytest.mark.parametrize("name", EXTERNAL_LINKS)
def test_external_link(tmp_path, name):
    path = tmp_path / "a.h5"
    external_links(path)
    check(path, name)


@pytest.mark.parametrize("name", EXTERNAL_LINKS)
def test_external_link_unguarded(tmp_path, monkeypatch, name):
    """HDF5 follows the link, and tells where the bytes lie: in which file it does not say."""
    path = tmp_path / "a.h5"
    external_links(path)

    def unguarded(file, path, *_):
        return Located(file, path, (), file.id, path.encode())

    monkeypatch.setattr(metadata, "locate", unguarded)
    assert goes_wrong(path, data_field=name)


def links_to_elsewhere(path):
    """The file lies in a directory; what a link and a virtual dataset lead to does not."""
    path.parent.mkdir()
    elsewhere = path.parent.parent / "elsewhere.h5"
    with h5py.File(elsewhere, "w") as file:
        file["x"] = numbers(7, 5)
    (path.parent / "symbolic.h5").symlink_to(elsewhere)
    with h5py.File(path, "w") as file:
        file["relative"] = h5py.ExternalLink("../elsewhere.h5", "x")
        file["absolute"] = h5py.ExternalLink(elsewhere, "x")
        file["symbolic"] = h5py.ExternalLink("symbolic.h5", "x")
        file["soft"] = h5py.SoftLink("/absolute")
        sources = h5py.VirtualLayout((7, 5), "i4")
        sources[...] = h5py.VirtualSource(elsewhere, "x", (7, 5))
        file.create_virtual_dataset("virtual", sources)


LINKS_TO_ELSEWHERE = ["relative", "absolute", "symbolic", "soft", "virtual"]


@pytest.mark.parametrize("name", LINKS_TO_ELSEWHERE)
def test_other_files_are_read_only_where_they_are_allowed(tmp_path, name):
    path = tmp_path / "here" / "a.h5"
    links_to_elsewhere(path)
    assert np.array_equal(truth(path, name), numbers(7, 5)), "HDF5 reads any file"
    with pytest.raises(UnsafeFileError, match=r"elsewhere\.h5, which is not beside"):
        reader_of(path, data_field=name)
    check(path, name, allow_external=[tmp_path])


@pytest.mark.parametrize("name", LINKS_TO_ELSEWHERE)
def test_other_files_unguarded(tmp_path, monkeypatch, name):
    path = tmp_path / "here" / "a.h5"
    links_to_elsewhere(path)
    monkeypatch.setattr(Reach, "permitted", lambda self, target, *_: target.resolve())
    with reader_of(path, data_field=name, batch_size=7) as reader:
        assert np.array_equal(reader.get_next_batch().data, numbers(7, 5))


# --- types: are the stored bytes the NumPy bytes? ------------------------------------------------


def string_of_five(pad):
    stored = h5t.C_S1.copy()
    stored.set_size(5)
    stored.set_strpad(pad)
    return stored


def bool_on(base, false=0, true=1):
    stored = h5t.enum_create(base)
    stored.enum_insert(b"FALSE", false)
    stored.enum_insert(b"TRUE", true)
    return stored


def complex_with_a_gap():
    stored = h5t.create(h5t.COMPOUND, 24)
    stored.insert(b"r", 0, h5t.IEEE_F64LE)
    stored.insert(b"i", 16, h5t.IEEE_F64LE)
    return stored


def opaque(tag):
    stored = h5t.create(h5t.OPAQUE, 4)
    stored.set_tag(tag)
    return stored


def compound_with(member):
    stored = h5t.create(h5t.COMPOUND, 3 + member.get_size())
    stored.insert(b"a", 0, h5t.STD_I8LE)
    stored.insert(b"b", 2, member)
    return stored


NOISE = np.random.default_rng(SEED).integers(0, 256, 24 * 6, np.uint8).tobytes()
DIFFERS = "its stored type differs"
# Types whose plain bytes would be wrong, stored bytes, and whether h5py must read them. The corpus
# has these and many others.
TYPES = {
    "bool on int32": (bool_on(h5t.STD_I32LE), np.arange(6, dtype="i4").tobytes(), True),
    "bool on int16BE": (bool_on(h5t.STD_I16BE), np.arange(6, dtype=">i2").tobytes(), True),
    "complex with a gap": (complex_with_a_gap(), NOISE, True),
    "bfloat16": (float_of(2, 8, 7, 127), NOISE[:12], False),
    "float8": (float_of(1, 5, 2, 15), NOISE[:6], False),
    "12 bits": (integer_of(h5t.STD_U16LE, 12), b"\xff\xff" * 6, False),
    "12 bits, signed": (integer_of(h5t.STD_I16LE, 12), b"\xff\x0f" * 6, False),
    "12 bits, shifted": (integer_of(h5t.STD_U16LE, 12, 4), b"\x34\x12" * 6, False),
    "24 of 32 bits": (integer_of(h5t.STD_U32LE, 24), b"\xff\xff\xff\xff" * 6, False),
    "compound with a string": (
        compound_with(string_of_five(h5t.STR_NULLTERM)),
        b"\1\0ab\0cd\0" * 6,
        False,
    ),
}
TYPE_LAYOUTS = {"contiguous": (None, ()), "chunked": ((4,), ()), "gzip": ((4,), (1,))}


def of_type(path, stored, content, chunks=None, filters=()):
    values = np.frombuffer(content, f"V{stored.get_size()}")
    assert values.size == 6
    with h5py.File(path, "w") as file:
        raw_dataset(file, stored, values, plist=dataset_plist(chunks, filters))


@each("chunks, filters", TYPE_LAYOUTS.values())
@pytest.mark.parametrize(("stored", "content", "by_h5py"), TYPES.values(), ids=TYPES)
def test_stored_type(tmp_path, stored, content, by_h5py, chunks, filters):
    path = tmp_path / "a.h5"
    of_type(path, stored, content, chunks, filters)
    check(path, fallback=DIFFERS if by_h5py else None)


@each("chunks, filters", TYPE_LAYOUTS.values())
@pytest.mark.parametrize("name", TYPES)
def test_stored_type_unguarded(tmp_path, monkeypatch, no_rules, name, chunks, filters):
    monkeypatch.setattr(datasets.Indexer, "_converts", lambda *_: False)
    path = tmp_path / "a.h5"
    stored, content, _ = TYPES[name]
    of_type(path, stored, content, chunks, filters)
    assert goes_wrong(path)


def test_opaque_with_a_foreign_tag_cannot_be_read_by_h5py_either(tmp_path):
    path = tmp_path / "a.h5"
    of_type(path, opaque(b"a blob"), NOISE[:24])
    with pytest.raises(OSError, match="conversion"):
        truth(path)
    with reader_of(path) as reader, pytest.raises(ReadError, match=r'"data".*conversion'):
        reader.get_next_batch()


def test_integers_of_three_bytes_have_no_numpy_type(tmp_path):
    path = tmp_path / "a.h5"
    stored = integer_of(h5t.STD_U32LE, 24)
    stored.set_size(3)
    of_type(path, stored, NOISE[:18])
    with pytest.raises(DatasetError, match="no NumPy equivalent"):
        reader_of(path)


VARIABLE_LENGTH = {
    "reference": h5py.ref_dtype,
    "region": h5py.regionref_dtype,
    "compound": np.dtype([("a", "i4"), ("b", h5py.string_dtype())]),
}


@pytest.mark.parametrize("dtype", VARIABLE_LENGTH.values(), ids=VARIABLE_LENGTH)
def test_variable_length_and_references_are_refused(tmp_path, dtype):
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("data", (3,), dtype)
    with pytest.raises(DatasetError, match=r'"data".*fixed size'):
        reader_of(path)


@pytest.mark.parametrize("dtype", [h5py.string_dtype(), h5py.vlen_dtype(np.int32)])
def test_elements_of_variable_length_that_were_never_written(tmp_path, dtype):
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("data", (3,), dtype)
        assert [len(element) for element in file["data"][...]] == [0, 0, 0]
    with reader_of(path) as reader:
        batch = reader.get_next_batch()
        assert batch.data.lengths.tolist() == [0] * batch.size


# --- files that others write ---------------------------------------------------------------------


def test_unflushed_values_of_a_writer_in_this_process(tmp_path):
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as writer:
        writer.create_dataset("data", data=numbers(6, 4), chunks=(2, 4))
    with h5py.File(path, "r+") as writer:
        writer["data"][2:4] = -1
        check(path, fallback="open for writing in this process")
        assert truth(path)[2, 0] == -1
    check(path)


def test_values_written_after_a_reader_was_made(tmp_path):
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as writer:
        dataset = writer.create_dataset("data", data=numbers(6, 4), chunks=(2, 4))
        with reader_of(path, batch_size=6) as reader:
            dataset[2:4] = -1
            assert np.array_equal(reader.get_next_batch().data, dataset[...])


def test_values_written_after_a_reader_was_made_unguarded(tmp_path, no_rules):
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as writer:
        dataset = writer.create_dataset("data", data=numbers(6, 4), chunks=(2, 4))
        writer.flush()
        with reader_of(path, batch_size=6) as reader:
            dataset[2:4] = -1
            assert not np.array_equal(reader.get_next_batch().data, dataset[...])


WRITER = """
import sys, h5py
with h5py.File(sys.argv[1], "r+") as file:
    print("open", flush=True)
    sys.stdin.readline()
"""


def writer_in_another_process(path):
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    return writer


@pytest.mark.slow
def test_file_locked_by_a_writer_in_another_process(tmp_path):
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file["data"] = numbers(6, 4)
    with writer_in_another_process(path) as writer:
        assert writer.stdout.readline() == "open\n"
        try:
            h5py.File(path, "r").close()
        except BlockingIOError:
            with pytest.raises(ReadError, match="lock") as caught:
                reader_of(path)
            assert str(path) in str(caught.value)
            assert isinstance(caught.value.__cause__, BlockingIOError)
            locks = True
        else:
            locks = False
        writer.communicate("done\n", timeout=200)
    if not locks:
        pytest.skip("HDF5 locks no files here")
    check(path)


@pytest.mark.slow
@pytest.mark.parametrize("num_threads", [0, 2])
def test_the_direct_way_locks_no_writer_out(tmp_path, num_threads):
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("data", data=numbers(6, 4), chunks=(2, 4), **GZIP)
    with reader_of(path, num_threads=num_threads) as reader:
        reader.get_next_batch()
        with writer_in_another_process(path) as writer:
            assert writer.stdout.readline() == "open\n"
            with warnings.catch_warnings():  # HDF5 may write something as soon as it opens a file
                warnings.simplefilter("ignore", FileChangedWarning)
                reader.get_next_batch()
            writer.communicate("done\n", timeout=200)
            assert writer.returncode == 0


# --- extents -------------------------------------------------------------------------------------


@pytest.mark.slow
@each("options", [{}, GZIP, ALL_THREE])
@each("libver", ["earliest", "latest"])
@each("maxshape", [(None, 5), (None, None), (20, 20)])
def test_chunk_larger_than_the_dataset(tmp_path, maxshape, libver, options):
    path = tmp_path / "a.h5"
    chunks = tuple(13 if limit is None else limit for limit in maxshape)
    with h5py.File(path, "w", libver=libver) as file:
        file.create_dataset("data", data=numbers(7, 5), chunks=chunks, maxshape=maxshape, **options)
    check(path)


@pytest.mark.parametrize("options", [{}, {"chunks": (2, 3)}, {"chunks": (2, 3), **GZIP}])
def test_no_samples(tmp_path, options):
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        if options:
            options = {**options, "maxshape": (None, 5)}
        file.create_dataset("data", (0, 5), "f4", **options)
    for num_threads in (0, 2):
        with reader_of(path, num_threads=num_threads) as reader:
            assert len(reader) == reader.num_samples == reader.nbytes == 0
            assert list(reader) == list(reader) == []
            with pytest.raises(DatasetError, match="0 samples"):
                reader.get_next_batch()
            with pytest.raises(DatasetError, match="0 samples"):
                reader.fetch_data()


@pytest.mark.parametrize("options", [{}, {"chunks": (2, 3), "maxshape": (7, None)}])
@pytest.mark.parametrize("num_threads", [0, 2])
def test_samples_without_values(tmp_path, options, num_threads):
    path = tmp_path / "a.h5"
    with h5py.File(path, "w", libver="earliest") as file:
        file.create_dataset("data", (7, 0), "f4", **options)
        file.create_dataset("labels", data=numbers(7))
    with reader_of(path, labels_field="labels", batch_size=3, num_threads=num_threads) as reader:
        batches = [batch.copy() for batch in reader]
    assert [batch.data.shape for batch in batches] == [(3, 0), (3, 0), (1, 0)]
    assert np.array_equal(np.concatenate([batch.labels for batch in batches]), numbers(7))


def test_scalar_and_empty_datasets_are_refused(tmp_path):
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file["scalar"] = 3.0
        file["empty"] = h5py.Empty("f4")
    with pytest.raises(DatasetError, match=r'"scalar" is a scalar'):
        reader_of(path, data_field="scalar")
    with pytest.raises(DatasetError, match=r'"empty" is empty'):
        reader_of(path, data_field="empty")


# --- chunk indices -------------------------------------------------------------------------------

B_TREE_1, SINGLE, IMPLICIT, FIXED_ARRAY, EXTENSIBLE_ARRAY, B_TREE_2 = range(6)
INDICES = {
    "B-tree v1": (B_TREE_1, "earliest", {"chunks": (2, 3)}),
    "B-tree v1, unlimited": (B_TREE_1, "earliest", {"chunks": (2, 3), "maxshape": (None, None)}),
    "B-tree v1, HDF5 1.8": (B_TREE_1, ("earliest", "v108"), {"chunks": (2, 3)}),
    "single chunk": (SINGLE, "latest", {"chunks": (9, 7)}),
    "implicit": (IMPLICIT, "latest", {"chunks": (2, 3), "early": True}),
    "fixed array": (FIXED_ARRAY, "latest", {"chunks": (2, 3)}),
    "fixed array, v110": (FIXED_ARRAY, "v110", {"chunks": (2, 3), "maxshape": (20, 7)}),
    "extensible array": (EXTENSIBLE_ARRAY, "latest", {"chunks": (2, 3), "maxshape": (None, 7)}),
    "extensible, larger": (EXTENSIBLE_ARRAY, "latest", {"chunks": (2, 3), "maxshape": (None, 17)}),
    "B-tree v2": (B_TREE_2, "latest", {"chunks": (2, 3), "maxshape": (None, None)}),
}


def index_type(dataset):
    kind = ctypes.c_int(-1)
    assert HDF5.H5Dget_chunk_index_type(ctypes.c_int64(dataset.id.id), ctypes.byref(kind)) >= 0
    return kind.value


def with_chunk_index(path, libver, *, early=False, written=None, shape=(9, 7), **options):
    plist = dataset_plist()
    if early:
        plist.set_alloc_time(h5d.ALLOC_TIME_EARLY)
    with h5py.File(path, "w", libver=libver) as file:
        dataset = file.create_dataset("data", shape, "i4", dcpl=plist, fillvalue=-3, **options)
        values = numbers(*shape)
        for where in written or [...]:
            dataset[where] = values[where]
        return index_type(dataset)


@pytest.mark.slow
@each("written", [None, [np.s_[:0]], [np.s_[2:5, 3:], np.s_[8:, :1]]])
@each("filters", [{}, SHUFFLE, GZIP, {**LZF, **SHUFFLE, **FLETCHER}])
@pytest.mark.parametrize(("kind", "libver", "how"), INDICES.values(), ids=INDICES)
def test_chunk_index(tmp_path, kind, libver, how, filters, written):
    path = tmp_path / "a.h5"
    if kind == IMPLICIT and filters:
        kind = FIXED_ARRAY
    assert with_chunk_index(path, libver, written=written, **how, **filters) == kind
    check(path)


@each("filters", [{}, GZIP])
@pytest.mark.parametrize(
    ("kind", "libver", "maxshape"),
    [
        (B_TREE_1, "earliest", (3000,)),
        (FIXED_ARRAY, "latest", (3000,)),
        (EXTENSIBLE_ARRAY, "latest", (None,)),
    ],
)
@each("written", [None, [np.s_[7:11], np.s_[1020:1031], np.s_[2995:]]])
def test_chunk_index_of_many_pages(tmp_path, kind, libver, maxshape, filters, written):
    path = tmp_path / "a.h5"
    options = {"shape": (3000,), "chunks": (1,), "maxshape": maxshape, **filters}
    assert with_chunk_index(path, libver, written=written, **options) == kind
    assert_reads_like_h5py(path, batch_size=700)


@pytest.mark.slow
@each("filters", [{}, GZIP])
@pytest.mark.parametrize(
    "name", [name for name, (_, _, how) in INDICES.items() if "maxshape" in how]
)
@each("steps", [[(3, 7), (9, 7)], [(0, 7), (9, 7)], [(5, 5), (20, 7)], [(4, 4)], [(1, 1), (8, 2)]])
def test_dataset_that_shrank(tmp_path, name, filters, steps):
    path = tmp_path / "a.h5"
    _, libver, how = INDICES[name]
    with_chunk_index(path, libver, **how, **filters)
    with h5py.File(path, "r+") as file:
        for shape in steps:
            file["data"].resize(shape)
    check(path)


# --- ways of reading -----------------------------------------------------------------------------


def many_layouts(path):
    with h5py.File(path, "w") as file:
        file["contiguous"] = numbers(20, 6)
        file.create_dataset("rows", data=numbers(20, 6), chunks=(3, 6))
        for name, chunks in (("rows with holes", (3, 6)), ("tiles with holes", (3, 4))):
            file.create_dataset(name, (20, 6), "i4", chunks=chunks, fillvalue=-3)[4:8] = 7
        file.create_dataset("tiles", data=numbers(20, 6), chunks=(3, 4))
        file.create_dataset("encoded", data=numbers(20, 6), chunks=(3, 4), **ALL_THREE)
        return list(file)


@pytest.mark.slow
def test_file_system_where_nothing_may_be_mapped(tmp_path, monkeypatch):
    path = tmp_path / "a.h5"
    names = many_layouts(path)
    monkeypatch.setattr("h5async.io.source.can_map", lambda path: False)
    for name, num_dim in itertools.product(names, (0, 1)):
        fallback = "mapping" if (name, num_dim) == ("contiguous", 1) else None
        assert_reads_like_h5py(path, name, num_dim=num_dim, fallback=fallback)


@pytest.mark.slow
def test_work_is_shared_out_among_threads(tmp_path, monkeypatch):
    path = tmp_path / "a.h5"
    names = many_layouts(path)
    monkeypatch.setattr("h5async.fill.phases._MIN_SHARE_NBYTES", 1)
    for name, num_dim in itertools.product(names, (0, 1)):
        assert_reads_like_h5py(path, name, num_dim=num_dim, num_threads=4, batch_size=7)
