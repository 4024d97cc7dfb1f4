"""Train the classifier of `jax_dlpack.py` on several processes; each reads a share of every epoch.

    for i in 0 1; do python scripts/examples/jax_processes.py FOLDER $i 2 & done; wait

Under srun or mpirun, FOLDER is all. The reader asks `jax.distributed` which share is its own. Orbax
keeps the weights, and with them the reader's position: started again, training goes on in the
middle of an epoch, with the samples that are left, on as many processes as there are then.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding, PartitionSpec
from jax_dlpack import FIELDS, FILE, count_right, step

from h5async import AsyncReader, Batch

TRAIN, HELD_OUT = np.arange(1536), np.arange(1536, 1792)
EVERY = 10  # steps between checkpoints


def reader_of(samples: np.ndarray, **options: Any) -> AsyncReader:
    """Return a reader of some samples; all its batches have one shape, as JAX wants them."""
    size = 64 // jax.process_count()
    shared = {"hdf5_path": FILE, "fields": FIELDS, "device": "cpu", "drop_last": True}
    return AsyncReader(shared, indices=samples, batch_size=size, **options)


def main(
    folder: str | Path,
    *,
    epochs: int = 20,
    seen: Callable[[int, np.ndarray], object] = lambda epoch, index: None,
) -> float:
    """Train, and return the accuracy; `seen` is told the samples of each batch."""
    mesh = jax.make_mesh((jax.device_count(),), ("samples",))
    by_samples = NamedSharding(mesh, PartitionSpec("samples"))
    everywhere = NamedSharding(mesh, PartitionSpec())
    model = {"weights": jax.device_put(np.zeros((64, 10), np.float32), everywhere)}

    def arrays_of(batch: Batch) -> list[jax.Array]:
        """Make arrays that lie on all processes, each of which has its part."""
        return [jax.make_array_from_process_local_data(by_samples, np.asarray(a)) for a in batch]

    saved = ocp.CheckpointManager(Path(folder).absolute())
    with reader_of(TRAIN, shuffle="full") as reader, reader_of(HELD_OUT) as held_out, saved:
        steps = saved.latest_step() or 0
        if steps:
            parts = {"model": ocp.args.StandardRestore(model), "data": ocp.args.JsonRestore()}
            found = saved.restore(steps, args=ocp.args.Composite(**parts))
            model = found["model"]
            reader.load_state_dict(found["data"])
        for _ in range(reader.state_dict()["epoch"], epochs):
            for batch in reader:
                weights = step(model["weights"], *arrays_of(batch))
                model = {"weights": jax.block_until_ready(weights)}
                seen(batch.epoch, batch.index)
                steps += 1
                if steps % EVERY == 0:
                    parts = {
                        "model": ocp.args.StandardSave(model),
                        "data": ocp.args.JsonSave(reader.state_dict()),
                    }
                    saved.save(steps, args=ocp.args.Composite(**parts))
        weights = model["weights"]
        right = sum(int(count_right(weights, *arrays_of(batch))) for batch in held_out)
    accuracy = right / len(HELD_OUT)
    if jax.process_index() == 0:
        count = jax.process_count()
        print(f"JAX, {count} processes: accuracy {accuracy:.2f} on images that were held out")
    return accuracy


if __name__ == "__main__":
    if len(sys.argv) > 2:
        jax.distributed.initialize("localhost:9911", int(sys.argv[3]), int(sys.argv[2]))
    else:
        jax.distributed.initialize()
    main(sys.argv[1])
