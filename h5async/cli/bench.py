"""`h5async bench`: reads at full speed, says where the time goes, and tries faster options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from rich.filesize import decimal

from h5async import ReaderConfig, ReaderStats
from h5async.cli.benchplot import Plot, Speeds
from h5async.cli.documents import Json, print_document
from h5async.cli.measuring import LEAST_ROUNDS, Trial, alternatives, compare, fits, run_flat_out
from h5async.cli.options import reader_config, spell_in_shell, takes_reader
from h5async.cli.progressbars import opening, progress_bar
from h5async.cli.text import files_text, safe
from h5async.config.files import home_path, with_variables
from h5async.observe.stats import reader_sentence
from h5async.spelling import spelled

_SHOWN_SHARE = 0.001  # stages with a smaller share of the time are left out
_VERDICTS = {
    "faster": "faster",
    "slower": "slower",
    "same": "the same",
    "unclear": "no verdict: the spread covers the difference",
}


@takes_reader
def bench(
    seconds: Annotated[
        float, typer.Option(min=0.0, help="Seconds to read with each of the options compared.")
    ] = 2.0,
    rounds: Annotated[int, typer.Option(min=LEAST_ROUNDS, help="Number of turns of each.")] = 7,
    plot: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Draw the results with Matplotlib (.png, .svg, .pdf)."),
    ] = None,
    as_json: Json = False,
    **typed: Any,
) -> None:
    """Read FILE at full speed, say where the time goes, and try options that may be faster.

    The compared options take turns, after a warm-up. If the turns disagree, there is no verdict.
    """
    config, waits = reader_config(typed), list[float]()
    picture = Plot(Path(home_path(with_variables(plot)))) if plot else None
    with opening():
        stats = run_flat_out(config, seconds, waits)
    if not as_json:
        typer.echo("\n".join(_breakdown(stats)))
        typer.echo(f"\n{safe(_sentence(stats))}\n")
    trials = _compared(config, seconds, rounds)
    if picture is not None:
        _draw(picture, config, stats, waits, trials)
    if as_json:
        print_document("bench", _content(config, stats, seconds, trials))
        return
    typer.echo("\n".join(_trial_lines(trials)))
    typer.echo(f"\n{_verdict(trials)}")


def _draw(
    picture: Plot,
    config: ReaderConfig,
    stats: ReaderStats,
    waits: Sequence[float],
    trials: Sequence[Trial],
) -> None:
    several = [
        Speeds(_typed(trial.changed) or "as given", trial.speeds, trial.verdict if number else None)
        for number, trial in enumerate(trials)
    ]
    stages = {**stats.stage_seconds, "GIL": stats.gil_wait_seconds}
    picture.save(f"h5async bench: {files_text(config.files)}", several, waits, stages)


def _compared(config: ReaderConfig, seconds: float, rounds: int) -> list[Trial]:
    changes = [changed for changed in alternatives(config) if fits(config, changed)]
    with progress_bar("measured") as progress:
        task = progress.add_task("", total=rounds * (1 + len(changes)))

        def tell() -> None:
            progress.advance(task)
            progress.refresh()

        return compare(config, changes, seconds, rounds, tell)


def _sentence(stats: ReaderStats) -> str:
    """Say what limits the reader, regardless of the loop, which only reads."""
    return spelled(reader_sentence(stats), spell_in_shell)


def _breakdown(stats: ReaderStats) -> list[str]:
    """Say where the threads' time went, with a line per stage."""
    total = stats.busy_seconds + stats.gil_wait_seconds or 1.0
    times = {**stats.stage_seconds, "GIL": stats.gil_wait_seconds}
    methods = ", ".join(f"{name}: {method}" for name, method in stats.ways.items())
    return [
        f"read by    {methods}",
        f"delivered  {decimal(stats.nbytes)}, {stats.samples:,} samples; for them,"
        f" {decimal(stats.read_nbytes)} were read, and {stats.decoded_chunks:,} chunks decoded",
        *(
            f"{stage:<11}{seconds:8.3f} s of threads {seconds / total:6.1%}"
            for stage, seconds in times.items()
            if seconds / total >= _SHOWN_SHARE
        ),
    ]


def _trial_lines(trials: Sequence[Trial]) -> list[str]:
    """Return a line per trial: the median of its speeds, their spread, and the ratio's."""
    given, *others = trials
    width = max(len(_typed(trial.changed)) for trial in trials)
    head = f"{'as given':<{width}}  {_speed_text(given)}".rstrip()
    return [head, *(f"{_typed(trial.changed):<{width}}  {_line_of(trial)}" for trial in others)]


def _line_of(trial: Trial) -> str:
    return f"{_speed_text(trial)}  {_ratio_text(trial)}  {_VERDICTS[trial.verdict]}"


def _speed_text(trial: Trial) -> str:
    low, middle, high = (
        f"{value / 1e9:.3g}"
        for value in (min(trial.speeds), median(trial.speeds), max(trial.speeds))
    )
    spread = f"({low} to {high})"
    return f"{middle:>6} GB/s {spread:<18}"


def _ratio_text(trial: Trial) -> str:
    spread = f"({min(trial.ratios):.2f} to {max(trial.ratios):.2f})"
    return f"{median(trial.ratios):5.2f}x {spread:<16}"


def _typed(changed: Mapping[str, Any]) -> str:
    return " ".join(spell_in_shell(name, (value,)) for name, value in changed.items())


def _fastest(trials: Sequence[Trial]) -> Trial | None:
    faster = [trial for trial in trials[1:] if trial.verdict == "faster"]
    return max(faster, key=lambda trial: median(trial.ratios), default=None)


def _verdict(trials: Sequence[Trial]) -> str:
    """Say in a sentence what to change, if the rounds agree."""
    rounds, best = len(trials[0].speeds), _fastest(trials)
    if best is not None:
        return (
            f"verdict: {_typed(best.changed)} is {median(best.ratios):.2f} times as fast"
            f" ({min(best.ratios):.2f} to {max(best.ratios):.2f} in {rounds} rounds)"
        )
    unclear = sum(trial.verdict == "unclear" for trial in trials[1:])
    if unclear:
        return (
            f"verdict: nothing that was tried is clearly faster; {unclear} of {len(trials) - 1} are"
            " within the spread; a longer run (--seconds) may decide"
        )
    return "verdict: nothing that was tried is faster"


def _content(
    config: ReaderConfig, stats: ReaderStats, seconds: float, trials: Sequence[Trial]
) -> dict[str, Any]:
    """Return the contents of the JSON document, as in `docs/command-line.md`."""
    best = _fastest(trials)
    return {
        "files": config.files,
        "seconds": seconds,
        "rounds": len(trials[0].speeds),
        "stats": stats.as_dict(),
        "sentence": _sentence(stats),
        "trials": [
            {
                "options": trial.changed,
                "typed": _typed(trial.changed),
                "bytes_per_second": trial.speeds,
                "ratios": trial.ratios,
                "verdict": trial.verdict if number else None,
            }
            for number, trial in enumerate(trials)
        ],
        "fastest": None if best is None else _typed(best.changed),
        "verdict": _verdict(trials).removeprefix("verdict: "),
    }
