"""Defines `Ragged` and `Images`: samples that differ in size, as one array of values."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from h5async.errors import ConfigError, ReadError, needs_package
from h5async.samples.samplearrays import (
    NoTensorError,
    SampleArrays,
    native,
    offsets_misfit,
    on_host,
    pad_on_gpu,
    some_of,
    tensor_of,
)
from h5async.spelling import counted, size_text, table

_PREVIEWED, _LONGEST = 5, 24  # values, and characters of one, in a notebook


class Ragged(SampleArrays):
    """Samples of differing lengths.

    Samples of a batch share its memory and live as long as it does; `copy` gives samples that last.
    They may be read from many threads.

    Parameters
    ----------
    values, offsets
        As the attributes.

    Attributes
    ----------
    values
        (total, ...): the values of all samples, concatenated. A NumPy or CuPy array.
    offsets
        int64 (samples + 1,): sample i is ``values[offsets[i] : offsets[i + 1]]``; the first one is
        0. Of the same kind as `values`.

    Raises
    ------
    ConfigError
        If `values` or `offsets` have other dimensions or dtypes. Not checked: that the offsets are
        non-decreasing and end at the number of values.

    Examples
    --------
    >>> values, offsets = np.array([3, 1, 4, 1, 5, 9]), np.array([0, 3, 3, 6])
    >>> samples = Ragged(values, offsets)
    >>> samples[0], samples.lengths, len(samples)
    (array([3, 1, 4]), array([3, 0, 3]), 3)
    >>> samples[1:]
    <Ragged: 2 samples, 3 values of int64>
    """

    __slots__ = ("offsets", "values")

    def __init__(self, values: Any, offsets: Any) -> None:
        if values.ndim < 1 or offsets.ndim != 1 or not offsets.size or offsets.dtype != np.int64:
            raise ConfigError(
                "ragged samples are made of values of one dimension or more, and int64 offsets"
                " (samples + 1,);"
                f" found values {values.shape} and {offsets.dtype} offsets {offsets.shape}"
            )
        self.values = values
        self.offsets = offsets

    @property
    def lengths(self) -> Any:
        """int64 (samples,): the number of values per sample; a new array."""
        return self.offsets[1:] - self.offsets[:-1]

    def __len__(self) -> int:
        """Return the number of samples."""
        return int(self.offsets.shape[0]) - 1

    def __getitem__(self, key: Any) -> Any:
        """Return views: an array for one sample, or a `Ragged` for a slice.

        Raises
        ------
        IndexError
            If there is no such sample.
        ConfigError
            If the slice has a step.
        """
        if isinstance(key, slice):
            begin, end = self._bounds_of(key, "ragged samples")
            offsets = self.offsets[begin : end + 1]
            first, last = int(offsets[0]), int(offsets[-1])
            return Ragged(self.values[first:last], offsets - first)
        number = range(len(self))[key]
        return self.values[int(self.offsets[number]) : int(self.offsets[number + 1])]

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the samples, as views."""
        for begin, end in itertools.pairwise(on_host(self.offsets).tolist()):
            yield self.values[begin:end]

    def __repr__(self) -> str:
        total, *inner = self.values.shape
        each = f"{tuple(inner)} " if inner else ""
        samples, values = counted(len(self), "sample"), counted(total, "value")
        return f"<Ragged: {samples}, {values} of {each}{self.dtype}>"

    def _repr_html_(self) -> str:
        """Show a small table in a notebook. Nothing is copied from a GPU."""
        rows = [["dtype", str(self.dtype)], ["values", f"{self.values.shape[0]:,}"]]
        if isinstance(self.offsets, np.ndarray) and len(self):
            lengths = self.lengths
            spread = f"{lengths.min():,} to {lengths.max():,}, {lengths.mean():,.4g} on average"
            rows.append(["lengths", spread])
        rows += [["size", size_text(self.nbytes)], ["first sample", preview(self)]]
        return table(type(self).__name__, rows, subtitle=counted(len(self), "sample"))

    @property
    def arrays(self) -> tuple[Any, ...]:
        """`values` and `offsets`."""
        return self.values, self.offsets

    @property
    def sample_shape(self) -> tuple[int | None, ...]:
        """The shape of a sample; None for the dimension that differs."""
        return None, *self.values.shape[1:]

    def misfit(self) -> str | None:
        """Return why the arrays do not fit together, or None."""
        return offsets_misfit("ragged samples", "offsets", self.offsets, len(self.values))

    def to_tensor(self) -> Any:
        """Return a nested tensor, as `to_torch_nested` does."""
        return self.to_torch_nested()

    def to_padded(self, value: Any = 0, length: int | None = None) -> tuple[Any, Any]:
        """Copy the samples into one array, padded to one length; on the GPU if they are there.

        Parameters
        ----------
        value
            The padding after the values of a sample.
        length
            The padded length; longer samples are cut. None means the length of the longest sample.

        Returns
        -------
        array
            (samples, length, ...) of the dtype of the values.
        mask
            bool (samples, length): True for values of the sample, False for padding.

        Raises
        ------
        ConfigError
            If the length is below 0.

        Examples
        --------
        >>> samples = Ragged(np.array([3, 1, 4, 1, 5, 9]), np.array([0, 3, 3, 6]))
        >>> array, mask = samples.to_padded(value=-1)
        >>> array
        array([[ 3,  1,  4],
               [-1, -1, -1],
               [ 1,  5,  9]])
        >>> mask.sum(axis=1)
        array([3, 0, 3])
        """
        ends = on_host(self.offsets)
        longest = int(np.diff(ends).max()) if len(self) else 0
        length = longest if length is None else length
        if length < 0:
            raise ConfigError(f"length={length}: samples are padded to a length of 0 or more")
        shape = len(self), length, *self.values.shape[1:]
        if isinstance(self.values, np.ndarray):
            array = np.full(shape, value, self.dtype)
            return array, put_padded(self.values, self.offsets, array)
        with needs_package("cupy-cuda13x", "arrays on a GPU"):
            import cupy
        array = cupy.empty(shape, self.dtype)
        values = cupy.ascontiguousarray(self.values)
        pad_on_gpu(cupy, values, self.offsets, cupy.full(1, value, self.dtype), array)
        return array, cupy.arange(length) < self.lengths[:, None]

    def to_torch_nested(self) -> Any:
        """Return a nested tensor of layout ``torch.jagged`` that shares the memory.

        Values in another byte order than this machine's are copied.

        Raises
        ------
        MissingPackageError
            If PyTorch is not installed.
        """
        with needs_package("torch", "nested tensors"):
            import torch
        make = torch.from_numpy if isinstance(self.values, np.ndarray) else torch.from_dlpack
        values = tensor_of(native(self.values), make)
        return torch.nested.nested_tensor_from_jagged(values, make(self.offsets))

    def to_awkward(self) -> Any:
        """Return an Awkward Array that shares the memory.

        Values in another byte order than this machine's, or on a GPU, are copied.

        Raises
        ------
        MissingPackageError
            If awkward is not installed.
        """
        with needs_package("awkward", "Awkward Arrays"):
            import awkward
        values = awkward.contents.NumpyArray(native(on_host(self.values)))
        offsets = awkward.index.Index64(on_host(self.offsets))
        return awkward.Array(awkward.contents.ListOffsetArray(offsets, values))

    def to_strings(self) -> list[str]:
        """Return samples of UTF-8 bytes as strings.

        Raises
        ------
        ConfigError
            If the values are not bytes (uint8, one dimension).
        ReadError
            If a sample is not valid UTF-8; the message says which one.

        Examples
        --------
        >>> text = np.frombuffer("oneforty-two".encode(), np.uint8)
        >>> Ragged(text, np.array([0, 3, 12])).to_strings()
        ['one', 'forty-two']
        """
        if self.dtype != np.uint8 or self.values.ndim != 1:
            raise ConfigError(
                f"strings are made of UTF-8 bytes, and the values are {self.dtype} of shape"
                f" {self.values.shape}"
            )
        data, ends = on_host(self.values).tobytes(), on_host(self.offsets).tolist()
        found = []
        for number, (begin, end) in enumerate(itertools.pairwise(ends)):
            try:
                found.append(data[begin:end].decode())
            except UnicodeDecodeError as error:
                raise ReadError(
                    f"sample {number} of {len(self)} is not UTF-8: byte"
                    f" 0x{data[begin + error.start]:02x} at its position {error.start}"
                    f" ({error.reason}); use its bytes, [{number}]"
                ) from error
        return found


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
        """Return views: an array for one image, or `Images` for a slice; raises like `Ragged`."""
        found = super().__getitem__(key)
        if isinstance(key, slice):
            return Images(found.values, found.offsets, self.shapes[key][: len(found)])
        return found.reshape(self.shapes[key].tolist())

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the images, as views."""
        for values, shape in zip(super().__iter__(), self.shapes.tolist(), strict=True):
            yield values.reshape(shape)

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
            "images of differing sizes cannot be a tensor; give the field a size, or take Images"
            " from an AsyncReader"
        )


def preview(samples: Any) -> str:
    """Return the first values of the first sample as text; "" for samples on a GPU."""
    held = getattr(samples, "values", getattr(samples, "data", samples))
    if not isinstance(samples, np.ndarray) and not isinstance(held, np.ndarray):
        return ""
    if getattr(samples, "shape", (1,)) == () or not len(samples):  # postprocess may return that
        return ""
    first = samples[0]
    if isinstance(first, tuple):  # a sparse row: columns and values
        pairs = zip(first[0][:_PREVIEWED].tolist(), first[1][:_PREVIEWED].tolist(), strict=True)
        shown, size = [f"{column}: {_short(value)}" for column, value in pairs], first[0].size
    else:
        values = np.asarray(first)
        size = values.size
        shown = [_short(value) for value in values.flat[:_PREVIEWED].tolist()]
    return ", ".join(shown) + (", …" if size > _PREVIEWED else "")


def _short(value: object) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def put_padded(
    values: NDArray[Any], offsets: NDArray[np.int64], out: NDArray[Any]
) -> NDArray[np.bool_]:
    """Copy samples in host memory into rows of one length, cut if longer; padding is not written.

    `out` is (samples, length, ...). Returns a mask, bool (samples, length): True for values of the
    sample.
    """
    lengths, length = np.diff(offsets), out.shape[1]
    mask: NDArray[np.bool_] = np.arange(length) < lengths[:, None]
    if lengths.max(initial=0) <= length:
        out[mask] = values
    else:
        out[mask] = values[(offsets[:-1, None] + np.arange(length))[mask]]
    return mask
