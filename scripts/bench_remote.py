"""Measures reading over HTTP, against a bare loop of the client.

A server of the tests serves a file on the loopback, at once or after 20 ms. All ways take turns, in
the same run; what counts is the ratio of the medians. The bare loop asks obstore for the same
ranges, with as many requests in flight, and only copies the bytes to a batch.

- raw: rows of 150 kB without filters, in order and in random order.
- zstd: the same, each row a chunk; the bare loop does not decode.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from bench_common import RESULTS
from bench_turns import Bench, Target, Way, paced, reader_sizes, run_cases

from h5async import AsyncReader

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "io"))
from httpserver import serving

ROW_NBYTES = 150_000
GROUP = 8


def write(path: Path, rows: int, compression: Any = None) -> None:
    rng = np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        chunks = (1, ROW_NBYTES) if compression is not None else None
        made = file.create_dataset(
            "data", (rows, ROW_NBYTES), np.uint8, chunks=chunks, **(compression or {})
        )
        for first in range(0, rows, 64):
            count = min(64, rows - first)
            made[first : first + count] = rng.integers(0, 40, (count, ROW_NBYTES), np.uint8)


def places(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return where each row lies, and how many bytes it has there."""
    with h5py.File(path) as file:
        dataset = file["data"]
        if dataset.chunks is None:
            at = dataset.id.get_offset()
            return at + np.arange(len(dataset)) * ROW_NBYTES, np.full(len(dataset), ROW_NBYTES)
        found: list[Any] = []
        dataset.id.chunk_iter(found.append)
        found.sort(key=lambda one: one.chunk_offset)
        return np.array([y.byte_offset for y in found]), np.array([y.size for y in found])


def bare(
    url: str, where: tuple[np.ndarray, np.ndarray], batch: int, flights: int, *, shuffled: bool
) -> Iterator[int]:
    """Ask obstore for the rows of batches in threads, some batches ahead, and copy them."""
    import obstore
    from obstore.store import from_url

    offsets, nbytes = where
    base, name = url.rsplit("/", 1)
    store = from_url(base, client_options={"allow_http": True})
    rng = np.random.default_rng(0)
    out = np.empty((batch, int(nbytes.max())), np.uint8)

    def get(some: np.ndarray) -> list[Any]:
        lengths = nbytes[some].tolist()
        return obstore.get_ranges(
            store, name, starts=offsets[some].tolist(), lengths=lengths, coalesce=0
        )

    def groups() -> Iterator[np.ndarray]:
        while True:
            order = rng.permutation(offsets.size) if shuffled else np.arange(offsets.size)
            for first in range(0, order.size - batch + 1, batch):
                yield from np.array_split(order[first : first + batch], -(-batch // GROUP))

    with ThreadPoolExecutor(max(1, flights // GROUP)) as pool:
        made = groups()
        ahead = [pool.submit(get, some) for some in itertools.islice(made, 2 * flights // GROUP)]
        while True:
            done = 0
            while done < batch:
                found = ahead.pop(0).result()
                ahead.append(pool.submit(get, next(made)))
                for one in found:
                    row = np.frombuffer(one, np.uint8)
                    out[done, : row.size] = row
                    done += 1
            yield batch


def reads(bench: Bench, name: str, compression: Any) -> None:
    options = bench.options
    path = bench.folder / f"{name}.h5"
    write(path, options.rows, compression)
    where = places(path)
    for latency in options.latency:
        with serving(bench.folder, latency=latency) as server:
            for shuffled in (False, True):
                given = {
                    "hdf5_path": server.url(path.name),
                    "labels_field": None,
                    "shuffle": "full" if shuffled else False,
                    "batch_size": 32,
                    "device": "cpu",
                    "requests_in_flight": options.flights,
                    "fetch_bytes": 2 * options.flights * ROW_NBYTES,
                }
                alone = server.url(path.name), where, 32, options.flights
                with AsyncReader(**given) as ours:
                    ways: dict[str, Way] = {
                        "h5async": paced(reader_sizes(ours)),
                        "obstore": paced(bare(*alone, shuffled=shuffled)),
                    }
                    order = "shuffled" if shuffled else "in order"
                    what = f"{name}, {1000 * latency:.0f} ms, {order}"
                    bench.measure(what, ways, [Target("h5async", "obstore", 0.9)])


def raw(bench: Bench) -> None:
    reads(bench, "raw", None)


def zstd(bench: Bench) -> None:
    import hdf5plugin

    reads(bench, "zstd", dict(hdf5plugin.Zstd(clevel=1)))


CASES = {"raw": raw, "zstd": zstd}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--flights", type=int, default=32)
    parser.add_argument("--latency", type=float, nargs="*", default=[0.0, 0.02])
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--only", nargs="*", choices=CASES)
    parser.add_argument("--out", type=Path, nargs="?", const=RESULTS)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    if options.quick:
        options.rows, options.seconds, options.repeats = 200, 0.2, 1
    run_cases("bench_remote", CASES, options)


if __name__ == "__main__":
    main()
