"""For pytest, where GPUs are simulated: each test has a seed, and fails if there is a complaint."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

import simulated_gpu
from simulated_gpu import Simulation


def pytest_configure(config: pytest.Config) -> None:
    """Have this process, and those that its tests start, write complaints to one file."""
    worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
    path = Path(os.environ["SIMULATED_GPU_RESULTS"], f"complaints-{worker}.txt")
    os.environ["SIMULATED_GPU_COMPLAINTS"] = str(path)


@pytest.fixture
def simulation(_no_complaints: Simulation) -> Simulation:
    """Return what a test may ask and set; it is undone afterwards."""
    return _no_complaints


@pytest.fixture(autouse=True)
def _no_complaints(request: pytest.FixtureRequest) -> Iterator[Simulation]:
    """Draw the order of work anew for each test, and fail one that is complained of."""
    found = simulated_gpu.simulation()
    is_wrong = request.node.get_closest_marker("wrong_on_purpose") is not None
    seed = zlib.crc32(f"{request.node.nodeid} {found.seed}".encode())
    found.reset(seed // 4 * 4 + 1 if is_wrong else seed)  # all work is late, so that it shows
    yield found
    found.reset()
    complaints = found.complaints()
    if complaints and not is_wrong:
        text = "the simulated GPU complains, of this test or of what an earlier one left behind:\n"
        pytest.fail(text + "\n".join(complaints), pytrace=False)
