"""Options enter, in any of four forms; a frozen, validated `ReaderConfig` leaves.

What can be checked without opening a file is checked here, once; what depends on the dataset
(does axis 3 exist?) is checked where the dataset is opened, with the same error type.
"""

from __future__ import annotations

import difflib
import glob
import importlib
import json
import math
import numbers
import operator
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    PlainSerializer,
    PlainValidator,
    SerializerFunctionWrapHandler,
    ValidationError,
    field_validator,
    model_serializer,
    model_validator,
)
from pydantic import Field as Bound

from h5async.errors import ConfigError, ReadError
from h5async.names import name_bytes, name_text
from h5async.system.controlgroups import cpu_quota
from h5async.system.interruptions import interruption, passing, raise_again, suppressing

_RESERVED_FIELD_NAMES = frozenset(
    {"copy", "count", "epoch", "index", "keys", "last", "number", "size"}
)
_ANCESTOR_NAMES = {"nthread": "num_threads", "njob": "prefetch", "cuda": "device"}
_DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")
_REPLACED_BY_FIELDS = ("data_field", "labels_field", "num_dim", "h_dim", "w_dim", "cha_dim")
_MAX_TIMEOUT_SECONDS = 1_000_000_000  # 30 years; ten times as much overflows the system's clocks
_SHOWN_CHARACTERS = 200  # of a value that does not fit


def _integer(value: object) -> object:
    """Let NumPy integers count as integers, and keep bools from counting as such."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        return value
    return operator.index(value)


def _dtype(value: object) -> np.dtype[Any] | None:
    if value is None:
        return None
    try:
        dtype: np.dtype[Any] = np.dtype(value)  # type: ignore[call-overload]
    except (TypeError, ValueError, SyntaxError) as error:
        raise ValueError("not a NumPy dtype") from error
    if dtype.kind not in "biufc":
        raise ValueError("not a boolean or numeric dtype")
    return dtype.newbyteorder("=")


def _dataset_path(value: object) -> str:
    """Let a path be any that HDF5 may hold: h5py gives those that are not UTF-8 as bytes."""
    if not isinstance(value, str | bytes):
        raise ValueError("input should be a valid string")
    if not value:
        raise ValueError("the path is empty")
    name = name_text(value)
    try:
        name_bytes(name)
    except UnicodeEncodeError as error:
        raise ValueError(f"no file can hold this name ({error.reason})") from error
    return str(name)


def _file_path(value: object) -> Path:
    if not isinstance(value, str | bytes | os.PathLike):
        raise ValueError("input is not a valid path")
    if not os.fspath(value):
        raise ValueError("the path is empty")
    return Path(os.fsdecode(value))


MAX_WORLD_SIZE = 2**31 - 1  # MPI, PyTorch and JAX count processes by 32-bit integers


def _file_paths(value: object) -> Path | tuple[Path, ...]:
    if isinstance(value, set | frozenset):
        raise ValueError("a set has no order; give a list of files")
    if isinstance(value, list | tuple):
        if not value:
            raise ValueError("the list of files is empty")
        return tuple(map(_file_path, value))
    return _file_path(value)


def _folders(value: object) -> tuple[Path, ...]:
    if isinstance(value, str | bytes | os.PathLike):
        return (_file_path(value),)
    if isinstance(value, list | tuple | set | frozenset):
        return tuple(map(_file_path, value))
    raise ValueError("input should be a folder, or a list of folders")


def _numbers(value: object) -> object:
    """Let NumPy arrays and lists of numbers count as tuples."""
    if not isinstance(value, np.ndarray | list | tuple):
        return value
    try:
        return tuple(float(number) for number in np.asarray(value).ravel())
    except (TypeError, OverflowError) as error:
        raise ValueError(str(error)) from error


def _several(value: object) -> object:
    """Let NumPy arrays and ranges count as tuples."""
    return tuple(value) if isinstance(value, np.ndarray | range) and np.ndim(value) else value


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
    """Return the seconds that a caller may be made to wait; None: without a limit.

    Raises
    ------
    ConfigError
        If it is no number of seconds.
    """
    try:
        return _seconds(value)
    except ValueError as error:
        raise ConfigError(f"timeout: {error}; found {_shown(value)}") from error


def _function_path(value: object) -> object:
    """Return a function as ``"module:function"``, by which it can be imported.

    Raises
    ------
    ConfigError
        If it cannot.
    """
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
            f"postprocess: {_shown(value)} cannot be written down, because no other process could"
            ' import it; give it as "module:function"'
        )
    return f"{module}:{name}"


def _plain(value: object) -> object:
    """Return what JSON has for a value of an option."""
    return os.fspath(value) if isinstance(value, os.PathLike) else str(value)


Int = Annotated[int, BeforeValidator(_integer), Bound(strict=True)]
Ints = Annotated[tuple[Int, ...], BeforeValidator(_several)]
Number = Annotated[float | tuple[float, ...], BeforeValidator(_numbers)]
# (str() of a dtype is its name, of which NumPy makes it again.)
DType = Annotated[
    Any, BeforeValidator(_dtype), PlainSerializer(_plain, when_used="json-unless-none")
]
# pydantic's own strings and paths must be UTF-8.
Name = Annotated[str, PlainValidator(_dataset_path)]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    def __init__(self, **options: Any) -> None:
        known = list(type(self).model_fields)
        for name in options:
            if name not in known:
                raise ConfigError(_unknown_option(name, known))
        try:
            super().__init__(**options)
        except ValidationError as error:
            for item in error.errors():
                found = interruption(item.get("ctx", {}).get("error"))
                if found is not None:
                    raise_again(found)
            raise ConfigError(_describe(error)) from None


def _unknown_option(name: str, known: list[str]) -> str:
    snake = re.sub(r"(?<=[a-z0-9])([A-Z])", r"_\1", name).lower()
    near = _ANCESTOR_NAMES.get(name)
    if near not in known:
        near = next(iter(difflib.get_close_matches(snake, known, n=1, cutoff=0.5)), None)
    hint = f"did you mean {near!r}?" if near else f"options are: {', '.join(known)}"
    return f"unknown option {name!r}; {hint}"


def _describe(error: ValidationError) -> str:
    lines = []
    for item in error.errors():
        names = [str(part) for part in item["loc"]]
        message = item["msg"].removeprefix("Value error, ")
        if not names:
            lines.append(message)
        elif item["type"] == "missing":
            lines.append(f"{names[0]} is required")
        else:
            where = ".".join(name for name in names if name.isidentifier())
            line = f"{where}: {message[0].lower()}{message[1:]}"
            is_told = isinstance(item.get("ctx", {}).get("error"), ConfigError)
            lines.append(line if is_told else f"{line}, found {_shown(item['input'])}")
    return "; ".join(dict.fromkeys(lines))


def _shown(value: object) -> str:
    """Return how a value is written, cut off where it is long."""
    text = f"a value of type {type(value).__name__}"
    with suppressing(Exception):  # an integer of 5,000 digits, say
        text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."


_REQUIRED: Any = object()


class Field(_Frozen):
    """One dataset, and how its samples are delivered.

    The delivered value is ``stored.astype(dtype) * scale + offset``, with the dataset's
    dimensions in the order of `axes`. Arithmetic is done in `dtype`; a cast is NumPy's
    ``astype`` (a float out of an integer's range is undefined, as there).

    Parameters
    ----------
    path
        Path of the dataset in the HDF5 file.
    num_dim
        The dimension that counts the samples.
    axes
        The dataset's dimensions in the order of delivery, the sample dimension first; None:
        the sample dimension, then the others in the file's order.
    dtype
        Delivered dtype. Default: the file's, in native byte order; with a `scale` or
        `offset`: float32.
    scale, offset
        A number, or one for each channel (index along the second delivered axis).

    Raises
    ------
    ConfigError
        If a value does not fit.
    """

    path: Name
    num_dim: Int = 0
    axes: Ints | None = None
    dtype: DType = None
    scale: Number | None = None
    offset: Number | None = None

    def __init__(
        self,
        path: str = _REQUIRED,
        num_dim: int | None = None,
        axes: tuple[int, ...] | None = None,
        dtype: Any = None,
        scale: Any = None,
        offset: Any = None,
        **unknown: Any,
    ) -> None:
        if num_dim is None:
            num_dim = next(iter(axes), 0) if isinstance(axes, Iterable) else 0
        if path is not _REQUIRED:
            unknown["path"] = path
        super().__init__(
            num_dim=num_dim,
            axes=axes,
            dtype=dtype,
            scale=scale,
            offset=offset,
            **unknown,
        )

    @model_validator(mode="after")
    def _check(self) -> Field:
        if self.axes is not None:
            if len(set(self.axes)) != len(self.axes) or not self.axes:
                raise ValueError(f"axes must name each dimension once, found {self.axes}")
            if self.axes[0] != self.num_dim:
                raise ValueError(
                    f"axes must begin with the sample dimension num_dim={self.num_dim},"
                    f" found {self.axes}"
                )
        scaled = self.scale is not None or self.offset is not None
        if scaled and self.dtype is not None and self.dtype.kind != "f":
            raise ValueError(f"scale and offset need a float dtype, found dtype={self.dtype}")
        return self

    @property
    def delivered_dtype(self) -> np.dtype[Any] | None:
        """The dtype asked for, float32 where scaling implies it, None for the file's own."""
        if self.dtype is None and (self.scale is not None or self.offset is not None):
            return np.dtype(np.float32)
        dtype: np.dtype[Any] | None = self.dtype
        return dtype


class ReaderConfig(_Frozen):
    """All options of a reader, validated once; see the README for what each means.

    Raises
    ------
    ConfigError
        If an option is unknown or its value does not fit.
    """

    hdf5_path: Annotated[Path | tuple[Path, ...], BeforeValidator(_file_paths)]
    data_field: Name = "data"
    labels_field: Name | None = "labels"
    fields: Mapping[Name, Field] | None = None
    num_dim: Int = 0
    h_dim: Int | None = None
    w_dim: Int | None = None
    cha_dim: Int | None = None
    batch_size: Annotated[Int, Bound(ge=1)] = 32
    shuffle: Literal[False, "full", "window"] = False
    window_bytes: Annotated[Int, Bound(ge=1)] = 256 << 20
    seed: Int = 0
    drop_last: Annotated[bool, Bound(strict=True)] = False
    num_threads: Annotated[Int, Bound(ge=0)] | None = None
    workers: Literal["thread", "process"] = "thread"
    prefetch: Annotated[Int, Bound(ge=1)] = 2
    device: str = "auto"
    pin_memory: Annotated[bool, Bound(strict=True)] = False
    postprocess: Annotated[
        Callable[..., Any] | str | None, PlainSerializer(_function_path, when_used="json")
    ] = None
    timeout: Annotated[float | None, PlainValidator(_seconds)] = None
    max_batch_bytes: Annotated[Int, Bound(ge=1)] | None = None
    decode: Literal["auto", "host", "device"] = "auto"
    cache: Literal["host", "device"] | None = None
    cache_bytes: Annotated[Int, Bound(ge=0)] | None = None
    debug_lifetimes: Annotated[bool, Bound(strict=True)] = False
    rank: Annotated[Int, Bound(ge=0)] | None = None
    world_size: Annotated[Int, Bound(ge=1, le=MAX_WORLD_SIZE)] | None = None
    io: Literal["auto", "pread", "map"] = "auto"
    allow_external: Annotated[tuple[Path, ...], BeforeValidator(_folders)] = ()
    allow_missing: Annotated[bool, Bound(strict=True)] = False

    @field_validator("labels_field", mode="before")
    @classmethod
    def _no_labels(cls, value: object) -> object:
        return None if value in ("", b"") else value  # TOML has no null: "" means no labels there

    @field_validator("fields", mode="before")
    @classmethod
    def _paths_to_fields(cls, value: object) -> object:
        if not isinstance(value, Mapping):
            return value
        found = {}
        for name, field in value.items():
            try:
                found[name] = _field(field)
            except ConfigError as error:
                raise ConfigError(f"{name}: {error}") from error
        return found

    @field_validator("fields", mode="after")
    @classmethod
    def _field_names(cls, value: Mapping[str, Field] | None) -> Mapping[str, Field] | None:
        if value is not None:
            if not value:
                raise ValueError("give at least one field")
            taken = _RESERVED_FIELD_NAMES.intersection(value)
            if taken:
                raise ValueError(
                    f"a field cannot be called {sorted(taken)[0]!r}: a batch has an attribute"
                    " of that name; call it otherwise"
                )
        return value

    @field_validator("shuffle", mode="before")
    @classmethod
    def _shuffle_mode(cls, value: object) -> object:
        if value is True:
            return "full"
        if value is not False and value not in ("full", "window"):
            raise ValueError('must be False, True, "full" or "window"')
        return value

    @field_validator("device", mode="after")
    @classmethod
    def _device_name(cls, value: str) -> str:
        if not _DEVICE.fullmatch(value):
            raise ValueError('must be "auto", "cpu", "cuda" or "cuda:N"')
        return value

    @field_validator("postprocess", mode="after")
    @classmethod
    def _import_path(
        cls, value: Callable[..., Any] | str | None
    ) -> Callable[..., Any] | str | None:
        if isinstance(value, str) and not re.fullmatch(r"[\w.]+:[\w.]+", value):
            raise ValueError('must be a function or "module:function"')
        return value

    @field_validator("cache", mode="before")
    @classmethod
    def _no_cache(cls, value: object) -> object:
        return value or None  # TOML has no null: "" means no cache there

    @model_validator(mode="after")
    def _check(self) -> ReaderConfig:
        if self.cache == "device" and self.postprocess is not None:
            raise ValueError(
                'cache="device" keeps rows on the GPU, and postprocess works on host arrays; use'
                ' cache="host"'
            )
        if self.decode == "device" and (self.postprocess is not None or self.cache == "host"):
            who = "postprocess" if self.postprocess is not None else 'cache="host"'
            raise ValueError(f'decode="device" leaves no rows on the host for {who}')
        if self.cache_bytes is not None and self.cache is None:
            raise ValueError('cache_bytes needs cache="host" or cache="device"')
        if (self.rank is None) != (self.world_size is None):
            raise ValueError(
                "give rank and world_size together, or neither: then they are what the launcher"
                " of this process says"
            )
        if self.rank is not None and self.world_size is not None and self.rank >= self.world_size:
            raise ValueError(f"rank must be below world_size={self.world_size}, found {self.rank}")
        if self.pin_memory:
            for option in ("cache", "decode", "device"):
                value = getattr(self, option)
                if value == "device" or str(value).startswith("cuda"):
                    raise ValueError(
                        f"pin_memory leaves batches on the host, found {option}={value!r}; choose"
                        " one of the two"
                    )
        for option in ("cache", "decode"):
            if getattr(self, option) == "device" and self.device == "cpu":
                raise ValueError(f'{option}="device" needs a GPU, found device="cpu"')
        if self.fields is not None:
            both = sorted(self.model_fields_set.intersection(_REPLACED_BY_FIELDS))
            if self.labels_field is None and "labels_field" in both:
                both.remove("labels_field")  # no labels but what `fields` has
            if both:
                raise ValueError(
                    f"give fields or {both[0]}, not both; a Field has num_dim and axes of its own"
                )
        elif (self.h_dim is None) != (self.w_dim is None) or (
            self.cha_dim is not None and self.h_dim is None
        ):
            raise ValueError("give h_dim and w_dim together, and cha_dim only with them")
        return self

    @classmethod
    @passing()
    def load(
        cls,
        config: ReaderConfig | Mapping[str, Any] | str | os.PathLike[str] | None,
        **options: Any,
    ) -> ReaderConfig:
        """Merge a configuration in any form with options, which win over it.

        Parameters
        ----------
        config
            A `ReaderConfig`, a mapping of options, or the path of a TOML file of options. A
            relative ``hdf5_path`` or ``allow_external`` in a TOML file is relative to that file.
        **options
            Single options.

        Raises
        ------
        ConfigError
            If the TOML file cannot be read, an option is unknown or a value does not fit.
        """
        if config is None:
            base: dict[str, Any] = {}
        elif isinstance(config, ReaderConfig):
            base = {name: getattr(config, name) for name in config.model_fields_set}
        elif isinstance(config, Mapping):
            base = {str(name): value for name, value in config.items()}
        elif isinstance(config, str | os.PathLike):
            base = _load_toml(Path(config))
        else:
            raise ConfigError(
                "config must be a mapping, a ReaderConfig or the path of a TOML file,"
                f" found {type(config).__name__}"
            )
        return cls(**{**base, **options})

    @model_serializer(mode="wrap")
    def _without_what_fields_replace(self, handler: SerializerFunctionWrapHandler) -> Any:
        """Leave out what cannot be given with `fields`, so that `load` takes what was dumped.

        (``labels_field=None`` can.)
        """
        found = handler(self)
        for name in _REPLACED_BY_FIELDS if self.fields is not None else ():
            if found.get(name, "") is not None or name != "labels_field":
                found.pop(name, None)
        return found

    def model_dump_json(self, *, indent: int | None = None, **options: Any) -> str:
        """Return the options as JSON; ``ReaderConfig.load(json.loads(text))`` gives them again.

        pydantic's own would not take paths that are not UTF-8.

        Parameters
        ----------
        indent
            Spaces for each level; None: one line.
        **options
            As of `model_dump`.

        Raises
        ------
        ConfigError
            If `postprocess` is a function that cannot be imported by a name.
        """
        found = self.model_dump(**options)
        if "postprocess" in found:
            found["postprocess"] = _function_path(self.postprocess)
        separators = (",", ":") if indent is None else None
        return json.dumps(found, indent=indent, separators=separators, default=_plain)

    @property
    def batch_fields(self) -> dict[str, Field]:
        """The fields of a batch, by name, in order; `data_field` and its kin resolved."""
        if self.fields is not None:
            return dict(self.fields)
        axes: tuple[int, ...] | None = None
        if self.h_dim is not None and self.w_dim is not None:
            channels = () if self.cha_dim is None else (self.cha_dim,)
            axes = (self.num_dim, *channels, self.h_dim, self.w_dim)
        fields = {"data": Field(self.data_field, self.num_dim, axes)}
        if self.labels_field is not None:
            fields["labels"] = Field(self.labels_field)
        return fields

    @property
    def files(self) -> list[Path]:
        """The files of `hdf5_path`, in order; what a glob finds is sorted.

        Raises
        ------
        ReadError
            If a glob finds nothing.
        """
        several = self.hdf5_path if isinstance(self.hdf5_path, tuple) else (self.hdf5_path,)
        found = []
        for path in several:
            if not glob.has_magic(str(path)) or os.path.exists(path):
                found.append(path)
                continue
            names = sorted(glob.glob(str(path), recursive=True))
            if not names:
                raise ReadError(f"no file matches {path}")
            found += map(Path, names)
        return found

    @property
    def thread_count(self) -> int:
        """Threads of the pool: `num_threads`, or the cores that this process may use.

        These are what its affinity allows, but no more than its control groups have time for.
        """
        if self.num_threads is not None:
            return self.num_threads
        if hasattr(os, "process_cpu_count"):  # of Python 3.13; the user may have set another
            cores = os.process_cpu_count() or 1
        elif hasattr(os, "sched_getaffinity"):
            cores = len(os.sched_getaffinity(0))
        else:
            cores = os.cpu_count() or 1
        quota = cpu_quota()
        return cores if quota is None else max(1, min(cores, math.ceil(quota)))


def _field(value: object) -> object:
    if isinstance(value, str | bytes):
        return Field(value)  # type: ignore[arg-type]  # (bytes are taken, too)
    if isinstance(value, Mapping):
        return Field(**{str(name): option for name, option in value.items()})
    return value


def _load_toml(path: Path) -> dict[str, Any]:
    try:
        options = tomllib.loads(_content(path).decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        hint = "; to read an HDF5 file, give hdf5_path=..." if path.suffix in _HDF5_SUFFIXES else ""
        raise ConfigError(f"{path} is not a TOML file: {error}{hint}") from error
    for name in ("hdf5_path", "allow_external"):
        value = options.get(name)
        if isinstance(value, str):
            options[name] = str(path.parent / value)
        elif isinstance(value, list):
            options[name] = [str(path.parent / v) if isinstance(v, str) else v for v in value]
    return options


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except (OSError, ValueError) as error:  # the latter of a path with a NUL
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"cannot read the configuration {path}: {reason}") from error


_HDF5_SUFFIXES = frozenset({".h5", ".hdf5", ".hdf", ".he5", ".nc", ".mat"})
