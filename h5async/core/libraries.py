"""Finds the libraries that the compiled core calls: libdeflate, zstd, lz4, libaec and other codecs.

The core calls their public C interfaces. They are the libraries that come with imagecodecs (libaec:
with h5py), or else those of the environment or the system. So is libcurl, which comes with pycurl.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import importlib
import importlib.metadata
import sys
from collections.abc import Iterable, Iterator, Sequence
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
# Likewise, of src/http.c.
_CURL = (
    "curl_global_init",
    "curl_easy_init",
    "curl_easy_setopt",
    "curl_easy_getinfo",
    "curl_easy_cleanup",
    "curl_multi_init",
    "curl_multi_setopt",
    "curl_multi_add_handle",
    "curl_multi_remove_handle",
    "curl_multi_perform",
    "curl_multi_poll",
    "curl_multi_info_read",
    "curl_multi_cleanup",
    "curl_slist_append",
    "curl_slist_free_all",
)


def find_functions() -> tuple[dict[str, int], frozenset[str]]:
    """Return the addresses of functions by their names, and the libraries that were not found."""
    found: dict[str, int] = {}
    missing = set(LIBRARIES)
    for name, functions in LIBRARIES.items():
        addresses = _load(_codec_paths(name), functions)
        if addresses is not None:
            found |= addresses
            missing.discard(name)
    return found, frozenset(missing)


def find_curl() -> dict[str, int] | None:
    """Return the addresses of libcurl's functions by their names; None if it was not found."""
    return _load(_curl_paths(), _CURL)


def _load(paths: Iterable[str], functions: Sequence[str]) -> dict[str, int] | None:
    """Return the addresses of functions of the first library that has them all, by their names."""
    for path in paths:
        with suppressing(OSError, AttributeError):
            library = ctypes.CDLL(path)
            pointers = [ctypes.cast(getattr(library, one), c_void_p) for one in functions]
            return {n: p.value or 0 for n, p in zip(functions, pointers, strict=True)}
    return None


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
    yield from _other_paths(name)


def _curl_paths() -> Iterator[str]:
    with suppressing(importlib.metadata.PackageNotFoundError):
        for file in importlib.metadata.files("pycurl") or ():
            if file.name.startswith("libcurl"):
                yield str(file.locate())
    yield from _other_paths("curl")


def _other_paths(name: str) -> Iterator[str]:
    """Yield a shared library of the environment, and the system's."""
    for suffix in (".so", ".dylib"):
        path = Path(sys.prefix, "lib", f"lib{name}{suffix}")
        if path.exists():
            yield str(path)
    found = ctypes.util.find_library(name)
    if found is not None:
        yield found
