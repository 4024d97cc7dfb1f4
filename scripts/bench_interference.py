"""Measure how much a training loop and the threads that read for it disturb each other.

Images of 150 kB, one a chunk, batches of 128, shuffled, page cache warm. The main thread runs steps
of its own, which do not touch the images, and takes batches between two steps. Each way to deliver
batches has a process of its own for each file; loops and demands take turns in it.

Loops: pure Python, which gives the GIL up only when another thread has waited for it; a training
step of an MLP, by PyTorch on one thread; tiny tensors, some hundred PyTorch operations on 32
elements each, where launching is all the work.

Demands: 2,000 and 5,000 images a second: a batch is due every 64 or 25.6 ms by the clock. If it is
not ready then, the loop blocks until it is, and all later ones are due that much later. Flat out:
every half millisecond the loop takes a batch if one is ready, and never blocks; the demand is then
what the bare decoder gives.

Ways:

- core: AsyncReader.
- helper: the same in a helper process, workers="process".
- h5py threads: two threads that fill preallocated batches by `batch[j] = ds[i]`, two batches ahead.
- DataLoader: that of PyTorch, with one worker process, which does the same in `__getitems__`, into
  shared memory, two batches ahead.

Figures, medians of the repeats:

- demand met: images delivered by images demanded.
- decoder can meet: the same for a bare loop of the decoder in one thread, chunks in memory and
  nothing beside it, at most 1; without a filter, for copies out of a memory map. The other core is
  the loop's. Blocking leaves both cores to the reader, which may thus meet more.
- loop keeps: steps a second while steps are run, by those of the same loop alone just before and
  just after (the reader at rest).
- lost: share of the time that the loop spends in the calls that take a batch; flat out, mostly in
  looking for one.
- main thread: CPU time of the main thread in those calls, for each batch that was ready.

AsyncReader with its core should meet 0.96 of what the decoder can, leave the loop 0.98, and take
60 us of the main thread a batch.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

import h5py
import numpy as np
from bench_common import (
    BATCH,
    RESULTS,
    ROW,
    ROW_NBYTES,
    await_quiet,
    cpu_seconds,
    header,
    make_images,
    row_offsets,
    save,
)
from bench_filters import CASES, Case, Stored, write_file
from rich import box
from rich.console import Console
from rich.table import Table

from h5async import AsyncReader, BatchTimeoutError

OF_DECODER, LOOP_KEEPS, MAIN_US = 0.96, 0.98, 60.0  # what AsyncReader with its core should reach
AHEAD = 2  # batches that h5py threads and DataLoader read ahead
LOOK_SECONDS = 0.0005  # how often the loop looks for a batch, flat out

Step = Callable[[], Any]
DATA = {
    "raw": Case("raw", {}, lambda encoded, out: np.copyto(out, encoded)),
    **{name: case for name in ("zstd", "gzip") for case in CASES if case.name == name},
}
DEMANDS = {"2,000/s": 2000.0, "5,000/s": 5000.0, "flat out": None}
COLORS = {
    "core": "#1f77b4",
    "helper": "#9467bd",
    "h5py threads": "#ff7f0e",
    "DataLoader": "#2ca02c",
}


def python_steps() -> Step:
    counts = dict.fromkeys(range(64), 1)

    def step() -> None:
        for i in range(500):
            key = i & 63
            counts[key] = (counts[key] * 31 + i) & 0xFFFF

    return step


def mlp_steps() -> Step:
    import torch

    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(256, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    features, labels = torch.randn(256, 256), torch.randint(10, (256,))

    def step() -> None:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(features), labels).backward()
        optimizer.step()

    return step


def tiny_steps() -> Step:
    import torch

    a, b, c = (torch.linspace(0, 1, 32) for _ in range(3))

    def step() -> None:
        x = a
        for _ in range(32):
            x = (x * b + c) * 0.5

    return step


LOOPS = {"pure Python": python_steps, "MLP step": mlp_steps, "tiny tensors": tiny_steps}
BY_TORCH = {"MLP step", "tiny tensors", "DataLoader"}


class Way(ABC):
    """A way to deliver batches: one is in use, `ahead` others are on their way."""

    ahead = AHEAD
    last: tuple[np.ndarray, np.ndarray]  # of the batch in use: sample numbers, values

    def begin(self) -> None:
        """Ask for the first batches."""
        for _ in range(self.ahead):
            self._ask()

    def take(self, blocks: bool) -> bool:
        """Take the next batch and ask for one more; unless `blocks`, only if it is ready."""
        if not self._take(blocks):
            return False
        self._ask()
        return True

    def rest(self) -> None:
        """Return when nothing is on its way; the last batch is no longer valid."""
        for _ in range(self.ahead):
            self._take(True)

    @abstractmethod
    def _ask(self) -> None: ...

    @abstractmethod
    def _take(self, blocks: bool) -> bool: ...


class Nothing(Way):
    """A loop alone: it takes nothing, at once."""

    def _ask(self) -> None:
        pass

    def _take(self, blocks: bool) -> bool:
        return True


class ReaderWay(Way):
    """AsyncReader, by the low-level pair, all slots asked for."""

    def __init__(self, reader: AsyncReader) -> None:
        self._reader = reader
        self.ahead = reader.config.prefetch

    def _ask(self) -> None:
        self._reader.fetch_data()

    def _take(self, blocks: bool) -> bool:
        try:
            batch = self._reader.get_next_batch(None if blocks else 0)
        except BatchTimeoutError:
            return False
        self.last = batch.index, batch.data
        return True


class ThreadsWay(Way):
    """Threads that read by h5py, each a batch of its own."""

    def __init__(self, data: h5py.Dataset, orders: np.ndarray, pool: ThreadPoolExecutor) -> None:
        self._data, self._pool = data, pool
        slots = [np.ones((BATCH, *ROW), np.uint8) for _ in range(AHEAD + 1)]
        self._work = zip(itertools.cycle(orders), itertools.cycle(slots), strict=False)
        self._asked: deque[Future[tuple[np.ndarray, np.ndarray]]] = deque()

    def _ask(self) -> None:
        self._asked.append(self._pool.submit(self._read, *next(self._work)))

    def _take(self, blocks: bool) -> bool:
        if not (blocks or self._asked[0].done()):
            return False
        self.last = self._asked.popleft().result()
        return True

    def _read(self, order: np.ndarray, slot: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        for j, i in enumerate(order.tolist()):
            slot[j] = self._data[i]
        return order, slot


class Rows:
    """The rows of a file, for a DataLoader, whose worker opens it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._data: h5py.Dataset | None = None

    def __getitems__(self, rows: list[int]) -> Any:
        """Return a batch as a tensor."""
        import torch

        if self._data is None:
            self._data = h5py.File(self._path)["data"]
        # In shared memory at once, as the loader's own collating does: a copy halves its speed.
        shared = torch.UntypedStorage._new_shared(BATCH * ROW_NBYTES)
        batch = torch.empty(0, dtype=torch.uint8).set_(shared).view(BATCH, *ROW)
        values = batch.numpy()
        for j, i in enumerate(rows):
            values[j] = self._data[i]
        return batch


def as_it_is(batch: Any) -> Any:
    return batch


class LoaderWay(Way):
    """PyTorch's DataLoader with one worker, which begins by itself what it reads ahead."""

    def __init__(self, path: Path, orders: np.ndarray) -> None:
        import torch

        self._orders = itertools.cycle(orders)
        self._batches: Any = iter(
            torch.utils.data.DataLoader(
                Rows(path),
                batch_sampler=itertools.cycle(orders.tolist()),
                collate_fn=as_it_is,
                num_workers=1,
                prefetch_factor=AHEAD,
                persistent_workers=True,
            )
        )
        for _ in range(AHEAD + 1):
            start = time.perf_counter()
            self._take(True)
        self._seconds = time.perf_counter() - start

    def rest(self) -> None:
        """Leave the worker the time it needs; it cannot be asked to stop."""
        time.sleep(0.02 + 1.5 * AHEAD * self._seconds)

    def _ask(self) -> None:
        pass

    def _take(self, blocks: bool) -> bool:
        # The loader has no public way to ask; with one worker, what comes first is the next batch.
        if not blocks and self._batches._data_queue.empty():
            return False
        self.last = next(self._orders), next(self._batches).numpy()
        return True


class Turn(NamedTuple):
    """What a loop did and got in some time; `us`: CPU time for each batch that was ready."""

    images_per_s: float
    steps_per_s: float
    lost: float
    us: float | None


def run_until(due: float, step: Step) -> int:
    """Run steps until it is time, one at least; return how many."""
    for steps in itertools.count(1):
        step()
        if time.perf_counter() >= due:
            return steps
    raise AssertionError


def drive(way: Way, step: Step, demand: str, seconds: float) -> Turn:
    """Run a loop for so many seconds, on to its next batch; flat out, for half more at most."""
    clock, cpu_clock = time.perf_counter, time.thread_time
    images_per_s = DEMANDS[demand]
    blocks = images_per_s is not None
    period = BATCH / images_per_s if blocks else LOOK_SECONDS
    batches = steps = 0
    stepping = taking = elapsed = 0.0
    is_taken, ready = False, []
    start = due = clock()
    while elapsed < (seconds if is_taken else 1.5 * seconds):
        due += period
        began = clock()
        steps += run_until(due, step)
        called, cpu = clock(), cpu_clock()
        if is_taken := way.take(blocks=False):
            ready.append(cpu_clock() - cpu)
        elif blocks:
            is_taken = way.take(blocks=True)
            due += clock() - called
        now = clock()
        stepping += called - began
        taking += now - called
        batches += is_taken
        elapsed = now - start
    us = mean(ready) * 1e6 if ready else None
    return Turn(batches * BATCH / elapsed, steps / stepping, taking / elapsed, us)


def decoder_run(path: Path, data: h5py.Dataset, orders: np.ndarray) -> Callable[[float], float]:
    """Return what tells images a second of the bare decoder in one thread."""
    decode = DATA[path.stem].decode
    assert decode is not None
    if path.stem == "raw":
        mapped = np.memmap(path, np.uint8, "r")
        chunks = [mapped[at : at + ROW_NBYTES] for at in row_offsets(data).tolist()]
    else:
        chunks = Stored.of(data).chunks
    slot = np.ones((BATCH, ROW_NBYTES), np.uint8)
    endless = itertools.cycle(orders)

    def run(seconds: float) -> float:
        start = time.perf_counter()
        for images in itertools.count(BATCH, BATCH):
            for i, row in zip(next(endless), slot, strict=True):
                decode(chunks[i], row)
            if (elapsed := time.perf_counter() - start) >= seconds:
                return images / elapsed
        raise AssertionError

    return run


def open_way(
    stack: contextlib.ExitStack,
    path: Path,
    data: h5py.Dataset,
    orders: np.ndarray,
    options: argparse.Namespace,
) -> Way:
    if options.way == "DataLoader":
        return LoaderWay(path, orders)
    if options.way == "h5py threads":
        return ThreadsWay(data, orders, stack.enter_context(ThreadPoolExecutor(2)))
    threads = {} if options.threads is None else {"num_threads": options.threads}
    reader = stack.enter_context(
        AsyncReader(
            hdf5_path=path,
            labels_field=None,
            batch_size=BATCH,
            shuffle="full",
            device="cpu",
            prefetch=options.prefetch,
            workers="process" if options.way == "helper" else "thread",
            **threads,
        )
    )
    if reason := reader.layouts["data"].fallback_reason:
        raise AssertionError(f"h5py is used: {reason}")
    return ReaderWay(reader)


def measure(way: Way, step: Step, demand: str, seconds: float, truth: np.ndarray) -> Turn:
    """Return a turn of a loop; a third as much before it does not count."""
    way.begin()
    drive(way, step, demand, seconds / 3)
    turn = drive(way, step, demand, seconds)
    way.take(blocks=True)
    index, values = way.last
    if not np.array_equal(values, truth[index]):
        raise AssertionError("a batch is not what was written")
    way.rest()
    return turn


def child(options: argparse.Namespace) -> None:
    """Measure one way on one file; print the figures of each round as a line of JSON."""
    if BY_TORCH.intersection((*options.loops, options.way)):
        import torch

        torch.set_num_threads(1)
    path, truth = options.file, np.load(options.images, mmap_mode="r")
    orders = np.random.default_rng(1).permutation(len(truth)).reshape(-1, BATCH)
    steps = {name: LOOPS[name]() for name in options.loops}
    decoder, rounds = [], []
    with contextlib.ExitStack() as stack:
        data = stack.enter_context(h5py.File(path))["data"]
        run_decoder = decoder_run(path, data, orders)
        way = open_way(stack, path, data, orders, options)
        way.begin()
        way.rest()
        for _ in range(options.repeats):
            await_quiet(time.monotonic() + options.patience)
            decoder.append(run_decoder(options.seconds / 2))
            for loop, step in steps.items():
                before = drive(Nothing(), step, "flat out", options.seconds / 2)
                for demand in options.demands:
                    turn = measure(way, step, demand, options.seconds, truth)
                    after = drive(Nothing(), step, "flat out", options.seconds / 2)
                    alone = mean((before.steps_per_s, after.steps_per_s))
                    rounds.append((loop, demand, turn, alone))
                    before = after
    print(json.dumps({"decoder": decoder, "rounds": rounds}))


def run_child(way: str, path: Path, images: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Return what a child prints, and what share of the CPUs others had meanwhile."""
    command = [sys.executable, __file__, "--child", way, str(path), str(images)]
    for name in ("repeats", "seconds", "patience", "prefetch", "threads"):
        if (value := getattr(options, name)) is not None:
            command += [f"--{name}", str(value)]
    command += ["--loops", *options.loops, "--demands", *options.demands]
    environment = {name: x for name, x in os.environ.items() if name != "H5ASYNC_CORE"}
    before, own_before = cpu_seconds(), sum(os.times()[:4])
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    after, own = cpu_seconds(), sum(os.times()[:4]) - own_before
    had = after[2] - before[2]
    others = max(0.0, after[1] - before[1] - own) / had if had else 0.0
    return {**json.loads(done.stdout), "others": others}


def case_of(
    name: str, way: str, loop: str, demand: str, found: dict[str, Any], decoder: float
) -> dict[str, Any]:
    """Return the figures of one way beside one loop; `decoder`: images a second."""
    rounds = [
        (Turn(*turn), alone) for *key, turn, alone in found["rounds"] if key == [loop, demand]
    ]
    demanded = DEMANDS[demand] or decoder
    met = [turn.images_per_s / demanded for turn, _ in rounds]
    keeps = [turn.steps_per_s / alone for turn, alone in rounds]
    us = [turn.us for turn, _ in rounds if turn.us is not None]
    can_meet = min(1.0, decoder / demanded)
    return {
        "loop": loop,
        "demand": demand,
        "data": name,
        "way": way,
        "demand_met": round(median(met), 4),
        "demand_met_rounds": [round(x, 4) for x in met],
        "decoder_can_meet": round(can_meet, 4),
        "met_by_decoder": round(median(met) / can_meet, 4),
        "loop_keeps": round(median(keeps), 4),
        "loop_keeps_rounds": [round(x, 4) for x in keeps],
        "lost": round(median(turn.lost for turn, _ in rounds), 4),
        "main_us": round(median(us), 1) if us else None,
        "main_us_rounds": [round(x, 1) for x in us],
        "images_per_s": round(median(turn.images_per_s for turn, _ in rounds)),
        "steps_per_s_alone": round(median(alone for _, alone in rounds)),
        "cpu_share_of_others": round(found["others"], 3),
    }


def cases_of(name: str, found: dict[str, Any], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the cases of one file; `found`: what the child of each way printed."""
    decoder = median(x for result in found.values() for x in result["decoder"])
    grid = itertools.product(options.loops, options.demands, found)
    return [
        case_of(name, way, loop, demand, found[way], decoder)
        | {"decoder_images_per_s": round(decoder)}
        for loop, demand, way in grid
    ]


def all_cases(options: argparse.Namespace, console: Console) -> Iterator[dict[str, Any]]:
    images = make_images(options.rows)
    with tempfile.TemporaryDirectory(prefix="bench_interference-") as directory:
        truth = Path(directory) / "images.npy"
        np.save(truth, images)
        for name in options.data:
            path = Path(directory) / f"{name}.h5"
            with console.status(f"{name}: writing"):
                write_file(path, DATA[name], images)
                os.sync()  # nothing is to be written back while something is timed
            found = {}
            for way in options.ways:
                with console.status(f"{name}, {way}: timing"):
                    found[way] = run_child(way, path, truth, options)
            yield from cases_of(name, found, options)
            path.unlink()


def judged(value: float | None, way: str, passes: bool, form: str) -> str:
    """Return a figure for the table, in red or green where a target is set."""
    if value is None:
        return "-"
    if way != "core":
        return format(value, form)
    return f"[{'green' if passes else 'red'}]{value:{form}}[/]"


def table(cases: list[dict[str, Any]], loop: str) -> Table:
    grid = Table(title=f"{loop}, medians", box=box.SIMPLE_HEAD)
    for name in ("demand", "file", "way"):
        grid.add_column(name, no_wrap=True)
    for name in ("demand met", "decoder can", "loop keeps", "lost", "main thread us"):
        grid.add_column(name, justify="right", no_wrap=True)
    for case in cases:
        if case["loop"] != loop:
            continue
        way, met, keeps, us = (case[x] for x in ("way", "demand_met", "loop_keeps", "main_us"))
        grid.add_row(
            case["demand"],
            case["data"],
            way,
            judged(met, way, case["met_by_decoder"] >= OF_DECODER, ".3f"),
            f"{case['decoder_can_meet']:.3f}",
            judged(keeps, way, keeps >= LOOP_KEEPS, ".3f"),
            f"{case['lost']:.3f}",
            judged(us, way, us is not None and us <= MAIN_US, ".0f"),
        )
    return grid


def draw(ax: Any, cases: list[dict[str, Any]], rows: list[tuple[str, str]], figure: str) -> None:
    """Draw a point a way, each a little below the one before."""
    ways = list(dict.fromkeys(case["way"] for case in cases))
    for case in cases:
        way = case["way"]
        y = rows.index((case["demand"], case["data"])) + 0.16 * (ways.index(way) - len(ways) / 2)
        if case[figure] is not None:
            ax.plot(case[figure], y + 0.08, "o", ms=4.5, color=COLORS[way], label=way)
    for y in range(1, len(rows), 2):
        ax.axhspan(y - 0.5, y + 0.5, color="black", alpha=0.05, lw=0)
    ax.set_yticks(range(len(rows)), [f"{demand}, {name}" for demand, name in rows])
    ax.set_ylim(len(rows) - 0.5, -0.5)
    ax.tick_params(axis="y", length=0)
    ax.spines[["top", "right"]].set_visible(False)


def plot(cases: list[dict[str, Any]], path: Path) -> None:
    """Draw a row a demand and file, the targets as lines."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    loops = list(dict.fromkeys(case["loop"] for case in cases))
    rows = list(dict.fromkeys((case["demand"], case["data"]) for case in cases))
    panels = (
        ("met_by_decoder", OF_DECODER, "demand met, of what the decoder can"),
        ("loop_keeps", LOOP_KEEPS, "speed that the loop keeps"),
        ("main_us", MAIN_US, "µs of the main thread a batch"),
    )
    figure, grid = plt.subplots(
        len(loops),
        len(panels),
        figsize=(11, 1.2 + len(loops) * max(1.4, 0.3 + 0.3 * len(rows))),
        sharex="col",
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for axes, loop in zip(grid, loops, strict=True):
        axes[0].set_ylabel(loop, fontweight="bold")
        for ax, (name, target, _) in zip(axes, panels, strict=True):
            draw(ax, [case for case in cases if case["loop"] == loop], rows, name)
            ax.axvline(target, color="#d62728", lw=1.2, zorder=0, label="target of core")
    for ax, (name, _, title) in zip(grid[-1], panels, strict=True):
        ax.set_xlabel(title)
        if name == "main_us":
            ax.set_xscale("log")
            ax.xaxis.set_major_formatter("{x:g}")
        else:
            ax.set_xlim(-0.03, 1.05 * max(1.0, *(case[name] for case in cases)))
    found = [ax.get_legend_handles_labels() for ax in grid.flat]
    handles = {x: h for hs, xs in found for h, x in zip(hs, xs, strict=True)}
    names = [x for x in (*COLORS, "target of core") if x in handles]
    figure.legend(
        [handles[x] for x in names], names, loc="outside lower center", ncols=6, frameon=False
    )
    figure.suptitle("A training loop and its reader: shuffled images of 150 kB, batches of 128")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--rows", type=int, default=1024, help="images a file, 150 kB each")
    add("--repeats", type=int, default=3, help="rounds")
    add("--seconds", type=float, default=0.448, help="of each loop and demand in a round, about")
    add("--patience", type=float, default=0, help="seconds a round may wait for a quiet machine")
    add("--threads", type=int, help="of AsyncReader; default: its own")
    add("--prefetch", type=int, default=2, help="batch slots of AsyncReader")
    for name, choices in (("loops", LOOPS), ("demands", DEMANDS), ("data", DATA), ("ways", COLORS)):
        add(f"--{name}", nargs="+", choices=list(choices), help="only these")
    add("--quick", action="store_true", help="few and short rounds: no figures to quote")
    add(
        "--out",
        type=Path,
        help="folder for the results; default: scripts/results, or, with --quick, none",
    )
    add("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        options.way, (options.file, options.images) = options.child[0], map(Path, options.child[1:])
    elif options.quick:
        options.rows, options.repeats, options.seconds = 2 * BATCH, 1, 0.1
        options.data = options.data or ["zstd"]
        options.demands = options.demands or ["5,000/s", "flat out"]
    elif options.out is None:
        options.out = RESULTS
    for name, choices in (("loops", LOOPS), ("demands", DEMANDS), ("data", DATA), ("ways", COLORS)):
        setattr(options, name, getattr(options, name) or list(choices))
    options.rows = max(2, options.rows // BATCH) * BATCH
    return options


def leave_torch_out(options: argparse.Namespace, console: Console) -> None:
    """Where torch is missing, say what is left out."""
    if importlib.util.find_spec("torch") is not None:
        return
    console.print(
        f"no torch, so without {', '.join(sorted(BY_TORCH))}: pip install '.[bench]'", markup=False
    )
    for name in ("loops", "ways"):
        setattr(options, name, [x for x in getattr(options, name) if x not in BY_TORCH])
    if not (options.loops and options.ways):
        raise SystemExit(1)


def main() -> None:
    options = parse_options()
    if options.child:
        child(options)
        return
    console = Console(width=max(100, Console().width))
    leave_torch_out(options, console)
    packages = [x for x in ("hdf5plugin", "torch") if importlib.util.find_spec(x)]
    result = header()
    result["versions"] |= {x: importlib.metadata.version(x) for x in packages}
    result |= {
        "rows": options.rows,
        "row_nbytes": ROW_NBYTES,
        "batch_size": BATCH,
        "repeats": options.repeats,
        "seconds": options.seconds,
        "threads": options.threads,
        "prefetch": options.prefetch,
        "targets": {"met_by_decoder": OF_DECODER, "loop_keeps": LOOP_KEEPS, "main_us": MAIN_US},
    }
    cases = result["cases"] = list(all_cases(options, console))
    for loop in options.loops:
        console.print(table(cases, loop))
    console.print(
        f"targets of core: {OF_DECODER:g} of what the decoder can meet, the loop keeps"
        f" {LOOP_KEEPS:g}, {MAIN_US:g} us of the main thread a batch"
    )
    if options.out is not None:
        save(result, options.out / "bench_interference.json")
        plot(cases, options.out / "bench_interference.png")


if __name__ == "__main__":
    main()
