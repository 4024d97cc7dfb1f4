"""Pack a folder of JPEGs, beside `tar`, a decoder and resizer alone, and other packers, in turns.

``kept``: bytes as they are; `tar` writes the same files, without and with a wait for the disk,
which `pack` always does. ``resized``: to 224 pixels; "alone" is what threads on all cores decode
and resize by the same functions, and throw away. Other packers are there where they are installed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import imagecodecs
import numpy as np
from bench_common import CORES, RESULTS
from bench_turns import Bench, Target, Way, run_cases

import h5async
from h5async.packing.encodedsamples import ResizedImages

SIZE, CLASSES = 224, 10


def write_images(folder: Path, count: int) -> list[Path]:
    """Write JPEGs of 500 x 375, smooth with some noise: of 55 kB."""
    rng = np.random.default_rng(0)
    ramps = np.linspace(0, 3, 620)[:, None] * np.linspace(1, 2, 620)
    bases = []
    for number in range(20):
        waves = [np.sin(ramps * (one + number % 5 + 1)) for one in (1.0, 1.7, 2.3)]
        smooth = 110 + 80 * np.stack(waves, axis=-1)
        noisy = smooth + rng.normal(0, 9, smooth.shape)
        bases.append(np.clip(noisy, 0, 255).astype(np.uint8))
    paths = [folder / f"class{n % CLASSES}" / f"{n:06}.jpg" for n in range(count)]
    for number in range(CLASSES):
        (folder / f"class{number}").mkdir(parents=True)

    def write(number: int) -> None:
        y, x = number * 7 % 245, number * 13 % 120
        part = np.ascontiguousarray(bases[number % 20][y : y + 375, x : x + 500])
        paths[number].write_bytes(imagecodecs.jpeg8_encode(part, level=88))

    with ThreadPoolExecutor(CORES) as pool:
        list(pool.map(write, range(count)))
    return sorted(paths)


def whole(count: int, work: Callable[[], object]) -> Way:
    """Return a way that does all of the work once, however long that takes."""

    def way(_: float) -> float:
        begin = time.perf_counter()
        work()
        return count / (time.perf_counter() - begin)

    return way


def tar(folder: Path, out: Path, *, waits: bool) -> None:
    out.unlink(missing_ok=True)
    subprocess.run(["tar", "cf", out, "-C", folder.parent, folder.name], check=True)
    if waits:
        with out.open("rb") as file:
            os.fsync(file.fileno())


def pack(folder: Path, out: Path, size: int | None) -> None:
    h5async.pack(folder, out, overwrite=True, size=size)


def decode_alone(paths: list[Path]) -> None:
    """Read, decode and resize on all cores; throw the pixels away."""
    samples = ResizedImages((SIZE, SIZE))
    runs = [paths[at : at + 16] for at in range(0, len(paths), 16)]
    with ThreadPoolExecutor(CORES) as pool:
        list(pool.map(lambda run: sum(samples.stored(p.read_bytes())[0].size for p in run), runs))


def hugging_face(paths: list[Path], out: Path) -> None:
    import datasets

    shutil.rmtree(out, ignore_errors=True)
    features = datasets.Features({"data": datasets.Image(), "labels": datasets.Value("int64")})

    def samples():
        for path in paths:
            content = {"bytes": path.read_bytes(), "path": None}
            yield {"data": content, "labels": int(path.parent.name[5:])}

    made = datasets.Dataset.from_generator(
        samples, features=features, cache_dir=str(out / "cache"), keep_in_memory=False
    )
    made.save_to_disk(out / "saved")


def mosaic(paths: list[Path], out: Path) -> None:
    from streaming.base.format.mds.writer import MDSWriter

    shutil.rmtree(out, ignore_errors=True)
    with MDSWriter(out=str(out), columns={"data": "bytes", "labels": "int"}) as writer:
        for path in paths:
            writer.write({"data": path.read_bytes(), "labels": int(path.parent.name[5:])})


def litdata_sample(path: str) -> dict[str, object]:
    return {"data": Path(path).read_bytes(), "labels": int(Path(path).parent.name[5:])}


def lit(paths: list[Path], out: Path) -> None:
    import litdata

    shutil.rmtree(out, ignore_errors=True)
    litdata.optimize(
        litdata_sample, list(map(str, paths)), str(out), chunk_bytes="64MB", num_workers=CORES
    )


PEERS = {
    "datasets": (hugging_face, "datasets"),
    "MDSWriter": (mosaic, "streaming.base.format.mds.writer"),
    "litdata": (lit, "litdata"),
}


def kept(bench: Bench) -> None:
    """Measure what keeps bytes as they are."""
    images, out = bench.folder / "images", bench.folder / "out.h5"
    paths = write_images(images, bench.options.count)
    ways = {
        "tar": partial(tar, images, bench.folder / "out.tar", waits=False),
        "tar, and fsync": partial(tar, images, bench.folder / "out.tar", waits=True),
        "pack": partial(pack, images, out, None),
    }
    targets = [Target("pack", "tar", 0.5), Target("pack", "tar, and fsync", 0.5)]
    for name in bench.options.peers:
        work, module = PEERS[name]
        try:
            __import__(module)
        except ImportError as error:
            bench.print(f"without {name}: {error}")
            continue
        ways[name] = partial(work, paths, bench.folder / name)
        targets.append(Target("pack", name, 3))
    measured = {name: whole(len(paths), work) for name, work in ways.items()}
    bench.measure("kept", measured, targets)
    shutil.rmtree(images)


def resized(bench: Bench) -> None:
    """Measure what decodes and resizes."""
    images, out = bench.folder / "images", bench.folder / "out.h5"
    paths = write_images(images, bench.options.count)
    ways = {
        "decoder and resizer alone": whole(len(paths), partial(decode_alone, paths)),
        "pack": whole(len(paths), partial(pack, images, out, SIZE)),
    }
    bench.measure("resized", ways, [Target("pack", "decoder and resizer alone", 0.9)])
    shutil.rmtree(images)


CASES = {"kept": kept, "resized": resized}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="*", choices=CASES)
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS))
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--quick", action="store_true", help="a few images, once; saves nothing")
    options = parser.parse_args()
    options.seconds = 0.0
    if options.quick:
        options.count, options.repeats, options.out = 500, 1, None
    run_cases("bench_pack", CASES, options)
