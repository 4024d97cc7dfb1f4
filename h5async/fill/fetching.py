"""Fetches what batches read of far sources, ahead of the slots, in threads that only wait for it.

The byte ranges of a batch enter; they leave in memory, as a table by which the core finds them. The
order of samples is known, so the ranges of later batches are fetched before these are requested, as
far as memory goes. What several batches need is fetched once, and kept until the last of them was
read. Threads of the pool never wait here: they are told when all ranges of a batch are there.
"""

from __future__ import annotations

import heapq
import itertools
import queue
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from h5async.core.binding import address
from h5async.fill.pool import Work, Workers, do_nothing
from h5async.order.sampling import FillRequest
from h5async.plan.fetches import ByteRanges, requests_of
from h5async.read.farsources import FarSources, FetchCounts, Held, extents_of
from h5async.system.timeline import Recorder

Key = tuple[int, int, int]  # of a range
Then = Callable[["Held | BaseException"], None]

_GROUP_NBYTES = 1 << 20  # that a thread asks the client for at once
_FIRST_THREADS = 4
_MOST_AHEAD = 1024  # batches that are planned ahead
_MOST_BEHIND = 64
_LITTLE_NBYTES, _MOST_AT_ONCE = 512 * 1024, 64  # of batches that are planned together


class FetchLimits(NamedTuple):
    """How many requests are on their way at most, and the bytes of all that is kept or asked for.

    A batch that is requested is fetched whatever its size.
    """

    requests_in_flight: int
    fetch_nbytes: int


class _Request:
    """A range that is fetched at once; it holds one or several that batches read."""

    __slots__ = (
        "base",
        "data",
        "holders",
        "keys",
        "nbytes",
        "offset",
        "serial",
        "source",
        "users",
    )

    def __init__(self, source: int, offset: int, nbytes: int, keys: list[Key], serial: int) -> None:
        self.source, self.offset, self.nbytes, self.keys = source, offset, nbytes, keys
        self.serial = serial  # of the first batch that needs it
        self.users = 0
        self.data: NDArray[np.uint8] | None = None
        self.base = 0  # an offset of the source, plus this, is an address
        self.holders: list[_Holder] = []


class _Holder:
    """What a batch needs, by range the request that has it; `then` takes it when all is there."""

    __slots__ = ("begin_ns", "by_range", "error", "missing", "ranges", "requests", "then")

    def __init__(self, ranges: ByteRanges) -> None:
        self.ranges = ranges
        self.then: Then | None = None
        self.by_range: list[_Request] = []
        self.requests: list[_Request] = []
        self.missing = 0
        self.error: BaseException | None = None
        self.begin_ns = 0


class Fetcher(Workers):
    """Ranges of batches, by their serial numbers. Safe to use from many threads.

    `plan` returns what a request will read, None if that is not known, and `following` the request
    after it, in order; None: there is none that is known. `submit` has threads of the pool do some
    work, in the order of serial numbers; `recorder` is told of requests.
    """

    def __init__(
        self,
        far: FarSources,
        limits: FetchLimits,
        plan: Callable[[FillRequest], ByteRanges | None],
        following: Callable[[FillRequest], FillRequest | None],
        submit: Callable[[int, Sequence[Work]], None],
        recorder: Recorder,
    ) -> None:
        super().__init__()
        self._recorder = recorder
        self._far, self._limits, self._submit = far, limits, submit
        self._plan, self._following = plan, following
        self._tickets = queue.SimpleQueue[bool]()
        self._idle = self._in_flight = self._staged_nbytes = 0
        self._order = itertools.count()
        self._staged: dict[Key, _Request] = {}
        self._pending: list[tuple[int, int, _Request]] = []
        self._holders: dict[int, _Holder] = {}  # of requested batches
        self._ahead: dict[int, tuple[FillRequest, _Holder]] = {}
        self._next: FillRequest | None = None  # to be planned ahead
        self._planned_nbytes = 0  # of the last batch that was
        self._is_planning = False
        self._what = ""

    def start(self, what: str) -> None:
        """Start threads; see `Workers`. More are started when they are needed."""
        self._what = what
        self._start_threads(min(_FIRST_THREADS, self._limits.requests_in_flight))

    # --- the pool's calls -------------------------------------------------------------------------

    def want(self, request: FillRequest, ranges: ByteRanges, then: Then) -> None:
        """Fetch what a batch reads, and call `then` with it, or with an error. Never blocks.

        If the same batch wants other ranges, those before are let go of.
        """
        holder = _Holder(ranges)
        with self._lock:
            if self.is_stopped:
                return
            self._hold(request.serial, holder)
        self._give(request, holder, then, is_new=True)

    def want_planned(self, request: FillRequest, then: Then) -> bool:
        """Do the same if it is known what the batch reads; return False if it is not."""
        with self._lock:
            expected, holder = self._ahead.get(request.serial, (request, None))
            if holder is None or not _are_alike(expected, request):
                return False
            del self._ahead[request.serial]
            if holder.error is not None:  # it may pass
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
        """Tell whether a batch is fetched ahead, so that it has to be asked for."""
        return serial in self._ahead

    def end(self, serial: int) -> None:
        """Let go of what a batch has read. Never blocks; extra calls are harmless."""
        with self._lock:
            holder = self._holders.pop(serial, None)
            if holder is not None:
                self._release(holder)
        if holder is not None:
            self._plan_next()

    def _follow(self, request: FillRequest, is_new: bool) -> None:
        """Go on planning after a request, or begin there if it `is_new`. Holds the lock."""
        ahead = self._ahead.pop(request.serial, None)
        if ahead is not None and not _are_alike(ahead[0], request):
            self._forget_ahead()
        # (Batches that are requested together come here in any order.)
        for serial in [one for one in self._ahead if one < request.serial - _MOST_BEHIND]:
            self._release(self._ahead.pop(serial)[1])
        if ahead is not None:
            self._release(ahead[1])
        is_behind = is_new if self._next is None else self._next.serial <= request.serial
        if is_behind:
            self._next = self._following(request)

    def _forget_ahead(self) -> None:
        for _, holder in self._ahead.values():
            self._release(holder)
        self._ahead.clear()
        self._next = None

    # --- requests ---------------------------------------------------------------------------------

    def _hold(self, serial: int, holder: _Holder) -> None:
        """Find what a batch needs among what is there, and request the rest. Holds the lock."""
        self._request(serial, holder.ranges)
        holder.by_range = [self._staged[key] for key in _keys(holder.ranges)]
        holder.requests = list(dict.fromkeys(holder.by_range))
        for one in holder.requests:
            one.users += 1
            if one.data is None:
                one.holders.append(holder)
                holder.missing += 1

    def _request(self, serial: int, ranges: ByteRanges) -> None:
        """Request those of some ranges, sorted and apart, that are not there. Holds the lock."""
        new = np.array([key not in self._staged for key in _keys(ranges)], np.bool_)
        ranges = ByteRanges(*(column[new] for column in ranges))
        bounds, keys = requests_of(ranges), _keys(ranges)
        columns = (column.tolist() for column in extents_of(ranges, bounds))
        for (a, b), source, begin, end in zip(itertools.pairwise(bounds), *columns, strict=True):
            request = _Request(source, begin, end - begin, keys[a:b], serial)
            self._staged.update(dict.fromkeys(keys[a:b], request))
            self._staged_nbytes += request.nbytes
            heapq.heappush(self._pending, (serial, next(self._order), request))

    def _release(self, holder: _Holder) -> None:
        """Let go of what a batch needed. Holds the lock."""
        for one in holder.requests:
            one.users -= 1
            if one.users == 0:
                self._drop(one)
        holder.requests, holder.by_range, holder.then = [], [], None

    def _drop(self, request: _Request) -> None:
        for key in request.keys:
            if self._staged.get(key) is request:
                del self._staged[key]
        self._staged_nbytes -= request.nbytes
        request.data = None

    # --- threads ----------------------------------------------------------------------------------

    def _wake_for(self, count: int) -> None:
        """Have threads look for work, and start more if there are too few."""
        most = self._limits.requests_in_flight
        with self._lock:
            have, idle = len(self._threads), self._idle
        more = min(most - have, count - idle)
        if more > 0 and self._what:
            self._start_threads(more)
        for _ in range(min(count, have)):
            self._tickets.put(True)

    def _start_threads(self, count: int) -> None:
        numbers = range(len(self._threads), len(self._threads) + count)
        self._start({f"fetch_{number}": self._work for number in numbers}, self._what)

    def _wake(self) -> None:
        self._pending.clear()
        for _ in range(len(self._threads) + self._limits.requests_in_flight):
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
        """Return requests to the same source, the most urgent ones."""
        group: list[_Request] = []
        nbytes = 0
        with self._lock:
            room = self._limits.requests_in_flight - self._in_flight
            while self._pending and len(group) < room:
                request = self._pending[0][2]
                most = self._far.at_once(request.source)
                if group and (
                    request.source != group[0].source
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
        ready: list[_Holder] = []
        with self._lock:
            self._in_flight -= len(group)
            for number, one in enumerate(group):
                if error is None and one.users:
                    one.data = found[number]
                    one.base = address(found[number]) - one.offset
                for holder in one.holders:
                    holder.missing -= 1
                    holder.error = holder.error or error
                    if holder.missing == 0 and holder.then is not None:
                        ready.append(holder)
                one.holders = []
                if error is not None:  # the next batch that needs it tries again
                    for key in one.keys:
                        if self._staged.get(key) is one:
                            del self._staged[key]
        for holder in ready:
            self._finish(holder)
        self._plan_next()

    def _finish(self, holder: _Holder) -> None:
        """Give a batch what it has waited for."""
        with self._lock:
            then, holder.then = holder.then, None
            held: Held | BaseException | None = holder.error
            if then is None:
                return
            if held is None:
                table = self._far.table(holder.ranges)
                base = np.array([one.base for one in holder.by_range], np.int64)
                table["data"] = base + holder.ranges.offset
                held = Held(holder.ranges, table, [one.data for one in holder.requests])
            used = int(holder.ranges.nbytes.sum()) if isinstance(held, Held) else 0
            waited_ns = time.perf_counter_ns() - holder.begin_ns
        self._far.count(FetchCounts(used_nbytes=used, waited_ns=waited_ns))
        then(held)

    # --- ahead of the slots -----------------------------------------------------------------------

    def _plan_next(self) -> None:
        """Have a thread of the pool plan the next batch, if there is room for what it reads."""
        with self._lock:
            request, most = self._next, self._limits
            is_full = (
                self._staged_nbytes + self._planned_nbytes > most.fetch_nbytes
                or len(self._pending) > 2 * most.requests_in_flight
                or len(self._ahead) >= _MOST_AHEAD
            )
            if request is None or is_full or self._is_planning or self.is_stopped:
                return
            self._is_planning = True
        self._submit(request.serial, [partial(self._plan_ahead, request)])

    def _plan_ahead(self, request: FillRequest) -> None:
        """Request what a batch will read, and if that is little, the batches after it, too."""
        planned: list[tuple[FillRequest, ByteRanges]] = []
        nbytes, following = 0, self._following
        then: FillRequest | None = request
        try:
            while then is not None and nbytes < _LITTLE_NBYTES and len(planned) < _MOST_AT_ONCE:
                ranges = self._plan(then)
                if ranges is None:
                    break
                planned.append((then, ranges))
                nbytes += int(ranges.nbytes.sum())
                then = following(then)
            then = then if nbytes else None  # all is kept, and mostly of later batches, too
        except Exception:
            then = None  # the request itself will have the error
        new = 0
        with self._lock:
            self._is_planning = False
            if self._next is request and not self.is_stopped:
                self._next, before = then, self._staged_nbytes
                self._stage(planned)
                self._planned_nbytes = self._staged_nbytes - before
                new = len(self._pending)
        if new:
            self._wake_for(new)
        self._plan_next()

    def _stage(self, planned: Sequence[tuple[FillRequest, ByteRanges]]) -> None:
        """Request what batches will read, of several what lies together. Holds the lock."""
        planned = [one for one in planned if one[0].serial not in self._holders]
        if len(planned) > 1:
            several = ByteRanges.joined([ranges for _, ranges in planned]).apart()
            if several is not None:
                self._request(planned[0][0].serial, several)
        for request, ranges in planned:
            if ranges.size:
                holder = _Holder(ranges)
                self._hold(request.serial, holder)
                self._ahead[request.serial] = request, holder

    def _end(self) -> None:
        super()._end()
        self._staged.clear()
        self._holders.clear()
        self._ahead.clear()
        self._plan = self._following = self._submit = do_nothing  # whose owners hold this object


def _keys(ranges: ByteRanges) -> list[Key]:
    return list(zip(*(column.tolist() for column in ranges), strict=True))


def _are_alike(expected: FillRequest, request: FillRequest) -> bool:
    """Tell whether a request is for the batch that was expected."""
    return request.samples is None and expected[2:6] == request[2:6]
