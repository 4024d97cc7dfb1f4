"""Makes blocks of Ray Data: a batch enters, an Arrow table leaves that shares its memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from ray.data.extensions import ArrowTensorArray, ArrowVariableShapedTensorArray

from h5async.errors import ConfigError, DatasetError
from h5async.reader.batch import Batch
from h5async.samples.ragged import Images, Ragged
from h5async.samples.sparse import Csr

SPARSE = ("_indices", "_data")  # suffixes of the two columns of sparse rows


def columns_of(name: str, values: Any) -> dict[str, pa.Array]:
    """Return the columns of a field of a batch, by name.

    Rows of numbers are tensors; samples of any length, lists; those of more dimensions, tensors of
    variable shape. Sparse rows are two columns of lists, ``NAME_indices`` and ``NAME_data``.

    DatasetError if Arrow has no such type.
    """
    if isinstance(values, Csr):
        lists = (_lists(part, values.indptr) for part in (values.indices, values.data))
        return {f"{name}{suffix}": one for suffix, one in zip(SPARSE, lists, strict=True)}
    try:
        return {name: _column(values)}
    except (pa.ArrowException, NotImplementedError, TypeError) as error:
        raise DatasetError(
            f"field {name!r}: Arrow has no type for {values.dtype} ({error}); choose other fields"
            " (a path may end in one member of a compound), or cast numbers by Field's dtype"
        ) from error


def block_of(batch: Batch, further: Sequence[str] = ()) -> pa.Table:
    """Return all columns of a batch, and `further` attributes of it such as ``index``."""
    columns: dict[str, pa.Array] = {}
    for name in batch.keys():
        made = columns_of(name, batch[name])
        for twice in made.keys() & columns.keys():
            raise ConfigError(f"two fields have a column {twice!r}; give one of them another name")
        columns |= made
    return pa.table(columns | {name: pa.array(getattr(batch, name)) for name in further})


def values_nbytes(column: pa.ChunkedArray) -> int | None:
    """Return the bytes of the values in a column of samples of any length; None of others."""
    found = 0
    for chunk in column.chunks:
        if isinstance(chunk, ArrowVariableShapedTensorArray):
            chunk = chunk.storage.field("data")
        if not pa.types.is_large_list(chunk.type):
            return None
        found += chunk.flatten().nbytes
    return found


def _column(values: Any) -> pa.Array:
    if isinstance(values, Ragged):
        if isinstance(values, Images) or values.values.ndim > 1:
            return _tensors(values)
        return _lists(values.values, values.offsets)
    if values.dtype.names is not None:
        parts = [_column(np.ascontiguousarray(values[name])) for name in values.dtype.names]
        return pa.StructArray.from_arrays(parts, values.dtype.names)
    if values.ndim == 1:
        return pa.array(values)
    if values.dtype.kind not in "biuf":  # texts, or what Arrow refuses
        return pa.array(values.tolist())
    return ArrowTensorArray.from_numpy(values)


def _lists(values: NDArray[Any], offsets: NDArray[Any]) -> pa.Array:
    return pa.LargeListArray.from_arrays(pa.array(offsets, pa.int64()), pa.array(values))


def _tensors(samples: Ragged) -> pa.Array:
    """Return tensors of variable shape, as `ArrowVariableShapedTensorArray.from_numpy` does.

    That copies, and takes no empty list.
    """
    if isinstance(samples, Images):
        shapes = samples.shapes
    else:
        inner = np.broadcast_to(samples.values.shape[1:], (len(samples), samples.values.ndim - 1))
        shapes = np.column_stack((samples.lengths, inner))
    count, ndim = shapes.shape
    each = int(np.prod(samples.values.shape[1:]))
    data = _lists(samples.values.reshape(-1), samples.offsets * each)
    ends = pa.array(np.arange(count + 1, dtype=np.int32) * ndim)
    shape = pa.ListArray.from_arrays(ends, pa.array(shapes.reshape(-1)))
    storage = pa.StructArray.from_arrays([data, shape], ["data", "shape"])
    some = np.zeros((1,) * ndim, samples.values.dtype)
    return ArrowVariableShapedTensorArray.from_numpy([some]).type.wrap_array(storage)
