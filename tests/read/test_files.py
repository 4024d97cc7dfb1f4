"""Several files read as one: equal to `np.concatenate` of what h5py gives for each."""

from __future__ import annotations

import itertools
import os
import re
import resource
import stat
import subprocess
import sys
import tempfile
import tracemalloc
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from cases import each
from conftest import assert_epoch_is, assert_same_bits, open_descriptors, poison, truth
from h5py import h5d, h5p, h5s, h5t
from hdf5files import type_for_h5py

from h5async import AsyncReader, ConfigError, DatasetError, Field, ReaderConfig, ReadError
from h5async.fill import phases
from h5async.io.source import open_regular
from h5async.read import coretables, executors, h5pyrows

OPTIONS: dict[str, Any] = {"labels_field": None, "device": "cpu", "batch_size": 4}


def numbered(count: int, start: int, shape: tuple[int, ...] = (3, 2)) -> np.ndarray:
    """Return rows that differ from all others of a test."""
    size = int(np.prod(shape))
    return ((start * size + np.arange(count * size)) * 7919).astype("<i4").reshape(count, *shape)


def write(path: Path, values: np.ndarray, *, labels: Any = None, **how: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as file:
        file.create_dataset("data", data=values, **how)
        if labels is not None:
            file["labels"] = labels
    return path


def write_lengths(folder: Path, lengths: Sequence[int], **how: Any) -> list[Path]:
    """Write files of these lengths, with labels that number all samples."""
    paths, start = [], 0
    for number, length in enumerate(lengths):
        path = folder / f"part{number:03}.h5"
        labels = np.arange(start, start + length)
        given = how if length or "chunks" not in how else {**how, "maxshape": (None, 3, 2)}
        paths.append(write(path, numbered(length, start), labels=labels, **given))
        start += length
    return paths


def joined(paths: Sequence[Path], name: str = "data", num_dim: int = 0) -> np.ndarray:
    return np.concatenate([truth(path, name, num_dim) for path in paths])


@pytest.fixture(autouse=True)
def _many_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let threads share the work of small batches, too."""
    monkeypatch.setattr(phases, "_MIN_SHARE_NBYTES", 1)
    monkeypatch.setattr(h5pyrows, "_SCRATCH_NBYTES", 64)


def assert_files_read_like_h5py(
    paths: Any, expected: np.ndarray, *, has_gaps: bool = False, **options: Any
) -> None:
    """Compare an epoch in order and a shuffled one, in the caller and in threads."""
    for shuffle, num_threads in itertools.product((False, "full"), (0, 3)):
        given = {**OPTIONS, **options, "shuffle": shuffle, "num_threads": num_threads}
        with AsyncReader(hdf5_path=paths, **given) as reader:
            assert reader.num_samples == len(expected)
            poison(reader)
            assert_epoch_is(reader, expected, in_order=not shuffle)
            reason = reader.layouts["data"].fallback_reason
            is_direct = reason is None and not has_gaps
            assert (reader.fallback_reads == 0) == (is_direct or len(reader) == 0)


def read_all(paths: Any, **options: Any) -> np.ndarray:
    with AsyncReader(hdf5_path=paths, **{"num_threads": 0, **OPTIONS, **options}) as reader:
        poison(reader)
        return np.concatenate([batch.data.copy() for batch in reader])


# --- how files are named -------------------------------------------------------------------------


@pytest.mark.parametrize("form", [list, tuple, lambda paths: [str(p) for p in paths]])
def test_files_come_in_the_order_of_a_list_or_tuple(tmp_path, form):
    paths = write_lengths(tmp_path, [5, 3, 6])[::-1]
    assert_files_read_like_h5py(form(paths), joined(paths))


def test_same_file_may_come_twice(tmp_path):
    paths = write_lengths(tmp_path, [5, 3])
    paths = [paths[0], paths[1], paths[0], paths[0]]
    assert_files_read_like_h5py(paths, joined(paths))


def test_list_of_one_file_and_a_list_of_bytes(tmp_path):
    (path,) = write_lengths(tmp_path, [5])
    for files in ([path], (path,), [os.fsencode(path)], path):
        assert_files_read_like_h5py(files, truth(path))


@pytest.mark.parametrize("form", [str, Path, lambda pattern: [pattern]])
def test_glob_gives_files_in_the_order_of_names(tmp_path, form):
    names = ["b.h5", "a10.h5", "a2.h5", "B.h5", "a2.h5x", "ä.h5"]
    for number, name in enumerate(names):
        write(tmp_path / name, numbered(3, 3 * number))
    paths = [tmp_path / name for name in sorted(names) if name.endswith(".h5")]
    assert_files_read_like_h5py(form(tmp_path / "*.h5"), joined(paths))


def test_glob_of_all_folders_below(tmp_path):
    names = ["z.h5", "a/b/c.h5", "a/z.h5", "a/b.h5", "c/a.h5"]
    for number, name in enumerate(names):
        write(tmp_path / name, numbered(3, 3 * number))
    paths = [tmp_path / name for name in sorted(names)]
    assert_same_bits(read_all(tmp_path / "**" / "*.h5"), joined(paths))
    deep = [path for path in paths if path.name != "z.h5" or path.parent != tmp_path]
    assert_same_bits(read_all(tmp_path / "*" / "**" / "*.h5"), joined(deep))


def test_list_of_files_and_globs(tmp_path):
    paths = write_lengths(tmp_path, [5, 3, 6, 2])
    files = [paths[3], tmp_path / "part00[0-2].h5", str(tmp_path / "part00?.h5")]
    assert_files_read_like_h5py(files, joined([paths[3], *paths[:3], *paths]))


def test_file_whose_name_looks_like_a_glob(tmp_path):
    write(tmp_path / "a1.h5", numbered(3, 0))
    path = write(tmp_path / "a[1].h5", numbered(3, 9))
    assert_same_bits(read_all(path), truth(path))


@pytest.mark.parametrize("key", ["list", "glob", "one", "both"])
def test_toml_file_names_files_relative_to_itself(tmp_path, monkeypatch, key):
    paths = write_lengths(tmp_path / "data", [5, 3, 6])
    value = {
        "list": '["data/part001.h5", "data/part000.h5"]',
        "glob": '"data/*.h5"',
        "one": '"data/part002.h5"',
        "both": '["data/part002.h5", "data/part00[01].h5"]',
    }[key]
    expected = {"list": [1, 0], "glob": [0, 1, 2], "one": [2], "both": [2, 0, 1]}[key]
    config = tmp_path / "reader.toml"
    config.write_text(f'hdf5_path = {value}\nlabels_field = ""\ndevice = "cpu"\nbatch_size = 4\n')
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    with AsyncReader(config) as reader:
        assert_epoch_is(reader, joined([paths[n] for n in expected]))
    monkeypatch.chdir(tmp_path)
    with AsyncReader("reader.toml") as reader:
        monkeypatch.chdir(tmp_path / "elsewhere")
        assert_epoch_is(reader, joined([paths[n] for n in expected]))


def test_relative_names_hold_when_the_current_directory_changes(tmp_path, monkeypatch):
    paths = write_lengths(tmp_path, [2] * 150)
    monkeypatch.chdir(tmp_path)
    with AsyncReader(hdf5_path="*.h5", num_threads=0, **OPTIONS) as reader:
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        assert_epoch_is(reader, joined(paths))


@pytest.mark.parametrize(
    "files", [[], (), set(), {"a.h5"}, frozenset({"a.h5"}), [""], ["a.h5", ""]]
)
def test_no_files_and_files_without_an_order_are_refused(files):
    with pytest.raises(ConfigError, match="hdf5_path"):
        AsyncReader(hdf5_path=files, **OPTIONS)


@pytest.mark.parametrize("files", [7, None, [7], [None], {"a": 1}, [["a.h5"]]])
def test_what_is_no_path_is_refused(files):
    with pytest.raises(ConfigError, match="hdf5_path"):
        AsyncReader(hdf5_path=files, **OPTIONS)


def test_missing_file_is_an_error_that_names_it(tmp_path):
    paths = write_lengths(tmp_path, [5, 3, 6])
    paths[1].unlink()
    with pytest.raises(ReadError, match=r"part001\.h5.*no such file"):
        AsyncReader(hdf5_path=paths, **OPTIONS)
    paths[1].mkdir()
    with pytest.raises(ReadError, match=r"part001\.h5.*directory"):
        AsyncReader(hdf5_path=paths, **OPTIONS)


@pytest.mark.parametrize("pattern", ["*.hdf5", "**/no.h5", "part[9].h5", "no/*"])
def test_glob_that_finds_nothing_is_an_error_that_names_it(tmp_path, pattern):
    paths = write_lengths(tmp_path, [5])
    for files in (tmp_path / pattern, [paths[0], tmp_path / pattern]):
        with pytest.raises(ReadError) as caught:
            AsyncReader(hdf5_path=files, **OPTIONS)
        assert pattern in str(caught.value)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("way", ["alone", "listed", "glob"])
def test_pipe_among_the_files_does_not_hang(tmp_path, way):
    paths = write_lengths(tmp_path, [5])
    pipe = tmp_path / "pipe.h5"
    os.mkfifo(pipe)
    # A writer of nothing: who opens the pipe without looking gets past that, and no further.
    keeper = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
    try:
        files = {"alone": pipe, "listed": [*paths, pipe], "glob": tmp_path / "*.h5"}[way]
        with pytest.raises(ReadError, match=r"pipe\.h5"):
            AsyncReader(hdf5_path=files, **OPTIONS)
    finally:
        os.close(keeper)


@pytest.mark.slow
def test_pipe_that_nobody_writes_to_does_not_hang_either(tmp_path):
    os.mkfifo(tmp_path / "pipe.h5")
    code = "import sys, h5async; h5async.AsyncReader(hdf5_path=sys.argv[1], device='cpu')"
    command = [sys.executable, "-c", code, str(tmp_path / "*.h5")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert "it is not a regular file" in done.stderr


def test_file_that_becomes_a_pipe_while_it_is_opened_does_not_hang(tmp_path, monkeypatch):
    pipe = tmp_path / "pipe.h5"
    os.mkfifo(pipe)
    monkeypatch.setattr(stat, "S_ISREG", lambda mode: True)
    open_regular(pipe).close()


# --- lengths -------------------------------------------------------------------------------------

LENGTHS = {
    "equal": [5, 5, 5],
    "differ": [1, 17, 2, 5],
    "empty ones": [0, 3, 0, 0, 6, 0],
    "empty first": [0, 0, 5],
    "empty last": [5, 0],
    "one sample each": [1] * 11,
    "a batch each": [4] * 5,
    "a file larger than a batch between small ones": [1, 30, 1],
    "one file": [7],
}


@each("how", [{}, {"chunks": (2, 3, 2)}, {"chunks": (3, 2, 1), "compression": "gzip"}])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_files_of_any_length(tmp_path, lengths, how):
    how = {**how, "maxshape": (None, 3, 2)} if how else {}
    paths = write_lengths(tmp_path, lengths, **how)
    assert_files_read_like_h5py(paths, joined(paths))


@pytest.mark.parametrize("count", [1, 3])
def test_nothing_but_empty_files(tmp_path, count):
    paths = write_lengths(tmp_path, [0] * count)
    with AsyncReader(hdf5_path=paths, **OPTIONS) as reader:
        assert reader.num_samples == len(reader) == 0
        with pytest.raises(DatasetError, match="no batch"):
            reader.get_next_batch()


@pytest.mark.slow
@each("batch_size", [1, 2, 3, 7, 16, 25, 100])
@each("drop_last", [False, True])
def test_batches_straddle_files(tmp_path, batch_size, drop_last):
    paths = write_lengths(tmp_path, [7, 1, 0, 9, 8])
    expected = joined(paths)
    for num_threads, shuffle in itertools.product((0, 3), (False, "full")):
        with AsyncReader(
            hdf5_path=paths,
            batch_size=batch_size,
            drop_last=drop_last,
            shuffle=shuffle,
            num_threads=num_threads,
            device="cpu",
        ) as reader:
            poison(reader)
            sizes, seen = [], []
            for batch in reader:
                assert_same_bits(batch.data, expected[batch.index])
                assert np.array_equal(batch.labels, batch.index)
                sizes.append(batch.size)
                seen.append(batch.index)
            whole, rest = divmod(25, batch_size)
            assert sizes == [batch_size] * whole + [rest] * (rest > 0 and not drop_last)
            index = np.concatenate([np.zeros(0, np.int64), *seen])
            assert len(set(index.tolist())) == index.size == sum(sizes)


def test_minibatches_saved_one_a_file_come_back_as_they_were(tmp_path):
    """Samples along dimension 0 of files that each hold one whole batch."""
    batches = [numbered(8, 8 * n, (5, 4)) for n in range(12)]
    for n, values in enumerate(batches):
        write(tmp_path / f"batch{n:02}.h5", values, compression="gzip", chunks=values.shape)
    options = {**OPTIONS, "batch_size": 8, "num_threads": 3}
    with AsyncReader(hdf5_path=tmp_path / "batch*.h5", **options) as reader:
        poison(reader)
        assert len(reader) == 12
        for batch, values in zip(reader, batches, strict=True):
            assert_same_bits(batch.data, values)


@pytest.mark.parametrize(
    "how", [{}, {"chunks": (2, 3, 4)}, {"chunks": (3, 2, 4), "compression": "gzip"}], ids=str
)
def test_samples_along_another_dimension(tmp_path, how):
    paths = []
    for number, count in enumerate([5, 1, 8]):
        values = np.moveaxis(numbered(count, 10 * number, (3, 4)), 0, 1)
        chunks = how.get("chunks") and tuple(map(min, how["chunks"], values.shape))
        paths.append(write(tmp_path / f"{number}.h5", values, **{**how, "chunks": chunks}))
    assert_files_read_like_h5py(paths, joined(paths, num_dim=1), num_dim=1)
    assert_files_read_like_h5py(paths, joined(paths, num_dim=1), num_dim=-2)


def test_axes_dtype_and_scale(tmp_path):
    paths = []
    for number, count in enumerate([5, 0, 8]):
        values = np.random.default_rng(number).integers(0, 256, (count, 4, 6, 3), np.uint8)
        paths.append(write(tmp_path / f"{number}.h5", values))
    expected = joined(paths).transpose(0, 3, 1, 2)
    for num_threads in (0, 3):
        options = {"device": "cpu", "batch_size": 4, "num_threads": num_threads}
        with AsyncReader(
            hdf5_path=paths, labels_field=None, h_dim=1, w_dim=2, cha_dim=3, **options
        ) as reader:
            assert_epoch_is(reader, np.ascontiguousarray(expected))
        field = Field("data", axes=(0, 3, 1, 2), dtype="f4", scale=(1, 2, 3), offset=0.5)
        factor = np.array([1, 2, 3], "f4")[:, None, None]
        with AsyncReader(hdf5_path=paths, fields={"data": field}, **options) as reader:
            assert_epoch_is(reader, expected.astype("f4") * factor + np.float32(0.5))


# --- every combination of layouts ----------------------------------------------------------------


def null_terminated(file: h5py.File, values: np.ndarray) -> None:
    stored = h5t.C_S1.copy()
    stored.set_size(4)
    stored.set_strpad(h5t.STR_NULLTERM)
    dataset = h5d.create(file.id, b"data", stored, h5s.create_simple(values.shape))
    dataset.write(h5s.ALL, h5s.ALL, values, mtype=stored)


def odd_integers(file: h5py.File, values: np.ndarray) -> None:
    """Store numbers that only h5py can read."""
    file.create_dataset("data", data=values, dtype=type_for_h5py())


def compact(file: h5py.File, values: np.ndarray) -> None:
    plist = h5p.create(h5p.DATASET_CREATE)
    plist.set_layout(h5d.COMPACT)
    stored = h5t.py_create(values.dtype, logical=True)
    space = h5s.create_simple(values.shape)
    h5py.Dataset(h5d.create(file.id, b"data", stored, space, plist))[...] = values


def created(**how: Any) -> Callable[[h5py.File, np.ndarray], None]:
    def create(file: h5py.File, values: np.ndarray) -> None:
        given = dict(how)
        if "chunks" in given:
            given["chunks"] = tuple(map(min, given["chunks"], values.shape))
        file.create_dataset("data", data=values, **given)

    return create


def big_endian(file: h5py.File, values: np.ndarray) -> None:
    file.create_dataset("data", data=values.astype(values.dtype.newbyteorder(">")))


def big_endian_gzip(file: h5py.File, values: np.ndarray) -> None:
    other = values.astype(values.dtype.newbyteorder(">"))
    file.create_dataset("data", data=other, chunks=(2, 3), compression="gzip")


def with_holes(file: h5py.File, values: np.ndarray) -> None:
    options = {"chunks": (2, 2), "fillvalue": values.dtype.type(5)}
    dataset = file.create_dataset("data", values.shape, values.dtype, **options)
    dataset[2:4] = values[2:4]


def never_written(file: h5py.File, values: np.ndarray) -> None:
    file.create_dataset("data", values.shape, values.dtype, fillvalue=values.dtype.type(6))


def virtual(file: h5py.File, values: np.ndarray) -> None:
    file["x"] = values
    layout = h5py.VirtualLayout(values.shape, values.dtype)
    layout[1:] = h5py.VirtualSource(".", "x", values.shape)[1:]
    file.create_virtual_dataset("data", layout, fillvalue=values.dtype.type(7))


WRITERS: dict[str, Callable[[h5py.File, np.ndarray], None]] = {
    "contiguous": created(),
    "rows": created(chunks=(2, 99)),
    "tiles": created(chunks=(3, 2)),
    "gzip": created(chunks=(2, 99), compression="gzip"),
    "gzip tiles": created(chunks=(4, 1), compression="gzip", shuffle=True),
    "lzf": created(chunks=(99, 99), compression="lzf"),
    "compact": compact,
    "big-endian": big_endian,
    "big-endian gzip": big_endian_gzip,
    "holes": with_holes,
    "never written": never_written,
    "virtual": virtual,
}


def write_with(
    path: Path, writer: Callable[[h5py.File, np.ndarray], None], values: np.ndarray
) -> Path:
    with h5py.File(path, "w") as file:
        writer(file, values)
        file["labels"] = values.ravel()[: len(values)] if values.ndim == 1 else values[:, 0]
    return path


@each("names", list(itertools.combinations(WRITERS, 2)))
def test_two_files_of_any_layouts_with_numbers(tmp_path, names):
    paths = []
    for number, name in enumerate(names):
        values = numbered(6 - number, 10 * number, (5,))
        paths.append(write_with(tmp_path / f"{number}.h5", WRITERS[name], values))
    paths.append(paths[0])
    expected = joined(paths)
    for shuffle, num_threads in ((False, 0), ("full", 3)):
        how = {**OPTIONS, "shuffle": shuffle, "num_threads": num_threads}
        with AsyncReader(hdf5_path=paths, **how) as reader:
            poison(reader)
            assert_epoch_is(reader, expected, in_order=not shuffle)
            # (A virtual dataset with gaps may have another fill value than the others.)
            assert (reader.fallback_reads == 0) == ("virtual" not in names)


def test_all_layouts_at_once_along_another_dimension(tmp_path):
    paths = []
    for number, writer in enumerate(WRITERS.values()):
        values = np.ascontiguousarray(numbered(4 + number % 3, 10 * number, (6,)).T)
        paths.append(write_with(tmp_path / f"{number}.h5", writer, values))
    assert_files_read_like_h5py(
        paths, joined(paths, num_dim=1), has_gaps=True, num_dim=1, batch_size=7
    )


def test_all_layouts_at_once_with_labels_alongside(tmp_path):
    paths, labels = [], []
    for number, (name, writer) in enumerate(WRITERS.items()):
        values = numbered(4 + number % 3, 10 * number, (5,))
        path = write_with(tmp_path / f"{number}.h5", writer, values)
        with h5py.File(path, "r+") as file:
            file.move("labels", "first")
            how = {"chunks": (3,), "compression": "gzip"} if number % 2 else {}
            numbers = np.arange(len(values)) + 100 * number
            file.create_dataset("labels", data=numbers, **how)
        paths.append(path)
        labels.append(numbers)
        assert name
    expected, expected_labels = joined(paths), np.concatenate(labels)
    for num_threads, shuffle in itertools.product((0, 3), (False, "full")):
        options = {"device": "cpu", "batch_size": 7, "num_threads": num_threads}
        with AsyncReader(hdf5_path=paths, shuffle=shuffle, **options) as reader:
            poison(reader)
            for _ in range(2):
                for batch in reader:
                    assert_same_bits(batch.data, expected[batch.index])
                    assert_same_bits(batch.labels, expected_labels[batch.index])


STRINGS: dict[str, Callable[[h5py.File, np.ndarray], None]] = {
    "null-terminated": null_terminated,
    "contiguous": created(),
    "rows": created(chunks=(2,)),
    "gzip": created(chunks=(3,), compression="gzip"),
    "compact": compact,
}


@each("names", list(itertools.permutations(STRINGS, 2)))
def test_two_files_of_any_layouts_with_strings(tmp_path, names):
    """Null-terminated ones come through h5py, and the others do not."""
    paths = []
    for number, name in enumerate(names):
        words = [b"", b"a\0b", b"abcd", b"xyz", b"q\0\0r", b"%d" % number][: 4 + number]
        paths.append(tmp_path / f"{number}.h5")
        with h5py.File(paths[-1], "w") as file:
            STRINGS[name](file, np.array(words, "S4"))
    assert_files_read_like_h5py(paths, joined(paths))


def test_enums_and_bools_and_compounds(tmp_path):
    colour = h5py.enum_dtype({"red": 0, "green": 5}, "<i2")
    compound = np.dtype([("a", "u1"), ("b", "<f4", (2,))])
    for number in range(2):
        with h5py.File(tmp_path / f"{number}.h5", "w") as file:
            file.create_dataset("enum", data=np.array([0, 5, 5, 0], "<i2"), dtype=colour)
            file["bool"] = np.array([True, False, False, True]) ^ bool(number)
            values = np.zeros(4, compound)
            values["a"], values["b"] = 9 + number, np.arange(8).reshape(4, 2)
            how = {"chunks": (2,)} if number else {}
            file.create_dataset("compound", data=values, **how)
    paths = [tmp_path / "0.h5", tmp_path / "1.h5"]
    for name in ("enum", "bool", "compound"):
        assert_files_read_like_h5py(paths, joined(paths, name), data_field=name)


# --- files that do not fit together --------------------------------------------------------------

OTHERS = {
    "row shape": lambda: numbered(5, 9, (3, 3)),
    "fewer dimensions": lambda: numbered(5, 9, (6,)),
    "more dimensions": lambda: numbered(5, 9, (3, 2, 1)),
    "wider numbers": lambda: numbered(5, 9).astype("<i8"),
    "floats": lambda: numbered(5, 9).astype("<f4"),
    "unsigned": lambda: numbered(5, 9).astype("<u4"),
    "empty, of another shape": lambda: numbered(0, 9, (3, 3)),
    "empty, of another dtype": lambda: numbered(0, 9).astype("<f4"),
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
@each("place", [0, 1, 2])
def test_files_that_differ_are_an_error_that_names_both(tmp_path, other, place):
    paths = [write(tmp_path / f"{n}.h5", numbered(5, 5 * n)) for n in range(3)]
    write(paths[place], other())
    with pytest.raises(DatasetError) as caught:
        AsyncReader(hdf5_path=paths, **OPTIONS)
    named = [path for path in paths if str(path) in str(caught.value)]
    assert len(named) == 2
    assert paths[place] in named
    assert '"data"' in str(caught.value)


def test_data_and_labels_of_different_length_in_one_file_are_an_error_that_names_it(tmp_path):
    paths = write_lengths(tmp_path, [5, 3, 6])
    write(paths[1], numbered(3, 5), labels=np.arange(4))
    write(paths[2], numbered(6, 5), labels=np.arange(5))  # in all there are as many
    with pytest.raises(DatasetError, match=r"part001\.h5.*3 samples.*4"):
        AsyncReader(hdf5_path=paths, device="cpu")


def test_dataset_that_one_file_lacks_is_an_error_that_names_it(tmp_path):
    paths = write_lengths(tmp_path, [5, 3, 6])
    with h5py.File(paths[1], "r+") as file:
        del file["labels"]
    with pytest.raises(DatasetError, match=r"part001\.h5.*labels"):
        AsyncReader(hdf5_path=paths, device="cpu")


def test_file_that_is_no_hdf5_file_is_an_error_that_names_it(tmp_path):
    paths = write_lengths(tmp_path, [5, 3, 6])
    paths[2].write_text("no HDF5")
    with pytest.raises(ReadError, match=r"part002\.h5"):
        AsyncReader(hdf5_path=paths, device="cpu")


# --- files that go bad ---------------------------------------------------------------------------


@pytest.mark.parametrize("num_threads", [0, 3])
def test_damaged_chunk_fails_its_batches_alone(tmp_path, num_threads):
    paths = write_lengths(tmp_path, [8, 8, 8], chunks=(4, 3, 2), compression="gzip")
    expected = joined(paths)
    with h5py.File(paths[1], "r+") as file:
        file["data"].id.write_direct_chunk((4, 0, 0), zlib.compress(b"short"))
    options = {**OPTIONS, "num_threads": num_threads}
    with AsyncReader(hdf5_path=paths, **options) as reader:
        for number in range(6):
            if number == 3:
                with pytest.raises(ReadError, match=r"part001\.h5"):
                    reader.get_next_batch()
            else:
                batch = reader.get_next_batch()
                assert_same_bits(batch.data, expected[4 * number : 4 * number + 4])


@pytest.mark.parametrize("through_h5py", [False, True])
@pytest.mark.parametrize("what", ["replaced", "removed", "cut"])
def test_file_that_changed_after_indexing_is_an_error(tmp_path, monkeypatch, what, through_h5py):
    """It was not open any more: too many others were opened after it."""
    monkeypatch.setattr(executors, "affordable_files", lambda: 32)
    monkeypatch.setattr(coretables, "_TRUSTED_NS", 0)
    if through_h5py:
        paths = write_odd_integers(tmp_path, 150)
    else:
        paths = write_lengths(tmp_path, [2] * 150)
    options = {**OPTIONS, "batch_size": 2, "num_threads": 0}
    with AsyncReader(hdf5_path=paths, **options) as reader:
        for _ in reader:
            pass
        for path in (paths[3], paths[147]):
            still_open = str(path) in open_descriptors(tmp_path).values()
            if still_open:
                continue
            whole = path.read_bytes()
            if what == "removed":
                path.unlink()
            elif what == "cut":
                os.truncate(path, 1000)
            else:
                (tmp_path / "other").write_bytes(whole)
                (tmp_path / "other").replace(path)
        with pytest.raises(ReadError, match=r"part003\.h5"):
            list(reader)


@pytest.mark.parametrize("through_h5py", [False, True])
@pytest.mark.parametrize("num_threads", [0, 2])
def test_files_that_were_deployed_anew_are_read_as_they_were(tmp_path, num_threads, through_h5py):
    """By rename, each of a hundred: what is open stays open, as far as descriptors reach."""
    write = write_odd_integers if through_h5py else lambda folder, n: write_lengths(folder, [2] * n)
    paths = write(tmp_path, 100)
    options = {**OPTIONS, "batch_size": 2, "num_threads": num_threads, "shuffle": "full"}
    with AsyncReader(hdf5_path=paths, **options) as reader:
        before = {
            int(i): row.copy() for b in reader for i, row in zip(b.index, b.data, strict=True)
        }
        for path in paths:
            (tmp_path / "other").write_bytes(b"not the same")
            (tmp_path / "other").replace(path)
        for batch in reader:
            for i, row in zip(batch.index, batch.data, strict=True):
                assert_same_bits(row, before[int(i)])


# --- many files, and few descriptors -------------------------------------------------------------


def write_odd_integers(folder: Path, count: int) -> list[Path]:
    """Write files of two samples that only h5py can read."""
    paths = [folder / f"part{number:03}.h5" for number in range(count)]
    for number, path in enumerate(paths):
        with h5py.File(path, "w") as file:
            odd_integers(file, np.array([number, 65 + number % 26]))
    return paths


@pytest.fixture
def few_descriptors() -> Iterator[Callable[[int], None]]:
    """Give what lowers the number of files this process may open, until the test ends."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)

    def lower(most: int) -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, before[1]))

    yield lower
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


MOST = 200


def write_many(folder: Path, kind: str) -> list[Path]:
    if kind == "h5py":
        return write_odd_integers(folder, 300)
    if kind == "contiguous":
        return write_lengths(folder, [2] * 300)
    if kind == "gzip":
        return write_lengths(folder, [2] * 300, chunks=(1, 3, 2), compression="gzip")
    assert kind == "mixed"
    paths = write_odd_integers(folder, 300)
    for path in paths[::2]:
        with h5py.File(path, "r+") as file:
            values = file["data"][...]
            del file["data"]
            file["data"] = values
    return paths


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[Path]]:
    """Return what makes 300 files of a kind, once; nobody writes to them."""

    @cache
    def make(kind: str) -> list[Path]:
        return write_many(tmp_path_factory.mktemp(kind), kind)

    return make


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["contiguous", "gzip", "h5py", "mixed"])
def test_more_files_than_may_be_open(many, few_descriptors, kind):
    paths = many(kind)
    expected = joined(paths)
    few_descriptors(MOST)
    for shuffle, num_threads in ((False, 0), ("full", 3)):
        options = {**OPTIONS, "batch_size": 32, "shuffle": shuffle, "num_threads": num_threads}
        with AsyncReader(hdf5_path=paths, **options) as reader:
            poison(reader)
            most, index = 0, []
            for batch in reader:
                most = max(most, len(open_descriptors(paths[0].parent)))
                assert_same_bits(batch.data, expected[batch.index])
                index += batch.index.tolist()
            assert sorted(index) == list(range(600))
            assert most < 180  # none, where files are mapped
        assert not open_descriptors(paths[0].parent)


def test_batch_of_more_files_than_may_be_open(many, few_descriptors):
    paths = many("contiguous")
    expected = joined(paths)
    few_descriptors(MOST)
    options = {**OPTIONS, "batch_size": 600, "shuffle": "full", "num_threads": 3}
    with AsyncReader(hdf5_path=paths, **options) as reader:
        assert_epoch_is(reader, expected, in_order=False)


def test_virtual_dataset_of_more_files_than_may_be_open(many, few_descriptors):
    paths = many("contiguous")
    layout = h5py.VirtualLayout((600, 3, 2), "<i4")
    for number, path in enumerate(paths):
        layout[2 * number : 2 * number + 2] = h5py.VirtualSource(path.name, "data", (2, 3, 2))
    virtual_path = paths[0].parent / "virtual.h5"
    with h5py.File(virtual_path, "w") as file:
        file.create_virtual_dataset("data", layout)
    expected = joined(paths)
    few_descriptors(MOST)
    options = {**OPTIONS, "batch_size": 32, "shuffle": "full", "num_threads": 3}
    with AsyncReader(hdf5_path=virtual_path, **options) as reader:
        assert_epoch_is(reader, expected, in_order=False)


# --- order, and memory ---------------------------------------------------------------------------


@pytest.mark.parametrize("shuffle", [False, "full"])
def test_order_depends_on_the_seed_alone(tmp_path, shuffle):
    paths = write_lengths(tmp_path, [7, 1, 0, 9, 8])

    def order(seed: int, **options: Any) -> list[int]:
        given = {"device": "cpu", "batch_size": 4, "shuffle": shuffle, "seed": seed, **options}
        with AsyncReader(hdf5_path=paths, **given) as reader:
            return [n for _ in range(2) for batch in reader for n in batch.labels.tolist()]

    orders = [order(5, num_threads=n, prefetch=p) for n in (0, 1, 2, 4) for p in (1, 3)]
    assert all(found == orders[0] for found in orders)
    assert (order(6) == orders[0]) == (not shuffle)
    whole = write(tmp_path / "whole.h5", joined(paths), labels=joined(paths, "labels"))
    paths = [whole]
    assert order(5, num_threads=2) == orders[0]


def test_config_tells_the_files(tmp_path):
    paths = write_lengths(tmp_path, [1, 1])
    assert ReaderConfig(hdf5_path=paths).files == paths
    assert ReaderConfig(hdf5_path=str(tmp_path / "*.h5")).files == paths
    assert ReaderConfig(hdf5_path=paths).hdf5_path == tuple(paths)


def test_memory_stays_bounded_with_many_small_compressed_files(tmp_path, monkeypatch):
    """What is kept for each file is no buffer of the size of its chunks."""
    monkeypatch.setattr("h5async.fill.resident._KEPT_WHOLE_NBYTES", 0)
    chunk = (64, 256)
    for number in range(200):
        values = np.random.default_rng(number).integers(0, 4, chunk, np.uint8)
        write(tmp_path / f"{number:03}.h5", values, chunks=chunk, compression="gzip")
    paths = sorted(tmp_path.glob("*.h5"))
    nbytes = int(np.prod(chunk))
    options = {**OPTIONS, "batch_size": 40, "shuffle": "full", "num_threads": 2}
    with AsyncReader(hdf5_path=paths, **options) as reader:
        batches = iter(reader)
        next(batches)
        tracemalloc.start()
        try:
            for _, _ in zip(range(12), batches, strict=False):
                pass
            grown, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert grown < 60 * nbytes + 200 * 8_000


@pytest.mark.parametrize("kind", ["contiguous", "gzip"])
def test_reader_of_files_can_be_left_and_closed_at_any_time(tmp_path, kind):
    how = {} if kind == "contiguous" else {"chunks": (2, 3, 2), "compression": "gzip"}
    paths = write_lengths(tmp_path, [9] * 20, **how)
    expected = joined(paths)
    for left_after in (0, 1, 5):
        options = {**OPTIONS, "batch_size": 16, "shuffle": "full", "num_threads": 3}
        with AsyncReader(hdf5_path=paths, **options) as reader:
            for number, _ in enumerate(reader):
                if number == left_after:
                    break
            for batch in reader:
                assert_same_bits(batch.data, expected[batch.index])


@pytest.mark.parametrize("row_nbytes", [5_000, 12_288, 20_480, 40_960])
@pytest.mark.parametrize("shift", [0, 4064, 4080, 4088])
def test_rows_that_lie_in_pages_as_slots_do(tmp_path: Path, row_nbytes: int, shift: int) -> None:
    """Long rows are copied in another way where they lie somewhat before their places."""
    rows = np.random.default_rng(0).integers(0, 255, (40, row_nbytes), np.uint8)
    (tmp_path / "rows").write_bytes(bytes(shift) + rows.tobytes())
    with h5py.File(tmp_path / "a.h5", "w") as file:
        external = [(str(tmp_path / "rows"), shift, rows.nbytes)]
        file.create_dataset("x", rows.shape, rows.dtype, external=external)
    with AsyncReader(
        hdf5_path=tmp_path / "a.h5",
        fields={"x": "x"},
        batch_size=8,
        shuffle="full",
        allow_external=tmp_path,
    ) as reader:
        for batch in reader:
            assert np.array_equal(batch.x, rows[batch.index])


def reads_of_a_file_in_memory(first: str = "", nbytes: int | None = None) -> int:
    """Return how often a process calls the system to read rows of a file in memory, shuffled.

    It does something `first`. The file has 10,000 rows, and is then made longer.
    """
    script = f"""
import ctypes, os, re, sys
from pathlib import Path
{first}
from h5async import AsyncReader

def count_reads():
    return int(re.search(r"syscr: (\\d+)", Path("/proc/self/io").read_text())[1])

with AsyncReader(hdf5_path=sys.argv[1], labels_field=None, batch_size=1000, shuffle="full",
                 device="cpu") as reader:
    before = count_reads()
    found = {{int(i): row.tolist() for batch in reader for i, row in zip(batch.index, batch.data)}}
    print(count_reads() - before)
assert found == {{i: [4.0 * i, 4.0 * i + 1, 4.0 * i + 2, 4.0 * i + 3] for i in range(10_000)}}
"""
    with tempfile.NamedTemporaryFile(dir="/dev/shm", suffix=".h5") as file:
        with h5py.File(file.name, "w") as f:
            f["data"] = np.arange(40_000, dtype=np.float32).reshape(10_000, 4)
        if nbytes is not None:
            os.truncate(file.name, nbytes)
        command = [sys.executable, "-c", script, file.name]
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


needs_memory = pytest.mark.skipif(
    not os.access("/dev/shm", os.W_OK), reason="needs a file system in memory"
)


@needs_memory
def test_rows_of_a_file_in_memory_are_copied_out_of_its_map():
    """Such a file system does not tell by a read whether pages are in memory."""
    assert reads_of_a_file_in_memory() < 1000


def can_become_another_user() -> bool:
    """Whether this process may do so and go on to read all files (CAP_DAC_READ_SEARCH)."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return False
    found = re.search(r"CapEff:\s+(\w+)", Path("/proc/self/status").read_text())
    return found is not None and bool(int(found[1], 16) >> 2 & 1)


BECOME_ANOTHER_USER = """
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(8, 1, 0, 0, 0) == 0  # PR_SET_KEEPCAPS
os.setresuid(65534, 65534, 65534)
only_reads = (ctypes.c_uint32 * 6)(1 << 2, 1 << 2)  # CAP_DAC_READ_SEARCH
assert libc.capset((ctypes.c_uint32 * 2)(0x20080522, 0), only_reads) == 0
libc.prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE, for /proc/self/io
"""


@pytest.mark.skipif(not can_become_another_user(), reason="needs another user")
@needs_memory
@pytest.mark.parametrize("is_large", [False, True])
def test_rows_of_a_large_file_of_another_user_are_not_taken_to_be_in_memory(is_large: bool) -> None:
    """The system says so of all its pages: it tells only the owner, and who may write the file."""
    nbytes = 1 << 42 if is_large else None
    count = reads_of_a_file_in_memory(BECOME_ANOTHER_USER, nbytes)
    assert count >= 5000 if is_large else count < 1000
