"""Lists datasets as a table: folds groups that are alike, and prints rows as they come.

A file may have a group per episode, with the same datasets in each. Rows leave as soon as nothing
can be folded with them, for a pipe, a wide or a narrow terminal.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from time import perf_counter
from typing import NamedTuple

import typer
from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from h5async.cli.datasetfacts import Dataset

BLOCK_SECONDS = 0.5  # for which rows may be held back
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

_LEAST_NUMBERED = 3  # similar groups to fold, if their names differ only in numbers
_LEAST_OTHERS = 10  # ... with any names
_MOST_HELD = 500  # lines of one group, before they are printed in any case
_INDENT = "  "


class Line(NamedTuple):
    """A line of the listing: a dataset, or, without one, a heading of the lines below it."""

    text: str
    dataset: Dataset | None


@dataclass
class _Item:
    """A dataset, or similar neighbouring groups with their common content."""

    names: list[str]  # paths from the group around it
    dataset: Dataset | None = None
    content: list[_Item] = field(default_factory=list)
    members: list[list[_Item]] = field(default_factory=list)  # of each, while they are few

    @property
    def likeness(self) -> tuple[object, ...]:
        of_dataset = None if self.dataset is None else self.dataset.likeness
        return self.names, of_dataset, _likeness(self.content)

    def merged(self, other: _Item) -> _Item:
        dataset = self.dataset
        if dataset is not None and other.dataset is not None:
            dataset = dataset.merged(other.dataset)
        pairs = zip(self.content, other.content, strict=True)
        return _Item(self.names, dataset, [one.merged(another) for one, another in pairs])

    def within(self, name: str) -> _Item:
        """Return it as an item of the enclosing group."""
        return replace(self, names=[f"{name}/{inner}" for inner in self.names])

    def add(self, name: str, content: list[_Item]) -> None:
        """Add a similar group."""
        self.names.append(name)
        pairs = zip(self.content, content, strict=True)
        self.content = [one.merged(another) for one, another in pairs]
        if len(self.names) < _LEAST_OTHERS:
            self.members.append(content)
        else:
            self.members.clear()  # they are folded in any case

    def folded(self) -> Iterator[_Item]:
        """Yield the groups, as one if there are enough of them."""
        if not self.members:
            yield self
            return
        pairs = list(zip(self.names, self.members, strict=True))
        for _, found in groupby(pairs, lambda pair: re.sub(r"\d+", "0", pair[0])):
            several = list(found)
            if len(several) < _LEAST_NUMBERED:
                for name, content in several:
                    yield from (item.within(name) for item in content)
                continue
            (name, content), *others = several
            run = _Item([name], content=content)
            for name, content in others:
                run.add(name, content)
            run.members.clear()
            yield run


def _likeness(items: Sequence[_Item]) -> list[tuple[object, ...]]:
    return [item.likeness for item in items]


@dataclass
class _Level:
    """An open group: its content so far, and the similar groups at its end."""

    name: str
    items: list[_Item] = field(default_factory=list)
    run: _Item | None = None
    is_printed: bool = False  # its content so far, so it cannot be folded itself

    def end_run(self) -> None:
        if self.run is not None:
            self.items += self.run.folded()
            self.run = None

    def close(self, name: str, content: list[_Item]) -> None:
        """Take the complete content of an inner group."""
        if self.run is not None and _likeness(self.run.content) == _likeness(content):
            self.run.add(name, content)
            return
        self.end_run()
        self.run = _Item([name], content=content, members=[content])


class Folding:
    """Makes lines of the datasets of one file; folds similar groups if `is_wanted`."""

    def __init__(self, is_wanted: bool = True) -> None:
        self._is_wanted = is_wanted
        self._levels = [_Level("", is_printed=True)]

    def add(self, dataset: Dataset) -> Iterator[Line]:
        """Take the next dataset; yield complete lines."""
        if not self._is_wanted:
            yield Line(dataset.path, dataset)
            return
        *groups, name = dataset.path.split("/")
        same = 0
        for level, group in zip(self._levels[1:], groups, strict=False):
            if level.name != group:
                break
            same += 1
        self._close_to(same)
        self._levels += map(_Level, groups[same:])
        last = self._levels[-1]
        last.end_run()
        last.items.append(_Item([name], dataset))
        if len(last.items) > _MOST_HELD:
            for level in self._levels:
                level.end_run()
                level.is_printed = True
        yield from self._lines()

    def end(self) -> Iterator[Line]:
        """Yield the lines that were held back."""
        self._close_to(0)
        self._levels[0].end_run()
        yield from self._lines()

    def _close_to(self, depth: int) -> None:
        while len(self._levels) > depth + 1:
            level = self._levels.pop()
            level.end_run()
            parent = self._levels[-1]
            if level.is_printed:
                parent.end_run()
                parent.items += (item.within(level.name) for item in level.items)
            else:
                parent.close(level.name, level.items)

    def _lines(self) -> Iterator[Line]:
        """Yield the items of open groups that can no longer be folded."""
        prefix = ""
        for level in self._levels:
            if not level.is_printed:
                return
            prefix += f"{level.name}/" if level.name else ""
            for item in level.items:
                yield from _lines_of(item, prefix, "")
            level.items.clear()
            if level.run is not None:  # later items must not precede it
                return


def _lines_of(item: _Item, prefix: str, indent: str) -> Iterator[Line]:
    first, last = min(item.names, key=_natural), max(item.names, key=_natural)
    if item.dataset is not None:
        yield Line(f"{indent}{prefix}{first}", item.dataset)
        return
    count = f"({len(item.names):,} groups alike)"
    yield Line(f"{indent}{prefix}{first} … {prefix}{last} {count}", None)
    for inner in item.content:
        yield from _lines_of(inner, "", indent + _INDENT)


def _natural(name: str) -> list[tuple[int, str]]:
    """Return a sort key by which 10 follows 9."""
    return [(int(part) if part.isdecimal() else -1, part) for part in re.split(r"(\d+)", name)]


class Listing:
    """A table that is printed in blocks as rows arrive; columns only get wider."""

    def __init__(self) -> None:
        self.has_begun = False  # anything was printed
        self.has_heads = False  # there were headings
        self._rows: list[Sequence[str]] = []
        self._widths = [cell_len(name) for name in COLUMNS]
        self._console = Console(highlight=False)
        self._since = 0.0

    def add(self, row: Sequence[str]) -> None:
        """Take a row; it may be printed later, to align columns.

        A row of a single cell is a heading of the rows below it.
        """
        self.has_heads |= len(row) == 1
        if not self._rows:
            self._since = perf_counter()
        self._rows.append(row)
        if perf_counter() - self._since > BLOCK_SECONDS:
            self.print()

    def print(self) -> None:
        """Print the rows that were held back."""
        if not self._rows:
            return
        for row in self._rows:
            if len(row) > 1:
                self._widths = [max(n, cell_len(c)) for n, c in zip(self._widths, row, strict=True)]
        console, width = self._console, sum(self._widths) + 2 * (len(COLUMNS) - 1)
        if console.is_terminal and width > console.width:
            with console.capture() as capture:
                console.print(_stacked(self._rows))
            typer.echo("\n".join(line.rstrip() for line in capture.get().splitlines()))
        else:
            head = () if self.has_begun else (self._line(COLUMNS), _rule(width))
            typer.echo("\n".join([*head, *map(self._line, self._rows)]))
        self.has_begun = True
        self._rows.clear()

    def _line(self, row: Sequence[str]) -> str:
        if len(row) == 1:
            return row[0]
        cells = []
        for name, cell, width in zip(COLUMNS, row, self._widths, strict=True):
            space = " " * (width - cell_len(cell))
            cells.append(space + cell if name in _RIGHT else cell + space)
        return "  ".join(cells).rstrip()


def _rule(width: int) -> str:
    try:
        "─".encode(getattr(sys.stdout, "encoding", None) or "ascii")
    except UnicodeEncodeError:
        return "-" * width
    return "─" * width


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
