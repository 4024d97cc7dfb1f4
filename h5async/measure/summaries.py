"""Summarizes the values of fields: batches enter, `FieldStatistics` leave.

`FieldSummary.part` reduces the values of one batch, in any thread; `FieldSummary.add` accumulates
parts in the order of the batches, so that results do not depend on threads.

`Moments` are the count, mean, spread and range of groups of values. The compiled core computes
those of a block without the GIL, in two passes, to avoid cancellation; blocks are combined as in
Chan, Golub, LeVeque, "Algorithms for Computing the Sample Variance" (1983).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from h5async.config.statistics import FieldStatistics, Per
from h5async.config.values import is_float
from h5async.core.binding import VALUE_KINDS, Core, address, load_core
from h5async.errors import ConfigError
from h5async.index.layout import DatasetLayout
from h5async.plan.transform import RowTransform
from h5async.samples.fieldkind import FieldKind
from h5async.samples.ragged import Images, Ragged
from h5async.samples.sparse import Csr

_MOST_CLASSES = 1 << 16
_MOST_SORTED_GROUPS = 1 << 10
_KEPT_VALUES = 1 << 22  # per field, for quantiles: sorting more would take longer than reading
_KEPT_OF_GROUP = 1 << 18
_UNLIKELY = 0.01  # the probability that a quantile is farther off than stated
_DECODED_PER_BYTE = 10  # approximate values per byte of an encoded image or recording

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]


@dataclass(slots=True, eq=False)
class Moments:
    """Moments of several groups of values; each attribute is an array (groups,).

    `count` excludes NaNs; `nan` is their number, and `fill` the number of values equal to a fill
    value. `squares` is the sum of squared differences from `mean`.
    """

    count: Counts
    nan: Counts
    fill: Counts
    mean: Floats
    squares: Floats
    low: Floats
    high: Floats

    @classmethod
    def empty(cls, groups: int) -> Moments:
        """Return the moments of no values."""
        count, nan, fill = np.zeros((3, groups), np.int64)
        mean, squares = np.zeros((2, groups))
        return cls(
            count, nan, fill, mean, squares, np.full(groups, np.inf), np.full(groups, -np.inf)
        )

    def add(self, other: Moments) -> None:
        """Add the moments of other values in the same groups."""
        total = self.count + other.count
        share = other.count / np.maximum(total, 1)
        gap = other.mean - self.mean
        self.squares += other.squares + gap * gap * (self.count * share)
        self.mean += gap * share
        self.count[...] = total
        self.nan += other.nan
        self.fill += other.fill
        np.minimum(self.low, other.low, out=self.low)
        np.maximum(self.high, other.high, out=self.high)

    @property
    def std(self) -> Floats:
        """The standard deviation of all values (`ddof` 0, as NumPy's default)."""
        return np.sqrt(self.squares / np.maximum(self.count, 1))


def moments_of(values: NDArray[Any], fill: Any = None) -> Moments:
    """Return the moments of numbers (outer, groups, inner), one per group.

    `fill` is the value to count in `Moments.fill`; None: count none.
    """
    core = load_core()
    if core is not None:
        values = values.astype(np.float32) if values.dtype == np.float16 else values
        return _by_core(core, np.ascontiguousarray(values), fill)
    with np.errstate(all="ignore"):  # infinite values have an infinite mean
        return _by_numpy(values, fill)


def _by_core(core: Core, values: NDArray[Any], fill: Any) -> Moments:
    found = np.zeros((values.shape[1], len(Moments.__slots__)))
    found[:, 5:] = np.inf, -np.inf
    shape, equal = np.array(values.shape, np.int64), np.array(fill, np.float64)  # None: NaN
    kind = VALUE_KINDS[values.dtype]
    core.measure(address(values), address(shape), address(equal), address(found), kind)
    counts, numbers = found[:, :3].astype(np.int64), found[:, 3:]
    return Moments(*counts.T.copy(), *numbers.T.copy())


def _by_numpy(values: NDArray[Any], fill: Any) -> Moments:
    x = np.array(values.swapaxes(0, 1), np.float64, order="C").reshape(values.shape[1], -1)
    is_nan, fills = np.isnan(x), np.zeros(len(x), np.int64)
    nan = is_nan.sum(axis=1)
    count = x.shape[1] - nan
    if fill is not None:
        fills = (x == np.float64(fill)).sum(axis=1)
    low = x.min(axis=1, where=~is_nan, initial=np.inf)
    high = x.max(axis=1, where=~is_nan, initial=-np.inf)
    x[is_nan] = 0  # (sums with `where` would not be pairwise)
    mean = x.sum(axis=1) / np.maximum(count, 1)
    x -= mean[:, np.newaxis]
    x[is_nan] = 0
    return Moments(count, nan, fills, mean, np.square(x, out=x).sum(axis=1), low, high)


def moments_of_rows(rows: Csr, *, by_column: bool) -> Moments:
    """Return the moments of sparse rows, zeros included, per column or of all values."""
    width = rows.shape[1] if by_column else 1
    total = rows.shape[0] * rows.shape[1] // max(1, width)
    if not by_column:
        found = moments_of(rows.data.reshape(1, 1, -1))
    else:
        found = _of_columns(rows.data.astype(np.float64), rows.indices, width)
    zeros = Moments.empty(width)
    zeros.count[...] = total - found.count - found.nan
    zeros.low[zeros.count > 0] = zeros.high[zeros.count > 0] = 0
    found.add(zeros)
    return found


def _of_columns(values: Floats, columns: NDArray[Any], width: int) -> Moments:
    is_nan = np.isnan(values)
    nan = np.bincount(columns[is_nan], minlength=width)
    values, columns = values[~is_nan], columns[~is_nan]
    found = Moments.empty(width)
    found.nan[...] = nan
    found.count[...] = np.bincount(columns, minlength=width)
    with np.errstate(all="ignore"):
        sums = np.bincount(columns, weights=values, minlength=width)
        found.mean[...] = sums / np.maximum(found.count, 1)
        gaps = values - found.mean[columns]
        found.squares[...] = np.bincount(columns, weights=gaps * gaps, minlength=width)
    np.minimum.at(found.low, columns, values)
    np.maximum.at(found.high, columns, values)
    return found


@dataclass(slots=True)
class Part:
    """The summary of one batch: moments, some values, class frequencies and lengths.

    `row` is the shape of a row of numbers.
    """

    dtype: str = ""
    row: tuple[int, ...] = ()
    moments: Moments | None = None
    kept: NDArray[Any] | None = None
    classes: Counter[Any] | None = None
    lengths: Moments | None = None


class FieldSummary:
    """Summarizes `samples` samples of one field of the given kind and layout.

    `transform` is that of its first column.
    """

    def __init__(
        self,
        kind: FieldKind,
        layout: DatasetLayout,
        transform: RowTransform,
        per: Per,
        quantiles: Sequence[float],
        samples: int,
    ) -> None:
        self._kind, self._per, self._quantiles = kind, per, quantiles
        of_row = transform.of_one_row
        self._axis = kind.channel_axis(of_row)
        self._dimension = _dimension(kind, layout, of_row) if per == "channel" else None
        if per == "feature" and kind.is_encoded and not kind.decoded_nbytes(1):
            raise ConfigError(
                f'"{kind.field.path}" ({kind.name}): samples of differing sizes have no features in'
                ' common; choose per="channel" or None, or give images a size'
            )
        field = kind.field
        is_as_stored = field.delivered_dtype is None and not (kind.is_encoded or field.decode_cf)
        self._fill = layout.fill if is_as_stored and layout.dtype.kind in "iuf" else None
        self._is_text = any(heap.elements.form.is_text for heap in layout.heaps)
        share = samples / max(1, layout.sample_count)
        self._values = math.prod(layout.shape) * share
        if field.steps is not None and not kind.is_ragged:
            self._values *= len(field.steps)
        if kind.is_encoded:
            self._values *= _DECODED_PER_BYTE
        self._total = Part()
        self._kept: list[NDArray[Any]] = []
        self._has_too_many_classes = False

    # --- one batch --------------------------------------------------------------------------------

    def part(self, values: Any, rng: np.random.Generator) -> Part:
        """Reduce the values of a batch. Thread-safe."""
        part = Part(str(values.dtype))
        if self._is_text or self._kind.categories is not None or values.dtype.kind in "SU":
            part.classes = self._classes(values)
        elif isinstance(values, Csr):
            part.moments = moments_of_rows(values, by_column=self._per is not None)
            part.row = values.shape[1:]
        elif values.dtype.kind in "biu" or is_float(values.dtype):
            self._measure(values, part, rng)
        return part

    def _measure(self, values: Any, part: Part, rng: np.random.Generator) -> None:
        array = values.values if isinstance(values, Ragged) else values
        if isinstance(values, Images):
            part.row = tuple(values.shapes[0].tolist())
            several = [self._grouped(image[np.newaxis]) for image in values]
        else:
            part.row = array.shape[1 if self._kind.field.steps is None else 2 :]
            several = [self._grouped(array)]
        for grouped in several:
            moments, kept = moments_of(grouped, self._fill), self._some_of(grouped, rng)
            if part.moments is None or part.kept is None:
                part.moments, part.kept = moments, kept
            else:
                part.moments.add(moments)
                part.kept = np.concatenate([part.kept, kept])
        if isinstance(values, Ragged):
            part.lengths = moments_of(values.lengths.reshape(1, 1, -1))
        elif values.ndim == 1 and values.dtype.kind in "biu":
            part.classes = self._classes(values)

    def _grouped(self, array: NDArray[Any]) -> NDArray[Any]:
        """Return values as (outer, groups, inner)."""
        if array.dtype.kind in "bV":
            array = array.view(np.uint8) if array.dtype.kind == "b" else array.astype(np.float32)
        before = 1 if self._kind.field.steps is None else 2
        if self._per is None or array.ndim <= before:
            return array.reshape(1, 1, -1)
        begin, end = before, array.ndim
        if self._per == "channel":
            begin, end = before + self._axis, before + self._axis + 1
        outer, groups, inner = array.shape[:begin], array.shape[begin:end], array.shape[end:]
        return array.reshape(math.prod(outer), math.prod(groups), math.prod(inner))

    def _some_of(self, grouped: NDArray[Any], rng: np.random.Generator) -> NDArray[Any]:
        """Return some values of each group, drawn uniformly: (number, groups)."""
        outer, groups, inner = grouped.shape
        rate = self._rate(groups)
        if rate >= 1:
            return np.array(grouped.swapaxes(1, 2)).reshape(-1, groups)  # copy: slots are reused
        number = rng.binomial(outer * inner, rate) if outer * inner else 0
        at = rng.integers(max(1, outer * inner), size=number)
        return grouped[at // max(1, inner), :, at % max(1, inner)]

    def _rate(self, groups: int) -> float:
        if groups > _MOST_SORTED_GROUPS or not self._quantiles:
            return 0.0
        wanted = min(_KEPT_OF_GROUP, _KEPT_VALUES // max(1, groups))
        return wanted * groups / max(1.0, self._values)

    def _classes(self, values: Any) -> Counter[Any]:
        if self._has_too_many_classes:
            return Counter()
        if isinstance(values, Ragged):
            return Counter(sample.tobytes() for sample in values)
        found, counts = np.unique(values, return_counts=True)
        return Counter(dict(zip(found.tolist(), counts.tolist(), strict=True)))

    # --- all batches ------------------------------------------------------------------------------

    def add(self, part: Part) -> None:
        """Add the summary of the next batch."""
        total = self._total
        total.dtype, total.row = part.dtype, part.row
        if part.kept is not None:
            self._kept.append(part.kept)
        for name in ("moments", "lengths"):
            new, old = getattr(part, name), getattr(total, name)
            if old is None or new is None:
                setattr(total, name, deepcopy(new) if old is None else old)  # (it may be read-only)
            else:
                old.add(new)
        if part.classes is not None:
            total.classes = (total.classes or Counter()) + part.classes
            if len(total.classes) > _MOST_CLASSES:
                total.classes, self._has_too_many_classes = Counter(), True

    def result(self) -> FieldStatistics:
        """Return the statistics."""
        moments, lengths, row = self._total.moments, self._total.lengths, self._total.row
        names = self._kind.categories.names if self._kind.categories is not None else None
        found: dict[str, Any] = {"path": self._kind.field.path, "dtype": self._total.dtype}
        if moments is not None:
            groups = moments.count.size
            shape = (groups,) if self._per == "channel" and row else row
            shape = () if self._per is None else shape
            found |= {"per": self._per, "channel_dim": self._dimension} | _numbers(moments, shape)
            if self._fill is not None:
                found["fill"] = moments.fill.reshape(shape)
            found |= self._sorted(groups, shape)
        if lengths is not None:
            found["lengths"] = {n: a.item() for n, a in _numbers(lengths, ()).items() if n != "nan"}
        classes = self._total.classes
        if classes is not None and not self._has_too_many_classes:
            missing = classes.pop(-1, 0) if names is not None else 0
            known = {} if names is None else dict.fromkeys(map(_text, names), 0)
            found["frequencies"] = known | {
                _text(one if names is None else names[one]): number
                for one, number in sorted(classes.items())
            }
            if moments is None:
                found["count"] = np.array(sum(classes.values()))
                found["nan"] = np.array(missing)
        return FieldStatistics(**found)

    def _sorted(self, groups: int, shape: tuple[int, ...]) -> dict[str, Any]:
        rate, quantiles = self._rate(groups), self._quantiles
        if not self._kept or not rate:
            return {}
        kept = np.concatenate(self._kept)
        function = np.nanquantile if np.isnan(kept).any() else np.quantile
        least = int(np.count_nonzero(~np.isnan(kept), axis=0).min(initial=kept.shape[0]))
        error = (
            0.0 if rate >= 1 else min(1.0, math.sqrt(math.log(2 / _UNLIKELY) / 2 / max(1, least)))
        )
        if not least:
            return {}
        found = function(kept, quantiles, axis=0)
        several = {f"{q:g}": one.reshape(shape) for q, one in zip(quantiles, found, strict=True)}
        return {"quantiles": several, "quantile_error": error}


def _dimension(kind: FieldKind, layout: DatasetLayout, of_row: RowTransform) -> int | None:
    """Return the index of the dataset's channel dimension; None if unknown."""
    if kind.is_encoded:
        return 3
    if kind.is_ragged or isinstance(kind.field.num_dim, tuple) or not of_row.row:
        return None
    rest = [axis for axis in range(len(layout.shape)) if axis != layout.sample_axis]
    return [layout.sample_axis, *rest][of_row.permutation[1 + of_row.channel]]


def _numbers(moments: Moments, shape: tuple[int, ...]) -> dict[str, NDArray[Any]]:
    is_empty = moments.count == 0
    found = {"count": moments.count, "nan": moments.nan}
    several = {"mean": moments.mean, "std": moments.std, "min": moments.low, "max": moments.high}
    found |= {name: np.where(is_empty, np.nan, one) for name, one in several.items()}
    return {name: one.reshape(shape) for name, one in found.items()}


def _text(one: Any) -> str:
    return one.decode("utf-8", "surrogateescape") if isinstance(one, bytes) else str(one)
