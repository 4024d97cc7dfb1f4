"""Read gzip chunks in Ray Data: by h5async, by h5py in map_batches, and without Ray.

``stream``: images through a local cluster, whose tasks take all cores, to a loop that takes
blocks. h5py reads a chunk at a time. Tasks of "threads" take all cores each, with as many threads.
"alone" is this reader in one process, without Ray, with as many threads as cores. ``limits``: what
Ray could reach. Its tasks have their blocks after as much processor time as the reader alone takes
for them; those of "ready", at once. ``rows``: h5py reads a row at a time. ``first``: how soon the
first batch is there, beside `read_parquet` of the same rows, as Ray wrote them.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import h5py
import numpy as np
import pyarrow as pa
import ray
from bench_common import CORES, RESULTS, ROW, make_images
from bench_turns import Bench, Target, Way, run_cases
from ray.data.extensions import ArrowTensorArray

from h5async import AsyncReader
from h5async.ray import read_hdf5
from h5async.ray.datasource import Hdf5Datasource

CHUNK, IMAGES = 16, 320  # of a file
NOISE = bytes(1 << 16)


def write_files(folder: Path, count: int) -> list[str]:
    """Write a file of compressed images, of 48 MB decoded, and give it many names."""
    paths = [folder / f"{number:03}.h5" for number in range(count)]
    if paths[0].exists():
        return [str(path) for path in paths]
    images = make_images(IMAGES)
    with h5py.File(paths[0], "w") as file:
        shape = (CHUNK, *images.shape[1:])
        file.create_dataset("data", data=images, chunks=shape, compression="gzip")
        file["labels"] = np.arange(IMAGES)
    for path in paths[1:]:
        path.hardlink_to(paths[0])
    return [str(path) for path in paths]


def by_h5py(rows: int, batch: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Read files by h5py, so many rows at a time."""
    for path in batch["item"]:
        with h5py.File(path) as file:
            for at in range(0, len(file["data"]), rows):
                yield {name: file[name][at : at + rows] for name in ("data", "labels")}


def streamed(count: int, make: Callable[[], Any]) -> Way:
    """Return a way that takes all blocks of a dataset, which it makes anew."""

    def way(_: float) -> float:
        begin = time.perf_counter()
        rows = sum(len(batch["labels"]) for batch in make().iter_batches(batch_size=None))
        assert rows == count
        return count / (time.perf_counter() - begin)

    return way


def alone(paths: list[str], threads: int) -> Way:
    def way(_: float) -> float:
        begin = time.perf_counter()
        with AsyncReader(hdf5_path=paths, batch_size=128, num_threads=threads) as reader:
            rows = sum(batch.size for batch in reader)
        return rows / (time.perf_counter() - begin)

    return way


class Ready(NamedTuple):
    """A plan of tasks whose blocks are there, after so much processor time for a row."""

    row_seconds: float

    def open(self) -> pa.Table:
        """Return more rows than a block has."""
        data = ArrowTensorArray.from_numpy(np.ones((1400, *ROW), "u1"))
        return pa.table({"data": data, "labels": np.arange(1400)})

    def read(self, rows: pa.Table, begin: int, end: int) -> pa.Table:
        """Return as many rows."""
        until = time.thread_time() + (end - begin) * self.row_seconds
        while time.thread_time() < until:
            hashlib.sha256(NOISE)  # other threads may run
        return rows.slice(0, end - begin)


def with_ready(way: Way, row_seconds: float) -> Way:
    """Return a way of Ray whose tasks read nothing."""
    plan = mock.Mock(return_value=ray.put(Ready(row_seconds)))
    return mock.patch.object(Hdf5Datasource, "_plan", plan)(way)


def first(make: Callable[[], Any]) -> Way:
    """Return a way that takes one batch; its speed is one by the seconds."""

    def way(_: float) -> float:
        begin = time.perf_counter()
        batch = next(iter(make().iter_batches(batch_size=32)))
        taken = time.perf_counter() - begin
        assert len(batch["labels"]) == 32
        return 1 / taken

    return way


def loop(paths: list[str], rows: int) -> Any:
    return ray.data.from_items(paths).map_batches(partial(by_h5py, rows), batch_size=1)


def warmed(bench: Bench) -> tuple[list[str], dict[str, Way]]:
    """Return files, and our ways; workers are started, and they and the store have memory."""
    paths = write_files(bench.folder, bench.options.count)
    rows = IMAGES * len(paths)
    ways = {
        "h5async": streamed(rows, lambda: read_hdf5(paths)),
        "threads": streamed(rows, lambda: read_hdf5(paths, num_cpus=CORES)),
    }
    for way in ways.values():
        way(0)
    return paths, ways


def stream(bench: Bench) -> None:
    """Measure how fast all rows are read."""
    paths, ours = warmed(bench)
    some = paths[: max(CORES, len(paths) // 3)]
    others = {
        "h5py": streamed(IMAGES * len(some), lambda: loop(some, CHUNK)),
        "alone": alone(paths, CORES),
    }
    targets = [("h5py", 3), ("alone", 0.8)]
    bench.measure(
        "stream", {**ours, **others}, [Target(way, *one) for way in ours for one in targets]
    )


def limits(bench: Bench) -> None:
    """Measure how fast Ray could be."""
    paths, ours = warmed(bench)
    begin = time.process_time()
    alone(paths, CORES)(0)
    row_seconds = (time.process_time() - begin) / (IMAGES * len(paths))
    others = {f"limit of {name}": with_ready(way, row_seconds) for name, way in ours.items()}
    others |= {"ready": with_ready(ours["h5async"], 0), "alone": alone(paths, CORES)}
    targets = [Target(way, f"limit of {way}", 0.9) for way in ours]
    targets += [Target(f"limit of {way}", "alone", 0.8) for way in ours]
    bench.measure("limits", {**ours, **others}, targets)


def by_rows(bench: Bench) -> None:
    """Measure what reading row by row costs, of few files: it is slow enough."""
    paths = write_files(bench.folder, bench.options.count)
    ways = {
        "h5async": streamed(IMAGES * len(paths), lambda: read_hdf5(paths)),
        "h5py": streamed(IMAGES * CORES, lambda: loop(paths[:CORES], 1)),
    }
    bench.measure("rows", ways, [Target("h5async", "h5py", 3)])


def soon(bench: Bench) -> None:
    """Measure how soon the first batch is there."""
    paths = write_files(bench.folder, bench.options.count)
    table = str(bench.folder / "parquet")
    read_hdf5(paths).write_parquet(table)
    ways = {
        "h5async": first(lambda: read_hdf5(paths)),
        "read_parquet": first(lambda: ray.data.read_parquet(table)),
    }
    bench.measure("first", ways, [Target("h5async", "read_parquet", 0.667)])


CASES = {"stream": stream, "limits": limits, "rows": by_rows, "first": soon}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="*", choices=CASES)
    parser.add_argument("--count", type=int, default=72, help="files")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--quick", action="store_true", help="two files, once; saves nothing")
    options = parser.parse_args()
    options.seconds = 0.0
    if options.quick:
        options.count, options.repeats, options.out = 2, 1, None
    os.environ["RAY_AUTH_MODE"] = "disabled"
    # Workers stay: to start one takes three seconds, in which it imports Ray.
    os.environ["RAY_idle_worker_killing_time_threshold_ms"] = "600000"
    ray.init(
        "local", num_cpus=CORES, include_dashboard=False, logging_level="ERROR", log_to_driver=False
    )
    ray.data.DataContext.get_current().enable_progress_bars = False
    run_cases("bench_ray", CASES, options)
    ray.shutdown()
