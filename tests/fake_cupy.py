"""A stand-in for the part of CuPy that h5async uses, on the CPU, with CUDA's order of execution.

Work that is put on a stream is not done at once. It is queued, and done when somebody waits, in
an order that is random but for what CUDA promises: a stream does its work in turn, and nothing
that comes after `Stream.wait_event` before the event. An upload reads its host memory when it is
done, not when it is asked for. So a missing event shows as a wrong value in some order.

What CuPy itself does with our calls shows only on the simulated GPUs of ``scripts/test_gpu``,
where the same tests run too (`gpus.use_gpu`). This is kept for ``scripts/test``, wherever CuPy is
not installed, which is a gigabyte with CUDA's libraries: for users, any Python, and macOS.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import random
import threading
import types
import weakref
from collections import deque

import cuda_on_cpu
import numpy as np

C_TYPES = {
    **{"b": "signed char", "h": "short", "i": "int", "l": "long long", "q": "long long"},
    **{"B": "unsigned char", "H": "unsigned short", "I": "unsigned int"},
    **{"L": "unsigned long long", "Q": "unsigned long long", "f": "float", "d": "double"},
}


@functools.cache
def compile_elementwise(in_params, out_params, operation, name, preamble, types):
    """Compile the body of an ElementwiseKernel, all arrays of which are raw, for some types."""
    params, casts = [], ""
    for words in map(str.split, f"{in_params}, {out_params}".split(", ")):
        if words[:2] == ["raw", "int64"]:
            params.append(f"const long long *{words[2]}")
        elif words[0] == "raw":
            params.append(f"unsigned char *{words[2]}_bytes")
            casts += f"{words[1]} *{words[2]} = ({words[1]} *){words[2]}_bytes; "
        else:
            params.append(f"{ {'int32': 'int', 'int64': 'long long'}[words[0]] } {words[1]}")
    typedefs = "".join(f"typedef {C_TYPES[code]} {letter};" for letter, code in types)
    source = f"""{typedefs}{preamble}
    extern "C" __global__ void {name}({", ".join(params)}, long long n)
    {{
        {casts}long long begin = (long long)blockIdx.x * blockDim.x + threadIdx.x;
        for (long long i = begin; i < n; i += (long long)gridDim.x * blockDim.x) {{ {operation} }}
    }}"""
    return cuda_on_cpu.load_kernels(source).get_function(name)


class Simulation:
    """All streams of one GPU. Safe to use from many threads."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.lock = threading.RLock()
        self.queues = {}
        self.local = threading.local()

    def put(self, stream, work, ready=lambda: True):
        with self.lock:
            self.queues.setdefault(stream, deque()).append((work, ready))

    def run_until(self, done):
        """Do queued work, in a random order that CUDA allows, until `done()`."""
        with self.lock:
            while not done():
                heads = [queue for queue in self.queues.values() if queue and queue[0][1]()]
                assert heads, "the streams wait for each other"
                work, _ = self.random.choice(heads).popleft()
                work()

    def run_all(self):
        self.run_until(lambda: not any(self.queues.values()))

    def current(self):
        return getattr(self.local, "streams", [None])[-1]


def driver_of(cupy):
    """Return the functions of CUDA's driver that are called without CuPy."""
    runtime = cupy.cuda.runtime

    def get_current(context):
        context._obj.value = cupy.cuda.driver.ctxGetCurrent()
        return 0

    return types.SimpleNamespace(
        cuCtxGetCurrent=get_current,
        cuEventRecord=lambda event, stream: runtime.eventRecord(event, stream),
        cuEventQuery=lambda event: runtime.eventQuery(event),
        cuStreamWaitEvent=lambda stream, event, flags: runtime.streamWaitEvent(stream, event),
    )


class _Module(types.SimpleNamespace):
    """Equal to nothing else, and hashable, as modules are."""

    __hash__ = object.__hash__
    __eq__ = object.__eq__


def make(seed):
    """Return a module-like object to be put in place of `cupy`, and its simulation."""
    simulation = Simulation(seed)

    pointers = itertools.count(0, 64)  # CUDA's default stream is number 0

    class Stream:
        def __init__(self, non_blocking=False):
            self.non_blocking = non_blocking
            self.ptr = next(pointers)
            streams[self.ptr] = self

        @staticmethod
        def from_external(owner):
            return streams[owner.__cuda_stream__()[1]]

        def __enter__(self):
            streams = getattr(simulation.local, "streams", [default])
            simulation.local.streams = [*streams, self]
            return self

        def __exit__(self, *_):
            simulation.local.streams = simulation.local.streams[:-1]

        def wait_event(self, event):
            ticket = event.recorded
            simulation.put(self, lambda: None, lambda: event.done >= ticket)

        def record(self, event=None):
            event = event or Event()
            event.record(self)
            return event

        def synchronize(self):
            simulation.run_until(lambda: not simulation.queues.get(self))

    streams, events = {}, weakref.WeakValueDictionary()
    default = Stream()

    def current():
        return simulation.current() or default

    class Event:
        def __init__(self, block=False, disable_timing=False):
            self.recorded = self.done = 0
            self.ptr = next(pointers)
            events[self.ptr] = self

        def record(self, stream=None):
            stream = stream or current()
            with simulation.lock:
                self.recorded += 1
                ticket = self.recorded

            def finish():
                self.done = max(self.done, ticket)

            simulation.put(stream, finish)

        def synchronize(self):
            ticket = self.recorded
            simulation.run_until(lambda: self.done >= ticket)

        def query(self):
            return 0 if self.done >= self.recorded else 600

    class ndarray(np.ndarray):
        @property
        def data(self):
            return types.SimpleNamespace(ptr=self.ctypes.data)

        def set(self, array, stream):
            assert (array.shape, array.dtype) == (self.shape, self.dtype)
            simulation.put(stream, lambda: np.copyto(self.view(np.ndarray), array))

        def fill(self, value):
            simulation.put(current(), lambda: self.view(np.ndarray).fill(value))

        def get(self):
            simulation.run_all()
            return np.array(self.view(np.ndarray))

        def copy(self):
            copied = empty(self.shape, self.dtype)
            copyto(copied, self)
            return copied

    memory = []  # never freed: CUDA waits for work that uses it, and an address here is bare

    def empty(shape, dtype):
        memory.append(np.empty(shape, dtype))
        return memory[-1].view(ndarray)

    def copyto(out, source, casting="same_kind"):
        simulation.put(current(), lambda: np.copyto(out, source, casting=casting))

    class ElementwiseKernel:
        def __init__(self, in_params, out_params, operation, name, options, preamble=""):
            assert options == ("--fmad=false",)
            self.text = in_params, out_params, operation, name, preamble

        def __call__(self, *args, size=None):
            if size is not None:
                self.run_raw(args, size)
                return
            stored, *factors, out = args

            def run():
                with np.errstate(all="ignore"):  # as a GPU has it
                    np.copyto(out, stored, casting="unsafe")
                    for factor, do in zip(factors, (np.multiply, np.add), strict=False):
                        do(out, factor, out=out)

            simulation.put(current(), run)

        def run_raw(self, args, size):
            names = f"{self.text[0]}, {self.text[1]}".split(", ")
            types, passed = {}, []
            for words, arg in zip(map(str.split, names), args, strict=True):
                if words[0] == "raw" and words[1] == "int64":
                    assert arg.dtype == np.int64
                elif words[0] == "raw":
                    assert arg.flags.c_contiguous
                    assert types.setdefault(words[1], arg.dtype.char) == arg.dtype.char
                    arg = arg.reshape(-1).view(np.uint8)
                else:
                    arg = np.dtype(words[0]).type(arg)
                passed.append(arg)
            kernel = compile_elementwise(*self.text, tuple(types.items()))
            simulation.put(current(), lambda: kernel((3,), (32,), (*passed, np.int64(size))))

    class RawModule:
        def __init__(self, code, options):
            self.code = code

        def get_function(self, name):
            kernel = cuda_on_cpu.load_kernels(self.code).get_function(name)
            return lambda grid, block, args: simulation.put(
                current(), lambda: kernel(grid, block, args)
            )

    class Device:
        def __init__(self, number=None):
            self.id = number or 0

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

    def memcpy_async(target, source, nbytes, kind, stream):
        assert kind in (1, 2)
        simulation.put(streams[stream], lambda: ctypes.memmove(target, source, nbytes))

    def memset_async(address, value, nbytes, stream):
        simulation.put(streams[stream], lambda: ctypes.memset(address, value, nbytes))

    pinned: dict[int, ctypes.Array] = {}

    def host_alloc(nbytes, flags):
        memory = ctypes.create_string_buffer(nbytes + 64)
        address = -(-ctypes.addressof(memory) // 64) * 64
        pinned[address] = memory
        return address

    made: dict[int, Event] = {}

    def new_event(flags):
        event = Event()
        made[event.ptr] = event
        return event.ptr

    registered: dict[int, int] = {}
    runtime = types.SimpleNamespace(
        registered=registered,
        pinned=pinned,
        hostAlloc=host_alloc,
        freeHost=lambda address: pinned.pop(address),
        getDeviceCount=lambda: 1,
        getDevice=lambda: 0,
        setDevice=lambda number: None,
        eventBlockingSync=1,
        eventDisableTiming=2,
        eventCreateWithFlags=new_event,
        eventDestroy=lambda address: made.pop(address),
        eventSynchronize=lambda address: events[address].synchronize(),
        eventQuery=lambda address: events[address].query(),
        eventElapsedTime=lambda begin, end: 1.0,
        memsetAsync=memset_async,
        CUDARuntimeError=type("CUDARuntimeError", (RuntimeError,), {}),
        deviceSynchronize=simulation.run_all,
        eventRecord=lambda event, stream: events[event].record(streams[stream]),
        streamNonBlocking=1,
        streamCreateWithFlags=lambda flags: Stream(non_blocking=bool(flags)).ptr,
        streamDestroy=lambda stream: None,
        streamWaitEvent=lambda stream, event: streams[stream].wait_event(events[event]),
        memcpyAsync=memcpy_async,
        memcpyHostToDevice=1,
        memcpyDeviceToHost=2,
        memGetInfo=lambda: (1 << 30, 1 << 32),
        hostRegister=lambda address, nbytes, flags: registered.update({address: nbytes}),
        hostUnregister=lambda address: registered.pop(address),
    )
    cuda = types.SimpleNamespace(
        Device=Device,
        driver=types.SimpleNamespace(
            CUDADriverError=type("CUDADriverError", (RuntimeError,), {}),
            ctxGetCurrent=lambda: 1,
            ctxSetCurrent=lambda context: None,
        ),
        Event=Event,
        Stream=Stream,
        using_allocator=lambda allocator: contextlib.nullcontext(),
        get_current_stream=current,
        memory=types.SimpleNamespace(OutOfMemoryError=type("OutOfMemory", (MemoryError,), {})),
        runtime=runtime,
        streams=streams,
    )
    module = _Module(
        ElementwiseKernel=ElementwiseKernel,
        RawModule=RawModule,
        __version__="0 (a stand-in)",
        asarray=lambda array: np.array(array).view(ndarray),
        copyto=copyto,
        cuda=cuda,
        empty=empty,
        ndarray=ndarray,
    )
    return module, simulation
