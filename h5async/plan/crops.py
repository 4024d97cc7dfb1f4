"""Chooses the crops of rows, images and recordings: sizes enter, boxes leave. No I/O.

Also finds the parts of rows that the options of a plain field select: a field and a layout enter.

Random boxes depend only on the seed, the epoch and the sample number. So they do not depend on
threads, the order of work, or where a run was resumed, and several image fields get the same crops.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from h5async.config import Field
from h5async.errors import ConfigError
from h5async.index.hdf5 import numbered_axis
from h5async.index.layout import Crop, DatasetLayout
from h5async.index.shapes import cut_rows
from h5async.index.tables import Int64s

Uint64s = NDArray[np.uint64]

_TRIES = 10  # as in torchvision's RandomResizedCrop
_TOP, _LEFT, _FLIP = 2 * _TRIES, 2 * _TRIES + 1, 2 * _TRIES + 2
_NUMBERS = 2 * _TRIES + 3  # random numbers per sample


def random_numbers(seed: int, epoch: int, samples: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the random numbers of samples for `random_boxes` and `are_flipped`.

    They are float64 (samples, 23), in [0, 1).
    """
    return _numbers(epoch_keys(seed, epoch), samples, np.arange(_NUMBERS))


def epoch_keys(seed: int, epoch: int) -> Uint64s:
    """Return the two uint64 keys of all random numbers of an epoch."""
    digest = hashlib.blake2b(f"h5async images {seed} {epoch}".encode(), digest_size=16).digest()
    return np.frombuffer(digest, "<u8").astype(np.uint64)


def _numbers(keys: Uint64s, samples: Int64s, which: Int64s) -> NDArray[np.float64]:
    """Return the random numbers `which` of samples: float64 (samples, which)."""
    with np.errstate(over="ignore"):
        of_sample = _mixed(_mixed(samples.astype(np.uint64) + keys[0]) ^ keys[1])
        step = np.uint64(0x9E3779B97F4A7C15)
        counted = of_sample[:, np.newaxis] + step * (which + 1).astype(np.uint64)
        bits = _mixed(counted) >> np.uint64(11)
    return bits.astype(np.float64) * 2.0**-53


def _mixed(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Mix the bits of numbers, as SplitMix64 does."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def random_boxes(
    heights: NDArray[np.int64],
    widths: NDArray[np.int64],
    scale: tuple[float, float],
    ratio: tuple[float, float],
    numbers: NDArray[np.float64],
) -> NDArray[np.int64]:
    """Return random crops of images, as torchvision's ``RandomResizedCrop`` chooses them.

    They are int64 (n, 4): top, left, height and width in pixels. `heights` and `widths`, int64
    (n,), are those of the images, 1 or more. `scale` bounds a crop's area relative to the image's,
    `ratio` its width divided by its height. `numbers` has a row of `random_numbers` per image.
    """
    low, high = math.log(ratio[0]), math.log(ratio[1])
    boxes, left = np.empty((heights.size, 4), np.int64), np.arange(heights.size)
    for number in range(_TRIES):
        height, width, row = heights[left], widths[left], numbers[left]
        area = height * width * (scale[0] + (scale[1] - scale[0]) * row[:, number])
        logarithm = low + (high - low) * row[:, _TRIES + number]
        # math.exp, because the last bit of np.exp depends on the processor.
        aspect = np.array(list(map(math.exp, logarithm.tolist())))
        w, h = np.rint(np.sqrt(area * aspect)), np.rint(np.sqrt(area / aspect))
        corner = row[:, _TOP] * (height - h + 1), row[:, _LEFT] * (width - w + 1)
        boxes[left] = np.stack((*corner, h, w), axis=1)
        left = left[(w < 1) | (w > width) | (h < 1) | (h > height)]
        if not left.size:
            return boxes
    for image in left.tolist():
        boxes[image] = _largest_box(int(heights[image]), int(widths[image]), ratio)
    return boxes


def _largest_box(height: int, width: int, ratio: tuple[float, float]) -> tuple[int, int, int, int]:
    h, w = height, width
    if width / height < ratio[0]:
        h = max(1, min(height, round(width / ratio[0])))
    elif width / height > ratio[1]:
        w = max(1, min(width, round(height * ratio[1])))
    return ((height - h) // 2, (width - w) // 2, h, w)


def center_boxes(
    heights: NDArray[np.int64], widths: NDArray[np.int64], size: tuple[int, int]
) -> NDArray[np.int64]:
    """Return the largest centred boxes with the proportions of `size`; see `random_boxes`."""
    h = np.minimum(heights, np.maximum(1, np.rint(widths * size[0] / size[1])))
    w = np.minimum(widths, np.maximum(1, np.rint(heights * size[1] / size[0])))
    return np.stack(((heights - h) // 2, (widths - w) // 2, h, w), axis=1).astype(np.int64)


def random_start(numbers: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return where each recording's crop begins: a fraction, in [0, 1), of the possible starts."""
    return numbers[:, _LEFT]


def are_flipped(numbers: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Return whether each image is flipped, with probability 1/2."""
    return numbers[:, _FLIP] < 0.5


# --- parts of rows --------------------------------------------------------------------------------


class CropDraws(NamedTuple):
    """How the places of crops of rows are drawn, in the core's form.

    The arrays are int64 (rank,): `extents` of a row and `sizes` of its crop. `drawn` has the index
    of the random number for the place along each dimension (negative: centred), and `flipped` of
    the one that decides whether it is reversed (negative: never). `group`, uint64 (2,), is equal
    for all fields of a group.
    """

    extents: Int64s
    sizes: Int64s
    drawn: Int64s
    flipped: Int64s
    group: Uint64s

    def places(self, keys: Uint64s, samples: Int64s) -> Int64s:
        """Return where the crops of samples begin: int64 (samples, rank).

        `keys` are from `epoch_keys`. If a crop is reversed along a dimension, ~n stands for n. The
        core computes the same (``src/crops.c``).
        """
        with np.errstate(over="ignore"):
            keys = np.array([keys[0] + self.group[0], keys[1] ^ self.group[1]])
        room = self.extents - self.sizes
        places = np.broadcast_to(room // 2, (samples.size, room.size)).copy()
        for axis in np.flatnonzero(self.drawn >= 0):
            number = _numbers(keys, samples, self.drawn[[axis]])[:, 0]
            places[:, axis] = np.minimum(room[axis], number * (room[axis] + 1))
        for axis in np.flatnonzero(self.flipped >= 0):
            is_flipped = _numbers(keys, samples, self.flipped[[axis]])[:, 0] < 0.5
            places[is_flipped, axis] = ~places[is_flipped, axis]
        return places


def draws_of(crop: Crop, row_shape: tuple[int, ...]) -> CropDraws:
    """Return how the places of crops of rows are drawn.

    Without a group, the last flipped dimension is flipped in the same samples as images are, with
    the same seed.
    """
    extents = np.array(row_shape, np.int64)
    sizes, drawn, flipped = extents.copy(), np.full_like(extents, -1), np.full_like(extents, -1)
    for number, axis in enumerate(crop.axes):
        sizes[axis] = crop.sizes[number]
        drawn[axis] = number if crop.is_drawn else -1
        if crop.flips[number]:
            flipped[axis] = _FLIP + sum(crop.flips[number + 1 :])
    group = np.zeros(2, np.uint64)
    if crop.group:
        digest = hashlib.blake2b(f"h5async crops {crop.group}".encode(), digest_size=16).digest()
        group = np.frombuffer(digest, "<u8").astype(np.uint64)
    return CropDraws(extents, sizes, drawn, flipped, group)


def begins(places: Int64s, axes: Sequence[int]) -> Int64s:
    """Return where crops begin along some dimensions: int64 (samples, dimensions)."""
    found: Int64s = np.where(places < 0, ~places, places)[:, list(axes)]
    return np.ascontiguousarray(found)


# --- by the options of a field --------------------------------------------------------------------


class Places(NamedTuple):
    """Tells where a field's crops begin in rows of shape `row_shape`.

    The first `num_cut` dimensions of the crop are cut; the others are only flipped. `where` names
    the dataset in messages.
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
        """The properties that must be equal in a group of fields."""
        extents = tuple(self.row_shape[axis] for axis in self.crop.axes)
        return extents, self.crop.sizes, self.crop.is_drawn, self.crop.flips


_epoch_keys = functools.lru_cache(8)(epoch_keys)


def parts_of_rows(
    field: Field, layout: DatasetLayout, seed: int
) -> tuple[DatasetLayout, Places | None]:
    """Return the layout of the parts of rows that a field delivers, and where crops begin.

    Raises `ConfigError` if a dimension counts the samples, does not exist, or is too short.
    """
    if field.region is not None:
        layout = _region_of(field, layout)
    is_plain = type(field) is Field  # other kinds crop after decoding
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
    """Raise `ConfigError` if random crops or flips in a group are not alike."""
    groups: dict[str, Places] = {}
    for places in several:
        if places is None or not (places.crop.is_drawn or any(places.crop.flips)):
            continue
        first = groups.setdefault(places.crop.group, places)
        if places.key != first.key:
            group = f"crop_group={places.crop.group!r}" if places.crop.group else "no crop_group"
            raise ConfigError(
                f"{first.where} and {places.where} have {group}, so they are cropped and flipped"
                f" together, but they differ: crops of {first.key[1]} from {first.key[0]} elements,"
                f" and of {places.key[1]} from {places.key[0]}, with flips {first.crop.flips} and"
                f" {places.crop.flips}; make them equal, or give one of them another crop_group"
            )


def _region_of(field: Field, layout: DatasetLayout) -> DatasetLayout:
    wanted = [range(size) for size in layout.row_shape]
    axes = [_row_dimension(bounds.dimension, field, layout, "region") for bounds in field.region]
    if len(set(axes)) != len(axes):
        found = tuple(bounds.dimension for bounds in field.region)
        raise ConfigError(f"{_where(layout)}: region must name each dimension once; found {found}")
    for at, bounds in zip(axes, field.region, strict=True):
        size = layout.row_shape[at]
        wanted[at] = range(size)[bounds.slice]
        if not wanted[at]:
            raise ConfigError(
                f"{_where(layout)}: region selects nothing of dimension {bounds.dimension!r},"
                f" which has {size} elements; choose another slice than {bounds.slice}"
            )
    return cut_rows(layout, wanted)


def _crop_of(field: Field, layout: DatasetLayout) -> tuple[Crop, int]:
    """Return the crop of a field, and the number of dimensions that it cuts."""
    rank = len(layout.row_shape)
    if isinstance(field.crop, tuple):
        axes = [_row_dimension(dim, field, layout, "crop") for dim, _ in field.crop]
        sizes = [size for _, size in field.crop]
    else:  # a number; or None, for whole rows that are flipped
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
    """Convert a dimension of the dataset to one of its rows."""
    where, several = _where(layout), field.num_dim
    is_pair = isinstance(several, tuple)
    rank = len(layout.shape) + is_pair  # the layout joins two dimensions of samples into one
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
