"""The filler's twin in the reader's process: requests enter, and a helper process fills the slots.

`HelperFiller` is called as a `Filler` is. The helper process runs one, over memory that both have
(`helper_main.py`). Where a helper dies, a new one fills what was on its way, as soon as there is
such a batch: a kill from outside costs time alone. A batch that helpers die of, in a C library,
say, fails after so many of them, and no other fails with it: what was on its way with a helper that
died is given to the next ones one by one.

One thread starts the helper, and takes its answers. The system ends the helper with this thread,
so also with the process, however that ends. Another thread sends: messages are posted under a lock,
in their order, and sent without it, so that nobody but that thread ever waits for the helper to
receive.

Where these threads are none of the system's (gevent and eventlet replace them), waiting for the
helper stops all others; so it is waited for only while it has something to answer.
"""

from __future__ import annotations

import collections
import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from h5async.config import ReaderConfig
from h5async.errors import BatchTimeoutError, ConfigError, ReadError
from h5async.fill.limits import MemoryPlan
from h5async.fill.pool import THREAD_NAME, join_all, start_thread
from h5async.fill.records import FillerStats, FillOutcome, FillRequest, SlotMemory
from h5async.fill.resident import Residency
from h5async.index.fingerprint import fingerprint
from h5async.index.layout import DatasetLayout
from h5async.io.shared import Place, SharedMemory, duplicate
from h5async.plan.stored import StoredFormat
from h5async.process.channel import channel_of, socket_pair
from h5async.process.helper_main import GROUP_SIGNALS
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
    dump_opening,
    load,
    received,
)
from h5async.stats import STAGES, ThreadCounts
from h5async.system.interruptions import suppressing
from h5async.system.patience import Patience

_MOST_DEATHS = 3  # of helpers that had the same batch, or were started for it
_OPENING_SECONDS = 60.0  # at least, where there is a timeout
_MARK = "H5ASYNC_HELPER_OF"  # in the environment of a helper: the number of its parent
_PATIENCE_SECONDS = 2.0  # for a helper that was told to end

_NOTHING_DONE = FillerStats(dict.fromkeys(STAGES, 0.0), ThreadCounts(), 0, "none")


class HelperDied(ReadError):
    """The helper process came to its end before it had answered."""


@dataclass(eq=False, slots=True)
class _Order:
    """A request that was not answered yet.

    Attributes
    ----------
    deaths
        Helpers that died while they had it, or were starting to have it.
    is_sent
        Whether the helper of now has it.
    """

    request: FillRequest
    deaths: int = 0
    is_sent: bool = False


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
        If `postprocess` cannot be sent, or there is no Python interpreter to start.
    ReadError
        If the system has no descriptor left for shared memory.
    """

    def __init__(self, config: ReaderConfig) -> None:
        self._config = config
        check_interpreter()
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
        with suppressing(OSError):
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
        self._is_ready = False  # notes may be posted to it
        self._is_started = False  # requests, too
        self._is_starting = True
        self._outstanding: dict[int, _Order] = {}  # by slot
        self._has_suspects = False  # of having killed a helper, among those outstanding
        self._slots: Sequence[SlotMemory] = ()
        self._index: list[NDArray[np.int64]] = []
        # By slot and field: memory for what `postprocess` makes.
        self._others: dict[tuple[int, int], Place] = {}
        self._device_cache: Residency | None = None
        self._next_requests: Callable[[], Sequence[FillRequest]] = list
        self._before_fill: Callable[[int], None] = _nobody
        self._on_done: Callable[[FillRequest, FillOutcome], None] = _nobody
        self._on_crash: Callable[[BaseException], None] = _nobody
        self._stats = self._former_stats = _NOTHING_DONE
        self._steps: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        # A request, or True: ask for requests; False: send what was posted; None: the end.
        self._tickets: queue.SimpleQueue[FillRequest | bool | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

        self._owner_id = 0  # of the system's thread that opened this
        self._is_alone = False  # there is no other thread of the system

    def open(self) -> None:
        """Start a helper, which opens the dataset; sets `layouts`.

        Raises
        ------
        H5AsyncError
            As `AsyncReader` says; `ReadError` if the helper process dies of the files.
        BatchTimeoutError
            If that takes longer than the option ``timeout``, and than a minute.
        """
        self._owner_id = threading.get_native_id()
        self._start_thread(self._run, "helper")
        self._await_step()

    def start(
        self,
        slots: Sequence[SlotMemory],
        *,
        memory_plan: MemoryPlan,
        device_cache: Residency | None,
        stored_formats: Sequence[StoredFormat | None],
        next_requests: Callable[[], Sequence[FillRequest]],
        before_fill: Callable[[int], None],
        on_done: Callable[[FillRequest, FillOutcome], None],
        on_crash: Callable[[BaseException], None],
    ) -> None:
        """Have slots filled from now on; parameters are those of `Filler`.

        Parameters
        ----------
        slots
            Arrays in `shared`; raw ones of their own where the filler transforms them.
        memory_plan, device_cache, stored_formats, next_requests, before_fill, on_done, on_crash
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
        self._on_crash = on_crash
        self._slots = slots
        self._device_cache = device_cache
        places = [self._places(*of_slot) for of_slot in zip(slots, index, strict=True)]
        has_cache = device_cache is not None
        with self._changed:
            formats = list(stored_formats)
            self._starting = Starting(places, memory_plan, formats, has_cache, {})
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
        """Drop all requests, end the helper, then call `then`. As `Filler.stop`."""
        with self._changed:
            if not self._has_ended:
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
        join_all(self._threads, Patience(patience_seconds))

    def _start_thread(self, target: Callable[[], None], name: str) -> None:
        name = f"{THREAD_NAME}-{name}"
        self._threads.append(
            threading.Thread(target=self._in_thread, args=(target,), name=name, daemon=True)
        )
        start_thread(self._threads[-1], str(self._config.hdf5_path))

    def _in_thread(self, target: Callable[[], None]) -> None:
        with self._lock:
            self._working += 1
        try:
            if not self._closed:
                target()
        except BaseException as error:
            self._on_crash(error)
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
        # What they are bound to has this object.
        self._next_requests, self._before_fill, self._on_done = list, _nobody, _nobody
        then, self._then = self._then, _nobody
        then()

    def _await_step(self) -> None:
        """Wait for the helper to open or to start."""
        limit = self._config.timeout
        if limit is not None:
            limit = min(max(limit, _OPENING_SECONDS), threading.TIMEOUT_MAX)
        found: list[BaseException | None] = []
        patience = Patience(limit)
        while not patience.wait(partial(_has_come, self._steps, found)):
            if patience.is_over:
                raise BatchTimeoutError(
                    f"{self._config.hdf5_path}: the helper process did not open it within"
                    f" {limit} s; set a longer timeout, or do not trust the file"
                )
        error = found.pop()
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback has this frame

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
                    order = self._outstanding[request.slot] = _Order(request)
                    self._changed.notify_all()
                    if self._has_suspects:
                        self._post_due()
                    elif self._is_started:
                        self._post_order(order)
                self._flush()
            self._flush()

    def _post(self, message: Any) -> None:
        """Have a message sent to the helper that is there; a new one is told all when it starts."""
        with self._lock:
            if self._is_ready and self._process is not None:
                self._process.post(message)

    def _post_order(self, order: _Order) -> None:
        order.is_sent = True
        self._post(tuple(order.request))  # pickled ten times as fast

    def _post_due(self) -> None:
        """Post what the helper may have now: all, or one request while there are suspects."""
        if not self._is_started:
            return
        orders = sorted(self._outstanding.values(), key=lambda order: order.request.serial)
        suspects = [order for order in orders if order.deaths]
        self._has_suspects = bool(suspects)
        if not suspects:
            due = [order for order in orders if not order.is_sent]
        else:
            due = [] if any(order.is_sent for order in orders) else suspects[:1]
        for order in due:
            self._post_order(order)
        if due:
            self._tickets.put(False)

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
        self._is_alone = threading.get_native_id() == self._owner_id
        while self._go_on(self._serve_once()) and self._await_request():
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
        """Have batches fail that a helper's end is to cost; return whether there is to be another.

        Nothing in this thread keeps the error: its traceback will have the reader in it.
        """
        if error is None:
            return False
        if not self.ways:  # whoever makes the reader is told
            if isinstance(error, HelperDied):
                error = HelperDied(f"{error} while the files were opened")
            self._steps.put(error)
            return False
        for request, reason in self._victims(error):
            self._fail(request, reason)
        return True

    def _victims(self, error: BaseException) -> list[tuple[FillRequest, BaseException]]:
        """Return requests that fail because a helper came to its end, each with its error."""
        with self._lock:
            oldest = sorted(self._outstanding.values(), key=lambda order: order.request.serial)[:1]
            had = [order for order in self._outstanding.values() if order.is_sent]
            if self._is_starting:  # it had no request yet, and was started for this one
                had = oldest
            for order in had:
                order.deaths, order.is_sent = order.deaths + 1, False
            self._has_suspects = self._has_suspects or bool(had)
        if not isinstance(error, HelperDied):
            return [(order.request, error) for order in oldest]
        return [
            (order.request, _death(error, order, self._is_starting))
            for order in had
            if order.deaths >= _MOST_DEATHS
        ]

    def _serve(self) -> None:
        """Start a helper, and take its answers until the reader is closed.

        Raises
        ------
        HelperDied
            If the helper dies; also when closed.
        BaseException
            What the helper could not do.
        """
        self._is_starting = True
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
                self._is_ready = True
            if self._is_alone:
                process.flush()
            else:
                self._tickets.put(False)  # this thread must receive, and does not send
            started = self._step(process)
            assert isinstance(started, Started)
            with self._lock:
                self._is_started, self._is_starting = True, False
                self._post_due()
            if not self.ways:
                self.ways = started.ways
                self._steps.put(None)
            while not self._is_alone or self._await_request():
                if self._is_alone:
                    process.flush()
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
                self._process, self._is_ready, self._is_started = None, False, False

    def _step(self, process: _Process) -> Any:
        message = process.receive()
        if isinstance(message, Failed):
            raise received(message.error)
        return message

    def _take(self, answer: Answer) -> None:
        request, size = FillRequest(*answer.request), answer.size
        with self._lock:
            self._stats = answer.stats
            if not self._pop(request):
                return
            if self._has_suspects:
                self._post_due()
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
                index,
                arrays,
                error,
                answer.is_resident,
                answer.stored,
                answer.busy_seconds,
                answer.warnings,
            ),
        )
        del error  # its traceback may have this frame

    def _other(self, slot: int, field: int, place: Place) -> NDArray[Any]:
        """Return an array that `postprocess` made; it lies at one offset until it grows."""
        known = self._others.get((slot, field))
        if known is None or known.offset != place.offset or known.nbytes < place.nbytes:
            everything = Place(place.offset, (place.nbytes,), np.dtype(np.uint8))
            self._others[slot, field] = everything
        return self.shared.array(place)

    def _await_request(self) -> bool:
        """Wait for a request, if there is none; return False when closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._outstanding)
            return not self._closed

    def _pop(self, request: FillRequest) -> bool:
        """Forget a request; return False where it was forgotten before."""
        with self._lock:
            order = self._outstanding.get(request.slot)
            if order is None or order.request != request:
                return False
            del self._outstanding[request.slot]
            return True

    def _fail(self, request: FillRequest, error: BaseException) -> None:
        if self._pop(request):
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
        with contextlib.ExitStack() as stack:
            try:
                self._open(stack, memory_fd, folder)
            except OSError as error:
                raise ReadError(
                    f"{what}: no helper process can be started ({sys.executable}: {error}); raise"
                    " what limits processes and descriptors (ulimit -u, ulimit -n), or read with"
                    ' workers="thread"'
                ) from error
            self._resources = stack.pop_all()

    def _open(self, stack: contextlib.ExitStack, memory_fd: int, folder: str | None) -> None:
        self._channel, theirs = socket_pair()
        stack.callback(self._channel.close)
        with contextlib.closing(theirs):
            inherited = channel_of(duplicate(theirs.fileno()))
        with contextlib.closing(inherited), _signals_held_back():
            code = _code(inherited.fileno(), memory_fd, os.getpid())
            self._popen = subprocess.Popen(
                [sys.executable, *_interpreter_options(), "-c", code],
                stdin=subprocess.DEVNULL,
                pass_fds=(inherited.fileno(), memory_fd),
                cwd=_folder_to_enter(folder),
                env={**os.environ, _MARK: str(os.getpid())},
                # Or what is meant for a group would be for it, too. (A session of its own would do
                # that as well; but Linux shares the processor out by sessions, and where that is
                # busy a batch took 360 µs instead of 250.)
                process_group=0,
            )
        stack.callback(self._end)
        stack.callback(self.hang_up)

    def post(self, message: Any) -> None:
        """Have the next `flush` send a message. Never blocks."""
        self._outbox.append(message)

    def flush(self) -> None:
        """Send what was posted, by one thread; blocks until the helper receives it, or ends."""
        while self._outbox:
            self.send_bytes(dump(self._outbox.popleft()))

    def send_bytes(self, data: bytes) -> None:
        with contextlib.suppress(OSError):  # who receives will notice
            self._channel.send(data)

    def receive(self) -> Any:
        """Return the next message; raise `HelperDied` if there will be none."""
        try:
            return load(self._channel.receive())
        except EOFError:
            raise HelperDied(f"{self._what}: the helper process {self._end()}") from None

    def hang_up(self) -> None:
        """Tell the helper, and whoever is in `receive`, that this is the end."""
        self._channel.hang_up()

    def __enter__(self) -> _Process:
        return self

    def __exit__(self, *_: object) -> None:
        self._resources.close()

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


def check_interpreter() -> None:
    """See that there is a Python interpreter to start.

    Raises
    ------
    ConfigError
        If there is none, or what would be started is this program.
    """
    what = None
    if getattr(sys, "frozen", False):
        what = f"this program is frozen: {sys.executable} is the program itself"
    elif not sys.executable:
        what = f"sys.executable is {sys.executable!r}, as in a program that embeds Python"
    elif os.environ.get(_MARK) == str(os.getppid()):
        what = f"{sys.executable} was started for one, and it is another program"
    if what is not None:
        raise ConfigError(
            'workers="process" starts a Python interpreter, and there is none that is known to be'
            f" one ({what}); set sys.executable to a Python interpreter, or read with"
            ' workers="thread"'
        )


def _interpreter_options() -> list[str]:
    """Return options by which a new interpreter finds what this one does, and nothing else."""
    flags = {
        "-I": sys.flags.isolated,
        "-E": sys.flags.ignore_environment,
        "-s": sys.flags.no_user_site,
        "-S": sys.flags.no_site,
    }
    given = [option for option, is_given in flags.items() if is_given]
    return [*given, "-X", f"utf8={sys.flags.utf8_mode}"]  # or names of files would be others


def _code(channel_fd: int, memory_fd: int, parent: int) -> str:
    """Return what a helper process runs; it finds modules where this process does."""
    path = [entry for entry in sys.path if isinstance(entry, str)]  # others are ignored by imports
    return (
        f"import sys; sys.path[:] = {path!a}; from h5async.process.helper_main import main;"
        f" main({channel_fd}, {memory_fd}, {parent})"
    )


def _folder_to_enter(folder: str | None) -> str | None:
    """Return where a helper must go to be in a folder; None where it is, or cannot be."""
    with contextlib.suppress(OSError):
        if os.getcwd() == folder:
            return None
    return folder if folder is not None and os.path.isdir(folder) else None


@contextlib.contextmanager
def _signals_held_back() -> Iterator[None]:
    """Have a process that is started in here begin with signals blocked that it will ignore.

    Of these, Ctrl-C stays blocked there: it is the reader's to deal with.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, *GROUP_SIGNALS})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _death(error: HelperDied, order: _Order, was_starting: bool) -> HelperDied:
    request, when = order.request, "was to be" if was_starting else "was being"
    return HelperDied(
        f"{error} while batch {request.number} of epoch {request.epoch} {when} filled, as"
        f" {order.deaths - 1} helpers before it; the next call goes on, with a new helper"
    )


def _check_same(before: Mapping[str, DatasetLayout], now: Mapping[str, DatasetLayout]) -> None:
    """See that a new helper found the files that the first one did."""
    was, found = list(before.values()), list(now.values())
    ids = [
        [(leaf.file, leaf.stamp.file_id) for y in ys for leaf in y.leaves()] for ys in (was, found)
    ]
    if ids[0] != ids[1] or fingerprint(was) != fingerprint(found):
        raise ReadError(
            f"{was[0].file}: the helper process died, and a new one finds a file that has changed;"
            " open it again"
        )


def _has_come(
    steps: queue.SimpleQueue[BaseException | None],
    found: list[BaseException | None],
    seconds: float | None,
) -> bool:
    """Wait so many seconds for a step, and add it to `found`; return whether there was one."""
    try:
        found.append(steps.get(timeout=seconds))
    except queue.Empty:
        return False
    return True


def _nobody(*_: object) -> None:
    pass
