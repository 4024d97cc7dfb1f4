"""Train a linear classifier of JAX on batches that it takes as they are, by DLPack.

`jax.dlpack.from_dlpack` makes an array of the very memory of a batch. JAX runs on streams of its
own, which h5async cannot see: so wait for what was computed of a batch (`block_until_ready`)
before the next one is asked for. The step of the batch before runs while the next one is read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from h5async import AsyncReader, Field, Split

FILE = Path(__file__).parents[2] / "sample_data" / "digits.h5"
FIELDS = {"data": Field("data", dtype="float32", scale=1 / 16), "labels": "labels"}
PARTS = {"train": 0.8, "val": 0.2}


def scores(weights: jax.Array, data: jax.Array) -> jax.Array:
    return data.reshape(len(data), -1) @ weights


@jax.jit
def step(weights: jax.Array, data: jax.Array, labels: jax.Array) -> jax.Array:
    def loss(weights: jax.Array) -> jax.Array:
        log_p = jax.nn.log_softmax(scores(weights, data))
        return -jnp.take_along_axis(log_p, labels[:, None].astype(int), 1).mean()

    return weights - 0.5 * jax.grad(loss)(weights)


@jax.jit
def count_right(weights: jax.Array, data: jax.Array, labels: jax.Array) -> jax.Array:
    return (scores(weights, data).argmax(1) == labels).sum()


def reader_of(part: str, **options: Any) -> AsyncReader:
    split = Split(part, PARTS, stratify="labels")
    return AsyncReader(hdf5_path=FILE, fields=FIELDS, batch_size=64, indices=split, **options)


def main(epochs: int = 20) -> float:
    weights = jnp.zeros((64, 10))
    with reader_of("train", shuffle="full", drop_last=True) as reader, reader_of("val") as val:
        for _ in range(epochs):
            for batch in reader:
                data, labels = map(jax.dlpack.from_dlpack, batch)  # no copy
                weights = jax.block_until_ready(step(weights, data, labels))
        right = 0
        for batch in val:
            data, labels = map(jax.dlpack.from_dlpack, batch)
            right += int(count_right(weights, data, labels))  # which waits for it
        accuracy = right / val.num_samples
        print(f"JAX on {reader.device}: accuracy {accuracy:.2f} on images that were held out")
    return accuracy


if __name__ == "__main__":
    main()
