"""Virtual datasets: whatever h5py can map, batches equal what h5py reads, or an error says why."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import h5py
import numpy as np
import pytest
from cases import each
from conftest import assert_epoch_is, assert_reads_like_h5py, assert_same_bits, poison, truth
from h5py import h5d, h5p, h5s, h5t
from hypothesis import given, settings
from hypothesis import strategies as st

from h5async import AsyncReader, DatasetError, Field, H5AsyncError, ReadError, UnsafeFileError
from h5async.fill import phases
from h5async.read import h5pyrows

Slabs = tuple[tuple[int, int, int, int], ...]  # start, stride, count, block of each dimension

EXAMPLES = settings().max_examples  # of the profile
OPTIONS: dict[str, Any] = {"labels_field": None, "device": "cpu", "batch_size": 4}


# --- to make them --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Source:
    """A dataset to be mapped. `file` "." is the file of the virtual dataset."""

    file: str
    name: str
    shape: tuple[int, ...]
    dtype: str = "<i4"
    options: dict[str, Any] = field(default_factory=dict)
    maxshape: tuple[int | None, ...] | None = None


@dataclass(frozen=True)
class Mapped:
    """`where` of the virtual dataset is `taken` (None: all) of the source."""

    where: Slabs | None
    source: Source
    taken: Slabs | None = None


@dataclass(frozen=True)
class Recipe:
    """How to make a virtual dataset. Its repr is what a failing example shows."""

    shape: tuple[int, ...]
    mapped: list[Mapped]
    dtype: str = "<i4"
    fill: int | None = None
    is_regular: bool = True
    maxshape: tuple[int | None, ...] | None = None
    sources: list[Source] | None = None
    seed: int = 0

    def write(self, folder: Path) -> Path:
        path = folder / "virtual.h5"
        rng = np.random.default_rng(self.seed)
        sources = self.sources or [mapped.source for mapped in self.mapped]
        with h5py.File(path, "w", libver="latest") as file:
            for source in {(s.file, s.name): s for s in sources}.values():
                if source.file == ".":
                    write_source(file, source, rng, self.dtype)
                else:
                    with h5py.File(folder / source.file, "a", libver="latest") as other:
                        write_source(other, source, rng, self.dtype)
            create_virtual(file, "data", self)
        return path


def write_source(file: h5py.File, source: Source, rng: np.random.Generator, due: str) -> None:
    values = random_bits(rng, np.dtype(source.dtype), source.shape)
    if values.dtype.kind == "f" and values.dtype.itemsize != np.dtype(due).itemsize:
        values = np.where(np.isnan(values), values.dtype.type(0.1), values)  # for another test
    file.create_dataset(source.name, data=values, maxshape=source.maxshape, **source.options)


def random_bits(rng: np.random.Generator, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Any:
    raw = rng.integers(0, 256, math.prod(shape) * dtype.itemsize, np.uint8)
    return np.frombuffer(raw.tobytes(), dtype).reshape(shape)


def selection(
    shape: tuple[int, ...],
    slabs: Slabs | None,
    maxshape: tuple[int | None, ...] | None = None,
) -> h5s.SpaceID:
    most = None if maxshape is None else tuple(h5s.UNLIMITED if n is None else n for n in maxshape)
    space = h5s.create_simple(shape, most)
    if slabs is not None:
        start, stride, count, block = (tuple(column) for column in zip(*slabs, strict=True))
        space.select_hyperslab(start, count, stride, block)
    return space


def create_virtual(file: h5py.File, name: str, recipe: Recipe) -> None:
    stored = h5t.py_create(np.dtype(recipe.dtype), logical=True)
    plist = h5p.create(h5p.DATASET_CREATE)
    plist.set_layout(h5d.VIRTUAL)
    if recipe.fill is not None:
        plist.set_fill_value(np.array(recipe.fill, recipe.dtype))
    for mapped in recipe.mapped:
        source = mapped.source
        plist.set_virtual(
            selection(recipe.shape, mapped.where, recipe.maxshape),
            source.file.encode(),
            source.name.encode(),
            selection(source.shape, mapped.taken, source.maxshape),
        )
    space = selection(recipe.shape, None, recipe.maxshape)
    h5d.create(file.id, name.encode(), stored, space, plist)


def run(start: int, stop: int) -> tuple[int, int, int, int]:
    return (start, 1, 1, stop - start)


def rows(start: int, stop: int, *rest: int) -> Slabs:
    return (run(start, stop), *(run(0, n) for n in rest))


def write_two_sources(folder: Path, **how: Any) -> np.ndarray:
    """Write virtual.h5, five rows of a.h5 and then five of b.h5; return its values."""
    values = np.arange(60, dtype="<i4").reshape(10, 6) * 7919
    layout = h5py.VirtualLayout((10, 6), "<i4")
    for n, letter in enumerate("ab"):
        with h5py.File(folder / f"{letter}.h5", "w") as file:
            file.create_dataset("x", data=values[5 * n : 5 * n + 5], **how)
        layout[5 * n : 5 * n + 5] = h5py.VirtualSource(f"{letter}.h5", "x", (5, 6))
    with h5py.File(folder / "virtual.h5", "w") as file:
        file.create_virtual_dataset("data", layout, fillvalue=-9)
    return values


def write_irregular(path: Path, file_name: str, name: str, shape: tuple[int, int] = (8, 3)) -> None:
    """Map a source, but one row; the selections cannot be said with one hyperslab."""
    spaces = [selection(shape, rows(0, 3, shape[1])), selection(shape, rows(0, 3, shape[1]))]
    for space in spaces:
        rest = shape[0] - 4
        space.select_hyperslab((4, 0), (1, 1), None, (rest, shape[1]), op=h5s.SELECT_OR)
    plist = h5p.create(h5p.DATASET_CREATE)
    plist.set_layout(h5d.VIRTUAL)
    plist.set_fill_value(np.array(-9, "<i4"))
    plist.set_virtual(spaces[0], file_name.encode(), name.encode(), spaces[1])
    with h5py.File(path, "a") as file:
        h5d.create(file.id, b"data", h5t.STD_I32LE, h5s.create_simple(shape), plist)


def read_all(path: Path, **options: Any) -> np.ndarray:
    with AsyncReader(hdf5_path=path, num_threads=0, **{**OPTIONS, **options}) as reader:
        poison(reader)
        return np.concatenate([batch.data.copy() for batch in reader])


# --- any virtual dataset -------------------------------------------------------------------------

WIDENINGS = {
    "<i4": ["<i4", ">i4", "<i2", ">i2", "u1", "i1", ">u2", "<u2"],
    ">i8": [">i8", "<i8", "<u4", ">i2", "<i4"],
    "<u2": ["<u2", ">u2", "u1"],
    "<f8": ["<f8", ">f8", "<f4", ">f4", "<i4", ">u4", "<i2", "u1", "<f2"],
    ">f4": [">f4", "<f4", "<f2", "<i2", "u1", ">u2"],
    "<f4": ["<f4", "u1"],
}


@st.composite
def sources_for(draw: st.DrawFn, shape: tuple[int, ...], dtypes: list[str], number: int) -> Source:
    options: dict[str, Any] = {}
    if all(shape) and draw(st.booleans()):
        options["chunks"] = tuple(draw(st.integers(1, n)) for n in shape)
        if draw(st.booleans()):
            options |= {"compression": "gzip", "shuffle": draw(st.booleans())}
    return Source(
        draw(st.sampled_from([".", "s0.h5", "s1.h5", "s2.h5"])),
        f"source{number}",
        shape,
        draw(st.sampled_from(dtypes)),
        options,
    )


def shapes(rank_min: int = 1) -> st.SearchStrategy[tuple[int, ...]]:
    return st.lists(st.integers(1, 6), min_size=rank_min, max_size=3).map(tuple)


def replaced(shape: tuple[int, ...], axis: int, extent: int) -> tuple[int, ...]:
    return (*shape[:axis], extent, *shape[axis + 1 :])


def whole(shape: tuple[int, ...]) -> list[tuple[int, int, int, int]]:
    return [run(0, n) for n in shape]


@st.composite
def stacks(draw: st.DrawFn, dtypes: list[str]) -> tuple[tuple[int, ...], list[Mapped], bool]:
    shape = draw(shapes())
    axis = draw(st.integers(0, len(shape) - 1))
    extents = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    gaps = draw(st.lists(st.integers(0, 2), min_size=len(extents), max_size=len(extents)))
    mapped, begin = [], 0
    for number, (extent, gap) in enumerate(zip(extents, gaps, strict=True)):
        where = whole(shape)
        where[axis] = run(begin + gap, begin + gap + extent)
        begin += gap + extent
        source = draw(sources_for(replaced(shape, axis, extent), dtypes, number))
        mapped.append(Mapped(tuple(where), source))
    return replaced(shape, axis, begin), draw(st.permutations(mapped)), True


@st.composite
def tiles(draw: st.DrawFn, dtypes: list[str]) -> tuple[tuple[int, ...], list[Mapped], bool]:
    shape = draw(st.lists(st.integers(1, 7), min_size=2, max_size=3).map(tuple))
    cuts = []
    for extent in shape:
        inner = draw(st.lists(st.integers(1, extent), max_size=1))
        cuts.append(sorted({0, *inner, extent}))
    mapped: list[Mapped] = []
    for corner in np.ndindex(*(len(cut) - 1 for cut in cuts)):
        where = tuple(run(cut[i], cut[i + 1]) for cut, i in zip(cuts, corner, strict=True))
        extents = tuple(slab[3] for slab in where)
        mapped.append(Mapped(where, draw(sources_for(extents, dtypes, len(mapped)))))
    kept = draw(st.lists(st.sampled_from(mapped), unique_by=lambda m: m.source.name, min_size=1))
    return shape, kept, True


@st.composite
def interleaved(
    draw: st.DrawFn, dtypes: list[str], block: int
) -> tuple[tuple[int, ...], list[Mapped], bool]:
    shape = draw(shapes())
    axis = draw(st.integers(0, len(shape) - 1))
    count, rounds = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    start = draw(st.integers(0, 2))
    mapped = []
    for number in range(count):
        where = whole(shape)
        where[axis] = (start + number * block, count * block, rounds, block)
        source = draw(sources_for(replaced(shape, axis, rounds * block), dtypes, number))
        mapped.append(Mapped(tuple(where), source))
    extent = start + count * rounds * block + draw(st.integers(0, 2))
    return replaced(shape, axis, extent), mapped, block == 1


@st.composite
def slabs_within(draw: st.DrawFn, blocks: int) -> tuple[int, int, int, int, int]:
    """Return a slab, and an extent that holds it."""
    start, count = draw(st.integers(0, 3)), draw(st.integers(1, 4))
    block = draw(st.integers(1, blocks))
    stride = block + draw(st.integers(0, 2))
    end = start + (count - 1) * stride + block
    return start, stride, count, block, end + draw(st.integers(0, 2))


@st.composite
def crops(
    draw: st.DrawFn, dtypes: list[str], blocks: int
) -> tuple[tuple[int, ...], list[Mapped], bool]:
    rank = draw(st.integers(1, 3))
    taken = [draw(slabs_within(blocks)) for _ in range(rank)]
    begins = [draw(st.integers(0, 2)) for _ in range(rank)]
    sizes = [count * block for _, _, count, block, _ in taken]
    where = tuple(run(begin, begin + size) for begin, size in zip(begins, sizes, strict=True))
    shape = tuple(slab[0] + slab[3] + draw(st.integers(0, 2)) for slab in where)
    source = draw(sources_for(tuple(slab[4] for slab in taken), dtypes, 0))
    return shape, [Mapped(where, source, tuple(slab[:4] for slab in taken))], blocks == 1


@st.composite
def other_ranks(draw: st.DrawFn, dtypes: list[str]) -> tuple[tuple[int, ...], list[Mapped], bool]:
    """One sample, or column, of the virtual dataset is a source with more or fewer dimensions."""
    shape = draw(shapes(2))
    axis = draw(st.integers(0, len(shape) - 1))
    mapped = []
    for number in range(shape[axis]):
        where = whole(shape)
        where[axis] = run(number, number + 1)
        extents = [n for a, n in enumerate(shape) if a != axis]
        for _ in range(draw(st.integers(0, 2))):
            extents.insert(draw(st.integers(0, len(extents))), 1)
        mapped.append(Mapped(tuple(where), draw(sources_for(tuple(extents), dtypes, number))))
    return shape, mapped, True


@st.composite
def recipes(draw: st.DrawFn) -> Recipe:
    dtype = draw(st.sampled_from(list(WIDENINGS)))
    dtypes = WIDENINGS[dtype] if draw(st.booleans()) else [dtype]
    shape, mapped, is_regular = draw(
        st.one_of(
            stacks(dtypes),
            tiles(dtypes),
            interleaved(dtypes, 1),
            interleaved(dtypes, 2),
            interleaved(dtypes, 3),
            crops(dtypes, 1),
            crops(dtypes, 3),
            other_ranks(dtypes),
        )
    )
    return Recipe(
        shape,
        mapped,
        dtype,
        fill=draw(st.sampled_from([None, 0, 7])),
        is_regular=is_regular and dtypes == [dtype],
        seed=draw(st.integers(0, 9)),
    )


@st.composite
def unlimited_recipes(draw: st.DrawFn) -> Recipe:
    """A source that may grow along an axis, of which any part is there; others are beside it."""
    rest = draw(st.lists(st.integers(1, 4), max_size=2))
    axis = draw(st.integers(0, len(rest)))
    count = draw(st.integers(1, 3))
    mapped = []
    with_blocks = draw(st.booleans())
    block = draw(st.integers(1, 3)) if with_blocks else 1
    for number in range(count):
        extent = draw(st.integers(1, 9))
        shape = (*rest[:axis], extent, *rest[axis:])
        where, taken = whole(shape), whole(shape)
        if count == 1 and not with_blocks:
            start = draw(st.integers(0, 2))
            where[axis] = (start, 1, 1, h5s.UNLIMITED)
            taken[axis] = (draw(st.integers(0, 1)), 1, 1, h5s.UNLIMITED)
        else:
            where[axis] = (number * block, count * block, h5s.UNLIMITED, block)
            taken[axis] = (0, block, h5s.UNLIMITED, block)
        chunks = tuple(draw(st.integers(1, n)) for n in shape)
        source = Source(
            draw(st.sampled_from(["s0.h5", "s1.h5"])),
            f"source{number}",
            shape,
            options={"chunks": chunks, "compression": draw(st.sampled_from([None, "gzip"]))},
            maxshape=replaced(shape, axis, None),
        )
        mapped.append(Mapped(tuple(where), source, tuple(taken)))
    shape = (*rest[:axis], 1, *rest[axis:])
    return Recipe(shape, mapped, fill=7, maxshape=replaced(shape, axis, None), is_regular=False)


@st.composite
def numbered_recipes(draw: st.DrawFn) -> Recipe:
    """Sources are found by number, in files or datasets, as long as they are there."""
    rest = draw(st.lists(st.integers(1, 4), max_size=2))
    axis = draw(st.integers(0, len(rest)))
    block, there = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    gap = draw(st.integers(0, 2))
    shape = (*rest[:axis], block, *rest[axis:])
    file, name = draw(
        st.sampled_from([("s%b.h5", "x"), (".", "x%b"), ("s.h5", "x%b%%"), ("s%b.h5", "x%b")])
    )
    sources = []
    for number in range(there):
        known = draw(sources_for(shape, ["<i4"], number))
        filled = [part.replace("%b", str(number)).replace("%%", "%") for part in (file, name)]
        sources.append(Source(filled[0], filled[1], shape, options=known.options))
    where = whole(shape)
    where[axis] = (draw(st.integers(0, 2)), block + gap, h5s.UNLIMITED, block)
    maxshape = replaced(shape, axis, None)
    mapped = [Mapped(tuple(where), Source(file, name, shape))]
    return Recipe(shape, mapped, fill=7, maxshape=maxshape, sources=sources)


def check_reads_like_h5py(
    recipe: Recipe,
    num_dim: int,
    shuffle: Any,
    num_threads: int,
    batch_size: int,
    stage_nbytes: int,
) -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(phases, "_MIN_SHARE_NBYTES", 1),
        mock.patch.object(h5pyrows, "_SCRATCH_NBYTES", stage_nbytes),
    ):
        path = recipe.write(Path(folder))
        expected = truth(path, "data", num_dim)
        with AsyncReader(
            hdf5_path=path,
            labels_field=None,
            device="cpu",
            num_dim=num_dim,
            batch_size=batch_size,
            shuffle=shuffle,
            num_threads=num_threads,
        ) as reader:
            poison(reader)
            assert_epoch_is(reader, expected, in_order=not shuffle)
            if recipe.is_regular:
                assert reader.layouts["data"].fallback_reason is None
                assert reader.fallback_reads == 0


READING = {
    "num_dim": st.integers(0, 2),
    "shuffle": st.sampled_from([False, "full"]),
    "num_threads": st.sampled_from([0, 2]),
    "batch_size": st.integers(1, 7),
    "stage_nbytes": st.sampled_from([1, 40, 1 << 20]),
}


@pytest.mark.slow
@settings(max_examples=EXAMPLES * 5 // 8)
@given(recipe=recipes(), **READING)
def test_virtual_dataset_reads_like_h5py(recipe, num_dim, **how):
    axis = num_dim % len(recipe.shape)
    check_reads_like_h5py(recipe, axis, **how)


@settings(max_examples=EXAMPLES // 4)
@given(recipe=unlimited_recipes(), **READING)
def test_unlimited_mapping_reads_like_h5py(recipe, num_dim, **how):
    axis = num_dim % len(recipe.shape)
    check_reads_like_h5py(recipe, axis, **how)


@settings(max_examples=EXAMPLES // 8)
@given(recipe=numbered_recipes(), **READING)
def test_numbered_sources_read_like_h5py(recipe, num_dim, **how):
    axis = num_dim % len(recipe.shape)
    check_reads_like_h5py(recipe, axis, **how)


@pytest.mark.parametrize("start", [0, 2])
def test_blocks_in_turns_along_the_samples_are_read_directly(tmp_path, start):
    sources = [Source(f"s{n}.h5", "x", (6, 4)) for n in range(2)]
    mapped = [Mapped(((start + 2 * n, 4, 3, 2), run(0, 4)), s) for n, s in enumerate(sources)]
    path = Recipe((12 + start, 4), mapped, fill=5).write(tmp_path)
    assert_reads_like_h5py(path)
    assert_reads_like_h5py(path, num_threads=2)


# --- values are converted as HDF5 does -----------------------------------------------------------


@each("stored, due", [(stored, due) for due, several in WIDENINGS.items() for stored in several])
def test_every_bit_pattern_is_converted_as_by_hdf5(tmp_path, stored, due):
    """NaNs with payloads, quiet and signalling, denormals, extremes, signs of zero."""
    nbytes = np.dtype(stored).itemsize
    heads = np.array([0, 0x7C01, 0x7E12, 0xFE00, 0x7F80, 0x7FA0, 0xFFC1, 0x7FF0, 0x7FF4, 0xFFFF])
    tails = np.array([0, 1, 0x1234, 2**31 + 1, 2**48 - 1], "u8")
    bits = (heads.astype("u8") << 8 * max(0, nbytes - 2))[:, None] | tails
    values = bits.ravel().astype(f"<u{nbytes}").view(np.dtype(stored).newbyteorder("<"))
    if np.dtype(stored).byteorder == ">":
        values = values.byteswap().view(stored)
    with h5py.File(tmp_path / "virtual.h5", "w") as file:
        file["x"] = values
        layout = h5py.VirtualLayout(values.shape, due)
        layout[...] = h5py.VirtualSource(".", "x", values.shape)
        file.create_virtual_dataset("data", layout)
    assert_same_bits(read_all(tmp_path / "virtual.h5"), truth(tmp_path / "virtual.h5"))


@each("stored", ["<i8", ">i8", "<u8", ">u8"])
@each("due", ["<f8", ">f8", "<f4"])
def test_large_integers_are_rounded_to_floats_as_by_hdf5(tmp_path, stored, due):
    values = np.array([2**53 + 1, 2**53 + 3, 2**62 + 257, 2**63 - 1, 3], stored)
    with h5py.File(tmp_path / "virtual.h5", "w") as file:
        file["x"] = values
        layout = h5py.VirtualLayout(values.shape, due)
        layout[...] = h5py.VirtualSource(".", "x", values.shape)
        file.create_virtual_dataset("data", layout)
    assert_same_bits(read_all(tmp_path / "virtual.h5"), truth(tmp_path / "virtual.h5"))


def test_enum_whose_source_numbers_its_names_otherwise(tmp_path):
    theirs = h5py.enum_dtype({"no": 0, "yes": 1}, "<i2")
    ours = h5py.enum_dtype({"no": 1, "yes": 0}, "<i2")
    with h5py.File(tmp_path / "virtual.h5", "w") as file:
        file.create_dataset("x", data=np.array([0, 1, 1, 0, 0], "<i2"), dtype=theirs)
        layout = h5py.VirtualLayout((5,), ours)
        layout[...] = h5py.VirtualSource(".", "x", (5,))
        file.create_virtual_dataset("data", layout)
    assert_same_bits(read_all(tmp_path / "virtual.h5"), truth(tmp_path / "virtual.h5"))


@each(
    "stored, due",
    [
        ("S5", "S5"),
        ("S5", "S8"),
        ("S8", "S5"),
        ("?", "?"),
        ("<c8", "<c8"),
        ("<c8", ">c8"),
        ("<c8", "<c16"),
        ("<f8", "<f4"),
        ("<i8", "<i2"),
        ("<f4", "<i4"),
        ("<i4", "<u4"),
        ("V4", "V4"),
        ("i2,>f4", "i2,>f4"),
        ("i2,>f4", "i2,<f4"),
        ("i2,>f4", "i4,<f8"),
        ("longdouble", "longdouble"),
        ("<f2", "<f4"),
        (">f2", "<f8"),
    ],
)
@pytest.mark.filterwarnings("ignore:invalid value encountered in cast")
def test_source_of_another_type_reads_like_h5py(tmp_path, stored, due):
    rng = np.random.default_rng(3)
    dtype = np.dtype(stored)
    if dtype.kind == "b":
        values = rng.integers(0, 2, (9, 3)).astype(bool)
    elif dtype.fields:
        values = np.zeros((9, 3), dtype)
        for number, name in enumerate(dtype.names):
            values[name] = rng.integers(-9, 9, (9, 3)) * (number + 1)
    elif dtype.kind in "SV":
        values = random_bits(rng, dtype, (9, 3))
    else:
        values = (rng.integers(0, 99, (9, 3)) * (1 if dtype.kind == "i" else 1.37)).astype(dtype)
    with h5py.File(tmp_path / "virtual.h5", "w") as file:
        file.create_dataset("x", data=values, chunks=(2, 3))
        layout = h5py.VirtualLayout((9, 3), np.dtype(due))
        layout[...] = h5py.VirtualSource(".", "x", (9, 3))
        file.create_virtual_dataset("data", layout)
    path = tmp_path / "virtual.h5"
    try:
        expected = truth(path)
    except OSError:  # HDF5 has no such conversion
        with pytest.raises(H5AsyncError):
            read_all(path)
        return
    for num_dim in (0, 1):
        found = read_all(path, num_dim=num_dim)
        assert_same_bits(found, np.ascontiguousarray(np.moveaxis(expected, num_dim, 0)))


def test_null_terminated_strings_of_sources(tmp_path):
    stored = h5t.C_S1.copy()
    stored.set_size(5)
    stored.set_strpad(h5t.STR_NULLTERM)
    values = np.array([b"ab\0cd", b"abcd\0", b"", b"x\0\0\0y", b"zzz"], "S5")
    for name in ("a.h5", "b.h5"):
        with h5py.File(tmp_path / name, "w") as file:
            dataset = h5d.create(file.id, b"x", stored, h5s.create_simple((5,)))
            dataset.write(h5s.ALL, h5s.ALL, values, mtype=stored)
    with h5py.File(tmp_path / "virtual.h5", "w") as file:
        layout = h5py.VirtualLayout((10,), "S5")
        layout[:5] = h5py.VirtualSource("a.h5", "x", (5,))
        layout[5:] = h5py.VirtualSource("b.h5", "x", (5,))
        file.create_virtual_dataset("data", layout)
    assert_reads_like_h5py(tmp_path / "virtual.h5")
    assert_reads_like_h5py(tmp_path / "virtual.h5", num_threads=2)


def test_bytes_that_are_neither_0_nor_1_are_true(tmp_path):
    with h5py.File(tmp_path / "virtual.h5", "w") as file:
        file.create_dataset("x", (6,), bool)
        file["x"].id.write(h5s.ALL, h5s.ALL, np.array([0, 1, 2, 255, 0, 128], np.uint8).view(bool))
        layout = h5py.VirtualLayout((8,), bool)
        layout[1:7] = h5py.VirtualSource(".", "x", (6,))
        file.create_virtual_dataset("data", layout, fillvalue=True)
    assert_reads_like_h5py(tmp_path / "virtual.h5")


def test_fields_cast_and_scale_what_is_mapped(tmp_path):
    values = write_two_sources(tmp_path)
    field = Field("data", dtype="f4", scale=0.5, offset=1)
    options = {"fields": {"data": field}, "device": "cpu", "batch_size": 3, "num_threads": 2}
    with AsyncReader(hdf5_path=tmp_path / "virtual.h5", **options) as reader:
        assert_epoch_is(reader, values.astype("f4") * np.float32(0.5) + np.float32(1))


# --- sources that are missing --------------------------------------------------------------------


def remove_the_file(folder: Path) -> None:
    (folder / "b.h5").unlink()


def remove_the_dataset(folder: Path) -> None:
    with h5py.File(folder / "b.h5", "r+") as file:
        del file["x"]


@pytest.mark.parametrize("remove", [remove_the_file, remove_the_dataset])
def test_missing_source_is_an_error_that_names_both(tmp_path, remove):
    write_two_sources(tmp_path)
    remove(tmp_path)
    with pytest.raises(DatasetError) as caught:
        read_all(tmp_path / "virtual.h5")
    for part in ("virtual.h5", '"data"', "b.h5", '"x"', "allow_missing"):
        assert part in str(caught.value)


@pytest.mark.parametrize("num_dim", [0, 1])
@pytest.mark.parametrize("remove", [remove_the_file, remove_the_dataset])
def test_missing_source_has_the_fill_value_where_allowed(tmp_path, remove, num_dim):
    write_two_sources(tmp_path)
    remove(tmp_path)
    expected = truth(tmp_path / "virtual.h5", "data", num_dim)
    assert (expected == -9).sum() == 30
    found = read_all(tmp_path / "virtual.h5", allow_missing=True, num_dim=num_dim)
    assert_same_bits(found, expected)


@pytest.mark.parametrize("remove", [remove_the_file, remove_the_dataset])
def test_missing_source_of_an_irregular_mapping_is_an_error(tmp_path, remove):
    with h5py.File(tmp_path / "b.h5", "w") as file:
        file["x"] = np.arange(24, dtype="<i4").reshape(8, 3)
    write_irregular(tmp_path / "virtual.h5", "b.h5", "x")
    remove(tmp_path)
    with pytest.raises(DatasetError, match=r"b\.h5"):
        read_all(tmp_path / "virtual.h5")


def test_missing_sources_of_a_virtual_source_are_an_error_or_filled(tmp_path):
    write_two_sources(tmp_path)
    (tmp_path / "virtual.h5").rename(tmp_path / "middle.h5")
    layout = h5py.VirtualLayout((12, 6), "<i4")
    layout[2:] = h5py.VirtualSource("middle.h5", "data", (10, 6))
    with h5py.File(tmp_path / "outer.h5", "w") as file:
        file.create_virtual_dataset("data", layout, fillvalue=4)
    remove_the_file(tmp_path)
    with pytest.raises(DatasetError, match=r"b\.h5"):
        read_all(tmp_path / "outer.h5")
    assert_same_bits(
        read_all(tmp_path / "outer.h5", allow_missing=True), truth(tmp_path / "outer.h5")
    )


def test_source_with_a_dangling_link_is_missing(tmp_path):
    write_two_sources(tmp_path)
    with h5py.File(tmp_path / "b.h5", "r+") as file:
        del file["x"]
        file["x"] = h5py.SoftLink("/nowhere")
    with pytest.raises(DatasetError, match=r"b\.h5"):
        read_all(tmp_path / "virtual.h5")
    found = read_all(tmp_path / "virtual.h5", allow_missing=True)
    assert_same_bits(found, truth(tmp_path / "virtual.h5"))


def test_source_whose_external_link_leads_nowhere_is_missing(tmp_path):
    write_two_sources(tmp_path)
    with h5py.File(tmp_path / "b.h5", "r+") as file:
        del file["x"]
        file["x"] = h5py.ExternalLink("gone.h5", "x")
    with pytest.raises(DatasetError, match=r"b\.h5"):
        read_all(tmp_path / "virtual.h5")
    found = read_all(tmp_path / "virtual.h5", allow_missing=True)
    assert_same_bits(found, truth(tmp_path / "virtual.h5"))


# --- what a file may reach -----------------------------------------------------------------------


def outside(folder: Path, how: str) -> str:
    """Write a source outside the directory `folder`; return the name that leads to it."""
    elsewhere = folder.parent / "elsewhere"
    elsewhere.mkdir()
    with h5py.File(elsewhere / "secret.h5", "w") as file:
        file["x"] = np.arange(24, dtype="<i4").reshape(8, 3)
    if how == "absolute":
        return str(elsewhere / "secret.h5")
    if how == "dots":
        return "../elsewhere/secret.h5"
    if how == "dots from a folder":
        (folder / "inner").mkdir()
        return "inner/../../elsewhere/secret.h5"
    if how == "linked file":
        (folder / "near.h5").symlink_to(elsewhere / "secret.h5")
        return "near.h5"
    assert how == "linked folder"
    (folder / "near").symlink_to(elsewhere)
    return "near/secret.h5"


WAYS_OUT = ["absolute", "dots", "dots from a folder", "linked file", "linked folder"]


def write_simple(path: Path, file_name: str, name: str = "x") -> None:
    layout = h5py.VirtualLayout((8, 3), "<i4")
    layout[...] = h5py.VirtualSource(file_name, name, (8, 3))
    with h5py.File(path, "a") as file:
        file.create_virtual_dataset("data", layout, fillvalue=-9)


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "here").mkdir()
    return tmp_path / "here"


@pytest.mark.parametrize("how", WAYS_OUT)
def test_source_outside_the_directory_is_refused_or_permitted_by_root(here, how):
    write_simple(here / "virtual.h5", outside(here, how))
    for allowed in ((), [here], [here.parent / "else"], [here.parent / "elsewhere" / "x"]):
        with pytest.raises(UnsafeFileError, match=r"secret\.h5"):
            read_all(here / "virtual.h5", allow_external=allowed)
    expected = truth(here / "virtual.h5")
    assert (expected >= 0).all()
    for allowed in ([here.parent / "elsewhere"], [here, here.parent], "/"):
        found = read_all(here / "virtual.h5", allow_external=allowed)
        assert_same_bits(found, expected)


@pytest.mark.parametrize("how", WAYS_OUT)
def test_irregular_mapping_may_not_leave_the_directory_either(here, how):
    write_irregular(here / "virtual.h5", outside(here, how), "x")
    with pytest.raises(UnsafeFileError):
        read_all(here / "virtual.h5")
    found = read_all(here / "virtual.h5", allow_external=[here.parent / "elsewhere"])
    assert_same_bits(found, truth(here / "virtual.h5"))


Bridge = Callable[[Path, str], None]


def by_virtual_source(path: Path, secret: str) -> None:
    write_simple(path, secret)


def by_external_link(path: Path, secret: str) -> None:
    with h5py.File(path, "w") as file:
        file["data"] = h5py.ExternalLink(secret, "/x")


def by_link_to_a_group(path: Path, secret: str) -> None:
    with h5py.File(path, "w") as file:
        file["far"] = h5py.ExternalLink(secret, "/")
        file["data"] = h5py.SoftLink("/far/x")


def by_external_storage(path: Path, secret: str) -> None:
    with h5py.File(path, "w") as file:
        file.create_dataset("data", (8, 3), "<i4", external=[(secret, 2048, 96)])


@pytest.mark.parametrize(
    "bridge", [by_virtual_source, by_external_link, by_link_to_a_group, by_external_storage]
)
@pytest.mark.parametrize("write", [write_simple, write_irregular], ids=["regular", "irregular"])
def test_source_may_not_lead_on_to_what_lies_outside(here, write, bridge):
    bridge(here / "bridge.h5", outside(here, "absolute"))
    write(here / "virtual.h5", "bridge.h5", "data")
    with pytest.raises(UnsafeFileError):
        read_all(here / "virtual.h5")


@pytest.mark.parametrize("bridge", [by_virtual_source, by_external_link])
def test_member_of_a_virtual_dataset_may_not_lead_outside_either(here, bridge):
    elsewhere = here.parent / "elsewhere"
    elsewhere.mkdir()
    dtype = np.dtype([("a", "<i4"), ("b", "<f4")])
    with h5py.File(elsewhere / "secret.h5", "w") as file:
        file["x"] = np.ones((8, 3), dtype)
    if bridge is by_external_link:
        by_external_link(here / "bridge.h5", str(elsewhere / "secret.h5"))
    else:
        layout = h5py.VirtualLayout((8, 3), dtype)
        layout[...] = h5py.VirtualSource(str(elsewhere / "secret.h5"), "x", (8, 3))
        with h5py.File(here / "bridge.h5", "w") as file:
            file.create_virtual_dataset("data", layout)
    layout = h5py.VirtualLayout((8, 3), dtype)
    layout[...] = h5py.VirtualSource("bridge.h5", "data", (8, 3))
    with h5py.File(here / "virtual.h5", "w") as file:
        file.create_virtual_dataset("data", layout)
    with pytest.raises(UnsafeFileError):
        read_all(here / "virtual.h5", data_field="data/a")
    found = read_all(here / "virtual.h5", data_field="data/a", allow_external=here.parent)
    assert_same_bits(found, truth(here / "virtual.h5")["a"])


@pytest.mark.parametrize("write", [write_simple, write_irregular], ids=["regular", "irregular"])
def test_decoy_in_the_current_directory_is_never_read(here, monkeypatch, write):
    decoys = here.parent / "decoys"
    decoys.mkdir()
    monkeypatch.chdir(decoys)
    with h5py.File(decoys / "source.h5", "w") as file:
        file["x"] = np.full((8, 3), 66, "<i4")
    write(here / "virtual.h5", "source.h5", "x")
    with pytest.raises(DatasetError, match=r"source\.h5"):
        read_all(here / "virtual.h5")
    found = read_all(here / "virtual.h5", allow_missing=True)
    assert (found == -9).all()
    with h5py.File(here / "source.h5", "w") as file:
        file["x"] = np.arange(24, dtype="<i4").reshape(8, 3)
    assert_same_bits(read_all(here / "virtual.h5"), truth(here / "virtual.h5"))


def test_current_directory_may_change_while_a_reader_is_open(here, monkeypatch):
    values = write_two_sources(here)
    monkeypatch.chdir(here)
    options = {**OPTIONS, "num_threads": 0}
    with AsyncReader(hdf5_path="virtual.h5", **options) as reader:
        monkeypatch.chdir(here.parent)
        assert_epoch_is(reader, values)


def test_source_below_the_directory_is_beside_it(tmp_path):
    (tmp_path / "deep" / "er").mkdir(parents=True)
    with h5py.File(tmp_path / "deep" / "er" / "s.h5", "w") as file:
        file["x"] = np.arange(24, dtype="<i4").reshape(8, 3)
    write_simple(tmp_path / "virtual.h5", "deep/er/../er/s.h5")
    assert_reads_like_h5py(tmp_path / "virtual.h5")


def test_source_may_be_a_link_to_a_file_beside_it(tmp_path):
    with h5py.File(tmp_path / "true.h5", "w") as file:
        file["x"] = np.arange(24, dtype="<i4").reshape(8, 3)
    (tmp_path / "near.h5").symlink_to("true.h5")
    write_simple(tmp_path / "virtual.h5", "near.h5")
    assert_reads_like_h5py(tmp_path / "virtual.h5")


@pytest.mark.timeout(120)
@pytest.mark.parametrize("write", [write_simple, write_irregular], ids=["regular", "irregular"])
def test_pipe_as_a_source_does_not_hang(tmp_path, write):
    os.mkfifo(tmp_path / "pipe.h5")
    write(tmp_path / "virtual.h5", "pipe.h5", "x")
    with pytest.raises(ReadError, match=r"pipe\.h5"):
        read_all(tmp_path / "virtual.h5")


def test_source_that_is_no_hdf5_file_is_an_error_that_names_it(tmp_path):
    (tmp_path / "text.h5").write_text("no HDF5")
    write_simple(tmp_path / "virtual.h5", "text.h5")
    with pytest.raises(ReadError, match=r"text\.h5"):
        read_all(tmp_path / "virtual.h5")


@pytest.mark.parametrize("kind", ["group", "scalar", "string"])
def test_source_that_is_no_array_of_numbers(tmp_path, kind):
    with h5py.File(tmp_path / "s.h5", "w") as file:
        if kind == "group":
            file.create_group("x")
        elif kind == "scalar":
            file["x"] = np.int32(7)
        else:
            file.create_dataset("x", (8, 3), h5py.string_dtype())
    write_simple(tmp_path / "virtual.h5", "s.h5")
    with pytest.raises(H5AsyncError, match=r"virtual\.h5|s\.h5"):
        read_all(tmp_path / "virtual.h5")


# --- virtual datasets of virtual datasets --------------------------------------------------------


@each("num_threads", [0, 2])
@each("num_dim", [0, 1])
@pytest.mark.parametrize("depth", [1, 3, 5])
def test_virtual_source(tmp_path, depth, num_dim, num_threads):
    write_two_sources(tmp_path, chunks=(2, 4), compression="gzip")
    previous = "virtual.h5"
    for level in range(depth):
        layout = h5py.VirtualLayout((9, 6), "<i4")
        layout[1:8:2, 1:] = h5py.VirtualSource(previous, "data", (9 if level else 10, 6))[2:6, :5]
        previous = f"level{level}.h5"
        with h5py.File(tmp_path / previous, "w") as file:
            file.create_virtual_dataset("data", layout, fillvalue=level + 1)
    expected = truth(tmp_path / previous, "data", num_dim)
    options = {**OPTIONS, "num_dim": num_dim, "num_threads": num_threads}
    with AsyncReader(hdf5_path=tmp_path / previous, **options) as reader:
        poison(reader)
        assert_epoch_is(reader, expected)
        assert reader.fallback_reads  # of the files that hold the values: their rows are cut twice


@pytest.mark.parametrize("num_dim", [0, 1])
def test_rows_whose_columns_are_cut_elsewhere_read_like_h5py(tmp_path, num_dim):
    values = write_two_sources(tmp_path)
    layout = h5py.VirtualLayout((20, 6), "<i4")
    layout[1:8:2, 1:] = h5py.VirtualSource("virtual.h5", "data", (10, 6))[2:6, :5]
    layout[8] = h5py.VirtualSource("virtual.h5", "data", (10, 6))[7]
    layout[10:, :2] = h5py.VirtualSource("virtual.h5", "data", (10, 6))[:, 4:]
    layout[10:, 2:] = h5py.VirtualSource("virtual.h5", "data", (10, 6))[:, :4]
    with h5py.File(tmp_path / "outer.h5", "w") as file:
        file.create_virtual_dataset("data", layout, fillvalue=6)
    found = read_all(tmp_path / "outer.h5", num_dim=num_dim)
    assert_same_bits(found, truth(tmp_path / "outer.h5", "data", num_dim))
    assert np.isin(values[7], found).all()


@each("io", ["auto", "pread"])
def test_columns_of_a_source_in_chunks_read_like_h5py(tmp_path, io):
    with h5py.File(tmp_path / "source.h5", "w") as file:
        file.create_dataset("data", data=np.arange(60).reshape(10, 6), chunks=(3, 6))
    layout = h5py.VirtualLayout((10, 4), "<i8")
    layout[...] = h5py.VirtualSource("source.h5", "data", (10, 6))[:, 1:5]
    with h5py.File(tmp_path / "outer.h5", "w") as file:
        file.create_virtual_dataset("data", layout)
    assert_reads_like_h5py(tmp_path / "outer.h5", io=io)


def test_virtual_source_that_is_one_sample_reads_like_h5py(tmp_path):
    write_two_sources(tmp_path)
    layout = h5py.VirtualLayout((3, 10, 6), "<i4")
    for number in range(3):
        layout[number] = h5py.VirtualSource("virtual.h5", "data", (10, 6))
    with h5py.File(tmp_path / "outer.h5", "w") as file:
        file.create_virtual_dataset("data", layout)
    for num_dim in range(3):
        found = read_all(tmp_path / "outer.h5", num_dim=num_dim)
        assert_same_bits(found, truth(tmp_path / "outer.h5", "data", num_dim))


LOOPS = """
import sys
from pathlib import Path
from h5async import AsyncReader, H5AsyncError
try:
    with AsyncReader(
        hdf5_path=sys.argv[1], labels_field=None, device="cpu", num_threads=int(sys.argv[2])
    ) as reader:
        list(reader)
except H5AsyncError as error:
    print(type(error).__name__, error)
"""


def assert_ends_in_an_error(path: Path, num_threads: int = 0) -> None:
    command = [sys.executable, "-c", LOOPS, str(path), str(num_threads)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "Error" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("write", [write_simple, write_irregular], ids=["regular", "irregular"])
@pytest.mark.parametrize("length", [1, 2, 3])
def test_loop_of_virtual_datasets_is_an_error(tmp_path, length, write):
    for number in range(length):
        write(tmp_path / f"{number}.h5", f"{(number + 1) % length}.h5", "data")
    assert_ends_in_an_error(tmp_path / "0.h5")


@pytest.mark.slow
def test_loop_within_one_file_is_an_error(tmp_path):
    write_simple(tmp_path / "0.h5", ".", "data")
    assert_ends_in_an_error(tmp_path / "0.h5")


@pytest.mark.slow
def test_loop_of_many_mappings_each_is_an_error_soon(tmp_path):
    for number in range(2):
        layout = h5py.VirtualLayout((12, 3), "<i4")
        for row in range(12):
            source = h5py.VirtualSource(f"{1 - number}.h5", "data", (12, 3))[row]
            layout[row] = source
        with h5py.File(tmp_path / f"{number}.h5", "w") as file:
            file.create_virtual_dataset("data", layout)
    assert_ends_in_an_error(tmp_path / "0.h5")


@pytest.mark.slow
def test_loop_through_links_is_an_error(tmp_path):
    write_simple(tmp_path / "0.h5", "1.h5", "data")
    with h5py.File(tmp_path / "1.h5", "w") as file:
        file["data"] = h5py.ExternalLink("0.h5", "data")
    assert_ends_in_an_error(tmp_path / "0.h5")


def test_nesting_reads_like_h5py_and_is_an_error_where_too_deep(tmp_path):
    with h5py.File(tmp_path / "0.h5", "w") as file:
        file["data"] = np.arange(24, dtype="<i4").reshape(8, 3)
    for number in range(1, 21):
        write_simple(tmp_path / f"{number}.h5", f"{number - 1}.h5", "data")
    assert_same_bits(read_all(tmp_path / "8.h5"), truth(tmp_path / "8.h5"))
    with pytest.raises(DatasetError, match="nested"):
        read_all(tmp_path / "20.h5")


# --- mappings that only h5py can read ------------------------------------------------------------


@each("num_dim", [0, 1])
@pytest.mark.parametrize("second", [np.s_[3:8], np.s_[4:9, 1:3], np.s_[:, 2], np.s_[9]], ids=str)
def test_overlapping_mappings_come_through_h5py(tmp_path, second, num_dim):
    values = np.arange(40, dtype="<i4").reshape(10, 4)
    layout = h5py.VirtualLayout((10, 4), "<i4")
    for number, where in enumerate([np.s_[:], second]):
        part = (values + 100 * number)[where]
        with h5py.File(tmp_path / f"s{number}.h5", "w") as file:
            file["x"] = part
        layout[where] = h5py.VirtualSource(f"s{number}.h5", "x", part.shape)
    with h5py.File(tmp_path / "virtual.h5", "w") as file:
        file.create_virtual_dataset("data", layout)
    assert_reads_like_h5py(tmp_path / "virtual.h5", num_dim=num_dim, fallback="overlap")


@pytest.mark.parametrize("num_threads", [0, 2])
def test_irregular_selections_within_samples_come_through_h5py(tmp_path, num_threads):
    with h5py.File(tmp_path / "s.h5", "w") as file:
        file["x"] = np.arange(24, dtype="<i4").reshape(8, 3)
    write_irregular(tmp_path / "virtual.h5", "s.h5", "x")
    assert_reads_like_h5py(
        tmp_path / "virtual.h5", num_dim=1, num_threads=num_threads, fallback="blocks"
    )


def test_selections_of_unlike_shape_read_like_h5py(tmp_path):
    """Both have 24 elements, in C order, but other rows."""
    with h5py.File(tmp_path / "s.h5", "w") as file:
        file["x"] = np.arange(24, dtype="<i4").reshape(4, 6)
        layout = h5py.VirtualLayout((8, 3), "<i4")
        layout[...] = h5py.VirtualSource(".", "x", (4, 6))
    with h5py.File(tmp_path / "s.h5", "a") as file:
        file.create_virtual_dataset("data", layout)
    for num_dim in (0, 1):
        found = read_all(tmp_path / "s.h5", num_dim=num_dim)
        assert_same_bits(found, truth(tmp_path / "s.h5", "data", num_dim))


@pytest.mark.slow
def test_extents_of_one_between_others_read_like_h5py(tmp_path):
    """The dimensions of a source are matched with those mapped, whatever ones lie between."""
    shapes = [((4, 1, 5), (1, 4, 5)), ((1, 5, 1), (5,)), ((3, 3, 1), (3, 1, 3)), ((1, 1), (1,))]
    for number, (ours, theirs) in enumerate(shapes):
        path = tmp_path / f"{number}.h5"
        values = np.arange(math.prod(ours), dtype="<i4").reshape(theirs)
        for name in ("contiguous", "chunked"):
            layout = h5py.VirtualLayout(ours, "<i4")
            layout[...] = h5py.VirtualSource(".", name, theirs)
            with h5py.File(path, "a") as file:
                chunks = (1,) * len(theirs) if name == "chunked" else None
                file.create_dataset(name, data=values, chunks=chunks)
                file.create_virtual_dataset(f"virtual {name}", layout)
            for num_dim in range(len(ours)):
                assert_reads_like_h5py(path, f"virtual {name}", num_dim=num_dim)


def test_same_dataset_read_as_itself_and_through_a_mapping(tmp_path):
    values = np.arange(60, dtype="<i4").reshape(10, 6)
    layout = h5py.VirtualLayout((10, 6), "<i4")
    layout[...] = h5py.VirtualSource(".", "x", (10, 6))
    with h5py.File(tmp_path / "v.h5", "w") as file:
        file.create_dataset("x", data=values, chunks=(3, 6), compression="gzip")
        file.create_virtual_dataset("data", layout)
    fields = {"one": "data", "other": "x"}
    options = {"device": "cpu", "num_threads": 2, "batch_size": 3, "shuffle": "full"}
    with AsyncReader(hdf5_path=tmp_path / "v.h5", fields=fields, **options) as reader:
        for batch in reader:
            assert_same_bits(batch.one, values[batch.index])
            assert_same_bits(batch.other, values[batch.index])


# --- damage --------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_threads", [0, 2])
@pytest.mark.parametrize("irregular", [False, True], ids=["regular", "irregular"])
def test_short_chunk_of_a_source_is_an_error_that_names_it(tmp_path, irregular, num_threads):
    values = np.arange(24, dtype="<i4").reshape(8, 3)
    with h5py.File(tmp_path / "s.h5", "w") as file:
        dataset = file.create_dataset("x", data=values, chunks=(4, 3), compression="gzip")
        dataset.id.write_direct_chunk((4, 0), zlib.compress(values[4:].tobytes()[:20]))
    write = write_irregular if irregular else write_simple
    write(tmp_path / "virtual.h5", "s.h5", "x")
    options = {**OPTIONS, "num_threads": num_threads}
    with AsyncReader(hdf5_path=tmp_path / "virtual.h5", **options) as reader:
        assert_same_bits(reader.get_next_batch().data[:3], values[:3])
        with pytest.raises(ReadError, match=r"s\.h5"):
            reader.get_next_batch()


def test_source_that_was_cut_short_is_an_error_that_names_it(tmp_path):
    write_two_sources(tmp_path)
    size = (tmp_path / "b.h5").stat().st_size
    os.truncate(tmp_path / "b.h5", size - 50)
    with pytest.raises(ReadError, match=r"b\.h5"):
        read_all(tmp_path / "virtual.h5")


@pytest.mark.parametrize("extent", [3, 9])
@pytest.mark.parametrize("part", ["all", "a hyperslab"])
def test_source_that_shrank_or_grew_reads_like_h5py(tmp_path, part, extent):
    layout = h5py.VirtualLayout((8, 6), "<i4")
    with h5py.File(tmp_path / "s.h5", "w") as file:
        values = np.arange(30, dtype="<i4").reshape(5, 6)
        file.create_dataset("x", data=values, chunks=(2, 6), maxshape=(None, 6), fillvalue=2)
    source = h5py.VirtualSource("s.h5", "x", (5, 6))
    layout[2:7] = source if part == "all" else source[0:5, 0:6]
    if part == "a hyperslab":
        layout = h5py.VirtualLayout((8, 6), "<i4")
        layout[2:6] = source[1:5]
    with h5py.File(tmp_path / "virtual.h5", "w") as file:
        file.create_virtual_dataset("data", layout, fillvalue=-9)
    with h5py.File(tmp_path / "s.h5", "r+") as file:
        file["x"].resize(extent, 0)
    with h5py.File(tmp_path / "virtual.h5") as file:
        try:
            expected = file["data"][0:8]  # not [...], of which HDF5 makes another selection
        except OSError:
            expected = None
    if expected is None:
        with pytest.raises(H5AsyncError):
            read_all(tmp_path / "virtual.h5")
    else:
        assert_same_bits(read_all(tmp_path / "virtual.h5"), expected)


def test_source_replaced_after_indexing_gives_old_values_or_an_error(tmp_path):
    values = write_two_sources(tmp_path)
    options = {**OPTIONS, "num_threads": 0}
    with AsyncReader(hdf5_path=tmp_path / "virtual.h5", **options) as reader:
        (tmp_path / "b.h5").rename(tmp_path / "old.h5")
        with h5py.File(tmp_path / "b.h5", "w") as file:
            file["x"] = np.full((5, 6), 66, "<i4")
        try:
            found = np.concatenate([batch.data.copy() for batch in reader])
        except ReadError:
            return
        assert_same_bits(found, values)


def test_mapping_of_a_source_with_holes_has_its_fill_value(tmp_path):
    with h5py.File(tmp_path / "s.h5", "w") as file:
        holes = file.create_dataset("x", (8, 3), "<i4", chunks=(2, 2), fillvalue=12)
        holes[2:4, :2] = 1
        file.create_dataset("never", (8, 3), "<i4", fillvalue=13)
    for name in ("x", "never"):
        layout = h5py.VirtualLayout((12, 3), "<i4")
        layout[1:9] = h5py.VirtualSource("s.h5", name, (8, 3))
        with h5py.File(tmp_path / "virtual.h5", "a") as file:
            file.create_virtual_dataset(name, layout, fillvalue=14)
        for num_dim in (0, 1):
            assert_reads_like_h5py(tmp_path / "virtual.h5", name, num_dim=num_dim)


def test_no_samples(tmp_path):
    layout = h5py.VirtualLayout((0, 3), "<i4")
    with h5py.File(tmp_path / "virtual.h5", "w") as file:
        file.create_virtual_dataset("data", layout)
    with AsyncReader(hdf5_path=tmp_path / "virtual.h5", num_threads=0, **OPTIONS) as reader:
        assert reader.num_samples == len(reader) == 0
