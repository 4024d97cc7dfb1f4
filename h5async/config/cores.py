"""Tells how many cores this process may use: the default number of threads."""

from __future__ import annotations

import math
import os

from h5async.system.controlgroups import cpu_quota


def usable_cores() -> int:
    """Return the cores that this process may use, by its affinity and its CPU quota."""
    if hasattr(os, "process_cpu_count"):  # of Python 3.13; the user may have set another
        cores = os.process_cpu_count() or 1
    elif hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    quota = cpu_quota()
    return cores if quota is None else max(1, min(cores, math.ceil(quota)))
