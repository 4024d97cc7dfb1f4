"""Draws the results of `h5async bench`: speeds and their spread, waits, and stages.

Matplotlib is an extra, and imported only for a plot.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from h5async.errors import ConfigError, MissingPackageError

_OURS, _OTHER, _SLOWER, _FASTER = "#1f6feb", "#8c959f", "#bc4c00", "#1a7f37"
_COLOURS = {"faster": _FASTER, "slower": _SLOWER}
_LEAST_SECONDS = 1e-7  # shortest wait that is drawn
_BINS_A_DECADE = 6
_LONGEST_NAME = 40


class Speeds(NamedTuple):
    """The speeds of readers with some options, round by round.

    Attributes
    ----------
    name
        The options, as typed.
    speeds
        Decoded bytes per second.
    verdict
        As in `h5async.cli.measuring.Trial`; None for the options as given.
    """

    name: str
    speeds: Sequence[float]
    verdict: str | None


class Plot:
    """A picture to be written; made before measuring, so that errors come first.

    The suffix of `path` decides its format. Raises `MissingPackageError` without Matplotlib, and
    `ConfigError` for a missing folder or an unknown format.
    """

    def __init__(self, path: Path) -> None:
        try:
            figure = importlib.import_module("matplotlib.figure")
        except ImportError as error:
            raise MissingPackageError(
                f"--plot needs Matplotlib ({error}); install it with: pip install 'h5async[plot]',"
                " or pip install matplotlib"
            ) from error
        self._path = path
        self._figure: Any = figure.Figure(layout="constrained")
        kinds = self._figure.canvas.get_supported_filetypes()
        if path.suffix[1:].lower() not in kinds:
            raise ConfigError(
                f"--plot {path}: the name must end in one of:"
                f" {', '.join(f'.{kind}' for kind in sorted(kinds))}"
            )
        if not path.parent.is_dir():
            raise ConfigError(f"--plot {path}: there is no folder {path.parent}; make it first")

    def save(
        self,
        title: str,
        trials: Sequence[Speeds],
        waits: Sequence[float],
        stages: Mapping[str, float],
    ) -> None:
        """Draw and write the picture, or raise `ConfigError` if it cannot be written.

        Parameters
        ----------
        title
            What was read.
        trials
            The first one has the options as given.
        waits
            Seconds waited for each batch.
        stages
            Thread seconds in each stage.
        """
        rows = len(trials)
        self._figure.set_size_inches(11, 4.2 + 0.42 * rows)
        self._figure.suptitle(title, fontsize=11)
        heights = [1 + 0.42 * rows, 3]
        grid = self._figure.add_gridspec(2, 2, height_ratios=heights)
        _draw_speeds(self._figure.add_subplot(grid[0, :]), trials)
        _draw_waits(self._figure.add_subplot(grid[1, 0]), waits)
        _draw_stages(self._figure.add_subplot(grid[1, 1]), stages)
        try:
            self._figure.savefig(self._path, dpi=120)
        except OSError as error:
            raise ConfigError(
                f"--plot {self._path} cannot be written: {error.strerror or error}"
            ) from error


def _draw_speeds(panel: Any, trials: Sequence[Speeds]) -> None:
    """Draw a bar for the median of each trial, and a dot per round."""
    for row, trial in enumerate(trials):
        speeds = [speed / 1e9 for speed in trial.speeds]
        colour = _OURS if trial.verdict is None else _COLOURS.get(trial.verdict, _OTHER)
        panel.barh(row, median(speeds), height=0.62, color=colour, alpha=0.35)
        panel.plot(speeds, [row] * len(speeds), "o", color=colour, markersize=4, alpha=0.8)
        panel.plot([median(speeds)] * 2, [row - 0.31, row + 0.31], color=colour, lw=2)
        spread = f"{median(speeds):.3g}  ({min(speeds):.3g} to {max(speeds):.3g})"
        verdict = {None: "", "same": ", the same", "unclear": ", no verdict"}.get(
            trial.verdict, f", {trial.verdict}"
        )
        panel.annotate(
            spread + verdict,
            (max(speeds), row),
            (7, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
        )
    panel.set_yticks(range(len(trials)), [_short(trial.name) for trial in trials])
    panel.set_ylim(len(trials) - 0.4, -0.6)
    panel.set_xlim(0, 1.42 * max((max(trial.speeds) for trial in trials), default=1) / 1e9 or 1)
    rounds = len(trials[0].speeds)
    panel.set_xlabel(f"GB/s, decoded: median of {rounds} rounds, and each round")
    _tidy(panel, "Throughput by option")


def _draw_waits(panel: Any, waits: Sequence[float]) -> None:
    """Draw a logarithmic histogram of waits, with the median and a high percentile."""
    lines = ""
    values = np.maximum(np.asarray(waits, np.float64), _LEAST_SECONDS) * 1e3
    if values.size:
        low, high = np.floor(np.log10(values.min())), np.ceil(np.log10(values.max()))
        high = max(high, low + 1)
        bins = np.logspace(low, high, int(high - low) * _BINS_A_DECADE + 1)
        inside = np.clip(values, bins[0], bins[-1])  # bins are rounded
        panel.hist(inside, bins=bins, color=_OURS, alpha=0.6)
        panel.set_xscale("log")
        panel.xaxis.set_major_formatter("{x:g}")
        middle, most = (float(np.percentile(values, percent)) for percent in (50, 99))
        panel.axvline(middle, color="black", lw=1)
        panel.axvline(most, color="black", lw=1, ls="--")
        lines = f" (line: median, {middle:.3g}; dashed: 99 % are below {most:.3g})"
    panel.set_xlabel(f"milliseconds{lines}")
    panel.set_ylabel("batches")
    _tidy(panel, f"Waits of the loop, for {len(waits):,} batches")


def _draw_stages(panel: Any, stages: Mapping[str, float]) -> None:
    total = sum(stages.values()) or 1.0
    shown = {name: seconds for name, seconds in stages.items() if seconds / total >= 0.001}
    bars = panel.barh(list(shown), list(shown.values()), height=0.62, color=_OURS, alpha=0.6)
    labels = [f"{seconds / total:.1%}" for seconds in shown.values()]
    panel.bar_label(bars, labels, padding=4, fontsize=9)
    panel.invert_yaxis()
    panel.set_xlim(0, 1.18 * max(shown.values(), default=1))
    panel.set_xlabel("seconds of threads, as given")
    _tidy(panel, "Where the time of the threads went")


def _tidy(panel: Any, title: str) -> None:
    panel.set_title(title, fontsize=10, loc="left", fontweight="bold")
    panel.spines[["top", "right"]].set_visible(False)


def _short(name: str) -> str:
    return name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 1]}…"
