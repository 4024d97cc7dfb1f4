"""Measures reading over HTTP at 20 ms a request, against what others read the same file by.

A server in C (`rangeserver.c`) serves files on the loopback. All ways take turns, in the same run;
what counts is the ratio of the medians. Peers have the best settings that were found:

    pip install fsspec aiohttp zarr obstore virtualizarr torch

- peers: shuffled rows of 150 kB, each a chunk of its own, in the default format. h5py over fsspec's
  HTTP file system, by the cache that reads most; a DataLoader with 8 workers that read so;
  zarr over obstore by VirtualiZarr's references, four batches ahead, 128 requests at a time.
- objects: 1,000 objects of 100 rows of 4 kB, against one object with the same rows; 32 requests at
  a time, as by default, and 128, which two cores cannot keep busy.
- demand: a loop that takes 2,000 rows of 150 kB a second, and computes in Python in between.
"""

from __future__ import annotations

import argparse
import asyncio
import atexit
import contextlib
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from bench_common import RESULTS, serving_file
from bench_turns import Bench, Target, Way, paced, reader_sizes, run_cases

from h5async import AsyncReader

ROW_NBYTES = 150_000
SMALL_NBYTES = 4096
BATCH = 32
DELAY_MS = 20
FLIGHTS = 128
WORKERS = 8
DEMAND = 2000  # rows a second
CACHES: dict[str, dict[str, Any]] = {
    "none": {"cache_type": "none"},
    "readahead 64 KiB": {"cache_type": "readahead", "block_size": 1 << 16},
    "readahead 256 KiB": {"cache_type": "readahead", "block_size": 1 << 18},
    "blocks of 64 KiB": {"cache_type": "blockcache", "block_size": 1 << 16},
    "blocks of 256 KiB": {"cache_type": "blockcache", "block_size": 1 << 18},
    "blocks of 1 MiB": {"cache_type": "blockcache", "block_size": 1 << 20},
}


def write(path: Path, rows: int, nbytes: int, chunk_rows: int) -> None:
    rng = np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        made = file.create_dataset("data", (rows, nbytes), np.uint8, chunks=(chunk_rows, nbytes))
        for first in range(0, rows, 100):
            count = min(100, rows - first)
            made[first : first + count] = rng.integers(0, 256, (count, nbytes), np.uint8)


def batches(rows: int) -> Iterator[np.ndarray]:
    """Yield the rows of shuffled batches, for ever."""
    rng = np.random.default_rng(0)
    while True:
        yield from rng.permutation(rows)[: rows // BATCH * BATCH].reshape(-1, BATCH)


def ours(urls: str | list[str], flights: int = FLIGHTS) -> AsyncReader:
    # So much is fetched ahead as is on its way, and no row is kept for the next epoch.
    fetching = {"requests_in_flight": flights, "fetch_bytes": 2 * flights * ROW_NBYTES}
    given = {"labels_field": None, "shuffle": "full", "batch_size": BATCH, "device": "cpu"}
    return AsyncReader(hdf5_path=urls, index_cache=False, **given, **fetching)


# --- peers ---------------------------------------------------------------------------------------


def opened_by_fsspec(url: str, cache: dict[str, Any]) -> h5py.Dataset:
    import fsspec

    return h5py.File(fsspec.filesystem("http").open(url, **cache), "r")["data"]


def best_cache(url: str, bench: Bench) -> dict[str, Any]:
    """Return the settings by which h5py reads most rows."""
    speeds: dict[str, float] = {}
    for name, cache in CACHES.items():
        dataset = opened_by_fsspec(url, cache)
        order = np.concatenate([*itertools.islice(batches(len(dataset)), 2)])
        for row in order[:10]:  # its metadata
            dataset[row]
        count, begin = 0, time.perf_counter()
        while (taken := time.perf_counter() - begin) < 1:
            dataset[order[10 + count % 50]]
            count += 1
        speeds[name] = count / taken
        bench.print(f"h5py over fsspec, {name}: {speeds[name]:.1f} rows a second")
    return CACHES[max(speeds, key=lambda name: speeds[name])]


def by_h5py(url: str, cache: dict[str, Any]) -> Iterator[int]:
    """Read row by row, which is what a shuffled batch is."""
    dataset = opened_by_fsspec(url, cache)
    for rows in batches(len(dataset)):
        for row in rows:
            dataset[row]
            yield 1


class Rows:
    """The rows of a file, for a DataLoader: each worker opens the file when it first reads."""

    def __init__(self, url: str, cache: dict[str, Any], rows: int) -> None:
        self.url, self.cache, self.rows = url, cache, rows
        self.dataset: Any = None

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, row: int) -> Any:
        if self.dataset is None:
            self.dataset = opened_by_fsspec(self.url, self.cache)
            atexit.register(self.dataset.file.close)  # else the worker crashes at its end
        return self.dataset[row]


def by_data_loader(url: str, cache: dict[str, Any], rows: int) -> Iterator[int]:
    from torch.utils.data import DataLoader

    loader = DataLoader(
        Rows(url, cache, rows),
        batch_size=BATCH,
        shuffle=True,
        num_workers=WORKERS,
        multiprocessing_context="spawn",
        persistent_workers=True,
    )
    while True:
        for batch in loader:
            yield len(batch)


def by_zarr(url: str) -> Iterator[int]:
    """Read batches in threads, four ahead, each with all its requests at a time."""
    import obstore.store
    import zarr
    from obspec_utils.registry import ObjectStoreRegistry
    from virtualizarr.parsers import HDFParser

    base = url.rpartition("/")[0]
    store = obstore.store.HTTPStore(base, client_options={"allow_http": True})
    references = HDFParser()(url=url, registry=ObjectStoreRegistry({base: store}))
    zarr.config.set({"async.concurrency": FLIGHTS})
    array: Any = zarr.open_group(references, mode="r")["data"]

    async def read(rows: np.ndarray) -> None:  # (`oindex` makes 48 rows a second)
        await asyncio.gather(*[array.async_array.getitem(row) for row in rows.tolist()])

    with ThreadPoolExecutor(4) as pool:
        wanted = batches(array.shape[0])
        ahead = [pool.submit(asyncio.run, read(next(wanted))) for _ in range(4)]
        while True:
            ahead.pop(0).result()
            ahead.append(pool.submit(asyncio.run, read(next(wanted))))
            yield BATCH


def peers(bench: Bench) -> None:
    path = bench.folder / "rows.h5"
    rows = bench.options.rows
    write(path, rows, ROW_NBYTES, 1)
    with serving_file(path, DELAY_MS) as url, ours(url) as reader:
        cache = best_cache(url, bench)
        ways: dict[str, Way] = {
            "h5async": paced(reader_sizes(reader)),
            "zarr, VirtualiZarr's references": paced(by_zarr(url)),
            "h5py over fsspec": paced(by_h5py(url, cache)),
            f"DataLoader, {WORKERS} workers": paced(by_data_loader(url, cache, rows)),
        }
        least = dict(zip(list(ways)[1:], (3, 50, 8), strict=True))
        bench.measure("peers", ways, [Target("h5async", *one) for one in least.items()])


# --- objects, and a loop that has other things to do ---------------------------------------------


def objects(bench: Bench) -> None:
    count, rows = bench.options.objects, 100
    with contextlib.ExitStack() as stack:
        urls: dict[str, str | list[str]] = {}
        for name, number in ((f"{count:,} objects", count), ("one object", 1)):
            path = bench.folder / f"{number}.h5"
            write(path, rows * count // number, SMALL_NBYTES, 10)
            url = stack.enter_context(serving_file(path, DELAY_MS))
            urls[name] = [f"{url}/{one}" for one in range(number)]
        for flights in (32, FLIGHTS):
            readers = {n: stack.enter_context(ours(some, flights)) for n, some in urls.items()}
            ways = {name: paced(reader_sizes(one)) for name, one in readers.items()}
            bench.measure(f"objects, {flights} requests", ways, [Target(*ways, 0.5)])


def demanding(sizes: Iterator[int], rate: float) -> Way:
    """Take batches as far as they are due, and count in Python meanwhile."""

    def way(duration: float) -> float:
        next(sizes)
        count, begin = 0, time.perf_counter()
        while (taken := time.perf_counter() - begin) < duration:
            count += next(sizes)
            while time.perf_counter() - begin < count / rate:
                sum(range(200))
        return count / taken

    return way


def demand(bench: Bench) -> None:
    path = bench.folder / "rows.h5"
    if not path.exists():
        write(path, bench.options.rows, ROW_NBYTES, 1)
    with serving_file(path, DELAY_MS) as url, ours(url) as reader:
        ways = {
            "h5async": demanding(reader_sizes(reader), DEMAND),
            "demand": demanding(itertools.repeat(BATCH), DEMAND),
        }
        bench.measure("demand", ways, [Target("h5async", "demand", 0.9)])


CASES: dict[str, Callable[[Bench], None]] = {"peers": peers, "objects": objects, "demand": demand}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--objects", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="*", choices=CASES)
    parser.add_argument("--out", type=Path, nargs="?", const=RESULTS)
    parser.add_argument("--quick", action="store_true", help="small: no figures to quote")
    options = parser.parse_args()
    if options.quick:
        options.rows, options.objects, options.seconds, options.repeats = 200, 20, 0.3, 1
    run_cases("bench_remote_peers", CASES, options)


if __name__ == "__main__":
    sys.exit(main())
