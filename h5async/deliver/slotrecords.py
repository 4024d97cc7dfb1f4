"""Defines the records of the ring of slots: what the consumer wants, and who has which slot.

Plain records, and the protocol of what reports that batches are ready.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

Result = TypeVar("Result")
Result_co = TypeVar("Result_co", covariant=True)


class Assignment(NamedTuple):
    """Fill this slot with this batch."""

    slot: int
    serial: int


class Completions(Protocol[Result_co]):
    """Reports that batches are ready without calling `SlotRing.filled`."""

    def result(self, slot: int, serial: int) -> Result_co | None:
        """Return the batch in a slot; None if it is not ready. Never blocks."""

    def drop(self, slot: int, serial: int) -> bool:
        """Say that a batch is no longer wanted; tell whether its slot may have another one."""

    def events(self) -> int:
        """Return a number that changes whenever a batch becomes ready, and by `wake`."""

    def wait(self, seen: int, seconds: float | None) -> bool:
        """Wait until `events` returns another number than `seen`; return whether it does."""

    def wake(self) -> None:
        """Have `wait` return. Never blocks."""


class Consumer(NamedTuple):
    """What the consumer wants.

    Attributes
    ----------
    next
        Serial of the batch that is delivered next.
    asked
        Batches below this serial were requested.
    held
        The batch that the consumer holds, if any.
    reads_ahead
        Whether batches are filled before they are requested.
    course
        The caller's meaning of the serial numbers.
    loops
        Whether a loop takes the batches, and they are read ahead for it.
    """

    next: int = 0
    asked: int = 0
    held: int | None = None
    reads_ahead: bool = False
    course: Any = None
    loops: bool = False


new_consumer = partial(tuple.__new__, Consumer)  # in half the time


@dataclass(eq=False, slots=True)
class Entry(Generic[Result]):
    """A slot that has an owner."""

    slot: int
    result: Result | None = None
    is_ready: bool = False
