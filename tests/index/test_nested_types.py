"""Compounds whose members are out of order, and arrays of arrays."""

from __future__ import annotations

import contextlib
import json
import math
import os
import pickle
import signal

import h5py
import numpy as np
import pytest
from cases import each
from conftest import assert_reads_like_h5py, assert_same_bits, first_batch, reader_of, truth

from h5async.index.changes import fingerprint
from h5async.index.layout import DatasetLayout
from h5async.io.source import FileStamp
from h5async.process.child import HelperDied

INNER = np.dtype({"names": ["a", "b"], "formats": ["<i4", "<f4"], "offsets": [4, 0]})
OUT_OF_ORDER = {
    "out of order": INNER,
    "within a compound": np.dtype([("x", INNER), ("y", "i1")]),
    "an array within": np.dtype([("x", INNER, (2,)), ("y", "i1")]),
    "with gaps": np.dtype(
        {"names": ["a", "b"], "formats": ["<i4", "<i2"], "offsets": [8, 0], "itemsize": 16}
    ),
}


@pytest.fixture(params=OUT_OF_ORDER.values(), ids=OUT_OF_ORDER.keys())
def compounds(path, request):
    values = np.zeros(40, request.param)
    values.view(np.uint8)[...] = np.arange(values.nbytes) % 251
    with h5py.File(path, "w") as file:
        file.create_dataset("data", data=values, chunks=(7,), compression="gzip")
    return path


@pytest.mark.sampled(2)
@pytest.mark.parametrize("workers", ["thread", "process"])
def test_members_out_of_order_have_a_state(compounds, workers):
    options = {"batch_size": 6, "shuffle": "full", "workers": workers}
    with reader_of(compounds, **options) as reader:
        reader.get_next_batch()
        state = json.loads(json.dumps(reader.state_dict()))
        expected = reader.get_next_batch().copy()
    with reader_of(compounds, **options) as reader:
        reader.load_state_dict(state)
        found = reader.get_next_batch()
        assert found.index.tolist() == expected.index.tolist()
        assert_same_bits(found.data, truth(compounds)[found.index])


def test_members_out_of_order_are_pickled(compounds):
    with reader_of(compounds) as reader, pickle.loads(pickle.dumps(reader)) as copy:
        assert_same_bits(copy.get_next_batch().data, truth(compounds)[:32])


@pytest.mark.slow
def test_members_out_of_order_outlive_a_helper(compounds):
    with reader_of(compounds, workers="process", batch_size=10) as reader:
        found = [reader.get_next_batch().copy()]
        os.kill(reader._engine.filler.supervisors[0].process._popen.pid, signal.SIGKILL)
        while len(found) < 3:
            with contextlib.suppress(HelperDied):  # may cost a batch
                found.append(reader.get_next_batch().copy())
        for batch in found:
            assert_same_bits(batch.data, truth(compounds)[batch.index])


def layout_of(path, dtype):
    return DatasetLayout(
        file=str(path),
        stamp=FileStamp.of(path),
        path="data",
        shape=(10, 3),
        dtype=np.dtype(dtype),
        sample_axis=0,
        storage="contiguous",
        fallback_reason=None,
        fill=np.zeros((), dtype),
        offset=2048,
    )


WITH_A_GAP = {"names": ["a", "b"], "formats": ["u1", "<f4"], "offsets": [0, 4]}


@each(
    "dtype, expected",
    [
        ("<f4", "172e682b2149ebe4e8cdd9e3e217f239"),
        (">i2", "101b742271d50c67ac9a35fdd45d0c63"),
        ("S3", "a9176e82614049fc300cca7dbe1fd89b"),
        ("V5", "69503bd26c90803c5370d0c267f7a73c"),
        ("?", "835b1b47f4ae0adeef56237d379ecf47"),
        ([("a", "<i4"), ("b", "<f8", (2, 3))], "4ff4850e155f5e300066607b4f6c8308"),
        (
            {"names": ["a", "b"], "formats": ["u1", "<f4"], "offsets": [0, 4]},
            "b8d8ff19f04f9513afe35624532e83a8",
        ),
        ([("a", [("b", ">u2"), ("c", "S2")]), ("d", "<c8")], "0171dbe8a190d079b32e3b43790e0048"),
    ],
)
def test_states_that_were_saved_stay_good(path, dtype, expected):
    path.write_bytes(bytes(5000))
    assert fingerprint([layout_of(path, dtype)]) == expected


def test_fingerprints_tell_members_out_of_order_apart(path):
    path.write_bytes(bytes(5000))
    others = [
        {"names": ["b", "a"], "formats": ["<i4", "<f4"], "offsets": [4, 0]},
        {"names": ["a", "b"], "formats": ["<f4", "<i4"], "offsets": [4, 0]},
        {"names": ["a", "b"], "formats": ["<i4", "<f4"], "offsets": [8, 0]},
        {"names": ["a", "b"], "formats": ["<i4", "<f4"], "offsets": [4, 0], "itemsize": 16},
        {"names": ["a", "b"], "formats": ["<i4", "<f4"], "offsets": [2, 0]},
    ]
    dtypes = [INNER, *map(np.dtype, others), *OUT_OF_ORDER.values()]
    prints = {str(dtype): fingerprint([layout_of(path, dtype)]) for dtype in dtypes}
    assert len(set(prints.values())) == len(prints)


def nested_type(*dimensions, base=h5py.h5t.STD_I32LE):
    for dimension in reversed(dimensions):
        base = h5py.h5t.array_create(base, dimension)
    return base


@pytest.mark.parametrize("storage", ["contiguous", "chunked", "gzip", "compact", "nothing", "fill"])
@pytest.mark.parametrize("dimensions", [((3,), (2,)), ((2,), (1, 3), (2,)), ((1,), (1,))])
def test_arrays_of_arrays(path, storage, dimensions):
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    if storage == "compact":
        plist.set_layout(h5py.h5d.COMPACT)
    elif storage != "contiguous":
        plist.set_chunk((4,))
    if storage == "gzip":
        plist.set_deflate(1)
    stored = nested_type(*dimensions)
    with h5py.File(path, "w") as file:
        space = h5py.h5s.create_simple((10,))
        dataset = h5py.h5d.create(file.id, b"data", stored, space, plist)
        if storage not in ("nothing", "fill"):
            shape = (10, *(n for part in dimensions for n in part))
            values = np.arange(math.prod(shape), dtype="<i4").reshape(shape)
            dataset.write(h5py.h5s.ALL, h5py.h5s.ALL, values, stored)
    for num_threads in (0, 2):
        assert_reads_like_h5py(path, num_threads=num_threads)
    if storage == "gzip":  # the type is pickled for a helper, however it is stored
        assert first_batch(path, workers="process").data.shape == truth(path).shape


def test_arrays_of_arrays_in_a_compound(path):
    stored = h5py.h5t.create(h5py.h5t.COMPOUND, 28)
    stored.insert(b"x", 0, nested_type((3,), (2,)))
    stored.insert(b"y", 24, h5py.h5t.STD_I32LE)
    with h5py.File(path, "w") as file:
        space = h5py.h5s.create_simple((10,))
        dataset = h5py.h5d.create(file.id, b"data", stored, space)
        values = np.arange(70, dtype="<i4").view("V28")
        dataset.write(h5py.h5s.ALL, h5py.h5s.ALL, values, stored)
    expected = truth(path)
    assert_same_bits(first_batch(path, data_field="data/x").data, expected["x"])
    assert_same_bits(first_batch(path, data_field="data/y").data, expected["y"])
    assert_same_bits(first_batch(path).data["x"], expected["x"])
