"""Saved indices of ragged, sparse, image and table fields: readers by them, and damaged ones."""

from __future__ import annotations

import itertools
import json
import os

import h5py
import numpy as np
import pytest
from test_ragged import KINDS, SEED, check, fields_of, several
from typer.testing import CliRunner

from h5async import (
    AsyncReader,
    DatasetError,
    Field,
    H5AsyncError,
    ReaderConfig,
    ReadError,
    SparseField,
)
from h5async.cli import app
from h5async.cli import bench as measuring
from h5async.index import indexcache
from h5async.index.savedfile import read_saved, write_saved
from h5async.opening import dataset, fieldkinds, filefacts

NAMES = [f"gene{number}" for number in range(9)]


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """Two files and an empty one, with a field of each kind."""
    rng = np.random.default_rng(SEED)
    files = [rng.integers(0, 9, 41).tolist(), [], [*rng.integers(0, 4, 20).tolist(), 100]]
    return several(tmp_path_factory, files, KINDS, "gzip", userblock=512)


def run(*words):
    found = CliRunner().invoke(app, [str(word) for word in words])
    assert found.exit_code == 0, found.output
    return found.output


def nothing_is_read(monkeypatch):
    """Make it an error to read metadata of a file."""

    def refuse(path, *_):
        raise AssertionError(f"{path} was read")

    monkeypatch.setattr(dataset, "read_known", refuse)
    monkeypatch.setattr(fieldkinds, "_in_file", refuse)


def typed(fields):
    """Return fields as they are typed."""
    for name, field in fields.items():
        if isinstance(field, str):
            yield from ("--field", f"{name}={field}")
            continue
        kind = "sparse" if isinstance(field, SparseField) else "ragged"
        options = {"path": field.path, "kind": kind}
        for option in ("offsets", "offsets_kind"):
            if getattr(field, option, None) is not None:
                options[option] = getattr(field, option)
        text = ", ".join(f"{key} = {json.dumps(value)}" for key, value in options.items())
        yield from ("--field", f"{name}={{{text}}}")


def check_all(path, truths, **options):
    fields, options = fields_of(truths), {"batch_size": 8, "device": "cpu"} | options
    with AsyncReader(hdf5_path=path, fields=fields, **options) as reader:
        assert reader.num_samples == 62
        seen = []
        for batch in reader:
            check(batch, truths)
            seen += batch.index.tolist()
        assert sorted(seen) == list(range(62))
        check(reader.read([61, 0, 61]), truths)
        return reader.state_dict()


@pytest.mark.parametrize("io", ["auto", "pread"])
@pytest.mark.parametrize("shuffle", [False, "full", "window"])
def test_a_named_index_of_fields_stands_for_the_files(mixed, tmp_path, monkeypatch, io, shuffle):
    paths, truths = mixed
    index = tmp_path / "all.h5idx"
    run("index", *paths, "-o", index, *typed(fields_of(truths)))
    without = check_all(paths, truths, io=io, shuffle=shuffle)
    nothing_is_read(monkeypatch)
    assert check_all(index, truths, io=io, shuffle=shuffle) == without


def test_an_index_of_all_datasets_knows_what_says_of_itself_what_it_is(
    mixed, tmp_path, monkeypatch
):
    paths, truths = mixed
    index = tmp_path / "all.h5idx"
    run("index", *paths, "-o", index)
    check_all(index, truths)  # the others are read from the files
    nothing_is_read(monkeypatch)
    names = ("vlen", "strings", "bytes", "csr", "dense", "some", "plain")
    check_all(index, {name: truths[name] for name in names})


def test_an_index_stays_an_index_of_its_files_alone(mixed, tmp_path):
    paths, truths = mixed
    run("index", *paths[:2], "-o", tmp_path / "some.h5idx")
    check_all([tmp_path / "some.h5idx", paths[2]], truths)


@pytest.mark.parametrize("num_threads", [0, 2])
def test_a_second_reader_reads_nothing(mixed, tmp_path, monkeypatch, num_threads):
    paths, truths = mixed
    options = {"index_cache": tmp_path / "kept.h5idx", "num_threads": num_threads}
    check_all(paths, truths, **options)
    monkeypatch.setattr(dataset, "read_known", None)
    check_all(paths, truths, **options)


def test_the_core_reads_what_was_indexed_without_it(mixed, tmp_path, monkeypatch):
    paths, truths = mixed
    index = tmp_path / "all.h5idx"
    with monkeypatch.context() as patched:
        patched.setattr("h5async.opening.filevalues.load_core", lambda: None)
        run("index", *paths, "-o", index, *typed(fields_of(truths)))
    check_all(index, truths)


def test_the_cache_folder(mixed, tmp_path, monkeypatch):
    paths, truths = mixed
    monkeypatch.setattr(indexcache, "LEAST_SECONDS", 0)
    check_all(paths, truths, index_cache=tmp_path)
    assert len(list(tmp_path.glob("*.h5idx"))) == 1
    monkeypatch.setattr(dataset, "read_known", None)
    check_all(paths, truths, index_cache=tmp_path)


# --- files that change -------------------------------------------------------------------------


def tokens_file(path, lengths=(2, 0, 3)):
    with h5py.File(path, "w") as file:
        file["tokens"] = np.arange(9)
        file["lengths"] = np.array(lengths)
        data = file.create_dataset("vlen", (3,), h5py.vlen_dtype("i4"))
        for number, length in enumerate(lengths):
            data[number] = np.arange(length) + number
    return path


FLAT = {"path": "tokens", "kind": "ragged", "offsets": "lengths", "offsets_kind": "lengths"}


def test_a_state_of_fields_with_the_same_offsets_is_the_same_by_an_index(tmp_path):
    path, index = tokens_file(tmp_path / "a.h5"), tmp_path / "kept.h5idx"
    options = {"hdf5_path": path, "fields": {"tokens": FLAT, "padded": FLAT | {"pad_to": 2}}}
    with AsyncReader(options, index_cache=False) as reader:
        state = reader.state_dict()
    for _ in range(2):
        with AsyncReader(options, index_cache=index) as reader:
            reader.load_state_dict(state)
            assert reader.state_dict() == state


@pytest.mark.parametrize("field", ["vlen", FLAT])
def test_offsets_that_were_rewritten(tmp_path, field):
    """The values' own metadata stay as they were: nobody would notice when they are read."""
    path, index = tokens_file(tmp_path / "a.h5"), tmp_path / "a.h5idx"
    options = {"fields": {"x": field}, "device": "cpu"}
    with AsyncReader(hdf5_path=path, index_cache=index, **options) as reader:
        assert reader.get_next_batch().x.lengths.tolist() == [2, 0, 3]
    text = (
        "x=vlen"
        if field == "vlen"
        else "x={" + ", ".join(f'{k}="{v}"' for k, v in FLAT.items()) + "}"
    )
    run("index", path, "-o", tmp_path / "named.h5idx", "--field", text)
    with h5py.File(path, "r+") as file:
        file["lengths"][...] = [1, 1, 4]
        file["vlen"][1] = np.arange(7)
    os.utime(path, ns=(1, 1))
    wanted = [1, 1, 4] if field != "vlen" else [2, 7, 3]
    with AsyncReader(hdf5_path=path, index_cache=index, **options) as reader:
        assert reader.get_next_batch().x.lengths.tolist() == wanted
    with pytest.raises(ReadError, match=r"was changed or removed since .*named\.h5idx"):
        AsyncReader(hdf5_path=tmp_path / "named.h5idx", **options)


# --- tables ------------------------------------------------------------------------------------


def cells_file(path, codes, categories, dtype="i1", older=False):
    """Write a file as AnnData does, by hand."""
    count = len(codes)
    with h5py.File(path, "w") as file:
        x = file.create_group("X")
        x.attrs["encoding-type"], x.attrs["shape"] = "csr_matrix", (count, len(NAMES))
        x["data"] = np.arange(count, dtype="f4") + 1
        x["indices"] = np.arange(count) % len(NAMES)
        x["indptr"] = np.arange(count + 1)
        file["var/_index"] = NAMES
        if older:
            file["obs/kind"] = np.array(codes, dtype)
            file["obs/__categories/kind"] = categories
            if older == "attribute":
                file["obs/kind"].attrs["categories"] = file["obs/__categories/kind"].ref
        else:
            kind = file.create_group("obs/kind")
            kind.attrs["encoding-type"] = "categorical"
            kind["codes"], kind["categories"] = np.array(codes, dtype), categories
        age = file.create_group("obs/age")
        age.attrs["encoding-type"] = "nullable-integer"
        age["values"], age["mask"] = np.arange(count), np.arange(count) % 2 == 0
    return path


CELLS = {"x": "X", "kind": "obs/kind", "age": "obs/age"}


def check_cells(path, names, wanted, fields=CELLS, **options):
    with AsyncReader(hdf5_path=path, fields=fields, device="cpu", **options) as reader:
        assert reader.categories["kind"] == names
        batch = reader.get_next_batch()
        assert [None if c < 0 else names[c] for c in batch.kind.tolist()] == wanted
        assert np.issubdtype(batch.kind.dtype, np.signedinteger)
        if "age" in fields:
            assert batch.age_mask.tolist()[:2] == [True, False]
        if "x" in fields:
            assert batch.x.shape == (len(wanted), len(NAMES))


@pytest.mark.parametrize("all_datasets", [True, False])
@pytest.mark.parametrize("older", [False, "attribute", True])
def test_tables(tmp_path, monkeypatch, all_datasets, older):
    paths = [
        cells_file(tmp_path / "a.h5ad", [0, -1, 1], ["T", "B"], older=older),
        cells_file(tmp_path / "b.h5ad", [0, 1], ["B", "Mönozyt"], older=older),
    ]
    index = tmp_path / "all.h5idx"
    names, wanted = ("T", "B", "Mönozyt"), ["T", None, "B", "B", "Mönozyt"]
    options = [] if all_datasets else [w for n, p in CELLS.items() for w in ("--field", f"{n}={p}")]
    run("index", *paths, "-o", index, *options)
    check_cells(paths, names, wanted)
    check_cells(paths, names, wanted, {"kind": "obs/kind"})
    check_cells(paths, names, wanted, index_cache=tmp_path / "kept.h5idx")
    if all_datasets:
        nothing_is_read(monkeypatch)
    check_cells(index, names, wanted)
    check_cells(index, names, wanted, {"kind": "obs/kind"})
    monkeypatch.setattr(filefacts, "_read_below", None)
    check_cells(
        paths, names, wanted, index_cache=tmp_path / "kept.h5idx"
    ) if not all_datasets else None


def test_codes_of_differing_dtypes(tmp_path):
    many = [f"kind{number}" for number in range(300)]
    paths = [
        cells_file(tmp_path / "a.h5ad", [0, -1, 1], many[:2]),
        cells_file(tmp_path / "b.h5ad", [299, 2, -1], many, "i2"),
        cells_file(tmp_path / "c.h5ad", [0, 1], many[5:7]),
    ]
    wanted = ["kind0", None, "kind1", "kind299", "kind2", None, "kind5", "kind6"]
    check_cells(paths, tuple(many), wanted)
    check_cells(paths, tuple(many), wanted, shuffle=False, num_threads=0)
    run("index", *paths, "-o", tmp_path / "all.h5idx")
    check_cells(tmp_path / "all.h5idx", tuple(many), wanted)


def test_numbers_as_categories(tmp_path, monkeypatch):
    path = cells_file(tmp_path / "a.h5ad", [1, 0], [2.5, 7.0])
    check_cells(path, (2.5, 7.0), [7.0, 2.5])
    run("index", path, "-o", tmp_path / "a.h5idx")
    nothing_is_read(monkeypatch)
    check_cells(tmp_path / "a.h5idx", (2.5, 7.0), [7.0, 2.5])


def test_columns_by_name(tmp_path, monkeypatch):
    path = cells_file(tmp_path / "a.h5ad", [0, 0, 0], ["T"])
    run("index", path, "-o", tmp_path / "a.h5idx")
    field = SparseField("X", columns=["gene1", "gene0"], missing="error", dense=True)
    strict = SparseField("X", columns=["gene1", "none"], missing="error")
    with pytest.raises(DatasetError, match=r'group "X" has no column "none"; .*missing="zero"'):
        AsyncReader(hdf5_path=path, fields={"x": strict})
    nothing_is_read(monkeypatch)
    with AsyncReader(hdf5_path=tmp_path / "a.h5idx", fields={"x": field}, device="cpu") as reader:
        assert reader.get_next_batch().x.tolist() == [[0, 1], [2, 0], [0, 0]]


# --- what they are -----------------------------------------------------------------------------


@pytest.mark.parametrize("by_index", [False, True])
def test_inspect_says_what_groups_and_datasets_are_read_as(tmp_path, by_index):
    path = cells_file(tmp_path / "a.h5ad", [0, -1, 1, 1], ["T", "B"])
    with h5py.File(path, "r+") as file:
        data = file.create_dataset("tokens", (4,), h5py.vlen_dtype("i4"))
        for number in range(4):
            data[number] = np.arange(number)
        x = file.create_group("tenx")
        x["data"], x["indices"], x["indptr"] = np.ones(6), np.zeros(6, int), [0, 2, 6]
        x["shape"] = [5, 2]
        x.create_dataset("barcodes", data=["a", "b"], dtype=h5py.string_dtype())
    if by_index:
        run("index", path, "-o", tmp_path / "a.h5idx")
        path = tmp_path / "a.h5idx"
    found = {d["path"]: d for d in json.loads(run("inspect", path, "--json"))["datasets"]}
    for name, kind, shape, mean in (
        ("X", "sparse", [4, 9], 1.0),
        ("tenx", "sparse", [2, 5], 3.0),
        ("tokens", "ragged", [4], 1.5),
        ("tenx/barcodes", "ragged", [2], 1.0),
        ("obs/kind", "categorical", [4], None),
        ("obs/age", "nullable", [4], None),
        ("obs/age/values", "dataset", [4], None),
    ):
        here = found[name]
        assert (here["kind"], here["shape"], here["mean_length"]) == (kind, shape, mean), name
        assert here["read"] == "direct"
    assert found["obs/kind"]["categories"] == 2
    assert found["tokens"]["in_order_nbytes"] == 6
    assert found["X"]["in_order_nbytes"] == 4 + 8
    text = run("inspect", path)
    for words in (
        "as Csr, 3 values each",
        "as Ragged, 1.5 values each",
        "as codes of 2 categories",
    ):
        assert words in text


def test_bench_counts_the_values_of_samples(tmp_path, monkeypatch):
    """A batch is the whole epoch, and takes a second."""
    path = tokens_file(tmp_path / "a.h5", (2, 0, 30))
    monkeypatch.setattr(measuring, "perf_counter", map(float, itertools.count()).__next__)
    config = ReaderConfig.load(
        {"hdf5_path": path, "fields": {"x": "vlen"}, "batch_size": 3, "device": "cpu"}
    )
    assert measuring.speed_of(config, {}, 1.0) == 4 * 32


# --- groups ------------------------------------------------------------------------------------


def test_groups_of_a_named_index(tmp_path, monkeypatch):
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        for number, length in enumerate((3, 1, 2)):
            group = file.create_group(f"demo_{number}")
            group["actions"] = np.arange(length + 1) + 10 * number
            text = [f"{number} {row}" for row in range(length)]
            group.create_dataset("text", data=text, dtype=h5py.string_dtype())
    run("index", path, "-o", tmp_path / "a.h5idx", "--sequences", "{groups = 'demo_*'}")
    nothing_is_read(monkeypatch)
    fields = {"actions": Field("actions", steps=[0, 1], pad="edge"), "text": "text"}
    options = {"sequences": {"groups": "demo_*"}, "fields": fields, "device": "cpu"}
    with AsyncReader(hdf5_path=tmp_path / "a.h5idx", **options) as reader:
        batch = reader.get_next_batch()
        assert batch.text.to_strings() == ["0 0", "0 1", "0 2", "1 0", "2 0", "2 1"]
        assert batch.actions.tolist() == [[0, 1], [1, 2], [2, 3], [10, 11], [20, 21], [21, 22]]


# --- damage ------------------------------------------------------------------------------------


def test_damaged_bytes_are_an_error(mixed, tmp_path):
    paths, truths = mixed
    index = tmp_path / "all.h5idx"
    run("index", paths[0], "-o", index, *typed(fields_of(truths)))
    content = index.read_bytes()
    rng = np.random.default_rng(SEED)
    for place in rng.integers(0, len(content), 40).tolist():
        damaged = bytearray(content)
        damaged[place] ^= 1 << int(rng.integers(8))
        index.write_bytes(damaged)
        with pytest.raises(ReadError, match=r"all\.h5idx"):
            AsyncReader(hdf5_path=index, fields=fields_of(truths))


HUGE = (1 << 62) - 1


@pytest.mark.parametrize("name", ["numbers", "lengths", "places"])
@pytest.mark.parametrize("value", [-1, -HUGE, 0, 1, 3, 1000, HUGE])
def test_arrays_that_lie(mixed, tmp_path, name, value):
    """The checksums hold: whoever wrote it may have meant it. Values or an error, and no crash."""
    paths, truths = mixed
    index = tmp_path / "all.h5idx"
    run("index", paths[0], "-o", index, *typed(fields_of(truths)))
    header, arrays, _ = read_saved(index, owners=[os.geteuid()], may_map=False)
    rng = np.random.default_rng(SEED)
    for place in rng.integers(0, arrays[name].size, 6).tolist():
        changed = {key: array.copy() for key, array in arrays.items()}
        changed[name][place] = np.array(value).astype(changed[name].dtype)
        rest = {key: value for key, value in header.items() if key not in ("arrays", "checksum")}
        write_saved(index, rest, {key: [one] for key, one in changed.items()}, mode=0o600)
        try:
            with AsyncReader(hdf5_path=index, fields=fields_of(truths), device="cpu") as reader:
                for _ in reader:
                    pass
        except H5AsyncError as error:
            text = str(error)
            if index.name not in text and str(paths[0]) not in text:
                raise AssertionError("the message names no file") from error


@pytest.mark.parametrize("count", [2**34, 2**62])
def test_more_elements_than_can_be_listed(tmp_path, count):
    """Chunks that were never written take no room, so a small file may say so."""
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("x", (count,), h5py.vlen_dtype("i4"), chunks=(1000,))
        matrix = file.create_group("m")
        matrix.attrs["encoding-type"], matrix.attrs["shape"] = "csr_matrix", (count - 1, 5)
        matrix["data"], matrix["indices"] = np.ones(4, "f4"), np.zeros(4, "i4")
        matrix.create_dataset("indptr", (count,), "i8", chunks=(1000,))
    for name, dataset_name in {"x": '"x"', "m": '"m/indptr"'}.items():
        with pytest.raises(
            DatasetError, match=rf"{dataset_name}.* has {count:,} elements; at most"
        ):
            AsyncReader(hdf5_path=path, fields={"x": name}, device="cpu", index_cache=False)
