"""Rewrites HDF5 files: `repack`, its shards, and how new files replace old ones."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

from h5async.config import ReaderConfig
from h5async.config.files import INDEX_SUFFIX, FileName, home_path, is_index, paths_text
from h5async.errors import ConfigError, ReadError, WriteError
from h5async.index.links import open_index
from h5async.index.savedindex import write_index
from h5async.opening.fieldkinds import index_files
from h5async.opening.filevalues import reach_of
from h5async.packing.repacking import Progress, Repacked, Repacking
from h5async.packing.rewriting import Plan
from h5async.packing.safefile import require_new
from h5async.packing.writeoptions import RepackKeywords, RepackOptions
from h5async.spelling import named
from h5async.system.interruptions import suppressing
from h5async.system.jobs import run_jobs


def repack(
    sources: FileName | Sequence[FileName],
    output: str | os.PathLike[str],
    *,
    dry_run: bool = False,
    planned: Callable[[Plan], None] | None = None,
    progress: Progress | None = None,
    ray: str | None = None,
    **options: Unpack[RepackKeywords],
) -> Repacked:
    """Rewrite HDF5 files with other chunks, filters or samples; several files become one.

    Everything else stays as in the first file: groups, attributes, links, references, dimension
    scales, datatypes. Stored chunks that stay the same are copied without decoding. The new file
    appears under its name once it is complete; `output` may be the source itself.

    Parameters
    ----------
    sources
        A file, several files, or a glob, like `hdf5_path` of `AsyncReader`.
    output
        The file to write.
    dry_run
        Only plan.
    planned
        Called with the plan before anything is written.
    progress
        Called with the bytes of values written so far, and the total.
    ray
        Write `shards` as jobs on this Ray cluster: its address, or ``"auto"``. See docs/ray.md.
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
        If the new file cannot be written, as on a full disk. With `verify`, if it differs.

    Examples
    --------
    >>> found = h5async.repack("sample_data/digits.h5", "digits.h5", filter="lzf")
    >>> with h5py.File("digits.h5") as file:
    ...     print(file["data"].chunks, file["data"].compression)
    (128, 8, 8) lzf
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
    if ray is not None and chosen.shards is None:
        raise ConfigError(f"jobs on Ray write a shard each; give {named('shards')}, such as 1GB")
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(open_index(file)) for file in config.files]
        work = Repacking(files, config, chosen)
        found = Repacked((path,), work.plan())
        if planned is not None:
            planned(found.plan)
        if dry_run:
            return found
        if chosen.shards is not None:
            return found._replace(paths=_write_shards(work, path, chosen, progress, ray))
        _write(work, path, chosen, progress)
    return found


def _write(work: Repacking, path: Path, options: RepackOptions, progress: Progress | None) -> None:
    # To verify a file that replaces a source, write it under another name first.
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
            f"{written} exists, but is not the result of these files and options: {error};"
            f" write another file, or replace it with {named('overwrite', True)}"
        ) from error
    if is_beside:
        os.replace(written, path)


def _write_shards(
    work: Repacking, path: Path, options: RepackOptions, progress: Progress | None, ray: str | None
) -> tuple[Path, ...]:
    """Write the shards, and the file or saved index that unites them."""
    shards = _Shards(work, path, options, progress)
    paths = [shard_path(path, number) for number in range(len(shards.parts))]
    replaced = [str(one) for one in (path, *paths) if work.replaces(one)]
    if replaced:
        raise ConfigError(f"{replaced[0]} is a source; give shards another name")
    if not (options.resume or options.overwrite):
        require_new([path, *paths])
    sizes = [(at.name, one.selection.size) for at, one in zip(paths, shards.parts, strict=True)]
    joined = None if is_index(path) else work.joined(sizes)
    finished, digests = Finished(path, resume=options.resume), [o.digest() for o in shards.parts]
    has = [finished.has(at, digest) for at, digest in zip(paths, digests, strict=True)]
    shards.done = sum(one.nbytes for one, had in zip(shards.parts, has, strict=True) if had)
    missing = [number for number, had in enumerate(has) if not had]
    written = run_jobs(shards, missing, ray, max(1, options.num_threads or 1))
    for number, nbytes in zip(missing, written, strict=True):
        finished.add(paths[number], digests[number])
        shards.done += nbytes
        shards.show(0, 0)
    if options.overwrite:
        remove_other_shards(path, len(paths))
    if joined is None:
        index_shards(path, paths)
    else:
        _write(joined, path, options, None)
    finished.forget()
    return (*paths, path)


class _Shards:
    """Writes shards by number: here, or in other processes, which open the files again.

    `done` is the number of bytes in finished shards.
    """

    def __init__(
        self, work: Repacking, path: Path, options: RepackOptions, progress: Progress | None
    ) -> None:
        assert options.shards is not None
        self.parts: Sequence[Repacking] = work.parts(options.shards)
        self.done, self._nbytes, self._progress = 0, work.nbytes, progress
        self._path, self._options = path, options
        files = tuple(work.config.files)  # not globs, which might match shards
        self._config = work.config.model_copy(update={"hdf5_path": files})
        self._digest = work.digest()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for other processes, with one thread by default, as Ray's CPUs."""
        options = self._options.model_copy(update={"num_threads": self._options.num_threads or 1})
        return {**self.__dict__, "parts": (), "_progress": None, "_options": options}

    def __call__(self, number: int) -> int:
        """Write or continue a shard; return its bytes."""
        if not self.parts:
            work = Repacking(list(map(open_index, self._config.files)), self._config, self._options)
            if work.digest() != self._digest:
                raise ReadError(
                    f"{paths_text(self._config.hdf5_path)}: files have changed, or differ on the"
                    f" node {os.uname().nodename}; all nodes must have the same files"
                )
            self.parts = work.parts(self._options.shards or 0)
        _write(self.parts[number], shard_path(self._path, number), self._options, self.show)
        return self.parts[number].nbytes

    def show(self, moved: int, _: int) -> None:
        """Report the progress; `moved` are the bytes done of the current shard."""
        if self._progress is not None:
            self._progress(self.done + moved, self._nbytes)


def join_shards(
    path: Path, shards: Mapping[Path, int], columns: Sequence[str], options: RepackOptions
) -> None:
    """Write the file or saved index that unites all shards.

    `shards` maps paths to numbers of samples; `columns` are the datasets of samples. All other
    objects come from the last shard.
    """
    if is_index(path):
        index_shards(path, [*shards])
        return
    last, parts = [*shards][-1], [(one.name, count) for one, count in shards.items()]
    with open_index(last) as file:
        work = Repacking([file], ReaderConfig(hdf5_path=last, device="cpu"), options)
        _write(work.joined(parts, columns), path, options, None)


def shard_path(path: Path, number: int) -> Path:
    """Return the path of a shard: ``train-00003.h5`` for ``train.h5``."""
    suffix = ".h5" if path.suffix == INDEX_SUFFIX else path.suffix
    return path.with_name(f"{path.stem}-{number:05}{suffix}")


def remove_other_shards(path: Path, count: int) -> None:
    """Remove the shards of an earlier run beyond the first `count`."""
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
        """Return whether a shard was finished, and is unchanged since."""
        return shard.exists() and self._shards.get(shard.name) == _described(shard, digest)

    def add(self, shard: Path, digest: str) -> None:
        """Remember a shard that is complete and on the disk."""
        self._shards[shard.name] = _described(shard, digest)
        beside = self._path.with_name(f"{self._path.name}.new")
        with suppressing(OSError):  # at worst, the shard is verified again
            beside.write_text(json.dumps(self._shards))
            os.replace(beside, self._path)

    def forget(self) -> None:
        """Delete the record."""
        self._path.unlink(missing_ok=True)


def _described(shard: Path, digest: str) -> list[Any]:
    status = shard.stat()
    return [digest, status.st_size, status.st_mtime_ns, status.st_ino]


def index_shards(path: Path, shards: Sequence[Path]) -> None:
    """Write the saved index that unites all shards."""
    config = ReaderConfig(hdf5_path=list(shards))
    reach = reach_of(config)
    try:
        write_index(path, list(index_files(config, reach, [])), reach)
    except OSError as error:
        raise WriteError(f"cannot write {path}: {error.strerror or error}") from error
