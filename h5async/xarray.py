"""Opens files in xarray, by ``engine="h5async"``: values are read by the core, in threads.

A path enters, and a Dataset of lazy arrays leaves. h5netcdf and xarray's own engine for it find the
names of dimensions, attributes and encodings, and then close the file; only values are read here.
Only this module imports xarray, not ``import h5async``.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
from xarray import Dataset, DataTree, Variable
from xarray.backends import BackendArray, BackendEntrypoint, H5NetCDFStore, StoreBackendEntrypoint
from xarray.core import indexing

from h5async.arrays.openfile import File, open_file
from h5async.errors import needs_package
from h5async.io.source import collecting_later

# Keywords of xarray's own, of h5netcdf, and of `open_file`.
_DECODERS = (
    "mask_and_scale",
    "decode_times",
    "concat_characters",
    "decode_coords",
    "use_cftime",
    "decode_timedelta",
)
_OF_H5NETCDF = "invalid_netcdf", "phony_dims", "decode_vlen_strings"
_OPTIONS = (
    "drop_variables",
    "group",
    "num_threads",
    "cache_bytes",
    "io",
    "allow_external",
    "allow_missing",
    "storage_options",
    "cache_dir",
    "index_cache",
)


class H5AsyncArray(BackendArray):
    """The values of a variable, read by its file.

    A variable with unlimited dimensions may be larger than its dataset; fill values pad it.
    """

    def __init__(self, file: File, path: str, like: Any, datatype: Any, is_text: bool) -> None:
        self.shape, self.dtype = like.shape, like.dtype
        self._file, self._path = file, path
        view = getattr(datatype, "dtype_view", None)  # whose members may lack padding
        self._view = view if view is not None and view.itemsize == like.dtype.itemsize else None
        self._is_text = is_text

    def __getitem__(self, key: indexing.ExplicitIndexer) -> Any:
        """Return the values that an indexer of xarray selects."""
        one_list = indexing.IndexingSupport.OUTER_1VECTOR
        return indexing.explicit_indexing_adapter(key, self.shape, one_list, self._read)

    def _read(self, key: tuple[Any, ...]) -> Any:
        dataset = self._file[self._path]
        values = dataset[key] if dataset.shape == self.shape else self._padded(dataset, key)
        if self._is_text:
            return _decoded(values)
        return values if self._view is None else values.view(self._view)

    def _padded(self, dataset: Any, key: tuple[Any, ...]) -> Any:
        """Return values with fill values where the dataset ends before the variable does."""
        own: list[Any] = []
        counts: list[int] = []
        shape: list[int] = []
        is_there = True
        for part, size, end in zip(key, self.shape, dataset.shape, strict=True):
            if isinstance(part, slice):
                first, stop, step = part.indices(size)
                own.append(slice(first, min(stop, end), step))
                counts.append(len(range(first, min(stop, end), step)))
                shape.append(len(range(first, stop, step)))
            elif isinstance(part, np.ndarray):
                own.append(part[part < end])
                counts.append(own[-1].size)
                shape.append(part.size)
            else:
                own.append(part)
                is_there &= bool(part < end)
        layout = dataset.layout
        out = np.full(shape, b"" if layout is None else layout.fill, self.dtype)
        if is_there and all(counts):
            out[tuple(map(slice, counts))] = dataset[tuple(own)]
        return out


def _decoded(values: Any) -> Any:
    """Decode byte strings to strings: an array of them, or a single one."""
    if not isinstance(values, np.ndarray):
        return values.decode() if isinstance(values, bytes) else values
    found = np.empty(values.shape, object)
    found.reshape(-1)[:] = [_decoded(value) for value in values.reshape(-1)]
    return found


class H5AsyncStore(H5NetCDFStore):
    """The variables of a group that h5netcdf has open, with `H5AsyncArray` for their values.

    `file` reads these; `hdf5` is the same file, opened by h5py.
    """

    def __init__(self, file: File, hdf5: Any, opened: Any, group: str | None) -> None:
        super().__init__(opened, group=group, mode="r")
        self.file, self.hdf5, self.decodes = file, hdf5, opened.decode_vlen_strings

    def open_store_variable(self, name: str, var: Any) -> Variable:
        """Return a variable as xarray's engine for h5netcdf does, except for its values."""
        found = super().open_store_variable(name, var)
        is_text = bool(self.decodes) and found.encoding.get("dtype") is str
        path = f"{self.ds.name}/{name}"
        other = f"{self.ds.name}/_nc4_non_coord_{name}"
        if other in self.hdf5:  # a variable named like a dimension of other variables
            path = other
        array = H5AsyncArray(self.file, path, found, getattr(var, "datatype", None), is_text)
        encoding = {**found.encoding, "source": self.file.filename}
        return Variable(found.dims, indexing.LazilyIndexedArray(array), found.attrs, encoding)


class H5AsyncBackend(BackendEntrypoint):
    """``xarray.open_dataset(path, engine="h5async")``: see `docs/arrays.md`."""

    description = "Read netCDF-4 and HDF5 files in threads, without HDF5's lock"
    open_dataset_parameters = ("filename_or_obj", *_DECODERS, *_OF_H5NETCDF, *_OPTIONS)
    supports_groups = True

    def guess_can_open(self, filename_or_obj: Any) -> bool:
        """Return False: other engines read such files, too, so this one has to be named."""
        return False

    def open_dataset(
        self, filename_or_obj: Any, *, drop_variables: Any = None, **options: Any
    ) -> Dataset:
        """Open a group of a file as a Dataset."""
        group = options.pop("group", None)
        with _opened(filename_or_obj, options) as opened:
            return opened(group, drop_variables)

    def open_groups_as_dict(
        self, filename_or_obj: Any, *, drop_variables: Any = None, **options: Any
    ) -> dict[str, Dataset]:
        """Open each group of a file as a Dataset, by their paths."""
        parent = (options.pop("group", None) or "").strip("/")
        with _opened(filename_or_obj, options) as opened:
            found = {}
            for name in _groups_in(opened.keywords["hdf5"], f"/{parent}"):
                path = f"{parent}/{name}".strip("/")
                found[(name or ".") if parent else f"/{name}"] = opened(
                    path or None, drop_variables
                )
            return found

    def open_datatree(self, filename_or_obj: Any, **options: Any) -> DataTree:
        """Open all groups of a file."""
        return DataTree.from_dict(self.open_groups_as_dict(filename_or_obj, **options))


@contextmanager
def _opened(name: Any, options: dict[str, Any]) -> Iterator[Any]:
    """Open a file in HDF5 and h5netcdf; yield a function that makes a Dataset of a group."""
    with needs_package("h5netcdf", 'engine="h5async"'):
        import h5netcdf
    decoders = {key: options.pop(key) for key in _DECODERS if key in options}
    of_h5netcdf = {key: options.pop(key) for key in _OF_H5NETCDF if key in options}
    if of_h5netcdf.get("phony_dims") is None:
        of_h5netcdf["phony_dims"] = "access"
    of_h5netcdf.setdefault("decode_vlen_strings", True)
    if isinstance(name, bytes | memoryview):
        name = io.BytesIO(name)
    # (`cache` is an option of xarray's own.)
    cache: Any = None if options.get("cache_dir") is None else "disk"
    file = open_file(name, cache=cache, **options)
    with file.opened("") as (located, _), collecting_later():  # while HDF5 calls Python
        file.require_permitted(located.file)
        with h5netcdf.File(located.file, "r", **of_h5netcdf) as opened:
            yield partial(_dataset, file=file, hdf5=located.file, opened=opened, decoders=decoders)


def _dataset(
    group: str | None,
    drop_variables: Any,
    *,
    file: File,
    hdf5: Any,
    opened: Any,
    decoders: Mapping[str, Any],
) -> Dataset:
    store = H5AsyncStore(file, hdf5, opened, group)
    found = StoreBackendEntrypoint().open_dataset(store, drop_variables=drop_variables, **decoders)
    found.set_close(file.release)
    return found


def _groups_in(hdf5: Any, parent: str) -> Iterator[str]:
    """Yield the relative paths of all groups in a group, and "" for itself."""
    yield ""
    names: list[str] = []
    hdf5[parent].visititems(
        lambda name, node: names.append(name) if hasattr(node, "keys") else None
    )
    yield from names
