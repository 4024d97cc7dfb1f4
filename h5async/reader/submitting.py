"""Gives free slots to the batches that were asked for, where the core fills them alone.

The ring says which slots are free, and the caller which batches they get. These are submitted in
the thread of the consumer, and the ring is told how to see that they are ready.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from h5async.deliver.slotrecords import Assignment
from h5async.deliver.slots import SlotRing
from h5async.fill.outcomes import FillOutcome
from h5async.fill.submissions import Submissions
from h5async.order.requests import FillRequest
from h5async.system.timeline import Recorder

# Returns what the slots of some assignments are to be filled with.
Requests = Callable[[Sequence[Assignment]], Sequence[FillRequest]]


class Submitter:
    """Submits batches. All but `begin_in_worker` are the consumer's calls.

    Parameters
    ----------
    ring
        The ring of slots.
    submissions
        Where batches are submitted.
    recorder
        Is told when that is done.
    """

    def __init__(
        self, ring: SlotRing[FillOutcome], submissions: Submissions, recorder: Recorder
    ) -> None:
        self._ring = ring
        self._recorder = recorder
        self._submissions = submissions
        self._may_have_lost = False  # an assignment that was made is not submitted yet
        ring.completions = submissions

    def begin(self, requests: Requests) -> None:
        """Submit batches for free slots; after an exception in here, the next call does it."""
        may_have_lost = self._may_have_lost
        self._may_have_lost = True
        assignments = self._ring.assign()
        if may_have_lost:
            assignments = self._ring.pending()
        if assignments:
            self._submit(requests, assignments)
        self._may_have_lost = False

    def begin_in_worker(self, requests: Requests) -> None:
        """Do the same in a thread that no exception interrupts."""
        # At once: a batch that is dropped in between must not be submitted afterwards.
        with self._ring.unchanged():
            self._submit(requests, self._ring.assign())

    def _submit(self, requests: Requests, assignments: Sequence[Assignment]) -> None:
        timeline = self._recorder.timeline
        begin_ns = 0 if timeline is None else time.perf_counter_ns()
        several = requests(assignments)
        for request in several:
            self._submissions.submit(request)
        if timeline is not None and several:
            timeline.fetched(begin_ns, several)

    def drop_error(self, serial: int) -> None:
        """Forget the error of a batch, which is raised now."""
        self._submissions.drop_error(serial)
