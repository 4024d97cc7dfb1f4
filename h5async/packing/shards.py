"""Names shards of a dataset, remembers which are finished, and makes the saved index of all."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from h5async.config import ReaderConfig
from h5async.config.files import INDEX_SUFFIX
from h5async.errors import WriteError
from h5async.index.savedindex import write_index
from h5async.opening.filevalues import reach_of
from h5async.opening.indexing import index_files
from h5async.system.interruptions import suppressing


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


class Finished:
    """Remembers which shards are finished, in ``PATH.finished``: digests, sizes and times."""

    def __init__(self, path: Path, *, resume: bool) -> None:
        self._path, self._shards = path.with_name(f"{path.name}.finished"), dict[str, list[Any]]()
        with suppressing(OSError, ValueError):
            self._shards = json.loads(self._path.read_text()) if resume else {}

    def has(self, shard: Path, digest: str) -> bool:
        """Tell whether a shard was finished, and is as it was then."""
        return shard.exists() and self._shards.get(shard.name) == _described(shard, digest)

    def add(self, shard: Path, digest: str) -> None:
        """Remember a shard that is whole and on the disk."""
        self._shards[shard.name] = _described(shard, digest)
        beside = self._path.with_name(f"{self._path.name}.new")
        with suppressing(OSError):  # it would be read again, no more
            beside.write_text(json.dumps(self._shards))
            os.replace(beside, self._path)

    def forget(self) -> None:
        """Remove what is remembered."""
        self._path.unlink(missing_ok=True)


def _described(shard: Path, digest: str) -> list[Any]:
    status = shard.stat()
    return [digest, status.st_size, status.st_mtime_ns, status.st_ino]


def index_shards(path: Path, shards: Sequence[Path]) -> None:
    """Write the saved index that is all shards as one dataset."""
    config = ReaderConfig(hdf5_path=list(shards))
    reach = reach_of(config)
    try:
        write_index(path, list(index_files(config, reach, [])), reach)
    except OSError as error:
        raise WriteError(f"cannot write {path}: {error.strerror or error}") from error
