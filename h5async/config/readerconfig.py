"""Defines `ReaderConfig`: all options of a reader, validated once and frozen."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Unpack

from pydantic import Field as Bound
from pydantic import (
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)

from h5async.config.configfile import kind_of_file, load_file
from h5async.config.cores import usable_cores
from h5async.config.field import Field, Fields, kind_of
from h5async.config.files import FileName, Files, Folders, Place, is_index, matching_files
from h5async.config.frozen import REQUIRED, Frozen, documented, option
from h5async.config.indices import Indices, Sampler, Weights, plain_selection
from h5async.config.sequenceoptions import SequencesOption
from h5async.config.values import (
    MOST_THREADS,
    AsInteger,
    Bool,
    Dimension,
    Function,
    Int,
    Name,
    Natural,
    Positive,
    SampleDimension,
    Seconds,
    Size,
    SizeOrZero,
    Threads,
    Workers,
    function_path,
    plain,
)
from h5async.errors import ConfigError
from h5async.spelling import Where as Spelling
from h5async.spelling import named
from h5async.system.interruptions import passing

if TYPE_CHECKING:
    from h5async.config.keywords import ReaderOptions

MAX_WORLD_SIZE = 2**31 - 1  # MPI, PyTorch and JAX count processes by 32-bit integers

_WINDOW = (
    "`window`: chunks in random order, their samples mixed, so that each chunk is decoded once."
)
_DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")
_REPLACED_BY_FIELDS = ("data_field", "labels_field", "num_dim", "h_dim", "w_dim", "cha_dim")


@documented
class ReaderConfig(Frozen):
    """All options of a reader, validated once.

    Raises
    ------
    ConfigError
        If an option is unknown or its value is invalid.

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

    hdf5_path: Files = option(
        REQUIRED,
        "A file, a list of files, or a glob, whose matches are sorted. Several files are"
        " concatenated in this order. A saved index (`.h5idx`) stands for its files. `~` is the"
        " user's home. In a configuration file, paths are relative to that file.",
    )
    data_field: Name = option("data", "Path of the dataset with the data.")
    labels_field: Name | None = option(
        "labels",
        'Path of the dataset with the labels. None (in a TOML file `""`): no labels.',
        shell="Path of the dataset that holds the labels (--no-labels: there are none).",
    )
    fields: Fields | None = option(
        None,
        "The fields of a batch, in order, instead of `data_field` and `labels_field`: a"
        " mapping of names to paths, or to `Field` values, which say how samples are"
        " delivered.",
        values="NAME=PATH",
        shell="Instead of `--data-field` and `--labels-field`: one field of a batch, by its"
        " name and its dataset's path.",
    )
    num_dim: SampleDimension = option(
        0,
        "The dimension of the data that counts the samples, by number, or by name if the file"
        " names its dimensions (`time`); or a pair (on the command line `0,1`): those of"
        " sequences and of their steps.",
        values="N|NAME|N,N",
    )
    h_dim: Dimension | None = option(
        None,
        "Dimension of an image's height; needs `w_dim`. The data is then delivered as (N, H,"
        " W), or with `cha_dim` as (N, C, H, W).",
        values="N|NAME",
    )
    w_dim: Dimension | None = option(
        None, "Dimension of an image's width; needs `h_dim`.", values="N|NAME"
    )
    cha_dim: Dimension | None = option(
        None, "Dimension of an image's channels; needs `h_dim` and `w_dim`.", values="N|NAME"
    )
    batch_size: Positive = option(
        32, "Samples in a batch.", default_text="32; with batch_values, as many as fit"
    )
    batch_values: Positive | None = option(
        None,
        "Fill batches with samples of ragged and sparse fields up to this number of values;"
        " `batch_size`, if given, remains a limit. A sample counts the values of its longest"
        " field. With `bucket`, padding counts, too: samples times the values of the longest"
        " one. A larger sample is a batch of its own.",
    )
    bucket: Positive | None = option(
        None,
        "Group ragged or sparse samples of similar length, to reduce padding: sort samples by"
        " length within windows of this number of batches, and shuffle these batches, if samples"
        " are shuffled.",
    )
    shuffle: Literal[False, "full", "window"] = option(
        False,
        "The order of the samples. False (on the command line `none`): as in the file. `full`,"
        f" or True: a uniform permutation of all samples. {_WINDOW}",
        shell="The order of the samples. `none`: as in the file. `full`: a uniform permutation of"
        f" all samples. {_WINDOW}",
    )
    window_bytes: Size = option(
        256 << 20,
        "Memory for the chunks whose samples `shuffle=window` mixes; without shuffling, the"
        " maximum memory for chunks that several batches need.",
        default_text="256 MiB",
        values="SIZE",
    )
    seed: Int = option(
        0, "Seed of the order, which depends only on the seed, the epoch and the position."
    )
    indices: Indices | None = option(
        None,
        "The samples of an epoch: a slice, also as text (`40000:`); a range; an array of"
        " integers, or of bools, one per sample; the path of a `.npy` file with such an array,"
        " or of a dataset in the file; or a `Split`. `batch.index` still has the dataset's"
        " sample numbers.",
        default_text="all of them",
        values="A:B|PATH|{...}",
        shell="The samples of an epoch: a slice (`40000:`); the path of a .npy file of integers or"
        " bools, or of such a dataset in the file; or a part of a split, as a table of TOML:"
        " `{name = 'train', parts = {train = 0.9, val = 0.1}}`.",
    )
    weights: Weights | None = option(
        None,
        "Draw samples with replacement, in proportion to these weights: an array, or the path"
        " of a dataset in the file, with a number per sample; `balanced`: all labels are equally"
        " frequent; or a mapping of files to numbers.",
        values="PATH|balanced|{...}",
        shell="Draw samples with replacement: the path of a dataset in the file, with a number per"
        " sample; `balanced`: all labels are equally frequent; or a table of TOML of files and"
        " numbers.",
    )
    epoch_samples: Positive | None = option(
        None,
        "With `weights`: the number of samples drawn in an epoch. With a `sampler`: the maximum"
        " number of samples taken from it.",
        default_text="as many as there are",
    )
    sequences: SequencesOption = option(
        None,
        "The sequences that steps never leave: `Sequences`, or a mapping of its parameters.",
        default_text="each file is one",
        values="{...}",
        shell="The sequences that steps never leave, as a table of TOML:"
        " `{groups = 'data/demo_*'}`.",
    )
    sampler: Sampler = option(
        None,
        "An order of your own: an iterable of sample numbers, or of lists of them, which are"
        " the batches, such as PyTorch's samplers. Each epoch iterates it again, after calling"
        " its `set_epoch(epoch)`, if it has one. Each process has its own.",
    )
    drop_last: Bool = option(False, "Leave out the last batch of an epoch if it is short.")
    num_threads: Threads | None = option(
        None,
        f"Threads that read and decode, at most {MOST_THREADS:,}. 0: all work is done in"
        " `get_next_batch()`, or by one thread of a helper process.",
        default_text="usable cores, by affinity and CPU quota",
    )
    workers: Workers = option(
        "thread",
        "Where the threads run. `thread`: in this process. `process`: in one helper process. A"
        " number, at most 256: in that many helper processes, which fill slots side by side and"
        " share `num_threads`, for a `postprocess` that holds the GIL.",
        values="thread|process|N",
    )
    prefetch: Positive = option(
        2,
        "Slots for batches, allocated once; 2 is double buffering. Several helper processes"
        " need more: each fills one while another one waits for it, and the loop holds one.",
        default_text="2; with workers=N, 2 N + 1",
    )
    device: str = option(
        "auto",
        "Where batches are delivered. `cpu`: as NumPy arrays. `cuda`, or `cuda:1`: as CuPy arrays"
        " on a GPU. `auto`: on a GPU if there is one.",
        values="auto|cpu|cuda|cuda:N",
    )
    pin_memory: Bool = option(
        False,
        "Keep batches on the host, in pinned memory, from which PyTorch copies to a GPU without"
        " blocking.",
    )
    postprocess: Function = option(
        None,
        "A function, or `module:function`, that workers call as `f(*arrays)` with the host arrays"
        " of a batch. It returns the same number of arrays, each with the same number of rows, or"
        " None if it changed the arrays in place.",
        values="MODULE:FUNCTION",
        shell="A function that workers call as `f(*arrays)` with the host arrays of a batch. It"
        " returns the same number of arrays, each with the same number of rows, or nothing if it"
        " changed the arrays in place.",
    )
    timeout: Seconds = option(
        None,
        "Maximum seconds that `get_next_batch()` waits, up to 1,000,000,000.",
        default_text="no limit",
    )
    max_batch_bytes: Size | None = option(
        None,
        "Maximum memory for all slots together, and for any single chunk, row or list"
        " of chunks that must be held as a whole; also for tables of samples that files"
        " declare, if larger than 64 MiB and 64 times the bytes of the files.",
        default_text="half of the free memory",
        values="SIZE",
    )
    decode: Literal["auto", "host", "device"] = option(
        "auto",
        "Where chunks are decoded for a GPU. `host`: by the threads. `device`: on the GPU. `auto`:"
        " where it is faster.",
    )
    cache: Literal["host", "device"] | None = option(
        None, "Keep all rows for later epochs, in the memory of the host or of the GPU."
    )
    cache_bytes: SizeOrZero | None = option(
        None,
        "Maximum memory for the cache.",
        default_text="half of the free memory; 0.8 of what the GPU has free",
        values="SIZE",
    )
    debug_lifetimes: Bool = option(
        False,
        "Find batches that are used too late: each is a copy, which is overwritten when the"
        " next batch is requested.",
    )
    copy: Bool = option(  # type: ignore[assignment]  # (which `Frozen` hides)
        False,
        "Deliver batches that own their memory and stay valid, as `batch.copy()` does.",
    )
    rank: Natural | None = option(
        None, "The number of this process among `world_size`.", default_text="the launcher's"
    )
    world_size: Annotated[int, Bound(strict=True, ge=1, le=MAX_WORLD_SIZE), AsInteger] | None = (
        option(
            None, "The number of processes that share each epoch.", default_text="the launcher's"
        )
    )
    io: Literal["auto", "pread", "map"] = option(
        "auto",
        "How files are read. `pread`: never through a memory map. `map`: always. `auto`: mapped on"
        " local file systems.",
    )
    allow_external: Folders = option(
        (),
        "A file may refer to other files beside it, and below these folders.",
        default_text="none",
        values="FOLDER",
    )
    allow_missing: Bool = option(
        False,
        "Fill missing parts of a virtual dataset with its fill value, instead of raising an error.",
    )
    index_cache: Place = option(
        True,
        "Where to keep the index of the files, so that later readers open faster. True (on the"
        " command line `default`): in the user's cache folder. False (`none`): nowhere. A path:"
        " in that folder, or in that file, which ends in `.h5idx`.",
        default_text="the user's cache folder",
        values="none|default|PATH",
        shell="Where to keep the index of the files, so that later readers open faster.  `default`:"
        " in the user's cache folder. `none`: nowhere. A path: in that folder, or in that file,"
        " which ends in `.h5idx`.",
    )

    @field_validator("labels_field", mode="before")
    @classmethod
    def _no_labels(cls, value: object) -> object:
        return None if value in ("", b"") else value  # TOML has no null: "" means no labels there

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

    @field_validator("cache", mode="before")
    @classmethod
    def _no_cache(cls, value: object) -> object:
        return value or None  # TOML has no null: "" means no cache there

    @model_validator(mode="after")
    def _check(self) -> ReaderConfig:
        if "prefetch" not in self.model_fields_set and self.num_helpers > 1:
            # Each fills one slot while another one waits, and the loop holds one. Measured: with
            # one per helper and the loop's, two helpers are 1.2 times as fast as one, not 2 times.
            # (`model_fields_set` stays as it is.)
            self.__dict__["prefetch"] = 2 * self.num_helpers + 1
        if "batch_size" not in self.model_fields_set and self.batch_values is not None:
            self.__dict__["batch_size"] = self.batch_values  # only values are limited
        self._check_cache()
        self._check_order()
        self._check_rank()
        self._check_device()
        self._check_fields()
        self._check_sequences()
        return self

    def _check_cache(self) -> None:
        if self.cache == "device" and self.postprocess is not None:
            raise ValueError(
                f"{named('cache', 'device')} keeps rows on the GPU, and {named('postprocess')}"
                " works on"
                f" host arrays; use {named('cache', 'host')}"
            )
        if self.decode == "device" and self.workers != "thread":
            raise ValueError(
                f"{named('decode', 'device')} needs {named('workers', 'thread')}: helper processes"
                " decode what they read"
            )
        if self.decode == "device" and (self.postprocess is not None or self.cache == "host"):
            by_cache = named("cache", "host")
            who = by_cache if self.postprocess is None else named("postprocess")
            raise ValueError(
                f"{named('decode', 'device')} leaves no rows on the host for {who}; use"
                f" {named('decode', 'host')}"
            )
        if self.num_helpers > 1 and self.cache is not None:
            raise ValueError(
                f"each of {self.num_helpers} helper processes would have to keep all rows; leave"
                f' out cache={self.cache!r}, or use workers="process"'
            )
        if self.cache_bytes is not None and self.cache is None:
            raise ValueError(
                f"{named('cache_bytes')} needs {named('cache', 'host')} or"
                f" {named('cache', 'device')}"
            )

    def _check_order(self) -> None:
        if self.sampler is not None:
            for name in (
                *("indices", "weights", "shuffle", "rank", "drop_last"),
                *("batch_values", "bucket"),
            ):
                if getattr(self, name) not in (None, False):
                    raise ValueError(
                        f"a sampler decides which samples come, and when; leave out {named(name)}"
                    )
            if self.workers != "thread":
                raise ValueError(
                    f"a sampler runs in this process; use {named('workers', 'thread')}"
                )
        if self.weights is not None and self.shuffle == "window":
            raise ValueError(
                f"samples are drawn in random order by {named('weights')}; leave out"
                f" {named('shuffle', 'window')}"
            )
        if self.epoch_samples is not None and self.weights is None and self.sampler is None:
            raise ValueError(f"{named('epoch_samples')} needs {named('weights')}, or a sampler")

    def _check_rank(self) -> None:
        if (self.rank is None) != (self.world_size is None):
            raise ValueError(
                f"give {named('rank')} and {named('world_size')} together, or neither: then they"
                " come from the launcher of this process"
            )
        if self.rank is not None and self.world_size is not None and self.rank >= self.world_size:
            raise ValueError(
                f"{named('rank')} must be below"
                f" {named('world_size', self.world_size)}, found {self.rank}"
            )

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
                raise ValueError(
                    f"{named(name, 'device')} needs a GPU, found {named('device', 'cpu')}"
                )

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
        pairs = [isinstance(field.num_dim, tuple) for field in self.batch_fields.values()]
        if any(pairs) and not all(pairs):
            raise ValueError(
                "num_dim must be a pair, of sequences and of steps, for all fields, or for none"
            )
        kind = None if self.sequences is None else self.sequences.kind
        if any(pairs) and kind is not None:
            raise ValueError(
                f"a pair as num_dim says what a sequence is; leave out {kind} of sequences"
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
                cls.check_names(base, kind_of_file(path))
                _check_tables(base, kind_of_file(path))
            except ConfigError as error:
                raise ConfigError(f"{path}: {error.marked}") from None
        else:
            raise ConfigError(
                "config must be a mapping, a ReaderConfig or the path of a file of options,"
                f" found {type(config).__name__}"
            )
        return cls(**{**base, **options})

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
            found["postprocess"] = function_path(self.postprocess)
        for name in ("indices", "weights", "sampler"):
            if found.get(name) is not None:
                found[name] = plain_selection(getattr(self, name))
        separators = (",", ":") if indent is None else None
        return json.dumps(found, indent=indent, separators=separators, default=plain)

    @property
    def batch_fields(self) -> dict[str, Field]:
        """The fields of a batch, by name, in order, with `data_field` and the like resolved."""
        if self.fields is not None:
            return dict(self.fields)
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
    def files(self) -> list[FileName]:
        """The files of `hdf5_path`, in order, with the sorted matches of globs.

        Raises `ReadError` if a glob matches nothing.
        """
        several = self.hdf5_path if isinstance(self.hdf5_path, tuple) else (self.hdf5_path,)
        return matching_files(several)

    @property
    def names_index(self) -> bool:
        """Whether `hdf5_path` names a saved index, whose files are opened when needed."""
        several = self.hdf5_path if isinstance(self.hdf5_path, tuple) else (self.hdf5_path,)
        return any(map(is_index, several))

    @property
    def thread_count(self) -> int:
        """Threads of the pool: `num_threads`, or the cores that affinity and CPU quota allow."""
        if self.num_threads is None:
            return min(usable_cores(), MOST_THREADS)
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


def _check_tables(options: Mapping[str, Any], where: Spelling) -> None:
    """Check the option names in a file's tables of fields."""
    fields = options.get("fields")
    for name, field in fields.items() if isinstance(fields, dict) else ():
        try:
            names = dict(field) if isinstance(field, dict) else {}
            kind_of(names.pop("kind", None)).check_names(names, where)
        except ConfigError as error:
            raise ConfigError(f"fields: {name}: {error.marked}") from error
