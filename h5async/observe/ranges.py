"""Tells other profilers what is done in Python: ranges of NVTX and of PyTorch's profiler.

Both are imported on request only.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

from h5async.errors import MissingPackageError
from h5async.system.timeline import OpenRange


def nvtx_ranges() -> OpenRange:
    """Return a function that opens ranges of NVTX, which Nsight Systems shows.

    Raises `MissingPackageError` if CuPy, which has NVTX, is not installed.
    """
    try:
        nvtx = importlib.import_module("cupy.cuda.nvtx")
    except ImportError as error:
        raise MissingPackageError(
            f"nvtx=True needs CuPy, which has NVTX ({error}); install it with: pip install"
            " 'h5async[cuda13]', or 'h5async[cuda12]' for a driver of CUDA 12"
        ) from error
    return partial(_open_nvtx, nvtx)


def _open_nvtx(nvtx: Any, name: str) -> Callable[[], object]:
    nvtx.RangePush(name)
    close: Callable[[], object] = nvtx.RangePop
    return close


def torch_ranges() -> OpenRange:
    """Return a function that opens ranges of `torch.profiler.record_function`.

    Raises `MissingPackageError` if PyTorch is not installed.
    """
    try:
        profiler = importlib.import_module("torch.profiler")
    except ImportError as error:
        raise MissingPackageError(
            f"torch=True needs PyTorch ({error}); install it as https://pytorch.org says"
        ) from error
    return partial(_open_torch, profiler.record_function)


def _open_torch(record_function: Any, name: str) -> Callable[[], object]:
    opened = record_function(name)
    opened.__enter__()
    return partial(opened.__exit__, None, None, None)
