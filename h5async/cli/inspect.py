"""`h5async inspect`: lists the datasets of a file, how each is stored and read, and its cost."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.filesize import decimal

from h5async import H5AsyncError
from h5async.cli.listing import COLUMNS, Listing
from h5async.cli.options import takes_options
from h5async.cli.text import method_text, safe
from h5async.index.cost import read_cost
from h5async.index.layout import DatasetLayout
from h5async.index.links import Reach
from h5async.index.metadata import list_layouts
from h5async.names import printable

_LEGEND = "in order, shuffled: bytes read from the file for each sample used"


@takes_options(["allow_external", "allow_missing"])
def inspect(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The HDF5 file.")], **typed: Any
) -> None:
    """List the datasets of FILE, how each is stored and read, and what a sample costs."""
    reach = Reach(tuple(typed["allow_external"] or ()), bool(typed["allow_missing"]))
    listing = Listing()
    for name, found in list_layouts(file, reach):
        listing.add(tuple(safe(cell) for cell in _cells(file, name, found)))
    listing.print()
    typer.echo(f"\n{_LEGEND}" if listing.has_begun else f"{safe(file)} holds no datasets")


def _cells(file: Path, name: str, found: DatasetLayout | H5AsyncError) -> Sequence[str]:
    """Return the cells of a dataset's row, in the order of `COLUMNS`."""
    if isinstance(found, H5AsyncError):
        reason = str(found).removeprefix(printable(f'{file}: dataset "{name}"')).lstrip(":, ")
        return name, *("-" for _ in COLUMNS[2:]), f"refused: {reason}"
    cost = read_cost(found)
    return (
        name,
        str(found.shape),
        str(found.dtype),
        found.storage,
        str(found.chunk_shape) if found.chunk_shape else "-",
        "+".join(entry.label for entry in found.filters) or "-",
        decimal(found.stored_nbytes),
        decimal(found.nbytes),
        decimal(round(cost.in_order)),
        decimal(round(cost.shuffled)),
        method_text(found),
    )
