"""Decodes references to variable-length elements: their lengths and positions.

References are decoded when a dataset is opened, so that all lengths are known before anything else
is read. `read/heaps.py` reads their targets. Neither references nor files are trusted.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from h5async.core.binding import Core, address
from h5async.core.structures import INDEX_BITS, MOST_ADDRESS, HeapStruct
from h5async.errors import ReadError
from h5async.index.variablelength import VariableLength

DAMAGED = "; the file is damaged"
_NUM_INDICES = 1 << INDEX_BITS


@dataclass(frozen=True)
class Sequences:
    """Elements of a dataset, or of a part of it: their lengths and positions.

    12 bytes each. Many threads may read them at once: positions are refined when they are found,
    and all threads write the same number.

    Attributes
    ----------
    form
        How they are stored.
    where
        The name of the dataset in messages: ``'a.h5: dataset "tokens"'``.
    length
        uint32 (n,): the number of values of each; 0 if there is no address.
    place
        int64 (n,): the first byte of its values in the file; negative: ``-1 - (address << 16 |
        index)``, if its collection was not walked yet.
    total
        The number of all values.
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
        """Decode references, as a single block; see `decoded_blocks`."""
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
        """Decode references block by block: as stored, they take more memory than the result.

        Parameters
        ----------
        count
            The number of references.
        blocks
            The number of the first reference, and (n, reference_nbytes), C-contiguous: as stored.
        form, where
            As the attributes.
        file_nbytes
            Size of the file: no element is longer.
        core
            The compiled core; None to decode in Python.

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
        """Return the structure for the core, which writes to the positions."""
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
    """Decode like the core's `decode_references`."""
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
