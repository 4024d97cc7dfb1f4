"""The workloads of `bench_limits`: files and limits enter; one row for each workload leaves."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import bench_ways as ways
import h5py
import numpy as np
from bench_common import (
    BATCH,
    CORES,
    QUIET,
    ROW,
    ROW_NBYTES,
    await_quiet,
    cpu_seconds,
    make_images,
    others_share,
)
from bench_ways import Expect, Limits, Prepare, Run
from rich.console import Console

from h5async import ConfigError, Field

CHUNK_ROWS = 16
SHORT_CHUNK_ROWS = 1000
SMALL_NBYTES = 4096
MAIN_THREAD_MICROSECONDS = 60
CHUNK_NBYTES = 40  # of memory that the reader's index may take for a chunk
FLOAT_ROW = (112, 112, 3)  # float32: as many bytes as an image of uint8
SCALE = np.array([1 / 58.4, 1 / 57.1, 1 / 57.4], np.float32)
OFFSET = np.array([-2.12, -2.04, -1.80], np.float32)
Orders = Sequence[np.ndarray]
ORDERS = {"in order": False, "shuffled": "full", "window": "window"}

CHILD = """
import json, sys
from h5async import AsyncReader
def status(name):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith(name + ":"))
path, size, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
options = dict(labels_field=None, device="cpu", shuffle="full", batch_size=size)
with AsyncReader(hdf5_path=path, **options) as reader:
    anonymous = status("RssAnon")
    for batch, _ in zip(reader, range(count)):
        anonymous = max(anonymous, status("RssAnon"))
        assert not batch.data.any()
print(json.dumps({"anonymous": anonymous, "peak": status("VmHWM")}))
"""


class Sizes(NamedTuple):
    """How much of everything there is."""

    images: int = 4096
    filtered: int = 1024
    batch: int = BATCH
    short_rows: int = 1_000_000
    short_batch: int = 4096
    small_rows: int = 100_000
    small_batches: int = 78  # of 256 rows: what is read of them cold
    single_batches: int = 20_000
    memory_batches: int = 24
    mixed_samples: int = 8192
    mixed_epochs: int = 48


QUICK = Sizes(512, 128, 16, 40_000, 1024, 8_000, 16, 500, 6, 2048, 6)


class Bench:
    """What all workloads use, and the rows they give."""

    def __init__(self, options: argparse.Namespace, folder: Path, console: Console) -> None:
        self.options = options
        self.sizes = QUICK if options.quick else Sizes()
        self.folder = folder
        self.console = console
        self.pool = ThreadPoolExecutor(CORES)
        self.rows: list[dict[str, Any]] = []
        self.mixing: dict[str, dict[str, float]] = {}

    @cached_property
    def images(self) -> np.ndarray:
        """Images, as many as the largest file holds."""
        return make_images(self.sizes.images)

    @cached_property
    def contiguous(self) -> Path:
        """A file of all images, one after the other."""
        return self.write("images", self.images)

    def write(self, name: str, values: np.ndarray, **options: Any) -> Path:
        """Write a file with a dataset."""
        path = self.folder / f"{name}.h5"
        with self.console.status(f"{name}: writing"):
            ways.write_dataset(path, values, **options)
        return path

    @contextlib.contextmanager
    def file(self, name: str, values: np.ndarray, **options: Any) -> Iterator[Path]:
        """Give a file that is there until the context ends."""
        path = self.write(name, values, **options)
        yield path
        path.unlink()

    def loops(self, orders: Orders, expect: Expect, **prepares: Prepare) -> Limits:
        """Return all forms of bare loops, whose batches hold what is expected."""
        slot = expect(orders[0])
        make_slot = partial(np.ones, slot.shape, slot.dtype)
        runs = ways.bare_loops(self.pool, orders, make_slot, **prepares)
        return Limits(runs, slot.nbytes, expect)

    def stream(
        self,
        work: str,
        name: str,
        path: Path,
        expect: Expect,
        limits: Callable[[], Limits],
        target: float | None = None,
        **options: Any,
    ) -> None:
        """Add the row of a reader in steady state."""
        try:
            reader = ways.open_reader(path, **options)
        except ConfigError as error:
            if options.get("shuffle") != "window":
                raise
            self.skip(work, name, str(error).partition(";")[0])
            return
        with reader:
            ways.check_epoch(reader, expect)
            nbytes = expect(np.arange(reader.config.batch_size)).nbytes
            way = Limits({"reader": ways.reader_stream(reader)}, nbytes, expect)
            self.compare(work, name, way, limits(), target)

    def compare(
        self,
        work: str,
        name: str,
        reader: Limits,
        limits: Limits,
        target: float | None = None,
        is_long: bool = False,
    ) -> dict[str, Any]:
        """Check and time both, and add their row; `is_long`: one run at a time is long enough.

        Without a target it is 0.95, and 0.9 where the limit is above 8 GB/s.
        """
        options = self.options
        deadline = time.monotonic() + options.patience
        with self.console.status(f"{work} {name}"):
            for way in (reader, limits):
                ways.check(way, [1] if is_long else range(1, CORES + 1))
            await_quiet(deadline)
            form = fastest(limits.runs, 0 if is_long else options.seconds / 4)
            runs = {"reader": reader.runs["reader"], "limit": limits.runs[form]}
            counts = dict.fromkeys(runs, 1)
            if not is_long:
                counts = {way: batches_in(run, options.seconds) for way, run in runs.items()}
            rounds = time_rounds(runs, counts, options.repeats, deadline)
        nbytes = {"reader": reader.nbytes, "limit": limits.nbytes}
        speeds = {way: [r.pace[way] * nbytes[way] / 1e9 for r in rounds] for way in runs}
        value, limit = (median(speeds[way]) for way in ("reader", "limit"))
        if target is None:
            target = 0.9 if limit > 8 else 0.95
        return self.add(
            work,
            name,
            "GB/s",
            value,
            limit,
            target,
            form=form,
            rounds={way: [round(x, 4) for x in speeds[way]] for way in runs},
            cpu_share_of_others=[round(r.others, 3) for r in rounds],
            batches_per_round=counts,
        )

    def add(
        self,
        work: str,
        name: str,
        unit: str,
        value: float,
        limit: float,
        target: float,
        **more: Any,
    ) -> dict[str, Any]:
        """Add a row; less is better but for GB/s."""
        ratio = value / limit if unit == "GB/s" else limit / value
        row = {"work": work, "name": name, "unit": unit, "reader": float(f"{value:.4g}")}
        row |= {"limit": float(f"{limit:.4g}"), "ratio": round(ratio, 3), "target": target}
        self.rows.append(row)
        row |= more
        return row

    def skip(self, work: str, name: str, reason: str) -> None:
        """Add a row without figures."""
        self.rows.append({"work": work, "name": name, "skipped": reason})
        self.say(f"{work} {name} is left out: {reason}")

    def say(self, line: str) -> None:
        """Print a line as it is."""
        self.console.print(line, markup=False, highlight=False)

    def module(self, work: str, name: str, what: str) -> Any:
        """Return a module; where it is not installed, say what is left out, and return None."""
        found = ways.optional(name)
        if found is None:
            self.say(f"{work}: no {name}: {what} is left out; pip install '.[bench]'")
        return found


def batches_in(run: Run, duration: float) -> int:
    """Return how many batches take about so many seconds, in whole periods."""
    timed = run(ways.PERIOD)
    while timed.seconds < duration / 4:
        timed = run(timed.batches * 2)
    return max(1, round(timed.batches * duration / timed.seconds / ways.PERIOD)) * ways.PERIOD


def fastest(runs: dict[str, Run], duration: float) -> str:
    """Return the form of the best pace; duration 0: of one run each."""

    def pace(form: str) -> float:
        count = batches_in(runs[form], duration) if duration else 1
        return max(timed.batches / timed.seconds for timed in (runs[form](count) for _ in "ab"))

    return next(iter(runs)) if len(runs) == 1 else max(runs, key=pace)


class Round(NamedTuple):
    """Batches a second of each way, and what share of the CPUs other processes had."""

    pace: dict[str, float]
    others: float


def time_rounds(
    runs: dict[str, Run], counts: dict[str, int], repeats: int, deadline: float
) -> list[Round]:
    """Return so many rounds, quiet ones as far as they were had before the deadline."""
    rounds: list[Round] = []
    while len(rounds) < repeats or (
        sum(r.others <= QUIET for r in rounds) < repeats and time.monotonic() < deadline
    ):
        await_quiet(deadline)
        before = cpu_seconds()
        parts = {way: run(counts[way]) for way, run in runs.items()}
        pace = {way: timed.batches / timed.seconds for way, timed in parts.items()}
        rounds.append(Round(pace, others_share(before)))
    return sorted(rounds, key=lambda r: r.others > QUIET and r.others)[:repeats]


def raw_images(bench: Bench) -> None:
    """W1: contiguous images, warm and read once."""
    path, images, size = bench.contiguous, bench.images, bench.sizes.batch
    offsets = ways.contiguous_offsets(path, len(images), ROW_NBYTES)
    for order in ("in order", "shuffled"):
        orders = ways.epoch(len(images), size, ORDERS[order])
        options = {"batch_size": size, "shuffle": ORDERS[order]}
        with opened(path) as descriptor:
            preadv = ways.by_preadv(descriptor, offsets)
            bench.stream(
                "W1",
                f"contiguous, {order}",
                path,
                images.__getitem__,
                lambda orders=orders, preadv=preadv: bench.loops(
                    orders,
                    images.__getitem__,
                    preadv=preadv,
                    **mapped(path, offsets),
                ),
                **options,
            )
            limits = bench.loops(orders, images.__getitem__, preadv=preadv)
            limits.runs["new map, copyto"] = new_maps(bench, path, offsets, orders)
            reader = {"reader": ways.fresh_readers(path, options)}
            bench.compare(
                "W1",
                f"contiguous, {order}, read once",
                Limits(reader, limits.nbytes, images.__getitem__),
                limits,
            )


def mapped(path: Path, offsets: np.ndarray) -> dict[str, Prepare]:
    """Return ways out of a map of a contiguous file."""
    flat = ways.map_file(path)
    rows = flat[offsets[0] : offsets[-1] + ROW_NBYTES].reshape(-1, *ROW)
    return {"map, copyto": ways.by_copies(rows), "map, take": ways.by_take(rows)}


def new_maps(bench: Bench, path: Path, offsets: np.ndarray, orders: Orders) -> Run:
    """Return the way that reads each epoch out of a new map, into the same slots."""
    slots = itertools.cycle([np.ones((len(orders[0]), *ROW), np.uint8) for _ in range(CORES)])

    def once() -> ways.Timed:
        copies = mapped(path, offsets)["map, copyto"]
        return ways.batches_in_turn(bench.pool, orders, partial(next, slots), copies)(len(orders))

    return ways.repeated(once)


@contextlib.contextmanager
def opened(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def raw_chunks(bench: Bench) -> None:
    """W2: an image a chunk, no filter."""
    images, size = bench.images, bench.sizes.batch
    with bench.file("chunks", images, chunks=(1, *ROW)) as path, opened(path) as descriptor:
        offsets = ways.chunk_offsets(path)
        flat = ways.map_file(path)
        rows = [flat[start : start + ROW_NBYTES].reshape(ROW) for start in offsets.tolist()]
        prepares = {
            "preadv": ways.by_preadv(descriptor, offsets),
            "map, copyto": ways.by_copies(rows),
        }
        for order in ("in order", "shuffled"):
            shuffle = ORDERS[order]
            bench.stream(
                "W2",
                f"1 image a chunk, {order}",
                path,
                images.__getitem__,
                partial(
                    bench.loops,
                    ways.epoch(len(images), size, shuffle),
                    images.__getitem__,
                    **prepares,
                ),
                batch_size=size,
                shuffle=shuffle,
            )


def packed_chunks(bench: Bench) -> None:
    """W3: 16 images a chunk, gzip; more of them, decoded, than the reader keeps."""
    split_chunks(bench)
    images, size = bench.images, bench.sizes.batch
    truth = images.reshape(-1, CHUNK_ROWS * ROW_NBYTES)
    with bench.file("gzip", images, chunks=(CHUNK_ROWS, *ROW), compression="gzip") as path:
        prepare = ways.by_decoder(ways.gunzip, ways.encoded_chunks(path))
        chunks = ways.epoch(len(truth), max(1, size // CHUNK_ROWS), False)
        whole = partial(bench.loops, chunks, truth.__getitem__, decoder=prepare)

        def touched() -> Limits:
            orders = [
                np.unique(o // CHUNK_ROWS) for o in ways.epoch(len(images), size // 4, "full")
            ]
            slot = partial(np.ones, (1, truth.shape[1]), np.uint8)
            run = ways.batches_in_turn(bench.pool, orders, slot, prepare)
            nbytes = size // 4 * ROW_NBYTES
            return Limits({"decoder, batches in turn": run}, nbytes, lambda k: truth[k[-1:]])

        for order, batch_size, limits in (
            ("in order", size, whole),
            ("window", size, whole),
            ("shuffled", size // 4, touched),
        ):
            bench.stream(
                "W3",
                f"gzip, {CHUNK_ROWS} images a chunk, {order}",
                path,
                images.__getitem__,
                limits,
                0.95,
                batch_size=batch_size,
                shuffle=ORDERS[order],
            )


def split_chunks(bench: Bench) -> None:
    """W3: the chunks that h5py chooses, which split images in height, width and channel."""
    images, size = bench.images, bench.sizes.batch
    with bench.file("split", images, compression="gzip") as path:
        chunks = ways.encoded_chunks(path)
        with h5py.File(path) as file:
            data = file["data"]
            truth = np.zeros((len(chunks), math.prod(data.chunks)), np.uint8)
            for one, part in zip(truth, data.iter_chunks(), strict=True):
                one.reshape(data.chunks)[tuple(slice(p.stop - p.start) for p in part)] = data[part]
        orders = ways.epoch(len(chunks), min(size, len(chunks)), False)
        decoder = ways.by_decoder(ways.gunzip, chunks)
        limits = bench.loops(orders, truth.__getitem__, decoder=decoder)
        # What lies beyond the edges of the dataset is decoded, and counts for nothing.
        limits = limits._replace(nbytes=limits.nbytes * images.nbytes / truth.nbytes)
        for order in ("in order", "window"):
            bench.stream(
                "W3",
                f"gzip, h5py's own chunks, {order}",
                path,
                images.__getitem__,
                lambda: limits,
                batch_size=size,
                shuffle=ORDERS[order],
            )


def all_filters(bench: Bench) -> None:
    """W4: each filter, one sample a chunk, shuffled."""
    plugins = bench.module("W4", "hdf5plugin", "what needs its filters")
    images, floats = bench.images[: bench.sizes.filtered], make_floats(bench.sizes.filtered)
    size = bench.sizes.batch
    orders = ways.epoch(len(images), size, "full")
    for one in ways.filters(plugins):
        values = floats if one.is_float else images
        truth = values.reshape(len(values), -1).view(np.uint8)
        with bench.file(one.name, values, chunks=(1, *values.shape[1:]), **one.options) as path:
            chunks = ways.encoded_chunks(path)
            bench.stream(
                "W4",
                f"{one.name}, {values.dtype}, shuffled",
                path,
                values.__getitem__,
                partial(
                    bench.loops,
                    orders,
                    truth.__getitem__,
                    decoder=ways.by_decoder(one.decode, chunks),
                ),
                batch_size=size,
                shuffle="full",
            )
            if "ratio" in bench.rows[-1]:
                stored = sum(chunk.size for chunk in chunks)
                bench.rows[-1]["compress_ratio"] = round(values.nbytes / stored, 2)


def make_floats(count: int) -> np.ndarray:
    """Return smooth waves with noise, as an instrument gives them."""
    rng = np.random.default_rng(0)
    floats = rng.standard_normal((count, *FLOAT_ROW), np.float32)
    wave = np.sin(np.arange(FLOAT_ROW[0], dtype=np.float32) / 17)
    floats *= 0.5
    floats += 100 * (wave[:, None, None] + wave[:, None])
    return floats


def short_rows(bench: Bench) -> None:
    """W5: a million rows of 28 float32."""
    sizes = bench.sizes
    size = sizes.short_batch
    rows = np.random.default_rng(0).standard_normal((sizes.short_rows, 28), np.float32)

    def takes(shuffle: Any) -> Limits:
        orders, take = ways.epoch(len(rows), size, shuffle), ways.by_take(rows)
        limits = bench.loops(orders, rows.__getitem__, take=take)
        slot = partial(np.ones, (size, *rows.shape[1:]), rows.dtype)
        one = ways.batches_in_turn(bench.pool, orders, slot, take, threads=1)
        return limits._replace(runs={**limits.runs, "take, one thread": one})

    def decoder(path: Path) -> Limits:
        truth = rows.view(np.uint8).reshape(-1, SHORT_CHUNK_ROWS * rows[0].nbytes)
        orders = ways.epoch(len(truth), size // SHORT_CHUNK_ROWS, False)
        prepare = ways.by_decoder(ways.gunzip, ways.encoded_chunks(path))
        return bench.loops(orders, truth.__getitem__, decoder=prepare)

    chunks = {"chunks": (SHORT_CHUNK_ROWS, 28)}
    for name, options, names in (
        ("contiguous", {}, ("in order", "shuffled")),
        ("chunks of 1,000", chunks, ("in order", "shuffled", "window")),
        ("gzip, chunks of 1,000", chunks | {"compression": "gzip"}, ("window",)),
    ):
        with bench.file("rows", rows, **options) as path:
            for order in names:
                shuffle = ORDERS[order]
                is_packed = "compression" in options
                limits = partial(decoder, path) if is_packed else partial(takes, shuffle)
                title = f"rows of 112 B, {name}, {order}"
                more = {"batch_size": size, "shuffle": shuffle}
                bench.stream("W5", title, path, rows.__getitem__, limits, 0.8, **more)


def last_dimension(bench: Bench) -> None:
    """W6: samples counted by the last dimension."""
    images, size = bench.images[: bench.sizes.filtered], bench.sizes.batch
    last = np.ascontiguousarray(images.transpose(3, 1, 2, 0))
    split = last.reshape(*last.shape[:3], -1, CHUNK_ROWS)
    chunks = np.ascontiguousarray(np.moveaxis(split, 3, 0))
    samples = [chunks[i // CHUNK_ROWS, ..., i % CHUNK_ROWS] for i in range(len(images))]
    truth = images.transpose(0, 3, 1, 2)
    whole = {"copyto": ways.by_copies(np.moveaxis(last, -1, 0)), "take": ways.by_lines(last)}
    parts = {"copyto": ways.by_copies(samples)}
    moving = ways.by_moving_axes(last), ways.by_moving_chunks(chunks)
    for name, options, forms, move in (
        ("contiguous", {}, whole, moving[0]),
        ("chunks of 16", {"chunks": (*last.shape[:3], CHUNK_ROWS)}, parts, moving[1]),
    ):
        with bench.file("last", last, **options) as path:
            for order in ("in order", "shuffled"):
                shuffle = ORDERS[order]
                prepares = forms if shuffle else forms | {"moveaxis": move}
                orders = ways.epoch(len(images), size, shuffle)
                limits = partial(bench.loops, orders, truth.__getitem__, **prepares)
                title = f"samples last, {name}, {order}"
                more = {"batch_size": size, "shuffle": shuffle, "num_dim": 3}
                bench.stream("W6", title, path, truth.__getitem__, limits, 0.9, **more)


def cold(bench: Bench) -> None:
    """W7: nothing in the page cache."""
    if not hasattr(os, "posix_fadvise"):
        bench.skip("W7", "cold", "this system has no posix_fadvise")
        return
    sizes = bench.sizes
    batches = len(bench.images) // sizes.batch
    cold_file(bench, "150 kB rows", bench.contiguous, bench.images, sizes.batch, batches)
    shape = sizes.small_rows, SMALL_NBYTES
    small = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    with bench.file("small", small) as path:
        cold_file(bench, "4 kB rows", path, small, 256, sizes.small_batches)


def cold_file(
    bench: Bench, name: str, path: Path, truth: np.ndarray, size: int, batches: int
) -> None:
    """Add the row of one file against reads in flight."""
    nbytes = truth[0].nbytes
    offsets = ways.contiguous_offsets(path, len(truth), nbytes)
    orders = ways.epoch(len(truth), size, "full")[:batches]
    shares: list[float | None] = []

    def drop() -> None:
        ways.drop_cache(path)
        shares.append(ways.cached_share(path))

    options = {"batch_size": size, "shuffle": "full"}
    expect = truth.__getitem__
    reader = Limits(
        {"reader": ways.fresh_readers(path, options, batches, drop)}, size * nbytes, expect
    )
    slot = partial(np.ones, (size, *truth.shape[1:]), np.uint8)
    with ThreadPoolExecutor(ways.IN_FLIGHT) as pool:
        run = ways.reads_in_flight(path, offsets, orders, slot, drop, pool)
        limits = Limits({"32 preadv in flight": run}, size * nbytes, expect)
        row = bench.compare("W7", f"cold, {name}, shuffled", reader, limits, 0.9, is_long=True)
    unknown = None in shares
    row["cached_before"] = None if unknown else round(max(x for x in shares if x is not None), 3)
    if unknown or row["cached_before"] > 0.01:
        row["note"] = "not known to be cold" if unknown else "not cold"


def planes(bench: Bench) -> None:
    """W8: images to (N, C, H, W)."""
    path, images, size = bench.contiguous, bench.images, bench.sizes.batch
    for module in ("torch", "cv2"):
        bench.module("W8", module, f"what {module} can do")
    moved = images.transpose(0, 3, 1, 2)
    factor, summand = SCALE[:, None, None], OFFSET[:, None, None]

    def scaled(index: np.ndarray) -> np.ndarray:
        return moved[index].astype(np.float32) * factor + summand

    field = Field("data", axes=(0, 3, 1, 2), scale=SCALE.tolist(), offset=OFFSET.tolist())
    orders = ways.epoch(len(images), size, False)
    for name, expect, prepares, options in (
        (
            "uint8",
            moved.__getitem__,
            ways.to_planes(images),
            {"h_dim": 1, "w_dim": 2, "cha_dim": 3},
        ),
        (
            "scaled float32",
            scaled,
            ways.to_scaled_planes(images, SCALE, OFFSET),
            {"fields": {"data": field}},
        ),
    ):
        limits = partial(bench.loops, orders, expect, **prepares)
        title = f"images to (N, C, H, W), {name}"
        bench.stream("W8", title, path, expect, limits, 0.9, batch_size=size, **options)


def single_samples(bench: Bench) -> None:
    """W9: batches of one short sample."""
    rows = np.random.default_rng(0).integers(0, 256, (4096, 3072), np.uint8)
    count = bench.sizes.single_batches
    main, wall = [], []
    with (
        bench.file("single", rows) as path,
        ways.open_reader(path, batch_size=1, shuffle="full") as reader,
    ):
        ways.check_epoch(reader, rows.__getitem__)
        run = ways.reader_stream(reader)
        for _ in range(bench.options.repeats):
            before = time.thread_time()
            timed = run(count)
            main.append((time.thread_time() - before) / count * 1e6)
            wall.append(timed.seconds / count * 1e6)
        ways.require_equal(timed.values, rows[timed.index])
    bench.add(
        "W9",
        "batches of one 3 kB sample",
        "µs",
        median(main),
        MAIN_THREAD_MICROSECONDS,
        1,
        form="60 µs of the main thread a batch",
        wall_microseconds=round(median(wall), 1),
        rounds={"main": [round(x, 1) for x in main], "wall": [round(x, 1) for x in wall]},
    )


def memory(bench: Bench) -> None:
    """Memory: files of 1 GB and 20 GB, an image a chunk; nothing of them is on the disk."""
    if not Path("/proc/self/status").exists():
        bench.skip("memory", "anonymous", "this system has no /proc")
        return
    size = bench.sizes.batch
    tiny = bench.folder / "tiny.h5"
    ways.write_sparse(tiny, (8,), 4)
    base = child_memory(tiny, size, 1)
    for gigabytes in (1, 20):
        path, chunks = bench.folder / "sparse.h5", gigabytes * 10**9 // ROW_NBYTES
        ways.write_sparse(path, ROW, chunks)
        with bench.console.status(f"memory, {gigabytes} GB"):
            used = child_memory(path, size, bench.sizes.memory_batches)
        path.unlink()
        slots = 2 * size * ROW_NBYTES
        scratch = 2 * CORES * ROW_NBYTES
        bench.add(
            "memory",
            f"{gigabytes} GB in {chunks:,} chunks",
            "MB",
            (used["anonymous"] - base["anonymous"]) / 1e6,
            (slots + scratch + CHUNK_NBYTES * chunks) / 1e6,
            1,
            form=f"slots, scratch, {CHUNK_NBYTES} B a chunk",
            bytes={"slots": slots, "scratch": scratch, "chunks": CHUNK_NBYTES * chunks},
            base=base,
            used=used,
        )


def child_memory(path: Path, size: int, batches: int) -> dict[str, int]:
    """Return the peak memory of a process that reads some batches: anonymous, and all of it."""
    command = [sys.executable, "-c", CHILD, str(path), str(size), str(batches)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    result: dict[str, int] = json.loads(done.stdout)
    return result


def window_randomness(bench: Bench) -> None:
    """Compare how far ``"window"`` and ``"full"`` take apart what lies in one chunk."""
    sizes = bench.sizes
    rows = np.arange(sizes.mixed_samples * 4, dtype=np.int32).reshape(-1, 4)
    chunks = {"chunks": (CHUNK_ROWS, 4), "compression": "gzip"}
    with bench.file("mixed", rows, **chunks) as path:
        for shuffle in ("window", "full"):
            try:
                bench.mixing[shuffle] = mixing(path, shuffle, rows, sizes)
            except ConfigError as error:
                if shuffle == "full":
                    raise
                bench.say(f"window is left out: {str(error).partition(';')[0]}")


def mixing(path: Path, shuffle: str, rows: np.ndarray, sizes: Sizes) -> dict[str, float]:
    mates, positions = [], []
    with ways.open_reader(path, shuffle=shuffle, batch_size=sizes.batch) as reader:
        ways.check_epoch(reader, rows.__getitem__)
        for _ in range(sizes.mixed_epochs):
            indices = [batch.index for batch in reader]
            mates += [ways.chunk_mates(index, CHUNK_ROWS) for index in indices]
            positions.append(np.argsort(np.concatenate(indices)))
    distances = [ways.mate_distance(each, CHUNK_ROWS) for each in positions]
    return {
        "chunk_mates_in_a_batch": round(float(np.mean(mates)), 5),
        "position_spread": round(float(np.std(positions, axis=0, ddof=1).mean()) / len(rows), 4),
        "distance_of_chunk_mates": round(float(np.mean(distances)), 4),
    }


WORKLOADS: dict[str, Callable[[Bench], None]] = {
    "W1": raw_images,
    "W2": raw_chunks,
    "W3": packed_chunks,
    "W4": all_filters,
    "W5": short_rows,
    "W6": last_dimension,
    "W7": cold,
    "W8": planes,
    "W9": single_samples,
    "memory": memory,
    "window": window_randomness,
}
