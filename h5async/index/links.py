"""Follows the links of a path to the file and object at its end, if that is permitted.

Links are followed one by one, before HDF5 sees them: it would open any file that a link, a virtual
dataset or external storage names. A file is permitted if it lies in the directory of the referring
file, or below; any other must lie below a root given by the caller. Symbolic links are resolved
first. The same rules apply to sources in another store and the sources beside them. All that was
used is recorded: layouts stay valid as long as none of it changes.

A file of a few bytes may declare any number of samples, columns or names. The memory for these is
counted (`Room`) before it is allocated.
"""

from __future__ import annotations

import contextlib
import os
import posixpath
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

import h5py

from h5async.config.files import FileName, SourceName, scheme_of
from h5async.errors import BudgetError, DatasetError, H5AsyncError, ReadError, UnsafeFileError
from h5async.index.alikefiles import Alike
from h5async.index.layout import DatasetLayout
from h5async.io.hdf5files import HDF5File
from h5async.io.obstoreclient import WEB
from h5async.io.source import FileStamp, IoMode
from h5async.io.stores import absolute_name, open_hdf5, settled_stamp, store_of
from h5async.spelling import name_bytes, name_text, named
from h5async.system.interruptions import suppressing
from h5async.system.resources import free_memory

_MAX_LINKS = 32  # per path; HDF5 stops at 16
MEMORY_SHARE = 0.5  # of free memory, if no limit is given
_LEAST_NBYTES = 64 << 20  # always allowed
_TIMES_STORED = 64  # enough for well-compressed fields of one byte per sample, and their tables


class MissingError(DatasetError):
    """A link leads to a file that does not exist."""


_METADATA_NBYTES = 256 * 1024  # of HDF5's metadata cache while a file is indexed


class Consulted:
    """The dependencies of layouts. Used by one thread.

    If it `is_stable`, later changes can be detected. It is not if this process has a file open for
    writing: HDF5's facts may not be in the file yet.
    """

    def __init__(self) -> None:
        self.files: dict[str, FileStamp] = {}  # by the path as used
        self.absent: set[str] = set()  # paths where nothing was found
        self.variables: dict[str, str] = {}  # environment variables that were read
        self.folder: str | None = None  # the current directory, if a name was relative to it
        self.is_stable = True

    def found(self, path: FileName, stamp: FileStamp, *, is_written: bool = False) -> None:
        """Record a file; it `is_written` if this process has it open for writing."""
        name = self._name(path)
        if is_written or self.files.setdefault(name, stamp) != stamp:
            self.is_stable = False

    def missed(self, path: FileName) -> None:
        """Record that nothing was found at a path."""
        self.absent.add(self._name(path))

    def asked(self, variable: str) -> None:
        """Record that an environment variable was read."""
        self.variables[variable] = os.environ.get(variable, "")

    def _name(self, path: FileName) -> str:
        if not os.path.isabs(path) and store_of(path).is_local:
            self.folder = os.getcwd()
        return absolute_name(path)


class _NotRecorded(Consulted):
    def found(self, path: FileName, stamp: FileStamp, *, is_written: bool = False) -> None:
        pass

    def missed(self, path: FileName) -> None:
        pass

    def asked(self, variable: str) -> None:
        pass


class Room:
    """Limits the memory for sizes that files declare, while a reader opens them.

    `max_batch_bytes` bytes, a reader's option, are always allowed.
    """

    def __init__(self, max_batch_bytes: int | None = None) -> None:
        self._least = max(_LEAST_NBYTES, max_batch_bytes or 0)
        self._stored: dict[str, int] = {}
        self._taken = 0

    def take(self, nbytes: int, what: str, files: Iterable[tuple[str, FileStamp]]) -> None:
        """Count memory that is about to be allocated; BudgetError if it exceeds the limit.

        `what` begins the message: ``'a.h5: dataset "x" of shape (4,): its values'``. `files` are
        the names and stamps of the files that hold the dataset, from `files_of`.
        """
        wanted = self._taken + nbytes
        if wanted > self._least:
            self._stored |= {name: stamp.nbytes for name, stamp in files}
            stored = sum(self._stored.values())
            free = int(MEMORY_SHARE * free_memory()[0].nbytes)
            limit = max(self._least, min(_TIMES_STORED * stored, free))
            if wanted > limit:
                before = f" besides {self._taken:,} for others" if self._taken else ""
                raise BudgetError(
                    f"{what} need {nbytes:,} bytes{before}, more than the limit of {limit:,} for"
                    f" files of {stored:,} bytes and {free:,} bytes of usable memory; store fewer,"
                    f" or set {named('max_batch_bytes')} to {wanted} if you trust the"
                    " file"
                )
        self._taken = wanted


def files_of(*layouts: DatasetLayout) -> Iterator[tuple[str, FileStamp]]:
    """Yield name and stamp of each file that holds any of some datasets."""
    for layout in layouts:
        yield layout.file, layout.stamp
        yield from layout.attached
        yield from ((heap.file, heap.stamp) for heap in layout.heaps)
        for leaf in layout.leaves():
            yield from ((origin.file, origin.stamp) for origin in (leaf, *leaf.origins()))


_NAMED = partial(SourceName, options={})


@dataclass(frozen=True)
class Reach:
    """Which other files a file may refer to, and how files are read.

    `roots` are directories (or files) that may be read, wherever the file lies. Missing sources of
    a virtual dataset are an error, unless `missing_is_fill`. `room` limits the memory for declared
    sizes; `consulted` records which files were used; `named` adds client options to names; `alike`
    recognizes datasets and files like earlier ones; None: only datasets within a file.
    """

    roots: tuple[FileName, ...] = ()
    missing_is_fill: bool = False
    io: IoMode = "auto"
    room: Room = field(default_factory=Room, compare=False, repr=False)
    consulted: Consulted = field(default=_NotRecorded(), compare=False, repr=False)
    named: Callable[[str], SourceName] = field(default=_NAMED, compare=False, repr=False)
    alike: Alike | None = field(default=None, compare=False, repr=False)

    def find(self, name: str, holder: str, variable: str, where: str) -> FileName | None:
        """Return the file that `holder` refers to as `name`, or None if there is none.

        Looks where HDF5 looks first: below the directories in the environment variable `variable`,
        then beside `holder`: by the path that was opened and, if that is a symbolic link, by its
        target. An absolute name that does not exist is looked up beside `holder`. HDF5 would then
        look in the current directory, on which nobody should rely. A source in another store may
        only refer to other sources: a name is a path beside it, or a URL.

        UnsafeFileError if the file lies elsewhere, or its name is not valid; ReadError if it is not
        a regular file.
        """
        if not name or "\0" in name:
            raise UnsafeFileError(f"{where} refers to a file with the name {name!r}")
        if not store_of(holder).is_local:
            return self._find_far(name, holder, where)
        self.consulted.asked(variable)
        referring = Path(holder)
        folder = referring.parent
        prefixes = [
            prefix.replace("${ORIGIN}", str(folder))
            for prefix in os.environ.get(variable, "").split(":")
            if prefix
        ]
        candidates = [Path(prefix, name) for prefix in prefixes] + [folder / name]
        if os.path.isabs(name):
            candidates.append(folder / os.path.basename(name))
        else:
            candidates.append(referring.resolve().parent / name)
        for candidate in candidates:
            found = self.permitted(candidate, referring, where)
            if found.exists():
                if not found.is_file():
                    raise ReadError(f"{where} refers to {found}, which is not a regular file")
                self.consulted.found(candidate, settled_stamp(found))
                return found
            self.consulted.missed(candidate)
        return None

    def _find_far(self, name: str, holder: str, where: str) -> SourceName | None:
        target = self.permitted_source(beside(holder, name, where), holder, where)
        try:
            self.consulted.found(target, settled_stamp(target))
        except FileNotFoundError:
            self.consulted.missed(target)
            return None
        except OSError as error:
            raise ReadError(f"{where} refers to {target}: {error.strerror or error}") from error
        return target

    def permitted_source(self, target: str, holder: str, where: str) -> SourceName:
        """Return the name of a far source; UnsafeFileError if `holder` may not refer to it."""
        folder = holder.partition("?")[0].rpartition("/")[0]
        if not self.is_below_root(target) and not target.startswith(f"{folder}/"):
            raise UnsafeFileError(
                f"{where} refers to {target}, which is not beside {holder}; if you trust this,"
                f" allow it: {named('allow_external', [target.rpartition('/')[0]])}"
            )
        return self.named(target)

    def is_below_root(self, target: str) -> bool:
        """Return whether a far source is one of the roots, or below one."""
        roots = [root.rstrip("/") for root in self.roots if isinstance(root, str)]
        return any(target == root or target.startswith(f"{root}/") for root in roots)

    def permitted(self, target: Path, holder: Path, where: str) -> Path:
        """Return the real path of `target`; UnsafeFileError if `holder` may not refer to it."""
        try:
            resolved = target.resolve()
            siblings = (holder.parent.resolve(), holder.resolve().parent)
            allowed = [*siblings, *self.resolved_roots()]
        except (OSError, RuntimeError, ValueError) as error:  # a loop of symbolic links, or a NUL
            raise UnsafeFileError(f"{where} refers to {target}: {error}") from error
        if not any(resolved.is_relative_to(root) for root in allowed):
            raise UnsafeFileError(
                f"{where} refers to {resolved}, which is not beside {holder}; if you trust this,"
                f" allow it: {named('allow_external', [str(resolved.parent)])}"
            )
        return resolved

    def resolved_roots(self) -> list[Path]:
        """Return the real paths of the roots that are local."""
        return [root.resolve() for root in self.roots if isinstance(root, Path)]


def beside(holder: str, name: str, where: str) -> str:
    """Return the full name of the source that a far source refers to as `name`, wherever it is.

    UnsafeFileError if `name` is not valid.
    """
    url = name if scheme_of(name) else ""
    if not url:
        root, _, key = holder.partition("?")[0].partition("://")
        host, _, key = key.partition("/")
        own = posixpath.basename(name) if posixpath.isabs(name) else name
        path = posixpath.normpath(posixpath.join(posixpath.dirname(key), own))
        url = f"{root}://{host}/{quote(path) if root.lower() in WEB else path}"
    is_plain = scheme_of(url) not in WEB or "?" not in url
    if ".." in url.split("/") or not is_plain or (name == url and "%" in url):
        raise UnsafeFileError(f"{where} refers to {name!r}, which is not a valid name")
    return url


def require_same_store(holder: str, name: str, where: str) -> None:
    """Raise UnsafeFileError if a local file refers to a source of another store, or vice versa."""
    if store_of(holder) is not store_of(name):
        raise UnsafeFileError(
            f"{where} refers to {name!r}, which lies in another store; files may only refer to"
            " files of the same store"
        )


BESIDE = Reach()  # only files that lie beside the file


class Located(NamedTuple):
    """The end of a path: an object at `path` in a file, and the rest of the path after a dataset.

    `group` holds the object, by `name`; `address` is that of the object, -1 if unknown.
    """

    file: HDF5File
    path: str
    rest: tuple[str, ...]
    group: h5py.h5g.GroupID
    name: bytes
    address: int = -1

    def open(self) -> h5py._objects.ObjectID:
        """Open the object; raises any exception if it is damaged."""
        return h5py.h5o.open(self.group, self.name)


# The group of a file that held the last object, by the names that lead to it, if only through hard
# links: the next object is often in the same group.
LastGroup = dict[tuple[str, ...], h5py.h5g.GroupID]


def locate(
    file: HDF5File,
    path: str,
    reach: Reach,
    files: contextlib.ExitStack,
    last: LastGroup | None = None,
) -> Located:
    """Follow a path through groups and links, from an open file.

    `reach` says which files external links may lead to. Files opened on the way are added to
    `files`, which closes them. `last` keeps the group for the next path in the same file. A path
    ``other.h5::path`` leads to another file, unless there is an object of that name.

    KeyError if there is no such object; UnsafeFileError if an external link leads to a file that is
    not permitted; MissingError if it does not exist; DatasetError for too many links; ReadError if
    a linked file cannot be opened.
    """
    other, mark, rest = path.rpartition("::")
    if mark and not file.id.links.exists(name_bytes(components(path)[0])):
        file = _other_file(file, other, f'{file.filename}: path "{path}"', reach, files)
        path = rest
        last = None
    todo = components(path)
    done, group = todo[:-1], file.id
    if last and (found := last.get(tuple(done))) is not None:
        group, todo = found, todo[-1:]
    else:
        done = []
    at, links, address = b".", 0, -1
    while todo:
        name = todo.pop(0)
        at = name_bytes(name)  # bytes: h5py takes no `str` for names that are not UTF-8
        kind, address = _link(group, at)
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
            file_name, leads_to = map(name_text, group.links.get_val(at))
            file = _other_file(file, file_name, where, reach, files)
            group, done, at = file.id, [], b"."
        elif kind == h5py.h5l.TYPE_SOFT:
            leads_to = name_text(group.links.get_val(at))
            at = b"."
            if leads_to.startswith("/"):
                group, done = file.id, []
        else:
            raise KeyError(path)
        todo = components(leads_to) + todo
    if last is not None and not links and tuple(done[:-1]) not in last:
        last.clear()
        last[tuple(done[:-1])] = group
    address = -1 if at == b"." else address
    return Located(file, "/".join(done) or "/", (), group, at, address)


def found_at(
    file: HDF5File, path: str, reach: Reach, files: contextlib.ExitStack
) -> tuple[Located, h5py._objects.ObjectID] | None:
    """Follow a path like `locate`, and open the object; None if it is not there, or damaged."""
    try:
        found = locate(file, path, reach, files)
        return found, found.open()
    except (H5AsyncError, MemoryError):
        raise
    except Exception:
        return None


def _other_file(
    file: HDF5File, name: str, where: str, reach: Reach, files: contextlib.ExitStack
) -> HDF5File:
    target = reach.find(name, file.filename, "HDF5_EXT_PREFIX", where)
    if target is None:
        raise MissingError(f"{where} leads to {name}, which does not exist")
    return files.enter_context(open_permitted(target, where))


def below(parent: str, path: str) -> str:
    """Return the full path of `path` below the group `parent`, maybe in another file."""
    file, mark, rest = path.rpartition("::")
    return f"{file}{mark}{parent}/{rest}" if parent else path


def _link(group: h5py.h5g.GroupID, name: bytes) -> tuple[int | None, int]:
    """Return the type of a link, or None, and the address that a hard link leads to.

    Raises any exception if the group is damaged.
    """
    with suppressing(Exception):
        found = group.links.get_info(name)
        return int(found.type), int(found.u)
    return (int(group.links.get_info(name).type) if group.links.exists(name) else None), -1


def components(path: str) -> list[str]:
    """Return the names of a path."""
    return [name for name in path.split("/") if name not in ("", ".")]


def open_index(path: FileName) -> HDF5File:
    """Open a file like `open_hdf5`, to read its metadata once.

    HDF5 would cache up to 32 MB of metadata, though none are read again.
    """
    return open_hdf5(path, _METADATA_NBYTES)


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
    finally:  # the caller may also have the file open, and shares these settings
        if file:  # else it was closed first, because a signal handler raised as the context began
            file.id.set_mdc_config(before)


@contextlib.contextmanager
def open_permitted(path: FileName, where: str) -> Iterator[HDF5File]:
    """Open a file that another one refers to, by the name that `Reach.find` returned.

    UnsafeFileError if the path leads elsewhere by now; ReadError as in `open_hdf5`.
    """
    with open_index(path) as file:
        require_in_place(path, file.source.stamp(), where)
        yield file


def require_in_place(path: FileName, opened: FileStamp, where: str) -> None:
    """Raise UnsafeFileError if a real path now leads elsewhere: a link may have been put there."""
    is_in_place = not isinstance(path, Path)
    with suppressing(OSError, RuntimeError):
        if isinstance(path, Path) and path.resolve() == path:
            status = path.lstat()
            is_in_place = (status.st_dev, status.st_ino) == opened.file_id
    if not is_in_place:
        raise UnsafeFileError(f"{where} refers to {path}, which was replaced while it was opened")
