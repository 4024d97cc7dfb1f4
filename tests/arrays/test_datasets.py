"""What datasets and groups of `open_file` are, beside what is selected of them, as h5py has it."""

from __future__ import annotations

import contextlib
import gc
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import h5py
import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

import h5async
from h5async.arrays.firstreading import Stored, described
from h5async.core.binding import load_core

DTYPES = ["i1", "u1", ">i2", "u4", "i8", "f2", ">f4", "f8", "?", "S2", "S6", "c8"]
FACTS = (
    "shape dtype size ndim nbytes chunks maxshape fillvalue name compression compression_opts"
    " shuffle fletcher32 scaleoffset filter_ids filter_names external is_virtual is_scale"
).split()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("datasets") / "several.h5"
    rng = np.random.default_rng(5)
    with h5py.File(found, "w") as file:
        for dtype in DTYPES:
            count = 40 * np.dtype(dtype).itemsize
            values = np.frombuffer(rng.bytes(count), "u1" if dtype == "?" else dtype)
            file[f"as/{dtype}"] = (values % 2 == 1 if dtype == "?" else values).reshape(5, 8)
        pairs = np.zeros(7, [("a", "f8"), ("b", "i4", (2,)), ("c", [("x", "i2"), ("y", "S3")])])
        pairs["a"], pairs["b"] = rng.normal(0, 1e5, 7), rng.integers(-(10**6), 10**6, (7, 2))
        file["pairs"], file["pair"] = pairs, pairs[3]
        chunked = {"chunks": (3, 4), "maxshape": (None, 8), "fillvalue": 5}
        chunked |= {"compression": "gzip", "compression_opts": 3, "shuffle": True}
        file.create_dataset("gzip", (6, 8), "i2", **chunked)[:4] = 1
        file.create_dataset("scaled", data=np.arange(9), chunks=(4,), scaleoffset=0)
        file["bytes"], file["integer"] = np.array(b"ab", "S5"), np.array(5, ">i4")
        file["text"], file["texts"], file["empty"] = "é", ["a", "é", ""], h5py.Empty("f4")
        file["group/reference"] = file["gzip"].ref
        file["type"] = np.dtype([("a", "f4"), ("b", "i2", (2,))])
        file["type"].attrs["units"] = "K"
        file["dangling"] = h5py.SoftLink("/nothing")
        file["soft"] = h5py.SoftLink("/group")
        file["away"] = h5py.ExternalLink("/nowhere/else.h5", "data")
    return found


def outcome(work: Callable[[Any], Any], file: Any) -> Any:
    """Return a value with all that counts, or that an error was raised."""
    try:
        found = work(file)
    except (AttributeError, IndexError, KeyError, OSError, TypeError, ValueError):
        return "an error"
    if isinstance(found, np.ndarray | np.generic):
        value = found.tolist() if found.dtype.hasobject else found.tobytes()
        return type(found), found.dtype, found.shape, value
    return type(found), found


def assert_same(path: Path, work: Callable[[Any], Any]) -> None:
    with h5py.File(path) as expected, h5async.open_file(path) as found:
        assert outcome(work, found) == outcome(work, expected)


@pytest.mark.parametrize("name", ["gzip", "scaled", "bytes", "texts", "empty", "pairs"])
def test_what_is_known_of_datasets(path: Path, name: str):
    for fact in FACTS:
        assert_same(path, lambda file, fact=fact: getattr(file[name], fact))
    assert_same(path, lambda file: list(file[name].iter_chunks()))
    with h5async.open_file(path) as file:
        assert not hasattr(file[name], "other")


def test_strings_of_two_character_sets(tmp_path: Path):
    path = tmp_path / "strings.h5"
    with h5py.File(path, "w") as file:
        for name, kind in (("a", h5py.string_dtype("ascii")), ("b", h5py.string_dtype())):
            file[name] = np.array("x" if name == "a" else "é", kind)
            file[f"in {name}"] = np.array([("x",)], [("text", kind)])
    for names in ("ab", "ba"):
        assert_same(path, lambda file, some=names: [file[one].asstr()[()] for one in some])
        fields = [f"in {name}" for name in names]
        assert_same(path, lambda file, some=fields: [_encoding(file[one]) for one in some])


@pytest.mark.skipif(load_core() is None, reason="it is the core that is asked")
def test_how_datasets_are_stored_is_the_same_by_the_core(path: Path):
    known: dict[bytes, Stored] = {}
    names = ["pairs", "pair", "gzip", "scaled", "bytes", "integer", "text", "texts", "empty"]
    with h5py.File(path) as file:
        for name in (*names, "group/reference", *(f"as/{one}" for one in DTYPES)) * 2:
            node = file[name].id
            found = described(node, known)
            assert found == (Stored.of(node), file[name].shape)
            assert found[0].dtype.metadata == file[name].dtype.metadata


def _encoding(dataset: Any) -> str:
    return h5py.check_string_dtype(dataset.dtype["text"]).encoding


@pytest.mark.parametrize("name", ["bytes", "integer", "text", "texts", "empty", "gzip", "pair"])
def test_arrays_of_whole_datasets(path: Path, name: str):
    for dtype in (None, "i4", "S3"):
        assert_same(path, lambda file, dtype=dtype: np.asarray(file[name], dtype))
    for key in ((), ..., 0, slice(1, 3)):
        assert_same(path, lambda file, key=key: file[name].asstr()[key])
    assert_same(path, lambda file: np.asarray(file[name].asstr("latin-1")))


@given(
    st.sampled_from(DTYPES),
    st.sampled_from(DTYPES),
    st.sampled_from([(), ..., 2, np.s_[1:3, 5], np.s_[[0, 2]], np.s_[4, 1]]),
)
def test_values_of_another_dtype(path: Path, stored: str, dtype: str, key: Any):
    assert_same(path, lambda file: file[f"as/{stored}"].astype(dtype)[key])
    assert_same(path, lambda file: np.asarray(file[f"as/{stored}"], dtype))

    def direct(file: Any) -> Any:
        out = np.zeros((5, 8), dtype)
        file[f"as/{stored}"].read_direct(out)
        return out

    assert_same(path, direct)


@pytest.mark.parametrize("names", ["a", "b", "c", ["a"], ["c", "a"], "missing"])
def test_fields_of_compounds(path: Path, names: Any):
    others = [("a", "f4")], [("c", [("y", "S2")]), ("a", ">i2")], "c16", [("q", "i4")], "i4"
    for name in ("pairs", "pair"):
        for key in ((), ..., 2, slice(1, 3), [0, 2]):
            assert_same(path, lambda file, of=name, key=key: file[of].fields(names)[key])
        for dtype in others if names == "a" else ():
            assert_same(path, lambda file, of=name, dtype=dtype: file[of].astype(dtype)["a"])
            assert_same(path, lambda file, of=name, dtype=dtype: file[of].astype(dtype)[()])
            assert_same(path, lambda file, of=name, dtype=dtype: file[of].astype(dtype)[:0])
    assert_same(path, lambda file: file["as/c8"].astype([("i", "f8"), ("q", "i2")])[1:3])


def test_what_a_group_contains(path: Path):
    names = ("gzip", "/gzip", "group/reference", "group/", "./group", "/", "", ".", "nothing")
    links = ("dangling", "away", "soft", "soft/reference", "dangling/x", "gzip/x", "type", b"gzip")
    for name in (*names, *links, 3):
        assert_same(path, lambda file, name=name: name in file)
        assert_same(path, lambda file, name=name: name in file["group"])
        if name not in ("type", b"type"):
            assert_same(path, lambda file, name=name: file[name].name)


def test_named_datatypes(path: Path):
    with h5py.File(path) as expected, h5async.open_file(path) as file:
        found = file["type"]
        again = pickle.loads(pickle.dumps(found))
        assert (found.name, found.dtype) == ("/type", expected["type"].dtype)
        assert (again.name, again.dtype) == (found.name, found.dtype)
        assert found.attrs["units"] == expected["type"].attrs["units"]


def test_names_are_in_the_order_of_h5py(tmp_path: Path):
    for number, orders in enumerate((0, h5py.h5p.CRT_ORDER_TRACKED, 3)):
        properties = h5py.h5p.create(h5py.h5p.GROUP_CREATE)
        properties.set_link_creation_order(orders)
        path = tmp_path / f"{number}.h5"
        with h5py.File(path, "w", track_order=bool(number)) as file:
            group = h5py.Group(h5py.h5g.create(file.id, b"z", gcpl=properties))
            for name in "yxa":
                file[name] = group[name] = 1
        assert_same(path, lambda file: (list(file), list(file["z"])))


def test_references_lead_to_objects(path: Path):
    assert_same(path, lambda file: file[file["group/reference"][()]][0])
    assert_same(path, lambda file: file["group"][file["group/reference"][()]].name)
    assert_same(path, lambda file: file[h5py.Reference()])


@pytest.mark.parametrize("place", [96, 112, 120, 136])  # of the header of the root, and its tree
def test_a_root_that_is_damaged(tmp_path: Path, place: int):
    path = tmp_path / "damaged.h5"
    for value in (0, 1, 17, 255):
        with h5py.File(path, "w", libver="earliest") as file:
            file["data"] = 1
        content = bytearray(path.read_bytes())
        content[place] = value
        path.write_bytes(content)
        with contextlib.suppress(h5async.H5AsyncError), h5async.open_file(path) as file:
            file["data"][()]


def test_external_values_of_a_dataset_that_is_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        np.arange(60, dtype="i4").tofile(name)
    parts = [(str(tmp_path / "a"), 0, 198), ("b", 0, 202)]  # which cut an element
    with h5py.File("external.h5", "w") as file:
        file.create_dataset("data", (100,), "i4", external=parts)
    with (
        h5py.File("external.h5") as file,
        h5async.open_file("external.h5", allow_external=tmp_path) as opened,
    ):
        expected = file["data"]
        np.testing.assert_array_equal(opened["data"][40:60], expected[40:60])


@pytest.mark.parametrize("libver", ["earliest", "latest"])
def test_values_of_a_file_that_this_process_opens_again_to_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, libver: str
):
    monkeypatch.chdir(tmp_path)
    Path("elsewhere").mkdir()
    for name in ("data.h5", "elsewhere/data.h5"):
        with h5py.File(name, "w", libver=libver) as file:
            file["data"], file["text"] = np.zeros(10), ["a", "b"]
    with h5async.open_file("data.h5") as opened:
        data, text = opened["data"], opened["text"]
        assert (data[3], text[0]) == (0, b"a")
        with h5py.File("data.h5", "r+", libver=libver) as file:
            monkeypatch.chdir("elsewhere")
            file["data"][3], file["text"][0] = 7, "other"  # which is not stored yet
            assert data[3] == 7
            with pytest.raises(h5async.ReadError, match="changed"):
                text[0]


@pytest.mark.parametrize("compression", [None, "gzip"])
@pytest.mark.parametrize("count", [1, 5, 31])
def test_rows_that_are_appended_while_a_dataset_is_open_are_left_out(
    tmp_path: Path, count: int, compression: str | None
):
    path, rows = tmp_path / "data.h5", np.arange(count * 4).reshape(count, 4)
    options: dict[str, Any] = {"chunks": (3, 2), "compression": compression}
    with h5py.File(path, "w", libver="latest") as file:
        file.create_dataset("data", data=rows, maxshape=(None, None), **options)
    with h5async.open_file(path) as opened:
        data = opened["data"]
        with h5py.File(path, "r+", libver="latest") as file:
            file["data"].resize(count + 57, 0)
            file["data"][count:] = -1
        for key in (slice(None), slice(count // 2, None), (slice(None), slice(1, 3)), count - 1):
            np.testing.assert_array_equal(data[key], rows[key])
        with pytest.raises(h5async.SelectionError):
            data[count]
    with h5async.open_file(path) as opened:
        data = opened["data"]
        with h5py.File(path, "r+", libver="latest") as file:
            file["data"].resize(2, 1)
        with pytest.raises(h5async.ReadError, match=r"changed .*; open the file again"):
            data[:]


@pytest.mark.parametrize("compression", [None, "gzip"])
def test_a_file_written_anew_in_its_place_while_it_is_open(tmp_path: Path, compression: str | None):
    path, rows = tmp_path / "data.h5", np.arange(4000).reshape(200, 20)

    def write(names: str):  # values lie elsewhere than before
        with h5py.File(path, "w") as file:
            for name in names:
                values = rows * ord(name) % 1000
                file.create_dataset(name, data=values, chunks=(16, 20), compression=compression)

    write("ab")
    with h5async.open_file(path) as before:
        assert_same(path, lambda file: file["a"][3:5])
        before["a"][3:5]
        write("ba")
        for key in (slice(3, 5), slice(50, 150), slice(None)):
            assert_same(path, lambda file, key=key: file["a"][key])
    assert_same(path, lambda file: np.concatenate([file["a"][3:5], file["a"][3:5], file["b"][()]]))


def test_datasets_of_odd_dtypes_read_again(tmp_path: Path):
    path, codes = tmp_path / "odd.h5", h5py.enum_dtype({"A": 1, "B": 90}, "i2")
    with h5py.File(path, "w") as file:
        file.create_dataset("long", data=np.arange(9, dtype="g"), chunks=(4,), fletcher32=True)
        file.create_dataset("codes", data=np.array([0, 1, 90, 3]), dtype=codes)
        file["swapped"], file["pairs"] = (
            np.arange(9, dtype=">u8"),
            np.zeros((3, 1, 4), [("x", "f4")]),
        )
    for _ in range(3):
        for key in ((), 3, slice(1, 3), [1, 2]):
            assert_same(path, lambda file, key=key: file["long"][key])
            assert_same(path, lambda file, key=key: file["codes"].astype("?")[key])
            assert_same(path, lambda file, key=key: file["swapped"].astype(">i8")[key])
        assert_same(
            path, lambda file: [file["pairs"][key].shape for key in [()] * 3 + [(..., 1, "x")]]
        )
    assert_same(path, lambda file: file["pairs"][[3], 5:2])


def test_elements_of_variable_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """They are read of the open dataset, without what h5py does in Python for each key."""
    path, words = tmp_path / "objects.h5", ["a", "", "é", "long " * 40, "b"]
    with h5py.File(path, "w") as file:
        file["plain"], file["bytes"] = words, np.array([b"x", b"", b"yz"], object)
        text = {"dtype": h5py.string_dtype(), "chunks": (4, 3), "compression": "gzip"}
        file.create_dataset("table", (9, 5), **text)[2:7] = words  # the others are null
        lists = file.create_dataset("lists", (6,), h5py.vlen_dtype(">i2"))
        lists[1:4] = [np.arange(n, dtype="i2") for n in (3, 1, 4)]
        file.create_dataset("pairs", (4,), [("n", "i4"), ("text", h5py.string_dtype("ascii"))])
        file["pairs"][1:3] = [(1, "x"), (2, "yy")]
        file.create_dataset("arrays", (3,), np.dtype((h5py.string_dtype(), (2,))))[1] = ["p", "q"]
    keys = [(), ..., 2, -1, slice(1, 3), slice(None, None, 2), slice(2, 2), [0, 2], (1, ...)]
    keys += [(2, 3), (slice(1, 8, 3), 4), (..., slice(0, 4, 2)), np.int16(1), 99, True, "text"]

    def all_of(file: Any, keys: list[Any]) -> list[Any]:
        every = (lambda file, at=(name, key): file[at[0]][at[1]] for name in file for key in keys)
        return [repr(outcome(one, file)) for one in every]

    with h5py.File(path) as expected, h5async.open_file(path) as found:
        wanted, boxes = all_of(expected, keys), all_of(expected, keys[:6])
        for _ in range(2):
            assert all_of(found, keys) == wanted
        with ThreadPoolExecutor(4) as pool:
            assert all(one == wanted for one in pool.map(all_of, [found] * 8, [keys] * 8))
        monkeypatch.delattr(h5py.Dataset, "__getitem__")
        assert all_of(found, keys[:6]) == boxes


def test_files_that_nobody_closed(path: Path):
    """The garbage collector may run while HDF5 calls Python, and closes none of its objects."""
    gc.collect()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        for _ in range(2):
            file = h5async.open_file(path)
            assert len(file["texts"][()]) == len(file["texts"][:3]) == 3
            del file
            gc.collect()
        held = [one for one in gc.garbage if isinstance(one, h5py._objects.ObjectID)]
        assert not held
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
