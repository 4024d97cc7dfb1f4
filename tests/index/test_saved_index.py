"""Readers that open by a saved index deliver what those do that index the files themselves."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from conftest import assert_epoch_is, truth

sys.path.insert(0, str(Path(__file__).parents[1] / "read"))
from test_corpus import READABLE, UNREADABLE, batch_size_for, reader_of, written

from h5async import AsyncReader, ConfigError, DatasetError, H5AsyncError, ReadError, UnsafeFileError
from h5async.config import Field
from h5async.index import indexcache, opening
from h5async.index.consulted import Consulted
from h5async.index.fingerprint import fingerprint
from h5async.index.layout import DatasetLayout, Part
from h5async.index.links import Reach
from h5async.index.metadata import read_layouts
from h5async.index.savedindex import IndexedFile, SavedIndex, Wanted, write_index


def assert_same(one: Any, other: Any) -> None:
    """Assert that two layouts, or parts of them, are the same, with all that they hold."""
    if isinstance(one, DatasetLayout | Part):
        assert type(one) is type(other)
        for name in one.__dataclass_fields__:
            assert_same(getattr(one, name), getattr(other, name))
    elif isinstance(one, np.ndarray):
        assert one.dtype == other.dtype
        assert one.dtype.metadata == other.dtype.metadata or one.ndim == 0
        assert one.shape == other.shape
        assert one.tobytes() == other.tobytes()
    elif isinstance(one, tuple) and not hasattr(one, "_fields"):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_same(a, b)
    elif hasattr(one, "__dataclass_fields__") or hasattr(one, "__slots__"):
        for name in getattr(one, "__dataclass_fields__", ()):
            assert_same(getattr(one, name), getattr(other, name))
    else:
        assert one == other
        assert type(one) is type(other)


def files_are_not_indexed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make it an error to index a file."""

    def refuse(path: Path, *_: Any) -> None:
        raise AssertionError(f"{path} was indexed")

    monkeypatch.setattr(opening, "read_layouts", refuse)


def save(folder: Path, *paths: Path, fields: dict[str, Field], **reach: Any) -> Path:
    """Index files, and save that."""
    files = []
    for path in paths:
        consulted = Consulted()
        found = read_layouts(path, fields, Reach(**reach, consulted=consulted))
        known = {Wanted.of(field): found[name] for name, field in fields.items()}
        files.append(IndexedFile(str(path), known, consulted))
    index = folder / "saved.h5idx"
    write_index(index, files, Reach(**reach))
    return index


@pytest.fixture
def everything_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexcache, "LEAST_SECONDS", 0.0)


# --- the corpus ----------------------------------------------------------------------------------


@pytest.mark.sampled(150)
@pytest.mark.parametrize("quirk", READABLE.values(), ids=READABLE)
def test_reads_like_h5py(quirk, tmp_path, monkeypatch):
    path = written(quirk, tmp_path)
    for number, (name, num_dim) in enumerate(itertools.product(quirk.names, quirk.num_dims)):
        expected = truth(path, name, num_dim)
        options = {"batch_size": batch_size_for(len(expected)), "num_threads": 0}
        index = tmp_path / f"{number}.h5idx"
        with reader_of(quirk, path, name, num_dim, index_cache=False, **options) as reader:
            layout = reader.layouts["data"]
        with reader_of(quirk, path, name, num_dim, index_cache=index, **options) as reader:
            assert_epoch_is(reader, expected)
        assert index.exists()
        with monkeypatch.context() as patch:
            files_are_not_indexed(patch)
            with reader_of(quirk, path, name, num_dim, index_cache=index, **options) as reader:
                assert_same(layout, reader.layouts["data"])
                assert fingerprint(reader.layouts.values()) == fingerprint([layout])
                assert_epoch_is(reader, expected)
            with reader_of(quirk, index, name, num_dim, **options) as reader:
                assert fingerprint(reader.layouts.values()) == fingerprint([layout])
                assert_epoch_is(reader, expected)


@pytest.mark.parametrize("quirk", UNREADABLE.values(), ids=UNREADABLE)
def test_is_an_error_and_no_wrong_value(quirk, tmp_path, everything_is_kept):
    path = written(quirk, tmp_path)
    for _ in range(2):
        with (
            pytest.raises(H5AsyncError) as caught,
            reader_of(quirk, path, "data", 0, batch_size=5, num_threads=0) as reader,
        ):
            for _ in reader:
                pass
        assert str(path) in str(caught.value)
