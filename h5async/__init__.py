"""h5async: minibatches from HDF5 for training loops, read and decoded by threads."""

from importlib.metadata import PackageNotFoundError, version

from h5async.batch import Batch
from h5async.config import (
    Field,
    ImageField,
    RaggedField,
    ReaderConfig,
    Sequences,
    SparseField,
    Split,
)
from h5async.errors import (
    BatchExpiredError,
    BatchTimeoutError,
    ConfigError,
    DatasetError,
    DeviceError,
    FileChangedWarning,
    H5AsyncError,
    MissingPackageError,
    OutOfMemoryError,
    PostprocessError,
    ReaderClosedError,
    ReadError,
    UnsafeFileError,
)
from h5async.images import Images
from h5async.ragged import Ragged
from h5async.reader import AsyncReader
from h5async.sparse import Csr
from h5async.stats import ReaderStats

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
    "Csr",
    "DatasetError",
    "DeviceError",
    "Field",
    "FileChangedWarning",
    "H5AsyncError",
    "ImageField",
    "Images",
    "MissingPackageError",
    "OutOfMemoryError",
    "PostprocessError",
    "Ragged",
    "RaggedField",
    "ReadError",
    "ReaderClosedError",
    "ReaderConfig",
    "ReaderStats",
    "Sequences",
    "SparseField",
    "Split",
    "UnsafeFileError",
    "__version__",
]
