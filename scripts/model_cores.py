"""What 1 to 128 threads would do to a reader's batches, by a simulation with measured constants.

    python scripts/model_cores.py --measure      # constants, and readers of 1 and 2 threads
    python scripts/model_cores.py                # computes, from what was measured last

Each thread has a core of its own, and the loop one more, with nothing else to do. Threads work as
in `h5async/core/src/queue.c`. Memory passes `BUS` bytes a second in all, of which a byte of a batch
takes two. What limits is what gains most if it is made twice as fast (`prefetch`:
twice as large).
Not simulated: the system's page cache, NUMA, storage, GPUs.
"""

from __future__ import annotations

import argparse
import gc
import heapq
import itertools
import json
import statistics
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from bench_common import RESULTS, ROW, header, make_images, save

from h5async import AsyncReader

THREADS = 1, 2, 4, 8, 16, 32, 64, 128
PREFETCH = 2, 4
BUS = 200e9  # eight channels of DDR4-3200
LEAST_RANGE, WOKEN, HELPED, QUICK, BLOCK = (
    128 << 10,
    256 << 10,
    3e-4,
    1e-4,
    64,
)  # as in queue.c and kept.c
KEPT = "16 B rows, gzip, window", "the same, first epoch"
PLAIN = "150 kB rows", "16 B rows"
OUT = RESULTS / "model_cores.json"
OPTIONS: dict[str, tuple[int, dict[str, Any]]] = {  # by dataset: rows a batch, how it is read
    "150 kB rows": (128, {"shuffle": "full"}),
    "150 kB rows, gzip": (128, {"shuffle": "full"}),
    "16 B rows": (4096, {"shuffle": "full"}),
    "16 B rows, gzip, window": (4096, {"shuffle": "window", "window_bytes": 2 << 20}),
    "the same, first epoch": (4096, {"shuffle": "window", "window_bytes": 2 << 20}),
}


@dataclass
class Case:
    """Seconds that things take in a batch, or once; `bus`: for its bytes to pass memory."""

    plan: float
    read: float
    step: float  # the loop's
    signal: float
    wake: float
    items: int
    nbytes: int
    new: float  # chunks that are kept for the first time
    kept: bool
    bus: float = 0
    # Under a lock, as builds of the core that time each lock have found: the queue's; 64 kept
    # chunks that are looked up and given back; a chunk that is new. Assumed: the way to a core.
    held: float = 100e-9
    looked_up: float = 1.5e-6
    new_kept: float = 2e-6
    pass_lock: float = 100e-9


class Lock:
    """Who holds it, held it last, and waits for it."""

    def __init__(self) -> None:
        self.owner: Any = None
        self.last: Any = None
        self.queue: deque[Any] = deque()


@dataclass
class Job:
    """A batch, and how many items are left of it."""

    serial: int
    left: int
    state: str = "to plan"
    under_way: int = 0


class Simulation:
    """Threads and the loop, as generators of what they wait for: seconds, locks, work."""

    def __init__(self, case: Case, threads: int, prefetch: int, cores: int) -> None:
        self.case, self.threads, self.prefetch, self.cores = case, threads, prefetch, cores
        self.now = self.bus = 0.0
        self.events: list[Any] = []
        self.ticks = itertools.count()
        self.lock, self.kept = Lock(), Lock()
        self.jobs: dict[int, Job] = {}
        self.idle: list[Any] = []
        self.spinner: Any = None
        self.consumer: Any = None  # where it waits
        self.helps = case.plan + case.read <= HELPED

    def _later(self, process: Any, delay: float) -> None:
        heapq.heappush(self.events, (self.now + delay, next(self.ticks), process))

    def run(self, batches: int) -> float:
        """Return the seconds of a batch, of those after the first few."""
        self.ends: list[float] = []
        for process in [self._loop(batches), *(self._thread() for _ in range(self.threads))]:
            self._later(process, 0)
        while len(self.ends) < batches:
            self.now, _, process = heapq.heappop(self.events)
            self._go_on(process)
        return (self.ends[-1] - self.ends[batches // 4]) / (batches - 1 - batches // 4)

    def _go_on(self, process: Any) -> None:
        what = next(process, None)
        if isinstance(what, float):
            self._later(process, what)
        elif isinstance(what, Lock) and what.owner is None:
            what.owner = process
            self._later(process, self.case.pass_lock if what.last not in (None, process) else 0)
        elif isinstance(what, Lock):
            what.queue.append(process)
        elif what == "idle" and self.spinner is None and self._awake() < self.cores:
            self.spinner = process
        elif what == "idle":
            self.idle.append(process)
        elif what == "wait":
            self.consumer = process

    def _free(self, lock: Lock) -> None:
        lock.last, lock.owner = lock.owner, lock.queue.popleft() if lock.queue else None
        if lock.owner is not None:
            self._later(lock.owner, self.case.pass_lock)

    def _awake(self) -> int:
        return self.threads - len(self.idle)

    def _offer(self, is_quick: bool = False) -> Iterator[float]:
        """Have the thread that looks for work find some, or wake one."""
        busy = self._awake() - (self.spinner is not None) + self.helps
        if self.spinner is not None:
            self._later(self.spinner, self.case.pass_lock)
            self.spinner = None
        elif self.idle and (not self._awake() or (busy < self.cores and not is_quick)):
            self._later(self.idle.pop(), self.case.wake)
            yield self.case.signal

    def _open_job(self) -> Job | None:
        jobs = (j for j in self.jobs.values() if j.state == "to plan" or j.left)
        return min((j for j in jobs if j.state != "in plan"), key=lambda j: j.serial, default=None)

    def _advance(self, job: Job) -> Iterator[Any]:
        """Plan a batch, or read a range of it; holds the lock, but not meanwhile."""
        case = self.case
        if job.state == "to plan":
            job.state = "in plan"
            self._free(self.lock)
            yield case.plan
            yield self.lock
            yield case.held
            job.state = "to read"
            if self.helps:  # who waits helps to read it
                self._wake_loop()
        size = case.nbytes / case.items
        readers = min(self.threads + self.helps, self.cores)
        wanted = job.left * size / (2 * readers if readers > 1 else 1)
        count = min(job.left, max(1, -int(-max(wanted, LEAST_RANGE) // size)))
        if count:
            job.left -= count
            job.under_way += 1
            self._free(self.lock)
            if job.left * size >= WOKEN:
                yield from self._offer()
            yield from self._read(count)
            yield self.lock
            yield case.held
            job.under_way -= 1
        if job.state == "to read" and not job.left and not job.under_way:
            job.state = "ready"
            self._wake_loop()

    def _wake_loop(self) -> None:
        if self.consumer is not None:
            self._later(self.consumer, self.case.pass_lock if self.helps else self.case.wake)
            self.consumer = None

    def _read(self, count: int) -> Iterator[Any]:
        case, share = self.case, count / self.case.items
        self.bus = max(self.bus, self.now) + share * case.bus
        end = self.now + share * case.read  # if no lock is waited for
        held = (
            [case.looked_up * count / BLOCK, share * case.new * case.new_kept] if case.kept else []
        )
        for seconds in held:
            began = self.now
            yield self.kept
            end += self.now - began
            yield seconds
            self._free(self.kept)
        yield max(end, self.bus) - self.now

    def _thread(self) -> Iterator[Any]:
        yield self.lock
        while True:
            yield self.case.held
            if job := self._open_job():
                yield from self._advance(job)
                continue
            self._free(self.lock)
            yield "idle"
            yield self.lock

    def _loop(self, batches: int) -> Iterator[Any]:
        submitted, gap, since = 0, 1e-3, 0.0
        for serial in range(batches):
            self.jobs.pop(serial - 1, None)
            for one in range(submitted, serial + self.prefetch):
                yield self.lock
                yield self.case.held
                self.jobs[one] = Job(one, self.case.items)
                self._free(self.lock)
                gap, since = (3 * gap + min(self.now - since, 1e-3)) / 4, self.now
                yield from self._offer(gap <= QUICK)
            submitted = serial + self.prefetch
            job = self.jobs[serial]
            while job.state != "ready":
                yield self.lock
                yield self.case.held
                if self.helps and (job.state == "to plan" or (job.state == "to read" and job.left)):
                    yield from self._advance(job)
                self._free(self.lock)
                if job.state != "ready" and not (
                    self.helps and job.state == "to read" and job.left
                ):
                    yield "wait"
            yield self.case.step
            self.ends.append(self.now)


def time_wake(_: int) -> tuple[float, float]:
    """Return how long it takes to signal to a thread, and until it is awake."""
    lock, woken = threading.Lock(), []
    lock.acquire()
    thread = threading.Thread(target=lambda: (lock.acquire(), woken.append(time.perf_counter())))
    thread.start()
    time.sleep(0.001)
    begin = time.perf_counter()
    lock.release()
    signalled = time.perf_counter()
    thread.join()
    return signalled - begin, woken[0] - begin


def bus_speed(nbytes: int = 64 << 20) -> float:
    """Return the bytes a second that two threads read and write."""
    pairs = [np.ones((2, nbytes), np.uint8) for _ in range(2)]
    speeds = []
    for _ in range(3):
        threads = [threading.Thread(target=np.copyto, args=tuple(one)) for one in pairs]
        begin = time.perf_counter()
        for one in threads:
            one.start()
        for one in threads:
            one.join()
        speeds.append(4 * nbytes / (time.perf_counter() - begin))
    return max(speeds)


def read(file: Path, field: str, threads: int, batch: int = 0) -> dict[str, Any]:
    """Return what batches of a dataset take, by a reader of so many threads."""
    rows, options = OPTIONS[field]
    options = {"batch_size": batch or rows, "num_threads": threads, "device": "cpu", **options}
    with AsyncReader(hdf5_path=file, data_field=field, labels_field=None, **options) as reader:
        is_first = "first" in field
        for _ in itertools.islice(reader, 0 if is_first else 200):
            pass
        before, count, begin = reader.stats(), 0, time.perf_counter()
        while (taken := time.perf_counter() - begin) < 0.5 and not (is_first and count):
            count += sum(1 for _ in reader)
        done = reader.stats(since=before)
        plans = [x for x in gc.get_objects() if type(x).__name__ == "BatchPlan" and x.num_items]
        seconds = {stage: x / count for stage, x in done.stage_seconds.items()}
        return {
            "wall": taken / count,
            "plan": seconds["plan"],
            "read": seconds["read"] + seconds["decode"] + seconds["place"],
            "items": max(x.num_items for x in plans),
            "nbytes": max(x.nbytes for x in plans),
            "new": done.decoded_chunks / count,
        }


def measure() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "data.h5"
        with h5py.File(file, "w") as made:
            images, numbers = make_images(256), np.arange(1 << 20).reshape(-1, 2)
            for field in OPTIONS:
                data, chunk = (images, (1, *ROW)) if "150" in field else (numbers, (256, 2))
                how = {"chunks": chunk, "compression": "gzip"} if field not in PLAIN else {}
                made.create_dataset(field, data=data, **how)
        one = read(file, "16 B rows", 1, batch=1)
        step = one["wall"] - one["plan"] - one["read"]
        cases = {x: [read(file, x, 1), read(file, x, 2)] for x in OPTIONS}
    signal, wake = (statistics.median(x) for x in zip(*map(time_wake, range(101)), strict=True))
    once = {"step": step, "signal": signal, "wake": wake}
    return {**header(), "once": once, "bus": bus_speed(), "cases": cases}


def case_of(measured: dict[str, Any], field: str, bus: float) -> Case:
    one = {k: v for k, v in measured["cases"][field][0].items() if k != "wall"}
    data_nbytes = OPTIONS[field][0] * (16 if OPTIONS[field][0] == 4096 else int(np.prod(ROW)))
    return Case(**one, **measured["once"], kept=field in KEPT, bus=2 * data_nbytes / bus)


def limit_of(case: Case, threads: int, prefetch: int, taken: float) -> str:
    parts = {
        "the plan": ["plan"],
        "reading": ["read"],
        "the loop": ["step"],
        "waking": ["signal", "wake"],
        "memory": ["bus"],
        "the queue's lock": ["held", "pass_lock"],
        "kept chunks' lock": ["looked_up", "new_kept", "pass_lock"],
    }
    faster = {
        part: seconds(replace(case, **{k: getattr(case, k) / 2 for k in keys}), threads, prefetch)
        for part, keys in parts.items()
    }
    faster["prefetch"] = seconds(case, threads, 2 * prefetch)
    best = min(faster, key=lambda part: faster[part])
    return f"{best} ({taken / faster[best]:.2f})"


def seconds(case: Case, threads: int, prefetch: int, cores: int = 0) -> float:
    return Simulation(case, threads, prefetch, cores or threads + 1).run(40)


def compute(measured: dict[str, Any]) -> dict[str, Any]:
    checks, points = [], []
    for field, (rows, _) in OPTIONS.items():
        case = case_of(measured, field, measured["bus"])
        for threads, found in enumerate(measured["cases"][field], 1):
            ratio = found["wall"] / seconds(case, threads, 2, cores=2)
            checks.append({"case": field, "threads": threads, "model_by_measured": round(ratio, 2)})
            print(checks[-1], flush=True)
        case = case_of(measured, field, BUS)
        for prefetch, threads in itertools.product(PREFETCH, THREADS):
            taken = seconds(case, threads, prefetch)
            point = {"case": field, "threads": threads, "prefetch": prefetch}
            point |= {"rows_a_second": round(rows / taken)}
            slow = replace(case, held=5 * case.held, pass_lock=5 * case.pass_lock)
            point |= {"slow_locks": round(taken / seconds(slow, threads, prefetch), 2)}
            points.append({**point, "limit": limit_of(case, threads, prefetch, taken)})
            print(points[-1], flush=True)
    return {"checks": checks, "points": points, "assumed": asdict(case)}


def plot(points: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(2, 3, figsize=(12, 7), layout="constrained")
    panels.flat[-1].set_axis_off()
    for panel, field in zip(panels.flat, OPTIONS, strict=False):
        for prefetch in PREFETCH:
            line = [p for p in points if (p["case"], p["prefetch"]) == (field, prefetch)]
            speeds = [p["rows_a_second"] for p in line]
            panel.plot(THREADS, speeds, marker="o", label=f"prefetch={prefetch}")
        panel.set(xscale="log", yscale="log", title=field, xlabel="threads", xticks=THREADS)
        panel.set_xticklabels(THREADS)
        panel.legend(frameon=False)
        panel.spines[["top", "right"]].set_visible(False)
    figure.supylabel("rows per second, by the model", fontsize="medium")
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--measure", action="store_true", help="readers of 1 and 2 threads; 15 s")
    if parser.parse_args().measure:
        save({"measured": measure()}, OUT)
        return
    measured = json.loads(OUT.read_text())["measured"]
    computed = compute(measured)
    save({"measured": measured, **computed}, OUT)
    plot(computed["points"], OUT.with_suffix(".png"))


if __name__ == "__main__":
    main()
