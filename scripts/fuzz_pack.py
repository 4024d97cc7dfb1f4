"""Kill `h5async pack` at random moments, go on, and compare with an undisturbed pack.

Each case packs a folder of images, tars, arrays or samples of Python with random options, and is
killed up to five times before it may end; some append to a file. ``--kills 200`` takes minutes.
"""

from __future__ import annotations

import argparse
import gzip
import os
import random
import select
import shutil
import signal
import sys
import tarfile
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import hdf5plugin  # noqa: F401  (h5py compares by it)
import numpy as np
from PIL import Image

TESTS = Path(__file__).resolve().parents[1] / "tests" / "packing"
sys.path.insert(0, str(TESTS))
from comparing import contents, samples  # noqa: E402

import h5async  # noqa: E402
from h5async.packing.safefile import SafeFile  # noqa: E402


def make_sources(folder: Path) -> dict[str, Any]:
    """Return sources of some hundred samples."""
    rng = np.random.default_rng(0)
    images = folder / "images"
    for number in range(400):
        height, width = rng.integers(30, 90, 2)
        path = images / f"class{number % 5}" / f"{number:04}.{('jpg', 'png', 'bmp')[number % 3]}"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 255, (height, width, 3), np.uint8)).save(path)
    with tarfile.open(folder / "samples.tar", "w") as tar:
        for path in sorted(images.rglob("*.jpg")):
            tar.add(path, path.name)
    arrays = [folder / "data.npy", folder / "labels.npy"]
    np.save(arrays[0], rng.normal(size=(3000, 40, 20)).astype(np.float32))
    np.save(arrays[1], np.arange(3000))
    with gzip.open(folder / "samples.tar.gz", "wb", 1) as packed:
        packed.write((folder / "samples.tar").read_bytes())
    np.savez_compressed(folder / "data.npz", **{one.stem: np.load(one) for one in arrays})
    return {
        "images": str(images),
        "tar": str(folder / "samples.tar"),
        "compressed tar": str(folder / "samples.tar.gz"),
        "arrays": list(map(str, arrays)),
        "compressed arrays": str(folder / "data.npz"),
        "samples": "",
    }


IN_ORDER = ("compressed tar", "compressed arrays", "samples")


def draw_options(rng: random.Random, source: str) -> dict[str, Any]:
    options: dict[str, Any] = {
        "filter": rng.choice(["auto", "none", "gzip:1", "shuffle+zstd:1"]),
        "num_threads": rng.choice([1, 2, 4]),
        "shuffle": rng.random() < 0.5 and source not in IN_ORDER,
        "seed": rng.randrange(9),
    }
    if source == "compressed arrays":
        options["memory"] = "4MB"
    if rng.random() < 0.4:
        options["shards"] = rng.choice(["500kB", "3MB"])
    if rng.random() < 0.5 and source != "tar":
        options["chunk_samples"] = rng.choice([1, 7, 64])
    if rng.random() < 0.5 and "arrays" not in source:
        options["size"] = rng.choice([16, 40])
    if rng.random() < 0.3 and "shards" not in options:
        options["append"] = True
    return options


def run(source: Any, out: Path, options: dict[str, Any], limit: float | None) -> tuple[int, float]:
    """Pack in a child, killed after a while; return how it ended, and how long it worked."""
    begin, child = time.perf_counter(), os.fork()
    if not child:
        try:
            h5async.pack(source or samples(), out, **options)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    ended = os.pidfd_open(child)
    if not select.select([ended], [], [], limit)[0]:
        os.kill(child, signal.SIGKILL)
    os.close(ended)
    status = os.waitpid(child, 0)[1]
    return os.waitstatus_to_exitcode(status), time.perf_counter() - begin


def try_case(rng: random.Random, sources: dict[str, Any], folder: Path) -> int:
    """Try one case; return how often it was killed."""
    name = rng.choice(sorted(sources))
    options, kills = draw_options(rng, name), 0
    whole, out = folder / "whole" / "out.h5", folder / "killed" / "out.h5"
    for path in (whole, out):
        shutil.rmtree(path.parent, ignore_errors=True)
        path.parent.mkdir()
    source = sources[name]
    if options.get("append"):
        first = {key: value for key, value in options.items() if key != "append"}
        assert run(source, whole, first, None)[0] == 0
        shutil.copy(whole, out)
    code, seconds = run(source, whole, options, None)
    assert code == 0, (name, options)
    options["resume"] = True
    for _ in range(5):
        code, _ = run(source, out, options, rng.random() * seconds)
        if code == 0:
            break
        assert code == -signal.SIGKILL, (name, options, code)
        kills += 1
    assert run(source, out, options, None)[0] == 0, (name, options)
    assert contents(out) == contents(whole), (name, options)
    assert not [path for path in out.parent.iterdir() if path.suffix != ".h5"], (name, options)
    return kills


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    kills = cases = 0
    SafeFile.is_due = property(lambda self: True)  # type: ignore[method-assign,assignment]
    with tempfile.TemporaryDirectory() as folder:
        sources = make_sources(Path(folder))
        while kills < options.kills:
            kills += try_case(random.Random(f"{options.seed} {cases}"), sources, Path(folder))
            cases += 1
    print(f"{cases} packs, killed {kills} times, are equal to undisturbed ones")


if __name__ == "__main__":
    main()
