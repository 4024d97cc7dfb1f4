"""Measures what opening costs: many files, many chunks, many datasets; against HDF5 and h5py.

Each case is measured in turns with its peer, in the same run, with warm caches; what counts is the
ratio of the medians.

- files: a reader over so many files of one dataset of 100 rows of 64 float32 (contiguous; and in 10
  chunks, behind gzip), until it is ready; against a loop that opens each with h5py and asks for the
  shape. "Again": with their saved index in a folder (`index_cache`).
- differing: the same of files of images and labels whose numbers of rows differ, and an attribute:
  contiguous, behind gzip, and in the format of `libver="latest"`; and of episodes of 200 to 400
  frames in groups, each frame a gzip chunk.
- unlike: 70 files that differ in their fill values, against 60 of them, too few for any to be
  noted as what others may be like; by file.
- many: the same of ten times as many files of 20 contiguous rows.
- imports: a process that imports NumPy, h5py and h5async; that imports `AsyncReader`, too; and that
  reads a batch; against one that imports NumPy and h5py.
- chunks: a reader over one dataset of so many chunks, for each kind of chunk index, until it is
  ready; against HDF5's own H5Dchunk_iter with a compiled visitor that writes four numbers a chunk,
  and nothing else (the file is opened with h5py; only the visit is timed).
- groups: the layouts of so many groups of six datasets in one file (`read_layouts`, and the listing
  of `h5async inspect`); against a walk with h5py that asks each dataset for its shape.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from bench_common import RESULTS, header, save
from rich.console import Console

from h5async import AsyncReader
from h5async.config import Field
from h5async.index.metadata import list_layouts, read_layouts

Work = Callable[[], float]  # does some work; returns the seconds that count

VISITOR = """
#include <stdint.h>
typedef struct { int64_t count, *number; } Columns;
typedef int (*Visitor)(const uint64_t *, unsigned, uint64_t, uint64_t, void *);
static int visit(const uint64_t *corner, unsigned mask, uint64_t at, uint64_t nbytes, void *data)
{
    Columns *c = data;
    int64_t *row = c->number + 4 * c->count++;
    row[0] = (int64_t)corner[0], row[1] = (int64_t)at, row[2] = (int64_t)nbytes, row[3] = mask;
    return 0;
}
int64_t visit_all(int (*iterate)(int64_t, int64_t, Visitor, void *), int64_t dataset, void *columns)
{
    return iterate(dataset, 0, visit, columns);
}
"""
INDICES = {
    "B-tree, version 1": {"libver": "earliest"},
    "B-tree, version 1, gzip": {"libver": "earliest", "compression": "gzip"},
    "fixed array": {"libver": "latest"},
    "extensible array": {"libver": "latest", "maxshape": (None, 8)},
    "B-tree, version 2": {"libver": "latest", "maxshape": (None, None)},
}


class Bench:
    """The folder with the files, and the points that were measured."""

    def __init__(self, options: argparse.Namespace, folder: Path, console: Console) -> None:
        self.options = options
        self.folder = folder
        self.console = console
        self.points: list[dict[str, Any]] = []

    def compare(self, case: str, what: str, count: int, ours: Work, peer: Work) -> None:
        """Measure two ways in turns, and note the ratio of their times."""
        times: tuple[list[float], list[float]] = ([], [])
        ours(), peer()
        for _ in range(self.options.repeats):
            for work, found in zip((ours, peer), times, strict=True):
                found.append(work())
        mine, theirs = map(statistics.median, times)
        point = {"case": case, "what": what, "count": count, "ratio": mine / theirs}
        self.points.append({**point, "seconds": mine, "peer_seconds": theirs})
        line = f"{case:9} {what:42} {count:>9,} {mine:8.3f} s {theirs:8.3f} s {mine / theirs:6.2f}"
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)


def seconds(work: Callable[[], Any]) -> Work:
    def timed() -> float:
        begin = time.perf_counter()
        work()
        return time.perf_counter() - begin

    return timed


def opened(paths: Any, index_cache: bool | Path = False, **fields: str) -> Work:
    """Return what makes a reader, and closes it after the clock has stopped."""

    def timed() -> float:
        begin = time.perf_counter()
        how = {"labels_field": None, **fields}
        reader = AsyncReader(hdf5_path=paths, device="cpu", index_cache=index_cache, **how)
        taken = time.perf_counter() - begin
        reader.close()
        return taken

    return timed


def shapes(paths: list[Path], *names: str) -> Work:
    """Return a loop that opens each file with h5py and asks datasets for their shapes."""

    def loop() -> None:
        for path in paths:
            with h5py.File(path) as file:
                for name in names:
                    _ = file[name].shape

    return seconds(loop)


def files(bench: Bench) -> None:
    of_files(bench, "files", "contiguous", bench.options.files, 100)
    how = {"chunks": (10, 64), "compression": "gzip"}
    of_files(bench, "files", "gzip", bench.options.files, 100, **how)


def many(bench: Bench) -> None:
    of_files(bench, "many", "contiguous", 10 * bench.options.files, 20)


def differing(bench: Bench) -> None:
    gzip = {"chunks": (16, 64), "compression": "gzip", "shuffle": True}
    for what, libver, (least, most), how in (
        ("contiguous", None, (50, 150), {}),
        ("gzip", None, (50, 150), gzip),
        ("contiguous, latest", "latest", (50, 150), {}),
        ("gzip, latest", "latest", (50, 150), gzip),
        ("episodes", None, (200, 400), gzip | {"chunks": (1, 64)}),
    ):
        rng, paths = np.random.default_rng(0), []
        for number in range(bench.options.files):
            rows = int(rng.integers(least, most))
            paths.append(bench.folder / f"differing-{what}{number:05d}.h5")
            with h5py.File(paths[-1], "w", libver=libver) as file:
                file.attrs["episode"] = number
                images = rng.integers(0, 99, (rows, 64), dtype=np.uint8)
                file.create_dataset("observations/images", data=images, **how)
                file["observations/positions"] = rng.random((rows, 14))
                file["actions"] = rng.random((rows, 14))
        names = {"data_field": "observations/images", "labels_field": "actions"}
        peer = shapes(paths, *names.values())
        bench.compare("differing", what, len(paths), opened(paths, **names), peer)


def unlike(bench: Bench) -> None:
    paths = [bench.folder / f"unlike{number:03d}.h5" for number in range(70)]
    for number, path in enumerate(paths):
        with h5py.File(path, "w") as file:
            file.create_dataset("data", (100, 64), "f4", fillvalue=number + 1)[:] = 0
    fewer = opened(paths[:60])
    bench.compare("unlike", "by file", 70, opened(paths), lambda: fewer() * 70 / 60)


def of_files(bench: Bench, case: str, what: str, count: int, rows: int, **how: Any) -> None:
    values = np.random.default_rng(0).standard_normal((rows, 64)).astype("f4")
    paths = []
    for number in range(count):
        paths.append(bench.folder / f"{case}-{what}{number:05d}.h5")
        with h5py.File(paths[-1], "w") as file:
            file.create_dataset("data", data=values, **how)

    peer = shapes(paths, "data")
    bench.compare(case, what, len(paths), opened(paths), peer)
    bench.compare(case, f"{what}, again", len(paths), opened(paths, bench.folder), peer)


def imports(bench: Bench) -> None:
    path = bench.folder / "one.h5"
    with h5py.File(path, "w") as file:
        file["data"] = np.zeros((64, 64), "f4")

    def process(code: str = "") -> Work:
        command = [sys.executable, "-c", f"import numpy, h5py\n{code}"]
        return seconds(lambda: subprocess.run(command, check=True))

    reading = f"AsyncReader(hdf5_path={str(path)!r}, labels_field=None).get_next_batch()"
    name = "from h5async import AsyncReader"
    for what, code in {
        "import h5async": "import h5async",
        name: name,
        "the first batch": f"{name}\n{reading}",
    }.items():
        bench.compare("imports", what, 1, process(code), process())


def chunks(bench: Bench) -> None:
    source, library = bench.folder / "visitor.c", bench.folder / "visitor.so"
    source.write_text(VISITOR)
    subprocess.run(["cc", "-O3", "-shared", "-fPIC", "-o", library, source], check=True)
    visit_all = ctypes.CDLL(str(library)).visit_all
    visit_all.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p]
    iterate = ctypes.cast(ctypes.CDLL(h5py.h5p.__file__).H5Dchunk_iter, ctypes.c_void_p)
    count = bench.options.chunks
    for what, how in INDICES.items():
        path = bench.folder / f"{what}.h5"
        encoded = zlib.compress(bytes(8)) if "compression" in how else bytes(8)
        how = dict(how)
        with h5py.File(path, "w", libver=how.pop("libver")) as file:
            data = file.create_dataset("data", (count, 8), "u1", chunks=(1, 8), **how)
            for number in range(count):
                data.id.write_direct_chunk((number, 0), encoded)

        def visit(path: Path = path) -> float:
            columns = np.empty((count, 4), np.int64)
            pointers = np.array([0, columns.ctypes.data], np.int64)
            with h5py.File(path) as file:
                data = file["data"]
                begin = time.perf_counter()
                with h5py._objects.phil:
                    status = visit_all(iterate, data.id.id, pointers.ctypes.data)
                taken = time.perf_counter() - begin
            if status or pointers[0] != count:
                raise AssertionError("HDF5 has not visited all chunks")
            return taken

        bench.compare("chunks", what, count, opened(path), visit)
        path.unlink()


def groups(bench: Bench) -> None:
    path, count = bench.folder / "groups.h5", bench.options.groups
    rng = np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        for number in range(count):
            for name in "abcdef":
                file[f"demo_{number}/{name}"] = rng.random((20, 4), "f4")
    fields = {
        f"{n}/{name}": Field(path=f"demo_{n}/{name}") for n in range(count) for name in "abcdef"
    }

    def walk() -> None:
        with h5py.File(path) as file:
            for group in file.values():
                for dataset in group.values():
                    _ = dataset.shape

    def listing() -> None:
        for _ in list_layouts(path, with_attributes=True):
            pass

    peer = seconds(walk)
    bench.compare("groups", "layouts", count, seconds(lambda: read_layouts(path, fields)), peer)
    bench.compare("groups", "listing", count, seconds(listing), peer)


RUNS = files, differing, unlike, many, imports, chunks, groups
CASES = {function.__name__: function for function in RUNS}


def plot(points: list[dict[str, Any]], path: Path) -> None:
    """Draw the ratios as bars."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panel = plt.subplots(figsize=(8, 0.45 * len(points) + 1), layout="constrained")
    names = [f"{p['count']:,} {p['case']}: {p['what']}" for p in points]
    bars = panel.barh(names[::-1], [p["ratio"] for p in points][::-1], color="tab:blue")
    panel.bar_label(bars, fmt="%.2f", padding=3)
    panel.axvline(1, color="black", lw=0.8)
    panel.set_xlabel("time to open, of the peer's")
    panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--files", type=int, default=1000)
    parser.add_argument("--chunks", type=int, default=1_000_000)
    parser.add_argument("--groups", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=7, help="rounds")
    parser.add_argument("--only", nargs="*", choices=list(CASES), help="cases; default: all")
    parser.add_argument("--quick", action="store_true", help="few and small: no figures to quote")
    parser.add_argument("--out", type=Path, help="folder for the results; default: scripts/results")
    options = parser.parse_args()
    if options.quick:
        options.files, options.chunks, options.groups, options.repeats = 20, 1000, 20, 2
    elif options.out is None and not options.only:
        options.out = RESULTS
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(options, Path(folder), Console())
        for name in options.only or CASES:
            CASES[name](bench)
    if options.out is not None:
        save({**header(), "points": bench.points}, options.out / "bench_opening.json")
        plot(bench.points, options.out / "bench_opening.png")


if __name__ == "__main__":
    main()
