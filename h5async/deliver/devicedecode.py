"""Decodes chunks on the GPU: encoded chunks in pinned memory enter, rows of a batch leave.

The host splits the chunks' frames into compressed blocks (`core/src/frames.c`), nvCOMP decodes all
blocks of a batch in one call, and our kernels undo the shuffling, verify, and copy samples to their
rows. If anything is doubtful, or a check fails, the host decodes that batch again, and raises the
error that says what is wrong.

nvCOMP is called through its C interface (the low-level, batched API of nvCOMP 5 and 6). It checks
little, and NVIDIA guarantees nothing for damaged data, so sizes, statuses and checksums are checked
afterwards. Source: the headers of the package nvidia-libnvcomp, `nvcomp/deflate.h` and so on.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from h5async.config import ReaderConfig
from h5async.core.binding import address, load_core
from h5async.deliver.decodeplan import EncodedFormat, EncodedPlan, NotDecoded, encoded_format
from h5async.deliver.gpu import Gpu, Kernels
from h5async.errors import DeviceError
from h5async.index.layout import DatasetLayout
from h5async.samples.fieldkind import field_of
from h5async.spelling import named

_MEMORY_SHARE = 0.5  # of the GPU's free memory, for decoding
_PIECE_NBYTES = 64 * 1024  # the assumed size of pieces whose sizes differ

_MAJOR_VERSIONS = (5, 6)
_BACKEND_CUDA = 2  # not the decompression engine of newer GPUs, which does not detect damage

_NAMES = {"deflate": "Deflate", "zstd": "Zstd", "lz4": "LZ4"}
FORMATS = tuple(_NAMES)


class _Options(ctypes.Structure):  # the reserved bytes must be 0
    _fields_ = (("backend", ctypes.c_int), ("reserved", ctypes.c_char * 60))


class _Properties(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("cudart_version", ctypes.c_uint32))


class NvcompError(Exception):
    """nvCOMP is missing, or a call failed; the message says which."""


class Blocks(NamedTuple):
    """Arrays on the device with one number per block.

    Addresses and sizes have 64 bits; for deflate, sources must be aligned to 4. nvCOMP fills
    `actual_nbytes`, and `states` of 32 bits, where 0 means success.
    """

    sources: Any
    source_nbytes: Any
    targets: Any
    target_nbytes: Any
    actual_nbytes: Any
    states: Any


class Nvcomp:
    """The nvCOMP library. Safe to use from many threads.

    `NvcompError` is raised if it cannot be loaded, or its version is not supported.
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
            raise NvcompError(f"nvCOMP {self.version} is installed; versions 5 and 6 work")
        self._wants_stream = major >= 6
        self._options = _Options(_BACKEND_CUDA, b"")

    def temp_nbytes(self, form: str, count: int, largest_nbytes: int, total_nbytes: int) -> int:
        """Return the bytes of temporary device memory that `decompress` needs.

        `form` is one of `FORMATS`; each of the `count` blocks decodes to at most `largest_nbytes`,
        and all together to at most `total_nbytes`.
        """
        name = f"nvcompBatched{_NAMES[form]}DecompressGetTempSize"
        function = getattr(self._library, name if self._wants_stream else f"{name}Async")
        found = ctypes.c_size_t()
        sizes = ctypes.c_size_t(count), ctypes.c_size_t(largest_nbytes)
        total, stream = ctypes.c_size_t(total_nbytes), [None] if self._wants_stream else []
        self._check(function(*sizes, self._options, ctypes.byref(found), total, *stream), name)
        return found.value

    def decompress(self, form: str, blocks: Blocks, temp: Any, stream: Any) -> None:
        """Queue the decoding of blocks on a stream.

        `form` is one of `FORMATS`: raw deflate, a zstd frame, an LZ4 block. `temp` is device memory
        of the size that `temp_nbytes` returns. `NvcompError` is raised if the call fails; errors of
        single blocks are in `blocks.states`.
        """
        name = f"nvcompBatched{_NAMES[form]}DecompressAsync"
        sources, source_nbytes, targets, target_nbytes, actual_nbytes, states = (
            ctypes.c_void_p(array.data.ptr) for array in blocks
        )
        inputs = sources, source_nbytes, target_nbytes, actual_nbytes
        count, temp_nbytes = ctypes.c_size_t(blocks.states.size), ctypes.c_size_t(temp.nbytes)
        room = count, ctypes.c_void_p(temp.data.ptr), temp_nbytes
        outputs = targets, self._options, states
        status = getattr(self._library, name)(*inputs, *room, *outputs, ctypes.c_void_p(stream.ptr))
        self._check(status, name)

    @staticmethod
    def _check(status: int, name: str) -> None:
        if status:
            raise NvcompError(f"{name} failed: nvcompStatus_t {status}")


@functools.cache
def load_nvcomp() -> Nvcomp:
    """Load nvCOMP from the package nvidia-libnvcomp; `NvcompError` if it is not installed."""
    spec = None
    if importlib.util.find_spec("nvidia") is not None:
        spec = importlib.util.find_spec("nvidia.libnvcomp")
    for folder in [] if spec is None else spec.submodule_search_locations or []:
        for path in sorted(Path(folder).glob("lib*/libnvcomp.so*")):
            return Nvcomp(path)
    raise NvcompError("nvCOMP is not installed")


class Staging:
    """A slot's memory for the encoded chunks of one field, on the host and on the device."""

    def __init__(self, gpu: Gpu, form: EncodedFormat) -> None:
        tasks, chunks, words = form.max_tasks, form.max_chunks, form.list_words
        self.encoded = gpu.pinned_memory(form.encoded_nbytes)
        self.encoded_on_device = gpu.cupy.empty(form.encoded_nbytes, np.uint8)
        self.lists = gpu.pinned_memory(8 * words).view(np.int64)
        self.lists_on_device = gpu.cupy.empty(words, np.int64)
        self.is_bad = gpu.pinned_memory(4).view(np.int32)
        self.blocks = np.empty((4, tasks), np.int64)
        self.copies = np.empty((3, chunks + tasks), np.int64)
        self.adler = np.empty(chunks + chunks % 2, np.uint32)
        self.views: list[Any] = []  # of `lists_on_device`: each list of the current batch


class DeviceDecoder:
    """Decodes the chunks of one field. Safe to use from many threads, except `decode`."""

    def __init__(self, gpu: Gpu, kernels: Kernels, form: EncodedFormat) -> None:
        self._gpu, self._kernels = gpu, kernels
        cupy, shape = gpu.cupy, form.shape
        self._nvcomp, core = load_nvcomp(), load_core()
        assert core is not None, "without it, nothing has such a format"
        self._core = core
        self.form = form
        self._codec = form.frame.codec
        total = form.max_chunks * form.pitch
        self._chunks = [cupy.empty(total, np.uint8) for _ in range(1 + bool(form.unshuffles))]
        self._states = cupy.empty(form.max_tasks, np.int32)
        self._actual = cupy.empty(form.max_tasks, np.uint64)
        self._sums = cupy.empty((form.max_chunks, 2), np.uint64)
        self._is_bad = cupy.empty(1, np.int32)
        self._pieces = [
            gpu.on_device(array)
            for array in (shape.extents, shape.row_begin, shape.chunk_strides, shape.row_strides)
        ]
        self._temp = cupy.empty(max(1, _temp_nbytes(form, self._nvcomp)), np.uint8)

    def upload(self, plan: EncodedPlan, staging: Staging, stream: Any) -> None:
        """Split the chunks of a batch into blocks; upload them and the lists of their blocks.

        `NotDecoded` is raised if anything about a chunk is unusual.
        """
        form, frames = self.form, self._cut(plan, staging)
        tasks, copies = frames.num_tasks, frames.num_copies
        source, source_nbytes, target, target_nbytes = staging.blocks[:, :tasks]
        lists = [
            source + staging.encoded_on_device.data.ptr,
            source_nbytes,
            target + self._chunks[0].data.ptr,
            target_nbytes,
            *staging.copies[:, :copies],
            *plan.runs,
        ]
        if form.is_deflate:
            lists.append(staging.adler[: plan.num_chunks + plan.num_chunks % 2].view(np.int64))
        staging.views, words, used = [], 0, plan.used_nbytes
        for one in lists:  # concatenated, for a single upload
            begin, words = words, words + one.size
            staging.lists[begin:words] = one
            staging.views.append(staging.lists_on_device[begin:words])
        self._gpu.upload(staging.encoded_on_device[:used], staging.encoded[:used], stream)
        self._gpu.upload(staging.lists_on_device[:words], staging.lists[:words], stream)

    def decode(self, plan: EncodedPlan, staging: Staging, rows: Any, stream: Any) -> None:
        """Queue the decoding of an uploaded batch on `stream`, the current one, always the same.

        One thread at a time: the work of two batches must not be interleaved. `rows` are the rows
        of the batch as read, viewed as uint8. Once the stream has done the work,
        ``staging.is_bad`` tells whether decoding failed.
        """
        form, shape, launch = self.form, self.form.shape, self._kernels.launch
        nbytes, count = shape.chunk_nbytes, plan.num_chunks
        sizes = np.int64(form.pitch), np.int64(nbytes), np.int64(count)
        copies, runs = staging.views[4:7], staging.views[7:12]
        decoded, tasks = self._chunks[0], staging.views[0].size
        states, actual = self._states[:tasks], self._actual[:tasks]
        self._is_bad.fill(0)
        # Results of an earlier batch must not be taken for this one's. (Set by CUDA itself, as CuPy
        # would compile a kernel.)
        runtime = self._gpu.cupy.cuda.runtime
        runtime.memsetAsync(states.data.ptr, 0xFF, states.nbytes, stream.ptr)
        actual.fill(0)
        if tasks and self._codec is not None:
            blocks = Blocks._make((*staging.views[:4], actual, states))
            self._nvcomp.decompress(self._codec, blocks, self._temp, stream)
            sums, adler, checked = None, None, 0
            if form.is_deflate:
                sums, adler, checked = self._sums[:count], staging.views[12].view(np.uint32), count
                sums.fill(0)
                launch("adler32", nbytes, count, decoded, *sizes, sums)
            results = states, actual, blocks.target_nbytes, np.int64(tasks)
            sums_due = sums, adler, np.int64(checked), np.int64(nbytes)
            launch("verify", 16 * max(tasks, checked), 1, *results, *sums_due, self._is_bad)
        pieces = copies[0].size
        arrays = staging.encoded_on_device, decoded, *copies
        launch("copy", _PIECE_NBYTES, pieces, *arrays, np.int64(pieces))
        for i, (itemsize, block) in enumerate(form.unshuffles):
            before, decoded = decoded, self._chunks[(i + 1) % 2]
            numbers = *sizes, np.int32(itemsize)
            if block:
                launch("bitunshuffle", nbytes, count, before, decoded, *numbers, np.int64(block))
            else:
                launch("unshuffle", nbytes, count, before, decoded, *numbers)
        lists = *runs, np.int64(runs[0].size), *self._pieces
        rank, element = np.int32(shape.chunk_strides.size), np.int32(shape.itemsize)
        strides = np.int64(form.pitch), np.int64(shape.sample_stride), np.int64(form.row_nbytes)
        lies = rank, *strides, element
        launch("place", _PIECE_NBYTES, runs[0].size, decoded, rows, *lists, *lies)
        runtime.memcpyAsync(
            staging.is_bad.ctypes.data,
            self._is_bad.data.ptr,
            staging.is_bad.nbytes,
            runtime.memcpyDeviceToHost,
            stream.ptr,
        )

    def _cut(self, plan: EncodedPlan, staging: Staging) -> Any:
        form, blocks, copies = self.form, staging.blocks, staging.copies
        frames = self._core.Frames(
            base=address(staging.encoded),
            position=address(plan.chunks.position),
            nbytes=address(plan.chunks.nbytes),
            base_nbytes=plan.used_nbytes,
            count=plan.num_chunks,
            kind=form.frame.kind,
            has_checksum=form.frame.has_checksum,
            element=form.frame.element,
            block_nbytes=form.frame.block_nbytes,
            expected_nbytes=form.shape.chunk_nbytes,
            pitch=form.pitch,
            source=address(blocks[0]),
            source_nbytes=address(blocks[1]),
            target=address(blocks[2]),
            target_nbytes=address(blocks[3]),
            copy_source=address(copies[0]),
            copy_target=address(copies[1]),
            copy_nbytes=address(copies[2]),
            adler=address(staging.adler) if form.is_deflate else None,
            max_tasks=blocks.shape[1],
            max_copies=copies.shape[1],
        )
        done = self._core.cut_frames(ctypes.byref(frames))
        if done < plan.num_chunks:
            raise NotDecoded(f"chunk {done} of the batch")
        return frames


def find_formats(
    config: ReaderConfig,
    layouts: Mapping[str, DatasetLayout],
    rows: int,
    on_host: Mapping[str, str],
    free_nbytes: int,
    host_nbytes: int,
) -> tuple[list[EncodedFormat | None], str | None]:
    """Return, per field, how a GPU decodes its chunks, or None; if it decodes no field, also why.

    `on_host` says why the host always decodes some columns, by name. `free_nbytes` is the free GPU
    memory; `host_nbytes` is the limit of host memory for encoded chunks, in all slots.
    `DeviceError` is raised if ``decode="device"`` was requested but is not possible for some
    compressed field.
    """
    nothing: list[EncodedFormat | None] = [None] * len(layouts)
    if config.decode == "host":
        return nothing, 'decode="host"'
    if config.postprocess is not None:
        return nothing, "postprocess works on host arrays"
    if config.cache == "host":
        return nothing, 'cache="host" keeps what the host decoded'
    if config.workers != "thread":
        return nothing, "helper processes decode what they read"
    encoded = [name for name, layout in layouts.items() if any(y.filters for y in layout.leaves())]
    if not encoded:
        return nothing, "nothing is compressed"
    try:
        nvcomp = load_nvcomp()
    except NvcompError as error:
        if config.decode == "device":
            raise DeviceError(
                f"{named('decode', 'device')}: {error}; install it with: pip install"
                " 'h5async[nvcomp13]', or 'h5async[nvcomp12]' for a driver of CUDA 12. To decode on"
                f" the host: {named('decode', 'host')}"
            ) from error
        return nothing, str(error)
    core, formats, reasons = load_core(), list(nothing), []
    for i, (name, layout) in enumerate(layouts.items()):
        if name not in encoded:
            continue
        found = on_host.get(name) or encoded_format(layout, core, rows, in_order=not config.shuffle)
        if isinstance(found, EncodedFormat):
            needed = _device_nbytes(found, nvcomp, config.prefetch)
            staged = config.prefetch * found.staging_nbytes
            if staged > host_nbytes:
                found = (
                    f"its encoded chunks need {staged:,} bytes of host memory, but max_batch_bytes"
                    f" leaves only {max(0, host_nbytes):,} for them"
                )
            elif needed > free_nbytes * _MEMORY_SHARE:
                found = (
                    f"it takes {needed / 1e9:.2g} GB of {free_nbytes / 1e9:.2g} GB that are free"
                )
            else:
                free_nbytes -= needed
                host_nbytes -= staged
                formats[i] = found
                continue
        reasons.append(f'field "{field_of(name)}": {found}')
    if config.decode == "device" and reasons:
        raise DeviceError(
            f"{named('decode', 'device')} is not possible for {'; '.join(reasons)};"
            f' {named("decode", "auto")} or "host" reads it'
        )
    return formats, None if any(formats) else "; ".join(reasons)


def _temp_nbytes(form: EncodedFormat, nvcomp: Nvcomp) -> int:
    if form.frame.codec is None:
        return 0
    largest = form.frame.block_nbytes or form.shape.chunk_nbytes
    total = form.max_chunks * form.pitch
    return nvcomp.temp_nbytes(form.frame.codec, form.max_tasks, largest, total)


def _device_nbytes(form: EncodedFormat, nvcomp: Nvcomp, slots: int) -> int:
    """Return the bytes of GPU memory that decoding needs; `sys.maxsize` if nvCOMP refuses."""
    try:
        temp = _temp_nbytes(form, nvcomp)
    except NvcompError:
        return sys.maxsize
    decoded = form.max_chunks * form.pitch * (1 + bool(form.unshuffles))
    return decoded + temp + slots * (form.encoded_nbytes + 8 * form.list_words)
