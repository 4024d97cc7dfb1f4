"""Finds the categories of a dataset of codes, as AnnData wrote them before 0.8.

A dataset enters; the path of another one leaves: an attribute refers to it, or it lies in a group
``__categories`` beside the dataset.
"""

from __future__ import annotations

import h5py

from h5async.errors import DatasetError
from h5async.index.links import Located
from h5async.spelling import name_bytes, name_text

_GROUP = "__categories"


def older_categories(located: Located, node: h5py.h5d.DatasetID) -> str | None:
    """Return the path of the dataset of categories, or None.

    Raises
    ------
    DatasetError
        If the attribute refers to something else.
    Exception
        Any of h5py's, if metadata are damaged.
    """
    if located.rest or node.get_type().get_class() != h5py.h5t.INTEGER:
        return None
    if h5py.h5a.exists(node, b"categories"):
        reference = h5py.Dataset(node).attrs["categories"]
        if isinstance(reference, h5py.Reference) and reference:
            names = located.file[reference]
            if isinstance(names, h5py.Dataset) and names.name is not None:
                return str(name_text(names.name)).strip("/")
            raise DatasetError(
                f'{located.file.filename}: column "{located.path}": its categories are no dataset'
                " of the file"
            )
    parent, _, name = located.path.strip("/").rpartition("/")
    group = f"{parent}/{_GROUP}" if parent else _GROUP
    links = located.file.id.links
    if not links.exists(name_bytes(group)) or not links.exists(name_bytes(f"{group}/{name}")):
        return None
    return f"{group}/{name}"
