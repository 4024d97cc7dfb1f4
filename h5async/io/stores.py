"""Stores of sources: the interface between HDF5 files, wherever they are, and their readers.

The name of a source enters; an open source, for reading byte ranges, or an h5py file over it
leaves. The scheme of a name selects the store: ``"memory"`` for ``"memory://a.h5"``; a name without
a registered scheme is the path of a local file. Other modules know only the name and the stamps of
a source.
"""

from __future__ import annotations

import errno
import functools
import io
import os
import re
import secrets
import stat
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import h5py

from h5async.config.files import (
    OBJECT_SCHEME,
    FileName,
    ObjectName,
    SourceName,
    expand_with,
    scheme_of,
)
from h5async.errors import DamagedError, H5AsyncError, ReadError, failed_read
from h5async.io.hdf5files import HDF5File, directory_reason, reason_unopened
from h5async.io.metadatafile import MetadataFile, take
from h5async.io.source import FileStamp, SideBySide, Source, changed, open_regular, settled
from h5async.system.interruptions import suppressing

if TYPE_CHECKING:
    from typing_extensions import Buffer  # in `collections.abc` from Python 3.12


class Store(ABC):
    """Sources of one kind, by name. Safe to use from many threads.

    The stamp of a source identifies its state. It is also compared with stamps from other processes
    and saved indices. `FileStamp.of_tag` makes one from an ETag.
    """

    is_lasting = True  # whether names lead to the same sources in other processes
    is_local = False  # whether names are paths: the core opens them itself, links may lead to them

    @abstractmethod
    def open(self, name: str, *, is_patient: bool = False) -> Source:
        """Open a source; `OSError` if that fails, `FileNotFoundError` if it does not exist.

        If `is_patient`, reads wait for network faults to pass; else they soon raise an error.
        """

    def matching(self, name: SourceName) -> list[str] | None:
        """Return the names of the sources that match a glob, sorted; None if it is not a glob."""
        return None

    def stamp(self, name: str) -> FileStamp:
        """Return the state of a source; raises like `open`."""
        with closing(self.open(name)) as source:
            return source.stamp()

    def open_hdf5(
        self, name: str, metadata_nbytes: int | None = None, *, in_use: bool = False
    ) -> HDF5File:
        """Open a source for reading with h5py; see `open_hdf5`."""
        try:
            content, ahead = take(name, partial(self._content, metadata_nbytes is None))
        except OSError as error:
            text = f"cannot open {name}: {error.strerror or error}"
            raise failed_read(text, error, name) from error
        source = content.source
        try:
            try:
                file = open_over(content, name, metadata_nbytes)
            except (OSError, RuntimeError, ValueError) as error:
                text = f"cannot open {name}: {reason_unopened(content, error)}"
                raise failed_read(text, error, name) from error
            if source.stamp() != content.stamp:
                file.close()
                raise ReadError(f"cannot open {name}: it was changed meanwhile", filename=name)
        except BaseException:
            source.close()
            raise
        file.give_back = source.close if ahead is None else partial(ahead.give_back, name, content)
        return file

    def _content(self, is_patient: bool, name: str) -> MetadataFile:
        return MetadataFile(self.open(name, is_patient=is_patient))


class LocalSource(Source):
    """An open local file, by its descriptor, which `file` owns."""

    def __init__(self, descriptor: int, file: io.FileIO | None = None) -> None:
        self._descriptor = descriptor
        self._file = file

    def stamp(self) -> FileStamp:
        """Return the state of the open file, whatever is at its path now."""
        return FileStamp.of(self._descriptor)

    def get_ranges(self, offsets: Sequence[int], lengths: Sequence[int]) -> Sequence[Buffer]:
        """Read ranges one after the other."""
        return list(map(self._get, offsets, lengths))

    def _get(self, offset: int, nbytes: int) -> bytes:
        found = b""
        while len(found) < nbytes:
            part = os.pread(self._descriptor, nbytes - len(found), offset + len(found))
            if not part:
                raise ReadError(f"{nbytes - len(found)} bytes are missing at byte {offset}")
            found += part
        return found

    def fills(self, out: Any, offset: int) -> bool:
        """Read into a buffer; return whether it was filled."""
        return bool(os.preadv(self._descriptor, [out], offset) == out.nbytes)

    def close(self) -> None:
        """Close the file, if this object owns it."""
        if self._file is not None:
            self._file.close()


class LocalState(Source):
    """A local file at a path, in one state; it is open only while it is being read."""

    def __init__(self, path: str, stamp: FileStamp) -> None:
        self._path, self._stamp = path, stamp

    def stamp(self) -> FileStamp:
        """Return the state that all reads refer to."""
        return self._stamp

    def get_ranges(self, offsets: Sequence[int], lengths: Sequence[int]) -> Sequence[Buffer]:
        """Read ranges; `ReadError` if the file has changed."""
        with open_regular(self._path) as file:
            source = LocalSource(file.fileno())
            found = source.get_ranges(offsets, lengths)
            if not source.stamp().has_content_of(self._stamp):
                raise changed(self._path, "its cached bytes are from its former state")
        return found

    def close(self) -> None:
        """Do nothing: nothing is open."""


class LocalStore(Store):
    """Local files, by path."""

    is_local = True

    def open(self, name: str, *, is_patient: bool = False) -> Source:
        """Open a regular file."""
        file = open_regular(name)
        return LocalSource(file.fileno(), file)

    def stamp(self, name: str) -> FileStamp:
        """Return the state of the file now at a path."""
        return FileStamp.of(name)

    def open_hdf5(
        self, name: str, metadata_nbytes: int | None = None, *, in_use: bool = False
    ) -> HDF5File:
        """Open a file with HDF5's own driver, also if it is open for writing; see `open_hdf5`."""
        try:
            with suppressing(FileNotFoundError, NotADirectoryError):
                mode = os.stat(name).st_mode
                if not stat.S_ISREG(mode):  # HDF5 would wait for a pipe
                    reason = "it is not a regular file"
                    if stat.S_ISDIR(mode):
                        reason = directory_reason(Path(name))
                    raise DamagedError(f"cannot open {name}: {reason}", filename=name)
            file = _open_local(name, metadata_nbytes, in_use=in_use)
        except H5AsyncError:
            raise
        except (OSError, RuntimeError, ValueError) as error:
            text = f"cannot open {name}: {reason_unopened(name, error)}"
            raise failed_read(text, error, name) from error
        file.source, file.name_of_source = LocalSource(file.id.get_vfd_handle()), name
        return file


def _open_local(name: str, metadata_nbytes: int | None, *, in_use: bool) -> HDF5File:
    try:  # (without a lock if in use: its writer may be about to open it again)
        return _open(name, metadata_nbytes, _unlock if in_use else None)
    except OSError as error:
        # The program has it open with other settings, and HDF5 requires equal ones; or a writer
        # permits readers (SWMR).
        others: list[dict[str, Any]] = []
        if "file locking" in str(error):
            others = [{"locking": None}, {"locking": True}] if in_use else [{"locking": False}]
        elif "already open for write" in str(error):
            others = [{"swmr": True}]
        for other in others:
            with suppressing(OSError):
                return HDF5File(name, "r", **other)
        raise


def open_apart(name: str) -> HDF5File:
    """Open a local file for reading, separately from HDF5's other handles of the same file.

    It is not locked, and shares HDF5's state only with handles that are opened in this way.
    """

    def set_apart(properties: h5py.h5p.PropFAID) -> None:
        properties.set_fapl_log(b"", 0, 0)
        _unlock(properties)

    file = _open(name, None, set_apart)
    file.source = LocalSource(file.id.get_vfd_handle())
    return file


def open_over(content: MetadataFile, name: str, metadata_nbytes: int | None = None) -> HDF5File:
    """Open a file whose bytes come from a file object; raises h5py's errors."""

    def set_driver(properties: h5py.h5p.PropFAID) -> None:
        properties.set_fileobj_driver(h5py.h5fd.fileobj_driver, content)

    file = _open(name, metadata_nbytes, set_driver)
    file.source, file.name_of_source = content.source, name
    return file


def _unlock(properties: h5py.h5p.PropFAID) -> None:
    properties.set_file_locking(False, True)


def _open(
    name: str,
    metadata_nbytes: int | None,
    change: Callable[[h5py.h5p.PropFAID], None] | None = None,
) -> HDF5File:
    """Open a file with access properties that `change` modifies."""
    properties = _access_properties(metadata_nbytes)
    if change is not None:
        properties = properties.copy()
        change(properties)
    # `h5py.File` would make new property lists for each file.
    return HDF5File.of(h5py.h5f.open(os.fsencode(name), h5py.h5f.ACC_RDONLY, properties))


@functools.cache
def _access_properties(metadata_nbytes: int | None) -> h5py.h5p.PropFAID:
    """Return the default access properties, or, to read metadata, ones without a chunk cache.

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


# --- file objects ---------------------------------------------------------------------------------

_locks: dict[int, threading.Lock] = {}  # by the identities of file objects
_PROCESS = secrets.token_hex(8)  # stamps of file objects mean nothing elsewhere


class FileObjectSource(Source):
    """An open file object, read by one thread at a time; its owner closes it."""

    identity = "the file object and its size"

    def __init__(self, name: ObjectName) -> None:
        self._name = name
        self._file: Any = name.file
        self._lock = _locks.setdefault(id(self._file), threading.Lock())
        self._stamp = self._now()

    def stamp(self) -> FileStamp:
        """Return a stamp of the object's identity and size."""
        return self._now()

    def get_ranges(self, offsets: Sequence[int], lengths: Sequence[int]) -> Sequence[Buffer]:
        """Read ranges one after the other."""
        return list(map(self._get, offsets, lengths))

    def close(self) -> None:
        """Leave the file object to its owner."""

    def _get(self, offset: int, nbytes: int) -> bytes:
        found = b""
        with self._lock:
            self._file.seek(offset)
            while len(found) < nbytes:
                part = self._file.read(nbytes - len(found))
                if not part:
                    raise changed(self._name, f"it ends before byte {offset + nbytes:,}")
                found += part
        return found

    def _now(self) -> FileStamp:
        with self._lock:
            nbytes = self._file.seek(0, os.SEEK_END)
        return FileStamp.of_tag(f"{_PROCESS} {id(self._file)}", nbytes)


class FileObjectStore(Store):
    """Python's file objects, carried by names: from `open`, `fsspec.open`, or `BytesIO`."""

    is_lasting = False

    def open(self, name: str, *, is_patient: bool = False) -> Source:
        """Return a source over the name's file object."""
        if not isinstance(name, ObjectName):
            raise FileNotFoundError(errno.ENOENT, "a file object cannot be given by its name", name)
        try:
            return FileObjectSource(name)
        except (OSError, ValueError) as error:
            raise ReadError(f"cannot open {name}: {error}", filename=name) from error


# --- by the scheme of a name ---------------------------------------------------------------------

LOCAL = LocalStore()
_STORES: dict[str, Store] = {OBJECT_SCHEME: FileObjectStore()}
_UNTIDY = re.compile(r"//|/\.?(/|$)")  # parts that `Path` would change


def register(scheme: str, store: Store) -> None:
    """Read sources whose names begin with ``scheme://`` from a store."""
    _STORES[scheme] = store
    expand_with(scheme, store.matching)


def store_of(name: FileName) -> Store:
    """Return the store of a source."""
    return _STORES.get(scheme_of(name), LOCAL)


def far_names(names: Sequence[FileName]) -> list[str]:
    """Return the names of sources that are not local files."""
    return [str(name) for name in names if not store_of(name).is_local]


def absolute_name(name: FileName) -> str:
    """Return a name that stays valid when the current directory changes."""
    text = str(name)
    if not store_of(name).is_local or (text.startswith("/") and not _UNTIDY.search(text)):
        return text
    return str(Path(text).absolute())


def real_name(name: FileName) -> str:
    """Return a name that is the same for all names of a file."""
    return str(Path(name).resolve()) if store_of(name).is_local else str(name)


def settled_stamp(name: FileName) -> FileStamp:
    """Return the state of a source, if possible one that any later change will change."""
    return settled(partial(store_of(name).stamp, str(name)))


def are_at(several: Iterable[tuple[FileName, FileStamp]]) -> list[bool]:
    """Tell for each source whether it is in the state of a stamp; False if that is unknown.

    Sources that are not local are asked in parallel.
    """

    def is_at(name: FileName, stamp: FileStamp) -> bool:
        with suppressing(H5AsyncError, OSError, ValueError):
            return store_of(name).stamp(str(name)) == stamp
        return False

    found = list(several)
    far = {number for number, (name, _) in enumerate(found) if not store_of(name).is_local}
    answers = iter(SideBySide().call([partial(is_at, *found[number]) for number in far]))
    return [next(answers) if n in far else is_at(*one) for n, one in enumerate(found)]


def is_anything_at(name: FileName) -> bool:
    """Tell whether anything is at a name, even if it cannot be read."""
    if store_of(name).is_local:
        return os.path.lexists(name)
    with suppressing(FileNotFoundError):
        store_of(name).stamp(str(name))
        return True
    return False


def open_hdf5(
    name: FileName, metadata_nbytes: int | None = None, *, in_use: bool = False
) -> HDF5File:
    """Open a source for reading with h5py; the caller closes it.

    HDF5 caches `metadata_nbytes` of its metadata; None: its default. A file that is already open in
    this process keeps its settings. `in_use`: also open a file that a writer has locked and may be
    writing to, without a lock. `ReadError`, raised if it cannot be opened, says why.
    """
    return store_of(name).open_hdf5(str(name), metadata_nbytes, in_use=in_use)
