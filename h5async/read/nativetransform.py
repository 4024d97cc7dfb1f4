"""Transforms rows in the compiled core without the GIL: permutes, casts, scales and unpacks them.

A `RowTransform` enters; its equivalent in the core leaves, or None if the core cannot do it.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from h5async.core.binding import Core, address
from h5async.core.structures import transform_source
from h5async.plan.cf import CfForm
from h5async.plan.transform import RowTransform

# Numbers of stored types; see src/unpack.c.
_SOURCES = {"i1": 1, "u1": 2, "i2": 3, "u2": 4, "i4": 5, "u4": 6, "f4": 7, "f8": 8}
_SINGLE, _DOUBLE = np.dtype(np.float32), np.dtype(np.float64)

Columns = dict[str, NDArray[np.float64]]
Unpack = Callable[[NDArray[Any], NDArray[Any], NDArray[np.int64] | None], None]


class NativeTransform:
    """Does in the core what `RowTransform.apply` does. Safe to use from many threads.

    `struct` is complete except the number of samples, and points to `factors`, scale and offset as
    float32.
    """

    def __init__(self, core: Core, struct: Any, factors: list[NDArray[np.float32] | None]) -> None:
        self._core = core
        self._factors = factors
        self.struct = struct

    def __call__(self, raw: NDArray[Any], out: NDArray[Any], _: Any = None) -> None:
        """Fill `out` from `raw`."""
        call = type(self.struct).from_buffer_copy(self.struct)
        call.samples = len(raw)
        self._core.transform(ctypes.byref(call), address(raw), address(out))


def native_transform(core: Core, transform: RowTransform) -> NativeTransform | None:
    """Return what does a transform in the core, or None if it cannot.

    It can if the last dimension of a sample becomes its first one, as channels of images do, or if
    no dimension moves; to the same dtype, or to float32.
    """
    channels = transform.channels
    is_scaled = transform.scale is not None or transform.offset is not None
    source = transform_source(transform.raw_dtype, transform.dtype, is_scaled)
    if transform.cf is not None:
        return None
    if source is None or channels is None or not math.prod(transform.row):
        return None
    struct = core.Transform(
        points=math.prod(transform.row) // channels,
        channels=channels,
        source=source,
        is_float=source > 8,
    )
    factors = [
        None if f is None else np.broadcast_to(f.reshape(-1), channels).astype(np.float32)
        for f in (transform.scale, transform.offset)
    ]
    struct.scale, struct.offset = (None if f is None else address(f) for f in factors)
    return NativeTransform(core, struct, factors)


def native_unpack(core: Core, transform: RowTransform) -> Unpack | None:
    """Return what does in the core what `RowTransform.apply` does, for packed values; else None.

    The core can if no dimension moves, values have at most one fill value, and its floats hold all
    numbers exactly, as NumPy computes with them.
    """
    decoder = transform.cf
    if decoder is None or len(decoder.forms) != 1:
        return None
    (form,) = decoder.forms
    source = _SOURCES.get(f"{form.stored.kind}{form.stored.itemsize}")
    columns = _columns(form)
    can_do = (
        source is not None
        and form.stored.isnative
        and transform.permutation == tuple(range(len(transform.permutation)))
        and transform.dtype in (_SINGLE, form.dtype)
        and form.dtype in (_SINGLE, _DOUBLE)
    )
    if not can_do or columns is None:
        return None
    given: Columns = columns

    def unpack(
        raw: NDArray[Any], out: NDArray[Any], index: NDArray[np.int64] | None = None
    ) -> None:
        places = decoder.places(index)
        call = core.Unpack(
            rows=len(raw),
            which=None if places is None else address(places),
            count=math.prod(transform.row),
            source=source,
            is_double=form.dtype == _DOUBLE,
            is_wide=transform.dtype == _DOUBLE,
            **{name: address(column) for name, column in given.items()},
        )
        core.unpack(ctypes.byref(call), address(raw), address(out))

    return unpack


def _columns(form: CfForm) -> Columns | None:
    """Return the numbers of each dataset as the core takes them; None if it cannot."""
    given = [form.scale, form.offset, form.low, form.high, *form.fills]
    count = max((column.size for column in given if column is not None), default=1)
    is_exact = all(
        np.can_cast(column.dtype, form.dtype) for column in given[:4] if column is not None
    )
    if len(form.fills) > 1 or not is_exact or not np.can_cast(form.stored, form.dtype):
        return None
    columns = {}
    for name, column, default in zip(
        ("scale", "offset", "low", "high"), given, (1.0, -0.0, -np.inf, np.inf), strict=False
    ):
        columns[name] = np.full(count, default) if column is None else column.astype(np.float64)
    columns["fill"] = np.full(count, np.nan) if not form.fills else _fill(form)
    return columns


def _fill(form: CfForm) -> NDArray[np.float64]:
    """Return fill values as doubles; NaN, which equals nothing, if no value can be one."""
    fills = form.fills[0].astype(np.result_type(form.dtype, form.fills[0])).astype(np.float64)
    with np.errstate(all="ignore"):
        is_held = fills.astype(form.dtype) == fills
    return np.where(is_held, fills, np.nan)
