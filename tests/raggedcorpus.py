"""Files whose samples have differing lengths, for the fuzzer: heaps, offsets, sparse rows."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import h5py
import numpy as np
from corpus import Quirk

from h5async import RaggedField, SparseField

RAGGED: dict[str, RaggedQuirk] = {}


@dataclass(frozen=True, kw_only=True)
class RaggedQuirk(Quirk):
    """A file to be made, and a field of it with samples of differing lengths.

    Attributes
    ----------
    field
        What the reader is given.
    truth
        Returns the samples as h5py has them; of sparse rows, columns and values of each.
    """

    field: Any
    truth: Callable[[h5py.File], list[Any]]


def _register(
    name: str,
    make: Callable[[h5py.File], None],
    field: Any,
    truth: Callable[[h5py.File], list[Any]],
    dataset: str = "data",
    create: Mapping[str, Any] | None = None,
) -> None:
    RAGGED[name] = RaggedQuirk(
        name, make, "direct", (dataset,), create=create or {}, field=field, truth=truth
    )


LENGTHS = np.array([3, 0, 5, 1, 40, 0, 0, 7, 2, 300, 4, 9, 1, 0, 6, 11, 5])
VALUES = np.arange(LENGTHS.sum())


# --- variable-length datatypes -------------------------------------------------------------------


def _elements(file: h5py.File, dtype: np.dtype, **storage: Any) -> None:
    made = file.create_dataset("data", (len(LENGTHS),), h5py.vlen_dtype(dtype), **storage)
    for number, part in enumerate(np.split(VALUES, np.cumsum(LENGTHS)[:-1])):
        if len(part):
            made[number] = part.astype(dtype)


def _rewritten(file: h5py.File) -> None:
    _elements(file, np.dtype("<i4"))
    for number in (4, 2, 9, 4):
        file["data"][number] = np.arange(number * 3, dtype="<i4")


def _strings(file: h5py.File, **storage: Any) -> None:
    texts = ["", "one", "zwei, drei", "vier" * 30, "fünf", "x" * 5000, "", "end"] * 3
    file.create_dataset("data", data=texts, dtype=h5py.string_dtype(), **storage)


def _of_heap(file: h5py.File) -> list[Any]:
    return list(file["data"][...])


def _swapped(file: h5py.File) -> list[Any]:
    """Return the samples of a big-endian dataset; h5py calls their bytes native, and is wrong."""
    dtype = h5py.check_vlen_dtype(file["data"].dtype)
    return [part.view(dtype) for part in file["data"][...]]


def _of_strings(file: h5py.File) -> list[Any]:
    return [np.frombuffer(text, np.uint8) for text in file["data"][...]]


for _name, _dtype, _truth in (
    ("ints", "<i4", _of_heap),
    ("bytes", "u1", _of_heap),
    ("big_endian", ">f8", _swapped),
):
    _register(f"vlen_{_name}", partial(_elements, dtype=np.dtype(_dtype)), "data", _truth)
_register(
    "vlen_gzip",
    partial(_elements, dtype=np.dtype("<i2"), chunks=(4,), compression="gzip"),
    "data",
    _of_heap,
)
_register(
    "vlen_latest",
    partial(_elements, dtype=np.dtype("<i8"), chunks=(5,), maxshape=(None,)),
    "data",
    _of_heap,
    create={"libver": "latest"},
)
_register("vlen_userblock", _rewritten, "data", _of_heap, create={"userblock_size": 512})
_register("vlen_rewritten", _rewritten, "data", _of_heap)
_register("vlen_strings", _strings, "data", _of_strings)
_register(
    "vlen_strings_lzf", partial(_strings, chunks=(5,), compression="lzf"), "data", _of_strings
)


# --- flat values, and where each sample begins ---------------------------------------------------


def _flat(file: h5py.File, kind: str, dtype: str) -> None:
    file.create_dataset("data", data=VALUES.astype("<f4"), chunks=(64,), compression="gzip")
    ends = np.cumsum(LENGTHS)
    at = {"offsets": np.append(0, ends), "ends": ends, "lengths": LENGTHS}[kind]
    file["at"] = at.astype(dtype)


def _of_flat(file: h5py.File, kind: str) -> list[Any]:
    values, at = file["data"][...], file["at"][...].astype(object)
    if kind == "lengths":
        at = np.cumsum(at)
    edges = [int(edge) for edge in (at if kind == "offsets" else [0, *at])]
    return [values[a:b] for a, b in itertools.pairwise(edges)]


for _kind, _dtype in ("offsets", "<i8"), ("ends", ">u4"), ("lengths", "u2"):
    _register(
        f"flat_{_kind}",
        partial(_flat, kind=_kind, dtype=_dtype),
        RaggedField("data", offsets="at", offsets_kind=_kind),
        partial(_of_flat, kind=_kind),
    )


# --- sparse rows ---------------------------------------------------------------------------------


def _sparse(file: h5py.File, index: str = "<i4", **storage: Any) -> None:
    rng = np.random.default_rng(5)
    group = file.create_group("X")
    group.attrs["encoding-type"] = "csr_matrix"
    group.attrs["encoding-version"] = "0.1.0"
    group.attrs["shape"] = len(LENGTHS), 400
    columns = [np.sort(rng.choice(400, length, replace=False)) for length in LENGTHS]
    group.create_dataset("data", data=(VALUES % 9).astype("<f4"), **storage)
    group.create_dataset("indices", data=np.concatenate(columns).astype(index), **storage)
    group["indptr"] = np.append(0, np.cumsum(LENGTHS)).astype(index)


def _of_sparse(file: h5py.File) -> list[Any]:
    data, columns = file["X/data"][...], file["X/indices"][...]
    edges = [int(edge) for edge in file["X/indptr"][...]]
    return [part for a, b in itertools.pairwise(edges) for part in (columns[a:b], data[a:b])]


def _of_dense(file: h5py.File) -> list[Any]:
    data, columns = file["X/data"][...], file["X/indices"][...]
    edges = [int(edge) for edge in file["X/indptr"][...]]
    rows = np.zeros((len(edges) - 1, 400), np.float32)
    for row, (a, b) in enumerate(itertools.pairwise(edges)):
        np.add.at(rows[row], columns[a:b], data[a:b])
    return list(rows)


_gzip = partial(_sparse, chunks=(64,), compression="gzip")
_register("csr", _sparse, "X", _of_sparse, "X/data")
_register("csr_gzip", _gzip, "X", _of_sparse, "X/data")
_register("csr_wide", partial(_sparse, index="<i8"), "X", _of_sparse, "X/indices")
_register("csr_dense", _gzip, SparseField("X", dense=True), _of_dense, "X/indices")
