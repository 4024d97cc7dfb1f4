"""`h5async inspect`: lists the datasets of a file, how each is stored and read, and its cost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from itertools import chain, groupby
from typing import Annotated, Any

import typer

from h5async import DatasetError, H5AsyncError
from h5async.cli.datasetfacts import (
    Dataset,
    dataset_of,
    group_dataset,
    ragged_dataset,
    sparse_dataset,
)
from h5async.cli.listing import Folding, Listing
from h5async.cli.options import reader_config, takes_options
from h5async.cli.output import Json, plain, print_document, safe
from h5async.config.files import FileName, is_index
from h5async.core.binding import why_no_core
from h5async.index.groupfields import column, sparse_group
from h5async.index.layout import DatasetLayout
from h5async.index.links import Reach, open_index
from h5async.index.metadata import list_layouts, references
from h5async.index.savedindex import NamedIndex, Wanted
from h5async.opening.filevalues import reach_of
from h5async.opening.raggedcolumns import heap_layout
from h5async.samples.fieldkind import CATEGORIES, NULLABLE, ROWS, SHAPE, TEXTS, values_of
from h5async.system.interruptions import suppressing

_LEGEND = "in order, shuffled: bytes read from the file for each sample used"
_FOLDED = "groups alike: from the least samples to the most, and the sizes of all together"
_MOST_REFERENCES = 64 << 20  # bytes to read for the mean length of samples
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
    config = reader_config({**typed, "hdf5_path": [file]})
    path = config.hdf5_path
    assert not isinstance(path, tuple)
    reach = reach_of(config)
    wanted = patterns or []
    index = NamedIndex(path, reach) if is_index(path) else None
    found = _datasets(path, reach, wanted) if index is None else _indexed(index, reach, wanted)
    if as_json:
        datasets = list(found)
        _require_some(bool(datasets), path, wanted)
        print_document("inspect", _content(path, datasets))
        return
    has_several = index is not None and len(index.paths) > 1
    listing = Listing()
    for row in _rows(found, fold, has_several):
        listing.add(row)
    listing.print()
    _require_some(listing.has_begun, path, wanted)
    legend = f"\n{_LEGEND}" + f"\n{_FOLDED}" * listing.has_heads
    typer.echo(legend if listing.has_begun else f"{safe(path)} holds no datasets")
    reason = why_no_core()
    if reason is not None:
        typer.echo(f"\n{safe(reason)}", err=True)


def _require_some(found: bool, path: FileName, patterns: Sequence[str]) -> None:
    if patterns and not found:
        named = " or ".join(f'"{pattern}"' for pattern in patterns)
        raise DatasetError(
            f"{path}: no dataset or group has a path like {named}; without a pattern, all are"
            " listed"
        )


def _rows(
    datasets: Iterator[Dataset], fold: bool, has_several_files: bool
) -> Iterator[Sequence[str]]:
    for file, of_file in groupby(datasets, lambda dataset: dataset.file):
        prefix = f"{file}: " if has_several_files else ""
        folding = Folding(fold)
        for text, dataset in chain(chain.from_iterable(map(folding.add, of_file)), folding.end()):
            name = text if text.startswith(" ") else f"{prefix}{text}"
            yield tuple(map(safe, (name,) if dataset is None else dataset.cells(name)))


def _content(path: FileName, datasets: Sequence[Dataset]) -> dict[str, Any]:
    listed = [plain(dataset) for dataset in datasets]
    for facts in listed:
        for name in _OF_TABLE:
            del facts[name]
    why = why_no_core()
    return {
        "file": path,
        "core": why is None,
        "no_core_because": why,
        "datasets": listed,
    }


def _datasets(path: FileName, reach: Reach, patterns: Sequence[str]) -> Iterator[Dataset]:
    wanted = partial(is_meant, patterns=patterns)
    for name, found in list_layouts(path, reach, wanted=wanted, with_attributes=True):
        ragged = None
        if isinstance(found, DatasetError):
            with suppressing(H5AsyncError):
                ragged = _ragged(name, path, reach)
        yield dataset_of(name, path, found) if ragged is None else ragged
        parent, _, member = name.rpartition("/")
        group = None
        with suppressing(H5AsyncError):  # its datasets are listed anyway
            group = _group(parent, member, path, reach)
        if group is not None:
            yield group


def _ragged(name: str, path: FileName, reach: Reach) -> Dataset:
    layout, forms = references(path, name, reach)
    mean = None
    if layout.nbytes <= _MOST_REFERENCES and layout.num_samples:
        mean = heap_layout(name, path, reach).num_samples / layout.num_samples
    return ragged_dataset(name, path, layout, forms[layout.file], mean)


def _group(parent: str, member: str, path: FileName, reach: Reach) -> Dataset | None:
    """Return the group whose last member is this dataset, if it is read as one field."""
    if member not in ("indptr", "codes", "values"):
        return None
    with open_index(path) as file:
        if member == "indptr":
            matrix = sparse_group(file, parent, reach)
            if matrix is None:
                return None
            return sparse_dataset(parent, path, (matrix.data, matrix.indices), matrix.shape)
        found = column(file, parent, reach)
    if found is not None and found.mask is not None:
        return group_dataset(parent, path, (found.values, found.mask), "nullable")
    if found is None or found.categories is None:
        return None
    names = found.categories
    count = names.num_samples if isinstance(names, DatasetLayout) else len(names)
    return replace(group_dataset(parent, path, (found.values,), "categorical"), categories=count)


def _indexed(index: NamedIndex, reach: Reach, patterns: Sequence[str]) -> Iterator[Dataset]:
    for number, file in enumerate(index.paths):
        known = [one for one in index.datasets(number) if is_meant(one.path, patterns)]
        layouts = index.find(number, index.datasets(number), reach)
        for wanted in known:
            found = _known(wanted, layouts, file) if wanted in layouts else None
            if found is not None:
                yield found


def _known(
    wanted: Wanted, layouts: Mapping[Wanted, DatasetLayout], file: FileName
) -> Dataset | None:
    """Return the facts of an index's entry; None if it is part of something else."""
    layout = layouts[wanted]

    of_group = {
        SHAPE: (("data", "indices"), ROWS),
        CATEGORIES: (("codes",), ""),
        NULLABLE: (("values", "mask"), ""),
    }
    if wanted.kind in of_group:
        names, kind = of_group[wanted.kind]
        keys = [Wanted.at(f"{wanted.path}/{name}")._replace(kind=kind) for name in names]
        parts = [layouts[key] for key in keys if key in layouts]
        if len(parts) < len(keys):
            return None
        if wanted.kind == SHAPE:
            rows, columns = values_of(layout).tolist()
            return sparse_dataset(wanted.path, file, parts, (rows, columns))
        if wanted.kind == NULLABLE:
            return group_dataset(wanted.path, file, parts, "nullable")
        found = group_dataset(wanted.path, file, parts, "categorical")
        return replace(found, categories=layout.sample_count)
    if wanted.kind in (ROWS, TEXTS):
        return None
    found = dataset_of(wanted.path, file, layout)
    if not layout.is_ragged:
        return found
    mean = layout.num_samples / layout.sample_count if layout.sample_count else None
    in_order, shuffled = found.in_order_nbytes or 0.0, found.shuffled_nbytes or 0.0
    if layout.heaps:  # only its values are read
        in_order = shuffled = layout.row_nbytes
    is_text = any(heap.elements.form.is_text for heap in layout.heaps)
    return replace(
        found,
        shape=(layout.sample_count,),
        samples=layout.sample_count,
        dtype="text of any length" if is_text else f"{layout.dtype} of any length",
        kind="ragged",
        mean_length=mean,
        in_order_nbytes=in_order * (mean or 0),
        shuffled_nbytes=max(shuffled, in_order * (mean or 0)),
    )


def is_meant(path: str, patterns: Sequence[str]) -> bool:
    """Tell whether a pattern matches a dataset's path, or a group around it, as in a shell.

    ``**`` matches any number of names; characters of patterns also match themselves.
    """
    names = _names(path)
    return not patterns or any(_begins(names, _names(pattern)) for pattern in patterns)


def _begins(names: Sequence[str], pattern: Sequence[str]) -> bool:
    if not pattern:
        return True
    if pattern[0] == "**":
        return any(_begins(names[at:], pattern[1:]) for at in range(len(names) + 1))
    if not names:
        return False
    is_same = names[0] == pattern[0] or fnmatchcase(names[0], pattern[0])
    return is_same and _begins(names[1:], pattern[1:])


def _names(path: str) -> list[str]:
    return [name for name in path.split("/") if name not in ("", ".")]
