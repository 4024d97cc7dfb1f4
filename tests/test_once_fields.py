"""Fields that each sequence, each file, or the dataset has once, against h5py."""

from __future__ import annotations

import functools

import h5py
import numpy as np
import pytest
from cases import each
from hdf5files import TEXT, write_compact

from h5async import (
    AsyncReader,
    Field,
    Sequences,
)

COUNTS = (23, 0, 1, 46)  # rows of each file
ENDS = ((5, 5, 14, 23), (), (1,), (3, 40, 46))
ROW = (6, 5)


def write(path, number: int, rng: np.random.Generator) -> None:
    """Write a file with values of all ways in which they may be stored."""
    count, ends = COUNTS[number], np.array(ENDS[number], np.int64)
    lengths = np.diff(ends, prepend=0)
    state = rng.random(ROW).astype("f4")
    with h5py.File(path.with_suffix(".mask.h5"), "w") as file:
        file["mask"], file.attrs["note"] = state > 0.5, f"mask {number}"
        file["row"] = np.arange(count) * 3
    with h5py.File(path, "w") as file:
        file["data"], file["ends"], file["lengths"] = rng.random((count, 3)), ends, lengths
        file["ids"] = np.repeat(np.arange(len(ends)), lengths)
        # Once in each file.
        file["array"], file["big"] = state, state.astype(">f8")
        file.create_dataset("zipped", data=state, chunks=(4, 2), compression="gzip", shuffle=True)
        file.create_dataset("never", ROW, "i2", chunks=(4, 2), fillvalue=number)
        file.create_dataset("h5pys", data=state.astype("i4"), chunks=(6, 5), scaleoffset=0)
        write_compact(file, "compact", state)
        table = np.zeros(4, [("a", "i4"), ("b", "f8", (2,))])
        table["a"], table["b"] = np.arange(4) + number, number
        file["table"] = table
        layout = h5py.VirtualLayout(ROW, "f4")
        layout[:3], layout[3:] = (h5py.VirtualSource(file["zipped"])[at] for at in np.s_[3:, :3])
        file.create_virtual_dataset("virtual", layout)
        file["which"], file["flag"], file["name"] = number * 7, number == 3, f"file {number} é"
        file["fixed"] = np.bytes_(f"f{number}")
        file["names"] = np.array([f"{n} of {number}" for n in range(3)], TEXT)
        file["linked"] = h5py.ExternalLink(path.with_suffix(".mask.h5").name, "mask")
        file["literal@name"] = number
        file.attrs["title"], file["array"].attrs["shape of it"] = f"run {number}", (number, 2.5)
        # Once in each sequence.
        rows = rng.random((len(ends), 2, 3)).astype("f4")
        file["of/rows"], file["of/last"] = rows, np.moveaxis(rows, 0, 2)
        if len(ends):
            chunks = (min(2, len(ends)), 1, 3)
            file.create_dataset("of/zipped", data=rows, chunks=chunks, compression="gzip")
        else:
            file["of/zipped"] = rows
        file["of/task"] = np.arange(len(ends)) + 10 * number
        file["of/names"] = np.array([f"s{n} {'x' * n}" for n in range(len(ends))], TEXT)
        file["of"].attrs["success"] = np.arange(len(ends)) % 2 == 0


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder, rng = tmp_path_factory.mktemp("once"), np.random.default_rng(0)
    paths = [folder / f"{number}.h5" for number in range(len(COUNTS))]
    for number, path in enumerate(paths):
        write(path, number, rng)
    return paths


OF_FILES = {
    name: Field(name, per="file")
    for name in "array big zipped never h5pys compact table table/b virtual which flag name fixed"
    " names linked literal@name @title array@shape of it".replace(" of it", "_of_it").split()
}
OF_FILES["array@shape_of_it"] = Field("array@shape of it", per="file")
OF_SEQUENCES = {
    name: Field(name, per="sequence")
    for name in ("of/rows", "of/zipped", "of/task", "of/names", "of@success")
} | {"of/last": Field("of/last", num_dim=2, per="sequence")}


@functools.cache
def stored(file_path, path: str):
    """Return what h5py reads at a path, strings as bytes."""
    with h5py.File(file_path) as file:
        if "@" in path and path not in file:
            group, _, name = path.rpartition("@")
            value = file[group or "/"].attrs[name]
        else:
            value = file["table"]["b"] if path == "table/b" else file[path][()]
    array = np.asarray(value)
    if array.dtype.kind in "OU":
        texts = [one.encode() if isinstance(one, str) else one for one in array.reshape(-1)]
        return np.array(texts, "S").reshape(array.shape)
    return array


def expected(files, field: Field, index, sequences: bool) -> np.ndarray:
    """Return the value of each sample of a batch."""
    found = []
    counts = np.cumsum([0, *COUNTS])
    for sample in index.tolist():
        number = int(np.searchsorted(counts, sample, side="right")) - 1
        value = stored(files[number], field.path)
        if sequences:
            at = np.searchsorted(ENDS[number], sample - counts[number], side="right")
            value = np.moveaxis(value, field.num_dim, 0)[at]
        found.append(value)
    return np.stack(found)


def check(batch, files, fields: dict[str, Field], sequences: bool = False) -> None:
    for name, field in fields.items():
        wanted = expected(files, field, batch.index, sequences)
        found = batch[name].get() if hasattr(batch[name], "get") else batch[name]
        assert found.shape == wanted.shape, name
        assert found.dtype.newbyteorder("=") == wanted.dtype.newbyteorder("=") or (
            wanted.dtype.kind == "S"
        ), name
        assert (found == wanted).all(), name


WAYS = [
    {},
    {"shuffle": "full"},
    {"shuffle": "window", "window_bytes": 4096},
    {"num_threads": 0, "io": "pread"},
    {"cache": "host", "shuffle": "full"},
    {"workers": "process", "shuffle": "full"},
    {"rank": 1, "world_size": 2, "shuffle": "window"},
    {"indices": slice(10, 60, 3)},
    {"weights": "balanced", "epoch_samples": 40},
]


def epochs(files, fields, sequences, **options):
    where = {"hdf5_path": [str(path) for path in files], "fields": fields, "batch_size": 16}
    with AsyncReader(**where, **options, sequences=sequences, device="cpu") as reader:
        for _ in range(2):
            for batch in reader:
                assert (batch["labels"] == batch["again"]).all()
                yield batch


PLAIN = {"labels": Field("ids"), "again": Field("ids")}


@each("options", WAYS)
def test_values_of_files_reach_each_sample(files, options):
    fields = {"array": OF_FILES["array"], **PLAIN, **OF_FILES}
    for batch in epochs(files, fields, None, **options):
        check(batch, files, OF_FILES)


@each("kind", ["ends", "lengths"])
@each("options", WAYS)
def test_values_of_sequences_reach_each_sample(files, kind, options):
    fields = {**PLAIN, **OF_SEQUENCES, "which": OF_FILES["which"]}
    for batch in epochs(files, fields, Sequences(**{kind: kind}), **options):
        check(batch, files, OF_SEQUENCES, sequences=True)
        check(batch, files, {"which": OF_FILES["which"]})


def test_without_the_core_they_are_the_same(files, h5py_way):
    fields = {**PLAIN, **OF_FILES, **OF_SEQUENCES}
    for batch in epochs(files, fields, Sequences(ends="ends"), shuffle="full"):
        check(batch, files, OF_FILES)
        check(batch, files, OF_SEQUENCES, sequences=True)
