"""Choose samples while training: a sampler of one's own, batches of given samples, augmentation.

Digits come sorted by how hard they were before (a sampler), and after every fourth batch the
hardest images seen lately come once more (``fetch_data(index)``). Workers shift the images by
random steps, which are the same ones whenever the run is repeated.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from h5async import AsyncReader, Field

FILE = Path(__file__).parents[2] / "sample_data" / "digits.h5"
FIELDS = {"data": Field("data", dtype="float32", scale=1 / 16), "labels": "labels"}


class Curriculum:
    """Draws all samples, the easier half before the harder one; each in random order."""

    def __init__(self, num_samples: int) -> None:
        self.losses = np.zeros(num_samples)
        self.rng = np.random.default_rng(0)

    def __iter__(self) -> Iterator[int]:
        harder = self.losses > np.median(self.losses)
        return iter(np.lexsort((self.rng.random(harder.size), harder)).tolist())


def shifted(data: np.ndarray, labels: np.ndarray, *, rng: np.random.Generator) -> Any:
    """Move each image up or down by a pixel, or not; what leaves it comes in on the other side."""
    steps = rng.integers(-1, 2, len(data))
    rows = (np.arange(8) + steps[:, None]) % 8
    return data[np.arange(len(data))[:, None], rows], labels


def main(epochs: int = 20) -> float:
    weights, given, right = np.zeros((64, 10), np.float32), 0, 0
    sampler = Curriculum(1797)
    with AsyncReader(
        hdf5_path=FILE,
        fields=FIELDS,
        batch_size=64,
        sampler=sampler,
        postprocess=shifted,
        device="cpu",
    ) as reader:
        for _ in range(epochs):
            right = 0
            for batch in reader:
                data = batch.data.reshape(batch.size, -1)
                scores = np.exp(data @ weights)
                odds = scores / scores.sum(axis=1, keepdims=True)
                sampler.losses[batch.index] = -np.log(odds[np.arange(batch.size), batch.labels])
                wrong = odds - np.eye(10, dtype=np.float32)[batch.labels]
                weights -= 0.3 * data.T @ wrong / batch.size
                if batch.epoch == -1:  # it was asked for by its samples
                    given += 1
                    continue
                right += int((odds.argmax(axis=1) == batch.labels).sum())
                if batch.number % 4 == 3:
                    reader.fetch_data(np.argsort(sampler.losses)[-32:])
        accuracy = right / reader.num_samples
    print(f"accuracy {accuracy:.2f} in the last of {epochs} epochs; {given} batches of hard images")
    return accuracy


if __name__ == "__main__":
    main()
