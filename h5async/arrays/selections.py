"""Interprets the keys of an indexing expression: keys enter, parts of a dataset leave. Pure.

Keys are those of h5py: integers, slices with steps, Ellipsis, one list of ascending indices or one
mask per key, or a mask of the whole dataset. Keys that h5py refuses raise `SelectionError`.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from h5async.errors import SelectionError

Int64s = NDArray[np.int64]
Numbers = Sequence[int]


class Box(NamedTuple):
    """A regular part of a dataset: its first index, its size and its step along each dimension.

    `shape` is that of the result, without dimensions indexed by integers.
    """

    begin: list[int]
    size: list[int]
    step: list[int]
    shape: tuple[int, ...]


class Selection(NamedTuple):
    """A box; if `indices` are given, it spans dimension `axis`, along which they select.

    `place` is the corresponding dimension of the result. `mask` is one of the whole dataset.
    """

    box: Box
    indices: Int64s | None = None
    axis: int = 0
    place: int = 0
    mask: NDArray[np.bool_] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the result."""
        if self.mask is not None:
            return (int(np.count_nonzero(self.mask)),)
        if self.indices is None:
            return self.box.shape
        kept = self.box.shape
        return (*kept[: self.place], self.indices.size, *kept[self.place + 1 :])

    @property
    def bounds(self) -> Box:
        """The smallest box around the selection, with the step of `box`; see `taken`."""
        if self.indices is None or not self.indices.size:
            return self.box
        first, last = int(self.indices[0]), int(self.indices[-1])
        begin, size, shape = list(self.box.begin), list(self.box.size), list(self.box.shape)
        begin[self.axis] = first
        size[self.axis] = shape[self.place] = last - first + 1
        return self.box._replace(begin=begin, size=size, shape=tuple(shape))

    def taken(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return the selected ones of the values of `bounds`."""
        if self.mask is not None:
            found: NDArray[Any] = values[self.mask]
            return found
        if self.indices is None:
            return values
        return values.take(self.indices - self.indices[:1], self.place)


def box_of(key: tuple[Any, ...], shape: tuple[int, ...]) -> Box | None:
    """Return the box of a key of integers, slices and Ellipsis; None for any other key."""
    found = parts_of_box(key, shape)
    return None if found is None else Box(*found)


def parts_of_box(
    key: tuple[Any, ...], shape: tuple[int, ...]
) -> tuple[list[int], list[int], list[int], tuple[int, ...]] | None:
    """Return the members of the `Box` that `box_of` returns."""
    begin: list[int] = []
    size: list[int] = []
    step: list[int] = []
    kept: list[int] = []
    rank, number, seen = len(shape), 0, False
    for part in key:
        if part is Ellipsis:
            more = rank - len(key) + 1
            if seen or more < 0:
                return None
            seen = True
            rest = shape[number : number + more]
            number += more
            begin += [0] * more
            step += [1] * more
            size += rest
            kept += rest
            continue
        if number == rank:
            return None
        extent = shape[number]
        number += 1
        kind = type(part)
        if kind is slice:
            try:
                first, stop, by = part.indices(extent)
            except (TypeError, ValueError) as error:
                raise SelectionError(f"{part} is not a valid slice: {error}") from error
            if by < 1:
                raise SelectionError(f"steps of slices must be 1 or more, found {by}")
            by = min(by, extent + 1)  # a larger one has the same effect
            count = (stop - first + by - 1) // by if stop > first else 0
            kept.append(count)
        else:
            if kind is not int:
                if not issubclass(kind, np.integer):
                    return None
                part = int(part)
            first, count, by = part + extent if part < 0 else part, 1, 1
            if not 0 <= first < extent:
                raise SelectionError(
                    f"index {part} is out of range for dimension {number - 1} of {extent} elements"
                )
        begin.append(first)
        size.append(count)
        step.append(by)
    if number < rank:
        rest = shape[number:]
        begin += [0] * len(rest)
        step += [1] * len(rest)
        size += rest
        kept += rest
    return begin, size, step, tuple(kept)


def selection_of(key: tuple[Any, ...], shape: tuple[int, ...]) -> Selection:
    """Return the selection of any key; raise `SelectionError` if h5py would refuse it."""
    plain = box_of(key, shape)
    if plain is not None:
        return Selection(plain)
    if len(key) == 1 and _is_mask(key[0]) and key[0].shape == shape:
        every = Box([0] * len(shape), list(shape), [1] * len(shape), shape)
        return Selection(every, mask=key[0])
    parts = list(map(_plain, key))
    if sum(part is Ellipsis for part in parts) > 1:
        raise SelectionError("a selection can have one ellipsis, found several")
    count = sum(part is not Ellipsis for part in parts)
    if count > len(shape):
        raise SelectionError(f"{count} indices were given for {len(shape)} dimensions")
    if len(shape) == 1 and any(map(_is_mask, parts)) and not (len(key) == 1 and _is_mask(key[0])):
        raise SelectionError("a mask of the whole dataset must be an array, and be given alone")
    lists = [at for at, part in enumerate(parts) if isinstance(part, np.ndarray)]
    if len(lists) > 1:
        raise SelectionError("only one dimension can be selected by a list or a mask")
    index, axis, place = None, 0, 0
    for at in lists:
        before = parts[:at]
        axis = at
        if any(part is Ellipsis for part in before):
            axis = len(shape) - (len(parts) - at)
        index, parts[at] = _ascending(parts[at], shape[axis], axis), slice(None)
        place = axis - sum(type(part) is int for part in before)
    box = box_of(tuple(parts), shape)
    assert box is not None
    if index is not None and index.size:
        is_empty = not all(box.size[:axis] + box.size[axis + 1 :])  # h5py allows one past the end
        if not 0 <= index[0] <= index[-1] < shape[axis] + is_empty:
            raise SelectionError(
                f"indices are out of range for dimension {axis} of {shape[axis]} elements: {index}"
            )
    return Selection(box, index, axis, place)


def key_of(selection: Selection) -> Any:
    """Return a plain key for a non-empty selection; integers become slices of one element."""
    if selection.mask is not None:
        return selection.mask
    several = zip(*selection.box[:3], strict=True)
    key: list[Any] = [slice(first, first + (n - 1) * by + 1, by) for first, n, by in several]
    if selection.indices is not None:
        key[selection.axis] = selection.indices
    return tuple(key)


def _is_mask(part: Any) -> bool:
    return isinstance(part, np.ndarray) and part.dtype.kind == "b"


def _plain(part: Any) -> Any:
    """Return a part of a key as an int, a slice, Ellipsis, or an array of one dimension."""
    if isinstance(part, slice) or part is Ellipsis:
        return part
    try:
        return operator.index(part)
    except TypeError:
        pass
    found = np.asarray(part) if isinstance(part, list | tuple | np.ndarray | range) else None
    if found is None or found.ndim != 1:
        raise SelectionError(
            f"dimensions are selected by integers, slices, or lists of them; found {part!r}"
        )
    if not found.size and not isinstance(part, np.ndarray):
        found = found.astype(np.int64)
    if found.dtype.kind not in "biu":
        raise SelectionError(f"lists of indices must hold integers, found {found.dtype}")
    return found


def _ascending(part: NDArray[Any], extent: int, axis: int) -> Int64s:
    """Return indices, given as such or as a mask, counted from the front; range unchecked."""
    if part.dtype.kind == "b":
        if part.size != extent:
            raise SelectionError(
                f"a mask of {part.size} elements was given for dimension {axis} of {extent}"
            )
        return np.flatnonzero(part)
    found = part.astype(np.int64)
    found[found < 0] += extent
    if (np.diff(found) <= 0).any():
        raise SelectionError("lists of indices must be in increasing order, each index once")
    return found


def cut_box(box: Box, cells: Numbers, count: int) -> Iterator[tuple[list[int], list[int], Numbers]]:
    """Cut a box at the borders of cells into about `count` parts; there may be fewer.

    Yields the first index of each part, its size, and its place in the box, in elements.
    """
    several: list[list[tuple[int, int]]] = []
    numbers = []
    for begin, size, step, cell in zip(*box[:3], cells, strict=True):
        first, last = begin // cell, (begin + (size - 1) * step) // cell
        numbers.append(last - first + 1)
    wanted = [1] * len(numbers)
    for axis in sorted(range(len(numbers)), key=numbers.__getitem__, reverse=True):
        wanted[axis] = min(numbers[axis], -(-count // math.prod(wanted)))
    for axis, parts in enumerate(wanted):
        begin, size, step, cell = box.begin[axis], box.size[axis], box.step[axis], cells[axis]
        first = begin // cell
        borders = [(first + numbers[axis] * k // parts) * cell for k in range(1, parts)]
        cuts = [0, *(-(-(border - begin) // step) for border in borders), size]
        several.append([(a, b - a) for a, b in itertools.pairwise(cuts) if a < b])
    for combined in itertools.product(*several):
        at = [one[0] for one in combined]
        places = [b + a * s for b, a, s in zip(box.begin, at, box.step, strict=True)]
        yield places, [one[1] for one in combined], at
