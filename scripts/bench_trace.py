"""What a trace costs: a reader takes turns with itself, `reader.trace()` running and not.

.venv/bin/python scripts/bench_trace.py --out scripts/results

One row for each kind of work: large rows without a filter; gzip chunks of which each is decoded
once an epoch, and small ones of which single samples are taken; rows of 16 bytes in batches of 256;
images in batches of one; and work in Python (`postprocess`). The loop does nothing with the
batches, so that the reader's own time is all there is.

All is done in the calling thread (`num_threads=0`), and what is measured is its processor time, so
that neither other work on the machine nor waits for it count. (With --threads 2 it is the time that
passes, which says something on a machine that does nothing else.) In each round, "off" has a turn
before and one after that with the trace. Other work still makes turns slower, by the caches that
all share: what counts is the fastest quarter of the turns of each way, by their medians. The ratio
of the two ways without a trace says what turns of the same thing differ by.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from bench_turns import Bench, reader_sizes, run_cases

from h5async import AsyncReader

LEAST = 0.97  # of the speed without a trace
LEAST_BATCHES = 20  # of a turn


def turn(sizes: Iterator[int], batches: int, clock: Callable[[], float]) -> float:
    """Take so many batches; return samples a second."""
    begin, count = clock(), 0
    for _ in range(batches):
        count += next(sizes)
    return count / (clock() - begin)


def compare(bench: Bench, case: str, path: Path, **options: Any) -> None:
    """Compare a reader with and without a trace."""
    threads, found = bench.options.threads, []
    clock = time.perf_counter if threads else time.thread_time
    trace = bench.folder / "trace.json"
    with AsyncReader(hdf5_path=path, labels_field=None, num_threads=threads, **options) as reader:
        sizes, begin, batches = reader_sizes(reader), clock(), 0
        while batches < LEAST_BATCHES or clock() - begin < bench.options.seconds:
            next(sizes)
            batches += 1
        for _ in range(bench.options.repeats):
            gc.collect()
            turn(sizes, batches, clock)
            before = turn(sizes, batches, clock)
            with reader.trace(trace):  # what it takes to begin and to write is no part of the time
                turn(sizes, batches, clock)  # nor are the first pages of its memory
                on = turn(sizes, batches, clock)
            turn(sizes, batches, clock)
            found.append((before, on, turn(sizes, batches, clock)))
    names = ("off", "trace", "off, after")
    best = dict(zip(names, map(fastest, np.array(found).T), strict=True))
    for (name, speed), rounds in zip(best.items(), zip(*found, strict=True), strict=True):
        rounded = [round(one, 1) for one in rounds]
        bench.speeds.append({"case": case, "way": name, "speed": speed, "rounds": rounded})
        bench.print(f"{case:16} {name:12} {speed:>12,.0f} a second")
    bench.note(case, "trace", "off", 2 * best["trace"] / (best["off"] + best["off, after"]), LEAST)
    bench.note(case, "off, after", "off", best["off, after"] / best["off"], 1)


def fastest(speeds: np.ndarray) -> float:
    """Return the median of the fastest quarter."""
    return float(np.median(np.sort(speeds)[-max(1, speeds.size // 4) :]))


def make(bench: Bench, name: str, data: np.ndarray, **options: Any) -> Path:
    path = bench.folder / f"{name}.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("data", data=data, **options)
    return path


def images(count: int, *shape: int) -> np.ndarray:
    rng = np.random.default_rng(0)
    ramp = np.arange(np.prod(shape), dtype=np.uint8).reshape(shape) // 16
    return rng.integers(0, 8, (count, *shape), np.uint8) + ramp


def large_rows(bench: Bench) -> None:
    path = make(bench, "large", images(2000, 224, 224, 3))
    compare(bench, "150 KB rows", path, batch_size=64, shuffle="full")


def gzip_chunks(bench: Bench) -> None:
    path = make(bench, "gzip", images(40000, 28, 28), chunks=(256, 28, 28), compression="gzip")
    compare(bench, "gzip, window", path, batch_size=256, shuffle="window")


def small_chunks(bench: Bench) -> None:
    path = make(bench, "small", images(40000, 28, 28), chunks=(1, 28, 28), compression="gzip")
    compare(bench, "gzip, 1 a chunk", path, batch_size=256, shuffle="full")


def short_rows(bench: Bench) -> None:
    path = make(bench, "short", np.arange(4_000_000, dtype="f4").reshape(-1, 4))
    compare(bench, "16 byte rows", path, batch_size=256, shuffle="full")


def batches_of_one(bench: Bench) -> None:
    path = make(bench, "one", images(20000, 28, 28))
    compare(bench, "batches of one", path, batch_size=1, shuffle="full")


def through_python(bench: Bench) -> None:
    path = make(bench, "python", images(20000, 28, 28))
    compare(bench, "postprocess", path, batch_size=64, shuffle="full", postprocess=_same)


def _same(data: np.ndarray) -> None:
    pass


CASES: dict[str, Callable[[Bench], None]] = {
    "large": large_rows,
    "gzip": gzip_chunks,
    "chunks": small_chunks,
    "short": short_rows,
    "one": batches_of_one,
    "python": through_python,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=41, help="turns of each way")
    parser.add_argument("--seconds", type=float, default=0.2, help="how long a turn is")
    parser.add_argument("--threads", type=int, default=0, help="of the reader")
    parser.add_argument("--only", nargs="*", choices=CASES, help="some of the cases")
    parser.add_argument("--out", type=Path, help="folder for bench_trace.json and a plot")
    run_cases("bench_trace", CASES, parser.parse_args())


if __name__ == "__main__":
    main()
