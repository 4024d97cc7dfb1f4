"""Measures `workers=N` with a `postprocess` that holds the GIL: against one helper, and PyTorch.

The function augments images of 32x32x3 one by one, in Python and small calls of NumPy: a flip, a
shift, brightness, and normalization, by random numbers. Nearly all of its time it holds the GIL.
Batches are of 128 samples in full shuffle, the page cache is warm, and the loop does nothing. All
ways take turns; a run counts from the first request of a way at rest to its last batch. What counts
is the ratio of the medians.

- thread, process, workers=2: AsyncReader with this option, two threads in all, and `postprocess`.
  Two threads of one process hold each other up by the GIL, so process is measured with one, too.
- DataLoader: PyTorch's, with two persistent worker processes over h5py, by the better of
  `__getitem__`, which reads and augments a sample, and `__getitems__`, which reads a batch into one
  array, and augments that. `prefetch_factor` is the default, 2.

Each way's batches are checked before: the reader's are byte for byte the same with any workers, and
those of the DataLoader have the labels of their order.

On a busy machine, give --patience: rounds in which other processes had more than 5 % of the CPUs
are then repeated. How much they had is written beside the figures.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import h5py
import numpy as np
from bench_common import QUIET, RESULTS, await_quiet, cpu_seconds, header, save
from rich.console import Console

from h5async import AsyncReader

SHAPE = (32, 32, 3)
SHIFT = 4
BATCH = 128
WORKERS = 2
OURS = f"workers={WORKERS}"
READERS: dict[str, dict[str, Any]] = {
    "thread": {"workers": "thread", "num_threads": WORKERS},
    "process": {"workers": "process", "num_threads": WORKERS},
    "process, 1 thread": {"workers": "process", "num_threads": 1},
    OURS: {"workers": WORKERS, "num_threads": WORKERS},
}

Run = Callable[[int], np.ndarray]  # reads so many batches; returns the labels of the last


def augmented(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return an image flipped, shifted, brightened and normalized by chance."""
    if rng.random() < 0.5:
        image = image[:, ::-1]
    image = np.roll(image, rng.integers(-SHIFT, SHIFT + 1, 2), (0, 1)).astype(np.float32)
    image *= 1 + 0.2 * (rng.random() - 0.5)
    image -= image.mean()
    image /= image.std() + 1e-6
    return image


def augment(
    data: np.ndarray, labels: np.ndarray, *, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Augment a batch, an image after the other."""
    made = np.empty(data.shape, np.float32)
    for number, image in enumerate(data):
        made[number] = augmented(image, rng)
    return made, labels


class Samples:
    """What a DataLoader reads sample by sample; the file is opened by the process that reads."""

    def __init__(self, path: Path, count: int) -> None:
        self.path, self.count = path, count
        self.file: h5py.File | None = None

    def __len__(self) -> int:
        return self.count

    def open(self) -> None:
        """Open the file, if this process has not."""
        if self.file is None:
            self.file = h5py.File(self.path)
            self.data, self.labels = self.file["data"], self.file["labels"]
            self.rng = np.random.default_rng()

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        self.open()
        return augmented(self.data[index], self.rng), self.labels[index]


class Batches(Samples):
    """What a DataLoader reads batch by batch."""

    def __getitems__(self, order: list[int]) -> tuple[np.ndarray, np.ndarray]:
        self.open()
        data, labels = np.empty((len(order), *SHAPE), np.uint8), np.empty(len(order), np.int64)
        for place, index in enumerate(order):
            data[place], labels[place] = self.data[index], self.labels[index]
        return augment(data, labels, rng=self.rng)


class Turns:
    """A batch sampler that gives so many batches a run."""

    def __init__(self, orders: np.ndarray) -> None:
        self.orders, self.batches = orders.tolist(), 1

    def __iter__(self) -> Iterator[list[int]]:
        return itertools.islice(itertools.cycle(self.orders), self.batches)


def as_tensors(batch: Any) -> Any:
    import torch

    return tuple(map(torch.from_numpy, batch))


def loader_run(dataset: Samples, orders: np.ndarray, collate: Callable[[Any], Any] | None) -> Run:
    from torch.utils.data import DataLoader

    turns = Turns(orders)
    loader = DataLoader(
        dataset,
        batch_sampler=turns,
        num_workers=WORKERS,
        collate_fn=collate,
        persistent_workers=True,
        # The threads of this process make it no parent to fork from.
        multiprocessing_context="forkserver",
    )

    def run(batches: int) -> np.ndarray:
        turns.batches = batches
        for _, labels in loader:  # noqa: B007
            pass
        found = labels.numpy()
        if not np.array_equal(found, orders[(batches - 1) % len(orders)]):
            raise AssertionError("a batch of the DataLoader is not what was asked for")
        return found

    return run


def reader_run(reader: AsyncReader) -> Run:
    def run(batches: int) -> np.ndarray:
        ahead = min(batches, reader.config.prefetch)
        for _ in range(ahead):
            reader.fetch_data()
        for done in range(1, batches + 1):
            batch = reader.get_next_batch()
            if done + ahead <= batches:
                reader.fetch_data()
        return batch.labels

    return run


def verify(readers: dict[str, AsyncReader]) -> None:
    """Check that all readers give the same bytes for an epoch."""
    (_, first), *others = readers.items()
    truth = [batch.copy() for batch in first]
    for name, reader in others:
        for batch, other in zip(reader, truth, strict=True):
            for array, expected in zip(batch, other, strict=True):
                if array.tobytes() != expected.tobytes():
                    raise AssertionError(f"{name} gives other batches")
    for reader in readers.values():
        reader.reset()  # nothing is read ahead any more


def seconds(run: Run, batches: int) -> float:
    begin = time.perf_counter()
    run(batches)
    return time.perf_counter() - begin


def own_cpu_seconds() -> float:
    """Return CPU time so far of this process and of all below it (Linux; else 0)."""
    return sum(map(_cpu_seconds, _with_children("self")))


def _with_children(pid: str) -> list[str]:
    found = [pid]
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                found += _with_children(child)
    return found


def _cpu_seconds(pid: str) -> float:
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def time_round(runs: dict[str, Run], batches: int) -> tuple[dict[str, float], float]:
    """Return milliseconds a batch of each way, and the share of the CPUs that others had."""
    own, (_, busy, everything) = own_cpu_seconds(), cpu_seconds()
    found = {way: 1e3 * seconds(run, batches) / batches for way, run in runs.items()}
    own, (_, later, end) = own_cpu_seconds() - own, cpu_seconds()
    others = max(0.0, later - busy - own) / (end - everything) if end > everything else 0.0
    return found, others


def measure(runs: dict[str, Run], options: argparse.Namespace) -> dict[str, Any]:
    """Time all ways in turns, quiet rounds as far as they are had; return the figures."""
    deadline = time.monotonic() + options.patience
    rounds: list[tuple[dict[str, float], float]] = []
    while len(rounds) < options.repeats or (
        sum(others <= QUIET for _, others in rounds) < options.repeats
        and time.monotonic() < deadline
    ):
        await_quiet(deadline)
        rounds.append(time_round(runs, options.batches))
    rounds = sorted(rounds, key=lambda one: one[1] > QUIET and one[1])[: options.repeats]
    found = {way: [times[way] for times, _ in rounds] for way in runs}
    medians = {way: median(times) for way, times in found.items()}
    ours = medians[OURS]
    return {
        "batches_a_run": options.batches,
        "milliseconds_a_batch": {way: [round(x, 3) for x in times] for way, times in found.items()},
        "median_milliseconds": {way: round(x, 3) for way, x in medians.items()},
        "times_as_fast": {way: round(x / ours, 3) for way, x in medians.items() if way != OURS},
        "others_share": [round(others, 3) for _, others in rounds],
    }


def plot(result: dict[str, Any], path: Path) -> None:
    """Draw batches a second as bars, with the single rounds as dots."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rounds = result["milliseconds_a_batch"]
    figure, panel = plt.subplots(figsize=(7, 0.6 * len(rounds) + 1), layout="constrained")
    names = list(rounds)[::-1]
    rates = [1e3 / result["median_milliseconds"][name] for name in names]
    colors = ["tab:blue" if name == OURS else "lightsteelblue" for name in names]
    panel.bar_label(panel.barh(names, rates, color=colors), fmt="%.0f", label_type="center")
    for place, name in enumerate(names):
        panel.plot([1e3 / x for x in rounds[name]], [place] * len(rounds[name]), "k.", ms=3)
    panel.set_xlabel(f"batches of {BATCH} a second, with a postprocess that holds the GIL")
    panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def bench(path: Path, options: argparse.Namespace, stack: contextlib.ExitStack) -> dict[str, Any]:
    count = options.rows // BATCH * BATCH
    rng = np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        file["data"] = rng.integers(0, 256, (count, *SHAPE), np.uint8)
        file["labels"] = np.arange(count)
    readers = {
        name: stack.enter_context(
            AsyncReader(
                hdf5_path=path,
                batch_size=BATCH,
                shuffle="full",
                device="cpu",
                postprocess=augment,
                **more,
            )
        )
        for name, more in READERS.items()
    }
    verify(readers)
    orders = rng.permutation(count).reshape(-1, BATCH)
    forms = {
        "__getitem__": loader_run(Samples(path, count), orders, None),
        "__getitems__": loader_run(Batches(path, count), orders, as_tensors),
    }
    paces = {form: min(seconds(run, 20) for _ in range(3)) for form, run in forms.items()}
    best = min(paces, key=lambda form: paces[form])
    runs = {name: reader_run(reader) for name, reader in readers.items()}
    return {"data_loader": best, **measure({**runs, "DataLoader": forms[best]}, options)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--rows", type=int, default=8192, help="images of 3 kB")
    add("--repeats", type=int, default=7, help="rounds")
    add("--batches", type=int, default=100, help="that each way gives in a round")
    add("--patience", type=float, default=0, help="seconds to wait for a quiet machine")
    add("--quick", action="store_true", help="few and small rounds: no figures to quote")
    add("--out", type=Path, help="folder for the results; default: scripts/results, or none")
    options = parser.parse_args()
    if options.quick:
        options.rows, options.repeats, options.batches = 4 * BATCH, 2, 10
    elif options.out is None:
        options.out = RESULTS
    about = header()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        result = bench(folder / "images.h5", options, stack)
    console = Console()
    for way, times in result["median_milliseconds"].items():
        ratio = result["times_as_fast"].get(way)
        line = f"{way:17} {times:8.2f} ms a batch"
        console.print(line if ratio is None else f"{line}; {OURS} is {ratio:.2f} times as fast")
    busy = median(result["others_share"])
    console.print(f"others had {100 * busy:.0f} % of the CPUs; DataLoader: {result['data_loader']}")
    if options.out is not None:
        save({**about, **result}, options.out / "bench_workers.json")
        plot(result, options.out / "bench_workers.png")


if __name__ == "__main__":
    main()
