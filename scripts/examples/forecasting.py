"""Forecast the next step of a simulation from the two steps before it.

The files are as The Well has them: (trajectory, time, x, y). ``num_dim=(0, 1)`` says so, one
field delivers the input steps and another one the target, and no window reaches over the end of a
trajectory. The speed of waves is a scalar of each trajectory, which ``per="sequence"`` delivers
with each window. Whole trajectories are held out: a split of single windows would test on steps
that were trained on. What is learnt is how waves spread: a stencil of 3 x 3 points for each input
step, and one that is multiplied by the speed.
"""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path

import h5py
import numpy as np

from h5async import AsyncReader, Batch, Field, Split

SIDE, LENGTH, INPUTS = 24, 30, 2
FIELDS = {
    "input": Field("t0_fields/height", num_dim=(0, 1), steps=range(INPUTS)),
    "target": Field("t0_fields/height", num_dim=(0, 1), steps=[INPUTS]),
    "speed": Field("scalars/speed", per="sequence", dtype="float32"),
}
PARTS = {"train": 0.75, "valid": 0.25}
SHIFTS = list(itertools.product((-1, 0, 1), repeat=2))
STENCILS = INPUTS + 1


def shifted(height: np.ndarray) -> np.ndarray:
    """Return each point's neighbours, and the point itself: (..., x, y, 9); the border goes on."""
    return np.stack([np.roll(height, shift, axis=(-2, -1)) for shift in SHIFTS], axis=-1)


def write_simulations(folder: Path) -> None:
    rng = np.random.default_rng(0)
    pixels = np.stack(np.indices((SIDE, SIDE)), axis=-1)
    for number in range(2):
        height = np.empty((10, LENGTH, SIDE, SIDE), np.float32)
        speed = rng.uniform(0.1, 0.3, len(height))
        for trajectory, own_speed in zip(height, speed, strict=True):
            waves = np.zeros((SIDE, SIDE))
            for _ in range(4):  # drops
                waves += np.exp(-((pixels - rng.uniform(6, 18, 2)) ** 2).sum(axis=-1) / 6)
            trajectory[:2] = waves
            for step in range(2, LENGTH):
                spread = shifted(trajectory[step - 1])[..., [1, 3, 5, 7]].sum(axis=-1)
                spread -= 4 * trajectory[step - 1]
                trajectory[step] = 2 * trajectory[step - 1] - trajectory[step - 2]
                trajectory[step] += own_speed * spread
        with h5py.File(folder / f"waves-{number}.hdf5", "w") as file:
            file.attrs["n_trajectories"] = len(height)
            file["t0_fields/height"], file["scalars/speed"] = height, speed


def reader_of(folder: Path, part: str, shuffle: str | bool = False) -> AsyncReader:
    return AsyncReader(
        hdf5_path=str(folder / "waves-*.hdf5"),
        fields=FIELDS,
        indices=Split(part, PARTS, by="sequence"),
        batch_size=16,
        shuffle=shuffle,
        device="cpu",
    )


def neighbours(batch: Batch) -> np.ndarray:
    """Return what a forecast is made from: (points, stencils * 9)."""
    steps = shifted(batch.input)
    last = steps[:, -1:] * batch.speed[:, None, None, None, None]
    found = np.concatenate((steps, last), axis=1)
    return np.moveaxis(found, 1, -2).reshape(-1, STENCILS * len(SHIFTS))


def train(reader: AsyncReader) -> np.ndarray:
    """Return the stencils that fit an epoch best; the sums of least squares take no more memory."""
    size = STENCILS * len(SHIFTS)
    squares, products = np.zeros((size, size)), np.zeros(size)
    for batch in reader:
        seen = neighbours(batch).astype(np.float64)
        squares += seen.T @ seen
        products += seen.T @ batch.target.reshape(-1)
    return np.linalg.solve(squares + 1e-6 * np.eye(size), products)


def main() -> float:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_simulations(folder)
        with reader_of(folder, "train", shuffle="full") as reader:
            stencils = train(reader)
        wrong = change = 0.0
        with reader_of(folder, "valid") as reader:
            for batch in reader:
                target = batch.target.reshape(-1)
                wrong += float(((neighbours(batch) @ stencils - target) ** 2).sum())
                change += float(((batch.input[:, -1].reshape(-1) - target) ** 2).sum())
    explained = 1 - wrong / change
    print(f"explains {explained:.4f} of what changes in trajectories that were held out")
    print(stencils.reshape(STENCILS, 3, 3).round(2))
    return explained


if __name__ == "__main__":
    main()
