"""Forms batches by the lengths of samples: the options `batch_values` and `bucket`.

An epoch's order is cut into a sequence of batches that all ranks share; with `bucket`, samples of
similar length are grouped first. Each rank gets every `world_size`-th batch. Memory: 4 bytes per
sample for the lengths, 8 per batch and, if the sequence differs from the order, 4 per sample (8
above 4 billion samples) for each of two epochs.

Users rely on these batches to repeat a run: changing them is a breaking change.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from h5async.core.binding import address, load_core
from h5async.order.rows import numbers_in, starts_of
from h5async.order.sampling import NO_LIMIT, KeptEpochs, Run, Sampling, dealt, dealt_or_repeated
from h5async.order.selection import Int64s, Selection, keyed_hash, round_keys
from h5async.order.window import DealtOrder

_BLOCK = 1 << 18  # samples cut at a time
_MOVED = 1 << 16  # batches moved at a time


class Limits(NamedTuple):
    """The maximum numbers of samples and of values, which a single sample may exceed."""

    samples: int
    values: int = NO_LIMIT

    def times(self, count: int) -> Limits:
        """Return the limits of `count` batches."""
        return Limits(*(min(NO_LIMIT, limit * count) for limit in self))


@dataclass(frozen=True, eq=False)
class Lengths:
    """The length of each sample in values, and the limits on a batch.

    `of_sample`, uint32 or int64, has the length of each sample of the dataset. A batch has at most
    `values`, unless None; samples are sorted in windows of `bucket` batches, unless None.
    """

    of_sample: NDArray[Any]
    values: int | None
    bucket: int | None

    def limits(self, samples: int) -> Limits:
        """Return the limits of a batch of at most `samples` samples."""
        values = NO_LIMIT if self.values is None else self.values
        return Limits(min(NO_LIMIT, samples), min(NO_LIMIT, values))

    def moved_samples(self, samples: int) -> int:
        """Return roughly how far sorting and shuffling move samples."""
        if self.bucket is None or not self.of_sample.size:
            return 0
        if self.values is not None:
            mean = int(self.of_sample.sum(dtype=np.int64)) / self.of_sample.size
            samples = min(samples, int(self.values / max(1.0, mean)))
        return 2 * self.bucket * samples

    def most_samples(self, selection: Selection, most: int, *, times: int = 1) -> int:
        """Return the maximum number of samples that fit in a batch, at most `most`.

        A batch may contain each sample up to `times` times.
        """
        if self.values is None or not selection.size:
            return most
        if selection.is_prefix:
            lengths = self.of_sample[: selection.size]
        else:
            lengths = self.of_sample[selection.samples(np.arange(selection.size, dtype=np.int64))]
        if times >= most:
            shortest = int(lengths.min())
            return min(most, max(1, self.values // shortest)) if shortest else most
        most = min(most, lengths.size * times)
        distinct = -(-most // times)
        if distinct < lengths.size:
            lengths = np.partition(lengths, distinct)[:distinct]
        total = np.cumsum(np.repeat(np.sort(lengths), times), dtype=np.int64)
        return min(most, max(1, int(np.searchsorted(total, self.values, side="right"))))


class _Epoch(NamedTuple):
    """The batches of an epoch, laid end to end.

    `order` has the position in the selection of each place; None if places are positions in the
    epoch's order of `sampling`. `bounds`, int64 (batches + 1,), are the places at which batches
    begin. `number` is the number of the first step, and `steps` the number of steps.
    """

    order: NDArray[Any] | None
    bounds: Int64s
    number: int
    steps: int
    sampling: SamplingByLength


@dataclass(frozen=True, eq=False, kw_only=True)
class SamplingByLength(Sampling):
    """The order of an epoch whose batches depend on the lengths of samples.

    A position is a place in the sequence of batches. All ranks have the same number of batches. If
    fewer batches than ranks are left at the end, they are divided among the ranks. `drop_last`
    leaves these out, and a last batch that is short because samples ran out.

    `begun` is an epoch that was begun with another `batch_size` or `world_size`, or in the middle
    of a step; the place where it goes on; and its original sampling. The rest of that epoch keeps
    its batches and their order, but batches that are too large now are divided.
    """

    lengths: Lengths
    begun: tuple[int, int, SamplingByLength | None] | None = None

    is_uniform: ClassVar[bool] = False

    _epochs: KeptEpochs[_Epoch] = field(default_factory=KeptEpochs, init=False, repr=False)
    _counts: dict[int, int] = field(default_factory=dict, init=False, repr=False)

    def batches_in(self, epoch: int) -> int:
        """Return the number of batches in an epoch."""
        count = self._counts.get(epoch)
        if count is None:
            found = self._epoch(epoch)
            count = self._counts[epoch] = found.number + found.steps
        return count

    def batches_from(self, epoch: int, start: int) -> int:
        """Return the number of batches from a position on."""
        found = self._epoch(epoch)
        return max(0, found.steps - self._step(found, start))

    def samples_in(self, epoch: int) -> int:
        """Return the number of samples in an epoch, of all ranks."""
        if not self.drop_last:
            return self.num_samples
        bounds = self._epoch(epoch).bounds
        return int(bounds[(bounds.size - 1) // self.world_size * self.world_size])

    def step_at(self, epoch: int, start: int, passed: int) -> tuple[int, int]:
        """Return number and position of the step that is `passed` steps after that at `start`."""
        found = self._epoch(epoch)
        step = self._step(found, start) + passed
        return found.number + step, int(found.bounds[step * self.world_size])

    def dealt_at(self, epoch: int, start: int) -> tuple[int, int]:
        """Return begin and end of this rank's positions in the step at `start`."""
        bounds, ranks = self._epoch(epoch).bounds, self.world_size
        first = int(np.searchsorted(bounds, start))
        left = bounds.size - 1 - first
        if left >= ranks:
            begin, end = bounds[first + self.rank : first + self.rank + 2].tolist()
            return begin, end
        # Fewer batches than ranks are left: ranks are dealt to batches, and each batch to its
        # ranks.
        batch = ((self.rank + 1) * left - 1) // ranks
        begin, end = bounds[first + batch : first + batch + 2].tolist()
        of_batch, behind = dealt(ranks, batch, left)
        a, b = dealt_or_repeated(end - begin, self.rank - of_batch, behind - of_batch)
        return begin + a, begin + b

    def run_at(self, epoch: int, start: int, stop: int) -> Run | None:
        """Return positions of an epoch as a run that the core maps; None if that is impossible."""
        found = self._epoch(epoch)
        return Sampling.run_at(found.sampling, epoch, start, stop) if found.order is None else None

    def samples(self, epoch: int, start: int, stop: int) -> Int64s:
        """Return the sample numbers at positions `start` to `stop`, as a new array."""
        found = self._epoch(epoch)
        if found.order is None:
            return Sampling.samples(found.sampling, epoch, start, stop)
        return self._selected(found.order[start:stop].astype(np.int64))

    # --- the batches of an epoch ------------------------------------------------------------------

    def _step(self, found: _Epoch, start: int) -> int:
        return -(-int(np.searchsorted(found.bounds, start)) // self.world_size)

    def _epoch(self, epoch: int) -> _Epoch:
        return self._epochs.get(epoch, self._new_epoch)

    def _new_epoch(self, epoch: int) -> _Epoch:
        sampling, start = self, 0
        if self.begun is not None and self.begun[0] == epoch:
            start, sampling = self.begun[1], self.begun[2] or self
        order, bounds = sampling._sequence(epoch)
        first = int(np.searchsorted(bounds, start, side="right")) - 1
        bounds = split(np.append(start, bounds[first + 1 :]), self.batch_size)
        steps, left = divmod(bounds.size - 1, self.world_size)
        steps += bool(left) and not self.drop_last
        return _Epoch(order, bounds, first // self.world_size, steps, sampling)

    def _sequence(self, epoch: int) -> tuple[NDArray[Any] | None, Int64s]:
        """Return the batches of all ranks, as `order` and `bounds` of `_Epoch`."""
        lanes = self._lanes(epoch)
        bucket, order = self.lengths.bucket, None
        if len(lanes) > 1 or bucket is not None:
            order = np.empty(
                self.num_samples, np.int64 if self.lengths.of_sample.size >> 32 else np.uint32
            )
        bounds, first = [], 0
        for positions, size in lanes:
            own = None if order is None else order[first : first + size]
            bounds.append(first + self._cut(positions, size, own))
            first += size
        if order is None:
            return None, bounds[0]
        which = interleaved([one.size - 1 for one in bounds])
        if bucket is not None and self.shuffle:
            which = self._shuffled(epoch, which, bucket)
        begins = np.concatenate([one[:-1] for one in bounds])
        sizes = np.concatenate([np.diff(one) for one in bounds])
        return moved(order, begins, sizes, which)

    def _lanes(self, epoch: int) -> list[tuple[Callable[[int, int], Int64s], int]]:
        """Return the lanes, which are cut separately: a function of positions, and their number.

        With ``shuffle="window"``, each rank is a lane, as it has chunks of its own.
        """
        if not isinstance(self.order, DealtOrder):
            return [(partial(self._positions, epoch), self.num_samples)]
        return [self.order.lane(rank, epoch) for rank in range(self.world_size)]

    def _cut(
        self, positions: Callable[[int, int], Int64s], size: int, order: NDArray[Any] | None
    ) -> Int64s:
        """Cut a lane into batches, write their positions to `order`, and return their bounds."""
        limits, bucket = self.lengths.limits(self.batch_size), self.lengths.bucket
        ranks = 1 if isinstance(self.order, DealtOrder) else self.world_size
        window = limits.times(ranks * (bucket or 1))  # to make a step's batches alike
        found, done, rest = [np.zeros(1, np.int64)], 0, np.zeros(0, np.int64)
        for start in range(0, size, _BLOCK):
            stop = min(start + _BLOCK, size)
            some = np.concatenate((rest, positions(start, stop)))
            lengths = self.lengths.of_sample[self._selected(some)].astype(np.int64)
            if bucket is None:
                ends = cut(lengths, limits, is_end=stop == size)
            else:
                windows = cut(lengths, window, is_end=stop == size)
                which, ends = cut_sorted(lengths[: windows[-1:].sum()], windows, limits)
                some[: which.size], lengths[: which.size] = some[which], lengths[which]
            count = int(ends[-1]) if ends.size else 0
            if order is not None:
                order[done : done + count] = some[:count]
            if stop == size and self.drop_last and ends.size:
                ends = ends[: ends.size - self._is_short(lengths, ends, limits)]
            found.append(ends + done)
            done, rest = done + count, some[count:]
        return np.concatenate(found)

    def _is_short(self, lengths: Int64s, ends: Int64s, limits: Limits) -> bool:
        """Tell whether the last batch has room for more samples."""
        last = lengths[ends[-2] if ends.size > 1 else 0 : ends[-1]]
        values = last.sum() if self.lengths.bucket is None else last.size * last.max()
        return last.size < limits.samples and bool(values < limits.values)

    def _shuffled(self, epoch: int, which: Int64s, bucket: int) -> Int64s:
        """Shuffle steps within windows of `bucket`; batches of an incomplete last step stay."""
        ranks = self.world_size
        steps = which.size // ranks
        keys = round_keys(self.seed, epoch, "bucket")
        hashes = keyed_hash(np.arange(steps, dtype=np.uint64), keys[0], keys[1])
        in_steps = which[: steps * ranks].reshape(steps, ranks)
        return np.concatenate((in_steps[shuffled(hashes, bucket)].ravel(), which[steps * ranks :]))


# --- cutting: pure ----------------------------------------------------------------------------


def cut(lengths: Int64s, limits: Limits, *, is_end: bool) -> Int64s:
    """Cut samples into runs, each as long as the limits allow; return where runs end (int64).

    Unless `is_end`, more samples follow: the last run may go on and is left out. `lengths` is int64
    (n,): values per sample.
    """
    core = load_core()
    if core is None:
        ends = _cut(lengths, limits)
    else:
        ends = np.empty(lengths.size, np.int64)
        ends = ends[: core.cut(address(lengths), address(ends), lengths.size, *limits)].copy()
    if ends.size and not is_end:
        last = ends[-1] - (ends[-2] if ends.size > 1 else 0)
        return ends[: ends.size - (last < limits.samples)]
    return ends


def _cut(lengths: Int64s, limits: Limits) -> Int64s:
    total = np.cumsum(lengths, dtype=np.int64).data
    found, at, before = [], 0, 0
    while at < lengths.size:
        most = min(at + limits.samples, lengths.size)
        at = max(at + 1, bisect_right(total, before + limits.values, at, most))
        before = total[at - 1]
        found.append(at)
    return np.array(found, np.int64)


def cut_sorted(lengths: Int64s, windows: Int64s, limits: Limits) -> tuple[Int64s, Int64s]:
    """Sort samples by length within windows, longest first, and cut them into batches.

    The values of a batch are its samples times the longest length. `windows` has the windows' ends.
    Returns the sorted samples' indices, int64 (n,), and where batches end. The sort is stable.
    """
    core = load_core()
    if core is not None and lengths.size:
        order, ends = np.empty_like(lengths), np.empty_like(lengths)
        arrays = map(address, (lengths, windows, order, ends))
        count = core.cut_sorted(*arrays, windows.size, *limits)
        if count >= 0:
            return order, ends[:count].copy()
    return _cut_sorted(lengths, windows, limits)


def _cut_sorted(lengths: Int64s, windows: Int64s, limits: Limits) -> tuple[Int64s, Int64s]:
    sizes = np.diff(windows, prepend=0)
    order = np.lexsort((-lengths, np.repeat(np.arange(windows.size), sizes)))
    longest, at, found = lengths[order].tolist(), 0, []
    for end in windows.tolist():
        while at < end:
            most = limits.values // longest[at] if longest[at] else limits.samples
            at = min(at + max(1, min(most, limits.samples)), end)
            found.append(at)
    return order, np.array(found, np.int64)


def shuffled(hashes: NDArray[np.uint64], window: int) -> Int64s:
    """Return a permutation of numbers in which each stays in its window of `window` numbers.

    `hashes` has a random number for each of them.
    """
    size, window = hashes.size, max(1, min(window, hashes.size))
    keys = np.full(-(-size // window) * window, np.iinfo(np.uint64).max, np.uint64)
    keys[:size] = hashes >> np.uint64(1)  # below the padding
    found = np.argsort(keys.reshape(-1, window), axis=1, kind="stable")
    found += np.arange(0, keys.size, window)[:, np.newaxis]
    return np.ascontiguousarray(found.ravel()[:size])


def interleaved(counts: list[int]) -> Int64s:
    """Return the batches of several lanes in turn while all lanes have some, then the rest.

    Batches are numbered lane by lane; ``counts[i]`` is the number in lane i.
    """
    firsts, common = np.cumsum([0, *counts[:-1]]), min(counts)
    in_turn = firsts + np.arange(common)[:, np.newaxis]
    rest = [np.arange(first + common, first + n) for first, n in zip(firsts, counts, strict=True)]
    return np.concatenate((in_turn.ravel(), *rest))


def moved(
    order: NDArray[Any], begins: Int64s, sizes: Int64s, which: Int64s
) -> tuple[NDArray[Any], Int64s]:
    """Lay some batches end to end in a new order, and return them and their bounds.

    Batch i is ``order[begins[i] : begins[i] + sizes[i]]``; `which` has the numbers of the wanted
    batches in their new order. Bounds are int64 (which.size + 1,).
    """
    begins, sizes = begins[which], sizes[which]
    bounds = starts_of(sizes)
    found = np.empty(int(bounds[-1]), order.dtype)
    for first in range(0, which.size, _MOVED):
        place = numbers_in(begins[first : first + _MOVED], sizes[first : first + _MOVED])
        found[bounds[first] : bounds[first] + place.size] = order[place]
    return found, bounds


def split(bounds: Int64s, most: int) -> Int64s:
    """Return where batches begin if those of over `most` samples are cut into equal parts."""
    sizes = np.diff(bounds)
    parts = -(-sizes // min(most, NO_LIMIT))
    inside = numbers_in(0, parts) * np.repeat(sizes, parts) // np.repeat(parts, parts)
    return np.append(np.repeat(bounds[:-1], parts) + inside, bounds[-1])
