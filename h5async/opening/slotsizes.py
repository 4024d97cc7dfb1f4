"""Computes what slots must have room for, and how much memory beside them saves work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from h5async.config import ReaderConfig
from h5async.core.binding import KEPT_OVERHEAD_NBYTES, load_core
from h5async.index.datasettable import kinds_of, pieces_read, unit_nbytes
from h5async.index.extents import kept_whole_nbytes
from h5async.index.layout import DatasetLayout
from h5async.io.stores import far_names
from h5async.opening.dataset import Samplings
from h5async.order.rows import SpanRows, StepRows
from h5async.order.window import kept_nbytes
from h5async.plan.transform import RowTransform, row_transform
from h5async.samples.assembly import columns_of, field_kinds
from h5async.samples.fieldkind import FieldKind, Outline, Rows
from h5async.system.resources import free_memory

# A dataset of encoded chunks that decodes to at most this (labels, for example) is decoded once; as
# much of small datasets is kept.
_KEPT_WHOLE_NBYTES = 64 << 20
_HOST_SHARE = 0.5  # of free memory, for a cache without a limit
# The number of groups of chunks that split the same rows and are shared by batches in order.
_IN_ORDER_GROUPS = 4
# The core cuts a batch into this number of items per thread if it has fewer groups (plan.h).
_ITEMS_OF_THREAD = 4


def slot_transforms(
    config: ReaderConfig, layouts: Mapping[str, DatasetLayout], samplings: Samplings, rows: int
) -> dict[str, RowTransform]:
    """Return the transform of each column, with its number of rows in slots of `rows` samples.

    ConfigError if the options of a field do not fit its dataset.
    """
    columns = columns_of(field_kinds(config.batch_fields))
    transforms = {name: row_transform(columns[name], layouts[name]) for name in columns}
    room: dict[SpanRows, tuple[int, int]] = {}  # columns of a field share it
    for name, one in zip(transforms, samplings.rows, strict=True):
        if not isinstance(one, SpanRows):
            continue
        if one not in room:
            most = samplings.most_rows(one, rows)
            room[one] = max(1, most), min(most, one.likely(rows))
        capacity, likely = room[one]
        transforms[name] = replace(transforms[name], capacity=capacity, likely=likely)
    return transforms


def made_nbytes(
    kinds: Mapping[str, FieldKind], outlines: Sequence[Outline], rows: int
) -> dict[str, int]:
    """Return, by field, the bytes of a slot that the host makes of the rows of its columns."""
    return {
        one.name: rows * one.made_on_host_nbytes + kinds[one.name].decoded_nbytes(rows)
        for one in outlines
    }


def shared_nbytes(kinds: Mapping[str, FieldKind], rows: int, most: int) -> list[int]:
    """Return, per field, the memory that helper processes share for decoded samples of a batch.

    `rows` is the number of samples, and `most` the limit for samples of any size.
    """
    several = kinds.values()
    return [one.decoded_nbytes(rows) or most if one.is_encoded else 0 for one in several]


def wanted_kept_nbytes(
    config: ReaderConfig,
    layouts: Mapping[str, DatasetLayout],
    rows: Sequence[Rows] = (),
    selected: float = 1.0,
    *,
    in_window: bool = False,
) -> list[int]:
    """Return, per field, how much memory for later batches saves work.

    `rows` are those of each field's samples, and `selected` is the share of all samples that are in
    an epoch. `in_window` assumes ``shuffle="window"``, whatever the options say.
    """
    several, wanted = list(layouts.values()), []
    in_window |= config.shuffle == "window"
    drawing = config.weights is not None, config.sampler is not None
    mixing = config.shuffle, config.bucket, config.batch_values, *drawing  # else in file order
    is_cached = keeps_chunks(config, layouts, rows)
    for number, layout in enumerate(several):
        nbytes, small_nbytes = kept_whole_nbytes(layout)
        if is_cached:
            nbytes = min(nbytes, (config.cache_bytes or nbytes) // len(several))
        elif nbytes > _KEPT_WHOLE_NBYTES:
            useful = 0
            if in_window:
                useful = _window_nbytes(config, layout, several)
            elif not any(mixing):
                reach = _reach(rows[number]) if rows else 0
                most = _window_nbytes(config, layout, several)
                useful = _in_order_nbytes(config, layout, reach, selected, most)
            nbytes = min(nbytes, useful)  # never more than all chunks
        elif nbytes + small_nbytes <= _KEPT_WHOLE_NBYTES:
            nbytes += small_nbytes
        wanted.append(nbytes)
    return wanted


def keeps_chunks(
    config: ReaderConfig,
    layouts: Mapping[str, DatasetLayout],
    rows: Sequence[Rows],
    granted_nbytes: int | None = None,
) -> bool:
    """Tell whether ``cache="host"`` keeps decoded chunks, each decoded once, in place of rows.

    So parts are cropped out of them, and so it is if all rows are in encoded chunks that the core
    reads, and all of these fit into `granted_nbytes`, by default what the cache may take.
    """
    several = list(layouts.values())
    if config.cache != "host" or any(layout.crop is not None for layout in several):
        return config.cache == "host"
    are_encoded = all(
        leaf.filters and leaf.chunk_shape and leaf.fallback_reason is None and not leaf.heaps
        for layout in several
        for leaf, _ in kinds_of(layout)
    )
    if not are_encoded or any(one is not None for one in rows) or far_names(config.files):
        return False
    if granted_nbytes is None:
        granted_nbytes = config.cache_bytes
    if granted_nbytes is None:
        granted_nbytes = int(free_memory()[0].nbytes * _HOST_SHARE)
    whole = sum(kept_whole_nbytes(layout).encoded for layout in several)
    return load_core() is not None and whole <= granted_nbytes


def _window_nbytes(
    config: ReaderConfig, layout: DatasetLayout, layouts: Sequence[DatasetLayout]
) -> int:
    nbytes = kept_nbytes(layout, layouts, config.window_bytes)
    least = min((leaf.chunk_nbytes for leaf, _ in kinds_of(layout) if leaf.filters), default=0)
    return nbytes + nbytes // max(1, least) * KEPT_OVERHEAD_NBYTES


def _in_order_nbytes(
    config: ReaderConfig, layout: DatasetLayout, reach: int, selected: float, most: int
) -> int:
    """Return the memory for keeping chunks when samples come in order; at most `most`.

    It is for data that consecutive batches share, beyond the chunk or two that are kept in any
    case: groups of chunks that split the same rows, which several batches in flight may need; and
    chunks that multi-step samples reach back to (`_reach`). If several threads decode one group, it
    stays until all have got to it, so those of all batches that may be in flight together are kept.
    The result is 0 if `most` is too little to be useful.
    """
    wanted, threads = 0, max(1, config.filler_threads)
    spanned = config.batch_size / max(selected, 1e-9)  # rows, by a batch
    at_once = max(2, min(config.prefetch, threads))
    for leaf, pieces in pieces_read(layout):
        unit = unit_nbytes(leaf) // max(1, leaf.num_pieces) * pieces
        if not unit or (pieces == 1 and not reach):
            continue
        samples = leaf.chunk_shape[leaf.sample_axis]
        is_aligned = samples == 1 or (
            leaf is layout and selected == 1 and config.batch_size % samples == 0
        )
        if is_aligned and not reach:
            continue  # no two batches share a group
        group = unit + pieces * KEPT_OVERHEAD_NBYTES
        least = 2 + -(-reach // samples)
        is_cut = spanned <= _ITEMS_OF_THREAD * threads * samples  # else a thread decodes a group
        new = int(at_once * spanned) if reach or is_cut else 0
        groups = min(_IN_ORDER_GROUPS + -(-(reach + new) // samples), most // group)
        if groups >= least:
            chunks = threads * (leaf.chunk_nbytes + KEPT_OVERHEAD_NBYTES)
            wanted = max(wanted, groups * group + chunks)
    return min(most, wanted)


def _reach(rows: Rows) -> int:
    """Return the number of rows whose chunks stay until no later sample needs them.

    A row serves as one step of a sample, and later as the previous step of another one; meanwhile
    all steps advance by the gap between the two.
    """
    if not isinstance(rows, StepRows) or rows.size < 2:
        return 0
    offsets = np.unique(rows.offsets)
    return int(offsets[-1] - offsets[0] + np.diff(offsets).max(initial=1) - 1)
