"""Has stored elements converted as chunks are decoded: a filter more in front of the pipeline.

The layout of a dataset enters whose stored bytes are not NumPy's; one of chunks leaves that decode
to NumPy's elements. Contiguous values count as chunks of some rows, which no other filter encodes.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from h5async.codec.filters import Filter
from h5async.codec.storedelements import NUMBER
from h5async.index.chunktable import ChunkTable, repeated
from h5async.index.layout import DatasetLayout
from h5async.index.obstacles import NotDirectError

_UNIT_NBYTES = 1 << 16  # of contiguous values that are converted at a time
_MOST_UNITS = 1 << 20
_MOST_FILTERS = 31  # beside it: bits of a filter mask


def converted(layout: DatasetLayout, parameters: tuple[int, ...]) -> DatasetLayout:
    """Return a layout whose chunks are converted by the filter of these parameters.

    Raises
    ------
    NotDirectError
        If chunks have not the bytes of whole elements, or contiguous values would be cut into too
        many units.
    """
    conversion = Filter(NUMBER, parameters, "conversion")
    if layout.chunks is not None:
        if len(layout.filters) >= _MOST_FILTERS:
            raise NotDirectError("as many filters as HDF5 allows, and a conversion")
        table = layout.chunks
        mask = table.filter_mask << np.uint32(1)
        if table.filter_mask.strides == (0,):
            mask = repeated(int(mask[0]), mask.size, "u4")
        return layout.changed(
            filters=(conversion, *layout.filters), chunks=replace(table, filter_mask=mask)
        )
    return _in_units(layout, conversion)


def _in_units(layout: DatasetLayout, conversion: Filter) -> DatasetLayout:
    """Return the layout of contiguous values as chunks of rows, all equally many."""
    rows, *rest = [int(extent) or 1 for extent in layout.shape]
    row_nbytes = math.prod(rest) * conversion.parameters[1]
    most = min(rows, max(1, _UNIT_NBYTES // row_nbytes))
    size = max(n for n in range(1, most + 1) if rows % n == 0)
    count = rows // size if layout.offset >= 0 and 0 not in layout.shape else 0
    if count > _MOST_UNITS:
        raise NotDirectError("a stored type to convert, of rows that make no equal units")
    nbytes = size * row_nbytes
    offset = layout.offset + nbytes * np.arange(count, dtype=np.int64)
    return layout.changed(
        chunk_shape=(size, *rest),
        filters=(conversion,),
        chunks=ChunkTable(
            None if count == rows // size else np.zeros(0, np.int64),
            offset,
            repeated(nbytes, count, "i8"),
            repeated(0, count, "u4"),
        ),
    )
