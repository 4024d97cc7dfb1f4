"""An HDF5 file that is either complete or absent, and whose writing can resume after a crash.

HDF5 writes through a file object (`PartialFile`) to ``OUT.partial``. Writes past the end of the
last commit go straight to the file. Writes that overwrite committed bytes, which are metadata, are
held in memory until a commit, which writes them first to ``OUT.journal`` and then to the file. So
after a crash at any moment, applying the journal (again, if it had been) and truncating the file to
the committed size restores the last commit. (This is a redo log, as in databases.) An existing file
is appended to in the same way, in place.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from io import FileIO
from pathlib import Path
from typing import Any

import h5py
from h5py import h5p

from h5async.errors import ConfigError, DamagedError, H5AsyncError, WriteError
from h5async.io.hdf5files import HDF5File
from h5async.io.source import owned
from h5async.packing.partialfile import (
    Journal,
    PartialFile,
    fingerprint,
    read_journal,
    synchronize_folder,
    write_journal,
)
from h5async.spelling import named
from h5async.system.interruptions import suppressing

_COMMIT_NBYTES, _COMMIT_SECONDS, _MOST_HELD = 1 << 30, 5.0, 32 << 20
# Fast chunk indexes, arrays instead of B-trees, which HDF5 1.10 and later can read.
_FORMAT = ("v110", "latest")
# Newer superblocks have a consistency flag: HDF5 would refuse to open a file that was not closed.
_SUPERBLOCK = (h5py.h5f.LIBVER_V18, h5py.h5f.LIBVER_V18)
_METADATA_BLOCK_NBYTES = 1 << 16  # keeps metadata together


def is_begun(path: Path) -> bool:
    """Return whether a file exists, complete or partial."""
    return path.exists() or _beside(path, "partial").exists()


class SafeFile(AbstractContextManager["SafeFile"]):
    """An HDF5 file that is being written. For one thread at a time.

    The file is ``PATH.partial``, with ``PATH.journal``, until it is finished and renamed to `path`.
    `resume`: continue an interrupted file, if there is one; its `digest`, which identifies what the
    file is made of, must be the same. `overwrite`: start over, whatever exists. `append`: write to
    an existing file. A new file has the user block of `like`, an open file.

    `file` is the open `h5py.File`; `state` is the argument of the last `commit`, None if nothing is
    committed. If `is_finished`, the file was already complete, and there is no open `file`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        resume: bool = False,
        append: bool = False,
        overwrite: bool = False,
        digest: str = "",
        like: HDF5File | None = None,
    ) -> None:
        self.path = Path(path)
        self._like = like
        self.state: Mapping[str, Any] | None = None
        self.is_finished = False
        self._digest, self._in_place = digest, append
        self._partial = self.path if append else partial_of(self.path)
        self._journal = _beside(self.path, "journal")
        self._raw: PartialFile | None = None
        self._committed_at = time.monotonic()
        self._is_untouched = False  # whether this is an existing file without commits so far
        try:
            self._open(resume, overwrite)
        except BaseException:
            self.close()
            raise

    def _open(self, resume: bool, overwrite: bool) -> None:
        if not self._in_place and not self._partial.exists() and self.path.exists():
            if resume:  # it was finished, but the journal may have been left
                self._journal.unlink(missing_ok=True)
                self.is_finished = True
                return
            if not overwrite:
                raise exists(self.path)
        raw = self._raw = PartialFile(self._lock())
        journal = None if overwrite else read_journal(self._journal)
        if journal is not None and self._in_place and journal.state is None:
            self._take(raw, journal)  # nothing was appended: start over
            journal = None
        is_begun = bool(raw.size) and not self._in_place and not overwrite
        if journal is None and not is_begun:
            self._begin(raw)
        elif not resume:
            raise _unfinished(self._partial, may_begin_anew=not self._in_place)
        elif journal is None:  # it was interrupted before the first commit
            self._begin(raw)
        else:
            self._go_on(raw, journal)
        if not self.is_finished:
            self.file = h5py.File(raw, "r+", libver=_FORMAT, meta_block_size=_METADATA_BLOCK_NBYTES)

    def _lock(self) -> FileIO:
        """Open and lock the file to write, so that there is only one writer."""
        with self._writing():
            flags = os.O_RDWR | os.O_CLOEXEC | (0 if self._in_place else os.O_CREAT)
            file = owned(os.open, self._partial, flags, 0o666)
        with suppressing(OSError):  # locked, or just renamed by a writer that has finished
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(file.fileno()), os.stat(self._partial)):
                return file
        file.close()
        raise WriteError(
            f"{self._partial} is in use by another process", filename=str(self._partial)
        )

    def _begin(self, raw: PartialFile) -> None:
        if self._in_place:
            self._write_journal(raw, None, is_finished=False)
            self._is_untouched = True
        else:
            self._journal.unlink(missing_ok=True)
            with self._writing():
                raw.begin(0)
            self._create(raw)
            self.check()

    def _create(self, raw: PartialFile) -> None:
        access, properties = h5p.create(h5p.FILE_ACCESS), h5p.create(h5p.FILE_CREATE)
        access.set_fileobj_driver(h5py.h5fd.fileobj_driver, raw)
        access.set_libver_bounds(*_SUPERBLOCK)
        if self._like is None:
            properties.set_obj_track_times(False)  # for reproducible bytes
            h5py.h5f.create(b"new", h5py.h5f.ACC_TRUNC, properties, access).close()
            return
        root = self._like["/"].id.get_create_plist()
        properties.set_link_creation_order(root.get_link_creation_order())
        properties.set_attr_creation_order(root.get_attr_creation_order())
        nbytes = self._like.userblock_size
        properties.set_userblock(nbytes)
        h5py.h5f.create(b"new", h5py.h5f.ACC_TRUNC, properties, access).close()
        if nbytes:
            raw.seek(0)
            raw.write(self._like.source.get_ranges([0], [nbytes])[0])

    def _go_on(self, raw: PartialFile, journal: Journal) -> None:
        if journal.digest != self._digest:
            raise ConfigError(
                f"{self._partial} was started with other sources or options; give the same ones"
                + ("" if self._in_place else f", or start over with {named('overwrite', True)}")
            )
        self._take(raw, journal)
        self.state = journal.state
        with self._writing():
            raw.apply()
            if journal.is_finished:
                self._complete(raw)

    def _take(self, raw: PartialFile, journal: Journal) -> None:
        """Restore the state of a file from its journal."""
        raw.begin(journal.size, journal.pieces)
        raw.direct = list(journal.direct)
        if fingerprint(raw) != journal.fingerprint:
            remedy = "it" if self._in_place and journal.state is None else "both"
            raise DamagedError(
                f"{self._journal} does not belong to {self._partial}, or that file has changed;"
                f" delete {remedy}, and start over",
                filename=str(self._journal),
            )

    @property
    def is_due(self) -> bool:
        """Whether to commit, by the time and the bytes written since the last commit."""
        raw = self._raw
        return raw is not None and (
            raw.held_nbytes > _MOST_HELD
            or raw.written_nbytes > _COMMIT_NBYTES
            or time.monotonic() - self._committed_at > _COMMIT_SECONDS
        )

    def check(self) -> None:
        """Raise the error if writing has failed."""
        with self._writing():
            if self._raw is not None and self._raw.failure is not None:
                raise self._raw.failure

    def write_directly(self, dataset: h5py.Dataset) -> None:
        """Let values of a new contiguous dataset go straight to the file, even to committed bytes.

        Its space must have been allocated early (``h5py.h5d.ALLOC_TIME_EARLY``). After an
        interruption, its values are undefined, except those that `state` records as written.
        """
        begin, raw = dataset.id.get_offset(), self._opened
        if begin is None:
            return
        part = begin, begin + dataset.id.get_storage_size()
        if part not in raw.direct:
            raw.direct.append(part)
            if self.state is not None:  # the journal must list the range before it is written
                self.commit(self.state)

    def commit(self, state: Mapping[str, Any]) -> None:
        """Make all writes durable: after an interruption, writing resumes from `state`.

        `state` must be serializable as JSON. Open datasets stay open.
        """
        with h5py._objects.phil:  # keeps other threads from writing through HDF5 meanwhile
            self.file.flush()
            self._commit(self._opened, state, is_finished=False)

    def finish(self) -> None:
        """Close the file, and give it its final name."""
        raw = self._opened
        self.file.close()
        self._commit(raw, self.state, is_finished=True)
        with self._writing():
            self._complete(raw)

    def close(self) -> None:
        """Close the file; an unfinished one stays as of the last commit. Idempotent."""
        raw, self._raw = self._raw, None
        if raw is None:
            return
        raw.stop()
        try:
            # HDF5 flushes its caches, which only goes to memory; it may report earlier failures.
            with suppressing(Exception):
                self.file.close()
            if self._is_untouched:  # so that other samples can be appended
                with suppressing(OSError):
                    raw.cut()
                    self._journal.unlink()
        finally:
            raw.close()

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()

    @property
    def _opened(self) -> PartialFile:
        if self._raw is None:
            raise ValueError(f"{self.path} is closed")
        return self._raw

    def _commit(self, raw: PartialFile, state: Mapping[str, Any] | None, is_finished: bool) -> None:
        self.check()
        self._is_untouched = False
        with self._writing():
            raw.synchronize()
            self._write_journal(raw, state, is_finished)
            raw.apply()
        self.state, self._committed_at = state, time.monotonic()

    def _write_journal(
        self, raw: PartialFile, state: Mapping[str, Any] | None, is_finished: bool
    ) -> None:
        end = raw.end
        before = self._digest, end, state, is_finished
        journal = Journal(*before, fingerprint(raw), raw.pieces(end), raw.direct)
        with self._writing():
            write_journal(self._journal, journal)

    def _complete(self, raw: PartialFile) -> None:
        """Sync the file to disk, and give it its final name."""
        raw.synchronize()
        if not self._in_place:
            os.replace(self._partial, self.path)
            synchronize_folder(self.path.parent)
        self._journal.unlink(missing_ok=True)
        self.is_finished = True
        self.close()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Turn an OSError into a WriteError that names the file, and how to resume."""
        try:
            yield
        except H5AsyncError:
            raise
        except OSError as error:
            reason = error.strerror or str(error)
            left = f"; committed data is kept: continue with {named('resume', True)}"
            raise WriteError(
                f"cannot write {self._partial}: {reason}{left if self.state is not None else ''}",
                filename=str(self._partial),
            ) from error


def partial_of(path: Path) -> Path:
    """Return the path of a file until it is complete."""
    return _beside(path, "partial")


def exists(path: Path) -> ConfigError:
    """Return the error for a file that exists and may not be replaced."""
    return ConfigError(
        f"{path} exists; write another file, or replace it with {named('overwrite', True)}"
    )


def require_new(paths: Iterable[Path]) -> None:
    """Raise ConfigError if one of the files exists, complete or partial."""
    for path in paths:
        if path.exists():
            raise exists(path)
        if partial_of(path).exists():
            raise _unfinished(partial_of(path))


def _unfinished(partial: Path, *, may_begin_anew: bool = True) -> ConfigError:
    return ConfigError(
        f"{partial} was not finished; continue with {named('resume', True)}"
        + (f", or start over with {named('overwrite', True)}" if may_begin_anew else "")
    )


def _beside(path: Path, ending: str) -> Path:
    if not path.name:
        raise ConfigError(f"{path} is a folder; name a file in it")
    return path.with_name(f"{path.name}.{ending}")
