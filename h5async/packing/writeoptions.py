"""Defines the options of `pack` and `repack`, validated once and frozen."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict, Unpack

import numpy as np
from pydantic import AfterValidator, BeforeValidator, PlainValidator, model_validator

from h5async.codec.encoders import parse_filters
from h5async.codec.filters import Filter
from h5async.config.frozen import Frozen, documented, option
from h5async.config.parts import Indices
from h5async.config.values import (
    Bool,
    Int,
    Integer,
    Names,
    Natural,
    Positive,
    Shuffle,
    Size,
    Threads,
)
from h5async.spelling import name_text, named
from h5async.system.resources import usable_cores

_FORMATS = {"png": (3, range(10)), "jpeg": (90, range(1, 101))}  # default, and levels
IMAGE_FORMATS = "png, png:0 to png:9, jpeg, or jpeg:1 to jpeg:100"


class WriteKeywords(TypedDict, total=False):
    """The options that `pack` and `repack` share."""

    seed: Integer
    """Determines the order of `shuffle`."""
    shards: int | str | None
    """Write files of about this size, such as `1GB` (decoded): `OUT-00000.h5`, ...; OUT unites
    them, as a file of virtual datasets, or as a saved index if it ends in `.h5idx`.
    """
    num_threads: Integer | None
    """Threads that read, decode and encode; one more writes."""
    resume: bool
    """Continue an interrupted run with the same sources and options; start one if there is none."""
    overwrite: bool
    """Replace an existing file once the new one is complete; start an interrupted one over."""


class PackKeywords(WriteKeywords, total=False):
    """The options of `pack`."""

    size: int | str | tuple[int, int] | None
    """Decode images, and resize them to this height and width (a number: both; or `HxW`): the
    largest part in the middle with that aspect ratio, as `ImageField(size=...)` does. Without it,
    their encoded bytes are kept.
    """
    on_error: Literal["raise", "skip"]
    """How to treat a sample that cannot be packed. `raise`: stop. `skip`: leave it out; all skipped
    samples are listed at the end.
    """
    verify: bool
    """Decode each image whose bytes are kept, to find damaged ones. Otherwise, only headers and
    ends are checked.
    """
    append: bool
    """Add the samples to an existing file that `pack` made."""
    shuffle: bool
    """Pack the samples in random order, which `seed` determines."""
    chunk_samples: Integer | None
    """Samples per chunk of fixed-size columns, except plain numbers. None: one, or as many as fit
    in 64 KiB.
    """
    filter: str
    """How chunks are compressed: `none`, `lzf`, `gzip:4`, `shuffle+zstd:3`, ... `auto`:
    `shuffle+lzf` for columns of arrays that it shrinks by a third or more, else none.
    """
    varying: Sequence[str]
    """Columns of Python samples that vary in length, if the first samples do not show it."""
    strings: Mapping[str, Integer]
    """Columns of strings to store with a fixed length: bytes of UTF-8, by column. Others have a
    variable length.
    """
    fill: Mapping[str, Any]
    """Values that replace nulls of tables, by column."""
    memory: int | str
    """The maximum bytes of samples in memory at a time, whatever the size of the source."""


class RepackKeywords(WriteKeywords, total=False):
    """The options of `repack`."""

    fields: list[str] | None
    """Paths of the datasets that the options below change; others stay as they are. None: all that
    have `num_dim`, and hold 1 KiB or more.
    """
    only_fields: bool
    """Leave out all datasets that are not in `fields`."""
    num_dim: Integer
    """The dimension that counts the samples."""
    chunk_samples: Integer | None
    """Samples per chunk. For rows of less than 1 KiB, a multiple that fills 16 KiB."""
    chunks: Mapping[str, Any] | None
    """The chunk shape of a dataset, by its path; 0 means the whole dimension. Takes precedence over
    `chunk_samples`.
    """
    filter: str | None
    """How chunks are compressed: `none`, `lzf`, `gzip:4`, `shuffle+zstd:3`, ... None: as before."""
    dtype: Mapping[str, Any] | None
    """The datatype of a dataset of numbers, by its path; values are cast as NumPy casts them."""
    offsets: Mapping[str, Any] | None
    """For samples of any length: the dataset with their starts, by the path of the dataset with
    their values. If it has their ends or lengths instead: `PATH:ends`, `PATH:lengths`.
    """
    encode: Mapping[str, Any] | None
    """Store images, uint8 (samples, height, width, 3), as encoded bytes: `png` or `jpeg:90`, by the
    path of their dataset, which readers then take for an `ImageField`.
    """
    indices: Any
    """The samples to keep, in this order, like `indices` of `AsyncReader`."""
    shuffle: bool | str
    """The order of samples: `full` is a uniform permutation; `window` mixes samples of some chunks,
    and reads each chunk once.
    """
    join: Literal["inner", "outer"] | None
    """Which variables (`var`) of several AnnData files to keep: those in all files, or in any.
    None: they must be the same.
    """
    virtual: Literal["keep", "copy"]
    """How to treat virtual datasets and external storage. `keep`: they refer to the same files.
    `copy`: their values are copied into the new file.
    """
    memory: int | str | None
    """The maximum bytes of rows in memory. None: 1 GiB, or a quarter of free memory if less."""
    allow_external: list[str]
    """Folders of other files that virtual datasets and external storage may refer to."""
    verify: bool
    """At the end, read both files, and compare all objects, attributes and values."""


def _size(value: object) -> object:
    if isinstance(value, str):
        found = re.fullmatch(r"(\d{1,5})(?:x(\d{1,5}))?", value)
        if found is None:
            raise ValueError("must be a number of pixels, or height and width: 224, 224x320")
        value = int(found[1]), int(found[2] or found[1])
    if isinstance(value, int) and not isinstance(value, bool):
        value = value, value
    if isinstance(value, list | tuple) and len(value) == 2 and min(value) > 0:
        return tuple(value)
    if value is not None:
        raise ValueError("must be a number of pixels, or two: height and width")
    return value


def _by_path(convert: Callable[[Any], Any], words: str) -> BeforeValidator:
    """Validate a mapping of dataset paths; `convert` checks values, `words` describes them."""

    def check(value: object) -> object:
        if value is not None and not isinstance(value, Mapping):
            raise ValueError(f"must map paths of datasets to {words}")
        found = {}
        for path, one in (value or {}).items():
            try:
                found[name_text(path).strip("/")] = convert(one)
            except (TypeError, ValueError) as error:
                raise ValueError(f"must be {words}, for {path}") from error
        return found

    return BeforeValidator(check)


def _shape(value: Any) -> tuple[int, ...]:
    sizes = value.split(",") if isinstance(value, str) else value
    shape = tuple(map(int, [sizes] if isinstance(sizes, int) else sizes))
    if min(shape) < 0:
        raise ValueError
    return shape


def _numbers(value: Any) -> np.dtype[Any]:
    dtype: np.dtype[Any] = np.dtype(value)
    if dtype.kind not in "biufc":
        raise ValueError
    return dtype


def image_format(spelled: str) -> tuple[str, int]:
    """Return the format and the level, or quality, from ``png`` or ``jpeg:90``.

    Raises ValueError for anything else.
    """
    name, _, level = spelled.partition(":")
    default, levels = _FORMATS.get(name, (0, range(0)))
    number = int(level) if level.isdecimal() else -1 if level else default
    if number not in levels:
        raise ValueError(f"must be {IMAGE_FORMATS}")
    return name, number


def _image_format(spelled: Any) -> str:
    image_format(str(spelled))
    return str(spelled)


def _filter(text: str) -> str:
    parse_filters(text)
    return text


@documented(WriteKeywords)
class WriteOptions(Frozen):
    """The options that `pack` and `repack` share."""

    seed: Int = 0
    shards: Size | None = option(None, values="SIZE")
    num_threads: Threads | None = option(None, default_text="usable cores")
    resume: Bool = False
    overwrite: Bool = False

    @property
    def threads(self) -> int:
        """The number of threads that read and decode."""
        return max(1, usable_cores() if self.num_threads is None else self.num_threads)


@documented(PackKeywords)
class PackOptions(WriteOptions):
    """The options of `pack`, validated once."""

    if TYPE_CHECKING:

        def __init__(self, **options: Unpack[PackKeywords]) -> None: ...

    size: Annotated[Any, PlainValidator(_size)] = option(None, values="N|HxW")
    on_error: Literal["raise", "skip"] = "raise"
    verify: Bool = False
    append: Bool = False
    shuffle: Bool = False
    chunk_samples: Positive | None = None
    filter: str = "auto"
    varying: Names = ()
    strings: Mapping[str, Positive] = option({}, values="NAME=BYTES")
    fill: Mapping[str, Any] = option({}, values="NAME=VALUE")
    memory: Size = option(256 << 20, default_text="256MiB", values="SIZE")

    @model_validator(mode="after")
    def _check(self) -> PackOptions:
        if self.append and self.overwrite:
            raise ValueError(f"give {named('append')} or {named('overwrite')}, not both")
        if self.append and self.shards is not None:
            raise ValueError(f"{named('append')} adds to one file; leave out {named('shards')}")
        if self.filter != "auto":
            parse_filters(self.filter)
        return self

    def digested(self) -> dict[str, Any]:
        """Return the options that affect the content of the file."""
        names = ("size", "shards", "shuffle", "seed", "chunk_samples", "filter")
        return {name: getattr(self, name) for name in (*names, "varying", "strings", "fill")}


@documented(RepackKeywords)
class RepackOptions(WriteOptions):
    """The options of `repack`, validated once."""

    if TYPE_CHECKING:

        def __init__(self, **options: Unpack[RepackKeywords]) -> None: ...

    fields: Names | None = option(None, default_text="all with samples")
    only_fields: Bool = False
    num_dim: Natural = 0
    chunk_samples: Positive | None = None
    chunks: Annotated[
        Mapping[str, tuple[int, ...]], _by_path(_shape, "sizes such as 1,224,224,3; 0: all")
    ] = option({}, values="PATH=N,N,N")
    filter: Annotated[str, AfterValidator(_filter)] | None = option(None, default_text="as before")
    dtype: Annotated[
        Mapping[str, Any], _by_path(_numbers, "a dtype of numbers, such as float16")
    ] = option({}, values="PATH=DTYPE")
    offsets: Annotated[
        Mapping[str, str], _by_path(lambda path: path.strip("/"), "paths, such as offsets")
    ] = option({}, values="PATH=PATH[:ends|:lengths]")
    encode: Annotated[Mapping[str, str], _by_path(_image_format, IMAGE_FORMATS)] = option(
        {}, values="PATH=png|jpeg:90"
    )
    indices: Indices | None = option(None, values="A:B|PATH|{...}")
    shuffle: Shuffle = False
    join: Literal["inner", "outer"] | None = option(None, default_text="must be the same")
    virtual: Literal["keep", "copy"] = "keep"
    memory: Size | None = option(None, values="SIZE")
    allow_external: tuple[Path, ...] = ()
    verify: Bool = False

    @model_validator(mode="after")
    def _check(self) -> RepackOptions:
        if self.only_fields and self.fields is None:
            raise ValueError("only_fields needs fields, and leaves out all others")
        return self

    @property
    def selects(self) -> bool:
        """Whether samples are left out or reordered."""
        return self.indices is not None or self.shuffle is not False

    @property
    def changes_storage(self) -> bool:
        """Whether datasets are stored differently."""
        storage = self.chunk_samples, self.chunks, self.filter, self.dtype, self.encode
        return self.virtual == "copy" or any(one not in (None, {}) for one in storage)

    @property
    def filters(self) -> tuple[Filter, ...] | None:
        """The requested filters; None to keep them."""
        return None if self.filter is None else parse_filters(self.filter)

    def digested(self) -> dict[str, Any]:
        """Return the options that affect the content of the file, serializable as JSON."""
        aside = {"memory", "num_threads", "verify", "resume", "overwrite", "allow_external"}
        found = self.model_dump(exclude=aside)
        return {name: repr(value) for name, value in found.items()}
