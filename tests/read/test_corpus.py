"""Every file of the corpus, read in order and shuffled, in the caller and in threads.

The truth is h5py. Each file is made when the first test wants it, once a session. Where a file
needs hdf5plugin and it is missing, its tests are skipped, or fail with H5ASYNC_REQUIRE_EXTRAS=1.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from conftest import assert_epoch_is, poison, truth
from corpus import QUIRKS, Quirk

from h5async import AsyncReader, H5AsyncError

READABLE = {name: q for name, q in QUIRKS.items() if q.way in ("direct", "h5py")}
UNREADABLE = {name: q for name, q in QUIRKS.items() if q.way == "unreadable"}
REFUSED = {name: q for name, q in QUIRKS.items() if not isinstance(q.way, str)}

MOST_NBYTES_ON_DISK = 250_000  # holes do not count

PathOf = Callable[[Quirk], Path]
ValuesOf = Callable[[Quirk, str, int], np.ndarray]


@pytest.fixture(scope="session")
def path_of(tmp_path_factory: pytest.TempPathFactory) -> PathOf:
    """Return what makes the file of a quirk, or finds it made; it may skip the test."""
    folder = tmp_path_factory.mktemp("corpus")

    @cache
    def make(quirk: Quirk) -> Path | ModuleNotFoundError:
        (folder / quirk.name).mkdir(exist_ok=True)
        try:
            return quirk.write(folder / quirk.name)
        except ModuleNotFoundError as error:
            return error

    def find(quirk: Quirk) -> Path:
        found = make(quirk)
        if isinstance(found, Path):
            return found
        if found.name != "hdf5plugin":
            raise found
        if os.environ.get("H5ASYNC_REQUIRE_EXTRAS") == "1":
            pytest.fail(f"H5ASYNC_REQUIRE_EXTRAS=1, but {found}", pytrace=False)
        pytest.skip(str(found))

    return find


@pytest.fixture(scope="session")
def values_of(path_of: PathOf) -> ValuesOf:
    """Return what gives all values of a dataset as h5py reads them, once."""

    @cache
    def read(quirk: Quirk, name: str, num_dim: int) -> np.ndarray:
        return truth(path_of(quirk), name, num_dim)

    return read


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


@pytest.mark.parametrize("num_threads", [0, 3])
@pytest.mark.parametrize("shuffle", [False, "full"], ids=["in_order", "shuffled"])
@pytest.mark.parametrize("quirk", READABLE.values(), ids=READABLE)
def test_reads_like_h5py(
    quirk: Quirk, shuffle: Any, num_threads: int, path_of: PathOf, values_of: ValuesOf
):
    path = path_of(quirk)
    for name in quirk.names:
        for num_dim in quirk.num_dims:
            expected = values_of(quirk, name, num_dim)
            options = {"batch_size": batch_size_for(len(expected)), "num_threads": num_threads}
            with reader_of(quirk, path, name, num_dim, shuffle=shuffle, **options) as reader:
                poison(reader)
                assert_epoch_is(reader, expected, in_order=not shuffle)
                reason = reader.layouts["data"].fallback_reason
                if quirk.way == "direct":
                    assert reason is None
                    assert reader.fallback_reads == 0
                else:
                    assert reason is not None
                    assert reader.fallback_reads >= len(reader)


@pytest.mark.parametrize("quirk", REFUSED.values(), ids=REFUSED)
def test_is_refused(quirk: Quirk, path_of: PathOf):
    path = path_of(quirk)
    for name in quirk.names:
        with pytest.raises(quirk.way) as caught:
            reader_of(quirk, path, name, 0).close()
        assert str(path) in str(caught.value)
        assert f'"{name}"' in str(caught.value)


@pytest.mark.parametrize("num_threads", [0, 3])
@pytest.mark.parametrize("quirk", UNREADABLE.values(), ids=UNREADABLE)
def test_is_an_error_and_no_wrong_value(quirk: Quirk, num_threads: int, path_of: PathOf):
    path = path_of(quirk)
    options = {"batch_size": 5, "num_threads": num_threads}
    with pytest.raises(H5AsyncError) as caught, reader_of(quirk, path, "data", 0, **options) as r:
        for _ in r:
            pass
    assert str(path) in str(caught.value)
    assert '"data"' in str(caught.value)


@pytest.mark.parametrize("quirk", READABLE.values(), ids=READABLE)
def test_file_is_small_and_varied(quirk: Quirk, path_of: PathOf, values_of: ValuesOf):
    """What a reader of zeros, or of one row for all, would get right proves little."""
    folder = path_of(quirk).parent
    assert sum(file.stat().st_blocks * 512 for file in folder.rglob("*")) < MOST_NBYTES_ON_DISK
    for name in quirk.names:
        rows = values_of(quirk, name, 0)
        assert quirk.hollow or len(rows) < 2 or len({row.tobytes() for row in rows}) > 1


def test_the_corpus_is_deterministic(tmp_path: Path):
    quirk = QUIRKS["chain_shuffle_then_deflate"]
    contents = []
    for folder in (tmp_path / "a", tmp_path / "b"):
        folder.mkdir()
        with h5py.File(quirk.write(folder)) as file:
            contents.append(file["data"][...].tobytes())
    assert contents[0] == contents[1]
