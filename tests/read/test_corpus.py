"""Every file of the corpus, read in order and shuffled, in the caller and in threads.

The truth is h5py. Where a file needs hdf5plugin and it is missing, its test is skipped, or fails
with H5ASYNC_REQUIRE_EXTRAS=1.
"""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from conftest import assert_epoch_is, poison, truth
from corpus import QUIRKS, Quirk

from h5async import AsyncReader, H5AsyncError
from h5async.core.binding import can_decode, load_core

READABLE = {name: q for name, q in QUIRKS.items() if q.way in ("direct", "h5py")}
UNREADABLE = {name: q for name, q in QUIRKS.items() if q.way == "unreadable"}
REFUSED = {name: q for name, q in QUIRKS.items() if not isinstance(q.way, str)}

MOST_NBYTES_ON_DISK = 250_000  # holes do not count

# The order, and the number of threads.
WAYS_TO_READ = [(False, 0), (False, 3), ("full", 0), ("full", 3)]


def written(quirk: Quirk, folder: Path) -> Path:
    """Make the file of a quirk; it may skip the test."""
    try:
        return quirk.write(folder)
    except ModuleNotFoundError as error:
        if error.name != "hdf5plugin":
            raise
        if os.environ.get("H5ASYNC_REQUIRE_EXTRAS") == "1":
            pytest.fail(f"H5ASYNC_REQUIRE_EXTRAS=1, but {error}", pytrace=False)
        pytest.skip(str(error))


def reader_of(quirk: Quirk, path: Path, name: str, num_dim: int, **options: Any) -> AsyncReader:
    more = quirk.options(path.parent) if quirk.options else {}
    return AsyncReader(
        hdf5_path=path,
        data_field=name,
        labels_field=None,
        num_dim=num_dim,
        device="cpu",
        prefetch=2,
        **options,
        **more,
    )


def batch_size_for(num_samples: int) -> int:
    """Return a size that leaves a short last batch, and gives few batches."""
    size = max(4, num_samples // 5)
    while num_samples > 1 and num_samples % size == 0:
        size += 1
    return size


@pytest.mark.parametrize("quirk", READABLE.values(), ids=READABLE)
def test_reads_like_h5py(quirk: Quirk, tmp_path: Path):
    path = written(quirk, tmp_path)
    assert sum(file.stat().st_blocks * 512 for file in tmp_path.rglob("*")) < MOST_NBYTES_ON_DISK
    for name, num_dim in itertools.product(quirk.names, quirk.num_dims):
        expected = truth(path, name, num_dim)
        if num_dim == 0:
            assert is_varied(quirk, expected)
        for shuffle, num_threads in WAYS_TO_READ:
            read = f"{name}, {num_dim=}, {shuffle=}, {num_threads=}"
            try:
                assert_is_read(quirk, path, name, num_dim, expected, shuffle, num_threads)
            except Exception as error:
                error.add_note(f"({read})")
                raise


def is_varied(quirk: Quirk, rows: np.ndarray) -> bool:
    """Tell whether a reader of zeros, or of one row for all, would be found out."""
    return quirk.hollow or len(rows) < 2 or len({row.tobytes() for row in rows}) > 1


def is_by_core(quirk: Quirk, reader: AsyncReader) -> bool:
    """Tell whether the core reads a file of the corpus, if it is there, and has its filters."""
    swaps_only = quirk.name.endswith(("<i4 as >i4", "<f4 as >f4", "<i4_as_>i4", "<f4_as_>f4"))
    # By HDF5's conversions:
    is_converted = quirk.name.startswith("virtual_of_another_type") and not swaps_only
    leaves = reader.layouts["data"].origins()
    have_filters = all(can_decode(entry) for leaf in leaves for entry in leaf.filters)
    return load_core() is not None and have_filters and not is_converted


def assert_is_read(
    quirk: Quirk,
    path: Path,
    name: str,
    num_dim: int,
    expected: np.ndarray,
    shuffle: Any,
    num_threads: int,
) -> None:
    options = {"batch_size": batch_size_for(len(expected)), "num_threads": num_threads}
    with reader_of(quirk, path, name, num_dim, shuffle=shuffle, **options) as reader:
        poison(reader)
        assert_epoch_is(reader, expected, in_order=not shuffle)
        reason = reader.layouts["data"].fallback_reason
        if quirk.way == "direct" and is_by_core(quirk, reader):
            assert reason is None
            assert reader.fallback_reads == 0
        elif quirk.way == "direct":
            assert reader.fallback_reads or reader.stats().ways["data"] == "memory"
        else:
            assert reason is not None
            assert reader.fallback_reads >= len(reader)


@pytest.mark.parametrize("quirk", REFUSED.values(), ids=REFUSED)
def test_is_refused(quirk: Quirk, tmp_path: Path):
    path = written(quirk, tmp_path)
    for name in quirk.names:
        with pytest.raises(quirk.way) as caught:
            reader_of(quirk, path, name, 0).close()
        assert str(path) in str(caught.value)
        assert f'"{name}"' in str(caught.value)


@pytest.mark.parametrize("quirk", UNREADABLE.values(), ids=UNREADABLE)
def test_is_an_error_and_no_wrong_value(quirk: Quirk, tmp_path: Path):
    path = written(quirk, tmp_path)
    for num_threads in (0, 3):
        options = {"batch_size": 5, "num_threads": num_threads}
        with (
            pytest.raises(H5AsyncError) as caught,
            reader_of(quirk, path, "data", 0, **options) as reader,
        ):
            for _ in reader:
                pass
        assert str(path) in str(caught.value)
        assert '"data"' in str(caught.value)


def test_the_corpus_is_deterministic(tmp_path: Path):
    quirk = QUIRKS["chain_shuffle_then_deflate"]
    contents = []
    for folder in (tmp_path / "a", tmp_path / "b"):
        folder.mkdir()
        with h5py.File(quirk.write(folder)) as file:
            contents.append(file["data"][...].tobytes())
    assert contents[0] == contents[1]
