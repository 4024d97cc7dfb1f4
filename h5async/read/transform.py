"""Transforms rows in the compiled core: permutes, casts and scales them without the GIL.

A `RowTransform` enters; its equivalent in the core leaves, or None if the core cannot do it.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from h5async.core.binding import Core, address
from h5async.core.structures import TransformStruct, transform_source
from h5async.plan.transform import RowTransform


class NativeTransform:
    """Does in the core what `RowTransform.apply` does. Safe to use from many threads.

    `struct` is complete except the number of samples, and points to `factors`, scale and offset as
    float32.
    """

    def __init__(
        self, core: Core, struct: TransformStruct, factors: list[NDArray[np.float32] | None]
    ) -> None:
        self._core = core
        self._factors = factors
        self.struct = struct

    def __call__(self, raw: NDArray[Any], out: NDArray[Any], _: Any = None) -> None:
        """Fill `out` from `raw`."""
        call = TransformStruct.from_buffer_copy(self.struct)
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
    struct = TransformStruct(
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
