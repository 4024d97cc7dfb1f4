"""Members of compounds, read as datasets of their own: equal to what h5py gives for them."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from cases import each
from conftest import POISON, assert_epoch_is, assert_reads_like_h5py, assert_same_bits, poison
from corpus import float_of
from h5py import h5d, h5p, h5s, h5t
from hdf5files import type_for_h5py

import h5async.deliver.device
from h5async import AsyncReader, DatasetError, Field, ReadError
from h5async.fill import phases
from h5async.read import h5pyrows

COLOUR = h5py.enum_dtype({"red": 0, "green": 300}, "<i2")
POSITION = np.dtype([("x", "<f4"), ("y", ">f8"), ("tag", "S3")])
TABLE = np.dtype(
    [
        ("id", "u1"),
        ("energy", "<f8"),
        ("big", ">i4"),
        ("half", "<f2"),
        ("half big", ">f2"),
        ("complex", "<c8"),
        ("complex big", ">c16"),
        ("flag", "?"),
        ("colour", COLOUR),
        ("vector", "<i2", (3,)),
        ("matrix", ">f4", (2, 2)),
        ("flags", "?", (3,)),
        ("word", "S5"),
        ("opaque", "V3"),
        ("pos", POSITION),
        ("track", POSITION, (2,)),
    ]
)
PLAIN = [name for name in TABLE.names if name not in ("pos", "track")]
NESTED = ["pos/x", "pos/y", "pos/tag"]
STORAGES: dict[str, dict[str, Any]] = {
    "contiguous": {},
    "compact": {},
    "chunked": {"chunks": (4,)},
    "gzip": {"chunks": (4,), "compression": "gzip", "shuffle": True},
    "fletcher32": {"chunks": (5,), "fletcher32": True},
    "lzf": {"chunks": (100,), "maxshape": (None,), "compression": "lzf"},
}


def random_bits(dtype: Any, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Return random bits, every NaN among them; but a bool is one, and an enum has a name."""
    rng = np.random.default_rng(seed)
    dtype = np.dtype(dtype)
    if dtype.subdtype:
        return random_bits(dtype.base, (*shape, *dtype.shape), seed)
    if dtype.fields:
        values = np.zeros(shape, dtype)
        for number, name in enumerate(dtype.names):
            values[name] = random_bits(dtype[name], shape, seed + number + 1)
        return values
    if dtype.kind == "b":
        return rng.integers(0, 2, shape).astype(bool)
    raw = rng.integers(0, 256, int(np.prod(shape)) * dtype.itemsize, np.uint8)
    return np.frombuffer(raw.tobytes(), dtype.str).reshape(shape)


def create(
    file: h5py.File, name: str, values: np.ndarray, dtype: Any = None, **how: Any
) -> h5py.Dataset:
    return file.create_dataset(name, data=values, dtype=dtype or values.dtype, **how)


def write_table(path: Path, storage: str = "contiguous", shape: tuple[int, ...] = (11,)) -> Path:
    values = random_bits(TABLE, shape)
    how = dict(STORAGES[storage])
    if len(shape) == 2 and how:
        how = {**how, "chunks": (4, 3), "maxshape": None}
    with h5py.File(path, "w") as file:
        if storage == "compact":
            plist = h5p.create(h5p.DATASET_CREATE)
            plist.set_layout(h5d.COMPACT)
            space = h5s.create_simple(shape)
            dataset = h5d.create(
                file.id, b"table", h5t.py_create(TABLE, logical=True), space, plist
            )
            h5py.Dataset(dataset)[...] = values
        else:
            create(file, "table", values, **how)
    return path


def member_truth(path: Path, name: str, members: Sequence[str], num_dim: int = 0) -> np.ndarray:
    """Return what h5py reads of a member, the sample dimension first, in native byte order."""
    with h5py.File(path) as file:
        values = file[name].fields(members[0])[...]
        for member in members[1:]:
            values = values[member]
    values = np.moveaxis(values, num_dim, 0)
    return np.ascontiguousarray(values.astype(values.dtype.newbyteorder("="), copy=False))


def assert_member_reads_like_h5py(
    path: Path,
    name: str,
    member: str,
    *,
    num_dim: int = 0,
    fallback: str | None = None,
    is_left: bool = False,
    **options: Any,
) -> None:
    """Compare with h5py; `is_left`: h5py reads the member, although its table is read directly."""
    expected = member_truth(path, name, member.split("/"), num_dim)
    assert np.unique(expected.reshape(len(expected), -1), axis=0).shape[0] > 1 or len(expected) < 2
    for shuffle, num_threads in ((False, 0), ("full", 0), (False, 2), ("full", 2)):
        with AsyncReader(
            hdf5_path=path,
            fields={"data": Field(f"{name}/{member}", num_dim=num_dim)},
            batch_size=4,
            shuffle=shuffle,
            num_threads=num_threads,
            device="cpu",
            **options,
        ) as reader:
            poison(reader)
            assert_epoch_is(reader, expected, in_order=not shuffle)
            reason = reader.layouts["data"].fallback_reason
            assert (reader.fallback_reads == 0) == (fallback is None and not is_left)
            assert (reason is None) == (fallback is None)
            assert fallback is None or fallback in reason


# --- each kind of member, in each kind of storage ------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("storage", STORAGES)
@each("member", [*PLAIN, *NESTED])
def test_member_reads_like_h5py(tmp_path, member, storage):
    path = write_table(tmp_path / "f.h5", storage)
    assert_member_reads_like_h5py(path, "table", member)


@each("member", ["energy", "vector", "flag"])
def test_member_of_chunks_that_are_not_mapped_reads_like_h5py(tmp_path, member):
    path = write_table(tmp_path / "f.h5", "chunked")
    assert_member_reads_like_h5py(path, "table", member, io="pread")


@each("storage", STORAGES)
def test_nested_member_reads_like_h5py_by_a_saved_index(tmp_path, storage):
    path = write_table(tmp_path / "f.h5", storage)
    assert_member_reads_like_h5py(path, "table", "pos/x", index_cache=tmp_path / "t.h5idx")


@pytest.mark.parametrize("storage", STORAGES)
@each("member", ["pos", "track"])
def test_member_that_is_a_compound_is_a_structured_array(tmp_path, member, storage):
    path = write_table(tmp_path / "f.h5", storage)
    expected = random_bits(TABLE, (11,))[member]
    options = {"device": "cpu", "batch_size": 4, "num_threads": 0}
    with AsyncReader(hdf5_path=path, fields={"data": f"table/{member}"}, **options) as reader:
        assert reader.layouts["data"].row_shape == expected.shape[1:]
        for batch in reader:
            for name in ("x", "tag"):
                assert_same_bits(batch.data[name], expected[name][batch.index])
            assert np.array_equal(batch.data["y"], expected["y"][batch.index], equal_nan=True)


@pytest.mark.parametrize("storage", STORAGES)
def test_whole_compound_is_a_structured_array(tmp_path, storage):
    path = write_table(tmp_path / "f.h5", storage)
    assert_reads_like_h5py(path, "table")
    assert_reads_like_h5py(path, "table", num_threads=2)


@pytest.mark.slow
@pytest.mark.parametrize("storage", STORAGES)
@each("num_dim", [0, 1])
@each("member", ["energy", "vector", "matrix", "flag", "flags", "pos/y"])
def test_member_of_a_table_of_two_dimensions(tmp_path, member, num_dim, storage):
    shape = (6, 3) if storage == "compact" else (9, 7)
    path = write_table(tmp_path / "f.h5", storage, shape)
    assert_member_reads_like_h5py(path, "table", member, num_dim=num_dim)


def test_member_of_many_rows_and_large_elements_in_small_stages(tmp_path):
    dtype = np.dtype([("head", "u1"), ("body", "<i4", (20_000,)), ("tail", ">i2")])
    values = random_bits(dtype, (40,))
    for number, how in enumerate([{}, {"chunks": (3,), "compression": "lzf"}]):
        path = tmp_path / f"{number}.h5"
        with h5py.File(path, "w") as file:
            create(file, "table", values, **how)
        for member in ("tail", "body"):
            with AsyncReader(
                hdf5_path=path,
                fields={"data": f"table/{member}"},
                batch_size=32,
                shuffle="full",
                num_threads=2,
                device="cpu",
            ) as reader:
                poison(reader)
                expected = values[member].astype(values[member].dtype.newbyteorder("="))
                assert_epoch_is(reader, expected, in_order=False)


@pytest.mark.parametrize("storage", list(STORAGES))
def test_several_members_and_the_whole_of_one_table(tmp_path, monkeypatch, storage):
    monkeypatch.setattr(phases, "_MIN_SHARE_NBYTES", 1)
    monkeypatch.setattr(h5pyrows, "_SCRATCH_NBYTES", 64)
    path = write_table(tmp_path / "f.h5", storage)
    values = random_bits(TABLE, (11,))
    with h5py.File(path, "a") as file:
        file["place"] = np.arange(11)
    fields: dict[str, Any] = {
        "energy": "table/energy",
        "again": Field("/table/energy"),
        "vector": Field("table/vector", dtype="f4", scale=2),
        "x": "table/pos/x",
        "whole": "table",
        "place": "place",
    }
    for num_threads in (0, 3):
        with AsyncReader(
            hdf5_path=path,
            fields=fields,
            batch_size=3,
            shuffle="full",
            num_threads=num_threads,
            device="cpu",
        ) as reader:
            for _ in range(2):
                for batch in reader:
                    rows = values[batch.place]
                    assert_same_bits(batch.energy, rows["energy"])
                    assert_same_bits(batch.again, rows["energy"])
                    assert_same_bits(batch.vector, rows["vector"].astype("f4") * np.float32(2))
                    assert_same_bits(batch.x, rows["pos"]["x"])
                    assert_same_bits(batch.whole["big"], rows["big"].astype("<i4"))
            assert reader.fallback_reads == 0


def test_axes_of_an_array_member(tmp_path):
    path = write_table(tmp_path / "f.h5")
    values = random_bits(TABLE, (11,))["matrix"]
    field = Field("table/matrix", axes=(0, 2, 1))
    options = {"device": "cpu", "batch_size": 4, "num_threads": 0}
    with AsyncReader(hdf5_path=path, fields={"data": field}, **options) as reader:
        assert_epoch_is(reader, np.ascontiguousarray(values.transpose(0, 2, 1).astype("<f4")))


def test_data_field_and_labels_field_may_be_members(tmp_path):
    path = write_table(tmp_path / "f.h5", "gzip")
    values = random_bits(TABLE, (11,))
    options = {"device": "cpu", "batch_size": 4, "num_threads": 2}
    fields = {"data_field": "table/matrix", "labels_field": "table/id"}
    with AsyncReader(hdf5_path=path, **fields, **options) as reader:
        for batch in reader:
            assert_same_bits(batch.data, values["matrix"].astype("<f4")[batch.index])
            assert_same_bits(batch.labels, values["id"][batch.index])


# --- how members are laid out --------------------------------------------------------------------


@pytest.mark.slow
def test_members_with_gaps_between_them_and_out_of_order(tmp_path):
    dtype = np.dtype(
        {
            "names": ["late", "early", "odd"],
            "formats": ["<f8", ">u2", "<i4"],
            "offsets": [20, 1, 5],
            "itemsize": 40,
        }
    )
    values = random_bits(dtype, (9,))
    for number, how in enumerate([{}, {"chunks": (2,), "compression": "gzip"}]):
        path = tmp_path / f"{number}.h5"
        with h5py.File(path, "w") as file:
            create(file, "table", values, **how)
        for member in dtype.names:
            assert_member_reads_like_h5py(path, "table", member)


NAMES = ["größe ✓", "a.b", " spaces ", "with:colon", "0", "count", "..", "%", "data"]


@pytest.mark.slow
def test_members_of_any_name(tmp_path):
    dtype = np.dtype([(name, "<i4") for name in NAMES])
    values = random_bits(dtype, (9,))
    with h5py.File(tmp_path / "f.h5", "w") as file:
        create(file, "group/table", values)
        file["table"] = h5py.SoftLink("group/table")
        file["far"] = h5py.ExternalLink("f.h5", "/table")
    for name in NAMES:
        assert_member_reads_like_h5py(tmp_path / "f.h5", "group/table", name)
        assert_member_reads_like_h5py(tmp_path / "f.h5", "table", name)
        assert_member_reads_like_h5py(tmp_path / "f.h5", "far", name)


def test_member_of_a_committed_type(tmp_path):
    values = random_bits(TABLE, (9,))
    with h5py.File(tmp_path / "f.h5", "w") as file:
        file["type"] = TABLE
        create(file, "table", values, file["type"])
    assert_member_reads_like_h5py(tmp_path / "f.h5", "table", "energy")


def test_table_of_one_member_and_of_no_rows(tmp_path):
    dtype = np.dtype([("only", "<i4")])
    with h5py.File(tmp_path / "f.h5", "w") as file:
        create(file, "table", random_bits(dtype, (9,)))
        create(file, "empty", random_bits(dtype, (0,)), chunks=(2,), maxshape=(None,))
        create(file, "flat", random_bits(dtype, (0,)))
    assert_member_reads_like_h5py(tmp_path / "f.h5", "table", "only")
    for name in ("empty", "flat"):
        with AsyncReader(
            hdf5_path=tmp_path / "f.h5", fields={"x": f"{name}/only"}, device="cpu"
        ) as reader:
            assert reader.num_samples == len(reader) == 0


def test_member_of_a_compound_of_other_bool_bytes(tmp_path):
    """Any byte but 0 is True to HDF5."""
    dtype = np.dtype([("a", "u1"), ("flag", "?")])
    raw = np.array([[1, 0], [2, 1], [3, 2], [4, 255], [5, 0]], "u1")
    with h5py.File(tmp_path / "f.h5", "w") as file:
        for name, how in {"flat": {}, "chunked": {"chunks": (5,)}}.items():
            dataset = file.create_dataset(name, (5,), dtype, **how)
            dataset.id.write(h5s.ALL, h5s.ALL, raw.view(dtype).ravel())
    for name in ("flat", "chunked"):
        assert_member_reads_like_h5py(tmp_path / "f.h5", name, "flag")


# --- fill values ---------------------------------------------------------------------------------

FILL = np.array(
    (7, -1.5, 258, 2.5, 1 - 2j, (1, 2, 3), True, b"ab"), dtype="u1,<f8,>i4,<f2,<c8,3<i2,?,S4"
)


@pytest.mark.slow
@each("chunks", [(4,), (11,)])
@each("filters", [{}, {"compression": "gzip"}])
@each("fill", [None, FILL])
def test_holes_of_a_chunked_table(tmp_path, fill, filters, chunks):
    values = random_bits(FILL.dtype, (20,))
    values["f6"] = fill is None  # else no value of this one would differ
    with h5py.File(tmp_path / "f.h5", "w") as file:
        how = {"chunks": chunks, "fillvalue": fill, **filters}
        file.create_dataset("table", (20,), FILL.dtype, **how)[5:6] = values[5:6]
    for member in FILL.dtype.names:
        # The core fills with one element.
        is_left = member == "f5" and fill is not None
        assert_member_reads_like_h5py(tmp_path / "f.h5", "table", member, is_left=is_left)


@pytest.mark.slow
@each("fill", [None, FILL])
@each("chunks", [None, (4,)])
@each("fill_time", ["ifset", "never", "alloc"])
def test_table_that_was_never_written(tmp_path, fill_time, chunks, fill):
    with h5py.File(tmp_path / "f.h5", "w") as file:
        how = {"chunks": chunks, "fillvalue": fill, "fill_time": fill_time}
        file.create_dataset("table", (6,), FILL.dtype, **how)
    for member in FILL.dtype.names:
        expected = member_truth(tmp_path / "f.h5", "table", [member])
        with AsyncReader(
            hdf5_path=tmp_path / "f.h5",
            fields={"data": f"table/{member}"},
            device="cpu",
            num_threads=0,
            batch_size=4,
        ) as reader:
            poison(reader)
            assert_epoch_is(reader, expected)


@pytest.mark.slow
def test_fill_value_of_a_nested_member(tmp_path):
    dtype = np.dtype([("pos", POSITION), ("n", "<i4")])
    fill = np.array(((1.5, 2.5, b"xyz"), 9), dtype)
    with h5py.File(tmp_path / "f.h5", "w") as file:
        table = file.create_dataset("table", (9,), dtype, chunks=(2,), fillvalue=fill)
        table[4:6] = random_bits(dtype, (2,))
    for member in (*NESTED, "n"):
        assert_member_reads_like_h5py(tmp_path / "f.h5", "table", member)


@pytest.mark.parametrize("filters", [{}, {"compression": "gzip"}], ids=["plain", "gzip"])
@pytest.mark.parametrize("beside", ["<i4", type_for_h5py(), "bfloat16"], ids=["i4", "enum", "b"])
@pytest.mark.parametrize("num_files", [1, 2])
def test_fill_value_whose_elements_differ_in_a_nested_member(tmp_path, num_files, beside, filters):
    """Such a member is left to h5py; its table may have members that h5py converts."""
    beside = float_of(2, 8, 7, 127) if beside == "bfloat16" else h5t.py_create(beside, logical=True)
    inner = h5t.py_create(np.dtype([("x", "<f4"), ("vector", "<i2", (3,))]))
    table = h5t.create(h5t.COMPOUND, beside.get_size() + inner.get_size())
    table.insert(b"n", 0, beside)
    table.insert(b"pos", beside.get_size(), inner)
    fill = np.zeros((), table.dtype)
    fill["pos"] = (1.5, (1, 2, 3))
    paths = [tmp_path / f"{number}.h5" for number in range(num_files)]
    for path in paths:
        with h5py.File(path, "w") as file:
            how = {"chunks": (2,), "fillvalue": fill, **filters}
            data = file.create_dataset("table", (9,), h5py.Datatype(table), **how)
            values = np.zeros(2, table.dtype)
            values["pos"]["vector"] = [[7, 8, 9], [-1, 5, 6]]
            data[4:6] = values
    truth = [member_truth(path, "table", ["pos", "vector"]) for path in paths]
    fields = {"data": "table/pos/vector"}
    with AsyncReader(hdf5_path=paths, fields=fields, device="cpu", batch_size=4) as reader:
        poison(reader)
        assert_epoch_is(reader, np.concatenate(truth))
        assert reader.fallback_reads


# --- compounds that also hold what has no fixed size ---------------------------------------------

MIXED = np.dtype(
    [
        ("name", h5py.string_dtype()),
        ("energy", "<f8"),
        ("hits", h5py.vlen_dtype("<i4")),
        ("big", ">i4", (2,)),
        ("link", h5py.ref_dtype),
        ("pos", POSITION),
    ]
)


def write_mixed(path: Path, **how: Any) -> Path:
    rng = np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        table = file.create_dataset("table", (11,), MIXED, **how)
        values = np.zeros(11, MIXED)
        values["energy"] = rng.normal(size=11)
        values["big"] = rng.integers(-9, 9, (11, 2))
        values["pos"] = random_bits(POSITION, (11,))
        for row in range(11):
            values["name"][row] = "n" * row
            values["hits"][row] = np.arange(row, dtype="<i4")
            values["link"][row] = table.ref
        table[...] = values
    return path


@pytest.mark.slow
@pytest.mark.parametrize(
    "how", [{}, {"chunks": (4,)}, {"chunks": (4,), "compression": "gzip"}], ids=str
)
@each("member", ["energy", "big", "pos/x", "pos/y", "pos/tag"])
def test_member_beside_strings_of_variable_length(tmp_path, member, how):
    path = write_mixed(tmp_path / "f.h5", **how)
    assert_member_reads_like_h5py(path, "table", member, fallback="variable length")


@pytest.mark.parametrize("name", ["table", "table/name", "table/hits", "table/link"])
def test_what_has_no_fixed_size_is_refused(tmp_path, name):
    path = write_mixed(tmp_path / "f.h5")
    with pytest.raises(DatasetError, match="fixed size"):
        AsyncReader(hdf5_path=path, fields={"x": name}, device="cpu")


@pytest.mark.parametrize("chunks", [None, (2,)], ids=["contiguous", "chunked"])
def test_holes_beside_strings_of_variable_length(tmp_path, chunks):
    dtype = np.dtype([("name", h5py.string_dtype()), ("energy", "<f8")])
    with h5py.File(tmp_path / "f.h5", "w") as file:
        table = file.create_dataset("table", (9,), dtype, chunks=chunks)
        if chunks:
            table[3:4] = np.array([("abc", 1.5)], dtype)
    for shuffle in (False, "full"):
        with AsyncReader(
            hdf5_path=tmp_path / "f.h5",
            fields={"data": "table/energy"},
            device="cpu",
            num_threads=0,
            shuffle=shuffle,
            batch_size=4,
        ) as reader:
            poison(reader)
            expected = member_truth(tmp_path / "f.h5", "table", ["energy"])
            assert_epoch_is(reader, expected, in_order=not shuffle)


def test_compact_table_beside_strings_of_variable_length(tmp_path):
    dtype = np.dtype([("name", h5py.string_dtype()), ("energy", "<f8")])
    plist = h5p.create(h5p.DATASET_CREATE)
    plist.set_layout(h5d.COMPACT)
    with h5py.File(tmp_path / "f.h5", "w") as file:
        stored = h5t.py_create(dtype, logical=True)
        dataset = h5d.create(file.id, b"table", stored, h5s.create_simple((5,)), plist)
        h5py.Dataset(dataset)[...] = np.array([("x" * n, n / 3) for n in range(5)], dtype)
    assert_member_reads_like_h5py(tmp_path / "f.h5", "table", "energy")


# --- members that only h5py can read -------------------------------------------------------------


def compound(size: int, **members: tuple[int, h5t.TypeID]) -> h5t.TypeID:
    made = h5t.create(h5t.COMPOUND, size)
    for name, (offset, stored) in members.items():
        made.insert(name.encode(), offset, stored)
    return made


def write_raw(path: Path, stored: h5t.TypeID, rows: int, chunks: tuple[int, ...] = ()) -> Path:
    """Write noise as the bytes of a table."""
    raw = np.random.default_rng(4).integers(0, 256, rows * stored.get_size(), np.uint8)
    plist = h5p.create(h5p.DATASET_CREATE)
    if chunks:
        plist.set_chunk(chunks)
        plist.set_shuffle()
        plist.set_deflate(1)
    with h5py.File(path, "w") as file:
        dataset = h5d.create(file.id, b"table", stored, h5s.create_simple((rows,)), plist)
        dataset.write(h5s.ALL, h5s.ALL, raw, mtype=stored)
    return path


def null_terminated(nbytes: int) -> h5t.TypeID:
    stored = h5t.C_S1.copy()
    stored.set_size(nbytes)
    stored.set_strpad(h5t.STR_NULLTERM)
    return stored


def odd_integer() -> h5t.TypeID:
    stored = h5t.STD_I32LE.copy()
    stored.set_precision(20)
    stored.set_offset(3)
    return stored


@pytest.mark.parametrize("chunks", [(), (4,)], ids=["contiguous", "gzip"])
def test_member_of_a_type_that_is_not_numpys_comes_through_h5py(tmp_path, chunks):
    table = compound(20, a=(0, h5t.STD_U8LE), odd=(3, odd_integer()), b=(12, h5t.IEEE_F64BE))
    path = write_raw(tmp_path / "f.h5", table, 11, chunks)
    assert_member_reads_like_h5py(path, "table", "odd", fallback="type")
    assert_member_reads_like_h5py(path, "table", "a")
    assert_member_reads_like_h5py(path, "table", "b")


@pytest.mark.slow
@pytest.mark.parametrize("chunks", [(), (4,)], ids=["contiguous", "gzip"])
def test_nested_member_of_a_type_that_is_not_numpys_comes_through_h5py(tmp_path, chunks):
    word = null_terminated(4)
    inner = compound(16, n=(1, h5t.STD_I16BE), word=(5, word), odd=(11, odd_integer()))
    table = compound(30, a=(0, h5t.STD_U8LE), inner=(7, inner))
    path = write_raw(tmp_path / "f.h5", table, 11, chunks)
    assert_member_reads_like_h5py(path, "table", "inner/odd", fallback="type")
    assert_member_reads_like_h5py(path, "table", "inner/word")
    assert_member_reads_like_h5py(path, "table", "inner/n")


def test_array_member_of_strings(tmp_path):
    array = h5t.array_create(null_terminated(3), (2,))
    table = compound(12, a=(0, h5t.STD_U8LE), words=(2, array))
    path = write_raw(tmp_path / "f.h5", table, 9)
    assert_member_reads_like_h5py(path, "table", "words")


def test_member_in_a_file_that_is_open_for_writing_comes_through_h5py(tmp_path):
    path = write_table(tmp_path / "f.h5")
    with h5py.File(path, "r+"):
        assert_reads_member_equal_to(path, "table/energy", random_bits(TABLE, (11,))["energy"])


def assert_reads_member_equal_to(path: Path, name: str, expected: np.ndarray) -> None:
    options = {"device": "cpu", "batch_size": 4, "num_threads": 0}
    with AsyncReader(hdf5_path=path, fields={"data": name}, **options) as reader:
        assert_epoch_is(reader, expected)


@pytest.mark.slow
@pytest.mark.parametrize("member", ["energy", "matrix", "pos/x", "flag"])
@each("num_dim", [0, 1])
def test_member_of_a_virtual_table(tmp_path, member, num_dim):
    write_table(tmp_path / "f.h5", "gzip", (9, 7))
    layout = h5py.VirtualLayout((10, 7), TABLE)
    layout[:9] = h5py.VirtualSource("f.h5", "table", (9, 7))
    with h5py.File(tmp_path / "v.h5", "w") as file:
        file.create_virtual_dataset("table", layout)
    assert_member_reads_like_h5py(
        tmp_path / "v.h5", "table", member, num_dim=num_dim, fallback="virtual"
    )


@pytest.mark.parametrize("member", ["energy", "vector", "flag"])
def test_member_of_a_table_in_external_files(tmp_path, member):
    values = random_bits(TABLE, (11,))
    raw = tmp_path / "values.raw"
    raw.write_bytes(b"12345" + values.tobytes())
    with h5py.File(tmp_path / "f.h5", "w") as file:
        file.create_dataset("table", (11,), TABLE, external=[(str(raw), 5, values.nbytes)])
    expected = member_truth(tmp_path / "f.h5", "table", [member])
    with AsyncReader(
        hdf5_path=tmp_path / "f.h5",
        fields={"data": f"table/{member}"},
        device="cpu",
        num_threads=0,
        allow_external=tmp_path,
    ) as reader:
        poison(reader)
        assert_epoch_is(reader, expected)


# --- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "listed"),
    [
        ("table/speed", ['"energy"', '"pos"', '"table"']),
        ("table/pos/z", ['"x"', '"tag"', '"pos/z"']),
        ("table/Energy", ['"energy"']),
        ("table/energy/x", ['"energy/x"', "compound"]),
        ("table/vector/0", ['"vector/0"', "compound"]),
        ("plain/x", ['"plain"', "compound"]),
    ],
)
def test_member_that_does_not_exist_is_an_error_that_lists_them(tmp_path, name, listed):
    path = write_table(tmp_path / "f.h5")
    with h5py.File(path, "a") as file:
        file["plain"] = np.arange(11)
    with pytest.raises(DatasetError) as caught:
        AsyncReader(hdf5_path=path, fields={"x": name}, device="cpu")
    for part in ("f.h5", *listed):
        assert part in str(caught.value)


def test_member_of_an_array_of_compounds_is_no_member(tmp_path):
    """h5py gives track["x"] of each; here it is an error and no wrong value."""
    path = write_table(tmp_path / "f.h5")
    with pytest.raises(DatasetError, match="track/x"):
        AsyncReader(hdf5_path=path, fields={"x": "table/track/x"}, device="cpu")


@pytest.mark.parametrize("num_threads", [0, 2])
def test_damaged_chunk_of_a_table_is_an_error(tmp_path, num_threads):
    path = write_table(tmp_path / "f.h5", "gzip")
    with h5py.File(path, "r+") as file:
        file["table"].id.write_direct_chunk((4,), zlib.compress(b"short"))
    options = {"device": "cpu", "batch_size": 4, "num_threads": num_threads}
    with AsyncReader(hdf5_path=path, fields={"x": "table/energy"}, **options) as reader:
        reader.get_next_batch()
        with pytest.raises(ReadError, match=r"f\.h5.*table"):
            reader.get_next_batch()


def test_damaged_chunk_of_a_member_read_through_h5py_is_an_error(tmp_path):
    table = compound(20, a=(0, h5t.STD_U8LE), odd=(3, null_terminated(5)))
    path = write_raw(tmp_path / "f.h5", table, 12, (4,))
    with h5py.File(path, "r+") as file:
        file["table"].id.write_direct_chunk((4,), zlib.compress(b"short"))
    options = {"device": "cpu", "batch_size": 4, "num_threads": 0}
    with AsyncReader(hdf5_path=path, fields={"x": "table/odd"}, **options) as reader:
        reader.get_next_batch()
        with pytest.raises(ReadError, match=r"f\.h5.*table"):
            reader.get_next_batch()


def test_members_over_several_files(tmp_path):
    values = [random_bits(TABLE, (n,), n) for n in (5, 1, 8)]
    for number, (part, storage) in enumerate(
        zip(values, ("contiguous", "gzip", "lzf"), strict=True)
    ):
        with h5py.File(tmp_path / f"{number}.h5", "w") as file:
            create(file, "table", part, **{**STORAGES[storage], "maxshape": (None,)})
    for member in ("energy", "vector", "colour"):
        expected = np.concatenate([part[member] for part in values])
        for shuffle in (False, "full"):
            with AsyncReader(
                hdf5_path=tmp_path / "*.h5",
                fields={"data": f"table/{member}"},
                batch_size=4,
                shuffle=shuffle,
                num_threads=2,
                device="cpu",
            ) as reader:
                poison(reader)
                assert_epoch_is(reader, expected, in_order=not shuffle)
                assert reader.fallback_reads == 0


def integer_of_17_bits() -> h5t.TypeID:
    number = h5t.STD_I32LE.copy()
    number.set_precision(17)
    return number


@pytest.mark.parametrize("is_left", [True, False], ids=["h5py", "core"])
def test_padding_of_a_converted_table_is_not_what_memory_held(tmp_path, monkeypatch, is_left):
    table = h5py.h5t.create(h5py.h5t.COMPOUND, 64)
    table.insert(b"a", 0, h5py.h5t.STD_I32LE)
    table.insert(b"b", 60, type_for_h5py().id if is_left else integer_of_17_bits())
    path = tmp_path / "f.h5"
    with h5py.File(path, "w") as file:
        space = h5py.h5s.create_simple((20,))
        data = h5py.Dataset(h5py.h5d.create(file.id, b"data", table, space))
        data[...] = np.zeros(20, data.dtype)
    monkeypatch.setattr(
        h5async.deliver.device, "plain_memory", lambda nbytes: np.full(nbytes, POISON, "u1")
    )
    with AsyncReader(hdf5_path=path, labels_field=None, batch_size=7, device="cpu") as reader:
        assert (reader.layouts["data"].fallback_reason is not None) == is_left
        for batch in reader:
            assert not batch.data.view("u1").any()
