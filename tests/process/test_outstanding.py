"""Which requests a helper is given: never twice, and one at a time where helpers die."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from h5async.order.sampling import FillRequest
from h5async.process.supervisor import MAX_DEATHS, Outstanding


def request(serial: int, slot: int | None = None) -> FillRequest:
    return FillRequest(serial if slot is None else slot, serial, 0, serial, 8 * serial)


def serials(requests: list[FillRequest]) -> list[int]:
    return [request.serial for request in requests]


def started(*numbers: int) -> Outstanding:
    """Requests, all of which a helper was given."""
    outstanding = Outstanding()
    outstanding.helper_starts()
    for number in numbers:
        outstanding.add(request(number))
    outstanding.helper_started()
    assert serials(outstanding.next_to_send()) == sorted(numbers)
    return outstanding


def die(outstanding: Outstanding) -> list[int]:
    """Have the helper end, and the next one start; return what is given up."""
    outstanding.helper_ends()
    given_up = outstanding.blame()
    assert all(deaths == MAX_DEATHS for _, deaths in given_up)
    for victim, _ in given_up:
        assert outstanding.remove(victim)
    outstanding.helper_starts()
    outstanding.helper_started()
    return serials([victim for victim, _ in given_up])


# --- as a table ----------------------------------------------------------------------------------


def test_requests_wait_for_the_helper_to_start() -> None:
    outstanding = Outstanding()
    outstanding.helper_starts()
    outstanding.add(request(1))
    outstanding.add(request(0))
    assert outstanding.next_to_send() == []
    assert not outstanding.has_started
    outstanding.helper_started()
    assert outstanding.has_started
    assert serials(outstanding.next_to_send()) == [0, 1]
    assert outstanding.next_to_send() == []
    outstanding.add(request(2))
    assert serials(outstanding.next_to_send()) == [2]


def test_what_was_answered_is_not_asked_again() -> None:
    outstanding = started(0, 1, 2)
    assert outstanding.remove(request(1))
    assert not outstanding.remove(request(1)), "an answer comes once"
    assert die(outstanding) == []
    assert serials(outstanding.next_to_send()) == [0]
    assert outstanding.remove(request(0))
    assert serials(outstanding.next_to_send()) == [2]
    assert len(outstanding) == 1


def test_an_answer_to_an_earlier_request_for_the_slot_removes_nothing() -> None:
    outstanding = started(0)
    assert outstanding.remove(request(0))
    outstanding.add(request(5, slot=0))
    assert not outstanding.remove(request(0))
    assert len(outstanding) == 1


def test_suspects_are_tried_alone_and_new_requests_wait() -> None:
    outstanding = started(0, 1)
    assert die(outstanding) == []
    assert serials(outstanding.next_to_send()) == [0]
    outstanding.add(request(2))
    assert outstanding.next_to_send() == [], "the helper has a suspect"
    outstanding.remove(request(0))
    assert serials(outstanding.next_to_send()) == [1]
    outstanding.remove(request(1))
    outstanding.add(request(3))
    assert serials(outstanding.next_to_send()) == [2, 3], "nobody is suspected any more"


def test_a_request_that_kills_is_given_up_and_no_other() -> None:
    outstanding = started(0, 1, 2)
    assert die(outstanding) == []
    outstanding.remove(outstanding.next_to_send()[0])
    assert serials(outstanding.next_to_send()) == [1]
    assert die(outstanding) == []
    assert serials(outstanding.next_to_send()) == [1]
    assert die(outstanding) == [1]
    assert serials(outstanding.next_to_send()) == [2]


def test_helpers_that_never_start_cost_the_oldest_request() -> None:
    outstanding = Outstanding()
    outstanding.add(request(4))
    outstanding.add(request(3))
    for _ in range(MAX_DEATHS - 1):
        outstanding.helper_starts()
        outstanding.helper_ends()
        assert outstanding.blame() == []
    outstanding.helper_starts()
    outstanding.helper_ends()
    assert outstanding.blame() == [(request(3), MAX_DEATHS)]
    assert not outstanding.has_started


def test_a_helper_that_ends_with_nothing_to_do_costs_nothing() -> None:
    outstanding = started()
    assert outstanding.oldest() is None
    assert die(outstanding) == []
    outstanding.add(request(0))
    outstanding.add(request(1))
    assert serials(outstanding.next_to_send()) == [0, 1]


def test_what_comes_while_a_helper_is_being_buried_is_not_blamed() -> None:
    outstanding = started(0)
    outstanding.helper_ends()
    outstanding.add(request(1))
    assert outstanding.next_to_send() == []
    assert outstanding.blame() == []
    outstanding.helper_starts()
    outstanding.helper_started()
    assert serials(outstanding.next_to_send()) == [0]
    outstanding.remove(request(0))
    assert serials(outstanding.next_to_send()) == [1]


# --- the state machine ---------------------------------------------------------------------------

SLOTS = 5


class OutstandingMachine(RuleBasedStateMachine):
    """Any order of events. The model keeps each request's deaths, and what the helper has."""

    def __init__(self) -> None:
        super().__init__()
        self.outstanding = Outstanding()
        self.deaths: dict[FillRequest, int] = {}
        self.helper: str = "none"  # or "starting", "started", "ended"
        self.has: list[FillRequest] = []
        self.serial = 0

    def suspects(self) -> list[FillRequest]:
        return sorted(r for r, deaths in self.deaths.items() if deaths)

    @precondition(lambda self: len(self.deaths) < SLOTS)
    @rule(data=st.data())
    def add(self, data: st.DataObject) -> None:
        free = set(range(SLOTS)) - {r.slot for r in self.deaths}
        new = request(self.serial, data.draw(st.sampled_from(sorted(free))))
        self.serial += 1
        self.outstanding.add(new)
        self.deaths[new] = 0

    @rule()
    def send(self) -> None:
        sent = self.outstanding.next_to_send()
        assert sent == sorted(sent, key=lambda r: r.serial)
        if self.helper != "started":
            assert sent == []
            return
        assert not set(sent) & set(self.has), "the helper has it already"
        self.has += sent
        suspects = sorted(self.suspects(), key=lambda r: r.serial)
        if not suspects:
            assert set(self.has) == self.deaths.keys(), "nothing waits without a reason"
        else:
            assert len(self.has) == 1, "one at a time, and the helper is not left idle"
            assert sent in ([], suspects[:1])

    @precondition(lambda self: self.has)
    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        answered = data.draw(st.sampled_from(self.has))
        self.forget(answered)

    def forget(self, gone: FillRequest) -> None:
        assert self.outstanding.remove(gone)
        assert not self.outstanding.remove(gone)
        del self.deaths[gone]
        if gone in self.has:
            self.has.remove(gone)

    @precondition(lambda self: self.helper in ("none", "starting"))
    @rule()
    def go_on_starting(self) -> None:
        if self.helper == "none":
            self.outstanding.helper_starts()
            self.helper = "starting"
        else:
            self.outstanding.helper_started()
            self.helper = "started"

    @precondition(lambda self: self.helper in ("starting", "started"))
    @rule()
    def end(self) -> None:
        """The supervisor learns only later why; requests may come meanwhile."""
        self.outstanding.helper_ends()
        self.blamed_alone = self.helper == "starting"
        self.helper = "ended"

    @precondition(lambda self: self.helper == "ended")
    @rule(is_death=st.booleans())
    def blame(self, is_death: bool) -> None:
        blamed = self.has
        if self.blamed_alone:
            assert self.has == []
            blamed = sorted(self.deaths, key=lambda r: r.serial)[:1]
        for one in blamed:
            self.deaths[one] += 1
        self.has = []
        found = self.outstanding.blame()
        expected = [(r, self.deaths[r]) for r in blamed if self.deaths[r] >= MAX_DEATHS]
        assert found == sorted(expected, key=lambda pair: pair[0].serial)
        self.helper = "none"
        oldest = self.outstanding.oldest()
        for victim in [r for r, _ in found] if is_death else filter(None, [oldest]):
            self.forget(victim)

    @rule(rarely=st.integers(0, 19))
    def clear(self, rarely: int) -> None:
        if rarely == 19:
            self.outstanding.clear()
            self.deaths, self.has = {}, []

    @invariant()
    def it_says_what_the_model_says(self) -> None:
        assert len(self.outstanding) == len(self.deaths)
        oldest = min(self.deaths, key=lambda r: r.serial, default=None)
        assert self.outstanding.oldest() == oldest
        if self.helper in ("starting", "started"):
            assert self.outstanding.has_started == (self.helper == "started")

    def teardown(self) -> None:
        """Nothing was lost: a helper that lives answers all."""
        if self.helper == "ended":
            self.blame(is_death=True)
        while self.helper != "started":
            self.go_on_starting()
        while self.deaths:
            self.send()
            assert self.has
            self.forget(self.has[0])


TestOutstanding = OutstandingMachine.TestCase


# --- helpers that die of some requests -----------------------------------------------------------


@given(
    deadly=st.sets(st.integers(0, 11), max_size=4),
    slots=st.integers(1, 6),
    seed=st.integers(0, 1 << 32),
)
def test_just_the_deadly_requests_fail(deadly: set[int], slots: int, seed: int) -> None:
    """Each helper works at what it has in any order, and dies when it comes to a deadly one."""
    rng, outstanding = random.Random(seed), Outstanding()
    waiting, free = list(range(12)), set(range(slots))
    answered: list[int] = []
    failed: list[int] = []
    helpers = 0

    def fill_slots() -> None:
        while waiting and free:
            outstanding.add(request(waiting.pop(0), free.pop()))

    fill_slots()
    while len(outstanding):
        helpers += 1
        outstanding.helper_starts()
        outstanding.helper_started()
        has = outstanding.next_to_send()
        while has:
            work = has.pop(rng.randrange(len(has)))
            if work.serial in deadly:
                break
            assert outstanding.remove(work)
            answered.append(work.serial)
            free.add(work.slot)
            fill_slots()
            has += outstanding.next_to_send()
        outstanding.helper_ends()
        for victim, _ in outstanding.blame():
            assert outstanding.remove(victim)
            failed.append(victim.serial)
            free.add(victim.slot)
            fill_slots()
    assert sorted(failed) == sorted(deadly)
    assert sorted(answered) == sorted(set(range(12)) - deadly)
    assert helpers <= MAX_DEATHS * len(deadly) + 1


def test_blame_comes_after_the_end() -> None:
    outstanding = started(0)
    with pytest.raises(AssertionError, match="not ended"):
        outstanding.blame()
