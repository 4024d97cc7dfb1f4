"""Runs every kernel of ours on odd sizes, and nvCOMP: under compute-sanitizer, which looks on.

Each array is an allocation of its own, so that whatever lies before or behind it belongs to nobody.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cupy
import h5py
import numpy as np
from bench_gpu_ways import CODECS, written
from findings import Findings, delivered, difference, parse_options

from h5async import AsyncReader, Field

TRANSFORMS: dict[str, tuple[str, tuple[int, ...], dict[str, Any]]] = {
    "planes of uint8": ("u1", (7, 13, 11, 3), {"axes": (0, 3, 1, 2), "scale": 1 / 255}),
    "planes of uint16": ("u2", (5, 9, 7, 4), {"axes": (0, 3, 1, 2), "dtype": "f4"}),
    "one plane": ("u1", (7, 13, 11, 1), {"axes": (0, 3, 1, 2), "scale": 0.5, "offset": 1.0}),
    "many planes": ("u1", (3, 5, 7, 17), {"axes": (0, 3, 1, 2), "scale": 0.5}),
    "planes as stored": ("u1", (7, 13, 11, 3), {"axes": (0, 3, 1, 2)}),
    "two axes exchanged": ("f4", (5, 7, 3, 2), {"axes": (0, 2, 1, 3)}),
    "a cast": ("i2", (9, 33), {"dtype": "f4", "scale": 3.0}),
    "half precision": ("f2", (9, 33), {"dtype": "f4"}),
    "bool": ("?", (9, 7), {"dtype": "f4"}),
    "complex": ("c8", (9, 5), {}),
}
ROWS = 50


def check(findings: Findings, name: str, path: Path, data: np.ndarray) -> bool:
    """Decode two epochs on the GPU, with a cache there and without; tell whether all is right."""
    right = True
    for cache in (None, "device"):
        with AsyncReader(
            hdf5_path=path,
            labels_field=None,
            batch_size=9,
            shuffle="full",
            device="cuda",
            decode="device",
            cache=cache,
        ) as reader:
            for _ in range(2):
                for batch in reader:
                    right &= batch.data.get().tobytes() == data[batch.index].tobytes()
    findings.note(name, "right" if right else "WRONG")
    return right


def by_h5py(findings: Findings, folder: Path) -> list[bool]:
    """Check what h5py can write: chunks that cross rows and edges."""
    rights = []
    for kind, shape, chunks in (("u1", (ROWS, 33, 41), (8, 10, 16)), ("f8", (ROWS, 7), (16, 7))):
        data = (np.arange(np.prod(shape)) // 5 % 127).astype(kind).reshape(shape)
        for more in ({}, {"shuffle": True}, {"shuffle": True, "fletcher32": True}):
            path = folder / "h5py.h5"
            with h5py.File(path, "w") as file:
                file.create_dataset("data", data=data, chunks=chunks, compression="gzip", **more)
            name = f"gzip {', '.join(more)}: {kind} {shape} in {chunks}"
            rights.append(check(findings, name, path, data))
    return rights


def by_codec(findings: Findings, folder: Path) -> list[bool]:
    """Check the codecs that need no plugin to be written: a chunk a row."""
    rights = []
    with ThreadPoolExecutor(1) as pool:
        for codec in CODECS:
            for kind, row in (("u1", (33, 24)), ("f4", (7, 16)), ("f8", (40,))):
                data = (np.arange(ROWS * np.prod(row)) // 5 % 127).astype(kind).reshape(ROWS, *row)
                path = folder / f"{codec.replace('+', '-')}-{kind}.h5"
                written(path, data, ROWS, codec, pool)
                rights.append(check(findings, f"{codec}: {kind} {row}", path, data))
    return rights


def by_transform(findings: Findings, folder: Path) -> list[bool]:
    """Check casts, permutations and scales."""
    rights = []
    for name, (kind, shape, options) in TRANSFORMS.items():
        values = (np.arange(np.prod(shape)) % 251).astype(kind).reshape(shape)
        how = difference(delivered(folder / "x.h5", values, Field("x", **options)))
        findings.note(name, how or "right")
        rights.append(how is None)
    return rights


def main() -> int:
    options = parse_options(__doc__)
    findings = Findings(options.out / "sanitized.json")
    cupy.cuda.set_allocator(None)
    warnings.simplefilter("ignore", RuntimeWarning)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rights = by_transform(findings, folder)
        rights += by_h5py(findings, folder)
        rights += by_codec(findings, folder)
    return int(not all(rights))


if __name__ == "__main__":
    sys.exit(main())
