"""Defines `Batch`: the arrays of one minibatch, by field, and which samples they hold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from h5async.errors import BatchExpiredError, taking_memory
from h5async.order.sequences import SequenceTable
from h5async.spelling import named

if TYPE_CHECKING:
    from h5async.deliver.device import Device


class Batch(Sequence[Any]):
    """One minibatch: a sequence of arrays in field order, which are also reached by name.

    ``data, labels = batch``, ``batch["data"]`` and ``batch.data`` all give arrays of
    ``(size, *row)``: NumPy arrays on the CPU, CuPy arrays on a GPU. **The arrays live until the
    next** ``get_next_batch()``, or the next iteration of a ``for`` loop: then their memory is
    filled with another batch. `copy` gives a batch that lasts.

    Attributes
    ----------
    index
        int64 (size,): the sample numbers, in a NumPy array that lasts.
    epoch, number
        Which batch of which epoch this is; both count from 0.
    last
        Whether it is the last batch of its epoch.
    size
        Samples in the batch; the last one of an epoch may be short.

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

    __slots__ = ("_arrays", "_device", "_sequences", "epoch", "index", "last", "number", "size")

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
    ) -> None:
        self._device = device
        self._sequences = sequences
        self._arrays = arrays
        self.index = index
        self.epoch = epoch
        self.number = number
        self.last = last
        self.size: int = index.size

    @property
    def sequence(self) -> NDArray[np.int64]:
        """In which sequence each sample lies: int64 (size,), counted from 0 over all files."""
        return self.index * 0 if self._sequences is None else self._sequences.numbers(self.index)

    @property
    def step(self) -> NDArray[np.int64]:
        """Which row of its sequence each sample is: int64 (size,)."""
        return self.index if self._sequences is None else self._sequences.steps(self.index)

    def __len__(self) -> int:
        """Return the number of fields."""
        return len(self._arrays)

    def __getitem__(self, key: Any) -> Any:
        """Return the array of a field, by its name or its number; a slice gives a tuple."""
        if isinstance(key, str):
            return self._arrays[key]
        return tuple(self._arrays.values())[key]

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the arrays, in field order."""
        return iter(self._arrays.values())

    def __getattr__(self, name: str) -> Any:
        """Return the array of the field `name`."""
        try:
            return object.__getattribute__(self, "_arrays")[name]
        except KeyError:
            raise AttributeError(f"a batch of {', '.join(self._arrays)} has no {name!r}") from None

    def __dir__(self) -> list[str]:
        """List the fields, too, for completion in a notebook."""
        return sorted({*super().__dir__(), *filter(str.isidentifier, self._arrays)})

    def __repr__(self) -> str:
        """Describe the batch in a line."""
        where = f"Batch {self.number} of epoch {self.epoch}"
        if isinstance(self._arrays, _ExpiredArrays):
            return f"<{where}, expired>"
        fields = ", ".join(f"{name}={_shown(array)}" for name, array in self._arrays.items())
        return f"<{where}: {fields}>"

    def keys(self) -> list[str]:
        """Return the names of the fields, in order."""
        return list(self._arrays)

    def copy(self) -> Batch:
        """Return a batch with memory of its own (on a GPU: copied on the current stream)."""
        with nullcontext() if self._device is None else self._device.current():
            what = f"a copy of batch {self.number} of epoch {self.epoch}"
            with taking_memory(what, f"keep fewer batches, or make {named('batch_size')} smaller"):
                arrays = {name: array.copy() for name, array in self._arrays.items()}
        epoch, number, last = self.epoch, self.number, self.last
        return Batch(arrays, self.index, epoch, number, last, self._device, self._sequences)


def _shown(array: Any) -> str:
    """Return shape and dtype of an array, or what ragged samples say of themselves."""
    shape = getattr(array, "shape", None)
    return repr(array) if shape is None else f"{shape} {array.dtype}"


class _ExpiredArrays(dict[str, Any]):
    """What is left of the arrays of a batch whose life is over: their names."""

    def __init__(self, batch: Batch) -> None:
        super().__init__(dict.fromkeys(batch.keys()))
        self._what = f"batch {batch.number} of epoch {batch.epoch}"

    def _refuse(self, *_: object) -> NoReturn:
        raise BatchExpiredError(
            f"{self._what} was used after the next one had been asked for, when its memory is"
            " filled with other samples; use it before, or keep batch.copy()"
        )

    __getitem__ = values = items = _refuse


def expire(batch: Batch) -> None:
    """Make all uses of a batch's fields raise `BatchExpiredError`."""
    batch._arrays = _ExpiredArrays(batch)
