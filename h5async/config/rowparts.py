"""Checks the options that choose parts of rows: a region, a crop, and what is flipped."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias, TypeGuard

from pydantic import PlainSerializer, PlainValidator

from h5async.config.parts import slice_of
from h5async.config.values import DimensionLike, Integer, dimension, integer

_REGION_WORDS = (
    'must map dimensions to slices, such as {"lat": slice(100, 356)}, or "100:356" in a file;'
    " steps are 1 or more"
)
_CROP_WORDS = 'must be a number of elements, or map dimensions to numbers, such as {"lat": 64}'
_FLIP_WORDS = "must be False, True, or a list of dimensions of the crop"

# What is taken, for type checkers.
RegionLike: TypeAlias = Mapping[DimensionLike, slice | str]
CropLike: TypeAlias = Integer | Mapping[DimensionLike, Integer]
FlipLike: TypeAlias = bool | Sequence[DimensionLike]
CropAt: TypeAlias = Literal["random", "center"]


class Bounds(NamedTuple):
    """A slice along a dimension, hashable."""

    dimension: int | str
    start: int | None
    stop: int | None
    step: int | None

    @property
    def slice(self) -> slice:
        """The slice."""
        return slice(self.start, self.stop, self.step)


def _dimension(value: object, words: str) -> int | str:
    """Take a number or a name; files of options have numbers as text."""
    if isinstance(value, str) and re.fullmatch(r"-?\d+", value):
        value = int(value)
    found = dimension(value)
    if type(found) not in (int, str):
        raise ValueError(words)
    return found  # type: ignore[return-value]


def _is_copy(value: object) -> TypeGuard[tuple[Any, ...]]:
    """Tell whether a value was taken before: it is of an option that is copied."""
    return isinstance(value, tuple) and all(isinstance(one, tuple) for one in value)


def _region(value: object) -> tuple[Bounds, ...] | None:
    if value is None:
        return None
    if _is_copy(value):
        return tuple(Bounds(*one) for one in value)
    if not isinstance(value, Mapping) or not value:
        raise ValueError(_REGION_WORDS)
    found = []
    for dim, part in value.items():
        some = slice_of(part) if isinstance(part, str) else part
        if not isinstance(some, slice):
            raise ValueError(_REGION_WORDS)
        ends = [integer(end) for end in (some.start, some.stop, some.step)]
        if not all(end is None or type(end) is int for end in ends):
            raise ValueError(_REGION_WORDS)
        if ends[2] is not None and ends[2] < 1:  # type: ignore[operator]
            raise ValueError(_REGION_WORDS)
        found.append(Bounds(_dimension(dim, _REGION_WORDS), *ends))  # type: ignore[arg-type]
    return tuple(found)


def _region_as_text(value: tuple[Bounds, ...] | None) -> dict[str, str] | None:
    if value is None:
        return None
    texts = (["" if end is None else str(end) for end in one[1:]] for one in value)
    return {str(one.dimension): ":".join(text) for one, text in zip(value, texts, strict=True)}


def _size(value: object) -> int:
    found = integer(value)
    if type(found) is not int or found < 1:
        raise ValueError(_CROP_WORDS)
    return found


def _crop(value: object) -> int | tuple[tuple[int | str, int], ...] | None:
    if value is None:
        return None
    if _is_copy(value):
        value = dict(value)
    if not isinstance(value, Mapping):
        return _size(value)
    if not value:
        raise ValueError(_CROP_WORDS)
    return tuple((_dimension(dim, _CROP_WORDS), _size(size)) for dim, size in value.items())


def _crop_as_mapping(value: Any) -> Any:
    return {str(dim): size for dim, size in value} if isinstance(value, tuple) else value


def _flip(value: object) -> bool | tuple[int | str, ...]:
    if isinstance(value, bool):
        return value
    if not isinstance(value, list | tuple) or not value:
        raise ValueError(_FLIP_WORDS)
    return tuple(_dimension(dim, _FLIP_WORDS) for dim in value)


# (`Any`: fields of images have other options of these names.)
Region = Annotated[Any, PlainValidator(_region), PlainSerializer(_region_as_text)]
Crop = Annotated[Any, PlainValidator(_crop), PlainSerializer(_crop_as_mapping)]
Flip = Annotated[Any, PlainValidator(_flip)]
