"""Filters that plugins, libaec and libbz2 undo for the core, beside h5py, in several threads."""

from __future__ import annotations

import bz2
import ctypes
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import h5py
import numpy as np
import pytest
from conftest import require_extra

from h5async import AsyncReader, ReadError
from h5async.codec import filters as plugins
from h5async.codec.filters import BZIP2, NBIT, Filter
from h5async.core.binding import address, can_decode, load_core
from h5async.index.chunks import filters_of
from h5async.read.coretables import encoded_room

hdf5plugin = require_extra("hdf5plugin")

SEED = 30
THREADS = 4
FLOATS, INTEGERS = ("f4", "f8"), ("u1", "i2", ">i4", "u8")
# Name -> how it is written, the dtypes it takes, and whether it has chunks of one sample.
CASES = {
    "zfp": (hdf5plugin.Zfp(accuracy=0.01), (*FLOATS, "i4", "i8"), False),
    "zfp-reversible": (hdf5plugin.Zfp(reversible=True), FLOATS, False),
    "zfp-rate": (hdf5plugin.Zfp(rate=10), FLOATS, False),
    "sz": (hdf5plugin.SZ(absolute=0.01), FLOATS, False),
    "sz3": (hdf5plugin.SZ3(absolute=0.01), FLOATS, False),
    "sperr": (hdf5plugin.Sperr(rate=4), FLOATS, False),
    "fcidecomp": (hdf5plugin.FciDecomp(), ("u1", "u2"), True),
    "bzip2": (hdf5plugin.BZip2(), (*FLOATS, *INTEGERS), False),
    "blosc2": (hdf5plugin.Blosc2(), (*FLOATS, *INTEGERS), False),
    "blosc2-shuffled-after": ({"shuffle": True, **hdf5plugin.Blosc2()}, INTEGERS, False),
    "szip": ({"compression": "szip", "compression_opts": ("nn", 8)}, (">f8", *INTEGERS), False),
    "szip-4": ({"compression": "szip", "compression_opts": ("ec", 4)}, (">f4", *INTEGERS), False),
    "szip-2": ({"compression": "szip", "compression_opts": ("nn", 2)}, ("i4", *INTEGERS), False),
    "scaleoffset": ({"scaleoffset": 0}, INTEGERS, False),
    "scaleoffset-bits": ({"scaleoffset": 7}, INTEGERS, False),
    "scaleoffset-decimals": ({"scaleoffset": 3}, (*FLOATS, ">f4", ">f8"), False),
    "checked": ({"fletcher32": True, **hdf5plugin.BZip2()}, ("f4", "i2"), False),
}
KINDS = [(name, dtype) for name, (_, dtypes, _) in CASES.items() for dtype in dtypes]


def write(path: Path, name: str, dtype: str) -> None:
    """Write 45 samples: in whole and cut-off chunks, one of them raw, others never written."""
    options, _, is_by_sample = CASES[name]
    rng = np.random.default_rng([SEED, sum(map(ord, name + dtype))])
    values = np.cumsum(rng.normal(size=(45, 34, 50)), axis=2) * 3 + 100
    shape = (1, 34, 50) if is_by_sample else (4, 20, 50)
    with h5py.File(path, "w") as file:
        data = file.create_dataset(
            "data", values.shape, dtype, chunks=shape, fillvalue=7, **dict(options)
        )
        data[:40] = values[:40].astype(dtype)
        left_out = rng.integers(0, 99, shape).astype(dtype)
        data.id.write_direct_chunk((0, 0, 0), left_out.tobytes(), 0xFF)


def read(path: Path, **options) -> np.ndarray:
    """Return all samples of a dataset, read in random order."""
    options = dict(labels_field=None, batch_size=16, shuffle="full", device="cpu") | options
    with AsyncReader(hdf5_path=path, **options) as reader:
        (layout,) = reader.layouts.values()
        found = np.empty(layout.shape, layout.dtype)
        for batch in reader:
            found[batch.index] = batch[0]
        assert reader.fallback_reads == 0
        assert set(reader.stats().ways.values()) == {"core"}
    return found


@pytest.mark.parametrize(("name", "dtype"), KINDS)
def test_values_are_those_of_h5py(tmp_path, name, dtype):
    write(tmp_path / "a.h5", name, dtype)
    with h5py.File(tmp_path / "a.h5") as file:
        expected = file["data"][...]
    for threads in (0, THREADS):
        assert read(tmp_path / "a.h5", num_threads=threads).tobytes() == expected.tobytes()


def core_decode(filters: tuple[Filter, ...], encoded: np.ndarray, nbytes: int) -> bytes | None:
    """Return what the core makes of a chunk; None: it finds it damaged."""
    core = load_core()
    room = encoded_room(nbytes)
    memory = [np.full(room, 0xC3, np.uint8) for _ in range(5)]
    worker = core.new_worker(memory[0], memory[1], tuple(memory[2:]))
    # At the very end of its memory, so that a sanitizer notices what lies behind it.
    encoded, out = encoded.copy(), np.full(nbytes, 0x3C, np.uint8)
    is_done = core.decode(
        core.filters(filters),
        ctypes.byref(worker.struct),
        address(encoded),
        address(out),
        len(filters),
        encoded.size,
        0,
        nbytes,
    )
    return out.tobytes() if is_done else None


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize(
    ("size", "precision", "offset"), [(1, 3, 2), (2, 12, 0), (4, 17, 5), (8, 45, 9), (8, 64, 0)]
)
def test_nbit_is_as_it_is_defined(size, precision, offset, order):
    """HDF5 converts numbers of such types, so these are packed here."""
    rng = np.random.default_rng([SEED, precision])
    numbers = rng.integers(0, 1 << precision, 999, np.uint64)
    bits = numbers[:, None] >> np.arange(precision - 1, -1, -1, dtype=np.uint64) & np.uint64(1)
    packed = np.packbits(bits.astype(np.uint8).ravel())
    filters = (Filter(NBIT, (8, 0, 999, 1, size, int(order == ">"), precision, offset), "nbit"),)
    expected = (numbers << np.uint64(offset)).astype(f"{order}u{size}").tobytes()
    assert core_decode(filters, packed, len(expected)) == expected
    assert core_decode(filters, packed[:-1], len(expected)) is None
    assert core_decode(filters, packed, len(expected) - size) is None
    assert core_decode(filters, packed, len(expected) + size) is None


def stored(path: Path) -> tuple[tuple[Filter, ...], np.ndarray, bytes]:
    """Return the filters, the encoded bytes and the values of one whole chunk."""
    with h5py.File(path) as file:
        data = file["data"]
        at = (data.chunks[0], 0, 0)
        mask, encoded = data.id.read_direct_chunk(at)
        assert mask == 0
        values = data[
            tuple(slice(begin, begin + n) for begin, n in zip(at, data.chunks, strict=True))
        ]
        return (
            filters_of(data.id.get_create_plist()),
            np.frombuffer(encoded, "u1"),
            values.tobytes(),
        )


CHECKED = [name for name in CASES if name not in ("zfp-rate", "sz", "sz3", "sperr", "fcidecomp")]


@pytest.mark.parametrize("name", CHECKED)
def test_damaged_chunks_never_give_what_memory_held(tmp_path, name):
    """Each is an error, or has the right length, and is the same each time."""
    write(tmp_path / "a.h5", name, CASES[name][1][-1])
    filters, encoded, values = stored(tmp_path / "a.h5")
    rng = np.random.default_rng(SEED)
    assert core_decode(filters, encoded, len(values)) == values
    for nbytes in (len(values) - 8, len(values) + 8, 0):
        assert core_decode(filters, encoded, nbytes) is None
    is_lossy = name.startswith("zfp")  # which has no length, nor a checksum
    for nbytes in (0, 1, 4, encoded.size // 2, encoded.size - 40):
        cut = core_decode(filters, encoded[:nbytes], len(values))
        assert is_lossy or cut is None
    for _ in range(50):
        damaged = encoded.copy()
        damaged[rng.integers(encoded.size, size=3)] = rng.integers(256, size=3)
        found = core_decode(filters, damaged, len(values))
        assert found is None or found == core_decode(filters, damaged, len(values))


@pytest.mark.parametrize("name", ["bzip2", "blosc2", "szip", "scaleoffset"])
def test_a_chunk_that_was_cut_is_an_error_that_names_it(tmp_path, name):
    write(tmp_path / "a.h5", name, "i2" if name != "szip" else "u1")
    with h5py.File(tmp_path / "a.h5", "r+") as file:
        data = file["data"].id
        mask, encoded = data.read_direct_chunk((8, 0, 0))
        data.write_direct_chunk((8, 0, 0), encoded[: len(encoded) // 2], mask)
    with pytest.raises(ReadError, match=r'"data", chunk \(8, 0, 0\)'):
        read(tmp_path / "a.h5", num_threads=THREADS)


@pytest.mark.parametrize("shuffle", [0, 1])
def test_a_blosc2_chunk_that_has_no_values(tmp_path, shuffle):
    """The plugin gives it the right length, and writes nothing."""
    with h5py.File(tmp_path / "a.h5", "w") as file:
        numbers = np.random.default_rng(SEED).integers(0, 9, (8, 500), np.uint8)
        blosc2 = hdf5plugin.Blosc2(filters=shuffle)
        data = file.create_dataset("data", data=numbers, chunks=(8, 500), **blosc2)
        _, encoded = data.id.read_direct_chunk((0, 0))
        filters = filters_of(data.id.get_create_plist())
    damaged = np.frombuffer(encoded, np.uint8).copy()
    chunk = int.from_bytes(encoded[11:15], "big")  # behind the frame's header
    damaged[chunk + 2] &= 0xFF - 2  # not stored as it is
    damaged[chunk + 12 : chunk + 16] = (32, 0, 0, 0)  # the header alone
    damaged[chunk + 31] = 4 << 4  # uninitialized
    assert core_decode(filters, np.frombuffer(encoded, np.uint8), 4000) == numbers.tobytes()
    assert core_decode(filters, damaged, 4000) is None


def test_a_bomb_of_bzip2_is_not_inflated():
    bomb = np.frombuffer(bz2.compress(bytes(1 << 26)), np.uint8)
    assert bomb.size < 1 << 10
    assert core_decode((Filter(BZIP2, (9,), ""),), bomb, 4096) is None


@pytest.mark.parametrize("name", ["zfp", "sz", "sz3", "sperr", "blosc2", "fcidecomp", "szip"])
def test_several_threads_decode_as_one(tmp_path, name):
    write(tmp_path / "a.h5", name, CASES[name][1][-1])
    filters, encoded, values = stored(tmp_path / "a.h5")
    with ThreadPoolExecutor(THREADS) as pool:
        found = pool.map(lambda _: core_decode(filters, encoded, len(values)), range(40))
        assert all(one == values for one in found)


def child(code: str, *arguments: object, **variables: str) -> str:
    """Run a program in which hdf5plugin was not imported, and return what it printed."""
    # netCDF4, once another test has imported it, has HDF5 of later processes find its plugins.
    others = {name: value for name, value in os.environ.items() if name != "HDF5_PLUGIN_PATH"}
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=100,
        env={**others, **variables},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


READ = """
import sys
if sys.argv[2] == "hidden":  # as where it is not installed
    import importlib.util
    find = importlib.util.find_spec
    def find_others(name, *rest):
        return None if name == "hdf5plugin" else find(name, *rest)
    importlib.util.find_spec = find_others
import numpy as np
from h5async import AsyncReader, DatasetError
try:
    with AsyncReader(
        hdf5_path=sys.argv[1], data_field=sys.argv[3], labels_field=None, device="cpu",
        workers=sys.argv[4],
    ) as reader:
        found = np.concatenate([batch.copy()[0] for batch in reader])
        print(int(found.astype("i8").sum()), *reader.stats().ways.values())
except DatasetError as error:
    print("refused:", error)
"""


@pytest.fixture(scope="module")
def mapped(tmp_path_factory):
    """A file whose virtual dataset of overlapping mappings only h5py reads."""
    path = tmp_path_factory.mktemp("mapped") / "a.h5"
    with h5py.File(path, "w") as file:
        layout = h5py.VirtualLayout((60, 8), "i4")
        numbers = np.arange(480, dtype="i4").reshape(60, 8)
        for name, options in {
            "zstd": hdf5plugin.Zstd(),
            "bitshuffle": hdf5plugin.Bitshuffle(),
            "zfp": hdf5plugin.Zfp(reversible=True),
        }.items():
            data = file.create_dataset(name, data=numbers, chunks=(7, 8), **options)
            source = h5py.VirtualSource(data)
            layout = h5py.VirtualLayout((60, 8), "i4")
            layout[:40], layout[30:] = source[:40], source[30:]
            file.create_virtual_dataset(f"{name} twice", layout)
    return path


@pytest.mark.sampled(1)
@pytest.mark.parametrize("workers", ["thread", "process"])
@pytest.mark.parametrize("name", ["zstd", "bitshuffle", "zfp"])
def test_hdf5_is_given_the_filters_of_what_it_reads(mapped, name, workers):
    assert child(READ, mapped, "installed", f"{name} twice", workers) == f"{480 * 479 // 2} h5py\n"


def test_what_hdf5_lacks_the_filter_for_is_refused_at_opening(mapped):
    read_directly = child(READ, mapped, "hidden", "zstd", "thread")
    assert read_directly == f"{480 * 479 // 2} core\n"
    for name in ("zstd twice", "zfp"):
        refused = child(READ, mapped, "hidden", name, "thread")
        assert refused.startswith("refused:"), refused
        assert "which is not available" in refused
        assert "pip install hdf5plugin" in refused


def test_a_plugin_comes_from_the_folders_of_hdf5(mapped, tmp_path):
    (zfp,) = Path(hdf5plugin.PLUGIN_PATH).glob("libh5zfp.*")
    shutil.copy(zfp, tmp_path)
    (tmp_path / "libnone.so").write_bytes(b"no library")
    folder = str(tmp_path)
    found = child(READ, mapped, "hidden", "zfp", "thread", HDF5_PLUGIN_PATH=folder)
    assert found == f"{480 * 479 // 2} core\n"
    refused = child(
        READ, mapped, "hidden", "zfp", "thread", HDF5_PLUGIN_PATH=folder, HDF5_PLUGIN_PRELOAD="::"
    )
    assert refused.startswith("refused:")


def test_zfp_of_a_big_endian_machine_is_left_to_hdf5():
    """Its plugin asks HDF5 to swap bytes, which it may not without HDF5's lock."""
    header = (0x10101000, int.from_bytes(b"zfp\5", "little"), 0, 0)
    assert can_decode(Filter(32013, header, "zfp"))
    swapped = tuple(int.from_bytes(n.to_bytes(4, "little"), "big") for n in header)
    assert not can_decode(Filter(32013, swapped, "zfp"))
    assert not can_decode(Filter(32013, (), "zfp"))


def test_hdf5_is_asked_for_plugins_under_the_lock_of_h5py(monkeypatch):
    """Another thread may be in HDF5, which is not made for that."""
    owners = []

    def state(_):
        with ThreadPoolExecutor(1) as pool:
            owners.append(pool.submit(try_to_lock).result())

    def try_to_lock():
        is_free = h5py._objects.phil.acquire(blocking=False)
        if is_free:
            h5py._objects.phil.release()
        return is_free

    library = type("Library", (), {"H5PLget_loading_state": staticmethod(state)})
    monkeypatch.setattr(plugins.ctypes, "CDLL", lambda _: library)
    plugins._folders()
    assert owners == [False]
