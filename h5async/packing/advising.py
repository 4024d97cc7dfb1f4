"""Finds better chunks for a dataset: layouts to try enter; the best one leaves.

A sample of the rows is rewritten in each layout, and read; its speed stands for that of the whole
dataset. In order and in a window, each chunk is decoded once in either. With a full shuffle, a
batch of the whole dataset may need more chunks than the sample has; `scattered` draws batches of
the sample that need as many chunks per row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from h5async.codec.encoders import parse_filters, set_filters, spell_filters
from h5async.codec.filters import ZSTD, Filter, is_known_to_hdf5
from h5async.index.layout import DatasetLayout
from h5async.index.tables import ChunkTable
from h5async.packing.chunkwriter import ChunkWriter
from h5async.packing.safefile import SafeFile

DATASET = "data"  # in files of samples
SAMPLE_NBYTES = 96 << 20  # more than a reader keeps decoded, whatever the order
_PLACES = 8
_LEAST_CHUNKS, _MOST_NBYTES = 16, 512 << 20  # of a sample in the current layout
_TARGETS = tuple(1 << k for k in (14, 16, 18, 20))  # bytes of a chunk
_AS_SCATTERED = 0.97  # if a batch of the sample needs this share of chunks, do not scatter
_AS_FAST, _AS_GOOD = 0.95, 1.05  # speed that counts as the fastest; size as the smallest


@dataclass(frozen=True)
class Layout:
    """Samples per chunk (0: not chunked), and filters as spelled in options."""

    rows: int
    filter: str
    is_current: bool = False


@dataclass
class Finding:
    """The size and speed of a layout.

    `stored_nbytes` is that of the whole dataset. `speeds` are samples per second by order, each
    measured several times; `cold` is the same for a file that is not in memory.
    """

    layout: Layout
    stored_nbytes: float
    speeds: dict[str, list[float]] = field(default_factory=dict)
    cold: dict[str, float] = field(default_factory=dict)

    def warm(self, order: str) -> float:
        """Return the fastest measurement, the one least disturbed by other load."""
        return max(self.speeds[order])

    def speed(self, order: str, memory_nbytes: float) -> float:
        """Return the speed to expect if up to `memory_nbytes` of a file stay in memory."""
        warm = self.warm(order)
        return warm if self.stored_nbytes <= memory_nbytes else min(warm, self.cold[order])


def layouts_to_try(found: DatasetLayout) -> list[Layout]:
    """Return a dataset's current layout, and others with chunks of 16 KiB to 1 MiB."""
    row_nbytes, count = max(1, found.row_nbytes), found.num_samples
    rows = {max(1, min(count, -(-target // row_nbytes))) for target in _TARGETS}
    names = ["lzf", "gzip:4"]
    if is_known_to_hdf5(Filter(ZSTD, (), "zstd")):
        names.append("zstd:3")
    prefix = "shuffle+" if found.dtype.itemsize > 1 and found.dtype.kind in "iufcmM" else ""
    current = current_layout(found)
    tried = [Layout(min(rows), "none")]
    tried += [Layout(n, f"{prefix}{name}") for name in names for n in sorted(rows)]
    return [current, *(one for one in tried if one != replace(current, is_current=False))]


def current_layout(found: DatasetLayout) -> Layout:
    """Return a dataset's current layout."""
    rows = found.chunk_shape[0] if found.chunk_shape else 0
    return Layout(rows, spell_filters(found.filters), is_current=True)


def rows_of_sample(found: DatasetLayout, *, in_chunks: bool) -> NDArray[np.int64]:
    """Return rows from several places of a dataset; all rows if it is small.

    `in_chunks`: return the rows of whole chunks, of `_LEAST_CHUNKS` or more if not too large.
    """
    count, row_nbytes = found.num_samples, max(1, found.row_nbytes)
    unit, nbytes = 1, SAMPLE_NBYTES
    if in_chunks and found.chunk_shape:
        unit = max(1, min(count, found.chunk_shape[0]))
        nbytes = max(nbytes, min(_MOST_NBYTES, _LEAST_CHUNKS * unit * row_nbytes))
    wanted = -(-nbytes // row_nbytes)
    if wanted >= count:
        return np.arange(count)
    places = min(_PLACES, -(-wanted // unit))
    run = -(-wanted // places // unit) * unit
    starts = np.linspace(0, max(0, count - run), places).astype(np.int64) // unit * unit
    rows = np.unique(np.add.outer(starts, np.arange(run)))
    return rows[rows < count]


def write_sample(folder: Path, values: NDArray[Any], layout: Layout) -> Path:
    """Write rows in a layout; return the file."""
    path = folder / f"{layout.rows}-{layout.filter.replace(':', '-')}.h5"
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    set_filters(properties, parse_filters(layout.filter))
    chunks = (max(1, min(layout.rows, len(values))), *values.shape[1:])
    with SafeFile(path, overwrite=True) as safe:
        like = {"dtype": values.dtype, "chunks": chunks, "dcpl": properties}
        made = safe.file.create_dataset(DATASET, values.shape, **like)
        with ChunkWriter(safe) as writer:
            writer.open(made).write((0,) * values.ndim, values)
        safe.finish()
    return path


def stored_nbytes(path: Path) -> int:
    """Return the stored bytes of a sample's values."""
    with h5py.File(path) as file:
        return int(file[DATASET].id.get_storage_size())


def chunks_of_batch(count: int, rows: int, batch: int) -> float:
    """Return the average number of chunks per batch, with `count` rows in random order."""
    chunks = -(-count // max(1, rows))
    return chunks * -math.expm1(batch * math.log1p(-1 / chunks)) if chunks > 1 else 1.0


def scattered(
    rows: NDArray[np.int64], of_chunk: int, count: int, batch: int
) -> list[list[int]] | None:
    """Return batches of a sample that need as many chunks per row as those of the whole dataset.

    `rows` are those of the sample, in whole chunks of `of_chunk` rows; the dataset has `count`. No
    chunk is in two batches. Returns None if a random order of the sample does as well.
    """
    wanted = chunks_of_batch(count, of_chunk, batch)
    if chunks_of_batch(rows.size, of_chunk, batch) >= _AS_SCATTERED * wanted:
        return None
    chunks, rng = np.split(rows, range(of_chunk, rows.size, of_chunk)), np.random.default_rng(0)
    size = max(1, min(batch, int(len(chunks) / 2 * batch / wanted)))
    needed = max(1, round(wanted * size / batch))
    order, batches = rng.permutation(len(chunks)), []
    for begin in range(0, len(order) - needed + 1, needed):
        here = [chunks[n] for n in order[begin : begin + needed]]
        batches.append([int(rng.choice(here[k % needed])) for k in range(size)])
    return batches


def whole_layout(found: DatasetLayout, layout: Layout, stored_nbytes: float) -> DatasetLayout:
    """Return a dataset's hypothetical form in another layout, with contiguously stored chunks."""
    return found if layout.is_current else _in_chunks(found, layout, stored_nbytes)


def joined_layout(first: DatasetLayout, every: DatasetLayout) -> DatasetLayout:
    """Return the datasets of several files as one, stored like the first one."""
    found = replace(first, shape=every.shape, stored_nbytes=every.stored_nbytes)
    return _in_chunks(found, current_layout(first), every.stored_nbytes)


def _in_chunks(found: DatasetLayout, layout: Layout, stored_nbytes: float) -> DatasetLayout:
    if not layout.rows:
        return found
    chunks = -(-found.num_samples // layout.rows)
    size = max(1, round(stored_nbytes / chunks))
    table = ChunkTable(
        None,
        np.arange(chunks, dtype=np.int64) * size,
        np.full(chunks, size, np.int64),
        np.zeros(chunks, np.uint32),
    )
    shape = (layout.rows, *found.shape[1:])
    filters = found.filters if layout.is_current else parse_filters(layout.filter)
    return replace(found, storage="chunked", chunk_shape=shape, filters=filters, chunks=table)


def best_of(findings: Sequence[Finding], order: str, memory_nbytes: float) -> Finding:
    """Return the smallest of the layouts that are about as fast as the fastest.

    The current layout is preferred if it is among them and hardly larger.
    """
    fastest = max(one.speed(order, memory_nbytes) for one in findings)
    good = [one for one in findings if one.speed(order, memory_nbytes) >= _AS_FAST * fastest]
    best = min(good, key=lambda one: one.stored_nbytes)
    kept = [one for one in good if one.layout.is_current]
    return next((o for o in kept if o.stored_nbytes <= _AS_GOOD * best.stored_nbytes), best)
