"""Loads the compiled core, and calls it.

`src/core.c` plans batches, and reads shares of them, without the GIL. It is a plain shared library
called through ctypes, and is built with the package if there is a C compiler. Without it,
everything is read through h5py. The environment variable ``H5ASYNC_CORE`` is the path of another
build of it; ``H5ASYNC_CORE=0`` switches it off.

The core calls the public C interfaces of libdeflate, zstd, lz4, libaec and other codecs. It uses
the libraries bundled with imagecodecs (for libaec, with h5py), or else those of the environment or
the system. The same goes for libcurl, which comes with pycurl.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import functools
import importlib
import importlib.metadata
import itertools
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from ctypes import POINTER, Structure, c_char_p, c_int32, c_int64, c_uint32, c_uint64, c_void_p
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import h5py
import imagecodecs
import numpy as np
from numpy.typing import NDArray

from h5async.codec.filters import Filter, folders_of_hdf5plugin
from h5async.errors import ConfigError
from h5async.io.source import IoMode
from h5async.system.interruptions import call_when_gone, interruption, suppressing
from h5async.system.timeline import ThreadCounts

# Codec libraries, with the prefixes of the names of their functions.
LIBRARIES = {
    "deflate": "libdeflate_",
    "zstd": "ZSTD_",
    "lz4": "LZ4_",
    "blosc": "blosc_",
    "aec": "aec_",
    "bz2": "BZ2_",
    "jpeg": "jpeg_",
}


def find_functions(names: Sequence[str]) -> tuple[dict[str, int], frozenset[str]]:
    """Return the addresses of codec functions by name, and the libraries that were not found."""
    found: dict[str, int] = {}
    missing = set(LIBRARIES)
    for library, prefix in LIBRARIES.items():
        own = [name for name in names if name.startswith(prefix)]
        addresses = _load(_codec_paths(library), own)
        if addresses is not None:
            found |= addresses
            missing.discard(library)
    return found, frozenset(missing)


def find_curl(names: Sequence[str]) -> dict[str, int] | None:
    """Return the addresses of libcurl's functions by name; None if it was not found."""
    return _load(_curl_paths(), names)


def _load(paths: Iterable[str], functions: Sequence[str]) -> dict[str, int] | None:
    """Return the addresses, by name, of functions of the first library that has them all."""
    for path in paths:
        with suppressing(OSError, AttributeError):
            library = ctypes.CDLL(path)
            pointers = [ctypes.cast(getattr(library, one), c_void_p) for one in functions]
            return {n: p.value or 0 for n, p in zip(functions, pointers, strict=True)}
    return None


def _codec_paths(name: str) -> Iterator[str]:
    """Yield the shared libraries of a codec: imagecodecs', the environment's, the system's."""
    # Importing the extension module loads the libraries that the codec's library depends on.
    with suppressing(ImportError):
        importlib.import_module(f"imagecodecs._{name}")
    # Some chunks decode differently in other versions of libaec, so HDF5's own comes first.
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
    for suffix in (".so", ".dylib"):
        path = Path(sys.prefix, "lib", f"lib{name}{suffix}")
        if path.exists():
            yield str(path)
    found = ctypes.util.find_library(name)
    if found is not None:
        yield found


# --- the core's constants and structures; comments in `src/` explain them -------------------------

ABI = 49  # counts changes of the core's structures and functions
MAX_FILTERS, MAX_RANK = 32, 32  # HDF5's limits
IO_MODES = {"auto": 0, "pread": 1, "map": 2}
REFUSED = 2  # the status of an item that Python has read again, or reports as an error
# Parts of the places of elements whose heap collection is not walked yet; NOWHERE: no address.
INDEX_BITS, MOST_ADDRESS = 16, (1 << 47) - 1
NOWHERE = -1

IS_REPLACED, CANNOT_MAP = -1, -2  # why a source cannot be opened again


class Event(IntEnum):
    """Why a call did not do its work, or why its work is invalid."""

    NONE = 0
    CHANGED = 1  # the file has changed since it was indexed
    FAULTED = 2  # a page of the map cannot be read
    STOPPED = 3  # the reader is being closed


class _Member(Structure):
    _fields_ = (("name", c_char_p), ("type", c_char_p), ("offset", c_int64), ("nbytes", c_int64))


class _Described(Structure):
    _fields_ = (("name", c_char_p), ("nbytes", c_int64), ("members", POINTER(_Member)))


def structures_of(library: Any) -> dict[str, type[Structure]]:
    """Return the structures of a core by their names in C, from the core's own description.

    They hold addresses of arrays; their owner keeps the arrays alive. Getting or setting a member
    that does not exist, or that only the core uses, raises `AttributeError`.
    """
    library.h5async_structures.restype = POINTER(_Described)
    found: dict[str, type[Structure]] = {}
    types: dict[bytes, Any] = {b"int32": c_int32, b"uint32": c_uint32, b"int64": c_int64}
    for described in itertools.takewhile(_is_named, library.h5async_structures()):
        fields: list[tuple[str, Any]] = []
        at = 0
        for member in itertools.takewhile(_is_named, described.members):
            fields += _gap(at, member.offset)
            kind = types.get(member.type, c_void_p)
            count = member.nbytes // ctypes.sizeof(kind)
            fields.append((member.name.decode(), kind if count == 1 else kind * count))
            at = member.offset + member.nbytes
        fields += _gap(at, described.nbytes)
        name = described.name.decode()
        made = type(name, (Structure,), {"__slots__": (), "_fields_": fields})
        assert ctypes.sizeof(made) == described.nbytes
        types[described.name], types[b"*" + described.name] = made, POINTER(made)
        found[name] = made
    return found


def members_of(structure: type[Structure]) -> list[str]:
    """Return the names of the members of a core's structure."""
    return [name for name, *_ in structure._fields_]


def _is_named(entry: Any) -> bool:
    return entry.name is not None


def _gap(at: int, end: int) -> list[tuple[str, Any]]:
    return [(f"_{at}", ctypes.c_char * (end - at))] if at < end else []


# The maximum memory of a plan per sample (a number and a position, and room to sort them), and per
# row of a field (also an item and a run).
PLANNED_SAMPLE_NBYTES = 3 * 16
PLANNED_ROW_NBYTES = 64 + 3 * 8 + PLANNED_SAMPLE_NBYTES
# Scratch memory of a thread that reads elements of variable length: HeapScratch in src/heap.c.
HEAP_SCRATCH_NBYTES = (1 << 16) * 24 + 5 * 8 + 16 * 1024 + 512 * 16
KEPT_OVERHEAD_NBYTES = 128  # per kept decoded chunk, in addition to its bytes: KEPT_OVERHEAD

# The kinds of values in sparse matrices: enum ValueKind in src/dense.c.
VALUE_KINDS = {
    np.dtype(name): kind
    for kind, name in enumerate(("i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f4", "f8"), 1)
}

PICTURE_NUMBERS = 14  # numbers that describe an image to decode: `Picture` in src/jpeg.c

# Conversions: enum SourceKind in src/transform.c.
_SOURCES = {"uint8": 11, "uint16": 12, "int16": 13, "float32": 14}


def transform_source(raw: np.dtype[Any], delivered: np.dtype[Any], is_scaled: bool) -> int | None:
    """Return the core's number of a conversion, or None if NumPy has to do it."""
    if not raw.isnative:
        return None
    if raw == delivered and not is_scaled:
        return raw.itemsize if raw.itemsize in (1, 2, 4, 8) and raw.kind in "biufc" else None
    return _SOURCES.get(raw.name) if delivered == np.float32 else None


# --- the core's functions -------------------------------------------------------------------------

_COST = "everything is read through h5py, by one thread at a time; values are the same"
_SAME_CLOCK_NS = 10_000_000  # two readings of one clock are closer together

# Functions by the types of their parameters; comments in `src/` explain them.
_TYPES = {"p": c_void_p, "i": c_int32, "q": c_int64, "Q": c_uint64, "o": ctypes.py_object}
_FUNCTIONS = {
    "ppp": "transform unpack",
    "pqQQQp": "permute",
    "pppqqq": "draw",
    "ppqq": "window_samples copy_events",
    "ppppqq": "group",
    "ppqqq": "cut",
    "ppppqqq": "cut_sorted scale_rows",
    "ppppppqqq": "read_ranges",
    "p": "cut_frames open_sources close_sources clear_store free_store free_plan make_dense free"
    " close_again new_http free_http plan_selected read_selected",
    "pp": "get_http",
    "pq": "open_ahead spin",
    "pqqqqi": "restamp",
    "qqq": "new_store",
    "pppqpqqqqp": "plan_batch",
    "pppppqq": "read_batch",
    "pppppppqqq": "read_samples",
    "pppppqqpq": "list_ranges",
    "pppppq": "read_again copy_runs",
    "pqq": "wait",
    "pqp": "open_again",
    "ppppqqqq": "decode",
    "pppqpqq": "decode_fetched",
    "pQQqpqqp": "fetch_chunks",
    "pqppq": "describe",
    "ppq": "decode_references next",
    "pppqq": "image_headers sum_rows",
    "pppq": "decode_jpegs look_up",
    "ppppi": "measure",
}
# Functions that take less time than releasing the GIL keep it; "visit" releases it itself.
_BRIEF_FUNCTIONS = {
    "p": "visit is_dropping open_queue put_ticket forget_jobs end_queue events wake",
    "ppppqqqqii": "submit",
    "pqq": "drop samples_at",
    "pqqq": "finish",
    "pq": "serial_at",
    "o": "turns_of",
    "": "clock",
    "pp": "trace link_worker sum_done",
}


class Core:
    """The compiled core, loaded. Raises `OSError` if that fails, or the core's version is wrong.

    Its functions and structures are attributes. Most functions release the GIL, and may be called
    from many threads, each with its own worker. `missing` lists the codec libraries that were not
    found; data that need them are read through h5py.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        library, brief = ctypes.CDLL(str(path)), ctypes.PyDLL(str(path))
        try:
            if _function(library, "abi", "")() != ABI:
                raise OSError(f"{path} was built for another version; install h5async again")
            for name, structure in structures_of(library).items():
                setattr(self, name, structure)
            for build, functions in (library, _FUNCTIONS), (brief, _BRIEF_FUNCTIONS):
                for parameters, names in functions.items():
                    for name in names.split():
                        setattr(self, name, _function(build, name, parameters))
        except AttributeError as error:
            raise OSError(f"{path} is not h5async's core") from error
        self.new_store.restype = c_void_p
        self.turns_of.restype = ctypes.py_object
        addresses, self.missing = find_functions(members_of(self.Libraries))
        self._libraries = self.Libraries(**addresses)
        if self.decode_pictures(np.empty((0, PICTURE_NUMBERS), np.int64)) is None:
            self.missing |= {"jpeg"}  # the library found has another ABI

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def clock_offset_ns(self) -> int:
        """Return `time.perf_counter_ns` minus the core's clock: 0 on Linux."""
        offset_ns = time.perf_counter_ns() - int(self.clock())
        return 0 if abs(offset_ns) < _SAME_CLOCK_NS else offset_ns

    def filters(self, filters: tuple[Filter, ...]) -> Any | None:
        """Return a pipeline in the core's form, or None if the core cannot undo it."""
        if len(filters) > MAX_FILTERS:
            return None
        taken = [found for entry in filters if (found := entry.core) is not None]
        if len(taken) < len(filters) or any(entry.library in self.missing for entry in taken):
            return None
        values = [(ctypes.c_uint32 * len(entry.values))(*entry.values) for entry in taken]
        structs = [
            self.Filter(*entry[:3], ctypes.addressof(given), len(given), entry.function)
            for entry, given in zip(taken, values, strict=True)
        ]
        found = (self.Filter * max(1, len(structs)))(*structs)
        found.values = values  # keeps the arrays that the structures point to
        return found

    def decode_pictures(self, pictures: NDArray[np.int64]) -> NDArray[np.bool_] | None:
        """Decode JPEGs, described by rows of `Picture` in src/jpeg.c; return which were decoded.

        None if the core has no libjpeg.
        """
        is_done = np.empty(len(pictures), np.bool_)
        libraries = ctypes.addressof(self._libraries)
        arrays = pictures.ctypes.data, is_done.ctypes.data
        return is_done if self.decode_jpegs(libraries, *arrays, len(pictures)) else None

    def new_worker(
        self,
        encoded: NDArray[Any],
        chunk: NDArray[Any],
        between: tuple[NDArray[Any], ...],
        stop: c_int32 | None = None,
    ) -> CoreWorker:
        """Return a worker, which one thread needs to call the core, with its scratch buffers.

        Once `stop` is not 0, calls end as soon as they can, with `Event.STOPPED`.
        """
        struct = self.Worker(
            libraries=ctypes.pointer(self._libraries),
            encoded=address(encoded),
            chunk=address(chunk),
            between=tuple(map(address, between)),
            encoded_nbytes=encoded.nbytes,
            chunk_nbytes=chunk.nbytes,
            between_nbytes=min(array.nbytes for array in between),
            stop=None if stop is None else ctypes.addressof(stop),
        )
        return CoreWorker(struct, self.free, self.trace, stop)


class CoreWorker:
    """The state with which one thread calls the core: decoders' contexts, scratch, counters.

    The counters of `struct` only grow.
    """

    def __init__(self, struct: Structure, free: Any, trace: Any, stop: c_int32 | None) -> None:
        self.struct: Any = struct
        self._stop = stop  # the structure points to it
        self._trace = trace
        self._traces: tuple[CoreTrace, ...] = ()  # whose memory a call may use
        call_when_gone(self, free, ctypes.byref(struct))

    def record(self, trace: CoreTrace | None) -> None:
        """Record calls in a trace from now on; None stops it. May be called during a call."""
        struct = None if trace is None else ctypes.byref(trace.struct)
        # A call under way may use the former trace until it ends, so that one is kept.
        former = self._traces if self._trace(ctypes.byref(self.struct), struct) else ()
        self._traces = former if trace is None else (*former, trace)


def counts_of(done: Any) -> ThreadCounts:
    """Return the counts in a structure `Done` of the core."""
    return ThreadCounts(**{name: getattr(done, name) for name in members_of(type(done))})


class CoreTrace:
    """The first `capacity` events of the core's calls; later ones are only counted.

    The operating system allocates the memory as events come.
    """

    def __init__(self, core: Core, capacity: int) -> None:
        self._core = core
        self._events: NDArray[Any] = np.zeros(capacity, core.TraceEvent)
        self.struct = core.Trace(address(self._events), capacity, 0)
        self._offset_ns = core.clock_offset_ns()

    @property
    def count(self) -> int:
        """The number of events so far, including those for which there was no room."""
        return int(self.struct.count)

    def events(self, begin: int = 0) -> NDArray[Any]:
        """Return the events from index `begin` on, in the order in which they were recorded.

        Times are those of `time.perf_counter_ns`. An event that is still being written has end 0.
        """
        count = max(0, min(self.count, len(self._events)) - begin)
        found = np.empty(count, self._events.dtype)
        self._core.copy_events(ctypes.byref(self.struct), address(found), begin, count)
        if self._offset_ns:
            found["begin_ns"] += self._offset_ns
            found["end_ns"] += np.where(found["end_ns"] != 0, self._offset_ns, 0)
        return found


def address(array: NDArray[Any]) -> int:
    """Return the address of an array's first byte; the caller keeps the array alive."""
    return array.ctypes.data


def mapping_mode(io: IoMode) -> IoMode:
    """Resolve an I/O mode: without the core, which guards memory maps, "auto" means "pread"."""
    return "pread" if io == "auto" and load_core() is None else io


def load_core() -> Core | None:
    """Return the compiled core, or None if it is switched off or was not built.

    `ConfigError` is raised if H5ASYNC_CORE names a file that cannot be loaded as the core.
    """
    found = _core_or_reason()
    return found if isinstance(found, Core) else None


def why_no_core() -> str | None:
    """Explain why there is no core, its cost, and the remedy; None if there is a core."""
    found = _core_or_reason()
    return found if isinstance(found, str) else None


@functools.cache
def _core_or_reason() -> Core | str:
    chosen = os.environ.get("H5ASYNC_CORE", "")
    if chosen == "0":
        return f"the compiled core is switched off by H5ASYNC_CORE=0: {_COST}"
    if chosen:
        try:
            return Core(Path(chosen))
        except OSError as error:
            raise ConfigError(
                f"the environment variable H5ASYNC_CORE={chosen} does not name a loadable core"
                f" ({error}); unset it to use the installed core, or set it to 0 to use none"
            ) from error
    why = "is missing"
    for path in _installed():
        try:
            return Core(path)
        except OSError as error:
            if interruption(error) is not None:
                raise
            why = f"cannot be loaded ({error})"
    install = "build h5async with a C compiler, or install a wheel for this platform"
    return f"the compiled core {why}: {_COST}; {install}"


def can_decode(entry: Filter) -> bool:
    """Tell whether a filter is decoded by the core; all others are by HDF5."""
    core = load_core()
    return core is not None and core.filters((entry,)) is not None


def _installed() -> list[Path]:
    """Return the cores to try: in a source tree without a built one, those that pip installed."""
    found = sorted(Path(__file__).parent.glob("_core*.so"))
    if not found:
        for package in importlib.metadata.distributions(name="h5async"):
            files = package.files or ()
            found += [Path(str(one.locate())) for one in files if one.match("core/_core*.so")]
    return found


def _function(library: Any, name: str, parameters: str) -> Any:
    function = getattr(library, f"h5async_{name}")
    function.restype = c_int64
    function.argtypes = [_TYPES[kind] for kind in parameters]
    return function
