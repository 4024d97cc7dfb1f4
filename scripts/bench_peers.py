"""Compare AsyncReader with other ways to feed a training loop with the same samples.

Two threads or worker processes each, the page cache warm, a loop that does nothing else. Each way
is opened, its first batches are compared with what h5py reads, and it runs for --seconds, from
batch to batch and from epoch to epoch, so that pipelines and workers are as full as they get.
Ours runs before and after the others, half as long each; its speed is the mean of both. What each
way does not do is said beside its figure; where it is faster than ours is said first.

Samples are numbered in their first bytes. So each checked batch tells which samples it has: values
are compared whatever order a way draws, and no sample may come twice in an epoch.

Peers that are not installed are left out: `pip install '.[bench]'` brings them (insitubatch needs
Python 3.12). Not here: loaders of sparse rows (scDataset, annbatch, AnnLoader: `bench_sparse`), of
robots' files and simulations (robomimic, The Well: `bench_sequences`), and those that read over
HTTP (h5py over fsspec, a DataLoader, zarr over obstore: `bench_remote_peers`). NVIDIA DALI runs on
no CPU alone. TensorStore reads no references to chunks of HDF5.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import itertools
import multiprocessing
import os
import signal
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import hdf5plugin
import numpy as np
from bench_common import RESULTS, header, make_images, save
from bench_peer_ways import OURS, WAYS, WINDOW, Case, Way
from rich.console import Console

NUMBER = 4  # bytes that a sample's number takes
LONGEST = 60.0  # seconds that a way may take to open, and to give its first batches
READY = 3  # batches that are checked, and not timed


class Kind(NamedTuple):
    """Samples, how they are stored, and in which order they are read."""

    name: str
    make: Callable[[int], Any]
    count: int
    batch_size: int
    options: dict[str, Any]
    shuffle: bool = True
    files: int = 1
    every_way: bool = False  # also those that read a copy, or that others stand for


def images(count: int) -> np.ndarray:
    return numbered(make_images(count))


def digits(count: int) -> np.ndarray:
    """Return small images, as MNIST has them."""
    return numbered(np.random.default_rng(0).integers(0, 256, (count, 28, 28), np.uint8))


def tokens(count: int) -> np.ndarray:
    """Return texts of 1 to 400 tokens, the first of which is the text's number."""
    rng = np.random.default_rng(1)
    found = np.empty(count, object)
    for number, length in enumerate(rng.integers(1, 401, count)):
        found[number] = rng.integers(0, 50_000, length, np.int32)
        found[number][0] = number
    return found


def numbered(rows: np.ndarray) -> np.ndarray:
    flat = rows.reshape(len(rows), -1)
    flat[:, :NUMBER] = np.arange(len(rows), dtype=np.int32)[:, None].view(np.uint8)
    return rows


def by_rows(rows: int, shape: tuple[int, ...] = (224, 224, 3), **options: Any) -> dict[str, Any]:
    return {"chunks": (rows, *shape), **options}


IMAGES = (images, 2048, 64)
DIGITS = digits, 60_000, 256
GZIP = {"compression": "gzip"}
LZ4 = hdf5plugin.Blosc(cname="lz4", shuffle=1)
KINDS = (
    Kind("150 kB, raw, shuffled", *IMAGES, by_rows(1), every_way=True),
    Kind("150 kB, raw, in order", *IMAGES, by_rows(1), shuffle=False),
    Kind("150 kB, gzip, shuffled", *IMAGES, by_rows(1, **GZIP)),
    Kind("150 kB, gzip, in order", *IMAGES, by_rows(1, **GZIP), shuffle=False),
    Kind("150 kB, shuffle and lz4, shuffled", *IMAGES, by_rows(1, **LZ4)),
    Kind("150 kB, 16 in a zstd chunk, shuffled", *IMAGES, by_rows(16, **hdf5plugin.Zstd())),
    Kind("150 kB, batches of one, shuffled", *IMAGES[:2], 1, by_rows(1)),
    Kind("784 B, shuffled", *DIGITS, by_rows(64, (28, 28)), every_way=True),
    Kind("1 to 400 tokens, shuffled", tokens, 60_000, 256, {}, every_way=True),
    Kind(
        "784 B, 1,000 files, gzip, shuffled",
        *(digits, 100_000, 256),
        by_rows(100, (28, 28), **GZIP),
        files=1000,
    ),
)


def write(kind: Kind, samples: Any, folder: Path) -> tuple[Path, ...]:
    paths = []
    for number, part in enumerate(np.split(samples, kind.files)):
        path = folder / f"{number:04}.h5"
        with h5py.File(path, "w") as file:
            dtype = h5py.vlen_dtype(np.int32) if samples.dtype == object else samples.dtype
            fitting = dict(kind.options)
            if "chunks" in fitting:  # of few samples, with --quick
                fitting["chunks"] = tuple(map(min, fitting["chunks"], part.shape))
            made = file.create_dataset("data", part.shape, dtype, **fitting)
            for begin in range(0, len(part), 512):
                made[begin : begin + 512] = part[begin : begin + 512]
        paths.append(path)
    return tuple(paths)


def taking_part(kind: Kind, installed: set[str]) -> Iterator[Way]:
    """Yield the ways that can read such files, and are here."""
    for way in WAYS:
        if (
            way.package in installed
            and (kind.every_way or way.is_common)
            and (kind.make is not tokens or way.any_length)
            and (kind.files == 1 or way.many_files)
        ):
            yield way


# --- measuring -----------------------------------------------------------------------------------


def arrays(batch: Any) -> Any:
    """Return a batch as NumPy has it: an array, or a list of arrays."""
    if hasattr(batch, "numpy"):
        return batch.numpy()
    return batch if isinstance(batch, np.ndarray) else [*map(np.asarray, batch)]


def numbers_of(batch: Any) -> np.ndarray:
    if isinstance(batch, np.ndarray):
        flat = np.ascontiguousarray(batch.reshape(len(batch), -1)[:, :NUMBER])
        return flat.view(np.int32)[:, 0]
    return np.array([sample[0] for sample in batch])


def check(batch: Any, case: Case, seen: set[int]) -> None:
    """Compare a batch with what h5py reads; no sample may have been seen before."""
    values = arrays(batch)
    numbers = numbers_of(values)
    if len(values) != case.batch_size or not all(map(np.array_equal, values, case.truth[numbers])):
        raise AssertionError("a batch is not what h5py reads")
    if len(seen.union(numbers.tolist())) != len(seen) + len(numbers):
        raise AssertionError("a sample came twice in an epoch")
    if not case.shuffle and numbers.tolist() != [*range(len(seen), len(seen) + len(numbers))]:
        raise AssertionError("samples are not in order")
    seen.update(numbers.tolist())


def speed_of(way: Way, case: Case, seconds: float) -> float:
    """Return samples a second of a way, in a process of its own; it ends with all it started."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(
        target=run, args=(way, case, seconds, theirs)
    )
    process.start()
    theirs.close()
    try:
        found = ours.recv() if ours.poll(LONGEST + seconds) else f"nothing in {LONGEST} s"
    except EOFError:
        process.join()
        found = f"it ended with {process.exitcode}"
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.join()
    if isinstance(found, str):
        raise RuntimeError(found)
    return found


def run(way: Way, case: Case, seconds: float, pipe: Any) -> None:
    """Send samples a second of a way, or why it cannot read the case."""
    os.setsid()
    try:
        pipe.send(timed(iter(way.open(case)), case, seconds))
    except BaseException as error:  # a panic of Rust is no Exception
        pipe.send(f"{type(error).__name__}: {error}".splitlines()[0][:200])
    time.sleep(LONGEST)  # until it is killed with its workers and threads


def timed(batches: Iterator[Any], case: Case, seconds: float) -> float:
    """Check the first batches, and time those of so many seconds."""
    seen: set[int] = set()
    begin = time.perf_counter()
    while len(seen) < READY * case.batch_size or time.perf_counter() - begin < seconds / 10:
        batch = next(batches)
        if len(seen) + case.batch_size <= len(case.truth):
            check(batch, case, seen)
    count, begin = 0, time.perf_counter()
    while (taken := time.perf_counter() - begin) < seconds:
        count += len(next(batches))
    return count / taken


def measure(kind: Kind, case: Case, ways: list[Way], seconds: float) -> dict[str, Any]:
    """Return what was measured of a case; why a way cannot read it, if it raised."""
    ours, speeds, cannot = [speed_of(OURS, case, seconds / 2)], {}, {}
    mixes = case.shuffle and kind.options.get("chunks", (1,))[0] > 1
    for way in [WINDOW, *ways] if mixes else ways:
        try:
            speeds[way.name] = speed_of(way, case, seconds)
        except RuntimeError as error:
            cannot[way.name] = str(error)
    ours.append(speed_of(OURS, case, seconds / 2))
    mean = sum(ours) / 2
    found = {
        "case": kind.name,
        "batch_size": kind.batch_size,
        "sample_nbytes": round(sum(sample.nbytes for sample in case.truth) / len(case.truth)),
        "samples_per_s": {OURS.name: round(mean, 1)}
        | {name: round(speed, 1) for name, speed in speeds.items()},
        "ours_before_and_after": [round(one, 1) for one in ours],
        "ours_by": {name: round(mean / speed, 3) for name, speed in speeds.items()},
        "cannot": cannot,
    }
    return found


# --- reporting -----------------------------------------------------------------------------------


def caveats() -> dict[str, str]:
    return {way.name: way.caveat for way in (WINDOW, *WAYS)}


def show(found: dict[str, Any], console: Console) -> None:
    """Print a case, the fastest way first, with the caveat of each."""
    say = console.print
    said = caveats()
    mean = found["samples_per_s"][OURS.name]
    megabytes = found["sample_nbytes"] / 1e6
    say(f"\n{found['case']}: {mean:,.0f} samples/s by h5async ({mean * megabytes:,.0f} MB/s)")
    for name, ratio in sorted(found["ours_by"].items(), key=lambda pair: pair[1]):
        say(f"  {ratio:8.2f} times {name}: {said[name]}")
    for name, why in found["cannot"].items():
        say(f"    cannot    {name}: {why}")


def losses(cases: list[dict[str, Any]]) -> list[str]:
    """Return where a peer is faster than ours, the worst first; and what our window is of it."""
    found = []
    for case in cases:
        window = case["samples_per_s"].get(WINDOW.name)
        for name, ratio in case["ours_by"].items():
            if ratio < 1 and name != WINDOW.name:
                other = case["samples_per_s"][name]
                mixed = f", {window / other:.2f} with a window" if window else ""
                line = f"{ratio:.2f} of {name}'s speed{mixed}: {case['case']} ({caveats()[name]})"
                found.append((ratio, line))
    return [line for _, line in sorted(found)]


def plot(cases: list[dict[str, Any]], path: Path) -> None:
    """Draw a map of ratios: cases down, ways across; red where a peer is faster."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = [way.name for way in WAYS if any(way.name in case["ours_by"] for case in cases)]
    ratios = np.array([[case["ours_by"].get(name, np.nan) for name in names] for case in cases])
    figure, ax = plt.subplots(figsize=(13, 0.45 * len(cases) + 2.2), layout="constrained")
    colors = matplotlib.colormaps["RdBu"].with_extremes(bad="#eeeeee")
    shades = np.clip(np.log10(ratios), -1, 1)
    ax.imshow(shades, cmap=colors, vmin=-1.4, vmax=1.4, aspect="auto")
    for (y, x), ratio in np.ndenumerate(ratios):
        if np.isfinite(ratio):
            dark = abs(shades[y, x]) > 0.85
            label = f"{ratio:.2f}" if ratio < 10 else f"{ratio:,.0f}"
            ax.text(x, y, label, ha="center", va="center", color="white" if dark else "black")
    ax.set_yticks(range(len(cases)), [case["case"] for case in cases])
    ax.set_xticks(range(len(names)), [name.replace(" ", "\n") for name in names], fontsize=8)
    ax.xaxis.tick_top()
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    ax.set_title(
        "h5async's speed, times that of each other way; page cache warm, 2 threads or workers"
    )
    figure.savefig(path, dpi=120)
    plt.close(figure)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--seconds", type=float, default=5.0, help="that each way runs, after its first batches")
    add("--only", nargs="*", help="parts of the names of cases; default: all")
    add("--ways", nargs="*", help="parts of the names of ways; default: all")
    add("--quick", action="store_true", help="short, and a tenth of the samples: nothing to quote")
    add("--out", type=Path, help="folder for the results; default: scripts/results, or none")
    options = parser.parse_args()
    if options.quick:
        options.seconds = 0.1
    elif options.out is None and not (options.only or options.ways):
        options.out = RESULTS
    return options


def all_cases(options: argparse.Namespace, console: Console) -> Iterator[dict[str, Any]]:
    installed = {way.package for way in WAYS if importlib.util.find_spec(way.package)}
    for way in WAYS:
        if way.package not in installed:
            console.print(f"{way.name}: left out, {way.package} is not installed")
    chosen = [k for k in KINDS if not options.only or any(o in k.name for o in options.only)]
    for (make, count), kinds in itertools.groupby(chosen, lambda kind: (kind.make, kind.count)):
        samples = make(max(count // 10, 640) if options.quick else count)
        with tempfile.TemporaryDirectory(prefix="bench_peers-") as directory:
            for kind in kinds:
                console.print(f"{kind.name} ...")
                yield one_case(kind, samples, Path(directory), installed, options)


def one_case(
    kind: Kind,
    samples: Any,
    folder: Path,
    installed: set[str],
    options: argparse.Namespace,
) -> dict[str, Any]:
    ways = [
        way
        for way in taking_part(kind, installed)
        if not options.ways or any(part in way.name for part in options.ways)
    ]
    paths = write(kind, samples, folder)
    case = Case(paths, folder, samples, kind.shuffle, kind.batch_size)
    return measure(kind, case, ways, options.seconds)


def main() -> None:
    options = parse_options()
    warnings.filterwarnings("ignore")
    console = Console(soft_wrap=True, markup=False, highlight=False)
    if importlib.util.find_spec("torch"):
        importlib.import_module("torch")  # once, instead of in the process of each way
    result = header()
    for way in WAYS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            result["versions"][way.package] = importlib.metadata.version(way.package)
    cases: list[dict[str, Any]] = []
    for case in all_cases(options, console):
        cases.append(case)
        if options.out is not None:  # a run that is ended early leaves what it had
            result |= {"seconds": options.seconds, "losses": losses(cases), "caveats": caveats()}
            save(result | {"cases": cases}, options.out / "bench_peers.json")
            plot(cases, options.out / "bench_peers.png")
    console.print("\nWhere another way is faster than h5async:")
    for line in losses(cases) or ["nowhere"]:
        console.print(f"  {line}")
    for case in cases:
        show(case, console)


if __name__ == "__main__":
    main()
