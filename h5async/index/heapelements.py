"""Decodes references to elements of variable length: how long these are, and where they lie.

References are decoded as a dataset is opened, so that all lengths are known before anything else is
read. What they refer to is read by `read/heaps.py`. Neither references nor files are trusted.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from h5async.core.binding import Core, address
from h5async.core.heap import INDEX_BITS, MOST_ADDRESS, HeapStruct
from h5async.errors import ReadError
from h5async.index.variablelength import VariableLength

DAMAGED = "; the file is damaged"
_NUM_INDICES = 1 << INDEX_BITS


@dataclass(frozen=True)
class Sequences:
    """Elements of a dataset, or of a part of it: how long they are, and where they lie.

    12 bytes each. Many threads may read them at once: places are refined as they are found, and
    whoever does so writes the same number.

    Attributes
    ----------
    form
        How they are stored.
    where
        What messages call the dataset: ``'a.h5: dataset "tokens"'``.
    length
        uint32 (n,): how many values each has; 0 where there is no address.
    place
        int64 (n,): the first byte of its values in the file; below 0: ``-1 - (address << 16 |
        index)``, where its collection was not walked yet.
    total
        How many values there are in all.
    """

    form: VariableLength
    where: str
    length: NDArray[np.uint32]
    place: NDArray[np.int64]
    total: int

    @classmethod
    def decoded(
        cls,
        references: NDArray[np.uint8],
        form: VariableLength,
        file_nbytes: int,
        where: str,
        core: Core | None,
    ) -> Sequences:
        """Decode references; see `decoded_blocks`, of which this is the only one.

        Parameters
        ----------
        references
            (n, reference_nbytes), C-contiguous: as stored.
        form, file_nbytes, where, core
            See there.
        """
        blocks = [(0, references)] if len(references) else []
        return cls.decoded_blocks(len(references), blocks, form, file_nbytes, where, core)

    @classmethod
    def decoded_blocks(
        cls,
        count: int,
        blocks: Iterable[tuple[int, NDArray[np.uint8]]],
        form: VariableLength,
        file_nbytes: int,
        where: str,
        core: Core | None,
    ) -> Sequences:
        """Decode references, some at a time: as stored, they take more memory than what leaves.

        Parameters
        ----------
        count
            How many there are in all.
        blocks
            The number of the first reference, and (n, reference_nbytes), C-contiguous.
        form, where
            As the attributes.
        file_nbytes
            Of the file: no element has more.
        core
            The compiled core; None: it is done in Python.

        Raises
        ------
        ReadError
            If an element is longer than the file.
        """
        length, place, total = np.empty(count, np.uint32), np.empty(count, np.int64), 0
        for first, references in blocks:
            here = slice(first, first + len(references))
            found = cls(form, where, length[here], place[here], 0)
            if core is None:
                more = _decode(references, found, file_nbytes)
            else:
                heap = found.struct()
                stored = np.ascontiguousarray(references)
                more = core.decode_references(ctypes.byref(heap), address(stored), file_nbytes)
            if more < 0:
                number = -1 - more
                values = int.from_bytes(references[number, :4].tobytes(), "little")
                raise ReadError(
                    f"{where}, element {first + number}: its {values} values of"
                    f" {form.dtype.itemsize} bytes do not fit into the file of {file_nbytes}"
                    f" bytes{DAMAGED}"
                )
            total += more
        return cls(form, where, length, place, total)

    def struct(self) -> HeapStruct:
        """Return them as the core takes them, which writes to the places."""
        assert self.place.flags.writeable
        form = self.form
        return HeapStruct(
            length=address(self.length),
            place=address(self.place),
            count=self.length.size,
            base=form.base,
            value_nbytes=form.dtype.itemsize,
            address_nbytes=form.address_nbytes,
            size_nbytes=form.size_nbytes,
            is_text=form.is_text,
        )


def _decode(references: NDArray[np.uint8], found: Sequences, most_nbytes: int) -> int:
    """Do what the core's `decode_references` does."""
    width = found.form.address_nbytes
    fields = [("length", "<u4"), ("address", f"<u{width}"), ("index", "<u4")]
    stored = np.ascontiguousarray(references).view(np.dtype(fields)).reshape(-1)
    start, index = stored["address"].astype(np.uint64), stored["index"].astype(np.uint64)
    length = np.where(start == 0, 0, stored["length"]).astype(np.uint32)
    too_long = np.flatnonzero(length > most_nbytes // found.form.dtype.itemsize)
    if too_long.size:
        return -1 - int(too_long[0])
    is_odd = (start > MOST_ADDRESS) | ((index >= _NUM_INDICES) & (start != 0))
    start[is_odd], index[is_odd | (start == 0)] = MOST_ADDRESS, 0
    found.length[...] = length
    found.place[...] = -1 - (start << np.uint64(INDEX_BITS) | index).astype(np.int64)
    return int(length.sum(dtype=np.int64))
