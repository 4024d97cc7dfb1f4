"""Checks that a new helper process finds the same files as the first one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from h5async.errors import ReadError
from h5async.index.fingerprint import fingerprint
from h5async.index.layout import DatasetLayout
from h5async.process.messages import Opened

_FOUND = (
    "has changed since the reader was made, which a new helper process found when it took the"
    " place of one that died"
)


def check_same(before: Opened, now: Opened, found: str = _FOUND) -> None:
    """Raise ReadError if a new helper found other files or samples than the first one.

    `found` completes the message; its subject is what differs.
    """
    file, what = next(iter(before.layouts.values())).file, None
    changed = _changed_layout(before, now)
    if changed is not None:
        file, what = changed.file, "this file"
    elif not before.chosen.is_same(now.chosen):
        what = "what indices or weights are read from"
    elif not _has_same_columns(before, now):
        what = "a table of categories or columns"
    if what is not None:
        raise ReadError(f"{file}: {what} {found}; make a new reader")


def _changed_layout(before: Opened, now: Opened) -> DatasetLayout | None:
    if list(before.layouts) != list(now.layouts):  # a path leads to data of another kind
        return next(iter(before.layouts.values()))
    for name, layout in before.layouts.items():
        if not _is_same(layout, now.layouts[name]):
            pairs = zip(layout.leaves(), now.layouts[name].leaves(), strict=False)
            return next((old for old, new in pairs if not _is_same(old, new)), layout)
    return None


def _has_same_columns(before: Opened, now: Opened) -> bool:
    """Compare the meaning of codes, and which columns are delivered."""
    if list(before.shapes) != list(now.shapes) or list(before.categories) != list(now.categories):
        return False
    shapes = zip(before.shapes.values(), now.shapes.values(), strict=True)
    tables = zip(before.categories.values(), now.categories.values(), strict=True)
    return all(
        a.columns == b.columns and _are_all_equal(a.places, b.places) for a, b in shapes
    ) and all(a.names == b.names and _are_all_equal(a.tables, b.tables) for a, b in tables)


def _are_all_equal(
    several: Sequence[NDArray[Any] | None] | None, others: Sequence[NDArray[Any] | None] | None
) -> bool:
    if several is None or others is None:
        return several is others
    return len(several) == len(others) and all(
        one is other if one is None or other is None else np.array_equal(one, other)
        for one, other in zip(several, others, strict=True)
    )


def _is_same(one: DatasetLayout, other: DatasetLayout) -> bool:
    return (
        _files(one) == _files(other)
        and fingerprint([one], has_places=True) == fingerprint([other], has_places=True)
        and one.file_samples == other.file_samples
        and _are_all_equal((one.spans,), (other.spans,))
        and _are_all_equal((one.lengths,), (other.lengths,))
    )


def _files(layout: DatasetLayout) -> list[object]:
    leaves = [(leaf.file, leaf.stamp.file_id) for leaf in layout.leaves()]
    return [*leaves, *((heap.file, heap.stamp.file_id) for heap in layout.heaps)]
