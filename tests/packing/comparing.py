"""Packs samples, and compares packed files by h5py."""

import h5py
import numpy as np
from pictures import encoded, pixels
from PIL import Image

import h5async

PNGS = [encoded(Image.fromarray(pixels(5, 4 + n % 3, n)), "PNG") for n in range(9)]


def opened(sources, tmp_path, **options):
    """Pack, and return the open file."""
    out = tmp_path / "out.h5"
    h5async.pack(sources, out, overwrite=True, **options)
    return h5py.File(out)


def values(dataset):
    """Return the values of a dataset, strings as str, and arrays of any length as lists."""
    found = dataset[:] if not h5py.check_string_dtype(dataset.dtype) else dataset.asstr()[:]
    return [one.tolist() if isinstance(one, np.ndarray) else one for one in found]


def interrupt(done, *_):
    """Stop a pack whose `progress` it is."""
    if done > 64:
        raise KeyboardInterrupt


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
