"""Opens files to read by indexing: `open_file`, and the classes of files, groups and datatypes.

A path enters; groups and lazy datasets leave.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any, Literal

import h5py
import numpy as np

from h5async.arrays.handle import Attributes, Handle
from h5async.arrays.lazydataset import Dataset
from h5async.errors import DatasetError, ReadError
from h5async.index.contents import names_in, walk
from h5async.index.datasets import Indexer
from h5async.index.hdf5 import NotDirectError, reading
from h5async.index.links import components, locate
from h5async.io.hdf5files import HDF5File
from h5async.spelling import name_bytes, name_text
from h5async.system.interruptions import passing, suppressing

CACHE_NBYTES = 16 << 20


class Group(Mapping[str, Any]):
    """A group of a file: a mapping of names to groups, datasets and named datatypes.

    Names may be paths, or references to objects.
    """

    def __init__(self, file: File | None, name: str, names: Iterable[str]) -> None:
        self.file: File = self if file is None else file  # type: ignore[assignment]
        self.name = name
        self._names = dict.fromkeys(names)

    @cached_property
    def attrs(self) -> Attributes:
        """Its attributes, read once."""
        return self.file.attributes(self.name)

    def __getitem__(self, name: Any) -> Any:
        path = self._path_of(name)
        if not name or path is None:
            raise DatasetError(f'{self.file.filename}: there is no object "{name}"')
        return self.file._node(path)

    def _path_of(self, name: Any) -> str | None:
        """Return the path in the file; None if there is none."""
        if isinstance(name, h5py.Reference):
            with self.file.opened("") as (located, _):
                name = name and h5py.h5r.get_name(name, located.file.id)
            if not name:
                return None
        if not isinstance(name, str | bytes):
            raise TypeError(f"a key must be a name or a reference, found {type(name).__name__}")
        name = name_text(name)
        return "/".join(components(name if name[:1] == "/" else f"{self.name}/{name}"))

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        """Tell whether there is a link of this name, as h5py does: it may lead nowhere."""
        path = self._path_of(name)
        if not name or not path:
            return path == "" and bool(name)
        parent, _, last = path.rpartition("/")
        try:
            above = self.file._node(parent)
        except DatasetError:
            return False
        return isinstance(above, Group) and last in above._names

    def __reduce__(self) -> tuple[Any, ...]:
        return _node_of, (self.file, self.name)

    def __repr__(self) -> str:
        return f'<h5async group "{self.name}" ({len(self)} members)>'


class Datatype:
    """A named datatype of a file: its `name` there, its `dtype` in NumPy, and its `attrs`."""

    def __init__(self, file: File, name: str, dtype: np.dtype[Any]) -> None:
        self.file, self.name, self.dtype = file, name, dtype

    @cached_property
    def attrs(self) -> Attributes:
        """Its attributes, read once."""
        return self.file.attributes(self.name)

    def __reduce__(self) -> tuple[Any, ...]:
        return _node_of, (self.file, self.name)

    def __repr__(self) -> str:
        return f'<h5async named datatype "{self.name}": type "{self.dtype}">'


def _node_of(file: File, name: str) -> Any:
    return file[name]


class File(Handle, Group):
    """An HDF5 file whose datasets are read by indexing; see `open_file`.

    Safe to use from many threads. A pickle holds its path and options, and opens the file again.
    Leaving a file unclosed does no harm: HDF5 does not lock it.
    """

    def __init__(
        self, path: Any, num_threads: int | None, cache_bytes: int, options: Mapping[str, Any]
    ) -> None:
        Handle.__init__(self, path, num_threads, cache_bytes, options)
        self._nodes: dict[str, Any] = {}
        with self.opened("") as (_, node), reading(f"{self.filename}: its root group"):
            Group.__init__(self, None, "/", _names_in(node))

    def __reduce__(self) -> tuple[Any, ...]:
        return File, self.arguments

    def __repr__(self) -> str:
        return f'<h5async file "{self.filename}" ({len(self)} members)>'

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other

    def __enter__(self) -> File:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _node(self, path: str) -> Any:
        """Return the object at a path, opened once."""
        if not path:
            return self
        found = self._nodes.get(path)
        if found is not None:
            return found
        with passing(), contextlib.ExitStack() as files:
            located, node = self.open_object(path, files)
            where = f'{self.filename}: "{path}"'
            with reading(where):
                if isinstance(node, h5py.h5g.GroupID):
                    made: Any = Group(self, f"/{path}", _names_in(node))
                elif isinstance(node, h5py.h5d.DatasetID):
                    made = Dataset(self, path, located, node)
                else:
                    made = Datatype(self, f"/{path}", node.dtype)
        return self._nodes.setdefault(path, made)

    def require_permitted(self, file: HDF5File) -> None:
        """Raise `UnsafeFileError` if it refers to files that are not permitted."""
        for path, kind in walk(file):
            if kind == "dataset":
                plist = h5py.h5d.open(file.id, name_bytes(path)).get_create_plist()
                if plist.get_layout() == h5py.h5d.VIRTUAL:
                    with suppressing(NotDirectError, DatasetError, ReadError):
                        Indexer(file, self.reach).sources(f'{self.filename}: "{path}"', plist)
            elif kind != "group":
                with (
                    contextlib.ExitStack() as files,
                    suppressing(KeyError, DatasetError, ReadError),
                ):
                    locate(file, path, self.reach, files)


def _names_in(node: h5py.h5g.GroupID) -> Iterator[str]:
    """Return the names in a group, in the order of creation if that is tracked, as in h5py."""
    group = h5py.Group(h5py.h5g.open(node, b"."))  # (the file object does not know it of its root)
    orders = group.id.get_create_plist().get_link_creation_order()
    index = h5py.h5.INDEX_CRT_ORDER if orders & h5py.h5p.CRT_ORDER_TRACKED else h5py.h5.INDEX_NAME
    return (name_text(name) for name, _ in names_in(group, index=index))


def open_file(
    path: Any,
    *,
    num_threads: int | None = None,
    cache_bytes: int = CACHE_NBYTES,
    io: Literal["auto", "pread", "map"] | None = None,
    allow_external: Any = None,
    allow_missing: bool | None = None,
    storage_options: Mapping[str, Any] | None = None,
    max_batch_bytes: int | None = None,
    cache: Literal["disk"] | None = None,
    cache_dir: Any = None,
    index_cache: Any = None,
) -> File:
    """Open an HDF5 file, whose datasets are read by indexing, in threads and without HDF5's lock.

    Parameters
    ----------
    path
        A path, a URL, a file object, or a saved index of one file.
    num_threads
        Number of threads that read a large selection; None: one for each usable core.
    cache_bytes
        Memory for decoded chunks of recent selections, per dataset.
    io, allow_external, allow_missing, storage_options, max_batch_bytes, cache, cache_dir, \
    index_cache
        As in `AsyncReader`.

    Examples
    --------
    >>> with h5async.open_file("sample_data/digits.h5") as file:
    ...     images = file["data"][10:20, ::2]
    >>> images.shape
    (10, 4, 8)
    """
    options = {
        "io": io,
        "allow_external": allow_external,
        "allow_missing": allow_missing,
        "storage_options": storage_options,
        "max_batch_bytes": max_batch_bytes,
        "cache": cache,
        "cache_dir": cache_dir,
        "index_cache": index_cache,
    }
    return File(path, num_threads, cache_bytes, options)
