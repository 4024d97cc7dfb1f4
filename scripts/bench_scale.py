"""Compares what readers ask of a store with the model of docs/scale.md (`scale_model.py`).

- counts: readers of some ranks of a large training, one by one, against a store on the loopback
  (`rangeserver.c`): requests and bytes of a sample; with ``cache="disk"``, chunks that a node
  fetches in each epoch; of local files with a saved index, files opened.
- opening: requests and bytes by which processes open far files, with and without an index.
- rates: 1 to 64 processes side by side, each with its rank, against a store that answers so many
  requests a second, each after some milliseconds.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from bench_common import RESULTS, header, save, serving_file
from scale_model import (
    Cluster,
    Data,
    Limits,
    Order,
    files_opened,
    kept_on_disks,
    of_a_sample,
    of_an_epoch,
    rates,
)

from h5async import AsyncReader

BATCH, BLOCK = 32, 4096
DATA = {  # by the names of files; a checksum of 4 bytes is all that encodes a chunk
    "rows": Data(8192, 1, (64 << 10) + 4),
    "chunks": Data(131_072, 16, (64 << 10) + 4),
    "small": Data(524_288, 16, 4096 + 4),
}
FILES = Data(65_536, 16, 256 + 4, files=64)
ORDERS: tuple[Order, ...] = "full", "window"
LIMITS = Limits(requests=1000, latency=0.1, in_flight=16)
PROCESSES = 1, 2, 4, 8, 16, 32, 64
Options = dict[str, Any]


def write(path: Path, data: Data) -> None:
    shape, rows = (data.samples, data.chunk_nbytes // data.rows), data.rows
    with h5py.File(path, "w") as file:
        made = file.create_dataset("data", shape, "u1", chunks=(rows, shape[1]), fletcher32=True)
        block = np.zeros((64 * rows, shape[1]), np.uint8)
        for first in range(0, len(made), len(block)):
            made[first : first + len(block)] = block[: len(made) - first]


def options_of(where: Any, order: Order, rank: int, size: int, **more: Any) -> Options:
    return {
        "hdf5_path": where,
        "labels_field": None,
        "device": "cpu",
        "shuffle": "full" if order == "full" else "window",
        "batch_size": BATCH,
        "num_threads": 0,
        "requests_in_flight": LIMITS.in_flight,
        "fetch_bytes": 1 << 20,
        "window_bytes": 16 << 20,
        "rank": rank,
        "world_size": size,
        **more,
    }


def asked(base: str) -> np.ndarray:
    """Return how many requests the server had, and their bytes."""
    with urllib.request.urlopen(f"{base}/-/counts") as answer:
        return np.array(list(map(int, answer.read().split())))


# --- counts ---------------------------------------------------------------------------------------


def compared(what: dict[str, Any], found: dict[str, float], model: dict[str, float]) -> Options:
    """Return and print what was found, and its ratios to the model's."""
    ratios = {f"{name} / model": round(float(found[name] / model[name]), 4) for name in model}
    one = {**what, **{name: round(float(value), 4) for name, value in found.items()}, **ratios}
    print(one, flush=True)
    return one


def count_requests(base: str, nodes: int, name: str, order: Order, threads: int) -> Options:
    """Have some ranks read an epoch one by one; with threads, which fetch ahead, the second."""
    data, cluster = DATA[name], Cluster(nodes, batch_size=BATCH)
    size = cluster.world_size
    samples, got = 0, np.zeros(2, np.int64)
    for rank in sorted({0, size // 3, size - 1}):
        more = {"num_threads": threads}
        with AsyncReader(**options_of(f"{base}/{name}.h5", order, rank, size, **more)) as reader:
            before = np.zeros(2, np.int64)
            for _ in range(2 if threads else 1):
                got += before
                count = sum(reader.get_next_batch().size for _ in range(len(reader)))
                stats = reader.stats()
                before = -np.array([stats.requests, stats.requested_nbytes])
            samples += count
            got -= before
    model = of_an_epoch(data, cluster, order, is_ahead=threads > 0).times(1 / data.samples)
    return compared(
        {"data": name, "shuffle": order, "nodes": nodes, "threads": threads, "samples": samples},
        {"requests": got[0] / samples, "nbytes": got[1] / samples},
        dataclasses.asdict(model),
    )


def count_kept(base: str, folder: Path, order: Order, nodes: int = 16) -> list[Options]:
    """Have the two processes of one node of several read epochs with ``cache="disk"``."""
    data, size, found = DATA["chunks"], 2 * nodes, []
    more = {"cache": "disk", "cache_dir": folder / f"kept-{order}"}
    several = [
        AsyncReader(**options_of(f"{base}/chunks.h5", order, rank, size, **more))
        for rank in range(2)
    ]
    chunk_nbytes = -(-data.chunk_nbytes // BLOCK) * BLOCK  # of which whole blocks are kept
    before = 0
    for epoch in range(4):
        for _ in range(len(several[0])):
            for reader in several:
                reader.get_next_batch()
        now = sum(reader.stats().requested_nbytes for reader in several)
        chunks, before = (now - before) / chunk_nbytes, now
        model = kept_on_disks(data, nodes, order, epoch)
        about = {"shuffle": order, "nodes": nodes, "epoch": epoch}
        found.append(compared(about, {"chunks": chunks}, {"chunks": model}))
    for reader in several:
        reader.close()
    shutil.rmtree(folder / f"kept-{order}")
    return found


def count_files(folder: Path, order: Order, nodes: int) -> Options:
    """Have eight processes read an epoch of local files by an index; count their files."""
    cluster = Cluster(nodes, batch_size=BATCH)
    where, size, opened = folder / "files" / "train.h5idx", cluster.world_size, list[int]()
    for rank in range(0, size, size // 8):
        with AsyncReader(**options_of(where, order, rank, size, io="pread")) as reader:
            for _ in range(len(reader)):
                reader.get_next_batch()
            links = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
            names = {os.readlink(link) for link in links if os.path.exists(link)}
        opened.append(sum(name.endswith(".h5") and name.startswith(str(folder)) for name in names))
    model = {"files": files_opened(FILES, cluster, order)}
    return compared({"shuffle": order, "nodes": nodes}, {"files": np.mean(opened)}, model)


def count_opening(base: str) -> list[Options]:
    """Count what opening asks of the store, of one process and of three."""
    found = []
    served = f"{base}/%s"
    several = [served % f"files-{number:02}.h5" for number in range(FILES.files)]
    ways = {
        "no index": {"hdf5_path": several, "index_cache": False},
        "cache folder": {"hdf5_path": several},
        "named index": {"hdf5_path": served % "files.h5idx"},
    }
    for name, options in ways.items():
        counts = []
        for processes in (1, 1, 3):
            before = asked(base)
            for rank in range(processes):
                AsyncReader(**options_of("", "full", rank, 8, **options)).close()
            counts.append((asked(base) - before).tolist())
        one, many = counts[1:]  # (the first one fills the cache folder)
        found.append({"opened by": name, "files": FILES.files, "of one": one, "of three": many})
        print(found[-1], flush=True)
    return found


# --- rates ----------------------------------------------------------------------------------------


def read(options: Options, begin: Any, seconds: float, told: Any) -> None:
    """Read for some time after all others are ready; tell samples a second, and CPU a request."""
    with AsyncReader(**options) as reader:
        reader.get_next_batch()
        begin.wait()
        end = time.monotonic() + seconds / 3  # until all wait for the store
        while time.monotonic() < end:
            reader.get_next_batch()
        samples, start = 0, time.monotonic()
        cpu, requests = time.process_time(), reader.stats().requests
        while (now := time.monotonic()) < start + seconds:
            samples += reader.get_next_batch().size
        requests = reader.stats().requests - requests
        told.put((samples / (now - start), requests, time.process_time() - cpu))
        begin.wait()  # nobody ends while others read


def rate(base: str, order: Order, processes: int, seconds: float) -> Options:
    """Have so many processes read side by side."""
    data, cluster = DATA["chunks"], Cluster(1, processes, BATCH)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["h5async.reader.asyncreader", "scale_model"])
    begin, told = context.Barrier(processes), context.Queue()
    more = {"num_threads": 1, "fetch_bytes": 4 << 20}
    started = [
        context.Process(
            target=read,
            args=(
                options_of(f"{base}/chunks.h5", order, r, processes, **more),
                begin,
                seconds,
                told,
            ),
        )
        for r in range(processes)
    ]
    for one in started:
        one.start()
    found = [told.get(timeout=300) for _ in started]
    for one in started:
        one.join()
    several = rates(of_a_sample(data, cluster, order), cluster, LIMITS)
    limit = min(("rate of requests", "latency"), key=several.__getitem__)  # those of the server
    cpu_us = 1e6 * sum(cpu for *_, cpu in found) / sum(requests for _, requests, _ in found)
    about = {"shuffle": order, "processes": processes, "limit": limit, "cpu_us": round(cpu_us)}
    samples = sum(samples for samples, *_ in found)
    return compared(about, {"samples": samples}, {"samples": several[limit]})


def draw(result: Options, path: Path) -> None:
    import matplotlib as mpl  # (which each of many processes would import otherwise)

    mpl.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
    for order, colour in zip(ORDERS, ("tab:blue", "tab:orange"), strict=True):
        of_order = [one for one in result["rates"] if one["shuffle"] == order]
        x = [one["processes"] for one in of_order]
        model = [one["samples"] / one["samples / model"] for one in of_order]
        axes[0].plot(x, model, "--", color=colour, label=f"{order}, model")
        axes[0].plot(x, [one["samples"] for one in of_order], "o", color=colour, label=order)
    title = f"{LIMITS.requests:,} requests a second, {1000 * LIMITS.latency:.0f} ms each"
    axes[0].set(
        xscale="log", yscale="log", xlabel="processes", ylabel="samples a second", title=title
    )
    axes[0].set_xticks(PROCESSES, map(str, PROCESSES))
    axes[0].legend()
    counts = [one for one in result["counts"] if one["threads"] == 0]
    labels = [f"{one['data']}, {one['shuffle']}, {one['nodes']}" for one in counts]
    for name, mark in (("requests", "o"), ("nbytes", "x")):
        axes[1].plot([one[f"{name} / model"] for one in counts], labels, mark, label=name)
    axes[1].set(
        xlim=(0.8, 1.2), xlabel="measured / model", title="data, shuffle, nodes of 8 processes"
    )
    axes[1].axvline(1, color="grey", linewidth=0.5)
    axes[1].legend()
    figure.savefig(path, dpi=80)


def prepare(folder: Path) -> None:
    """Write all files, and the indices of those of many."""
    for name, data in DATA.items():
        write(folder / f"{name}.h5", data)
    (folder / "files").mkdir()
    part = dataclasses.replace(FILES, samples=FILES.samples // FILES.files)
    for number in range(FILES.files):
        name = f"files-{number:02}.h5"
        write(folder / "files" / name, part)
        (folder / name).hardlink_to(folder / "files" / name)
    save_index(folder / "files" / "train.h5idx", str(folder / "files" / "files-*.h5"))


def save_index(path: Path, *names: str) -> None:
    command = [sys.executable, "-m", "h5async", "index", *names, "-o", str(path)]
    subprocess.run(command, check=True)


def counts(folder: Path) -> Options:
    with serving_file(folder, 0) as url:
        base = url.rsplit("/", 1)[0]
        save_index(folder / "files.h5idx", *(f"{base}/files-{n:02}.h5" for n in range(FILES.files)))
        cases = [("rows", "full"), *itertools.product(("chunks", "small"), ORDERS)]
        return {
            "opening": count_opening(base),
            "files": [count_files(folder, y, nodes) for y in ORDERS for nodes in (1, 10, 100)],
            "kept": [one for order in ORDERS for one in count_kept(base, folder, order)],
            "counts": [
                count_requests(base, nodes, name, order, threads)
                for threads, several in ((0, (1, 8, 100, 1000)), (1, (1,)))
                for name, order in cases
                for nodes in several
            ],
        }


def all_rates(folder: Path, processes: list[int], seconds: float) -> list[Options]:
    with serving_file(folder, 1000 * LIMITS.latency, LIMITS.requests) as url:
        base = url.rsplit("/", 1)[0]
        return [rate(base, order, n, seconds) for n in processes for order in ORDERS]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=6)
    parser.add_argument("--only", choices=("counts", "rates"))
    parser.add_argument("--processes", type=int, nargs="*", default=PROCESSES)
    parser.add_argument("--out", type=Path, nargs="?", const=RESULTS)
    options = parser.parse_args()
    result = header()
    before = (options.out or RESULTS) / "bench_scale.json"
    if options.only and before.exists():
        result = json.loads(before.read_text()) | result
    with tempfile.TemporaryDirectory() as made:
        os.environ["XDG_CACHE_HOME"] = f"{made}/cache"
        folder = Path(made) / "served"
        folder.mkdir()
        prepare(folder)
        if options.only != "rates":
            result |= counts(folder)
        if options.only != "counts":
            kept = [y for y in result.get("rates", []) if y["processes"] not in options.processes]
            result["rates"] = kept + all_rates(folder, options.processes, options.seconds)
    if options.out:
        save(result, options.out / "bench_scale.json")
        draw(result, options.out / "bench_scale.png")


if __name__ == "__main__":
    main()
