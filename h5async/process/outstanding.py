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
    deaths: int = 0


class Outstanding:
    """Unanswered requests, at most one per slot. The caller holds a lock.

    `has_started`: the current helper, or else the last one, got as far as taking requests.
    """

    def __init__(self) -> None:
        self._entries: dict[int, _Entry] = {}  # by slot, like the sets below
        self._unsent: set[int] = set()  # not given to the current helper
        self._suspects: set[int] = set()  # a helper died while it had them
        self._takes_requests = False
        self.has_started = False

    def __len__(self) -> int:
        """Return the number of unanswered requests."""
        return len(self._entries)

    def add(self, request: FillRequest) -> None:
        """Add a request; it replaces an earlier one for the same slot."""
        self._forget(request.slot)
        self._entries[request.slot] = _Entry(request)
        self._unsent.add(request.slot)

    def remove(self, request: FillRequest) -> bool:
        """Remove a request that was answered or failed; return whether it was there."""
        entry = self._entries.get(request.slot)
        if entry is None or entry.request[:-1] != request[:-1]:  # samples go with the serial
            return False
        self._forget(request.slot)
        return True

    def clear(self) -> None:
        """Remove all requests."""
        self._entries.clear()
        self._unsent.clear()
        self._suspects.clear()

    def next_to_send(self) -> list[FillRequest]:
        """Return the requests to send to the helper now, in order; they count as sent."""
        if not self._unsent or not self._takes_requests:
            return []
        if not self._suspects:
            slots = sorted(self._unsent, key=self._serial)
        elif len(self._unsent) < len(self._entries):  # the helper has one that may kill it
            return []
        else:
            slots = [min(self._suspects, key=self._serial)]
        self._unsent.difference_update(slots)
        return [self._entries[slot].request for slot in slots]

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

        If it had none yet, it was started for the oldest one, which is charged instead.

        Returns
        -------
        list of (request, deaths)
            Requests that ended `MAX_DEATHS` helpers, oldest first. They stay until `remove`.
        """
        assert not self._takes_requests, "the helper has not ended"
        had = self._entries.keys() - self._unsent
        if not self.has_started:
            oldest = self.oldest()
            had = set() if oldest is None else {oldest.slot}
        for slot in had:
            self._entries[slot].deaths += 1
        self._unsent |= had
        self._suspects |= had
        entries = [self._entries[slot] for slot in sorted(had, key=self._serial)]
        return [(entry.request, entry.deaths) for entry in entries if entry.deaths >= MAX_DEATHS]

    def oldest(self) -> FillRequest | None:
        """Return the most urgent request; None if there is none."""
        if not self._entries:
            return None
        return self._entries[min(self._entries, key=self._serial)].request

    def _serial(self, slot: int) -> int:
        return self._entries[slot].request.serial

    def _forget(self, slot: int) -> None:
        self._entries.pop(slot, None)
        self._unsent.discard(slot)
        self._suspects.discard(slot)
