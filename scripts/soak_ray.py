"""Lose workers and a node of Ray: each row comes once, and training goes on with fewer workers.

``killed``: workers that read 10 GB of compressed images are killed at random. All rows are compared
with h5py, and the memory of this process is measured. ``elastic``: four workers of Ray Train have a
node each, of which one goes away in the middle of an epoch; Ray goes on with three.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import tempfile
import threading
import time
from pathlib import Path

import h5py
import numpy as np
import psutil
import ray
from bench_ray import IMAGES, write_files

KILLS = 12  # and then all is read: a task that its worker's death ends begins anew
ROWS, WORKERS, LOST_AT = 1003, 4, 5  # of the elastic epoch; it loses a node at this step


def anonymous_mb() -> float:
    """Return the memory of this process, without Ray's shared object store."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1e3


def kill_readers(kills: list[int], ended: threading.Event) -> None:
    """Kill random processes that read, or import Ray in order to, which takes them 3 s."""
    while len(kills) < KILLS and not ended.wait(random.uniform(1, 6)):
        names = [(one, one.info["cmdline"]) for one in psutil.process_iter(["cmdline"])]
        reading = [one for one, name in names if name and name[0].startswith("ray::Read")]
        if reading:
            victim = random.choice(reading)
            kills.append(victim.pid)
            victim.kill()


def killed(folder: Path, count: int) -> None:
    """Read files while their readers are killed."""
    from h5async.ray import read_hdf5

    paths = write_files(folder, count)
    with h5py.File(paths[0]) as file:
        truth = file["data"][:]
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    times, memory, kills, ended = np.zeros(IMAGES * count, int), [], [], threading.Event()
    killer = threading.Thread(target=kill_readers, args=(kills, ended))
    killer.start()
    try:
        for batch in read_hdf5(paths, with_index=True).iter_batches(batch_size=None):
            assert np.array_equal(batch["data"], truth[batch["index"] % IMAGES])
            times[batch["index"]] += 1
            memory.append(anonymous_mb())
    finally:
        ended.set()
        killer.join()
        ray.shutdown()
    assert (times == 1).all(), "rows were lost or doubled"
    quarter = len(memory) // 4
    print(
        f"killed: {times.size:,} rows of {truth.nbytes * count / 1e9:.1f} GB came once and equal to"
        f" h5py, with {len(kills)} workers killed; memory after a quarter {memory[quarter]:.0f} MB,"
        f" in the end {memory[-1]:.0f} MB"
    )


def train(config: dict[str, str]) -> None:
    """Note the samples of each step; the node of one worker is lost at one step."""
    import ray.train

    from h5async.ray import train_loader

    context, folder = ray.train.get_context(), Path(config["folder"])
    rank, size = context.get_world_rank(), context.get_world_size()
    loader = train_loader(
        hdf5_path=config["path"], labels_field=None, batch_size=16, shuffle="full", device="cpu"
    )
    first, checkpoint = 0, ray.train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as saved:
            first = int(Path(saved, "steps").read_text())
    for step, batch in enumerate(loader, first):
        if size == WORKERS and step == LOST_AT and rank == WORKERS - 1:
            (folder / "lost").write_text(ray.get_runtime_context().get_node_id())
            signal.pause()
        note = {"size": size, "step": step, "samples": batch["data"].tolist()}
        (folder / f"{size}-{rank}-{step}.json").write_text(json.dumps(note))
        with tempfile.TemporaryDirectory() as saved:
            loader.save(saved)
            Path(saved, "steps").write_text(str(step + 1))
            found = ray.train.Checkpoint.from_directory(saved) if rank == 0 else None
            ray.train.report({"step": step}, checkpoint=found)


def elastic(folder: Path) -> None:
    """Train with four workers until one node is gone, and then with three."""
    from ray.cluster_utils import Cluster
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    path, notes = folder / "data.h5", folder / "notes"
    notes.mkdir()
    with h5py.File(path, "w") as file:
        file.create_dataset("data", data=np.arange(ROWS), chunks=(50,), compression="gzip")
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    nodes = [cluster.add_node(num_cpus=1) for _ in range(WORKERS - 1)]
    ray.init(cluster.address, log_to_driver=False)
    ended = threading.Event()

    def lose() -> None:
        while not (notes / "lost").exists():
            if ended.wait(0.1):
                return
        lost = (notes / "lost").read_text()
        cluster.remove_node(next(node for node in nodes if node.node_id == lost))

    loser = threading.Thread(target=lose)
    loser.start()
    try:
        TorchTrainer(
            train,
            train_loop_config={"path": str(path), "folder": str(notes)},
            scaling_config=ScalingConfig(num_workers=(1, WORKERS)),
            run_config=RunConfig(
                storage_path=str(folder), failure_config=FailureConfig(max_failures=5)
            ),
        ).fit()
    finally:
        ended.set()
        loser.join()
        ray.shutdown()
        cluster.shutdown()
    steps = [json.loads(one.read_text()) for one in notes.glob("*.json")]
    sizes = {one["size"] for one in steps}
    assert sizes == {WORKERS, WORKERS - 1}, f"workers: {sizes}"
    first = min(one["step"] for one in steps if one["size"] < WORKERS)
    # Steps after the checkpoint are undone, as those of the model are.
    samples = [one["samples"] for one in steps if one["size"] < WORKERS or one["step"] < first]
    times = np.bincount(np.concatenate(samples), minlength=ROWS)
    assert (times >= 1).all(), "samples were lost"
    assert times.sum() - ROWS < WORKERS, "samples were doubled"  # to fill the last batch of a rank
    print(
        f"elastic: {first} steps of {WORKERS} workers, then those of {WORKERS - 1}: all {ROWS:,}"
        f" samples once in the epoch, and {times.sum() - ROWS} again, to fill the last batch"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", choices=["killed", "elastic"])
    parser.add_argument("--count", type=int, default=220, help="files of 46 MB to read")
    options = parser.parse_args()
    os.environ["RAY_AUTH_MODE"] = "disabled"
    # A busy machine is not a dead node.
    os.environ |= {"RAY_health_check_timeout_ms": "60000", "RAY_health_check_period_ms": "10000"}
    os.environ["RAY_worker_niceness"] = "0"
    with tempfile.TemporaryDirectory() as name:
        begin = time.monotonic()
        if options.only != "elastic":
            killed(Path(name), options.count)
        if options.only != "killed":
            elastic(Path(name))
        print(f"{time.monotonic() - begin:.0f} s")
