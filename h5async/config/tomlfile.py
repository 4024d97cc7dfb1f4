"""Reads options from a TOML file; the paths in it are relative to that file."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from h5async.errors import ConfigError

_HDF5_SUFFIXES = frozenset({".h5", ".hdf5", ".hdf", ".he5", ".nc", ".mat"})


def load_toml(path: Path) -> dict[str, Any]:
    """Return the options in a file.

    Raises
    ------
    ConfigError
        If the file cannot be read, or is no TOML.
    """
    try:
        options = tomllib.loads(_content(path).decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        hint = "; to read an HDF5 file, give hdf5_path=..." if path.suffix in _HDF5_SUFFIXES else ""
        raise ConfigError(f"{path} is not a TOML file: {error}{hint}") from error
    for name in ("hdf5_path", "allow_external", "index_cache"):
        value = options.get(name)
        if isinstance(value, str):
            options[name] = str(path.parent / value)
        elif isinstance(value, list):
            options[name] = [str(path.parent / v) if isinstance(v, str) else v for v in value]
    indices = options.get("indices")
    if isinstance(indices, str) and indices.endswith(".npy"):
        options["indices"] = str(path.parent / indices)
    weights = options.get("weights")
    if isinstance(weights, dict):
        options["weights"] = {str(path.parent / file): of for file, of in weights.items()}
    return options


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except (OSError, ValueError) as error:  # the latter of a path with a NUL
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"cannot read the configuration {path}: {reason}") from error
