"""h5async: minibatches from HDF5 for training loops, read and decoded by threads."""

import logging

from h5async.batch import Batch
from h5async.config import Field, ReaderConfig, Split
from h5async.errors import (
    BatchExpiredError,
    BatchTimeoutError,
    ConfigError,
    DatasetError,
    DeviceError,
    FileChangedWarning,
    H5AsyncError,
    OutOfMemoryError,
    PostprocessError,
    ReaderClosedError,
    ReadError,
    UnsafeFileError,
)
from h5async.reader import AsyncReader
from h5async.stats import ReaderStats

# Where the program does not set up logging, nothing is printed, not even warnings.
logging.getLogger(__name__).addHandler(logging.NullHandler())

__version__: str


def __getattr__(name: str) -> str:
    """Return the version: what reads it is loaded where somebody asks."""
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("h5async")
    except PackageNotFoundError:  # run from a source tree that was never installed
        return "0+unknown"


__all__ = [
    "AsyncReader",
    "Batch",
    "BatchExpiredError",
    "BatchTimeoutError",
    "ConfigError",
    "DatasetError",
    "DeviceError",
    "Field",
    "FileChangedWarning",
    "H5AsyncError",
    "OutOfMemoryError",
    "PostprocessError",
    "ReadError",
    "ReaderClosedError",
    "ReaderConfig",
    "ReaderStats",
    "Split",
    "UnsafeFileError",
    "__version__",
]
