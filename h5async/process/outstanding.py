"""Keeps the unanswered requests, and decides which of them a helper is given.

A helper is given every request at once, as long as no helper dies. When one dies, any of its
requests may be the reason: these become *suspects*. From then on helpers are given the suspects one
at a time, oldest first, until each is answered or given up. So a request that kills helpers is
found, and no other request fails with it.

There are no threads, sockets or processes here: `supervisor.py` reports events and acts on the
decisions.
"""

from __future__ import annotations

from dataclasses import dataclass

from h5async.order.sampling import FillRequest

MAX_DEATHS = 3  # of helpers that had, or were started for, the same request


@dataclass(eq=False, slots=True)
class _Entry:
    request: FillRequest
    is_sent: bool = False  # to the current helper
    deaths: int = 0  # of helpers that had it: with any, it is a suspect


class Outstanding:
    """Unanswered requests, at most one per slot. The caller holds a lock.

    `has_started`: the current helper, or else the last one, got as far as taking requests.
    """

    def __init__(self) -> None:
        self._entries: dict[int, _Entry] = {}  # by slot
        self._takes_requests = False
        self.has_started = False

    def __len__(self) -> int:
        """Return the number of unanswered requests."""
        return len(self._entries)

    def add(self, request: FillRequest) -> None:
        """Add a request; it replaces an earlier one for the same slot."""
        self._entries[request.slot] = _Entry(request)

    def remove(self, request: FillRequest) -> bool:
        """Remove a request that was answered or failed; return whether it was there."""
        entry = self._entries.get(request.slot)
        if entry is None or entry.request[:-1] != request[:-1]:  # samples go with the serial
            return False
        del self._entries[request.slot]
        return True

    def clear(self) -> None:
        """Remove all requests."""
        self._entries.clear()

    def next_to_send(self) -> list[FillRequest]:
        """Return the requests to send to the helper now, in order; they count as sent."""
        if not self._takes_requests:
            return []
        entries = self._in_order()
        unsent = [entry for entry in entries if not entry.is_sent]
        suspects = [entry for entry in entries if entry.deaths]
        if suspects:  # one at a time: the helper may have one that may kill it
            unsent = suspects[:1] if len(unsent) == len(entries) else []
        for entry in unsent:
            entry.is_sent = True
        return [entry.request for entry in unsent]

    # --- what becomes of helpers ------------------------------------------------------------------

    def helper_starts(self) -> None:
        """Note that a new helper is being started; it does not take requests yet."""
        self.has_started = False

    def helper_started(self) -> None:
        """Note that the helper takes requests from now on."""
        self._takes_requests = self.has_started = True

    def helper_ends(self) -> None:
        """Note that the helper takes no more requests; `blame` follows when the reason is known."""
        self._takes_requests = False

    def blame(self) -> list[tuple[FillRequest, int]]:
        """Count the helper's end against each request that it had.

        If it had none yet, it was started for the oldest one, which is charged instead. Returns the
        requests that ended `MAX_DEATHS` helpers, or more, oldest first. They stay until `remove`.
        """
        assert not self._takes_requests, "the helper has not ended"
        entries = self._in_order()
        had = [entry for entry in entries if entry.is_sent] if self.has_started else entries[:1]
        for entry in had:
            entry.is_sent = False
            entry.deaths += 1
        return [(entry.request, entry.deaths) for entry in had if entry.deaths >= MAX_DEATHS]

    def oldest(self) -> FillRequest | None:
        """Return the most urgent request; None if there is none."""
        return next((entry.request for entry in self._in_order()), None)

    def _in_order(self) -> list[_Entry]:
        return sorted(self._entries.values(), key=lambda entry: entry.request.serial)
