"""Describes slots in shared memory to the other process, and gives arrays for descriptions.

`ReaderSlots` is for the reader's process, which makes the slots; `HelperSlots` for the helper
process, which fills them. An array that `postprocess` returns, where it is not the slot's own, is
copied into shared memory beside the slots: an *extra* array. Each slot and field has memory for
one, its *room*, which is replaced by twice as much where it is too small. Whichever helper fills a
slot is told its rooms: so there are as many, however many helpers there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from h5async.errors import PostprocessError
from h5async.fill.records import FillOutcome, SlotMemory
from h5async.io.shared import ArraySpec, SharedMemory
from h5async.process.messages import Answer, Rooms, SlotSpecs
from h5async.spelling import named


class ReaderSlots:
    """Slots in the memory of the process that made them.

    Parameters
    ----------
    shared
        The memory.
    slots
        Arrays in it; raw ones of other memory where the filler transforms them.

    Attributes
    ----------
    specs
        What helpers are told of them.
    """

    def __init__(self, shared: SharedMemory, slots: Sequence[SlotMemory]) -> None:
        self._shared = shared
        self._slots = slots
        rows = len(slots[0].out[0])
        numbers = shared.empty(len(slots) * rows * 8).view(np.int64).reshape(len(slots), rows)
        self._numbers = list(numbers)
        self.specs = [self._specs(*of_slot) for of_slot in zip(slots, numbers, strict=True)]
        self._rooms: list[Rooms] = [()] * len(slots)

    def drop_encoded(self, slots: Sequence[SlotMemory]) -> None:
        """Take slots without memory for encoded chunks."""
        self._slots = slots
        self.specs = [spec._replace(encoded=(None,) * len(spec.encoded)) for spec in self.specs]

    def index(self, slot: int, size: int) -> NDArray[np.int64]:
        """Return the sample numbers of the batch in a slot, in memory of their own."""
        return self._numbers[slot][:size].copy()

    def arrays(self, answer: Answer) -> tuple[NDArray[Any], ...]:
        """Return the arrays of a batch, where the helper put them.

        Raises
        ------
        OutOfMemoryError
            If memory that the helper added cannot be mapped.
        """
        slot, size = answer.request[0], answer.size
        if any(answer.extras):
            self._note_rooms(slot, answer.extras)
        pairs = zip(self._slots[slot].out, answer.extras, strict=True)
        return tuple(
            out[:size] if spec is None else self._shared.array(spec) for out, spec in pairs
        )

    def rooms(self, slot: int) -> Rooms:
        """Return the memory beside a slot, for the helper that fills it next."""
        return self._rooms[slot]

    def _note_rooms(self, slot: int, extras: Sequence[ArraySpec | None]) -> None:
        rooms: list[tuple[int, int] | None] = list(self._rooms[slot] or [None] * len(extras))
        for field, spec in enumerate(extras):
            if spec is not None:
                offset, nbytes = rooms[field] or (-1, 0)
                rooms[field] = (
                    spec.offset,
                    max(nbytes, spec.nbytes) if offset == spec.offset else spec.nbytes,
                )
        self._rooms[slot] = tuple(rooms)

    def _specs(self, slot: SlotMemory, numbers: NDArray[np.int64]) -> SlotSpecs:
        spec = self._shared.spec
        out = [spec(array) for array in slot.out]
        of_numbers = spec(numbers)
        assert of_numbers is not None
        return SlotSpecs(
            tuple(spec(array) for array in slot.raw),
            tuple(found for found in out if found is not None),
            tuple(None if array is None else spec(array) for array in slot.encoded),
            of_numbers,
        )


class HelperSlots:
    """Slots in the memory of the process that fills them.

    Parameters
    ----------
    shared
        The memory.
    specs
        What the reader's process told of them.
    raws
        By field: shape and dtype of a row as it is read.

    Attributes
    ----------
    slots
        Memory for the filler.
    """

    def __init__(
        self,
        shared: SharedMemory,
        specs: Sequence[SlotSpecs],
        raws: Sequence[tuple[tuple[int, ...], np.dtype[Any]]],
    ) -> None:
        self._shared = shared
        self._specs = specs
        self._numbers: list[NDArray[np.int64]] = [shared.array(spec.numbers) for spec in specs]
        self._sizes = [0] * len(specs)  # samples in the batches
        self._told: list[Rooms] = [()] * len(specs)
        self._rooms: dict[tuple[int, int], NDArray[np.uint8]] = {}  # that this process has mapped
        self.slots = [self._slot(spec, raws) for spec in specs]

    def index(self, slot: int) -> NDArray[np.int64]:
        """Return the sample numbers of the batch in a slot, in memory of their own."""
        return self._numbers[slot][: self._sizes[slot]].copy()

    def begin(self, slot: int, rooms: Rooms) -> None:
        """Note the memory beside a slot, which is to be filled."""
        self._told[slot] = rooms

    def put(self, slot: int, outcome: FillOutcome) -> tuple[ArraySpec | None, ...]:
        """Put what a batch has beside its slot into shared memory; different slots in any threads.

        Returns
        -------
        tuple of ArraySpec or None
            By field: the extra array; None where it is the slot's own.

        Raises
        ------
        PostprocessError
            If an array cannot lie in shared memory.
        OutOfMemoryError
            If the system refuses memory.
        """
        size = self._sizes[slot] = outcome.index.size
        self._numbers[slot][:size] = outcome.index
        return tuple(
            self._put_array(slot, field, array) for field, array in enumerate(outcome.arrays)
        )

    def drop_encoded(self) -> list[SlotMemory]:
        """Give the memory for encoded chunks back; return the slots without it."""
        self.slots = [slot._replace(encoded=(None,) * len(slot.encoded)) for slot in self.slots]
        for spec in [spec for specs in self._specs for spec in specs.encoded]:
            if spec is not None:
                self._shared.discard(spec)
        return self.slots

    def _slot(
        self, specs: SlotSpecs, raws: Sequence[tuple[tuple[int, ...], np.dtype[Any]]]
    ) -> SlotMemory:
        out = tuple(self._shared.array(spec) for spec in specs.out)
        raw = tuple(
            delivered if spec == own else np.empty((len(delivered), *row), dtype)
            for spec, own, delivered, (row, dtype) in zip(
                specs.raw, specs.out, out, raws, strict=True
            )
        )
        encoded = tuple(
            None if spec is None else self._shared.array(spec) for spec in specs.encoded
        )
        return SlotMemory(raw, out, encoded)

    def _put_array(self, slot: int, field: int, array: NDArray[Any]) -> ArraySpec | None:
        own = self.slots[slot].out[field]
        if array.ctypes.data == own.ctypes.data and array.dtype == own.dtype:
            if array.shape == (len(array), *own.shape[1:]) and array.flags.c_contiguous:
                return None
        if array.dtype.hasobject:
            raise PostprocessError(
                f"postprocess returned dtype {array.dtype}: Python objects cannot lie in memory"
                " that processes share; return numbers or fixed-size strings, or read with"
                f" {named('workers', 'thread')}"
            )
        room = self._room(slot, field)
        if room is None or room.nbytes < array.nbytes:
            twice = 0 if room is None else 2 * room.nbytes
            room = self._rooms[slot, field] = self._shared.empty(max(array.nbytes, twice))
        target: NDArray[Any] = np.ndarray(array.shape, array.dtype, room)
        np.copyto(target, array)
        return self._shared.spec(target)

    def _room(self, slot: int, field: int) -> NDArray[np.uint8] | None:
        told = self._told[slot][field] if self._told[slot] else None
        if told is None:
            return None
        known = self._rooms.get((slot, field))
        spec = None if known is None else self._shared.spec(known)
        if spec is None or spec.offset != told[0]:  # another helper has added it
            room = ArraySpec(told[0], (told[1],), np.dtype(np.uint8))
            known = self._rooms[slot, field] = self._shared.array(room)
        return known
