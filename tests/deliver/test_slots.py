"""`slots.py`: the ring against a model that knows of each slot what may happen to it."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from h5async.deliver.slots import Assignment, SlotRing
from h5async.errors import BatchTimeoutError, H5AsyncError, ReaderClosedError

DEADLOCK_SECONDS = 200


# --- as a table ----------------------------------------------------------------------------------


def take(ring: SlotRing[Any], timeout: float | None = 0) -> tuple[int, int, Any]:
    taken = ring.wait(timeout)
    ring.wanted = ring.after(taken[0])
    return taken


def test_a_slot_goes_round() -> None:
    ring: SlotRing[str] = SlotRing(1)
    assert not ring.consumer.has_begun
    assert not ring.can_assign()
    assert ring.ask() == 0
    assert ring.consumer.has_begun
    assert ring.can_assign()
    assert ring.assign() == [Assignment(0, 0)]
    assert not ring.can_assign()
    assert not ring.is_ready()
    ring.filled(0, "a")
    assert ring.assign() == []
    assert ring.is_ready()
    ring.hand_back()
    assert ring.assign() == []
    assert take(ring) == (0, 0, "a")
    assert ring.in_use == 0
    assert ring.consumer.next == 1
    assert not ring.is_ready()
    ring.hand_back()
    assert ring.in_use is None
    assert ring.assign() == [Assignment(0, 1)]


def test_requests_beyond_the_slots_wait_in_line() -> None:
    ring: SlotRing[str] = SlotRing(2)
    assert [ring.ask() for _ in range(5)] == [0, 1, 2, 3, 4]
    assert ring.assign() == [Assignment(0, 0), Assignment(1, 1)]
    ring.filled(1, "b")
    ring.filled(0, "a")
    assert take(ring) == (0, 0, "a")
    assert ring.assign() == []
    ring.hand_back()
    assert ring.assign() == [Assignment(0, 2)]
    assert take(ring) == (1, 1, "b")


def test_batches_are_taken_in_order_however_they_were_filled() -> None:
    ring: SlotRing[int] = SlotRing(3)
    for _ in range(3):
        ring.ask()
    for _, serial in reversed(ring.assign()):
        assert not ring.is_ready()
        ring.filled(serial, serial * 10)
    for serial in range(3):
        ring.hand_back()
        assert take(ring)[::2] == (serial, serial * 10)


def test_where_workers_broke_down_nobody_waits_for_ever() -> None:
    ring: SlotRing[str] = SlotRing(2)
    ring.ask()
    ring.ask()
    ring.assign()
    ring.filled(0, "a")
    ring.fail(RuntimeError("the first"))
    ring.fail(RuntimeError("the second"))
    assert take(ring) == (0, 0, "a")
    with pytest.raises(H5AsyncError, match=r"reader failed \(RuntimeError: the first\)"):
        ring.wait(DEADLOCK_SECONDS)
    ring.filled(1, "b")
    assert take(ring) == (1, 1, "b")


def test_a_dropped_batch_that_is_ready_frees_its_slot_at_once() -> None:
    ring: SlotRing[str] = SlotRing(1)
    ring.ask()
    ring.ask()
    ring.assign()
    ring.filled(0, "a")
    ring.skip_to(1, read_ahead=False)
    assert ring.assign() == [Assignment(0, 1)]


def test_a_dropped_batch_that_is_being_filled_frees_its_slot_when_that_is_done() -> None:
    ring: SlotRing[str] = SlotRing(1)
    ring.ask()
    ring.ask()
    ring.assign()
    ring.skip_to(1, read_ahead=False)
    assert ring.assign() == []
    ring.filled(0, "late")
    assert ring.assign() == [Assignment(0, 1)]
    ring.filled(1, "b")
    assert take(ring) == (1, 0, "b")


def test_the_batch_in_use_survives_a_skip() -> None:
    ring: SlotRing[str] = SlotRing(1)
    ring.ask()
    ring.assign()
    ring.filled(0, "a")
    take(ring)
    ring.ask()
    ring.skip_to(10, read_ahead=True)
    assert ring.assign() == []
    assert ring.in_use == 0
    ring.hand_back()
    assert ring.assign() == [Assignment(0, 10)]


def test_reading_ahead_fills_all_free_slots() -> None:
    ring: SlotRing[str] = SlotRing(3)
    ring.skip_to(0, read_ahead=True)
    assert ring.assign() == [Assignment(slot, slot) for slot in range(3)]
    assert ring.ask() == 0, "what is read ahead was not asked for"
    ring.skip_to(0, read_ahead=False)
    assert ring.assign() == []


def test_a_skip_backwards_changes_nothing() -> None:
    ring: SlotRing[str] = SlotRing(1)
    ring.ask()
    ring.assign()
    ring.filled(0, "a")
    take(ring)
    ring.skip_to(0, read_ahead=False)
    assert ring.assign() == []
    assert ring.consumer.next == 1


def test_a_timeout_leaves_the_batch_the_next_one() -> None:
    ring: SlotRing[str] = SlotRing(1)
    ring.hand_back()
    assert ring.assign() == [Assignment(0, 0)]
    for seconds in (0, 0.001, -1, 0.0):
        with pytest.raises(BatchTimeoutError, match="batch 0 was not ready"):
            ring.wait(seconds)
        ring.hand_back()
        assert ring.assign() == [], "it was asked for once"
    ring.filled(0, "a")
    assert take(ring, 1e300) == (0, 0, "a")


def test_a_batch_that_was_put_back_is_the_next_one_again() -> None:
    ring: SlotRing[str] = SlotRing(2)
    ring.ask()
    ring.ask()
    ring.assign()
    ring.filled(0, "a")
    ring.put_back(0, "a")
    assert ring.wait(0) == (0, 0, "a")
    for forget in (False, True):
        ring.wanted = ring.after(0)
        if forget:
            ring.forget(0)
        assert ring.consumer.next == 1
        ring.put_back(0, "a")
        assert ring.in_use is None
        assert ring.assign() == []
        assert ring.wait(0) == (0, 0, "a")
    assert take(ring) == (0, 0, "a")


def test_work_that_nobody_does_is_assigned_again() -> None:
    ring: SlotRing[str] = SlotRing(2)
    ring.ask()
    ring.ask()
    ring.assign()
    ring.filled(0, "a")
    ring.unassign()
    assert ring.assign() == [Assignment(1, 1)]
    ring.unassign()
    assert take(ring) == (0, 0, "a")
    assert ring.assign() == [Assignment(1, 1)]


def test_an_error_that_was_raised_is_not_kept() -> None:
    class Error(Exception):
        pass

    ring: SlotRing[Exception] = SlotRing(1)
    ring.ask()
    ring.assign()
    error = Error()
    ring.filled(0, error)
    ring.wait(0)
    ring.forget(0)
    gone = weakref.ref(error)
    del error
    assert gone() is None


# --- the state machine ---------------------------------------------------------------------------


class RingMachine(RuleBasedStateMachine):
    """Any interleaving of calls. The model keeps, for each slot, what it is used for."""

    def __init__(self) -> None:
        super().__init__()
        self.closed = False

    @initialize(slots=st.sampled_from([1, 2, 3, 5]))
    def open_ring(self, slots: int) -> None:
        self.ring: SlotRing[Any] = SlotRing(slots)
        self.state: list[tuple[str, int]] = [("free", -1)] * slots
        self.delivered = self.asked = self.assigned = 0
        self.reads_ahead = False

    def accept(self) -> None:
        """Each slot given was free, serials go on without a gap, and no work is left lying."""
        can_assign = self.ring.can_assign()
        assignments = self.ring.assign()
        assert bool(assignments) == can_assign
        for slot, serial in assignments:
            assert self.state[slot] == ("free", -1), "two writers, or one and a reader"
            assert serial == self.assigned
            assert self.reads_ahead or serial < self.asked, "nobody asked for this"
            self.state[slot] = ("filling", serial)
            self.assigned += 1
        if not self.closed:
            free = [slot for slot, (kind, _) in enumerate(self.state) if kind == "free"]
            wanted = self.reads_ahead or self.assigned < self.asked
            assert not (free and wanted), f"slots {free} lie idle"

    def slots(self, *kinds: str) -> list[int]:
        return [slot for slot, (kind, _) in enumerate(self.state) if kind in kinds]

    def in_use(self) -> int | None:
        return next(iter(self.slots("in use")), None)

    def next_slot(self) -> int | None:
        """The slot that holds the next batch, ready."""
        wanted = ("ready", self.delivered)
        return self.state.index(wanted) if wanted in self.state else None

    @precondition(lambda self: not self.closed)
    @rule()
    def ask(self) -> None:
        assert self.ring.ask() == self.asked
        self.asked += 1

    @rule()
    def assign(self) -> None:
        self.accept()

    @precondition(lambda self: not self.closed)
    @rule()
    def hand_back(self) -> None:
        self.ring.hand_back()
        if (slot := self.in_use()) is not None:
            self.state[slot] = ("free", -1)
        self.asked = max(self.asked, self.delivered + 1)

    def may_take(self) -> bool:
        """`hand_back` comes before `take`: nothing is held, and a batch is asked for."""
        return not self.closed and self.in_use() is None and self.delivered < self.asked

    @precondition(may_take)
    @rule()
    def take(self) -> None:
        expected = self.next_slot()
        if expected is None:
            with pytest.raises(BatchTimeoutError):
                self.ring.wait(0)
            return
        serial, slot, result = take(self.ring)
        assert (serial, slot) == (self.delivered, expected)
        assert result == ("result", serial)
        self.state[slot] = ("in use", serial)
        self.delivered += 1

    @precondition(lambda self: not self.closed and self.in_use() is not None)
    @rule()
    def put_back(self) -> None:
        slot = self.in_use()
        assert slot is not None
        serial = self.state[slot][1]
        if serial == self.delivered - 1:  # as right after `take`
            self.ring.put_back(serial, ("result", serial))
            self.state[slot] = ("ready", serial)
            self.delivered = serial

    @precondition(lambda self: self.slots("filling", "dropped"))
    @rule(data=st.data())
    def filled(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(self.slots("filling", "dropped")))
        kind, serial = self.state[slot]
        self.ring.filled(serial, ("result", serial))
        self.state[slot] = ("free", -1) if kind == "dropped" else ("ready", serial)

    @precondition(lambda self: not self.closed)
    @rule(ahead=st.integers(-3, 7), read_ahead=st.booleans())
    def skip_to(self, ahead: int, read_ahead: bool) -> None:
        self.ring.skip_to(max(0, self.delivered + ahead), read_ahead=read_ahead)
        self.delivered = max(self.delivered, self.delivered + ahead)
        self.asked = max(self.asked, self.delivered)
        self.assigned = max(self.assigned, self.delivered)
        self.reads_ahead = read_ahead
        for slot, (kind, serial) in enumerate(self.state):
            if kind == "ready" and serial < self.delivered:
                self.state[slot] = ("free", -1)
            elif kind == "filling" and serial < self.delivered:
                self.state[slot] = ("dropped", serial)

    @rule(often=st.integers(0, 19))
    def close(self, often: int) -> None:
        if often != 19 and not self.closed:
            return  # most runs are longer
        assert self.ring.close() is not self.closed
        self.closed = True

    @precondition(lambda self: self.closed)
    @rule()
    def all_is_refused_once_closed(self) -> None:
        calls: list[Callable[[], Any]] = [
            self.ring.ask,
            self.ring.hand_back,
            lambda: self.ring.wait(0),
            lambda: self.ring.wait(None),
            lambda: self.ring.skip_to(99, read_ahead=True),
        ]
        for call in calls:
            with pytest.raises(ReaderClosedError, match="closed"):
                call()

    @invariant()
    def the_ring_says_what_the_model_says(self) -> None:
        assert self.ring.consumer.next == self.delivered
        if self.closed:
            assert not self.ring.can_assign()
            assert self.ring.assign() == []
            return
        assert self.ring.in_use == self.in_use()
        assert self.ring.is_ready() == (self.next_slot() is not None)

    @invariant()
    def no_batch_is_in_two_slots(self) -> None:
        serials = [serial for kind, serial in self.state if kind in ("filling", "ready")]
        assert len(set(serials)) == len(serials)
        assert all(serial >= self.delivered for serial in serials)

    def teardown(self) -> None:
        """Nothing was lost: all that is outstanding can be finished and taken, in order."""
        if self.closed:
            return
        while self.delivered < self.asked:
            for slot in self.slots("filling", "dropped"):
                kind, serial = self.state[slot]
                self.ring.filled(serial, ("result", serial))
                self.state[slot] = ("free", -1) if kind == "dropped" else ("ready", serial)
            self.hand_back()
            self.accept()
            if self.next_slot() is not None:
                self.take()


TestRing = RingMachine.TestCase


# --- threads -------------------------------------------------------------------------------------


def in_thread(function: Callable[[], Any]) -> Callable[[], Any]:
    """Run a function in a thread; return a function that waits for its result."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append((function(), None))
        except BaseException as error:
            outcome.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def result() -> Any:
        thread.join(DEADLOCK_SECONDS)
        assert not thread.is_alive(), "it waits for ever"
        value, error = outcome[0]
        if error is not None:
            raise error
        return value

    return result


def test_take_waits_until_its_batch_is_filled() -> None:
    ring: SlotRing[str] = SlotRing(2)
    ring.ask()
    ring.ask()
    ring.assign()
    result = in_thread(lambda: take(ring, None))
    ring.filled(1, "b")
    ring.filled(0, "a")
    assert result() == (0, 0, "a")


def test_close_wakes_whoever_waits() -> None:
    ring: SlotRing[str] = SlotRing(1)
    ring.ask()
    result = in_thread(lambda: ring.wait(None))
    assert ring.close()
    with pytest.raises(ReaderClosedError):
        result()


@pytest.mark.parametrize("slots", [1, 2, 5])
def test_many_threads_fill_while_one_takes(slots: int) -> None:
    """Every slot has a writer count; it is 1 while its batch is filled and 0 while it is held."""
    ring: SlotRing[int] = SlotRing(slots)
    batches, workers = 300, 4
    work: list[Assignment] = []
    there_is_work = threading.Condition()
    writers = [0] * slots
    memory = [-1] * slots
    wrong: list[str] = []

    def add(assignments: list[Assignment]) -> None:
        with there_is_work:
            work.extend(assignments)
            there_is_work.notify_all()

    def fill() -> int:
        count = 0
        while True:
            with there_is_work:
                there_is_work.wait_for(lambda: work, DEADLOCK_SECONDS)
                slot, serial = work.pop()  # the latest first: out of order
            if serial < 0:
                return count
            writers[slot] += 1
            if writers[slot] != 1 or ring.in_use == slot:
                wrong.append(f"slot {slot} has {writers[slot]} writers")
            memory[slot] = serial
            writers[slot] -= 1
            count += 1
            ring.filled(serial, serial)
            add(ring.assign())

    results = [in_thread(fill) for _ in range(workers)]
    for _ in range(batches):
        ring.ask()
    for expected in range(batches):
        ring.hand_back()
        add(ring.assign())
        serial, slot, result = take(ring, DEADLOCK_SECONDS)
        assert serial == result == memory[slot] == expected
    add([Assignment(-1, -1)] * workers)
    assert sum(result() for result in results) == batches
    assert wrong == []


def test_what_a_batch_costs_does_not_grow_with_the_number_of_slots():
    class Counted(dict):
        def items(self):
            for item in super().items():
                looked_at.append(item)
                yield item

        def values(self):
            return (entry for _, entry in self.items())

    for num_slots in (10, 1000):
        ring, looked_at = SlotRing(num_slots), []
        ring._entries = Counted()
        for _ in range(num_slots):
            ring.ask()
            for _, serial in ring.assign():
                ring.filled(serial, serial)
        for expected in range(2 * num_slots):
            serial, _, result = ring.wait(10)
            assert serial == result == expected
            ring.wanted = ring.after(serial)
            ring.hand_back()
            ring.ask()
            for _, serial in ring.assign():
                ring.filled(serial, serial)
        assert len(looked_at) < 10 * num_slots


def test_a_slot_that_comes_free_before_the_wait_is_not_missed():
    """A dropped batch becomes ready just before the consumer looks at the count of events."""
    ready = set()

    class Completed:
        def events(self):
            ready.add(0)
            return 1

        def result(self, slot, serial):
            return "filled" if serial in ready else None

        def wait(self, seen, seconds):
            raise AssertionError("nobody would wake the consumer")

        def drop(self, slot, serial):
            return False

        def wake(self):
            pass

    def begin():
        ready.update(serial for _, serial in ring.assign())

    ring = SlotRing(1)
    ring.completions = Completed()
    ring.ask()
    assert ring.assign() == [(0, 0)]
    ring.restart(lambda serial: None)
    ring.hand_back()
    assert ring.assign() == []
    assert ring.wait(None, begin) == (1, 0, "filled")
