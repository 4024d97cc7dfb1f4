"""Units are those of the datasets as stored, however these are read."""

from __future__ import annotations

import h5py
import numpy as np

from h5async.config import Field
from h5async.index.composition import join_layouts
from h5async.index.datasettable import unit_bounds, unit_nbytes
from h5async.index.metadata import read_layouts

VALUES = np.arange(400, dtype="i4").reshape(20, 20)


def layout_of(path, name="data", num_dim=0):
    return read_layouts(path, {"x": Field(name, num_dim=num_dim)})["x"]


def test_members_of_several_files_have_units_of_chunks(tmp_path):
    layouts = []
    for number in range(2):
        with h5py.File(tmp_path / f"{number}.h5", "w") as file:
            table = np.zeros(20, [("a", "<i2"), ("b", "<f4")])
            file.create_dataset("table", data=table, chunks=(8,))
        layouts.append(layout_of(tmp_path / f"{number}.h5", "table/a"))
    assert unit_bounds(join_layouts(layouts)).tolist() == [0, 8, 16, 20, 28, 36, 40]


def test_two_dimensions_of_a_virtual_dataset_have_units_of_its_sources(tmp_path):
    with h5py.File(tmp_path / "source.h5", "w") as file:
        file.create_dataset("x", data=VALUES, chunks=(20, 8), compression="gzip")
    with h5py.File(tmp_path / "whole.h5", "w") as file:
        made = h5py.VirtualLayout(VALUES.shape, VALUES.dtype)
        made[:] = h5py.VirtualSource("source.h5", "x", VALUES.shape)
        file.create_virtual_dataset("data", made)
    layout = layout_of(tmp_path / "whole.h5", num_dim=(0, 1))
    bounds = np.arange(20)[:, np.newaxis] * 20 + [0, 8, 16]
    assert unit_bounds(layout).tolist() == [*bounds.ravel().tolist(), 400]
    assert unit_nbytes(layout) == 3 * 20 * 8 * 4 // 3  # one piece of all rows
