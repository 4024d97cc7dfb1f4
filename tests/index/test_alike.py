"""Datasets and files that are like others have layouts as if each were the only one."""

from __future__ import annotations

import ctypes
import itertools
import os
import time

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from h5async import AsyncReader, Field
from h5async.errors import H5AsyncError
from h5async.index import alikefiles, metadata
from h5async.index.alikefiles import Alike
from h5async.index.datasets import Indexer
from h5async.index.hdf5 import OtherKindError, checksum_function, hdf5_function
from h5async.index.links import Reach
from h5async.index.metadata import read_layouts
from h5async.index.tables import ChunkTable
from h5async.io.references import structures


def undefined_fill(file: h5py.File, name: str, *, write: bool) -> None:
    """Create a dataset without a fill value, which has no values before they are written."""
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plist.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    undefined = h5py.h5s.create_simple((4, 3))
    made = h5py.h5d.create(file.id, name.encode(), h5py.h5t.IEEE_F32LE, undefined, plist)
    if write:
        h5py.Dataset(made)[...] = 3


@pytest.fixture
def path(tmp_path):
    """Make a file of datasets of the same kinds: of other sizes, unwritten, with fill values."""
    found = tmp_path / "alike.h5"
    with h5py.File(found, "w") as file:
        for n in range(3):
            rows = np.arange(12 * (n + 1)).reshape(-1, 3) + n
            file[f"plain/{n}"] = rows.astype("f4")
            file[f"big/{n}"] = rows.astype(">f4")
            file[f"flat/{n}"] = rows.reshape(-1).astype("f4")
            file.create_dataset(f"empty/{n}", (5, 3), "f4")
            file.create_dataset(f"filled/{n}", (5, 3), "f4", fillvalue=n % 2)
            file.create_dataset(f"written/{n}", data=rows.astype("f4"), fillvalue=7)
            file[f"text/{n}"] = np.array([b"a", b"b c"] * (n + 1), "S3")
            file[f"array/{n}"] = np.zeros(n + 1, np.dtype(("f4", (2,))))
            file.create_dataset(f"table/{n}", (n + 2,), np.dtype([("x", "f4"), ("y", "i2", (2,))]))
            file.create_dataset(f"none/{n}", (0, 3), "f4")
        for n, write in enumerate((False, True, False)):
            undefined_fill(file, f"undefined{n}", write=write)
    return found


def same(one, other):
    for name, value in vars(other).items():
        found = getattr(one, name)
        if isinstance(value, np.ndarray):
            assert found.dtype == value.dtype
            assert found.tobytes() == value.tobytes()
        elif isinstance(value, ChunkTable):
            for column in ("index", "offset", "nbytes", "filter_mask"):
                np.testing.assert_array_equal(getattr(found, column), getattr(value, column))
        elif name not in ("segments", "datasets"):
            assert found == value, name
    assert len(one.datasets) == len(other.datasets)
    for dataset, its in zip(one.datasets, other.datasets, strict=True):
        same(dataset, its)


@pytest.mark.parametrize("num_dim", [0, 1, -1])
def test_layouts_are_those_of_each_alone(path, num_dim):
    fields, names = {}, []
    with h5py.File(path) as file:
        file.visititems(lambda name, node: names.append((name, node)))
        for name, node in names:
            if isinstance(node, h5py.Dataset) and len(node.shape) > num_dim:
                fields[name] = Field(name, num_dim)
                if node.dtype.names:
                    fields[f"{name}/x"] = Field(f"{name}/x", num_dim)
    assert len(fields) >= 18
    alone = {name: read_layouts(path, {name: field})[name] for name, field in fields.items()}
    for names in list(fields), list(fields)[::-1]:
        together = read_layouts(path, {name: fields[name] for name in names})
        for name in names:
            same(together[name], alone[name])


def test_what_is_alike_is_found_once(path, monkeypatch):
    found, ask = [], Indexer._layout
    monkeypatch.setattr(
        Indexer, "_layout", lambda self, name, *rest: found.append(name) or ask(self, name, *rest)
    )
    fields = {f"{kind}{n}": Field(f"{kind}/{n}") for kind in ("plain", "big") for n in range(3)}
    read_layouts(path, fields)
    assert found == ["plain/0", "big/0"]


@pytest.mark.slow
def test_values(path):
    kinds = ("plain", "big", "written", "empty", "filled")
    for kind, n in itertools.product(kinds, range(3)):
        fields = {f"{kind}{n}": f"{kind}/{n}", "one": f"{kind}/{n}"}
        with (
            AsyncReader(hdf5_path=path, fields=fields, device="cpu", num_threads=0) as reader,
            h5py.File(path) as file,
        ):
            assert (reader.get_next_batch().one == file[f"{kind}/{n}"][...]).all()


def rows_of(path):
    with h5py.File(path) as file:
        return file["data"][:]


def test_files_of_known_kinds_have_the_layouts_that_they_have_alone(tmp_path):
    paths, whole = [], {"data": Field("data")}
    for n, rows in enumerate((20, 23, 7, 20, 40)):  # chunks are cut short, missing, raw at the edge
        paths.append(tmp_path / f"{n}.h5")
        with h5py.File(paths[-1], "w", libver="latest") as file:
            how = {"compression": "gzip"} if n != 3 else {}
            made = file.create_dataset("data", (rows, 6), "i4", chunks=(5, 3), fillvalue=9, **how)
            made[: rows // 2] = np.arange(rows // 2 * 6).reshape(-1, 6) + n
    alike = Reach(alike=Alike())
    for path in paths:
        same(read_layouts(path, whole, alike)["data"], read_layouts(path, whole)["data"])
    assert len(alike.alike.datasets) == 2
    with h5py.File(paths[-1], "r+"):  # which has it open for writing
        found = read_layouts(paths[-1], whole, alike)["data"]
    assert "open for writing" in found.fallback_reason
    with AsyncReader(hdf5_path=paths, labels_field=None, batch_size=200, device="cpu") as reader:
        expected = np.concatenate([rows_of(path) for path in paths])
        np.testing.assert_array_equal(reader.get_next_batch()[0], expected)


# --- files whose metadata are those of another one ----------------------------------------------


GZIP = {"compression": "gzip", "chunks": (10, 3)}
LATEST = {"libver": "latest"}
STORAGES = {  # and whether they may have other rows
    "contiguous": ({}, True),
    "big": ({"dtype": ">f8"}, True),
    "bool": ({"dtype": "?"}, True),
    "array": ({"dtype": np.dtype(("i2", (2,)))}, True),
    "gzip": (GZIP, True),
    "shuffle": (GZIP | {"shuffle": True, "fletcher32": True, "dtype": "i8"}, True),
    "chunks": ({"chunks": (7, 2)}, True),
    "many chunks": (GZIP | {"chunks": (1, 2)}, True),  # in a B-tree of two levels
    "resizable": (GZIP | {"maxshape": (None, 6)}, True),
    "room": (GZIP | {"maxshape": (99, 6)}, False),
    "filled": ({"fillvalue": 3}, True),
    "latest": (LATEST, True),
    "latest gzip": (LATEST | GZIP | {"track_times": True}, True),
    "latest chunks": (LATEST | {"chunks": (7, 2)}, True),
    "latest resizable": (LATEST | GZIP | {"maxshape": (None, 6)}, False),
    "v108": (GZIP | {"libver": "v108"}, True),
}


def write_alike(path, rows=40, seed=0, libver=None, **storage):
    """Write a file with two datasets, of which one is in a group."""
    rng = np.random.default_rng(seed)
    with h5py.File(path, "w", libver=libver) as file:
        dtype = np.dtype(storage.pop("dtype", "f4"))
        made = file.create_dataset("data", (rows, 6), dtype, **storage)
        noise = rng.integers(0, 99, (rows, 6, *made.dtype.shape))
        noise[rows // 2 :] *= seed % 2  # which compress less, or more
        made[...] = noise
        file.attrs["episode"] = seed
        file.create_dataset("of/others", data=rng.integers(0, 9, 7 * rows))
        labels = file.create_dataset("of/labels", data=rng.integers(0, 9, rows))
        labels.attrs["names"] = f"of {seed}"
    return path


@pytest.fixture(autouse=True)
def few_files_are_worth_it(monkeypatch):
    monkeypatch.setattr(alikefiles, "FEW_FILES", 0)
    monkeypatch.setattr(alikefiles, "_PRICE", 0)


FIELDS = {"data": Field("data"), "labels": Field("of/labels")}


@pytest.fixture
def without_hdf5(monkeypatch):
    """Return a function that reads layouts of a file like others, without HDF5."""

    def read(path, alike, fields=FIELDS):
        with monkeypatch.context() as patched:
            patched.setattr(metadata, "open_index", None)
            return read_layouts(path, fields, alike)

    return read


def found_or_raised(path, reach, fields=FIELDS):
    try:
        return read_layouts(path, fields, reach)
    except (H5AsyncError, OtherKindError) as error:
        return str(error)


def require_same(found, path, fields=FIELDS):
    alone = read_layouts(path, fields)
    assert list(found) == list(alone)
    for name, layout in alone.items():
        same(found[name], layout)


@pytest.mark.parametrize("kind", STORAGES)
def test_files_like_others_are_read_without_hdf5(kind, tmp_path, without_hdf5):
    storage, may_grow = STORAGES[kind]
    alike = Reach(alike=Alike())
    for n, rows in enumerate((40, 40, 40, 47, 20, 12, 300, 25) if may_grow else (40, 40, 40)):
        path = write_alike(tmp_path / f"{n}.h5", rows, n, **storage)
        if n < 2:
            require_same(read_layouts(path, FIELDS, alike), path)
        else:
            require_same(without_hdf5(path, alike), path)
    with h5py.File(path, "r+") as file:
        assert "open for writing" in read_layouts(path, FIELDS, alike)["data"].fallback_reason
        data = file["data"]
        del file  # the dataset keeps it open
        assert "open for writing" in read_layouts(path, FIELDS, alike)["data"].fallback_reason
        del data
    with h5py.File(tmp_path / "0.h5"):
        require_same(without_hdf5(path, alike), path)


@pytest.mark.parametrize("libver", ["v108", "latest"])
def test_files_with_checksums_are_read_without_hdf5_if_all_is_the_same(
    libver, tmp_path, without_hdf5
):
    alike = Reach(alike=Alike())
    for n in range(4):
        path = write_alike(tmp_path / f"{n}.h5", 40, n, libver)
        found = read_layouts(path, FIELDS, alike) if n < 2 else without_hdf5(path, alike)
        require_same(found, path)
    for n in range(9, 14):  # more than are tried in vain
        for storage in {}, GZIP, {"chunks": (7, 2)}:
            path = write_alike(tmp_path / "other.h5", 40 + n, n, libver, **storage)
            require_same(read_layouts(path, FIELDS, alike), path)


def test_files_made_at_other_times(tmp_path, without_hdf5):
    alike = Reach(alike=Alike())
    for n in range(4):
        path = write_alike(tmp_path / f"{n}.h5", 40, n, **GZIP, track_times=True)
        image, seconds = path.read_bytes(), itertools.count(int(time.time()) + 1, -1)
        made = next(one for one in seconds if one.to_bytes(4, "little") in image)
        path.write_bytes(image.replace(made.to_bytes(4, "little"), bytes([n] * 4)))
        found = read_layouts(path, FIELDS, alike) if n < 2 else without_hdf5(path, alike)
        require_same(found, path)


def test_files_of_several_patterns_and_fields(tmp_path, without_hdf5):
    alike, one = Reach(alike=Alike()), {"x": Field("data", 1)}
    for n in range(12):
        storage = [{}, GZIP, {"dtype": "i8"}][n % 3]
        path = write_alike(tmp_path / f"{n}.h5", 40 + n, n, **storage)
        for fields in FIELDS, one:
            is_known = n > 3
            found = (without_hdf5 if is_known else read_layouts)(
                *((path, alike, fields) if is_known else (path, fields, alike))
            )
            require_same(found, path, fields)


@pytest.mark.parametrize("what", ["link", "virtual", "member", "few", "many", "short", "text"])
def test_files_that_say_more_are_read_by_hdf5(what, tmp_path):
    alike, fields = Reach(alike=Alike()), {"data": Field("data")}
    for n in range(4):
        path = write_alike(tmp_path / f"of{n}.h5", 40, n)
        if what != "short":
            holder, path = path, tmp_path / f"{n}.h5"
            with h5py.File(path, "w") as file:
                if what == "link":
                    file["data"] = h5py.ExternalLink(holder.name, "data")
                elif what == "virtual":
                    layout = h5py.VirtualLayout((40, 6), "f4")
                    layout[...] = h5py.VirtualSource(holder.name, "data", (40, 6))
                    file.create_virtual_dataset("data", layout)
                elif what == "member":
                    fields = {"data": Field("data/x")}
                    file["data"] = np.zeros(n + 4, [("x", "f4"), ("y", "i4")])
                elif what == "text":
                    file["data"] = np.array([b"a", b"b c"] * (n + 1), "S3")
                elif what == "few":
                    file.create_dataset("data", (40, 6), "f4", chunks=(10, 3))[:10] = n
                else:
                    file.create_dataset("data", data=np.full((400, 6), n), chunks=(2, 6))
        require_same(read_layouts(path, fields, alike), path, fields)
    if what == "short":
        os.truncate(path, path.stat().st_size - 8)
        with pytest.raises(H5AsyncError, match=r"truncated|cut short"):
            read_layouts(path, fields, alike)


def test_files_that_others_write_to_are_left_to_hdf5(tmp_path):
    fcntl = pytest.importorskip("fcntl")
    alike = Reach(alike=Alike())
    for n in range(4):
        path = write_alike(tmp_path / f"{n}.h5", 40, n)
        read_layouts(path, FIELDS, alike)
    with open(path, "rb") as writer:
        fcntl.flock(writer, fcntl.LOCK_EX)
        with pytest.raises(H5AsyncError, match="locked by a writer"):
            read_layouts(path, FIELDS, alike)
    require_same(read_layouts(path, FIELDS, alike), path)


@pytest.mark.slow
def test_few_files_are_noted_unless_others_are_like_them(tmp_path, monkeypatch):
    """And none of few files: opening those that are unlike must not take longer."""
    noted, note = [], alikefiles._noted
    monkeypatch.setattr(alikefiles, "_noted", lambda *rest: noted.append(rest[0]) or note(*rest))
    monkeypatch.setattr(alikefiles, "FEW_FILES", 4)
    monkeypatch.setattr(alikefiles, "_PRICE", 20)
    paths = [tmp_path / f"{n}.h5" for n in range(40)]
    for many, unlike, expected in (
        (400, range(40), (4, 11, 24)),  # the second one soon: the first may have been an odd one
        (400, [4], (4, 11)),
        (400, [], (4,)),
        (40, [], ()),
    ):
        alike = Reach(alike=Alike(many))
        for n, path in enumerate(paths):
            write_alike(path, 40, n, **({"fillvalue": n + 1} if n in unlike else {}))
            require_same(read_layouts(path, FIELDS, alike), path)
        assert [paths.index(type(path)(name)) for name in noted] == list(expected)
        noted.clear()


@pytest.mark.parametrize("asked", [{}, {"num_dim": "time"}, {"decode_cf": True}])
def test_values_of_attributes_may_differ_if_none_is_asked_for(asked, tmp_path, without_hdf5):
    alike, fields = Reach(alike=Alike()), {"data": Field("data", **asked)}
    for n in range(4):
        path = write_alike(tmp_path / f"{n}.h5", 40, n)
        with h5py.File(path, "r+") as file:
            file["data"].attrs["scale_factor"] = 2.0 + n
            file["data"].dims[n % 2].label = "time"
            file["data"].dims[1 - n % 2].label = "size"
        is_known = n > 1 and not asked
        found = without_hdf5(path, alike, fields) if is_known else read_layouts(path, fields, alike)
        require_same(found, path, fields)


@pytest.mark.parametrize("are_codes", [False, True])
def test_codes_of_categories_are_told_from_other_integers(are_codes, tmp_path):
    alike = Reach(alike=Alike())
    for n in range(4):
        path = tmp_path / f"{n}.h5"
        with h5py.File(path, "w") as file:
            file["data"] = np.arange(9)
            names = file.create_dataset("names", data=[1, 2])
            # A null reference leads to no categories.
            is_set = are_codes == (n > 1)
            file["data"].attrs["categories"] = names.ref if is_set else h5py.Reference()
        if is_set:
            with pytest.raises(OtherKindError, match="codes of categories"):
                read_layouts(path, {"data": Field("data")}, alike)
        else:
            found = read_layouts(path, {"data": Field("data")}, alike)
            require_same(found, path, {"data": Field("data")})


def test_chunks_that_were_never_written_are_told_from_written_ones(tmp_path):
    alike, fields = Reach(alike=Alike()), {"data": Field("data")}
    for n in range(6):
        path = tmp_path / f"{n}.h5"
        with h5py.File(path, "w") as file:
            data = file.create_dataset("data", (40, 6), "f4", **GZIP)
            if n > 2:
                data[...] = n
        require_same(read_layouts(path, fields, alike), path, fields)


def test_each_structure_is_found_by_the_address_that_leads_to_it(tmp_path, without_hdf5):
    """In the order of addresses, or another; between values that are smaller, or larger."""
    alike = Reach(alike=Alike())
    for n, count in enumerate((0, 3, 3000, 400, 5000)):
        path = tmp_path / f"{n}.h5"
        with h5py.File(path, "w") as file:
            file["a"] = np.zeros(count or 1, "u1")
            file.create_dataset("of/b", data=np.ones(count + 200, "u1"), track_times=True)
            file["of/deep/labels"] = np.arange(count + 9)
            file["c"] = np.ones(count + 1)
            file["data"] = np.arange(count + 5)
        fields = {"data": Field("data"), "labels": Field("of/deep/labels")}
        found = without_hdf5(path, alike, fields) if n > 1 else read_layouts(path, fields, alike)
        require_same(found, path, fields)


def test_hdf5_reads_each_structure_by_itself(tmp_path, monkeypatch):
    """On this it depends that no unknown structure is read together with a known one."""
    noted, find = [], alikefiles._structures_read
    monkeypatch.setattr(
        alikefiles,
        "_structures_read",
        lambda source, ranges: noted.append((ranges, find(source, ranges))) or noted[-1][1],
    )
    alike = Reach(alike=Alike())
    for n in range(2):
        read_layouts(write_alike(tmp_path / f"{n}.h5", 40, n, **GZIP), FIELDS, alike)
    ((ranges, found),) = noted
    begins = {begin for begin, _ in ranges}
    apart = {one.offset for one in found} - begins
    heaps = {
        target
        for one in found
        if one.nbytes == 32
        for _, target, _ in one.addresses  # a heap and the names behind it are read at once
    }
    assert len(found) > 12
    assert apart == heaps


def write_linked(path, number, libver, refers):
    """Write two objects, in either order: the first, at the same address, is referred to."""
    types = {"a": np.dtype("f4"), "b": np.dtype("i4")}
    first, second = "ab" if number < 2 else "ba"
    with h5py.File(path, "w", libver=libver) as file:
        for group in types:
            file[f"{group}/x"] = np.arange(5.0)
        file["a/before"] = np.dtype("f8")
        for group in first, second:
            if refers == "type" or group == "a":
                file[f"{group}/t"] = types[group]
            else:
                file[f"{group}/t"] = np.arange(3)
        file["b/behind"] = np.dtype("f8")
        if refers == "type":
            file.create_dataset("b/other", (4,), file[f"{second}/t"])
            file.create_dataset("data", (10, 3), file[f"{first}/t"])[...] = 1
        else:
            file["data"] = np.arange(9)
            file["data"].attrs["categories"] = file[f"{first}/t"].ref


@pytest.mark.parametrize("libver", [None, "v108", "latest"])
@pytest.mark.parametrize("refers", ["type", "reference"])
def test_what_messages_and_references_lead_to_is_not_moved(tmp_path, refers, libver):
    """A datatype is committed, or categories are referred to; links also lead there."""
    alike = Reach(alike=Alike())
    fields = {name: Field(name) for name in ("data", "a/x", "b/x")}
    for n in range(4):
        path = tmp_path / f"{n}.h5"
        write_linked(path, n, libver, refers)
        alone = found_or_raised(path, Reach(), fields)
        together = found_or_raised(path, alike, fields)
        assert type(alone) is type(together)
        if isinstance(alone, str):
            assert "codes of categories" in alone == together
        else:
            require_same(together, path, fields)


def test_chunks_at_the_edge_that_are_not_filtered(tmp_path):
    set_options = hdf5_function("H5Pset_chunk_opts", ctypes.c_uint)
    alike, fields = Reach(alike=Alike()), {"data": Field("data")}
    for n, rows in enumerate((40, 40, 40, 37, 45)):
        path = tmp_path / f"{n}.h5"
        with h5py.File(path, "w", libver="latest") as file:
            plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
            plist.set_chunk((10, 3))
            plist.set_deflate(4)
            assert set_options(plist.id, 2) >= 0  # H5D_CHUNK_DONT_FILTER_PARTIAL_CHUNKS
            space = h5py.h5s.create_simple((rows, 3))
            made = h5py.h5d.create(file.id, b"data", h5py.h5t.IEEE_F32LE, space, plist)
            h5py.Dataset(made)[...] = np.arange(rows * 3).reshape(rows, 3)
        require_same(read_layouts(path, fields, alike), path, fields)


def test_files_of_two_kinds_in_turns_have_two_patterns(tmp_path, without_hdf5):
    alike, fields = Reach(alike=Alike()), {"data": Field("data")}
    for n in range(8):
        path = tmp_path / f"{n}.h5"
        with h5py.File(path, "w") as file:
            made = file.create_dataset("data", (40, 6), "f4", chunks=(10, 6))
            if n % 2:
                made[...] = n
        found = without_hdf5(path, alike, fields) if n > 3 else read_layouts(path, fields, alike)
        require_same(found, path, fields)


@pytest.mark.parametrize("kind", ["one chunk", "committed", "unlimited"])
def test_files_with_other_structures_have_the_same_bytes_in_the_same_places(
    kind, tmp_path, without_hdf5
):
    alike, fields = Reach(alike=Alike()), {"data": Field("data")}
    how = {"one chunk": {"chunks": (40, 6)}, "unlimited": {"chunks": (9, 6), "maxshape": (None, 6)}}
    for n in range(5):
        path = tmp_path / f"{n}.h5"
        with h5py.File(path, "w", libver="latest") as file:
            file["type"] = np.dtype("f4")
            dtype = file["type"] if kind == "committed" else "f4"
            file.create_dataset("data", (40, 6), dtype, **how.get(kind, {}))[...] = n
        found = without_hdf5(path, alike, fields) if n > 1 else read_layouts(path, fields, alike)
        require_same(found, path, fields)


@pytest.fixture(
    scope="module",
    params=["contiguous", "gzip", "chunks", "resizable", "many chunks", "latest gzip", "v108"],
)
def damaged(request, tmp_path_factory):
    """Return a file, its bytes, and what is known of others like it."""
    folder, alike = tmp_path_factory.mktemp(request.param), Alike()
    for n in range(alikefiles.FEW_FILES + 2):
        path = write_alike(folder / f"{n}.h5", 40 + n, n, **STORAGES[request.param][0])
        read_layouts(path, FIELDS, Reach(alike=alike))
    return path, path.read_bytes(), alike


@pytest.mark.slow
@given(data=st.data())
def test_damaged_files_are_what_they_are_alone(damaged, data):
    path, image, alike = damaged
    alike._misses.clear()
    found = bytearray(image)
    parts = list(structures(lambda at, n: image[at : at + n], lambda *_: True))
    addresses = [pair for one in parts for pair in one.addresses]
    for _ in range(data.draw(st.integers(1, 3))):
        if data.draw(st.booleans()):
            at = data.draw(st.sampled_from(addresses)).at
            other = data.draw(st.sampled_from(addresses)).target
            found[at : at + 8] = (other + data.draw(st.sampled_from([0, 8]))).to_bytes(8, "little")
            continue
        one = data.draw(st.sampled_from(parts))
        at = one.offset + data.draw(st.integers(0, min(one.nbytes, len(image) - one.offset) - 1))
        found[at] = data.draw(st.sampled_from([0, 1, 2, 255, found[at] ^ 1, found[at] ^ 128]))
    for one in parts if data.draw(st.booleans()) else ():
        end = one.offset + one.nbytes - 4
        if one.has_checksum or found[one.offset : one.offset + 2] == b"FA":
            checksum = checksum_function()(bytes(found[one.offset : end]), one.nbytes - 4, 0)
            found[end : end + 4] = checksum.to_bytes(4, "little")
    path.write_bytes(found)
    alone, together = found_or_raised(path, Reach()), found_or_raised(path, Reach(alike=alike))
    assert type(alone) is type(together)
    if isinstance(alone, str):
        assert alone == together
    else:
        for name, layout in alone.items():
            same(together[name], layout)
