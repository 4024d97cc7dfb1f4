"""Measures what a sample costs as files, fields, batches and rows grow, against h5py and one file.

Each curve varies one number, and each of its points is a ratio of samples per second: the reader's
by that of a peer, measured in turns in the same run (medians). Where the cost of a batch grows with
its samples alone, a curve is flat.

- files: rows of 64 float32 behind gzip, chunks of 10 rows, in so many files; against the same rows
  in one file, and against `ds[i]` (shuffled) or slices (in order) over h5py files kept open.
- labels: the same with a contiguous int64 for each row, in a dataset beside them; against one file.
- many: 200,000 contiguous rows in 10,000 files; against the same rows in 1,000 files.
- virtual: the same files as the sources of a virtual dataset, against one file.
- fields: so many datasets of (200000, 4) float32; against h5py slices, in order.
- batch: batches of so many rows of 64 float32, contiguous; against h5py slices (in order) and
  `np.take` of an array in memory (shuffled).
- row: rows of so many bytes, contiguous, batches of 256; the same.
- split: a virtual dataset of one file's rows, a tenth of them left out; window shuffle against the
  file itself.
- one: batches of one 150 kB sample, shuffled, against `ds[i]`.
- take: 1,000,000 x 28 float32, batches of 4,096, shuffled, against `np.take` in memory.
- tiny: so many rows of 16 bytes, contiguous, batches of 4,096; window against full shuffle, and
  that against in order; up to 100,000,000 rows (1.6 GB).
- mixed: rows of 16 bytes in gzip chunks of 1,000, in a window of so many bytes; against a full
  shuffle of the same rows without chunks.
- threads: rows of 16 bytes, full shuffle, batches of 4,096, so many threads; against two.
- chunks: bytes that a reader takes for each of so many chunks (not a ratio).
- images: batches of 256 small images, two threads against one.
- consumer: processor time that `get_next_batch()` and `fetch_data()` take of a loop of so many
  milliseconds of other Python a step, against 70 trivial calls there (times, not speeds).

The page cache holds all files. What is delivered is compared with h5py once for each point.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import mmap
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from bench_common import CORES, RESULTS, header, save
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from h5async import AsyncReader

Step = Callable[[], int]  # does some work; returns how many samples that were
FILE_ROWS, CHUNK_ROWS, COLUMNS = 100, 10, 64
MOST_OPEN = 500  # h5py files
READY = 3  # batches that a reader may have made ready while the peer was measured; not counted
WARM_SAMPLES = 100_000  # are read before many files are measured: all are open then


class Bench:
    """Files, and the points that were measured."""

    def __init__(self, options: argparse.Namespace, folder: Path, console: Console) -> None:
        self.options = options
        self.folder = folder
        self.console = console
        self.points: list[dict[str, Any]] = []

    def compare(self, curve: str, at: float, what: str, ours: Step, peer: Step) -> None:
        """Measure two ways in turns, and note the ratio of their samples per second."""
        counts = [self._times(step) for step in (ours, peer)]
        speeds: tuple[list[float], list[float]] = ([], [])
        for _ in range(self.options.repeats):
            for step, times, found in zip((ours, peer), counts, speeds, strict=True):
                for _ in range(READY):
                    step()
                begin = time.perf_counter()
                samples = sum(step() for _ in range(times))
                found.append(samples / (time.perf_counter() - begin))
        mine, theirs = map(statistics.median, speeds)
        self.note(curve, at, what, mine / theirs, samples_per_second=mine, peer=theirs)

    def note(self, curve: str, at: float, what: str, figure: float, **more: float) -> None:
        """Note a figure of a curve, and show it."""
        self.points.append({"curve": curve, "at": at, "what": what, "ratio": figure, **more})
        line = f"{curve:9} {at:>7g}  {what:48} {figure:8.2f}"
        self.console.print(line, markup=False, highlight=False)

    def _times(self, step: Step) -> int:
        times = 1
        while True:
            begin = time.perf_counter()
            for _ in range(times):
                step()
            taken = time.perf_counter() - begin
            if taken > self.options.seconds / 4:
                return max(1, round(times * self.options.seconds / taken))
            times *= 2

    def sizes(self, *values: int) -> list[int]:
        """Return the values of a curve, fewer of them for a quick look."""
        return [n for n in values if n <= self.options.most] or [min(values)]

    @cached_property
    def files(self) -> list[Path]:
        """As many files as the largest curve needs; made when they are first needed."""
        count = max(self.sizes(1, 10, 100, 1000, 10_000))
        rng = np.random.default_rng(0)
        paths = []
        for number in range(count):
            path = self.folder / f"file{number:05d}.h5"
            with h5py.File(path, "w") as file:
                write_rows(file, rng.standard_normal((FILE_ROWS, COLUMNS)).astype("f4"))
                file["labels"] = np.arange(number * FILE_ROWS, (number + 1) * FILE_ROWS)
            paths.append(path)
        return paths

    def in_one(self, count: int) -> Path:
        """Return a file with the rows of the first `count` files."""
        path = self.folder / f"one{count}.h5"
        if not path.exists():
            parts = []
            for source in self.files[:count]:
                with h5py.File(source) as file:
                    parts.append(file["data"][:])
            with h5py.File(path, "w") as file:
                write_rows(file, np.concatenate(parts))
                file["labels"] = np.arange(count * FILE_ROWS)
        return path

    def virtual(self, count: int) -> Path:
        """Return a file with a virtual dataset of the first `count` files."""
        path = self.folder / f"virtual{count}.h5"
        if not path.exists():
            layout = h5py.VirtualLayout((count * FILE_ROWS, COLUMNS), "f4")
            for number, source in enumerate(self.files[:count]):
                here = slice(number * FILE_ROWS, (number + 1) * FILE_ROWS)
                layout[here] = h5py.VirtualSource(source.name, "data", (FILE_ROWS, COLUMNS))
            with h5py.File(path, "w") as file:
                file.create_virtual_dataset("data", layout)
        return path


def write_rows(file: h5py.File, rows: np.ndarray) -> None:
    chunks = (CHUNK_ROWS, *rows.shape[1:])
    file.create_dataset("data", data=rows, chunks=chunks, compression="gzip")


def stepper(reader: AsyncReader) -> Step:
    """Return what gives the next batch, epoch after epoch, as a training loop does."""

    def batches() -> Iterator[int]:
        while True:
            for batch in reader:
                yield batch.size

    return batches().__next__


def warmed(step: Step, samples: int) -> Step:
    """Do so many samples first."""
    while samples > 0:
        samples -= step()
    return step


def reader_of(path: Any, fields: dict[str, str] | None = None, **options: Any) -> AsyncReader:
    names = {"fields": fields} if fields else {"labels_field": None}
    return AsyncReader(hdf5_path=path, device="cpu", **names, **options)


def check(reader: AsyncReader, truth: Callable[[np.ndarray], np.ndarray]) -> None:
    for batch in itertools.islice(reader, 3):
        if not np.array_equal(batch[0], truth(batch.index)):
            raise AssertionError("a batch is not what h5py reads")


ORDERS = {"full": "full shuffle", "window": "window shuffle", False: "in order"}


def files(bench: Bench) -> None:
    for count in bench.sizes(1, 10, 100, 1000, 10_000):
        paths, one = bench.files[:count], bench.in_one(count)
        with h5py.File(one) as file:
            rows = file["data"][:]
        size = min(256, len(rows))
        for shuffle, order in ORDERS.items():
            options = {"batch_size": size, "shuffle": shuffle}
            with reader_of(paths, **options) as many, reader_of(one, **options) as single:
                check(many, lambda index, rows=rows: rows[index])
                warm = min(len(rows), WARM_SAMPLES)
                ours, peer = warmed(stepper(many), warm), warmed(stepper(single), warm)
                bench.compare("files", count, f"{order}, against one file", ours, peer)
                if shuffle != "window":
                    peer, close = h5py_files(paths[:MOST_OPEN], size, bool(shuffle))
                    bench.compare("files", count, f"{order}, against h5py files", ours, peer)
                    close()


def labels(bench: Bench) -> None:
    names = {"labels": "labels", "data": "data"}
    for count in bench.sizes(10, 100, 1000, 10_000):
        paths, one = bench.files[:count], bench.in_one(count)
        warm = min(count * FILE_ROWS, WARM_SAMPLES)
        for shuffle, order in ORDERS.items():
            options = {"batch_size": 256, "shuffle": shuffle}
            with (
                reader_of(paths, names, **options) as many,
                reader_of(one, names, **options) as single,
            ):
                check(many, lambda index: index)
                ours, peer = warmed(stepper(many), warm), warmed(stepper(single), warm)
                bench.compare("labels", count, f"{order}, against one file", ours, peer)


def many(bench: Bench) -> None:
    count, rows = bench.sizes(100, 10_000)[-1], np.random.default_rng(0).random((20, COLUMNS), "f4")
    paths: dict[int, list[Path]] = {1: [], 10: []}
    for times, several in paths.items():
        for number in range(count // times):
            several.append(bench.folder / f"many{times}-{number:05d}.h5")
            with h5py.File(several[-1], "w") as file:
                file["data"] = np.tile(rows, (times, 1))
    for shuffle, order in ORDERS.items():
        options = {"batch_size": 256, "shuffle": shuffle}
        with reader_of(paths[1], **options) as ours, reader_of(paths[10], **options) as peer:
            check(ours, lambda index: rows[index % len(rows)])
            steps = (warmed(stepper(one), 20 * count) for one in (ours, peer))
            bench.compare("many", count, f"{order}, against a tenth of the files", *steps)


def h5py_files(paths: list[Path], size: int, shuffled: bool) -> tuple[Step, Callable[[], None]]:
    """Return batches of samples read one by one, or of slices, from files that are kept open."""
    opened = [h5py.File(path) for path in paths]
    datasets = [file["data"] for file in opened]
    batch = np.empty((size, COLUMNS), "f4")
    rng = np.random.default_rng(1)
    position = itertools.count(0, size)

    def one_by_one() -> int:
        for j, i in enumerate(rng.integers(0, len(datasets) * FILE_ROWS, size).tolist()):
            batch[j] = datasets[i // FILE_ROWS][i % FILE_ROWS]
        return size

    def slices() -> int:
        begin, done = next(position) % (len(datasets) * FILE_ROWS), 0
        while done < size:
            number, row = divmod((begin + done) % (len(datasets) * FILE_ROWS), FILE_ROWS)
            count = min(size - done, FILE_ROWS - row)
            batch[done : done + count] = datasets[number][row : row + count]
            done += count
        return size

    def close() -> None:
        for file in opened:
            file.close()

    return (one_by_one if shuffled else slices), close


def virtual(bench: Bench) -> None:
    for count in bench.sizes(10, 100, 1000):
        path, one = bench.virtual(count), bench.in_one(count)
        with h5py.File(one) as file:
            rows = file["data"][:]
        for shuffle, order in ORDERS.items():
            options = {"batch_size": 256, "shuffle": shuffle}
            with reader_of(path, **options) as many, reader_of(one, **options) as single:
                check(many, lambda index, rows=rows: rows[index])
                ours, peer = warmed(stepper(many), len(rows)), warmed(stepper(single), len(rows))
                bench.compare("virtual", count, f"{order}, against one file", ours, peer)


def fields(bench: Bench) -> None:
    path, rows = bench.folder / "fields.h5", 200_000
    most = max(bench.sizes(1, 10, 40, 100))
    with h5py.File(path, "w") as file:
        for number in range(most):
            file[f"c{number}"] = np.random.default_rng(number).random((rows, 4), "f4")
    for count in bench.sizes(1, 10, 40, 100):
        names = {f"c{n}": f"c{n}" for n in range(count)}
        with h5py.File(path) as file:
            datasets = [file[name] for name in names]
            position = itertools.count(0, 256)

            def slices(datasets: Any = datasets, position: Any = position) -> int:
                begin = next(position) % (rows - 256)
                for dataset in datasets:
                    dataset[begin : begin + 256]
                return 256

            with (
                reader_of(path, names, batch_size=256) as ordered,
                reader_of(path, names, batch_size=256, shuffle="window") as window,
            ):
                first = datasets[0][:]
                check(ordered, lambda index, first=first: first[index])
                check(window, lambda index, first=first: first[index])
                ours = stepper(ordered)
                bench.compare("fields", count, "in order, against h5py slices", ours, slices)
                bench.compare("fields", count, "window, against in order", stepper(window), ours)


def taker(rows: np.ndarray, size: int) -> Step:
    """Return what takes random rows of an array; which ones, was drawn before."""
    rng, out = np.random.default_rng(1), np.empty((size, *rows.shape[1:]), rows.dtype)
    drawn = [rng.integers(0, len(rows), size) for _ in range(1 + (1 << 20) // size)]
    indices = itertools.cycle(drawn)

    def take() -> int:
        np.take(rows, next(indices), axis=0, out=out, mode="clip")
        return size

    return take


def plain(bench: Bench, curve: str, at: int, rows: np.ndarray, size: int) -> None:
    """Compare rows of one contiguous dataset, in order and shuffled."""
    path = bench.folder / f"{curve}{at}.h5"
    with h5py.File(path, "w") as file:
        file["data"] = rows
    out = np.empty((size, *rows.shape[1:]), rows.dtype)
    with h5py.File(path) as file:
        dataset, position = file["data"], itertools.count(0, size)

        def slices() -> int:
            begin = next(position) % max(1, len(rows) - size + 1)
            dataset.read_direct(out, np.s_[begin : begin + size])
            return size

        take = taker(rows, size)
        for shuffle, peer, name in ((False, slices, "h5py slices"), ("full", take, "np.take")):
            with reader_of(path, batch_size=size, shuffle=shuffle) as reader:
                check(reader, lambda index: rows[index])
                what = f"{ORDERS[shuffle]}, against {name}"
                bench.compare(curve, at, what, stepper(reader), peer)
    path.unlink()


def batch(bench: Bench) -> None:
    rows = np.random.default_rng(0).random((262_144, 64), "f4")
    for size in (1, 8, 64, 512, 4096, 65_536):
        plain(bench, "batch", size, rows, size)


def row(bench: Bench) -> None:
    for nbytes in (16, 256, 4096, 65_536, 1 << 20):
        count = max(512, min(1 << 20, (256 << 20) // nbytes))
        rows = np.random.default_rng(0).random((count, nbytes // 4), "f4")
        plain(bench, "row", nbytes, rows, 256)


def split(bench: Bench) -> None:
    count, path = 100, bench.folder / "split.h5"
    one = bench.in_one(min(count, len(bench.files)))
    with h5py.File(one) as file:
        rows = file["data"][:]
    kept = np.flatnonzero(np.random.default_rng(2).random(len(rows)) < 0.9)
    layout = h5py.VirtualLayout((kept.size, COLUMNS), "f4")
    source = h5py.VirtualSource(one.name, "data", rows.shape)
    edges = np.flatnonzero(np.diff(kept) != 1) + 1
    for run in np.split(np.arange(kept.size), edges):
        layout[run[0] : run[-1] + 1] = source[kept[run[0]] : kept[run[-1]] + 1]
    with h5py.File(path, "w") as file:
        file.create_virtual_dataset("data", layout)
    options = {"batch_size": 256, "shuffle": "window"}
    with reader_of(path, **options) as ours, reader_of(one, **options) as peer:
        check(ours, lambda index: rows[kept[index]])
        what = "window shuffle, against the file itself"
        bench.compare("split", len(rows), what, stepper(ours), stepper(peer))


def one(bench: Bench) -> None:
    rows = np.random.default_rng(0).integers(0, 256, (2000, 150_000), np.uint8)
    path = bench.folder / "large.h5"
    with h5py.File(path, "w") as file:
        file["data"] = rows
    rng = np.random.default_rng(1)
    with h5py.File(path) as file:
        dataset = file["data"]

        def single() -> int:
            dataset[int(rng.integers(len(rows)))]
            return 1

        with reader_of(path, batch_size=1, shuffle="full") as reader:
            check(reader, lambda index: rows[index])
            bench.compare("one", 1, "full shuffle, against ds[i]", stepper(reader), single)


def take(bench: Bench) -> None:
    rows = np.random.default_rng(0).random((1_000_000, 28), "f4")
    peer = taker(rows, 4096)
    for name, how in {"contiguous": {}, "chunked": {"chunks": (1000, 28)}}.items():
        path = bench.folder / f"{name}.h5"
        with h5py.File(path, "w") as file:
            file.create_dataset("data", data=rows, **how)
        for shuffle in ("full", "window"):
            with reader_of(path, batch_size=4096, shuffle=shuffle) as reader:
                check(reader, lambda index: rows[index])
                what = f"{name}, {ORDERS[shuffle]}, against np.take"
                bench.compare("take", 4096, what, stepper(reader), peer)


TINY = 16, 4096  # bytes of a row, rows of a batch


def write_tiny(path: Path, count: int, **storage: Any) -> Path:
    """Write rows of four int32, each of which holds its number."""
    with h5py.File(path, "w") as file:
        data = file.create_dataset("data", (count, 4), "i4", **storage)
        for begin in range(0, count, 1_000_000):
            rows = np.arange(begin, min(begin + 1_000_000, count), dtype="i4")
            data[begin : begin + len(rows)] = np.repeat(rows, 4).reshape(-1, 4)
    return path


def is_tiny(index: np.ndarray) -> np.ndarray:
    return np.repeat(index.astype("i4"), 4).reshape(-1, 4)


def tiny(bench: Bench) -> None:
    for count in bench.sizes(10_000, 100_000, 1_000_000, 10_000_000, 100_000_000):
        path, steps = write_tiny(bench.folder / "tiny.h5", count), {}
        with contextlib.ExitStack() as opened:
            for shuffle in ORDERS:
                reader = reader_of(path, batch_size=TINY[1], shuffle=shuffle)
                check(opened.enter_context(reader), is_tiny)
                steps[shuffle] = stepper(reader)
            for ours, peer in (("window", "full"), ("full", False)):
                what = f"{ORDERS[ours]}, against {ORDERS[peer]}"
                bench.compare("tiny", count, what, steps[ours], steps[peer])
        path.unlink()


def mixed(bench: Bench) -> None:
    count, storage = bench.sizes(100_000, 10_000_000)[-1], {"chunks": (1000, 4), "compression": 1}
    plain = write_tiny(bench.folder / "plain.h5", count)
    path = write_tiny(bench.folder / "mixed.h5", count, **storage)
    with reader_of(plain, batch_size=TINY[1], shuffle="full") as peer:
        for window in (1 << 20, 1 << 23, 1 << 26, 1 << 28):
            options = {"batch_size": TINY[1], "shuffle": "window", "window_bytes": window}
            with reader_of(path, **options) as ours:
                check(ours, is_tiny)
                what = "window shuffle, against full shuffle without chunks"
                bench.compare("mixed", window, what, stepper(ours), stepper(peer))


def threads(bench: Bench) -> None:
    path = write_tiny(bench.folder / "threads.h5", bench.sizes(100_000, 10_000_000)[-1])
    options = {"batch_size": TINY[1], "shuffle": "full"}
    with reader_of(path, num_threads=2, **options) as two:
        for count in (1, 4, 8, 16):
            with reader_of(path, num_threads=count, **options) as ours:
                what = f"full shuffle, {CORES} cores, against 2 threads"
                bench.compare("threads", count, what, stepper(ours), stepper(two))


def resident_nbytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def chunks(bench: Bench) -> None:
    for count in bench.sizes(1000, 10_000, 100_000):
        path = bench.folder / "chunks.h5"
        with h5py.File(path, "w") as file:
            data = file.create_dataset("data", (count, 4), "i4", chunks=(1, 4))
            for number in range(count):
                data.id.write_direct_chunk((number, 0), bytes(TINY[0]))
        before = resident_nbytes()
        with reader_of(path, batch_size=1) as reader:
            next(iter(reader))
            taken = resident_nbytes() - before
        bench.note("chunks", count, "bytes a chunk, once it is open", taken / count)
        path.unlink()


def images(bench: Bench) -> None:
    path = Path(__file__).resolve().parent.parent / "sample_data" / "patches.h5"
    options = {"batch_size": 256, "shuffle": "full"}
    with (
        reader_of(path, num_threads=2, **options) as two,
        reader_of(path, num_threads=1, **options) as single,
    ):
        what = "full shuffle, 2 threads against 1"
        bench.compare("images", 256, what, stepper(two), stepper(single))


def other_python(seconds: float) -> None:
    """Do other work for a while, which leaves other memory in the caches."""
    made, end = [], time.perf_counter() + seconds
    while time.perf_counter() < end:
        made.append({str(len(made)): [end]})


def trivial_calls() -> None:
    def nothing(x: int) -> int:
        return x

    for _ in range(70):
        nothing(1)


def consumer(bench: Bench) -> None:
    path, position = bench.folder / "consumer.h5", itertools.count(0, 16)
    with h5py.File(path, "w") as file:
        file["data"] = np.random.default_rng(0).random((100_000, 4), "f4")
    for milliseconds, steps in ((0, 1500), (0.2, 1000), (2, 200), (20, 40)):
        with reader_of(path, batch_size=256) as reader, h5py.File(path) as file:
            dataset = file["data"]
            ways: dict[str, Callable[[], Any]] = {
                "a batch, against 70 trivial calls": lambda r=reader: (
                    r.get_next_batch(),
                    r.fetch_data(),
                ),
                "h5py slice of 4 kB, against 70 trivial calls": lambda d=dataset: d[
                    (begin := next(position)) : begin + 256
                ],
                "": trivial_calls,
            }
            taken: dict[str, list[float]] = {what: [] for what in ways}
            for _ in range(steps if bench.options.most > 1000 else 30):
                for what, way in ways.items():
                    other_python(milliseconds / 1000)
                    begin = time.thread_time()
                    way()
                    taken[what].append(time.thread_time() - begin)
        *_, trivial = medians = [statistics.median(times) for times in taken.values()]
        for what, median in zip([*ways][:2], medians, strict=False):
            bench.note("consumer", milliseconds, what, median / trivial, us=median * 1e6)


CURVES = {
    function.__name__: function
    for function in (
        *(files, labels, many, virtual, fields, batch, row, split, one, take, images, consumer),
        *(tiny, mixed, threads, chunks),
    )
}


PANELS_A_ROW = 2
AXES = {
    "labels": "files with labels beside the data",
    "virtual": "sources of a virtual dataset",
    "row": "bytes a row",
    "batch": "samples a batch",
    "tiny": "rows of 16 bytes",
    "mixed": "bytes of the window",
}


def plot(points: list[dict[str, Any]], path: Path) -> None:
    """Draw one panel for each curve that has several points."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import FuncFormatter

    curves = [c for c in CURVES if len({p["at"] for p in points if p["curve"] == c}) > 1]
    if not curves:
        return
    rows = -(-len(curves) // PANELS_A_ROW)
    figure, panels = plt.subplots(
        rows, PANELS_A_ROW, figsize=(10, 3.6 * rows), layout="constrained", squeeze=False
    )
    for panel in panels.flat[len(curves) :]:
        panel.set_axis_off()
    for panel, curve in zip(panels.flat, curves, strict=False):
        for what in dict.fromkeys(p["what"] for p in points if p["curve"] == curve):
            line = [
                (p["at"], p["ratio"]) for p in points if (p["curve"], p["what"]) == (curve, what)
            ]
            panel.plot(*zip(*line, strict=True), marker="o", label=what)
        panel.axhline(1, color="black", lw=0.8)
        panel.set_xscale("log")
        panel.set_yscale("log")
        low, high = panel.get_ylim()
        panel.set_ylim(min(low, 0.45), max(high, 2.2))  # so that there are ticks beside 1
        panel.set_xlabel(AXES.get(curve, curve))
        for axis in (panel.yaxis.set_major_formatter, panel.yaxis.set_minor_formatter):
            axis(FuncFormatter(lambda ratio, _: f"{ratio:g}" if f"{ratio:e}"[0] in "125" else ""))
        panel.legend(frameon=False, fontsize=8)
        panel.spines[["top", "right"]].set_visible(False)
    figure.supylabel("samples per second, of the peer's", fontsize="medium")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--only", help=f"some curves, with commas between: {','.join(CURVES)}")
    add("--repeats", type=int, help="rounds; default: 5")
    add("--seconds", type=float, help="that each way takes in a round, about; default: 0.4")
    add("--most", type=int, help="files, or rows, at most; default: 10,000 and 100,000,000")
    add("--quick", action="store_true", help="few and small rounds: no figures to quote")
    add("--out", type=Path, help="folder for the results; default: scripts/results, or none")
    options = parser.parse_args()
    options.repeats = options.repeats or (2 if options.quick else 5)
    options.seconds = options.seconds or (0.03 if options.quick else 0.4)
    options.most = options.most or (100 if options.quick else 100_000_000)
    if options.out is None and not (options.quick or options.only):
        options.out = RESULTS
    options.only = options.only.split(",") if options.only else list(CURVES)
    unknown = sorted(set(options.only) - set(CURVES))
    if unknown:
        parser.error(f"no curve is called {unknown[0]}")
    return options


def main() -> None:
    options = parse_options()
    console = Console(width=max(100, Console().width))
    result = header()
    with tempfile.TemporaryDirectory(prefix="bench_collections-") as folder:
        bench = Bench(options, Path(folder), console)
        for name in options.only:
            CURVES[name](bench)
    result["points"] = bench.points
    grid = Table(title="samples per second, of the peer's", box=box.SIMPLE_HEAD)
    for name in ("curve", "at", "against", "ratio"):
        grid.add_column(name, no_wrap=True)
    for point in bench.points:
        cells = point["curve"], f"{point['at']:g}", point["what"], f"{point['ratio']:.2f}"
        grid.add_row(*map(escape, cells))
    console.print(grid)
    if options.out is not None:
        save(result, options.out / "bench_collections.json")
        plot(bench.points, options.out / "bench_collections.png")


if __name__ == "__main__":
    main()
