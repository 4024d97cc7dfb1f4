"""Other libraries take batches by DLPack, without a copy; the examples that show it, run."""

from __future__ import annotations

import importlib
import importlib.util
import os
import socket
import subprocess
import sys

import h5py
import numpy as np
import pytest
from conftest import EXAMPLES, assert_each_sample_once, example, require_extra
from rich.progress import track

from h5async import AsyncReader

ROOT = EXAMPLES.parents[1]


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "data.h5"
    with h5py.File(path, "w") as file:
        file["data"] = np.random.default_rng(1).normal(size=(20, 3, 4)).astype("f4")
        file["labels"] = np.arange(20)
    return path


def test_torch_takes_batches_without_a_copy(path):
    torch = require_extra("torch")
    with AsyncReader(hdf5_path=path, batch_size=6, shuffle="full", device="cpu") as reader:
        for batch in reader:
            data, labels = map(torch.from_dlpack, batch)
            assert data.data_ptr() == batch.data.ctypes.data
            assert np.array_equal(data.numpy(), batch.data)
            assert np.array_equal(labels.numpy(), batch.index)


@pytest.mark.slow
def test_jax_takes_batches(path):
    jax = require_extra("jax")
    with AsyncReader(hdf5_path=path, batch_size=6, shuffle="full", device="cpu") as reader:
        for batch in reader:
            data = jax.dlpack.from_dlpack(batch.data)
            assert np.array_equal(np.asarray(jax.block_until_ready(data + 1)), batch.data + 1)


@pytest.mark.slow
def test_progress_bars_know_the_total(path, capsys):
    tqdm = require_extra("tqdm")
    with AsyncReader(hdf5_path=path, batch_size=6, device="cpu") as reader:
        bar = tqdm.tqdm(reader)
        assert bar.total == len(reader) == 4
        assert sum(1 for _ in bar) == 4
        assert "4/4" in capsys.readouterr().err
        assert sum(1 for _ in track(reader, "epoch")) == 4
        assert "100%" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("name", ["torch_dlpack", "jax_dlpack", "keras_digits"])
def test_the_examples_learn(name, capsys, monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "torch")  # else Keras looks for TensorFlow
    require_extra(name.partition("_")[0])
    assert example(name).main(epochs=10) > 0.9
    assert "accuracy" in capsys.readouterr().out


PROCESS = """
import importlib, json, sys
from pathlib import Path
name, examples, folder, port, rank = sys.argv[1:]
sys.path.insert(0, examples)
example = importlib.import_module(name)

class Stop(Exception):
    pass

def seen(epoch, index):
    if len(found) == stop:
        raise Stop
    found.append((epoch, index.tolist()))

example.jax.distributed.initialize(f"localhost:{port}", 2, int(rank))
found, stop = [], 30  # 24 are an epoch
try:
    example.main(Path(folder) / "saved", epochs=3, seen=seen)
except Stop:
    stop = None
example.main(Path(folder) / "saved", epochs=3, seen=seen)
(Path(folder) / f"{rank}.json").write_text(json.dumps(found))
"""


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", ["jax_processes", "keras_processes"])
def test_the_examples_go_on_in_several_processes(name, tmp_path, monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "torch")  # which the example sets anew
    require_extra(name.partition("_")[0])
    require_extra("orbax.checkpoint")
    script = tmp_path / "train.py"
    script.write_text(PROCESS)
    with socket.socket() as one:
        one.bind(("localhost", 0))
        port = one.getsockname()[1]
    command = [sys.executable, script, name, EXAMPLES, tmp_path, str(port)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen([*command, str(rank)], env=environment, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        for process in ranks:
            _, said = process.communicate(timeout=200)
            assert process.returncode == 0, said
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    assert_each_sample_once(tmp_path, 1536)


@pytest.mark.parametrize(("name", "least"), [("split_and_evaluate", 0.93), ("hard_negatives", 0.7)])
def test_the_examples_of_samples_learn(name, least, capsys):
    assert example(name).main() > least
    assert "accuracy" in capsys.readouterr().out


@pytest.mark.parametrize(("name", "least"), [("behavioural_cloning", 0.9), ("forecasting", 0.999)])
def test_the_examples_of_sequences_learn(name, least, capsys):
    assert example(name).main() > least
    assert "held out" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # what anndata says of its own next versions
def test_the_example_of_cells_learns(capsys):
    require_extra("anndata")
    assert example("cell_types").main() > 0.95
    assert "of the cells" in capsys.readouterr().out


@pytest.mark.slow
def test_the_example_of_tokens_learns(capsys):
    require_extra("torch")
    assert example("token_lengths").main() > 0.9
    assert "of the texts" in capsys.readouterr().out


def test_the_example_of_images_learns(capsys):
    require_extra("cv2")
    assert example("jpeg_shapes").main(epochs=4, count=300) > 0.8
    assert "accuracy" in capsys.readouterr().out


@pytest.mark.slow
def test_the_numpy_example_learns(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["numpy_digits", "--device", "cpu"])
    assert example("numpy_digits").main() == 0
    assert "held-out accuracy" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of TensorBoard itself
def test_the_cnn_example_learns_and_tells_tensorboard(capsys, tmp_path):
    require_extra("torch")
    require_extra("tensorboard")
    assert example("torch_cnn").main(logdir=str(tmp_path)) > 0.9
    assert "epoch 1: " in capsys.readouterr().out
    events = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    told = events.EventAccumulator(str(tmp_path))
    told.Reload()
    assert [event.step for event in told.Scalars("data/waited_share")] == [0, 1]
    assert "data/read_seconds" in told.Tags()["scalars"]
