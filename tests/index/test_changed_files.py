"""Files that are changed under an open reader: never an old layout over new bytes, never a crash.

Each case is tried with the compiled core and in Python, with files that are mapped and read, in
threads and in the thread of the caller.
"""

from __future__ import annotations

import functools
import itertools
import os
import pickle
import shutil
import subprocess
import sys
import textwrap
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from cases import each
from conftest import require_extra

from h5async import AsyncReader, FileChangedWarning, H5AsyncError, ReadError
from h5async.core.binding import load_core

hdf5plugin = require_extra("hdf5plugin")

ROWS, ROW = 96, (6, 5)
WAYS: dict[str, dict[str, Any]] = {
    "contiguous": {},
    "raw_chunks": {"chunks": (8, 6, 5)},
    "tiles": {"chunks": (5, 4, 3)},
    "gzip": {"chunks": (8, 6, 5), "compression": "gzip"},
    "gzip_tiles": {"chunks": (5, 4, 3), "compression": "gzip"},
    "shuffle_lzf": {"chunks": (8, 6, 5), "compression": "lzf", "shuffle": True},
    "blosc2": {"chunks": (8, 6, 5), **hdf5plugin.Blosc2()},
    "szip": {"chunks": (8, 6, 5), "compression": "szip"},
    "by_plugin": {"chunks": (8, 6, 5), **hdf5plugin.Zfp(reversible=True)},
}


def values(seed: int) -> np.ndarray[Any, Any]:
    """Return rows that name themselves in each element, and the seed."""
    rows = np.arange(ROWS, dtype=np.float32).reshape(-1, 1, 1)
    return np.broadcast_to(rows + 1000 * seed, (ROWS, *ROW)).copy()


def write(path: Path, seed: int, way: dict[str, Any], **others: Any) -> None:
    with h5py.File(path, "w") as file:
        file.create_dataset("data", data=values(seed), **way, **others)
        file["labels"] = np.arange(ROWS) + 1000 * seed


# Runs what it is sent, with what it needs imported once.
WRITER = """
import pickle, sys
import h5py, hdf5plugin
import numpy as np
while True:
    try:
        code, path = pickle.load(sys.stdin.buffer)
    except EOFError:
        break
    exec(code, {"h5py": h5py, "np": np, "path": path})
    print("done", flush=True)
"""


@functools.cache
def writer() -> subprocess.Popen[bytes]:
    """Return a process that writes, until `_writer_ends` ends it."""
    return subprocess.Popen(
        [sys.executable, "-c", WRITER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
    )


@pytest.fixture(scope="module", autouse=True)
def _writer_ends() -> Iterator[None]:
    yield
    if writer.cache_info().currsize:
        with writer() as process:  # which closes its pipes, and waits for it
            pass
        assert process.returncode == 0
        writer.cache_clear()


def in_another_process(code: str, path: Path) -> None:
    """Run a script that finds the path of a file in `path`; HDF5 here has it open, or locked."""
    process = writer()
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(pickle.dumps((code, str(path))))
    assert process.stdout.readline() == b"done\n"


def is_of(batch: Any, seed: int) -> bool:
    """Tell whether all of a batch is of one version of the file."""
    return np.array_equal(batch.data, values(seed)[batch.index]) and np.array_equal(
        batch.labels, batch.index + 1000 * seed
    )


def take(reader: AsyncReader, batches: int) -> list[Any]:
    """Return copies of batches, or the errors that came in their place."""
    found: list[Any] = []
    for _ in range(batches):
        try:
            found.append(reader.get_next_batch().copy())
        except H5AsyncError as error:
            found.append(error)
    return found


OPTIONS = [
    {
        "io": io,
        "num_threads": num_threads,
        "batch_size": 10,
        "prefetch": 1,
        "device": "cpu",
        "shuffle": "full",
    }
    for io in ("auto", "pread")
    for num_threads in (0, 2)
]


@pytest.mark.parametrize("way", WAYS)
@each("options", OPTIONS)
def test_a_file_rewritten_in_place_with_the_same_index_goes_on(tmp_path, options, way):
    """All values are new in each batch that is read after it, and there is one warning."""
    path = tmp_path / "file.h5"
    write(path, 1, WAYS[way])
    with AsyncReader(hdf5_path=path, **options) as reader:
        assert is_of(reader.get_next_batch(), 1)
        in_another_process(
            "with h5py.File(path, 'r+', locking=False) as file:\n"
            "    file['data'][...] += 1000\n"
            "    file['labels'][...] += 1000\n",
            path,
        )
        # Encoded chunks may have become longer, and lie elsewhere.
        is_same = True if way in ("contiguous", "raw_chunks", "tiles") else None
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = take(reader, 2 * len(reader))
        messages = [str(w.message) for w in caught if w.category is FileChangedWarning]
    if is_same is None:
        is_same = not any(isinstance(batch, ReadError) for batch in found)
    if is_same:
        assert all(is_of(batch, 2) for batch in found)
        assert len(messages) == 1
        assert str(path) in messages[0]
    else:
        for batch in found:
            assert isinstance(batch, ReadError)
            assert "was changed while it was being read" in str(batch)
            assert str(path) in str(batch)


@pytest.mark.parametrize("way", ["contiguous", "gzip", "gzip_tiles", "by_plugin"])
@pytest.mark.parametrize(
    "change", ["dtype", "shape", "moved", "gone", "no_hdf5", "empty", "longer", "chunks"]
)
@each("options", OPTIONS)
def test_a_file_rewritten_with_another_index_is_an_error(tmp_path, options, way, change):
    path = tmp_path / "file.h5"
    write(path, 1, WAYS[way])
    size = path.stat().st_size
    with AsyncReader(hdf5_path=path, **options) as reader:
        assert is_of(reader.get_next_batch(), 1)
        other, how = values(2), dict(WAYS[way])
        if change == "dtype":
            other = other.view(np.int32)
        elif change == "shape":
            other = other[:, ::-1].reshape(ROWS, 5, 6)
            how.pop("chunks", None)
            how |= {"chunks": (8, 5, 6)} if how else {}
        elif change == "longer":
            other = np.concatenate([other, other])
        elif change == "chunks":
            how |= {"chunks": (4, 6, 5)}
        if change == "dtype" and way == "by_plugin":
            how = {"chunks": (8, 6, 5), "compression": "gzip"}
        if change == "no_hdf5":
            with path.open("r+b") as file:
                file.write(b"\0" * size)
        elif change == "empty":
            os.truncate(path, 0)
        else:
            with h5py.File(path.with_suffix(".new"), "w") as file:
                if change == "moved":
                    file["before"] = np.arange(100)
                name = "another" if change == "gone" else "data"
                file.create_dataset(name, data=other, **how)
                file["labels"] = np.arange(len(other))
            content = path.with_suffix(".new").read_bytes()
            with path.open("r+b") as file:  # the same inode
                file.write(content)
        for error in take(reader, 5):
            assert isinstance(error, ReadError)
            assert str(path) in str(error)
            assert "was changed while it was being read" in str(error)


@pytest.mark.parametrize("way", ["contiguous", "gzip"])
@each("options", OPTIONS)
def test_a_file_that_was_renamed_over_is_read_as_it_was(tmp_path, options, way):
    path = tmp_path / "file.h5"
    write(path, 1, WAYS[way])
    write(tmp_path / "new.h5", 2, WAYS[way])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with AsyncReader(hdf5_path=path, **options) as reader:
            assert is_of(reader.get_next_batch(), 1)
            (tmp_path / "new.h5").rename(path)
            assert all(is_of(batch, 1) for batch in take(reader, 2 * len(reader)))
            path.unlink()
            assert all(is_of(batch, 1) for batch in take(reader, len(reader)))
    assert not caught  # nothing that it reads has changed


@pytest.mark.parametrize("way", ["contiguous", "gzip", "gzip_tiles"])
@each("options", OPTIONS)
def test_a_change_of_the_status_alone_is_no_change(tmp_path, options, way):
    path = tmp_path / "file.h5"
    write(path, 1, WAYS[way])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with AsyncReader(hdf5_path=path, **options) as reader:
            for mode in (0o600, 0o640, 0o644):
                path.chmod(mode)
                assert all(is_of(batch, 1) for batch in take(reader, 3))
    assert not caught


def every_kind(folder: Path) -> dict[str, dict[str, Any]]:
    """Write a dataset of each kind of storage; return the options that read it."""
    table = np.zeros(ROWS, [("a", "i2"), ("b", "f4", ROW)])
    table["b"] = values(1)
    with h5py.File(folder / "f.h5", "w") as file:
        file["contiguous"] = file["source"] = values(1)
        file["table"] = table
        file.create_dataset("chunked_table", data=table, chunks=(8,), compression="gzip")
        file.create_dataset("gzip", data=values(1), chunks=(8, 6, 5), compression="gzip")
        file.create_dataset("by_plugin", data=values(1), chunks=(8, 6, 5), scaleoffset=4)
        plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plist.set_layout(h5py.h5d.COMPACT)
        space = h5py.h5s.create_simple((ROWS, *ROW))
        h5py.h5d.create(file.id, b"compact", h5py.h5t.IEEE_F32LE, space, plist)
        file["compact"][...] = values(1)
        layout = h5py.VirtualLayout((ROWS, *ROW), "f4")
        layout[...] = h5py.VirtualSource(file["source"])
        file.create_virtual_dataset("virtual", layout)
        values(1).tofile(folder / "f.raw")
        external = [(str(folder / "f.raw"), 0, h5py.h5f.UNLIMITED)]
        file.create_dataset("external", (ROWS, *ROW), "f4", external=external)
    names = ["contiguous", "gzip", "by_plugin", "compact", "virtual", "external"]
    fields = {name: name for name in [*names, "table/b", "chunked_table/b"]}
    return {name: {"fields": {"data": path}} for name, path in fields.items()}


@pytest.mark.slow
@pytest.mark.parametrize("what", ["touched", "an attribute", "linked", "another dataset"])
@each("options", OPTIONS)
def test_a_change_that_leaves_the_values_alone_is_none_to_any_kind_of_field(
    tmp_path, options, what
):
    for name, fields in every_kind(tmp_path).items():
        path = tmp_path / "f.h5"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FileChangedWarning)
            with AsyncReader(
                hdf5_path=path, allow_external=tmp_path, **options, **fields
            ) as reader:
                reader.get_next_batch()
                if what == "touched":
                    os.utime(path)
                    os.utime(tmp_path / "f.raw")
                elif what == "linked":
                    os.link(path, tmp_path / f"{name.replace('/', '_')}.link")
                else:
                    code = "file.attrs['n'] = 1" if what == "an attribute" else "file['x'] = 1"
                    code = f"with h5py.File(path, 'r+', locking=False) as file: {code}"
                    in_another_process(code.replace("'x'", f"'x{name}'"), path)
                for batch in take(reader, len(reader)):
                    assert np.array_equal(batch.data, values(1)[batch.index]), name


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give up its rights")
def test_a_file_that_may_not_be_opened_any_more_is_read_on(tmp_path):
    path = tmp_path / "file.h5"
    write(path, 1, WAYS["gzip"])
    tmp_path.chmod(0o755)
    for parent in tmp_path.parents[:2]:
        parent.chmod(0o755)
    code = """
        import os, sys
        from h5async import AsyncReader
        reader = AsyncReader(hdf5_path=sys.argv[1], batch_size=10, num_threads=0, device="cpu")
        reader.get_next_batch()
        os.chmod(sys.argv[1], 0)
        os.setuid(65534)
        for batch in reader:
            assert (batch.data[:, 0, 0] == batch.index + 1000).all()
        print("fine")
    """
    done = run(code, path)
    assert (done.returncode, done.stdout) == (0, "fine\n"), done.stderr


@each("options", OPTIONS)
def test_a_file_that_is_touched_all_the_time_can_be_read(tmp_path, options):
    path, is_over, touches = tmp_path / "file.h5", threading.Event(), []
    write(path, 1, WAYS["gzip"])

    def touch() -> None:
        while not is_over.is_set():
            os.utime(path)
            touches.append(1)

    toucher = threading.Thread(target=touch)
    with warnings.catch_warnings(), AsyncReader(hdf5_path=path, **options) as reader:
        warnings.simplefilter("ignore", FileChangedWarning)
        toucher.start()
        try:
            assert all(is_of(batch, 1) for batch in take(reader, 6))
        finally:
            is_over.set()
            toucher.join()
    assert touches


@each("num_threads", [0, 2])
def test_rows_that_are_kept_in_memory_are_forgotten(tmp_path, num_threads):
    path = tmp_path / "file.h5"
    write(path, 1, {})
    with AsyncReader(
        hdf5_path=path, batch_size=10, cache="host", shuffle="full", device="cpu", prefetch=1,
        num_threads=num_threads,
    ) as reader:  # fmt: skip
        take(reader, len(reader) + 2)
        with h5py.File(path, "r+") as file:
            file["data"][...] = values(2)
            file["labels"][...] += 1000
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FileChangedWarning)
            found = take(reader, 3 * len(reader))
    # Until a batch needs the file, all come out of memory; none is of both.
    assert all(is_of(batch, 1) or is_of(batch, 2) for batch in found)


@each("options", OPTIONS)
def test_a_warning_that_is_an_error_costs_no_batch(tmp_path, options):
    path = tmp_path / "file.h5"
    write(path, 1, {})
    with AsyncReader(hdf5_path=path, **{**options, "shuffle": False}) as reader:
        assert reader.get_next_batch().index[0] == 0
        with h5py.File(path, "r+") as file:
            file["data"][...] = values(2)
            file["labels"][...] += 1000
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(FileChangedWarning, match="the reader continues"):
                reader.get_next_batch()
        batch = reader.get_next_batch()
        assert batch.index[0] == 10
        assert is_of(batch, 2)


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["thread", "process"])
def test_a_helper_process_warns_too(tmp_path, workers):
    path = tmp_path / "file.h5"
    write(path, 1, {})
    with AsyncReader(hdf5_path=path, batch_size=10, device="cpu", workers=workers) as reader:
        assert is_of(reader.get_next_batch(), 1)
        with h5py.File(path, "r+") as file:
            file["data"][...] = values(2)
            file["labels"][...] += 1000
        with pytest.warns(FileChangedWarning, match="the reader continues"):
            found = take(reader, 3 * len(reader))
        assert all(is_of(batch, 2) for batch in found[2:])


@pytest.mark.parametrize("way", ["contiguous", "raw_chunks", "gzip", "gzip_tiles", "by_plugin"])
@each("options", OPTIONS)
def test_sources_of_a_virtual_dataset_are_looked_at(tmp_path, options, way):
    layout = h5py.VirtualLayout((2 * ROWS, *ROW), np.float32)
    for number in range(2):
        write(tmp_path / f"{number}.h5", number, WAYS[way])
        source = h5py.VirtualSource(f"{number}.h5", "data", (ROWS, *ROW))
        layout[number * ROWS : (number + 1) * ROWS] = source
    path = tmp_path / "virtual.h5"
    with h5py.File(path, "w") as file:
        file.create_virtual_dataset("data", layout)
    options = {**options, "labels_field": None}
    with AsyncReader(hdf5_path=path, **options) as reader:
        reader.get_next_batch()
        in_another_process(
            "with h5py.File(path, 'w', locking=False) as file:\n"
            f"    file['data'] = np.zeros({(ROWS, *ROW)}, 'i4')\n",
            tmp_path / "1.h5",
        )
        for error in take(reader, len(reader)):
            assert isinstance(error, ReadError) or (error.index < ROWS).all()


@each("options", OPTIONS)
def test_an_external_file_is_looked_at(tmp_path, options):
    raw, path = tmp_path / "values.raw", tmp_path / "file.h5"
    values(1).tofile(raw)
    with h5py.File(path, "w") as file:
        file.create_dataset(
            "data", (ROWS, *ROW), np.float32, external=[(str(raw), 0, h5py.h5f.UNLIMITED)]
        )
    options = {**options, "labels_field": None, "allow_external": tmp_path}
    with AsyncReader(hdf5_path=path, **options) as reader:
        reader.get_next_batch()
        with raw.open("r+b") as file:
            values(2).tofile(file)
        with pytest.warns(FileChangedWarning):
            found = take(reader, len(reader))
        for batch in found:
            assert np.array_equal(batch.data, values(2)[batch.index])
        os.truncate(raw, 100)
        for error in take(reader, 3):
            assert isinstance(error, ReadError)
            assert "cut short" in str(error)


@each("options", OPTIONS)
def test_a_chunk_that_was_kept_decoded_is_not_given_after_a_change(tmp_path, options):
    """Batches of 3 samples take parts of chunks of 8, which are kept for the next batch."""
    path = tmp_path / "file.h5"
    how = {"chunks": (8, 6, 5), "compression": "gzip", "compression_opts": 0}
    write(path, 1, how)
    options = {**options, "batch_size": 3, "shuffle": False}
    with AsyncReader(hdf5_path=path, **options) as reader:
        take(reader, 5)
        with h5py.File(path, "r+") as file:
            file["data"][...] = values(2)
            file["labels"][...] += 1000
        with pytest.warns(FileChangedWarning):
            found = take(reader, len(reader))
        assert all(is_of(batch, 2) for batch in found)


@pytest.mark.slow
@each("options", OPTIONS)
def test_a_writer_that_does_not_stop_is_an_error_or_none(tmp_path, options):
    """What comes meanwhile is of some versions; when it has stopped, all is of the last one."""
    path = tmp_path / "file.h5"
    write(path, 0, {})
    with h5py.File(path) as file:
        offset = file["data"].id.get_offset()
    seeds, is_over = itertools.count(1), threading.Event()

    def rewrite() -> None:
        with path.open("r+b", buffering=0) as file:
            while not is_over.is_set():
                file.seek(offset)
                file.write(values(next(seeds) % 1000).tobytes())

    writer = threading.Thread(target=rewrite)
    options = {**options, "labels_field": None}
    with warnings.catch_warnings(), AsyncReader(hdf5_path=path, **options) as reader:
        warnings.simplefilter("ignore")
        writer.start()
        try:
            found = take(reader, 20)
        finally:
            is_over.set()
            writer.join()
        for batch in found:
            if isinstance(batch, ReadError):
                assert "written to all the time" in str(batch)
            else:
                assert ((batch.data[:, 0, 0] - batch.index) % 1000 == 0).all()
        last = (next(seeds) - 1) % 1000
        take(reader, 1)  # which was begun before
        for batch in take(reader, len(reader)):
            assert np.array_equal(batch.data, values(last)[batch.index])


# --- a file that is cut short under its map -------------------------------------------------------

needs_guard = pytest.mark.skipif(load_core() is None, reason="needs the compiled core")

CUT_SHORT = """
    import os, sys, threading, shutil, faulthandler
    import h5py, numpy as np
    from h5async import AsyncReader, ReadError
    path, name = sys.argv[1:3]
    {before}
    for attempt in range(3):
        copy = shutil.copy(path, path + str(attempt))
        reader = AsyncReader(hdf5_path=copy, data_field=name, labels_field=None, batch_size=64,
                             shuffle="full", device="cpu", prefetch=3, io={io!r},
                             num_threads={num_threads}, num_dim={num_dim})
        cut = threading.Thread(target=os.truncate, args=(copy, 4096))
        for number in range(40):
            if number == 3:
                cut.start()
            try:
                reader.get_next_batch()
            except ReadError as error:
                assert copy in str(error), error
        cut.join()
        for number in range(10):
            try:
                reader.get_next_batch()
                assert number < 4  # which were read before
            except ReadError as error:
                assert copy in str(error), error
        reader.close()
        os.unlink(copy)
    {after}
    print("fine")
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of which batches are 1 MB and more, so that copying takes a while."""
    path = tmp_path_factory.mktemp("cut") / "large.h5"
    rng = np.random.default_rng(0)
    data = rng.integers(0, 60, (2048, 64, 64), dtype=np.uint16)
    with h5py.File(path, "w") as file:
        file["contiguous"] = data
        file.create_dataset("chunks", data=data, chunks=(8, 64, 64))
        file.create_dataset("tiles", data=data, chunks=(8, 30, 30))
        file.create_dataset("gzip", data=data, chunks=(8, 64, 64), compression="gzip")
        file.create_dataset("lz4", data=data, chunks=(8, 64, 64), **hdf5plugin.LZ4())
        file.create_dataset("blosc", data=data, chunks=(8, 64, 64), **hdf5plugin.Blosc())
        file.create_dataset("blosc2", data=data, chunks=(8, 64, 64), **hdf5plugin.Blosc2())
        file["columns"] = np.ascontiguousarray(np.moveaxis(data, 0, 1))
    return path


def run(script: str, *arguments: Any, **kwargs: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=200, check=False, **kwargs
    )


@pytest.mark.slow
@pytest.mark.sampled(6)
@needs_guard
@pytest.mark.parametrize("num_threads", [0, 2])
@pytest.mark.parametrize("io", ["auto", "map"])
@pytest.mark.parametrize(
    "name", ["contiguous", "chunks", "tiles", "gzip", "lz4", "blosc", "blosc2", "columns"]
)
def test_a_mapped_file_that_is_cut_short_is_an_error(large, name, io, num_threads):
    script = CUT_SHORT.format(
        io=io, num_threads=num_threads, num_dim=int(name == "columns"), before="", after=""
    )
    done = run(script, large, name)
    assert (done.returncode, done.stdout) == (0, "fine\n"), done.stderr


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("num_threads", [0, 2])
@pytest.mark.parametrize("name", ["contiguous", "chunks", "gzip", "blosc2", "columns"])
def test_without_the_core_nothing_is_mapped_by_default(large, name, num_threads):
    script = CUT_SHORT.format(
        io="auto",
        num_threads=num_threads,
        num_dim=int(name == "columns"),
        before="",
        after="assert not [line for line in open('/proc/self/maps') if path in line]",
    )
    done = run(script, large, name, env={**os.environ, "H5ASYNC_CORE": "0"})
    assert (done.returncode, done.stdout) == (0, "fine\n"), done.stderr


OTHERS = {
    # name: (before, after): handlers that stand before or behind ours, and are still asked
    "faulthandler_before": ("faulthandler.enable()", ""),
    "faulthandler_after": ("AFTER = faulthandler.enable", "AFTER()"),
    "python": ("import signal; signal.signal(signal.SIGBUS, lambda *_: None)", ""),
    "ignored": ("import signal; signal.signal(signal.SIGBUS, signal.SIG_IGN)", ""),
    "blocked": (
        "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())",
        "",
    ),
}


@pytest.mark.slow
@needs_guard
@pytest.mark.parametrize("other", OTHERS)
def test_other_handlers_may_be_there(large, other):
    before, after = OTHERS[other]
    script = CUT_SHORT.format(io="auto", num_threads=2, num_dim=0, before=before, after=after)
    done = run(script, large, "contiguous")
    assert (done.returncode, done.stdout) == (0, "fine\n"), done.stderr


FOREIGN = """
    import ctypes, faulthandler, mmap, os, signal, sys
    from h5async import AsyncReader
    path, when, how = sys.argv[1:4]
    if when == "before":
        faulthandler.enable()
    reader = AsyncReader(hdf5_path=path, data_field="contiguous", labels_field=None, device="cpu")
    reader.get_next_batch()
    if when == "after":
        faulthandler.enable()
    if when == "between":  # put behind ours again by the next batch
        faulthandler.enable()
        for _ in range(5):
            reader.get_next_batch()
    if how == "fault":
        with open(path + ".own", "w+b") as file:
            file.truncate(1 << 20)
            own = mmap.mmap(file.fileno(), 1 << 20)
            file.truncate(0)
            own[5000]
    else:
        os.kill(os.getpid(), signal.SIGBUS)
"""


@pytest.mark.slow
@pytest.mark.sampled(3)
@needs_guard
@pytest.mark.parametrize("how", ["fault", "kill"])
@pytest.mark.parametrize("when", ["never", "before", "after", "between"])
def test_a_fault_of_somebody_else_ends_the_process_as_ever(large, when, how):
    done = run(FOREIGN, large, when, how)
    assert done.returncode == -7, done
    count = done.stderr.count("Fatal Python error: Bus error")
    assert count == (when != "never"), done.stderr


@pytest.mark.slow
@needs_guard
def test_a_handler_of_python_is_called_for_a_signal_that_was_sent(large):
    script = """
        import os, signal, sys
        from h5async import AsyncReader
        seen = []
        reader = AsyncReader(hdf5_path=sys.argv[1], data_field="contiguous", labels_field=None,
                             device="cpu", num_threads=0)
        signal.signal(signal.SIGBUS, lambda *_: seen.append(1))
        reader.get_next_batch()
        os.kill(os.getpid(), signal.SIGBUS)
        assert seen == [1]
        assert signal.getsignal(signal.SIGBUS)
        reader.close()
        print("fine")
    """
    done = run(script, large)
    assert (done.returncode, done.stdout) == (0, "fine\n"), done.stderr


# --- what is not damage ---------------------------------------------------------------------------


@pytest.mark.parametrize("shuffle", [False, "full"])
def test_many_chunks_that_the_core_refuses(tmp_path, shuffle):
    """Bitshuffle in blocks larger than any working memory of the core's."""
    path = tmp_path / "blocks.h5"
    data = np.arange(4096 * 16, dtype=np.float32).reshape(4096, 16)
    with h5py.File(path, "w") as file:
        file.create_dataset(
            "data", data=data, chunks=(4, 16), **hdf5plugin.Bitshuffle(nelems=1 << 20)
        )
    with AsyncReader(
        hdf5_path=path, labels_field=None, batch_size=2048, shuffle=shuffle, device="cpu"
    ) as reader:
        for batch in reader:
            assert np.array_equal(batch.data, data[batch.index])


@pytest.mark.slow
@each("options", OPTIONS)
def test_a_file_that_is_copied_while_it_is_read_is_no_change(tmp_path, options):
    path = tmp_path / "file.h5"
    write(path, 1, WAYS["gzip"])
    with AsyncReader(hdf5_path=path, **options) as reader:
        shutil.copy(path, tmp_path / "copy.h5")
        assert all(is_of(batch, 1) for batch in take(reader, len(reader)))


GUARDS_OF_OTHERS = r"""
#define _GNU_SOURCE
#include <setjmp.h>
#include <signal.h>
#include <stddef.h>
#include <unistd.h>
#include <sys/mman.h>

static sigjmp_buf back;

static void jump(int number) { (void)number; siglongjmp(back, 1); }
static void say(int number) { (void)number; if (write(1, "once\n", 5) < 0) _exit(9); }

void install(int once)
{
    struct sigaction action = {.sa_handler = once ? say : jump,
                               .sa_flags = once ? (int)SA_RESETHAND : SA_NODEFER};
    sigaction(SIGBUS, &action, NULL);
}

void *map(int fd, long nbytes) { return mmap(NULL, (size_t)nbytes, PROT_READ, MAP_SHARED, fd, 0); }

int touch(const volatile char *at)
{
    if (sigsetjmp(back, 1))
        return 1; /* the fault was survived */
    return at[0];
}
"""


@pytest.mark.slow
@needs_guard
@pytest.mark.parametrize("is_used", [False, True])
@pytest.mark.parametrize("once", [0, 1])
def test_guards_of_other_libraries_work_beside_ours(large, tmp_path, once, is_used):
    """One jumps out of its handler, as ours does, again and again; one wants to be asked once."""
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a compiler")
    (tmp_path / "other.c").write_text(GUARDS_OF_OTHERS)
    library = tmp_path / "other.so"
    command = [compiler, "-shared", "-fPIC", "-O1", "-o", library, tmp_path / "other.c"]
    subprocess.run(command, check=True)
    script = """
        import ctypes, os, sys
        from h5async import AsyncReader
        other = ctypes.CDLL(sys.argv[2])
        other.map.restype, other.map.argtypes = ctypes.c_void_p, [ctypes.c_int, ctypes.c_long]
        other.touch.argtypes = [ctypes.c_void_p]
        once, is_used = int(sys.argv[3]), sys.argv[4] == "True"
        other.install(once)
        reader = AsyncReader(hdf5_path=sys.argv[1], data_field="contiguous", labels_field=None,
                             num_threads=0, device="cpu")
        with open(sys.argv[2] + ".short", "w+b") as file:
            file.truncate(8192)
            own = other.map(file.fileno(), 8192)
            file.truncate(0)
        for _ in range(20):
            if is_used:
                reader.get_next_batch()
            assert other.touch(own) == 1
        reader.close()
        print("fine")
    """
    done = run(script, large, library, once, is_used)
    if once:
        assert (done.returncode, done.stdout) == (-7, "once\n"), done.stderr
    else:
        assert (done.returncode, done.stdout) == (0, "fine\n"), done.stderr
