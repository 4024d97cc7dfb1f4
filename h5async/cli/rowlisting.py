"""Prints the table of datasets row by row, for a pipe, a wide or a narrow terminal."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from time import perf_counter

import typer
from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

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


class Listing:
    """A table that is printed in blocks as rows arrive; columns only get wider.

    Attributes
    ----------
    has_begun
        Whether anything was printed.
    has_heads
        Whether there were headings.
    """

    def __init__(self) -> None:
        self.has_begun = False
        self.has_heads = False
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
