"""Checks that a new helper process finds the files as the first one did."""

from __future__ import annotations

from h5async.errors import ReadError
from h5async.index.fingerprint import fingerprint
from h5async.index.layout import DatasetLayout
from h5async.process.messages import Opened

_FOUND = (
    "has changed since the reader was made, which a new helper process found when it took the"
    " place of one that died"
)


def check_same(before: Opened, now: Opened, found: str = _FOUND) -> None:
    """Compare what a new helper found in the files with what the first one found.

    Parameters
    ----------
    before, now
        What the first one, and the new one found.
    found
        What is to be said of what differs, which is the subject.

    Raises
    ------
    ReadError
        If a file was replaced or rewritten, or other samples are chosen.
    """
    for name, layout in before.layouts.items():
        if _is_same(layout, now.layouts[name]):
            continue
        pairs = zip(layout.leaves(), now.layouts[name].leaves(), strict=False)
        changed = next((old for old, new in pairs if not _is_same(old, new)), layout)
        raise ReadError(f"{changed.file}: this file {found}; make a new reader")
    if not before.chosen.is_same(now.chosen):
        first = next(iter(before.layouts.values()))
        raise ReadError(
            f"{first.file}: what indices or weights are read from {found}; make a new reader"
        )


def _is_same(one: DatasetLayout, other: DatasetLayout) -> bool:
    return _files(one) == _files(other) and fingerprint([one]) == fingerprint([other])


def _files(layout: DatasetLayout) -> list[object]:
    return [(leaf.file, leaf.stamp.file_id) for leaf in layout.leaves()]
