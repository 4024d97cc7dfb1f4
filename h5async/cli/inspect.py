"""`h5async inspect`: lists the datasets of a file, how each is stored and read, and its cost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.filesize import decimal

from h5async import DatasetError, H5AsyncError, ReaderConfig
from h5async.cli.listing import COLUMNS, Listing
from h5async.cli.options import takes_options
from h5async.cli.text import method_text, packing_text, safe, shape_text
from h5async.config.files import INDEX_SUFFIX
from h5async.index.cost import read_cost
from h5async.index.layout import DatasetLayout
from h5async.index.links import Reach
from h5async.index.metadata import list_layouts
from h5async.index.references import references
from h5async.index.savedindex import NamedIndex
from h5async.names import printable

_LEGEND = "in order, shuffled: bytes read from the file for each sample used"


@takes_options(["allow_external", "allow_missing"])
def inspect(
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="The HDF5 file, or a saved index (.h5idx).")
    ],
    **typed: Any,
) -> None:
    """List the datasets of FILE, how each is stored and read, and what a sample costs."""
    given = {name: value for name, value in typed.items() if value is not None}
    config = ReaderConfig.load({"hdf5_path": file}, **given)
    path, reach = Path(file), Reach(config.allow_external, config.allow_missing)
    listing = Listing()
    for name, found in _datasets(path, reach):
        cells = _cells(path, name, found)
        if isinstance(found, DatasetError) and path.suffix != INDEX_SUFFIX:
            cells = _ragged_cells(path, name, reach) or cells
        listing.add(tuple(safe(cell) for cell in cells))
    listing.print()
    typer.echo(f"\n{_LEGEND}" if listing.has_begun else f"{safe(path)} holds no datasets")


def _datasets(path: Path, reach: Reach) -> Iterator[tuple[str, DatasetLayout | H5AsyncError]]:
    """Yield the names of datasets, with their files where there are several, and their layouts."""
    if path.suffix != INDEX_SUFFIX:
        yield from list_layouts(path, reach, with_attributes=True)
        return
    index = NamedIndex(path, reach)
    for number, file in enumerate(index.paths):
        prefix = f"{file}: " if len(index.paths) > 1 else ""
        for wanted, layout in index.find(number, index.datasets(number), reach).items():
            yield prefix + wanted.path, layout


def _cells(file: Path, name: str, found: DatasetLayout | H5AsyncError) -> Sequence[str]:
    """Return the cells of a dataset's row, in the order of `COLUMNS`."""
    if isinstance(found, H5AsyncError):
        reason = str(found).removeprefix(printable(f'{file}: dataset "{name}"')).lstrip(":, ")
        return name, *("-" for _ in COLUMNS[2:]), f"refused: {reason}"
    cost = read_cost(found)
    return (
        name,
        shape_text(found),
        str(found.dtype),
        found.storage,
        str(found.chunk_shape) if found.chunk_shape else "-",
        "+".join(entry.label for entry in found.filters) or "-",
        decimal(found.stored_nbytes),
        decimal(found.nbytes),
        decimal(round(cost.in_order)),
        decimal(round(cost.shuffled)),
        "; ".join(filter(None, (method_text(found), packing_text(found)))),
    )


def _ragged_cells(file: Path, name: str, reach: Reach) -> Sequence[str] | None:
    """Return the cells of a dataset of variable length; None: it is none that can be read."""
    try:
        layout, form = references(file, name, reach)
    except H5AsyncError:
        return None
    return (
        name,
        shape_text(layout),
        "text of any length" if form.is_text else f"{form.dtype} of any length",
        layout.storage,
        str(layout.chunk_shape) if layout.chunk_shape else "-",
        "+".join(entry.label for entry in layout.filters) or "-",
        decimal(layout.stored_nbytes),
        "-",  # what they decode to, only their references say
        "-",
        "-",
        "direct, as Ragged",
    )
