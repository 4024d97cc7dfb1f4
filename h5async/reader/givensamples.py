"""Checks sample numbers given by the consumer, and reads them at once on request.

Sample numbers enter in any form; a checked array, or the rows, leave.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from h5async.config import ReaderConfig
from h5async.config.files import paths_text
from h5async.deliver.device import host_slot
from h5async.errors import ConfigError, taking_memory
from h5async.fill.filling import Filler
from h5async.index.layout import DatasetLayout
from h5async.opening.dataset import Samplings
from h5async.opening.selecting import sample_numbers
from h5async.order.rows import SpanRows
from h5async.plan.transform import RowTransform
from h5async.spelling import named

if TYPE_CHECKING:
    from h5async.process.helper import HelperFiller


class GivenSamples:
    """Checks and reads the consumer's own samples. Thread-safe.

    Layouts and transforms are per field name, in field order; `rows` is the room of a slot.
    """

    def __init__(
        self,
        config: ReaderConfig,
        layouts: Mapping[str, DatasetLayout],
        transforms: Mapping[str, RowTransform],
        samplings: Samplings,
        rows: int,
    ) -> None:
        self._config = config
        self._num_samples = next(iter(layouts.values())).sample_count
        self._where = paths_text(config.hdf5_path)
        self._transforms = list(transforms.values())
        self._samplings = samplings
        self._rows = rows
        self._ragged = [
            (transform.capacity, field)
            for transform, field in zip(self._transforms, samplings.rows, strict=True)
            if isinstance(field, SpanRows) and transform.capacity is not None
        ]

    def checked(self, index: ArrayLike, what: str = "index") -> NDArray[np.int64]:
        """Return sample numbers as a new, non-empty array, or raise `ConfigError`."""
        found = sample_numbers(index, self._num_samples, f"{what}: {self._where}")
        if not found.size:
            raise ConfigError(f"{what}: give at least one sample number, found none")
        self._samplings.check(found, f"{what}: {self._where}")
        return found

    def batch(self, index: ArrayLike) -> NDArray[np.int64]:
        """Return the sample numbers of a batch, as a new array.

        Raises `ConfigError`, also if there are too many, or the cache has no room for them.
        """
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
        self, samples: NDArray[np.int64], filler: Filler | HelperFiller
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
            laid_out = host_slot(samples.size, transforms, on_host)
        return filler.read(samples, laid_out.memory)
