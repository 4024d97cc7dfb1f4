"""Wrong forms, which type checkers must reject, each where a comment says so. Nothing of it is run.

A comment that ignores an error is an error itself where there is none to ignore.
"""

from __future__ import annotations

from h5async import (
    AsyncReader,
    AudioField,
    Field,
    ImageField,
    RaggedField,
    ReaderConfig,
    ReaderOptions,
    Sequences,
    SparseField,
    Split,
)
from h5async.torch import H5Dataset

# Names that are not there.
AsyncReader(hdf5_path="a.h5", batchsize=3)  # type: ignore[call-arg]
AsyncReader(hdf5_path="a.h5", num_workers=3)  # type: ignore[call-arg]
AsyncReader("options.toml", batchSize=3)  # type: ignore[call-arg]
ReaderConfig(hdf5_path="a.h5", shufle="full")  # type: ignore[call-arg]
ReaderConfig.load(None, hdf5="a.h5")  # type: ignore[call-arg]
Field("data", type="f4")  # type: ignore[call-arg]
Field("data", step=range(3))  # type: ignore[call-arg]
RaggedField("data", pad=128)  # type: ignore[arg-type]
RaggedField("data", padto=128)  # type: ignore[call-arg]
ImageField("jpeg", resize=224)  # type: ignore[call-arg]
AudioField("flac", rate=16000)  # type: ignore[call-arg]
SparseField("X", sparse=False)  # type: ignore[call-arg]
Sequences(group="data/*")  # type: ignore[call-arg]
Split("train", {"train": 1.0}, random_state=3)  # type: ignore[call-arg]
H5Dataset(hdf5_path="a.h5", num_workers=3)  # type: ignore[call-arg]

# Values that do not fit.
AsyncReader(hdf5_path="a.h5", batch_size="3")  # type: ignore[arg-type]
AsyncReader(hdf5_path="a.h5", shuffle="windows")  # type: ignore[arg-type]
AsyncReader(hdf5_path="a.h5", drop_last="yes")  # type: ignore[arg-type]
AsyncReader(hdf5_path="a.h5", workers="processes")  # type: ignore[arg-type]
AsyncReader(hdf5_path="a.h5", fields=["data"])  # type: ignore[arg-type]
AsyncReader(hdf5_path=3)  # type: ignore[arg-type]
AsyncReader(3)  # type: ignore[arg-type]
ReaderConfig(hdf5_path="a.h5", cache="memory")  # type: ignore[arg-type]
Field("data", steps=range(3), pad="wrap")  # type: ignore[arg-type]
Field(3)  # type: ignore[arg-type]
ImageField("jpeg", crop="middle")  # type: ignore[arg-type]
RaggedField("values", offsets_kind="starts")  # type: ignore[arg-type]
Split("train", 0.9)  # type: ignore[arg-type]
H5Dataset(hdf5_path="a.h5", shuffle="windows")  # type: ignore[arg-type]

# Options as a value.
options: ReaderOptions = {"hdf5_path": "a.h5", "batchsize": 3}  # type: ignore[typeddict-unknown-key]

# What a reader and a batch do not have, or do not take.
reader = AsyncReader(hdf5_path="a.h5")
reader.next_batch()  # type: ignore[attr-defined]
reader.get_next_batch(wait=3)  # type: ignore[call-arg]
