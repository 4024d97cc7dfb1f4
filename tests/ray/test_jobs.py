"""Commands as jobs on a local cluster of Ray: equal to what is made here, whatever dies."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
from clusters import start_cluster
from conftest import require_extra
from typer.testing import CliRunner

import h5async
from h5async.cli import app
from h5async.errors import ConfigError, DatasetError, MissingPackageError, ReadError, WriteError
from h5async.measure import statistics
from h5async.opening import fieldkinds
from h5async.packing.safefile import SafeFile
from h5async.system.jobs import run_jobs

ray = require_extra("ray")

pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own


@pytest.fixture(scope="module")
def cluster():
    """A cluster whose workers kill themselves at a step of writing FILE if FILE.STEP is there."""

    def set_up():
        from h5async.packing.safefile import SafeFile

        def struck(step):
            done = getattr(SafeFile, step)

            def called(self, *arguments):
                done(self, *arguments)
                mark = self.path.with_name(f"{self.path.name}.{step}")
                if mark.exists():
                    mark.unlink()
                    os.kill(os.getpid(), signal.SIGKILL)

            setattr(SafeFile, step, called)

        struck("commit")
        struck("finish")

    start_cluster(object_store_memory=100 << 20, runtime_env={"worker_process_setup_hook": set_up})
    yield
    ray.shutdown()


def assert_alike(path, other):
    """Assert that two files have the same datasets, stored alike."""
    with h5py.File(path) as one, h5py.File(other) as two:
        assert set(one) == set(two)
        for name in one:
            assert np.array_equal(one[name][()], two[name][()])
            assert one[name].id.get_create_plist().get_layout() == (
                two[name].id.get_create_plist().get_layout()
            )
            assert one[name].chunks == two[name].chunks


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Two files, by relative paths."""
    monkeypatch.chdir(tmp_path)
    for number in range(2):
        with h5py.File(f"in-{number}.h5", "w") as file:
            rng = np.random.default_rng(number)
            data = rng.integers(0, 9, (80, 30, 10))
            file.create_dataset("data", data=data, chunks=(10, 30, 10), compression="gzip")
            file["labels"] = rng.integers(0, 99, 80)
    return ["in-0.h5", "in-1.h5"]


def test_results_come_in_order_and_errors_as_they_were(cluster, tmp_path):
    def work(number):
        if number == 40:
            error = DatasetError("no such thing")
            error.filename = Path.cwd().name
            raise error
        return number**2

    assert list(run_jobs(work, range(40), "auto")) == [n**2 for n in range(40)]
    with pytest.raises(DatasetError, match="no such thing") as raised:
        list(run_jobs(work, range(50), "auto"))
    assert raised.value.filename == Path.cwd().name


def test_a_repack_survives_killed_workers(cluster, files):
    options = {"shards": "80kB", "filter": "lzf", "shuffle": "full", "chunk_samples": 8}
    here = h5async.repack(files, "here.h5", **options)
    count = len(here.paths) - 1
    assert count > 4
    for name in ("there-00001.h5.commit", "there-00003.h5.finish"):
        Path(name).touch()
    seen = []
    there = h5async.repack(
        files, "there.h5", ray="auto", progress=lambda *told: seen.append(told), **options
    )
    assert not [*Path().glob("*.commit"), *Path().glob("*.finish"), *Path().glob("*.partial")]
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert len(seen) == count
    assert seen[-1][0] == seen[-1][1]
    for path, other in zip(here.paths, there.paths, strict=True):
        assert_alike(path, other)


def test_two_jobs_never_write_one_file(cluster, files):
    options = {"shards": "80kB", "filter": "lzf", "ray": "auto"}
    with SafeFile("out-00001.h5"):
        with pytest.raises(WriteError, match="is in use by another process"):
            h5async.repack(files, "out.h5", resume=True, **options)
        assert not Path("out.h5").exists()
    with pytest.raises(ConfigError, match=r"out-0000\d.h5.* (exists|was not finished);.*overwrite"):
        h5async.repack(files, "out.h5", **options)
    h5async.repack(files, "out.h5", overwrite=True, **options)
    with h5py.File("out.h5") as file:
        expected = np.concatenate([h5py.File(name)["data"][:] for name in files])
        assert np.array_equal(file["data"], expected)


def test_statistics_are_the_same_bit_for_bit(cluster, files, monkeypatch):
    monkeypatch.setattr(statistics, "_BATCH_NBYTES", 24_000)  # ten samples
    monkeypatch.setattr(statistics, "_BATCHES_OF_JOB", 3)
    options = {"hdf5_path": files, "fields": {"x": "data", "y": "labels"}, "indices": "5:"}
    here, seen = h5async.statistics(options, per="feature"), []
    there = h5async.statistics(
        options, per="feature", ray="auto", progress=lambda *told: seen.append(told)
    )
    assert there.as_dict() == here.as_dict()
    assert len(seen) == 18
    assert seen[-1] == (155, 155)


@pytest.mark.parametrize("typed", [[], ["--field", "x=data"]])
def test_an_index_has_the_same_bytes(cluster, files, monkeypatch, typed):
    monkeypatch.setattr(fieldkinds, "_FILES_OF_JOB", 1)
    for name, more in [("here", []), ("there", ["--ray"])]:
        run = CliRunner().invoke(app, ["index", *files, "-o", f"{name}.h5idx", *typed, *more])
        assert run.exit_code == 0, run.output
    assert Path("here.h5idx").read_bytes() == Path("there.h5idx").read_bytes()
    run = CliRunner().invoke(app, ["index", "--ray", files[0], "nowhere.h5", "-o", "no.h5idx"])
    assert "cannot open nowhere.h5" in run.stderr


def unpacked(path):
    with h5py.File(path) as file:
        return {name: [np.asarray(one).tolist() for one in file[name][:]] for name in file}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("options", [{}, {"shuffle": True, "seed": 3}])
def test_a_pack_survives_killed_workers(cluster, tmp_path, monkeypatch, options):
    monkeypatch.chdir(tmp_path)
    image = pytest.importorskip("PIL.Image")
    for number in range(40):
        folder = Path("in", f"class {number % 3}")
        folder.mkdir(parents=True, exist_ok=True)
        image.new("L", (5 + number, 9), number).save(folder / f"{number}.png")
    Path("in", "class 2", "bad.png").write_bytes(b"no image")
    with pytest.raises(ReadError, match=r"bad\.png cannot be packed"):
        h5async.pack("in", "no.h5", shards="700", ray="auto")
    options = {**options, "on_error": "skip"}
    here = h5async.pack("in", "here.h5", **options)
    for name in ("there-00001.h5.commit", "there-00002.h5.finish"):
        Path(name).touch()
    seen = []
    tell = lambda *told: seen.append(told)  # noqa: E731
    there = h5async.pack("in", "there.h5", shards="700", ray="auto", progress=tell, **options)
    assert len(list(tmp_path.glob("there-*.h5"))) == len(seen) > 3
    assert not list(tmp_path.glob("there*.finish"))
    assert [done for done, *_ in seen][-1] == 41
    assert (there.samples, there.columns) == (40, here.columns)
    assert [name for name, _ in there.bad] == [name for name, _ in here.bad] != []
    assert unpacked("there.h5") == unpacked("here.h5")
    again = h5async.pack("in", "there.h5", shards="700", ray="auto", resume=True, **options)
    assert (again.samples, again.bad) == (40, there.bad)
    with pytest.raises(ConfigError, match="exists"):
        h5async.pack("in", "there.h5", shards="700", ray="auto", **options)


def test_files_that_are_read_in_order_are_packed_whole(cluster, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for number in range(5):
        rows = "".join(f"{number * 10 + n},{n / 2}\n" for n in range(10))
        Path(f"{number}.csv").write_text("a,b\n" + rows)
    paths = [f"{number}.csv" for number in range(5)]
    h5async.pack(paths, "here.h5")
    h5async.pack(paths, "there.h5", shards="100", ray="auto")
    assert len(list(tmp_path.glob("there-*.h5"))) == 3
    assert unpacked("there.h5") == unpacked("here.h5")
    Path("4.csv").write_text("a,b\n1.5,2\n")
    with pytest.raises(DatasetError, match=r'4.csv.*: sample 0: column "a" has float64'):
        h5async.pack(paths, "other.h5", shards="100", ray="auto")
    for wrong in ({"shuffle": True, "shards": "100"}, {}):
        with pytest.raises(ConfigError, match=r"in order|on Ray.*shards"):
            h5async.pack(paths, "no.h5", ray="auto", **wrong)


def test_jobs_without_ray(monkeypatch, files):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingPackageError, match=r"h5async\[ray\]"):
        h5async.repack(files, "out.h5", shards="80kB", ray="auto")
    with pytest.raises(ConfigError, match="shards"):
        h5async.repack(files, "out.h5", ray="auto")
