"""Compare AsyncReader with the bare decoder, and with h5py's best loop, for each HDF5 filter.

Images of 150 kB, one a chunk, batches of 128, shuffled, page cache warm, a consumer that does
nothing. Each file is written to a temporary directory, read once by the reader and checked against
h5py, and then timed: reader, decoder and h5py take turns, and their medians are compared.

- decoder: the same chunks, already in memory, decoded into preallocated batches by direct calls of
  imagecodecs, in as many threads as there are cores, each with batches of its own. No file, no
  reader.
- h5py: `batch[j] = ds[i]`, a row at a time, with the plugin of hdf5plugin where HDF5 needs it.

The reader should reach 0.9 of the decoder, and, where the decoder and not memory is the limit (it
gives less than a quarter of what memcpy does), 1.8 times h5py, 3 times for gzip and lzf.
"""

from __future__ import annotations

import argparse
import bz2
import contextlib
import ctypes
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import h5py
import hdf5plugin
import imagecodecs
import numpy as np
from bench_common import (
    BATCH,
    BATCH_NBYTES,
    CORES,
    ROW,
    ROW_NBYTES,
    Run,
    await_quiet,
    batches_in,
    h5py_runs,
    header,
    make_images,
    parse_case_options,
    reader_run,
    save,
    time_rounds,
    verify,
)
from rich import box
from rich.console import Console
from rich.table import Table

from h5async import AsyncReader
from h5async.codec.filters import Filter
from h5async.core.binding import address, load_core
from h5async.read.coretables import Scratch, encoded_room

OF_DECODER = 0.9
MEMORY_BOUND = 0.25  # of memcpy's speed: a decoder above it is bound by memory, not by itself

Decode = Callable[[np.ndarray, np.ndarray], Any]  # encoded chunk, room for the decoded one


class Case(NamedTuple):
    """A filter pipeline, how to call its decoder, and how often h5py's speed is due."""

    name: str
    options: dict[str, Any]
    decode: Decode | None  # None: several steps, by the library's own pipeline
    target: float = 1.8
    bits: int = 0xFF  # of each value, that are kept: some filters give up on noise


def _bunzip2(encoded: np.ndarray, out: np.ndarray) -> None:
    out[...] = np.frombuffer(bz2.decompress(encoded.data), np.uint8)


CASES = (
    Case("gzip", {"compression": "gzip"}, lambda e, o: imagecodecs.deflate_decode(e, out=o), 3.0),
    Case(
        "lzf",
        {"compression": "lzf"},
        lambda e, o: imagecodecs.lzf_decode(e, header=False, out=o),
        3.0,
    ),
    Case("zstd", dict(hdf5plugin.Zstd()), lambda e, o: imagecodecs.zstd_decode(e, out=o)),
    Case("lz4", dict(hdf5plugin.LZ4()), lambda e, o: imagecodecs.lz4h5_decode(e, out=o)),
    *(
        Case(
            f"blosc-{name}",
            dict(hdf5plugin.Blosc(cname=name)),
            lambda e, o: imagecodecs.blosc_decode(e, numthreads=1, out=o),
        )
        for name in ("lz4", "zstd")
    ),
    Case("blosc2-zstd", dict(hdf5plugin.Blosc2(cname="zstd")), None),
    Case(
        "bitshuffle",
        dict(hdf5plugin.Bitshuffle(cname="none")),
        lambda e, o: imagecodecs.bitshuffle_decode(e.data, itemsize=1, out=o),
    ),
    Case("bitshuffle-lz4", dict(hdf5plugin.Bitshuffle(cname="lz4")), None),
    Case("bitshuffle-zstd", dict(hdf5plugin.Bitshuffle(cname="zstd")), None),
    Case("bzip2", dict(hdf5plugin.BZip2()), _bunzip2),
    Case("szip", {"compression": "szip"}, None, bits=0x1F),
    Case("scaleoffset", {"scaleoffset": 0}, None, bits=0x1F),
    Case("gzip, fletcher32", {"compression": "gzip", "fletcher32": True}, None),
)


class Stored(NamedTuple):
    """The chunks of a file in memory, in the order of samples."""

    filters: tuple[Filter, ...]
    chunks: list[np.ndarray]
    masks: list[int]

    @classmethod
    def of(cls, data: h5py.Dataset) -> Stored:
        """Read all chunks of a dataset."""
        plist = data.id.get_create_plist()
        entries = [plist.get_filter(i) for i in range(plist.get_nfilters())]
        read = [data.id.read_direct_chunk((i, 0, 0, 0)) for i in range(len(data))]
        return cls(
            tuple(Filter(number, values, "") for number, _, values, _ in entries),
            [np.frombuffer(encoded, np.uint8) for _, encoded in read],
            [mask for mask, _ in read],
        )

    @property
    def nbytes(self) -> int:
        """Stored bytes of all chunks."""
        return sum(chunk.size for chunk in self.chunks)


def write_file(path: Path, case: Case, images: np.ndarray) -> None:
    with h5py.File(path, "w") as file:
        dataset = file.create_dataset(
            "data", images.shape, np.uint8, chunks=(1, *ROW), **case.options
        )
        for start in range(0, len(images), BATCH):
            dataset[start : start + BATCH] = images[start : start + BATCH]


def decoder_run(case: Case, stored: Stored, orders: np.ndarray, pool: ThreadPoolExecutor) -> Run:
    """Return a bare loop over chunks in memory, in several threads with batches of their own."""
    threads = min(CORES, len(orders))
    slots = [np.ones((BATCH, ROW_NBYTES), np.uint8) for _ in range(threads)]
    numbers = [cycle(range(thread, len(orders), threads)) for thread in range(threads)]
    decoders = [case.decode or _pipeline(stored) for _ in range(threads)]
    if any(stored.masks):
        raise AssertionError("HDF5 gave up on a chunk")

    def work(thread: int, batches: int) -> int:
        decode, rows, k = decoders[thread], list(slots[thread]), -1
        for k in islice(numbers[thread], batches):
            for encoded, row in zip([stored.chunks[i] for i in orders[k]], rows, strict=True):
                decode(encoded, row)
        return k

    def run(batches: int) -> tuple[np.ndarray, np.ndarray]:
        counts = [(batches + threads - 1 - thread) // threads for thread in range(threads)]
        last = list(pool.map(work, range(threads), counts))[(batches - 1) % threads]
        return orders[last], slots[last % threads].reshape(BATCH, *ROW)

    return run


def _pipeline(stored: Stored) -> Decode:
    core = load_core()
    filters, scratch = (
        core.filters(stored.filters),
        Scratch.allocate(0, 0, encoded_room(ROW_NBYTES)),
    )
    worker = scratch.worker(core)

    def decode(encoded: np.ndarray, out: np.ndarray) -> None:
        places = address(encoded), address(out)
        sizes = len(stored.filters), encoded.size, 0, out.nbytes
        if not core.decode(filters, ctypes.byref(worker.struct), *places, *sizes):
            raise ValueError("the core cannot decode the chunk")

    return decode


def memcpy_speed(pool: ThreadPoolExecutor) -> float:
    """Return GB/s of copying batches, in as many threads as there are cores."""
    pairs = [(np.ones(BATCH_NBYTES, np.uint8), np.ones(BATCH_NBYTES, np.uint8)) for _ in "ab"]
    times = []
    for _ in range(9):
        start = time.perf_counter()
        list(pool.map(lambda pair: np.copyto(*pair), pairs * 2))
        times.append(time.perf_counter() - start)
    return len(pairs) * 2 * BATCH_NBYTES / 1e9 / median(times)


def bench(
    path: Path, case: Case, truth: np.ndarray, memcpy: float, options: argparse.Namespace
) -> dict[str, Any]:
    deadline = time.monotonic() + options.patience
    orders = np.random.default_rng(1).permutation(len(truth)).reshape(-1, BATCH)
    with contextlib.ExitStack() as stack:
        data = stack.enter_context(h5py.File(path))["data"]
        pool = stack.enter_context(ThreadPoolExecutor(CORES))
        reader = stack.enter_context(
            AsyncReader(
                hdf5_path=path, labels_field=None, batch_size=BATCH, shuffle="full", device="cpu"
            )
        )
        stored = Stored.of(data)
        runs = {
            "reader": reader_run(reader),
            "decoder": decoder_run(case, stored, orders, pool),
            "h5py": next(iter(h5py_runs(data, orders, True).values())),
        }
        if verify([runs["reader"]], truth, [1] * len(reader)) != len(truth):
            raise AssertionError("the reader leaves samples out")
        if reader.fallback_reads:
            raise AssertionError(f"h5py was used: {reader.layouts['data'].fallback_reason}")
        for way in ("decoder", "h5py"):
            verify([runs[way]], truth, [1])
        await_quiet(deadline)
        batches = {way: batches_in(run, options.seconds) for way, run in runs.items()}
        rounds = time_rounds(runs, batches, options.repeats, deadline)
    speeds = {way: median(r.speed[way] for r in rounds) for way in runs}
    is_bound_by_memory = speeds["decoder"] > MEMORY_BOUND * memcpy
    return {
        "filter": case.name,
        "compress_ratio": round(truth.nbytes / stored.nbytes, 2),
        "gb_per_s": {way: round(value, 4) for way, value in speeds.items()},
        "gb_per_s_rounds": {way: [round(r.speed[way], 4) for r in rounds] for way in runs},
        "cpu_share_of_others": [round(r.others, 3) for r in rounds],
        "reader_by_decoder": round(speeds["reader"] / speeds["decoder"], 3),
        "reader_by_decoder_target": OF_DECODER,
        "reader_by_h5py": round(speeds["reader"] / speeds["h5py"], 3),
        "reader_by_h5py_target": None if is_bound_by_memory else case.target,
    }


def judged(value: float, target: float | None) -> str:
    if target is None:
        return f"{value:.2f}"
    return f"[green]{value:.2f}[/]" if value >= target else f"[red]{value:.2f} < {target:g}[/]"


def table(cases: list[dict[str, Any]]) -> Table:
    grid = Table(title="GB/s of decoded bytes, medians; ratios of medians", box=box.SIMPLE_HEAD)
    grid.add_column("filter", no_wrap=True)
    for name in ("ratio", "reader", "decoder", "h5py", "reader / decoder", "reader / h5py"):
        grid.add_column(name, justify="right", no_wrap=True)
    for case in cases:
        grid.add_row(
            case["filter"],
            f"{case['compress_ratio']:.2f}",
            *(f"{case['gb_per_s'][way]:.3g}" for way in ("reader", "decoder", "h5py")),
            judged(case["reader_by_decoder"], case["reader_by_decoder_target"]),
            judged(case["reader_by_h5py"], case["reader_by_h5py_target"]),
        )
    return grid


def plot(cases: list[dict[str, Any]], path: Path) -> None:
    """Draw the ratios as bars, the targets as ticks."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 5), sharey=True, layout="constrained")
    panels = (("reader_by_decoder", "of the bare decoder"), ("reader_by_h5py", "times h5py"))
    for ax, (ratio, title) in zip(axes, panels, strict=True):
        for y, case in enumerate(cases):
            ax.barh(y, case[ratio], 0.7, color="#1f77b4")
            ax.text(1.02, y, f"{case[ratio]:.2f}", transform=ax.get_yaxis_transform(), va="center")
            if case[f"{ratio}_target"] is not None:
                ax.plot([case[f"{ratio}_target"]] * 2, [y - 0.35, y + 0.35], color="#d62728", lw=2)
        ax.axvline(1, color="black", lw=0.8, zorder=0)
        ax.set_yticks(range(len(cases)), [case["filter"] for case in cases])
        ax.set_xlim(left=0)
        ax.set_xlabel(f"reader's speed, {title} (red: target)")
        ax.spines[["top", "right"]].set_visible(False)
    axes[0].invert_yaxis()
    figure.suptitle("AsyncReader: shuffled images of 150 kB, one a chunk, page cache warm")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def all_cases(options: argparse.Namespace, console: Console) -> Iterator[dict[str, Any]]:
    images = make_images(options.rows)
    with ThreadPoolExecutor(CORES) as pool:
        memcpy = memcpy_speed(pool)
    with tempfile.TemporaryDirectory(prefix="bench_filters-") as directory:
        for case in CASES:
            if options.only and case.name not in options.only:
                continue
            path = Path(directory) / "images.h5"
            with console.status(f"{case.name}: writing"):
                kept = images & case.bits
                write_file(path, case, kept)
            with console.status(f"{case.name}: timing"):
                yield bench(path, case, kept, memcpy, options)
            path.unlink()


def main() -> None:
    options = parse_case_options(__doc__, 1024, "filters", "filter")
    console = Console(width=max(100, Console().width))
    result = header()
    result["versions"] |= {"hdf5plugin": hdf5plugin.version}
    result |= {
        "rows": options.rows,
        "row_nbytes": ROW_NBYTES,
        "batch_size": BATCH,
    }
    cases = result["cases"] = list(all_cases(options, console))
    console.print(table(cases))
    if options.out is not None:
        save(result, options.out / "bench_filters.json")
        plot(cases, options.out / "bench_filters.png")


if __name__ == "__main__":
    main()
