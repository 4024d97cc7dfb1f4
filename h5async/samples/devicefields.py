"""Describes to a device how fields are composed, and which of them it assembles itself.

Options and facts about columns enter; an `Outline` of each field leaves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from h5async.config import Field, ImageField, RaggedField, SparseField
from h5async.errors import ConfigError
from h5async.plan.transform import RowTransform, pixel_transform
from h5async.samples.columns import INDICES, SparseShape, dense_dtype
from h5async.spelling import named


class Outline(NamedTuple):
    """How a field is assembled from its columns.

    Attributes
    ----------
    name
        Of the field.
    columns
        The numbers of its columns.
    is_varying
        Whether samples have different numbers of values.
    is_encoded
        Whether its column is delivered as other arrays: images are decoded.
    made
        Row shape and dtype of the plain array made of samples of differing lengths; None if there
        is none.
    pixels
        How decoded images of one size are delivered, if a device does that.
    is_left
        Whether a device makes that array, or delivers the pixels.
    added
        The number added to all values of dense rows, of their dtype, or None.
    """

    name: str
    columns: tuple[int, ...]
    is_varying: bool = False
    is_encoded: bool = False
    made: tuple[tuple[int, ...], np.dtype[Any]] | None = None
    pixels: RowTransform | None = None
    is_left: bool = False
    added: NDArray[Any] | None = None

    @property
    def made_on_host_nbytes(self) -> int:
        """Bytes of a row of the plain array, if the host makes it."""
        if self.made is None or self.is_left:
            return 0
        return math.prod(self.made[0]) * self.made[1].itemsize


def outlines_of(
    fields: Mapping[str, Field],
    shapes: Mapping[str, SparseShape],
    transforms: Mapping[str, RowTransform],
    can_transform: Callable[[RowTransform], bool] | None,
) -> tuple[Outline, ...]:
    """Return how each field is assembled.

    Parameters
    ----------
    fields, shapes
        By name; shapes are those of sparse fields.
    transforms
        By column.
    can_transform
        Whether a device supports a transform; None if the host does everything.
    """
    found: list[Outline] = []
    column = 0
    for name, field in fields.items():
        transform = transforms[name]
        columns = tuple(range(column, column + 1 + (name + INDICES in transforms)))
        column += len(columns)
        outline = Outline(name, columns, transform.capacity is not None)
        if isinstance(field, ImageField):
            outline = _of_images(outline, field, can_transform)
        elif isinstance(field, SparseField) and field.dense:
            dtype = dense_dtype(field, transform.dtype)
            if can_transform is not None and dtype.kind == "c":
                raise ConfigError(
                    f'"{field.path}" ({name}): dense rows of complex values are not made on a GPU;'
                    f" leave out {named('dense')}, or set {named('device', 'cpu')}"
                )
            outline = outline._replace(
                made=((shapes[name].columns,), dtype),
                is_left=can_transform is not None,
                added=None if field.offset is None else np.asarray(field.offset, dtype),
            )
        elif isinstance(field, RaggedField) and field.pad_to is not None:
            outline = outline._replace(
                made=((field.pad_to, *transform.row), transform.dtype),
                is_left=can_transform is not None,
            )
        found.append(outline)
    return tuple(found)


def _of_images(
    outline: Outline, field: ImageField, can_transform: Callable[[RowTransform], bool] | None
) -> Outline:
    pixels = pixel_transform(field) if field.steps is None else None
    if can_transform is None or pixels is None or pixels.is_identity or not can_transform(pixels):
        return outline._replace(is_encoded=True)
    return outline._replace(is_encoded=True, pixels=pixels, is_left=True)
