"""Permutes, casts, scales and unpacks rows, on the host.

Stored rows enter; delivered rows leave. `RowTransform` describes the transform, and `transformer`
returns a function for it, which runs in the compiled core without the GIL, or in NumPy if the core
cannot. A GPU does it in one kernel.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from h5async.config import Field
from h5async.core.binding import Core, address, transform_source
from h5async.errors import ConfigError
from h5async.index.hdf5 import DimensionNames, numbered_axis
from h5async.index.layout import DatasetLayout, Text
from h5async.plan.cf import CfDecoder, Unpacking, cf_decoder

_TEXT_BLOCK_NBYTES = 1 << 18  # converted at a time
# Numbers of stored types: enum UnpackSource in core/src/unpack.c.
_SOURCES = {"i1": 1, "u1": 2, "i2": 3, "u2": 4, "i4": 5, "u4": 6, "f4": 7, "f8": 8}
_WITHOUT = {"scale": 1.0, "offset": -0.0, "low": -np.inf, "high": np.inf}  # no-op values
_SINGLE, _DOUBLE = np.dtype(np.float32), np.dtype(np.float64)

# Called with the parameters of `RowTransform.apply`.
Transformer = Callable[[NDArray[Any], NDArray[Any], NDArray[np.int64] | None], None]


@dataclass(frozen=True, slots=True)
class RowTransform:
    """How a batch of one field is converted from its raw form to its delivered form.

    A raw row has the shape `raw_row`, in the file's order without the sample dimension, and the
    dtype `raw_dtype`, in the file's byte order (bools as uint8: any byte except 0 is True). A
    delivered row has the shape `row` and the native dtype `dtype`. `permutation` lists the
    dimensions of a raw batch (sample first) in the order of delivery. `scale` and `offset`
    broadcast over a delivered row; its dimension `channel`, not counting steps, holds the channels.
    `text` lists strings in each element that are converted as by HDF5; `cf` unpacks values by the
    attributes of their datasets.

    `steps` is the number of rows of the dataset in one row here, as its first dimension; None: one,
    without that dimension. For a ragged field, `capacity` rows fit into a slot (None: one per
    sample), and most batches have at most `likely` rows.
    """

    raw_row: tuple[int, ...]
    raw_dtype: np.dtype[Any]
    row: tuple[int, ...]
    dtype: np.dtype[Any]
    permutation: tuple[int, ...]
    scale: NDArray[Any] | None = None
    offset: NDArray[Any] | None = None
    text: tuple[Text, ...] = ()
    cf: CfDecoder | None = None
    channel: int = 0
    steps: int | None = None
    capacity: int | None = None
    likely: int = 0

    def slot_rows(self, samples: int) -> int:
        """Return the number of rows in a slot of `samples`."""
        return samples if self.capacity is None else self.capacity

    @property
    def of_one_row(self) -> RowTransform:
        """The transform of a single row of the dataset."""
        if self.steps is None:
            return self
        return replace(
            self,
            raw_row=self.raw_row[1:],
            row=self.row[1:],
            permutation=tuple(axis - 1 for axis in self.permutation[1:]),
            steps=None,
        )

    @property
    def rows_of_sample(self) -> int:
        """The number of rows of the dataset in one row here."""
        return 1 if self.steps is None else self.steps

    def rows(self, batch: NDArray[Any]) -> NDArray[Any]:
        """Return a view of a batch, raw or delivered, as an array of rows of the dataset."""
        if self.steps is None:
            return batch
        return batch.reshape(batch.shape[0] * self.steps, *batch.shape[2:])

    @property
    def keeps_dimensions(self) -> bool:
        """Whether dimensions stay in their order."""
        return self.permutation == tuple(range(len(self.permutation)))

    @property
    def is_identity(self) -> bool:
        """Whether raw rows are delivered unchanged."""
        return (
            self.raw_dtype == self.dtype
            and self.raw_row == self.row
            and self.keeps_dimensions
            and self.scale is None
            and self.offset is None
            and not self.text
            and self.cf is None
        )

    @property
    def raw_nbytes(self) -> int:
        """Bytes of one raw row."""
        return math.prod(self.raw_row) * self.raw_dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of one delivered row."""
        return math.prod(self.row) * self.dtype.itemsize

    @property
    def channels(self) -> int | None:
        """The number of channels, last in a raw row and first in a delivered one.

        1 if no dimension moves and scale and offset, if any, are single numbers; else None, for
        example for factors that are not per channel.
        """
        rank = len(self.permutation)
        factors = [f for f in (self.scale, self.offset) if f is not None and f.size > 1]
        if rank > 1 and self.permutation == (0, rank - 1, *range(1, rank - 1)):
            are_first = all(f.ndim == rank - 1 and len(f) == f.size for f in factors)
            return self.raw_row[-1] if are_first else None
        return 1 if self.keeps_dimensions and not factors else None

    def apply(
        self, raw: NDArray[Any], out: NDArray[Any], index: NDArray[np.int64] | None = None
    ) -> None:
        """Fill `out` from `raw` on the host, without temporary memory of their size.

        `raw` is (n, *raw_row), and not changed; `out` is (n, *row), C-contiguous, and does not
        overlap `raw`. `index` has the sample numbers, which `cf` needs for several datasets.
        """
        with np.errstate(all="ignore"):  # the caller may cast NaN to an integer
            if self.cf is not None:
                self.cf.decode(raw.transpose(self.permutation), out, index)
            else:
                np.copyto(out, raw.transpose(self.permutation), casting="unsafe")
            self.scale_in_place(out)
        for text in self.text:
            end_strings(text, out)

    def scale_in_place(self, out: NDArray[Any]) -> None:
        """Apply `scale` and `offset` to values of the delivered dtype."""
        if self.scale is not None:
            np.multiply(out, self.scale, out=out)
        if self.offset is not None:
            np.add(out, self.offset, out=out)


def row_transform(field: Field, layout: DatasetLayout) -> RowTransform:
    """Derive the transform of the samples of a field from its options and its dataset.

    Raises
    ------
    ConfigError
        If the field's options do not fit the dataset: too many or too few axes, a scale whose
        length does not match the channels, a cast from complex numbers, strings or compounds.
    DatasetError
        If no dimension, or more than one, has a given name, or attributes for unpacking are
        invalid.
    """
    where = f'{layout.file}: dataset "{layout.path}" of shape {layout.shape}'
    rank = len(layout.shape)
    rest = [axis for axis in range(rank) if axis != layout.sample_axis]
    several = f", in all of its {len(layout.file_samples)} files" if layout.file_samples else ""
    axes = _axes(field, layout.dim_names, rank, where + several)
    if not axes:
        axes = (layout.sample_axis, *rest)
    if axes[0] != layout.sample_axis:
        raise ConfigError(
            f"{where}: axes {field.axes} must begin with the sample dimension"
            f" num_dim={field.num_dim!r}"
        )
    if sorted(axes) != list(range(rank)):
        raise ConfigError(f"{where}: axes {axes} must name each of its {rank} dimensions once")
    raw_axes = [layout.sample_axis, *rest]
    dtype = field.delivered_dtype
    cf = cf_decoder(layout, where) if field.decode_cf else None
    if cf is not None:
        dtype = cf.dtype if dtype is None else dtype
    elif dtype is None:
        dtype = layout.dtype.newbyteorder("=")
    elif layout.dtype.kind not in "biufc" or (layout.dtype.kind == "c" and dtype.kind != "c"):
        option = "scale and offset" if field.dtype is None else "dtype"
        raise ConfigError(f"{where}: {layout.dtype} cannot be cast to {dtype}; leave {option} out")
    at = layout.sample_axis
    shape = *layout.part_shape[:at], layout.num_samples, *layout.part_shape[at:]
    row = tuple(shape[axis] for axis in axes[1:])
    channel = _channel(field, layout, axes, where + several)
    transform = RowTransform(
        raw_row=layout.part_shape,
        raw_dtype=np.dtype(np.uint8) if layout.dtype.kind == "b" else layout.dtype,
        row=row,
        dtype=dtype,
        permutation=tuple(raw_axes.index(axis) for axis in axes),
        scale=factor_of(field.scale, row, dtype, where, channel),
        offset=factor_of(field.offset, row, dtype, where, channel),
        text=layout.text,
        cf=cf,
        channel=channel,
    )
    if field.steps is None:
        return transform
    return replace(
        transform,
        raw_row=(len(field.steps), *transform.raw_row),
        row=(len(field.steps), *row),
        permutation=(0, *(axis + 1 for axis in transform.permutation)),
        steps=len(field.steps),
    )


def _axes(field: Field, names: DimensionNames, rank: int, where: str) -> tuple[int, ...]:
    """Return the dimensions of a layout in the order of delivery; empty for its own order."""
    if not isinstance(field.num_dim, tuple) or field.axes is None:
        return tuple(numbered_axis(axis, names, rank, where) for axis in field.axes or ())
    # The layout joins the two dimensions of samples into one, the first.
    axes = [numbered_axis(axis, names, rank + 1, where) for axis in field.axes]
    rest = [axis for axis in range(rank + 1) if axis not in axes[:2]]
    if sorted(axes[2:]) != rest:
        raise ConfigError(
            f"{where}: axes {field.axes} must name each of its {rank + 1} dimensions once"
        )
    return (0, *(1 + rest.index(axis) for axis in axes[2:]))


def _channel(field: Field, layout: DatasetLayout, axes: tuple[int, ...], where: str) -> int:
    if field.channel_dim is None:
        return 0
    names, rank = layout.dim_names, len(layout.shape)
    if isinstance(field.num_dim, tuple):  # the layout joins them into its first dimension
        numbers = [numbered_axis(axis, names, rank + 1, where) for axis in field.num_dim]
        rest = [axis for axis in range(rank + 1) if axis not in numbers]
        number = numbered_axis(field.channel_dim, names, rank + 1, where)
        axis = 1 + rest.index(number) if number in rest else layout.sample_axis
    else:
        axis = numbered_axis(field.channel_dim, names, rank, where)
    if axis == layout.sample_axis:
        raise ConfigError(
            f"{where}: channel_dim={field.channel_dim!r} counts samples, not channels"
        )
    return axes[1:].index(axis)


def end_strings(text: Text, out: NDArray[Any]) -> None:
    """Pad a string in all elements with NULs after its end, as HDF5 does on reading."""
    elements = out.reshape(-1).view(np.uint8).reshape(-1, out.dtype.itemsize)
    block = max(1, _TEXT_BLOCK_NBYTES // text.nbytes)
    for begin in range(0, len(elements), block):
        string = elements[begin : begin + block, text.offset : text.offset + text.nbytes]
        if text.is_padded:
            is_padding = np.logical_and.accumulate(string[:, ::-1] == ord(" "), axis=1)
            string[is_padding[:, ::-1]] = 0
        else:
            string *= np.logical_and.accumulate(string, axis=1)


def factor_of(
    value: float | tuple[float, ...] | None,
    row: tuple[int, ...],
    dtype: np.dtype[Any],
    where: str,
    channel: int = 0,
) -> NDArray[Any] | None:
    """Return a scale or an offset as an array that broadcasts over rows.

    Raises `ConfigError` unless it has one value, or one per channel or per element of a row.
    """
    if value is None:
        return None
    found = np.asarray(value, dtype)
    if found.ndim and row and found.size in (1, row[channel]):
        return found.reshape(-1, *(1,) * (len(row) - 1 - channel))
    if found.ndim and (not row or found.size != math.prod(row)):
        raise ConfigError(
            f"{where}: {found.size} values of scale or offset for rows of shape {row}, whose"
            f" channels are dimension {channel}; give one number, one for each channel (channel_dim"
            " says where they are), or one for each element; statistics (normalize) must be of the"
            " same region and crop, or of per=None"
        )
    return found.reshape(row) if found.ndim else found


# --- in the core ----------------------------------------------------------------------------------


def transformer(core: Core | None, transform: RowTransform) -> Transformer:
    """Return a function that transforms rows, in the compiled core or else in NumPy."""
    if core is None:
        return transform.apply
    return native_transform(core, transform) or native_unpack(core, transform) or transform.apply


@dataclass(frozen=True, eq=False)
class NativeTransform:
    """Does the work of `RowTransform.apply` in the core. Thread-safe.

    `struct` lacks only the number of samples, and points to `factors`: scale and offset as float32.
    """

    core: Core
    struct: Any
    factors: list[NDArray[np.float32] | None]

    def __call__(self, raw: NDArray[Any], out: NDArray[Any], _: Any = None) -> None:
        """Fill `out` from `raw`."""
        call = type(self.struct).from_buffer_copy(self.struct)
        call.samples = len(raw)
        self.core.transform(ctypes.byref(call), address(raw), address(out))


def native_transform(core: Core, transform: RowTransform) -> NativeTransform | None:
    """Return a function that does a transform in the core, or None if the core cannot.

    It can if no dimension moves, or only the last one of a sample moves to the front, as channels
    of images do; to the same dtype, or to float32.
    """
    channels = transform.channels
    is_scaled = transform.scale is not None or transform.offset is not None
    source = transform_source(transform.raw_dtype, transform.dtype, is_scaled)
    if transform.cf is not None or source is None or not channels or not transform.nbytes:
        return None
    factors = [
        None if f is None else np.broadcast_to(f.reshape(-1), channels).astype(np.float32)
        for f in (transform.scale, transform.offset)
    ]
    struct = core.Transform(
        points=math.prod(transform.row) // channels,
        channels=channels,
        source=source,
        is_float=source > 8,
    )
    struct.scale, struct.offset = (None if f is None else address(f) for f in factors)
    return NativeTransform(core, struct, factors)


def native_unpack(core: Core, transform: RowTransform) -> Transformer | None:
    """Return a function that transforms packed values in the core; None if the core cannot.

    It can if no dimension moves, values have at most one fill value, and the float dtype holds all
    stored values and attributes exactly, so that results equal NumPy's.
    """
    decoder = transform.cf
    if decoder is None or len({one.form for one in decoder.several}) > 1:
        return None
    several = decoder.several
    form = several[0]
    source = _SOURCES.get(f"{form.stored.kind}{form.stored.itemsize}")
    numbers = [getattr(form, name) for name in _WITHOUT]
    dtypes = [form.stored, *(number.dtype for number in numbers if number is not None)]
    if (
        source is None
        or not form.stored.isnative
        or not transform.keeps_dimensions
        or transform.dtype not in (_SINGLE, form.dtype)
        or form.dtype not in (_SINGLE, _DOUBLE)
        or len(form.fills) > 1
        or not all(np.can_cast(dtype, form.dtype) for dtype in dtypes)
    ):
        return None
    columns = {"fill": _fills(several)}
    for (name, default), number in zip(_WITHOUT.items(), numbers, strict=True):
        given = [default if number is None else getattr(one, name) for one in several]
        columns[name] = np.array(given, np.float64)

    def unpack(
        raw: NDArray[Any], out: NDArray[Any], index: NDArray[np.int64] | None = None
    ) -> None:
        numbers = decoder.numbers(index)
        call = core.Unpack(
            rows=len(raw),
            which=None if numbers is None else address(numbers),
            count=math.prod(transform.row),
            source=source,
            is_double=form.dtype == _DOUBLE,
            is_wide=transform.dtype == _DOUBLE,
            **{name: address(column) for name, column in columns.items()},
        )
        core.unpack(ctypes.byref(call), address(raw), address(out))
        transform.scale_in_place(out)

    return unpack


def _fills(several: Sequence[Unpacking]) -> NDArray[np.float64]:
    """Return fill values as doubles; NaN, which equals nothing, if no value can equal them."""
    dtype = several[0].dtype
    given = np.array([one.fills[0] if one.fills else np.nan for one in several])
    fills = given.astype(np.result_type(dtype, given)).astype(np.float64)
    with np.errstate(all="ignore"):
        return np.where(fills.astype(dtype) == fills, fills, np.nan)
