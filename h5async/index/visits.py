"""Visits the chunks of a dataset, as HDF5 lists them: by the compiled core, or in Python.

`ChunkTree` and `ChunkArray` read usual indices themselves, for files that are like others
(`alikefiles.py`).

Takes a dataset and the grid of its chunks; returns columns of a table, as HDF5 reported them.

HDF5 misreports the coordinates of chunks in an extensible array, which it uses if exactly one
dimension is unlimited. In the array, that dimension comes first, then the others in order, each at
its maximum extent; but when HDF5 visits the array, it assumes the order of the dataset's dimensions
(H5D__earray_idx_iterate_cb of H5Dearray.c). So coordinates are wrong unless the first dimension is
the unlimited one, but they give the position in the array, and that gives the true coordinates.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import functools
import itertools
import math
import operator
import struct
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import h5py
import numpy as np
from numpy.typing import NDArray

from h5async.core.binding import Core, address, load_core
from h5async.errors import DamagedError
from h5async.index.hdf5 import (
    B_TREE_V1,
    EXTENSIBLE_ARRAY,
    NotDirectError,
    Opened,
    checksum_function,
    function_address,
    stored_nbytes,
)
from h5async.index.tables import ChunkTable, Int64s, grid_of
from h5async.io.source import Source
from h5async.system.interruptions import suppressing

_FIRST_CAPACITY = 1 << 24  # chunks: pages of memory that are not touched cost nothing
_LEAST_VERSION = (1, 14)  # of HDF5; from here on the signature of visitors is known
_FEW = 1024  # chunks: columns of this size are kept for reuse, and copied
_MOST_UNUSED = 16
_LOOKUPS = 256  # of chunks by their keys, per dataset
LOOK_UP = "H5Dget_chunk_storage_size"
_PYTHON_FUNCTIONS = ("PyEval_SaveThread", "PyEval_RestoreThread", "PyErr_CheckSignals")
_STRUCT_FUNCTIONS = ("save_thread", "restore_thread", "check_signals")
MISREPORTED = "only dimension {} is unlimited: HDF5 misreports chunks"
_MOST_POSITIONS = 1 << 40  # an array has at most 2 ** 32 (H5D_EARRAY_MAX_NELMTS_BITS)


_CHUNKS = b"TREE\x01"  # start of a node of chunks; its level and the number of entries follow
_NODE_HEAD_NBYTES = 24
_MOST_ENTRIES = 64  # of a node, in files with a superblock of version 0
_ARRAY_NBYTES, _BLOCK_HEAD_NBYTES = 28, 14  # of a fixed array, and the block with its entries
_LEAST_OFFSET = 48  # of anything in a file: that of the superblock's end

NOT_LOOKED_UP = -2


class Visited(NamedTuple):
    """The chunks of a dataset, in the order that HDF5 reports them."""

    number: Int64s  # the chunk's number in the C-ordered grid; one near it if `is_outside`
    offset: Int64s  # address in the file
    nbytes: Int64s  # stored size
    mask: NDArray[np.uint32]  # filter mask
    is_outside: bool = False  # a chunk does not lie in the grid
    is_ascending: bool = True  # each number is higher than the previous one
    is_apart: bool = False  # each chunk is known to begin at or after the end of the previous one
    end: int = np.iinfo(np.int64).max  # one past the last byte of all chunks; by default unknown
    least: int = 0  # bytes of the smallest,
    most: int = -1  # and the largest; by default unknown
    unlike: int = NOT_LOOKED_UP  # the index of a chunk that HDF5 does not find by its key; -1: none


_FACTS = operator.attrgetter(*Visited._fields[4:])


def visit_chunks(
    dataset: Opened,
    grid: tuple[int, ...],
    most: int,
    where: str,
    positions: Positions | None = None,
) -> Visited:
    """Visit all chunks of a dataset with this grid; ReadError if there are more than `most`.

    With `positions`, each gets its true number. Raises any exception of h5py if the index is
    damaged.
    """
    if not math.prod(grid):
        number, offset, nbytes, mask = _columns(0)
        return Visited(number, offset, nbytes, mask)
    reported, visited = grid if positions is None else positions.reported_grid, None
    with suppressing(MemoryError):  # a reservation may be refused
        is_tree = positions is None and dataset.index_kind == B_TREE_V1
        visited = _by_core(dataset, reported, most, function_address(LOOK_UP) if is_tree else 0)
    if visited is None:
        visited = _in_python(dataset.id, dataset.chunks, reported, most)
    if visited.number.size > most:
        raise DamagedError(
            f"{where}: its chunk index lists more than {most} chunks, which is more than the file"
            " can hold; it is damaged"
        )
    if positions is None:
        return visited
    number, is_outside = positions.numbers(visited.number, grid)
    return visited._replace(
        number=number,
        is_ascending=bool((number[1:] > number[:-1]).all()),
        is_outside=visited.is_outside or is_outside,
    )


def first_unlike(dataset: Opened, grid: tuple[int, ...], number: Int64s, nbytes: Int64s) -> int:
    """Look up chunks by their keys, or some of many; return the index of one that is not found.

    -1 if HDF5 finds all of them, with their `nbytes`.
    """
    core, look_up = load_core(), function_address(LOOK_UP)
    if core is not None and look_up:
        number, nbytes = np.ascontiguousarray(number), np.ascontiguousarray(nbytes)
        with _prepared(core, dataset.chunks, grid, 1) as prepared:
            struct = ctypes.byref(prepared.of(dataset, look_up))
            return int(core.look_up(struct, address(number), address(nbytes), number.size))
    step = -(-number.size // _LOOKUPS) or 1
    cells = np.unravel_index(number[::step], grid)
    for item, expected in enumerate(nbytes[::step].tolist()):
        corner = (int(cell[item]) * n for cell, n in zip(cells, dataset.chunks, strict=True))
        if stored_nbytes(dataset.id, tuple(corner)) != expected:
            return item * step
    return -1


class _Prepared:
    """The core's description of a visit, and columns for `capacity` chunks."""

    def __init__(
        self, core: Core, chunks: tuple[int, ...], grid: tuple[int, ...], capacity: int
    ) -> None:
        self._columns = _columns(capacity)
        self._extents = np.array([chunks, grid], np.int64)
        at, pointers = address(self._extents), map(address, self._columns)
        self._struct = core.Visit(capacity=capacity, most_looked_up=_LOOKUPS, rank=len(grid))
        self._struct.iterate = function_address("H5Dchunk_iter")
        self._struct.chunk, self._struct.grid = at, at + self._extents.nbytes // 2
        for name, pointer in zip(Visited._fields, pointers, strict=False):
            setattr(self._struct, name, pointer)
        functions = (getattr(ctypes.pythonapi, name) for name in _PYTHON_FUNCTIONS)
        for name, function in zip(_STRUCT_FUNCTIONS, functions, strict=True):
            setattr(self._struct, name, ctypes.cast(function, ctypes.c_void_p).value)

    def of(self, dataset: Opened, look_up: int) -> Any:
        """Return the description for a dataset; `look_up` is the address of a function, or 0."""
        self._struct.dataset, self._struct.look_up = dataset.id.id, look_up
        return self._struct

    def visited(self) -> Visited:
        """Return the visited chunks; call it only once if the capacity is large."""
        count, capacity = self._struct.count, self._struct.capacity
        for column in self._columns if capacity > _FEW and count < capacity // 2 else ():
            column.resize(count, refcheck=False)  # in place: a copy would double the memory
        number, offset, nbytes, mask = (
            column[:count].copy() if capacity <= _FEW else column[:count]
            for column in self._columns
        )
        return Visited(number, offset, nbytes, mask, *_FACTS(self._struct))


_unused: dict[Any, _Prepared] = {}  # for reuse: files of a collection often have similar chunks


@contextlib.contextmanager
def _prepared(core: Core, *key: Any) -> Iterator[_Prepared]:
    """Lend a description for chunks, grid and capacity, maybe a used one, to one user at a time."""
    found = _unused.pop((core, key), None) or _Prepared(core, *key)
    with h5py._objects.phil:
        yield found
    if key[-1] <= _FEW:
        if len(_unused) >= _MOST_UNUSED:
            _unused.clear()
        _unused[core, key] = found


def _by_core(dataset: Opened, grid: tuple[int, ...], most: int, look_up: int) -> Visited | None:
    """Visit chunks with the core; None if it is missing, or HDF5 reports an error."""
    core = load_core()
    is_known = h5py.version.hdf5_version_tuple >= _LEAST_VERSION
    if core is None or not function_address("H5Dchunk_iter") or not is_known:
        return None
    # One more than the maximum, to detect more.
    capacity = _FEW if most < _FEW else min(most + 1, _FIRST_CAPACITY)
    while True:
        with _prepared(core, dataset.chunks, grid, capacity) as prepared:
            struct = prepared.of(dataset, look_up)
            status, count = core.visit(ctypes.byref(struct)), struct.count
            if count < capacity or count > most:
                return None if status and count <= most else prepared.visited()
        capacity = min(most + 1, 8 * capacity)


def _columns(count: int) -> tuple[NDArray[Any], ...]:
    number, offset, nbytes = (np.empty(count, np.int64) for _ in range(3))
    return number, offset, nbytes, np.empty(count, np.uint32)


def _in_python(
    dataset: h5py.h5d.DatasetID, chunks: tuple[int, ...], grid: Sequence[int], most: int
) -> Visited:
    """Visit chunks with h5py; stops after one more than `most`."""
    rank, records = len(grid), array.array("q")
    width = rank + 3

    def note(info: h5py.h5d.StoreInfo) -> bool | None:
        corner, mask, offset, nbytes = info
        records.extend((*corner, offset, nbytes, mask))
        return True if len(records) > most * width else None

    dataset.chunk_iter(note)
    table = np.frombuffer(records, np.int64).reshape(-1, width)
    corners, (offset, nbytes, mask) = table[:, :rank], table[:, rank:].T.copy()
    chunk = np.array(chunks, np.int64)
    cells = corners // chunk
    clipped = np.clip(cells, 0, np.array(grid, np.int64) - 1)
    number = np.ravel_multi_index(tuple(clipped.T), tuple(grid))
    is_outside = bool(((clipped != cells) | (cells * chunk != corners)).any())
    is_ascending = bool((number[1:] > number[:-1]).all())
    return Visited(number, offset, nbytes, mask.astype(np.uint32), is_outside, is_ascending)


class Positions(NamedTuple):
    """Converts positions in an extensible array to chunk numbers.

    Dimension `axis` is unlimited. `most` is the maximum number of chunks along each dimension; 1
    for the unlimited one.
    """

    axis: int
    most: tuple[int, ...]

    @property
    def reported_grid(self) -> tuple[int, ...]:
        """The grid in which the coordinates that HDF5 reports have their position as number."""
        behind = self.most[self.axis + 1 :]
        return (*(1,) * self.axis, _MOST_POSITIONS // math.prod(behind), *behind)

    def numbers(self, position: Int64s, grid: tuple[int, ...]) -> tuple[Int64s, bool]:
        """Return the numbers of chunks in the dataset's grid, and whether one lies outside it."""
        along, rest = np.divmod(position, math.prod(self.most))
        cells = list(np.unravel_index(rest, self.most))
        cells[self.axis] = along
        clipped = [np.minimum(cell, n - 1) for cell, n in zip(cells, grid, strict=True)]
        is_outside = any((a != b).any() for a, b in zip(cells, clipped, strict=True))
        return np.ravel_multi_index(tuple(clipped), grid).astype(np.int64), is_outside


def positions_of(dataset: Opened) -> Positions | None:
    """Return how to find chunks that HDF5 misreports; None if it reports them correctly.

    NotDirectError if they cannot be found.
    """
    kind = dataset.index_kind
    if kind not in (EXTENSIBLE_ARRAY, -1):
        return None
    unlimited = [axis for axis, extent in enumerate(dataset.maxshape) if extent is None]
    if len(unlimited) != 1 or unlimited == [0]:
        return None
    axis = unlimited[0]
    extents = tuple(
        size if extent is None else extent
        for extent, size in zip(dataset.maxshape, dataset.chunks, strict=True)
    )
    most = grid_of(extents, dataset.chunks)
    if kind == -1 or math.prod(most) > _MOST_POSITIONS or not _counts_positions():
        raise NotDirectError(MISREPORTED.format(axis))
    return Positions(axis, most)


@functools.cache
def _counts_positions() -> bool:
    """Return whether the loaded HDF5 reports chunks as described above; other versions may not.

    Tests it with datasets in memory whose chunks contain their own numbers.
    """
    with suppressing(Exception):  # if it fails, h5py reads such datasets
        return all(
            _reports_positions(shape, maxshape)
            for shape, maxshape in (((4, 6), (8, None)), ((4, 6, 3), (6, None, 9)))
        )
    return False


def _reports_positions(shape: tuple[int, ...], maxshape: tuple[int | None, ...]) -> bool:
    chunk = (2, 2, 1)[: len(shape)]
    grid = grid_of(shape, chunk)
    with h5py.File(
        f"h5async-{threading.get_ident()}", "w", driver="core", backing_store=False, libver="latest"
    ) as file:
        data = file.create_dataset("data", shape, "i4", chunks=chunk, maxshape=maxshape)
        for number, cell in enumerate(itertools.product(*map(range, grid))):
            corner = tuple(at * size for at, size in zip(cell, chunk, strict=True))
            data.id.write_direct_chunk(corner, np.full(chunk, number, "i4").tobytes())
        file.flush()
        most = tuple(1 if m is None else -(-m // c) for m, c in zip(maxshape, chunk, strict=True))
        positions = Positions(maxshape.index(None), most)
        reported = _in_python(data.id, chunk, positions.reported_grid, math.prod(grid))
        image = file.id.get_file_image()
    numbers, is_outside = positions.numbers(reported.number, grid)
    stored = [int(np.frombuffer(image, "i4", 1, offset)[0]) for offset in reported.offset]
    return not is_outside and not reported.is_outside and numbers.tolist() == stored


# --- B-trees without HDF5 -------------------------------------------------------------------------


class ChunkTree(NamedTuple):
    """A B-tree of version 1 that lists chunks: of one or two levels, and without a missing chunk.

    `extents` are those of a chunk; `nbytes` is the stored size of a chunk, 0 for any; `itemsize` is
    that of an element. Source: the HDF5 File Format Specification, version 3.0, III.A.1.
    """

    extents: tuple[int, ...]
    itemsize: int
    nbytes: int

    @property
    def node_nbytes(self) -> int:
        """The size of a node: there is a key before each entry, and one behind the last."""
        return _NODE_HEAD_NBYTES + (_MOST_ENTRIES + 1) * _entry(len(self.extents)).itemsize - 8

    def chunks(
        self, shape: tuple[int, ...], at: int, end: int, source: Source
    ) -> ChunkTable | None:
        """Return the chunks of a dataset of this shape, in a file that ends at `end`.

        The root is `at` that offset. ValueError or None if HDF5 or we would reject the tree, or it
        is not there.
        """
        grid = grid_of(shape, self.extents)
        (root,) = self._nodes([at], end, source)
        level = root[5]
        entries = self._entries(root, level)
        last = self._key(root, len(entries))
        if level == 1:
            nodes = self._nodes(entries["offset"].tolist(), end, source)
            below = [self._entries(node, 0) for node in nodes]
            for number, (node, found) in enumerate(zip(nodes, below, strict=True)):
                keys = self._key(node, 0), self._key(node, len(found))
                if keys != (self._key(root, number), self._key(root, number + 1)):
                    return None
            entries = np.concatenate(below)
        is_whole = level < 2 and entries.size == math.prod(grid)
        if not is_whole or entries["corner"].tobytes() != _corners(grid, self.extents):
            return None
        # After the entries comes a corner beyond that of the last chunk.
        ahead = np.frombuffer(last, "<u8", len(shape) + 1, 8) - entries["corner"][-1]
        steps = *self.extents, self.itemsize
        if not ahead[-1] or any(n not in (0, step) for n, step in zip(ahead, steps, strict=True)):
            return None
        return _table(entries["offset"], entries["nbytes"], entries["mask"], self.nbytes, end)

    def _nodes(self, places: list[int], end: int, source: Source) -> list[bytes]:
        if not all(_LEAST_OFFSET <= place <= end - self.node_nbytes for place in places):
            raise ValueError("a node outside the file")
        return list(map(bytes, source.get_ranges(places, [self.node_nbytes] * len(places))))

    def _entries(self, node: bytes, level: int) -> NDArray[Any]:
        """Return the entries of a node; ValueError if it is not one."""
        count = int.from_bytes(node[6:8], "little")
        if bytes(node[:6]) != _CHUNKS + bytes([level]) or not 0 < count <= _MOST_ENTRIES:
            raise ValueError("not a node of chunks")
        return np.frombuffer(node, _entry(len(self.extents)), count, _NODE_HEAD_NBYTES)

    def _key(self, node: bytes, number: int) -> bytes:
        """Return the key before an entry; behind the last one there is a key, too."""
        begin = _NODE_HEAD_NBYTES + number * _entry(len(self.extents)).itemsize
        return bytes(node[begin : begin + _entry(len(self.extents)).itemsize - 8])


class ChunkArray(NamedTuple):
    """A fixed array that lists chunks, without pages, and without a missing chunk.

    `head` are its first bytes, which say how entries are stored; the rest is as in `ChunkTree`.
    Source: the HDF5 File Format Specification, version 3.0, III.C.3.
    """

    extents: tuple[int, ...]
    head: bytes
    nbytes: int

    def chunks(
        self, shape: tuple[int, ...], at: int, end: int, source: Source
    ) -> ChunkTable | None:
        """Return the chunks of a dataset of this shape; see `ChunkTree.chunks`."""
        count = math.prod(grid_of(shape, self.extents))
        entry_nbytes, page_bits = self.head[6], self.head[7]
        nbytes = _BLOCK_HEAD_NBYTES + count * entry_nbytes + 4
        if not _LEAST_OFFSET <= at <= end - _ARRAY_NBYTES or not 0 < count <= 1 << page_bits:
            return None
        header = source.read(at, _ARRAY_NBYTES)
        stored, place = struct.unpack_from("<QQ", header, 8)
        if not (header.startswith(self.head) and has_checksum(header) and stored == count):
            return None
        if not _LEAST_OFFSET <= place <= end - nbytes:
            return None
        block = source.read(place, nbytes)
        begins = b"FADB" + header[4:6] + at.to_bytes(8, "little")
        if not block.startswith(begins) or not has_checksum(block):
            return None
        entries = np.frombuffer(block, np.uint8, count * entry_nbytes, _BLOCK_HEAD_NBYTES)
        entries = entries.reshape(count, entry_nbytes)
        offset, sizes = entries[:, :8].copy().view("<u8")[:, 0], np.full(count, self.nbytes)
        mask = np.zeros(count, np.uint32)
        if entry_nbytes > 8:  # chunks with filters
            wide = np.zeros((count, 8), np.uint8)
            wide[:, : entry_nbytes - 12] = entries[:, 8:-4]
            sizes, mask = wide.view("<u8")[:, 0], entries[:, -4:].copy().view("<u4")[:, 0]
        return _table(offset, sizes, mask, self.nbytes, end)


def has_checksum(structure: bytes) -> bool:
    """Return whether the last four bytes are the checksum of those before."""
    checksum, count = checksum_function(), len(structure) - 4
    found = None if checksum is None else checksum(structure, count, 0)
    return found == int.from_bytes(structure[count:], "little")


def _table(
    offset: NDArray[Any], nbytes: NDArray[Any], mask: NDArray[Any], whole: int, end: int
) -> ChunkTable | None:
    """Return a table of chunks that lie apart in the file; None if they do not.

    Each has size `whole`, if that is not 0.
    """
    is_long = max(offset.max(), nbytes.max()) > end  # (they are unsigned)
    if is_long or not (nbytes == whole if whole else nbytes).all():
        return None
    offset, nbytes = offset.astype(np.int64), nbytes.astype(np.int64)
    order = offset.argsort()
    ends = offset + nbytes
    is_apart = (offset[order[1:]] >= ends[order[:-1]]).all()
    if not is_apart or offset[order[0]] < _LEAST_OFFSET or ends[order[-1]] > end:
        return None
    return ChunkTable(None, offset, nbytes, mask.astype(np.uint32))


@functools.lru_cache(maxsize=64)
def _entry(rank: int) -> np.dtype[Any]:
    """Return the type of an entry of a node: the size, the mask and corner are its key."""
    return np.dtype(
        {
            "names": ["nbytes", "mask", "corner", "offset"],
            "formats": ["<u4", "<u4", ("<u8", (rank + 1,)), "<u8"],
            "offsets": [0, 4, 8, 16 + 8 * rank],
            "itemsize": 24 + 8 * rank,
        }
    )


@functools.lru_cache(maxsize=8)
def _corners(grid: tuple[int, ...], extents: tuple[int, ...]) -> bytes:
    """Return the corners of a grid of chunks as a node lists them, each with an element offset."""
    corners = np.indices((*grid, 1), "<u8").reshape(len(grid) + 1, -1).T
    return bytes((corners * np.array([*extents, 1], "<u8")).astype("<u8"))
