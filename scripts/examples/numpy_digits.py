"""Train a small convolutional network on handwritten digits, in a custom loop over an AsyncReader.

Plain NumPy on the CPU, the same code in CuPy on a GPU. Every fifth sample of the file is held out
and takes no part in training; the exit status tells whether at least 95 % of these are recognised.
(The same 13 people wrote the digits of both parts; this is no test of new handwriting.)
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
from pathlib import Path
from typing import Any

# Threads of the BLAS gain nothing on matrices this small, and lose much where cores are busy.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np

from h5async import AsyncReader

DIGITS = Path(__file__).parents[2] / "sample_data" / "digits.h5"
REQUIRED_ACCURACY = 0.95
LEARNING_RATE = 3e-3
FILTERS, WINDOW, IMAGE, CLASSES = 32, 3, 8, 10
SIDE = IMAGE - WINDOW + 1  # pixels of a feature map, along each side


def array_module(array: Any) -> Any:
    """Return the module that an array is of: numpy, or cupy, which is imported already then."""
    return importlib.import_module(type(array).__module__.partition(".")[0])


class Network:
    """3 x 3 convolution, ReLU, one dense layer to ten classes; trained with Adam.

    Parameters
    ----------
    xp
        The array module.
    seed
        Of the initial weights.
    """

    def __init__(self, xp: Any, seed: int) -> None:
        rng = np.random.default_rng(seed)
        inputs, features = WINDOW * WINDOW, SIDE * SIDE * FILTERS
        self.xp = xp
        self.parameters = [
            xp.asarray(values, dtype=np.float32)
            for values in (
                rng.normal(0, (2 / inputs) ** 0.5, (inputs, FILTERS)),
                np.zeros(FILTERS),
                rng.normal(0, (2 / features) ** 0.5, (features, CLASSES)),
                np.zeros(CLASSES),
            )
        ]
        self.moments = [(xp.zeros_like(p), xp.zeros_like(p)) for p in self.parameters]
        self.steps = 0

    def forward(self, images: Any) -> tuple[Any, Any, Any]:
        """Return windows (n * SIDE**2, 9), features (n, SIDE**2 * FILTERS) and scores (n, 10)."""
        kernel, kernel_bias, weights, bias = self.parameters
        pixels = images.astype(np.float32) / 16
        shifts = [(y, x) for y in range(WINDOW) for x in range(WINDOW)]
        windows = self.xp.stack([pixels[:, y : y + SIDE, x : x + SIDE] for y, x in shifts], axis=-1)
        windows = windows.reshape(-1, WINDOW * WINDOW)
        features = self.xp.maximum(windows @ kernel + kernel_bias, 0)
        features = features.reshape(len(images), SIDE * SIDE * FILTERS)
        return windows, features, features @ weights + bias

    def train_step(self, images: Any, labels: Any, learning_rate: float) -> None:
        """Take one step of Adam down the cross-entropy."""
        xp = self.xp
        windows, features, scores = self.forward(images)
        odds = xp.exp(scores - scores.max(axis=1, keepdims=True))
        target = xp.eye(CLASSES, dtype=np.float32)[labels]
        d_scores = (odds / odds.sum(axis=1, keepdims=True) - target) / len(images)
        d_features = (d_scores @ self.parameters[2].T) * (features > 0)
        d_maps = d_features.reshape(-1, FILTERS)
        gradients = (windows.T @ d_maps, d_maps.sum(0), features.T @ d_scores, d_scores.sum(0))
        self.steps += 1
        scale = learning_rate * (1 - 0.999**self.steps) ** 0.5 / (1 - 0.9**self.steps)
        for value, (mean, square), gradient in zip(
            self.parameters, self.moments, gradients, strict=True
        ):
            mean += 0.1 * (gradient - mean)
            square += 0.001 * (gradient * gradient - square)
            value -= scale * mean / (xp.sqrt(square) + 1e-8)

    def count_correct(self, images: Any, labels: Any) -> Any:
        """Return how many images are recognised, as a 0-d array: the loop need not wait."""
        return (self.forward(images)[2].argmax(axis=1) == labels).sum()


def run(reader: AsyncReader, epochs: int, seed: int) -> float:
    """Train for some epochs, then read one more to test; return the held-out accuracy."""
    steps, correct, tested, network = epochs * len(reader), 0, 0, None
    reader.fetch_data()
    for step in range(steps + len(reader)):
        batch = reader.get_next_batch()
        reader.fetch_data()  # the next batch is being filled while this one is used
        data, labels = batch
        xp = array_module(data)
        network = network or Network(xp, seed)
        held_out = batch.index % 5 == 0
        rows = xp.asarray(np.flatnonzero(held_out if step >= steps else ~held_out))
        if step < steps:
            network.train_step(data[rows], labels[rows], LEARNING_RATE * (1 - step / steps))
        else:
            correct = correct + network.count_correct(data[rows], labels[rows])
            tested += rows.size
    return int(correct) / tested


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="auto", help='"cpu", "cuda", "cuda:N" or "auto"')
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--num-threads", type=int, default=None, help="of the reader")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    start = time.perf_counter()
    with AsyncReader(
        hdf5_path=DIGITS,
        batch_size=64,
        shuffle="full",
        seed=options.seed,
        device=options.device,
        num_threads=options.num_threads,
    ) as reader:
        accuracy = run(reader, options.epochs, options.seed)
        seconds = time.perf_counter() - start
        print(
            f"held-out accuracy {accuracy:.2%} after {options.epochs} epochs on {reader.device},"
            f" {seconds:.1f} s"
        )
    if accuracy < REQUIRED_ACCURACY:
        print(f"this is less than {REQUIRED_ACCURACY:.0%}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
