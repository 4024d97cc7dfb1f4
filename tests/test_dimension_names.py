"""Dimensions are given by the names that dimension scales and labels have."""

from __future__ import annotations

import importlib.util
import json

import h5py
import numpy as np
import pytest
from conftest import require_extra
from netcdf import netcdf4_process
from typer.testing import CliRunner

from h5async import AsyncReader, ConfigError, DatasetError, Field, ReaderConfig
from h5async.cli import app

VALUES = np.arange(5 * 4 * 3, dtype="f4").reshape(4, 5, 3)  # lat, time, lon
NAMES = ("lat", "time", "lon")
BY_TIME = VALUES.transpose(1, 0, 2)


def by_scales(path):
    """Attach scales whose datasets have the names of the dimensions, as netCDF-4 does."""
    with h5py.File(path, "w") as file:
        dataset = file.create_dataset("v", data=VALUES)
        for number, name in enumerate(NAMES):
            file.create_dataset(name, data=np.arange(VALUES.shape[number]))
            file[name].make_scale()
            dataset.dims[number].attach_scale(file[name])


def by_scale_names(path):
    """Give scales names of their own."""
    with h5py.File(path, "w") as file:
        dataset = file.create_dataset("v", data=VALUES)
        for number, name in enumerate(NAMES):
            file.create_dataset(f"scales/of_{name}", data=np.arange(VALUES.shape[number]))
            file[f"scales/of_{name}"].make_scale(name)
            dataset.dims[number].attach_scale(file[f"scales/of_{name}"])


def by_labels(path):
    with h5py.File(path, "w") as file:
        dataset = file.create_dataset("v", data=VALUES)
        for number, name in enumerate(NAMES):
            dataset.dims[number].label = name


def by_netcdf4(path):
    if importlib.util.find_spec("netCDF4") is None:
        require_extra("netCDF4")
    with netcdf4_process() as netcdf4:  # (lon is a dimension without a variable)
        netcdf4.write(path, VALUES, NAMES, unlimited=("time",), variables=("time", "lat"))


def by_h5netcdf(path):
    h5netcdf = require_extra("h5netcdf")
    with h5netcdf.File(path, "w") as file:
        file.dimensions = dict(zip(NAMES, VALUES.shape, strict=True))
        file.create_variable("time", ("time",), data=np.arange(5.0))
        file.create_variable("v", NAMES, data=VALUES)


WAYS = [by_scales, by_scale_names, by_labels, by_netcdf4, by_h5netcdf]


@pytest.fixture(params=WAYS, ids=lambda way: way.__name__)
def path(request, tmp_path):
    request.param(tmp_path / "named.nc")
    return tmp_path / "named.nc"


def read(paths, field, **options):
    options = {"batch_size": 3, "device": "cpu", "num_threads": 1, "copy": True, **options}
    with AsyncReader({"hdf5_path": paths, "fields": {"v": field}}, **options) as reader:
        return np.concatenate([batch.v for batch in reader])


@pytest.mark.slow
def test_the_sample_dimension_is_found_by_its_name(path):
    assert np.array_equal(read(path, Field("v", num_dim="time")), BY_TIME)
    assert np.array_equal(read(path, Field("v", num_dim="lon")), VALUES.transpose(2, 0, 1))


@pytest.mark.slow
def test_the_option_takes_a_name_too(path):
    options = {"data_field": "v", "labels_field": None, "device": "cpu", "batch_size": 5}
    with AsyncReader(hdf5_path=path, num_dim="time", **options) as reader:
        assert reader.num_samples == 5
        assert np.array_equal(reader.get_next_batch().data, BY_TIME)


def test_images_have_named_dimensions(path):
    options = {"data_field": "v", "labels_field": None, "device": "cpu", "batch_size": 5}
    with AsyncReader(hdf5_path=path, num_dim="time", h_dim="lon", w_dim="lat", **options) as reader:
        assert np.array_equal(reader.get_next_batch().data, VALUES.transpose(1, 2, 0))


@pytest.mark.parametrize(
    ("num_dim", "axes"),
    [
        (None, ("time", "lon", "lat")),
        ("time", ("time", "lon", 0)),
        ("time", (1, "lon", "lat")),
        (1, ("time", 2, "lat")),
    ],
)
def test_axes_may_be_names_and_numbers(path, num_dim, axes):
    got = read(path, Field("v", num_dim=num_dim, axes=axes))
    assert np.array_equal(got, VALUES.transpose(1, 2, 0))


@pytest.mark.slow
def test_a_coordinate_variable_has_its_own_name(path):
    if "time" not in h5py.File(path):
        pytest.skip("there is none")
    assert np.array_equal(read(path, Field("time", num_dim="time")), np.arange(5))


def test_an_unknown_name_is_an_error_that_lists_those_there_are(path):
    words = r'named\.nc: dataset "/?v".*no dimension "tiem"; .*"lat", .*"time", .*"lon"'
    for field in Field("v", num_dim="tiem"), Field("v", axes=("time", "lat", "tiem")):
        with pytest.raises(DatasetError, match=words):
            read(path, field)


def test_a_file_without_names_says_so(tmp_path):
    with h5py.File(tmp_path / "plain.h5", "w") as file:
        file["v"] = VALUES
    for name, words in ("time", "no names"), ("phony_dim_1", "netCDF readers make up"):
        for field in Field("v", num_dim=name), Field("v", axes=(1, name, 0)):
            with pytest.raises(DatasetError, match=f'no dimension "{name}", because.*{words}'):
                read(tmp_path / "plain.h5", field)


def test_dimensions_without_a_name_are_listed_by_number(tmp_path):
    with h5py.File(tmp_path / "some.h5", "w") as file:
        file["v"] = VALUES
        file["v"].dims[1].label = "time"
    assert np.array_equal(read(tmp_path / "some.h5", Field("v", num_dim="time")), BY_TIME)
    with pytest.raises(DatasetError, match='number 0 without a name, "time", number 2 without'):
        read(tmp_path / "some.h5", Field("v", num_dim="lat"))


def test_a_name_of_two_dimensions_is_an_error(tmp_path):
    with h5py.File(tmp_path / "twice.h5", "w") as file:
        dataset = file.create_dataset("v", data=np.zeros((3, 3)))
        file["x"] = np.arange(3)
        file["x"].make_scale("x")
        dataset.dims[0].attach_scale(file["x"])
        dataset.dims[1].attach_scale(file["x"])
    with pytest.raises(DatasetError, match='dimensions 0 and 1 both have the name "x"'):
        read(tmp_path / "twice.h5", Field("v", num_dim="x"))


def test_axes_must_begin_with_the_sample_dimension_whatever_it_is_called(path):
    with pytest.raises(ConfigError, match="must begin with the sample dimension"):
        read(path, Field("v", num_dim=0, axes=("time", "lat", "lon")))
    with pytest.raises(ConfigError, match="must begin with the sample dimension"):
        Field("v", num_dim="lat", axes=("time", "lat", "lon"))


@pytest.mark.parametrize("value", ["", 1.5, True, ("time",)])
def test_what_is_no_dimension_is_refused(value):
    with pytest.raises(ConfigError, match="num_dim"):
        Field("v", num_dim=value)


# --- several files, and members -------------------------------------------------------------------


def written(path, names, shape):
    with h5py.File(path, "w") as file:
        file["v"] = np.arange(np.prod(shape)).reshape(shape)
        for number, name in enumerate(names):
            file["v"].dims[number].label = name
    return path


def test_files_whose_dimensions_lie_otherwise_are_an_error(tmp_path):
    one = written(tmp_path / "one.h5", ("time", "x"), (3, 3))
    other = written(tmp_path / "other.h5", ("x", "time"), (3, 3))
    with pytest.raises(DatasetError, match=r"dimension 0 in .*one\.h5.*dimension 1 in .*other\.h5"):
        read([one, other], Field("v", num_dim="time"))


def test_files_whose_other_dimensions_lie_otherwise_are_never_mixed(tmp_path):
    one = written(tmp_path / "one.h5", ("time", "x", "y"), (2, 3, 3))
    other = written(tmp_path / "other.h5", ("time", "y", "x"), (2, 3, 3))
    with pytest.raises(
        DatasetError, match=r'in all of its 2 files: there is no dimension "x"; .*"time", number 1'
    ):
        read([one, other], Field("v", axes=("time", "x", "y")))
    assert len(read([one, other], Field("v", num_dim="time"))) == 4  # "x" is not asked for


def test_dimensions_of_array_types_have_no_names(tmp_path):
    with h5py.File(tmp_path / "arrays.h5", "w") as file:
        dataset = file.create_dataset("v", (4, 2), dtype=np.dtype(("i2", (3,))))
        dataset[...] = np.arange(24).reshape(4, 2, 3)
        dataset.dims[1].label = "time"
        expected = dataset[...]
    got = read(tmp_path / "arrays.h5", Field("v", axes=("time", 2, 0)))
    assert np.array_equal(got, expected.transpose(1, 2, 0))


# --- the saved index, the command line and files of options ---------------------------------------


@pytest.mark.slow
def test_a_saved_index_keeps_names_apart(path, tmp_path, monkeypatch):
    fields = [Field("v", num_dim="time"), Field("v", axes=("lon", "lat", "time")), Field("v")]
    expected = [BY_TIME, VALUES.transpose(2, 0, 1), VALUES]
    for number in (0, 1, 0, 2, 1):  # each replaces what the one before has kept
        got = read(path, fields[number], index_cache=tmp_path / "kept.h5idx")
        assert np.array_equal(got, expected[number])

    def refuse(*_):
        raise AssertionError("the file is read once more")

    monkeypatch.setattr("h5async.opening.filefacts.read_layouts", refuse)
    assert np.array_equal(read(path, fields[1], index_cache=tmp_path / "kept.h5idx"), expected[1])


def test_an_index_of_the_command_line_may_be_by_name(path, tmp_path, monkeypatch):
    for options in (["--num-dim", "time", "--field", "v=v"], ["--num-dim", "time"]):
        command = ["index", str(path), "-o", str(tmp_path / "all.h5idx"), *options]
        assert CliRunner().invoke(app, command).exit_code == 0
        with monkeypatch.context() as patch:
            patch.setattr("h5async.opening.filefacts.read_layouts", None)
            assert np.array_equal(read(tmp_path / "all.h5idx", Field("v", num_dim="time")), BY_TIME)
        assert np.array_equal(read(tmp_path / "all.h5idx", Field("v")), VALUES)


def test_names_are_typed_as_numbers_are(path):
    command = ["read", str(path), "--data-field", "v", "--no-labels", "--device", "cpu"]
    for dimension, samples in ("time", 5), ("1", 5), ("-1", 3), ("0", 4):
        result = CliRunner().invoke(app, [*command, "--num-dim", dimension])
        assert result.exit_code == 0, result.output
        assert f"samples  {samples}\n" in result.output
    result = CliRunner().invoke(app, [*command, "--num-dim", "tiem"])
    assert result.exit_code
    assert 'no dimension "tiem"' in result.output


@pytest.mark.slow
def test_names_go_through_toml_and_json(path, tmp_path):
    file = tmp_path / "options.toml"
    file.write_text(f'hdf5_path = "{path}"\nfields.v = {{path = "v", num_dim = "time"}}\n')
    config = ReaderConfig.load(file)
    assert config == ReaderConfig.load(json.loads(config.model_dump_json()))
    with AsyncReader(config, device="cpu", batch_size=5) as reader:
        assert np.array_equal(reader.get_next_batch().v, BY_TIME)


def test_inspect_shows_the_names(path):
    lines = CliRunner().invoke(app, ["inspect", str(path)]).stdout.splitlines()
    (line,) = (line for line in lines if line.startswith("v "))
    for name, extent in zip(NAMES, VALUES.shape, strict=True):
        assert f"{name} {extent}" in line


def test_scales_that_were_deleted_give_no_name(tmp_path):
    by_scales(tmp_path / "named.h5")
    with h5py.File(tmp_path / "named.h5", "r+") as file:
        del file["time"]
    assert np.array_equal(read(tmp_path / "named.h5", Field("v", num_dim="lat")), VALUES)
    assert CliRunner().invoke(app, ["inspect", str(tmp_path / "named.h5")]).exit_code == 0


# --- hostile files --------------------------------------------------------------------------------

REFERENCE = h5py.special_dtype(ref=h5py.Reference)
HOSTILE = {
    "integers": lambda file: np.arange(3),
    "large_elements": lambda file: np.zeros(3, [("a", "S20000")]),
    "fewer": lambda file: np.zeros(1, "i8"),
    "scalar": lambda file: 5,
    "text": lambda file: "time",
    "empty": lambda file: h5py.Empty("f8"),
    "references": lambda file: np.array([file["v"].ref] * 3, REFERENCE),
    "lists_of_numbers": lambda file: several([np.arange(3)] * 3, h5py.vlen_dtype("i8")),
    "null_references": lambda file: several(
        [np.array([h5py.Reference()], REFERENCE)] * 3, h5py.vlen_dtype(REFERENCE)
    ),
    "references_to_groups": lambda file: several(
        [np.array([file["/"].ref], REFERENCE)] * 3, h5py.vlen_dtype(REFERENCE)
    ),
    "lists_without_any": lambda file: several(
        [np.array([], REFERENCE)] * 3, h5py.vlen_dtype(REFERENCE)
    ),
}


def several(lists, dtype):
    found = np.empty(len(lists), dtype)
    for number, one in enumerate(lists):
        found[number] = one
    return found


@pytest.mark.parametrize("attribute", ["DIMENSION_LIST", "DIMENSION_LABELS", "CLASS"])
@pytest.mark.parametrize("kind", HOSTILE)
def test_attributes_that_are_not_what_they_should_be_give_no_names(tmp_path, attribute, kind):
    """HDF5's own functions would read them into too little memory."""
    with h5py.File(tmp_path / "hostile.h5", "w") as file:
        dataset = file.create_dataset("v", data=VALUES)
        value = HOSTILE[kind](file)
        if isinstance(value, np.ndarray) and value.dtype.hasobject:
            dataset.attrs.create(attribute, value, dtype=value.dtype)
        else:
            dataset.attrs[attribute] = value
    with pytest.raises(DatasetError, match='no dimension "time", because'):
        read(tmp_path / "hostile.h5", Field("v", num_dim="time"))
    assert np.array_equal(read(tmp_path / "hostile.h5", Field("v")), VALUES)
    result = CliRunner().invoke(app, ["inspect", str(tmp_path / "hostile.h5")])
    assert result.exit_code == 0
    assert "(4, 5, 3)" in result.output
