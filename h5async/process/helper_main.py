"""Requests enter by a socket; filled slots leave, in shared memory: the helper process.

It runs `Filler` as the reader would, and ends with the reader's process, however that ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import signal
import sys
import threading
import traceback
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from h5async.errors import H5AsyncError, OutOfMemoryError, PostprocessError
from h5async.fill.dataset import Samplings, open_dataset
from h5async.fill.filling import Filler
from h5async.fill.records import FillOutcome, FillRequest, SlotMemory
from h5async.fill.resident import Residency
from h5async.io.shared import Place, SharedMemory
from h5async.plan.transform import row_transform
from h5async.process.channel import Channel, channel_of
from h5async.process.messages import (
    Answer,
    DropStored,
    Failed,
    NoteUploaded,
    Opened,
    Opening,
    SlotPlaces,
    Started,
    Starting,
    dump,
    load,
    portable,
)

_PR_SET_PDEATHSIG = 1
_PRINT_SECONDS = 1.0  # the standard streams may be pipes that nobody reads from

# What launchers, schedulers and terminals send to all processes of a group, or of a job: whether
# it is to end, or what else is to be done, the reader's process decides.
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
    """Serve one reader until it closes the channel, or ends.

    Parameters
    ----------
    channel_fd
        One end of a socket pair.
    memory_fd
        Of the shared memory.
    parent
        Process number of the reader's process.
    """
    error: BaseException | None = None
    try:
        _end_with(parent)
        for fd in (channel_fd, memory_fd):
            os.set_inheritable(fd, False)
        end = channel_of(channel_fd)
        _ignore_signals()
        os.register_at_fork(after_in_child=partial(_leave_to_parent, end))
        if sys.stderr is not None:  # a reader's process may be without
            faulthandler.enable()  # a crash in a C library says where
        _Helper(_Messages(end), SharedMemory(memory_fd)).serve()
    except EOFError:  # the reader is closed, or gone
        pass
    except BaseException as raised:
        error = raised
    _exit(error)


class _Messages:
    """Messages of the reader, and to it. `send` is safe to call from many threads."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def receive(self) -> Any:
        return load(self._channel.receive())

    def send(self, message: Any) -> None:
        data = dump(message)
        try:
            self._channel.send(data)
        except OSError:  # there is nobody left to work for
            os._exit(0)


class _Helper:
    def __init__(self, channel: _Messages, memory: SharedMemory) -> None:
        self._channel = channel
        self._memory = memory
        self._index: list[NDArray[np.int64]] = []  # by slot: sample numbers of its batch
        self._sizes: list[int] = []
        # By slot and field: memory for what `postprocess` makes.
        self._others: dict[tuple[int, int], NDArray[np.uint8]] = {}
        self._slots: list[SlotMemory] = []

    def serve(self) -> None:
        opening = self._channel.receive()
        assert isinstance(opening, Opening)
        config = opening.config
        # This thread does nothing but receive, or the reader might wait for it to.
        config = config.model_copy(update={"num_threads": max(1, config.thread_count)})
        try:
            layouts = open_dataset(config)
        except BaseException as error:
            self._channel.send(Failed(portable(error)))
            return
        self._channel.send(Opened(layouts))
        starting = self._channel.receive()
        assert isinstance(starting, Starting)
        try:
            fields = config.batch_fields
            transforms = {name: row_transform(fields[name], y) for name, y in layouts.items()}
            raws = [((t.raw_row), t.raw_dtype) for t in transforms.values()]
            self._slots = [self._slot(places, raws) for places in starting.slots]
            self._others = {at: self._memory.array(room) for at, room in starting.others.items()}
            self._sizes = [0] * len(self._slots)
            num_samples = next(iter(layouts.values())).num_samples
            self._filler = Filler(
                config,
                Samplings(config, layouts),
                layouts,
                transforms,
                self._slots,
                memory_plan=starting.memory_plan,
                device_cache=(
                    Residency(num_samples, 0, "device") if starting.has_device_cache else None
                ),
                stored_formats=starting.stored_formats,
                next_requests=list,
                before_fill=lambda slot: None,
                on_done=self._answer,
                on_crash=_give_up,
            )
            self._filler.start()
        except BaseException as error:
            self._channel.send(Failed(portable(error)))
            return
        self._channel.send(Started(self._filler.ways))
        while True:
            message = self._channel.receive()
            if type(message) is tuple:
                self._filler.fill(FillRequest(*message))
            elif isinstance(message, NoteUploaded):
                slot = message.slot
                self._filler.note_uploaded(slot, self._index[slot][: self._sizes[slot]].copy())
            else:
                assert isinstance(message, DropStored)
                self._slots = [
                    slot._replace(stored=(None,) * len(slot.stored)) for slot in self._slots
                ]
                self._filler.drop_stored(self._slots)
                for place in [place for slot in starting.slots for place in slot.stored]:
                    if place is not None:
                        self._memory.discard(place)

    def _slot(
        self, places: SlotPlaces, raws: list[tuple[tuple[int, ...], np.dtype[Any]]]
    ) -> SlotMemory:
        out = tuple(self._memory.array(place) for place in places.out)
        raw = tuple(
            delivered if place == own else np.empty((len(delivered), *row), dtype)
            for place, own, delivered, (row, dtype) in zip(
                places.raw, places.out, out, raws, strict=True
            )
        )
        stored = tuple(p if p is None else self._memory.array(p) for p in places.stored)
        self._index.append(self._memory.array(places.numbers))
        return SlotMemory(raw, out, stored)

    def _answer(self, request: FillRequest, outcome: FillOutcome) -> None:
        """Send what became of a request; in a thread of the filler, which nothing must end."""
        error: tuple[bytes, ...] = ()
        if outcome.error is not None:
            try:
                error = portable(outcome.error)
            except BaseException:
                error = portable(H5AsyncError(f"{type(outcome.error).__name__} was raised"))
        others: tuple[Place | None, ...] = ()
        if not error:
            try:
                size = self._sizes[request.slot] = outcome.index.size
                self._index[request.slot][:size] = outcome.index
                others = tuple(
                    self._other(request.slot, field, array)
                    for field, array in enumerate(outcome.arrays)
                )
            except OutOfMemoryError as raised:
                batch = f"batch {request.number} of epoch {request.epoch}"
                error = portable(OutOfMemoryError(f"{batch}: {raised}"))
            except BaseException as raised:
                error = portable(raised)
        answer = Answer(
            tuple(request),
            outcome.index.size,
            others,
            error,
            outcome.is_resident,
            outcome.stored,
            outcome.busy_seconds,
            outcome.warnings,
            self._filler.stats(),
        )
        try:
            self._channel.send(answer)
        except BaseException as raised:  # it cannot be pickled
            self._channel.send(answer._replace(others=(), stored=(), error=portable(raised)))

    def _other(self, slot: int, field: int, array: NDArray[Any]) -> Place | None:
        """Return where an array lies that `postprocess` made; it is copied there."""
        own = self._slots[slot].out[field]
        address = array.ctypes.data
        if address == own.ctypes.data and array.dtype == own.dtype:
            if array.shape == (len(array), *own.shape[1:]) and array.flags.c_contiguous:
                return None
        if array.dtype.hasobject:
            raise PostprocessError(
                f"postprocess returned dtype {array.dtype}: Python objects cannot lie in memory"
                " that processes share; return numbers or fixed-size strings, or read with"
                ' workers="thread"'
            )
        room = self._others.get((slot, field))
        if room is None or room.nbytes < array.nbytes:
            twice = 0 if room is None else 2 * room.nbytes
            room = self._others[slot, field] = self._memory.empty(max(array.nbytes, twice))
        target: NDArray[Any] = np.ndarray(array.shape, array.dtype, room)
        np.copyto(target, array)
        return self._memory.place(target)


def _give_up(error: BaseException) -> None:
    """End the process after what no batch can have; the reader starts another one."""
    traceback.print_exception(error)
    os._exit(1)


def _end_with(parent: int) -> None:
    """See that this process ends when the thread of the reader that started it does.

    (Where that cannot be asked for, it ends when the channel does.)
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it was too late
            os._exit(0)


def _ignore_signals() -> None:
    """Ignore what a whole group of processes is sent; such signals were blocked until now.

    By a function, not by SIG_IGN, which programs that are started here would have, too. (But what
    comes for the use of a terminal would come again and again.)
    """
    for number in GROUP_SIGNALS:
        is_terminals = number in (signal.SIGTTIN, signal.SIGTTOU)
        signal.signal(number, signal.SIG_IGN if is_terminals else _nothing)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, GROUP_SIGNALS)


def _nothing(*_: object) -> None:
    pass


def _leave_to_parent(channel: Channel) -> None:
    """Let go, in a forked child of the helper, of what is the helper's."""
    channel.forget()  # or the reader would not see the helper's end
    for number in GROUP_SIGNALS:
        signal.signal(number, signal.SIG_DFL)


def _exit(error: BaseException | None) -> None:
    """End the process at once, but for what is still to be printed.

    Threads may be in the middle of something that nobody waits for any more: the interpreter's own
    end would come upon them.
    """
    printing = threading.Thread(target=_print, args=(error,), daemon=True)
    with contextlib.suppress(RuntimeError):  # there are no more threads
        printing.start()
        printing.join(_PRINT_SECONDS)
    os._exit(0 if error is None else 1)


def _print(error: BaseException | None) -> None:
    with contextlib.suppress(Exception):  # nobody may read from there any more
        if error is not None:
            traceback.print_exception(error)
    with contextlib.suppress(Exception):
        if sys.stdout is not None:
            sys.stdout.flush()
