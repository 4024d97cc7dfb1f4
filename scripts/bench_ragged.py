"""Measures samples of any length: variable-length datatypes, and flat values with offsets.

All ways of a case take turns, in the same run, with warm caches; what counts is the ratio of the
medians. Batches have 256 samples. The peer is h5py in one thread, whose lock lets no more read.

- bytes: elements of 5 to 50 kB of uint8; tokens: of 0 to 399 int32, with references behind gzip;
  strings of 3 to 40 characters. All of a variable-length datatype. Random, against `ds[sorted]`,
  which reads a batch in one call; in order, against slices.
- offsets: the same tokens as flat values, raw and behind gzip, in chunks of 16,384 values; random,
  against a slice of each sample.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from bench_common import RESULTS
from bench_turns import Bench, Target, paced, reader_sizes, run_cases

from h5async import AsyncReader, RaggedField

BATCH, THREADS = 256, 2
CHUNK = 16_384  # flat values
RANDOM = {"bytes": 10, "tokens": 5, "strings": 2}
IN_ORDER = 1
OFFSETS = {"raw": 10, "gzip": 3}


def write(path: Path, case: str, samples: int) -> None:
    """Write a file of one kind of elements of variable length."""
    rng = np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        if case == "strings":
            letters = rng.integers(97, 123, (samples, 40), np.uint8).view("S40").ravel().tolist()
            lengths = rng.integers(3, 41, samples).tolist()
            texts = [text[:n] for text, n in zip(letters, lengths, strict=True)]
            file.create_dataset("x", data=texts, dtype=h5py.string_dtype())
        elif case == "tokens":
            values, ends = tokens(samples)
            dataset = file.create_dataset(
                "x", (samples,), h5py.vlen_dtype("i4"), chunks=(1024,), compression="gzip"
            )
            write_elements(dataset, np.split(values, ends[:-1]))
        else:
            dataset = file.create_dataset("x", (samples,), h5py.vlen_dtype("u1"))
            noise = rng.integers(0, 256, 1 << 20, np.uint8)
            begins = rng.integers(1 << 19, size=samples).tolist()
            lengths = rng.integers(5_000, 50_001, samples).tolist()
            spans = zip(begins, lengths, strict=True)
            write_elements(dataset, [noise[begin : begin + n] for begin, n in spans])


def write_elements(dataset: h5py.Dataset, elements: list[np.ndarray]) -> None:
    for begin in range(0, len(elements), 1024):
        part = elements[begin : begin + 1024]
        several = np.empty(len(part), object)
        several[:] = part
        dataset[begin : begin + len(part)] = several


def tokens(samples: int) -> tuple[np.ndarray, np.ndarray]:
    """Return tokens as texts have them, a few of which are frequent, and where samples end."""
    rng = np.random.default_rng(1)
    ends = np.cumsum(rng.integers(0, 400, samples))
    ranks = np.exp(rng.random(int(ends[-1])) * np.log(50_000))
    return ranks.astype(np.int32), ends


def write_flat(path: Path, samples: int, compression: str | None) -> None:
    values, ends = tokens(samples)
    with h5py.File(path, "w") as file:
        file.create_dataset("values", data=values, chunks=(CHUNK,), compression=compression)
        file["ends"] = ends


# --- ways ----------------------------------------------------------------------------------------


def reader_of(path: Path, field: str | RaggedField, shuffle: str | bool) -> AsyncReader:
    return AsyncReader(
        hdf5_path=path,
        fields={"x": field},
        batch_size=BATCH,
        shuffle=shuffle,
        num_threads=THREADS,
        device="cpu",
        index_cache=False,
    )


def batches_of(samples: int) -> Iterator[np.ndarray]:
    """Yield random samples, ascending."""
    rng = np.random.default_rng(2)
    while True:
        for index in np.array_split(rng.permutation(samples), samples // BATCH):
            yield np.sort(index)


def at_random(dataset: h5py.Dataset) -> Iterator[int]:
    for index in batches_of(len(dataset)):
        yield len(dataset[index])


def in_order(dataset: h5py.Dataset) -> Iterator[int]:
    while True:
        for begin in range(0, len(dataset), BATCH):
            yield len(dataset[begin : begin + BATCH])


def slices(values: h5py.Dataset, ends: np.ndarray) -> Iterator[int]:
    starts = np.concatenate(([0], ends))
    for index in batches_of(len(ends)):
        bounds = zip(starts[index].tolist(), starts[index + 1].tolist(), strict=True)
        yield len([values[begin:end] for begin, end in bounds])


def check(reader: AsyncReader, expected: Any) -> None:
    """Compare a batch with what h5py reads."""
    batch = next(iter(reader))
    for number, values in zip(batch.index.tolist(), batch.x, strict=True):
        theirs = expected(number)
        theirs = np.frombuffer(theirs, np.uint8) if isinstance(theirs, bytes) else theirs
        assert np.array_equal(values, theirs)


def elements(bench: Bench) -> None:
    for case, least in RANDOM.items():
        path = bench.folder / f"{case}.h5"
        write(path, case, bench.options.samples // (10 if case == "bytes" else 1))
        with (
            h5py.File(path) as file,
            reader_of(path, "x", "full") as full,
            reader_of(path, "x", False) as ordered,
        ):
            dataset = file["x"]
            for reader in full, ordered:
                check(reader, dataset.__getitem__)
            ways = {"ds[sorted]": paced(at_random(dataset)), "ours": paced(reader_sizes(full))}
            bench.measure(f"{case}, random", ways, [Target("ours", "ds[sorted]", least)])
            ways = {"slices": paced(in_order(dataset)), "ours": paced(reader_sizes(ordered))}
            bench.measure(f"{case}, in order", ways, [Target("ours", "slices", IN_ORDER)])
            bench.print(f"{'':16} {ordered.stats()}")
        path.unlink()


def offsets(bench: Bench) -> None:
    field = RaggedField("values", offsets="ends", offsets_kind="ends")
    for stored, least in OFFSETS.items():
        path = bench.folder / f"{stored}.h5"
        write_flat(path, bench.options.samples, None if stored == "raw" else stored)
        with h5py.File(path) as file, reader_of(path, field, "full") as reader:
            values, ends = file["values"], file["ends"][:]
            starts = np.concatenate(([0], ends))
            check(reader, lambda i, v=values, s=starts: v[s[i] : s[i + 1]])
            ways = {"slices": paced(slices(values, ends)), "ours": paced(reader_sizes(reader))}
            bench.measure(f"offsets, {stored}", ways, [Target("ours", "slices", least)])
            bench.print(f"{'':16} {reader.stats()}")
        path.unlink()


CASES = {function.__name__: function for function in (elements, offsets)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--samples", type=int, default=100_000, help="of 5 to 50 kB: a tenth of it")
    parser.add_argument("--repeats", type=int, default=7, help="rounds")
    parser.add_argument("--seconds", type=float, default=0.5, help="that each way takes in a round")
    parser.add_argument("--only", nargs="*", choices=list(CASES), help="cases; default: all")
    parser.add_argument("--quick", action="store_true", help="few and small: no figures to quote")
    parser.add_argument("--out", type=Path, help="folder for the results; default: scripts/results")
    options = parser.parse_args()
    if options.quick:
        options.samples, options.repeats, options.seconds = 5_120, 2, 0.05
    elif options.out is None and not options.only:
        options.out = RESULTS
    run_cases("bench_ragged", CASES, options)


if __name__ == "__main__":
    main()
