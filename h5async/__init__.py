"""h5async: minibatches from HDF5 for training loops, read and decoded by threads."""

import importlib
import importlib.util
import logging
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from h5async.arrays.openfile import open_file
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
    from h5async.config.keywords import ReaderOptions
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
    from h5async.measure.statistics import statistics
    from h5async.observe.stats import ReaderStats
    from h5async.observe.tracing import Trace
    from h5async.packing.newfiles import repack
    from h5async.packing.pack import pack
    from h5async.reader.asyncreader import AsyncReader
    from h5async.reader.batch import Batch
    from h5async.samples.ragged import Images, Ragged
    from h5async.samples.sparse import Csr

# Public names by module, except the exceptions. A module is loaded when one of its names is first
# used, so that importing h5async takes next to no time.
_NAMES = {
    "arrays.openfile": "open_file",
    "config": "AudioField Field ImageField RaggedField ReaderConfig Sequences SparseField Split",
    "config.keywords": "ReaderOptions",
    "config.statistics": "FieldStatistics Statistics",
    "measure.statistics": "statistics",
    "observe.stats": "ReaderStats",
    "observe.tracing": "Trace",
    "packing.newfiles": "repack",
    "packing.pack": "pack",
    "reader.asyncreader": "AsyncReader",
    "reader.batch": "Batch",
    "samples.ragged": "Images Ragged",
    "samples.sparse": "Csr",
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names.split()}
_loading = threading.RLock()  # threads that load NumPy at once would see parts of it

# If the program does not set up logging, nothing is printed, not even warnings.
logging.getLogger(__name__).addHandler(logging.NullHandler())

__version__: str


def __getattr__(name: str) -> Any:
    """Return a public name, the version or a module, imported on first access."""
    if name == "__version__":
        return _version()
    if name in __all__:
        with _loading:
            module = importlib.import_module(f"{__name__}.{_MODULE_OF.get(name, 'errors')}")
        return globals().setdefault(name, getattr(module, name))
    path = f"{__name__}.{name}"
    if name.startswith("_") or importlib.util.find_spec(path) is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with _loading:
        importlib.import_module(f"{__name__}.reader.engine")  # loads nearly everything
        return importlib.import_module(path)


def __dir__() -> list[str]:
    return __all__


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
