"""Gets the layouts of a reader's files from saved indices while these are valid, or by indexing.

Layouts that were read are stored for later readers: in the user's cache folder, or in a given file.
If anything is wrong with an entry of the folder, the files are silently indexed again. An entry is
for one reader: its files, in order, and its datasets.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from types import MappingProxyType
from typing import NamedTuple, NoReturn

import h5py

from h5async.config import Field
from h5async.config.files import INDEX_SUFFIX, FileName, is_index
from h5async.errors import ReadError
from h5async.index.contents import Grouping
from h5async.index.layout import DatasetLayout
from h5async.index.links import Consulted, Reach
from h5async.index.metadata import read_layouts
from h5async.index.savedfile import is_saved_index, remove_unfinished
from h5async.index.savedindex import IndexedFile, NamedIndex, SavedIndex, Wanted, write_index
from h5async.index.savedkinds import NotPortableError, SavedIndexError
from h5async.io.stores import absolute_name, is_at
from h5async.spelling import named
from h5async.system.interruptions import suppressing

MOST_NBYTES = 1 << 30  # of all entries in the folder
LEAST_SECONDS = 0.02  # of indexing; quicker results are not stored
_TOUCHED_SECONDS = 86400  # the least interval between marking an entry as used
_NAME = rf"[0-9a-f]{{32}}\{INDEX_SUFFIX}"  # of an entry: a key, as `_key` makes it
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def open_cache(
    place: bool | Path, paths: Sequence[FileName], wanted: Sequence[Wanted], reach: Reach
) -> IndexCache | None:
    """Return the cache for a reader, or None.

    Parameters
    ----------
    place
        True: the user's cache folder. False: none. A path: a folder, or the file itself.
    paths, wanted, reach
        What the reader reads.

    Raises
    ------
    ReadError
        If a given file is not a saved index of this user, or is damaged.
    """
    if place is False:
        return None
    key = ""
    with suppressing(OSError):  # the current directory may have been removed
        files = [absolute_name(path) for path in paths]
        key = _key(files, [*dict.fromkeys(wanted)], reach)
    if not key:
        return None
    if place is True or place.is_dir():
        folder = cache_folder() if place is True else place
        return (
            None if folder is None else _Entry(folder / f"{key}{INDEX_SUFFIX}", key, files, reach)
        )
    return _GivenFile(place, key, files, reach)


def cache_folder() -> Path | None:
    """Return the user's folder of entries, which may not exist; None if there is no home."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):
        base = os.path.expanduser("~/.cache")
    return Path(base, "h5async", "index") if os.path.isabs(base) else None


def clear_cache(folder: Path) -> tuple[int, int]:
    """Remove all entries of a folder; return their number and their bytes.

    OSError if one cannot be removed.
    """
    entries = _entries(folder)
    for entry in entries:
        os.unlink(entry.path)
    remove_unfinished(folder, _NAME)
    return len(entries), sum(entry.nbytes for entry in entries)


def _key(files: Sequence[str], wanted: Sequence[Wanted], reach: Reach) -> str:
    """Return a text that differs for entries of different content."""
    roots = [str(root.absolute()) for root in reach.roots]
    versions = h5py.__version__, h5py.version.hdf5_version
    parts = [files, wanted, roots, reach.missing_is_fill, versions]
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()


class IndexCache:
    """The layouts of the files of one reader, and where they are stored. Used by one thread.

    Parameters
    ----------
    path
        The stored file.
    key
        Identifies the content.
    files
        Absolute paths of the files.
    reach
        With which they are indexed.
    """

    def __init__(self, path: Path, key: str, files: Sequence[str], reach: Reach) -> None:
        self._path = path
        self._key = key
        self._files = files
        self._reach = reach
        self._begin = perf_counter()
        self._seconds = 0.0
        self._found: dict[int, dict[Wanted, DatasetLayout]] = {}
        self._new: dict[int, IndexedFile] = {}
        self._index = self._open()
        self._is_fresh = [] if self._index is None else self._index.fresh_files()

    def find(self, number: int) -> dict[Wanted, DatasetLayout]:
        """Return the known layouts of a file; nothing if it has changed."""
        self._begin = perf_counter()
        if self._index is None or not self._is_fresh[number]:
            return {}
        try:
            found = self._index.find(number, self._index.datasets(number), self._reach)
        except SavedIndexError as error:
            self._give_up(error)
            return {}
        if len(found) == len(self._index.datasets(number)):
            self._found[number] = found
            return found
        return {}

    def note(
        self, number: int, layouts: Mapping[Wanted, DatasetLayout], consulted: Consulted
    ) -> None:
        """Add the layouts of a file that `find` did not have."""
        self._seconds += perf_counter() - self._begin
        self._new[number] = IndexedFile(self._files[number], dict(layouts), consulted)

    def _all(self) -> list[IndexedFile]:
        """Return all layouts known now, old and new."""
        several = []
        for number, path in enumerate(self._files):
            new = self._new.get(number)
            if new is None:
                assert self._index is not None
                consulted = self._index.consulted(number)
                new = IndexedFile(path, self._found[number], consulted)
            several.append(new)
        return several

    def _has_settled(self) -> bool:
        """Return whether all files are still as they were when indexed."""
        return all(
            is_at(name, stamp)
            for file in self._new.values()
            for name, stamp in file.consulted.files.items()
        )

    def save(self) -> None:
        """Store the layouts, after all files were requested."""
        raise NotImplementedError

    def _open(self) -> SavedIndex | None:
        raise NotImplementedError

    def _give_up(self, error: SavedIndexError) -> None:
        raise NotImplementedError


class _Entry(IndexCache):
    """An entry of a folder; its defects are not reported."""

    def _open(self) -> SavedIndex | None:
        with suppressing(OSError, SavedIndexError):
            if not _is_ours(self._path.parent):
                return None
            # (Files are replaced there, and never written to: so they can be mapped.)
            index = SavedIndex(
                self._path, owners=(os.geteuid(),), may_map=self._reach.io != "pread"
            )
            if index.key != self._key or index.paths != self._files:
                return None
            if time.time() - os.stat(self._path).st_mtime > _TOUCHED_SECONDS:
                os.utime(self._path)
            return index
        return None

    def _give_up(self, error: SavedIndexError) -> None:
        self._index = None
        self._found.clear()
        self._seconds = max(self._seconds, LEAST_SECONDS)

    def save(self) -> None:
        """Write the entry if it is worth it, and remove old entries if there are too many."""
        if self._seconds < LEAST_SECONDS or not self._is_complete():
            return
        with suppressing(OSError, NotPortableError, UnicodeError):
            folder = self._path.parent
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if _is_ours(folder) and self._has_settled():
                write_index(self._path, self._all(), self._reach, key=self._key, is_entry=True)
                _remove_oldest(folder, MOST_NBYTES)
                remove_unfinished(folder, _NAME)

    def _is_complete(self) -> bool:
        return all(n in self._new or n in self._found for n in range(len(self._files)))


class _GivenFile(IndexCache):
    """A file named by the user; its defects are errors."""

    def _open(self) -> SavedIndex | None:
        if not os.path.lexists(self._path):
            return None
        try:
            index = SavedIndex(
                self._path, owners=(os.geteuid(), 0), may_map=self._reach.io != "pread"
            )
        except SavedIndexError as error:
            self._give_up(error)
        except OSError as error:
            raise ReadError(
                f"{named('index_cache', str(self._path))} cannot be read: {error.strerror or error}"
            ) from error
        if index.paths != self._files or not index.key:
            what = "was written by h5async index" if not index.key else "is of other files"
            raise ReadError(
                f"{named('index_cache', str(self._path))} {what}, and would be overwritten;"
                " name another"
                f" file, or, to read its files, {named('hdf5_path', str(self._path))}"
            )
        return index if index.key == self._key else None

    def _give_up(self, error: SavedIndexError) -> NoReturn:
        kind = "remove it" if is_saved_index(self._path) else "name another file"
        raise ReadError(
            f"{named('index_cache', str(self._path))} cannot be used: {error}; {kind}"
        ) from error

    def save(self) -> None:
        """Write the file if there is anything new; ReadError if that fails."""
        if not self._new:
            return
        try:
            if self._has_settled():
                with suppressing(NotPortableError):
                    write_index(self._path, self._all(), self._reach, key=self._key)
        except OSError as error:
            raise ReadError(
                f"{named('index_cache', str(self._path))} cannot be written:"
                f" {error.strerror or error}"
            ) from error


class _EntryFile(NamedTuple):
    path: str
    nbytes: int
    used_ns: int


def _entries(folder: Path) -> list[_EntryFile]:
    found = []
    with suppressing(FileNotFoundError):
        for entry in os.scandir(folder):
            # In a folder that the user has named, other files are the user's.
            if re.fullmatch(_NAME, entry.name) and entry.is_file(follow_symlinks=False):
                with suppressing(FileNotFoundError):  # another process may remove it, too
                    status = entry.stat(follow_symlinks=False)
                    found.append(_EntryFile(entry.path, status.st_size, status.st_mtime_ns))
    return found


def _remove_oldest(folder: Path, most_nbytes: int) -> None:
    """Remove least recently used entries until the others are small enough."""
    entries = sorted(_entries(folder), key=lambda entry: entry.used_ns)
    surplus = sum(entry.nbytes for entry in entries) - most_nbytes
    for entry in entries:
        if surplus <= 0:
            return
        with suppressing(FileNotFoundError):
            os.unlink(entry.path)
        surplus -= entry.nbytes


def _is_ours(folder: Path) -> bool:
    """Return whether nobody else can have written to a folder."""
    status = os.stat(folder)
    is_private = status.st_uid == os.geteuid() and not status.st_mode & _OTHERS_WRITE
    return stat.S_ISDIR(status.st_mode) and is_private


# --- the layouts of a reader ---------------------------------------------------------------------


def layouts_of_files(
    paths: Sequence[FileName],
    fields: Mapping[str, Field],
    reach: Reach,
    cache: bool | Path,
    grouping: Grouping | None = None,
) -> Iterator[dict[str, DatasetLayout]]:
    """Yield the layouts of all fields in each file, in the order of the files.

    Parameters
    ----------
    paths
        HDF5 files, and saved indices (``.h5idx``), each of which represents its files.
    fields
        By name.
    reach
        Which other files may be read, and how.
    cache
        Where to store layouts; see `open_cache`.
    grouping
        Which groups of the files are sequences whose datasets are joined.

    Raises
    ------
    H5AsyncError
        As in `read_layouts`; `ReadError` if a saved index cannot be used.
    """

    def read(path: FileName, names: Sequence[str], reach: Reach) -> dict[str, DatasetLayout]:
        return read_layouts(path, {name: fields[name] for name in names}, reach, grouping)

    wanted = {name: Wanted.of(field, grouping) for name, field in fields.items()}
    return known_of_files(paths, wanted, read, reach, cache)


def known_of_files(
    paths: Sequence[FileName],
    wanted: Mapping[str, Wanted],
    read: Callable[[FileName, Sequence[str], Reach], Mapping[str, DatasetLayout]],
    reach: Reach,
    cache: bool | Path,
    indices: Mapping[FileName, NamedIndex] = MappingProxyType({}),
) -> Iterator[dict[str, DatasetLayout]]:
    """Yield the facts wanted of each file, in the order of the files; see `layouts_of_files`.

    Parameters
    ----------
    paths, reach, cache
        As there.
    wanted
        By name.
    read
        Reads facts that no index has: some names, of one file.
    indices
        Saved indices that are already open.
    """
    plain = [path for path in paths if not is_index(path)]
    kept = open_cache(cache, plain, list(wanted.values()), reach) if plain else None
    number = 0
    for path in paths:
        if is_index(path):
            index = indices.get(path) or NamedIndex(path, reach)
            yield from _known_of_index(index, wanted, read, reach)
            continue
        known = {} if kept is None else kept.find(number)
        found: Mapping[str, DatasetLayout]
        if not known and kept is not None:
            consulted = Consulted()
            found = read(path, list(wanted), replace(reach, consulted=consulted))
            kept.note(number, {one: found[name] for name, one in wanted.items()}, consulted)
        elif kept is None:
            found = read(path, list(wanted), reach)
        else:
            found = {name: known[one] for name, one in wanted.items()}
        number += 1
        yield dict(found)
    if kept is not None:
        kept.save()


def _known_of_index(
    index: NamedIndex,
    wanted: Mapping[str, Wanted],
    read: Callable[[FileName, Sequence[str], Reach], Mapping[str, DatasetLayout]],
    reach: Reach,
) -> Iterator[dict[str, DatasetLayout]]:
    """Yield the facts in a saved index; others are read from its files."""
    several = list(wanted.values())
    for number, name in enumerate(index.paths):
        known = index.find(number, several, reach)
        missing = [name for name, one in wanted.items() if one not in known]
        found = read(name, missing, reach) if missing else {}
        stamp = index.stamp(number)
        for layout in found.values():
            if layout.file == name and layout.stamp != stamp:
                raise index.changed(name)
        yield {field: found.get(field) or known[one] for field, one in wanted.items()}
