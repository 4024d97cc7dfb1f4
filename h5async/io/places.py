"""Places of structures in an HDF5 file, and how numbers are read out of their bytes. Pure."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeAlias

NONSENSE = (
    IndexError,
    ValueError,
    OverflowError,
    struct.error,
)  # raised for bytes that are no such structure
_PIECE_NBYTES = 1 << 20  # of large tables


class Format(NamedTuple):
    """What the superblock of a file says: the sizes of numbers, and of nodes of B-trees.

    `base` is where addresses count from, `end` what the file is said to have, -1 if that is
    undefined. A node has up to twice as many entries as its ``k``.
    """

    base: int = 0
    offset_nbytes: int = 8
    length_nbytes: int = 8
    chunk_k: int = 32
    group_k: int = 16
    leaf_k: int = 4
    end: int = -1


class Place(NamedTuple):
    """A structure that HDF5 will probably read; `find` finds what that refers to, if anything.

    All objects of a group have the same number, `group`; other structures have -1.
    """

    offset: int
    nbytes: int
    find: Find | None = None
    group: int = -1


class Cursor:
    """Reads the bytes at a place, one number after the other; IndexError at their end."""

    def __init__(self, data: bytes, form: Format, place: Place) -> None:
        self.data, self.form, self.place, self.at = data, form, place, 0

    @property
    def rest(self) -> int:
        """The number of bytes that are left."""
        return len(self.data) - self.at

    def take(self, nbytes: int) -> bytes:
        """Return the next bytes."""
        begin, end = self.at, self.at + nbytes
        if not begin <= end <= len(self.data):
            raise IndexError("the structure ends before")
        self.at = end
        return self.data[begin:end]

    def number(self, nbytes: int = 1) -> int:
        """Return the next number, which has no sign."""
        return int.from_bytes(self.take(nbytes), "little")

    def length(self) -> int:
        """Return the next number that has the size of lengths."""
        return self.number(self.form.length_nbytes)

    def address(self) -> int:
        """Return the next address, from the beginning of the file; -1 if it is undefined."""
        found = self.take(self.form.offset_nbytes)
        is_undefined = found.count(0xFF) == len(found)
        return -1 if is_undefined else self.form.base + int.from_bytes(found, "little")

    def expect(self, constant: bytes) -> None:
        """Take some bytes, which must be these; else ValueError."""
        if self.take(len(constant)) != constant:
            raise ValueError("it is another structure")


Find: TypeAlias = Callable[[Cursor], Iterator[Place]]


def pieces(offset: int, nbytes: int) -> Iterator[Place]:
    """Yield a table that refers to nothing; a large one in pieces, to fetch them side by side."""
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
