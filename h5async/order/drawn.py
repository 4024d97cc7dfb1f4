"""Takes the order of samples from a user's sampler, an epoch at a time.

A sampler is an iterable of sample numbers, or of batches: lists of sample numbers. Each epoch
iterates it again, after calling its `set_epoch`, if it has one. An epoch is drawn as a whole and
kept while it lasts, at 8 bytes a sample.

A reader that goes back, or is given a state, draws an epoch again. It starts from the state that
the sampler had at the epoch's beginning, or calls `set_epoch`. A sampler with neither is iterated
once for each earlier epoch. The result must equal the samples drawn when the state was saved.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import operator
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from h5async.errors import ConfigError, H5AsyncError
from h5async.order.sampling import Order
from h5async.order.selection import Int64s
from h5async.spelling import named
from h5async.system.interruptions import interruption

_EPOCHS_KEPT = 3
_BLOCK = 8192  # numbers that are drawn at a time
_MOST_LEAST = 1 << 20  # a sampler without a length that draws more than this and
_MOST_TIMES = 4  # this many times the dataset counts as endless
_END: Any = object()


class _Epoch(NamedTuple):
    """The samples drawn for an epoch, and the sampler's state at its beginning, if it has one.

    `bounds`, int64 (batches + 1,), is where the batches begin, if the sampler draws batches.
    """

    samples: Int64s
    bounds: Int64s | None
    state: Any

    def digest(self) -> str:
        """Return a short hash of all batches."""
        found = hashlib.blake2b(self.samples.astype("<i8").tobytes(), digest_size=16)
        if self.bounds is not None:
            found.update(self.bounds.astype("<i8").tobytes())
        return found.hexdigest()


class SamplerOrder(Order):
    """The order that a sampler draws. Thread-safe.

    A batch drawn by the sampler counts as `batch_size` positions, though it may be shorter; `size`
    is the number of positions in an epoch. An epoch ends after `epoch_samples`, if the sampler has
    not ended before. `check` raises for samples that the reader excludes. Raises `ConfigError` if
    the sampler draws invalid numbers or too large a batch, or never ends.
    """

    def __init__(
        self,
        sampler: Iterable[Any],
        num_samples: int,
        batch_size: int,
        epoch_samples: int | None = None,
        check: Callable[[Int64s], None] | None = None,
    ) -> None:
        self._sampler: Any = sampler
        self._check = check
        self._num_samples = num_samples
        self._batch_size = batch_size
        self._epoch_samples = epoch_samples
        self._has_state = hasattr(sampler, "state_dict") and hasattr(sampler, "load_state_dict")
        self._has_epochs = hasattr(sampler, "set_epoch")
        self._lock = threading.RLock()
        self._epochs: dict[int, _Epoch] = {}
        self._first: tuple[int, Any] | None = None  # the first epoch and its initial state
        self._begun = 0  # the epoch that the sampler's next iteration draws
        first = self._epoch(0)
        self.size, self.draws_batches = self._positions(first), first.bounds is not None

    def samples(self, epoch: int, start: int, stop: int) -> Int64s:
        """Return the samples at positions `start` to `stop` of an epoch, as a new array.

        Raises `ConfigError` for invalid numbers, or a different count than in the first epoch.
        """
        found = self._epoch(epoch)
        if self._positions(found) != self.size:
            raise ConfigError(self._other_size(found, epoch))
        if found.bounds is None:
            return found.samples[start:stop].copy()
        batch = start // self._batch_size
        return found.samples[found.bounds[batch] : found.bounds[batch + 1]].copy()

    def _other_size(self, found: _Epoch, epoch: int) -> str:
        if iter(self._sampler) is self._sampler:
            return (
                f"sampler: an iterator was given, and it is exhausted in epoch {epoch}; give an"
                " iterable for each epoch, such as a list or an object with __iter__, or an endless"
                f" iterator with {named('epoch_samples')}"
            )
        what, size = ("samples", 1) if found.bounds is None else ("batches", self._batch_size)
        return (
            f"sampler: {self._positions(found) // size} {what} were drawn for epoch {epoch}, and"
            f" {self.size // size} for the first; all epochs must have the same number"
        )

    def state(self, epoch: int) -> dict[str, Any]:
        """Return the state for drawing an epoch again, and checking that it is the same."""
        found = self._epoch(epoch)
        return {"drawn": found.digest(), "state": found.state}

    def restore(self, epoch: int, saved: object) -> None:
        """Draw an epoch as it was when `state` was called, perhaps by another reader.

        Raises `ConfigError` if the sampler draws other samples, or `saved` is not from `state`.
        """
        if not isinstance(saved, Mapping):
            raise ConfigError("the state has no valid state of a sampler; start anew, without it")
        with self._lock:
            known = self._epochs.get(epoch)
            if known is not None and known.digest() == saved.get("drawn"):
                return
            self._epochs = {}
            state = saved.get("state")
            found = self._drawn(epoch, None if state is None else (epoch, state))
            if not found.samples.size:  # the saved state was that of an exhausted sampler
                found = self._drawn(epoch, (epoch, None))
            if found.digest() != saved.get("drawn"):
                raise ConfigError(
                    f"sampler: it draws other samples for epoch {epoch} than when the state was"
                    " saved; give it a fixed seed, or set_epoch(), or state_dict() and"
                    " load_state_dict(), or start anew, without the state"
                )
            self._epochs[epoch] = found

    def _positions(self, epoch: _Epoch) -> int:
        if epoch.bounds is None:
            return epoch.samples.size
        return (epoch.bounds.size - 1) * self._batch_size

    def _epoch(self, epoch: int) -> _Epoch:
        with self._lock:
            found = self._epochs.get(epoch)
            if found is None:
                found = self._drawn(epoch, None)
                kept = list(self._epochs.items())[1 - _EPOCHS_KEPT :]
                self._epochs = {**dict(kept), epoch: found}
            return found

    def _drawn(self, epoch: int, at: tuple[int, Any] | None) -> _Epoch:
        """Draw an epoch; `at` is an epoch and the sampler's state at its beginning."""
        try:
            if at is None and self._has_state and epoch < self._begun:
                at = self._first
            if at is not None:
                self._begun = at[0]
                if at[1] is not None and self._has_state:
                    self._sampler.load_state_dict(copy.deepcopy(at[1]))
            if not self._has_epochs:
                while self._begun < epoch:
                    for _ in self._numbers(self._begun):
                        pass
                    self._begun += 1
            else:
                self._sampler.set_epoch(epoch)
            state = copy.deepcopy(self._sampler.state_dict()) if self._has_state else None
            drawn = list(self._numbers(epoch))
        except Exception as error:
            if interruption(error) is not None or isinstance(error, H5AsyncError):
                raise
            raise ConfigError(
                f"sampler: {type(error).__name__} was raised for epoch {epoch}: {error}"
            ) from error
        self._begun = epoch + 1
        if self._first is None:
            self._first = (epoch, state)
        runs = [np.zeros(0, np.int64), *(numbers for numbers, _ in drawn)]
        bounds = np.cumsum([run.size for run in runs]) if drawn and drawn[0][1] else None
        return _Epoch(np.concatenate(runs), bounds, state)

    def _numbers(self, epoch: int) -> Iterator[tuple[Int64s, bool]]:
        """Yield an epoch's runs of sample numbers, and whether each run is a batch."""
        drawn = iter(self._sampler)
        first: Any = next(drawn, _END)
        if first is _END:
            return
        are_batches = isinstance(first, Iterable) and getattr(first, "ndim", 1) > 0  # not a scalar
        drawn, count = itertools.chain([first], drawn), 0
        end = self._epoch_samples or self._most(are_batches) + 1
        while count < end:
            if are_batches:
                item = next(drawn, _END)
                if item is _END:
                    return
                numbers = self._batch(item, epoch)[: end - count]
            else:
                some = itertools.islice(drawn, min(_BLOCK, end - count))
                numbers = self._checked(list(some), epoch)
                if not numbers.size:
                    return
            count += numbers.size
            yield numbers, are_batches
        if self._epoch_samples is None:
            raise ConfigError(
                f"sampler: {count:,} samples were drawn for epoch {epoch} without an end; give"
                f" {named('epoch_samples')} to end an epoch"
            )

    def _most(self, are_batches: bool) -> int:
        most = max(_MOST_LEAST, _MOST_TIMES * self._num_samples)
        length = operator.length_hint(self._sampler, 0) if hasattr(self._sampler, "__len__") else 0
        return max(most, length * (self._batch_size if are_batches else 1))

    def _batch(self, drawn: Any, epoch: int) -> Int64s:
        found = self._checked(drawn if isinstance(drawn, np.ndarray) else list(drawn), epoch)
        if not 1 <= found.size <= self._batch_size:
            raise ConfigError(
                f"sampler: a batch of {found.size} samples was drawn for epoch {epoch}; a batch has"
                f" 1 to batch_size={self._batch_size}"
            )
        return found

    def _checked(self, drawn: Any, epoch: int) -> Int64s:
        try:
            found = np.asarray(drawn)
        except ValueError:  # items of different lengths
            found = np.zeros(0, object)
        if not len(drawn):
            return np.zeros(0, np.int64)
        if found.dtype.kind not in "iu" or found.ndim != 1:
            raise ConfigError(
                f"sampler: must draw integers, or lists of them, but drew {drawn[0]!r} for epoch"
                f" {epoch}"
            )
        least, most = int(found.min()), int(found.max())
        if least < 0 or most >= self._num_samples:
            raise ConfigError(
                f"sampler: sample {least if least < 0 else most} was drawn for epoch {epoch}, but"
                f" the dataset has samples 0 to {self._num_samples - 1}"
            )
        numbers = found.astype(np.int64)
        if self._check is not None:
            self._check(numbers)
        return numbers
