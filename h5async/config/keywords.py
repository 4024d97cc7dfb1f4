"""Names and describes the keywords of readers, with the types that they accept.

Editors and type checkers see them in ``AsyncReader(**options: Unpack[ReaderOptions])``.
`ReaderConfig` declares the same names with the types of validated values. The docstrings are the
descriptions in help, on the command line and in docs/options.md.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, BinaryIO, Literal, TypeAlias, TypedDict

from numpy.typing import ArrayLike

from h5async.config.parts import Sequences, Split
from h5async.config.values import DatasetPath, DimensionLike, Integer, SampleDimensionLike

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

    hdf5_path: FilePath | BinaryIO | Sequence[FilePath | BinaryIO]
    """A file, a list of files, or a glob, whose matches are sorted. Several files are concatenated
    in this order. A saved index (`.h5idx`) stands for its files. `~` is the user's home. In a
    configuration file, paths are relative to that file. Also `s3://`, `gs://`, `az://`, `https://`,
    `http://`, and file objects of Python.
    """
    data_field: DatasetPath
    """Path of the dataset with the data."""
    labels_field: DatasetPath | None
    """Path of the dataset with the labels. None (in a TOML file `""`): no labels."""
    fields: Mapping[str, Any] | None  # paths and Fields; mypy infers `object` for a mix
    """The fields of a batch, in order, instead of `data_field` and `labels_field`: a mapping of
    names to paths, or to `Field` values, which also tell how samples are delivered.
    """
    num_dim: SampleDimensionLike
    """The sample dimension of the data, by number, or by name if the file names its dimensions
    (`time`); or a pair (on the command line `0,1`): the dimensions of sequences and of their steps.
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
    """Fill batches with samples of ragged and sparse fields up to this number of values;
    `batch_size`, if given, remains a limit. Of each sample, the field with the most values counts.
    With `bucket`, padding counts, too: samples times the values of the longest one. A sample above
    the limit is a batch of its own.
    """
    bucket: Integer | None
    """Group ragged or sparse samples of similar length, to reduce padding: sort samples by length
    within windows of this number of batches, and shuffle these batches if samples are shuffled.
    """
    shuffle: bool | Literal["full", "window"]
    """The order of the samples. False (on the command line `none`): as in the file. `full`, or
    True: a uniform permutation of all samples. `window`: chunks in random order, their samples
    mixed, so that each chunk is decoded once.
    """
    window_bytes: SizeLike
    """Memory for the chunks whose samples `shuffle=window` mixes; without shuffling, the maximum
    memory for chunks that several batches need.
    """
    seed: Integer
    """Seed of the order, which depends only on the seed, the epoch and the position."""
    indices: SelectionLike | None
    """The samples of an epoch: a slice, also as text (`40000:`); a range; an array of integers, or
    of bools, one per sample; the path of a `.npy` file with such an array, or of a dataset in the
    file; or a `Split`. `batch.index` still has the dataset's sample numbers.
    """
    weights: WeightsLike | None
    """Draw samples with replacement, in proportion to these weights: an array, or the path of a
    dataset in the file, with a number per sample; `balanced`: all labels are equally frequent, or
    `balanced:NAME`, all values of that field or dataset; or a mapping of files to numbers.
    """
    epoch_samples: Integer | None
    """The number of samples in an epoch. Each epoch continues where the previous one ended, in one
    pass after another over all samples, so that successive epochs cover the dataset. With
    `weights`, this many are drawn; with a `sampler`, it is the maximum number taken from it.
    """
    sequences: Sequences | Mapping[str, Any] | None
    """The sequences that steps never leave: `Sequences`, or a mapping of its parameters."""
    sampler: Iterable[Any] | None
    """An order of your own: an iterable of sample numbers, or of lists of them (the batches), such
    as PyTorch's samplers. Each epoch iterates over it anew, after calling its `set_epoch(epoch)` if
    it has one. Each process has its own.
    """
    drop_last: bool
    """Leave out the last batch of an epoch if it is short."""
    num_threads: Integer | None
    """Threads that read and decode, at most 1,024. 0: all work is done in `get_next_batch()`, or by
    one thread of a helper process.
    """
    workers: Literal["thread", "process"] | Integer
    """Where the threads run. `thread`: in this process. `process`: in one helper process. A number,
    at most 256: in that many helper processes, which fill slots in parallel and share
    `num_threads`, for a `postprocess` that holds the GIL.
    """
    prefetch: Integer
    """Number of slots for batches, allocated once; 2 is double buffering. Several helper processes
    need more: each fills one slot while another one waits, and the loop holds one.
    """
    device: str
    """Where batches are delivered. `cpu`: as NumPy arrays. `cuda`, or `cuda:1`: as CuPy arrays on a
    GPU. `auto`: on a GPU if there is one.
    """
    pin_memory: bool
    """Keep batches on the host, in pinned memory, from which PyTorch copies to a GPU without
    blocking.
    """
    postprocess: Callable[..., Any] | str | None
    """A function, or `module:function`, that workers call as `f(*arrays)` with the host arrays of a
    batch. It returns the same number of arrays, each with the same number of rows, or None if it
    changed the arrays in place; or a mapping of names to arrays, which replace the fields.
    """
    postprocess_fields: Sequence[str] | None
    """Names of the arrays that `postprocess` returns, in order, if they differ from the fields."""
    on_error: Literal["raise", "skip"]
    """How to treat damaged samples, and damaged or missing files. `raise`: raise an error. `skip`:
    leave such samples out of their batches, and such files out of the dataset; `reader.skipped`
    lists them.
    """
    max_skipped: Integer | float | None
    """With `on_error=skip`: the maximum number of samples of each rank's part of an epoch that may
    be skipped, or their maximum share, a float up to 1.0. Beyond it, the reader raises an error.
    Skipped files do not count.
    """
    timeout: float | None
    """Maximum seconds that `get_next_batch()` waits, up to 1,000,000,000."""
    max_batch_bytes: SizeLike | None
    """Maximum memory for all slots together, and for any single chunk, row or list of chunks that
    must be held as a whole; also for tables of samples that files declare, if larger than 64 MiB
    and 64 times the bytes of the files.
    """
    decode: Literal["auto", "host", "device"]
    """Where chunks are decoded for a GPU. `host`: by the threads. `device`: on the GPU. `auto`:
    where it is faster.
    """
    cache: Literal["host", "device", "disk"] | None
    """What to keep for later epochs. `host`, `device`: all rows, in the memory of the host or of
    the GPU. `disk`: the bytes read from object stores, the web or slow file systems, in files that
    all processes of a node share, and that later readers reuse.
    """
    cache_bytes: SizeLike | None
    """Maximum memory for the cache; with `cache=disk`, maximum size of the contents of its folder.
    """
    cache_dir: FilePath | None
    """The folder for `cache=disk`: on a local disk, or in memory (`/dev/shm`)."""
    debug_lifetimes: bool
    """Find batches that are used too late: each is a copy, which is overwritten when the next batch
    is requested.
    """
    copy: bool
    """Deliver batches that own their memory and stay valid, as `batch.copy()` does."""
    rank: Integer | None
    """The rank of this process: 0 to `world_size` - 1."""
    world_size: Integer | None
    """The number of processes that share each epoch."""
    io: Literal["auto", "pread", "map"]
    """How files are read. `pread`: never through a memory map. `map`: always. `auto`: mapped on
    local file systems.
    """
    allow_external: FilePath | Sequence[FilePath]
    """Folders: a file may refer to files in or below these, and in or below its own folder."""
    allow_missing: bool
    """Fill missing parts of a virtual dataset with its fill value, instead of raising an error."""
    storage_options: Mapping[str, Any] | None
    """Options of the client for object stores and the web (obstore), such as `aws_region`,
    `aws_endpoint`, `google_service_account` and `azure_storage_account_name`, and the tables
    `client_options` and `retry_config`. Credentials that are not given are found as the cloud's own
    tools find them.
    """
    requests_in_flight: Integer
    """Maximum number of requests to object stores and the web at a time."""
    fetch_bytes: SizeLike
    """Maximum memory for bytes fetched from object stores and the web, but not yet used.
    """
    index_cache: bool | FilePath
    """Where to keep the index of the files, so that later readers open faster. True (on the command
    line `default`): in the user's cache folder. False (`none`): nowhere. A path: in that folder, or
    in that file, which ends in `.h5idx`.
    """
