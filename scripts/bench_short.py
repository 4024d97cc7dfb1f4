"""Measures short epochs, and batches of given samples, beside plain loops of h5py.

All ways of a case take turns, in the same run, with warm caches; what counts is the ratio of the
medians. Batches have 256 rows of 16 bytes or 4 kB, in one file or ten, which stay open for h5py.

- epochs of 1, 4 and 16 batches: a `for` loop over the reader for each epoch, in order against
  slices of h5py, and fully shuffled against lists of rows, which h5py needs sorted, and gives so.
- given samples: `fetch_data(index)` with `get_next_batch()`, and `read(index)`, of 1, 16 and 256
  rows, against `ds[i]` or a sorted list.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from bench_turns import Bench, Target, Way, paced, reader_sizes, run_chosen

from h5async import AsyncReader

SIZE = 256
Loop = Callable[[list[h5py.Dataset], np.ndarray], Iterator[int]]


def write(folder: Path, nbytes: int, files: int, rows: int) -> list[Path]:
    """Write rows of float32 to files, which have equally many of them, about."""
    values = np.random.default_rng(0).random((rows, nbytes // 4), np.float32)
    paths = [folder / f"{nbytes}-{files}-{rows}-{n}.h5" for n in range(files)]
    for path, some in zip(paths, np.array_split(values, files), strict=True):
        with h5py.File(path, "w") as file:
            file["data"] = some
    return paths


def slices(datasets: list[h5py.Dataset], ends: np.ndarray) -> Iterator[int]:
    """Slice batches, each of as many datasets as it lies in."""
    begins = ends - [len(data) for data in datasets]
    while True:
        for first in range(0, ends[-1], SIZE):
            stop = first + SIZE
            if len(datasets) == 1:
                yield len(datasets[0][first:stop])
                continue
            numbers = np.flatnonzero((begins < stop) & (ends > first)).tolist()
            parts = [datasets[n][max(0, first - begins[n]) : stop - begins[n]] for n in numbers]
            yield len(parts[0] if len(parts) == 1 else np.concatenate(parts))


def sorted_rows(datasets: list[h5py.Dataset], ends: np.ndarray) -> Iterator[int]:
    """Read shuffled batches by sorted lists."""
    begins, rng = ends - [len(data) for data in datasets], np.random.default_rng(0)
    while True:
        order = rng.permutation(ends[-1])
        for first in range(0, order.size, SIZE):
            some = np.sort(order[first : first + SIZE])
            owner = np.searchsorted(ends, some, side="right")
            parts = [datasets[n][some[owner == n] - begins[n]] for n in np.unique(owner).tolist()]
            yield len(parts[0] if len(parts) == 1 else np.concatenate(parts))


def epochs(bench: Bench) -> None:
    for nbytes in 16, 4096:
        for files, batches in itertools.product((1, 10), (1, 4, 16)):
            paths = write(bench.folder, nbytes, files, batches * SIZE)
            case = f"{nbytes} B, {batches} batch{'es' * (batches > 1)}"
            compare(bench, paths, False, slices, case)
            compare(bench, paths, "full", sorted_rows, case)


def compare(bench: Bench, paths: list[Path], shuffle: Any, loop: Loop, case: str) -> None:
    more: dict[str, Any] = {
        "labels_field": None,
        "device": "cpu",
        "num_threads": 2,
        "index_cache": False,
    }
    with ExitStack() as stack:
        reader = AsyncReader(hdf5_path=paths, batch_size=SIZE, shuffle=shuffle, **more)
        stack.enter_context(reader)
        datasets = [stack.enter_context(h5py.File(path))["data"] for path in paths]
        ends = np.cumsum([len(data) for data in datasets])
        ways: dict[str, Way] = {
            "reader": paced(reader_sizes(reader)),
            "h5py": paced(loop(datasets, ends)),
        }
        case = f"{case}, {len(paths)} file{'s' * (len(paths) > 1)}, {shuffle or 'in order'}"
        bench.measure(case, ways, [Target("reader", "h5py", 1.0)])


def given(bench: Bench) -> None:
    rng, rows = np.random.default_rng(0), 4096
    for nbytes in 16, 4096:
        (path,) = write(bench.folder, nbytes, 1, rows)
        options: dict[str, Any] = {
            "hdf5_path": path,
            "labels_field": None,
            "device": "cpu",
            "num_threads": 2,
        }
        with h5py.File(path) as file, AsyncReader(batch_size=SIZE, **options) as reader:
            for count in 1, 16, 256:
                lists = [sorted(rng.permutation(rows)[:count].tolist()) for _ in range(64)]

                def fetched(index: list[int]) -> int:
                    reader.fetch_data(index)
                    return reader.get_next_batch().size

                def listed(index: list[int], data: h5py.Dataset = file["data"]) -> int:
                    return len(data[index[0] if len(index) == 1 else index]) and len(index)

                calls: dict[str, Callable[[list[int]], int]] = {
                    "fetch_data(index)": fetched,
                    "read(index)": lambda index: reader.read(index).size,
                    "h5py": listed,
                }
                ways: dict[str, Way] = {
                    name: paced(each(call, lists)) for name, call in calls.items()
                }
                targets = [Target(name, "h5py", 1.0) for name in [*calls][:2]]
                bench.measure(f"{nbytes} B, {count} row{'s' * (count > 1)}", ways, targets)


def each(call: Callable[[list[int]], int], lists: Sequence[list[int]]) -> Iterator[int]:
    while True:
        yield from map(call, lists)


if __name__ == "__main__":
    run_chosen("bench_short", __doc__, {"epochs": epochs, "given": given}, seconds=0.03)
