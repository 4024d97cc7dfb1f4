"""Collects the facts that `h5async inspect` shows of a dataset, for programs and a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rich.filesize import decimal

from h5async import H5AsyncError
from h5async.cli.options import spell_in_shell
from h5async.cli.text import dimensions_of, direct_text, methods_of, packing_text
from h5async.config.files import FileName
from h5async.index.cost import read_cost
from h5async.index.layout import DatasetLayout
from h5async.index.variablelength import VariableLength
from h5async.names import printable


@dataclass(frozen=True)
class Dataset:
    """One dataset, or several similar ones of the same name in several groups, merged.

    Attributes
    ----------
    path, file
        Its path, and the file that holds it.
    shape, dtype, layout, chunks, filters
        As in HDF5; `chunks` is None if there are none. Merged ones show the first.
    stored_nbytes, nbytes
        Size in the file, and decoded.
    in_order_nbytes, shuffled_nbytes
        Bytes read from the file per sample used.
    read
        ``"direct"``, ``"h5py"``, or ``"refused"``.
    by
        If read directly: ``"core"`` or ``"memory"``, or both.
    sources
        Number of other datasets that hold its values.
    reason
        Why it is not read directly, or refused.
    dimensions
        The names of the dimensions, empty for unnamed ones; None if all are unnamed.
    packing
        How its values are packed, in words; None if they are not.
    kind
        What it can be read as: ``"dataset"``, ``"ragged"``; for groups, ``"sparse"``,
        ``"categorical"`` and ``"nullable"``.
    mean_length
        Mean number of values of ragged and sparse samples; None if not counted.
    categories
        Number of categories of a categorical column.
    most_samples, has_several_chunks
        For merged ones: the largest first dimension, and whether chunk shapes differ.
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
    most_samples: int | None = None
    has_several_chunks: bool = False
    samples: int = 0

    def is_like(self, other: Dataset) -> bool:
        """Tell whether two datasets differ only in their numbers of samples and sizes."""
        return self._kind() == other._kind()

    def _kind(self) -> tuple[object, ...]:
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
            mean_length=None
            if self.mean_length is None or other.mean_length is None
            else self._mean("mean_length", other, samples),
        )

    def _mean(self, name: str, other: Dataset, samples: int) -> float:
        total = sum((getattr(one, name) or 0.0) * one.samples for one in (self, other))
        return total / samples if samples else 0.0

    def cells(self, name: str) -> Sequence[str]:
        """Return the cells of its row, in the order of `listing.COLUMNS`."""
        if self.shape is None:
            return name, *("-" for _ in range(9)), f"refused: {self.reason}"
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
            "; ".join(filter(None, (self._method_text(), self.packing, self._kind_text()))),
        )

    def _kind_text(self) -> str | None:
        """Say what it is read as, unless that is an array of equal rows."""
        mean = "" if self.mean_length is None else f", {self.mean_length:.4g} values each"
        match self.kind:
            case "ragged":
                return f"as Ragged{mean}"
            case "sparse":
                return f"as Csr{mean}"
            case "categorical":
                return f"as codes of {self.categories:,} categories"
            case "nullable":
                return "as values and a mask"
        return None

    def _method_text(self) -> str:
        if self.read == "h5py":
            return f"h5py: {self.reason}"
        return direct_text(self.by, self.sources)

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
    by, sources = ((), 0) if found.fallback_reason is not None else methods_of(found)
    return Dataset(
        path,
        str(file),
        read="direct" if found.fallback_reason is None else "h5py",
        shape=found.shape,
        dtype=str(found.dtype),
        layout=found.storage,
        chunks=found.chunk_shape or None,
        filters=tuple(entry.label for entry in found.filters),
        stored_nbytes=found.stored_nbytes,
        nbytes=found.nbytes,
        in_order_nbytes=cost.in_order,
        shuffled_nbytes=cost.shuffled,
        by=by,
        sources=sources,
        reason=found.fallback_reason,
        samples=found.num_samples,
        dimensions=dimensions_of(found),
        packing=packing_text(found) or None,
    )


def ragged_dataset(
    path: str, file: FileName, found: DatasetLayout, form: VariableLength, mean_length: float | None
) -> Dataset:
    """Return the facts of a dataset of variable length, from its references."""
    nbytes = None if mean_length is None else mean_length * form.dtype.itemsize
    return Dataset(
        path,
        str(file),
        read="direct",
        shape=found.shape,
        dtype="text of any length" if form.is_text else f"{form.dtype} of any length",
        layout=found.storage,
        chunks=found.chunk_shape or None,
        filters=tuple(entry.label for entry in found.filters),
        stored_nbytes=found.stored_nbytes,
        by=methods_of(found)[0],
        sources=1,
        samples=found.num_samples,
        kind="ragged",
        mean_length=mean_length,
        nbytes=None if nbytes is None else round(nbytes * found.num_samples),
        in_order_nbytes=nbytes,
        shuffled_nbytes=nbytes,
    )


def group_dataset(path: str, file: FileName, parts: Sequence[DatasetLayout], kind: str) -> Dataset:
    """Return the facts of a group that is read as one field.

    `parts` are the layouts of its datasets; the first one has the values. `kind` is as in
    `Dataset`.
    """
    first, costs = parts[0], [read_cost(part) for part in parts]
    methods = {method for part in parts for method in methods_of(part)[0]}
    reason = next((p.fallback_reason for p in parts if p.fallback_reason is not None), None)
    return Dataset(
        path,
        str(file),
        read="direct" if reason is None else "h5py",
        reason=reason,
        shape=(first.sample_count,),
        dtype=str(first.dtype),
        layout="group",
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
    found = group_dataset(path, file, parts, "sparse")
    mean = parts[0].num_samples / shape[0] if shape[0] else None
    in_order, shuffled = _costs(parts, mean or 0.0)
    return replace(
        found,
        shape=shape,
        samples=shape[0],
        mean_length=mean,
        in_order_nbytes=in_order,
        shuffled_nbytes=shuffled,
    )


def _costs(parts: Sequence[DatasetLayout], length: float) -> tuple[float, float]:
    """Return the cost of a row of `length` values; shuffled rows read whole chunks."""
    costs = [read_cost(part) for part in parts]
    in_order = sum(cost.in_order for cost in costs) * length
    return in_order, sum(max(cost.in_order * length, cost.shuffled) for cost in costs)
