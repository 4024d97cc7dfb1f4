"""Orders that a sampler of the user's own draws: what it draws, when it is begun, its state."""

from __future__ import annotations

import copy
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from h5async.errors import ConfigError
from h5async.order.drawn import SamplerOrder

COUNT = 100


class Random:
    """As PyTorch's RandomSampler with a generator: no epochs, and no state."""

    def __init__(self, count=COUNT, seed=0):
        self.rng, self.count, self.begun = np.random.default_rng(seed), count, 0

    def __iter__(self):
        self.begun += 1
        return iter(self.rng.permutation(self.count).tolist())

    def __len__(self):
        return self.count


class Epochs(Random):
    """As PyTorch's DistributedSampler."""

    def set_epoch(self, epoch):
        self.rng = np.random.default_rng(epoch)


class Stateful(Random):
    def state_dict(self):
        return {"rng": self.rng.bit_generator.state}

    def load_state_dict(self, state):
        self.rng.bit_generator.state = state["rng"]


class Yielded(Epochs):
    """As torchdata's StatefulDistributedSampler, whose state at an epoch's begin is its end."""

    yielded, following = 0, None

    def __iter__(self):
        self.yielded, self.following = self.following or 0, None
        for sample in itertools.islice(super().__iter__(), self.yielded, None):
            self.yielded += 1
            yield sample

    def state_dict(self):
        return {"yielded": self.yielded}

    def load_state_dict(self, state):
        self.following = state["yielded"]


class Batches:
    def __init__(self, sampler, size):
        self.sampler, self.size = sampler, size

    def __iter__(self):
        drawn = iter(self.sampler)
        return iter(lambda: list(itertools.islice(drawn, self.size)), [])


def epochs_of(sampler, count):
    found = []
    for epoch in range(count):
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
        found.append([int(sample) for sample in sampler])
    return found


def whole(order, epoch):
    return order.samples(epoch, 0, order.size).tolist()


@pytest.mark.parametrize("kind", [Random, Epochs, Stateful, Yielded])
def test_epochs_are_what_the_sampler_draws(kind):
    expected, order = epochs_of(kind(), 4), SamplerOrder(kind(), COUNT, 8)
    assert [whole(order, epoch) for epoch in range(4)] == expected


@given(st.lists(st.lists(st.integers(0, COUNT - 1), min_size=1, max_size=8), min_size=1))
def test_batches_are_what_the_sampler_draws(batches):
    order = SamplerOrder(batches, COUNT, 8)
    assert order.draws_batches
    assert order.size == 8 * len(batches)
    found = [order.samples(0, start, start + 8).tolist() for start in range(0, order.size, 8)]
    assert found == batches


@given(st.lists(st.integers(0, COUNT - 1)), st.integers(0, 60), st.integers(0, 60))
def test_samples_of_any_positions(drawn, start, stop):
    order = SamplerOrder(drawn, COUNT, 8)
    assert order.samples(0, start, stop).tolist() == drawn[start:stop]
    assert order.size == len(drawn)


@pytest.mark.parametrize("kind", [Random, Epochs, Stateful, Yielded])
@pytest.mark.parametrize("epoch", [0, 1, 5])
def test_another_reader_goes_on(kind, epoch):
    first, second = SamplerOrder(kind(), COUNT, 8), SamplerOrder(kind(), COUNT, 8)
    expected = [whole(first, number) for number in range(epoch + 3)]
    first = SamplerOrder(kind(), COUNT, 8)
    for number in range(epoch):
        whole(first, number)
    second.restore(epoch, copy.deepcopy(first.state(epoch)))
    assert [whole(second, n) for n in range(epoch, epoch + 3)] == expected[epoch:]


@pytest.mark.parametrize("kind", [Epochs, Stateful, Yielded])
def test_the_same_reader_goes_back(kind):
    expected, order = epochs_of(kind(), 8), SamplerOrder(kind(), COUNT, 8)
    states = []
    for epoch in range(8):
        whole(order, epoch)
        states.append(order.state(epoch))
    for epoch in (2, 0, 7, 1):
        order.restore(epoch, states[epoch])
        assert whole(order, epoch) == expected[epoch]
        assert whole(order, epoch + 1 if epoch < 7 else 7) == expected[min(epoch + 1, 7)]


@pytest.mark.parametrize("kind", [Epochs, Stateful])
def test_an_epoch_that_was_long_ago_is_drawn_again(kind):
    expected, order = epochs_of(kind(), 6), SamplerOrder(kind(), COUNT, 8)
    for epoch in (0, 1, 2, 3, 4, 5, 0, 5, 1):
        assert whole(order, epoch) == expected[epoch]


def test_a_sampler_of_another_seed_is_told():
    state = SamplerOrder(Random(seed=1), COUNT, 8).state(0)
    with pytest.raises(ConfigError, match="draws other samples for epoch 0 than when the state"):
        SamplerOrder(Random(seed=2), COUNT, 8).restore(0, state)


@pytest.mark.parametrize("saved", [None, "x", {}, {"drawn": 3}])
def test_what_is_no_state_is_refused(saved):
    with pytest.raises(ConfigError):
        SamplerOrder(Random(), COUNT, 8).restore(1, saved)


def test_an_epoch_is_drawn_once():
    sampler = Random()
    order = SamplerOrder(sampler, COUNT, 8)
    for start in range(0, COUNT, 8):
        order.samples(0, start, start + 8)
    assert sampler.begun == 1


def test_arrays_of_no_dimension_are_samples():
    assert whole(SamplerOrder([np.array(3), np.array(4)], COUNT, 8), 0) == [3, 4]


def test_an_iterator_that_is_exhausted_is_told():
    order = SamplerOrder(iter(range(10)), COUNT, 8)
    assert whole(order, 0) == list(range(10))
    with pytest.raises(ConfigError, match=r"an iterator was given, and it is exhausted in epoch 1"):
        whole(order, 1)


def test_unequal_epochs_are_told():
    class Growing:
        length = 3

        def __iter__(self):
            self.length += 1
            return iter(range(self.length))

    order = SamplerOrder(Growing(), COUNT, 8)
    with pytest.raises(ConfigError, match="5 samples were drawn for epoch 1, and 4 for the first"):
        whole(order, 1)


@pytest.mark.slow
@pytest.mark.parametrize("endless", [itertools.cycle([1, 2, 3]), itertools.cycle([[1, 2], [3]])])
def test_a_sampler_without_an_end_is_told(endless):
    with pytest.raises(ConfigError, match="without an end; give epoch_samples"):
        SamplerOrder(endless, COUNT, 8)


def test_epoch_samples_end_an_epoch_of_a_stream():
    order = SamplerOrder(itertools.cycle(range(7)), COUNT, 8, epoch_samples=10)
    assert whole(order, 0) == [0, 1, 2, 3, 4, 5, 6, 0, 1, 2]
    assert whole(order, 1) == [3, 4, 5, 6, 0, 1, 2, 3, 4, 5]


def test_epoch_samples_cut_the_last_batch():
    order = SamplerOrder(itertools.cycle([[1, 2, 3], [4, 5]]), COUNT, 8, epoch_samples=7)
    batches = [order.samples(0, start, start + 8).tolist() for start in range(0, order.size, 8)]
    assert batches == [[1, 2, 3], [4, 5], [1, 2]]


def test_a_sampler_with_a_length_may_be_long():
    class Long:
        def __iter__(self):
            return itertools.islice(itertools.cycle(range(50)), len(self))

        def __len__(self):
            return (1 << 20) + 5000

    assert SamplerOrder(Long(), COUNT, 8).size == (1 << 20) + 5000


def raising():
    yield 1
    raise RuntimeError("boom")


@pytest.mark.parametrize(
    ("sampler", "message"),
    [
        ([1, COUNT], "sample 100 was drawn for epoch 0, but the dataset has samples 0 to 99"),
        ([-1], "sample -1"),
        ([1.5], "must draw integers"),
        (["a"], "must draw integers"),
        ([1, [2]], "must draw integers"),
        ([[1], 2], "TypeError was raised"),
        ([None], "must draw integers"),
        ([True, False], "must draw integers"),
        ([2**70], "must draw integers"),
        ([[1], []], "a batch of 0 samples"),
        ([list(range(9))], r"a batch of 9 samples was drawn .* batch_size=8"),
        (raising(), "RuntimeError was raised for epoch 0: boom"),
        (np.zeros((2, 2, 2), int), "must draw integers"),
    ],
)
def test_what_is_no_sample_is_told(sampler, message):
    with pytest.raises(ConfigError, match=message):
        SamplerOrder(sampler, COUNT, 8)
