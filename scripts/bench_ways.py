"""What `bench_limits` times: ways to fill batches, by the reader and by bare loops; and files.

A bare loop knows everything beforehand: offsets, sample numbers, buffers. What fills some rows of
a batch is prepared as a call without arguments; `bare_loops` runs such calls in threads.
"""

from __future__ import annotations

import ctypes
import importlib
import itertools
import math
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain, cycle, islice, pairwise, product, repeat
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import imagecodecs
import numpy as np
from bench_common import CORES

from h5async import AsyncReader

IN_FLIGHT = 32
PERIOD = math.lcm(2, CORES)  # batches that slots or threads fill side by side arrive together


class Timed(NamedTuple):
    """How long some batches took, and the last of them."""

    seconds: float
    batches: int
    index: np.ndarray
    values: np.ndarray


Run = Callable[[int], Timed]  # at least so many batches
Work = Callable[[], Any]
Prepare = Callable[[np.ndarray, np.ndarray], Work]  # sample numbers, their rows of a batch
Decode = Callable[[np.ndarray, np.ndarray], Any]  # encoded chunk, room for the decoded one
Expect = Callable[[np.ndarray], np.ndarray]  # sample numbers -> what a batch of them holds


class Limits(NamedTuple):
    """Ways by what they say, the bytes that a batch of theirs counts for, and its values."""

    runs: dict[str, Run]
    nbytes: float
    expect: Expect


def epoch(samples: int, size: int, shuffle: Any) -> list[np.ndarray]:
    """Return the sample numbers of an epoch's full batches, for a bare loop."""
    order = np.arange(samples)
    if shuffle:
        np.random.default_rng(1).shuffle(order)
    return list(order[: samples // size * size].reshape(-1, size))


def check_epoch(reader: AsyncReader, expect: Expect) -> None:
    """Check every value of an epoch."""
    seen = []
    for batch in reader:
        require_equal(batch.data, expect(batch.index))
        seen.append(batch.index)
    if len(np.unique(np.concatenate(seen))) != len(reader) * reader.config.batch_size:
        raise AssertionError("the reader leaves samples out")
    if reader.fallback_reads:
        raise AssertionError("h5py was used")


def check(way: Limits, counts: Iterable[int]) -> None:
    """Check every value of the last batch of some runs."""
    for run, count in itertools.product(way.runs.values(), counts):
        timed = run(count)
        require_equal(timed.values, way.expect(timed.index))


def require_equal(values: np.ndarray, expected: np.ndarray) -> None:
    if not np.array_equal(values, expected) and not (
        values.dtype.kind == "f" and np.allclose(values, expected, rtol=1e-5, atol=1e-5)
    ):
        raise AssertionError("a batch is not what was written")


def open_reader(path: Path, **options: Any) -> AsyncReader:
    if "fields" not in options:
        options["labels_field"] = None
    return AsyncReader(hdf5_path=path, device="cpu", drop_last=True, **options)


def reader_stream(reader: AsyncReader) -> Run:
    """Return the reader's way in steady state: one loop over endless epochs.

    It is timed from the arrival of one batch to that of another, so that what was ready before
    does not count, and ends at rest.
    """
    batches = chain.from_iterable(repeat(reader))
    lead = reader.config.prefetch + 1

    def run(count: int) -> Timed:
        timed = _between_batches(batches, lead, count)
        _settle()
        return timed

    return run


def fresh_readers(
    path: Path,
    options: dict[str, Any],
    epoch_batches: int | None = None,
    before: Callable[[], None] | None = None,
) -> Run:
    """Return a way where each epoch, or its first batches, has a reader of its own."""

    def once() -> Timed:
        if before is not None:
            before()
        with open_reader(path, **options) as reader:
            total = epoch_batches or len(reader)
            count = (total - reader.config.prefetch - 1) // PERIOD * PERIOD
            timed = _between_batches(iter(reader), total - count, count)
            return timed._replace(values=timed.values.copy())

    return repeated(once)


def repeated(once: Callable[[], Timed]) -> Run:
    """Return what repeats something until it has given as many batches as are asked for."""

    def run(count: int) -> Timed:
        parts = [once()]
        while sum(part.batches for part in parts) < count:
            parts.append(once())
        return parts[-1]._replace(
            seconds=sum(part.seconds for part in parts),
            batches=sum(part.batches for part in parts),
        )

    return run


def _between_batches(batches: Iterator[Any], lead: int, count: int) -> Timed:
    for _ in islice(batches, lead):
        pass
    start = time.perf_counter()
    for batch in islice(batches, count):  # noqa: B007  # the last is returned
        pass
    return Timed(time.perf_counter() - start, count, batch.index, batch.data)


def _settle() -> None:
    """Wait until this process rests: a reader goes on until its slots are full."""
    before = -1.0
    while (now := time.process_time()) - before > 0.001:
        before = now
        time.sleep(0.005)


def bare_loops(
    pool: ThreadPoolExecutor,
    orders: Sequence[np.ndarray],
    make_slot: Callable[[], np.ndarray],
    **prepares: Prepare,
) -> dict[str, Run]:
    """Return loops in as many threads as there are cores, which share batches or take turns."""
    runs: dict[str, Run] = {}
    for name, prepare in prepares.items():
        runs[f"{name}, batches shared"] = shared_batches(pool, orders, make_slot, prepare)
        runs[f"{name}, batches in turn"] = batches_in_turn(pool, orders, make_slot, prepare)
    return runs


def shared_batches(
    pool: ThreadPoolExecutor,
    orders: Sequence[np.ndarray],
    make_slot: Callable[[], np.ndarray],
    prepare: Prepare,
) -> Run:
    slots = [make_slot(), make_slot()]
    edges = [len(slots[0]) * part // CORES for part in range(CORES + 1)]
    works = [
        [prepare(order[a:b], slots[k % 2][a:b]) for a, b in pairwise(edges)]
        for k, order in enumerate(orders)
    ]
    numbers = cycle(range(len(orders)))

    def run(count: int) -> Timed:
        start = time.perf_counter()
        for k in islice(numbers, count):
            list(pool.map(_call, works[k]))
        return Timed(time.perf_counter() - start, count, orders[k], slots[k % 2])

    return run


def batches_in_turn(
    pool: ThreadPoolExecutor,
    orders: Sequence[np.ndarray],
    make_slot: Callable[[], np.ndarray],
    prepare: Prepare,
    threads: int = CORES,
) -> Run:
    slots = [make_slot() for _ in range(threads)]
    works = [[prepare(order, slot) for order in orders] for slot in slots]
    numbers = cycle(range(len(orders)))

    def loop(own_works: list[Work], taken: Iterator[int]) -> int:
        k = -1
        for k in taken:
            own_works[k]()
        return k

    def run(count: int) -> Timed:
        start = time.perf_counter()
        last = list(pool.map(loop, works, repeat(islice(numbers, count))))
        seconds = time.perf_counter() - start
        k, slot = next((k, slot) for k, slot in zip(last, slots, strict=True) if k >= 0)
        return Timed(seconds, count, orders[k], slot)

    return run


def _call(work: Work) -> None:
    work()


def each(call: Callable[..., Any], arguments: Iterable[tuple[Any, ...]]) -> Work:
    """Return what makes one call after the other; an iterator can be shared among threads."""

    def work() -> None:
        for some in arguments:
            call(*some)

    return work


def by_preadv(descriptor: int, offsets: np.ndarray) -> Prepare:
    """Read rows from where they lie in a file, adjacent ones in one call."""

    def prepare(order: np.ndarray, out: np.ndarray) -> Work:
        calls: list[tuple[list[memoryview], int]] = []
        end, nbytes = -1, out[0].nbytes
        for offset, row in zip(offsets[order].tolist(), out, strict=True):
            if offset != end:
                calls.append(([], offset))
            calls[-1][0].append(row.reshape(-1).data)
            end = offset + nbytes
        return each(partial(read_all, descriptor, nbytes), calls)

    return prepare


def read_all(descriptor: int, nbytes: int, buffers: list[memoryview], offset: int) -> None:
    count = os.preadv(descriptor, buffers, offset)
    if count != len(buffers) * nbytes:
        raise OSError(f"preadv gives {count} bytes")


def by_copies(rows: Any) -> Prepare:
    """Copy row by row; `rows[i]` is a view of the i-th as it is delivered."""
    return lambda order, out: each(
        np.copyto, [(room, rows[i]) for room, i in zip(out, order.tolist(), strict=True)]
    )


def by_take(rows: np.ndarray) -> Prepare:
    return lambda order, out: partial(np.take, rows, order, axis=0, out=out, mode="clip")


def by_decoder(decode: Decode, chunks: Sequence[np.ndarray]) -> Prepare:
    """Decode a chunk into each row; where there are fewer rows, into these in turn."""
    return lambda order, out: each(
        decode, list(zip([chunks[i] for i in order.tolist()], cycle(list(out)), strict=False))
    )


def by_moving_axes(last: np.ndarray) -> Prepare:
    """Transpose adjacent samples out of an array that has them in its last dimension."""
    return lambda order, out: partial(
        np.copyto, out, np.moveaxis(last[..., order[0] : order[0] + len(order)], -1, 0)
    )


def by_moving_chunks(chunks: np.ndarray) -> Prepare:
    """Transpose chunk by chunk: ``(chunks, *row, samples of a chunk)``."""
    samples = chunks.shape[-1]

    def prepare(order: np.ndarray, out: np.ndarray) -> Work:
        moves = []
        edges = [0, *(np.flatnonzero(np.diff(order // samples)) + 1).tolist(), len(order)]
        for a, b in pairwise(edges if len(order) else []):
            chunk, first = divmod(int(order[a]), samples)
            moves.append((out[a:b], np.moveaxis(chunks[chunk, ..., first : first + b - a], -1, 0)))
        return each(np.copyto, moves)

    return prepare


def by_lines(last: np.ndarray) -> Prepare:
    """Take the samples out of the last dimension line by line, and transpose these."""
    lines = last.reshape(-1, *last.shape[-2:])

    def prepare(order: np.ndarray, out: np.ndarray) -> Work:
        rooms = out.reshape(len(out), -1, out.shape[-1])
        taken = np.empty((out.shape[-1], len(out)), out.dtype)

        def transpose(number: int) -> None:
            np.take(lines[number], order, axis=1, out=taken, mode="clip")
            np.copyto(rooms[:, number], taken.T)

        return each(transpose, [(number,) for number in range(len(lines))])

    return prepare


def to_planes(images: np.ndarray) -> dict[str, Prepare]:
    """Return ways from images to their channels, one after the other."""
    ways = {"copyto": by_copies(images.transpose(0, 3, 1, 2))}
    if (torch := optional("torch")) is not None:
        torch.set_num_threads(1)

        def copy(room: Any, image: Any) -> None:
            room.copy_(image)

        def by_torch(order: np.ndarray, out: np.ndarray) -> Work:
            planes = torch.from_numpy(images).permute(0, 3, 1, 2)
            rooms = torch.from_numpy(out)
            return each(copy, [(rooms[j], planes[i]) for j, i in enumerate(order.tolist())])

        ways["torch"] = by_torch
    if (cv2 := optional("cv2")) is not None:
        cv2.setNumThreads(1)
        ways["cv2.split"] = lambda order, out: each(
            cv2.split, [(images[i], list(room)) for room, i in zip(out, order, strict=True)]
        )
    return ways


def to_scaled_planes(
    images: np.ndarray, scale: np.ndarray, offset: np.ndarray
) -> dict[str, Prepare]:
    """Return ways to the channels as float32, times `scale`, plus `offset`."""
    planes = images.transpose(0, 3, 1, 2)
    by_channel = scale[:, None, None], offset[:, None, None]

    def multiply(image: np.ndarray, room: np.ndarray) -> None:
        np.multiply(image, by_channel[0], out=room, casting="unsafe")
        np.add(room, by_channel[1], out=room)

    ways: dict[str, Prepare] = {
        "multiply, add": lambda order, out: each(
            multiply, [(planes[i], room) for room, i in zip(out, order, strict=True)]
        )
    }
    if (torch := optional("torch")) is not None:
        torch.set_num_threads(1)
        factor, summand = map(torch.from_numpy, by_channel)

        def convert(image: Any, room: Any) -> None:
            room.copy_(image).mul_(factor).add_(summand)

        def by_torch(order: np.ndarray, out: np.ndarray) -> Work:
            sources, rooms = torch.from_numpy(images).permute(0, 3, 1, 2), torch.from_numpy(out)
            return each(convert, [(sources[i], rooms[j]) for j, i in enumerate(order.tolist())])

        ways["torch"] = by_torch
    if (cv2 := optional("cv2")) is not None:
        ways |= _scaled_by_opencv(cv2, images, scale, offset)
    return ways


def _scaled_by_opencv(
    cv2: Any, images: np.ndarray, scale: np.ndarray, offset: np.ndarray
) -> dict[str, Prepare]:
    cv2.setNumThreads(1)
    tables = np.arange(256, dtype=np.float32) * scale[:, None] + offset[:, None]
    local = threading.local()

    def look_up(image: np.ndarray, room: np.ndarray) -> None:
        if not hasattr(local, "planes"):
            local.planes = [np.empty(image.shape[:2], np.uint8) for _ in tables]
        cv2.split(image, local.planes)
        for plane, table, out in zip(local.planes, tables, room, strict=True):
            cv2.LUT(plane, table, out)

    ways: dict[str, Prepare] = {
        "cv2.split, cv2.LUT": lambda order, out: each(
            look_up, [(images[i], room) for room, i in zip(out, order, strict=True)]
        )
    }
    if hasattr(cv2.dnn, "blobFromImagesWithParams"):
        parameters = cv2.dnn.Image2BlobParams()
        parameters.scalefactor = (*scale.tolist(), 0.0)
        parameters.mean = (*(-offset / scale).tolist(), 0.0)

        def to_blob(chosen: list[np.ndarray], out: np.ndarray) -> None:
            cv2.dnn.blobFromImagesWithParams(chosen, out, parameters)

        ways["cv2.dnn.blobFromImages"] = lambda order, out: partial(
            to_blob, [images[i] for i in order.tolist()], out
        )
    return ways


def optional(module: str) -> Any:
    """Return a module, or None where it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError:
        return None


class Filter(NamedTuple):
    """A filter pipeline, and its decoder by calls of imagecodecs; what it is tried on."""

    name: str
    options: dict[str, Any]
    decode: Decode
    is_float: bool = False


def filters(plugins: Any) -> list[Filter]:
    """Return the filters to be timed; without hdf5plugin those that HDF5 and h5py bring."""
    gzip, lzf = {"compression": "gzip"}, {"compression": "lzf"}
    found = [
        Filter("gzip", gzip, gunzip),
        Filter("shuffle + gzip", gzip | {"shuffle": True}, in_two_steps(gunzip, _unshuffle), True),
        Filter("lzf", lzf, lambda e, o: imagecodecs.lzf_decode(e, header=False, out=o)),
    ]
    if plugins is not None:
        found += [
            Filter("zstd", dict(plugins.Zstd()), lambda e, o: imagecodecs.zstd_decode(e, out=o)),
            Filter("lz4", dict(plugins.LZ4()), _unlz4),
            Filter(
                "blosc-lz4",
                dict(plugins.Blosc(cname="lz4")),
                lambda e, o: imagecodecs.blosc_decode(e, numthreads=1, out=o),
                True,
            ),
            Filter(
                "bitshuffle-lz4",
                dict(plugins.Bitshuffle(cname="lz4")),
                in_two_steps(_unlz4, partial(_bitunshuffle, 2048)),  # blocks of 8 kB
                True,
            ),
            Filter(
                "bitshuffle",
                dict(plugins.Bitshuffle(cname="none")),
                partial(_bitunshuffle, 0),
                True,
            ),
        ]
    return found


def gunzip(encoded: np.ndarray, out: np.ndarray) -> None:
    imagecodecs.deflate_decode(encoded, out=out)


def _unlz4(encoded: np.ndarray, out: np.ndarray) -> None:
    imagecodecs.lz4h5_decode(encoded, out=out)


def _unshuffle(encoded: np.ndarray, out: np.ndarray) -> None:
    imagecodecs.byteshuffle_decode(encoded.view(np.float32), out=out.view(np.float32))


def _bitunshuffle(block: int, encoded: np.ndarray, out: np.ndarray) -> None:
    imagecodecs.bitshuffle_decode(encoded.data, itemsize=4, blocksize=block, out=out)


def in_two_steps(first: Decode, second: Decode) -> Decode:
    """Return both, with memory between them that each thread has of its own."""
    local = threading.local()

    def decode(encoded: np.ndarray, out: np.ndarray) -> None:
        if not hasattr(local, "between"):
            local.between = np.empty(out.nbytes, np.uint8)
        first(encoded, local.between)
        second(local.between, out)

    return decode


def write_dataset(path: Path, values: np.ndarray, **options: Any) -> None:
    """Write a file with one dataset to disk: nothing is written back while something is timed."""
    with h5py.File(path, "w") as file:
        dataset = file.create_dataset("data", values.shape, values.dtype, **options)
        step = max(1, values.shape[0] // 32)
        for start in range(0, values.shape[0], step):
            dataset[start : start + step] = values[start : start + step]
    with path.open("rb") as written:
        os.fsync(written.fileno())


def write_sparse(path: Path, row: tuple[int, ...], rows: int) -> None:
    """Write a file that has an address for each chunk, and nothing on the disk there."""
    options = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    options.set_chunk((1, *row))
    options.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    options.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    space = h5py.h5s.create_simple((rows, *row))
    with h5py.File(path, "w") as file:
        h5py.h5d.create(file.id, b"data", h5py.h5t.NATIVE_UINT8, space, options)


def chunk_offsets(path: Path) -> np.ndarray:
    """Return where each chunk of a dataset lies that is chunked along its first dimension."""
    with h5py.File(path) as file:
        data = file["data"]
        offsets = np.zeros(-(-len(data) // data.chunks[0]), np.int64)

        def note(chunk: Any) -> None:
            offsets[chunk.chunk_offset[0] // data.chunks[0]] = chunk.byte_offset

        data.id.chunk_iter(note)
    return offsets


def contiguous_offsets(path: Path, rows: int, row_nbytes: int) -> np.ndarray:
    with h5py.File(path) as file:
        return int(file["data"].id.get_offset()) + np.arange(rows) * row_nbytes


def encoded_chunks(path: Path) -> list[np.ndarray]:
    """Return all chunks as they are stored, in C order; none may have been left unfiltered."""
    with h5py.File(path) as file:
        data = file["data"]
        corners = product(*map(range, (0,) * data.ndim, data.shape, data.chunks))
        read = [data.id.read_direct_chunk(corner) for corner in corners]
    if any(mask for mask, _ in read):
        raise AssertionError("HDF5 gave up on a chunk")
    return [np.frombuffer(encoded, np.uint8) for _, encoded in read]


def map_file(path: Path) -> np.ndarray:
    """Return the bytes of a file, mapped anew."""
    with path.open("rb") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)


def drop_cache(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def cached_share(path: Path) -> float | None:
    """Return which share of a file the page cache has; None where the system cannot tell.

    To read with RWF_NOWAIT would not do: it makes some systems begin to read.
    """
    flat = map_file(path)
    pages = np.zeros(-(-flat.size // mmap.PAGESIZE), np.uint8)
    try:
        mincore = ctypes.CDLL(None).mincore
    except AttributeError:
        return None
    start, size, found = flat.ctypes.data, flat.size, pages.ctypes.data
    failed = mincore(ctypes.c_void_p(start), ctypes.c_size_t(size), ctypes.c_void_p(found))
    return None if failed else float((pages & 1).mean())


def reads_in_flight(
    path: Path,
    offsets: np.ndarray,
    orders: Sequence[np.ndarray],
    make_slot: Callable[[], np.ndarray],
    before: Callable[[], None],
    pool: ThreadPoolExecutor,
) -> Run:
    """Return the way that reads an epoch with 32 reads in flight, each of one row."""
    slot, last = make_slot(), make_slot()
    rooms = [*islice(cycle(slot), len(slot) * (len(orders) - 1)), *last]
    calls = [
        ([room.reshape(-1).data], offset)
        for room, offset in zip(rooms, offsets[np.concatenate(orders)].tolist(), strict=True)
    ]

    def once() -> Timed:
        before()
        descriptor = os.open(path, os.O_RDONLY)
        try:
            read = partial(read_all, descriptor, last[0].nbytes)
            works = repeat(each(read, iter(calls)), IN_FLIGHT)
            start = time.perf_counter()
            list(pool.map(_call, works))
            seconds = time.perf_counter() - start
        finally:
            os.close(descriptor)
        return Timed(seconds, len(orders), orders[-1], last)

    return repeated(once)


def chunk_mates(index: np.ndarray, samples: int) -> float:
    """Return which share of a batch's pairs of samples come out of one chunk."""
    counts = np.unique(index // samples, return_counts=True)[1]
    return float((counts * (counts - 1)).sum() / (len(index) * (len(index) - 1)))


def mate_distance(positions: np.ndarray, samples: int) -> float:
    """Return the mean distance of a chunk's samples in an epoch, in units of the epoch."""
    chunks = positions.reshape(-1, samples)
    pairs = itertools.combinations(range(samples), 2)
    return float(np.mean([np.abs(chunks[:, a] - chunks[:, b]).mean() for a, b in pairs])) / len(
        positions
    )
