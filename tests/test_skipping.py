"""With on_error="skip", batches lack damaged samples, and nothing else changes."""

from __future__ import annotations

import errno
import io
import logging
import os
import pickle
import shutil

import h5py
import numpy as np
import pytest
from cases import each
from conftest import assert_same_bits, example, h5py_way, spoil_chunk  # noqa: F401
from gpus import use_gpu
from hdf5files import type_for_h5py

from h5async import (
    AsyncReader,
    ConfigError,
    Csr,
    DamagedError,
    DatasetError,
    Field,
    ImageField,
    OutOfMemoryError,
    RaggedField,
    ReaderClosedError,
    ReadError,
    Sequences,
    SparseField,
)
from h5async.errors import failed_read
from h5async.fill.resident import Damage
from h5async.observe import readercounts as skipping

N, CHUNK, BAD = 120, 10, (3, 8)  # samples, and of a chunk; the damaged chunks
DAMAGED = np.concatenate([np.arange(CHUNK * k, CHUNK * (k + 1)) for k in BAD])
RNG = np.random.default_rng(31)
VALUES = RNG.integers(-99, 99, (N, 4, 3)).astype("i2")
LENGTHS = RNG.integers(0, 5, N)
STORAGES = {
    "gzip": {"chunks": (CHUNK, 4, 3), "compression": "gzip"},
    "tiles": {"chunks": (CHUNK, 3, 2), "compression": "gzip", "shuffle": True},
    "checked": {"chunks": (CHUNK, 4, 3), "fletcher32": True},
}


def reader_of(path, **options):
    options = {"batch_size": 16, "num_threads": 2, "device": "cpu", **options}
    return AsyncReader(hdf5_path=path, **options)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Return a good file and its copy with two damaged chunks in several datasets."""
    good = tmp_path_factory.mktemp("skipping") / "good.h5"
    ends = np.cumsum(LENGTHS)
    with h5py.File(good, "w") as file:
        for name, how in STORAGES.items():
            file.create_dataset(name, data=VALUES, **how)
        turned = np.ascontiguousarray(np.moveaxis(VALUES, 0, 2))
        file.create_dataset("turned", data=turned, chunks=(4, 2, CHUNK), compression="gzip")
        plain = file.create_dataset(
            "h5py", (N, 4), type_for_h5py(), chunks=(CHUNK, 2), compression="gzip"
        )
        plain[...] = VALUES[:, :, 0]
        file["labels"] = np.arange(N)
        file["ends"] = ends
        flat = RNG.integers(0, 99, ends[-1])
        file.create_dataset("flat", data=flat, chunks=(CHUNK,), compression="gzip")
        file.create_dataset("long", (N,), h5py.vlen_dtype("u1"))
        file["long"][...] = [np.full(5000, i, "u1") for i in range(N)]  # a collection each
        group = file.create_group("X")
        group.attrs["encoding-type"], group.attrs["shape"] = "csr_matrix", (N, 50)
        group.create_dataset("data", data=flat + 1, chunks=(CHUNK,), compression="gzip")
        group["indices"], group["indptr"] = np.arange(ends[-1]) % 50, np.append(0, ends)
    bad = good.with_name("bad.h5")
    shutil.copy(good, bad)
    for name in (*STORAGES, "h5py", "turned", "flat", "X/data"):
        with h5py.File(bad) as file:
            axis = 2 if name == "turned" else 0
            infos = [file[name].id.get_chunk_info(i) for i in range(file[name].id.get_num_chunks())]
        with bad.open("r+b") as raw:
            for info in infos:
                if info.chunk_offset[axis] // CHUNK in BAD:
                    raw.seek(info.byte_offset)
                    raw.write(b"\x1f" * info.size)
    with bad.open("r+b") as raw:
        for address in np.unique(collections(good)[DAMAGED]).tolist():
            raw.seek(address)
            raw.write(b"GONE")
    return good, bad


def collections(path):
    """Return where the heap collection of each element of "long" lies."""
    with h5py.File(path) as file:
        begin = file["long"].id.get_offset()
    references = np.fromfile(path, "u1")[begin : begin + 16 * N].reshape(N, 16)
    return references[:, 4:12].copy().view("<u8").ravel()


def damaged_in(files, name):
    """Return the damaged samples of a dataset: of "long", those whose collection is."""
    found = collections(files[0])
    return np.flatnonzero(np.isin(found, found[DAMAGED])) if name == "long" else DAMAGED


def samples_of(array):
    if isinstance(array, Csr):
        pairs = zip(array.indptr[:-1], array.indptr[1:], strict=True)
        return [np.stack([array.data[a:b], array.indices[a:b]]) for a, b in pairs]
    return [np.asarray(one) for one in array]


def assert_lacks(batch, expected, damaged):
    """A batch is as expected, in the same order, without damaged samples."""
    kept = ~np.isin(expected.index, damaged)
    assert np.array_equal(batch.index, expected.index[kept])
    assert (batch.epoch, batch.number, batch.last) == (
        expected.epoch,
        expected.number,
        expected.last,
    )
    assert batch.keys() == expected.keys()
    for name in batch.keys():
        found, wanted = samples_of(batch[name]), samples_of(expected[name])
        wanted = [one for one, is_kept in zip(wanted, kept, strict=True) if is_kept]
        assert len(found) == len(wanted) == batch.size
        for one, other in zip(found, wanted, strict=True):
            assert_same_bits(one, other)


def assert_skips(files, damaged=DAMAGED, batches=None, **options):
    good, bad = files
    count = 0
    with reader_of(good, **options) as right, reader_of(bad, on_error="skip", **options) as reader:
        for _ in range(2 * len(right) if batches is None else batches):
            expected = right.get_next_batch()
            assert_lacks(reader.get_next_batch(), expected, damaged)
            count += int(np.isin(expected.index, damaged).sum())
        assert reader.stats().skipped == count
        assert {one.sample for one in reader.skipped} <= set(np.asarray(damaged).tolist())
        if batches is None and not {"weights", "sampler", "world_size"} & options.keys():
            assert len(reader.skipped) == len(damaged)
        return reader.skipped


def half(data, labels):
    assert len(data) == len(labels)
    return data / 2, labels


# --- samples -------------------------------------------------------------------------------------


@each("num_threads", [0, 2])
@each("shuffle", [False, "full", "window"])
@each("batch_size", [1, 16, 2 * N])
@pytest.mark.parametrize("name", [*STORAGES, "turned", "h5py"])
def test_batches_lack_exactly_the_damaged_samples(files, name, batch_size, shuffle, num_threads):
    options = {"data_field": name, "num_dim": 2 if name == "turned" else 0}
    options |= {"batch_size": batch_size, "shuffle": shuffle, "num_threads": num_threads}
    skipped = assert_skips(files, **options)
    assert all(one.file == str(files[1]) and one.dataset == name for one in skipped)
    assert all("damaged" in one.reason for one in skipped)


@each(
    "options",
    [
        {"cache": "host"},
        {"cache": "host", "shuffle": "full", "batch_size": 7},
        {"postprocess": half},
        {"drop_last": True, "batch_size": 50},
        {"indices": slice(5, 90, 2), "shuffle": "full"},
        {"weights": np.arange(N) % 3, "epoch_samples": 300, "batch_size": 30},
        {"sampler": [[35, 35, 5], [82], [1, 2, 80]]},
        {"copy": True},
        {"debug_lifetimes": True},
        {"io": "pread"},
        {"rank": 1, "world_size": 3, "shuffle": "full"},
        {"prefetch": 5, "num_threads": 4, "batch_size": 3},
        {"fields": {"a": Field("gzip", dtype="f4", scale=2), "b": "tiles", "c": "labels"}},
        {"fields": {"a": Field("gzip", axes=(0, 2, 1), dtype="f4"), "b": "h5py"}},
    ],
)
def test_whatever_else_is_asked_for(files, options):
    name = {} if "fields" in options else {"data_field": "gzip"}
    used = np.arange(5, 90, 2) if "indices" in options else np.arange(N)
    assert_skips(files, np.intersect1d(DAMAGED, used), **name, **options)


@each("options", [{}, {"data_field": "tiles", "shuffle": "full"}])
def test_without_the_core(files, h5py_way, options):  # noqa: F811
    assert_skips(files, **{"data_field": "gzip", **options})


def samples_of_flat():
    """Return the samples that have values in damaged chunks of flat values."""
    sample = np.repeat(np.arange(N), LENGTHS)
    return np.unique(sample[np.isin(np.arange(sample.size) // CHUNK, BAD)])


@each("num_threads", [0, 2])
@each("shuffle", [False, "full"])
@each(
    "field, damaged",
    [
        (RaggedField("flat", offsets="ends", offsets_kind="ends"), samples_of_flat()),
        (RaggedField("flat", offsets="ends", offsets_kind="ends", pad_to=3), samples_of_flat()),
        (SparseField("X"), samples_of_flat()),
        (SparseField("X", dense=True), samples_of_flat()),
        (RaggedField("long"), None),
        (Field("gzip", steps=(0, 2), pad="edge"), np.union1d(DAMAGED, DAMAGED - 2)),
        (Field("h5py", steps=(0, 2), pad="zero"), np.union1d(DAMAGED, DAMAGED - 2)),
    ],
)
def test_samples_of_any_kind(files, field, damaged, shuffle, num_threads):
    """A sample is damaged if any of its rows, steps or values is."""
    damaged = damaged_in(files, "long") if damaged is None else damaged
    fields = {"x": field, "y": "labels"}
    assert_skips(files, damaged, fields=fields, shuffle=shuffle, num_threads=num_threads)


@each("decode", ["host", "device"])
@each("cache", [None, "device"])
@each("batch_size", [CHUNK, 16])
def test_on_a_gpu(files, monkeypatch, batch_size, cache, decode):
    use_gpu(monkeypatch, seed=1)
    good, bad = files
    fields = {"a": "gzip", "b": Field("tiles", dtype="f4", scale=0.5), "c": "labels"}
    options = {"fields": fields, "batch_size": batch_size}
    on_gpu = {"device": "cuda", "decode": decode, "cache": cache, "on_error": "skip"}
    with reader_of(good, **options) as right, reader_of(bad, **options, **on_gpu) as reader:
        for _ in range(3 * len(right)):
            batch, expected = reader.get_next_batch(), right.get_next_batch()
            kept = ~np.isin(expected.index, DAMAGED)
            assert np.array_equal(batch.index, expected.index[kept])
            for name in batch.keys():
                assert_same_bits(batch[name].get(), expected[name][kept])


def test_images_and_recordings(tmp_path):
    image_of = pytest.importorskip("PIL.Image").fromarray
    pytest.importorskip("cv2")
    soundfile = pytest.importorskip("soundfile")
    damaged = [0, 3, 4, 11]
    images, recordings = [], []
    for number in range(12):
        stream = io.BytesIO()
        image_of(np.full((9, 8, 3), number, "u1")).save(stream, "PNG")
        images.append(stream.getvalue())
        stream = io.BytesIO()
        soundfile.write(stream, np.full(60 + number, 0.1), 8000, format="FLAC")
        recordings.append(stream.getvalue())
    for name in ("good", "bad"):
        with h5py.File(tmp_path / name, "w") as file:
            for path, several in (("png", images), ("flac", recordings)):
                node = file.create_dataset(path, (12,), h5py.vlen_dtype("u1"))
                for number, data in enumerate(several):
                    cut = len(data) - (name == "bad" and number in damaged) * (len(data) - 40)
                    node[number] = np.frombuffer(data[:cut], "u1")
            file["labels"] = np.arange(12)
    from h5async import AudioField

    files = tmp_path / "good", tmp_path / "bad"
    for field in (
        ImageField("png"),
        ImageField("png", size=5),
        ImageField("png", size=5, flip=True, crop="random"),
        AudioField("flac"),
        AudioField("flac", frames=20),
        ImageField("png", steps=(0, 1), size=5, pad="edge"),
        ImageField("png", steps=(0, 1), size=5, pad="edge", crop="random"),
    ):
        hit = np.union1d(damaged, [3 - 1, 11 - 1]) if field.steps else damaged
        for options in ({"num_threads": 0}, {"shuffle": "full"}, {"batch_size": 1}):
            assert_skips(files, hit, fields={"x": field, "y": "labels"}, **options)
    zero = {"x": ImageField("png", size=5, on_error="zero")}  # the field's option comes first
    with reader_of(files[1], fields=zero, on_error="skip") as reader:
        assert reader.get_next_batch().size == 12
        assert reader.stats().broken_images == len(damaged)
        assert not reader.skipped


def test_ranks_stay_in_step(files):
    options = {"data_field": "gzip", "on_error": "skip", "batch_size": 4, "world_size": 3}
    found = []
    for rank in range(3):
        with reader_of(files[1], rank=rank, **options) as reader:
            found.append([batch.index for batch in reader])
    assert len({len(one) for one in found}) == 1
    every = np.concatenate([index for one in found for index in one])
    assert np.array_equal(np.sort(every), np.setdiff1d(np.arange(N), DAMAGED))


def test_a_batch_of_damaged_samples_alone_is_empty(files):
    seen = []
    options = {"on_error": "skip", "batch_size": CHUNK, "data_field": "gzip"}
    with reader_of(files[1], postprocess=lambda x, y: seen.append(x.shape), **options) as reader:
        sizes = [batch.size for batch in reader]
        assert sizes == [0 if number in BAD else CHUNK for number in range(N // CHUNK)]
        assert sorted(set(seen)) == [(0, 4, 3), (CHUNK, 4, 3)]
    with reader_of(files[1], **options) as reader:
        batch = [batch.copy() for batch in reader][BAD[0]]
        assert batch.data.shape == (0, 4, 3)
        assert batch._repr_html_()


@each("num_threads", [0, 2])
@each("crop", [None, {1: 2}])
def test_resuming_after_skipped_samples_is_exact(tmp_path, crop, num_threads):
    """Where parts of samples are random, they meet the damage in some epochs alone."""
    path = tmp_path / "tiles.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("data", data=VALUES, **STORAGES["tiles"])
    spoil_chunk(path, 2)  # the last of four rows
    options = {"fields": {"x": Field("data", crop=crop)}, "on_error": "skip", "shuffle": "full"}
    options |= {"num_threads": num_threads}
    with reader_of(path, **options) as reader:
        whole, states = [], []
        for _ in range(2 * len(reader)):
            states.append(reader.state_dict())
            whole.append(reader.get_next_batch().index.copy())
        damaged = {one.sample for one in reader.skipped}
    half = len(whole) // 2
    others = set(np.setxor1d(np.concatenate(whole[:half]), np.concatenate(whole[half:])).tolist())
    assert bool(others) == bool(crop)
    assert others <= damaged
    for begin in (1, half, len(whole) - 2):
        with reader_of(path, **options) as reader:
            reader.load_state_dict(states[begin])
            for expected in whole[begin:]:
                assert np.array_equal(reader.get_next_batch().index, expected)


@each("num_threads", [0, 2])
@each("postprocess", [None, half])
@each("name", ["gzip", "h5py"])
def test_given_samples(files, name, postprocess, num_threads):
    good, bad = files
    given_samples = [85, 2, 34, 34, 99, 2]
    options = {"data_field": name, "postprocess": postprocess, "num_threads": num_threads}
    with reader_of(good, **options) as right, reader_of(bad, on_error="skip", **options) as reader:
        expected = right.read(given_samples)
        assert_lacks(reader.read(given_samples), expected, DAMAGED)
        assert {one.sample for one in reader.skipped} == {34, 85}
        assert reader.read(DAMAGED).size == 0
        reader.fetch_data(given_samples)
        assert_lacks(reader.get_next_batch(), expected, DAMAGED)
        assert reader.stats().skipped == 3 + len(DAMAGED) + 3  # one of them comes twice


def test_with_pytorch(files):
    torch = pytest.importorskip("torch")
    from h5async.torch import H5Dataset

    options = {"hdf5_path": files[1], "data_field": "gzip", "on_error": "skip", "device": "cpu"}
    with H5Dataset(**options, batch_size=CHUNK) as dataset:
        sizes = [len(batch["data"]) for batch in torch.utils.data.DataLoader(dataset, None)]
        assert sizes == [0 if number in BAD else CHUNK for number in range(N // CHUNK)]
        assert dataset.reader.stats().skipped == len(DAMAGED)


def test_the_example_trains_on_what_is_left(capsys):
    assert example("damaged_files").main() > 0.9
    assert "2 files were left out, and 128 samples of others" in capsys.readouterr().out


# --- what is told --------------------------------------------------------------------------------


def test_what_is_listed_is_bounded(files, monkeypatch, caplog):
    options = {"data_field": "gzip", "on_error": "skip", "shuffle": "full"}
    with reader_of(files[1], **options) as reader, caplog.at_level(logging.WARNING):
        assert reader.skipped == ()
        for _ in range(4):
            for _ in reader:
                pass
        assert sorted(one.sample for one in reader.skipped) == DAMAGED.tolist()
        assert pickle.loads(pickle.dumps(reader.skipped)) == reader.skipped
        assert reader.stats(epoch=-1).skipped == len(DAMAGED)
        assert reader.stats().skipped == 4 * len(DAMAGED)
        assert "80 more skipped" in repr(reader.stats())
        assert [r.name for r in caplog.records if "left out" in r.message] == ["h5async.reader"]
    monkeypatch.setattr(skipping, "_MOST_LISTED", 5)
    with reader_of(files[1], **options) as reader:
        assert sum(batch.size for batch in reader) == N - len(DAMAGED)
        assert len(reader.skipped) == 5
        assert reader.stats().skipped == len(DAMAGED)


@each("num_threads", [0, 2])
@each("most, enough", [(20, True), (19, False), (0, False), (1.0, True), (0.1, False), (0.2, True)])
def test_the_most_that_may_be_skipped(files, most, enough, num_threads):
    options = {"data_field": "gzip", "on_error": "skip", "max_skipped": most, "batch_size": 6}
    with reader_of(files[1], num_threads=num_threads, **options) as reader:
        for _ in range(3):  # of each epoch
            if enough:
                assert sum(batch.size for batch in reader) == N - len(DAMAGED)
            else:
                with pytest.raises(DamagedError, match=f"more than max_skipped={most} ") as caught:
                    list(reader)
                assert set(caught.value.samples) <= set(DAMAGED.tolist())
                assert caught.value.filename == str(files[1])


@each(
    "name, workers, num_threads",
    [("gzip", "thread", 0), ("h5py", "thread", 2), ("long", "thread", 0), ("gzip", "process", 2)],
)
def test_errors_say_which_samples_they_concern(files, tmp_path, name, num_threads, workers):
    """Numbers are those of the whole dataset, and those of the file."""
    good, bad = files
    fields = {"x": RaggedField(name) if name == "long" else name}
    options = {"fields": fields, "batch_size": CHUNK, "workers": workers}
    with reader_of([good, bad], num_threads=num_threads, **options) as reader:
        failed = []
        for _ in range(len(reader)):
            try:
                reader.get_next_batch()
            except ReadError as error:
                failed.append(pickle.loads(pickle.dumps(error)))
        damaged = damaged_in(files, name)
        found = set()
        for error in failed:
            assert isinstance(error, DamagedError)
            assert (error.filename, error.dataset) == (str(bad), name)
            assert error.samples == tuple(N + sample for sample in error.file_samples)
            found.update(error.file_samples)
        assert found <= set(damaged.tolist())
        if name != "long":  # of a chunk, all are named
            assert found == set(damaged.tolist())


def test_skipped_samples_of_several_files(files):
    good, bad = files
    with reader_of([good, bad, bad], on_error="skip", data_field="gzip") as reader:
        found = np.concatenate([batch.index for batch in reader])
        damaged = np.concatenate([DAMAGED + N, DAMAGED + 2 * N])
        assert np.array_equal(found, np.setdiff1d(np.arange(3 * N), damaged))
        assert [one.sample for one in reader.skipped] == damaged.tolist()


# --- what is not skipped -------------------------------------------------------------------------


@each("num_threads", [0, 2])
def test_other_errors_are_raised(files, tmp_path, monkeypatch, num_threads):
    good, bad = files
    options = {"data_field": "gzip", "on_error": "skip", "num_threads": num_threads}

    def fails(data, labels):
        raise KeyError("mine")

    with reader_of(bad, postprocess=fails, **options) as reader, pytest.raises(KeyError):
        reader.get_next_batch()
    for error, kind in ((MemoryError(), OutOfMemoryError), (ZeroDivisionError(), ArithmeticError)):
        with monkeypatch.context() as patch, reader_of(bad, **options) as reader:

            def broken(*_, error=error):
                raise error

            patch.setattr(Damage, "locate", broken)
            with pytest.raises(kind):
                [reader.get_next_batch() for _ in range(4)]
    path = tmp_path / "cut.h5"
    shutil.copy(good, path)
    with reader_of(path, **options) as reader:
        os.truncate(path, 100)
        for _ in range(len(reader)):
            with pytest.raises(ReadError, match="cut short"):
                reader.get_next_batch()
        assert not reader.skipped
    reader = reader_of(bad, **options)
    reader.close()
    with pytest.raises(ReaderClosedError):
        reader.get_next_batch()
    assert reader.skipped == ()


def test_what_the_system_refuses_is_not_damaged():
    for number, kind in ((errno.EMFILE, ReadError), (errno.ENOENT, DamagedError)):
        error = failed_read("a.h5", OSError(number, "x"), "a.h5")
        assert type(error) is kind


# --- files ---------------------------------------------------------------------------------------


@pytest.fixture
def folder(files, tmp_path):
    """Four good files with 120 samples each, and six that are bad."""
    good = files[0]
    for number in (2, 4, 5, 9):
        shutil.copy(good, tmp_path / f"{number}.h5")
    shutil.copy(good, tmp_path / "0.h5")
    os.truncate(tmp_path / "0.h5", 3000)
    (tmp_path / "1.h5").write_bytes(b"no HDF5")
    (tmp_path / "3.h5").mkdir()
    with h5py.File(tmp_path / "6.h5", "w") as file:
        file["labels"] = np.arange(N)
    with h5py.File(tmp_path / "7.h5", "w") as file:
        file["gzip"], file["labels"] = VALUES, np.arange(N - 1)
    return tmp_path


@pytest.mark.parametrize("index_cache", [True, "mine.h5idx"])
def test_files_that_are_left_out(folder, index_cache, caplog, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    paths = [folder / f"{number}.h5" for number in range(10)]  # 8.h5 is missing
    index_cache = index_cache if index_cache is True else folder / index_cache
    options = {"data_field": "gzip", "index_cache": index_cache}
    options |= {"batch_size": 50, "weights": "labels", "sequences": Sequences(ids="labels")}
    with pytest.raises(ReadError, match="cut short"):
        reader_of(paths, **options)
    for _ in range(2):
        with caplog.at_level(logging.DEBUG), reader_of(paths, on_error="skip", **options) as reader:
            assert reader.num_samples == 4 * N
            for batch in reader:
                assert_same_bits(batch.data, VALUES[batch.index % N])
            names = [os.path.basename(one.file) for one in reader.skipped]
            assert sorted(names) == ["0.h5", "1.h5", "3.h5", "6.h5", "7.h5", "8.h5"]
            assert all(one.sample is None and one.file in one.reason for one in reader.skipped)
            assert reader.stats().skipped == 0
    told = [one for one in caplog.records if "6 other files were left out" in one.message]
    assert [one.levelname for one in told] == ["WARNING", "DEBUG"]
    assert all(f"{number}.h5" in told[0].message for number in (0, 1, 3, 6, 7, 8))
    # What is stored has no gap: with the files mended, all are there.
    for number in (0, 1, 6, 7, 8):
        shutil.copy(folder / "2.h5", folder / f"{number}.h5")
    (folder / "3.h5").rmdir()
    shutil.copy(folder / "2.h5", folder / "3.h5")
    for _ in range(2):
        with reader_of(paths, on_error="skip", **options) as reader:
            assert reader.num_samples == 10 * N
            assert reader.skipped == ()


def test_files_that_say_what_a_field_is(folder, files):
    """The first file is bad, and so a later one says that a field is sparse."""
    with h5py.File(folder / "1.h5", "w") as file:
        file["labels"] = np.arange(N)
    paths = [folder / f"{number}.h5" for number in (0, 1, 2, 4)]
    with reader_of(paths, fields={"x": "X"}, on_error="skip", index_cache=False) as reader:
        assert reader.num_samples == 2 * N
        assert isinstance(reader.get_next_batch().x, Csr)
        assert len(reader.skipped) == 2


def test_when_no_file_is_left(folder):
    with pytest.raises(ReadError, match=r"0\.h5.* cut short") as caught:
        reader_of([folder / "0.h5", folder / "1.h5"], on_error="skip")
    assert caught.value.filename == str(folder / "0.h5")
    with pytest.raises(DatasetError, match='there is no dataset "typo"'):
        reader_of([folder / "2.h5", folder / "4.h5"], data_field="typo", on_error="skip")
    with pytest.raises(ReadError, match="cut short"):
        reader_of(folder / "0.h5", on_error="skip")


def test_files_that_do_not_fit_are_errors(folder):
    """They are not damaged: rows of another shape, or data of another kind."""
    with h5py.File(folder / "1.h5", "w") as file:
        file["gzip"], file["labels"] = VALUES[:, 1:], np.arange(N)
    with pytest.raises(DatasetError, match="samples of"):
        reader_of([folder / "2.h5", folder / "1.h5"], data_field="gzip", on_error="skip")
    with h5py.File(folder / "1.h5", "w") as file:
        file["gzip/values"], file["labels"] = VALUES[:, 1:], np.arange(N)
    with pytest.raises(DatasetError, match="group"):
        reader_of([folder / "2.h5", folder / "1.h5"], data_field="gzip", on_error="skip")


# --- options -------------------------------------------------------------------------------------


@each(
    "options, message",
    [
        ({"on_error": "zero"}, "on_error: must be 'raise' or 'skip', found 'zero'"),
        ({"on_error": True}, "on_error: must be 'raise' or 'skip'"),
        ({"max_skipped": 5}, 'max_skipped needs on_error="skip"'),
        ({"on_error": "skip", "max_skipped": -1}, "max_skipped: must be a number of samples"),
        ({"on_error": "skip", "max_skipped": 1.5}, "or a share of them, such as 0.01"),
        ({"on_error": "skip", "max_skipped": True}, "max_skipped: must be"),
        ({"on_error": "skip", "max_skipped": float("nan")}, "max_skipped: must be"),
        ({"on_error": "skip", "max_skipped": "few"}, "max_skipped: must be"),
        ({"ignore_errors": True}, 'on_error="skip" leaves out'),
        ({"handler": print}, 'on_error="skip" leaves out'),
    ],
)
def test_options_that_do_not_fit(files, options, message):
    with pytest.raises(ConfigError) as caught:
        reader_of(files[0], **options)
    assert message in str(caught.value)


def test_fields_have_no_such_option():
    with pytest.raises(ConfigError, match='an option of the reader: on_error="skip"'):
        Field("x", on_error="skip")
