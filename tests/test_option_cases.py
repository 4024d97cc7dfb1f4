"""Random combinations of options, against NumPy on h5py's arrays (`scripts/fuzz_options.py`)."""

from __future__ import annotations

from pathlib import Path

import pytest
from optioncases import try_case


@pytest.mark.sampled(40)
@pytest.mark.parametrize("number", range(600))
def test_what_is_delivered_is_right(number: int, tmp_path: Path):
    try_case(1, number, tmp_path, helpers=False)


@pytest.mark.sampled(40)
@pytest.mark.parametrize("number", range(600))
def test_what_is_delivered_of_far_files_is_right(number: int, tmp_path: Path):
    try_case(2, number, tmp_path, far=True)
