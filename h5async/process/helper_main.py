"""Runs a `Filler` in the helper process, for the reader at the other end of a channel.

Requests arrive through the channel; slots in shared memory are filled. The process ends with the
reader's process, however that ends.
"""

from __future__ import annotations

import _socket
import ctypes
import faulthandler
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from h5async.config import ReaderConfig
from h5async.errors import ConfigError, H5AsyncError, OutOfMemoryError, PostprocessError
from h5async.fill.filling import Filler
from h5async.fill.outcomes import Calls, FillOutcome, OnDevice, Slots
from h5async.fill.pool import do_nothing
from h5async.fill.resident import Residency
from h5async.io.shared import ArraySpec, SharedMemory
from h5async.opening.dataset import OpenedDataset, Samplings, open_dataset
from h5async.opening.limits import slot_transforms
from h5async.opening.selecting import Chosen, choose
from h5async.order.sampling import FillRequest
from h5async.process.messages import (
    Answer,
    Channel,
    Failed,
    NoteUploaded,
    Opened,
    Rooms,
    SentField,
    SlotSpecs,
    Started,
    Starting,
    dump,
    own_spec,
    portable,
)
from h5async.samples.assembly import SlotMemory
from h5async.samples.samplearrays import SampleArrays
from h5async.spelling import named
from h5async.system.interruptions import suppressing
from h5async.system.timeline import Recorder, Timeline

# In the environment of a new helper: the ID of the process that started it.
MARK = "H5ASYNC_HELPER_OF"

_PR_SET_PDEATHSIG = 1
_MOST_ARRAYS = 3  # of one field
_PRINT_SECONDS = 1.0  # the standard streams may be pipes that nobody reads from

# Launchers, schedulers and terminals send these signals to all processes of a group or job. Only
# the reader's process decides how to react.
GROUP_SIGNALS = frozenset(
    {
        signal.SIGALRM,
        signal.SIGHUP,
        signal.SIGQUIT,
        signal.SIGTERM,
        signal.SIGTSTP,
        signal.SIGTTIN,
        signal.SIGTTOU,
        signal.SIGUSR1,
        signal.SIGUSR2,
        signal.SIGXCPU,
    }
)


def main(channel_fd: int, memory_fd: int, parent: int) -> None:
    """Serve one reader until it closes the channel or ends.

    `channel_fd` is one end of a socket pair, `memory_fd` the descriptor of the shared memory, and
    `parent` the process ID of the reader's process.
    """
    error: BaseException | None = None
    try:
        _end_with(parent)
        for fd in (channel_fd, memory_fd):
            os.set_inheritable(fd, False)
        end = Channel(_socket.socket(fileno=channel_fd))
        _ignore_signals()
        os.register_at_fork(after_in_child=partial(_leave_to_parent, end))
        if sys.stderr is not None:  # the reader's process may have closed it
            faulthandler.enable()  # prints where a C library crashed
        _Helper(end, SharedMemory(memory_fd)).serve()
    except BaseException as raised:
        error = raised
    _exit(error)


@dataclass(eq=False)
class _Helper:
    channel: Channel
    memory: SharedMemory

    def _receive(self) -> Any:
        """Return a message from the reader; end this process if the reader has closed or ended."""
        try:
            data = self.channel.receive()
        except EOFError:
            _exit(None)
        return pickle.loads(data)

    def _send(self, message: Any) -> None:
        """Send a message to the reader, from any thread."""
        data = dump(message)
        try:
            self.channel.send(data)
        except OSError:  # the reader is gone
            os._exit(0)

    def serve(self) -> None:
        """Answer messages until the reader hangs up, or a step of the start fails."""
        try:
            opened = open_dataset(self._receive_config())
            chosen = choose(opened.config, opened.layouts)
            self._send(_told(opened, chosen))
            self._start(opened, chosen, self._receive())
            os.environ.pop(MARK, None)  # see `check_interpreter`: modules have been imported
        except BaseException as error:
            self._send(Failed(portable(error)))
            return
        self._send(Started(self._filler.methods, self._filler.stats().cache))
        while True:
            self._obey(self._receive())

    def _receive_config(self) -> ReaderConfig:
        try:
            config: ReaderConfig = self._receive()
        except BaseException as error:  # for example, the module of `postprocess` is not importable
            raise ConfigError(
                f"postprocess cannot be loaded in the helper process ({type(error).__name__}:"
                f" {error}); make sure that a new interpreter can import its module, or read"
                f" with {named('workers', 'thread')}"
            ) from error
        # This thread only receives, so that the reader never waits for it.
        return config.model_copy(update={"num_threads": config.filler_threads})

    def _start(self, opened: OpenedDataset, chosen: Chosen, starting: Starting) -> None:
        config, layouts = opened.config, opened.layouts
        samplings = Samplings(config, layouts, chosen)
        transforms = slot_transforms(config, layouts, samplings, starting.rows)
        cache = Residency(samplings.selection, 0, "device") if starting.has_device_cache else None
        raws = [(t.raw_row, t.raw_dtype) for t in transforms.values()]
        self._slots = HelperSlots(self.memory, starting.slots, raws)
        self._filler = Filler(
            opened,
            samplings,
            transforms,
            Slots(self._slots.slots, starting.rows),
            starting.memory_plan,
            Calls(list, lambda slot: None, self._answer, _give_up),
            OnDevice(cache=cache),
            Recorder(),
        )
        self._filler.start()

    def _obey(self, message: Any) -> None:
        if type(message) is tuple:
            request, rooms = message
            self._slots.rooms[request[0]] = rooms
            self._filler.fill(FillRequest(*request))
        elif isinstance(message, NoteUploaded):
            self._filler.note_uploaded(message.slot, self._slots.index(message.slot))
        else:  # `Record`
            self._filler.record(Timeline(message.max_events) if message.max_events else None)

    def _answer(self, request: FillRequest, outcome: FillOutcome) -> None:
        """Send the outcome of a request; runs in a filler's thread, which no error may end."""
        error: tuple[bytes, ...] = ()
        if outcome.error is not None:
            try:
                error = portable(outcome.error)
            except BaseException:
                error = portable(H5AsyncError(f"{type(outcome.error).__name__} was raised"))
        fields: tuple[SentField, ...] = ()
        rooms: Rooms = {}
        if not error:
            try:
                fields, rooms = self._slots.put(request.slot, outcome)
            except OutOfMemoryError as raised:
                error = portable(OutOfMemoryError(f"{request}: {raised.marked}"))
            except BaseException as raised:
                error = portable(raised)
        answer = Answer(
            tuple(request),
            outcome.index.size,
            fields,
            rooms,
            error,
            outcome[3:],
            self._filler.stats(),
            self._filler.recorded(),
        )
        try:
            self._send(answer)
        except BaseException as raised:  # it cannot be pickled
            self._send(answer._replace(fields=(), error=portable(raised)))


class HelperSlots:
    """Slots in the process that fills them; `slots` is for the filler.

    `raws` has the shape and dtype of a row as read, per column. A slot's `rooms` must be set before
    it is filled.
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
        """Put arrays outside the slot into shared memory. Thread-safe for different slots.

        Returns `Answer.fields` and `Answer.rooms`. `PostprocessError` is raised if an array cannot
        be in shared memory, `OutOfMemoryError` if the system refuses memory.
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
                f"postprocess returned dtype {array.dtype}: Python objects cannot be in shared"
                " memory; return numbers or fixed-size strings, or read with"
                f" {named('workers', 'thread')}"
            )
        offset, nbytes = self.rooms[slot].get(number, (0, 0))
        if nbytes < array.nbytes:
            room = self._shared.empty(max(array.nbytes, 2 * nbytes))
            if nbytes:  # the batch that used the old room is no longer in use
                self._shared.discard(ArraySpec(offset, (nbytes,), room.dtype))
            offset = own_spec(self._shared, room).offset
            added[number] = offset, room.nbytes
        spec = ArraySpec(offset, array.shape, array.dtype)
        np.copyto(self._shared.array(spec), array)
        return spec


def _told(opened: OpenedDataset, chosen: Chosen) -> Opened:
    """Return the description of a dataset for the reader, without the parts only for reading."""
    layouts = {
        name: layout.changed(heaps=tuple(one._replace(elements=None) for one in layout.heaps))
        for name, layout in opened.layouts.items()
    }
    return Opened(layouts, chosen, opened.kinds, opened.static, opened.skipped)


def _give_up(error: BaseException) -> None:
    """End the process after an exception outside any batch; the reader starts another one."""
    traceback.print_exception(error)
    os._exit(1)


def _end_with(parent: int) -> None:
    """End this process when the reader's thread that started it ends.

    Only Linux can do that. Elsewhere the process ends when the channel is closed.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent ended before the call
            os._exit(0)


def _ignore_signals() -> None:
    """Ignore signals that are sent to a whole process group; they were blocked until now.

    Their handler does nothing; SIG_IGN would be inherited by child processes. (The two terminal
    access signals do get SIG_IGN: otherwise they would be sent again and again.)
    """
    for number in GROUP_SIGNALS:
        is_terminals = number in (signal.SIGTTIN, signal.SIGTTOU)
        signal.signal(number, signal.SIG_IGN if is_terminals else do_nothing)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, GROUP_SIGNALS)


def _leave_to_parent(channel: Channel) -> None:
    """Undo in a forked child the setup that is only for the helper itself."""
    channel.forget()  # otherwise the reader would not notice the helper's end
    for number in GROUP_SIGNALS:
        signal.signal(number, signal.SIG_DFL)


def _exit(error: BaseException | None) -> NoReturn:
    """Flush the standard streams and end the process immediately.

    The interpreter is not finalized, because that would interrupt threads that still run.
    """
    printing = threading.Thread(target=_print, args=(error,), daemon=True)
    with suppressing(RuntimeError):  # no thread can be started
        printing.start()
        printing.join(_PRINT_SECONDS)
    os._exit(0 if error is None else 1)


def _print(error: BaseException | None) -> None:
    with suppressing(Exception):  # the other end of a pipe may be closed
        if error is not None:
            traceback.print_exception(error)
    with suppressing(Exception):
        if sys.stdout is not None:
            sys.stdout.flush()
