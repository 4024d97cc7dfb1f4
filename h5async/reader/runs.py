"""Makes `Batch` objects, and epochs; lends the ring to the core for runs of batches that are alike.

The core hands over batches of a run in which only the arrays are made: most loops ask for nothing
else, and an object that is touched for the first time in a while costs a microsecond.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from h5async.deliver.slots import SlotRing
from h5async.errors import is_lack_of_memory, out_of_memory
from h5async.fill.outcomes import Answers, FillOutcome
from h5async.fill.submissions import Submissions
from h5async.order.sampling import FillRequest, Sampling
from h5async.order.schedule import Course
from h5async.read.turns import Numbers
from h5async.reader.batch import Batch
from h5async.reader.position import ReaderPosition
from h5async.reader.readersetup import ReaderSetup
from h5async.spelling import named

if TYPE_CHECKING:
    from h5async.process.helper import PostedBatches


class Batches:
    """Makes batches of filled slots. Does not keep the reader or its memory, but what it delivers.

    `ring` tells whether a batch is still in use.
    """

    def __init__(self, setup: ReaderSetup, ring: SlotRing[FillOutcome]) -> None:
        self.names, self._masks, self._device = setup.names, setup.masks, setup.device
        self._sequences, self._static = setup.samplings.sequences, setup.static
        self._ring = weakref.ref(ring)
        self.has_masks = bool(self._masks)

    def arrays(self, filled: FillOutcome, epoch: int) -> dict[str, Any]:
        """Return the arrays of a batch by name, and its masks."""
        names, masks = filled.names or self.names, self._masks
        made = filled.arrays[len(names) :]
        arrays = dict(zip(names, filled.arrays, strict=not made))
        if masks:
            if not made:
                made = tuple([mask(filled.index, epoch) for mask in masks.values()])
                made = self._device.owned(made)
            for name, mask in zip(masks, made, strict=True):
                arrays.setdefault(name, mask)  # `postprocess` may have replaced it
        return arrays

    def more(self, serial: int | None) -> tuple[Any, ...]:
        """Return the rest of the arguments of a `Batch`; without a `serial`, it lasts."""
        is_over = None if serial is None else _IsOver(self._ring, serial)
        return self._device, self._sequences, is_over, self._static

    def batch(
        self, filled: FillOutcome, epoch: int, number: int, last: bool, serial: int | None = None
    ) -> Batch:
        """Return a batch of views; without a `serial`, it lasts."""
        arrays = self.arrays(filled, epoch)
        return Batch(arrays, filled.index, epoch, number, last, *self.more(serial))


class _IsOver:
    """Tells whether the life of a batch in the memory of its slot is over."""

    def __init__(self, ring: Callable[[], SlotRing[Any] | None], serial: int) -> None:
        self._ring, self._serial = ring, serial

    def __call__(self) -> bool:
        ring = self._ring()
        return ring is not None and ring.consumer.held != self._serial


class Run:
    """Full batches which the core submits and hands over.

    Those of an epoch, but its last one; or of several epochs, where no loop ends with one.
    """

    def __init__(
        self,
        batches: Batches,
        course: Course,
        request: FillRequest,
        numbers: Numbers,
        sampling: Sampling,
        answers: Answers,
        slots: Sequence[tuple[Any, ...]],
    ) -> None:
        self.numbers = numbers
        self.epoch, self.number, self.place = request.epoch, request.number, course.place
        self._batches, self._course, self._sampling = batches, course, sampling
        self._answers, self._slots = answers, tuple(map(tuple, slots))  # the arrays of each
        names = None if batches.has_masks else batches.names
        self.views = names, self._slots, slice(0, numbers.size)

    def complete(self, batch: Batch, name: str, slot: int, serial: int) -> None:
        """Make something that a batch lacks: its numbers, its arrays, or all else."""
        try:
            self._complete(batch, name, slot, serial)
        except Exception as error:  # (a context would take longer than all this)
            if not is_lack_of_memory(error):
                raise
            raise out_of_memory(f"the batch with the number {serial}", error, _REMEDY) from error

    def _complete(self, batch: Batch, name: str, slot: int, serial: int) -> None:
        answer = self._answers[slot]
        if name == "index" and answer is not None and answer[0] == serial:
            batch.index = answer[1].index
            return
        course = self._course
        epoch, number, start = course.position(serial)
        if name == "_arrays":  # with masks, or where there was no memory for them
            arrays = tuple([array[: self.numbers.size] for array in self._slots[slot]])
            batch._arrays = self._batches.arrays(FillOutcome(batch.index, arrays), epoch)
            return
        if name == "index":
            batch.index = self._sampling.batch_at(epoch, start)
            return
        last = course.schedule.is_last(serial)
        batch.__init__(  # type: ignore[misc]  # it was made without
            batch._arrays, batch.index, epoch, number, last, *self._batches.more(serial)
        )


def next_run(
    batches: Batches,
    course: Course,
    ring: SlotRing[Any],
    submissions: Submissions | PostedBatches,
    slots: Any,
) -> Run | None:
    """Return the run of the next batches; None if they are not alike, or too few."""
    following = ring.consumer.next
    if course.given and max(course.given) >= following - 1:
        return None
    epoch, number, start = course.position(following)
    request = FillRequest(0, following, epoch, number, start, course.order)
    sampling = submissions.sampling(request)
    left = sampling.batches_from(epoch, start) - 1
    numbers = None
    if not isinstance(submissions, Submissions) and not ring.consumer.reads_ahead:
        numbers = submissions.endless(request)
    if numbers is None and left >= _LEAST:
        numbers = submissions.numbers(request, left)
    if numbers is None or numbers.stop - following < _LEAST:
        return None
    return Run(batches, course, request, numbers, sampling, submissions.answers, slots)


_LEAST = 8  # batches, so that it pays
_REMEDY = f"keep fewer batches, or make {named('batch_size')} smaller"


class Epoch(Iterator[Batch]):
    """The rest of one epoch; it ends if another loop has moved the reader on.

    Batches of given samples among its own are part of it. `get_next_batch` is the reader's, which
    it keeps alive. (A generator would end with the first error.)
    """

    def __init__(
        self,
        position: ReaderPosition,
        ring: SlotRing[FillOutcome],
        first: int,
        get_next_batch: Callable[[], Batch],
    ) -> None:
        self._position = position
        self._ring = ring
        self._place = position.course.place
        self._epochs = position.schedule.position(first).epoch, -1
        self._get_next_batch = get_next_batch

    def __next__(self) -> Batch:
        turns = self._ring.turns
        run = None if turns is None else turns.run
        if run is not None and run.epoch == self._epochs[0] and run.place is self._place:
            return self._get_next_batch()
        course, serial = self._position.course, self._ring.consumer.next
        if course.place is not self._place or course.position(serial).epoch not in self._epochs:
            self._position.looped_epoch = None
            raise StopIteration
        return self._get_next_batch()
