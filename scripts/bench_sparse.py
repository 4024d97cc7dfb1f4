"""Measures sparse rows, single cells out of an .h5ad file: shuffled in full, and in windows.

All ways of a case take turns, in the same run, with warm caches; what counts is the ratio of the
medians. The cells have counts as such data have: genes differ by orders of magnitude, most counts
are 1, and AnnData writes the file, raw or behind gzip, in the chunks that it chooses.

- window: against scDataset over AnnData in backed mode, with blocks of 32 cells, and as many cells
  mixed as in our window; without workers, and in a DataLoader with 2, whichever is faster. Against
  annbatch, over the zarr that it makes of the raw file, with cells in random order there, in its
  chunks of 256 cells; ours reads the .h5ad as it is.
- full: against AnnLoader over AnnData in backed mode.

What no loader can pass, two threads do with nothing else to do. Window: they read and decode each
chunk once, by `pread` and libdeflate, and copy no row; raw, to memory of a batch's size, since each
byte of a batch has to be written. Full: of each batch of random rows, they read and decode the
chunks that it touches, once; raw, the bytes of each row, to their places in a batch. Raw, each is
measured with `pread`, and copying out of a map.

Needs anndata, scdataset and torch. Without annbatch, which needs Python 3.12, it is left out.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import importlib.metadata
import importlib.util
import os
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anndata
import h5py
import numpy as np
import scipy.sparse as sp
from anndata.experimental import AnnLoader
from bench_common import RESULTS, header
from bench_turns import Bench, Target, Way, paced, reader_sizes, threaded
from rich.console import Console
from scdataset import BlockShuffling, scDataset
from torch.utils.data import DataLoader

from h5async import AsyncReader
from h5async.core.binding import find_functions

GENES, DEPTH = 20_000, 1_900  # counts of a cell in the median: some 1,320 values
THREADS = 2
MIXED = 4096  # cells that a window mixes
BLOCK, CHUNK = 32, 256  # of scDataset and annbatch: cells that are read together
STORED = {"raw": None, "gzip": "gzip"}
TARGETS = {
    ("raw", "window"): {"scDataset": 15, "annbatch": 7, "bound": 0.8},
    ("gzip", "window"): {"scDataset": 6, "annbatch": 1, "bound": 0.7},
    ("raw", "full"): {"AnnLoader": 25, "bound": 0.8},
    ("gzip", "full"): {"AnnLoader": 4.5, "bound": 0.8},
}

LOOPS = """
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>

typedef int (*Inflate)(void *, const void *, size_t, void *, size_t, size_t *);

/* Read pieces to their places, or copy them there, if there is a map; or decode each to the same
   memory. Returns how many were read. */
int64_t read_all(int fd, const char *map, const int64_t *offset, const int64_t *nbytes,
                 const int64_t *place, int64_t count, char *in, char *out, int64_t room,
                 Inflate inflate, void *state)
{
    for (int64_t i = 0; i < count; i++) {
        size_t n = (size_t)nbytes[i], done;
        if (map != NULL) {
            memcpy(out + (place ? place[i] : 0), map + offset[i], n);
            continue;
        }
        if (pread(fd, inflate ? in : out + (place ? place[i] : 0), n, offset[i]) != nbytes[i])
            return i;
        if (inflate && inflate(state, in, n, out, (size_t)room, &done) != 0)
            return i;
    }
    return count;
}
"""


def counts(cells: int) -> sp.csr_matrix:
    """Return a matrix of counts: of each cell, so many draws among genes of very unequal shares."""
    rng = np.random.default_rng(0)
    shares = np.exp(rng.normal(0, 1.9, GENES))
    ends = np.cumsum(shares / shares.sum())
    ends[-1] = 1
    depths = np.maximum(50, rng.lognormal(np.log(DEPTH), 0.35, cells)).astype(int)
    data, indices, starts = [], [], np.zeros(cells + 1, np.int64)
    for cell, depth in enumerate(depths.tolist()):
        genes = np.searchsorted(ends, np.sort(rng.random(depth)), side="right")
        first = np.flatnonzero(np.diff(genes, prepend=-1))
        indices.append(genes[first].astype(np.int32))
        data.append(np.diff(first, append=genes.size).astype(np.float32))
        starts[cell + 1] = starts[cell] + first.size
    found = np.concatenate(data), np.concatenate(indices), starts
    return sp.csr_matrix(found, shape=(cells, GENES))


# --- bare loops ----------------------------------------------------------------------------------


@functools.cache
def compiled() -> Any:
    """Return a function that reads pieces, and decodes them, without the GIL."""
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "loops.c"), Path(folder, "loops.so")
        source.write_text(LOOPS)
        subprocess.run(["cc", "-O3", "-shared", "-fPIC", "-o", library, source], check=True)
        function = ctypes.CDLL(str(library)).read_all
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    buffers = [*[pointer] * 2, number, *[pointer] * 2]
    function.argtypes = [ctypes.c_int, *[pointer] * 4, number, *buffers]
    function.restype = number
    return function


class Loops:
    """Where the chunks of a file's values and indices lie, and loops that read them."""

    def __init__(self, path: Path) -> None:
        self.read_all = compiled()
        self.descriptor = os.open(path, os.O_RDONLY)
        self.mapped = np.memmap(path, np.uint8, "r")
        with h5py.File(path) as file:
            self.indptr = file["X/indptr"][:].astype(np.int64)
            several = [file["X/data"], file["X/indices"]]
            self.is_raw = several[0].compression is None
            self.chunk = several[0].chunks[0]
            found: list[list[int]] = []
            for dataset in several:
                dataset.id.chunk_iter(lambda chunk: found.append([chunk.byte_offset, chunk.size]))
        # By dataset, chunk: offset, size.
        self.chunks = np.array(found, np.int64).reshape(2, -1, 2)
        names = ["libdeflate_zlib_decompress", "libdeflate_alloc_decompressor"]
        functions, _ = find_functions(names)
        self.inflate = None if self.is_raw else functions[names[0]]
        self.new_state = ctypes.CFUNCTYPE(ctypes.c_void_p)(functions[names[1]])

    def _read(self, pieces: np.ndarray, places: np.ndarray | None, memory: Any) -> None:
        scratch, out, state, address = memory
        offset, nbytes = (np.ascontiguousarray(column) for column in pieces.reshape(-1, 2).T)
        done = self.read_all(
            self.descriptor,
            address,
            offset.ctypes.data,
            nbytes.ctypes.data,
            None if places is None else places.ctypes.data,
            offset.size,
            scratch.ctypes.data,
            out.ctypes.data,
            4 * self.chunk,
            self.inflate,
            state,
        )
        assert done == offset.size

    def _memory(self, nbytes: int, is_mapped: bool) -> Any:
        scratch = np.ones(self.chunks[..., 1].max(), np.uint8)
        state = None if self.is_raw else self.new_state()
        address = self.mapped.ctypes.data if is_mapped else None
        return scratch, np.ones(nbytes, np.uint8), state, address

    def once(self, seed: int, is_mapped: bool, batch_size: int) -> Iterator[int]:
        """Read and decode each chunk in random order; yield how many cells lie there."""
        rng, mean = np.random.default_rng(seed), self.indptr[-1] / (self.indptr.size - 1)
        at_once = max(1, round(batch_size * mean / self.chunk))
        places = 4 * self.chunk * np.arange(2 * at_once) if self.is_raw else None
        memory = self._memory(4 * self.chunk * (2 * at_once if self.is_raw else 1), is_mapped)
        while True:
            order = rng.permutation(self.chunks.shape[1])
            for begin in range(0, order.size - at_once, at_once):
                self._read(self.chunks[:, order[begin : begin + at_once]], places, memory)
                yield round(at_once * self.chunk / mean)

    def random(self, seed: int, is_mapped: bool, batch_size: int) -> Iterator[int]:
        """Read what batches of random rows need: their bytes, or chunks, each once a batch."""
        rng, starts = np.random.default_rng(seed), self.indptr
        room = 2 * batch_size * int(np.diff(starts).max()) if self.is_raw else self.chunk
        memory = self._memory(4 * room, is_mapped)
        while True:
            rows = np.sort(rng.integers(starts.size - 1, size=batch_size))
            begin, end = starts[rows], starts[rows + 1]
            # Of each row: its part in the chunk where it begins, and in the next one. (No row is
            # longer than a chunk.)
            chunk = np.column_stack((begin, np.maximum(begin, end - 1))) // self.chunk
            if not self.is_raw:
                self._read(self.chunks[:, np.unique(chunk)], None, memory)
            else:
                self._read(*self._pieces(begin, end, chunk), memory)
            yield batch_size

    def _pieces(
        self, begin: np.ndarray, end: np.ndarray, chunk: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return which bytes rows are, and where these go."""
        border = np.minimum(end, (chunk[:, 0] + 1) * self.chunk)
        parts = np.stack((np.column_stack((begin, border)), np.column_stack((border, end))), 1)
        first, behind = parts[..., 0].ravel(), parts[..., 1].ravel()
        chunk = chunk.ravel()
        is_there = behind > first
        chunk, first, sizes = chunk[is_there], first[is_there], 4 * (behind - first)[is_there]
        places = np.concatenate(([0], np.cumsum(sizes)))
        inside = 4 * (first - chunk * self.chunk)
        pieces = [np.column_stack((self.chunks[k, chunk, 0] + inside, sizes)) for k in (0, 1)]
        return np.concatenate(pieces), np.concatenate((places[:-1], places[:-1] + places[-1]))


def bare(
    loops: Loops, what: str, work: Callable[[int, bool, int], Iterator[int]], batch_size: int
) -> dict[str, Way]:
    """Return bare loops in as many threads as a reader has, by name."""
    kinds = {"pread": False} | ({"map": True} if loops.is_raw else {})
    return {
        f"{what}, {kind}": threaded([work(i, is_mapped, batch_size) for i in range(THREADS)])
        for kind, is_mapped in kinds.items()
    }


# --- loaders -------------------------------------------------------------------------------------


def backed(path: Path) -> Any:
    return anndata.read_h5ad(path, backed="r")


def sizes_of(loader: Any) -> Iterator[int]:
    while True:
        for batch in loader:
            yield batch.shape[0]


def of_scdataset(path: Path, batch_size: int, seconds: float) -> tuple[str, Way]:
    """Return scDataset, alone or in a DataLoader with 2 workers, whichever is faster."""

    def dataset() -> Any:
        return scDataset(
            backed(path),
            BlockShuffling(block_size=BLOCK),
            batch_size=batch_size,
            fetch_factor=MIXED // batch_size,
            fetch_callback=lambda data, index: data.X[index],
            seed=0,
        )

    ways = {"scDataset": paced(sizes_of(dataset()))}
    workers = DataLoader(
        dataset(), batch_size=None, num_workers=2, persistent_workers=True, collate_fn=same
    )
    ways["scDataset, 2 workers"] = paced(sizes_of(workers))
    speeds = {name: way(seconds) for name, way in ways.items()}
    name = max(speeds, key=lambda found: speeds[found])
    return name, ways[name]


def same(batch: Any) -> Any:
    return batch


def of_annloader(path: Path, batch_size: int) -> Way:
    loader = AnnLoader(backed(path), batch_size=batch_size, shuffle=True, use_cuda=False)

    def sizes() -> Iterator[int]:
        while True:
            for batch in loader:
                yield len(batch.X)

    return paced(sizes())


def of_annbatch(path: Path, batch_size: int) -> Way:
    """Return annbatch, over the collection that it makes of a file, beside it."""
    import zarr
    from annbatch import DatasetCollection, Loader

    zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"})  # as annbatch recommends
    store = path.parent / "annbatch.zarr"
    if not store.exists():
        DatasetCollection(store, mode="a").add_adatas([path], shuffle=True)

    def sizes() -> Iterator[int]:
        while True:
            loader = Loader(
                batch_size=batch_size,
                chunk_size=CHUNK,
                preload_nchunks=MIXED // CHUNK,
                shuffle=True,
                preload_to_gpu=False,
            )
            for batch in loader.use_collection(DatasetCollection(store, mode="r")):
                yield batch["X"].shape[0]

    return paced(sizes())


def ours(path: Path, shuffle: str, batch_size: int, cells: sp.csr_matrix) -> AsyncReader:
    nbytes = 8 * cells.nnz / cells.shape[0] * MIXED
    return AsyncReader(
        hdf5_path=path,
        fields={"x": "X"},
        batch_size=batch_size,
        shuffle=shuffle,
        window_bytes=int(2 * nbytes),  # a part of which holds the cells that are mixed
        num_threads=THREADS,
        device="cpu",
        index_cache=False,
    )


def check(reader: AsyncReader, cells: sp.csr_matrix) -> None:
    """Compare a batch with the matrix that was written."""
    batch = next(iter(reader))
    assert (batch.x.to_scipy() != cells[batch.index]).nnz == 0


def measure(bench: Bench, batch_size: int, cells: sp.csr_matrix) -> None:
    has_annbatch = importlib.util.find_spec("annbatch") is not None
    for (stored, shuffle), least in TARGETS.items():
        path = bench.folder / f"{stored}.h5ad"
        loops, ways = Loops(path), {}
        if shuffle == "window":
            name, way = of_scdataset(path, batch_size, bench.options.seconds)
            ways = {name: way} | bare(loops, "each chunk once", loops.once, batch_size)
            targets = [("scDataset", name)]
            if has_annbatch:
                ways["annbatch"] = of_annbatch(bench.folder / "raw.h5ad", batch_size)
                targets.append(("annbatch", "annbatch"))
        else:
            what = "random rows" if loops.is_raw else "chunks of random rows"
            ways = {"AnnLoader": of_annloader(path, batch_size)}
            ways |= bare(loops, what, loops.random, batch_size)
            targets = [("AnnLoader", "AnnLoader")]
        targets += [("bound", name) for name in ways if name.endswith(("pread", "map"))]
        with ours(path, shuffle, batch_size, cells) as reader:
            check(reader, cells)
            ways["ours"] = paced(reader_sizes(reader))
            bench.measure(
                f"{stored}, {shuffle}, {batch_size}",
                ways,
                [Target("ours", name, least[which]) for which, name in targets],
            )
            bench.print(f"{'':16} {reader.stats()}")
        os.close(loops.descriptor)


def peers() -> dict[str, str]:
    found = {}
    for name in ("anndata", "scdataset", "annbatch", "torch", "scipy"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cells", type=int, default=40_000)
    parser.add_argument("--batch-sizes", type=int, nargs="*", default=[256, 1024])
    parser.add_argument("--repeats", type=int, default=7, help="rounds")
    parser.add_argument("--seconds", type=float, default=1.0, help="that each way takes in a round")
    parser.add_argument("--only", help="a part of the names of cases, such as gzip or window")
    parser.add_argument("--data", type=Path, help="folder to keep the files in, or with them")
    parser.add_argument("--quick", action="store_true", help="few and small: no figures to quote")
    parser.add_argument("--out", type=Path, help="folder for the results; default: scripts/results")
    options = parser.parse_args()
    if options.quick:
        options.cells, options.repeats, options.seconds = 2_000, 2, 0.05
        options.batch_sizes = [64]
    elif options.out is None and not options.only:
        options.out = RESULTS
    warnings.filterwarnings("ignore", module="anndata|annbatch|zarr|torch")
    with tempfile.TemporaryDirectory() as temporary:
        bench = Bench(options, options.data or Path(temporary), Console())
        bench.folder.mkdir(exist_ok=True)
        cells = counts(options.cells)
        for stored, compression in STORED.items():
            path = bench.folder / f"{stored}.h5ad"
            if not path.exists():
                anndata.AnnData(cells).write_h5ad(path, compression=compression)
        for case in list(TARGETS):
            if options.only and options.only not in ", ".join(case):
                del TARGETS[case]
        for batch_size in options.batch_sizes:
            measure(bench, batch_size, cells)
    about: dict[str, Any] = header()
    about["versions"] |= peers()
    bench.save("bench_sparse", {**about, "cells": cells.shape, "values": cells.nnz})


if __name__ == "__main__":
    main()
