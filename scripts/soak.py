"""Read for an hour, in several readers at once, with faults on purpose; see that nothing is lost.

    python scripts/soak.py --minutes 60

Each of several workloads makes readers of random options over random files, for as long as it
lasts: loops that are left, the low-level pair, saved states, readers that are closed, or dropped,
or collected in a cycle, anywhere. Faults: a `postprocess` that raises, damaged chunks, helper
processes that are killed, timeouts, files cut short. Every batch must be the one that is due, or
raise the error that was provoked; each row's CRC-32 is compared with that of h5py's. Memory,
descriptors, threads and processes of this program are watched, between rounds in which all
readers are closed.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from bench_common import RESULTS, header, save

from h5async import AsyncReader, BatchTimeoutError, Field, PostprocessError, ReadError

ROWS = 600
ROUND_SECONDS = 20
DAMAGED = range(200, 208)  # samples of the chunk that is damaged


class Provoked(RuntimeError):
    """Raised by `fail_at`."""


def fail_at(divisor: int, remainder: int, data: np.ndarray, labels: np.ndarray) -> None:
    if labels[0] % divisor == remainder:
        raise Provoked(f"{labels[0]} % {divisor} == {remainder}")


def stall(data: np.ndarray, labels: np.ndarray) -> None:
    if labels[0] % 11 == 3:
        time.sleep(0.05)


def to_float(data: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return data.astype("f4"), labels


def make_files(folder: Path) -> dict[str, list[int]]:
    """Write files of many kinds; return the CRC-32 of each row, as h5py reads it."""
    rng = np.random.default_rng(0)
    rows = rng.integers(0, 24, (ROWS, 24, 32, 3), "u1")
    kinds: dict[str, dict[str, Any]] = {
        "contiguous": {},
        "gzip": {"chunks": (8, 24, 32, 3), "compression": "gzip", "shuffle": True},
        "checked": {"chunks": (5, 12, 32, 3), "compression": "lzf", "fletcher32": True},
        "szip": {"chunks": (16, 24, 32, 3), "compression": "szip"},
        "damaged": {"chunks": (8, 24, 32, 3), "compression": "gzip"},
    }
    for name, options in kinds.items():
        with h5py.File(folder / f"{name}.h5", "w") as file:
            file.create_dataset("data", data=rows, **options)
            file.create_dataset("labels", data=np.arange(ROWS), chunks=(100,), compression="gzip")
            if name == "damaged":
                info = file["data"].id.get_chunk_info_by_coord((DAMAGED[0], 0, 0, 0))
                spot = info.byte_offset + info.size // 2
    with (folder / "damaged.h5").open("r+b") as raw:
        raw.seek(spot)
        raw.write(b"\xff" * 64)
    with h5py.File(folder / "virtual.h5", "w") as file:
        for field, shape in (("data", rows.shape), ("labels", (ROWS,))):
            layout = h5py.VirtualLayout(shape, rows.dtype if field == "data" else np.int64)
            half = ROWS // 2
            for part, name in enumerate(("contiguous", "gzip")):
                span = slice(part * half, (part + 1) * half)
                source = h5py.VirtualSource(f"{name}.h5", field, shape)
                layout[span] = source[span]
            file.create_virtual_dataset(field, layout)
    with h5py.File(folder / "by_h5py.h5", "w") as file:
        text = h5py.h5t.C_S1.copy()
        text.set_size(24 * 32 * 3)
        space = h5py.h5s.create_simple((ROWS,))
        texts = h5py.Dataset(h5py.h5d.create(file.id, b"data", text, space))
        texts[...] = (rows.reshape(ROWS, -1) + 1).view(f"S{24 * 32 * 3}").ravel()
        file["labels"] = np.arange(ROWS)
    found = {}
    for path in sorted(folder.glob("*.h5")):
        with h5py.File(path) as file:
            data = rows if path.stem == "damaged" else file["data"][...]
            found[path.stem] = [zlib.crc32(row.tobytes()) for row in data]
    return found


class Tally:
    """What all workloads did. Safe to use from many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []

    def add(self, what: str, count: int = 1) -> None:
        """Count something."""
        with self._lock:
            self.counts[what] += count

    def fail(self, text: str) -> None:
        """Note what must not be."""
        with self._lock:
            self.counts["wrong"] += 1
            self.wrong.append(text)


class Workload:
    """One thread that makes readers, uses and breaks them."""

    def __init__(self, folder: Path, checks: dict[str, list[int]], tally: Tally, seed: int) -> None:
        self.folder, self.checks, self.tally = folder, checks, tally
        self.random = random.Random(seed)

    def run(self, until: float) -> None:
        """Go on until then, of `time.monotonic`."""
        while time.monotonic() < until:
            try:
                self.use_reader(until)
            except Exception as error:  # anything that was not provoked
                self.tally.fail(f"{self.options}: {type(error).__name__}: {error}")

    def use_reader(self, until: float) -> None:
        """Make a reader, use it in some ways, and leave it."""
        choose = self.random.choice
        name = choose(list(self.checks))
        function = choose([None, None, "fail", "stall", "float"])
        functions = {
            None: None,
            "fail": functools.partial(fail_at, 13, self.random.randrange(13)),
            "stall": stall,
            "float": None if name == "by_h5py" else to_float,
        }
        self.options = {
            "hdf5_path": self.folder / f"{name}.h5",
            "batch_size": choose([7, 16, 64]),
            "shuffle": choose([False, "full", "window"]),
            "seed": self.random.randrange(1000),
            "num_threads": choose([0, 1, 2, 3]),
            "prefetch": choose([1, 2, 3, 4]),
            "workers": (workers := choose(["thread", "thread", "process", 3])),
            "cache": choose([None, None, "host" if workers != 3 else None]),
            "io": choose(["auto", "pread"]),
            "postprocess": functions[function],
            "device": "cpu",
        }
        if name == "by_h5py":
            self.options["fields"] = {"data": "data", "labels": Field("labels")}
        self.due: tuple[int, int] = (0, 0)  # epoch and number
        self.function = functions[function]
        reader = AsyncReader(self.options)
        self.tally.add("readers")
        try:
            for _ in range(self.random.randint(1, 4)):
                if time.monotonic() > until:
                    break
                reader = self.use(reader, name)
        finally:
            self.leave(reader)

    def use(self, reader: AsyncReader, name: str) -> AsyncReader:
        """Use a reader in one way; return it, or the one that goes on where it was."""
        how = self.random.choice(["loop", "pairs", "state", "epoch", "kill", "timeout"])
        if how == "kill":
            processes = getattr(reader._engine.filler, "processes", [None])
            process = self.random.choice(processes)
            if process is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process._popen.pid, signal.SIGKILL)
                    self.tally.add("helpers killed")
        if how == "state":
            state = reader.state_dict()
            reader.close()
            reader = AsyncReader({**self.options, "num_threads": 1, "prefetch": 2})
            reader.load_state_dict(state)
            self.tally.add("states loaded")
        if how == "epoch":
            epoch = self.random.randrange(50)
            reader.set_epoch(epoch)
            self.due = (epoch, 0)
        if how == "loop":
            epoch = self.due[0] + (self.due[1] > 0)
            if not self.is_resumed_epoch(reader):
                self.due = (epoch, 0)
            batches = iter(reader)
            for _ in range(self.random.randint(1, len(reader))):
                if not self.take(reader, name, lambda: next(batches)):
                    break
            return reader
        for _ in range(self.random.randint(1, 20)):
            for _ in range(self.random.randint(0, 2)):
                reader.fetch_data()
            self.take(reader, name, reader.get_next_batch, how == "timeout")
        return reader

    def is_resumed_epoch(self, reader: AsyncReader) -> bool:
        """Tell whether a loop goes on with the rest of an epoch, which a state was saved in."""
        schedule, serial = reader._engine.position.schedule, reader._engine.ring.consumer.next
        return schedule.epoch_begin(serial) == serial and self.due[1] > 0

    def take(self, reader: AsyncReader, name: str, get: Any, times_out: bool = False) -> bool:
        """Get a batch, and see that it, or the error in its place, is the one that is due."""
        try:
            if times_out:
                try:
                    batch = reader.get_next_batch(timeout=1e-5)
                except BatchTimeoutError:
                    self.tally.add("timeouts")
                    batch = reader.get_next_batch()
            else:
                batch = get()
        except StopIteration:
            return False
        except PostprocessError as error:
            if not isinstance(error, Provoked):
                raise
            self.tally.add("errors of postprocess")
        except ReadError as error:
            if "helper process" in str(error):
                self.tally.add("batches lost with a helper")
            elif name == "damaged":
                self.tally.add("errors of damaged chunks")
            else:
                raise
        else:
            self.check(batch, name)
        self.due = (self.due[0], self.due[1] + 1)
        if self.due[1] == len(reader):
            self.due = (self.due[0] + 1, 0)
        return True

    def check(self, batch: Any, name: str) -> None:
        """See that a batch is due, and holds what h5py read."""
        found = (
            [zlib.crc32(row.astype("u1").tobytes()) for row in batch.data]
            if (self.function is to_float)
            else [zlib.crc32(row.tobytes()) for row in batch.data]
        )
        expected = [self.checks[name][i] for i in batch.index]
        if (batch.epoch, batch.number) != self.due:
            self.tally.fail(
                f"{self.options}: batch {batch.number} of epoch {batch.epoch} came, {self.due} due"
            )
            self.due = (batch.epoch, batch.number)
        if found != expected or batch.labels.tolist() != batch.index.tolist():
            self.tally.fail(f"{self.options}: wrong values in batch {batch.number}")
        if name == "damaged" and set(batch.index.tolist()) & set(DAMAGED):
            self.tally.fail(f"{self.options}: a damaged chunk was taken for whole")
        self.tally.add("batches")
        self.tally.add("rows", batch.size)
        self.tally.add("bytes", batch.data.nbytes)

    def leave(self, reader: AsyncReader) -> None:
        """Close a reader, or drop it."""
        match self.random.randrange(4):
            case 0 | 1:
                for _ in range(self.random.randint(0, 3)):
                    reader.fetch_data()
                reader.close()
                self.tally.add("readers closed")
            case 2:
                self.tally.add("readers dropped")
            case _:
                reader.itself = reader  # type: ignore[attr-defined]
                self.tally.add("readers dropped in a cycle")


def resources() -> dict[str, int]:
    """Return what this program has, once all readers are closed."""
    gc.collect()
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        threads = [t for t in threading.enumerate() if t.name.startswith("h5async")]
        if not threads and not helpers():
            break
        time.sleep(0.02)
    status = Path("/proc/self/status").read_text()
    kib = next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS"))
    return {
        "rss_bytes": int(kib) * 1024,
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "helpers": helpers(),
    }


def helpers() -> int:
    found = subprocess.run(
        ["ps", "--ppid", str(os.getpid()), "-o", "args="], capture_output=True, text=True
    ).stdout
    return found.count("helper_main")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--workloads", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    # The reader's threads are many, and each would have an arena of its own.
    tally, samples, begin = Tally(), [], time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        checks = make_files(Path(folder))
        end = begin + 60 * options.minutes
        rounds = 0
        while time.monotonic() < end:
            until = min(end, time.monotonic() + ROUND_SECONDS)
            threads = [
                threading.Thread(
                    target=Workload(
                        Path(folder), checks, tally, hash((options.seed, rounds, number))
                    ).run,
                    args=(until,),
                )
                for number in range(options.workloads)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            rounds += 1
            samples.append({"seconds": time.monotonic() - begin, **resources()})
            if rounds % 15 == 1:
                print(samples[-1], dict(tally.counts), flush=True)
    result = {
        **header(),
        "commit": subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True
        ).stdout.strip(),
        "minutes": options.minutes,
        "workloads": options.workloads,
        "seed": options.seed,
        "rounds": rounds,
        "counts": dict(sorted(tally.counts.items())),
        "wrong": tally.wrong[:50],
        "samples": samples,
    }
    save(result, options.out / "soak.json")
    plot(samples, options.out / "soak.png")
    print(dict(tally.counts))
    print("\n".join(tally.wrong[:10]))
    return min(1, len(tally.wrong))


def plot(samples: list[dict[str, float]], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, (memory, others) = pyplot.subplots(2, 1, figsize=(8, 5), sharex=True)
    minutes = [sample["seconds"] / 60 for sample in samples]
    memory.plot(minutes, [sample["rss_bytes"] / 1e6 for sample in samples])
    memory.set_ylabel("resident memory, MB")
    memory.set_ylim(bottom=0)
    for what in ("descriptors", "threads", "helpers"):
        others.plot(minutes, [sample[what] for sample in samples], label=what)
    others.set_xlabel("minutes")
    others.set_ylim(bottom=0)
    others.legend()
    figure.suptitle("between rounds, when all readers are closed")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    sys.exit(main())
