"""Checks option values of types that pydantic lacks, or validates too loosely or strictly.

Each check raises a `ValueError` with the requirement; `frozen` adds the option's name and the
value.
"""

from __future__ import annotations

import importlib
import numbers
import operator
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Annotated, Any, Literal, NamedTuple, SupportsIndex, TypeAlias, TypeGuard

import numpy as np
from pydantic import (
    AfterValidator,
    BeforeValidator,
    PlainSerializer,
    PlainValidator,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)
from pydantic import Field as Bound

from h5async.errors import ConfigError, needs_package
from h5async.spelling import name_bytes, name_text, named
from h5async.system.interruptions import passing, suppressing

_MAX_TIMEOUT_SECONDS = 1_000_000_000  # 30 years; ten times that overflows the system's clocks
_MOST_STEPS = 1 << 20  # of a sample
_MOST_STEP = 1 << 40  # no row is farther from a sample
_SHOWN_CHARACTERS = 200  # of an invalid value
_NUMBER_WORDS = "must be a number, or one for each channel"
_SIZE = re.compile(r"(\d[\d_]*(?:\.\d+)?)\s*(?:(?:([kmgtpe])(i)?)?b)?", re.IGNORECASE)
_SLICE = re.compile(r"(-?\d+)?:(-?\d+)?(:(-?\d+)?)?")
_SIZE_WORDS = "a number of bytes, or a size such as 512MiB (of 1,024s) or 1.5GB (of 1,000s)"
_FUNCTION_WORDS = 'must be a function or "module:function"'
MAX_WORLD_SIZE = 2**31 - 1  # MPI, PyTorch and JAX count processes by 32-bit integers
MOST_HELPERS = 256  # beyond the cores they do not help, and each takes memory and time to start
_WORKERS_WORDS = f'must be "thread", "process", or a number of helper processes to {MOST_HELPERS}'


def shown(value: object) -> str:
    """Return the repr of a value, cut off if it is long."""
    text = f"a value of type {type(value).__name__}"
    with suppressing(Exception):  # an integer of 5,000 digits, say
        text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."


def _worded(message: str) -> WrapValidator:
    """Replace pydantic's messages, which list every type that it tried."""

    def check(value: object, handler: ValidatorFunctionWrapHandler) -> object:
        try:
            return handler(value)
        except ValidationError as error:
            if any("error" in item.get("ctx", {}) for item in error.errors()):
                raise  # raised by one of our checks
            raise ValueError(message) from error

    return WrapValidator(check)


def integer(value: object) -> object:
    """Convert NumPy integers; leave bools, so that they are rejected."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        return value
    return operator.index(value)


def dimension(value: object) -> object:
    """Convert NumPy integers; accept names that are not empty."""
    if isinstance(value, str):
        if not value:
            raise ValueError("the name of a dimension is empty")
        return value
    return integer(value)


def _sample_dimension(value: object) -> object:
    """Accept a number or a name, or a pair of them, also as typed: ``0,1``."""
    if isinstance(value, str) and re.fullmatch(r"-?\d+(, *-?\d+)?", value):
        value = tuple(map(int, value.split(","))) if "," in value else int(value)
    several = _several(value)
    is_pair = isinstance(several, list | tuple)
    found = tuple(map(dimension, several if isinstance(several, list | tuple) else (several,)))
    if len(found) != 1 + is_pair or not all(type(one) in (int, str) for one in found):
        raise ValueError(
            "must be the number of a dimension, or its name; or a pair of them: of sequences, and"
            " of steps"
        )
    return found if is_pair else found[0]


def _workers(value: object) -> object:
    """Convert a number typed on the command line."""
    if isinstance(value, str) and re.fullmatch(r"[0-9]{1,9}", value):
        return int(value)
    return integer(value)


def _shuffle(value: object) -> object:
    if value is True:
        return "full"
    if value is not False and value not in ("full", "window"):
        raise ValueError('must be False, True, "full" or "window"')
    return value


def _device(value: str) -> str:
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", value):
        raise ValueError('must be "auto", "cpu", "cuda" or "cuda:N"')
    return value


def _nbytes(value: object) -> object:
    """Convert text such as "512MiB" and "1.5 GB" to a number of bytes."""
    if not isinstance(value, str):
        return integer(value)
    found = _SIZE.fullmatch(value.strip())
    if found is None:
        raise ValueError(f"must be {_SIZE_WORDS}")
    number, prefix, binary = found.groups()
    factor = (1024 if binary else 1000) ** " kmgtpe".index((prefix or " ").lower())
    return int(Fraction(number.replace("_", "")) * factor)


def _share(value: object) -> object:
    """Accept a number of samples, or a share of them, also as typed."""
    words = "must be a number of samples, such as 100, or a share of them, such as 0.01"
    if isinstance(value, str) and re.fullmatch(r"\d+(\.\d*)?|\.\d+", value):
        value = float(value) if "." in value else int(value)
    value = integer(value)
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ValueError(words)
    if value < 0 or (not isinstance(value, int) and not value <= 1):
        raise ValueError(words)
    return value if isinstance(value, int) else float(value)


def _dtype(value: object) -> np.dtype[Any] | None:
    """Accept dtypes of NumPy, and of PyTorch, also by name, and bfloat16."""
    if value is None:
        return None
    if isinstance(value, str) or type(value).__module__ == "torch":
        value = str(value).removeprefix("torch.")
    if value == "bfloat16":
        with needs_package("ml_dtypes", "batches of bfloat16"):
            from ml_dtypes import bfloat16 as value
    try:
        dtype: np.dtype[Any] = np.dtype(value)  # type: ignore[call-overload]
    except (TypeError, ValueError, SyntaxError) as error:
        raise ValueError("must be a NumPy dtype") from error
    if dtype.kind not in "biufc" and not is_float(dtype):
        raise ValueError("must be a boolean or numeric dtype")
    return dtype.newbyteorder("=")


def is_float(dtype: np.dtype[Any]) -> bool:
    """Tell whether a dtype is a real floating-point one, including bfloat16."""
    return dtype.kind == "f" or dtype.name == "bfloat16"


def _dataset_path(value: object) -> str:
    """Accept any path that HDF5 allows; h5py returns those that are not UTF-8 as bytes."""
    if not isinstance(value, str | bytes):
        raise ValueError("must be a string")
    if not value:
        raise ValueError("the path is empty")
    name = name_text(value)
    try:
        name_bytes(name)
    except UnicodeEncodeError as error:
        raise ValueError(f"no file can hold this name ({error.reason})") from error
    return str(name)


def _ordered(value: Any) -> Any:
    """Return a value; raise `ValueError` if it is a set, whose order differs between processes."""
    if isinstance(value, set | frozenset):
        raise ValueError("a set has no order; give a list")
    return value


def _category_names(value: object) -> object:
    if value is None or value is False:
        return None
    if value is True or isinstance(value, str):
        return value if value is True else _dataset_path(value)
    if isinstance(value, Mapping):  # a class_to_idx: its numbers need not be in its order
        raise ValueError(
            "a mapping is no list of names, whose places are the codes; give the names alone, in"
            " the order of their codes"
        )
    names = tuple(_ordered(value)) if isinstance(value, Iterable) else ()
    if not names or not all(isinstance(name, str | int) for name in names):
        raise ValueError("must be True, a list of names, or the path of a dataset of names")
    if len(set(names)) < len(names):
        raise ValueError("must name each category once")
    return names


def _steps(value: object) -> object:
    words = 'must be a range or a list of integers, or a slice as text, such as "-3:1"'
    if value is None:
        return None
    if isinstance(value, str):
        found = re.fullmatch(r"(-?\d+):(-?\d+)(?::(-?\d+))?", value)
        if found is None:
            raise ValueError(words)
        start, stop, step = (int(part or 1) for part in found.groups())
        if not step:
            raise ValueError(words)
        value = range(start, stop, step)
    if isinstance(value, range) and not 0 < len(value) <= _MOST_STEPS:
        raise ValueError(f"must be 1 to {_MOST_STEPS:,} steps")
    several = _several(value)
    if not isinstance(several, list | tuple):
        raise ValueError(words)
    steps = tuple(map(integer, several))
    if not steps or not all(type(step) is int and abs(step) < _MOST_STEP for step in steps):
        raise ValueError(words)
    return steps


def _numbers(value: object) -> object:
    value = _ordered(value)
    if not isinstance(value, np.ndarray | list | tuple):
        return value
    try:
        return tuple(float(number) for number in np.asarray(value).ravel())
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(_NUMBER_WORDS) from error


def _several(value: object) -> object:
    """Convert NumPy arrays and ranges to tuples, and refuse sets."""
    value = _ordered(value)
    return tuple(value) if isinstance(value, np.ndarray | range) and np.ndim(value) else value


def _storage_options(value: object) -> Mapping[str, Any]:
    """Accept a mapping of names to values; errors do not show the values, which may be secret."""
    if value is None:
        return {}
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise ConfigError("must map names to values")
    return dict(value)


def _seconds(value: object) -> float | None:
    if value is None:
        return None
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= _MAX_TIMEOUT_SECONDS:  # type: ignore[operator]
        raise ValueError(
            f"must be None, for no limit, or seconds, from 0 to {_MAX_TIMEOUT_SECONDS:,}"
        )
    return float(value)  # type: ignore[arg-type]


@passing()
def check_timeout(value: object) -> float | None:
    """Return a timeout in seconds, or None for no limit; raise `ConfigError` if it is invalid."""
    try:
        return _seconds(value)
    except ValueError as error:
        raise ConfigError(f"{named('timeout')}: {error}; found {shown(value)}") from error


def function_path(value: object) -> object:
    """Return a function as ``"module:function"``; raise `ConfigError` if it cannot be imported."""
    if value is None or isinstance(value, str):
        return value
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
    try:
        found: Any = importlib.import_module(str(module))
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError):
        found = None
    if found is not value or module == "__main__":
        raise ConfigError(
            f"{named('postprocess')}: {shown(value)} cannot be saved, because another process could"
            ' not import it; give it as "module:function"'
        )
    return f"{module}:{name}"


def _import_path(value: object) -> object:
    if isinstance(value, str) and not re.fullmatch(r"[\w.]+:[\w.]+", value):
        raise ValueError(_FUNCTION_WORDS)
    return value


def plain(value: object) -> object:
    """Return a value as text, for JSON."""
    return os.fspath(value) if isinstance(value, os.PathLike) else str(value)


# Accepted types, for type checkers.
DatasetPath: TypeAlias = str | bytes
Integer: TypeAlias = int | SupportsIndex  # NumPy's, too
DimensionLike: TypeAlias = Integer | str
SampleDimensionLike: TypeAlias = DimensionLike | Sequence[DimensionLike]

# Bounds come before the validator: pydantic makes no JSON schema of bounds around it.
_AsInteger = BeforeValidator(integer)
Int = Annotated[int, Bound(strict=True), _AsInteger]
Natural = Annotated[int, Bound(strict=True, ge=0), _AsInteger]
Positive = Annotated[int, Bound(strict=True, ge=1), _AsInteger]
# Several per core of the largest machines; thousands take seconds to start and stop.
MOST_THREADS = 1024
WorldSize = Annotated[int, Bound(strict=True, ge=1, le=MAX_WORLD_SIZE), _AsInteger]
Threads = Annotated[int, Bound(strict=True, ge=0, le=MOST_THREADS), _AsInteger]
_AsSize = BeforeValidator(_nbytes, json_schema_input_type=int | str)
Size = Annotated[int, Bound(strict=True, ge=1), _AsSize]
SizeOrZero = Annotated[int, Bound(strict=True, ge=0), _AsSize]
Bool = Annotated[bool, Bound(strict=True)]
Workers = Annotated[
    Literal["thread", "process"] | Annotated[int, Bound(strict=True, ge=1, le=MOST_HELPERS)],
    BeforeValidator(_workers),
    _worded(_WORKERS_WORDS),
]
Shuffle = Annotated[Literal[False, "full", "window"], BeforeValidator(_shuffle)]
Device = Annotated[str, AfterValidator(_device)]
Dimension = Annotated[
    Annotated[int, Bound(strict=True)] | str,
    BeforeValidator(dimension),
    _worded("must be the number of a dimension, or its name"),
]
Dimensions = Annotated[
    tuple[Dimension, ...],
    BeforeValidator(_several),
    _worded("must be a list of dimensions, by number or by name"),
]
SampleDimension = Annotated[int | str | Any, PlainValidator(_sample_dimension)]
Steps = Annotated[Any, PlainValidator(_steps)]
CategoryNames = Annotated[
    bool | str | tuple[str | int, ...] | None, BeforeValidator(_category_names)
]
Number = Annotated[
    float | tuple[float, ...],
    BeforeValidator(_numbers),
    _worded(_NUMBER_WORDS),
]
Function = Annotated[
    Callable[..., Any] | str | None,
    AfterValidator(_import_path),
    _worded(_FUNCTION_WORDS),
    PlainSerializer(function_path, when_used="json"),
]
Share = Annotated[int | float, PlainValidator(_share)]
Seconds = Annotated[float | None, PlainValidator(_seconds)]
# (str() of a dtype is its name, which NumPy converts back.)
DType = Annotated[
    Any, BeforeValidator(_dtype), PlainSerializer(plain, when_used="json-unless-none")
]
# pydantic's own strings and paths must be UTF-8.
Name = Annotated[str, PlainValidator(_dataset_path)]
Names = Annotated[
    tuple[Name, ...], BeforeValidator(lambda it: (it,) if isinstance(it, str) else _ordered(it))
]
# TOML has no null: "" means none.
NameOrEmpty = Annotated[Name | None, BeforeValidator(lambda it: None if it in ("", b"") else it)]
# Neither shown nor saved, because they may be secret.
StorageOptions = Annotated[
    Mapping[str, Any], PlainValidator(_storage_options), Bound(repr=False, exclude=True)
]
Cache = Annotated[Literal["host", "device", "disk"] | None, BeforeValidator(lambda it: it or None)]

# --- parts of rows: regions, crops and flips -----------------------------------------------------

_REGION_WORDS = (
    'must map dimensions to slices, such as {"lat": slice(100, 356)}, or "100:356" in a file;'
    " steps are 1 or more"
)
_CROP_WORDS = 'must be a number of elements, or map dimensions to numbers, such as {"lat": 64}'
_FLIP_WORDS = "must be False, True, or a list of dimensions of the crop"

# Accepted types, for type checkers.
RegionLike: TypeAlias = Mapping[DimensionLike, slice | str]
CropLike: TypeAlias = Integer | Mapping[DimensionLike, Integer]
FlipLike: TypeAlias = bool | Sequence[DimensionLike]
CropAt: TypeAlias = Literal["random", "center"]


class Bounds(NamedTuple):
    """A slice along a dimension, hashable."""

    dimension: int | str
    start: int | None
    stop: int | None
    step: int | None

    @property
    def slice(self) -> slice:
        """The slice."""
        return slice(self.start, self.stop, self.step)


def _dimension(value: object, words: str) -> int | str:
    """Accept a number or a name; in files of options, numbers are text."""
    if isinstance(value, str) and re.fullmatch(r"-?\d+", value):
        value = int(value)
    found = dimension(value)
    if type(found) not in (int, str):
        raise ValueError(words)
    return found  # type: ignore[return-value]


def _is_copy(value: object) -> TypeGuard[tuple[Any, ...]]:
    """Tell whether a value is already validated, because its option is being copied."""
    return isinstance(value, tuple) and all(isinstance(one, tuple) for one in value)


def slice_of(text: str) -> slice | None:
    """Return the slice that a text such as ``"100:200"`` denotes, or None."""
    if not _SLICE.fullmatch(text):
        return None
    return slice(*(int(end) if end else None for end in text.split(":")))


def _region(value: object) -> tuple[Bounds, ...] | None:
    if value is None:
        return None
    if _is_copy(value):
        return tuple(Bounds(*one) for one in value)
    if not isinstance(value, Mapping) or not value:
        raise ValueError(_REGION_WORDS)
    found = []
    for dim, part in value.items():
        some = slice_of(part) if isinstance(part, str) else part
        if not isinstance(some, slice):
            raise ValueError(_REGION_WORDS)
        ends = [integer(end) for end in (some.start, some.stop, some.step)]
        if not all(end is None or type(end) is int for end in ends):
            raise ValueError(_REGION_WORDS)
        if ends[2] is not None and ends[2] < 1:  # type: ignore[operator]
            raise ValueError(_REGION_WORDS)
        found.append(Bounds(_dimension(dim, _REGION_WORDS), *ends))  # type: ignore[arg-type]
    return tuple(found)


def _region_as_text(value: tuple[Bounds, ...] | None) -> dict[str, str] | None:
    if value is None:
        return None
    texts = (["" if end is None else str(end) for end in one[1:]] for one in value)
    return {str(one.dimension): ":".join(text) for one, text in zip(value, texts, strict=True)}


def _size(value: object) -> int:
    found = integer(value)
    if type(found) is not int or found < 1:
        raise ValueError(_CROP_WORDS)
    return found


def _crop(value: object) -> int | tuple[tuple[int | str, int], ...] | None:
    if value is None:
        return None
    if _is_copy(value):
        value = dict(value)
    if not isinstance(value, Mapping):
        return _size(value)
    if not value:
        raise ValueError(_CROP_WORDS)
    return tuple((_dimension(dim, _CROP_WORDS), _size(size)) for dim, size in value.items())


def _crop_as_mapping(value: Any) -> Any:
    return {str(dim): size for dim, size in value} if isinstance(value, tuple) else value


def _flip(value: object) -> bool | tuple[int | str, ...]:
    if isinstance(value, bool):
        return value
    if not isinstance(value, list | tuple) or not value:
        raise ValueError(_FLIP_WORDS)
    return tuple(_dimension(dim, _FLIP_WORDS) for dim in value)


# (`Any`: fields of images have other options of these names.)
Region = Annotated[Any, PlainValidator(_region), PlainSerializer(_region_as_text)]
Crop = Annotated[Any, PlainValidator(_crop), PlainSerializer(_crop_as_mapping)]
Flip = Annotated[Any, PlainValidator(_flip)]
