"""Converts sparse rows to dense ones, and pads ragged samples, on a GPU.

CuPy compiles the CUDA kernels on first use, and launches them on the current stream. CuPy is a
parameter. No thread waits for another one, and no two write to one value: sums are added up in the
order of the file, as on the host, and are reproducible.
"""

from __future__ import annotations

import functools
from typing import Any

# The results are those of the host, bit for bit (except NaN payloads): no fused multiply-add, and
# subnormal numbers are preserved, although CuPy compiles with -ftz=true. Tests run this code on a
# CPU, without PTX.
OPTIONS = ("--fmad=false",)
EXACT = """
template <class T, class S>
static __device__ inline T h5async_to(const S &value) { return T(value); }
template <class T>
static __device__ inline T h5async_mul(const T &a, const T &b) { return T(a * b); }
template <class T>
static __device__ inline T h5async_add(const T &a, const T &b) { return T(a + b); }
#ifdef __CUDA_ARCH__
template <>
__device__ inline float h5async_to<float, double>(const double &value)
{
    float result;
    asm("cvt.rn.f32.f64 %0, %1;" : "=f"(result) : "d"(value));
    return result;
}
template <>
__device__ inline double h5async_to<double, float>(const float &value)
{
    double result;
    asm("cvt.f64.f32 %0, %1;" : "=d"(result) : "f"(value));
    return result;
}
template <>
__device__ inline float h5async_mul<float>(const float &a, const float &b)
{
    float result;
    asm("mul.rn.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    return result;
}
template <>
__device__ inline float h5async_add<float>(const float &a, const float &b)
{
    float result;
    asm("add.rn.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    return result;
}
#endif
"""

# The number of neighbouring threads that make a row. Each owns every `_LANES`-th column: it clears
# them, and searches all indices of the row for them. (So all threads of a warp read the same index,
# which costs one read, and neighbours clear neighbouring values.)
_LANES = 256  # a power of two
_DENSE = f"""
const long long row = i / {_LANES}, lane = i % {_LANES};
const long long from = indptr[row], to = indptr[row + 1];
T *values = &dense[row * columns];
for (long long column = lane; column < columns; column += {_LANES})
    values[column] = T(0);
for (long long at = from; at < to; ++at) {{
    const long long column = indices[at];
    if (column < 0 || column >= columns)
        bad[0] = 1;
    else if ((column & {_LANES - 1}) == lane)
        values[column] = h5async_add<T>(values[column], h5async_to<T>(data[at]));
}}
"""

# A thread makes one value of one sample; `inner` of them are one value of the file.
_PADDED = """
const long long sample = i / (length * inner), rest = i - sample * (length * inner);
const long long from = offsets[sample] * inner, to = offsets[sample + 1] * inner;
padded[i] = rest < to - from ? values[from + rest] : value[0];
"""


class SampleKernels:
    """The kernels, made with the module `cupy`. Thread-safe."""

    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy
        self._dense = cupy.ElementwiseKernel(
            "raw S data, raw I indices, raw int64 indptr, int64 columns",
            "raw T dense, raw int32 bad",
            _DENSE,
            "h5async_dense",
            options=OPTIONS,
            preamble=EXACT,
        )
        self._padded = cupy.ElementwiseKernel(
            "raw T values, raw int64 offsets, int64 length, int64 inner, raw T value",
            "raw T padded",
            _PADDED,
            "h5async_padded",
            options=OPTIONS,
        )

    def dense(self, data: Any, indices: Any, indptr: Any, out: Any, bad: Any) -> None:
        """Convert sparse rows to dense ones, in `out`: (rows, columns), C-contiguous.

        Arrays are those of sparse rows, with int64 `indptr`. `bad`, int32 (1,), is set to 1 if an
        index is not a column.
        """
        rows, columns = out.shape
        if out.size:
            arrays = data, indices, indptr, columns
            self._dense(*arrays, out.reshape(-1), bad, size=rows * _LANES)

    def padded(self, values: Any, offsets: Any, value: Any, out: Any) -> None:
        """Pad samples to one length, in `out`: (samples, length, ...); longer ones are cut.

        `values` and `out` are C-contiguous, `offsets` int64, and `value` is the padding: (1,), of
        the dtype of the values.
        """
        if out.size:
            samples, length = out.shape[:2]
            inner = out.size // (samples * length)
            flat = values.reshape(-1), offsets, length, inner, value
            self._padded(*flat, out.reshape(-1), size=out.size)


@functools.cache
def sample_kernels(cupy: Any) -> SampleKernels:
    """Return the kernels for the module CuPy, made once."""
    return SampleKernels(cupy)
