"""Defines `Segments`: which rows of which dataset hold the samples of a field. Pure arrays.

Segments of segments are composed at once, so the table is always flat.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from h5async.index.slabs import MOST_RUNS, PairedRuns, TooManyRunsError

Int64s = NDArray[np.int64]
Int32s = NDArray[np.int32]
Region = tuple[slice, ...] | None


def region_key(region: Region) -> Any:
    """Return a hashable key; slices are not hashable before Python 3.12."""
    return None if region is None else tuple((s.start, s.stop, s.step) for s in region)


class Piece(NamedTuple):
    """A piece of a row of the whole dataset, and of a row of the dataset that holds it.

    Attributes
    ----------
    region, source_region
        A slice per dimension except that of the samples. The extents of both are equal, except
        for those of 1. None means the whole row.
    member
        The delivered member of the source's compound type.
    """

    region: Region = None
    source_region: Region = None
    member: str | None = None

    @property
    def is_whole(self) -> bool:
        """Whether whole rows are delivered."""
        return self == (None, None, None)

    @property
    def key(self) -> Any:
        """A hashable key."""
        return region_key(self.region), region_key(self.source_region), self.member


WHOLE = Piece()


@dataclass(frozen=True, eq=False)
class Segments:
    """Parallel arrays, sorted by `first`. Segments of one region do not overlap.

    Attributes
    ----------
    first, length
        int64 (n,): the first sample of each segment, and the number of samples, above 0.
    row, step
        int64 (n,): the row of the first sample in its dataset, and the distance to the next row.
    dataset
        int32 (n,): the number of the dataset.
    piece
        int32 (n,): the number of the piece.
    pieces
        The pieces.
    even
        Ranges of samples that units divide evenly, and the samples of a unit (0: by their bytes);
        for datasets that are not read in the way in which they are stored. Then no other bounds
        count.
    kept_nbytes
        The decoded bytes of a unit of datasets that are not read in that way.
    """

    first: Int64s
    length: Int64s
    row: Int64s
    step: Int64s
    dataset: Int32s
    piece: Int32s
    pieces: tuple[Piece, ...] = (WHOLE,)
    even: tuple[tuple[int, int, int], ...] = ()
    kept_nbytes: int = 0

    @classmethod
    def of(
        cls,
        columns: Iterable[NDArray[Any]],
        pieces: tuple[Piece, ...],
        even: tuple[tuple[int, int, int], ...] = (),
        kept_nbytes: int = 0,
    ) -> Segments:
        """Return the segments of six columns, sorted by their first sample."""
        first, length, row, step, dataset, piece = columns
        of_dataset, of_piece = dataset.astype(np.int32), piece.astype(np.int32)
        found = cls(first, length, row, step, of_dataset, of_piece, pieces, even, kept_nbytes)
        is_sorted = bool((first[1:] >= first[:-1]).all())
        return found if is_sorted else found.at(np.argsort(first, kind="stable"))

    @property
    def columns(self) -> tuple[NDArray[Any], ...]:
        """All six, in this order."""
        return self.first, self.length, self.row, self.step, self.dataset, self.piece

    @property
    def size(self) -> int:
        """The number of segments."""
        return self.first.size

    @property
    def end(self) -> Int64s:
        """int64 (n,): one past the last sample of each segment."""
        return self.first + self.length

    def at(self, which: NDArray[Any]) -> Segments:
        """Return some of the segments."""
        first, length, row, step, dataset, piece = (column[which] for column in self.columns)
        kept = self.pieces, self.even, self.kept_nbytes
        return Segments(first, length, row, step, dataset, piece, *kept)

    def moved(self, shift: int | Int64s) -> Segments:
        """Return the segments with their samples moved."""
        return replace(self, first=self.first + shift)

    def cut(self, at: Int64s) -> Segments:
        """Return the segments, cut at some samples, ascending, where one goes on there."""
        low = np.searchsorted(at, self.first, side="right")
        count = np.searchsorted(at, self.end, side="left") - low
        if not count.any():
            return self
        which = np.repeat(np.arange(self.size), count + 1)
        inside = np.arange(which.size) - np.repeat(np.cumsum(count + 1) - count - 1, count + 1)
        edges = np.append(at, 0)  # the last one is not used
        begin = np.where(inside == 0, self.first[which], edges[low[which] + inside - 1])
        next_edge = edges[np.minimum(low[which] + inside, at.size)]
        end = np.where(inside == count[which], self.end[which], next_edge)
        found = self.at(which)
        row = found.row + (begin - found.first) * found.step
        columns = begin, end - begin, row, found.step, found.dataset, found.piece
        return Segments.of(columns, self.pieces, self.even, self.kept_nbytes)

    @cached_property
    def layers(self) -> list[tuple[Int64s, Segments]]:
        """The segments by region, each with their indices: no two of a layer overlap."""
        keys: dict[Any, int] = {}
        layer = [keys.setdefault(region_key(p.region), len(keys)) for p in self.pieces]
        if len(keys) == 1:
            return [(np.arange(self.size), self)]
        number = np.array(layer, np.int32)[self.piece]
        found = (np.flatnonzero(number == one) for one in range(len(keys)))
        return [(here, self.at(here)) for here in found if here.size]

    def find(self, sample: Int64s) -> Iterator[tuple[int, Piece, Int64s, Int64s]]:
        """Yield what holds samples: a dataset and a piece, positions in `sample`, and their rows.

        Samples that no segment holds are left out.
        """
        for _, layer in self.layers if self.size else ():
            at = np.searchsorted(layer.first, sample, side="right") - 1
            chosen = np.flatnonzero((at >= 0) & (sample < layer.end[at]))
            at = at[chosen]
            row = layer.row[at] + (sample[chosen] - layer.first[at]) * layer.step[at]
            key = layer.dataset[at].astype(np.int64) * len(self.pieces) + layer.piece[at]
            order = np.argsort(key, kind="stable")
            edges = np.flatnonzero(np.diff(key[order])) + 1
            for some in np.split(order, edges) if order.size else ():
                number, piece = divmod(int(key[some[0]]), len(self.pieces))
                yield number, self.pieces[piece], chosen[some], row[some]

    def behind(self, outer: PairedRuns) -> Segments:
        """Return the segments of outer runs, whose rows are the samples of these segments.

        TooManyRunsError if there would be more than `MOST_RUNS`.
        """
        if not self.size:
            return self
        if outer.size == 1 and outer.step[0] == 1 and not outer.row[0]:
            if outer.length[0] >= self.end.max():
                return self.moved(int(outer.first[0]))
        outer = outer.single_steps()
        columns = []
        for indices, layer in self.layers:
            # Per outer run, the segments that overlap it: `low` up to `high`, exclusive.
            low = np.searchsorted(layer.end, outer.row, side="right")
            high = np.searchsorted(layer.first, outer.row + outer.length, side="left")
            count = np.maximum(high - low, 0)
            if count.sum() > MOST_RUNS:
                raise TooManyRunsError
            which = np.repeat(np.arange(outer.size), count)
            inside = np.arange(which.size) - np.repeat(np.cumsum(count) - count, count) + low[which]
            begin = np.maximum(outer.row[which], layer.first[inside])
            end = np.minimum(outer.row[which] + outer.length[which], layer.end[inside])
            row = layer.row[inside] + (begin - layer.first[inside]) * layer.step[inside]
            first, at = outer.first[which] + begin - outer.row[which], indices[inside]
            own = self.step[at], self.dataset[at], self.piece[at]
            columns.append((first, end - begin, row, *own))
        made = [np.concatenate(column) for column in zip(*columns, strict=True)]
        return Segments.of(made, self.pieces)
