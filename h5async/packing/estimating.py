"""Estimates what packing takes: sources and options enter; samples, bytes and seconds leave.

A few blocks are made, as `packing` makes them, and nothing is written.
"""

from __future__ import annotations

from collections.abc import Mapping
from time import perf_counter
from typing import Any, NamedTuple, Unpack

from h5async.errors import DatasetError
from h5async.packing.pack import Blocks
from h5async.packing.packedfile import chunks_of
from h5async.packing.packoptions import PackKeywords, PackOptions
from h5async.packing.sources.finding import open_source

_PROBE_SECONDS = 1.0


class Estimate(NamedTuple):
    """What packing takes, about.

    `samples`, `nbytes` and `seconds` are None if the source does not say how many samples it has;
    `probed` is how many were looked at, and `columns` say how each column is stored.
    """

    samples: int | None
    nbytes: int | None
    seconds: float | None
    probed: int
    columns: Mapping[str, str]


def estimate(sources: Any, **options: Unpack[PackKeywords]) -> Estimate:
    """Estimate what `pack` takes with the same arguments; raises like that."""
    chosen = PackOptions(**options)
    source = open_source(sources, chosen)
    first, began = None, perf_counter()
    probed = nbytes = 0
    with Blocks(source, chosen) as blocks:
        blocks.begin(0, None)
        while blocks.following is not None:
            block = blocks.take()
            first = block if first is None and block.kept else first
            probed, nbytes = probed + block.taken, nbytes + block.nbytes
            if perf_counter() - began > _PROBE_SECONDS and first is not None:
                break
    seconds = perf_counter() - began
    if first is None:
        raise DatasetError(f"{source.name} has no samples that can be packed")
    columns = {
        name: chunks.text for name, chunks in chunks_of(first, blocks.encoded, chosen).items()
    }
    if source.count is None:
        return Estimate(None, None, None, probed, columns)
    share = source.count / probed
    return Estimate(source.count, round(nbytes * share), seconds * share, probed, columns)
