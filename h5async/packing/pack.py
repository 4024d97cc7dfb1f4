"""Packs samples into HDF5: sources and options enter; a file, or shards and their union, leaves.

Threads make blocks of samples (`sources/`, `encodedsamples.py`), which are appended in order to a
file (`packedfile.py`).
"""

from __future__ import annotations

import itertools
import math
import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from copy import copy
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple, TypeGuard, Unpack

import numpy as np

from h5async.config.files import is_index, matching_files, paths_text
from h5async.errors import ConfigError, DatasetError, ReadError
from h5async.order.selection import permute
from h5async.packing.encodedsamples import Samples, encoded_columns, made_block, samples_of
from h5async.packing.newfiles import join_shards, remove_other_shards, shard_path
from h5async.packing.packedfile import VERSION, PackedFile, Written
from h5async.packing.safefile import exists, is_begun, require_new
from h5async.packing.schema import Block, columns_of
from h5async.packing.sources import (
    ListedSource,
    Source,
    Work,
    digest_of,
    folders,
    reading_file,
    tables,
)
from h5async.packing.sources.arrays import ArraySource, RowSource, array_files
from h5async.packing.sources.folders import FolderSource
from h5async.packing.sources.tables import (
    EpisodeSource,
    HuggingFaceSource,
    TableSource,
    saved_dataset,
)
from h5async.packing.writeoptions import PackKeywords, PackOptions, RepackOptions
from h5async.spelling import named
from h5async.system.jobs import run_jobs

Progress = Callable[[int, int | None, int], None]  # samples done, total samples, bytes done
_ARRAYS = (".npy", ".npz")
_SAVED = ("state.json", "dataset_dict.json")  # in folders of saved Hugging Face datasets
_KINDS = (
    "folders of images or audio, a folder of episodes, a saved Hugging Face dataset, or .tar,"
    " .tar.gz, .parquet, .arrow, .feather, .csv, .npy and .npz files"
)
_BLOCKS_AT_A_TIME = 8  # blocks are small enough that this many fit in the memory
_DECODED_ROWS = 16
_PROBE_SECONDS = 1.0  # of an estimate


class Packed(NamedTuple):
    """The result of `pack`.

    `samples` is the number of samples in the file, and `nbytes` the size of all files. `bad` lists
    the names of skipped samples with the reasons; `converted` is the number of images that Pillow
    converted to PNG. `columns` tells how each column is stored; `notes` lists parts of the source
    that were left out.
    """

    path: Path
    samples: int
    nbytes: int
    seconds: float
    columns: Mapping[str, str]
    bad: Sequence[tuple[str, str]]
    converted: int
    notes: Sequence[str]


def pack(
    sources: Any,
    out: str | os.PathLike[str],
    *,
    progress: Progress | None = None,
    ray: str | None = None,
    **options: Unpack[PackKeywords],
) -> Packed:
    """Pack samples into an HDF5 file.

    Parameters
    ----------
    sources
        One or more paths of folders and files; a mapping of names to arrays; a Hugging Face
        dataset; or an iterable of dictionaries. See docs/packing.md.
    out
        The file to write.
    progress
        A function that is called with the number of samples packed so far, the total (or None if
        unknown), and the number of bytes packed.
    ray
        Pack `shards` in jobs on this Ray cluster: its address, or ``"auto"``. See docs/ray.md.
    **options
        See `PackOptions`.

    Raises
    ------
    H5AsyncError
        If a source cannot be read, a sample cannot be packed, or the file cannot be written.
        ``resume=True`` continues an interrupted pack.

    Examples
    --------
    >>> packed = h5async.pack({"data": np.eye(3), "labels": [2, 0, 1]}, "three.h5")
    >>> with AsyncReader(hdf5_path="three.h5", batch_size=3) as reader:
    ...     data, labels = reader.get_next_batch()
    ...     print(labels)
    [2 0 1]
    """
    chosen, began = PackOptions(**options), perf_counter()
    source, path = open_source(sources, chosen), Path(out)
    made_of = [VERSION, source.digest(), sorted(chosen.digested().items()), chosen.append]
    digest = digest_of(made_of)
    _require_new(path, chosen)
    if ray is None:
        files = _pack(source, path, chosen, digest, progress or (lambda *_: None))
    else:
        shards = _Shards(sources, source, path, chosen, digest)
        files = shards.pack(ray, progress or (lambda *_: None))
    paths = [file.path for file in files]
    if chosen.shards is not None:
        if chosen.overwrite:
            remove_other_shards(path, len(paths))
        counts = {file.path: file.samples for file in files}
        how = RepackOptions(resume=chosen.resume, overwrite=chosen.overwrite)
        join_shards(path, counts, files[-1].datasets, how)
        paths.append(path)
    return Packed(
        path,
        sum(file.samples for file in files),
        sum(one.stat().st_size for one in paths),
        perf_counter() - began,
        files[-1].stored,
        [one for file in files for one in file.bad],
        sum(file.converted for file in files),
        source.notes,
    )


def _require_new(path: Path, options: PackOptions) -> None:
    if options.shards is None and is_index(path):
        raise ConfigError(f"{path}: only {named('shards')} are packed into a saved index")
    if options.shards is not None and path.exists() and not (options.resume or options.overwrite):
        raise exists(path)


def _pack(
    source: Source, path: Path, options: PackOptions, digest: str, progress: Progress
) -> list[Written]:
    """Pack the samples into one file, or into shards one after the other."""
    files: list[PackedFile] = []
    nbytes, most = 0, math.inf if options.shards is None else options.shards
    with Blocks(source, options) as blocks:
        while True:
            last = files[-1] if files else None
            at = path if options.shards is None else shard_path(path, len(files))
            if last is not None and (options.overwrite or not is_begun(at)):
                blocks.begin(last.taken, last.encoded)
                if blocks.following is None:
                    return [one.written for one in files]
            with PackedFile(at, source, options, f"{digest} {len(files)}", last) as file:
                files.append(file)
                for _ in _filled(file, blocks, source, most):
                    progress(file.taken, source.count, nbytes + file.nbytes)
            if options.shards is None:
                return [file.written]
            nbytes += file.nbytes


def _filled(file: PackedFile, blocks: Blocks, source: Source, most: float) -> Iterator[None]:
    """Append blocks until a file has `most` bytes, or all samples; yield after each."""
    if file.is_finished:
        return
    blocks.begin(file.taken, file.encoded)
    file.encoded = blocks.encoded
    while file.nbytes < most and blocks.following is not None:
        file.add(blocks.take())
        yield
    source.files.check()
    file.finish()


class _Shards:
    """Packs parts of the sources as shards, in other processes that open the sources again.

    Parts are equal numbers of samples, or whole files if these can only be read in order. All
    shards have the columns of the first block.
    """

    def __init__(
        self, sources: Any, source: Source, path: Path, options: PackOptions, digest: str
    ) -> None:
        if options.shards is None or not (source.files_are_sources or _is_listed(source)):
            raise ConfigError(
                f"{source.name} cannot be packed on Ray, where each job packs a shard: give"
                f" {named('shards')}, and folders or files that jobs can read independently"
            )
        self._sources, self._path, self._digest, self._all = sources, path, digest, source.digest()
        threads = max(1, options.num_threads or 1)
        resume = options.resume or not options.overwrite  # a job resumes if its worker dies
        changed = {"num_threads": threads, "resume": resume, "overwrite": not resume}
        self._options = options.model_copy(update=changed)
        self._source: Source | None = source
        with Blocks(source, options) as blocks:
            blocks.begin(0, None)
            first = blocks.following
        if first is None or not first.kept:
            raise DatasetError(f"{source.name} has no samples at its start that can be packed")
        self._encoded, self._like = blocks.encoded, columns_of(first, blocks.encoded, options)
        coded = [name for name, one in self._like.items() if one.form == "codes"]
        if coded:
            raise ConfigError(
                f'{source.name}: column "{coded[0]}" has categories, which each shard would number'
                " on its own; pack it without Ray"
            )
        row_nbytes = first.nbytes / first.taken
        if source.nbytes and options.size is None and source.count:
            row_nbytes = source.nbytes / source.count
        self._parts = _parts_of(source, options.shards, row_nbytes)
        if not (options.resume or options.overwrite):
            require_new(shard_path(path, number) for number in range(len(self._parts)))

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the open source and the parts, which workers do not need."""
        return {**self.__dict__, "_source": None, "_parts": ()}

    def pack(self, ray: str, progress: Progress) -> list[Written]:
        """Pack all shards on Ray."""
        assert self._source is not None
        files: list[Written] = []
        jobs = run_jobs(self, enumerate(self._parts), ray, self._options.threads)
        for file in jobs:
            files.append(file)
            done = sum(one.samples + len(one.bad) for one in files)
            progress(done, self._source.count, sum(one.nbytes for one in files))
        return files

    def __call__(self, job: tuple[int, range | list[str]]) -> Written:
        """Pack a shard: a range of samples, or files."""
        number, part = job
        begin, end = (part.start, part.stop) if isinstance(part, range) else (0, None)
        source = self._source
        if source is None or end is None:
            source = open_source(self._sources if end is not None else part, self._options)
        if end is not None:
            self._source = source
            if source.digest() != self._all:
                raise ReadError(
                    f"{source.name}: files have changed, or differ on the node"
                    f" {os.uname().nodename}; all nodes must have the same files"
                )
        try:
            return self._write(source, shard_path(self._path, number), begin, end)
        except DatasetError as error:
            samples = None if end is None else f"samples {begin:,} to {end:,}"
            where = samples or paths_text(source.files.paths)
            raise DatasetError(f"{where}: {error.marked}") from error

    def _write(self, source: Source, at: Path, begin: int, end: int | None) -> Written:
        digest = f"{self._digest} {at.name} on Ray"
        with (
            PackedFile(at, source, self._options, digest, begin=begin, like=self._like) as file,
            Blocks(source, self._options, end) as blocks,
        ):
            file.encoded = self._encoded
            for _ in _filled(file, blocks, source, math.inf):
                pass
            return file.written


def _is_listed(source: Source) -> TypeGuard[ListedSource]:
    return isinstance(source, ListedSource) and bool(source.count)


def _parts_of(source: Source, nbytes: int, row_nbytes: float) -> Sequence[range | list[str]]:
    """Return parts of a source of about `nbytes` each."""
    if _is_listed(source):
        edges = np.linspace(0, source.count, 1 + max(1, round(source.count * row_nbytes / nbytes)))
        ends = np.unique(edges.astype(np.int64)).tolist()
        return [range(begin, end) for begin, end in itertools.pairwise(ends)]
    parts: list[list[str]] = []
    room = 0
    for path in source.files.paths:
        if room <= 0:
            parts.append([])
            room = nbytes
        parts[-1].append(path)
        room -= os.stat(path).st_size
    return parts


class Blocks(AbstractContextManager["Blocks"]):
    """Makes the blocks of a source, up to position `end` if given, in threads, ahead of their use.

    Blocks made ahead take up to half of the memory. `following` is the next block, or None at the
    end; `encoded` maps the columns of encoded samples to their kinds, as given to `begin` or found
    in the first block.
    """

    def __init__(self, source: Source, options: PackOptions, end: int | None = None) -> None:
        self._source, self._options, self._end = source, options, end
        self._most, self._most_nbytes = 2 * options.threads + 2, options.memory // 2
        self._pool = ThreadPoolExecutor(options.threads, "h5async-pack")
        self._waiting: deque[Future[Block]] = deque()
        self._works: Iterator[Work] | None = None
        self._samples: dict[str, Samples] = {}
        self.following: Block | None = None
        self.encoded: dict[str, str] = {}

    def __exit__(self, *_: object) -> None:
        """Stop the threads."""
        self._pool.shutdown(cancel_futures=True)

    def begin(self, start: int, encoded: Mapping[str, str] | None) -> None:
        """Begin at a position of the source; do nothing if it has already begun."""
        if self._works is not None:
            return
        source, options = self._source, self._options
        if source.count and source.nbytes:
            fitting = options.memory // _BLOCKS_AT_A_TIME * source.count // source.nbytes
            source.rows = max(1, min(source.rows, fitting))
        if options.size is not None:  # decoding is slow: small blocks let threads finish together
            source.rows = min(source.rows, _DECODED_ROWS)
        if options.shuffle and source.is_in_order:
            raise ConfigError(
                f"{source.name} can only be read in order; pack it without {named('shuffle')}, then"
                " shuffle the file with h5async repack --shuffle full, or let the reader shuffle"
            )
        source = copy(source)
        if options.shuffle:
            assert source.count is not None
            source.order = partial(permute, num_samples=source.count, seed=options.seed, epoch=0)
        source.count = source.count if self._end is None else self._end
        self._works = source.work(start)
        first = next(self._works, None)
        if first is None:
            return
        block = first()
        self.encoded = encoded_columns(block, source.kinds) if encoded is None else dict(encoded)
        self._samples = samples_of(self.encoded, options.size, verifies=options.verify)
        self._waiting.append(self._pool.submit(made_block, block, self._samples))
        self._go_on(block.nbytes)

    def take(self) -> Block:
        """Return the `following` block, and advance to the next."""
        block = self.following
        assert block is not None
        self._go_on(block.nbytes)
        return block

    def _go_on(self, nbytes: int) -> None:
        """Submit as many blocks as fit if each has `nbytes`; wait for the first one."""
        assert self._works is not None
        ahead = max(1, min(self._most, self._most_nbytes // max(1, nbytes)))
        for work in itertools.islice(self._works, max(0, ahead - len(self._waiting))):
            self._waiting.append(self._pool.submit(self._make, work))
        self.following = self._waiting.popleft().result() if self._waiting else None

    def _make(self, work: Work) -> Block:
        return made_block(work(), self._samples)


class Estimate(NamedTuple):
    """A rough estimate of what packing takes.

    `samples`, `nbytes` and `seconds` are None if the source does not know its number of samples.
    `probed` is the number of samples examined; `columns` tells how each column would be stored.
    """

    samples: int | None
    nbytes: int | None
    seconds: float | None
    probed: int
    columns: Mapping[str, str]


def estimate(sources: Any, **options: Unpack[PackKeywords]) -> Estimate:
    """Estimate what `pack` takes with the same arguments; raises the same errors."""
    chosen = PackOptions(**options)
    source = open_source(sources, chosen)
    first, began = None, perf_counter()
    probed = nbytes = 0
    with Blocks(source, chosen) as blocks:
        blocks.begin(0, None)
        while blocks.following is not None:
            block = blocks.take()
            first = block if first is None and block.kept else first
            probed, nbytes = probed + block.taken, nbytes + block.nbytes
            if perf_counter() - began > _PROBE_SECONDS and first is not None:
                break
    seconds = perf_counter() - began
    if first is None:
        raise DatasetError(f"{source.name} has no samples that can be packed")
    found = columns_of(first, blocks.encoded, chosen)
    columns = {name: column.text for name, column in found.items()}
    if source.count is None:
        return Estimate(None, None, None, probed, columns)
    share = source.count / probed
    return Estimate(source.count, round(nbytes * share), seconds * share, probed, columns)


# --- kinds of sources -----------------------------------------------------------------------------


def open_source(sources: Any, options: PackOptions) -> Source:
    """Return the source for paths or objects.

    Raises ConfigError for an unknown kind of source, H5AsyncError if it cannot be read.
    """
    if isinstance(sources, str | os.PathLike):
        return _at([Path(sources)], options)
    if type(sources).__module__.partition(".")[0] == "datasets" and hasattr(sources, "with_format"):
        return HuggingFaceSource(sources, options.fill)
    if isinstance(sources, Mapping):
        return ArraySource(sources, "the arrays")
    if isinstance(sources, Sequence) and sources and isinstance(sources[0], str | os.PathLike):
        return _at([Path(one) for one in sources], options)
    if isinstance(sources, Iterable):
        return RowSource(sources, options.varying)
    raise ConfigError(f"a {type(sources).__name__} cannot be packed; give {_KINDS}, or an iterable")


def _at(given: Sequence[Path], options: PackOptions) -> Source:
    paths = [Path(path) for path in matching_files(given)]
    missing = next((path for path in paths if not path.exists()), None)
    if missing is not None:
        raise ReadError(f"{missing} cannot be packed: there is no such file or folder")
    are_folders = {path.is_dir() for path in paths}
    if are_folders == {True, False}:
        raise ConfigError(f"{paths[0]} and others: give either files or folders, not both")
    if are_folders == {True}:
        return _in_folders(paths, options)
    suffixes = sorted({path.suffix.lower() for path in paths})
    if all(folders.ENDINGS.search(path.name) for path in paths):
        return folders.tar_source(paths)
    if set(suffixes) <= set(_ARRAYS):
        return array_files(paths, options.memory)
    if len(suffixes) == 1 and suffixes[0] in tables.SUFFIXES:
        return TableSource(paths, options.fill)
    raise ConfigError(f"{paths[0]} is not of a kind that can be packed; give {_KINDS}")


def _in_folders(paths: Sequence[Path], options: PackOptions) -> Source:
    folder = paths[0]
    if len(paths) == 1 and (folder / "meta" / "info.json").is_file():
        return EpisodeSource(folder, options.fill)
    if len(paths) == 1 and any((folder / name).is_file() for name in _SAVED):
        return HuggingFaceSource(saved_dataset(folder), options.fill)
    with reading_file(folder):
        for kind, suffixes in folders.SUFFIXES.items():
            walked = itertools.chain.from_iterable(
                os.walk(path, followlinks=True) for path in paths
            )
            if any(name.lower().endswith(suffixes) for _, _, names in walked for name in names):
                return FolderSource(paths, kind)
        files = [file for path in paths for file in sorted(path.rglob("*"))]
        ends = (
            folders.ENDINGS,
            *(re.compile(f"{one}$", re.I) for one in (*tables.SUFFIXES, ".npy")),
        )
        for end in ends:
            found = [file for file in files if end.search(file.name)]
            if found:
                return _at(found, options)
    raise ConfigError(f"{folder} has nothing that can be packed; give {_KINDS}")
