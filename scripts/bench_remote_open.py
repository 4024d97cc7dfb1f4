"""Count what opening HDF5 files behind a web server costs: rounds, requests, bytes, seconds.

    python scripts/bench_remote_open.py

The server of the tests (`tests/io/httpserver.py`) serves files on the loopback, at once and with
20 ms more a request. A round is a call that fetches: opening a source is one, and every call of
`Source.get_ranges` while HDF5 reads. Requests and bytes are those that the server logged. Beside
h5async, without an index and by a saved one: the same for a local file, and h5py, which opens the
same datasets and visits their chunks, through a plain file object that keeps blocks. Chunks have
150 kB, and are never written.
"""

from __future__ import annotations

import argparse
import io
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from bench_common import RESULTS, header, save

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "io"))
from httpserver import Server, serving

from h5async import ReaderConfig
from h5async.cli import app
from h5async.io.objectstores import RemoteSource, RemoteStore
from h5async.opening.dataset import open_dataset

ROW = (224, 224, 3)
BLOCK_NBYTES = 1 << 16  # of the plain file object
LATENCIES = (0.0, 0.02)


# --- files ---------------------------------------------------------------------------------------


def write_chunks(path: Path, count: int, *, grows: bool = False, **of_file: Any) -> None:
    """Write a dataset of so many chunks that were allocated, and never written."""
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_chunk((1, *ROW))
    properties.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    properties.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    most = (h5py.h5s.UNLIMITED, *ROW) if grows else None
    with h5py.File(path, "w", **of_file) as file:
        space = h5py.h5s.create_simple((count, *ROW), most)
        h5py.h5d.create(file.id, b"data", h5py.h5t.NATIVE_UINT8, space, properties)
        file["labels"] = np.arange(count)


def write_rows(path: Path, count: int) -> None:
    """Write a dataset of so many small chunks, whose index is a fixed array."""
    with h5py.File(path, "w", libver="latest") as file:
        data = file.create_dataset("data", (count, 512), "u1", chunks=(1, 512))
        for number in range(count):
            data.id.write_direct_chunk((number, 0), bytes(512))
        file["labels"] = np.arange(count)


def write_groups(path: Path, count: int, **of_file: Any) -> None:
    """Write so many groups of six small datasets."""
    with h5py.File(path, "w", **of_file) as file:
        for group in range(count):
            for name in ("data", "labels", "a", "b", "c", "d"):
                values = np.full((20, 5), group, "f4")
                file.create_dataset(f"demo_{group:05}/{name}", data=values, chunks=(20, 5))


def write_objects(folder: Path, count: int) -> None:
    """Write so many files of 100 rows."""
    folder.mkdir()
    for number in range(count):
        with h5py.File(folder / f"{number:05}.h5", "w") as file:
            values = np.full((100, 256), number, "f4")
            file.create_dataset("data", data=values, chunks=(10, 256))
            file["labels"] = np.arange(100)


# --- ways ----------------------------------------------------------------------------------------


class Blocks(io.RawIOBase):
    """A file object over a URL that fetches blocks one by one, and keeps them."""

    def __init__(self, url: str) -> None:
        self.url, self.at, self.blocks = url, 0, dict[int, bytes]()
        request = urllib.request.Request(url, method="HEAD")
        with urllib.request.urlopen(request) as answer:
            self.nbytes = int(answer.headers["Content-Length"])

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to an offset."""
        self.at = offset + (0, self.at, self.nbytes)[whence]
        return self.at

    def readinto(self, into: memoryview) -> int:  # type: ignore[override]
        """Read what fits into some memory."""
        memory = memoryview(into).cast("B")
        end = min(self.at + memory.nbytes, self.nbytes)
        numbers = range(self.at // BLOCK_NBYTES, -(-end // BLOCK_NBYTES))
        data = b"".join(map(self.block, numbers))
        begin = self.at - numbers.start * BLOCK_NBYTES
        memory[: end - self.at] = data[begin : begin + end - self.at]
        self.at, begin = end, self.at
        return end - begin

    def block(self, number: int) -> bytes:
        """Return a block."""
        if number not in self.blocks:
            last = min((number + 1) * BLOCK_NBYTES, self.nbytes) - 1
            headers = {"Range": f"bytes={number * BLOCK_NBYTES}-{last}"}
            with urllib.request.urlopen(
                urllib.request.Request(self.url, headers=headers)
            ) as answer:
                self.blocks[number] = answer.read()
        return self.blocks[number]


def by_h5py(urls: list[str], groups: str | None) -> None:
    """Open the datasets, and visit their chunks."""
    for url in urls:
        with h5py.File(Blocks(url), "r") as file:
            names = [""] if groups is None else [f"{name}/" for name in file]
            for name in names:
                for field in ("data", "labels"):
                    if file[name + field].chunks:
                        file[name + field].id.chunk_iter(lambda info: None)


def by_h5async(urls: list[str], groups: str | None) -> None:
    """Open them as a reader does."""
    sequences = None if groups is None else {"groups": groups}
    options = {"hdf5_path": urls, "sequences": sequences, "index_cache": False}
    open_dataset(ReaderConfig.load(options))


def save_index(urls: list[str], groups: str | None, path: Path) -> None:
    """Save the index of files."""
    more = [] if groups is None else ["--sequences", f"{{groups = '{groups}'}}"]
    app(["index", *urls, "-o", str(path), *more], standalone_mode=False)


# --- measuring -----------------------------------------------------------------------------------


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """Count the rounds of what runs in here."""
    found = {"rounds": 0}

    def counting(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            found["rounds"] += 1
            return function(*args)

        return call

    get_ranges, open_source = RemoteSource.get_ranges, RemoteStore.open
    RemoteSource.get_ranges = counting(get_ranges)  # type: ignore[method-assign]
    RemoteStore.open = counting(open_source)  # type: ignore[method-assign]
    try:
        yield found
    finally:
        RemoteSource.get_ranges = get_ranges  # type: ignore[method-assign]
        RemoteStore.open = open_source  # type: ignore[method-assign]


def measure(server: Server, run: Callable[[], None], repeats: int) -> dict[str, Any]:
    """Return what a way costs, at each latency; seconds of all repeats."""
    result: dict[str, Any] = {}
    for latency in LATENCIES:
        server.delay(latency)
        seconds = []
        for _ in range(repeats):
            server.log()
            with counted() as found:
                begin = time.perf_counter()
                run()
                seconds.append(round(time.perf_counter() - begin, 4))
            log = server.log()
        result[f"{latency * 1000:.0f} ms"] = {
            "seconds": seconds,
            "requests": log.count,
            "megabytes": round(log.nbytes / 1e6, 3),
            "at_once": log.at_once,
            **found,
        }
    server.delay(0.0)
    return result


def main() -> int:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--chunks", type=int, default=100_000)
    parser.add_argument("--groups", type=int, default=2_000)
    parser.add_argument("--objects", type=int, default=1_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="*", help="names of cases; default: all")
    parser.add_argument("--quick", action="store_true", help="small: no figures to quote")
    parser.add_argument("--out", type=Path, help="folder of the results; default: scripts/results")
    options = parser.parse_args()
    if options.quick:
        options.chunks, options.groups, options.objects, options.repeats = 5000, 50, 50, 1
    chunks = f"{options.chunks:,} chunks"
    cases: dict[str, tuple[Callable[[Path], None], str | None]] = {
        f"{chunks}, default": (lambda at: write_chunks(at, options.chunks), None),
        f"{chunks} of 512 bytes, latest": (lambda at: write_rows(at, options.chunks), None),
        f"{chunks}, latest, unlimited": (
            lambda at: write_chunks(at, options.chunks, libver="latest", grows=True),
            None,
        ),
        f"{chunks}, pages of 4 MiB": (
            lambda at: write_chunks(at, options.chunks, fs_strategy="page", fs_page_size=4 << 20),
            None,
        ),
        f"{options.groups:,} groups, default": (
            lambda at: write_groups(at, options.groups),
            "demo_*",
        ),
        f"{options.groups:,} groups, latest": (
            lambda at: write_groups(at, options.groups, libver="latest"),
            "demo_*",
        ),
        f"{options.objects:,} objects": (lambda at: write_objects(at, options.objects), None),
    }
    result: dict[str, Any] = {**header(), "block_nbytes": BLOCK_NBYTES, "cases": {}}
    for name, (write, groups) in cases.items():
        if options.only and not any(one in name for one in options.only):
            continue
        with tempfile.TemporaryDirectory() as folder, serving(folder) as server:
            place = Path(folder, "data.h5")
            write(place)
            files = sorted(place.iterdir()) if place.is_dir() else [place]
            urls = [server.url(file.relative_to(folder).as_posix()) for file in files]
            index = Path(folder, "data.h5idx")
            save_index(urls, groups, index)
            ways: dict[str, tuple[Callable[[], None], int]] = {
                "h5async": (lambda u=urls, g=groups: by_h5async(u, g), options.repeats),
                "h5async, saved index": (
                    lambda i=index, g=groups: by_h5async([str(i)], g),
                    options.repeats,
                ),
                "h5async, local file": (
                    lambda f=files, g=groups: by_h5async(list(map(str, f)), g),
                    options.repeats,
                ),
                "h5py": (lambda u=urls, g=groups: by_h5py(u, g), 1),
            }
            result["cases"][name] = found = {}
            for way, (run, repeats) in ways.items():
                found[way] = measure(server, run, repeats)
                print(f"{name}: {way}: {found[way]}", flush=True)
    if options.out is not None or not (options.quick or options.only):
        out = options.out or RESULTS
        save(result, out / "bench_remote_open.json")
        draw(result, out / "bench_remote_open.png")
    return 0


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw the seconds at 20 ms."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    cases = result["cases"]
    ways = list(next(iter(cases.values())))
    figure, axes = plt.subplots(figsize=(8, 0.8 * len(cases) + 1.2), layout="constrained")
    height = 0.8 / len(ways)
    for number, way in enumerate(ways):
        seconds = [min(of_case[way]["20 ms"]["seconds"]) for of_case in cases.values()]
        at = np.arange(len(cases)) + (number - (len(ways) - 1) / 2) * height
        bars = axes.barh(at, seconds, height, label=way)
        axes.bar_label(bars, [f"{value:.2g} s" for value in seconds], padding=3, fontsize=8)
    axes.set_yticks(range(len(cases)), list(cases))
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel("seconds to open, at 20 ms a request")
    axes.legend()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    sys.exit(main())
