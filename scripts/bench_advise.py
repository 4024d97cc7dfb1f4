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
from h5async.cli.advise import MEMORY_SHARE, ORDERS, samples_per_second, trial_of
from h5async.cli.picture import Picture, tidy
from h5async.index.layout import DatasetLayout
from h5async.index.metadata import list_layouts
from h5async.packing.advising import (
    DATASET,
    Finding,
    best_of,
    layouts_to_try,
    rows_of_sample,
    stored_nbytes,
    write_sample,
)
from h5async.system.resources import free_memory

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


KEYS = ("measured", "predicted")
SETS: dict[str, Make] = {one.__name__: one for one in (images, features, small_rows, good, codes)}


def measure(name: str, nbytes: int, folder: Path, seconds: float, rounds: int) -> dict[str, Any]:
    """Compare what samples of a dataset predict with what all of it gives, in turns."""
    values, options = SETS[name](np.random.default_rng(1), nbytes)
    path = folder / f"{name}.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset(DATASET, data=values, **options)
    config = ReaderConfig(hdf5_path=path, fields={DATASET: DATASET}, device="cpu")
    layout = next(one for _, one in list_layouts(path) if isinstance(one, DatasetLayout))
    rows, in_memory = (
        rows_of_sample(layout, in_chunks=False),
        MEMORY_SHARE * free_memory()[0].nbytes,
    )
    pairs, whole_folder = [], folder / "whole"
    whole_folder.mkdir()
    for one in layouts_to_try(layout):
        trial = trial_of(config, layout, values[rows], folder, one)
        whole = path if one.is_current else write_sample(whole_folder, values, one)
        truth = Finding(one, float(stored_nbytes(whole)))
        truth.cold = dict.fromkeys(("in order", "shuffled"), math.inf)
        pairs.append((trial, config.model_copy(update={"hdf5_path": whole}), truth))
    for _ in range(rounds):
        for trial, whole_config, truth in pairs:
            for order, shuffle in ORDERS.items():
                for one, read_by, changed in (
                    (trial.finding, trial.config, trial.changes[order]),
                    (truth, whole_config, {"shuffle": shuffle}),
                ):
                    speed = samples_per_second(read_by, changed, seconds, layout.row_nbytes, 20.0)
                    one.speeds.setdefault(order, []).append(speed)
    found = best_of([trial.finding for trial, _, _ in pairs], "shuffled", in_memory)
    truths = [truth for _, _, truth in pairs]
    truth_of_best = next(one for one in truths if one.layout == found.layout)
    really = best_of(truths, "shuffled", in_memory)
    return {
        "set": name,
        "nbytes": values.nbytes,
        "best": f"{found.layout.rows} {found.layout.filter}",
        "best_by_all": f"{really.layout.rows} {really.layout.filter}",
        "of_fastest": truth_of_best.warm("shuffled") / max(o.warm("shuffled") for o in truths),
        "layouts": [
            {
                "layout": f"{truth.layout.rows} {truth.layout.filter}",
                "size": trial.finding.stored_nbytes / truth.stored_nbytes,
                "predicted": trial.finding.speeds,
                "measured": truth.speeds,
            }
            for trial, _, truth in pairs
        ],
    }


def draw(path: str, results: list[dict[str, Any]]) -> None:
    """Draw predicted over measured speeds."""
    picture = Picture(path)
    picture.figure.set_size_inches(4 * len(results), 4)
    panels = picture.figure.subplots(1, len(results), squeeze=False)[0]
    for panel, result in zip(panels, results, strict=True):
        for order in ORDERS:
            both = [[max(one[key][order]) for one in result["layouts"]] for key in KEYS]
            panel.loglog(*both, "o", label=order, alpha=0.7)
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
