"""Defines `Dataset`: a lazy array over a dataset of a file. Keys enter, NumPy arrays leave."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from h5async.arrays.boxreading import (
    BoxReader,
    CoreReader,
    H5pyReader,
    RowsReader,
)
from h5async.arrays.firstreading import COPIED_NBYTES, OpenDataset, Stored, described, read_at_once
from h5async.arrays.handle import OPEN_AGAIN, Handle
from h5async.arrays.selections import Box, Selection, box_of, key_of, selection_of
from h5async.core.binding import load_core
from h5async.errors import (
    BudgetError,
    DatasetError,
    ReaderClosedError,
    ReadError,
    SelectionError,
)
from h5async.index.hdf5 import reading
from h5async.index.layout import DatasetLayout
from h5async.index.links import Located, files_of
from h5async.io.source import changed
from h5async.opening.filefacts import read_unchanged
from h5async.plan.transform import end_strings
from h5async.read.executors import method_of
from h5async.spelling import named
from h5async.system import interruptions
from h5async.system.interruptions import interruption, suppressing

# Selections up to _LEAST_NBYTES are always read; larger ones, up to _TIMES_STORED times the files.
_LEAST_NBYTES, _TIMES_STORED = 64 << 20, 1024
_NULL, _REGIONS = h5py.h5s.NULL, (h5py.RegionReference, h5py.MultiBlockSlice)
_FACTS = frozenset(
    "maxshape fillvalue compression compression_opts shuffle fletcher32 scaleoffset filter_ids"
    " filter_names external is_virtual is_scale".split()
)


class Dataset:
    """A dataset that is read by indexing, like a NumPy array: ``dataset[10:20, 3]``.

    Keys are h5py's: integers, slices with steps, Ellipsis, a list of ascending indices or a mask
    along one dimension, a mask of the whole dataset, and names of fields. Results are those of
    h5py. Safe to use from many threads, which read at the same time.

    Attributes
    ----------
    name
        Its path in the file.
    shape, dtype, chunks, attrs
        As in h5py; `chunks` is None if it has none.
    maxshape, fillvalue, compression, compression_opts, shuffle, fletcher32, scaleoffset, \
    filter_ids, filter_names, external, is_virtual, is_scale
        As in h5py.
    """

    # These call `__getitem__`, and need no more of a dataset than this class has.
    asstr, astype, fields = h5py.Dataset.asstr, h5py.Dataset.astype, h5py.Dataset.fields
    iter_chunks = h5py.Dataset.iter_chunks

    def __init__(self, file: Handle, path: str, located: Located, node: h5py.h5d.DatasetID) -> None:
        self.file, self.name, self._path = file, f"/{path}", path
        self.stored, self._shape = described(node, file.known) or self._by_h5py(located, node)
        self.dtype, self.chunks = self.stored.dtype, self.stored.chunk_shape
        self._opening = threading.Lock()
        self._reset()

    def _by_h5py(
        self, located: Located, node: h5py.h5d.DatasetID
    ) -> tuple[Stored, tuple[int, ...] | None]:
        """Return how it is stored, and its shape."""
        stored = Stored.of(node)
        if stored.is_elsewhere:  # HDF5 may open sources if it is asked for the shape
            self.layout = self._read_layout(located, node)
        space = node.get_space()
        shape = space.get_simple_extent_dims()
        is_empty = not shape and space.get_simple_extent_type() == _NULL
        return stored, None if is_empty else shape

    @cached_property
    def layout(self) -> DatasetLayout | None:
        """Its layout, for the core; None if only HDF5 can read it."""
        if self.dtype.hasobject or not self._shape:
            return None
        return read_unchanged(self.file.path, self._layout_of_shape)

    def _layout_of_shape(self) -> DatasetLayout | None:
        """Return the layout of the rows that there were when it was opened."""
        with self.file.opened(self._path, may_differ=True) as (located, node):
            shape, known = node.shape, self._shape or ()
            has_all = shape[1:] == known[1:] and shape[:1] >= known[:1]
            if not has_all or Stored.of(node) != self.stored:
                what = f'dataset "{self.name}" was replaced'
                raise changed(self.file.filename, what, OPEN_AGAIN)
            found = self._read_layout(located, node)
            return None if found is None else found.changed(shape=known[:1] + found.shape[1:])

    def _read_layout(self, located: Located, node: h5py.h5d.DatasetID) -> DatasetLayout | None:
        with suppressing(DatasetError):  # scalars, elements of variable length, references
            return self.file.layout(self._path, located, node)
        return None

    @cached_property
    def attrs(self) -> Mapping[str, Any]:
        """Its attributes, read once."""
        return self.file.attributes(self.name)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute that h5py's dataset has, read on first access."""
        if name not in _FACTS:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        with self.file.opened(self._path) as (_, node), reading(self._where):
            value = self.__dict__[name] = getattr(h5py.Dataset(node), name)
        return value

    def _reset(self) -> None:
        self.file.held.pop(self._path, None)
        self._readers: dict[str, Any] = {}
        self._box_reader: BoxReader | None = None
        self._small_reader: BoxReader | RowsReader | _OpenReader | None = None
        self._num_forks = interruptions.num_forks

    @property
    def shape(self) -> tuple[int, ...]:
        """Its dimensions; None for an empty dataset."""
        return self._shape  # type: ignore[return-value]

    @property
    def ndim(self) -> int:
        """The number of its dimensions."""
        return len(self._shape or ())

    @property
    def size(self) -> int | None:
        """The number of its elements; None for an empty dataset."""
        return None if self._shape is None else int(np.prod(self._shape, dtype=object))

    @property
    def nbytes(self) -> int:
        """The bytes of all elements."""
        return (self.size or 0) * self.dtype.itemsize

    def __len__(self) -> int:
        if not self._shape:
            raise TypeError(f"{self._where}: it has no dimensions, so it has no length")
        return int(self._shape[0])

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return f'<h5async dataset "{self.name}": shape {self._shape}, type "{self.dtype.str}">'

    def __reduce__(self) -> tuple[Any, ...]:
        return _dataset_of, (self.file, self.name)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        if copy is False:
            raise ValueError("a dataset cannot be converted to an array without a copy")
        if self._shape is None:
            raise TypeError(f"{self._where}: it is empty, and cannot become an array")
        return np.asarray(self.__getitem__(..., dtype))

    def __iter__(self) -> Iterator[Any]:
        return (self[number] for number in range(len(self)))

    def __getitem__(self, key: Any, new_dtype: Any = None) -> Any:
        """Return the values that a key selects, as h5py does."""
        if type(key) is not tuple:
            key = (key,)
        reader = self._small_reader
        try:
            is_same_process = self._num_forks == interruptions.num_forks
            if reader is not None and is_same_process and new_dtype is None:
                try:
                    found = reader.read_small(key)
                except SelectionError:  # names may be among the indices
                    found = None
                if found is not None:
                    return found
            return self._get(key, new_dtype)
        except SelectionError as error:
            raise SelectionError(f"{self._where} of shape {self._shape}: {error}") from error

    def read_direct(self, dest: NDArray[Any], source_sel: Any = None, dest_sel: Any = None) -> None:
        """Read the selection `source_sel` into ``dest[dest_sel]``, as h5py does."""
        at = dest_sel if isinstance(dest_sel, tuple) else (... if dest_sel is None else dest_sel,)
        if not any(part is Ellipsis for part in at):
            at = (*at, ...)  # so that the target is a view, not a scalar
        target = dest[at]
        source_sel = () if source_sel is None else source_sel
        key = source_sel if isinstance(source_sel, tuple) else (source_sel,)
        box = box_of(key, self._shape) if self._reads_boxes() else None  # type: ignore[arg-type]
        is_alike = box is not None and target.dtype == self.dtype and target.shape == box.shape
        if box is None or not is_alike or not np.may_share_memory(target, dest):
            dest[at] = self.__getitem__(source_sel, target.dtype)  # (a list would copy)
        elif target.size and self._box_reader is not None:
            self._box_reader.read_box(box, target)

    # --- all other keys ---------------------------------------------------------------------------

    @property
    def _where(self) -> str:
        return f'{self.file.filename}: dataset "{self.name}"'

    def _get(self, key: tuple[Any, ...], new_dtype: Any) -> Any:
        self.file.require_open()
        names = [part for part in key if isinstance(part, str)]
        if names:
            key = tuple(part for part in key if not isinstance(part, str))
            chosen = names[0] if len(names) == 1 else names
            try:
                return self.fields(chosen, _prior_dtype=new_dtype)[key]
            except ValueError as error:
                raise SelectionError(str(error)) from error
        if any(part is None for part in key):
            raise SelectionError("None (np.newaxis) adds a dimension, which is not supported")
        if self._num_forks != interruptions.num_forks:
            self._reset()  # objects opened by the parent process are of no use here
        opened = self.file.kept_object(self._path)
        if self.dtype.hasobject and opened is not None and self._small_reader is None:
            if new_dtype is None and self._kept_open(opened[1]) is not None:
                return self.__getitem__(key)
        found: Any = None
        if not self._shape or any(isinstance(part, _REGIONS) for part in key):
            found = self._through_h5py(key, None)
        else:
            selection = selection_of(key, self._shape)
            nbytes = math.prod(selection.shape) * self.dtype.itemsize
            self._require_room(nbytes)
            if nbytes:
                found = self._values(key, selection, nbytes)
            else:
                return np.zeros(selection.shape, new_dtype or self.dtype)
        if new_dtype is not None and self._shape is not None:
            found = _converted(np.asarray(found), self.dtype, np.dtype(new_dtype))
        is_scalar = isinstance(found, np.ndarray) and not found.shape
        return found[()] if is_scalar and (self._shape or Ellipsis not in key) else found

    def _require_room(self, nbytes: int) -> None:
        """Raise `BudgetError` for a selection that is far larger than the files that hold it."""
        file = self.file
        if nbytes <= max(_LEAST_NBYTES, file.max_nbytes) or self.layout is None:
            return
        layout = self.layout
        stored = sum(stamp.nbytes for stamp in dict(files_of(layout)).values())
        if nbytes > _TIMES_STORED * stored:
            raise BudgetError(
                f"{self._where} of shape {self._shape}: a selection takes {nbytes:,} bytes, more"
                f" than {_TIMES_STORED} times the {stored:,} bytes of its files; select less, or"
                f" set {named('max_batch_bytes')} to {nbytes} if you trust the file"
            )

    def _values(self, key: tuple[Any, ...], selection: Selection, nbytes: int) -> Any:
        if not self.file.notes_use(self) and nbytes <= COPIED_NBYTES:
            found = self._at_once(key, selection)
            if found is not None:
                return found
        layout = self.layout
        reader = None if layout is None else self._reader(layout, selection)
        if layout is None or reader is None:
            return self._through_h5py(key, selection)
        if isinstance(reader, H5pyReader):
            return reader.read_key(key, selection)
        extra = layout.shape[self.ndim :]
        dtype = layout.raw_dtype
        raw = np.empty((*selection.shape, *extra), dtype)
        reader.read(_with_extra(selection, extra), raw)
        for text in layout.text:
            end_strings(text, raw)
        if layout.dtype.kind == "b":
            return raw != 0  # as HDF5 reads them
        base = self.dtype if self.dtype.subdtype is None else self.dtype.subdtype[0]
        return raw.view(base)

    def _at_once(self, key: tuple[Any, ...], selection: Selection) -> Any:
        """Return values read through the dataset open in HDF5; None if the core is to read them."""
        if not self.file.is_near or self.dtype.hasobject:
            return None
        try:
            with contextlib.ExitStack() as files:
                opened = self.file.kept_object(self._path)
                located, node = opened or self.file.open_object(self._path, files)
                source = located.file.source
                found = read_at_once(source, node, self.stored, self.shape, key, selection)
                return found if self.file.is_kept(located.file) else None
        except Exception as error:  # it is read again, to find out why
            if interruption(error) is not None or isinstance(error, ReaderClosedError):
                raise
            return None

    def _reads_boxes(self) -> bool:
        """Tell whether boxes can be read straight into memory of the dataset's dtype."""
        if self._num_forks != interruptions.num_forks:
            self._reset()
        layout = self.layout
        if self._box_reader is None and layout is not None and self._shape:
            self._reader(layout, selection_of((), self._shape))
        return self._box_reader is not None

    def _reader(self, layout: DatasetLayout, selection: Selection) -> Any:
        """Return the reader for a selection of the values that a layout describes."""
        core = load_core()
        way = "h5py"
        if core is not None and layout.segments is not None:
            box = selection.bounds
            way = "parts" if box.size[1:] != list(self.shape[1:]) else "rows"
        elif core is not None and method_of(layout) != "h5py":
            way = "boxes"
        with self._opening:
            found = self._readers.get(way)
            if found is None:
                found = self._readers[way] = self._new_reader(layout, way)
        return found

    def _new_reader(self, layout: DatasetLayout, way: str) -> CoreReader | H5pyReader:
        core = load_core()
        if core is None or way == "h5py":
            return H5pyReader(layout)
        file = self.file
        more = layout, file.reach, file.kept, file.cache_nbytes, file.threads
        is_plain = not layout.text and layout.dtype == self.dtype and self.dtype.kind != "b"
        if way != "boxes":
            rows = RowsReader(core, *more, is_cut=way == "parts")
            if is_plain and way == "rows":
                rows.deliver(self.dtype)
                self._small_reader = rows
            return rows
        reader = BoxReader(core, *more)
        if not reader.can_read:  # it has the maximum number of dimensions
            return H5pyReader(layout)
        if is_plain:
            reader.deliver(self.dtype)
            self._box_reader = self._small_reader = reader
        return reader

    def _through_h5py(self, key: tuple[Any, ...], selection: Selection | None) -> Any:
        """Return the values that a key selects, of a dataset that has no layout."""
        if self.stored.is_elsewhere and self.layout is None:
            raise ReadError(
                f"{self._where}: its values lie in other files, and only HDF5 understands them, or"
                " a file is missing; read it with h5py",
                filename=self.file.filename,
                dataset=self.name,
            )
        with self.file.opened(self._path) as (_, node), reading(self._where):
            held = self._kept_open(node)
            dataset = h5py.Dataset(node, readonly=True) if held is None else held.dataset
            if selection is not None:  # h5py misunderstands some keys, or fails
                return np.asarray(dataset[key_of(selection)]).reshape(selection.shape)
            try:
                return dataset[key]
            except (IndexError, TypeError, ValueError) as error:
                if interruption(error) is not None:
                    raise
                raise SelectionError(str(error)) from error

    def _kept_open(self, node: h5py.h5d.DatasetID) -> OpenDataset | None:
        """Keep a dataset open for later selections, and return it; None if that is unsafe."""
        if self.file.kept_object(self._path) is None or self.stored.is_elsewhere:
            return None
        self.file.notes_use(self)
        held = self.file.held[self._path] = OpenDataset(node)
        self._small_reader = _OpenReader(self.file, held)
        return held

    def close(self) -> None:
        """Release all resources to read; they are created again when needed."""
        with self._opening:
            self._reset()


class _OpenReader:
    """Reads selections of a dataset that is open in HDF5."""

    def __init__(self, file: Handle, opened: OpenDataset) -> None:
        self._file, self._kept, self._opened = file, file.kept_file, opened

    def read_small(self, key: tuple[Any, ...]) -> Any:
        """Return the values that a key selects; None if it fails, or the file was closed."""
        file = self._file
        if file.kept_file is not self._kept:
            return None
        try:
            found = self._opened.read(key)
        except Exception as error:  # it is read again, to find out why
            if interruption(error) is not None:
                raise
            return None
        return found if file.is_kept() else None


def _dataset_of(file: Any, name: str) -> Any:
    return file[name]


def _with_extra(selection: Selection, extra: tuple[int, ...]) -> Selection:
    """Return a selection with the dimensions of an array type added, and taken whole."""
    begin, size, step, shape = selection.box
    more = len(extra)
    if not more:
        return selection
    mask = selection.mask
    if mask is not None:
        mask = np.broadcast_to(mask[(..., *(np.newaxis,) * more)], (*mask.shape, *extra))
    box = Box([*begin, *[0] * more], [*size, *extra], [*step, *[1] * more], (*shape, *extra))
    return selection._replace(box=box, mask=mask)


def _converted(values: NDArray[Any], own: np.dtype[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Convert values to a dtype as HDF5 does; of compounds, only members that it names."""
    if own == dtype:
        return values
    mine, wanted = _with_members(own), _with_members(dtype)
    if mine.names and wanted.names and (own.names or dtype.names):
        found = np.zeros(values.shape, wanted)  # members that are not stored are 0
        for name in set(mine.names).intersection(wanted.names):
            found[name] = _converted(values.view(mine)[name], mine[name], wanted[name])
        return found.view(dtype)
    if dtype.kind == "S" and h5py.check_string_dtype(own) and own.hasobject:
        return values.astype(dtype)
    if own.names or dtype.names or own.shape != dtype.shape:
        raise SelectionError(f"HDF5 does not convert {own} to {dtype}")
    own, dtype = own.base, dtype.base
    room = np.empty(values.size * max(own.itemsize, dtype.itemsize), np.uint8)
    try:
        raw = np.ascontiguousarray(values, own).reshape(-1).view(np.uint8)  # (scalars are native)
        room[: raw.size] = raw
        types = h5py.h5t.py_create(own, logical=True), h5py.h5t.py_create(dtype)
        h5py.h5t.convert(*types, values.size, room)
        return room[: values.size * dtype.itemsize].view(dtype).reshape(values.shape)
    except (OSError, TypeError) as error:  # also for objects, which have no bytes
        raise SelectionError(f"HDF5 does not convert {own} to {dtype}: {error}") from error


def _with_members(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return a dtype as HDF5 sees it: complex numbers are compounds."""
    part = f"{dtype.byteorder}f{dtype.itemsize // 2}"
    return np.dtype([("r", part), ("i", part)]) if dtype.kind == "c" else dtype
