"""Makes text that is safe to print: names in files, paths, and how a dataset is read."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from h5async.config.files import FileName
from h5async.core.binding import load_core
from h5async.errors import DatasetError
from h5async.index.datasettable import kinds_of, table_of
from h5async.index.layout import DatasetLayout
from h5async.names import printable
from h5async.plan.cf import shown_value, unpacking
from h5async.read.executors import method_of
from h5async.system.interruptions import suppressing


def safe(text: object) -> str:
    """Escape characters in names that could control the terminal."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in printable(str(text)))


def files_text(paths: Sequence[FileName]) -> str:
    """Name one file, or the first and the last of several."""
    first, last = str(paths[0]), str(paths[-1])
    return first if len(paths) == 1 else f"{len(paths)} files, {first} to {last}"


def dimensions_of(layout: DatasetLayout) -> tuple[str, ...] | None:
    """Return the names of dimensions, empty for unnamed ones; None if all are unnamed."""
    if not any(layout.dim_names):
        return None
    names = [*layout.dim_names, *((),) * (len(layout.shape) - len(layout.dim_names))]
    return tuple(map("/".join, names))


def packing_text(layout: DatasetLayout) -> str:
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
    return direct_text(*methods_of(layout))


def methods_of(layout: DatasetLayout) -> tuple[tuple[str, ...], int]:
    """Return what reads a dataset directly, and the number of datasets that hold its values."""
    columns = table_of(layout)[1].columns
    sources = len(set(zip(columns.file.tolist(), columns.paths, strict=True)))
    methods = {method_of(load_core(), source) for source, _ in kinds_of(layout)}
    return tuple(sorted(methods)), sources


def direct_text(methods: Collection[str], sources: int) -> str:
    """Say what reads a dataset directly, and from how many sources."""
    if set(methods) == {"h5py"}:
        return "h5py: the core does not read its storage"
    by = ", by the core" if set(methods) == {"core"} else ", partly by h5py" * ("h5py" in methods)
    return f"direct{by}, from {sources} sources" if sources > 1 else f"direct{by}"
