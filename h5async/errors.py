"""Defines the exceptions that h5async raises: a tree with one type for each kind of remedy.

::

    H5AsyncError
    ├── ConfigError (ValueError)           an option is unknown or its value does not fit
    ├── DatasetError (KeyError)            a dataset is missing or cannot make batches
    ├── SelectionError                     a selection does not fit its dataset; also an
    │                                      IndexError, a TypeError and a ValueError
    ├── ReadError (OSError)                bytes could not be read or decoded
    │   └── DamagedError                   ... because they are damaged or missing
    ├── WriteError (OSError)               a file could not be written
    ├── UnsafeFileError (PermissionError)  a file reaches outside itself
    ├── OutOfMemoryError (MemoryError)     the system refused memory, or has too little
    │   └── BudgetError (also ConfigError)  ... for what the options ask for
    ├── DeviceError (RuntimeError)         no GPU, no CuPy, or a dtype that the GPU lacks
    ├── MissingPackageError (ImportError)  an optional package is needed and not installed
    ├── ReaderClosedError (RuntimeError)   the reader was used after ``close()``
    ├── BatchTimeoutError (TimeoutError)   no batch within the time allowed
    ├── BatchExpiredError (RuntimeError)   a batch was used after its life, with debug_lifetimes
    └── PostprocessError                   postprocess raised; also of the type that it raised

    FileChangedWarning (UserWarning)       a file was changed under an open reader, which goes on
"""

import errno
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeGuard

from h5async.spelling import Spell, as_keyword, has_options, named, printable, spelled


class H5AsyncError(Exception):
    """Base of every error that h5async raises on purpose.

    Messages mark options by `h5async.spelling.named`; ``str()`` shows them as Python keywords.

    Examples
    --------
    >>> try:
    ...     AsyncReader(hdf5_path="nowhere.h5")
    ... except H5AsyncError as error:
    ...     print(error)
    cannot open nowhere.h5: there is no such file
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        if len(args) == 1 and isinstance(args[0], str) and has_options(args[0]):
            self._marked = args[0]
            self.args = (spelled(args[0], as_keyword),)

    @property
    def marked(self) -> str:
        """The message with its options marked, for inclusion in another message."""
        found: str = self.__dict__.get("_marked") or str(self)
        return found

    def spelled(self, spell: Spell) -> str:
        """Return the message with options spelled by `spell`, in printable form."""
        return printable(spelled(self.marked, spell))

    def __str__(self) -> str:
        """Return the message as given, in printable form (`KeyError` would quote it)."""
        return printable(str(self.args[0]) if len(self.args) == 1 else super().__str__())


class ConfigError(H5AsyncError, ValueError):
    """An option is unknown, or its value is invalid or does not fit the dataset.

    Examples
    --------
    >>> AsyncReader(hdf5_path="sample_data/digits.h5", batchsize=64)
    Traceback (most recent call last):
        ...
    h5async.errors.ConfigError: unknown option 'batchsize'; did you mean 'batch_size'?
    """


class DatasetError(H5AsyncError, KeyError):
    """A dataset is missing, or cannot be delivered in batches.

    Examples
    --------
    >>> AsyncReader(hdf5_path="sample_data/digits.h5", data_field="images")
    Traceback (most recent call last):
        ...
    h5async.errors.DatasetError: sample_data/digits.h5: there is no dataset "images"; ...
    """


class SelectionError(H5AsyncError, IndexError, TypeError, ValueError):
    """A selection by indexing does not fit its dataset.

    h5py raises one of three built-in exceptions, so this is a subclass of all three.

    Examples
    --------
    >>> h5async.open_file("sample_data/digits.h5")["data"][100_000]
    Traceback (most recent call last):
        ...
    h5async.errors.SelectionError: ...digits.h5: dataset "/data" of shape ...: index ...
    """


class ReadError(H5AsyncError, OSError):
    """Bytes of a file could not be read or decoded.

    Attributes
    ----------
    filename, dataset
        The file and the dataset (its path) that the error is about; None if neither, or unknown.
    samples, file_samples
        The samples of the batch that cannot be read, ascending: their numbers in the whole dataset,
        and in their files. Those of other damage, which the batch may meet as well, may be missing.
        Empty if they are not known.

    Examples
    --------
    >>> try:
    ...     AsyncReader(hdf5_path="nowhere.h5")
    ... except ReadError as error:
    ...     print(error.filename, error.dataset, error.samples)
    nowhere.h5 None ()
    """

    # Not OSError's own attribute, which pickle forgets.
    filename: str | None = None
    dataset: str | None = None
    samples: tuple[int, ...] = ()
    file_samples: tuple[int, ...] = ()

    def __init__(
        self, *args: object, filename: str | None = None, dataset: str | None = None
    ) -> None:
        super().__init__(*args)
        if filename is not None:
            self.filename, self.dataset = filename, dataset


class DamagedError(ReadError):
    """A file, or a sample in it, is damaged or missing; ``on_error="skip"`` leaves it out.

    Examples
    --------
    >>> AsyncReader(hdf5_path="sample_data/README.md")
    Traceback (most recent call last):
        ...
    h5async.errors.DamagedError: cannot open sample_data/README.md: it is not an HDF5 file: ...
    """

    # The damaged field, and its damaged rows in a batch's memory, until `samples` is known.
    place: Any = None


class WriteError(H5AsyncError, OSError):
    """A file could not be written: the disk is full, or another process writes it.

    Attributes
    ----------
    filename
        The file; None if it is not known.

    Examples
    --------
    >>> error = WriteError("cannot write train.h5: No space left on device", filename="train.h5")
    >>> isinstance(error, OSError), error.filename
    (True, 'train.h5')
    """

    filename: str | None = None

    def __init__(self, *args: object, filename: str | None = None) -> None:
        super().__init__(*args)
        self.filename = filename


class Skipped(NamedTuple):
    """A sample, or a whole file, that ``on_error="skip"`` left out.

    `sample` is its number in the whole dataset, None for a file. `dataset` is None if the file
    cannot be opened.

    Examples
    --------
    >>> with AsyncReader(hdf5_path="sample_data/digits.h5", on_error="skip") as reader:
    ...     print(reader.skipped)
    ()
    """

    file: str
    dataset: str | None
    sample: int | None
    reason: str


def failed_read(
    message: str, cause: Exception, filename: str | None, dataset: str | None = None
) -> ReadError:
    """Make the error for data that HDF5 could not read: damaged, unless the system refused."""
    was_refused = getattr(cause, "errno", None) not in (None, errno.ENOENT, errno.ENOTDIR)
    kind = ReadError if was_refused else DamagedError
    return kind(message, filename=filename, dataset=dataset)


class UnsafeFileError(H5AsyncError, PermissionError):
    """A file refers to data outside itself, which is not permitted.

    Examples
    --------
    >>> with h5py.File("linked.h5", "w") as file:
    ...     file["data"] = h5py.ExternalLink("/etc/hostname", "/data")
    >>> AsyncReader(hdf5_path="linked.h5", labels_field=None)
    Traceback (most recent call last):
        ...
    h5async.errors.UnsafeFileError: ...
    """


class OutOfMemoryError(H5AsyncError, MemoryError):
    """The system refused memory that a reader needs, or has less than it would need.

    Examples
    --------
    >>> AsyncReader(hdf5_path="sample_data/digits.h5", max_batch_bytes=1000)
    Traceback (most recent call last):
        ...
    h5async.errors.BudgetError: ...: 2 batches of 32 samples take 4,608 bytes ...
    """


class BudgetError(OutOfMemoryError, ConfigError):
    """The options ask for more memory than there is, or than ``max_batch_bytes`` permits."""


class DeviceError(H5AsyncError, RuntimeError):
    """The device does not exist, or cannot hold the data.

    Examples
    --------
    >>> try:
    ...     AsyncReader(hdf5_path="sample_data/digits.h5", device="cuda:99")
    ... except DeviceError:
    ...     print("there is no such GPU")
    there is no such GPU
    """


class MissingPackageError(H5AsyncError, ImportError):
    """An optional package is needed, and not installed.

    Examples
    --------
    >>> issubclass(MissingPackageError, ImportError)
    True
    """


class ReaderClosedError(H5AsyncError, RuntimeError):
    """The reader was used after it had been closed.

    Examples
    --------
    >>> reader = AsyncReader(hdf5_path="sample_data/digits.h5")
    >>> reader.close()
    >>> reader.get_next_batch()
    Traceback (most recent call last):
        ...
    h5async.errors.ReaderClosedError: the reader is closed; make a new one
    """


class BatchTimeoutError(H5AsyncError, TimeoutError):
    """The batch was not ready within the time allowed; the next call waits for it again.

    Examples
    --------
    >>> with AsyncReader(hdf5_path="sample_data/digits.h5") as reader:
    ...     try:
    ...         batch = reader.get_next_batch(timeout=60)
    ...     except BatchTimeoutError:
    ...         print("the storage is slow")
    """


class BatchExpiredError(H5AsyncError, RuntimeError):
    """A batch was used after its life: the reader has moved on; see ``debug_lifetimes``.

    Examples
    --------
    >>> with AsyncReader(hdf5_path="sample_data/digits.h5", debug_lifetimes=True) as reader:
    ...     first, second = reader.get_next_batch(), reader.get_next_batch()
    >>> first.data
    Traceback (most recent call last):
        ...
    h5async.errors.BatchExpiredError: batch 0 of epoch 0 was used after the reader ...
    """


class FileChangedWarning(UserWarning):
    """A file was changed while a reader had it open; its chunks still have the same places.

    Examples
    --------
    >>> import warnings
    >>> with warnings.catch_warnings():
    ...     warnings.simplefilter("error", FileChangedWarning)  # it ends the training
    """


class PostprocessError(H5AsyncError):
    """The caller's `postprocess` raised or returned something unusable.

    Examples
    --------
    >>> def fails(data, labels):
    ...     return 1 / 0
    >>> with AsyncReader(hdf5_path="sample_data/digits.h5", postprocess=fails) as reader:
    ...     try:
    ...         reader.get_next_batch()
    ...     except ZeroDivisionError as error:
    ...         print(isinstance(error, PostprocessError))
    True
    """


@contextmanager
def needs_package(package: str, purpose: str) -> Iterator[None]:
    """Turn an `ImportError` into a `MissingPackageError`; `purpose`: ``"nested tensors"``."""
    try:
        yield
    except ImportError as error:
        raise MissingPackageError(
            f"{purpose} need a package that cannot be imported ({error}); install it with: pip"
            f" install {package}"
        ) from error


@contextmanager
def taking_memory(what: str, remedy: str) -> Iterator[None]:
    """Turn errors for refused memory into an `OutOfMemoryError`.

    `what` names the things that need it: ``"train.h5: 2 batches of 64 samples"``.
    """
    try:
        yield
    except Exception as error:
        if not is_lack_of_memory(error):
            raise
        raise out_of_memory(what, error, remedy) from error


def is_lack_of_memory(error: BaseException | None) -> TypeGuard[Exception]:
    """Tell whether an error of Python or a library means that memory was refused."""
    if isinstance(error, H5AsyncError):
        return False
    # Then Python's locks raise a `RuntimeError`, and some NumPy functions set no error at all.
    words = (
        "can't allocate lock",
        "returned NULL without setting an exception",
        "error return without exception set",
    )
    is_other = isinstance(error, RuntimeError | SystemError) and str(error).endswith(words)
    return is_other or isinstance(error, MemoryError)


def out_of_memory(what: str, cause: BaseException, remedy: str = "") -> OutOfMemoryError:
    """Make the error for refused memory, with its cause; the default remedy always applies."""
    found = f" ({cause})" if str(cause) else ""
    batches = f"{named('batch_size')}, {named('prefetch')}"
    remedy = remedy or (f"make {batches} or {named('num_threads')} smaller, or free some memory")
    error = OutOfMemoryError(f"{what}: the system refused more memory{found}; {remedy}")
    error.__cause__ = cause
    return error


def forget_frames(error: BaseException) -> None:
    """Clear the local variables held by the tracebacks of an error and its causes."""
    seen: set[int] = set()
    todo: list[BaseException | None] = [error]
    while todo:
        one = todo.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            traceback.clear_frames(one.__traceback__)
            todo += one.__cause__, one.__context__


def postprocess_error(message: str, cause: Exception) -> PostprocessError:
    """Make a `PostprocessError` that is also of the type of `cause`, if that can be mixed in."""
    error = _mixed(message, type(cause), cause.__dict__)
    error.__cause__ = cause
    return error


def _mixed(
    message: str, kind: type[Exception], attributes: Mapping[str, object]
) -> PostprocessError:
    error = PostprocessError(message)
    if issubclass(kind, H5AsyncError | StopIteration):  # StopIteration would end a for loop
        return error
    try:
        both: type[PostprocessError] = type(
            "PostprocessError",
            (PostprocessError, kind),
            {
                "__module__": __name__,
                "__reduce__": lambda self: (_mixed, (self.args[0], kind, self.__dict__)),
            },
        )
        try:
            mixed = both.__new__(both)
        except TypeError:  # `MemoryError.__new__` rejects our classes
            mixed = Exception.__new__(both)
    except TypeError:  # a layout conflict, or a __new__ that needs arguments
        return error
    mixed.__dict__.update(attributes)
    mixed.args = (message,)
    return mixed
