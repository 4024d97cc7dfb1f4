"""Kept sources: bytes are right whatever became of the mirror, and read from the source once."""

from __future__ import annotations

import errno
import logging
import os
import stat
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from memorystore import Held, MemoryStore

from h5async.errors import ConfigError, ReadError
from h5async.io.diskcache import BLOCK, SUFFIX, DiskCache
from h5async.io.source import FileStamp

NAME = "memory://bucket/a.h5"
CONTENT = np.random.default_rng(0).bytes(10 * BLOCK + 100)
RANGES = [(0, 10), (BLOCK - 1, 2), (3 * BLOCK, 2 * BLOCK), (7, 0), (5 * BLOCK + 9, 5 * BLOCK + 91)]
ALL = [(0, len(CONTENT))]
HEAD_AT = 11 * (BLOCK + 8)


@pytest.fixture
def store():
    found = MemoryStore()
    found.held[NAME] = Held(CONTENT, "first")
    return found


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "cache" / "mirrors"


def opened(store, folder, limit=None, name=NAME):
    return DiskCache(folder, limit).keeping(name, store.open(name))


def taken(source, ranges):
    found = source.get_ranges([begin for begin, _ in ranges], [n for _, n in ranges])
    return [bytes(one) for one in found]


def expected(ranges, content=CONTENT):
    return [content[begin : begin + n] for begin, n in ranges]


def assert_reads(source, ranges=RANGES):
    assert taken(source, ranges) == expected(ranges)


def mirror_of(folder):
    (path,) = folder.glob(f"*{SUFFIX}")
    return path


def overwrite(path, at, data):
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


def places(nbytes):
    begins = st.integers(0, nbytes)
    return st.lists(begins.flatmap(lambda a: st.tuples(st.just(a), st.integers(0, nbytes - a))))


@pytest.mark.slow
@given(st.data(), st.integers(1, 9 * BLOCK))
def test_any_ranges(data, nbytes):
    store = MemoryStore()
    store.held[NAME] = Held(CONTENT[:nbytes], "first")
    with tempfile.TemporaryDirectory() as folder:
        source = opened(store, Path(folder))
        wanted = [data.draw(places(nbytes)) for _ in range(3)]
        for ranges in wanted:
            assert taken(source, ranges) == expected(ranges, CONTENT[:nbytes])
        reads = store.reads
        for ranges in wanted:
            assert taken(source, ranges) == expected(ranges, CONTENT[:nbytes])
        again = opened(store, Path(folder))
        for ranges in wanted:
            assert taken(again, ranges) == expected(ranges, CONTENT[:nbytes])
        assert store.reads == reads, "what was read is kept, also for the next reader"
        assert again.read(0, nbytes) == CONTENT[:nbytes]


def test_each_block_is_read_once(store, folder):
    source = opened(store, folder)
    assert_reads(source, [(5, 10), (20, 10), (BLOCK - 1, 2), (0, 2 * BLOCK)])
    assert store.reads == 1
    assert_reads(source, ALL)
    assert store.reads == 2
    assert_reads(source, [*RANGES, *ALL])
    assert store.reads == 2


def test_bytes_remain_valid_when_the_source_is_closed(store, folder):
    source = opened(store, folder)
    (found,) = source.get_ranges([10], [BLOCK])
    source.close()
    source.close()
    mirror_of(folder).unlink()
    assert bytes(found) == CONTENT[10 : 10 + BLOCK]
    assert not store.open_sources


def test_ranges_that_are_not_in_the_source(store, folder):
    source = opened(store, folder)
    for begin, nbytes in (len(CONTENT), 1), (0, len(CONTENT) + 1):
        with pytest.raises(ReadError):
            source.get_ranges([0, begin], [1, nbytes])
    assert source.read(len(CONTENT) - 3, 10) == CONTENT[-3:]


def test_a_source_without_bytes(store, folder):
    store.held[NAME] = Held(b"", "empty")
    source = opened(store, folder)
    assert source.stamp() == FileStamp.of_tag("empty", 0)
    assert taken(source, [(0, 0)]) == [b""]


def test_only_this_user_can_read_them(store, folder):
    assert_reads(opened(store, folder))
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}


# --- what became of a mirror before ------------------------------------------------------------


@pytest.mark.parametrize("at", [0, 3 * BLOCK + 5, 11 * BLOCK - 8])
def test_a_block_that_differs_from_its_checksum_is_read_again(store, folder, at):
    assert_reads(opened(store, folder), ALL)
    path, reads = mirror_of(folder), store.reads
    overwrite(path, at, b"\1" * 8)
    assert_reads(opened(store, folder), ALL)
    assert store.reads == reads + 1
    assert_reads(opened(store, folder), ALL)
    assert store.reads == reads + 1


def test_blocks_that_never_reached_the_disk(store, folder):
    assert_reads(opened(store, folder), ALL)
    path = mirror_of(folder)
    overwrite(path, 2 * BLOCK, bytes(3 * BLOCK))
    assert_reads(opened(store, folder), ALL)


@pytest.mark.parametrize("word", [1, 1 << 32, 1 << 52, 1 << 63])
def test_checksums_of_numbers_whose_low_bits_are_zero(store, folder, word):
    content = np.full(11 * BLOCK // 8, word, "<u8")
    store.held[NAME] = Held(content.tobytes(), "first")
    source = opened(store, folder)
    assert taken(source, [(0, content.nbytes)]) == [content.tobytes()]
    path = mirror_of(folder)
    for block, kept in enumerate((8, 512, 2048, BLOCK - 8, 16, 24, 1024, 1000, 4000, 64, 104)):
        overwrite(path, block * BLOCK + kept, bytes(BLOCK - kept))
    assert taken(opened(store, folder), [(0, content.nbytes)]) == [content.tobytes()]


def _cut(path):
    os.truncate(path, path.stat().st_size - 1)


def _empty(path):
    path.write_bytes(b"")


def _foreign(path):
    overwrite(path, HEAD_AT, b"\x89HDF")


def _of_another_source(path):
    overwrite(path, HEAD_AT + 40, b"0" * 16)


def _writable_by_others(path):
    path.chmod(0o666)


@pytest.mark.parametrize("spoil", [_cut, _empty, _foreign, _of_another_source, _writable_by_others])
def test_a_file_that_is_no_mirror_is_made_anew(store, folder, spoil):
    assert_reads(opened(store, folder), ALL)
    path, reads = mirror_of(folder), store.reads
    overwrite(path, 0, b"what is not believed")
    spoil(path)
    assert_reads(opened(store, folder), ALL)
    assert store.reads == reads + 1
    assert_reads(opened(store, folder), ALL)
    assert store.reads == reads + 1
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_link_is_not_followed(store, folder, tmp_path):
    assert_reads(opened(store, folder), ALL)
    path, other = mirror_of(folder), tmp_path / "other"
    path.rename(other)
    before = other.read_bytes()
    path.symlink_to(other)
    reads = store.reads
    assert_reads(opened(store, folder), ALL)
    assert store.reads == reads + 1
    assert other.read_bytes() == before
    assert not path.is_symlink()


def test_a_changed_source_has_another_mirror(store, folder):
    old = opened(store, folder)
    assert_reads(old, ALL)
    store.held["memory://bucket/b.h5"] = Held(CONTENT, "other")
    assert_reads(opened(store, folder, name="memory://bucket/b.h5"), ALL)
    content = CONTENT[::-1]
    store.held[NAME] = Held(content, "second")
    new = opened(store, folder)
    assert taken(new, RANGES) == expected(RANGES, content)
    assert len(list(folder.glob(f"*{SUFFIX}"))) == 2
    with pytest.raises(ReadError):
        taken(old, ALL)  # its mirror was removed, and the source refuses it
    assert taken(new, ALL) == expected(ALL, content)
    reads = store.reads
    assert taken(new, ALL) == expected(ALL, content)
    assert store.reads == reads


# --- what becomes of it meanwhile --------------------------------------------------------------


@pytest.mark.parametrize("remove", [Path.unlink, _empty, _cut])
def test_a_mirror_that_is_removed_under_a_reader(store, folder, remove):
    source, other = opened(store, folder), opened(store, folder)
    for one in source, other:
        assert_reads(one, ALL)
    remove(mirror_of(folder))
    reads = store.reads
    for one in source, other, source:
        assert_reads(one)
        assert_reads(one, ALL)
    assert store.reads > reads
    reads = store.reads
    assert_reads(source, ALL)
    assert_reads(opened(store, folder), ALL)
    assert store.reads == reads


def test_a_folder_that_becomes_another_thing(store, folder, caplog):
    source = opened(store, folder)
    assert_reads(source)
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    folder.write_bytes(b"")
    with caplog.at_level(logging.WARNING, "h5async.reader"):
        for _ in range(3):
            assert_reads(source, ALL)
    (record,) = caplog.records
    assert f"nothing of {NAME} is kept" in record.message


@pytest.mark.parametrize("nth", range(8))
def test_a_full_disk(store, folder, monkeypatch, caplog, nth):
    calls, write = [], os.pwrite

    def refuse(descriptor, data, at):
        calls.append(at)
        if len(calls) == nth:  # it takes a part first, as systems do
            return write(descriptor, memoryview(data)[: len(data) // 2], at)
        if len(calls) > nth:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data, at)

    monkeypatch.setattr(os, "pwrite", refuse)
    cache = DiskCache(folder)
    with caplog.at_level(logging.WARNING, "h5async.reader"):
        source = cache.keeping(NAME, store.open(NAME))
        for _ in range(3):
            assert_reads(source)
        assert_reads(source, ALL)
    assert len(caplog.records) == 1
    assert "No space left on device" in caplog.text
    assert "No space left on device" in str(cache)
    monkeypatch.undo()
    assert_reads(opened(store, folder))
    assert_reads(opened(store, folder), ALL)


def test_no_room_for_the_file(store, folder, monkeypatch, caplog):
    def refuse(descriptor, nbytes):
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))

    monkeypatch.setattr(os, "ftruncate", refuse)
    assert_reads(opened(store, folder))
    assert len(caplog.records) == 1


def test_the_limit(store, folder, caplog):
    limit = 6 * BLOCK
    with caplog.at_level(logging.WARNING, "h5async.reader"):
        cache = DiskCache(folder, limit)
        source = cache.keeping(NAME, store.open(NAME))
        ranges = [(n * BLOCK, BLOCK) for n in range(11 - 1)]
        for one in ranges:
            assert_reads(source, [one])
        assert cache.nbytes <= limit
        reads = store.reads
        for one in ranges:
            assert_reads(source, [one])
    assert 0 < store.reads - reads < len(ranges), "some are kept, and the rest is read each time"
    (record,) = caplog.records
    assert "cache_bytes allows no more" in record.message
    assert f"of at most {limit:,} bytes in {folder}; cache_bytes allows no more" in str(cache)
    assert_reads(opened(store, folder, 0), ALL)


def test_the_default_limit_is_half_of_what_is_free(tmp_path):
    disk = os.statvfs(tmp_path)
    limit = DiskCache(tmp_path).limit
    assert 0 < limit <= disk.f_blocks * disk.f_frsize / 2


def test_a_folder_that_cannot_be_used(store, tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"cache_dir: .*file/mirrors cannot be used: .*directory"):
        DiskCache(tmp_path / "file" / "mirrors")


# --- many at a time ----------------------------------------------------------------------------


def test_many_threads(store, folder):
    sources = [opened(store, folder) for _ in range(3)]
    begin, failed = threading.Barrier(6, timeout=60), []

    def read(seed):
        order = np.random.default_rng(seed).permutation(len(CONTENT) - 1000)[:200]
        begin.wait()
        ranges = [(int(at), 1000) for at in order]
        for first in range(0, len(ranges), 10):
            some = ranges[first : first + 10]
            if taken(sources[seed % 3], some) != expected(some):
                failed.append(some)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failed
    reads = store.reads
    assert_reads(opened(store, folder), ALL)
    assert store.reads - reads <= 1


_PROCESSES = """
import os, random, signal, sys
sys.path[:0] = [{tests!r}, {tests!r} + '/..']
from pathlib import Path
from test_diskcache import CONTENT, NAME, Held, MemoryStore, opened, taken, expected, ALL

def read_all(seed):
    source = opened(store, folder)
    ranges = [(at, min(3000, len(CONTENT) - at)) for at in range(0, len(CONTENT), 1500)]
    random.Random(seed).shuffle(ranges)
    for one in ranges:
        assert taken(source, [one]) == expected([one]), one

def in_process(function, *arguments):
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            function(*arguments)
            code = 0
        finally:
            os._exit(code)
    return pid

def killed_at(nth):
    calls, write = 0, os.pwrite
    def write_or_die(descriptor, data, at):
        nonlocal calls
        calls += 1
        if calls == nth:
            write(descriptor, memoryview(data)[: len(data) // 2], at)
            os.kill(os.getpid(), signal.SIGKILL)
        return write(descriptor, data, at)
    os.pwrite = write_or_die
    read_all(nth)

store, folder = MemoryStore(), Path(sys.argv[1])
store.held[NAME] = Held(CONTENT, "first")
for nth in range(1, 10):
    _, status = os.waitpid(in_process(killed_at, nth), 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    _, status = os.waitpid(in_process(read_all, nth), 0)
    assert status == 0
    for path in folder.glob("*.mirror"):
        path.unlink()
for _ in range(5):
    pids = [in_process(read_all, seed) for seed in range(4)]
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0] * 4
    source, reads = opened(store, folder), store.reads
    assert taken(source, ALL) == expected(ALL)
    assert store.reads == reads
    for path in folder.glob("*.mirror"):
        path.unlink()
"""


@pytest.mark.slow
def test_processes_that_are_killed_and_those_that_read_at_a_time(folder):
    script = _PROCESSES.format(tests=str(Path(__file__).parent))
    subprocess.run([sys.executable, "-c", script, str(folder)], check=True, timeout=120)
