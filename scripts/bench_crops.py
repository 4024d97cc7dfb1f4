"""Measures parts of rows against h5py's slices, and against decoding each touched chunk once.

The file has 120 maps of 721 x 1440 float32 behind gzip, in chunks of 64 x 64 of one map, or of
eight of them; and the same maps without chunks. A batch has 16 patches of 64 x 64.

- h5py: a loop that slices patches at random places out of an open dataset, one by one.
- decoder: the chunks that a patch touches, as many as it does on average, already in memory,
  decoded by direct calls of libdeflate in two threads. With eight maps in a chunk, each chunk
  serves all patches of these maps that touch it: an epoch's touched chunks are decoded once.
  A window may be faster than that: some chunks stay from one epoch to the next.
- region: a fixed part of each map, against h5py's slice of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import imagecodecs
import numpy as np
from bench_turns import Bench, Target, paced, reader_sizes, run_chosen, threaded

from h5async import AsyncReader, Field

MAPS, LAT, LON = 120, 721, 1440
SIZE, BATCH, THREADS = 64, 16, 2
WINDOW_NBYTES = 200_000_000  # less than all chunks, so that later epochs find few of them
REGION = {1: slice(100, 356), 2: slice(0, 512)}


def write(path: Path, maps: int) -> None:
    """Write smooth maps with noise, which gzip packs to two thirds, in chunks of some maps."""
    rng, (y, x) = np.random.default_rng(0), np.mgrid[0:LAT, 0:LON]
    chunks = {"chunks": (maps, SIZE, SIZE), "compression": "gzip"} if maps else {}
    with h5py.File(path, "w") as file:
        data = file.create_dataset("t2m", (MAPS, LAT, LON), "f4", **chunks)
        for begin in range(0, MAPS, 8):
            waves = [np.sin(y / 90 + n / 9) * np.cos(x / 200) for n in range(begin, begin + 8)]
            noise = rng.normal(size=(8, LAT, LON)) * 0.3
            data[begin : begin + 8] = 280 + 20 * np.array(waves) + noise


def file_of(bench: Bench, maps: int) -> Path:
    path = bench.folder / f"maps{maps}.h5"
    if not path.exists():
        write(path, maps)
    return path


def reader_of(path: Path, field: Field, **options: Any) -> AsyncReader:
    fixed = {"batch_size": BATCH, "num_threads": THREADS, "device": "cpu", "index_cache": False}
    return AsyncReader(hdf5_path=path, fields={"x": field}, **fixed, **options)


def slices(path: Path) -> Iterator[int]:
    """Fill batches with h5py's slices at random places."""
    rng, out = np.random.default_rng(1), np.empty((BATCH, SIZE, SIZE), "f4")
    with h5py.File(path) as file:
        data = file["t2m"]
        while True:
            for patch in out:
                n, y, x = rng.integers((MAPS, LAT - SIZE + 1, LON - SIZE + 1))
                patch[...] = data[n, y : y + SIZE, x : x + SIZE]
            yield BATCH


def touched_chunks(path: Path, maps: int) -> float:
    """Return the chunks that a patch touches, each counted once for all patches of its maps."""
    touched, count = 0, 0
    with reader_of(path, Field("t2m", crop=SIZE)) as reader:
        for _ in range(10):
            cells = set()
            for batch in reader:
                for sample, place in zip(batch.index.tolist(), batch.x_crop.tolist(), strict=True):
                    ranges = [range(at // SIZE, (at + SIZE - 1) // SIZE + 1) for at in place]
                    cells |= set(itertools.product([sample // maps], *ranges))
                count += batch.size
            touched += len(cells)
    return touched / count


def decoding(path: Path, maps: int) -> Iterator[int]:
    """Decode chunks of the file; a patch is done when as many are decoded as it touches."""
    each, out = touched_chunks(path, maps), np.empty(maps * SIZE * SIZE * 4, np.uint8)
    with h5py.File(path) as file:
        identity = file["t2m"].id
        number = range(identity.get_num_chunks())[:: max(1, identity.get_num_chunks() // 512)]
        offsets = [identity.get_chunk_info(n).chunk_offset for n in number]
        encoded = [identity.read_direct_chunk(offset)[1] for offset in offsets]
    done = 0.0
    for chunk in itertools.cycle(encoded):
        imagecodecs.deflate_decode(chunk, out=out)
        done += 1 / each
        yield int(done)
        done -= int(done)


def patches(bench: Bench, maps: int) -> None:
    """Compare random patches in both orders with h5py and with the decoder."""
    path = file_of(bench, maps)
    field = Field("t2m", crop=SIZE)
    window = {"shuffle": "window", "window_bytes": WINDOW_NBYTES}
    ways = {
        "h5py": paced(slices(path)),
        "decoder": threaded([decoding(path, max(1, maps)) for _ in range(THREADS)]),
        "full": paced(reader_sizes(reader_of(path, field, shuffle="full"))),
        "window": paced(reader_sizes(reader_of(path, field, **window))),
    }
    targets = [Target("full", "h5py", 1.9), Target("window", "decoder", 0.7)]
    if maps == 0:
        del ways["decoder"]
        targets = [Target("full", "h5py", 1.9), Target("window", "h5py", 1.9)]
    bench.measure(f"{maps or 'no'} maps", ways, targets)


def region(bench: Bench) -> None:
    """Compare a fixed part of each map with h5py's slices."""
    path = file_of(bench, 1)

    def sliced() -> Iterator[int]:
        rng, out = np.random.default_rng(1), np.empty((BATCH, 256, 512), "f4")
        with h5py.File(path) as file:
            while True:
                for part in out:
                    part[...] = file["t2m"][rng.integers(MAPS), 100:356, 0:512]
                yield BATCH

    reader = reader_of(path, Field("t2m", region=REGION), shuffle="full")
    ways = {"h5py": paced(sliced()), "full": paced(reader_sizes(reader))}
    bench.measure("region", ways, [Target("full", "h5py", 1.9)])


CASES = {
    "1 map": lambda bench: patches(bench, 1),
    "8 maps": lambda bench: patches(bench, 8),
    "no chunks": lambda bench: patches(bench, 0),
    "region": region,
}


if __name__ == "__main__":
    run_chosen("bench_crops", __doc__, CASES, 1.0)
