"""Writes HDF5 files for training: into HDF5, and into the right HDF5.

The package is also the function: ``h5async.pack(sources, out)`` is `packing.pack`.
"""

import sys
from types import ModuleType
from typing import Any


class _Callable(ModuleType):
    def __call__(self, *args: Any, **options: Any) -> Any:
        from h5async.pack.packing import pack

        return pack(*args, **options)


sys.modules[__name__].__class__ = _Callable
