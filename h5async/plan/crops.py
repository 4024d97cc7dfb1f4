"""Chooses what is cut out of images: sizes of images enter, boxes leave. Pure.

Random boxes are a function of the seed, the epoch and the sample's number alone: so they do not
depend on threads, on the order of work, or on where a run was resumed, and several fields of images
are cut alike.
"""

from __future__ import annotations

import hashlib
import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_TRIES = 10  # as torchvision's RandomResizedCrop has
_TOP, _LEFT, _FLIP = 2 * _TRIES, 2 * _TRIES + 1, 2 * _TRIES + 2
_NUMBERS = 2 * _TRIES + 3  # random numbers for each sample


class Box(NamedTuple):
    """A part of an image, in pixels."""

    top: int
    left: int
    height: int
    width: int


def random_numbers(seed: int, epoch: int, samples: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the random numbers of some samples.

    Returns
    -------
    numpy.ndarray
        float64 (samples, 23), from 0 to below 1: by row what `random_box` and `is_flipped` take.
    """
    digest = hashlib.blake2b(f"h5async images {seed} {epoch}".encode(), digest_size=16).digest()
    first, second = np.frombuffer(digest, "<u8").astype(np.uint64)
    with np.errstate(over="ignore"):
        of_sample = _mixed(_mixed(samples.astype(np.uint64) + first) ^ second)
        step = np.uint64(0x9E3779B97F4A7C15)
        counted = of_sample[:, np.newaxis] + step * np.arange(1, _NUMBERS + 1, dtype=np.uint64)
        bits = _mixed(counted) >> np.uint64(11)
    return bits.astype(np.float64) * 2.0**-53


def _mixed(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Mix the bits of numbers, as SplitMix64 does."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def random_box(
    height: int,
    width: int,
    scale: tuple[float, float],
    ratio: tuple[float, float],
    numbers: list[float],
) -> Box:
    """Return a random part of an image, as torchvision's ``RandomResizedCrop`` chooses it.

    Parameters
    ----------
    height, width
        Of the image.
    scale
        Bounds of the part's area, of that of the image.
    ratio
        Bounds of its width divided by its height.
    numbers
        A row of `random_numbers`.
    """
    low, high = math.log(ratio[0]), math.log(ratio[1])
    for number in range(_TRIES):
        area = height * width * (scale[0] + (scale[1] - scale[0]) * numbers[number])
        aspect = math.exp(low + (high - low) * numbers[_TRIES + number])
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            top, left = int(numbers[_TOP] * (height - h + 1)), int(numbers[_LEFT] * (width - w + 1))
            return Box(top, left, h, w)
    h, w = height, width
    if width / height < ratio[0]:
        h = max(1, min(height, round(width / ratio[0])))
    elif width / height > ratio[1]:
        w = max(1, min(width, round(height * ratio[1])))
    return Box((height - h) // 2, (width - w) // 2, h, w)


def center_box(height: int, width: int, size: tuple[int, int]) -> Box:
    """Return the largest part in the middle of an image that has the proportions of `size`."""
    h = min(height, max(1, round(width * size[0] / size[1])))
    w = min(width, max(1, round(height * size[1] / size[0])))
    return Box((height - h) // 2, (width - w) // 2, h, w)


def is_flipped(numbers: list[float]) -> bool:
    """Return whether an image is flipped, which half of them are."""
    return numbers[_FLIP] < 0.5
