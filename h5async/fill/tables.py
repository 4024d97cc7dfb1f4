"""Makes fields of columns of tables: categorical ones, and those with a mask.

The path of a column enters, as AnnData writes it in ``obs``; plain fields of the datasets that it
consists of leave, and what its codes stand for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from h5async.config import Field, ReaderConfig
from h5async.errors import ConfigError, DatasetError
from h5async.fill.columns import Categories
from h5async.index.columns import Column, category_names, column, union_of
from h5async.index.layout import DatasetLayout
from h5async.index.links import Reach, open_index
from h5async.read.whole import read_whole


def column_fields(name: str, field: Field, found: Column, config: ReaderConfig) -> dict[str, Field]:
    """Return the fields that a field of a column stands for: its codes, or values and a mask.

    Parameters
    ----------
    name, field
        As the user has it.
    found
        What its path leads to.
    config
        The options.

    Raises
    ------
    ConfigError
        If there is a field of the name of the mask.
    """
    path = field.path.rstrip("/")
    member = found.values.path.rpartition("/")[2]
    is_group = found.mask is not None or member == "codes" != path.rpartition("/")[2]
    if not is_group:  # the dataset of codes itself, in files of AnnData before 0.8
        return {name: field}
    made = {name: field.model_copy(update={"path": f"{path}/{member}"})}
    if found.mask is None:
        return made
    mask = f"{name}_mask"
    if mask in config.batch_fields:
        raise ConfigError(
            f'{found.where} ({name}) has a mask, which is delivered as "{mask}", and there is a'
            " field of that name already; choose another name"
        )
    options = {"num_dim": field.num_dim, "steps": field.steps, "pad": field.pad}
    return made | {mask: Field(f"{path}/mask", **options)}


def find_categories(
    config: ReaderConfig, columns: Mapping[str, str], reach: Reach
) -> dict[str, Categories]:
    """Return what the codes of categorical fields stand for, over all files.

    Parameters
    ----------
    config
        The options.
    columns
        Paths of the columns, by field.
    reach
        Which other files links may lead to.

    Raises
    ------
    DatasetError
        If a file has no such column, or its categories cannot be read.
    ConfigError
        If codes have to be mapped, and other options do not go together with that.
    """
    return {name: _categories(name, path, config, reach) for name, path in columns.items()}


def _categories(name: str, path: str, config: ReaderConfig, reach: Reach) -> Categories:
    several, where = [], []
    for at in config.files:
        with open_index(at) as file:
            found = column(file, path, reach)
        if found is None or found.categories is None:
            raise DatasetError(
                f'{at}: "{path}" ({name}) is no categorical column, as it is in {config.files[0]}'
            )
        several.append(category_names(_values(found.categories, reach)))
        where.append(found.where)
    names, tables = union_of(several)
    if all(one == several[0] for one in several):
        return Categories(names)
    _check_mapping(name, config.batch_fields[name], config, where)
    return Categories(names, tuple(tables), tuple(where))


def _values(found: Any, reach: Reach) -> Any:
    return read_whole(found, reach.io) if isinstance(found, DatasetLayout) else found


def _check_mapping(name: str, field: Field, config: ReaderConfig, where: list[str]) -> None:
    """Refuse what does not go together with codes that are mapped while they are read."""
    for is_given, option in (
        (field.scale is not None, "scale"),
        (field.offset is not None, "offset"),
        (field.steps is not None, "steps"),
        (field.dtype is not None and field.dtype.kind != "i", f"dtype={field.dtype}"),
        (config.cache == "device", 'cache="device"'),
    ):
        if is_given:
            raise ConfigError(
                f"{where[0]} ({name}) has other categories than other files, so that codes are"
                f" mapped to those of all files, for which {option} is not supported; leave it out"
            )
