"""The pool of work by itself: the order of work, who does it, and what becomes of the rest."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from h5async.fill.pool import WorkPool

SECONDS = 60


def pool_of(
    num_threads: int, find_work: Callable[[], Any] = tuple, crashes: Any = None
) -> WorkPool:
    return WorkPool(num_threads, find_work, [].append if crashes is None else crashes.append)


def test_the_most_urgent_work_comes_first() -> None:
    pool, done = pool_of(0), []
    pool.add(2, [partial(done.append, "later")])
    pool.add(
        1, [partial(done.append, "now"), partial(done.append, "as urgent, but added after it")]
    )
    while pool.run_next():
        pass
    assert done == ["now", "as urgent, but added after it", "later"]
    pool.stop(partial(done.append, "let go"))
    assert done[-1] == "let go"


def test_who_finds_no_work_asks_for_more() -> None:
    done: list[int] = []
    asked = [[(serial, partial(done.append, serial)) for serial in (3, 1, 2)]]
    pool = pool_of(0, lambda: asked.pop() if asked else [])
    assert [pool.run_next() for _ in range(4)] == [True, True, True, False]
    assert done == [3, 1, 2]  # the first of what is found is begun at once
    pool.stop(lambda: None)


def test_a_signal_handler_that_raises_as_a_thread_enters_or_leaves() -> None:
    """All is released all the same, and the thread that waits for that is not left waiting."""
    for place, is_stopped_meanwhile in itertools.product((0, 1), (True, False)):
        done: list[str] = []
        note_workers = Mock(side_effect=[None] * place + [KeyboardInterrupt] + [None] * 9)
        pool = WorkPool(0, tuple, [].append, Mock(note_workers=note_workers))
        stop = partial(pool.stop, partial(done.append, "let go"))
        with pytest.raises(KeyboardInterrupt):
            pool.run(stop if is_stopped_meanwhile else lambda: None)
        stop() if place == 0 or not is_stopped_meanwhile else None
        pool.join(SECONDS)
        assert done == ["let go"]


def test_work_that_runs_other_work_stays_counted() -> None:
    pool, done = pool_of(0), []

    def work() -> None:
        pool.run_next()
        pool.stop(lambda: done.append("let go"))
        done.append("still at work")

    pool.add(0, [work])
    assert pool.run_next()
    assert done == ["still at work", "let go"]


@pytest.mark.parametrize("num_threads", [1, 3])
def test_an_exception_is_told_and_the_thread_goes_on(num_threads: int) -> None:
    crashes: list[BaseException] = []
    pool, is_done = pool_of(num_threads, crashes=crashes), threading.Event()

    def fail() -> None:
        raise ValueError

    pool.start("a test")
    pool.add(0, [fail] * num_threads)
    pool.add(1, [is_done.set])
    assert is_done.wait(SECONDS)
    pool.stop(lambda: None)
    pool.join(SECONDS)
    assert [type(error) for error in crashes] == [ValueError] * num_threads


def test_work_whose_addition_is_interrupted_takes_no_ticket_of_later_work() -> None:
    pool, is_done = pool_of(1), threading.Event()
    pool.start("a test")
    put = pool._tickets.put

    def interrupt(_: bool) -> None:
        raise KeyboardInterrupt

    pool._tickets = SimpleNamespace(get=pool._tickets.get, put=interrupt)  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        pool.add(0, [lambda: None])
    pool._tickets.put = put  # type: ignore[method-assign]
    pool.add(1, [is_done.set])
    assert is_done.wait(SECONDS)
    pool.stop(lambda: None)
    pool.join(SECONDS)


def test_the_last_worker_lets_go_and_nobody_waits_for_it() -> None:
    pool, done = pool_of(1), []
    has_begun, go_on = threading.Event(), threading.Event()

    def work() -> None:
        has_begun.set()
        go_on.wait(SECONDS)
        done.append("work")

    pool.start("a test")
    pool.add(0, [work])
    assert has_begun.wait(SECONDS)
    pool.add(1, [partial(done.append, "never begun")])
    for _ in range(2):
        pool.stop(partial(done.append, "let go"))
    pool.add(2, [partial(done.append, "too late")])
    assert done == []
    go_on.set()
    pool.join(SECONDS)
    assert done == ["work", "let go"]
    assert not pool.run_next()


def test_work_of_the_pool_may_stop_it() -> None:
    pool, done = pool_of(1), threading.Event()

    def work() -> None:
        pool.stop(done.set)
        pool.join()  # does not wait for itself
        assert not done.is_set()

    pool.start("a test")
    pool.add(0, [work])
    assert done.wait(SECONDS)
    pool.join(SECONDS)


def test_what_an_interruption_of_letting_go_left_is_done_by_the_next_stop() -> None:
    pool, done = pool_of(0), []

    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pool.stop(interrupted)
    pool.stop(partial(done.append, "let go"))
    assert done == ["let go"]


def test_work_is_forgotten_only_where_no_thread_may_do_it() -> None:
    pool, done = pool_of(0), []
    pool.add(0, [partial(done.append, 1)])
    assert pool.forget_work()
    assert not pool.run_next()
    assert not pool_of(1).forget_work()
