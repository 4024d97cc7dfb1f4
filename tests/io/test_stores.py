"""The seam between HDF5 files and what reads them, proven by a store of bytes in memory."""

from __future__ import annotations

import ast
import contextlib
import fcntl
import io
import itertools
import os
import shutil
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from conftest import assert_epoch_is, assert_same_bits, truth
from corpus import QUIRKS, Quirk
from memorystore import SCHEME, MemoryStore
from raggedcorpus import RAGGED, RaggedQuirk
from typer.testing import CliRunner

import h5async
from h5async import AsyncReader, DatasetError, H5AsyncError, ReadError, UnsafeFileError, cli
from h5async.config import Field
from h5async.index import indexcache
from h5async.index.links import Consulted, Reach
from h5async.index.metadata import read_layouts
from h5async.index.savedindex import IndexedFile, Wanted, write_index
from h5async.io.metadatafile import MetadataFile
from h5async.io.references import SIGNATURE
from h5async.io.stores import LOCAL, absolute_name, open_hdf5, settled_stamp, store_of
from h5async.samples.sparse import Csr

READABLE = {name: q for name, q in QUIRKS.items() if q.way in ("direct", "h5py")}
OTHERS = {name: q for name, q in QUIRKS.items() if name not in READABLE}


def written(quirk: Quirk, folder: Path) -> Path:
    """Make the file of a quirk, or skip the test if a filter is missing."""
    try:
        return quirk.write(folder)
    except ModuleNotFoundError as error:
        if error.name != "hdf5plugin" or os.environ.get("H5ASYNC_REQUIRE_EXTRAS") == "1":
            raise
        pytest.skip(str(error))


def reader_of(source: str | list[str], **options: Any) -> AsyncReader:
    given = {"labels_field": None, "device": "cpu", "batch_size": 7, "prefetch": 2} | options
    if "fields" in given:
        del given["labels_field"]
    return AsyncReader(hdf5_path=source, **given)


def names_another_file(path: Path) -> bool:
    """Tell whether a file refers to others by name, which are not put into the store."""
    return any(other.is_file() for other in path.parent.rglob("*") if other != path)


@pytest.mark.parametrize("quirk", READABLE.values(), ids=READABLE)
def test_the_corpus_is_read_out_of_another_store(quirk: Quirk, tmp_path: Path, store: MemoryStore):
    path = written(quirk, tmp_path)
    source = store.put(path)
    more = quirk.options(tmp_path) if quirk.options else {}
    if names_another_file(path):
        with pytest.raises((UnsafeFileError, DatasetError)):
            reader_of(source, data_field=quirk.names[0], **more).close()
        return
    expected = [truth(path, *one) for one in itertools.product(quirk.names, quirk.num_dims)]
    shutil.rmtree(tmp_path)  # so that HDF5 cannot find the file either
    places = itertools.product(quirk.names, quirk.num_dims)
    for (name, num_dim), rows in zip(places, expected, strict=True):
        options = {"data_field": name, "num_dim": num_dim, "batch_size": 1 + len(rows) // 3}
        with reader_of(source, **options, **more) as reader:
            assert_epoch_is(reader, rows)
            assert reader.layouts["data"].file == source


@pytest.mark.parametrize("quirk", OTHERS.values(), ids=OTHERS)
def test_what_cannot_be_read_is_an_error_there_too(
    quirk: Quirk, tmp_path: Path, store: MemoryStore
):
    source = store.put(written(quirk, tmp_path))
    more = quirk.options(tmp_path) if quirk.options else {}
    expected = H5AsyncError if quirk.way == "unreadable" else quirk.way
    for name in quirk.names:
        with (
            pytest.raises((expected, UnsafeFileError)) as caught,
            reader_of(source, data_field=name, **more) as reader,
        ):
            list(reader)
        assert source in str(caught.value)
        assert f'"{name}"' in str(caught.value)


def samples_of(data: Any) -> list[np.ndarray]:
    """Return copies of the samples of a batch; of sparse rows, columns and values of each."""
    if isinstance(data, Csr):
        rows = itertools.pairwise(data.indptr.tolist())
        return [part[a:b].copy() for a, b in rows for part in (data.indices, data.data)]
    return [np.array(sample) for sample in data]


@pytest.mark.parametrize("has_core", [True, False])
@pytest.mark.parametrize("quirk", RAGGED.values(), ids=RAGGED)
def test_samples_of_differing_lengths(
    quirk: RaggedQuirk,
    has_core: bool,
    tmp_path: Path,
    store: MemoryStore,
    request: pytest.FixtureRequest,
):
    if not has_core:
        request.getfixturevalue("h5py_way")
    path = written(quirk, tmp_path)
    source = store.put(path)
    with h5py.File(path) as file:
        expected = quirk.truth(file)
    with reader_of(source, fields={"data": quirk.field}) as reader:
        found = [sample for batch in reader for sample in samples_of(batch.data)]
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert np.array_equal(one, other)


# --- several sources, saved indices --------------------------------------------------------------


def demos(path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    with h5py.File(path, "w") as file:
        for number, length in enumerate((5, 9, 3)):
            file[f"demo_{number}/actions"] = rng.random((length, 2))
        flat = rng.integers(0, 99, (40, 3))
        file.create_dataset("data", data=flat, chunks=(8, 3), compression="gzip")
        file["labels"] = np.arange(40, dtype="u1")


@pytest.fixture
def several(tmp_path: Path, store: MemoryStore) -> tuple[list[Path], list[str]]:
    paths = [tmp_path / "a.h5", tmp_path / "b.h5"]
    for seed, path in enumerate(paths):
        demos(path, seed)
    return paths, [store.put(path) for path in paths]


FIELDS = {"data": "data", "labels": "labels"}


def rows_of(paths: list[Path]) -> np.ndarray:
    return np.concatenate([truth(path) for path in paths])


def test_several_sources_are_one_dataset(several):
    paths, sources = several
    for options in ({}, {"shuffle": "full", "num_threads": 3}, {"shuffle": "window"}):
        with reader_of(sources, fields=FIELDS, **options) as reader:
            assert_epoch_is(reader, rows_of(paths), in_order=not options)
            assert set(reader.stats().ways.values()) == {"core"}


def test_sources_beside_local_files(several):
    paths, sources = several
    with reader_of([str(paths[0]), sources[1]], fields=FIELDS) as reader:
        assert_epoch_is(reader, rows_of(paths))
        assert reader.config.files == [paths[0], sources[1]]


def test_groups_as_sequences(several):
    paths, sources = several
    options = {"fields": {"actions": "actions"}, "sequences": {"groups": "demo_*"}}
    with reader_of(paths, **options) as local, reader_of(sources, **options) as reader:
        for one, other in zip(local, reader, strict=True):
            assert_same_bits(other.actions, one.actions)


def test_weights_by_source(several):
    _, sources = several
    weights = dict(zip(sources, (0, 1), strict=True))
    with reader_of(sources, fields=FIELDS, weights=weights, shuffle="full") as reader:
        assert all((batch.index >= 40).all() for batch in reader)


@pytest.mark.parametrize("place", ["folder", "file.h5idx"])
def test_what_was_learnt_is_saved(place, several, store, tmp_path, monkeypatch):
    monkeypatch.setattr(indexcache, "LEAST_SECONDS", 0)
    paths, sources = several
    where = tmp_path / place
    if place == "folder":
        where.mkdir(mode=0o700)
    reads = []
    for _ in range(2):
        before = store.reads
        with reader_of(sources, fields=FIELDS, index_cache=where) as reader:
            reads.append(store.reads - before)
            assert_epoch_is(reader, rows_of(paths))
    assert list(tmp_path.glob("**/*.h5idx"))
    assert reads[1] < reads[0]


def run(*arguments: str) -> str:
    result = CliRunner().invoke(cli.app, arguments)
    assert result.exit_code == 0, result.output
    return result.output


def test_an_index_stands_for_its_sources(several, store, tmp_path):
    paths, sources = several
    index = tmp_path / "all.h5idx"
    run("index", *sources, "-o", str(index))
    with reader_of(str(index), fields=FIELDS) as reader:
        assert_epoch_is(reader, rows_of(paths))
        assert reader.layouts["data"].datasets[1].file == sources[1]
    demos(paths[0], 5)
    store.put(paths[0])
    with (
        pytest.raises(ReadError, match=r"was replaced|was changed"),
        reader_of(str(index), fields=FIELDS) as reader,
    ):
        list(reader)


def test_an_index_beside_its_sources(several, store, tmp_path):
    paths, sources = several
    index = tmp_path / "all.h5idx"
    run("index", *sources, "-o", str(index))
    name, before = store.put(index), store.rounds
    with reader_of(name, fields=FIELDS) as reader:
        assert store.rounds - before == 2  # its first bytes, and all
        assert_epoch_is(reader, rows_of(paths))
    assert "labels" in run("inspect", name)
    elsewhere = store.put(index, f"{SCHEME}://other/all.h5idx")
    with pytest.raises(UnsafeFileError, match=r"all.h5idx refers to .*, which is not beside"):
        reader_of(elsewhere, fields=FIELDS)
    with reader_of(elsewhere, fields=FIELDS, allow_external=f"{SCHEME}://bucket") as reader:
        assert_epoch_is(reader, rows_of(paths))


def test_an_index_in_a_store_that_cannot_be_used(several, store, tmp_path):
    paths, _ = several
    index = tmp_path / "all.h5idx"
    run("index", *map(str, paths), "-o", str(index))
    moved = tmp_path / "elsewhere" / "all.h5idx"
    moved.parent.mkdir()
    run("index", *map(str, paths), "-o", str(moved))
    with pytest.raises(UnsafeFileError, match="which lies in another store"):
        reader_of(store.put(moved), fields=FIELDS)
    data = bytearray(index.read_bytes())
    data[-1] ^= 1
    index.write_bytes(data)
    with pytest.raises(ReadError, match=r"all.h5idx cannot be used as a saved index: .*damaged"):
        reader_of(store.put(index), fields=FIELDS)
    index.write_bytes(paths[0].read_bytes())
    with pytest.raises(ReadError, match=r"cannot be used as a saved index: it is not a saved"):
        reader_of(store.put(index), fields=FIELDS)
    with pytest.raises(ReadError, match=r"cannot open memory://bucket/none.h5idx: there is no"):
        reader_of(f"{SCHEME}://bucket/none.h5idx", fields=FIELDS)


@pytest.mark.parametrize("command", ["inspect", "read"])
def test_commands_take_names_of_sources(command, several):
    assert "h5py" not in run(command, several[1][0])


# --- sources that change -------------------------------------------------------------------------


def test_a_source_that_was_changed_is_noticed(several, store):
    paths, sources = several
    with reader_of(sources[0], fields=FIELDS, num_threads=0) as reader:
        batches = iter(reader)
        next(batches)
        with h5py.File(paths[0], "r+") as file:
            file["data"][...] = 0
        store.put(paths[0])
        with pytest.raises(ReadError, match=rf"{sources[0]} was (replaced|changed)"):
            list(batches)


def test_a_source_that_is_gone_is_noticed(several, store):
    _, sources = several
    with reader_of(sources[0], fields=FIELDS, num_threads=0) as reader:
        batches = iter(reader)
        next(batches)
        del store.held[sources[0]]
        with pytest.raises(ReadError, match=f"{sources[0]} cannot be read"):
            list(batches)


def test_a_source_that_changes_while_it_is_indexed(several, store, monkeypatch):
    paths, sources = several
    get_ranges = store.open(sources[0]).__class__.get_ranges

    def changes(source, offsets, lengths):
        found = get_ranges(source, offsets, lengths)
        store.put(paths[1], sources[0])
        return found

    monkeypatch.setattr("memorystore.MemorySource.get_ranges", changes)
    with pytest.raises(ReadError, match=f"cannot open {sources[0]}"):
        reader_of(sources[0], fields=FIELDS)
    store.open_sources.clear()


# --- names, and why a source is not opened -------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (None, "there is no such source"),
        (b"", "it is empty"),
        (SIGNATURE + bytes(8), "it is cut short: only 16 bytes are there"),
        (b"PK\3\4" + bytes(900), "it is not an HDF5 file, but a zip archive"),
    ],
)
def test_why_a_source_is_not_opened(data, why, store, tmp_path):
    source = f"{SCHEME}://bucket/[a]*?//b.h5"
    if data is not None:
        path = tmp_path / "a.h5"
        path.write_bytes(data)
        store.put(path, source)
    with pytest.raises(ReadError) as caught:
        reader_of(source)
    assert f"cannot open {source}: {why}" in str(caught.value)


def test_names_are_passed_on_as_they_are(several, store, tmp_path):
    name = f"{SCHEME}://bucket/[a]*//$HOME/../é.h5?x=~"
    source = store.put(several[0][0], name)
    options = tmp_path / "options.toml"
    options.write_text(f"hdf5_path = {source!r}\n", encoding="utf-8")
    for given, more in ((None, {"hdf5_path": [source]}), (options, {})):
        with AsyncReader(given, fields=FIELDS, device="cpu", **more) as reader:
            assert reader.layouts["data"].file == source
            assert_epoch_is(reader, truth(several[0][0]))


def test_a_scheme_without_a_store_is_a_local_path(tmp_path, monkeypatch, several):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ReadError, match=r"cannot open none://a.h5: h5async does not read from none:"
    ):
        reader_of("none://a.h5")
    (tmp_path / "none:").mkdir()
    shutil.copy(several[0][0], tmp_path / "none:" / "a.h5")
    with reader_of("none://a.h5", fields=FIELDS) as reader:
        assert_epoch_is(reader, truth(several[0][0]))


@pytest.mark.parametrize("kind", ["link", "virtual", "external"])
def test_local_files_lead_to_no_other_store(kind, several, store, tmp_path):
    path, source = tmp_path / "leads.h5", several[1][0]
    with h5py.File(path, "w") as file:
        refer(file, kind, source)
    before = store.reads
    with pytest.raises(H5AsyncError):
        reader_of(str(path), allow_external=[tmp_path])
    assert store.reads == before


@pytest.mark.parametrize("kind", ["link", "virtual", "external"])
@pytest.mark.parametrize("name", ["/etc/a.h5", "a.h5", "./x/../a.h5", "memory://bucket/a.h5"])
def test_sources_lead_to_what_lies_beside_them(kind, name, several, store, tmp_path):
    path = tmp_path / "leads.h5"
    with h5py.File(path, "w") as file:
        refer(file, kind, name)
    source = store.put(path)
    if kind != "external":
        with reader_of(source) as reader:
            assert_epoch_is(reader, truth(several[0][0]))
            assert next(reader.layouts["data"].origins()).file == several[1][0]
        del store.held[several[1][0]]
        with pytest.raises(DatasetError, match=r"does not exist|is missing"):
            reader_of(source)
        return
    with pytest.raises(UnsafeFileError, match=r"external file, memory://bucket/a\.h5"):
        reader_of(source)
    with reader_of(source, allow_external="memory://bucket") as reader:
        content = np.frombuffer(several[0][0].read_bytes(), "u1", 12).reshape(4, 3)
        assert_epoch_is(reader, content)


@pytest.mark.parametrize("kind", ["link", "virtual", "external"])
@pytest.mark.parametrize("name", ["../a.h5", "memory://other/a.h5", "x/../../a.h5"])
def test_what_does_not_lie_beside_must_be_allowed(kind, name, several, store, tmp_path):
    path = tmp_path / "leads.h5"
    with h5py.File(path, "w") as file:
        refer(file, kind, name)
    source = store.put(path, "memory://bucket/some/leads.h5")
    found = store.put(several[0][0], "memory://other/a.h5") if "other" in name else several[1][0]
    before = store.reads
    folder = found.rpartition("/")[0]
    with pytest.raises(UnsafeFileError, match=rf"allow_external=\['{folder}'\]"):
        reader_of(source)
    with reader_of(source, allow_external=[folder]) as reader:
        assert len(list(reader)) == len(reader)
    assert store.reads > before
    with pytest.raises(UnsafeFileError):
        reader_of(source, allow_external=[folder[:-1], f"{folder}/a", tmp_path])


@pytest.mark.parametrize("kind", ["link", "virtual", "external"])
@pytest.mark.parametrize("name", ["../../../a.h5", "memory://bucket/some/../../a.h5"])
def test_names_that_lead_out_of_a_bucket(kind, name, several, store, tmp_path):
    path = tmp_path / "leads.h5"
    with h5py.File(path, "w") as file:
        refer(file, kind, name)
    with pytest.raises(UnsafeFileError, match="is not a valid name"):
        reader_of(store.put(path, "memory://bucket/some/leads.h5"))


def test_hdf5_never_looks_for_the_sources_of_a_virtual_dataset(several, store, tmp_path, h5py_way):
    """It would take the file itself for each of them."""
    path = tmp_path / "leads.h5"
    with h5py.File(path, "w") as file:
        refer(file, "virtual", "a.h5")
        layout = h5py.VirtualLayout((40, 3), "f4")
        layout[:] = h5py.VirtualSource("a.h5", "data", (40, 3))
        file.create_virtual_dataset("converted", layout)
    with reader_of(store.put(path)) as reader:
        assert_epoch_is(reader, truth(several[0][0]))
    with pytest.raises(DatasetError, match="can only be read by HDF5"):
        reader_of(store.put(path), data_field="converted")


def test_a_mapping_without_a_limit(several, store, tmp_path):
    path = tmp_path / "leads.h5"
    with h5py.File(path, "w") as file:
        layout = h5py.VirtualLayout((40, 3), "i8", maxshape=(None, 3))
        mapped = h5py.VirtualSource("a.h5", "data", (40, 3), maxshape=(None, 3))
        layout[: h5py.h5s.UNLIMITED] = mapped[: h5py.h5s.UNLIMITED]
        file.create_virtual_dataset("data", layout)
    with pytest.raises(DatasetError, match="without a limit can only be read by HDF5"):
        reader_of(store.put(path))


@pytest.mark.parametrize("is_local", [True, False])
def test_an_index_does_not_lead_from_store_to_store(is_local, several, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    paths, sources = several
    path, other = (str(paths[0]), sources[1]) if is_local else (sources[0], str(paths[1]))
    consulted, index = Consulted(), tmp_path / "a.h5idx"
    fields = {name: Field(name) for name in FIELDS}
    layouts = read_layouts(path, fields, Reach(consulted=consulted))
    consulted.found(other, store_of(other).stamp(other))
    known = {Wanted.of(field): layouts[name] for name, field in fields.items()}
    write_index(index, [IndexedFile(path, known, consulted)], Reach())
    with pytest.raises(UnsafeFileError, match="files of the same store"):
        reader_of(str(index), allow_external=[tmp_path])


def refer(file: h5py.File, kind: str, name: str) -> None:
    """Make `data` lead to another file."""
    if kind == "link":
        file["data"] = h5py.ExternalLink(name, "data")
    elif kind == "virtual":
        layout = h5py.VirtualLayout((40, 3), "i8")
        layout[:] = h5py.VirtualSource(name, "data", (40, 3))
        file.create_virtual_dataset("data", layout)
    else:
        file.create_dataset("data", (4, 3), "u1", external=[(name, 0, 12)])


# --- the seam ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["local", "memory"])
def test_an_open_source(kind, store, tmp_path):
    path, content = tmp_path / "a", bytes(range(256))
    path.write_bytes(content)
    name = str(path) if kind == "local" else store.put(path)
    source = store_of(name).open(name)
    assert source.stamp() == store_of(name).stamp(name) == settled_stamp(name)
    assert source.stamp().nbytes == 256
    assert source.read(250, 100) == content[250:]
    assert source.read(300, 1) == b""
    ranges = source.get_ranges([200, 3, 90], [5, 0, 7])
    assert [bytes(one) for one in ranges] == [content[200:205], b"", content[90:97]]
    assert not source.get_ranges([], [])
    with pytest.raises(ReadError):
        source.get_ranges([0, 250], [7, 7])
    file = MetadataFile(source)
    assert file.seek(-6, io.SEEK_END) == 250
    assert file.read() == content[250:]
    assert (file.tell(), file.read(1), file.seek(-1, io.SEEK_CUR)) == (256, b"", 255)
    source.close()
    source.close()


def test_names_that_are_absolute(tmp_path, monkeypatch, store):
    monkeypatch.chdir(tmp_path)
    assert absolute_name("a.h5") == str(tmp_path / "a.h5")
    assert absolute_name(f"{SCHEME}://a.h5") == f"{SCHEME}://a.h5"
    assert store_of("a.h5") is store_of("other://a.h5") is LOCAL
    assert store_of(f"{SCHEME}://a.h5") is store


OF_FILES = {
    "open",
    "stat",
    "fstat",
    "lstat",
    "pread",
    "preadv",
    "read",
    "readv",
    "lseek",
    "scandir",
}
ABOVE = ("index", "plan", "order", "read", "samples", "opening", "fill", "reader")
OF_THE_INDEX = {"savedfile.py", "indexcache.py"}  # which lies in a local file itself


def test_nothing_above_opens_the_files_itself():
    package = Path(h5async.__file__).parent
    found = []
    for path in itertools.chain.from_iterable((package / room).rglob("*.py") for room in ABOVE):
        if path.name in OF_THE_INDEX:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            of = node.func.value
            name = f"{of.id}.{node.func.attr}" if isinstance(of, ast.Name) else node.func.attr
            if name in {f"os.{one}" for one in OF_FILES} | {"h5f.open", "get_vfd_handle"}:
                found.append(f"{path.name}:{node.lineno}: {name}")
            if name == "h5py.File" and not any(k.arg == "driver" for k in node.keywords):
                found.append(f"{path.name}:{node.lineno}: {name}")
    assert not found


@pytest.mark.parametrize("locking", [None, True, False])
def test_a_file_in_use_is_checked_without_a_lock(tmp_path: Path, locking: bool | None):
    path = tmp_path / "used.h5"
    with h5py.File(path, "w") as file:
        file["data"] = 1
    own = contextlib.nullcontext() if locking is None else h5py.File(path, locking=locking)
    with own, open_hdf5(path, in_use=True) as found, open(path, "rb") as other:
        assert found["data"][()] == 1
        if not locking:
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
