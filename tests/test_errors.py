"""Every error comes, once, where it belongs, says what it is about, and leaves a usable reader."""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import shutil

import h5py
import numpy as np
import pytest
from cases import each
from conftest import assert_same_bits, open_descriptors, our_threads, poison
from hdf5files import type_for_h5py

import h5async.reader.readersetup
from h5async import (
    AsyncReader,
    BatchTimeoutError,
    ConfigError,
    DatasetError,
    DeviceError,
    Field,
    H5AsyncError,
    PostprocessError,
    ReaderClosedError,
    ReadError,
    UnsafeFileError,
)
from h5async.io.stores import LocalSource

SAMPLES, BATCH = 24, 4
VALUES = np.arange(SAMPLES * 30, dtype="i8").reshape(SAMPLES, 30)
LAYOUTS = {
    "contiguous": {},
    "rows": {"chunks": (3, 30)},
    "tiles": {"chunks": (3, 7)},
    "gzip": {"chunks": (3, 30), "compression": "gzip"},
    "gzip tiles": {"chunks": (3, 7), "compression": "gzip", "fletcher32": True},
}
THREADS = [0, 2]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "a.h5"


def plain_file(path, values=VALUES, **options):
    with h5py.File(path, "w") as file:
        file.create_dataset("data", data=values, **options)
        file["labels"] = np.arange(len(values))
    return path


def file_of_many_names(path):
    with h5py.File(path, "w") as file:
        file["images/train"] = np.zeros((6, 4, 4), "u1")
        file["images/labels"] = np.zeros(6, "i8")
        file["other"] = np.zeros(7)
        file["type"] = np.dtype("i4")
    return path


def read_only_by_h5py(path, value=1):
    """A file whose data only h5py may read; what was there before is replaced by rename."""
    new = path.with_suffix(".new")
    with h5py.File(new, "w") as file:
        file.create_dataset("data", (6, 4), type_for_h5py(), chunks=(2, 2))[...] = value
        file["labels"] = np.full(6, value)
    os.replace(new, path)
    return path


def reader_of(path, **options):
    options = {"batch_size": BATCH, "num_threads": 0, "device": "cpu", **options}
    return AsyncReader(hdf5_path=path, **options)


def error_of(*kinds, **options):
    """Return the error with which a reader refuses to be made; it holds nothing, and pickles."""
    with pytest.raises(kinds[0]) as caught:
        reader_of(options.pop("path"), **options)
    error = caught.value
    assert isinstance(error, H5AsyncError)
    assert all(isinstance(error, kind) for kind in kinds)
    assert_pickles(error)
    text = str(error)
    assert "\n" not in text
    return text


def assert_pickles(error):
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)


# --- the tree ------------------------------------------------------------------------------------


@each(
    "kind, builtin",
    [
        (ConfigError, ValueError),
        (DatasetError, KeyError),
        (ReadError, OSError),
        (UnsafeFileError, PermissionError),
        (DeviceError, RuntimeError),
        (ReaderClosedError, RuntimeError),
        (BatchTimeoutError, TimeoutError),
        (PostprocessError, Exception),
    ],
)
def test_errors_are_ours_and_builtin_and_show_their_message_plainly(kind, builtin):
    error = kind('a.h5: dataset "data" is ill')
    assert isinstance(error, H5AsyncError)
    assert isinstance(error, builtin)
    assert str(error) == 'a.h5: dataset "data" is ill'
    assert_pickles(error)


# --- files that cannot be opened -----------------------------------------------------------------


def test_missing_file(path):
    text = error_of(ReadError, OSError, path=path)
    assert text == f"cannot open {path}: there is no such file"


def test_directory(tmp_path):
    assert "it is a directory" in error_of(ReadError, OSError, path=tmp_path)


@pytest.mark.parametrize("content", [b"", b"no HDF5", b"\x89HDF\r\n\x1a\n", b"\0" * 5000])
def test_file_that_is_not_hdf5(path, content):
    path.write_bytes(content)
    assert f"cannot open {path}" in error_of(ReadError, OSError, path=path)


@pytest.mark.parametrize("how", LAYOUTS.values(), ids=LAYOUTS)
@each("share", [0.1, 0.5, 0.99])
def test_file_that_was_cut_short_before(path, how, share):
    plain_file(path, **how)
    os.truncate(path, int(path.stat().st_size * share))
    assert "it is cut short: " in error_of(ReadError, OSError, path=path)


@pytest.mark.parametrize("how", LAYOUTS.values(), ids=LAYOUTS)
def test_values_that_lie_behind_the_end_of_the_file(path, how, monkeypatch):
    """HDF5 itself does not notice all of them; the layout is checked."""
    plain_file(path, **how)
    stamp = LocalSource.stamp
    monkeypatch.setattr(LocalSource, "stamp", lambda self: stamp(self)._replace(nbytes=3000))
    text = error_of(ReadError, OSError, path=path)
    assert f'{path}: dataset "data"' in text
    assert "the file" in text
    assert "3000 bytes" in text or "more than the file can hold" in text


@pytest.mark.parametrize("how", LAYOUTS.values(), ids=LAYOUTS)
def test_file_that_was_cut_short_and_agrees(path, how):
    """Its superblock was made to say that it ends where it does, within the last values."""
    with h5py.File(path, "w", libver="earliest") as file:
        file["labels"] = np.arange(SAMPLES)
        file.create_dataset("data", data=VALUES, **how)
    end = end_of_data(path) - 1
    with path.open("r+b") as file:
        content = file.read()
        assert content[8] == 0, "the version of the superblock"
        assert int.from_bytes(content[40:48], "little") == len(content) > end
        file.seek(40)
        file.write(end.to_bytes(8, "little"))
        file.truncate(end)
    with h5py.File(path) as file:
        assert list(file) == ["data", "labels"]
    text = error_of(H5AsyncError, path=path)
    assert str(path) in text
    assert '"data"' in text


# --- files that change under a reader ------------------------------------------------------------


def end_of_data(path):
    """Return the byte after the last one of the dataset."""
    with h5py.File(path) as file:
        data = file["data"].id
        if file["data"].chunks is None:
            return data.get_offset() + data.get_storage_size()
        infos = [data.get_chunk_info(i) for i in range(data.get_num_chunks())]
        return max(info.byte_offset + info.size for info in infos)


@each("num_threads", THREADS)
@each("num_dim", [0, 1])
@pytest.mark.parametrize("how", LAYOUTS.values(), ids=LAYOUTS)
@each("cut_at", ["the start", "half", "the last byte"])
def test_file_that_is_cut_short_after_it_was_opened(path, how, num_dim, cut_at, num_threads):
    plain_file(path, **how)
    whole = path.read_bytes()
    end = end_of_data(path)
    expected = np.moveaxis(VALUES, num_dim, 0)
    options = {"num_dim": num_dim, "labels_field": None, "num_threads": num_threads}
    with reader_of(path, **options) as reader:
        poison(reader)
        os.truncate(path, {"the start": 0, "half": end // 2, "the last byte": end - 1}[cut_at])
        failed = []
        for _ in range(len(reader)):
            try:
                batch = reader.get_next_batch()
            except ReadError as error:
                failed.append(str(error))
            else:
                assert_same_bits(batch.data, np.ascontiguousarray(expected[batch.index]))
        assert failed
        for text in failed:
            assert str(path) in text
            assert "cut short" in text
    path.write_bytes(whole)
    with reader_of(path, **options) as reader:
        for batch in reader:
            assert_same_bits(batch.data, np.ascontiguousarray(expected[batch.index]))


@each("num_threads", THREADS)
@pytest.mark.parametrize("how", LAYOUTS.values(), ids=LAYOUTS)
def test_file_that_is_deleted_or_replaced_after_it_was_opened(path, how, num_threads):
    """The reader holds the file that it opened, as any program does."""
    plain_file(path, **how)
    with reader_of(path, num_threads=num_threads) as reader:
        path.unlink()
        for batch in reader:
            assert_same_bits(batch.data, VALUES[batch.index])
        plain_file(path, -VALUES)
        for batch in reader:
            assert_same_bits(batch.data, VALUES[batch.index])


@pytest.mark.parametrize("num_threads", THREADS)
@pytest.mark.parametrize("was_read_before", [False, True])
def test_replaced_file_is_not_mixed_with_the_one_that_was_opened(
    path, was_read_before, num_threads
):
    """Only the data goes through h5py; the labels come from the file that was opened."""
    read_only_by_h5py(path, 1)
    with reader_of(path, num_threads=num_threads) as reader:
        assert reader.layouts["data"].fallback_reason is not None
        assert reader.layouts["labels"].fallback_reason is None
        if was_read_before:
            reader.get_next_batch()
        read_only_by_h5py(path, 2)
        for _ in range(2 * len(reader)):
            with contextlib.suppress(ReadError):
                batch = reader.get_next_batch()
                assert (batch.labels == 1).all()
                assert (batch.data == 1).all()


def test_file_that_is_replaced_while_it_is_being_opened(path, monkeypatch):
    plain_file(path)
    slot_transforms = h5async.reader.readersetup.slot_transforms

    def replace_first(*name):
        shutil.copy(path, f"{path}.new")
        os.replace(f"{path}.new", path)
        return slot_transforms(*name)

    monkeypatch.setattr("h5async.reader.readersetup.slot_transforms", replace_first)
    assert "was replaced by another file after it had been indexed" in error_of(
        ReadError, path=path
    )


@pytest.mark.parametrize("num_threads", THREADS)
@pytest.mark.parametrize("make", [plain_file, read_only_by_h5py])
def test_current_directory_that_changes(tmp_path, path, monkeypatch, make, num_threads):
    make(path)
    monkeypatch.chdir(tmp_path)
    with reader_of(path.name, num_threads=num_threads) as reader:
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        reader.get_next_batch()


# --- datasets that cannot be used ----------------------------------------------------------------


def test_missing_dataset(path):
    file_of_many_names(path)
    text = error_of(DatasetError, KeyError, path=path)
    assert f'{path}: there is no dataset "data"' in text
    for shown in ('"images/train" (6, 4, 4)', '"images/labels" (6,)', '"other" (7,)'):
        assert shown in text
    assert f"h5async read {path} --data-field images/train --labels-field images/labels" in text


def test_missing_labels(path):
    file_of_many_names(path)
    text = error_of(DatasetError, KeyError, path=path, data_field="images/train")
    assert 'there is no dataset "labels"' in text


def test_a_soft_link_that_leads_nowhere(path):
    with h5py.File(path, "w") as file:
        file["labels"], file["data"] = [1, 2], h5py.SoftLink("/raw/images")
    text = error_of(DatasetError, KeyError, path=path)
    assert 'no dataset "data", as its soft link leads to "/raw/images", where there is' in text


def test_weights_of_strings_name_their_dataset(path):
    with h5py.File(path, "w") as file:
        file["data"], file["labels"], file["names"] = [1, 2], [1, 2], ["a", "b"]
    text = error_of(ConfigError, path=path, weights="names")
    assert 'found 2 strings in "names"' in text


def test_missing_dataset_where_there_is_none_at_all(path):
    h5py.File(path, "w").close()
    assert "holds no datasets" in error_of(DatasetError, KeyError, path=path)


def test_missing_dataset_among_hundreds(path):
    with h5py.File(path, "w") as file:
        for i in range(200):
            file[f"field{i:03}"] = np.zeros(3)
    text = error_of(DatasetError, KeyError, path=path)
    assert '"field000"' in text
    assert '"field150"' not in text
    assert " more" in text


@pytest.mark.parametrize(
    ("name", "kind"), [("images", "group"), ("/", "group"), ("type", "named type")]
)
def test_what_is_no_dataset(path, name, kind):
    file_of_many_names(path)
    text = error_of(DatasetError, KeyError, path=path, data_field=name)
    assert f'"{name}" is a {kind}, not a dataset' in text
    assert '"images/train" (6, 4, 4)' in text


def test_links_that_lead_nowhere(path):
    file_of_many_names(path)
    with h5py.File(path, "r+") as file:
        file["soft"] = h5py.SoftLink("/nowhere")
        file["external"] = h5py.ExternalLink("nowhere.h5", "/data")
        file["two"] = h5py.SoftLink("/external")
        file["loop"] = h5py.SoftLink("/loop")
    for name in ("soft", "nowhere/data", "images/x"):
        text = error_of(DatasetError, KeyError, path=path, data_field=name)
        assert f'{path}: there is no dataset "{name}"' in text
        assert '"images/train" (6, 4, 4)' in text
    for name in ("external", "two"):
        text = error_of(DatasetError, KeyError, path=path, data_field=name)
        assert f'{path}: link "external" leads to nowhere.h5, which does not exist' in text
    text = error_of(DatasetError, KeyError, path=path, data_field="loop")
    assert f'{path}: link "loop"' in text
    text = error_of(DatasetError, KeyError, path=path, data_field="other/x")
    assert f'{path}: dataset "other" has no member "x": it is not a compound type' in text


def test_links_to_what_is_no_file(path):
    file_of_many_names(path)
    (path.parent / "directory.h5").mkdir()
    (path.parent / "text.h5").write_text("no HDF5")
    with h5py.File(path, "r+") as file:
        file["directory"] = h5py.ExternalLink("directory.h5", "/data")
        file["text"] = h5py.ExternalLink("text.h5", "/data")
        file["outside"] = h5py.ExternalLink("/proc/version", "/data")
    text = error_of(ReadError, OSError, path=path, data_field="directory")
    assert f'{path}: link "directory"' in text
    assert "not a regular file" in text
    text = error_of(ReadError, OSError, path=path, data_field="text")
    assert f"cannot open {path.parent / 'text.h5'}" in text
    text = error_of(UnsafeFileError, PermissionError, path=path, data_field="outside")
    assert f'{path}: link "outside" refers to /proc/version' in text
    assert "allow_external" in text


COMPOUND = np.dtype([("energy", "f4"), ("where", [("x", "i2"), ("y", "i2")])])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("table/mass", 'has no member "mass"; it has "energy", "where"'),
        ("table/where/z", 'has no member "where/z"; it has "x", "y"'),
        ("table/energy/x", 'has no member "energy/x": it is not a compound type'),
        ("table/names", "variable length"),
    ],
)
def test_members_that_are_not_there(path, name, message):
    dtype = COMPOUND
    if name == "table/names":
        dtype = np.dtype([("energy", "f4"), ("names", h5py.string_dtype())])
    with h5py.File(path, "w") as file:
        file.create_dataset("table", (5,), dtype)
    text = error_of(DatasetError, KeyError, path=path, data_field=name)
    assert f'{path}: dataset "table"' in text
    assert message in text


def test_lengths_that_differ(path):
    file_of_many_names(path)
    text = error_of(DatasetError, path=path, data_field="images/train", labels_field="other")
    assert '"images/train" (data) has 6 samples' in text
    assert '"other" (labels) has 7' in text
    fields = {"x": Field("images/train", 1), "y": "images/labels"}
    text = error_of(DatasetError, path=path, fields=fields)
    assert '"images/train" (x) has 4 samples along dimension 1' in text
    assert '"images/labels" (y) has 6 along dimension 0' in text


def test_strings_of_two_dimensions(path):
    with h5py.File(path, "w") as file:
        file.create_dataset("data", (4, 2), h5py.string_dtype())
    text = error_of(DatasetError, path=path, labels_field=None)
    assert "samples of variable length must have one dimension, found shape (4, 2)" in text


def test_a_filter_that_nobody_has(path):
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plist.set_chunk((4, 30))
    plist.set_filter(511, h5py.h5z.FLAG_OPTIONAL, (1,))
    with h5py.File(path, "w") as file:
        space = h5py.h5s.create_simple(VALUES.shape)
        dataset = h5py.h5d.create(file.id, b"data", h5py.h5t.NATIVE_INT64, space, plist)
        dataset.write_direct_chunk((0, 0), bytes(8 * 4 * 30))
    text = error_of(DatasetError, path=path, labels_field=None)
    assert 'dataset "data" is compressed with filter 511' in text


# --- options -------------------------------------------------------------------------------------

FUNCTION = 'must be a function or "module:function"'


@each(
    "options, message",
    [
        ({"batch_size": 0}, "batch_size: must be greater than or equal to 1, found 0"),
        ({"batch_size": 2.5}, "batch_size"),
        ({"batch_size": True}, "batch_size"),
        ({"prefetch": 0}, "prefetch"),
        ({"num_threads": -1}, "num_threads"),
        ({"timeout": -1}, "timeout"),
        ({"device": "tpu"}, "device"),
        ({"shuffle": "sometimes"}, "shuffle"),
        ({"batchsize": 3}, "unknown option 'batchsize'; did you mean 'batch_size'?"),
        ({"batchSize": 3}, "did you mean 'batch_size'?"),
        ({"num_thread": 3}, "did you mean 'num_threads'?"),
        ({"nthread": 3}, "did you mean 'num_threads'?"),
        ({"xyzzy": 3}, "unknown option 'xyzzy'; options are: hdf5_path,"),
        ({"window_bytes": 0}, "window_bytes: must be greater than or equal to 1, found 0"),
        ({"window_bytes": -5}, "window_bytes"),
        ({"window_bytes": 2.5}, "window_bytes"),
        ({"window_bytes": True}, "window_bytes"),
        ({"window_bytes": "1 Gigabyte"}, "window_bytes"),
        ({"shuffle": "window", "window_bytes": 0}, "window_bytes"),
        ({"shuffle": "windows"}, 'shuffle: must be False, True, "full" or "window"'),
        ({"io": "mmap"}, "io: must be 'auto', 'pread' or 'map', found 'mmap'"),
        ({"io": ""}, "io: "),
        ({"io": None}, "io: "),
        ({"io": True}, "io: "),
        ({"num_dim": 2}, 'dataset "data": there is no dimension 2'),
        ({"h_dim": 1, "w_dim": 2}, "there is no dimension 2"),
        ({"postprocess": "no_such_module:f"}, "cannot import 'no_such_module:f'"),
        ({"postprocess": "os:no_such_function"}, "cannot import 'os:no_such_function'"),
        ({"postprocess": "os:sep"}, "'os:sep' is not callable"),
        ({"postprocess": "os"}, f"postprocess: {FUNCTION}, found 'os'"),
        ({"postprocess": 3}, f"postprocess: {FUNCTION}, found 3"),
        ({"fields": 3}, "fields: must map names to paths or Fields, found 3"),
        ({"fields": {"a": 3}}, "fields: a: must be a path or a Field, found 3"),
        ({"postprocess_fields": {"a", "b"}}, "postprocess_fields: a set has no order"),
    ],
)
def test_options_that_do_not_fit(path, options, message):
    plain_file(path)
    assert message in error_of(ConfigError, ValueError, path=path, **options)


@pytest.mark.parametrize("name", ["categories", "axes", "scale", "offset"])
@pytest.mark.parametrize("kind", [set, frozenset])
def test_a_set_is_no_list(name, kind):
    """It would be taken in an order of its own: axes sorted, codes by the hashes of a process."""
    with pytest.raises(ConfigError, match=f"{name}: a set has no order; give a list"):
        Field("data", **{name: kind([0, 3, 1, 2])})


def test_a_mapping_of_categories_to_codes_is_refused():
    """Of {"cat": 1, "dog": 0}, cat would have the code 0: the codes are places in a list."""
    with pytest.raises(ConfigError, match="categories: a mapping is no list of names"):
        Field("species", categories={"cat": 1, "dog": 0})


@pytest.mark.parametrize(
    ("several", "message"),
    [
        ([], "hdf5_path: the list of files is empty"),
        ((), "hdf5_path: the list of files is empty"),
        ({"a.h5"}, "hdf5_path"),
        ({"a.h5": "b.h5"}, "hdf5_path"),
        (["a.h5", 3], "hdf5_path"),
        (None, "hdf5_path"),
        (7, "hdf5_path"),
    ],
    ids=repr,
)
def test_what_is_no_list_of_files(several, message):
    """A set has no order, and the order of the files is that of the samples."""
    assert message in error_of(ConfigError, ValueError, path=several)


@each("pattern", ["train*.h5", "a?.h5", "**/b.h5", "[b].h5"])
@each("in_list", [False, True])
def test_globs_that_find_nothing(path, pattern, in_list):
    plain_file(path)
    pattern = path.parent / pattern
    text = error_of(ReadError, OSError, path=[path, pattern] if in_list else pattern)
    assert text == f"no file matches {pattern}"


def test_one_of_several_files_is_missing(path):
    plain_file(path)
    other = path.with_name("b.h5")
    text = error_of(ReadError, OSError, path=[path, other])
    assert text == f"cannot open {other}: there is no such file"


@pytest.mark.parametrize(
    "values", [VALUES[:, 1:], VALUES[:, :, None], VALUES.astype("i4"), VALUES.astype("f8")]
)
def test_files_whose_samples_differ(path, values):
    plain_file(path)
    other = plain_file(path.with_name("b.h5"), values)
    text = error_of(DatasetError, KeyError, path=[path, path, other])
    assert 'dataset "data"' in text
    assert str(path) in text
    assert str(other) in text


def test_one_of_several_files_lacks_the_dataset(path):
    plain_file(path)
    other = file_of_many_names(path.with_name("b.h5"))
    text = error_of(DatasetError, KeyError, path=path.parent / "*.h5")
    assert f'{other}: there is no dataset "data"' in text


def test_damage_to_one_of_several_files(path):
    plain_file(path)
    damaged = path.with_name("b.h5")
    file_with_one_damaged_chunk(damaged)
    with reader_of([path, damaged], batch_size=CHUNK, num_threads=2) as reader:
        bad = range(SAMPLES + DAMAGED * CHUNK, SAMPLES + (DAMAGED + 1) * CHUNK)
        for number in range(len(reader)):
            index = np.arange(number * CHUNK, min((number + 1) * CHUNK, 2 * SAMPLES))
            if np.isin(index, bad).any():
                with pytest.raises(ReadError) as caught:
                    reader.get_next_batch()
                text = str(caught.value)
                assert f'{damaged}: dataset "data", chunk ({DAMAGED * CHUNK}, 0)' in text
            else:
                assert_same_bits(reader.get_next_batch().data, VALUES[index % SAMPLES])


# --- postprocess ---------------------------------------------------------------------------------


class NeedsTwoArgumentsError(Exception):
    def __init__(self, one, two):
        super().__init__(one, two)


RAISED = [
    ValueError("too blue"),
    KeyError("blue"),
    ZeroDivisionError(),
    FileNotFoundError(2, "no colours", "blue.txt"),
    UnicodeDecodeError("utf-8", b"blue", 0, 1, "not a colour"),
    NeedsTwoArgumentsError("too", "blue"),
    StopIteration("no more colours"),
    ReadError("a reader inside a postprocess"),
]
BAD = 2  # the batch with which `postprocess` has trouble


def troubled_by_one_batch(trouble):
    def postprocess(data, labels):
        if labels[0] == BAD * BATCH:
            return trouble()
        return -data, labels

    return postprocess


def assert_only_the_bad_batch_fails(reader, check):
    """Take two epochs; `check` sees the error of the bad batch of each."""
    for epoch in range(2):
        for number in range(len(reader)):
            if number == BAD:
                with pytest.raises(PostprocessError) as caught:
                    reader.get_next_batch()
                text = str(caught.value)
                assert f"batch {BAD} of epoch {epoch}" in text
                assert str(reader.config.hdf5_path) in text
                check(caught.value)
            else:
                batch = reader.get_next_batch()
                assert (batch.epoch, batch.number) == (epoch, number)
                assert_same_bits(batch.data, -VALUES[batch.index])


@each("num_threads", THREADS)
@pytest.mark.parametrize("raised", RAISED, ids=lambda error: type(error).__name__)
def test_postprocess_that_raises(path, tmp_path, raised, num_threads):
    def trouble():
        raise raised

    def check(error):
        assert error.__cause__ is raised
        assert type(raised).__name__ in str(error)
        if not isinstance(raised, StopIteration | H5AsyncError):
            assert isinstance(error, type(raised))

    plain_file(path)
    with reader_of(
        path, num_threads=num_threads, postprocess=troubled_by_one_batch(trouble)
    ) as reader:
        assert_only_the_bad_batch_fails(reader, check)
    assert not our_threads()
    assert not open_descriptors(tmp_path)


@each("num_threads", THREADS)
@pytest.mark.parametrize("raised", RAISED, ids=lambda error: type(error).__name__)
def test_postprocess_that_raises_ends_a_for_loop_with_an_error(path, raised, num_threads):
    """Even StopIteration, which a loop takes for its end, must not pass for the epoch's end."""

    def trouble():
        raise raised

    plain_file(path)
    numbers = []
    with reader_of(
        path, num_threads=num_threads, postprocess=troubled_by_one_batch(trouble)
    ) as reader:
        with pytest.raises(PostprocessError):
            numbers.extend(batch.number for batch in reader)
        assert numbers == list(range(BAD))


@each("num_threads", THREADS)
@each("result", [(), (np.zeros(3),), (np.zeros(3),) * 3, np.zeros(2), 7, "ab"])
def test_postprocess_that_returns_something_else(path, result, num_threads):
    def check(error):
        assert "must return 2 arrays" in str(error)
        assert_pickles(error)

    plain_file(path)
    with reader_of(
        path, num_threads=num_threads, postprocess=troubled_by_one_batch(lambda: result)
    ) as reader:
        assert_only_the_bad_batch_fails(reader, check)


# --- damage in the middle of an epoch ------------------------------------------------------------

CHUNK, DAMAGED = 5, 2


def file_with_one_damaged_chunk(path):
    """Return its copy that is well, too."""
    options = {"chunks": (CHUNK, 30), "compression": "gzip"}
    well = plain_file(path.with_name("well.h5"), **options)
    shutil.copy(well, path)
    with h5py.File(path) as file:
        info = file["data"].id.get_chunk_info(DAMAGED)
        assert info.chunk_offset == (DAMAGED * CHUNK, 0)
    with path.open("r+b") as file:
        file.seek(info.byte_offset + info.size // 2)
        file.write(b"\xff" * 8)
    return well


@each("num_threads", THREADS)
@each("prefetch", [1, 3])
@pytest.mark.parametrize("shuffle", [False, "full"])
@each("batch_size", [1, 3, SAMPLES])
def test_error_comes_for_exactly_the_batches_that_need_the_damaged_chunk(
    path, shuffle, batch_size, prefetch, num_threads
):
    well = file_with_one_damaged_chunk(path)
    options = {"shuffle": shuffle, "batch_size": batch_size, "prefetch": prefetch}
    damaged = np.arange(DAMAGED * CHUNK, (DAMAGED + 1) * CHUNK)
    with (
        reader_of(well, **options) as right,
        reader_of(path, num_threads=num_threads, **options) as reader,
    ):
        poison(reader)
        for _ in range(2 * len(right)):
            expected = right.get_next_batch()
            if np.isin(expected.index, damaged).any():
                with pytest.raises(ReadError) as caught:
                    reader.get_next_batch()
                text = str(caught.value)
                assert f'{path}: dataset "data", chunk ({DAMAGED * CHUNK}, 0)' in text
                assert f"samples {damaged[0]} to {damaged[-1]}" in text
                assert_pickles(caught.value)
            else:
                batch = reader.get_next_batch()
                assert np.array_equal(batch.index, expected.index)
                assert_same_bits(batch.data, expected.data)
                assert_same_bits(batch.labels, expected.labels)


@pytest.mark.parametrize("num_threads", THREADS)
def test_an_iterator_goes_on_after_an_error(path, num_threads):
    file_with_one_damaged_chunk(path)
    with reader_of(path, batch_size=CHUNK, num_threads=num_threads) as reader:
        batches = iter(reader)
        numbers = [next(batches).number for _ in range(DAMAGED)]
        with pytest.raises(ReadError):
            next(batches)
        numbers += [batch.number for batch in batches]
        assert numbers == [number for number in range(len(reader)) if number != DAMAGED]
        assert next(iter(reader)).epoch == 1


@each("num_threads", THREADS)
@each("taken", range(4))
def test_reader_that_is_closed_around_an_error(path, tmp_path, taken, num_threads):
    file_with_one_damaged_chunk(path)
    reader = reader_of(path, batch_size=CHUNK, num_threads=num_threads, prefetch=4)
    for _ in range(4):
        reader.fetch_data()
    for number in range(taken):
        if number == DAMAGED:
            with pytest.raises(ReadError):
                reader.get_next_batch()
        else:
            reader.get_next_batch()
    reader.close()
    reader.close()
    assert not our_threads()
    assert not open_descriptors(tmp_path)
    for call in (reader.get_next_batch, reader.fetch_data, lambda: iter(reader)):
        with pytest.raises(ReaderClosedError, match="closed"):
            call()


def test_error_of_h5py_names_dataset_and_samples(path):
    """A damaged chunk of a dataset that only h5py reads."""
    read_only_by_h5py(path, 1)
    with h5py.File(path, "r+") as file:
        del file["data"]
        dataset = file.create_dataset(
            "data", (6, 4), type_for_h5py(), chunks=(2, 2), compression="gzip"
        )
        dataset[...] = 1
        dataset.id.write_direct_chunk((4, 2), b"\0" * 20)
    with reader_of(path, batch_size=2, num_threads=2) as reader:
        for number in range(2 * len(reader)):
            if number % 3 == 2:
                with pytest.raises(ReadError) as caught:
                    reader.get_next_batch()
                text = str(caught.value)
                assert f'{path}: dataset "data", samples 4 to 5, read through h5py' in text
                assert "chunk (4, 2)" in text
            else:
                assert (reader.get_next_batch().data == 1).all()


def test_errors_of_two_fields_at_once(path):
    """One of them is told; the batch is lost once, not twice."""
    options = {"chunks": (CHUNK, 30), "compression": "gzip"}
    plain_file(path, **options)
    with h5py.File(path, "r+") as file:
        file.create_dataset("more", data=VALUES, **options)
        for name, place in itertools.product(("data", "more"), range(2)):
            file[name].id.write_direct_chunk((place * CHUNK, 0), b"\0" * 20)
    fields = {"data": "data", "more": "more"}
    with reader_of(path, fields=fields, batch_size=2 * CHUNK, num_threads=2) as reader:
        with pytest.raises(ReadError, match=r"chunk \((0|5), 0\)"):
            reader.get_next_batch()
        batch = reader.get_next_batch()
        assert batch.number == 1
        assert_same_bits(batch.more, VALUES[batch.index])
