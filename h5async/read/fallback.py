"""Reads datasets that the core does not read through h5py, one at a time.

Sample numbers enter; rows leave. `h5pyrows.py` finds the datasets of a field. HDF5 has one lock for
the whole process, so one such read runs at a time, whatever the number of threads. A file stays
open, with HDF5's shared lock on it, until the reader is closed, or too many others were opened
after it.

If a chunk decodes short, HDF5 returns whatever its heap held. So chunks are checked before they are
read (`chunkcheck.py`).
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from h5async.codec.filters import is_known_to_hdf5
from h5async.core.binding import load_core
from h5async.errors import H5AsyncError, ReaderClosedError, ReadError, out_of_memory
from h5async.index.changes import FileChanges
from h5async.index.layout import DatasetLayout
from h5async.io.keptfiles import KeptFiles
from h5async.io.stamps import FileStamp, changed, lies_at, replaced
from h5async.io.stores import HDF5File, open_hdf5, store_of
from h5async.plan.records import Int64s
from h5async.read.chunkcheck import ChunkCheck
from h5async.read.scratch import Scratch
from h5async.spelling import name_bytes
from h5async.system.interruptions import interruption, suppressing

_TRIES = 3  # to read while nobody changes a file
_VARIABLES = "HDF5_EXTFILE_PREFIX", "HDF5_VDS_PREFIX"
_SPAN_NBYTES = 4 << 20  # may be read for samples of one chunk, even if few bytes are wanted
_NEIGHBOURS = 4  # chunks that concurrent batches may share, in any order


class FallbackReader:
    """Reads rows of datasets through h5py. Safe to use from many threads.

    Parameters
    ----------
    kept
        Files that stay open while unused.
    changes
        Reads files again that were changed since they were indexed.

    Attributes
    ----------
    reads
        The number of reads of one dataset for one batch.
    changes_found
        How often a file was found changed.
    """

    def __init__(self, kept: int, changes: FileChanges) -> None:
        self._changes = changes
        self._lock = threading.Lock()  # one read at a time, as in HDF5
        self._files: KeptFiles[HDF5File] = KeptFiles(kept)
        self._stamps: dict[str, FileStamp] = {}  # of files that hold what was indexed
        self._variables = _variables()
        self._with_filters: set[tuple[str, str]] = set()  # datasets whose filters HDF5 was given
        self._folder = b""  # to which names of external files are relative; b"": it was removed
        with suppressing(OSError):
            self._folder = os.fsencode(os.getcwd())
        # Not asked later: a thread may have to wait for h5py's lock.
        self.cache_nbytes = h5py.h5p.create(h5py.h5p.FILE_ACCESS).get_cache()[2]
        self.reads = self.changes_found = 0

    def open(self, layout: DatasetLayout) -> None:
        """Open the file of a dataset, ahead of its use.

        `ReadError` is raised if it cannot be opened, or is not the one that was indexed.
        """
        with self._lock:
            self._file(layout)

    def read(
        self,
        layout: DatasetLayout,
        sample: Int64s,
        work: Callable[[h5py.Dataset], None],
        checks: list[ChunkCheck],
        require_open: Callable[[], None],
    ) -> None:
        """Read some samples of a dataset.

        Parameters
        ----------
        sample
            int64 (n,), n > 0: their numbers.
        work
            Reads them from the open dataset; called again if a file was changed meanwhile.
        checks
            Run before anything is read. Those of sources, which are checked whole, are removed.
        require_open
            Called between reads; raises if the rest is no longer wanted.

        Raises
        ------
        ReadError
            If h5py cannot read, a chunk is damaged, or a file has changed; it names file, dataset
            and samples.
        """
        with self._lock:
            require_open()  # it may have waited for others
            for _ in range(_TRIES):
                try:
                    self._check_files(layout)
                    self._check_chunks(layout, sample, checks, require_open)
                    work(self._dataset(layout))
                except ReaderClosedError:
                    raise
                except MemoryError as error:
                    if isinstance(error, H5AsyncError) or interruption(error) is not None:
                        raise
                    what = f'{layout.file}: dataset "{layout.path}", read through h5py'
                    raise out_of_memory(what, error) from error
                except Exception as error:
                    if interruption(error) is not None:
                        raise
                    if self._changed_paths(layout) and not isinstance(error, ReadError):
                        continue
                    raise ReadError(
                        f'{layout.file}: dataset "{layout.path}", samples {sample.min()} to'
                        f" {sample.max()}, read through h5py ({_why_h5py(layout)}): {error}"
                    ) from error
                if not self._changed_paths(layout):
                    self.reads += 1
                    return
            self._check_files(layout)  # it is written to all the time, but holds what was indexed
            self.reads += 1

    def close(self) -> None:
        """Close the files, after any read under way."""
        with self._lock:
            self._files.close()

    def _check_chunks(
        self,
        layout: DatasetLayout,
        sample: Int64s,
        checks: list[ChunkCheck],
        require_open: Callable[[], None],
    ) -> None:
        for check in list(checks):
            source = check.layout
            needed = sample if source is layout else _written(source)
            check.run(self._file(source)[name_bytes(source.path)], needed, require_open)
            if source is not layout:
                checks.remove(check)

    def _dataset(self, layout: DatasetLayout) -> h5py.Dataset:
        """Open a dataset so that HDF5 finds the other files that were permitted, and no others."""
        file = self._file(layout)
        if (layout.file, layout.path) not in self._with_filters:
            for entry in {entry for y in layout.origins() for entry in y.filters}:
                is_known_to_hdf5(entry)  # in this process, too
            self._with_filters.add((layout.file, layout.path))
        if (layout.attached or layout.sources) and _variables() != self._variables:
            raise ValueError(
                f"{' or '.join(_VARIABLES)} was changed after the file had been opened, so HDF5"
                " would look for other files; make a new reader"
            )
        if not layout.attached:
            return file[name_bytes(layout.path)]
        properties = h5py.h5p.create(h5py.h5p.DATASET_ACCESS)
        if not os.environ.get("HDF5_EXTFILE_PREFIX"):
            properties.set_efile_prefix(self._folder)
        return h5py.Dataset(h5py.h5d.open(file.id, name_bytes(layout.path), properties))

    # --- files that change ------------------------------------------------------------------------

    def _check_files(self, layout: DatasetLayout) -> None:
        """Raise `ReadError` unless all files of a dataset hold what was indexed."""
        for path, known, now in self._changed_paths(layout):
            if now.file_id != known.file_id:
                raise replaced(path)
            self.changes_found += 1
            if layout.heaps:
                raise changed(path, "whether its values still lie where they did is unknown")
            self._files.discard(path)  # HDF5 trusts its copies in memory
            self._changes.look_at(path, known, now)
            self._stamps[path] = now
        self._file(layout)

    def _changed_paths(self, layout: DatasetLayout) -> list[tuple[str, FileStamp, FileStamp]]:
        """Return changed files: their paths, former and present stamps."""
        found: list[tuple[str, FileStamp, FileStamp]] = []
        for path, indexed in layout.attached or [(y.file, y.stamp) for y in layout.origins()]:
            if path != layout.file:
                self._note_change(found, path, indexed, None)
        self._note_change(found, layout.file, layout.stamp, self._files.find(layout.file))
        return found

    def _note_change(
        self,
        found: list[tuple[str, FileStamp, FileStamp]],
        path: str,
        indexed: FileStamp,
        file: HDF5File | None,
    ) -> None:
        known = self._stamps.setdefault(path, indexed)
        if file is not None and (file.swmr_mode or file.id.get_intent() & h5py.h5f.ACC_RDWR):
            return  # HDF5 itself knows what is written: to this file, by this process or by SWMR
        try:
            now = store_of(path).stamp(path) if file is None else file.source.stamp()
        except OSError as error:
            raise ReadError(f"{path} cannot be read: {error.strerror or error}") from error
        if now == known:
            return
        is_only_renamed = file is not None and now.has_content_of(known)
        if is_only_renamed and not lies_at(path, now):  # what h5py has open is as it was
            self._stamps[path] = now
        else:
            found.append((path, known, now))

    def _file(self, layout: DatasetLayout) -> HDF5File:
        """Return the open file of a dataset, for this thread; it may be closed later."""
        file = self._files.take(layout.file, partial(_opened, layout))
        self._files.give_back(layout.file)
        return file


def _opened(layout: DatasetLayout) -> HDF5File:
    file = open_hdf5(layout.file)
    if file.source.stamp().file_id != layout.stamp.file_id:
        file.close()
        raise replaced(layout.file)
    return file


def _variables() -> list[str | None]:
    """Return the environment variables by which HDF5 finds other files, besides names in files."""
    return [os.environ.get(name) for name in _VARIABLES]


def _why_h5py(layout: DatasetLayout) -> str:
    if layout.fallback_reason is not None:
        return layout.fallback_reason
    return "the core is missing" if load_core() is None else "the core cannot take its rows"


class DatasetRows:
    """Reads rows of one dataset through a `FallbackReader`. Safe to use from many threads."""

    def __init__(self, layout: DatasetLayout, reader: FallbackReader) -> None:
        self._layout = _as_stored(layout)
        self._is_one_sample = self._layout is not layout
        self._reader = reader
        self._changes_found = -1
        self._checks: list[ChunkCheck] = []
        # Rows of chunks along the samples that HDF5 may still have decoded, the latest last.
        self._recent: dict[int, None] = {}
        self._counting = threading.Lock()

    def read(self, sample: Int64s, rows: Int64s, raw: NDArray[Any], scratch: Scratch) -> None:
        """Read samples to rows of a batch; raises as `FallbackReader.read`.

        `raw` is (batch, *raw_row), of the dataset's dtype (bool as uint8).
        """
        if self._is_one_sample:
            sample = np.arange(self._layout.num_samples)
            one = np.empty(self._layout.shape, raw.dtype)
            self._read(sample, sample, one, scratch)
            raw[rows] = one.reshape(raw.shape[1:])
        else:
            self._read(sample, rows, raw, scratch)

    def _read(self, sample: Int64s, rows: Int64s, raw: NDArray[Any], scratch: Scratch) -> None:
        if not sample.size:
            return
        if self._changes_found != self._reader.changes_found:  # or nothing was checked yet
            self._changes_found = self._reader.changes_found
            checks = map(ChunkCheck.of, self._layout.origins())
            self._checks = [check for check in checks if check is not None]
        work = partial(_copy, self._layout, sample, rows, raw, scratch.require_open)
        with scratch.timed("read_ns"):
            self._reader.read(self._layout, sample, work, self._checks, scratch.require_open)
        scratch.counts.h5py_decoded_nbytes += self._decoded_nbytes(sample)

    def _decoded_nbytes(self, sample: Int64s) -> int:
        """Return the bytes that HDF5 has decoded for some samples: whole chunks, some cached."""
        layout, axis = self._layout, self._layout.sample_axis
        if not (layout.filters and layout.chunk_shape and sample.size):
            return 0
        nbytes = math.prod(layout.grid) // layout.grid[axis] * layout.chunk_nbytes
        nbytes *= max(1, layout.stored_itemsize // max(1, layout.dtype.itemsize))
        decoded = 0
        with self._counting:
            for chunk in np.unique(sample // layout.chunk_shape[axis]).tolist():
                decoded += nbytes * (chunk not in self._recent)
                self._recent.pop(chunk, None)
                self._recent[chunk] = None
            while len(self._recent) > max(_NEIGHBOURS, self._reader.cache_nbytes // max(1, nbytes)):
                del self._recent[next(iter(self._recent))]
        return decoded


def _as_stored(layout: DatasetLayout) -> DatasetLayout:
    """Return the stored layout of a dataset that is read as one sample (`with_one_sample`)."""
    known = layout.indexed
    if known is None or len(known.shape) + layout.extra_dims + 1 != len(layout.shape):
        return layout
    if not known.shape:
        return layout
    return layout.changed(shape=layout.shape[1:], chunk_shape=layout.chunk_shape[1:])


def _are_same_bytes(some: np.dtype[Any], found: np.dtype[Any]) -> bool:
    """Tell whether compounds have the same members at the same places."""
    if some.fields is None or found.fields is None or some.itemsize != found.itemsize:
        return False
    return all(found.fields.get(name, ())[:2] == field[:2] for name, field in some.fields.items())


def _copy(
    layout: DatasetLayout,
    sample: Int64s,
    rows: Int64s,
    raw: NDArray[Any],
    require_open: Callable[[], None],
    dataset: h5py.Dataset,
) -> None:
    values = dataset.fields(layout.member[0]) if layout.member else dataset
    is_merged = layout.sequences is not None and dataset.shape[:1] != layout.shape[:1]
    for first, last, chosen in _spans(layout, sample):
        require_open()
        where = (slice(None),) * layout.sample_axis
        if is_merged:
            length = dataset.shape[1]
            block = np.concatenate(
                [
                    values[number, max(0, first - number * length) : last - number * length]
                    for number in range(first // length, (last - 1) // length + 1)
                ]
            )
        elif dataset.shape:
            block = values[(*where, slice(first, last))]
        else:
            block = np.array([values[()]])
        for name in layout.member[1:]:
            block = block[name]
        block = np.moveaxis(block, len(where), 0)
        out = raw
        if _are_same_bytes(raw.dtype, block.dtype):  # padding, too
            out, block = (array.view(f"V{array.itemsize}") for array in (raw, block))
        out[rows[chosen]] = block[sample[chosen] - first]


def _written(layout: DatasetLayout) -> Int64s:
    """Return one sample per row of chunks of which any is in the file, if that is known."""
    axis, chunks = layout.sample_axis, layout.chunks
    if chunks is None or chunks.index is None:
        number = np.arange(layout.grid[axis])
    else:
        number = np.unique(chunks.index // math.prod(layout.grid[axis + 1 :]) % layout.grid[axis])
    return number * layout.chunk_shape[axis]


def span_nbytes(layout: DatasetLayout, rows: int) -> int:
    """Return the maximum number of bytes read at once for `rows` samples."""
    decoded_nbytes = layout.chunk_nbytes if layout.filters else 0
    return max(_SPAN_NBYTES, 2 * rows * layout.row_nbytes, decoded_nbytes)


def _spans(layout: DatasetLayout, sample: Int64s) -> Iterator[tuple[int, int, Int64s]]:
    """Yield (first sample, end, which samples): the samples that one h5py call should read.

    Neighbouring samples are read together, and samples of one chunk, unless far more would be read
    than is wanted: HDF5 does not cache a decoded chunk that is larger than its cache.
    """
    order = np.argsort(sample, kind="stable")
    ordered = sample[order]
    apart = np.diff(ordered) > 1
    if layout.chunk_shape:
        chunk, inside = np.divmod(ordered, layout.chunk_shape[layout.sample_axis])
        nbytes = span_nbytes(layout, sample.size)
        block = inside // max(1, nbytes // max(1, layout.row_nbytes))
        apart &= (np.diff(chunk) != 0) | (np.diff(block) != 0)
    for part in np.split(order, np.flatnonzero(apart) + 1):
        yield int(sample[part[0]]), int(sample[part[-1]]) + 1, part
