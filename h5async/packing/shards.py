"""Makes one dataset of shards: their paths enter; a file of virtual datasets leaves, or an index.

Virtual datasets name the shards by relative paths, so all of them can be moved together.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from pathlib import Path

import h5py

from h5async.config import ReaderConfig
from h5async.config.files import INDEX_SUFFIX, is_index
from h5async.errors import WriteError
from h5async.index.savedindex import write_index
from h5async.opening.filevalues import reach_of
from h5async.opening.indexing import index_files
from h5async.packing.safefile import SafeFile


def shard_path(path: Path, number: int) -> Path:
    """Return the path of a shard of a dataset: ``train-00003.h5`` of ``train.h5``."""
    suffix = ".h5" if path.suffix == INDEX_SUFFIX else path.suffix
    return path.with_name(f"{path.stem}-{number:05}{suffix}")


def remove_other_shards(path: Path, count: int) -> None:
    """Remove shards of earlier times, behind the first `count`."""
    for number in itertools.count(count):
        if not shard_path(path, number).exists():
            break
        shard_path(path, number).unlink()


def index_shards(path: Path, shards: Sequence[Path]) -> None:
    """Write the saved index that is all shards as one dataset."""
    config = ReaderConfig(hdf5_path=list(shards))
    reach = reach_of(config)
    try:
        write_index(path, list(index_files(config, reach, [])), reach)
    except OSError as error:
        raise WriteError(f"cannot write {path}: {error.strerror or error}") from error


def join_shards(
    path: Path, shards: Sequence[Path], columns: Sequence[str], overwrite: bool
) -> None:
    """Write the file, or the saved index, that is all shards as one dataset.

    `columns` are the datasets, or groups of codes, that are joined; all else is that of the last
    shard.
    """
    if is_index(path):
        index_shards(path, shards)
        return
    with SafeFile(path, resume=not overwrite, overwrite=overwrite) as safe:
        if safe.is_finished:
            return
        with h5py.File(shards[-1]) as last:
            safe.file.attrs.update(last.attrs)
            for name in last:
                if not any(f"{one}/".startswith(f"{name}/") for one in columns):
                    last.copy(name, safe.file)
            for name in columns:
                if isinstance(last[name], h5py.Group):
                    group = safe.file.create_group(name)
                    group.attrs.update(last[name].attrs)
                    last.copy(f"{name}/categories", group)
                    name = f"{name}/codes"
                _join(safe.file, name, path.parent, shards)
        safe.commit({})
        safe.finish()


def _join(file: h5py.File, name: str, folder: Path, shards: Sequence[Path]) -> None:
    """Create the virtual dataset of the datasets of all shards."""
    pieces, attributes = [], {}
    for path in shards:
        with h5py.File(path) as shard:
            dataset = shard[name]
            pieces.append(h5py.VirtualSource(os.path.relpath(path, folder), name, dataset.shape))
            attributes, dtype = dict(dataset.attrs), dataset.dtype
    count = sum(piece.shape[0] for piece in pieces)
    layout, first = h5py.VirtualLayout((count, *pieces[0].shape[1:]), dtype), 0
    for piece in pieces:
        layout[first : first + piece.shape[0]] = piece
        first += piece.shape[0]
    file.create_virtual_dataset(name, layout).attrs.update(attributes)
