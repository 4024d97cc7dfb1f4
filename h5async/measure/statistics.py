"""Reads a dataset once, and returns statistics of its values.

A reader's threads summarize each batch as they have filled it; only sums reach the loop.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from h5async.config import Field, ReaderConfig
from h5async.config.statistics import Per, Statistics
from h5async.errors import BudgetError, ConfigError
from h5async.measure.summaries import FieldSummary
from h5async.plan.transform import RowTransform
from h5async.reader.asyncreader import AsyncReader
from h5async.spelling import named, printable

QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
_BATCH_NBYTES = 4 << 20  # fits into caches; more would be no faster
_MOST_SAMPLES = 1 << 16
_FEATURE_NBYTES = 56  # in a batch on its way, or in the sums
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
) -> Statistics:
    """Read all samples once, and return statistics of the values, as the fields deliver them.

    All threads work on it, with float64. The reader itself keeps its position. Its order,
    `weights`, `sampler`, `postprocess` and `normalize` have no effect; `indices` select, and steps
    count as often as they are delivered.

    `count`, `nan`, `fill`, `min` and `max` are exact. `mean` differs from the exact one by less
    than 1e-12 of the larger of its magnitude and `std`; and so does `std`. The result is the same
    for any number of threads.

    Parameters
    ----------
    reader
        A reader, or options as for `AsyncReader`.
    fields
        The names of the fields to read. None: all.
    per
        ``"channel"``: statistics of each channel (index along the second delivered axis; of images,
        of each color; of sparse rows, of each column). ``"feature"``: of each element of a row.
        None: of all values together.
    quantiles
        The shares of values below each quantile. Up to 262,144 values per channel are sorted; of
        more, a uniform sample is, and `FieldStatistics.quantile_error` bounds the error.
    progress
        Called after each batch with the number of samples read so far, and of all.

    Raises
    ------
    ConfigError
        If there is no such field, or an option is invalid; and whatever a reader raises.

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
    config = config.with_fields(chosen, **ONCE, postprocess=None)
    with AsyncReader(config, batch_size=1) as opened:
        samples, nbytes = opened.num_samples, opened.nbytes
        setup = opened._engine.setup
        summaries = {
            name: FieldSummary(
                kind, opened.layouts[name], setup.transforms[name], per, quantiles, samples
            )
            for name, kind in setup.kinds.items()
        }
        if per == "feature":
            limit = setup.memory_plan.limit_nbytes // (config.thread_count + 3)
            _check_features(setup.transforms, limit // _FEATURE_NBYTES)
        files = tuple(printable(str(path)) for path in opened.config.files)
    of_batch = _BATCH_NBYTES * samples // max(1, nbytes)
    options: Any = {
        "batch_size": max(1, min(_MOST_SAMPLES, samples, of_batch)),
        "prefetch": config.thread_count + 1,
        "postprocess": _Summarize(list(summaries.values())),
    }
    with AsyncReader(config, **options) as opened:
        done = 0
        for batch in opened:
            for name, one in summaries.items():
                one.add(batch[name][0])
            done += batch.index.size
            if progress is not None:
                progress(done, samples)
    several = {name: one.result() for name, one in summaries.items()}
    return Statistics(several, files, samples)


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
    """Raise `BudgetError` if rows have more elements than `most`, for which there is memory."""
    for name, transform in transforms.items():
        count = math.prod(transform.of_one_row.row)
        if count > most:
            raise BudgetError(
                f"field {name!r} has {count:,} features, and there is memory for statistics of"
                f' {most:,}: choose per="channel" or None, name a region or fewer fields, or set'
                f" {named('max_batch_bytes')} to let it take more"
            )


def _chosen(config: ReaderConfig, names: Sequence[str] | None) -> dict[str, Field]:
    fields = config.batch_fields
    for name in names or ():
        if name not in fields:
            raise ConfigError(f"there is no field {name!r}; fields are: {', '.join(fields)}")
    return fields if names is None else {name: fields[name] for name in names}


def _as_read(field: Field) -> Field:
    """Return a field without normalization, and without the zeros that fill up rows."""
    changed: dict[str, Any] = {"normalize": None, "pad_to": None}
    if field.offset is None:
        changed["dense"] = False
    return field.model_copy(update={n: v for n, v in changed.items() if hasattr(field, n)})
