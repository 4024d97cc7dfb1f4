"""Count what a reader asks of a file system as it opens, with and without a saved index.

    python scripts/bench_saved_index.py

For one file of 1,000,000 chunks, and for 5,000 files, a process opens a reader and takes a batch:
without an index, by the cache folder (which lies elsewhere), and by an index that is named. Its
system calls are those that `strace -f -y` shows for the folder of the files, where the named index
lies, too; bytes are what `read`, `pread` and their kin returned, and all of a mapped index. One
rank of a cluster does this much; 1,000 ranks, 1,000 times as much. Times are those of other runs,
without strace: the best of five.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from bench_common import RESULTS, header, save

MARK = "/h5async-reader-is-open"
CALLS = {
    "openat": "opens",
    "open": "opens",
    "newfstatat": "stats",
    "stat": "stats",
    "lstat": "stats",
    "fstat": "stats",
    "statx": "stats",
    "access": "stats",
    "readlink": "stats",
    "read": "reads",
    "pread64": "reads",
    "readv": "reads",
    "preadv": "reads",
    "preadv2": "reads",
    "mmap": "maps",
}
READER = f"""
import json, os, sys, time
from h5async import AsyncReader
options = json.load(sys.stdin)
begin = time.perf_counter()
reader = AsyncReader(labels_field=None, device="cpu", shuffle="full", num_threads=0, **options)
seconds = time.perf_counter() - begin
os.access("{MARK}", os.F_OK)
reader.get_next_batch()
reader.close()
print(seconds)
"""


def make_chunks(folder: Path, count: int) -> list[Path]:
    """Write one file of so many chunks."""
    path = folder / "chunks.h5"
    with h5py.File(path, "w", libver="latest") as file:
        dataset = file.create_dataset("data", (count, 4), "u1", chunks=(1, 4))
        dataset[...] = np.arange(4 * count).reshape(-1, 4) % 251
    return [path]


def make_files(folder: Path, count: int) -> list[Path]:
    """Write so many files of one dataset."""
    paths = [folder / f"part-{number:05}.h5" for number in range(count)]
    for number, path in enumerate(paths):
        with h5py.File(path, "w") as file:
            file["data"] = np.full((10, 16), number, "f4")
    return paths


def traced(options: dict[str, Any], folder: Path, environment: dict[str, str]) -> dict[str, Any]:
    """Return how many calls, and bytes, opening takes, and opening and one batch."""
    with tempfile.NamedTemporaryFile("r", suffix=".strace") as output:
        watched = "trace=" + ",".join(CALLS)
        command = ["strace", "-f", "-y", "-s", "0", "-e", watched, "-o", output.name]
        run(options, environment, command)
        lines = output.read().splitlines()
    found: dict[str, Counter[str]] = {}
    total: Counter[str] = Counter()
    for line in lines:
        if MARK in line:
            found["opening"] = Counter(total)
        call = re.match(r"\d+ +(\w+)\((.*)\) += (-?\w+)", line)
        if call is None or f"{folder}/" not in line:
            continue
        name, arguments, result = call.groups()
        total[CALLS[name]] += 1
        if CALLS[name] == "reads":
            total["bytes"] += max(0, int(result))
        if CALLS[name] == "maps" and ".h5idx" in arguments:
            total["bytes"] += int(arguments.split(", ")[1])
    found["opening and a batch"] = total
    return {name: dict(counts) for name, counts in found.items()}


def run(options: dict[str, Any], environment: dict[str, str], before: list[str]) -> float:
    """Open a reader in a process of its own; return how long that took."""
    process = subprocess.run(
        [*before, sys.executable, "-c", READER],
        input=json.dumps(options),
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return float(process.stdout)


def measure(paths: list[Path], folder: Path, home: Path) -> dict[str, Any]:
    """Return counts and times for all ways to open some files."""
    index = folder / "train.h5idx"
    several = [str(path) for path in paths]
    listed = several if len(several) == 1 else [str(folder / "part-*.h5")]
    command = [sys.executable, "-m", "h5async", "index", *listed, "-o", str(index)]
    subprocess.run(command, check=True)
    ways = {
        "no index": {"hdf5_path": several, "index_cache": False},
        "cache folder": {"hdf5_path": several},
        "named index": {"hdf5_path": str(index)},
    }
    environment = {"XDG_CACHE_HOME": str(home)}
    found: dict[str, Any] = {"index bytes": index.stat().st_size}
    for name, options in ways.items():
        seconds = [run(options, environment, []) for _ in range(5)]
        found[name] = {"seconds": min(seconds), **traced(options, folder, environment)}
    return found


def main() -> int:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chunks", type=int, default=1_000_000)
    parser.add_argument("--files", type=int, default=5_000)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    if shutil.which("strace") is None:
        parser.error("this needs strace")
    result: dict[str, Any] = {**header(), "cases": {}}
    cases = {
        f"1 file of {options.chunks:,} chunks": (make_chunks, options.chunks),
        "1,000 files": (make_files, 1000),
        f"{options.files:,} files": (make_files, options.files),
    }
    for name, (make, count) in cases.items():
        with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as home:
            place = Path(folder).resolve()
            result["cases"][name] = found = measure(make(place, count), place, Path(home))
        print(name, json.dumps(found, indent=2))
    save(result, options.out / "bench_saved_index.json")
    return 0


if __name__ == "__main__":
    sys.exit(main())
