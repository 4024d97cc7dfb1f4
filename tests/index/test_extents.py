"""Tables of segments and extents, against models that know where each element lies."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest
from collecting import made_up
from hypothesis import given, settings
from hypothesis import strategies as st

from h5async.codec.filters import Filter
from h5async.index.composition import Part, with_parts
from h5async.index.extents import TableBuilder
from h5async.index.shapes import Kind
from h5async.index.tables import Blocks, Piece, Segments, Slab, TooManyRunsError
from h5async.io.source import FileStamp

NOWHERE = -1
DEFLATE = (Filter(1, (4,), "deflate"),)
UNKNOWN = (Filter(32013, (), "zfp"),)


def builder():
    return TableBuilder(lambda filters: filters != UNKNOWN)


# --- what a table says ----------------------------------------------------------------------------


def element(source, chunk, byte):
    """Return the address of an element: a source, where its chunk lies, and a byte of the chunk."""
    return source * 10**12 + chunk * 10**5 + byte


def read(table, sources, layout, sample):
    """Return the addresses of the elements of a row, by a table: int64 (row bytes / itemsize,).

    None: some of it is left to others.
    """
    itemsize = layout.dtype.itemsize
    row = np.full(layout.row_nbytes // itemsize, NOWHERE, np.int64)
    for layer in table.layers:
        at = int(np.searchsorted(layer.first, sample, side="right")) - 1
        assert layer.first[at] <= sample < layer.first[at + 1]
        if layer.shape[at] < 0:
            continue
        shape = table.shapes[layer.shape[at]]
        if shape.kind == Kind.LEFT:
            return None
        source_row = int(layer.row[at] + (sample - layer.first[at]) * layer.step[at])
        source = int(layer.source[at])
        for begin, address in _pieces(table, layer, at, shape, source_row):
            assert row[begin // itemsize] == NOWHERE, "two have it"
            if address is not None:
                row[begin // itemsize] = element(sources[source], *address)
    return row


def _extent(table, layer, at, number):
    """Return where a chunk lies, None: it was never written."""
    begin, count = int(layer.begin[at]), int(layer.count[at])
    if not layer.is_sparse[at]:
        assert number < count
        return int(table.chunks.offset[begin + number])
    here = table.chunks.numbers[begin : begin + count]
    found = np.flatnonzero(here == number)
    return int(table.chunks.offset[begin + found[0]]) if found.size else None


def _pieces(table, layer, at, shape, source_row):
    """Yield, for each element, its byte in the row, and where it lies (None: never written)."""
    if shape.kind == Kind.ROWS:
        begin = int(layer.begin[at])
        for byte in range(0, shape.source_row_nbytes, shape.itemsize):
            yield byte, (begin, source_row * shape.source_row_nbytes + byte)
        return
    group, local = divmod(source_row, shape.chunk_samples)
    if shape.kind == Kind.ROWS_IN_CHUNKS:
        chunk = _extent(table, layer, at, group * shape.number_stride)
        for byte in range(0, shape.source_row_nbytes, shape.itemsize):
            inside = local * shape.source_row_nbytes + byte
            yield byte, None if chunk is None else (chunk, inside)
        return
    for cross in range(shape.extents.shape[0]):
        chunk = int(layer.begin[at])
        if shape.has_chunks:
            number = group * shape.number_stride + int(shape.cross_number[cross])
            chunk = _extent(table, layer, at, number)
        for index in np.ndindex(*shape.extents[cross]):
            to = int(shape.row_begin[cross] + np.dot(index, shape.row_strides))
            inside = int(shape.piece_begin[cross] + np.dot(index, shape.chunk_strides))
            inside += local * shape.sample_stride
            assert 0 <= inside <= shape.chunk_nbytes - shape.itemsize
            yield to, None if chunk is None else (chunk, inside)


PARTS = {}  # of layouts, by their identity


def parts_of(layout):
    """Return the parts that a layout was made of."""
    return PARTS[id(layout)][1]


# --- the model ------------------------------------------------------------------------------------


def addresses(layout, sources):
    """Return where all elements lie, the samples first: int64 (samples, *row)."""
    found = np.full(layout.shape, NOWHERE, np.int64)
    if layout.segments is not None:
        by_sample = np.moveaxis(found, layout.sample_axis, 0)
        for part in parts_of(layout):
            theirs = np.moveaxis(addresses(part.source, sources), 0, 0)
            samples = part.source_samples.at(np.arange(part.source_samples.size))
            values = theirs[samples]
            if part.piece.member is not None:
                offset = part.source.dtype.fields[part.piece.member][1]
                values = np.where(values == NOWHERE, NOWHERE, values + offset)
            if part.piece.source_region is not None:
                values = values[(slice(None), *part.piece.source_region)]
            goes_to = part.samples.at(np.arange(part.samples.size))
            for where, row in zip(goes_to, values, strict=True):
                region = part.piece.region or (slice(None),) * (by_sample.ndim - 1)
                target = by_sample[(where, *region)]
                by_sample[(where, *region)] = row.reshape(target.shape)
        return by_sample
    source = sources[layout.file]
    item = layout.dtype.itemsize
    if layout.chunks is None:
        inside = np.arange(found.size).reshape(found.shape) * item
        found = element(source, layout.offset, inside)
        return np.moveaxis(found, layout.sample_axis, 0)
    strides = np.cumprod((item, *layout.chunk_shape[:0:-1]))[::-1]
    table = layout.chunks
    for cell in np.ndindex(*layout.grid):
        number = int(np.ravel_multi_index(cell, layout.grid))
        (at,) = table.find(np.array([number])).tolist()
        if at < 0:
            continue
        here = tuple(
            slice(c * size, min((c + 1) * size, extent))
            for c, size, extent in zip(cell, layout.chunk_shape, layout.shape, strict=True)
        )
        inside = np.indices([s.stop - s.start for s in here])
        byte = sum(i * int(stride) for i, stride in zip(inside, strides, strict=True))
        found[here] = element(source, int(table.offset[at]), byte)
    return np.moveaxis(found, layout.sample_axis, 0)


def all_leaves(layout):
    if layout.segments is None:
        return [layout]
    return [leaf for part in parts_of(layout) for leaf in all_leaves(part.source)]


def check(layout):
    """Compare a table with the model, element by element; return how many samples are left."""
    made = builder()
    table = made.build(layout)
    files = {leaf.file: number for number, leaf in enumerate(all_leaves(layout))}
    sources = [files[source.path] for source in made.sources]
    expected = addresses(layout, files)
    left = 0
    for layer in table.layers:
        assert layer.first[0] == 0
        assert layer.first[-1] == layout.num_samples
        assert (np.diff(layer.first) > 0).all()
    for sample in range(layout.num_samples):
        row = read(table, sources, layout, sample)
        if row is None:
            left += 1
            continue
        assert row.tolist() == expected[sample].reshape(-1).tolist()
        has_gap = (row == NOWHERE).any()
        if has_gap and len(table.layers) != 1:
            # Where no layer has it, all rows hold the fill value first.
            assert table.is_filled_first or layout.segments is None or not layout.has_gaps
    return left


# --- random datasets ------------------------------------------------------------------------------

numbers = itertools.count()


@st.composite
def datasets(draw, rank=None, samples=None, row=None, dtype="<i4", axis=None):
    """Draw a dataset that lies in a file of its own."""
    rank = draw(st.integers(1, 3)) if rank is None else rank
    axis = draw(st.integers(0, rank - 1)) if axis is None else axis
    row = [draw(st.integers(1, 5)) for _ in range(rank - 1)] if row is None else list(row)
    samples = draw(st.integers(1, 12)) if samples is None else samples
    shape = (*row[:axis], samples, *row[axis:])
    file = f"{next(numbers)}.h5"
    if draw(st.booleans()):
        return made_up(
            file, shape, (), [draw(st.integers(0, 99)) * 1000], (), axis=axis, dtype=dtype
        )
    chunk = tuple(draw(st.one_of(st.just(n), st.integers(1, n + 1))) for n in shape)
    total = math.prod(-(-n // c) for n, c in zip(shape, chunk, strict=True))
    allocated = list(range(total))
    if draw(st.booleans()):
        allocated = sorted(draw(st.sets(st.integers(0, total - 1))))
    order = draw(st.permutations(range(len(allocated))))
    return made_up(
        file, shape, chunk, [1000 * (n + 1) for n in order], [99] * len(allocated),
        numbers=None if len(allocated) == total else allocated, axis=axis, dtype=dtype,
        filters=draw(st.sampled_from([(), DEFLATE])),
    )  # fmt: skip


def joined(sources, samples, parts, **changes):
    first = sources[0]
    shape = list(changes.pop("shape", first.shape))
    axis = changes.pop("sample_axis", first.sample_axis)
    if "whole" not in changes:
        shape[axis] = samples
    changes.pop("whole", None)
    whole = dataclasses.replace(
        first, file="whole.h5", shape=tuple(shape), sample_axis=axis, chunk_shape=(), chunks=None,
        filters=(), offset=-1, segments=None, datasets=(), storage="virtual", **changes,
    )  # fmt: skip
    made = with_parts(whole, parts)
    PARTS[id(made)] = made, parts  # held, so that no other has its identity
    return made


@st.composite
def slabs(draw, extent):
    """Draw a regular selection of some of `extent` indices."""
    block = draw(st.integers(1, extent))
    stride = draw(st.integers(block, extent + 1))
    most = (extent - block) // stride + 1
    count = draw(st.integers(1, most))
    span = (count - 1) * stride + block
    start = draw(st.integers(0, extent - span))
    if count == 1 or stride == block:
        return Slab.run(start, start + count * block)
    return Slab(start, stride, count, block)


@st.composite
def selections(draw, size, most):
    """Draw a regular selection of `size` indices."""
    block = draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0]))
    stride = draw(st.integers(block, block + most))
    start = draw(st.integers(0, most))
    count = size // block
    if count == 1 or stride == block:
        return Slab.run(start, start + size)
    return Slab(start, stride, count, block)


@st.composite
def wholes(draw, depth=2, row=None):
    """Draw a dataset whose samples lie in several others: in order, with gaps, or interleaved."""
    row = [draw(st.integers(1, 4)) for _ in range(draw(st.integers(0, 2)))] if row is None else row
    parts, end = [], 0
    kinds = [datasets(rank=1 + len(row), row=row, axis=0)]
    if depth:
        kinds.append(wholes(depth - 1, row))
    several = [draw(st.one_of(kinds)) for _ in range(draw(st.integers(1, 3)))]
    for _ in range(draw(st.integers(1, 5))):
        source = draw(st.sampled_from(several))
        theirs = draw(slabs(source.num_samples))
        ours = draw(selections(theirs.size, 3))
        ours = dataclasses.replace(ours, start=ours.start * draw(st.integers(0, 1)) + end)
        end = ours.end
        parts.append(Part(source, ours, theirs))
    return joined(several, end + draw(st.integers(0, 2)), parts)


@pytest.mark.slow
@settings(max_examples=200)
@given(datasets())
def test_datasets_of_their_own(layout):
    assert check(layout) == 0


@pytest.mark.slow
@settings(max_examples=150)
@given(wholes())
def test_datasets_whose_samples_lie_in_others(layout):
    left = check(layout)
    if left:  # what is within gaps of another one, which may have a fill value of its own
        assert any(part.source.has_gaps for part in _all_parts(layout))


def _all_parts(layout):
    for part in parts_of(layout) if layout.segments is not None else ():
        yield part
        yield from _all_parts(part.source)


@pytest.mark.slow
@settings(max_examples=150)
@given(st.data())
def test_windows_and_regions_of_rows(data):
    """Rows are put together from regions of several sources; elements are left out on the way."""
    samples = data.draw(st.integers(1, 8))
    width, height = data.draw(st.integers(2, 6)), data.draw(st.integers(1, 4))
    parts, begin = [], 0
    while begin < width and len(parts) < 3:
        size = data.draw(st.integers(1, width - begin))
        axis = data.draw(st.integers(0, 2))
        step = data.draw(st.integers(1, 2))
        source = data.draw(datasets(rank=3, samples=samples + 2, row=(9, 5), axis=axis))
        start = data.draw(st.integers(0, 8 - (size - 1) * step)) if size * step < 9 else None
        if start is None:
            break
        first = data.draw(st.integers(0, 5 - height))
        theirs = slice(start, start + (size - 1) * step + 1, step), slice(first, first + height)
        parts.append(
            Part(
                source,
                Slab.run(0, samples),
                Slab.run(1, 1 + samples),
                Piece((slice(begin, begin + size), slice(0, height)), theirs),
            )
        )
        begin += size + data.draw(st.integers(0, 1))
    if not parts:
        return
    whole = joined(
        [parts[0].source], samples, parts, shape=(samples, width, height), sample_axis=0, whole=True
    )
    assert check(whole) == 0


@pytest.mark.slow
@settings(max_examples=100)
@given(st.data())
def test_members_of_compounds(data):
    """Two files have members of one name, one dtype and one size, at different places."""
    inner = data.draw(st.sampled_from(["<i4", ("<i4", (2,)), ("<i4", (3, 2))]))
    one = np.dtype([("pad", "<i4"), ("wanted", inner), ("more", "<i8")])
    other = np.dtype([("more", "<i8"), ("pad", "<i4"), ("wanted", inner)])
    assert one.itemsize == other.itemsize
    row = data.draw(st.lists(st.integers(1, 3), max_size=2))
    member = one["wanted"]
    parts, begin = [], 0
    for dtype in data.draw(st.permutations([one, other])):
        source = data.draw(datasets(rank=1 + len(row), row=row, axis=0, dtype=dtype))
        count = source.num_samples
        parts.append(
            Part(
                source,
                Slab.run(begin, begin + count),
                Slab.run(0, count),
                Piece(member="wanted"),
            )
        )
        begin += count
    whole = joined(
        [parts[0].source], begin, parts, shape=(begin, *row, *member.shape), sample_axis=0,
        whole=True, dtype=member.base, fill=np.zeros((), member.base),
    )  # fmt: skip
    table = builder().build(whole)
    for part in parts:
        offset = part.source.dtype.fields["wanted"][1]
        layer = table.layers[0]
        at = int(np.searchsorted(layer.first, part.samples.start, side="right")) - 1
        shape = table.shapes[layer.shape[at]]
        assert int(shape.piece_begin[0]) % part.source.dtype.itemsize == offset
        assert shape.itemsize == 4
    if not member.shape:
        assert check(whole) == 0


# --- what has a table of its own ------------------------------------------------------------------


def test_files_that_are_alike_share_a_shape():
    sources = [made_up(f"{n}.h5", (10, 3), (5, 3), [1, 2], [9, 9]) for n in range(50)]
    parts = [Part(s, Slab.run(10 * n, 10 * n + 10), Slab.run(0, 10)) for n, s in enumerate(sources)]
    made = builder()
    table = made.build(joined(sources, 500, parts))
    assert len(table.shapes) == len(table.layers) == 1
    assert table.layers[0].row.size == len(made.sources) == 50
    assert table.chunks.offset.tolist() == [1, 2] * 50
    assert not table.is_filled_first


def test_mappings_that_go_on_are_one_segment():
    """A virtual dataset of a file's rows, mapped one by one; and one where each tenth is left."""
    source = made_up("a.h5", (1000, 3), (10, 3), range(100), [99] * 100, filters=DEFLATE)
    for left_out, segments in ((1000, 1), (10, 100)):
        rows = [row for row in range(1000) if row % left_out]
        parts = [
            Part(source, Slab.run(k, k + 1), Slab.run(row, row + 1)) for k, row in enumerate(rows)
        ]
        table = builder().build(joined([source], len(rows), parts))
        assert table.layers[0].row.size == segments
        assert table.chunks.offset.size == 100


def test_a_nested_dataset_is_not_listed_again_for_each_mapping(monkeypatch):
    """Its sources are looked through once, however many of its rows are mapped one by one."""
    sources = [made_up(f"{n}.h5", (10, 3), (10, 3), [n], [99]) for n in range(20)]
    parts = [Part(s, Slab.run(10 * n, 10 * n + 10), Slab.run(0, 10)) for n, s in enumerate(sources)]
    inner = joined(sources, 200, parts)
    single = Blocks.of(np.arange(199, -1, -1), np.ones(200, np.int64))
    times = []
    behind = Segments.behind
    monkeypatch.setattr(Segments, "behind", lambda *a: times.append(1) or behind(*a))
    outer = joined([inner], 200, [Part(inner, Slab.run(0, 200), single)])
    assert check(outer) == 0
    assert len(times) == 1


HUGE = 1 << 44


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (Slab.run(0, HUGE), Slab(0, 4, HUGE // 2, 2)),
        (Slab(0, 3, HUGE // 2, 2), Slab.run(0, HUGE)),
        (Slab(0, 5, HUGE // 4, 4), Slab(0, 3, HUGE // 2, 2)),
    ],
)
def test_selections_of_more_blocks_than_there_is_memory_for(ours, theirs):
    """A file of some bytes declares them; they are left to HDF5."""
    source = made_up("a.h5", (4 * HUGE,), (), [0], (), dtype="u1")
    with pytest.raises(TooManyRunsError):
        joined([source], ours.end, [Part(source, ours, theirs)])


def test_a_nested_selection_of_more_rows_than_there_is_memory_for():
    source = made_up("a.h5", (HUGE,), (), [0], (), dtype="u1")
    inner = joined([source], HUGE, [Part(source, Slab.run(0, HUGE), Slab.run(0, HUGE))])
    half = Part(inner, Slab.run(0, HUGE // 2), Slab(0, 2, HUGE // 2, 1))
    with pytest.raises(TooManyRunsError):
        joined([inner], HUGE // 2, [half])


def test_rows_that_a_source_has_not_are_left():
    source = made_up("a.h5", (10, 3), (), [0], ())
    for theirs in (Slab.run(5, 15), Slab.run(-1, 9)):
        whole = joined([source], 10, [Part(source, Slab.run(0, 10), theirs)])
        table = builder().build(whole)
        assert [shape.kind for shape in table.shapes] == [Kind.LEFT]
        assert not table.can_read


def test_what_only_others_can_read_is_left():
    plain = made_up("a.h5", (10, 3), (5, 3), [1, 2], [9, 9])
    for source in (
        dataclasses.replace(plain, filters=UNKNOWN),
        dataclasses.replace(plain, fallback_reason="because"),
        dataclasses.replace(plain, dtype=np.dtype(">u1").newbyteorder(">"), fallback_reason="x"),
    ):
        parts = [
            Part(plain, Slab.run(0, 10), Slab.run(0, 10)),
            Part(source, Slab.run(10, 20), Slab.run(0, 10)),
        ]
        table = builder().build(joined([plain], 20, parts))
        layer = table.layers[0]
        kinds = [table.shapes[number].kind for number in layer.shape]
        assert kinds == [Kind.ROWS_IN_CHUNKS, Kind.LEFT]
        assert layer.source[1] == -1
        assert table.can_read


def test_samples_of_more_pieces_than_the_core_can_count():
    layout = made_up("a.h5", (2, 1 << 16, 1 << 16), (1, 1, 1), [], [], numbers=[])
    table = builder().build(layout)
    assert [shape.kind for shape in table.shapes] == [Kind.LEFT]


def test_a_compact_dataset_without_elements():
    values = np.zeros((5, 0), "<i4")
    layout = dataclasses.replace(
        made_up("a.h5", (5, 0), (), [-1], (), dtype="<i4"), storage="compact", values=values
    )
    table = builder().build(layout)
    assert [shape.kind for shape in table.shapes] == [Kind.ROWS]


def test_one_file_with_two_stamps_is_two_sources():
    """It was replaced between the indexing of two fields: what is read of it must be either."""
    made = builder()
    one = made_up("a.h5", (5,), (), [0], (), stamp=FileStamp(1, 2, 3))
    other = made_up("a.h5", (5,), (), [0], (), stamp=FileStamp(1, 2, 4))
    for layout in (one, other, one):
        made.build(layout)
    assert [source.stamp.nbytes for source in made.sources] == [3, 4]
