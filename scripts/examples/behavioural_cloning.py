"""Clone a behaviour from demonstrations: frame stacks in, chunks of actions out.

The file is as robomimic has it: a group for each demonstration, and lists of those to train on and
to validate on. A hand follows a target that drifts; the policy sees the last two images, and says
the next eight actions at once. Beyond the end of a demonstration actions are padded, and the mask
leaves them out. Neighbouring windows share most rows, so whole demonstrations are held out.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import h5py
import numpy as np

from h5async import AsyncReader, Field, Sequences

SIDE, DEMOS, FRAMES, CHUNK = 12, 60, 2, 8
FIELDS = {
    "images": Field("obs/image", scale=1 / 255, steps=range(1 - FRAMES, 1), pad="edge"),
    "actions": Field("actions", dtype="float32", steps=range(CHUNK), pad="zero", pad_mask="mask"),
}


def image_of(*positions: np.ndarray) -> np.ndarray:
    """Return an image with a blurred dot for each position, in a channel of its own."""
    pixels = np.stack(np.indices((SIDE, SIDE)), axis=-1) / SIDE
    distances = [((pixels - position) ** 2).sum(axis=-1) for position in positions]
    return (255 * np.exp(-np.stack(distances, axis=-1) / 0.02)).astype(np.uint8)


def write_demos(path: Path) -> None:
    rng = np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        for number in range(DEMOS):
            hand, target = rng.uniform(0.3, 0.7, 2), rng.uniform(0.4, 0.6, 2)
            drift = rng.uniform(-0.015, 0.015, 2)
            images, actions = [], []
            for _ in range(rng.integers(12, 25)):
                images.append(image_of(hand, target))
                actions.append(0.2 * (target - hand) + drift)
                hand, target = hand + actions[-1], target + drift
            demo = file.create_group(f"data/demo_{number}")
            demo.attrs["num_samples"] = len(actions)
            demo.create_dataset("obs/image", data=np.array(images), compression="gzip")
            demo["actions"] = np.array(actions)
        names = np.array([f"demo_{number}" for number in rng.permutation(DEMOS)], "S")
        file["mask/train"], file["mask/valid"] = names[10:], names[:10]


def reader_of(path: Path, part: str, shuffle: str | bool = False) -> AsyncReader:
    return AsyncReader(
        hdf5_path=path,
        fields=FIELDS,
        sequences=Sequences(groups="data/demo_*", only=f"mask/{part}"),
        batch_size=16,
        shuffle=shuffle,
        device="cpu",
    )


def features(images: np.ndarray) -> np.ndarray:
    """Return what the policy sees: where both dots are in each image of the stack, and a 1."""
    pixels = np.stack(np.indices((SIDE, SIDE), np.float32), axis=-1) / SIDE
    centres = np.einsum("nfxyc,xyd->nfcd", images, pixels)
    centres /= images.sum(axis=(2, 3))[..., np.newaxis]
    flat = centres.reshape(len(images), -1)
    return np.concatenate((flat, np.ones((len(flat), 1), flat.dtype)), axis=1)


def train(reader: AsyncReader) -> np.ndarray:
    """Return the weights of the linear policy that fits an epoch best: (chunk, seen, action)."""
    size = FRAMES * 2 * 2 + 1
    squares, products = np.zeros((CHUNK, size, size)), np.zeros((CHUNK, size, 2))
    for batch in reader:
        seen = features(batch.images)
        there = seen[:, np.newaxis] * batch.mask[..., np.newaxis]  # padded actions teach nothing
        squares += np.einsum("nks,nt->kst", there, seen)
        products += np.einsum("nks,nka->ksa", there, batch.actions)
    return np.linalg.solve(squares + 1e-6 * np.eye(size), products)


def main() -> float:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "demos.hdf5"
        write_demos(path)
        with reader_of(path, "train", shuffle="window") as reader:
            weights = train(reader)
        wrong = there = 0.0
        with reader_of(path, "valid") as reader:
            for batch in reader:
                said = np.einsum("ns,ksa->nka", features(batch.images), weights)
                mask = batch.mask[..., np.newaxis]
                wrong += float((((said - batch.actions) ** 2) * mask).sum())
                there += float(((batch.actions**2) * mask).sum())
    explained = 1 - wrong / there
    print(f"explains {explained:.2f} of the actions in demonstrations that were held out")
    return explained


if __name__ == "__main__":
    main()
