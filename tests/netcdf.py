"""Writes and reads files by netCDF4, in a process of its own.

The wheel of netCDF4 brings an HDF5 of its own with filters of its own, which those of hdf5plugin do
not get along with in one process.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_CODE = """
import pickle, sys, warnings
import netCDF4
import numpy as np

warnings.simplefilter("ignore")  # of attributes that it does not take

def write(path, values, names, attributes, unlimited, variables):
    fill = attributes.get("_FillValue")
    with netCDF4.Dataset(path, "w") as dataset:
        for name, extent in zip(names, values.shape):
            dataset.createDimension(name, None if name in unlimited else extent)
        for name in variables:
            extent = values.shape[names.index(name)]
            dataset.createVariable(name, "f8", (name,))[:] = np.arange(extent)
        variable = dataset.createVariable("v", values.dtype, names, fill_value=fill)
        variable.set_auto_maskandscale(False)
        variable.setncatts({k: v for k, v in attributes.items() if k != "_FillValue"})
        variable[...] = values

def mask(path):
    with netCDF4.Dataset(path) as dataset:
        return np.ma.getmaskarray(dataset["v"][...])

while True:
    try:
        name, arguments = pickle.load(sys.stdin.buffer)
    except EOFError:
        break
    pickle.dump(globals()[name](*arguments), sys.stdout.buffer)
    sys.stdout.flush()
"""


class Netcdf4:
    """What netCDF4 does, in its process."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def write(
        self,
        path: Any,
        values: Any,
        names: tuple[str, ...],
        attributes: dict[str, Any] | None = None,
        unlimited: tuple[str, ...] = (),
        variables: tuple[str, ...] = (),
    ) -> None:
        """Write a variable `v`, with coordinate variables for some of its dimensions."""
        self._call("write", str(path), values, names, attributes or {}, unlimited, variables)

    def mask(self, path: Any) -> Any:
        """Return what netCDF4 masks of `v`."""
        return self._call("mask", str(path))

    def _call(self, name: str, *arguments: Any) -> Any:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        pickle.dump((name, arguments), stdin)
        stdin.flush()
        return pickle.load(stdout)  # EOFError: it has said on stderr why it has ended


@contextmanager
def netcdf4_process() -> Iterator[Netcdf4]:
    """Start the process, which ends with the context."""
    process = subprocess.Popen(
        [sys.executable, "-c", _CODE], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with process:
        yield Netcdf4(process)
