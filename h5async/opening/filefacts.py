"""Reads the *facts* that fields need of a file, in the form that a saved index holds.

Fields enter; facts leave, by the names of columns and of further facts. Each fact is a layout, even
of names and shapes, whose values lie in memory. The fact for each kind of `Wanted`:

========================  ======================================================================
``""``                    the dataset at its path
`ONE`, `EACH`             one row for each file, group or sequence: see `oncefields.py`
`HEAP`                    elements of variable length
``"ends PATH"``           flat values; the dataset at PATH tells where samples end; also
                          ``offsets`` and ``lengths``
`ROWS`                    the values, or the indices, of a sparse matrix, with its rows
`SHAPE`                   the shape of the sparse matrix at its path, and a digest of the names of
                          its columns; 0 if they have none
`TEXTS`                   the names of the columns of the sparse matrix at its path
`CATEGORIES`, `NULLABLE`  the categories of a column's codes; that a column has a mask
`IMAGE`, `AUDIO`          that elements of variable length are encoded images, or audio
`LABELS`, `LABEL_NAMES`   the values as codes; the categories of these. Both may be followed by
                          the path of the names
========================  ======================================================================
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray

from h5async.config import Field, ReaderConfig
from h5async.config.files import FileName
from h5async.errors import DamagedError, DatasetError, H5AsyncError
from h5async.index.composition import join_groups
from h5async.index.contents import Grouping
from h5async.index.groupfields import (
    Column,
    category_names,
    index_of_table,
    kind_attribute,
    names_beside,
)
from h5async.index.hdf5 import OtherKindError
from h5async.index.layout import DatasetLayout, SequenceLengths, values_of
from h5async.index.links import Reach, below, open_index
from h5async.index.metadata import list_layouts, may_be_variable_length, read_layouts
from h5async.index.savedindex import Wanted
from h5async.io.source import FileStamp
from h5async.io.stores import absolute_name, settled_stamp, store_of
from h5async.opening.filevalues import (
    categories_of,
    column_at,
    heap_layout,
    small_values,
    sparse_rows,
    with_spans,
)
from h5async.opening.oncefields import read_once, wanted_once
from h5async.read.executors import read_whole
from h5async.samples.assembly import field_kinds
from h5async.samples.fieldkind import (
    CATEGORIES,
    HEAP,
    LABEL_NAMES,
    LABELS,
    NULLABLE,
    ROWS,
    SHAPE,
    TEXTS,
    FieldKind,
    layout_of_values,
)
from h5async.samples.sparsekind import ID
from h5async.spelling import name_text, named
from h5async.system.interruptions import interruption, suppressing

_MOST_NAMES = 1 << 24
_TRIES = 5  # to read a file without it changing meanwhile
LABEL_KINDS = (LABELS, LABEL_NAMES)

P = ParamSpec("P")
T = TypeVar("T")


class Need(NamedTuple):
    """A fact to read from each file for a field; for `wanted` see the module docstring."""

    kind: FieldKind
    wanted: Wanted


def needs_of(
    kinds: Mapping[str, FieldKind], grouping: Grouping | None, config: ReaderConfig
) -> dict[str, Need]:
    """Return the facts to read from each file, by name: all columns, and more.

    ConfigError if options of a field do not fit its `per`.
    """
    found: dict[str, Need] = {}
    groups = "" if grouping is None else str(grouping)
    for name, kind in (*kinds.items(), *field_kinds(config.static_fields).items()):
        several = {name: Wanted.of(kind.field)} | kind.facts()
        once = None if kind.field.per is None else wanted_once(kind.field, config, groups)
        for at, wanted in several.items():
            own = wanted._replace(groups=groups)
            if once is not None:  # its values, or codes made from them
                own = once._replace(kind=f"{once.kind} {wanted.kind}".rstrip())
            found[at] = Need(kind, own)
    return found


def read_known(
    path: FileName, needs: Mapping[str, Need], reach: Reach, grouping: Grouping | None
) -> dict[str, DatasetLayout]:
    """Read the facts of a file, by the names of the needs; columns of groups are joined.

    H5AsyncError if the file is missing, damaged, or does not match the fields.
    """
    return read_unchanged(path, lambda: _read_known(path, needs, reach, grouping))


def read_unchanged(path: FileName, read: Callable[[], T]) -> T:
    """Return the result of `read()`, which opens and indexes a file.

    A file that a writer appends to meanwhile, with SWMR, may look damaged; it is read again.
    """
    known = None
    for _ in range(_TRIES - 1):
        try:
            return read()
        except DamagedError as error:
            state = None if interruption(error) is not None else _state_of(path)
            if state is None or state == known:
                raise
            known = state
    return read()


def _state_of(path: FileName) -> FileStamp | None:
    """Return the state of a local file, or None."""
    store = store_of(path)
    with suppressing(OSError):
        return store.stamp(str(path)) if store.is_local else None
    return None


def _read_known(
    path: FileName, needs: Mapping[str, Need], reach: Reach, grouping: Grouping | None
) -> dict[str, DatasetLayout]:
    found: dict[str, DatasetLayout] = {}
    plain: dict[str, Field] = {}
    for name, (kind, wanted) in needs.items():
        if wanted.kind:
            continue
        # Which dataset holds codes depends on the version of AnnData that wrote the file.
        of_table = column_at(path, kind.table_column, reach) if kind.table_column else None
        codes = None if of_table is None or of_table.categories is None else of_table.values
        if codes is None or codes.path.strip("/") == wanted.path:
            plain[name] = kind.field
        else:
            found[name] = codes
    if plain:
        has_codes = any(need.kind.table_column for need in needs.values())
        found |= read_layouts(path, plain, reach, grouping, may_be_codes=has_codes)
    once = {name: need.wanted for name, need in needs.items() if need.kind.field.per is not None}
    if once:
        found |= _read_once(path, once, reach, grouping)
    rest = {n: need for n, need in needs.items() if need.wanted.kind and n not in once}
    if not rest:
        return found
    groups = [""]
    if grouping is not None:
        with open_index(path) as file:
            groups = grouping.find(path, file, reach)
    labels = {n: need for n, need in rest.items() if need.wanted.kind.startswith(LABEL_KINDS)}
    found |= _read_labels(path, groups, labels, reach)
    rest = {name: need for name, need in rest.items() if name not in labels}
    several = [_read_below(path, group, rest, reach) for group in groups]
    if grouping is None:
        return found | several[0]
    for name, need in rest.items():
        parts = [one[name] for one in several]
        if need.wanted.kind in (SHAPE, TEXTS):
            _require_equal(parts, need)
        found[name] = parts[0] if need.wanted.kind in (SHAPE, TEXTS) else join_groups(parts)
    return found


def _require_equal(parts: Sequence[DatasetLayout], need: Need) -> None:
    for one in parts:
        columns = slice(1, None) if need.wanted.kind == SHAPE else slice(None)
        if not np.array_equal(values_of(one)[columns], values_of(parts[0])[columns]):
            raise DatasetError(
                f'{one.file}: "{one.path}" ({need.kind.name}) has different columns from'
                f' "{parts[0].path}"; sparse matrices of several groups must have the same columns'
            )


def _read_below(
    path: FileName, group: str, needs: Mapping[str, Need], reach: Reach
) -> dict[str, DatasetLayout]:
    """Read the facts that need more than a dataset's layout; paths are relative to a group."""
    found: dict[str, DatasetLayout] = {}
    matrices: dict[str, dict[str, DatasetLayout]] = {}
    for name, (of_field, wanted) in needs.items():
        at = below(group, wanted.path)
        if wanted.kind == HEAP:
            found[name] = heap_layout(at, path, reach)
        elif wanted.kind in (ROWS, SHAPE):
            own = wanted.path
            matrix, _, member = (own, "", "") if wanted.kind == SHAPE else own.rpartition("/")
            if matrix not in matrices:
                matrices[matrix] = _matrix(path, matrix, reach, group)
            found[name] = matrices[matrix][member]
        elif wanted.kind == TEXTS:
            found[name] = _index_layout(path, group, wanted.path, reach)
        elif wanted.kind == CATEGORIES:
            of_table = column_at(path, at, reach)
            if of_table is None or of_table.categories is None:
                raise DatasetError(f'{path}: "{at}" ({of_field.name}) is not a categorical column')
            found[name] = _categories(path, at, of_table, reach)
        else:
            kind, _, offsets = wanted.kind.partition(" ")
            flat = _flat_layout(name, at, path, reach)
            found[name] = with_spans(flat, kind, below(group, offsets), path, reach)
    return found


def _read_labels(
    path: FileName, groups: Sequence[str], needs: Mapping[str, Need], reach: Reach
) -> dict[str, DatasetLayout]:
    """Read values as codes, and their categories, for all groups of a file together."""
    found: dict[str, DatasetLayout] = {}
    made: dict[tuple[str, str], dict[str, DatasetLayout]] = {}
    for name, need in needs.items():
        kind, _, names_at = need.wanted.kind.partition(" ")
        key = need.wanted.path, names_at
        if key not in made:
            made[key] = _labels(path, groups, *key, reach)
        found[name] = made[key][kind]
    return found


def _read_once(
    path: FileName, needs: Mapping[str, Wanted], reach: Reach, grouping: Grouping | None
) -> dict[str, DatasetLayout]:
    """Read one value for each sequence or file, or its code."""
    plain = {
        name: wanted._replace(kind=wanted.kind.partition(" ")[0]) for name, wanted in needs.items()
    }
    found = read_once(path, plain, reach, grouping)
    for name, wanted in needs.items():
        _, mark, labels = wanted.kind.partition(" ")
        if mark:
            kind, _, names_at = labels.partition(" ")
            values = read_whole(found[name], reach)
            found[name] = _codes(path, wanted.path, values, names_at, reach)[kind]
    return found


def _labels(
    path: FileName, groups: Sequence[str], at: str, names_at: str, reach: Reach
) -> dict[str, DatasetLayout]:
    several = [small_values(path, below(one, at), _MOST_NAMES, reach) for one in groups]
    found = _codes(path, at, np.concatenate(several), names_at, reach)
    if groups != [""]:
        held = np.array([one.size for one in several], np.int64)
        found[LABELS] = found[LABELS].changed(sequences=SequenceLengths(held, held))
    return found


def _codes(
    path: FileName, at: str, values: NDArray[Any], names_at: str, reach: Reach
) -> dict[str, DatasetLayout]:
    where = f'{path}: dataset "{at}"'
    if values.dtype.kind not in "biuSUO":
        raise DatasetError(
            f"{where} holds {values.dtype}; categories are made of strings, integers or bools"
        )
    own, codes = np.unique(values, return_inverse=True)
    codes = codes.reshape(-1)
    names = category_names(own)
    if names_at:
        given = category_names(small_values(path, names_at, _MOST_NAMES, reach))
        of_codes = values.dtype.kind in "iu" and not any(isinstance(n, int) for n in given)
        position = {name: number for number, name in enumerate(given)}
        if of_codes:
            position = {number: number for number in range(-1, len(given))}
        missing = [name for name in names if name not in position]
        if missing:
            raise DatasetError(
                f'{where} holds {missing[0]!r}, and dataset "{names_at}" has'
                f" {f'{len(given):,} names' if of_codes else 'no such name'}"
            )
        codes = np.array([position[name] for name in names], np.int64)[codes]
        names = given
    narrow = codes.astype(np.min_scalar_type(-max(1, len(names))))
    of_names = (
        _texts_layout(path, at, names, reach)
        if any(isinstance(name, str) for name in names)
        else _in_memory(path, at, np.array(names), reach)
    )
    return {LABELS: _in_memory(path, at, narrow, reach), LABEL_NAMES: of_names}


def _flat_layout(name: str, at: str, path: FileName, reach: Reach) -> DatasetLayout:
    """Return the layout of flat values whose samples another dataset delimits."""
    try:
        return read_layouts(path, {name: Field(at)}, reach, may_be_codes=True)[name]
    except OtherKindError as error:
        with open_index(path) as file:
            if not may_be_variable_length(file, at, reach):
                raise
        raise DatasetError(
            f'{path}: dataset "{at}" has a variable-length datatype, whose elements are'
            f" the samples; leave out {named('offsets')}"
        ) from error


def _matrix(
    path: FileName, matrix: str, reach: Reach, parent: str = ""
) -> dict[str, DatasetLayout]:
    """Return the facts of a sparse matrix by the names of its datasets, and its shape as ""."""
    at = below(parent, matrix).rstrip("/") or "/"
    group, spans = sparse_rows(path, at, reach)
    digest = _tried(_digest, path, parent, matrix, reach)
    shape = np.array([*group.shape, digest or 0], np.int64)
    return {
        "data": group.data.changed(spans=spans),
        "indices": group.indices.changed(spans=spans),
        "": _in_memory(path, at, shape, reach),
    }


def _digest(path: FileName, group: str, matrix: str, reach: Reach) -> int:
    found = hashlib.blake2b(digest_size=8)
    for at in _paths_of_names(path, group, matrix, reach):
        several = small_values(path, at, _MOST_NAMES, reach).tolist()
        found.update(b"\0".join(n if isinstance(n, bytes) else str(n).encode() for n in several))
    return int.from_bytes(found.digest(), "little", signed=True)


def _paths_of_names(path: FileName, group: str, matrix: str, reach: Reach) -> Sequence[str]:
    """Return the paths of the names of a matrix's columns, and of their ids if there are any.

    10x Genomics has both beside the matrix; AnnData has names, in its ``var``.
    """
    holder, mark, own = matrix.rpartition("::")
    with open_index(path) as file:
        beside = names_beside(file, below(group, matrix), reach)
        if beside:
            return beside
        table = below(group, f"{holder}{mark}{'raw/' if own.startswith('raw/') else ''}var")
        return [f"{table}/{index_of_table(file, table, reach)}"]


def _index_layout(path: FileName, group: str, matrix: str, reach: Reach) -> DatasetLayout:
    """Return the names of a matrix's columns, each followed by its id if there is one."""
    paths = _paths_of_names(path, group, matrix, reach)
    names, *further = (_names(path, at, reach) for at in paths)
    for ids in further:
        if len(ids) != len(names):
            raise DatasetError(
                f'{path}: "{paths[0]}" has {len(names):,} values, and "{paths[1]}" {len(ids):,}'
            )
        names = tuple(f"{name}{ID}{one}" for name, one in zip(names, ids, strict=True))
    return _texts_layout(path, below(group, matrix), names, reach)


def _names(path: FileName, at: str, reach: Reach) -> tuple[str, ...]:
    several = small_values(path, at, _MOST_NAMES, reach).tolist()
    return tuple(str(name_text(n)) if isinstance(n, bytes | str) else str(n) for n in several)


def _categories(path: FileName, at: str, of_table: Column, reach: Reach) -> DatasetLayout:
    values = categories_of(of_table, reach)
    names = category_names(values)
    if values.dtype.kind in "biuf":
        return _in_memory(path, at, values, reach)
    return _texts_layout(path, at, tuple(map(str, names)), reach)


# --- values in memory ----------------------------------------------------------------------------


def _texts_layout(path: FileName, at: str, names: Sequence[str], reach: Reach) -> DatasetLayout:
    """Return names as flat bytes with offsets."""
    several = [name.encode("utf-8", "surrogateescape") for name in names]
    spans = np.zeros(len(several) + 1, np.int64)
    np.cumsum([len(one) for one in several], out=spans[1:])
    data = np.frombuffer(b"".join(several), np.uint8)
    return _in_memory(path, at, data, reach).changed(spans=spans)


def _in_memory(path: FileName, at: str, array: NDArray[Any], reach: Reach) -> DatasetLayout:
    name = absolute_name(path)
    stamp = settled_stamp(name)
    reach.consulted.found(name, stamp)
    return layout_of_values(name, stamp, at.strip("/"), array)


# --- all of a file -------------------------------------------------------------------------------


def list_known(
    path: FileName, reach: Reach, num_dim: Any, grouping: Grouping | None
) -> Iterator[tuple[Wanted, DatasetLayout | H5AsyncError]]:
    """Yield all facts of a file that readers may need, without knowing their fields.

    Values whose samples another dataset delimits are left out: no field names that dataset.
    """
    groups, paths = "" if grouping is None else str(grouping), []
    for name, layout in list_layouts(path, reach, num_dim, grouping=grouping):
        paths.append(name)
        wanted = Wanted.at(name, num_dim)._replace(groups=groups)
        if isinstance(layout, DatasetLayout):
            yield wanted, layout
            continue
        heap = Wanted.at(name, kind=HEAP)._replace(groups=groups)
        needs = {"": Need(FieldKind("", Field(heap.path)), heap)}
        found = _tried(read_known, path, needs, reach, grouping)
        yield (wanted, layout) if found is None else (heap, found[""])
        yield from encoded_kind(path, heap, reach, grouping).items()
    if grouping is None:
        for parent, member in (name.rpartition("/")[::2] for name in paths):
            yield from _list_group(path, parent, member, reach)


def encoded_kind(
    path: FileName, heap: Wanted, reach: Reach, grouping: Grouping | None
) -> dict[Wanted, DatasetLayout]:
    """Return the fact that elements of variable length are encoded, if an attribute says so."""
    with open_index(path) as file:
        group = "" if grouping is None else grouping.find(path, file, reach)[0]
        kind = kind_attribute(file, below(group, heap.path), reach)
    if kind is None:
        return {}
    return {heap._replace(kind=kind): _in_memory(path, heap.path, np.zeros(0, np.uint8), reach)}


def _list_group(
    path: FileName, parent: str, member: str, reach: Reach
) -> Iterator[tuple[Wanted, DatasetLayout]]:
    if member == "indptr":
        found = _tried(_matrix, path, parent, reach)
        if found is not None:
            yield Wanted.at(f"{parent}/data", kind=ROWS), found["data"]
            yield Wanted.at(f"{parent}/indices", kind=ROWS), found["indices"]
            yield Wanted.at(parent, kind=SHAPE), found[""]
            names = _tried(_index_layout, path, "", parent, reach)
            if names is not None:
                yield Wanted.at(parent, kind=TEXTS), names
    elif member in ("codes", "mask") or parent.endswith("/__categories"):
        is_older = member not in ("codes", "mask")
        at = f"{parent.removesuffix('/__categories')}/{member}" if is_older else parent
        of_table = _tried(column_at, path, at, reach)
        if of_table is not None and of_table.mask is not None:
            yield Wanted.at(at, kind=NULLABLE), _in_memory(path, at, np.zeros(0, np.uint8), reach)
        elif of_table is not None:
            layout = _tried(_categories, path, at, of_table, reach)
            if layout is not None:
                yield Wanted.at(at, kind=CATEGORIES), layout


def _tried(read: Callable[P, T], *args: P.args, **options: P.kwargs) -> T | None:
    """Return the result of `read`, or None on error: nothing there, or it is damaged."""
    with suppressing(H5AsyncError):
        return read(*args, **options)
    return None
