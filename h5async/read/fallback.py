"""Opens datasets through h5py that the core does not read, and checks their chunks.

Sample numbers and a function that reads them (`h5pyrows.py`) enter; it is called with the open
dataset. HDF5 has one lock for the whole process, so only one of these reads runs at a time,
whatever the number of threads. A file stays open, with HDF5's shared lock on it, until the reader
is closed or too many other files were opened after it.

If a chunk decodes to too few bytes, HDF5 returns whatever its heap held. So the first time that one
of its samples is needed, the core decodes it first; without the core, its length is checked.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import math
import os
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import h5py
import numpy as np
from numpy.typing import NDArray

from h5async.codec.encoders import decoded_nbytes, unchecked
from h5async.codec.filters import is_known_to_hdf5
from h5async.core.binding import Core, address
from h5async.errors import (
    DamagedError,
    OutOfMemoryError,
    ReaderClosedError,
    ReadError,
    failed_read,
    out_of_memory,
)
from h5async.index.changes import FileChanges
from h5async.index.chunks import filters_of
from h5async.index.hdf5 import stored_nbytes
from h5async.index.layout import DatasetLayout, needed_nbytes
from h5async.index.shapes import cells_of
from h5async.index.sources import LOCAL_ONLY
from h5async.index.tables import Region
from h5async.io.hdf5files import HDF5File, KeptFiles
from h5async.io.source import FileStamp, changed, lies_at, replaced
from h5async.io.stores import open_hdf5, store_of
from h5async.plan.records import Int64s
from h5async.read.coretables import Scratch, encoded_room
from h5async.read.farsources import Bytes
from h5async.read.rereading import DAMAGED, decoding_error
from h5async.spelling import name_bytes
from h5async.system.interruptions import interruption, suppressing

_TRIES = 3  # to read a file without it changing meanwhile
_VARIABLES = "HDF5_EXTFILE_PREFIX", "HDF5_VDS_PREFIX"
_log = logging.getLogger("h5async.read")
_told: set[str] = set()  # filters whose chunks are not checked; logged once per process


class WantedRows(NamedTuple):
    """Samples of a dataset, int64 (n,), n > 0; the `region` of each is read to `rows` of `raw`."""

    sample: Int64s
    rows: Int64s
    raw: NDArray[Any]
    region: Region = None


class FallbackReader:
    """Reads rows of datasets through h5py. Safe to use from many threads.

    Up to `kept` unused files stay open. `changes` checks files that were changed since they were
    indexed. `core`, if any, checks chunks. `reads` counts reads of one dataset for one batch;
    `changes_found` counts how often a file was found changed.
    """

    def __init__(self, kept: int, changes: FileChanges, core: Core | None) -> None:
        self._changes = changes
        self._core = core
        self._lock = threading.Lock()  # one read at a time, as HDF5 allows
        self._files = KeptFiles(kept)
        self._stamps: dict[str, FileStamp] = {}  # states that are known to hold what was indexed
        self._variables = _variables()
        self._with_filters: set[tuple[str, str]] = set()  # datasets whose filters HDF5 has loaded
        self._folder = b""  # the base of external files' relative names; b"": it was removed
        with suppressing(OSError):
            self._folder = os.fsencode(os.getcwd())
        # Asked now, because later a thread might have to wait for h5py's lock.
        self.cache_nbytes = h5py.h5p.create(h5py.h5p.FILE_ACCESS).get_cache()[2]
        self.reads = self.changes_found = 0

    def open(self, layout: DatasetLayout) -> None:
        """Open the file of a dataset ahead of its use.

        `ReadError` is raised if it cannot be opened, or is not the indexed file.
        """
        with self._lock:
            self._file(layout)

    def read(
        self,
        layout: DatasetLayout,
        wanted: WantedRows,
        work: Callable[[WantedRows, h5py.Dataset], None],
        checks: list[ChunkCheck],
        scratch: Scratch,
    ) -> None:
        """Read rows of a dataset.

        `work` reads them from the open dataset; it is called again if a file was changed meanwhile.
        `checks` run before it; those of sources of a virtual dataset, which are checked as a whole,
        are then removed from the list. `ReadError` is raised if h5py cannot read, a chunk is
        damaged, or a file has changed; it names file, dataset and samples. Its `place`, int64, has
        the indices in `wanted.sample` of the damaged samples, if known.
        """
        with scratch.reading(), self._lock:
            scratch.require_open()  # the reader may have been closed while this waited
            for _ in range(_TRIES):
                try:
                    self._check_files(layout)
                    self._check_chunks(layout, wanted, checks, scratch.require_open)
                    work(wanted, self._dataset(layout))
                except (ReaderClosedError, OutOfMemoryError):
                    raise
                except Exception as error:
                    if interruption(error) is not None:
                        raise
                    where = f'{layout.file}: dataset "{layout.path}"'
                    if isinstance(error, MemoryError):
                        raise out_of_memory(f"{where}, read through h5py", error) from error
                    if self._changed_paths(layout) and not isinstance(error, ReadError):
                        continue
                    raise self._error_of(layout, wanted.sample, where, error) from error
                if not self._changed_paths(layout):
                    break
            else:  # it is written to all the time, but may still hold what was indexed
                self._check_files(layout)
            self.reads += 1

    def _error_of(
        self, layout: DatasetLayout, sample: Int64s, where: str, error: Exception
    ) -> ReadError:
        lacks = "is missing" if self._core is None else "cannot take its rows"
        text = (
            f"{where}, samples {sample.min()} to {sample.max()}, read through h5py"
            f" ({layout.fallback_reason or f'the core {lacks}'}): {error}"
        )
        about = layout.file, layout.path
        if isinstance(error, OSError) and not isinstance(error, ReadError):
            return failed_read(text, error, *about)
        kind = DamagedError if isinstance(error, _DamagedChunks | DamagedError) else ReadError
        found = kind(text, filename=layout.file, dataset=layout.path)
        if isinstance(error, _DamagedChunks) and isinstance(found, DamagedError):
            length = layout.chunk_shape[layout.sample_axis]
            found.place = np.flatnonzero(np.isin(sample // length, error.numbers))
        return found

    def checks(self, layout: DatasetLayout) -> list[ChunkCheck]:
        """Return the checks for the chunks of a dataset, or of its sources."""
        found = (ChunkCheck.of(origin, self._core) for origin in layout.origins())
        return [check for check in found if check is not None]

    def close(self) -> None:
        """Close the files, after any read under way."""
        with self._lock:
            self._files.close()

    def _check_chunks(
        self,
        layout: DatasetLayout,
        wanted: WantedRows,
        checks: list[ChunkCheck],
        require_open: Callable[[], None],
    ) -> None:
        for check in list(checks):
            source = check.layout
            dataset = self._file(source)[name_bytes(source.path)]
            if source is layout:
                check.run(dataset, wanted.sample, wanted.region, require_open)
                continue
            try:
                check.run(dataset, _written(source), None, require_open)
            except _DamagedChunks as error:  # which samples consist of them is not known
                raise ValueError(str(error)) from error
            checks.remove(check)

    def _dataset(self, layout: DatasetLayout) -> h5py.Dataset:
        """Open a dataset so that HDF5 finds the other files that were permitted, and no more."""
        is_alone = not layout.attached and all(y.file == layout.file for y in layout.origins())
        if not is_alone and not store_of(layout.file).is_local:
            raise ValueError(f"some of its values are in other files; it {LOCAL_ONLY}")
        file = self._file(layout)
        if (layout.file, layout.path) not in self._with_filters:
            for entry in {entry for y in layout.origins() for entry in y.filters}:
                is_known_to_hdf5(entry)  # loads the filter in this process
            self._with_filters.add((layout.file, layout.path))
        if (layout.attached or layout.sources) and _variables() != self._variables:
            raise ValueError(
                f"{' or '.join(_VARIABLES)} was changed after the file had been opened, so HDF5"
                " would look for other files; make a new reader"
            )
        path = name_bytes(layout.path)
        if not layout.attached:
            return file[path]
        properties = h5py.h5p.create(h5py.h5p.DATASET_ACCESS)
        if not os.environ.get("HDF5_EXTFILE_PREFIX"):
            properties.set_efile_prefix(self._folder)
        try:
            return h5py.Dataset(h5py.h5d.open(file.id, path, properties))
        except (KeyError, OSError):
            if os.fsencode(os.getcwd()) != self._folder:
                raise
            return file[path]  # the program has it open without a prefix, which means the same now

    # --- files that change ------------------------------------------------------------------------

    def _check_files(self, layout: DatasetLayout) -> None:
        """Raise `ReadError` unless all files of a dataset hold what was indexed."""
        for path, known, now in self._changed_paths(layout):
            if now.file_id != known.file_id:
                raise replaced(path)
            self.changes_found += 1
            if layout.heaps:
                raise changed(path, "its values may not be in the same places any more")
            self._files.discard(path)  # HDF5 would go on using its copies in memory
            self._changes.look_at(path, known, now)
            self._stamps[path] = now
        self._file(layout)

    def _changed_paths(self, layout: DatasetLayout) -> list[tuple[str, FileStamp, FileStamp]]:
        files = dict(layout.attached or [(y.file, y.stamp) for y in layout.origins()])
        files[layout.file] = layout.stamp
        found = []
        for path, indexed in files.items():
            file = self._files.find(path) if path == layout.file else None
            known = self._stamps.setdefault(path, indexed)
            if file is not None and (file.swmr_mode or file.id.get_intent() & h5py.h5f.ACC_RDWR):
                continue  # HDF5 sees what this process, or a SWMR writer, writes to this file
            try:
                now = store_of(path).stamp(path) if file is None else file.source.stamp()
            except OSError as error:
                raise ReadError(f"{path} cannot be read: {error.strerror or error}") from error
            if now == known:
                continue
            is_only_renamed = file is not None and now.has_content_of(known)
            if is_only_renamed and not lies_at(path, now):
                self._stamps[path] = now  # the file that h5py has open is unchanged
            else:
                found.append((path, known, now))
        return found

    def _file(self, layout: DatasetLayout) -> HDF5File:
        """Return the open file of a dataset; it may be closed when others are used."""
        return self._files.get(layout.file, partial(_opened, layout))


def _opened(layout: DatasetLayout) -> HDF5File:
    file = open_hdf5(layout.file)
    if file.source.stamp().file_id != layout.stamp.file_id:
        file.close()
        raise replaced(layout.file)
    return file


def _variables() -> list[str | None]:
    return [os.environ.get(name) for name in _VARIABLES]


def _written(layout: DatasetLayout) -> Int64s:
    """Return one sample per row of chunks, without rows known to have no chunk in the file."""
    axis, chunks = layout.sample_axis, layout.chunks
    if chunks is None or chunks.index is None:
        number = np.arange(layout.grid[axis])
    else:
        number = np.unique(chunks.index // math.prod(layout.grid[axis + 1 :]) % layout.grid[axis])
    return number * layout.chunk_shape[axis]


class _DamagedChunks(ValueError):
    """Damaged chunks: the message names the first, `numbers` has all, along the samples' axis."""

    numbers: list[int]


class ChunkCheck:
    """Finds chunks that do not decode to their full length; checks each once.

    `layout` is that of a chunked dataset with filters, or of a source of a virtual dataset.
    """

    def __init__(self, layout: DatasetLayout, core: Core | None) -> None:
        self.layout = layout
        rank = len(layout.chunk_shape) - layout.extra_dims
        self._shape, self._chunk = layout.shape[:rank], layout.chunk_shape[:rank]
        self._cells: list[Sequence[int]] = [range(n) for n in layout.grid[:rank]]
        self._checked_cells: set[tuple[int, ...]] = set()  # in rows of chunks checked only in part
        self._nbytes = math.prod(self._chunk) * layout.stored_itemsize
        self._filters = layout.hdf5_filters
        self._core = core
        self._pipeline = None if core is None else core.filters(self._filters)
        self._checked: set[int] = set()  # numbers along the samples' dimension

    @classmethod
    def of(cls, layout: DatasetLayout, core: Core | None) -> ChunkCheck | None:
        """Return the check for a dataset, or None if nothing can be checked."""
        if not (layout.chunk_shape and layout.hdf5_filters and layout.stored_itemsize):
            return None
        check = cls(layout, core)
        left = None if check._pipeline is not None else unchecked(check._filters)
        if left is not None and left.label not in _told:
            _told.add(left.label)
            text = "%s: chunks of %s are decoded by HDF5 alone, which may not notice damage"
            _log.info(text, layout.file, left.label)
        return None if left == check._filters[-1] else check

    def _cells_within(self, region: Region) -> list[Sequence[int]]:
        """Return, by dimension, the numbers of the chunks that overlap a region of the rows."""
        found, shape = list(self._cells), self.layout.shape
        rest = [a for a in range(len(shape)) if a != self.layout.sample_axis]
        for a, part in zip(rest, region or (), strict=False):
            if a < len(found):
                found[a] = cells_of(shape[a], self.layout.chunk_shape[a], part).cell.tolist()
        return found

    def run(
        self,
        dataset: h5py.Dataset,
        sample: Int64s,
        region: Region,
        require_open: Callable[[], None],
    ) -> None:
        """Check the chunks that hold a region of some samples, through the open dataset.

        `require_open` is called before each chunk, and raises if the rest is no longer wanted.
        `_DamagedChunks` is raised if any is damaged.
        """
        axis = self.layout.sample_axis
        numbers = set(np.unique(sample // self._chunk[axis]).tolist()) - self._checked
        within = self._cells_within(region)
        if not numbers:
            return
        # Allocated only for this call: there may be thousands of files, each with a check.
        scratch = Scratch.allocate(0, self._nbytes, encoded_room(self._nbytes))
        # The layout leaves out unavailable filters that no chunk needs.
        stored = filters_of(dataset.id.get_create_plist())
        bits = [bit for bit, entry in enumerate(stored) if entry in self._filters]
        damage: dict[int, _DamagedChunks] = {}
        for number in sorted(numbers):
            cells = [[number] if a == axis else some for a, some in enumerate(within)]
            for cell in itertools.product(*cells):
                if cell in self._checked_cells:
                    continue
                require_open()
                corner = tuple(c * size for c, size in zip(cell, self._chunk, strict=True))
                try:
                    self._check(dataset, corner, bits, scratch)
                except (ValueError, OSError) as error:
                    if isinstance(error, OSError) and error.errno is not None:
                        raise  # the system could not read
                    at = f'{self.layout.file}: dataset "{self.layout.path}", chunk {corner}'
                    damage[number] = _DamagedChunks(f"{at}: {error}{DAMAGED}")
                    damage[number].__cause__ = error
                    break
                if region is not None:
                    self._checked_cells.add(cell)
            else:
                if region is None:
                    self._checked.add(number)
        for first in damage.values():
            first.numbers = list(damage)
            raise first

    def _check(
        self, dataset: h5py.Dataset, corner: tuple[int, ...], bits: list[int], scratch: Scratch
    ) -> None:
        ends = (c + size for c, size in zip(corner, self._chunk, strict=True))
        is_partial = any(end > n for end, n in zip(ends, self._shape, strict=True))
        if is_partial and self.layout.has_raw_edges:
            return
        if not stored_nbytes(dataset.id, corner):
            return
        stored_mask, encoded = dataset.id.read_direct_chunk(corner)
        mask = sum((stored_mask >> bit & 1) << k for k, bit in enumerate(bits))
        # Some writers leave out the part of a chunk beyond the dataset's edge.
        least = needed_nbytes(self._shape, self._chunk, corner, self.layout.stored_itemsize)
        if self._core is not None and self._pipeline is not None:
            self._decode(self._core, np.frombuffer(encoded, np.uint8), mask, least, scratch)
            return
        room = encoded_room(self._nbytes)
        found = decoded_nbytes(self._filters, mask, encoded, self._nbytes, room)
        if found is not None and not least <= found <= self._nbytes:
            raise ValueError(f"expected {self._nbytes} bytes, got {found}")

    def _decode(self, core: Core, encoded: Bytes, mask: int, least: int, scratch: Scratch) -> None:
        struct = scratch.worker(core).struct
        struct.least_nbytes = least
        is_done = core.decode(
            self._pipeline,
            ctypes.byref(struct),
            address(encoded),
            address(scratch.raw_chunk),
            len(self._filters),
            encoded.size,
            mask,
            self._nbytes,
        )
        if not is_done:
            raise ValueError(decoding_error(struct.failure, self._filters))
