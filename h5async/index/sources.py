"""Finds the sources of a virtual dataset, and reads their layouts.

They may lie in other files, which are opened only if permitted, and may be virtual themselves.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
from numpy.typing import NDArray

from h5async.config.files import FileName
from h5async.errors import DatasetError, H5AsyncError
from h5async.index.composition import with_parts
from h5async.index.filterpipeline import left_to_hdf5
from h5async.index.layout import DatasetLayout
from h5async.index.links import Located, MissingError, Reach, locate, open_permitted
from h5async.index.mappings import Mapping, mapped_files, read_mappings, source_series
from h5async.index.obstacles import NotDirectError
from h5async.index.slabs import TooManyRunsError
from h5async.index.virtual import virtual_parts
from h5async.io.stores import HDF5File, absolute_name
from h5async.spelling import named
from h5async.system.interruptions import interruption

_MAX_NESTED = 8  # virtual datasets of virtual datasets

# index(where the source was found, the source, the dimension that counts its samples, depth)
IndexSource = Callable[[Located, h5py.h5d.DatasetID, int, int], DatasetLayout]


class VirtualSources:
    """Finds the sources of one virtual dataset, each once.

    Parameters
    ----------
    file
        The open file of the virtual dataset.
    reach
        Which other files may be opened.
    depth
        The number of virtual datasets that the virtual dataset is a nested source of.
    index
        Reads the layout of a source.
    where
        The virtual dataset, for messages.
    """

    def __init__(
        self, file: HDF5File, reach: Reach, depth: int, index: IndexSource, where: str
    ) -> None:
        self._file = file
        self._reach = reach
        self._depth = depth
        self._index = index
        self._where = where
        self._mappings: list[Mapping] = []  # once `find` has read them
        # By names of file and dataset, and the sample axis; None: it is missing, which is
        # permitted.
        self._found: dict[tuple[str, str, int], DatasetLayout | None] = {}

    def find(self, plist: h5py.h5p.PropDCID) -> None:
        """Find the sources, before HDF5 does.

        HDF5 opens those of unlimited mappings to determine the shape. So those must be permitted
        first, exist, and be free of loops, in which HDF5 would never end.

        Raises
        ------
        DatasetError
            If a source is missing, or virtual datasets are nested too deep.
        UnsafeFileError
            If a source lies in a file that is not permitted.
        """
        if self._depth >= _MAX_NESTED:
            raise DatasetError(
                f"{self._where}: virtual datasets are nested more than {_MAX_NESTED} deep"
            )
        self._mappings = read_mappings(plist)
        for is_numbered, names in source_series(self._mappings):
            for file_name, dataset_name in names:
                key = file_name, dataset_name, 0
                if key in self._found:
                    continue
                source = self._source(*key, may_be_missing=is_numbered)
                if source is not None or not is_numbered:
                    self._found[key] = source
                if source is None:
                    break

    def layout(self, layout: DatasetLayout, read_fill: Callable[[], NDArray[Any]]) -> DatasetLayout:
        """Return the layout of the virtual dataset, with sources, parts and fill value.

        Raises like `find`.
        """
        names = dict.fromkeys(mapped_files(self._mappings, layout.shape))
        sources = [self._get(*name, 0) for name in names]
        there = tuple(source for source in sources if source is not None)
        stored = sum({(s.file, s.path): s.stored_nbytes for s in there}.values())
        layout = layout.changed(sources=there, stored_nbytes=stored)
        try:
            if layout.member:
                raise NotDirectError("a member of a virtual dataset")
            layout = layout.changed(fill=read_fill())
            parts = virtual_parts(self._mappings, layout, self._get) if there else ()
            whole = with_parts(layout, parts)
        except (NotDirectError, TooManyRunsError) as error:
            if None in sources:
                raise DatasetError(
                    f"{self._where}: sources are missing, and only h5py could read the rest"
                    f" ({error})"
                ) from error
            return left_to_hdf5(layout, str(error) or "a virtual dataset of too many runs of rows")
        reasons = [part.source.fallback_reason for part in parts]
        reason = next((reason for reason in reasons if reason is not None), None)
        return whole.changed(fallback_reason=reason)

    def _get(self, file_name: str, dataset_name: str, axis: int) -> DatasetLayout | None:
        key = file_name, dataset_name, axis
        if key not in self._found:
            self._found[key] = self._source(*key)
        return self._found[key]

    def _path(self, file_name: str, dataset_name: str, may_be_missing: bool) -> FileName | None:
        """Return the file of a source, or None if it is missing and may be."""
        holder = absolute_name(self._file.filename)
        if file_name == ".":
            return holder
        found = self._reach.find(file_name, holder, "HDF5_VDS_PREFIX", self._where)
        if found is None and not may_be_missing:
            raise DatasetError(
                f'{self._where}: its source "{dataset_name}" lies in {file_name}, which is missing;'
                " bring the file back, or read missing sources as the fill value:"
                f" {named('allow_missing', True)}"
            )
        return found

    def _source(
        self, file_name: str, dataset_name: str, axis: int, *, may_be_missing: bool = False
    ) -> DatasetLayout | None:
        may_be_missing = may_be_missing or self._reach.missing_is_fill
        path = self._path(file_name, dataset_name, may_be_missing)
        if path is None:
            return None
        with contextlib.ExitStack() as files:
            is_here = file_name == "."
            file = (
                self._file
                if is_here
                else files.enter_context(open_permitted(Path(path), self._where))
            )
            what = f'{self._where}: its source "{dataset_name}"'
            try:
                found = locate(file, dataset_name, self._reach, files)
                node = found.open()
            except KeyError as error:
                is_known = isinstance(error, H5AsyncError) and not isinstance(error, MissingError)
                if is_known or interruption(error) is not None:
                    raise
                if may_be_missing:
                    return None
                raise DatasetError(
                    f"{what} is missing in {path}; bring it back, or read missing sources as the"
                    f" fill value: {named('allow_missing', True)}"
                ) from error
            if not isinstance(node, h5py.h5d.DatasetID) or found.rest:
                raise DatasetError(f"{what} in {path} is not a dataset")
            return self._index(found, node, axis, self._depth + 1)
