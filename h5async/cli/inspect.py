"""`h5async inspect`: lists the datasets of a file, how each is stored and read, and its cost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import typer

from h5async import DatasetError, H5AsyncError, ReaderConfig
from h5async.cli.datasets import Dataset, dataset_of, ragged_dataset
from h5async.cli.documents import Json, plain, print_document
from h5async.cli.folding import Folding, Line
from h5async.cli.listing import Listing
from h5async.cli.options import takes_options
from h5async.cli.patterns import is_meant
from h5async.cli.text import safe
from h5async.config.configfile import map_paths
from h5async.config.files import INDEX_SUFFIX, with_variables
from h5async.core.binding import load_core, why_no_core
from h5async.index.links import Reach
from h5async.index.metadata import list_layouts
from h5async.index.references import references
from h5async.index.savedindex import NamedIndex
from h5async.system.interruptions import suppressing

_LEGEND = "in order, shuffled: bytes read from the file for each sample used"
_FOLDED = "groups alike: from the least samples to the most, and the sizes of all together"
_OF_TABLE = ("most_samples", "has_several_chunks", "samples")  # facts of several datasets


@takes_options(["allow_external", "allow_missing"])
def inspect(
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="The HDF5 file, or a saved index (.h5idx).")
    ],
    patterns: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PATTERN...",
            help="Paths of the datasets or groups that are listed: 'data/*/obs'. ** stands for any"
            " number of groups.",
        ),
    ] = None,
    fold: Annotated[
        bool, typer.Option("--fold/--no-fold", help="List groups that are alike once.")
    ] = True,
    as_json: Json = False,
    **typed: Any,
) -> None:
    """List the datasets of FILE, how each is stored and read, and what a sample costs."""
    given = {name: value for name, value in typed.items() if value is not None}
    config = ReaderConfig.load(map_paths({"hdf5_path": file, **given}, with_variables))
    path = Path(str(config.hdf5_path))
    reach = Reach(config.allow_external, config.allow_missing)
    wanted = patterns or []
    index = NamedIndex(path, reach) if path.suffix == INDEX_SUFFIX else None
    found = _datasets(path, reach, wanted) if index is None else _indexed(index, reach, wanted)
    if as_json:
        datasets = list(found)
        _require_some(bool(datasets), path, wanted)
        print_document("inspect", _content(path, datasets))
        return
    has_several = index is not None and len(index.paths) > 1
    listing = Listing()
    for row in _lines(found, fold, has_several):
        listing.add(row)
    listing.print()
    _require_some(listing.has_begun, path, wanted)
    legend = f"\n{_LEGEND}" + f"\n{_FOLDED}" * listing.has_heads
    typer.echo(legend if listing.has_begun else f"{safe(path)} holds no datasets")
    reason = why_no_core()
    if reason is not None:
        typer.echo(f"\n{safe(reason)}", err=True)


def _require_some(found: bool, path: Path, patterns: Sequence[str]) -> None:
    if patterns and not found:
        named = " or ".join(f'"{pattern}"' for pattern in patterns)
        raise DatasetError(
            f"{path}: no dataset or group has a path like {named}; without a pattern, all are"
            " listed"
        )


def _lines(
    datasets: Iterator[Dataset], fold: bool, has_several_files: bool
) -> Iterator[Sequence[str]]:
    """Yield the rows of the table, as their datasets come."""
    for file, of_file in groupby(datasets, lambda dataset: dataset.file):
        prefix = f"{file}: " if has_several_files else ""
        folding = Folding(fold)
        for dataset in of_file:
            yield from _rows(folding.add(dataset), prefix)
        yield from _rows(folding.end(), prefix)


def _rows(lines: Iterator[Line], prefix: str) -> Iterator[Sequence[str]]:
    for text, dataset in lines:
        name = text if text.startswith(" ") else f"{prefix}{text}"
        yield tuple(map(safe, (name,) if dataset is None else dataset.cells(name)))


def _content(path: Path, datasets: Sequence[Dataset]) -> dict[str, Any]:
    listed = [plain(dataset) for dataset in datasets]
    for facts in listed:
        for name in _OF_TABLE:
            del facts[name]
    return {
        "file": path,
        "core": load_core() is not None,
        "no_core_because": why_no_core(),
        "datasets": listed,
    }


def _datasets(path: Path, reach: Reach, patterns: Sequence[str]) -> Iterator[Dataset]:
    """Yield the datasets of a file that are meant."""
    wanted = partial(is_meant, patterns=patterns)
    for name, found in list_layouts(path, reach, wanted=wanted, with_attributes=True):
        ragged = None
        if isinstance(found, DatasetError):
            with suppressing(H5AsyncError):
                ragged = ragged_dataset(name, path, *references(path, name, reach))
        yield dataset_of(name, path, found) if ragged is None else ragged


def _indexed(index: NamedIndex, reach: Reach, patterns: Sequence[str]) -> Iterator[Dataset]:
    """Yield the datasets of a saved index that are meant."""
    for number, file in enumerate(index.paths):
        known = [one for one in index.datasets(number) if is_meant(one.path, patterns)]
        for wanted, layout in index.find(number, known, reach).items():
            yield dataset_of(wanted.path, Path(file), layout)
