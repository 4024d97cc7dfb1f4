"""Scale-offset and n-bit: HDF5 itself packs the chunks, or reads chunks made up here."""

from __future__ import annotations

import ctypes

import h5py
import numpy as np
import pytest
from cases import each
from coredecoding import DamagedError, Decoder
from hypothesis import given, settings
from hypothesis import strategies as st

from h5async.codec.filters import NBIT, NOTHING, SCALEOFFSET, Filter
from h5async.codec.filters import _nbit as nbit_filter
from h5async.codec.filters import _scaleoffset as scaleoffset_filter
from h5async.core.binding import load_core

pytestmark = pytest.mark.skipif(load_core() is None, reason="needs the compiled core")

D_SCALING, E_SCALING, INTEGER = 0, 1, 2
ORDERS = "<>"
INTEGERS = [f"{order}{kind}{n}" for order in ORDERS for kind in "iu" for n in (1, 2, 4, 8)]
FLOATS = [f"{order}f{n}" for order in ORDERS for n in (4, 8)]
UNDEFINED = object()
SEED = 20160704

few = settings(max_examples=settings().max_examples // 2)

HDF5 = ctypes.CDLL(h5py.h5p.__file__)  # for what h5py does not wrap
HDF5.H5Pset_fill_value.argtypes = (ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)


def memory_file():
    """Make a file for any type: HDF5 2 wants to be told that most of its bits may be unused."""
    access = h5py.h5p.create(h5py.h5p.FILE_ACCESS)
    access.set_fapl_core(1 << 16, backing_store=False)
    if hasattr(HDF5, "H5Pset_relax_file_integrity_checks"):
        relax = HDF5.H5Pset_relax_file_integrity_checks
        relax.argtypes = (ctypes.c_int64, ctypes.c_uint64)
        assert relax(access.id, 1) >= 0
    return h5py.File(h5py.h5f.create(b"memory", h5py.h5f.ACC_TRUNC, fapl=access))


class Chunk:
    """A dataset of one chunk, packed by HDF5 from `values`, or stored as `encoded`.

    `decoded` is what HDF5 undoes the filter to: the memory type is the file's, so that nothing
    is converted. It is None where HDF5 refuses to read.
    """

    def __init__(self, tid, number, options, count, *, values=None, encoded=None, fill=None):
        plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plist.set_chunk((count,))
        if fill is UNDEFINED:
            assert HDF5.H5Pset_fill_value(plist.id, tid.id, None) >= 0
        elif fill is not None:
            plist.set_fill_value(fill)
        plist.set_filter(number, h5py.h5z.FLAG_MANDATORY, options)
        self.tid = tid
        self.nbytes = count * tid.get_size()
        every = h5py.h5s.ALL
        with memory_file() as file:
            dataset = h5py.h5d.create(file.id, b"d", tid, h5py.h5s.create_simple((count,)), plist)
            if encoded is None:
                dataset.write(every, every, values.view(f"V{tid.get_size()}"), mtype=tid)
            else:
                dataset.write_direct_chunk((0,), encoded.tobytes())
            del dataset  # and with it the chunk in the cache, which never was packed
            dataset = h5py.h5d.open(file.id, b"d")
            self.parameters = dataset.get_create_plist().get_filter(0)[2]
            mask, stored = dataset.read_direct_chunk((0,))
            assert mask == 0
            self.encoded = np.frombuffer(stored, np.uint8)
            read = np.empty(count, f"V{tid.get_size()}")
            try:
                dataset.read(every, every, read, mtype=tid)
                self.decoded = read.tobytes()
            except OSError:
                self.decoded = None

    @property
    def values(self):
        return np.frombuffer(self.decoded, self.tid.dtype)


def decode(number, parameters, encoded, nbytes):
    """Return what the core decodes to exactly this length, in guarded memory."""
    return Decoder((Filter(number, parameters, ""),), nbytes).decode(encoded)


def assert_decodes(number, chunk):
    assert chunk.decoded is not None
    assert decode(number, chunk.parameters, chunk.encoded, chunk.nbytes) == chunk.decoded


def scaled(dtype, factor, count, **options):
    dtype = np.dtype(dtype)
    scale_type = D_SCALING if dtype.kind == "f" else INTEGER
    tid = h5py.h5t.py_create(dtype)
    if isinstance(options.get("fill"), (int, float)):
        options["fill"] = np.array(options["fill"], dtype)
    return Chunk(tid, SCALEOFFSET, (scale_type, factor & 0xFFFFFFFF), count, **options)


def header(width, minimum, minimum_nbytes=8):
    head = width.to_bytes(4, "little") + bytes([minimum_nbytes]) + minimum.to_bytes(16, "little")
    return np.frombuffer(head, np.uint8)


def noise(seed, nbytes):
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def needed_nbytes(encoded, count, itemsize):
    width = min(int.from_bytes(encoded[:4].tobytes(), "little"), 8 * itemsize)
    return 21 + (count * width + 7) // 8


# --- scale-offset --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [*INTEGERS, *FLOATS])
def test_scaleoffset_through_h5py(tmp_path, dtype):
    dtype = np.dtype(dtype)
    rng = np.random.default_rng(SEED)
    values = rng.integers(0, 100, (13, 11)).astype(dtype)
    if dtype.kind == "f":
        values += rng.random((13, 11)).astype(dtype)
    with h5py.File(tmp_path / "f.h5", "w") as file:
        for name, options in (
            ("auto", {"scaleoffset": 3 if dtype.kind == "f" else 0}),
            ("fill", {"scaleoffset": 1 if dtype.kind == "f" else 7, "fillvalue": 42}),
        ):
            file.create_dataset(name, data=values, chunks=(5, 4), **options)
    with h5py.File(tmp_path / "f.h5") as file:
        for dataset in file.values():
            parameters = dataset.id.get_create_plist().get_filter(0)[2]
            assert scaleoffset_filter(parameters) is not None
            for corner in np.ndindex(3, 3):
                first = tuple(np.multiply(corner, (5, 4)))
                _, stored = dataset.id.read_direct_chunk(first)
                encoded = np.frombuffer(stored, np.uint8)
                chunk = decode(SCALEOFFSET, parameters, encoded, 20 * dtype.itemsize)
                block = np.s_[first[0] : first[0] + 5, first[1] : first[1] + 4]
                expected = dataset[block]
                got = np.frombuffer(chunk, dtype).reshape(5, 4)
                assert got[tuple(map(slice, expected.shape))].tobytes() == expected.tobytes()


@pytest.mark.slow
@given(
    dtype=st.sampled_from(INTEGERS),
    count=st.integers(1, 70),
    spread=st.integers(0, 64),
    base=st.integers(-(2**63), 2**63),
    factor=st.integers(-2, 64),
    fill=st.sampled_from(["default", "undefined", "any", "frequent"]),
    seed=st.integers(0, 2**32),
)
@few
def test_integers_that_hdf5_packed(dtype, count, spread, base, factor, fill, seed):
    dtype = np.dtype(dtype)
    nbits = 8 * dtype.itemsize
    steps = noise(seed, 8 * count).view(np.uint64) & np.uint64((1 << spread) - 1)
    native = dtype.newbyteorder("=")
    values = (steps + np.uint64(base % 2**64)).astype(f"u{dtype.itemsize}").view(native)
    value = int(np.array(base % 2**nbits, np.uint64).astype(f"u{dtype.itemsize}").view(native))
    if fill == "frequent":
        values[::3] = value
    chunk = scaled(
        dtype,
        min(factor, nbits),
        count,
        values=values.astype(dtype),
        fill={"default": None, "undefined": UNDEFINED}.get(fill, value),
    )
    assert scaleoffset_filter(chunk.parameters) is not None
    assert_decodes(SCALEOFFSET, chunk)
    if factor <= 0:  # then nothing was lost, which proves that HDF5 read a packed chunk
        assert chunk.decoded == values.astype(dtype).tobytes()


@given(
    dtype=st.sampled_from(FLOATS),
    count=st.integers(1, 40),
    magnitude=st.integers(-6, 8),
    base=st.floats(-1e6, 1e6),
    exponent=st.integers(-6, 12),
    fill=st.sampled_from(["default", "undefined", "value"]),
    seed=st.integers(0, 2**32),
)
@few
def test_floats_that_hdf5_packed(dtype, count, magnitude, base, exponent, fill, seed):
    dtype = np.dtype(dtype)
    rng = np.random.default_rng(seed)
    values = (base + rng.normal(size=count) * 10.0**magnitude).astype(dtype)
    if fill == "value":
        values[::3] = dtype.type(base)
    chunk = scaled(
        dtype,
        exponent,
        count,
        values=values,
        fill={"default": None, "undefined": UNDEFINED}.get(fill, base),
    )
    assert scaleoffset_filter(chunk.parameters) is not None
    assert_decodes(SCALEOFFSET, chunk)


@each("dtype", FLOATS)
@each(
    "values",
    [[1, np.nan, 2], [np.nan, 1, 2], [np.inf, 1, 2], [0, -np.inf, 0], [1e30, -1e30, 0], [-0.0] * 3],
)
def test_floats_that_are_no_numbers(dtype, values):
    for fill in (None, UNDEFINED, 1.0):
        for exponent in (2, -2):
            chunk = scaled(dtype, exponent, 3, values=np.array(values, dtype), fill=fill)
            if chunk.encoded[0] <= 8 * np.dtype(dtype).itemsize:
                assert_decodes(SCALEOFFSET, chunk)
                continue
            # HDF5 writes a range that is NaN as 64 bits, and cannot read these as 4 bytes.
            with pytest.raises(DamagedError, match="cannot be decoded"):
                decode(SCALEOFFSET, chunk.parameters, chunk.encoded, chunk.nbytes)


@pytest.mark.parametrize("dtype", ["<u1", "<i2", ">i4", "<f4", "<f8", ">u8"])
def test_all_widths(dtype):
    dtype = np.dtype(dtype)
    for width in range(8 * dtype.itemsize + 1):
        for count in (1, 8, 333):
            nbytes = (count * width + 7) // 8
            encoded = np.concatenate([header(width, 77), noise(width, nbytes + 1)])
            encoded[21:25] = 0xFF  # so that there are fill values of any width
            fill = -1.5 if dtype.kind == "f" else 23
            chunk = scaled(dtype, 3 * (dtype.kind == "f"), count, encoded=encoded, fill=fill)
            assert_decodes(SCALEOFFSET, chunk)


def test_a_chunk_of_many_blocks():
    for dtype, width, count in (("<i2", 10, 300_001), (">f8", 37, 50_003), ("<u8", 61, 40_007)):
        encoded = np.concatenate([header(width, 3), noise(width, (count * width) // 8 + 1)])
        chunk = scaled(dtype, 0, count, encoded=encoded)
        assert_decodes(SCALEOFFSET, chunk)


@given(
    dtype=st.sampled_from([*INTEGERS, *FLOATS]),
    count=st.integers(1, 70),
    width=st.integers(0, 64),
    minimum=st.one_of(
        st.integers(0, 2**64 - 1),
        st.sampled_from([0xFFF0000000000000, 0x7FC00001, 0x7FF8000000000001, 0x80000000, 1 << 63]),
    ),
    minimum_nbytes=st.one_of(st.just(8), st.integers(0, 255)),
    exponent=st.integers(-50, 50),
    fill=st.sampled_from(["default", "undefined", "noise"]),
    ones=st.integers(0, 3),
    seed=st.integers(0, 2**32),
)
@few
def test_any_bits_that_hdf5_reads(
    dtype, count, width, minimum, minimum_nbytes, exponent, fill, ones, seed
):
    """What no writer makes is decoded as HDF5 does too: overflows, infinite and subnormal results.

    Only bytes that HDF5 need not read beyond the end of are given to it.
    """
    dtype = np.dtype(dtype)
    width = min(width, 8 * dtype.itemsize)
    encoded = np.concatenate(
        [header(width, minimum, minimum_nbytes), noise(seed, count * width // 8 + 1)]
    )
    encoded[21 : 21 + ones * dtype.itemsize] = 0xFF
    fills = {
        "default": None,
        "undefined": UNDEFINED,
        "noise": noise(seed + 1, dtype.itemsize).view(dtype).reshape(()),
    }
    factor = exponent if dtype.kind == "f" else 0
    chunk = scaled(dtype, factor, count, encoded=encoded, fill=fills[fill])
    if scaleoffset_filter(chunk.parameters) is not None:
        assert_decodes(SCALEOFFSET, chunk)
    else:  # a power of ten that is zero or infinite in 4 bytes
        assert dtype.itemsize == 4
        assert not -45 <= exponent <= 38


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["<f4", ">f8"])
def test_every_power_of_ten(dtype):
    most = 39 if dtype == "<f4" else 309
    values = noise(SEED, 21 * 20)
    values = np.concatenate([header(20, 0), values])
    for exponent in range(-most - 9, most + 9):
        chunk = scaled(dtype, exponent, 100, encoded=values, fill=UNDEFINED)
        if scaleoffset_filter(chunk.parameters) is not None:
            assert_decodes(SCALEOFFSET, chunk)
        else:
            assert abs(exponent) >= most


@pytest.mark.slow
@each("dtype", [*INTEGERS, *FLOATS])
def test_cut_scaleoffset_chunks_are_an_error(dtype):
    count = 21
    for spread in (1, 9, 30, 256):
        values = (np.arange(count) % spread).astype(dtype)
        for fill in (None, UNDEFINED):
            chunk = scaled(dtype, 0, count, values=values, fill=fill)
            needed = needed_nbytes(chunk.encoded, count, np.dtype(dtype).itemsize)
            assert needed <= chunk.encoded.size
            for nbytes in range(needed):
                with pytest.raises(DamagedError):
                    decode(SCALEOFFSET, chunk.parameters, chunk.encoded[:nbytes], chunk.nbytes)
            for nbytes in range(needed, chunk.encoded.size + 1):  # HDF5 stores a byte in vain
                cut = chunk.encoded[:nbytes]
                assert decode(SCALEOFFSET, chunk.parameters, cut, chunk.nbytes) == chunk.decoded


@each("dtype", INTEGERS)
def test_scaleoffset_of_all_bits_changes_nothing(dtype):
    nbytes = np.dtype(dtype).itemsize
    chunk = scaled(dtype, 8 * nbytes, 9, values=noise(SEED, 9 * nbytes).view(dtype))
    assert_decodes(SCALEOFFSET, chunk)
    assert chunk.encoded.tobytes() == chunk.decoded
    for encoded in (chunk.encoded[:-1], chunk.encoded[:0], np.append(chunk.encoded, np.uint8(0))):
        with pytest.raises(DamagedError):
            decode(SCALEOFFSET, chunk.parameters, encoded, chunk.nbytes)


@pytest.mark.slow
def test_damage_to_scaleoffset_stays_inside_and_has_the_right_length():
    rng = np.random.default_rng(SEED)
    for dtype in (*INTEGERS, *FLOATS):
        chunk = scaled(dtype, 0, 30, values=rng.integers(0, 90, 30).astype(dtype))
        for _ in range(100):
            damaged = chunk.encoded.copy()
            damaged[rng.integers(0, damaged.size, 3)] = rng.integers(0, 256, 3)
            damaged[rng.integers(0, 5)] ^= 1 << rng.integers(0, 8)
            try:
                decoded = decode(SCALEOFFSET, chunk.parameters, damaged, chunk.nbytes)
            except DamagedError:
                continue
            assert len(decoded) == chunk.nbytes


def test_which_scaleoffset_parameters_are_decoded():
    integers = scaled("<i4", 0, 5, values=np.arange(5, dtype="<i4")).parameters
    floats = scaled("<f4", 2, 5, values=np.arange(5, dtype="<f4")).parameters

    def changed(parameters, index, value):
        return (*parameters[:index], value, *parameters[index + 1 :])

    assert scaleoffset_filter(integers) is not None
    assert scaleoffset_filter(floats) is not None
    refused = [
        (),
        integers[:-1],
        (*integers, 0),
        changed(integers, 0, D_SCALING),
        changed(integers, 1, 33),
        changed(integers, 2, 0),
        changed(integers, 3, 2),
        changed(integers, 4, 3),
        changed(integers, 4, 16),
        changed(integers, 5, 2),
        changed(integers, 6, 2),
        changed(integers, 7, 2),
        changed(floats, 0, E_SCALING),
        changed(floats, 0, INTEGER),
        changed(floats, 1, 39),
        changed(floats, 1, -46 & 0xFFFFFFFF),
        changed(floats, 4, 2),
        changed(floats, 4, 16),
    ]
    for parameters in refused:
        assert scaleoffset_filter(parameters) is None
    assert scaleoffset_filter(changed(integers, 1, -1 & 0xFFFFFFFF)) is not None
    assert scaleoffset_filter(changed(integers, 1, 32)) is not None


# --- n-bit ---------------------------------------------------------------------------------------


def reduced(nbytes, order, precision, offset, signed=False):
    names = {"<": "LE", ">": "BE"}
    tid = getattr(h5py.h5t, f"STD_{'I' if signed else 'U'}{8 * nbytes}{names[order]}").copy()
    tid.set_precision(precision)
    tid.set_offset(offset)
    return tid


@given(
    nbytes=st.sampled_from([1, 2, 4, 8]),
    order=st.sampled_from(ORDERS),
    signed=st.booleans(),
    count=st.integers(1, 70),
    place=st.tuples(st.integers(0, 63), st.integers(0, 63)),
    seed=st.integers(0, 2**32),
)
@few
def test_integers_of_few_bits(nbytes, order, signed, count, place, seed):
    """Bits around the precision go in, and must be zero when they come out."""
    precision = 1 + place[0] % (8 * nbytes)
    offset = place[1] % (8 * nbytes - precision + 1)
    tid = reduced(nbytes, order, precision, offset, signed)
    values = noise(seed, count * nbytes)
    chunk = Chunk(tid, NBIT, (), count, values=values)
    assert nbit_filter(chunk.parameters) is not None
    assert_decodes(NBIT, chunk)
    mask = ((1 << precision) - 1) << offset
    whole = values.view(f"{order}u{nbytes}").astype(np.uint64) & np.uint64(mask)
    assert chunk.decoded == whole.astype(f"{order}u{nbytes}").tobytes()


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
@each("nbytes", [1, 2, 4, 8])
def test_all_precisions_and_offsets(order, nbytes):
    places = [(p, o) for p in range(1, 8 * nbytes + 1) for o in range(8 * nbytes - p + 1)]
    for precision, offset in places[:: max(1, len(places) // 150)]:
        tid = reduced(nbytes, order, precision, offset)
        chunk = Chunk(tid, NBIT, (), 19, values=noise(precision, 19 * nbytes))
        assert_decodes(NBIT, chunk)


@pytest.mark.parametrize("order", ["LE", "BE"])
def test_floats_of_few_bits(order):
    tid = getattr(h5py.h5t, f"IEEE_F32{order}").copy()
    tid.set_fields(26, 20, 6, 7, 13)
    tid.set_offset(7)  # for a moment, the type is longer
    tid.set_precision(20)
    tid.set_size(4)
    chunk = Chunk(tid, NBIT, (), 33, values=noise(SEED, 33 * 4))
    assert chunk.parameters[6:] == (20, 7)
    assert_decodes(NBIT, chunk)


def test_an_nbit_chunk_of_many_blocks():
    for nbytes, order, precision, offset in ((2, "<", 12, 4), (8, ">", 63, 1), (4, "<", 3, 5)):
        tid = reduced(nbytes, order, precision, offset)
        chunk = Chunk(tid, NBIT, (), 150_001, values=noise(SEED, 150_001 * nbytes))
        assert_decodes(NBIT, chunk)


def test_cut_nbit_chunks_are_an_error():
    for nbytes, precision, offset in ((1, 3, 2), (2, 10, 6), (4, 24, 0), (8, 61, 3), (2, 8, 3)):
        for order in ORDERS:
            tid = reduced(nbytes, order, precision, offset)
            chunk = Chunk(tid, NBIT, (), 24, values=noise(SEED, 24 * nbytes))
            needed = 24 * precision // 8
            for size in range(needed):
                with pytest.raises(DamagedError):
                    decode(NBIT, chunk.parameters, chunk.encoded[:size], chunk.nbytes)
            cut = chunk.encoded[:needed]
            assert decode(NBIT, chunk.parameters, cut, chunk.nbytes) == chunk.decoded


@each("dtype", [*INTEGERS, *FLOATS, "<f2", [("a", "<i2"), ("b", ">f8")], ("<i4", (3,))])
def test_nbit_of_all_bits_changes_nothing(dtype):
    dtype = np.dtype(dtype)
    tid = h5py.h5t.py_create(dtype)
    chunk = Chunk(tid, NBIT, (), 7, values=noise(SEED, 7 * dtype.itemsize))
    assert nbit_filter(chunk.parameters) is not None
    assert_decodes(NBIT, chunk)
    assert chunk.encoded.tobytes() == chunk.decoded
    for encoded in (chunk.encoded[:-1], chunk.encoded[:0], np.append(chunk.encoded, np.uint8(0))):
        with pytest.raises(DamagedError):
            decode(NBIT, chunk.parameters, encoded, chunk.nbytes)


def test_which_nbit_parameters_are_decoded():
    few_bits = reduced(2, "<", 10, 0)
    pair = h5py.h5t.create(h5py.h5t.COMPOUND, 4)
    pair.insert(b"a", 0, few_bits)
    pair.insert(b"b", 2, few_bits)
    long_double = h5py.h5t.STD_U64LE.copy()
    long_double.set_size(16)
    long_double.set_precision(80)
    three = h5py.h5t.STD_U32LE.copy()
    three.set_precision(20)
    three.set_size(3)
    for tid in (pair, h5py.h5t.array_create(few_bits, (2,)), long_double, three):
        chunk = Chunk(tid, NBIT, (), 4, values=np.zeros(4 * tid.get_size(), np.uint8))
        assert nbit_filter(chunk.parameters) is None
    good = (8, 0, 4, 1, 2, 0, 10, 6)
    assert nbit_filter(good) is not None
    refused = [
        (),
        (3, 1, 4),  # of a string: HDF5 does not say of what length
        good[:-1],
        (*good, 0),
        (9, *good[1:]),
        (8, 0, 0, 1, 2, 0, 10, 6),
        (8, 0, 4, 4, 2, 0, 10, 6),
        (8, 0, 4, 1, 0, 0, 10, 6),
        (8, 0, 4, 1, 2, 2, 10, 6),
        (8, 0, 4, 1, 2, 0, 0, 6),
        (8, 0, 4, 1, 2, 0, 10, 7),
        (8, 1, 4, 1, 0, 0, 10, 6),
    ]
    for parameters in refused:
        assert nbit_filter(parameters) == (NOTHING if parameters[1:2] == (1,) else None)


# --- both ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [SCALEOFFSET, NBIT])
def test_another_length_is_an_error(number):
    if number == NBIT:
        chunk = Chunk(reduced(2, "<", 10, 3), NBIT, (), 15, values=noise(SEED, 30))
    else:
        chunk = scaled("<i2", 0, 15, values=np.arange(15, dtype="<i2"))
    assert decode(number, chunk.parameters, chunk.encoded, 30) == chunk.decoded
    for nbytes in (*range(30), 31, 32, 100):
        with pytest.raises(DamagedError):
            decode(number, chunk.parameters, chunk.encoded, nbytes)
