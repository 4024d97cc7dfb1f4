"""The registry of filters agrees with itself, and with what reads from it."""

from __future__ import annotations

import zlib

import pytest

from h5async.codec.encoders import decoded_nbytes, unchecked
from h5async.codec.filters import (
    _ENTRIES,
    BITSHUFFLE,
    LZ4,
    NBIT,
    REGISTRY,
    SZIP,
    CoreFilter,
    CoreKind,
    Filter,
)
from h5async.core.binding import LIBRARIES

# Client data with which every filter is decoded here, where one can be.
GIVEN = {
    "deflate": [(6,)],
    "shuffle": [(1,), (4,), (2**31 - 1,)],
    "fletcher32": [()],
    "szip": [(141, 8, 16, 32)],
    "nbit": [(8, 0, 10, 1, 4, 0, 12, 3), (5, 1, 10, 1, 4)],
    "scaleoffset": [(2, 0, 10, 0, 4, 0, 0, 0, *[0] * 12), (2, 32, 10, 0, 4, 0, 0, 0, *[0] * 12)],
    "bzip2": [(9,)],
    "lzf": [()],
    "blosc": [(2, 2, 4, 400, 5, 1, 0)],
    "lz4": [(), (0,), (4096,)],
    "bitshuffle": [
        (0, 4, element, block, k) for element in (1, 4) for block in (0, 8) for k in (0, 2, 3)
    ],
    "zstd": [(), (3,)],
    "blosc2": [(1, 0, 4, 400, 5, 1, 0)],
    "conversion": [(5, 4, 0, 0, 0, 4, 4, 1, *[0] * 7)],
}
TAKEN = [
    (entry.name, parameters, Filter(entry.number, parameters, "").core)
    for entry in _ENTRIES
    for parameters in GIVEN.get(entry.name, ())
]


def test_each_filter_has_one_entry():
    assert len(REGISTRY) == len(_ENTRIES) == len({entry.name for entry in _ENTRIES})
    assert {entry.name for entry in _ENTRIES if entry.name not in GIVEN} == {
        *("lzo", "zfp", "sz", "fcidecomp", "sz3", "sperr")
    }
    assert all(isinstance(taken, CoreFilter) for _, _, taken in TAKEN)


@pytest.mark.parametrize(("name", "parameters", "taken"), TAKEN)
def test_an_entry_agrees_with_what_reads_it(name, parameters, taken):
    assert taken.library is None or taken.library in LIBRARIES
    assert 0 <= taken.element_nbytes < 2**31


def test_the_core_has_every_kind_from_the_registry():
    assert {taken.kind for _, _, taken in TAKEN} == set(CoreKind)


def test_elements_that_the_core_has_no_numbers_for_are_not_its_own():
    assert Filter(2, (2**31 - 1,), "").core is not None
    assert Filter(2, (2**31,), "").core is None
    taken = Filter(BITSHUFFLE, (0, 4, 2**31, 0, 2), "").core
    assert taken is None or taken.kind == CoreKind.PLUGIN


def test_a_filter_that_nobody_knows_has_the_name_from_the_file():
    assert Filter(31000, (), "mine").label == "mine"
    assert Filter(31000, (), "").label == "filter 31000"
    assert Filter(1, (), "something else").label == "deflate"
    assert Filter(31000, (), "mine").core is None


def length(filters, encoded, nbytes, mask=0):
    return decoded_nbytes(tuple(filters), mask, encoded, nbytes, 10 * nbytes)


def test_lengths_without_the_core():
    szip, nbit = Filter(SZIP, (169, 3, 8, 32), ""), Filter(NBIT, (8, 0, 10, 1, 4, 0, 12, 3), "")
    assert length([szip], (40).to_bytes(4, "little"), 40) == 40
    assert nbit.stated_chunk_nbytes == length([nbit], bytes(15), 40) == 40
    with pytest.raises(ValueError, match="nbit: expected 15 bytes, got 14"):
        length([nbit], bytes(14), 40)
    deflate, shuffle, checksum = Filter(1, (), ""), Filter(2, (4,), ""), Filter(3, (), "")
    encoded = zlib.compress(bytes(40))
    assert length([shuffle, checksum, deflate], encoded, 36) == 36
    assert length([shuffle, checksum, deflate], bytes(40), 40, 0b110) == 40
    with pytest.raises(ValueError, match="deflate: expected at most 39 bytes, got more"):
        length([deflate], encoded, 39)
    for nbytes in range(len(encoded)):
        with pytest.raises(ValueError, match="deflate: "):
            length([deflate], encoded[:nbytes], 40)
    lz4 = Filter(LZ4, (), "")
    with pytest.raises(ValueError, match="lz4: its blocks have 0 bytes according to the header"):
        length([lz4], (40).to_bytes(8, "big") + bytes(8), 40)
    assert length([deflate, shuffle], encoded, 40) is None  # what is shuffled is not known
    assert length([Filter(31000, (), "mine"), deflate], encoded, 40) is None


def test_which_filters_nobody_checks_without_the_core():
    deflate, other = Filter(1, (), ""), Filter(31000, (), "mine")
    assert unchecked((deflate,)) is None
    assert unchecked((deflate, other)) == other
