"""Read far files under random faults of the network, and compare every batch with h5py.

    python scripts/fuzz_remote.py --batches 100000

A round opens a file by random options over the server of `tests/io/httpserver.py`, which strikes
requests at random: errors that pass, resets, stalls, truncated and short answers, answers of other
ranges and of other versions. Outcomes, of batches:

    right      all values and sample numbers are as h5py has them
    error      a `ReadError` that names the file; the next batch is the one after it
    wrong      something else was delivered
    lost       a batch did not come, or came twice
    odd        an error of any other class, or one that does not name the file

and of rounds, which are listed by number where one has any of the last three or is `slow`; each is
made again alone by

    python scripts/fuzz_remote.py --seed 0 --again 12
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import h5py
import hdf5plugin
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "io"))

from bench_common import RESULTS, header, save
from httpserver import Rule, Server, serving

from h5async import AsyncReader, ReadError

ROWS = 3000
ROUND_BATCHES = 500
SECONDS = 300  # a round
BAD = ("wrong", "lost", "odd", "slow")
KINDS: dict[str, dict[str, Any]] = {
    "contiguous": {},
    "raw": {"chunks": (5, 75)},
    "gzip": {"chunks": (3, 75), "compression": "gzip", "shuffle": True},
    "zstd": {"chunks": (16, 75), **hdf5plugin.Zstd()},
    "pieces": {"chunks": (8, 20), **hdf5plugin.Blosc()},
}
# Of requests, how many are struck: faults that pass, after which a client tries again; and those
# that it cannot mend, so that a batch is an error.
PASSING = {
    ("status", 500): 0.01,
    ("status", 503): 0.02,
    ("status", 429): 0.01,
    ("reset", None): 0.01,
    ("reset_body", None): 0.01,
    ("truncated", None): 0.01,
    ("stall", None): 0.0003,
    ("stall_body", None): 0.0003,
    ("stall", 0.02): 0.005,
}
LASTING = {
    ("whole", None): 0.002,
    ("wrong_range", None): 0.002,
    ("short", None): 0.002,
    ("other_version", None): 0.002,
    ("status", 403): 0.002,
    ("status", 404): 0.002,
}
CLIENT = {
    "client_options": {"allow_http": True, "timeout": timedelta(seconds=0.5)},
    "retry_config": {
        "max_retries": 10,
        "retry_timeout": timedelta(seconds=60),
        "backoff": {
            "init_backoff": timedelta(milliseconds=1),
            "max_backoff": timedelta(milliseconds=50),
            "base": 2,
        },
    },
}


def write(folder: Path) -> dict[str, np.ndarray]:
    """Write a file with a dataset of each kind; return what h5py reads of them."""
    rng = np.random.default_rng(0)
    with h5py.File(folder / "a.h5", "w") as file:
        for name, how in KINDS.items():
            file.create_dataset(name, data=rng.integers(0, 1 << 20, (ROWS, 75), "i4"), **how)
        file["labels"] = np.arange(ROWS)
        return {name: file[name][...] for name in KINDS}


def options_of(rng: random.Random) -> dict[str, Any]:
    """Draw options of a reader."""
    return {
        "data_field": rng.choice(list(KINDS)),
        "batch_size": rng.randint(1, 9),
        "shuffle": rng.choice([False, "full", "full", "window"]),
        "seed": rng.randrange(99),
        "prefetch": rng.randint(1, 6),
        "num_threads": rng.randint(0, 3),
        "workers": "process" if rng.random() < 0.05 else "thread",
        "requests_in_flight": rng.choice([1, 4, 32]),
        "fetch_bytes": rng.choice([1 << 14, 1 << 18, 256 << 20]),
        "timeout": SECONDS,
        "index_cache": False,
    }


def rules_of(rng: random.Random) -> list[Rule]:
    """Draw which faults strike how often; in a third of the rounds, also those that last."""
    chances = {**PASSING, **LASTING} if rng.random() < 1 / 3 else PASSING
    scale, which = rng.choice([0.2, 1, 1, 3]), {"path": "/bucket/*", "ranged": True}
    return [
        Rule(fault, value, probability=chance * scale, seed=rng.getrandbits(32), **which)
        for (fault, value), chance in chances.items()
    ]


class Round:
    """What came of a round: counts of outcomes, of faults that struck, and what was found."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.requests = 0
        self.found: list[str] = []

    def note(self, outcome: str, text: str = "") -> None:
        """Count an outcome; keep the text of a bad one."""
        self.outcomes[outcome] += 1
        if outcome in BAD and len(self.found) < 5:
            self.found.append(f"{outcome}: {text[:2000]}")


def play(
    server: Server, truth: dict[str, np.ndarray], seed: int, number: int, batches: int
) -> Round:
    """Play a round."""
    rng, here = random.Random(f"{seed} {number}"), Round()
    options, scheme = options_of(rng), rng.choice(["http", "s3", "gs"])
    url = server.url("bucket/a.h5") if scheme == "http" else f"{scheme}://bucket/a.h5"
    client = {**server.client_options(scheme), **CLIENT}
    rules = rules_of(rng)
    server.delay(rng.choice([0, 0, 0.002]))
    server.heed_tags(rng.random() < 0.8)
    server.log()
    server.strike(*rules)
    signal.alarm(SECONDS)
    try:
        with opened(here, hdf5_path=url, storage_options=client, **options) as reader:
            if reader is not None:
                read(reader, truth[options["data_field"]], batches, here)
    except TimeoutError:
        here.note("slow", traceback.format_exc())
    except Exception:
        here.note("odd", traceback.format_exc())
    finally:
        signal.alarm(0)
    for rule, struck in zip(rules, server.struck(), strict=True):
        here.faults[f"{rule.fault} {rule.value:g}" if rule.value else rule.fault] += struck
    here.requests = server.log().count
    here.found = [f"{options | {'scheme': scheme}}\n{text}" for text in here.found]
    return here


@contextlib.contextmanager
def opened(here: Round, **options: Any) -> Iterator[AsyncReader | None]:
    """Open a reader; None where the faults do not let it, which must be an error that says so."""
    try:
        reader = AsyncReader(**options)
    except ReadError as error:
        here.note("unopened" if options["hdf5_path"] in str(error) else "odd", str(error))
        yield None
        return
    with reader:
        yield reader


def read(reader: AsyncReader, truth: np.ndarray, batches: int, here: Round) -> None:
    """Read batches, and check that each comes once, in order, with all of its values."""
    due, epoch, seen = 0, 0, np.zeros(ROWS, bool)
    for _ in range(batches):
        try:
            batch = reader.get_next_batch()
        except ReadError as error:
            here.note("error" if "bucket/a.h5" in str(error) else "odd", str(error))
            due += 1
            continue
        at = batch.epoch * len(reader) + batch.number
        is_right = np.array_equal(batch.data, truth[batch.index])
        is_right &= np.array_equal(batch.labels, batch.index)
        outcome = ("right" if is_right else "wrong") if at == due else "lost"
        here.note(outcome, f"batch {at}, {due} was due, samples {batch.index.tolist()}")
        if batch.epoch != epoch:
            epoch, seen[:] = batch.epoch, False
        if seen[batch.index].any():
            here.note("lost", f"batch {at} has samples of others of its epoch")
        seen[batch.index] = True
        due = at + 1


def _too_slow(*_: object) -> None:
    raise TimeoutError(f"no end within {SECONDS} s")


def work(options: argparse.Namespace, job: int, folder: Path, out: Path) -> None:
    """Play every n-th round, and write what came of it."""
    signal.signal(signal.SIGALRM, _too_slow)
    (folder / "bucket").mkdir(parents=True)
    truth = write(folder / "bucket")
    begin, done = time.monotonic(), 0
    with serving(folder) as server, out.open("w", buffering=1) as file:
        for number in itertools.count(job, options.jobs):
            if done * options.jobs >= options.batches or time.monotonic() > begin + options.seconds:
                break
            one = play(server, truth, options.seed, number, ROUND_BATCHES)
            done += one.outcomes.total() - one.outcomes["unopened"]
            entry = [number, one.outcomes, one.faults, one.requests, one.found]
            file.write(json.dumps(entry) + "\n")


def in_jobs(options: argparse.Namespace, folder: Path) -> list[list[Any]]:
    """Play all rounds in several processes, and return what came of them."""
    children = []
    for job in range(options.jobs):
        out = folder / f"{job}.jsonl"
        child = os.fork()
        if not child:
            status = 1
            try:
                work(options, job, folder / str(job), out)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        children.append((child, out))
    if any([os.waitpid(child, 0)[1] for child, _ in children]):
        sys.exit("a job ended by an error, or was killed")
    return [json.loads(line) for _, out in children for line in out.read_text().splitlines()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--batches", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="no new rounds after")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--again", type=int, help="play this round alone")
    options = parser.parse_args()
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as name:
        folder = Path(name)
        if options.again is not None:
            (folder / "bucket").mkdir()
            truth = write(folder / "bucket")
            with serving(folder) as server:
                one = play(server, truth, options.seed, options.again, ROUND_BATCHES)
            print(one.outcomes, one.faults, one.requests, *one.found, sep="\n")
            return 0
        found = sorted(in_jobs(options, folder))
    outcomes, faults = Counter[str](), Counter[str]()
    for _, some, struck, _, _ in found:
        outcomes.update(some)
        faults.update(struck)
    result = {
        **header(),
        "seed": options.seed,
        "rounds": len(found),
        "seconds": time.monotonic() - begin,
        "requests": sum(entry[3] for entry in found),
        "outcomes": dict(outcomes.most_common()),
        "faults": dict(faults.most_common()),
        "found": [[entry[0], entry[4]] for entry in found if entry[4]],
    }
    save(result, options.out / "fuzz_remote.json")
    print(f"{result['seconds']:.0f} s, {len(found)} rounds, {result['requests']} requests")
    print(f"batches: {result['outcomes']}", f"faults: {result['faults']}", sep="\n")
    for number, texts in result["found"][:20]:
        print(number, *texts[:1])
    return bool(result["found"])


if __name__ == "__main__":
    sys.exit(main())
