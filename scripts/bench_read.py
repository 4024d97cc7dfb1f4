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
import json
import os
import platform
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import h5py
import imagecodecs
import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

import h5async
from h5async import AsyncReader

ROW = (224, 224, 3)
ROW_NBYTES = 224 * 224 * 3
BATCH = 128
BATCH_NBYTES = BATCH * ROW_NBYTES
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
OF_LIMIT = 0.9  # what the reader should reach of the bare loop
QUIET = 0.05  # share of the CPUs that other processes may have
RESULTS = Path(__file__).resolve().parent / "results"

# Reads so many batches, and returns the last: sample numbers, values.
Run = Callable[[int], tuple[np.ndarray, np.ndarray]]


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


def make_images(count: int) -> np.ndarray:
    """Return images with a smooth, specked upper and a noisy lower half; gzip halves them."""
    rng = np.random.default_rng(0)
    images = np.empty((count, *ROW), np.uint8)
    half = ROW[0] // 2
    ramp = (np.arange(ROW[0], dtype=np.uint8) // 4)[:, None, None]
    for start in range(0, count, BATCH):
        part = images[start : start + BATCH]
        part[...] = rng.integers(0, 72, (len(part), 1, 1, 3), dtype=np.uint8) + ramp
        part[:, :half] += rng.integers(0, 8, (len(part), half, ROW[1], 1), dtype=np.uint8) == 0
        part[:, half:] += rng.integers(0, 128, (len(part), half, *ROW[1:]), dtype=np.uint8)
    return images


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


def reader_run(reader: AsyncReader) -> Run:
    """Return the reader's way: the low-level pair, all slots asked for."""

    def run(batches: int) -> tuple[np.ndarray, np.ndarray]:
        ahead = min(batches, reader.config.prefetch)
        for _ in range(ahead):
            reader.fetch_data()
        for done in range(1, batches + 1):
            batch = reader.get_next_batch()
            if done + ahead <= batches:
                reader.fetch_data()
        return batch.index, batch.data

    return run


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


def seconds(run: Run, batches: int) -> float:
    start = time.perf_counter()
    run(batches)
    return time.perf_counter() - start


def batches_in(run: Run, duration: float) -> int:
    """Return how many batches take about so many seconds, two at least."""
    batches = 2
    while (taken := seconds(run, batches)) < duration / 4:
        batches *= 2
    return max(2, round(batches * duration / taken))


def fastest(runs: dict[str, Run], duration: float) -> str:
    def pace(form: str) -> float:
        batches = batches_in(runs[form], duration)
        return min(seconds(runs[form], batches) for _ in range(2)) / batches

    return next(iter(runs)) if len(runs) == 1 else min(runs, key=pace)


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


class Round(NamedTuple):
    """GB/s and CPU seconds a GB of each way, and what share of the CPUs other processes had."""

    speed: dict[str, float]
    cost: dict[str, float]
    others: float


def time_round(runs: dict[str, Run], batches: dict[str, int]) -> Round:
    speed, cost = {}, {}
    before = cpu_seconds()
    for way, run in runs.items():
        gigabytes, cpu = batches[way] * BATCH_NBYTES / 1e9, time.process_time()
        speed[way] = gigabytes / seconds(run, batches[way])
        cost[way] = (time.process_time() - cpu) / gigabytes
    return Round(speed, cost, others_share(before))


def time_rounds(
    runs: dict[str, Run], batches: dict[str, int], repeats: int, deadline: float
) -> list[Round]:
    """Return so many rounds, quiet ones as far as they were had before the deadline."""
    rounds: list[Round] = []
    while len(rounds) < repeats or (
        sum(r.others <= QUIET for r in rounds) < repeats and time.monotonic() < deadline
    ):
        await_quiet(deadline)
        rounds.append(time_round(runs, batches))
    return sorted(rounds, key=lambda r: r.others > QUIET and r.others)[:repeats]


def cpu_seconds() -> tuple[float, float, float]:
    """Return CPU time so far: of this process; of all; and what all cores had (Linux; else 0)."""
    try:
        ticks = [int(x) for x in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    except OSError:
        return 0.0, 0.0, 0.0
    everything, idle = (x / os.sysconf("SC_CLK_TCK") for x in (sum(ticks), sum(ticks[3:5])))
    return time.process_time(), everything - idle, everything


def others_share(before: tuple[float, float, float]) -> float:
    own, busy, everything = (b - a for a, b in zip(before, cpu_seconds(), strict=True))
    return max(0.0, busy - own) / everything if everything else 0.0


def await_quiet(deadline: float) -> None:
    """Wait until other processes leave the CPUs alone, but not beyond the deadline."""
    while time.monotonic() < deadline:
        before = cpu_seconds()
        time.sleep(0.5)
        if others_share(before) <= QUIET:
            return


def machine() -> dict[str, Any]:
    cpu = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next((x.partition(":")[2].strip() for x in lines if x.startswith("model name")), cpu)
    return {
        "cpu": cpu,
        "usable_cores": CORES,
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "os": platform.platform(),
        "load_average_before": round(os.getloadavg()[0], 2),
    }


def versions() -> dict[str, str]:
    return {
        "python": platform.python_version(),
        "h5async": h5async.__version__,
        "numpy": np.__version__,
        "h5py": h5py.__version__,
        "hdf5": h5py.version.hdf5_version,
        "imagecodecs": imagecodecs.__version__,
    }


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


def save(result: dict[str, Any], path: Path) -> None:
    """Write results as JSON, lists of numbers on one line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(result, indent=1)
    path.write_text(re.sub(r"\[[^][{}]*\]", lambda found: " ".join(found[0].split()), text) + "\n")


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
