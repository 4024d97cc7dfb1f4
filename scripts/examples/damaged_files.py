"""Train on files of which some are damaged: what cannot be read is left out, listed and limited.

Copies of the sample data stand for shards of a large dataset: one is cut short, one is missing, and
one has a chunk that does not decode.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import h5py
import numpy as np

from h5async import AsyncReader

DIGITS = Path(__file__).parents[2] / "sample_data" / "digits.h5"
SHARDS, CLASSES = 5, 10


def write_shards(folder: Path) -> list[Path]:
    """Write the shards; damage three of them."""
    paths = [folder / f"shard{number}.h5" for number in range(SHARDS)]
    for path in paths:
        shutil.copy(DIGITS, path)
    os.truncate(paths[1], 5000)
    paths[2].unlink()
    with h5py.File(paths[3]) as file:
        chunk = file["data"].id.get_chunk_info(1)
    with paths[3].open("r+b") as raw:
        raw.seek(chunk.byte_offset)
        raw.write(b"\xff" * chunk.size)
    return paths


def main() -> float:
    with tempfile.TemporaryDirectory() as folder:
        options = {"batch_size": 256, "shuffle": "full", "on_error": "skip", "max_skipped": 0.2}
        with AsyncReader(hdf5_path=write_shards(Path(folder)), device="cpu", **options) as reader:
            weights = np.zeros((64, CLASSES), np.float32)
            for epoch in range(3):
                right = total = 0
                for data, labels in reader:  # of any size, also 0
                    images = data.reshape(len(data), -1) / np.float32(16)
                    scores = images @ weights
                    right += int((scores.argmax(axis=1) == labels).sum())
                    total += len(labels)
                    chances = np.exp(scores - scores.max(axis=1, keepdims=True, initial=0))
                    chances /= chances.sum(axis=1, keepdims=True)
                    chances[np.arange(len(labels)), labels] -= 1
                    weights -= 0.5 * images.T @ chances / max(1, len(labels))
                print(f"epoch {epoch}: {right / total:.0%} of {total} samples are right")
            files = [one for one in reader.skipped if one.sample is None]
            samples = [one for one in reader.skipped if one.sample is not None]
            print(f"{len(files)} files were left out, and {len(samples)} samples of others, as in")
            print(samples[0].reason)
    return right / total


if __name__ == "__main__":
    main()
