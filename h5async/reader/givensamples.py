"""Checks sample numbers given by the consumer, and reads them at once on request.

Sample numbers enter in any form; a checked array, or the rows, leave.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from h5async.config.files import paths_text
from h5async.deliver.host import host_slot
from h5async.errors import ConfigError, taking_memory
from h5async.fill.filling import Filler
from h5async.fill.outcomes import SlotFiller
from h5async.io.growing import plain_memory
from h5async.opening.selecting import sample_numbers
from h5async.order.spans import SpanRows
from h5async.reader.readersetup import ReaderSetup
from h5async.spelling import named


class GivenSamples:
    """Checks and reads the consumer's own samples. Thread-safe."""

    def __init__(self, setup: ReaderSetup) -> None:
        self._config = setup.config
        self._num_samples = next(iter(setup.layouts.values())).sample_count
        self._where = f"index: {paths_text(setup.config.hdf5_path)}"
        self._transforms = list(setup.transforms.values())
        self._samplings = setup.samplings
        self._rows = setup.rows
        self._ragged = [
            (transform.capacity, field)
            for transform, field in zip(self._transforms, setup.samplings.rows, strict=True)
            if isinstance(field, SpanRows) and transform.capacity is not None
        ]

    def checked(self, index: ArrayLike) -> NDArray[np.int64]:
        """Return sample numbers as a new, non-empty array, or raise `ConfigError`."""
        found = sample_numbers(index, self._num_samples, self._where)
        if not found.size:
            raise ConfigError("index: give at least one sample number, found none")
        self._samplings.check(found, self._where)
        return found

    def batch(self, index: ArrayLike) -> NDArray[np.int64]:
        """Do the same for the samples of a batch, which must fit into a slot and the cache."""
        found = self.checked(index)
        if found.size > self._rows:
            remedy = "use read()"  # a larger batch_size would not help
            if self._rows == self._config.batch_size:
                remedy = f"make {named('batch_size')} larger, or {remedy}"
            elif self._config.batch_values is not None:
                remedy = f"make {named('batch_values')} larger, or {remedy}"
            raise ConfigError(
                f"index: a batch of this reader has {self._rows} samples at most, found"
                f" {found.size}; {remedy}"
            )
        for capacity, rows in self._ragged:
            total = rows.total(found)
            if total > capacity:
                raise ConfigError(
                    f"index: these samples have {total:,} values, and a batch of this reader"
                    f" has room for {capacity:,}; give fewer, or use read()"
                )
        if self._config.cache is not None and not self._samplings.selection.has(found):
            raise ConfigError(
                "index: with a cache, only samples that `indices` selects can be asked for; use"
                " read(), or leave out the cache"
            )
        return found

    def read(
        self, samples: NDArray[np.int64], filler: Filler | SlotFiller
    ) -> tuple[NDArray[Any], ...]:
        """Read samples in the calling thread, to host arrays of their own."""
        if not isinstance(filler, Filler):
            raise ConfigError(
                f"read() reads in this process, and needs {named('workers', 'thread')}"
            )
        what = f"{paths_text(self._config.hdf5_path)}: {samples.size:,} samples"
        with taking_memory(what, "read fewer at once"):
            on_host = [not transform.is_identity for transform in self._transforms]
            transforms = [
                replace(transform, capacity=rows.total(samples))
                if isinstance(rows, SpanRows)
                else transform
                for transform, rows in zip(self._transforms, self._samplings.rows, strict=True)
            ]
            laid_out = host_slot(samples.size, transforms, on_host, plain_memory)
        return filler.read(samples, laid_out.memory)
