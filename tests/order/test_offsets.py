"""Samples at every n-th row of a sequence: the phase, given or drawn for each epoch."""

from __future__ import annotations

import itertools
import json

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from h5async import AsyncReader, ConfigError, Field, RaggedField, Sequences, Split
from h5async.order.rows import SequenceTable, StepRows
from h5async.order.sampling import DrawnOffsets

COUNT, ENDS = 700, (3, 3, 250, 260, 690)  # rows behind the last end are in no sequence
STEPS, EVERY = range(-2, 15), 16


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("offsets") / "tokens.h5"
    with h5py.File(path, "w") as file:
        file["tokens"] = np.arange(COUNT, dtype="u2")
        file["ends"] = ENDS
        file.create_dataset("zipped", data=np.arange(COUNT), chunks=(50,), compression="gzip")
    return path


def opened(path, offset, **options):
    pad = options.pop("pad", "drop")
    fields = {name: Field(name, steps=STEPS, pad=pad) for name in ("tokens", "zipped")}
    sequences = {"ends": "ends", "every": EVERY, "offset": offset}
    options = {"batch_size": 7, "device": "cpu", "sequences": sequences} | options
    return AsyncReader(hdf5_path=path, fields=fields, **options)


def epoch_of(reader):
    """Return the samples of an epoch, after its values were compared."""
    found = []
    for batch in reader:
        for sample, number, row in zip(batch.index, batch.sequence, batch.tokens, strict=True):
            begin, end = (0, *ENDS)[number], ENDS[number]
            rows = np.clip(sample + np.array(STEPS), begin, end - 1)
            assert np.array_equal(row, rows)
        assert np.array_equal(batch.zipped, batch.tokens)
        found += batch.index.tolist()
    return found


def possible(pad):
    """Return the possible rows of each sequence."""
    before, behind = (-STEPS[0], STEPS[-1]) if pad == "drop" else (0, 0)
    bounds = zip((0, *ENDS), ENDS, strict=False)
    return [range(begin + before, max(begin + before, end - behind)) for begin, end in bounds]


@pytest.mark.parametrize("pad", ["drop", "edge"])
@pytest.mark.parametrize("offset", [0, 1, 2, 15])
def test_a_given_offset(path, pad, offset):
    begins = np.repeat((0, *ENDS[:-1]), [len(rows) for rows in possible(pad)])
    rows = np.concatenate([np.array(rows, np.int64) for rows in possible(pad)])
    expected = rows[(rows - begins) % EVERY == offset]
    with opened(path, offset, pad=pad) as reader:
        assert epoch_of(reader) == expected.tolist()


@pytest.mark.parametrize("pad", ["drop", "edge"])
@pytest.mark.parametrize("shuffle", [False, "full", "window"])
def test_drawn_offsets_move_samples_in_their_sequences(path, pad, shuffle):
    count = sum(-(-len(rows) // EVERY) for rows in possible(pad))
    seen = set()
    with opened(path, "random", pad=pad, shuffle=shuffle) as reader:
        assert reader.num_samples == count
        for _ in range(60):
            found = epoch_of(reader)
            assert len(set(found)) == len(found) == count
            seen |= set(found)
            for rows in possible(pad):
                own = sorted(sample for sample in found if sample in rows)
                distances = np.diff(own)
                assert (np.sort(distances)[1:] >= EVERY).sum() >= len(distances) - 2
    assert seen == {row for rows in possible(pad) for row in rows}, "some rows never come"


def test_a_slot_has_room_for_the_longest_samples_to_which_others_move(tmp_path):
    lengths = np.tile([0, 1, 2, 3, 40], 8)  # the first sample of five has no value
    ends = np.cumsum(lengths)
    with h5py.File(tmp_path / "ragged.h5", "w") as file:
        file["values"], file["ends"] = np.arange(ends[-1]), ends
    fields = {"x": RaggedField("values", offsets="ends", offsets_kind="ends")}
    options = {"fields": fields, "sequences": Sequences(every=5, offset="random"), "batch_size": 4}
    seen = set()
    with AsyncReader(hdf5_path=tmp_path / "ragged.h5", device="cpu", **options) as reader:
        for batch in itertools.chain.from_iterable(itertools.repeat(reader, 40)):
            assert batch.x.lengths.tolist() == lengths[batch.index].tolist()
            last = ends[batch.index[lengths[batch.index] > 0]] - 1
            assert np.isin(last, batch.x.values).all()
            seen |= set((batch.index % 5).tolist())
    assert seen == set(range(5))


@given(
    lengths=st.lists(st.integers(0, 60), min_size=1, max_size=8),
    steps=st.builds(range, st.integers(-3, 0), st.integers(1, 9)),
    every=st.integers(2, 20),
    epoch=st.integers(0, 99),
)
def test_samples_stay_distinct_and_possible(lengths, steps, every, epoch):
    bounds = np.append(0, np.cumsum(lengths))
    table = SequenceTable.joined([bounds])
    rows = [StepRows(tuple(steps), "drop", table.starts, table.ends)]
    first, behind = table.possible(rows)
    offsets = DrawnOffsets(table.starts, first, behind - first, every, 3)
    chosen = table.samples(rows, every, first % every)
    samples = chosen.samples(np.arange(chosen.size))
    moved = offsets.moved(samples, epoch)
    assert np.unique(moved).size == samples.size
    assert table.numbers(moved).tolist() == table.numbers(samples).tolist()
    assert table.samples(rows).are_in(moved).all()
    assert moved.tolist() == [
        int(offsets.moved(samples[i : i + 1], epoch)[0]) for i in range(samples.size)
    ]


@pytest.mark.parametrize("epoch_samples", [None, 25])
def test_epochs_are_the_same_again(path, epoch_samples):
    options = {"shuffle": "full", "epoch_samples": epoch_samples}
    with opened(path, "random", **options) as reader:
        expected = [epoch_of(reader) for _ in range(4)]
        state = json.loads(json.dumps(reader.state_dict()))
        expected.append(epoch_of(reader))
    with opened(path, "random", num_threads=1, **options) as reader:
        reader.load_state_dict(state)
        assert epoch_of(reader) == expected[-1]
    assert len({tuple(sorted(epoch)) for epoch in expected}) > 3
    parts = []
    for rank in range(2):
        with opened(path, "random", rank=rank, world_size=2, **options) as reader:
            parts += epoch_of(reader)
    assert set(parts) == set(expected[0])
    with opened(path, 0, **options) as reader, pytest.raises(ConfigError, match="offset"):
        reader.load_state_dict(state)


def test_a_pass_has_one_phase(path):
    """Epochs of some samples end within a pass: the rest of it is moved alike."""
    with opened(path, "random", epoch_samples=25) as reader:
        flat = [sample for _ in range(8) for sample in epoch_of(reader)]
        count = reader.num_samples
    for begin in range(0, len(flat) - count, count):
        assert len(set(flat[begin : begin + count])) == count


def test_all_possible_rows_may_be_given(path):
    with opened(path, "random") as reader:
        assert reader.read([263]).index.tolist() == [263]
    with opened(path, 3) as reader, pytest.raises(ConfigError, match="left out by every"):
        reader.read([264])


def test_draws_and_splits(path):
    split = Split("a", {"a": 0.5, "b": 0.5}, by="sequence")
    with opened(
        path, "random", indices=split, weights=np.arange(1.0, 701), epoch_samples=90
    ) as one:
        found = {tuple(epoch_of(one)) for _ in range(3)}
        assert len(found) == 3
        assert len({n for epoch in found for n in np.searchsorted(ENDS, epoch, side="right")}) < 3


@pytest.mark.parametrize(
    ("sequences", "options", "message"),
    [
        ({"offset": "random"}, {}, 'offset="random" needs every'),
        ({"offset": 16, "every": 16}, {}, "offset must be below every=16, found 16"),
        ({"offset": -1, "every": 16}, {}, "offset"),
        ({"offset": "random", "every": 4}, {"cache": "host"}, "cache is not supported"),
        ({"offset": "random", "every": 4}, {"bucket": 2}, "bucket is not supported"),
        ({"offset": "random", "every": 4}, {"sampler": [1]}, "sampler is not supported"),
        ({"offset": "random", "every": 4}, {"indices": "5:"}, "beyond those that indices selects"),
        (
            {"offset": "random", "every": 4},
            {"indices": Split("a", {"a": 1})},
            "beyond those that indices selects",
        ),
    ],
)
def test_options_that_do_not_fit(path, sequences, options, message):
    with pytest.raises(ConfigError, match=message):
        AsyncReader(hdf5_path=path, data_field="tokens", sequences=sequences, **options)
    if not options:
        with pytest.raises(ConfigError, match=message):
            Sequences(**sequences)
