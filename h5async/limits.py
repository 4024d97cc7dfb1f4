"""What a reader would take of the memory enters; an error leaves where that is too much.

A file of a few bytes may declare rows, or chunks, of any size.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from h5async.config import ReaderConfig
from h5async.errors import ConfigError
from h5async.layout import DatasetLayout
from h5async.transform import RowTransform

_SHARE = 0.5  # of the memory that is free, where no limit is given


def free_memory_nbytes() -> int:
    """Return the memory that this process can still have, by the system and its control group."""
    found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                found = int(line.split()[1]) * 1024
    except OSError:
        pass
    try:
        group = Path("/sys/fs/cgroup")
        left = int((group / "memory.max").read_text()) - int((group / "memory.current").read_text())
        for line in (group / "memory.stat").read_text().splitlines():
            name, count = line.split()
            if name in ("active_file", "inactive_file"):  # the page cache, which makes way
                left += int(count)
        found = min(found, max(0, left))
    except (OSError, ValueError):  # there is no group, or no limit ("max")
        pass
    return found


def check_memory(
    config: ReaderConfig,
    layouts: Mapping[str, DatasetLayout],
    transforms: Mapping[str, RowTransform],
    rows: int,
) -> None:
    """See that all slots together, and any one chunk, are within ``max_batch_bytes``.

    Raises
    ------
    ConfigError
        If they are not.
    """
    limit, whose = config.max_batch_bytes, "max_batch_bytes"
    if limit is None:
        free = free_memory_nbytes()
        limit, whose = int(free * _SHARE), f"max_batch_bytes: half of the {free:,} that are free"
    needed = {
        name: config.prefetch * rows * (t.raw_nbytes + (0 if t.is_identity else t.nbytes))
        for name, t in transforms.items()
    }
    total = sum(needed.values())
    if total > limit:
        largest = layouts[max(needed, key=lambda name: needed[name])]
        raise ConfigError(
            f'{largest.file}: dataset "{largest.path}" of shape {largest.shape}: {config.prefetch}'
            f" batches of {rows} samples take {total:,} bytes and do not fit in memory, of which"
            f" they may take {limit:,} ({whose}); make batch_size or prefetch smaller, or set"
            " max_batch_bytes if you trust the file"
        )
    for layout in layouts.values():
        for leaf in layout.leaves():
            if leaf.filters and leaf.chunk_nbytes > limit:
                raise ConfigError(
                    f'{leaf.file}: dataset "{leaf.path}": a chunk of shape {leaf.chunk_shape}'
                    f" decodes to {leaf.chunk_nbytes:,} bytes, of {limit:,} that it may take"
                    f" ({whose}); set max_batch_bytes if you trust the file"
                )
