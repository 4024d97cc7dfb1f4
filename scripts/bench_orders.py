"""Measures orders of samples against a full shuffle: selections, weighted draws, given samples.

All ways of a case take short turns, in the same run, on one file in the page cache, with batches of
equal size. A ratio is the median of those of each round, so that a busy machine, which slows all
ways of a round, changes it little. Draws are made with weights that are random numbers.

Draws in the order of a window are compared with a window of all samples; and how random their order
is, with that of draws without a window: how far the draws of one chunk are from each other, and how
many of a batch are of one chunk.

Given samples are asked for by `fetch_data(index)`, so they are compared with `fetch_data()`; the
others with a `for` loop. The numbers of given samples are drawn before the turn.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np
from bench_common import RESULTS, header, save
from rich.console import Console

from h5async import AsyncReader
from h5async.order.selection import WeightedOrder
from h5async.order.window import DrawnOrder

BATCHES = 64, 256, 1024
READY = 6  # batches that a way may have made before its turn
TARGET = 0.9


class Case(NamedTuple):
    """A file: rows of float32, in chunks of some rows behind gzip, or as they are."""

    name: str
    rows: int
    values: int
    chunk_rows: int | None = None


CASES = [
    Case("16 B", 1_000_000, 4),
    Case("16 B, gzip", 1_000_000, 4, 1000),
    Case("1 kB", 100_000, 256),
    Case("1 kB, gzip", 100_000, 256, 32),
    Case("12 kB", 10_000, 3072),
    Case("12 kB, gzip, 1 row a chunk", 10_000, 3072, 1),
    Case("12 kB, gzip", 8_000, 3072, 16),
]


def write(path: Path, case: Case) -> None:
    values = np.random.default_rng(0).integers(0, 16, (case.rows, case.values)).astype("f4")
    with h5py.File(path, "w") as file:
        if case.chunk_rows is None:
            file["data"] = values
        else:
            chunks = case.chunk_rows, case.values
            file.create_dataset("data", data=values, chunks=chunks, compression="gzip")


def sizes_of_epochs(reader: AsyncReader) -> Iterator[int]:
    while True:
        for batch in reader:
            yield batch.size


def sizes_of_pairs(reader: AsyncReader, given: list[np.ndarray] | None) -> Iterator[int]:
    """Ask for the next batches, or for batches of given samples, and take them."""
    number = 0
    while True:
        index = None if given is None else given[number % len(given)]
        reader.fetch_data(index)
        number += 1
        if number > reader.config.prefetch:
            yield reader.get_next_batch().size


def pace(sizes: Iterator[int], duration: float) -> float:
    """Return samples a second."""
    for _ in range(READY):
        next(sizes)
    count, begin = 0, time.perf_counter()
    while (taken := time.perf_counter() - begin) < duration:
        count += next(sizes)
    return count / taken


def measure(
    path: Path, case: Case, batch_size: int, rounds: int, duration: float
) -> dict[str, list[float]]:
    """Return samples a second of each way, in each round."""
    rng = np.random.default_rng(1)
    some = rng.permutation(case.rows)[: case.rows * 9 // 10]
    given = [rng.permutation(case.rows)[:batch_size] for _ in range(64)]
    options: dict[str, dict[str, Any]] = {
        "full shuffle": {"shuffle": "full"},
        "90 % by indices": {"shuffle": "full", "indices": some},
        "weighted": {"weights": rng.random(case.rows)},
        "window": {"shuffle": "window"},
        "weighted, window": {"shuffle": "window", "weights": rng.random(case.rows)},
        "full shuffle, in pairs": {"shuffle": "full"},
        "given samples": {},
    }
    readers = {
        way: AsyncReader(
            hdf5_path=path,
            labels_field=None,
            batch_size=batch_size,
            num_threads=2,
            device="cpu",
            index_cache=False,
            **more,
        )
        for way, more in options.items()
    }
    ways: dict[str, Iterator[int]] = {
        way: sizes_of_epochs(readers[way]) for way in list(readers)[:5]
    }
    ways["full shuffle, in pairs"] = sizes_of_pairs(readers["full shuffle, in pairs"], None)
    ways["given samples"] = sizes_of_pairs(readers["given samples"], given)
    found: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds + 1):  # the first one is not counted
        for way, sizes in ways.items():
            found[way].append(pace(sizes, duration))
    for reader in readers.values():
        reader.close()
    return {way: speeds[1:] for way, speeds in found.items()}


OTHERS = {
    "90 % by indices": "full shuffle",
    "weighted": "full shuffle",
    "weighted, window": "window",
    "given samples": "full shuffle, in pairs",
}


def results(case: Case, batch_size: int, found: dict[str, list[float]]) -> dict[str, Any]:
    ratios = {
        way: statistics.median(a / b for a, b in zip(found[way], found[other], strict=True))
        for way, other in OTHERS.items()
    }
    return {
        "case": case.name,
        "batch_size": batch_size,
        "speeds": {way: round(statistics.median(speeds)) for way, speeds in found.items()},
        "ratios": {way: round(ratio, 3) for way, ratio in ratios.items()},
    }


def randomness(chunks: int = 512, size: int = 16, batch: int = 32) -> dict[str, dict[str, float]]:
    """Return the mean distance of draws of one chunk, and their share of a batch.

    Weights are equal, or a tenth of all samples, which lie together, has half of the draws.
    """
    count, bounds = chunks * size, np.arange(0, chunks * size + 1, size)
    found = {}
    for name, rare in (("equal", 1.0), ("balanced", 9.0)):
        weights = np.ones(count)
        weights[: count // 10] = rare
        draws = WeightedOrder(weights, 0)
        window = DrawnOrder(draws, bounds, chunks // 2, 0, (count, batch, 1))
        for way, order in (("weighted", draws), ("weighted, window", window)):
            units = order.samples(1, 0, count) // size
            places = [np.flatnonzero(units == unit) for unit in np.unique(units)]
            far = [
                np.abs(some[:, None] - some).sum() / (n * (n - 1))
                for some in places
                if (n := some.size) > 1
            ]
            alike = [(one[:, None] == one).sum() - batch for one in units.reshape(-1, batch)]
            found[f"{way}, {name}"] = {
                "mean distance, of the epoch": round(float(np.mean(far)) / count, 3),
                "of a batch, in the same chunk": round(
                    float(np.mean(alike)) / batch / (batch - 1), 5
                ),
            }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=15, help="rounds")
    parser.add_argument(
        "--seconds", type=float, default=0.05, help="that each way takes in a round"
    )
    parser.add_argument("--only", nargs="*", choices=[case.name for case in CASES])
    parser.add_argument("--quick", action="store_true", help="few and small: no figures to quote")
    parser.add_argument("--out", type=Path, help="folder for the results; default: scripts/results")
    options = parser.parse_args()
    cases = [case for case in CASES if case.name in (options.only or [c.name for c in CASES])]
    if options.quick:
        options.repeats, options.seconds = 2, 0.01
        cases = [case._replace(rows=2_048) for case in cases]
    elif options.out is None and not options.only:
        options.out = RESULTS
    console, points = Console(), []
    with tempfile.TemporaryDirectory() as folder:
        for case in cases:
            path = Path(folder, "data.h5")
            write(path, case)
            for batch_size in BATCHES:
                found = measure(path, case, batch_size, options.repeats, options.seconds)
                points.append(results(case, batch_size, found))
                ratios = ", ".join(f"{way} {r:.2f}" for way, r in points[-1]["ratios"].items())
                speed = points[-1]["speeds"]["full shuffle"]
                line = f"{case.name:27} {batch_size:5} {speed:>12,} samples/s; {ratios}"
                console.print(line, markup=False, highlight=False, soft_wrap=True)
            path.unlink()
    if options.out is not None:
        found = {**header(), "wanted": TARGET, "points": points, "randomness": randomness()}
        save(found, options.out / "bench_orders.json")


if __name__ == "__main__":
    main()
