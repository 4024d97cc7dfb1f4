"""The engine of xarray: the same Datasets as by its own engines, of files of all kinds."""

from __future__ import annotations

import pickle
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import hypothesis.strategies as st
import numpy as np
import pytest
from conftest import require_extra
from hypothesis import given
from netcdf import netcdf4_process

from h5async import UnsafeFileError

xarray = require_extra("xarray")
dask = require_extra("dask")
require_extra("h5netcdf")


def weather(path: Path, **encoding: Any) -> None:
    rng = np.random.default_rng(2)
    hours = np.arange(40) * np.timedelta64(6, "h")
    made = xarray.Dataset(
        {
            "t2m": (("time", "lat", "lon"), rng.normal(280, 10, (40, 12, 20))),
            "mask": (("lat", "lon"), rng.random((12, 20)) > 0.5),
            "name": (("lat",), np.array([f"é{i}" for i in range(12)], object)),
            "code": (("lon",), np.array([f"{i:03d}" for i in range(20)], "S3")),
            "scalar": ((), 3),
        },
        coords={
            "time": np.datetime64("2000-01-01", "ns") + hours,
            "lat": np.linspace(-90, 90, 12),
            "lon": np.arange(20) * 2.0,
        },
        attrs={"title": "weather", "list": [1, 2, 3], "one": np.float32(2)},
    )
    made.t2m.attrs.update(units="K", valid=[0, 400], comment="")
    packed = {"dtype": "i2", "scale_factor": 0.01, "add_offset": 280.0, "_FillValue": -32768}
    packed |= {"zlib": True, "chunksizes": (7, 12, 20)} | encoding
    made.to_netcdf(path, engine="h5netcdf", unlimited_dims=["time"], encoding={"t2m": packed})


def assert_same(path: Any, *, other: str = "h5netcdf", **options: Any) -> None:
    with (
        xarray.open_dataset(path, engine="h5async", **options) as found,
        xarray.open_dataset(path, engine=other, **options) as expected,
    ):
        xarray.testing.assert_identical(found.load(), expected.load())
        assert list(found.variables) == list(expected.variables)
        if other == "h5netcdf":
            assert found.encoding == expected.encoding
            for name, variable in expected.variables.items():
                assert str(found[name].encoding) == str(variable.encoding)


@pytest.mark.parametrize("other", ["h5netcdf", "netcdf4"])
@pytest.mark.parametrize(
    "options",
    [{}, {"decode_cf": False}, {"mask_and_scale": False}, {"drop_variables": ["name"]}],
    ids=str,
)
def test_datasets_are_identical(tmp_path: Path, other: str, options: dict[str, Any]):
    weather(tmp_path / "weather.nc")
    if other == "netcdf4" and not options.get("decode_cf", True):
        options = options | {"drop_variables": ["code"]}  # its own name of a dimension
    assert_same(tmp_path / "weather.nc", other=other, **options)


def test_files_of_netcdf4(tmp_path: Path):
    rng = np.random.default_rng(3)
    with netcdf4_process() as netcdf4:
        for number, dtype in enumerate(("i2", "f4", "u1", "S1", "i8")):
            path = tmp_path / f"{number}.nc"
            values = rng.integers(0, 90, (9, 4, 5)).astype(dtype)
            attributes = {"units": "m", "_FillValue": values[0, 0, 0], "factors": [1.5, 2.5]}
            names, variables = ("time", "y", "x"), ("time", "x")
            netcdf4.write(path, values, names, attributes, ("time",), variables)
            assert_same(path)
            assert_same(path, decode_cf=False)


def test_groups_phony_dimensions_and_variables_that_end_early(tmp_path: Path):
    path = tmp_path / "plain.h5"
    with h5py.File(path, "w") as file:
        file["a"] = np.arange(12.0).reshape(3, 4)
        file["inner/b"] = np.arange(3)
        file["inner/x"] = np.arange(5)
        file["inner/x"].make_scale("x")
        file.create_dataset("inner/c", data=np.arange(25).reshape(5, 5), chunks=(2, 2))
        file["inner"].attrs["deep"] = True
    for phony_dims in ("access", "sort"):
        assert_same(path, phony_dims=phony_dims)
    assert_same(path, group="inner", phony_dims="sort")
    for group in (None, "inner"):
        how = {"phony_dims": "sort", "group": group}
        groups = xarray.open_groups(path, engine="h5async", **how)
        expected = xarray.open_groups(path, engine="h5netcdf", **how)
        assert list(groups) == list(expected)
        for name, dataset in expected.items():
            xarray.testing.assert_identical(groups[name].load(), dataset.load())
    assert list(xarray.open_datatree(path, engine="h5async").groups) == ["/", "/inner"]
    with pytest.raises(OSError, match="nothing"):
        xarray.open_dataset(path, engine="h5async", group="nothing", phony_dims="sort")
    named = tmp_path / "named.nc"
    with h5py.File(named, "w") as file:  # the variable "x" along "y"; "x" is a dimension, too
        for name in ("x", "y"):
            file.create_dataset(name, (3,), "f4")
            file[name].make_scale("This is a netCDF dimension but not a netCDF variable.         3")
        for name, scale in (("_nc4_non_coord_x", "y"), ("z", "x")):
            file[name] = np.arange(3) + 5
            file[name].dims[0].attach_scale(file[scale])
    assert_same(named)
    late = tmp_path / "late.nc"
    with h5py.File(late, "w") as file:
        time = file.create_dataset("time", data=np.arange(6.0), maxshape=(None,), chunks=(4,))
        time.make_scale("time")
        for name, size in (("whole", 6), ("early", 3), ("none", 0)):
            data = np.arange(size, dtype="f4")
            file.create_dataset(name, data=data, maxshape=(None,), chunks=(2,), fillvalue=-7)
            file[name].dims[0].attach_scale(time)
    assert_same(late)
    with xarray.open_dataset(late, engine="h5async") as found:
        np.testing.assert_array_equal(found.early[1::2], [1, -7, -7])
        np.testing.assert_array_equal(found.early[[0, 2, 5]], [0, 2, -7])
        assert found.early[4] == -7
    with h5py.File(late, "r+") as file:  # h5netcdf does not fill up strings
        file.create_dataset("text", data=["é", "b"], maxshape=(None,), chunks=(2,))
        file["text"].dims[0].attach_scale(file["time"])
    with xarray.open_dataset(late, engine="h5async") as found:
        assert found.text.values.tolist() == ["é", "b", "", "", "", ""]
        assert found.text[5].item() == ""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("xarray") / "weather.nc"
    weather(found)
    return found


def test_lazy_selections(path: Path):
    sizes = (40, 12, 20)
    with (
        xarray.open_dataset(path, engine="h5async", cache=False) as found,
        xarray.open_dataset(path, engine="h5netcdf", cache=False) as expected,
    ):
        bound = st.none() | st.integers(-42, 42)
        part = st.builds(slice, bound, bound, st.sampled_from([None, 1, 2, 5, -1, -3]))

        def is_read(part: slice, size: int) -> bool:
            """Tell whether xarray can: empty slices that step back end in an IndexError of its."""
            return part.indices(size)[2] > 0 or bool(range(size)[part])

        @given(st.data())
        def check(data: st.DataObject):
            key = {}
            for name, size in zip(("time", "lat", "lon"), sizes, strict=True):
                index = st.integers(-size, size - 1)
                parts = part.filter(partial(is_read, size=size))
                key[name] = data.draw(st.one_of(parts, index, st.lists(index, max_size=6)))
            xarray.testing.assert_identical(found.t2m.isel(key), expected.t2m.isel(key))

        check()


def test_chunks_of_dask_follow_the_file(path: Path):
    with (
        xarray.open_dataset(path, engine="h5async", chunks={}) as found,
        xarray.open_dataset(path, engine="h5netcdf") as expected,
    ):
        assert found.t2m.chunks[0] == (7, 7, 7, 7, 7, 5)
        means = found.t2m.mean("time")
        for scheduler in ("threads", "synchronous", "processes"):
            with dask.config.set(scheduler=scheduler, num_workers=2):
                xarray.testing.assert_allclose(means.compute(), expected.t2m.mean("time"))


def test_several_files_and_pickles(path: Path, tmp_path: Path):
    weather(tmp_path / "other.nc", zlib=False)
    several, how = [path, tmp_path / "other.nc"], {"combine": "nested", "concat_dim": "run"}
    with (
        xarray.open_mfdataset(several, engine="h5async", parallel=True, **how) as found,
        xarray.open_mfdataset(several, engine="h5netcdf", **how) as expected,
    ):
        xarray.testing.assert_identical(found.load(), expected.load())
    with xarray.open_dataset(path, engine="h5async") as opened:
        copy = pickle.loads(pickle.dumps(opened))
        xarray.testing.assert_identical(copy.load(), opened.load())


def test_what_is_closed_is_opened_again(path: Path):
    opened = xarray.open_dataset(path, engine="h5async")
    opened.close()
    assert opened.t2m[3, 4, 5].dtype == np.float64
    opened.close()


def test_other_engines_are_not_shadowed(path: Path):
    assert not xarray.backends.list_engines()["h5async"].guess_can_open(str(path))
    with xarray.open_dataset(path.read_bytes(), engine="h5async") as found:
        assert found.sizes["time"] == 40


def test_links_out_of_the_folder_are_refused(path: Path, tmp_path: Path):
    with h5py.File(tmp_path / "links.h5", "w") as file:
        file["group/data"] = h5py.ExternalLink(str(path), "t2m")
    layout = h5py.VirtualLayout((40, 12, 20), "i2")
    layout[:] = h5py.VirtualSource(str(path), "t2m", (40, 12, 20))
    with h5py.File(tmp_path / "virtual.h5", "w") as file:
        file.create_virtual_dataset("data", layout)
    for name in ("links.h5", "virtual.h5"):
        with pytest.raises(UnsafeFileError, match="allow_external"):
            xarray.open_dataset(tmp_path / name, engine="h5async")
