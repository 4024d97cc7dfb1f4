"""The core that H5ASYNC_CORE names."""

from __future__ import annotations

import os
import subprocess
import sys

import h5py
import pytest

from h5async import (
    ConfigError,
)
from h5async.core.binding import _core_or_reason, load_core

SECONDS = 60  # for a subprocess


def run(code, *arguments, **environment):
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )


OPEN = """
import sys
import h5async
print("imported")
try:
    h5async.AsyncReader(hdf5_path=sys.argv[1], device="cpu", workers=sys.argv[2])
except h5async.H5AsyncError as error:
    print(error)
"""


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["thread", "process"])
@pytest.mark.parametrize("chosen", ["1", "/no/such/core.so", __file__, "another library"])
def test_a_core_that_is_none(plain, chosen, workers):
    if chosen == "another library":
        chosen = h5py.h5p.__file__
    result = run(OPEN, plain, workers, H5ASYNC_CORE=chosen)
    assert result.returncode == 0, result.stderr
    imported, message = result.stdout.splitlines()
    assert imported == "imported"
    assert f"H5ASYNC_CORE={chosen} does not name a loadable core" in message
    assert "set it to 0 to use none" in message


def test_a_core_that_is_none_is_told_again(monkeypatch):
    monkeypatch.setenv("H5ASYNC_CORE", "1")
    _core_or_reason.cache_clear()
    try:
        for _ in range(2):
            with pytest.raises(ConfigError, match="H5ASYNC_CORE=1"):
                load_core()
    finally:
        monkeypatch.undo()
        _core_or_reason.cache_clear()
