"""Sample numbers enter; rows leave, read through h5py: for what the direct way must refuse.

HDF5 has one lock for the whole process, so one such read runs at a time, whatever the number of
threads. The file stays open, with HDF5's shared lock on it, until the reader is closed.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from h5async.codecs import Scratch
from h5async.errors import ReadError
from h5async.layout import DatasetLayout
from h5async.metadata import open_hdf5
from h5async.plan import FallbackPlan, Int64s
from h5async.storage import file_id, replaced


class FallbackReader:
    """Reads rows of the datasets of one file through h5py. Safe to use from many threads.

    Parameters
    ----------
    path
        The file.
    expected
        Device and inode of the file that was indexed.

    Raises
    ------
    ReadError
        If the file cannot be opened, or is not the one that was indexed.

    Attributes
    ----------
    reads
        Batches of one field that were read so.
    """

    def __init__(self, path: str, expected: tuple[int, int]) -> None:
        self._lock = threading.Lock()
        self._file = open_hdf5(Path(path))
        self.reads = 0
        if file_id(self._file.id.get_vfd_handle()) != expected:
            self.close()
            raise replaced(path)

    def read(self, layout: DatasetLayout, sample: Int64s, raw: NDArray[Any]) -> None:
        """Fill `raw` with the rows of `sample`.

        Parameters
        ----------
        sample
            int64 (n,): sample numbers, in any order.
        raw
            (n or more, *raw_row): the batch, samples first, of the dataset's dtype (bool as
            uint8).

        Raises
        ------
        ReadError
            If h5py cannot read; it names file, dataset and samples.
        """
        with self._lock:
            try:
                dataset = self._file[layout.path]
                for first, last, rows in _spans(layout, sample):
                    where = (slice(None),) * layout.sample_axis
                    block = np.moveaxis(dataset[(*where, slice(first, last))], len(where), 0)
                    raw[rows] = block[sample[rows] - first]
            except Exception as error:
                raise ReadError(
                    f'{layout.file}: dataset "{layout.path}", samples {sample.min()} to'
                    f" {sample.max()}, read through h5py ({layout.fallback_reason}): {error}"
                ) from error
            self.reads += 1

    def close(self) -> None:
        """Close the file, after any read under way."""
        with self._lock:
            self._file.close()


class FallbackExecutor:
    """Executes plans for one dataset through a `FallbackReader`."""

    def __init__(self, layout: DatasetLayout, reader: FallbackReader) -> None:
        self._layout = layout
        self._reader = reader

    def scratch_nbytes(self) -> tuple[int, int, int]:
        """Return zeros: h5py takes memory of its own."""
        return 0, 0, 0

    def execute(
        self, plan: FallbackPlan, start: int, stop: int, raw: NDArray[Any], scratch: Scratch
    ) -> None:
        """Read the one item of a plan, all samples, into the batch `raw`."""
        self._reader.read(self._layout, plan.sample, raw)


def _spans(layout: DatasetLayout, sample: Int64s) -> Iterator[tuple[int, int, Int64s]]:
    """Yield (first sample, end, rows of the batch): what one h5py call should read.

    Neighbouring samples, and samples of one chunk, are read together: HDF5 forgets a decoded
    chunk that is larger than its cache.
    """
    rows = np.argsort(sample, kind="stable")
    ordered = sample[rows]
    apart = np.diff(ordered) > 1
    if layout.chunk_shape:
        chunk = ordered // layout.chunk_shape[layout.sample_axis]
        apart &= chunk[1:] != chunk[:-1]
    for part in np.split(rows, np.flatnonzero(apart) + 1):
        yield int(sample[part[0]]), int(sample[part[-1]]) + 1, part
