"""Finds the external files that hold the values of a dataset, and where its rows lie in them.

Such files hold only values, as the creation properties of the dataset describe.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import h5py

from h5async.core.binding import load_core
from h5async.errors import ReadError, UnsafeFileError
from h5async.index.composition import Part, with_parts
from h5async.index.layout import DatasetLayout
from h5async.index.links import Reach, require_in_place, require_local
from h5async.index.obstacles import NotDirectError
from h5async.index.slabs import Slab
from h5async.io.stores import LOCAL, settled_stamp
from h5async.spelling import named

_PREFIX = "HDF5_EXTFILE_PREFIX"

Segment = tuple[bytes, int, int]  # name of the file, offset, bytes


def attached(
    layout: DatasetLayout, plist: h5py.h5p.PropDCID, reach: Reach, where: str
) -> tuple[DatasetLayout, list[Path]]:
    """Return a layout that names its external files, and their real paths.

    Raises
    ------
    UnsafeFileError
        If one is not below a given root: lying beside the file is not enough.
    ReadError
        If one is missing, or too short: HDF5 would return zeros for missing values.
    """
    segments = _segments(plist)
    found = [_permitted(os.fsdecode(name), layout.file, reach, where) for name, _, _ in segments]
    stamps = {str(path): settled_stamp(path) for path in found}
    sizes = [(path, stamps[str(path)].nbytes) for path in found]
    _require_bytes(layout, segments, sizes, where)
    reach.consulted.asked(_PREFIX)
    for path in found:
        require_in_place(path, stamps[str(path)], where)
        reach.consulted.found(path, stamps[str(path)])
    return replace(layout, attached=tuple(stamps.items())), found


def external_layout(
    layout: DatasetLayout, plist: h5py.h5p.PropDCID, found: Sequence[Path]
) -> DatasetLayout:
    """Return where the rows lie in external files that were found by `attached`.

    NotDirectError if only h5py may read them.
    """
    segments = _segments(plist)
    if load_core() is None:
        raise NotDirectError("the core is missing")
    if layout.member:
        raise NotDirectError("a member of a compound in external files")
    if layout.sample_axis != 0 and len(segments) > 1:
        raise NotDirectError("columns of a dataset in several external files")
    parts, begin, wanted = [], 0, layout.nbytes
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


def _require_bytes(
    layout: DatasetLayout,
    segments: Sequence[Segment],
    sizes: Sequence[tuple[Path, int]],
    where: str,
) -> None:
    itemsize = layout.stored_itemsize or layout.dtype.itemsize
    left = itemsize * math.prod(layout.shape[: len(layout.shape) - layout.extra_dims])
    for (path, size), (_, offset, nbytes) in zip(sizes, segments, strict=True):
        nbytes = min(nbytes, left)
        if size < offset + nbytes:
            raise ReadError(
                f"{where}: {nbytes} bytes of its values lie at byte {offset} of {path}, which"
                f" has {size} bytes"
            )
        left -= nbytes
    if left:
        raise ReadError(f"{where}: {left} bytes of its values lie in no external file")


def _permitted(name: str, holder: str, reach: Reach, where: str) -> Path:
    """Return the real path of an external file, as HDF5 finds it: from the current directory."""
    if not name or "\0" in name:
        raise UnsafeFileError(f"{where} keeps its values in a file with the name {name!r}")
    require_local(holder, name, where)
    prefix = os.environ.get(_PREFIX, "")
    prefix = prefix.replace("${ORIGIN}", str(Path(holder).parent))
    unresolved = Path(prefix, name)
    path = unresolved.resolve()
    roots = [root.resolve() for root in reach.roots]
    if not any(path.is_relative_to(root) for root in roots):
        raise UnsafeFileError(
            f"{where} keeps its values in an external file, {path}; if you trust this, allow"
            f" it: {named('allow_external', [str(path.parent)])}"
        )
    if not LOCAL.is_regular(path):
        raise ReadError(
            f"{where} keeps its values in {path}, which is missing or is not a regular file"
        )
    reach.consulted.found(unresolved, LOCAL.stamp(str(path)))
    return path


def _segments(plist: h5py.h5p.PropDCID) -> list[Segment]:
    return [plist.get_external(i) for i in range(plist.get_external_count())]
