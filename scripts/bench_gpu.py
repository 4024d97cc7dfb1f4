"""Measure device="cuda": what a training step waits for data, and uploads, decoding and caches.

Rows of 150 kB, shuffled, page cache warm. A step is a batch and a kernel that reads bytes all over
it and then spins for a given time, one block on each multiprocessor; steps are timed by events of
the caller's stream, after some that fill the pipeline. Ways of a case take turns, and medians are
given. The first batch of each reader is checked against what was written.

- step: a step's time by the longer of T, the kernel's own time (measured back to back), and
  `load`, a step without compute. What is above 1 of it is time that was not hidden.
- upload: bytes a second to the device, of a plain copy's (cudaMemcpyAsync out of pinned memory on a
  stream of its own). "Slot alone": slots that are uploaded in turn, with nothing filled, timed by
  events too. "End to end": whole readers, the one with cache="host" after its first epoch. Then
  what permuting, casting and scaling to (N, C, H, W) float32 adds.
- decode: decoded bytes a second, of chunks of one row, decoded on the host (all threads, and one)
  and on the device, by the plain copy's: above 1, more than the link could carry undecoded. "cpu"
  is the host's decoders without upload (device="cpu"). The rows are stretches of noise, in a part
  of the bits, and of constants; how many are noise is found for each codec and ratio.
- cache: readers of which every row is cached. Bytes that a batch has to move, stored ones read and
  delivered ones written, by bytes that a device-to-device copy of 1 GB reads and writes; with
  cache="host" the stored bytes, by the plain copy's.
- small: microseconds a batch of small rows, in a loop with nothing else, beside a plain loop that
  takes slices from h5py in order, and uploads them by `cupy.asarray`: its time by the reader's.
- memory: what an open reader took of the device (by the driver) and of pinned memory (by h5async's
  requests for it), by slots x batch bytes: stored in pinned memory; stored, and delivered if they
  differ, on the device.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from pathlib import Path
from statistics import median
from typing import Any

import h5py
import numpy as np
from bench_common import CORES, RESULTS, ROW_NBYTES, header, make_images, save
from bench_gpu_ways import (
    CODECS,
    DISTINCT,
    FIELDS,
    NOISE,
    Gpu,
    Loop,
    Stored,
    Way,
    describe,
    device_count,
    endless,
    make_rows,
    noise_share,
    versions,
    written,
)
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from h5async import AsyncReader, Field
from h5async.fill.outcomes import FillOutcome

STEP_GOAL, UPLOAD_GOAL, TRANSFORM_GOAL, DECODE_GOAL, CACHE_GOAL = 1.03, 0.95, 1.10, 1.0, 0.5
SMALL_GOAL = 1.2
FACTORS = (0.1, 0.25, 0.5, 0.75, 0.9, 1, 1.1, 1.25, 1.5, 2, 4)  # of `load`, that compute takes
RATIOS = (1.3, 2, 4)
REST = 0.05  # seconds in which readers that work ahead come to rest

Row = dict[str, Any]


class Bench:
    """The options, the GPU and the files; what several sections measure."""

    def __init__(
        self, options: argparse.Namespace, folder: Path, console: Console, pool: ThreadPoolExecutor
    ) -> None:
        self.options, self.folder, self.console, self.pool = options, folder, console, pool
        self.gpu = Gpu()
        self.batch_nbytes = options.batch * ROW_NBYTES

    def turns(self, ways: Mapping[Any, Way]) -> dict[Any, float]:
        """Return the median of each way, which take turns."""
        times: dict[Any, list[float]] = {name: [] for name in ways}
        for _, (name, way) in itertools.product(range(self.options.repeats), ways.items()):
            time.sleep(REST)
            times[name].append(way())
        return {name: median(several) for name, several in times.items()}

    def link(self, nbytes: int) -> Way:
        """Return a plain copy to the device, of a batch say."""
        return self.gpu.copies(nbytes, max(4, round(self.options.seconds * 40e9 / nbytes)))

    @cached_property
    def link_speed(self) -> float:
        """GB/s of plain copies of a batch out of pinned memory."""
        return self.batch_nbytes / 1e9 / self.turns({"link": self.link(self.batch_nbytes)})["link"]

    @cached_property
    def copy_speed(self) -> float:
        """GB/s of a device-to-device copy, read and written."""
        nbytes = 1 << (26 if self.options.quick else 30)
        taken = self.turns({"copy": self.gpu.copies(nbytes, 20, from_host=False)})["copy"]
        return 2 * nbytes / 1e9 / taken

    @contextlib.contextmanager
    def loop(self, stored: Stored, delivered: str = "as stored", **options: Any) -> Iterator[Loop]:
        """Open a reader, and check its first batch."""
        options = {"batch_size": self.options.batch, "shuffle": "full", "device": "cuda"} | options
        fields = {"data": FIELDS[delivered]}
        with AsyncReader(hdf5_path=stored.path, fields=fields, drop_last=True, **options) as reader:
            yield Loop(self.gpu, reader, stored, delivered)

    def images(self, codec: str | None = None) -> Stored:
        """Return a file of images, contiguous or compressed."""
        path = self.folder / f"images-{codec or 'contiguous'}-{self.options.images}.h5"
        rows = make_images(min(self.options.images, DISTINCT))
        return written(path, rows, self.options.images, codec, self.pool)

    @contextlib.contextmanager
    def encoded(self, codec: str, dtype: str, ratio: float) -> Iterator[Stored]:
        """Give a file that compresses so; remove it, if files are not kept."""
        count = self.options.rows
        rows = make_rows(dtype, noise_share(CODECS[codec], dtype, ratio), min(count, DISTINCT))
        path = self.folder / f"{codec}-{dtype}-{ratio}-{count}.h5"
        stored = written(path, rows, count, codec, self.pool)
        try:
            yield stored
        finally:
            if self.options.files is None:
                stored.path.unlink()


def figure(
    name: str,
    value: float | None,
    unit: str,
    ratio: float | None = None,
    goal: float | None = None,
    note: str = "",
    *,
    at_most: bool = False,
    **more: Any,
) -> Row:
    """Return a row of the results: a value, and its ratio to what it is measured against."""
    value, ratio = (x and float(f"{x:.4g}") for x in (value, ratio))
    judged = {"ratio": ratio, "goal": goal, "at_most": at_most}
    return {"name": name, "value": value, "unit": unit, **judged, "note": note, **more}


def step(bench: Bench) -> Iterator[Row]:
    quick = bench.options.quick
    for codec, delivered in itertools.product((None, "gzip"), FIELDS):
        stored = bench.images(codec)
        for prefetch in (2,) if quick else (2, 3, 4):
            with bench.loop(stored, delivered, prefetch=prefetch) as loop:
                points = sweep(bench, loop, (0.5, 1, 2) if quick else FACTORS)
                said = loop.decode
            worst = max(points, key=lambda point: point["ratio"])
            yield figure(
                f"{codec or 'contiguous'}, {delivered}, prefetch {prefetch}",
                points[0]["load_ms"],
                "ms without compute",
                worst["ratio"],
                STEP_GOAL,
                f"worst: T = {worst['compute_ms'] / worst['load_ms']:.2f} x load",
                at_most=True,
                prefetch=prefetch,
                file=codec or "contiguous",
                delivered=delivered,
                decode=said,
                points=points,
            )


def sweep(bench: Bench, loop: Loop, factors: tuple[float, ...]) -> list[dict[str, float]]:
    """Return, for compute of growing length, the time of a step and of what should bound it."""
    gpu, duration = bench.gpu, bench.options.seconds
    load = bench.turns({0: loop.way(duration)})[0]
    asked = {0.0: 0} | {factor: round(factor * load * 1e9) for factor in factors}
    counts = {factor: max(8, round(duration / max(factor, 1) / load)) for factor in asked}
    ways = {f: partial(loop.seconds, counts[f], nanoseconds) for f, nanoseconds in asked.items()}
    times = bench.turns(ways)
    load, array = times[0], bench.gpu.cupy.zeros(1 << 20, np.uint8)
    points = []
    for factor in factors:
        compute = gpu.timed(partial(gpu.compute, array, asked[factor]), min(counts[factor], 50))
        figures = {"compute_ms": compute, "load_ms": load, "step_ms": times[factor]}
        point = {name: round(taken * 1e3, 5) for name, taken in figures.items()}
        points.append(point | {"ratio": round(times[factor] / max(compute, load), 4)})
    return points


def upload(bench: Bench) -> Iterator[Row]:
    yield figure("plain copy", bench.link_speed, "GB/s")
    stored, size, nbytes = bench.images(), bench.options.batch, bench.batch_nbytes
    plain = bench.link(nbytes)
    reads = {
        "end to end, cache=host": {"cache": "host", "cache_bytes": 4 * stored.path.stat().st_size},
        "end to end, page cache": {},
        "filling alone, device=cpu": {"device": "cpu"},
    }
    for name, options in reads.items():
        with bench.loop(stored, prefetch=4, **options) as loop:
            for _ in loop.reader:
                pass
            times = bench.turns({"plain": plain, "reader": loop.way(bench.options.seconds)})
            loop.check()
        goal = UPLOAD_GOAL if "cache" in options else None
        ratio, note = times["plain"] / times["reader"], f"batches of {size}, prefetch 4"
        yield figure(name, nbytes / 1e9 / times["reader"], "GB/s", ratio, goal, note)
    yield from slot_alone(bench)


def slot_alone(bench: Bench) -> Iterator[Row]:
    """Time uploads, and the transforming kernel, of slots that nobody fills."""
    gpu, stored, nbytes = bench.gpu, bench.images(), bench.batch_nbytes
    size, count = bench.options.batch, max(4, round(bench.options.seconds * 40e9 / nbytes))

    index = np.arange(size)

    def uploads(engine: Any) -> float:
        """Return seconds an upload, from the first copy's begin to the last kernel's end."""
        gpu.synchronize()
        begin = gpu.mark(engine.device.copy_stream)
        for slot in itertools.islice(itertools.cycle(engine.slots), count):
            slot.upload(FillOutcome(index, slot.memory.out))
        # Each upload ends on the work stream, behind its copy.
        return gpu.since(begin, engine.device.work_stream) / count

    with contextlib.ExitStack() as stack:
        loops = {name: stack.enter_context(bench.loop(stored, name)) for name in FIELDS}
        # The ring's slots are private; what is measured is what a worker does of a filled one.
        engines = {name: loop.reader._engine.setup for name, loop in loops.items()}
        times = bench.turns(
            {"plain": bench.link(nbytes)}
            | {name: partial(uploads, engine) for name, engine in engines.items()}
        )
        for name in FIELDS:
            yield figure(
                f"slot alone, {name}",
                nbytes / 1e9 / times[name],
                "GB/s",
                times["plain"] / times[name],
                UPLOAD_GOAL if name == "as stored" else None,
                "bytes as stored",
            )
        yield figure(
            "permute, cast and scale",
            (times["float32 NCHW"] - times["as stored"]) * 1e6,
            "us more a batch",
            times["float32 NCHW"] / times["as stored"],
            TRANSFORM_GOAL,
            "upload with, by upload without",
            at_most=True,
        )
        slot = engines["float32 NCHW"].slots[0]
        outcome = FillOutcome(index, slot.memory.out)
        taken = gpu.timed(lambda: slot._transformed(0, outcome), 50)
        yield figure(
            "their kernel",
            taken * 1e6,
            "us a batch",
            5 * nbytes / 1e9 / taken / bench.copy_speed,
            note="bytes read and written a second, by a device copy's",
        )


def decode(bench: Bench) -> Iterator[Row]:
    quick = bench.options.quick
    cases = itertools.product(bench.options.dtypes, CODECS, (2,) if quick else RATIOS)
    for dtype, codec, ratio in cases:
        if codec == "shuffle+gzip" and dtype == "uint8":
            continue  # there is nothing to shuffle
        with bench.encoded(codec, dtype, ratio) as stored:
            speeds, said, why = decode_speeds(bench, stored)
        on_device = speeds.get("device")
        yield figure(
            f"{codec}, {dtype}, {stored.ratio:.2f}",
            on_device,
            "GB/s",
            on_device and on_device / bench.link_speed,
            DECODE_GOAL,
            why or f"{on_device / speeds['host']:.2f} of host",
            codec=codec,
            dtype=dtype,
            compress_ratio=round(stored.ratio, 3),
            gb_per_s={way: float(f"{speed:.4g}") for way, speed in speeds.items()},
            link_gb_per_s=float(f"{bench.link_speed:.4g}"),
            decode=said,
        )


def decode_speeds(bench: Bench, stored: Stored) -> tuple[dict[str, float], dict[str, str], str]:
    """Return GB/s of each way, what each says, and why the device cannot."""
    ways: dict[str, dict[str, Any]] = {
        "cpu": {"device": "cpu"},
        "host": {"decode": "host"},
        "host, 1 thread": {"decode": "host", "num_threads": 1},
        "device": {"decode": "device"},
    }
    said, why = {}, ""
    with contextlib.ExitStack() as stack:
        loops = {}
        for way, options in ways.items():
            try:
                loops[way] = stack.enter_context(bench.loop(stored, **options))
            except Exception as error:  # nvCOMP is missing, say: the other ways go on
                why = f"{way}: {error}"
        timed = {way: loop.way(bench.options.seconds) for way, loop in loops.items()}
        speeds = {w: bench.batch_nbytes / 1e9 / t for w, t in bench.turns(timed).items()}
        said = {way: loop.decode for way, loop in loops.items() if way != "cpu"}
        for loop in loops.values():
            loop.check()
    with bench.loop(stored, decode="auto") as loop:
        loop.way(bench.options.seconds)()
        said["auto"] = loop.decode
    return speeds, said, why


def cache(bench: Bench) -> Iterator[Row]:
    stored = bench.images()
    sizes = (64, 256) if bench.options.quick else (64, 256, 1024)
    for kept, delivered, size in itertools.product(("device", "host"), FIELDS, sizes):
        options = {"cache": kept, "cache_bytes": 4 * stored.path.stat().st_size}
        with bench.loop(stored, delivered, batch_size=size, **options) as loop:
            for _ in range(2):  # the first may be under way already
                for _ in loop.reader:
                    pass
            taken = bench.turns({"cached": loop.way(bench.options.seconds)})["cached"]
            written, said = loop.check().data.nbytes, loop.reader.stats().cache
        read = size * ROW_NBYTES
        moved = read + written if kept == "device" else read
        limit = bench.copy_speed if kept == "device" else bench.link_speed
        yield figure(
            f"cache={kept}, {delivered}, batches of {size}",
            moved / 1e9 / taken,
            "GB/s",
            moved / 1e9 / taken / limit,
            CACHE_GOAL if kept == "device" else None,
            f"{taken * 1e6:.0f} us a batch; limit {limit:.3g} GB/s",
            cache=kept,
            delivered=delivered,
            batch_size=size,
            said=said,
            seconds_a_batch=float(f"{taken:.4g}"),
            limit_gb_per_s=float(f"{limit:.4g}"),
        )


def small(bench: Bench) -> Iterator[Row]:
    cupy, rows = bench.gpu.cupy, 1 << (16 if bench.options.quick else 20)
    cases = itertools.product((4, 256), (64, 256, 4096))
    for values, size in cases:
        path = bench.folder / f"small-{values}-{rows}.h5"
        if not path.exists():
            with h5py.File(path, "w") as file:
                file["data"] = np.arange(rows * values, dtype=np.float32).reshape(rows, values)
        ways = {
            "in order": {},
            "full": {"shuffle": "full"},
            "full, scaled": {"shuffle": "full", "fields": {"data": Field("data", scale=0.5)}},
            "full, cache=device": {"shuffle": "full", "cache": "device"},
        }
        with h5py.File(path) as file, contextlib.ExitStack() as stack:
            data, count = file["data"], max(20, round(bench.options.seconds * 5000))
            begins = itertools.cycle(range(0, rows, size))

            def plain(data: Any = data, begins: Any = begins, size: int = size) -> None:
                begin = next(begins)
                cupy.asarray(data[begin : begin + size])

            takes: dict[str, Callable[[], Any]] = {"plain": plain}
            for name, how in ways.items():
                more = {"labels_field": None, "device": "cuda", "batch_size": size, **how}
                reader = stack.enter_context(AsyncReader(hdf5_path=path, **more))
                for _ in itertools.repeat(None, 2 if "cache" in how else 0):
                    for _ in reader:  # the first epoch may be under way already
                        pass
                takes[name] = partial(next, endless(reader))
            taken = bench.turns(
                {name: partial(bench.gpu.wall, take, count) for name, take in takes.items()}
            )
        for name in ways:
            yield figure(
                f"{4 * values} B x {size}, {name}",
                taken[name] * 1e6,
                "us a batch",
                taken["plain"] / taken[name],
                SMALL_GOAL,
                f"plain loop: {taken['plain'] * 1e6:.3g} us",
            )


def memory(bench: Bench) -> Iterator[Row]:
    cupy, asked = bench.gpu.cupy, [0]
    runtime = cupy.cuda.runtime
    allocate = runtime.hostAlloc

    def counted(nbytes: int, flags: int) -> Any:
        asked[0] += nbytes
        return allocate(nbytes, flags)

    def device_nbytes() -> int:
        gc.collect()
        cupy.get_default_memory_pool().free_all_blocks()
        free, total = runtime.memGetInfo()
        return total - free

    stored = bench.images()
    cases = itertools.product(FIELDS, (2, 4))
    with bench.loop(stored, "float32 NCHW"):
        pass  # kernels are loaded
    try:
        for delivered, prefetch in cases:
            runtime.hostAlloc = counted
            asked[0], before = 0, device_nbytes()
            with bench.loop(stored, delivered, prefetch=prefetch) as loop:
                loop.seconds(4)
                on_device, on_host = device_nbytes() - before, asked[0]
            del loop  # with what it holds of the device
            row = 1 if delivered == "as stored" else 5
            for where, taken, due in (("device", on_device, row), ("pinned", on_host, 1)):
                slots = prefetch * bench.batch_nbytes * due
                yield figure(
                    f"{where}, {delivered}, prefetch {prefetch}",
                    taken / 1e6,
                    "MB",
                    taken / slots,
                    note=f"slots x batch: {slots / 1e6:.4g} MB",
                )
    finally:
        runtime.hostAlloc = allocate


SECTIONS = {
    "step": step,
    "upload": upload,
    "decode": decode,
    "cache": cache,
    "small": small,
    "memory": memory,
}


def table(sections: dict[str, Any]) -> Table:
    grid = Table(title="medians, and ratios of medians", box=box.SIMPLE_HEAD)
    for name in ("section", "what"):
        grid.add_column(name, no_wrap=True)
    for name in ("measured", "", "ratio"):
        grid.add_column(name, justify="right", no_wrap=True)
    grid.add_column("note")
    for section, found in sections.items():
        for row in found["rows"]:
            value = "-" if row["value"] is None else f"{row['value']:.3g}"
            grid.add_row(section, row["name"], value, row["unit"], judged(row), escape(row["note"]))
    return grid


def judged(row: Row) -> str:
    ratio, goal = row["ratio"], row["goal"]
    if ratio is None or goal is None:
        return "-" if ratio is None else f"{ratio:.3g}"
    is_met = ratio <= goal if row["at_most"] else ratio >= goal
    sign = ("≤" if is_met else ">") if row["at_most"] else ("≥" if is_met else "<")
    return f"[{'green' if is_met else 'red'}]{ratio:.3g} {sign} {goal:g}[/]"


def decode_table(rows: list[Row]) -> Table:
    ways = ("cpu", "host", "host, 1 thread", "device")
    grid = Table(title="decoded GB/s, and what decode=auto says", box=box.SIMPLE_HEAD)
    grid.add_column("codec, dtype, ratio", no_wrap=True)
    for name in (*ways, "link"):
        grid.add_column(name, justify="right", no_wrap=True)
    grid.add_column("auto")
    for row in rows:
        speeds = row["gb_per_s"] | {"link": row["link_gb_per_s"]}
        shown = (f"{speeds[way]:.3g}" if way in speeds else "-" for way in (*ways, "link"))
        grid.add_row(row["name"], *shown, escape(row["decode"]["auto"]))
    return grid


def plot(sections: dict[str, Any], title: str, path: Path) -> None:
    """Draw a panel for each section that has figures; goals are red."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = {name: PANELS[name] for name in PANELS if sections.get(name, {}).get("rows")}
    if not panels:
        return
    across = min(2, len(panels))
    down = -(-len(panels) // across)
    size = (7.5 * across, 4.6 * down + 0.5)
    drawn, axes = plt.subplots(down, across, figsize=size, layout="constrained", squeeze=False)
    for ax in axes.flat[len(panels) :]:
        ax.set_visible(False)
    for ax, (name, draw) in zip(axes.flat, panels.items(), strict=False):
        draw(ax, sections[name]["rows"])
        ax.set_title(name)
        ax.spines[["top", "right"]].set_visible(False)
    drawn.suptitle(title)
    drawn.savefig(path, dpi=110)
    plt.close(drawn)


def draw_step(ax: Any, rows: list[Row]) -> None:
    kinds = list(dict.fromkeys((row["file"], row["delivered"]) for row in rows))
    for row in rows:
        color = f"C{kinds.index((row['file'], row['delivered']))}"
        x = [point["compute_ms"] / point["load_ms"] for point in row["points"]]
        y = [point["ratio"] for point in row["points"]]
        style = {2: "-", 3: "--", 4: ":"}[row["prefetch"]]
        ax.plot(x, y, style, marker=".", color=color, label=row["name"])
    ax.axhline(1, color="black", lw=0.8, zorder=0)
    ax.axhline(STEP_GOAL, color="#d62728", lw=1.5)
    ax.set_xscale("log")
    ticks = [0.1, 0.25, 0.5, 1, 2, 4]
    ax.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    ax.minorticks_off()
    ax.set_xlabel("T, compute a step, by load, a step without compute")
    ax.set_ylabel("time of a step / max(T, load)")
    ax.legend(fontsize=6, frameon=False, ncols=2)


def draw_bars(ax: Any, rows: list[Row]) -> None:
    rows = [row for row in rows if row["ratio"] is not None]
    for y, row in enumerate(rows):
        ax.barh(y, min(row["ratio"], 1.5), 0.7, color="#6baed6")
        text = f"{row['ratio']:.2f}  ({row['value']:.3g} {row['unit']})"
        ax.text(1.01, y, text, va="center", fontsize=8, transform=ax.get_yaxis_transform())
        if row["goal"] is not None:
            ax.plot([row["goal"]] * 2, [y - 0.4, y + 0.4], color="#d62728", lw=2)
    ax.axvline(1, color="black", lw=0.8, zorder=0)
    ax.set_yticks(range(len(rows)), [row["name"] for row in rows], fontsize=8)
    ax.invert_yaxis()
    ax.set_xlim(0, 1.5)
    ax.set_xlabel("ratio to what it is measured against (red: goal)")


def draw_decode(ax: Any, rows: list[Row]) -> None:
    codecs = list(dict.fromkeys(row["codec"] for row in rows))
    ways = ("device", "host", "cpu", "host, 1 thread")
    for i, way in enumerate(ways):
        points = [row for row in rows if way in row["gb_per_s"]]
        x = [codecs.index(row["codec"]) + (i - 1.5) * 0.2 for row in points]
        sizes = [12 * row["compress_ratio"] for row in points]
        y = [row["gb_per_s"][way] for row in points]
        ax.scatter(x, y, sizes, color=f"C{i}", alpha=0.75, label=way)
    link = rows[0]["link_gb_per_s"]
    ax.axhline(link, color="#d62728", lw=1.5, label=f"plain copy, {link:.3g} GB/s")
    ax.set_yscale("log")
    ax.yaxis.set_major_formatter("{x:g}")
    ax.set_xticks(range(len(codecs)), codecs)
    ax.set_ylabel("decoded GB/s")
    ax.set_xlabel("a dot for each dtype and compression ratio; larger: compresses better")
    ax.legend(fontsize=7, frameon=False)


def draw_cache(ax: Any, rows: list[Row]) -> None:
    for i, (kept, delivered) in enumerate(itertools.product(("device", "host"), FIELDS)):
        some = [row for row in rows if (row["cache"], row["delivered"]) == (kept, delivered)]
        x, y = [row["batch_size"] for row in some], [row["value"] for row in some]
        ax.plot(x, y, marker="o", color=f"C{i}", label=f"cache={kept}, {delivered}")
    for kept, part, label in (
        ("device", 1, "device copy"),
        ("device", CACHE_GOAL, "goal"),
        ("host", 1, "plain copy to the device"),
    ):
        limits = [row["limit_gb_per_s"] for row in rows if row["cache"] == kept]
        if limits:
            color = "#d62728" if label == "goal" else "black"
            ax.axhline(part * limits[0], color=color, lw=1.2, ls="-" if part < 1 else "--")
            place = ax.get_yaxis_transform()
            ax.text(0.99, part * limits[0], label, transform=place, size=7, ha="right", va="bottom")
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.yaxis.set_major_formatter("{x:g}")
    sizes = sorted({row["batch_size"] for row in rows})
    ax.set_xticks(sizes, [str(size) for size in sizes])
    ax.set_xlabel("samples a batch")
    ax.set_ylabel("GB/s (device: read and written; host: uploaded)")
    ax.legend(fontsize=7, frameon=False)


PANELS = {
    "step": draw_step,
    "upload": draw_bars,
    "decode": draw_decode,
    "cache": draw_cache,
    "small": draw_bars,
    "memory": draw_bars,
}


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--only", help=f"some sections, with commas between: {','.join(SECTIONS)}")
    add("--dtypes", help=f"of rows to decode, with commas between: {','.join(NOISE)}")
    add("--images", type=int, default=8192, help="images a file, 150 kB each; default: 8192")
    add("--rows", type=int, default=2048, help="rows a file to decode, 150 kB; default: 2048")
    add("--batch", type=int, default=256, help="samples a batch; default: 256")
    add("--repeats", type=int, default=3, help="rounds; default: 3")
    add("--seconds", type=float, default=0.2, help="of each way in a round, about; default: 0.2")
    add("--files", type=Path, help="folder to keep the files in, and to find them again")
    add("--quick", action="store_true", help="few and small rounds: no figures to quote")
    add("--out", type=Path, help="folder for the results; default: scripts/results, or none")
    add("--add", action="store_true", help="keep what the results there have of other sections")
    options = parser.parse_args()
    if options.out is None and (options.add or not (options.quick or options.only)):
        options.out = RESULTS
    if options.quick:
        options.images, options.rows, options.batch = 1024, 512, 64  # beyond what readers keep
        options.repeats, options.seconds = 1, 0.02
    options.only = options.only.split(",") if options.only else list(SECTIONS)
    unknown = sorted(set(options.only) - set(SECTIONS))
    if unknown:
        parser.error(f"no section is called {unknown[0]}")
    options.dtypes = (options.dtypes or ("uint16" if options.quick else ",".join(NOISE))).split(",")
    if unknown := sorted(set(options.dtypes) - set(NOISE)):
        parser.error(f"no rows are made of dtype {unknown[0]}")
    return options


def measure(bench: Bench, name: str, section: dict[str, Any], keep: Callable[[], None]) -> None:
    """Add a section's rows, and the error that ended it, if one did; keep the results of each."""
    begin = time.monotonic()
    section["rows"] = []
    try:
        for row in SECTIONS[name](bench):
            section["rows"].append(row)
            section["seconds"] = round(time.monotonic() - begin, 1)
            ratio = "" if row["ratio"] is None else f"  {row['ratio']:.3g}"
            bench.console.print(f"{name}: {row['name']}{ratio}", highlight=False, markup=False)
            keep()
    except Exception as error:  # the other sections go on
        section["error"] = f"{type(error).__name__}: {error}"
        bench.console.print_exception()
        keep()


def main() -> None:
    options = parse_options()
    if not device_count():
        print("bench_gpu needs CuPy and a GPU, and one of them is missing")
        sys.exit(2)
    console = Console(width=max(150, Console().width))
    keys = ("images", "rows", "batch", "repeats", "seconds")
    result = header() | {"sizes": {key: getattr(options, key) for key in keys}}
    sections: dict[str, Any] = {}
    path = options.out and options.out / "bench_gpu.json"
    if options.add and path.exists():
        sections = json.loads(path.read_text())["sections"]

    def keep() -> None:
        if path is not None:  # each time: a run that is cut short leaves what it had
            save(result, path)

    with contextlib.ExitStack() as stack:
        temporary = tempfile.TemporaryDirectory(prefix="bench_gpu-")
        folder = options.files or Path(stack.enter_context(temporary))
        folder.mkdir(parents=True, exist_ok=True)
        bench = Bench(options, folder, console, stack.enter_context(ThreadPoolExecutor(CORES)))
        figures = {"link_gb_per_s": bench.link_speed, "copy_gb_per_s": bench.copy_speed}
        figures = {name: float(f"{value:.4g}") for name, value in figures.items()}
        result |= {"gpu": describe(bench.gpu.cupy) | figures, "sections": sections}
        result["versions"] |= versions(bench.gpu.cupy)
        for name in options.only:
            sections[name] = {}
            measure(bench, name, sections[name], keep)
    console.print(table(sections))
    if rows := sections.get("decode", {}).get("rows"):
        console.print(decode_table(rows))
    for name, section in sections.items():
        if "error" in section:
            console.print(f"{name}: {section['error']}", style="red", markup=False)
    if path is not None:
        title = f"AsyncReader on {result['gpu']['name']}; rows of 150 kB, page cache warm"
        plot(sections, title, path.with_suffix(".png"))


if __name__ == "__main__":
    main()
