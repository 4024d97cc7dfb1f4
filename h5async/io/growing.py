"""Memory that grows with the largest batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

MORE = 4  # memory is larger than requested by a quarter


class Growing:
    """A buffer for filling one slot: the largest size requested so far, and a quarter more.

    It grows only while its slot is filled, when its former content is no longer used. `make`
    returns new memory, uint8 (nbytes,), as a NumPy or a CuPy array. `nbytes` are allocated at once,
    unless `block` exists already.
    """

    def __init__(self, make: Callable[[int], Any], nbytes: int = 0, block: Any = None) -> None:
        self._make = make
        self._block = make(nbytes) if nbytes and block is None else block

    def of(self, nbytes: int) -> Any:
        """Return `nbytes` of memory: the same memory each time, while it suffices."""
        if self._block is None or nbytes > self._block.nbytes:
            self._block = None  # first, because both together may be too much
            self._block = self._make(nbytes + nbytes // MORE)
        return self._block[:nbytes]


def plain_memory(nbytes: int) -> NDArray[np.uint8]:
    """Return new memory, which is not pinned."""
    return np.empty(nbytes, np.uint8)
