"""Defines decoders, and their working memory and checks of lengths.

A decoder writes into memory that is passed to it, never beyond its end, and drops the GIL while it
works. It raises `ValueError` (or imagecodecs' `RuntimeError`) if it finds the bytes damaged: by
lengths always, and by checksums if the format has them. `read/` chains decoders, and checks the
final length.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

# decode(encoded, out, spare) -> a view of `out` (or of `encoded`); `spare` is working memory of
# about the size of a chunk.
Decode = Callable[[Bytes, Bytes, Bytes], Bytes]

_MAX_EXPANSION = 16  # bound of an intermediate result's size, in chunks


def filled(out: Bytes, count: int) -> Bytes:
    """Return the first `count` bytes of `out`."""
    return out if count == out.size else out[:count]


def working_memory(spare: Bytes, nbytes: int) -> Bytes:
    """Return working memory: part of `spare`, or new if a format needs more than usual.

    `ValueError` is raised if the size is so large that the bytes must be damaged.
    """
    if nbytes <= spare.size:
        return spare[:nbytes]
    if nbytes > _MAX_EXPANSION * spare.size:
        raise ValueError(f"a header says {nbytes} bytes, far more than a chunk has")
    return np.empty(nbytes, np.uint8)


def require_length(name: str, found: int, expected: int) -> None:
    """Raise `ValueError` unless the number of bytes is as expected."""
    if found != expected:
        raise ValueError(f"{name}: expected {expected} bytes, got {found}")


def require_room(name: str, nbytes: int, out: Bytes) -> None:
    """Raise `ValueError` if a result does not fit into `out`."""
    if nbytes > out.size:
        raise ValueError(f"{name}: expected at most {out.size} bytes, got {nbytes}")
