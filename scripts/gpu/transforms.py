"""Compares casts, permutations and scales on the GPU with the CPU's, bit for bit.

First those that once lost the sign of zero; then random ones, for some seconds. A NaN is as good as
another.
"""

from __future__ import annotations

import itertools
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from findings import Findings, delivered, difference, parse_options

from h5async import Field, H5AsyncError

KINDS = "? u1 i1 u2 i2 u4 i4 u8 i8 f2 f4 f8 c8 >f4 >i2".split()
UNSCALED = ("i4", "u1", "i8", "?", "c8")  # dtypes of delivery that take no factors
AXES = (None, (0, 3, 1, 2), (0, 2, 1, 3), (0, 3, 2, 1))
CHANNELS = (1, 2, 3, 4, 17)  # more than 16 take the generic way
FLOATS = (0, -0.0, np.inf, -np.inf, 1, -1, 1e-40, 65504, 65520, 3e38, -1e-45, 0.1, 5e-8)
NEGATIVE_ZEROS = {
    "float32, two axes exchanged, times 2": (
        np.full((4, 2, 3, 2), -0.0, "f4"),
        {"axes": (0, 2, 1, 3), "scale": 2.0},
    ),
    "uint8, 20 channels first, times -1": (
        np.zeros((4, 2, 2, 20), "u1"),
        {"axes": (0, 3, 1, 2), "scale": -1.0},
    ),
    "bool, times -1": (np.zeros((4, 2), "?"), {"scale": -1.0}),
    "float16, times 2": (np.full((4, 2), -0.0, "f2"), {"scale": 2.0}),
    "float16, plus -0.0": (np.full((4, 2), -0.0, "f2"), {"offset": -0.0}),
}


def special_values(chance: random.Random, kind: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return random bits, many of them replaced by values at the edges."""
    dtype = np.dtype(kind)
    count = int(np.prod(shape))
    values = np.frombuffer(chance.randbytes(count * dtype.itemsize), dtype).copy()
    edges: list[float] = []
    if dtype.kind == "b":
        return (values.view("u1") > 99).reshape(shape)
    if dtype.kind == "f":
        edges = list(FLOATS)
    elif dtype.kind in "iu":
        edges = [0, 1, np.iinfo(dtype).max, np.iinfo(dtype).min]
    if edges:
        replaced = np.array([chance.random() < 0.45 for _ in range(count)])
        chosen = chance.choices(list(np.array(edges, object)), k=int(replaced.sum()))
        values[replaced] = np.array(chosen).astype(dtype)
    return values.reshape(shape)


def random_case(chance: random.Random) -> tuple[np.ndarray, dict[str, Any]]:
    """Return values, and the options of their field."""
    kind, channels = chance.choice(KINDS), chance.choice(CHANNELS)
    to = chance.choice([None, None, "f2", "f4", "f8", "i4", "u1", "i8", "?", "c8"])
    options: dict[str, Any] = {"axes": chance.choice(AXES), "dtype": to}
    if to not in UNSCALED and np.dtype(kind).kind != "c":
        each = -3.0
        if options["axes"] == (0, 3, 1, 2):
            each = tuple(chance.uniform(-2, 2) for _ in range(channels))
        options["scale"] = chance.choice([None, 1 / 255, -1.0, 0.5, 1e-3, each])
        options["offset"] = chance.choice([None, None, 0.0, -0.0, 0.5, -1e-3])
    return special_values(chance, kind, (6, 4, 5, channels)), options


def main() -> int:
    options = parse_options(__doc__, seconds=120.0, seed=1)
    findings = Findings(options.out / "transforms.json")
    chance = random.Random(options.seed)
    end = time.monotonic() + options.seconds
    compared = different = 0
    refused: Counter[str] = Counter()
    named = ((values, field) for values, field in NEGATIVE_ZEROS.values())
    endless = (random_case(chance) for _ in itertools.count())
    with tempfile.TemporaryDirectory() as folder, np.errstate(all="ignore"):
        path = Path(folder, "x.h5")
        for values, field in itertools.chain(named, endless):
            if time.monotonic() > end:
                break
            case = f"{values.dtype.str} {values.shape} as {field}"
            try:
                found = delivered(path, values, Field("x", **field))
            except (H5AsyncError, ValueError) as error:  # what one of both refuses
                refused[f"{type(error).__name__}: {error}".replace(str(path), "")[:80]] += 1
                continue
            compared += 1
            if (how := difference(found)) is not None:
                different += 1
                if different <= 100:
                    findings.add("different", f"{case}: {how}")
    findings.note("refused, by the begin of the message", dict(refused))
    findings.note("seed", options.seed)
    findings.note("compared", compared)
    findings.note("differ", different)
    return int(different > 0)


if __name__ == "__main__":
    sys.exit(main())
