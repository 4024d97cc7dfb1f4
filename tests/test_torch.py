"""`H5Dataset`: what PyTorch, its DataLoader, torchrun, torchdata and Lightning make of batches."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from itertools import chain
from pathlib import Path

import h5py
import numpy as np
import pytest
from conftest import EXAMPLES, assert_each_sample_once, example, require_extra

from h5async import (
    AsyncReader,
    ConfigError,
    DatasetError,
    Field,
    H5AsyncError,
    RaggedField,
    ReaderClosedError,
    ReaderConfig,
    SparseField,
)

torch = require_extra("torch")

from torch.utils.data import DataLoader  # noqa: E402

from h5async.torch import H5Dataset  # noqa: E402

ROOT = Path(__file__).parents[1]
N = 103
DTYPES = "? i1 u1 i2 u2 i4 u4 i8 u8 f2 f4 f8 c8 c16 >i2 >u4 >f4 >f8".split()


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("torch") / "data.h5"
    rng = np.random.default_rng(1)
    with h5py.File(path, "w") as file:
        images = rng.integers(0, 255, (N, 4, 5, 3), "u1")
        file.create_dataset("data", data=images, chunks=(7, 4, 5, 3), compression="gzip")
        file["labels"] = np.arange(N)
        file["texts"] = np.full(N, b"text", "S4")
        file["pairs"] = np.zeros(N, [("energy", "f4"), ("hits", "i4")])
        for dtype in DTYPES:
            file[f"of/{dtype}"] = rng.integers(0, 2 if dtype == "?" else 99, (N, 3)).astype(dtype)
    return path


def make(path, **options):
    return H5Dataset(hdf5_path=path, device="cpu", **{"batch_size": 10, "seed": 4, **options})


def labels_of(batches):
    return [batch["labels"].tolist() for batch in batches]


def same_as(reader_options, path):
    with AsyncReader(hdf5_path=path, device="cpu", **reader_options) as reader:
        return [batch.index.tolist() for _ in range(3) for batch in reader]


# --- values --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_equal_h5py(path, dtype):
    with h5py.File(path) as file:
        expected = file[f"of/{dtype}"][...]
    fields = {"data": f"of/{dtype}", "labels": "labels"}
    with make(path, fields=fields, shuffle="full") as dataset:
        for batch in dataset:
            assert list(batch) == ["data", "labels"]
            found = batch["data"].numpy()
            assert found.dtype == expected.dtype.newbyteorder("=")
            assert np.array_equal(found, expected[batch["labels"].numpy()])


@pytest.mark.parametrize("shuffle", [False, "full", "window"])
@pytest.mark.parametrize("num_threads", [0, 2])
@pytest.mark.parametrize("drop_last", [False, True])
def test_an_epoch_is_the_readers(path, shuffle, num_threads, drop_last):
    options = {"shuffle": shuffle, "num_threads": num_threads, "drop_last": drop_last}
    options |= {"batch_size": 10, "seed": 4}
    with make(path, **options) as dataset:
        loader = DataLoader(dataset, batch_size=None)
        assert len(loader) == len(dataset) == (10 if drop_last else 11)
        found = [*labels_of(dataset), *labels_of(loader), *labels_of(dataset)]
    assert found == same_as(options, path)


def test_images_are_permuted_and_scaled(path):
    with h5py.File(path) as file:
        expected = file["data"][...].transpose(0, 3, 1, 2).astype("f4") * np.float32(1 / 255)
    field = Field("data", axes=(0, 3, 1, 2), scale=1 / 255)
    with make(path, fields={"images": field}) as dataset:
        found = torch.cat([batch["images"].clone() for batch in dataset])
    assert found.dtype is torch.float32
    assert np.array_equal(found.numpy(), expected)


@pytest.mark.parametrize("through", [lambda d: d, lambda d: DataLoader(d, batch_size=None)])
@pytest.mark.parametrize("as_tuple", [False, True])
def test_no_value_is_copied(path, through, as_tuple):
    with make(path, as_tuple=as_tuple, num_threads=0) as dataset:
        buffers = [
            {slot.memory.out[field].ctypes.data for slot in dataset.reader._engine.setup.slots}
            for field in range(2)
        ]
        for batch in through(dataset):
            tensors = batch if as_tuple else batch.values()
            assert all(t.data_ptr() in b for t, b in zip(tensors, buffers, strict=True))


def test_tuples_are_in_field_order(path):
    fields = {"which": "labels", "image": "data"}
    with make(path, fields=fields, as_tuple=True) as dataset:
        first = next(iter(dataset))
        assert type(first) is tuple
        which, image = first
        assert which.tolist() == list(range(10))
        assert image.shape == (10, 4, 5, 3)
        for which, image in DataLoader(dataset, batch_size=None):
            assert len(which) == len(image)


def test_a_tensor_that_is_kept_too_long_shows(path):
    with make(path, debug_lifetimes=True) as dataset:
        batches = iter(dataset)
        first = next(batches)["labels"]
        assert first.tolist() == list(range(10))
        next(batches)
        assert set(first.tolist()) == {-1}


# --- where it is ---------------------------------------------------------------------------------


def test_set_epoch_and_a_loop_that_is_left(path):
    with make(path, shuffle="full") as dataset:
        epochs = [labels_of(dataset) for _ in range(3)]
        assert sorted(chain(*epochs[2])) == list(range(N))
        dataset.set_epoch(1)
        assert labels_of(dataset) == epochs[1]
        dataset.set_epoch(0)
        for _ in dataset:
            break
        assert labels_of(dataset) == epochs[1]


@pytest.mark.parametrize("taken", [0, 1, 6, 11])
def test_a_saved_state_goes_on_with_the_rest_of_the_epoch(path, taken):
    with make(path, shuffle="full") as dataset:
        batches = iter(DataLoader(dataset, batch_size=None))
        for _ in range(taken):
            next(batches)
        state = json.loads(json.dumps(dataset.state_dict()))
        rest = labels_of(batches) or labels_of(dataset)
        following = labels_of(dataset)
    with make(path, shuffle="full", num_threads=0) as dataset:
        dataset.load_state_dict(state)
        assert labels_of(DataLoader(dataset, batch_size=None)) == rest
        assert labels_of(DataLoader(dataset, batch_size=None)) == following


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("taken", [0, 1, 6, 11])
def test_a_stateful_dataloader_saves_and_loads_it(path, taken):
    loader_of = require_extra("torchdata.stateful_dataloader").StatefulDataLoader
    with make(path, shuffle="full") as dataset:
        loader = loader_of(dataset, batch_size=None)
        batches = iter(loader)
        for _ in range(taken):
            next(batches)
        state = pickle.loads(pickle.dumps(loader.state_dict()))
        rest = labels_of(batches)
        following = labels_of(loader)
    with make(path, shuffle="full") as dataset:
        loader = loader_of(dataset, batch_size=None)
        loader.load_state_dict(state)
        if rest:  # else the state was that of the next epoch already
            assert labels_of(loader) == rest
        assert labels_of(loader) == following


@pytest.mark.parametrize("taken", [None, 0, 3])
def test_pickled_it_goes_on_where_it_is(path, taken):
    with make(path, shuffle="full", as_tuple=True) as dataset:
        if taken is not None:
            batches = iter(dataset)
            for _ in range(taken):
                next(batches)
        sent = pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(dataset))))
        assert sent._reader is None
        with sent:
            rest = [labels.tolist() for _, labels in sent]
        assert rest == [labels.tolist() for _, labels in (batches if taken else dataset)]


# --- how it is made and closed -------------------------------------------------------------------


def test_options_come_in_any_form(path, tmp_path):
    options = {"hdf5_path": str(path), "batch_size": 50, "device": "cpu"}
    toml = tmp_path / "reader.toml"
    toml.write_text("\n".join(f"{k} = {json.dumps(v)}" for k, v in options.items()))
    for config in (options, ReaderConfig(**options), toml, str(toml)):
        with H5Dataset(config, batch_size=60) as dataset:
            assert [len(batch["labels"]) for batch in dataset] == [60, 43]
    with AsyncReader(options) as reader:
        with H5Dataset(reader) as dataset:
            assert dataset.reader is reader
            assert labels_of(dataset) == [[*range(50)], [*range(50, 100)], [*range(100, N)]]
        assert len([*reader]) == 3
        with pytest.raises(ConfigError, match="'seed' was given with a reader"):
            H5Dataset(reader, seed=3)


def test_it_is_opened_by_its_first_use_and_closed_once(path):
    dataset = H5Dataset(hdf5_path="not there.h5")
    dataset.close()
    dataset = make(path)
    assert "data.h5" in repr(dataset)
    assert dataset._reader is None
    reader = dataset.reader
    assert "103 samples" in repr(dataset)
    dataset.close()
    dataset.close()
    for use in (lambda: next(iter(dataset)), lambda: len(dataset), lambda: next(iter(reader))):
        with pytest.raises(ReaderClosedError):
            use()


def test_wrong_options_are_found_at_once(path):
    with pytest.raises(ConfigError, match="did you mean 'batch_size'"):
        H5Dataset(hdf5_path=path, batchsize=3)


@pytest.mark.parametrize("workers", ["thread", "process"])
def test_bfloat16_is_bfloat16(path, tmp_path, workers):
    require_extra("ml_dtypes")
    values = np.random.default_rng(0).normal(size=(N, 3)).astype("f4")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"], file["ends"] = values, np.arange(1, N + 1)
    fields = {
        "x": Field("x", dtype="bfloat16"),
        "scaled": Field("x", dtype=torch.bfloat16, scale=2),
        "ragged": RaggedField("x", offsets="ends", offsets_kind="ends", dtype="torch.bfloat16"),
    }
    with H5Dataset(
        hdf5_path=tmp_path / "a.h5", fields=fields, batch_size=N, device="cpu", workers=workers
    ) as dataset:
        (batch,) = dataset
        expected = torch.from_numpy(values).to(torch.bfloat16)
        assert torch.equal(batch["x"], expected)
        assert torch.equal(batch["scaled"], expected * 2)
        assert torch.equal(batch["ragged"].values(), expected)
        again = ReaderConfig.load(json.loads(dataset.reader.config.model_dump_json()))
        assert again.fields["x"].dtype == fields["x"].dtype


@pytest.mark.parametrize("dtype", [torch.float16, "torch.float16", torch.int64, torch.bool])
def test_dtypes_of_pytorch_are_taken(dtype):
    assert Field("x", dtype=dtype).dtype.name == str(dtype).removeprefix("torch.")
    if dtype in (torch.float16, "torch.float16"):
        assert Field("x", dtype=dtype, scale=2).dtype == np.float16


@pytest.mark.parametrize(("field", "dtype"), [("texts", "S4"), ("pairs", "energy")])
def test_what_pytorch_has_no_dtype_for_is_an_error_when_opened(path, field, dtype):
    with make(path, data_field=field) as dataset:
        with pytest.raises(
            DatasetError, match=f"\"{field}\", field 'data'.* no dtype for .*{dtype}"
        ):
            len(dataset)
        assert dataset._reader is None
    with AsyncReader(hdf5_path=path, data_field=field) as reader, pytest.raises(DatasetError):
        H5Dataset(reader)
    with make(path, data_field="pairs/energy") as dataset:
        assert next(iter(dataset))["data"].dtype is torch.float32


def test_what_a_postprocess_makes_is_checked_batch_by_batch(path):
    def to_numbers(texts, labels):
        return (texts == b"text").astype("f4"), labels

    with make(path, data_field="texts", postprocess=to_numbers) as dataset:
        assert next(iter(dataset))["data"].tolist() == [1] * 10
    with (
        make(path, postprocess=lambda data, labels: (labels.astype("S3"), labels)) as dataset,
        pytest.raises(DatasetError, match=r"field 'data': PyTorch has no dtype for .S3"),
    ):
        next(iter(dataset))


def test_h5async_alone_does_not_import_torch():
    code = "import sys, h5async; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)


# --- what a DataLoader must not do ---------------------------------------------------------------


@pytest.mark.sampled(1)
@pytest.mark.filterwarnings("ignore")  # of forking beside threads, and of few cores
@pytest.mark.parametrize(
    ("method", "num_workers", "is_open"),
    [("fork", 1, False), ("fork", 1, True), ("spawn", 1, True)],
)
def test_worker_processes_are_refused(path, method, num_workers, is_open):
    with make(path) as dataset:
        if is_open:
            next(iter(dataset))
        loader = DataLoader(
            dataset, batch_size=None, num_workers=num_workers, multiprocessing_context=method
        )
        with pytest.raises(ConfigError, match=r"needs none.* write DataLoader\(dataset, batch_si"):
            next(iter(loader))
        assert len(labels_of(dataset)) == 11


@pytest.mark.parametrize("options", [{}, {"batch_size": 4}, {"batch_size": 4, "drop_last": True}])
def test_collating_batches_is_refused(path, options):
    with make(path) as dataset, pytest.raises(ConfigError, match="gives whole batches"):
        next(iter(DataLoader(dataset, **options)))


# --- many processes ------------------------------------------------------------------------------


def test_a_process_group_says_which_rank_it_is(path, monkeypatch):
    """Lightning's launcher sets WORLD_SIZE and no RANK."""
    monkeypatch.setenv("WORLD_SIZE", "3")
    with make(path) as dataset, pytest.raises(H5AsyncError, match="RANK is not"):
        len(dataset)
    for name, value in {"is_initialized": True, "get_rank": 2, "get_world_size": 3}.items():
        monkeypatch.setattr(torch.distributed, name, lambda value=value: value)
    with make(path) as dataset:
        assert next(iter(dataset))["labels"].tolist() == list(range(20, 30))
    with make(path, rank=0, world_size=1) as dataset:
        assert next(iter(dataset))["labels"].tolist() == list(range(10))


TRAIN = """
import json, sys
from pathlib import Path

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from h5async import Field
from h5async.torch import H5Dataset

distributed.init_process_group("gloo")
rank = distributed.get_rank()
model = DistributedDataParallel(torch.nn.Linear(60, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
fields = {"data": Field("data", scale=1 / 255), "labels": "labels"}
found = []
for batch_size in (7, 17):
    options = {"hdf5_path": sys.argv[1], "fields": fields, "batch_size": batch_size}
    with H5Dataset(options, shuffle="full", device="cpu") as dataset:
        for epoch in range(2):
            found.append([])
            for batch in dataset:
                loss = model(batch["data"].flatten(1)).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                found[-1].append(batch["labels"].tolist())
        assert len(dataset) == len(found[-1])
weights = [p.tolist() for p in model.parameters()]
distributed.barrier()  # nobody ends while another one may still talk to it
Path(sys.argv[2], f"{rank}.json").write_text(json.dumps([found, weights]))
distributed.destroy_process_group()
"""


def torchrun(num_processes, *command):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    # Once in some dozens of runs PyTorch itself aborts, when all is done and a process ends.
    for is_last in (False, True):
        done = subprocess.run(
            [*launcher, f"--nproc-per-node={num_processes}", *map(str, command)],
            env=environment,
            timeout=100,
            capture_output=True,
            text=True,
        )
        if is_last or "terminate called without an active exception" not in done.stderr:
            break
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_ddp_under_torchrun_takes_as_many_steps_everywhere(path, tmp_path):
    """103 samples: 4 steps of 3 times 7 and 19 left; or 2 of 3 times 17 and 1 left for 3."""
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    torchrun(3, script, path, tmp_path)
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(3)]
    assert ranks[0][1] == ranks[1][1] == ranks[2][1], "the weights are not the same"
    epochs = [[found[epoch] for found, _ in ranks] for epoch in range(4)]
    assert [{len(batches) for batches in epoch} for epoch in epochs] == [{5}, {5}, {3}, {3}]
    for epoch in epochs:
        seen = sorted(chain(*chain(*epoch)))
        if len(epoch[0]) == 5:
            assert seen == list(range(N))
        else:
            assert len(seen) == N + 2  # one had to come for all three
            assert sorted(set(seen)) == list(range(N))


RAY = """
import json, sys, tempfile
from pathlib import Path

import ray
import torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model

from h5async import Field
from h5async.ray import train_loader

def train(options):
    path, out = options["path"], Path(options["out"])
    context = ray.train.get_context()
    model = prepare_model(torch.nn.Linear(60, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    fields = {"data": Field("data", scale=1 / 255), "labels": "labels"}
    found = []
    with train_loader(hdf5_path=path, fields=fields, batch_size=7, shuffle="full",
                      device="cpu", num_threads=1) as dataset:
        for batch in dataset:
            loss = model(batch["data"].flatten(1)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(batch["labels"].tolist())
        with tempfile.TemporaryDirectory() as folder:
            dataset.save(folder)
            checkpoint = ray.train.Checkpoint.from_directory(folder)
            ray.train.report({"batches": len(found)}, checkpoint=checkpoint)
    weights = [p.tolist() for p in model.parameters()]
    (out / f"{context.get_world_rank()}.json").write_text(json.dumps([found, weights]))
    with train_loader(hdf5_path=path, fields=fields, shuffle="full", device="cpu") as again:
        assert again.epoch == 1

path, out = sys.argv[1:]
store = {"object_store_memory": 80 << 20}
ray.init("local", num_cpus=3, include_dashboard=False, log_to_driver=False, **store)
config = {"path": path, "out": out}
run_config = RunConfig(storage_path=out)
TorchTrainer(
    train, train_loop_config=config, scaling_config=ScalingConfig(num_workers=3),
    run_config=run_config,
).fit()
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ray_train_takes_as_many_steps_everywhere(path, tmp_path):
    require_extra("ray.train.torch")
    script = tmp_path / "train.py"
    script.write_text(RAY)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, script, path, tmp_path],
        env={**environment, "RAY_USAGE_STATS_ENABLED": "0"},
        timeout=560,  # 45 s on a quiet machine of two cores
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(3)]
    assert ranks[0][1] == ranks[1][1] == ranks[2][1], "the weights are not the same"
    assert {len(found) for found, _ in ranks} == {5}
    assert sorted(chain(*chain(*(found for found, _ in ranks)))) == list(range(N))


# --- the examples, and Lightning -----------------------------------------------------------------


def test_the_torchrun_example_learns_alone(capsys):
    assert example("torchrun").main() > 0.9
    assert "1 processes: accuracy" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_torchrun_example_learns_under_torchrun():
    out = torchrun(2, EXAMPLES / "torchrun.py")
    assert "2 processes: accuracy 0.9" in out


of_lightning = pytest.mark.filterwarnings("ignore")  # it warns of much, PyTorch's changes too
QUIET = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False}
QUIET |= {"enable_model_summary": False}


@of_lightning
def test_the_lightning_example_learns(capsys):
    require_extra("lightning")
    assert example("lightning_digits").main(**QUIET) > 0.9
    assert "accuracy" in capsys.readouterr().out


LIGHTNING = """
import json, sys, warnings
from pathlib import Path
import lightning
folder = Path(sys.argv[2])
sys.path.insert(0, sys.argv[1])
from lightning_digits import main

class Seen(lightning.Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, number):
        found.append((trainer.current_epoch, batch["index"].tolist()))

found = []
quiet = {"enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
for steps in (32, -1):  # 23 are an epoch
    main(folder / "saved", 3, [Seen()], devices=2, max_steps=steps, **quiet)
    del found[30 if steps > 0 else 69:]  # those after the last checkpoint are trained on again
rank = lightning.pytorch.utilities.rank_zero_only.rank
(folder / f"{rank}.json").write_text(json.dumps(found))
"""


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_lightning_example_goes_on_in_several_processes(tmp_path):
    require_extra("lightning")
    script = tmp_path / "train.py"
    script.write_text(LIGHTNING)
    assert "accuracy 0." in torchrun(2, script, EXAMPLES, tmp_path)
    assert_each_sample_once(tmp_path, 1438)


@of_lightning
@pytest.mark.parametrize("through", ["dataset", "StatefulDataLoader"])
def test_lightning_goes_on_in_the_middle_of_an_epoch(path, tmp_path, through):
    lightning = require_extra("lightning")
    stateful = require_extra("torchdata.stateful_dataloader").StatefulDataLoader

    class Model(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(60, 1)
            self.seen = []

        def training_step(self, batch, _):
            self.seen.append(batch["labels"].tolist())
            return self.layer(batch["data"].flatten(1).float()).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1e-6)

    def fit(**options):
        callback = lightning.pytorch.callbacks.ModelCheckpoint(
            tmp_path, "{step}", every_n_train_steps=2, save_top_k=-1
        )
        trainer = lightning.Trainer(max_epochs=3, callbacks=callback, **QUIET)
        model = Model()
        with make(path, shuffle="full") as dataset:
            loader = dataset if through == "dataset" else stateful(dataset, batch_size=None)
            trainer.fit(model, loader, **options)
        return model.seen

    whole = fit()
    assert len(whole) == 33
    assert sorted(chain(*whole[11:22])) == list(range(N))
    for step in (2, 16, 22):
        assert fit(ckpt_path=tmp_path / f"step={step}.ckpt") == whole[step:]


# --- sparse and ragged samples -----------------------------------------------------------------


@pytest.fixture(scope="module")
def ragged_path(tmp_path_factory):
    """Return a file with a sparse matrix, tokens and their offsets, and elements of any length."""
    scipy = require_extra("scipy.sparse")
    path = tmp_path_factory.mktemp("torch") / "ragged.h5"
    rng = np.random.default_rng(2)
    matrix = scipy.random(N, 20, 0.3, "csr", random_state=0, dtype="f4")
    lengths = rng.integers(0, 9, N)
    with h5py.File(path, "w") as file:
        group = file.create_group("X")
        group.attrs["encoding-type"], group.attrs["shape"] = "csr_matrix", matrix.shape
        group["data"], group["indices"], group["indptr"] = (
            matrix.data,
            matrix.indices,
            matrix.indptr,
        )
        file["tokens"] = rng.integers(0, 99, lengths.sum())
        file["lengths"] = lengths
        ragged = file.create_dataset("ragged", (N,), h5py.vlen_dtype("f4"))
        for number, length in enumerate(lengths):
            ragged[number] = rng.random(length)
        file["y"] = np.arange(N)
    return path


RAGGED = {
    "x": "X",
    "tokens": RaggedField("tokens", offsets="lengths", offsets_kind="lengths"),
    "ragged": "ragged",
    "y": "y",
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype")
def test_sparse_rows_and_ragged_samples_are_tensors_over_the_same_memory(ragged_path):
    with AsyncReader(hdf5_path=ragged_path, fields=RAGGED, batch_size=16, device="cpu") as reader:
        wanted = [batch.copy() for batch in reader]
        loader = DataLoader(H5Dataset(reader), batch_size=None)
        for batch, one in zip(loader, wanted, strict=True):
            x, tokens, ragged = batch["x"], batch["tokens"], batch["ragged"]
            assert (x.layout, x.dtype) == (torch.sparse_csr, torch.float32)
            np.testing.assert_array_equal(x.to_dense().numpy(), one.x.to_dense())
            assert tokens.is_nested
            assert tokens.layout == torch.jagged
            for mine, truth in zip(tokens.unbind(), one.tokens, strict=True):
                np.testing.assert_array_equal(mine.numpy(), truth)
            np.testing.assert_array_equal(ragged.values().numpy(), one.ragged.values)
            np.testing.assert_array_equal(batch["y"].numpy(), one.y)
        held = reader.get_next_batch()
        found = H5Dataset(reader)._tensors(held)
        assert found["x"].values().data_ptr() == held.x.data.ctypes.data
        assert found["x"].col_indices().data_ptr() == held.x.indices.ctypes.data
        assert found["tokens"].values().data_ptr() == held.tokens.values.ctypes.data
        assert found["ragged"].values().data_ptr() == held.ragged.values.ctypes.data


def test_kinds_of_fields_that_the_paths_tell_are_opened_by_the_dataset(ragged_path):
    with make(ragged_path, fields={"x": SparseField("X", dense=True), "t": "ragged"}) as dataset:
        again = pickle.loads(pickle.dumps(dataset))
        for batch in dataset:
            assert batch["x"].shape[1:] == (20,)
        with again:
            assert len(list(again)) == 11
