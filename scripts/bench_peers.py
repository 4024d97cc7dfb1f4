"""Compare AsyncReader with other ways to feed a training loop from the same HDF5 files.

Images of 150 kB, batches of 128, page cache warm, a consumer that does nothing. Each file is
written to a temporary directory, every way's batches are checked against h5py, and then all ways
take turns, and their medians are compared. A run counts from the first request of a way at rest to
its last batch, with nothing asked for beyond; pipelines and worker processes are started before,
and kept. Everybody has two threads or two worker processes, but for loops without any and for
hidefix, which takes all cores. Where a way has several forms, the fastest is found first, for each
file and order.

- h5py: in order, slices into one preallocated batch, by the faster of `read_direct` and
  `batch[...] = ds[a:b]`; shuffled, `batch[j] = ds[i]`, a row at a time.
- PyTorch's DataLoader, without and with two worker processes: the better of `__getitem__` with the
  default collation and `__getitems__`, which reads a batch into one array, adjacent rows as a
  slice. Each process opens the file when it first reads; the workers persist; no pinned memory,
  the default prefetch factor.
- SPDL: a pipeline of one stage that reads a batch as `__getitems__` does, by the better of one and
  two of its two threads (a sample an item is slower). Its source waits for requests, so that it
  is at rest between runs.
- Grain: `MapDataset`, `to_iter_dataset` with two threads: the better of samples, shuffled and
  batched by Grain, and batches read as above. At most 4 batches ahead: the default, 500, would be
  10 GB. Its threads start with each run.
- hidefix, pyfive: in order, slices as they return them, but copied where pyfive merely maps the
  file; shuffled, `batch[j] = ds[i : i + 1]`. pyfive has python-neo-lzf, which it wants for lzf.

"cannot": hidefix or pyfive raises, or gives other values than h5py. A way of which one batch takes
longer than 20 times --seconds is timed once, with one batch, and takes no turns: hidefix reads a
contiguous dataset whole for each slice. Peers that are not installed are left out:
`pip install '.[bench]'` brings them.

On a busy machine, give --patience: rounds in which other processes had more than 5 % of the CPUs
are then repeated, whatever they gave.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import itertools
import logging
import multiprocessing
import os
import queue
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import h5py
import hdf5plugin
import numpy as np
from bench_common import (
    BATCH,
    BATCH_NBYTES,
    ROW,
    ROW_NBYTES,
    Round,
    Run,
    await_quiet,
    batches_in,
    cpu_seconds,
    fastest,
    h5py_runs,
    header,
    make_images,
    parse_case_options,
    reader_run,
    save,
    seconds,
    time_round,
    time_rounds,
    verify,
)
from rich import box
from rich.console import Console
from rich.table import Table

from h5async import AsyncReader

THREADS = 2
AHEAD = 4  # batches that Grain may prefetch
WITHOUT_HDF5 = {"hidefix", "pyfive"}  # which cannot read every file
SLOW = 20  # times --seconds: a batch that takes longer is timed once

Forms = dict[str, Run]


class Layout(NamedTuple):
    """A way to store the images."""

    name: str
    options: dict[str, Any]


def by_rows(rows: int, **options: Any) -> dict[str, Any]:
    return {"chunks": (rows, *ROW), **options}


LAYOUTS = (
    Layout("contiguous", {}),
    Layout("1 row a chunk", by_rows(1)),
    Layout("16 rows a chunk", by_rows(16)),
    Layout("gzip", by_rows(1, compression="gzip")),
    Layout("lzf", by_rows(1, compression="lzf")),
    Layout("zstd", by_rows(1, **hdf5plugin.Zstd())),
    Layout("blosc-lz4", by_rows(1, **hdf5plugin.Blosc(cname="lz4"))),
    Layout("bitshuffle-lz4", by_rows(1, **hdf5plugin.Bitshuffle(cname="lz4"))),
)


class Case(NamedTuple):
    """One file in one order; a peer closes what it opens with the stack."""

    stack: contextlib.ExitStack
    path: Path
    data: h5py.Dataset
    orders: np.ndarray
    shuffle: bool


def write_file(path: Path, layout: Layout, images: np.ndarray) -> float:
    """Write the images to disk; return decoded bytes by stored bytes."""
    with h5py.File(path, "w") as file:
        dataset = file.create_dataset("data", images.shape, np.uint8, **layout.options)
        for start in range(0, len(images), BATCH):
            dataset[start : start + BATCH] = images[start : start + BATCH]
        file.flush()
        ratio = images.nbytes / dataset.id.get_storage_size()
    with path.open("rb") as written:
        os.fsync(written.fileno())  # nothing is to be written back while something is timed
    return ratio


def read_batch(data: h5py.Dataset, order: Sequence[int]) -> np.ndarray:
    """Return the samples in memory of their own, as a loader that gives batches away has to."""
    if list(order) == list(range(order[0], order[0] + len(order))):
        return data[order[0] : order[0] + len(order)]
    batch = np.empty((len(order), *data.shape[1:]), data.dtype)
    for j, i in enumerate(order):
        batch[j] = data[i]
    return batch


def open_h5py(case: Case) -> Forms:
    return h5py_runs(case.data, case.orders, case.shuffle)


class Samples:
    """What a DataLoader reads sample by sample; the file is opened by the process that reads."""

    def __init__(self, path: Path, count: int) -> None:
        self.path, self.count = path, count
        self.file: h5py.File | None = None

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> np.ndarray:
        return self.opened()[i]

    def opened(self) -> h5py.Dataset:
        """Return the dataset, of a file that this process opened."""
        if self.file is None:
            self.file = h5py.File(self.path)
            self.data = self.file["data"]
        return self.data

    def close(self) -> None:
        """Close the file, if this process opened it."""
        if self.file is not None:
            self.file.close()


class Batches(Samples):
    """What a DataLoader reads batch by batch."""

    def __getitems__(self, order: list[int]) -> np.ndarray:
        return read_batch(self.opened(), order)


class Turns:
    """A batch sampler that gives so many batches a run."""

    def __init__(self, orders: np.ndarray) -> None:
        self.orders, self.batches = orders.tolist(), 1

    def __iter__(self) -> Iterator[list[int]]:
        return itertools.islice(itertools.cycle(self.orders), self.batches)


def open_data_loader(workers: int, case: Case) -> Forms:
    import torch

    count = case.orders.size
    return {
        "__getitem__": data_loader_run(case, Samples(case.path, count), workers, None),
        "__getitems__": data_loader_run(case, Batches(case.path, count), workers, torch.from_numpy),
    }


def data_loader_run(
    case: Case, dataset: Samples, workers: int, collate: Callable[[Any], Any] | None
) -> Run:
    from torch.utils.data import DataLoader

    turns = Turns(case.orders)
    options: dict[str, Any] = {}
    if workers:
        # The threads of this process make it no parent to fork from.
        options = {"persistent_workers": True, "multiprocessing_context": "forkserver"}
    loader = DataLoader(
        dataset, batch_sampler=turns, num_workers=workers, collate_fn=collate, **options
    )
    held = [loader]
    case.stack.callback(dataset.close)
    case.stack.callback(held.clear)  # which ends the workers
    del loader

    def run(batches: int) -> tuple[np.ndarray, np.ndarray]:
        turns.batches = batches
        for values in held[0]:  # noqa: B007
            pass
        return case.orders[(batches - 1) % len(case.orders)], values.numpy()

    return run


def open_spdl(case: Case) -> Forms:
    return {
        "1 batch at a time": spdl_run(case, 1),
        f"{THREADS} batches at a time": spdl_run(case, THREADS),
    }


def spdl_run(case: Case, concurrency: int) -> Run:
    from spdl.pipeline import PipelineBuilder

    requests: queue.SimpleQueue[list[int] | None] = queue.SimpleQueue()
    pipeline = (
        PipelineBuilder()
        .add_source(iter(requests.get, None))
        .pipe(partial(read_batch, case.data), concurrency=concurrency, output_order="input")
        .add_sink(THREADS)
        .build(num_threads=THREADS, use_thread_output_queue=True)
    )
    case.stack.enter_context(pipeline.auto_stop())
    case.stack.callback(requests.put, None)
    endless = itertools.cycle(case.orders)

    def run(batches: int) -> tuple[np.ndarray, np.ndarray]:
        for order in itertools.islice(endless, batches):
            requests.put(order.tolist())
        for _ in range(batches):
            values = pipeline.get_item()
        return order, values

    return run


class Source:
    """What Grain reads sample by sample."""

    def __init__(self, data: h5py.Dataset) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, i: int) -> np.ndarray:
        return self.data[i]


def open_grain(case: Case) -> Forms:
    logging.getLogger("absl").setLevel(logging.ERROR)  # JAX is not needed here
    import grain

    samples, numbers = grain.MapDataset.source(Source(case.data)), grain.MapDataset.range
    orders = case.orders
    if case.shuffle:
        samples = samples.shuffle(seed=1)
        orders = np.array(list(numbers(case.orders.size).shuffle(seed=1))).reshape(-1, BATCH)
    batches = grain.MapDataset.source(case.orders.tolist()).map(partial(read_batch, case.data))
    return {
        "a sample each": grain_run(samples.batch(BATCH), orders),
        "a batch each": grain_run(batches, case.orders),
    }


def grain_run(dataset: Any, orders: np.ndarray) -> Run:
    import grain

    options = grain.ReadOptions(num_threads=THREADS, prefetch_buffer_size=AHEAD)
    endless = dataset.repeat(reseed_each_epoch=False)

    def run(batches: int) -> tuple[np.ndarray, np.ndarray]:
        for values in endless[:batches].to_iter_dataset(options):  # noqa: B007
            pass
        return orders[(batches - 1) % len(orders)], values

    return run


def open_hidefix(case: Case) -> Forms:
    import hidefix

    data = hidefix.Index(str(case.path)).dataset("data")
    return {"slices": slices_run(case, lambda start, stop: data[slice(start, stop),], False)}


def open_pyfive(case: Case) -> Forms:
    import pyfive

    data = case.stack.enter_context(pyfive.File(str(case.path)))["data"]
    copy = case.data.chunks is None
    return {"slices": slices_run(case, lambda start, stop: data[start:stop], copy)}


def slices_run(case: Case, read: Callable[[int, int], np.ndarray], copy: bool) -> Run:
    batch = np.ones((BATCH, *ROW), np.uint8)
    endless = itertools.cycle(case.orders)

    def rows(order: np.ndarray) -> np.ndarray:
        for j, i in enumerate(order.tolist()):
            batch[j] = read(i, i + 1)
        return batch

    def adjacent(order: np.ndarray) -> np.ndarray:
        values = read(int(order[0]), int(order[0]) + BATCH)
        if copy:
            batch[...] = values
        return batch if copy else values

    def run(batches: int) -> tuple[np.ndarray, np.ndarray]:
        for order in itertools.islice(endless, batches):
            values = rows(order) if case.shuffle else adjacent(order)
        return order, values

    return run


class Peer(NamedTuple):
    """Another way to read: the package that it needs, and what opens all its forms."""

    name: str
    package: str
    open: Callable[[Case], Forms]


PEERS = (
    Peer("h5py", "h5py", open_h5py),
    Peer("DataLoader, 0 workers", "torch", partial(open_data_loader, 0)),
    Peer("DataLoader, 2 workers", "torch", partial(open_data_loader, THREADS)),
    Peer("SPDL", "spdl", open_spdl),
    Peer("Grain", "grain", open_grain),
    Peer("hidefix", "hidefix", open_hidefix),
    Peer("pyfive", "pyfive", open_pyfive),
)


def installed(console: Console) -> tuple[Peer, ...]:
    """Return the peers that are here, and name the others."""
    found = tuple(peer for peer in PEERS if importlib.util.find_spec(peer.package))
    for peer in PEERS:
        if peer not in found:
            line = f"{peer.name}: {peer.package} is not installed (pip install '.[bench]')"
            console.print(line, markup=False)
    return found


def open_reader(case: Case, truth: np.ndarray) -> Run:
    """Return the reader's way, after an epoch that is checked whole."""
    reader = case.stack.enter_context(
        AsyncReader(
            hdf5_path=case.path,
            labels_field=None,
            batch_size=BATCH,
            shuffle=case.shuffle,
            num_threads=THREADS,
            device="cpu",
        )
    )
    run = reader_run(reader)
    if verify([run], truth, [1] * len(reader)) != len(truth):
        raise AssertionError("the reader leaves samples out")
    if reader.fallback_reads:
        raise AssertionError(f"h5py was used: {reader.layouts['data'].fallback_reason}")
    return run


class Opened(NamedTuple):
    """What of the peers takes turns, the GB/s of the slow ones, why others cannot read."""

    forms: dict[str, Forms]
    slow: dict[str, float]
    cannot: dict[str, str]


def open_peers(
    case: Case, peers: tuple[Peer, ...], truth: np.ndarray, slow_seconds: float
) -> Opened:
    opened = Opened({}, {}, {})
    for peer in peers:
        try:
            forms = peer.open(case)
            if taken := slow_batch(forms, truth, slow_seconds):
                opened.slow[peer.name] = BATCH_NBYTES / 1e9 / taken
            else:
                verify(forms.values(), truth, [3])
                opened.forms[peer.name] = forms
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic of Rust is no Exception
            if peer.package not in WITHOUT_HDF5:
                raise
            opened.cannot[peer.name] = (str(error).splitlines() or [repr(error)])[0][:200]
    return opened


def slow_batch(forms: Forms, truth: np.ndarray, slow_seconds: float) -> float:
    """Check a batch of each form; return the least seconds of another, or 0 if that is not slow."""
    start = time.perf_counter()
    verify(forms.values(), truth, [1])
    if time.perf_counter() - start < slow_seconds:
        return 0.0
    taken = min(seconds(run, 1) for run in forms.values())
    return taken if taken > slow_seconds else 0.0


def worker_seconds() -> float:
    """Return CPU time so far of the worker processes (Linux; else 0)."""
    ticks = 0
    for worker in multiprocessing.active_children():
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{worker.pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def time_turns(runs: dict[str, Run], batches: dict[str, int]) -> Round:
    """Time a round, in which the worker processes do not count as others."""
    workers, everything = worker_seconds(), cpu_seconds()[2]
    turns = time_round(runs, batches)
    workers, everything = worker_seconds() - workers, cpu_seconds()[2] - everything
    return turns._replace(others=max(0.0, turns.others - workers / max(everything, 1.0)))


def batches_about(run: Run, duration: float) -> int:
    """Return how many batches take about so many seconds, one at least."""
    return 1 if seconds(run, 1) > duration / 2 else batches_in(run, duration)


def bench(
    path: Path,
    layout: Layout,
    shuffle: bool,
    truth: np.ndarray,
    peers: tuple[Peer, ...],
    options: argparse.Namespace,
) -> dict[str, Any]:
    """Verify, then time all ways on one file in one order; return the figures."""
    deadline = time.monotonic() + options.patience
    order = np.arange(len(truth))
    if shuffle:
        order = np.random.default_rng(1).permutation(order)
    with contextlib.ExitStack() as stack:
        data = stack.enter_context(h5py.File(path))["data"]
        case = Case(stack, path, data, order.reshape(-1, BATCH), shuffle)
        opened = open_peers(case, peers, truth, SLOW * options.seconds)
        used = {"reader": open_reader(case, truth)}
        await_quiet(deadline)
        forms = {way: fastest(runs, options.seconds / 4) for way, runs in opened.forms.items()}
        used |= {way: opened.forms[way][form] for way, form in forms.items()}
        batches = {way: batches_about(run, options.seconds) for way, run in used.items()}
        rounds = time_rounds(used, batches, options.repeats, deadline, time_turns)
    if multiprocessing.active_children():
        raise AssertionError("worker processes are left")
    speeds = {way: median(r.speed[way] for r in rounds) for way in used} | opened.slow
    return {
        "layout": layout.name,
        "order": "shuffled" if shuffle else "in order",
        "gb_per_s": {way: round(value, 4) for way, value in speeds.items()},
        "gb_per_s_rounds": {way: [round(r.speed[way], 4) for r in rounds] for way in used},
        "cpu_share_of_others": [round(r.others, 3) for r in rounds],
        "batches_per_round": batches,
        "forms": forms,
        "timed_once": list(opened.slow),
        "cannot": opened.cannot,
        "reader_by": {
            peer.name: round(speeds["reader"] / speeds[peer.name], 3)
            for peer in peers
            if peer.name in speeds
        },
    }


def multiple(case: dict[str, Any], peer: str) -> str:
    """Return the reader's speed as a multiple of a peer's, for people."""
    if peer in case["cannot"]:
        return "cannot"
    ratio = case["reader_by"][peer]
    return f"{ratio:.2f}" if ratio < 9.995 else f"{ratio:.1f}" if ratio < 99.95 else f"{ratio:.0f}"


def table(cases: list[dict[str, Any]], peers: tuple[Peer, ...]) -> Table:
    grid = Table(title="reader's speed, times that of each peer; medians", box=box.SIMPLE_HEAD)
    for name in ("file", "order"):
        grid.add_column(name, no_wrap=True)
    for name in ("reader GB/s", *(peer.name for peer in peers)):
        grid.add_column(name, justify="right")
    for case in cases:
        grid.add_row(
            case["layout"],
            case["order"],
            f"{case['gb_per_s']['reader']:.3g}",
            *(multiple(case, peer.name) for peer in peers),
        )
    return grid


def plot(cases: list[dict[str, Any]], peers: tuple[Peer, ...], path: Path) -> None:
    """Draw a map of ratios for each order: files down, peers across."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    layouts = list(dict.fromkeys(case["layout"] for case in cases))
    figure, axes = plt.subplots(1, 2, figsize=(13, 5), sharey=True, layout="constrained")
    for ax, order in zip(axes, ("in order", "shuffled"), strict=True):
        draw(ax, [case for case in cases if case["order"] == order], peers)
        ax.set_title(order, fontsize=11, pad=34)
    axes[0].set_yticks(range(len(layouts)), layouts)
    figure.suptitle(
        "AsyncReader's speed, times that of each peer\nbatches of 128 images of 150 kB, one a chunk"
        " where compressed; page cache warm; 2 threads or workers"
    )
    figure.savefig(path, dpi=120)
    plt.close(figure)


def draw(ax: Any, cases: list[dict[str, Any]], peers: tuple[Peer, ...]) -> None:
    """Draw one map: blue where the reader is faster, red where the peer is."""
    import matplotlib

    names = [peer.name for peer in peers]
    ratios = [[case["reader_by"].get(name, np.nan) for name in names] for case in cases]
    speeds = np.full((len(cases), 1), np.nan)
    colors = matplotlib.colormaps["RdBu"].with_extremes(bad="#eeeeee")
    shades = np.hstack([speeds, np.clip(np.log10(ratios), -1, 1)])
    ax.imshow(shades, cmap=colors, vmin=-1.4, vmax=1.4, aspect="auto")
    for y, case in enumerate(cases):
        label = f"{case['gb_per_s']['reader']:.2g} GB/s"
        ax.text(0, y, label, ha="center", va="center", fontsize=9)
        for x, name in enumerate(names, 1):
            faint = name in case["cannot"]
            dark = not faint and abs(shades[y, x]) > 0.85
            color = "#888888" if faint else "white" if dark else "black"
            text = multiple(case, name)
            ax.text(x, y, text, ha="center", va="center", fontsize=9, color=color)
    heads = ["AsyncReader", *(name.replace(", ", "\n") for name in names)]
    ax.set_xticks(range(len(heads)), heads, fontsize=8)
    ax.xaxis.tick_top()
    ax.set_xticks(np.arange(0.5, len(heads) - 1), minor=True)
    ax.set_yticks(np.arange(0.5, len(cases) - 1), minor=True)
    ax.grid(which="minor", color="white", lw=1.5)
    ax.tick_params(which="both", length=0)
    ax.spines[:].set_visible(False)


def all_cases(
    peers: tuple[Peer, ...], options: argparse.Namespace, console: Console
) -> Iterator[dict[str, Any]]:
    images = make_images(options.rows)
    with tempfile.TemporaryDirectory(prefix="bench_peers-") as directory:
        for layout in LAYOUTS:
            if options.only and layout.name not in options.only:
                continue
            path = Path(directory) / "images.h5"
            with console.status(f"{layout.name}: writing"):
                ratio = write_file(path, layout, images)
            with h5py.File(path) as file:
                truth = file["data"][:]
            for shuffle in (False, True):
                with console.status(f"{layout.name}: timing"):
                    case = bench(path, layout, shuffle, truth, peers, options)
                yield {**case, "compress_ratio": round(ratio, 2)}
            path.unlink()


def main() -> None:
    options = parse_case_options(__doc__, 4096, "files", "file and order")
    console = Console(width=max(120, Console().width))
    peers = installed(console)
    multiprocessing.set_forkserver_preload(["torch", "h5async", "hdf5plugin", "rich.table"])
    packages = {peer.package for peer in peers} - {"h5py"}
    result = header()
    result["versions"] |= {"hdf5plugin": hdf5plugin.version}
    result["versions"] |= {name: importlib.metadata.version(name) for name in sorted(packages)}
    result |= {
        "rows": options.rows,
        "row_nbytes": ROW_NBYTES,
        "batch_size": BATCH,
        "threads": THREADS,
    }
    cases = result["cases"] = list(all_cases(peers, options, console))
    console.print(table(cases, peers))
    if options.out is not None:
        save(result, options.out / "bench_peers.json")
        plot(cases, peers, options.out / "bench_peers.png")


if __name__ == "__main__":
    main()
