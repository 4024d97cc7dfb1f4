"""`decode_cf` unpacks values as xarray does, and masks what netCDF4 masks by `valid_range`."""

from __future__ import annotations

import importlib.util
import runpy
import warnings
from pathlib import Path

import h5py
import numpy as np
import pytest
from conftest import require_extra
from gpus import use_gpu
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from netcdf import netcdf4_process
from typer.testing import CliRunner

from h5async import AsyncReader, ConfigError, DatasetError, Field, ReadError
from h5async.cli import app
from h5async.index.metadata import read_layouts
from h5async.plan.transform import native_unpack, row_transform

STORED = ["i1", "u1", "i2", "u2", "i4", "u4", "i8", "f2", "f4", "f8", ">i2", ">f4"]
SHAPE = (40, 3, 4)
PACKED = {
    "scale_factor": np.float64(0.01),
    "add_offset": np.float64(273.15),
    "_FillValue": np.int16(-32768),
}
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


@pytest.fixture(scope="module")
def netcdf4():
    if importlib.util.find_spec("netCDF4") is None:
        require_extra("netCDF4")
    with netcdf4_process() as process:
        yield process


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


@st.composite
def limited(draw):
    dtype = draw(st.sampled_from(["i1", "u1", "i2", "u2", "i4", "f4", "f8"]))
    values = np.array(draw(st.lists(numbers(dtype), min_size=6, max_size=6)), dtype)
    attributes = {"_FillValue": draw(numbers(dtype))}  # (netCDF4 has one by default)
    if draw(st.booleans()):
        attributes["scale_factor"] = np.float64(0.01)
    for name in draw(st.sets(st.sampled_from(LIMITS), min_size=1)):
        kind = draw(st.sampled_from([dtype, "f8", "i4"]))
        several = [draw(numbers(kind)) for _ in range(2 if name == "valid_range" else 1)]
        attributes[name] = np.array(several, kind) if len(several) == 2 else several[0]
    if np.dtype(dtype).kind == "i" and draw(st.booleans()):
        attributes["_Unsigned"] = "true"
    return values, attributes


@pytest.mark.slow
@given(packed())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_values_are_those_of_xarray_bit_for_bit(tmp_path, case):
    path = write(tmp_path / "packed.nc", *case)
    expected = by_xarray(path)
    assert_same_bits(read(path), expected)
    transform = transform_of(path)
    out = np.empty(expected.shape, transform.dtype)
    transform.apply(case[0], out)
    assert_same_bits(out, expected)


# --- in the core ----------------------------------------------------------------------------------


def transform_of(path, field=None):
    field = field or Field("v", decode_cf=True)
    return row_transform(field, read_layouts(Path(path), {"v": field})["v"])


@given(st.one_of(packed(), limited()), st.sampled_from([None, "f4"]))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_core_unpacks_as_numpy_does(tmp_path, core, case, dtype):
    values = case[0]
    path = write(tmp_path / "packed.h5", *case)
    transform = transform_of(path, Field("v", dtype=dtype, decode_cf=True))
    native = native_unpack(core, transform)
    if native is not None:
        by_core, by_numpy = (np.zeros(values.shape, transform.dtype) for _ in range(2))
        native(values, by_core)
        transform.apply(values, by_numpy)
        assert_same_bits(by_core, by_numpy)


def test_what_the_core_unpacks(tmp_path, core):
    """Those that are common; what it leaves to NumPy is rare."""

    def is_native(values, attributes, **options):
        path = write(tmp_path / "one.h5", values, attributes)
        field = Field("v", decode_cf=True, **options)
        return native_unpack(core, transform_of(path, field)) is not None

    for stored_as in "i1", "u1", "i2", "u2", "f4", "f8":
        values = np.zeros((3, 4), stored_as)
        for scale in np.float32(0.5), np.float64(0.5):
            own = {"scale_factor": scale, "add_offset": scale}
            if stored_as != "f8" or scale.dtype == "f8":
                fill = values.dtype.type(5)
                assert is_native(values, {**own, "_FillValue": fill, "missing_value": fill})
                assert is_native(values, {**own, "valid_range": np.zeros(2, stored_as)})
            assert is_native(values, {"_FillValue": values.dtype.type(5)}, dtype="f4")
    assert is_native(np.zeros((3, 4), "i4"), {**PACKED, "valid_min": np.int32(-(2**31))})
    assert is_native(np.zeros((3, 4), "i1"), {**PACKED, "_Unsigned": "true"})
    assert not is_native(np.zeros((3, 4), ">i2"), PACKED)
    assert not is_native(np.zeros((3, 4), "i8"), PACKED)
    assert not is_native(np.zeros((3, 4), "i2"), PACKED, dtype="f2")
    assert not is_native(np.zeros((3, 4, 5), "i2"), PACKED, axes=(0, 2, 1))
    assert not is_native(np.zeros((3, 4), "i2"), {**PACKED, "missing_value": np.int16(7)})


def test_a_fill_value_that_floats_do_not_hold_masks_nothing(tmp_path, core):
    values = np.full((2, 3), 16_777_216, "f4")
    path = write(tmp_path / "rounded.h5", values, {"_FillValue": np.int32(16_777_217)})
    assert native_unpack(core, transform_of(path)) is not None
    assert_same_bits(read(path), values)
    assert_same_bits(read(path), by_xarray(path))


# --- what netCDF4 masks ---------------------------------------------------------------------------


@pytest.mark.slow
@given(limited())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_nan_stands_where_netcdf4_masks(tmp_path, netcdf4, case):
    values, attributes = case
    path = tmp_path / "limited.nc"
    netcdf4.write(path, values, ("x",), attributes)
    got, is_masked = read(path), netcdf4.mask(path)
    sign = "u" if "_Unsigned" in attributes else values.dtype.kind
    stored = values.view(f"{sign}{values.dtype.itemsize}")
    expected = stored.astype(got.dtype) * attributes.get("scale_factor", 1)
    assert got.dtype.kind == "f"
    assert np.array_equal(np.isnan(got), is_masked | np.isnan(expected))
    assert np.array_equal(got[~is_masked], expected[~is_masked], equal_nan=True)


def test_missing_values_of_unsigned_ones_are_masked_as_netcdf4_does(tmp_path, netcdf4):
    values = np.arange(-128, 128).astype("i1")
    attributes = {"_Unsigned": "true", "missing_value": np.int8(-2), "_FillValue": np.int8(-1)}
    path = tmp_path / "unsigned.nc"
    netcdf4.write(path, values, ("x",), attributes)
    got = read(path)
    assert np.array_equal(np.isnan(got), netcdf4.mask(path))
    assert np.array_equal(np.flatnonzero(np.isnan(got)), [126, 127])
    assert np.nanmax(got) == 253


# --- how they are delivered -----------------------------------------------------------------------


def stored(seed=0):
    values = np.random.default_rng(seed).integers(-300, 300, SHAPE).astype("i2")
    values[::5, 1] = -32768
    return values


def unpacked(values, attributes=PACKED, dtype=np.float64):
    """Return what xarray would make of int16, in so many words."""
    expected = values.astype(dtype)
    expected[values == attributes["_FillValue"]] = np.nan
    expected *= attributes["scale_factor"]
    expected += attributes["add_offset"]
    return expected


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["thread", "process"])
@pytest.mark.parametrize("num_threads", [0, 3])
@pytest.mark.parametrize("way", [{}, {"chunks": (3, 3, 2), "compression": "gzip"}])
@pytest.mark.parametrize("axes", [None, (0, 2, 1)])
def test_all_ways_of_reading_unpack(tmp_path, workers, num_threads, way, axes):
    path = write(tmp_path / "a.h5", stored(), PACKED, **way)
    expected = unpacked(stored()).transpose(axes or (0, 1, 2))
    field = Field("v", axes=axes, decode_cf=True)
    options = {"workers": workers, "num_threads": num_threads}
    assert_same_bits(read(path, field, **options), expected)
    for cache in None, "host":
        with AsyncReader(
            hdf5_path=path,
            fields={"v": field},
            shuffle="full",
            cache=cache,
            batch_size=7,
            device="cpu",
            **options,
        ) as reader:
            for batch in (batch for _ in range(2) for batch in reader):
                assert_same_bits(batch.v.copy(), expected[batch.index])


def test_samples_of_another_dimension_are_unpacked(tmp_path):
    path = write(tmp_path / "a.h5", stored(), PACKED, chunks=(7, 3, 4))
    field = Field("v", num_dim=2, axes=(2, 0, 1), decode_cf=True)
    assert_same_bits(read(path, field, batch_size=3), unpacked(stored()).transpose(2, 0, 1))


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8"])
def test_a_dtype_that_is_asked_for_is_cast_to_after_unpacking(tmp_path, dtype):
    path = write(tmp_path / "a.h5", stored(), PACKED)
    got = read(path, Field("v", dtype=dtype, decode_cf=True))
    assert_same_bits(got, unpacked(stored()).astype(dtype))


def test_rows_larger_than_a_block_are_unpacked(tmp_path):
    values = np.random.default_rng(1).integers(-300, 300, (3, 5, 70_000)).astype("i2")
    path = write(tmp_path / "large.h5", values, PACKED)
    assert_same_bits(read(path, batch_size=2), unpacked(values))


def test_given_samples_are_unpacked(tmp_path):
    path = write(tmp_path / "a.h5", stored(), PACKED)
    index = [3, 39, 0, 3]
    with AsyncReader(
        hdf5_path=path, fields={"v": Field("v", decode_cf=True)}, device="cpu"
    ) as reader:
        assert_same_bits(reader.read(index).v, unpacked(stored())[index])
        reader.fetch_data(index)
        assert_same_bits(reader.get_next_batch().v.copy(), unpacked(stored())[index])


def test_a_dataset_that_is_not_packed_is_delivered_as_it_is(tmp_path):
    path = write(tmp_path / "plain.h5", stored(), {"units": "K"})
    assert_same_bits(read(path), stored())
    path = write(tmp_path / "floats.h5", stored().astype(">f4"), {"_FillValue": np.float32("nan")})
    assert_same_bits(read(path), stored().astype("f4"))


def test_a_virtual_dataset_is_unpacked_by_its_own_attributes(tmp_path):
    write(tmp_path / "source.h5", stored(), {"scale_factor": 7.0})
    layout = h5py.VirtualLayout(SHAPE, "i2")
    layout[...] = h5py.VirtualSource(tmp_path / "source.h5", "v", SHAPE)
    with h5py.File(tmp_path / "virtual.h5", "w") as file:
        file.create_virtual_dataset("v", layout).attrs.update(PACKED)
    assert_same_bits(read(tmp_path / "virtual.h5"), unpacked(stored()))


# --- several files --------------------------------------------------------------------------------


def collection(folder, several, count=9):
    """Write a file for each set of attributes, in turns; return paths, and what they hold."""
    paths, expected = [], []
    for number in range(count):
        values, attributes = stored(number), several[number % len(several)]
        paths.append(write(folder / f"{number}.h5", values, attributes))
        expected.append(by_xarray(paths[-1]))
    return paths, expected


ONES = [
    PACKED,
    {**PACKED, "scale_factor": np.float64(0.5), "_FillValue": np.int16(5)},
    {**PACKED, "add_offset": np.float64(-1.0)},
]
OTHERS = [
    *ONES,
    {"_FillValue": np.int16(-32768)},
    {"scale_factor": np.float32(0.5), "_FillValue": np.int16(5), "missing_value": np.int16(6)},
    {},
]
HALVED = {"scale_factor": np.float64(0.5)}


@pytest.mark.parametrize(
    "several", [ONES, OTHERS, OTHERS[3:], [HALVED, {**HALVED, "add_offset": np.float64(9)}]]
)
@pytest.mark.parametrize("num_threads", [0, 3])
def test_each_file_is_unpacked_by_its_own_attributes(tmp_path, several, num_threads):
    paths, expected = collection(tmp_path, several)
    expected = np.concatenate(expected)
    assert_same_bits(read(paths, num_threads=num_threads), expected)
    options = {"batch_size": 50, "device": "cpu", "shuffle": "full", "num_threads": num_threads}
    with AsyncReader(
        hdf5_path=paths, fields={"v": Field("v", decode_cf=True)}, **options
    ) as reader:
        for batch in reader:
            assert_same_bits(batch.v.copy(), expected[batch.index])


def test_scale_and_offset_come_after_the_packing_of_each_file(tmp_path):
    paths, unpacked = collection(tmp_path, OTHERS)
    expected = np.concatenate(unpacked).astype("f8") * np.array([0.5, 2.0, 7.0])[:, None] - 3.25
    field = Field("v", decode_cf=True, dtype="f8", scale=[0.5, 2.0, 7.0], offset=-3.25)
    assert_same_bits(read(paths, field), expected)


@pytest.mark.parametrize("num_threads", [0, 3])
def test_rows_of_several_files_that_are_cached_keep_their_attributes(tmp_path, num_threads):
    paths, expected = collection(tmp_path, ONES)
    got = read(paths, cache="host", num_threads=num_threads, indices=slice(30, 200))
    assert_same_bits(got, np.concatenate(expected)[30:200])


def test_files_of_other_dtypes_are_an_error_that_names_both(tmp_path):
    one = write(tmp_path / "one.h5", stored(), PACKED)
    other = write(tmp_path / "other.h5", stored().astype("f4"), {})
    with pytest.raises(DatasetError, match=r"int16 in .*one\.h5.*float32 in .*other\.h5"):
        read([one, other])


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "attributes",
    [
        {"scale_factor": "0.01"},
        {"add_offset": np.array([1.0, 2.0])},
        {"scale_factor": h5py.Empty("f4")},
        {"scale_factor": np.zeros(0)},
        {"missing_value": np.zeros(1000, "i2")},
    ],
)
def test_attributes_that_make_no_sense_are_errors_that_name_them(tmp_path, attributes):
    path = write(tmp_path / "bad.h5", stored(), attributes)
    with pytest.raises(DatasetError, match=rf"bad\.h5: dataset \"/?v\".*{next(iter(attributes))}"):
        read(path)
    assert_same_bits(read(path, Field("v")), stored())  # nobody looks at them


def test_fill_values_that_are_text_mask_nothing(tmp_path):
    attributes = {"missing_value": "NaN", "_Unsigned": "no", "_FillValue": h5py.Empty("i2")}
    path = write(tmp_path / "text.h5", stored(), {**attributes, "valid_range": np.zeros(0)})
    assert_same_bits(read(path), stored())


@pytest.mark.parametrize(
    "values",
    [np.zeros(4, bool), np.zeros(4, "c8"), np.zeros(4, "S3"), np.zeros(4, [("a", "i2")])],
)
def test_what_holds_no_numbers_is_refused(tmp_path, values):
    path = write(tmp_path / "other.h5", values, {"_FillValue": np.int16(0)})
    with pytest.raises(ConfigError, match="decode_cf unpacks datasets of integers and floats"):
        read(path)
    if values.dtype.names:
        with pytest.raises(ConfigError, match="a member of a compound"):
            read(path, Field("v/a", decode_cf=True))


def test_integers_cannot_be_nan():
    with pytest.raises(ConfigError, match="decode_cf delivers NaN"):
        Field("v", decode_cf=True, dtype="i4")


@pytest.mark.parametrize("stored", ["i2", "f8"])  # unpacked by the core, and by NumPy
def test_scale_and_offset_come_after_unpacking(tmp_path, stored):
    values = np.arange(-3, 9).reshape(4, 3).astype(stored)
    attributes = {"scale_factor": 0.5, "add_offset": 8.0, "_FillValue": np.dtype(stored).type(2)}
    path = write(tmp_path / "a.h5", values, attributes)
    field = Field("v", decode_cf=True, scale=[1, 2, 4], offset=-1)
    unpacked = np.where(values == 2, np.nan, values * 0.5 + 8).astype("f4")
    expected = unpacked * np.array([1, 2, 4], "f4") - np.float32(1)
    assert_same_bits(read(path, field), expected)


def test_the_name_that_xarray_has_for_it_leads_to_it():
    with pytest.raises(ConfigError, match=r"unknown option 'mask_and_scale'; .*decode_cf=True"):
        Field("v", mask_and_scale=True)


def test_attributes_that_change_while_a_reader_is_open_are_an_error(tmp_path):
    path = write(tmp_path / "a.h5", stored(), PACKED)
    with AsyncReader(
        hdf5_path=path,
        fields={"v": Field("v", decode_cf=True)},
        batch_size=4,
        device="cpu",
        num_threads=0,
        prefetch=1,
    ) as reader:
        assert_same_bits(reader.get_next_batch().v.copy(), unpacked(stored())[:4])
        with h5py.File(path, "r+") as file:
            file["v"].attrs.modify("add_offset", 0.0)
        with pytest.raises(ReadError, match="say how its values are packed have changed"):
            reader.get_next_batch()


# --- the saved index ------------------------------------------------------------------------------


def test_a_saved_index_keeps_the_attributes(tmp_path, monkeypatch):
    paths, expected = collection(tmp_path, OTHERS[3:])
    index = tmp_path / "kept.h5idx"
    expected = np.concatenate(expected)
    assert_same_bits(read(paths, index_cache=index), expected)
    assert_same_bits(read(paths, index_cache=index), expected)

    def refuse(*_):
        raise AssertionError("the files are read once more")

    monkeypatch.setattr("h5async.opening.filefacts.read_layouts", refuse)
    assert_same_bits(read(paths, index_cache=index), expected)


def test_a_reader_that_unpacks_and_one_that_does_not_share_no_entry(tmp_path):
    path = write(tmp_path / "a.h5", stored(), PACKED)
    index = tmp_path / "kept.h5idx"
    for _ in range(2):
        assert_same_bits(read(path, index_cache=index), unpacked(stored()))
        assert_same_bits(read(path, Field("v"), index_cache=index), stored())


# --- a GPU ----------------------------------------------------------------------------------------


@pytest.mark.any_gpu
@pytest.mark.parametrize("cache", [None, "host", "device"])
@pytest.mark.parametrize("decode", ["auto", "host"])
def test_batches_on_a_gpu_are_unpacked(tmp_path, monkeypatch, cache, decode):
    cupy, simulation, _ = use_gpu(monkeypatch, seed=1)
    paths, expected = collection(tmp_path, ONES)
    expected = np.concatenate(expected)
    options = {"batch_size": 9, "device": "cuda", "shuffle": "full", "cache": cache}
    with AsyncReader(
        hdf5_path=paths,
        fields={"v": Field("v", axes=(0, 2, 1), decode_cf=True), "w": "v"},
        decode=decode,
        **options,
    ) as reader:
        kept = []
        for _ in range(2):
            for batch in reader:
                kept.append((batch.index, batch.v.copy(), batch.w.copy()))
        simulation.run_all()
        raw = np.concatenate([stored(number) for number in range(9)])
        for index, got, plain in kept:
            assert isinstance(got, cupy.ndarray)
            assert_same_bits(got.get(), expected[index].transpose(0, 2, 1))
            assert_same_bits(plain.get(), raw[index])


# --- the example ----------------------------------------------------------------------------------


def test_the_example_learns(capsys):
    path = Path(__file__).parents[1] / "scripts" / "examples" / "packed_weather.py"
    assert runpy.run_path(str(path))["main"]() > 0.95
    assert "of the variance" in capsys.readouterr().out


# --- inspect --------------------------------------------------------------------------------------


def test_inspect_says_what_is_packed(tmp_path):
    path = tmp_path / "a.nc"
    write(path, stored(), PACKED)
    with h5py.File(path, "r+") as file:
        file["marked"] = np.zeros(3, "f4")
        file["marked"].attrs["_FillValue"] = np.float32(-9999)
        file["plain"] = np.zeros(3, "f4")
        file["plain"].attrs["_FillValue"] = np.float32("nan")
        file["bad"] = np.zeros(3, "f4")
        file["bad"].attrs["scale_factor"] = "much"
    lines = CliRunner().invoke(app, ["inspect", str(path)]).stdout.splitlines()
    said = {line.split()[0]: line for line in lines if line}
    words = "packed: scale_factor 0.01, add_offset 273.15, _FillValue -32768; decode_cf=True"
    assert f"{words} unpacks it" in said["v"]
    assert "missing values: _FillValue -9999.0; decode_cf=True makes them NaN" in said["marked"]
    assert "decode_cf" not in said["plain"]
    assert "packed: scale_factor 'much'" in said["bad"]
