"""Measures clients that fetch byte ranges over HTTP: rate, and CPU time a request.

A server in C (`rangeserver.c`) serves a file on the loopback, at once or after 20 ms. Random ranges
of one size are asked for, as batches of shuffled rows are: in calls of 16, by as many threads as
there are requests in flight for. All ways take turns; ratios are medians of those of each turn. CPU
time is that of this process, and counts most: it does not depend on what else the machine does.

- curl: sources as readers have them, whose ranges come by libcurl in the core.
- curl alone: the core's loop, into memory that is there, without Python for each range.
- store: the source of the store, by obstore, which checks the same.
- obstore: its `get_ranges`, pinned to the ETag, and nothing else.

Beside a loop in Python, `loop` is what that does, in shares of what it does alone.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import itertools
import resource
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import obstore
from bench_common import RESULTS, header, save, serving_file
from obstore.store import HTTPStore

from h5async.config.files import SourceName
from h5async.core.binding import load_core
from h5async.io.source import Source
from h5async.io.stores import store_of
from h5async.read.farsources import HttpClient, http_client

mpl.use("agg")
import matplotlib.pyplot as plt

FILE_NBYTES = 256 << 20
AT_ONCE = 16
CASES = [
    (nbytes, flights, delay, beside)
    for delay in (0, 20)
    for beside in (False, True)
    for nbytes, flights in ((150_000, 16), (150_000, 64), (4096, 64))
]
Get = Callable[[list[int], list[int]], Any]


def serving(folder: Path, delay_ms: int) -> contextlib.AbstractContextManager[str]:
    """Serve a file of random bytes; yield its URL."""
    file = folder / "file.bin"
    if not file.exists():
        file.write_bytes(np.random.default_rng(0).bytes(FILE_NBYTES))
    return serving_file(file, delay_ms)


def curl_alone(client: HttpClient, source: Source, nbytes: int) -> Get:
    """Return a function that has the core fill the same memory each time."""
    memory, at = threading.local(), source.web_address()
    stamp, stop = source.stamp(), ctypes.c_int32(0)

    def get(offsets: list[int], lengths: list[int]) -> None:
        if not hasattr(memory, "made"):
            memory.made = client.new_ranges(offsets, lengths)
        ranges = memory.made[0].copy()
        ranges["offset"] = offsets
        assert at is not None
        assert client.get(at, stamp, ranges, stop) == 0

    return get


def ways(client: HttpClient, url: str, nbytes: int) -> dict[str, Get]:
    name = SourceName(url, {})
    base, key = url.rsplit("/", 1)
    options = {"allow_http": True, "default_headers": {"If-Match": '"tag"'}}
    store = HTTPStore(base, client_options=options)

    def pinned(offsets: list[int], lengths: list[int]) -> Any:
        return obstore.get_ranges(store, key, starts=offsets, lengths=lengths, coalesce=0)

    plain = store_of(name).open(name)
    return {
        "curl": client.quicker(plain, name).get_ranges,
        "curl alone": curl_alone(client, plain, nbytes),
        "store": plain.get_ranges,
        "obstore": pinned,
    }


class Loop(threading.Thread):
    """A loop in Python; `rate` is how often it went round a second."""

    def __init__(self) -> None:
        super().__init__()
        self.is_ended, self.rate, self.cpu = False, 0.0, 0.0

    def run(self) -> None:
        """Go round until it is told to end."""
        begin, rounds = time.perf_counter(), 0
        while not self.is_ended:
            sum(range(1000))
            rounds += 1
        self.rate = rounds / (time.perf_counter() - begin)
        self.cpu = time.thread_time()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Run during a block."""
        self.start()
        yield
        self.is_ended = True
        self.join()


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def turn(get: Get, nbytes: int, flights: int, seconds: float, beside: bool) -> dict[str, float]:
    """Have threads call a way for some time; return requests a second, microseconds, rounds."""
    begin, before = time.perf_counter(), cpu_seconds()
    counts = [0] * max(1, flights // AT_ONCE)

    def work(number: int) -> None:
        rng = np.random.default_rng(number)
        while not counts[number] or time.perf_counter() < begin + seconds:
            offsets = rng.integers(0, FILE_NBYTES - nbytes, AT_ONCE).tolist()
            get(offsets, [nbytes] * AT_ONCE)
            counts[number] += AT_ONCE

    threads = [threading.Thread(target=work, args=(n,)) for n in range(len(counts))]
    loop = Loop()
    with loop.running() if beside else contextlib.nullcontext():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        taken = time.perf_counter() - begin
    cpu = cpu_seconds() - before - loop.cpu
    return {"rate": sum(counts) / taken, "cpu_us": 1e6 * cpu / sum(counts), "loop": loop.rate}


def measure(client: HttpClient, url: str, case: tuple[Any, ...], options: Any) -> dict[str, Any]:
    nbytes, flights, delay, beside = case
    found: dict[str, list[dict[str, float]]] = {}
    alone: list[float] = []
    for repeat, (name, get) in itertools.product(
        range(options.repeats + 1), ways(client, url, nbytes).items()
    ):
        one = turn(get, nbytes, flights, options.seconds, beside)
        if repeat:  # the first time, connections are made
            found.setdefault(name, []).append(one)
    if beside:
        loop = Loop()
        with loop.running():
            time.sleep(options.seconds)
        alone.append(loop.rate)

    def ratio(one: str, other: str, what: str) -> float:
        pairs = zip(found[one], found[other], strict=True)
        return round(statistics.median(a[what] / b[what] for a, b in pairs), 2)

    ratios = {
        f"{what} of {one} / {other}": ratio(one, other, what)
        for what in ("rate", "cpu_us", *(["loop"] if beside else []))
        for one, other in (("curl", "obstore"), ("curl", "store"), ("curl", "curl alone"))
    }
    about = {"nbytes": nbytes, "flights": flights, "delay_ms": delay, "beside": beside}
    print(about, ratios, flush=True)
    turns = {
        name: {what: [round(one[what], 1) for one in several] for what in several[0]}
        for name, several in found.items()
    }
    return {**about, "ratios": ratios, "loop_alone": alone, "turns": turns}


def draw(results: list[dict[str, Any]], path: Path) -> None:
    figure, axes = plt.subplots(1, 2, figsize=(13, 5), layout="constrained")
    labels = [
        f"{y['nbytes'] / 1000:.0f} kB x{y['flights']}\n{y['delay_ms']} ms"
        + (", loop" if y["beside"] else "")
        for y in results
    ]
    at = np.arange(len(results))
    for axis, what, title in (
        (axes[0], "cpu_us", "CPU time a request, in microseconds"),
        (axes[1], "rate", "requests a second"),
    ):
        for number, name in enumerate(results[0]["turns"]):
            values = [statistics.median(y["turns"][name][what]) for y in results]
            axis.bar(at + 0.2 * number, values, 0.2, label=name)
        axis.set_xticks(at + 0.3, labels, fontsize=6)
        axis.set_title(title)
        axis.set_yscale("log")
    axes[0].legend()
    figure.savefig(path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=0.4)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="no figures to quote")
    parser.add_argument("--out", type=Path, nargs="?", const=RESULTS)
    options = parser.parse_args()
    if options.quick:
        options.seconds, options.repeats = 0.05, 1
    core = load_core()
    client = None if core is None else http_client(core)
    if client is None:
        raise SystemExit("needs the compiled core, and libcurl: pip install pycurl")
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for delay, cases in itertools.groupby(CASES, lambda case: case[2]):
            with serving(Path(folder), delay) as url:
                results += [measure(client, url, case, options) for case in cases]
    client.close()
    if options.out is not None:
        save({**header(), "cases": results}, options.out / "bench_fetch.json")
        draw(results, options.out / "bench_fetch.png")


if __name__ == "__main__":
    main()
