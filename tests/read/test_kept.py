"""Rows of chunks that are kept decoded: when they are given without a look at their file."""

from __future__ import annotations

import os

import h5py
import numpy as np
import pytest
from cases import each
from collecting import Collected, layouts_of
from conftest import assert_same_bits

from h5async import Field
from h5async.read import coretables

ALWAYS, NEVER = 1 << 60, 0
ROWS, CHUNK = 40, 8

pytestmark = pytest.mark.usefixtures("core")


@pytest.fixture
def files(tmp_path):
    """Two files; their paths, all rows, and the layouts."""
    paths, rows = [tmp_path / "0.h5", tmp_path / "1.h5"], []
    for number, path in enumerate(paths):
        rows.append(np.arange(ROWS * 6, dtype="<i4").reshape(ROWS, 6) + 1000 * number)
        with h5py.File(path, "w") as file:
            file.create_dataset("data", data=rows[-1], chunks=(CHUNK, 6), compression="gzip")
    return paths, np.concatenate(rows), layouts_of(paths, {"data": Field("data")})


def collected(core, layouts, trusted_ns, monkeypatch):
    monkeypatch.setattr(coretables, "_TRUSTED_NS", trusted_ns)
    return Collected(core, layouts, 12, kept_nbytes=1 << 20)


FIRST = [2, ROWS + 3, 1, ROWS + 1]  # of the first chunk of each file


@each("is_trusted", [True, False])
def test_a_file_that_has_changed(files, core, is_trusted, monkeypatch):
    paths, rows, _ = files
    layouts = layouts_of(paths, {"data": Field("data")})
    trusted_ns = ALWAYS if is_trusted else NEVER
    with collected(core, layouts, trusted_ns, monkeypatch) as read:
        for _ in range(2):
            assert read.read(FIRST) == 0
        os.utime(paths[0])
        refused = read.read(FIRST)
        assert refused == (0 if is_trusted else 1)
        given = [row for row, i in enumerate(FIRST) if is_trusted or i >= ROWS]
        assert_same_bits(read.arrays[0][given], rows[np.array(FIRST)[given]])


def test_what_is_kept_and_what_is_read_are_of_one_state(files, core, monkeypatch):
    """Once a file is found to have changed, nothing that was kept of it is given any more."""
    paths, rows, layouts = files
    with collected(core, layouts, ALWAYS, monkeypatch) as read:
        assert read.read(FIRST) == 0
        os.utime(paths[0])
        mixed = [*FIRST, CHUNK + 1]  # which is not kept
        assert read.read(mixed) == 2
        assert read.left() == {0: [0, 2, 4]}
        assert_same_bits(read.arrays[0][[1, 3]], rows[[FIRST[1], FIRST[3]]])
        assert read.read(FIRST) == 1, "it is not trusted until it is known anew"
        read.collection.tables.forget_chunks()
        read.collection.tables.restamp(
            str(paths[0]), layouts_of(paths[:1], {"d": Field("data")})[0].stamp
        )
        assert read.read(mixed) == 0
        assert_same_bits(read.arrays[0][:5], rows[mixed])
        os.utime(paths[0])
        assert read.read(FIRST) == 1, "what has changed once is compared each time from then on"


def test_nothing_is_opened_for_what_is_kept(files, core, monkeypatch):
    paths, rows, layouts = files
    monkeypatch.setattr(coretables, "_TRUSTED_NS", ALWAYS)
    with Collected(core, layouts, 12, kept_nbytes=1 << 20, most_files=1, io="pread") as read:
        assert read.read(FIRST) == 0
        paths[0].unlink()
        assert read.read(FIRST) == 0
        assert_same_bits(read.arrays[0][: len(FIRST)], rows[FIRST])
        read.collection.tables.forget_chunks()
        assert read.read(FIRST) == 1


def test_whole_chunks_are_kept_for_later_epochs_where_there_is_room_for_all(files, core):
    """Those that a batch takes whole are decoded into it, and kept once an epoch is over."""
    _, rows, layouts = files
    for kept_nbytes, expected in ((1 << 20, [10, 20, 20]), (9 * CHUNK * 24, [10, 20, 30])):
        decoded = []
        with Collected(core, layouts, CHUNK, kept_nbytes=kept_nbytes) as read:
            for _ in range(3):
                for begin in range(0, len(rows), CHUNK):
                    assert read.read(range(begin, begin + CHUNK)) == 0
                    assert_same_bits(read.arrays[0][:CHUNK], rows[begin : begin + CHUNK])
                decoded.append(read.scratch.worker(core).struct.done.decoded_chunks)
        assert decoded == expected
