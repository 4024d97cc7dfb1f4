"""Finds what parts of rows the options of a plain field name: a field and a layout enter."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import NamedTuple

from h5async.config import Field
from h5async.errors import ConfigError
from h5async.index.attributes import numbered_axis
from h5async.index.datasettable import cut_rows
from h5async.index.layout import Crop, DatasetLayout
from h5async.index.segments import Int64s
from h5async.plan.crops import begins, draws_of, epoch_keys


class Places(NamedTuple):
    """Tells where the parts of rows begin that a crop of rows of some shape delivers.

    Of the dimensions of the crop, the first `num_cut` are those that it cuts; the rest is flipped
    whole. `where` names the dataset in messages.
    """

    seed: int
    crop: Crop
    row_shape: tuple[int, ...]
    num_cut: int
    where: str

    def begins(self, samples: Int64s, epoch: int) -> Int64s:
        """Return int64 (samples, num_cut)."""
        places = draws_of(self.crop, self.row_shape).places(_epoch_keys(self.seed, epoch), samples)
        return begins(places, self.crop.axes[: self.num_cut])

    @property
    def key(self) -> tuple[object, ...]:
        """What must be equal in a group of fields."""
        extents = tuple(self.row_shape[axis] for axis in self.crop.axes)
        return extents, self.crop.sizes, self.crop.is_drawn, self.crop.flips


_epoch_keys = functools.lru_cache(8)(epoch_keys)


def parts_of_rows(
    field: Field, layout: DatasetLayout, seed: int
) -> tuple[DatasetLayout, Places | None]:
    """Return the layout of the parts of rows that a field delivers, and where crops begin.

    ConfigError if a dimension is that of the samples, or is not there, or is too short.
    """
    if field.region is not None:
        layout = _region_of(field, layout)
    is_plain = type(field) is Field  # others have a crop of what is decoded
    if not is_plain or (field.crop is None and not field.flip):
        return layout, None
    crop, count = _crop_of(field, layout)
    places = Places(seed, crop, layout.row_shape, count, _where(layout))
    if crop.is_drawn or any(crop.flips):
        return layout.changed(crop=crop), places
    wanted = [range(size) for size in layout.row_shape]
    for axis, size in zip(crop.axes, crop.sizes, strict=True):
        begin = (layout.row_shape[axis] - size) // 2
        wanted[axis] = range(begin, begin + size)
    return cut_rows(layout, wanted), places


def require_same_places(several: Iterable[Places | None]) -> None:
    """Raise ConfigError if what is random of the crops of one group is not the same."""
    groups: dict[str, Places] = {}
    for places in several:
        if places is None or not (places.crop.is_drawn or any(places.crop.flips)):
            continue
        first = groups.setdefault(places.crop.group, places)
        if places.key != first.key:
            group = f"crop_group={places.crop.group!r}" if places.crop.group else "no crop_group"
            raise ConfigError(
                f"{first.where} and {places.where} have {group}, and so are cropped and flipped"
                f" together, but differ: {first.key[1]} of {first.key[0]} elements are taken, and"
                f" {places.key[1]} of {places.key[0]}, with flips {first.crop.flips} and"
                f" {places.crop.flips}; make them equal, or give one of them another crop_group"
            )


def _region_of(field: Field, layout: DatasetLayout) -> DatasetLayout:
    wanted = [range(size) for size in layout.row_shape]
    for bounds in field.region:
        at = _row_dimension(bounds.dimension, field, layout, "region")
        size = layout.row_shape[at]
        wanted[at] = range(size)[bounds.slice]
        if not wanted[at]:
            raise ConfigError(
                f"{_where(layout)}: region leaves nothing of dimension {bounds.dimension!r},"
                f" which has {size} elements; choose another slice than {bounds.slice}"
            )
    return cut_rows(layout, wanted)


def _crop_of(field: Field, layout: DatasetLayout) -> tuple[Crop, int]:
    """Return the crop of a field, and the number of dimensions that it cuts."""
    rank = len(layout.row_shape)
    if isinstance(field.crop, tuple):
        axes = [_row_dimension(dim, field, layout, "crop") for dim, _ in field.crop]
        sizes = [size for _, size in field.crop]
    else:  # a number, or all of each row, which is flipped
        axes = list(range(max(0, rank - 2), rank))
        sizes = [field.crop or layout.row_shape[axis] for axis in axes]
    if len(set(axes)) != len(axes) or not axes:
        found = "rows have none" if not axes else f"found {field.crop}"
        raise ConfigError(f"{_where(layout)}: crop must name each dimension once; {found}")
    for axis, size in zip(axes, sizes, strict=True):
        if size > layout.row_shape[axis]:
            raise ConfigError(
                f"{_where(layout)}: crop of {size} elements from a dimension of"
                f" {layout.row_shape[axis]}; make it smaller, or name the dimensions to crop, as in"
                ' crop={"lat": 64}'
            )
    count = len(axes) if field.crop is not None else 0
    flipped = [axes[-1]] if field.flip is True else []
    if isinstance(field.flip, tuple):
        flipped = [_row_dimension(dim, field, layout, "flip") for dim in field.flip]
        for axis in flipped:
            if axis not in axes:
                axes.append(axis)
                sizes.append(layout.row_shape[axis])
    flips = tuple(axis in flipped for axis in axes)
    is_drawn = field.crop is not None and field.crop_at == "random"
    return Crop(tuple(axes), tuple(sizes), is_drawn, flips, field.crop_group or ""), count


def _row_dimension(dim: int | str, field: Field, layout: DatasetLayout, option: str) -> int:
    """Return which dimension of a row a dimension of the dataset is."""
    where, several = _where(layout), field.num_dim
    is_pair = isinstance(several, tuple)
    rank = len(layout.shape) + is_pair  # in the layout, the two dimensions of samples are one
    of_samples = several if isinstance(several, tuple) else (layout.sample_axis,)
    taken = [numbered_axis(one, layout.dim_names, rank, where) for one in of_samples]
    number = numbered_axis(dim, layout.dim_names, rank, where)
    if number in taken:
        raise ConfigError(
            f"{where}: {option}: dimension {dim!r} counts the samples; choose samples by indices"
        )
    return [axis for axis in range(rank) if axis not in taken].index(number)


def _where(layout: DatasetLayout) -> str:
    return f'{layout.file}: dataset "{layout.path}" of shape {layout.shape}'
