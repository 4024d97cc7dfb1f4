"""Train on one part of a file and test on another; classes are drawn equally often.

The parts are made by a `Split`: nothing is stored, each machine makes the same ones, and each has
its share of every digit. The test loop keeps all batches (``copy=True``), and the hardest images
are read once more by their numbers.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from h5async import AsyncReader, Field, Split

FILE = Path(__file__).parents[2] / "sample_data" / "digits.h5"
FIELDS = {"data": Field("data", dtype="float32", scale=1 / 16), "labels": "labels"}
PARTS = {"train": 0.8, "test": 0.2}
OPTIONS = {"hdf5_path": FILE, "fields": FIELDS, "batch_size": 64, "device": "cpu"}


def part(name: str) -> Split:
    return Split(name, PARTS, seed=0, stratify="labels")


def odds(weights: np.ndarray, data: np.ndarray) -> np.ndarray:
    scores = data.reshape(len(data), -1) @ weights
    scores = np.exp(scores - scores.max(axis=1, keepdims=True))
    return scores / scores.sum(axis=1, keepdims=True)


def train(epochs: int) -> np.ndarray:
    """Return the weights of a linear classifier."""
    weights = np.zeros((64, 10), np.float32)
    with AsyncReader(OPTIONS, indices=part("train"), weights="balanced") as reader:
        for _ in range(epochs):
            for data, labels in reader:
                wrong = odds(weights, data) - np.eye(10, dtype=np.float32)[labels]
                weights -= 0.5 * data.reshape(len(data), -1).T @ wrong / len(data)
    return weights


def main(epochs: int = 20) -> float:
    weights = train(epochs)
    with AsyncReader(OPTIONS, indices=part("test"), copy=True) as reader:
        batches = list(reader)
        labels = np.concatenate([batch.labels for batch in batches])
        index = np.concatenate([batch.index for batch in batches])
        found = np.concatenate([odds(weights, batch.data) for batch in batches])
        accuracy = float((found.argmax(axis=1) == labels).mean())
        hardest = index[np.argsort(found[np.arange(labels.size), labels])[:5]]
        batch = reader.read(hardest)
    print(f"accuracy {accuracy:.2f} on {labels.size} images that were not trained on")
    print(f"hardest: images {batch.index.tolist()}, of the digits {batch.labels.tolist()}")
    return accuracy


if __name__ == "__main__":
    main()
