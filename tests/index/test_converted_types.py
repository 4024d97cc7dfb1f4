"""Stored types whose bytes are not NumPy's are converted by the core, as HDF5 converts them."""

import h5py
import numpy as np
import pytest
from h5py import h5t
from test_saved_index import save

from h5async import AsyncReader, DatasetError, Field
from h5async.codec.filters import stored_filter
from h5async.core.binding import load_core

pytestmark = pytest.mark.skipif(load_core() is None, reason="the core converts")

ROWS = 60


def integer(size, order, precision, at, signed=True):
    stored = getattr(h5t, f"STD_{'I' if signed else 'U'}{8 * size}{order}").copy()
    stored.set_precision(precision)
    stored.set_offset(at)
    return stored


def real(size, order, precision, at, fields, bias):
    stored = getattr(h5t, f"IEEE_F{64 if size > 4 else 32}{order}").copy()
    stored.set_fields(*fields)
    stored.set_offset(at)
    stored.set_precision(precision)
    stored.set_size(size)
    stored.set_ebias(bias)
    return stored


FLOATS = {
    "bfloat16": (2, 16, 0, (15, 7, 8, 0, 7), 127),
    "of 8 bits": (1, 8, 0, (7, 3, 4, 0, 3), 5),
    "e5m2": (1, 8, 0, (7, 2, 5, 0, 2), 15),
    "of 16 bits": (2, 16, 0, (15, 9, 6, 0, 9), 31),
    "of 20 bits": (4, 20, 7, (26, 20, 6, 7, 13), 31),
    "of 40 bits": (8, 40, 3, (42, 33, 9, 3, 30), 255),
}


def text(size, padding):
    stored = h5t.C_S1.copy()
    stored.set_size(size)
    stored.set_strpad(padding)
    return stored


def random_type(rng, depth=0):
    """Return a type, most often one that NumPy lacks."""
    order = rng.choice(["LE", "BE"])
    kind = int(rng.integers(0, 8 if depth < 2 else 5))
    if kind == 0:
        size = int(rng.choice([1, 2, 4, 8]))
        precision = int(rng.integers(4 * size + 1, 8 * size + 1))
        at = int(rng.integers(0, 8 * size - precision + 1))
        return integer(size, order, precision, at, bool(rng.integers(2)))
    if kind == 1:
        # (Where members grow, h5py has them overlap, and HDF5 writes beyond its memory.)
        size, *rest = FLOATS[rng.choice(list(FLOATS)[4 if depth else 0 :])]
        return real(size, order, *rest)
    if kind == 2:
        return text(int(rng.integers(1, 7)), rng.choice([h5t.STR_NULLTERM, h5t.STR_SPACEPAD]))
    if kind == 3:
        names = [f"STD_I32{order}", f"IEEE_F64{order}", f"IEEE_F16{order}", f"STD_B16{order}"]
        return getattr(h5t, rng.choice([name for name in names if hasattr(h5t, name)]))
    if kind == 4:
        name = f"COMPLEX_IEEE_F32{order}"
        return getattr(h5t, name, None) or h5t.IEEE_F32LE
    if kind == 5:
        shape = tuple(int(n) for n in rng.integers(1, 4, rng.integers(1, 3)))
        return h5t.array_create(random_type(rng, depth + 1), shape)
    members = [random_type(rng, depth + 1) for _ in range(rng.integers(1, 5))]
    gaps = [int(n) for n in rng.integers(0, 4, len(members) + 1)]
    size = sum(m.get_size() for m in members) + sum(gaps)
    stored, at = h5t.create(h5t.COMPOUND, size), 0
    for i, (member, gap) in enumerate(zip(members, gaps, strict=False)):
        stored.insert(f"m{i}".encode(), at + gap, member)
        at += gap + member.get_size()
    return stored


def is_known(stored):
    """Tell whether h5py has a dtype for a type, whose members do not overlap."""
    try:
        return len(stored.dtype.newbyteorder("=").descr) > 0
    except (TypeError, ValueError):
        return False


def write(file, name, stored, layout, values):
    """Write the bytes of elements as they are."""
    count = len(values)
    shape = (count,) if layout != "columns" else (4, count // 4)
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    if layout != "contiguous" and layout != "columns":
        plist.set_chunk((7,))
    if layout == "shuffle":
        plist.set_shuffle()
    if layout in ("deflate", "shuffle"):
        plist.set_deflate(1)
    if layout == "fletcher":
        plist.set_fletcher32()
    if layout == "compact":
        plist.set_layout(h5py.h5d.COMPACT)
    space = h5py.h5s.create_simple(shape)
    node = h5py.h5d.create(file.id, name.encode(), stored, space, plist)
    node.write(h5py.h5s.ALL, h5py.h5s.ALL, values, mtype=stored)


def fields_equal(got, want):
    """Compare bytes of all members; what lies between them means nothing."""
    if want.dtype.fields:
        return all(fields_equal(got[name], want[name]) for name in want.dtype.names)
    return got.astype(got.dtype.newbyteorder("=")).tobytes() == want.tobytes()


def native(array):
    return array.astype(array.dtype.newbyteorder("="))


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", ["contiguous", "columns", "chunked", "deflate", "shuffle", "fletcher"]
)
@pytest.mark.parametrize("seed", range(3))
def test_any_type_is_read_as_h5py_reads_it(tmp_path, layout, seed):
    rng = np.random.default_rng([seed, *layout.encode()])
    path = tmp_path / "any.h5"
    names = [f"d{i}" for i in range(25)]
    with h5py.File(path, "w") as file:
        for name in names:
            stored = random_type(rng)
            while not is_known(stored):
                stored = random_type(rng)
            raw = rng.integers(0, 256, (ROWS, stored.get_size())).astype(np.uint8)
            raw[rng.random(raw.shape) < 0.2] = ord(" ")
            write(file, name, stored, layout, raw)
    direct = 0
    for name in names:
        axis = 1 if layout == "columns" else 0
        with h5py.File(path) as file:
            want = np.moveaxis(native(file[name][...]), axis, 0)
        with AsyncReader(
            hdf5_path=path, data_field=name, labels_field=None, num_dim=axis, batch_size=16,
            shuffle="full", seed=seed, num_threads=2,
        ) as reader:  # fmt: skip
            for batch in reader:
                assert fields_equal(batch[0], want[batch.index]), name
            direct += reader.stats().ways["data"] == "core"
    assert direct >= len(names) - 6  # 1-byte big-endian integers of reduced precision are HDF5's


def read(path, name="x", **options):
    """Return all samples in order, and by which method they were read."""
    with AsyncReader(
        hdf5_path=path, data_field=name, labels_field=None, batch_size=7, **options
    ) as reader:
        samples = np.concatenate([batch[0].copy() for batch in reader])
        return samples, reader.stats().ways["data"]


@pytest.mark.slow
@pytest.mark.parametrize("order", ["LE", "BE"])
@pytest.mark.parametrize("name", FLOATS)
def test_every_float_of_a_format_is_as_hdf5_converts_it(tmp_path, name, order):
    size, *rest = FLOATS[name]
    if size > 2:
        raw = np.random.default_rng(0).integers(0, 256, (4000, size)).astype(np.uint8)
    else:
        raw = np.arange(256**size).astype(f"<u{size}").view(np.uint8).reshape(-1, size)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        write(file, "x", real(size, order, *rest), "deflate", raw)
        want = native(file["x"][...])
    found, way = read(tmp_path / "x.h5")
    assert (found.tobytes(), way) == (want.tobytes(), "core")


@pytest.mark.parametrize("layout", ["contiguous", "deflate"])
def test_a_saved_index_has_the_conversion(tmp_path, layout):
    path = tmp_path / "x.h5"
    raw = np.random.default_rng(0).integers(0, 256, (60, 4)).astype(np.uint8)
    with h5py.File(path, "w") as file:
        write(file, "x", integer(4, "BE", 24, 5), layout, raw)
        want = native(file["x"][...])
    found, way = read(save(tmp_path, path, fields={"x": Field("x")}))
    assert (found.tobytes(), way) == (want.tobytes(), "core")


@pytest.mark.parametrize("is_allocated", [True, False])
def test_values_never_written_are_the_converted_fill_value(tmp_path, is_allocated):
    stored = integer(4, "LE", 20, 6)
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plist.set_chunk((5,))
    plist.set_fill_value(np.array(-77, np.int32))
    with h5py.File(tmp_path / "x.h5", "w") as file:
        node = h5py.h5d.create(file.id, b"x", stored, h5py.h5s.create_simple((20,)), plist)
        if is_allocated:
            h5py.Dataset(node)[5:10] = np.arange(5) - 2
        want = file["x"][...]
    found, way = read(tmp_path / "x.h5")
    assert (found.tolist(), way) == (want.tolist(), "core")


def test_strings_of_the_sources_of_a_virtual_dataset_are_converted(tmp_path):
    raw = np.frombuffer(b"ab\0x" * 30 + b"c   " * 30, np.uint8).reshape(60, 4)
    with h5py.File(tmp_path / "source.h5", "w") as file:
        write(file, "x", text(4, h5t.STR_NULLTERM), "deflate", raw)
    layout = h5py.VirtualLayout((60,), "S4")
    layout[:] = h5py.VirtualSource(tmp_path / "source.h5", "x", (60,))
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_virtual_dataset("x", layout)
        want = file["x"][...]
    found, way = read(tmp_path / "x.h5", allow_external=[tmp_path])
    assert (found.tolist(), way) == (want.tolist(), "core")


@pytest.mark.parametrize(
    "parameters",
    [
        (),
        (4, 4, 1),
        (4, 8),  # a chunk would grow as it is stored
        (4, 4, 0, 1, 0, 4, 4, 1, 0, 0, 0, 0, 0, 0, 0),  # reads beyond its element
        (4, 4, 0, 0, 1, 4, 4, 1, 0, 0, 0, 0, 0, 0, 0),  # writes beyond it
        (4, 4, 3, 0, 0, 4, 4, 1, 0, 20, 20, 0, 0, 0, 0),  # bits that there are not
        (4, 4, 4, 0, 0, 4, 4, 1, 0, 31, 23, 9, 0, 22, 127),  # an exponent that does not fit
        (4, 4, 9, 0, 0, 4, 4, 1, 0, 0, 0, 0, 0, 0, 0),
    ],
)
def test_parameters_that_make_no_sense_are_refused(parameters):
    assert stored_filter(parameters) is None


@pytest.mark.parametrize(("name", "bits", "bias"), [
    ("E4M3", (4, 3), 7), ("E2M3", (2, 3), 1), ("E3M2", (3, 2), 3), ("E2M1", (2, 1), 1),
])  # fmt: skip
@pytest.mark.parametrize("is_member", [False, True])
def test_floats_that_hdf5_converts_wrongly_are_refused(tmp_path, name, bits, bias, is_member):
    """HDF5 takes 4.0 of E2M1 for infinity; E5M2 has infinities, and is read."""
    exponent, mantissa = bits
    size = exponent + mantissa
    stored = real(1, "LE", size + 1, 0, (size, mantissa, exponent, 0, mantissa), bias)
    if is_member:
        whole = h5t.create(h5t.COMPOUND, 2)
        whole.insert(b"a", 0, h5t.STD_U8LE)
        whole.insert(b"b", 1, h5t.array_create(stored, (1,)))
        stored = whole
    with h5py.File(tmp_path / "a.h5", "w") as file:
        h5py.h5d.create(file.id, b"x", stored, h5py.h5s.create_simple((4,)))
    for path in ("x", "x/b")[: 1 + is_member]:
        with pytest.raises(DatasetError, match=f"{name} floats have no infinity"):
            AsyncReader(hdf5_path=tmp_path / "a.h5", fields={"x": path})


@pytest.mark.parametrize("name", ["bfloat16", "of 8 bits"])
def test_converted_sources_of_overlapping_mappings_are_checked_as_stored(tmp_path, name):
    """These h5py reads; their chunks are as long as what the file has."""
    path = tmp_path / "a.h5"
    size, precision, at, fields, bias = FLOATS[name]
    with h5py.File(path, "w") as file:
        properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        properties.set_chunk((4, 3))
        properties.set_deflate(1)
        space = h5py.h5s.create_simple((10, 3))
        stored = real(size, "LE", precision, at, fields, bias)
        source = h5py.Dataset(h5py.h5d.create(file.id, b"source", stored, space, properties))
        source[...] = np.arange(30).reshape(10, 3)
        layout = h5py.VirtualLayout((12, 3), source.dtype)
        layout[:10] = h5py.VirtualSource(".", "source", (10, 3))
        layout[2:] = h5py.VirtualSource(".", "source", (10, 3))
        file.create_virtual_dataset("x", layout)
    with h5py.File(path) as file:
        values, way = read(path)
        assert np.array_equal(values, file["x"][...])
        assert way == "h5py"
