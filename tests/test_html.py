"""Tables in notebooks: what they show, that all is escaped, that nothing is loaded or copied."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from h5async import (
    AsyncReader,
    Batch,
    BatchExpiredError,
    Csr,
    DatasetError,
    Images,
    Ragged,
    RaggedField,
)
from h5async.spelling import Bar, box, grid, seconds_text, size_text, table

VOID = {"br", "hr", "img", "meta"}
ODD = '<script>alert("1")</script> & <b>'


class Page(HTMLParser):
    """Checks that tags are balanced, harmless ones; collects the text."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.rows = 0
        self.feed(source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        assert tag in {"div", "p", "strong", "table", "tr", "td", "th", "span"}, tag
        assert {name for name, _ in attributes} <= {"style"}
        for _, value in attributes:
            assert "url" not in str(value), "nothing is loaded"
        self.open.append(tag)
        self.rows += tag == "tr"

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    def says(self, *words: str) -> bool:
        text = " ".join("".join(f" {part}" for part in self.text).split())
        return all(word in text for word in words)


def shown(thing: Any) -> Page:
    return Page(thing._repr_html_())


class OnGpu:
    """Stands for an array on a GPU, of which nothing may be asked but what it is."""

    def __init__(self, *shape: int, dtype: str = "f4") -> None:
        self.shape, self.dtype, self.ndim = shape, np.dtype(dtype), len(shape)
        self.nbytes, self.size = 4, shape[0]

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, key: Any) -> Any:
        raise AssertionError("values were copied from the GPU")

    get = __array__ = tolist = __getitem__


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with h5py.File(tmp_path / "f.h5", "w") as file:
        file["data"] = np.arange(60.0).reshape(20, 3)
        file["labels"] = np.arange(20)
    return tmp_path / "f.h5"


def test_all_text_is_escaped() -> None:
    source = table(ODD, [[ODD, Bar(0.5, ODD)]], head=[ODD, ODD], subtitle=ODD, note=ODD)
    assert "<script" not in source
    assert Page(source).text.count(ODD) >= 5


@pytest.mark.parametrize(("share", "width"), [(-1, "0.0"), (0.25, "25.0"), (7, "100.0")])
def test_bars_stay_within_their_tracks(share: float, width: str) -> None:
    assert f"width:{width}%" in grid([["x", Bar(share, "")]])


def test_one_thing_is_not_called_several(path: Path) -> None:
    lone = Ragged(np.arange(1), np.array([0, 1]))
    row = Csr(np.ones(1, "f4"), np.zeros(1, "i4"), np.array([0, 1]), (1, 1))
    image = Images(np.zeros(3, "u1"), np.array([0, 3]), np.array([[1, 1, 3]]))
    assert repr(lone) == "<Ragged: 1 sample, 1 value of int64>"
    assert repr(row) == "<Csr: 1 row of 1 column, 1 value of float32>"
    assert shown(lone).says("1 sample")
    assert not shown(lone).says("1 samples")
    assert shown(row).says("1 row of 1 column")
    assert not shown(row).says("1 rows")
    assert shown(image).says("1 image")
    assert not shown(image).says("1 images")
    with AsyncReader(hdf5_path=path, batch_size=1, device="cpu") as reader:
        batch = reader.get_next_batch()
        assert shown(batch).says("1 sample on")
        assert not shown(batch).says("1 samples")
        assert shown(reader.stats()).says("1 batch, 1 sample,")
        assert repr(reader.stats()).startswith("<ReaderStats: 1 batch, 1 sample in")


def test_given_samples_are_no_batch_of_an_epoch(path: Path) -> None:
    with AsyncReader(hdf5_path=path, batch_size=4, device="cpu") as reader:
        batch = reader.read([3, 1])
        assert repr(batch).startswith("<Batch of given samples: data=(2, 3)")
        assert shown(batch).says("Batch of given samples", "2 samples")


def test_given_samples_that_are_used_too_late(path: Path) -> None:
    with AsyncReader(hdf5_path=path, batch_size=4, device="cpu", debug_lifetimes=True) as reader:
        reader.fetch_data([3, 1])
        batch = reader.get_next_batch()
        reader.get_next_batch()
        assert repr(batch) == "<Batch of given samples, expired>"
        with pytest.raises(BatchExpiredError, match=r"^a batch of given samples was used after"):
            batch["data"]


def test_a_field_that_a_batch_has_not(path: Path) -> None:
    with AsyncReader(hdf5_path=path, batch_size=4, device="cpu") as reader:
        batch = reader.get_next_batch()
        with pytest.raises(DatasetError, match="a batch of data, labels has no 'label'") as error:
            batch["label"]
        assert isinstance(error.value, KeyError)


def test_the_shape_of_samples_of_any_length(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "f.h5", "w") as file:
        file["flat"], file["pairs"] = np.arange(10), np.zeros((10, 2))
        file["lengths"] = [4, 6]
    fields = {
        name: RaggedField(name, offsets="lengths", offsets_kind="lengths")
        for name in ("flat", "pairs")
    }
    with AsyncReader(hdf5_path=tmp_path / "f.h5", fields=fields, device="cpu") as reader:
        assert shown(reader).says("(any,)", "(any, 2)")


def test_several_tables_or_none() -> None:
    assert grid([]) == ""
    assert Page(box("a", [grid([["b", "c"]]), grid([["d"]])], note="e")).rows == 2


def test_times_and_sizes_have_units() -> None:
    assert [seconds_text(s) for s in (0, 2e-6, 0.0314, 1.0, 90.0)] == [
        *("0 µs", "2 µs", "31.4 ms", "1 s", "90 s"),
    ]
    assert [size_text(n) for n in (0, 999, 1000, 2.5e6, 1e12)] == [
        *("0 B", "999 B", "1 kB", "2.5 MB", "1e+03 GB"),
    ]


def test_a_reader(path: Path) -> None:
    options = {"batch_size": 5, "shuffle": "full", "num_threads": 1, "device": "cpu"}
    reader = AsyncReader(hdf5_path=path, **options)
    page = shown(reader)
    assert page.says(
        "AsyncReader", str(path), "samples 20", "decoded 640 B an epoch", "shuffled, full"
    )
    assert page.says("data", "(3,)", "float64", "labels", "int64", "cpu, 1 thread")
    assert page.says("4 batches an epoch, none delivered yet")
    for batch in reader:
        assert shown(reader).says(f"epoch 0, {batch.number + 1} of 4 batches")
    assert repr(reader).startswith("<AsyncReader ")
    reader.close()
    assert shown(reader).says("closed", "epoch 0, 4 of 4 batches")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"sampler": [[0, 1], [2]]}, "by a sampler"),
        ({"weights": np.ones(20)}, "drawn by weights"),
        ({}, "as in the file; batches of 32 samples"),
        ({"fields": {"<i>": "data"}}, "<i>"),
    ],
)
def test_readers_of_all_orders(path: Path, options: dict[str, Any], said: str) -> None:
    with AsyncReader(hdf5_path=path, **options) as reader:
        assert shown(reader).says(said)


def test_a_reader_of_nothing(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "f.h5", "w") as file:
        file["data"] = np.zeros((0, 3))
    with AsyncReader(hdf5_path=tmp_path / "f.h5", labels_field=None) as reader:
        assert shown(reader).says("0 batches an epoch")
        assert shown(reader.stats()).says("nothing to tell yet")


def test_a_reader_whose_rank_is_not_known(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with AsyncReader(hdf5_path=path) as reader:
        for name, value in {"RANK": "0", "WORLD_SIZE": "2", "SLURM_PROCID": "1"}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("SLURM_NTASKS", "3")
        assert shown(reader).says("progress rank not known")


def test_statistics(path: Path) -> None:
    with AsyncReader(hdf5_path=path, batch_size=2, num_threads=0) as reader:
        assert shown(reader.stats()).says("0 batches", "nothing to tell yet")
        for _ in reader:
            pass
        page = shown(reader.stats(epoch=0))
    assert page.says("ReaderStats in epoch 0", "10 batches, 20 samples, 640 B", "plan", "read")
    assert page.says("loop waited", "wait, median", "wait, 99 %", "data-bound")
    assert repr(reader.stats(epoch=0)).startswith("<ReaderStats in epoch 0: 10 batches, 20 samples")
    assert len(repr(reader.stats())) < 120


@pytest.mark.parametrize("num_threads", [0, 2])
def test_a_batch_and_the_end_of_its_life(path: Path, num_threads: int) -> None:
    with AsyncReader(hdf5_path=path, batch_size=5, num_threads=num_threads) as reader:
        first = reader.get_next_batch()
        copied = first.copy()
        page = shown(first)
        assert page.says("Batch 0 of epoch 0", "5 samples on cpu", "(5, 3)", "float64", "0, 1, 2")
        assert page.says("sample numbers: 0, 1, 2, 3, 4")
        second = reader.get_next_batch()
        assert shown(first).says("The life of this batch is over")
        assert not shown(first).says("float64")
        assert shown(copied).says("0, 1, 2")
        assert shown(second).says("15, 16, 17")
    assert shown(second).says("15, 16, 17"), "it lasts, though the reader is closed"


@pytest.mark.parametrize("options", [{"copy": True}, {"debug_lifetimes": True}])
def test_batches_that_last_and_those_that_expire(path: Path, options: dict[str, Any]) -> None:
    with AsyncReader(hdf5_path=path, batch_size=5, **options) as reader:
        first = reader.get_next_batch()
        assert shown(first).says("0, 1, 2")
        reader.get_next_batch()
        assert shown(first).says("is over") == ("copy" not in options)
        if "copy" not in options:
            assert not hasattr(first, "_ipython_canary_method_should_not_exist_")
            with pytest.raises(BatchExpiredError):
                first.data  # noqa: B018


def test_batches_of_given_samples(path: Path) -> None:
    with AsyncReader(hdf5_path=path, postprocess=lambda x, y: (x[:, 0].sum(), y)) as reader:
        page = shown(reader.read([7, 3]))
    assert page.says("Batch of given samples", "2 samples", "sample numbers: 7, 3")


def test_nothing_is_copied_from_a_gpu() -> None:
    arrays = {"x": OnGpu(4, 3), "y": np.zeros((4, 0))}
    page = shown(Batch(arrays, np.arange(4), 0, 1, True))
    assert page.says("(4, 3)", "float32", "(4, 0)", "the last one")
    ragged = Ragged(OnGpu(9), OnGpu(4, dtype="i8"))
    assert shown(ragged).says("Ragged", "3 samples", "9")
    rows = Csr(OnGpu(9), OnGpu(9, dtype="i4"), OnGpu(4, dtype="i4"), (3, 10))
    assert shown(rows).says("Csr", "3 rows of 10 columns", "9, 30 %")


def test_ragged_sparse_and_images() -> None:
    ragged = Ragged(np.arange(9) / 3, np.array([0, 7, 9]))
    assert shown(ragged).says("2 samples", "2 to 7, 4.5 on average", "0.3333, 0.6667, 1", "…")
    assert shown(Ragged(np.zeros(0), np.zeros(1, np.int64))).says("0 samples")
    rows = Csr(np.array([1.5, 2]), np.array([7, 9]), np.array([0, 2]), shape=(1, 100))
    assert shown(rows).says("7: 1.5, 9: 2", "2, 2 %")
    shapes = np.array([[3, 3, 3], [2, 4, 3]])
    assert shown(Images(np.zeros(51, "u1"), np.array([0, 27, 51]), shapes)).says(
        "2 images", "(2, 3, 3) to (3, 4, 3)"
    )
    batch = Batch({"r": ragged, "c": rows}, np.arange(2), 0, 0, False)
    assert shown(batch).says("2 Ragged", "1 Csr", "float64", "7: 1.5")


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (np.array([b"<b>" * 20]), "<b><b>"),
        (np.array([(1, 2.5)], "i4, f4"), "(1, 2.5)"),
        (np.array([True]), "True"),
        (np.array([np.nan]), "nan"),
        (np.array(["text"], object), "text"),
        (np.float64(3.0), "float64"),
    ],
)
def test_values_of_all_kinds(values: Any, said: str) -> None:
    assert shown(Batch({"x": values}, np.arange(1), 0, 0, False)).says(said)
