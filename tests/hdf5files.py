"""Writes to HDF5 files what several test modules read: sparse matrices, columns, odd datasets."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np

TEXT = h5py.string_dtype()


def write_csr(path: Path, matrix: Any, *, index_dtype: Any = None, **storage: Any) -> None:
    """Write "X" as AnnData writes a matrix of compressed sparse rows."""
    with h5py.File(path, "w") as file:
        group = file.create_group("X")
        group.attrs["encoding-type"], group.attrs["shape"] = "csr_matrix", matrix.shape
        indices = matrix.indices.astype(index_dtype or matrix.indices.dtype)
        group.create_dataset("data", data=matrix.data, **storage)
        group.create_dataset("indices", data=indices, **storage)
        group["indptr"] = matrix.indptr


def write_column(
    path: Path, kind: str, names: Sequence[str] = ("A", "B"), values: Any = (0, 1, -1, 1)
) -> Path:
    """Write "d", the numbers of the samples, and a column "obs/c" as AnnData writes it."""
    with h5py.File(path, "w") as file:
        obs = file.create_group("obs")
        if kind == "categorical":
            group = obs.create_group("c")
            group.attrs["encoding-type"], group.attrs["ordered"] = "categorical", False
            group["codes"] = np.array(values, "i1")
            group.create_dataset("categories", data=names, dtype=TEXT)
        elif kind == "older":
            obs["c"] = np.array(values, "i1")
            obs.create_dataset("__categories/c", data=names, dtype=TEXT)
        elif kind == "strings":
            obs.create_dataset("c", data=["A", "B", "A", "B"], dtype=TEXT)
        elif kind == "numbers":
            obs["c"] = np.array(values)
        else:
            group = obs.create_group("c")
            group.attrs["encoding-type"] = kind
            group["values"], group["mask"] = values
        file["d"] = np.arange(4 if isinstance(values[0], np.ndarray | list) else len(values))
    return path


def write_compact(file: h5py.File, name: str, values: np.ndarray) -> None:
    """Write a dataset whose values lie in its header."""
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plist.set_layout(h5py.h5d.COMPACT)
    kind, space = h5py.h5t.py_create(values.dtype), h5py.h5s.create_simple(values.shape)
    h5py.Dataset(h5py.h5d.create(file.id, name.encode(), kind, space, plist))[...] = values


def write_rows(path: Path) -> np.ndarray:
    """Write rows (23, 31) of 17 samples in several ways, and return them."""
    rows = np.random.default_rng(0).normal(size=(17, 23, 31)).astype("f4")
    with h5py.File(path, "w") as file:
        file["contiguous"], file["ends"] = rows, [6, 17]
        file.create_dataset("swapped", data=rows.astype(">f4"), chunks=(2, 23, 8))
        file.create_dataset("chunks", data=rows, chunks=(1, 8, 8), compression=1)
        file.create_dataset("across", data=rows, chunks=(4, 23, 7), shuffle=True, compression=1)
        file.create_dataset("whole", data=rows, chunks=(1, 23, 31), compression="lzf")
        file.create_dataset("raw", data=rows, chunks=(3, 23, 31))
        file.create_dataset("bands", data=rows, chunks=(3, 5, 31))
        file.create_dataset("holes", rows.shape, "f4", chunks=(3, 8, 8), compression=1, fillvalue=7)
        file["holes"][5:11, :9, :20] = rows[5:11, :9, :20]
        file["last"] = np.moveaxis(rows, 0, 2)
        tiles = {"chunks": (5, 7, 3), "compression": 1}
        file.create_dataset("last_tiles", data=np.moveaxis(rows, 0, 2), **tiles)
        file.create_dataset("pairs", data=rows[:16].reshape(4, 4, 23, 31), chunks=(2, 2, 9, 9))
        write_compact(file, "compact", rows[:, :12, :12])
        kind = np.dtype([("id", "i4"), ("v", "f4", (31,))])
        whole = np.zeros((17, 23), kind)
        whole["v"] = rows
        file.create_dataset("compound", data=whole, chunks=(2, 5))
        for name in ("contiguous", "chunks", "last"):
            names = {"last": ("lat", "lon", "time")}.get(name, ("time", "lat", "lon"))
            for dim, label in enumerate(names):
                file[name].dims[dim].label = label
    return rows


def type_for_h5py(bits: int = 20, base: Any = h5py.h5t.STD_I32LE) -> h5py.Datatype:
    """Return a type that only h5py reads: an enumeration of integers of reduced precision."""
    kind = base.copy()
    kind.set_precision(bits)
    enumeration = h5py.h5t.enum_create(kind)
    enumeration.enum_insert(b"zero", 0)
    return h5py.Datatype(enumeration)
