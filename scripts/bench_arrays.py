"""Measures selections of open_file, and the engine of xarray, beside others.

    .venv/bin/python scripts/bench_arrays.py

Selections of each size are read at random places, of a dataset without chunks and of one behind
gzip, by one caller; h5async may use two threads. "once" are many small datasets, each read once,
and "opened" such that are not read. Files are in the page cache. It needs the extras `bench` and
`xarray`, and dask.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from bench_turns import Bench, Target, paced, run_chosen

import h5async

ROWS, ROW = 2000, (128, 100)  # float32: 51 kB a row, 102 MB in all
SMALL_ROWS = 100_000  # of 64 bytes, in chunks of 4 kB
THREADS = 2
SIZES = {
    "4 kB": (1, slice(0, 10)),
    "51 kB": (1, slice(None)),
    "512 kB": (10, slice(None)),
    "5 MB": (100, slice(None)),
    "100 MB": (ROWS, slice(None)),
}
# Of h5py: at each size, and of large selections.
LEAST, LEAST_LARGE = 0.9, {"plain": 1.0, "gzip": 1.8}


def file_of(bench: Bench) -> Path:
    """Make the file once."""
    path = bench.folder / "arrays.h5"
    if not path.exists():
        values = np.random.default_rng(0).integers(0, 1000, (ROWS, *ROW)).astype("f4")
        with h5py.File(path, "w") as file:
            file.create_dataset("plain", data=values)
            chunked = {"chunks": (16, *ROW), "compression": "gzip", "compression_opts": 4}
            file.create_dataset("gzip", data=values, **chunked)
    return path


def selections(read: Callable[[Any], Any], rows: int, part: slice) -> Iterator[int]:
    """Read at random places; each step is a selection, or some of them if they are small."""
    rng = np.random.default_rng(1)
    count = max(1, 20 // rows)
    while True:
        for first in rng.integers(0, ROWS - rows + 1, count).tolist():
            found = read((slice(first, first + rows), part))
        assert found.size % rows == 0
        yield count


def sizes(bench: Bench, stored: str) -> None:
    """Compare all sizes of one storage."""
    path = file_of(bench)
    peers = {"h5py": h5py.File(path)[stored].__getitem__}
    peers["h5async"] = h5async.open_file(path, num_threads=THREADS)[stored].__getitem__
    by_pyfive = importlib.import_module("pyfive").File(path)[stored]
    # (It maps datasets without chunks, and reads nothing before it is used.)
    peers["pyfive"] = lambda key: by_pyfive[key].copy() if stored == "plain" else by_pyfive[key]
    if stored == "gzip":  # it reads chunks alone
        index = importlib.import_module("hidefix").Index(str(path))
        peers["hidefix"] = index.dataset(stored).__getitem__
    for size, (rows, part) in SIZES.items():
        ways = {name: paced(selections(read, rows, part)) for name, read in peers.items()}
        least = LEAST_LARGE[stored] if rows >= 100 else LEAST
        targets = [Target("h5async", "h5py", least), Target("h5async", "pyfive", 1.0)]
        if "hidefix" in ways:
            targets.append(Target("h5async", "hidefix", 1.0))
        bench.measure(f"{stored}, {size}", ways, targets)


def once(bench: Bench, stored: str) -> None:
    """Compare many small datasets of one size, each opened and read once in a turn of all."""
    sizes = {"text": (1, 100, 2000), "opened": (1_000,)}.get(stored, (1_000, 13_000, 128_000))
    for size in sizes:
        path = bench.folder / f"{stored}{size}.h5"
        values: Any = np.random.default_rng(size).integers(0, 1000, size).astype("f4")
        unit = f"{size * 4 // 1000} kB"
        if stored == "text":
            values, unit = texts(size), f"{size} strings"
        with h5py.File(path, "w") as file:
            for number in range(200):
                is_gzip = stored in ("gzip", "opened")
                how = {"chunks": True, "compression": "gzip"} if is_gzip else {}
                file.create_dataset(f"group/{number}", data=values, **how)

        def all_of(open_file: Callable[[Path], Any], path: Path = path) -> Iterator[int]:
            while True:
                with open_file(path) as file:
                    for number in range(200):
                        found = file[f"group/{number}"]
                        if stored != "opened":
                            found[()]
                        yield 1

        ways = {"h5py": paced(all_of(h5py.File)), "h5async": paced(all_of(opened))}
        target = Target("h5async", "h5py", LEAST)
        bench.measure(f"{stored}, each once, {unit}", ways, [target])


def texts(count: int) -> list[str]:
    """Return strings of different lengths."""
    return ["x" * n for n in np.random.default_rng(3).integers(3, 60, count).tolist()]


def opened(path: Path) -> Any:
    """Open a file for two threads."""
    return h5async.open_file(path, num_threads=THREADS)


def others(bench: Bench) -> None:
    """Compare strings, rows of a virtual dataset, small chunks, and chunks that are decoded."""
    path = bench.folder / "others.h5"
    source = file_of(bench)
    layout = h5py.VirtualLayout((2 * ROWS, *ROW), "f4")
    for number, name in enumerate(("plain", "gzip")):
        part = slice(number * ROWS, (number + 1) * ROWS)
        layout[part] = h5py.VirtualSource(source, name, (ROWS, *ROW))
    with h5py.File(path, "w") as file:
        file["text"] = texts(ROWS)
        file.create_virtual_dataset("virtual", layout)
        how = {"chunks": (16, *ROW), "compression": "gzip"}
        file.create_dataset("decoded", data=np.ones((16, *ROW), "f4"), **how)
        small = np.random.default_rng(5).integers(0, 1000, (SMALL_ROWS, 16)).astype("i4")
        file.create_dataset("4 kB chunks", data=small, chunks=(64, 16), compression="gzip")
        file.create_dataset("text gzip", data=texts(SMALL_ROWS), chunks=(500,), compression="gzip")
    for name, rows, count in (
        ("text", ROWS, 1),
        ("text", ROWS, 100),
        ("text", ROWS, ROWS),
        ("text gzip", SMALL_ROWS, 1),
        ("text gzip", SMALL_ROWS, 5_000),
        ("4 kB chunks", SMALL_ROWS, 1),
        ("4 kB chunks", SMALL_ROWS, 8),
        ("4 kB chunks", SMALL_ROWS, 500),
        ("4 kB chunks", SMALL_ROWS, SMALL_ROWS),
        ("virtual", ROWS, 1),
        ("decoded", 16, 8),
        ("decoded", 16, 16),
    ):
        with h5py.File(path) as by_h5py, opened(path) as by_h5async:

            def some(data: Any, rows: int = rows, count: int = count) -> Iterator[int]:
                rng = np.random.default_rng(4)
                while True:
                    for first in rng.integers(0, rows - count + 1, 20).tolist():
                        data[first if count == 1 else slice(first, first + count)]
                    yield 20

            several = {"h5py": by_h5py[name], "h5async": by_h5async[name]}
            ways = {way: paced(some(data)) for way, data in several.items()}
            bench.measure(f"{name}, {count}", ways, [Target("h5async", "h5py", LEAST)])


def means(bench: Bench) -> None:
    """Compare the mean along the time, by the threads of dask, of netCDF-4 behind gzip."""
    xarray = importlib.import_module("xarray")
    path = bench.folder / "weather.nc"
    rng = np.random.default_rng(2)
    shape = 500, 180, 200
    values = (280 + rng.integers(-999, 999, shape) / 100).astype("f4")
    weather = xarray.Dataset({"t2m": (("time", "lat", "lon"), values)})
    encoding = {"t2m": {"zlib": True, "complevel": 4, "chunksizes": (10, 180, 200)}}
    weather.to_netcdf(path, engine="h5netcdf", encoding=encoding)

    def computed(engine: str) -> Iterator[int]:
        opened = xarray.open_dataset(path, engine=engine, chunks={})
        while True:
            found = opened.mean("time").compute(scheduler="threads", num_workers=THREADS)
            assert found.t2m.shape == shape[1:]
            yield 1

    ways = {name: paced(computed(name)) for name in ("h5netcdf", "h5async", "hidefix")}
    targets = [Target("h5async", "h5netcdf", 2.0), Target("h5async", "hidefix", 1.0)]
    bench.measure("xarray, mean of time", ways, targets)


CASES = {
    "plain": functools.partial(sizes, stored="plain"),
    "gzip": functools.partial(sizes, stored="gzip"),
    "once": functools.partial(once, stored="plain"),
    "once gzip": functools.partial(once, stored="gzip"),
    "once text": functools.partial(once, stored="text"),
    "opened": functools.partial(once, stored="opened"),
    "others": others,
    "xarray": means,
}


if __name__ == "__main__":
    run_chosen("bench_arrays", __doc__, CASES, 0.5)
