"""Random datasets: whatever h5py can write, batches equal what h5py reads, bit for bit.

HYPOTHESIS_PROFILE=thorough looks at many more examples (conftest.py).
"""

from __future__ import annotations

import os
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import h5py
import numpy as np
import pytest
from conftest import assert_epoch_is, poison, require_extra, truth
from hypothesis import given
from hypothesis import strategies as st

from h5async import AsyncReader, Field
from h5async.fill import phases
from h5async.io import source as localfiles

PLAIN = [
    f"{order}{kind}" for order in "<>" for kind in ("u2 i2 u4 i4 u8 i8 f2 f4 f8 c8 c16").split()
]
DTYPES = [
    *(np.dtype(name) for name in ["u1", "i1", *PLAIN]),
    np.dtype(bool),
    np.dtype("S1"),
    np.dtype("S7"),
    np.dtype("V3"),
    h5py.enum_dtype({"no": 0, "yes": 1}, "i2"),
    np.dtype([("a", "u1"), ("b", ">f4"), ("c", "?", (2,))]),
    np.dtype(("<i2", (2, 3))),
    np.dtype((">f4", (2,))),
    np.dtype("<u2", metadata={"bits": 12}),
]
LIBVERS = ["earliest", "latest", ("earliest", "v108"), "v108", "v110", "v112"]
WITH_EXTENSIBLE_ARRAYS = ["latest", "v110", "v112"]
FILTERS = [
    {},
    {},
    {},
    {"compression": "gzip", "compression_opts": 1},
    {"compression": "lzf"},
    {"shuffle": True},
    {"fletcher32": True},
    {"compression": "gzip", "shuffle": True},
    {"compression": "lzf", "shuffle": True, "fletcher32": True},
]
try:
    hdf5plugin = require_extra("hdf5plugin")
except pytest.skip.Exception:
    pass
else:
    FILTERS += [
        dict(hdf5plugin.Zstd()),
        {"shuffle": True, "fletcher32": True, **hdf5plugin.Zstd()},
        dict(hdf5plugin.LZ4(nbytes=32)),
        dict(hdf5plugin.Bitshuffle(cname="none")),
        dict(hdf5plugin.Bitshuffle(cname="lz4", nelems=16)),
        dict(hdf5plugin.Bitshuffle(cname="zstd")),
        dict(hdf5plugin.Blosc(cname="lz4")),
    ]


@dataclass(frozen=True)
class Recipe:
    """How to make a dataset. Its repr is what a failing example shows."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    libver: Any = "earliest"
    is_compact: bool = False
    chunks: tuple[int, ...] | None = None
    maxshape: tuple[int | None, ...] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    fill: bool = False
    fill_time: str = "ifset"
    alloc_time: str | None = None
    first_shape: tuple[int, ...] | None = None
    written: list[tuple[slice, ...]] = field(default_factory=list)
    seed: int = 0

    def write(self, path: Path) -> None:
        rng = np.random.default_rng(self.seed)
        options: dict[str, Any] = dict(self.options, fill_time=self.fill_time)
        if self.chunks:
            options |= {"chunks": self.chunks, "maxshape": self.maxshape}
        if self.fill and self.dtype.subdtype is None:
            options["fillvalue"] = random_values(rng, self.dtype, ())[()]
        with h5py.File(path, "w", libver=self.libver) as file:
            file["before"] = np.arange(3, dtype=np.int8)
            plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
            if self.is_compact:
                plist.set_layout(h5py.h5d.COMPACT)
            if self.alloc_time == "early":
                plist.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
            shape = self.first_shape or self.shape
            dataset = file.create_dataset(
                "data", shape, self._stored_type(file), dcpl=plist, **options
            )
            if self.first_shape:
                dataset[...] = random_values(rng, self.dtype, self.first_shape)
                dataset.resize(self.shape)
            for where in self.written:
                extents = [
                    len(range(*s.indices(n))) for s, n in zip(where, self.shape, strict=True)
                ]
                if all(extents):
                    dataset[where] = random_values(rng, self.dtype, tuple(extents))

    def _stored_type(self, file: h5py.File) -> Any:
        """Return what `create_dataset` takes as dtype; integers of 12 bits are HDF5's only."""
        if not self.is_of_few_bits:
            return self.dtype
        stored = h5py.h5t.STD_U16LE.copy()
        stored.set_precision(12)
        stored.commit(file.id, b"type")
        return h5py.Datatype(stored)

    @property
    def is_of_few_bits(self) -> bool:
        return "bits" in (self.dtype.metadata or {})


def random_values(rng: np.random.Generator, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Any:
    """Return random bits (every NaN among them); half of the rows repeat, so they compress."""
    if dtype.subdtype:
        base, extra = dtype.subdtype
        return random_values(rng, base, (*shape, *extra))
    if dtype.fields:
        values = np.zeros(shape, dtype)
        for name, (its_dtype, _) in dtype.fields.items():
            values[name] = random_values(rng, its_dtype, shape)
        return values
    if dtype.kind == "b":
        return rng.integers(0, 2, shape).astype(dtype)
    count = int(np.prod(shape, dtype=int))
    if rng.integers(2):
        raw = np.tile(rng.integers(0, 256, dtype.itemsize, np.uint8), count)
    else:
        raw = rng.integers(0, 256, count * dtype.itemsize, np.uint8)
    return np.frombuffer(raw.tobytes(), dtype.str if dtype.metadata else dtype).reshape(shape)


def slices(extent: int) -> st.SearchStrategy[slice]:
    ends = st.integers(0, extent)
    return st.one_of(
        st.just(slice(0, extent)), st.tuples(ends, ends).map(lambda e: slice(*sorted(e)))
    )


@st.composite
def recipes(draw: st.DrawFn) -> Recipe:
    rank = draw(st.integers(1, 5))
    longest = {1: 40, 2: 12, 3: 7, 4: 5, 5: 4}[rank]
    shape = tuple(draw(st.lists(st.integers(0, longest), min_size=rank, max_size=rank)))
    common = {
        "shape": shape,
        "dtype": draw(st.sampled_from(DTYPES)),
        "libver": draw(st.sampled_from(LIBVERS)),
        "fill": draw(st.booleans()),
        "fill_time": draw(st.sampled_from(["ifset", "ifset", "alloc", "never"])),
        "alloc_time": draw(st.sampled_from([None, None, "early"])),
        "written": draw(st.lists(st.tuples(*map(slices, shape)), max_size=2)),
        "seed": draw(st.integers(0, 2**32 - 1)),
    }
    if not draw(st.sampled_from([True, True, True, False])):
        return Recipe(is_compact=draw(st.booleans()), **common)
    maxshape = tuple(
        draw(st.sampled_from([extent, extent, extent + 3, None])) or None for extent in shape
    )
    first_shape = None
    if draw(st.booleans()):
        first_shape = tuple(
            extent if limit == extent else draw(st.integers(0, min(limit or 99, extent + 3)))
            for extent, limit in zip(shape, maxshape, strict=True)
        )
    chunks = tuple(
        draw(
            st.one_of(
                st.just(max(1, extent)),
                st.integers(1, longest if limit is None else min(limit, longest + 2)),
            )
        )
        for extent, limit in zip(shape, maxshape, strict=True)
    )
    options = draw(st.sampled_from(FILTERS))
    return Recipe(
        chunks=chunks, maxshape=maxshape, first_shape=first_shape, options=options, **common
    )


@st.composite
def readers(draw: st.DrawFn, recipe: Recipe) -> dict[str, Any]:
    rank = len(recipe.shape)
    num_dim = draw(st.integers(0, rank - 1))
    full_rank = rank + len(recipe.dtype.shape)
    rest = [axis for axis in range(full_rank) if axis != num_dim]
    axes = None
    if draw(st.booleans()):
        axes = (num_dim, *draw(st.permutations(rest)))
    return {
        "fields": {"data": Field("data", num_dim, axes)},
        "batch_size": draw(st.sampled_from([1, 2, 3, 5, 100])),
        "shuffle": draw(st.sampled_from([False, "full"])),
        "seed": draw(st.integers(0, 9)),
        "num_threads": draw(st.sampled_from([0, 0, 1, 4])),
        "prefetch": draw(st.sampled_from([1, 2, 5])),
    }


# Samples this small would never be shared out among threads, gathered in blocks or read by more
# than one system call.
SMALL_LIMITS = {
    (phases, "_MIN_SHARE_NBYTES"): 1,
}
NO_MAPPING = {
    (localfiles, "can_map"): lambda path: False,
}


@st.composite
def circumstances(draw: st.DrawFn) -> dict[tuple[Any, str], Any]:
    """Return what to patch: limits, and a file system where nothing may be mapped."""
    patches: dict[tuple[Any, str], Any] = {}
    if draw(st.booleans(), label="small limits"):
        patches |= SMALL_LIMITS
    if draw(st.booleans(), label="no mapping"):
        patches |= NO_MAPPING
    return patches


def is_direct(recipe: Recipe, num_dim: int, patches: dict[tuple[Any, str], Any]) -> bool | None:
    """Tell whether no rule sends the dataset to h5py; None: that depends on its index."""
    if recipe.is_compact:
        return True
    if recipe.chunks is None:
        return num_dim == 0 or (localfiles, "can_map") not in patches
    assert recipe.maxshape is not None
    unlimited = [axis for axis, limit in enumerate(recipe.maxshape) if limit is None]
    is_misplaced = recipe.libver in WITH_EXTENSIBLE_ARRAYS and unlimited != [0]
    return None if len(unlimited) == 1 and is_misplaced else True


@given(st.data())
def test_batches_equal_what_h5py_reads(data: st.DataObject) -> None:
    recipe = data.draw(recipes(), label="dataset")
    options = data.draw(readers(recipe), label="reader")
    patches = data.draw(circumstances())
    with tempfile.TemporaryDirectory(prefix="h5async") as directory, ExitStack() as stack:
        for (module, name), value in patches.items():
            stack.enter_context(mock.patch.object(module, name, value))
        path = Path(directory, "random.h5")
        recipe.write(path)
        num_dim = options["fields"]["data"].num_dim
        expected = truth(path, num_dim=num_dim)
        axes = options["fields"]["data"].axes
        if axes is not None:
            rest = [axis for axis in range(expected.ndim) if axis != num_dim]
            places = [0, *(1 + rest.index(axis) for axis in axes[1:])]
            expected = np.ascontiguousarray(expected.transpose(places))
        with AsyncReader(hdf5_path=path, device="cpu", **options) as reader:
            poison(reader)
            for _ in range(2):
                assert_epoch_is(reader, expected, in_order=options["shuffle"] is False)
            is_read_directly = reader.layouts["data"].fallback_reason is None
            assert is_direct(recipe, num_dim, patches) in (is_read_directly, None)
            assert is_read_directly == (reader.fallback_reads == 0) or not expected.size


if os.environ.get("HYPOTHESIS_PROFILE") == "thorough":
    test_batches_equal_what_h5py_reads = pytest.mark.timeout(0)(test_batches_equal_what_h5py_reads)
