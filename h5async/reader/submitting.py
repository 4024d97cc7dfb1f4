"""Assigns free slots to requested batches, if the core fills them without Python.

They are submitted in the consumer's thread, and the ring is told how to see that they are ready.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from h5async.deliver.slots import Assignment, SlotRing
from h5async.fill.outcomes import FillOutcome
from h5async.fill.submissions import Submissions
from h5async.order.sampling import FillRequest
from h5async.system.timeline import Recorder

# Returns the requests for assigned slots.
Requests = Callable[[Sequence[Assignment]], Sequence[FillRequest]]


class Submitter:
    """Submits batches in the consumer's thread, or with `begin_in_worker` in another one."""

    def __init__(
        self, ring: SlotRing[FillOutcome], submissions: Submissions, recorder: Recorder
    ) -> None:
        self._ring = ring
        self._recorder = recorder
        self._submissions = submissions
        self._may_have_lost = False  # an assignment is not submitted yet
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
        """Do the same in a thread that no signal handler interrupts."""
        # Under the ring's lock: a batch that is dropped meanwhile must not be submitted.
        with self._ring.lock:
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
        """Forget the error of a batch, which is being raised."""
        self._submissions.drop_error(serial)
