"""Train a small network of PyTorch on several processes; each reads its share of every epoch.

    torchrun --standalone --nproc-per-node 2 scripts/examples/torchrun.py

Or without torchrun, alone. Which share a process reads is found in the environment, and all have
as many batches, so that none waits for gradients that never come.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from h5async import Field, Split
from h5async.torch import H5Dataset

FILE = Path(__file__).parents[2] / "sample_data" / "digits.h5"
FIELDS = {"data": Field("data", dtype="float32", scale=1 / 16), "labels": "labels"}
PARTS = {"train": 0.8, "val": 0.2}


def main(epochs: int = 10) -> float:
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    device = "cpu"
    if torch.cuda.is_available():
        device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10)
    ).to(device)
    if world_size > 1:
        distributed.init_process_group("nccl" if device != "cpu" else "gloo")
        model = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    batch_size = 64 // world_size
    shared = {"hdf5_path": FILE, "fields": FIELDS, "batch_size": batch_size, "device": device}
    train, val = (Split(name, PARTS, stratify="labels") for name in PARTS)
    right = torch.zeros(2, dtype=torch.int64, device=device)
    with (
        H5Dataset(shared, indices=train, shuffle="full") as dataset,
        H5Dataset(shared, indices=val) as held_out,
    ):
        for _ in range(epochs):
            for batch in dataset:
                scores = model(batch["data"])
                loss = torch.nn.functional.cross_entropy(scores, batch["labels"])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        with torch.no_grad():
            for batch in held_out:
                scores = model(batch["data"])
                right[0] += (scores.argmax(1) == batch["labels"]).sum()
                right[1] += len(scores)
    if world_size > 1:
        distributed.all_reduce(right)
    accuracy = (right[0] / right[1]).item()
    if int(os.environ.get("RANK", 0)) == 0:
        print(f"{world_size} processes: accuracy {accuracy:.2f} on images that were held out")
    if world_size > 1:
        distributed.barrier()  # nobody ends while another one may still talk to it
        distributed.destroy_process_group()
    return accuracy


if __name__ == "__main__":
    main()
