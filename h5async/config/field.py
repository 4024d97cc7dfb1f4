"""One field of a batch: which dataset it comes from, and how its samples are delivered."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from pydantic import model_validator

from h5async.config.frozen import REQUIRED, Frozen, documented, option
from h5async.config.values import DType, Int, Ints, Name, Number

_NOT_GIVEN: Any = object()


@documented
class Field(Frozen):
    """One dataset, and how its samples are delivered.

    The delivered value is ``stored.astype(dtype) * scale + offset``, with the dataset's
    dimensions in the order of `axes`. Arithmetic is done in `dtype`; a cast is NumPy's
    ``astype`` (a float out of an integer's range is undefined, as there).

    Raises
    ------
    ConfigError
        If a value does not fit.
    """

    path: Name = option(REQUIRED, "Path of the dataset in the HDF5 file.")
    num_dim: Int = option(
        0, "The dimension that counts the samples.", default_text="0, or the first of `axes`"
    )
    axes: Ints | None = option(
        None,
        "The dataset's dimensions in the order of delivery, the sample dimension first. None: the"
        " sample dimension, then the others in the file's order.",
    )
    dtype: DType = option(
        None,
        "Delivered dtype. None: the file's, in native byte order; with a `scale` or `offset`:"
        " float32.",
    )
    scale: Number | None = option(
        None, "A factor, or one for each channel (index along the second delivered axis)."
    )
    offset: Number | None = option(
        None, "What is added after scaling: a number, or one for each channel."
    )

    def __init__(
        self,
        path: str = _NOT_GIVEN,
        num_dim: int | None = None,
        axes: tuple[int, ...] | None = None,
        dtype: Any = None,
        scale: Any = None,
        offset: Any = None,
        **unknown: Any,
    ) -> None:
        if num_dim is None:
            num_dim = next(iter(axes), 0) if isinstance(axes, Iterable) else 0
        if path is not _NOT_GIVEN:
            unknown["path"] = path
        super().__init__(
            num_dim=num_dim,
            axes=axes,
            dtype=dtype,
            scale=scale,
            offset=offset,
            **unknown,
        )

    @model_validator(mode="after")
    def _check(self) -> Field:
        if self.axes is not None:
            if len(set(self.axes)) != len(self.axes) or not self.axes:
                raise ValueError(f"axes must name each dimension once, found {self.axes}")
            if self.axes[0] != self.num_dim:
                raise ValueError(
                    f"axes must begin with the sample dimension num_dim={self.num_dim},"
                    f" found {self.axes}"
                )
        scaled = self.scale is not None or self.offset is not None
        if scaled and self.dtype is not None and self.dtype.kind != "f":
            raise ValueError(
                f"scale and offset need a float dtype, found dtype={self.dtype}; choose a float"
                " dtype, or scale in postprocess"
            )
        return self

    @property
    def delivered_dtype(self) -> np.dtype[Any] | None:
        """The dtype asked for, float32 where scaling implies it, None for the file's own."""
        if self.dtype is None and (self.scale is not None or self.offset is not None):
            return np.dtype(np.float32)
        dtype: np.dtype[Any] | None = self.dtype
        return dtype


def as_field(value: object) -> object:
    """Make a `Field` of a path or a mapping; leave anything else to validation.

    Raises
    ------
    ConfigError
        If a value does not fit.
    """
    if isinstance(value, str | bytes):
        return Field(value)  # type: ignore[arg-type]  # (bytes are taken, too)
    if isinstance(value, Mapping):
        return Field(**{str(name): option for name, option in value.items()})
    return value
