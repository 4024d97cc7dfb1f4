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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from h5async.fill.outcomes import Recorded
from h5async.system.interruptions import suppressing
from h5async.system.timeline import NO_BATCH, Event

FORMAT = "h5async trace 1"

Processes = Sequence[tuple[str, Recorded]]
Where = Callable[[int, int], str]

_CATEGORY = "h5async"
_CONSUMER = ("fetch", "wait", "in use")  # stages of the caller's thread


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
    where = partial(_where, processes)
    new = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        opened = (
            gzip.open(new, "wt", compresslevel=3, encoding="utf-8")
            if path.suffix == ".gz"
            else new.open("w", encoding="utf-8")
        )
        with opened as file:
            file.write(f'{{"displayTimeUnit":"ms","otherData":{json.dumps(told)},"traceEvents":[')
            names = _names(processes, several, where)
            lines = chain(names, _events(several, where, batches), _arrows(several, where))
            for count, line in enumerate(lines):
                file.write(f"{',' if count else ''}\n{line}")
            file.write("\n]}\n")
        os.replace(new, path)
    except BaseException:
        with suppressing(OSError):
            new.unlink()
        raise


def _where(processes: Processes, process: int, thread: int) -> str:
    """Return the keys of a process and a thread: the numbers of the operating system."""
    recorded = processes[process][1]
    known = recorded.threads.get(thread)
    number = thread if known is None else known.native_id
    return f'"pid":{recorded.process},"tid":{number}'


def _names(
    processes: Processes,
    several: Sequence[tuple[int, Event]],
    where: Where,
) -> Iterator[str]:
    for process, (name, recorded) in enumerate(processes):
        whole = f'"pid":{recorded.process},"tid":0'
        yield _name_of("process_name", whole, {"name": name})
        yield _name_of("process_sort_index", whole, {"sort_index": process})
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
        yield _name_of("thread_name", where(process, thread), {"name": name})
        yield _name_of("thread_sort_index", where(process, thread), {"sort_index": place})


def _name_of(kind: str, where: str, args: Mapping[str, Any]) -> str:
    return f'{{"ph":"M","name":"{kind}",{where},"args":{json.dumps(args)}}}'


def _thread_name(recorded: Recorded, thread: int) -> str:
    known = recorded.threads.get(thread)
    return f"thread {thread}" if known is None else known.name


def _events(
    several: Iterable[tuple[int, Event]],
    where: Where,
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
            f'"dur":{_us(event.end_ns - event.begin_ns)},{where(process, event.thread)}{told}}}'
        )


def _arrows(several: Iterable[tuple[int, Event]], where: Where) -> Iterator[str]:
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
                f'"ts":{_us(at)},{where(process, event.thread)}{bound}}}'
            )


def _us(ns: int) -> str:
    return f"{ns // 1000}.{ns % 1000:03d}"
