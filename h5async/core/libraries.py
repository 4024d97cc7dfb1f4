"""Finds the codec libraries that the compiled core calls: libdeflate, zstd, lz4, libaec and others.

The core calls their public C interfaces. They are the libraries that come with imagecodecs (libaec:
with h5py), or else those of the environment or the system.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import importlib
import sys
from collections.abc import Iterator
from ctypes import c_void_p
from pathlib import Path

import h5py
import imagecodecs

from h5async.codec.plugins import folders_of_hdf5plugin
from h5async.system.interruptions import suppressing

# Libraries and their functions, in the order of the structure in src/common.h.
LIBRARIES = {
    "deflate": (
        "libdeflate_alloc_decompressor",
        "libdeflate_free_decompressor",
        "libdeflate_zlib_decompress",
    ),
    "zstd": ("ZSTD_createDCtx", "ZSTD_freeDCtx", "ZSTD_decompressDCtx", "ZSTD_isError"),
    "lz4": ("LZ4_decompress_safe",),
    "blosc": ("blosc_decompress_ctx",),
    "aec": ("aec_buffer_decode",),
    "bz2": ("BZ2_bzBuffToBuffDecompress",),
}


def find_functions() -> tuple[dict[str, int], frozenset[str]]:
    """Return the addresses of functions by their names, and the libraries that were not found."""
    found: dict[str, int] = {}
    missing = set(LIBRARIES)
    for name, functions in LIBRARIES.items():
        for path in _codec_paths(name):
            with suppressing(OSError, AttributeError):
                library = ctypes.CDLL(path)
                pointers = [ctypes.cast(getattr(library, one), c_void_p) for one in functions]
                found |= {n: p.value or 0 for n, p in zip(functions, pointers, strict=True)}
                missing.discard(name)
                break
    return found, frozenset(missing)


def _codec_paths(name: str) -> Iterator[str]:
    """Yield the shared libraries of a codec: imagecodecs', the environment's, the system's."""
    # The extension module loads what the codec's library itself needs.
    with suppressing(ImportError):
        importlib.import_module(f"imagecodecs._{name}")
    # Versions of libaec decode some chunks differently: HDF5's own comes first.
    for module in (h5py, imagecodecs) if name == "aec" else (imagecodecs,):
        package = Path(module.__file__).parent
        for folder in (package.with_name(f"{package.name}.libs"), package / ".dylibs"):
            yield from map(str, sorted(folder.glob(f"lib{name}[-.]*")))
    if name == "bz2":  # part of hdf5plugin's plugin
        for folder in folders_of_hdf5plugin():
            yield from map(str, folder.glob("libh5bzip2*"))
    for suffix in (".so", ".dylib"):
        path = Path(sys.prefix, "lib", f"lib{name}{suffix}")
        if path.exists():
            yield str(path)
    found = ctypes.util.find_library(name)
    if found is not None:
        yield found
