"""Validates options once: they enter in any of four forms, and a frozen `ReaderConfig` leaves.

Checks that need no file happen here. What depends on the dataset (does axis 3 exist?) is checked
when it is opened, with the same type of error.
"""

from h5async.config.field import Field
from h5async.config.kinds import AudioField, ImageField, RaggedField, SparseField
from h5async.config.parts import Sequences, Split
from h5async.config.readerconfig import ReaderConfig
from h5async.config.values import check_timeout

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
