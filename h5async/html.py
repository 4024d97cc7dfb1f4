"""Makes small HTML tables of text and bars for notebooks.

Colours follow the page, dark or light. Nothing is loaded or run, and all text is escaped.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import NamedTuple

_BOX = "max-width:100%;overflow-x:auto"
_TABLE = (
    "border-collapse:collapse;table-layout:auto;margin:0 0 .4em 0;font-size:.92em;color:inherit;"
    "background:none;border:0"
)
_CELL = "text-align:left;vertical-align:top;padding:.15em .9em .15em 0;border:0;color:inherit"
_HEAD = f"{_CELL};opacity:.7;font-weight:normal"
_CAPTION = "margin:0 0 .4em 0;overflow-wrap:anywhere"
_NOTE = "margin:0;max-width:60em;font-size:.92em;overflow-wrap:anywhere"
_TRACK = "display:inline-block;width:7em;height:.7em;border-radius:.2em;overflow:hidden"
_FILLED = "display:block;height:100%;background:#3b82c4"


class Bar(NamedTuple):
    """A cell with a bar, filled to `share` (0 to 1), and text after it."""

    share: float
    text: str


Cell = str | Bar


def table(
    title: str,
    rows: Iterable[Sequence[Cell]],
    *,
    head: Sequence[str] = (),
    subtitle: str = "",
    note: str = "",
) -> str:
    """Return one table with a title as HTML; the parameters are those of `box` and `grid`."""
    return box(title, [grid(rows, head)], subtitle=subtitle, note=note)


def box(title: str, grids: Iterable[str], *, subtitle: str = "", note: str = "") -> str:
    """Return tables with a title in bold, a subtitle and a note below them, as HTML."""
    line = (
        f'<p style="{_CAPTION}"><strong>{html.escape(title)}</strong> {html.escape(subtitle)}</p>'
    )
    below = f'<p style="{_NOTE}">{html.escape(note)}</p>' if note else ""
    return f'<div style="{_BOX}">{line}{"".join(grids)}{below}</div>'


def grid(rows: Iterable[Sequence[Cell]], head: Sequence[str] = ()) -> str:
    """Return a table as HTML; without `head`, the first cell of a row is its name."""
    found = []
    if head:
        cells = "".join(f'<th style="{_HEAD}">{html.escape(name)}</th>' for name in head)
        found.append(f'<tr style="background:none">{cells}</tr>')
    for first, *others in rows:
        cells = f'<td style="{_CELL if head else _HEAD}">{_cell(first)}</td>'
        cells += "".join(f'<td style="{_CELL}">{_cell(cell)}</td>' for cell in others)
        found.append(f'<tr style="background:none">{cells}</tr>')
    return f'<table style="{_TABLE}">{"".join(found)}</table>' if found else ""


def _cell(cell: Cell) -> str:
    if isinstance(cell, str):
        return html.escape(cell)
    percent = 100 * min(1.0, max(0.0, cell.share))
    # The track is a shade of the page's text colour: visible on dark and light pages.
    return (
        f'<span style="white-space:nowrap"><span style="{_TRACK};position:relative">'
        '<span style="position:absolute;inset:0;background:currentColor;opacity:.15"></span>'
        f'<span style="{_FILLED};position:relative;width:{percent:.1f}%"></span></span>'
        f" {html.escape(cell.text)}</span>"
    )


def counted(count: int, singular: str, plural: str = "") -> str:
    """Return a count with its noun: "1 batch", "2,000 batches"."""
    return f"{count:,} {singular if count == 1 else plural or singular + 's'}"


def seconds_text(seconds: float) -> str:
    """Return a time in a suitable unit."""
    return _in_unit(seconds, (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)))


def size_text(nbytes: float) -> str:
    """Return a size in a suitable unit."""
    return _in_unit(nbytes, (("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1.0)))


def _in_unit(amount: float, units: Sequence[tuple[str, float]]) -> str:
    unit, size = next((pair for pair in units if amount >= pair[1]), units[-1])
    return f"{amount / size:.3g} {unit}"
