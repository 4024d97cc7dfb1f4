"""Statistics of an epoch, and since earlier ones: what they count, and what is refused."""

from __future__ import annotations

import json
import pickle
import threading
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from conftest import spoil_chunk

from h5async import AsyncReader, ConfigError, ReaderStats
from h5async.observe import readercounts

COUNTS = ("batches", "samples", "nbytes", "read_nbytes", "decoded_chunks", "fallback_reads")
WAYS: list[dict[str, Any]] = [
    {"num_threads": 0},
    {"num_threads": 2},
    {"workers": "process"},
    {"workers": 2},
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """100 samples in 10 chunks, too large to be kept decoded by a reader that is told so."""
    with h5py.File(tmp_path / "f.h5", "w") as file:
        values = np.random.default_rng(0).integers(0, 9, (100, 50)).astype("f4")
        file.create_dataset("data", data=values, chunks=(10, 50), compression="gzip")
    return tmp_path / "f.h5"


def open_reader(path: Path, **options: Any) -> AsyncReader:
    given = {"batch_size": 10, "labels_field": None, "device": "cpu", **options}
    return AsyncReader(hdf5_path=path, **given)


def counts(stats: ReaderStats) -> dict[str, Any]:
    return {name: getattr(stats, name) for name in COUNTS}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("options", WAYS)
def test_epochs_add_up(path: Path, options: dict[str, Any]) -> None:
    with open_reader(path, **options) as reader:
        for epoch in range(3):
            for _ in reader:
                pass
            stats = reader.stats(epoch=-1)
            assert (stats.epoch, stats.batches, stats.samples) == (epoch, 10, 100)
            assert stats.nbytes == 100 * 50 * 4
            assert f" in epoch {epoch}" in str(stats)
        epochs = [reader.stats(epoch=epoch) for epoch in range(3)]
        whole = reader.stats()
        assert [reader.stats(epoch=-3 + number) for number in range(3)] == epochs
        assert sum(one.batches for one in epochs) == whole.batches == 30
        waited = sum(one.wait_seconds for one in epochs)
        assert waited == pytest.approx(whole.wait_seconds)
        assert sum(one.elapsed_seconds for one in epochs) <= whole.elapsed_seconds * 1.0001
        assert [one.first_batch for one in epochs] == [0, 10, 20]
        for one in epochs:
            assert 0 <= one.wait_p50_seconds <= one.wait_p99_seconds <= one.wait_seconds


def test_work_of_an_epoch_is_its_own_without_threads(path: Path) -> None:
    with open_reader(path, num_threads=0, cache="host", cache_bytes=10**6) as reader:
        for _ in range(2):
            for _ in reader:
                pass
        assert reader.stats(epoch=0).decoded_chunks == 10
        assert reader.stats(epoch=0).decoded_per_used == 1.0
        assert reader.stats(epoch=1).decoded_chunks == 0
        assert reader.stats(epoch=1).read_nbytes == 0
        assert reader.stats(epoch=1).decoded_per_used == 0.0


@pytest.mark.sampled(2)
@pytest.mark.parametrize("options", WAYS)
def test_since_is_the_difference(path: Path, options: dict[str, Any]) -> None:
    with open_reader(path, **options) as reader:
        nothing = reader.stats()
        for _ in range(7):
            reader.get_next_batch()
        middle = reader.stats()
        for _ in range(8):
            reader.get_next_batch()
        later = reader.stats(since=middle)
    # Closed, so that nothing goes on meanwhile.
    whole, later = reader.stats(), reader.stats(since=middle)
    for name, value in counts(later).items():
        assert value == getattr(whole, name) - getattr(middle, name), name
    assert later.elapsed_seconds == pytest.approx(whole.elapsed_seconds - middle.elapsed_seconds)
    assert later.wait_seconds == pytest.approx(whole.wait_seconds - middle.wait_seconds)
    for stage, seconds in later.stage_seconds.items():
        expected = whole.stage_seconds[stage] - middle.stage_seconds[stage]
        assert seconds == pytest.approx(expected, abs=1e-9)
    assert later.first_batch == 7
    assert " since batch 7: " in str(later)
    assert counts(reader.stats(since=nothing)) == counts(whole)
    assert str(reader.stats(since=nothing)) == str(whole)
    assert reader.stats(since=whole).batches == 0
    assert "nothing to tell since batch 15" in str(reader.stats(since=whole))


def test_percentiles_are_those_of_the_span(path: Path) -> None:
    with open_reader(path, num_threads=0) as reader:
        waits = reader._engine.counts.waits
        noted = waits.note

        def note_first_as_long(begin: float, end: float) -> None:
            noted(begin, begin + (100.0 if waits.number < 9 else 1.0))

        waits.note = note_first_as_long  # type: ignore[method-assign]
        reader._engine.delivery.take_turn = lambda *_: False  # the core notes its waits itself
        for _ in range(2):
            for _ in reader:
                pass
        assert reader.stats(epoch=0).wait_p50_seconds == pytest.approx(100.0)
        assert reader.stats(epoch=1).wait_p99_seconds == pytest.approx(1.0)
        before = reader.stats(epoch=0)
        assert reader.stats(since=before).wait_p99_seconds == pytest.approx(1.0)


def test_what_comes_between_epochs_is_of_none(path: Path) -> None:
    with open_reader(path, num_threads=0) as reader:
        for _ in range(2):
            for _ in reader:
                pass
            reader.fetch_data([1, 2, 3])  # a validation, say
            assert reader.get_next_batch().epoch == -1
        assert [reader.stats(epoch=epoch).samples for epoch in (0, 1)] == [100, 100]
        assert reader.stats().samples == 206


def test_a_pause_between_epochs_does_not_count(path: Path, monkeypatch: Any) -> None:
    now = [0.0]

    def clock() -> float:
        now[0] += 1.0
        return now[0]

    with open_reader(path, num_threads=0) as reader:
        monkeypatch.setattr("h5async.reader.delivery.time.perf_counter", clock)
        for _ in range(2):
            for _ in reader:
                pass
            now[0] += 1000.0
        assert reader.stats(epoch=1).elapsed_seconds < 100
        assert reader.stats().elapsed_seconds > 1000


def test_an_epoch_that_is_left_ends_there(path: Path) -> None:
    with open_reader(path, num_threads=2) as reader:
        for batch in reader:
            if batch.number == 3:
                break
        assert reader.stats(epoch=-1).batches == 4
        for _ in reader:
            pass
        assert [reader.stats(epoch=epoch).batches for epoch in (0, 1)] == [4, 10]


@pytest.mark.parametrize("epoch", [0, 4])
def test_an_epoch_that_begins_anew_is_another_one(path: Path, epoch: int) -> None:
    with open_reader(path, num_threads=2) as reader:
        for _ in range(3):
            reader.get_next_batch()
        reader.set_epoch(epoch)
        for _ in range(5):
            reader.get_next_batch()
        assert reader.stats(epoch=-1).batches == reader.stats(epoch=epoch).batches == 5
        assert (reader.stats(epoch=-2).epoch, reader.stats(epoch=-2).batches) == (0, 3)
        state = reader.state_dict()
        reader.load_state_dict(state)
        for _ in reader:
            pass
        assert reader.stats(epoch=-1).batches == 5, "the rest of the epoch"


def test_memory_for_epochs_is_bounded(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = readercounts._KEPT_EPOCHS
    with open_reader(path, batch_size=100, num_threads=0) as reader:
        for _ in range(kept + 10):
            reader.get_next_batch()
        assert reader.stats(epoch=-1).epoch == kept + 9
        assert reader.stats(epoch=10).batches == 1
        with pytest.raises(ConfigError, match=f"no statistics of epoch 9: .* last {kept} are kept"):
            reader.stats(epoch=9)
        with pytest.raises(ConfigError, match=f"there are {kept}"):
            reader.stats(epoch=-kept - 1)


def test_epochs_that_are_refused(path: Path) -> None:
    with open_reader(path) as reader:
        for epoch in (0, -1, 3):
            with pytest.raises(ConfigError, match=f"epoch {epoch}: no batch of any was delivered"):
                reader.stats(epoch=epoch)
        reader.get_next_batch()
        with pytest.raises(ConfigError, match=r"no statistics of epoch 1: .* 0 to 0"):
            reader.stats(epoch=1)
        for wrong in ("last", 1.5, [0], True):
            with pytest.raises(ConfigError, match="epoch takes a number, -1 for the last one"):
                reader.stats(epoch=wrong)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="since or epoch, not both"):
            reader.stats(reader.stats(), epoch=0)


def test_moments_that_are_refused(path: Path) -> None:
    with open_reader(path) as reader, open_reader(path) as other:
        for wrong in (0, "epoch", {}, reader):
            with pytest.raises(ConfigError, match=f"stats.., found {type(wrong).__name__}"):
                reader.stats(wrong)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="of another reader"):
            reader.stats(other.stats())
        with pytest.raises(ConfigError, match="of another reader"):
            reader.stats(pickle.loads(pickle.dumps(reader.stats())))
        before = reader.stats()
        reader.get_next_batch()
        newer = reader.stats()
        older_reader_state = reader._engine.counts
        older_reader_state._batches = 0  # as if `newer` came from its future
        with pytest.raises(
            ConfigError, match=r"taken at batch 1, and this is batch 0: it is newer"
        ):
            reader.stats(newer)
        assert reader.stats(before).batches == 0


def test_a_span_can_be_the_beginning_of_another(path: Path) -> None:
    with open_reader(path, num_threads=0) as reader:
        for _ in range(3):
            for _ in reader:
                pass
        assert reader.stats(since=reader.stats(epoch=0)).batches == 20
        middle = reader.stats(epoch=1)
        assert reader.stats(since=middle).batches == 10


def test_short_epochs_are_counted_when_somebody_asks(tmp_path: Path) -> None:
    """The core keeps what it has done by the end of each; Python is called if it counts, too."""
    kept, path = readercounts._KEPT_EPOCHS, tmp_path / "f.h5"
    with h5py.File(path, "w") as file:
        file["data"] = np.zeros((10, 2), "f8")
    with open_reader(path, num_threads=0) as reader:
        called, end_epoch = [], reader._engine.counts.end_epoch_of_turns

        def noted(done: Any) -> None:
            called.append(done)
            end_epoch(done)

        reader._engine.counts.end_epoch_of_turns = noted  # type: ignore[method-assign]
        for epoch in range(2 * kept + 10):
            for _ in reader:
                if epoch == 2 * kept:
                    reader.read(range(10))  # after its end; in the core, by another worker
                if epoch == 2 * kept + 5:
                    reader.read([*range(10)] * 3)  # not there: more than a batch
        assert 0 < len(called) < 10
        for number in range(kept):
            stats, epoch = reader.stats(epoch=-1 - number), 2 * kept + 9 - number
            times = {2 * kept + 1: 2, 2 * kept + 6: 4}.get(epoch, 1)
            assert (stats.epoch, stats.batches, stats.first_batch) == (epoch, 1, epoch)
            assert (stats.samples, stats.read_nbytes) == (10, times * 160)
            assert 0 < stats.wait_p50_seconds == stats.wait_p99_seconds
            assert stats.wait_seconds == pytest.approx(stats.wait_p50_seconds)
        with pytest.raises(ConfigError):
            reader.stats(epoch=kept + 9)


def test_an_epoch_whose_only_batch_is_put_back_is_counted_once(tmp_path: Path) -> None:
    """Exceptions of signal handlers, as it is taken, put it back."""
    with h5py.File(tmp_path / "f.h5", "w") as file:
        file["data"] = np.zeros((10, 2), "f8")
    with open_reader(tmp_path / "f.h5", num_threads=0) as reader:
        for epoch in range(6):
            reader.get_next_batch()
            if epoch == 3:
                assert reader._engine.delivery.put_back_turn()
                reader.get_next_batch()
        spans = [reader.stats(epoch=-1 - number) for number in range(6)]
        assert [one.epoch for one in spans] == [5, 4, 3, 2, 1, 0]
        assert [(one.batches, one.first_batch) for one in spans[2:4]] == [(1, 3), (1, 2)]
        assert all(one.read_nbytes >= 160 for one in spans)


@pytest.mark.slow
@pytest.mark.parametrize("options", WAYS)
def test_other_threads_may_ask(path: Path, options: dict[str, Any]) -> None:
    with open_reader(path, **options) as reader:
        has_ended, seen = threading.Event(), []

        def ask() -> None:
            before = reader.stats()
            while not has_ended.is_set():
                found = reader.stats()
                seen.append((before.batches <= found.batches, found.samples == found.batches * 10))
                assert reader.stats(since=before).batches >= 0
                if found.batches:
                    assert reader.stats(epoch=-1).batches <= 10
                before = found

        errors: list[BaseException] = []

        def run() -> None:
            try:
                ask()
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=run) for _ in range(2)]
        for thread in threads:
            thread.start()
        for _ in range(30):
            for _ in reader:
                pass
        has_ended.set()
        for thread in threads:
            thread.join(60)
    assert not errors
    assert all(both == (True, True) for both in seen)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("options", WAYS)
def test_after_the_end(path: Path, options: dict[str, Any]) -> None:
    reader = open_reader(path, **options)
    for _ in range(2):
        for _ in reader:
            pass
    before = reader.stats(epoch=0)
    reader.close()
    assert reader.stats(epoch=0) == before
    assert reader.stats(epoch=-1).batches == 10
    assert reader.stats(since=before).batches == 10


def test_as_dict_is_json(path: Path) -> None:
    with open_reader(path, num_threads=2) as reader:
        for stats in (reader.stats(), *(reader.stats() for _ in reader)):
            found = stats.as_dict()
            assert json.loads(json.dumps(found, allow_nan=False)) == found
            assert not [name for name in found if name.startswith("_")]
            assert found["sentence"] == str(stats)
            assert found["samples"] == stats.samples
        found = reader.stats(epoch=0).as_dict()
        assert (found["epoch"], found["batches"]) == (0, 10)


def test_steps_count_as_often_as_they_are_delivered(tmp_path: Path) -> None:
    from h5async import Field

    with h5py.File(tmp_path / "f.h5", "w") as file:
        file["data"] = np.zeros((100, 3), "f8")
    fields = {"x": Field("data", steps=range(4))}
    options = {"hdf5_path": tmp_path / "f.h5", "fields": fields, "num_threads": 0}
    with AsyncReader(**options) as reader:
        for _ in reader:
            pass
        assert reader.num_samples == 97
        assert reader.nbytes == reader.stats().nbytes == 97 * 4 * 24


def test_what_failed_is_no_batch(path: Path) -> None:
    spoil_chunk(path, 2)
    with open_reader(path, num_threads=0) as reader:
        for number in range(10):
            if number == 2:
                with pytest.raises(OSError, match="chunk"):
                    reader.get_next_batch()
            else:
                reader.get_next_batch()
        assert reader.stats().batches == reader.stats(epoch=0).batches == 9
