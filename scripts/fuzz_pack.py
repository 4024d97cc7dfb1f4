"""Kill `h5async pack` at random moments, go on, and compare with an undisturbed pack.

Each case packs a folder of images, tars, arrays or samples of Python with random options, and is
killed up to five times before it may end; some append to a file. ``--kills 200`` takes minutes.
"""

from __future__ import annotations

import argparse
import gzip
import random
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

import hdf5plugin  # noqa: F401  (h5py compares by it)
import numpy as np
from PIL import Image

TESTS = Path(__file__).resolve().parents[1] / "tests" / "packing"
sys.path.insert(0, str(TESTS))
from comparing import contents  # noqa: E402

PROGRAM = """
import sys
sys.path.insert(0, {tests!r})
from comparing import samples
from h5async.packing.safefile import SafeFile
if {often}:
    SafeFile.is_due = property(lambda self: True)
import h5async
print("begun", flush=True)
h5async.pack({source!r} or samples(), {out!r}, **{options!r})
"""


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


def run(program: str, limit: float | None) -> tuple[int, float]:
    """Run a program, killed after a while; return how it ended, and how long it worked."""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        begin = time.perf_counter()
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
    return process.returncode, time.perf_counter() - begin


def try_case(rng: random.Random, sources: dict[str, Any], folder: Path) -> int:
    """Try one case; return how often it was killed."""
    name = rng.choice(sorted(sources))
    options, kills = draw_options(rng, name), 0
    whole, out = folder / "whole" / "out.h5", folder / "killed" / "out.h5"
    for path in (whole, out):
        shutil.rmtree(path.parent, ignore_errors=True)
        path.parent.mkdir()
    common = {"source": sources[name], "often": True, "tests": str(TESTS)}
    if options.get("append"):
        first = {key: value for key, value in options.items() if key != "append"}
        assert run(PROGRAM.format(out=str(whole), options=first, **common), None)[0] == 0
        shutil.copy(whole, out)
    code, seconds = run(PROGRAM.format(out=str(whole), options=options, **common), None)
    assert code == 0, (name, options)
    program = PROGRAM.format(out=str(out), options={**options, "resume": True}, **common)
    for _ in range(5):
        code, _ = run(program, rng.random() * seconds)
        if code == 0:
            break
        assert code == -signal.SIGKILL, (name, options, code)
        kills += 1
    assert run(program, None)[0] == 0, (name, options)
    assert contents(out) == contents(whole), (name, options)
    assert not [path for path in out.parent.iterdir() if path.suffix != ".h5"], (name, options)
    return kills


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    kills = cases = 0
    with tempfile.TemporaryDirectory() as folder:
        sources = make_sources(Path(folder))
        while kills < options.kills:
            kills += try_case(random.Random(f"{options.seed} {cases}"), sources, Path(folder))
            cases += 1
    print(f"{cases} packs, killed {kills} times, are equal to undisturbed ones")


if __name__ == "__main__":
    main()
