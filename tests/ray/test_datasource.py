"""Read tasks of `h5async.ray.read_hdf5`, run here: blocks, cuts, sizes, columns. No cluster."""

from __future__ import annotations

import gc
import itertools
import pickle
import uuid
from types import SimpleNamespace

import h5py
import numpy as np
import pytest
from conftest import require_extra
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from h5async import (
    AsyncReader,
    ConfigError,
    DatasetError,
    Field,
    ImageField,
    RaggedField,
    ReadError,
    Sequences,
    SparseField,
    Split,
)
from h5async.cli import app

ray = require_extra("ray.data") and require_extra("ray")
pa = require_extra("pyarrow")

from h5async.ray import blockreading, datasource  # noqa: E402
from h5async.ray.datasource import Hdf5Datasource, cut  # noqa: E402
from h5async.reader.delivery import Delivery  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:ray")  # of its own options
MIB = 1 << 20
LENGTHS = np.random.default_rng(2).integers(0, 40, 500)


class Reference:
    """What `ray.put` returns, but for the store."""

    def __init__(self, value):
        self._pickled, self._name = pickle.dumps(value), uuid.uuid4().hex

    def value(self):
        return pickle.loads(self._pickled)

    def hex(self):
        return self._name


@pytest.fixture(autouse=True)
def _no_cluster(monkeypatch):
    monkeypatch.setattr(ray, "put", Reference)
    monkeypatch.setattr(ray, "get", Reference.value)
    yield
    blockreading._kept.clear()
    gc.collect()


@pytest.fixture
def paths(tmp_path):
    """Three files whose datasets have different chunks."""
    rng = np.random.default_rng(1)
    paths = [tmp_path / f"{number}.h5" for number in range(3)]
    for number, path in enumerate(paths):
        count = 100 + 7 * number
        with h5py.File(path, "w") as file:
            data = rng.integers(0, 9, (count, 8, 5)).astype("f4")
            file.create_dataset("data", data=data, chunks=(8, 8, 5), compression="gzip")
            labels = np.arange(count) + 1000 * number
            file.create_dataset("labels", data=labels, chunks=(32,), compression="gzip")
    return paths


@pytest.fixture(scope="module")
def kinds(tmp_path_factory):
    """A file with a field of each kind."""
    path, rng = tmp_path_factory.mktemp("kinds") / "kinds.h5", np.random.default_rng(3)
    values = rng.integers(0, 9, (LENGTHS.sum(), 2))
    with h5py.File(path, "w") as file:
        file["flat"], file["pairs"], file["ends"] = values[:, 0], values, np.cumsum(LENGTHS)
        vlen = file.create_dataset("vlen", (500,), h5py.vlen_dtype("i2"))
        for number, length in enumerate(LENGTHS):
            vlen[number] = np.arange(length)
        file["bools"], file["names"] = rng.random((500, 3)) < 0.5, np.arange(500).astype("S4")
        file["texts"] = np.array([b"a", b"bcd"], "S4")[rng.integers(0, 2, (500, 2))]
        file["big"] = rng.random((500, 2)).astype(">f8")
        file["both"] = rng.integers(0, 9, (500, 3), "i4").view([("a", "i4"), ("b", "f8")])[:, 0]
        file["complex"] = np.zeros(500, "c8")
    return path


def source(paths, *, with_index=False, threads=1, **options):
    return Hdf5Datasource(paths, options, with_index=with_index, threads=threads)


def blocks(made, parallelism=4, limit=None):
    tasks = made.get_read_tasks(parallelism, limit)
    return [block for task in tasks for block in task()]


def table(made, parallelism=4, limit=None):
    return pa.concat_tables(blocks(made, parallelism, limit))


def rows(column):
    """Return the rows of a column of a table, as arrays."""
    return [np.asarray(one) for chunk in column.chunks for one in _numpy(chunk)]


def _numpy(chunk):
    return chunk.to_numpy(zero_copy_only=False)


def from_reader(paths, **options):
    """Return the rows of each field of all samples, as `AsyncReader` has them."""
    with AsyncReader(hdf5_path=paths, batch_size=64, device="cpu", **options) as reader:
        batches = [batch.copy() for batch in reader]
    names = batches[0].keys()
    return {name: [row for batch in batches for row in batch[name]] for name in names}


def test_rows_are_those_of_h5py_in_order(paths):
    found = table(source(paths, with_index=True))
    for name in ("data", "labels"):
        truth = np.concatenate([h5py.File(path)[name][:] for path in paths])
        assert np.array_equal(np.stack(rows(found[name])), truth)
        assert np.stack(rows(found[name])).dtype == truth.dtype
    assert np.array_equal(found["index"].to_numpy(), np.arange(321))


@pytest.mark.parametrize("parallelism", [1, 3, 7, 1000])
def test_no_chunk_is_read_by_two_tasks(paths, parallelism):
    tasks = source(paths).get_read_tasks(parallelism)
    assert len(tasks) <= parallelism
    edges = np.unique(np.concatenate([task.read_fn.edges for task in tasks]))
    assert (edges[0], edges[-1]) == (0, 321)
    starts = np.array([0, 100, 207, 321])
    inside = edges - starts[np.searchsorted(starts, edges, side="right") - 1]
    assert not (inside % 32).any()  # a chunk of labels, and four of data


def test_large_chunks_decide_where_small_ones_are_cut(tmp_path, monkeypatch):
    path = tmp_path / "data.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("data", (300, 40), "f4", chunks=(7, 40), compression="gzip")
        file.create_dataset("labels", (300,), "f4", chunks=(100,), compression="gzip")
    monkeypatch.setattr("h5async.ray.datasource._UNIT_NBYTES", 1000)
    edges = [task.read_fn.edges for task in source(path).get_read_tasks(1000)]
    assert [begin for begin, _ in edges] == list(range(0, 300, 7))


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("flat", RaggedField("flat", offsets="ends", offsets_kind="ends")),
        ("pairs", RaggedField("pairs", offsets="ends", offsets_kind="ends")),
        ("vlen", RaggedField("vlen")),
        ("padded", RaggedField("vlen", pad_to=12)),
        ("bools", Field("bools")),
        ("names", Field("names")),
        ("texts", Field("texts")),
        ("big", Field("big", axes=(0, 1), dtype="f4")),
        ("steps", Field("big", steps=(-1, 0), pad="edge", pad_mask="there")),
        ("part", Field("big", region={1: slice(1, 2)})),
        ("cropped", Field("big", crop=1, crop_at="random")),
    ],
)
def test_kinds_of_fields(kinds, name, field):
    options = {"fields": {name: field}}
    made = source(kinds, **options)
    found, truth = table(made), from_reader(kinds, **options)
    if name == "cropped":  # at other places than in epoch 0
        assert found[name].type.shape == (1,)
        assert found.equals(table(source(kinds, **options), parallelism=9).combine_chunks())
        return
    assert set(found.column_names) == set(truth)
    for column, expected in truth.items():
        got = rows(found[column])
        assert len(got) == len(expected) == 500
        for one, other in zip(got, expected, strict=True):
            assert np.array_equal(one, other)
        if name not in ("names", "texts"):
            assert got[-1].dtype == np.asarray(expected[-1]).dtype
    assert found.schema == made.get_read_tasks(1)[0].schema
    estimate = made.estimate_inmemory_data_size()
    assert estimate == pytest.approx(found.nbytes, rel=0.05)
    assert estimate == pytest.approx(
        sum(task.metadata.size_bytes for task in made.get_read_tasks(9)), rel=0.01
    )


def test_compounds_are_structs_and_complex_numbers_are_refused(kinds):
    found = table(source(kinds, fields={"both": "both"}))["both"]
    assert found.to_pylist()[7] == {name: h5py.File(kinds)["both"][7][name] for name in "ab"}
    with pytest.raises(DatasetError, match="field 'z': Arrow has no type for complex64"):
        source(kinds, fields={"z": "complex"})


def test_sparse_rows_are_two_lists(tmp_path):
    sparse = require_extra("scipy.sparse")
    matrix = sparse.random(300, 50, 0.1, "csr", random_state=1)
    with h5py.File(tmp_path / "m.h5", "w") as file:
        group = file.create_group("X")
        group.attrs["encoding-type"], group.attrs["shape"] = "csr_matrix", matrix.shape
        for name in ("data", "indices", "indptr"):
            group[name] = getattr(matrix, name)
        file["y"] = np.arange(300)
    made = source(tmp_path / "m.h5", fields={"X": SparseField("X"), "y": "y"})
    found = table(made)
    for row, indices, data in zip(
        matrix, rows(found["X_indices"]), rows(found["X_data"]), strict=True
    ):
        assert np.array_equal(row.indices, indices)
        assert np.array_equal(row.data, data)
    assert made.estimate_inmemory_data_size() == pytest.approx(found.nbytes, rel=0.05)
    with pytest.raises(ConfigError, match="two fields have a column 'X_data'"):
        source(tmp_path / "m.h5", fields={"X": SparseField("X"), "X_data": "y"})
    only = made.apply_projection({"X_data": "X_data"})
    assert table(only).equals(found.select(["X_data"]))


def test_images_of_any_size_are_tensors(tmp_path):
    encode = require_extra("imagecodecs").png_encode
    rng = np.random.default_rng(5)
    images = [rng.integers(0, 255, (*rng.integers(3, 40, 2), 3), np.uint8) for _ in range(90)]
    with h5py.File(tmp_path / "i.h5", "w") as file:
        data = file.create_dataset("png", (90,), h5py.vlen_dtype("u1"))
        for number, image in enumerate(images):
            data[number] = np.frombuffer(encode(image), "u1")
    made = source(tmp_path / "i.h5", fields={"image": ImageField("png")})
    found = table(made)
    for one, image in zip(rows(found["image"]), images, strict=True):
        assert np.array_equal(one, image)
    assert made.estimate_inmemory_data_size() == pytest.approx(found.nbytes, rel=0.05)


@pytest.mark.parametrize(
    "indices",
    [
        slice(10, 290, 3),
        np.array([300, 5, 5, 17]),
        np.arange(321) % 5 == 0,
        Split("val", {"train": 0.7, "val": 0.3}, stratify="labels"),
    ],
)
def test_indices(paths, indices):
    made = source(paths, indices=indices, with_index=True)
    truth = from_reader(paths, indices=indices)
    with AsyncReader(hdf5_path=paths, indices=indices, batch_size=1000) as reader:
        numbers = reader.get_next_batch().index
    for parallelism in (1, 5):
        found = table(made, parallelism)
        assert np.array_equal(found["index"].to_numpy(), numbers)
        for name in ("data", "labels"):
            assert np.array_equal(np.stack(rows(found[name])), np.stack(truth[name]))
    only = made.apply_projection({"labels": "labels"})
    assert np.array_equal(table(only)["labels"].to_numpy(), np.stack(truth["labels"]))


def test_only_the_fields_of_chosen_columns_are_read(paths, monkeypatch):
    made = source(paths, with_index=True)
    whole = table(made)
    opened = []
    monkeypatch.setattr(blockreading, "AsyncReader", lambda c: opened.append(c) or AsyncReader(c))
    for names, fields in [(["labels"], ["labels"]), (["index", "data"], ["data"])]:
        only = made.apply_projection({name: name for name in names})
        assert table(only).equals(whole.select(names))
        assert list(opened.pop().batch_fields) == fields
    none = table(made.apply_projection({"index": "index"}))
    assert none.equals(whole.select(["index"]))
    assert list(opened.pop().batch_fields) == ["labels"]  # of the smallest rows
    assert table(made.apply_projection({})).num_rows == 321
    renamed = made.apply_projection({"labels": "labels"})
    renamed._projection_map = {"labels": "y"}  # as Ray 2.51 to 2.55 has it
    assert table(renamed).column_names == ["y"]
    assert renamed.estimate_inmemory_data_size() == 321 * 8


def test_a_limit_is_not_exceeded(paths):
    made = source(paths)
    tasks = made.get_read_tasks(4, 10)
    assert [task.metadata.num_rows for task in tasks] == [10] * 4
    for task in tasks:
        assert sum(block.num_rows for block in task()) == 10
    assert tasks[0].metadata.size_bytes == pytest.approx(10 * 176, rel=0.05)


@pytest.mark.parametrize(
    ("chunk", "cpus", "threads", "store", "most", "tasks"),
    [
        (1, 2, 1, 0, 128, 8),
        (1, 2, 2, 0, 128, 4),
        (1, 100, 1, 0, 128, 12),
        (1, 1, 1, 0, 5, 20),
        (1, 1, 1, 40, 5, 10),
        (1, 2, 1, 40, 5, 20),
        (1, 1, 4, 400, 5, 4),
        (60, 2, 1, 0, 128, 2),
        (7, 100, 1, 0, None, 12),
    ],
)
def test_tasks_are_large_and_keep_all_cpus_busy(
    tmp_path, monkeypatch, chunk, cpus, threads, store, most, tasks
):
    with h5py.File(tmp_path / "data.h5", "w") as file:
        shape = (chunk, MIB)
        file.create_dataset("data", (100, MIB), "u1", chunks=shape, compression="gzip")
    made = source(tmp_path / "data.h5", labels_field=None, threads=threads)
    context = SimpleNamespace(target_max_block_size=most and most * MIB)
    monkeypatch.setattr(datasource.DataContext, "get_current", lambda: context)
    cluster = {"CPU": float(cpus), "object_store_memory": float(store * MIB)}
    monkeypatch.setattr(ray, "cluster_resources", lambda: cluster)
    assert made.best_num_blocks() == tasks


def test_memory_is_used_again_once_no_block_holds_it(paths, monkeypatch):
    monkeypatch.setattr(blockreading, "_LARGE_NBYTES", 0)
    blockreading._free.clear()
    truth = np.concatenate([h5py.File(path)["data"][:] for path in paths])
    made = source(paths, labels_field=None)

    def values(block):
        return block["data"].combine_chunks().to_numpy()

    places, begin = set(), 0
    for task in made.get_read_tasks(8):
        for block in task():
            found = values(block)
            assert np.array_equal(found, truth[begin : begin + len(found)])
            places.add(found.ctypes.data)
            begin += len(found)
    assert len(places) <= 3
    held = [values(block) for block in blocks(made, 8)]
    assert len({one.ctypes.data for one in held}) == len(held) > 4
    assert np.array_equal(np.concatenate(held), truth)


def test_what_tasks_tell(paths):
    tasks = source(paths).get_read_tasks(4)
    for task in tasks:
        (block,) = task()
        assert block.num_rows == task.metadata.num_rows
        assert task.metadata.size_bytes == pytest.approx(block.nbytes, rel=0.05)
    names = [task.metadata.input_files for task in tasks]
    assert list(dict.fromkeys(itertools.chain(*names))) == [str(path) for path in paths]


def test_a_task_is_small_whatever_the_dataset(tmp_path):
    path = tmp_path / "long.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("data", (100_000,), "i8", chunks=(10,), compression="gzip")
    numbers = np.random.default_rng(0).permutation(100_000)
    made = source(path, labels_field=None, indices=numbers)
    for task in made.get_read_tasks(200):
        task.read_fn.plan._pickled = b""  # it is in the store, once
        assert len(pickle.dumps(task)) < 2000


@pytest.mark.parametrize("threads", [2, 5])
def test_threads_read_the_blocks_of_a_task(tmp_path, threads):
    path = tmp_path / "data.h5"
    values = np.random.default_rng(0).integers(0, 9, (700, 100, 100)).astype("f4")
    with h5py.File(path, "w") as file:
        file.create_dataset("data", data=values, chunks=(10, 100, 100), compression="gzip")
    made = source(path, labels_field=None, threads=threads)
    (task,) = made.get_read_tasks(1)
    found = list(task())
    assert len(found) == threads
    assert np.array_equal(np.stack(rows(pa.concat_tables(found)["data"])), values)


def test_sequences_tell_their_steps(paths):
    options = {"sequences": Sequences(), "with_index": True}
    made = source(paths, fields={"x": Field("labels", steps=(0, 1))}, **options)
    found = table(made)
    assert np.array_equal(np.bincount(found["sequence"].to_numpy()), [99, 106, 113])
    truth = np.stack(rows(found["x"]))
    assert np.array_equal(truth[:, 0], found["sequence"].to_numpy() * 1000 + found["step"])
    assert table(made.apply_projection({"step": "step"})).equals(found.select(["step"]))


@pytest.mark.parametrize("option", ["shuffle", "batch_size", "num_threads", "weights", "rank"])
def test_options_of_loops_are_refused(paths, option):
    with pytest.raises(ConfigError, match=f"{option} is for loops"):
        source(paths, **{option: 1})
    with pytest.raises(ConfigError, match="unknown option 'feilds'"):
        source(paths, feilds={})


def test_samples_that_are_damaged_are_left_out(paths):
    with h5py.File(paths[1], "r+") as file:
        file["data"].id.write_direct_chunk((16, 0, 0), b"damaged")
    with pytest.raises(ReadError, match=r"1\.h5"):
        table(source(paths))
    made = source(paths, on_error="skip", with_index=True)
    found = table(made)
    assert np.array_equal(found["index"], np.delete(np.arange(321), np.arange(116, 124)))
    assert all(task.metadata.num_rows is None for task in made.get_read_tasks(3, 5))


def test_a_file_that_changed_is_an_error(paths):
    made = source(paths)
    tasks = made.get_read_tasks(2)
    with h5py.File(paths[2], "a") as file:
        file["more"] = np.zeros(1000)
    with pytest.raises(ReadError, match=r"0\.h5 and 2 more: .* create the Ray dataset again"):
        list(tasks[1]())


def test_errors_that_ray_retries_are_tried_again(paths, monkeypatch):
    monkeypatch.setattr(blockreading.time, "sleep", lambda seconds: None)
    made, failures = source(paths), iter([])
    read = Delivery.read

    def failing(function):
        def may_fail(*args):
            for text in failures:
                raise ReadError(text)
            return function(*args)

        return may_fail

    tasks = made.get_read_tasks(1)
    monkeypatch.setattr(Delivery, "read", failing(read))
    monkeypatch.setattr(blockreading, "AsyncReader", failing(AsyncReader))
    for _ in ("opening", "reading"):
        failures = iter(["AWS Error SLOW_DOWN"] * 2)
        assert pa.concat_tables(tasks[0]()).num_rows == 321
    failures = iter(["something else"])
    with pytest.raises(ReadError, match="something else"):
        list(tasks[0]())
    failures = iter(["AWS Error SLOW_DOWN"] * 10)
    with pytest.raises(ReadError, match="SLOW_DOWN"):
        list(tasks[0]())


def test_a_saved_index_stands_for_its_files(paths, tmp_path, monkeypatch):
    index = tmp_path / "all.h5idx"
    done = CliRunner().invoke(app, ["index", *map(str, paths), "-o", str(index)])
    assert done.exit_code == 0, done.output
    truth = table(source(paths, with_index=True))
    monkeypatch.chdir(tmp_path)
    made = source("all.h5idx", with_index=True)
    tasks = made.get_read_tasks(4)
    monkeypatch.chdir("/")  # where workers may be
    assert pa.concat_tables(block for task in tasks for block in task()).equals(truth)
    assert list(tasks[-1].metadata.input_files) == [str(paths[2])]


def test_an_empty_selection_has_no_tasks(paths):
    made = source(paths, indices=np.array([], np.int64))
    assert made.get_read_tasks(4) == []
    assert made.estimate_inmemory_data_size() == 0


@given(
    st.lists(st.integers(1, 3 * MIB), min_size=1, max_size=40),
    st.integers(1, 50),
    st.one_of(st.none(), st.integers(1, 4 * MIB)),
    st.integers(1, 4),
)
def test_cuts_are_even_and_leave_nothing_out(sizes, parallelism, block, threads):
    nbytes = np.cumsum([0, *sizes]).astype(float)
    tasks = cut(nbytes, parallelism, block, threads)
    assert 1 <= len(tasks) <= parallelism
    ends = [(task[0], task[-1]) for task in tasks]
    assert [*itertools.chain(*ends)] == sorted([0, *[e for _, e in ends for _ in "ab"]][:-1])
    assert ends[-1][1] == len(sizes)
    for task in tasks:
        assert (np.diff(task) > 0).all()
    total = nbytes[-1] / parallelism
    for begin, end in ends:
        assert nbytes[end] - nbytes[begin] <= total + 2 * max(sizes)
