"""Guesses which B-trees, arrays and heaps HDF5 will read: chunk indices, links, attributes.

The bytes of a structure enter; the places that it refers to leave, as the HDF5 File Format
Specification (version 3.0) describes them. A `Place` is a structure in the file; a `Cursor` reads
numbers from its bytes. Pure; see `references.py`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple, TypeAlias

NONSENSE = (
    IndexError,
    ValueError,
    OverflowError,
    struct.error,
)  # raised for bytes that are not the expected structure
_PIECE_NBYTES = 1 << 20  # of large tables
_MOST_NODE_NBYTES = 1 << 20
_MOST_NBYTES = 1 << 40  # of a table
_CHECKSUM_NBYTES = 4
_HEAD_NBYTES = 6  # of most structures: signature, version, kind


class Format(NamedTuple):
    """The contents of a superblock: the sizes of numbers, and of nodes of B-trees.

    Addresses are relative to `base`; `end` is the end of file address, -1 if undefined. A node has
    up to twice as many entries as its ``k``.
    """

    base: int = 0
    offset_nbytes: int = 8
    length_nbytes: int = 8
    chunk_k: int = 32
    group_k: int = 16
    leaf_k: int = 4
    end: int = -1


class Place(NamedTuple):
    """A structure that HDF5 will probably read; `find`, if any, finds the places it refers to.

    All objects of a group have the same number, `group`; other structures have -1.
    """

    offset: int
    nbytes: int
    find: Find | None = None
    group: int = -1


class Cursor:
    """Reads the bytes of a place, one number after the other; IndexError at the end.

    They lie at `begin` in the file, by default at the place; `address_at` is where the last address
    lies.
    """

    def __init__(self, data: bytes, form: Format, place: Place, begin: int = -1) -> None:
        self.data, self.form, self.place, self.at = data, form, place, 0
        self.begin = place.offset if begin < 0 else begin
        self.address_at = -1

    @property
    def rest(self) -> int:
        """The number of bytes left."""
        return len(self.data) - self.at

    def take(self, nbytes: int) -> bytes:
        """Return the next bytes."""
        begin, end = self.at, self.at + nbytes
        if not begin <= end <= len(self.data):
            raise IndexError("the structure ends before")
        self.at = end
        return self.data[begin:end]

    def number(self, nbytes: int = 1) -> int:
        """Return the next number, which is unsigned."""
        return int.from_bytes(self.take(nbytes), "little")

    def length(self) -> int:
        """Return the next length."""
        return self.number(self.form.length_nbytes)

    def address(self) -> int:
        """Return the next address, relative to the beginning of the file; -1 if undefined."""
        self.address_at = self.begin + self.at
        found = self.take(self.form.offset_nbytes)
        is_undefined = found.count(0xFF) == len(found)
        return -1 if is_undefined else self.form.base + int.from_bytes(found, "little")

    def expect(self, constant: bytes) -> None:
        """Take bytes that must equal `constant`; else ValueError."""
        if self.take(len(constant)) != constant:
            raise ValueError("it is another structure")


Find: TypeAlias = Callable[[Cursor], Iterator[Place]]


def pieces(offset: int, nbytes: int) -> Iterator[Place]:
    """Yield a table without references; a large one in pieces, to be fetched in parallel."""
    for begin in range(0, nbytes if offset >= 0 else 0, _PIECE_NBYTES):
        yield Place(offset + begin, min(_PIECE_NBYTES, nbytes - begin))


def find_places(place: Place, data: bytes, form: Format) -> list[Place]:
    """Return the places that a structure refers to, as far as its bytes make sense."""
    found: list[Place] = []
    if place.find is not None:
        try:
            for one in place.find(Cursor(data, form, place)):
                if one.offset >= 0 and one.nbytes > 0:
                    found.append(one)
        except NONSENSE:
            pass
    return found


# --- B-trees of version 1 ------------------------------------------------------------------------


def chunk_tree(form: Format, offset: int, rank: int) -> Place:
    """Return the root of the B-tree of a dataset's chunks; `rank` is the dataset's plus one."""
    return _node(form, offset, form.chunk_k, 1, 8 + 8 * rank, None, -1)


def group_tree(form: Format, offset: int, symbols: Place) -> Place:
    """Return the root of a group's B-tree; `symbols` is a template of its symbol table nodes."""
    return _node(form, offset, form.group_k, 0, form.length_nbytes, symbols, -1)


def _node(
    form: Format, offset: int, k: int, kind: int, key_nbytes: int, leaf: Place | None, level: int
) -> Place:
    nbytes = 8 + 2 * form.offset_nbytes + 2 * k * (key_nbytes + form.offset_nbytes) + key_nbytes
    find = partial(_children, k=k, kind=kind, key_nbytes=key_nbytes, leaf=leaf, level=level)
    is_last = level == 0 and leaf is None
    return Place(offset, min(nbytes, _MOST_NODE_NBYTES), None if is_last else find)


def _children(
    found: Cursor, k: int, kind: int, key_nbytes: int, leaf: Place | None, level: int
) -> Iterator[Place]:
    """Yield the children of a node; `leaf` is the template of those of the last level."""
    found.expect(b"TREE" + bytes([kind]))
    own = found.number()
    if level not in (-1, own):
        raise ValueError("a node of another level")
    count = found.number(2)
    found.take(2 * found.form.offset_nbytes)
    below = _node(found.form, 0, k, kind, key_nbytes, leaf, own - 1) if own else leaf
    for _ in range(count):
        found.take(key_nbytes)
        if below is not None:
            yield below._replace(offset=found.address())


# --- B-trees of version 2 ------------------------------------------------------------------------


def tree_header(form: Format, offset: int) -> Place:
    """Return the header of a B-tree of version 2."""
    return Place(offset, 22 + form.offset_nbytes + form.length_nbytes, _tree)


class _Level(NamedTuple):
    """Sizes of the two counts in pointers to nodes of a level; maximum records in and below one."""

    count_nbytes: int
    total_nbytes: int
    most: int


def _tree(found: Cursor) -> Iterator[Place]:
    found.expect(b"BTHD\0")
    found.take(1)
    node_nbytes, record_nbytes, depth = found.number(4), found.number(2), found.number(2)
    found.take(2)
    offset, count = found.address(), found.number(2)
    room = node_nbytes - _HEAD_NBYTES - _CHECKSUM_NBYTES
    if not 0 < record_nbytes <= room or node_nbytes > _MOST_NODE_NBYTES:
        raise ValueError("nodes have no room for a record")
    most = room // record_nbytes
    levels = [_Level(_bytes_for(most), 0, most)]
    for _ in range(min(depth, 63)):
        pointer_nbytes = found.form.offset_nbytes + levels[0].count_nbytes + levels[-1].total_nbytes
        own = (room - pointer_nbytes) // (record_nbytes + pointer_nbytes)
        if own < 1:
            raise ValueError("nodes have no room for a child")
        total = (own + 1) * levels[-1].most + own
        levels.append(_Level(levels[0].count_nbytes, _bytes_for(total), total))
    yield _tree_node(offset, node_nbytes, record_nbytes, count, tuple(levels))


def _bytes_for(limit: int) -> int:
    return (limit.bit_length() - 1) // 8 + 1


def _tree_node(
    offset: int, nbytes: int, record_nbytes: int, count: int, levels: tuple[_Level, ...]
) -> Place:
    find = partial(_tree_children, record_nbytes=record_nbytes, count=count, levels=levels)
    return Place(offset, nbytes, find if len(levels) > 1 else None)


def _tree_children(
    found: Cursor, record_nbytes: int, count: int, levels: tuple[_Level, ...]
) -> Iterator[Place]:
    found.expect(b"BTIN\0")
    found.take(1 + count * record_nbytes)
    below = levels[-2]
    for _ in range(count + 1):
        offset, number = found.address(), found.number(below.count_nbytes)
        found.take(below.total_nbytes)
        yield _tree_node(offset, found.place.nbytes, record_nbytes, number, levels[:-1])


# --- fixed arrays --------------------------------------------------------------------------------


def fixed_array(form: Format, offset: int) -> Place:
    """Return the header of a fixed array."""
    return Place(offset, 12 + form.length_nbytes + form.offset_nbytes, _fixed_array)


def _fixed_array(found: Cursor) -> Iterator[Place]:
    found.expect(b"FAHD\0")
    found.take(1)
    entry_nbytes, page_bits, count = found.number(), found.number(), found.length()
    pages = 0 if count <= 1 << page_bits else -(-count >> page_bits)
    nbytes = _HEAD_NBYTES + found.form.offset_nbytes + _CHECKSUM_NBYTES + count * entry_nbytes
    nbytes += -(-pages // 8) + pages * _CHECKSUM_NBYTES
    yield from pieces(found.address(), min(nbytes, _MOST_NBYTES))


# --- extensible arrays (H5EAhdr.c, H5EAiblock.c, H5EAsblock.c, H5EAdblock.c) ---------------------


def extensible_array(form: Format, offset: int) -> Place:
    """Return the header of an extensible array."""
    return Place(offset, 16 + 6 * form.length_nbytes + form.offset_nbytes, _extensible_array)


class _Array(NamedTuple):
    """How the elements of an extensible array lie in its blocks."""

    entry_nbytes: int
    bits: int  # of the number of elements
    least: int  # elements of the first data block
    page: int  # elements of a page

    @property
    def head_nbytes(self) -> int:
        """The size of the number of a block's first element."""
        return -(-self.bits // 8)

    def entries(self, row: int) -> int:
        return self.least << ((row + 1) // 2)

    def pages(self, row: int) -> int:
        """Return the number of pages of each data block of a super block; 0 if it has none."""
        count = self.entries(row)
        return count // self.page if count > self.page else 0

    def block(self, form: Format, offset: int, row: int) -> Iterator[Place]:
        nbytes = _HEAD_NBYTES + form.offset_nbytes + self.head_nbytes + _CHECKSUM_NBYTES
        nbytes += self.entries(row) * self.entry_nbytes + self.pages(row) * _CHECKSUM_NBYTES
        yield from pieces(offset, min(nbytes, _MOST_NBYTES))


def _extensible_array(found: Cursor) -> Iterator[Place]:
    found.expect(b"EAHD\0")
    found.take(1)
    entry_nbytes, bits, own, least, pointers, page_bits = found.take(6)
    found.take(6 * found.form.length_nbytes)
    if not 0 < bits <= 64 or not least or least & (least - 1) or pointers < 2:
        raise ValueError("an array that cannot be")
    array = _Array(entry_nbytes, bits, least, 1 << page_bits)
    rows = 1 + bits - (least.bit_length() - 1)
    direct_rows = 2 * (pointers.bit_length() - 1)
    nbytes = _HEAD_NBYTES + found.form.offset_nbytes + own * entry_nbytes + _CHECKSUM_NBYTES
    nbytes += (2 * (pointers - 1) + max(0, rows - direct_rows)) * found.form.offset_nbytes
    find = partial(_index_block, array=array, own=own, rows=(direct_rows, rows))
    yield Place(found.address(), nbytes, find)


def _index_block(found: Cursor, array: _Array, own: int, rows: tuple[int, int]) -> Iterator[Place]:
    found.expect(b"EAIB\0")
    form = found.form
    found.take(1 + form.offset_nbytes + own * array.entry_nbytes)
    for row in range(rows[0]):
        for _ in range(1 << (row // 2)):
            yield from array.block(form, found.address(), row)
    for row in range(*rows):
        nbytes = _HEAD_NBYTES + form.offset_nbytes + array.head_nbytes + _CHECKSUM_NBYTES
        nbytes += (1 << (row // 2)) * (form.offset_nbytes + -(-array.pages(row) // 8))
        find = partial(_super_block, array=array, row=row)
        yield Place(found.address(), min(nbytes, _MOST_NODE_NBYTES), find)


def _super_block(found: Cursor, array: _Array, row: int) -> Iterator[Place]:
    found.expect(b"EASB\0")
    blocks = 1 << (row // 2)
    found.take(1 + found.form.offset_nbytes + array.head_nbytes)
    found.take(blocks * -(-array.pages(row) // 8))
    for _ in range(blocks):
        yield from array.block(found.form, found.address(), row)


# --- fractal heaps -------------------------------------------------------------------------------


def fractal_heap(form: Format, offset: int, content: Find | None = None) -> Place:
    """Return the header of a fractal heap; `content` finds what its objects refer to."""
    find = partial(_heap, content=content)
    return Place(offset, 26 + 12 * form.length_nbytes + 3 * form.offset_nbytes, find)


class _Heap(NamedTuple):
    """How the blocks of a fractal heap grow, row by row."""

    width: int
    least: int  # bytes of the first block
    most: int  # bytes of the largest one
    head_nbytes: int  # of a direct block, before its objects
    number_nbytes: int  # of the offset of a block
    content: Find | None

    def nbytes(self, row: int) -> int:
        return self.least << max(0, row - 1)


def _heap(found: Cursor, content: Find | None) -> Iterator[Place]:
    found.expect(b"FRHP\0")
    form = found.form
    found.take(2)
    filters_nbytes, flags = found.number(2), found.number()
    found.take(4 + form.length_nbytes)
    yield tree_header(form, found.address())  # of huge objects
    found.take(9 * form.length_nbytes + form.offset_nbytes)
    width, least, most = found.number(2), found.length(), found.length()
    bits = found.number(2)
    found.take(2)
    offset, rows = found.address(), found.number(2)
    is_power = all(n and not n & (n - 1) for n in (width, least, most))
    if filters_nbytes or not is_power or most > _MOST_NODE_NBYTES:
        raise ValueError("a heap with filters, or that cannot be")
    number_nbytes = -(-bits // 8)
    head_nbytes = 5 + form.offset_nbytes + number_nbytes + (_CHECKSUM_NBYTES if flags & 2 else 0)
    heap = _Heap(width, least, most, head_nbytes, number_nbytes, content)
    yield _indirect(form, heap, offset, rows) if rows else _direct(heap, offset, least)


def _direct(heap: _Heap, offset: int, nbytes: int) -> Place:
    find = None if heap.content is None else partial(_objects, heap=heap)
    return Place(offset, nbytes, find)


def _objects(found: Cursor, heap: _Heap) -> Iterator[Place]:
    found.expect(b"FHDB\0")
    found.at = heap.head_nbytes
    if heap.content is not None:
        yield from heap.content(found)


def _indirect(form: Format, heap: _Heap, offset: int, rows: int) -> Place:
    nbytes = 9 + form.offset_nbytes + heap.number_nbytes + rows * heap.width * form.offset_nbytes
    return Place(offset, min(nbytes, _MOST_NODE_NBYTES), partial(_blocks, heap=heap, rows=rows))


def _blocks(found: Cursor, heap: _Heap, rows: int) -> Iterator[Place]:
    found.expect(b"FHIB\0")
    found.take(found.form.offset_nbytes + heap.number_nbytes)
    for row in range(rows):
        nbytes = heap.nbytes(row)
        for _ in range(heap.width):
            offset = found.address()
            if nbytes <= heap.most:
                yield _direct(heap, offset, nbytes)
            else:
                below = nbytes.bit_length() - (heap.least * heap.width).bit_length() + 1
                yield _indirect(found.form, heap, offset, min(below, rows - 1))
