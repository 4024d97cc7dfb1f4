"""The journal of a file that is being written: a commit enters, and leaves as it was, or an error.

A line of text with a digest of all that follows, a line of JSON, and the bytes of the pieces.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from h5async.errors import DamagedError
from h5async.packing.partialfile import PartialFile, Piece

_FORMAT = b"h5async journal 1 "
_ENDS_NBYTES = 1 << 16


class Journal(NamedTuple):
    """A commit."""

    digest: str  # what the file is made of
    size: int  # of the file
    state: Mapping[str, Any] | None
    is_finished: bool
    fingerprint: str  # of the file, as it is after the commit
    pieces: Sequence[Piece]  # which are to be written to the file
    direct: Sequence[tuple[int, int]] = ()  # ranges that are written to whatever is committed


def fingerprint(file: PartialFile) -> str:
    """Return a digest of the first and last bytes of a file, but for those that may change."""
    found = hashlib.blake2b(digest_size=16)
    for begin in (0, max(0, file.end - _ENDS_NBYTES)):
        file.seek(begin)
        data = bytearray(min(_ENDS_NBYTES, file.end))
        file.readinto(data)
        for start, stop in file.direct:
            first, last = max(0, start - begin), min(len(data), stop - begin)
            if first < last:
                data[first:last] = bytes(last - first)
        found.update(data)
    return found.hexdigest()


def write_journal(path: Path, journal: Journal) -> None:
    """Replace the journal at a path by another, so that one of them is whole at any moment."""
    fields = journal._asdict()
    fields["pieces"] = [(offset, len(data)) for offset, data in journal.pieces]
    blocks = [json.dumps(fields).encode() + b"\n", *(data for _, data in journal.pieces)]
    whole = hashlib.blake2b(digest_size=16)
    for block in blocks:
        whole.update(block)
    beside = path.with_name(f"{path.name}.new")
    with open(beside, "wb") as file:
        file.writelines([_FORMAT, whole.hexdigest().encode(), b"\n", *blocks])
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)
    synchronize_folder(path.parent)


def read_journal(path: Path) -> Journal | None:
    """Return the journal at a path, or None if there is none."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    head, _, rest = content.partition(b"\n")
    if head != _FORMAT + hashlib.blake2b(rest, digest_size=16).hexdigest().encode():
        raise DamagedError(
            f"{path} is damaged, or no journal of h5async; without it, writing cannot be gone on "
            "with: delete it, and what was written beside it, and begin anew",
            filename=str(path),
        )
    line, _, data = rest.partition(b"\n")
    fields, pieces, at = json.loads(line), [], 0
    for offset, nbytes in fields.pop("pieces"):
        pieces.append((offset, data[at : at + nbytes]))
        at += nbytes
    direct = [(begin, end) for begin, end in fields.pop("direct", ())]
    return Journal(pieces=pieces, direct=direct, **fields)


def synchronize_folder(folder: Path) -> None:
    """Wait until the names of files in a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
