"""Train a small network with a Lightning Trainer, whose checkpoints know where the data was.

    python scripts/examples/lightning_digits.py [FOLDER [PROCESSES]]

The dataset is the Trainer's dataloader: Lightning saves its state in each checkpoint, also in the
middle of an epoch. Started again with the same FOLDER, training goes on after the last checkpoint
there, with the samples that are left. With several processes (or devices) each reads its share.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from h5async import Field, Split
from h5async.torch import H5Dataset

FILE = Path(__file__).parents[2] / "sample_data" / "digits.h5"
FIELDS = {"data": Field("data", dtype="float32", scale=1 / 16), "labels": "labels"}
PARTS = {"train": 0.8, "val": 0.2}


class Digits(lightning.LightningModule):
    """A network of one hidden layer."""

    def __init__(self) -> None:
        super().__init__()
        self.model = torch.nn.Sequential(
            torch.nn.Flatten(), torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10)
        )

    def training_step(self, batch: dict[str, Any], _: int) -> Any:
        """Return the loss of a batch."""
        scores = self.model(batch["data"])
        right = (scores.argmax(1) == batch["labels"]).float().mean()
        self.log(
            "accuracy", right, on_step=False, on_epoch=True, sync_dist=True, batch_size=len(scores)
        )
        return torch.nn.functional.cross_entropy(scores, batch["labels"])

    def validation_step(self, batch: dict[str, Any], _: int) -> None:
        """Log the accuracy on images that are held out."""
        right = (self.model(batch["data"]).argmax(1) == batch["labels"]).float().mean()
        self.log("val_accuracy", right, sync_dist=True, batch_size=len(batch["labels"]))

    def configure_optimizers(self) -> Any:
        """Return the optimizer."""
        return torch.optim.Adam(self.parameters(), lr=3e-3)


class WatchData(lightning.Callback):
    """Say after each epoch if training waits for data; a logger, TensorBoard's say, is told too."""

    def on_train_epoch_end(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule
    ) -> None:
        """Log the share of its time that the loop waited, and print what to do about it."""
        stats = trainer.train_dataloader.reader.stats()
        pl_module.log("waited_for_data", stats.waited_share)
        if trainer.is_global_zero:
            print(f"epoch {trainer.current_epoch}: {stats}")


def main(
    folder: str | None = None,
    epochs: int = 10,
    callbacks: Sequence[lightning.Callback] = (),
    **options: Any,
) -> float:
    torch.manual_seed(0)
    every = [WatchData(), *callbacks]
    if folder:
        every.append(ModelCheckpoint(folder, every_n_train_steps=5, save_last=True))
    options = {"logger": False, "enable_checkpointing": bool(folder), **options}
    trainer = lightning.Trainer(max_epochs=epochs, callbacks=every, **options)
    batch_size = 64 // trainer.world_size
    shared = {"hdf5_path": FILE, "fields": FIELDS, "batch_size": batch_size}
    train, val = (Split(name, PARTS, stratify="labels") for name in PARTS)
    with (
        H5Dataset(shared, indices=train, shuffle="full", with_index=True) as dataset,
        H5Dataset(shared, indices=val) as held_out,
    ):
        trainer.fit(Digits(), dataset, held_out, ckpt_path="last" if folder else None)
    accuracy = trainer.callback_metrics["val_accuracy"].item()
    if trainer.is_global_zero:
        print(f"Lightning: accuracy {accuracy:.2f} on images that were held out")
    return accuracy


if __name__ == "__main__":
    folder = sys.argv[1] if len(sys.argv) > 1 else None
    processes = int(sys.argv[2]) if len(sys.argv) > 2 else 1
    main(folder, devices=processes, **({"accelerator": "cpu"} if processes > 1 else {}))
