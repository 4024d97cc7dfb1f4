"""Records what a reader does, and writes it as a trace at the end.

The engine reports its requests and deliveries here; the caller holds a `Trace`. Ranges of NVTX and
of PyTorch's profiler, which are imported only on request, show the work done in Python.

The file is for Perfetto and chrome://tracing: the "JSON Object Format" of Google's "Trace Event
Format", https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU, with
complete events (``"ph": "X"``), in microseconds of `time.perf_counter`. An arrow (``"s"``, ``"t"``,
``"f"``) leads from the request for a batch through the first work on it to the wait for it.
"""

from __future__ import annotations

import importlib
import json
import logging
import operator
import os
import stat
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsIndex

from h5async.errors import ConfigError, MissingPackageError, ReadError, out_of_memory
from h5async.system.interruptions import interruption, passing, suppressing
from h5async.system.timeline import NO_BATCH, Event, OpenRange, Recorder, ThreadName, Timeline

if TYPE_CHECKING:
    from h5async.fill.filling import Filler
    from h5async.fill.outcomes import Recorded
    from h5async.process.helper import HelperFiller

_MOST_EVENTS = 20_000_000  # 1 GB of memory, and a file of 3 GB

_log = logging.getLogger("h5async.trace")
FORMAT = "h5async trace 1"

Processes = Sequence[tuple[str, "Recorded"]]
Numbered = Sequence[tuple[int, Event]]  # with the numbers of their processes
# By process number and thread: the thread's name, and the JSON keys of both in events.
Threads = Mapping[tuple[int, int], tuple[str, str]]

_CATEGORY = "h5async"
_CONSUMER = ("request", "wait", "in use")  # stages of the caller's thread


def write_trace(
    path: Path,
    processes: Processes,
    batches: Mapping[int, tuple[int, int]],
    max_events: int,
    other: Mapping[str, Any],
) -> None:
    """Write a trace of named processes, or raise `OSError`; replaces a file atomically.

    `batches` are epochs and numbers by serial number, and `other` is further metadata. The first
    `max_events` events are written; a path in ``.gz`` is compressed.
    """
    path = Path(os.path.realpath(path))
    with suppressing(FileNotFoundError):
        if not stat.S_ISREG(path.stat().st_mode):
            raise OSError("it is not a file")
    several = [(number, event) for number, (_, one) in enumerate(processes) for event in one.events]
    # Enclosing events come before those inside.
    several.sort(key=lambda pair: (pair[1].begin_ns, -pair[1].end_ns))
    dropped = sum(one.dropped for _, one in processes) + max(0, len(several) - max_events)
    del several[max_events:]
    told = {"format": FORMAT, **other, "events": len(several), "dropped_events": dropped}
    threads = _threads(processes, several)
    new = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        import gzip  # rarely needed

        opened = (
            gzip.open(new, "wt", compresslevel=3, encoding="utf-8")
            if path.suffix == ".gz"
            else new.open("w", encoding="utf-8")
        )
        with opened as file:
            file.write(f'{{"displayTimeUnit":"ms","otherData":{json.dumps(told)},"traceEvents":[')
            names = _names(processes, several, threads)
            lines = chain(names, _events(several, threads, batches), _arrows(several, threads))
            for count, line in enumerate(lines):
                file.write(f"{',' if count else ''}\n{line}")
            file.write("\n]}\n")
        os.replace(new, path)
    except BaseException:
        with suppressing(OSError):
            new.unlink()
        raise


def _threads(processes: Processes, several: Numbered) -> Threads:
    found = {}
    for process, thread in {(process, event.thread) for process, event in several}:
        recorded, unknown = processes[process][1], ThreadName(f"thread {thread}", thread)
        name, number = recorded.threads.get(thread, unknown)
        found[process, thread] = name, f'"pid":{recorded.process},"tid":{number}'
    return found


def _names(processes: Processes, several: Numbered, threads: Threads) -> Iterator[str]:
    for process, (name, recorded) in enumerate(processes):
        yield from _named("process", name, process, f'"pid":{recorded.process},"tid":0')
    callers = {(process, e.thread) for process, e in several if e.stage in _CONSUMER[1:]}
    # The caller's threads come first, then the others, by name.
    order = sorted(threads, key=lambda thread: (thread not in callers, threads[thread][0]))
    for place, thread in enumerate(order):
        name, where = threads[thread]
        note = " (takes the batches)" if thread in callers else ""
        yield from _named("thread", f"{name}{note}", place, where)


def _named(what: str, name: str, place: int, where: str) -> Iterator[str]:
    yield f'{{"ph":"M","name":"{what}_name",{where},"args":{{"name":{json.dumps(name)}}}}}'
    yield f'{{"ph":"M","name":"{what}_sort_index",{where},"args":{{"sort_index":{place}}}}}'


def _events(
    several: Numbered, threads: Threads, batches: Mapping[int, tuple[int, int]]
) -> Iterator[str]:
    for process, event in several:
        args: dict[str, Any] = {}
        epoch, number = batches.get(event.batch, (-1, -1))
        if number >= 0:
            args = {"epoch": epoch, "batch": number}
        elif event.batch == NO_BATCH or event.batch in batches:
            args = {"batch": "of given samples"}
        if isinstance(event.field, str):
            args["field"] = event.field
        if isinstance(event.source, str):
            args["file"] = event.source
        told = f',"args":{json.dumps(args)}' if args else ""
        where = threads[process, event.thread][1]
        yield (
            f'{{"ph":"X","cat":"{_CATEGORY}","name":"{event.stage}","ts":{_us(event.begin_ns)},'
            f'"dur":{_us(event.end_ns - event.begin_ns)},{where}{told}}}'
        )


def _arrows(several: Numbered, threads: Threads) -> Iterator[str]:
    """Yield an arrow per batch that has all three: request, work and wait."""
    ends: dict[int, dict[str, tuple[int, Event]]] = {}
    for process, event in several:
        if event.batch == NO_BATCH or event.stage in ("in use", "fetch"):
            continue
        kind = event.stage if event.stage in _CONSUMER else "work"
        of_batch = ends.setdefault(event.batch, {})
        if kind not in of_batch or kind == "wait":  # the last wait: earlier ones timed out
            of_batch[kind] = process, event
    for batch, found in ends.items():
        if len(found) < len(("request", "work", "wait")):
            continue
        for phase, kind in (("s", "request"), ("t", "work"), ("f", "wait")):
            process, event = found[kind]
            # An arrow begins and continues within events, and ends at the end of a wait.
            at = event.end_ns if kind == "wait" else event.begin_ns
            bound = ',"bp":"e"' if phase == "f" else ""
            yield (
                f'{{"ph":"{phase}","cat":"{_CATEGORY}","name":"batch","id":{batch},'
                f'"ts":{_us(at)},{threads[process, event.thread][1]}{bound}}}'
            )


def _us(ns: int) -> str:
    return f"{ns // 1000}.{ns % 1000:03d}"


class Trace(AbstractContextManager["Trace"]):
    """A running trace of a reader, begun by `AsyncReader.trace` and ended by `stop`.

    It also ends at the end of its ``with`` block, and with its reader.

    Attributes
    ----------
    path
        The file that is written at the end; None means no file.
    is_ending
        Whether it has ended or is ending.

    Examples
    --------
    >>> with AsyncReader(hdf5_path="sample_data/digits.h5") as reader:
    ...     trace = reader.trace("t.json")
    ...     batch = reader.get_next_batch()
    ...     trace.stop()
    >>> trace.path.name
    't.json'
    """

    def __init__(self, path: Path | None, end: Callable[[Trace], None]) -> None:
        self.path = path
        self.is_ending = False
        self._end = end

    def stop(self) -> None:
        """End the trace and write the file, or raise `ReadError`. Extra calls are harmless."""
        self.is_ending = True
        self._end(self)

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        state = "ended" if self.is_ending else "running"
        return f"<Trace {self.path or 'without a file'}, {state}>"


class Tracing:
    """The traces of a reader, one at a time. For the caller's thread.

    All parts of the reader report to `recorder`; `title` names what is read.
    """

    def __init__(self, recorder: Recorder, title: str) -> None:
        self._recorder = recorder
        self._title = title
        self._process = os.getpid()
        # A weak reference: if an interruption kept the trace from the caller, the next one ends it.
        self._trace: Callable[[], Trace | None] = lambda: None
        self._file: Path | None = None
        self._filler: Filler | HelperFiller | None = None  # being recorded
        self._recorded: list[Recorded] | None = None
        self._batches: dict[int, tuple[int, int]] = {}  # epoch and number, by serial number
        self._began = ""
        self._max_events = 0

    def begin(
        self,
        path: str | os.PathLike[str] | None,
        filler: Filler | HelperFiller,
        batches: Callable[[], Mapping[int, tuple[int, int]]],
        held: int | None,
        *,
        nvtx: bool,
        torch: bool,
        max_events: int,
    ) -> Trace:
        """Begin a trace, as `AsyncReader.trace`.

        `batches` returns epoch and number of requested batches, by serial number; `held` is the
        serial number of the batch that the caller holds.
        """
        trace = self._trace()
        if trace is not None and not trace.is_ending:
            raise ConfigError(
                f"a trace of this reader is running already ({trace.path or 'without a file'}"
                "); end it by its stop() before you begin another one"
            )
        self.close()
        max_events = operator.index(max_events) if isinstance(max_events, SupportsIndex) else 0
        if not 1 <= max_events <= _MOST_EVENTS:
            raise ConfigError(
                f"max_events must be an integer from 1 to {_MOST_EVENTS:,}: the number to keep"
            )
        if path is None and not (nvtx or torch):
            raise ConfigError('trace() needs a path: trace("t.json"), or nvtx=True, or torch=True')
        ranges = [*([_nvtx_ranges()] if nvtx else ()), *([_torch_ranges()] if torch else ())]
        try:
            self._file = None if path is None else Path(os.path.abspath(os.fsdecode(path)))
        except TypeError as error:
            raise ConfigError(f"the path of a trace must be a file path, found {path!r}") from error
        self._began = datetime.now(UTC).isoformat(timespec="milliseconds")
        self._max_events = max_events
        timeline = Timeline(max_events if path is not None else 0, ranges)
        trace = Trace(self._file, self._stop)
        self._trace = weakref.ref(trace)
        try:
            self._filler = filler
            self._recorder.timeline = timeline
            self._batches = timeline.batches
            self._batches.update(batches())
            filler.record(timeline)
            if held is not None:
                timeline.hold(held)
            self._begin_file()
        except BaseException as error:
            trace.is_ending = True
            self._recorder.timeline = None
            filler.record(None)
            self._filler = None
            if not isinstance(error, MemoryError):
                raise
            raise out_of_memory(
                f"a trace of {max_events:,} events", error, "reduce max_events"
            ) from error
        return trace

    def _begin_file(self) -> None:
        """Write a trace that notes that the process ended early, in case it does."""
        if self._file is None:
            return
        try:
            self._write(())
        except OSError as error:
            raise ConfigError(
                f"the trace cannot be written to {self._file}: {error.strerror or error};"
                " give the path of a file in a folder that you may write to"
            ) from error

    def close(self) -> ReadError | None:
        """End a running trace with the reader; return the error if it cannot be written."""
        try:
            self._end()
        except ReadError as error:
            if interruption(error) is not None:
                raise
            _log.warning("%s", error)
            return error
        return None

    @passing()
    def _stop(self, trace: Trace) -> None:
        if self._trace() is trace:
            self._end()

    def _end(self) -> None:
        """End a running trace; if interrupted, the next call continues."""
        filler = self._filler
        if filler is None or self._process != os.getpid():  # a fork: it belongs to the parent
            return
        trace = self._trace()
        if trace is not None:
            trace.is_ending = True
        self._recorder.timeline = None
        filler.record(None)
        if self._recorded is None:
            self._recorded = filler.recorded()
        failure = None
        try:
            if self._file is not None:
                self._write(self._recorded)
        except OSError as error:
            if interruption(error) is not None:
                raise
            failure = error
        self._filler, self._recorded, self._batches = None, None, {}
        if failure is not None:
            raise ReadError(
                f"the trace cannot be written to {self._file}: {failure.strerror or failure}"
            ) from failure

    def _write(self, recorded: Sequence[Recorded]) -> None:
        assert self._file is not None
        names = [f"h5async: {self._title}", *["h5async: a helper process"] * len(recorded)]
        other = {"reader": self._title, "began": self._began}
        if not recorded:  # it has just begun
            other["note"] = "the process ended before the trace did"
        processes = list(zip(names, recorded, strict=False))
        write_trace(self._file, processes, self._batches, self._max_events, other)


def _nvtx_ranges() -> OpenRange:
    nvtx = _imported(
        "cupy.cuda.nvtx",
        "nvtx=True needs CuPy, which has NVTX ({}); install it with: pip install"
        " 'h5async[cuda13]', or 'h5async[cuda12]' for a driver of CUDA 12",
    )

    def open_range(name: str) -> Callable[[], object]:
        nvtx.RangePush(name)
        return partial(nvtx.RangePop)

    return open_range


def _torch_ranges() -> OpenRange:
    profiler = _imported(
        "torch.profiler", "torch=True needs PyTorch ({}); install it as https://pytorch.org says"
    )

    def open_range(name: str) -> Callable[[], object]:
        opened = profiler.record_function(name)
        opened.__enter__()
        return partial(opened.__exit__, None, None, None)

    return open_range


def _imported(module: str, otherwise: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingPackageError(otherwise.format(error)) from error
