"""What the steps share: findings that are printed and kept at once, and bits to compare."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from bench_common import header, save
from bench_gpu_ways import Gpu

from h5async import AsyncReader, Field


class Findings:
    """What a step found, printed line by line and kept in a file after each.

    Parameters
    ----------
    path
        Of the file, JSON.
    """

    def __init__(self, path: Path) -> None:
        gpu = Gpu()
        self._path = path
        self._result = header() | {"gpu": gpu.describe(), "findings": {}}
        self._result["versions"] |= gpu.versions()

    def note(self, name: str, found: Any) -> None:
        """Keep what was found under a name."""
        lines = found if isinstance(found, list) else [found]
        if isinstance(found, dict):
            lines = [f"{key}: {value}" for key, value in found.items()]
        print(f"{name}:", "\n    ".join(map(str, ["", *lines] if len(lines) > 1 else lines)))
        self._keep(name, found)

    def add(self, name: str, found: Any) -> None:
        """Add to a list of findings."""
        print(f"{name}: {found}")
        self._keep(name, [*self._result["findings"].get(name, []), found])

    def _keep(self, name: str, found: Any) -> None:
        self._result["findings"][name] = found
        save(self._result, self._path)


def parse_options(about: str, **defaults: float) -> argparse.Namespace:
    """Parse --out, the folder of results, and numbers that have defaults."""
    parser = argparse.ArgumentParser(description=about.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    return parser.parse_args()


def delivered(path: Path, values: np.ndarray, field: Field) -> dict[str, np.ndarray]:
    """Write values as a dataset; return it as one batch of the GPU and of the CPU."""
    with h5py.File(path, "w") as file:
        file["x"] = values
    found = {}
    for device in ("cuda", "cpu"):
        with AsyncReader(
            hdf5_path=path, fields={"x": field}, batch_size=len(values), device=device
        ) as reader:
            batch = reader.get_next_batch().x
            found[device] = batch.get() if device == "cuda" else batch.copy()
    return found


def difference(found: dict[str, np.ndarray]) -> str | None:
    """Return what differs between the batches, one NaN being as good as another; else None."""
    here, there = found["cuda"], found["cpu"]
    if (here.dtype, here.shape) != (there.dtype, there.shape):
        return f"{here.dtype} {here.shape} on the GPU, {there.dtype} {there.shape} on the CPU"
    if here.dtype.kind == "c":
        here, there = (values.view(values.real.dtype) for values in (here, there))
    bits = f"u{here.itemsize}"
    is_other = here.view(bits) != there.view(bits)
    if here.dtype.kind == "f":
        is_other &= ~(np.isnan(here) & np.isnan(there))
    if not is_other.any():
        return None
    at = tuple(map(int, np.argwhere(is_other)[0]))
    return (
        f"{int(is_other.sum())} of {is_other.size} values differ, the first at {at}:"
        f" {here[at]!r} on the GPU, {there[at]!r} on the CPU"
    )
