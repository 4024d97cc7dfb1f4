"""What importing the package, and one small batch, cost at most, counted and not timed."""

from __future__ import annotations

import subprocess
import sys

import h5py
import numpy as np
import pytest

from h5async import AsyncReader, ReaderConfig
from h5async.core.binding import load_core

NEEDED_LATER = (
    "cloudpickle",
    "cupy",
    "torch",
    "h5async.deliver.cuda",
    "h5async.deliver.devicedecode",
    "h5async.deliver.gpu",
    "h5async.order.window",
    "h5async.process",
)
MOST_CALLS = 175  # of Python's and C's functions, for a batch of one row; 158 were counted


def imported_by(code: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys\nprint(*sys.modules)"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return set(done.stdout.split())


@pytest.mark.slow
def test_the_import_loads_nothing_that_only_some_readers_need():
    assert imported_by("import h5async").isdisjoint(NEEDED_LATER)


@pytest.mark.slow
def test_a_reader_on_the_host_loads_nothing_of_gpus_and_helper_processes(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["data"] = np.arange(8)
    code = f"""
from h5async import AsyncReader
with AsyncReader(hdf5_path={str(tmp_path / "a.h5")!r}, labels_field=None, device="cpu") as reader:
    reader.get_next_batch()
"""
    assert imported_by(code).isdisjoint(NEEDED_LATER)


def test_the_options_are_documented_when_somebody_reads_of_them():
    assert "hdf5_path\n    " in (ReaderConfig.__doc__ or "")


@pytest.mark.skipif(load_core() is None, reason="counts what the compiled core saves")
def test_a_batch_of_one_row_takes_few_calls(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["data"] = np.zeros((1000, 16), np.uint8)
    calls = []
    with AsyncReader(
        hdf5_path=tmp_path / "a.h5",
        labels_field=None,
        batch_size=1,
        shuffle="full",
        num_threads=0,
        device="cpu",
    ) as reader:
        for _ in range(20):
            reader.get_next_batch()
        sys.setprofile(lambda _frame, event, _argument: calls.append(event))
        try:
            for _ in range(100):
                reader.get_next_batch()
        finally:
            sys.setprofile(None)
    assert sum(event in ("call", "c_call") for event in calls) <= 100 * MOST_CALLS
