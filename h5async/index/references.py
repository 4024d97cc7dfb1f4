"""Reads where the references of a variable-length dataset are stored.

An open file and a path enter; a layout leaves, like that of any dataset, whose elements are
references of some bytes each, and their format.
"""

from __future__ import annotations

import h5py

from h5async.config.files import FileName
from h5async.errors import DatasetError
from h5async.index.layout import DatasetLayout
from h5async.index.links import Reach, open_index
from h5async.index.metadata import indexer_at
from h5async.index.obstacles import NotDirectError
from h5async.index.variablelength import Forms, variable_length
from h5async.io.stores import HDF5File
from h5async.system.interruptions import suppressing


def references(path: FileName, name: str, reach: Reach) -> tuple[DatasetLayout, Forms]:
    """Return the layout of the references of a dataset, and what they refer to.

    Returns
    -------
    layout
        Of shape (n,), and of a void dtype of the bytes of a reference.
    forms
        How those of each file are to be understood: its own, which may be that of the layout
        alone, and those of the sources of a virtual dataset.

    Raises
    ------
    DatasetError
        If it is not a variable-length dataset with one dimension, or cannot be read.
    H5AsyncError
        As in `metadata.read_layouts`.
    """
    where = f'{path}: dataset "{name}"'
    with open_index(path) as file, indexer_at(file, name, reach) as (indexer, found, node):
        try:
            if found.rest or variable_length(node) is None:
                name = _name_of_type(node)
                is_bytes = name.startswith(("|S", "|V"))
                more = ", or store each sample as h5py.vlen_dtype(np.uint8)" if is_bytes else ""
                raise DatasetError(
                    f"{where} is of {name}, not of a variable-length datatype; give the path of its"
                    f" offsets{more}"
                )
            forms: Forms = {}
            return indexer.raw_layout(found.path, node, forms), forms
        except NotDirectError as error:
            raise DatasetError(
                f"{where} cannot be read: {error}; store flat values, and their offsets"
            ) from error


def may_be_variable_length(file: HDF5File, name: str, reach: Reach) -> bool:
    """Return whether a path of an open file leads to a dataset of a variable-length datatype."""
    try:
        with indexer_at(file, name, reach) as (_, found, node):
            return not found.rest and variable_length(node) is not None
    except NotDirectError:
        return True
    except DatasetError:
        return False


def _name_of_type(node: h5py.h5d.DatasetID) -> str:
    with suppressing(Exception):  # h5py has no one type for what it cannot express
        return str(node.dtype)
    return "a datatype that NumPy does not have"
