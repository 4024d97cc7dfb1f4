"""Decodes the encoded samples of a batch, such as images, in parallel in all threads.

Encoded samples enter, as `Ragged` bytes; what their kinds deliver leaves. It lies in memory of the
slot, which is allocated once if its size is known, and else grows with the largest batch.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Collection, Mapping
from typing import Any

from h5async.fill.reading import BatchReader
from h5async.io.shared import Growing, plain_memory
from h5async.opening.dataset import OpenedDataset
from h5async.plan.crops import random_numbers
from h5async.plan.records import Int64s
from h5async.samples.fieldkind import DecodingWork, EncodedBatch, FieldDecoder, FieldKind


class BatchDecoder:
    """Decodes the encoded fields of batches. Safe to use from many threads.

    `threads`, in all processes, decode at the same time. `limit_nbytes` limits what is decoded in
    all slots, and the memory that decoding takes beside that. A device transforms the fields
    `left`: batches have them as decoded.

    Raises as `FieldKind.decoder`.
    """

    def __init__(
        self,
        opened: OpenedDataset,
        reader: BatchReader,
        threads: int,
        limit_nbytes: int,
        left: Collection[str],
    ) -> None:
        self._seed, slots = opened.config.seed, reader.slots
        self._of_batch = limit_nbytes // max(1, len(slots.memory))
        spans = dict(zip(opened.layouts, reader.samplings.rows, strict=True))
        of_slots = {
            name: kind.as_decoded if name in left else kind for name, kind in opened.kinds.items()
        }

        def decoders(kinds: Mapping[str, FieldKind]) -> dict[int, FieldDecoder]:
            of_sample = limit_nbytes // max(1, threads)
            found = {
                number: kind.decoder(opened.layouts[name], spans[name], reader.core, of_sample)
                for number, (name, kind) in enumerate(kinds.items())
            }
            return {number: one for number, one in found.items() if one is not None}

        self.fields = decoders(opened.kinds)
        self._of_slots = decoders(of_slots) if left else self.fields
        sizes = [kind.decoded_nbytes(slots.rows) for kind in of_slots.values()]
        self._memory = [
            {
                number: Growing(
                    slots.new_memory, sizes[number], slot.made[number] if slot.made else None
                )
                for number in self._of_slots
            }
            for slot in slots.memory
        ]
        self._lock = threading.Lock()
        self.broken_images = 0  # those that were replaced so far

    def note_broken(self) -> None:
        """Count a sample that was replaced."""
        with self._lock:
            self.broken_images += 1

    def batch(
        self, arrays: tuple[Any, ...], index: Int64s, epoch: int, slot: int | None
    ) -> DecodedBatch:
        """Begin to decode a batch; `DecodedBatch.work` does it.

        `arrays` are those of all fields; random numbers depend on `epoch` and `index`. Without a
        `slot`, memory is new, and the device transforms nothing. `ReadError` is raised if a header
        must be read, and is broken, or samples take too much memory.
        """
        found, most = list(arrays), self._of_batch
        todo: list[DecodingWork] = []
        numbers = None
        if any(field.is_random for field in self.fields.values()):
            numbers = random_numbers(self._seed, epoch, index)
        for number, field in (self.fields if slot is None else self._of_slots).items():
            memory = Growing(plain_memory) if slot is None else self._memory[slot][number]
            encoded = EncodedBatch(arrays[number], index, numbers, memory.of, most)
            found[number], works = field.begin(encoded)
            todo += works
        return DecodedBatch(tuple(found), todo, self.note_broken)

    def close(self) -> None:
        """Release the memory."""
        self._memory = []


class DecodedBatch:
    """The encoded samples of one batch while `work` decodes them to the delivered `arrays`.

    There is one of `works` per sample, made before any is decoded, as a loop over all is fastest.
    """

    def __init__(
        self, arrays: tuple[Any, ...], works: list[DecodingWork], note_broken: Callable[[], None]
    ) -> None:
        self.arrays = arrays
        self.count = len(works)
        self._works = works
        self._note_broken = note_broken
        # Threads take samples one by one, because decoding times differ much.
        self._todo = itertools.count()

    def work(self, must_end: Callable[[], bool], end: int) -> None:
        """Decode samples until `end` were begun, or `must_end` is true; any number of threads may.

        `ReadError` is raised if one is broken.
        """
        while not must_end():
            number = next(self._todo)
            if number >= self.count:
                return
            if not self._works[number]():
                self._note_broken()
            if number + 1 >= end:
                return
