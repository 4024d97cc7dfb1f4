"""Writes events in Chrome's trace event format, for Perfetto and chrome://tracing.

The file has the "JSON Object Format" of Google's "Trace Event Format",
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU. Each event is a
complete one (``"ph": "X"``), with times in microseconds of `time.perf_counter`. An arrow (``"ph":
"s"``, ``"t"``, ``"f"``) leads from the request for a batch through the first work on it to the wait
for it.
"""

from __future__ import annotations

import gzip
import json
import os
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from h5async.fill.outcomes import Recorded
from h5async.system.interruptions import suppressing
from h5async.system.timeline import NO_BATCH, Event

FORMAT = "h5async trace 1"

_CATEGORY = "h5async"
_CONSUMER = ("fetch", "wait", "in use")  # stages of the caller's thread


def write_trace(
    path: Path,
    processes: Sequence[tuple[str, Recorded]],
    batches: Mapping[int, tuple[int, int]],
    max_events: int,
    other: Mapping[str, Any],
) -> None:
    """Write a trace, replacing an existing file in one step.

    Parameters
    ----------
    path
        The file; ``.gz`` compresses it.
    processes
        Name and events of each process.
    batches
        Epoch and number, by serial number.
    max_events
        Number of events to write, from the first one on.
    other
        Further metadata.

    Raises
    ------
    OSError
        If it cannot be written, or `path` exists and is not a file.
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
    numbers = _ThreadNumbers(processes)
    new = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with _opened(new, path.suffix == ".gz") as file:
            file.write(f'{{"displayTimeUnit":"ms","otherData":{json.dumps(told)},"traceEvents":[')
            parts = (_names(processes, several, numbers), _events(several, numbers, batches))
            lines = (line for part in (*parts, _arrows(several, numbers)) for line in part)
            for count, line in enumerate(lines):
                file.write(f"{',' if count else ''}\n{line}")
            file.write("\n]}\n")
        os.replace(new, path)
    except BaseException:
        with suppressing(OSError):
            new.unlink()
        raise


def _opened(path: Path, is_compressed: bool) -> IO[str]:
    if is_compressed:
        return gzip.open(path, "wt", compresslevel=3, encoding="utf-8")
    return path.open("w", encoding="utf-8")


class _ThreadNumbers:
    """Numbers of threads in the file: those of the operating system."""

    def __init__(self, processes: Sequence[tuple[str, Recorded]]) -> None:
        self._processes = processes

    def __call__(self, process: int, thread: int) -> str:
        recorded = self._processes[process][1]
        known = recorded.threads.get(thread)
        number = thread if known is None else known.native_id
        return f'"pid":{recorded.process},"tid":{number}'


def _names(
    processes: Sequence[tuple[str, Recorded]],
    several: Sequence[tuple[int, Event]],
    numbers: _ThreadNumbers,
) -> Iterator[str]:
    """Yield the names of the processes and threads that have events."""
    for process, (name, recorded) in enumerate(processes):
        yield _name_of("process_name", f'"pid":{recorded.process},"tid":0', {"name": name})
        yield _name_of(
            "process_sort_index", f'"pid":{recorded.process},"tid":0', {"sort_index": process}
        )
    callers = {(process, e.thread) for process, e in several if e.stage in _CONSUMER[1:]}
    # The caller's threads come first, then the others, by name.
    threads = sorted(
        {(process, event.thread) for process, event in several},
        key=lambda pair: (pair not in callers, _thread_name(processes[pair[0]][1], pair[1])),
    )
    for place, (process, thread) in enumerate(threads):
        name = _thread_name(processes[process][1], thread)
        if (process, thread) in callers:
            name += " (takes the batches)"
        where = numbers(process, thread)
        yield _name_of("thread_name", where, {"name": name})
        yield _name_of("thread_sort_index", where, {"sort_index": place})


def _name_of(kind: str, where: str, args: Mapping[str, Any]) -> str:
    return f'{{"ph":"M","name":"{kind}",{where},"args":{json.dumps(args)}}}'


def _thread_name(recorded: Recorded, thread: int) -> str:
    known = recorded.threads.get(thread)
    return f"thread {thread}" if known is None else known.name


def _events(
    several: Iterable[tuple[int, Event]],
    numbers: _ThreadNumbers,
    batches: Mapping[int, tuple[int, int]],
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
        yield (
            f'{{"ph":"X","cat":"{_CATEGORY}","name":"{event.stage}","ts":{_us(event.begin_ns)},'
            f'"dur":{_us(event.end_ns - event.begin_ns)},{numbers(process, event.thread)}{told}}}'
        )


def _arrows(several: Iterable[tuple[int, Event]], numbers: _ThreadNumbers) -> Iterator[str]:
    """Yield an arrow per batch that has all three: request, work and wait."""
    ends: dict[int, dict[str, tuple[int, Event]]] = {}
    for process, event in several:
        if event.batch == NO_BATCH or event.stage == "in use":
            continue
        kind = event.stage if event.stage in _CONSUMER else "work"
        of_batch = ends.setdefault(event.batch, {})
        if kind not in of_batch or kind == "wait":  # the last wait: others timed out
            of_batch[kind] = process, event
    for batch, found in ends.items():
        if len(found) < len(("fetch", "work", "wait")):
            continue
        for phase, kind in (("s", "fetch"), ("t", "work"), ("f", "wait")):
            process, event = found[kind]
            # An arrow begins and ends within events, and at the end of a wait.
            at = event.end_ns if kind == "wait" else event.begin_ns
            bound = ',"bp":"e"' if phase == "f" else ""
            yield (
                f'{{"ph":"{phase}","cat":"{_CATEGORY}","name":"batch","id":{batch},'
                f'"ts":{_us(at)},{numbers(process, event.thread)}{bound}}}'
            )


def _us(ns: int) -> str:
    return f"{ns // 1000}.{ns % 1000:03d}"
