"""Names shards of a dataset, removes those of earlier times, and makes the saved index of all."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

from h5async.config import ReaderConfig
from h5async.config.files import INDEX_SUFFIX
from h5async.errors import WriteError
from h5async.index.savedindex import write_index
from h5async.opening.filevalues import reach_of
from h5async.opening.indexing import index_files


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
