"""Make a folder of pictures, pack it by ``h5async pack``, and train a classifier on the file.

``python packed_pictures.py make pictures`` draws discs, squares and stripes as JPEGs of any size, a
folder a class; ``python packed_pictures.py train pictures.h5`` trains on what was packed of them.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import nn

import h5async
from h5async import Field, Split
from h5async.torch import H5Dataset

PARTS = {"train": 0.8, "test": 0.2}
SIZE = 32


def make(folder: Path, count: int = 600) -> None:
    """Draw pictures of three classes."""
    rng = np.random.default_rng(0)
    for number in range(count):
        name = ("disc", "square", "stripes")[number % 3]
        width, height = rng.integers(60, 140, 2).tolist()
        noise = rng.integers(0, 120, (height, width, 3), np.uint8)
        image = Image.fromarray(noise)
        draw, colour = ImageDraw.Draw(image), tuple(rng.integers(130, 256, 3).tolist())
        radius = int(rng.integers(18, 26))
        box = [width / 2 - radius, height / 2 - radius, width / 2 + radius, height / 2 + radius]
        if name == "disc":
            draw.ellipse(box, fill=colour)
        elif name == "square":
            draw.rectangle(box, fill=colour)
        else:
            for x in range(0, width, 12):
                draw.line([x, 0, x, height], fill=colour, width=4)
        (folder / name).mkdir(parents=True, exist_ok=True)
        image.save(folder / name / f"{number:04}.jpg")


def dataset(path: Path, part: str) -> H5Dataset:
    """Return the batches of a part: pixels from 0 to 1, (N, 3, height, width), and labels."""
    pixels = Field("data", axes=(0, 3, 1, 2), scale=1 / 255)
    return H5Dataset(
        hdf5_path=path,
        fields={"data": pixels, "labels": "labels"},
        indices=Split(part, PARTS, seed=0, stratify="labels"),
        batch_size=32,
        shuffle="full",
        device="cpu",
    )


def train(path: Path, epochs: int = 6) -> float:
    """Train on four fifths of the pictures; return the accuracy on the others."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(3, 16, 3, stride=2), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.ReLU()),
        *(nn.AdaptiveMaxPool2d(3), nn.Flatten(), nn.Linear(288, 3)),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    with dataset(path, "train") as batches:
        for _ in range(epochs):
            for batch in batches:
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(batch["data"]), batch["labels"]).backward()
                optimizer.step()
    right = count = 0
    with dataset(path, "test") as batches, torch.no_grad():
        for batch in batches:
            right += int((model(batch["data"]).argmax(1) == batch["labels"]).sum())
            count += len(batch["labels"])
    print(f"accuracy {right / count:.2f} on {count} pictures that were not trained on")
    return right / count


def main() -> float:
    """Do all of it in a temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        pictures, packed = Path(folder) / "pictures", Path(folder) / "pictures.h5"
        make(pictures)
        print(h5async.pack(pictures, packed, size=SIZE).columns)
        return train(packed)


if __name__ == "__main__":
    if len(sys.argv) == 3:
        {"make": make, "train": train}[sys.argv[1]](Path(sys.argv[2]))
    else:
        main()
