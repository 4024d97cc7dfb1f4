"""Python runs this in each process where ``scripts/test_gpu`` has set PYTHONPATH."""

import os

if "SIMULATED_GPU" in os.environ:
    from simulated_gpu import under_cupy

    under_cupy.wait_for_cupy()
