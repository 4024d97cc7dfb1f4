"""Computes what a training on many nodes asks of a file system or a store.

    python scripts/scale_model.py      # prints the tables of docs/scale.md

All of it is arithmetic on a few numbers of the data, the cluster and the store. `bench_scale.py`
compares it with what readers really ask for. "Chunks" are encoded chunks, which are read whole;
rows without filters are chunks of one sample here.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal

Order = Literal["full", "window", "own"]

# How h5async joins ranges of bytes (`h5async/plan/records.py`), and how many batches it plans
# together (`h5async/fill/fetching.py`).
GAP_NBYTES, MOST_NBYTES = 32 * 1024, 2 << 20
LITTLE_NBYTES, MOST_TOGETHER = 512 * 1024, 64

# What opening asks of a file system for each file, and once (results/bench_saved_index.json); bytes
# of a saved index for each file and each chunk.
OPENING = {"no index": (2, 9, 10), "cache folder": (1, 2, 2)}  # opens, stats and reads of a file
INDEX_OPENING = (1, 4, 1)  # in all
INDEX_FILE_NBYTES, INDEX_CHUNK_NBYTES = 210, 8


@dataclasses.dataclass(frozen=True)
class Data:
    """A dataset: its samples, of which `rows` are in a chunk of `chunk_nbytes` stored bytes."""

    samples: int
    rows: int
    chunk_nbytes: int
    files: int = 1

    @property
    def chunks(self) -> float:
        """The number of chunks."""
        return self.samples / self.rows


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Nodes, and processes on each of them, with their batch size."""

    nodes: int
    ranks: int = 8
    batch_size: int = 32

    @property
    def world_size(self) -> int:
        """The number of processes."""
        return self.nodes * self.ranks


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a store permits, how long a request takes, and what a process does at most."""

    requests: float = 5500  # a second, of all nodes together
    latency: float = 0.02  # seconds
    in_flight: int = 32  # requests of a process
    cpu: float = 100e-6  # seconds of a core for a request
    cores: float = 8  # of a node, for requests
    node_nbytes: float = 3e9  # a second
    store_nbytes: float = math.inf  # a second, of all nodes together


@dataclasses.dataclass(frozen=True)
class Asked:
    """Requests and bytes, of a sample, a process or all: whatever was multiplied."""

    requests: float
    nbytes: float

    def times(self, factor: float) -> Asked:
        """Return so many times as much."""
        return Asked(self.requests * factor, self.nbytes * factor)


def joined(wanted: float, data: Data) -> Asked:
    """Return the requests for so many chunks at random places of a dataset, joined as h5async does.

    Two chunks are joined if the bytes between them are few, or at most half of all.
    """
    size = data.chunk_nbytes
    reach = max(3, 1 + GAP_NBYTES // size)  # places from a chunk, within which the next is joined
    reach = min(reach, MOST_NBYTES // size - 1) if 2 * size <= MOST_NBYTES else 0
    near = min(1.0, wanted / data.chunks)
    between = sum(near * (1 - near) ** k * k for k in range(reach))
    return Asked(wanted * (1 - near) ** reach, wanted * size * (1 + between))


def of_a_sample(data: Data, cluster: Cluster, order: Order, *, is_ahead: bool = True) -> Asked:
    """Return what one sample costs, where nothing is kept.

    Unless a reader has no threads, it fetches ahead, several small batches together.
    """
    batch = cluster.batch_size
    if order == "full":  # a chunk is wanted by each batch that has one of its samples
        share = 1 - (1 - batch / data.samples) ** data.rows
        wanted = data.chunks * share
    else:  # each chunk is wanted once
        wanted = batch / data.rows
    nbytes = wanted * data.chunk_nbytes
    together = min(MOST_TOGETHER, max(1, math.ceil(LITTLE_NBYTES / nbytes))) if is_ahead else 1
    return joined(wanted * together, data).times(1 / (batch * together))


def of_an_epoch(data: Data, cluster: Cluster, order: Order, *, is_ahead: bool = True) -> Asked:
    """Return what all processes together ask for in an epoch, where nothing is kept."""
    asked = of_a_sample(data, cluster, order, is_ahead=is_ahead).times(data.samples)
    is_cut = order != "full" and data.samples / cluster.world_size % data.rows
    edges = cluster.world_size - 1 if is_cut else 0  # chunks that two processes share
    return Asked(asked.requests + edges, asked.nbytes + edges * data.chunk_nbytes)


def kept_on_disks(data: Data, nodes: int, order: Order, epoch: int) -> float:
    """Return how many chunks each node fetches in an epoch (from 0) with ``cache="disk"``."""
    if order == "own":
        return data.chunks / nodes if epoch == 0 else 0.0
    missed = (1 - 1 / nodes) ** (data.rows if order == "full" else 1)  # in an epoch
    return data.chunks * missed**epoch * (1 - missed)


def files_opened(data: Data, cluster: Cluster, order: Order) -> float:
    """Return how many files each process opens in an epoch, where a saved index names them."""
    files = data.files / (cluster.nodes if order == "own" else 1)
    draws = data.samples / cluster.world_size
    if order != "full":
        draws = draws / data.rows + (cluster.world_size > 1)  # with the one at the edge
    return files * (1 - (1 - 1 / files) ** draws) if files > 1 else 1.0


def opening(data: Data, way: str) -> tuple[int, int, int, int]:
    """Return opens, stats, reads and bytes by which each process opens a dataset."""
    if way == "named index":
        nbytes = INDEX_FILE_NBYTES * data.files + INDEX_CHUNK_NBYTES * int(data.chunks)
        return (*INDEX_OPENING, nbytes)
    opens, stats, reads = (data.files * count for count in OPENING[way])
    metadata = 2524 * data.files + INDEX_CHUNK_NBYTES * int(data.chunks)
    return opens, stats, reads, metadata if way == "no index" else 12 * data.files


def rates(sample: Asked, cluster: Cluster, limits: Limits) -> dict[str, float]:
    """Return how many samples a second, of all processes, each limit permits."""
    per_request = 1 / sample.requests
    return {
        "rate of requests": limits.requests * per_request,
        "latency": cluster.world_size * limits.in_flight / limits.latency * per_request,
        "client's CPU": cluster.nodes * limits.cores / limits.cpu * per_request,
        "network of a node": cluster.nodes * limits.node_nbytes / sample.nbytes,
        "store's bandwidth": limits.store_nbytes / sample.nbytes,
    }


# --- the tables -------------------------------------------------------------------------------


NODES = 1, 100, 1000
DEMAND = 1000  # samples a second that a process trains on
PICTURES = "1,281,167 pictures of 110 kB, each a chunk", Data(1_281_167, 1, 110_000, 128)
SMALL = "100,000,000 samples of 4 kB, 256 in a chunk", Data(100_000_000, 256, 1 << 20, 1000)
CASES: tuple[tuple[tuple[str, Data], Order], ...] = (
    (PICTURES, "full"),
    (SMALL, "full"),
    (SMALL, "window"),
)
NAMES: dict[Order, str] = {
    "full": '`"full"`',
    "window": '`"window"`',
    "own": '`"window"`, own part',
}


def number(value: float) -> str:
    """Write a number with three digits that count, as tables have it."""
    for size, unit in ((1e12, " T"), (1e9, " G"), (1e6, " M")):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return f"{round(value):,}" if value >= 10 or value < 0.5 else f"{value:.2g}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def opening_table() -> str:
    data, rows = dataclasses.replace(PICTURES[1], files=1000), []
    for way in ("no index", "cache folder", "named index"):
        *calls, nbytes = opening(data, way)
        for nodes in NODES:
            counts = [number(Cluster(nodes).world_size * one) for one in calls]
            first = way if nodes == 1 else ""
            rows.append([first, f"{nodes:,}", *counts, number(nodes * nbytes)])
    return table(["opened by", "nodes", "opens", "stats", "reads", "bytes, once a node"], rows)


def epoch_table() -> str:
    rows = []
    for (name, data), order in CASES:
        for nodes in NODES:
            cluster = Cluster(nodes)
            asked = of_an_epoch(data, cluster, order)
            permitted = min(rates(of_a_sample(data, cluster, order), cluster, Limits()).values())
            demand = DEMAND * cluster.world_size
            values = asked.requests, asked.nbytes, asked.requests / data.samples * demand
            share = f"{min(1, permitted / demand):.2g}"
            first = [name, NAMES[order]] if nodes == 1 else ["", ""]
            rows.append([*first, f"{nodes:,}", *map(number, values), share])
    head = ["data", "`shuffle`", "nodes", "requests", "bytes", "requests a second", "of the demand"]
    return table(head, rows)


def disk_table() -> str:
    rows, epochs = [], (0, 1, 2, 9, 89)
    for name, data in (PICTURES, SMALL):
        orders: list[Order] = ["full", "window", "own"] if data.rows > 1 else ["full", "own"]
        for order in orders:
            for nodes in NODES:
                shares = [kept_on_disks(data, nodes, order, epoch) * nodes for epoch in epochs]
                first = [name if order == "full" else "", NAMES[order]] if nodes == 1 else ["", ""]
                kept = sum(kept_on_disks(data, nodes, order, epoch) for epoch in range(90))
                gigabytes = number(kept * data.chunk_nbytes)
                rows.append([*first, f"{nodes:,}", *map(number, shares), gigabytes])
    head = ["data", "`shuffle`", "nodes", *(f"epoch {e}" for e in epochs), "bytes on each disk"]
    return table(head, rows)


def files_table() -> str:
    rows = []
    for name, data in (PICTURES, SMALL):
        for order, text in NAMES.items():
            several = [files_opened(data, Cluster(nodes), order) for nodes in NODES]
            texts = [
                f"{number(y)} ({number(8 * n * y)})" for n, y in zip(NODES, several, strict=True)
            ]
            rows.append([f"{name}, {data.files:,} files" if order == "full" else "", text, *texts])
    return table(["data", "`shuffle`", *(f"nodes: {n:,}" for n in NODES)], rows)


TABLES = (opening_table, files_table, epoch_table, disk_table)

if __name__ == "__main__":
    print("\n\n".join(make() for make in TABLES))
