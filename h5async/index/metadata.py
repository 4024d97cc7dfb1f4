"""h5py metadata enters; a `DatasetLayout` leaves: where the bytes lie, or why only h5py may read.

Metadata is read once, with the file open for just that long. A dataset is read the direct way
only where its bytes are known to be what h5py would give; every doubt ends in a `fallback_reason`,
and `fallback.py` then reads the dataset through h5py.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from h5async.codec.filters import Filter, can_decode
from h5async.config import Field
from h5async.errors import (
    DatasetError,
    H5AsyncError,
    ReadError,
    UnsafeFileError,
    out_of_memory,
)
from h5async.index.chunkindex import (
    NotDirectError,
    TooManyChunksError,
    applies_any,
    edges_are_raw,
    fill_nbytes,
    filters_of,
    indexed,
    read_chunk_table,
    require_true_coordinates,
    without_filters,
)
from h5async.index.elements import Element, element_of, has_objects
from h5async.index.layout import ChunkTable, DatasetLayout, Part, Slab, Storage, normal_axis
from h5async.index.links import (
    BESIDE,
    MissingError,
    Reach,
    locate,
    metadata_cache,
    open_index,
    open_permitted,
    require_in_place,
)
from h5async.index.listing import walk
from h5async.index.virtual import mapped_files, source_series, virtual_parts
from h5async.io.storage import FileStamp, may_map
from h5async.names import name_bytes, shell_word
from h5async.system.interruptions import interruption, passing, suppressing

_LISTED_DATASETS = 20
_MOST_OBJECTS = 200  # of a file that are looked at to say what is there: 0.05 s
_LISTING_NBYTES = 32 << 20  # of metadata: the names of a large group are gone through for each
_MAX_NESTED = 8  # virtual datasets of virtual datasets


def read_layouts(
    path: Path, fields: Mapping[str, Field], reach: Reach = BESIDE
) -> dict[str, DatasetLayout]:
    """Read the layout of each field's dataset, opening the file once.

    Raises
    ------
    ReadError
        If the file cannot be opened, or a chunk table points outside it.
    DatasetError
        If a dataset is missing, is a group, or has no samples dimension or fixed-size dtype.
    UnsafeFileError
        If a dataset lies in files that `reach` does not permit.
    ConfigError
        If a field's ``num_dim`` is no dimension of its dataset.
    """
    with open_index(path) as file:
        return {
            name: _layout_at(file, field.path, field.num_dim, reach)
            for name, field in fields.items()
        }


def list_layouts(
    path: Path, reach: Reach = BESIDE
) -> Iterator[tuple[str, DatasetLayout | H5AsyncError]]:
    """Yield each dataset of a file, as it is found, with its layout or why it has none.

    They come group by group, in the order of names.
    """
    with passing(), open_index(path) as file, metadata_cache(file, _LISTING_NBYTES):
        for name, kind in walk(file):
            if kind == "group" or (kind != "dataset" and not _may_be_dataset(file, name, reach)):
                continue
            found: DatasetLayout | H5AsyncError
            try:
                with passing():
                    found = _layout_at(file, name, 0, reach)
            except H5AsyncError as error:
                found = error
            yield name, found


def _may_be_dataset(file: h5py.File, path: str, reach: Reach) -> bool:
    """Tell whether a name leads to a dataset, or to nothing that can be opened."""
    with contextlib.ExitStack() as files:
        with suppressing(Exception):  # a damaged object may raise anything; the listing says what
            place = locate(file, path, reach, files)
            return isinstance(place.file[name_bytes(place.path)], h5py.Dataset)
        return True


def _layout_at(file: h5py.File, path: str, num_dim: int, reach: Reach) -> DatasetLayout:
    """Read the layout of what a path leads to, in this file or another."""
    with contextlib.ExitStack() as files:
        try:
            place = locate(file, path, reach, files)
            node = place.file[name_bytes(place.path)]
        except H5AsyncError:
            raise
        except MemoryError as error:
            raise out_of_memory(f'{file.filename}: dataset "{path}"', error) from error
        except Exception as error:  # KeyError for most, but a damaged object may raise anything
            missing = isinstance(error, KeyError) and "Unable" not in str(error)
            missing = missing or "doesn't exist" in str(error)
            detail = "" if missing else f" that can be opened ({error})"
            raise DatasetError(
                f'{file.filename}: there is no dataset "{path}"{detail};'
                f" {_what_is_there(file, reach)}"
            ) from error
        if not isinstance(node, h5py.Dataset):
            kind = "group" if isinstance(node, h5py.Group) else "named type"
            raise DatasetError(
                f'{file.filename}: "{path}" is a {kind}, not a dataset;'
                f" {_what_is_there(file, reach)}"
            )
        indexer = _Indexer(place.file, reach, 0)
        return indexer.layout(place.path, node, place.rest, num_dim)


def _what_is_there(file: h5py.File, reach: Reach) -> str:
    """List datasets of a file, and a command that would read the largest of them.

    Not all of a large file is looked at: what is asked for may be misspelt in a file of millions.
    """
    with metadata_cache(file, _LISTING_NBYTES):
        listed = list(itertools.islice(walk(file, _MOST_OBJECTS + 1), _MOST_OBJECTS + 1))
        is_cut = len(listed) > _MOST_OBJECTS
        paths = [path for path, kind in listed[:_MOST_OBJECTS] if kind == "dataset"]
        datasets = _opened(file, paths)
    shapes = {name: _shown_shape(file, dataset, reach) for name, dataset in datasets.items()}
    looked = f"the first {_MOST_OBJECTS:,} objects of the file"
    if not shapes:
        return f"{looked} are no datasets" if is_cut else "the file holds no datasets"
    shown = [f'"{name}" {shape}' for name, shape in shapes.items()][:_LISTED_DATASETS]
    more = len(shapes) - len(shown)
    text = ", ".join(shown) + (f" and {more} more" if more > 0 else "")
    text = f"{looked} hold {text}; there are others" if is_cut else f"the file holds {text}"
    command = _read_command(file, shapes, datasets)
    return f"{text}; try: {command}" if command else text


def _opened(file: h5py.File, paths: Sequence[str]) -> dict[str, h5py.Dataset]:
    found = {}
    for path in paths:
        with suppressing(Exception):  # it is damaged, as is said where it is read
            found[path] = file[name_bytes(path)]
    return found


def _read_command(
    file: h5py.File,
    shapes: Mapping[str, tuple[int, ...]],
    datasets: Mapping[str, h5py.Dataset],
) -> str | None:
    """Return a command that reads the largest of some datasets, if any can be read."""
    readable = {
        name: shape for name, shape in shapes.items() if shape and _has_fixed_size(datasets[name])
    }
    if not readable:
        return None
    data = max(readable, key=lambda name: math.prod(readable[name]))
    as_long = [n for n in readable if n != data and readable[n][0] == readable[data][0]]
    labels = min(as_long, key=lambda name: math.prod(readable[name]), default=None)
    command = ["h5async", "read", file.filename, "--data-field", data]
    command += ["--labels-field", labels] if labels else ["--no-labels"]
    return " ".join(map(shell_word, command))


def _shown_shape(file: h5py.File, dataset: h5py.Dataset, reach: Reach) -> tuple[int, ...]:
    plist = dataset.id.get_create_plist()
    if plist.get_layout() == h5py.h5d.VIRTUAL:
        is_permitted = False
        with suppressing(H5AsyncError):
            _Indexer(file, reach, 0).find_sources(plist, {}, "")
            is_permitted = True
        if not is_permitted:
            return ()  # HDF5 would look at them all the same
    return dataset.shape or ()


def _has_fixed_size(dataset: h5py.Dataset) -> bool:
    with suppressing(Exception):  # h5py has no one type for what it cannot express
        return not dataset.dtype.hasobject
    return False


# By names of file and dataset, and the axis of the samples; None: it is missing, and may be.
Sources = dict[tuple[tuple[str, str], int], DatasetLayout | None]


class _Indexer:
    """Reads layouts from one open file; `depth` counts virtual datasets within each other."""

    def __init__(self, file: h5py.File, reach: Reach, depth: int) -> None:
        self._file = file
        self._path = Path(file.filename).absolute()  # opened again, from wherever we are then
        self._stamp = FileStamp.settled(file.id.get_vfd_handle())
        self._reach = reach
        self._depth = depth

    def layout(
        self, name: str, dataset: h5py.Dataset, member: Sequence[str], num_dim: int
    ) -> DatasetLayout:
        where = f'{self._file.filename}: dataset "{name}"'
        try:
            return self._layout(name, dataset, tuple(member), num_dim, where)
        except H5AsyncError:
            raise
        except MemoryError as error:
            raise out_of_memory(f"{where}, its metadata", error) from error
        except Exception as error:  # damaged metadata may raise anything
            raise ReadError(f"{where}: its metadata cannot be read ({error})") from error

    def _layout(
        self, name: str, dataset: h5py.Dataset, member: tuple[str, ...], num_dim: int, where: str
    ) -> DatasetLayout:
        plist = dataset.id.get_create_plist()
        storage = _storage(plist)
        sources: Sources = {}
        if storage == "virtual":
            self.find_sources(plist, sources, where)
        element = element_of(dataset, member, where)
        if dataset.shape is None:
            raise DatasetError(f"{where} is empty (a null dataspace): it holds no samples")
        shape = dataset.shape
        if shape == () and self._depth:
            shape = (1,)  # as the source of a virtual dataset, it is one sample
        if shape == ():
            raise DatasetError(f"{where} is a scalar: it has no dimension that counts samples")
        if element.dtype.hasobject:
            raise DatasetError(
                f"{where}: its elements are of variable length or references, so a batch of them"
                " has no fixed size; store them with a fixed-size type"
            )
        base, extra = element.base, element.shape
        filters = filters_of(plist)
        layout = DatasetLayout(
            file=str(self._path),
            stamp=self._stamp,
            path=name,
            shape=(*shape, *extra),
            dtype=_without_metadata(base),
            sample_axis=normal_axis(num_dim, len(shape), where),
            storage=storage,
            fallback_reason=None,
            fill=np.zeros((), base),
            chunk_shape=(*dataset.chunks, *extra) if dataset.chunks else (),
            filters=filters,
            stored_nbytes=0 if storage == "chunked" else dataset.id.get_storage_size(),
            member=member,
            # Of a type with elements of variable length, HDF5 tells the size in memory.
            stored_itemsize=0 if has_objects(dataset) else dataset.id.get_type().get_size(),
            extra_dims=len(extra),
            indexed=indexed(dataset),
        )
        try:
            if storage == "virtual":
                return self._virtual(layout, plist, sources, where)
            if storage == "external":
                layout, found = self._attached(layout, plist, where)
                return self._external(layout, plist, element, found)
            if storage == "compact":
                values = np.asarray(_values(dataset, member))
                values = values.reshape(layout.shape).view(layout.raw_dtype)
                return replace(layout, values=values)
            _require_fill(plist, layout.stored_itemsize, where)
            if storage == "chunked" and filters:
                _require_lengths(filters, math.prod(dataset.chunks) * layout.stored_itemsize, where)
                layout = replace(layout, has_raw_edges=edges_are_raw(dataset))
                _require_filters(layout, dataset, where)
            self._require_direct(layout, element)
            if member:
                return self._member(layout, dataset, plist, element, where)
            layout = replace(layout, fill=_fill_value(plist, base, extra))
            return self._direct(layout, dataset, plist, where)
        except NotDirectError as error:
            nbytes = self._stored_nbytes(layout, dataset, where)
            return replace(layout, fallback_reason=str(error), stored_nbytes=nbytes)

    def _require_direct(self, layout: DatasetLayout, element: Element) -> None:
        if self._file.id.get_intent() & h5py.h5f.ACC_RDWR:
            raise NotDirectError(
                "the file is open for writing in this process, which may hold unwritten values"
            )
        if not element.is_numpys:
            raise NotDirectError(f"its stored type differs from NumPy's {element.dtype}")
        for entry in layout.filters:
            if _is_hdf5s(entry):
                raise NotDirectError(f"filter {entry.number} ({entry.label}) is decoded by HDF5")
        is_columns = layout.storage in ("contiguous", "external") and layout.sample_axis != 0
        if is_columns and not may_map(layout.file, self._reach.io):
            raise NotDirectError(
                "columns of a contiguous dataset are read by mapping, which needs a local file"
                ' system, or io="map"'
            )

    def _stored_nbytes(self, layout: DatasetLayout, dataset: h5py.Dataset, where: str) -> int:
        """Return how many bytes are stored of what h5py is to read; 0: nobody knows.

        The addresses of all are checked: HDF5 itself believes most of them.
        """
        # What was not written yet may have no place in the file, and some sizes are not known.
        is_writer = self._file.id.get_intent() & h5py.h5f.ACC_RDWR
        is_checked = layout.stored_itemsize and not is_writer
        try:
            if is_checked and layout.storage == "contiguous":
                _contiguous_offset(dataset, where)
            elif is_checked and layout.storage == "chunked":
                table = read_chunk_table(dataset, layout.filters, layout.has_raw_edges, where)
                return int(table.nbytes.sum())
        except TooManyChunksError:
            return 0
        except NotDirectError:
            pass
        return int(dataset.id.get_storage_size())

    def _direct(
        self, layout: DatasetLayout, dataset: h5py.Dataset, plist: h5py.h5p.PropDCID, where: str
    ) -> DatasetLayout:
        """Find out where the bytes lie."""
        if layout.storage == "chunked":
            require_true_coordinates(dataset)
            unused = _nobodys(layout.filters)  # as was found before
            chunks = read_chunk_table(dataset, layout.filters, layout.has_raw_edges, where)
            chunks, filters = without_filters(chunks, layout.filters, unused)
            if unused and not filters:
                _require_whole(chunks, layout, where)
            stored_nbytes = int(chunks.nbytes.sum())
            layout = replace(layout, chunks=chunks, filters=filters, stored_nbytes=stored_nbytes)
        else:
            layout = replace(layout, offset=_contiguous_offset(dataset, where))
        if _has_no_values(plist, layout):
            raise NotDirectError("it was never written, and its fill value is undefined")
        return layout

    def _member(
        self,
        layout: DatasetLayout,
        dataset: h5py.Dataset,
        plist: h5py.h5p.PropDCID,
        element: Element,
        where: str,
    ) -> DatasetLayout:
        """Return the layout of a member: a part of the rows of the compound."""
        if not layout.stored_itemsize:
            raise NotDirectError("a member of a compound with elements of variable length")
        rank = len(dataset.shape)
        extra = layout.shape[rank:]
        label = "/".join(layout.member)
        compound: np.dtype[Any] = np.dtype(
            {
                "names": [label],
                "formats": [(layout.raw_dtype, extra)],
                "offsets": [element.offset],
                "itemsize": layout.stored_itemsize,
            }
        )
        fill = np.zeros(layout.stored_itemsize, np.uint8)
        values = _member_fill(plist, dataset, layout.member)
        fill[element.offset : element.offset + len(values)] = np.frombuffer(values, np.uint8)
        source = replace(
            layout,
            shape=layout.shape[:rank],
            chunk_shape=layout.chunk_shape[:rank],
            dtype=compound,
            fill=fill.view(compound).reshape(()),
            member=(),
        )
        source = self._direct(source, dataset, plist, where)
        samples = Slab.run(0, layout.num_samples)
        part = Part(source, samples, samples, member=label)
        return replace(layout, parts=(part,) if layout.num_samples else ())

    def find_sources(self, plist: h5py.h5p.PropDCID, found: Sources, where: str) -> None:
        """Find the sources of a virtual dataset, before HDF5 does.

        It opens those of unlimited mappings to tell the shape. What it may be let loose on must be
        permitted, there, and free of loops, in which it would never end.
        """
        if self._depth >= _MAX_NESTED:
            raise DatasetError(f"{where}: virtual datasets are nested more than {_MAX_NESTED} deep")
        for is_numbered, names in source_series(plist):
            for key in names:
                if (key, 0) in found:
                    continue
                source = self._source(*key, 0, where, may_be_missing=is_numbered)
                if source is not None or not is_numbered:
                    found[key, 0] = source
                if source is None:
                    break

    def _virtual(
        self, layout: DatasetLayout, plist: h5py.h5p.PropDCID, found: Sources, where: str
    ) -> DatasetLayout:
        def find(file_name: str, dataset_name: str, axis: int) -> DatasetLayout | None:
            key = (file_name, dataset_name), axis
            if key not in found:
                found[key] = self._source(file_name, dataset_name, axis, where)
            return found[key]

        sources = [find(*names, 0) for names in dict.fromkeys(mapped_files(plist, layout.shape))]
        there = tuple(source for source in sources if source is not None)
        stored = sum({(s.file, s.path): s.stored_nbytes for s in there}.values())
        layout = replace(layout, sources=there, stored_nbytes=stored)
        try:
            if layout.member:
                raise NotDirectError("a member of a virtual dataset")
            fill = _fill_value(plist, layout.fill.dtype, (), whenever=True)
            layout = replace(layout, fill=fill)
            parts = virtual_parts(plist, layout, find) if there else ()
        except NotDirectError as error:
            if None in sources:
                raise DatasetError(
                    f"{where}: sources are missing, and only h5py could read the rest ({error})"
                ) from error
            return replace(layout, fallback_reason=str(error))
        reasons = [part.source.fallback_reason for part in parts]
        reason = next((reason for reason in reasons if reason is not None), None)
        return replace(layout, parts=parts, fallback_reason=reason)

    def _source_path(
        self, file_name: str, dataset_name: str, where: str, may_be_missing: bool
    ) -> Path | None:
        """Return the file of a virtual dataset's source, None where it is missing and may be."""
        if file_name == ".":
            return self._path
        found = self._reach.find(file_name, self._path, "HDF5_VDS_PREFIX", where)
        if found is None and not may_be_missing:
            raise DatasetError(
                f'{where}: its source "{dataset_name}" lies in {file_name}, which is missing; bring'
                " it back, or let what is missing have the fill value: allow_missing=True"
            )
        return found

    def _source(
        self,
        file_name: str,
        dataset_name: str,
        axis: int,
        where: str,
        *,
        may_be_missing: bool = False,
    ) -> DatasetLayout | None:
        may_be_missing = may_be_missing or self._reach.missing_is_fill
        path = self._source_path(file_name, dataset_name, where, may_be_missing)
        if path is None:
            return None
        with contextlib.ExitStack() as files:
            is_here = file_name == "."
            file = self._file if is_here else files.enter_context(open_permitted(path, where))
            try:
                place = locate(file, dataset_name, self._reach, files)
                node = place.file[name_bytes(place.path)]
            except KeyError as error:
                is_known = isinstance(error, H5AsyncError) and not isinstance(error, MissingError)
                if is_known or interruption(error) is not None:
                    raise
                if may_be_missing:
                    return None
                raise DatasetError(
                    f'{where}: its source "{dataset_name}" is missing in {path}; bring it back, or'
                    " let what is missing have the fill value: allow_missing=True"
                ) from error
            if not isinstance(node, h5py.Dataset) or place.rest:
                raise DatasetError(f'{where}: its source "{dataset_name}" in {path} is no dataset')
            indexer = _Indexer(place.file, self._reach, self._depth + 1)
            return indexer.layout(place.path, node, (), axis)

    def _attached(
        self, layout: DatasetLayout, plist: h5py.h5p.PropDCID, where: str
    ) -> tuple[DatasetLayout, list[Path]]:
        """Return a layout that names its external files, which must be permitted by root."""
        segments = _segments(plist)
        found = [self._external_path(os.fsdecode(name), where) for name, _, _ in segments]
        self._require_external_bytes(layout, segments, found, where)
        attached = {}
        for path in found:
            attached[str(path)] = FileStamp.settled(path)
            require_in_place(path, attached[str(path)], where)
        return replace(layout, attached=tuple(attached.items())), found

    def _external(
        self,
        layout: DatasetLayout,
        plist: h5py.h5p.PropDCID,
        element: Element,
        found: Sequence[Path],
    ) -> DatasetLayout:
        """Return the layout of values in external files that were found."""
        segments = _segments(plist)
        self._require_direct(layout, element)
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
        return replace(layout, parts=tuple(parts))

    def _require_external_bytes(
        self,
        layout: DatasetLayout,
        segments: Sequence[tuple[bytes, int, int]],
        paths: Sequence[Path],
        where: str,
    ) -> None:
        """Refuse files that are too short: HDF5 would put zeros for what is missing."""
        itemsize = layout.stored_itemsize or layout.dtype.itemsize
        left = itemsize * math.prod(layout.shape[: len(layout.shape) - layout.extra_dims])
        for path, (_, offset, nbytes) in zip(paths, segments, strict=True):
            nbytes = min(nbytes, left)
            size = path.stat().st_size
            if size < offset + nbytes:
                raise ReadError(
                    f"{where}: {nbytes} bytes of its values lie at byte {offset} of {path}, which"
                    f" has {size} bytes"
                )
            left -= nbytes
        if left:
            raise ReadError(f"{where}: {left} bytes of its values lie in no external file")

    def _external_path(self, name: str, where: str) -> Path:
        """Return the real path of an external file, as HDF5 finds it: from the current directory.

        Raises
        ------
        UnsafeFileError
            If it lies below no root that was given: beside the file is not enough.
        """
        if not name or "\0" in name:
            raise UnsafeFileError(f"{where} keeps its values in a file with the name {name!r}")
        prefix = os.environ.get("HDF5_EXTFILE_PREFIX", "")
        prefix = prefix.replace("${ORIGIN}", str(self._path.parent))
        path = Path(prefix, name).resolve()
        roots = [root.resolve() for root in self._reach.roots]
        if not any(path.is_relative_to(root) for root in roots):
            raise UnsafeFileError(
                f"{where} keeps its values in an external file, {path}; if you trust this, allow"
                f" it: allow_external=[{str(path.parent)!r}]"
            )
        if not path.is_file():
            raise ReadError(f"{where} keeps its values in {path}, which is missing or no file")
        return path


def _segments(plist: h5py.h5p.PropDCID) -> list[tuple[bytes, int, int]]:
    return [plist.get_external(i) for i in range(plist.get_external_count())]


def _values(dataset: h5py.Dataset, member: tuple[str, ...]) -> Any:
    values = (dataset.fields(member[0]) if member else dataset)[...]
    for name in member[1:]:
        values = values[name]
    return values


def _without_metadata(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return dtype if dtype.metadata is None or dtype.fields else np.dtype(dtype.str)


def _storage(plist: h5py.h5p.PropDCID) -> Storage:
    """Return the layout class.

    External storage reports itself as contiguous, and it and virtual datasets have no offset,
    just like datasets that were never written: they must be told apart first.
    """
    kind = plist.get_layout()
    if kind == h5py.h5d.VIRTUAL:
        return "virtual"
    if plist.get_external_count():
        return "external"
    if kind == h5py.h5d.COMPACT:
        return "compact"
    return "chunked" if kind == h5py.h5d.CHUNKED else "contiguous"


def _require_filters(layout: DatasetLayout, dataset: h5py.Dataset, where: str) -> None:
    """Raise `DatasetError` if a chunk was written with a filter that nobody can undo.

    (Neither we nor h5py, with hdf5plugin, if it is there.) Other filters of nobody's do not matter.
    """
    if not _nobodys(layout.filters):
        return
    try:
        import hdf5plugin  # noqa: F401  (registers its filters with HDF5)

        remedy = "hdf5plugin has it neither: let HDF5_PLUGIN_PATH name a folder with its plugin"
    except ImportError:
        remedy = "try: pip install hdf5plugin"
    missing = _nobodys(layout.filters)
    if missing and applies_any(dataset, missing, layout.has_raw_edges):
        entry = layout.filters[missing[0]]
        raise DatasetError(
            f"{where} is compressed with filter {entry.number} ({entry.label}), which is not"
            f" available; {remedy}"
        )


def _is_hdf5s(entry: Filter) -> bool:
    """Tell whether HDF5 has a filter, and we do not."""
    return not can_decode(entry) and bool(h5py.h5z.filter_avail(entry.number))


def _nobodys(filters: tuple[Filter, ...]) -> list[int]:
    """Return the places of filters that neither we have nor HDF5."""
    return [
        place
        for place, entry in enumerate(filters)
        if not can_decode(entry) and not h5py.h5z.filter_avail(entry.number)
    ]


def _require_whole(chunks: ChunkTable, layout: DatasetLayout, where: str) -> None:
    """Refuse chunks that are stored raw, and have another length; HDF5 would read past them."""
    due = math.prod(layout.chunk_shape) * layout.dtype.itemsize
    bad = np.flatnonzero(chunks.nbytes != due)
    if bad.size:
        raise ReadError(
            f"{where}: a chunk at byte {chunks.offset[bad[0]]} was left as it is by all filters,"
            f" and has {chunks.nbytes[bad[0]]} bytes instead of {due}; the file is damaged"
        )


def _require_lengths(filters: tuple[Filter, ...], chunk_nbytes: int, where: str) -> None:
    """Refuse filters that give other lengths; HDF5 delivers what its memory held before."""
    for entry in filters if chunk_nbytes else ():
        stated = entry.stated_chunk_nbytes
        if stated not in (None, chunk_nbytes):
            raise ReadError(
                f"{where}: its chunks have {chunk_nbytes} bytes, and by the parameters of its"
                f" filter {entry.label} {stated}: its metadata are damaged"
            )


def _require_fill(plist: h5py.h5p.PropDCID, itemsize: int, where: str) -> None:
    """Refuse a fill value of another size; HDF5 fills with what lies behind it in its memory."""
    nbytes = fill_nbytes(plist) if itemsize and _has_fill_value(plist) else None
    if nbytes not in (None, itemsize):
        raise ReadError(
            f"{where}: its fill value has {nbytes} bytes, and its elements have {itemsize}: its"
            " metadata are damaged"
        )


def _fill_value(
    plist: h5py.h5p.PropDCID,
    base: np.dtype[Any],
    extra: tuple[int, ...],
    *,
    whenever: bool = False,
) -> NDArray[Any]:
    """Return what HDF5 gives for values never written: zeros unless it may use a fill value.

    `whenever`: whatever the fill time; virtual datasets do not mind it.
    """
    fill = np.zeros((), base)
    if _has_fill_value(plist) and (whenever or _is_filled(plist)):
        if extra:
            raise NotDirectError("an array type with a fill value of its own")
        plist.get_fill_value(fill)
    return fill


def _member_fill(plist: h5py.h5p.PropDCID, dataset: h5py.Dataset, member: tuple[str, ...]) -> bytes:
    """Return the bytes of a member's fill value; none: zeros."""
    if not (_has_fill_value(plist) and _is_filled(plist)):
        return b""
    values: Any = np.zeros((), dataset.dtype)
    plist.get_fill_value(values)
    for name in member:
        values = values[name]
    return bytes(np.asarray(values).tobytes())


def _has_fill_value(plist: h5py.h5p.PropDCID) -> bool:
    return bool(plist.fill_value_defined() == h5py.h5d.FILL_VALUE_USER_DEFINED)


def _is_filled(plist: h5py.h5p.PropDCID) -> bool:
    known = h5py.h5d.FILL_TIME_ALLOC, h5py.h5d.FILL_TIME_IFSET, h5py.h5d.FILL_TIME_NEVER
    if plist.get_fill_time() not in known:
        raise NotDirectError(f"a fill time of {plist.get_fill_time()}, which HDF5 does not know")
    return bool(plist.get_fill_time() != h5py.h5d.FILL_TIME_NEVER)


def _has_no_values(plist: h5py.h5p.PropDCID, layout: DatasetLayout) -> bool:
    """Tell whether HDF5 will refuse to read at all."""
    undefined = plist.fill_value_defined() == h5py.h5d.FILL_VALUE_UNDEFINED
    chunks: ChunkTable | None = layout.chunks
    allocated = layout.offset >= 0 if chunks is None else chunks.offset.size > 0
    return undefined and not allocated


def _contiguous_offset(dataset: h5py.Dataset, where: str) -> int:
    try:
        offset = dataset.id.get_offset()
    except RuntimeError as error:
        raise ReadError(f"{where}: its address is not valid ({error})") from error
    if offset is None:
        return -1
    nbytes = dataset.id.get_storage_size()
    end = os.fstat(dataset.file.id.get_vfd_handle()).st_size
    wanted = math.prod(dataset.shape) * dataset.id.get_type().get_size()
    if nbytes < wanted:
        raise ReadError(f"{where}: {nbytes} bytes are allocated for {wanted} bytes of values")
    if offset + wanted > end:
        raise ReadError(
            f"{where}: its values end at byte {offset + wanted}, but the file has {end} bytes;"
            " it was cut short"
        )
    return int(offset)
