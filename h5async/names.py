"""Converts names in HDF5 files, which are bytes, to `str` and back, and to printable text.

Bytes that are not UTF-8 become surrogate escapes, as in Python's file names; such text cannot be
written to a terminal or a log.
"""

from __future__ import annotations

import shlex


def name_bytes(name: str) -> bytes:
    """Return the bytes that HDF5 stores for a name or a path.

    Raises `ValueError` for surrogates that stand for no byte, which no file can hold.
    """
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
