"""Measures what trainings of language models take: windows of tokens, at places drawn at random.

One long dataset of uint16 tokens, and the same tokens as rows of 1,025. All ways take turns, in the
same run, with warm caches; what counts is the ratio of the medians.

- windows: samples of 1,025 steps, one each 1,024 tokens, in random order, in batches of 16 and 64;
  against a loop that stacks slices of `np.memmap`, as trainings do, and against rows.
- documents: the same tokens as documents of 8 to 2,000 of them, packed to windows, with the numbers
  and positions of each; against a loop that slices a map, and finds these by NumPy.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import h5py
import numpy as np
from bench_common import RESULTS
from bench_turns import Bench, Target, Way, paced, reader_sizes, run_cases

from h5async import AsyncReader, Field, RaggedField, Sequences

LENGTH, EVERY = 1025, 1024


def write(path: Path, count: int) -> None:
    """Write tokens, and rows of them."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 50_000, count, dtype=np.uint16)
    with h5py.File(path, "w") as file:
        file["tokens"] = tokens
        file["rows"] = tokens[: count // LENGTH * LENGTH].reshape(-1, LENGTH)
        lengths = rng.lognormal(5, 1, count // 200).clip(8, 2000).astype(np.int64)
        file["offsets"] = np.append(0, np.cumsum(lengths).clip(0, count))


def slices(path: Path, batch_size: int) -> Iterator[int]:
    """Stack slices of a map of the tokens, in random order."""
    with h5py.File(path) as file:
        dataset = file["tokens"]
        at, count = dataset.id.get_offset(), dataset.size
    tokens = np.memmap(path, np.uint16, "r", at, (count,))
    rng = np.random.default_rng(0)
    while True:
        starts = rng.permutation((count - LENGTH) // EVERY + 1) * EVERY
        for first in range(0, starts.size - batch_size + 1, batch_size):
            some = starts[first : first + batch_size].tolist()
            yield len(np.stack([tokens[at : at + LENGTH] for at in some]))


def packed(path: Path, batch_size: int) -> Iterator[int]:
    """Stack windows of a map, with their documents and positions."""
    with h5py.File(path) as file:
        dataset, offsets = file["tokens"], file["offsets"][()]
        at = dataset.id.get_offset()
    tokens = np.memmap(path, np.uint16, "r", at, (int(offsets[-1]),))
    rng = np.random.default_rng(0)
    while True:
        starts = rng.permutation(tokens.size // LENGTH) * LENGTH
        for first in range(0, starts.size - batch_size + 1, batch_size):
            some = starts[first : first + batch_size]
            places = some[:, np.newaxis] + np.arange(LENGTH)
            documents = np.searchsorted(offsets, places, side="right") - 1
            positions = (places - offsets[documents]).astype(np.int32)
            found = np.stack([tokens[at : at + LENGTH] for at in some.tolist()])
            yield min(len(found), len(documents), len(positions))


def documents(bench: Bench) -> None:
    path = bench.folder / "documents.h5"
    write(path, bench.options.tokens)
    field = RaggedField("tokens", offsets="offsets", pack=LENGTH)
    for size in (16, 64):
        options = {"hdf5_path": path, "shuffle": "full", "batch_size": size, "device": "cpu"}
        with AsyncReader(fields={"tokens": field}, **options) as ours:
            ways: dict[str, Way] = {
                "pack": paced(reader_sizes(ours)),
                "slices": paced(packed(path, size)),
            }
            bench.measure(f"documents, {size}", ways, [Target("pack", "slices", 1.5)])


def windows(bench: Bench) -> None:
    path = bench.folder / "tokens.h5"
    write(path, bench.options.tokens)
    steps = {"tokens": Field("tokens", steps=range(LENGTH))}
    rows = {"rows": Field("rows")}
    for size in (16, 64):
        options = {"hdf5_path": path, "shuffle": "full", "batch_size": size, "device": "cpu"}
        every = Sequences(every=EVERY)
        with (
            AsyncReader(fields=steps, sequences=every, **options) as ours,
            AsyncReader(fields=rows, **options) as whole,
        ):
            ways: dict[str, Way] = {
                "steps": paced(reader_sizes(ours)),
                "rows": paced(reader_sizes(whole)),
                "slices": paced(slices(path, size)),
            }
            targets = [Target("steps", "slices", 1.5), Target("steps", "rows", 1.0)]
            bench.measure(f"windows, {size}", ways, targets)


CASES = {"windows": windows, "documents": documents}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=100_000_000)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--only", nargs="*", choices=CASES)
    parser.add_argument("--out", type=Path, nargs="?", const=RESULTS)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    if options.quick:
        options.tokens, options.seconds, options.repeats = 2_000_000, 0.1, 1
    run_cases("bench_tokens", CASES, options)


if __name__ == "__main__":
    main()
