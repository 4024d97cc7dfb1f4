"""The registry of filters agrees with itself, and with what reads from it."""

from __future__ import annotations

import pytest

from h5async.codec.entry import Codec, CoreKind
from h5async.codec.filters import (
    _ENTRIES,
    BITSHUFFLE,
    NBIT,
    REGISTRY,
    SZIP,
    Filter,
    can_decode,
)
from h5async.core.libraries import LIBRARIES

# Client data with which every filter is decoded here, where one can be.
GIVEN = {
    "deflate": [(6,)],
    "shuffle": [(1,), (4,), (2**31 - 1,), (2**31,)],
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
CODECS = [
    (entry.name, parameters, Filter(entry.number, parameters, "").codec)
    for entry in _ENTRIES
    for parameters in GIVEN.get(entry.name, ())
]


def test_each_filter_has_one_entry():
    assert len(REGISTRY) == len(_ENTRIES) == len({entry.name for entry in _ENTRIES})
    assert {entry.name for entry in _ENTRIES if entry.name not in GIVEN} == {
        *("lzo", "zfp", "sz", "fcidecomp", "sz3", "sperr")
    }
    assert all(isinstance(codec, Codec) for _, _, codec in CODECS)


@pytest.mark.parametrize(("name", "parameters", "codec"), CODECS)
def test_an_entry_agrees_with_what_reads_it(name, parameters, codec):
    if codec.core is not None:
        assert codec.core.library is None or codec.core.library in LIBRARIES
        assert 0 <= codec.core.element_nbytes < 2**31
    if codec.gives_view:
        assert codec.added_nbytes is not None


def test_the_core_has_every_kind_from_the_registry():
    kinds = {codec.core.kind for _, _, codec in CODECS if codec.core is not None}
    assert kinds == set(CoreKind)


def test_elements_that_the_core_has_no_numbers_for_are_left_to_python():
    assert Filter(2, (2**31 - 1,), "").codec.core is not None
    assert Filter(2, (2**31,), "").codec.core is None
    assert Filter(BITSHUFFLE, (0, 4, 2**31, 0, 2), "").codec.core is None


def test_a_filter_that_nobody_knows_has_the_name_from_the_file():
    assert Filter(31000, (), "mine").label == "mine"
    assert Filter(31000, (), "").label == "filter 31000"
    assert Filter(1, (), "something else").label == "deflate"
    assert not can_decode(Filter(31000, (), "mine"))
    assert Filter(31000, (), "mine").stated_lengths is None


def test_lengths_are_known_of_filters_that_are_left_to_hdf5():
    szip, nbit = Filter(SZIP, (169, 4, 8, 32), ""), Filter(NBIT, (8, 0, 10, 1, 4, 0, 12, 3), "")
    assert szip.stated_lengths.least_encoded(szip.parameters) == 4
    assert nbit.stated_lengths.least_encoded(nbit.parameters) == 15
    assert nbit.stated_chunk_nbytes == 40
