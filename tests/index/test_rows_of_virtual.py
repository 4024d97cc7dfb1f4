"""Virtual datasets that take any rows of their sources: an irregular mapping, or one a row."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import h5py
import numpy as np
import pytest
from cases import each
from conftest import assert_epoch_is, assert_reads_like_h5py, poison, truth
from h5py import h5d, h5p, h5s, h5t
from hypothesis import given, settings
from hypothesis import strategies as st

from h5async import AsyncReader
from h5async.cli.datasetfacts import method_text
from h5async.core.binding import load_core
from h5async.fill import phases
from h5async.index import virtual
from h5async.index.changes import fingerprint
from h5async.index.datasettable import most_units, unit_bounds
from h5async.index.layout import DatasetLayout
from h5async.index.tables import Blocks, PairedRuns, Selection, Slab, runs_between
from h5async.observe.chunkuse import read_cost
from h5async.read.h5pyrows import H5pyRows

EXAMPLES = settings().max_examples  # of the profile
OPTIONS: dict[str, Any] = {"labels_field": None, "device": "cpu", "num_threads": 0}

Columns = tuple[int, int]  # begin and end of what is mapped of each row


@dataclass(frozen=True)
class Rows:
    """A mapping of some rows of a source to some rows of the virtual dataset, both ascending."""

    source: str
    where: tuple[int, ...]
    taken: tuple[int, ...]
    columns: Columns | None = None
    source_columns: Columns | None = None


@dataclass(frozen=True)
class Recipe:
    """A virtual dataset. Its repr is what a failing example shows."""

    shape: tuple[int, int]
    mappings: list[Rows]
    sources: dict[str, tuple[int, int]]
    options: dict[str, Any] = field(default_factory=dict)
    dtypes: dict[str, str] = field(default_factory=dict)
    axis: int = 0

    def write(self, folder: Path) -> Path:
        path = folder / "virtual.h5"
        for name, shape in self.sources.items():
            write_source(folder / f"{name}.h5", self.turned(shape), self.dtypes.get(name), self)
        plist = h5p.create(h5p.DATASET_CREATE)
        plist.set_layout(h5d.VIRTUAL)
        plist.set_fill_value(np.array(-7, "<i4"))
        for mapping in self.mappings:
            plist.set_virtual(
                self.space(self.shape, mapping.where, mapping.columns),
                f"{mapping.source}.h5".encode(),
                b"x",
                self.space(self.sources[mapping.source], mapping.taken, mapping.source_columns),
            )
        with h5py.File(path, "w", libver="latest") as file:
            space = h5s.create_simple(self.turned(self.shape))
            h5d.create(file.id, b"data", h5t.STD_I32LE, space, plist)
        return path

    def turned(self, pair: tuple[int, int]) -> tuple[int, int]:
        return pair if self.axis == 0 else pair[::-1]

    def space(
        self, shape: tuple[int, int], rows: Sequence[int], columns: Columns | None
    ) -> h5s.SpaceID:
        space = h5s.create_simple(self.turned(shape))
        begin, end = columns or (0, shape[1])
        how = h5s.SELECT_SET
        for row in rows:
            start, size = self.turned((row, begin)), self.turned((1, end - begin))
            space.select_hyperslab(start, (1, 1), None, size, op=how)
            how = h5s.SELECT_OR
        return space


def write_source(path: Path, shape: tuple[int, int], dtype: str | None, recipe: Recipe) -> None:
    values = np.random.default_rng(len(path.name) + shape[0]).integers(-(2**31), 2**31, shape)
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=values.astype(dtype or "<i4"), **recipe.options)


@st.composite
def recipes(draw: st.DrawFn) -> Recipe:
    """Rows of some sources, in one mapping or several each; some of them in no mapping."""
    axis = draw(st.integers(0, 1))
    names = ["a", "b", "c"][: draw(st.integers(1, 3))]
    sources = {name: (draw(st.integers(1, 24)), draw(st.integers(3, 5))) for name in names}
    width = draw(st.integers(3, 5))
    size = draw(st.integers(1, min(width, *(columns for _, columns in sources.values()))))
    rows = draw(st.integers(1, 30))
    owner = [draw(st.sampled_from([None, *names, names[0]])) for _ in range(rows)]
    is_whole = draw(st.booleans()) and size == width
    begin = 0 if is_whole else draw(st.integers(0, width - size))
    mappings = []
    for name in names:
        count, columns = sources[name]
        where = [row for row in range(rows) if owner[row] == name]
        at = draw(st.integers(0, columns - size))
        taken = [draw(st.integers(0, count - 1)) for _ in where]
        while where:  # as many as ascend, and sometimes fewer
            most = 1
            while most < len(where) and taken[most - 1] < taken[most]:
                most += 1
            most = draw(st.integers(1, most))
            mapping = Rows(
                name,
                tuple(where[:most]),
                tuple(taken[:most]),
                (begin, begin + size),
                (at, at + size),
            )
            mappings.append(mapping)
            where, taken = where[most:], taken[most:]
    options: dict[str, Any] = {}
    if draw(st.booleans()):
        chunks = draw(st.integers(1, 7)), draw(st.integers(1, 3))
        options = {"chunks": chunks if axis == 0 else chunks[::-1], "maxshape": (None, None)}
        if draw(st.booleans()):
            options |= {"compression": "gzip", "shuffle": draw(st.booleans())}
    stored = ["<i4", "<i4", ">i4", *([">i2"] if options else [])]
    dtypes = {name: draw(st.sampled_from(stored)) for name in names}
    return Recipe((rows, width), draw(st.permutations(mappings)), sources, options, dtypes, axis)


@pytest.mark.slow
@settings(max_examples=EXAMPLES // 2)
@given(
    recipe=recipes(),
    shuffle=st.sampled_from([False, "full", "window"]),
    num_threads=st.sampled_from([0, 2]),
    batch_size=st.integers(1, 9),
    has_core=st.booleans(),
    across=st.booleans(),
)
def test_any_rows_read_like_h5py(
    recipe: Recipe, shuffle: Any, num_threads: int, batch_size: int, has_core: bool, across: bool
) -> None:
    num_dim = 1 - recipe.axis if across else recipe.axis
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(phases, "_MIN_SHARE_NBYTES", 1),
        mock.patch("h5async.fill.filling.load_core", load_core if has_core else lambda: None),
    ):
        path = recipe.write(Path(folder))
        expected = truth(path, "data", num_dim)
        options = {**OPTIONS, "num_threads": num_threads}
        with AsyncReader(
            hdf5_path=path, num_dim=num_dim, batch_size=batch_size, shuffle=shuffle, **options
        ) as reader:
            poison(reader)
            assert_epoch_is(reader, expected, in_order=not shuffle)
            if not across:
                assert reader.layouts["data"].fallback_reason is None
                # Integers of another size are converted by NumPy, after h5py has read them.
                mapped = {recipe.dtypes[mapping.source][1:] for mapping in recipe.mappings}
                assert (reader.fallback_reads == 0) == (has_core and mapped <= {"i4"})
                assert ("h5py" in reader.stats().ways["data"]) == (reader.fallback_reads > 0)
                if has_core:
                    told = method_text(reader.layouts["data"])  # by `h5async inspect`
                    assert ("h5py" in told) == (reader.fallback_reads > 0)


def test_any_rows_of_a_virtual_dataset_read_like_h5py(tmp_path):
    """Its sources are many; rows of it are mapped one by one, and by an irregular selection."""
    rng = np.random.default_rng(1)
    inner = h5py.VirtualLayout((60, 4), "<i4")
    for number in range(6):
        with h5py.File(tmp_path / f"{number}.h5", "w") as file:
            values = rng.integers(0, 99, (10, 4)).astype("<i4" if number % 2 else ">i4")
            file.create_dataset("x", data=values, chunks=(3, 4), compression="gzip")
        inner[10 * number : 10 * number + 10] = h5py.VirtualSource(f"{number}.h5", "x", (10, 4))
    with h5py.File(tmp_path / "inner.h5", "w") as file:
        file.create_virtual_dataset("x", inner)
    kept = np.sort(rng.permutation(60)[:50]).tolist()
    one = [Rows("inner", tuple(range(50)), tuple(kept))]
    several = [Rows("inner", (row,), (taken,)) for row, taken in enumerate(kept)]
    for mappings in (one, several):
        recipe = Recipe((50, 4), mappings, {"inner": (60, 4)})
        with mock.patch(f"{__name__}.write_source"):
            path = recipe.write(tmp_path)
        for num_threads in (0, 2):
            assert_reads_like_h5py(path, num_threads=num_threads)


def irregular(shape: tuple[int, int], *boxes: tuple[int, int, int, int]) -> h5s.SpaceID:
    """Select boxes: rows from and to, columns from and to."""
    space = h5s.create_simple(shape)
    how = h5s.SELECT_SET
    for top, bottom, left, right in boxes:
        size = (bottom - top, right - left)
        space.select_hyperslab((top, left), (1, 1), None, size, op=how)
        how = h5s.SELECT_OR
    return space


def write_mapping(folder: Path, where: h5s.SpaceID, taken: h5s.SpaceID) -> Path:
    with h5py.File(folder / "s.h5", "w") as file:
        file["x"] = np.arange(40, dtype="<i4").reshape(10, 4)
    plist = h5p.create(h5p.DATASET_CREATE)
    plist.set_layout(h5d.VIRTUAL)
    plist.set_virtual(where, b"s.h5", b"x", taken)
    with h5py.File(folder / "virtual.h5", "w", libver="latest") as file:
        space = h5s.create_simple(where.get_simple_extent_dims())
        h5d.create(file.id, b"data", h5t.STD_I32LE, space, plist)
    return folder / "virtual.h5"


STEPS = ((0, 2, 0, 3), (2, 4, 1, 4), (7, 8, 0, 3))  # rows of which other columns are selected


@each(
    "where, taken, reason",
    [
        (irregular((10, 4), *STEPS), irregular((10, 4), *STEPS), "unlike pieces"),
        (irregular((7, 3)), irregular((10, 4), (0, 3, 0, 3), (5, 9, 0, 3)), None),
        (irregular((21, 1)), irregular((10, 4), (0, 3, 0, 3), (5, 9, 0, 3)), "unlike selections"),
        (irregular((10, 2)), irregular((10, 4), (0, 10, 0, 1), (0, 10, 3, 4)), None),
        (irregular((10, 3)), irregular((10, 4), (0, 10, 0, 1), (0, 10, 2, 4)), "blocks within"),
        (irregular((5, 2)), irregular((10, 4), *((r, r + 1, 1, 3) for r in (0, 1, 4, 7, 9))), None),
    ],
)
def test_irregular_selection_reads_like_h5py(tmp_path, where, taken, reason):
    path = write_mapping(tmp_path, where, taken)
    assert_reads_like_h5py(path, fallback=reason)


def test_overlapping_irregular_mappings_come_through_h5py(tmp_path):
    mappings = [Rows("a", (0, 2, 3), (0, 1, 2)), Rows("b", (1, 3, 4), (0, 1, 2))]
    recipe = Recipe((5, 4), mappings, {"a": (3, 4), "b": (3, 4)})
    assert_reads_like_h5py(recipe.write(tmp_path), fallback="overlap")


def test_rows_that_are_mapped_again_one_by_one_come_through_h5py(tmp_path):
    mappings = [Rows("a", (row,), (row,)) for row in (0, 1, 2, 3, 4, 2)]
    assert_reads_like_h5py(
        Recipe((5, 4), mappings, {"a": (5, 4)}).write(tmp_path), fallback="overlap"
    )


def test_one_row_mapped_beyond_its_source_is_left_to_h5py(tmp_path):
    mappings = [Rows("a", (row,), (row,)) for row in range(6)]
    path = Recipe((6, 4), mappings, {"a": (6, 4)}, {"chunks": (2, 4), "maxshape": (None, 4)}).write(
        tmp_path
    )
    with h5py.File(tmp_path / "a.h5", "r+") as file:
        file["x"].resize(5, 0)
    with AsyncReader(hdf5_path=path, **OPTIONS) as reader:
        assert "smaller" in (reader.layouts["data"].fallback_reason or "")


def test_percent_signs_in_names_of_sources_stand_for_one(tmp_path):
    mappings = [Rows("100%%", (row,), (taken,)) for row, taken in enumerate((3, 0, 1))]
    mappings.append(Rows("100%%", (3, 4, 5), (0, 2, 3)))
    recipe = Recipe((6, 4), mappings, {"100%%": (4, 4)})
    path = recipe.write(tmp_path)
    (tmp_path / "100%%.h5").rename(tmp_path / "100%.h5")
    assert_reads_like_h5py(path)


def test_more_blocks_than_may_be_are_left_to_h5py(tmp_path, monkeypatch):
    monkeypatch.setattr(virtual, "MAX_BLOCKS", 3)
    mapping = Rows("a", tuple(range(4)), (0, 2, 5, 7))
    assert_reads_like_h5py(
        Recipe((4, 4), [mapping], {"a": (9, 4)}).write(tmp_path), fallback="more than 3 blocks"
    )


# --- one part for each source, whose chunks are the units of a window -----------------------------


def layout_of(path: Path, name: str = "data") -> DatasetLayout:
    with AsyncReader(hdf5_path=path, data_field=name, **OPTIONS) as reader:
        return reader.layouts["data"]


def split_of(folder: Path, kept: Sequence[int], total: int = 100, chunk: int = 10) -> Path:
    """Map some rows of a file, each by a mapping of its own."""
    mappings = [Rows("a", (row,), (taken,)) for row, taken in enumerate(kept)]
    options = {"chunks": (chunk, 4), "compression": "gzip"}
    return Recipe((len(kept), 4), mappings, {"a": (total, 4)}, options).write(folder)


def test_mappings_of_one_dataset_become_one_part(tmp_path):
    kept = [row for row in range(100) if row % 7]
    layout = layout_of(split_of(tmp_path, kept))
    assert len(layout.datasets) == 1
    assert len(list(layout.leaves())) == 1


def test_units_of_a_split_are_the_chunks_of_the_file(tmp_path):
    kept = np.array([row for row in range(100) if row % 7])
    bounds = unit_bounds(layout_of(split_of(tmp_path, kept.tolist())))
    assert bounds.tolist() == np.searchsorted(kept, np.arange(0, 101, 10)).tolist()


def test_a_window_of_a_split_decodes_each_chunk_once(tmp_path):
    kept = [row for row in range(2000) if row % 10 != 3]
    path = split_of(tmp_path, kept, 2000, 20)
    options = {**OPTIONS, "batch_size": 16, "shuffle": "window", "window_bytes": 1 << 20}
    with AsyncReader(hdf5_path=path, **options) as reader:
        assert_epoch_is(reader, truth(path), in_order=False)
        assert reader.stats().decoded_chunks == 100


def test_rows_between_that_have_the_fill_value_belong_to_the_unit(tmp_path):
    rows = [row for row in range(20) if row not in (3, 9, 10, 19)]
    mapping = Rows("a", tuple(rows), tuple(rows))
    options = {"chunks": (5, 4), "compression": "gzip"}
    path = Recipe((22, 4), [mapping], {"a": (20, 4)}, options).write(tmp_path)
    layout = layout_of(path)
    assert unit_bounds(layout).tolist() == [0, 5, 9, 11, 15, 19, 22]
    assert most_units(layout) >= 6
    assert_reads_like_h5py(path)


@settings(max_examples=EXAMPLES // 4)
@given(st.lists(st.tuples(st.integers(1, 30), st.integers(1, 9)), min_size=2, max_size=5))
def test_units_of_several_files_are_what_they_were(files: list[tuple[int, int]]) -> None:
    """The order of who resumes a training hangs on them."""
    expected = {0}
    with tempfile.TemporaryDirectory() as folder:
        begin = 0
        layout = h5py.VirtualLayout((sum(rows for rows, _ in files), 2), "<i4")
        for number, (rows, chunk) in enumerate(files):
            with h5py.File(Path(folder) / f"{number}.h5", "w") as file:
                file.create_dataset(
                    "x", data=np.zeros((rows, 2), "<i4"), chunks=(min(rows, chunk), 2)
                )
            layout[begin : begin + rows] = h5py.VirtualSource(f"{number}.h5", "x", (rows, 2))
            expected |= {begin + min(rows, k) for k in range(0, rows + chunk, min(rows, chunk))}
            begin += rows
        with h5py.File(Path(folder) / "virtual.h5", "w") as file:
            file.create_virtual_dataset("data", layout)
        found = layout_of(Path(folder) / "virtual.h5")
        assert unit_bounds(found).tolist() == sorted(expected)
        assert most_units(found) >= len(expected) - 1


@pytest.mark.parametrize("taken", [np.s_[::3], np.s_[1:29:2]], ids=str)
def test_a_window_of_every_other_row_reads_like_h5py(tmp_path, taken):
    count = len(range(30)[taken])
    layout = h5py.VirtualLayout((count, 2), "<i4")
    layout[...] = h5py.VirtualSource(".", "x", (30, 2))[taken]
    with h5py.File(tmp_path / "virtual.h5", "w") as file:
        file.create_dataset("x", data=np.arange(60, dtype="<i4").reshape(30, 2), chunks=(4, 2))
        file.create_virtual_dataset("data", layout)
    options = {**OPTIONS, "batch_size": 4, "shuffle": "window"}
    with AsyncReader(hdf5_path=tmp_path / "virtual.h5", **options) as reader:
        assert_epoch_is(reader, truth(tmp_path / "virtual.h5"), in_order=False)


def test_fingerprint_knows_every_row(tmp_path):
    kept = list(range(0, 1000, 2))
    found = set()
    for number, change in enumerate([None, 100, 250, 400]):
        folder = tmp_path / str(number)
        folder.mkdir()
        rows = [row + (k == change) for k, row in enumerate(kept)]
        layout = layout_of(split_of(folder, rows, 1000))
        assert len(layout.datasets) == 1
        found.add(fingerprint([layout]))
    assert len(found) == 4


# --- selections -----------------------------------------------------------------------------------

blocks = st.lists(st.tuples(st.integers(1, 5), st.integers(1, 4)), min_size=1, max_size=6)


@given(blocks, st.randoms())
def test_blocks_are_indices_in_any_order(pairs, random) -> None:
    gap, length = np.array(pairs, np.int64).T
    first = np.cumsum(gap + length) - length
    order = list(range(first.size))
    random.shuffle(order)
    selection = Blocks.of(first[order], length[order])
    indices = np.concatenate([np.arange(f, f + n) for f, n in zip(first, length, strict=True)])
    assert (selection.size, selection.start) == (indices.size, indices[0])
    assert selection.end == indices[-1] + 1
    expected = np.concatenate([np.arange(first[k], first[k] + length[k]) for k in order])
    assert selection.at(np.arange(selection.size)).tolist() == expected.tolist()


@given(blocks, blocks)
def test_runs_pair_the_indices_of_two_selections(one, other) -> None:
    def selection(pairs: list[tuple[int, int]]) -> Selection:
        gap, length = np.array(pairs, np.int64).T
        return Blocks.of(np.cumsum(gap + length) - length, length)

    ours, theirs = selection(one), selection(other)
    runs = runs_between(ours, theirs)
    size = min(ours.size, theirs.size)
    k = np.arange(size)
    pairs = [(f + i, r + i * s) for f, n, r, s in zip(*runs, strict=True) for i in range(int(n))]
    assert pairs == list(zip(ours.at(k), theirs.at(k), strict=True))


def test_single_steps_are_the_same_pairs() -> None:
    runs = PairedRuns(*np.array([[0, 9], [3, 3], [5, 1], [1, 4]])).single_steps()
    assert runs.first.tolist() == [0, 9, 10, 11]
    assert runs.row.tolist() == [5, 1, 5, 9]
    assert runs.length.tolist() == [3, 1, 1, 1]


def test_slabs_tell_their_blocks() -> None:
    first, length = Slab(2, 5, 3, 2).blocks()
    assert (first.tolist(), length.tolist()) == ([2, 7, 12], [2, 2, 2])
    first, length = Slab(2, 2, 3, 2).blocks()
    assert (first.tolist(), length.tolist()) == ([2], [6])


# --- files of another byte order ------------------------------------------------------------------


@pytest.mark.parametrize("io", ["auto", "pread"])
@each("dtype", ["i2", "u4", "f4", "i8", "f8", "f2", "c8", "c16"])
def test_files_of_either_byte_order_cost_no_python(tmp_path, dtype, io, core):
    rng = np.random.default_rng(0)
    nbytes = 40 * 6 * np.dtype(dtype).itemsize
    values = np.frombuffer(rng.integers(0, 256, nbytes, np.uint8).tobytes(), dtype).reshape(40, 6)
    options: list[dict[str, Any]] = [
        {},
        {"chunks": (3, 6)},
        {"chunks": (3, 4), "compression": "gzip", "shuffle": True},
        {"chunks": (3, 6), "compression": "gzip"},
    ]
    paths = []
    for number, how in enumerate(options):
        paths.append(tmp_path / f"{number}.h5")
        with h5py.File(paths[-1], "w") as file:
            order = ">" if number % 3 else "<"
            some = values[10 * number : 10 * number + 10]
            fill = None if dtype[0] == "c" else 3  # of which h5py has no conversion
            dataset = file.create_dataset("data", (12, 6), f"{order}{dtype}", fillvalue=fill, **how)
            dataset[:10] = some
    expected = np.concatenate([truth(path) for path in paths])
    with mock.patch.object(H5pyRows, "execute", side_effect=AssertionError("by h5py")):
        for shuffle in (False, "full"):
            with AsyncReader(
                hdf5_path=paths, batch_size=7, shuffle=shuffle, io=io, **OPTIONS
            ) as reader:
                assert_epoch_is(reader, expected, in_order=not shuffle)


def test_pieces_of_rows_of_another_byte_order_cost_no_python(tmp_path, core):
    mappings = [
        Rows(name, tuple(range(n, 12, 2)), (0, 1, 3, 4, 6, 8), (k, k + 2), (1, 3))
        for n, name in enumerate("ab")
        for k in (0, 2)
    ]
    sources = {"a": (9, 4), "b": (9, 4)}
    recipe = Recipe((12, 5), mappings, sources, {"chunks": (2, 3)}, {"a": ">i4"})
    path = recipe.write(tmp_path)
    with mock.patch.object(H5pyRows, "execute", side_effect=AssertionError("by h5py")):
        assert_reads_like_h5py(path)


# --- what it costs --------------------------------------------------------------------------------


def test_cost_counts_what_is_mapped(tmp_path):
    rng = np.random.default_rng(0)
    with h5py.File(tmp_path / "virtual.h5", "w") as file:
        values = rng.integers(0, 99, (20, 100, 3)).astype("<i4")
        how = {"chunks": (4, 10, 3), "compression": "gzip"}
        stored = file.create_dataset("x", data=values, **how).id
        source = h5py.VirtualSource(".", "x", (20, 100, 3))
        window = h5py.VirtualLayout((20, 10, 3), "<i4")
        window[...] = source[:, 15:25]
        file.create_virtual_dataset("window", window)
        split = h5py.VirtualLayout((10, 100, 3), "<i4")
        for row, taken in enumerate(range(0, 20, 2)):
            split[row] = source[taken]
        file.create_virtual_dataset("split", split)
        nbytes = [stored.get_chunk_info(k).size for k in range(stored.get_num_chunks())]
    nbytes_of = np.array(nbytes).reshape(5, 10)
    cost = read_cost(layout_of(tmp_path / "virtual.h5", "window"))
    assert cost.in_order == pytest.approx(nbytes_of[:, 1:3].sum() / 20)
    assert cost.shuffled == pytest.approx(nbytes_of[:, 1:3].sum() * 4 / 20)
    cost = read_cost(layout_of(tmp_path / "virtual.h5", "split"))
    assert cost.in_order == pytest.approx(nbytes_of.sum() / 10)
    assert cost.shuffled == pytest.approx(nbytes_of.sum() * 2 / 10)


@pytest.mark.parametrize("name", ["plain", "window", "every third"])
def test_cost_is_what_is_read(tmp_path, name, core):
    rng = np.random.default_rng(0)
    source = h5py.VirtualSource(".", "plain", (60, 40))
    with h5py.File(tmp_path / "virtual.h5", "w") as file:
        values = rng.integers(0, 9, (60, 40)).astype("<i4")
        file.create_dataset("plain", data=values, chunks=(7, 10), compression="gzip")
        for mapped, taken in {"window": np.s_[5:50, 8:13], "every third": np.s_[::3]}.items():
            shape = values[taken].shape
            layout = h5py.VirtualLayout(shape, "<i4")
            layout[...] = source[taken]
            file.create_virtual_dataset(mapped, layout)
    path = tmp_path / "virtual.h5"
    options = {**OPTIONS, "data_field": name}
    for batch_size, shuffle in ((60, False), (1, "full")):
        with AsyncReader(
            hdf5_path=path, batch_size=batch_size, shuffle=shuffle, **options
        ) as reader:
            cost = read_cost(reader.layouts["data"])
            for _ in reader:
                pass
            count, nbytes = reader.num_samples, reader.stats().read_nbytes
        if not shuffle:
            assert nbytes == pytest.approx(cost.in_order * count)
        else:  # some chunks are kept
            assert nbytes <= cost.shuffled * count * 1.01
