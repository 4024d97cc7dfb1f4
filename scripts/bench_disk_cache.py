"""Measures what `cache="disk"` keeps of far files: later epochs, the first one, memory of ranks.

The far file lies on a web server of the tests on the loopback; the same file, read as a local one,
is what later epochs are compared with. Ranks are processes: each notes what its maps of the kept
files take of memory (Pss: shared pages are divided among those who map them).
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from bench_turns import Bench, Target, paced, reader_sizes, run_cases

from h5async import AsyncReader

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "io"))
from httpserver import serving  # (the path above)

RANKS = 4
OPTIONS = {"labels_field": None, "device": "cpu", "shuffle": "full", "batch_size": 64}


def make_file(path: Path, nbytes: int, row_nbytes: int, **storage: Any) -> None:
    """Write rows of values that compress to about a half."""
    rows = nbytes // row_nbytes
    with h5py.File(path, "w") as file:
        data = file.create_dataset("data", (rows, row_nbytes), "u1", **storage)
        values = np.random.default_rng(0).integers(0, 16, (256, row_nbytes), np.uint8)
        for begin in range(0, rows, len(values)):
            data[begin : begin + len(values)] = values[: rows - begin]


@contextlib.contextmanager
def readers(bench: Bench, name: str, latency: float = 0.0) -> Iterator[dict[str, AsyncReader]]:
    """Open a reader of a local file, of the same as a far one, and one that keeps it."""
    kept = (bench.options.cache_dir or bench.folder) / f"{name}-kept"
    with serving(bench.folder) as server, contextlib.ExitStack() as stack:
        server.delay(latency)
        url = server.url(f"{name}.h5")
        several = {
            "local": {"hdf5_path": bench.folder / f"{name}.h5"},
            "far": {"hdf5_path": url},
            "kept": {"hdf5_path": url, "cache": "disk", "cache_dir": kept},
        }
        yield {
            way: stack.enter_context(AsyncReader(**options, **OPTIONS))
            for way, options in several.items()
        }


def later_epochs(name: str, row_nbytes: int, **storage: Any) -> Any:
    """Return a case: later epochs of a file, beside the local file."""

    def case(bench: Bench) -> None:
        make_file(bench.folder / f"{name}.h5", bench.options.nbytes, row_nbytes, **storage)
        with readers(bench, name) as opened:
            for _ in opened["kept"]:
                pass
            ways = {way: paced(reader_sizes(opened[way])) for way in ("local", "kept")}
            bench.measure(name, ways, [Target("kept", "local", 0.9)])
            bench.print(f"{name:16} {opened['kept'].stats().cache}")

    return case


def first_epoch(bench: Bench) -> None:
    """Measure the epoch in which all is fetched, with and without keeping it."""
    make_file(bench.folder / "first.h5", bench.options.nbytes, 150_528)
    with readers(bench, "first") as opened:
        ways = {way: paced(reader_sizes(opened[way])) for way in ("far", "kept")}
        bench.measure("first", ways, [Target("kept", "far", 0.8)])


def ranks(bench: Bench) -> None:
    """Measure the memory that the maps of several ranks take together."""
    make_file(bench.folder / "ranks.h5", bench.options.nbytes, 150_528)
    spawning = multiprocessing.get_context("spawn")
    found, barrier = spawning.Queue(), spawning.Barrier(RANKS)
    with serving(bench.folder) as server:
        kept = str((bench.options.cache_dir or bench.folder) / "ranks-kept")
        arguments = server.url("ranks.h5"), kept, found, barrier
        several = [spawning.Process(target=_rank, args=(r, *arguments)) for r in range(RANKS)]
        for process in several:
            process.start()
        shares = [found.get(timeout=600) for _ in several]
        for process in several:
            process.join()
    rss, pss = (sum(share[i] for share in shares) for i in range(2))
    bench.print(f"{'ranks':16} Rss {rss / 1e6:,.0f} MB, Pss {pss / 1e6:,.0f} MB of {RANKS} ranks")
    bench.note("ranks", "file", "memory of all ranks", bench.options.nbytes / pss, 0.9)


def _rank(rank: int, url: str, kept: str, found: Any, barrier: Any) -> None:
    options = {"rank": rank, "world_size": RANKS, "cache": "disk", "cache_dir": kept, **OPTIONS}
    with AsyncReader(hdf5_path=url, **options) as reader:
        for _ in range(6):  # (in which each rank meets most of the samples)
            for _ in reader:
                pass
        barrier.wait()
        found.put(memory_of_maps(kept))
        barrier.wait()


def memory_of_maps(folder: str) -> tuple[int, int]:
    """Return Rss and Pss, in bytes, of this process's maps of files in a folder."""
    taken, is_there = {"Rss:": 0, "Pss:": 0}, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if "-" in first:
            is_there = folder in line
        elif is_there and first in taken:
            taken[first] += int(rest[0]) * 1024
    return taken["Rss:"], taken["Pss:"]


CASES = {
    "rows-150k": later_epochs("rows-150k", 150_528),
    "rows-16k": later_epochs("rows-16k", 16_384),
    "gzip-150k": later_epochs("gzip-150k", 150_528, chunks=(1, 150_528), compression=1),
    "first": first_epoch,
    "ranks": ranks,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", choices=[*CASES])
    parser.add_argument("--cache-dir", type=Path, help="(beside the file)")
    parser.add_argument("--nbytes", type=int, default=600_000_000)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="show that it runs")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.quick:
        options.nbytes, options.seconds, options.repeats = 20_000_000, 0.05, 2
    run_cases("bench_disk_cache", CASES, options)


if __name__ == "__main__":
    main()
