"""Opens fields with one value per sequence, per file, or for the whole dataset.

A field needs one fact (see `filefacts.py`) of each file: a layout with one row for each group, or
for the file (`ONE`), or with a row for each sequence (`EACH`). Scalars, attributes and
variable-length strings are values in memory; other datasets are read in place. Layouts with a row
for each sample leave, and the values of the whole dataset.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from h5async.config import Field, ReaderConfig
from h5async.config.files import FileName
from h5async.errors import ConfigError, DatasetError
from h5async.index.chunks import left_to_hdf5
from h5async.index.contents import Grouping, what_is_there
from h5async.index.datasets import Indexer
from h5async.index.datasettable import shared, table_of
from h5async.index.hdf5 import cf_attributes, reading
from h5async.index.layout import DatasetLayout
from h5async.index.links import Located, Reach, below, files_of, found_at, open_index
from h5async.index.metadata import Further, layout_at
from h5async.index.savedindex import Wanted
from h5async.index.storedtypes import without_metadata
from h5async.index.tables import Int64s, Segments
from h5async.io.source import settled
from h5async.io.stores import absolute_name
from h5async.opening.filevalues import FileValues
from h5async.opening.selecting import sequences_of
from h5async.order.rows import starts_of
from h5async.plan.transform import row_transform
from h5async.read.executors import read_rows
from h5async.samples.fieldkind import join_values, layout_of_values
from h5async.spelling import name_bytes, name_text

ONE, EACH = "one", "each"
_MOST_VALUES = 1 << 20  # of an attribute, or strings of a dataset
_STRING_NBYTES = 64  # per variable-length string, as an object
_ROWS = "ends", "starts", "lengths", "ids", "last"


def wanted_once(field: Field, config: ReaderConfig, groups: str) -> Wanted:
    """Return the fact that a field needs of each file; ConfigError if its options do not fit."""
    sequences = config.sequences
    kind = None if sequences is None else sequences.kind
    several = [one for one in config.batch_fields.values() if one.per is None]
    is_of_sequences = field.per == "sequence"
    if is_of_sequences and (kind in _ROWS or isinstance(several[0].num_dim, tuple)):
        return Wanted.of(field)._replace(kind=EACH)
    if is_of_sequences and sequences is not None and sequences.across is not None:
        raise ConfigError(
            f'"{field.path}": all files are one sequence; set per="file" or per="dataset"'
        )
    if field.axes is not None or field.num_dim != 0:
        raise ConfigError(
            f'"{field.path}": the whole dataset is one value, without a dimension that counts'
            " samples; leave out num_dim and axes"
        )
    return Wanted.of(field)._replace(kind=ONE, groups=groups if is_of_sequences else "")


# --- facts of a file ------------------------------------------------------------------------------


def read_once(
    path: FileName, needs: Mapping[str, Wanted], reach: Reach, grouping: Grouping | None
) -> dict[str, DatasetLayout]:
    """Read the facts of a file, by name, opening it once.

    DatasetError if there is neither a dataset nor an attribute, or its values have no fixed size;
    otherwise raises like `metadata.read_layouts`.
    """
    found: dict[str, DatasetLayout] = {}
    with open_index(path) as file:
        indexer, groups = Indexer(file, reach), [""]
        if grouping is not None and any(wanted.groups for wanted in needs.values()):
            groups = grouping.find(path, file, reach)
        for name, wanted in needs.items():
            parents = groups if wanted.groups else [""]
            parts = [_read(indexer, below(parent, wanted.path), wanted) for parent in parents]
            found[name] = join_values(parts).changed(file_samples=())
    return found


def _read(indexer: Indexer, path: str, wanted: Wanted) -> DatasetLayout:
    with ExitStack() as files:
        found = found_at(indexer.file, path, indexer.reach, files)
        if found is not None and isinstance(found[1], h5py.h5d.DatasetID):
            return _of_dataset(indexer, path, *found, wanted)
        parent, mark, name = path.rpartition("@")
        found = found_at(indexer.file, parent, indexer.reach, files) if mark else None
        if found is None or not h5py.h5a.exists(found[1], name_bytes(name)):
            raise DatasetError(
                f'{indexer.file.filename}: there is no dataset "{path}"'
                + f', and "{parent or "/"}" has no attribute "{name}"' * bool(mark)
                + f"; {what_is_there(indexer.file, indexer.reach, path)}"
            )
        located, node = found
        where = f'{located.file.filename}: attribute "{path}"'
        with reading(where):
            values = _attribute(node, name, where)
        return _in_memory(located, path, values, wanted, where, indexer.reach)


def _of_dataset(
    indexer: Indexer, path: str, found: Located, node: h5py.h5d.DatasetID, wanted: Wanted
) -> DatasetLayout:
    where = f'{found.file.filename}: dataset "{found.path}"'
    with reading(f"{where}: its metadata"):
        stored = node.get_type()
        is_string = isinstance(stored, h5py.h5t.TypeStringID) and stored.is_variable_str()
        if is_string or node.shape == ():
            count = int(np.prod(node.shape, dtype=np.int64))
            _require_few(count, where)
            own = [(absolute_name(found.file.filename), found.file.source.stamp())]
            indexer.reach.room.take(_STRING_NBYTES * count, f"{where}: its strings", own)
            value = h5py.Dataset(node)[()]
            for member in found.rest:
                value = value[member]
            values = _plain(value, where)
            cf = cf_attributes(node, where) if wanted.has_cf else ()
            layout = _in_memory(found, found.path, values, wanted, where, indexer.reach)
            return layout.changed(cf=((0, cf),) if wanted.has_cf else ())
    is_one = wanted.kind == ONE
    further = Further(wanted.has_names, wanted.has_cf)
    layout = layout_at(indexer, path, 0 if is_one else wanted.num_dim, further)  # type: ignore[arg-type]
    if not is_one:
        return layout
    if layout.segments is not None:
        layout = left_to_hdf5(layout, "it is read whole, and lies in several places")
    return layout.with_one_sample().changed(dim_names=())


def _attribute(node: h5py._objects.ObjectID, name: str, where: str) -> NDArray[Any]:
    shape = h5py.h5a.open(node, name_bytes(name)).shape
    _require_few(int(np.prod(shape or (), dtype=np.int64)), where)
    holder = {h5py.h5d.DatasetID: h5py.Dataset, h5py.h5g.GroupID: h5py.Group}
    return _plain(holder.get(type(node), h5py.Datatype)(node).attrs[name], where)


def _require_few(count: int, where: str) -> None:
    if count > _MOST_VALUES:
        raise DatasetError(f"{where} holds {count:,} values; at most {_MOST_VALUES:,} are allowed")


def _plain(value: Any, where: str) -> NDArray[Any]:
    """Return h5py's value as an array without objects: strings as bytes, UTF-8."""
    if isinstance(value, h5py.Empty):
        raise DatasetError(f"{where} is empty (a null dataspace): it holds no value")
    array = np.asarray(value)
    if array.dtype.kind in "OU":
        texts = array.reshape(-1).tolist()
        if not all(isinstance(text, str | bytes) for text in texts):
            raise DatasetError(
                f"{where}: its elements are of variable length or references, so that its size is"
                " not fixed; store it with a fixed-size type"
            )
        encoded = [name_bytes(text) if isinstance(text, str) else text for text in texts]
        return np.array(encoded, "S").reshape(array.shape)
    if array.dtype.hasobject:
        raise DatasetError(f"{where}: {array.dtype} has members of variable length")
    return array.astype(without_metadata(array.dtype), copy=False)


def _in_memory(
    found: Located,
    path: str,
    values: NDArray[Any],
    wanted: Wanted,
    where: str,
    reach: Reach,
) -> DatasetLayout:
    if wanted.kind == ONE:
        values = values[np.newaxis]
    elif not values.ndim:
        raise DatasetError(f"{where} is a scalar, and must have a row for each sequence")
    stamp, file = settled(found.file.source.stamp), absolute_name(found.file.filename)
    layout = layout_of_values(file, stamp, path, values)
    reach.room.take(values.nbytes, f"{where} of shape {values.shape}", files_of(layout))
    return layout


# --- of all files ---------------------------------------------------------------------------------


def with_rows_of_samples(
    config: ReaderConfig,
    joined: Mapping[str, DatasetLayout],
    once: Mapping[str, Field],
    facts: Mapping[str, Sequence[DatasetLayout]],
) -> dict[str, DatasetLayout]:
    """Return the layouts across all files, in order, all of them with a row for each sample.

    `once` are the fields with a row for each sequence, or each file. DatasetError if their number
    of rows is not that of a file's sequences; otherwise raises like `sequences_of`.
    """
    plain = {name: layout for name, layout in joined.items() if name not in once}
    name_of_first, first = next(iter(plain.items()))
    values, found = FileValues(config, first), dict(joined)
    for name, field in once.items():
        files = values.files()
        bounds = starts_of(np.array([count for _, count in files], np.int64))
        starts, ends, counts = bounds[:-1], bounds[1:], [1] * len(files)
        if field.per == "sequence":
            table, counts = sequences_of(config, plain, values)
            starts, ends = table.starts, table.ends
            if first.sequences is not None:
                held = [one.sequences for one in facts[name_of_first]]
                counts = [0 if one is None else one.held.size for one in held]
        for (file, _), count, fact in zip(files, counts, facts[name], strict=True):
            if fact.sample_count != count:
                raise DatasetError(
                    f'{file}: "{field.path}" ({name}) has {fact.sample_count:,} rows, and the file'
                    f' has {count:,} sequences; per="sequence" needs a row for each of them'
                )
        found[name] = repeated(joined[name], starts, ends, first)
    return found


def static_values(
    fields: Mapping[str, Field], facts: Mapping[str, Sequence[DatasetLayout]], reach: Reach
) -> dict[str, Any]:
    """Return the value of each field with one value for the whole dataset: an array, or a str.

    DatasetError if a file's value is not the first file's; otherwise raises like `read_rows`.
    """
    found: dict[str, Any] = {}
    for name, field in fields.items():
        first = _value(field, facts[name][0], reach)
        known = first.dtype, first.shape, first.tobytes()
        for fact in facts[name][1:]:
            value = _value(field, fact, reach)
            if (value.dtype, value.shape, value.tobytes()) != known:
                raise DatasetError(
                    f'{fact.file}: "{field.path}" ({name}) has another value than in'
                    f' {facts[name][0].file}; set per="file", which gives each sample that of its'
                    " file"
                )
        first.setflags(write=False)
        is_text = first.dtype.kind == "S" and not first.ndim
        found[name] = str(name_text(first.item())) if is_text else first
    return found


def _value(field: Field, layout: DatasetLayout, reach: Reach) -> NDArray[Any]:
    if layout.sample_count != 1:
        raise DatasetError(
            f"{layout.file}: the saved index has {layout.sample_count:,} values of"
            f' "{field.path}" for the whole dataset; make it again'
        )
    transform, raw = row_transform(field, layout), read_rows(layout, reach)
    out = np.empty((1, *transform.row), transform.dtype)
    transform.apply(raw, out)
    return out.reshape(transform.row)


def repeated(
    layout: DatasetLayout, starts: Int64s, ends: Int64s, like: DatasetLayout
) -> DatasetLayout:
    """Return the layout in which samples ``starts[i]`` to ``ends[i]`` have row i of another.

    Parameters
    ----------
    layout
        The layout of the rows, one for each start.
    starts, ends
        int64 (n,), non-decreasing. Samples in none of the ranges have the fill value.
    like
        A field whose rows are samples.
    """
    segments, datasets = table_of(layout)
    counts, columns = ends - starts, []
    wanted = np.flatnonzero(counts > 0)
    for _, layer in segments.layers if segments.size else ():
        at = np.searchsorted(layer.first, wanted, side="right") - 1
        is_held = (at >= 0) & (wanted < layer.end[at])
        at, rows = at[is_held], wanted[is_held]
        row = layer.row[at] + (rows - layer.first[at]) * layer.step[at]
        step = np.zeros_like(row)
        columns.append((starts[rows], counts[rows], row, step, layer.dataset[at], layer.piece[at]))
    shape = list(layout.shape)
    shape[layout.sample_axis] = like.sample_count
    found = [np.concatenate(column) for column in zip(*columns, strict=True)]
    even = ((0, like.sample_count, 0),)
    first_of = [int(starts[min(first, starts.size - 1)]) if first else 0 for first, _ in layout.cf]
    return shared(
        layout.without_place(
            "files",
            shape=tuple(shape),
            segments=Segments.of(found, segments.pieces, even) if found else None,
            datasets=datasets,
            file_samples=like.file_samples,
            sequences=like.sequences and like.sequences._replace(held=like.sequences.room),
            cf=tuple(zip(first_of, (how for _, how in layout.cf), strict=True)),
        )
    )
