"""Memory that grows with the largest batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

MORE = 4  # by one part of so many, memory is larger than what was wanted


class Growing:
    """Memory of whoever fills one slot: as much as was wanted at most, and a quarter more.

    It is grown only while its slot is filled, when nobody uses what it held before.

    Parameters
    ----------
    make
        Returns so many bytes of new memory: uint8 (nbytes,), a NumPy or a CuPy array.
    nbytes
        Taken at once.
    block
        Memory that is there already, in their place.
    """

    def __init__(self, make: Callable[[int], Any], nbytes: int = 0, block: Any = None) -> None:
        self._make = make
        self._block = make(nbytes) if nbytes and block is None else block

    def of(self, nbytes: int) -> Any:
        """Return so much memory: the same each time, while that suffices.

        Raises
        ------
        Exception
            What `make` raises.
        """
        if self._block is None or nbytes > self._block.nbytes:
            self._block = None  # first, because both together may be too much
            self._block = self._make(nbytes + nbytes // MORE)
        return self._block[:nbytes]


def plain_memory(nbytes: int) -> NDArray[np.uint8]:
    """Return new memory, which is not pinned."""
    return np.empty(nbytes, np.uint8)
