"""h5async: minibatches from HDF5 for training loops, read and decoded by threads."""

import logging
from typing import TYPE_CHECKING, Any

from h5async.config import (
    AudioField,
    Field,
    ImageField,
    RaggedField,
    ReaderConfig,
    Sequences,
    SparseField,
    Split,
)
from h5async.config.statistics import FieldStatistics, Statistics
from h5async.errors import (
    BatchExpiredError,
    BatchTimeoutError,
    ConfigError,
    DamagedError,
    DatasetError,
    DeviceError,
    FileChangedWarning,
    H5AsyncError,
    MissingPackageError,
    OutOfMemoryError,
    PostprocessError,
    ReaderClosedError,
    ReadError,
    SelectionError,
    Skipped,
    UnsafeFileError,
    WriteError,
)
from h5async.observe.stats import ReaderStats
from h5async.observe.tracing import Trace
from h5async.reader.asyncreader import AsyncReader
from h5async.reader.batch import Batch
from h5async.samples.ragged import Images, Ragged
from h5async.samples.sparse import Csr

if TYPE_CHECKING:
    from h5async.arrays.openfile import open_file
    from h5async.config.keywords import ReaderOptions
    from h5async.measure.statistics import statistics
    from h5async.packing.newfiles import repack
    from h5async.packing.pack import pack

# If the program does not set up logging, nothing is printed, not even warnings.
logging.getLogger(__name__).addHandler(logging.NullHandler())

__version__: str


def __getattr__(name: str) -> Any:
    """Return the version or a module, loading what they need on access."""
    if name == "__version__":
        return _version()
    if name == "ReaderOptions":
        from h5async.config.keywords import ReaderOptions

        return ReaderOptions
    if name == "statistics":
        from h5async.measure.statistics import statistics

        return statistics
    if name == "pack":
        from h5async.packing.pack import pack

        return pack
    if name == "open_file":
        from h5async.arrays.openfile import open_file

        return open_file
    if name == "repack":
        from h5async.packing.newfiles import repack

        return repack
    import importlib.util

    path = f"{__name__}.{name}"
    if name.startswith("_") or importlib.util.find_spec(path) is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    importlib.import_module(f"{__name__}.reader.engine")  # loads nearly everything
    return importlib.import_module(path)


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("h5async")
    except PackageNotFoundError:  # run from a source tree that was never installed
        return "0+unknown"


__all__ = [
    "AsyncReader",
    "AudioField",
    "Batch",
    "BatchExpiredError",
    "BatchTimeoutError",
    "ConfigError",
    "Csr",
    "DamagedError",
    "DatasetError",
    "DeviceError",
    "Field",
    "FieldStatistics",
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
    "ReaderOptions",
    "ReaderStats",
    "SelectionError",
    "Sequences",
    "Skipped",
    "SparseField",
    "Split",
    "Statistics",
    "Trace",
    "UnsafeFileError",
    "WriteError",
    "__version__",
    "open_file",
    "pack",
    "repack",
    "statistics",
]
