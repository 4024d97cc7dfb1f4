"""`decode_cf` unpacks values as xarray does, and masks what netCDF4 masks by `valid_range`."""

from __future__ import annotations

import warnings

import h5py
import numpy as np
from conftest import require_extra
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from h5async import AsyncReader, Field

STORED = ["i1", "u1", "i2", "u2", "i4", "u4", "i8", "f2", "f4", "f8", ">i2", ">f4"]
LIMITS = ("valid_range", "valid_min", "valid_max")


def write(path, values, attributes, name="v", **options):
    with h5py.File(path, "w") as file:
        dataset = file.create_dataset(name, data=values, **options)
        for key, value in attributes.items():
            dataset.attrs[key] = value
    return path


def read(paths, field=None, **options):
    """Return the whole of a field, in order."""
    field = field or Field("v", decode_cf=True)
    options = {"batch_size": 7, "device": "cpu", "num_threads": 2, "copy": True, **options}
    with AsyncReader({"hdf5_path": paths, "fields": {"v": field}}, **options) as reader:
        return np.concatenate([batch.v for batch in reader])


def by_xarray(path, name="v"):
    xarray = require_extra("xarray")
    require_extra("h5netcdf")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with xarray.open_dataset(
            path,
            engine="h5netcdf",
            phony_dims="sort",
            decode_times=False,
            mask_and_scale=True,
            decode_coords=False,
        ) as dataset:
            return dataset[name].values


def masked_by_netcdf4(path, name="v"):
    netcdf4 = require_extra("netCDF4")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with netcdf4.Dataset(path) as dataset:
            dataset[name].set_always_mask(True)
            return np.ma.getmaskarray(dataset[name][...])


def assert_same_bits(got, expected):
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    expected = np.ascontiguousarray(expected, expected.dtype.newbyteorder("="))
    assert got.tobytes() == expected.tobytes(), (got, expected)


def numbers(dtype):
    """Return values of a dtype: those at its limits, small ones, and of floats also NaN."""
    dtype = np.dtype(dtype)
    if dtype.kind == "f":
        some = [0.0, -0.0, 1.5, -9999.0, np.inf, np.nan]
        return st.sampled_from([dtype.type(value) for value in some])
    info = np.iinfo(dtype)
    some = {info.min, info.min + 1, info.max - 1, info.max, *(n for n in range(-5, 6))}
    return st.sampled_from(sorted(n for n in some if info.min <= n <= info.max)).map(dtype.type)


factors = st.sampled_from(
    [np.float32(0.01), np.float64(0.01), np.float64(-3.7), np.float32(273.15), np.float64(1e300)]
)


@st.composite
def packed(draw):
    dtype = draw(st.sampled_from(STORED))
    shape = draw(st.sampled_from([(5,), (3, 4), (2, 3, 2)]))
    size = int(np.prod(shape))
    several = draw(st.lists(numbers(dtype), min_size=size, max_size=size))
    values = np.array(several, dtype).reshape(shape)
    attributes = {}
    for name in ("scale_factor", "add_offset"):
        if draw(st.booleans()):
            attributes[name] = draw(factors)
    own = np.dtype(dtype).newbyteorder("=")
    kinds = [own, own, np.dtype("f8"), np.dtype("i4")]
    if draw(st.booleans()):
        attributes["_FillValue"] = draw(numbers(draw(st.sampled_from(kinds))))
    if draw(st.integers(0, 3)) == 0:
        fill = draw(numbers(draw(st.sampled_from(kinds))))
        attributes["missing_value"] = draw(st.sampled_from([fill, np.array([fill, fill])]))
    if np.dtype(dtype).isnative and draw(st.integers(0, 3)) == 0:  # (xarray swaps the fill value)
        attributes["_Unsigned"] = draw(st.sampled_from(["true", "false"]))
        attributes.pop("missing_value", None)  # of which xarray does not take the sign away
        if "_FillValue" in attributes:  # of another type xarray raises
            attributes["_FillValue"] = draw(numbers(own))
    return values, attributes


@given(packed())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_values_are_those_of_xarray_bit_for_bit(tmp_path, case):
    path = write(tmp_path / "packed.nc", *case)
    assert_same_bits(read(path), by_xarray(path))
