"""What `bench_gpu` measures with: files of known compression, and a GPU that computes and copies.

Files hold some rows again and again, each in a chunk of its own. They are encoded by imagecodecs
and written chunk by chunk, so that HDF5 needs no plugin.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import itertools
import os
import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import imagecodecs
import numpy as np
from bench_common import ROW_NBYTES

from h5async import AsyncReader, Field

DISTINCT = 256  # rows of a file; the others repeat them
STRETCH = 384  # values that are noise, or one constant
SCALE, OFFSET = 1 / 255, -0.5
FIELDS = {
    "as stored": Field("data"),
    "float32 NCHW": Field("data", axes=(0, 3, 1, 2), scale=SCALE, offset=OFFSET),
}
NOISE = {  # dtype -> the bits that noise has, those that are always set
    "uint8": (0x3F, 0),
    "uint16": (0x0FFF, 0),
    "float32": (0x00FFFFFF, 0x3F000000),
}
THREADS = 256  # of a block
KERNEL = r"""
extern "C" __global__ void bench_step(const unsigned char* data, unsigned long long stride,
                                      unsigned long long ns, unsigned long long* sums) {
    unsigned long long begin, now, i = blockIdx.x * blockDim.x + threadIdx.x;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
    sums[i] += data[i * stride];
    do {
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    } while (now - begin < ns);
}
"""

Way = Callable[[], float]  # returns seconds a call, a step, a batch


class Codec(NamedTuple):
    """A filter pipeline: numbers and parameters for an element size, and its encoder."""

    filters: Callable[[int], list[tuple[int, tuple[int, ...]]]]
    encode: Callable[[np.ndarray], bytes]


def shuffled(row: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(row.view(np.uint8).reshape(-1, row.itemsize).T)


def bitshuffle_lz4(row: np.ndarray) -> bytes:
    block = 8192 // row.itemsize
    parts = [struct.pack(">QI", row.nbytes, block * row.itemsize)]
    values = row.reshape(-1)
    for start in range(0, values.size, block):
        bits = imagecodecs.bitshuffle_encode(
            values[start : start + block].tobytes(), itemsize=row.itemsize
        )
        encoded = imagecodecs.lz4_encode(bits)
        parts += [struct.pack(">I", len(encoded)), encoded]
    return b"".join(parts)


def bitshuffle_values(itemsize: int) -> tuple[int, ...]:
    """Return a block size and lz4; what precedes them HDF5's plugin puts there, if it is here."""
    return (0, 2) if h5py.h5z.filter_avail(32008) else (0, 4, itemsize, 0, 2)


CODECS = {
    "gzip": Codec(lambda _: [(1, (4,))], partial(imagecodecs.zlib_encode, level=4)),
    "shuffle+gzip": Codec(
        lambda itemsize: [(2, (itemsize,)), (1, (4,))],
        lambda row: imagecodecs.zlib_encode(shuffled(row), level=4),
    ),
    "zstd": Codec(lambda _: [(32015, (3,))], partial(imagecodecs.zstd_encode, level=3)),
    "lz4": Codec(lambda _: [(32004, (0,))], imagecodecs.lz4h5_encode),
    "bitshuffle-lz4": Codec(lambda size: [(32008, bitshuffle_values(size))], bitshuffle_lz4),
}


class Stored(NamedTuple):
    """A file, its first rows (the others repeat them), decoded by stored bytes."""

    path: Path
    rows: np.ndarray
    ratio: float

    def expect(self, index: np.ndarray, delivered: str) -> np.ndarray:
        """Return what a batch has to hold."""
        rows = self.rows[index % len(self.rows)]
        if delivered == "as stored":
            return rows
        images = rows.transpose(0, 3, 1, 2).astype(np.float32)
        return images * np.float32(SCALE) + np.float32(OFFSET)


def make_rows(dtype: str, share: float, count: int) -> np.ndarray:
    """Return rows of which a share of the stretches is noise."""
    bits, base = NOISE[dtype]
    unit = np.dtype(f"u{np.dtype(dtype).itemsize}")
    rng = np.random.default_rng(0)
    shape = (count, ROW_NBYTES // unit.itemsize // STRETCH, STRETCH)
    values = rng.integers(0, bits, shape, unit, endpoint=True) | unit.type(base)
    calm = rng.random(shape[:2]) >= share
    values[calm] = values[calm][:, :1]
    return values.view(dtype).reshape(count, 224, -1)


def noise_share(codec: Codec, dtype: str, ratio: float) -> float:
    """Return the share of noise with which rows compress so, or 1 if they compress better."""
    low, high = 0.0, 1.0
    for _ in range(8):
        share = (low + high) / 2
        rows = make_rows(dtype, share, 8)
        if rows.nbytes / sum(len(codec.encode(row)) for row in rows) > ratio:
            low = share
        else:
            high = share
    return high


def written(
    path: Path, rows: np.ndarray, count: int, codec: str | None, pool: ThreadPoolExecutor
) -> Stored:
    """Write a file, if it is not there: the rows again and again, encoded without plugins."""
    if not path.exists():
        part = path.with_suffix(".part")
        with h5py.File(part, "w") as file:
            _write(file, rows, count, codec, pool)
        with part.open("rb") as done:
            os.fsync(done.fileno())  # nothing is to be written back while something is timed
        part.rename(path)
    with h5py.File(path) as file:
        stored_nbytes = file["data"].id.get_storage_size()
    return Stored(path, rows, count * rows[0].nbytes / stored_nbytes)


def _write(
    file: h5py.File, rows: np.ndarray, count: int, codec: str | None, pool: ThreadPoolExecutor
) -> None:
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    if codec:
        plist.set_chunk((1, *rows.shape[1:]))
        for number, values in CODECS[codec].filters(rows.itemsize):
            plist.set_filter(number, h5py.h5z.FLAG_OPTIONAL, values)
    space = h5py.h5s.create_simple((count, *rows.shape[1:]))
    kind = h5py.h5t.py_create(rows.dtype)
    data = h5py.Dataset(h5py.h5d.create(file.id, b"data", kind, space, plist))
    if not codec:
        for start in range(0, count, len(rows)):
            data[start : start + len(rows)] = rows[: count - start]
        return
    encoded = list(pool.map(CODECS[codec].encode, rows))
    for i, chunk in zip(range(count), itertools.cycle(encoded), strict=False):
        data.id.write_direct_chunk((i, *[0] * (rows.ndim - 1)), chunk)


def device_count() -> int:
    """Return how many GPUs there are for CuPy; none where it is missing."""
    try:
        runtime = importlib.import_module("cupy").cuda.runtime
    except ImportError:
        return 0
    with contextlib.suppress(runtime.CUDARuntimeError):
        return int(runtime.getDeviceCount())
    return 0


def describe(cupy: Any) -> dict[str, str]:
    """Return what CUDA and nvidia-smi (of its first GPU) say of the GPU and its link."""
    runtime = cupy.cuda.runtime
    name = runtime.getDeviceProperties(cupy.cuda.Device().id)["name"].decode()
    keys = "driver_version,memory.total,pcie.link.gen.max,pcie.link.gen.current"
    keys += ",pcie.link.width.max,pcie.link.width.current"
    command = ["nvidia-smi", f"--query-gpu={keys}", "--format=csv,noheader"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
        first = said.stdout.partition("\n")[0].split(", ")
        return {"name": name} | dict(zip(keys.split(","), first, strict=False))
    return {"name": name}


def versions(cupy: Any) -> dict[str, str]:
    """Return the versions of CUDA (of the driver, and of CuPy), CuPy and nvCOMP."""
    runtime = cupy.cuda.runtime
    numbers = {
        "cuda_runtime": runtime.runtimeGetVersion(),
        "cuda_of_driver": runtime.driverGetVersion(),
    }
    found = {name: f"{n // 1000}.{n % 1000 // 10}" for name, n in numbers.items()}
    for package in ("nvidia-nvcomp", "nvidia-libnvcomp"):
        for name in (f"{package}-cu13", f"{package}-cu12"):
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                found[name] = importlib.metadata.version(name)
    return {"cupy": cupy.__version__} | found


class Gpu:
    """CuPy, the kernel that stands for a training step, and copies to compare with."""

    def __init__(self) -> None:
        self.cupy = cupy = importlib.import_module("cupy")
        properties = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)
        self.blocks = properties["multiProcessorCount"]
        # More than half of what a multiprocessor has, so that no two blocks share one.
        self.shared_nbytes = properties["sharedMemPerMultiprocessor"] // 2 + 512
        self.sums = cupy.zeros(self.blocks * THREADS, np.uint64)

    @functools.cached_property
    def kernel(self) -> Any:
        """What `compute` launches, compiled when it is first used."""
        kernel = self.cupy.RawKernel(KERNEL, "bench_step")
        kernel.max_dynamic_shared_size_bytes = self.shared_nbytes
        return kernel

    def compute(self, array: Any, nanoseconds: int = 0) -> None:
        """Launch a kernel that reads of an array, and takes that long, a block a multiprocessor."""
        stride = np.uint64(array.nbytes // self.sums.size)
        arguments = (array, stride, np.uint64(nanoseconds), self.sums)
        self.kernel((self.blocks,), (THREADS,), arguments, shared_mem=self.shared_nbytes)

    def mark(self, stream: Any = None) -> Any:
        """Return an event that a stream, or the current one, comes to now."""
        event = self.cupy.cuda.Event()
        event.record(stream or self.cupy.cuda.get_current_stream())
        return event

    def since(self, begin: Any, stream: Any = None) -> float:
        """Return seconds from an event until a stream, or the current one, has done all."""
        end = self.mark(stream)
        end.synchronize()
        return self.cupy.cuda.get_elapsed_time(begin, end) / 1e3

    def timed(self, work: Callable[[], Any], count: int) -> float:
        """Return seconds of each of some calls, in a row on the current stream."""
        begin = self.mark()
        for _ in range(count):
            work()
        return self.since(begin) / count

    def copies(self, nbytes: int, count: int, from_host: bool = True) -> Way:
        """Return a plain copy: out of pinned memory, or on the device."""
        cupy = self.cupy
        runtime, stream = cupy.cuda.runtime, cupy.cuda.Stream(non_blocking=True)
        target = cupy.empty(nbytes, np.uint8)
        if from_host:
            source, kind = cupy.cuda.alloc_pinned_memory(nbytes), runtime.memcpyHostToDevice
        else:
            source, kind = cupy.zeros(nbytes, np.uint8).data, runtime.memcpyDeviceToDevice
        self.synchronize()

        def copy() -> None:
            runtime.memcpyAsync(target.data.ptr, source.ptr, nbytes, kind, stream.ptr)

        def way() -> float:
            with stream:
                return self.timed(copy, count)

        return way

    def wall(self, work: Callable[[], Any], count: int) -> float:
        """Return seconds of each of some calls, after a few, until the GPU has done all of them."""
        for _ in range(10):
            work()
        self.synchronize()
        begin = time.perf_counter()
        for _ in range(count):
            work()
        self.synchronize()
        return (time.perf_counter() - begin) / count

    def synchronize(self) -> None:
        """Wait until the GPU has nothing left to do."""
        self.cupy.cuda.Device().synchronize()


def endless(reader: AsyncReader) -> Iterator[Any]:
    while True:
        yield from reader


class Loop:
    """A training loop: batches of a reader, and the kernel that stands for a step."""

    def __init__(self, gpu: Gpu, reader: AsyncReader, stored: Stored, delivered: str) -> None:
        self.gpu, self.reader = gpu, reader
        self.stored, self.delivered = stored, delivered
        self.batches = endless(reader)
        self.on_gpu = reader.device != "cpu"
        self.check()

    def check(self) -> Any:
        """Check every value of the next batch, and return it."""
        batch = next(self.batches)
        values = batch.data.get() if self.on_gpu else batch.data
        expected = self.stored.expect(batch.index, self.delivered)
        if values.dtype != expected.dtype or values.tobytes() != expected.tobytes():
            raise AssertionError(f"{self.stored.path.name}: a batch is not what was written")
        return batch

    def seconds(self, steps: int, nanoseconds: int = 0) -> float:
        """Return the seconds of a step, after some that do not count."""
        for _ in range(2 * self.reader.config.prefetch):
            self.step(nanoseconds)
        if not self.on_gpu:
            begin = time.perf_counter()
            for _ in range(steps):
                next(self.batches)
            return (time.perf_counter() - begin) / steps
        return self.gpu.timed(partial(self.step, nanoseconds), steps)

    def step(self, nanoseconds: int = 0) -> None:
        """Take a batch, and launch what reads it and takes so long."""
        batch = next(self.batches)
        if self.on_gpu:
            self.gpu.compute(batch.data, nanoseconds)

    def way(self, duration: float) -> Way:
        """Return steps without compute, as many as take about so many seconds."""
        return partial(self.seconds, max(3, min(5000, round(duration / self.seconds(2)))))

    @property
    def decode(self) -> str:
        """What the reader says of where chunks are decoded."""
        return self.reader.stats().decode
