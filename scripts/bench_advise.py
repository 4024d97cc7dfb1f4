#!/usr/bin/env python
"""Measures how well `h5async advise` predicts: every layout, written in full, and read.

Writes datasets of several kinds, has each advised on, then writes all of its rows in every layout
that was tried, and reads these in the same orders, in turns. Of each turn it takes the samples per
second, and those per second of CPU time, which other processes hardly change. Writes JSON and a
plot.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from bench_common import RESULTS, header, save

from h5async import AsyncReader, ReaderConfig
from h5async.cli.advise import MEMORY_SHARE, ORDERS, trial_of
from h5async.cli.output import Picture, tidy
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


def waves(rng: np.random.Generator, nbytes: int) -> tuple[np.ndarray, dict[str, Any]]:
    """Waves of 16,000 int16, 32 to a chunk of gzip."""
    steps = rng.normal(0, 200, (nbytes // 32_000, 16_000))
    values = steps.cumsum(1).astype(np.int32) % 20_000 - 10_000
    return values.astype(np.int16), {"chunks": (32, 16_000), "compression": "gzip"}


def masks(rng: np.random.Generator, nbytes: int) -> tuple[np.ndarray, dict[str, Any]]:
    """Masks of 128 x 128, one value in each block, 256 to a chunk of gzip."""
    blocks = rng.integers(0, 4, (nbytes // 16_384, 8, 8), np.uint8)
    values = blocks.repeat(16, 1).repeat(16, 2)
    return values, {"chunks": (256, 128, 128), "compression": "gzip", "compression_opts": 9}


def tokens(rng: np.random.Generator, nbytes: int) -> tuple[np.ndarray, dict[str, Any]]:
    """Rows of 2,048 int32, frequent numbers and rare ones, one to a chunk of shuffle and gzip."""
    values = rng.zipf(1.3, (nbytes // 8192, 2048)) % 50_000
    return values.astype(np.int32), {"chunks": (1, 2048), "compression": "gzip", "shuffle": True}


def series(rng: np.random.Generator, nbytes: int) -> tuple[np.ndarray, dict[str, Any]]:
    """Rows of 24 x 40 float64 with three decimals, 100 to a chunk of lzf."""
    values = rng.normal(size=(nbytes // 7680, 24, 40)).round(3)
    return values, {"chunks": (100, 24, 40), "compression": "lzf"}


def stored_plainly(rng: np.random.Generator, nbytes: int) -> tuple[np.ndarray, dict[str, Any]]:
    """Images of 64 x 64 uint16 that hardly compress, without chunks."""
    return rng.integers(0, 40_000, (nbytes // 8192, 64, 64), np.uint16), {}


UNITS = ("seconds", "cpu")
_MAKES = images, features, small_rows, good, codes, waves, masks, tokens, series, stored_plainly
SETS: dict[str, Make] = {one.__name__: one for one in _MAKES}
UNSEEN = ["waves", "masks", "tokens", "series", "stored_plainly"]  # when the model was made


def speeds(config: ReaderConfig, changed: dict[str, Any], seconds: float) -> dict[str, float]:
    """Return the samples per second, and per second of CPU time, as `advise` counts them."""
    samples, spent = 0, dict.fromkeys(UNITS, 0.0)
    while spent["cpu"] <= seconds:
        with AsyncReader(config, **changed) as reader:
            is_window = changed.get("shuffle") == "window"
            skipped = 0 if is_window else reader.config.prefetch + 2
            before, since, read = dict(spent), clocks(), 0
            for batch in (batch for _ in range(1 if is_window else 1 << 30) for batch in reader):
                if skipped:
                    skipped, since = skipped - 1, clocks()
                    continue
                read += batch.size
                spent = {unit: before[unit] + clocks()[unit] - since[unit] for unit in UNITS}
                if spent["cpu"] > (8 if is_window else 1) * seconds:
                    break
            samples += read
    return {unit: samples / spent[unit] for unit in UNITS}


def clocks() -> dict[str, float]:
    """Return the time, and the CPU time of this process."""
    return {"seconds": time.perf_counter(), "cpu": time.process_time()}


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
        truth = {"stored_nbytes": stored_nbytes(whole), "predicted": {}, "measured": {}}
        pairs.append((trial, config.model_copy(update={"hdf5_path": whole}), truth))
    for _ in range(rounds):
        for trial, whole_config, truth in pairs:
            for order, shuffle in ORDERS.items():
                for key, read_by, changed in (
                    ("predicted", trial.config, trial.changes[order]),
                    ("measured", whole_config, {"shuffle": shuffle}),
                ):
                    found = speeds(read_by, dict(changed), seconds)
                    truth[key].setdefault(order, []).append(found)
    return {
        "set": name,
        "nbytes": values.nbytes,
        **{unit: best_by(unit, pairs, in_memory) for unit in UNITS},
        "layouts": [
            {
                "layout": f"{trial.finding.layout.rows} {trial.finding.layout.filter}",
                "size": trial.finding.stored_nbytes / truth["stored_nbytes"],
                **{
                    f"predicted / measured ({unit})": {
                        order: of_turns(truth["predicted"][order], unit)
                        / of_turns(truth["measured"][order], unit)
                        for order in ORDERS
                    }
                    for unit in UNITS
                },
                "predicted": truth["predicted"],
                "measured": truth["measured"],
            }
            for trial, _, truth in pairs
        ],
    }


def of_turns(several: list[dict[str, float]], unit: str) -> float:
    """Return the speed of several turns: the fastest, or the median by CPU time."""
    return (max if unit == "seconds" else statistics.median)(one[unit] for one in several)


def best_by(unit: str, pairs: list[Any], in_memory: float) -> dict[str, Any]:
    """Return which layout is called the best, and how fast it is of the fastest one."""
    called, really = [], []
    for trial, _, truth in pairs:
        for key, found in (("predicted", called), ("measured", really)):
            one = Finding(trial.finding.layout, float(truth["stored_nbytes"]))
            one.speeds = {order: [of_turns(truth[key][order], unit)] for order in ORDERS}
            one.cold = dict.fromkeys(("in order", "shuffled"), math.inf)
            found.append(one)
    best, fastest = best_of(called, "shuffled", in_memory), max(o.warm("shuffled") for o in really)
    of_best = next(one.warm("shuffled") for one in really if one.layout == best.layout)
    return {"best": f"{best.layout.rows} {best.layout.filter}", "of_fastest": of_best / fastest}


def within(results: list[dict[str, Any]], unit: str) -> str:
    """Say how many predictions are within 20 %."""
    ratios = [
        ratio
        for result in results
        for one in result["layouts"]
        for ratio in one[f"predicted / measured ({unit})"].values()
    ]
    return f"{sum(1 / 1.2 <= one <= 1.2 for one in ratios)} of {len(ratios)} within 20 % ({unit})"


def draw(path: Path, results: list[dict[str, Any]]) -> None:
    """Draw predicted over measured speeds, per second of CPU time."""
    picture = Picture(path)
    picture.figure.set_size_inches(4 * len(results), 4)
    panels = picture.figure.subplots(1, len(results), squeeze=False)[0]
    for panel, result in zip(panels, results, strict=True):
        for order in ORDERS:
            both = [
                [of_turns(one[key][order], "cpu") for one in result["layouts"]]
                for key in ("measured", "predicted")
            ]
            panel.loglog(*both, "o", label=order, alpha=0.7)
        ends = np.array(panel.get_xlim())
        panel.fill_between(ends, ends / 1.2, ends * 1.2, color="#8c959f", alpha=0.3)
        panel.set_xlabel("measured, samples per CPU second")
        panel.set_ylabel("predicted")
        panel.legend(fontsize=8)
        tidy(panel, result["set"])
    picture.write()


def main() -> None:
    """Measure the sets that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sets", nargs="*", default=UNSEEN, help=f"of {', '.join(SETS)}")
    parser.add_argument("--nbytes", type=int, default=400 << 20, help="of each dataset")
    parser.add_argument("--seconds", type=float, default=0.25, help="of each turn")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="shows that it runs")
    given = parser.parse_args()
    if given.quick:
        given.sets, given.nbytes, given.seconds, given.rounds = UNSEEN[:1], 8 << 20, 0.01, 1
    results = []
    for name in given.sets:
        with tempfile.TemporaryDirectory() as folder:
            found = measure(name, given.nbytes, Path(folder), given.seconds, given.rounds)
        results.append(found)
        told = {f"within 20 % ({unit})": within(results, unit) for unit in UNITS}
        print(name, *(found[unit] for unit in UNITS), *told.values(), flush=True)
        if not given.quick:
            path = RESULTS / "bench_advise.json"
            save({**header(), **told, "sets": results}, path)
            draw(path.with_suffix(".png"), results)


if __name__ == "__main__":
    main()
