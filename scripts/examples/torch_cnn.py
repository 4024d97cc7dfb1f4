"""Train a small convolutional network of PyTorch on RGB patches of two photographs.

The patches are delivered as (N, 3, 32, 32), float32 from 0 to 1. On a GPU without CuPy they come
in pinned memory, and are copied there while the program goes on. After each epoch it says whether
the loop waited for data; ``--logdir DIR`` says so to TensorBoard too.
"""

from __future__ import annotations

import argparse
import importlib.util
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn

from h5async import Field
from h5async.torch import H5Dataset

FILE = Path(__file__).parents[2] / "sample_data" / "patches.h5"
FIELDS = {"data": Field("data", axes=(0, 3, 1, 2), scale=1 / 255), "labels": "labels"}
STEPS_AN_EPOCH = 20  # the task is easy


def log_data(writer: Any, stats: Any, epoch: int) -> None:
    """Tell how fast the data came, and what held it up."""
    print(f"epoch {epoch}: {stats}")
    if writer is not None:
        writer.add_scalar("data/waited_share", stats.waited_share, epoch)
        for stage, seconds in stats.stage_seconds.items():
            writer.add_scalar(f"data/{stage}_seconds", seconds, epoch)
        writer.add_text("data/advice", str(stats), epoch)


def main(epochs: int = 2, logdir: str | None = None) -> float:
    writer = None
    if logdir is not None:
        from torch.utils.tensorboard import SummaryWriter  # needs: pip install tensorboard

        writer = SummaryWriter(logdir)
    torch.manual_seed(0)
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    model = nn.Sequential(
        *(nn.Conv2d(3, 16, 3, stride=2), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 2)),
    ).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    pin_memory = on_gpu and importlib.util.find_spec("cupy") is None
    with H5Dataset(
        hdf5_path=FILE, fields=FIELDS, batch_size=64, shuffle="full", pin_memory=pin_memory
    ) as dataset:
        for epoch in range(epochs):
            right = seen = 0
            for batch in islice(dataset, STEPS_AN_EPOCH):
                images = batch["data"].to(device, non_blocking=True)
                labels = batch["labels"].to(device, non_blocking=True)
                scores = model(images)
                loss = nn.functional.cross_entropy(scores, labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                right = right + (scores.argmax(1) == labels).sum()
                seen += len(labels)
            log_data(writer, dataset.reader.stats(), epoch)
        accuracy = int(right) / seen
    if writer is not None:
        writer.close()
    print(f"PyTorch on {device}: accuracy {accuracy:.2f} in the last of {epochs} epochs")
    return accuracy


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--logdir", help="of TensorBoard")
    main(**vars(parser.parse_args()))
