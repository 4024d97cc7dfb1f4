"""Logs what a reader has opened, how it reads each field, and what memory did not allow.

A process logs each warning once, since readers of the same files may follow one another.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from h5async.config import ReaderConfig
from h5async.config.files import paths_text
from h5async.core.binding import why_no_core
from h5async.errors import Skipped
from h5async.index.datasettable import table_of
from h5async.index.layout import DatasetLayout
from h5async.spelling import printable

_log = logging.getLogger("h5async.reader")
_MOST_WARNED = 1000  # remembered
_warned: set[str] = set()


def log_opened(
    config: ReaderConfig, layouts: Mapping[str, DatasetLayout], num_samples: int, seconds: float
) -> None:
    """Log what was opened, and the seconds until it was ready."""
    if not _log.isEnabledFor(logging.INFO):
        return
    files = {file for y in layouts.values() for file, _ in table_of(y)[1].columns.files}
    of_files = f" (data in {len(files):,} files)" if len(files) > 1 else ""
    what = f"{paths_text(config.hdf5_path)}{of_files}: fields {', '.join(layouts)}"
    _log.info("opened %s, %s samples, in %.3f s", what, f"{num_samples:,}", seconds)


def log_ways(layouts: Mapping[str, DatasetLayout], methods: Sequence[str]) -> None:
    """Log how each field is read, and warn if that is not the fastest way."""
    no_core = why_no_core()
    if no_core is not None:
        _warn_once(no_core)
    for (name, layout), method in zip(layouts.items(), methods, strict=True):
        what, reason = _named(name, layout), layout.fallback_reason
        if no_core is None and (reason is not None or "h5py" in method):
            why = f": {reason}" if reason else ", because the core does not read its storage"
            _warn_once(f"{what}: is read through h5py, one read at a time{why}")
        else:
            how = "through h5py" if method == "h5py" else f"directly ({method})"
            _log.info("%s: is read %s", what, how)


def log_memory(
    config: ReaderConfig, cache: str, most_threads: int, kept: Sequence[int], wanted: Sequence[int]
) -> None:
    """Log what memory did not allow; `cache` is that of `ReaderStats`.

    `kept` and `wanted` are bytes of decoded chunks, per field, that may be kept for later batches,
    and that would help.
    """
    what = paths_text(config.hdf5_path)
    if config.cache is not None and cache.startswith("none: "):
        reason = cache.removeprefix("none: ")
        _warn_once(f"{what}: the option cache keeps no rows: {reason}")
    elif config.cache is not None:
        _log.info("%s: rows are kept: %s", what, cache)
    if most_threads < config.filler_threads:
        _warn_once(
            f"{what}: memory suffices for {most_threads} of {config.filler_threads} threads:"
            " max_batch_bytes, or free memory, allows no more"
        )
    if sum(kept) < sum(wanted):
        _warn_once(
            f"{what}: {sum(wanted):,} bytes of decoded chunks would be kept for later batches, and"
            f" {sum(kept):,} are free for them: chunks are decoded more than once"
        )


def log_unused_values(layouts: Mapping[str, DatasetLayout]) -> None:
    """Log values that are in no sample: the offsets may have another meaning."""
    for name, layout in layouts.items():
        count = layout.unused_rows
        if layout.spans is not None and layout.segments is None:
            count = layout.num_samples - int(layout.spans[-1] - layout.spans[0])
        if count:
            _warn_once(
                f"{_named(name, layout)}: {count:,} of its values lie before the first sample or"
                " after the last one, and belong to none; if they should, check the options offsets"
                " and offsets_kind: there is one more offset than samples, and one end or length"
                " per sample"
            )


def log_skipped(config: ReaderConfig, files: Sequence[Skipped]) -> None:
    """Log the files that were left out."""
    if files:
        several = "; ".join(one.reason for one in files)
        text = f"{paths_text(config.hdf5_path)}: {len(files):,} other files were left out"
        _warn_once(f'{text} (on_error="skip"): {several}')


def log_long_samples(config: ReaderConfig, lengths: NDArray[Any]) -> None:
    """Log samples with more values than a batch; `lengths` has their values."""
    if config.batch_values is None:
        return
    count = int(np.count_nonzero(lengths > min(config.batch_values, np.iinfo(np.int64).max)))
    if count:
        _warn_once(
            f"{paths_text(config.hdf5_path)}: {count:,} samples have more than"
            f" {config.batch_values:,} values (batch_values), up to {int(lengths.max()):,}: each is"
            " a batch of its own"
        )


def _named(name: str, layout: DatasetLayout) -> str:
    return printable(f'{layout.file}: field {name}, dataset "{layout.path}"')


def _warn_once(message: str) -> None:
    """Log a warning; repetitions have level DEBUG."""
    is_new = message not in _warned
    if is_new and len(_warned) < _MOST_WARNED:
        _warned.add(message)
    _log.log(logging.WARNING if is_new else logging.DEBUG, "%s", message)
