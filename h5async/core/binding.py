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
from typing import Any

import numpy as np
from numpy.typing import NDArray

from h5async.codec import storedelements
from h5async.codec.entry import CoreFilter
from h5async.codec.filters import Filter
from h5async.core import heap, structures, tablestructures
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
from h5async.system.counts import ThreadCounts
from h5async.system.endings import call_when_gone
from h5async.system.interruptions import suppressing

_COST = "everything is read through h5py, by one thread at a time; values are the same"


_TRACE_EVENT = np.dtype(TraceEventStruct)
_SAME_CLOCK_NS = 10_000_000  # two readings of one clock are closer together


class Core:
    """The compiled core, loaded. `OSError` is raised if it cannot be, or is of another version.

    Attributes
    ----------
    path
        The shared library.
    missing
        Codec libraries that were not found; data that need them are read through h5py.
    transform, permute, draw, window_block, cut, cut_sorted
        Its functions. They release the GIL, and may be called from many threads, each with its own
        worker.
    plan_batch, read_batch, read_ranges, submit, next and others
        Called by modules of `read/`; see the comments in `src/`.
    cut_frames
        ``cut_frames(frames)``, of a `FramesStruct`, cuts encoded chunks into blocks that can each
        be decoded alone, and returns the number of chunks cut. It stops before the first chunk that
        is unusual, or for which there is no room. It decodes nothing, so that only the decoder
        finds damage within a block.
    visit
        ``visit(visit)``, of a `VisitStruct`, fills the columns with the chunks of a dataset, and
        returns 0. It returns -1 if HDF5 reports an error, there is no room, or a signal handler
        raised an exception, which is raised here. It releases the GIL meanwhile, and takes it now
        and then to let signal handlers run.
    look_up
        ``look_up(visit, number, expected, function, count)`` looks chunks up by their numbers in
        HDF5. It returns how many have the sizes expected, before the first that does not.
    decode
        ``decode(filters, worker, encoded, out, num_filters, nbytes, mask, out_nbytes)`` decodes a
        chunk to exactly ``out_nbytes`` bytes, and returns whether it could.
    decode_references
        ``decode_references(heap, references, most_nbytes)``, of a `HeapStruct`, fills its lengths
        and places, and returns the number of values; -1 - i if element i is longer than that.
    read_heap
        ``read_heap(heap, file, worker, element, position, out, count, out_nbytes)`` reads the
        values of ``element[i]`` to ``out + position[i]`` (int64 arrays), and returns `count`, or
        the first i that cannot be done. Without an `out` it only finds their places.
    make_dense
        ``make_dense(sparse)``, of a `SparseStruct`, returns the number of rows made dense before
        the first with an index outside the columns; -1 if it does not support the dtypes.
    copy_runs
        ``copy_runs(to, from, to_begin, from_begin, nbytes, count)`` copies ``nbytes[i]`` bytes from
        ``from + from_begin[i]`` to ``to + to_begin[i]`` (int64 arrays); the caller checks bounds.
    image_headers
        ``image_headers(values, offsets, found, nbytes, count)`` does the same as
        `codec.imageformats.header_rows`; `found` has its rows.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        library, brief = ctypes.CDLL(str(path)), ctypes.PyDLL(str(path))
        try:
            declared = structures.STRUCTURES | tablestructures.STRUCTURES | heap.STRUCTURES
            if _members_of(library) != members(declared):
                raise OSError(f"{path} was built for another version; install h5async again")
            self._find_functions(library)
            self._find_brief_functions(brief)
        except AttributeError as error:
            raise OSError(f"{path} is not h5async's core") from error
        functions, self.missing = find_functions()
        self._libraries = LibrariesStruct(**functions)

    def _find_functions(self, library: Any) -> None:
        self.transform = _function(library, "h5async_transform", 1, c_void_p, c_void_p)
        self.unpack = _function(library, "h5async_unpack", 1, c_void_p, c_void_p)
        self.permute = _function(library, "h5async_permute", 1, c_int64, *[c_uint64] * 3, c_void_p)
        convert = _function(library, "h5async_convert_stored", 0, c_void_p, c_int64, c_void_p)
        convert.argtypes = [*convert.argtypes, c_int64, c_void_p, c_int64]
        storedelements.native[:] = [convert]
        self.draw = _function(library, "h5async_draw", 3, *[c_int64] * 3)
        self.window_block = _function(library, "h5async_window_block", 2, c_int64, c_int64)
        self.cut = _function(library, "h5async_cut", 2, *[c_int64] * 3)
        self.cut_sorted = _function(library, "h5async_cut_sorted", 4, *[c_int64] * 3)
        self.read_ranges = _function(library, "h5async_read_ranges", 6, *[c_int64] * 3)
        self.cut_frames = _function(library, "h5async_cut_frames", 1)
        self.sources_nbytes = _function(library, "h5async_sources_nbytes", 0)
        self.open_sources = _function(
            library, "h5async_open_sources", 2, *[c_int64] * 3, c_int32, c_int32, c_int64
        )
        self.open_ahead = _function(library, "h5async_open_ahead", 1, c_int64)
        self.descriptor = _function(library, "h5async_descriptor", 1, c_int64)
        self.restamp = _function(library, "h5async_restamp", 1, *[c_int64] * 4, c_int32)
        self.close_sources = _function(library, "h5async_close_sources", 1)
        self.new_store = _function(library, "h5async_new_store", 0, c_int64, c_int64)
        self.new_store.restype = c_void_p
        self.clear_store = _function(library, "h5async_clear_store", 1)
        self.most_kept = _function(library, "h5async_most_kept", 1)
        self.free_store = _function(library, "h5async_free_store", 1)
        self.plan_batch = _function(
            library, "h5async_plan_batch", 3, c_int64, c_void_p, *[c_int64] * 4
        )
        self.read_batch = _function(library, "h5async_read_batch", 5, c_int64, c_int64)
        self.read_again = _function(library, "h5async_read_again", 5, c_int64)
        self.free_plan = _function(library, "h5async_free_plan", 1)
        self.next = _function(library, "h5async_next", 2)
        self.do_oldest = _function(library, "h5async_do_oldest", 2)
        self.spin = _function(library, "h5async_spin", 1, c_int64)
        self.wait = _function(library, "h5async_wait", 1, c_int64, c_int64)
        self.decode = _function(library, "h5async_decode", 4, *[c_int64] * 4)
        self.decode_references = _function(library, "h5async_decode_references", 2, c_int64)
        self.read_heap = _function(library, "h5async_read_heap", 6, c_int64, c_int64)
        self.make_dense = _function(library, "h5async_make_dense", 1)
        self.copy_runs = _function(library, "h5async_copy_runs", 5, c_int64)
        self.image_headers = _function(library, "h5async_image_headers", 3, c_int64, c_int64)
        self.look_up = _function(library, "h5async_look_up", 4, c_int64)
        self.copy_events = _function(library, "h5async_copy_events", 2, c_int64, c_int64)
        self._free = _function(library, "h5async_free", 1)

    def _find_brief_functions(self, library: Any) -> None:
        """Find functions that take less time than releasing the GIL: they keep it."""
        self.visit = _function(library, "h5async_visit", 1)  # gives it away itself
        self.queue_nbytes = _function(library, "h5async_queue_nbytes", 0)
        self.job_nbytes = _function(library, "h5async_job_nbytes", 0)
        self.open_queue = _function(library, "h5async_open_queue", 4, *[c_int64] * 4, c_int32)
        self.select = _function(library, "h5async_select", 2, c_int64, c_int64)
        self.draw_from = _function(library, "h5async_draw_from", 2, c_int64)
        self.open_job = _function(library, "h5async_open_job", 4, c_int64, c_int64)
        self.submit = _function(
            library, "h5async_submit", 1, c_void_p, c_void_p, *[c_int64] * 4, c_int32
        )
        self.drop = _function(library, "h5async_drop", 1, c_int64, c_int64)
        self.samples_at = _function(library, "h5async_samples_at", 1, c_int64)
        self.ready_at = _function(library, "h5async_ready_at", 1, c_int64, c_int64)
        self.is_planned = _function(library, "h5async_is_planned", 1, c_int64)
        self.put_ticket = _function(library, "h5async_put_ticket", 1)
        self.forget_jobs = _function(library, "h5async_forget_jobs", 1)
        self.end_queue = _function(library, "h5async_end_queue", 1)
        self.plan_ns = _function(library, "h5async_plan_ns", 1)
        self.events = _function(library, "h5async_events", 1)
        self.wake = _function(library, "h5async_wake", 1)
        self.clock_ns = _function(library, "h5async_clock", 0)
        self._trace = _function(library, "h5async_trace", 2)

    def filters(self, filters: tuple[Filter, ...]) -> Any | None:
        """Return a pipeline as the core takes it, or None if the core cannot undo it."""
        if len(filters) > MAX_FILTERS:
            return None
        taken = [found for entry in filters if (found := core_filter(entry)) is not None]
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
        return CoreWorker(struct, self._free, self._trace)


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
        self._offset_ns = time.perf_counter_ns() - int(core.clock_ns())
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
    count = _function(library, "h5async_num_members", 0)()
    members = library.h5async_members
    members.restype = POINTER(MemberStruct)
    members.argtypes = []
    found = members()
    return {found[i].name.decode(): (found[i].offset, found[i].nbytes) for i in range(count)}


def core_filter(entry: Filter) -> CoreFilter | None:
    """Return a filter as the core takes it; None if the core cannot undo it."""
    codec = entry.codec
    return None if codec is None else codec.core


def _filter_struct(entry: CoreFilter) -> FilterStruct:
    values = (ctypes.c_uint32 * max(1, len(entry.values)))(*entry.values)
    return FilterStruct(*entry[:3], values, len(entry.values), entry.function)


def _function(library: Any, name: str, pointers: int, *others: Any) -> Any:
    function = getattr(library, name)
    function.restype = c_int64
    function.argtypes = [c_void_p] * pointers + list(others)
    return function
