"""What is decoded for each sample that is used, counted by hand; and what the sentence says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hdf5files import type_for_h5py
from test_stats import told as sentence_of

from h5async import AsyncReader, Field, RaggedField, ReaderStats
from h5async.fill.resident import wanted_kept_nbytes
from h5async.observe.chunkuse import ChunkFacts
from h5async.observe.stats import Advice, ChunkAdvice, Remedy
from h5async.spelling import as_keyword, spelled
from h5async.system.timeline import STAGES

ROW = (32, 32, 3)
GZIP: dict[str, Any] = {"compression": "gzip", "compression_opts": 1}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """400 images of 3 kB in chunks of 8, and the same values stored in other ways."""
    path = tmp_path_factory.mktemp("chunks") / "f.h5"
    values = np.random.default_rng(0).integers(0, 9, (400, *ROW)).astype("u1")
    with h5py.File(path, "w") as file:
        file.create_dataset("eight", data=values, chunks=(8, *ROW), **GZIP)
        file.create_dataset("one", data=values, chunks=(1, *ROW), **GZIP)
        file.create_dataset("cut", data=values, chunks=(8, 16, 32, 3), **GZIP)
        file.create_dataset("raw", data=values, chunks=(8, *ROW))
        file.create_dataset("raw_cut", data=values, chunks=(8, 16, 32, 3))
        columns = np.ascontiguousarray(values.reshape(400, -1).T)
        file.create_dataset("columns", data=columns, chunks=(512, 100))
        file["labels"] = np.arange(400)
        file["tenth"] = np.arange(400) % 10 == 0
        file["ends"] = np.arange(40, 401, 40)
        file.create_dataset("tokens", data=np.arange(40_000), chunks=(8000,), **GZIP)
        file["token_ends"] = np.arange(100, 40_001, 100)
        records = np.zeros(400, [("x", "f4"), ("y", "f4", (24,))])
        file.create_dataset("table", data=records, chunks=(100,), **GZIP)
        short = np.zeros((10, *ROW), "u1")
        file.create_dataset("short", data=short, chunks=(64, *ROW), maxshape=(None, *ROW), **GZIP)
    return path


@pytest.fixture(autouse=True)
def keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have readers keep no decoded chunks between batches, as they do of large datasets."""
    monkeypatch.setattr(
        "h5async.reader.readersetup.wanted_kept_nbytes",
        lambda config, layouts, *_: (0,) * len(layouts),
    )


def read(path: Any, *, epochs: int = 1, **options: Any) -> ReaderStats:
    given = {"batch_size": 8, "labels_field": None, "device": "cpu", "num_threads": 0, **options}
    if "fields" in given:
        del given["labels_field"]
    with AsyncReader(hdf5_path=path, **given) as reader:
        for _ in range(epochs):
            for _ in reader:
                pass
        return reader.stats()


def remedies(path: Any, **options: Any) -> list[str]:
    """Return what a reader would propose where eight samples are decoded for each."""
    advice = read(path, data_field="eight", **options)._advice.decoded
    return [spelled(one.text, as_keyword) for one in advice.remedies if one.leaves <= 5]


# --- counted ---------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["eight", "one", "cut"])
def test_in_order_nothing_is_decoded_in_vain(path: Path, field: str) -> None:
    stats = read(path, data_field=field)
    assert stats.decoded_nbytes == stats.nbytes == 400 * 32 * 32 * 3
    assert stats.decoded_per_used == 1.0


def test_a_sample_of_each_chunk(path: Path) -> None:
    stats = read(path, data_field="eight", indices=range(0, 400, 8))
    assert (stats.samples, stats.decoded_chunks) == (50, 50)
    assert stats.decoded_per_used == 8.0


def test_shuffled_it_is_what_batches_have_of_a_chunk(path: Path) -> None:
    stats = read(path, data_field="eight", shuffle="full")
    with AsyncReader(
        hdf5_path=path, data_field="eight", labels_field=None, shuffle="full", batch_size=8
    ) as reader:
        expected = sum(np.unique(batch.index // 8).size for batch in reader)
    assert 0.9 * expected <= stats.decoded_chunks <= expected  # one that is kept comes by again
    assert stats.decoded_per_used == pytest.approx(8 * stats.decoded_chunks / 400)
    assert stats.decoded_per_used > 5


def test_pieces_of_images_count_as_whole_images(path: Path) -> None:
    stats = read(path, data_field="cut", indices=range(0, 400, 8))
    assert (stats.decoded_chunks, stats.decoded_per_used) == (100, 8.0)


@pytest.mark.parametrize("field", ["raw", "raw_cut"])
@pytest.mark.parametrize("io", ["auto", "pread"])
def test_of_chunks_without_filters_samples_are_read_alone(path: Path, field: str, io: str) -> None:
    stats = read(path, data_field=field, shuffle="full", io=io)
    assert stats.read_nbytes == stats.nbytes
    assert (stats.read_per_used, stats.decoded_per_used) == (1.0, 0.0)


def test_chunks_across_the_samples_are_read_whole(path: Path) -> None:
    options = {"data_field": "columns", "num_dim": 1, "indices": range(0, 400, 100)}
    stats = read(path, **options)
    assert (stats.samples, stats.read_nbytes) == (4, 400 * 3072)
    assert stats.read_per_used == 100.0
    assert '"data" with the dimension of its samples first' in stats._advice.raw[0].text


def test_windows_that_overlap_use_a_chunk_several_times(path: Path) -> None:
    fields = {"x": Field("eight", steps=range(4))}
    sequences = {"ends": "ends"}
    stats = read(path, fields=fields, sequences=sequences, batch_size=1000)
    assert stats.samples == 10 * 37
    assert stats.decoded_per_used == pytest.approx(400 / (370 * 4))
    one = read(path, fields=fields, sequences={**sequences, "every": 40}, batch_size=1)
    assert (one.samples, one.decoded_chunks) == (10, 10)
    assert one.decoded_per_used == 2.0


def test_ragged_samples_count_by_their_values(path: Path) -> None:
    field = RaggedField("tokens", offsets="token_ends", offsets_kind="ends")
    whole = read(path, fields={"x": field}, batch_size=80)
    assert whole.decoded_per_used == 1.0
    alone = read(path, fields={"x": field}, indices=range(0, 400, 80), batch_size=1)
    assert (alone.samples, alone.decoded_chunks) == (5, 5)
    assert alone.decoded_per_used == 80.0
    assert alone._advice.decoded.unit == "value"


def test_members_of_records_and_edges_are_not_blamed_on_the_order(path: Path) -> None:
    member = read(path, fields={"x": Field("table/x")}, batch_size=100)
    assert member.decoded_chunks == 4
    assert member.decoded_per_used == pytest.approx(1.0)
    short = read(path, data_field="short")
    assert (short.samples, short.decoded_nbytes) == (10, 64 * 3072)
    assert short.decoded_per_used == pytest.approx(1.0)


def test_the_second_epoch_of_a_cache_decodes_nothing(path: Path) -> None:
    stats = read(path, data_field="eight", cache="host", shuffle="full", epochs=2)
    assert "decoded for each" not in str(stats)
    with AsyncReader(
        hdf5_path=path, data_field="eight", labels_field=None, cache="host", shuffle="full"
    ) as reader:
        for _ in range(2):
            for _ in reader:
                pass
    assert reader.stats(epoch=1).decoded_per_used < 0.5  # what the first one was ahead


def test_several_files_and_fields(path: Path) -> None:
    options = {"fields": {"a": "eight", "b": "labels"}, "indices": range(0, 800, 8)}
    stats = read([path, path], **options)
    assert (stats.samples, stats.decoded_chunks, stats.decoded_per_used) == (100, 100, 8.0)
    assert stats.read_per_used == pytest.approx(1.0)
    assert stats._advice.decoded.name == "a", "there is another field"


@pytest.mark.slow
def test_h5py_decodes_whole_chunks(tmp_path: Path) -> None:
    storage = {"chunks": (10, 300_000), **GZIP}  # larger than what HDF5 keeps
    with h5py.File(tmp_path / "f.h5", "w") as file:
        file.create_dataset("data", (60, 300_000), type_for_h5py(), **storage)[...] = 1
    in_order = read(tmp_path / "f.h5", batch_size=5)
    assert in_order.fallback_reads == 12
    assert in_order._h5py_per_used == 1.0
    assert "decoded for each" not in str(in_order)
    some = read(tmp_path / "f.h5", batch_size=1, indices=range(0, 60, 10), shuffle="full")
    assert some._h5py_per_used == 10.0
    assert "10 samples are decoded for each that is used: cache=" in str(some)
    assert "window" not in str(some)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"workers": "process"}, {"workers": 2}, {"num_threads": 2}])
def test_other_ways_to_work(path: Path, options: dict[str, Any]) -> None:
    options = {"num_threads": 1, "data_field": "eight", "indices": range(0, 400, 8), **options}
    stats = read(path, batch_size=1, **options)
    assert 7.0 < stats.decoded_per_used <= 8.0


def test_batches_that_are_on_their_way_are_no_waste(path: Path) -> None:
    with AsyncReader(hdf5_path=path, data_field="one", labels_field=None, prefetch=4) as reader:
        for number in range(4):
            reader.get_next_batch()
            assert reader.stats().decoded_per_used <= 1.0, number


@pytest.mark.parametrize("shuffle", ["full", "window"])
def test_what_is_kept_for_later_is_no_waste(
    path: Path, shuffle: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the beginning, chunks are decoded of which most samples come later."""
    monkeypatch.setattr("h5async.reader.readersetup.wanted_kept_nbytes", wanted_kept_nbytes)
    options = {"labels_field": None, "shuffle": shuffle, "batch_size": 8, "num_threads": 0}
    with AsyncReader(hdf5_path=path, data_field="eight", **options) as reader:
        for _ in range(4):
            reader.get_next_batch()
        assert reader.stats().decoded_per_used > 3
        for stats in (reader.stats(), reader.stats(epoch=-1)):
            assert "decoded for each" not in str(stats)
            assert "decoded for each" not in stats.bottleneck


# --- what is proposed --------------------------------------------------------------------------


@pytest.mark.slow
def test_what_is_proposed_is_not_set_or_refused(path: Path) -> None:
    window, cache = 'shuffle="window"', 'cache="host" from the second epoch on'
    repack = "repack with 4 samples a chunk (h5async advise measures it)"
    assert remedies(path, shuffle="full") == [window, cache, repack]
    assert remedies(path) == [cache, repack]
    assert remedies(path, shuffle="window") == [cache, repack]
    draws = {"weights": np.ones(400)}
    assert remedies(path, **draws) == [window, 'cache="host", as draws repeat', repack]
    assert window not in remedies(path, **draws, shuffle="window")
    assert window not in remedies(path, **draws, epoch_samples=50)
    assert remedies(path, sampler=[[0, 8], [16]]) == [cache, repack]
    assert remedies(path, shuffle="full", cache="host") == [window, repack]
    assert remedies(path, shuffle="full", workers=2, num_threads=1) == [window, repack]
    images = remedies(path, shuffle="full", h_dim=1, w_dim=2, cha_dim=3)
    assert images[-1] == "repack with 4 images a chunk (h5async advise measures it)"


def test_a_window_is_not_proposed_where_few_of_a_chunk_are_selected(path: Path) -> None:
    options = {"data_field": "eight", "shuffle": "full", "num_threads": 0}
    assert "window" in str(remedies(path, shuffle="full"))
    for indices in ("tenth", range(0, 400, 8), np.arange(0, 400, 10)):
        assert "window" not in str(remedies(path, shuffle="full", indices=indices))
    stats = read(path, indices="tenth", **options)
    assert stats.decoded_per_used == pytest.approx(8.0)


def test_no_cache_is_proposed_that_does_not_fit(path: Path, monkeypatch: Any) -> None:
    from h5async.system.resources import MemoryLeft

    left = [MemoryLeft(2 * 400 * 3072 - 1, "a test")]
    monkeypatch.setattr("h5async.observe.chunkuse.free_memory", lambda: left)
    assert "cache" not in str(remedies(path, shuffle="full"))
    left[0] = left[0]._replace(nbytes=2 * 400 * 3072)
    assert "cache" in str(remedies(path, shuffle="full"))


def test_no_window_is_proposed_that_does_not_fit(tmp_path: Path, monkeypatch: Any) -> None:
    from h5async.system.resources import MemoryLeft

    monkeypatch.setattr("h5async.fill.resident._KEPT_WHOLE_NBYTES", 0)
    path = tmp_path / "f.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("eight", (400, *ROW), "u1", chunks=(8, *ROW), **GZIP)
    left = [MemoryLeft(2 * 400 * 3072 - 1, "a test")]
    monkeypatch.setattr("h5async.observe.chunkuse.free_memory", lambda: left)
    assert "window" not in str(remedies(path, shuffle="full"))
    left[0] = left[0]._replace(nbytes=3 * 400 * 3072)  # all chunks fit, though window_bytes do not
    assert "window" in str(remedies(path, shuffle="full"))
    assert "window" in str(remedies(path, shuffle="full", window_bytes=100_000))


def test_a_window_wants_no_more_than_all_chunks(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("h5async.fill.resident._KEPT_WHOLE_NBYTES", 0)
    with h5py.File(tmp_path / "f.h5", "w") as file:
        file.create_dataset("data", (400, *ROW), "u1", chunks=(8, *ROW), **GZIP)
    options: dict[str, Any] = {"labels_field": None, "shuffle": "window", "batch_size": 8}
    with AsyncReader(hdf5_path=tmp_path / "f.h5", **options) as reader:
        layouts = reader._engine.setup.layouts
        (wanted,) = wanted_kept_nbytes(reader.config, layouts)
        assert 400 * 3072 <= wanted < 2 * 400 * 3072
        less = reader.config.model_copy(update={"window_bytes": 100_000})
        assert wanted_kept_nbytes(less, layouts)[0] < wanted
        other = reader.config.model_copy(update={"shuffle": "full"})
        assert wanted_kept_nbytes(other, layouts) == [0]
        assert wanted_kept_nbytes(other, layouts, in_window=True) == [wanted]


def test_small_chunks_are_not_cut_further(path: Path) -> None:
    stats = read(path, data_field="one", shuffle="full")
    assert [one.text for one in stats._advice.decoded.remedies if "repack" in one.text] == []


def test_chunks_of_steps_hold_whole_windows(path: Path) -> None:
    fields = {"x": Field("eight", steps=range(5))}
    stats = read(path, fields=fields, sequences={"ends": "ends"})
    assert stats._advice.decoded.unit == "row"
    texts = [one.text for one in stats._advice.decoded.remedies]
    assert any(text.startswith("repack with 5 rows a chunk") for text in texts)


def test_facts_are_made_of_empty_datasets(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "f.h5", "w") as file:
        file.create_dataset("data", (0, 4), "f4", chunks=(16, 4), maxshape=(None, 4), **GZIP)
    with AsyncReader(hdf5_path=tmp_path / "f.h5", labels_field=None) as reader:
        assert reader.stats().decoded_per_used == 0.0
        facts = ChunkFacts(reader._engine.setup.samplings)
        assert facts.advice.decoded.unit == "sample"


# --- the sentence ------------------------------------------------------------------------------


def told(**given: Any) -> str:
    """What is said of a reader of two threads that decodes in vain, behind its speed."""
    advice = ChunkAdvice(Advice(remedies=(Remedy("this", 1.0), Remedy("that", 0.0))))
    text = sentence_of(**{"_least_decoded": 8.0, "_advice": advice, **given})
    return text.partition("threads")[2]


SAID = "; 8 samples are decoded for each that is used: this, or that"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, SAID),
        ({"_least_decoded": 1.4}, ""),
        ({"_least_decoded": 1.5}, SAID.replace("8 s", "1.5 s")),
        ({"_least_decoded": 7.96}, SAID),
        ({"_least_decoded": 123.4}, SAID.replace("8 s", "123 s")),
        ({"wait_seconds": 0.1}, ""),  # the loop does not wait
        ({"stages": {"postprocess": 9.0, "decode": 7.0}}, ""),  # something else limits
        ({"stages": {"upload": 9.0, "decode": 7.0}}, ""),
        ({"stages": {"place": 8.0, "decode": 7.0}}, SAID),  # copied out of the same chunks
        ({"stages": {"read": 9.0, "decode": 1.0}}, ""),  # other fields are read
        ({"stages": {"read": 9.0, "decode": 1.0}, "_encoded_share": 0.9}, SAID),  # or these
        ({"cache": "host, 100 % of the samples, 1 GB for all"}, ""),
        ({"cache": "none: 2 GB do not fit into 1 GB on the host; see cache_bytes"}, SAID),
        ({"_advice": ChunkAdvice()}, SAID.partition(":")[0]),
        (
            {"_advice": ChunkAdvice(Advice("x", "image"))},
            '; 8 images of "x" are decoded for each that is used',
        ),
        (  # what would help by too little
            {"_advice": ChunkAdvice(Advice(remedies=(Remedy("this", 6.0), Remedy("that", 1.0))))},
            SAID.replace("this, or ", ""),
        ),
        (
            {"_advice": ChunkAdvice(Advice(remedies=tuple(map(Remedy, ("a", "b", "c")))))},
            SAID.replace("this, or that", "a, b, or c"),
        ),
        (
            {"stages": {"read": 9.0}, "_least_read": 61.3, "_least_decoded": 0.0},
            "; 61.3 bytes are read for each that is used",
        ),
        (
            {
                "stages": {"read": 9.0},
                "direct_share": 0.0,
                "_h5py_per_used": 10.0,
                "_advice": ChunkAdvice(by_h5py=Advice(remedies=(Remedy("those"),))),
            },
            "; 10 samples are decoded for each that is used: those",
        ),
    ],
)
def test_what_the_sentence_says(given: dict[str, Any], said: str) -> None:
    assert told(**given) == said


def test_the_reader_is_blamed_where_the_loop_does_nothing() -> None:
    stages = {**dict.fromkeys(STAGES, 0.0), "decode": 1.0}
    common: dict[str, Any] = {
        "batches": 11,
        "samples": 100,
        "nbytes": 10**9,
        "elapsed_seconds": 1.0,
        "wait_seconds": 1.0,
        "wait_p50_seconds": 0.1,
        "wait_p99_seconds": 0.1,
        "stage_seconds": stages,
        "gil_wait_seconds": 0.0,
        "read_nbytes": 0,
        "decoded_chunks": 0,
        "fallback_reads": 0,
        "direct_share": 1.0,
        "ways": {},
        "_waits": 10,
    }
    busy = ReaderStats(**common, num_threads=1)
    assert busy.bottleneck == "the limit is decoding, 1 GB/s on 1 thread"
    idle = ReaderStats(**common, num_threads=4)
    assert idle.bottleneck == (
        "the threads worked 25 % of the time: batches are too small to keep them busy; make"
        " batch_size or prefetch larger"
    )
    assert ReaderStats(**{**common, "_waits": 0}, num_threads=4).bottleneck.startswith("nothing")
