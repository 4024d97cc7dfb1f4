"""Unpacks values by the CF conventions: scale, offset, and NaN for missing values.

The attributes of datasets enter; a `CfDecoder` leaves, which unpacks stored values on the host. The
result is, bit for bit, that of xarray (``mask_and_scale=True``): the rules for dtypes, and the
order in which it casts, masks, scales and adds, are xarray's. Values outside `valid_range`, which
xarray ignores, are masked as in netCDF4.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from h5async.errors import ConfigError, DatasetError
from h5async.index.layout import CfAttribute, DatasetLayout

_BLOCK_ELEMENTS = 1 << 15  # unpacked at a time: they stay in the second-level cache

Values = Mapping[str, NDArray[Any]]  # of attributes, 1-dimensional, by name
DType = np.dtype[Any]


class Unpacking(NamedTuple):
    """How the values of one dataset are unpacked. Scalars are of the types of the attributes.

    Attributes
    ----------
    stored
        The dtype as which stored values are interpreted: `_Unsigned` may change the sign.
    dtype
        The dtype of the computation; native.
    scale, offset
        Factor, and the offset added then; None if there is none.
    low, high
        Limits of valid values, of dtype `stored`; None if there is none.
    fills
        Values after the cast to `dtype` that stand for missing ones.
    """

    stored: DType
    dtype: DType
    scale: np.generic | None
    offset: np.generic | None
    low: np.generic | None
    high: np.generic | None
    fills: tuple[np.generic, ...]

    def is_identity(self, raw: DType) -> bool:
        """Tell whether values of a dtype are unchanged, except their byte order."""
        is_kept = self[2:] == (None, None, None, None, ())
        return is_kept and raw.newbyteorder("=") == self.stored.newbyteorder("=") == self.dtype

    @property
    def form(self) -> tuple[object, ...]:
        """A key that datasets share if only their numbers differ."""
        numbers = (self.scale, self.offset, self.low, self.high, *self.fills)
        kinds = (None if number is None else number.dtype for number in numbers)
        return self.stored, self.dtype, *kinds


def unpacking(attributes: Sequence[CfAttribute], raw: DType, where: str) -> Unpacking:
    """Return how values of a dtype are unpacked by its attributes.

    `DatasetError` is raised if `scale_factor` or `add_offset` is not one number.
    """
    values = {
        one.name: np.frombuffer(one.data, one.dtype).astype(np.dtype(one.dtype).newbyteorder("="))
        for one in attributes
        if one.dtype
    }
    for one in attributes:
        if one.name in ("scale_factor", "add_offset") and len(values.get(one.name, ())) != 1:
            raise DatasetError(
                f"{where}: its attribute {one.name} must be one number, found {shown_value(one)};"
                " leave out decode_cf, and scale the values yourself"
            )
    sign = next((one.data for one in attributes if one.name == "_Unsigned"), b"")
    stored = _with_sign(raw, sign.decode(errors="replace").strip("\0").lower())
    scale, offset = (_scalar(values.get(name)) for name in ("scale_factor", "add_offset"))
    fills, has_fill = _fill_values(values, raw, stored)
    low, high = _limits(values, raw, stored)
    dtype = stored
    if scale is not None or offset is not None:
        # As in xarray, a fill value of NaN keeps floats in their own dtype.
        dtype = stored if has_fill and not fills else _packed_dtype(stored, scale, offset)
    elif fills or low is not None or high is not None:
        dtype = _dtype_with_nan(stored)
    dtype = dtype.newbyteorder("=")
    # In xarray, a value of the other sign is a weak Python number.
    fills = [dtype.type(fill) if isinstance(fill, int) else fill for fill in fills]
    return Unpacking(stored, dtype, scale, offset, low, high, tuple(fills))


def shown_value(attribute: CfAttribute) -> str:
    """Return the value of an attribute as text."""
    if not attribute.dtype:
        return repr(attribute.data.decode(errors="replace"))
    numbers = [str(number) for number in np.frombuffer(attribute.data, attribute.dtype)]
    return numbers[0] if len(numbers) == 1 else f"[{', '.join(numbers)}]"


def _with_sign(raw: DType, sign: str) -> DType:
    kind = {("i", "true"): "u", ("u", "false"): "i"}.get((raw.kind, sign))
    return raw if kind is None else np.dtype(f"{raw.byteorder}{kind}{raw.itemsize}")


def _scalar(values: NDArray[Any] | None) -> Any:
    """Return a number with its effective type: integers become float64."""
    if values is None:
        return None
    return values[0] if values.dtype in (np.float32, np.float64) else np.float64(values[0])


def _packed_dtype(stored: DType, scale: Any, offset: Any) -> DType:
    """Return the dtype of packed values: that of the attributes, if this loses nothing."""
    double, own = np.dtype(np.float64), np.dtype(type(offset if scale is None else scale))
    if offset is None:
        return own
    is_wide = stored.kind in "iu" and stored.itemsize == 4
    return double if scale is None or is_wide or own != offset.dtype else own


def _dtype_with_nan(stored: DType) -> DType:
    """Return a dtype that has NaN beside all values, if there is one."""
    is_small = stored.itemsize <= 2
    return stored if stored.kind == "f" else np.dtype(np.float32 if is_small else np.float64)


def _fill_values(values: Values, raw: DType, stored: DType) -> tuple[list[Any], bool]:
    """Return the values that stand for missing ones, and whether an attribute has any, or NaN."""
    found: dict[Any, Any] = {}
    has_fill = False
    for name in ("missing_value", "_FillValue"):
        if name not in values:
            continue
        several = [value for value in values[name] if not np.isnan(value)]
        has_fill |= bool(several) or raw.kind == "f"
        for value in several:
            fill = _with_sign_of(value, raw, stored)
            found.setdefault(fill, fill)
    return list(found), has_fill


def _with_sign_of(value: np.generic, raw: DType, stored: DType) -> Any:
    """Return a fill value with the sign that `_Unsigned` gives to values."""
    if raw == stored:
        return value
    integer = int(value.item()) if float(value.item()).is_integer() else None
    bits = 8 * raw.itemsize
    if integer is None or not -(1 << (bits - 1)) <= integer < 1 << bits:
        return value
    if stored.kind == "u":
        return integer % (1 << bits)
    half = 1 << (bits - 1)
    return stored.newbyteorder("=").type((integer + half) % (1 << bits) - half)


def _limits(values: Values, raw: DType, stored: DType) -> tuple[Any, Any]:
    """Return the least and the largest valid value; a limit counts only if the dtype can hold it.

    They are compared with values as stored.
    """
    several = values.get("valid_range")
    if several is not None and several.size == 2 and _fits(several, raw):
        pair: tuple[Any, Any] = several[:1], several[1:]
    else:
        pair = tuple(  # type: ignore[assignment]
            found if found is not None and found.size == 1 and _fits(found, raw) else None
            for found in (values.get("valid_min"), values.get("valid_max"))
        )
    native = raw.newbyteorder("="), stored.newbyteorder("=")
    limits = [None if one is None else one.astype(native[0]).view(native[1])[0] for one in pair]
    # NaN is no limit.
    low, high = (None if limit is None or np.isnan(limit) else limit for limit in limits)
    return low, high


def _fits(values: NDArray[Any], raw: DType) -> bool:
    """Tell whether a dtype holds some values exactly."""
    with np.errstate(all="ignore"):
        cast = values.astype(raw.newbyteorder("="))
    return bool(((cast == values) | (np.isnan(values) & (raw.kind == "f"))).all())


class CfForm:
    """Unpacks values of datasets that differ only in their numbers, which each row has of its own.

    Attributes are those of `Unpacking`, with one number per dataset.
    """

    def __init__(self, several: Sequence[Unpacking]) -> None:
        first = several[0]
        self.stored, self.dtype = first.stored, first.dtype
        self._is_one = len(several) == 1
        columns = [
            None if first[at] is None else np.array([one[at] for one in several])
            for at in range(2, 6)
        ]
        self.scale, self.offset, self.low, self.high = columns
        self.fills = [
            np.array([one.fills[at] for one in several]) for at in range(len(first.fills))
        ]

    def decode(self, raw: NDArray[Any], out: NDArray[Any], which: NDArray[np.int64] | None) -> None:
        """Fill `out` with the values of `raw`, of the same shape.

        `which` has the number of the dataset of each row; None if there is only one.
        """
        stored = raw.view(self.stored)
        for block in _blocks(out.shape):
            numbers = None if which is None or self._is_one else which[block[0]]
            self._decode_block(stored[block], out[block], numbers)

    def _decode_block(self, stored: NDArray[Any], out: NDArray[Any], numbers: Any) -> None:
        def of_rows(column: NDArray[Any]) -> Any:
            if numbers is None:
                return column[0]
            found = column[numbers]
            return found.reshape(-1, *(1,) * (out.ndim - 1)) if np.ndim(found) else found

        values = out if out.dtype == self.dtype else np.empty(out.shape, self.dtype)
        np.copyto(values, stored, casting="unsafe")
        missing = [values == of_rows(fill) for fill in self.fills]
        if self.low is not None:
            missing.append(stored < of_rows(self.low))
        if self.high is not None:
            missing.append(stored > of_rows(self.high))
        for is_missing in missing:
            np.copyto(values, np.nan, where=is_missing)
        if self.scale is not None:
            np.multiply(values, of_rows(self.scale), out=values)
        if self.offset is not None:
            np.add(values, of_rows(self.offset), out=values)
        if values is not out:
            np.copyto(out, values, casting="unsafe")


class CfDecoder:
    """Unpacks rows, each by the attributes of its own dataset. Safe to use from many threads.

    `first` has the first sample of each range of samples, and `several` how it is unpacked. `dtype`
    is the common dtype after unpacking; `forms` are the kinds of datasets among them.
    """

    def __init__(self, first: Sequence[int], several: Sequence[Unpacking]) -> None:
        self.dtype = np.result_type(*(one.dtype for one in several))
        self._first = np.array(first, np.int64)
        by_form: dict[object, list[Unpacking]] = {}
        form, place = [], []
        for one in several:
            alike = by_form.setdefault(one.form, [])
            form.append(list(by_form).index(one.form))
            place.append(len(alike))
            alike.append(one)
        self._form, self._place = np.array(form, np.int64), np.array(place, np.int64)
        self.forms = [CfForm(alike) for alike in by_form.values()]

    def decode(self, raw: NDArray[Any], out: NDArray[Any], index: NDArray[np.int64] | None) -> None:
        """Fill `out`, (n, *row) as delivered, with the values of `raw`, (n, *row) as stored.

        Their dimensions have the same order. `index` are sample numbers; None if all are of one
        dataset.
        """
        if len(self._first) == 1:
            self.forms[0].decode(raw, out, None)
            return
        number = self._numbers(index)
        form, place = self._form[number], self._place[number]
        ends = [*(np.flatnonzero(np.diff(form)) + 1).tolist(), len(form)]
        begin = 0
        for end in ends if len(form) else ():
            rows = slice(begin, end)
            self.forms[form[begin]].decode(raw[rows], out[rows], place[rows])
            begin = end

    def places(self, index: NDArray[np.int64] | None) -> NDArray[np.int64] | None:
        """Return the positions of samples' numbers in the columns of their form; None means 0."""
        return None if len(self._first) == 1 else self._place[self._numbers(index)]

    def _numbers(self, index: NDArray[np.int64] | None) -> NDArray[np.int64]:
        assert index is not None, "rows of several datasets have numbers"
        return np.searchsorted(self._first, index, side="right") - 1


def cf_decoder(layout: DatasetLayout, where: str) -> CfDecoder | None:
    """Return what unpacks the values of a dataset; None if nothing is packed or missing.

    `ConfigError` is raised if the dataset does not hold numbers, `DatasetError` if an attribute is
    invalid.
    """
    if layout.dtype.kind not in "iuf" or layout.member:
        what = f"a member of a compound, {layout.dtype}" if layout.member else str(layout.dtype)
        raise ConfigError(
            f"{where}: decode_cf unpacks datasets of integers and floats, and this is {what};"
            " leave decode_cf out"
        )
    several = [unpacking(found, layout.dtype, where) for _, found in layout.cf]
    if all(one.is_identity(layout.dtype) for one in several):
        return None
    return CfDecoder([first for first, _ in layout.cf], several)


def _blocks(shape: tuple[int, ...]) -> Iterator[tuple[Any, ...]]:
    """Yield indices of blocks of an array that are worth a call, and stay in the cache."""
    row = math.prod(shape[1:])
    if row <= _BLOCK_ELEMENTS or len(shape) == 1:
        step = max(1, _BLOCK_ELEMENTS // max(1, row))
        for begin in range(0, shape[0], step):
            yield (slice(begin, begin + step),)
        return
    for number in range(shape[0]):
        for block in _blocks(shape[1:]):
            yield (number, *block)
