"""Compares packed files by h5py."""

import h5py
import numpy as np


def contents(path):
    """Return all values and attributes of a file, but for what it says of how it was packed."""
    found = {}

    def visit(name, node):
        attributes = {key: np.asarray(value).tolist() for key, value in node.attrs.items()}
        values = None
        if isinstance(node, h5py.Dataset):
            values = [np.asarray(one).tolist() for one in node[()]] if node.shape else node[()]
            values = str(node.dtype), node.shape, values
        found[name] = attributes, values

    with h5py.File(path) as file:
        file.visititems(visit)
    return found


def samples():
    """Yield samples that have columns of every form."""
    for n in range(900):
        yield {
            "data": np.full((40, 5), n, np.float32) + np.arange(5),
            "labels": n,
            "tokens": list(range(n % 7)),
            "text": f"sample {n}" * (n % 3),
        }
