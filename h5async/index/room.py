"""Limits the memory that files may claim by numbers that they only declare.

A file of a few bytes may declare any number of samples, columns or names. Memory per such item is
counted here before it is allocated. The total may be a multiple of the stored bytes if that much
memory is free, or a small constant, or the limit set by the caller.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from h5async.errors import BudgetError
from h5async.io.stamps import FileStamp
from h5async.spelling import named
from h5async.system.resources import free_memory

if TYPE_CHECKING:
    from h5async.index.layout import DatasetLayout

MEMORY_SHARE = 0.5  # of free memory, if no limit is given
_LEAST_NBYTES = 64 << 20  # always allowed
_TIMES_STORED = 64  # fields of one byte a sample, well compressed, and all tables that samples need


class Room:
    """The memory for sizes that files declare, while a reader opens them.

    The option `max_batch_bytes` is always allowed.
    """

    def __init__(self, max_batch_bytes: int | None = None) -> None:
        self._least = max(_LEAST_NBYTES, max_batch_bytes or 0)
        self._stored: dict[str, int] = {}
        self._taken = 0

    def take(self, nbytes: int, what: str, files: Iterable[tuple[str, FileStamp]]) -> None:
        """Count memory that is about to be allocated; BudgetError if it exceeds the limit.

        `what` begins the message: ``'a.h5: dataset "x" of shape (4,): its values'``. `files` are
        name and stamp of those that hold the dataset, from `files_of`.
        """
        wanted = self._taken + nbytes
        if wanted > self._least:
            self._stored |= {name: stamp.nbytes for name, stamp in files}
            stored = sum(self._stored.values())
            free = int(MEMORY_SHARE * free_memory()[0].nbytes)
            limit = max(self._least, min(_TIMES_STORED * stored, free))
            if wanted > limit:
                before = f", after {self._taken:,} for others" if self._taken else ""
                raise BudgetError(
                    f"{what} take {nbytes:,} bytes{before}, more than the {limit:,} that may be"
                    f" taken for files of {stored:,} bytes, with {free:,} bytes of memory to use;"
                    f" store fewer, or set {named('max_batch_bytes')} to {wanted} if you trust the"
                    " file"
                )
        self._taken = wanted


def files_of(*layouts: DatasetLayout) -> Iterator[tuple[str, FileStamp]]:
    """Yield name and stamp of all files that hold some datasets."""
    for layout in layouts:
        yield layout.file, layout.stamp
        yield from layout.attached
        yield from ((heap.file, heap.stamp) for heap in layout.heaps)
        for leaf in layout.leaves():
            yield from ((origin.file, origin.stamp) for origin in (leaf, *leaf.origins()))
