"""Writes HDF5 files anew: `repack`, and how new files, or shards, take their places."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Unpack

from h5async.config import ReaderConfig
from h5async.config.files import FileName, home_path, is_index
from h5async.errors import ConfigError, WriteError
from h5async.index.links import open_index
from h5async.packing.repacking import Progress, Repacked, Repacking
from h5async.packing.repackoptions import RepackKeywords, RepackOptions
from h5async.packing.rewriting import Plan
from h5async.packing.safefile import exists
from h5async.packing.shards import Finished, index_shards, remove_other_shards, shard_path
from h5async.spelling import named


def repack(
    sources: FileName | Sequence[FileName],
    output: str | os.PathLike[str],
    *,
    dry_run: bool = False,
    planned: Callable[[Plan], None] | None = None,
    progress: Progress | None = None,
    **options: Unpack[RepackKeywords],
) -> Repacked:
    """Write HDF5 files anew, with other chunks, filters or samples; several files become one.

    All else stays as it is in the first file: groups, attributes, links, references, dimension
    scales, datatypes. Chunks about which nothing changes are copied as they are stored. The new
    file has its name as soon as it is whole; `output` may be the file itself.

    Parameters
    ----------
    sources
        A file, several, or a glob: what `hdf5_path` of `AsyncReader` takes.
    output
        The file to write.
    dry_run
        Only plan.
    planned
        Called with the plan before anything is written.
    progress
        Called with the bytes of values that are done, and with those of all.
    **options
        As in `RepackOptions`.

    Raises
    ------
    ConfigError
        If an option is invalid, or does not fit the files.
    DatasetError
        If a dataset is missing, or cannot be copied.
    ReadError
        If a file cannot be read, or changes meanwhile.
    WriteError
        If the new file cannot be written: the disk is full. With `verify`, if it differs.

    Examples
    --------
    >>> found = h5async.repack("sample_data/digits.h5", "digits.h5", filter="lzf")
    >>> with h5py.File("digits.h5") as file:
    ...     print(file["data"].chunks, file["data"].compression)
    (1024, 8, 8) lzf
    """
    chosen = RepackOptions(**options)
    config = ReaderConfig(
        hdf5_path=sources,
        indices=chosen.indices,
        shuffle=chosen.shuffle,
        seed=chosen.seed,
        allow_external=chosen.allow_external,
        device="cpu",
    )
    path = Path(home_path(os.fspath(output)))
    if is_index(path) and chosen.shards is None:
        raise ConfigError(f"{path}: only {named('shards')} are joined by a saved index")
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(open_index(file)) for file in config.files]
        work = Repacking(files, config, chosen)
        found = Repacked((path,), work.plan())
        if planned is not None:
            planned(found.plan)
        if dry_run:
            return found
        if chosen.shards is not None:
            return found._replace(paths=_write_shards(work, path, chosen, progress))
        _write(work, path, chosen, progress)
    return found


def _write(work: Repacking, path: Path, options: RepackOptions, progress: Progress | None) -> None:
    """Write the new file, and verify it."""
    # What replaces a source is verified before.
    is_beside = options.verify and work.replaces(path)
    written = path.with_name(f"{path.name}.repacked") if is_beside else path
    is_new = work.write(written, progress)
    try:
        if options.verify or not is_new:
            work.verify(written)
    except WriteError as error:
        if is_new:
            os.replace(written, path.with_name(f"{path.name}.differs"))
            raise
        raise ConfigError(
            f"{written} exists, and is not what these files and options make: {error};"
            f" write another file, or replace it by {named('overwrite', True)}"
        ) from error
    if is_beside:
        os.replace(written, path)


def _write_shards(
    work: Repacking, path: Path, options: RepackOptions, progress: Progress | None
) -> tuple[Path, ...]:
    """Write the shards, and the file, or the saved index, that is all of them."""
    assert options.shards is not None
    parts = work.parts(options.shards)
    paths = [shard_path(path, number) for number in range(len(parts))]
    replaced = [str(one) for one in (path, *paths) if work.replaces(one)]
    if replaced:
        raise ConfigError(f"{replaced[0]} is a source; give shards another name")
    if path.exists() and not (options.resume or options.overwrite):
        raise exists(path)
    sizes = [(at.name, part.selection.size) for at, part in zip(paths, parts, strict=True)]
    joined = None if is_index(path) else work.joined(sizes)
    done, finished = 0, Finished(path, resume=options.resume)
    for part, at in zip(parts, paths, strict=True):

        def show(moved: int, _: int, done: int = done) -> None:
            if progress is not None:
                progress(done + moved, work.nbytes)

        if not finished.has(at, part.digest()):
            _write(part, at, options, show)
            finished.add(at, part.digest())
        done += part.nbytes
    if options.overwrite:
        remove_other_shards(path, len(paths))
    if joined is None:
        index_shards(path, paths)
    else:
        _write(joined, path, options, None)
    finished.forget()
    return (*paths, path)


def join_shards(
    path: Path, shards: Mapping[Path, int], columns: Sequence[str], options: RepackOptions
) -> None:
    """Write the file, or the saved index, that is all shards as one dataset.

    `shards` have so many samples each; `columns` are the datasets of samples. All other objects are
    those of the last shard.
    """
    if is_index(path):
        index_shards(path, [*shards])
        return
    last, parts = [*shards][-1], [(one.name, count) for one, count in shards.items()]
    with open_index(last) as file:
        work = Repacking([file], ReaderConfig(hdf5_path=last, device="cpu"), options)
        _write(work.joined(parts, columns), path, options, None)
