"""Train a small network of Keras 3 (on PyTorch or JAX) on a reader's batches.

Keras looks some batches ahead of the one that it trains on, so it is given copies, which last (the
option `copy`); the reader's threads read and decode ahead all the same. A `keras.utils.PyDataset`
would ask for batches by number, in threads of its own: a generator leaves the order, and the
prefetching, to the reader.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "torch")

import keras

from h5async import AsyncReader, Field, Split

FILE = Path(__file__).parents[2] / "sample_data" / "digits.h5"
FIELDS = {"data": Field("data", dtype="float32", scale=1 / 16), "labels": "labels"}
PARTS = {"train": 0.8, "val": 0.2}


def endless(reader: AsyncReader) -> Iterator[tuple[Any, ...]]:
    """Give the batches of one epoch after the other; Keras is told how many make one."""
    while True:
        for batch in reader:
            yield tuple(batch)


def reader_of(part: str, **options: Any) -> AsyncReader:
    return AsyncReader(
        hdf5_path=FILE,
        fields=FIELDS,
        batch_size=64,
        indices=Split(part, PARTS, stratify="labels"),
        copy=True,
        device="cpu",
        **options,
    )


def main(epochs: int = 20) -> float:
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((8, 8)),
            keras.layers.Flatten(),
            keras.layers.Dense(32, activation="relu"),
            keras.layers.Dense(10),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=keras.optimizers.Adam(3e-3), loss=loss, metrics=["accuracy"])
    with reader_of("train", shuffle="full") as reader, reader_of("val") as val:
        history = model.fit(
            endless(reader),
            steps_per_epoch=len(reader),
            epochs=epochs,
            validation_data=endless(val),
            validation_steps=len(val),
            shuffle=False,
            verbose=0,
        )
        print(reader.stats())
    accuracy = float(history.history["val_accuracy"][-1])
    backend = keras.backend.backend()
    print(f"Keras on {backend}: accuracy {accuracy:.2f} on images that were held out")
    return accuracy


if __name__ == "__main__":
    main()
