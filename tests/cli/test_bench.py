"""What `h5async bench` measures, by turns, and when it dares a verdict."""

from __future__ import annotations

import json

import h5py
import numpy as np
import pytest
from typer.testing import CliRunner

from h5async import ReaderConfig
from h5async.cli import app
from h5async.cli import bench as measuring
from h5async.cli.bench import compare, judge
from h5async.config.values import MOST_THREADS


@pytest.fixture
def train(tmp_path):
    path = tmp_path / "train.h5"
    with h5py.File(path, "w") as file:
        file["data"] = np.zeros((100, 4), "f4")
        file["labels"] = np.arange(100)
    return path


@pytest.mark.parametrize(
    ("ratios", "verdict"),
    [
        ([1.3, 1.4, 1.35], "faster"),
        ([0.5, 0.55, 0.6], "slower"),
        ([0.99, 1.0, 1.03], "same"),
        ([1.01, 1.02, 1.2], "unclear"),  # the median is no difference
        ([0.97, 1.3, 1.4], "unclear"),  # a round says otherwise
        ([1.05, 1.2, 1.9], "unclear"),  # the spread is more than the difference
        ([2.0, 2.0], "unclear"),  # too few
        ([], "unclear"),
    ],
)
def test_a_verdict_needs_rounds_that_agree(ratios, verdict):
    assert judge(ratios) == verdict


def test_what_was_judged_is_judged_so_again():
    """Of noise alone there is hardly ever a verdict; of a clear difference there is always one."""
    rng = np.random.default_rng(0)

    def verdicts(ratio, noise):
        found = np.exp(rng.normal(np.log(ratio), noise, (2000, 7)))
        return [judge(list(row)) for row in found]

    for noise in (0.01, 0.05, 0.2, 0.5):
        wrong = [one for one in verdicts(1.0, noise) if one in ("faster", "slower")]
        assert len(wrong) < 40
    assert set(verdicts(1.5, 0.05)) == {"faster"}
    assert set(verdicts(0.6, 0.05)) == {"slower"}
    assert "faster" not in verdicts(0.8, 0.1)


def test_options_are_measured_by_turns(monkeypatch):
    asked = []

    def speed(config, changed, seconds):
        asked.append(changed.get("num_threads", 0))
        return 2.0e9 if changed else 1.0e9

    monkeypatch.setattr(measuring, "speed_of", speed)
    config = ReaderConfig(hdf5_path="a.h5")
    told = []
    trials = compare(
        config, [{"num_threads": 1}, {"num_threads": 2}], 1.0, 4, lambda *turns: told.append(turns)
    )
    assert asked == [0, 1, 2, 1, 2, 0, 2, 0, 1, 0, 1, 2]
    assert told == [(done, 12) for done in range(12)]
    assert [trial.verdict for trial in trials] == [None, "faster", "faster"]
    assert trials[2].ratios == [2.0] * 4


def as_json(monkeypatch, train, speeds):
    """Return what bench says of speeds: by options, round by round."""
    left = {name: iter(values) for name, values in speeds.items()}
    monkeypatch.setattr(
        measuring, "speed_of", lambda config, changed, seconds: next(left[str(dict(changed))])
    )
    monkeypatch.setattr(
        "h5async.cli.bench.alternatives", lambda config: [{"shuffle": "window"}, {"num_threads": 2}]
    )
    arguments = ["bench", str(train), "--seconds", "0", "--rounds", "3"]
    shown = CliRunner().invoke(app, arguments)
    assert shown.exit_code == 0, shown.output
    left.update({name: iter(values) for name, values in speeds.items()})
    found = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)
    assert f"verdict: {found['verdict']}\n" in shown.stdout
    return found


def test_the_fastest_is_named_as_it_is_typed(monkeypatch, train):
    found = as_json(
        monkeypatch,
        train,
        {
            "{}": [1.0e9, 1.0e9, 1.0e9],
            "{'shuffle': 'window'}": [1.2e9, 1.3e9, 1.25e9],
            "{'num_threads': 2}": [1.5e9, 1.6e9, 1.55e9],
        },
    )
    assert found["schema"] == "h5async bench 1"
    assert found["fastest"] == "--num-threads 2"
    assert "--num-threads 2 is 1.55 times as fast (1.50 to 1.60 in 3 rounds)" in found["verdict"]
    assert [trial["verdict"] for trial in found["trials"]] == [None, "faster", "faster"]
    assert [trial["typed"] for trial in found["trials"][1:]] == [
        "--shuffle window",
        "--num-threads 2",
    ]


def test_no_verdict_where_the_spread_covers_the_difference(monkeypatch, train):
    found = as_json(
        monkeypatch,
        train,
        {
            "{}": [1.0e9, 1.0e9, 1.0e9],
            "{'shuffle': 'window'}": [0.9e9, 1.3e9, 1.9e9],
            "{'num_threads': 2}": [0.5e9, 0.55e9, 0.52e9],
        },
    )
    assert found["fastest"] is None
    assert found["verdict"].startswith("nothing that was tried is clearly faster; 1 of 2 are")
    assert [trial["verdict"] for trial in found["trials"]] == [None, "unclear", "slower"]


def test_speeds_are_those_of_warm_readers(train):
    config = ReaderConfig(hdf5_path=train, batch_size=10, device="cpu", num_threads=1)
    trials = compare(config, [{"num_threads": 0}], 0.0, 3)
    assert all(speed > 0 for trial in trials for speed in trial.speeds)


def test_drawn_samples_are_compared_in_no_other_order(train):
    for options in ({"weights": "balanced"}, {"sampler": [1, 2, 3]}):
        config = ReaderConfig(hdf5_path=train, **options)
        assert not any("shuffle" in changed for changed in measuring.alternatives(config))


def test_options_that_do_not_fit_are_not_tried(tmp_path):
    path = tmp_path / "declared.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("data", (1 << 28,), "u1", chunks=(64,))  # too many to be put in order
    options = "--no-labels --device cpu --indices 0:100 --seconds 0 --num-threads 0 --json"
    done = CliRunner().invoke(app, ["bench", str(path), *options.split()])
    assert done.exit_code == 0, done.output
    tried = [trial["options"] for trial in json.loads(done.stdout)["trials"]]
    assert {"shuffle": "full"} in tried
    assert {"shuffle": "window"} not in tried


def test_no_more_threads_are_tried_than_there_may_be(train):
    config = ReaderConfig(hdf5_path=train, num_threads=MOST_THREADS)
    for changed in measuring.alternatives(config):
        ReaderConfig(hdf5_path=train, **changed)
