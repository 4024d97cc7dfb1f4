"""Describes slots in shared memory to the other process, and turns descriptions into arrays.

`ReaderSlots` is for the reader's process, which makes the slots; `HelperSlots` is for the helper
process, which fills them. A field of a batch is one array or several (`samples/samplearrays.py`).
An array outside the slot, such as a result of `postprocess` or the offsets of ragged samples, is
copied into shared memory beside the slots. Each slot, field and part has one such block, its
*room*, replaced by one of twice the needed size when it is too small. Whichever helper fills a slot
is told its rooms, so their number does not depend on the number of helpers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from h5async.errors import OutOfMemoryError, PostprocessError
from h5async.fill.outcomes import FillOutcome
from h5async.io.shared import ArraySpec, SharedMemory
from h5async.process.messages import Answer, Part, Rooms, SentField, SlotSpecs
from h5async.samples.assembly import SlotMemory
from h5async.samples.samplearrays import SampleArrays
from h5async.spelling import named

_MOST_ARRAYS = 3  # of one field


class ReaderSlots:
    """Slots in the memory of the process that made them; `specs` is what helpers receive.

    `slots` are arrays in `shared`; raw arrays lie in other memory if the filler transforms them. A
    slot has room for `rows` samples. Per field, `first_columns` has the number of its first column,
    and `pixels_nbytes` the maximum size of the pixels of a batch of images.
    """

    def __init__(
        self,
        shared: SharedMemory,
        slots: Sequence[SlotMemory],
        rows: int,
        first_columns: Sequence[int],
        pixels_nbytes: Sequence[int],
    ) -> None:
        self._shared = shared
        self._slots = slots
        self._first_columns = first_columns
        numbers = shared.empty(len(slots) * rows * 8).view(np.int64).reshape(len(slots), rows)
        self._numbers = list(numbers)
        self._pixels = [[self._new(nbytes) for nbytes in pixels_nbytes] for _ in slots]
        self.specs = [
            self._specs(*of_slot) for of_slot in zip(slots, self._pixels, numbers, strict=True)
        ]
        self._rooms: list[Rooms] = [{}] * len(slots)

    def index(self, slot: int, size: int) -> NDArray[np.int64]:
        """Return a copy of the sample numbers of the batch in a slot."""
        return self._numbers[slot][:size].copy()

    def arrays(self, answer: Answer) -> tuple[Any, ...]:
        """Return the fields of a batch as views of memory that helpers filled.

        OutOfMemoryError if memory that the helper added cannot be mapped.
        """
        slot, size = answer.request[0], answer.size
        if answer.rooms:
            self._rooms[slot] = {**self._rooms[slot], **answer.rooms}
        out = self._slots[slot].out
        return tuple(
            out[column][:size] if sent is None else self._field(out, sent)
            for column, sent in zip(self._first_columns, answer.fields, strict=True)
        )

    def rooms(self, slot: int) -> Rooms:
        """Return the memory beside a slot, for the helper that fills it next."""
        return self._rooms[slot]

    def _field(self, out: Sequence[NDArray[Any]], sent: SentField) -> Any:
        arrays = [self._array(out, part) for part in sent.parts]
        return sent.kind.of_arrays(arrays, sent.sample_shape) if sent.kind else arrays[0]

    def _array(self, out: Sequence[NDArray[Any]], part: Part) -> NDArray[Any]:
        if isinstance(part, ArraySpec):
            return self._shared.array(part)
        column, count = part
        return out[column][:count]

    def _new(self, nbytes: int) -> NDArray[np.uint8] | None:
        """Return memory for pixels; None means that they are copied out of the helper's."""
        try:
            return self._shared.empty(nbytes) if nbytes else None
        except OutOfMemoryError:
            return None

    def _specs(
        self,
        slot: SlotMemory,
        pixels: Sequence[NDArray[np.uint8] | None],
        numbers: NDArray[np.int64],
    ) -> SlotSpecs:
        spec, own = self._shared.spec, partial(_own_spec, self._shared)
        made = [
            slot.made[number] if slot.made and slot.made[number] is not None else of_field
            for number, of_field in enumerate(pixels)
        ]
        return SlotSpecs(
            tuple(map(spec, slot.raw)),
            tuple(map(own, slot.out)),
            tuple(None if array is None else spec(array) for array in made),
            own(numbers),
        )


class HelperSlots:
    """Slots in the memory of the process that fills them; `slots` is for the filler.

    `raws` has the shape and dtype of a row as read, per column; `first_columns` the number of a
    field's first column.
    """

    def __init__(
        self,
        shared: SharedMemory,
        specs: Sequence[SlotSpecs],
        raws: Sequence[tuple[tuple[int, ...], np.dtype[Any]]],
        first_columns: Sequence[int],
    ) -> None:
        self._shared = shared
        self._specs = specs
        self._first_columns = first_columns
        self._numbers: list[NDArray[np.int64]] = [shared.array(spec.numbers) for spec in specs]
        self._sizes = [0] * len(specs)  # samples in the batches
        self._told: list[Rooms] = [{}] * len(specs)
        # By slot and number: those that this process has mapped.
        self._rooms: dict[tuple[int, int], NDArray[np.uint8]] = {}
        self.slots = [self._slot(spec, raws) for spec in specs]
        self._blocks = [_blocks(slot, spec) for slot, spec in zip(self.slots, specs, strict=True)]

    def index(self, slot: int) -> NDArray[np.int64]:
        """Return a copy of the sample numbers of the batch in a slot."""
        return self._numbers[slot][: self._sizes[slot]].copy()

    def begin(self, slot: int, rooms: Rooms) -> None:
        """Store the rooms of a slot that is to be filled."""
        self._told[slot] = rooms

    def put(
        self, slot: int, outcome: FillOutcome
    ) -> tuple[tuple[SentField | None, ...], dict[int, tuple[int, int]]]:
        """Put the arrays outside a batch's slot into shared memory; different slots in any threads.

        Returns `Answer.fields` and `Answer.rooms`. `PostprocessError` is raised if an array cannot
        lie in shared memory, `OutOfMemoryError` if the system refuses memory.
        """
        size = self._sizes[slot] = outcome.index.size
        self._numbers[slot][:size] = outcome.index
        added: dict[int, tuple[int, int]] = {}
        fields = tuple(
            self._put_field(slot, field, value, size, added)
            for field, value in enumerate(outcome.arrays)
        )
        return fields, added

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
        made = tuple(None if spec is None else self._shared.array(spec) for spec in specs.made)
        return SlotMemory(raw, out, made)

    def _put_field(
        self, slot: int, field: int, value: Any, size: int, added: dict[int, tuple[int, int]]
    ) -> SentField | None:
        kind, arrays = None, (value,)
        sample_shape: tuple[int | None, ...] = ()
        if isinstance(value, SampleArrays):
            kind, arrays, sample_shape = type(value), value.arrays, value.sample_shape
        first = self._first_columns[field]
        parts: list[Part] = []
        for number, array in enumerate(arrays):
            column = first + number
            if column < len(self.slots[slot].out) and self._is_column(slot, column, array):
                parts.append((column, len(array)))
            else:
                room = _MOST_ARRAYS * field + number
                parts.append(self._inside(slot, array) or self._copied(slot, room, array, added))
        is_own = not kind and parts[0] == (first, size)
        return None if is_own else SentField(kind, tuple(parts), sample_shape)

    def _is_column(self, slot: int, column: int, array: NDArray[Any]) -> bool:
        """Tell whether an array is the first rows of a column of a slot."""
        own = self.slots[slot].out[column]
        return (
            array.ctypes.data == own.ctypes.data
            and array.dtype == own.dtype
            and array.ndim > 0
            and array.shape[1:] == own.shape[1:]
            and array.flags.c_contiguous
        )

    def _inside(self, slot: int, array: NDArray[Any]) -> ArraySpec | None:
        """Describe an array that lies in a slot; None if it does not."""
        if not array.flags.c_contiguous or array.dtype.hasobject:
            return None
        address = array.ctypes.data
        for begin, nbytes, offset in self._blocks[slot]:
            if begin <= address and address + array.nbytes <= begin + nbytes:
                return ArraySpec(offset + address - begin, array.shape, array.dtype)
        return None

    def _copied(
        self, slot: int, number: int, array: NDArray[Any], added: dict[int, tuple[int, int]]
    ) -> ArraySpec:
        """Copy an array to its room; describe the copy."""
        if array.dtype.hasobject:
            raise PostprocessError(
                f"postprocess returned dtype {array.dtype}: Python objects cannot lie in memory"
                " that processes share; return numbers or fixed-size strings, or read with"
                f" {named('workers', 'thread')}"
            )
        room = self._room(slot, number)
        if room is None or room.nbytes < array.nbytes:
            twice = 0 if room is None else 2 * room.nbytes
            new = self._shared.empty(max(array.nbytes, twice))
            if room is not None:  # the batch that was there is no longer in use
                self._shared.discard(_own_spec(self._shared, room))
            room = self._rooms[slot, number] = new
            added[number] = (_own_spec(self._shared, new).offset, new.nbytes)
        target: NDArray[Any] = np.ndarray(array.shape, array.dtype, room)
        np.copyto(target, array)
        return _own_spec(self._shared, target)

    def _room(self, slot: int, number: int) -> NDArray[np.uint8] | None:
        told = self._told[slot].get(number)
        if told is None:
            return None
        known = self._rooms.get((slot, number))
        if known is None or _own_spec(self._shared, known).offset != told[0]:
            # Another helper has added it.
            room = ArraySpec(told[0], (told[1],), np.dtype(np.uint8))
            known = self._rooms[slot, number] = self._shared.array(room)
        return known


def _own_spec(shared: SharedMemory, array: NDArray[Any]) -> ArraySpec:
    """Describe an array that is known to be in shared memory."""
    spec = shared.spec(array)
    assert spec is not None
    return spec


def _blocks(slot: SlotMemory, specs: SlotSpecs) -> list[tuple[int, int, int]]:
    """Return where blocks of a slot begin here, their sizes, and their shared memory offsets."""
    pairs = zip((*slot.out, *slot.made), (*specs.out, *specs.made), strict=True)
    return [
        (array.ctypes.data, array.nbytes, spec.offset)
        for array, spec in pairs
        if array is not None and spec is not None
    ]
