"""Datasets that are recognized by their object headers have the layouts that each has alone."""

from __future__ import annotations

import h5py
import numpy as np
import pytest
from test_alike import same

from h5async import AsyncReader, Field, Sequences
from h5async.errors import H5AsyncError
from h5async.index.alikedatasets import Headers
from h5async.index.datasets import Indexer
from h5async.index.hdf5 import checksum_function
from h5async.index.links import Reach, open_index
from h5async.index.metadata import Further, layout_at, read_layouts
from h5async.io.references import header_blocks

NUM_GROUPS = 12
NAMES = ("a", "b", "c")
KINDS = {
    "contiguous": ("f4", {}),
    "gzip": ("i8", {"chunks": (3, 3), "compression": "gzip"}),
    "chunks": ("u1", {"chunks": (3, 2)}),
    "big": (">f8", {}),
    "text": ("S3", {}),
    "array": (np.dtype(("i2", (2,))), {}),
    "compound": ([("x", "f4"), ("y", "i2")], {}),
    "bool": ("?", {}),
    "filled": ("f4", {"fillvalue": 3}),
    "resizable": ("i4", {"maxshape": (None, 3), "chunks": (3, 3)}),
    "times": ("i8", {"track_times": True}),
}


def write_groups(path, rng, libver):
    """Write groups of datasets with the same names, of which some are of another kind."""
    usual = dict(zip(NAMES, rng.choice(list(KINDS), len(NAMES)), strict=True))
    with h5py.File(path, "w", libver=libver) as file:
        for at in range(NUM_GROUPS):
            group = file.create_group(f"g{at}")
            for name in NAMES:
                kind = usual[name] if rng.random() < 0.9 else rng.choice(list(KINDS))
                dtype, how = KINDS[kind]
                rows = int(rng.integers(3, 40))
                made = group.create_dataset(name, (rows, 3), dtype, **how)
                if rng.random() < 0.9:
                    made[...] = np.zeros(made.shape, made.dtype)
                for number in range(3 * NAMES.index(name) if rng.random() < 0.9 else 2):
                    made.attrs[f"scale{number}"] = rng.random((4, 4))
            if rng.random() < 0.1:
                group[f"__categories/{NAMES[0]}"] = [1, 2]
            if at and rng.random() < 0.2:
                del group["b"]
                group["b"] = h5py.SoftLink("/g0/b") if rng.random() < 0.5 else file["g0/b"]


def found_or_raised(read, *arguments):
    try:
        return read(*arguments)
    except H5AsyncError as error:
        return str(error)


def require_same(path):
    """Compare the layouts of all datasets, found one after the other, with those of each alone."""
    paths = [f"g{number}/{name}" for number in range(NUM_GROUPS) for name in NAMES]
    alone = {
        one: found_or_raised(lambda one=one: read_layouts(path, {"x": Field(one)}, Reach())["x"])
        for one in paths
    }
    with open_index(path) as file:
        indexer = Indexer(file, Reach())
        for one in paths:
            found = found_or_raised(layout_at, indexer, one, 0, Further(may_be_codes=False))
            assert type(found) is type(alone[one])
            if not isinstance(found, str):
                same(found, alone[one])


@pytest.fixture
def recognized(monkeypatch):
    """Return the paths of datasets that were recognized."""
    found, find = [], Headers.find

    def noting(headers, key, address, path, *rest):
        layout = find(headers, key, address, path, *rest)
        if layout is not None:
            found.append(path)
        return layout

    monkeypatch.setattr(Headers, "find", noting)
    return found


@pytest.mark.sampled(4)
@pytest.mark.parametrize("libver", [None, ("v108", "v108"), "latest"])
@pytest.mark.parametrize("seed", range(8))
def test_layouts_are_those_of_each_alone(tmp_path, recognized, seed, libver):
    path = tmp_path / "groups.h5"
    write_groups(path, np.random.default_rng(seed), libver)
    require_same(path)
    assert len(recognized) > 3


@pytest.mark.slow
@pytest.mark.parametrize("libver", [None, ("v108", "v108"), "latest"])
@pytest.mark.parametrize("seed", range(8))
def test_damaged_headers_are_what_they_are_alone(tmp_path, seed, libver):
    path, rng = tmp_path / "groups.h5", np.random.default_rng(seed)
    write_groups(path, rng, libver)
    image, headers = path.read_bytes(), {}
    with h5py.File(path) as file:
        for number in range(NUM_GROUPS):
            for dataset in file[f"g{number}"].values():
                if isinstance(dataset, h5py.Dataset):
                    at = h5py.h5o.get_info(dataset.id).addr
                    blocks = header_blocks(lambda at, n: image[at : at + n], at)
                    headers |= {begin: nbytes for begin, nbytes, _ in blocks}
    for _ in range(12):
        found = bytearray(image)
        for begin, nbytes in rng.permutation(list(headers.items()))[: rng.integers(1, 4)]:
            at = begin + int(rng.integers(nbytes))
            found[at] = rng.choice([0, 1, 2, 255, found[at] ^ 1, found[at] ^ 128])
        for begin, nbytes in headers.items():
            if found.startswith((b"OHDR", b"OCHK"), begin):
                end = begin + nbytes - 4
                checksum = checksum_function()(bytes(found[begin:end]), nbytes - 4, 0)
                found[end : end + 4] = checksum.to_bytes(4, "little")
        path.write_bytes(found)
        require_same(path)


def test_hdf5_opens_two_datasets_of_each_name(tmp_path, monkeypatch, recognized):
    path, read = tmp_path / "groups.h5", []
    with h5py.File(path, "w") as file:
        for number in range(20):
            file[f"demo_{number}/actions"] = np.full((number + 5, 4), number, "f4")
            file.create_dataset(
                f"demo_{number}/images", data=np.full((number + 5, 6), number), **KINDS["gzip"][1]
            )
    ask = Indexer.layout
    monkeypatch.setattr(Indexer, "layout", lambda *a: read.append(a[1]) or ask(*a))
    with (
        AsyncReader(
            hdf5_path=path,
            fields={"actions": "actions", "images": "images"},
            sequences=Sequences(groups="demo_*"),
            batch_size=1000,
            device="cpu",
        ) as reader,
        h5py.File(path) as file,
    ):
        batch = reader.get_next_batch()
        for name in ("actions", "images"):
            expected = np.concatenate([file[f"demo_{n}/{name}"][:] for n in range(20)])
            np.testing.assert_array_equal(getattr(batch, name), expected)
    assert sorted(read) == [f"demo_{n}/{name}" for n in (0, 1) for name in ("actions", "images")]
    assert len(recognized) == 36


@pytest.mark.parametrize("what", ["writer", "userblock", "unlike"])
def test_others_are_left_to_hdf5(tmp_path, recognized, what):
    path = tmp_path / "groups.h5"
    how = {"userblock_size": 512} if what == "userblock" else {}
    with h5py.File(path, "w", **how) as file:
        for number in range(NUM_GROUPS):
            for name in NAMES:
                dtype = f"S{number + 1}" if what == "unlike" else "f4"
                file.create_dataset(f"g{number}/{name}", (4, 3), dtype)[...] = 0
        file.flush()
        if what == "writer":
            require_same(path)
    require_same(path)
    assert bool(recognized) == (what == "writer")
