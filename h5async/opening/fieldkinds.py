"""Determines the kinds of plain fields from the objects at their paths.

Options enter; the same options leave, with fields of other kinds where needed. Also makes the index
of each file for a saved index.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, NamedTuple

from h5async.config import Field, ReaderConfig
from h5async.config.files import FileName, is_index
from h5async.errors import ConfigError, DatasetError, H5AsyncError
from h5async.index.contents import Grouping
from h5async.index.groupfields import column, kind_attribute, sparse_group
from h5async.index.layout import DatasetLayout
from h5async.index.links import Consulted, Reach, below, open_index
from h5async.index.metadata import may_be_variable_length
from h5async.index.savedindex import IndexedFile, NamedIndex, Wanted
from h5async.io.metadatafile import opening_ahead
from h5async.io.stores import absolute_name, far_names
from h5async.opening.filefacts import Need, encoded_kind, list_known, needs_of, read_known
from h5async.opening.filevalues import grouping_of, reach_of
from h5async.samples.assembly import FOUND_AS, field_kinds
from h5async.samples.codeskind import CodesKind
from h5async.samples.fieldkind import (
    AUDIO,
    CATEGORIES,
    HEAP,
    IMAGE,
    NULLABLE,
    SHAPE,
    FieldKind,
)
from h5async.system.interruptions import suppressing
from h5async.system.jobs import run_jobs

# Called after each file with the number of indexed files and the total.
on_indexed: ContextVar[Callable[[int, int], None] | None] = ContextVar("on_indexed", default=None)
_WORDS = {
    "": "plain dataset",
    SHAPE: "sparse matrix",
    HEAP: "dataset of variable-length elements (such as strings)",
    CATEGORIES: "categorical column",
    NULLABLE: "column with a mask of missing values",
    IMAGE: "dataset of encoded images",
    AUDIO: "dataset of encoded audio",
}


class _Found(NamedTuple):
    """The object at a path: `kind` as in `Wanted`, empty for a plain dataset or nothing.

    For a column, `values` is the path of its values.
    """

    kind: str
    values: str = ""


def with_kinds(
    config: ReaderConfig,
    reach: Reach,
    grouping: Grouping | None,
    indices: Mapping[FileName, NamedIndex],
) -> tuple[ReaderConfig, dict[str, FieldKind]]:
    """Return the options with fields of the kinds found in the first file, and these kinds.

    The options are the same object if nothing changed.

    The first file, or saved index, and there the first group of `grouping`, determine the kinds.
    ConfigError if the name of a mask is taken, or a kind cannot be used with other options;
    H5AsyncError if a field is of a kind that cannot be read.
    """
    fields = {
        name: field
        for name, field in config.batch_fields.items()
        if type(field) is Field and field.per is None and field.categories in (None, True)
    }
    index = indices.get(config.files[0])
    paths = {name: field.path for name, field in fields.items()}
    known = {} if index is None else _in_index(index, paths, grouping)
    rest = {name: path for name, path in paths.items() if name not in known}
    if rest:
        first = config.files[0] if index is None else index.paths[0]
        known |= _in_file(first, rest, reach, grouping)
    found: dict[str, Field] = {}
    columns: dict[str, str] = {}
    for name, field in fields.items():
        kind, values = known[name]
        options = {key: getattr(field, key) for key in field.model_fields_set}
        if field.categories is not None and kind in (HEAP, IMAGE, AUDIO, NULLABLE):
            continue
        if kind in FOUND_AS:
            found[name] = FOUND_AS[kind](**options)
        elif kind in (CATEGORIES, NULLABLE):
            found |= _column_fields(name, field, kind, values, config)
            if kind == CATEGORIES:
                columns[name] = field.path
    if found:
        fields = dict(config.batch_fields) | found | config.static_fields
        config = config.model_copy(update={"fields": fields})
    kinds = field_kinds(config.batch_fields)
    codes = {name: CodesKind(name, kinds[name].field, path) for name, path in columns.items()}
    return config, kinds | codes


def unlike(config: ReaderConfig, reach: Reach, grouping: Grouping | None) -> DatasetError | None:
    """Return an error for a path whose kind is not that in the first file, or None."""
    files = [path for path in config.files if not is_index(path)]
    several = config.batch_fields.items()
    paths = {name: field.path for name, field in several if field.per is None}
    with suppressing(H5AsyncError):  # in files that cannot be read
        first = _in_file(files[0], paths, reach, grouping) if len(files) > 1 else {}
        for path in files[1:]:
            here = _in_file(path, paths, reach, grouping)
            for name, (kind, _) in here.items():
                if kind != first[name].kind:
                    return DatasetError(
                        f'{path}: "{paths[name]}" ({name}) is not a {_WORDS[first[name].kind]} as'
                        f" in {files[0]}{f', but a {_WORDS[kind]}' * bool(kind)}; several files can"
                        " be read as one only if it is of one kind in all of them: store it alike"
                    )
    return None


def _in_index(
    index: NamedIndex, paths: Mapping[str, str], grouping: Grouping | None
) -> dict[str, _Found]:
    """Return the objects at those paths that a saved index knows."""
    found: dict[str, _Found] = {}
    groups = "" if grouping is None else str(grouping)
    datasets = index.datasets(0) if index.paths else ()
    known = {(one.path, one.kind) for one in datasets if one.groups == groups}
    for name, typed in paths.items():
        path = Wanted.at(typed).path
        for kind in (SHAPE, CATEGORIES, NULLABLE, IMAGE, AUDIO, HEAP, ""):
            if (path, kind) in known:
                member = "values" if kind == NULLABLE else "codes"
                is_group = kind in (CATEGORIES, NULLABLE) and (f"{path}/{member}", "") in known
                found[name] = _Found(kind, f"{path}/{member}" if is_group else path)
                break
    return found


def _in_file(
    path: FileName, paths: Mapping[str, str], reach: Reach, grouping: Grouping | None
) -> dict[str, _Found]:
    found = {}
    with open_index(path) as file:
        group = "" if grouping is None else grouping.find(path, file, reach)[0]
        prefix = f"{group}/" if group else ""
        for name, typed in paths.items():
            at = below(group, typed)
            found[name] = _Found("")
            if sparse_group(file, at, reach) is not None:
                found[name] = _Found(SHAPE)
            elif (of_table := column(file, at, reach)) is not None:
                kind = CATEGORIES if of_table.mask is None else NULLABLE
                found[name] = _Found(kind, of_table.values.path.removeprefix(prefix))
            elif may_be_variable_length(file, at, reach):
                encoded = kind_attribute(file, at, reach)
                found[name] = _Found(HEAP if encoded is None else encoded)
    return found


def _column_fields(
    name: str, field: Field, kind: str, values: str, config: ReaderConfig
) -> dict[str, Field]:
    """Return the fields that represent a column: its codes, or values and a mask.

    `kind` and `values` are those of `_Found`. Raises ConfigError if a field already has the mask's
    name, or sequences are groups.
    """
    where = f'{config.files[0]}: column "{field.path}" ({name})'
    if config.sequences is not None and config.sequences.groups is not None:
        raise ConfigError(
            f"{where} is stored as several datasets, for which groups of sequences are not"
            f' supported; give the path of the values, "{values}"'
        )
    path = field.path.rstrip("/")
    if values == Wanted.at(path).path:  # the codes themselves, in files of AnnData before 0.8
        return {name: field}
    made = {name: field.model_copy(update={"path": f"{path}/{values.rpartition('/')[2]}"})}
    if kind == CATEGORIES:
        return made
    mask = f"{name}_mask"
    masks = [other.pad_mask for other in config.batch_fields.values()]
    if mask in config.batch_fields or mask in masks:
        raise ConfigError(
            f'{where} has a mask, which is delivered as "{mask}", and there is a field of that name'
            " already; choose another name"
        )
    options = {"num_dim": field.num_dim, "steps": field.steps, "pad": field.pad}
    return made | {mask: Field(f"{path}/mask", **options)}


# --- the index of each file for a saved index -----------------------------------------------------

_FILES_OF_JOB = 16


def index_files(
    config: ReaderConfig, reach: Reach, refused: list[H5AsyncError], *, ray: str | None = None
) -> Iterator[IndexedFile]:
    """Yield the index of each file; append errors of datasets without a layout to `refused`.

    With `ray`, jobs on that cluster index several files each.
    """
    tell, paths, number = on_indexed.get(), config.files, 0
    step = 1 if ray is None else _FILES_OF_JOB
    jobs = [paths[begin : begin + step] for begin in range(0, len(paths), step)]
    for found in run_jobs(_Indexing(config, reach), jobs, ray):
        for file, reasons in found:
            refused += reasons
            yield file
            number += 1
            if tell is not None:
                tell(number, len(paths))


class _Indexing:
    """Indexes files: here, or in other processes."""

    def __init__(self, config: ReaderConfig, reach: Reach | None) -> None:
        self._config, self._reach = config, reach
        self._needs: dict[str, Need] | None = None

    def __reduce__(self) -> Any:
        """Return the state that another process needs."""
        return _Indexing, (self._config, None)

    def __call__(self, paths: Sequence[FileName]) -> list[tuple[IndexedFile, list[H5AsyncError]]]:
        """Return the index of each file, with the errors of datasets that have no layout."""
        if self._reach is not None:
            return [self._index(path, self._reach) for path in paths]
        reach = reach_of(self._config)
        with opening_ahead(far_names(paths)):
            return [self._index(path, reach) for path in paths]

    def _index(self, path: FileName, reach: Reach) -> tuple[IndexedFile, list[H5AsyncError]]:
        config, grouping = self._config, grouping_of(self._config, reach)
        if self._needs is None:
            self._needs = {}
            if config.fields is not None:
                fields = with_kinds(config, reach, grouping, {})[1]
                self._needs = needs_of(fields, grouping, config)
        consulted, refused = Consulted(), list[H5AsyncError]()
        recorded = replace(reach, consulted=consulted)
        if self._needs:
            found = read_known(path, self._needs, recorded, grouping)
            layouts = {need.wanted: found[name] for name, need in self._needs.items()}
            for wanted in [one for one in layouts if one.kind == HEAP]:
                layouts |= encoded_kind(path, wanted, recorded, grouping)
        else:
            layouts = {}
            for wanted, layout in list_known(path, recorded, config.num_dim, grouping):
                if isinstance(layout, DatasetLayout):
                    layouts[wanted] = layout
                else:
                    refused.append(layout)
        return IndexedFile(absolute_name(path), layouts, consulted), refused
