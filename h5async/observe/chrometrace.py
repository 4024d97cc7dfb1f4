"""Writes events in Chrome's trace event format, for Perfetto and chrome://tracing.

The file has the "JSON Object Format" of Google's "Trace Event Format",
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU, with complete
events (``"ph": "X"``), in microseconds of `time.perf_counter`. An arrow (``"s"``, ``"t"``, ``"f"``)
leads from the request for a batch through the first work on it to the wait for it.
"""

from __future__ import annotations

import gzip
import json
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from h5async.fill.outcomes import Recorded
from h5async.system.interruptions import suppressing
from h5async.system.timeline import NO_BATCH, Event, ThreadName

FORMAT = "h5async trace 1"

Processes = Sequence[tuple[str, Recorded]]
Numbered = Sequence[tuple[int, Event]]  # with the numbers of their processes
# By the number of a process and a thread of it: its name, and the keys of both in events.
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
    """Write a trace of named processes, or raise `OSError`; an existing file is replaced at once.

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
        if kind not in of_batch or kind == "wait":  # the last wait: others timed out
            of_batch[kind] = process, event
    for batch, found in ends.items():
        if len(found) < len(("request", "work", "wait")):
            continue
        for phase, kind in (("s", "request"), ("t", "work"), ("f", "wait")):
            process, event = found[kind]
            # An arrow begins and ends within events, and at the end of a wait.
            at = event.end_ns if kind == "wait" else event.begin_ns
            bound = ',"bp":"e"' if phase == "f" else ""
            yield (
                f'{{"ph":"{phase}","cat":"{_CATEGORY}","name":"batch","id":{batch},'
                f'"ts":{_us(at)},{threads[process, event.thread][1]}{bound}}}'
            )


def _us(ns: int) -> str:
    return f"{ns // 1000}.{ns % 1000:03d}"
