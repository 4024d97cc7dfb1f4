"""Formats names, options and amounts for people: in messages, and in small HTML tables.

Names in HDF5 files are bytes. Those that are not UTF-8 become surrogate escapes, as in Python's
file names; such text cannot be written to a terminal or a log.

Messages mark options with `named`. Python shows ``allow_missing=True``; the command line spells the
same message with ``--allow-missing``, and a configuration file with ``allow_missing = true``.
"""

from __future__ import annotations

import ast
import html
import json
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

Where = Literal["toml", "json", "yaml"]
Spell = Callable[[str, tuple[Any, ...]], str]

# Noncharacters of Unicode, which no text contains.
_BEGIN, _VALUE, _END = "\ufdd0", "\ufdd1", "\ufdd2"
_MARKED = re.compile(f"{_BEGIN}([^{_BEGIN}{_END}{_VALUE}]*)(?:{_VALUE}([^{_BEGIN}{_END}]*))?{_END}")
_NOT_GIVEN: Final = object()


def name_bytes(name: str) -> bytes:
    """Return the bytes that HDF5 stores for a name or a path, or raise `ValueError`."""
    return name.encode("utf-8", "surrogateescape")


def name_text(name: str | bytes) -> str:
    """Return a name as `str`; h5py gives names that are not UTF-8 as bytes."""
    return name if isinstance(name, str) else name.decode("utf-8", "surrogateescape")


def printable(text: str) -> str:
    r"""Return text that can be encoded; bytes that are not UTF-8 look like ``\xff``."""
    if text.isascii():
        return text
    shown = (f"\\x{ord(c) - 0xDC00:02x}" if "\udc80" <= c <= "\udcff" else c for c in text)
    return "".join(shown).encode("utf-8", "backslashreplace").decode()


def shell_word(text: str) -> str:
    """Quote text for a shell; bytes that are not UTF-8 need bash or zsh."""
    if printable(text) == text:
        return shlex.quote(text)
    escaped = text.replace("\\", r"\\").replace("'", r"\'")
    return f"$'{printable(escaped)}'"


def named(name: str, value: object = _NOT_GIVEN) -> str:
    """Return an option, and optionally its value, a literal of Python, marked for a message."""
    shown = "" if value is _NOT_GIVEN else f"{_VALUE}{value!r}"
    return f"{_BEGIN}{name}{shown}{_END}"


def has_options(text: str) -> bool:
    """Tell whether a message has a marked option."""
    return _BEGIN in text


def spelled(text: str, spell: Spell) -> str:
    """Return a message with its marked options written by `spell`.

    `spell` takes the name of an option, and a tuple of its value, empty if none is given.
    """

    def one(found: re.Match[str]) -> str:
        value = () if found[2] is None else (_literal(found[2]),)
        return spell(found[1], value)

    return _MARKED.sub(one, text)


def as_keyword(name: str, value: tuple[Any, ...]) -> str:
    """Spell an option as a Python keyword."""
    return name if not value else f"{name}={_quoted(value[0])}"


def in_file(where: Where) -> Spell:
    """Return a function that spells options as a kind of configuration file does."""
    form = {"toml": "{} = {}", "json": '"{}": {}', "yaml": "{}: {}"}[where]

    def spell(name: str, value: tuple[Any, ...]) -> str:
        if not value:
            return name
        if where != "toml":
            return form.format(name, json.dumps(value[0], default=_sliced))
        inner = value[0]
        while isinstance(inner, Mapping) and len(inner) == 1:
            ((key, inner),) = inner.items()
            name += f".{key}"
        return form.format(name, toml_value(inner))

    return spell


def toml_value(value: object) -> str:
    """Return a value, or a mapping as a table, in one line of TOML."""
    if isinstance(value, Mapping):
        pairs = [f"{_toml_key(str(key))} = {toml_value(one)}" for key, one in value.items()]
        return f"{{{', '.join(pairs)}}}"
    text = json.dumps(value, ensure_ascii=False, default=_sliced)
    return text.replace("\x7f", "\\u007f")


def _toml_key(name: str) -> str:
    return name if re.fullmatch(r"[\w-]+", name, re.ASCII) else toml_value(name)


def _sliced(value: Any) -> str:
    """Return a range or a slice as text, as written in files."""
    return f"{value.start}:{value.stop}"


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _quoted(value: object) -> str:
    """Return a value as in Python; strings are in double quotes, as in the messages."""
    if type(value) is dict:
        return f"{{{', '.join(f'{_quoted(key)}: {_quoted(one)}' for key, one in value.items())}}}"
    if isinstance(value, slice):
        return f"slice({value.start}, {value.stop})"
    if isinstance(value, str) and value.isprintable() and not set(value) & {'"', "\\"}:
        return f'"{value}"'
    return repr(value)


# --- amounts --------------------------------------------------------------------------------------


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


# --- tables for notebooks -------------------------------------------------------------------------

# Colours follow the page, dark or light. Nothing is loaded or run, and all text is escaped.
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
