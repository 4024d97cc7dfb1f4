"""Compare AsyncReader with h5py's best loop, and with a bare `preadv` loop, on files of each kind.

Images of 150 kB, batches of 128, page cache warm, a consumer that does nothing. Each file is
written to a temporary directory, read once by the reader and checked against h5py, and then timed:
reader, h5py and limit take turns, and their medians are compared. A run counts from the first
request of a reader at rest to its last batch, with nothing asked for beyond.

On a busy machine, give --patience: rounds in which other processes had more than 5 % of the CPUs
are then repeated, whatever they gave.

- h5py: in order, slices into one preallocated batch, by the faster of `read_direct` and
  `batch[...] = ds[a:b]`; shuffled, `batch[j] = ds[i]`, a row at a time.
- limit, where rows lie undecoded in the file: `os.preadv` of the same byte ranges into preallocated
  batches, in as many threads as there are cores, all offsets and buffers worked out beforehand; by
  the faster of two forms: each batch shared among the threads, or each thread its own batches.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import itertools
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import h5py
import numpy as np
from bench_common import (
    BATCH,
    CORES,
    RESULTS,
    ROW,
    ROW_NBYTES,
    Run,
    await_quiet,
    batches_in,
    fastest,
    machine,
    make_images,
    reader_run,
    save,
    time_rounds,
    versions,
)
from rich import box
from rich.console import Console
from rich.table import Table

from h5async import AsyncReader

OF_LIMIT = 0.9  # what the reader should reach of the bare loop


class Layout(NamedTuple):
    """A way to store the images, and how often h5py's speed the reader should reach, shuffled."""

    name: str
    chunk_rows: int | None
    compression: str | None
    target: float | None


LAYOUTS = (
    Layout("contiguous", None, None, 1.2),
    Layout("1 row a chunk", 1, None, 2.5),
    Layout("16 rows a chunk", 16, None, 8.0),
    Layout("gzip, 1 row a chunk", 1, "gzip", 3.0),
    Layout("gzip, 16 rows a chunk", 16, "gzip", None),
    Layout("lzf, 1 row a chunk", 1, "lzf", None),
)


def write_file(path: Path, layout: Layout, images: np.ndarray) -> float:
    """Write the images to disk; return decoded bytes by stored bytes."""
    chunks = (layout.chunk_rows, *ROW) if layout.chunk_rows else None
    with h5py.File(path, "w") as file:
        dataset = file.create_dataset(
            "data", images.shape, np.uint8, chunks=chunks, compression=layout.compression
        )
        for start in range(0, len(images), BATCH):
            dataset[start : start + BATCH] = images[start : start + BATCH]
        file.flush()
        ratio = images.nbytes / dataset.id.get_storage_size()
    with path.open("rb") as written:
        os.fsync(written.fileno())  # nothing is to be written back while something is timed
    return ratio


def h5py_runs(data: h5py.Dataset, orders: np.ndarray, shuffle: bool) -> dict[str, Run]:
    """Return h5py's ways, by what they say."""
    batch = np.ones((BATCH, *ROW), np.uint8)

    def slices(order: np.ndarray) -> None:
        batch[...] = data[order[0] : order[0] + BATCH]

    def direct(order: np.ndarray) -> None:
        data.read_direct(batch, np.s_[order[0] : order[0] + BATCH])

    def rows(order: np.ndarray) -> None:
        for j, i in enumerate(order.tolist()):
            batch[j] = data[i]

    def repeat(read: Callable[[np.ndarray], None]) -> Run:
        endless = itertools.cycle(orders)

        def run(batches: int) -> tuple[np.ndarray, np.ndarray]:
            for order in itertools.islice(endless, batches):
                read(order)
            return order, batch

        return run

    if shuffle:
        return {"batch[j] = ds[i]": repeat(rows)}
    return {"batch[...] = ds[a:b]": repeat(slices), "read_direct": repeat(direct)}


def limit_runs(
    descriptor: int, offsets: np.ndarray, orders: np.ndarray, pool: ThreadPoolExecutor
) -> dict[str, Run]:
    """Return bare loops of `preadv`; `offsets`: where each row lies in the file."""
    threads = min(CORES, len(orders))
    slots = [np.ones((BATCH, *ROW), np.uint8) for _ in range(max(2, threads))]

    def read(calls: list[tuple[int, list[memoryview]]]) -> None:
        for offset, buffers in calls:
            count = os.preadv(descriptor, buffers, offset)
            if count != len(buffers) * ROW_NBYTES:
                raise OSError(f"preadv gives {count} bytes")

    edges = [BATCH * part // CORES for part in range(CORES + 1)]
    shared = [
        [plan_calls(offsets[order], slots[k % 2], a, b) for a, b in itertools.pairwise(edges)]
        for k, order in enumerate(orders)
    ]
    shared_numbers = itertools.cycle(range(len(orders)))

    def run_shared(batches: int) -> tuple[np.ndarray, np.ndarray]:
        for k in itertools.islice(shared_numbers, batches):
            list(pool.map(read, shared[k]))
        return orders[k], slots[k % 2]

    own = [
        plan_calls(offsets[order], slots[k % threads], 0, BATCH) for k, order in enumerate(orders)
    ]
    own_numbers = [itertools.cycle(range(t, len(orders), threads)) for t in range(threads)]

    def read_own(thread: int, batches: int) -> int:
        k = -1
        for k in itertools.islice(own_numbers[thread], batches):
            read(own[k])
        return k

    def run_own(batches: int) -> tuple[np.ndarray, np.ndarray]:
        counts = [(batches + threads - 1 - thread) // threads for thread in range(threads)]
        last = list(pool.map(read_own, range(threads), counts))[(batches - 1) % threads]
        return orders[last], slots[last % threads]

    return {"batches shared": run_shared, "batches of its own": run_own}


def plan_calls(
    offsets: np.ndarray, slot: np.ndarray, start: int, stop: int
) -> list[tuple[int, list[memoryview]]]:
    """Return the `preadv` calls for rows `start` to `stop` of a batch, one for adjacent rows."""
    calls: list[tuple[int, list[memoryview]]] = []
    end = -1
    for row, offset in enumerate(offsets[start:stop].tolist(), start):
        if offset != end:
            calls.append((offset, []))
        calls[-1][1].append(slot[row].reshape(-1).data)
        end = offset + ROW_NBYTES
    return calls


def row_offsets(data: h5py.Dataset) -> np.ndarray:
    """Return the address of each row of an uncompressed dataset."""
    rows = np.arange(len(data))
    if data.chunks is None:
        return data.id.get_offset() + rows * ROW_NBYTES
    chunk_rows = data.chunks[0]
    chunks = np.zeros(-(-len(data) // chunk_rows), np.int64)

    def note(chunk: Any) -> None:
        chunks[chunk.chunk_offset[0] // chunk_rows] = chunk.byte_offset

    data.id.chunk_iter(note)
    return chunks[rows // chunk_rows] + rows % chunk_rows * ROW_NBYTES


def verify(runs: Iterable[Run], truth: np.ndarray, counts: Iterable[int]) -> int:
    """Check every value of the last batch of some runs; return how many samples that were."""
    seen = np.zeros(len(truth), bool)
    for run, count in itertools.product(runs, counts):
        index, values = run(count)
        seen[index] = True
        if not np.array_equal(values, truth[index]):
            raise AssertionError("a batch is not what h5py reads")
    return int(seen.sum())


def bench(
    path: Path, layout: Layout, shuffle: bool, truth: np.ndarray, options: argparse.Namespace
) -> dict[str, Any]:
    """Verify, then time all ways on one file in one order; return the figures."""
    deadline = time.monotonic() + options.patience
    with contextlib.ExitStack() as stack:
        runs = open_runs(stack, path, layout, shuffle, truth)
        await_quiet(deadline)
        forms = {way: fastest(its_runs, options.seconds / 4) for way, its_runs in runs.items()}
        used = {way: runs[way][form] for way, form in forms.items()}
        batches = {way: batches_in(run, options.seconds) for way, run in used.items()}
        rounds = time_rounds(used, batches, options.repeats, deadline)
    speeds = {way: median(r.speed[way] for r in rounds) for way in used}
    result: dict[str, Any] = {
        "layout": layout.name,
        "order": "shuffled" if shuffle else "in order",
        "gb_per_s": {way: round(value, 4) for way, value in speeds.items()},
        "gb_per_s_rounds": {way: [round(r.speed[way], 4) for r in rounds] for way in used},
        "cpu_s_per_gb": {way: round(median(r.cost[way] for r in rounds), 4) for way in used},
        "cpu_share_of_others": [round(r.others, 3) for r in rounds],
        "batches_per_round": batches,
        "forms": forms,
        "reader_by_h5py": round(speeds["reader"] / speeds["h5py"], 3),
        "reader_by_h5py_target": layout.target if shuffle else None,
    }
    if "limit" in speeds:
        result["reader_by_limit"] = round(speeds["reader"] / speeds["limit"], 3)
        result["reader_by_limit_target"] = OF_LIMIT
    return result


def open_runs(
    stack: contextlib.ExitStack, path: Path, layout: Layout, shuffle: bool, truth: np.ndarray
) -> dict[str, dict[str, Run]]:
    """Return all forms of all ways, verified; what they need is closed with the stack."""
    order = np.arange(len(truth))
    if shuffle:
        order = np.random.default_rng(1).permutation(order)
    orders = order.reshape(-1, BATCH)
    data = stack.enter_context(h5py.File(path))["data"]
    reader = stack.enter_context(
        AsyncReader(
            hdf5_path=path, labels_field=None, batch_size=BATCH, shuffle=shuffle, device="cpu"
        )
    )
    runs = {"reader": {"fetch_data, get_next_batch": reader_run(reader)}}
    if verify(runs["reader"].values(), truth, [1] * len(reader)) != len(truth):
        raise AssertionError("the reader leaves samples out")
    if reader.fallback_reads:
        raise AssertionError(f"h5py was used: {reader.layouts['data'].fallback_reason}")
    runs["h5py"] = h5py_runs(data, orders, shuffle)
    verify(runs["h5py"].values(), truth, [1])
    if layout.compression is None:
        descriptor = os.open(path, os.O_RDONLY)
        stack.callback(os.close, descriptor)
        pool = stack.enter_context(ThreadPoolExecutor(CORES))
        runs["limit"] = limit_runs(descriptor, row_offsets(data), orders, pool)
        verify(runs["limit"].values(), truth, range(1, CORES + 1))
    return runs


def judged(case: dict[str, Any], ratio: str) -> str:
    """Return a ratio for the table, with its target where it has one."""
    if ratio not in case:
        return "-"
    value, target = case[ratio], case[f"{ratio}_target"]
    if target is None:
        return f"{value:.2f}"
    if value >= target:
        return f"[green]pass[/] {value:.2f} ≥ {target:g}"
    return f"[red]fail[/] {value:.2f} < {target:g}"


def table(cases: list[dict[str, Any]]) -> Table:
    grid = Table(title="GB/s of decoded bytes, medians; ratios of medians", box=box.SIMPLE_HEAD)
    for name in ("file", "order"):
        grid.add_column(name, no_wrap=True)
    for name in ("reader", "h5py", "preadv", "reader / h5py", "reader / preadv"):
        grid.add_column(name, justify="right", no_wrap=True)
    for case in cases:
        speeds = case["gb_per_s"]
        grid.add_row(
            case["layout"],
            case["order"],
            *(
                f"{speeds[way]:.3g}" if way in speeds else "-"
                for way in ("reader", "h5py", "limit")
            ),
            judged(case, "reader_by_h5py"),
            judged(case, "reader_by_limit"),
        )
    return grid


def plot(cases: list[dict[str, Any]], path: Path) -> None:
    """Draw the ratios as bars, the targets as ticks."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 4.6), width_ratios=(3, 2), layout="constrained")
    panels = (("reader_by_h5py", "times h5py's best loop"), ("reader_by_limit", "of bare preadv"))
    for ax, (ratio, title) in zip(axes, panels, strict=True):
        names = list(dict.fromkeys(case["layout"] for case in cases if ratio in case))
        for case in cases:
            if ratio not in case:
                continue
            shuffled = case["order"] == "shuffled"
            y, value = names.index(case["layout"]) + (0.2 if shuffled else -0.2), case[ratio]
            color = "#1f77b4" if shuffled else "#9ecae1"
            ax.barh(y, value, 0.38, color=color, label=case["order"])
            ax.text(1.02, y, f"{value:.2f}", transform=ax.get_yaxis_transform(), va="center")
            target = case[f"{ratio}_target"]
            if target is not None:
                ax.plot([target] * 2, [y - 0.19, y + 0.19], color="#d62728", lw=2, label="target")
        ax.axvline(1, color="black", lw=0.8, zorder=0)
        ax.set_yticks(range(len(names)), names)
        ax.invert_yaxis()
        ax.set_xlim(left=0)
        ax.set_xlabel(f"reader's speed, {title}")
        ax.spines[["top", "right"]].set_visible(False)
    handles, labels = axes[0].get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    figure.legend(
        unique.values(), unique.keys(), loc="outside lower center", ncols=3, frameon=False
    )
    figure.suptitle("AsyncReader: batches of 128 images of 150 kB, page cache warm")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def all_cases(options: argparse.Namespace, console: Console) -> Iterator[dict[str, Any]]:
    images = make_images(options.rows)
    with tempfile.TemporaryDirectory(prefix="bench_read-") as directory:
        for layout in LAYOUTS:
            path = Path(directory) / "images.h5"
            with console.status(f"{layout.name}: writing"):
                ratio = write_file(path, layout, images)
            with h5py.File(path) as file:
                truth = file["data"][:]
            for shuffle in (False, True):
                with console.status(f"{layout.name}: timing"):
                    case = bench(path, layout, shuffle, truth, options)
                yield {**case, "compress_ratio": round(ratio, 2)}
            path.unlink()


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--rows", type=int, default=4096, help="images a file, 150 kB each")
    add("--repeats", type=int, default=7, help="rounds")
    add("--seconds", type=float, default=0.5, help="that each way takes in a round, about")
    add(
        "--patience",
        type=float,
        default=0,
        help="seconds a file and order that may be spent"
        " waiting for a quiet machine, and repeating rounds that other processes disturbed",
    )
    add("--quick", action="store_true", help="few and small rounds: no figures to quote")
    add(
        "--out",
        type=Path,
        help="folder for the results; default: scripts/results, or, with --quick, none",
    )
    options = parser.parse_args()
    if options.quick:
        options.rows, options.repeats, options.seconds = 2 * BATCH, 2, 0.05
    elif options.out is None:
        options.out = RESULTS
    options.rows = max(2, options.rows // BATCH) * BATCH
    return options


def main() -> None:
    options = parse_options()
    console = Console(width=max(100, Console().width))
    result: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": machine(),
        "versions": versions(),
        "rows": options.rows,
        "row_nbytes": ROW_NBYTES,
        "batch_size": BATCH,
    }
    cases = result["cases"] = list(all_cases(options, console))
    console.print(table(cases))
    if options.out is not None:
        save(result, options.out / "bench_read.json")
        plot(cases, options.out / "bench_read.png")


if __name__ == "__main__":
    main()
