"""Fetches the data of far sources (not local files) ahead of the slots, in threads just for that.

The byte ranges of a batch enter; they leave in memory, with a table by which the core finds them.
As the order of samples is known, ranges of later batches are fetched before these are requested, as
memory permits. Data that several batches need is fetched once, and kept until the last of them has
read it. Threads of the pool never wait here: a callback comes when a batch's ranges are complete.
"""

from __future__ import annotations

import heapq
import itertools
import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from h5async.fill.pool import Work, Workers, do_nothing
from h5async.order.sampling import FillRequest
from h5async.plan.records import ByteRanges, Places, extents_of, requests_of, union
from h5async.read.farsources import FarSources, FetchCounts, Held
from h5async.system.timeline import Recorder

Then = Callable[["Held | BaseException"], None]

_GROUP_NBYTES = 1 << 20  # about the most that a thread requests from the client at once
_FIRST_THREADS = 4
_MOST_AHEAD = 1024  # batches that are planned ahead
_MOST_BEHIND = 64
_LITTLE_NBYTES, _MOST_AT_ONCE = 512 * 1024, 64  # limits of batches that are planned together


@dataclass(eq=False, slots=True)
class _Request:
    """A range that is fetched as one; it covers one or more ranges that batches read.

    `begin` is a place among the concatenated sources; `serial` is of the first batch to need it.
    """

    serial: int
    begin: int
    nbytes: int
    source: int
    offset: int
    users: int = 0
    is_alone: bool = False  # must not be grouped: a group with it has failed
    data: NDArray[np.uint8] | None = None
    holders: list[_Holder] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class _Holder:
    """The ranges of a batch, and the requests for them; `then` is called with the result."""

    ranges: ByteRanges
    then: Then | None = None
    requests: list[_Request] = field(default_factory=list)
    missing: int = 0
    error: BaseException | None = None
    begin_ns: int = 0


class _Staged:
    """Requests, sorted by where they begin."""

    def __init__(self, places: Places) -> None:
        self._places = places
        self.requests: NDArray[Any] = np.zeros(0, object)
        self._begins = self._ends = np.zeros(0, np.int64)
        self.nbytes = 0

    def find(self, ranges: ByteRanges) -> NDArray[np.int64]:
        """Return the number of the request that covers each range, or -1."""
        return ranges.find(self._begins, self._ends)

    def request(self, serial: int, ranges: ByteRanges) -> list[_Request]:
        """Add and return requests for the ranges that no request covers yet."""
        new = ranges.chosen(self.find(ranges) < 0)
        # `find` goes by where requests begin, so a new one must not extend around existing ones.
        extents = extents_of(new, requests_of(new, np.searchsorted(self._begins, new.begins)))
        begins, ends = extents
        columns = begins, ends - begins, *self._places.sources(begins)
        several = zip(*(column.tolist() for column in columns), strict=True)
        made = [_Request(serial, *numbers) for numbers in several]
        at = np.searchsorted(self._begins, begins, "right")
        self.requests = np.insert(self.requests, at, np.array(made, object))
        self._begins, self._ends = (
            np.insert(self._begins, at, begins),
            np.insert(self._ends, at, ends),
        )
        self.nbytes += extents.nbytes
        return made

    def drop(self, several: Sequence[_Request]) -> None:
        """Forget those requests that no batch needs."""
        gone = [one for one in several if not one.users]
        at = np.searchsorted(self._begins, [one.begin for one in gone]).tolist()
        for i, one in enumerate(gone):
            self.nbytes -= one.nbytes
            one.data = None
            while self.requests[at[i]] is not one:  # several may begin at the same place
                at[i] += 1
        self.requests = np.delete(self.requests, at)
        self._begins, self._ends = np.delete(self._begins, at), np.delete(self._ends, at)


class Fetcher(Workers):
    """Fetches the ranges of batches, by their serial numbers. Safe to use from many threads.

    At most `requests_in_flight` are on their way, and at most `fetch_nbytes` bytes are kept or
    requested ahead; a batch whose turn has come is fetched whatever its size.

    `plan` returns the ranges that a request will read, and `following` the request after it, in
    order; both return None if that is not known. `submit` has threads of the pool do some work, in
    the order of serial numbers; `recorder` records requests.
    """

    def __init__(
        self,
        far: FarSources,
        requests_in_flight: int,
        fetch_nbytes: int,
        plan: Callable[[FillRequest], ByteRanges | None],
        following: Callable[[FillRequest], FillRequest | None],
        submit: Callable[[int, Sequence[Work]], None],
        recorder: Recorder,
    ) -> None:
        super().__init__()
        self._recorder = recorder
        self._far, self._submit = far, submit
        self._most_requests, self._most_nbytes = requests_in_flight, fetch_nbytes
        self._plan, self._following = plan, following
        self._tickets = queue.SimpleQueue[bool]()
        self._idle = self._in_flight = 0
        self._order = itertools.count()
        self._staged = _Staged(far.places)
        self._pending: list[tuple[int, int, _Request]] = []
        self._holders: dict[int, _Holder] = {}  # of requested batches
        self._ahead: dict[int, tuple[FillRequest, _Holder]] = {}
        self._next: FillRequest | None = None  # the next to be planned ahead
        self._planned_nbytes = 0  # staged by the last planning
        self._is_planning = False
        self._what = ""

    def start(self, what: str) -> None:
        """Start threads; see `Workers`. More are started when needed."""
        self._what = what
        self._start_threads(min(_FIRST_THREADS, self._most_requests))

    # --- the pool's calls -------------------------------------------------------------------------

    def want(self, request: FillRequest, ranges: ByteRanges, then: Then) -> None:
        """Fetch the ranges of a batch; call `then` with them, or with an error. Never blocks.

        A later call for the same batch releases the ranges of the earlier one.
        """
        holder = _Holder(ranges)
        with self._lock:
            if self.is_stopped:
                return
            self._hold(request.serial, holder)
        self._give(request, holder, then, is_new=True)

    def want_planned(self, request: FillRequest, then: Then) -> bool:
        """Do the same with the ranges that were planned ahead; return False if there are none."""
        with self._lock:
            expected, holder = self._ahead.get(request.serial, (request, None))
            if holder is None or not _are_alike(expected, request):
                return False
            del self._ahead[request.serial]
            if holder.error is not None:  # it may be temporary, so fetch again
                self._release(holder)
                return False
        self._give(request, holder, then, is_new=False)
        return True

    def _give(self, request: FillRequest, holder: _Holder, then: Then, is_new: bool) -> None:
        with self._lock:
            before = self._holders.get(request.serial)
            self._holders[request.serial] = holder
            holder.then, holder.begin_ns = then, time.perf_counter_ns()
            if before is not None:
                self._release(before)
            else:
                self._follow(request, is_new)
            is_there = holder.missing == 0
            new = len(self._pending)
        self._wake_for(new)
        self._plan_next()
        if is_there:
            self._finish(holder)

    def has(self, serial: int) -> bool:
        """Tell whether a batch is being fetched ahead, so that it must come here for its data."""
        return serial in self._ahead

    def end(self, serial: int) -> None:
        """Release the data of a batch. Never blocks; extra calls are harmless."""
        with self._lock:
            holder = self._holders.pop(serial, None)
            if holder is not None:
                self._release(holder)
        if holder is not None:
            self._plan_next()

    def _follow(self, request: FillRequest, is_new: bool) -> None:
        """Continue to plan ahead, or start after this request if it `is_new`. Holds the lock."""
        ahead = self._ahead.pop(request.serial, None)
        if ahead is not None and not _are_alike(ahead[0], request):
            for _, holder in self._ahead.values():
                self._release(holder)
            self._ahead.clear()
            self._next = None
        # (Not all older ones: batches that are requested together come here in any order.)
        for serial in [one for one in self._ahead if one < request.serial - _MOST_BEHIND]:
            self._release(self._ahead.pop(serial)[1])
        if ahead is not None:
            self._release(ahead[1])
        if is_new if self._next is None else self._next.serial <= request.serial:
            self._next = self._following(request)

    # --- requests ---------------------------------------------------------------------------------

    def _hold(self, serial: int, holder: _Holder) -> None:
        """Assign requests to a batch: existing ones, and new ones for the rest. Holds the lock."""
        self._request(serial, holder.ranges)
        found = np.unique(self._staged.find(holder.ranges))
        assert not found.size or found[0] >= 0
        holder.requests = self._staged.requests[found].tolist()
        for one in holder.requests:
            one.users += 1
            if one.data is None:
                one.holders.append(holder)
                holder.missing += 1

    def _request(self, serial: int, ranges: ByteRanges) -> list[_Request]:
        return self._push(self._staged.request(serial, ranges))

    def _push(self, requests: list[_Request]) -> list[_Request]:
        for one in requests:
            heapq.heappush(self._pending, (one.serial, next(self._order), one))
        return requests

    def _release(self, holder: _Holder) -> None:
        """Release the requests of a batch. Holds the lock."""
        for one in holder.requests:
            one.users -= 1
        self._staged.drop(holder.requests)
        holder.requests, holder.then = [], None

    # --- threads ----------------------------------------------------------------------------------

    def _wake_for(self, count: int) -> None:
        with self._lock:
            have, idle = len(self._threads), self._idle
        more = min(self._most_requests - have, count - idle)
        if more > 0 and self._what:
            self._start_threads(more)
        for _ in range(min(count, have)):
            self._tickets.put(True)

    def _start_threads(self, count: int) -> None:
        numbers = range(len(self._threads), len(self._threads) + count)
        self._start({f"fetch_{number}": self._work for number in numbers}, self._what)

    def _wake(self) -> None:
        self._pending.clear()
        for _ in range(len(self._threads) + self._most_requests):
            self._tickets.put(False)

    def _work(self) -> None:
        while True:
            while group := self._take():
                self._get(group)
            with self._lock:
                self._idle += 1
            goes_on = self._tickets.get()
            with self._lock:
                self._idle -= 1
            if not goes_on:
                return

    def _take(self) -> list[_Request]:
        """Return the most urgent requests that go to the same source."""
        group: list[_Request] = []
        nbytes = 0
        with self._lock:
            room = self._most_requests - self._in_flight
            while self._pending and len(group) < room:
                request = self._pending[0][2]
                most = self._far.at_once(request.source)
                if group and (
                    request.is_alone
                    or group[0].is_alone
                    or request.source != group[0].source
                    or nbytes > _GROUP_NBYTES
                    or len(group) >= most
                ):
                    break
                heapq.heappop(self._pending)
                if request.users:
                    group.append(request)
                    nbytes += request.nbytes
            self._in_flight += len(group)
        return group

    def _get(self, group: list[_Request]) -> None:
        found: list[NDArray[np.uint8]] = []
        error: BaseException | None = None
        first, begin_ns = group[0], time.perf_counter_ns()
        try:
            wanted = [one.offset for one in group], [one.nbytes for one in group]
            found = self._far.get(first.source, *wanted)
        except BaseException as raised:
            error = raised
        if self._recorder.timeline is not None:
            path = self._far.path(first.source)
            self._recorder.timeline.put("fetch", begin_ns, first.serial, source=path)
        if error is not None and len(group) > 1 and not self.is_stopped:
            self._get_each(group)
            return
        ready: list[_Holder] = []
        with self._lock:
            self._in_flight -= len(group)
            for number, one in enumerate(group):
                if error is None and one.users:
                    one.data = found[number]
                for holder in one.holders:
                    holder.missing -= 1
                    holder.error = holder.error or error
                    if holder.missing == 0 and holder.then is not None:
                        ready.append(holder)
                one.holders = []
            if error is not None:  # the next batch that needs these ranges tries again
                failed = [one for one in group if one.users]
                for one in failed:
                    one.users = 0
                self._staged.drop(failed)
        for holder in ready:
            self._finish(holder)
        self._plan_next()

    def _get_each(self, group: list[_Request]) -> None:
        """Retry each request by itself, so that only batches that need a bad one get an error."""
        with self._lock:
            self._in_flight -= len(group)
            for one in group:
                one.is_alone = True
            self._push(group)
        self._far.count(FetchCounts(retries=len(group)))
        self._wake_for(len(group))

    def _finish(self, holder: _Holder) -> None:
        with self._lock:
            then, holder.then = holder.then, None
            held: Held | BaseException | None = holder.error
            if then is None:
                return
            if held is None:
                parts = [(one.begin, one.data) for one in holder.requests if one.data is not None]
                held = self._far.held(holder.ranges, parts)
            used = holder.ranges.nbytes if isinstance(held, Held) else 0
            waited_ns = time.perf_counter_ns() - holder.begin_ns
        self._far.count(FetchCounts(used_nbytes=used, waited_ns=waited_ns))
        then(held)

    # --- ahead of the slots -----------------------------------------------------------------------

    def _plan_next(self) -> None:
        """Have a thread of the pool plan the next batch, if there is room for its data."""
        with self._lock:
            request = self._next
            is_full = (
                self._staged.nbytes + self._planned_nbytes > self._most_nbytes
                or len(self._pending) > 2 * self._most_requests
                or len(self._ahead) >= _MOST_AHEAD
            )
            if request is None or is_full or self._is_planning or self.is_stopped:
                return
            self._is_planning = True
        self._submit(request.serial, [partial(self._plan_ahead, request)])

    def _plan_ahead(self, request: FillRequest) -> None:
        """Request the ranges of a batch, and of the batches after it while they are few bytes."""
        planned: list[tuple[FillRequest, ByteRanges]] = []
        nbytes, following = 0, self._following
        then: FillRequest | None = request
        try:
            while then is not None and nbytes < _LITTLE_NBYTES and len(planned) < _MOST_AT_ONCE:
                ranges = self._plan(then)
                if ranges is None:
                    break
                planned.append((then, ranges))
                nbytes += ranges.nbytes
                then = following(then)
            then = then if nbytes else None  # all is kept, probably for later batches, too
        except Exception:
            then = None  # the error will come again when the batch is filled
        new = 0
        with self._lock:
            self._is_planning = False
            if self._next is request and not self.is_stopped:
                self._next, before = then, self._staged.nbytes
                self._stage(planned)
                self._planned_nbytes = self._staged.nbytes - before
                new = len(self._pending)
        if new:
            self._wake_for(new)
        self._plan_next()

    def _stage(self, planned: Sequence[tuple[FillRequest, ByteRanges]]) -> None:
        """Request the ranges of batches, merged across batches. Holds the lock."""
        known = self._holders.keys() | self._ahead.keys()
        planned = [one for one in planned if one[0].serial not in known and one[1].size]
        if len(planned) > 1:
            together = union(*(ranges for _, ranges in planned))
            requests = self._request(planned[0][0].serial, together)
        for request, ranges in planned:
            holder = _Holder(ranges)
            self._hold(request.serial, holder)
            self._ahead[request.serial] = request, holder
        if len(planned) > 1:
            self._staged.drop(requests)  # those found by no batch, because others overlap them

    def _end(self) -> None:
        super()._end()
        self._staged = _Staged(self._far.places)
        self._holders.clear()
        self._ahead.clear()
        self._plan = self._following = self._submit = do_nothing  # their owners refer to this


def _are_alike(expected: FillRequest, request: FillRequest) -> bool:
    return request.samples is None and expected[2:6] == request[2:6]
