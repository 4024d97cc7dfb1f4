"""Batches by length: a model of plain lists says what they are, for all ranks and epochs."""

from __future__ import annotations

import dataclasses
import itertools
import threading
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from orders import batch_of

from h5async.core.binding import load_core
from h5async.order import lengths as lengths_module
from h5async.order.lengths import Lengths, Limits, SamplingByLength, cut, cut_sorted
from h5async.order.sampling import NO_LIMIT, Sampling, Schedule, dealt
from h5async.order.selection import Selection, WeightedOrder, keyed_hash, round_keys
from h5async.order.window import DealtOrder, WindowOrder

SEED = 5
UNIT = 6  # samples of a chunk, for shuffle="window"


# --- the model ------------------------------------------------------------------------------------


def runs(samples, length, most_samples, most_values):
    """Cut samples into runs, one sample after the other."""
    found: list[list[int]] = []
    for sample in samples:
        if (
            found
            and len(found[-1]) < most_samples
            and sum(length[i] for i in found[-1]) + length[sample] <= most_values
        ):
            found[-1].append(sample)
        else:
            found.append([sample])
    return found


def padded_runs(samples, length, most_samples, most_values):
    """The same, of samples sorted by length, where padding counts."""
    found: list[list[int]] = []
    for sample in samples:
        if (
            found
            and len(found[-1]) < most_samples
            and length[found[-1][0]] * (len(found[-1]) + 1) <= most_values
        ):
            found[-1].append(sample)
        else:
            found.append([sample])
    return found


def batches_of_lane(samples, length, options, ranks_of_lane):
    size, values, bucket = options["batch_size"], options["values"], options["bucket"]
    values = NO_LIMIT if values is None else values
    if bucket is None:
        batches = runs(samples, length, size, values)
        counted = [sum(length[i] for i in batch) for batch in batches]
    else:
        times, batches = bucket * ranks_of_lane, []
        for window in runs(samples, length, size * times, values * times):
            ordered = sorted(window, key=lambda i: -length[i])
            batches += padded_runs(ordered, length, size, values)
        counted = [len(batch) * max(length[i] for i in batch) for batch in batches]
    if options["drop_last"] and batches and len(batches[-1]) < size and counted[-1] < values:
        batches.pop()
    return batches


def sequence(lanes, length, options, ranks, epoch):
    """Return the batches of all ranks in their order."""
    of_lanes = [
        batches_of_lane(lane, length, options, 1 if len(lanes) > 1 else ranks) for lane in lanes
    ]
    common = min(map(len, of_lanes))
    found = [of_lanes[lane][i] for i in range(common) for lane in range(len(lanes))]
    found += [batch for batches in of_lanes for batch in batches[common:]]
    if options["bucket"] is not None and options["shuffle"]:
        steps = [found[i : i + ranks] for i in range(0, len(found), ranks)]
        rest = steps.pop() if len(found) % ranks else []
        keys = round_keys(SEED, epoch, "bucket")
        hashes = keyed_hash(np.arange(len(steps), dtype=np.uint64), keys[0], keys[1]).tolist()
        mixed = []
        for first in range(0, len(steps), options["bucket"]):
            window = range(first, min(first + options["bucket"], len(steps)))
            mixed += sorted(window, key=lambda i: hashes[i])
        found = [batch for i in mixed for batch in steps[i]] + rest
    return found


def deal(batches, ranks, drop_last):
    """Return the batches of each step, by rank; of a last one that is divided, None."""
    full = len(batches) // ranks
    steps: list[Any] = [batches[i * ranks : (i + 1) * ranks] for i in range(full)]
    if len(batches) % ranks and not drop_last:
        steps.append(None)
    return steps


# --- what is compared -----------------------------------------------------------------------------


@contextmanager
def twin(is_one=True):
    """Cut with NumPy, in small blocks."""
    if not is_one:
        yield
        return
    with mock.patch.object(lengths_module, "load_core", return_value=None):
        yield


def orders(shuffle, count, ranks, batch_size, drawn):
    """Return the order that a sampling is given, and the lanes of an epoch."""
    if drawn:
        order: Any = WeightedOrder(np.arange(1.0, count + 1), SEED)
        return order, lambda epoch: [order.samples(epoch, 0, count).tolist()]
    if shuffle == "window":
        bounds = np.append(np.arange(0, count, UNIT), count)
        whole = WindowOrder(bounds, 2, SEED)
        if ranks == 1:
            return whole, lambda epoch: [whole.samples(epoch, 0, count).tolist()]
        pieces = [dealt(count, rank, ranks) for rank in range(ranks)]
        return DealtOrder(whole, ranks, count, batch_size), lambda epoch: [
            whole.piece(begin, end).samples(epoch, 0, end - begin).tolist() for begin, end in pieces
        ]
    plain = Sampling(count, 1, shuffle, SEED)
    return None, lambda epoch: [plain.samples(epoch, 0, count).tolist()]


def samplings(options, length, ranks, batch_size=None, begun=None, drawn=False):
    """Return the samplings of all ranks, and the model's lanes."""
    size = options["batch_size"] if batch_size is None else batch_size
    order, lanes = orders(options["shuffle"], len(length), ranks, size, drawn)
    counts = np.array(length, np.int64)
    counts = counts.astype(np.uint32) if counts.max(initial=0) < 1 << 32 else counts
    found = [
        SamplingByLength(
            num_samples=len(length),
            batch_size=size,
            shuffle=options["shuffle"],
            seed=SEED,
            drop_last=options["drop_last"],
            order=order,
            rank=rank,
            world_size=ranks,
            lengths=Lengths(counts, options["values"], options["bucket"]),
            begun=begun,
        )
        for rank in range(ranks)
    ]
    return found, lanes


def check_batch(batch, length, options):
    several = [length[i] for i in batch]
    assert 1 <= len(batch) <= options["batch_size"]
    if len(batch) > 1 and options["values"] is not None:
        counted = max(several) * len(batch) if options["bucket"] else sum(several)
        assert counted <= options["values"]


def check_divided(batches, left, ranks):
    """Check a last step in which a few batches are divided among many ranks."""
    assert all(batches)
    assert len(batches) == ranks
    found, at = set(), 0
    for batch in left:  # each rank has a part of one of them, in their order
        parts = []
        while at < ranks and set(batches[at]) <= set(batch):
            parts.append(batches[at])
            at += 1
        got = [i for part in parts for i in part]
        if len(batch) >= len(parts):
            assert got == batch
        else:
            assert set(got) == set(batch)
        found |= set(got)
    assert at == ranks
    assert found == {i for batch in left for i in batch}


long_or_short = st.one_of(st.integers(0, 9), st.integers(0, 3), st.sampled_from([40, 1000]))
some_lengths = st.lists(long_or_short, max_size=60)
some_options = st.fixed_dictionaries(
    {
        "batch_size": st.sampled_from([1, 2, 5, 8, 1 << 70]),
        "values": st.sampled_from([None, 1, 7, 20, 50, 1 << 62]),
        "bucket": st.sampled_from([None, 1, 2, 3, 1000]),
        "shuffle": st.sampled_from([False, "full", "window"]),
        "drop_last": st.booleans(),
    }
)


@given(
    length=some_lengths,
    options=some_options,
    ranks=st.integers(1, 5),
    epochs=st.lists(st.integers(0, 9), min_size=1, max_size=3),
    block=st.sampled_from([3, 1 << 18]),
    with_core=st.booleans(),
    drawn=st.booleans(),
)
def test_batches_are_those_of_the_model(length, options, ranks, epochs, block, with_core, drawn):
    options["shuffle"] = options["shuffle"] if not drawn or not length else False
    drawn &= bool(length)
    several, lanes = samplings(options, length, ranks, drawn=drawn)
    with mock.patch.object(lengths_module, "_BLOCK", block), twin(not with_core):
        for epoch in epochs:
            batches = sequence(lanes(epoch), length, options, ranks, epoch)
            steps = deal(batches, ranks, options["drop_last"])
            assert {one.batches_in(epoch) for one in several} == {len(steps)}
            assert {one.batches_from(epoch, 0) for one in several} == {len(steps)}
            for number, step in enumerate(steps):
                found = [batch_of(one, epoch, number).tolist() for one in several]
                for batch in found:
                    check_batch(batch, length, options)
                if step is not None:
                    assert found == step
                elif not drawn:
                    check_divided(found, batches[number * ranks :], ranks)
            seen = sorted(i for batch in batches for i in batch)
            if not options["drop_last"] and not drawn:
                assert seen == list(range(len(length)))
            dealt_samples = several[0].samples_in(epoch)
            full = batches[: len(steps) * ranks] if options["drop_last"] else batches
            assert dealt_samples == sum(map(len, full))


@given(
    length=some_lengths,
    options=some_options,
    ranks=st.integers(1, 4),
    epoch=st.integers(0, 3),
    data=st.data(),
)
def test_an_epoch_goes_on_at_any_step(length, options, ranks, epoch, data):
    several, _ = samplings(options, length, ranks)
    steps = several[0].batches_in(epoch)
    if not steps:
        return
    step = data.draw(st.integers(0, steps - 1))
    start = several[0].step_at(epoch, 0, step)[1]
    rest, _ = samplings(options, length, ranks, begun=(epoch, start, None))
    for one, other in zip(several, rest, strict=True):
        assert other.batches_from(epoch, start) == steps - step
        assert other.batches_in(epoch) == steps
        for number in range(step, steps):
            place = one.step_at(epoch, 0, number)
            assert other.step_at(epoch, start, number - step) == place
            np.testing.assert_array_equal(
                one.batch_at(epoch, place[1]), other.batch_at(epoch, place[1])
            )
        assert other.batches_in(epoch + 1) == one.batches_in(epoch + 1)


@given(
    length=some_lengths,
    options=some_options,
    sizes=st.lists(
        st.tuples(st.sampled_from([1, 3, 5, 9, 100]), st.integers(1, 4)), min_size=1, max_size=3
    ),
    ranks=st.integers(1, 4),
    epoch=st.integers(0, 3),
    data=st.data(),
)
def test_an_epoch_goes_on_with_other_sizes(length, options, sizes, ranks, epoch, data):
    """Whatever batch and world sizes come one after the other: no sample twice, and none left."""
    options = options | {"drop_last": False}
    origin, _ = samplings(options, length, ranks)
    several, start, seen = origin, 0, []
    for following in [*sizes, None]:
        steps = several[0].batches_from(epoch, start)
        done = steps if following is None else data.draw(st.integers(0, steps))
        for number in range(done):
            place = several[0].step_at(epoch, start, number)[1]
            found = [one.batch_at(epoch, place).tolist() for one in several]
            for one, batch in zip(several, found, strict=True):
                check_batch(batch, length, options | {"batch_size": one.batch_size})
            last = number == steps - 1
            seen += sorted({i for b in found for i in b}) if last else [i for b in found for i in b]
        if following is None or done == steps:
            break
        start = several[0].step_at(epoch, start, done)[1]
        batch_size, world_size = following
        several, _ = samplings(
            options, length, world_size, batch_size, begun=(epoch, start, origin[0])
        )
    assert sorted(seen) == list(range(len(length)))


def test_a_divided_step_never_exceeds_the_limit():
    length = [1, 1, 1, 1, 1, 100, 100, 1, 1, 1, 1, 1]
    options = {
        "batch_size": 99,
        "values": 105,
        "bucket": None,
        "shuffle": False,
        "drop_last": False,
    }
    several, _ = samplings(options, length, 3)
    found = [batch_of(one, 0, 0).tolist() for one in several]
    assert [i for batch in found for i in batch] == list(range(12))
    assert all(sum(length[i] for i in batch) <= 105 for batch in found)


@pytest.mark.parametrize("ranks", [4, 1 << 31])
def test_ranks_without_a_batch_repeat_a_sample(ranks):
    options = {"batch_size": 9, "values": 9, "bucket": None, "shuffle": False, "drop_last": False}
    first, _ = samplings(options, [5, 4, 3], 1)
    several = [
        dataclasses.replace(first[0], rank=rank, world_size=ranks) for rank in (0, 1, ranks - 1)
    ]
    assert [one.batches_in(0) for one in several] == [1, 1, 1]
    assert all(len(batch_of(one, 0, 0)) == 1 for one in several)
    assert batch_of(several[-1], 0, 0).tolist() == [2]


@given(
    length=st.lists(st.integers(0, 1 << 62), min_size=1, max_size=50),
    parts=st.lists(st.integers(1, 20), min_size=1, max_size=20),
    limits=st.builds(Limits, st.integers(1, 30), st.sampled_from([1, 5, 1 << 40, NO_LIMIT])),
)
def test_core_and_twin_sort_alike(length, parts, limits):
    """Lengths of any size: keys of many bits are sorted in another way."""
    lengths = np.array(length, np.int64)
    ends = np.unique(np.minimum(np.cumsum(parts), lengths.size))
    windows = ends if ends[-1] == lengths.size else np.append(ends, lengths.size)
    with twin():
        expected = cut_sorted(lengths, windows, limits)
    found = cut_sorted(lengths, windows, limits)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


def test_many_samples_in_a_window():
    """Radix sort of many counters, and blocks that a window exceeds."""
    rng = np.random.default_rng(SEED)
    length = rng.integers(0, 5000, 20_000)
    windows = np.array([7000, 7001, 20_000])
    found = cut_sorted(length, windows, Limits(50, 60_000))
    with twin():
        expected = cut_sorted(length, windows, Limits(50, 60_000))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)
    assert (np.diff(length[found[0]][:7000]) <= 0).all()


@pytest.mark.parametrize("with_core", [True, False])
def test_nothing_to_cut(with_core):
    nothing = np.zeros(0, np.int64)
    with twin(not with_core):
        assert cut(nothing, Limits(3), is_end=True).size == 0
        order, ends = cut_sorted(nothing, nothing, Limits(3))
    assert order.size == ends.size == 0


def test_a_run_that_may_go_on_is_left_out():
    lengths = np.array([3, 3, 3, 0])
    assert cut(lengths, Limits(9, 6), is_end=False).tolist() == [2]
    assert cut(lengths, Limits(2, 6), is_end=False).tolist() == [2, 4]
    assert cut(lengths, Limits(9, 6), is_end=True).tolist() == [2, 4]


# --- how much fits --------------------------------------------------------------------------------


@given(
    length=st.lists(st.integers(0, 9), min_size=1, max_size=30),
    values=st.integers(1, 30),
    most=st.integers(1, 40),
    selected=st.integers(1, 30),
)
def test_most_samples(length, values, most, selected):
    lengths = Lengths(np.array(length, np.uint32), values, None)
    for numbers in (np.arange(len(length)), np.arange(len(length))[::-1][:selected]):
        selection = Selection.of_numbers(numbers)
        some = sorted(np.array(length)[numbers].tolist())
        fitting = sum(1 for total in itertools.accumulate(some) if total <= values)
        found = lengths.most_samples(selection, most)
        assert found == min(most, max(1, fitting))
        found = lengths.most_samples(selection, most, times=most)
        assert found == (min(most, max(1, values // some[0])) if some[0] else most)


# --- the schedule ---------------------------------------------------------------------------------


class Counted(Sampling):
    """Epochs that have so many batches each, over and over."""

    is_uniform = False
    counts = (3, 0, 1, 5)

    def batches_in(self, epoch):
        return self.counts[epoch % 4]

    def batches_from(self, epoch, start):
        return max(0, self.counts[epoch % 4] - start)

    def step_at(self, epoch, start, passed):
        return start + passed, start + passed


@given(
    epoch=st.integers(0, 7),
    start=st.integers(0, 6),
    serial=st.integers(0, 9),
    others=st.sets(st.integers(0, 25), max_size=6),
    order=st.randoms(),
)
def test_serial_numbers(epoch, start, serial, others, order):
    sampling = Counted(10, 1)
    schedule = Schedule.beginning(sampling, serial, epoch, start)
    assert not schedule.sampling.is_uniform
    others = sorted(serial + other for other in others)
    for other in others:
        schedule = schedule.with_other(other, serial)
    if start >= sampling.batches_in(epoch) and start:
        epoch, start = epoch + 1, 0
    several = []
    for number in itertools.islice(itertools.count(epoch), 40):
        first = start if number == epoch else 0
        several += [(number, i, i) for i in range(first, sampling.batches_in(number))]
    expected = {}
    place = 0
    for number in range(serial, serial + 40):
        expected[number] = several[place]
        place += number not in others
    numbers = list(range(serial, serial + 30))
    order.shuffle(numbers)
    for number in numbers:
        assert tuple(schedule.position(number)) == expected[number]
        is_other = number in others
        following = expected[number + 1][0] if number + 1 in expected else None
        is_last = not is_other and following != expected[number][0]
        assert schedule.is_last(number) is is_last
        begin = schedule.epoch_begin(number)
        assert begin >= number
        assert begin not in others or begin == number
        assert expected[begin][1] == (start if expected[begin][0] == epoch else 0)
    gone = schedule.with_other(serial + 39, serial + 20)
    assert tuple(gone.position(serial + 20)) == expected[serial + 20]
    assert tuple(gone.position(serial + 29)) == expected[serial + 29]


# --- what is kept ---------------------------------------------------------------------------------


def test_an_epoch_is_computed_once():
    options = {"batch_size": 8, "values": 30, "bucket": 2, "shuffle": "full", "drop_last": False}
    (sampling,), _ = samplings(options, list(range(40)), 1)
    made = []
    inner = SamplingByLength._sequence

    def sequence_of(self, epoch):
        made.append(epoch)
        return inner(self, epoch)

    start = threading.Barrier(4)

    def work():
        start.wait(20)
        for number in range(sampling.batches_in(3)):
            batch_of(sampling, 3, number)
            batch_of(sampling, 4, 0)

    with mock.patch.object(SamplingByLength, "_sequence", sequence_of):
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert sorted(made) == [3, 4]
        batch_of(sampling, 5, 0)
        assert sampling.batches_in(3)  # how many there were is known still
        assert sorted(made) == [3, 4, 5]
        assert len(sampling._epochs._kept) == 2


def test_memory_is_arrays():
    count = 100_000
    options = {"batch_size": 16, "values": 500, "bucket": 4, "shuffle": "full", "drop_last": False}
    (sampling,), _ = samplings(options, [7] * count, 1)
    for epoch in range(3):
        sampling.batches_in(epoch)
    kept = sampling.lengths.of_sample.nbytes
    for epoch in sampling._epochs._kept.values():
        assert epoch.order.dtype == np.uint32
        kept += epoch.order.nbytes
        assert epoch.bounds.nbytes <= 8 * (count // 16 + count // 64 + 2)
    assert kept == 12 * count


@pytest.mark.skipif(load_core() is None, reason="this is of the core")
def test_without_memory_the_twin_sorts(monkeypatch):
    class Refusing:
        def cut_sorted(self, *_: object) -> int:
            return -1

    monkeypatch.setattr(lengths_module, "load_core", Refusing)
    order, ends = cut_sorted(np.array([1, 5, 3]), np.array([3]), Limits(2))
    assert order.tolist() == [1, 2, 0]
    assert ends.tolist() == [2, 3]


@pytest.mark.parametrize("with_core", [False, True])
def test_samples_without_values_fit_in_any_batch(with_core):
    with twin(not with_core):
        order, ends = cut_sorted(np.array([0, 3, 0, 0], np.int64), np.array([4]), Limits(3, 1))
    assert order.tolist() == [1, 0, 2, 3]
    assert ends.tolist() == [1, 4]
