"""Ragged samples, against lists of arrays, Awkward Arrays and nested tensors."""

from __future__ import annotations

import itertools
import pickle
import sys

import numpy as np
import pytest
from conftest import assert_same_bits, require_extra
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from h5async.errors import ConfigError, H5AsyncError, MissingPackageError, ReadError
from h5async.samples.ragged import Ragged

DTYPES = ["u1", "i1", "u2", "i4", "i8", "f2", "f4", "f8", "?"]


def joined(samples, dtype="i4", inner=()):
    """Return a `Ragged` of these samples."""
    offsets = np.cumsum([0, *map(len, samples)], dtype=np.int64)
    values = np.concatenate([np.zeros((0, *inner), dtype), *samples]).astype(dtype)
    return Ragged(values, offsets)


@st.composite
def ragged(draw, dtypes=tuple(DTYPES), inners=((), (3,), (2, 0), (2, 2))):
    """Draw samples of differing lengths, as a list of arrays."""
    lengths = draw(st.lists(st.one_of(st.integers(0, 6), st.sampled_from([0, 200])), max_size=6))
    dtype, inner = draw(st.sampled_from(dtypes)), draw(st.sampled_from(inners))
    total = sum(lengths)
    elements = hnp.from_dtype(np.dtype(dtype), allow_nan=False)
    values = draw(hnp.arrays(dtype, (total, *inner), elements=elements))
    ends = np.cumsum([0, *lengths])
    return [values[a:b] for a, b in itertools.pairwise(ends)], dtype, inner


@given(ragged())
def test_samples_are_views(drawn):
    samples, dtype, inner = drawn
    found = joined(samples, dtype, inner)
    assert len(found) == len(samples)
    assert found.lengths.tolist() == [len(s) for s in samples]
    assert found.lengths.dtype == np.int64
    assert found.dtype == dtype
    assert found.nbytes == found.values.nbytes + found.offsets.nbytes
    for i, (sample, one) in enumerate(zip(samples, found, strict=True)):
        for view in (one, found[i], found[i - len(samples)], found[np.int32(i)]):
            assert_same_bits(view, sample)
            assert not view.size or np.shares_memory(view, found.values)
    for number in (len(samples), -len(samples) - 1):
        with pytest.raises(IndexError):
            found[number]


@given(ragged(), st.data())
def test_slices(drawn, data):
    samples, dtype, inner = drawn
    found = joined(samples, dtype, inner)
    bound = st.one_of(st.none(), st.integers(-8, 8))
    some = slice(data.draw(bound), data.draw(bound))
    part, expected = found[some], samples[some]
    assert len(part) == len(expected)
    assert part.offsets[0] == 0
    assert part.values.shape[0] == part.offsets[-1]
    assert not part.values.size or np.shares_memory(part.values, found.values)
    for view, sample in zip(part, expected, strict=True):
        assert_same_bits(view, sample)
    with pytest.raises(ConfigError, match="a slice of ragged samples cannot have a step"):
        found[::2]


@given(ragged(), st.one_of(st.none(), st.integers(0, 210)), st.integers(0, 1))
def test_padded(drawn, length, value):
    samples, dtype, inner = drawn
    array, mask = joined(samples, dtype, inner).to_padded(value, length)
    wanted = max(map(len, samples), default=0) if length is None else length
    expected = np.full((len(samples), wanted, *inner), value, dtype)
    expected_mask = np.zeros((len(samples), wanted), bool)
    for i, sample in enumerate(samples):
        expected[i, : len(sample)] = sample[:wanted]
        expected_mask[i, : len(sample)] = True
    assert_same_bits(array, expected)
    assert_same_bits(mask, expected_mask)


def test_padding_needs_a_length_of_0_or_more():
    with pytest.raises(ConfigError, match="length=-1: samples are padded to a length of 0"):
        joined([[1]]).to_padded(length=-1)


@given(ragged(inners=((), (3,), (2, 2))))
def test_awkward_arrays_share_the_memory(drawn):
    ak = require_extra("awkward")
    samples, dtype, inner = drawn
    found = joined(samples, dtype, inner)
    array = found.to_awkward()
    assert array.to_list() == [sample.tolist() for sample in samples]
    assert np.shares_memory(array.layout.offsets.data, found.offsets)
    assert np.asarray(array.layout.content.data).ctypes.data == found.values.ctypes.data
    assert ak.num(array).to_list() == found.lengths.tolist()


@pytest.mark.slow
@given(ragged(dtypes=("u1", "i4", "i8", "f4", "f8"), inners=((), (3,), (2, 2))))
def test_nested_tensors_share_the_memory(drawn):
    torch = require_extra("torch")
    samples, dtype, inner = drawn
    found = joined(samples, dtype, inner)
    tensor = found.to_torch_nested()
    assert tensor.layout == torch.jagged
    if found.values.size:
        assert tensor.values().data_ptr() == found.values.ctypes.data
    assert tensor.offsets().data_ptr() == found.offsets.ctypes.data
    assert tensor.dtype == torch.from_numpy(np.zeros(1, dtype)).dtype
    if samples:
        assert tensor.shape[0] == len(samples)
        for one, sample in zip(tensor.unbind(), samples, strict=True):
            assert_same_bits(one.numpy(), sample)


def test_big_endian_values_are_converted():
    require_extra("torch")
    require_extra("awkward")
    found = joined([[1, 2], [3]], ">f4")
    assert found.to_awkward().to_list() == [[1, 2], [3]]
    assert [one.tolist() for one in found.to_torch_nested().unbind()] == [[1, 2], [3]]


@pytest.mark.slow
@given(st.lists(st.text(max_size=40), max_size=8))
def test_strings(texts):
    samples = [np.frombuffer(text.encode(), np.uint8) for text in texts]
    assert joined(samples, "u1").to_strings() == texts


def test_strings_that_are_none():
    samples = [np.frombuffer(data, np.uint8) for data in (b"good", b"", b"b\xc3\xa4d: \xc3", b"x")]
    with pytest.raises(ReadError, match=r"sample 2 of 4 is not UTF-8: byte 0xc3 at its position 6"):
        joined(samples, "u1").to_strings()
    # Bytes of two samples are not read as one character.
    halves = [np.frombuffer(data, np.uint8) for data in (b"\xc3", b"\xa4")]
    with pytest.raises(ReadError, match="sample 0 of 2 is not UTF-8"):
        joined(halves, "u1").to_strings()
    for other in (joined([[1]], "i4"), joined([[[1, 2]]], "u1", (2,))):
        with pytest.raises(ConfigError, match="strings are made of UTF-8 bytes"):
            other.to_strings()


def test_a_copy_has_memory_of_its_own():
    found = joined([[1, 2], [], [3]])
    kept = found.copy()
    again = pickle.loads(pickle.dumps(found))
    found.values[...] = 9
    found.offsets[...] = 0
    for other in (kept, again):
        assert [sample.tolist() for sample in other] == [[1, 2], [], [3]]


def test_it_is_described_in_a_line():
    assert repr(joined([[1, 2], []])) == "<Ragged: 2 samples, 2 values of int32>"
    assert repr(joined([], "f4", (3,))) == "<Ragged: 0 samples, 0 values of (3,) float32>"


@pytest.mark.parametrize(
    ("values", "offsets"),
    [
        (np.zeros(()), np.zeros(1, np.int64)),
        (np.zeros(3), np.zeros(0, np.int64)),
        (np.zeros(3), np.zeros((1, 1), np.int64)),
        (np.zeros(3), np.array([0, 3], np.int32)),
    ],
)
def test_what_makes_no_ragged_samples(values, offsets):
    with pytest.raises(ConfigError, match="ragged samples are made of values"):
        Ragged(values, offsets)


@pytest.mark.parametrize(
    ("package", "method"), [("torch", "to_torch_nested"), ("awkward", "to_awkward")]
)
def test_a_missing_package_is_named(monkeypatch, package, method):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingPackageError, match=f"pip install {package}$") as caught:
        getattr(joined([[1]]), method)()
    assert isinstance(caught.value, ImportError)
    assert isinstance(caught.value, H5AsyncError)
