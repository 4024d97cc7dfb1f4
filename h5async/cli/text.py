"""Makes text that is safe to print: of names in files, of paths, and of how a dataset is read."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from h5async.core.binding import load_core
from h5async.index.layout import DatasetLayout
from h5async.names import printable
from h5async.read.executors import method_of


def safe(text: object) -> str:
    """Escape the characters by which a name in a file could steer the terminal."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in printable(str(text)))


def files_text(paths: Sequence[Path]) -> str:
    """Name one file, or the first and the last of several."""
    first, last = str(paths[0]), str(paths[-1])
    return first if len(paths) == 1 else f"{len(paths)} files, {first} to {last}"


def method_text(layout: DatasetLayout) -> str:
    """Say how a dataset is read: directly, and by what, or through h5py, and why."""
    if layout.fallback_reason is not None:
        return f"h5py: {layout.fallback_reason}"
    return direct_text(*methods_of(layout))


def methods_of(layout: DatasetLayout) -> tuple[tuple[str, ...], int]:
    """Return by what a dataset is read directly, and how many datasets its values lie in."""
    methods = {method_of(load_core(), source) for source in layout.leaves()}
    sources = len({(source.file, source.path) for source in layout.leaves()})
    return tuple(sorted(methods)), sources


def direct_text(methods: Collection[str], sources: int) -> str:
    """Say by what a dataset is read directly, and out of how many."""
    by = ", by the core" if set(methods) == {"core"} else ", in Python" * ("python" in methods)
    return f"direct{by}, from {sources} sources" if sources > 1 else f"direct{by}"
