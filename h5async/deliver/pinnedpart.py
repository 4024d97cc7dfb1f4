"""Pins the beginning of host memory: the part that batches use.

A slot has room for the longest samples that may meet in a batch. The system allocates such memory
only when it is touched, and pinning touches all of it. So the pinned part begins at the mean of
batches, and a quarter more, and grows by a quarter when a batch needs more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from h5async.io.shared import MORE

# Pins memory of whole pages, and returns a function that unpins it, once.
Pin = Callable[[NDArray[np.uint8]], Callable[[], object]]


class PinnedPart:
    """Host memory of one slot, whose beginning is pinned.

    `memory` is uint8 (nbytes,), of whole pages; `nbytes` are pinned at once. Exceptions of `pin`
    pass, here and in `reach`.
    """

    def __init__(self, memory: NDArray[np.uint8], pin: Pin, nbytes: int) -> None:
        self._memory = memory
        self._begin = memory.ctypes.data
        self._pin = pin
        self._unpin: Callable[[], object] | None = None
        self._pinned_nbytes = 0
        self._pin_all_of(min(nbytes, memory.nbytes))

    def has(self, array: NDArray[Any]) -> bool:
        """Tell whether a C-contiguous array lies in the memory."""
        begin = array.ctypes.data
        return self._begin <= begin and begin + array.nbytes <= self._begin + self._memory.nbytes

    def reach(self, array: NDArray[Any]) -> None:
        """Pin the memory from its beginning to the end of an array in it.

        Called while the slot is filled, when nothing copies out of the memory.
        """
        nbytes = array.ctypes.data + array.nbytes - self._begin
        if nbytes > self._pinned_nbytes:
            self._pin_all_of(min(nbytes + nbytes // MORE, self._memory.nbytes))

    def _pin_all_of(self, nbytes: int) -> None:
        if self._unpin is not None:
            unpin, self._unpin, self._pinned_nbytes = self._unpin, None, 0
            unpin()
        if nbytes:
            self._unpin = self._pin(self._memory[:nbytes])
            self._pinned_nbytes = nbytes
