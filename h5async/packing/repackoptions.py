"""Defines `RepackOptions`: what `repack` takes beside its files, validated once and frozen."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict, Unpack

import numpy as np
from pydantic import AfterValidator, BeforeValidator, model_validator

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
from h5async.packing.encodedsamples import image_format
from h5async.spelling import name_text


class RepackKeywords(TypedDict, total=False):
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
    """Samples in a chunk. Where a row has less than 1 KiB, a multiple: 16 KiB are in a chunk."""
    chunks: Mapping[str, Any] | None
    """The chunk shape of a dataset, by its path; 0 means the whole dimension. It wins over
    `chunk_samples`.
    """
    filter: str | None
    """How chunks are compressed: `none`, `lzf`, `gzip:4`, `shuffle+zstd:3`, ... None: as before."""
    dtype: Mapping[str, Any] | None
    """The datatype of a dataset of numbers, by its path; values are cast as NumPy casts them."""
    offsets: Mapping[str, Any] | None
    """For samples of any length: the dataset that says where those of a dataset of values begin, by
    the path of the latter. Where they end, or how long they are: `PATH:ends`, `PATH:lengths`.
    """
    encode: Mapping[str, Any] | None
    """Store images, uint8 (samples, height, width, 3), as encoded bytes: `png` or `jpeg:90`, by the
    path of their dataset, which is read as an `ImageField` then.
    """
    indices: Any
    """The samples to keep, in this order: what `indices` of `AsyncReader` takes."""
    shuffle: bool | str
    """The order of samples: `full` is a uniform permutation; `window` mixes samples of some chunks,
    and reads each chunk once.
    """
    seed: Integer
    """Determines the order of `shuffle`."""
    join: Literal["inner", "outer"] | None
    """Which variables (`var`) to keep of several files of AnnData: those of all files, or of any.
    None: they must be the same.
    """
    shards: int | str | None
    """Write files of about so many decoded bytes of samples, `OUT-00000.h5` and so on. OUT is all
    of them: virtual datasets, or a saved index if it ends in `.h5idx`.
    """
    virtual: Literal["keep", "copy"]
    """How to treat virtual datasets and external storage. `keep`: they refer to the same files.
    `copy`: their values are copied into the new file.
    """
    memory: int | str | None
    """The bytes of rows that may be in memory. None: 1 GiB, or a quarter of what is free."""
    num_threads: Integer | None
    """Threads that decode, and threads that encode."""
    allow_external: list[str]
    """Folders of other files that virtual datasets and external storage may refer to."""
    verify: bool
    """Read both in the end, and compare all objects, attributes and values."""
    resume: bool
    """Go on with an interrupted repack of the same files and options; begin if there is none."""
    overwrite: bool
    """Replace an existing file once the new one is complete, or begin an interrupted one anew."""


def _by_path(value: object) -> object:
    if isinstance(value, Mapping):
        return {name_text(path).strip("/"): one for path, one in value.items()}
    return {} if value is None else value


def _paths(value: object) -> object:
    found = _by_path(value)
    if not isinstance(found, dict) or not all(isinstance(one, str) for one in found.values()):
        raise ValueError('must map paths to paths, such as {"tokens": "offsets"}')
    return {path: one.strip("/") for path, one in found.items()}


def _shapes(value: object) -> object:
    found = _by_path(value)
    if not isinstance(found, dict):
        raise ValueError('must map paths to chunk shapes, such as {"data": (1, 224, 224, 3)}')
    shapes = {}
    for path, shape in found.items():
        sizes = shape.split(",") if isinstance(shape, str) else shape
        try:
            shapes[path] = tuple(int(n) for n in ([sizes] if isinstance(sizes, int) else sizes))
        except (TypeError, ValueError):
            raise ValueError(f"must be sizes such as 1,224,224,3 for {path}") from None
        if min(shapes[path], default=-1) < 0:
            raise ValueError(f"must be sizes such as 1,224,224,3 for {path}; 0: all")
    return shapes


def _dtypes(value: object) -> object:
    found = _by_path(value)
    if not isinstance(found, dict):
        raise ValueError('must map paths to dtypes, such as {"data": "float16"}')
    dtypes = {}
    for path, dtype in found.items():
        try:
            dtypes[path] = np.dtype(dtype)
        except TypeError as error:
            raise ValueError(f"{error}, for {path}") from error
        if dtypes[path].kind not in "biufc":
            raise ValueError(f"must be numbers, for {path}")
    return dtypes


def _formats(value: object) -> object:
    found = _by_path(value)
    if not isinstance(found, dict):
        raise ValueError('must map paths to formats, such as {"data": "jpeg:90"}')
    for spelled in found.values():
        image_format(str(spelled))
    return found


def _filter(text: str) -> str:
    parse_filters(text)
    return text


@documented(RepackKeywords)
class RepackOptions(Frozen):
    """The options of `repack`, validated once."""

    if TYPE_CHECKING:

        def __init__(self, **options: Unpack[RepackKeywords]) -> None: ...

    fields: Names | None = option(None, default_text="all with samples")
    only_fields: Bool = False
    num_dim: Natural = 0
    chunk_samples: Positive | None = None
    chunks: Annotated[Mapping[str, tuple[int, ...]], BeforeValidator(_shapes)] = option(
        {}, values="PATH=N,N,N"
    )
    filter: Annotated[str, AfterValidator(_filter)] | None = option(None, default_text="as before")
    dtype: Annotated[Mapping[str, Any], BeforeValidator(_dtypes)] = option({}, values="PATH=DTYPE")
    offsets: Annotated[Mapping[str, str], BeforeValidator(_paths)] = option(
        {}, values="PATH=PATH[:ends|:lengths]"
    )
    encode: Annotated[Mapping[str, str], BeforeValidator(_formats)] = option(
        {}, values="PATH=png|jpeg:90"
    )
    indices: Indices | None = option(None, values="A:B|PATH|{...}")
    shuffle: Shuffle = False
    seed: Int = 0
    join: Literal["inner", "outer"] | None = option(None, default_text="must be the same")
    shards: Size | None = option(None, values="SIZE")
    virtual: Literal["keep", "copy"] = "keep"
    memory: Size | None = option(None, values="SIZE")
    num_threads: Threads | None = None
    allow_external: tuple[Path, ...] = ()
    verify: Bool = False
    resume: Bool = False
    overwrite: Bool = False

    @model_validator(mode="after")
    def _check(self) -> RepackOptions:
        if self.only_fields and self.fields is None:
            raise ValueError("only_fields needs fields, and leaves out all others")
        return self

    @property
    def selects(self) -> bool:
        """Whether samples are left out, or come in another order."""
        return self.indices is not None or self.shuffle is not False

    @property
    def changes_storage(self) -> bool:
        """Whether datasets are stored in another way."""
        storage = self.chunk_samples, self.chunks, self.filter, self.dtype, self.encode
        return self.virtual == "copy" or any(one not in (None, {}) for one in storage)

    @property
    def filters(self) -> tuple[Filter, ...] | None:
        """The filters that are asked for, if any."""
        return None if self.filter is None else parse_filters(self.filter)

    def digested(self) -> dict[str, Any]:
        """Return the options on which the content of the file depends, as JSON can hold them."""
        aside = {"memory", "num_threads", "verify", "resume", "overwrite", "allow_external"}
        found = self.model_dump(exclude=aside)
        return {name: repr(value) for name, value in found.items()}
