"""Defines what a decoder is, and what decoders share: working memory, and checks of lengths.

Each decoder writes into memory that is handed to it, cannot write past its end, drops the GIL for
the work, and raises `ValueError` (or imagecodecs' `RuntimeError`) where the bytes are damaged as
far as their format can tell: lengths always, checksums where there are some. `read/`
chains decoders, and checks the final length.
"""

from __future__ import annotations

from collections.abc import Callable

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
        raise ValueError(f"a header says {nbytes} bytes, far more than a chunk has")
    return np.empty(nbytes, np.uint8)


def require_length(name: str, found: int, expected: int) -> None:
    """Raise `ValueError` unless as many bytes were found as expected."""
    if found != expected:
        raise ValueError(f"{name}: expected {expected} bytes, got {found}")


def require_room(name: str, nbytes: int, out: Bytes) -> None:
    """Raise `ValueError` if a result does not fit into `out`."""
    if nbytes > out.size:
        raise ValueError(f"{name}: expected at most {out.size} bytes, got {nbytes}")
