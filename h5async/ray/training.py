"""Defines `train_loader`: batches for a Ray Train worker, resumable from its checkpoints."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import ray.train

from h5async.config import ReaderConfig
from h5async.errors import ConfigError
from h5async.torch import H5Dataset

if TYPE_CHECKING:
    from h5async.config.keywords import ReaderOptions

_POSITION = "h5async.json"  # in the folder of a checkpoint
_TRIES = 50  # attempts to read it, 0.1 s apart


class TrainLoader(H5Dataset):
    """The `H5Dataset` that `train_loader` returns; it can save its position in Ray checkpoints."""

    @property
    def epoch(self) -> int:
        """The epoch of the next batch, at which a loop over epochs begins."""
        return int(self.state_dict()["epoch"])

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the position to ``h5async.json`` in the folder of a checkpoint.

        At the same step, the position is the same in all workers; any of them may save it.
        """
        Path(folder, _POSITION).write_text(json.dumps(self.state_dict()))


def train_loader(
    config: ReaderConfig | ReaderOptions | Mapping[str, Any] | str | os.PathLike[str] | None = None,
    /,
    *,
    as_tuple: bool = False,
    with_index: bool = False,
    **options: Unpack[ReaderOptions],
) -> TrainLoader:
    """Return a worker's part of a dataset; call this in the function that Ray Train runs.

    Rank and world size come from `ray.train.get_context`. If Ray restarts the workers from a
    checkpoint in which `TrainLoader.save` wrote the position, the loader continues from there, even
    in the middle of an epoch and with another number of workers. Each sample comes once per epoch.

    Parameters
    ----------
    config, as_tuple, with_index, **options
        As for `H5Dataset`.

    Raises
    ------
    ConfigError
        If the checkpoint has no position, or one that does not fit the options; also as for
        `H5Dataset`.

    Examples
    --------
    >>> def train(config):  # doctest: +SKIP
    ...     loader = h5async.ray.train_loader(hdf5_path="train.h5", shuffle="full")
    ...     for epoch in range(loader.epoch, 10):
    ...         for batch in loader:
    ...             loss = step(batch)
    ...         with tempfile.TemporaryDirectory() as folder:
    ...             loader.save(folder)  # beside the model
    ...             checkpoint = ray.train.Checkpoint.from_directory(folder)
    ...             ray.train.report({"loss": loss}, checkpoint=checkpoint)
    """
    context = ray.train.get_context()
    ranks = {"rank": context.get_world_rank(), "world_size": context.get_world_size()}
    config = ReaderConfig.load(config, **{**options, **ranks})
    loader = TrainLoader(config, as_tuple=as_tuple, with_index=with_index)
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            loader.load_state_dict(_position(Path(folder, _POSITION)))
    return loader


def _position(path: Path) -> Any:
    """Read the position, retrying in case another worker is just rewriting the same one."""
    for _ in range(_TRIES):
        try:
            return json.loads(path.read_text())
        except FileNotFoundError as error:
            raise ConfigError(
                f"the checkpoint has no {_POSITION}, so the loader's position is unknown;"
                " call the loader's save(folder) before you report a checkpoint"
            ) from error
        except json.JSONDecodeError:
            time.sleep(0.1)
    raise ConfigError(f"{path} is cut short or damaged; resume from an earlier checkpoint")
