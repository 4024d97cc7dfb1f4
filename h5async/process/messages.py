"""Defines the messages between a reader and its helper processes; pickles and sends them.

First the helper answers the options (`ReaderConfig`) with `Opened`, and `Starting` with `Started`.
Then the reader sends requests to fill slots (`FillRequest` and `Rooms`, as plain tuples), each
answered by one `Answer`, in any order, and notes without an answer (`NoteUploaded`, `Record`).

Arrays stay in shared memory, where the reader makes the slots (`ReaderSlots`). A field of a batch
is one array or several (`samples/samplearrays.py`). An array outside the slot, such as a result of
`postprocess` or the offsets of ragged samples, is copied into a block of shared memory beside the
slots. Each slot, field and part has one block, its *room*, which is replaced by a larger one, at
least twice as large, if it is too small. The helper that fills a slot is told the slot's rooms, so
their number does not depend on the number of helpers.
"""

from __future__ import annotations

import _socket
import pickle
import struct
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, pairwise
from typing import Any, NamedTuple, TypeAlias

import cloudpickle  # type: ignore[import-untyped]
import numpy as np
from numpy.typing import NDArray

from h5async import errors
from h5async.errors import H5AsyncError, OutOfMemoryError, ReadError, Skipped
from h5async.fill.outcomes import FillerStats, Recorded
from h5async.index.changes import fingerprint
from h5async.index.layout import DatasetLayout, HeapFile
from h5async.io.shared import ArraySpec, SharedMemory
from h5async.opening.limits import MemoryPlan
from h5async.opening.selecting import Chosen
from h5async.samples.assembly import SlotMemory
from h5async.samples.fieldkind import FieldKind, are_same
from h5async.samples.samplearrays import SampleArrays
from h5async.system.interruptions import suppressing

# Offset and size of each room of a slot, by a number for field and part. Immutable.
Rooms: TypeAlias = Mapping[int, tuple[int, int]]

_SIZE = struct.Struct("!Q")  # the size of the message that follows
_READ_NBYTES = 1 << 16  # one call receives the whole of most messages
# Without this flag, sending to a closed end kills a program that does not ignore SIGPIPE.
_SEND_FLAGS = getattr(_socket, "MSG_NOSIGNAL", 0)

_MAX_CAUSES = 8
_FOUND = (
    "has changed since the reader was made, as found by a new helper process, which replaces one"
    " that died"
)
_KNOWN = {kind for kind in vars(errors).values() if isinstance(kind, type)}


class Opened(NamedTuple):
    """The dataset is open, and the datasets that select its samples were read.

    `layouts` has all columns, by name; variable-length elements lack their positions.
    """

    layouts: dict[str, DatasetLayout]
    chosen: Chosen
    kinds: dict[str, FieldKind]  # of the fields, by name
    static: dict[str, Any]  # of the whole dataset, by field
    skipped: tuple[Skipped, ...] = ()  # files

    def check_same(self, now: Opened, found: str = _FOUND) -> None:
        """Raise ReadError if a new helper found other files or samples than the first one.

        `found` completes the message, after the name of the thing that differs.
        """
        changed, what = _changed_layout(self.layouts, now.layouts), None
        if changed is not None:
            what = "this file"
        elif not are_same(tuple(self.static.values()), tuple(now.static.values())):
            what = "a value of the whole dataset"
        elif not self.chosen.is_same(now.chosen):
            what = "the source of indices or weights"
        elif not all(  # the meaning of codes, and which columns are delivered
            type(one) is type(other) and one.is_same(other)
            for one, other in zip(self.kinds.values(), now.kinds.values(), strict=True)
        ):
            what = "a table of categories or columns"
        if what is not None:
            file = (changed or next(iter(self.layouts.values()))).file
            raise ReadError(f"{file}: {what} {found}; make a new reader")


def _changed_layout(
    before: Mapping[str, DatasetLayout], now: Mapping[str, DatasetLayout]
) -> DatasetLayout | None:
    if list(before) != list(now):  # a path leads to a different kind of data
        return next(iter(before.values()))
    for name, layout in before.items():
        if not _is_same(layout, now[name]):
            pairs = zip(layout.leaves(), now[name].leaves(), strict=False)
            return next((old for old, new in pairs if not _is_same(old, new)), layout)
    return None


def _is_same(one: DatasetLayout, other: DatasetLayout) -> bool:
    return (
        _files(one) == _files(other)
        and fingerprint([one], has_places=True) == fingerprint([other], has_places=True)
        and one.file_samples == other.file_samples
    )


def _files(layout: DatasetLayout) -> list[object]:
    several: Iterator[DatasetLayout | HeapFile] = chain(layout.leaves(), layout.heaps)
    return [(one.file, one.stamp.file_id) for one in several]


class SlotSpecs(NamedTuple):
    """Describes a slot in shared memory: the arrays of `SlotMemory`, and the sample numbers.

    None: an array is not in shared memory, or not needed. `numbers` is int64 (batch,).
    """

    raw: tuple[ArraySpec | None, ...]
    out: tuple[ArraySpec, ...]
    made: tuple[ArraySpec | None, ...]
    numbers: ArraySpec


class Starting(NamedTuple):
    """Start to fill slots with room for `rows` samples each.

    `has_device_cache`: the reader tracks which samples the device cache has.
    """

    slots: list[SlotSpecs]
    rows: int
    memory_plan: MemoryPlan
    has_device_cache: bool


class Started(NamedTuple):
    """Slots can be filled; `methods` says how each field is read, `cache` describes the cache."""

    methods: list[str]
    cache: str


class NoteUploaded(NamedTuple):
    """The device cache has the samples of a slot's batch."""

    slot: int


class Record(NamedTuple):
    """Record up to `max_events` thread events and send them with the answers; 0 stops it."""

    max_events: int


class SentField(NamedTuple):
    """The places of the arrays of a batch's field; `sample_shape` is as in `SampleArrays`.

    `kind` is the class of the field; None for a single array.
    """

    kind: type[SampleArrays] | None
    parts: tuple[ArraySpec, ...]
    sample_shape: tuple[int | None, ...]


class Answer(NamedTuple):
    """The outcome of a request, with the statistics of the helper's filler so far."""

    request: tuple[Any, ...]  # the `FillRequest`
    size: int  # samples in the batch
    fields: tuple[SentField, ...]
    rooms: Rooms  # those that were added for the fields
    error: tuple[bytes, ...]  # from `portable`, if any
    others: tuple[Any, ...]  # the members of `FillOutcome` after its error
    stats: FillerStats
    recorded: Sequence[Recorded] = ()  # since the last answer


class Failed(NamedTuple):
    """Sent instead of `Opened` or `Started`: the error, from `portable`."""

    error: tuple[bytes, ...]


class ReaderSlots:
    """Slots in the process that made them; `specs` describes them for helpers.

    `rooms` has the rooms of each slot, for the helper that fills it next.

    `slots` are arrays in `shared`; raw arrays are in other memory if the filler transforms them. A
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
        # By slot: its blocks of memory, each with its offset in the shared memory.
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
            self._blocks.append([(own_spec(shared, one).offset, one) for one in blocks])
            self.specs.append(
                SlotSpecs(
                    tuple(map(shared.spec, slot.raw)),
                    tuple(own_spec(shared, out) for out in slot.out),
                    tuple(None if one is None else own_spec(shared, one) for one in made),
                    own_spec(shared, own),
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
        """Return an array, as a view of the slot's own (maybe pinned) memory if it lies there."""
        for begin, block in self._blocks[slot]:
            if begin <= part.offset and part.end <= begin + block.nbytes:
                return np.ndarray(part.shape, part.dtype, block, part.offset - begin)
        return self._shared.array(part)

    def _new(self, nbytes: int) -> NDArray[np.uint8] | None:
        """Return memory for pixels; None: they are copied from the helper's memory."""
        try:
            return self._shared.empty(nbytes) if nbytes else None
        except OutOfMemoryError:
            return None


def own_spec(shared: SharedMemory, array: NDArray[Any]) -> ArraySpec:
    """Describe an array that is known to be in shared memory."""
    spec = shared.spec(array)
    assert spec is not None
    return spec


class Channel:
    """One end of a socket pair, which it owns: messages, as bytes, arrive whole and in order.

    Any thread may send; one thread receives. It calls the system directly: Python's default socket
    timeouts do not apply, and it uses no function that gevent or eventlet replace (such as
    `os.close`).
    """

    def __init__(self, end: _socket.socket) -> None:
        end.setblocking(True)  # `socket.setdefaulttimeout` may have set a timeout
        self._socket = end
        # Held while sending, so that the descriptor is not closed and its number reused meanwhile.
        self._sending = threading.Lock()
        self._received = bytearray()

    def send(self, data: bytes) -> None:
        """Send a message. Blocks until there is room for it; OSError if either end is closed."""
        with self._sending:
            self._socket.sendall(_SIZE.pack(len(data)) + data, _SEND_FLAGS)

    def receive(self) -> bytes:
        """Wait for a message and return it; EOFError if the other end closes, even midway."""
        (size,) = _SIZE.unpack(self._take(_SIZE.size))
        return self._take(size)

    def hang_up(self) -> None:
        """End messages in both directions, also for a thread in `receive`. Never blocks."""
        with suppressing(OSError):  # the other end may be closed already
            self._socket.shutdown(_socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the descriptor; no thread may be in `receive`. Idempotent."""
        with self._sending:
            self._socket.close()

    def forget(self) -> None:
        """Close the descriptor in a forked child, where the lock may stay locked for ever."""
        self._socket.close()

    def _take(self, nbytes: int) -> bytes:
        while len(self._received) < nbytes:
            try:
                data = self._socket.recv(max(nbytes - len(self._received), _READ_NBYTES))
            except OSError as error:
                raise EOFError from error
            if not data:
                raise EOFError
            self._received += data
        taken = bytes(self._received[:nbytes])
        del self._received[:nbytes]
        return taken


def dump(message: Any) -> bytes:
    """Pickle a message other than the first one, which may contain local functions."""
    return pickle.dumps(message, pickle.HIGHEST_PROTOCOL)


# --- errors ---------------------------------------------------------------------------------------


def _load_error(data: bytes) -> BaseException:
    found: BaseException | tuple[type[BaseException], tuple[Any, ...], dict[str, Any]]
    found = pickle.loads(data)
    if isinstance(found, BaseException):
        return found
    kind, args, attributes = found
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(attributes)
    return error


def portable(error: BaseException) -> tuple[bytes, ...]:
    """Pickle an error and its causes, which pickle alone would drop.

    Each keeps its type if that can be pickled. A note has its traceback.
    """
    links: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and len(links) < _MAX_CAUSES:
        links.append(link)
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    for link in links:
        lines = "".join(traceback.format_tb(link.__traceback__)).rstrip()
        with suppressing(Exception):  # an exception may refuse to be changed
            link.add_note(f"in the helper process:\n{lines}")
    return tuple(_dump_error(link) for link in links)


def received(sent: tuple[bytes, ...]) -> BaseException:
    """Unpickle an error and its causes from `portable`."""
    links: list[BaseException] = []
    for data in sent:
        try:
            links.append(_load_error(data))
        except Exception as error:  # its type cannot be imported here, for example
            links.append(
                H5AsyncError(f"an error of the helper process cannot be unpickled here ({error})")
            )
    for link, cause in pairwise(links):
        link.__cause__ = cause
    return links[0]


def _dump_error(error: BaseException) -> bytes:
    # Pickle makes an exception from its `args`, which does not work for every exception.
    for sent in (error, (type(error), error.args, error.__dict__)):
        try:
            data = bytes(cloudpickle.dumps(sent))
            copy = _load_error(data)
            if isinstance(copy, BaseException) and str(copy) == str(error):
                return data
        except Exception:  # raised by the exception's own code; try the next way
            continue
    known = next((kind for kind in type(error).__mro__ if kind in _KNOWN), None)
    try:
        message = str(error) if known else f"{type(error).__name__}: {error}"
    except Exception:
        message = type(error).__name__
    return pickle.dumps((known or H5AsyncError)(message))
