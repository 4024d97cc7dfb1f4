"""Chooses, by measurement, where chunks are decoded: on the host or on the GPU.

With `decode="auto"` the first batches are decoded on both in turn, until each was measured often
enough. The slowest stage counts: all threads together, the link, or the kernels.
"""

from __future__ import annotations

import math
import threading
from typing import Literal

_MEASURED = 4  # batches decoded on each; the first is warm-up, and does not count
_MARGIN = 0.9  # the GPU, which has other work, must be faster by this factor


class DecodeChoice:
    """Decides where chunks are decoded, by the option `decode`. Safe to use from many threads.

    `obstacle` says why the GPU cannot decode, if it cannot.
    """

    def __init__(self, decode: Literal["auto", "host", "device"], obstacle: str | None) -> None:
        self._lock = threading.Lock()
        self._begun = {False: 0, True: 0}
        self._seconds: dict[bool, list[float]] = {False: [], True: []}
        self._on_device: bool | None = None
        self._reason = ""
        self._fallbacks = 0
        if obstacle is not None:
            self._decide(False, f"host: {obstacle}")
        elif decode != "auto":
            self._decide(decode == "device", f'{decode}: decode="{decode}"')
        else:
            self._reason = "not decided yet: both are being measured"

    @property
    def sentence(self) -> str:
        """Where chunks are decoded, and why."""
        if not self._fallbacks:
            return self._reason
        return f"{self._reason}; {self._fallbacks} batches meant for it were left to the host"

    @property
    def is_host(self) -> bool:
        """Whether the host decodes all batches from now on."""
        return self._on_device is False

    @property
    def is_running(self) -> bool:
        """Whether more times are needed."""
        return self._on_device is None

    def next_on_device(self) -> bool:
        """Tell whether the next batch is decoded on the device."""
        with self._lock:
            if self._on_device is not None:
                return self._on_device
            is_next = self._begun[True] < self._begun[False]
            self._begun[is_next] += 1
            return is_next

    def note(self, on_device: bool, seconds: float) -> None:
        """Note the seconds of a batch's slowest stage."""
        with self._lock:
            if self._on_device is not None:
                return
            self._seconds[on_device].append(seconds)
            if min(map(len, self._seconds.values())) >= _MEASURED:
                import statistics

                host, device = (
                    statistics.median(self._seconds[there][1:]) for there in (False, True)
                )
                where = device < _MARGIN * host
                self._decide(
                    where,
                    f"{'device' if where else 'host'}: a batch takes {1e3 * device:.2g} ms on the"
                    f" device, {1e3 * host:.2g} ms on the host",
                )

    def note_fallback(self) -> None:
        """Note a batch that was meant for the device, and that the host has to decode."""
        with self._lock:
            self._fallbacks += 1
        self.note(True, math.inf)

    def _decide(self, on_device: bool, sentence: str) -> None:
        self._on_device = on_device
        self._reason = sentence
