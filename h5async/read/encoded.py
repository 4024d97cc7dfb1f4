"""Reads encoded chunks, for a GPU to decode.

A slice of an `EncodedPlan` enters; the chunks leave as they are stored in the file, in the memory
that the slot has for them.
"""

from __future__ import annotations

import ctypes
from functools import partial

import numpy as np
from numpy.typing import NDArray

from h5async.core.binding import Core, address
from h5async.core.structures import Event
from h5async.errors import ReaderClosedError, ReadError
from h5async.index.layout import DatasetLayout
from h5async.io.localfile import LocalFile
from h5async.io.localfiles import FileEventError, LocalFiles
from h5async.io.stamps import FileStamp
from h5async.plan.encoded import EncodedPlan
from h5async.read.collection import file_struct
from h5async.read.scratch import CLOSED, Scratch


class EncodedReader:
    """Reads encoded chunks. Safe to use from many threads.

    Parameters
    ----------
    core
        The compiled core.
    layout
        Of a dataset that has an `EncodedFormat`.
    files
        Opens the files; closed by whoever made it.
    """

    def __init__(self, core: Core, layout: DatasetLayout, files: LocalFiles) -> None:
        self._core = core
        self._leaves = list(layout.leaves())
        self._files = files

    def execute(
        self, plan: EncodedPlan, start: int, stop: int, encoded: NDArray[np.uint8], scratch: Scratch
    ) -> None:
        """Read items `start` to `stop` of a plan to where the plan says in `encoded`.

        Raises
        ------
        ReadError
            If one cannot be read.
        """
        for leaf, begin, end in zip(
            plan.leaf, plan.leaf_start[:-1], plan.leaf_start[1:], strict=True
        ):
            here = slice(max(start, begin), min(stop, end))
            if here.stop > here.start:
                source = self._leaves[leaf]
                work = partial(self._read, plan, source, here, encoded, scratch)
                self._files.read(source.file, source.stamp, work)

    def _read(
        self,
        plan: EncodedPlan,
        source: DatasetLayout,
        here: slice,
        encoded: NDArray[np.uint8],
        scratch: Scratch,
        file: LocalFile,
        stamp: FileStamp,
    ) -> bool:
        offset, nbytes, count = plan.offset[here], plan.nbytes[here], here.stop - here.start
        call = _CoreCall(self._core, file, stamp, scratch)
        done = self._core.read_encoded(
            *call.arguments,
            address(offset),
            address(nbytes),
            address(plan.position[here]),
            count,
            address(encoded),
            encoded.nbytes,
        )
        call.finish()
        if done < count:
            raise ReadError(
                f'{source.file}: dataset "{source.path}": {nbytes[done]} bytes at byte'
                f" {offset[done]} cannot be read"
            )
        return not file.has_swmr_writer


class _CoreCall:
    """A call of the core for one file, in one thread."""

    def __init__(self, core: Core, file: LocalFile, stamp: FileStamp, scratch: Scratch) -> None:
        self._struct = file_struct(file, stamp)
        self._worker = scratch.worker(core)
        self.arguments = ctypes.byref(self._struct), ctypes.byref(self._worker.struct)

    def finish(self) -> None:
        """Note, right after a call, how it ended.

        Raises
        ------
        FileEventError
            If what was read is worth nothing: the file has changed, or a page is missing.
        ReaderClosedError
            If nobody wants it any more.
        """
        self._worker.note_return()
        event = self._struct.event
        if event == Event.STOPPED:
            raise ReaderClosedError(CLOSED)
        if event != Event.NONE:
            raise FileEventError(map_failed=event == Event.FAULTED)
