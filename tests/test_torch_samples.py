"""`H5Dataset` takes all options of samples, PyTorch's samplers among them."""

from __future__ import annotations

import json
import pickle
from itertools import chain

import h5py
import numpy as np
import pytest
from conftest import require_extra

from h5async import ConfigError, Field, Sequences, Split

torch = require_extra("torch")

from h5async.torch import H5Dataset  # noqa: E402

N = 103


@pytest.fixture
def numbered(tmp_path):
    """A file of samples that hold their numbers."""
    found = tmp_path / "numbered.h5"
    with h5py.File(found, "w") as file:
        file["data"] = np.arange(N)
        file["lengths"] = [40, N - 40]
    return found


def labels_of(dataset):
    return [batch["data"].tolist() for batch in dataset]


@pytest.mark.parametrize("split", ["random_split", "Subset"])
def test_splits_of_torch_say_to_use_split(numbered, split):
    utils = torch.utils.data
    with H5Dataset(hdf5_path=numbered, labels_field=None, device="cpu") as dataset:
        if split == "Subset":
            part = utils.Subset(dataset, [0, 1])
        else:
            part, _ = utils.random_split(dataset, [0.5, 0.5])
        with pytest.raises(ConfigError, match=r"indices=Split\("):
            part[0]
        with pytest.raises(ConfigError, match=r"indices=Split\("):
            next(iter(utils.DataLoader(part, batch_size=None)))


def test_the_dataset_takes_the_options_of_samples(numbered):
    shared = {"hdf5_path": numbered, "labels_field": None, "device": "cpu", "batch_size": 10}
    parts = {"train": 0.7, "val": 0.3}
    found = []
    for name in parts:
        with H5Dataset(shared, indices=Split(name, parts), shuffle="full") as dataset:
            again = pickle.loads(pickle.dumps(dataset))
            found.append(sorted(chain(*labels_of(dataset))))
            with again:
                assert sorted(chain(*labels_of(again))) == found[-1]
    assert sorted(chain(*found)) == list(range(N))
    with H5Dataset(shared, weights=np.arange(N) == 3, epoch_samples=20, copy=True) as dataset:
        assert set(chain(*labels_of(dataset))) == {3}
        assert dataset.reader.read([4]).data.tolist() == [4]


def samplers(utils):
    generator = torch.Generator().manual_seed(3)
    items = range(N)
    return {
        "sequential": utils.SequentialSampler(items),
        "random": utils.RandomSampler(items, generator=generator),
        "weighted": utils.WeightedRandomSampler(torch.ones(N), 30, generator=generator),
        "subset": utils.SubsetRandomSampler([5, 6, 7, 70], generator=generator),
        "batches": utils.BatchSampler(
            utils.RandomSampler(items, generator=generator), 7, drop_last=False
        ),
        "distributed": utils.DistributedSampler(items, num_replicas=2, rank=1, seed=4),
    }


@pytest.mark.parametrize(
    "kind", ["sequential", "random", "weighted", "subset", "batches", "distributed"]
)
def test_samplers_of_torch(numbered, kind):
    utils = torch.utils.data
    model = samplers(utils)[kind]
    with H5Dataset(
        hdf5_path=numbered,
        labels_field=None,
        sampler=samplers(utils)[kind],
        batch_size=7,
        device="cpu",
    ) as dataset:
        for epoch in range(3):
            if kind == "distributed":
                model.set_epoch(epoch)
            expected = list(model)
            if kind == "batches":
                assert labels_of(dataset) == expected
            else:
                assert list(chain(*labels_of(dataset))) == [int(sample) for sample in expected]
        state = json.loads(json.dumps(dataset.state_dict()))
        expected = labels_of(dataset)
    with H5Dataset(
        hdf5_path=numbered,
        labels_field=None,
        sampler=samplers(utils)[kind],
        batch_size=7,
        device="cpu",
    ) as dataset:
        dataset.load_state_dict(state)
        assert labels_of(dataset) == expected


def test_a_random_sampler_without_a_seed_is_told_when_resumed(numbered):
    options = {"hdf5_path": numbered, "labels_field": None, "device": "cpu"}
    sampler = torch.utils.data.RandomSampler(range(N))
    with H5Dataset(options, sampler=sampler) as dataset:
        state = dataset.state_dict()
    with (
        H5Dataset(options, sampler=sampler) as dataset,
        pytest.raises(ConfigError, match="draws other samples for epoch 0"),
    ):
        dataset.load_state_dict(state)


@pytest.mark.parametrize("cache", [None, "host"])
def test_steps_around_samples_and_their_masks(tmp_path, cache):
    """Tensors (N, steps, ...), also through a DataLoader; a copy of the dataset goes on."""
    rng, lengths = np.random.default_rng(0), (9, 1, 14, 6)
    values = [rng.integers(0, 255, (length, 3, 4), dtype=np.uint8) for length in lengths]
    with h5py.File(tmp_path / "demos.h5", "w") as file:
        for n, images in enumerate(values):
            chunks = (min(4, len(images)), 3, 2)
            data = file.create_group(f"demo_{n}")
            data.create_dataset("obs/image", data=images, chunks=chunks, compression="gzip")
            data["actions"] = images[:, 0].astype(">f8")
    fields = {
        "image": Field("obs/image", steps=range(-1, 1), pad="edge", scale=1 / 255),
        "actions": Field("actions", steps=range(5), pad="zero", pad_mask="is_there"),
    }
    with H5Dataset(
        hdf5_path=tmp_path / "demos.h5",
        fields=fields,
        sequences=Sequences(groups="demo_*"),
        shuffle="window",
        batch_size=8,
        cache=cache,
        copy=True,
        device="cpu",
    ) as dataset:
        batches = list(torch.utils.data.DataLoader(dataset, batch_size=None))
        again = pickle.loads(pickle.dumps(dataset))
        rest = list(dataset)
        with again:
            for batch, other in zip(rest, again, strict=True):
                assert all(torch.equal(batch[name], other[name]) for name in batch)
    assert len(batches) == -(-sum(lengths) // 8)
    batch = {name: torch.cat([found[name] for found in batches]) for name in batches[0]}
    assert {name: (t.dtype, tuple(t.shape[1:])) for name, t in batch.items()} == {
        "image": (torch.float32, (2, 3, 4)),
        "actions": (torch.float64, (5, 4)),
        "is_there": (torch.bool, (5,)),
    }
    found = sorted(
        (tuple(mask), *map(tuple, actions))
        for mask, actions in zip(batch["is_there"].tolist(), batch["actions"].tolist(), strict=True)
    )
    expected = []
    for images in values:
        padded = np.concatenate((images[:, 0], np.zeros((4, 4))))
        for step in range(len(images)):
            mask = np.arange(step, step + 5) < len(images)
            expected.append((tuple(mask.tolist()), *map(tuple, padded[step : step + 5].tolist())))
    assert found == sorted(expected)
    assert torch.equal(batch["image"][:, 1, 0], batch["actions"][:, 0].float() * (1 / 255))


@pytest.mark.parametrize("as_tuple", [False, True])
def test_the_samples_of_a_batch_come_along_on_request(numbered, as_tuple):
    fields = {"data": Field("data", steps=range(2), pad="edge", pad_mask="is_there")}
    options = {"fields": fields, "sequences": Sequences(lengths="lengths"), "shuffle": "full"}
    names = ["data", "is_there", "index", "sequence", "step"]
    with H5Dataset(
        hdf5_path=numbered, device="cpu", with_index=True, as_tuple=as_tuple, **options
    ) as dataset:
        kept = []
        for given in dataset:
            batch = dict(zip(names, given, strict=True)) if as_tuple else given
            assert list(batch) == names
            assert batch["index"].dtype == torch.int64
            kept.append((batch["index"], batch["sequence"], batch["step"]))
            assert torch.equal(batch["data"][:, 0], batch["index"])
    index, sequence, step = map(torch.cat, zip(*kept, strict=True))  # which lasted
    assert sorted(index.tolist()) == list(range(N))
    assert torch.equal(sequence, (index >= 40).long())
    assert torch.equal(step, index - 40 * sequence)
