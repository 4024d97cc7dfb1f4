"""h5py metadata enters; a `DatasetLayout` leaves: where the bytes lie, or why only h5py may read.

Metadata is read once, with the file open for just that long. A dataset is read the direct way
only where its bytes are known to be what h5py would give; every doubt ends in a `fallback_reason`,
and `fallback.py` then reads the dataset through h5py.
"""

from __future__ import annotations

import ctypes
import math
import shlex
from array import array
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from h5async.config import Field
from h5async.errors import DatasetError, H5AsyncError, ReadError
from h5async.filters import Filter, can_decode
from h5async.layout import ChunkTable, DatasetLayout, Storage, grid_of, normal_axis
from h5async.storage import can_map, file_id

_DONT_FILTER_PARTIAL_CHUNKS = 2  # H5D_CHUNK_DONT_FILTER_PARTIAL_CHUNKS of H5Dpublic.h
_ALL_FILTERS = 0xFFFFFFFF
_LISTED_DATASETS = 20


def read_layouts(path: Path, fields: Mapping[str, Field]) -> dict[str, DatasetLayout]:
    """Read the layout of each field's dataset, opening the file once.

    Raises
    ------
    ReadError
        If the file cannot be opened, or a chunk table points outside it.
    DatasetError
        If a dataset is missing, is a group, or has no samples dimension or fixed-size dtype.
    ConfigError
        If a field's ``num_dim`` is no dimension of its dataset.
    """
    with open_hdf5(path) as file:
        return {
            name: _read_layout(file, field.path, field.num_dim) for name, field in fields.items()
        }


def list_layouts(path: Path) -> Iterator[tuple[str, DatasetLayout | H5AsyncError]]:
    """Yield each dataset of a file, in the order of names, with its layout or why it has none."""
    with open_hdf5(path) as file:
        for name in _datasets(file):
            try:
                yield name, _read_layout(file, name, 0)
            except H5AsyncError as error:
                yield name, error


def open_hdf5(path: Path) -> h5py.File:
    """Open a file for reading with h5py, which the caller closes.

    Raises
    ------
    ReadError
        If it cannot be opened; the message says why.
    """
    try:
        try:
            return h5py.File(path, "r")
        except OSError as error:
            if "file locking flag" not in str(error):
                raise
            # The caller has it open without locking, and HDF5 wants all to agree.
            return h5py.File(path, "r", locking=False)
    except (OSError, RuntimeError, ValueError) as error:
        if not path.exists():
            reason = "there is no such file"
        elif path.is_dir():
            reason = "it is a directory"
        else:
            reason = str(error)
        raise ReadError(f"cannot open {path}: {reason}") from error


def _datasets(file: h5py.File) -> dict[str, h5py.Dataset]:
    found: dict[str, h5py.Dataset] = {}

    def visit(name: str, node: object) -> None:
        if isinstance(node, h5py.Dataset):
            found[name] = node

    file.visititems(visit)
    return found


def _dataset(file: h5py.File, path: str) -> h5py.Dataset:
    try:
        node = file[path]
    except Exception as error:  # KeyError for most, but a damaged object may raise anything
        missing = isinstance(error, KeyError) and "doesn't exist" in str(error)
        detail = "" if missing else f" that can be opened ({error})"
        raise DatasetError(
            f'{file.filename}: there is no dataset "{path}"{detail}; {_what_is_there(file)}'
        ) from error
    if not isinstance(node, h5py.Dataset):
        kind = "group" if isinstance(node, h5py.Group) else "named type"
        raise DatasetError(
            f'{file.filename}: "{path}" is a {kind}, not a dataset; {_what_is_there(file)}'
        )
    return node


def _what_is_there(file: h5py.File) -> str:
    """List the datasets of a file, and a command that would read the largest of them."""
    datasets = _datasets(file)
    shapes = {name: dataset.shape or () for name, dataset in datasets.items()}
    if not shapes:
        return "the file holds no datasets"
    shown = [f'"{name}" {shape}' for name, shape in shapes.items()][:_LISTED_DATASETS]
    more = len(shapes) - len(shown)
    listed = ", ".join(shown) + (f" and {more} more" if more > 0 else "")
    readable = {
        name: shape for name, shape in shapes.items() if shape and _has_fixed_size(datasets[name])
    }
    if not readable:
        return f"the file holds {listed}"
    data = max(readable, key=lambda name: math.prod(readable[name]))
    as_long = [n for n in readable if n != data and readable[n][0] == readable[data][0]]
    labels = min(as_long, key=lambda name: math.prod(readable[name]), default=None)
    command = ["h5async", "read", file.filename, "--data-field", data]
    command += ["--labels-field", labels] if labels else ["--no-labels"]
    return f"the file holds {listed}; try: {shlex.join(command)}"


def _has_fixed_size(dataset: h5py.Dataset) -> bool:
    try:
        return not dataset.dtype.hasobject
    except Exception:  # h5py has no one type for what it cannot express
        return False


def _read_layout(file: h5py.File, name: str, num_dim: int) -> DatasetLayout:
    where = f'{file.filename}: dataset "{name}"'
    dataset = _dataset(file, name)
    try:
        full_dtype = dataset.dtype
    except Exception as error:  # h5py has no one type for what it cannot express
        raise DatasetError(f"{where}: its type has no NumPy equivalent ({error})") from error
    if dataset.shape is None:
        raise DatasetError(f"{where} is empty (a null dataspace): it holds no samples")
    if dataset.shape == ():
        raise DatasetError(f"{where} is a scalar: it has no dimension that counts samples")
    if full_dtype.hasobject:
        raise DatasetError(
            f"{where}: its elements are of variable length or references, so a batch of them has"
            " no fixed size; store them with a fixed-size type"
        )
    base, extra = (full_dtype.base, full_dtype.shape) if full_dtype.subdtype else (full_dtype, ())
    chunk_shape = (*dataset.chunks, *extra) if dataset.chunks else ()
    plist = dataset.id.get_create_plist()
    storage, external = _storage(plist)
    layout: dict[str, Any] = {
        "file": str(Path(file.filename).absolute()),  # it is opened again, from wherever we are
        "file_id": file_id(file.id.get_vfd_handle()),
        "path": name,
        "shape": (*dataset.shape, *extra),
        "dtype": _without_metadata(base),
        "sample_axis": normal_axis(num_dim, len(dataset.shape), where),
        "storage": storage,
        "fallback_reason": None,
        "fill": np.zeros((), base),
        "chunk_shape": chunk_shape,
        "filters": _filters(plist),
        "stored_nbytes": dataset.id.get_storage_size(),
    }
    _require_filters(layout["filters"], where)
    layout["fallback_reason"] = external or _why_not_direct(file, dataset, layout)
    if layout["fallback_reason"] is None:
        try:
            layout["fill"] = _fill_value(plist, base, extra)
            if storage == "chunked":
                layout["chunks"] = _chunk_table(dataset, plist, layout, where)
            else:
                layout["offset"] = _contiguous_offset(dataset, where)
            if _has_no_values(plist, layout):
                raise _NotDirectError("it was never written, and its fill value is undefined")
        except _NotDirectError as error:
            layout["fallback_reason"] = str(error)
    return DatasetLayout(**layout)


class _NotDirectError(Exception):
    """Something was found that only h5py may read; the message is the reason."""


def _without_metadata(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return dtype if dtype.metadata is None or dtype.fields else np.dtype(dtype.str)


def _storage(plist: h5py.h5p.PropDCID) -> tuple[Storage, str | None]:
    """Return the layout class, and why it rules out the direct way.

    External storage reports itself as contiguous, and it and virtual datasets have no offset,
    just like datasets that were never written: they must be told apart first.
    """
    kind = plist.get_layout()
    if kind == h5py.h5d.VIRTUAL:
        return "virtual", "a virtual dataset maps other datasets"
    if plist.get_external_count():
        return "external", "its values lie in external files"
    if kind == h5py.h5d.COMPACT:
        return "compact", "compact storage: its values lie in the object header"
    return ("chunked", None) if kind == h5py.h5d.CHUNKED else ("contiguous", None)


def _filters(plist: h5py.h5p.PropDCID) -> tuple[Filter, ...]:
    found = (plist.get_filter(i) for i in range(plist.get_nfilters()))
    return tuple(
        Filter(number, tuple(parameters), name.decode("utf-8", "replace").rstrip("\0"))
        for number, _flags, parameters, name in found
    )


def _require_filters(filters: tuple[Filter, ...], where: str) -> None:
    """Raise `DatasetError` if neither we nor h5py (with hdf5plugin, if there) can decode."""
    for entry in filters:
        if can_decode(entry) or h5py.h5z.filter_avail(entry.number):
            continue
        try:
            import hdf5plugin  # noqa: F401  (registers its filters with HDF5)
        except ImportError:
            pass
        if not h5py.h5z.filter_avail(entry.number):
            label = entry.label
            raise DatasetError(
                f"{where} is compressed with filter {entry.number} ({label}), which is not"
                " available; try: pip install hdf5plugin"
            )


def _why_not_direct(
    file: h5py.File, dataset: h5py.Dataset, layout: Mapping[str, Any]
) -> str | None:
    if h5py.h5o.get_info(dataset.id).fileno != h5py.h5o.get_info(file.id).fileno:
        return f"a link leads to another file, {dataset.file.filename}"
    if file.id.get_intent() & h5py.h5f.ACC_RDWR:
        return "the file is open for writing in this process, which may hold unwritten values"
    stored = dataset.id.get_type()
    try:
        same = stored.equal(h5py.h5t.py_create(dataset.dtype, logical=True))
    except Exception:  # a type that h5py can read but not write
        same = False
    if not same:
        return f"its stored type differs from NumPy's {dataset.dtype}"
    for entry in layout["filters"]:
        if not can_decode(entry):
            label = entry.label
            return f"filter {entry.number} ({label}) is decoded by HDF5"
    if layout["storage"] == "chunked":
        unlimited = [axis for axis, extent in enumerate(dataset.maxshape) if extent is None]
        if len(unlimited) == 1 and unlimited != [0]:
            # HDF5 reports wrong chunk coordinates for an extensible array index of this kind.
            return f"only dimension {unlimited[0]} is unlimited: HDF5 misreports its chunks"
    elif layout["sample_axis"] != 0 and not can_map(layout["file"]):
        return (
            "columns of a contiguous dataset are read by mapping, which needs a local file system"
        )
    return None


def _fill_value(
    plist: h5py.h5p.PropDCID, base: np.dtype[Any], extra: tuple[int, ...]
) -> NDArray[Any]:
    """Return what HDF5 gives for values never written: zeros unless it may use a fill value."""
    fill = np.zeros((), base)
    defined = plist.fill_value_defined() == h5py.h5d.FILL_VALUE_USER_DEFINED
    if defined and plist.get_fill_time() != h5py.h5d.FILL_TIME_NEVER:
        if extra:
            raise _NotDirectError("an array type with a fill value of its own")
        plist.get_fill_value(fill)
    return fill


def _has_no_values(plist: h5py.h5p.PropDCID, layout: Mapping[str, Any]) -> bool:
    """Tell whether HDF5 will refuse to read at all."""
    undefined = plist.fill_value_defined() == h5py.h5d.FILL_VALUE_UNDEFINED
    chunks: ChunkTable | None = layout.get("chunks")
    allocated = layout["offset"] >= 0 if chunks is None else chunks.offset.size > 0
    return undefined and not allocated


def _contiguous_offset(dataset: h5py.Dataset, where: str) -> int:
    try:
        offset = dataset.id.get_offset()
    except RuntimeError as error:
        raise ReadError(f"{where}: its address is not valid ({error})") from error
    if offset is None:
        return -1
    nbytes, end = dataset.id.get_storage_size(), _file_nbytes(dataset)
    wanted = math.prod(dataset.shape) * dataset.dtype.itemsize
    if nbytes < wanted:
        raise ReadError(f"{where}: {nbytes} bytes are allocated for {wanted} bytes of values")
    if offset + wanted > end:
        raise ReadError(
            f"{where}: its values end at byte {offset + wanted}, but the file has {end} bytes;"
            " it was cut short"
        )
    return int(offset)


def _chunk_table(
    dataset: h5py.Dataset, plist: h5py.h5p.PropDCID, layout: Mapping[str, Any], where: str
) -> ChunkTable:
    rank = len(dataset.shape)
    records = array("q")
    append = records.extend

    def visit(info: h5py.h5d.StoreInfo) -> None:
        append(info.chunk_offset)
        append((info.byte_offset, info.size, info.filter_mask))

    try:
        if math.prod(dataset.shape):
            dataset.id.chunk_iter(visit)
    except (TypeError, RuntimeError, OSError) as error:
        raise ReadError(f"{where}: its chunk index cannot be read ({error})") from error
    table = np.frombuffer(records, np.int64).reshape(-1, rank + 3)
    corners, offset, nbytes = table[:, :rank], table[:, rank], table[:, rank + 1]
    mask = table[:, rank + 2].astype(np.uint32)
    end = _file_nbytes(dataset)
    bad = np.flatnonzero((offset < 0) | (nbytes < 0) | (nbytes > end) | (offset > end - nbytes))
    if bad.size:
        at = tuple(int(x) for x in corners[bad[0]])
        raise ReadError(
            f"{where}, chunk {at}: {nbytes[bad[0]]} bytes at byte {offset[bad[0]]} do not lie in"
            f" the file, which has {end} bytes; it was cut short or is damaged"
        )
    due = math.prod(dataset.chunks) * dataset.dtype.itemsize
    bad = np.flatnonzero(nbytes != due)
    if bad.size and not layout["filters"]:
        at = tuple(int(x) for x in corners[bad[0]])
        raise ReadError(
            f"{where}, chunk {at}: {nbytes[bad[0]]} bytes are stored, {due} are due; the file is"
            " damaged"
        )
    chunk = np.asarray(dataset.chunks, np.int64)
    shape = np.asarray(dataset.shape, np.int64)
    if ((corners % chunk != 0) | (corners < 0) | (corners >= shape)).any():
        raise _NotDirectError("HDF5 reports chunks outside the dataset")
    if layout["filters"]:
        mask = _mask_unfiltered_edges(plist, corners, chunk, shape, mask)
    extents = grid_of(dataset.shape, dataset.chunks)
    cells = (corners // chunk).T
    index = np.ravel_multi_index(tuple(cells), extents) if rank else np.zeros(0, np.int64)
    order = np.argsort(index, kind="stable")
    index = index[order].astype(np.int64)
    if (index[1:] == index[:-1]).any():
        raise _NotDirectError("HDF5 reports a chunk twice")
    complete = index.size == math.prod(extents)
    return ChunkTable(
        index=None if complete else index,
        offset=offset[order],
        nbytes=nbytes[order],
        filter_mask=mask[order],
    )


def _mask_unfiltered_edges(
    plist: h5py.h5p.PropDCID,
    corners: NDArray[np.int64],
    chunk: NDArray[np.int64],
    shape: NDArray[np.int64],
    mask: NDArray[np.uint32],
) -> NDArray[np.uint32]:
    """Set all bits for partial chunks where the dataset leaves these unfiltered.

    Such chunks are stored raw while their mask says that they were filtered. h5py does not wrap
    the flag that says so; HDF5's own function is found through h5py's extension module.
    """
    partial = (corners + chunk > shape).any(axis=1)
    if not partial.any():
        return mask
    try:
        get_chunk_opts = ctypes.CDLL(h5py.h5p.__file__).H5Pget_chunk_opts
    except (AttributeError, OSError) as error:
        raise _NotDirectError("HDF5 does not say whether its edge chunks are filtered") from error
    get_chunk_opts.argtypes = (ctypes.c_int64, ctypes.POINTER(ctypes.c_uint))
    get_chunk_opts.restype = ctypes.c_int
    options = ctypes.c_uint()
    with h5py._objects.phil:
        status = get_chunk_opts(plist.id, ctypes.byref(options))
    if status < 0:
        raise _NotDirectError("HDF5 does not say whether its edge chunks are filtered")
    if options.value & _DONT_FILTER_PARTIAL_CHUNKS:
        return np.where(partial, np.uint32(_ALL_FILTERS), mask)
    return mask


def _file_nbytes(dataset: h5py.Dataset) -> int:
    return Path(dataset.file.filename).stat().st_size
