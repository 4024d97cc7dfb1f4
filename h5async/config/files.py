"""Checks paths, finds the files that match a glob, and reads files of options."""

from __future__ import annotations

import glob
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

from pydantic import BeforeValidator, WrapValidator

from h5async.errors import ConfigError, ReadError
from h5async.spelling import Where, named, printable

FileName: TypeAlias = Path | str  # str: ``scheme://...``, which no path of a local file is
Expand = Callable[["SourceName"], "list[str] | None"]

_HDF5_SUFFIXES = frozenset({".h5", ".hdf5", ".hdf", ".he5", ".nc", ".mat"})
_PATHS = ("hdf5_path", "allow_external", "cache_dir", "index_cache")
INDEX_SUFFIX = ".h5idx"
OBJECT_SCHEME = "object"  # of the names of file objects
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://")
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})")
_EXPANDERS: dict[str, Expand] = {}  # by the scheme of a name


class Kept(NamedTuple):
    """The folder that keeps the bytes read from a source, and its maximum size in bytes, if any."""

    folder: Path
    limit: int | None


class SourceName(str):
    """The name ``scheme://...`` of a source, with the options of the client that reads it.

    The options may be secret: comparisons ignore them, and no text shows them. `kept` says where
    the bytes read are kept; None: nowhere.
    """

    __slots__ = ("kept", "options")
    options: Mapping[str, Any]
    kept: Kept | None

    def __new__(cls, name: str, options: Mapping[str, Any], kept: Kept | None = None) -> SourceName:
        """Return a name with options."""
        made = super().__new__(cls, name)
        made.options, made.kept = options, kept
        return made

    def renamed(self, name: str) -> SourceName:
        """Return another name with the same options."""
        return SourceName(name, self.options, self.kept)

    def __str__(self) -> str:
        """Return the name with its options, so that ``str(name)`` of any name keeps them."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return SourceName, ("".join(self), self.options, self.kept)


class ObjectName(SourceName):
    """The name of a Python file object, with the object itself. Only this process can read it."""

    @classmethod
    def of(cls, file: Any) -> ObjectName:
        """Return a name for a file object, or for the result of `fsspec.open`.

        Raises `ValueError` unless it is seekable and reads bytes.
        """
        if not hasattr(file, "read") and hasattr(file, "fs") and hasattr(file, "open"):
            file = file.open()
        try:
            is_binary = file.seekable() and isinstance(file.read(0), bytes)
        except (AttributeError, TypeError, ValueError, OSError):  # ValueError: it is closed
            is_binary = False
        if not is_binary:
            raise ValueError("must be a path, or a seekable file object that reads bytes")
        name = getattr(file, "name", None)
        text = name if isinstance(name, str) else repr(file).strip("<>")
        return cls(f"{OBJECT_SCHEME}://{text}", {"file": file})

    @property
    def file(self) -> Any:
        """The file object."""
        return self.options["file"]

    def __reduce__(self) -> tuple[Any, ...]:
        return ObjectName, ("".join(self), self.options)


def expand_with(scheme: str, expand: Expand) -> None:
    """Register the function that expands globs with a scheme; it returns None for other names."""
    _EXPANDERS[scheme] = expand


def with_options(names: Files, options: Mapping[str, Any], kept: Kept | None = None) -> Files:
    """Return names with the options of a client; paths of local files stay as they are."""

    def one(name: FileName) -> FileName:
        is_url = isinstance(name, str) and not isinstance(name, ObjectName)
        return SourceName(str(name), options, kept) if is_url else name

    return tuple(map(one, names)) if isinstance(names, tuple) else one(names)


def scheme_of(name: FileName) -> str:
    """Return the scheme of a name, ``scheme://name``, or "" for the path of a local file."""
    found = _SCHEME.match(name) if isinstance(name, str) else None
    return "" if found is None else found[1].lower()


def is_index(name: FileName) -> bool:
    """Tell whether a file is a saved index, by its name."""
    text = str(name) if isinstance(name, Path) else name.partition("?")[0]
    return text.endswith(INDEX_SUFFIX) and Path(text).suffix == INDEX_SUFFIX


def matching_files(paths: Iterable[FileName]) -> list[FileName]:
    """Return files in order, with the sorted matches of globs.

    Raises `ReadError` if a glob matches nothing.
    """
    found: list[FileName] = []
    for path in paths:
        if isinstance(path, SourceName) and (expand := _EXPANDERS.get(scheme_of(path))):
            several = expand(path)
            if several == []:
                raise ReadError(f"no file matches {path}")
            found += [path] if several is None else map(path.renamed, several)
            continue
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


def user_cache(name: str) -> Path | None:
    """Return h5async's folder of this name in the user's cache; None if there is no home folder."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):
        base = os.path.expanduser("~/.cache")
    return Path(base, "h5async", name) if os.path.isabs(base) else None


def paths_text(paths: FileName | Sequence[FileName]) -> str:
    """Name one file, or the first of several and the number of the others."""
    if isinstance(paths, Path | str):
        return printable(str(paths))
    more = f" and {len(paths) - 1:,} more" if len(paths) > 1 else ""
    return printable(f"{paths[0]}{more}")


def kind_of_file(path: Path) -> Where:
    """Return the format of a configuration file, by its suffix; TOML by default."""
    kinds: dict[str, Where] = {".json": "json", ".yaml": "yaml", ".yml": "yaml"}
    return kinds.get(path.suffix.lower(), "toml")


def load_file(path: Path) -> dict[str, Any]:
    """Return the options in a file.

    Raises `ConfigError` if the file cannot be read or parsed, or YAML is not installed.
    """
    path, kind = Path(home_path(str(path))), kind_of_file(path)
    parse = {"toml": _toml, "json": _json, "yaml": _yaml}[kind]
    try:
        content = path.read_bytes()
    except (OSError, ValueError) as error:  # a NUL in the path is a ValueError
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"cannot read the configuration {path}: {reason}") from error
    try:
        options = parse(content.decode())
    except ConfigError:
        raise
    except (ValueError, RecursionError) as error:  # ValueError includes invalid UTF-8
        is_hdf5 = path.suffix in _HDF5_SUFFIXES
        hint = f"; to read an HDF5 file, give it as {named('hdf5_path')}" if is_hdf5 else ""
        reason = " ".join(str(error).split())
        raise ConfigError(f"{path} is not a {kind.upper()} file: {reason}{hint}") from error
    if not isinstance(options, Mapping):
        raise ConfigError(f"{path} must map the names of options to their values")
    return map_paths(options, lambda text: str(path.parent / home_path(with_variables(text))))


def map_paths(options: Mapping[str, Any], change: Callable[[str], str]) -> dict[str, Any]:
    """Return options with `change` applied to each path of a local file in them."""

    def new(text: str) -> str:
        return text if scheme_of(text) else change(text)

    changed = {str(name): value for name, value in options.items()}
    for name in _PATHS:
        value = changed.get(name)
        if isinstance(value, str) and value:
            changed[name] = new(value)
        elif isinstance(value, list):
            changed[name] = [new(v) if isinstance(v, str) and v else v for v in value]
    indices = changed.get("indices")
    if isinstance(indices, str) and indices.endswith(".npy"):
        changed["indices"] = change(indices)
    fields = changed.get("fields")
    for field in fields.values() if isinstance(fields, dict) else ():
        if isinstance(field, dict) and isinstance(field.get("normalize"), str):
            field["normalize"] = new(field["normalize"])
    weights = changed.get("weights")
    if isinstance(weights, dict):
        changed["weights"] = {new(str(file)): of for file, of in weights.items()}
    return changed


def _toml(text: str) -> object:
    import tomllib

    return tomllib.loads(text)


def _json(text: str) -> object:
    def once(pairs: list[tuple[str, object]]) -> dict[str, object]:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"{twice!r} appears twice")
        return found

    return json.loads(text, object_pairs_hook=once)


def _yaml(text: str) -> object:
    try:
        import yaml
    except ImportError as error:
        raise ConfigError(
            "a configuration in YAML needs PyYAML; install it with: pip install 'h5async[yaml]', or"
            " write the options as TOML or JSON"
        ) from error
    try:
        return {} if (found := yaml.safe_load(text)) is None else found
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


def _file_path(value: object) -> Path:
    if not isinstance(value, str | bytes | os.PathLike):
        raise ValueError("must be a path")
    if not os.fspath(value):
        raise ValueError("the path is empty")
    return Path(home_path(os.fsdecode(value)))


def _file_name(value: object) -> FileName:
    if hasattr(value, "read") or hasattr(value, "fs"):
        return ObjectName.of(value)
    return value if isinstance(value, str) and scheme_of(value) else _file_path(value)


def _file_names(value: object) -> FileName | tuple[FileName, ...]:
    if isinstance(value, set | frozenset):
        raise ValueError("a set has no order; give a list of files")
    if isinstance(value, list | tuple):
        if not value:
            raise ValueError("the list of files is empty")
        return tuple(map(_file_name, value))
    return _file_name(value)


def _folders(value: object) -> tuple[FileName, ...]:
    if isinstance(value, str | bytes | os.PathLike):
        return (_file_name(value),)
    if isinstance(value, list | tuple | set | frozenset):
        return tuple(map(_file_name, value))
    raise ValueError("must be a folder, or a list of folders")


def _place(value: object) -> bool | Path:
    if isinstance(value, bool):
        return value
    path = _file_path(value)
    if path.suffix != INDEX_SUFFIX and not path.is_dir():
        raise ValueError(f"must be True, False, a folder, or a file that ends in {INDEX_SUFFIX}")
    return path


# (pydantic would convert a `SourceName` to a plain `str`.)
Files = Annotated[
    FileName | tuple[FileName, ...], WrapValidator(lambda value, _: _file_names(value))
]
Folder = Annotated[Path, BeforeValidator(_file_path)]
Folders = Annotated[tuple[FileName, ...], BeforeValidator(_folders)]
Place = Annotated[Path | Literal[False, True], BeforeValidator(_place)]
