"""`repack`: what it writes is compared with its sources by h5py."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import h5py
import imagecodecs
import numpy as np
import pytest
from cases import each
from corpus import QUIRKS
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from samefiles import assert_same_files
from typer.testing import CliRunner

import h5async
from h5async import ConfigError, DatasetError, RaggedField, ReadError, Split, WriteError
from h5async.cli import app
from h5async.core.binding import load_core
from h5async.packing import objects, repacking, rowsource, safefile
from h5async.packing.chunkwriter import DatasetWriter

DIGITS = Path(__file__).parents[2] / "sample_data" / "digits.h5"
GIB = 2**30
LARGE = [name for name in QUIRKS if "behind_" in name or "4_GiB" in name]


@pytest.fixture(autouse=True)
def _no_waiting_for_disks(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def images(tmp_path):
    """A file with images in compressed chunks, their labels and names, and references to them."""
    path = tmp_path / "images.h5"
    rng = np.random.default_rng(0)
    with h5py.File(path, "w", track_order=True) as file:
        data = rng.integers(0, 30, (100, 20, 20, 3)).astype(np.uint8)
        file.create_dataset("data", data=data, chunks=(8, 20, 20, 3), compression="gzip")
        file["labels"] = np.arange(100)
        names = [f"image {i}" for i in range(100)]
        file.create_dataset("names", data=names, dtype=h5py.string_dtype())
        file["labels"].make_scale("label")
        file["data"].dims[0].attach_scale(file["labels"])
        file["other"] = np.arange(7)
        file["again"] = file["data"]
        for number in range(20):  # so many that HDF5 keeps them in a heap
            file[f"group/{number}"] = number
        file.attrs["which"] = file["data"].ref
    return path


def assert_has(path, source, rows, names=("data", "labels", "names")):
    with h5py.File(path) as found, h5py.File(source) as expected:
        for name in names:
            assert np.array_equal(found[name][...], expected[name][...][rows])


@each("name", [name for name in QUIRKS if name not in LARGE and QUIRKS[name].way != "unreadable"])
@each("small_nbytes", [objects.SMALL_NBYTES, -1])
@pytest.mark.sampled(60)
def test_nothing_changes_in_files_with_quirks(tmp_path, monkeypatch, name, small_nbytes):
    monkeypatch.setattr(objects, "SMALL_NBYTES", small_nbytes)
    monkeypatch.setattr(rowsource, "_BY_READER_NBYTES", small_nbytes)
    path = QUIRKS[name].write(tmp_path)
    monkeypatch.chdir(tmp_path)
    h5async.repack(path, tmp_path / "new.h5", verify=not isinstance(QUIRKS[name].way, type))
    assert_same_files(path, tmp_path / "new.h5")


def test_a_file_that_differs_does_not_get_the_name(images, tmp_path, monkeypatch):
    encoded = DatasetWriter._encoded

    def spoiled(self, offset, values):
        values = values.copy()
        values.reshape(-1).view(np.uint8)[0] ^= 1
        return encoded(self, offset, values)

    monkeypatch.setattr(DatasetWriter, "_encoded", spoiled)
    with pytest.raises(WriteError, match='"data", rows 0 to 100 differs'):
        h5async.repack(images, tmp_path / "new.h5", chunk_samples=3, verify=True)
    assert {one.name for one in tmp_path.iterdir()} == {"images.h5", "new.h5.differs"}


def test_other_chunks_and_filters(images, tmp_path):
    path = tmp_path / "new.h5"
    h5async.repack(images, path, chunk_samples=3, filter="shuffle+gzip:9", verify=True)
    assert_has(path, images, slice(None))
    with h5py.File(path) as file:
        assert file["data"].chunks == (3, 20, 20, 3)
        assert (file["data"].compression_opts, file["data"].shuffle) == (9, True)
        assert file["again"] == file["data"] == file[file.attrs["which"]]
        assert file["data"].dims[0][0] == file["labels"]
        assert file["other"].chunks is None
    assert_same_files(images, path, changed=[b"/data", b"/again", b"/labels", b"/names"])


def test_chunks_and_datatype_of_a_dataset(images, tmp_path):
    path = tmp_path / "new.h5"
    h5async.repack(images, path, chunks={"data": "7,0,5,1"}, dtype={"data": "float32"})
    with h5py.File(path) as file:
        assert (file["data"].chunks, file["data"].dtype) == ((7, 20, 5, 1), np.float32)
    assert_has(path, images, slice(None))


def test_values_of_virtual_datasets_can_be_copied(images, tmp_path):
    path, new = tmp_path / "virtual.h5", tmp_path / "new.h5"
    with h5py.File(path, "w") as file, h5py.File(images) as source:
        for name in ("data", "labels", "names"):
            layout = h5py.VirtualLayout(source[name].shape, source[name].dtype)
            layout[:] = h5py.VirtualSource(images.name, name, source[name].shape)
            file.create_virtual_dataset(name, layout)
    h5async.repack(path, new, virtual="copy")
    images_moved = images.rename(tmp_path / "moved.h5")
    assert_has(new, images_moved, slice(None))


@pytest.mark.parametrize("options", [{}, {"chunk_samples": 3}])
def test_fill_values_of_variable_length(tmp_path, options):
    path, new, kind = tmp_path / "in.h5", tmp_path / "new.h5", h5py.string_dtype()
    with h5py.File(path, "w") as file:
        file.create_dataset("texts", (9,), kind, chunks=(9,), fillvalue="none")[1:3] = ["a", "b"]
    h5async.repack(path, new, fields=["texts"], verify=True, **options)
    with h5py.File(new) as file:
        assert file["texts"].fillvalue == b"none"
        assert file["texts"].asstr()[:4].tolist() == ["none", "a", "b", "none"]


def test_another_datatype_in_the_same_chunks(images, tmp_path):
    path = tmp_path / "new.h5"
    h5async.repack(images, path, dtype={"data": "float64"}, verify=True)
    with h5py.File(path) as file:
        assert (file["data"].chunks, file["data"].dtype) == ((8, 20, 20, 3), np.float64)
    assert_has(path, images, slice(None))


def test_filters_that_would_change_values_once_more(tmp_path):
    path, new = tmp_path / "in.h5", tmp_path / "new.h5"
    with h5py.File(path, "w") as file:
        rng = np.random.default_rng(0)
        file.create_dataset("floats", data=rng.normal(size=(99, 9)), chunks=(9, 9), scaleoffset=2)
        file.create_dataset("numbers", data=rng.integers(9, size=(99, 9)), scaleoffset=0)
    with pytest.raises(DatasetError, match='"floats": its filter scaleoffset is lossy'):
        h5async.repack(path, new, chunk_samples=2)
    h5async.repack(path, new, indices="9:27", verify=True)
    assert_has(new, path, slice(9, 27), ["floats", "numbers"])
    h5async.repack(path, new, chunk_samples=2, filter="lzf", verify=True, overwrite=True)
    assert_has(new, path, slice(None), ["floats", "numbers"])


def test_blosc_leaves_out_elements_of_variable_length(images, tmp_path):
    pytest.importorskip("hdf5plugin")
    path = tmp_path / "new.h5"
    h5async.repack(images, path, filter="blosc-zstd", chunk_samples=9, verify=True)
    assert_has(path, images, slice(None))
    with h5py.File(path) as file:
        assert [len(file[name]._filters) for name in ("data", "names")] == [1, 0]


def test_what_was_finished_before_is_only_taken_if_it_is_the_same(images, tmp_path):
    path, other = tmp_path / "new.h5", tmp_path / "other.h5"
    options = {"chunk_samples": 3, "filter": "gzip:9"}
    h5async.repack(images, path, **options)
    before = path.stat().st_ino, path.stat().st_mtime_ns
    h5async.repack(images, path, **options, resume=True)
    assert before == (path.stat().st_ino, path.stat().st_mtime_ns)
    with h5py.File(other, "w") as file:
        file["data"] = 1
    for files, changed in [
        (images, {"chunk_samples": 50}),
        (images, {"filter": "gzip:1"}),
        (images, {"indices": "1:"}),
        (other, {}),
    ]:
        with pytest.raises(ConfigError, match="is not the result of these files and options"):
            h5async.repack(files, path, **options | changed, resume=True)
    assert before == (path.stat().st_ino, path.stat().st_mtime_ns)


ROWS = {"10:60": slice(10, 60), "::3": slice(None, None, 3), "8:88": slice(8, 88)}


@each("indices", ROWS)
def test_some_samples(images, tmp_path, indices):
    path = tmp_path / "new.h5"
    h5async.repack(images, path, indices=indices, overwrite=True)
    assert_has(path, images, ROWS[indices])
    with h5py.File(path) as file:
        assert file["other"].shape == (7,)


def test_samples_of_a_split_are_those_of_a_reader(images, tmp_path):
    split = Split("train", {"train": 0.8, "val": 0.2})
    chosen = {"indices": split, "shuffle": "full", "seed": 3}
    h5async.repack(images, tmp_path / "new.h5", verify=True, **chosen)
    with h5async.AsyncReader(chosen, hdf5_path=images, batch_size=80) as reader:
        rows = reader.get_next_batch().index.copy()
    assert_has(tmp_path / "new.h5", images, rows)


def test_stored_chunks_are_copied(images, tmp_path):
    found = h5async.repack(images, tmp_path / "new.h5", indices="8:52")
    assert found.plan.datasets[0].how == (
        "cut into other chunks, but 40 of 44 rows are copied as stored"
    )
    with h5py.File(tmp_path / "new.h5") as new, h5py.File(images) as old:
        for row in range(0, 40, 8):
            one = new["data"].id.read_direct_chunk((row, 0, 0, 0))
            assert one == old["data"].id.read_direct_chunk((row + 8, 0, 0, 0))
    assert_has(tmp_path / "new.h5", images, slice(8, 52))


def test_several_files_become_one(images, tmp_path):
    first = tmp_path / "first.h5"
    h5async.repack(images, first, indices=":12")
    h5async.repack([first, images], tmp_path / "new.h5")
    assert_has(tmp_path / "new.h5", images, [*range(12), *range(100)])


@pytest.mark.parametrize("options", [{}, {"chunk_samples": 3}, {"indices": "1:22"}])
@pytest.mark.parametrize("empty", range(3))
def test_values_that_one_file_never_wrote(tmp_path, empty, options):
    files, expected = [tmp_path / f"{number}.h5" for number in range(3)], []
    for number, path in enumerate(files):
        with h5py.File(path, "w") as file:
            rows = (8, 300)
            data = file.create_dataset("data", rows, "i4", chunks=(4, 300), fillvalue=number)
            if number != empty:
                data[4:] = 7 + np.arange(1200).reshape(4, 300)
            expected.append(data[...])
    new = tmp_path / "new.h5"
    h5async.repack(files, new, verify=True, **options)
    rows = slice(1, 22) if "indices" in options else slice(None)
    with h5py.File(new) as file:
        assert np.array_equal(file["data"], np.concatenate(expected)[rows])


def test_classes_and_categories_of_packed_files_are_united(tmp_path):
    files, names = [tmp_path / "0.h5", tmp_path / "1.h5"], [["cat", "dog"], ["ant", "cat", "bee"]]
    for file, classes in zip(files, names, strict=True):
        count = 50 * len(classes)  # a name for each sample: together more than int8 can count
        with h5py.File(file, "w") as new:
            new["labels"] = (np.arange(count) % len(classes)).astype(np.int8)
            new["labels"].attrs["classes"] = new["classes"] = classes
            new["each/codes"] = np.arange(count).astype(np.int16 if len(classes) > 2 else np.int8)
            new["each/categories"] = [f"{number} of {file.name}" for number in range(count)]
    h5async.repack(files, tmp_path / "new.h5", shuffle="full", verify=True)
    with h5py.File(tmp_path / "new.h5") as file:
        classes = file["classes"].asstr()[...]
        assert (
            classes.tolist() == [*file["labels"].attrs["classes"]] == ["cat", "dog", "ant", "bee"]
        )
        labels = classes[file["labels"]]
        each = file["each/categories"].asstr()[...][file["each/codes"]]
        assert sorted(each) == sorted(
            [*(f"{i} of 0.h5" for i in range(100)), *(f"{i} of 1.h5" for i in range(150))]
        )
        for label, one in zip(labels, each, strict=True):
            number, which = one.split(" of ")
            assert label == names[int(which[0])][int(number) % (2 + int(which[0]))]
    with h5py.File(files[1], "r+") as file:
        del file["labels"].attrs["classes"]
    for several in (files, files[::-1]):
        with pytest.raises(DatasetError, match='classes of "labels" differ from those'):
            h5async.repack(several, tmp_path / "new.h5", overwrite=True)


def test_numbers_of_differing_units(tmp_path):
    files = [tmp_path / "0.h5", tmp_path / "1.h5"]
    for file, units in zip(files, ("seconds", "milliseconds"), strict=True):
        with h5py.File(file, "w") as new:
            new["time"] = np.arange(300)
            new["time"].attrs["units"] = units
    with pytest.raises(DatasetError, match=r'1\.h5: dataset "time" has .*milliseconds.*: convert'):
        h5async.repack(files, tmp_path / "new.h5")
    h5async.repack(files[1:] * 2, tmp_path / "new.h5")


def test_classes_that_are_strings_of_a_fixed_length(tmp_path):
    files = [tmp_path / "0.h5", tmp_path / "1.h5"]
    for file, classes in zip(files, (np.array([b"a", b"b"]), ["longer", "b"]), strict=True):
        with h5py.File(file, "w") as new:
            new["labels"] = np.arange(200) % 2
            new["labels"].attrs["classes"] = new["classes"] = classes
    h5async.repack(files, tmp_path / "new.h5", verify=True)
    with h5py.File(tmp_path / "new.h5") as file:
        assert file["labels"].attrs["classes"].tolist() == ["a", "b", "longer"]
        assert file["classes"].asstr()[...].tolist() == ["a", "b", "longer"]
        assert file["labels"][200:].tolist() == [2, 1] * 100


@pytest.mark.parametrize(
    "options", [{}, {"shuffle": "full", "filter": "lzf"}, {"indices": "3:77", "chunk_samples": 5}]
)
def test_shards_are_joined_by_virtual_datasets(images, tmp_path, options):
    folder = tmp_path / "new"
    folder.mkdir()
    with h5py.File(images) as file:
        nbytes = file["data"][:16].nbytes
    found = h5async.repack(images, folder / "new.h5", shards=nbytes, verify=True, **options)
    assert [one.name for one in found.paths[-2:]] == [f"new-{len(found.paths) - 2:05}.h5", "new.h5"]
    folder = folder.rename(tmp_path / "moved")
    with h5py.File(folder / "new.h5") as file, h5py.File(images) as before:
        rows = file["labels"][...]
        assert all(file[name].is_virtual for name in ("data", "labels", "names"))
        assert np.array_equal(file["other"], before["other"])
        assert file["group/7"][()] == 7
        assert file[file.attrs["which"]] == file["data"] == file["again"]
        assert file["data"].dims[0][0] == file["labels"]
    assert_has(folder / "new.h5", images, rows)
    assert len(rows) == (74 if "indices" in options else 100)
    h5async.repack(images, folder / "new.h5", shards=nbytes, resume=True, **options)
    with pytest.raises(ConfigError, match="exists"):
        h5async.repack(images, folder / "new.h5", shards=nbytes, **options)


def test_shards_are_gone_on_with(images, tmp_path, monkeypatch):
    def stop(done, count):
        if done > count // 2:
            raise KeyboardInterrupt

    options = {"shards": "20kB", "chunk_samples": 4}
    with pytest.raises(KeyboardInterrupt):
        h5async.repack(images, tmp_path / "new.h5idx", progress=stop, **options)
    assert not (tmp_path / "new.h5idx").exists()
    compared = []
    with monkeypatch.context() as patch:
        verify = repacking.Repacking.verify
        patch.setattr(repacking.Repacking, "verify", lambda *args: compared.append(verify(*args)))
        found = h5async.repack(images, tmp_path / "new.h5idx", resume=True, **options)
    assert not compared, "finished shards are read again"
    assert not list(tmp_path.glob("*.finished*"))
    with h5async.AsyncReader(hdf5_path=tmp_path / "new.h5idx", batch_size=100) as reader:
        data, labels = reader.get_next_batch()
        with h5py.File(images) as file:
            assert np.array_equal(data, file["data"])
        assert np.array_equal(labels, np.arange(100))
    h5async.repack(images, tmp_path / "new.h5idx", shards="60kB", overwrite=True)
    assert len(list(tmp_path.glob("new-*.h5"))) < len(found.paths) - 1
    with pytest.raises(ConfigError, match="is a source"):
        h5async.repack(images, images, shards="20kB", overwrite=True)


def test_chunks_of_another_shape_are_not_copied(images, tmp_path):
    other = tmp_path / "other.h5"
    h5async.repack(images, other, chunks={"data": (10, 20, 20, 3)})
    h5async.repack([images, other], tmp_path / "new.h5", indices=":196", verify=True)
    assert_has(tmp_path / "new.h5", images, [*range(100), *range(96)])


def test_rows_that_are_larger_than_the_memory(tmp_path):
    path = tmp_path / "wide.h5"
    with h5py.File(path, "w") as file:
        data = np.arange(4 * 300 * 1000).reshape(4, 300, 1000)
        file.create_dataset("data", data=data, chunks=(4, 10, 100), compression="lzf")
    h5async.repack(path, tmp_path / "new.h5", chunks={"data": (1, 20, 1000)}, memory="8MB")
    assert_has(tmp_path / "new.h5", path, slice(None), ["data"])


@pytest.mark.parametrize("verify", [False, True])
def test_a_file_is_replaced_by_its_repack(images, tmp_path, verify):
    before = shutil.copy(images, tmp_path / "before.h5")
    h5async.repack(images, images, filter="lzf", verify=verify)
    assert_has(images, before, slice(None))
    assert sorted(one.name for one in tmp_path.iterdir()) == ["before.h5", "images.h5"]


@pytest.mark.skipif(load_core() is None, reason="far sources need the core")
def test_files_in_a_store(images, tmp_path, store):
    new = tmp_path / "new.h5"
    for options in ({}, {"chunk_samples": 3, "shuffle": "window", "overwrite": True}):
        h5async.repack(store.put(images), new, verify=True, **options)
    with h5py.File(new) as file:
        rows = file["labels"][...]
    assert_has(new, images, rows)


def test_a_plan_writes_nothing(images, tmp_path):
    h5async.repack(images, tmp_path / "new.h5", filter="lzf", dry_run=True)
    assert [one.name for one in tmp_path.iterdir()] == ["images.h5"]


def test_a_file_that_changes_meanwhile_is_an_error(images, tmp_path):
    def change(done, count):
        with open(images, "ab") as file:
            file.write(b"more")

    with pytest.raises(ReadError, match=r"images\.h5 was changed while it was being repacked"):
        h5async.repack(images, tmp_path / "new.h5", chunk_samples=1, progress=change)
    assert not (tmp_path / "new.h5").exists()


def test_an_interrupted_repack_goes_on(images, tmp_path, monkeypatch):
    class StopError(Exception):
        pass

    def stop(done, count):
        if done >= count / 2:
            raise StopError

    monkeypatch.setattr(repacking.Repacking, "piece_nbytes", 10_000)
    path = tmp_path / "new.h5"
    options = {"chunk_samples": 1, "filter": "lzf"}
    with pytest.raises(StopError):
        h5async.repack(images, path, progress=stop, **options)
    with pytest.raises(ConfigError, match="started with other sources or options"):
        h5async.repack(images, path, resume=True, chunk_samples=2)
    h5async.repack(images, path, resume=True, **options)
    assert_has(path, images, slice(None))


def test_a_repack_that_is_interrupted_again_and_again_goes_on(tmp_path, monkeypatch):
    class StopError(Exception):
        pass

    monkeypatch.setattr(repacking.Repacking, "piece_nbytes", 300_000)
    monkeypatch.setattr(safefile, "_COMMIT_SECONDS", 0.0)
    with h5py.File(tmp_path / "old.h5", "w") as file:
        file["data"] = np.random.default_rng(0).random((20, 20_000))  # at the end of the file
    times = 0
    for fields in (None, ["data"]):
        options = {"dtype": {"data": "float32"}} if fields else {}
        while True:
            left = 3

            def stop(done, count):
                nonlocal left
                left -= 1
                if not left:
                    raise StopError

            try:
                h5async.repack(
                    tmp_path / "old.h5", tmp_path / "new.h5", resume=True, progress=stop, **options
                )
                break
            except StopError:
                times += 1
        with h5py.File(tmp_path / "new.h5") as file, h5py.File(tmp_path / "old.h5") as old:
            assert np.array_equal(file["data"], old["data"][...].astype(file["data"].dtype))
        (tmp_path / "new.h5").unlink()
    assert times > 5


def corrupt_value(file):
    file["names"][3] = "other"


def corrupt_rows(file):
    file["data"][7, 0, 0, 0] += 1


def corrupt_attribute(file):
    file.attrs["which"] = file["labels"].ref


def corrupt_link(file):
    del file["again"]
    file["again"] = file["labels"]


CORRUPTIONS = {
    'dataset "names" differs': corrupt_value,
    'dataset "data", rows 0 to 100 differs': corrupt_rows,
    'attribute "which" differs': corrupt_attribute,
    'link "/again" differs': corrupt_link,
}


@each("message", CORRUPTIONS)
def test_verify_finds_differences(images, tmp_path, monkeypatch, message):
    def write_and_corrupt(work, path, progress):
        is_new = write(work, path, progress)
        with h5py.File(path, "r+") as file:
            CORRUPTIONS[message](file)
        return is_new

    write = repacking.Repacking.write
    monkeypatch.setattr(repacking.Repacking, "write", write_and_corrupt)
    with pytest.raises(WriteError, match=message):
        h5async.repack(images, tmp_path / "new.h5", verify=True, overwrite=True)


def test_other_datasets_may_be_left_out(images, tmp_path):
    h5async.repack(images, tmp_path / "new.h5", fields=["labels"], only_fields=True, verify=True)
    with h5py.File(tmp_path / "new.h5") as file:
        assert list(file) == ["labels"]
        assert not file.attrs["which"]


@each("kind", ["offsets", "ends", "lengths"])
@pytest.mark.parametrize("has_labels", [True, False])
def test_samples_of_any_length(tmp_path, kind, has_labels):
    files, rng = [tmp_path / f"{number}.h5" for number in range(2)], np.random.default_rng(0)
    for file in files:
        lengths = rng.integers(0, 9, 50)
        told = {"offsets": np.append(0, lengths.cumsum()), "ends": lengths.cumsum()}
        with h5py.File(file, "w") as new:
            new["tokens"] = np.arange(lengths.sum(), dtype=np.int16)
            new["other"] = rng.random((lengths.sum(), 3))
            new["where"] = told.get(kind, lengths).astype(np.int32)
            if has_labels:
                new["labels"] = np.arange(50)
    spelled = "where" if kind == "offsets" else f"where:{kind}"
    options = {"shuffle": "full", "seed": 5, "indices": "3:90"}
    with pytest.raises(DatasetError, match=f'"where" seems to delimit .*={{.*: .{spelled}.}}'):
        h5async.repack(files, tmp_path / "new.h5", **options)
    chosen = {"offsets": {"tokens": spelled, "other": spelled}, "overwrite": True, "verify": True}
    h5async.repack(files, tmp_path / "new.h5", **options, **chosen)
    h5async.repack(files, tmp_path / "new.h5idx", **options, **chosen, shards="1kB")
    fields = {
        "tokens": RaggedField("tokens", offsets="where", offsets_kind=kind),
        "other": RaggedField("other", offsets="where", offsets_kind=kind),
        **({"labels": "labels"} if has_labels else {}),
    }
    with h5async.AsyncReader(options, hdf5_path=files, fields=fields, batch_size=87) as reader:
        expected = reader.get_next_batch().copy()
    for new in (tmp_path / "new.h5", tmp_path / "new.h5idx"):
        with h5async.AsyncReader(hdf5_path=new, fields=fields, batch_size=87) as reader:
            found = reader.get_next_batch()
            for name in fields:
                for one, other in zip(found[name], expected[name], strict=True):
                    assert np.array_equal(one, other)
    with pytest.raises(ConfigError, match="cannot form a virtual dataset"):
        h5async.repack(files, tmp_path / "other.h5", shards="1kB", **chosen)
    wrong = {"other": "where", "tokens": "where:ends" if kind == "offsets" else "where"}
    message = '"where" does not fit other, tokens, of|different numbers of ragged'
    with pytest.raises(DatasetError, match=message):
        h5async.repack(files, tmp_path / "new.h5", offsets=wrong, overwrite=True)


def test_what_looks_like_bounds_is_refused(images, tmp_path):
    with h5py.File(images, "r+") as file:
        file["offsets"] = np.arange(101) * 3
    with pytest.raises(DatasetError, match='"offsets" seems to delimit samples of any length'):
        h5async.repack(images, tmp_path / "new.h5", indices="5:")
    with h5py.File(images, "r+") as file:
        del file["offsets"]
        file["episode_ends"] = [20, 50, 100]
    with pytest.raises(DatasetError, match='"episode_ends" seems to delimit samples of any length'):
        h5async.repack(images, tmp_path / "new.h5", indices="5:")


def test_a_full_disk_is_an_error_and_the_repack_goes_on(images, tmp_path, monkeypatch):
    def full(descriptor, data, offset):
        if offset > 20_000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(descriptor, data, offset)

    pwrite, path = os.pwrite, tmp_path / "new.h5"
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(WriteError, match="No space left on device"):
            h5async.repack(images, path, chunk_samples=1)
    assert not path.exists()
    h5async.repack(images, path, chunk_samples=1, resume=True)
    assert_has(path, images, slice(None))


WRONG = {
    "nothing": ({"fields": ["nothing"]}, DatasetError, 'there is no dataset "nothing"'),
    "rank": ({"chunks": {"data": (1, 2)}}, ConfigError, '"data" has 4 dimensions'),
    "filter": ({"filter": "zip"}, ConfigError, "cannot write the filter 'zip'"),
    "format": ({"encode": {"data": "gif"}}, ConfigError, "must be png, png:0 to png:9"),
    "image": ({"encode": {"labels": "png"}}, ConfigError, r"for images, .* found int64 \(100,\)"),
    "dtype": ({"dtype": {"names": "f4"}}, ConfigError, "is for datasets of numbers"),
}


@each("name", WRONG)
def test_options_that_do_not_fit(images, tmp_path, name):
    options, error, message = WRONG[name]
    with pytest.raises(error, match=message):
        h5async.repack(images, tmp_path / "new.h5", **options)


@each("format_", ["png", "png:1", "jpeg:80"])
@pytest.mark.parametrize("options", [{}, {"shards": "50kB", "indices": "::-1", "memory": "8MB"}])
def test_images_are_encoded(images, tmp_path, format_, options):
    new = tmp_path / "new.h5"
    h5async.repack(images, new, encode={"data": format_}, verify=True, overwrite=True, **options)
    with h5async.AsyncReader(hdf5_path=new, batch_size=100) as reader:
        data, labels = reader.get_next_batch()
        pixels = np.stack([data[number] for number in range(100)]) if options else np.asarray(data)
    with h5py.File(images) as file, h5py.File(new) as made:
        expected = file["data"][...][labels]
        assert made["data"].dtype == h5py.vlen_dtype(np.uint8)
        assert made["again"] == made["data"]
        encode = imagecodecs.png_encode if "png" in format_ else imagecodecs.jpeg8_encode
        level = {"png": 3, "png:1": 1, "jpeg:80": 80}[format_]
        assert made["data"][3].tobytes() == encode(expected[3], level=level)
    if "png" in format_:
        assert np.array_equal(pixels, expected)
    h5async.repack(images, new, encode={"data": format_}, resume=True, **options)


@st.composite
def stored(draw):
    """Draw a dataset, how it is to be stored, and which samples."""
    rank = draw(st.integers(1, 3))
    shape = draw(st.tuples(*[st.integers(1, 12)] * rank))
    axis = draw(st.integers(0, rank - 1))
    chunks = [draw(st.tuples(*(st.integers(1, n) for n in shape))) for _ in range(2)]
    indices = draw(
        st.none() | st.lists(st.integers(0, shape[axis] - 1), max_size=15) | st.just("1:")
    )
    return {
        "data": np.arange(np.prod(shape))
        .reshape(shape)
        .astype(draw(st.sampled_from(["i2", ">f8"]))),
        "chunks": draw(st.sampled_from([None, chunks[0]])),
        "maxshape": draw(st.sampled_from([None, (None,) * rank])),
        "filter": draw(st.sampled_from([None, "gzip", "lzf"])),
        "axis": axis,
        "options": {
            "num_dim": axis,
            "fields": ["data"],
            "chunks": draw(st.sampled_from([{}, {"data": chunks[1]}])),
            "filter": draw(st.sampled_from([None, "none", "shuffle+gzip:1", "lzf"])),
            "indices": indices,
        },
        "piece_nbytes": draw(st.sampled_from([50, 400, 1 << 20])),
    }


@given(stored())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
def test_any_shape_chunks_and_samples(tmp_path_factory, monkeypatch, case):
    monkeypatch.setattr(rowsource, "_BY_READER_NBYTES", -1)
    monkeypatch.setattr(repacking.Repacking, "piece_nbytes", case["piece_nbytes"])
    folder = tmp_path_factory.mktemp("any")
    kept = case["chunks"] or case["maxshape"] or case["filter"]
    storage = {"chunks": case["chunks"], "maxshape": case["maxshape"]}
    with h5py.File(folder / "old.h5", "w") as file:
        storage = storage if kept else {}
        compression = {"compression": case["filter"]} if kept else {}
        file.create_dataset("data", data=case["data"], **storage, **compression)
    h5async.repack(folder / "old.h5", folder / "new.h5", verify=True, **case["options"])
    indices, axis = case["options"]["indices"], case["axis"]
    rows = slice(1, None) if indices == "1:" else slice(None) if indices is None else indices
    rows = np.asarray(rows, np.int64) if isinstance(rows, list) else rows
    with h5py.File(folder / "new.h5") as file:
        expected = np.moveaxis(np.moveaxis(case["data"], axis, 0)[rows], 0, axis)
        assert np.array_equal(file["data"][...], expected)
        assert file["data"].dtype == case["data"].dtype
    shutil.rmtree(folder)


def test_command(images, tmp_path):
    path = tmp_path / "new.h5"
    typed = ["repack", images, "-o", path, "--fields", "data,labels", "--chunk", "data=5,0,0,0"]
    typed += ["--filter", "lzf", "--dtype", "labels=int16", "--verify", "--memory", "100MB"]
    found = CliRunner().invoke(app, [str(one) for one in typed])
    assert (found.exit_code, found.stderr) == (0, "")
    assert "data  cut into other chunks: (100, 20, 20, 3), chunks (5, 20, 20, 3)" in found.stdout
    assert "at most about 100.0 MB of rows are in memory" in found.stdout
    assert_has(path, images, slice(None))
    with h5py.File(path) as file:
        assert (file["labels"].dtype, file["data"].compression) == (np.int16, "lzf")


SAMPLED = ["data", "refs", "regions", "pairs"]


@pytest.mark.parametrize("chunks", [None, (4,)])
@pytest.mark.parametrize(
    "options",
    [
        {"chunk_samples": 3},
        {"indices": [3, 2, 5], "fields": SAMPLED},
        {"chunks": {"refs": (3,), "pairs": (3,)}},
    ],
)
def test_references_lead_to_the_copies(tmp_path, chunks, options):
    source, target = tmp_path / "in.h5", tmp_path / "out.h5"
    with h5py.File(source, "w") as file:
        file["before"] = np.arange(20_000)  # so that addresses differ in the target
        file["group/one"] = np.arange(30)
        file["data"] = np.arange(8)
        dtype = np.dtype([("number", "i4"), ("object", h5py.ref_dtype)])
        refs = file.create_dataset("refs", 8, h5py.ref_dtype, chunks=chunks)
        regions = file.create_dataset("regions", 8, h5py.regionref_dtype, chunks=chunks)
        pairs = file.create_dataset("pairs", 8, dtype, chunks=chunks)
        for number in range(8):
            refs[number] = file["group/one" if number % 2 else "before"].ref
            regions[number] = file["group/one"].regionref[number : number + 2]
            pairs[number] = number, refs[number]
    h5async.repack(source, target, verify=True, **options)
    taken = options.get("indices", range(8))
    with h5py.File(target) as file:
        for at, number in enumerate(taken):
            name = "/group/one" if number % 2 else "/before"
            assert file[file["refs"][at]].name == name
            assert file[file["pairs"][at]["object"]].name == name
            assert file["pairs"][at]["number"] == number
            region = file["regions"][at]
            assert file[region].name == "/group/one"
            assert file[region][region].tolist() == [number, number + 1]


def file_with_regions(path):
    with h5py.File(path, "w") as file:
        file["before"], file["removed"] = np.arange(20_000), np.arange(5)
        file["data"] = np.arange(8)
        file.create_dataset("big", data=np.arange(4000), chunks=(100,), maxshape=(None,))
        regions = file.create_dataset("regions", 8, h5py.regionref_dtype, chunks=(4,))
        for number in range(6):
            regions[number] = file["big"].regionref[number : number + 100 : 3]
        regions[6] = file["removed"].regionref[1:3]
        file["data"].attrs["regions"] = file["removed"].regionref[1:3]
        del file["removed"]
    return path


def test_region_references_to_what_is_rewritten_or_removed(tmp_path):
    source, target = file_with_regions(tmp_path / "in.h5"), tmp_path / "out.h5"
    chunks = {"big": (50,), "regions": (3,)}
    h5async.repack(source, target, chunks=chunks, verify=True)
    with h5py.File(target) as file:
        assert file["big"].chunks == (50,)
        for number in range(6):
            values = file["big"][file["regions"][number]]
            assert values.tolist() == list(range(number, number + 100, 3))
        assert not file["regions"][6]
        assert not file["regions"][7]
        assert not file["data"].attrs["regions"]


def test_region_references_to_chosen_samples_are_refused(tmp_path):
    source = file_with_regions(tmp_path / "in.h5")
    with h5py.File(source, "a") as file:
        file["regions"][7] = file["data"].regionref[2:4]
    chosen = {"indices": [5, 6, 7], "fields": ["data", "regions"]}
    with pytest.raises(DatasetError, match=r'"regions".* leads to dataset "data", .*keep all'):
        h5async.repack(source, tmp_path / "out.h5", **chosen)
    assert not (tmp_path / "out.h5").exists()
