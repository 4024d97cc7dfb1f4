"""Measures how fast a reader delivers batches to a loop that only reads.

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
from typing import Any, Literal

from h5async.config import ReaderConfig
from h5async.config.values import MOST_THREADS
from h5async.errors import BudgetError
from h5async.observe.stats import ReaderStats
from h5async.reader.asyncreader import AsyncReader

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


def run_flat_out(
    config: ReaderConfig, seconds: float, waits: list[float] | None = None
) -> ReaderStats:
    """Read batches for some seconds, epoch after epoch; return the reader's statistics.

    `waits` gets the seconds waited for each batch except the first.
    """
    with AsyncReader(config) as reader:
        require_batches(reader)
        asked = perf_counter()
        end = asked + seconds
        for batches, _ in enumerate(chain.from_iterable(repeat(reader)), 1):
            now = perf_counter()
            if waits is not None and batches > 1:
                waits.append(now - asked)
            if now >= end and batches >= _LEAST_BATCHES:
                break
            asked = perf_counter()
        return reader.stats()


def compare(
    config: ReaderConfig,
    changes: Sequence[Mapping[str, Any]],
    seconds: float,
    rounds: int,
    tell: Callable[[], None] = lambda: None,
) -> list[Trial]:
    """Measure options in turns; return a trial of the options as given, then of each change.

    Each trial reads for `seconds` in `rounds` turns; `tell` is called after each.
    """
    trials = [Trial({}), *map(Trial, changes)]
    for number in range(rounds):
        # Each round begins with another trial, so that none always follows the same.
        start = number % len(trials)
        for trial in (*trials[start:], *trials[:start]):
            trial.speeds.append(speed_of(config, trial.changed, seconds / rounds))
            tell()
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
