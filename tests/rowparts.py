"""Compares parts of rows with the rows that h5py reads, by the places where the parts begin."""

from __future__ import annotations

from typing import Any

import numpy as np
from conftest import assert_same_bits


def part_of(row: np.ndarray, begin: Any, sizes: Any) -> np.ndarray:
    """Return the part of a row that begins at some place."""
    return row[tuple(slice(a, a + n) for a, n in zip(begin, sizes, strict=True))]


def assert_are_parts(batch: Any, name: str, rows: np.ndarray, sizes: Any) -> None:
    """Compare parts of (n, *row) with the rows of the dataset; all of its dimensions are cut."""
    found = np.asarray(batch[name])
    for one, sample, begin in zip(found, batch.index, batch[f"{name}_crop"], strict=True):
        assert_same_bits(one, np.ascontiguousarray(part_of(rows[sample], begin, sizes)))
