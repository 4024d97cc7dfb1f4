"""Delivers the batches of an `AsyncReader` as PyTorch tensors, over the same memory.

Only this module imports torch, not ``import h5async``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NoReturn, Unpack

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from h5async.config import ReaderConfig
from h5async.errors import ConfigError, DatasetError, ReaderClosedError
from h5async.reader.asyncreader import AsyncReader
from h5async.reader.batch import Batch
from h5async.samples.samplearrays import NoTensorError, SampleArrays, tensor_of
from h5async.system.describing import takes_options

if TYPE_CHECKING:
    from h5async.config.keywords import ReaderOptions

_WRITE = "write DataLoader(dataset, batch_size=None)"


@takes_options(lambda: ReaderConfig)
class H5Dataset(IterableDataset):
    """An iterable dataset of whole batches, for a loop, a DataLoader or a Lightning Trainer.

    Each iteration is the next epoch, and gives dicts of tensors by field name. **The tensors live
    until the next iteration of the loop**, as a batch does: they are the reader's own buffers, not
    copies. Clone those that have to last longer. (With the option ``debug_lifetimes``, tensors that
    are kept too long hold NaN, -1 or 255.) A copy to a GPU that is still running is waited for, if
    it was made on PyTorch's current stream at the time of the next request.

    Sparse rows are tensors of layout ``torch.sparse_csr``, and samples of varying lengths are
    nested tensors of layout ``torch.jagged``, over the same buffers.

    If a DataLoader is needed, write ``DataLoader(dataset, batch_size=None)``, without
    `num_workers`: the reader's threads do the work. For a `postprocess` that holds the GIL, give
    the dataset ``workers=4``, say, so that several processes fill batches side by side.

    Any first use except `close` opens the files. The dataset can be pickled before and after that:
    the copy opens the files again, and continues at the same position.

    With several processes, each gets its part of every epoch, and all get the same number of
    batches. The options `rank` and `world_size` identify the process; or ``torch.distributed``, if
    a process group exists at the time of the first batch; or the launcher's environment.

    Parameters
    ----------
    config
        As for `AsyncReader`; or an `AsyncReader`, which the caller has to close.
    as_tuple
        Give tuples in field order instead of dicts. (A DataLoader makes lists of them.)
    with_index
        After the fields, also give these attributes of the `Batch`: ``index``, and with `sequences`
        ``sequence`` and ``step``. They are int64 tensors (size,) that stay valid.
    **options
        Individual options, listed below; they override `config`.

    Raises
    ------
    ConfigError
        If an option is unknown; or when iterated in a worker process, or by a DataLoader that would
        collate batches.
    DatasetError
        When opened: if PyTorch has no dtype for a field; or as `AsyncReader` raises.

    Examples
    --------
    >>> with H5Dataset(hdf5_path="sample_data/digits.h5", batch_size=256) as dataset:
    ...     for epoch in range(2):
    ...         for batch in dataset:
    ...             loss = batch["data"].float().mean()  # your step
    ...     print(batch["data"].shape, len(dataset))
    torch.Size([5, 8, 8]) 8
    """

    def __init__(
        self,
        config: AsyncReader
        | ReaderConfig
        | ReaderOptions
        | Mapping[str, Any]
        | str
        | os.PathLike[str]
        | None = None,
        /,
        *,
        as_tuple: bool = False,
        with_index: bool = False,
        **options: Unpack[ReaderOptions],
    ) -> None:
        super().__init__()
        self._as_tuple = as_tuple
        self._with_index = with_index
        self._reader: AsyncReader | None = None
        self._state: Mapping[str, Any] | None = None  # to continue from, once the reader is opened
        self._is_closed = False
        self._is_ours = not isinstance(config, AsyncReader)
        if isinstance(config, AsyncReader):
            if options:
                raise ConfigError(
                    f"{next(iter(options))!r} was given with a reader; create the reader with it"
                )
            self._config = config.config
            _check_dtypes(config)
            self._reader = config
        else:
            self._config = ReaderConfig.load(config, **options)

    @property
    def reader(self) -> AsyncReader:
        """The reader, opened on first access."""
        _check_process()
        if self._is_closed:
            raise ReaderClosedError("the dataset is closed")
        if self._reader is None:
            self._reader = _open(self._config, self._state)
            self._state = None
        return self._reader

    def __len__(self) -> int:
        """Return the number of batches in an epoch, the same in all processes."""
        return len(self.reader)

    def __iter__(self) -> Iterator[Any]:
        """Begin the next epoch; after `load_state_dict`, the rest of the saved one."""
        # A DataLoader that collates holds batches past their life, and would give wrong values.
        # Only its fetcher, which calls this, knows whether it collates.
        caller = sys._getframe(1).f_locals.get("self")
        if getattr(caller, "auto_collation", None) is True:
            raise ConfigError(
                "the DataLoader has a batch_size, and the dataset gives whole batches; give"
                f" batch_size to the dataset, and {_WRITE}"
            )
        return map(self._tensors, self.reader)

    def __getitem__(self, index: object) -> NoReturn:
        """Raise `ConfigError`: samples come in batches, and `indices` selects a part."""
        raise ConfigError(
            "H5Dataset gives whole batches, and no single items by number; for part of the samples,"
            ' instead of random_split() or Subset, give it indices=Split("train", {"train": 0.9,'
            ' "val": 0.1}), or indices= with their numbers; for some samples at once, reader.read()'
        )

    def set_epoch(self, epoch: int) -> None:
        """Continue at the beginning of an epoch, as `AsyncReader.set_epoch`.

        No loop needs it; after `load_state_dict`, it would restart the epoch.
        """
        self.reader.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the dataset's position, as `AsyncReader.state_dict`."""
        return self.reader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue exactly where a state was saved, as `AsyncReader.load_state_dict`."""
        self.reader.load_state_dict(state)

    def close(self) -> None:
        """Close the reader, unless the caller made it. Idempotent."""
        self._is_closed = True
        if self._reader is not None and self._is_ours:
            self._reader.close()

    def __enter__(self) -> H5Dataset:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        """Return options and position for another process, without the reader."""
        state = self._state if self._reader is None else self._reader.state_dict()
        return {**self.__dict__, "_reader": None, "_state": state, "_is_ours": True}

    def __repr__(self) -> str:
        return f"<H5Dataset {self._config.hdf5_path if self._reader is None else self._reader}>"

    def _tensors(self, batch: Batch) -> dict[str, Any] | tuple[Any, ...]:
        tensors = {name: _tensor(batch[name], name) for name in batch.keys()}
        if self._with_index:
            has_sequences = self._config.sequences is not None
            names = ("index", "sequence", "step") if has_sequences else ("index",)
            tensors |= {name: torch.from_numpy(getattr(batch, name).copy()) for name in names}
        return tuple(tensors.values()) if self._as_tuple else tensors


def _check_process() -> None:
    if get_worker_info() is not None:
        raise ConfigError(
            "H5Dataset was used in a worker process of a DataLoader; it needs none, as its own"
            " threads read and decode ahead, without the GIL and without a copy between processes;"
            f" {_WRITE}, without num_workers, and for more threads give the dataset num_threads, or"
            " for a postprocess that holds the GIL, workers=4, say"
        )


def _open(config: ReaderConfig, state: Mapping[str, Any] | None) -> AsyncReader:
    reader = AsyncReader(config)
    try:
        _check_dtypes(reader)
        if state is not None:
            reader.load_state_dict(state)
    except BaseException:
        reader.close()
        raise
    return reader


def _check_dtypes(reader: AsyncReader) -> None:
    if reader.config.postprocess is not None:
        return  # it may change dtypes
    for name, field in reader.config.batch_fields.items():
        layout = reader.layouts[name]
        dtype = field.delivered_dtype
        if dtype is None:
            dtype = layout.dtype.newbyteorder("=")
        _tensor(np.empty(0, dtype), name, f'{layout.file}: dataset "{layout.path}", ')


def _tensor(array: Any, name: str, where: str = "") -> Any:
    try:
        if isinstance(array, SampleArrays):
            return array.to_tensor()
        return tensor_of(array, torch.from_dlpack)
    except NoTensorError as error:
        raise DatasetError(f"{where}field {name!r}: {error}") from error
    except (BufferError, TypeError) as error:
        raise DatasetError(
            f"{where}field {name!r}: PyTorch has no dtype for {array.dtype}; choose other fields"
            " (a path may end in one member of a compound), or cast numbers by Field's dtype"
        ) from error
