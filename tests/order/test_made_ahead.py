"""Orders that take long to make are made by a thread before the loop gets to the next epoch."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import h5py
import numpy as np
import pytest

from h5async import AsyncReader, RaggedField
from h5async.opening import dataset
from h5async.order.lengths import SamplingByLength
from h5async.order.sampling import KeptEpochs
from h5async.order.window import DrawnOrder, WindowOrder

SECONDS = 60
COUNT = 600
WEIGHTS = np.random.default_rng(0).random(COUNT)
ORDERS: dict[str, tuple[type, str, dict[str, Any]]] = {
    "window": (WindowOrder, "_new_table", {"shuffle": "window"}),
    "draws": (DrawnOrder, "_new_epoch", {"shuffle": "window", "weights": WEIGHTS}),
    "lengths": (SamplingByLength, "_new_epoch", {"shuffle": "full", "batch_values": 50}),
    "sorted": (SamplingByLength, "_new_epoch", {"shuffle": "window", "bucket": 3}),
}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    file_path = tmp_path_factory.mktemp("ahead") / "train.h5"
    lengths = np.random.default_rng(1).integers(0, 9, COUNT)
    with h5py.File(file_path, "w") as file:
        data = np.arange(COUNT * 3, dtype="i4").reshape(COUNT, 3)
        file.create_dataset("data", data=data, chunks=(12, 3), compression="gzip")
        file["offsets"] = np.append(0, np.cumsum(lengths))
        file["values"] = np.arange(lengths.sum(), dtype="i4")
    return file_path


def reader_of(path, options: dict[str, Any], **more: Any) -> AsyncReader:
    fields: dict[str, Any] = {"data": "data"}
    if {"batch_values", "bucket"} & set(options):
        fields["values"] = RaggedField("values", offsets="offsets")
    options = {"batch_size": 16, "device": "cpu", "num_threads": 2, **options, **more}
    return AsyncReader(hdf5_path=path, fields=fields, **options)


class Made:
    """Notes which epochs' orders were made, by which threads; `before` may wait or raise."""

    def __init__(self, monkeypatch, kind: type, name: str) -> None:
        monkeypatch.setattr(dataset, "_LEAST_AHEAD", 1)
        self.by: list[tuple[int, str]] = []
        self.before: Callable[[int], None] = lambda epoch: None
        self.ahead = threading.Event()  # set once a thread of the pool has made one
        new = getattr(kind, name)

        def noted(order: Any, epoch: int) -> Any:
            thread = threading.current_thread().name
            self.by.append((epoch, thread))
            self.before(epoch)
            found = new(order, epoch)
            if self.is_ahead():
                self.ahead.set()
            return found

        monkeypatch.setattr(kind, name, noted)

    @staticmethod
    def is_ahead() -> bool:
        return threading.current_thread().name.startswith("h5async")

    def threads(self, epoch: int) -> list[str]:
        return [thread for number, thread in self.by if number == epoch]


def taken(reader: AsyncReader) -> list[np.ndarray]:
    return [batch.index.copy() for batch in reader]


def same(some: list[np.ndarray], others: list[np.ndarray]) -> bool:
    return [a.tolist() for a in some] == [b.tolist() for b in others]


@pytest.fixture(params=ORDERS)
def order(request, monkeypatch, path):
    """An order: its options, what was made of it, and the batches of its first epochs."""
    kind, name, options = ORDERS[request.param]
    with reader_of(path, options, num_threads=0) as reader:
        epochs = [taken(reader) for _ in range(4)]
    return SimpleNamespace(
        options=options, made=Made(monkeypatch, kind, name), epochs=epochs, path=path
    )


@pytest.mark.parametrize("num_threads", [2, 3])
def test_a_thread_makes_the_next_order_once(order, num_threads):
    with reader_of(order.path, order.options, num_threads=num_threads) as reader:
        for epoch, expected in enumerate(order.epochs):
            order.made.ahead.clear()
            found = []
            for batch in reader:
                found.append(batch.index.copy())
                if len(found) == len(expected) // 2:
                    assert order.made.ahead.wait(SECONDS)
                    assert order.made.threads(epoch + 1)[0].startswith("h5async")
            assert same(found, expected)
    epochs = [epoch for epoch, _ in order.made.by]
    assert sorted(epochs) == list(range(len(order.epochs) + 1))


def test_without_threads_the_caller_makes_it(order):
    with reader_of(order.path, order.options, num_threads=0) as reader:
        for expected in order.epochs:
            assert same(taken(reader), expected)
    assert {thread for _, thread in order.made.by} == {threading.current_thread().name}


def test_a_single_thread_goes_on_with_batches(order, monkeypatch):
    monkeypatch.setattr(dataset, "_make_ahead", None)  # whoever calls it fails
    with reader_of(order.path, order.options, num_threads=1) as reader:
        for expected in order.epochs:
            assert same(taken(reader), expected)


def test_after_an_error_the_loop_makes_it(order):
    def fail_ahead(epoch: int) -> None:
        if order.made.is_ahead():
            order.made.ahead.set()
            raise MemoryError

    order.made.before = fail_ahead
    with reader_of(order.path, order.options) as reader:
        batches = iter(reader)
        found = [next(batches).index.copy() for _ in range(len(order.epochs[0]) // 2)]
        assert order.made.ahead.wait(SECONDS)
        found += [batch.index.copy() for batch in batches]
        assert same(found, order.epochs[0])
        for expected in order.epochs[1:]:
            assert same(taken(reader), expected)
    assert order.made.threads(1)[-1] == threading.current_thread().name


def test_closing_does_not_wait_for_it(order):
    has_begun, goes_on = threading.Event(), threading.Event()

    def block_ahead(epoch: int) -> None:
        if order.made.is_ahead():
            has_begun.set()
            assert goes_on.wait(SECONDS)

    order.made.before = block_ahead
    reader = reader_of(order.path, order.options)
    batches = iter(reader)
    for _ in range(len(order.epochs[0]) // 2):
        next(batches)
    assert has_begun.wait(SECONDS)
    aside = [one for one in threading.enumerate() if one.name.startswith("h5async-fill")]
    closing = threading.Thread(target=reader.close, daemon=True)
    closing.start()
    closing.join(SECONDS)
    assert not closing.is_alive()
    goes_on.set()
    for thread in aside:
        thread.join(SECONDS)
        assert not thread.is_alive()


def test_jumps_and_states(order):
    with (
        reader_of(order.path, order.options) as reader,
        reader_of(order.path, order.options) as other,
    ):
        for epoch in (0, 3, 1, 1, 0):
            reader.set_epoch(epoch)
            assert same(taken(reader), order.epochs[epoch])
        reader.set_epoch(2)
        batches = iter(reader)
        for _ in range(len(order.epochs[2]) // 2):
            next(batches)
        other.load_state_dict(reader.state_dict())
        assert same(taken(other), order.epochs[2][len(order.epochs[2]) // 2 :])
        assert same(taken(other), order.epochs[3])


def test_a_sampler_is_called_as_before(monkeypatch, path):
    threads = []

    class Sampler:
        def __iter__(self):
            threads.append(threading.current_thread())
            return iter(range(0, COUNT, 2))

    monkeypatch.setattr(dataset, "_LEAST_AHEAD", 1)
    monkeypatch.setattr(dataset, "_make_ahead", None)  # whoever calls it fails
    with reader_of(path, {"sampler": Sampler()}) as reader:
        for _ in range(3):
            next(iter(reader))


# --- what is kept ---------------------------------------------------------------------------------


def test_an_epoch_that_is_being_computed_is_waited_for_and_others_are_not():
    kept: KeptEpochs[str] = KeptEpochs()
    has_begun, goes_on, made, found = threading.Event(), threading.Event(), [], []

    def new(epoch: int) -> str:
        made.append(epoch)
        if epoch == 1:
            has_begun.set()
            assert goes_on.wait(SECONDS)
        return f"epoch {epoch}"

    assert kept.get(0, new) == "epoch 0"
    threads = [
        threading.Thread(target=lambda: found.append(kept.get(1, new)), daemon=True)
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    assert has_begun.wait(SECONDS)
    assert kept.get(0, new) == "epoch 0"
    goes_on.set()
    for thread in threads:
        thread.join(SECONDS)
    assert found == ["epoch 1"] * 4
    kept.get(2, new)
    kept.get(1, new)
    assert made == [0, 1, 2]


def test_an_interruption_leaves_it_free():
    kept: KeptEpochs[int] = KeptEpochs()

    def interrupt(epoch: int) -> int:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        kept.get(3, interrupt)
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(kept.get(3, lambda epoch: epoch)))
    thread.start()
    thread.join(SECONDS)
    assert found == [3]
