"""Train on random patches of large maps: an image and its mask, cropped and flipped together.

A file has maps of a field, compressed in tiles, and masks of where it is unusual. Each epoch takes
one patch of each map, at another place, and only the tiles that it touches are decoded. A model of
two weights learns to tell the mask from the values; it is tested on a region that is the same each
time. `maps_crop` says where patches lie, so that the latitude can be an input, too.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import h5py
import numpy as np

from h5async import AsyncReader, Field

MAPS, LAT, LON, SIZE = 60, 180, 360, 32


def write_maps(path: Path) -> None:
    """Write maps that are warm at the equator, and masks of where it is warmer than usual."""
    rng = np.random.default_rng(0)
    usual = np.cos(np.linspace(-np.pi / 2, np.pi / 2, LAT))[:, np.newaxis]
    noise = rng.normal(0, 1, (MAPS, LAT, LON)).astype("f4")
    tiles = {"chunks": (1, SIZE, SIZE), "compression": "gzip"}
    with h5py.File(path, "w") as file:
        file.create_dataset("maps", data=(3 * usual + noise).astype("f4"), **tiles)
        file.create_dataset("mask", data=noise > 0.5, **tiles)


def inputs(maps: np.ndarray, top: np.ndarray) -> np.ndarray:
    """Return inputs of each element: its value, the usual one of its latitude, and 1."""
    latitude = np.pi * ((top[:, np.newaxis] + np.arange(maps.shape[1])) / (LAT - 1) - 0.5)
    usual = np.broadcast_to(3 * np.cos(latitude)[:, :, np.newaxis], maps.shape)
    return np.stack([maps, usual, np.ones_like(maps)], axis=-1).reshape(-1, 3)


def main(epochs: int = 40) -> float:
    """Return the share of elements of a region that are told right."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "maps.h5")
        write_maps(path)
        both = {"crop": SIZE, "flip": (2,)}  # left to right: the latitude stays
        fields = {"maps": Field("maps", **both), "mask": Field("mask", **both)}
        options = {"hdf5_path": path, "batch_size": 10, "device": "cpu"}
        weights = np.zeros(3)
        with AsyncReader(options, fields=fields, shuffle="full", cache="host") as reader:
            for _ in range(epochs):
                for batch in reader:
                    rows = inputs(batch.maps, batch["maps_crop"][:, 0])
                    found = 1 / (1 + np.exp(-rows @ weights))
                    weights -= rows.T @ (found - batch.mask.ravel()) / len(rows)
        north = {"region": {1: slice(20, 80), 2: slice(0, 360, 4)}}
        fields = {"maps": Field("maps", **north), "mask": Field("mask", **north)}
        with AsyncReader(options, fields=fields) as reader:
            right = [
                ((inputs(maps, np.full(len(maps), 20)) @ weights > 0) == mask.ravel()).mean()
                for maps, mask in reader
            ]
    share = float(np.mean(right))
    print(f"{share:.3f} of the elements are told right")
    return share


if __name__ == "__main__":
    main()
