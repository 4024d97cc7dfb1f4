"""Finds layouts of datasets whose object headers are like that of another one, without HDF5.

An object header holds all that HDF5 knows of a dataset but where its chunks are. So two datasets
whose headers have the same bytes are stored in the same way. Only these may differ, and are checked
like HDF5's answers: the first extent, times, the address of contiguous values, and of the index of
chunks, which is read (`visits.py`); checksums; and the values of attributes that nobody asks for.
So all else is the same: the datatype, other extents, the shape of chunks, filters, the fill value,
how many links lead there, and the names, types and shapes of attributes. Chunks must be listed by a
B-tree of version 1 or a fixed array. Whoever asks for another attribute adds it to `ASKED`.

`alikefiles.py` uses the same for files that are like others.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import NamedTuple

import h5py
import numpy as np

from h5async.index.hdf5 import FIXED_ARRAY, Opened, checksum_function, edges_are_raw
from h5async.index.layout import DatasetLayout, Indexed
from h5async.index.storedtypes import DATASPACE, LAYOUT, message_of
from h5async.index.tables import ChunkTable
from h5async.index.visits import ChunkArray, ChunkTree, has_checksum
from h5async.io.hdf5files import HDF5File
from h5async.io.references import changeable, header_blocks
from h5async.io.source import FileStamp, Source
from h5async.io.stores import LocalSource
from h5async.system.interruptions import suppressing

ASKED = (b"categories",)  # attributes whose values are always asked for; see `older_categories`
_MOST_HEADERS = 4  # kept per name
_MOST_MISSES = 6  # consecutive datasets of a name in vain, after which it is left to HDF5
_MOST_NAMES = 4096  # that are counted
_UNLIMITED = _UNDEFINED = (1 << 64) - 1


class Recorded:
    """Bytes of an open file: all of its `runs`, which are offsets and lengths, and lie apart.

    Others have the same bytes where `fixed` is 255: at first nowhere. First `fix` the bytes that
    HDF5 has read, then `vary` those that may differ; drop this if that raises.
    """

    def __init__(self, source: Source, runs: Iterable[tuple[int, int]]) -> None:
        self.source, self.runs = source, tuple(runs)
        self.data = b"".join(source.get_ranges(*zip(*self.runs, strict=True)))
        self.fixed = np.zeros(len(self.data), np.uint8)
        ends = itertools.accumulate(nbytes for _, nbytes in self.runs)
        self._ordered = sorted(
            (begin, nbytes, end - nbytes)
            for (begin, nbytes), end in zip(self.runs, ends, strict=True)
        )
        self._begins = [begin for begin, _, _ in self._ordered]
        if any(a + nbytes > b for (a, nbytes, _), (b, *_) in itertools.pairwise(self._ordered)):
            raise ValueError("runs overlap")

    def at(self, begin: int, nbytes: int) -> int:
        """Return the offset of a range of the file in the bytes; ValueError if not in them."""
        first, length, at = self._ordered[bisect_right(self._begins, begin) - 1]
        if not first <= begin or begin + nbytes > first + length:
            raise ValueError("HDF5 has not read it")
        return at + begin - first

    def is_like(self, data: bytes) -> bool:
        """Return whether other bytes, as many, are the same where these are fixed."""
        one, other = np.frombuffer(data, np.uint8), np.frombuffer(self.data, np.uint8)
        return not ((one ^ other) & self.fixed).any()

    def fix(self, begin: int, nbytes: int) -> None:
        """Demand the same bytes in a range of the file."""
        at = self.at(begin, nbytes)
        self.fixed[at : at + nbytes] = 255

    def vary(self, begin: int, nbytes: int) -> int:
        """Allow a range of the file to differ; return its offset in the bytes."""
        at = self.at(begin, nbytes)
        self.fixed[at : at + nbytes] = 0
        return at

    def vary_header(self, header: int, *, asks_attributes: bool) -> None:
        """Allow an object's times to differ, and values of attributes if nobody asks for any."""
        asked = None if asks_attributes else ASKED
        for begin, nbytes in changeable(self.source.read, header, asked):
            self.vary(begin, nbytes)

    def vary_dataset(self, file: HDF5File, layout: DatasetLayout) -> AlikeDataset:
        """Allow parts of a dataset's header to differ; ValueError if stored unusually."""
        dataset = Opened(h5py.h5o.open(file.id, layout.path.encode()), self.source)
        place, stored = message_of(dataset, LAYOUT)
        is_known, listing = stored[0] in (3, 4, 5) and stored[1] == 1, None
        if layout.chunks is None:
            expected = layout.offset, math.prod(dataset.extents) * layout.stored_itemsize
            if not is_known or (number(stored, 2), number(stored, 10)) != expected:
                return AlikeDataset(layout)
        elif not layout.chunks.offset.size:
            if number(stored, 3 if stored[0] == 3 else len(stored) - 8) != _UNDEFINED:
                raise ValueError("an index without chunks")
            return AlikeDataset(layout)
        else:
            chunks_at, listing = self._vary_listing(layout, dataset, place, stored)
        rows_at, most_at = self._vary_rows(dataset)
        if listing is not None:
            return AlikeDataset(layout, rows_at, most_at, chunks_at=chunks_at, listing=listing)
        nbytes_at = self.vary(place + 10, 8) if rows_at >= 0 else -1
        return AlikeDataset(layout, rows_at, most_at, self.vary(place + 2, 8), nbytes_at)

    def _vary_rows(self, dataset: Opened) -> tuple[int, int]:
        """Allow a dataset's first extent and its maximum to differ; return where; -1: fixed."""
        place, space = message_of(dataset, DATASPACE)
        version, rank, has_most = space[:3]
        at = 8 if version == 1 else 4
        is_usual = version < 3 and has_most < 2 and rank == len(dataset.extents)
        if not is_usual or len(space) < at + 8 * rank * (1 + has_most):
            return -1, -1
        rows, most = number(space, at), number(space, at + 8 * rank)
        if has_most and most not in (rows, _UNLIMITED):
            return -1, -1
        is_same = has_most and most == rows
        most_at = self.vary(place + at + 8 * rank, 8) if is_same else -1
        return self.vary(place + at, 8), most_at

    def _vary_listing(
        self, layout: DatasetLayout, dataset: Opened, place: int, stored: bytes
    ) -> tuple[int, ChunkTree | ChunkArray]:
        """Allow the chunks of a dataset to differ; return where the address of their index is."""
        extents, known, source = dataset.chunks, layout.chunks, self.source
        assert known is not None
        listing: ChunkTree | ChunkArray
        if layout.filters and edges_are_raw(dataset.plist):
            raise ValueError("chunks at the edge are stored in another way")
        nbytes = 0 if layout.filters else math.prod(extents) * layout.stored_itemsize
        at = 3 if stored[0] == 3 else len(stored) - 8
        address = number(stored, at)
        if stored[0] == 3:
            listing = ChunkTree(extents, layout.stored_itemsize, nbytes)
        elif dataset.index_kind == FIXED_ARRAY:
            listing = ChunkArray(extents, source.read(address, 8), nbytes)
        else:
            raise ValueError("another kind of chunk index")
        found = listing.chunks(dataset.extents, address, dataset.end, source)
        if found is None or known.index is not None or not _are_equal(found, known):
            raise ValueError("its chunks are listed in another way")
        return self.vary(place + at, 8), listing


class AlikeDataset(NamedTuple):
    """A dataset: its layout, and where in recorded bytes facts lie that may differ; -1: nowhere.

    These are its first extent; the maximum of that extent, if both are equal; the address and size
    of contiguous values; and the address of the index that lists its chunks.
    """

    layout: DatasetLayout
    rows_at: int = -1
    most_at: int = -1
    offset_at: int = -1
    nbytes_at: int = -1
    chunks_at: int = -1
    listing: ChunkTree | ChunkArray | None = None

    def layout_in(
        self, data: bytes, file: str, path: str, stamp: FileStamp, source: Source, end: int
    ) -> DatasetLayout | None:
        """Return the layout of a dataset of a file, which ends at `end`, with these bytes.

        None or ValueError if HDF5, or our own checks, would reject it.
        """
        layout, known = self.layout, self.layout.indexed
        assert known is not None
        shape, rest, nbytes = known.shape, layout.shape[len(known.shape) :], layout.stored_nbytes
        offset = layout.offset if self.offset_at < 0 else number(data, self.offset_at)
        chunks = layout.chunks
        if self.rows_at >= 0:
            shape = number(data, self.rows_at), *shape[1:]
            if self.most_at >= 0 and number(data, self.most_at) != shape[0]:
                return None
        if self.nbytes_at >= 0:
            nbytes = math.prod(shape) * layout.stored_itemsize
            if number(data, self.nbytes_at) != nbytes or not nbytes:
                return None
        if self.listing is not None:
            if self.most_at >= 0 and shape[0] < self.listing.extents[0]:
                return None
            chunks = self.listing.chunks(shape, number(data, self.chunks_at), end, source)
            if chunks is None:
                return None
            nbytes, chunks = int(chunks.nbytes.sum()), chunks.shortened()
        elif not offset or offset + nbytes > end:  # (-1: it was never written, and has no bytes)
            return None
        return layout.changed(
            file=file,
            stamp=stamp,
            path=path,
            shape=(*shape, *rest),
            stored_nbytes=nbytes,
            indexed=Indexed(known.digest, shape),
            offset=offset,
            chunks=chunks,
        )


def is_plain(layout: DatasetLayout) -> bool:
    """Return whether a layout depends on nothing but where values lie in the file itself."""
    is_alone = layout.segments is None and not (layout.sources or layout.attached)
    is_direct = layout.fallback_reason is None and not layout.has_raw_edges
    is_stored = layout.filters == layout.hdf5_filters and layout.sequences is None
    is_usual = layout.storage in ("contiguous", "chunked") and not layout.member
    return is_alone and is_direct and is_stored and is_usual


def _are_equal(one: ChunkTable, other: ChunkTable) -> bool:
    names = "offset", "nbytes", "filter_mask"
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in names)


def number(data: bytes, at: int) -> int:
    """Return the number of eight bytes at an offset."""
    return int.from_bytes(data[at : at + 8], "little")


class _Header(NamedTuple):
    """The object header of a dataset, which others have, too.

    Its `blocks` are their lengths, and where in the bytes of those before their address is.
    """

    dataset: AlikeDataset
    blocks: Sequence[tuple[int, int]]
    recorded: Recorded

    def layout_of(
        self, address: int, path: str, file: str, stamp: FileStamp
    ) -> DatasetLayout | None:
        """Return the layout of the dataset at an address of a file; None if it is unlike this.

        ValueError if its chunks are not listed as expected; OSError if the file cannot be read.
        """
        data, source = b"", self.recorded.source
        for nbytes, at in self.blocks:
            place = address if at < 0 else number(data, at)
            if not 0 < place <= stamp.nbytes - nbytes:
                return None
            block = bytes(source.get_ranges([place], [nbytes])[0])
            if block.startswith((b"OHDR", b"OCHK")) and not has_checksum(block):
                return None
            data += block
        if not self.recorded.is_like(data):
            return None
        return self.dataset.layout_in(data, file, path, stamp, source, stamp.nbytes)


class Headers:
    """Recognizes the datasets of an open file by their object headers. Used by one thread.

    Datasets with the same name, in different groups, are usually of one kind or of a few. A name
    with more of them is given up, and left to HDF5.
    """

    def __init__(self, file: HDF5File) -> None:
        self._file, self._source = file, file.source
        self._headers: dict[tuple[bytes, int], list[_Header]] = {}
        # By name and samples dimension: the datasets that HDF5 has read since one was recognized.
        self._misses: Counter[tuple[bytes, int]] = Counter()

    @cached_property
    def _is_usable(self) -> bool:
        created = self._file.id.get_create_plist()
        is_usual = (created.get_userblock(), *created.get_sizes()) == (0, 8, 8)
        return is_usual and isinstance(self._source, LocalSource)

    def may_have(self, key: tuple[bytes, int]) -> bool:
        """Return whether a header of this name and samples dimension is known."""
        return bool(self._headers.get(key))

    def find(
        self, key: tuple[bytes, int], address: int, path: str, stamp: FileStamp, file: str
    ) -> DatasetLayout | None:
        """Return the layout of the dataset at an address; None if it is unlike all known ones."""
        headers = self._headers.get(key, [])
        for rank, header in enumerate(headers):
            with suppressing(ValueError, OSError):
                found = header.layout_of(address, path, file, stamp)
                if found is not None:
                    self._misses[key] = 0
                    headers.insert(0, headers.pop(rank))
                    return found
        return None

    def note(self, key: tuple[bytes, int], address: int, layout: DatasetLayout) -> None:
        """Remember the header of a dataset that HDF5 has read, if others have had its name."""
        if len(self._misses) >= _MOST_NAMES:
            self._misses.clear()
        self._misses[key] += 1
        if self._misses[key] < 2 or not (self._is_usable and is_plain(layout)):
            return
        if self._misses[key] > _MOST_MISSES:
            self._headers.pop(key, None)
            return
        with suppressing(Exception):  # a damaged object may raise anything
            blocks = header_blocks(self._source.read, address)
            recorded = Recorded(self._source, [block[:2] for block in blocks])
            addresses = []
            for begin, nbytes, at in blocks:
                recorded.fix(begin, nbytes)
                addresses.append((nbytes, -1 if at < 0 else recorded.vary(at, 8)))
            recorded.vary_header(address, asks_attributes=False)
            dataset = recorded.vary_dataset(self._file, layout)
            if recorded.data.startswith(b"OHDR"):
                if checksum_function() is None:
                    return
                for begin, nbytes, _ in blocks:
                    recorded.vary(begin + nbytes - 4, 4)
            found = _Header(dataset, addresses, recorded)
            self._headers[key] = [found, *self._headers.get(key, [])[: _MOST_HEADERS - 1]]
