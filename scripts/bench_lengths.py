"""Measures batches by length: what padding costs a model, and what such batches cost the reader.

Texts of 8 to 2,000 tokens (log-normal, 200 on average) are read in random order. Each way takes
turns with the others, and the median of all rounds counts.

- padding: the share of a padded batch that is padding, and tokens a second of a loop that pads each
  batch and looks up a vector of 64 numbers for every place of it, as a model's first layer does.
- batches: microseconds a batch of a loop that does nothing, with as many samples in it on average.
- opening: what it takes to cut an epoch of so many samples into batches.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from h5async import AsyncReader, RaggedField
from h5async.order.lengths import Lengths, SamplingByLength

VALUES = 16_384
SAMPLES = 64  # as many as that, about
WAYS: dict[str, dict[str, Any]] = {
    "batch_size=64": {"batch_size": SAMPLES},
    "batch_size=64, bucket=16": {"batch_size": SAMPLES, "bucket": 16},
    "batch_values=16384": {"batch_values": VALUES},
    "batch_values=16384, bucket=16": {"batch_values": VALUES, "bucket": 16},
}


def write(path: Path, count: int) -> None:
    """Write tokens of texts, one behind the other, and their lengths."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(5, 0.8, count), 8, 2000).astype(np.int64)
    with h5py.File(path, "w") as file:
        file["tokens"] = rng.integers(0, 30_000, lengths.sum(), dtype=np.int32)
        file["lengths"] = lengths


def opened(path: Path, options: dict[str, Any]) -> AsyncReader:
    """Return a reader of these texts."""
    field = RaggedField("tokens", offsets="lengths", offsets_kind="lengths")
    return AsyncReader(
        hdf5_path=path, fields={"tokens": field}, shuffle="full", device="cpu", **options
    )


def padded(reader: AsyncReader, batches: int, table: np.ndarray) -> tuple[float, float]:
    """Return the share of padding, and tokens a second."""
    tokens = places = 0
    begin = time.perf_counter()
    for _ in range(batches):
        batch = reader.get_next_batch().tokens
        array, _ = batch.to_padded()
        table[array].mean(axis=1)
        tokens += batch.values.size
        places += array.size
    return 1 - tokens / places, tokens / (time.perf_counter() - begin)


def bare(reader: AsyncReader, batches: int) -> tuple[float, float]:
    """Return microseconds a batch, and a sample."""
    samples, begin = 0, time.perf_counter()
    for _ in range(batches):
        samples += reader.get_next_batch().size
    seconds = time.perf_counter() - begin
    return 1e6 * seconds / batches, 1e6 * seconds / samples


def cut(count: int) -> None:
    """Tell how long an epoch of so many samples takes to be cut."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(5, 0.8, count), 8, 2000).astype(np.uint32)
    for bucket in (None, 16):
        several = []
        for _ in range(3):
            sampling = SamplingByLength(
                num_samples=count,
                batch_size=VALUES,
                shuffle="full",
                lengths=Lengths(lengths, VALUES, bucket),
            )
            begin = time.perf_counter()
            batches = sampling.batches_in(0)
            several.append(time.perf_counter() - begin)
        print(f"{count:,} samples, bucket={bucket}: {batches:,} batches in {min(several):.2f} s")


def main() -> None:
    """Measure all of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=200_000)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    table = np.random.default_rng(0).random((30_000, 64), dtype=np.float32)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "texts.h5"
        write(path, arguments.samples)
        readers = {name: opened(path, options) for name, options in WAYS.items()}
        found: dict[str, list[tuple[float, ...]]] = {name: [] for name in WAYS}
        for _ in range(arguments.rounds):
            for name, reader in readers.items():
                found[name].append((*padded(reader, 40, table), *bare(reader, 1500)))
        for name, rounds in found.items():
            share, rate, of_batch, of_sample = map(statistics.median, zip(*rounds, strict=True))
            print(
                f"{name:32} padding {share:4.0%}   {rate / 1e6:5.2f}M tokens/s"
                f"   {of_batch:5.0f} us a batch, {of_sample:5.2f} us a sample"
            )
        for reader in readers.values():
            reader.close()
    cut(10_000_000)


if __name__ == "__main__":
    main()
