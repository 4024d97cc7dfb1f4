"""Unpacks values by the CF conventions: scale, offset, and NaN for missing values.

The attributes of datasets enter; a `CfDecoder` leaves, which unpacks stored values on the host.
Results equal xarray's bit for bit (``mask_and_scale=True``): the rules for dtypes and the order of
casting, masking, scaling and adding are xarray's. Values outside `valid_range`, an attribute that
xarray ignores, are masked as in netCDF4.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from h5async.errors import ConfigError, DatasetError
from h5async.index.layout import CfAttribute, DatasetLayout

_BLOCK_ELEMENTS = 1 << 15  # unpacked at a time: they stay in the second-level cache

Values = Mapping[str, NDArray[Any]]  # of attributes, 1-dimensional, by name
_NONE: NDArray[Any] = np.zeros(0)
DType = np.dtype[Any]


class Unpacking(NamedTuple):
    """How the values of one dataset are unpacked. Scalars have the types of the attributes.

    Stored values are viewed as `stored` (the attribute `_Unsigned` may change their signedness) and
    cast to the native `dtype`. A value is missing if it then equals one of `fills`, or if the
    stored value was below `low` or above `high`, which have the dtype `stored`. The others are
    multiplied by `scale`, and `offset` is added. None means no such step.
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
    """Return how a dataset of dtype `raw` is unpacked by its attributes.

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
    given = next((one.data for one in attributes if one.name == "_Unsigned"), b"")
    sign = given.decode(errors="replace").strip("\0").lower()
    kind = {("i", "true"): "u", ("u", "false"): "i"}.get((raw.kind, sign))
    stored = raw if kind is None else np.dtype(f"{raw.byteorder}{kind}{raw.itemsize}")
    scale, offset = (_scalar(values.get(name)) for name in ("scale_factor", "add_offset"))
    fills, has_fill = _fill_values(values, raw, stored)
    low, high = _limits(values, raw, stored)
    dtype = stored
    if scale is not None or offset is not None:
        # As in xarray, a fill value of NaN keeps floats in their own dtype.
        dtype = stored if has_fill and not fills else _packed_dtype(stored, scale, offset)
    elif fills or low is not None or high is not None:
        if stored.kind != "f":  # a float that holds all values exactly, if there is one
            dtype = np.dtype(np.float32 if stored.itemsize <= 2 else np.float64)
    dtype = dtype.newbyteorder("=")
    # In xarray, a fill value reinterpreted as unsigned is a weakly typed Python number.
    fills = [dtype.type(fill) if isinstance(fill, int) else fill for fill in fills]
    return Unpacking(stored, dtype, scale, offset, low, high, tuple(fills))


def shown_value(attribute: CfAttribute) -> str:
    """Return the value of an attribute as text."""
    if not attribute.dtype:
        return repr(attribute.data.decode(errors="replace"))
    numbers = [str(number) for number in np.frombuffer(attribute.data, attribute.dtype)]
    return numbers[0] if len(numbers) == 1 else f"[{', '.join(numbers)}]"


def _scalar(values: NDArray[Any] | None) -> Any:
    """Return the attribute's number, as float64 unless it is a float32."""
    if values is None:
        return None
    return values[0] if values.dtype in (np.float32, np.float64) else np.float64(values[0])


def _packed_dtype(stored: DType, scale: Any, offset: Any) -> DType:
    """Return the dtype of scaled values: that of the attributes, if this loses nothing."""
    double, own = np.dtype(np.float64), np.dtype(type(offset if scale is None else scale))
    if offset is None:
        return own
    is_wide = stored.kind in "iu" and stored.itemsize == 4
    return double if scale is None or is_wide or own != offset.dtype else own


def _fill_values(values: Values, raw: DType, stored: DType) -> tuple[list[Any], bool]:
    """Return the values that mark missing data, and whether the attributes have any, or NaN."""
    given = [values[name] for name in ("missing_value", "_FillValue") if name in values]
    numbers = [number for several in given for number in several if not np.isnan(number)]
    found = dict.fromkeys(_with_sign_of(number, raw, stored) for number in numbers)
    return list(found), bool(numbers) or (raw.kind == "f" and bool(given))


def _with_sign_of(value: np.generic, raw: DType, stored: DType) -> Any:
    """Return a fill value reinterpreted with the signedness that `_Unsigned` gives to values."""
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
    """Return the least and the largest valid value, to be compared with stored values.

    A limit that the dtype cannot hold is ignored.
    """
    pair = values.get("valid_range", _NONE)
    if pair.size == 2 and _fits(pair, raw):
        return _limit(pair[:1], raw, stored), _limit(pair[1:], raw, stored)
    low, high = (values.get(name, _NONE) for name in ("valid_min", "valid_max"))
    return _limit(low, raw, stored), _limit(high, raw, stored)


def _limit(values: NDArray[Any], raw: DType, stored: DType) -> Any:
    if values.size != 1 or not _fits(values, raw):
        return None
    limit = values.astype(raw.newbyteorder("=")).view(stored.newbyteorder("="))[0]
    return None if np.isnan(limit) else limit  # NaN is no limit


def _fits(values: NDArray[Any], raw: DType) -> bool:
    with np.errstate(all="ignore"):
        cast = values.astype(raw.newbyteorder("="))
    return bool(((cast == values) | (np.isnan(values) & (raw.kind == "f"))).all())


class CfDecoder:
    """Unpacks rows, each by the attributes of its own dataset. Thread-safe.

    `first` has the first sample of each range of samples, and `several` the unpacking of each.
    `dtype` is the common dtype after unpacking.
    """

    def __init__(self, first: Sequence[int], several: Sequence[Unpacking]) -> None:
        self.dtype = np.result_type(*(one.dtype for one in several))
        self.several = several
        self._first = np.array(first, np.int64)

    def decode(self, raw: NDArray[Any], out: NDArray[Any], index: NDArray[np.int64] | None) -> None:
        """Unpack `raw`, the stored values, into `out`, the delivered ones, both (n, *row).

        Their dimensions have the same order. `index` has the sample numbers; it may be None if all
        samples are of one dataset.
        """
        numbers = self.numbers(index)
        if numbers is None:
            _decode(self.several[0], raw, out)
            return
        edges = np.flatnonzero(np.diff(numbers, prepend=-1, append=-1)).tolist()
        for begin, end in itertools.pairwise(edges):
            _decode(self.several[numbers[begin]], raw[begin:end], out[begin:end])

    def numbers(self, index: NDArray[np.int64] | None) -> NDArray[np.int64] | None:
        """Return the index of the range that each sample is in; None if there is only one."""
        if len(self.several) == 1:
            return None
        assert index is not None, "rows of several datasets have numbers"
        return np.searchsorted(self._first, index, side="right") - 1


def _decode(how: Unpacking, raw: NDArray[Any], out: NDArray[Any]) -> None:
    """Unpack values of one dataset, in blocks that stay in the cache."""
    if out.size > _BLOCK_ELEMENTS and len(out) == 1:
        _decode(how, raw[0], out[0])
        return
    if out.size > _BLOCK_ELEMENTS:
        half = len(out) // 2
        _decode(how, raw[:half], out[:half])
        _decode(how, raw[half:], out[half:])
        return
    stored = raw.view(how.stored)
    values = out if out.dtype == how.dtype else np.empty(out.shape, how.dtype)
    np.copyto(values, stored, casting="unsafe")
    missing = [values == fill for fill in how.fills]
    if how.low is not None:
        missing.append(stored < how.low)
    if how.high is not None:
        missing.append(stored > how.high)
    for is_missing in missing:
        np.copyto(values, np.nan, where=is_missing)
    if how.scale is not None:
        np.multiply(values, how.scale, out=values)
    if how.offset is not None:
        np.add(values, how.offset, out=values)
    if values is not out:
        np.copyto(out, values, casting="unsafe")


def cf_decoder(layout: DatasetLayout, where: str) -> CfDecoder | None:
    """Return a decoder for the values of a dataset; None if unpacking would not change them.

    `ConfigError` is raised if the dataset does not hold numbers, `DatasetError` if an attribute is
    invalid.
    """
    if layout.dtype.kind not in "iuf" or layout.member:
        what = f"a member of a compound, {layout.dtype}" if layout.member else str(layout.dtype)
        raise ConfigError(
            f"{where}: decode_cf unpacks datasets of integers and floats, but this is {what};"
            " leave decode_cf out"
        )
    several = [unpacking(found, layout.dtype, where) for _, found in layout.cf]
    if all(one.is_identity(layout.dtype) for one in several):
        return None
    return CfDecoder([first for first, _ in layout.cf], several)
