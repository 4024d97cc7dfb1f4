"""`h5async inspect`: lists the datasets of a file, how each is stored and read, and its cost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.filesize import decimal

from h5async import H5AsyncError, ReaderConfig
from h5async.cli.listing import COLUMNS, Listing
from h5async.cli.options import spell_in_shell, takes_options
from h5async.cli.text import method_text, safe
from h5async.config.configfile import map_paths
from h5async.config.files import INDEX_SUFFIX, with_variables
from h5async.index.cost import read_cost
from h5async.index.layout import DatasetLayout
from h5async.index.links import Reach
from h5async.index.metadata import list_layouts
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
    config = ReaderConfig.load(map_paths({"hdf5_path": file, **given}, with_variables))
    path, reach = Path(str(config.hdf5_path)), Reach(config.allow_external, config.allow_missing)
    listing = Listing()
    for name, found in _datasets(path, reach):
        listing.add(tuple(safe(cell) for cell in _cells(path, name, found)))
    listing.print()
    typer.echo(f"\n{_LEGEND}" if listing.has_begun else f"{safe(path)} holds no datasets")


def _datasets(path: Path, reach: Reach) -> Iterator[tuple[str, DatasetLayout | H5AsyncError]]:
    """Yield the names of datasets, with their files where there are several, and their layouts."""
    if path.suffix != INDEX_SUFFIX:
        yield from list_layouts(path, reach)
        return
    index = NamedIndex(path, reach)
    for number, file in enumerate(index.paths):
        prefix = f"{file}: " if len(index.paths) > 1 else ""
        for wanted, layout in index.find(number, index.datasets(number), reach).items():
            yield prefix + wanted.path, layout


def _cells(file: Path, name: str, found: DatasetLayout | H5AsyncError) -> Sequence[str]:
    """Return the cells of a dataset's row, in the order of `COLUMNS`."""
    if isinstance(found, H5AsyncError):
        reason = (
            found.spelled(spell_in_shell)
            .removeprefix(printable(f'{file}: dataset "{name}"'))
            .lstrip(":, ")
        )
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
