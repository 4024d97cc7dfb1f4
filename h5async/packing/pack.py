"""Packs samples into HDF5: sources and options enter, a file leaves, or shards and one over them.

Threads make blocks of samples (`sources/`, `encodedsamples.py`), which are appended in order to a
file (`packedfile.py`).
"""

from __future__ import annotations

import itertools
import math
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple, Unpack

from h5async.config.files import is_index
from h5async.errors import ConfigError
from h5async.order.selection import permute
from h5async.packing.encodedsamples import Samples, encoded_columns, made_block, samples_of
from h5async.packing.newfiles import join_shards
from h5async.packing.packedfile import VERSION, PackedFile
from h5async.packing.packoptions import PackKeywords, PackOptions
from h5async.packing.repackoptions import RepackOptions
from h5async.packing.safefile import exists, is_begun
from h5async.packing.schema import Block
from h5async.packing.shards import remove_other_shards, shard_path
from h5async.packing.sources.base import Source, Work, digest_of
from h5async.packing.sources.finding import open_source
from h5async.spelling import named

Progress = Callable[[int, int | None, int], None]  # samples done, all of them, bytes done
_BLOCKS_AT_A_TIME = 8  # so many must fit in the memory
_DECODED_ROWS = 16


class Packed(NamedTuple):
    """What `pack` has written.

    `samples` is the number of samples that the file has, and `nbytes` the size of all files. `bad`
    are the names of samples that were left out, and why; `converted` is the number of images that
    Pillow converted to PNG. `columns` say how each column is stored, and `notes`, what of the
    source was left out.
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
    **options: Unpack[PackKeywords],
) -> Packed:
    """Pack samples into an HDF5 file.

    Parameters
    ----------
    sources
        A path, or several, of folders and files; a mapping of names to arrays; a dataset of Hugging
        Face; or an iterable of dictionaries: docs/packing.md.
    out
        The file to write.
    progress
        A function that is called with the number of samples that are packed, the number of all (or
        None), and the number of bytes.
    **options
        See `PackOptions`.

    Raises
    ------
    H5AsyncError
        If a source cannot be read, a sample cannot be packed, or the file cannot be written. What
        was written can be gone on with, by ``resume=True``.

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
    files = _pack(source, path, chosen, digest, progress or (lambda *_: None))
    paths = [file.path for file in files]
    if chosen.shards is not None:
        if chosen.overwrite:
            remove_other_shards(path, len(paths))
        counts = {file.path: file.count for file in files}
        how = RepackOptions(resume=chosen.resume, overwrite=chosen.overwrite)
        join_shards(path, counts, files[-1].datasets, how)
        paths.append(path)
    return Packed(
        path,
        sum(file.count for file in files),
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
) -> list[PackedFile]:
    """Pack the samples into one file, or into shards."""
    files: list[PackedFile] = []
    nbytes, most = 0, math.inf if options.shards is None else options.shards
    with Blocks(source, options) as blocks:
        while True:
            last = files[-1] if files else None
            at = path if options.shards is None else shard_path(path, len(files))
            if last is not None and (options.overwrite or not is_begun(at)):
                blocks.begin(last.taken, last.encoded)
                if blocks.following is None:
                    return files
            with PackedFile(at, source, options, f"{digest} {len(files)}", last) as file:
                files.append(file)
                if not file.is_finished:
                    blocks.begin(file.taken, file.encoded)
                    file.encoded = blocks.encoded
                    while file.nbytes < most and blocks.following is not None:
                        file.add(blocks.take())
                        progress(file.taken, source.count, nbytes + file.nbytes)
                    source.files.check()
                    file.finish()
            if options.shards is None:
                return files
            nbytes += file.nbytes


class Blocks:
    """Makes the blocks of a source in threads, ahead of their use.

    So many are made ahead that they take half of the memory.

    Attributes
    ----------
    following
        The next block, or None if there is no other.
    encoded
        Columns of encoded samples, with their kinds: given, or found in the first block.
    """

    def __init__(self, source: Source, options: PackOptions) -> None:
        self._source, self._options = source, options
        self._most, self._most_nbytes = 2 * options.threads + 2, options.memory // 2
        self._pool = ThreadPoolExecutor(options.threads, "h5async-pack")
        self._waiting: deque[Future[Block]] = deque()
        self._works: Iterator[Work] | None = None
        self._samples: dict[str, Samples] = {}
        self.following: Block | None = None
        self.encoded: dict[str, str] = {}

    def __enter__(self) -> Blocks:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the threads."""
        self._pool.shutdown(cancel_futures=True)

    def begin(self, start: int, encoded: Mapping[str, str] | None) -> None:
        """Begin at a position of the source, unless it has begun."""
        if self._works is not None:
            return
        source, options = self._source, self._options
        if source.count and source.nbytes:
            fitting = options.memory // _BLOCKS_AT_A_TIME * source.count // source.nbytes
            source.rows = max(1, min(source.rows, fitting))
        if options.size is not None:  # decoding takes long, and threads are to end together
            source.rows = min(source.rows, _DECODED_ROWS)
        order = partial(_permuted, source, options.seed) if options.shuffle else None
        self._works = source.work(start, order)
        first = next(self._works, None)
        if first is None:
            return
        block = first()
        self.encoded = encoded_columns(block, source.kinds) if encoded is None else dict(encoded)
        self._samples = samples_of(self.encoded, options)
        self._waiting.append(self._pool.submit(made_block, block, self._samples))
        self._go_on(block.nbytes)

    def take(self) -> Block:
        """Return the following block, after which there is another one or none."""
        block = self.following
        assert block is not None
        self._go_on(block.nbytes)
        return block

    def _go_on(self, nbytes: int) -> None:
        """Have as many blocks made as fit, if they have so many bytes; wait for the first one."""
        assert self._works is not None
        ahead = max(1, min(self._most, self._most_nbytes // max(1, nbytes)))
        for work in itertools.islice(self._works, max(0, ahead - len(self._waiting))):
            self._waiting.append(self._pool.submit(self._make, work))
        self.following = self._waiting.popleft().result() if self._waiting else None

    def _make(self, work: Work) -> Block:
        return made_block(work(), self._samples)


def _permuted(source: Source, seed: int, positions: Any) -> Any:
    assert source.count is not None
    return permute(positions, source.count, seed, 0)
