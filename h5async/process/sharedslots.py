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
from typing import Any

import numpy as np
from numpy.typing import NDArray

from h5async.errors import OutOfMemoryError, PostprocessError
from h5async.fill.outcomes import FillOutcome
from h5async.io.shared import ArraySpec, SharedMemory
from h5async.process.messages import Answer, Rooms, SentField, SlotSpecs
from h5async.samples.assembly import SlotMemory
from h5async.samples.samplearrays import SampleArrays
from h5async.spelling import named

_MOST_ARRAYS = 3  # of one field


class ReaderSlots:
    """Slots in the memory of the process that made them; `specs` is what helpers receive.

    `rooms` is the memory beside each slot, for the helper that fills it next.

    `slots` are arrays in `shared`; raw arrays lie in other memory if the filler transforms them. A
    slot has room for `rows` samples. `pixels_nbytes` has, per field, the maximum size of the pixels
    of a batch of images.
    """

    def __init__(
        self,
        shared: SharedMemory,
        slots: Sequence[SlotMemory],
        rows: int,
        pixels_nbytes: Sequence[int],
    ) -> None:
        self._shared = shared
        numbers = shared.empty(len(slots) * rows * 8).view(np.int64).reshape(len(slots), rows)
        self._numbers = list(numbers)
        # By slot: where its own memory begins in the shared memory, and that memory.
        self._blocks: list[list[tuple[int, NDArray[np.uint8]]]] = []
        self.rooms: list[Rooms] = [{}] * len(slots)
        self.specs: list[SlotSpecs] = []
        for slot, own in zip(slots, numbers, strict=True):
            made = [
                slot.made[field]
                if slot.made and slot.made[field] is not None
                else self._new(nbytes)
                for field, nbytes in enumerate(pixels_nbytes)
            ]
            blocks = [
                one.reshape(-1).view(np.uint8) for one in (*slot.out, *made) if one is not None
            ]
            self._blocks.append([(_own_spec(shared, one).offset, one) for one in blocks])
            self.specs.append(
                SlotSpecs(
                    tuple(map(shared.spec, slot.raw)),
                    tuple(_own_spec(shared, out) for out in slot.out),
                    tuple(None if one is None else _own_spec(shared, one) for one in made),
                    _own_spec(shared, own),
                )
            )

    def index(self, slot: int, size: int) -> NDArray[np.int64]:
        """Return a copy of the sample numbers of the batch in a slot."""
        return self._numbers[slot][:size].copy()

    def arrays(self, answer: Answer) -> tuple[Any, ...]:
        """Return the fields of a batch as views of memory that helpers filled.

        OutOfMemoryError if memory that the helper added cannot be mapped.
        """
        slot = answer.request[0]
        if answer.rooms:
            self.rooms[slot] = {**self.rooms[slot], **answer.rooms}
        found = []
        for kind, parts, sample_shape in answer.fields:
            arrays = [self._array(slot, part) for part in parts]
            found.append(kind.of_arrays(arrays, sample_shape) if kind else arrays[0])
        return tuple(found)

    def _array(self, slot: int, part: ArraySpec) -> NDArray[Any]:
        """Return an array: in the memory of the slot, which may be pinned, if it lies there."""
        for begin, block in self._blocks[slot]:
            if begin <= part.offset and part.end <= begin + block.nbytes:
                return np.ndarray(part.shape, part.dtype, block, part.offset - begin)
        return self._shared.array(part)

    def _new(self, nbytes: int) -> NDArray[np.uint8] | None:
        """Return memory for pixels; None means that they are copied out of the helper's."""
        try:
            return self._shared.empty(nbytes) if nbytes else None
        except OutOfMemoryError:
            return None


class HelperSlots:
    """Slots in the memory of the process that fills them; `slots` is for the filler.

    `raws` has the shape and dtype of a row as read, per column. `rooms` of a slot are set before it
    is filled.
    """

    def __init__(
        self,
        shared: SharedMemory,
        specs: Sequence[SlotSpecs],
        raws: Sequence[tuple[tuple[int, ...], np.dtype[Any]]],
    ) -> None:
        self._shared = shared
        self._numbers: list[NDArray[np.int64]] = [shared.array(spec.numbers) for spec in specs]
        self._sizes = [0] * len(specs)  # samples in the batches
        self.rooms: list[Rooms] = [{}] * len(specs)
        self.slots = [self._slot(spec, raws) for spec in specs]
        self._specs = specs

    def index(self, slot: int) -> NDArray[np.int64]:
        """Return a copy of the sample numbers of the batch in a slot."""
        return self._numbers[slot][: self._sizes[slot]].copy()

    def put(
        self, slot: int, outcome: FillOutcome
    ) -> tuple[tuple[SentField, ...], dict[int, tuple[int, int]]]:
        """Put the arrays outside a batch's slot into shared memory; different slots in any threads.

        Returns `Answer.fields` and `Answer.rooms`. `PostprocessError` is raised if an array cannot
        lie in shared memory, `OutOfMemoryError` if the system refuses memory.
        """
        size = self._sizes[slot] = outcome.index.size
        self._numbers[slot][:size] = outcome.index
        added: dict[int, tuple[int, int]] = {}
        fields = []
        for field, value in enumerate(outcome.arrays):
            is_one = not isinstance(value, SampleArrays)
            parts = tuple(
                self._inside(slot, array)
                or self._copied(slot, _MOST_ARRAYS * field + number, array, added)
                for number, array in enumerate((value,) if is_one else value.arrays)
            )
            more = (None, parts, ()) if is_one else (type(value), parts, value.sample_shape)
            fields.append(SentField(*more))
        return tuple(fields), added

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

    def _inside(self, slot: int, array: NDArray[Any]) -> ArraySpec | None:
        """Describe an array that lies in a slot; None if it does not."""
        is_plain = array.flags.c_contiguous and not array.dtype.hasobject
        found, specs = self._shared.spec(array) if is_plain else None, self._specs[slot]
        if found is None:
            return None
        several = [own for own in (*specs.out, *specs.made) if own is not None]
        is_inside = any(own.offset <= found.offset and found.end <= own.end for own in several)
        return found if is_inside else None

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
        offset, nbytes = self.rooms[slot].get(number, (0, 0))
        if nbytes < array.nbytes:
            room = self._shared.empty(max(array.nbytes, 2 * nbytes))
            if nbytes:  # the batch that was there is no longer in use
                self._shared.discard(ArraySpec(offset, (nbytes,), room.dtype))
            offset = _own_spec(self._shared, room).offset
            added[number] = offset, room.nbytes
        spec = ArraySpec(offset, array.shape, array.dtype)
        np.copyto(self._shared.array(spec), array)
        return spec


def _own_spec(shared: SharedMemory, array: NDArray[Any]) -> ArraySpec:
    """Describe an array that is known to be in shared memory."""
    spec = shared.spec(array)
    assert spec is not None
    return spec
