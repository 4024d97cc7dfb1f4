"""Decodes chunks by the core, in guarded memory, for tests."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from h5async.core.binding import address, load_core
from h5async.read.coretables import encoded_room
from h5async.read.rereading import decoding_error

GUARD_NBYTES, CANARY = 64, 0xC3


class DamagedError(ValueError):
    """The core finds a chunk damaged."""


class Guarded:
    """Memory of `nbytes` with canaries on both sides, at an odd address."""

    def __init__(self, nbytes):
        self.all = np.full(nbytes + 2 * GUARD_NBYTES + 1, CANARY, np.uint8)
        self.inside = self.all[GUARD_NBYTES + 1 : GUARD_NBYTES + 1 + nbytes]

    def is_intact(self):
        size = self.inside.size
        self.inside[...] = CANARY
        return self.inside.size == size and bool((self.all == CANARY).all())


class Decoder:
    """A pipeline whose every buffer is guarded."""

    def __init__(self, filters, nbytes):
        self.core, self.filters = load_core(), filters
        self.pipeline = self.core.filters(filters)
        if self.pipeline is None and self.core.missing:
            pytest.skip(f"no library was found for {', '.join(sorted(self.core.missing))}")
        assert self.pipeline is not None, "the core takes this pipeline"
        self.out = Guarded(nbytes)
        self.between = [Guarded(encoded_room(nbytes)) for _ in range(3)]
        self.guards = [self.out, *self.between]
        between = tuple(guard.inside for guard in self.between)
        self.worker = self.core.new_worker(self.out.inside, self.out.inside, between)

    def decode(self, encoded, mask=0):
        """Return the decoded bytes; whatever happens, assert that nothing else was written.

        Also that all of them were: what memory held before must not come through.
        """
        decoded = self._decode(encoded, mask, CANARY)
        assert self._decode(encoded, mask, 255 - CANARY) == decoded, "memory came through"
        return decoded

    def _decode(self, encoded, mask, before):
        stored = Guarded(encoded.size)
        stored.inside[...] = encoded
        for guard in self.guards:
            guard.inside[...] = before
        is_done = self.core.decode(
            self.pipeline,
            ctypes.byref(self.worker.struct),
            address(stored.inside),
            address(self.out.inside),
            len(self.filters),
            encoded.size,
            mask,
            self.out.inside.size,
        )
        decoded = self.out.inside.tobytes()
        assert stored.inside.tobytes() == encoded.tobytes(), "the encoded chunk was changed"
        assert stored.is_intact()
        assert all(guard.is_intact() for guard in self.guards), "written out of bounds"
        if not is_done:
            raise DamagedError(decoding_error(self.worker.struct.failure, self.filters))
        return decoded
