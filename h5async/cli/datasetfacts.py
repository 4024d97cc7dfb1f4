"""Tells how datasets are stored and read, for programs and for the table of `h5async inspect`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from statistics import fmean
from typing import Any

import numpy as np
from rich.filesize import decimal

from h5async.cli.options import spell_in_shell
from h5async.config import ReaderConfig
from h5async.config.files import FileName
from h5async.core.binding import load_core
from h5async.errors import DatasetError, H5AsyncError
from h5async.index.datasettable import kinds_of, table_of
from h5async.index.groupfields import column, sparse_group
from h5async.index.layout import DatasetLayout, values_of
from h5async.index.links import Reach, components, open_index
from h5async.index.metadata import list_layouts, references
from h5async.index.savedindex import NamedIndex, Wanted
from h5async.index.tables import Int64s, repetitions
from h5async.io.stores import far_names
from h5async.observe.chunkuse import read_cost
from h5async.observe.stats import MOST_RATE
from h5async.opening.filevalues import heap_layout
from h5async.order.selection import permute
from h5async.order.window import window_order
from h5async.plan.cf import shown_value, unpacking
from h5async.plan.records import ByteRanges, extents_of, requests_of
from h5async.read.executors import method_of
from h5async.samples.fieldkind import (
    AUDIO,
    CATEGORIES,
    IMAGE,
    NULLABLE,
    ROWS,
    SHAPE,
    TEXTS,
)
from h5async.spelling import printable
from h5async.system.interruptions import suppressing

_MOST_REFERENCES = 64 << 20  # bytes to read for the mean length of samples
_MOST_SAMPLES = 1 << 16  # for which requests are computed
_FEWER = 2.0  # times: the saving from which the window is recommended
_SMALL_NBYTES = 256 * 1024  # of a request, below which the rate of requests is the limit
# By the kind of a group in a saved index: the names and the kind of the datasets it needs.
_PARTS = {
    SHAPE: (("data", "indices"), ROWS),
    CATEGORIES: (("codes",), ""),
    NULLABLE: (("values", "mask"), ""),
}


@dataclass(frozen=True)
class Requests:
    """Requests per sample, and their bytes."""

    count: float
    nbytes: float

    def __str__(self) -> str:
        return f"{self.count:.3g} requests of {decimal(round(self.nbytes / (self.count or 1)))}"


@dataclass(frozen=True)
class FarCost:
    """The cost of a sample by the order of samples: as in the file, fully shuffled, or in a window.

    `batch_size` is the one assumed; it `reads` single "rows" or whole "chunks".
    """

    in_order: Requests
    full: Requests
    window: Requests
    batch_size: int
    reads: str

    def __str__(self) -> str:
        most = MOST_RATE / (self.full.count or 1)
        parts = [
            f"in order {self.in_order}; shuffled {self.full}; in a window {self.window}",
            f"S3 (some {MOST_RATE:,} GETs a second for a prefix) permits {most:,.0f} samples a"
            " second shuffled",
        ]
        if self.full.count > _FEWER * self.window.count:
            parts.append(f"shuffle=window needs {self.full.count / self.window.count:.0f}x fewer")
        if self.window.nbytes < _SMALL_NBYTES * self.window.count:
            larger = "larger" if self.reads == "chunks" else "compressed"
            of = "" if self.reads == "chunks" else " of several rows, with shuffle=window,"
            parts.append(f"{larger} chunks{of} would need fewer")
        return "; ".join(parts)


@dataclass(frozen=True)
class Dataset:
    """A dataset, or a group that is read as one field.

    Attributes have the names and meanings of the keys in docs/command-line.md, except `samples`,
    their number.
    """

    path: str
    file: str
    read: str
    shape: tuple[int, ...] | None = None
    dtype: str | None = None
    layout: str | None = None
    chunks: tuple[int, ...] | None = None
    filters: tuple[str, ...] = ()
    stored_nbytes: int | None = None
    nbytes: int | None = None
    in_order_nbytes: float | None = None
    shuffled_nbytes: float | None = None
    by: tuple[str, ...] = ()
    sources: int = 0
    reason: str | None = None
    dimensions: tuple[str, ...] | None = None
    packing: str | None = None
    kind: str = "dataset"
    mean_length: float | None = None
    categories: int | None = None
    samples: int = 0
    requests: FarCost | None = None

    @property
    def likeness(self) -> tuple[object, ...]:
        """A key that is the same for datasets that differ only in numbers of samples and sizes."""
        shape = None if self.shape is None else (len(self.shape), self.shape[1:])
        of_values = shape, self.dtype, self.layout, self.chunks is None, self.filters
        how = self.read, self.by, self.sources, self.reason, self.packing
        return *of_values, *how, self.kind, self.categories


def cells(name: str, several: Sequence[Dataset]) -> Sequence[str]:
    """Return the row of the table, in the order of `COLUMNS`, for one or several similar datasets.

    For several, it has their range of samples, sums of sizes, and means per sample.
    """
    first = several[0]
    if first.shape is None:
        return name, *("-" for _ in range(9)), f"refused: {first.reason}"
    chunks = {one.chunks for one in several}
    method = _direct_text(first.by, first.sources)
    if first.read == "h5py":
        method = f"h5py: {first.reason}"
    return (
        name,
        _shape_text(first, [one.shape[0] for one in several if one.shape]),
        str(first.dtype),
        str(first.layout),
        "various" if len(chunks) > 1 else str(first.chunks) if first.chunks else "-",
        "+".join(first.filters) or "-",
        decimal(sum(one.stored_nbytes or 0 for one in several)),
        decimal(sum(one.nbytes or 0 for one in several)),
        decimal(round(_mean("in_order_nbytes", several) or 0)),
        decimal(round(_mean("shuffled_nbytes", several) or 0)),
        "; ".join(filter(None, (method, first.packing, _kind_text(several)))),
    )


def _mean(name: str, several: Sequence[Dataset]) -> float | None:
    """Return the mean of a fact over all samples; None if one dataset does not have it."""
    values, samples = [getattr(one, name) for one in several], [one.samples for one in several]
    return None if None in values else fmean(values, samples if any(samples) else None)


def _kind_text(several: Sequence[Dataset]) -> str | None:
    """Say what datasets are read as, unless that is an array of equal rows."""
    mean = _mean("mean_length", several)
    each = "" if mean is None else f", {mean:.4g} values each"
    return {
        "ragged": f"as Ragged{each}",
        "sparse": f"as Csr{each}",
        "categorical": f"as codes of {several[0].categories or 0:,} categories",
        "nullable": "as values and a mask",
    }.get(several[0].kind)


def _shape_text(dataset: Dataset, lengths: Sequence[int]) -> str:
    least, most = min(lengths), max(lengths)
    extents = [str(least) if least == most else f"{least} to {most}"]
    extents += map(str, (dataset.shape or ())[1:])
    names = dataset.dimensions or ("",) * len(extents)
    named = [f"{name} {extent}".lstrip() for name, extent in zip(names, extents, strict=True)]
    return f"({', '.join(named)}{',' * (len(named) == 1 and dataset.dimensions is None)})"


def _dataset_of(path: str, file: FileName, found: DatasetLayout | H5AsyncError) -> Dataset:
    """Return the facts of a dataset, from its layout or the error that replaces it."""
    if isinstance(found, H5AsyncError):
        where = printable(f'{file}: dataset "{path}"')
        reason = found.spelled(spell_in_shell).removeprefix(where).lstrip(":, ")
        return Dataset(path, str(file), "refused", reason=reason)
    dimensions = None
    if any(found.dim_names):
        names = [*found.dim_names, *((),) * (len(found.shape) - len(found.dim_names))]
        dimensions = tuple(map("/".join, names))
    return _facts(path, file, [found], dimensions=dimensions, packing=_packing_text(found) or None)


def _facts(path: str, file: FileName, parts: Sequence[DatasetLayout], **others: Any) -> Dataset:
    """Return the facts of datasets that are read as one; the first holds the values."""
    first, costs = parts[0], [read_cost(part) for part in parts]
    reason = next((p.fallback_reason for p in parts if p.fallback_reason is not None), None)
    methods = {method for part in parts for method in methods_of(part)[0]}
    found = Dataset(
        path,
        str(file),
        read="direct" if reason is None else "h5py",
        shape=first.shape,
        dtype=str(first.dtype),
        layout=first.storage,
        chunks=first.chunk_shape or None,
        filters=tuple(dict.fromkeys(entry.label for part in parts for entry in part.filters)),
        stored_nbytes=sum(part.stored_nbytes for part in parts),
        nbytes=sum(part.nbytes for part in parts),
        in_order_nbytes=sum(cost.in_order for cost in costs),
        shuffled_nbytes=sum(cost.shuffled for cost in costs),
        by=tuple(sorted(methods)) if reason is None else (),
        sources=methods_of(first)[1] if reason is None else 0,
        reason=reason,
        samples=first.num_samples,
        requests=far_cost(first) if far_names([file]) and len(parts) == 1 else None,
    )
    return replace(found, **others)


def _ragged_in_index(path: str, file: FileName, found: DatasetLayout) -> Dataset:
    """Return the facts of a ragged dataset from its layout, which only a saved index has."""
    facts = _dataset_of(path, file, found)
    mean = found.num_samples / found.sample_count if found.sample_count else None
    in_order, shuffled = facts.in_order_nbytes or 0.0, facts.shuffled_nbytes or 0.0
    if found.heaps:  # only its values are read
        in_order = shuffled = found.row_nbytes
    is_text = any(heap.elements.form.is_text for heap in found.heaps)
    return replace(
        facts,
        shape=(found.sample_count,),
        samples=found.sample_count,
        dtype="text of any length" if is_text else f"{found.dtype} of any length",
        kind="ragged",
        mean_length=mean,
        in_order_nbytes=in_order * (mean or 0),
        shuffled_nbytes=max(shuffled, in_order * (mean or 0)),
    )


def _group_dataset(
    path: str, file: FileName, parts: Sequence[DatasetLayout], kind: str, **others: Any
) -> Dataset:
    """Return the facts of a group that is read as one field of a kind.

    `parts` are the layouts of its datasets; the first one has the values.
    """
    count = parts[0].sample_count
    group = {"layout": "group", "chunks": None, "sources": 1, "shape": (count,), "samples": count}
    return _facts(path, file, parts, **(group | others), kind=kind)


def _sparse_dataset(
    path: str, file: FileName, parts: Sequence[DatasetLayout], shape: tuple[int, int]
) -> Dataset:
    mean = parts[0].num_samples / shape[0] if shape[0] else None
    costs = [(cost.in_order * (mean or 0.0), cost.shuffled) for cost in map(read_cost, parts)]
    return _group_dataset(
        path,
        file,
        parts,
        "sparse",
        shape=shape,
        samples=shape[0],
        mean_length=mean,
        in_order_nbytes=sum(in_order for in_order, _ in costs),
        shuffled_nbytes=sum(map(max, costs)),  # shuffled rows read whole chunks
    )


def _packing_text(layout: DatasetLayout) -> str:
    """Say how the values of a dataset are packed; "" if they are neither packed nor missing."""
    attributes = [one for _, several in layout.cf for one in several]
    if layout.member or layout.dtype.kind not in "iuf":
        return ""
    with suppressing(DatasetError):  # raised by `decode_cf`
        if unpacking(attributes, layout.dtype, "").is_identity(layout.dtype):
            return ""
    listed = ", ".join(f"{one.name} {shown_value(one)}" for one in attributes)
    if {"scale_factor", "add_offset", "_Unsigned"}.isdisjoint(one.name for one in attributes):
        return f"missing values: {listed}; decode_cf=True makes them NaN"
    return f"packed: {listed}; decode_cf=True unpacks it"


def method_text(layout: DatasetLayout) -> str:
    """Say how a dataset is read: directly and by what, or through h5py and why."""
    if layout.fallback_reason is not None and load_core() is not None:
        return f"h5py: {layout.fallback_reason}"
    return _direct_text(*methods_of(layout))


def methods_of(layout: DatasetLayout) -> tuple[tuple[str, ...], int]:
    """Return what reads a dataset directly, and the number of datasets that hold its values."""
    columns = table_of(layout)[1].columns
    sources = len(set(zip(columns.file.tolist(), columns.paths, strict=True)))
    methods = {method_of(source, layout) for source, _ in kinds_of(layout)}
    return tuple(sorted(methods)), sources


def _direct_text(methods: Collection[str], sources: int) -> str:
    if load_core() is None:
        return "h5py: the compiled core is missing"
    if set(methods) == {"h5py"}:
        return "h5py: the core does not read its storage"
    by = ", by the core" if set(methods) == {"core"} else ", partly by h5py" * ("h5py" in methods)
    return f"direct{by}, from {sources} sources" if sources > 1 else f"direct{by}"


def listed(path: FileName, reach: Reach, patterns: Sequence[str]) -> Iterator[Dataset]:
    """Yield the datasets of a file that match `patterns`, each as it is found."""
    wanted = partial(is_meant, patterns=patterns)
    for name, found in list_layouts(path, reach, wanted=wanted, with_attributes=True):
        ragged = group = None
        if isinstance(found, DatasetError):
            with suppressing(H5AsyncError):
                ragged = _ragged(name, path, reach)
        yield ragged or _dataset_of(name, path, found)
        with suppressing(H5AsyncError):  # its datasets are listed anyway
            group = _group(name, path, reach)
        if group is not None:
            yield group


def _ragged(name: str, path: FileName, reach: Reach) -> Dataset:
    """Return the facts of a dataset of variable length, from its references."""
    found, forms = references(path, name, reach)
    form, count = forms[found.file], found.num_samples
    mean = nbytes = None
    if found.nbytes <= _MOST_REFERENCES and count:
        mean = heap_layout(name, path, reach).num_samples / count
        nbytes = mean * form.dtype.itemsize
    return _facts(
        name,
        path,
        [found],
        dtype="text of any length" if form.is_text else f"{form.dtype} of any length",
        sources=1,
        kind="ragged",
        mean_length=mean,
        nbytes=None if nbytes is None else round(nbytes * count),
        in_order_nbytes=nbytes,
        shuffled_nbytes=nbytes,
    )


def _group(name: str, path: FileName, reach: Reach) -> Dataset | None:
    """Return the group whose last member is this dataset, if it is read as one field."""
    parent, _, member = name.rpartition("/")
    if member == "indptr":
        with open_index(path) as file:
            matrix = sparse_group(file, parent, reach)
        if matrix is not None:
            return _sparse_dataset(parent, path, (matrix.data, matrix.indices), matrix.shape)
    if member in ("codes", "values"):
        with open_index(path) as file:
            found = column(file, parent, reach)
        if found is not None and found.mask is not None:
            return _group_dataset(parent, path, (found.values, found.mask), "nullable")
        if found is not None and found.categories is not None:
            names = found.categories
            count = names.num_samples if isinstance(names, DatasetLayout) else len(names)
            return _group_dataset(parent, path, (found.values,), "categorical", categories=count)
    return None


def listed_in_index(index: NamedIndex, patterns: Sequence[str]) -> Iterator[Dataset]:
    """Yield the datasets of the files of a saved index that match `patterns`."""
    for number, file in enumerate(index.paths):
        layouts = index.find(number, index.datasets(number))
        for wanted in index.datasets(number):
            if wanted in layouts and is_meant(wanted.path, patterns):
                yield from _known(wanted, layouts, file)


def _known(
    wanted: Wanted, layouts: Mapping[Wanted, DatasetLayout], file: FileName
) -> Iterator[Dataset]:
    """Yield the facts of an index's entry, unless it is part of something else."""
    layout, kind, path = layouts[wanted], wanted.kind, wanted.path
    if kind in _PARTS:
        names, kind_of_parts = _PARTS[kind]
        keys = [Wanted.at(f"{path}/{name}")._replace(kind=kind_of_parts) for name in names]
        parts = [layouts[key] for key in keys if key in layouts]
        if len(parts) < len(keys):
            return
        if kind == SHAPE:
            rows, columns, *_ = values_of(layout).tolist()
            yield _sparse_dataset(path, file, parts, (rows, columns))
        elif kind == NULLABLE:
            yield _group_dataset(path, file, parts, "nullable")
        else:
            yield _group_dataset(path, file, parts, "categorical", categories=layout.sample_count)
    elif kind not in (ROWS, TEXTS, IMAGE, AUDIO):
        of_path = _ragged_in_index if layout.is_ragged else _dataset_of
        yield of_path(path, file, layout)


def is_meant(path: str, patterns: Sequence[str]) -> bool:
    """Tell whether a pattern matches a dataset's path, or a group around it, as in a shell.

    ``**`` matches any number of names; characters of patterns also match themselves.
    """
    names = components(path)
    return not patterns or any(_begins(names, components(pattern)) for pattern in patterns)


def _begins(names: Sequence[str], pattern: Sequence[str]) -> bool:
    if not pattern:
        return True
    if pattern[0] == "**":
        return any(_begins(names[at:], pattern[1:]) for at in range(len(names) + 1))
    if not names:
        return False
    is_same = names[0] == pattern[0] or fnmatchcase(names[0], pattern[0])
    return is_same and _begins(names[1:], pattern[1:])


# --- requests to an object store ------------------------------------------------------------------


def far_cost(layout: DatasetLayout) -> FarCost | None:
    """Return the cost of a dataset in a store; None unless the core reads its rows as stored."""
    is_plain = layout.segments is None and layout.values is None and layout.fallback_reason is None
    if not is_plain or layout.is_ragged or layout.sample_axis or not layout.num_samples:
        return None
    if layout.chunks is None and layout.offset < 0:
        return None
    fields, count = ReaderConfig.model_fields, layout.num_samples
    batch, ranges_of = fields["batch_size"].default, _ranges(layout)
    window = window_order([layout], fields["window_bytes"].default, 0, batch)
    orders: list[tuple[Callable[..., Int64s], bool]] = [
        (np.arange, True),
        # (Before a chunk is needed again, others have replaced it.)
        (lambda start, stop: permute(np.arange(start, stop), count, 0, 0), False),
        (partial(window.samples, 0), True),
    ]
    a, b, c = (_requests(ranges_of, order, count, batch, keeps=keeps) for order, keeps in orders)
    reads = "chunks" if layout.filters and layout.chunks is not None else "rows"
    return FarCost(a, b, c, batch, reads)


def _requests(
    ranges_of: Callable[[Int64s], ByteRanges],
    order: Callable[[int, int], Int64s],
    count: int,
    batch: int,
    *,
    keeps: bool,
) -> Requests:
    first = (count - min(count, _MOST_SAMPLES)) // 2
    stop = min(count, first + _MOST_SAMPLES)
    before = ranges_of(order(max(0, first - _MOST_SAMPLES), first)).begins if keeps else ()
    seen, requests, nbytes = set(np.asarray(before).tolist()), 0, 0
    for start in range(first, stop, batch):
        ranges = ranges_of(order(start, min(stop, start + batch)))
        if keeps:
            ranges = ranges.chosen(np.array([y not in seen for y in ranges.begins.tolist()], bool))
            seen.update(ranges.begins.tolist())
        found = extents_of(ranges, requests_of(ranges))
        requests, nbytes = requests + found.size, nbytes + found.nbytes
    return Requests(requests / (stop - first), nbytes / (stop - first))


def _ranges(layout: DatasetLayout) -> Callable[[Int64s], ByteRanges]:
    """Return a function from samples to the bytes read for them: rows, or encoded chunks."""
    chunks, rows = layout.chunks, layout.chunk_shape[0] if layout.chunk_shape else 1
    unit = None if chunks is None else np.unravel_index(chunks.numbers, layout.grid)[0]  # ascending

    def of(samples: Int64s) -> ByteRanges:
        if chunks is None or unit is None:
            begins = (layout.offset + samples * layout.row_nbytes).astype(np.int64)
            return ByteRanges.of(begins, begins + layout.row_nbytes)
        wanted = np.unique(samples // rows) if layout.filters else samples // rows
        begin, end = (np.searchsorted(unit, wanted, side) for side in ("left", "right"))
        of_wanted, which = repetitions(end - begin)
        which += begin[of_wanted]
        begins, size = chunks.offset[which].astype(np.int64), layout.chunk_nbytes // rows
        if layout.filters:
            return ByteRanges.of(begins, begins + chunks.nbytes[which])
        begins += samples[of_wanted] % rows * size
        return ByteRanges.of(begins, begins + size)

    return of
