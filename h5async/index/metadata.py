"""Reads the layouts of a file's datasets: where their bytes lie, or why only h5py may read them.

Metadata are read once, and the file is open only meanwhile.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import h5py

from h5async.config import Field
from h5async.errors import DatasetError, H5AsyncError, out_of_memory
from h5async.index.contents import LISTING_NBYTES, what_is_there
from h5async.index.datasets import Indexer, note_file
from h5async.index.layout import DatasetLayout
from h5async.index.links import BESIDE, Reach, locate, metadata_cache, open_index
from h5async.index.listing import walk
from h5async.names import name_bytes
from h5async.system.interruptions import passing, suppressing


def read_layouts(
    path: Path, fields: Mapping[str, Field], reach: Reach = BESIDE
) -> dict[str, DatasetLayout]:
    """Read the layout of each field's dataset, opening the file once.

    Raises
    ------
    ReadError
        If the file cannot be opened, or a chunk table points outside it.
    DatasetError
        If a dataset is missing, is a group, or has no samples dimension or fixed-size dtype.
    UnsafeFileError
        If a dataset lies in files that `reach` does not permit.
    ConfigError
        If a field's ``num_dim`` is not a dimension of its dataset.
    """
    with open_index(path) as file:
        note_file(file, reach)
        return {
            name: _layout_at(file, field.path, field.num_dim, reach)
            for name, field in fields.items()
        }


def list_layouts(
    path: Path, reach: Reach = BESIDE, num_dim: int = 0
) -> Iterator[tuple[str, DatasetLayout | H5AsyncError]]:
    """Yield each dataset of a file, as it is found, with its layout or why it has none.

    They come group by group, in the order of names; dimension `num_dim` counts their samples.
    """
    with passing(), open_index(path) as file, metadata_cache(file, LISTING_NBYTES):
        note_file(file, reach)
        for name, kind in walk(file):
            if kind == "group" or (kind != "dataset" and not _may_be_dataset(file, name, reach)):
                continue
            layout: DatasetLayout | H5AsyncError
            try:
                with passing():
                    layout = _layout_at(file, name, num_dim, reach)
            except H5AsyncError as error:
                layout = error
            yield name, layout


def _may_be_dataset(file: h5py.File, path: str, reach: Reach) -> bool:
    """Tell whether a name leads to a dataset, or to nothing that can be opened."""
    with contextlib.ExitStack() as files:
        with suppressing(Exception):  # a damaged object may raise anything; the listing says what
            found = locate(file, path, reach, files)
            return isinstance(found.file[name_bytes(found.path)], h5py.Dataset)
        return True


def _layout_at(file: h5py.File, path: str, num_dim: int, reach: Reach) -> DatasetLayout:
    """Read the layout of what a path leads to, in this file or another."""
    with contextlib.ExitStack() as files:
        try:
            found = locate(file, path, reach, files)
            node = found.file[name_bytes(found.path)]
        except H5AsyncError:
            raise
        except MemoryError as error:
            raise out_of_memory(f'{file.filename}: dataset "{path}"', error) from error
        except Exception as error:  # KeyError for most, but a damaged object may raise anything
            missing = isinstance(error, KeyError) and "Unable" not in str(error)
            missing = missing or "doesn't exist" in str(error)
            detail = "" if missing else f" that can be opened ({error})"
            raise DatasetError(
                f'{file.filename}: there is no dataset "{path}"{detail};'
                f" {what_is_there(file, reach)}"
            ) from error
        if not isinstance(node, h5py.Dataset):
            kind = "group" if isinstance(node, h5py.Group) else "named type"
            raise DatasetError(
                f'{file.filename}: "{path}" is a {kind}, not a dataset;'
                f" {what_is_there(file, reach)}"
            )
        return Indexer(found.file, reach).layout(found.path, node, found.rest, num_dim)
