"""Defines `Batch`: the arrays of one minibatch, by field, and the samples that they hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from h5async.errors import BatchExpiredError, DatasetError, taking_memory
from h5async.samples.ragged import preview
from h5async.spelling import counted, named, table

if TYPE_CHECKING:
    from h5async.deliver.device import Device
    from h5async.order.rows import SequenceTable


_SHOWN = 6  # sample numbers shown in a notebook
_OVER = (
    "The life of this batch is over: the next one was asked for, and its memory is filled with"
    " other samples. batch.copy(), in time, gives a batch that lasts."
)


class Batch(Sequence[Any]):
    """One minibatch: a sequence of arrays in field order, also accessible by name.

    ``data, labels = batch``, ``batch["data"]`` and ``batch.data`` all give arrays of ``(size,
    *row)``: NumPy arrays on the CPU, CuPy arrays on a GPU. **The arrays live until the next**
    ``get_next_batch()``, or the next iteration of a ``for`` loop: then another batch is filled into
    their memory. `copy` returns a batch that lasts.

    Attributes
    ----------
    index
        int64 (size,): the sample numbers, in a NumPy array that lasts.
    epoch, number
        The batch's epoch, and its number in it; both count from 0.
    last
        Whether it is the last batch of its epoch.
    size
        Samples in the batch; the last one of an epoch may be short.
    static
        The values of fields with ``per="dataset"``, by name.

    Examples
    --------
    >>> with AsyncReader(hdf5_path="sample_data/digits.h5", batch_size=64) as reader:
    ...     batch = reader.get_next_batch()
    ...     data, labels = batch
    ...     kept = batch.copy()
    >>> kept.keys(), kept.size, kept.epoch, kept.number, kept.last
    (['data', 'labels'], 64, 0, 0, False)
    >>> kept.labels[:4], kept["labels"][:4], kept.index[:4]
    (array([0, 1, 2, 3]), array([0, 1, 2, 3]), array([0, 1, 2, 3]))
    """

    __slots__ = (
        *("_arrays", "_device", "_sequences"),
        *("epoch", "index", "last", "number", "size", "static"),
        "_is_over",
        "_later",  # of one that the core handed over: of what the rest is made when asked for
    )

    index: NDArray[np.int64]  # type: ignore[assignment]  # (a sequence's method of that name)

    def __init__(
        self,
        arrays: dict[str, Any],
        index: NDArray[np.int64],
        epoch: int,
        number: int,
        last: bool,
        device: Device | None = None,
        sequences: SequenceTable | None = None,
        is_over: Callable[[], bool] | None = None,
        static: Mapping[str, Any] | None = None,
    ) -> None:
        self.static = static or {}
        self._device = device
        self._is_over = is_over
        self._sequences = sequences
        self._arrays = arrays
        self.index = index
        self.epoch = epoch
        self.number = number
        self.last = last
        self.size: int = index.size

    @property
    def sequence(self) -> NDArray[np.int64]:
        """The sequence number of each sample: int64 (size,), counted from 0 over all files."""
        return self.index * 0 if self._sequences is None else self._sequences.numbers(self.index)

    @property
    def step(self) -> NDArray[np.int64]:
        """The row of each sample within its sequence: int64 (size,)."""
        return self.index if self._sequences is None else self._sequences.steps(self.index)

    def __len__(self) -> int:
        return len(self._arrays)

    def __getitem__(self, key: Any) -> Any:
        """Return the array of a field, by its name or number; a slice gives a tuple.

        Raises `DatasetError` for an unknown name.
        """
        if isinstance(key, str):
            if key not in self._arrays:
                raise DatasetError(f"a batch of {', '.join(self._arrays)} has no {key!r}")
            return self._arrays[key]
        return tuple(self._arrays.values())[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._arrays.values())

    def __getattr__(self, name: str) -> Any:
        if name in _MEMBERS:
            if name == "_later":
                raise AttributeError(name)
            run, slot, serial = self._later
            run.complete(self, name, slot, serial)
            return object.__getattribute__(self, name)
        arrays = self._arrays
        if name not in arrays:
            raise AttributeError(f"a batch of {', '.join(arrays)} has no {name!r}")
        return arrays[name]

    def __dir__(self) -> list[str]:
        """Add the fields, for completion in a notebook."""
        return sorted({*super().__dir__(), *filter(str.isidentifier, self._arrays)})

    def __getstate__(self) -> tuple[None, dict[str, Any]]:
        """Leave out what only a batch of a slot has."""
        return None, {name: getattr(self, name) for name in Batch.__slots__[:-2]} | {
            "_is_over": None
        }

    @property
    def _where(self) -> str:
        if self.epoch < 0:
            return "a batch of given samples"
        return f"batch {self.number} of epoch {self.epoch}"

    def __repr__(self) -> str:
        where = self._where.removeprefix("a ").capitalize()
        if isinstance(self._arrays, _ExpiredArrays):
            return f"<{where}, expired>"
        fields = ", ".join(f"{name}={_shown(array)}" for name, array in self._arrays.items())
        return f"<{where}: {fields}>"

    def _repr_html_(self) -> str:
        title = self._where.removeprefix("a ").capitalize()
        if isinstance(self._arrays, _ExpiredArrays) or (self._is_over and self._is_over()):
            return table(title, [], note=_OVER)
        device = "cpu" if self._device is None else self._device.name
        rows = [[name, *_cells(array)] for name, array in self._arrays.items()]
        numbers = ", ".join(map(str, self.index[:_SHOWN].tolist()))
        more = ", …" if self.size > _SHOWN else ""
        amount = f"{counted(self.size, 'sample')} on {device}"
        return table(
            title,
            rows,
            subtitle=f"{amount}, the last one" if self.last else amount,
            head=("field", "shape", "dtype", "first sample"),
            note=f"sample numbers: {numbers}{more}" if self.size else "",
        )

    def keys(self) -> list[str]:
        """Return the names of the fields, in order."""
        return list(self._arrays)

    def copy(self) -> Batch:
        """Return a batch that owns its memory (on a GPU: copied on the current stream)."""
        with nullcontext() if self._device is None else self._device.current():
            what = f"a copy of {self._where}"
            with taking_memory(what, f"keep fewer batches, or make {named('batch_size')} smaller"):
                arrays = {name: array.copy() for name, array in self._arrays.items()}
        place = self.epoch, self.number, self.last
        more = self._device, self._sequences
        return Batch(arrays, self.index, *place, *more, static=self.static)


_MEMBERS = frozenset(Batch.__slots__)


def _cells(array: Any) -> tuple[str, str, str]:
    shape = getattr(array, "shape", None)
    if shape is None or not hasattr(array, "ndim"):  # ragged or sparse
        return f"{len(array):,} {type(array).__name__}", str(array.dtype), preview(array)
    return str(tuple(shape)), str(array.dtype), preview(array)


def _shown(array: Any) -> str:
    shape = getattr(array, "shape", None)
    return repr(array) if shape is None else f"{shape} {array.dtype}"


class _ExpiredArrays(dict[str, Any]):
    """The names of the arrays of an expired batch."""

    def __init__(self, batch: Batch) -> None:
        super().__init__(dict.fromkeys(batch.keys()))
        self._what = batch._where

    def _refuse(self, *_: object) -> NoReturn:
        raise BatchExpiredError(
            f"{self._what} was used after the next one had been asked for, when its memory is"
            " filled with other samples; use it before, or keep batch.copy()"
        )

    __getitem__ = values = items = _refuse


def expire(batch: Batch) -> None:
    """Make all uses of a batch's fields raise `BatchExpiredError`."""
    batch._arrays = _ExpiredArrays(batch)
