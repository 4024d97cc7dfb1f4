"""Defines the common base of `Ragged`, `Images` and `Csr`, and their GPU kernels.

Code that moves batches (uploads, slots in shared memory, PyTorch) knows only that a field of a
batch is one array, or `SampleArrays`. Further classes of samples derive from it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from h5async.errors import ConfigError


class NoTensorError(TypeError):
    """Samples for which PyTorch has no tensor."""


class SampleArrays:
    """Samples that several arrays describe together.

    Attributes
    ----------
    num_on_device
        The number of leading arrays on the device of the values; the others stay in host memory.
    """

    __slots__ = ()

    num_on_device: ClassVar[int] = 2

    @property
    def arrays(self) -> tuple[Any, ...]:
        """The arrays: the values first."""
        raise NotImplementedError

    @property
    def sample_shape(self) -> tuple[int | None, ...]:
        """The shape of a sample; None for a dimension that varies between samples."""
        raise NotImplementedError

    @classmethod
    def of_arrays(cls, arrays: Sequence[Any], sample_shape: Sequence[int | None]) -> Self:
        """Return samples made of `arrays`; the parameters match the properties of these names."""
        return cls(*arrays)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the values."""
        dtype: np.dtype[Any] = self.arrays[0].dtype
        return dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays on the device of the values."""
        return sum(int(array.nbytes) for array in memory_of(self))

    def __len__(self) -> int:
        raise NotImplementedError

    def copy(self) -> Self:
        """Return a copy with memory of its own."""
        return self.of_arrays([array.copy() for array in self.arrays], self.sample_shape)

    def get(self) -> Self:
        """Return the samples in host memory, like CuPy's `get`; a copy of those on a GPU."""
        return self.of_arrays(list(map(on_host, self.arrays)), self.sample_shape)

    def _bounds_of(self, key: slice, what: str, remedy: str = "") -> tuple[int, int]:
        """Return the first sample of a slice, and the end; ConfigError if it has a step."""
        begin, end, step = key.indices(len(self))
        if step != 1:
            raise ConfigError(
                f"a slice of {what} cannot have a step, found {step}; take them one by one{remedy}"
            )
        return begin, max(begin, end)

    def to_tensor(self) -> Any:
        """Return a PyTorch tensor that shares the memory.

        Raises
        ------
        NoTensorError
            If there is none for such samples; the message gives the remedy.
        """
        raise NotImplementedError

    def misfit(self) -> str | None:
        """Return why the arrays do not fit together, or None; libraries assume that they do."""
        raise NotImplementedError


def memory_of(field: Any) -> tuple[Any, ...]:
    """Return the arrays of a field of a batch that lie on the device of its values."""
    if isinstance(field, SampleArrays):
        return field.arrays[: field.num_on_device]
    return (field,)


def with_memory(field: Any, arrays: Sequence[Any]) -> Any:
    """Return the same field with other arrays in place of those of `memory_of`."""
    if isinstance(field, SampleArrays):
        return field.of_arrays((*arrays, *field.arrays[field.num_on_device :]), field.sample_shape)
    return arrays[0]


def tensor_of(array: Any, make: Callable[[Any], Any]) -> Any:
    """Return a PyTorch tensor over an array; `make` makes those of NumPy's own dtypes."""
    if array.dtype.name != "bfloat16":
        return make(array)
    import torch

    return make(array.view(np.int16)).view(torch.bfloat16)


def native(array: Any) -> Any:
    """Return an array in this machine's byte order, copied only if necessary."""
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def on_host(array: Any) -> Any:
    """Return an array in host memory, copied only if necessary."""
    return array if isinstance(array, np.ndarray) else array.get()


def offsets_misfit(what: str, name: str, offsets: NDArray[Any], total: int) -> str | None:
    """Return why the offsets of samples do not fit `total` values, or None."""
    if offsets[0] == 0 and offsets[-1] == total and not (offsets[1:] < offsets[:-1]).any():
        return None
    return (
        f"{what} that do not fit together: {name} must begin with 0, rise, and end with the number"
        f" of values, {total}; found {some_of(offsets)}"
    )


def some_of(numbers: NDArray[Any]) -> str:
    """Return the first numbers of an array and the last one, as text."""
    shown = numbers.tolist() if numbers.size <= 8 else [*numbers[:6].tolist(), "...", numbers[-1]]
    return ", ".join(map(str, shown))


# --- on a GPU -------------------------------------------------------------------------------------

# The number of neighbouring threads that make a row; see exact.cu.
_LANES = 256
_FILL_ROW = (
    f"h5async_fill_row<{_LANES}>(i, &data[0], &indices[0], &indptr[0], columns, &dense[0], &bad[0])"
)
_PAD_VALUE = "padded[i] = h5async_pad_value(i, &values[0], &offsets[0], length, inner, &value[0])"
OPTIONS = ("--fmad=false",)


def exact_kernel(cupy: Any, inputs: str, outputs: str, operation: str, name: str) -> Any:
    """Return an elementwise kernel with the results of the host; it may call functions of exact.cu.

    CuPy compiles it on first use, and launches it on the current stream.
    """
    source = Path(__file__).with_name("exact.cu").read_text()
    name = f"h5async_{name}"
    return cupy.ElementwiseKernel(
        inputs, outputs, operation, name, options=OPTIONS, preamble=source
    )


@functools.cache
def _dense_kernel(cupy: Any) -> Any:
    inputs = "raw S data, raw I indices, raw int64 indptr, int64 columns"
    return exact_kernel(cupy, inputs, "raw T dense, raw int32 bad", _FILL_ROW, "dense")


@functools.cache
def _padded_kernel(cupy: Any) -> Any:
    inputs = "raw T values, raw int64 offsets, int64 length, int64 inner, raw T value"
    return exact_kernel(cupy, inputs, "raw T padded", _PAD_VALUE, "padded")


def dense_on_gpu(cupy: Any, data: Any, indices: Any, indptr: Any, out: Any, bad: Any) -> None:
    """Convert sparse rows to dense ones, in `out`: (rows, columns), C-contiguous.

    Arrays are those of sparse rows, with int64 `indptr`. `bad`, int32 (1,), is set to 1 if an
    index is not a column.
    """
    rows, columns = out.shape
    if out.size:
        arrays = data, indices, indptr, columns, out.reshape(-1), bad
        _dense_kernel(cupy)(*arrays, size=rows * _LANES)


def pad_on_gpu(cupy: Any, values: Any, offsets: Any, value: Any, out: Any) -> None:
    """Pad samples to one length, in `out`: (samples, length, ...); longer ones are cut.

    `values` and `out` are C-contiguous, `offsets` int64, and `value` is the padding: (1,), of the
    dtype of the values.
    """
    if out.size:
        samples, length = out.shape[:2]
        inner = out.size // (samples * length)
        arrays = values.reshape(-1), offsets, length, inner, value, out.reshape(-1)
        _padded_kernel(cupy)(*arrays, size=out.size)
