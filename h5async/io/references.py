"""Guesses which metadata HDF5 will read: superblocks, object headers, groups of any version.

The bytes of a structure enter; the places that it refers to leave, as the HDF5 File Format
Specification (version 3.0) describes them. A guess only saves time: HDF5 reads and checks
everything itself. So bytes that make no sense yield no guess, and never an error. Pure.

`structures`, `changeable` and `header_blocks` are no guesses; `index/alikefiles.py` uses them.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Literal, NamedTuple

from h5async.io.indexreferences import (
    NONSENSE,
    Cursor,
    Find,
    Format,
    Place,
    chunk_tree,
    extensible_array,
    fixed_array,
    fractal_heap,
    group_tree,
    tree_header,
)

SIGNATURE = b"\x89HDF\r\n\x1a\n"
SUPERBLOCK_NBYTES = 128  # at most
_LEAST_USER_BLOCK = 512
_HEADER_NBYTES = 2048  # of an object header whose size is not known yet
_MOST_HEADER_NBYTES = 1 << 20
_MOST_HEAP_NBYTES = 1 << 24
_CONTINUATION = 0x10
_ATTRIBUTE, _MODIFIED = 0x0C, 0x12
IS_SHARED = 2  # a flag of a message that is stored elsewhere
_LEAST_HEADER_NBYTES, _MOST_BLOCKS = 64, 64
_HAS_TIMES = 0x20  # a flag of an object header of version 2
_HEAD_V1_NBYTES = 8  # of a message; 4 or 6 in version 2
_OLD_SUPERBLOCK_NBYTES, _ROOT_AT = 96, 56  # where in it the entry of the root group is
_SUPERBLOCK_NBYTES = 48  # of version 2 and 3
_SYMBOLS = b"SNOD\x01\0"
_ENTRY = struct.Struct("<QQIIQQ")  # of a symbol table: name, header, kind of what follows it
_ATTRIBUTE_HEAD = struct.Struct("<BBHHH")  # version, flags; sizes: name, type, dataspace
_OF_CHUNKS = (b"TREE\x01", b"FAHD", b"FADB")
_WITH_CHECKSUM = (b"OHDR", b"OCHK")
_LEFT_TO_HDF5 = (b"FRHP", b"BTHD", b"EAHD")
_HEAD_V1, _HEAD_V2 = struct.Struct("<HHB"), struct.Struct("<BHB")  # type, size, flags


def read_superblock(data: bytes, at: int) -> tuple[Format, Place]:
    """Return the contents of a superblock at an offset, and the place of the root group.

    Raises one of `NONSENSE` if there is no superblock.
    """
    found = Cursor(data, Format(), Place(at, len(data)))
    found.expect(SIGNATURE)
    version = found.number()
    if version > 3:
        raise ValueError("a superblock of another version")
    form = _old_sizes(found, version) if version < 2 else Format(0, found.number(), found.number())
    found.form = form
    found.take(1 if version > 1 else 0)
    base = found.address()
    found.address()  # of free space, or the extension
    end = found.address()
    found.form = form._replace(base=base, end=end)
    found.take(2 * form.offset_nbytes if version < 2 else 0)  # of the driver; the name
    return found.form, Place(found.address(), _HEADER_NBYTES, object_header)


def superblock_offsets(nbytes: int) -> Iterator[int]:
    """Yield the offsets at which HDF5 looks for the superblock, with or without a user block."""
    at = 0
    while at + len(SIGNATURE) <= nbytes:
        yield at
        at = 2 * at or _LEAST_USER_BLOCK


def _old_sizes(found: Cursor, version: int) -> Format:
    found.take(4)
    sizes = found.number(), found.number()
    found.take(1)
    leaf_k, group_k = found.number(2), found.number(2)
    found.take(4)
    chunk_k = found.number(2) if version else Format().chunk_k
    found.take(2 if version else 0)
    return Format(0, *sizes, chunk_k, group_k, leaf_k)


# --- object headers ------------------------------------------------------------------------------


def object_header(found: Cursor, *, is_whole: bool = False) -> Iterator[Place]:
    """Yield the places that an object header refers to: continuations, and those of messages."""
    nbytes, head_nbytes = _beginning(found)
    if found.rest < nbytes <= _MOST_HEADER_NBYTES and not is_whole:
        again = partial(object_header, is_whole=True)
        yield Place(found.place.offset, found.at + nbytes, again)
    else:
        yield from _named(found, nbytes, head_nbytes, found.place.offset)


def _beginning(found: Cursor) -> tuple[int, int]:
    """Read up to the first message; return the size of all messages, and of each one's head."""
    if found.data[:4] != b"OHDR":
        found.expect(b"\x01\0")
        found.take(6)
        nbytes = found.number(4)
        found.take(4)
        return nbytes, _HEAD_V1_NBYTES
    found.take(5)
    flags = found.number()
    found.take((16 if flags & 0x20 else 0) + (4 if flags & 0x10 else 0))
    return found.number(1 << (flags & 3)), 6 if flags & 4 else 4


def _continuation(found: Cursor, head_nbytes: int, owner: int) -> Iterator[Place]:
    nbytes = found.rest
    if head_nbytes != _HEAD_V1_NBYTES:
        found.expect(b"OCHK")
        nbytes -= 8
    yield from _named(found, nbytes, head_nbytes, owner)


def _messages(found: Cursor, nbytes: int, head_nbytes: int) -> Iterator[tuple[int, int, bytes]]:
    head = _HEAD_V1 if head_nbytes == _HEAD_V1_NBYTES else _HEAD_V2
    end = found.at + nbytes
    while found.at + head_nbytes <= end:
        kind, size, flags = head.unpack_from(found.data, found.at)
        found.at += head_nbytes
        yield kind, flags, found.take(size)


def _named(found: Cursor, nbytes: int, head_nbytes: int, owner: int) -> Iterator[Place]:
    """Yield the places that the messages of the object header at `owner` refer to."""
    for kind, flags, body in _messages(found, nbytes, head_nbytes):
        if kind != _CONTINUATION and kind not in _MESSAGES:
            continue
        begin = found.begin + found.at - len(body)
        message = Cursor(body, found.form, Place(owner, len(body)), begin)
        try:
            if kind == _CONTINUATION:
                offset, length = message.address(), min(message.length(), _MOST_HEADER_NBYTES)
                find = partial(_continuation, head_nbytes=head_nbytes, owner=owner)
                found.address_at = message.address_at
                yield Place(offset, length, find)
            elif not flags & IS_SHARED:
                for place in _MESSAGES[kind](message):
                    found.address_at = message.address_at
                    yield place
        except NONSENSE:
            continue


def header_messages(
    read: Callable[[int, int], bytes], at: int, form: Format
) -> Iterator[tuple[int, int, int, bytes]]:
    """Yield offset, type, flags and body of each message of an object header that HDF5 has read.

    `read` is given an offset in the file and a number of bytes. Raises one of `NONSENSE` if the
    header has an unknown form.
    """
    head = Cursor(read(at, _LEAST_HEADER_NBYTES), form, Place(at, _LEAST_HEADER_NBYTES))
    nbytes, head_nbytes = _beginning(head)
    blocks = [(at + head.at, nbytes)]
    for number, (begin, nbytes) in enumerate(blocks):  # (the list grows)
        if number == _MOST_BLOCKS or not (begin >= 0 and 0 <= nbytes <= _MOST_HEAP_NBYTES):
            raise ValueError("an object header of an unknown form")
        block = Cursor(read(begin, nbytes), form, Place(begin, nbytes))
        for kind, flags, body in _messages(block, nbytes, head_nbytes):
            if kind != _CONTINUATION:
                yield begin + block.at - len(body), kind, flags, body
                continue
            message = Cursor(body, form, block.place)
            offset, length = message.address(), message.length()
            is_first = head_nbytes == _HEAD_V1_NBYTES
            # In version 2, a block has a signature before its messages, and a checksum after them.
            blocks.append((offset, length) if is_first else (offset + 4, length - 8))


class Address(NamedTuple):
    """An address in a structure: where it is in the file, and where it leads to.

    HDF5 `may_ignore` it: a link to an object that is not asked for, or a copy, in a symbol table,
    of addresses that the object's header has, too.
    """

    at: int
    target: int
    may_ignore: bool = False


class Structure(NamedTuple):
    """A structure in a file: where it lies, and the addresses in it.

    Special kinds are the header of an object, and the index of the chunks of a dataset.
    """

    offset: int
    nbytes: int
    addresses: Sequence[Address] = ()
    kind: Literal["", "header", "chunks"] = ""
    has_checksum: bool = False  # of all bytes before it, in the last four bytes


def structures(
    read: Callable[[int, int], bytes], is_read: Callable[[Place, bool], bool]
) -> Iterator[Structure]:
    """Yield the structures of a file: its superblock, then those that HDF5 has read.

    Each comes after one with an address that leads to it. `read` is given an offset in the file and
    a number of bytes; `is_read`, a place, and whether an object header begins there: other
    structures are left out, with those they refer to. Raises one of `NONSENSE` at a structure that
    is not as expected, or of a kind that is left to HDF5.
    """
    beginning = read(0, _OLD_SUPERBLOCK_NBYTES)
    (form, root), version = read_superblock(beginning, 0), beginning[len(SIGNATURE)]
    if version == 1 or form[:3] != (0, 8, 8):
        raise ValueError("a superblock of another kind")
    if version:
        yield Structure(0, _SUPERBLOCK_NBYTES, [Address(36, root.offset)], has_checksum=True)
    else:
        addresses = [Address(_ROOT_AT + 8, root.offset), *_cached(beginning, _ROOT_AT, 0)]
        yield Structure(0, _OLD_SUPERBLOCK_NBYTES, addresses)
    todo, seen = [root], dict[int, int]()
    while todo:
        place = todo.pop()
        is_header, nbytes = place.find is object_header, place.nbytes
        if seen.get(place.offset, nbytes) != nbytes:
            raise ValueError("two structures in one place")
        if place.offset in seen or not is_read(place, is_header):
            continue
        seen[place.offset] = nbytes
        if is_header:
            nbytes = _header_nbytes(read, place)
        data, addresses = read(place.offset, nbytes), []
        if len(data) != nbytes or data[:4] in _LEFT_TO_HDF5:
            raise ValueError("a structure of another kind")
        if place.find is not None:
            found = Cursor(data, form, place)
            for one in place.find(found):
                if one.offset >= 0:
                    addresses.append(
                        Address(found.address_at, one.offset, one.find is object_header)
                    )
                    todo.append(one)
        if data.startswith(_SYMBOLS):
            for number in range(int.from_bytes(data[6:8], "little")):
                addresses += _cached(data, 8 + number * _ENTRY.size, place.offset)
        if data.startswith(_OF_CHUNKS):
            yield Structure(place.offset, nbytes, kind="chunks")
        else:
            kind: Literal["", "header"] = "header" if is_header else ""
            has_checksum = data.startswith(_WITH_CHECKSUM)
            yield Structure(place.offset, nbytes, addresses, kind, has_checksum)


def _header_nbytes(read: Callable[[int, int], bytes], place: Place) -> int:
    head = Cursor(read(place.offset, _LEAST_HEADER_NBYTES), Format(), place)
    nbytes, head_nbytes = _beginning(head)
    if nbytes > _MOST_HEADER_NBYTES:
        raise ValueError("a large object header")
    return head.at + nbytes + (0 if head_nbytes == _HEAD_V1_NBYTES else 4)


def header_blocks(read: Callable[[int, int], bytes], at: int) -> list[tuple[int, int, int]]:
    """Return the blocks of an object header in a file with numbers of 8 bytes.

    These are offset, length, and where in the file the address of the block is; -1 for the first
    one. One of `NONSENSE` is raised if the header has an unknown form.
    """
    first = Place(at, _header_nbytes(read, Place(at, _LEAST_HEADER_NBYTES)), object_header)
    blocks, todo = [(at, first.nbytes, -1)], [first]
    for place in todo:  # (the list grows)
        found = Cursor(read(place.offset, place.nbytes), Format(), place)
        for one in place.find(found) if place.find is not None else ():
            if isinstance(one.find, partial) and one.find.func is _continuation:
                blocks.append((one.offset, one.nbytes, found.address_at))
                todo.append(one)
        nbytes = sum(nbytes for _, nbytes, _ in blocks)
        if len(blocks) > _MOST_BLOCKS or nbytes >= _MOST_HEADER_NBYTES:
            raise ValueError("a large object header")
    return blocks


def _cached(data: bytes, at: int, begin: int) -> Iterator[Address]:
    """Yield the addresses that a symbol table entry has from the header of a group."""
    *_, kind, _, tree, heap = _ENTRY.unpack_from(data, at)
    if kind == 1:
        yield from (Address(begin + at + 24, tree, True), Address(begin + at + 32, heap, True))


def changeable(
    read: Callable[[int, int], bytes], header: int, asked: Sequence[bytes] | None
) -> Iterator[tuple[int, int]]:
    """Yield the ranges of an object header with times, and with the values of attributes.

    The latter are left out if `asked` is None. Raises one of `NONSENSE` if the header has an
    unknown form, an attribute that is `asked` for, or a message that leads to another object, such
    as a committed datatype.
    """
    signature, _, flags = struct.unpack("<4sBB", read(header, 6))
    if signature == b"OHDR" and flags & _HAS_TIMES:
        yield header + 6, 16
    for place, kind, flags, body in header_messages(read, header, Format()):
        if kind == _MODIFIED and len(body) == 8:
            yield place + 4, 4
        is_shared = flags & IS_SHARED
        if kind == _ATTRIBUTE and not is_shared:
            version, flags, *sizes = _ATTRIBUTE_HEAD.unpack_from(body)
            is_shared = version > 1 and flags  # its datatype, or dataspace
            at = _ATTRIBUTE_HEAD.size + (version == 3)
            name, _, _ = body[at : at + sizes[0]].partition(b"\0")
            if version not in (1, 2, 3) or name in (asked or ()):
                raise ValueError("an attribute that says more")
            begin = at + sum(-(-n // 8) * 8 if version == 1 else n for n in sizes)
            if asked is not None:
                yield place + begin, len(body) - begin
        if is_shared:
            raise ValueError("a shared message")


def _layout(found: Cursor) -> Iterator[Place]:
    version, form = found.number(), found.form
    if version < 3:
        rank, kind = found.number(), found.number()
        found.take(5)
        if kind == 2:
            yield chunk_tree(form, found.address(), rank)
    elif found.number() == 2:
        found.take(1 if version > 3 else 0)
        rank = found.number()
        if version == 3:
            yield chunk_tree(form, found.address(), rank)
            return
        extent_nbytes = found.number()
        found.take(rank * extent_nbytes)
        parameters_nbytes, make = _INDICES.get(found.number(), (0, None))
        found.take(parameters_nbytes)
        if make is not None:
            yield make(form, found.address())


def _attribute_info(found: Cursor) -> Iterator[Place]:
    found.take(1)
    flags = found.number()
    found.take(2 if flags & 1 else 0)
    yield fractal_heap(found.form, found.address())
    for _ in range(2 if flags & 2 else 1):
        yield tree_header(found.form, found.address())


# --- groups --------------------------------------------------------------------------------------


def _symbol_table(found: Cursor) -> Iterator[Place]:
    form, group = found.form, found.place.offset
    entry_nbytes = 2 * form.offset_nbytes + 24
    find = partial(_symbols, group=group)
    symbols = Place(0, 8 + 2 * form.leaf_k * entry_nbytes, find)
    yield group_tree(form, found.address(), symbols)
    heap_nbytes = 8 + 2 * form.length_nbytes + form.offset_nbytes
    yield Place(found.address(), heap_nbytes, _local_heap)


def _symbols(found: Cursor, group: int) -> Iterator[Place]:
    found.expect(_SYMBOLS)
    for _ in range(found.number(2)):
        found.take(found.form.offset_nbytes)
        yield Place(found.address(), _HEADER_NBYTES, object_header, group)
        found.take(24)


def _local_heap(found: Cursor) -> Iterator[Place]:
    found.expect(b"HEAP\0\0\0\0")
    nbytes = min(found.length(), _MOST_HEAP_NBYTES)
    found.length()
    yield Place(found.address(), nbytes)


def _link_info(found: Cursor) -> Iterator[Place]:
    found.take(1)
    flags = found.number()
    found.take(8 if flags & 1 else 0)
    links = partial(_links, group=found.place.offset)
    yield fractal_heap(found.form, found.address(), links)
    for _ in range(2 if flags & 2 else 1):
        yield tree_header(found.form, found.address())


def _links(found: Cursor, group: int) -> Iterator[Place]:
    """Yield the objects that consecutive links lead to."""
    while True:
        yield from _link(found, group)


def _link(found: Cursor, group: int = -1) -> Iterator[Place]:
    found.expect(b"\x01")
    flags = found.number()
    kind = found.number() if flags & 8 else 0
    found.take((8 if flags & 4 else 0) + (1 if flags & 16 else 0))
    name_nbytes = found.number(1 << (flags & 3))
    found.take(name_nbytes)
    if kind:
        found.take(found.number(2))
    else:
        group = found.place.offset if group < 0 else group
        yield Place(found.address(), _HEADER_NBYTES, object_header, group)


_MESSAGES: dict[int, Find] = {
    0x02: _link_info,
    0x06: _link,
    0x08: _layout,
    0x11: _symbol_table,
    0x15: _attribute_info,
}
# Types of chunk indices: the size of their parameters, and the function for their place.
_INDICES: dict[int, tuple[int, Callable[[Format, int], Place] | None]] = {
    3: (1, fixed_array),
    4: (5, extensible_array),
    5: (6, tree_header),
}
