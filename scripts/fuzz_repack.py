"""Kill repacks at random moments, go on with them, and compare with an undisturbed one.

    python scripts/fuzz_repack.py --kills 200

Each repack runs in a process of its own, which gets SIGKILL at a random moment, again and again,
until it ends by itself. Then all objects, attributes and values are compared by h5py.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import h5py
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "packing"))
from samefiles import assert_same_files

import h5async
from h5async.packing import safefile
from h5async.packing.repacking import Repacking

OPTIONS: list[dict[str, Any]] = [
    {"chunks": {"data": (7, 40, 40, 3)}, "filter": "lzf", "fields": ["data"]},
    {"indices": "5:", "shuffle": "full", "chunk_samples": 3},
    {"encode": {"data": "png"}},
    {},
]


def write_source(path: Path) -> None:
    """Write datasets of each kind: cut anew, copied, contiguous, of variable length, references."""
    rng = np.random.default_rng(0)
    with h5py.File(path, "w", track_order=True) as file:
        images = rng.integers(0, 30, (2000, 40, 40, 3)).astype(np.uint8)
        file.create_dataset("data", data=images, chunks=(32, 40, 40, 3), compression="gzip")
        file["labels"] = np.arange(2000)
        file["plain"] = rng.random((200, 10_000))
        names = [f"image {number}" for number in range(2000)]
        file.create_dataset("names", data=names, dtype=h5py.string_dtype())
        many = rng.integers(0, 30, (500, 4000)).astype(np.uint16)
        file.create_dataset("stored", data=many, chunks=(10, 4000), compression="lzf")
        for number in range(50):
            file[f"groups/{number}/values"] = np.arange(number)
            file[f"groups/{number}"].attrs["data"] = file["data"].ref


def repack_in_process(source: Path, output: Path, options: dict[str, Any], seconds: float) -> bool:
    """Repack, or go on, in a process that is killed after some time; return whether it ended."""
    child = os.fork()
    if not child:
        code = 1
        try:
            h5async.repack(source, output, resume=True, **options)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            if status:
                raise SystemExit(f"a repack failed: {options}")
            return True
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="at most")
    given = parser.parse_args()
    random.seed(given.seed)
    # Many small pieces and commits, as a large file has them.
    Repacking.piece_nbytes = 500_000  # type: ignore[assignment,method-assign]
    safefile._COMMIT_SECONDS = 0.02
    kills = files = 0
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        source, output = Path(folder, "source.h5"), Path(folder, "output.h5")
        write_source(source)
        expected, durations = [], []
        for number, options in enumerate(OPTIONS):
            before = time.monotonic()
            expected.append(Path(folder, f"expected{number}.h5"))
            repack_in_process(source, expected[-1], options, 600)
            durations.append(time.monotonic() - before)
        while kills < given.kills and time.monotonic() - began < given.seconds:
            which = files % len(OPTIONS)
            longest = durations[which]
            while not repack_in_process(source, output, OPTIONS[which], random.uniform(0, longest)):
                kills += 1
                longest *= 1.05  # the machine may have become busy
            assert_same_files(expected[which], output)
            output.unlink()
            files += 1
            print(f"{kills} kills, {files} files are equal", flush=True)


if __name__ == "__main__":
    main()
