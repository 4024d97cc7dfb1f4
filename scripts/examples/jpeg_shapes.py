"""Train a small classifier on JPEG images, cropped and flipped at random, as on ImageNet.

The file is made first: images of coloured discs, squares and stripes of differing sizes, encoded as
JPEG, one variable-length element each. The reader decodes them in its threads. The classifier is
logistic regression on random convolutional features, in NumPy; samples that `Split` holds out tell
how much it has learnt.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

# Threads of the BLAS gain nothing on matrices this small, and lose much where cores are busy.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import h5py
import imagecodecs
import numpy as np

from h5async import AsyncReader, ImageField, Split

CLASSES = ("disc", "square", "stripes")
SIDE, FILTERS, WINDOW, POOL = 32, 24, 5, 7
PARTS = {"train": 0.8, "test": 0.2}
TRAIN = {"crop": "random", "crop_scale": (0.6, 1.0), "flip": True}


def drawn(label: int, rng: np.random.Generator) -> np.ndarray:
    """Return an image of a shape, of random size, place and colours."""
    height, width = rng.integers(48, 97, 2)
    y, x = np.mgrid[:height, :width]
    radius = rng.uniform(0.2, 0.35) * min(height, width)
    dy, dx = (axis - size * rng.uniform(0.4, 0.6) for axis, size in ((y, height), (x, width)))
    is_in = (
        dy**2 + dx**2 < radius**2,
        np.maximum(abs(dy), abs(dx)) < radius,
        (y // (height // 8)) % 2 == 0,
    )[label]
    dark, bright = rng.integers(0, 90, 3), rng.integers(160, 256, 3)
    image = np.where(is_in[..., None], bright, dark) + rng.normal(0, 8, (height, width, 3))
    return np.clip(image, 0, 255).astype(np.uint8)


def write(path: Path, count: int) -> None:
    """Write labels, and images as JPEG."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, len(CLASSES), count)
    with h5py.File(path, "w") as file:
        file["label"] = labels
        jpegs = file.create_dataset("jpeg", (count,), h5py.vlen_dtype("u1"))
        for number, label in enumerate(labels):
            encoded = imagecodecs.jpeg8_encode(drawn(label, rng), level=90)
            jpegs[number] = np.frombuffer(encoded, np.uint8)


class Classifier:
    """Logistic regression on features of random filters; trained by gradient descent."""

    def __init__(self) -> None:
        rng = np.random.default_rng(1)
        self.filters = rng.normal(0, 1, (WINDOW * WINDOW, FILTERS)).astype("f4")
        self.filters -= self.filters.mean(0)
        cells = (SIDE - WINDOW + 1) // POOL
        self.weights = np.zeros((cells * cells * FILTERS + 1, len(CLASSES)), "f4")
        self.speed = np.zeros_like(self.weights)

    def features(self, images: np.ndarray) -> np.ndarray:
        """Return features (samples, features) of images (samples, 3, SIDE, SIDE)."""
        grey = images.mean(1)
        windows = np.lib.stride_tricks.sliding_window_view(grey, (WINDOW, WINDOW), (1, 2))
        maps = np.abs(windows.reshape(*windows.shape[:3], -1) @ self.filters)
        cells = maps.shape[1] // POOL
        pooled = maps.reshape(len(images), cells, POOL, cells, POOL, FILTERS).mean((2, 4))
        return np.column_stack([pooled.reshape(len(images), -1), np.ones(len(images), "f4")])

    def learn(self, images: np.ndarray, labels: np.ndarray) -> None:
        """Take one step down the cross-entropy."""
        features = self.features(images)
        scores = features @ self.weights
        odds = np.exp(scores - scores.max(1, keepdims=True))
        error = odds / odds.sum(1, keepdims=True) - np.eye(len(CLASSES))[labels]
        self.speed = 0.9 * self.speed - 0.05 * (features.T @ error) / len(labels)
        self.weights += self.speed

    def correct(self, images: np.ndarray, labels: np.ndarray) -> int:
        """Return how many images are recognised."""
        return int(((self.features(images) @ self.weights).argmax(1) == labels).sum())


def reading(path: Path, part: str, **options: Any) -> AsyncReader:
    """Return a reader of one part of the samples."""
    image = ImageField("jpeg", size=SIDE, axes=(0, 3, 1, 2), scale=1 / 128, offset=-1.0, **options)
    return AsyncReader(
        hdf5_path=path,
        fields={"image": image, "label": "label"},
        indices=Split(part, PARTS),
        batch_size=32,
        shuffle="full",
    )


def main(epochs: int = 12, count: int = 600) -> float:
    """Return the accuracy on samples that are held out."""
    model = Classifier()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "shapes.h5"
        write(path, count)
        with reading(path, "train", **TRAIN) as reader:
            for _ in range(epochs):
                for batch in reader:
                    model.learn(batch.image, batch.label)
        with reading(path, "test") as reader:
            correct = sum(model.correct(batch.image, batch.label) for batch in reader)
            accuracy = correct / reader.num_samples
    print(f"accuracy on held-out images: {accuracy:.1%}")
    return accuracy


if __name__ == "__main__":
    sys.exit(main() < 0.8)
