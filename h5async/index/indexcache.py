"""Gets the layouts of a reader's files from saved indices while these are valid, or by indexing.

New layouts are stored for later readers: in the user's cache folder, or in a given file. If
anything is wrong with an entry of the folder, the files are silently indexed again. An entry is for
one combination of files, in order, and datasets.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter

import h5py

from h5async.config.files import INDEX_SUFFIX, FileName, is_index, user_cache
from h5async.core.binding import load_core
from h5async.errors import ReadError
from h5async.index.layout import DatasetLayout
from h5async.index.links import Consulted, Reach
from h5async.index.savedfile import (
    NotPortableError,
    SavedIndexError,
    is_saved_index,
    remove_unfinished,
)
from h5async.index.savedindex import IndexedFile, NamedIndex, SavedIndex, Wanted, write_index
from h5async.io.stores import absolute_name, are_at, store_of
from h5async.spelling import named
from h5async.system.interruptions import suppressing

MOST_NBYTES = 1 << 30  # of all entries in the folder
LEAST_SECONDS = 0.02  # of indexing; quicker results are not stored
_TOUCHED_SECONDS = 86400  # the least interval between marking an entry as used
_NAME = rf"[0-9a-f]{{32}}\{INDEX_SUFFIX}"  # of an entry: a key, as `_key` makes it
_Read = Callable[[FileName, Sequence[str], Reach], Mapping[str, DatasetLayout]]
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def open_cache(
    place: bool | Path, paths: Sequence[FileName], wanted: Sequence[Wanted], reach: Reach
) -> IndexCache | None:
    """Return the index cache of a reader, or None.

    `place` is True for the user's cache folder, False for no cache, a folder, or the file itself.
    ReadError if a given file is not a saved index of this user, or is damaged.
    """
    folder = cache_folder() if place is True else place
    key = ""
    with suppressing(OSError):  # the current directory may have been removed
        files = [absolute_name(path) for path in paths]
        key = _key(files, [*dict.fromkeys(wanted)], reach)
    if not key or not folder or not all(store_of(path).is_lasting for path in paths):
        return None
    is_entry = place is True or folder.is_dir()
    path = folder / f"{key}{INDEX_SUFFIX}" if is_entry else folder
    return IndexCache(path, key, files, reach, is_entry=is_entry)


def cache_folder() -> Path | None:
    """Return the user's folder of entries, which may not exist; None if there is no home."""
    return user_cache("index")


def clear_cache(folder: Path) -> tuple[int, int]:
    """Remove all entries of a folder; return their number and their bytes.

    OSError if one cannot be removed.
    """
    entries = _entries(folder)
    for _, _, path in entries:
        os.unlink(path)
    remove_unfinished(folder, _NAME)
    return len(entries), sum(nbytes for _, nbytes, _ in entries)


def _key(files: Sequence[str], wanted: Sequence[Wanted], reach: Reach) -> str:
    roots = [absolute_name(root) for root in reach.roots]
    versions = h5py.__version__, h5py.version.hdf5_version
    core = load_core()  # datasets that it cannot decode are stored as read through h5py
    undecoded = None if core is None else sorted(core.missing)
    parts = [files, wanted, roots, reach.missing_is_fill, versions, undecoded]
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()


class IndexCache:
    """The layouts of the files of one reader, and where they are stored. Used by one thread.

    `path` is the stored file, whose content `key` identifies; `files` are the absolute names of the
    files, which are indexed with `reach`. Defects of a folder's entry are not reported; those of a
    file that the user has named are errors.
    """

    def __init__(
        self, path: Path, key: str, files: Sequence[str], reach: Reach, *, is_entry: bool
    ) -> None:
        self._path = path
        self._key = key
        self._files = files
        self._reach = reach
        self._is_entry = is_entry
        self._begin = perf_counter()
        self._seconds = 0.0
        self._found: dict[int, dict[Wanted, DatasetLayout]] = {}
        self._new: dict[int, IndexedFile] = {}
        self._index = self._open_entry() if is_entry else self._open_given()
        self._is_fresh = [] if self._index is None else self._index.fresh_files()

    def find(self, number: int) -> dict[Wanted, DatasetLayout]:
        """Return the known layouts of a file; nothing if it has changed."""
        self._begin = perf_counter()
        if self._index is None or not self._is_fresh[number]:
            return {}
        try:
            found = self._index.find(number, self._index.datasets(number))
        except SavedIndexError as error:
            if not self._is_entry:
                raise self._not_usable(error) from error
            self._index = None
            self._found.clear()
            self._seconds = max(self._seconds, LEAST_SECONDS)
            return {}
        if len(found) < len(self._index.datasets(number)):
            return {}
        self._found[number] = found
        return found

    def note(
        self, number: int, layouts: Mapping[Wanted, DatasetLayout], consulted: Consulted
    ) -> None:
        """Add the layouts of a file that `find` did not have."""
        self._seconds += perf_counter() - self._begin
        self._new[number] = IndexedFile(self._files[number], dict(layouts), consulted)

    def save(self) -> None:
        """Store the layouts, after all files were requested, if it is worthwhile.

        They are not stored if any file was left out. ReadError if a given file cannot be written.
        """
        if len(self._new.keys() | self._found.keys()) < len(self._files):
            return
        if self._is_entry:
            if self._seconds >= LEAST_SECONDS:
                with suppressing(OSError, NotPortableError, UnicodeError):
                    folder = self._path.parent
                    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                    if _is_ours(folder):
                        self._write()
                        _remove_oldest(folder, MOST_NBYTES)
                        remove_unfinished(folder, _NAME)
        elif self._new:
            try:
                with suppressing(NotPortableError):
                    self._write()
            except OSError as error:
                raise self._error(f"cannot be written: {error.strerror or error}") from error

    def _write(self) -> None:
        """Write all layouts, old and new, unless a file has changed since it was indexed."""
        consulted = (file.consulted.files.items() for file in self._new.values())
        if not all(are_at(itertools.chain(*consulted))):
            return
        several = []
        for number, path in enumerate(self._files):
            new = self._new.get(number)
            if new is None:
                assert self._index is not None
                new = IndexedFile(path, self._found[number], self._index.consulted(number))
            several.append(new)
        write_index(self._path, several, self._reach, key=self._key, is_entry=self._is_entry)

    def _open_entry(self) -> SavedIndex | None:
        with suppressing(OSError, SavedIndexError):
            if not _is_ours(self._path.parent):
                return None
            # (Entries are replaced, and never written to: so they can be mapped.)
            index = SavedIndex(self._path, self._reach, (os.geteuid(),))
            if index.key != self._key or index.paths != self._files:
                return None
            if time.time() - os.stat(self._path).st_mtime > _TOUCHED_SECONDS:
                os.utime(self._path)
            return index
        return None

    def _open_given(self) -> SavedIndex | None:
        if not os.path.lexists(self._path):
            return None
        try:
            index = SavedIndex(self._path, self._reach, (os.geteuid(), 0))
        except SavedIndexError as error:
            raise self._not_usable(error) from error
        except OSError as error:
            raise self._error(f"cannot be read: {error.strerror or error}") from error
        if index.paths != self._files or not index.key:
            what = "was written by h5async index" if not index.key else "belongs to other files"
            raise self._error(
                f"{what}, and would be overwritten; name another file, or, to read the indexed"
                f" files, use {named('hdf5_path', str(self._path))}"
            )
        return index if index.key == self._key else None

    def _not_usable(self, error: SavedIndexError) -> ReadError:
        kind = "remove it" if is_saved_index(self._path) else "name another file"
        return self._error(f"cannot be used: {error}; {kind}")

    def _error(self, what: str) -> ReadError:
        return ReadError(f"{named('index_cache', str(self._path))} {what}")


def _entries(folder: Path) -> list[tuple[int, int, str]]:
    """Return the entries of a folder: the time of last use, size, and path of each."""
    found = []
    with suppressing(FileNotFoundError):
        for entry in os.scandir(folder):
            # (A folder that the user has named may hold other files.)
            if re.fullmatch(_NAME, entry.name) and entry.is_file(follow_symlinks=False):
                with suppressing(FileNotFoundError):  # another process may remove it, too
                    status = entry.stat(follow_symlinks=False)
                    found.append((status.st_mtime_ns, status.st_size, entry.path))
    return found


def _remove_oldest(folder: Path, most_nbytes: int) -> None:
    entries = sorted(_entries(folder))
    surplus = sum(nbytes for _, nbytes, _ in entries) - most_nbytes
    for _, nbytes, path in entries:
        if surplus <= 0:
            return
        with suppressing(FileNotFoundError):
            os.unlink(path)
        surplus -= nbytes


def _is_ours(folder: Path) -> bool:
    """Return whether nobody else can have written to a folder."""
    status = os.stat(folder)
    is_private = status.st_uid == os.geteuid() and not status.st_mode & _OTHERS_WRITE
    return stat.S_ISDIR(status.st_mode) and is_private


# --- the layouts of a reader ---------------------------------------------------------------------


def known_of_files(
    paths: Sequence[FileName],
    wanted: Mapping[str, Wanted],
    read: _Read,
    reach: Reach,
    cache: bool | Path,
    indices: Mapping[FileName, NamedIndex],
) -> Iterator[dict[str, DatasetLayout]]:
    """Yield the wanted facts of each file, by name, in the order of the files.

    `paths` are HDF5 files and saved indices (``.h5idx``); the latter, open in `indices`, stand for
    their files. `read` reads facts of one file that no index has, by name; it returns none for a
    file that is left out. `cache` is where to store layouts; see `open_cache`.

    Raises the errors of `read`, and `ReadError` if a saved index cannot be used.
    """
    plain = [path for path in paths if not is_index(path)]
    kept = open_cache(cache, plain, list(wanted.values()), reach) if plain else None
    number = 0
    for path in paths:
        if is_index(path):
            yield from _known_of_index(indices[path], wanted, read, reach)
            continue
        known = {} if kept is None else kept.find(number)
        if known:
            found = {name: known[one] for name, one in wanted.items()}
        else:
            recording = reach if kept is None else replace(reach, consulted=Consulted())
            found = dict(read(path, list(wanted), recording))
            if kept is not None and found:
                of_wanted = {one: found[name] for name, one in wanted.items()}
                kept.note(number, of_wanted, recording.consulted)
        number += 1
        yield found
    if kept is not None:
        kept.save()


def _known_of_index(
    index: NamedIndex,
    wanted: Mapping[str, Wanted],
    read: _Read,
    reach: Reach,
) -> Iterator[dict[str, DatasetLayout]]:
    """Yield the wanted facts of each file of a saved index; missing ones are read from the file."""
    several = list(wanted.values())
    for number, name in enumerate(index.paths):
        known = index.find(number, several)
        missing = [name for name, one in wanted.items() if one not in known]
        found = read(name, missing, reach) if missing else {}
        stamp = index.stamp(number)
        for layout in found.values():
            if layout.file == name and layout.stamp != stamp:
                raise index.changed(name)
        yield {field: found.get(field) or known[one] for field, one in wanted.items()}
