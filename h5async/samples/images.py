"""Defines `Images`: images of differing sizes, as one array of pixels and their shapes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from h5async.html import counted, size_text, table
from h5async.samples.ragged import Ragged, on_host, some_of
from h5async.samples.samplearrays import NoTensorError


class Images(Ragged):
    """Images of differing sizes: `Ragged` samples that each have a shape of their own.

    ``images[i]`` is an array of three dimensions. `values`, `offsets`, `lengths`, and conversions
    for other libraries, describe the flat pixels of all images, concatenated.

    Parameters
    ----------
    values, offsets
        As in `Ragged`; values have one dimension.
    shapes
        int64 (samples, 3), in host memory: the shape of each image.

    Examples
    --------
    >>> pixels = np.arange(39, dtype=np.uint8)  # of an image of 3 x 3 and one of 2 x 2, RGB
    >>> images = Images(pixels, np.array([0, 27, 39]), np.array([[3, 3, 3], [2, 2, 3]]))
    >>> images
    <Images: 2 of differing sizes, uint8>
    >>> images[1].shape
    (2, 2, 3)
    """

    __slots__ = ("shapes",)

    def __init__(self, values: Any, offsets: Any, shapes: Any) -> None:
        super().__init__(values, offsets)
        self.shapes = shapes

    def __getitem__(self, key: Any) -> Any:
        """Return views: an array for one image, or `Images` for a slice.

        Raises
        ------
        IndexError
            If there is no such image.
        ConfigError
            If the slice has a step.
        """
        found = super().__getitem__(key)
        if isinstance(key, slice):
            return Images(found.values, found.offsets, self.shapes[key][: len(found)])
        return found.reshape(self.shapes[key].tolist())

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the images, as views."""
        return itertools.starmap(
            lambda values, shape: values.reshape(shape),
            zip(super().__iter__(), self.shapes.tolist(), strict=True),
        )

    def __repr__(self) -> str:
        return f"<Images: {len(self):,} of differing sizes, {self.dtype}>"

    def _repr_html_(self) -> str:
        """Show a small table in a notebook. Nothing is copied from a GPU."""
        rows = [["dtype", str(self.dtype)], ["size", size_text(self.nbytes)]]
        if len(self):
            low, high = self.shapes.min(axis=0).tolist(), self.shapes.max(axis=0).tolist()
            rows.append(["shapes", f"{tuple(low)} to {tuple(high)}"])
        return table("Images", rows, subtitle=counted(len(self), "image"))

    @property
    def arrays(self) -> tuple[Any, ...]:
        """`values`, `offsets` and `shapes`."""
        return self.values, self.offsets, self.shapes

    @property
    def sample_shape(self) -> tuple[int | None, ...]:
        """None for each dimension of an image."""
        return (None,) * int(self.shapes.shape[1])

    def misfit(self) -> str | None:
        """Return why the arrays do not fit together, or None."""
        sizes = self.shapes.prod(axis=1)
        if np.array_equal(sizes, self.lengths):
            return super().misfit()
        return (
            f"images that do not fit together: shapes say that they have {some_of(sizes)} values,"
            f" and offsets {some_of(self.lengths)}"
        )

    def to_tensor(self) -> Any:
        """Raise an error: images of differing sizes cannot be a tensor."""
        raise NoTensorError(
            "images of differing sizes are no tensor; give the field a size, or take Images from an"
            " AsyncReader"
        )

    def get(self) -> Images:
        """Return the images in host memory; a copy of those on a GPU."""
        return Images(on_host(self.values), on_host(self.offsets), self.shapes)

    def copy(self) -> Images:
        """Return a copy with memory of its own."""
        return Images(self.values.copy(), self.offsets.copy(), self.shapes.copy())
