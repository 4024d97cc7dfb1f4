"""What benches share that measure several ways in turns, and how many times as fast one is.

Each way runs for a moment in each round, so that other work on the machine meets all of them; what
counts is the ratio of the medians of all rounds.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from bench_common import RESULTS, header, save
from rich.console import Console

from h5async import AsyncReader

READY = 5  # batches that a way may have made before its turn

Way = Callable[[float], float]  # for so many seconds; returns samples a second


class Target(NamedTuple):
    """What one way is to be of another: `least` times as fast."""

    way: str
    other: str
    least: float


class Bench:
    """The folder with the files, and what was measured."""

    def __init__(self, options: argparse.Namespace, folder: Path, console: Console) -> None:
        self.options = options
        self.folder = folder
        self.console = console
        self.speeds: list[dict[str, Any]] = []
        self.ratios: list[dict[str, Any]] = []

    def measure(self, case: str, ways: dict[str, Way], targets: list[Target]) -> None:
        """Measure all ways in turns, and note the ratios of their medians."""
        rounds = self.options.repeats
        found: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(rounds):
            # In turns backwards, too: the system treats who comes first in another way.
            for name in [*ways][:: -1 if number % 2 else 1]:
                found[name].append(ways[name](self.options.seconds))
        medians = {name: statistics.median(speeds) for name, speeds in found.items()}
        for name, speed in medians.items():
            rounded = [round(one, 1) for one in found[name]]
            self.speeds.append({"case": case, "way": name, "speed": speed, "rounds": rounded})
            self.print(f"{case:16} {name:34} {speed:>12,.0f} a second")
        for way, other, least in targets:
            self.note(case, way, other, medians[way] / medians[other], least)

    def note(self, case: str, way: str, other: str, ratio: float, least: float) -> None:
        """Note a ratio, and how large it is to be."""
        point = {"case": case, "way": way, "other": other, "ratio": ratio, "wanted": least}
        self.ratios.append(point)
        self.print(f"{case:16} {way} / {other}: {ratio:.3f} (wanted: {least})")

    def print(self, line: str) -> None:
        """Print a line as it is."""
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def save(self, name: str, about: Mapping[str, Any]) -> None:
        """Write what was found, and what is to be known of it, where the options say so."""
        out = self.options.out
        if out is not None:
            found = {**about, "speeds": self.speeds, "ratios": self.ratios}
            save(found, out / f"{name}.json")
            plot(self.ratios, out / f"{name}.png")


def run_cases(
    name: str, cases: Mapping[str, Callable[[Bench], None]], options: argparse.Namespace
) -> None:
    """Run the cases that the options say, and write what they found."""
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(options, Path(folder), Console())
        for case in options.only or cases:
            cases[case](bench)
    bench.save(name, header())


def paced(sizes: Iterator[int]) -> Way:
    """Return a way that takes batches, of which it is told the sizes."""

    def way(duration: float) -> float:
        for _ in range(READY):
            next(sizes)
        count, begin = 0, time.perf_counter()
        while (taken := time.perf_counter() - begin) < duration:
            count += next(sizes)
        return count / taken

    return way


def threaded(works: list[Iterator[int]]) -> Way:
    """Return a way in which each thread does its own work, which tells how many samples it did."""

    def way(duration: float) -> float:
        counts = [0] * len(works)
        begin = time.perf_counter()

        def run(number: int) -> None:
            while time.perf_counter() - begin < duration:
                counts[number] += next(works[number])

        threads = [threading.Thread(target=run, args=(n,)) for n in range(len(works))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return sum(counts) / (time.perf_counter() - begin)

    return way


def reader_sizes(reader: AsyncReader) -> Iterator[int]:
    while True:
        for batch in reader:
            yield batch.size


def plot(ratios: list[dict[str, Any]], path: Path) -> None:
    """Draw each ratio as a share of what is wanted."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panel = plt.subplots(figsize=(9, 0.45 * len(ratios) + 1), layout="constrained")
    names = [f"{p['case']}: {p['way']} / {p['other']}" for p in ratios]
    shares = [p["ratio"] / p["wanted"] for p in ratios]
    bars = panel.barh(names[::-1], shares[::-1], color="tab:blue")
    labels = [f"{p['ratio']:.2f} of {p['wanted']:g}" for p in ratios]
    box = {"facecolor": "white", "edgecolor": "none", "pad": 1}  # the line does not cross a number
    panel.bar_label(bars, labels=labels[::-1], padding=3, bbox=box)
    panel.axvline(1, color="black", lw=0.8, zorder=0.5)
    panel.margins(y=0.02)
    if max(shares) > 20 * min(shares):
        panel.set_xscale("log")
        panel.set_xlim(min(shares) / 2, 3 * max(shares))
    else:
        panel.set_xlim(0, 1.3 * max(shares))
    panel.set_xlabel("speed relative to the other, as a share of what is wanted")
    panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def run_chosen(
    name: str, about: str, cases: Mapping[str, Callable[[Bench], None]], seconds: float
) -> None:
    """Run the cases that the command says; each way takes so many seconds in a round by default."""
    parser = argparse.ArgumentParser(description=about.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=9, help="rounds")
    parser.add_argument(
        "--seconds", type=float, default=seconds, help="that each way takes in a round"
    )
    parser.add_argument("--only", nargs="*", choices=list(cases))
    parser.add_argument("--quick", action="store_true", help="short: no figures to quote")
    parser.add_argument("--out", type=Path, help="folder for the results; default: scripts/results")
    options = parser.parse_args()
    if options.quick:
        options.repeats, options.seconds = 2, 0.1
    elif options.out is None and not options.only:
        options.out = RESULTS
    run_cases(name, cases, options)
