"""Reads what HDF5 only gives converted out of a dataset's object header, as it is stored.

An open dataset enters; the bytes of its fill value or of its compact values leave. Elements of
variable length are references there ("Data Object Headers" of the HDF5 file format specification).
HDF5 has read the header before, so that it is a valid one; whatever is not as expected is left to
h5py.
"""

from __future__ import annotations

from collections.abc import Iterator

import h5py

from h5async.index.obstacles import NotDirectError
from h5async.io.stores import Source

_FILL_VALUE, _LAYOUT, _CONTINUATION = 0x0005, 0x0008, 0x0010  # types of messages
_IS_SHARED = 2  # a flag: the message lies elsewhere
_MOST_BLOCKS, _MOST_NBYTES = 64, 1 << 26
_HAS_TIMES, _HAS_PHASES, _HAS_ORDER = 32, 16, 4  # flags of a header of version 2


def stored_fill(dataset: h5py.h5d.DatasetID, source: Source) -> bytes:
    """Return the fill value of a dataset as stored; b"": zeros.

    Parameters
    ----------
    dataset
        One with a fill value.
    source
        Its file.

    Raises
    ------
    NotDirectError
        If it cannot be found.
    """
    body = _message(dataset, source, _FILL_VALUE)
    if body[0] == 3:
        return _counted(body, 2, 4) if body[1] & 32 else b""
    if body[0] not in (1, 2):
        raise NotDirectError(f"a fill value of version {body[0]}")
    return _counted(body, 4, 4) if body[3] else b""


def stored_compact(dataset: h5py.h5d.DatasetID, source: Source) -> bytes:
    """Return the values of a compact dataset as stored; see `stored_fill`."""
    body = _message(dataset, source, _LAYOUT)
    if body[0] not in (3, 4, 5) or body[1] != 0:
        raise NotDirectError(f"compact values in a layout of version {body[0]}")
    return _counted(body, 2, 2)


def _counted(body: bytes, at: int, width: int) -> bytes:
    """Return bytes that follow their number."""
    begin = at + width
    end = begin + int.from_bytes(body[at:begin], "little")
    if end > len(body):
        raise NotDirectError(_UNKNOWN)
    return body[begin:end]


_UNKNOWN = "an object header of an unknown form"


def _message(dataset: h5py.h5d.DatasetID, source: Source, kind: int) -> bytes:
    """Return the body of the only message of a type."""
    created = h5py.h5i.get_file_id(dataset).get_create_plist()
    base, widths = int(created.get_userblock()), created.get_sizes()
    address = base + int(h5py.h5o.get_info(dataset).addr)
    found = [
        (body, flags) for one, flags, body in messages(source, address, base, widths)
        if one == kind
    ]  # fmt: skip
    if len(found) != 1 or found[0][1] & _IS_SHARED or len(found[0][0]) < 4:
        raise NotDirectError(_UNKNOWN)
    return found[0][0]


def messages(
    source: Source, address: int, base: int, widths: tuple[int, int]
) -> Iterator[tuple[int, int, bytes]]:
    """Yield type, flags and body of each message of a header."""
    head = _read(source, address, 64)
    is_second = head[:4] == b"OHDR"
    extra = 0  # bytes between the head of a message and its body
    if is_second:
        flags = head[5]
        at = 6 + 16 * bool(flags & _HAS_TIMES) + 4 * bool(flags & _HAS_PHASES)
        width = 1 << (flags & 3)
        nbytes = int.from_bytes(head[at : at + width], "little")
        extra = 2 * bool(flags & _HAS_ORDER)
        blocks = [(address + at + width, nbytes)]
    elif head[0] == 1:
        blocks = [(address + 16, int.from_bytes(head[8:12], "little"))]
    else:
        raise NotDirectError(_UNKNOWN)
    head_nbytes = 4 + extra if is_second else 8
    for number, (begin, nbytes) in enumerate(blocks):  # (which grows)
        if number == _MOST_BLOCKS:
            raise NotDirectError(_UNKNOWN)
        block, at = _read(source, begin, nbytes), 0
        while at + head_nbytes <= len(block):
            wide = 1 if is_second else 2  # bytes of a type
            kind = int.from_bytes(block[at : at + wide], "little")
            size = int.from_bytes(block[at + wide : at + wide + 2], "little")
            flags = block[at + wide + 2]
            body = block[at + head_nbytes : at + head_nbytes + size]
            if len(body) < size:
                raise NotDirectError(_UNKNOWN)
            if kind == _CONTINUATION:
                follows = base + int.from_bytes(body[: widths[0]], "little")
                length = int.from_bytes(body[widths[0] : sum(widths)], "little")
                # A signature and a checksum enclose those of version 2.
                blocks.append((follows + 4, length - 8) if is_second else (follows, length))
            else:
                yield kind, flags, body
            at += head_nbytes + size


def _read(source: Source, offset: int, nbytes: int) -> bytes:
    if not (0 <= offset < 1 << 63 and 0 <= nbytes <= _MOST_NBYTES):
        raise NotDirectError(_UNKNOWN)
    found = source.read(offset, nbytes)
    if len(found) < min(nbytes, 16):
        raise NotDirectError(_UNKNOWN)
    return found
