"""Odd types, filters, names and options; what a large file holds; who takes the output away."""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import pickle
import signal
import subprocess
import sys
import sysconfig
import zlib
from pathlib import Path

import h5py
import numpy as np
import pytest
from cases import each
from conftest import assert_reads_like_h5py, assert_same_bits, truth
from corpus import DONT_FILTER_PARTIAL_CHUNKS, HDF5
from typer.testing import CliRunner

from h5async import (
    AsyncReader,
    ConfigError,
    DatasetError,
    Field,
    H5AsyncError,
    PostprocessError,
    ReaderConfig,
    ReadError,
    cli,
)
from h5async.core.binding import load_core
from h5async.index import contents, metadata
from h5async.index.fingerprint import fingerprint
from h5async.index.layout import DatasetLayout
from h5async.index.listing import walk
from h5async.io.stamps import FileStamp
from h5async.names import name_bytes, printable, shell_word
from h5async.process.child import HelperDied

SCRIPT = os.path.join(sysconfig.get_path("scripts"), "h5async")
SECONDS = 60  # for a subprocess


@pytest.fixture
def path(tmp_path):
    return tmp_path / "file.h5"


def reader_of(path, **options):
    return AsyncReader(hdf5_path=path, device="cpu", **{"labels_field": None, **options})


def first_batch(path, **options):
    with reader_of(path, **options) as reader:
        return reader.get_next_batch().copy()


def run(code, *arguments, **environment):
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )


# --- compounds whose members are out of order ----------------------------------------------------

INNER = np.dtype({"names": ["a", "b"], "formats": ["<i4", "<f4"], "offsets": [4, 0]})
OUT_OF_ORDER = {
    "out of order": INNER,
    "within a compound": np.dtype([("x", INNER), ("y", "i1")]),
    "an array within": np.dtype([("x", INNER, (2,)), ("y", "i1")]),
    "with gaps": np.dtype(
        {"names": ["a", "b"], "formats": ["<i4", "<i2"], "offsets": [8, 0], "itemsize": 16}
    ),
}


@pytest.fixture(params=OUT_OF_ORDER.values(), ids=OUT_OF_ORDER.keys())
def compounds(path, request):
    values = np.zeros(40, request.param)
    values.view(np.uint8)[...] = np.arange(values.nbytes) % 251
    with h5py.File(path, "w") as file:
        file.create_dataset("data", data=values, chunks=(7,), compression="gzip")
    return path


@pytest.mark.parametrize("workers", ["thread", "process"])
def test_members_out_of_order_have_a_state(compounds, workers):
    options = {"batch_size": 6, "shuffle": "full", "workers": workers}
    with reader_of(compounds, **options) as reader:
        reader.get_next_batch()
        state = json.loads(json.dumps(reader.state_dict()))
        expected = reader.get_next_batch().copy()
    with reader_of(compounds, **options) as reader:
        reader.load_state_dict(state)
        found = reader.get_next_batch()
        assert found.index.tolist() == expected.index.tolist()
        assert_same_bits(found.data, truth(compounds)[found.index])


def test_members_out_of_order_are_pickled(compounds):
    with reader_of(compounds) as reader, pickle.loads(pickle.dumps(reader)) as copy:
        assert_same_bits(copy.get_next_batch().data, truth(compounds)[:32])


def test_members_out_of_order_outlive_a_helper(compounds):
    with reader_of(compounds, workers="process", batch_size=10) as reader:
        found = [reader.get_next_batch().copy()]
        os.kill(reader._engine.filler.processes[0]._popen.pid, signal.SIGKILL)
        while len(found) < 3:
            with contextlib.suppress(HelperDied):  # may cost a batch
                found.append(reader.get_next_batch().copy())
        for batch in found:
            assert_same_bits(batch.data, truth(compounds)[batch.index])


def layout_of(path, dtype):
    return DatasetLayout(
        file=str(path),
        stamp=FileStamp.of(path),
        path="data",
        shape=(10, 3),
        dtype=np.dtype(dtype),
        sample_axis=0,
        storage="contiguous",
        fallback_reason=None,
        fill=np.zeros((), dtype),
        offset=2048,
    )


WITH_A_GAP = {"names": ["a", "b"], "formats": ["u1", "<f4"], "offsets": [0, 4]}


@each(
    "dtype, expected",
    [
        ("<f4", "172e682b2149ebe4e8cdd9e3e217f239"),
        (">i2", "101b742271d50c67ac9a35fdd45d0c63"),
        ("S3", "a9176e82614049fc300cca7dbe1fd89b"),
        ("V5", "69503bd26c90803c5370d0c267f7a73c"),
        ("?", "835b1b47f4ae0adeef56237d379ecf47"),
        ([("a", "<i4"), ("b", "<f8", (2, 3))], "4ff4850e155f5e300066607b4f6c8308"),
        (
            {"names": ["a", "b"], "formats": ["u1", "<f4"], "offsets": [0, 4]},
            "b8d8ff19f04f9513afe35624532e83a8",
        ),
        ([("a", [("b", ">u2"), ("c", "S2")]), ("d", "<c8")], "0171dbe8a190d079b32e3b43790e0048"),
    ],
)
def test_states_that_were_saved_stay_good(path, dtype, expected):
    path.write_bytes(bytes(5000))
    assert fingerprint([layout_of(path, dtype)]) == expected


def test_fingerprints_tell_members_out_of_order_apart(path):
    path.write_bytes(bytes(5000))
    others = [
        {"names": ["b", "a"], "formats": ["<i4", "<f4"], "offsets": [4, 0]},
        {"names": ["a", "b"], "formats": ["<f4", "<i4"], "offsets": [4, 0]},
        {"names": ["a", "b"], "formats": ["<i4", "<f4"], "offsets": [8, 0]},
        {"names": ["a", "b"], "formats": ["<i4", "<f4"], "offsets": [4, 0], "itemsize": 16},
        {"names": ["a", "b"], "formats": ["<i4", "<f4"], "offsets": [2, 0]},
    ]
    dtypes = [INNER, *map(np.dtype, others), *OUT_OF_ORDER.values()]
    prints = {str(dtype): fingerprint([layout_of(path, dtype)]) for dtype in dtypes}
    assert len(set(prints.values())) == len(prints)


# --- arrays of arrays ----------------------------------------------------------------------------


def nested_type(*dimensions, base=h5py.h5t.STD_I32LE):
    for dimension in reversed(dimensions):
        base = h5py.h5t.array_create(base, dimension)
    return base


@each("storage", ["contiguous", "chunked", "gzip", "compact", "nothing", "fill"])
@each("dimensions", [((3,), (2,)), ((2,), (1, 3), (2,)), ((1,), (1,))])
def test_arrays_of_arrays(path, storage, dimensions):
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    if storage == "compact":
        plist.set_layout(h5py.h5d.COMPACT)
    elif storage != "contiguous":
        plist.set_chunk((4,))
    if storage == "gzip":
        plist.set_deflate(1)
    stored = nested_type(*dimensions)
    with h5py.File(path, "w") as file:
        space = h5py.h5s.create_simple((10,))
        dataset = h5py.h5d.create(file.id, b"data", stored, space, plist)
        if storage not in ("nothing", "fill"):
            shape = (10, *(n for part in dimensions for n in part))
            values = np.arange(math.prod(shape), dtype="<i4").reshape(shape)
            dataset.write(h5py.h5s.ALL, h5py.h5s.ALL, values, stored)
    for num_threads in (0, 2):
        assert_reads_like_h5py(path, num_threads=num_threads)
    assert first_batch(path, workers="process").data.shape == truth(path).shape


def test_arrays_of_arrays_in_a_compound(path):
    stored = h5py.h5t.create(h5py.h5t.COMPOUND, 28)
    stored.insert(b"x", 0, nested_type((3,), (2,)))
    stored.insert(b"y", 24, h5py.h5t.STD_I32LE)
    with h5py.File(path, "w") as file:
        space = h5py.h5s.create_simple((10,))
        dataset = h5py.h5d.create(file.id, b"data", stored, space)
        values = np.arange(70, dtype="<i4").view("V28")
        dataset.write(h5py.h5s.ALL, h5py.h5s.ALL, values, stored)
    expected = truth(path)
    assert_same_bits(first_batch(path, data_field="data/x").data, expected["x"])
    assert_same_bits(first_batch(path, data_field="data/y").data, expected["y"])
    assert_same_bits(first_batch(path).data["x"], expected["x"])


# --- filters that nobody has ---------------------------------------------------------------------

NOBODYS = 511


def file_with_a_filter_of_nobodys(path, masks, *, deflate=False, fill=None, stored="<i4", cut=0):
    """Write chunks of (4, 3) with the given filter masks; None: not written."""
    dtype = np.dtype(stored) if isinstance(stored, str) else stored
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plist.set_chunk((4, 3))
    plist.set_filter(NOBODYS, h5py.h5z.FLAG_OPTIONAL, (1,))
    if deflate:
        plist.set_deflate(1)
    if fill is not None:
        plist.set_fill_value(np.array(fill, dtype))
    with h5py.File(path, "w") as file:
        kind = h5py.h5t.py_create(dtype) if isinstance(stored, str) else stored
        space = h5py.h5s.create_simple((10, 3))
        dataset = h5py.h5d.create(file.id, b"data", kind, space, plist)
        for number, mask in enumerate(masks):
            values = (np.arange(12, dtype="<i4") + 100 * number).tobytes()
            values = values[: len(values) - cut]
            if deflate and not mask & 2:
                values = zlib.compress(values)
            if mask is not None:
                dataset.write_direct_chunk((4 * number, 0), values, filter_mask=mask)


@each("num_threads", [0, 2])
@each(
    "masks, options",
    [
        ([], {}),
        ([], {"fill": 7}),
        ([1, 1, 1], {}),
        ([1, None, 1], {"fill": 7}),
        ([1, 1, 1], {"deflate": True}),
        ([3, 1, 3], {"deflate": True}),
        ([3, 3, 3], {"deflate": True}),
    ],
)
def test_a_filter_that_no_chunk_was_written_with(path, masks, options, num_threads):
    file_with_a_filter_of_nobodys(path, masks, **options)
    assert_reads_like_h5py(path, num_threads=num_threads)
    assert_reads_like_h5py(path, num_threads=num_threads, io="pread", batch_size=5)


def test_a_filter_that_no_chunk_was_written_with_is_no_matter_to_the_core(core, path):
    file_with_a_filter_of_nobodys(path, [3, 1, 3], deflate=True)
    with reader_of(path) as reader:
        reader.get_next_batch()
        assert reader.stats().ways == {"data": "core"}


def test_a_filter_that_no_chunk_was_written_with_where_h5py_reads(path):
    stored = h5py.h5t.STD_I32LE.copy()
    stored.set_precision(17)
    file_with_a_filter_of_nobodys(path, [1, 1, 1], stored=stored)
    assert_reads_like_h5py(path, fallback="its stored type differs")
    file_with_a_filter_of_nobodys(path, [1, 1, 1])
    with h5py.File(path, "r+"):
        assert_reads_like_h5py(path, fallback="open for writing")


def test_a_filter_that_no_chunk_was_written_with_in_a_virtual_dataset(path):
    file_with_a_filter_of_nobodys(path, [1, 1, 1])
    with h5py.File(path, "r+") as file:
        layout = h5py.VirtualLayout((10, 3), "<i4")
        layout[...] = h5py.VirtualSource(".", "data", (10, 3))
        file.create_virtual_dataset("virtual", layout)
    assert_reads_like_h5py(path, "virtual")


@pytest.mark.parametrize("kind", ["plain", "of h5py's"])
def test_a_filter_that_one_chunk_was_written_with(path, kind):
    stored: object = "<i4"
    if kind != "plain":
        stored = h5py.h5t.STD_I32LE.copy()
        stored.set_precision(17)
    file_with_a_filter_of_nobodys(path, [1, 1, 0], stored=stored)
    with pytest.raises(DatasetError, match=f'"data" is compressed with filter {NOBODYS}'):
        reader_of(path)


def test_a_chunk_without_filters_of_another_length(path):
    file_with_a_filter_of_nobodys(path, [1, 1, 1], cut=4)
    with pytest.raises(ReadError, match="expected 48 bytes, got 44"):
        reader_of(path)


def test_masks_stay_as_they_are_where_every_filter_is_known(path):
    """Saved states hold what becomes of them."""
    with h5py.File(path, "w") as file:
        dataset = file.create_dataset("data", (8,), "<i4", chunks=(4,), compression="gzip")
        for number, mask in enumerate([0xFFFFFFFF, 0x101]):
            dataset.id.write_direct_chunk((4 * number,), bytes(16), filter_mask=mask)
    with reader_of(path) as reader:
        layout = reader.layouts["data"]
        assert layout.chunks.filter_mask.tolist() == [0xFFFFFFFF, 0x101]
        assert [entry.label for entry in layout.filters] == ["deflate"]


def test_edge_chunks_that_were_not_filtered(path):
    """Their mask says that they were."""
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plist.set_chunk((4,))
    plist.set_filter(NOBODYS, h5py.h5z.FLAG_OPTIONAL, (1,))
    options = ctypes.c_int64(plist.id), ctypes.c_uint(DONT_FILTER_PARTIAL_CHUNKS)
    assert HDF5.H5Pset_chunk_opts(*options) >= 0
    with h5py.File(path, "w", libver="latest") as file:
        space = h5py.h5s.create_simple((3,), (h5py.h5s.UNLIMITED,))
        dataset = h5py.h5d.create(file.id, b"data", h5py.h5t.STD_I32LE, space, plist)
        dataset.write_direct_chunk((0,), np.arange(4, dtype="<i4").tobytes())
    assert_reads_like_h5py(path)


# --- names that are not UTF-8 --------------------------------------------------------------------

GROUP, DATASET, SOFT, MEMBER = b"caf\xe9", b"d\xff", b"soft\xfe", b"m\xf0"
NAME = "caf\udce9/d\udcff"


@pytest.fixture
def odd_names(path):
    """A dataset in a group, two links to it, and a compound, with names that are not UTF-8."""
    with h5py.File(path, "w") as file:
        file.create_group(GROUP)[DATASET] = np.arange(24).reshape(12, 2)
        file.id.links.create_soft(SOFT, GROUP + b"/" + DATASET)
        file["plain"] = np.arange(12)
        file["text"] = np.full(12, b"abc", "S3")
        compound = h5py.h5t.create(h5py.h5t.COMPOUND, 8)
        compound.insert(MEMBER, 0, h5py.h5t.STD_I32LE)
        compound.insert(b"b", 4, h5py.h5t.STD_I32LE)
        space = h5py.h5s.create_simple((12,))
        dataset = h5py.h5d.create(file.id, b"table", compound, space)
        values = np.arange(24, dtype="<i4").view("V8")
        dataset.write(h5py.h5s.ALL, h5py.h5s.ALL, values, compound)
        terminated = h5py.h5t.C_S1.copy()
        terminated.set_size(4)
        h5py.h5d.create(file.id, b"t\xff", terminated, space)
    with h5py.File(path.with_name("links.h5"), "w") as file:
        file.id.links.create_external(b"e\xff", os.fsencode(path.name), GROUP + b"/" + DATASET)
    return path


@each("workers", ["thread", "process"])
@each("name", [NAME, f"/{NAME}", "soft\udcfe", name_bytes(NAME)])
def test_names_that_are_not_utf8_are_read(odd_names, name, workers):
    expected = np.arange(24).reshape(12, 2)
    assert_same_bits(first_batch(odd_names, data_field=name, workers=workers).data, expected)
    fields = {"x": Field(name), "y": name, "z": {"path": name, "dtype": "f4"}}
    batch = first_batch(odd_names, fields=fields, workers=workers)
    assert_same_bits(batch.x, expected)
    assert_same_bits(batch.z, expected.astype("f4"))
    batch = first_batch(odd_names, data_field="plain", labels_field=name)
    assert_same_bits(batch.labels, expected)


def test_names_that_are_not_utf8_elsewhere(odd_names):
    links = odd_names.with_name("links.h5")
    expected = np.arange(24, dtype="<i4").reshape(12, 2)
    assert_same_bits(first_batch(links, data_field="e\udcff").data, expected.astype("i8"))
    assert_same_bits(first_batch(odd_names, data_field="table/m\udcf0").data, expected[:, 0])
    assert_same_bits(first_batch(odd_names, data_field="table/b").data, expected[:, 1])
    assert_same_bits(first_batch(odd_names, data_field="t\udcff").data, np.zeros(12, "S4"))
    with pytest.raises(DatasetError, match="read each member by itself"):
        reader_of(odd_names, data_field="table")


def test_names_of_fields_that_are_not_utf8(odd_names):
    with reader_of(odd_names, fields={NAME: NAME}) as reader:
        assert_same_bits(reader.get_next_batch()[NAME], np.arange(24).reshape(12, 2))
        copy = pickle.loads(pickle.dumps(reader.config))
        assert copy == reader.config


@each("workers", ["thread", "process"])
@each("name", [f"{NAME}x", GROUP.decode(errors="surrogateescape"), "table/x"])
def test_errors_show_names_that_are_not_utf8(odd_names, name, workers):
    with pytest.raises(H5AsyncError) as caught:
        reader_of(odd_names, data_field=name, workers=workers)
    error = caught.value
    for text in (str(error), str(pickle.loads(pickle.dumps(error)))):
        assert r"\x" in text
        text.encode()
        print(text)
        assert json.loads(json.dumps(text)) == text


def test_errors_say_how_to_type_names_that_are_not_utf8(odd_names):
    with pytest.raises(DatasetError) as caught:
        reader_of(odd_names, data_field="x")
    assert r"--data-field $'caf\xe9/d\xff'" in str(caught.value)
    script = f"printf %s {shell_word(NAME + chr(39) + chr(92))}"
    shown = subprocess.run(["bash", "-c", script], capture_output=True, check=True, timeout=SECONDS)
    assert shown.stdout == name_bytes(NAME) + b"'\\"


def test_read_errors_show_names_that_are_not_utf8(path):
    with h5py.File(path, "w") as file:
        data = np.arange(100)
        dataset = file.create_group(GROUP).create_dataset(
            DATASET, data=data, chunks=(100,), compression="gzip"
        )
        offset = dataset.id.get_chunk_info(0).byte_offset
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(b"\xff" * 8)
    with reader_of(path, data_field=NAME) as reader, pytest.raises(ReadError) as caught:
        reader.get_next_batch()
    assert r'"caf\xe9/d\xff"' in str(caught.value)


def test_the_command_line_with_names_that_are_not_utf8(odd_names):
    for encoding in ("utf-8", "ascii", "latin-1"):
        environment = {**os.environ, "PYTHONIOENCODING": encoding}

        def shown(*arguments, environment=environment, code=0):
            result = subprocess.run(
                [SCRIPT, *arguments], env=environment, capture_output=True, timeout=SECONDS
            )
            assert result.returncode == code, result.stderr
            assert b"Traceback" not in result.stderr
            return result.stdout + result.stderr

        listed = shown("inspect", odd_names).splitlines()
        names = [line.split()[0] for line in listed[2:-2]]
        assert names == [rb"caf\xe9/d\xff", b"plain", rb"soft\xfe", b"table", b"text", rb"t\xff"]
        given = [odd_names, "--no-labels", "--data-field"]
        assert rb'"caf\xe9/d\xff"' in shown("read", *given, name_bytes(NAME))
        assert rb'"no\xff"' in shown("read", *given, b"no\xff", code=1)


def test_files_whose_names_are_not_utf8(tmp_path):
    path = tmp_path / os.fsdecode(b"\xff.h5")
    try:
        with h5py.File(os.fsencode(path), "w") as file:
            file["data"] = np.arange(5)
    except OSError:
        pytest.skip("the file system takes no such name")
    for given in (path, str(path), os.fsencode(path), [path]):
        assert_same_bits(first_batch(given).data, np.arange(5))
    with pytest.raises(DatasetError) as caught:
        reader_of(path, data_field="x")
    assert r"\xff.h5" in str(caught.value)


def test_names_that_no_file_can_hold(path):
    with pytest.raises(ConfigError, match="no file can hold this name"):
        reader_of(path, data_field="\ud800")


def test_printable_text():
    assert printable("café") == "café"
    assert printable("a\udcff\ud800é") == r"a\xff\ud800é"


# --- large files ---------------------------------------------------------------------------------


def file_of_many(path, count):
    with h5py.File(path, "w") as file:
        space = h5py.h5s.create_simple((3,))
        for number in range(count):
            h5py.h5d.create(file.id, b"set%05d" % number, h5py.h5t.STD_I32LE, space)


@pytest.mark.parametrize("how", ["one group", "many groups"])
def test_what_is_looked_at_to_say_what_is_there(path, monkeypatch, how):
    count = 1000
    if how == "one group":
        file_of_many(path, count)
    else:
        with h5py.File(path, "w") as file:
            for number in range(count):
                file[f"group{number:04}/set"] = np.zeros(3)
    looked_at = []
    monkeypatch.setattr(
        contents, "walk", lambda *given: (looked_at.append(x) or x for x in walk(*given))
    )
    with pytest.raises(DatasetError) as caught:
        reader_of(path, data_field="misspelt")
    text = str(caught.value)
    assert 200 <= len(looked_at) <= 201
    assert 'there is no dataset "misspelt"; the first 200 objects of the file hold "' in text
    assert "; there are others; try: h5async read" in text


def test_what_is_there_where_no_dataset_comes_early(path):
    with h5py.File(path, "w") as file:
        for number in range(300):
            file.create_group(f"group{number:03}")
    with pytest.raises(DatasetError, match="the first 200 objects of the file are no datasets"):
        reader_of(path)


def test_a_file_is_walked_through_like_h5py_does(path):
    with h5py.File(path, "w") as file:
        for name in ("b/x", "a-b", "a/y", "a/b/c", "z"):
            file[name] = np.zeros(3)
        file["a/b/back"] = file["a"]
        file["again"] = file["z"]
        file["soft"] = h5py.SoftLink("/z")
        file["type"] = np.dtype("i4")
    with h5py.File(path) as file:
        found = list(walk(file))
        expected = {}
        file.visititems(lambda name, node: expected.update({name: node}))
        assert {x.path for x in found if x.kind == "group"} == {
            name for name, node in expected.items() if isinstance(node, h5py.Group)
        }
        datasets = [x.path for x in found if x.kind == "dataset"]
        assert datasets == ["a/b/c", "a/y", "a-b", "again", "b/x"]
        assert [x.path for x in found if x.kind == "link"] == ["soft"]
        assert [x.path for x in found if x.kind == "other"] == ["type"]


def test_groups_within_groups_within_groups(path):
    with h5py.File(path, "w") as file:
        group = file
        for _ in range(1500):
            group = group.create_group("g")
        group["data"] = np.zeros(3)
    with h5py.File(path) as file:
        assert list(walk(file))[-1] == ("g/" * 1500 + "data", "dataset")


def test_inspect_shows_what_it_finds_as_it_finds_it(path, monkeypatch):
    """The first rows are there before the last ones are looked at."""
    file_of_many(path, 5)
    printed = []
    monkeypatch.setattr("h5async.cli.rowlisting.BLOCK_SECONDS", -1.0)  # nothing is held back
    monkeypatch.setattr("typer.echo", lambda text, **_: printed.append(text))
    seen = []
    layout_at = metadata.layout_at

    def noted(file, name, *others):
        seen.append((name, "\n".join(printed)))
        return layout_at(file, name, *others)

    monkeypatch.setattr(metadata, "layout_at", noted)
    assert CliRunner().invoke(cli.app, ["inspect", str(path)]).exit_code == 0
    for number, (name, before) in enumerate(seen):
        assert name == f"set{number:05}"
        assert before.count("set0") == number
    lines = "\n".join(printed).splitlines()
    assert [line.split()[0] for line in lines[2:-2]] == [name for name, _ in seen]
    assert lines[0].startswith("dataset ")


def test_columns_of_inspect_get_only_wider(tmp_path, monkeypatch):
    with h5py.File(tmp_path / "file.h5", "w") as file:
        file["a"] = np.zeros(3)
        file["b" * 50] = np.zeros((100, 100, 100), "i1")
        file["c"] = np.zeros(3)
    monkeypatch.setattr("h5async.cli.rowlisting.BLOCK_SECONDS", -1.0)
    result = CliRunner().invoke(cli.app, ["inspect", str(tmp_path / "file.h5")])
    _, _, a, b, c, *_ = result.stdout.splitlines()
    assert a.split() == ["a", *c.split()[1:]]
    assert b.index("(100") == c.index("(3") > a.index("(3")


# --- who takes the output away -------------------------------------------------------------------

COMMANDS = [
    "inspect file.h5",
    "read file.h5",
    "bench file.h5 --seconds 0.05",
    "--help",
    "--version",
    "read --help",
]


@pytest.fixture
def plain(path):
    with h5py.File(path, "w") as file:
        file["data"] = np.zeros((100, 3))
        file["labels"] = np.arange(100)
    return path


def shell(command, folder):
    path = f"{os.path.dirname(SCRIPT)}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("command", COMMANDS)
def test_output_that_cannot_be_written(plain, command):
    result = shell(f"h5async {command} > /dev/full", plain.parent)
    assert result.returncode == 1
    assert result.stderr == "error: the output cannot be written: No space left on device\n"
    result = shell(f"h5async {command} > /dev/full 2>&1", plain.parent)
    assert (result.returncode, result.stderr) == (1, "")


@pytest.mark.parametrize("command", COMMANDS)
def test_output_that_nobody_reads(plain, command):
    read, write = os.pipe()
    os.close(read)
    with open(write, "wb") as nobody:
        result = subprocess.run(
            [SCRIPT, *command.split()],
            cwd=plain.parent,
            stdout=nobody,
            stderr=subprocess.PIPE,
            text=True,
            timeout=SECONDS,
        )
    assert (result.returncode, result.stderr) == (1, "")
    assert shell(f"h5async {command} | head -1", plain.parent).stderr == ""


def test_other_errors_of_the_system_are_none_of_the_outputs(monkeypatch):
    def fail():
        raise OSError(12, "another error")

    monkeypatch.setattr("typer.echo", lambda *_, **__: fail())
    result = CliRunner().invoke(cli.app, ["--version"])
    assert isinstance(result.exception, OSError)
    assert "another error" in str(result.exception)


# --- files that cannot be opened -----------------------------------------------------------------

AS_NOBODY = """
import os, sys
from h5async import AsyncReader, H5AsyncError, cli
try:
    AsyncReader(hdf5_path="/there/is/none.h5", device="cpu")  # what is loaded late, is now
except H5AsyncError:
    pass
if os.getuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
try:
    AsyncReader(hdf5_path=sys.argv[1], device="cpu")
except H5AsyncError as error:
    print(type(error).__name__, error)
sys.argv = ["h5async", sys.argv[2], sys.argv[1]]
cli.app()
"""


@pytest.mark.parametrize("command", ["inspect", "read"])
def test_a_folder_that_may_not_be_entered(plain, command):
    # In one that anybody may enter.
    folder = plain.parent / "closed"
    folder.mkdir()
    (folder / "file.h5").write_bytes(plain.read_bytes())
    folder.chmod(0)
    try:
        result = run(AS_NOBODY, folder / "file.h5", command)
    finally:
        folder.chmod(0o700)
    message = f"cannot open {folder / 'file.h5'}: Permission denied"
    assert result.stdout == f"ReadError {message}\n", result.stderr
    assert (result.returncode, result.stderr) == (1, f"error: {message}\n")


@pytest.mark.parametrize("number", [13, 5, 116])
def test_a_file_that_cannot_be_looked_at(plain, monkeypatch, number):
    stat = os.stat

    def failing(path, *others, **options):
        if str(path) == str(plain):
            raise OSError(number, os.strerror(number), str(path))
        return stat(path, *others, **options)

    monkeypatch.setattr(os, "stat", failing)
    with pytest.raises(ReadError) as caught:
        reader_of(plain)
    assert str(caught.value) == f"cannot open {plain}: {os.strerror(number)}"


@pytest.mark.parametrize("name", ["a" * 300, "a" * 300 + "*", "a" * 5000])
def test_names_of_files_that_are_too_long(tmp_path, name):
    with pytest.raises(ReadError, match=r"File name too long|no file matches"):
        reader_of(tmp_path / name)
    with pytest.raises(ConfigError, match="File name too long"):
        AsyncReader(str(tmp_path / name))
    result = CliRunner().invoke(cli.app, ["inspect", str(tmp_path / name)])
    assert result.exit_code == 1
    assert result.stderr.startswith("error: cannot open ")


# --- the core that the environment names ---------------------------------------------------------

OPEN = """
import sys
import h5async
print("imported")
try:
    h5async.AsyncReader(hdf5_path=sys.argv[1], device="cpu", workers=sys.argv[2])
except h5async.H5AsyncError as error:
    print(error)
"""


@pytest.mark.parametrize("workers", ["thread", "process"])
@pytest.mark.parametrize("chosen", ["1", "/no/such/core.so", __file__, "another library"])
def test_a_core_that_is_none(plain, chosen, workers):
    if chosen == "another library":
        chosen = h5py.h5p.__file__
    result = run(OPEN, plain, workers, H5ASYNC_CORE=chosen)
    assert result.returncode == 0, result.stderr
    imported, message = result.stdout.splitlines()
    assert imported == "imported"
    assert f"H5ASYNC_CORE={chosen} names no core that can be loaded" in message
    assert "set it to 0 to use none" in message


def test_a_core_that_is_none_is_told_again(monkeypatch):
    monkeypatch.setenv("H5ASYNC_CORE", "1")
    load_core.cache_clear()
    try:
        for _ in range(2):
            with pytest.raises(ConfigError, match="H5ASYNC_CORE=1"):
                load_core()
    finally:
        monkeypatch.undo()
        load_core.cache_clear()


# --- options -------------------------------------------------------------------------------------

NO_TIMEOUTS = [
    *([1, 2, 3], "5", True, False, -1, -0.5, 1j, {}),
    *(math.nan, math.inf, -math.inf, 1e10, 1e300, 10**5000, np.array([1.0, 2.0])),
]


@each("timeout", NO_TIMEOUTS)
@each("num_threads", [0, 1])
def test_timeouts_that_are_none(plain, timeout, num_threads):
    text = "timeout: must be None, for no limit, or seconds, from 0 to 1,000,000,000"
    with reader_of(plain, num_threads=num_threads, debug_lifetimes=True) as reader:
        batch = reader.get_next_batch()
        with pytest.raises(ConfigError) as caught:
            reader.get_next_batch(timeout)
        assert text in str(caught.value)
        assert batch.data.shape == (32, 3), "the batch in hand lives on"
        assert reader.get_next_batch().number == 1
    with pytest.raises(ConfigError) as caught:
        reader_of(plain, timeout=timeout)
    assert text in str(caught.value)


@each("timeout", [None, 1e9, 300, np.float32(300), np.int64(300), 250.5])
@each("workers", ["thread", "process"])
def test_timeouts(plain, timeout, workers):
    with reader_of(plain, timeout=timeout, workers=workers) as reader:
        assert reader.get_next_batch(timeout).number == 0
        assert reader.get_next_batch().number == 1


NUMBER = "must be a number, or one for each channel"


@each(
    "field, message",
    [
        ({"pth": "data"}, "fields: x: unknown option 'pth'; did you mean 'path'?"),
        ({"pth": "data", "path": "data"}, "fields: x: unknown option 'pth'; did you mean 'path'?"),
        ({}, "fields: x: path is required"),
        ({"path": None}, "fields: x: path: must be a string, found None"),
        ({"path": ""}, "fields: x: path: the path is empty"),
        ({5: "data"}, "fields: x: unknown option '5'"),
        (
            {"path": "data", "axes": 5},
            "fields: x: axes: must be a list of dimensions, by number or",
        ),
        ({"path": "data", "scale": [None]}, f"fields: x: scale: {NUMBER}, found [None]"),
        ({"path": "data", "scale": "a"}, f"fields: x: scale: {NUMBER}, found 'a'"),
        ({"path": "data", "offset": ["a"]}, f"fields: x: offset: {NUMBER}, found ['a']"),
        ({"path": "data", "axes": [1.5]}, "fields: x: axes: must be the number of a dimension, or"),
        ({"path": "data", "scale": [10**400]}, "fields: x: scale: "),
        ({"path": "data", "dtype": ("f4", -1)}, "fields: x: dtype: must be a NumPy dtype"),
        ({"path": "data", "dtype": "V4"}, "fields: x: dtype: must be a boolean or numeric dtype"),
        ("", "fields: x: path: the path is empty"),
        (5, "fields: x: must be a path or a Field, found 5"),
        (None, "fields: x: must be a path or a Field, found None"),
    ],
)
def test_fields_that_do_not_fit(plain, field, message):
    with pytest.raises(ConfigError) as caught:
        AsyncReader(hdf5_path=plain, fields={"x": field})
    assert str(caught.value).startswith(message)


def test_fields_without_a_path():
    with pytest.raises(ConfigError, match="unknown option 'pth'; did you mean 'path'"):
        Field(pth="data")
    with pytest.raises(ConfigError, match="path is required"):
        Field()


def test_fields_as_mappings(plain):
    batch = first_batch(plain, fields={"x": {"path": "data", "dtype": "f4"}, "y": "labels"})
    assert batch.x.dtype == np.float32
    assert batch.y.tolist() == list(range(32))


@pytest.mark.parametrize("none", [None, ""])
def test_fields_and_no_labels(plain, none, tmp_path):
    assert list(first_batch(plain, fields={"x": "data"}, labels_field=none).keys()) == ["x"]
    toml = tmp_path / "options.toml"
    toml.write_text(f'hdf5_path = "{plain.name}"\nlabels_field = ""\nfields.x = "data"\n')
    with AsyncReader(toml, device="cpu") as reader:
        assert reader.get_next_batch().keys() == ["x"]
    with pytest.raises(ConfigError, match="give fields or labels_field, not both"):
        reader_of(plain, fields={"x": "data"}, labels_field="labels")
    with pytest.raises(ConfigError, match="give fields or data_field, not both"):
        reader_of(plain, fields={"x": "data"}, data_field="data")


CONFIGURATIONS = [
    {"hdf5_path": "a.h5"},
    {"hdf5_path": ["a.h5", Path("b.h5")], "labels_field": None, "timeout": 3},
    {"hdf5_path": "a.h5", "fields": {"x": Field("d", dtype="f4"), "y": "labels"}},
    {"hdf5_path": "a.h5", "fields": {"x": Field("d", axes=(0, 2, 1), scale=[1, 2.5])}},
    {"hdf5_path": "a.h5", "fields": {"x": "d"}, "labels_field": None, "shuffle": True},
    {"hdf5_path": "a.h5", "allow_external": ["x", Path("y")], "rank": 1, "world_size": 3},
    {"hdf5_path": b"\xff.h5", "data_field": NAME, "labels_field": b"\xff"},
    {"hdf5_path": "a.h5", "fields": {NAME: Field(NAME, offset=1)}, "cache": "host"},
    {"hdf5_path": "a.h5", "postprocess": "module:function", "num_threads": 0},
    *(
        {"hdf5_path": "a.h5", "fields": {"x": Field("d", dtype=dtype)}}
        for dtype in ("?", "i1", "<u2", ">i8", "f2", "f8", "c8", "c16", np.longdouble)
    ),
]


@each("options", CONFIGURATIONS)
def test_a_configuration_as_json(options):
    config = ReaderConfig(**options)
    for text in (config.model_dump_json(), config.model_dump_json(indent=2)):
        assert ReaderConfig.load(json.loads(text)) == config
    assert ReaderConfig.load(config.model_dump()) == config
    assert ReaderConfig.load(config.model_dump(exclude_unset=True)) == config
    assert pickle.loads(pickle.dumps(config)) == config
    json.dumps(config.model_dump(mode="json"))


def halved(data):
    return data / 2


def test_a_function_in_a_configuration_as_json(tmp_path):
    config = ReaderConfig(hdf5_path="a.h5", postprocess=os.path.join)
    assert json.loads(config.model_dump_json())["postprocess"] == "posixpath:join"
    assert config.model_dump(mode="json")["postprocess"] == "posixpath:join"
    assert config.model_dump()["postprocess"] is os.path.join
    config = ReaderConfig(hdf5_path="a.h5", postprocess=lambda data: data)
    with pytest.raises(ConfigError, match='give it as "module:function"'):
        config.model_dump_json()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda reader: reader.set_epoch("a"), "an epoch must be an integer from 0, found 'a'"),
        (lambda reader: reader.set_epoch(1.5), "an epoch must be an integer from 0, found 1.5"),
        (lambda reader: reader.load_state_dict([1]), "takes what state_dict"),
        (lambda reader: reader.load_state_dict(None), "takes what state_dict"),
    ],
)
def test_arguments_that_do_not_fit(plain, call, message):
    with reader_of(plain) as reader, pytest.raises(ConfigError, match=message):
        call(reader)


def test_values_that_do_not_fit_are_cut_short():
    with pytest.raises(ConfigError) as caught:
        ReaderConfig(hdf5_path="a.h5", batch_size="x" * 100_000)
    assert len(str(caught.value)) < 1000


# --- postprocess ---------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", ["thread", "process"])
@pytest.mark.parametrize(
    ("postprocess", "message"),
    [
        (lambda data, labels: (data[:-1], labels), "of shapes (31, 3), (32,)"),
        (lambda data, labels: (data, labels[::2]), "of shapes (32, 3), (16,)"),
        (lambda data, labels: (data[:0], labels.tolist()), "of shapes (0, 3), (32,)"),
        (lambda data, labels: ([[1], [1, 2]], labels), "returned no arrays: "),
    ],
)
def test_postprocess_that_returns_unequal_numbers_of_rows(plain, postprocess, message, workers):
    options = {"labels_field": "labels", "postprocess": postprocess, "workers": workers}
    with reader_of(plain, **options) as reader:
        for number in range(2):
            with pytest.raises(PostprocessError) as caught:
                reader.get_next_batch()
            assert f"batch {number} of epoch 0" in str(caught.value)
            assert message in str(caught.value)


@pytest.mark.parametrize(
    "postprocess",
    [
        lambda data, labels: (data[::2], labels[::2]),
        lambda data, labels: (np.repeat(data, 2, 0), np.repeat(labels, 2)),
        lambda data, labels: (data.sum(), labels),
    ],
)
def test_postprocess_that_returns_other_numbers_of_rows(plain, postprocess):
    batch = first_batch(plain, labels_field="labels", postprocess=postprocess)
    expected = postprocess(truth(plain)[:32], truth(plain, "labels")[:32])
    for found, wanted in zip(batch, expected, strict=True):
        assert_same_bits(found, np.asarray(wanted))


def test_a_file_whose_root_group_is_damaged_is_refused_by_name(tmp_path):
    """The message tells what the file holds, which nobody can list."""
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file["data"] = np.zeros((4, 3))
    content = path.read_bytes()

    def is_found_late(begin: int) -> bool:
        """Damage the file there; tell whether HDF5 opens the file, and not its root group."""
        path.write_bytes(content[:begin] + bytes(4) + content[begin + 4 :])
        with contextlib.suppress(OSError), h5py.File(path) as file:
            try:
                h5py.h5o.get_info(file["/"].id)
            except (KeyError, RuntimeError):
                return True
        return False

    assert any(map(is_found_late, range(24, 200)))
    with pytest.raises(DatasetError, match=r"a\.h5: .*nothing in it can be listed"):
        AsyncReader(hdf5_path=path, labels_field=None)
    with pytest.raises(DatasetError, match=r"a\.h5: the file is damaged"):
        list(metadata.list_layouts(path))
