"""Keeps a file open in HDF5, apart from the program's own handles, to read its datasets.

A local file is kept open without a lock, by a driver that makes it a different file to HDF5 than
one that the program opens, to read or to write. Once the file has changed, or this process writes
to it, it is opened anew each time, so that no metadata are used that HDF5 has cached.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from weakref import WeakValueDictionary

import h5py

from h5async.arrays.boxreading import Threads
from h5async.arrays.firstreading import Stored
from h5async.config import ReaderConfig
from h5async.config.files import is_index
from h5async.errors import ConfigError, DatasetError, H5AsyncError, ReaderClosedError
from h5async.index.contents import what_is_there
from h5async.index.datasets import Indexer
from h5async.index.hdf5 import reading
from h5async.index.indexcache import known_of_files
from h5async.index.layout import DatasetLayout
from h5async.index.links import LastGroup, Located, Reach, locate, open_index
from h5async.index.savedindex import NamedIndex, Wanted
from h5async.io.hdf5files import HDF5File, affordable_files
from h5async.io.metadatafile import Ahead
from h5async.io.source import FileStamp, changed, settled
from h5async.io.stores import open_apart, store_of
from h5async.opening.filevalues import reach_of
from h5async.system import interruptions
from h5async.system.interruptions import call_when_gone, interruption, passing, suppressing
from h5async.system.resources import usable_cores

OPEN_AGAIN = "open the file again"
_RECENT = 32  # datasets that keep files and memory to read with


class InUse(Protocol):
    """A dataset that holds files and memory to read with, until it is closed."""

    def close(self) -> None:
        """Release them."""


class Attributes(Mapping[str, Any]):
    """The attributes of an object. Access to one that cannot be read raises its error."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values

    def __getitem__(self, name: str) -> Any:
        value = self._values[name]
        if isinstance(value, H5AsyncError):
            raise value
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"<attributes {self._values}>"


class _Opened(NamedTuple):
    """A file open in HDF5, with its state, and the group and objects that were found last."""

    file: HDF5File
    stamp: FileStamp
    last: LastGroup
    objects: dict[str, tuple[Located, Any]]


# Of this process, by ID and state: HDF5 shares its caches among handles of the same file.
_kept_files: WeakValueDictionary[tuple[int, FileStamp], HDF5File] = WeakValueDictionary()
# Objects left open by handles that are gone. The garbage collector may run while HDF5 calls Python,
# when nothing must be closed.
_left: list[dict[Any, Any]] = []


def _knows_another(stamp: FileStamp) -> bool:
    """Return whether HDF5 has an earlier state of a file open, and so remembers its metadata."""
    several = (ref.key[1] for ref in _kept_files.valuerefs())
    return any(one.file_id == stamp.file_id and one != stamp for one in several)


def _close_soon(held: dict[Any, Any]) -> None:
    _left.append(held)
    if not h5py._objects.phil._is_owned():
        _close_left()


def _close_left() -> None:
    with suppressing(IndexError):  # another thread may be faster
        while True:
            held = _left.pop()
            for one in held.values():
                if isinstance(one, _Opened):
                    one.file.close()
            held.clear()  # (`call_when_gone` keeps it in a cycle)


class Handle:
    """A file by its path, in the state in which it was opened first.

    Safe to use from many threads. `arguments` are those to create another one.
    """

    def __init__(
        self, path: Any, num_threads: int | None, cache_bytes: int, options: Mapping[str, Any]
    ) -> None:
        given = {name: value for name, value in options.items() if value is not None}
        config = ReaderConfig(hdf5_path=path, **given)
        if len(config.files) != 1:
            raise ConfigError(f"open_file reads one file, found {len(config.files)}")
        name = config.files[0]
        if isinstance(name, Path):  # opened again later, when the current directory may differ
            name = path = name.absolute()
        self.max_nbytes = config.max_batch_bytes or 0
        self.reach, self.kept, self.cache_nbytes = reach_of(config), config.kept, cache_bytes
        self._named, self._index_cache = name, config.index_cache
        self._indices = {name: NamedIndex(name, self.reach)} if is_index(name) else {}
        for index in self._indices.values():
            if len(index.paths) != 1:
                raise ConfigError(f"open_file reads one file, {name} has {len(index.paths)}")
            name = index.paths[0]
        self.is_near = store_of(name).is_local
        self.path, self.filename = name, str(name)
        self.threads = Threads(usable_cores() if num_threads is None else max(1, num_threads))
        self.arguments = path, num_threads, cache_bytes, dict(options)
        self._recent: dict[InUse, None] = {}
        self._lock = threading.RLock()
        self._stamp: FileStamp | None = None
        self.kept_file: _Opened | None = None
        self.held: dict[Any, Any] = {}  # everything that h5py has open for it
        call_when_gone(self, _close_soon, self.held)
        self._ahead, self._num_forks = Ahead(), interruptions.num_forks
        self.known: dict[bytes, Stored] = {}
        self._is_closed = False

    def close(self) -> None:
        """Close everything opened to read; datasets can no longer be read. Idempotent."""
        self._is_closed = True
        self.release()

    def release(self) -> None:
        """Close everything opened to read, until something is read again."""
        with self._lock:
            recent, self._recent, self.kept_file = list(self._recent), {}, None
            self.held.pop(self.path, None)
            self._ahead.close()
            self._ahead = Ahead()
        for dataset in recent:
            dataset.close()
        self.threads.close()

    @contextlib.contextmanager
    def opened(self, path: str, *, may_differ: bool = False) -> Iterator[tuple[Located, Any]]:
        """Open an object as `open_object` does, until the context ends."""
        with passing(), contextlib.ExitStack() as files:
            yield self.open_object(path, files, may_differ=may_differ)

    def open_object(
        self, path: str, files: contextlib.ExitStack, *, may_differ: bool = False
    ) -> tuple[Located, Any]:
        """Open the object at a path in HDF5, until `files` are closed.

        Raises `DatasetError` if none is there, `ReadError` if the file changed but may not differ.
        """
        self.require_open()
        if _left:
            _close_left()
        if not self.is_near:  # in turns, so that each thread can use what others fetched
            files.enter_context(self._lock)
            files.enter_context(self._far().used())
        with self._lock:
            kept = self._current_file() or self._open(files, may_differ)
            found = kept.objects.get(path)
            if found is None:
                found = self._located(kept, path, files)
                if found[0].file is kept.file:
                    kept.objects[path] = found
                    if len(kept.objects) > _RECENT:
                        del kept.objects[next(iter(kept.objects))]
        return found

    def _far(self) -> Ahead:
        """Return this process's far sources, which keep what was read of them."""
        if self._num_forks != interruptions.num_forks:
            self._ahead, self._num_forks = Ahead(), interruptions.num_forks
        return self._ahead

    def layout(self, path: str, located: Located, node: h5py.h5d.DatasetID) -> DatasetLayout:
        """Return the layout of an open dataset: the one of a saved index while that is valid."""

        def read(_: object, names: Iterable[str], reach: Reach) -> dict[str, DatasetLayout]:
            found = Indexer(located.file, reach).layout(located.path, node, (), 0)
            return dict.fromkeys(names, found)

        if located.file.filename == self.filename:
            where = [self._named], {path: Wanted.at(path)}, read, self.reach
            (found,) = known_of_files(*where, self._index_cache, self._indices)
            if found[path].stamp == located.file.source.stamp():
                return found[path]
        return read(None, [path], self.reach)[path]

    def kept_object(self, path: str) -> tuple[Located, Any] | None:
        """Return an object of a local file if HDF5 has kept it open; None if not.

        After reading from it, `is_kept` tells whether the values are valid.
        """
        kept = self.kept_file
        return None if kept is None else kept.objects.get(path)

    def attributes(self, path: str) -> Attributes:
        """Read the attributes of an object."""
        found: dict[str, Any] = {}
        with self.opened(path.strip("/")) as (_, node):
            attributes = h5py.HLObject(node).attrs
            for name in attributes:
                try:
                    with reading(f'{self.filename}: attribute "{name}" of "{path}"'):
                        found[name] = attributes[name]
                except H5AsyncError as error:
                    found[name] = error
        return Attributes(found)

    def is_kept(self, file: HDF5File | None = None) -> bool:
        """Tell whether the kept file, or else `file`, is open and unchanged."""
        kept = self.kept_file
        file = file if kept is None else kept.file
        return file is not None and file.source.stamp() == self._stamp

    def _current_file(self) -> _Opened | None:
        kept = self.kept_file
        # HDF5 writes to a file when it opens it for writing: then it counts as changed.
        return None if kept is None or kept.file.source.stamp() != self._stamp else kept

    def _open(self, files: contextlib.ExitStack, may_differ: bool) -> _Opened:
        """Open the file until `files` are closed, or keep it open if that does no harm."""
        self.kept_file = None
        self.held.pop(self.path, None)
        file = files.enter_context(open_index(self.path))
        stamp = settled(file.source.stamp)
        if self._stamp is None:
            self._stamp = stamp
        if stamp != self._stamp and not (may_differ and stamp.file_id == self._stamp.file_id):
            raise changed(self.filename, "it has changed since it was opened", OPEN_AGAIN)
        is_written = file.id.get_intent() & h5py.h5f.ACC_RDWR or file.swmr_mode
        if self.is_near and not is_written and len(_kept_files) < affordable_files():
            with suppressing(OSError):  # it was replaced meanwhile
                apart = open_apart(str(self.path))
                if apart.source.stamp() == stamp and not _knows_another(stamp):
                    _kept_files[id(apart), stamp] = apart
                    self.kept_file = self.held[self.path] = _Opened(apart, stamp, {}, {})
                    return self.kept_file
        return _Opened(file, stamp, {}, {})

    def _located(
        self, kept: _Opened, path: str, files: contextlib.ExitStack
    ) -> tuple[Located, Any]:
        file = kept.file
        if not path:
            return Located(file, "", (), file.id, b"."), file.id
        try:
            found = locate(file, path, self.reach, files, kept.last)
            if found.rest:
                raise KeyError(path)
            return found, found.open()
        except H5AsyncError:
            raise
        except Exception as error:
            if interruption(error) is not None:
                raise
            known = what_is_there(file, self.reach, path)
            raise DatasetError(f'{self.filename}: there is no object "{path}"; {known}') from error

    def require_open(self) -> None:
        """Raise `ReaderClosedError` once the file is closed."""
        if self._is_closed:
            raise ReaderClosedError(f"{self.filename} was closed; open it again")

    def notes_use(self, dataset: InUse) -> bool:
        """Note the use of a dataset; return whether it is one of those used last.

        Closes those that were not used for long.
        """
        self.require_open()
        with self._lock:
            is_recent = dataset in self._recent
            self._recent.pop(dataset, None)
            self._recent[dataset] = None
            old = next(iter(self._recent)) if len(self._recent) > _RECENT else None
            if old is not None:
                del self._recent[old]
        if old is not None:
            old.close()
        return is_recent
