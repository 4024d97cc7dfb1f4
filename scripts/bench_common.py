"""What the benches share: images, turns of timing, what else the machine does, results on disk.

On a busy machine, rounds in which other processes had more than 5 % of the CPUs can be repeated:
see `time_rounds`.
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
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import imagecodecs
import numpy as np

import h5async
from h5async import AsyncReader

ROW = (224, 224, 3)
ROW_NBYTES = 224 * 224 * 3
BATCH = 128
BATCH_NBYTES = BATCH * ROW_NBYTES
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
QUIET = 0.05  # share of the CPUs that other processes may have
RESULTS = Path(__file__).resolve().parent / "results"

# Reads so many batches, and returns the last: sample numbers, values.
Run = Callable[[int], tuple[np.ndarray, np.ndarray]]


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
    runs: dict[str, Run],
    batches: dict[str, int],
    repeats: int,
    deadline: float,
    turns: Callable[[dict[str, Run], dict[str, int]], Round] = time_round,
) -> list[Round]:
    """Return so many rounds by `turns`, quiet ones as far as they were had before the deadline."""
    rounds: list[Round] = []
    while len(rounds) < repeats or (
        sum(r.others <= QUIET for r in rounds) < repeats and time.monotonic() < deadline
    ):
        await_quiet(deadline)
        rounds.append(turns(runs, batches))
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


def header() -> dict[str, Any]:
    """Return what every bench's results begin with."""
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    return {"date": today, "machine": machine(), "versions": versions()}


@contextlib.contextmanager
def serving_file(file: Path, delay_ms: float, rate: float = 0) -> Iterator[str]:
    """Serve a file on the loopback by `rangeserver.c`, by any name; yield one of its URLs.

    `file` may be a folder, whose files are below that URL; `rate`: answers a second, 0: any.
    """
    program = file.parent / "rangeserver"
    if not program.exists():
        source = Path(__file__).with_name("rangeserver.c")
        subprocess.run(["cc", "-O2", "-o", program, source], check=True)
    command = [program, file, str(int(1000 * delay_ms)), str(rate)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}/{file.name}"
        assert process.stdin is not None
        process.stdin.close()


def parse_case_options(about: str, rows: int, plural: str, case: str) -> argparse.Namespace:
    """Parse the options of a bench of several files: of `rows` images, of which each is a case."""
    parser = argparse.ArgumentParser(description=about.partition("\n")[0])
    add = parser.add_argument
    add("--rows", type=int, default=rows, help="images a file, 150 kB each")
    add("--repeats", type=int, default=7, help="rounds")
    add("--seconds", type=float, default=0.5, help="that each way takes in a round, about")
    add("--only", nargs="*", help=f"names of {plural}; default: all")
    add("--patience", type=float, default=0, help=f"seconds a {case} to wait for a quiet machine")
    add("--quick", action="store_true", help="few and small rounds: no figures to quote")
    add("--out", type=Path, help="folder for the results; default: scripts/results, or none")
    options = parser.parse_args()
    if options.quick:
        options.rows, options.repeats, options.seconds = 2 * BATCH, 2, 0.05
    elif options.out is None and not options.only:
        options.out = RESULTS
    options.rows = max(2, options.rows // BATCH) * BATCH
    return options


def save(result: dict[str, Any], path: Path) -> None:
    """Write results as JSON, lists of numbers on one line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(result, indent=1)
    path.write_text(re.sub(r"\[[^][{}]*\]", lambda found: " ".join(found[0].split()), text) + "\n")


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
