"""Names in HDF5 files, which are bytes, enter; `str` leaves, and what can be shown of it anywhere.

Most names are UTF-8. A byte that is not becomes a surrogate escape, as Python has it for file
names, so that nothing is lost; but such text cannot be written to a terminal or a log.
"""

from __future__ import annotations

import shlex


def name_bytes(name: str) -> bytes:
    """Return a name, or a path, as HDF5 has it.

    Raises
    ------
    ValueError
        If no file can hold it: it has surrogates that stand for no byte.
    """
    return name.encode("utf-8", "surrogateescape")


def name_text(name: str | bytes) -> str:
    """Return a name as `str`; h5py gives names that are not UTF-8 as bytes."""
    return name if isinstance(name, str) else name.decode("utf-8", "surrogateescape")


def printable(text: str) -> str:
    r"""Return text that can be encoded; a byte that is not UTF-8 is shown as ``\xff``."""
    if text.isascii():
        return text
    shown = (_byte_escape(c) if "\udc80" <= c <= "\udcff" else c for c in text)
    return "".join(shown).encode("utf-8", "backslashreplace").decode()


def shell_word(text: str) -> str:
    """Return text as it is typed in a shell; bytes that are not UTF-8 as bash and zsh have them."""
    if printable(text) == text:
        return shlex.quote(text)
    escaped = text.replace("\\", r"\\").replace("'", r"\'")
    return f"$'{printable(escaped)}'"


def _byte_escape(character: str) -> str:
    return f"\\x{ord(character) - 0xDC00:02x}"
