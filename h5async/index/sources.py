"""Finds the values that a dataset does not hold itself: in its sources, or in external files.

Returns layouts. Sources may lie in other files, which are opened only if permitted, and may be
virtual themselves. External files hold only values, as the dataset's creation properties describe.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
from numpy.typing import NDArray

from h5async.config.files import FileName
from h5async.core.binding import load_core
from h5async.errors import DamagedError, DatasetError, H5AsyncError, UnsafeFileError
from h5async.index.chunks import left_to_hdf5
from h5async.index.composition import Part, with_parts
from h5async.index.hdf5 import NotDirectError
from h5async.index.layout import DatasetLayout
from h5async.index.links import (
    Located,
    MissingError,
    Reach,
    beside,
    locate,
    open_permitted,
    require_in_place,
)
from h5async.index.tables import Slab, TooManyRunsError
from h5async.index.virtual import mapped_files, read_mappings, source_series, virtual_parts
from h5async.io.hdf5files import HDF5File
from h5async.io.stores import LOCAL, absolute_name, settled_stamp, store_of
from h5async.spelling import named
from h5async.system.interruptions import interruption

_MAX_NESTED = 8  # virtual datasets of virtual datasets
_PREFIX = "HDF5_EXTFILE_PREFIX"
LOCAL_ONLY = (
    "can only be read by HDF5, which opens no other files in object stores and on the web; copy all"
    " of them to this machine"
)

Segment = tuple[bytes, int, int]  # name of the file, offset, bytes

# index(where the source was found, the source, the dimension that counts its samples, depth)
IndexSource = Callable[[Located, h5py.h5d.DatasetID, int, int], DatasetLayout]


class VirtualSources:
    """Finds the sources of one virtual dataset, each once, before HDF5 does.

    The dataset lies in the open `file`, has the creation properties `plist`, is nested below
    `depth` other virtual datasets, and is called `where` in messages. `index` reads the layout of a
    source.

    HDF5 opens the sources of unlimited mappings to determine the shape. So it is first checked that
    these are permitted, exist, and form no loop, in which HDF5 would run forever. DatasetError if
    one is missing, or virtual datasets are nested too deep; UnsafeFileError if one is forbidden.
    """

    def __init__(
        self,
        file: HDF5File,
        plist: h5py.h5p.PropDCID,
        reach: Reach,
        depth: int,
        index: IndexSource,
        where: str,
    ) -> None:
        self._file = file
        self._reach = reach
        self._depth = depth
        self._index = index
        self._where = where
        # By names of file and dataset, and sample axis; None: missing, which is permitted.
        self._found: dict[tuple[str, str, int], DatasetLayout | None] = {}
        if depth >= _MAX_NESTED:
            raise DatasetError(f"{where}: virtual datasets are nested more than {_MAX_NESTED} deep")
        self._mappings = read_mappings(plist)
        # (With a far file, HDF5 would read the file that it has open in place of any other.)
        is_far = not store_of(absolute_name(file.filename)).is_local
        elsewhere = [mapping for mapping in self._mappings if mapping.file != "."]
        self._leads_elsewhere = is_far and bool(elsewhere)
        if is_far and any(mapping.is_unlimited for mapping in elsewhere):
            raise DatasetError(f"{where}: a mapping without a limit {LOCAL_ONLY}")
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

        Raises like the class.
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
            reasons = (part.source.fallback_reason for part in parts)
            reason = next((reason for reason in reasons if reason is not None), None)
            found = with_parts(layout, parts).changed(fallback_reason=reason)
        except (NotDirectError, TooManyRunsError) as error:
            if None in sources:
                raise DatasetError(
                    f"{self._where}: sources are missing, and only h5py could read the rest"
                    f" ({error})"
                ) from error
            found = left_to_hdf5(layout, str(error) or "a virtual dataset of too many runs of rows")
        if found.fallback_reason is not None and self._leads_elsewhere:
            raise DatasetError(f"{self._where}, {found.fallback_reason}, {LOCAL_ONLY}")
        return found

    def _get(self, file_name: str, dataset_name: str, axis: int) -> DatasetLayout | None:
        key = file_name, dataset_name, axis
        if key not in self._found:
            self._found[key] = self._source(*key)
        return self._found[key]

    def _source(
        self, file_name: str, dataset_name: str, axis: int, *, may_be_missing: bool = False
    ) -> DatasetLayout | None:
        may_be_missing = may_be_missing or self._reach.missing_is_fill
        holder, file = absolute_name(self._file.filename), self._file
        path: FileName | None = holder
        if file_name != ".":
            path = self._reach.find(file_name, holder, "HDF5_VDS_PREFIX", self._where)
        what = f'{self._where}: its source "{dataset_name}"'
        remedy = "or read missing sources as the fill value: " + named("allow_missing", True)
        if path is None:
            if may_be_missing:
                return None
            raise DatasetError(
                f"{what} lies in {file_name}, which is missing; bring the file back, {remedy}"
            )
        with contextlib.ExitStack() as files:
            if file_name != ".":
                file = files.enter_context(open_permitted(path, self._where))
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
                    f"{what} is missing in {path}; bring it back, {remedy}"
                ) from error
            if not isinstance(node, h5py.h5d.DatasetID) or found.rest:
                raise DatasetError(f"{what} in {path} is not a dataset")
            return self._index(found, node, axis, self._depth + 1)


def attached(
    layout: DatasetLayout, plist: h5py.h5p.PropDCID, reach: Reach, where: str
) -> tuple[DatasetLayout, list[FileName]]:
    """Return a layout that names its external files, and the real paths of these.

    UnsafeFileError if one is not below a given root: being beside the file is not enough. ReadError
    if one is missing, or too short: HDF5 would return zeros for missing values.
    """
    segments = _segments(plist)
    found = [_permitted(os.fsdecode(name), layout.file, reach, where) for name, _, _ in segments]
    stamps = {str(path): settled_stamp(path) for path in found}
    itemsize = layout.stored_itemsize or layout.dtype.itemsize
    left = itemsize * math.prod(layout.shape[: len(layout.shape) - layout.extra_dims])
    for path, (_, offset, nbytes) in zip(found, segments, strict=True):
        nbytes, size = min(nbytes, left), stamps[str(path)].nbytes
        if size < offset + nbytes:
            raise DamagedError(
                f"{where}: {nbytes} bytes of its values lie at byte {offset} of {path}, which"
                f" has {size} bytes"
            )
        left -= nbytes
    if left:
        raise DamagedError(f"{where}: {left} bytes of its values lie in no external file")
    reach.consulted.asked(_PREFIX)
    for path in found:
        require_in_place(path, stamps[str(path)], where)
        reach.consulted.found(path, stamps[str(path)])
    return replace(layout, attached=tuple(stamps.items())), found


def external_layout(
    layout: DatasetLayout, plist: h5py.h5p.PropDCID, found: Sequence[FileName]
) -> DatasetLayout:
    """Return the layout of rows in the external files that `attached` found.

    NotDirectError if only h5py may read them.
    """
    segments = _segments(plist)
    if load_core() is None:
        raise NotDirectError("the core is missing")
    if layout.member:
        raise NotDirectError("a member of a compound in external files")
    if layout.sample_axis != 0 and len(segments) > 1:
        raise NotDirectError("columns of a dataset in several external files")
    parts: list[Part] = []
    begin, wanted = 0, layout.nbytes
    for path, (_, offset, nbytes) in zip(found, segments, strict=True):
        nbytes = min(nbytes, wanted - begin)
        if nbytes <= 0:
            break
        source = replace(
            layout,
            file=str(path),
            stamp=dict(layout.attached)[str(path)],
            attached=(),
            indexed=None,
            storage="contiguous",
            offset=offset,
        )
        if nbytes == wanted:
            return replace(source, storage="external")
        if begin % layout.row_nbytes or nbytes % layout.row_nbytes:
            raise NotDirectError("samples of a dataset in several external files are split")
        rows = nbytes // layout.row_nbytes
        samples = Slab.run(begin // layout.row_nbytes, begin // layout.row_nbytes + rows)
        source = replace(source, shape=(rows, *layout.row_shape))
        parts.append(Part(source, samples, Slab.run(0, rows)))
        begin += nbytes
    return with_parts(layout, parts)


def _permitted(name: str, holder: str, reach: Reach, where: str) -> FileName:
    """Return the real path of an external file, as HDF5 finds it: from the current directory.

    The external file of a far source lies beside it.
    """
    if not name or "\0" in name:
        raise UnsafeFileError(f"{where} keeps its values in a file with the name {name!r}")
    if not store_of(holder).is_local:
        url = beside(holder, name, where)
        if reach.is_below_root(url) and (target := reach.find(url, holder, _PREFIX, where)):
            return target
        raise _not_permitted(url, where)
    prefix = os.environ.get(_PREFIX, "")
    prefix = prefix.replace("${ORIGIN}", str(Path(holder).parent))
    unresolved = Path(prefix, name)
    path = unresolved.resolve()
    if not any(path.is_relative_to(root) for root in reach.resolved_roots()):
        raise _not_permitted(str(path), where)
    if not path.is_file():
        raise DamagedError(
            f"{where} keeps its values in {path}, which is missing or is not a regular file"
        )
    reach.consulted.found(unresolved, LOCAL.stamp(str(path)))
    return path


def _not_permitted(path: str, where: str) -> UnsafeFileError:
    return UnsafeFileError(
        f"{where} keeps its values in an external file, {path}; if you trust this, allow"
        f" it: {named('allow_external', [os.path.dirname(path)])}"
    )


def _segments(plist: h5py.h5p.PropDCID) -> list[Segment]:
    return [plist.get_external(i) for i in range(plist.get_external_count())]
