"""An interrupted pack goes on, and is equal to an undisturbed one; shards are one dataset."""

import errno
import itertools
import os
import signal
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
from comparing import contents, samples

import h5async
from h5async import AsyncReader, ConfigError, WriteError
from h5async.packing.chunkwriter import ChunkWriter
from h5async.packing.safefile import SafeFile
from h5async.packing.sources.arrays import ArraySource, RowSource

HERE = Path(__file__).parent
FIELDS = {name: name for name in ("data", "labels", "tokens", "text")}


class Stop(Exception):
    pass


def _stop_at(count):
    def progress(done, _, __):
        if done >= count:
            raise Stop

    return progress


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    out = tmp_path_factory.mktemp("whole") / "out.h5"
    h5async.pack(samples(), out)
    return contents(out)


@pytest.mark.parametrize("chunk_samples", [None, 100])
def test_a_stopped_pack_goes_on(tmp_path, monkeypatch, undisturbed, chunk_samples):
    monkeypatch.setattr(SafeFile, "is_due", True)
    commit = ChunkWriter.commit

    def commit_at_once(self, *arguments, **options):
        commit(self, *arguments, **options)
        self.flush()

    monkeypatch.setattr(ChunkWriter, "commit", commit_at_once)
    out, options = tmp_path / "out.h5", {"chunk_samples": chunk_samples}
    for count in (1, 300, 310, 700):
        with pytest.raises(Stop):
            h5async.pack(samples(), out, resume=True, progress=_stop_at(count), **options)
        assert not out.exists()
    with pytest.raises(ConfigError, match=r"resume=True"):
        h5async.pack(samples(), out, **options)
    with pytest.raises(ConfigError, match="other sources or options"):
        h5async.pack(samples(), out, resume=True, filter="gzip:1")
    seen = []
    found = h5async.pack(
        samples(), out, resume=True, progress=lambda *told: seen.append(told[0]), **options
    )
    assert seen[0] > 700
    assert found.samples == 900
    assert contents(out) == undisturbed
    assert h5async.pack(samples(), out, resume=True, **options).samples == 900
    with pytest.raises(ConfigError, match="packed from other sources"):
        h5async.pack(samples(), out, resume=True, filter="gzip:1")


def test_a_full_disk_is_told_with_how_to_go_on(tmp_path, monkeypatch, undisturbed):
    monkeypatch.setattr(SafeFile, "is_due", True)
    pwrite, calls = os.pwrite, iter(range(90))

    def full(*arguments):
        if next(calls, None) is None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(*arguments)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(WriteError, match=r"No space left.*is kept: continue with resume=True"):
        h5async.pack(samples(), tmp_path / "out.h5")
    monkeypatch.setattr(os, "pwrite", pwrite)
    h5async.pack(samples(), tmp_path / "out.h5", resume=True)
    assert contents(tmp_path / "out.h5") == undisturbed


@pytest.mark.parametrize("typed", [[], ["shards=60000"]])
def test_a_killed_pack_goes_on(tmp_path, undisturbed, typed):
    out = tmp_path / "out.h5"
    command = [sys.executable, HERE / "killed.py", out, *typed]
    for lines in itertools.chain([1, 5, 3], itertools.repeat(10**9)):
        with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=HERE) as process:
            for _ in zip(range(lines), process.stdout, strict=False):
                pass
            process.send_signal(signal.SIGKILL)
        if process.returncode == 0:
            break
        assert process.returncode == -signal.SIGKILL
        assert not out.exists()
    assert contents(out) == undisturbed
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".h5"] * len(os.listdir(tmp_path))


@pytest.mark.parametrize("name", ["all.h5", "all.h5idx"])
def test_shards_are_one_dataset(tmp_path, undisturbed, name):
    pytest.importorskip("pyarrow")
    out = tmp_path / name
    found = h5async.pack(samples(), out, shards="200kB")
    shards = sorted(tmp_path.glob("all-*.h5"))
    assert [path.name for path in shards] == [f"all-{n:05}.h5" for n in range(len(shards))]
    assert len(shards) == 8
    assert found.samples == 900
    if name == "all.h5":
        assert contents(out) == undisturbed
    with AsyncReader(hdf5_path=out, fields=FIELDS, batch_size=900) as reader:
        batch = reader.get_next_batch()
        for n, sample in enumerate(samples()):
            np.testing.assert_array_equal(batch.data[n], sample["data"])
            assert batch.tokens[n].tolist() == sample["tokens"]
            assert batch.text[n].tobytes().decode() == sample["text"]
    with pytest.raises(ConfigError, match="overwrite=True"):
        h5async.pack(samples(), out, shards="200kB")
    again = h5async.pack(samples(), out, shards="200kB", resume=True)
    assert again.samples == 900
    assert h5async.pack(samples(), out, shards="1GB", overwrite=True).samples == 900
    assert sorted(tmp_path.glob("all-*.h5")) == shards[:1]


def test_shards_are_joined_with_all_else_that_they_have(tmp_path, monkeypatch):
    """Among it what is long, has as many rows as the last shard, or is below a group."""
    once = {"ends": np.arange(300_000), "few": np.arange(10), "notes/names": ["a", "ö"]}
    monkeypatch.setattr(RowSource, "once", once)
    rows = [{"a/x": np.full(9, n), "a/y": [n] * (n % 3)} for n in range(650)]
    h5async.pack(rows, tmp_path / "one.h5")
    for options in ({"overwrite": True}, {"resume": True}):
        h5async.pack(rows, tmp_path / "all.h5", shards="5kB", **options)
        assert contents(tmp_path / "all.h5") == contents(tmp_path / "one.h5")
    with h5py.File(tmp_path / "all-00010.h5") as file:
        assert len(file["a/x"]) == len(file["few"])


def test_categories_of_shards_have_the_same_codes(tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.feather

    kinds = [f"kind {n // 3000}" for n in range(20_000)]
    table = pa.table({"kind": kinds, "n": range(20_000)})
    encoded = table.set_column(0, "kind", table["kind"].dictionary_encode())
    pyarrow.feather.write_feather(encoded, tmp_path / "in.feather", chunksize=1000)
    h5async.pack(tmp_path / "in.feather", tmp_path / "out.h5", shards="60kB")
    assert len(list(tmp_path.glob("out-*.h5"))) > 2
    with h5py.File(tmp_path / "out.h5") as file:
        names = file["kind/categories"].asstr()[:]
        assert [names[code] for code in file["kind/codes"][:]] == kinds
    with AsyncReader(hdf5_path=tmp_path / "out.h5", fields={"kind": "kind"}) as reader:
        assert reader.categories["kind"] == tuple(f"kind {n}" for n in range(7))


def test_a_large_source_takes_little_memory(tmp_path):
    program = f"""
import numpy as np, h5async
def peak():
    [line] = [one for one in open("/proc/self/status") if one.startswith("VmHWM")]
    return int(line.split()[1]) / 1024
h5async.pack([{{"data": np.zeros(9)}}], {str(tmp_path / "small.h5")!r})
before = peak()
samples = ({{"data": np.full(1 << 18, n, np.float32), "raw": bytes(1 << 16)}} for n in range(300))
h5async.pack(samples, {str(tmp_path / "out.h5")!r}, memory="32MiB", num_threads=2)
print(peak() - before)
"""
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert float(found.stdout) < 200  # MB, of 330


def test_memory_is_bounded(tmp_path, monkeypatch):
    """In blocks of 1 MB, not so many of which are made that they would exceed the memory."""
    alive, most = set(), []

    class Watched(ArraySource):
        def read(self, numbers):
            alive.add(int(numbers[0]))
            most.append(len(alive))
            return super().read(numbers)

    source = Watched({"data": np.zeros((400, 1 << 18), np.uint8)}, "arrays")
    source.rows = 4

    def progress(done, *_):
        alive.difference_update(range(done))

    monkeypatch.setattr("h5async.packing.pack.open_source", lambda *_: source)
    h5async.pack([], tmp_path / "out.h5", memory="8MiB", num_threads=3, progress=progress)
    assert max(most) <= 5
