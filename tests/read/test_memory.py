"""Memory: on the direct way, no batch takes memory of the size of a batch or of a chunk.

NumPy reports what it allocates to tracemalloc. A chunk has 1 MiB here and a batch 4 MiB or more;
what is allowed is what plans and NumPy's own small buffers need.
"""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np
import pytest
from conftest import assert_same_bits, require_extra, truth
from hdf5files import type_for_h5py

from h5async import AsyncReader, Field

KIB, MIB = 1024, 1024 * 1024
ALLOWED_NBYTES = 192 * KIB


class Case(NamedTuple):
    """A dataset, and how it is read."""

    shape: tuple[int, ...]
    batch_size: int
    storage: dict[str, Any]
    dtype: str = "u1"
    field: dict[str, Any] = {}  # noqa: RUF012 (never changed)
    shuffle: bool = True
    libver: str = "earliest"
    plugin: str = ""  # the name of a filter of hdf5plugin
    allowed_nbytes: int = ALLOWED_NBYTES


GZIP = {"compression": "gzip", "compression_opts": 1, "shuffle": True}

CASES = {
    "contiguous large rows": Case((96, 128 * KIB), 32, {}),
    "contiguous large rows in order": Case((96, 128 * KIB), 32, {}, shuffle=False),
    "contiguous small rows": Case((3072, 4 * KIB), 1024, {}),
    "contiguous small rows in order": Case((3072, 4 * KIB), 1024, {}, shuffle=False),
    "contiguous columns": Case((8 * KIB, 1536), 512, {}, field={"num_dim": 1}),
    "large rows of raw chunks": Case((96, 128 * KIB), 32, {"chunks": (8, 128 * KIB)}),
    "small rows of raw chunks": Case((3072, 4 * KIB), 1024, {"chunks": (256, 4 * KIB)}),
    "raw chunks with several pieces": Case((1024, 16 * KIB), 256, {"chunks": (128, 8 * KIB)}),
    "raw chunks with large pieces": Case((48, 384 * KIB), 12, {"chunks": (8, 128 * KIB)}),
    "raw chunks with samples last": Case(
        (8 * KIB, 1536), 512, {"chunks": (8 * KIB, 128)}, field={"num_dim": 1}
    ),
    "gzip, whole chunks": Case(
        (1536, 8 * KIB), 512, {"chunks": (128, 8 * KIB), **GZIP}, shuffle=False
    ),
    "gzip, parts of chunks": Case((1536, 8 * KIB), 512, {"chunks": (128, 8 * KIB), **GZIP}),
    "gzip, in order, across chunks": Case(
        (1700, 8 * KIB), 600, {"chunks": (128, 8 * KIB), **GZIP}, shuffle=False
    ),
    "gzip, several pieces": Case((1024, 16 * KIB), 256, {"chunks": (128, 8 * KIB), **GZIP}),
    "gzip, four-byte elements": Case(
        (1536, 2 * KIB), 512, {"chunks": (128, 2 * KIB), **GZIP}, dtype="i4"
    ),
    "gzip, three-byte elements": Case(
        (1536, 2731), 512, {"chunks": (128, 2731), **GZIP}, dtype="V3"
    ),
    "lzf and checksum": Case(
        (1536, 8 * KIB),
        512,
        {"chunks": (128, 8 * KIB), "compression": "lzf", "fletcher32": True},
    ),
    "permuted and cast": Case(
        (1536, 32, 32, 3), 512, {}, field={"axes": (0, 3, 1, 2), "dtype": "f4"}
    ),
    "permuted, cast and scaled, from gzip": Case(
        (1536, 64, 64, 2),
        512,
        {"chunks": (128, 64, 64, 2), **GZIP},
        field={"axes": (0, 3, 1, 2), "scale": (1 / 255, 1 / 128), "offset": -0.5},
    ),
    "of foreign byte order": Case((1536, 2 * KIB), 512, {}, dtype=">i4"),
    "booleans": Case((1536, 8 * KIB), 512, {}, dtype="?"),
    "scaleoffset": Case(  # each thread unpacks in blocks, whatever the chunk's size
        (1536, 8 * KIB),
        512,
        {"chunks": (512, 8 * KIB), "scaleoffset": 0},
        allowed_nbytes=2 * 768 * KIB,
    ),
    **{
        name: Case((1536, 8 * KIB), 512, {"chunks": (128, 8 * KIB)}, plugin=name)
        for name in ("Bitshuffle", "Blosc", "Blosc2", "LZ4", "Zstd")
    },
    "never written": Case((3072, 4 * KIB), 1024, {"chunks": (256, 4 * KIB), "fillvalue": 7}),
    "gzip, never written": Case(
        (3072, 4 * KIB), 1024, {"chunks": (256, 4 * KIB), "fillvalue": 7, **GZIP}
    ),
}


def write(path: Path, case: Case, name: str) -> None:
    rng = np.random.default_rng(0)
    dtype = np.dtype(case.dtype)
    plugin = getattr(require_extra("hdf5plugin"), case.plugin)() if case.plugin else {}
    with h5py.File(path, "w", libver=case.libver) as file:
        dataset = file.create_dataset("x", case.shape, dtype, **case.storage, **plugin)
        if "never written" in name:
            return
        values = rng.integers(0, 16, (math.prod(case.shape), dtype.itemsize), "u1")
        if dtype.kind == "b":
            values &= 1
        dataset[...] = values.reshape(-1).view(dtype).reshape(case.shape)


def peak_of_an_epoch(reader: AsyncReader, after: Callable[[], None] = lambda: None) -> int:
    """Bytes that an epoch takes at most, beyond what was there before it."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for batch in reader:
            assert batch.size
            del batch
        after()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


def open_reader(path: Path, case: Case, num_threads: int, **options: Any) -> AsyncReader:
    return AsyncReader(
        hdf5_path=path,
        fields={"x": Field("x", **case.field)},
        batch_size=case.batch_size,
        shuffle=case.shuffle,
        num_threads=num_threads,
        device="cpu",
        **options,
    )


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", CASES)
def test_later_epochs_take_no_memory(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    path = tmp_path / "f.h5"
    write(path, case, name)
    with h5py.File(path) as file:
        chunks = file["x"].chunks
        if chunks:
            assert math.prod(chunks) * file["x"].dtype.itemsize >= MIB - 4 * KIB
    for num_threads in (0, 2):
        with open_reader(path, case, num_threads) as reader:
            assert reader.layouts["x"].fallback_reason is None
            for batch in reader:
                assert batch.x.nbytes >= 4 * MIB - 4 * KIB or batch.last
            peaks = [peak_of_an_epoch(reader) for _ in range(2)]
            assert max(peaks) < case.allowed_nbytes, f"{num_threads} threads: {peaks}"


def test_the_batches_are_right_meanwhile(tmp_path: Path) -> None:
    case = CASES["gzip, parts of chunks"]
    path = tmp_path / "f.h5"
    write(path, case, "")
    with open_reader(path, case, 2) as reader:
        for batch in reader:
            assert_same_bits(batch.x, truth(path, "x")[batch.index])


# --- the test can tell ------------------------------------------------------------------------


def test_what_h5py_reads_is_seen(tmp_path: Path) -> None:
    case = Case((512, 8 * KIB), 512, {"chunks": (128, 8 * KIB)})
    path = tmp_path / "f.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("x", case.shape, type_for_h5py(), **case.storage)[...] = 3
    with open_reader(path, case, 0) as reader:
        assert reader.layouts["x"].fallback_reason is not None
        assert peak_of_an_epoch(reader) > 2 * ALLOWED_NBYTES


@pytest.mark.parametrize("num_threads", [0, 2])
def test_a_postprocess_that_takes_memory_is_seen(tmp_path: Path, num_threads: int) -> None:
    case = CASES["contiguous small rows"]
    path = tmp_path / "f.h5"
    write(path, case, "")
    with open_reader(path, case, num_threads, postprocess=lambda x: x ^ 1) as reader:
        assert peak_of_an_epoch(reader) >= 4 * MIB
