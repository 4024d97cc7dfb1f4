"""Defines `Batch`, the arrays of one minibatch by field; creates batches and epochs.

For runs of similar batches, the ring is lent to the core. A batch that the core hands over has only
its arrays at first, and gets the rest on access: most loops need nothing else, and touching an
object for the first time in a while costs a microsecond.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from h5async.deliver.device import Device
from h5async.deliver.slots import SlotRing
from h5async.errors import (
    BatchExpiredError,
    DatasetError,
    is_lack_of_memory,
    out_of_memory,
    taking_memory,
)
from h5async.fill.outcomes import FillOutcome
from h5async.fill.submissions import Submissions
from h5async.order.rows import SequenceTable
from h5async.order.sampling import OF_GIVEN, Course, FillRequest, Sampling
from h5async.read.queue import RunEpochs, Turns
from h5async.reader.position import ReaderPosition
from h5async.reader.readersetup import ReaderSetup
from h5async.samples.assembly import SlotMemory
from h5async.samples.ragged import preview
from h5async.spelling import counted, named, table

if TYPE_CHECKING:
    from h5async.process.helper import PostedBatches


_SHOWN = 6  # sample numbers shown in a notebook
_LEAST = 8  # batches that a run must have to pay off
_OUTSIDE = -1, -1, False  # epoch, number and whether it is the last, of a batch outside of epochs
_REMEDY = f"keep fewer batches, or make {named('batch_size')} smaller"
_OVER = (
    "The life of this batch is over: the reader has moved on to the next one, and its memory is"
    " reused for other samples. Call batch.copy() before that to keep a batch."
)


class Batch(Sequence[Any]):
    """One minibatch: a sequence of arrays in field order, also accessible by name.

    ``data, labels = batch``, ``batch["data"]`` and ``batch.data`` all give arrays of ``(size,
    *row)``: NumPy arrays on the CPU, CuPy arrays on a GPU. **The arrays live until the next**
    ``get_next_batch()``, or the next iteration of a ``for`` loop: then another batch is filled into
    their memory. `copy` returns a batch that stays valid.

    Attributes
    ----------
    index
        int64 (size,): the sample numbers, in a NumPy array that stays valid.
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
        *("_made", "_device", "_sequences"),  # arrays by name; None: not created yet
        *("epoch", "index", "last", "number", "size", "static"),
        "_is_over",
        "_later",  # of a batch from the core: run, slot, serial, number in the run
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
        self._made: dict[str, Any] | None = arrays
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

    def _arrays(self) -> dict[str, Any]:
        if self._made is None:
            run, slot, serial, number = self._later
            self._made = run.deliver(serial, self.size)
            if self._made is None:
                run.complete(self, "_made", slot, serial, number)
            assert self._made is not None
        return self._made

    def __len__(self) -> int:
        return len(self._arrays())

    def __getitem__(self, key: Any) -> Any:
        """Return the array of a field, by its name or number; a slice gives a tuple.

        Raises `DatasetError` for an unknown name.
        """
        arrays = self._made or self._arrays()
        if isinstance(key, str):
            if key not in arrays:
                raise DatasetError(f"a batch of {', '.join(arrays)} has no {key!r}")
            return arrays[key]
        return tuple(arrays.values())[key]

    def __iter__(self) -> Iterator[Any]:
        return iter((self._made or self._arrays()).values())

    def __getattr__(self, name: str) -> Any:
        if name in _MEMBERS:
            if name == "_later":
                raise AttributeError(name)
            run, *place = self._later
            run.complete(self, name, *place)
            return object.__getattribute__(self, name)
        arrays = self._made or self._arrays()
        if name not in arrays:
            raise AttributeError(f"a batch of {', '.join(arrays)} has no {name!r}")
        return arrays[name]

    def __dir__(self) -> list[str]:
        """Add the fields, for completion in a notebook."""
        return sorted({*super().__dir__(), *filter(str.isidentifier, self._arrays())})

    def __getstate__(self) -> tuple[None, dict[str, Any]]:
        """Omit `_is_over` and `_later`, which only a batch in a slot has."""
        kept = {name: getattr(self, name) for name in Batch.__slots__[:-2]}
        return None, kept | {"_made": self._arrays(), "_is_over": None}

    @property
    def _where(self) -> str:
        return _where(self.epoch, self.number)

    def __repr__(self) -> str:
        where = self._where.removeprefix("a ").capitalize()
        if isinstance(self._arrays(), _ExpiredArrays):
            return f"<{where}, expired>"
        fields = ", ".join(f"{name}={_shown(array)}" for name, array in self._arrays().items())
        return f"<{where}: {fields}>"

    def _repr_html_(self) -> str:
        title = self._where.removeprefix("a ").capitalize()
        if isinstance(self._arrays(), _ExpiredArrays) or (self._is_over and self._is_over()):
            return table(title, [], note=_OVER)
        device = "cpu" if self._device is None else self._device.name
        rows = [[name, *_cells(array)] for name, array in self._arrays().items()]
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
        return list(self._arrays())

    def copy(self) -> Batch:
        """Return a batch that owns its memory (on a GPU: copied on the current stream)."""
        with nullcontext() if self._device is None else self._device.current():
            what = f"a copy of {self._where}"
            with taking_memory(what, _REMEDY):
                arrays = {name: array.copy() for name, array in self._arrays().items()}
        place = self.epoch, self.number, self.last
        more = self._device, self._sequences
        return Batch(arrays, self.index, *place, *more, static=self.static)


_MEMBERS = frozenset(Batch.__slots__)


def _where(epoch: int, number: int) -> str:
    return "a batch of given samples" if epoch < 0 else f"batch {number} of epoch {epoch}"


def _cells(array: Any) -> tuple[str, str, str]:
    shape = getattr(array, "shape", None)
    if shape is None or not hasattr(array, "ndim"):  # ragged or sparse
        return f"{len(array):,} {type(array).__name__}", str(array.dtype), preview(array)
    return str(tuple(shape)), str(array.dtype), preview(array)


def _shown(array: Any) -> str:
    shape = getattr(array, "shape", None)
    return repr(array) if shape is None else f"{shape} {array.dtype}"


class _ExpiredArrays(dict[str, Any]):
    """Stands in for the arrays of an expired batch, and only has their names."""

    def __init__(self, names: Iterable[str], what: str) -> None:
        super().__init__(dict.fromkeys(names))
        self._what = what

    def _refuse(self, *_: object) -> NoReturn:
        raise BatchExpiredError(
            f"{self._what} was used after the reader had moved on to the next one, when its memory"
            " is reused for other samples; use it before that, or keep batch.copy()"
        )

    __getitem__ = values = items = _refuse


def expire(batch: Batch) -> None:
    """Make all uses of a batch's fields raise `BatchExpiredError`."""
    batch._made = _ExpiredArrays(batch.keys(), batch._where)


# --- creating batches -----------------------------------------------------------------------------


class Batches:
    """Creates batches from filled slots, without keeping the reader or its slots alive.

    `ring`, held by a weak reference, tells whether a batch is still in use.
    """

    def __init__(self, setup: ReaderSetup, ring: SlotRing[FillOutcome]) -> None:
        self.names, self.masks, self._device = setup.names, setup.masks, setup.device
        self._sequences, self._static = setup.samplings.sequences, setup.static
        self._ring = weakref.ref(ring)
        self.has_masks = bool(self.masks)

    def arrays(self, filled: FillOutcome, epoch: int) -> dict[str, Any]:
        """Return the arrays of a batch by name, including its masks."""
        names, masks = filled.names or self.names, self.masks
        made = filled.arrays[len(names) :]
        arrays = dict(zip(names, filled.arrays, strict=not made))
        if masks:
            if not made:
                made = tuple([mask(filled.index, epoch) for mask in masks.values()])
                made = self._device.owned(made)
            for name, mask in zip(masks, made, strict=True):
                arrays.setdefault(name, mask)  # `postprocess` may have replaced it
        return arrays

    def is_over(self, serial: int) -> bool:
        """Tell whether a batch has expired."""
        return _IsOver(self._ring, serial)()

    def more(self, serial: int | None) -> tuple[Any, ...]:
        """Return the other arguments of `Batch`; without a `serial`, it never expires."""
        is_over = None if serial is None else _IsOver(self._ring, serial)
        return self._device, self._sequences, is_over, self._static

    def complete(self, batch: Batch, _: str) -> None:
        """Set all missing members of a batch made by `Turns.read`; see `Run.complete`."""
        batch.__init__(batch._arrays(), batch.index, *_OUTSIDE, *self.more(None))  # type: ignore[misc]

    def batch(
        self, filled: FillOutcome, epoch: int, number: int, last: bool, serial: int | None = None
    ) -> Batch:
        """Return a batch of views; without a `serial`, it never expires."""
        arrays = self.arrays(filled, epoch)
        return Batch(arrays, filled.index, epoch, number, last, *self.more(serial))


class _IsOver:
    """Tells whether a batch in the memory of a slot has expired."""

    def __init__(self, ring: Callable[[], SlotRing[Any] | None], serial: int) -> None:
        self._ring, self._serial = ring, serial

    def __call__(self) -> bool:
        ring = self._ring()
        return ring is not None and ring.consumer.held != self._serial


class Run:
    """Consecutive batches, of one or more epochs, that the core submits and hands over."""

    def __init__(
        self,
        batches: Batches,
        course: Course,
        request: FillRequest,
        epochs: RunEpochs,
        sampling: Sampling,
        submissions: Submissions | PostedBatches,
        turns: Turns,
        slots: Sequence[SlotMemory],
    ) -> None:
        self.epochs, self.place = epochs, course.place
        self.epoch, self.number = request.epoch, request.number
        self._batches, self._course, self._sampling = batches, course, sampling
        gone = sum(other < request.serial for other in course.schedule.others)
        self._schedule = course.schedule.with_others(gone, ())
        self._index_of, self._arrays_of = submissions.index, submissions.arrays
        self.deliver = turns.deliver  # returns a batch's arrays; None: `complete` has to
        self._slots = slots
        views = [submissions.views(number, slot) for number, slot in enumerate(slots)]
        names = None if batches.has_masks or None in views else batches.names
        self.views = names, tuple(views), slice(0, epochs.size)

    def course_after(self, gone: int, given: dict[int, NDArray[np.int64]]) -> Course:
        """Return the course after `gone` batches of given samples; `given` are the rest."""
        if not gone and not given:
            return self._course
        schedule = self._schedule.with_others(gone, given)
        return self._course._replace(schedule=schedule, given=given)

    def complete(self, batch: Batch, name: str, slot: int, serial: int, number: int) -> None:
        """Set a missing member of a batch: `index`, its arrays, or otherwise all the rest.

        `number` is the batch's number in the run, -1 if its samples are given.
        """
        try:
            self._complete(batch, name, slot, serial, number)
        except Exception as error:  # (a context manager would take longer than all of this)
            if not is_lack_of_memory(error):
                raise
            raise out_of_memory(f"the batch with the number {serial}", error, _REMEDY) from error

    def _complete(self, batch: Batch, name: str, slot: int, serial: int, in_run: int) -> None:
        index = self._index_of(slot, serial, batch.size) if name == "index" else None
        if index is not None:
            batch.index = index
            return
        epoch, number, start = OF_GIVEN if in_run < 0 else self._schedule.position(in_run)
        if name == "_made":  # it has masks, or has expired, or memory ran out
            if self._batches.is_over(serial):
                names = *self._batches.names, *self._batches.masks
                batch._made = _ExpiredArrays(names, _where(epoch, number))
                return
            arrays = self._arrays_of(self._slots[slot], batch.index)
            batch._made = self._batches.arrays(FillOutcome(batch.index, arrays), epoch)
            return
        if name == "index":
            batch.index = self._sampling.batch_at(epoch, start)
            return
        last = in_run >= 0 and self._schedule.is_last(in_run)
        batch.__init__(  # type: ignore[misc]  # the core skipped it
            batch._arrays(), batch.index, epoch, number, last, *self._batches.more(serial)
        )


def next_run(
    batches: Batches,
    course: Course,
    ring: SlotRing[Any],
    submissions: Submissions | PostedBatches,
    turns: Turns,
    slots: Sequence[SlotMemory],
) -> Run | None:
    """Return the run of the next batches; None if they are not similar, or too few."""
    following = ring.consumer.next
    epoch, number, start = course.schedule.position(following)
    request = FillRequest(0, following, epoch, number, start, course.order)
    sampling = submissions.sampling(request)
    epochs = submissions.run_from(request)
    if epochs is None or epochs.stop - following < _LEAST:
        return None
    return Run(batches, course, request, epochs, sampling, submissions, turns, slots)


class Epoch(Iterator[Batch]):
    """Iterates over the rest of one epoch; ends if another loop has moved the reader on.

    Batches of given samples among its own are included. `get_next_batch` is the reader's bound
    method, which keeps the reader alive. (A generator would end at the first error.)
    """

    def __init__(
        self,
        position: ReaderPosition,
        ring: SlotRing[FillOutcome],
        epoch: int,
        get_next_batch: Callable[[], Batch],
        run: Run | None = None,
    ) -> None:
        self._position = position
        self._ring = ring
        self._place = position.course.place if run is None else run.place
        self._epochs = epoch, -1
        self._get_next_batch = get_next_batch
        self._turns = ring.turns
        # The epoch ends at `_stop` (of `next_in_run`) while its run lasts.
        self._run, self._stop = run, 0
        if run is not None:
            self._stop = run.epochs.end_of(epoch - run.epoch)

    def __next__(self) -> Batch:
        turns, mine = self._turns, self._run
        run = None if turns is None else turns.run
        if run is mine is not None:
            assert turns is not None
            is_over = turns.struct.next_in_run >= self._stop
        else:
            course, serial = self._position.course, self._ring.consumer.next
            is_over = course.place is not self._place
            is_over = is_over or course.position(serial).epoch not in self._epochs
            if not is_over and run is not None:
                self._run = run
                self._stop = run.epochs.end_of(self._epochs[0] - run.epoch)
        if is_over:
            self._position.looped_epoch = None
            raise StopIteration
        return self._get_next_batch()
