"""Read random files by random combinations of options, and compare all with NumPy on h5py's arrays.

    python scripts/fuzz_options.py --cases 10000

The cases are those of `tests/optioncases.py`: regions, crops, steps, sequences, kinds of fields,
storage, orders, ranks, caches, helper processes, damaged chunks, resuming. Outcomes:

    right      all is as NumPy has it
    refused    a `ConfigError`; its messages are counted, without numbers and names
    wrong      something else was delivered
    error      an error of any other class
    slow       no end within a minute, twice (the machine may be busy)

Cases of the last three are listed by number, from which each is made again:

    python scripts/fuzz_options.py --seed 0 --again 1234
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from bench_common import RESULTS, header, save
from optioncases import try_case

SECONDS = 60


def outcome_of(seed: int, number: int, base: Path | None, far: bool) -> tuple[str, str]:
    """Return the outcome of a case, and the message, or what went wrong."""
    signal.alarm(SECONDS)
    try:
        with tempfile.TemporaryDirectory(dir=base) as folder:
            refusal = try_case(seed, number, Path(folder), far=far)
        return ("refused", refusal) if refusal else ("right", "")
    except TimeoutError:
        return "slow", traceback.format_exc()
    except AssertionError:
        return "wrong", traceback.format_exc()
    except Exception:
        return "error", traceback.format_exc()
    finally:
        signal.alarm(0)


def _too_slow(*_: object) -> None:
    raise TimeoutError(f"no end within {SECONDS} s")


def without_names(message: str) -> str:
    """Return a message without what differs from case to case."""
    text = re.sub(r"/\S+?\.(h5|bin)(\.\w+)*", "FILE", message)
    return re.sub(r"\b(c\d|twin|rows|ep_\d)\b", "NAME", re.sub(r"\d+(\.\d+)?", "N", text))


def work(options: argparse.Namespace, job: int, base: Path | None, out: Path) -> None:
    """Run every n-th case, and write outcomes."""
    signal.signal(signal.SIGALRM, _too_slow)
    with out.open("w", buffering=1) as file:
        for number in range(options.first + job, options.first + options.cases, options.jobs):
            found = outcome_of(options.seed, number, base, options.far)
            file.write(json.dumps([number, *found]) + "\n")


def in_jobs(options: argparse.Namespace, base: Path | None) -> list[list[str]]:
    """Run all cases in several processes, and return their outcomes."""
    with tempfile.TemporaryDirectory(dir=base) as folder:
        children = []
        for job in range(options.jobs):
            out = Path(folder) / str(job)
            child = os.fork()
            if not child:
                with contextlib.suppress(BaseException):
                    work(options, job, base, out)
                    os._exit(0)
                traceback.print_exc()
                os._exit(1)
            children.append((child, out))
        if any([os.waitpid(child, 0)[1] for child, _ in children]):
            print("a job was killed: its last case is the one after those in its list")
        return [json.loads(line) for _, out in children for line in out.read_text().splitlines()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, help="the number of the first case")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--far", action="store_true", help="out of a store that is no local one")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--again", type=int, help="run this case alone, and show what comes of it")
    options = parser.parse_args()
    base = Path("/dev/shm") if Path("/dev/shm").is_dir() else None
    signal.signal(signal.SIGALRM, _too_slow)
    if options.again is not None:
        print(*outcome_of(options.seed, options.again, base, options.far), sep="\n")
        return 0
    begin = time.monotonic()
    found = [
        (number, *outcome_of(options.seed, number, base, options.far))
        if outcome == "slow"
        else (number, outcome, text)
        for number, outcome, text in sorted(in_jobs(options, base))
    ]
    counts = Counter(outcome for _, outcome, _ in found)
    refusals = Counter(without_names(text) for _, outcome, text in found if outcome == "refused")
    faults = [entry for entry in found if entry[1] not in ("right", "refused")]
    result = {
        **header(),
        "seed": options.seed,
        "first": options.first,
        "cases": len(found),
        "seconds": time.monotonic() - begin,
        "outcomes": dict(counts.most_common()),
        "refusals": dict(refusals.most_common()),
        "faults": faults,
    }
    save(result, options.out / f"fuzz_options{'_far' if options.far else ''}.json")
    print(
        f"{result['seconds']:.0f} s",
        dict(counts.most_common()),
        *refusals.most_common(40),
        sep="\n",
    )
    for number, outcome, text in faults[:40]:
        lines = text.partition("In this case:")[0].strip().splitlines()
        print(number, outcome, next((one for one in lines if "Error: " in one), lines[-1])[:400])
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
