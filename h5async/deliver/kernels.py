"""Moves, unshuffles, permutes, casts and scales arrays on the GPU.

CUDA kernels, compiled by CuPy on first use, and launched on the current stream.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from h5async.deliver.gpu import Gpu
from h5async.plan.transform import RowTransform
from h5async.samples.samplearrays import exact_kernel

# Per sample; with more, neighbouring threads read too far apart.
_MAX_PLANES = 16

# A thread takes one point of one sample, and all its channels: it reads neighbouring bytes, and
# neighbouring threads write neighbouring values of each plane.
_PLANES_PARAMETERS = "raw S stored, raw int64 index, int64 points, int32 channels"
_PLANES = """
const long long sample = i / points, at = i - sample * points;
const long long begin = (index[sample] * points + at) * channels;
for (int c = 0; c < channels; ++c)
    delivered[(sample * channels + c) * points + at] = {value};
"""
_STORED = "h5async_to<T>(stored[begin + c])"

# Of kernels.cu.
_FUNCTIONS = ("copy_rows", "copy", "unshuffle", "bitunshuffle", "place", "adler32", "verify")
_THREADS = 256  # per block
_MAX_BLOCKS = 64  # per piece
_MAX_GRID_Y = 65535


class RowChange(NamedTuple):
    """Does a transform on the device, with exactly the result of `RowTransform.apply`.

    ``change(raw, index, out)`` fills (n, *row) from (n, *raw_row), both C-contiguous; `index`,
    int64 (n,), is 0 to n - 1. If it `gathers`, `raw` may have other rows, from which `index`
    selects.
    """

    change: Callable[[Any, Any, Any], None]
    gathers: bool


class Kernels:
    """The kernels of one GPU. Thread-safe."""

    def __init__(self, gpu: Gpu) -> None:
        cupy = self._cupy = gpu.cupy
        self._on_device = gpu.on_device
        source = Path(__file__).with_name("kernels.cu").read_text()
        module = cupy.RawModule(code=source, options=("-std=c++17",))
        self._function = functools.cache(module.get_function)
        kernel = partial(exact_kernel, cupy)
        parameters = f"{_PLANES_PARAMETERS}, raw T scale, raw T offset"
        scaled = _scaled(_STORED, "scale[c]", "offset[c]")
        delivered = "raw T delivered"
        self._move = kernel(_PLANES_PARAMETERS, delivered, _PLANES.format(value=_STORED), "planes")
        self._move_scaled = kernel(
            parameters, delivered, _PLANES.format(value=scaled), "planes_scaled"
        )
        scaled = _scaled("h5async_to<T>(stored)", "scale", "offset")
        parameters = "S stored, T scale, T offset"
        self._scale = kernel(parameters, "T delivered", f"delivered = {scaled}", "scale")
        cast = "delivered = h5async_to<T>(stored)"
        self._cast = kernel("S stored", "T delivered", cast, "cast")

    def row_change(self, transform: RowTransform) -> RowChange:
        """Return what does a transform of rows on the device, in one kernel."""
        channels = transform.channels
        is_scaled = transform.scale is not None or transform.offset is not None
        factors = _factors(transform) if is_scaled else ()
        # C casts these stored types to the delivered ones as CuPy and NumPy do.
        is_plain = all(
            dtype.kind in "iuf" and dtype != np.float16
            for dtype in (transform.raw_dtype, transform.dtype)
        )
        if not channels or channels > _MAX_PLANES or not is_plain:
            # At least 1-dimensional: CuPy turns a 0-dimensional -0.0 into 0.0.
            whole = tuple(self._on_device(np.atleast_1d(factor)) for factor in factors)
            return RowChange(partial(self._change, transform.permutation, whole), False)
        each = tuple(
            self._on_device(np.broadcast_to(factor.reshape(-1), channels)) for factor in factors
        )
        return RowChange(partial(self._change_planes, channels, each), True)

    def copy_rows(self, rows: Any, index: Any, out: Any, *, scatters: bool) -> None:
        """Copy rows number `index` to all rows of `out`, or, if it `scatters`, all to these."""
        count, row_nbytes = index.size, (rows.nbytes // len(rows) if len(rows) else 0)
        if row_nbytes:
            arrays = rows.view(np.uint8), out.view(np.uint8), index
            sizes = np.int64(count), np.int64(row_nbytes), np.int32(scatters)
            self.launch("copy_rows", row_nbytes, count, *arrays, *sizes)

    def launch(self, name: str, nbytes: int, count: int, *arguments: Any) -> None:
        """Launch a kernel of kernels.cu, which explains the arguments: arrays, and NumPy's numbers.

        It has `count` pieces of work, of about `nbytes` each; at 0, nothing is launched.
        """
        if count:
            blocks = max(1, min(_MAX_BLOCKS, -(-nbytes // (16 * _THREADS))))
            function = self._function(f"h5async_{name}")
            function((blocks, min(count, _MAX_GRID_Y)), (_THREADS,), arguments)

    def load(self) -> None:
        """Compile the kernels that move bytes now, rather than on first use."""
        for name in _FUNCTIONS:
            self._function(f"h5async_{name}")

    def _change(
        self, permutation: tuple[int, ...], factors: tuple[Any, ...], raw: Any, _: Any, out: Any
    ) -> None:
        permuted = raw.transpose(permutation)
        if factors:
            self._scale(permuted, *factors, out)
        elif raw.dtype == out.dtype:
            self._cupy.copyto(out, permuted)
        else:
            self._cast(permuted, out)

    def _change_planes(
        self, channels: int, factors: tuple[Any, ...], raw: Any, index: Any, out: Any
    ) -> None:
        points = out.size // max(1, channels * len(out))
        if points:
            kernel = self._move_scaled if factors else self._move
            arguments = raw.reshape(-1), index, points, channels, *factors, out.reshape(-1)
            kernel(*arguments, size=len(out) * points)


def _scaled(stored: str, scale: str, offset: str) -> str:
    return f"h5async_add<T>(h5async_mul<T>({stored}, {scale}), {offset})"


def _factors(transform: RowTransform) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return scale and offset; -0.0 adds nothing."""
    scale = transform.scale if transform.scale is not None else np.ones((), transform.dtype)
    offset = transform.offset if transform.offset is not None else -np.zeros((), transform.dtype)
    return scale, offset


def can_transform(transform: RowTransform) -> bool:
    """Tell whether a GPU transforms rows with exactly the host's result.

    It has no foreign byte order, casts values out of an integer's range to other integers, and
    rounds twice on the way to float16 values that float32 does not hold exactly. Complex numbers
    were not examined.
    """
    raw, dtype = transform.raw_dtype, transform.dtype
    if transform.is_identity:
        return True
    if transform.text or transform.cf is not None:
        return False
    if raw == dtype or (raw == np.uint8 and dtype == np.bool_):
        return raw.isnative
    if dtype == np.float16:
        return raw.isnative and raw.kind != "c" and (raw.itemsize <= 2 or raw == np.float32)
    kinds = "biuf" if dtype.kind == "f" else "biu"
    return raw.isnative and dtype.kind != "c" and raw.kind in kinds
