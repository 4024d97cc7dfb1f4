"""Files that were made to do harm: they reach outside, declare too much, or contradict themselves.

CVE-2026-1669 was external storage and external links, CVE-2026-12480 virtual datasets, which let a
file of weights read any other file; CVE-2026-9335 belongs to the same family. CVE-2026-0897 and
CVE-2026-12570 were shapes that take all memory.
"""

from __future__ import annotations

import os
import struct
import zlib

import h5py
import numpy as np
import pytest

import h5async.opening.limits
from h5async import (
    AsyncReader,
    ConfigError,
    DatasetError,
    H5AsyncError,
    ReadError,
    UnsafeFileError,
)

ROWS = 40
ROWS_OF_SECRET = 77


@pytest.fixture
def secret(tmp_path):
    """A file that is none of the reader's business, and the folder of one that is hostile."""
    (tmp_path / "secrets").mkdir()
    path = tmp_path / "secrets" / "secret.h5"
    with h5py.File(path, "w") as file:
        file["data"] = np.arange(ROWS)
    (tmp_path / "secrets" / "key").write_bytes(b"password" * ROWS)
    (tmp_path / "upload").mkdir()
    return path


def refused(path, kind=UnsafeFileError, **options):
    for workers in ("thread", "process"):
        with pytest.raises(kind) as caught:
            AsyncReader(
                hdf5_path=path, labels_field=None, device="cpu", workers=workers, **options
            ).close()
    return str(caught.value)


def hostile(secret, name):
    return secret.parents[1] / "upload" / f"{name}.h5"


@pytest.mark.parametrize("target", ["absolute", "dots"])
def test_cve_2026_1669_external_storage(secret, target):
    path = hostile(secret, "weights")
    name = str(secret.parent / "key") if target == "absolute" else "../secrets/key"
    with h5py.File(path, "w") as file:
        file.create_dataset("data", (ROWS,), "S8", external=[(name, 0, h5py.h5f.UNLIMITED)])
    assert "external" in refused(path)
    assert "key" in refused(path, allow_external=[path.parent])


@pytest.mark.slow
@pytest.mark.parametrize("via", ["data", "soft link", "group", "chain"])
def test_cve_2026_1669_external_links(secret, via):
    path = hostile(secret, "links")
    with h5py.File(path, "w") as file:
        outside = h5py.ExternalLink("../secrets/secret.h5", "/data")
        if via == "data":
            file["data"] = outside
        elif via == "soft link":
            file["x"], file["data"] = outside, h5py.SoftLink("/x")
        elif via == "group":
            file["group"] = h5py.ExternalLink("../secrets/secret.h5", "/")
            file["data"] = h5py.SoftLink("/group/data")
        else:
            with h5py.File(hostile(secret, "second"), "w") as second:
                second["data"] = outside
            file["data"] = h5py.ExternalLink("second.h5", "/data")
    assert "allow_external" in refused(path)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["absolute", "dots", "symbolic link", "nested"])
def test_cve_2026_12480_virtual_datasets(secret, how):
    path = hostile(secret, "virtual")
    name = {"absolute": str(secret), "dots": "../secrets/secret.h5"}.get(how, "inner.h5")
    if how == "symbolic link":
        os.symlink(secret, hostile(secret, "inner"))
    if how == "nested":
        layout = h5py.VirtualLayout((ROWS,), "i8")
        layout[:] = h5py.VirtualSource("../secrets/secret.h5", "data", (ROWS,))
        with h5py.File(hostile(secret, "inner"), "w") as file:
            file.create_virtual_dataset("data", layout)
    layout = h5py.VirtualLayout((ROWS,), "i8")
    layout[:] = h5py.VirtualSource(name, "data", (ROWS,))
    with h5py.File(path, "w") as file:
        file.create_virtual_dataset("data", layout)
    assert "secret.h5" in refused(path)


@pytest.mark.slow
def test_cve_2026_9335_one_behind_the_other(secret):
    """A soft link, to an external link, to a virtual dataset, of external storage."""
    upload = secret.parents[1] / "upload"
    with h5py.File(upload / "c.h5", "w") as file:
        key = [(str(secret.parent / "key"), 0, h5py.h5f.UNLIMITED)]
        file.create_dataset("data", (ROWS,), "i8", external=key)
    layout = h5py.VirtualLayout((ROWS,), "i8")
    layout[:] = h5py.VirtualSource("c.h5", "data", (ROWS,))
    with h5py.File(upload / "b.h5", "w") as file:
        file.create_virtual_dataset("data", layout)
    with h5py.File(upload / "a.h5", "w") as file:
        file["far"], file["data"] = h5py.ExternalLink("b.h5", "data"), h5py.SoftLink("far")
    assert "external" in refused(upload / "a.h5")


# --- bombs ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_cve_2026_0897_rows_that_take_all_memory(tmp_path):
    path = tmp_path / "bomb.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("data", (4, 1 << 40), "u1", chunks=(1, 1 << 20), compression="gzip")
    assert path.stat().st_size < 10_000
    text = refused(path, ConfigError)
    for part in (str(path), '"data"', "do not fit in memory", "half of the", "max_batch_bytes"):
        assert part in text


@pytest.mark.slow
def test_cve_2026_12570_a_chunk_that_takes_all_memory(tmp_path, monkeypatch):
    path = tmp_path / "bomb.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("data", (1 << 20, 64), "u1", chunks=(1 << 20, 64), compression="gzip")
    text = refused(path, ConfigError, max_batch_bytes=1 << 20)
    assert (
        "a chunk of shape (1048576, 64) decodes to 67,108,864 bytes, more than the 1,048,576"
        in text
    )
    monkeypatch.setattr(h5async.opening.limits, "free_memory_nbytes", lambda: 1 << 21)
    assert "half of the 2,097,152 that are free" in refused(path, ConfigError)


def test_the_limit_is_for_all_slots(tmp_path):
    path = tmp_path / "data.h5"
    with h5py.File(path, "w") as file:
        file["data"] = np.zeros((ROWS, 100), "u1")
    options = {"hdf5_path": path, "labels_field": None, "batch_size": 10, "prefetch": 3}
    AsyncReader(**options, max_batch_bytes=3000).close()
    with pytest.raises(ConfigError, match=r"take 3,000 bytes .* they may take 2,999"):
        AsyncReader(**options, max_batch_bytes=2999)
    assert 0 < h5async.opening.limits.free_memory_nbytes() < 1 << 50


@pytest.mark.parametrize(
    ("libver", "grows"), [("earliest", False), ("latest", False), ("latest", True)]
)
def test_more_chunks_than_the_file_can_list(tmp_path, libver, grows):
    path = tmp_path / "bomb.h5"
    with h5py.File(path, "w", libver=libver) as file:
        maxshape = (None, 1) if grows else None
        data = file.create_dataset("data", (1 << 31, 1), "u1", maxshape=maxshape, chunks=(1, 1))
        if grows:
            data[-1] = 1
    with AsyncReader(hdf5_path=path, labels_field=None, device="cpu", batch_size=2) as reader:
        if libver == "latest":  # an array, fixed or extensible, which HDF5 would go through
            reason = reader.layouts["data"].fallback_reason
            assert reason.startswith("2147483648 chunks, more than a file of")
        assert not reader.get_next_batch().data.any()


# --- an index that contradicts itself ------------------------------------------------------------


def chunked(path):
    """A version 1 B-tree of one node; return where its keys and children lie."""
    with h5py.File(path, "w", libver="earliest") as file:
        file.create_dataset("data", data=np.arange(ROWS * 4).reshape(ROWS, 4), chunks=(10, 4))
    content = path.read_bytes()
    at = content.find(b"TREE\x01")
    assert at > 0
    return at + 24, 8 + 3 * 8  # the first key, and a key's bytes; a child's address has 8


def put(path, at, data):
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


@pytest.mark.slow
def test_a_chunk_that_the_index_lists_and_does_not_find(tmp_path):
    path = tmp_path / "data.h5"
    begin, key = chunked(path)
    put(path, begin + 4 * (key + 8) + 8, bytes(8))  # the key behind the last chunk
    assert "the chunk index lists it, but HDF5 does not find it" in refused(path, ReadError)


def test_keys_that_are_not_in_order(tmp_path):
    path = tmp_path / "data.h5"
    begin, key = chunked(path)
    content = path.read_bytes()
    first, second = begin + 8, begin + key + 8 + 8
    put(path, first, content[second : second + 8])
    put(path, second, content[first : first + 8])
    with pytest.raises(H5AsyncError):
        AsyncReader(hdf5_path=path, labels_field=None, device="cpu")


@pytest.mark.slow
@pytest.mark.parametrize(("address", "what"), [(None, "another one"), (8, "the file's superblock")])
def test_chunks_that_lie_in_each_other(tmp_path, address, what):
    path = tmp_path / "data.h5"
    begin, key = chunked(path)
    content = path.read_bytes()
    first = struct.unpack_from("<Q", content, begin + key)[0]
    put(path, begin + 2 * key + 8, struct.pack("<Q", first + 16 if address is None else address))
    assert f"overlaps {what}" in refused(path, ReadError)


# --- what HDF5 answers with whatever its memory held --------------------------------------------


def shown(path):
    """What h5py itself delivers, to see that the file is one that it does not refuse."""
    with h5py.File(path) as file:
        return file["data"][...]


@pytest.mark.slow
@pytest.mark.parametrize("itemsize", [0, 4])
def test_parameters_that_state_another_length(tmp_path, itemsize):
    path = tmp_path / "data.h5"
    with h5py.File(path, "w", libver="earliest") as file:
        data = np.arange(ROWS * 4, dtype="u8").reshape(ROWS, 4)
        file.create_dataset("data", data=data, chunks=(10, 4), scaleoffset=0)
        parameters = file["data"].id.get_create_plist().get_filter(0)[2]
    assert parameters[2:5] == (40, 0, 8)  # elements, class, bytes of each
    packed = struct.pack("<20I", *parameters)
    content = path.read_bytes()
    assert content.count(packed) == 1
    put(path, content.find(packed) + 16, struct.pack("<I", itemsize))
    if not itemsize:
        assert shown(path).shape == (ROWS, 4)
    expected = (
        f"chunks have 320 bytes, but the client data of its filter scaleoffset say {itemsize * 40}"
    )
    assert expected in refused(path, ReadError)


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["no bytes", "another address"])
def test_chunks_that_only_hdf5_reads_are_looked_at_too(tmp_path, damage):
    """HDF5 does not ask whether n-bit has the bytes that it unpacks."""
    path = tmp_path / "data.h5"
    of_7_bits = h5py.h5t.STD_U8BE.copy()
    of_7_bits.set_precision(7)
    with h5py.File(path, "w", libver="earliest") as file:
        plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plist.set_chunk((8, 1000))
        plist.set_filter(h5py.h5z.FILTER_NBIT, 0)
        space = h5py.h5s.create_simple((ROWS, 1000))
        dataset = h5py.Dataset(h5py.h5d.create(file.id, b"data", of_7_bits, space, plist))
        dataset[...] = np.arange(ROWS * 1000).reshape(ROWS, 1000) % 128
    options = {"hdf5_path": path, "labels_field": None, "device": "cpu"}
    with AsyncReader(**options) as reader:
        assert "stored type differs" in reader.layouts["data"].fallback_reason
    begin = path.read_bytes().find(b"TREE\x01") + 24
    if damage == "no bytes":
        put(path, begin, bytes(4))
        assert shown(path).shape == (ROWS, 1000)
        assert "expected some bytes, got 0" in refused(path, ReadError)
    else:
        put(path, begin + 8 + 3 * 8 + 6, b"\1")
        assert "do not lie in the file" in refused(path, ReadError)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"chunks": (10, 3)}])
def test_a_fill_value_of_another_size(tmp_path, options):
    """HDF5 fills with what lies behind it in memory."""
    path = tmp_path / "data.h5"
    with h5py.File(path, "w", libver="earliest") as file:
        data = file.create_dataset("data", (ROWS, 3), "<i4", fillvalue=0x12345678, **options)
        if options:
            data[:10] = 5
    at = path.read_bytes().find(struct.pack("<Ii", 4, 0x12345678))
    assert at > 0
    with AsyncReader(hdf5_path=path, labels_field=None, batch_size=ROWS, device="cpu") as reader:
        assert reader.layouts["data"].fallback_reason is None
        assert reader.get_next_batch().data[-1].tolist() == [0x12345678] * 3
    put(path, at, struct.pack("<I", 1))
    assert shown(path).shape == (ROWS, 3)
    assert "its fill value has 1 bytes, but its elements have 4" in refused(path, ReadError)


# --- what HDF5 opens to tell a shape ------------------------------------------------------------


def unlimited(path, source):
    """A virtual dataset that grows with its source, or by numbered sources of ten rows."""
    forever = (h5py.h5s.UNLIMITED,)
    virtual = h5py.h5s.create_simple((10,), forever)
    if "%b" in source:
        virtual.select_hyperslab((0,), forever, (10,), (10,))
        mapped = h5py.h5s.create_simple((10,))
    else:
        virtual.select_hyperslab((0,), (1,), None, forever)
        mapped = h5py.h5s.create_simple((10,), forever)
        mapped.select_hyperslab((0,), (1,), None, forever)
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plist.set_virtual(virtual, source.encode(), b"data", mapped)
    with h5py.File(path, "w") as file:
        whole = h5py.h5s.create_simple((10,), forever)
        h5py.h5d.create(file.id, b"data", h5py.h5t.STD_I64LE, whole, plist)
        file["other"] = np.arange(5)


@pytest.mark.parametrize("field", ["data", "other", "nosuch"])
@pytest.mark.parametrize("source", ["outside", "numbered", "pipe", "device"])
def test_sources_are_looked_at_before_hdf5_opens_them(secret, source, field):
    with h5py.File(secret, "a") as file:
        del file["data"]
        file.create_dataset("data", data=np.arange(ROWS_OF_SECRET), maxshape=(None,), chunks=(7,))
    path = hostile(secret, "grows")
    name = {"outside": str(secret), "device": "/dev/zero"}.get(source, source)
    if source == "pipe":
        os.mkfifo(path.with_name("pipe"))
    if source == "numbered":
        name = "part%b.h5"
        with h5py.File(path.with_name("part0.h5"), "w") as file:
            file["data"] = np.arange(10)
        path.with_name("part1.h5").symlink_to(secret)
    unlimited(path, name)
    options = {"hdf5_path": path, "data_field": field, "labels_field": None, "device": "cpu"}
    if field == "other":
        with AsyncReader(**options) as reader:
            assert reader.num_samples == 5
        return
    expected = {"data": (UnsafeFileError, ReadError), "nosuch": DatasetError}[field]
    with pytest.raises(expected) as caught:
        AsyncReader(**options)
    assert f"({ROWS_OF_SECRET}," not in str(caught.value)


def only_hdf5_reads(path, kind):
    """Write a chunk of eight rows that h5async cannot decode; return what is stored of it."""
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plist.set_chunk((8, 512))
    stored = h5py.h5t.STD_U16LE
    if kind.startswith("szip"):
        plist.set_szip(h5py.h5z.SZIP_NN_OPTION_MASK, 4)
    else:
        plist.set_filter(h5py.h5z.FILTER_NBIT, 0)
        number = h5py.h5t.STD_U16LE.copy()
        number.set_precision(12)
        stored = h5py.h5t.create(h5py.h5t.COMPOUND, 10)
        stored.insert(b"a", 0, number)
        stored.insert(b"b", 2, h5py.h5t.array_create(number, (3,)))
        stored.insert(b"c", 8, h5py.h5t.STD_U16LE)
    if kind.endswith("deflate"):
        plist.set_deflate(4)
    with h5py.File(path, "w") as file:
        space = h5py.h5s.create_simple((8, 512))
        dataset = h5py.Dataset(h5py.h5d.create(file.id, b"data", stored, space, plist))
        values = np.arange(8 * 512).reshape(8, 512) % 7
        if dataset.dtype.fields:
            whole = np.zeros((8, 512), dataset.dtype)
            whole["a"] = whole["c"] = values
            values = whole
        dataset[...] = values
        return dataset.id.read_direct_chunk((0, 0))[1]


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["thread", "process"])
@pytest.mark.parametrize("kind", ["szip", "nbit", "szip, deflate", "nbit, deflate"])
def test_chunks_that_only_hdf5_decodes_have_their_length(tmp_path, kind, workers):
    path = tmp_path / "data.h5"
    encoded = only_hdf5_reads(path, kind)
    options = {"hdf5_path": path, "labels_field": None, "device": "cpu", "workers": workers}
    with AsyncReader(**options, batch_size=8) as reader:
        assert reader.layouts["data"].fallback_reason or kind.startswith("szip")
        assert np.array_equal(reader.get_next_batch().data, shown(path))
    if kind.endswith("deflate"):
        encoded = zlib.decompress(encoded)
    if kind.startswith("szip"):
        assert int.from_bytes(encoded[:4], "little") == 8 * 512 * 2
        short = (16).to_bytes(4, "little") + encoded[4:]
    else:
        assert len(encoded) in (8 * 512 * 8, 8 * 512 * 8 + 1)  # 64 bits each
        short = bytes(8 * 512 * 8 - 1)
    with h5py.File(path, "a") as file:
        short = zlib.compress(short) if kind.endswith("deflate") else short
        file["data"].id.write_direct_chunk((0, 0), short, 0)
    assert shown(path).shape == (8, 512)
    with AsyncReader(**options, batch_size=8) as reader:
        with pytest.raises(
            ReadError, match=r"expected (at most )?\d+ bytes, got|bytes are stored, \d+ are due"
        ):
            reader.get_next_batch()
