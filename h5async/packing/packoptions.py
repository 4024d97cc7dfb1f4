"""Defines `PackOptions`: what `pack` takes beside its sources, validated once and frozen."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict, Unpack

from pydantic import PlainValidator, model_validator

from h5async.codec.encoders import parse_filters
from h5async.config.frozen import Frozen, documented, option
from h5async.config.values import Bool, Integer, Names, Natural, Positive, Size, Threads
from h5async.system.resources import usable_cores


class PackKeywords(TypedDict, total=False):
    """The options of `pack`."""

    size: int | str | tuple[int, int] | None
    """Decode images, and resize them to this height and width (a number: both; or `HxW`): the
    largest part in the middle with that aspect ratio, as `ImageField(size=...)` does. Without it,
    their encoded bytes are kept.
    """
    on_error: Literal["raise", "skip"]
    """How to treat a sample that cannot be packed. `raise`: stop. `skip`: leave it out; all of them
    are listed in the end.
    """
    verify: bool
    """Decode each image whose bytes are kept, to find damaged ones. Else only headers and ends are
    looked at.
    """
    resume: bool
    """Go on with an interrupted pack of the same sources and options; begin if there is none."""
    append: bool
    """Add the samples to an existing file that `pack` made."""
    overwrite: bool
    """Replace an existing file once the new one is complete, or begin an interrupted one anew."""
    shards: int | str | None
    """Write files of about this size, such as `1GB`: `OUT-00000.h5`, ...; and OUT over them, a file
    of virtual datasets, or a saved index if it ends in `.h5idx`.
    """
    shuffle: bool
    """Pack the samples in random order, which `seed` determines."""
    seed: Integer
    """Determines the order of `shuffle`."""
    chunk_samples: Integer | None
    """The samples in a chunk of columns of fixed size, except plain numbers. None: one, or as many
    as fit in 64 KiB.
    """
    filter: str
    """How chunks are compressed: `none`, `lzf`, `gzip:4`, `shuffle+zstd:3`, ... `auto`:
    `shuffle+lzf` for columns of arrays that it shrinks by a third or more, else none.
    """
    varying: Sequence[str]
    """Columns of samples in Python that are of any length, if the first samples do not show it."""
    strings: Mapping[str, Integer]
    """Columns of strings that have a fixed length in the file: bytes of UTF-8, by column. Others
    have a variable length.
    """
    fill: Mapping[str, Any]
    """Values that stand for nulls of tables, by column."""
    memory: int | str
    """The bytes of samples that may be in memory at a time, whatever the size of the source."""
    num_threads: Integer | None
    """Threads that read, decode and compress; one more writes."""


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


@documented(PackKeywords)
class PackOptions(Frozen):
    """The options of `pack`, validated once."""

    if TYPE_CHECKING:

        def __init__(self, **options: Unpack[PackKeywords]) -> None: ...

    size: Annotated[Any, PlainValidator(_size)] = option(None, values="N|HxW")
    on_error: Literal["raise", "skip"] = "raise"
    verify: Bool = False
    resume: Bool = False
    append: Bool = False
    overwrite: Bool = False
    shards: Size | None = option(None, values="SIZE")
    shuffle: Bool = False
    seed: Natural = 0
    chunk_samples: Positive | None = None
    filter: str = "auto"
    varying: Names = ()
    strings: Mapping[str, Positive] = option({}, values="NAME=BYTES")
    fill: Mapping[str, Any] = option({}, values="NAME=VALUE")
    memory: Size = option(256 << 20, default_text="256MiB", values="SIZE")
    num_threads: Threads | None = option(None, default_text="usable cores")

    @model_validator(mode="after")
    def _check(self) -> PackOptions:
        if self.append and self.overwrite:
            raise ValueError("give append or overwrite, not both")
        if self.append and self.shards is not None:
            raise ValueError("append adds to one file; leave out shards")
        if self.filter != "auto":
            parse_filters(self.filter)
        return self

    def digested(self) -> dict[str, Any]:
        """Return the options on which the content of the file depends."""
        names = ("size", "shards", "shuffle", "seed", "chunk_samples", "filter")
        return {name: getattr(self, name) for name in (*names, "varying", "strings", "fill")}

    @property
    def threads(self) -> int:
        """The number of threads that make blocks."""
        return max(1, usable_cores() if self.num_threads is None else self.num_threads)
