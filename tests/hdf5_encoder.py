"""A pipeline and values enter; chunks as HDF5 itself encodes them leave."""

from __future__ import annotations

import h5py
import numpy as np

from h5async.codec.filters import (
    BITSHUFFLE,
    BLOSC,
    BLOSC2,
    BZIP2,
    DEFLATE,
    FLETCHER32,
    LZ4,
    LZF,
    SHUFFLE,
    ZSTD,
    Filter,
)

SEED = 20160704
# Name -> number, and the client data that HDF5's encoder is given for elements of some size.
BUILT_IN = {
    "deflate": (DEFLATE, lambda element: (6,)),
    "shuffle": (SHUFFLE, lambda element: (element,)),
    "fletcher32": (FLETCHER32, lambda element: ()),
    "lzf": (LZF, lambda element: ()),
}
REGISTERED = {
    "zstd": (ZSTD, lambda element: (3,)),
    "lz4": (LZ4, lambda element: ()),
    "lz4-blocks-of-256": (LZ4, lambda element: (256,)),
    "bitshuffle": (BITSHUFFLE, lambda element: (0, 0)),
    "bitshuffle-blocks-of-16": (BITSHUFFLE, lambda element: (16, 0)),
    "bitshuffle-lz4": (BITSHUFFLE, lambda element: (0, 2)),
    "bitshuffle-lz4-blocks-of-32": (BITSHUFFLE, lambda element: (32, 2)),
    "bitshuffle-zstd": (BITSHUFFLE, lambda element: (0, 3, 3)),
    "bitshuffle-zstd-blocks-of-64": (BITSHUFFLE, lambda element: (64, 3, 3)),
    "bzip2": (BZIP2, lambda element: (9,)),
    **{
        f"blosc-{name}-{shuffle}": (
            BLOSC,
            lambda element, code=code, shuffle=shuffle: (0, 0, 0, 0, 5, shuffle, code),
        )
        for code, name in enumerate(("blosclz", "lz4", "lz4hc", "snappy", "zlib", "zstd"))
        for shuffle in (0, 1, 2)
    },
    **{
        f"blosc2-{name}-{shuffle}": (
            BLOSC2,
            lambda element, code=code, shuffle=shuffle: (0, 0, 0, 0, 5, shuffle, code),
        )
        for code, name in ((0, "blosclz"), (1, "lz4"), (2, "lz4hc"), (4, "zlib"), (5, "zstd"))
        for shuffle in (0, 1, 2)
    },
}
MAY_GIVE_UP = {"lzf", *(name for name in REGISTERED if name.startswith("blosc"))}
ALL = BUILT_IN | REGISTERED


def contents(element, count):
    """Chunks of all kinds: empty of information, regular, half regular, pure noise."""
    rng = np.random.default_rng(SEED)
    nbytes = element * count
    yield np.zeros(nbytes, np.uint8)
    yield np.arange(nbytes, dtype=np.uint8)
    yield np.where(np.arange(nbytes) % 4, 7, rng.integers(0, 256, nbytes)).astype(np.uint8)
    yield rng.integers(0, 256, nbytes, np.uint8)


class HDF5Encoder:
    """Encodes chunks through HDF5, with filters appended one by one."""

    def __init__(self, pipeline, element):
        self.element = element
        self.dtype = np.dtype(f"V{element}")
        self.plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        for name in pipeline:
            self.plist.set_filter(
                ALL[name][0],
                h5py.h5z.FLAG_OPTIONAL if name in MAY_GIVE_UP else h5py.h5z.FLAG_MANDATORY,
                ALL[name][1](element),
            )
        self.filters = ()

    def encode(self, values):
        """Return the stored bytes and the filter mask of a chunk of `values`."""
        count = values.size // self.element
        with h5py.File("encoder", "w", driver="core", backing_store=False) as file:
            plist = self.plist.copy()
            plist.set_chunk((count,))
            space = h5py.h5s.create_simple((count,))
            dataset = h5py.h5d.create(
                file.id, b"data", h5py.h5t.py_create(self.dtype), space, plist
            )
            dataset.write(h5py.h5s.ALL, h5py.h5s.ALL, values.view(self.dtype))
            file.flush()
            created = dataset.get_create_plist()
            self.filters = tuple(
                Filter(*(created.get_filter(i)[k] for k in (0, 2)), "")
                for i in range(created.get_nfilters())
            )
            mask, encoded = dataset.read_direct_chunk((0,))
            read_back = np.empty(count, self.dtype)
            dataset.read(h5py.h5s.ALL, h5py.h5s.ALL, read_back)
            assert read_back.tobytes() == values.tobytes()
        return np.frombuffer(encoded, np.uint8), mask
