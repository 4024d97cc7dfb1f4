"""Follows the links of a path to the file and object at its end, if that is permitted.

Links are followed one by one, before HDF5 sees them: it would open any file that a link, a virtual
dataset or external storage names. A file is permitted if it lies in the directory of the referring
file, or below; any other must lie below a root given by the caller. Symbolic links are resolved
first.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import h5py

from h5async.errors import DatasetError, H5AsyncError, ReadError, UnsafeFileError
from h5async.index.consulted import Consulted, NotRecorded
from h5async.index.openfailure import directory_reason, reason_unopened
from h5async.index.room import Room
from h5async.io.maps import IoMode
from h5async.io.stamps import FileStamp
from h5async.spelling import name_bytes, name_text, named
from h5async.system.interruptions import suppressing

_MAX_LINKS = 32  # per path; HDF5 stops at 16


class MissingError(DatasetError):
    """A link leads to a file that does not exist."""


_METADATA_NBYTES = 256 * 1024  # cached by HDF5 while a file is indexed


@dataclass(frozen=True)
class Reach:
    """Which other files a file may refer to, and how files are read.

    Attributes
    ----------
    roots
        Directories (or files) that may be read, wherever the file lies.
    missing_is_fill
        Whether missing sources of a virtual dataset are read as its fill value; otherwise they are
        an error.
    io
        Whether files may be mapped into memory.
    room
        Limits the memory for declared sizes.
    consulted
        Records which files were used.
    """

    roots: tuple[Path, ...] = ()
    missing_is_fill: bool = False
    io: IoMode = "auto"
    room: Room = field(default_factory=Room, compare=False, repr=False)
    consulted: Consulted = field(default=NotRecorded(), compare=False, repr=False)

    def find(self, name: str, holder: Path, variable: str, where: str) -> Path | None:
        """Return the file that `holder` refers to as `name`, or None if there is none.

        Looks where HDF5 looks first: below the directories of the environment variable `variable`,
        then beside `holder`: by the path that was opened and, if that is a symbolic link, by its
        target. An absolute name that does not exist is looked up beside `holder`. HDF5 would then
        look in the current directory, on which nobody should rely.

        Raises
        ------
        UnsafeFileError
            If it lies elsewhere, or its name is not valid.
        ReadError
            If it is not a regular file.
        """
        if not name or "\0" in name:
            raise UnsafeFileError(f"{where} refers to a file with the name {name!r}")
        self.consulted.asked(variable)
        prefixes = [
            prefix.replace("${ORIGIN}", str(holder.parent))
            for prefix in os.environ.get(variable, "").split(":")
            if prefix
        ]
        candidates = [Path(prefix, name) for prefix in prefixes] + [holder.parent / name]
        if os.path.isabs(name):
            candidates.append(holder.parent / os.path.basename(name))
        else:
            candidates.append(holder.resolve().parent / name)
        for candidate in candidates:
            found = self.permitted(candidate, holder, where)
            if found.exists():
                if not stat.S_ISREG(found.stat().st_mode):
                    raise ReadError(f"{where} refers to {found}, which is not a regular file")
                self.consulted.found(candidate, FileStamp.settled(found))
                return found
            self.consulted.missed(candidate)
        return None

    def permitted(self, target: Path, holder: Path, where: str) -> Path:
        """Return the real path of `target`; UnsafeFileError if `holder` may not refer to it."""
        try:
            resolved = target.resolve()
            beside = (holder.parent.resolve(), holder.resolve().parent)
            allowed = [*beside, *(root.resolve() for root in self.roots)]
        except (OSError, RuntimeError, ValueError) as error:  # a loop of symbolic links, or a NUL
            raise UnsafeFileError(f"{where} refers to {target}: {error}") from error
        if not any(resolved.is_relative_to(root) for root in allowed):
            raise UnsafeFileError(
                f"{where} refers to {resolved}, which is not beside {holder}; if you trust this,"
                f" allow it: {named('allow_external', [str(resolved.parent)])}"
            )
        return resolved


BESIDE = Reach()  # only files that lie beside the file


class Located(NamedTuple):
    """The end of a path: an object of a file, and the rest of the path after a dataset.

    Attributes
    ----------
    file, path, rest
        The file, the path of the object in it, and the rest.
    group, name
        The group that holds the object, and its name there.
    """

    file: h5py.File
    path: str
    rest: tuple[str, ...]
    group: h5py.h5g.GroupID
    name: bytes

    def open(self) -> h5py._objects.ObjectID:
        """Open the object; raises any exception if it is damaged."""
        return h5py.h5o.open(self.group, self.name)


class LastGroup:
    """Keeps the last group of a file in which an object was found: the next is often there, too."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._group: h5py.h5g.GroupID | None = None

    def begin(self, todo: list[str]) -> tuple[h5py.h5g.GroupID | None, list[str]]:
        """Return the group if it holds the object of the path, and the names on the way."""
        if self._group is not None and todo[:-1] == self._names:
            return self._group, list(self._names)
        return None, []

    def keep(self, names: list[str], group: h5py.h5g.GroupID) -> None:
        """Keep a group that was reached by hard links only."""
        self._names, self._group = names, group


def locate(
    file: h5py.File,
    path: str,
    reach: Reach,
    files: contextlib.ExitStack,
    last: LastGroup | None = None,
) -> Located:
    """Follow a path through groups and links.

    Parameters
    ----------
    file
        Open file in which the path begins.
    path
        HDF5 path.
    reach
        Which files external links may lead to.
    files
        Closes the files opened on the way later.
    last
        Keeps the group for the next path of the same file.

    Raises
    ------
    KeyError
        If there is nothing of that name.
    UnsafeFileError
        If an external link leads to a file that is not permitted.
    MissingError
        If the path leads to a file that does not exist.
    DatasetError
        If it leads through too many links.
    ReadError
        If a linked file cannot be opened.
    """
    todo = _components(path)
    kept, done = (None, []) if last is None else last.begin(todo)
    group: h5py.h5g.GroupID = file.id if kept is None else kept
    del todo[: len(done)]
    at, links = b".", 0
    while todo:
        name = todo.pop(0)
        at = name_bytes(name)  # h5py takes no other name that is not UTF-8
        kind = _link_type(group, at)
        if kind == h5py.h5l.TYPE_HARD:
            done.append(name)
            if todo:
                node = h5py.h5o.open(group, at)
                if isinstance(node, h5py.h5d.DatasetID):
                    return Located(file, "/".join(done), tuple(todo), group, at)
                if not isinstance(node, h5py.h5g.GroupID):
                    raise KeyError(path)
                group = node
            continue
        links += 1
        where = f'{file.filename}: link "{"/".join([*done, name])}"'
        if links > _MAX_LINKS:
            raise DatasetError(f"{where}: the path leads through more than {_MAX_LINKS} links")
        if kind == h5py.h5l.TYPE_EXTERNAL:
            holder = Path(file.filename)
            file_name, leads_to = map(name_text, group.links.get_val(at))
            target = reach.find(file_name, holder, "HDF5_EXT_PREFIX", where)
            if target is None:
                raise MissingError(f"{where} leads to {file_name}, which does not exist")
            file = files.enter_context(open_permitted(target, where))
            group, done, at = file.id, [], b"."
        elif kind == h5py.h5l.TYPE_SOFT:
            leads_to = name_text(group.links.get_val(at))
            at = b"."
            if leads_to.startswith("/"):
                group, done = file.id, []
        else:
            raise KeyError(path)
        todo = _components(leads_to) + todo
    if last is not None and not links:
        last.keep(done[:-1], group)
    return Located(file, "/".join(done) or "/", (), group, at)


def _link_type(group: h5py.h5g.GroupID, name: bytes) -> int | None:
    """Return the type of a link, or None; raises any exception if the group is damaged."""
    with suppressing(Exception):
        return int(group.links.get_info(name).type)
    return int(group.links.get_info(name).type) if group.links.exists(name) else None


def _components(path: str) -> list[str]:
    return [name for name in path.split("/") if name not in ("", ".")]


@contextlib.contextmanager
def open_index(path: Path) -> Iterator[h5py.File]:
    """Open a file like `open_hdf5`, to read its metadata once.

    HDF5 would cache up to 32 MB of them, though they are not read again.
    """
    file = open_hdf5(path, metadata_nbytes=_METADATA_NBYTES)
    try:
        yield file
    finally:
        file.close()


@contextlib.contextmanager
def metadata_cache(file: h5py.File, nbytes: int) -> Iterator[None]:
    """Let HDF5 cache `nbytes` of a file's metadata until the context ends."""
    before, cache = file.id.get_mdc_config(), file.id.get_mdc_config()
    cache.set_initial_size = True
    cache.initial_size = cache.max_size = nbytes
    cache.min_size = min(cache.min_size, nbytes)
    file.id.set_mdc_config(cache)
    try:
        yield
    finally:  # the caller may have the file open too, and share its settings
        file.id.set_mdc_config(before)


@contextlib.contextmanager
def open_permitted(path: Path, where: str) -> Iterator[h5py.File]:
    """Open a file that another one refers to, by its real path from `Reach.permitted`.

    Raises
    ------
    UnsafeFileError
        If the path leads elsewhere by now.
    ReadError
        As in `open_hdf5`.
    """
    with open_index(path) as file:
        require_in_place(path, FileStamp.of(file.id.get_vfd_handle()), where)
        yield file


def require_in_place(path: Path, opened: FileStamp, where: str) -> None:
    """Raise UnsafeFileError if a real path now leads elsewhere: a link may have been put there."""
    with suppressing(OSError, RuntimeError):
        status = os.stat(path, follow_symlinks=False)
        if path.resolve() == path and (status.st_dev, status.st_ino) == opened.file_id:
            return
    raise UnsafeFileError(f"{where} refers to {path}, which was replaced while it was opened")


def open_hdf5(path: Path, *, in_use: bool = False, metadata_nbytes: int | None = None) -> h5py.File:
    """Open a file for reading with h5py; the caller closes it.

    Parameters
    ----------
    path
        The file.
    in_use
        Whether to open a file that a writer has locked and may be writing to.
    metadata_nbytes
        The bytes of metadata that HDF5 caches; None for its default. The settings of a file that is
        already open in this process stay.

    Raises
    ------
    ReadError
        If it cannot be opened; the message says why.
    """
    try:
        with suppressing(FileNotFoundError, NotADirectoryError):
            mode = os.stat(path).st_mode
            if stat.S_ISDIR(mode):
                raise ReadError(f"cannot open {path}: {directory_reason(path)}")
            if not stat.S_ISREG(mode):  # HDF5 would wait for a pipe
                raise ReadError(f"cannot open {path}: it is not a regular file")
        try:
            # `h5py.File` would make new property lists for each file.
            properties = _access_properties(metadata_nbytes)
            return h5py.File(h5py.h5f.open(os.fsencode(path), h5py.h5f.ACC_RDONLY, properties))
        except OSError as error:
            # The caller has it open without locking, and HDF5 requires equal settings; or a writer
            # permits readers (SWMR).
            if "file locking flag" in str(error) or (in_use and error.errno == errno.EAGAIN):
                return h5py.File(path, "r", locking=False)
            if "already open for write" not in str(error):
                raise
            with suppressing(OSError):
                return h5py.File(path, "r", swmr=True)
            raise
    except H5AsyncError:
        raise
    except (OSError, RuntimeError, ValueError) as error:
        raise ReadError(f"cannot open {path}: {reason_unopened(path, error)}") from error


@functools.cache
def _access_properties(metadata_nbytes: int | None) -> h5py.h5p.PropFAID:
    """Return the default access properties or, to read metadata, those without a chunk cache.

    HDF5 would allocate that cache whenever a dataset is opened.
    """
    properties = h5py.h5p.create(h5py.h5p.FILE_ACCESS)
    if metadata_nbytes is not None:
        unused, _slots, _nbytes, preemption = properties.get_cache()
        properties.set_cache(unused, 0, 0, preemption)
        cache = properties.get_mdc_config()
        cache.set_initial_size = True
        cache.initial_size = cache.max_size = metadata_nbytes
        cache.min_size = min(cache.min_size, metadata_nbytes)
        properties.set_mdc_config(cache)
    return properties
