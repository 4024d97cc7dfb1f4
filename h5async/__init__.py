"""h5async: minibatches from HDF5 for training loops, read and decoded by threads."""

import logging
from importlib.metadata import PackageNotFoundError, version

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

try:
    __version__ = version("h5async")
except PackageNotFoundError:  # run from a source tree that was never installed
    __version__ = "0+unknown"

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
