"""Regions of rows, against what NumPy cuts out of h5py's rows, however these are stored."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from cases import each
from conftest import assert_same_bits, poison, reader_of, truth
from corpus import QUIRKS
from hdf5files import write_rows
from rowparts import assert_are_parts

from h5async import ConfigError, DatasetError, Field, RaggedField

READABLE = {name: q for name, q in QUIRKS.items() if q.way in ("direct", "h5py")}


def a_region(shape: tuple[int, ...], num_dim: int, rng: np.random.Generator) -> dict[int, slice]:
    """Return slices along some dimensions of a row, by their numbers in the dataset."""
    found = {}
    for dim, size in enumerate(shape):
        if dim != num_dim and size and rng.random() < 0.8:
            start = int(rng.integers(size))
            stop = int(rng.integers(start + 1, size + 1))
            stop = stop - size if stop < size and rng.random() < 0.3 else stop
            found[dim] = slice(start, stop or None, [None, 1, 2, 3][rng.integers(4)])
    return found


def cut(rows: np.ndarray, region: dict[int, slice], num_dim: int) -> np.ndarray:
    """Return the region of rows whose sample dimension was moved to the front."""
    places = [num_dim, *(dim for dim in range(rows.ndim) if dim != num_dim)]
    return rows[tuple(region.get(dim, slice(None)) for dim in places)]


@pytest.mark.sampled(60)
@pytest.mark.parametrize("quirk", READABLE.values(), ids=READABLE)
def test_every_file_of_the_corpus(quirk: Any, tmp_path: Path):
    """Regions, and parts at random places."""
    path = quirk.write(tmp_path)
    rng = np.random.default_rng(len(quirk.name))
    more = quirk.options(path.parent) if quirk.options else {}
    for name, num_dim in itertools.product(quirk.names, quirk.num_dims):
        expected = truth(path, name, num_dim)
        num_dim %= expected.ndim
        shape = np.moveaxis(expected, 0, num_dim).shape
        dims = [dim for dim in range(expected.ndim) if dim != num_dim]
        for shuffle, num_threads in (False, 0), ("full", 2), ("window", 2):
            region = a_region(shape, num_dim, rng)
            fields = {"part": Field(name, num_dim=num_dim, region=region)} if region else {}
            sizes = [int(rng.integers(1, n + 1)) for n in expected.shape[1:] if n]
            if dims and 0 not in expected.shape:
                crop = dict(zip(dims, sizes, strict=True))
                fields["crop"] = Field(name, num_dim=num_dim, crop=crop)
            options = {"shuffle": shuffle, "num_threads": num_threads, "batch_size": 5, **more}
            with reader_of(
                path, fields=fields or {"whole": Field(name, num_dim)}, **options
            ) as reader:
                poison(reader)
                for batch in reader:
                    if "part" in fields:
                        wanted = cut(expected[batch.index], region, num_dim)
                        assert_same_bits(np.asarray(batch.part), np.ascontiguousarray(wanted))
                    if "crop" in fields:
                        assert_are_parts(batch, "crop", expected, sizes)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray]:
    path = tmp_path_factory.mktemp("regions") / "rows.h5"
    return path, write_rows(path)


REGION = {"lat": slice(3, -2, 2), "lon": slice(9, 20)}


@each("io", ["auto", "pread", "map"])
@each("name", ["contiguous", "chunks", "last"])
def test_by_name_of_dimensions(stored: tuple[Path, np.ndarray], name: str, io: Any):
    path, rows = stored
    num_dim = "time" if name == "last" else 0
    fields = {"x": Field(name, num_dim=num_dim, region=REGION)}
    with reader_of(path, fields=fields, shuffle="full", io=io, batch_size=4) as reader:
        for batch in reader:
            assert_same_bits(batch.x, rows[batch.index, 3:-2:2, 9:20])
        assert_same_bits(reader.read([5, 3]).x, rows[[5, 3], 3:-2:2, 9:20])


def test_only_the_bytes_of_a_region_are_read(stored: tuple[Path, np.ndarray]):
    path, rows = stored
    region = {1: slice(8, 16), 2: slice(8, 16)}
    raw_nbytes = 8 * 8 * 4 * 17
    for name, nbytes in ("contiguous", raw_nbytes), ("raw", raw_nbytes), ("chunks", 0):
        with h5py.File(path) as file:
            for number in range(0 if nbytes else file[name].id.get_num_chunks()):
                chunk = file[name].id.get_chunk_info(number)
                nbytes += chunk.size * (chunk.chunk_offset[1:] == (8, 8))
        for io in "auto", "pread":
            fields = {"x": Field(name, region=region)}
            with reader_of(path, fields=fields, io=io, num_threads=0, batch_size=17) as reader:
                assert_same_bits(reader.get_next_batch().x, rows[:, 8:16, 8:16])
                assert reader.stats().read_nbytes == nbytes


def test_of_members_pairs_and_compact_values(stored: tuple[Path, np.ndarray]):
    path, rows = stored
    cases = {
        "compound/v": Field("compound/v", region={1: slice(4, 15, 2), 2: slice(5, 25)}),
        "pairs": Field("pairs", num_dim=(0, 1), region={2: slice(4, 15, 2), 3: slice(5, 25)}),
        "compact": Field("compact", region={1: slice(4), 2: slice(1, 6, 2)}),
    }
    for name, field in cases.items():
        part = rows[:, :4, 1:6:2] if name == "compact" else rows[:, 4:15:2, 5:25]
        with reader_of(path, fields={"x": field}, shuffle=True, batch_size=3) as reader:
            for batch in reader:
                assert_same_bits(batch.x, part[batch.index])


@pytest.mark.usefixtures("h5py_way")
@each("name", ["contiguous", "across", "last", "compound/v", "pairs"])
def test_through_h5py(stored: tuple[Path, np.ndarray], name: str):
    path, rows = stored
    num_dim: Any = {"last": 2, "pairs": (0, 1)}.get(name, 0)
    first = {"last": 0, "pairs": 2}.get(name, 1)
    region = {first: slice(4, 15, 2), first + 1: slice(5, 25)}
    fields = {"x": Field(name, num_dim=num_dim, region=region)}
    with reader_of(path, fields=fields, shuffle=True, batch_size=3) as reader:
        for batch in reader:
            assert_same_bits(batch.x, rows[batch.index, 4:15:2, 5:25])
        assert reader.fallback_reads


def test_of_several_files_and_virtual_datasets(tmp_path: Path):
    rows = np.random.default_rng(1).integers(0, 99, (12, 8, 10), "i2")
    for number in range(3):
        with h5py.File(tmp_path / f"part{number}.h5", "w") as file:
            own = rows[4 * number : 4 * number + 4]
            file.create_dataset("x", data=own, chunks=(number + 1, 3, 10), compression=1)
    layout = h5py.VirtualLayout((12, 8, 10), "i2")
    for number in range(3):  # halves of rows, in turns
        source = h5py.VirtualSource(tmp_path / f"part{number}.h5", "x", (4, 8, 10))
        layout[4 * number : 4 * number + 4, :, ::2] = source[:, :, :5]
        layout[4 * number : 4 * number + 4, :5, 1::2] = source[:, :5, 5:]
    with h5py.File(tmp_path / "virtual.h5", "w") as file:
        file.create_virtual_dataset("x", layout, fillvalue=7)
    for files in [tmp_path / f"part{number}.h5" for number in range(3)], tmp_path / "virtual.h5":
        several = files if isinstance(files, list) else [files]
        expected = np.concatenate([truth(one, "x") for one in several])
        for region in (
            {1: slice(2, 7), 2: slice(1, 9, 3)},
            {2: slice(4, 5)},
            {1: slice(6, 8), 2: slice(1, None, 2)},
        ):
            with reader_of(
                files, fields={"x": Field("x", region=region)}, shuffle="window", batch_size=5
            ) as reader:
                for batch in reader:
                    assert_same_bits(batch.x, cut(expected, region, 0)[batch.index])


@pytest.mark.parametrize(
    ("region", "error", "words"),
    [
        ({}, ConfigError, "must map dimensions to slices"),
        ({1: 4}, ConfigError, "must map dimensions to slices"),
        ((slice(4), slice(4)), ConfigError, "must map dimensions to slices"),
        ({1: slice(4, 2)}, ConfigError, "region selects nothing of dimension 1, which has 23"),
        ({1: slice(9, 0, -1)}, ConfigError, "steps are 1 or more"),
        ({0: slice(4)}, ConfigError, "dimension 0 counts the samples"),
        ({3: slice(4)}, ConfigError, "there is no dimension 3"),
        (
            {1: slice(4), -2: slice(9)},
            ConfigError,
            r"must name each dimension once; found \(1, -2\)",
        ),
        ({"lat": slice(4), 1: slice(9)}, ConfigError, "must name each dimension once"),
        ({"depth": slice(4)}, DatasetError, 'there is no dimension "depth"'),
    ],
)
def test_wrong_regions_are_refused(
    stored: tuple[Path, np.ndarray], region: Any, error: type[Exception], words: str
):
    with pytest.raises(error, match=words):
        reader_of(stored[0], fields={"x": Field("chunks", region=region)})


def test_other_kinds_of_fields_have_none():
    with pytest.raises(ConfigError, match="region is for fields whose samples have one shape"):
        RaggedField("x", region={1: slice(4)})  # type: ignore[call-arg]
