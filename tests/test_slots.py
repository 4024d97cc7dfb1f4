"""`slots.py`: the ring against a model that knows of each slot what may happen to it."""

from __future__ import annotations

import threading
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

from h5async.errors import BatchTimeoutError, ReaderClosedError
from h5async.slots import Assignment, SlotRing

DEADLOCK_SECONDS = 20


# --- as a table ----------------------------------------------------------------------------------


def test_a_slot_goes_round() -> None:
    ring: SlotRing[str] = SlotRing(1)
    assert ring.ask() == (0, [Assignment(0, 0)])
    assert not ring.is_ready()
    assert ring.filled(0, 0, "a") == []
    assert ring.is_ready()
    assert ring.begin_next() == []
    assert ring.take(0) == (0, 0, "a")
    assert ring.in_use == 0
    assert ring.next_serial == 1
    assert not ring.is_ready()
    assert ring.begin_next() == [Assignment(0, 1)]
    assert ring.in_use is None


def test_requests_beyond_the_slots_wait_in_line() -> None:
    ring: SlotRing[str] = SlotRing(2)
    asked = [ring.ask() for _ in range(5)]
    assert [serial for serial, _ in asked] == [0, 1, 2, 3, 4]
    assert [len(assignments) for _, assignments in asked] == [1, 1, 0, 0, 0]
    assert ring.filled(1, 1, "b") == []
    assert ring.filled(0, 0, "a") == []
    assert ring.begin_next() == []
    assert ring.take(0) == (0, 0, "a")
    assert ring.begin_next() == [Assignment(0, 2)]
    assert ring.take(0) == (1, 1, "b")


def test_batches_are_taken_in_order_however_they_were_filled() -> None:
    ring: SlotRing[int] = SlotRing(3)
    work = [assignment for _ in range(3) for assignment in ring.ask()[1]]
    for slot, serial in reversed(work):
        assert not ring.is_ready()
        ring.filled(slot, serial, serial * 10)
    for serial in range(3):
        ring.begin_next()
        assert ring.take(0)[::2] == (serial, serial * 10)


def test_a_dropped_batch_that_is_ready_frees_its_slot_at_once() -> None:
    ring: SlotRing[str] = SlotRing(1)
    ring.ask()
    ring.ask()
    ring.filled(0, 0, "a")
    assert ring.skip_to(1, read_ahead=False) == [Assignment(0, 1)]


def test_a_dropped_batch_that_is_being_filled_frees_its_slot_when_that_is_done() -> None:
    ring: SlotRing[str] = SlotRing(1)
    ring.ask()
    ring.ask()
    assert ring.skip_to(1, read_ahead=False) == []
    assert ring.filled(0, 0, "late") == [Assignment(0, 1)]
    ring.filled(0, 1, "b")
    assert ring.take(0) == (1, 0, "b")


def test_the_batch_in_use_survives_a_skip() -> None:
    ring: SlotRing[str] = SlotRing(1)
    ring.ask()
    ring.filled(0, 0, "a")
    ring.take(0)
    ring.ask()
    assert ring.skip_to(10, read_ahead=True) == []
    assert ring.in_use == 0
    assert ring.begin_next() == [Assignment(0, 10)]


def test_reading_ahead_fills_all_free_slots() -> None:
    ring: SlotRing[str] = SlotRing(3)
    assert ring.skip_to(0, read_ahead=True) == [Assignment(slot, slot) for slot in range(3)]
    assert ring.ask() == (0, []), "what is read ahead was not asked for"
    assert ring.skip_to(0, read_ahead=False) == []


def test_a_skip_backwards_changes_nothing() -> None:
    ring: SlotRing[str] = SlotRing(1)
    ring.ask()
    ring.filled(0, 0, "a")
    ring.take(0)
    assert ring.skip_to(0, read_ahead=False) == []
    assert ring.next_serial == 1


def test_a_timeout_leaves_the_batch_the_next_one() -> None:
    ring: SlotRing[str] = SlotRing(1)
    ring.begin_next()
    for seconds in (0, 0.001, -1):
        with pytest.raises(BatchTimeoutError, match="batch 0 was not ready"):
            ring.take(seconds)
        assert ring.begin_next() == [], "it was asked for once"
    ring.filled(0, 0, "a")
    assert ring.take(0) == (0, 0, "a")


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

    def accept(self, assignments: list[Assignment]) -> None:
        """Each slot given was free, serials go on without a gap, and no work is left lying."""
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
        serial, assignments = self.ring.ask()
        assert serial == self.asked
        self.asked += 1
        self.accept(assignments)

    @precondition(lambda self: not self.closed)
    @rule()
    def begin_next(self) -> None:
        assignments = self.ring.begin_next()
        if (slot := self.in_use()) is not None:
            self.state[slot] = ("free", -1)
        self.asked = max(self.asked, self.delivered + 1)
        self.accept(assignments)

    def may_take(self) -> bool:
        """`begin_next` comes before `take`: nothing is held, and a batch is asked for."""
        return not self.closed and self.in_use() is None and self.delivered < self.asked

    @precondition(may_take)
    @rule()
    def take(self) -> None:
        expected = self.next_slot()
        if expected is None:
            with pytest.raises(BatchTimeoutError):
                self.ring.take(0)
            return
        serial, slot, result = self.ring.take(0)
        assert (serial, slot) == (self.delivered, expected)
        assert result == ("result", serial)
        self.state[slot] = ("in use", serial)
        self.delivered += 1

    @precondition(lambda self: self.slots("filling", "dropped"))
    @rule(data=st.data())
    def filled(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(self.slots("filling", "dropped")))
        kind, serial = self.state[slot]
        assignments = self.ring.filled(slot, serial, ("result", serial))
        self.state[slot] = ("free", -1) if kind == "dropped" else ("ready", serial)
        if self.closed:
            assert assignments == []
        self.accept(assignments)

    @precondition(lambda self: not self.closed)
    @rule(ahead=st.integers(-3, 7), read_ahead=st.booleans())
    def skip_to(self, ahead: int, read_ahead: bool) -> None:
        assignments = self.ring.skip_to(max(0, self.delivered + ahead), read_ahead=read_ahead)
        self.delivered = max(self.delivered, self.delivered + ahead)
        self.asked = max(self.asked, self.delivered)
        self.assigned = max(self.assigned, self.delivered)
        self.reads_ahead = read_ahead
        for slot, (kind, serial) in enumerate(self.state):
            if kind == "ready" and serial < self.delivered:
                self.state[slot] = ("free", -1)
            elif kind == "filling" and serial < self.delivered:
                self.state[slot] = ("dropped", serial)
        self.accept(assignments)

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
            self.ring.begin_next,
            lambda: self.ring.take(0),
            lambda: self.ring.take(None),
            lambda: self.ring.skip_to(99, read_ahead=True),
        ]
        for call in calls:
            with pytest.raises(ReaderClosedError, match="closed"):
                call()

    @invariant()
    def the_ring_says_what_the_model_says(self) -> None:
        assert self.ring.next_serial == self.delivered
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
                assignments = self.ring.filled(slot, serial, ("result", serial))
                self.state[slot] = ("free", -1) if kind == "dropped" else ("ready", serial)
                self.note(assignments)
            freed = self.in_use()
            self.note(self.ring.begin_next(), freed)
            if self.next_slot() is not None:
                self.take()

    def note(self, assignments: list[Assignment], freed: int | None = None) -> None:
        if freed is not None:
            self.state[freed] = ("free", -1)
        for slot, serial in assignments:
            assert self.state[slot] == ("free", -1)
            self.state[slot] = ("filling", serial)


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
    result = in_thread(lambda: ring.take(None))
    ring.filled(1, 1, "b")
    ring.filled(0, 0, "a")
    assert result() == (0, 0, "a")


def test_close_wakes_whoever_waits() -> None:
    ring: SlotRing[str] = SlotRing(1)
    ring.ask()
    result = in_thread(lambda: ring.take(None))
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
            add(ring.filled(slot, serial, serial))

    results = [in_thread(fill) for _ in range(workers)]
    for _ in range(batches):
        add(ring.ask()[1])
    for expected in range(batches):
        add(ring.begin_next())
        serial, slot, result = ring.take(DEADLOCK_SECONDS)
        assert serial == result == memory[slot] == expected
    add([Assignment(-1, -1)] * workers)
    assert sum(result() for result in results) == batches
    assert wrong == []
