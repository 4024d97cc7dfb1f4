"""Compare AsyncReader with the limit of each kind of work: what a bare loop does of it.

One row for each workload. The reader is used as in training, `for batch in reader`, epoch after
epoch, by a consumer that does nothing; it is timed from the arrival of one batch to that of
another. The limit does the same work with everything known beforehand: no HDF5, no plan, no queue.
Reader and limit take turns, and their medians are compared. Files are written to a temporary
directory, and what reader and limit deliver is checked against what was written.

- W1, W2: images without a filter, against the faster of bare `preadv` and of copies out of a memory
  map. "Read once": by a new reader, out of a new map, from the third batch to the epoch's last.
- W3, W4: images with a filter, against imagecodecs' decoders on chunks in memory. Each chunk is
  decoded once an epoch, but where single samples are shuffled once for each batch that touches it.
- W5: a million short rows, against `np.take` from an array in memory; behind gzip: its decoder.
- W6: samples in the last dimension, against the same transposition of an array in memory.
- W7: the page cache dropped before each run, against `preadv` with 32 reads in flight.
- W8: images to (N, C, H, W), also as scaled float32, against the fastest library call on an array
  in memory.
- W9: batches of one short sample: microseconds of the main thread, with 60 for a limit.
- memory: what a reader takes beyond an interpreter with h5async; slots, scratch and 40 bytes a
  chunk for a limit.
- window: how well `shuffle="window"` mixes, beside `"full"`.

Bare loops run in as many threads as there are cores, which share each batch or take turns of
batches, whichever is faster. On a busy machine, give --patience: rounds in which other processes
had more than 5 % of the CPUs are then repeated.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from bench_cases import WORKLOADS, Bench
from bench_common import RESULTS, header, save
from bench_ways import optional
from rich import box
from rich.console import Console
from rich.table import Table


def table(rows: list[dict[str, Any]]) -> Table:
    grid = Table(title="medians, and ratios of medians", box=box.SIMPLE_HEAD)
    for name in ("", "workload"):
        grid.add_column(name, no_wrap=True)
    for name in ("reader", "limit", "", "ratio"):
        grid.add_column(name, justify="right", no_wrap=True)
    grid.add_column("limit's form")
    for row in rows:
        if "skipped" in row:
            grid.add_row(row["work"], row["name"], "-", "-", "", "skipped", "")
            continue
        is_met = row["ratio"] >= row["target"]
        judged = f"{row['ratio']:.2f} {'≥' if is_met else '<'} {row['target']:g}"
        grid.add_row(
            row["work"],
            row["name"],
            f"{row['reader']:.3g}",
            f"{row['limit']:.3g}",
            row["unit"],
            f"[{'green' if is_met else 'red'}]{judged}[/]",
            row["form"] + (f" ({row['note']})" if "note" in row else ""),
        )
    return grid


def mixing_table(mixing: dict[str, dict[str, float]]) -> Table:
    grid = Table(title="shuffling, one epoch's length being 1", box=box.SIMPLE_HEAD)
    grid.add_column("shuffle")
    for name in next(iter(mixing.values())):
        grid.add_column(name.replace("_", " "), justify="right")
    for shuffle, figures in mixing.items():
        grid.add_row(shuffle, *(f"{value:g}" for value in figures.values()))
    return grid


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw the ratios as bars, the targets as ticks; longer bars are cut off."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    timed = [row for row in rows if "ratio" in row]
    works = list(dict.fromkeys(row["work"] for row in timed))
    end = 1.3
    figure, ax = plt.subplots(figsize=(9.5, 1.3 + 0.27 * len(timed)), layout="constrained")
    for y, row in enumerate(timed):
        ratio, target = row["ratio"], row["target"]
        color = "#1f77b4" if works.index(row["work"]) % 2 else "#6baed6"
        ax.barh(y, min(ratio, end), 0.72, color=color)
        if target < end:
            label = "target" if y == 0 else None
            ax.plot([target] * 2, [y - 0.42, y + 0.42], color="#d62728", lw=2, label=label)
        text = f"{ratio:.2f}" if target < end else f"{ratio:.2f} (target {target:g})"
        weight = "normal" if ratio >= target else "bold"
        place = ax.get_yaxis_transform()
        ax.text(1.01, y, text, transform=place, va="center", weight=weight)
    ax.axvline(1, color="black", lw=0.8, zorder=0)
    ax.set_yticks(range(len(timed)), [f"{row['work']}  {row['name']}" for row in timed])
    ax.set_ylim(len(timed) - 0.4, -0.6)
    ax.set_xlim(0, end)
    ax.set_xlabel("reader's speed of the limit's; bold: below the target")
    ax.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="lower right", frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--only", help=f"some workloads, with commas between: {','.join(WORKLOADS)}")
    add("--repeats", type=int, help="rounds; default: 7")
    add("--seconds", type=float, help="that each way takes in a round, about; default: 0.4")
    add("--patience", type=float, default=0, help="seconds a row to wait for a quiet machine")
    add("--quick", action="store_true", help="few and small rounds: no figures to quote")
    add("--out", type=Path, help="folder for the results; default: scripts/results, or none")
    options = parser.parse_args()
    options.repeats = options.repeats or (2 if options.quick else 7)
    options.seconds = options.seconds or (0.03 if options.quick else 0.4)
    if options.out is None and not (options.quick or options.only):
        options.out = RESULTS
    options.only = options.only.split(",") if options.only else list(WORKLOADS)
    unknown = sorted(set(options.only) - set(WORKLOADS))
    if unknown:
        parser.error(f"no workload is called {unknown[0]}")
    return options


def main() -> None:
    options = parse_options()
    console = Console(width=max(130, Console().width))
    result = header()
    result["versions"] |= other_versions()
    with tempfile.TemporaryDirectory(prefix="bench_limits-") as folder:
        bench = Bench(options, Path(folder), console)
        for name, workload in WORKLOADS.items():
            if name in options.only:
                workload(bench)
        bench.pool.shutdown()
    result |= {"sizes": bench.sizes._asdict(), "rows": bench.rows}
    result["window_randomness"] = bench.mixing
    if bench.rows:
        console.print(table(bench.rows))
    if bench.mixing:
        console.print(mixing_table(bench.mixing))
    if options.out is not None:
        save(result, options.out / "bench_limits.json")
        plot(bench.rows, options.out / "bench_limits.png")


def other_versions() -> dict[str, str]:
    found = {name: optional(name) for name in ("hdf5plugin", "torch", "cv2")}
    return {
        name: str(getattr(module, "__version__", None) or module.version)
        for name, module in found.items()
        if module is not None
    }


if __name__ == "__main__":
    main()
