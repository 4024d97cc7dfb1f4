"""Reads HDF5 files in Ray: blocks for Ray Data, and batches for the workers of Ray Train.

Only this folder and `system/jobs.py` import Ray; ``import h5async`` does not.
"""

from typing import TYPE_CHECKING, Any

from h5async.errors import needs_package

with needs_package("'h5async[ray]'", "datasets of Ray"):
    from h5async.ray.datasource import read_hdf5

if TYPE_CHECKING:
    from h5async.ray.training import TrainLoader, train_loader


def __getattr__(name: str) -> Any:
    """Import names that need PyTorch on first use, since Ray Data does without it."""
    if name not in ("TrainLoader", "train_loader"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from h5async.ray import training

    return getattr(training, name)


__all__ = ["TrainLoader", "read_hdf5", "train_loader"]
