"""Describes the columns of a packed file: samples enter; a description of their storage leaves.

A block of samples maps column names to values: an array (samples, ...); a list, if samples vary in
length; or `Coded`. Pure.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import imagecodecs
import numpy as np
from numpy.typing import NDArray

from h5async.codec.encoders import parse_filters, spell_filters
from h5async.codec.filters import Filter
from h5async.errors import ConfigError, DatasetError
from h5async.packing.writeoptions import PackOptions
from h5async.spelling import name_bytes, named

Form = Literal["array", "varying", "text", "codes"]
_CHUNK_NBYTES, _LARGE_ROW_NBYTES = 1 << 16, 1 << 15
_PROBED_NBYTES = 1 << 18
_NO_NUMBERS = (
    "numbers, strings, bytes, arrays of numbers, or one-dimensional arrays of any length can be"
    " packed"
)


class Coded(NamedTuple):
    """Categories as codes, int (samples,); -1 means no value."""

    codes: NDArray[Any]
    categories: Sequence[str]


Values = NDArray[Any] | list[Any] | Coded


class Block(NamedTuple):
    """A run of `taken` samples of a source; the columns have all but the `bad` ones.

    `bad` maps positions in the run to reasons. `names` are the samples' names, if they have any;
    `units` are the units of columns; `converted` is the number of images converted to PNG.
    """

    columns: Mapping[str, Values]
    taken: int
    names: Sequence[str] = ()
    bad: Mapping[int, str] = MappingProxyType({})
    units: Mapping[str, str] = MappingProxyType({})
    converted: int = 0

    @property
    def kept(self) -> int:
        """The number of samples that can be packed."""
        return self.taken - len(self.bad)

    @property
    def nbytes(self) -> int:
        """The approximate bytes of all values."""
        return sum(map(nbytes_of, self.columns.values()))

    def without(self, bad: Mapping[int, str]) -> Block:
        """Return the block without more bad samples: positions among those kept, with reasons."""
        if not bad:
            return self
        places = [place for place in range(self.taken) if place not in self.bad]
        kept = [at for at in range(self.kept) if at not in bad]
        columns = {name: _chosen(values, kept) for name, values in self.columns.items()}
        more = {places[at]: reason for at, reason in bad.items()}
        return self._replace(columns=columns, bad={**self.bad, **more})


def _chosen(values: Values, kept: list[int]) -> Values:
    if isinstance(values, Coded):
        return values._replace(codes=values.codes[kept])
    return [values[at] for at in kept] if isinstance(values, list) else values[kept]


class Column(NamedTuple):
    """How a column is stored.

    `form` is ``array`` for samples of one `shape` and fixed-length strings; ``varying`` for
    one-dimensional samples of any length, and ``text`` for strings, both in a variable-length
    datatype; or ``codes`` for categories. `kind`, ``image``, ``audio`` or empty, tells readers the
    kind of field. Chunks have `rows` samples, and `filters`.
    """

    name: str
    form: Form
    dtype: np.dtype[Any]
    shape: tuple[int, ...] = ()
    kind: str = ""
    units: str = ""
    rows: int = 1
    filters: tuple[Filter, ...] = ()

    @property
    def is_text(self) -> bool:
        """Whether samples are strings, of variable or fixed length."""
        return self.form == "text" or self.dtype.kind == "S"

    @property
    def row_nbytes(self) -> int:
        """The bytes of a sample in a chunk; for variable lengths, those of its reference."""
        if self.form in ("varying", "text"):
            return 16
        return int(self.dtype.itemsize * np.prod(self.shape, dtype=np.int64))

    @property
    def text(self) -> str:
        """A human-readable description."""
        if self.form == "text":
            return "strings of variable length"
        if self.is_text:
            return f"strings of {self.dtype.itemsize} bytes, chunks of {self.rows:,}"
        if self.form == "varying":
            what = f"encoded {self.kind}" if self.kind else str(self.dtype)
            return f"{what}, of variable length"
        shape = f" {'x'.join(map(str, self.shape))}" if self.shape else ""
        what = "categories" if self.form == "codes" else f"{self.dtype}{shape}"
        return f"{what}, chunks of {self.rows:,}, filter {spell_filters(self.filters)}"

    def as_json(self) -> dict[str, Any]:
        """Return a description that can be serialized as JSON."""
        found = {**self._asdict(), "dtype": self.dtype.str, "shape": list(self.shape)}
        filters, rows = spell_filters(found.pop("filters")), found.pop("rows")
        return {"column": found, "rows": rows, "filters": filters}

    @classmethod
    def of_json(cls, found: Mapping[str, Any]) -> Column:
        """Return the column from a result of `as_json`."""
        column, filters = found["column"], parse_filters(found["filters"])
        own = {"dtype": np.dtype(column["dtype"]), "shape": tuple(column["shape"])}
        return cls(**{**column, **own}, rows=found["rows"], filters=filters)


def columns_of(block: Block, encoded: Mapping[str, str], options: PackOptions) -> dict[str, Column]:
    """Return how to store the columns, by name; `block` is the first one of the source."""
    require_names(block.columns)
    for option in ("fill", "varying", "strings"):
        require_columns(option, getattr(options, option), block.columns)
    found = {}
    for name, values in block.columns.items():
        column = column_of(name, values, options.strings.get(name))
        column = column._replace(units=block.units.get(name, ""))
        if column.form == "varying":
            column = column._replace(kind=encoded.get(name, ""))
        nbytes = max(1, column.row_nbytes)
        rows = 1
        if options.chunk_samples is not None and column.shape:
            rows = options.chunk_samples
        elif nbytes < _LARGE_ROW_NBYTES:
            rows = 1 << (_CHUNK_NBYTES // nbytes).bit_length() - 1
        filters = _filters(column, options.filter, values)
        found[name] = column._replace(rows=rows, filters=filters)
    return found


def _filters(column: Column, chosen: str, values: Values) -> tuple[Filter, ...]:
    """Return the chosen filters; for "auto", LZF if it shrinks the values by a third or more."""
    if chosen != "auto":
        return parse_filters(chosen)
    if not isinstance(values, np.ndarray) or not column.shape:
        return ()
    filters = parse_filters("shuffle+lzf" if column.dtype.itemsize > 1 else "lzf")
    some = np.ascontiguousarray(values[: max(1, _PROBED_NBYTES // max(1, column.row_nbytes))])
    shuffled = some.reshape(-1).view(np.uint8).reshape(-1, column.dtype.itemsize).T
    encoded = imagecodecs.lzf_encode(np.ascontiguousarray(shuffled))
    return filters if len(encoded) < some.nbytes * 2 // 3 else ()


def column_of(name: str, values: Values, length: int | None = None) -> Column:
    """Return how to store a column, from its values in the first block.

    `length` is that of fixed-length strings. Raises DatasetError if values cannot be stored.
    """
    if length is not None:
        if not isinstance(values, list) or not all(isinstance(one, str) for one in values):
            raise DatasetError(f'{named("strings")}: column "{name}" has no strings')
        return Column(name, "array", np.dtype(f"S{length}"))
    if isinstance(values, Coded):
        return Column(name, "codes", np.dtype(np.int32))
    if isinstance(values, list):
        return _of_list(name, values)
    if values.dtype.kind not in "biufc":
        raise DatasetError(f'column "{name}" has dtype {values.dtype}; {_NO_NUMBERS}')
    if 0 in values.shape[1:]:
        raise DatasetError(
            f'column "{name}" has samples of shape {values.shape[1:]} without values; leave it out'
        )
    return Column(name, "array", values.dtype.newbyteorder("="), values.shape[1:])


def _of_list(name: str, values: list[Any]) -> Column:
    if all(isinstance(one, str) for one in values):
        return Column(name, "text", np.dtype(object))
    if all(isinstance(one, bytes) for one in values):
        return Column(name, "varying", np.dtype(np.uint8))
    arrays = [np.asarray(one) for one in values]
    dtype = np.result_type(*{one.dtype for one in arrays})
    if dtype.kind not in "biufc" or any(one.ndim != 1 for one in arrays):
        found = sorted({f"{one.dtype}{list(one.shape)}" for one in arrays})
        raise DatasetError(f'column "{name}" has {", ".join(found[:4])}; {_NO_NUMBERS}')
    return Column(name, "varying", dtype.newbyteorder("="))


def fitted(column: Column, values: Values, first: int) -> Values:
    """Return values converted to a column's form; `first` is the number of their first sample.

    Raises DatasetError if a value cannot be stored exactly.
    """
    if column.is_text:
        return _texts(column, values, first)
    if column.form == "array":
        if isinstance(values, list):
            shapes = [np.shape(one) for one in values]
            odd = next((n for n, shape in enumerate(shapes) if shape != column.shape), None)
            if odd is not None:
                raise _unlike(column, values[odd:], first + odd)
        array = np.asarray(values) if isinstance(values, list) else values
        if isinstance(array, Coded) or array.shape[1:] != column.shape:
            raise _unlike(column, values, first)
        if not fits(array.dtype, column.dtype, array):
            raise _unlike(column, values, first)
        return np.ascontiguousarray(array, column.dtype)
    if column.form == "codes":
        if not isinstance(values, Coded):
            raise _unlike(column, values, first)
        return values
    if isinstance(values, Coded):
        raise _unlike(column, values, first)
    is_bytes = column.dtype == np.uint8
    arrays = [
        np.frombuffer(one, np.uint8) if is_bytes and isinstance(one, bytes) else np.asarray(one)
        for one in values
    ]
    for number, one in enumerate(arrays):
        if one.ndim != 1 or not (one.size == 0 or fits(one.dtype, column.dtype, one)):
            raise _unlike(column, [one], first + number)
    return [np.ascontiguousarray(one, column.dtype) for one in arrays]


def _texts(column: Column, values: Values, first: int) -> Values:
    """Return strings as UTF-8: an array of fixed-length bytes for form ``array``, or a list."""
    if not isinstance(values, list) or not all(isinstance(one, str) for one in values):
        raise _unlike(column, values, first)
    where = f'column "{column.name}", samples from {first:,} on'
    if any("\0" in one for one in values):
        raise DatasetError(
            f"{where}: a string has a NUL character, where HDF5 would end it; store it as bytes"
        )
    try:
        found = list(map(name_bytes, values))
    except UnicodeEncodeError as error:
        raise DatasetError(f"{where}: a string is not UTF-8 ({error}); use bytes") from error
    if column.form == "text":
        return found
    longest = max(found, key=len, default=b"")
    if len(longest) > column.dtype.itemsize:
        raise DatasetError(
            f"{where}: a string has {len(longest):,} bytes of UTF-8; make room for it:"
            f" {named('strings', {column.name: len(longest)})}"
        )
    return np.array(found, column.dtype)


def fits(given: np.dtype[Any], wanted: np.dtype[Any], values: NDArray[Any]) -> bool:
    """Return whether values can be stored exactly."""
    if given == wanted:
        return True
    if given.kind not in "iu" or wanted.kind not in "iufc" or not values.size:
        return np.can_cast(given, wanted, "safe")
    if wanted.kind in "iu":
        limits = np.iinfo(wanted)
        least, most = limits.min, limits.max
    else:  # NumPy considers any 64-bit integer safe in a float64
        most = 2 << np.finfo(wanted).nmant
        least = -most
    return least <= int(values.min()) and int(values.max()) <= most


def require_columns(option: str, given: Iterable[str], columns: Collection[str]) -> None:
    """Raise ConfigError unless all names given by an option are columns or groups of columns."""
    for name in given:
        if not any(f"{one}/".startswith(f"{name}/") for one in columns):
            near = difflib.get_close_matches(name, columns, n=1, cutoff=0)
            raise ConfigError(
                f'{named(option)}: there is no column "{name}"; did you mean "{near[0]}"?'
            )


def require_names(names: Collection[str]) -> None:
    """Raise DatasetError unless columns with these names can be datasets of one file."""
    paths = [tuple(filter(None, str(name).split("/"))) for name in names]
    groups = {path[:end] for path in paths for end in range(len(path))}
    for name, path in zip(names, paths, strict=True):
        is_name = isinstance(name, str) and path and "\0" not in name and not {".", ".."} & {*path}
        if not is_name or path in groups or paths.count(path) > 1:
            raise DatasetError(
                f"a column cannot have the name {name!r}: names must not be empty, '.' or '..', nor"
                " a group of another column, as a is of a/b; rename it"
            )


def _unlike(column: Column, values: Values, first: int) -> DatasetError:
    if isinstance(values, Coded):
        found = "categories"
    elif isinstance(values, list):
        one = values[0]
        found = type(one).__name__ if isinstance(one, str | bytes) else _described(np.asarray(one))
    else:
        found = f"{values.dtype}{list(values.shape[1:])}"
    forms = {"codes": "categories", "varying": f"{column.dtype}[any length]"}
    plain = "strings" if column.is_text else f"{column.dtype}{list(column.shape)}"
    expected = forms.get(column.form, plain)
    return DatasetError(
        f'sample {first:,}: column "{column.name}" has {found}, but {expected} before; all samples'
        " must have the same form: convert them, or, if they are one-dimensional and vary in"
        f" length, give {named('varying', [column.name])}"
    )


def _described(array: NDArray[Any]) -> str:
    return f"{array.dtype}{list(array.shape)}"


def nbytes_of(values: Values) -> int:
    """Return the approximate bytes of values."""
    if isinstance(values, Coded):
        return values.codes.nbytes
    if isinstance(values, list):
        return sum(map(_nbytes_of_one, values)) + 64 * len(values)
    return values.nbytes


def _nbytes_of_one(value: Any) -> int:
    return getattr(value, "nbytes", 0) or (len(value) if hasattr(value, "__len__") else 8)
