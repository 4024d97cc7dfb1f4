"""Orders of samples that a sampler of the user's own draws, an epoch at a time.

A sampler is an iterable of sample numbers, or of lists of them, which are the batches. It is begun
anew for each epoch, after its `set_epoch`, if it has one. An epoch is drawn whole, so that its
numbers can be asked for again, and kept while it lasts: 8 bytes a sample. Of a sampler that has a
state, that of each epoch's beginning is kept, and an epoch that is resumed is drawn from there. One
that has neither is begun once for each epoch before.
"""

from __future__ import annotations

import collections
import itertools
import threading
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from h5async.errors import ConfigError, H5AsyncError
from h5async.system.interruptions import interruption

Int64s = NDArray[np.int64]

_EPOCHS_KEPT = 3


class _Epoch(NamedTuple):
    """What was drawn for an epoch.

    Attributes
    ----------
    samples
        int64 (n,): all sample numbers.
    bounds
        int64 (batches + 1,): where the batches begin, where the sampler draws batches.
    state
        Of the sampler when the epoch was begun; None: it has none.
    """

    samples: Int64s
    bounds: Int64s | None
    state: Any


class SamplerOrder:
    """The order that a sampler draws. Safe to use from many threads.

    Where it draws batches, each stands for `batch_size` positions, though it may be shorter.

    Parameters
    ----------
    sampler
        An iterable of sample numbers, or of lists of them.
    num_samples
        Samples of the dataset.
    batch_size
        Samples in a batch, at most.

    Raises
    ------
    ConfigError
        If it draws what is no sample, or too large a batch.
    """

    def __init__(self, sampler: Iterable[Any], num_samples: int, batch_size: int) -> None:
        self._sampler = sampler
        self._num_samples = num_samples
        self._batch_size = batch_size
        self._lock = threading.RLock()
        self._epochs: dict[int, _Epoch] = {}
        self._state: tuple[int, Any] | None = None  # an epoch, and from where it is drawn
        self._begun = 0  # how often the sampler was begun
        self.size = self._positions(self._epoch(0))

    def samples(self, epoch: int, start: int, stop: int) -> Int64s:
        """Return the samples at positions `start` to `stop` of an epoch, as a new array.

        Raises
        ------
        ConfigError
            If the sampler draws what is no sample, or another number of them than before.
        """
        found = self._epoch(epoch)
        if self._positions(found) != self.size:
            what = "batches" if found.bounds is not None else "samples"
            sizes = (self._positions(found), self.size)
            if found.bounds is not None:
                sizes = (sizes[0] // self._batch_size, sizes[1] // self._batch_size)
            raise ConfigError(
                f"sampler: {sizes[0]} {what} were drawn for epoch {epoch}, and {sizes[1]} for the"
                " first; all epochs must have equally many"
            )
        if found.bounds is None:
            return found.samples[start:stop].copy()
        batch = start // self._batch_size
        return found.samples[found.bounds[batch] : found.bounds[batch + 1]].copy()

    def state(self, epoch: int) -> Any:
        """Return the state of the sampler when an epoch was begun; None: it has none."""
        return self._epoch(epoch).state

    def restore(self, epoch: int, state: Any) -> None:
        """Draw an epoch from a state; what was drawn before is forgotten."""
        with self._lock:
            self._epochs, self._state = {}, (epoch, state)

    def _positions(self, epoch: _Epoch) -> int:
        if epoch.bounds is None:
            return epoch.samples.size
        return (epoch.bounds.size - 1) * self._batch_size

    def _epoch(self, epoch: int) -> _Epoch:
        with self._lock:
            found = self._epochs.get(epoch)
            if found is None:
                found = self._drawn(epoch)
                kept = list(self._epochs.items())[1 - _EPOCHS_KEPT :]
                self._epochs = {**dict(kept), epoch: found}
            return found

    def _drawn(self, epoch: int) -> _Epoch:
        sampler: Any = self._sampler
        try:
            has_epochs, has_state = hasattr(sampler, "set_epoch"), hasattr(sampler, "state_dict")
            if has_state and self._state is not None and self._state[0] == epoch:
                sampler.load_state_dict(self._state[1])
            elif not has_epochs:
                for _ in range(self._begun, epoch):
                    collections.deque(sampler, maxlen=0)
                    self._begun += 1
            if has_epochs:
                sampler.set_epoch(epoch)
            state = sampler.state_dict() if has_state else None
            drawn = list(sampler)
            self._begun = epoch + 1
        except Exception as error:
            if interruption(error) is not None or isinstance(error, H5AsyncError):
                raise
            raise ConfigError(
                f"sampler: {type(error).__name__} was raised for epoch {epoch}: {error}"
            ) from error
        if not drawn or not isinstance(drawn[0], Iterable):
            return _Epoch(self._checked(drawn, epoch), None, state)
        batches = [list(batch) for batch in drawn]
        sizes = [len(batch) for batch in batches]
        if min(sizes) < 1 or max(sizes) > self._batch_size:
            raise ConfigError(
                f"sampler: a batch of {min(sizes) or max(sizes)} samples was drawn for epoch"
                f" {epoch}; a batch has 1 to batch_size={self._batch_size}"
            )
        samples = self._checked(list(itertools.chain.from_iterable(batches)), epoch)
        return _Epoch(samples, np.cumsum([0, *sizes]), state)

    def _checked(self, drawn: list[Any], epoch: int) -> Int64s:
        found = np.asarray(drawn)
        if not found.size:
            return np.zeros(0, np.int64)
        if found.dtype.kind not in "iu" or found.ndim != 1:
            raise ConfigError(f"sampler: must draw integers, or lists of them, found {drawn[0]!r}")
        least, most = int(found.min()), int(found.max())
        if least < 0 or most >= self._num_samples:
            raise ConfigError(
                f"sampler: sample {least if least < 0 else most} was drawn for epoch {epoch}, and"
                f" the dataset has samples 0 to {self._num_samples - 1}"
            )
        return found.astype(np.int64)
