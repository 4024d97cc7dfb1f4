"""What a reader would take of the memory enters; an error leaves where that is too much.

A file of a few bytes may declare rows, or chunks, of any size.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from h5async.config import ReaderConfig
from h5async.errors import ConfigError
from h5async.execute import scratch_nbytes
from h5async.interruptions import suppressing
from h5async.layout import DatasetLayout
from h5async.plan import is_staged
from h5async.transform import RowTransform

_SHARE = 0.5  # of the memory that is free, where no limit is given
# Measured: what is kept for each piece of a sample, for each of its dimensions, and what a plan
# takes for each piece of a batch.
_PIECE_NBYTES, _PIECE_AXIS_NBYTES, _PLANNED_NBYTES = 128, 80, 32
_LEAST_NBYTES = 1 << 20  # what a list of chunks may take in any case


def free_memory_nbytes() -> int:
    """Return the memory that this process can still have, by the system and its control group."""
    found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppressing(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                found = int(line.split()[1]) * 1024
    with suppressing(OSError, ValueError):  # there is no group, or no limit ("max")
        group = Path("/sys/fs/cgroup")
        left = int((group / "memory.max").read_text()) - int((group / "memory.current").read_text())
        for line in (group / "memory.stat").read_text().splitlines():
            name, count = line.split()
            if name in ("active_file", "inactive_file"):  # the page cache, which makes way
                left += int(count)
        found = min(found, max(0, left))
    return found


def check_memory(
    config: ReaderConfig,
    layouts: Mapping[str, DatasetLayout],
    transforms: Mapping[str, RowTransform],
    rows: int,
) -> None:
    """See that what a reader would hold is within ``max_batch_bytes``.

    That is, each for itself: all slots together; any one chunk that is held whole, whoever decodes
    it; a row of a source of which only pieces are wanted; and the list of a batch's chunks.

    Raises
    ------
    ConfigError
        If they are not.
    """
    limit, whose = config.max_batch_bytes, "max_batch_bytes"
    if limit is None:
        free = free_memory_nbytes()
        limit, whose = int(free * _SHARE), f"max_batch_bytes: half of the {free:,} that are free"
    needed = {
        name: config.prefetch * rows * (t.raw_nbytes + (0 if t.is_identity else t.nbytes))
        for name, t in transforms.items()
    }
    total = sum(needed.values())
    if total > limit:
        largest = layouts[max(needed, key=lambda name: needed[name])]
        raise ConfigError(
            f'{largest.file}: dataset "{largest.path}" of shape {largest.shape}: {config.prefetch}'
            f" batches of {rows} samples take {total:,} bytes and do not fit in memory, of which"
            f" they may take {limit:,} ({whose}); make batch_size or prefetch smaller, or set"
            " max_batch_bytes if you trust the file"
        )
    for layout in layouts.values():
        for stage in _staged(layout):
            if stage.row_nbytes > limit:
                raise ConfigError(
                    f'{stage.file}: dataset "{stage.path}": only pieces of its samples are wanted,'
                    f" but each is read whole, and has {stage.row_nbytes:,} bytes, of {limit:,}"
                    f" that it may take ({whose}); set max_batch_bytes if you trust the file"
                )
        for leaf in layout.leaves():
            _check_pieces(leaf, rows, limit, whose)
            if leaf.filters or scratch_nbytes(leaf)[1]:
                _check_chunk(leaf, limit, whose)
            for source in leaf.origins():  # of what h5py reads; HDF5 decodes chunks whole, too
                if source.filters:
                    _check_chunk(source, limit, whose)


def _staged(layout: DatasetLayout) -> Iterator[DatasetLayout]:
    """Yield the sources of which whole rows are held to take pieces of them."""
    for part in layout.parts:
        if is_staged(layout, part):
            yield part.source
        yield from _staged(part.source)


def _check_pieces(layout: DatasetLayout, rows: int, limit: int, whose: str) -> None:
    """See that what is kept for each piece of a sample, and of a batch, is within a limit."""
    if layout.chunks is None:
        return
    pieces, groups = layout.num_pieces, min(rows, layout.grid[layout.sample_axis])
    kept = _PIECE_NBYTES + len(layout.shape) * _PIECE_AXIS_NBYTES
    needed = pieces * (kept + groups * _PLANNED_NBYTES)
    if needed > max(limit, _LEAST_NBYTES):
        raise ConfigError(
            f'{layout.file}: dataset "{layout.path}": a sample of shape {layout.row_shape} lies in'
            f" {pieces:,} chunks of shape {layout.chunk_shape}; a list of those of a batch takes"
            f" {needed:,} bytes, of {limit:,} that it may take ({whose}); make batch_size smaller,"
            " store larger chunks, or set max_batch_bytes if you trust the file"
        )


def _check_chunk(layout: DatasetLayout, limit: int, whose: str) -> None:
    """See that a chunk that must be held whole is within a limit."""
    # What HDF5 decodes may be larger than what is wanted: all members of a compound, say.
    stored = math.prod(layout.chunk_shape[: len(layout.shape) - layout.extra_dims])
    nbytes = max(layout.chunk_nbytes, stored * layout.stored_itemsize)
    if layout.chunk_shape and nbytes > limit:
        what, remedy = "decodes to", ""
        if not layout.filters:
            what = "is held whole and has"
        if not layout.filters and layout.sample_axis != 0:
            remedy = " take its first dimension as that of the samples, or"
        raise ConfigError(
            f'{layout.file}: dataset "{layout.path}": a chunk of shape {layout.chunk_shape}'
            f" {what} {nbytes:,} bytes, of {limit:,} that it may take ({whose});{remedy}"
            " set max_batch_bytes if you trust the file"
        )
