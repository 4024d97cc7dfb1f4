"""Finds the number of cores that this process may use: the default number of threads."""

from __future__ import annotations

import math
import os

from h5async.system.controlgroups import cpu_quota


def usable_cores() -> int:
    """Return the number of cores that affinity and CPU quota allow."""
    if hasattr(os, "process_cpu_count"):  # Python 3.13; users may override it
        cores = os.process_cpu_count() or 1
    elif hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    quota = cpu_quota()
    return cores if quota is None else max(1, min(cores, math.ceil(quota)))
