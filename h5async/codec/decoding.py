"""What decoders share: working memory enters, views of it leave; claimed lengths are checked."""

from __future__ import annotations

from collections.abc import Callable

import imagecodecs
import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

# decode(encoded, out, spare) -> a view of `out` (some: of `encoded`); `spare` is working memory of
# about the size of a chunk.
Decode = Callable[[Bytes, Bytes, Bytes], Bytes]

_MAX_EXPANSION = 16  # how much larger than a chunk anything between its filters may be


def filled(out: Bytes, count: int) -> Bytes:
    """Return the first `count` bytes of `out`."""
    return out if count == out.size else out[:count]


def working_memory(spare: Bytes, nbytes: int) -> Bytes:
    """Return working memory: of `spare`, or, where a format asks for more than usual, new.

    Raises
    ------
    ValueError
        If so much is asked for that the bytes must be damaged.
    """
    if nbytes <= spare.size:
        return spare[:nbytes]
    if nbytes > _MAX_EXPANSION * spare.size:
        raise ValueError(f"{nbytes} bytes are claimed, far more than a chunk has")
    return np.empty(nbytes, np.uint8)


def require_length(name: str, found: int, due: int) -> None:
    """Raise `ValueError` unless as many bytes were found as are due."""
    if found != due:
        raise ValueError(f"{name} gives {found} bytes, {due} are due")


def unshuffle(element_nbytes: int, encoded: Bytes, out: Bytes, _spare: Bytes) -> Bytes:
    """Undo HDF5's shuffle: gather the bytes of each element.

    Bytes that make no whole element stay where they are.
    """
    if encoded.size > out.size:
        raise ValueError(f"shuffle gives {encoded.size} bytes, {out.size} are due")
    out = filled(out, encoded.size)
    count = encoded.size // element_nbytes
    body = count * element_nbytes
    if element_nbytes in (2, 4, 8) and count:
        dtype = f"u{element_nbytes}"
        imagecodecs.byteshuffle_decode(encoded[:body].view(dtype), out=out[:body].view(dtype))
    else:
        planes = encoded[:body].reshape(element_nbytes, count)
        np.copyto(out[:body].reshape(count, element_nbytes), planes.T)
    np.copyto(out[body:], encoded[body:])
    return out
