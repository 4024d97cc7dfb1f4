"""Reads samples that Python makes: an iterable of mappings enters; columns leave."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sized
from functools import partial
from typing import Any

import numpy as np

from h5async.errors import DatasetError
from h5async.packing.schema import Block, Values, fits
from h5async.packing.sources.base import BLOCK_NBYTES, StreamedSource, Work, digest_of


class RowSource(StreamedSource):
    """Samples of an iterable, which must give the same ones again for a pack to be resumed.

    Mappings in samples are taken apart: ``{"obs": {"image": ...}}`` is ``obs/image``. The columns
    `varying` are of any length; others are if those of the first samples differ in length.
    """

    def __init__(self, rows: Iterable[Mapping[str, Any]], varying: Collection[str] = ()) -> None:
        self.name = type(rows).__name__
        self._samples, self._varying = rows, varying
        self.count = len(rows) if isinstance(rows, Sized) else None

    def digest(self) -> str:
        """Return a digest of its type: what an iterable would give is not known."""
        return digest_of([self.name, self.count])

    def blocks(self, start: int) -> Iterator[Work]:
        """Yield functions that make columns, of the samples behind the first ones."""
        rows: list[Any] = []
        nbytes, first = 0, start
        for row in itertools.islice(iter(self._samples), start, None):
            rows.append(row)
            nbytes += _nbytes(row)
            if len(rows) == self.rows or nbytes > BLOCK_NBYTES:
                yield partial(columns_of, rows, first, self._varying)
                rows, nbytes, first = [], 0, first + len(rows)
        if rows:
            yield partial(columns_of, rows, first, self._varying)


def _nbytes(value: Any) -> int:
    """Return the bytes of the arrays, bytes and strings of a sample."""
    if isinstance(value, Mapping):
        return sum(map(_nbytes, value.values()))
    return len(value) if isinstance(value, str | bytes) else getattr(value, "nbytes", 0)


def columns_of(rows: list[Any], first: int, varying: Collection[str]) -> Block:
    """Return the columns of samples, the first of which has the number `first`."""
    flat = [dict(_flat(row, first + number)) for number, row in enumerate(rows)]
    for number, row in enumerate(flat):
        if row.keys() != flat[0].keys():
            odd = sorted(row.keys() ^ flat[0].keys())
            raise DatasetError(
                f'sample {first + number:,}: only it, or only those before it, have "{odd[0]}"; all'
                " samples must have the same keys"
            )
    columns = {
        name: _values([row[name] for row in flat], name, first, is_varying=name in varying)
        for name in flat[0]
    }
    return Block(columns, len(rows))


def _flat(row: Any, number: int, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if not isinstance(row, Mapping):
        raise DatasetError(
            f"sample {number:,} is a {type(row).__name__}; a sample is a mapping of names to values"
        )
    for name, value in row.items():
        if isinstance(value, Mapping):
            yield from _flat(value, number, f"{prefix}{name}/")
        elif value is None:
            raise DatasetError(f'sample {number:,}: "{prefix}{name}" is None, which has no dtype')
        else:
            yield f"{prefix}{name}", value


def _values(several: list[Any], name: str, first: int, *, is_varying: bool) -> Values:
    if all(isinstance(one, str | bytes) for one in several):
        return several
    arrays = [np.asarray(one) for one in several]
    if is_varying or len({one.shape for one in arrays}) > 1:
        return arrays
    found = np.stack(arrays)
    for number, one in enumerate(arrays):
        if not fits(one.dtype, found.dtype, one):
            raise DatasetError(
                f'sample {first + number:,}: "{name}" is {one.dtype}; together with those beside it'
                f" it would be {found.dtype}, which does not have its value: convert them"
            )
    return found
