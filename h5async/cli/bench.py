"""`h5async bench`: reads at full speed, says where the time goes, and tries faster options.

Options take turns: each reads for a short while in each round, so that changes on the machine
affect all of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, repeat
from statistics import median
from time import perf_counter
from typing import Annotated, Any, Literal

import numpy as np
import typer
from rich.filesize import decimal

from h5async.cli.options import reader_config, spell_in_shell, takes_reader
from h5async.cli.output import (
    Json,
    Picture,
    PlotFile,
    counting,
    files_text,
    limit_text,
    opening,
    print_json,
    safe,
    tidy,
)
from h5async.config import ReaderConfig
from h5async.config.values import MOST_THREADS
from h5async.errors import BudgetError
from h5async.observe.stats import ReaderStats
from h5async.reader.asyncreader import AsyncReader

_SHOWN_SHARE = 0.001  # stages with a smaller share of the time are left out
_OURS, _OTHER = "#1f6feb", "#8c959f"
_COLOURS = {None: _OURS, "faster": "#1a7f37", "slower": "#bc4c00"}  # by verdict
_LEAST_SECONDS = 1e-7  # shortest wait that is drawn
_BINS_A_DECADE = 6
_LONGEST_NAME = 40
_VERDICTS = {
    "faster": "faster",
    "slower": "slower",
    "same": "the same",
    "unclear": "no verdict: the spread covers the difference",
}

LEAST_ROUNDS = 3
_LEAST_BATCHES = 3
_WARM_UP_SHARE = 0.2  # of a round's time, not counted
_LEAST_DIFFERENCE = 0.05  # smaller ones are not worth changing an option

Verdict = Literal["faster", "slower", "same", "unclear"]


@dataclass
class Trial:
    """Changed options, if any, and the speed of a reader with them, round by round."""

    changed: Mapping[str, Any]
    speeds: list[float] = field(default_factory=list)  # decoded bytes per second
    ratios: list[float] = field(default_factory=list)  # to the speed as given, in the same round

    @property
    def verdict(self) -> Verdict | None:
        """The verdict of all rounds, of changed options; see `judge`."""
        return judge(self.ratios) if self.changed else None


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the least, the median and the largest value."""
    return min(values), median(values), max(values)


def judge(ratios: Sequence[float]) -> Verdict:
    """Return a verdict on ratios of speeds that another run would probably repeat.

    ``"faster"`` and ``"slower"``: all ratios agree, and their median differs from 1 by at least 5
    %, and by more than half of their spread. ``"same"``: all are within 5 %. Otherwise, the spread
    covers the difference: ``"unclear"``.
    """
    if len(ratios) < LEAST_ROUNDS:
        return "unclear"
    low, middle, high = spread(ratios)
    difference = abs(middle - 1)
    if max(1 - low, high - 1) < _LEAST_DIFFERENCE:
        return "same"
    if difference < _LEAST_DIFFERENCE or difference <= (high - low) / 2:
        return "unclear"
    return "faster" if low > 1 else "slower" if high < 1 else "unclear"


def _run_flat_out(config: ReaderConfig, seconds: float) -> tuple[ReaderStats, list[float]]:
    """Read batches for some seconds, epoch after epoch.

    Returns the reader's statistics, and the seconds waited for each batch except the first.
    """
    waits = list[float]()
    with AsyncReader(config) as reader:
        require_batches(reader)
        asked = perf_counter()
        end = asked + seconds
        for batches, _ in enumerate(chain.from_iterable(repeat(reader)), 1):
            now = perf_counter()
            if batches > 1:
                waits.append(now - asked)
            if now >= end and batches >= _LEAST_BATCHES:
                break
            asked = perf_counter()
        return reader.stats(), waits


def compare(
    config: ReaderConfig,
    changes: Sequence[Mapping[str, Any]],
    seconds: float,
    rounds: int,
    tell: Callable[[int, int], None] = lambda done, count: None,
) -> list[Trial]:
    """Measure options in turns; return a trial of the options as given, then of each change.

    Each trial reads for `seconds` in `rounds` turns; `tell` gets the turns done, and their total.
    """
    trials = [Trial({}), *map(Trial, changes)]
    for number in range(rounds):
        # Each round begins with another trial, so that none always follows the same one.
        start = number % len(trials)
        for trial in (*trials[start:], *trials[:start]):
            tell(sum(len(one.speeds) for one in trials), rounds * len(trials))
            trial.speeds.append(speed_of(config, trial.changed, seconds / rounds))
    given = trials[0].speeds
    for trial in trials:
        pairs = zip(trial.speeds, given, strict=True)
        trial.ratios += [speed / of_given if of_given else 0.0 for speed, of_given in pairs]
    return trials


def speed_of(config: ReaderConfig, changed: Mapping[str, Any], seconds: float) -> float:
    """Return the decoded bytes per second that are read with changed options, for some seconds."""
    with AsyncReader(config, **changed) as reader:
        require_batches(reader)
        warm_up = reader.config.prefetch + 1  # batches, read before the first is taken
        counted = read_before = 0
        begin = since = perf_counter()
        for batches, _ in enumerate(chain.from_iterable(repeat(reader)), 1):
            now = perf_counter()
            if not counted and (batches < warm_up or now - begin < _WARM_UP_SHARE * seconds):
                continue
            if not counted:
                since, read_before = now, reader.stats().nbytes
            counted += 1
            if counted > _LEAST_BATCHES and now - begin >= seconds:
                break
        nbytes = reader.stats().nbytes - read_before
        return nbytes / (now - since) if now > since else 0.0


def require_batches(reader: AsyncReader) -> None:
    """Raise `DatasetError`, with the reason, if an epoch has no batch."""
    if not len(reader):
        reader.fetch_data()


def alternatives(config: ReaderConfig) -> list[dict[str, Any]]:
    """Return options that may be faster and fit into memory: other orders, numbers of threads."""
    changes: list[dict[str, Any]] = []
    if config.sampler is None and config.weights is None:
        orders = (False, "window", "full")
        changes += [{"shuffle": order} for order in orders if order != config.shuffle]
    threads = config.thread_count
    counts = {max(1, threads // 2), 2 * max(1, threads), os.cpu_count() or 1} - {threads}
    changes += [{"num_threads": count} for count in sorted(counts) if count <= MOST_THREADS]
    return [changed for changed in changes if _fits(config, changed)]


def _fits(config: ReaderConfig, changed: Mapping[str, Any]) -> bool:
    try:
        AsyncReader(config, **changed).close()
    except BudgetError:
        return False
    return True


@takes_reader
def bench(
    seconds: Annotated[
        float, typer.Option(min=0.0, help="Seconds to read with each of the options compared.")
    ] = 2.0,
    rounds: Annotated[int, typer.Option(min=LEAST_ROUNDS, help="Number of turns of each.")] = 7,
    plot: PlotFile = None,
    as_json: Json = False,
    **typed: Any,
) -> None:
    """Read FILE at full speed, say where the time goes, and try options that may be faster.

    The compared options take turns, after a warm-up. If the turns disagree, there is no verdict.
    """
    config = reader_config(typed)
    picture = Plot(plot) if plot else None
    with opening():
        stats, waits = _run_flat_out(config, seconds)
    if not as_json:
        typer.echo("\n".join(_breakdown(stats)))
        typer.echo(f"\n{safe(limit_text(stats))}\n")
    changes = alternatives(config)
    with counting("measured") as show:
        trials = compare(config, changes, seconds, rounds, show)
    if picture is not None:
        title = f"h5async bench: {files_text(config.files)}"
        picture.save(title, trials, waits, _times(stats))
    if as_json:
        print_json("bench", _content(config, stats, seconds, trials))
        return
    typer.echo("\n".join(_trial_lines(trials)))
    typer.echo(f"\nverdict: {_verdict(trials)}")


def _breakdown(stats: ReaderStats) -> list[str]:
    times = _times(stats)
    total = sum(times.values()) or 1.0
    shown = {stage: seconds for stage, seconds in times.items() if seconds / total >= _SHOWN_SHARE}
    return [
        f"read by    {', '.join(f'{name}: {method}' for name, method in stats.ways.items())}",
        f"delivered  {decimal(stats.nbytes)}, {stats.samples:,} samples; for them,"
        f" {decimal(stats.read_nbytes)} were read, and {stats.decoded_chunks:,} chunks decoded",
        *(f"{name:<11}{t:8.3f} s of threads {t / total:6.1%}" for name, t in shown.items()),
        *_fetched(stats),
    ]


def _fetched(stats: ReaderStats) -> list[str]:
    if not stats.requests:
        return []
    waited = f"batches waited {stats.stage_seconds['fetch']:.3f} s for them"
    size = decimal(stats.requested_nbytes)
    return [f"fetched    {size} in {stats.requests:,} requests; {waited}"]


def _times(stats: ReaderStats) -> dict[str, float]:
    work = {stage: t for stage, t in stats.stage_seconds.items() if stage != "fetch"}
    return {**work, "GIL": stats.gil_wait_seconds}


def _trial_lines(trials: Sequence[Trial]) -> list[str]:
    names = list(map(_name, trials))
    lines = []
    for name, trial in zip(names, trials, strict=True):
        low, middle, high = (f"{speed / 1e9:.3g}" for speed in spread(trial.speeds))
        line = f"{name:<{max(map(len, names))}}  {middle:>6} GB/s {f'({low} to {high})':<18}"
        if trial.verdict is not None:
            low, middle, high = (f"{ratio:.2f}" for ratio in spread(trial.ratios))
            line += f"  {middle:>5}x {f'({low} to {high})':<16}  {_VERDICTS[trial.verdict]}"
        lines.append(line.rstrip())
    return lines


def _name(trial: Trial) -> str:
    return _typed(trial.changed) or "as given"


def _typed(changed: Mapping[str, Any]) -> str:
    return " ".join(spell_in_shell(name, (value,)) for name, value in changed.items())


def _fastest(trials: Sequence[Trial]) -> Trial | None:
    faster = [trial for trial in trials[1:] if trial.verdict == "faster"]
    return max(faster, key=lambda trial: median(trial.ratios), default=None)


def _verdict(trials: Sequence[Trial]) -> str:
    best = _fastest(trials)
    if best is not None:
        low, middle, high = spread(best.ratios)
        return (
            f"{_typed(best.changed)} is {middle:.2f} times as fast"
            f" ({low:.2f} to {high:.2f} in {len(best.ratios)} rounds)"
        )
    unclear = sum(trial.verdict == "unclear" for trial in trials[1:])
    if unclear:
        return (
            f"nothing that was tried is clearly faster; {unclear} of {len(trials) - 1} are within"
            " the spread; a longer run (--seconds) may decide"
        )
    return "nothing that was tried is faster"


def _content(
    config: ReaderConfig, stats: ReaderStats, seconds: float, trials: Sequence[Trial]
) -> dict[str, Any]:
    best = _fastest(trials)
    return {
        "files": config.files,
        "seconds": seconds,
        "rounds": len(trials[0].speeds),
        "stats": stats.as_dict(),
        "sentence": limit_text(stats),
        "trials": [
            {
                "options": trial.changed,
                "typed": _typed(trial.changed),
                "bytes_per_second": trial.speeds,
                "ratios": trial.ratios,
                "verdict": trial.verdict,
            }
            for trial in trials
        ],
        "fastest": None if best is None else _typed(best.changed),
        "verdict": _verdict(trials),
    }


class Plot(Picture):
    """The picture of a bench."""

    def save(
        self,
        title: str,
        trials: Sequence[Trial],
        waits: Sequence[float],
        stages: Mapping[str, float],
    ) -> None:
        """Draw and write it.

        `waits` are the seconds waited for each batch, and `stages` those of threads in each stage.
        """
        height = 0.42 * len(trials)
        self.figure.set_size_inches(11, 4.2 + height)
        self.figure.suptitle(title, fontsize=11)
        grid = self.figure.add_gridspec(2, 2, height_ratios=[1 + height, 3])
        _draw_speeds(self.figure.add_subplot(grid[0, :]), trials)
        _draw_waits(self.figure.add_subplot(grid[1, 0]), waits)
        _draw_stages(self.figure.add_subplot(grid[1, 1]), stages)
        self.write()


def _draw_speeds(panel: Any, trials: Sequence[Trial]) -> None:
    for row, trial in enumerate(trials):
        speeds = [speed / 1e9 for speed in trial.speeds]
        low, middle, high = spread(speeds)
        colour = _COLOURS.get(trial.verdict, _OTHER)
        panel.barh(row, middle, height=0.62, color=colour, alpha=0.35)
        panel.plot(speeds, [row] * len(speeds), "o", color=colour, markersize=4, alpha=0.8)
        panel.plot([middle] * 2, [row - 0.31, row + 0.31], color=colour, lw=2)
        text = f"{middle:.3g}  ({low:.3g} to {high:.3g})"
        if trial.verdict is not None:
            text += f", {_VERDICTS[trial.verdict].partition(':')[0]}"
        at = {"textcoords": "offset points", "va": "center", "fontsize": 9}
        panel.annotate(text, (high, row), (7, 0), **at)
    names = map(_name, trials)
    short = [n if len(n) <= _LONGEST_NAME else f"{n[: _LONGEST_NAME - 1]}…" for n in names]
    panel.set_yticks(range(len(trials)), short)
    panel.set_ylim(len(trials) - 0.4, -0.6)
    panel.set_xlim(0, 1.42 * max((max(trial.speeds) for trial in trials), default=1) / 1e9 or 1)
    rounds = len(trials[0].speeds)
    panel.set_xlabel(f"GB/s, decoded: median of {rounds} rounds, and each round")
    tidy(panel, "Throughput by option")


def _draw_waits(panel: Any, waits: Sequence[float]) -> None:
    """Draw a logarithmic histogram of waits, with the median and a high percentile."""
    lines = ""
    values = np.maximum(np.asarray(waits, np.float64), _LEAST_SECONDS) * 1e3
    if values.size:
        low = values.min()
        high = max(values.max(), 10 * low)
        bins = np.geomspace(low, high, 1 + round(_BINS_A_DECADE * np.log10(high / low)))
        panel.hist(values, bins=bins, color=_OURS, alpha=0.6)
        panel.set_xscale("log")
        panel.xaxis.set_major_formatter("{x:g}")
        middle, most = np.percentile(values, (50, 99)).tolist()
        panel.axvline(middle, color="black", lw=1)
        panel.axvline(most, color="black", lw=1, ls="--")
        lines = f" (line: median, {middle:.3g}; dashed: 99 % are below {most:.3g})"
    panel.set_xlabel(f"milliseconds{lines}")
    panel.set_ylabel("batches")
    tidy(panel, f"Waits of the loop, for {len(waits):,} batches")


def _draw_stages(panel: Any, stages: Mapping[str, float]) -> None:
    total = sum(stages.values()) or 1.0
    shown = {name: seconds for name, seconds in stages.items() if seconds / total >= _SHOWN_SHARE}
    bars = panel.barh(list(shown), list(shown.values()), height=0.62, color=_OURS, alpha=0.6)
    labels = [f"{seconds / total:.1%}" for seconds in shown.values()]
    panel.bar_label(bars, labels, padding=4, fontsize=9)
    panel.invert_yaxis()
    panel.set_xlim(0, 1.18 * max(shown.values(), default=1))
    panel.set_xlabel("seconds of threads, as given")
    tidy(panel, "Where the time of the threads went")
