"""Compares the bytes that are read and decoded with those that are used, and advises.

Layouts, options and counts enter; `ChunkUse` leaves. Used bytes are counted when batches are
delivered, decoded bytes when chunks are decoded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from h5async.config import ReaderConfig
from h5async.index.datasettable import kinds_of, table_of
from h5async.index.layout import DatasetLayout
from h5async.names import printable
from h5async.observe.stats import ChunkAdvice, Remedy
from h5async.opening.limits import wanted_kept_nbytes
from h5async.order.selection import Selection
from h5async.order.spans import SpanRows
from h5async.order.steps import StepRows
from h5async.samples.columns import INDICES, Rows
from h5async.spelling import named
from h5async.system.freememory import free_memory

_CACHED_SHARE = 0.5  # of the free memory, for a dataset or a window that is kept
_LEAST_CHUNK_NBYTES = 10_000  # reading smaller chunks costs more than it saves
_LOOKED_AT = 100_000  # samples, to estimate how many of a chunk are selected
_FAR_FEWER = 1.5  # reduction of samples per chunk that justifies rewriting a file


class Used(NamedTuple):
    """Bytes that samples need, by storage, with each chunk read or decoded once.

    Attributes
    ----------
    encoded
        In chunks that h5async decodes. Records of a table count as a whole, and so do edge chunks
        that extend beyond the dataset: no order of samples avoids these bytes.
    raw
        Not encoded.
    by_h5py
        In encoded chunks that only h5py reads.
    """

    encoded: float = 0.0
    raw: float = 0.0
    by_h5py: float = 0.0

    def plus(self, other: Used, times: float = 1.0) -> Used:
        """Return the sum; `other` counts `times` times."""
        return Used(*(mine + times * others for mine, others in zip(self, other, strict=True)))


class _Culprit(NamedTuple):
    """The column whose chunks cause the most decoded bytes per sample."""

    nbytes: float
    name: str
    layout: DatasetLayout


class ChunkFacts:
    """Facts about the chunks of a reader that do not change.

    Parameters
    ----------
    layouts
        Layouts of all columns, by name.
    rows
        Per column: the rows that each sample consists of.
    selection
        The samples of an epoch.

    Attributes
    ----------
    stored_share
        Encoded bytes per decoded byte, for chunks that h5async decodes.
    """

    def __init__(
        self,
        config: ReaderConfig,
        layouts: Mapping[str, DatasetLayout],
        rows: Sequence[Rows],
        selection: Selection,
    ) -> None:
        self._config = config
        self._layouts = layouts
        self._rows = dict(zip(layouts, rows, strict=True))
        self._selection = selection
        self._shares = {name: needs_of(layout) for name, layout in layouts.items()}
        stored = decoded = 0.0
        for layout in layouts.values():
            for leaf, count in kinds_of(layout):
                if needs := needs_of(leaf).encoded:
                    stored += count * leaf.stored_nbytes
                    decoded += count * leaf.nbytes * needs
        self.stored_share = stored / decoded if decoded else 0.0

    def used(self, column: str, nbytes: float) -> Used:
        """Return the bytes needed for `nbytes` delivered bytes of a column."""
        return Used().plus(self._shares[column], nbytes)

    def advice(self) -> ChunkAdvice:
        """Return what would decode or read less, with these options and this memory."""
        ours, h5pys = self._culprit(by_h5py=False), self._culprit(by_h5py=True)
        return ChunkAdvice(
            self._name_of(ours),
            self._unit_of(ours),
            self._remedies(ours, by_h5py=False),
            self._name_of(h5pys),
            self._remedies(h5pys, by_h5py=True),
            self._remedies_of_raw(),
        )

    def _culprit(self, *, by_h5py: bool) -> _Culprit | None:
        found = []
        for name, layout in self._layouts.items():
            share = self._shares[name]
            if share.by_h5py if by_h5py else share.encoded:
                leaf = _largest_chunks(layout, by_h5py=by_h5py)
                found.append(_Culprit(float(leaf.chunk_nbytes), name, leaf))
        return max(found, key=lambda one: one.nbytes, default=None)

    def _name_of(self, culprit: _Culprit | None) -> str:
        """Return the field's name if there are several fields."""
        if culprit is None or len({name.removesuffix(INDICES) for name in self._layouts}) == 1:
            return ""
        return printable(culprit.name.removesuffix(INDICES))

    def _unit_of(self, culprit: _Culprit | None) -> str:
        """Return the word for an item of a chunk."""
        if culprit is None:
            return "sample"
        if isinstance(self._rows[culprit.name], StepRows):
            return "row"
        if isinstance(self._rows[culprit.name], SpanRows):
            return "value"
        is_image = self._config.h_dim is not None and culprit.name == self._first
        return "image" if is_image else "sample"

    @property
    def _first(self) -> str:
        return next(iter(self._layouts))

    def _remedies(self, culprit: _Culprit | None, *, by_h5py: bool) -> tuple[Remedy, ...]:
        if culprit is None:
            return ()
        config, found = self._config, []
        is_free = config.weights is None and config.sampler is None
        if config.shuffle == "full" and is_free and not by_h5py and self._window_fits():
            # (h5py would still decode a chunk for each batch that needs it.)
            found.append(Remedy(named("shuffle", "window"), self._left_by_window(culprit)))
        if config.cache is None and config.num_helpers <= 1 and config.decode != "device":
            if self._fits():
                found.append(Remedy(f"{named('cache', 'host')} from the second epoch on", 0.0))
        rows = self._rows_of_chunk(culprit)
        if rows:
            unit = self._unit_of(culprit)
            of = f' "{self._name_of(culprit)}"' if self._name_of(culprit) else ""
            count = f"one {unit}" if rows == 1 else f"{rows:,} {unit}s"
            found.append(Remedy(f"repack{of} with {count} a chunk"))
        return tuple(found)

    def _rows_of_chunk(self, culprit: _Culprit) -> int:
        """Return the number of rows that a chunk should have; 0 if it need not change."""
        layout, rows = culprit.layout, self._rows[culprit.name]
        now = layout.chunk_shape[layout.sample_axis]
        wanted = -(-_LEAST_CHUNK_NBYTES // max(1, layout.row_nbytes))
        if isinstance(rows, StepRows):
            wanted = max(wanted, rows.size)
        elif isinstance(rows, SpanRows):
            wanted = max(wanted, rows.likely(1))
        return wanted if wanted * _FAR_FEWER <= now else 0

    def _left_by_window(self, culprit: _Culprit) -> float:
        """Return the samples decoded per used sample if each chunk is decoded once.

        Unselected samples of a chunk are decoded in vain in any order, and each helper process
        decodes the chunks of its batches.
        """
        layout, rows = culprit.layout, self._rows[culprit.name]
        per_chunk, steps = float(layout.chunk_shape[layout.sample_axis]), 1
        if isinstance(rows, StepRows):
            steps = rows.size
        elif isinstance(rows, SpanRows):
            per_chunk = max(1.0, per_chunk / max(1, rows.likely(1)))
        looked_at = np.arange(min(self._selection.size, _LOOKED_AT))
        samples = self._selection.ascending.samples(looked_at)
        chunks = np.unique(samples // per_chunk).size
        once = chunks * per_chunk / max(1, samples.size * steps)
        return max(1.0, once) * max(1, self._config.num_helpers)

    def _remedies_of_raw(self) -> tuple[Remedy, ...]:
        """Return remedies for raw chunks that are read whole because they lie across samples."""
        across = [
            name
            for name, layout in self._layouts.items()
            if self._shares[name].raw and layout.chunk_shape and layout.sample_axis
        ]
        if not across:
            return ()
        name = printable(across[0].removesuffix(INDICES))
        return (Remedy(f'store "{name}" with the dimension of its samples first'),)

    def _window_fits(self) -> bool:
        """Tell whether memory suffices for the chunks that a window keeps."""
        wanted = sum(wanted_kept_nbytes(self._config, self._layouts, in_window=True))
        wanted *= max(1, self._config.num_helpers)
        return wanted <= _CACHED_SHARE * free_memory()[0].nbytes

    def _fits(self) -> bool:
        """Tell whether the selected samples fit into memory."""
        nbytes = 0
        for name, layout in self._layouts.items():
            share = self._selection.size / max(1, layout.sample_count)
            rows = self._rows[name]
            times = rows.size if isinstance(rows, StepRows) else 1
            nbytes += int(layout.nbytes * share * times)
        return nbytes <= _CACHED_SHARE * free_memory()[0].nbytes


def needs_of(layout: DatasetLayout) -> Used:
    """Return what a byte of a dataset needs; nothing if it is in memory from the beginning."""
    if layout.segments is not None:
        segments, datasets = table_of(layout)
        of_kind = datasets.columns.kind[segments.dataset]
        held = np.bincount(of_kind, segments.length, len(datasets.kinds))
        found, nbytes = Used(), max(1, layout.num_samples * layout.row_nbytes)
        for kind, samples in zip(datasets.kinds, held.tolist(), strict=True):
            # (A member's dataset has whole records.)
            found = found.plus(needs_of(kind), samples * kind.row_nbytes / nbytes)
        return found
    encoded = 0.0
    if layout.filters and layout.chunk_shape:
        whole = math.prod(layout.grid) * math.prod(layout.chunk_shape)
        encoded = whole / max(1, math.prod(layout.shape))
        encoded *= max(1.0, layout.stored_itemsize / max(1, layout.dtype.itemsize))
    if layout.fallback_reason is not None:
        return Used(by_h5py=encoded)
    if layout.values is not None:
        return Used()
    return Used(encoded=encoded, raw=float(not encoded))


def _largest_chunks(layout: DatasetLayout, *, by_h5py: bool) -> DatasetLayout:
    """Return the dataset with the largest chunks among the parts of a layout."""
    leaves = [leaf for leaf, _ in kinds_of(layout)]
    found = [y for y in leaves if (s := needs_of(y)) and (s.by_h5py if by_h5py else s.encoded)]
    return max(found or [layout], key=lambda leaf: leaf.chunk_nbytes)
