"""Unites the categories of a column across files, and the dtypes of its codes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from h5async.config import Field, ReaderConfig
from h5async.errors import ConfigError
from h5async.index.groupfields import union_of
from h5async.index.layout import DatasetLayout
from h5async.index.links import Reach
from h5async.opening.filefacts import Texts
from h5async.read.whole import read_blocks, read_whole
from h5async.samples.columns import Categories, no_category


def categories_of(
    name: str, config: ReaderConfig, several: Sequence[Texts], where: Sequence[str]
) -> Categories:
    """Return the united categories of a categorical field.

    Parameters
    ----------
    name, config
        The field, and the options.
    several, where
        Per file: the categories, and the name of the column in messages.

    Raises
    ------
    ConfigError
        If codes must be mapped and other options do not permit that.
    """
    names, tables = union_of(several)
    if all(one == names for one in several):  # duplicate names make them differ from it, too
        return Categories(names)
    _check_mapping(name, config.batch_fields[name], config, where)
    return Categories(names, tuple(tables), tuple(where))


def require_codes(codes: DatasetLayout, count: int, reach: Reach) -> None:
    """Raise DatasetError unless all codes of a column, across files, are from -1 to ``count - 1``.

    AnnData rejects such files, too. ReadError if codes cannot be read.
    """
    for first, block in read_blocks(codes, reach):
        outside = (block < -1) | (block >= count)
        if not outside.any():
            continue
        sample, file = first + int(outside.argmax()), codes.file
        row = sample
        for name, samples in codes.file_samples:
            if row < samples:
                file = name
                break
            row -= samples
        raise no_category(
            f'{file}: column "{codes.path.removesuffix("/codes")}"',
            row,
            sample,
            int(block[sample - first]),
            count,
        )


def of_one_dtype(layouts: Sequence[DatasetLayout], reach: Reach) -> list[DatasetLayout]:
    """Return the codes of several files in the widest of their dtypes.

    Codes of other dtypes are read here and kept: a few bytes per sample.
    """
    dtypes = [layout.dtype.newbyteorder("=") for layout in layouts]
    if len(set(dtypes)) == 1 or any(dtype.kind not in "iu" for dtype in dtypes):
        return list(layouts)
    widest = np.result_type(*dtypes)
    if widest.kind not in "iu":  # signed and unsigned 64-bit integers
        return list(layouts)
    return [
        layout if layout.dtype == widest else _cast(layout, widest, reach) for layout in layouts
    ]


def _cast(layout: DatasetLayout, dtype: np.dtype[np.integer], reach: Reach) -> DatasetLayout:
    values = read_whole(layout, reach).astype(dtype)
    return DatasetLayout(
        file=layout.file,
        stamp=layout.stamp,
        path=layout.path,
        shape=values.shape,
        dtype=dtype,
        sample_axis=0,
        storage="compact",
        fallback_reason=None,
        fill=np.zeros((), dtype),
        stored_nbytes=layout.stored_nbytes,
        values=values,
    )


def _check_mapping(name: str, field: Field, config: ReaderConfig, where: Sequence[str]) -> None:
    """Reject options that do not permit mapping codes while they are read."""
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
