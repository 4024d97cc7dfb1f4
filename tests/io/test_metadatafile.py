"""Metadata of far sources: what HDF5 reads through the file object, and in how many rounds."""

from __future__ import annotations

import gc
import random
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from memorystore import MemorySource, MemoryStore

from h5async import AsyncReader, H5AsyncError, ReaderConfig, ReadError
from h5async.config import Field
from h5async.index.metadata import list_layouts, read_layouts
from h5async.io import metadatafile
from h5async.io.indexreferences import (
    Format,
    Place,
    chunk_tree,
    extensible_array,
    find_places,
    fixed_array,
    fractal_heap,
    tree_header,
)
from h5async.io.metadatafile import MetadataFile
from h5async.io.references import object_header
from h5async.io.source import collecting_later
from h5async.io.stores import open_hdf5
from h5async.opening.dataset import open_dataset

CHUNKS, ROW_NBYTES = 5000, 1200


# --- chunk indices -------------------------------------------------------------------------------

# What `h5py.File` and `create_dataset` are given, and the rounds that opening may take.
INDICES: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "b-tree v1": ({}, {}, 4),
    "fixed array": ({"libver": "latest"}, {}, 2),
    "extensible array": ({"libver": "latest"}, {"maxshape": (None, ROW_NBYTES)}, 4),
    "b-tree v2": ({"libver": "latest"}, {"maxshape": (None, None)}, 4),
    "b-tree v1 in pages": ({"fs_strategy": "page", "fs_page_size": 1 << 16}, {}, 4),
    "fixed array in pages": (
        {"libver": "latest", "fs_strategy": "page", "fs_page_size": 1 << 16},
        {},
        2,
    ),
    "layout 5, fixed array": ({"libver": ("v200", "v200")}, {"compression": "gzip"}, 2),
    "layout 5, extensible array": (
        {"libver": ("v200", "v200")},
        {"compression": "gzip", "maxshape": (None, ROW_NBYTES)},
        4,
    ),
    "layout 5, b-tree v2": (
        {"libver": ("v200", "v200")},
        {"compression": "gzip", "maxshape": (None, None)},
        4,
    ),
    "behind a user block": ({"userblock_size": 1024}, {}, 4),
}


def write_chunks(path: Path, of_file: dict[str, Any], of_dataset: dict[str, Any]) -> None:
    """Write a dataset of many chunks between which nothing else lies."""
    with h5py.File(path, "w", **of_file) as file:
        shape = (CHUNKS, ROW_NBYTES)
        data = file.create_dataset("data", shape, "u1", chunks=(1, ROW_NBYTES), **of_dataset)
        for row in range(CHUNKS):
            data.id.write_direct_chunk((row, 0), bytes(ROW_NBYTES), 1 if of_dataset else 0)


@pytest.mark.parametrize("kind", INDICES)
@pytest.mark.sampled(len(INDICES))
def test_a_chunk_index_is_read_in_few_rounds(kind: str, tmp_path: Path, store: MemoryStore):
    of_file, of_dataset, most = INDICES[kind]
    path = tmp_path / "a.h5"
    write_chunks(path, of_file, of_dataset)
    fields = {"data": Field("data")}
    source = store.put(path)
    local, far = read_layouts(path, fields)["data"], read_layouts(source, fields)["data"]
    assert store.rounds <= most
    assert store.nbytes < 1 << 20 if "page" not in kind else 4 << 20
    assert local.chunks is not None
    assert far.chunks is not None
    for name in ("numbers", "offset", "nbytes", "filter_mask"):
        assert np.array_equal(getattr(local.chunks, name), getattr(far.chunks, name))
    assert far.chunks.offset.size == CHUNKS


def test_what_is_kept_is_bounded(tmp_path: Path, store: MemoryStore, monkeypatch):
    monkeypatch.setattr(metadatafile, "_MOST_PAGES", 100)
    monkeypatch.setattr(metadatafile, "_WALK_NBYTES", 1 << 17)
    monkeypatch.setattr(metadatafile, "_ROUND_PLACES", 16)
    path = tmp_path / "a.h5"
    write_chunks(path, {}, {})
    source = store.put(path)
    with open_hdf5(source) as file:
        kept = h5py.h5d.open(file.id, b"data").get_num_chunks()
    assert kept == CHUNKS
    fields = {"data": Field("data")}
    local, far = read_layouts(path, fields)["data"], read_layouts(source, fields)["data"]
    assert np.array_equal(local.chunks.offset, far.chunks.offset)
    assert store.rounds < 500


# --- groups --------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("libver", ["earliest", "latest"])
def test_many_groups_are_read_in_few_rounds(libver: str, tmp_path: Path, store: MemoryStore):
    path = tmp_path / "a.h5"
    with h5py.File(path, "w", libver=(libver, "latest")) as file:
        for group in range(60):
            for name in "abcdef":
                data = np.full((4, 100), group, "u2")
                file.create_dataset(f"demo_{group:03}/{name}", data=data, chunks=(4, 100))
    source = store.put(path)
    assert list(map(str, list_layouts(path))) == [
        str(one).replace(source, str(path)) for one in list_layouts(source)
    ]
    assert store.rounds <= 20
    store.rounds = 0
    options: dict[str, Any] = {"sequences": {"groups": "demo_*"}, "device": "cpu"}
    with AsyncReader(hdf5_path=source, fields={"c": "c", "f": "f"}, **options) as reader:
        assert reader.num_samples == 240
        assert store.rounds <= 20


@pytest.mark.slow
def test_one_object_of_many_does_not_cost_all(tmp_path: Path, store: MemoryStore):
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        for number in range(120):
            file.create_dataset(f"{number:03}", (100, 1000), "u1", chunks=(1, 1000))[...] = 1
    source = store.put(path)
    assert read_layouts(source, {"data": Field("060")})["data"].chunks is not None
    assert store.nbytes < 1 << 19


@pytest.mark.parametrize("libver", ["earliest", "latest"])
def test_attributes_in_heaps(libver: str, tmp_path: Path, store: MemoryStore):
    path, large = tmp_path / "a.h5", np.arange(20_000)
    with h5py.File(path, "w", libver=(libver, "latest"), track_order=True) as file:
        dataset = file.create_dataset("data", data=np.zeros(1 << 20, "u1"))
        for number in range(200):
            dataset.attrs[f"a{number}"] = np.full(30, number)
        if libver == "latest":
            dataset.attrs["large"] = large
    with open_hdf5(store.put(path)) as file:
        found = h5py.Dataset(h5py.h5d.open(file.id, b"data")).attrs
        assert all((found[f"a{number}"] == number).all() for number in range(200))
        assert libver != "latest" or np.array_equal(found["large"], large)
    assert store.rounds <= 6


# --- damaged files -------------------------------------------------------------------------------


def small(path: Path, libver: Any, **options: Any) -> None:
    with h5py.File(path, "w", libver=libver) as file:
        for number in range(12):
            group = file.create_group(f"group {number}")
            group.create_dataset(
                "data", data=np.arange(90).reshape(30, 3), chunks=(1, 3), **options
            )
            group["data"].attrs["unit"] = "m"


def outcome(name: str | Path) -> dict[str, Any]:
    """Return the datasets of a file with their first chunks; or which kind of error it gave."""
    try:
        return {
            path: type(one) if isinstance(one, Exception) else (one.shape, one.dtype, offsets(one))
            for path, one in list_layouts(name)
        }
    except H5AsyncError as error:
        return {"": type(error)}


def offsets(layout: Any) -> list[int]:
    return [] if layout.chunks is None else layout.chunks.offset.tolist()


@pytest.mark.parametrize("kind", ["earliest", "latest", "extensible"])
def test_damaged_metadata_give_what_a_local_file_gives(
    kind: str, tmp_path: Path, store: MemoryStore, monkeypatch
):
    monkeypatch.setattr(metadatafile, "_BLOCK_NBYTES", 2048)  # so that guesses fetch something
    path, draw = tmp_path / "a.h5", random.Random(kind)
    options = {"maxshape": (None, 3)} if kind == "extensible" else {}
    small(path, "earliest" if kind == "earliest" else "latest", **options)
    whole = path.read_bytes()
    marks = [b"TREE", b"SNOD", b"HEAP", b"OHDR", b"FAHD", b"EAHD", b"EAIB", b"FRHP", b"BTHD"]
    ats = [at for at in range(len(whole)) if whole[at : at + 4] in marks]
    for _ in range(25):
        garbled = bytearray(whole)
        for _ in range(draw.choice((1, 3, 40))):
            at = draw.choice(ats) + draw.randrange(200) if draw.random() < 0.8 else 0
            at = min(at or draw.randrange(len(whole)), len(whole) - 1)
            garbled[at] = draw.choice((0, 255, draw.randrange(256)))
        path.write_bytes(garbled)
        source = store.put(path)
        store.nbytes = 0
        assert outcome(source) == outcome(path)
        assert store.nbytes <= 40 * len(whole)


FINDERS: list[Callable[[Format], Place]] = [
    lambda form: chunk_tree(form, 0, 3),
    lambda form: tree_header(form, 0),
    lambda form: fixed_array(form, 0),
    lambda form: extensible_array(form, 0),
    lambda form: fractal_heap(form, 0),
    lambda form: Place(0, 1, object_header),
]
MARKS = [b"TREE\1", b"BTHD\0", b"BTIN\0", b"FAHD\0", b"EAHD\0", b"EAIB\0", b"EASB\0", b"FRHP\0"]
MARKS += [b"FHIB\0", b"FHDB\0", b"OHDR\2", b"SNOD\1", b"HEAP\0", b"\1\0"]


@given(
    st.sampled_from(FINDERS),
    st.sampled_from(MARKS),
    st.binary(max_size=600),
    st.builds(Format, st.just(0), st.sampled_from([0, 2, 4, 8, 255]), st.sampled_from([2, 8])),
)
@example(FINDERS[0], MARKS[0], b"\xff" * 600, Format())
def test_guesses_of_any_bytes_are_few_and_no_errors(finder, mark, data, form):
    todo, count = [finder(form)], 0
    for _ in range(4):
        found = [one for place in todo for one in find_places(place, mark + data, form)]
        assert len(found) <= 400 * len(todo)
        assert all(0 <= one.offset and 0 < one.nbytes <= 1 << 24 for one in found)
        count, todo = count + len(found), found[:20]


def test_a_tree_that_is_its_own_child(tmp_path: Path, store: MemoryStore):
    path = tmp_path / "a.h5"
    write_chunks(path, {}, {})
    with h5py.File(path) as file:
        header = h5py.h5o.get_info(file["data"].id).addr
    data = bytearray(path.read_bytes())
    root = max(
        (at for at in range(1 << 16) if data[at : at + 5] == b"TREE\1"), key=lambda at: data[at + 5]
    )
    key_nbytes = 8 + 8 * 3
    for child in range(2):
        struct.pack_into("<Q", data, root + 24 + key_nbytes + child * (key_nbytes + 8), root)
    path.write_bytes(data)
    source = store.open(store.put(path))
    content = MetadataFile(source)
    content.begin()
    content.seek(header)  # HDF5 would not come back from there
    assert content.read(16) == data[header : header + 16]
    assert store.nbytes < len(data) / 10
    source.close()


# --- many sources --------------------------------------------------------------------------------


def write_several(folder: Path, store: MemoryStore, count: int) -> list[str]:
    sources = []
    for number in range(count):
        path = folder / f"{number:02}.h5"
        with h5py.File(path, "w") as file:
            file["data"] = np.full((3, 2), number)
        sources.append(store.put(path))
    return sources


def test_the_next_sources_are_opened_meanwhile(tmp_path: Path, store: MemoryStore, monkeypatch):
    sources = write_several(tmp_path, store, 24)
    together, open_source = threading.Barrier(8), store.open

    def opens(name: str, **how: Any) -> MemorySource:
        together.wait(timeout=30)  # as many as that are being opened
        return open_source(name, **how)

    monkeypatch.setattr(store, "open", opens)
    opened = open_dataset(ReaderConfig(hdf5_path=sources, labels_field=None))
    assert [one.file for one in opened.layouts["data"].datasets] == sources


def test_a_source_that_is_missing_among_many(tmp_path: Path, store: MemoryStore):
    sources = write_several(tmp_path, store, 30)
    del store.held[sources[17]]
    with pytest.raises(ReadError, match=f"cannot open {sources[17]}: there is no such source"):
        AsyncReader(hdf5_path=sources, labels_field=None)
    with AsyncReader(
        hdf5_path=sources, labels_field=None, on_error="skip", device="cpu", batch_size=100
    ) as reader:
        (batch,) = reader
        assert sorted({*batch.data[:, 0].tolist()}) == [n for n in range(30) if n != 17]


# --- the end -------------------------------------------------------------------------------------

UNCLOSED = """
import sys
from pathlib import Path
import h5py
sys.path.insert(0, {folder!r})
from memorystore import new_store
from h5async import AsyncReader
from h5async.io.stores import open_hdf5
from h5async.opening.dataset import open_dataset
source = new_store().put(Path(sys.argv[1]))
file = open_hdf5(source)
dataset = h5py.Dataset(h5py.h5d.open(file.id, b"data"))
reader = AsyncReader(hdf5_path=[source], labels_field=None, device="cpu")
reader.get_next_batch()
if sys.argv[2] == "file lost":
    del file
print(dataset[0, 0])
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["file kept", "file lost"])
def test_what_is_left_open_does_no_harm_at_exit(how: str, tmp_path: Path):
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file["data"] = np.full((3, 2), 7)
    code = UNCLOSED.format(folder=str(Path(__file__).parents[1]))
    ended = subprocess.run(
        [sys.executable, "-c", code, str(path), how], capture_output=True, text=True, timeout=120
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "7\n", "")


def test_no_garbage_is_collected_until_the_last_has_left():
    first, second = collecting_later(), collecting_later()  # as of two threads
    with second:
        with first:
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
    first, second = collecting_later(), collecting_later()
    first.__enter__()
    with second:
        first.__exit__(None, None, None)
        assert not gc.isenabled()
    assert gc.isenabled()
