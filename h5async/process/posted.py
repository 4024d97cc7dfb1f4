"""Has batches filled by helper processes, and the consumer take them in one call of the core.

The consumer, or the core in its place (`read/queue.py`), puts batches into a queue of the core, and
the thread that sends requests takes them from there. An answer makes its batch ready there, unless
it is an error or has something to tell: that goes through the ring.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from h5async.core.binding import Core
from h5async.fill.outcomes import Answers, FillOutcome
from h5async.opening.dataset import Samplings
from h5async.order.sampling import FillRequest, Sampling
from h5async.order.selection import Int64s
from h5async.read.coretables import Scratch
from h5async.read.queue import END, TICKET, BatchQueue, Numbers, SlotBatch, Turns

_ENDLESS = 1 << 48  # batches


class PostedBatches:
    """Batches that helpers fill, used as `Submissions` are. Safe to use from many threads.

    Each of the slots has room for `rows` samples. `request_of` returns the request for a slot and
    serial that `turns` has submitted.
    """

    def __init__(self, core: Core, samplings: Samplings, rows: int, num_slots: int) -> None:
        self._core, self._samplings = core, samplings
        batches = [SlotBatch(core.BatchPlan(), (core.Target * 0)(), rows, None)] * num_slots
        queue = self._queue = BatchQueue(core, None, batches, 1, samplings.selection)
        # As of the queue.
        self.drop, self.events, self.wait = queue.drop, queue.events, queue.wait
        self.wake, self.put_ticket, self.end = queue.wake, queue.put_ticket, queue.end
        self._scratch = Scratch.allocate(1, 1, 1)  # which the core asks for, and does not use
        self._requests: list[FillRequest | None] = [None] * num_slots  # the last submitted ones
        self.answers: Answers = [None] * num_slots  # the last ones
        self.index = partial(_index, self.answers)  # as of `Submissions`
        self.request_of: Callable[[int, int], FillRequest] | None = None
        self.turns: Turns | None = None

    # --- the consumer's calls ---------------------------------------------------------------------

    def open_turns(self, batch: type, _: int) -> Turns:
        """Return the turns of the consumer in the core."""
        self.turns = Turns(self._core, self._queue, self._scratch, batch, is_alone=False)
        return self.turns

    def sampling(self, request: FillRequest) -> Sampling:
        """Return the order that a request refers to."""
        return self._samplings.at(request.order)

    def numbers(self, request: FillRequest, count: int) -> Numbers | None:
        """Return the numbers of batches alike, but not those of their samples."""
        sampling, first = self.sampling(request), request.serial
        if type(sampling) is not Sampling:
            return None
        return Numbers(first, first + count, 0, 0, sampling.batch_size)

    def endless(self, request: FillRequest) -> Numbers | None:
        """Return those of this epoch and all later ones; None if not all batches are full."""
        sampling, epoch, serial = self.sampling(request), request.epoch, request.serial
        if type(sampling) is not Sampling or not sampling.is_uniform:
            return None
        left, count = sampling.batches_from(epoch, request.start), sampling.num_batches
        for begin, most in (request.start, left), (0, count):
            first, end = sampling.dealt_at(epoch, sampling.step_at(epoch, begin, most - 1)[1])
            if end - first < sampling.batch_size:
                return None
        numbers = Numbers(serial, serial + _ENDLESS, 0, 0, sampling.batch_size)
        return numbers._replace(epoch_end=serial + left, epoch_batches=count)

    def submit(self, request: FillRequest) -> None:
        """Have a batch filled. Never blocks; submitting it again has no effect."""
        self._requests[request.slot] = request
        self._queue.submit(request.slot, request.serial, 0, 0, None, None, None, False)

    def result(self, slot: int, serial: int) -> FillOutcome | None:
        """Return a batch that a helper has filled; None if it is not ready."""
        answers = self.answers
        if self._queue.ready(slot, serial, 0) is None or not answers:  # it was closed meanwhile
            return None
        answer = answers[slot]
        return None if answer is None else answer[1]

    def drop_error(self, serial: int) -> None:
        """Do nothing: the ring has the errors."""

    # --- the helpers' threads ---------------------------------------------------------------------

    def take(self) -> Sequence[FillRequest] | None:
        """Wait for requests, or for `put_ticket`; return None at the end."""
        found = self._queue.next(self._scratch)
        if found in (END, TICKET):
            return None if found == END else ()
        request, serial = self._requests[found], self._queue.serial(found)
        if request is None or request.serial != serial:
            assert self.request_of is not None
            request = self.request_of(found, serial)
        return (request,)

    def finish(self, request: FillRequest, outcome: FillOutcome) -> bool:
        """Make a batch ready; return False if the ring has to be told of it."""
        is_plain = outcome.error is None and not outcome.warnings and not outcome.skipped
        self.answers[request.slot] = (request.serial, outcome) if is_plain else None
        self._queue.finish(request.slot, request.serial, is_ready=is_plain)
        return is_plain

    def close(self) -> None:
        """Release memory and functions; no thread will call it any more."""
        self._queue.close()
        self.answers, self._requests = [], []
        self.request_of = self.turns = None


def _index(answers: Answers, slot: int, serial: int, _: int) -> Int64s | None:
    answer = answers[slot]
    return answer[1].index if answer is not None and answer[0] == serial else None
