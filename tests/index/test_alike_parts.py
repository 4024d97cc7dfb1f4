"""Datasets of many groups that are alike: one layout and arrays, read and saved as all others."""

from __future__ import annotations

import contextlib
import copy
import pickle
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_saved_index import rewrite, saved_content
from test_saved_layouts import ODD, places

from h5async import AsyncReader, Field, H5AsyncError, Sequences
from h5async.cli import app
from h5async.index import datasettable
from h5async.index.changes import fingerprint
from h5async.index.contents import Grouping
from h5async.index.datasettable import Columns, kinds_of, unit_bounds, unit_nbytes
from h5async.index.extents import SMALL_NBYTES, TableBuilder, kept_whole_nbytes
from h5async.index.links import Reach
from h5async.index.metadata import read_layouts

GROUPS = 30
GROUPING = Grouping("data/demo_*")
DATASETS: dict[str, dict[str, Any]] = {
    "small": {"shape": (4,), "dtype": ">f4"},
    "mixed": {"shape": (2500,), "dtype": "f4"},  # some are small
    "large": {"shape": (SMALL_NBYTES,), "dtype": "u1"},
    "more": {"shape": (3,), "dtype": "i2"},
    "never": {"shape": (2,), "dtype": "f8", "fillvalue": 3},
    "gzip": {"shape": (50,), "dtype": "i4", "chunks": (4, 50), "compression": "gzip"},
    "pieces": {"shape": (6, 10), "dtype": "i4", "chunks": (3, 4, 3), "compression": "gzip"},
    "chunked": {"shape": (7,), "dtype": "i2", "chunks": (2, 7)},
    "one_chunk": {"shape": (7,), "dtype": "i2", "chunks": (64, 7)},
    "text": {"shape": (2,), "dtype": "S5"},
}
FIELDS = {name: Field(name) for name in DATASETS}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """Make a file of groups of datasets, which differ in their length."""
    found, rng = tmp_path_factory.mktemp("alike") / "a.h5", np.random.default_rng(0)
    with h5py.File(found, "w") as file:
        for number in range(GROUPS):
            rows = int(rng.integers(1, 12))
            group = file.create_group(f"data/demo_{number}")
            for name, options in DATASETS.items():
                count, rest = rows + (name == "more"), dict(options)
                shape = (count, *rest.pop("shape"))
                if "chunks" in rest:
                    rest["maxshape"] = (None, *shape[1:])
                dataset = group.create_dataset(name, shape, **rest)
                if name == "text":
                    dataset[...] = rng.choice([b"a", b"bc ", b"", b"defgh"], shape)
                elif name != "never":
                    dataset[...] = rng.integers(0, 99, shape)
    return found


@pytest.fixture(scope="module")
def index(path):
    """Save the index of that file."""
    found = path.with_suffix(".h5idx")
    table = ["--sequences", f"{{groups = '{GROUPING.pattern}'}}"]
    app(["index", str(path), "-o", str(found), *table], standalone_mode=False)
    return found


@pytest.fixture(scope="module")
def truth(path):
    """Read all rows that all fields have, with h5py."""
    found: dict[str, list[np.ndarray]] = {name: [] for name in DATASETS}
    with h5py.File(path) as file:
        for number in range(GROUPS):
            group = file[f"data/demo_{number}"]
            for name, several in found.items():
                several.append(group[name][: len(group["small"])])
    return {name: np.concatenate(several) for name, several in found.items()}


def layouts_of(path, fields=FIELDS):
    return read_layouts(path, fields, Reach(), GROUPING)


def opened(source, **options):
    options = {"fields": FIELDS, "batch_size": 16, "device": "cpu"} | options
    return AsyncReader(
        hdf5_path=source,
        sequences=Sequences(groups=GROUPING.pattern),
        index_cache=False,
        **options,
    )


def test_all_these_are_alike(path):
    for name, layout in layouts_of(path).items():
        assert len(layout.datasets.kinds) == 1, name
        assert len(layout.datasets) == GROUPS


def test_parts_are_those_of_separate_layouts(path, monkeypatch):
    found = layouts_of(path)
    monkeypatch.setattr(datasettable, "is_own_kind", lambda layout: True)
    for name, layout in layouts_of(path).items():
        assert len(layout.datasets.kinds) == GROUPS
        for one in (found[name], pickle.loads(pickle.dumps(found[name]))):
            assert fingerprint([one]) == fingerprint([layout])
        assert found[name].has_gaps == layout.has_gaps
        assert unit_nbytes(found[name]) == unit_nbytes(layout)
        assert unit_bounds(found[name]).tolist() == unit_bounds(layout).tolist()
        assert kept_whole_nbytes(found[name]) == kept_whole_nbytes(layout)
        assert sum(count for _, count in kinds_of(found[name])) == GROUPS
        for column in ("first", "length", "row", "step", "dataset", "piece"):
            one, other = (getattr(y.segments, column) for y in (found[name], layout))
            assert np.array_equal(one, other), column
        for one, other in zip(found[name].datasets, layout.datasets, strict=True):
            for member in ("path", "shape", "offset", "stored_nbytes", "indexed"):
                assert getattr(one, member) == getattr(other, member)


@pytest.mark.parametrize("kept_nbytes", [0, 1 << 30])
def test_their_tables_say_the_same(path, monkeypatch, kept_nbytes):
    found = layouts_of(path)
    monkeypatch.setattr(datasettable, "is_own_kind", lambda layout: True)
    for name, layout in layouts_of(path).items():
        builders = [TableBuilder(lambda filters: True) for _ in range(2)]
        one, other = (
            builder.build(several, kept_nbytes)
            for builder, several in zip(builders, (found[name], layout), strict=True)
        )
        assert builders[0].sources == builders[1].sources
        assert one.is_filled_first == other.is_filled_first
        (layer,), (expected,) = one.layers, other.layers
        assert layer.first.tolist() == expected.first.tolist()
        for i in range(expected.row.size):
            described = [_described(*table, i) for table in ((one, layer), (other, expected))]
            assert described[0] == described[1], (name, i)


def _described(table, layer, i):
    """Return all that a table says of a segment, whatever numbers it has given to it."""
    begin, count = int(layer.begin[i]), int(layer.count[i])
    shape = table.shapes[layer.shape[i]]
    parts = [getattr(layer, name)[i].item() for name in ("row", "step", "source", "is_sparse")]
    extents = [
        column[begin : begin + count].tolist()
        for column in (table.chunks.offset, table.chunks.nbytes, table.chunks.filter_mask)
    ]
    of_shape = [
        value.tolist() if isinstance(value, np.ndarray) else value for value in vars(shape).values()
    ]
    return parts, count, None if count else begin, extents, of_shape


@pytest.mark.sampled(4)
@pytest.mark.parametrize("source", ["path", "index"])
@pytest.mark.parametrize("shuffle", [False, "full", "window"])
@pytest.mark.parametrize("has_core", [True, False], ids=["core", "h5py"])
def test_reads_like_h5py(source, shuffle, has_core, truth, request):
    if not has_core:
        request.getfixturevalue("h5py_way")
    with opened(request.getfixturevalue(source), shuffle=shuffle) as reader:
        seen = []
        for _ in range(2):
            for batch in reader:
                seen.append(batch.index)
                rows = _rows(reader, batch.index)
                for name, values in truth.items():
                    assert np.array_equal(batch[name], values[rows]), name
        assert np.unique(np.concatenate(seen)).size == reader.num_samples == len(truth["small"])


def _rows(reader, samples):
    """Return which of the true rows samples are: between sequences, a row has no sample."""
    sequences = reader._engine.setup.samplings.sequences
    number = np.searchsorted(sequences.starts, samples, side="right") - 1
    return samples - number


def test_no_layout_is_made_for_each_dataset(index, monkeypatch):
    made = []
    layout = Columns.layout

    def counted(self, number, like):
        made.append(number)
        return layout(self, number, like)

    monkeypatch.setattr(Columns, "layout", counted)
    fields = {name: Field(name, steps=range(3), pad="edge") for name in ("small", "gzip", "more")}
    with opened(index, fields=fields, shuffle="full") as reader:
        assert sum(batch.size for batch in reader) == reader.num_samples
        assert str(reader.stats())
    assert len(made) < GROUPS * len(fields) / 2


@pytest.mark.parametrize("odd", ["dtype", "chunks", "compression", "sparse"])
def test_datasets_that_are_not_alike_are_read_as_before(tmp_path, odd):
    path, values = tmp_path / "odd.h5", []
    with h5py.File(path, "w") as file:
        for number in range(GROUPS):
            rows = np.full((5, 8), number, "i4")
            options: dict[str, Any] = {"chunks": (2, 8)} if odd != "dtype" else {}
            if number == 7:
                options |= {
                    "dtype": {"dtype": ">i4"},
                    "chunks": {"chunks": (5, 8)},
                    "compression": {"compression": "gzip"},
                    "sparse": {},
                }[odd]
            if odd == "sparse" and number == 7:
                dataset = file.create_dataset("data/demo_7/a", (5, 8), "i4", chunks=(2, 8))
                dataset[3] = rows[3]
                rows = dataset[...]
            else:
                file.create_dataset(f"data/demo_{number}/a", data=rows, **options)
            values.append(rows)
    kinds = layouts_of(path, {"a": Field("a")})["a"].datasets.kinds
    assert len(kinds) == (1 if odd == "sparse" else 2)
    with opened(path, fields={"a": Field("a")}, shuffle="full") as reader:
        for batch in reader:
            assert np.array_equal(batch.a, np.concatenate(values)[batch.index])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::h5async.FileChangedWarning")
@given(data=st.data())
def test_a_changed_index_is_refused_or_read(data, index):
    header, arrays = saved_content(index)
    header = {name: found for name, found in header.items() if name not in ("arrays", "checksum")}
    arrays = {name: np.array(array) for name, array in arrays.items()}
    whole_ones = [own for own in header["own"].values() if "segments" in own]
    assert len(whole_ones) == len(DATASETS)
    original = index.read_bytes()
    for _ in range(data.draw(st.integers(1, 2))):
        chosen = data.draw(st.sampled_from(whole_ones))
        if data.draw(st.booleans()):
            container, key = data.draw(st.sampled_from(places(chosen)))
            container[key] = copy.deepcopy(data.draw(ODD))
        else:
            odd = data.draw(st.sampled_from([0, 1, -1, -2, 5, 1000, 1 << 20, 1 << 40, 1 << 62]))
            arrays["numbers"][data.draw(st.integers(0, arrays["numbers"].size - 1))] = odd
    try:
        rewrite(index, header, arrays)
        with contextlib.suppress(H5AsyncError), opened(index, max_batch_bytes=1 << 24) as reader:
            for _ in range(3):
                reader.get_next_batch()
    finally:
        index.write_bytes(original)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("numbers", lambda a: a[::-1].copy()),
        ("numbers", lambda a: a - 1),
        ("numbers", lambda a: a + (1 << 61)),
        ("rows", lambda a: a * 0),
        ("rows", lambda a: a + 1),
        ("rows", lambda a: a * 0 + (1 << 61)),
        ("address", lambda a: a * 0 + (1 << 40)),
        ("address", lambda a: a * 0 - 2),
        ("stored_nbytes", lambda a: a * 0 - 1),
        ("offset", lambda a: a * 0 + (1 << 40)),
        ("offset", lambda a: a * 0 + 4096),
        ("nbytes", lambda a: a * 0 + (1 << 62)),
        ("nbytes", lambda a: a * 0 - 1),
        ("kind", lambda a: a + 1),
        ("file", lambda a: a - 1),
        ("begin", lambda a: a + 1),
        ("begin", lambda a: a[::-1].copy()),
    ],
)
def test_numbers_that_make_no_sense_are_refused(index, name, change):
    header, arrays = saved_content(index)
    header = {key: found for key, found in header.items() if key not in ("arrays", "checksum")}
    arrays = {key: np.array(array) for key, array in arrays.items()}
    arrays[name] = change(arrays[name])
    original = index.read_bytes()
    try:
        rewrite(index, header, arrays)
        with pytest.raises(H5AsyncError, match="cannot be used as a saved index"):
            opened(index)
    finally:
        index.write_bytes(original)
