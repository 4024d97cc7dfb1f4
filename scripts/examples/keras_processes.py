"""Train a small network of Keras 3 on several processes of JAX; each reads its share of an epoch.

    for i in 0 1; do python scripts/examples/keras_processes.py FOLDER $i 2 & done; wait

`keras.distribution` makes one training of the `fit` of all processes, and the reader finds in JAX
which share is its own. The weights that Keras saves have the reader's position with them: started
again, training goes on in the middle of an epoch, with the samples that are left.
"""

from __future__ import annotations

import json
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ["KERAS_BACKEND"] = "jax"

import jax
import keras
import numpy as np

from h5async import AsyncReader, Field

FILE = Path(__file__).parents[2] / "sample_data" / "digits.h5"
FIELDS = {"data": Field("data", dtype="float32", scale=1 / 16), "labels": "labels"}
TRAIN, HELD_OUT = np.arange(1536), np.arange(1536, 1792)
BATCH, EVERY = 64, 10  # samples of all processes in a step; steps between checkpoints


class Digits(keras.Sequential):
    """A network that is saved together with the position of the reader that it learns from."""

    position: dict[str, Any] | None = None

    def save_own_variables(self, store: Any) -> None:
        """Save the position, as the bytes of a text; the layers save themselves."""
        store["position"] = np.frombuffer(json.dumps(self.position).encode(), np.uint8)

    def load_own_variables(self, store: Any) -> None:
        """Load what was saved."""
        self.position = json.loads(np.asarray(store["position"]).tobytes())


class Following(keras.callbacks.Callback):
    """Tells the model where the reader was after the batch that was trained on last.

    Keras asks for some batches before it trains on them, so the reader itself is ahead.
    """

    def __init__(self, reader: AsyncReader, seen: Callable[[int, np.ndarray], object]) -> None:
        super().__init__()
        self.reader, self.seen = reader, seen
        self.given: deque[tuple[int, np.ndarray, dict[str, Any]]] = deque()

    def batches(self) -> Iterator[tuple[Any, ...]]:
        """Yield the batches of an epoch, or what is left of one."""
        for batch in self.reader:
            self.given.append((batch.epoch, batch.index.copy(), self.reader.state_dict()))
            yield tuple(batch)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Note what was trained on."""
        epoch, index, self.model.position = self.given.popleft()
        self.seen(epoch, index)


def reader_of(samples: np.ndarray, **options: Any) -> AsyncReader:
    """Return a reader of some samples; all its batches have one shape, as JAX wants them."""
    size = BATCH // jax.process_count()
    shared = {"hdf5_path": FILE, "fields": FIELDS, "device": "cpu", "copy": True}
    return AsyncReader(shared, indices=samples, batch_size=size, drop_last=True, **options)


def batches_of(reader: AsyncReader) -> Iterator[tuple[Any, ...]]:
    yield from map(tuple, reader)


def main(
    folder: str | Path,
    *,
    epochs: int = 20,
    seen: Callable[[int, np.ndarray], object] = lambda epoch, index: None,
) -> float:
    """Train, and return the accuracy; `seen` is told the samples of each batch."""
    # Each process is given its part of a batch already.
    keras.distribution.set_distribution(keras.distribution.DataParallel(auto_shard_dataset=False))
    keras.utils.set_random_seed(0)
    model = Digits(
        [
            keras.Input((8, 8)),
            keras.layers.Flatten(),
            keras.layers.Dense(32, activation="relu"),
            keras.layers.Dense(10),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=keras.optimizers.Adam(3e-3), loss=loss, metrics=["accuracy"])
    saved = Path(folder) / f"{jax.process_index()}.weights.h5"  # which are the same everywhere
    saved.parent.mkdir(parents=True, exist_ok=True)
    with reader_of(TRAIN, shuffle="full") as reader, reader_of(HELD_OUT) as held_out:
        if saved.exists():
            model.optimizer.build(model.trainable_variables)  # or its state is not loaded
            model.load_weights(saved)
            reader.load_state_dict(model.position)
        following = Following(reader, seen)
        checkpoints = keras.callbacks.ModelCheckpoint(
            str(saved), save_weights_only=True, save_freq=EVERY
        )
        begun = reader.state_dict()
        for epoch in range(begun["epoch"], epochs):
            done = begun["position"] if epoch == begun["epoch"] else 0
            model.fit(
                following.batches(),
                steps_per_epoch=len(reader) - done // BATCH,
                initial_epoch=epoch,
                epochs=epoch + 1,
                callbacks=[following, checkpoints],
                shuffle=False,
                verbose=0,
            )
        steps = len(held_out)
        results = model.evaluate(batches_of(held_out), steps=steps, verbose=0, return_dict=True)
    accuracy = float(results["accuracy"])
    if jax.process_index() == 0:
        count = jax.process_count()
        print(f"Keras, {count} processes: accuracy {accuracy:.2f} on images that were held out")
    return accuracy


if __name__ == "__main__":
    if len(sys.argv) > 2:
        keras.distribution.initialize("localhost:9912", int(sys.argv[3]), int(sys.argv[2]))
    else:
        keras.distribution.initialize()
    main(sys.argv[1])
