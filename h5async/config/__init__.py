"""Validates options once: they enter in any of four forms, and a frozen `ReaderConfig` leaves.

Checks that need no file happen here. What depends on the dataset (does axis 3 exist?) is checked
when it is opened, with the same type of error.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from h5async.config.field import Field
    from h5async.config.kinds import AudioField, ImageField, RaggedField, SparseField
    from h5async.config.parts import Sequences, Split
    from h5async.config.readerconfig import ReaderConfig
    from h5async.config.values import check_timeout

# Loaded when they are first used, as pydantic takes longer to load than all else.
_NAMES = {
    "field": "Field",
    "kinds": "AudioField ImageField RaggedField SparseField",
    "parts": "Sequences Split",
    "readerconfig": "ReaderConfig",
    "values": "check_timeout",
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    """Return a public name, loading its module on access."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{_MODULE_OF[name]}")
    return globals().setdefault(name, getattr(module, name))


__all__ = [
    "AudioField",
    "Field",
    "ImageField",
    "RaggedField",
    "ReaderConfig",
    "Sequences",
    "SparseField",
    "Split",
    "check_timeout",
]
