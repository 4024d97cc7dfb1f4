"""Finds what parts of rows the options of a plain field name: a field and a layout enter."""

from __future__ import annotations

from h5async.config import Field
from h5async.errors import ConfigError
from h5async.index.attributes import numbered_axis
from h5async.index.layout import DatasetLayout
from h5async.index.regions import cut_rows


def parts_of_rows(field: Field, layout: DatasetLayout) -> DatasetLayout:
    """Return the layout of the rows that a field has: the region of each.

    ConfigError if a dimension is that of the samples, or is not there, or nothing of it is wanted.
    """
    if field.region is None:
        return layout
    wanted = [range(size) for size in layout.row_shape]
    for bounds in field.region:
        at = _row_dimension(bounds.dimension, field, layout, "region")
        size = layout.row_shape[at]
        wanted[at] = range(size)[bounds.slice]
        if not wanted[at]:
            raise ConfigError(
                f"{_where(layout)}: region leaves nothing of dimension {bounds.dimension!r},"
                f" which has {size} elements; choose another slice than {bounds.slice}"
            )
    return cut_rows(layout, wanted)


def _row_dimension(dim: int | str, field: Field, layout: DatasetLayout, option: str) -> int:
    """Return which dimension of a row a dimension of the dataset is."""
    where, several = _where(layout), field.num_dim
    is_pair = isinstance(several, tuple)
    rank = len(layout.shape) + is_pair  # in the layout, the two dimensions of samples are one
    of_samples = several if isinstance(several, tuple) else (layout.sample_axis,)
    taken = [numbered_axis(one, layout.dim_names, rank, where) for one in of_samples]
    number = numbered_axis(dim, layout.dim_names, rank, where)
    if number in taken:
        raise ConfigError(
            f"{where}: {option}: dimension {dim!r} counts the samples; choose samples by indices"
        )
    return [axis for axis in range(rank) if axis not in taken].index(number)


def _where(layout: DatasetLayout) -> str:
    return f'{layout.file}: dataset "{layout.path}" of shape {layout.shape}'
