"""Packs samples into HDF5: sources and options enter, a file leaves, or shards and one over them.

Threads make blocks of samples (`sources/`, `encodedsamples.py`), which are appended in order to a
file (`packedfile.py`).
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple, Unpack

from h5async.errors import ConfigError
from h5async.order.permutation import permute
from h5async.pack.encodedsamples import encoded_columns, made_block, samples_of
from h5async.pack.options import PackKeywords, PackOptions
from h5async.pack.packedfile import VERSION, PackedFile
from h5async.pack.schema import Block
from h5async.pack.sources.finding import open_source
from h5async.pack.sources.source import Source, Work, digest_of
from h5async.spelling import named

Progress = Callable[[int, int | None, int], None]  # samples done, all of them, bytes done
_BLOCKS_AT_A_TIME = 8  # so many must fit in the memory


class Packed(NamedTuple):
    """What `pack` has written.

    `samples` is the number of samples that the file has, and `nbytes` the size of all files. `bad`
    are the names of samples that were left out, and why; `converted` is the number of images that
    Pillow converted to PNG. `columns` say how each column is stored.
    """

    path: Path
    samples: int
    nbytes: int
    seconds: float
    columns: Mapping[str, str]
    bad: Sequence[tuple[str, str]]
    converted: int


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
    """
    chosen, began = PackOptions(**options), perf_counter()
    source = open_source(sources, chosen)
    path = Path(out)
    digest = digest_of([VERSION, source.digest(), sorted(chosen.digested().items())])
    with PackedFile(path, source, chosen, digest) as file:
        if not file.is_finished:
            with Blocks(source, chosen, file.taken, file.encoded) as blocks:
                for block in blocks:
                    file.encoded = blocks.encoded
                    file.add(block)
                    if progress is not None:
                        progress(file.taken, source.count, file.nbytes)
            source.files.check()
            file.finish()
    seconds, nbytes = perf_counter() - began, path.stat().st_size
    return Packed(path, file.count, nbytes, seconds, file.stored, file.bad, file.converted)


def _permuted(source: Source, seed: int, positions: Any) -> Any:
    if source.count is None:
        raise ConfigError(f"{source.name} can only be read in order; leave out {named('shuffle')}")
    return permute(positions, source.count, seed, 0)


class Blocks:
    """Makes the blocks of a source in threads, ahead of their use; iterates over them in order.

    So many are made ahead that they take half of the memory. `encoded` are columns of encoded
    samples, with their kinds: given, or found in the first block.
    """

    def __init__(
        self, source: Source, options: PackOptions, start: int, encoded: Mapping[str, str] | None
    ) -> None:
        order = partial(_permuted, source, options.seed) if options.shuffle else None
        if source.count and source.nbytes:
            fitting = options.memory // _BLOCKS_AT_A_TIME * source.count // source.nbytes
            source.rows = max(1, min(source.rows, fitting))
        self._works, self._most_nbytes = source.work(start, order), options.memory // 2
        self._source, self._options = source, options
        self._most = 2 * options.threads + 2
        self._pool = ThreadPoolExecutor(options.threads, "h5async-pack")
        self._waiting: deque[Future[Block]] = deque()
        self.encoded = None if encoded is None else dict(encoded)

    def __enter__(self) -> Blocks:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the threads."""
        self._pool.shutdown(cancel_futures=True)

    def __iter__(self) -> Iterator[Block]:
        """Yield the blocks."""
        ahead = 1
        work = next(self._works, None)
        if work is not None and self.encoded is None:
            block = work()
            self.encoded = encoded_columns(block, self._source.kinds)
            work = partial(_same, block)
        samples = samples_of(self.encoded or {}, self._options)
        while True:
            while work is not None and len(self._waiting) < ahead:
                self._waiting.append(self._pool.submit(_made, work, samples))
                work = next(self._works, None)
            if not self._waiting:
                return
            block = self._waiting.popleft().result()
            ahead = max(1, min(self._most, self._most_nbytes // max(1, block.nbytes)))
            yield block


def _same(block: Block) -> Block:
    return block


def _made(work: Work, samples: Any) -> Block:
    return made_block(work(), samples)
