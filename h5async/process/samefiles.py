"""Checks that a new helper process finds the same files as the first one."""

from __future__ import annotations

from h5async.errors import ReadError
from h5async.index.fingerprint import fingerprint
from h5async.index.layout import DatasetLayout
from h5async.process.messages import Opened
from h5async.samples.fieldkind import are_same

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
    kinds = zip(before.kinds.values(), now.kinds.values(), strict=True)
    return all(type(one) is type(other) and one.is_same(other) for one, other in kinds)


def _is_same(one: DatasetLayout, other: DatasetLayout) -> bool:
    return (
        _files(one) == _files(other)
        and fingerprint([one], has_places=True) == fingerprint([other], has_places=True)
        and one.file_samples == other.file_samples
        and are_same(one.spans, other.spans)
        and are_same(one.lengths, other.lengths)
    )


def _files(layout: DatasetLayout) -> list[object]:
    leaves = [(leaf.file, leaf.stamp.file_id) for leaf in layout.leaves()]
    return [*leaves, *((heap.file, heap.stamp.file_id) for heap in layout.heaps)]
