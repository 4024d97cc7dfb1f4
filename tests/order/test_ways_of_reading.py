"""A state and an order depend on the data, and not on how they are read."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from PIL import Image

from h5async import AsyncReader, Field, ImageField, RaggedField, SparseField
from h5async.config import Sequences
from h5async.errors import ReadError

Make = Callable[[h5py.File], None]

COUNT = 60
COMPOUND = np.dtype([("a", "<i2"), ("b", "<f4", (2,)), ("c", "S3")])
VALUES = np.arange(COUNT * COUNT, dtype="i4").reshape(COUNT, COUNT)
GZIP = {"chunks": (4, 7), "compression": "gzip"}


def plain(**how: Any) -> Make:
    def make(file: h5py.File) -> None:
        file.create_dataset("data", data=VALUES.astype(how.get("dtype")), **how)

    return make


def compact(file: h5py.File) -> None:
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plist.set_layout(h5py.h5d.COMPACT)
    space = h5py.h5s.create_simple(VALUES.shape)
    made = h5py.h5d.create(file.id, b"data", h5py.h5t.NATIVE_INT32, space, plist)
    h5py.Dataset(made)[...] = VALUES


def compound(**how: Any) -> Make:
    def make(file: h5py.File) -> None:
        table = np.zeros((COUNT, COUNT), COMPOUND)
        table["a"], table["b"][..., 1], table["c"] = VALUES, VALUES, b"ab"
        file.create_dataset("table", data=table, **how)

    return make


def text(file: h5py.File) -> None:
    of_c = h5py.h5t.C_S1.copy()
    of_c.set_size(6)
    of_c.set_strpad(h5py.h5t.STR_NULLTERM)
    space = h5py.h5s.create_simple(VALUES.shape)
    made = h5py.h5d.create(file.id, b"data", of_c, space)
    made.write(h5py.h5s.ALL, h5py.h5s.ALL, VALUES.astype("S5").astype("S6"))


def external(sizes: tuple[int, ...]) -> Make:
    def make(file: h5py.File) -> None:
        folder, found, begin = Path(file.filename).parent, [], 0
        for number, rows in enumerate(sizes):
            nbytes = rows * VALUES[0].nbytes
            (folder / f"raw{number}").write_bytes(VALUES.tobytes()[begin : begin + nbytes])
            found.append((str(folder / f"raw{number}"), 0, nbytes))
            begin += nbytes
        file.create_dataset("data", VALUES.shape, VALUES.dtype, external=found)

    return make


def virtual(*, overlaps: bool = False, **how: Any) -> Make:
    def make(file: h5py.File) -> None:
        layout = h5py.VirtualLayout(VALUES.shape, VALUES.dtype)
        for number in range(3):
            path = Path(file.filename).with_name(f"source{number}.hdf5")
            with h5py.File(path, "w") as other:
                other.create_dataset("x", data=VALUES[number * 20 : (number + 1) * 20], **how)
            source = h5py.VirtualSource(path.name, "x", (20, COUNT))
            layout[number * 20 : (number + 1) * 20] = source
            if overlaps:
                layout[5:10] = source[:5]
        file.create_virtual_dataset("data", layout)

    return make


def demos(**how: Any) -> Make:
    def make(file: h5py.File) -> None:
        for number in range(40):
            file.create_dataset(f"demo_{number}/x", data=VALUES[: 3 + number % 5], **how)

    return make


def sparse(**how: Any) -> Make:
    def make(file: h5py.File) -> None:
        group = file.create_group("X")
        group.attrs["encoding-type"], group.attrs["shape"] = "csr_matrix", (COUNT, COUNT)
        row, column = np.nonzero(VALUES % 3 == 0)
        group["indptr"] = np.searchsorted(row, np.arange(COUNT + 1))
        group.create_dataset("data", data=VALUES[row, column].astype("f4"), **how)
        group.create_dataset("indices", data=column.astype("i4"), **how)

    return make


def flat(**how: Any) -> Make:
    def make(file: h5py.File) -> None:
        file.create_dataset("values", data=VALUES.reshape(-1)[:600], **how)
        file["offsets"] = np.append(0, np.cumsum(1 + np.arange(COUNT) % 19))[: COUNT // 2 + 1]

    return make


def elements(file: h5py.File) -> None:
    made = file.create_dataset("data", (COUNT,), h5py.vlen_dtype("i4"))
    for number in range(COUNT):
        made[number] = VALUES[number, : number % 9]


def with_ids(ids: np.ndarray) -> Make:
    def make(file: h5py.File) -> None:
        plain()(file)
        file["ids"] = ids

    return make


IDS = np.repeat(np.arange(12), 5)
FLAT = {"x": RaggedField("values", offsets="offsets")}
IMAGES = {"x": ImageField("data", size=(2, 2))}


def images(file: h5py.File) -> None:
    made = file.create_dataset("data", (20,), h5py.vlen_dtype("u1"))
    for number in range(20):
        into = io.BytesIO()
        Image.fromarray(np.full((4, 5, 3), number, np.uint8)).save(into, "png")
        made[number] = np.frombuffer(into.getvalue(), np.uint8)


# A file, and the options with which it is read.
CASES: dict[str, tuple[Make, dict[str, Any]]] = {
    "contiguous": (plain(), {}),
    "contiguous_columns": (plain(), {"num_dim": 1}),
    "contiguous_pair": (plain(), {"num_dim": (0, 1)}),
    "contiguous_pair_turned": (plain(), {"num_dim": (1, 0)}),
    "chunked": (plain(chunks=(4, 7)), {}),
    "gzip": (plain(**GZIP), {}),
    "gzip_columns": (plain(**GZIP), {"num_dim": 1}),
    "gzip_pair": (plain(**GZIP), {"num_dim": (0, 1)}),
    "bools": (plain(dtype="?", **GZIP), {}),
    "compact": (compact, {}),
    "compact_pair": (compact, {"num_dim": (0, 1)}),
    "text": (text, {}),
    "text_pair": (text, {"num_dim": (0, 1)}),
    "member": (compound(), {"data_field": "table/b"}),
    "member_columns": (compound(), {"data_field": "table/b", "num_dim": 1}),
    "member_pair": (compound(), {"data_field": "table/b", "num_dim": (0, 1)}),
    "member_gzip": (compound(**GZIP), {"data_field": "table/a"}),
    "member_gzip_array": (compound(**GZIP), {"data_field": "table/b"}),
    "members": (
        compound(chunks=(2, COUNT), compression="gzip"),
        {"fields": {"a": "table/a", "b": "table/b"}},
    ),
    "external": (external((COUNT,)), {}),
    "external_columns": (external((COUNT,)), {"num_dim": 1}),
    "external_pair": (external((COUNT,)), {"num_dim": (0, 1)}),
    "external_files": (external((10, 30, 20)), {}),
    "external_files_columns": (external((10, 30, 20)), {"num_dim": 1}),
    "virtual": (virtual(), {}),
    "virtual_columns": (virtual(), {"num_dim": 1}),
    "virtual_pair": (virtual(), {"num_dim": (0, 1)}),
    "virtual_gzip": (virtual(**GZIP), {}),
    "virtual_gzip_columns": (virtual(**GZIP), {"num_dim": 1}),
    "virtual_overlapping": (virtual(overlaps=True), {}),
    "groups": (demos(), {"data_field": "x", "sequences": Sequences(groups="demo_*")}),
    "groups_gzip": (
        demos(chunks=(2, 9), compression="gzip"),
        {"fields": {"x": Field("x", steps=(0, 1))}, "sequences": Sequences(groups="demo_*")},
    ),
    "steps": (plain(), {"fields": {"x": Field("data", steps=(-1, 0, 1))}}),
    "steps_of_ids": (
        with_ids(IDS),
        {"fields": {"x": Field("data", steps=(0, 1))}, "sequences": Sequences(ids="ids")},
    ),
    "steps_of_pairs": (plain(), {"fields": {"x": Field("data", num_dim=(0, 1), steps=(0, 1))}}),
    "sparse": (sparse(), {"fields": {"x": "X"}}),
    "sparse_gzip": (sparse(chunks=(50,), compression="gzip"), {"fields": {"x": "X"}}),
    "dense": (sparse(), {"fields": {"x": SparseField("X", dense=True)}}),
    "flat": (flat(), {"fields": FLAT}),
    "flat_gzip": (flat(chunks=(16,), compression="gzip"), {"fields": FLAT}),
    "flat_that_grows": (flat(chunks=(100,), maxshape=(None,)), {"fields": FLAT}),
    "elements": (elements, {"fields": {"x": RaggedField("data")}}),
    "images": (images, {"fields": IMAGES}),
    "by_length": (flat(), {"fields": FLAT, "batch_values": 50, "bucket": 2}),
}
ORDERS: dict[str, dict[str, Any]] = {
    "in_order": {},
    "full": {"shuffle": "full"},
    "window": {"shuffle": "window", "window_bytes": 3000},
}
WAYS: dict[str, dict[str, Any]] = {
    "pread": {"io": "pread"},
    "map": {"io": "map"},
    "index_cache": {"index_cache": False},
    "open_for_writing": {},
    "open_for_writing_pread": {"io": "pread"},
}
REFUSED = ("elements", "images")  # where a file is open for writing


def written(make: Make, folder: Path, name: str = "f.h5") -> Path:
    folder.mkdir(exist_ok=True)
    with h5py.File(folder / name, "w") as file:
        make(file)
    return folder / name


def told(path: Path, **options: Any) -> tuple[dict[str, Any], list[list[int]]]:
    """Return the state after a batch, and the samples of all batches of an epoch."""
    given = {"batch_size": 29, "device": "cpu", "num_threads": 0, "allow_external": [path.parent]}
    if isinstance(options.get("num_dim"), tuple):  # which makes many samples
        given["batch_size"] = 290
    if "fields" not in options:
        given["labels_field"] = None
    with AsyncReader(hdf5_path=path, **{**given, **options}) as reader:
        found = [reader.get_next_batch().index.tolist()]
        state = json.loads(json.dumps(reader.state_dict()))
        found += [batch.index.tolist() for batch in reader]
    return state, found


@pytest.mark.filterwarnings("ignore::h5async.FileChangedWarning")  # HDF5 opens sources for writing
@pytest.mark.parametrize("case", CASES)
def test_states_and_orders_are_the_same(case, tmp_path):
    make, options = CASES[case]
    path = written(make, tmp_path / "here")
    expected = {name: told(path, **options, **order) for name, order in ORDERS.items()}
    for way, how in WAYS.items():
        with ExitStack() as opened:
            if way.startswith("open_for_writing") and case in REFUSED:
                continue
            if way.startswith("open_for_writing"):
                opened.enter_context(h5py.File(path, "r+"))
            for name, order in ORDERS.items():
                assert told(path, **{**options, **order, **how}) == expected[name], (way, name)


@pytest.mark.slow
@pytest.mark.sampled(4)  # a process takes long to start
@pytest.mark.parametrize("case", CASES)
def test_states_and_orders_are_the_same_in_a_helper_process(case, tmp_path):
    make, options = CASES[case]
    path, options = written(make, tmp_path / "here"), {**options, **ORDERS["window"]}
    assert told(path, **options, workers="process") == told(path, **options)


def all_told(folder: Path) -> dict[str, Any]:
    """Return what is told of all cases, or a few; files are written if they are not there."""
    found = {}
    for case in list(CASES)[:: 1 if os.environ.get("H5ASYNC_TESTS") == "all" else 5]:
        make, options = CASES[case]
        path = folder / case / "f.h5"
        if not path.exists():
            written(make, path.parent)
        found[case] = [told(path, **options, **order) for order in ORDERS.values()]
    return found


@pytest.mark.slow
def test_states_and_orders_are_the_same_without_the_core(tmp_path):
    expected = json.loads(json.dumps(all_told(tmp_path)))
    done = subprocess.run(
        [sys.executable, __file__, tmp_path],
        env={**os.environ, "H5ASYNC_CORE": "0"},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    found = json.loads(done.stdout)
    assert found.keys() == expected.keys()
    for case, several in found.items():
        assert several == expected[case], case


def other_offsets(file: h5py.File) -> None:
    """Write as many values, in samples of other lengths."""
    flat()(file)
    file["offsets"][1:-1] += 1


def swapped(file: h5py.File) -> None:
    demos()(file)
    for name, new in (("demo_1", "between"), ("demo_2", "demo_1"), ("between", "demo_2")):
        file.move(name, new)


def fewer(file: h5py.File) -> None:
    CASES["flat_that_grows"][0](file)
    file["values"].resize((599,))


def array(content: np.ndarray) -> Make:
    return lambda file: file.__setitem__("data", content)


# A case, and the file that comes in its place.
CHANGED: dict[str, tuple[str, Make]] = {
    "shape": ("contiguous", array(VALUES[:, :-1])),
    "other_shape": ("contiguous", array(VALUES.reshape(COUNT, COUNT // 2, 2))),
    "dtype": ("contiguous", plain(dtype="f4")),
    "byte_order": ("contiguous", plain(dtype=">i4")),
    "chunked_now": ("contiguous", plain(chunks=(COUNT, COUNT))),
    "chunk_shape": ("chunked", plain(chunks=(7, 4))),
    "compression": ("gzip", plain(chunks=(4, 7), compression="lzf")),
    "ids": ("steps_of_ids", with_ids(np.where(IDS == 3, 4, IDS))),
    "lengths": ("flat", other_offsets),
    "number_of_values": ("flat_that_grows", fewer),
    "lengths_of_groups": ("groups", swapped),
    "external_files": ("external", external((COUNT - 1, 1))),
    "source": ("virtual", virtual(chunks=(5, 5))),
    "overlapping_source": ("virtual_overlapping", virtual(overlaps=True, chunks=(5, 5))),
}


@pytest.mark.parametrize("change", CHANGED)
@pytest.mark.parametrize("is_written", [False, True])
def test_a_state_of_other_data_is_refused(change, is_written, tmp_path):
    case, make = CHANGED[change]
    before, options = CASES[case]
    path = written(before, tmp_path / "one")
    state, _ = told(path, **options)
    path = written(make, tmp_path / "other")
    given: dict[str, Any] = {"device": "cpu", "batch_size": 29, "allow_external": [path.parent]}
    if "fields" not in options:
        given["labels_field"] = None
    with ExitStack() as opened:
        if is_written:
            opened.enter_context(h5py.File(path, "r+"))
        reader = opened.enter_context(AsyncReader(hdf5_path=path, **{**given, **options}))
        with pytest.raises(ReadError, match="has changed since the state was saved"):
            reader.load_state_dict(state)


if __name__ == "__main__":
    print(json.dumps(all_told(Path(sys.argv[1]))))
