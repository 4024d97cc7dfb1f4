"""Files in real object stores, which check keys and tags: right values, or the right error."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from bucketservers import SERVERS, Bucket, program
from conftest import assert_epoch_is, require_extra, truth

from h5async import AsyncReader, ReadError
from h5async.config.files import SourceName
from h5async.core.binding import Core
from h5async.io.stores import store_of
from h5async.read.farsources import http_client

obstore = require_extra("obstore")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("file") / "a.h5"
    rng = np.random.default_rng(1)
    with h5py.File(path, "w") as file:
        rows = rng.integers(0, 1 << 31, (90, 1000), "i4")
        file.create_dataset("data", data=rows, chunks=(7, 1000), compression="gzip")
        file["raw"] = rows
    return path


@pytest.fixture(scope="module", params=SERVERS)
def bucket(request: pytest.FixtureRequest, tmp_path_factory: Any, path: Path) -> Iterator[Bucket]:
    """Return a bucket with a file; SeaweedFS must be where all that is optional must be."""
    if program(request.param) is None:
        is_due = request.param == "weed" and os.environ.get("H5ASYNC_REQUIRE_EXTRAS") == "1"
        (pytest.fail if is_due else pytest.skip)(f"needs {request.param}")
    with SERVERS[request.param](tmp_path_factory.mktemp("store")) as bucket:
        store = obstore.store.from_url(bucket.url, **bucket.options)
        for name in ("a.h5", "some/b.h5", "some/c d.h5"):
            obstore.put(store, name, path.read_bytes())
        yield bucket


def reader_of(bucket: Bucket, name: str = "a.h5", **options: Any) -> AsyncReader:
    return AsyncReader(
        hdf5_path=f"{bucket.url}/{name}",
        batch_size=8,
        **{"labels_field": None, "storage_options": bucket.options, **options},
    )


@pytest.mark.parametrize("name", ["data", "raw"])
def test_values(bucket: Bucket, path: Path, name: str) -> None:
    with reader_of(bucket, data_field=name, shuffle="full") as reader:
        assert_epoch_is(reader, truth(path, name), in_order=False)


def test_globs(bucket: Bucket, path: Path) -> None:
    with reader_of(bucket, "some/*.h5") as reader:
        assert_epoch_is(reader, np.concatenate([truth(path)] * 2))


@pytest.mark.parametrize(
    ("url", "options"), [("", {"storage_options": None}), ("/none.h5", {}), ("-none/a.h5", {})]
)
def test_wrong_names_and_keys(bucket: Bucket, url: str, options: dict[str, Any]) -> None:
    options = {"storage_options": bucket.wrong if options else bucket.options}
    url = f"{bucket.url}{url or '/a.h5'}"
    with pytest.raises(ReadError) as caught:
        AsyncReader(hdf5_path=url, labels_field=None, **options)
    assert url in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_object_that_is_replaced(bucket: Bucket, path: Path, tmp_path: Path) -> None:
    """It is an error, never values of both."""
    name, other = "replaced.h5", tmp_path / "other.h5"
    with h5py.File(path) as old, h5py.File(other, "w") as new:
        new["raw"] = old["raw"][...][::-1]
    store = obstore.store.from_url(bucket.url, **bucket.options)
    obstore.put(store, name, path.read_bytes())
    expected = truth(path, "raw")

    def read(reader: AsyncReader, batches: int) -> None:
        for _ in range(batches):
            batch = reader.get_next_batch()
            assert np.array_equal(batch.data, expected[batch.index])

    # Little is kept, so that the object is asked for again.
    with reader_of(bucket, name, data_field="raw", fetch_bytes=1 << 14) as reader:
        read(reader, 1)
        obstore.put(store, name, other.read_bytes())
        with pytest.raises(ReadError, match=name):
            read(reader, 20 * len(reader))


def test_signed_urls(bucket: Bucket, path: Path, core: Core, monkeypatch: Any) -> None:
    """Ranges come by them, without the store's client."""
    client = http_client(core)
    if client is None:
        pytest.skip("needs libcurl")
    # (For Azure, obstore signs names with spaces wrongly: then its client gets the ranges.)
    key = "some/c d.h5" if bucket.url.startswith("s3") else "some/b.h5"
    name, content = SourceName(f"{bucket.url}/{key}", bucket.options), path.read_bytes()
    source = store_of(name).open(name)
    monkeypatch.setattr(source, "get_ranges", None)
    quick = client.quicker(source, name)
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(quick.get_ranges, [100_000, 7], [5000, 1]).result()
    assert [bytes(memoryview(part)) for part in found] == [content[100_000:105_000], content[7:8]]
    quick.close()
    client.close()
