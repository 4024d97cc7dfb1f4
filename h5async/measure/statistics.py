"""Reads a dataset once, and returns statistics of its values.

A reader's threads summarize each batch once it is filled; only the sums reach the loop.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from h5async.config import Field, ReaderConfig
from h5async.config.statistics import Per, Statistics
from h5async.errors import BudgetError, ConfigError
from h5async.measure.summaries import FieldSummary, Part
from h5async.plan.transform import RowTransform
from h5async.reader.asyncreader import AsyncReader
from h5async.spelling import named, printable
from h5async.system.jobs import run_jobs

QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
_BATCH_NBYTES = 4 << 20  # fits into caches; larger batches are no faster
_MOST_SAMPLES = 1 << 16
_BATCHES_OF_JOB = 128
_FEATURE_NBYTES = 56  # of `Moments` per feature, for each batch in flight and for the sums
# All selected samples, once, on the host.
ONCE: Mapping[str, Any] = {
    "shuffle": False,
    "drop_last": False,
    "rank": 0,
    "world_size": 1,
    "device": "cpu",
    "workers": "thread",
    **dict.fromkeys(
        (
            *("weights", "sampler", "epoch_samples", "batch_values", "bucket"),
            *("cache", "cache_bytes", "postprocess_fields"),
        )
    ),
}


def statistics(
    reader: AsyncReader | ReaderConfig | Mapping[str, Any] | str | os.PathLike[str],
    *,
    fields: Sequence[str] | None = None,
    per: Per = "channel",
    quantiles: Sequence[float] = QUANTILES,
    progress: Callable[[int, int], None] | None = None,
    ray: str | None = None,
) -> Statistics:
    """Read all samples once, and return statistics of the values as the fields deliver them.

    All threads take part, and compute in float64. The position of a given reader does not change.
    Its order, `weights`, `sampler`, `postprocess` and `normalize` have no effect; `indices` select
    samples, and steps count as often as they are delivered.

    `count`, `nan`, `fill`, `min` and `max` are exact. The errors of `mean` and `std` are less than
    1e-12 times the larger of the mean's magnitude and `std`. The result does not depend on the
    number of threads.

    Parameters
    ----------
    reader
        A reader, or options for `AsyncReader`.
    fields
        The names of the fields to read. None: all.
    per
        ``"channel"``: one result per channel (index along the second delivered axis; for images,
        each color; for sparse rows, each column). ``"feature"``: one per element of a row. None:
        one for all values together.
    quantiles
        The fractions of values below each quantile. Up to 262,144 values per channel are sorted;
        beyond that, a uniform sample, and `FieldStatistics.quantile_error` bounds the error.
    progress
        Called after each batch with the number of samples read so far, and the total.
    ray
        Read in jobs on this Ray cluster: its address, or ``"auto"``. The result is the same. See
        docs/ray.md.

    Raises
    ------
    ConfigError
        If a field does not exist, or an option is invalid; also whatever a reader raises.

    Examples
    --------
    >>> found = h5async.statistics({"hdf5_path": "sample_data/digits.h5"}, per=None)
    >>> print(f"{found['data'].mean:.4f} {found['data'].std:.4f}")
    4.8842 6.0168
    >>> found["labels"].quantiles["0.5"]
    array(4.)
    """
    config = reader.config if isinstance(reader, AsyncReader) else ReaderConfig.load(reader)
    if per not in ("channel", "feature", None):
        raise ConfigError(f'per must be "channel", "feature" or None, found {per!r}')
    if not all(0 <= q <= 1 for q in quantiles):
        raise ConfigError(f"quantiles must be numbers from 0 to 1, found {list(quantiles)}")
    chosen = {name: _as_read(field) for name, field in _chosen(config, fields).items()}
    threads = config.num_threads
    if ray is not None:
        threads = max(1, threads or 1)
    config = config.with_fields(chosen, **ONCE, postprocess=None, num_threads=threads)
    measuring = _Measuring(config, per, quantiles)
    with measuring.opened() as reader:
        files = tuple(printable(str(path)) for path in reader.config.files)
        samples, done, number = reader.num_samples, 0, len(reader)
        jobs = [
            range(n, min(n + _BATCHES_OF_JOB, number)) for n in range(0, number, _BATCHES_OF_JOB)
        ]
        several = (
            measuring.parts(range(number))
            if ray is None
            else itertools.chain.from_iterable(run_jobs(measuring, jobs, ray, threads or 1))
        )
        for count, parts in several:
            for name, one in measuring.summaries.items():
                one.add(parts[name])
            done += count
            if progress is not None:
                progress(done, samples)
    return Statistics(
        {name: one.result() for name, one in measuring.summaries.items()}, files, samples
    )


class _Measuring:
    """Summarizes batches by number: here, or in other processes, which open the files again.

    `summaries` has one entry per field, by name, after `opened`.
    """

    def __init__(self, config: ReaderConfig, per: Per, quantiles: Sequence[float]) -> None:
        self._config, self._per, self._quantiles = config, per, quantiles
        self.summaries: dict[str, FieldSummary] = {}
        self._reader: AsyncReader | None = None
        self._begin: dict[str, Any] = {}  # the reader's state before the first batch

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for other processes, without the open reader."""
        return {**self.__dict__, "summaries": {}, "_reader": None}

    def opened(self) -> AsyncReader:
        """Return the reader, opening it first if needed; its batches are summaries."""
        if self._reader is not None:
            return self._reader
        config = self._config
        with AsyncReader(config, batch_size=1) as opened:
            samples, nbytes = opened.num_samples, opened.nbytes
            setup = opened._engine.setup
            self.summaries = {
                name: FieldSummary(
                    kind,
                    opened.layouts[name],
                    setup.transforms[name],
                    self._per,
                    self._quantiles,
                    samples,
                )
                for name, kind in setup.kinds.items()
            }
            if self._per == "feature":
                limit = setup.memory_plan.limit_nbytes // (config.thread_count + 3)
                _check_features(setup.transforms, limit // _FEATURE_NBYTES)
        of_batch = _BATCH_NBYTES * samples // max(1, nbytes)
        batch_size = max(1, min(_MOST_SAMPLES, samples, of_batch))
        options: Any = {
            "batch_size": self._begin.get("batch_size", batch_size),
            "prefetch": config.thread_count + 1,
            "postprocess": _Summarize(list(self.summaries.values())),
        }
        self._reader = AsyncReader(config, **options)
        self._begin = self._begin or self._reader.state_dict()
        return self._reader

    def parts(self, numbers: range) -> Iterator[tuple[int, dict[str, Part]]]:
        """Yield the number of samples in each batch, and its parts by field."""
        reader = self.opened()
        position = numbers.start * self._begin["batch_size"]
        reader.load_state_dict({**self._begin, "position": position})
        for batch in itertools.islice(reader, len(numbers)):
            yield batch.index.size, {name: batch[name][0] for name in self.summaries}

    def __call__(self, numbers: range) -> list[tuple[int, dict[str, Part]]]:
        """Return the results of `parts` as a list."""
        return list(self.parts(numbers))


class _Summarize:
    """Summarizes each batch, as the `postprocess` of a reader."""

    def __init__(self, summaries: list[FieldSummary]) -> None:
        self._summaries = summaries

    def __call__(self, *arrays: Any, rng: np.random.Generator) -> tuple[Any, ...]:
        found = tuple(np.empty(1, object) for _ in arrays)
        for one, summary, values in zip(found, self._summaries, arrays, strict=True):
            one[0] = summary.part(values, rng)
        return found


def _check_features(transforms: Mapping[str, RowTransform], most: int) -> None:
    """Raise `BudgetError` if rows have more elements than `most`, which fit in memory."""
    for name, transform in transforms.items():
        count = math.prod(transform.of_one_row.row)
        if count > most:
            raise BudgetError(
                f"field {name!r} has {count:,} features, but there is only memory for statistics of"
                f' {most:,}: choose per="channel" or None, a region or fewer fields, or set'
                f" {named('max_batch_bytes')} to allow more"
            )


def _chosen(config: ReaderConfig, names: Sequence[str] | None) -> dict[str, Field]:
    fields = config.batch_fields
    for name in names or ():
        if name not in fields:
            raise ConfigError(f"there is no field {name!r}; fields are: {', '.join(fields)}")
    return fields if names is None else {name: fields[name] for name in names}


def _as_read(field: Field) -> Field:
    """Return a field without normalization, and without zeros that pad or densify rows."""
    changed: dict[str, Any] = {"normalize": None, "pad_to": None}
    if field.offset is None:
        changed["dense"] = False
    return field.model_copy(update={n: v for n, v in changed.items() if hasattr(field, n)})
