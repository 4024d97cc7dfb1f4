"""Spells names and options in messages as their reader would write them.

Names in HDF5 files are bytes. Those that are not UTF-8 become surrogate escapes, as in Python's
file names; such text cannot be written to a terminal or a log.

Messages mark options with `named`. Python shows ``allow_missing=True``; the command line spells the
same message with ``--allow-missing``, and a configuration file with ``allow_missing = true``.
"""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections.abc import Callable
from typing import Any, Final, Literal

Where = Literal["keyword", "toml", "json", "yaml"]
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

    It takes the name of an option, and a tuple of its value, empty if none is given.
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
    if where == "keyword":
        return as_keyword
    form = {"toml": "{} = {}", "json": '"{}": {}', "yaml": "{}: {}"}[where]
    return lambda name, value: form.format(name, json.dumps(value[0])) if value else name


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _quoted(value: object) -> str:
    """Return a value as in Python; strings are in double quotes, as in the messages."""
    if isinstance(value, str) and value.isprintable() and not set(value) & {'"', "\\"}:
        return f'"{value}"'
    return repr(value)
