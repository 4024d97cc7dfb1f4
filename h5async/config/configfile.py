"""Reads options from a TOML, JSON or YAML file; the paths in it are relative to that file."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from h5async.config.files import home_path, scheme_of, with_variables
from h5async.errors import ConfigError
from h5async.spelling import Where, named

_HDF5_SUFFIXES = frozenset({".h5", ".hdf5", ".hdf", ".he5", ".nc", ".mat"})
_PATHS = ("hdf5_path", "allow_external", "index_cache")


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
        options = parse(_content(path).decode())
    except ConfigError:
        raise
    except (
        ValueError,
        RecursionError,
    ) as error:  # ValueError includes invalid UTF-8
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
            raise ValueError(f"{twice!r} is there twice")
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


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except (OSError, ValueError) as error:  # a NUL in the path is a ValueError
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"cannot read the configuration {path}: {reason}") from error
