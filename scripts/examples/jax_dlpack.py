"""Train a linear classifier of JAX on batches that it takes as they are, by DLPack.

`jax.dlpack.from_dlpack` makes an array of the very memory of a batch. JAX runs on streams of its
own, which h5async cannot see: so wait for what was computed of a batch (`block_until_ready`)
before the next one is asked for. The step of the batch before runs while the next one is read.
"""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp

from h5async import AsyncReader, Field

FILE = Path(__file__).parents[2] / "sample_data" / "digits.h5"
FIELDS = {"data": Field("data", dtype="float32", scale=1 / 16), "labels": "labels"}


def scores(weights: jax.Array, data: jax.Array) -> jax.Array:
    return data.reshape(len(data), -1) @ weights


@jax.jit
def step(weights: jax.Array, data: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    def loss(weights: jax.Array) -> jax.Array:
        log_p = jax.nn.log_softmax(scores(weights, data))
        return -jnp.take_along_axis(log_p, labels[:, None].astype(int), 1).mean()

    right = (scores(weights, data).argmax(1) == labels).sum()
    return weights - 0.5 * jax.grad(loss)(weights), right


def main(epochs: int = 20) -> float:
    weights = jnp.zeros((64, 10))
    with AsyncReader(
        hdf5_path=FILE, fields=FIELDS, batch_size=64, shuffle="full", drop_last=True
    ) as reader:
        for _ in range(epochs):
            right = 0
            for batch in reader:
                data, labels = map(jax.dlpack.from_dlpack, batch)  # no copy
                weights, found = jax.block_until_ready(step(weights, data, labels))
                right += int(found)
        accuracy = right / (64 * len(reader))
        print(f"JAX on {reader.device}: accuracy {accuracy:.2f} in the last of {epochs} epochs")
    return accuracy


if __name__ == "__main__":
    main()
