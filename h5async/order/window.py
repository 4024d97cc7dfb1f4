"""Computes the order of an epoch's samples for ``shuffle="window"``.

A unit is a group of samples that is read and decoded as a whole: a chunk, or the chunks that hold
pieces of the same samples. One unit starts in each round, in random order. Its samples, also in
random order, are spread evenly over the next `window` rounds: column `s` of round `r` holds a
sample of the unit that started ``s * window // size`` rounds before. This is the convolutional
interleaver of G. D. Forney ("Burst-Correcting Codes for the Classic Bursty Channel", IEEE Trans.
Commun. Technol. 19, 1971). Every sample has a position of its own, and one unit starts and one ends
in each round, so at most `window` are needed at a time, and the work is constant except at the ends
of an epoch. Finally, the samples of a few rounds are shuffled.

Users rely on this order to repeat a run: changing it is a breaking change.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from h5async.core.binding import Core, address, load_core
from h5async.index.datasettable import kinds_of, sample_bounds
from h5async.index.datasettable import unit_nbytes as unit_nbytes_of
from h5async.index.layout import DatasetLayout
from h5async.order.rows import StepRows, numbers_in
from h5async.order.sampling import KeptEpochs, Order, Run, dealt
from h5async.order.selection import (
    Int64s,
    Selection,
    WeightedOrder,
    keyed_hash,
    permute,
    permute_each,
    round_keys,
)
from h5async.system.interruptions import call_when_gone

_BLOCK_SAMPLES = 1024  # computed at a time: fewer would cost about as much
_MISSING_SAMPLES = 1 << 18  # counted at a time
_PLACE_NBYTES = 4  # per sample of a block, in the core
_BLOCKS_KEPT = 4  # in the core: threads work on batches that share blocks
_GROUP_SAMPLES = 128  # shuffled together: at least a round, at most a small window
_TIMES_REACH = 16  # a merged unit's length over the reach of steps: few samples are at its ends
_LEAST_UNITS = 8  # minimum number of merged units in a window
# Chunks of ragged rows in a unit: its last row reaches into one more chunk, which is also decoded.
_RAGGED_CHUNKS = 8
_REPEATED_SHARE = 4  # 1/4 of the window's memory, in addition, is for rows that samples share
_DRAWN_SHARE = 4  # maximum draws in a part of a unit, relative to the mean of all units
_IN_FLIGHT_SHARE = 1 / 4  # of the memory is for batches in preparation


class _Table(NamedTuple):
    """Tables that an epoch's order is computed from, and the same for the core, if there is one.

    `unit`, int64 (n,), has the units in the order in which they start. `skip` and `counts` are, for
    each unit, the numbers of samples in the previous piece, and in this one. `begin`, int64
    (blocks + 1,), is the first position of each block. `mapping` is the one of runs; it owns the
    core's structure, whose address is its third number.
    """

    unit: Int64s
    skip: Int64s
    counts: Int64s
    begin: Int64s
    mapping: NDArray[np.uint64] | None


class WindowOrder(Order):
    """The order of ``shuffle="window"``, in which `window` units are mixed. Thread-safe.

    Unit i is samples ``bounds[i]`` to ``bounds[i + 1]``: int64 (n + 1,), ascending from 0. The
    units, laid end to end in the order in which they start, may be cut into pieces; this is the
    order of samples ``piece[0]`` to ``piece[1]``. Only a unit at a cut belongs to two pieces.
    `drawn`, int64, if given, maps these samples to the ones to return.
    """

    def __init__(
        self,
        bounds: Int64s,
        window: int,
        seed: int,
        piece: tuple[int, int] | None = None,
        drawn: Int64s | None = None,
    ) -> None:
        self._bounds, self._drawn = np.ascontiguousarray(bounds, np.int64), drawn
        self._size = size = int(np.diff(bounds).max(initial=1))
        self.window = window
        self._seed = seed
        self._piece = piece
        self._delay = np.arange(size) * window // size
        self._group_rounds = max(1, min(_GROUP_SAMPLES // size, window // 4))
        groups = -(-_BLOCK_SAMPLES // (size * self._group_rounds))
        self._block_rounds = groups * self._group_rounds
        self._tables: KeptEpochs[_Table] = KeptEpochs()
        own = weakref.proxy(self)  # else blocks would live until the next garbage collection
        self._block = functools.lru_cache(maxsize=4)(functools.partial(WindowOrder._new_block, own))

    def piece(self, begin: int, end: int) -> WindowOrder:
        """Return the order of one piece."""
        return WindowOrder(self._bounds, self.window, self._seed, (begin, end), self._drawn)

    def samples(self, epoch: int, start: int, stop: int) -> Int64s:
        """Return the samples at positions `start` to `stop` of an epoch, as a new array."""
        if start >= stop:
            return np.zeros(0, np.int64)
        table, core = self._table(epoch), load_core()
        if core is not None and table.mapping is not None:
            samples, struct = np.empty(stop - start, np.int64), int(table.mapping[2])
            if core.window_samples(struct, address(samples), start, samples.size):
                return samples
        first = int(table.begin.searchsorted(start, side="right")) - 1
        last = int(table.begin.searchsorted(stop, side="left"))
        found = []
        for number in range(first, last):
            offset = int(table.begin[number])
            found.append(self._block(epoch, number)[max(0, start - offset) : stop - offset])
        places: Int64s = np.concatenate(found)
        return places if self._drawn is None else self._drawn[places]

    def run(self, epoch: int, start: int, stop: int) -> Run | None:
        """Return the positions as a run; None if there is no core, or not enough memory."""
        mapping = self._table(epoch).mapping
        return None if mapping is None else (start, mapping)

    def _table(self, epoch: int) -> _Table:
        return self._tables.get(epoch, self._new_table)

    def _new_table(self, epoch: int) -> _Table:
        unit, skip, counts = self._units(epoch)
        count = unit.size
        rounds = np.arange(count + int(self._delay[-1]))
        size = np.searchsorted(self._delay, rounds, side="right")
        size -= np.searchsorted(self._delay, rounds - count, side="right")
        shorter = np.flatnonzero(counts < self._size)
        self._subtract_missing(size, shorter, self._size - counts[shorter])
        begin = np.append(0, np.cumsum(size))[:: self._block_rounds]
        total = int(counts.sum())
        begin = np.ascontiguousarray(begin) if begin[-1] == total else np.append(begin, total)
        table = _Table(unit, skip, counts, begin, None)
        core = load_core()
        return table if core is None else table._replace(mapping=self._mapping(core, table, epoch))

    def _mapping(self, core: Core, table: _Table, epoch: int) -> NDArray[np.uint64] | None:
        sizes, num_samples = np.diff(self._bounds), int(self._bounds[-1])
        roots = np.ceil(np.sqrt(sizes)).astype(np.uint64)
        root, last_root = int(roots.max(initial=1)), int(roots[-1:].sum())
        if (sizes[:-1] == self._size).all():  # no roots need to be looked up
            roots = np.zeros(0, np.uint64)
        keys = round_keys(self._seed, epoch, "window")
        names = keyed_hash(table.unit.astype(np.uint64), keys[0], keys[1])
        arrays = table.unit, table.counts, names, self._bounds, self._delay, table.begin
        given = (0 if one is None or not one.size else address(one) for one in (self._drawn, roots))
        rounds = self._group_rounds, self._block_rounds
        counts = table.unit.size, self._size, self.window, *rounds, table.begin.size - 1
        more = root, last_root, *counts, int(table.skip[:1].sum()), num_samples
        nbytes = self._block_rounds * self._size * _PLACE_NBYTES
        blocks = core.new_store(_BLOCKS_KEPT * nbytes, nbytes, False)
        if not blocks:
            return None  # not enough memory
        struct = core.Window(*map(address, arrays), *given, *more, blocks, tuple(keys.tolist()))
        found: Any = (ctypes.c_uint64 * 9)(1, 0, ctypes.addressof(struct))
        found.held = struct, arrays, self._drawn, roots
        call_when_gone(found, core.free_store, found[2] + core.Window.blocks.offset)
        return np.frombuffer(found, np.uint64)

    def _subtract_missing(self, size: Int64s, shorter: Int64s, missing: Int64s) -> None:
        groups = np.cumsum(missing) // _MISSING_SAMPLES
        edges = np.flatnonzero(np.diff(groups, prepend=-1, append=-1))
        for first, last in itertools.pairwise(edges):
            times = missing[first:last]
            position = np.repeat(shorter[first:last], times)
            slot = numbers_in(self._size - times, times)
            begin = position[0]
            less = np.bincount(position - begin + self._delay[slot])
            size[begin : begin + less.size] -= less

    def _units(self, epoch: int) -> tuple[Int64s, Int64s, Int64s]:
        """Return the units of this piece, in the order in which they start."""
        count = self._bounds.size - 1
        unit = permute(np.arange(count), count, self._seed, epoch)
        counts = self._counts(unit)
        skip = np.zeros_like(counts)
        if self._piece is None:
            return unit, skip, counts
        ends = np.cumsum(counts)
        begin, end = self._piece
        first = int(np.searchsorted(ends, begin, side="right"))
        behind = int(np.searchsorted(ends, end, side="left")) + 1 if end > begin else first
        unit, ends = unit[first:behind], ends[first:behind]
        skip = np.maximum(begin - (ends - counts[first:behind]), 0)
        return unit, skip, np.minimum(ends, end) - np.maximum(ends - self._counts(unit), begin)

    def _counts(self, unit: Int64s) -> Int64s:
        counts: Int64s = self._bounds[unit + 1] - self._bounds[unit]
        return counts

    def _new_block(self, epoch: int, number: int) -> Int64s:
        """Compute the samples of a block of rounds without the core. Shared: do not modify."""
        table, size = self._table(epoch), self._size
        keys = round_keys(self._seed, epoch, "window")
        serial = np.arange(self._block_rounds * size) + number * self._block_rounds * size
        rounds, slot = np.divmod(serial, size)
        place = rounds - self._delay[slot]
        is_started = (place >= 0) & (place < table.unit.size)
        is_there = is_started & (slot < table.counts[np.where(is_started, place, 0)])
        serial, rounds, slot, place = (column[is_there] for column in (serial, rounds, slot, place))
        mixed = keyed_hash(serial.astype(np.uint64), keys[0], keys[1]) >> np.uint64(1)
        order = np.lexsort((mixed, rounds // self._group_rounds))  # within each group
        place, slot = place[order], slot[order]
        unit = table.unit[place]
        first: Int64s = self._bounds[unit]
        return first + permute_each(slot + table.skip[place], self._counts(unit), unit, keys)


class DealtOrder(Order):
    """The order of ``shuffle="window"`` for several ranks. Thread-safe.

    In each pass of the data, each rank has a piece of the units, in its own order. At each step of
    an epoch of `epoch_samples`, every rank gets the next `batch_size` samples of its piece; at the
    end, the rest is divided equally. This order consists of the runs of all ranks, step by step.
    Epochs are consecutive parts of a sequence of passes, each of which has all `num_samples` once;
    so a piece has as many samples as its rank gets in that pass.
    """

    def __init__(
        self,
        whole: WindowOrder,
        ranks: int,
        num_samples: int,
        batch_size: int,
        epoch_samples: int | None = None,
    ) -> None:
        # Pieces are made when first needed: usually, a rank needs only its own.
        self._piece: Callable[[int, int], Order] = functools.lru_cache(maxsize=64)(whole.piece)
        self._ranks = ranks
        self._num_samples = num_samples
        self._batch_size = batch_size
        self._epoch_samples = num_samples if epoch_samples is None else epoch_samples

    def samples(self, epoch: int, start: int, stop: int) -> Int64s:
        """Return the samples at positions `start` to `stop` of a pass, as a new array."""
        found, at = [np.zeros(0, np.int64)], epoch * self._num_samples
        while start < stop:
            rank, count = self._run(at + start)
            count, begin = min(count, stop - start), self._before(rank, at + start)
            found.append(self._of_rank(rank, epoch, begin, begin + count))
            start += count
        return np.concatenate(found)

    def lane(self, rank: int, epoch: int) -> tuple[Callable[[int, int], Int64s], int]:
        """Return a function (start, stop) for a rank's samples in an epoch, and their number."""
        begin, end = (self._before(rank, at * self._epoch_samples) for at in (epoch, epoch + 1))

        def samples(start: int, stop: int) -> Int64s:
            found, number = (
                [np.zeros(0, np.int64)],
                epoch * self._epoch_samples // self._num_samples,
            )
            start, stop = begin + start, begin + stop
            while start < stop:
                number += 1
                behind = min(stop, self._before(rank, number * self._num_samples))
                if start < behind:
                    found.append(self._of_rank(rank, number - 1, start, behind))
                    start = behind
            return np.concatenate(found)

        return samples, end - begin

    def run(self, epoch: int, start: int, stop: int) -> Run | None:
        """Return the positions as a run if they all belong to one rank; else None."""
        at = epoch * self._num_samples
        rank, count = self._run(at + start)
        if stop - start > count:
            return None
        begin = self._before(rank, at + start) - self._before(rank, at)
        return self._piece_of(rank, epoch).run(epoch, begin, begin + stop - start)

    def _piece_of(self, rank: int, number: int) -> Order:
        first, behind = (at * self._num_samples for at in (number, number + 1))
        return self._piece(
            *(self._below(r, behind) - self._below(r, first) for r in (rank, rank + 1))
        )

    def _of_rank(self, rank: int, number: int, start: int, stop: int) -> Int64s:
        """Return a rank's samples in a pass; `start` and `stop` count from the first pass on."""
        had = self._before(rank, number * self._num_samples)
        return self._piece_of(rank, number).samples(number, start - had, stop - had)

    def _run(self, position: int) -> tuple[int, int]:
        """Return the rank whose run has a position since the first epoch, and the run's rest."""
        size, ranks = self._batch_size, self._ranks
        steps, left = divmod(self._epoch_samples, size * ranks)
        step, inside = divmod(position % self._epoch_samples, size * ranks)
        if step < steps:
            rank, inside = divmod(inside, size)
            return rank, size - inside
        rank = ((inside + 1) * ranks - 1) // left  # the last one that begins at or before it
        return rank, dealt(left, rank, ranks)[1] - inside

    def _before(self, rank: int, position: int) -> int:
        """Return the number of a rank's positions, since the first epoch, before one."""
        return self._below(rank + 1, position) - self._below(rank, position)

    def _below(self, rank: int, position: int) -> int:
        """Return the same for all ranks below one."""
        if not position:  # an epoch may have no samples
            return 0
        size, ranks = self._batch_size, self._ranks
        epoch, position = divmod(position, self._epoch_samples)
        steps, left = divmod(self._epoch_samples, size * ranks)
        step, inside = divmod(position, size * ranks)
        edge = rank * size if step < steps else left * rank // ranks
        return (
            epoch * (self._epoch_samples * rank // ranks) + step * rank * size + min(inside, edge)
        )


class DrawnOrder(Order):
    """The order of ``shuffle="window"`` for samples drawn with replacement. Thread-safe.

    An epoch has the same draws as without a window. Here they are sorted by unit, then mixed as
    `WindowOrder` mixes all samples of units. If a unit has many more draws than others, they are
    cut into parts that start independently, to spread them over the epoch.

    `bounds`, `window` and `seed` are those of `WindowOrder`; `sizes` are the numbers of draws in an
    epoch and in a batch, and of ranks. Memory: 8 bytes per draw for each of two epochs, and 24
    while one is made.
    """

    def __init__(
        self,
        draws: WeightedOrder,
        bounds: Int64s,
        window: int,
        seed: int,
        sizes: tuple[int, int, int],
    ) -> None:
        self._draws, self._bounds, self._sizes = draws, bounds, sizes
        self._window, self._seed = window, seed
        self._epochs: KeptEpochs[Order] = KeptEpochs()

    def samples(self, epoch: int, start: int, stop: int) -> Int64s:
        """Return the samples at positions `start` to `stop` of an epoch, as a new array."""
        return self._epochs.get(epoch, self._new_epoch).samples(epoch, start, stop)

    def run(self, epoch: int, start: int, stop: int) -> Run | None:
        """Return the positions as a run; None if the core cannot compute the samples."""
        return self._epochs.get(epoch, self._new_epoch).run(epoch, start, stop)

    def _new_epoch(self, epoch: int) -> Order:
        """Return the order of an epoch, after sorting its draws by unit."""
        count, batch_size, ranks = self._sizes
        drawn = self._draws.samples(epoch, 0, count)
        unit = self._units_of(drawn)
        drawn, sizes = _grouped(drawn, unit, self._bounds.size - 1)
        sizes = sizes[sizes > 0]
        most = max(1, _DRAWN_SHARE * count // max(1, sizes.size))
        parts = -(-sizes // most)
        inside = numbers_in(0, parts) * np.repeat(sizes, parts) // np.repeat(parts, parts)
        begins = np.repeat(np.cumsum(sizes) - sizes, parts) + inside
        whole = WindowOrder(np.append(begins, count), self._window, self._seed, None, drawn)
        return whole if ranks == 1 else DealtOrder(whole, ranks, count, batch_size)

    def _units_of(self, samples: Int64s) -> Int64s:
        size = int(self._bounds[1]) if self._bounds.size > 1 else 1
        if (np.diff(self._bounds[:-1]) == size).all() and np.diff(self._bounds[-2:]) <= size:
            return samples // size
        return np.searchsorted(self._bounds, samples, side="right") - 1


def _grouped(drawn: Int64s, unit: Int64s, num_units: int) -> tuple[Int64s, Int64s]:
    """Sort draws by unit (a stable sort); return them, and the number in each unit."""
    core = load_core()
    if core is None:
        return drawn[np.argsort(unit, kind="stable")], np.bincount(unit, minlength=num_units)
    grouped, ends = np.empty_like(drawn), np.zeros(num_units, np.int64)
    core.group(*map(address, (drawn, unit, grouped, ends)), drawn.size, num_units)
    return grouped, np.diff(ends, prepend=0)


def window_order(
    layouts: Sequence[DatasetLayout],
    window_nbytes: int,
    seed: int,
    batch_size: int = 1,
    world_size: int = 1,
    selection: Selection | None = None,
    steps: Sequence[StepRows | None] = (),
    moved_samples: int = 0,
    epoch_samples: int | None = None,
    draws: WeightedOrder | None = None,
) -> WindowOrder | DealtOrder | DrawnOrder:
    """Return the order of ``shuffle="window"`` for the fields of a reader.

    The field with the largest units defines the units; neighbouring units are merged if rows are
    ragged, or if samples have `steps` within a sequence. The window has as many decoded units as
    fit into `window_nbytes`, besides units that start meanwhile and batches in preparation, and at
    most half of all units (of a rank). With several ranks, the order depends on `batch_size` and
    `epoch_samples`. Positions of `selection`, ascending, are ordered, or, if given, `draws`; later,
    samples may be moved by up to `moved_samples`.
    """
    layouts = [layout for layout in layouts if not layout.is_repeated]
    leader = max(layouts, key=lambda layout: (unit_nbytes_of(layout), layout.row_nbytes))
    bounds = sample_bounds(leader)
    unit_nbytes = sum(map(unit_nbytes_of, layouts))
    if unit_nbytes:
        most = max(1, window_nbytes // (_LEAST_UNITS * unit_nbytes))
        if any(steps):
            bounds, times = _merged_bounds(bounds, steps, most)
        else:
            times = min(most, _ragged_times(bounds, layouts))
            bounds = np.append(bounds[:-1:times], bounds[-1:])
        unit_nbytes *= times
    if selection is not None:
        bounds = selection.bounds(bounds)
    counts = np.diff(bounds)
    size = int(counts.max(initial=1))
    if not unit_nbytes:  # nothing is kept; the window only makes reads local
        unit_nbytes = size * sum(layout.row_nbytes for layout in layouts)
    fitting = (1 - _IN_FLIGHT_SHARE) * window_nbytes / max(1, unit_nbytes) - 2
    fitting -= moved_samples / size  # units that start while moved samples of others are waiting
    # A unit's samples are `window / size` rounds apart, while other units start; more start in a
    # group of rounds, which is at most a quarter of the window.
    most = -(-counts.size // (2 * world_size))
    window = max(2, min(int(fitting / (1 + 1 / size + 1 / 4)), most))
    if draws is not None:
        count = int(bounds[-1]) if epoch_samples is None else epoch_samples
        return DrawnOrder(draws, bounds, window, seed, (count, batch_size, world_size))
    whole = WindowOrder(bounds, window, seed)
    if world_size == 1:
        return whole
    return DealtOrder(whole, world_size, int(bounds[-1]), batch_size, epoch_samples)


def _ragged_times(bounds: Int64s, layouts: Sequence[DatasetLayout]) -> int:
    """Return the number of units to merge so that few ragged rows reach into two units."""
    times = 1
    for layout in layouts:
        leaves = [leaf for leaf, _ in kinds_of(layout) if leaf.filters]
        chunk = max((leaf.chunk_shape[0] for leaf in leaves), default=0)
        if not layout.is_ragged or not chunk or not layout.num_samples:
            continue
        length = layout.num_samples / max(1, layout.sample_count)
        mean = layout.num_samples / max(1, bounds.size - 1)  # rows of a unit
        times = max(times, math.ceil(_RAGGED_CHUNKS * max(chunk, length) / mean))
    return times


def _merged_bounds(
    bounds: Int64s, several: Sequence[StepRows | None], most: int
) -> tuple[Int64s, int]:
    """Merge units of one sequence so that the steps of few samples reach into two of them.

    Returns the new bounds, and the maximum number of units merged into one: about `most`.
    """
    steps = [one for one in several if one is not None]
    reach = max(max(0, *one.offsets) - min(0, *one.offsets) for one in steps)
    length = min(_TIMES_REACH * reach, max(1, most) * int(np.diff(bounds).max(initial=1)))
    starts = steps[0].starts
    if not reach or not starts.size:
        return bounds, 1
    begin = bounds[:-1]
    number = np.maximum(0, np.searchsorted(starts, begin, side="right") - 1)
    part = (begin - starts[number]) // length
    is_first = (np.diff(number, prepend=-1) != 0) | (np.diff(part, prepend=-1) != 0)
    kept = np.flatnonzero(np.append(is_first, True))
    return bounds[kept], int(np.diff(kept).max(initial=1))


def kept_nbytes(layout: DatasetLayout, layouts: Sequence[DatasetLayout], window_nbytes: int) -> int:
    """Return a field's share of the memory for the window."""
    if layout.is_repeated:  # the samples of a window are from few sequences or files
        return window_nbytes // _REPEATED_SHARE
    total = sum(unit_nbytes_of(one) for one in layouts if not one.is_repeated)
    return window_nbytes * unit_nbytes_of(layout) // max(1, total)
