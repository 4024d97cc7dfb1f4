"""Starts a small cluster of Ray for tests."""

from __future__ import annotations

import os
from typing import Any


def start_cluster(**options: Any) -> None:
    """Start a cluster of two CPUs, and join it."""
    import ray

    os.environ["RAY_AUTH_MODE"] = "disabled"
    # A busy machine is not a dead node.
    os.environ |= {"RAY_health_check_timeout_ms": "60000", "RAY_health_check_period_ms": "10000"}
    ray.init(
        address="local",  # not one that others run here
        num_cpus=2,
        include_dashboard=False,
        logging_level="ERROR",
        log_to_driver=False,
        **options,
    )
