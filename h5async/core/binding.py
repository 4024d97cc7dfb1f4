"""Loads the compiled core, and calls it.

`src/core.c` plans batches, and reads shares of them, without the GIL. It is a plain shared library,
called by ctypes, and is built with the package if there is a C compiler. Without it, everything is
read through h5py. The environment variable ``H5ASYNC_CORE`` names another build of it, and
``H5ASYNC_CORE=0`` switches it off.
"""

from __future__ import annotations

import ctypes
import functools
import os
import time
from ctypes import POINTER, c_int32, c_int64, c_uint64, c_void_p
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from h5async.codec.corefilters import CoreFilter
from h5async.codec.filters import Filter
from h5async.core import structures
from h5async.core.libraries import find_functions
from h5async.core.structures import (
    MAX_FILTERS,
    FilterStruct,
    LibrariesStruct,
    MemberStruct,
    TraceEventStruct,
    TraceStruct,
    WorkerStruct,
    members,
)
from h5async.errors import ConfigError
from h5async.io.localfiles import IoMode
from h5async.system.interruptions import call_when_gone, suppressing
from h5async.system.timeline import ThreadCounts

_COST = "everything is read through h5py, by one thread at a time; values are the same"
_TRACE_EVENT = np.dtype(TraceEventStruct)
_SAME_CLOCK_NS = 10_000_000  # two readings of one clock are closer together

# The core's functions, and the types of their parameters; comments in `src/` explain them.
_TYPES = {"p": c_void_p, "i": c_int32, "q": c_int64, "Q": c_uint64}
_FUNCTIONS = {
    "transform": "ppp",
    "unpack": "ppp",
    "permute": "pqQQQp",
    "draw": "pppqqq",
    "window_block": "ppqq",
    "cut": "ppqqq",
    "cut_sorted": "ppppqqq",
    "read_ranges": "ppppppqqq",
    "cut_frames": "p",
    "open_sources": "ppqqqiiq",
    "open_ahead": "pq",
    "descriptor": "pq",
    "restamp": "pqqqqi",
    "close_sources": "p",
    "new_store": "qq",
    "clear_store": "p",
    "most_kept": "p",
    "free_store": "p",
    "plan_batch": "pppqpqqqq",
    "read_batch": "pppppqq",
    "read_again": "pppppq",
    "free_plan": "p",
    "next": "pp",
    "do_oldest": "pp",
    "spin": "pq",
    "wait": "pqq",
    "decode": "ppppqqqq",
    "decode_references": "ppq",
    "make_dense": "p",
    "copy_runs": "pppppq",
    "image_headers": "pppqq",
    "look_up": "ppppq",
    "copy_events": "ppqq",
    "free": "p",
}
# Those that take less time than releasing the GIL keep it; "visit" gives it away itself.
_BRIEF_FUNCTIONS = {
    "visit": "p",
    "open_queue": "ppppqqqqi",
    "select": "ppqq",
    "draw_from": "ppq",
    "open_job": "ppppqq",
    "submit": "pppqqqqi",
    "drop": "pqq",
    "samples_at": "pq",
    "ready_at": "pqq",
    "is_planned": "pq",
    "put_ticket": "p",
    "forget_jobs": "p",
    "end_queue": "p",
    "plan_ns": "p",
    "events": "p",
    "wake": "p",
    "clock": "",
    "trace": "pp",
}


class Core:
    """The compiled core, loaded. `OSError` is raised if it cannot be, or is of another version.

    Its functions are attributes. Most release the GIL, and may be called from many threads, each
    with its own worker.

    Attributes
    ----------
    path
        The shared library.
    missing
        Codec libraries that were not found; data that need them are read through h5py.
    nbytes
        By name: the memory for structures that only the core looks into.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        library, brief = ctypes.CDLL(str(path)), ctypes.PyDLL(str(path))
        try:
            found = _members_of(library)
            self.nbytes = {name: found.pop(name, (0, 0))[1] for name in ("Sources", "Queue", "Job")}
            if found != members(structures.STRUCTURES):
                raise OSError(f"{path} was built for another version; install h5async again")
            for build, functions in (library, _FUNCTIONS), (brief, _BRIEF_FUNCTIONS):
                for name, parameters in functions.items():
                    setattr(self, name, _function(build, name, parameters))
        except AttributeError as error:
            raise OSError(f"{path} is not h5async's core") from error
        self.new_store.restype = c_void_p
        addresses, self.missing = find_functions()
        self._libraries = LibrariesStruct(**addresses)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def filters(self, filters: tuple[Filter, ...]) -> Any | None:
        """Return a pipeline as the core takes it, or None if the core cannot undo it."""
        if len(filters) > MAX_FILTERS:
            return None
        taken = [found for entry in filters if (found := entry.core) is not None]
        if len(taken) < len(filters) or any(entry.library in self.missing for entry in taken):
            return None
        structs = [_filter_struct(entry) for entry in taken]
        return (FilterStruct * max(1, len(structs)))(*structs)

    def new_worker(
        self,
        encoded: NDArray[Any],
        chunk: NDArray[Any],
        between: tuple[NDArray[Any], ...],
        stop: c_int32 | None = None,
    ) -> CoreWorker:
        """Return what a thread needs to call the core, with its scratch buffers.

        Once `stop` is not 0, calls end as soon as they can, with `Event.STOPPED`.
        """
        struct = WorkerStruct(
            libraries=ctypes.pointer(self._libraries),
            encoded=address(encoded),
            chunk=address(chunk),
            between=tuple(map(address, between)),
            encoded_nbytes=encoded.nbytes,
            chunk_nbytes=chunk.nbytes,
            between_nbytes=min(array.nbytes for array in between),
            stop=None if stop is None else ctypes.pointer(stop),
        )
        return CoreWorker(struct, self.free, self.trace)


class CoreWorker:
    """What one thread needs to call the core: decoders' contexts, scratch, counters.

    The counters of `struct` only grow. `gil_wait_ns` sums up the nanoseconds between the ends of
    calls and the moments at which the GIL was held again.
    """

    def __init__(self, struct: WorkerStruct, free: Any, trace: Any) -> None:
        self.struct = struct
        self.gil_wait_ns = 0
        self._trace = trace
        self._traces: tuple[CoreTrace, ...] = ()  # whose memory a call may use
        call_when_gone(self, free, ctypes.byref(struct))

    def counts(self) -> ThreadCounts:
        """Return what was done so far."""
        struct = self.struct
        return ThreadCounts(
            struct.read_ns,
            struct.decode_ns,
            struct.place_ns,
            self.gil_wait_ns,
            struct.read_nbytes,
            struct.decoded_chunks,
            struct.decoded_nbytes,
        )

    def record(self, trace: CoreTrace | None) -> None:
        """Have calls note what they do from now on; None: stop. Allowed during a call, too."""
        struct = None if trace is None else ctypes.byref(trace.struct)
        # A call under way may use the former one until it ends, so the former one has to last.
        former = self._traces if self._trace(ctypes.byref(self.struct), struct) else ()
        self._traces = former if trace is None else (*former, trace)

    def note_return(self) -> None:
        """Note, right after a call, how long it took to get the GIL back."""
        self.gil_wait_ns += time.monotonic_ns() - int(self.struct.returned_ns)


class CoreTrace:
    """Memory for the first `capacity` events of the core's calls; later ones are only counted.

    Memory is allocated as events come.
    """

    def __init__(self, core: Core, capacity: int) -> None:
        self._core = core
        self._events = np.zeros(capacity, _TRACE_EVENT)
        self.struct = TraceStruct(address(self._events), capacity, 0)
        # Python's clock minus the core's: 0 on Linux.
        self._offset_ns = time.perf_counter_ns() - int(core.clock())
        if abs(self._offset_ns) < _SAME_CLOCK_NS:
            self._offset_ns = 0

    @property
    def count(self) -> int:
        """The number of events so far, including those for which there was no room."""
        return int(self.struct.count)

    def events(self, begin: int = 0) -> NDArray[Any]:
        """Return the events from number `begin` on, in the order in which they ended.

        Times are those of `time.perf_counter_ns`. An event that is just being noted has the end 0.
        """
        count = max(0, min(self.count, len(self._events)) - begin)
        found = np.empty(count, _TRACE_EVENT)
        self._core.copy_events(ctypes.byref(self.struct), address(found), begin, count)
        if self._offset_ns:
            found["begin_ns"] += self._offset_ns
            found["end_ns"] += np.where(found["end_ns"] != 0, self._offset_ns, 0)
        return found


def address(array: NDArray[Any]) -> int:
    """Return the address of an array's first byte; the caller keeps the array."""
    return array.ctypes.data


def mapping_mode(io: IoMode) -> IoMode:
    """Return how files are read: without the core, which guards maps, "auto" maps none."""
    return "pread" if io == "auto" and load_core() is None else io


@functools.cache
def load_core() -> Core | None:
    """Return the compiled core, or None if it is switched off or was not built.

    `ConfigError` is raised if the environment variable names a file that is no core.
    """
    chosen = os.environ.get("H5ASYNC_CORE", "")
    if chosen == "0":
        return None
    if chosen:
        try:
            return Core(Path(chosen))
        except OSError as error:
            raise ConfigError(
                f"the environment variable H5ASYNC_CORE={chosen} names no core that can be loaded"
                f" ({error}); unset it to use the core that was installed, or set it to 0 to use"
                " none"
            ) from error
    for path in _installed():
        with suppressing(OSError):
            return Core(path)
    return None


def can_decode(entry: Filter) -> bool:
    """Tell whether a filter is decoded by the core; all others are by HDF5."""
    core = load_core()
    return core is not None and core.filters((entry,)) is not None


def why_no_core() -> str | None:
    """Say why there is no core, what that costs, and what to do; None if there is one."""
    if load_core() is not None:
        return None
    if os.environ.get("H5ASYNC_CORE") == "0":
        return f"the compiled core is switched off by H5ASYNC_CORE=0: {_COST}"
    install = "install h5async where a C compiler is, or from a wheel for this platform"
    for path in _installed():
        try:
            Core(path)
        except OSError as error:
            return f"the compiled core cannot be loaded ({error}): {_COST}; {install}"
    return f"the compiled core is missing: {_COST}; {install}"


def _installed() -> list[Path]:
    return sorted(Path(__file__).parent.glob("_core*.so"))


def _members_of(library: Any) -> dict[str, tuple[int, int]]:
    """Return offset and size of each member of each structure, as a core was built."""
    count = _function(library, "num_members", "")()
    members = library.h5async_members
    members.restype = POINTER(MemberStruct)
    members.argtypes = []
    found = members()
    return {found[i].name.decode(): (found[i].offset, found[i].nbytes) for i in range(count)}


def _filter_struct(entry: CoreFilter) -> FilterStruct:
    values = (ctypes.c_uint32 * max(1, len(entry.values)))(*entry.values)
    return FilterStruct(*entry[:3], values, len(entry.values), entry.function)


def _function(library: Any, name: str, parameters: str) -> Any:
    function = getattr(library, f"h5async_{name}")
    function.restype = c_int64
    function.argtypes = [_TYPES[kind] for kind in parameters]
    return function
