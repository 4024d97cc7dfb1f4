"""Defines `ReaderConfig`: all options of a reader, validated once and frozen."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack

from pydantic import SerializerFunctionWrapHandler, model_serializer, model_validator

from h5async.config import values
from h5async.config.field import Field, Fields, check_names, kind_of
from h5async.config.files import (
    FileName,
    Files,
    Folder,
    Folders,
    Kept,
    ObjectName,
    Place,
    is_index,
    kind_of_file,
    load_file,
    matching_files,
    user_cache,
    with_options,
)
from h5async.config.frozen import REQUIRED, Frozen, documented, option
from h5async.config.keywords import ReaderOptions
from h5async.config.parts import Indices, Sampler, SequencesOption, Weights, plain_selection
from h5async.errors import ConfigError
from h5async.spelling import Spell, in_file, named
from h5async.system.interruptions import passing
from h5async.system.resources import usable_cores

_OF_SAMPLER = ("indices", "weights", "shuffle", "rank", "drop_last", "batch_values", "bucket")
_REPLACED_BY_FIELDS = ("data_field", "labels_field", "num_dim", "h_dim", "w_dim", "cha_dim")


@documented(ReaderOptions)
class ReaderConfig(Frozen):
    """All options of a reader, validated once.

    Examples
    --------
    >>> config = ReaderConfig(hdf5_path="sample_data/digits.h5", batch_size=64)
    >>> config.batch_size, config.shuffle, config.prefetch
    (64, False, 2)
    >>> with AsyncReader(config, shuffle="full") as reader:
    ...     print(reader.config.shuffle)
    full
    """

    if TYPE_CHECKING:

        def __init__(self, **options: Unpack[ReaderOptions]) -> None: ...

    hdf5_path: Files = option(REQUIRED)
    data_field: values.Name = "data"
    labels_field: values.NameOrEmpty = option(
        "labels", shell="Path of the dataset that holds the labels (--no-labels: there are none)."
    )
    fields: Fields | None = option(
        None,
        values="NAME=PATH",
        shell="Instead of `--data-field` and `--labels-field`: one field of a batch, by its"
        " name and its dataset's path.",
    )
    num_dim: values.SampleDimension = option(0, values="N|NAME|N,N")
    h_dim: values.Dimension | None = option(None, values="N|NAME")
    w_dim: values.Dimension | None = option(None, values="N|NAME")
    cha_dim: values.Dimension | None = option(None, values="N|NAME")
    batch_size: values.Positive = option(32, default_text="32; with batch_values, as many as fit")
    batch_values: values.Positive | None = None
    bucket: values.Positive | None = None
    shuffle: values.Shuffle = option(
        False,
        shell="The order of the samples. `none`: as in the file. `full`: a uniform permutation of"
        " all samples. `window`: chunks in random order, their samples mixed, so that each chunk is"
        " decoded once.",
    )
    window_bytes: values.Size = option(256 << 20, default_text="256 MiB", values="SIZE")
    seed: values.Int = 0
    indices: Indices | None = option(
        None,
        default_text="all of them",
        values="A:B|PATH|{...}",
        shell="The samples of an epoch: a slice (`40000:`); the path of a .npy file of integers or"
        " bools, or of such a dataset in the file; or a part of a split, as a table of TOML:"
        " `{name = 'train', parts = {train = 0.9, val = 0.1}}`.",
    )
    weights: Weights | None = option(
        None,
        values="PATH|balanced|{...}",
        shell="Draw samples with replacement: the path of a dataset in the file, with a number per"
        " sample; `balanced`: all labels are equally frequent; or a table of TOML of files and"
        " numbers.",
    )
    epoch_samples: values.Positive | None = option(None, default_text="as many as there are")
    sequences: SequencesOption = option(
        None,
        default_text="each file is one",
        values="{...}",
        shell="The sequences that steps never leave, as a table of TOML:"
        " `{groups = 'data/demo_*'}`.",
    )
    sampler: Sampler = None
    drop_last: values.Bool = False
    num_threads: values.Threads | None = option(
        None, default_text="usable cores, by affinity and CPU quota"
    )
    workers: values.Workers = option("thread", values="thread|process|N")
    prefetch: values.Positive = option(2, default_text="2; with workers=N, 2 N + 1")
    device: values.Device = option("auto", values="auto|cpu|cuda|cuda:N")
    pin_memory: values.Bool = False
    postprocess: values.Function = option(
        None,
        values="MODULE:FUNCTION",
        shell="A function that workers call as `f(*arrays)` with the host arrays of a batch. It"
        " returns the same number of arrays, each with the same number of rows, or a mapping of"
        " names to arrays, or nothing if it changed the arrays in place.",
    )
    postprocess_fields: values.Names | None = option(None, default_text="the fields")
    on_error: Literal["raise", "skip"] = "raise"
    max_skipped: values.Share | None = option(None, default_text="no limit", values="N|SHARE")
    timeout: values.Seconds = option(None, default_text="no limit")
    max_batch_bytes: values.Size | None = option(
        None, default_text="half of the free memory", values="SIZE"
    )
    decode: Literal["auto", "host", "device"] = "auto"
    cache: values.Cache = None
    cache_bytes: values.SizeOrZero | None = option(
        None,
        default_text="half of the free memory, or of the free disk; 0.8 of what the GPU has free",
        values="SIZE",
    )
    cache_dir: Folder | None = option(
        None, default_text="in the user's cache folder", values="FOLDER"
    )
    debug_lifetimes: values.Bool = False
    copy: values.Bool = False  # type: ignore[assignment]  # (which `Frozen` hides)
    rank: values.Natural | None = option(None, default_text="the launcher's")
    world_size: values.WorldSize | None = option(None, default_text="the launcher's")
    io: Literal["auto", "pread", "map"] = "auto"
    allow_external: Folders = option((), default_text="none", values="FOLDER")
    allow_missing: values.Bool = False
    storage_options: values.StorageOptions = option({}, default_text="none", values="NAME=VALUE")
    requests_in_flight: values.Positive = 32
    fetch_bytes: values.Size = option(256 << 20, default_text="256 MiB", values="SIZE")
    index_cache: Place = option(
        True,
        default_text="the user's cache folder",
        values="none|default|PATH",
        shell="Where to keep the index of the files, so that later readers open faster. `default`:"
        " in the user's cache folder. `none`: nowhere. A path: in that folder, or in that file,"
        " which ends in `.h5idx`.",
    )

    @model_validator(mode="after")
    def _check(self) -> ReaderConfig:
        if "prefetch" not in self.model_fields_set and self.num_helpers > 1:
            # Each helper fills one slot while another one waits, and the loop holds one. Measured:
            # with one slot per helper and the loop's, two helpers are 1.2 times as fast as one, not
            # twice. (`model_fields_set` stays as it is.)
            self.__dict__["prefetch"] = 2 * self.num_helpers + 1
        if self.workers != "thread" and any(isinstance(one, ObjectName) for one in self._paths):
            raise ValueError(
                f"a file object can only be read in this process; use {named('workers', 'thread')},"
                " or give its path or URL"
            )
        if "batch_size" not in self.model_fields_set and self.batch_values is not None:
            self.__dict__["batch_size"] = self.batch_values  # only values are limited
        if self.max_skipped is not None and self.on_error == "raise":
            raise ValueError(f"{named('max_skipped')} needs {named('on_error', 'skip')}")
        self._check_returned()
        self._check_cache()
        self.__dict__["hdf5_path"] = with_options(self.hdf5_path, self.storage_options, self.kept)
        self._check_order()
        self._check_rank()
        self._check_device()
        self._check_fields()
        self._check_sequences()
        return self

    def _check_returned(self) -> None:
        names = self.postprocess_fields
        if names is None:
            return
        if self.postprocess is None:
            raise ValueError(
                f"{named('postprocess_fields')} needs {named('postprocess')}, whose results it"
                " names"
            )
        if not names or len(set(names)) < len(names):
            raise ValueError("postprocess_fields: give at least one name, and each name once")
        check_names(names)

    def _check_cache(self) -> None:
        if self.cache == "device" and self.postprocess is not None:
            raise ValueError(
                f"{named('cache', 'device')} keeps rows on the GPU, and {named('postprocess')}"
                f" works on host arrays; use {named('cache', 'host')}"
            )
        if self.decode == "device" and self.workers != "thread":
            raise ValueError(
                f"{named('decode', 'device')} needs {named('workers', 'thread')}: helper processes"
                " decode what they read"
            )
        if self.decode == "device" and (self.postprocess is not None or self.cache == "host"):
            who = named("cache", "host") if self.postprocess is None else named("postprocess")
            raise ValueError(
                f"{named('decode', 'device')} leaves no rows on the host for {who}; use"
                f" {named('decode', 'host')}"
            )
        if self.cache_dir is not None and self.cache != "disk":
            raise ValueError(f"{named('cache_dir')} needs {named('cache', 'disk')}")
        if self.num_helpers > 1 and self.keeps_rows:
            raise ValueError(
                f"each of {self.num_helpers} helper processes would have to keep all rows; leave"
                f' out cache={self.cache!r}, or use workers="process"'
            )
        if self.cache_bytes is not None and self.cache is None:
            raise ValueError(
                f"{named('cache_bytes')} needs {named('cache', 'host')}, {named('cache', 'device')}"
                f" or {named('cache', 'disk')}"
            )

    def _check_order(self) -> None:
        if self.sampler is not None:
            for name in _OF_SAMPLER:
                if getattr(self, name) not in (None, False):
                    raise ValueError(
                        f"a sampler determines the samples and their order; leave out {named(name)}"
                    )
            if self.workers != "thread":
                use = named("workers", "thread")
                raise ValueError(f"a sampler runs in this process; use {use}")

    def _check_rank(self) -> None:
        if (self.rank is None) != (self.world_size is None):
            raise ValueError(
                f"give {named('rank')} and {named('world_size')} together, or neither: then they"
                " come from the launcher of this process"
            )
        if self.rank is not None and self.world_size is not None and self.rank >= self.world_size:
            below = named("world_size", self.world_size)
            raise ValueError(f"{named('rank')} must be below {below}, found {self.rank}")

    def _check_device(self) -> None:
        if self.pin_memory:
            for name in ("cache", "decode", "device"):
                value = getattr(self, name)
                if value == "device" or str(value).startswith("cuda"):
                    raise ValueError(
                        f"{named('pin_memory')} leaves batches on the host, found"
                        f" {named(name, value)}; choose one of the two"
                    )
        for name in ("cache", "decode"):
            if getattr(self, name) == "device" and self.device == "cpu":
                found = named("device", "cpu")
                raise ValueError(f"{named(name, 'device')} needs a GPU, found {found}")

    def _check_fields(self) -> None:
        if self.fields is not None:
            both = sorted(self.model_fields_set.intersection(_REPLACED_BY_FIELDS))
            if self.labels_field is None and "labels_field" in both:
                both.remove("labels_field")  # no labels except those in `fields`
            if both:
                raise ValueError(
                    f"give {named('fields')} or {named(both[0])}, not both; a Field"
                    " has num_dim and axes of its own"
                )
        elif (self.h_dim is None) != (self.w_dim is None) or (
            self.cha_dim is not None and self.h_dim is None
        ):
            raise ValueError(
                f"give {named('h_dim')} and {named('w_dim')} together, and"
                f" {named('cha_dim')} only with them"
            )

    def _check_sequences(self) -> None:
        several = [field for field in self.batch_fields.values() if field.per is None]
        pairs = [isinstance(field.num_dim, tuple) for field in several]
        if any(pairs) and not all(pairs):
            raise ValueError(
                "num_dim must be a pair, of sequences and of steps, for all fields, or for none"
            )
        given = self.sequences
        if given is not None and given.is_drawn:
            self._check_drawn_offset()
        kind = None if given is None else given.kind or (given.across and "across")
        if any(pairs) and kind is not None:
            raise ValueError(
                f"a pair as num_dim already defines the sequences; leave out {kind} of sequences"
            )

    def _check_drawn_offset(self) -> None:
        for name in ("cache", "batch_values", "bucket", "sampler"):
            is_given = self.keeps_rows if name == "cache" else getattr(self, name) is not None
            if is_given:
                raise ValueError(
                    'sequences: offset="random" changes the samples each epoch, for which'
                    f" {named(name)} is not supported; leave out one of them"
                )
        if self.indices is not None and getattr(self.indices, "by", None) != "sequence":
            raise ValueError(
                'sequences: offset="random" shifts samples, beyond those that'
                f' {named("indices")} selects; give Split(..., by="sequence"), or an offset that is'
                " a number"
            )

    @classmethod
    @passing()
    def load(
        cls,
        config: ReaderConfig | ReaderOptions | Mapping[str, Any] | str | os.PathLike[str] | None,
        **options: Unpack[ReaderOptions],
    ) -> ReaderConfig:
        """Merge a configuration in any form with options, which win over it.

        Parameters
        ----------
        config
            A `ReaderConfig`, a mapping of options, or the path of a file of options: TOML, or by
            its suffix JSON or YAML. Relative paths in it are relative to that file, and
            ``$VARIABLES`` in them are those of the environment.
        **options
            Single options.

        Raises
        ------
        ConfigError
            If the file cannot be read, an option is unknown or a value is invalid.

        Examples
        --------
        >>> config = ReaderConfig.load({"hdf5_path": "sample_data/digits.h5"}, batch_size=64)
        >>> config.batch_size
        64
        """
        if config is None:
            base: dict[str, Any] = {}
        elif isinstance(config, ReaderConfig):
            base = {name: getattr(config, name) for name in config.model_fields_set}
        elif isinstance(config, Mapping):
            base = {str(name): value for name, value in config.items()}
        elif isinstance(config, str | os.PathLike):
            path = Path(config)
            base = load_file(path)
            try:
                spell = in_file(kind_of_file(path))
                cls.check_names(base, spell)
                _check_tables(base, spell)
            except ConfigError as error:
                raise ConfigError(f"{path}: {error.marked}") from None
        else:
            raise ConfigError(
                "config must be a mapping, a ReaderConfig or the path of a file of options,"
                f" found {type(config).__name__}"
            )
        return cls(**{**base, **options})

    def with_fields(self, fields: Mapping[str, Field], **changed: Any) -> ReaderConfig:
        """Return the options with other fields, and with other changes."""
        names = self.model_fields_set.difference(_REPLACED_BY_FIELDS)
        kept = {name: getattr(self, name) for name in names}
        return ReaderConfig(**{**kept, "fields": fields, **changed})

    @model_serializer(mode="wrap")
    def _without_what_fields_replace(self, handler: SerializerFunctionWrapHandler) -> Any:
        """Leave out options that conflict with `fields`, so that `load` accepts what was dumped.

        (``labels_field=None`` does not conflict.)
        """
        found = handler(self)
        for name in _REPLACED_BY_FIELDS if self.fields is not None else ():
            if found.get(name, "") is not None or name != "labels_field":
                found.pop(name, None)
        return found

    def model_dump_json(self, *, indent: int | None = None, **options: Any) -> str:
        """Return the options as JSON; ``ReaderConfig.load(json.loads(text))`` restores them.

        pydantic's own method rejects paths that are not UTF-8. `indent` is the number of spaces per
        level, None for one line; `options` go to `model_dump`.

        Raises
        ------
        ConfigError
            If `postprocess` is a function that cannot be imported by name, or there is a `sampler`.
        """
        found = self.model_dump(**options)
        if "postprocess" in found:
            found["postprocess"] = values.function_path(self.postprocess)
        for name in ("indices", "weights", "sampler"):
            if found.get(name) is not None:
                found[name] = plain_selection(getattr(self, name))
        separators = (",", ":") if indent is None else None
        return json.dumps(found, indent=indent, separators=separators, default=values.plain)

    @property
    def batch_fields(self) -> dict[str, Field]:
        """The fields of a batch, by name, in order; those of `data_field` and the like included."""
        if self.fields is not None:
            return {name: one for name, one in self.fields.items() if one.per != "dataset"}
        axes: tuple[int | str, ...] | None = None
        if self.h_dim is not None and self.w_dim is not None:
            channels = () if self.cha_dim is None else (self.cha_dim,)
            of_samples = self.num_dim if isinstance(self.num_dim, tuple) else (self.num_dim,)
            axes = (*of_samples, *channels, self.h_dim, self.w_dim)
        fields = {"data": Field(self.data_field, self.num_dim, axes)}
        if self.labels_field is not None:
            pair = self.num_dim if isinstance(self.num_dim, tuple) else 0
            fields["labels"] = Field(self.labels_field, pair)
        return fields

    @property
    def static_fields(self) -> dict[str, Field]:
        """The fields with one value for the whole dataset, by name."""
        return {n: one for n, one in (self.fields or {}).items() if one.per == "dataset"}

    @property
    def files(self) -> list[FileName]:
        """The files of `hdf5_path`, in order, with the sorted matches of globs.

        Raises `ReadError` if a glob matches nothing.
        """
        return matching_files(self._paths)

    @property
    def kept(self) -> Kept | None:
        """Where fetched bytes are kept with `cache="disk"`; otherwise None."""
        if self.cache != "disk":
            return None
        folder = self.cache_dir or user_cache("mirrors")
        if folder is None:
            raise ValueError(
                f"there is no home folder to use for {named('cache', 'disk')}; set another folder"
                f" as {named('cache_dir')}"
            )
        return Kept(folder.absolute(), self.cache_bytes)

    @property
    def keeps_rows(self) -> bool:
        """Whether rows are kept as read, in memory of the host or of a GPU."""
        return self.cache in ("host", "device")

    @property
    def names_index(self) -> bool:
        """Whether `hdf5_path` names a saved index, whose files are opened when needed."""
        return any(map(is_index, self._paths))

    @property
    def _paths(self) -> tuple[FileName, ...]:
        return self.hdf5_path if isinstance(self.hdf5_path, tuple) else (self.hdf5_path,)

    @property
    def thread_count(self) -> int:
        """Threads of the pool: `num_threads`, or the cores that affinity and CPU quota allow."""
        if self.num_threads is None:
            return min(usable_cores(), values.MOST_THREADS)
        return self.num_threads

    @property
    def num_helpers(self) -> int:
        """Number of helper processes that fill slots; 0 if threads of this process do."""
        if self.workers == "thread":
            return 0
        return 1 if self.workers == "process" else self.workers

    @property
    def filler_threads(self) -> int:
        """Threads of this process, or of each helper process, which has at least one."""
        helpers = self.num_helpers
        return max(1, self.thread_count // helpers) if helpers else self.thread_count


def _check_tables(options: Mapping[str, Any], spell: Spell) -> None:
    fields = options.get("fields")
    for name, field in fields.items() if isinstance(fields, dict) else ():
        try:
            names = dict(field) if isinstance(field, dict) else {}
            kind_of(names.pop("kind", None)).check_names(names, spell)
        except ConfigError as error:
            raise ConfigError(f"fields: {name}: {error.marked}") from error
