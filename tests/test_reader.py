"""The contract's plain behaviour: options, what is delivered, batches, threads, and the end.

`test_reader_state.py` has the order of calls. Nothing here sleeps: a `Gate` in `postprocess`
holds a worker where the test wants it.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from cases import each
from conftest import assert_epoch_is, assert_same_bits, our_threads, poison, truth
from hdf5files import type_for_h5py

from h5async import (
    AsyncReader,
    BatchTimeoutError,
    ConfigError,
    DatasetError,
    DeviceError,
    Field,
    PostprocessError,
    ReaderClosedError,
    ReaderConfig,
    ReadError,
)
from h5async.core import binding as core_module
from h5async.fill.reading import BatchReader
from h5async.io.source import can_map

DEADLOCK_SECONDS = 200
NUM_SAMPLES = 23


@pytest.fixture
def train(tmp_path: Path) -> Path:
    """23 samples: images in gzip chunks, labels in one piece, and what only h5py reads."""
    path = tmp_path / "train.h5"
    rng = np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        images = rng.integers(0, 256, (NUM_SAMPLES, 6, 5, 3)).astype("u1")
        file.create_dataset("data", data=images, chunks=(5, 6, 5, 3), compression="gzip")
        file["labels"] = np.arange(NUM_SAMPLES) * 10
        file.create_dataset("float", data=rng.normal(size=(NUM_SAMPLES, 4, 2)), dtype=">f8")
        file.create_dataset("odd", (NUM_SAMPLES,), type_for_h5py())
        file["odd"][...] = rng.integers(0, 99, NUM_SAMPLES)
    return path


@pytest.fixture
def wide(tmp_path: Path) -> Path:
    """64 samples of 16 KiB: enough for several shares of work a batch."""
    path = tmp_path / "wide.h5"
    values = np.random.default_rng(1).integers(0, 1000, (64, 4096)).astype("i4")
    with h5py.File(path, "w") as file:
        file["contiguous"] = values
        file.create_dataset("raw", data=values, chunks=(4, 4096))
        file.create_dataset("pieces", data=values, chunks=(4, 1000))
        file.create_dataset("gzip", data=values, chunks=(4, 4096), compression="gzip", shuffle=True)
        file["columns"] = np.ascontiguousarray(values.T)
    return path


class Gate:
    """A `postprocess` that waits until it is opened, and tells that it was entered."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.opened = threading.Event()
        self.calls = 0

    def __call__(self, *arrays: np.ndarray) -> None:
        self.calls += 1
        self.entered.set()
        assert self.opened.wait(DEADLOCK_SECONDS), "nobody opened the gate"


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.opened.set()


# --- options ----------------------------------------------------------------------------------


def by_mapping(path: Path) -> AsyncReader:
    return AsyncReader({"hdf5_path": path, "batch_size": 5, "seed": 3})


def by_config(path: Path) -> AsyncReader:
    return AsyncReader(ReaderConfig(hdf5_path=path, batch_size=5, seed=3))


def by_toml(path: Path) -> AsyncReader:
    toml = path.with_name("reader.toml")
    toml.write_text(f'hdf5_path = "{path}"\nbatch_size = 5\nseed = 3\n')
    return AsyncReader(toml)


def by_toml_as_text(path: Path) -> AsyncReader:
    by_toml(path).close()
    return AsyncReader(str(path.with_name("reader.toml")))


def by_options(path: Path) -> AsyncReader:
    return AsyncReader(hdf5_path=str(path), batch_size=5, seed=3)


FORMS = [by_mapping, by_config, by_toml, by_toml_as_text, by_options]


@pytest.mark.parametrize("form", FORMS)
def test_all_forms_of_configuration_give_the_same_reader(
    train: Path, form: Callable[[Path], AsyncReader]
) -> None:
    with form(train) as reader:
        expected = ReaderConfig(hdf5_path=train, batch_size=5, seed=3)
        assert reader.config.model_dump() == expected.model_dump()
        assert len(reader) == 5
        assert [batch.size for batch in reader] == [5, 5, 5, 5, 3]


@pytest.mark.parametrize("kind", ["mapping", "config", "toml"])
def test_options_win(train: Path, kind: str) -> None:
    options = {"hdf5_path": "nowhere.h5", "batch_size": 5, "seed": 3, "labels_field": "none"}
    config: Any = options
    if kind == "config":
        config = ReaderConfig(**options)
    elif kind == "toml":
        config = train.with_name("reader.toml")
        config.write_text("".join(f"{name} = {value!r}\n" for name, value in options.items()))
    with AsyncReader(config, hdf5_path=train, batch_size=6, labels_field=None) as reader:
        assert reader.config.batch_size == 6
        assert reader.config.seed == 3
        assert reader.get_next_batch().keys() == ["data"]
    assert options["batch_size"] == 5, "the caller's mapping was changed"


def test_a_path_in_a_toml_file_is_relative_to_that_file(
    train: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    (elsewhere / "reader.toml").write_text('hdf5_path = "../train.h5"\n')
    with AsyncReader("reader.toml") as reader:
        assert reader.num_samples == NUM_SAMPLES
    with AsyncReader("reader.toml", hdf5_path="../train.h5") as reader:
        assert reader.num_samples == NUM_SAMPLES


def test_a_toml_file_can_say_everything_a_mapping_can(train: Path) -> None:
    toml = train.with_name("reader.toml")
    toml.write_text(
        'hdf5_path = "train.h5"\nshuffle = true\ndrop_last = true\nprefetch = 3\n'
        'device = "cpu"\ntimeout = 30\nnum_threads = 1\n'
        '[fields]\nlabels = "labels"\n'
        '[fields.image]\npath = "data"\naxes = [0, 3, 1, 2]\nscale = [0.5, 0.25, 2.0]\noffset = 1\n'
    )
    with AsyncReader(toml, batch_size=4) as reader:
        assert reader.config.shuffle == "full"
        batch = reader.get_next_batch()
        assert batch.keys() == ["labels", "image"]
        scale = np.array([0.5, 0.25, 2.0], "f4").reshape(3, 1, 1)
        expected = truth(train).transpose(0, 3, 1, 2)[batch.index].astype("f4") * scale
        assert_same_bits(batch["image"], expected + np.float32(1))


@pytest.mark.parametrize("labels_field", [None, ""])
def test_no_labels(train: Path, labels_field: str | None) -> None:
    with AsyncReader(hdf5_path=train, labels_field=labels_field) as reader:
        (data,) = reader.get_next_batch()
        assert_same_bits(data, truth(train))


def test_numpy_integers_are_integers(train: Path) -> None:
    with AsyncReader(
        hdf5_path=train,
        batch_size=np.int32(5),
        seed=np.int64(-1),
        num_threads=np.uint8(1),
        prefetch=np.int16(1),
    ) as reader:
        assert reader.get_next_batch().size == 5


# --- what is delivered ------------------------------------------------------------------------


def stored(rng: np.random.Generator, dtype: Any, shape: tuple[int, ...]) -> np.ndarray:
    dtype = np.dtype(dtype)
    if dtype.kind == "b":
        return rng.integers(0, 2, shape).astype(bool)
    if dtype.kind in "iu":
        low = 0 if dtype.kind == "u" else -100
        return rng.integers(low, 100, shape).astype(dtype)
    return rng.normal(size=shape).astype(dtype)


TRANSFORMS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "cast up": {"dtype": "f8"},
    "cast down": {"dtype": "f4"},
    "half": {"dtype": "f2"},
    "foreign order means native": {"dtype": ">f4"},
    "permuted": {"axes": (0, 3, 1, 2)},
    "permuted and cast": {"axes": (0, 2, 3, 1), "dtype": np.float32},
    "scale implies float32": {"scale": 1 / 255},
    "offset implies float32": {"offset": -0.1},
    "scale and offset": {"scale": 0.1, "offset": 0.7, "dtype": "f8"},
    "in half": {"scale": 0.1, "offset": 0.7, "dtype": "f2"},
    "a factor for each channel": {
        "axes": (0, 3, 1, 2),
        "scale": (0.1, 0.2, 0.3),
        "offset": [1, 2, 3],
    },
    "factors as an array": {"axes": (0, 3, 2, 1), "scale": np.array([0.1, 0.2, 0.3])},
    "samples last in the file": {"num_dim": 3},
    "samples in the middle": {"num_dim": 1, "scale": 3.0},
    "counted from the end": {"num_dim": -1, "axes": (-1, 0, 1, 2), "offset": 1},
}


@each("chunks", [None, True])
@each("dtype", ["u1", "<i2", ">i4", "f4", ">f8", "?", "f2"])
@pytest.mark.parametrize("what", TRANSFORMS)
def test_fields_are_permuted_cast_and_scaled_as_numpy_does(
    tmp_path: Path, what: str, dtype: str, chunks: Any
) -> None:
    options = TRANSFORMS[what]
    shape = (9, 8, 7, 3)
    values = stored(np.random.default_rng(0), dtype, shape)
    path = tmp_path / "f.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=values, chunks=chunks)
    num_dim = options.get("num_dim", 0)
    rest = [axis for axis in range(4) if axis != num_dim % 4]
    axes = options.get("axes", (num_dim, *rest))
    scaled = "scale" in options or "offset" in options
    delivered = options.get("dtype", "f4" if scaled else dtype)
    delivered = np.dtype(delivered).newbyteorder("=")
    expected = values.transpose(axes).astype(delivered)
    per_channel = (-1, 1, 1) if "axes" in options else ()
    if "scale" in options:
        expected = expected * np.asarray(options["scale"], delivered).reshape(
            per_channel if np.ndim(options["scale"]) else ()
        )
    if "offset" in options:
        expected = expected + np.asarray(options["offset"], delivered).reshape(
            per_channel if np.ndim(options["offset"]) else ()
        )
    with AsyncReader(
        hdf5_path=path, fields={"x": Field("x", **options)}, batch_size=4, num_threads=2
    ) as reader:
        poison(reader)
        assert_epoch_is(reader, np.ascontiguousarray(expected), name="x")
        batch = reader.get_next_batch()
        assert batch.x.flags.c_contiguous
        assert batch.x.dtype.isnative


@each("order", ["NHWC", "NCHW", "HWCN", "CHNW", "WNHC", "NWHC"])
@each("negative", [False, True])
def test_images_come_as_nchw_whatever_their_order_in_the_file(
    tmp_path: Path, order: str, negative: bool
) -> None:
    extents = {"N": 10, "C": 3, "H": 6, "W": 5}
    values = np.random.default_rng(0).integers(0, 99, [extents[d] for d in order]).astype("u1")
    with h5py.File(tmp_path / "f.h5", "w") as file:
        file["data"] = values
    at = {d: order.index(d) - 4 * negative for d in "NCHW"}
    with AsyncReader(
        hdf5_path=tmp_path / "f.h5",
        labels_field=None,
        num_dim=at["N"],
        h_dim=at["H"],
        w_dim=at["W"],
        cha_dim=at["C"],
        batch_size=4,
    ) as reader:
        expected = np.ascontiguousarray(values.transpose([at[d] for d in "NCHW"]))
        assert_epoch_is(reader, expected)
        assert reader.get_next_batch().data.flags.c_contiguous


def test_images_without_channels(tmp_path: Path) -> None:
    values = np.random.default_rng(0).integers(0, 99, (6, 10, 5))
    with h5py.File(tmp_path / "f.h5", "w") as file:
        file["data"] = values
    with AsyncReader(
        hdf5_path=tmp_path / "f.h5", labels_field=None, num_dim=1, h_dim=2, w_dim=0
    ) as reader:
        assert_epoch_is(reader, np.ascontiguousarray(values.transpose(1, 2, 0)))


def test_fields_come_in_the_order_given(train: Path) -> None:
    with AsyncReader(
        hdf5_path=train, fields={"z": "labels", "a": Field("data"), "m": "odd", "b": "labels"}
    ) as reader:
        batch = reader.get_next_batch()
        assert batch.keys() == ["z", "a", "m", "b"]
        for name, path in (("z", "labels"), ("a", "data"), ("m", "odd"), ("b", "labels")):
            assert_same_bits(batch[name], truth(train, path))
        assert not np.shares_memory(batch.z, batch.b)


# --- epochs and slots -------------------------------------------------------------------------


def test_a_short_last_batch_is_delivered_or_left_out(train: Path) -> None:
    with AsyncReader(hdf5_path=train, batch_size=10) as reader:
        assert len(reader) == 3
        assert [(b.size, b.last, len(b.data)) for b in reader] == [
            (10, False, 10),
            (10, False, 10),
            (3, True, 3),
        ]
    with AsyncReader(hdf5_path=train, batch_size=10, drop_last=True) as reader:
        assert len(reader) == 2
        assert [(batch.size, batch.last) for batch in reader] == [(10, False), (10, True)]


def test_a_short_batch_is_a_view_of_the_slot(train: Path) -> None:
    with AsyncReader(hdf5_path=train, batch_size=10, prefetch=1) as reader:
        whole, _, short = [batch.data for batch in reader]
        assert np.shares_memory(whole, short)
        assert whole.ctypes.data == short.ctypes.data
        assert short.shape == (3, 6, 5, 3)


@pytest.mark.parametrize("prefetch", [1, 2, 4])
def test_batches_lie_in_as_many_slots_as_were_asked_for(train: Path, prefetch: int) -> None:
    with AsyncReader(hdf5_path=train, batch_size=2, prefetch=prefetch) as reader:
        addresses = {
            (batch.data.ctypes.data, batch.labels.ctypes.data) for _ in range(3) for batch in reader
        }
        assert len(addresses) == prefetch


def test_a_batch_may_be_larger_than_the_dataset(train: Path) -> None:
    with AsyncReader(hdf5_path=train, batch_size=1000, prefetch=1) as reader:
        assert len(reader) == 1
        assert_epoch_is(reader, truth(train))
        batch = reader.get_next_batch()
        assert batch.last
        memory = reader._engine.setup.slots[0].memory
        assert [len(array) for array in (*memory.raw, *memory.out)] == [23] * 4


@pytest.mark.parametrize("shuffle", [False, True, "full"])
def test_shuffled_epochs_hold_each_sample_once_and_differ(train: Path, shuffle: Any) -> None:
    with AsyncReader(hdf5_path=train, batch_size=4, shuffle=shuffle) as reader:
        epochs = [np.concatenate([batch.index for batch in reader]) for _ in range(3)]
    for epoch in epochs:
        assert np.array_equal(np.sort(epoch), np.arange(NUM_SAMPLES))
    assert np.array_equal(epochs[0], epochs[1]) is (shuffle is False)
    assert np.array_equal(epochs[0], np.arange(NUM_SAMPLES)) is (shuffle is False)


@pytest.mark.parametrize("field", ["contiguous", "raw", "pieces", "gzip", "columns"])
def test_batches_are_the_same_for_every_number_of_threads_and_slots(
    wide: Path, monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    monkeypatch.setattr("h5async.fill.phases._MIN_SHARE_NBYTES", 1)
    num_dim = int(field == "columns")
    axes = (1, 0) if num_dim else (0, 1)
    seen = set()
    for num_threads, prefetch in ((0, 1), (0, 2), (1, 2), (2, 1), (3, 3), (7, 2)):
        with AsyncReader(
            hdf5_path=wide,
            fields={"x": Field(field, axes=axes), "y": Field(field, axes=axes, scale=0.1)},
            batch_size=24,
            shuffle=True,
            seed=5,
            num_threads=num_threads,
            prefetch=prefetch,
        ) as reader:
            poison(reader)
            batches = [batch.copy() for _ in range(2) for batch in reader]
        seen.add(tuple(array.tobytes() for batch in batches for array in (*batch, batch.index)))
    assert len(seen) == 1


def test_the_next_epoch_is_read_before_this_one_ends(train: Path) -> None:
    next_epoch_is_read = threading.Event()
    seen: list[int] = []

    def postprocess(data: np.ndarray, labels: np.ndarray) -> None:
        seen.append(int(labels[0]))
        if seen.count(0) == 2:
            next_epoch_is_read.set()

    with AsyncReader(
        hdf5_path=train, batch_size=10, num_threads=2, postprocess=postprocess
    ) as reader:
        loop = iter(reader)
        for _ in range(len(reader)):
            batch = next(loop)
        assert batch.last
        assert next_epoch_is_read.wait(DEADLOCK_SECONDS)
        assert (batch.labels == truth(train, "labels")[20:]).all()
        assert next(iter(reader)).epoch == 1


def test_what_a_loop_left_over_is_dropped_and_asked_for_again_later(train: Path) -> None:
    with AsyncReader(hdf5_path=train, batch_size=5, num_threads=2) as reader:
        for batch in reader:
            if batch.number == 1:
                break
        assert [batch.epoch for batch in reader] == [1] * 5
        batch = reader.get_next_batch()
        assert (batch.epoch, batch.number) == (2, 0)


# --- postprocess ------------------------------------------------------------------------------


def in_place(data: np.ndarray, labels: np.ndarray) -> None:
    np.subtract(255, data, out=data)
    labels += 1


def returned(data: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return data[:, ::2].astype("f8"), labels.reshape(-1, 1) == 0


def listed(data: np.ndarray, labels: np.ndarray) -> list[Any]:
    return [float(data.sum()), labels.tolist()]


@pytest.mark.parametrize("num_threads", [0, 2])
def test_postprocess_in_place(train: Path, num_threads: int) -> None:
    with AsyncReader(
        hdf5_path=train, batch_size=5, num_threads=num_threads, postprocess=in_place
    ) as reader:
        for _ in range(2):
            for data, labels in reader:
                index = reader_index(labels)
                assert_same_bits(data, 255 - truth(train)[index])
                assert_same_bits(labels, truth(train, "labels")[index] + 1)


def reader_index(labels: np.ndarray) -> np.ndarray:
    return (labels - 1) // 10


@pytest.mark.parametrize("num_threads", [0, 2])
def test_postprocess_may_change_shape_and_dtype(train: Path, num_threads: int) -> None:
    with AsyncReader(
        hdf5_path=train, batch_size=5, num_threads=num_threads, postprocess=returned
    ) as reader:
        for batch in reader:
            assert_same_bits(batch.data, truth(train)[batch.index][:, ::2].astype("f8"))
            assert batch.labels.shape == (batch.size, 1)
            assert batch.labels.dtype == bool


def test_postprocess_may_return_what_makes_an_array(train: Path) -> None:
    with AsyncReader(hdf5_path=train, batch_size=5, postprocess=listed) as reader:
        batch = reader.get_next_batch()
        assert batch.data.shape == ()
        assert batch.data == truth(train)[:5].sum()
        assert batch.labels.tolist() == [0, 10, 20, 30, 40]


def test_postprocess_of_one_field_may_return_it_bare(train: Path) -> None:
    for wrap in (lambda array: array, lambda array: (array,), lambda array: [array]):
        with AsyncReader(
            hdf5_path=train, labels_field=None, postprocess=lambda data, wrap=wrap: wrap(data[::2])
        ) as reader:
            assert_same_bits(reader.get_next_batch().data, truth(train)[::2])


@pytest.mark.parametrize("name", ["functions_of_a_test:halve", "functions_of_a_test:Name.halve"])
def test_postprocess_by_name(
    train: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    source = "def halve(data, labels):\n    return data // 2, labels\n\n"
    source += "class Name:\n    halve = staticmethod(halve)\n"
    (tmp_path / "functions_of_a_test.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    with AsyncReader(hdf5_path=train, postprocess=name) as reader:
        assert_same_bits(reader.get_next_batch().data, truth(train) // 2)


@pytest.mark.parametrize(
    "result", [(), (1,), (1, 2, 3), 5, np.zeros((2, 2))], ids=["0", "1", "3", "int", "array"]
)
def test_postprocess_must_return_as_many_arrays_as_it_got(train: Path, result: Any) -> None:
    with (
        AsyncReader(hdf5_path=train, batch_size=5, postprocess=lambda *_: result) as reader,
        pytest.raises(PostprocessError, match="it must return 2 arrays, or None"),
    ):
        reader.get_next_batch()


@pytest.mark.parametrize("num_threads", [0, 2])
def test_postprocess_is_called_once_a_batch_where_the_work_is_done(
    train: Path, num_threads: int
) -> None:
    calls: list[tuple[int, int]] = []
    threads = set()

    def postprocess(data: np.ndarray, labels: np.ndarray) -> None:
        assert data.shape[0] == labels.shape[0]
        calls.append((int(labels[0]) // 10, len(labels)))
        threads.add(threading.current_thread())

    with AsyncReader(
        hdf5_path=train, batch_size=10, num_threads=num_threads, postprocess=postprocess
    ) as reader:
        for _ in range(3):
            reader.get_next_batch()
    assert sorted(calls[:3]) == [(0, 10), (10, 10), (20, 3)]
    if num_threads:
        assert threading.current_thread() not in threads
        assert all(thread.name.startswith("h5async-") for thread in threads)
    else:
        assert threads == {threading.current_thread()}
        assert len(calls) == 3


def test_postprocess_gets_the_arrays_as_they_are_delivered(train: Path) -> None:
    """Permuted and cast, in field order, and the very memory of the batch."""
    got: list[Sequence[np.ndarray]] = []
    with AsyncReader(
        hdf5_path=train,
        fields={"labels": "labels", "image": Field("data", axes=(0, 3, 1, 2), scale=0.5)},
        prefetch=1,
        postprocess=lambda *arrays: got.append(arrays),
    ) as reader:
        labels, image = reader.get_next_batch()
        assert got[0][1].dtype == np.float32
        for array, delivered in zip(got[0], (labels, image), strict=True):
            assert array.shape == delivered.shape
            assert array.ctypes.data == delivered.ctypes.data


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_what_is_no_exception_comes_out_as_it_was(train: Path, kind: type[BaseException]) -> None:
    """With num_threads=0, it strikes in the caller's own `postprocess`, and costs no batch."""
    raised: list[None] = []

    def postprocess(data: np.ndarray, labels: np.ndarray) -> None:
        if labels[0] == 0 and not raised:
            raised.append(None)
            raise kind

    with AsyncReader(
        hdf5_path=train, batch_size=5, num_threads=0, postprocess=postprocess
    ) as reader:
        with pytest.raises(kind):
            reader.get_next_batch()
        assert reader.get_next_batch().number == 0


# --- Batch ------------------------------------------------------------------------------------


def test_a_batch_is_a_sequence_of_arrays_with_names(train: Path) -> None:
    with AsyncReader(hdf5_path=train, batch_size=5) as reader:
        batch = reader.get_next_batch()
        data, labels = batch
        assert isinstance(batch, Sequence)
        assert len(batch) == 2
        assert batch.keys() == ["data", "labels"]
        assert batch["data"] is batch[0] is batch[-2] is batch.data is data
        assert batch["labels"] is batch[1] is batch[-1] is batch.labels is labels
        assert batch[:] == (data, labels)[:]
        assert batch[1:] == (labels,)
        assert batch[::-1][0] is labels
        assert next(reversed(batch)) is labels
        assert repr(batch) == ("<Batch 0 of epoch 0: data=(5, 6, 5, 3) uint8, labels=(5,) int64>")


def test_what_a_batch_does_not_have(train: Path) -> None:
    with AsyncReader(hdf5_path=train, batch_size=5) as reader:
        batch = reader.get_next_batch()
        for place in (2, -3):
            with pytest.raises(IndexError):
                batch[place]
        with pytest.raises(KeyError):
            batch["images"]
        with pytest.raises(AttributeError, match="a batch of data, labels has no 'images'"):
            _ = batch.images
        assert not hasattr(batch, "__array__")
        assert getattr(batch, "images", None) is None


def test_what_a_batch_says_of_itself(train: Path) -> None:
    with AsyncReader(hdf5_path=train, batch_size=10, shuffle=True) as reader:
        batches = [batch.copy() for _ in range(2) for batch in reader]
    about = [(b.epoch, b.number, b.last, b.size) for b in batches]
    assert about == [
        (epoch, number, number == 2, 3 if number == 2 else 10)
        for epoch in range(2)
        for number in range(3)
    ]
    for batch in batches:
        assert batch.index.dtype == np.int64
        assert batch.index.shape == (batch.size,)
        assert isinstance(batch.last, bool)
        assert_same_bits(batch.labels, batch.index * 10)


def test_a_copy_owns_its_memory_and_lasts(train: Path) -> None:
    with AsyncReader(hdf5_path=train, batch_size=10, prefetch=1) as reader:
        batch = reader.get_next_batch()
        copy = batch.copy()
        for name in batch.keys():
            assert copy[name].flags.owndata
            assert not np.shares_memory(copy[name], batch[name])
            assert_same_bits(copy[name], batch[name])
        assert copy.index.tolist() == batch.index.tolist()
        assert (copy.epoch, copy.number, copy.last, copy.size) == (0, 0, False, 10)
        reader.get_next_batch()
        assert (batch.data != copy.data).any(), "the slot was refilled"
        assert_same_bits(copy.data, truth(train)[:10])


def test_the_index_lasts(train: Path) -> None:
    with AsyncReader(hdf5_path=train, batch_size=4, shuffle=True, prefetch=1) as reader:
        indices = [batch.index for batch in reader]
        assert np.array_equal(np.sort(np.concatenate(indices)), np.arange(NUM_SAMPLES))


@each(
    "name",
    [
        "index",
        "epoch",
        "number",
        "last",
        "size",
        "copy",
        "count",
        "keys",
        "step",
        "sequence",
        "data",
        "x y",
    ],
)
def test_a_field_is_reached_by_its_name_or_the_name_is_refused(train: Path, name: str) -> None:
    try:
        reader = AsyncReader(hdf5_path=train, fields={name: "labels"})
    except ConfigError as error:
        assert name in str(error)  # noqa: PT017 (either way is right)
        return
    with reader:
        batch = reader.get_next_batch()
        assert_same_bits(batch[name], truth(train, "labels"))
        assert getattr(batch, name) is batch[name]


# --- the reader says --------------------------------------------------------------------------


def test_what_a_reader_says_of_itself(train: Path) -> None:
    row = 6 * 5 * 3 + 8
    with AsyncReader(hdf5_path=train, batch_size=10) as reader:
        assert reader.num_samples == NUM_SAMPLES
        assert reader.nbytes == NUM_SAMPLES * row
        assert reader.device == "cpu"
        assert repr(reader) == (
            f"<AsyncReader {train}: data, labels, 23 samples, 3 batches an epoch, cpu>"
        )
    assert repr(reader).endswith("3 batches an epoch, cpu, closed>")
    assert (len(reader), reader.num_samples, reader.nbytes) == (3, 23, 23 * row)
    with AsyncReader(hdf5_path=train, batch_size=10, drop_last=True) as reader:
        assert reader.num_samples == NUM_SAMPLES
        assert reader.nbytes == 20 * row
    field = Field("float", dtype="f4")
    with AsyncReader(hdf5_path=train, fields={"x": field}) as reader:
        assert reader.nbytes == NUM_SAMPLES * 8 * 8, "as decoded, before the cast"


def test_reads_through_h5py_are_counted(train: Path) -> None:
    with AsyncReader(hdf5_path=train, batch_size=10, num_threads=0) as reader:
        assert len(list(reader)) == 3
        assert reader.fallback_reads == 0
    with AsyncReader(
        hdf5_path=train, batch_size=10, num_threads=0, fields={"x": "odd", "y": "data"}
    ) as reader:
        assert len(list(reader)) == 3
        assert reader.fallback_reads == 3
        assert "its stored type differs" in str(reader.layouts["x"].fallback_reason)
        assert reader.layouts["y"].fallback_reason is None


EMPTY = [
    pytest.param((0, 3), {}, id="no samples"),
    pytest.param((3, 3), {"drop_last": True}, id="less than a batch"),
]


@pytest.mark.parametrize("num_threads", [0, 1])
@pytest.mark.parametrize(("shape", "options"), EMPTY)
def test_an_epoch_without_a_batch(
    tmp_path: Path, shape: tuple[int, int], options: dict[str, Any], num_threads: int
) -> None:
    path = tmp_path / "empty.h5"
    with h5py.File(path, "w") as file:
        file["data"] = np.zeros(shape)
    with AsyncReader(
        hdf5_path=path, labels_field=None, batch_size=4, num_threads=num_threads, **options
    ) as reader:
        assert len(reader) == 0
        assert reader.num_samples == shape[0]
        assert reader.nbytes == 0
        for _ in range(2):
            assert list(reader) == []
        for call in (reader.fetch_data, reader.get_next_batch):
            with pytest.raises(DatasetError, match="an epoch has no batch"):
                call()
    for call in (reader.fetch_data, reader.get_next_batch, lambda: iter(reader)):
        with pytest.raises(ReaderClosedError):
            call()


def test_rows_without_bytes(tmp_path: Path) -> None:
    path = tmp_path / "f.h5"
    with h5py.File(path, "w") as file:
        file["data"] = np.zeros((10, 0, 3), "f4")
    for num_threads in (0, 2):
        with AsyncReader(
            hdf5_path=path, labels_field=None, batch_size=4, num_threads=num_threads
        ) as reader:
            assert [batch.data.shape for batch in reader] == [(4, 0, 3), (4, 0, 3), (2, 0, 3)]


# --- waiting ----------------------------------------------------------------------------------


@pytest.mark.parametrize("by_option", [False, True])
def test_a_timeout_and_then_the_same_batch(train: Path, gate: Gate, by_option: bool) -> None:
    options = {"timeout": 0.05} if by_option else {}
    with AsyncReader(
        hdf5_path=train, batch_size=5, num_threads=1, postprocess=gate, **options
    ) as reader:
        for _ in range(3):
            with pytest.raises(BatchTimeoutError, match=r"within 0\.05 s"):
                reader.get_next_batch(timeout=None if by_option else 0.05)
        gate.opened.set()
        batch = reader.get_next_batch(timeout=DEADLOCK_SECONDS)
        assert (batch.epoch, batch.number) == (0, 0)
        assert_same_bits(batch.data, truth(train)[:5])
        assert reader.get_next_batch(timeout=DEADLOCK_SECONDS).number == 1


def test_a_timeout_is_also_the_built_in_one(train: Path, gate: Gate) -> None:
    with AsyncReader(hdf5_path=train, num_threads=1, postprocess=gate) as reader:
        with pytest.raises(TimeoutError):
            reader.get_next_batch(timeout=0)
        gate.opened.set()


def test_a_loop_times_out_too_and_can_go_on(train: Path, gate: Gate) -> None:
    with AsyncReader(
        hdf5_path=train, batch_size=5, num_threads=1, postprocess=gate, timeout=0.05
    ) as reader:
        loop = iter(reader)
        with pytest.raises(BatchTimeoutError):
            next(loop)
        gate.opened.set()
        numbers = []
        while len(numbers) < 5:
            try:
                numbers.append(next(loop).number)
            except BatchTimeoutError:
                continue
        assert numbers == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("prefetch", [1, 2])
@pytest.mark.parametrize("num_threads", [0, 1, 3])
def test_fetch_data_never_blocks(train: Path, gate: Gate, num_threads: int, prefetch: int) -> None:
    with AsyncReader(
        hdf5_path=train,
        batch_size=5,
        num_threads=num_threads,
        prefetch=prefetch,
        postprocess=gate,
    ) as reader:
        ends = [reader.fetch_data() for _ in range(52)]
        assert ends == [number % 5 == 4 for number in range(52)]
        if num_threads:
            assert gate.entered.wait(DEADLOCK_SECONDS)
            assert gate.calls <= prefetch
        else:
            assert gate.calls == 0, "without threads, fetch_data() does no work"
        gate.opened.set()
        for number in range(53):
            batch = reader.get_next_batch()
            assert (batch.epoch, batch.number) == divmod(number, 5)


@pytest.mark.parametrize("prefetch", [1, 2, 3])
def test_the_batch_in_hand_survives_many_fetches(train: Path, prefetch: int) -> None:
    """The others are filled meanwhile, until all slots are taken."""
    filled = threading.Semaphore(0)

    def postprocess(*arrays: np.ndarray) -> None:
        filled.release()

    with AsyncReader(
        hdf5_path=train, batch_size=5, num_threads=2, prefetch=prefetch, postprocess=postprocess
    ) as reader:
        batch = reader.get_next_batch()
        assert filled.acquire(timeout=DEADLOCK_SECONDS)
        for _ in range(20):
            reader.fetch_data()
        for _ in range(prefetch - 1):
            assert filled.acquire(timeout=DEADLOCK_SECONDS)
        assert not filled.acquire(blocking=False)
        assert_same_bits(batch.data, truth(train)[:5])


@pytest.mark.parametrize("field", ["contiguous", "raw", "pieces", "gzip", "columns"])
def test_threads_share_the_work_of_one_batch(
    wide: Path, monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    """Two threads have to meet while both work on the one batch that was asked for."""
    meeting = threading.Barrier(2)
    arrivals = iter(range(10**6))
    threads = []
    read = BatchReader.read

    def meet_first(self: BatchReader, *arguments: Any) -> None:
        if next(arrivals) < 2:
            threads.append(threading.current_thread())
            meeting.wait(DEADLOCK_SECONDS)
        read(self, *arguments)

    monkeypatch.setattr(BatchReader, "read", meet_first)
    monkeypatch.setattr(BatchReader, "open_queue", lambda *_: None)
    num_dim = int(field == "columns")
    with AsyncReader(
        hdf5_path=wide,
        data_field=field,
        labels_field=None,
        num_dim=num_dim,
        batch_size=64,
        num_threads=2,
        prefetch=1,
    ) as reader:
        batch = reader.get_next_batch()
        assert_same_bits(batch.data, truth(wide, field, num_dim))
    assert len(set(threads)) == 2


@pytest.mark.slow
@pytest.mark.parametrize("threads", [(None, None), (None, 1), (8, 2), (None, None, None)])
def test_readers_alive_at_once_share_the_cores(tmp_path: Path, threads: tuple[int | None]) -> None:
    """Readers of the same work get on about equally fast, whatever threads each has."""
    path = tmp_path / "busy.h5"
    values = np.random.default_rng(1).integers(0, 16, (2048, 64, 64), dtype=np.uint8)
    with h5py.File(path, "w") as file:
        file.create_dataset("data", data=values, chunks=(16, 64, 64), compression="gzip")
    counts, done = [0] * len(threads), threading.Event()
    readers = [
        AsyncReader(hdf5_path=path, labels_field=None, batch_size=64, num_threads=n, shuffle="full")
        for n in threads
    ]

    def consume(mine: int) -> None:
        while not done.is_set():
            for batch in readers[mine]:
                assert np.array_equal(batch.data, values[batch.index])
                counts[mine] += 1
                if counts[mine] == 4000:  # some seconds: waits for the GIL are short beside it
                    done.set()
                if done.is_set():
                    break

    consumers = [threading.Thread(target=consume, args=(i,)) for i in range(len(threads))]
    for consumer in consumers:
        consumer.start()
    for consumer in consumers:
        consumer.join()
    for reader in readers:
        reader.close()
    assert min(counts) >= 1000, counts


# --- errors of workers ------------------------------------------------------------------------


@pytest.mark.parametrize("num_threads", [0, 1, 3])
def test_after_an_error_the_next_batch_comes(train: Path, num_threads: int) -> None:
    def postprocess(data: np.ndarray, labels: np.ndarray) -> None:
        if 70 in labels:
            raise ZeroDivisionError("seven")

    with AsyncReader(
        hdf5_path=train, batch_size=5, num_threads=num_threads, postprocess=postprocess
    ) as reader:
        for epoch in range(2):
            for number in range(5):
                if number != 1:
                    assert reader.get_next_batch().number == number
                    continue
                with pytest.raises(ZeroDivisionError) as found:
                    reader.get_next_batch()
                assert isinstance(found.value, PostprocessError)
                assert f"{train}: postprocess of batch 1 of epoch {epoch}" in str(found.value)
                assert isinstance(found.value.__cause__, ZeroDivisionError)


# --- closing ----------------------------------------------------------------------------------


def use_and_close(reader: AsyncReader) -> None:
    reader.fetch_data()
    reader.get_next_batch()
    reader.close()


def close_twice(reader: AsyncReader) -> None:
    reader.close()
    reader.close()


def close_with_fetches_outstanding(reader: AsyncReader) -> None:
    for _ in range(20):
        reader.fetch_data()
    reader.close()


def close_in_a_loop(reader: AsyncReader) -> None:
    with reader:
        for _ in reader:
            reader.close()
            break


def raise_in_with(reader: AsyncReader) -> None:
    with pytest.raises(LookupError), reader:
        raise LookupError


@each("num_threads", [0, 1, 3])
@pytest.mark.parametrize(
    "use",
    [use_and_close, close_twice, close_with_fetches_outstanding, close_in_a_loop, raise_in_with],
)
def test_a_closed_reader_refuses_all_and_leaves_no_thread(
    train: Path, use: Callable[[AsyncReader], None], num_threads: int
) -> None:
    reader = AsyncReader(hdf5_path=train, batch_size=5, num_threads=num_threads)
    loop = iter(reader)
    use(reader)
    assert not our_threads()
    for call in (
        reader.fetch_data,
        reader.get_next_batch,
        lambda: iter(reader),
        lambda: next(loop),
        lambda: list(reader),
    ):
        with pytest.raises(ReaderClosedError, match="the reader is closed; make a new one"):
            call()
    reader.close()


def test_a_batch_in_hand_outlives_the_reader(train: Path) -> None:
    with AsyncReader(hdf5_path=train, batch_size=5) as reader:
        batch = reader.get_next_batch()
    del reader
    gc.collect()
    assert_same_bits(batch.data, truth(train)[:5])
    assert_same_bits(batch.labels, truth(train, "labels")[:5])


def test_close_wakes_a_thread_that_waits_for_a_batch(train: Path, gate: Gate) -> None:
    reader = AsyncReader(hdf5_path=train, batch_size=5, num_threads=1, postprocess=gate)
    refused = threading.Event()

    def consume() -> None:
        with pytest.raises(ReaderClosedError):
            reader.get_next_batch()
        refused.set()

    consumer = threading.Thread(target=consume)
    consumer.start()
    assert gate.entered.wait(DEADLOCK_SECONDS)
    closer = threading.Thread(target=reader.close)
    closer.start()
    assert refused.wait(DEADLOCK_SECONDS), "close() did not wake the consumer"
    gate.opened.set()
    for thread in (consumer, closer):
        thread.join(DEADLOCK_SECONDS)
        assert not thread.is_alive()
    assert gate.calls == 1, "what was not begun is not begun any more"


def test_a_postprocess_may_close_its_reader(train: Path) -> None:
    readers: list[AsyncReader] = []
    closed = threading.Event()

    def postprocess(*arrays: np.ndarray) -> None:
        readers[0].close()
        closed.set()

    readers.append(AsyncReader(hdf5_path=train, num_threads=2, postprocess=postprocess))
    with pytest.raises(ReaderClosedError):
        readers[0].get_next_batch()
    assert closed.wait(DEADLOCK_SECONDS)


# --- dropping a reader unclosed ---------------------------------------------------------------


def leave_untouched(reader: AsyncReader) -> None:
    pass


def leave_with_fetches_outstanding(reader: AsyncReader) -> None:
    for _ in range(20):
        reader.fetch_data()


def leave_with_a_batch(reader: AsyncReader) -> None:
    reader.get_next_batch()


def leave_after_a_break(reader: AsyncReader) -> None:
    for _ in reader:
        break


def leave_after_an_epoch(reader: AsyncReader) -> None:
    for _ in reader:
        pass


def leave_after_an_error(reader: AsyncReader) -> None:
    """The error is kept nowhere: its traceback would hold the reader."""
    for _ in range(len(reader) - 1):
        reader.get_next_batch()
    with pytest.raises(ZeroDivisionError):
        reader.get_next_batch()


def leave_in_a_cycle(reader: AsyncReader) -> None:
    reader.itself = reader  # type: ignore[attr-defined]
    reader.fetch_data()


@pytest.mark.slow
@each("num_threads", [0, 1, 3])
@pytest.mark.parametrize(
    "use",
    [
        leave_untouched,
        leave_with_fetches_outstanding,
        leave_with_a_batch,
        leave_after_a_break,
        leave_after_an_epoch,
        leave_after_an_error,
        leave_in_a_cycle,
    ],
)
def test_a_reader_that_is_dropped_unclosed_leaves_nothing(
    train: Path, use: Callable[[AsyncReader], None], num_threads: int
) -> None:
    def postprocess(data: np.ndarray, labels: np.ndarray) -> None:
        if use is leave_after_an_error and len(labels) < 5:
            raise ZeroDivisionError

    reader = AsyncReader(
        hdf5_path=train, batch_size=5, num_threads=num_threads, postprocess=postprocess
    )
    memory = weakref.ref(reader._engine.setup.slots[0].memory.out[0])
    gone = weakref.ref(reader)
    use(reader)
    threads = our_threads()
    assert threads or not num_threads or use is leave_untouched
    try:
        del reader
        gc.collect()
        assert gone() is None, f"held by {gc.get_referrers(gone())}"
        for thread in threads:  # the collector waits for them only for a moment
            thread.join(DEADLOCK_SECONDS)
        assert not our_threads()
        gc.collect()
        assert memory() is None, "its slots are not freed"
    finally:
        if (left := gone()) is not None:
            left.close()


def test_a_reader_collected_while_a_lock_is_held_that_its_worker_waits_for(tmp_path: Path) -> None:
    """The collector runs anywhere; here where this thread is in h5py, as a worker wants to be."""
    path = tmp_path / "odd.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("data", (NUM_SAMPLES,), type_for_h5py())[...] = 7
    reader = AsyncReader(hdf5_path=path, labels_field=None, num_threads=2)
    gone, fallback = weakref.ref(reader), reader._engine.filler._executors._fallback
    waits = threading.Event()
    inner = fallback.read

    def read(*arguments: Any) -> None:
        waits.set()
        inner(*arguments)

    fallback.read = read
    reader.itself = reader  # type: ignore[attr-defined]
    threads = our_threads()
    with h5py._objects.phil:
        reader.fetch_data()
        assert waits.wait(DEADLOCK_SECONDS)
        del reader
        gc.collect()
        assert gone() is None
    for thread in threads:
        thread.join(DEADLOCK_SECONDS)
        assert not thread.is_alive()


# --- the end of the process -------------------------------------------------------------------


def run_script(
    source: str, path: Path, *, interrupt: bool = False, expected: int = 0
) -> tuple[str, str]:
    """Run Python in a process of its own; with `interrupt`, Ctrl-C when it prints "ready"."""
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-X", "faulthandler", "-c", source, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONDEVMODE": "1"},
    )
    with process:
        try:
            if interrupt:
                assert process.stdout is not None
                assert process.stdout.readline() == "ready\n"
                process.send_signal(signal.SIGINT)
            out, error = process.communicate("go on\n", timeout=DEADLOCK_SECONDS)
        except BaseException:
            process.kill()
            raise
    assert process.returncode == expected, error
    return out, error


IMPORTS = """
import faulthandler, gc, os, sys, threading, weakref
import h5async
from h5async import AsyncReader
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "use",
    [
        "for _ in range(20): reader.fetch_data()",
        "batch = reader.get_next_batch()",
        "loop = iter(reader); batch = next(loop)",
        "for batch in reader: break",
        "reader.itself = reader; reader.fetch_data(); del reader",
        "reader.fetch_data(); num_threads and sys.exit()",
        # a training loop in a thread of its own goes on when the main thread is at its end
        "threading.Thread(target=lambda r: [list(r) for _ in range(20)], args=(reader,)).start()",
    ],
)
def test_interpreter_exit_with_open_readers(train: Path, use: str) -> None:
    source = f"""{IMPORTS}
kept = []
for num_threads in (0, 1, 4):
    reader = AsyncReader(hdf5_path=sys.argv[1], batch_size=2, num_threads=num_threads)
    {use}
    kept.append(globals().copy())
"""
    assert run_script(source, train) == ("", "")


@pytest.mark.slow
@pytest.mark.parametrize("is_caught", [False, True])
@pytest.mark.parametrize("num_threads", [0, 2])
def test_ctrl_c_in_a_get_that_blocks(train: Path, num_threads: int, is_caught: bool) -> None:
    """The first batch waits for the parent, which interrupts before it lets it go on."""
    source = f"""{IMPORTS}
def postprocess(data, labels):
    if labels[0] == 0:
        print("ready", flush=True)
        sys.stdin.readline()

reader = AsyncReader(
    hdf5_path=sys.argv[1], batch_size=2, num_threads={num_threads}, postprocess=postprocess
)
try:
    while True:
        reader.get_next_batch()
except KeyboardInterrupt:
    if not {is_caught}:
        raise
    print("interrupted")
    assert [batch.number for batch in reader] == list(range(len(reader)))
    reader.close()
    print([t.name for t in threading.enumerate() if t.name.startswith("h5async")])
"""
    expected = 0 if is_caught else -signal.SIGINT
    out, error = run_script(source, train, interrupt=True, expected=expected)
    if is_caught:
        assert out.replace("ready\n", "") == "interrupted\n[]\n"
        assert error == ""
    else:
        assert error.rstrip().endswith("KeyboardInterrupt")


def test_where_no_thread_can_be_started_nobody_waits_for_one(
    train: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container that limits their number: the caller does the work, or an error says so."""

    def refused(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    try:
        with AsyncReader(
            hdf5_path=train, batch_size=5, num_threads=2, timeout=DEADLOCK_SECONDS
        ) as reader:
            assert_epoch_is(reader, truth(train))
    except ReadError as error:
        assert "no more threads" in str(error)  # noqa: PT017 (either way is right)


COLLECTED_WHILE = {
    # what runs in a worker when the garbage collector strikes, and how it is patched to strike
    "h5py reads": """
import h5async.read.h5pyrows
inner = h5async.read.h5pyrows._spans
def spans(*arguments):
    collect()
    return inner(*arguments)
h5async.read.h5pyrows._spans = spans
field = "odd"
""",
    "a share is read": """
from h5async.fill.reading import BatchReader
inner = BatchReader.read
def read(self, *arguments):
    collect()
    return inner(self, *arguments)
BatchReader.read = read
BatchReader.open_queue = lambda *_: None
field = "data"
""",
    "shares are handed out": """
import heapq
h5async.fill.phases._MIN_SHARE_NBYTES = 1
inner = heapq.heappush
def push(*arguments):
    collect()
    return inner(*arguments)
heapq.heappush = push
h5async.fill.reading.BatchReader.open_queue = lambda *_: None
field = "data"
""",
    "a thread comes for work": """
from h5async.fill.submissions import Submissions
inner = Submissions.get
def get(self):
    collect()
    return inner(self)
Submissions.get = get
field = "data"
""",
    "a batch is ready": """
from h5async.deliver.slots import SlotRing
inner = SlotRing._next_to_assign
def next_to_assign(self):
    collect()
    return inner(self)
SlotRing._next_to_assign = next_to_assign
h5async.fill.reading.BatchReader.open_queue = lambda *_: None
field = "data"
""",
}


@pytest.mark.slow
@pytest.mark.parametrize("moment", COLLECTED_WHILE)
def test_a_reader_collected_in_one_of_its_own_workers(train: Path, moment: str) -> None:
    """Any allocation in a worker may run the collector, whatever lock is held there."""
    if moment == "a thread comes for work" and core_module.load_core() is None:
        pytest.skip("needs the compiled core")
    source = f"""{IMPORTS}
gc.disable()
dropped = threading.Event()

def collect():
    if threading.current_thread().name.startswith("h5async"):
        assert dropped.wait({DEADLOCK_SECONDS})
        gc.collect()

{COLLECTED_WHILE[moment]}
reader = AsyncReader(
    hdf5_path=sys.argv[1], data_field=field, labels_field=None, num_threads=2
)
gone = weakref.ref(reader)
reader.itself = reader
reader.fetch_data()
threads = [t for t in threading.enumerate() if t.name.startswith("h5async")]
del reader
dropped.set()
for thread in threads:
    thread.join({DEADLOCK_SECONDS / 3})
    if thread.is_alive():
        faulthandler.dump_traceback(all_threads=True)
        os._exit(1)
assert gone() is None
"""
    assert run_script(source, train)[0] == ""


# --- devices ----------------------------------------------------------------------------------


@pytest.mark.skipif(importlib.util.find_spec("cupy") is not None, reason="CuPy is installed")
@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_cuda_without_cupy_says_how_to_install_it(train: Path, device: str) -> None:
    with pytest.raises(DeviceError, match=r"CuPy is not installed .*pip install 'h5async\[cuda"):
        AsyncReader(hdf5_path=train, device=device)


@pytest.mark.skipif(importlib.util.find_spec("cupy") is not None, reason="CuPy is installed")
def test_auto_without_cupy_is_the_cpu(train: Path) -> None:
    with AsyncReader(hdf5_path=train, device="auto") as reader:
        assert reader.device == "cpu"
        assert isinstance(reader.get_next_batch().data, np.ndarray)


# --- how files are read -----------------------------------------------------------------------

IO_MODES = ("auto", "pread", "map")
SMALL_ROWS = (60, 16)  # 64 bytes each: they are copied out of a map, where there is one


@pytest.fixture
def kinds(tmp_path: Path) -> Path:
    """Datasets of int32, each stored in another way; "columns" counts samples last."""
    path = tmp_path / "kinds.h5"
    values = np.random.default_rng(0).integers(1, 999, SMALL_ROWS).astype("i4")
    large = np.random.default_rng(1).integers(1, 999, (60, 20_000)).astype("i4")
    with h5py.File(path, "w") as file:
        file["rows"] = values
        file["large rows"] = large
        file.create_dataset("raw chunks", data=values, chunks=(7, 16))
        file.create_dataset("gzip", data=values, chunks=(7, 16), compression="gzip")
        file.create_dataset("scaleoffset", data=values, chunks=(7, 16), scaleoffset=0)
        file["columns"] = values.T
    return path


def kind_options(name: str) -> dict[str, Any]:
    return {
        "data_field": name,
        "labels_field": None,
        "num_dim": 1 if name == "columns" else 0,
        "batch_size": 9,
        "device": "cpu",
    }


KINDS = ("rows", "large rows", "raw chunks", "gzip", "scaleoffset", "columns")


@each("num_threads", [0, 2])
@pytest.mark.parametrize("name", KINDS)
@each("io", IO_MODES)
def test_every_io_mode_gives_what_h5py_gives(
    kinds: Path, io: str, name: str, num_threads: int
) -> None:
    options = {**kind_options(name), "num_threads": num_threads, "io": io}
    expected = truth(kinds, name, options["num_dim"])
    for shuffle in (False, "full", "window"):
        with AsyncReader(hdf5_path=kinds, shuffle=shuffle, **options) as reader:
            assert reader.config.io == io
            poison(reader)
            for _ in range(2):
                assert_epoch_is(reader, expected, in_order=not shuffle)
            is_mapped = can_be_mapped(kinds, io)
            through_h5py = name == "columns" and not is_mapped
            assert (reader.fallback_reads > 0) == through_h5py
            assert (reader.layouts["data"].fallback_reason is not None) == through_h5py
            executors = reader._engine.filler._executors
            files: list[Any] = []
            for collection in executors._collections:
                table = collection.tables._table
                files += [source for source in table if source["map"] or source["fd"] >= 0]
                assert all((source["map"] != 0) == is_mapped for source in table)
            assert len(files) == (not through_h5py)


def can_be_mapped(path: Path, io: str) -> bool:
    """Tell whether a file is mapped: by default, only where the core guards what reads the map."""
    return io == "map" or (core_module.mapping_mode(io) == "auto" and can_map(str(path)))


def test_columns_are_read_by_mapping_and_a_reason_says_so(kinds: Path) -> None:
    with AsyncReader(hdf5_path=kinds, io="pread", **kind_options("columns")) as reader:
        reason = reader.layouts["data"].fallback_reason
    assert reason is not None
    assert 'io="map"' in reason


@pytest.mark.parametrize(("io", "is_mapped"), [("auto", False), ("pread", False), ("map", True)])
def test_only_map_maps_where_the_file_system_is_not_known(
    kinds: Path, monkeypatch: pytest.MonkeyPatch, io: str, is_mapped: bool
) -> None:
    monkeypatch.setattr("h5async.io.source.can_map", lambda path: False)
    for name in KINDS:
        options = {**kind_options(name), "io": io, "num_threads": 0}
        with AsyncReader(hdf5_path=kinds, shuffle="full", **options) as reader:
            expected = truth(kinds, name, options["num_dim"])
            assert_epoch_is(reader, expected, in_order=False)
            assert (reader.fallback_reads == 0) == (is_mapped or name != "columns")


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("io", IO_MODES)
def test_a_file_cut_short_after_it_was_opened_is_an_error(kinds: Path, io: str, name: str) -> None:
    """Never a crash, and no batch is wrong; in a process of its own, which a map could end."""
    source = f"""
import os, shutil
import h5py
import numpy as np
from h5async import AsyncReader, ReadError
name, num_dim = {name!r}, {int(name == "columns")}
with h5py.File({str(kinds)!r}) as file:
    expected = np.moveaxis(file[name][...], num_dim, 0)
options = dict(data_field=name, labels_field=None, num_dim=num_dim, batch_size=9, prefetch=1,
               device="cpu", shuffle="full", io={io!r})
for num_threads in (0, 2):
    path = shutil.copy({str(kinds)!r}, {str(kinds)!r} + str(num_threads))
    with AsyncReader(hdf5_path=path, num_threads=num_threads, **options) as reader:
        batch = reader.get_next_batch()
        assert np.array_equal(batch.data, expected[batch.index])
        os.truncate(path, 2048)
        errors = 0
        for _ in range(2 * len(reader)):
            try:
                batch = reader.get_next_batch()
            except ReadError as error:
                assert path in str(error), error
                errors += 1
            else:
                assert np.array_equal(batch.data, expected[batch.index]), "a batch is wrong"
        assert errors, "nothing was noticed"
"""
    run_script(source, kinds)
