"""The filler's twin in the reader's process: requests enter, and a helper process fills the slots.

`HelperFiller` is called as a `Filler` is. The helper process runs one, over memory that both have
(`helper_main.py`). A crash there, in a C library, say, costs the oldest batch on its way, and the
batch that is at fault where that is another: the next request gets a new helper.

One thread starts the helper, and takes its answers. The system ends the helper with this thread,
so also with the process, however that ends. Another thread sends: messages are posted under a lock,
in their order, and sent without it, so that nobody but that thread ever waits for the helper to
receive.
"""

from __future__ import annotations

import collections
import contextlib
import os
import queue
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from h5async.config import ReaderConfig
from h5async.errors import BatchTimeoutError, ConfigError, ReadError
from h5async.filling import (
    THREAD_NAME,
    FillerStats,
    FillOutcome,
    FillRequest,
    SlotMemory,
    join_all,
)
from h5async.fingerprint import fingerprint
from h5async.layout import DatasetLayout
from h5async.limits import MemoryPlan
from h5async.messages import (
    Answer,
    DropStored,
    Failed,
    NoteUploaded,
    Opened,
    Opening,
    Reorder,
    SlotPlaces,
    Started,
    Starting,
    dump,
    dump_opening,
    load,
    received,
)
from h5async.ranks import Rank
from h5async.resident import Residency
from h5async.sampling import Sampling
from h5async.shared import Place, SharedMemory, duplicate
from h5async.stats import STAGES, ThreadCounts
from h5async.stored import StoredFormat

_OPENING_SECONDS = 60.0  # at least, where there is a timeout
_PATIENCE_SECONDS = 2.0  # for a helper that was told to end

_NOTHING_DONE = FillerStats(dict.fromkeys(STAGES, 0.0), ThreadCounts(), 0, "none")


class HelperDied(ReadError):
    """The helper process came to its end before it had answered."""


class HelperFiller:
    """Fills slots in the threads of one helper process. Safe to call from many threads.

    `open` starts the helper, which opens the dataset; `start` has it fill slots.

    Parameters
    ----------
    config
        The options.

    Attributes
    ----------
    layouts
        By field name, in field order.
    shared
        Memory that the helper has too, for the slots.
    ways
        How each field is read, in field order, once started.

    Raises
    ------
    ConfigError
        If `postprocess` cannot be sent.
    ReadError
        If the system has no descriptor left for shared memory.
    """

    def __init__(self, config: ReaderConfig) -> None:
        self._config = config
        try:
            self._opening = dump_opening(Opening(config))
        except Exception as error:
            raise ConfigError(
                f"postprocess cannot be sent to a helper process ({error}); give it as"
                ' "module:function", or read with workers="thread"'
            ) from error
        self.layouts: Mapping[str, DatasetLayout] = {}
        try:
            self.shared = SharedMemory()
        except OSError as error:
            raise ReadError(
                f"{config.hdf5_path}: no memory can be shared with a helper process ({error});"
                ' read with workers="thread"'
            ) from error
        # That relative paths are meant from, by later helpers too; None: it was removed.
        self._folder: str | None = None
        with contextlib.suppress(OSError):
            self._folder = os.getcwd()
        self.ways: list[str] = []
        # Reentrant: a reader collected in here by the garbage collector is closed in here.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._closed = False
        self._then: Callable[[], None] = _nobody
        self._working = 0  # threads
        self._has_ended = False
        self._starting: Starting | None = None
        self._process: _Process | None = None
        self._is_ready = False  # messages may be posted to it
        self._outstanding: dict[int, FillRequest] = {}  # by slot
        # On their way when a helper died. The next one gets them one at a time, oldest first: that
        # which it dies of is the oldest then, and only that fails.
        self._suspects: collections.deque[FillRequest] = collections.deque()
        self._slots: Sequence[SlotMemory] = ()
        self._index: list[NDArray[np.int64]] = []
        # By slot and field: memory for what `postprocess` makes.
        self._others: dict[tuple[int, int], Place] = {}
        self._device_cache: Residency | None = None
        self._next_requests: Callable[[], Sequence[FillRequest]] = list
        self._before_fill: Callable[[int], None] = _nobody
        self._on_done: Callable[[FillRequest, FillOutcome], None] = _nobody
        self._stats = self._former_stats = _NOTHING_DONE
        self._steps: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        # A request, or True: ask for requests; False: send what was posted; None: the end.
        self._tickets: queue.SimpleQueue[FillRequest | bool | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def open(self) -> None:
        """Start a helper, which opens the dataset; sets `layouts`.

        Raises
        ------
        H5AsyncError
            As `AsyncReader` says; `ReadError` if the helper process dies of the files.
        BatchTimeoutError
            If that takes longer than the option ``timeout``, and than a minute.
        """
        self._start_thread(self._run, "helper")
        self._await_step()

    def start(
        self,
        rank: Rank,
        slots: Sequence[SlotMemory],
        *,
        memory_plan: MemoryPlan,
        device_cache: Residency | None,
        stored_formats: Sequence[StoredFormat | None],
        next_requests: Callable[[], Sequence[FillRequest]],
        before_fill: Callable[[int], None],
        on_done: Callable[[FillRequest, FillOutcome], None],
    ) -> None:
        """Have slots filled from now on; parameters are those of `Filler`.

        Parameters
        ----------
        rank
            Whose batches these are.
        slots
            Arrays in `shared`; raw ones of their own where the filler transforms them.
        memory_plan, device_cache, stored_formats, next_requests, before_fill, on_done
            As of `Filler`. Functions are called in threads of this object.

        Raises
        ------
        H5AsyncError
            As `Filler` says.
        """
        rows = len(slots[0].out[0])
        index = self.shared.empty(len(slots) * rows * 8).view(np.int64).reshape(len(slots), rows)
        self._index = list(index)
        self._next_requests, self._before_fill, self._on_done = next_requests, before_fill, on_done
        self._slots = slots
        self._device_cache = device_cache
        places = [self._places(*of_slot) for of_slot in zip(slots, index, strict=True)]
        has_cache = device_cache is not None
        with self._changed:
            formats = list(stored_formats)
            self._starting = Starting(rank, None, places, memory_plan, formats, has_cache, {})
            self._changed.notify_all()
        self._start_thread(self._send_all, "send")
        self._await_step()

    def kick(self) -> None:
        """Have requests asked for. Never blocks, and may be called once too often."""
        self._tickets.put(True)

    def fill(self, request: FillRequest) -> None:
        """Fill a slot. Never blocks."""
        self._tickets.put(request)

    def run_next(self) -> bool:
        """Return False: there is never any work for the calling thread."""
        return False

    def abandon(self) -> bool:
        """Return False: an exception in the calling thread is none of the helper's."""
        return False

    def reorder(self, sampling: Sampling, resumed: tuple[int, int, int] | None) -> None:
        """Let requests have the samples of another order, as `Filler.reorder`."""
        with self._lock:
            if self._starting is not None:
                self._starting = self._starting._replace(resumed=resumed)
            self._note(Reorder(resumed))

    def note_uploaded(self, slot: int, index: NDArray[np.int64]) -> None:
        """Note that the device cache has the samples of the batch in a slot."""
        assert self._device_cache is not None
        self._device_cache.add(index)
        self._note(NoteUploaded(slot))

    def drop_stored(self, slots: Sequence[SlotMemory]) -> None:
        """Take slots without memory for stored chunks, as `Filler.drop_stored`."""
        with self._lock:
            assert self._starting is not None
            self._slots = slots
            without = [
                places._replace(stored=(None,) * len(places.stored))
                for places in self._starting.slots
            ]
            none: list[StoredFormat | None] = [None] * len(self._starting.stored_formats)
            self._starting = self._starting._replace(slots=without, stored_formats=none)
            self._note(DropStored())

    def stats(self) -> FillerStats:
        """Return what all helpers have done so far."""
        now, before = self._stats, self._former_stats
        return FillerStats(
            {stage: now.stage_seconds[stage] + before.stage_seconds[stage] for stage in STAGES},
            now.counts.plus(before.counts),
            now.fallback_reads + before.fallback_reads,
            now.cache,
        )

    def stop(self, then: Callable[[], None]) -> None:
        """Drop all requests, end the helper, then call `then`. Never waits, as `Filler.stop`."""
        with self._changed:
            if self._closed:
                return
            self._closed, self._then = True, then
            self._outstanding.clear()
            self._changed.notify_all()
            if self._process is not None:
                self._process.hang_up()
            is_idle = not self._working
        self._tickets.put(None)
        if is_idle:
            self._end()

    def join(self, patience_seconds: float | None = None) -> None:
        """Wait until all is done that `stop` asked for; not in a thread of this object."""
        join_all(self._threads, patience_seconds)

    def _start_thread(self, target: Callable[[], None], name: str) -> None:
        name = f"{THREAD_NAME}-{name}"
        self._threads.append(
            threading.Thread(target=self._in_thread, args=(target,), name=name, daemon=True)
        )
        self._threads[-1].start()

    def _in_thread(self, target: Callable[[], None]) -> None:
        with self._lock:
            self._working += 1
        try:
            if not self._closed:
                target()
        finally:
            with self._lock:
                self._working -= 1
                is_last = self._closed and not self._working
            if is_last:
                self._end()

    def _end(self) -> None:
        with self._lock:
            if self._has_ended:
                return
            self._has_ended = True
        self.shared.close()
        self._slots, self._index, self._others = (), [], {}
        self._then()

    def _await_step(self) -> None:
        """Wait for the helper to open or to start."""
        limit = self._config.timeout
        if limit is not None:
            limit = max(limit, _OPENING_SECONDS)
        try:
            error = self._steps.get(timeout=limit)
        except queue.Empty:
            raise BatchTimeoutError(
                f"{self._config.hdf5_path}: the helper process did not open it within {limit} s;"
                " set a longer timeout, or do not trust the file"
            ) from None
        if error is not None:
            raise error

    def _places(self, slot: SlotMemory, index: NDArray[np.int64]) -> SlotPlaces:
        place = self.shared.place
        out = [place(array) for array in slot.out]
        of_index = place(index)
        assert of_index is not None
        return SlotPlaces(
            tuple(place(array) for array in slot.raw),
            tuple(found for found in out if found is not None),
            tuple(None if array is None else place(array) for array in slot.stored),
            of_index,
        )

    # --- requests ---------------------------------------------------------------------------------

    def _send_all(self) -> None:
        """Send each request when its slot may be written to, and notes; in a thread of its own."""
        while (ticket := self._tickets.get()) is not None:
            if isinstance(ticket, bool):
                requests = self._next_requests() if ticket else ()
            else:
                requests = (ticket,)
            for request in requests:
                try:
                    self._before_fill(request.slot)
                except BaseException as error:
                    self._on_done(request, FillOutcome(np.zeros(0, np.int64), (), error))
                    continue
                with self._changed:
                    if self._closed:
                        return
                    self._outstanding[request.slot] = request
                    self._changed.notify_all()
                    self._post(tuple(request))  # pickled ten times as fast
                self._flush()
            self._flush()

    def _post(self, message: Any) -> None:
        """Have a message sent to the helper that is there; a new one is told all when it starts."""
        with self._lock:
            if self._is_ready and self._process is not None:
                self._process.post(message)

    def _post_suspect(self) -> None:
        if self._suspects:
            self._note(tuple(self._suspects[0]))

    def _note(self, message: Any) -> None:
        self._post(message)
        self._tickets.put(False)

    def _flush(self) -> None:
        with self._lock:
            process = self._process
        if process is not None:
            process.flush()

    # --- answers ----------------------------------------------------------------------------------

    def _run(self) -> None:
        """Keep a helper alive, and take its answers; in a thread of its own."""
        # Processes that are started here inherit it: Ctrl-C is the reader's to deal with.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        while self._go_on(self._serve_once()):
            pass

    def _serve_once(self) -> BaseException | None:
        """Have one helper work until it ends; return why, or None where the reader was closed."""
        try:
            self._serve()
            return None
        except BaseException as error:
            return None if self._closed else error
        finally:
            with self._lock:
                self._former_stats = self.stats()
                self._stats = _NOTHING_DONE._replace(cache=self._stats.cache)

    def _go_on(self, error: BaseException | None) -> bool:
        """Tell those who wait for a helper of its end; return whether there is to be another.

        Nothing in this thread keeps the error: its traceback will have the reader in it.
        """
        if error is None:
            return False
        if not self.ways:  # whoever makes the reader is told
            if isinstance(error, HelperDied):
                error = HelperDied(f"{error} while the files were opened")
            self._steps.put(error)
            return False
        victim = self._oldest_request()
        if victim is None:
            return False
        if isinstance(error, HelperDied):
            error = HelperDied(
                f"{error} while batch {victim.number} of epoch {victim.epoch} was being"
                " filled; the next call goes on, with a new helper"
            )
        self._fail(victim, error)
        return True

    def _serve(self) -> None:
        """Start a helper, and take its answers until the reader is closed.

        Raises
        ------
        HelperDied
            If the helper dies; also when closed.
        BaseException
            What the helper could not do.
        """
        with (
            _Process(self.shared.fd, str(self._config.hdf5_path), self._folder) as process,
            self._registered(),
        ):
            with self._lock:
                self._process = process
                if self._closed:
                    return
            process.send_bytes(self._opening)
            opened = self._step(process)
            assert isinstance(opened, Opened)
            if self.layouts:
                _check_same(self.layouts, opened.layouts)
            else:
                self.layouts = opened.layouts
                self._steps.put(None)
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._starting is not None)
                if self._starting is None:
                    return
                # Whatever is noted from here on is posted behind this.
                process.post(self._starting._replace(others=dict(self._others)))
                waiting = sorted(self._outstanding.values(), key=lambda request: request.serial)
                self._suspects = collections.deque(waiting)
                self._is_ready = True
                self._post_suspect()
            self._tickets.put(False)  # the thread that sends is not this one, which must receive
            started = self._step(process)
            assert isinstance(started, Started)
            if not self.ways:
                self.ways = started.ways
                self._steps.put(None)
            while True:
                answer = process.receive()
                assert isinstance(answer, Answer)
                self._take(answer)

    @contextlib.contextmanager
    def _registered(self) -> Iterator[None]:
        """See that nothing is posted to a process any more before it is closed."""
        try:
            yield
        finally:
            with self._lock:
                self._process, self._is_ready = None, False

    def _step(self, process: _Process) -> Any:
        message = process.receive()
        if isinstance(message, Failed):
            raise received(message.error)
        return message

    def _take(self, answer: Answer) -> None:
        request, size = FillRequest(*answer.request), answer.size
        with self._lock:
            self._stats = answer.stats
            if self._outstanding.get(request.slot) != request:
                return
            del self._outstanding[request.slot]
            if self._suspects and self._suspects[0] == request:
                self._suspects.popleft()
                self._post_suspect()
        index = self._index[request.slot][:size].copy()
        arrays: tuple[NDArray[Any], ...] = ()
        error = received(answer.error) if answer.error else None
        try:
            if error is None:
                arrays = tuple(
                    out[:size] if place is None else self._other(request.slot, field, place)
                    for field, (out, place) in enumerate(
                        zip(self._slots[request.slot].out, answer.others, strict=True)
                    )
                )
        except BaseException as raised:
            error = raised
        self._on_done(
            request,
            FillOutcome(
                index, arrays, error, answer.is_resident, answer.stored, answer.busy_seconds
            ),
        )

    def _other(self, slot: int, field: int, place: Place) -> NDArray[Any]:
        """Return an array that `postprocess` made; it lies at one offset until it grows."""
        known = self._others.get((slot, field))
        if known is None or known.offset != place.offset or known.nbytes < place.nbytes:
            everything = Place(place.offset, (place.nbytes,), np.dtype(np.uint8))
            self._others[slot, field] = everything
        return self.shared.array(place)

    def _oldest_request(self) -> FillRequest | None:
        """Wait for a request, if there is none; return None when closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._outstanding)
            return min(self._outstanding.values(), key=lambda r: r.serial, default=None)

    def _fail(self, request: FillRequest, error: BaseException) -> None:
        with self._lock:
            if self._outstanding.get(request.slot) != request:
                return
            del self._outstanding[request.slot]
        self._on_done(request, FillOutcome(np.zeros(0, np.int64), (), error))


class _Process:
    """A helper process. `post` is called under a lock of the caller; `receive` by one thread.

    Raises
    ------
    ReadError
        If it cannot be started.
    """

    def __init__(self, memory_fd: int, what: str, folder: str | None) -> None:
        self._what = what
        self._outbox: collections.deque[Any] = collections.deque()
        self._sending = threading.Lock()  # the channel is not closed, and its number used again
        with contextlib.ExitStack() as stack:
            try:
                self._open(stack, memory_fd, folder)
            except OSError as error:
                raise ReadError(
                    f"{what}: no helper process can be started ({sys.executable}: {error});"
                    ' read with workers="thread"'
                ) from error
            self._resources = stack.pop_all()

    def _open(self, stack: contextlib.ExitStack, memory_fd: int, folder: str | None) -> None:
        self._socket, theirs = socket.socketpair()
        stack.enter_context(self._socket)
        with theirs:
            self._channel = Connection(os.dup(self._socket.fileno()))
            stack.callback(self._close_channel)
            channel_fd = duplicate(theirs.fileno())
        try:
            self._popen = subprocess.Popen(
                [sys.executable, "-c", _code(channel_fd, memory_fd, os.getpid())],
                stdin=subprocess.DEVNULL,
                pass_fds=(channel_fd, memory_fd),
                cwd=folder,
            )
        finally:
            os.close(channel_fd)
        stack.callback(self._end)
        stack.callback(self.hang_up)
        self._poll = select.poll()
        self._poll.register(self._channel.fileno(), select.POLLIN)
        # Children of the helper may have the channel too: its end says nothing then.
        if hasattr(os, "pidfd_open"):
            with contextlib.suppress(OSError):
                pid_fd = os.pidfd_open(self._popen.pid)
                stack.callback(os.close, pid_fd)
                self._poll.register(pid_fd, select.POLLIN)

    def post(self, message: Any) -> None:
        """Have the next `flush` send a message. Never blocks."""
        self._outbox.append(message)

    def flush(self) -> None:
        """Send what was posted, by one thread; blocks until the helper receives it, or ends."""
        while self._outbox:
            self.send_bytes(dump(self._outbox.popleft()))

    def send_bytes(self, data: bytes) -> None:
        with self._sending, contextlib.suppress(OSError):  # who receives will notice
            self._channel.send_bytes(data)

    def receive(self) -> Any:
        """Return the next message; raise `HelperDied` if there will be none."""
        ready = dict(self._poll.poll())
        if self._channel.fileno() in ready:
            with contextlib.suppress(EOFError, OSError):
                return load(self._channel.recv_bytes())
        raise HelperDied(f"{self._what}: the helper process {self._end()}")

    def hang_up(self) -> None:
        """Tell the helper, and whoever is in `receive`, that this is the end."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> _Process:
        return self

    def __exit__(self, *_: object) -> None:
        self._resources.close()

    def _close_channel(self) -> None:
        with self._sending:
            self._channel.close()

    def _end(self) -> str:
        """Wait for the process; say how it ended."""
        try:
            status = self._popen.wait(_PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            status = self._popen.wait()
        if status >= 0:
            return f"ended with status {status}"
        try:
            name = signal.Signals(-status).name
        except ValueError:
            name = "unknown"
        hint = ", perhaps by the system, for want of memory" if -status == signal.SIGKILL else ""
        return f"was killed by signal {-status} ({name}{hint})"


def _code(channel_fd: int, memory_fd: int, parent: int) -> str:
    """Return what a helper process runs; it finds modules where this process does."""
    return (
        f"import sys; sys.path[:] = {sys.path!r}; from h5async.helper_main import main;"
        f" main({channel_fd}, {memory_fd}, {parent})"
    )


def _check_same(before: Mapping[str, DatasetLayout], now: Mapping[str, DatasetLayout]) -> None:
    """See that a new helper found the files that the first one did."""
    was, found = list(before.values()), list(now.values())
    ids = [[(leaf.file, leaf.file_id) for y in ys for leaf in y.leaves()] for ys in (was, found)]
    if ids[0] != ids[1] or fingerprint(was) != fingerprint(found):
        raise ReadError(
            f"{was[0].file}: the helper process died, and a new one finds a file that has changed;"
            " open it again"
        )


def _nobody(*_: object) -> None:
    pass
