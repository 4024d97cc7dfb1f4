"""Train on packed files, as climate data are: dimensions by name, values by their attributes.

Each of two files has a year of temperatures on a grid, as 16-bit integers with a scale and an
offset of its own, and with missing values, as netCDF-4 has them (h5py alone makes them here). They
lie in the file as (lat, lon, time), and `axes` says by names what is delivered, normalized by the
mean and the spread of the days that are trained on. A linear model finds out how much power the
heatings of a country take on a day.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import h5py
import numpy as np

import h5async
from h5async import AsyncReader, Field, Split

DAYS, LAT, LON = 365, 6, 8
MISSING = -32768
FIELDS = {
    "grid": Field("t2m", axes=("time", "lat", "lon"), dtype="float32", decode_cf=True),
    "power": Field("power", decode_cf=True),
}
PARTS = {"train": 0.8, "test": 0.2}


def write_year(path: Path, seed: int) -> None:
    """Write a file; as it is packed, 16 bits hold what its own year needs."""
    rng = np.random.default_rng(seed)
    season = -10 * np.cos(2 * np.pi * np.arange(DAYS) / DAYS)
    kelvin = 280 + seed + season + rng.normal(0, 3, (LAT, LON, DAYS))
    power = 40 - 1.5 * (kelvin.mean(axis=(0, 1)) - 280) + rng.normal(0, 0.2, DAYS)
    offset, scale = kelvin.mean(), np.ptp(kelvin) / 60_000
    packed = np.round((kelvin - offset) / scale).astype(np.int16)
    packed[rng.random(packed.shape) < 0.02] = MISSING
    with h5py.File(path, "w") as file:
        for name, extent in (("lat", LAT), ("lon", LON), ("time", DAYS)):
            file[name] = np.arange(extent, dtype=np.float64)
            file[name].make_scale(name)
        grid = file.create_dataset("t2m", data=packed, chunks=(LAT, LON, 30), compression="gzip")
        for number, name in enumerate(("lat", "lon", "time")):
            grid.dims[number].attach_scale(file[name])
        grid.attrs.update(scale_factor=scale, add_offset=offset, _FillValue=np.int16(MISSING))
        file["power"] = power.astype(np.float32)
        file["power"].dims[0].attach_scale(file["time"])


def inputs(grid: np.ndarray) -> np.ndarray:
    """Return one row of inputs a day; what is missing counts as the mean of its day."""
    means = np.nanmean(grid, axis=(1, 2), keepdims=True)
    filled = np.where(np.isnan(grid), means, grid).reshape(len(grid), -1)
    return np.concatenate([filled, np.ones((len(grid), 1), np.float32)], axis=1)


def main(epochs: int = 60) -> float:
    """Return how much of the variance of days that were not trained on is explained."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, f"{year}.nc") for year in (2023, 2024)]
        for seed, path in enumerate(paths):
            write_year(path, seed)
        options = {"hdf5_path": paths, "fields": FIELDS, "batch_size": 32, "device": "cpu"}
        stats = h5async.statistics(options | {"indices": Split("train", PARTS)}, per=None)
        grid = FIELDS["grid"].model_copy(update={"normalize": stats})
        options["fields"] = FIELDS | {"grid": grid}
        weights = np.zeros(LAT * LON + 1, np.float32)
        with AsyncReader(options, indices=Split("train", PARTS), shuffle="full") as reader:
            for _ in range(epochs):
                for grid, power in reader:
                    rows = inputs(grid)
                    weights -= 0.01 * rows.T @ (rows @ weights - power) / len(rows)
        with AsyncReader(options, indices=Split("test", PARTS), copy=True) as reader:
            batches = list(reader)
        power = np.concatenate([batch.power for batch in batches])
        found = np.concatenate([inputs(batch.grid) @ weights for batch in batches])
    explained = 1 - float(((power - found) ** 2).mean() / power.var())
    print(f"{explained:.3f} of the variance of {power.size} days is explained")
    return explained


if __name__ == "__main__":
    main()
