"""Statistics of a dataset, and fields that are normalized by them, against NumPy."""

from __future__ import annotations

import json

import h5py
import numpy as np
import pytest
import scipy.sparse
from cases import each
from hdf5files import TEXT, write_column, write_csr

import h5async
from h5async import (
    AsyncReader,
    ConfigError,
    Field,
    FieldStatistics,
    H5AsyncError,
    ImageField,
    RaggedField,
    SparseField,
    Statistics,
)
from h5async.measure import statistics, summaries

RNG = np.random.default_rng(0)
QUANTILES = (0.0, 0.05, 0.5, 0.99)


def write(path, values, **storage):
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=values, **storage)
    return path


def measured(path, field="x", **options):
    per = options.pop("per", "channel")
    config = {"hdf5_path": path, "fields": {"x": field}, **options}
    return h5async.statistics(config, per=per, quantiles=QUANTILES)["x"]


def expect(found, values, over, fill=None):
    """Compare with NumPy on the values as delivered, of which `over` are dimensions to sum over."""
    exact = values.astype(np.float64)
    count = np.asarray((~np.isnan(exact)).sum(axis=over))
    np.testing.assert_array_equal(found.count, count)
    assert found.count.shape == count.shape
    np.testing.assert_array_equal(found.nan, np.isnan(exact).sum(axis=over))
    if fill is not None:
        np.testing.assert_array_equal(found.fill, (values == fill).sum(axis=over))
    for name in ("mean", "std", "min", "max"):
        expected = getattr(np, f"nan{name}")(exact, axis=over)
        np.testing.assert_allclose(getattr(found, name), expected, rtol=1e-12, atol=1e-12)
    for q in QUANTILES:
        expected = np.nanquantile(exact, q, axis=over)
        np.testing.assert_allclose(found.quantiles[f"{q:g}"], expected, rtol=1e-6)
    assert found.quantile_error == 0


@each("per, over", [(None, (0, 1, 2)), ("channel", (0, 2)), ("feature", (0,))])
@each("dtype", ["u1", "i8", ">f4", "f8"])
def test_plain_rows(tmp_path, per, over, dtype):
    values = RNG.normal(50, 20, (70, 3, 5)).clip(0).astype(dtype)
    path = write(tmp_path / "a.h5", values, chunks=(16, 3, 5), compression="gzip", fillvalue=0)
    expect(measured(path, per=per, num_threads=2), values, over, fill=0)


@each("per, over", [(None, (0, 1, 2)), ("channel", (0, 2)), ("feature", (0,))])
def test_bfloat16_counts_as_delivered(tmp_path, per, over):
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    values = RNG.normal(50, 20, (70, 3, 5)).astype("f4")
    found = measured(write(tmp_path / "a.h5", values), Field("x", dtype="bfloat16"), per=per)
    expect(found, values.astype(bfloat16), over)
    assert found.dtype == "bfloat16"


@each("per, shape", [(None, ()), ("channel", (3,)), ("feature", (3, 0))])
def test_rows_without_elements_have_no_mean(tmp_path, per, shape):
    found = measured(write(tmp_path / "a.h5", np.zeros((9, 3, 0))), per=per)
    assert found.count.shape == shape
    assert not found.count.any()
    assert np.isnan(found.mean).all()


def test_channels_may_stand_last_or_be_named(tmp_path):
    values = RNG.normal(size=(20, 4, 5, 3)).astype("f4")
    path = write(tmp_path / "a.h5", values)
    with h5py.File(path, "a") as file:
        for axis, name in enumerate(("n", "y", "x", "c")):
            file["x"].dims[axis].label = name
    for field in (
        Field("x", channel_dim=3),
        Field("x", channel_dim="c"),
        Field("x", axes=(0, 3, 1, 2)),
    ):
        found = measured(path, field)
        expect(found, values, (0, 1, 2))
        assert found.channel_dim == 3


@each("shape", [(), (3,)])
def test_quantiles_are_of_the_values_of_all_batches(tmp_path, monkeypatch, shape):
    monkeypatch.setattr(statistics, "_BATCH_NBYTES", 100)
    values = RNG.normal(size=(90, *shape))
    path = write(tmp_path / "a.h5", values, chunks=(9, *shape), compression="gzip")
    expect(measured(path, num_threads=2), values, (0,), fill=0)


def test_missing_values_are_counted_and_left_out(tmp_path):
    values = RNG.normal(size=(300, 4)).astype("f4")
    values[RNG.random(values.shape) < 0.2] = np.nan
    values[:, 2] = np.nan
    found = measured(write(tmp_path / "a.h5", values))
    known = values[:, [0, 1, 3]]
    np.testing.assert_array_equal(found.nan, np.isnan(values).sum(axis=0))
    np.testing.assert_allclose(
        found.mean[[0, 1, 3]], np.nanmean(known, axis=0, dtype="f8"), rtol=1e-6
    )
    assert np.isnan([found.mean[2], found.std[2], found.min[2], found.max[2]]).all()


def test_packed_values_are_unpacked_first(tmp_path):
    stored = RNG.integers(-3, 30, (50, 6)).astype("i2")
    path = write(tmp_path / "a.h5", stored)
    with h5py.File(path, "a") as file:
        file["x"].attrs.update(scale_factor=0.5, add_offset=270.0, _FillValue=np.int16(-3))
    values = np.where(stored == -3, np.nan, stored * 0.5 + 270.0)
    found = measured(path, Field("x", decode_cf=True, dtype="f8"))
    expect(found, values, (0,))
    field = Field("x", decode_cf=True, dtype="f8", normalize=Statistics({"x": found}))
    with AsyncReader(hdf5_path=path, fields={"x": field}, batch_size=50) as reader:
        expected = (values - np.nanmean(values, axis=0)) / np.nanstd(values, axis=0)
        np.testing.assert_allclose(reader.get_next_batch().x, expected, rtol=1e-10, atol=1e-10)


def test_steps_count_as_delivered_and_normalize_alike(tmp_path):
    values = RNG.normal(7, 3, (40, 2, 3)).astype("f4")
    path = write(tmp_path / "a.h5", values)
    field = Field("x", steps=range(-1, 2))
    delivered = np.stack([values[i - 1 : i + 2] for i in range(1, 39)])
    found = measured(path, field)
    expect(found, delivered, (0, 1, 3))
    field = field.model_copy(update={"normalize": Statistics({"x": found})})
    with AsyncReader(hdf5_path=path, fields={"x": field}, batch_size=38) as reader:
        mean, std = (a.reshape(2, 1) for a in (found.mean, found.std))
        np.testing.assert_allclose(
            reader.get_next_batch().x, (delivered - mean) / std, rtol=1e-5, atol=1e-5
        )


@each("dense", [False, True])
def test_sparse_rows(tmp_path, dense):
    matrix = scipy.sparse.random(60, 9, 0.3, "csr", random_state=0)
    write_csr(tmp_path / "a.h5", matrix)
    rows = matrix.toarray()
    for per, over in ((None, (0, 1)), ("channel", (0,))):
        found = measured(tmp_path / "a.h5", SparseField("X", dense=dense), per=per)
        assert found.quantiles is None
        np.testing.assert_array_equal(
            found.count, np.full_like(found.count, rows.size // found.count.size)
        )
        for name in ("mean", "std", "min", "max"):
            expected = getattr(np, name)(rows, axis=over)
            np.testing.assert_allclose(getattr(found, name), expected, rtol=1e-12, atol=1e-15)


@each("pad_to", [None, 4])
def test_ragged_samples_without_padding(tmp_path, pad_to):
    values, ends = RNG.normal(size=(30, 2)), np.array([0, 7, 8, 20, 30])
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"], file["ends"] = values, ends
    field = RaggedField("x", offsets="ends", offsets_kind="ends", pad_to=pad_to)
    found = measured(tmp_path / "a.h5", field)
    expect(found, values, (0,))
    assert found.lengths == pytest.approx(
        {"count": 5, "mean": 6, "std": np.std([0, 7, 1, 12, 10]), "min": 0, "max": 12}
    )


@each("axes", [None, (0, 3, 1, 2)])
@each("sizes", [[(6, 4), (5, 3)], [(4, 4)]])
def test_images_by_color(tmp_path, axes, sizes):
    png_encode = pytest.importorskip("imagecodecs").png_encode
    several = [RNG.integers(0, 99, (*sizes[i % len(sizes)], 3), np.uint8) for i in range(9)]
    with h5py.File(tmp_path / "a.h5", "w") as file:
        png = file.create_dataset("x", (9,), h5py.vlen_dtype(np.uint8))
        for number, pixels in enumerate(several):
            png[number] = np.frombuffer(png_encode(pixels), np.uint8)
    values = np.concatenate([one.reshape(-1, 3) for one in several])
    found = measured(tmp_path / "a.h5", ImageField("x", axes=axes))
    expect(found, values, (0,))
    field = ImageField("x", axes=axes, normalize=Statistics({"x": found}))
    with AsyncReader(hdf5_path=tmp_path / "a.h5", fields={"x": field}, batch_size=9) as reader:
        delivered = list(reader.get_next_batch().x)
    for image, pixels in zip(delivered, several, strict=True):
        expected = (pixels - found.mean) / found.std
        expected = expected if axes is None else expected.transpose(2, 0, 1)
        np.testing.assert_allclose(image, expected, rtol=1e-5, atol=1e-5)


def test_features_that_do_not_fit_in_memory_are_refused(tmp_path):
    path = write(tmp_path / "a.h5", np.zeros((2, 30, 40), "u1"))
    assert measured(path, per="feature").count.shape == (30, 40)
    with pytest.raises(ConfigError, match=r"'x' has 1,200 features, but there is only memory for"):
        measured(path, per="feature", max_batch_bytes=100_000)
    measured(path, per="channel", max_batch_bytes=100_000)


def test_images_of_differing_sizes_have_no_features(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", (3,), h5py.vlen_dtype(np.uint8))
    with pytest.raises(ConfigError, match="no features in common"):
        measured(tmp_path / "a.h5", ImageField("x"), per="feature")


@each(
    "labels, expected",
    [
        (np.array([3, 1, 3, -1]), {"-1": 1, "1": 1, "3": 2}),
        (np.array([True, False, True, True]), {"False": 1, "True": 3}),
        (np.array([b"cat", b"dog", b"cat", b""], "S4"), {"": 1, "cat": 2, "dog": 1}),
        (np.array(["ä", "b", "ä", ""], TEXT), {"": 1, "b": 1, "ä": 2}),
    ],
)
def test_classes_are_counted(tmp_path, labels, expected):
    assert measured(write(tmp_path / "a.h5", labels)).frequencies == expected


def test_categories_are_counted_by_name(tmp_path):
    path = write_column(tmp_path / "a.h5", "categorical", ("A", "B", "C"), (0, 1, -1, 1))
    found = measured(path, "obs/c")
    assert found.frequencies == {"A": 1, "B": 2, "C": 0}
    assert (found.count, found.nan) == (3, 1)


def test_too_many_classes_are_none(tmp_path, monkeypatch):
    monkeypatch.setattr(summaries, "_MOST_CLASSES", 10)
    found = measured(write(tmp_path / "a.h5", np.arange(11)), batch_size=4)
    assert found.frequencies is None
    assert found.mean == 5


def test_only_selected_samples_of_several_files_count(tmp_path):
    values = RNG.normal(size=(30, 4))
    paths = [write(tmp_path / f"{n}.h5", part) for n, part in enumerate(np.split(values, [10, 11]))]
    found = measured(paths, indices=range(5, 25), shuffle="full", weights=None, seed=3)
    expect(found, values[5:25], (0,))


def test_quantiles_of_many_values_are_as_close_as_stated(tmp_path, monkeypatch):
    monkeypatch.setattr(summaries, "_KEPT_OF_GROUP", 2000)
    values = RNG.exponential(size=(50_000, 2)).astype("f4")
    found = measured(write(tmp_path / "a.h5", values))
    assert 0.02 < found.quantile_error < 0.05
    for q in (0.05, 0.5, 0.99):
        share = (values < found.quantiles[f"{q:g}"]).mean(axis=0)
        assert (np.abs(share - q) < found.quantile_error).all()


def test_threads_do_not_change_any_bit(tmp_path, monkeypatch):
    monkeypatch.setattr(h5async.measure.statistics, "_BATCH_NBYTES", 1000)
    monkeypatch.setattr(summaries, "_KEPT_OF_GROUP", 500)
    path = write(tmp_path / "a.h5", RNG.normal(size=(3000, 2)))
    one, several = (measured(path, num_threads=n).as_dict() for n in (0, 4))
    assert one == several


def test_an_open_reader_keeps_its_position(tmp_path):
    path = write(tmp_path / "a.h5", np.arange(10.0))
    with AsyncReader(hdf5_path=path, fields={"x": "x"}, batch_size=4) as reader:
        reader.get_next_batch()
        assert h5async.statistics(reader)["x"].mean == 4.5
        assert reader.get_next_batch().x[0] == 4


def test_what_is_not_there_is_an_error(tmp_path):
    path = write(tmp_path / "a.h5", np.arange(10.0))
    config = {"hdf5_path": path, "fields": {"x": "x"}}
    for options, message in (
        ({"fields": ["y"]}, "there is no field 'y'; fields are: x"),
        ({"per": "row"}, "per must be"),
        ({"quantiles": [50]}, "from 0 to 1"),
    ):
        with pytest.raises(ConfigError, match=message):
            h5async.statistics(config, **options)


# --- files, and normalized fields -----------------------------------------------------------------


@each("name", ["s.json", "s.toml"])
def test_a_saved_file_holds_the_same(tmp_path, name):
    values = np.array([[1, np.nan, np.inf, 4], [2, np.nan, 1, 4]])
    found = h5async.statistics(
        {"hdf5_path": write(tmp_path / "a.h5", values), "fields": {'ü "x"\x7f': "x"}}
    )
    found.save(tmp_path / name)
    assert Statistics.load(tmp_path / name).as_dict() == found.as_dict()


def test_an_hdf5_file_is_not_replaced_by_statistics(tmp_path):
    path = write(tmp_path / "a.h5", np.arange(4))
    before = path.read_bytes()
    found = h5async.statistics({"hdf5_path": path, "fields": {"x": "x"}})
    with pytest.raises(H5AsyncError, match="HDF5 file"):
        found.save(path)
    assert path.read_bytes() == before


@each("per", [None, "channel", "feature"])
@each("name", ["s.json", "s.toml"])
def test_a_field_takes_the_file(tmp_path, per, name):
    values = RNG.normal(280, 20, (30, 3, 4)).astype("f4")
    values[:, 1] = 5  # a std of 0 counts as 1
    path = write(tmp_path / "a.h5", values)
    found = h5async.statistics({"hdf5_path": path, "fields": {"other": "x"}}, per=per)
    found.save(tmp_path / name)
    (tmp_path / "reader.json").write_text(
        json.dumps(
            {
                "hdf5_path": "a.h5",
                "batch_size": 30,
                "fields": {"x": {"path": "x", "normalize": name}},
            }
        )
    )
    over = {None: (0, 1, 2), "channel": (0, 2), "feature": (0,)}[per]
    mean, std = (f(values.astype("f8"), axis=over, keepdims=True) for f in (np.mean, np.std))
    expected = (values - mean) / np.where(std == 0, 1, std)
    with AsyncReader(tmp_path / "reader.json") as reader:
        delivered = reader.get_next_batch().x
        assert delivered.dtype == np.float32
        np.testing.assert_allclose(delivered, expected, rtol=2e-5, atol=2e-5)


def test_normalizing_finds_the_channels_of_the_statistics(tmp_path):
    values = RNG.normal(size=(9, 4, 4)).astype("f4") * np.arange(1, 5, dtype="f4")
    path = write(tmp_path / "a.h5", values)
    found = measured(path, Field("x", channel_dim=2))
    with AsyncReader(
        hdf5_path=path, fields={"x": Field("x", normalize=Statistics({"x": found}))}
    ) as reader:
        delivered = reader.get_next_batch().x
    np.testing.assert_allclose(delivered.std(axis=(0, 1)), np.ones(4), rtol=1e-5)


def test_what_cannot_normalize_says_why(tmp_path):
    path = write(tmp_path / "a.h5", RNG.normal(size=(5, 3)))
    found = measured(path)
    empty = FieldStatistics(path="x", dtype="<f8", mean=np.array(np.nan), std=np.array(np.nan))
    (tmp_path / "no.json").write_text("{}")
    for normalize, message in (
        (tmp_path / "missing.json", "missing.json: cannot read"),
        (tmp_path / "no.json", "not a file of statistics"),
        (
            Statistics({"y": FieldStatistics(path="z", dtype="S3")}),
            'only of y \\("z"\\)',
        ),
        (Statistics({"x": FieldStatistics(path="x", dtype="S3")}), "has no mean"),
        (Statistics({"x": empty}), "not finite"),
    ):
        field = Field("x", normalize=normalize)
        with pytest.raises(ConfigError, match=message):
            AsyncReader(hdf5_path=path, fields={"x": field})
    for options, message in (
        ({"scale": 2}, "normalize sets scale"),
        ({"dtype": "i4"}, "normalize needs a float dtype"),
    ):
        with pytest.raises(ConfigError, match=message):
            Field("x", normalize=Statistics({"x": found}), **options)
    with pytest.raises(ConfigError, match="path of a file of statistics"):
        Field("x", normalize=3)


def test_a_configuration_with_statistics_can_be_saved(tmp_path):
    path = write(tmp_path / "a.h5", RNG.normal(size=(5, 3)))
    with AsyncReader(
        hdf5_path=path, fields={"x": Field("x", normalize=Statistics({"x": measured(path)}))}
    ) as reader:
        expected = reader.get_next_batch().x.copy()
        text = reader.config.model_dump_json()
    with AsyncReader(json.loads(text)) as reader:
        np.testing.assert_array_equal(reader.get_next_batch().x, expected)


# --- scale and offset per channel, and per element ------------------------------------------------


@each(
    "field, shape",
    [
        (Field("x", channel_dim=3, scale=[2, 3, 4], offset=[1, 0, -1]), (1, 1, 1, 3)),
        (Field("x", channel_dim=3, axes=(0, 3, 1, 2), scale=[2, 3, 4], offset=1), (1, 3, 1, 1)),
        (Field("x", channel_dim="y", scale=[2, 3]), (1, 2, 1, 1)),
        (Field("x", num_dim=1, channel_dim=0, scale=range(20)), (1, 20, 1, 1)),
        (Field("x", num_dim=1, channel_dim=3, axes=(1, 2, 3, 0), scale=[2, 3, 4]), (1, 1, 3, 1)),
        (Field("x", scale=np.arange(30).reshape(2, 5, 3)), (1, 2, 5, 3)),
        (Field("x", steps=range(2), channel_dim=3, scale=[2, 3, 4]), (1, 1, 1, 1, 3)),
        (Field("x", num_dim=(0, 1), channel_dim=3, scale=[2, 3, 4]), (1, 1, 3)),
    ],
)
def test_factors_apply_where_channels_stand(tmp_path, field, shape):
    path = write(tmp_path / "a.h5", RNG.normal(size=(20, 2, 5, 3)).astype("f4"))
    with h5py.File(path, "a") as file:
        file["x"].dims[1].label = "y"
    plain = field.model_copy(update={"scale": None, "offset": None})
    for several in (1, 40):
        options = {"hdf5_path": path, "batch_size": several}
        with AsyncReader(options, fields={"a": field, "b": plain}) as reader:
            a, b = reader.get_next_batch()
            for factor, apply in ((field.scale, np.multiply), (field.offset, np.add)):
                if factor is not None:
                    values = np.asarray(factor, "f4")
                    b = apply(b, values.reshape(shape) if values.ndim else values)
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("factor", [{"channel_dim": 1, "scale": [1, 2, 3]}, {"scale": range(9)}])
def test_factors_of_other_elements_than_channels_that_move_to_the_front(tmp_path, factor):
    rows = RNG.integers(0, 99, (7, 3, 3)).astype("i2")
    path = write(tmp_path / "a.h5", rows)
    with AsyncReader(hdf5_path=path, fields={"x": Field("x", axes=(0, 2, 1), **factor)}) as reader:
        found = reader.get_next_batch().x
    values = np.array(list(factor["scale"]), "f4")
    shape = (1, 3) if "channel_dim" in factor else (3, 3)
    np.testing.assert_array_equal(found, rows.transpose(0, 2, 1) * values.reshape(shape))


@each(
    "field, message",
    [
        (Field("x", channel_dim=0, scale=[1, 2]), "counts samples"),
        (Field("x", channel_dim=3, scale=[1, 2]), "whose channels are dimension 2"),
        (Field("x", channel_dim=4, scale=[1, 2]), "4"),
        (Field("x", channel_dim="z", scale=[1, 2]), "z"),
    ],
)
def test_a_wrong_dimension_of_channels_is_an_error(tmp_path, field, message):
    path = write(tmp_path / "a.h5", np.zeros((20, 2, 5, 3)))
    with pytest.raises(h5async.H5AsyncError, match=message):
        AsyncReader(hdf5_path=path, fields={"x": field})


def test_codes_come_as_int64_where_that_is_asked_for(tmp_path):
    paths = [
        write_column(tmp_path / f"{n}.h5", "categorical", names, (0, 1, -1, 1))
        for n, names in enumerate((("A", "B"), ("B", "C")))
    ]
    for several, expected in ((paths[:1], [0, 1, -1, 1]), (paths, [0, 1, -1, 1, 1, 2, -1, 2])):
        fields = {"c": Field("obs/c", dtype="int64")}
        with AsyncReader(hdf5_path=several, fields=fields) as reader:
            codes = reader.get_next_batch().c
            assert codes.dtype == np.int64
            assert codes.tolist() == expected
