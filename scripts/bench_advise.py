#!/usr/bin/env python
"""Measures how well `h5async advise` predicts: every layout, written in full, and read.

Writes datasets of several kinds, has each advised on, then writes all of its rows in every layout
that was tried, and reads these in the same orders. Prints JSON, and draws it (--plot FILE).
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from h5async import ReaderConfig
from h5async.cli.advise import ORDERS, advised, samples_per_second
from h5async.cli.picture import Picture, tidy
from h5async.pack.advising import DATASET, best_of, write_sample

Make = Callable[[np.random.Generator, int], tuple[np.ndarray, dict[str, Any]]]


def images(rng: np.random.Generator, nbytes: int) -> tuple[np.ndarray, dict[str, Any]]:
    """Images of 96 x 96, smooth with noise, 64 to a chunk of gzip."""
    count, side = nbytes // (96 * 96 * 3), np.arange(96)
    smooth = (np.add.outer(side, side)[..., None] + rng.integers(0, 80, (count, 1, 1, 3))) // 2
    noisy = smooth + rng.integers(0, 6, (count, 96, 96, 3))
    return noisy.astype(np.uint8), {"chunks": (64, 96, 96, 3), "compression": "gzip"}


def features(rng: np.random.Generator, nbytes: int) -> tuple[np.ndarray, dict[str, Any]]:
    """Rows of 1,024 float32, sparse as after a ReLU, 512 to a chunk of shuffle and gzip."""
    values = rng.normal(size=(nbytes // 4096, 1024)).astype(np.float32).clip(0)
    return values, {"chunks": (512, 1024), "compression": "gzip", "shuffle": True}


def small_rows(rng: np.random.Generator, nbytes: int) -> tuple[np.ndarray, dict[str, Any]]:
    """Rows of 28 float32 of a few values, 10,000 to a chunk of gzip."""
    values = rng.integers(0, 100, (nbytes // 112, 28)).astype(np.float32)
    return values, {"chunks": (10_000, 28), "compression": "gzip"}


def good(rng: np.random.Generator, nbytes: int) -> tuple[np.ndarray, dict[str, Any]]:
    """Images that do not compress, one to a chunk, without a filter."""
    values = rng.integers(0, 256, (nbytes // 27_648, 96, 96, 3), np.uint8)
    return values, {"chunks": (1, 96, 96, 3)}


def codes(rng: np.random.Generator, nbytes: int) -> tuple[np.ndarray, dict[str, Any]]:
    """Rows of 4,096 int64 below 50, 16 to a chunk of lzf."""
    values = rng.integers(0, 50, (nbytes // 32_768, 4096))
    return values, {"chunks": (16, 4096), "compression": "lzf"}


SETS: dict[str, Make] = {one.__name__: one for one in (images, features, small_rows, good, codes)}


def measure(name: str, nbytes: int, folder: Path, seconds: float, rounds: int) -> dict[str, Any]:
    """Compare what is predicted of a dataset with what all of it gives."""
    values, options = SETS[name](np.random.default_rng(1), nbytes)
    path = folder / f"{name}.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset(DATASET, data=values, **options)
    found = advised(ReaderConfig(hdf5_path=path, labels_field=None), rounds * seconds, rounds)
    configs = []
    for one in found.findings:
        whole = path if one.layout.is_current else write_sample(folder, values, one.layout)
        configs.append(ReaderConfig(hdf5_path=whole, fields={"x": DATASET}, device="cpu"))
    row_nbytes = found.layout.row_nbytes
    truth: list[dict[str, list[float]]] = [{order: [] for order in ORDERS} for _ in configs]
    for _ in range(rounds):
        for config, speeds in zip(configs, truth, strict=True):
            for order, shuffle in ORDERS.items():
                changed = {"shuffle": shuffle}
                found_now = samples_per_second(config, changed, seconds, row_nbytes, math.inf)
                speeds[order].append(found_now)
    layouts = []
    for one, config, speeds in zip(found.findings, configs, truth, strict=True):
        size = sum(path.stat().st_size for path in map(Path, config.files))
        layouts.append(
            {
                "layout": f"{one.layout.rows} {one.layout.filter}",
                "is_best": one is found.best,
                "size": one.stored_nbytes / size,
                "predicted": {order: one.warm(order) for order in ORDERS},
                "measured": {order: max(speeds[order]) for order in ORDERS},
            }
        )
    fastest = max(one["measured"][found.order] for one in layouts)
    best = next(one for one in layouts if one["is_best"])
    for one in found.findings:
        one.speeds = truth[found.findings.index(one)]
    really = best_of(found.findings, found.order, found.memory_nbytes)
    return {
        "set": name,
        "nbytes": values.nbytes,
        "best": best["layout"],
        "best_by_all": f"{really.layout.rows} {really.layout.filter}",
        "best_of_fastest": best["measured"][found.order] / fastest,
        "layouts": layouts,
    }


def draw(path: str, results: list[dict[str, Any]]) -> None:
    """Draw predicted over measured speeds."""
    picture = Picture(path)
    picture.figure.set_size_inches(4 * len(results), 4)
    panels = picture.figure.subplots(1, len(results), squeeze=False)[0]
    for panel, result in zip(panels, results, strict=True):
        for order in ORDERS:
            pairs = [(one["measured"][order], one["predicted"][order]) for one in result["layouts"]]
            panel.loglog(*zip(*pairs, strict=True), "o", label=order, alpha=0.7)
        ends = np.array(panel.get_xlim())
        panel.fill_between(ends, ends / 1.2, ends * 1.2, color="#8c959f", alpha=0.3)
        panel.set_xlabel("measured, samples a second")
        panel.set_ylabel("predicted")
        panel.legend(fontsize=8)
        tidy(panel, result["set"])
    picture.write()


def main() -> None:
    """Measure the sets that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sets", nargs="*", default=list(SETS), help=f"of {', '.join(SETS)}")
    parser.add_argument("--nbytes", type=int, default=400 << 20, help="of each dataset")
    parser.add_argument("--seconds", type=float, default=0.25, help="of each turn")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--plot", metavar="FILE")
    given = parser.parse_args()
    results = []
    for name in given.sets:
        with tempfile.TemporaryDirectory() as folder:
            results.append(measure(name, given.nbytes, Path(folder), given.seconds, given.rounds))
            print(json.dumps(results[-1]), flush=True)
    if given.plot:
        draw(given.plot, results)


if __name__ == "__main__":
    main()
