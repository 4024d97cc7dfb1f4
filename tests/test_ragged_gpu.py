"""Sparse rows, ragged samples, columns of tables and images on a GPU: the host's, bit for bit."""

from __future__ import annotations

import io
import itertools

import h5py
import numpy as np
import pytest
from conftest import assert_same_bits, require_extra

from h5async import (
    AsyncReader,
    AudioField,
    BatchExpiredError,
    ConfigError,
    Csr,
    DatasetError,
    DeviceError,
    Field,
    ImageField,
    Ragged,
    RaggedField,
    SparseField,
)
from h5async.samples.ragged import Images

pytestmark = pytest.mark.gpu

SEED = 20261123
N, BATCH, COLUMNS = 61, 8, 700
SPIN_CYCLES = 20_000_000  # some 10 ms: far longer than it takes to fill and upload a batch
POISON = 0xA5


@pytest.fixture(scope="module")
def cupy():
    return pytest.importorskip("cupy")


@pytest.fixture(scope="module")
def spin(cupy):
    """Launch a kernel that holds the current stream back."""
    source = """extern "C" __global__ void spin(long long cycles) {
        long long start = clock64(); while (clock64() - start < cycles); }"""
    kernel = cupy.RawKernel(source, "spin")
    return lambda: kernel((1,), (1,), (np.int64(SPIN_CYCLES),))


# --- what is written ---------------------------------------------------------------------------


def put_sparse(file, name, data, indices, ends, columns=COLUMNS):
    group = file.create_group(name)
    group.attrs["encoding-type"], group.attrs["shape"] = "csr_matrix", (len(ends), columns)
    group["data"], group["indices"], group["indptr"] = data, indices, np.append(0, ends)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """Samples of 0 to 9 values, and one of 300, in all the ways that they can be stored."""
    rng = np.random.default_rng(SEED)
    lengths = rng.integers(0, 10, N)
    lengths[37] = 300
    ends, total = np.cumsum(lengths), int(lengths.sum())
    path = tmp_path_factory.mktemp("gpu") / "ragged.h5"
    with h5py.File(path, "w") as file:
        file["ends"] = ends
        values = rng.integers(-99, 99, (total, 4, 3)).astype("i2")
        file.create_dataset("values", data=values, chunks=(16, 4, 3), compression="gzip")
        file["flags"] = rng.integers(0, 2, total).astype(bool)
        file["big"] = rng.normal(size=total).astype(">f8")
        small = rng.normal(size=total).astype("f4")
        small[::3] = np.float32(1e-40)  # which is not normal
        small[1::3] = -0.0
        file["small"] = small
        texts = ["ä" * int(n) for n in lengths]
        file.create_dataset("texts", data=texts, dtype=h5py.string_dtype())
        node = file.create_dataset("vlen", (N,), h5py.vlen_dtype(">f4"))
        for number, n in enumerate(lengths):
            node[number] = rng.normal(size=n)
        indices = [rng.permutation(COLUMNS)[:n] for n in lengths]
        indices = np.concatenate([*indices]).astype("i4")
        put_sparse(file, "X", rng.normal(size=total).astype("f4"), np.sort(indices), ends)
        complexes = (rng.normal(size=total) + 1j * rng.normal(size=total)).astype("c8")
        put_sparse(file, "complex", complexes, indices, ends)
        put_sparse(file, "counts", rng.integers(0, 9, total).astype("u2"), indices, ends)
        # Columns come several times, and in any order.
        put_sparse(file, "repeated", small, rng.integers(0, 5, total), ends, columns=5)
        put_sparse(file, "swapped", small.astype(">f4"), indices.astype(">i8"), ends)
        file["plain"] = rng.integers(0, 256, (N, 5, 3), np.uint8)
        file["labels"] = np.arange(N)
    return path


def ragged(name, **options):
    return RaggedField(name, offsets="ends", offsets_kind="ends", **options)


SPARSE = {
    "x": "X",
    "x_scaled": SparseField("X", dtype="f8", scale=0.1, offset=1),
    "dense": SparseField("X", dense=True),
    "counts": SparseField("counts", dense=True),
    "counts_scaled": SparseField("counts", dense=True, scale=0.1),
    "counts_i8": SparseField("counts", dense=True, dtype="i8"),
    "half": SparseField("X", dense=True, dtype="f2"),
    "repeated": SparseField("repeated", dense=True),
    "repeated_half": SparseField("repeated", dense=True, dtype="f2", scale=3),
    "swapped": SparseField("swapped"),
    "swapped_dense": SparseField("swapped", dense=True),
    "offset_dense": SparseField("X", dense=True, scale=0.1, offset=1.5),
    "some": SparseField("X", columns=[5, 0, 77, 500]),
    "some_dense": SparseField("counts", columns=list(range(699, 90, -3)), dense=True),
}
RAGGED = {
    "values": ragged("values"),
    "moved": ragged("values", axes=(0, 2, 1), dtype="f4", scale=(0.1, 2.0, 3.0), offset=0.3),
    "cast": ragged("values", dtype="f8"),
    "flags": ragged("flags"),
    "big": ragged("big", dtype="f4"),
    "small": ragged("small", scale=0.5, offset=1e-41),
    "texts": "texts",
    "vlen": "vlen",
    "padded": ragged("values", pad_to=5),
    "padded_small": ragged("small", pad_to=400, scale=0.25),
    "padded_flags": ragged("flags", pad_to=1),
    "padded_vlen": RaggedField("vlen", pad_to=3, dtype="f2"),
    "padded_none": ragged("values", pad_to=0),
}
PLAIN = {"plain": Field("plain", axes=(0, 2, 1), scale=0.5), "labels": "labels"}
ALL = PLAIN | SPARSE | RAGGED


def reader_of(path, fields=ALL, device="cuda", **options):
    options = {"batch_size": BATCH, "shuffle": "full", "num_threads": 2, **options}
    return AsyncReader(hdf5_path=path, fields=fields, device=device, **options)


# --- comparison --------------------------------------------------------------------------------


def pieces(array):
    """Return the arrays of a field."""
    if isinstance(array, Images):
        return array.values, array.offsets, array.shapes
    if isinstance(array, Ragged):
        return array.values, array.offsets
    return (array.data, array.indices, array.indptr) if isinstance(array, Csr) else (array,)


def assert_same(cupy, found, wanted):
    """Check that a batch on a GPU is the host's."""
    assert found.index.tolist() == wanted.index.tolist()
    assert found.keys() == wanted.keys()
    for name in wanted.keys():
        mine, other = found[name], wanted[name]
        if isinstance(other, np.ndarray):
            assert isinstance(mine, cupy.ndarray), name
        else:
            assert type(mine) is type(other), name
            assert getattr(mine, "shape", None) == getattr(other, "shape", None)
        for number, (one, two) in enumerate(zip(pieces(mine), pieces(other), strict=True)):
            is_shapes = isinstance(other, Images) and number == 2
            assert is_shapes or isinstance(one, cupy.ndarray), name
            on_host = one if is_shapes else one.get()
            assert (on_host.dtype, on_host.shape) == (two.dtype, two.shape), name
            assert_same_bits(on_host, two)


def poison(reader):
    """Overwrite memory of the slots, so that what is not written again shows."""
    for slot in reader._engine.setup.slots:
        for array in (*slot.memory.raw, *slot.memory.out):
            array.reshape(-1).view(np.uint8)[...] = POISON
        for field in slot._others.values():
            for room in (*field._on_device.values(), field._changed):
                if room._block is not None:
                    room._block[...] = POISON
            if field._made is not None:
                field._made.reshape(-1).view(np.uint8)[...] = POISON
    reader._engine.setup.device.gpu.cupy.cuda.runtime.deviceSynchronize()


def compare(cupy, path, fields=ALL, epochs=1, **options):
    with (
        reader_of(path, fields, **options) as on_gpu,
        reader_of(path, fields, "cpu", **options) as on_host,
    ):
        poison(on_gpu)
        count = 0
        for _ in range(epochs):
            for found, wanted in zip(on_gpu, on_host, strict=True):
                assert_same(cupy, found, wanted)
                count += 1
        return count


@pytest.mark.parametrize("fields", [SPARSE, RAGGED, ALL], ids=["sparse", "ragged", "all"])
@pytest.mark.parametrize("shuffle", [False, "full", "window"])
@pytest.mark.parametrize("num_threads", [0, 3])
def test_batches_have_the_bits_of_the_hosts(cupy, path, fields, shuffle, num_threads):
    assert compare(cupy, path, fields, 2, shuffle=shuffle, num_threads=num_threads) == 16


@pytest.mark.parametrize("prefetch", [1, 3])
@pytest.mark.parametrize("batch_size", [1, 3, N, 100])
def test_any_batch_size(cupy, path, batch_size, prefetch):
    compare(cupy, path, batch_size=batch_size, prefetch=prefetch)


@pytest.mark.parametrize("name", sorted(SPARSE | RAGGED))
def test_each_field_alone(cupy, path, name):
    compare(cupy, path, {name: ALL[name]})


def late_copies(reader, spin, epochs=2):
    """Copy each batch behind a slow kernel on the current stream, without waiting for anything."""
    kept = []
    for _ in range(epochs):
        for batch in reader:
            spin()
            kept.append(batch.copy())
    return kept


@pytest.mark.parametrize("prefetch", [1, 2, 3])
@pytest.mark.parametrize("num_threads", [0, 1, 4])
def test_no_slot_is_overwritten_while_a_slow_stream_uses_it(
    cupy, spin, path, prefetch, num_threads
):
    options = {"prefetch": prefetch, "num_threads": num_threads}
    with reader_of(path, **options) as reader, reader_of(path, device="cpu", copy=True) as truth:
        poison(reader)
        kept = late_copies(reader, spin)
        wanted = [batch for _ in range(2) for batch in truth]
        for one, other in zip(kept, wanted, strict=True):
            assert_same(cupy, one, other)


@pytest.mark.wrong_on_purpose
@pytest.mark.parametrize("guard", ["release", "wait_writable", "acquire"])
def test_these_tests_see_a_missing_guard(cupy, spin, path, guard, monkeypatch):
    import h5async.deliver.cuda

    monkeypatch.setattr(h5async.deliver.cuda.CudaSlot, guard, lambda self: None)
    if guard == "wait_writable":
        monkeypatch.setattr(h5async.deliver.cuda.CudaSlot, "is_writable", lambda self: True)
    stream = cupy.cuda.Stream(non_blocking=True)
    fields = {"x": "X", "values": RAGGED["values"], "dense": SPARSE["dense"]}
    with (
        reader_of(path, fields, prefetch=1) as reader,
        reader_of(path, fields, "cpu", copy=True) as truth,
        stream,
    ):
        poison(reader)
        if guard == "acquire":
            # Hold the copy stream back instead, so that the caller's stream comes first.
            with reader._engine.setup.device.copy_stream:
                spin()
        kept = late_copies(reader, (lambda: None) if guard == "acquire" else spin, epochs=3)
        wanted = [batch for _ in range(3) for batch in truth]
        cupy.cuda.runtime.deviceSynchronize()

        def all_right():
            for one, other in zip(kept, wanted, strict=True):
                assert_same(cupy, one, other)

        with pytest.raises(AssertionError):
            all_right()


# --- memory ------------------------------------------------------------------------------------


def of_slot(reader, field, slot=0):
    return reader._engine.setup.slots[slot]._others[field]


def test_memory_begins_at_the_mean_and_grows_with_the_batches(cupy, path):
    with h5py.File(path) as file:
        lengths = np.diff(file["ends"][()], prepend=0)
    mean = lengths.mean() * BATCH
    options = {"shuffle": False, "prefetch": 1, "num_threads": 0}
    with reader_of(path, {"small": ragged("small")}, **options) as reader:
        field = of_slot(reader, "small")
        (part,) = field._parts
        bound = part._memory.nbytes
        assert bound == 4 * np.sort(lengths)[-BATCH:].sum()
        first = part._pinned_nbytes
        assert 4 * mean <= first <= 4 * mean * 1.25 + 4
        assert field._on_device[0]._block.nbytes <= 4 * mean * 1.25 + 4
        seen = [first]
        for batch in reader:
            total = batch.small.values.nbytes
            assert part._pinned_nbytes >= total
            assert field._on_device[0]._block.nbytes >= total
            seen.append(part._pinned_nbytes)
            if seen[-1] > seen[-2]:
                assert seen[-1] <= max(total * 1.25, first)
        assert seen == sorted(seen)
        assert first < seen[-1] <= bound
        assert len(set(seen)) <= 4


def test_only_what_a_batch_has_is_uploaded(cupy, path, monkeypatch):
    fields = {"small": ragged("small"), "dense": SparseField("X", dense=True)}
    with reader_of(path, fields, num_threads=0) as reader:
        gpu, seen = reader._engine.setup.device.gpu, []
        upload = gpu.upload

        def noted(target, source, stream):
            seen.append(source.nbytes)
            upload(target, source, stream)

        monkeypatch.setattr(gpu, "upload", noted)
        for batch in reader:
            sent, seen[:] = sum(seen), []
            total = batch.small.values.size
            # Values, of sparse rows also indices, and two times offsets.
            assert sent == total * (4 + 4 + 4) + 2 * 8 * (batch.size + 1)


def test_memory_is_given_back(cupy, path):
    def used():
        cupy.get_default_memory_pool().free_all_blocks()
        free, total = cupy.cuda.runtime.memGetInfo()
        return total - free

    compare(cupy, path)
    before = used()
    for _ in range(3):
        compare(cupy, path)
    assert used() <= before


# --- what it is made into ----------------------------------------------------------------------


def both(path, name, **options):
    """Return a field of a batch, on the GPU and on the host."""
    found = []
    for device in ("cuda", "cpu"):
        with reader_of(path, {name: ALL[name]}, device, **options) as reader:
            found.append(reader.get_next_batch().copy()[name])
    return found


@pytest.mark.parametrize("name", ["x", "x_scaled", "swapped", "some"])
def test_sparse_rows_in_other_forms(cupy, path, name):
    require_extra("scipy")
    found, wanted = both(path, name, batch_size=40)
    dense = found.to_dense()
    assert isinstance(dense, cupy.ndarray)
    assert_same_bits(dense.get(), wanted.to_dense())
    out = cupy.full(found.shape, 7, "f8")
    assert found.to_dense(out) is out
    assert_same_bits(out.get(), wanted.to_dense(np.empty(found.shape, "f8")))
    turned = cupy.full(found.shape[::-1], 7, "f8").T
    assert_same_bits(found.to_dense(turned).get(), out.get())
    matrix = found.to_scipy()
    assert_same_bits(matrix.toarray(), wanted.to_scipy().toarray())
    got = found.get()
    assert isinstance(got.data, np.ndarray)
    for one, other in zip(pieces(got), pieces(wanted), strict=True):
        assert_same_bits(one, other)
    few = found[3:9].get()
    assert_same_bits(few.to_dense(), wanted[3:9].to_dense())
    for (indices, values), (others, of_others) in zip(found, wanted, strict=True):
        assert_same_bits(indices.get(), others)
        assert_same_bits(values.get(), of_others)


def test_sparse_matrices_of_cupy_share_the_memory(cupy, path):
    found, wanted = both(path, "x")
    matrix = found.to_cupy()
    assert type(matrix).__module__.startswith("cupyx.scipy.sparse")
    assert matrix.data.data.ptr == found.data.data.ptr
    assert matrix.indices.data.ptr == found.indices.data.ptr
    assert matrix.shape == wanted.shape
    assert_same_bits(matrix.indptr.get(), wanted.indptr.astype("i4"))
    counts = Csr(cupy.ones(1, "i4"), cupy.zeros(1, "i4"), cupy.asarray([0, 1]), (1, 1))
    with pytest.raises(ConfigError, match=r'no sparse matrices of int32.* dtype="float32"'):
        counts.to_cupy()


def test_an_index_that_is_no_column(cupy):
    rows = Csr(
        cupy.ones(3, "f4"), cupy.asarray([0, 1, 5], "i8"), cupy.asarray([0, 1, 1, 3]), (3, 5)
    )
    with pytest.raises(DatasetError, match="row 2 of 3"):
        rows.to_dense()
    with pytest.raises(DatasetError, match="row 0 of 1"):
        Csr(rows.data, rows.indices - 6, rows.indptr, (3, 5))[2:].to_dense(cupy.empty((1, 5), "f4"))


@pytest.mark.parametrize("dtype", ["i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "?", "c8"])
@pytest.mark.parametrize("kind", ["i4", "u8"])
def test_dense_rows_of_any_dtype(cupy, dtype, kind):
    rng = np.random.default_rng(SEED)
    data = rng.integers(0, 250, 60).astype(dtype)
    indices, indptr = rng.integers(0, 9, 60).astype(kind), np.array([0, 0, 31, 60])
    wanted = np.zeros((3, 9), dtype)
    np.add.at(wanted, (np.repeat([1, 2], [31, 29]), indices.astype("i8")), data)
    rows = Csr(*map(cupy.asarray, (data, indices, indptr)), (3, 9))
    assert_same_bits(rows.to_dense().get(), wanted)


@pytest.mark.parametrize("name", ["values", "moved", "small", "vlen", "flags"])
@pytest.mark.parametrize("length", [None, 0, 4, 500])
def test_ragged_samples_are_padded(cupy, path, name, length):
    found, wanted = both(path, name, batch_size=50)
    for value in (0, 1):
        mine, others = found.to_padded(value, length), wanted.to_padded(value, length)
        for one, other in zip(mine, others, strict=True):
            assert isinstance(one, cupy.ndarray)
            assert_same_bits(one.get(), other)
    few = found[2:7].to_padded(length=length)
    for one, other in zip(few, wanted[2:7].to_padded(length=length), strict=True):
        assert_same_bits(one.get(), other)
    got = found.get()
    for one, other in zip(got, wanted, strict=True):
        assert_same_bits(one, other)
    for one, other in zip(found, wanted, strict=True):
        assert_same_bits(one.get(), other)
    assert_same_bits(found.lengths.get(), wanted.lengths)


def test_strings_and_awkward_arrays_come_from_the_gpu(cupy, path):
    found, wanted = both(path, "texts")
    assert found.to_strings() == wanted.to_strings()
    require_extra("awkward")
    assert found.to_awkward().tolist() == wanted.to_awkward().tolist()


@pytest.mark.real_gpu
@pytest.mark.filterwarnings("ignore::UserWarning")  # PyTorch 2.11 has some of its sparse tensors
def test_tensors_share_the_memory(cupy, path):
    torch = pytest.importorskip("torch")
    found, wanted = both(path, "x")
    tensor = found.to_torch()
    assert tensor.layout is torch.sparse_csr
    assert tensor.is_cuda
    assert tensor.values().data_ptr() == found.data.data.ptr
    assert_same_bits(tensor.to_dense().cpu().numpy(), wanted.to_dense())
    found, wanted = both(path, "small")
    nested = found.to_torch_nested()
    assert nested.is_cuda
    assert nested.values().data_ptr() == found.values.data.ptr
    for one, other in zip(nested.unbind(), wanted, strict=True):
        assert_same_bits(one.cpu().numpy(), other)


@pytest.mark.real_gpu
def test_a_dataset_of_tensors_on_the_gpu(cupy, path):
    torch = pytest.importorskip("torch")
    from h5async.torch import H5Dataset

    options = {"hdf5_path": path, "fields": ALL | {"flags": ragged("flags")}, "batch_size": BATCH}
    with (
        H5Dataset(device="cuda", **options) as found,
        H5Dataset(device="cpu", **options) as wanted,
    ):
        for one, other in zip(found, wanted, strict=True):
            assert one.keys() == other.keys()
            for name in one:
                assert one[name].is_cuda
                mine, others = one[name], other[name]
                pairs = [(mine, others)]
                if mine.layout is torch.sparse_csr:  # (a GPU's to_dense() flushes subnormals)
                    parts = ("crow_indices", "col_indices", "values")
                    pairs = [(getattr(mine, part)(), getattr(others, part)()) for part in parts]
                elif mine.is_nested:
                    pairs = [(mine.values(), others.values())]
                for found_part, wanted_part in pairs:
                    assert torch.equal(found_part.cpu(), wanted_part), name


# --- as other fields ---------------------------------------------------------------------------


def test_copies_and_expired_batches(cupy, path):
    with reader_of(path, copy=True) as reader, reader_of(path, device="cpu", copy=True) as truth:
        for one, other in zip(list(reader), list(truth), strict=True):
            assert_same(cupy, one, other)
    with reader_of(path, debug_lifetimes=True) as reader:
        first = reader.get_next_batch()
        kept = {name: first[name] for name in first.keys()}
        reader.get_next_batch()
        with pytest.raises(BatchExpiredError):
            _ = first.x
        for array in itertools.chain.from_iterable(map(pieces, kept.values())):
            assert (array.reshape(-1).view(np.uint8).get() == 255).all()


def change(x, small, values, dense, padded, labels, plain, counts_scaled):
    """Return other samples for some fields, and change some in place."""
    x.data[...] *= 2
    small.values[...] += 1
    ends = np.arange(len(values) + 1) * 2
    others = Ragged(np.arange(ends[-1] * 1.0), ends)
    return x, small, others, np.asfortranarray(dense[:, ::7]), padded.sum(1), x, plain, values


def test_postprocess_is_given_what_the_host_delivers(cupy, path):
    names = ("x", "small", "values", "dense", "padded", "labels", "plain", "counts_scaled")
    fields = {name: ALL[name] for name in names}
    compare(cupy, path, fields, 2, postprocess=change)
    compare(cupy, path, fields, 2, postprocess=lambda *arrays: None)


def test_given_samples_and_resumed_readers(cupy, path):
    with reader_of(path) as on_gpu, reader_of(path, device="cpu") as on_host:
        some = [5, 0, 60, 5, 37]
        assert_same(cupy, on_gpu.read(some), on_host.read(some))
        for reader in (on_gpu, on_host):
            reader.fetch_data([3, 9, 37])
        assert_same(cupy, on_gpu.get_next_batch(), on_host.get_next_batch())
        for _ in range(3):
            assert_same(cupy, on_gpu.get_next_batch(), on_host.get_next_batch())
        state = on_gpu.state_dict()
        assert state == on_host.state_dict()
        stats = on_gpu.stats()
        assert stats.nbytes == on_host.stats().nbytes
        with reader_of(path) as resumed:
            resumed.load_state_dict(state)
            for _ in range(4):
                assert_same(cupy, resumed.get_next_batch(), on_host.get_next_batch())


def test_auto_delivers_on_the_gpu(cupy, path):
    with reader_of(path, {"x": "X"}, "auto") as reader:
        assert isinstance(next(iter(reader)).x.data, cupy.ndarray)


def test_samples_of_any_length_are_decoded_on_the_host(cupy, path):
    with pytest.raises(DeviceError, match='"values": its samples have differing lengths'):
        reader_of(path, {"values": RAGGED["values"]}, decode="device")
    with reader_of(path, {"values": RAGGED["values"]}) as reader:
        assert "differing lengths" in reader.stats().decode


@pytest.mark.parametrize("num_threads", [0, 2])
def test_the_gpu_decodes_other_fields(cupy, tmp_path, num_threads):
    rng = np.random.default_rng(SEED)
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        data = rng.integers(0, 9, (N, 6, 5)).astype("i2")
        file.create_dataset("data", data=data, chunks=(4, 6, 5), compression="gzip", shuffle=True)
        ends = np.cumsum(rng.integers(0, 9, N))
        file["ends"], file["small"] = ends, np.arange(ends[-1] * 1.0)
        put_sparse(file, "X", np.arange(ends[-1] * 1.0), np.arange(ends[-1]) % 99, ends)
    fields = {"x": SparseField("X", dense=True), "small": ragged("small"), "data": "data"}
    with (
        reader_of(path, fields, decode="device", num_threads=num_threads) as reader,
        reader_of(path, fields, "cpu") as truth,
    ):
        for one, other in zip(reader, truth, strict=True):
            assert_same(cupy, one, other)
        assert reader._engine.setup.device_policy.num_chunks > 0


def test_a_dtype_that_cupy_lacks(cupy, tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["v"] = np.zeros(4, np.dtype([("a", "i4"), ("b", "f4")]))
        file["ends"] = [1, 4]
    with pytest.raises(DeviceError, match=r'field "v": dtype .* is not possible on a GPU'):
        AsyncReader(hdf5_path=tmp_path / "a.h5", fields={"v": ragged("v")}, device="cuda")


def test_empty_datasets_and_samples(cupy, tmp_path):
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file["values"], file["ends"] = np.zeros((0, 4, 3), "i2"), np.zeros(N, int)
        put_sparse(file, "X", np.zeros(0, "f4"), np.zeros(0, "i4"), np.zeros(N, int))
    fields = {name: ALL[name] for name in ("values", "moved", "padded", "x", "dense", "x_scaled")}
    compare(cupy, path, fields)


# --- tables ------------------------------------------------------------------------------------


def put_table(path, names, codes, shift):
    with h5py.File(path, "w") as file:
        group = file.create_group("obs/kind")
        group.attrs["encoding-type"], group.attrs["ordered"] = "categorical", False
        group["codes"] = np.asarray(codes, "i1")
        group.create_dataset("categories", data=names, dtype=h5py.string_dtype())
        age = file.create_group("obs/age")
        age.attrs["encoding-type"] = "nullable-integer"
        age["values"] = np.arange(len(codes)) + shift
        age["mask"] = np.arange(len(codes)) % 3 == 0
        file["ends"] = np.arange(len(codes)) // 2
        file["values"] = np.arange(len(codes))


def test_columns_of_tables(cupy, tmp_path):
    paths = [tmp_path / "a.h5", tmp_path / "b.h5"]
    put_table(paths[0], ["A", "B"], [0, 1, -1, 1, 0, 0, 1], 0)
    put_table(paths[1], ["C", "B", "D"], [2, 1, 0, -1, 0], 50)
    fields = {"kind": "obs/kind", "wide": Field("obs/kind", dtype="i8"), "age": "obs/age"}
    for more in ({}, {"values": ragged("values")}):
        compare(cupy, paths, fields | more, 2, batch_size=3)
        compare(cupy, paths[0], fields | more, batch_size=3)
    with pytest.raises(ConfigError, match='cache="device" is not supported'):
        reader_of(paths, {"kind": "obs/kind"}, cache="device")


# --- images ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    Image = pytest.importorskip("PIL.Image", reason="needs Pillow")
    rng = np.random.default_rng(SEED)
    path = tmp_path_factory.mktemp("gpu") / "images.h5"
    with h5py.File(path, "w") as file:
        for name, sizes in (("jpeg", [(20, 31), (15, 16)]), ("equal", [(13, 18)])):
            node = file.create_dataset(name, (20,), h5py.vlen_dtype("u1"))
            for number in range(20):
                size = sizes[number % len(sizes)]
                stream = io.BytesIO()
                Image.fromarray(rng.integers(0, 256, (*size, 3), np.uint8)).save(stream, "JPEG")
                node[number] = np.frombuffer(stream.getvalue(), np.uint8)
        file["labels"] = np.arange(20)
    return path


FIRST = {"axes": (0, 3, 1, 2), "dtype": "f4", "scale": (0.1, 0.2, 0.3), "offset": -1}
IMAGES = {
    "any": ImageField("jpeg"),
    "any_first": ImageField("jpeg", **FIRST),
    "equal": ImageField("equal", axes=(0, 3, 1, 2)),
    "sized": ImageField("jpeg", size=(9, 11)),
    "sized_first": ImageField("jpeg", size=(9, 11), crop="random", flip=True, **FIRST),
    "scaled": ImageField("jpeg", size=8, scale=1 / 255),
    "label": "labels",
}


@pytest.mark.parametrize("batch_size", [1, 3, 20])
@pytest.mark.parametrize("num_threads", [0, 2])
def test_images(cupy, images, batch_size, num_threads):
    pytest.importorskip("cv2", reason="needs OpenCV")
    options = {"batch_size": batch_size, "num_threads": num_threads}
    compare(cupy, images, IMAGES, 2, **options)
    compare(cupy, images, IMAGES, postprocess=lambda *arrays: None, **options)


AUDIO = {
    "mono": AudioField("audio", mono=True),
    "both": AudioField("audio", dtype="i2", channels=2, frames=30, crop="random"),
    "dense": AudioField("audio", channels=2, frames=40, dense=True),
    "label": "labels",
}


@pytest.mark.parametrize("batch_size", [1, 3, 20])
def test_audio(cupy, tmp_path, batch_size):
    soundfile = require_extra("soundfile")
    rng = np.random.default_rng(SEED)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        node = file.create_dataset("audio", (20,), h5py.vlen_dtype("u1"))
        for number in range(20):
            stream = io.BytesIO()
            soundfile.write(stream, rng.uniform(-1, 1, (25 + number, 2)), 8000, format="WAV")
            node[number] = np.frombuffer(stream.getvalue(), np.uint8)
        file["labels"] = np.arange(20)
    compare(cupy, tmp_path / "a.h5", AUDIO, 2, batch_size=batch_size)
    compare(cupy, tmp_path / "a.h5", AUDIO, postprocess=lambda *arrays: None, batch_size=batch_size)


def test_images_behind_slow_kernels(cupy, spin, images):
    pytest.importorskip("cv2", reason="needs OpenCV")
    options = {"batch_size": 3, "prefetch": 1}
    with (
        reader_of(images, IMAGES, **options) as reader,
        reader_of(images, IMAGES, "cpu", copy=True, **options) as truth,
    ):
        kept = late_copies(reader, spin)
        for one, other in zip(kept, [b for _ in range(2) for b in truth], strict=True):
            assert_same(cupy, one, other)
        assert_same(cupy, reader.read([3, 2, 1]), truth.read([3, 2, 1]))
        several = reader.read([0, 1, 2])["any"]
        assert isinstance(several, Images)
        for one, other in zip(several, several.get(), strict=True):
            assert_same_bits(one.get(), other)
        assert_same_bits(several[1].get(), several.get()[1])


def test_dense_rows_of_complex_values_are_refused(cupy, path):
    fields = {"x": SparseField("complex", dense=True)}
    with pytest.raises(ConfigError, match="complex values are not made on a GPU"):
        reader_of(path, fields)
    assert compare(cupy, path, {"x": SparseField("complex")})
