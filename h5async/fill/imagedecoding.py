"""Decodes the encoded samples of a batch, such as images, in parallel in all threads.

Encoded samples enter, as `Ragged` bytes; what their kinds deliver leaves. It lies in memory of the
slot, which is allocated once if its size is known, and else grows with the largest batch.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from h5async.core.binding import Core
from h5async.index.layout import DatasetLayout
from h5async.io.growing import Growing, plain_memory
from h5async.plan.crops import random_numbers
from h5async.samples.fieldkind import (
    DecodingWork,
    Empty,
    EncodedBatch,
    FieldDecoder,
    FieldKind,
    Rows,
)
from h5async.samples.kinds import SlotMemory


class BatchDecoder:
    """Decodes the encoded fields of batches. Safe to use from many threads.

    Raises as `FieldKind.decoder`.

    Parameters
    ----------
    kinds, layouts
        By name; layouts of all columns.
    spans
        By column: which rows each sample consists of.
    seed
        Of the reader.
    core
        The compiled core, if there is one.
    slots, rows
        Memory of the slots, and samples that fit into each.
    threads
        Threads that decode at the same time, in all processes.
    limit_nbytes
        The limit for decoded samples in all slots, and for what decoding takes beside them.
    left
        Names of fields that a device transforms: batches have them as decoded.
    new_memory
        Returns host memory for the decoded samples of a slot.
    """

    def __init__(
        self,
        kinds: Mapping[str, FieldKind],
        layouts: Mapping[str, DatasetLayout],
        spans: Mapping[str, Rows],
        seed: int,
        core: Core | None,
        *,
        slots: Sequence[SlotMemory],
        rows: int,
        threads: int,
        limit_nbytes: int,
        left: Collection[str] = (),
        new_memory: Empty = plain_memory,
    ) -> None:
        self._seed = seed
        self._of_batch = limit_nbytes // max(1, len(slots))
        of_sample = limit_nbytes // max(1, threads)

        of_slots = {n: kind.as_decoded if n in left else kind for n, kind in kinds.items()}

        def decoders(several: Mapping[str, FieldKind]) -> dict[int, FieldDecoder]:
            found = {
                number: kind.decoder(layouts[name], spans[name], core, of_sample)
                for number, (name, kind) in enumerate(several.items())
            }
            return {number: one for number, one in found.items() if one is not None}

        self.fields = decoders(kinds)
        self._of_slots = decoders(of_slots) if left else self.fields
        sizes = [kind.decoded_nbytes(rows) for kind in of_slots.values()]
        self._memory = [
            {
                number: Growing(new_memory, sizes[number], slot.made[number] if slot.made else None)
                for number in self._of_slots
            }
            for slot in slots
        ]
        self._lock = threading.Lock()
        self._broken = 0

    @property
    def broken_images(self) -> int:
        """The number of samples replaced so far."""
        return self._broken

    def note_broken(self) -> None:
        """Count a sample that was replaced."""
        with self._lock:
            self._broken += 1

    def batch(
        self, arrays: tuple[Any, ...], index: NDArray[np.int64], epoch: int, slot: int | None
    ) -> DecodedBatch:
        """Begin to decode a batch; `DecodedBatch.work` does it.

        `ReadError` is raised if a header must be read, and is broken, or samples take too much
        memory.

        Parameters
        ----------
        arrays
            Of all fields; those to decode are encoded.
        index
            int64 (n,): sample numbers.
        epoch
            Random numbers depend on it.
        slot
            Whose memory is used; None: new memory, and the device transforms nothing.
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
    """The encoded samples of one batch while they are decoded.

    Parameters
    ----------
    arrays
        The delivered arrays, by field; those of encoded samples are filled by `work`.
    works
        One per sample; made before any is decoded, as a loop over all is fastest.
    note_broken
        Called for each sample that is replaced.
    """

    def __init__(
        self,
        arrays: tuple[Any, ...],
        works: list[DecodingWork],
        note_broken: Callable[[], None],
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
