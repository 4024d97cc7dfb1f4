"""Forms that the documentation shows, which type checkers must accept. Nothing of this is run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Unpack

import numpy as np

import h5async
from h5async import (
    AsyncReader,
    AudioField,
    Batch,
    Csr,
    Field,
    ImageField,
    Images,
    Ragged,
    RaggedField,
    ReaderConfig,
    ReaderOptions,
    ReaderStats,
    Sequences,
    SparseField,
    Split,
)
from h5async.torch import H5Dataset


def step(*arrays: Any) -> None: ...


def augment(data: Any, labels: Any, *, rng: np.random.Generator) -> tuple[Any, Any]:
    return data + rng.random(), labels


def loops(reader: AsyncReader) -> None:
    for data, labels in reader:
        step(data, labels)
    for batch in reader:
        step(batch.data, batch["labels"], batch[0], batch.index, batch.epoch, batch.last)
    is_last: bool = reader.fetch_data()
    taken: Batch = reader.get_next_batch(timeout=10)
    reader.fetch_data([1, 2, 3])
    some: Batch = reader.read(np.arange(10))
    kept: Batch = some.copy()
    stats: ReaderStats = reader.stats()
    print(is_last, len(reader), taken.size, kept.keys(), str(stats))
    print(reader.layouts["data"].shape, reader.categories, reader.config.batch_size)
    reader.load_state_dict(reader.state_dict())
    reader.set_epoch(3)
    reader.close()


def forms(path: Path, config: ReaderConfig, options: ReaderOptions, more: dict[str, Any]) -> None:
    AsyncReader(hdf5_path="train.h5", batch_size=256, shuffle="full")
    AsyncReader(hdf5_path=path, batch_size=256, shuffle=True, num_threads=8)
    AsyncReader(hdf5_path=["a.h5", "b.h5"], labels_field=None)
    AsyncReader(hdf5_path=sorted(path.glob("*.h5")), drop_last=True)
    AsyncReader({"hdf5_path": "train.h5", "batch_size": 256, "shuffle": "full"}, num_threads=8)
    AsyncReader({"hdf5_path": "train.h5"}, **more)
    AsyncReader("options.toml", batch_size=64)
    AsyncReader(path / "options.toml")
    AsyncReader(config)
    AsyncReader(config, **options)
    AsyncReader(**options)
    AsyncReader(**more)
    AsyncReader(ReaderConfig(hdf5_path="train.h5", max_batch_bytes="2GB"))
    AsyncReader(hdf5_path="*.nc", data_field="t2m", labels_field=None, num_dim="time")
    AsyncReader(hdf5_path="a.h5", num_dim=(0, 1))
    AsyncReader(hdf5_path="a.h5", h_dim=1, w_dim=2, cha_dim=3)
    AsyncReader(hdf5_path="a.h5", window_bytes="512MiB", shuffle="window", seed=np.int64(3))
    AsyncReader(hdf5_path="a.h5", cache="host", cache_bytes=1 << 30)
    AsyncReader(hdf5_path="a.h5", device="cuda:1", decode="device", pin_memory=False)
    AsyncReader(hdf5_path="a.h5", postprocess=augment, workers=4)
    AsyncReader(hdf5_path="a.h5", postprocess="module:function", workers="process")
    AsyncReader(hdf5_path="a.h5", rank=0, world_size=2, timeout=30.0)
    AsyncReader(hdf5_path="a.h5", allow_external="/data", allow_missing=True, io="pread")
    AsyncReader(hdf5_path="a.h5", allow_external=["/data", path], index_cache=False)
    AsyncReader(hdf5_path="a.h5", index_cache="/scratch", copy=True, debug_lifetimes=True)
    AsyncReader(hdf5_path="s3://b/a.h5", cache="disk", cache_dir=path, cache_bytes="1GiB")
    with AsyncReader(hdf5_path="a.h5", prefetch=3) as reader:
        loops(reader)


def selections(sampler: Iterable[list[int]], mask: np.ndarray) -> Iterator[AsyncReader]:
    parts = {"train": 0.9, "val": 0.1}
    yield AsyncReader(hdf5_path="a.h5", indices=slice(100, None))
    yield AsyncReader(hdf5_path="a.h5", indices="40000:")
    yield AsyncReader(hdf5_path="a.h5", indices=range(10))
    yield AsyncReader(hdf5_path="a.h5", indices=[1, 2, 3])
    yield AsyncReader(hdf5_path="a.h5", indices=mask)
    yield AsyncReader(hdf5_path="a.h5", indices=Path("rows.npy"))
    yield AsyncReader(hdf5_path="a.h5", indices=Split("train", parts, seed=1, by="patient"))
    yield AsyncReader(hdf5_path="a.h5", indices=Split(name="val", parts=parts, stratify="labels"))
    yield AsyncReader(hdf5_path="a.h5", indices={"name": "train", "parts": parts})
    yield AsyncReader(hdf5_path="a.h5", weights="balanced", epoch_samples=10_000)
    yield AsyncReader(hdf5_path="a.h5", weights=np.ones(10))
    yield AsyncReader(hdf5_path="*.h5", weights={"a.h5": 1, "b.h5": 0.5})
    yield AsyncReader(hdf5_path="a.h5", sampler=sampler)
    yield AsyncReader(hdf5_path="a.h5", sampler=np.random.default_rng(0).permutation(10))


def fields() -> Iterator[AsyncReader]:
    window: dict[str, Any] = {"steps": range(-3, 1), "pad": "edge"}
    mixed = {"image": Field("data", dtype="f4", scale=1 / 255), "label": "labels"}
    yield AsyncReader(hdf5_path="a.h5", fields={"x": "data", "y": "labels"})
    yield AsyncReader(hdf5_path="a.h5", fields=mixed)
    yield AsyncReader(hdf5_path="a.h5", fields={"x": {"path": "data", "dtype": "f4"}})
    yield AsyncReader(
        hdf5_path="a.h5",
        fields={
            "energy": Field("table/energy"),
            "image": Field("data", axes=(0, 3, 1, 2), dtype=np.float32, scale=[1, 2, 3], offset=1),
            "named": Field("t2m", num_dim="time", axes=("time", "lat", "lon"), decode_cf=True),
            "pair": Field("density", (0, 1)),
            "task": Field("data/demo_0@task", per="sequence", categories=True),
            "steps": Field("actions", steps=[-1, 0], pad="edge", pad_mask="is_there"),
            "window": Field("actions", **window),
            "text": Field("data", steps="-3:1"),
            "tokens": RaggedField("tokens", offsets="index", offsets_kind="lengths", pad_to=128),
            "jpeg": ImageField("jpeg", size=224, crop="random", flip=True, axes=(0, 3, 1, 2)),
            "photo": ImageField("photo", size=(224, 160), crop_scale=(0.2, 1), on_error="zero"),
            "flac": AudioField("flac", sample_rate=16000, frames=8, crop="random", dense=True),
            "counts": SparseField("X", columns=["gene7", "gene0"], dense=True),
            "others": SparseField("X", columns=np.arange(10), dtype="float32"),
        },
        sequences=Sequences(groups="data/demo_*", only="mask/train", every=2),
    )
    yield AsyncReader(hdf5_path="a.h5", sequences={"ends": "episode_ends"})
    yield AsyncReader(hdf5_path="a.h5", sequences=Sequences(last=("terminals", "timeouts")))


def datasets(reader: AsyncReader, options: ReaderOptions) -> None:
    for batch in H5Dataset(hdf5_path="train.h5", batch_size=256, shuffle="full"):
        step(batch["data"], batch["labels"])
    with H5Dataset(reader, as_tuple=True) as dataset:
        dataset.set_epoch(1)
        dataset.load_state_dict(dataset.state_dict())
    H5Dataset({"hdf5_path": "train.h5"}, indices=range(10))
    H5Dataset(options, batch_size=3)
    H5Dataset("options.toml", as_tuple=True, drop_last=True)


def of_mine(**options: Unpack[ReaderOptions]) -> AsyncReader:
    return AsyncReader({"hdf5_path": "train.h5", "shuffle": "full"}, **options)


def several(rows: Csr, text: Ragged, images: Images) -> None:
    step(rows.to_scipy(), rows.to_dense(), text.to_padded(), text[0], images, text.lengths)


def errors() -> None:
    try:
        of_mine(hdf5_path="train.h5", batch_size=3)
    except (h5async.ConfigError, h5async.ReadError, h5async.H5AsyncError) as error:
        print(error, h5async.__version__)
