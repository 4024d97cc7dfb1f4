"""The keywords that readers take, with the types of their values, for type checkers.

``AsyncReader(**options: Unpack[ReaderOptions])`` is how editors know the names, and what fits.
`ReaderConfig` and its kin say the same of validated values, and describe each option. The
docstrings here are copies of these descriptions, which ``scripts/make_options_page.py`` writes, and
a test compares.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, TypedDict

from numpy.typing import ArrayLike

from h5async.config.indices import Split
from h5async.config.partkeywords import (
    DatasetPath,
    DimensionLike,
    Integer,
    SampleDimensionLike,
)
from h5async.config.sequenceoptions import Sequences

FilePath: TypeAlias = str | bytes | os.PathLike[str] | os.PathLike[bytes]
SizeLike: TypeAlias = Integer | str  # bytes, or "512MiB"
SelectionLike: TypeAlias = slice | range | ArrayLike | os.PathLike[str] | Split | Mapping[str, Any]
WeightsLike: TypeAlias = ArrayLike | Mapping[Any, float]


class ReaderOptions(TypedDict, total=False):
    """The options of `AsyncReader`, `H5Dataset` and `ReaderConfig`, for type checkers.

    Examples
    --------
    >>> options: ReaderOptions = {"hdf5_path": "sample_data/digits.h5", "batch_size": 64}
    >>> with AsyncReader(**options) as reader:
    ...     print(len(reader))
    29
    """

    hdf5_path: FilePath | Sequence[FilePath]
    """A file, a list of files, or a glob, whose matches are sorted. Several files are one long
    dataset, in that order. A saved index (`.h5idx`) stands for the files that it is of. `~` is the
    user's home. In a configuration file, paths are relative to that file.
    """
    data_field: DatasetPath
    """Path of the dataset that holds the data."""
    labels_field: DatasetPath | None
    """Path of the dataset that holds the labels. None (in a TOML file `""`): no labels."""
    fields: Mapping[str, Any] | None  # of paths and fields, which mypy takes for objects
    """In place of `data_field` and `labels_field`: the fields of a batch, in their order. A mapping
    of names to paths, or to values of `Field`, which say how samples are delivered.
    """
    num_dim: SampleDimensionLike
    """Which dimension of the data counts the samples: its number, or its name, where the file names
    its dimensions (`time`); or two (on the command line `0,1`): those of sequences, and of their
    steps.
    """
    h_dim: DimensionLike | None
    """Dimension of an image's height; needs `w_dim`. The data is then delivered as (N, H, W), or
    with `cha_dim` as (N, C, H, W).
    """
    w_dim: DimensionLike | None
    """Dimension of an image's width; needs `h_dim`."""
    cha_dim: DimensionLike | None
    """Dimension of an image's channels; needs `h_dim` and `w_dim`."""
    batch_size: Integer
    """Samples in a batch."""
    batch_values: Integer | None
    """Fill batches with samples of ragged and sparse fields up to so many values; `batch_size`,
    where it is given, remains a bound. A sample counts the values of its longest field. With
    `bucket`, padding counts, too: samples times the values of the longest one. A sample that has
    more is a batch of its own.
    """
    bucket: Integer | None
    """Put ragged or sparse samples of like length together, so that little is to be padded: samples
    are sorted by length within windows of so many batches, and these batches are shuffled, if
    samples are.
    """
    shuffle: bool | Literal["full", "window"]
    """The order of the samples. False (on the command line `none`): as in the file. `full`, or
    True: a uniform permutation of all samples. `window`: chunks in random order, their samples
    mixed, so that each chunk is decoded once.
    """
    window_bytes: SizeLike
    """Memory for the chunks whose samples `shuffle=window` mixes; without shuffling, the most that
    is kept of chunks that several batches need.
    """
    seed: Integer
    """The order depends on the seed, the epoch and the position alone."""
    indices: SelectionLike | None
    """Which samples an epoch is made of: a slice, as text too (`40000:`); a range; an array of
    integers, or of bools, one for each sample; the path of a `.npy` file that holds such an array,
    or of a dataset in the file; or a `Split`. `batch.index` has the dataset's numbers all the same.
    """
    weights: WeightsLike | None
    """Draw samples with replacement, as often as these say: an array, or the path of a dataset in
    the file, with a number for each sample of the dataset; `balanced`: all labels are equally
    frequent; or a mapping of files to numbers.
    """
    epoch_samples: Integer | None
    """With `weights`: how many samples are drawn in an epoch. With a `sampler`: how many are taken
    of it at most.
    """
    sequences: Sequences | Mapping[str, Any] | None
    """The sequences that steps never leave: `Sequences`, or a mapping of its parameters."""
    sampler: Iterable[Any] | None
    """An order of your own: an iterable of sample numbers, or of lists of them, which are the
    batches; it is begun anew for each epoch, after `set_epoch(epoch)`, if it has that. PyTorch's
    samplers are such. Each process has its own.
    """
    drop_last: bool
    """Leave out the last batch of an epoch where it is short."""
    num_threads: Integer | None
    """Threads that read and decode, 1,024 at most. 0: all work is done in `get_next_batch()`, or by
    one thread of a helper process.
    """
    workers: Literal["thread", "process"] | Integer
    """Where the threads run. `thread`: in this process. `process`: in one helper process. A number:
    in so many helper processes, which fill slots side by side and divide `num_threads` among them,
    for a `postprocess` that holds the GIL.
    """
    prefetch: Integer
    """Slots for batches, allocated once; 2 is double buffering. Several helper processes need more:
    each fills one while another one waits for it, and the loop holds one.
    """
    device: str
    """Where batches are delivered. `cpu`: as NumPy arrays. `cuda`, or `cuda:1`: as CuPy arrays on a
    GPU. `auto`: on a GPU if there is one.
    """
    pin_memory: bool
    """Leave batches on the host, in pinned memory, from which PyTorch copies to a GPU without
    blocking.
    """
    postprocess: Callable[..., Any] | str | None
    """A function, or `module:function`, that workers call as `f(*arrays)` with the host arrays of a
    batch. It returns the same number of arrays, each with the same number of rows, or None if it
    changed the arrays in place.
    """
    timeout: float | None
    """Seconds that `get_next_batch()` waits at most, up to 1,000,000,000."""
    max_batch_bytes: SizeLike | None
    """Memory that all slots may take together, and any one chunk, row or list of chunks that must
    be held whole.
    """
    decode: Literal["auto", "host", "device"]
    """Where chunks are decoded for a GPU. `host`: by the threads. `device`: on the GPU. `auto`:
    where it is faster.
    """
    cache: Literal["host", "device"] | None
    """Keep all rows for later epochs, in the memory of the host or of the GPU."""
    cache_bytes: SizeLike | None
    """Memory that the cache may take."""
    debug_lifetimes: bool
    """Find batches that are used too late: each is a copy, which is overwritten when the next batch
    is asked for.
    """
    copy: bool
    """Deliver batches that have memory of their own, and last, as `batch.copy()` does."""
    rank: Integer | None
    """The number of this process among `world_size`."""
    world_size: Integer | None
    """How many processes share each epoch."""
    io: Literal["auto", "pread", "map"]
    """How files are read. `pread`: never through a memory map. `map`: always. `auto`: mapped on
    local file systems.
    """
    allow_external: FilePath | Sequence[FilePath]
    """Folders below which a file may refer to other files, if these do not lie beside it."""
    allow_missing: bool
    """What is missing of a virtual dataset has its fill value, and is no error."""
    index_cache: bool | FilePath
    """Where to keep what was learnt of the files, so that later readers open faster. True (on the
    command line `default`): in the user's cache folder. False (`none`): nowhere. A path: in that
    folder, or in that file, which ends in `.h5idx`.
    """
