"""Summarizes the values of fields: batches enter, `FieldStatistics` leave.

`FieldSummary.part` reduces the values of one batch, in any thread; `FieldSummary.add` adds parts
up, in the order of the batches, so that results do not depend on threads.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from h5async.config.statistics import FieldStatistics, Per
from h5async.config.values import is_float
from h5async.errors import ConfigError
from h5async.index.layout import DatasetLayout
from h5async.measure.moments import Moments, moments_of, moments_of_rows
from h5async.plan.transform import RowTransform
from h5async.samples.fieldkind import FieldKind
from h5async.samples.ragged import Images, Ragged
from h5async.samples.sparse import Csr

_MOST_CLASSES = 1 << 16
_MOST_SORTED_GROUPS = 1 << 10
_KEPT_VALUES = 1 << 22  # of a field, for quantiles: more would take longer than reading
_KEPT_OF_GROUP = 1 << 18
_UNLIKELY = 0.01  # that a quantile is farther off than stated
_DECODED_PER_BYTE = 10  # values, of an encoded image or recording, about


@dataclass(slots=True)
class Part:
    """What the values of one batch say: their moments, some values, their classes and lengths.

    `row` is the shape of a row, if rows are numbers.
    """

    dtype: str = ""
    row: tuple[int, ...] = ()
    moments: Moments | None = None
    kept: NDArray[Any] | None = None
    classes: Counter[Any] | None = None
    lengths: Moments | None = None


class FieldSummary:
    """Summarizes one field of `samples` samples, which is of `kind` and stored as `layout` says.

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

    # --- of a batch -------------------------------------------------------------------------------

    def part(self, values: Any, rng: np.random.Generator) -> Part:
        """Reduce the values of a batch; may be called by many threads."""
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
            return grouped.swapaxes(1, 2).reshape(-1, groups)
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

    # --- of all batches ---------------------------------------------------------------------------

    def add(self, part: Part) -> None:
        """Add the part of the next batch."""
        total = self._total
        total.dtype, total.row = part.dtype, part.row
        if part.kept is not None:
            self._kept.append(part.kept)
        for name in ("moments", "lengths"):
            new, old = getattr(part, name), getattr(total, name)
            if old is None or new is None:
                setattr(total, name, new if old is None else old)
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
    """Return the number of the dataset's dimension that counts channels; None if unknown."""
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
