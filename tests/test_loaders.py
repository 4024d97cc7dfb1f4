"""What other loaders give of the files that they are made for, ours gives: batch for batch."""

from __future__ import annotations

import h5py
import numpy as np
import pytest
from conftest import require_extra

from h5async import AsyncReader, Field, Sequences

LENGTHS = (23, 9, 1, 40, 15, 12, 8, 11, 10, 30, 17)


def reader_of(path, fields, **options):
    return AsyncReader(hdf5_path=path, fields=fields, device="cpu", num_threads=1, **options)


@pytest.fixture(scope="module")
def robomimic_file(tmp_path_factory):
    """A file as robomimic documents it; its images are in chunks that h5py chose."""
    path, rng = tmp_path_factory.mktemp("robomimic") / "demos.hdf5", np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        data = file.create_group("data")
        data.attrs["total"], data.attrs["env_args"] = sum(LENGTHS), "{}"
        for number, length in enumerate(LENGTHS):
            demo = data.create_group(f"demo_{number}")
            demo.attrs["num_samples"] = length
            demo["actions"] = rng.random((length, 7))
            demo["rewards"] = rng.random(length)
            demo["dones"] = np.arange(length) == length - 1
            for kind in ("obs", "next_obs"):
                images = rng.integers(0, 255, (length, 12, 12, 3), dtype=np.uint8)
                demo.create_dataset(f"{kind}/camera", data=images, compression="gzip")
                demo[f"{kind}/position"] = rng.random((length, 3))
        file["mask/long"] = np.array([f"demo_{n}" for n in (4, 10, 3, 0, 9, 5)], "S8")
        file["mask/train"] = np.array([f"demo_{n}" for n in (10, 3, 0, 2, 5)], "S8")
    return path


@pytest.mark.slow
@pytest.mark.parametrize("frame_stack", [1, 3])
@pytest.mark.parametrize(("mask", "pads"), [(None, True), ("train", True), ("long", False)])
def test_robomimic(robomimic_file, frame_stack, mask, pads):
    require_extra("robomimic")
    from robomimic.utils.dataset import SequenceDataset

    length = 10
    theirs = SequenceDataset(
        robomimic_file,
        obs_keys=("camera", "position"),
        dataset_keys=("actions", "rewards", "dones"),
        frame_stack=frame_stack,
        seq_length=length,
        pad_frame_stack=pads,
        pad_seq_length=pads,
        get_pad_mask=True,
        hdf5_cache_mode=None,
        filter_by_attribute=mask,
        load_next_obs=True,
    )
    steps = {"steps": range(1 - frame_stack, length), "pad": "edge" if pads else "drop"}
    fields = {
        f"{kind}/{name}": Field(f"{kind}/{name}", **steps)
        for kind in ("obs", "next_obs")
        for name in ("camera", "position")
    }
    fields |= {name: Field(name, **steps) for name in ("rewards", "dones")}
    fields["actions"] = Field("actions", **steps, pad_mask="pad_mask")
    only = None if mask is None else f"mask/{mask}"
    with reader_of(
        robomimic_file, fields, sequences=Sequences(groups="data/demo_*", only=only)
    ) as reader:
        assert reader.num_samples == len(theirs)
        for batch in reader:
            for i in range(batch.size):
                item = theirs[batch.number * 32 + i]
                for kind in ("obs", "next_obs"):
                    for name in ("camera", "position"):
                        assert (batch[f"{kind}/{name}"][i] == item[kind][name]).all()
                for name in ("actions", "rewards", "dones"):
                    assert (batch[name][i] == item[name]).all()
                assert (batch.pad_mask[i] == item["pad_mask"].reshape(-1)).all()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning:minari")
def test_minari(tmp_path, monkeypatch):
    """Observations have a row more than actions."""
    require_extra("minari")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    import gymnasium
    import minari
    from minari.data_collector import EpisodeBuffer

    rng = np.random.default_rng(1)
    episodes = [
        EpisodeBuffer(
            id=number,
            observations=list(rng.random((length + 1, 4), np.float32)),
            actions=list(rng.random((length, 2), np.float32)),
            rewards=rng.random(length).tolist(),
            terminations=[False] * (length - 1) + [True],
            truncations=[False] * length,
            infos={},
        )
        for number, length in enumerate(LENGTHS)
    ]
    box = gymnasium.spaces.Box
    theirs = minari.create_dataset_from_buffers(
        "test/test-v0",
        buffer=episodes,
        observation_space=box(-1, 1, (4,)),
        action_space=box(-1, 1, (2,)),
        author="x",
        author_email="x",
        code_permalink="x",
        algorithm_name="x",
        description="x",
    )
    fields = {
        "observations": Field("observations", steps=range(2)),
        "actions": "actions",
        "rewards": "rewards",
        "terminations": "terminations",
        "past": Field("actions", steps=range(-3, 0), pad="zero", pad_mask="mask"),
    }
    path = tmp_path / "test" / "test-v0" / "data" / "main_data.hdf5"
    with reader_of(path, fields, sequences={"groups": "episode_*"}, shuffle="full") as reader:
        assert reader.num_samples == theirs.total_steps
        seen = 0
        for batch in reader:
            for i, (number, step) in enumerate(zip(batch.sequence, batch.step, strict=True)):
                episode = theirs[int(number)]
                assert (batch.observations[i] == episode.observations[step : step + 2]).all()
                for name in ("actions", "rewards", "terminations"):
                    assert (batch[name][i] == getattr(episode, name)[step]).all()
                past = np.concatenate((np.zeros((3, 2), "f4"), episode.actions))[step : step + 3]
                assert (batch.past[i] == past).all()
                assert batch.mask[i].tolist() == [step >= 3, step >= 2, step >= 1]
                seen += 1
        assert seen == sum(LENGTHS)


@pytest.mark.slow
@pytest.mark.parametrize(("inputs", "outputs", "stride"), [(1, 1, 1), (4, 2, 1), (2, 2, 2)])
def test_the_well(tmp_path, inputs, outputs, stride):
    require_extra("the_well")
    from the_well.data import WellDataset
    from the_well.utils.dummy_data import write_dummy_data

    for number in range(2):
        write_dummy_data(str(tmp_path / f"{number}.hdf5"))
    theirs = WellDataset(
        path=str(tmp_path),
        n_steps_input=inputs,
        n_steps_output=outputs,
        min_dt_stride=stride,
        max_dt_stride=stride,
    )
    steps = range(0, (inputs + outputs) * stride, stride)
    fields = {
        "input": Field("t1_fields/field", (0, 1), steps=steps[:inputs]),
        "output": Field("t1_fields/field", (0, 1), steps=steps[inputs:]),
    }
    with reader_of(str(tmp_path / "*.hdf5"), fields, batch_size=5) as reader:
        assert reader.num_samples == len(theirs)
        for batch in reader:
            for i in range(batch.size):
                item = theirs[batch.number * 5 + i]
                assert (batch.input[i] == item["input_fields"].numpy()).all()
                assert (batch.output[i] == item["output_fields"].numpy()).all()


def test_d4rl(tmp_path):
    """Flat arrays, as D4RL's ``sequence_dataset`` cuts them: at terminals, and at timeouts."""
    rng, count = np.random.default_rng(2), 200
    arrays = {
        "observations": rng.random((count, 3), np.float32),
        "actions": rng.random((count, 2), np.float32),
        "terminals": rng.random(count) < 0.05,
        "timeouts": np.arange(count) % 40 == 39,
    }
    with h5py.File(tmp_path / "d4rl.hdf5", "w") as file:
        for name, array in arrays.items():
            file[name] = array
    episodes: list[list[int]] = [[]]
    for row in range(count):
        episodes[-1].append(row)
        if arrays["terminals"][row] or arrays["timeouts"][row]:
            episodes.append([])
    fields = {"observations": Field("observations", steps=range(4)), "actions": "actions"}
    sequences = Sequences(last=("terminals", "timeouts"))
    with reader_of(tmp_path / "d4rl.hdf5", fields, sequences=sequences) as reader:
        found = {(n, s) for b in reader for n, s in zip(b.sequence.tolist(), b.step, strict=True)}
        expected = {(n, s) for n, rows in enumerate(episodes) for s in range(len(rows) - 3)}
        assert found == expected
        for number, step in list(expected)[:20]:
            rows = episodes[number][step : step + 4]
            assert (reader.read(rows[:1]).observations[0] == arrays["observations"][rows]).all()


def test_aloha(tmp_path):
    """A file an episode; actions that reach beyond its end are zeros, and are marked."""
    rng, found = np.random.default_rng(3), []
    for number, length in enumerate(LENGTHS[:4]):
        with h5py.File(tmp_path / f"episode_{number}.hdf5", "w") as file:
            file.attrs["sim"] = True
            images = rng.integers(0, 255, (length, 8, 10, 3), dtype=np.uint8)
            file.create_dataset("observations/images/top", data=images, chunks=(1, 8, 10, 3))
            file["observations/qpos"], file["action"] = rng.random((2, length, 14))
            found.append((images, file["action"][:]))
    fields = {
        "image": "observations/images/top",
        "qpos": "observations/qpos",
        "action": Field("action", steps=range(12), pad="zero", pad_mask="is_there"),
    }
    with reader_of(str(tmp_path / "episode_*.hdf5"), fields, shuffle="window") as reader:
        for batch in reader:
            for i, (number, step) in enumerate(zip(batch.sequence, batch.step, strict=True)):
                images, action = found[number]
                padded = np.zeros((12, 14))
                rest = action[step : step + 12]
                padded[: len(rest)] = rest
                assert (batch.image[i] == images[step]).all()
                assert (batch.action[i] == padded).all()
                assert (batch.is_there[i] == (np.arange(12) < len(rest))).all()


def test_windows_of_a_recording(tmp_path):
    """One long array, as in NWB files: a window of 256 steps every 128."""
    values = np.random.default_rng(4).random((5000, 4), np.float32)
    with h5py.File(tmp_path / "recording.nwb", "w") as file:
        series = file.create_group("acquisition/eeg")
        series.create_dataset("data", data=values, chunks=(300, 2), compression="gzip")
        series["timestamps"] = np.arange(5000) / 250
    fields = {
        "eeg": Field("acquisition/eeg/data", axes=(0, 1), steps=range(256)),
        "time": "acquisition/eeg/timestamps",
    }
    options = {"sequences": {"every": 128}, "shuffle": "full"}
    with reader_of(tmp_path / "recording.nwb", fields, **options) as reader:
        seen = []
        for batch in reader:
            for i, row in enumerate(batch.index.tolist()):
                assert (batch.eeg[i] == values[row : row + 256]).all()
                assert batch.time[i] == row / 250
                seen.append(row)
    assert sorted(seen) == list(range(0, 5000 - 255, 128))
