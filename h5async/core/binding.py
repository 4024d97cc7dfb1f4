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
from ctypes import Structure, c_int32, c_int64, c_uint64, c_void_p
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from h5async.codec.filters import Filter
from h5async.core import structures
from h5async.core.libraries import find_functions
from h5async.core.structures import MAX_FILTERS, structures_of
from h5async.errors import ConfigError
from h5async.io.localfiles import IoMode
from h5async.system.interruptions import call_when_gone, interruption
from h5async.system.timeline import ThreadCounts

_COST = "everything is read through h5py, by one thread at a time; values are the same"
_SAME_CLOCK_NS = 10_000_000  # two readings of one clock are closer together
# Counters of the core's workers.
_COUNTED = "read_ns", "decode_ns", "place_ns", "read_nbytes", "decoded_chunks", "decoded_nbytes"

# The core's functions by the types of their parameters; comments in `src/` explain them.
_TYPES = {"p": c_void_p, "i": c_int32, "q": c_int64, "Q": c_uint64}
_FUNCTIONS = {
    "ppp": "transform unpack",
    "pqQQQp": "permute",
    "pppqqq": "draw",
    "ppqq": "window_block copy_events",
    "ppqqq": "cut",
    "ppppqqq": "cut_sorted scale_rows",
    "ppppppqqq": "read_ranges",
    "p": "cut_frames open_sources close_sources clear_store free_store free_plan make_dense free"
    " close_again new_http free_http",
    "pp": "get_http",
    "pq": "open_ahead spin",
    "pqqqqi": "restamp",
    "qq": "new_store",
    "pppqpqqqqp": "plan_batch",
    "pppppqq": "read_batch",
    "pppppqqpq": "list_ranges",
    "pppppq": "read_again copy_runs",
    "pqq": "wait",
    "pqp": "open_again",
    "ppppqqqq": "decode",
    "ppq": "decode_references next",
    "pppqq": "image_headers sum_rows",
    "ppppq": "look_up",
    "ppppi": "measure",
}
# Those that take less time than releasing the GIL keep it; "visit" gives it away itself.
_BRIEF_FUNCTIONS = {
    "p": "visit open_queue put_ticket forget_jobs end_queue events wake",
    "ppppqqqqi": "submit",
    "pqq": "drop samples_at",
    "": "clock",
    "pp": "trace",
}


class Core:
    """The compiled core, loaded. `OSError` is raised if it cannot be, or is of another version.

    Its functions and structures are attributes. Most functions release the GIL, and may be called
    from many threads, each with its own worker. `missing` are the codec libraries that were not
    found; data that need them are read through h5py.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        library, brief = ctypes.CDLL(str(path)), ctypes.PyDLL(str(path))
        try:
            if _function(library, "abi", "")() != structures.ABI:
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
        addresses, self.missing = find_functions()
        self._libraries = self.Libraries(**addresses)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def filters(self, filters: tuple[Filter, ...]) -> Any | None:
        """Return a pipeline as the core takes it, or None if the core cannot undo it."""
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
        found.values = values  # to which the structures point
        return found

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
    """What one thread needs to call the core: decoders' contexts, scratch, counters.

    The counters of `struct` only grow. `gil_wait_ns` sums up the nanoseconds between the ends of
    calls and the moments at which the GIL was held again.
    """

    def __init__(self, struct: Structure, free: Any, trace: Any, stop: c_int32 | None) -> None:
        self.struct: Any = struct
        self._stop = stop  # to which the structure points
        self.gil_wait_ns = 0
        self._trace = trace
        self._traces: tuple[CoreTrace, ...] = ()  # whose memory a call may use
        call_when_gone(self, free, ctypes.byref(struct))

    def counts(self) -> ThreadCounts:
        """Return what was done so far."""
        counted = {name: getattr(self.struct, name) for name in _COUNTED}
        return ThreadCounts(gil_wait_ns=self.gil_wait_ns, **counted)

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
        self._events: NDArray[Any] = np.zeros(capacity, core.TraceEvent)
        self.struct = core.Trace(address(self._events), capacity, 0)
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
        found = np.empty(count, self._events.dtype)
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


def load_core() -> Core | None:
    """Return the compiled core, or None if it is switched off or was not built.

    `ConfigError` is raised if the environment variable names a file that is no core.
    """
    found = _core_or_reason()
    return found if isinstance(found, Core) else None


def why_no_core() -> str | None:
    """Say why there is no core, what that costs, and what to do; None if there is one."""
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
                f"the environment variable H5ASYNC_CORE={chosen} names no core that can be loaded"
                f" ({error}); unset it to use the core that was installed, or set it to 0 to use"
                " none"
            ) from error
    why = "is missing"
    for path in _installed():
        try:
            return Core(path)
        except OSError as error:
            if interruption(error) is not None:
                raise
            why = f"cannot be loaded ({error})"
    install = "install h5async where a C compiler is, or from a wheel for this platform"
    return f"the compiled core {why}: {_COST}; {install}"


def can_decode(entry: Filter) -> bool:
    """Tell whether a filter is decoded by the core; all others are by HDF5."""
    core = load_core()
    return core is not None and core.filters((entry,)) is not None


def _installed() -> list[Path]:
    return sorted(Path(__file__).parent.glob("_core*.so"))


def _function(library: Any, name: str, parameters: str) -> Any:
    function = getattr(library, f"h5async_{name}")
    function.restype = c_int64
    function.argtypes = [_TYPES[kind] for kind in parameters]
    return function
