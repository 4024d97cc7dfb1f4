"""`h5async inspect`: lists the datasets of a file, how each is stored and read, and its cost.

A file may have a group per episode, with the same datasets in each: groups that are alike are
folded. Rows are printed as soon as nothing more can be folded with them, to a pipe, or a wide or
narrow terminal.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from itertools import chain, groupby, islice
from time import perf_counter
from typing import Annotated, Any, NamedTuple

import typer
from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from h5async.cli.datasetfacts import Dataset, cells, listed, listed_in_index
from h5async.cli.options import reader_config, takes
from h5async.cli.output import Json, plain, print_json, safe
from h5async.config import ReaderConfig
from h5async.config.files import FileName, is_index, matching_files
from h5async.core.binding import why_no_core
from h5async.errors import DatasetError
from h5async.index.contents import natural_key
from h5async.index.savedindex import NamedIndex
from h5async.io.stores import far_names, store_of
from h5async.opening.filevalues import reach_of
from h5async.spelling import shell_word

BLOCK_SECONDS = 0.5  # for which rows may be held back, to align columns
_LEGEND = "in order, shuffled: bytes read from the file for each sample used"
_FOLDED = "groups alike: the range of their numbers of samples, and their total sizes"
_DEAR, _DEAR_NBYTES = 4.0, 1 << 16  # of a shuffled sample: times its cost in order, and bytes
_LEAST_NUMBERED = 3  # similar groups to fold, if their names differ only in numbers
_LEAST_OTHERS = 10  # ... with any names
_MOST_HELD = 500  # lines of one group, before they are printed in any case
_DEEPEST = 64  # level of nested groups that are folded
_STACKED_COLUMNS = (
    ("dataset",),
    ("shape", "dtype"),
    ("layout", "chunks", "filters"),
    ("on disk", "decoded"),
    ("in order", "shuffled"),
    ("read",),
)
_RIGHT = frozenset({"decoded", "on disk", "in order", "shuffled"})
COLUMNS = tuple(name for names in _STACKED_COLUMNS for name in names)


@takes(ReaderConfig, ["allow_external", "allow_missing", "storage_options"])
def inspect(
    file: Annotated[
        str,
        typer.Argument(metavar="FILE", help="The HDF5 file, a glob, or a saved index (.h5idx)."),
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
    given = config.hdf5_path
    assert not isinstance(given, tuple)
    reach = reach_of(config)
    wanted = patterns or []
    path, *others = paths = matching_files([given])
    index = NamedIndex(path, reach) if is_index(path) and not others else None
    found: Iterator[Dataset] = chain.from_iterable(listed(one, reach, wanted) for one in paths)
    if index is not None:
        found = listed_in_index(index, wanted)
    is_far = bool(far_names([path]))
    if is_far:  # their requests are listed below the table
        found = iter(listing := list(found))
    if as_json:
        datasets = list(found)
        _require_some(bool(datasets), given, wanted)
        print_json("inspect", _content(given, path, datasets))
        return
    has_several = len(paths if index is None else index.paths) > 1
    dearest = list[Dataset]()
    printed = _print_table(_rows(_noting(found, dearest), fold, has_several))
    _require_some(bool(printed), given, wanted)
    legend = f"\n{_LEGEND}" + f"\n{_FOLDED}" * (1 in printed)
    typer.echo(legend if printed else f"{safe(given)} holds no datasets")
    identity = _identity(path)
    if identity is not None:
        typer.echo(f"changes of it are detected by {identity}")
    if is_far:
        typer.echo("\n".join(map(safe, _requests_lines(listing, has_several))))
    if dearest and index is None and not is_far:
        hint = f"h5async advise {shell_word(dearest[0].file)} measures what other chunks would give"
        of = f"of {safe(dearest[0].path)} above all"
        typer.echo(f"\nshuffled samples are expensive, {of}: {hint}", err=True)
    reason = why_no_core()
    if reason is not None:
        typer.echo(f"\n{safe(reason)}", err=True)


def _noting(datasets: Iterable[Dataset], dearest: list[Dataset]) -> Iterator[Dataset]:
    """Yield datasets; note the one with the dearest shuffled samples, if they are far too dear."""
    most = 0.0
    for one in datasets:
        shuffled, in_order = one.shuffled_nbytes or 0.0, one.in_order_nbytes or 0.0
        if one.kind == "dataset" and shuffled > max(most, _DEAR * in_order, _DEAR_NBYTES):
            most, dearest[:] = shuffled, [one]
        yield one


def _requests_lines(datasets: Sequence[Dataset], has_several_files: bool) -> Iterator[str]:
    """Say what reading samples over the network takes."""
    several = [(one, one.requests) for one in datasets if one.requests is not None]
    if several:
        yield from ("", f"requests for a sample, in batches of {several[0][1].batch_size}:")
    for one, requests in several:
        yield (
            f"{one.file}: {one.path}: {requests}"
            if has_several_files
            else f"{one.path}: {requests}"
        )


def _require_some(found: bool, path: FileName, patterns: Sequence[str]) -> None:
    if patterns and not found:
        named = " or ".join(f'"{pattern}"' for pattern in patterns)
        raise DatasetError(
            f"{path}: no dataset or group has a path like {named}; without a pattern, all are"
            " listed"
        )


def _rows(found: Iterator[Dataset], fold: bool, has_several_files: bool) -> Iterator[Sequence[str]]:
    for file, of_file in groupby(found, lambda dataset: dataset.file):
        prefix = f"{file}: " if has_several_files else ""
        for text, datasets in folded(of_file, _DEEPEST if fold else 0):
            name = text if text.startswith(" ") else f"{prefix}{text}"
            yield tuple(map(safe, cells(name, datasets) if datasets else (name,)))


def _content(given: FileName, path: FileName, datasets: Sequence[Dataset]) -> dict[str, Any]:
    every = [plain(dataset) for dataset in datasets]
    for facts in every:
        del facts["samples"]
    why = why_no_core()
    about = {"file": given, "core": why is None, "no_core_because": why}
    return {**about, "identity": _identity(path), "datasets": every}


def _identity(path: FileName) -> str | None:
    """Say how changes of a far source are detected; None for a local file."""
    store = store_of(path)
    if store.is_local:
        return None
    with closing(store.open(str(path))) as source:
        return source.identity


# --- folding --------------------------------------------------------------------------------------


# The text of a line of the listing, and similar datasets; or, without any, a heading of the lines
# below it.
Line = tuple[str, Sequence[Dataset]]


class _Item(NamedTuple):
    """Similar datasets, or similar neighbouring groups with the content of each."""

    names: Sequence[str]  # paths relative to its parent group
    datasets: Sequence[Dataset]
    content: Sequence[_Item] = ()

    @property
    def likeness(self) -> tuple[object, ...]:
        facts = self.datasets[0].likeness if self.datasets else None
        return self.names, facts, [item.likeness for item in self.content]


def folded(datasets: Iterable[Dataset], deepest: int = _DEEPEST) -> Iterator[Line]:
    """Yield the lines of the datasets of one file, with similar groups to some depth folded."""
    return chain.from_iterable(_lines(item, "") for item in _items(datasets, 0, deepest))


def _lines(item: _Item, indent: str) -> Iterator[Line]:
    first, last = min(item.names, key=natural_key), max(item.names, key=natural_key)
    if item.datasets:
        yield f"{indent}{first}", item.datasets
        return
    yield f"{indent}{first} … {last} ({len(item.names):,} groups alike)", ()
    for inner in item.content:
        yield from _lines(inner, f"{indent}  ")


def _items(datasets: Iterable[Dataset], depth: int, deepest: int) -> Iterator[_Item]:
    """Yield the datasets and groups of a group at a depth, as soon as no later one is like them."""

    def place(dataset: Dataset) -> tuple[str, bool]:
        names = dataset.path.split("/", deepest)
        return names[depth], len(names) > depth + 1

    run: list[tuple[str, list[_Item]]] = []  # neighbouring groups alike
    for (name, is_group), inside in groupby(datasets, place):
        inner = _items(inside, depth + 1, deepest) if is_group else iter(())
        content = list(islice(inner, _MOST_HELD + 1))
        is_like = run and [item.likeness for item in run[-1][1]] == [
            item.likeness for item in content
        ]
        if not is_like or len(content) > _MOST_HELD:
            yield from _folded_groups(run)
            run = []
        if not is_group:
            yield from (_Item([name], [dataset]) for dataset in inside)
        elif len(content) > _MOST_HELD:
            yield from _within(name, chain(content, inner))
        else:
            run.append((name, content))
    yield from _folded_groups(run)


def _folded_groups(run: Sequence[tuple[str, list[_Item]]]) -> Iterator[_Item]:
    """Yield similar groups as one if there are enough of them."""
    by_name = groupby(run, lambda group: re.sub(r"\d+", "0", group[0]))
    parts = [run] if len(run) >= _LEAST_OTHERS else [list(groups) for _, groups in by_name]
    for groups in parts:
        if len(groups) >= _LEAST_NUMBERED:
            names, contents = zip(*groups, strict=True)
            yield _Item(names, (), [_merged(items) for items in zip(*contents, strict=True)])
        else:
            for name, content in groups:
                yield from _within(name, content)


def _within(name: str, content: Iterable[_Item]) -> Iterator[_Item]:
    """Yield the items of a group as items of its parent group."""
    for item in content:
        yield item._replace(names=[f"{name}/{inner}" for inner in item.names])


def _merged(items: Sequence[_Item]) -> _Item:
    datasets = [dataset for item in items for dataset in item.datasets]
    contents = zip(*(item.content for item in items), strict=True)
    return _Item(items[0].names, datasets, [_merged(alike) for alike in contents])


# --- printing -------------------------------------------------------------------------------------


def _print_table(rows: Iterable[Sequence[str]]) -> set[int]:
    """Print rows in blocks as they arrive; columns only get wider. A single cell is a heading.

    Returns the numbers of cells that the printed rows had.
    """
    console, printed = Console(highlight=False), set[int]()
    widths = [cell_len(name) for name in COLUMNS]
    for block in _blocks(rows):
        for row in block:
            if len(row) > 1:
                widths = [max(n, cell_len(cell)) for n, cell in zip(widths, row, strict=True)]
        width = sum(widths) + 2 * (len(COLUMNS) - 1)
        if console.is_terminal and width > console.width:
            with console.capture() as capture:
                console.print(_stacked(block))
            lines = [line.rstrip() for line in capture.get().splitlines()]
        else:
            rule = ("-" if console.options.ascii_only else "─") * width
            head = [] if printed else [_line(COLUMNS, widths), rule]
            lines = [*head, *(_line(row, widths) for row in block)]
        typer.echo("\n".join(lines))
        printed.update(map(len, block))
    return printed


def _blocks(rows: Iterable[Sequence[str]]) -> Iterator[list[Sequence[str]]]:
    block: list[Sequence[str]] = []
    since = perf_counter()
    for row in rows:
        since = since if block else perf_counter()
        block.append(row)
        if perf_counter() - since > BLOCK_SECONDS:
            yield block
            block = []
    if block:
        yield block


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    if len(row) == 1:
        return row[0]
    padded = []
    for name, cell, width in zip(COLUMNS, row, widths, strict=True):
        space = " " * (width - cell_len(cell))
        padded.append(space + cell if name in _RIGHT else cell + space)
    return "  ".join(padded).rstrip()


def _stacked(rows: Sequence[Sequence[str]]) -> Table:
    """Lay rows out for a narrow terminal, with several of `COLUMNS` stacked in each column."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), show_lines=True)
    for names in _STACKED_COLUMNS:
        right = not _RIGHT.isdisjoint(names)
        table.add_column("\n".join(names), overflow="fold", justify="right" if right else "left")
    for row in rows:
        if len(row) == 1:
            table.add_row(Text(row[0]))
            continue
        cell = dict(zip(COLUMNS, row, strict=True))
        stacks = ([cell[name] for name in names if cell[name] != "-"] for names in _STACKED_COLUMNS)
        table.add_row(*(Text("\n".join(stack) or "-") for stack in stacks))
    return table
