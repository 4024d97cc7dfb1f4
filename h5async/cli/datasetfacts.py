"""Tells how datasets are stored and read, for programs and for the table of `h5async inspect`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from rich.filesize import decimal

from h5async import H5AsyncError
from h5async.cli.options import spell_in_shell
from h5async.config.files import FileName
from h5async.core.binding import load_core
from h5async.errors import DatasetError
from h5async.index.cost import read_cost
from h5async.index.datasettable import kinds_of, table_of
from h5async.index.layout import DatasetLayout
from h5async.index.variablelength import VariableLength
from h5async.plan.cf import shown_value, unpacking
from h5async.read.executors import method_of
from h5async.spelling import printable
from h5async.system.interruptions import suppressing


@dataclass(frozen=True)
class Dataset:
    """One dataset, or several similar ones of the same name in several groups, merged.

    Attributes have the names and meanings of the keys in docs/command-line.md. Merged datasets have
    the shape of the smallest, sums of sizes, and means per sample.
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
    # The largest first dimension of several, and whether their chunks differ in shape.
    most_samples: int | None = None
    has_several_chunks: bool = False
    samples: int = 0

    @property
    def likeness(self) -> tuple[object, ...]:
        """What datasets that differ only in their numbers of samples and sizes have in common."""
        shape = None if self.shape is None else (len(self.shape), self.shape[1:])
        of_values = shape, self.dtype, self.layout, self.chunks is None, self.filters
        how = self.read, self.by, self.sources, self.reason, self.packing
        return *of_values, *how, self.kind, self.categories

    def merged(self, other: Dataset) -> Dataset:
        """Return the facts of two similar datasets: sums of sizes, and means per sample."""
        if self.shape is None or other.shape is None:
            return self
        samples = self.samples + other.samples
        lengths = [n for one in (self, other) for n in (one.shape or ())[:1]]
        lengths += [one.most_samples for one in (self, other) if one.most_samples is not None]
        several = self.has_several_chunks or other.has_several_chunks or self.chunks != other.chunks
        mean = None
        if self.mean_length is not None and other.mean_length is not None:
            mean = self._mean("mean_length", other, samples)
        return replace(
            self,
            shape=(min(lengths), *self.shape[1:]),
            most_samples=max(lengths),
            has_several_chunks=several,
            samples=samples,
            stored_nbytes=(self.stored_nbytes or 0) + (other.stored_nbytes or 0),
            nbytes=(self.nbytes or 0) + (other.nbytes or 0),
            in_order_nbytes=self._mean("in_order_nbytes", other, samples),
            shuffled_nbytes=self._mean("shuffled_nbytes", other, samples),
            mean_length=mean,
        )

    def _mean(self, name: str, other: Dataset, samples: int) -> float:
        total = sum((getattr(one, name) or 0.0) * one.samples for one in (self, other))
        return total / samples if samples else 0.0

    def cells(self, name: str) -> Sequence[str]:
        """Return the cells of its row, in the order of `COLUMNS`."""
        if self.shape is None:
            return name, *("-" for _ in range(9)), f"refused: {self.reason}"
        method = _direct_text(self.by, self.sources)
        if self.read == "h5py":
            method = f"h5py: {self.reason}"
        return (
            name,
            self._shape_text(self.shape),
            str(self.dtype),
            str(self.layout),
            "various" if self.has_several_chunks else str(self.chunks) if self.chunks else "-",
            "+".join(self.filters) or "-",
            decimal(self.stored_nbytes or 0),
            decimal(self.nbytes or 0),
            decimal(round(self.in_order_nbytes or 0)),
            decimal(round(self.shuffled_nbytes or 0)),
            "; ".join(filter(None, (method, self.packing, self._kind_text()))),
        )

    def _kind_text(self) -> str | None:
        """Say what it is read as, unless that is an array of equal rows."""
        mean = "" if self.mean_length is None else f", {self.mean_length:.4g} values each"
        return {
            "ragged": f"as Ragged{mean}",
            "sparse": f"as Csr{mean}",
            "categorical": f"as codes of {self.categories or 0:,} categories",
            "nullable": "as values and a mask",
        }.get(self.kind)

    def _shape_text(self, shape: tuple[int, ...]) -> str:
        extents = list(map(str, shape))
        if self.most_samples not in (None, *shape[:1]):
            extents[0] = f"{shape[0]} to {self.most_samples}"
        elif self.dimensions is None:
            return str(shape)
        names = self.dimensions or ("",) * len(extents)
        named = [f"{name} {extent}".lstrip() for name, extent in zip(names, extents, strict=True)]
        is_bare = len(shape) == 1 and self.dimensions is None
        return f"({', '.join(named)}{',' * is_bare})"


def dataset_of(path: str, file: FileName, found: DatasetLayout | H5AsyncError) -> Dataset:
    """Return the facts of a dataset, from its layout or the error that replaces it."""
    if isinstance(found, H5AsyncError):
        where = printable(f'{file}: dataset "{path}"')
        reason = found.spelled(spell_in_shell).removeprefix(where).lstrip(":, ")
        return Dataset(path, str(file), "refused", reason=reason)
    cost = read_cost(found)
    return replace(
        _stored(path, file, found, found.fallback_reason),
        nbytes=found.nbytes,
        in_order_nbytes=cost.in_order,
        shuffled_nbytes=cost.shuffled,
        dimensions=_dimensions_of(found),
        packing=_packing_text(found) or None,
    )


def _stored(path: str, file: FileName, found: DatasetLayout, reason: str | None) -> Dataset:
    by, sources = ((), 0) if reason is not None else methods_of(found)
    return Dataset(
        path,
        str(file),
        read="direct" if reason is None else "h5py",
        shape=found.shape,
        dtype=str(found.dtype),
        layout=found.storage,
        chunks=found.chunk_shape or None,
        filters=tuple(entry.label for entry in found.filters),
        stored_nbytes=found.stored_nbytes,
        by=by,
        sources=sources,
        reason=reason,
        samples=found.num_samples,
    )


def ragged_dataset(
    path: str, file: FileName, found: DatasetLayout, form: VariableLength, mean_length: float | None
) -> Dataset:
    """Return the facts of a dataset of variable length, from its references."""
    nbytes = None if mean_length is None else mean_length * form.dtype.itemsize
    return replace(
        _stored(path, file, found, None),
        dtype="text of any length" if form.is_text else f"{form.dtype} of any length",
        sources=1,
        kind="ragged",
        mean_length=mean_length,
        nbytes=None if nbytes is None else round(nbytes * found.num_samples),
        in_order_nbytes=nbytes,
        shuffled_nbytes=nbytes,
    )


def group_dataset(path: str, file: FileName, parts: Sequence[DatasetLayout], kind: str) -> Dataset:
    """Return the facts of a group that is read as one field.

    `parts` are the layouts of its datasets; the first one has the values.
    """
    first, costs = parts[0], [read_cost(part) for part in parts]
    reason = next((p.fallback_reason for p in parts if p.fallback_reason is not None), None)
    methods = {method for part in parts for method in methods_of(part)[0]}
    return replace(
        _stored(path, file, first, reason),
        shape=(first.sample_count,),
        layout="group",
        chunks=None,
        filters=tuple(dict.fromkeys(entry.label for part in parts for entry in part.filters)),
        stored_nbytes=sum(part.stored_nbytes for part in parts),
        nbytes=sum(part.nbytes for part in parts),
        by=tuple(sorted(methods)) if reason is None else (),
        sources=1,
        samples=first.sample_count,
        kind=kind,
        in_order_nbytes=sum(cost.in_order for cost in costs),
        shuffled_nbytes=sum(cost.shuffled for cost in costs),
    )


def sparse_dataset(
    path: str, file: FileName, parts: Sequence[DatasetLayout], shape: tuple[int, int]
) -> Dataset:
    """Return the facts of a sparse matrix."""
    mean = parts[0].num_samples / shape[0] if shape[0] else None
    length, costs = mean or 0.0, [read_cost(part) for part in parts]
    return replace(
        group_dataset(path, file, parts, "sparse"),
        shape=shape,
        samples=shape[0],
        mean_length=mean,
        in_order_nbytes=sum(cost.in_order for cost in costs) * length,
        # Shuffled rows read whole chunks.
        shuffled_nbytes=sum(max(cost.in_order * length, cost.shuffled) for cost in costs),
    )


def _dimensions_of(layout: DatasetLayout) -> tuple[str, ...] | None:
    """Return the names of dimensions, empty for unnamed ones; None if all are unnamed."""
    if not any(layout.dim_names):
        return None
    names = [*layout.dim_names, *((),) * (len(layout.shape) - len(layout.dim_names))]
    return tuple(map("/".join, names))


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
    if load_core() is None:
        return "h5py: the compiled core is missing"
    if layout.fallback_reason is not None:
        return f"h5py: {layout.fallback_reason}"
    return _direct_text(*methods_of(layout))


def methods_of(layout: DatasetLayout) -> tuple[tuple[str, ...], int]:
    """Return what reads a dataset directly, and the number of datasets that hold its values."""
    columns = table_of(layout)[1].columns
    sources = len(set(zip(columns.file.tolist(), columns.paths, strict=True)))
    methods = {method_of(source) for source, _ in kinds_of(layout)}
    return tuple(sorted(methods)), sources


def _direct_text(methods: Collection[str], sources: int) -> str:
    if set(methods) == {"h5py"}:
        return "h5py: the core does not read its storage"
    by = ", by the core" if set(methods) == {"core"} else ", partly by h5py" * ("h5py" in methods)
    return f"direct{by}, from {sources} sources" if sources > 1 else f"direct{by}"
