"""`open_file` and the engine of xarray over HTTP, compared with local files."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path

import h5py
import numpy as np
import pytest
from conftest import require_extra
from httpserver import Server, serving

import h5async

xarray = require_extra("xarray")
require_extra("dask")
require_extra("h5netcdf")
require_extra("obstore")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with serving(folder) as running:
        yield running


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("web")
    for number in range(3):
        values = np.random.default_rng(number).normal(280, 10, (40, 12, 20))
        made = xarray.Dataset(
            {
                "t2m": (("time", "lat", "lon"), values),
                "name": ("lat", [f"é{i}" for i in range(12)]),
            },
            coords={"lat": np.linspace(-90, 90, 12)},
        )
        packed = {"dtype": "i2", "scale_factor": 0.01, "add_offset": 280.0, "_FillValue": -32768}
        encoding = {"t2m": packed | {"zlib": True, "chunksizes": (7, 12, 20)}}
        made.to_netcdf(found / f"{number}.nc", engine="h5netcdf", encoding=encoding)
    return found


def test_selections(server: Server, folder: Path, tmp_path: Path):
    for options in ({}, {"cache": "disk", "cache_dir": tmp_path}):
        with (
            h5py.File(folder / "0.nc") as expected,
            h5async.open_file(server.url("0.nc"), num_threads=2, **options) as found,
        ):
            assert list(found) == list(expected)
            for name in ("t2m", "lat", "name"):
                for key in ((), 3, slice(1, None, 2), [0, 5]):
                    np.testing.assert_array_equal(found[name][key], expected[name][key])
            assert found["t2m"].compression == "gzip"
            data = pickle.loads(pickle.dumps(found["t2m"]))
            np.testing.assert_array_equal(data[5:9], expected["t2m"][5:9])


def test_several_files_of_xarray(server: Server, folder: Path):
    names, how = ["0.nc", "1.nc", "2.nc"], {"combine": "nested", "concat_dim": "run"}
    urls, paths = [server.url(name) for name in names], [folder / name for name in names]
    with (
        xarray.open_mfdataset(urls, engine="h5async", parallel=True, **how) as found,
        xarray.open_mfdataset(paths, engine="h5netcdf", **how) as expected,
    ):
        means = found.t2m.mean("time").compute(scheduler="threads", num_workers=2)
        xarray.testing.assert_allclose(means, expected.t2m.mean("time"))
        xarray.testing.assert_identical(found.load(), expected.load())


def test_a_file_is_opened_once(server: Server, folder: Path):
    server.log()
    with xarray.open_dataset(server.url("0.nc"), engine="h5async") as found:
        found.load()
        names = list(found.variables)
    assert server.log().count == 1 + len(names)
    with h5async.open_file(server.url("0.nc"), num_threads=1) as file:
        for name in names:
            file[name][()]
        assert server.log().count == len(names)  # strings were in what was fetched first
        old = file["t2m"]
        server.put("0.nc", (folder / "1.nc").read_bytes())
        with pytest.raises(h5async.ReadError, match="replaced"):
            file["lat"][()], old[()]
        with h5async.open_file(server.url("0.nc")) as new, h5py.File(folder / "1.nc") as expected:
            np.testing.assert_array_equal(new["t2m"][()], expected["t2m"][()])
    server.put("0.nc", (folder / "0.nc").read_bytes())


def test_what_xarray_reads_is_kept_on_disk(server: Server, folder: Path, tmp_path: Path):
    options = {"cache_dir": tmp_path, "storage_options": {}}
    with (
        xarray.open_dataset(folder / "0.nc", engine="h5netcdf") as expected,
        xarray.open_dataset(server.url("0.nc"), engine="h5async", backend_kwargs=options) as found,
    ):
        copy = pickle.loads(pickle.dumps(found))
        for data in (found, copy):
            xarray.testing.assert_identical(data.load(), expected.load())
    assert list(tmp_path.glob("*.mirror"))
