"""Hands filled batches of the engine over to the caller as `Batch` objects."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from h5async.fill.outcomes import FillOutcome
from h5async.reader.batch import Batch, Life, expire
from h5async.reader.engine import Engine


class Handover:
    """Makes batches of filled slots: views of the slot's memory, or copies if requested."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._held: Batch | None = None  # the caller's batch, with debug_lifetimes
        self._life = Life()  # of the caller's batch

    def batch(self, serial: int, filled: FillOutcome) -> Batch:
        """Return a successfully filled batch."""
        engine = self._engine
        device, course = engine.device, engine.position.course
        epoch, number, is_last = -1, -1, False
        if serial not in course.given:
            epoch, number, _ = course.schedule.position(serial)
            is_last = course.schedule.is_last(serial)
            engine.position.looped_epoch = epoch
        self._life = Life()
        batch = self._batch(filled.arrays, filled.index, epoch, number, is_last, self._life)
        if engine.config.copy:
            return batch.copy()
        if engine.config.debug_lifetimes:
            batch = self._held = batch.copy()
            device.share()
        return batch

    def given(self, samples: NDArray[np.int64], arrays: tuple[Any, ...]) -> Batch:
        """Return a batch outside of epochs, from arrays that last."""
        return self._batch(arrays, samples, -1, -1, False)

    def _batch(
        self,
        several: tuple[Any, ...],
        index: NDArray[np.int64],
        epoch: int,
        number: int,
        last: bool,
        life: Life | None = None,
    ) -> Batch:
        engine = self._engine
        several, made = several[: len(engine.names)], several[len(engine.names) :]
        arrays = dict(zip(engine.names, several, strict=True))
        if engine.masks:
            if not made:
                masks = tuple([are_there(index) for are_there in engine.masks.values()])
                made = engine.device.owned(masks)
            arrays |= zip(engine.masks, made, strict=True)
        sequences = engine.samplings.sequences
        return Batch(arrays, index, epoch, number, last, engine.device, sequences, life)

    def expire(self) -> None:
        """End the life of a batch; with `debug_lifetimes`, make fields raise and arrays poison."""
        self._life.over = True
        if self._held is not None:
            held, self._held = self._held, None
            self._engine.device.poison(held)
            expire(held)


class Epoch(Iterator[Batch]):
    """The rest of one epoch; it ends if another loop has moved the reader on.

    Batches of given samples among its own are part of it. `get_next_batch` is the reader's.
    """

    def __init__(self, engine: Engine, epoch: int, get_next_batch: Callable[[], Batch]) -> None:
        self._engine = engine
        self._place = engine.position.course.place
        self._epoch = epoch
        self._get_next_batch = get_next_batch

    def __next__(self) -> Batch:
        engine = self._engine
        course, serial = engine.position.course, engine.ring.consumer.next
        if course.place is not self._place or (
            serial not in course.given and course.schedule.position(serial).epoch != self._epoch
        ):
            engine.position.looped_epoch = None
            raise StopIteration
        return self._get_next_batch()
