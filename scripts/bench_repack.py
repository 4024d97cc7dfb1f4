"""Measures `repack`: stored chunks copied, and gzip chunks cut into others, by ways in turns.

- copy: `repack` without options, which copies stored chunks, and `cp`, of a file that has the
  chunks several times; in memory (`/dev/shm`).
- cut: chunks of 32 images cut into chunks of one: by `repack`; by decoding and encoding alone, in
  as many threads, without a file; by h5repack, where it is installed (--h5repack says where); and
  by a loop of h5py in one thread, which works as h5repack does, with the zlib of h5py's wheels.

Ratios are of each turn, and medians of these; so are those of CPU time, which other processes
hardly change.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import h5py
import imagecodecs
import matplotlib as mpl
import numpy as np
from bench_common import RESULTS, header, save

import h5async
from h5async.system.resources import usable_cores

mpl.use("agg")
import matplotlib.pyplot as plt

SHAPE, ROWS, LEVEL = (224, 224, 3), 32, 4


def write_source(path: Path, count: int) -> None:
    """Write images that gzip makes two fifths of."""
    rng = np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        chunks = (ROWS, *SHAPE)
        data = file.create_dataset("data", (count, *SHAPE), "u1", chunks=chunks, compression="gzip")
        for at in range(0, count, ROWS):
            rows = min(ROWS, count - at)
            smooth = np.add.outer(np.arange(224), np.arange(224))[..., None] // 3
            noise = rng.integers(0, 2, (rows, *SHAPE)) + rng.integers(0, 99, (rows, 1, 1, 3))
            data[at : at + ROWS] = (smooth + noise).astype(np.uint8)


def write_large(path: Path, source: Path, times: int) -> None:
    """Write the stored chunks of a file several times."""
    with h5py.File(source) as file, h5py.File(path, "w") as new:
        data, count = file["data"], len(file["data"])
        shape, chunks = (times * count, *SHAPE), data.chunks
        made = new.create_dataset("data", shape, "u1", chunks=chunks, compression="gzip")
        for at in range(0, times * count, ROWS):
            _, chunk = data.id.read_direct_chunk((at % count, 0, 0, 0))
            made.id.write_direct_chunk((at, 0, 0, 0), chunk)


def decode_and_encode(source: Path) -> None:
    """Do what cutting needs at least, in threads, and keep nothing."""
    with h5py.File(source) as file:
        data = file["data"].id
        count = file["data"].shape[0]
        stored = [data.read_direct_chunk((at, 0, 0, 0))[1] for at in range(0, count, ROWS)]

    def cut(chunk: bytes) -> int:
        images = np.frombuffer(imagecodecs.zlib_decode(chunk), np.uint8).reshape(ROWS, -1)
        return sum(len(imagecodecs.deflate_encode(image, LEVEL)) for image in images)

    with ThreadPoolExecutor(usable_cores()) as threads:
        list(threads.map(cut, stored))


def loop_of_h5py(source: Path, target: Path) -> None:
    """Cut chunks by HDF5 alone."""
    with h5py.File(source) as file, h5py.File(target, "w") as new:
        data = file["data"]
        made = new.create_dataset(
            "data", data.shape, data.dtype, chunks=(1, *SHAPE), compression="gzip"
        )
        for at in range(0, len(data), ROWS):
            made[at : at + ROWS] = data[at : at + ROWS]


def by_h5repack(command: str, source: Path, target: Path) -> None:
    """Cut chunks by h5repack."""
    chunks = "data:CHUNK=" + "x".join(map(str, (1, *SHAPE)))
    options = ["-l", chunks, "-f", f"data:GZIP={LEVEL}"]
    subprocess.run([command, *options, str(source), str(target)], check=True)


def timed(run: Callable[[], Any]) -> dict[str, float]:
    began, cpu = time.perf_counter(), cpu_seconds()
    run()
    return {"seconds": time.perf_counter() - began, "cpu": cpu_seconds() - cpu}


def cpu_seconds() -> float:
    """Return the CPU time of this process, and of those that it waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=2016)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--h5repack", default=shutil.which("h5repack"), metavar="PATH")
    parser.add_argument("--quick", action="store_true", help="shows that it runs")
    given = parser.parse_args()
    count, turns = (64, 1) if given.quick else (given.images, given.turns)
    shared = "/dev/shm" if os.path.isdir("/dev/shm") else None
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=shared) as folder:
        source, target, other, large = (Path(folder, f"{name}.h5") for name in "abcd")
        write_source(source, count // ROWS * ROWS)
        write_large(large, source, 1 if given.quick else 16)
        cut = {"chunk_samples": 1, "filter": f"gzip:{LEVEL}", "overwrite": True}
        ways: dict[str, Callable[[], Any]] = {
            "cp": lambda: shutil.copyfile(large, other),
            "copy": lambda: h5async.repack(large, target, overwrite=True),
            "decode and encode": lambda: decode_and_encode(source),
            "cut": lambda: h5async.repack(source, target, **cut),
            "h5py": lambda: loop_of_h5py(source, other),
        }
        if given.h5repack:
            ways["h5repack"] = lambda: by_h5repack(given.h5repack, source, other)
        for _ in range(turns + 1):
            found.append({name: timed(run) for name, run in ways.items()})
    found = found[1:] or found
    others = [name for name in ways if name not in ("cp", "copy", "cut")]
    pairs = {"copy": ["cp"], "cut": others}
    ratios = {
        f"{name} / {other} ({unit})": statistics.median(
            turn[other][unit] / turn[name][unit] for turn in found
        )
        for name, others in pairs.items()
        for other in others
        for unit in ("seconds", "cpu")
    }
    for name, ratio in ratios.items():
        print(f"{name:<40}{ratio:.2f}")
    if given.quick:
        return
    path = RESULTS / "bench_repack.json"
    save({**header(), "images": count, "ratios": ratios, "turns": found}, path)
    figure, axes = plt.subplots(figsize=(7, 3), layout="constrained")
    axes.barh(list(ratios), list(ratios.values()))
    axes.set_xlabel("speed of repack, of the other way's")
    figure.savefig(path.with_suffix(".png"), dpi=110)


if __name__ == "__main__":
    main()
