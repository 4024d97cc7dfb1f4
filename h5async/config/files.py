"""Checks paths of files and folders, and finds the files that match a glob."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Literal, TypeAlias, TypeGuard

from pydantic import BeforeValidator

from h5async.errors import ConfigError, ReadError
from h5async.spelling import printable

FileName: TypeAlias = Path | str  # str: ``scheme://...``, which no path of a local file is

INDEX_SUFFIX = ".h5idx"
_SCHEME = re.compile(r"([a-z][a-z0-9+.-]+)://")
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})")


def scheme_of(name: FileName) -> str:
    """Return the scheme of a name, as of ``scheme://name``; "" for the path of a local file."""
    found = _SCHEME.match(name) if isinstance(name, str) else None
    return "" if found is None else found[1]


def is_index(name: FileName) -> TypeGuard[Path]:
    """Tell whether a file is a saved index, by its name."""
    return isinstance(name, Path) and name.suffix == INDEX_SUFFIX


def matching_files(paths: Iterable[FileName]) -> list[FileName]:
    """Return files in order, with the sorted matches of globs.

    Raises `ReadError` if a glob matches nothing.
    """
    found: list[FileName] = []
    for path in paths:
        if scheme_of(path) or not glob.has_magic(str(path)) or os.path.exists(path):
            found.append(path)
            continue
        names = sorted(glob.glob(str(path), recursive=True))
        if not names:
            raise ReadError(f"no file matches {path}")
        found += map(Path, names)
    return found


def home_path(text: str) -> str:
    """Replace ``~`` or ``~user`` at the beginning of a path."""
    return os.path.expanduser(text)


def with_variables(text: str) -> str:
    """Replace environment variables, written as ``$NAME`` or ``${NAME}``, in a typed path.

    A path that exists as typed is left alone. Raises `ConfigError` for an unset variable.
    """
    if "$" not in text or os.path.exists(text):
        return text

    def value(found: re.Match[str]) -> str:
        name = found[1] or found[2]
        if name not in os.environ:
            raise ConfigError(f"{text}: there is no environment variable {name}")
        return os.environ[name]

    return _VARIABLE.sub(value, text)


def paths_text(paths: FileName | Sequence[FileName]) -> str:
    """Name one file, or the first of several and the number of the others."""
    if isinstance(paths, Path | str):
        return printable(str(paths))
    more = f" and {len(paths) - 1:,} more" if len(paths) > 1 else ""
    return printable(f"{paths[0]}{more}")


def _file_path(value: object) -> Path:
    if not isinstance(value, str | bytes | os.PathLike):
        raise ValueError("must be a path")
    if not os.fspath(value):
        raise ValueError("the path is empty")
    return Path(home_path(os.fsdecode(value)))


def _file_name(value: object) -> FileName:
    return value if isinstance(value, str) and scheme_of(value) else _file_path(value)


def _file_names(value: object) -> FileName | tuple[FileName, ...]:
    if isinstance(value, set | frozenset):
        raise ValueError("a set has no order; give a list of files")
    if isinstance(value, list | tuple):
        if not value:
            raise ValueError("the list of files is empty")
        return tuple(map(_file_name, value))
    return _file_name(value)


def _folders(value: object) -> tuple[Path, ...]:
    if isinstance(value, str | bytes | os.PathLike):
        return (_file_path(value),)
    if isinstance(value, list | tuple | set | frozenset):
        return tuple(map(_file_path, value))
    raise ValueError("must be a folder, or a list of folders")


def _place(value: object) -> bool | Path:
    if isinstance(value, bool):
        return value
    path = _file_path(value)
    if path.suffix != INDEX_SUFFIX and not path.is_dir():
        raise ValueError(f"must be True, False, a folder, or a file that ends in {INDEX_SUFFIX}")
    return path


Files = Annotated[FileName | tuple[FileName, ...], BeforeValidator(_file_names)]
Folders = Annotated[tuple[Path, ...], BeforeValidator(_folders)]
Place = Annotated[Path | Literal[False, True], BeforeValidator(_place)]
