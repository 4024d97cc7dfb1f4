"""The ways of bench_peers: how other libraries read the same samples in batches.

Each way gets a case, opens what it needs, and yields batches for ever: arrays, or lists of arrays
where samples have any length. It closes nothing, because it has a process of its own. The settings
are those that its documentation recommends, or that were fastest when several were tried.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np

from h5async import AsyncReader

THREADS = 2
AHEAD = 4  # batches that a way may prepare
BLOCKS = 4  # batches that a shuffle in blocks mixes; with 16, all images here stay decoded

Batches = Iterator[Any]


class Case(NamedTuple):
    """Files that all have one dataset, `data`, and the order in which they are to be read."""

    paths: tuple[Path, ...]
    folder: Path  # for what a way makes of them
    truth: Any  # all samples, as h5py reads them
    shuffle: bool
    batch_size: int

    @property
    def is_ragged(self) -> bool:
        """Whether samples have any length."""
        return self.truth.dtype == object

    def orders(self) -> Iterator[list[int]]:
        """Yield the samples of each batch, epoch after epoch."""
        rng, count = np.random.default_rng(1), len(self.truth)
        while True:
            order = rng.permutation(count) if self.shuffle else np.arange(count)
            full = order[: count // self.batch_size * self.batch_size]
            yield from full.reshape(-1, self.batch_size).tolist()

    def epoch(self) -> list[list[int]]:
        """Return the samples of the first epoch's batches."""
        return [*itertools.islice(self.orders(), len(self.truth) // self.batch_size)]


# --- loops over h5py -----------------------------------------------------------------------------


class Rows:
    """The samples of some files; each process opens them when it first reads."""

    def __init__(self, case: Case) -> None:
        self.paths, self.count, self.is_ragged = case.paths, len(case.truth), case.is_ragged
        self.datasets: list[h5py.Dataset] = []

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> np.ndarray:
        if not self.datasets:
            self.datasets = [h5py.File(path)["data"] for path in self.paths]
        if len(self.datasets) == 1:
            return self.datasets[0][i]
        number, row = divmod(i, self.count // len(self.paths))
        return self.datasets[number][row]

    def __getitems__(self, order: list[int]) -> Any:
        """Return a batch in memory of its own, adjacent rows of a file as a slice."""
        first = self[order[0]]
        if self.is_ragged:
            return [first, *map(self.__getitem__, order[1:])]
        if (
            len(self.datasets) == 1
            and order[-1] - order[0] == len(order) - 1
            and order == sorted(order)
        ):
            return self.datasets[0][order[0] : order[-1] + 1]
        batch = np.empty((len(order), *first.shape), first.dtype)
        batch[0] = first
        for j, i in enumerate(order[1:], 1):
            batch[j] = self[i]
        return batch


def by_h5py(case: Case) -> Batches:
    return map(Rows(case).__getitems__, case.orders())


class Epochs:
    """A batch sampler; the order of each epoch is another one."""

    def __init__(self, case: Case) -> None:
        self.orders, self.length = case.orders(), len(case.truth) // case.batch_size

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[list[int]]:
        return itertools.islice(self.orders, self.length)


def first(samples: Any) -> Any:
    return samples


def endless(iterable: Any) -> Batches:
    while True:
        yield from iterable


def by_data_loader(workers: int, case: Case) -> Batches:
    from torch.utils.data import DataLoader

    loader = DataLoader(
        Rows(case),
        batch_sampler=Epochs(case),
        num_workers=workers,
        collate_fn=first if case.is_ragged else tensor,
        persistent_workers=workers > 0,
    )
    return endless(loader)


def tensor(batch: np.ndarray) -> Any:
    import torch

    return torch.from_numpy(batch)


def by_torchdata(case: Case) -> Batches:
    from torchdata import nodes

    rows = Rows(case)
    node = nodes.IterableWrapper(case.orders())
    node = nodes.ParallelMapper(
        node, rows.__getitems__, num_workers=THREADS, method="thread", prebatch=None
    )
    return iter(nodes.Loader(nodes.Prefetcher(node, AHEAD)))


def by_spdl(case: Case) -> Batches:
    from spdl.pipeline import PipelineBuilder

    pipeline = (
        PipelineBuilder()
        .add_source(case.orders())
        .pipe(Rows(case).__getitems__, concurrency=THREADS, output_order="input")
        .add_sink(AHEAD)
        .build(num_threads=THREADS, use_thread_output_queue=True)
    )
    with pipeline.auto_stop():
        while True:
            yield pipeline.get_item()


def by_grain(case: Case) -> Batches:
    logging.getLogger("absl").setLevel(logging.ERROR)  # JAX is not needed here
    import grain

    options = grain.ReadOptions(num_threads=THREADS, prefetch_buffer_size=AHEAD)
    batches = grain.MapDataset.source(case.epoch()).map(Rows(case).__getitems__)
    return iter(batches.repeat().to_iter_dataset(options))


# --- other readers of HDF5 -----------------------------------------------------------------------


def by_slices(case: Case, read: Callable[[int, int], np.ndarray]) -> Batches:
    """Read adjacent rows as a slice, others one at a time."""
    shape = case.truth.shape[1:]
    for order in case.orders():
        if case.shuffle:
            yield np.stack([read(i, i + 1).reshape(shape) for i in order])
        else:
            yield read(order[0], order[-1] + 1)


def by_hidefix(case: Case) -> Batches:
    import hidefix

    data = hidefix.Index(str(case.paths[0])).dataset("data")
    return by_slices(case, lambda begin, end: data[slice(begin, end),])


def by_pyfive(case: Case) -> Batches:
    import pyfive

    data = pyfive.File(str(case.paths[0]))["data"]
    return by_slices(case, lambda begin, end: np.array(data[begin:end]))


def references(case: Case) -> Any:
    """Return a store of zarr in which the file's chunks are looked up where they lie."""
    import obstore.store
    from obspec_utils.registry import ObjectStoreRegistry
    from virtualizarr.parsers import HDFParser

    registry = ObjectStoreRegistry({"file://": obstore.store.LocalStore()})
    return HDFParser()(url=f"file://{case.paths[0]}", registry=registry)


def by_zarr(case: Case) -> Batches:
    import zarr

    zarr.config.set({"async.concurrency": 32, "threading.max_workers": THREADS})
    array: Any = zarr.open_group(references(case), mode="r")["data"].async_array

    async def read(order: list[int]) -> np.ndarray:
        if not case.shuffle:
            return await array.getitem(slice(order[0], order[-1] + 1))
        return np.stack(await asyncio.gather(*map(array.getitem, order)))

    pool = ThreadPoolExecutor(THREADS)
    return ahead(case, lambda order: pool.submit(asyncio.run, read(order)))


def ahead(case: Case, submit: Callable[[list[int]], Any]) -> Batches:
    """Yield results of futures, some of which are asked for before."""
    orders = case.orders()
    waiting = [submit(next(orders)) for _ in range(AHEAD)]
    for order in orders:
        yield waiting.pop(0).result()
        waiting.append(submit(order))


def by_insitubatch(case: Case) -> Batches:
    import insitubatch

    logging.getLogger("insitubatch").setLevel(logging.ERROR)
    store = references(case)
    shapes = insitubatch.open_geometries(store, variables=["data"])
    splits = insitubatch.split_by_chunk(shapes["data"], fractions=(1.0, 0.0, 0.0))
    chunk_rows = shapes["data"].sample_chunk_size
    dataset = insitubatch.InSituDataset(
        store,
        splits,
        geometries=shapes,
        batch_size=case.batch_size,
        shuffle=case.shuffle,
        block_chunks=max(1, BLOCKS * case.batch_size // chunk_rows),
    )
    for epoch in itertools.count():
        dataset.set_epoch(epoch)
        for batch in dataset.train:
            yield batch.arrays["data"]


# --- formats of their own, made of the same samples ----------------------------------------------


def by_datasets(case: Case) -> Batches:
    import datasets

    datasets.disable_progress_bars()
    files = [str(path) for path in case.paths]
    cache = str(case.folder / "datasets")
    made = datasets.load_dataset("hdf5", data_files=files, split="train", cache_dir=cache)
    rows = made.with_format("numpy", dtype=case.truth[0].dtype)
    for epoch in itertools.count():
        shuffled = rows.shuffle(seed=epoch) if case.shuffle else rows
        for batch in shuffled.iter(case.batch_size, drop_last_batch=True):
            yield list(batch["data"]) if case.is_ragged else batch["data"]


def by_litdata(case: Case) -> Batches:
    os.environ.setdefault("LITDATA_DISABLE_VERSION_CHECK", "1")
    from litdata import StreamingDataLoader, StreamingDataset
    from litdata.streaming.writer import BinaryWriter

    folder = case.folder / "litdata"
    if not folder.exists():
        folder.mkdir()
        writer = BinaryWriter(str(folder), chunk_bytes="64MB")
        for i, sample in enumerate(case.truth):
            writer.add_item(i, np.asarray(sample))
        writer.done()
        writer.merge()
    dataset = StreamingDataset(str(folder), shuffle=case.shuffle, drop_last=True)
    loader = StreamingDataLoader(
        dataset,
        batch_size=case.batch_size,
        num_workers=THREADS,
        persistent_workers=True,
        collate_fn=first if case.is_ragged else stacked,
    )
    return endless(loader)


def stacked(samples: list[Any]) -> Any:
    import torch

    return torch.stack([torch.as_tensor(sample) for sample in samples])


def by_streaming(case: Case) -> Batches:
    from streaming import MDSWriter, StreamingDataset
    from streaming.base.util import clean_stale_shared_memory
    from torch.utils.data import DataLoader

    folder = case.folder / "mds"
    if not folder.exists():
        sample = np.asarray(case.truth[0])
        shape = "" if case.is_ragged else ":" + ",".join(map(str, sample.shape))
        columns = {"data": f"ndarray:{sample.dtype.name}{shape}"}
        with MDSWriter(out=str(folder), columns=columns) as writer:
            for sample in case.truth:
                writer.write({"data": np.asarray(sample)})
    clean_stale_shared_memory()
    dataset = StreamingDataset(local=str(folder), shuffle=case.shuffle, batch_size=case.batch_size)
    loader = DataLoader(
        dataset,
        batch_size=case.batch_size,
        num_workers=THREADS,
        persistent_workers=True,
        drop_last=True,
        collate_fn=partial(column, stack=not case.is_ragged),
    )
    return endless(loader)


def column(samples: list[dict[str, Any]], stack: bool) -> Any:
    values = [sample["data"] for sample in samples]
    return stacked(values) if stack else values


def by_tensorstore(case: Case) -> Batches:
    import tensorstore

    folder = case.folder / "tensorstore"
    made = tensorstore.open(
        {
            "driver": "zarr3",
            "kvstore": {"driver": "file", "path": str(folder)},
            "context": {"data_copy_concurrency": {"limit": THREADS}},
        },
        dtype=case.truth.dtype,
        shape=case.truth.shape,
        chunk_layout=tensorstore.ChunkLayout(chunk_shape=chunk_of(case)),
        create=True,
        open=True,
    ).result()
    if not (folder / "c").exists():
        made[...].write(case.truth).result()
    if case.shuffle:
        return ahead(case, lambda order: made[order].read())
    return ahead(case, lambda order: made[order[0] : order[-1] + 1].read())


def chunk_of(case: Case) -> tuple[int, ...]:
    with h5py.File(case.paths[0]) as file:
        return file["data"].chunks


def by_memmap(case: Case) -> Batches:
    path = case.folder / "memmap.npy"
    if not path.exists():
        np.save(path, case.truth)
    rows = np.load(path, mmap_mode="r")
    for order in case.orders():
        yield rows[order] if case.shuffle else rows[order[0] : order[-1] + 1].copy()


# --- ours ----------------------------------------------------------------------------------------


def by_h5async(case: Case, shuffle: str | bool | None = None) -> Batches:
    order = ("full" if case.shuffle else False) if shuffle is None else shuffle
    reader = AsyncReader(
        hdf5_path=list(case.paths),
        fields={"data": "data"},
        batch_size=case.batch_size,
        shuffle=order,
        drop_last=True,
        num_threads=THREADS,
        device="cpu",
        index_cache=False,
    )
    if reader.fallback_reads:
        raise AssertionError(f"h5py was used: {reader.layouts['data'].fallback_reason}")
    while True:
        for batch in reader:
            yield batch.data


class Way(NamedTuple):
    """A way to read: the package that it needs, and what is to be known of its figures."""

    name: str
    package: str
    open: Callable[[Case], Batches]
    caveat: str
    any_length: bool = True  # of samples
    many_files: bool = True
    is_common: bool = True  # takes part in every case that it can read


OURS = Way("h5async", "h5async", by_h5async, "")
WINDOW = Way(
    "h5async, window", "h5async", partial(by_h5async, shuffle="window"), "shuffles in a window"
)
LOOP = "the order is drawn by the caller; resuming, pinned memory and several files are its work"
COPY = "reads an uncompressed copy in its own format"
WAYS = (
    Way("h5py", "h5py", by_h5py, f"one thread, in the loop's own time; {LOOP}"),
    Way(
        "DataLoader, 0 workers",
        "torch",
        partial(by_data_loader, 0),
        "one thread, in the loop",
        is_common=False,
    ),
    Way(
        "DataLoader, 2 workers",
        "torch",
        partial(by_data_loader, THREADS),
        "2 processes; no resuming in the middle of an epoch; pinned memory is an option",
    ),
    Way(
        "torchdata, 2 threads",
        "torchdata",
        by_torchdata,
        "stands for DataLoader's workers as threads (pytorch#161044), which PyTorch 2.13 has not;"
        " h5py's lock lets one thread read",
        is_common=False,
    ),
    Way("SPDL", "spdl", by_spdl, f"2 threads behind h5py's lock; {LOOP}"),
    Way("Grain", "grain", by_grain, "2 threads behind h5py's lock; shuffles in full, resumes"),
    Way(
        "hidefix",
        "hidefix",
        by_hidefix,
        f"own threads, all cores; no shuffle; {LOOP}",
        any_length=False,
        many_files=False,
    ),
    Way(
        "pyfive",
        "pyfive",
        by_pyfive,
        f"one thread, in the loop; {LOOP}",
        any_length=False,
        many_files=False,
    ),
    Way(
        "VirtualiZarr, zarr, obstore",
        "virtualizarr",
        by_zarr,
        f"4 batches ahead in 2 threads; {LOOP}",
        any_length=False,
        many_files=False,
    ),
    Way(
        "insitubatch",
        "insitubatch",
        by_insitubatch,
        f"over VirtualiZarr's references; shuffles in blocks of {BLOCKS} batches, not in full; no"
        " resuming in the middle of an epoch",
        any_length=False,
        many_files=False,
    ),
    Way(
        "Hugging Face datasets",
        "datasets",
        by_datasets,
        f"{COPY} (Arrow, by its HDF5 builder), a map of memory; one thread, in the loop",
        is_common=False,
    ),
    Way(
        "TensorStore",
        "tensorstore",
        by_tensorstore,
        f"{COPY} (zarr3, the same chunks); {LOOP}",
        any_length=False,
        is_common=False,
    ),
    Way(
        "litData",
        "litdata",
        by_litdata,
        f"{COPY}; 2 processes; shuffles chunks of 64 MB and samples within; resumes",
        is_common=False,
    ),
    Way(
        "MosaicML streaming",
        "streaming",
        by_streaming,
        f"{COPY} (MDS); 2 processes; shuffles in blocks of 2**18 samples; resumes",
        is_common=False,
    ),
    Way(
        "np.memmap",
        "numpy",
        by_memmap,
        f"{COPY} (.npy); one thread, in the loop; {LOOP}",
        any_length=False,
        is_common=False,
    ),
)
