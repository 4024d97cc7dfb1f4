"""Measures fields of images against the bare decoder and OpenCV, called by as many threads.

The file has JPEG images as elements of variable length. Each case is measured in turns with its
peer, in the same run, with warm caches; what counts is the median of the ratios. The peers have all
bytes in memory, as Python objects, and write to arrays that they were given before.

- decode: images of one size, full shuffle; against `imagecodecs.jpeg8_decode(out=)`.
- linear, auto: random crop, resize to 224 x 224, and flip; against `cv2.imdecode`, `cv2.resize` of
  the same boxes (linear interpolation), and `cv2.flip`, in batches' order.
- scaled: the same, decoding only what the crop needs; against the same peer, which decodes all.
- torch: the same as auto with channels first and float32; against the same peer, which leaves that
  out.

For each case it also prints the speed of two threads relative to one.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import h5py
import imagecodecs
import numpy as np
from bench_common import RESULTS, header, save
from rich.console import Console

from h5async import AsyncReader, ImageField
from h5async.plan.crops import are_flipped, random_boxes, random_numbers

SIZE = 224
SHAPES = {"64 x 64": (64, 64), "256 x 256": (256, 256), "500 x 375": (375, 500)}
SCALE, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)


def jpegs(count: int, shape: tuple[int, int]) -> list[bytes]:
    """Return encoded images of smooth colours with some noise, as photographs have."""
    rng, found = np.random.default_rng(0), []
    for _ in range(count):
        small = rng.integers(0, 256, (12, 16, 3), np.uint8)
        image = cv2.resize(small, shape[::-1], interpolation=cv2.INTER_CUBIC).astype(np.int16)
        image += rng.normal(0, 8, image.shape).astype(np.int16)
        found.append(imagecodecs.jpeg8_encode(np.clip(image, 0, 255).astype(np.uint8), level=85))
    return found


def in_threads(count: int, images: int, work: Callable[[int], Any]) -> float:
    """Call `work` for each image in some threads; return the seconds."""
    numbers = itertools.count()

    def run() -> None:
        while (number := next(numbers)) < images:
            work(number)

    threads = [threading.Thread(target=run) for _ in range(count)]
    begin = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - begin


class Reading:
    """Epochs of a reader of images."""

    def __init__(self, path: Path, field: ImageField, batch_size: int, threads: int) -> None:
        self.reader = AsyncReader(
            hdf5_path=path,
            fields={"image": field},
            batch_size=batch_size,
            shuffle="full",
            num_threads=threads,
            device="cpu",
        )

    def epoch(self) -> float:
        """Read as many batches as an epoch has, and none ahead; return the seconds."""
        begin, count = time.perf_counter(), len(self.reader)
        self.reader.fetch_data()
        for number in range(count):
            if number + 1 < count:
                self.reader.fetch_data()
            self.reader.get_next_batch()
        return time.perf_counter() - begin


def bare(images: list[bytes], out: np.ndarray, threads: int) -> float:
    def decode(number: int) -> None:
        imagecodecs.jpeg8_decode(images[number], out=out[number % len(out)])

    return in_threads(threads, len(images), decode)


def with_cv2(images: list[bytes], out: np.ndarray, threads: int) -> float:
    pixels = cv2.imdecode(np.frombuffer(images[0], np.uint8), cv2.IMREAD_COLOR_RGB)
    numbers = random_numbers(0, 0, np.arange(len(images)))
    shapes = np.broadcast_to(pixels.shape[:2], (len(images), 2))
    boxes = random_boxes(*shapes.T, SCALE, RATIO, numbers).tolist()
    flips = are_flipped(numbers).tolist()

    def decode(number: int) -> None:
        encoded = np.frombuffer(images[number], np.uint8)
        pixels = cv2.imdecode(encoded, cv2.IMREAD_COLOR_RGB)
        top, left, height, width = boxes[number]
        place, part = out[number % len(out)], pixels[top : top + height, left : left + width]
        cv2.resize(part, (SIZE, SIZE), dst=place)
        if flips[number]:
            cv2.flip(place, 1, dst=place)

    return in_threads(threads, len(images), decode)


def cases(shape: tuple[int, int]) -> dict[str, tuple[ImageField, Any, tuple[int, int]]]:
    """Return by name: the field, its peer, and the size of its images."""
    random = {"size": SIZE, "crop": "random", "flip": True}
    first = {"axes": (0, 3, 1, 2), "scale": 1 / 255}
    crop = (SIZE, SIZE)
    return {
        "decode": (ImageField("jpeg"), bare, shape),
        "linear": (ImageField("jpeg", **random, interpolation="linear"), with_cv2, crop),
        "auto": (ImageField("jpeg", **random), with_cv2, crop),
        "scaled": (ImageField("jpeg", **random, decode="scaled"), with_cv2, crop),
        "torch": (ImageField("jpeg", **random, **first), with_cv2, crop),
    }


def measure(options: argparse.Namespace, folder: Path, console: Console) -> list[dict[str, Any]]:
    points = []
    for what in options.only or SHAPES:
        shape = SHAPES[what]
        images = jpegs(options.images, shape)
        path = folder / f"{what}.h5"
        with h5py.File(path, "w") as file:
            data = file.create_dataset("jpeg", (len(images),), h5py.vlen_dtype("u1"))
            for number, image in enumerate(images):
                data[number] = np.frombuffer(image, np.uint8)
        for case, (field, peer, size) in cases(shape).items():
            for threads in options.threads:
                out = np.empty((2 * options.batch_size, *size, 3), np.uint8)
                reading = Reading(path, field, options.batch_size, threads)
                ours, theirs = [], []
                reading.epoch(), peer(images, out, threads)
                for _ in range(options.repeats):
                    ours.append(reading.epoch())
                    theirs.append(peer(images, out, threads))
                reading.reader.close()
                mine, other = map(statistics.median, (ours, theirs))
                # Of each round: other work on the machine comes and goes.
                ratio = statistics.median(b / a for a, b in zip(ours, theirs, strict=True))
                point = {"images": what, "case": case, "threads": threads, "ratio": ratio}
                points.append(point | {"rate": len(images) / mine, "peer": len(images) / other})
                console.print(
                    f"{what} {case:7} {threads} threads: {len(images) / mine:7,.0f} images/s,"
                    f" peer {len(images) / other:7,.0f}, ratio {ratio:.2f}",
                    highlight=False,
                )
    return points


def plot(points: list[dict[str, Any]], path: Path) -> None:
    """Draw the speed of each case relative to its peer."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panel = plt.subplots(figsize=(9, 0.35 * len(points) + 1), layout="constrained")
    names = [f"{p['images']}, {p['case']}, {p['threads']} threads" for p in points]
    colors = ["tab:orange" if p["case"] == "torch" else "tab:blue" for p in points]
    ratios = [p["ratio"] for p in points]
    bars = panel.barh(names[::-1], ratios[::-1], color=colors[::-1])
    panel.bar_label(bars, fmt="%.2f", padding=3)
    panel.axvline(0.9, color="tab:red", lw=1)
    panel.axvline(1, color="black", lw=0.8)
    panel.set_xlabel("images a second, of the peer's (orange: which leaves the conversion out)")
    panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--images", type=int, default=512)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--threads", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=5, help="rounds")
    parser.add_argument("--only", nargs="*", choices=list(SHAPES), help="sizes; default: all")
    parser.add_argument("--quick", action="store_true", help="few and small: no figures to quote")
    parser.add_argument("--out", type=Path, help="folder for the results; default: scripts/results")
    options = parser.parse_args()
    if options.quick:
        options.images, options.repeats, options.batch_size = 32, 1, 8
    elif options.out is None and not options.only:
        options.out = RESULTS
    with tempfile.TemporaryDirectory() as folder:
        points = measure(options, Path(folder), Console())
    for fewest, most in itertools.pairwise(points):
        if fewest["case"] == most["case"]:
            gain = most["threads_gain"] = most["rate"] / fewest["rate"]
            threads = f"{most['threads']} threads by {fewest['threads']}"
            print(f"{most['images']} {most['case']:7} {threads}: {gain:.2f}")
    if options.out is not None:
        save({**header(), "points": points}, options.out / "bench_images.json")
        plot(points, options.out / "bench_images.png")


if __name__ == "__main__":
    main()
