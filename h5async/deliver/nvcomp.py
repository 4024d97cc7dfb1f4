"""Decodes compressed blocks on a GPU, by nvCOMP's batched decoders.

nvCOMP is called through its C interface (its low-level, batched API, nvCOMP 5 and 6), which takes
all blocks of a batch in one call and puts the work on a stream. It checks little, and NVIDIA
promises nothing for damaged bytes: the caller compares sizes, states and checksums afterwards.

Source: the headers of the package nvidia-libnvcomp, `nvcomp/deflate.h` and its kin.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from pathlib import Path
from typing import NamedTuple

_MAJOR_VERSIONS = (5, 6)
_BACKEND_CUDA = 2  # the decompression engine of newer GPUs does not notice damage

_NAMES = {"deflate": "Deflate", "zstd": "Zstd", "lz4": "LZ4"}
FORMATS = tuple(_NAMES)


class _Options(ctypes.Structure):
    """The argument of all decoders: the backend, and bytes that have to be 0."""

    _fields_ = (("backend", ctypes.c_int), ("reserved", ctypes.c_char * 60))


class _Properties(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("cudart_version", ctypes.c_uint32))


class NvcompError(Exception):
    """nvCOMP is missing, or refused a call; the message says which."""


class Blocks(NamedTuple):
    """Device addresses of arrays with a number per block.

    Attributes
    ----------
    sources, source_nbytes, targets, target_nbytes
        Addresses and sizes, 64 bits each. For deflate, a source lies at a multiple of 4.
    actual_nbytes, states
        To be filled: sizes (64 bits), and states (32 bits; 0 means success).
    """

    sources: int
    source_nbytes: int
    targets: int
    target_nbytes: int
    actual_nbytes: int
    states: int


class Nvcomp:
    """The library. Safe to use from many threads.

    `NvcompError` is raised if it cannot be loaded, or its version has another interface.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._library = ctypes.CDLL(str(path))
        except OSError as error:
            raise NvcompError(f"nvCOMP cannot be loaded: {error}") from error
        properties = _Properties()
        self._check(self._library.nvcompGetProperties(ctypes.byref(properties)), "nvCOMP")
        major, minor = properties.version // 1000, properties.version % 1000 // 100
        self.version = f"{major}.{minor}.{properties.version % 100}"
        if major not in _MAJOR_VERSIONS:
            raise NvcompError(f"nvCOMP {self.version} is installed; versions 5 and 6 are known")
        self._wants_stream = major >= 6
        self._options = _Options(_BACKEND_CUDA, b"")

    def temp_nbytes(self, form: str, count: int, largest_nbytes: int, total_nbytes: int) -> int:
        """Return the bytes of device memory that `decompress` needs to work with.

        `form` is one of `FORMATS`; `count` blocks have at most `largest_nbytes`, and `total_nbytes`
        together, once decoded.
        """
        name = f"nvcompBatched{_NAMES[form]}DecompressGetTempSize"
        function = getattr(self._library, name if self._wants_stream else f"{name}Async")
        found = ctypes.c_size_t()
        arguments = [
            ctypes.c_size_t(count),
            ctypes.c_size_t(largest_nbytes),
            self._options,
            ctypes.byref(found),
            ctypes.c_size_t(total_nbytes),
        ]
        if self._wants_stream:
            arguments.append(ctypes.c_void_p(None))
        self._check(function(*arguments), name)
        return found.value

    def decompress(
        self,
        form: str,
        count: int,
        blocks: Blocks,
        temp: int,
        temp_nbytes: int,
        stream: int,
    ) -> None:
        """Put the decoding of `count` blocks on a stream.

        `form` is one of `FORMATS`: raw deflate, a zstd frame, an LZ4 block. `temp` is device memory
        of the size that the method `temp_nbytes` returns; `stream` is a ``cudaStream_t``.
        `NvcompError` is raised if the call is refused; errors of blocks are in `blocks.states`.
        """
        name = f"nvcompBatched{_NAMES[form]}DecompressAsync"
        status = getattr(self._library, name)(
            ctypes.c_void_p(blocks.sources),
            ctypes.c_void_p(blocks.source_nbytes),
            ctypes.c_void_p(blocks.target_nbytes),
            ctypes.c_void_p(blocks.actual_nbytes),
            ctypes.c_size_t(count),
            ctypes.c_void_p(temp),
            ctypes.c_size_t(temp_nbytes),
            ctypes.c_void_p(blocks.targets),
            self._options,
            ctypes.c_void_p(blocks.states),
            ctypes.c_void_p(stream),
        )
        self._check(status, name)

    @staticmethod
    def _check(status: int, name: str) -> None:
        if status:
            raise NvcompError(f"{name} failed: nvcompStatus_t {status}")


@functools.cache
def load_nvcomp() -> Nvcomp:
    """Load the library of the package nvidia-libnvcomp; `NvcompError` if there is none."""
    spec = None
    if importlib.util.find_spec("nvidia") is not None:
        spec = importlib.util.find_spec("nvidia.libnvcomp")
    for folder in [] if spec is None else spec.submodule_search_locations or []:
        for path in sorted(Path(folder).glob("lib*/libnvcomp.so*")):
            return Nvcomp(path)
    raise NvcompError("nvCOMP is not installed")
