"""Takes what a field of a batch is apart into arrays, and puts it together again.

A plain array, `Ragged`, `Images` or `Csr` enters in the helper process; in the reader's process,
one leaves over the same memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from numpy.typing import NDArray

from h5async.samples.images import Images
from h5async.samples.ragged import Ragged
from h5async.samples.sparse import Csr

MOST_PARTS = 3  # arrays of one field


class FieldParts(NamedTuple):
    """What a field consists of.

    Attributes
    ----------
    kind
        ``"array"``, ``"ragged"``, ``"images"`` or ``"csr"``.
    arrays
        Its arrays.
    columns
        Of sparse rows: how many there are.
    """

    kind: str
    arrays: tuple[NDArray[Any], ...]
    columns: int = 0


def taken_apart(value: Any) -> FieldParts:
    """Return the arrays of which the value of a field consists."""
    if isinstance(value, Images):
        return FieldParts("images", (value.values, value.offsets, value.shapes))
    if isinstance(value, Ragged):
        return FieldParts("ragged", (value.values, value.offsets))
    if isinstance(value, Csr):
        return FieldParts("csr", (value.data, value.indices, value.indptr), value.shape[1])
    return FieldParts("array", (value,))


def put_together(kind: str, arrays: Sequence[NDArray[Any]], columns: int) -> Any:
    """Return the value of a field that consists of these arrays."""
    if kind == "images":
        return Images(*arrays)
    if kind == "ragged":
        return Ragged(*arrays)
    if kind == "csr":
        data, indices, indptr = arrays
        return Csr(data, indices, indptr, (len(indptr) - 1, columns))
    (array,) = arrays
    return array
