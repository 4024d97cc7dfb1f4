"""What is said of a file that HDF5 does not open: in our words, with what to do."""

from __future__ import annotations

import ctypes
import gzip
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import h5py
import numpy as np
import pytest

from h5async import AsyncReader, ReadError
from h5async.index.hdf5 import hdf5_function


def message(path: Path) -> str:
    with pytest.raises(ReadError) as caught:
        AsyncReader(hdf5_path=path, labels_field=None, device="cpu", num_threads=0)
    text = str(caught.value)
    assert text.startswith(f"cannot open {path}: ")
    return text.removeprefix(f"cannot open {path}: ")


def write(path: Path, **options: object) -> None:
    with h5py.File(path, "w", **options) as file:
        file["data"] = np.arange(10_000)


@pytest.mark.parametrize("libver", ["earliest", "v108", "latest"])
@pytest.mark.parametrize("user_block", [0, 512, 4096])
@pytest.mark.parametrize("left", [0.3, 0.99])
def test_cut_short(tmp_path, libver, user_block, left):
    path = tmp_path / "a.h5"
    write(path, libver=libver, userblock_size=user_block)
    whole = path.stat().st_size
    size = int(whole * left)
    os.truncate(path, size)
    assert message(path).startswith(f"it is cut short: {size:,} of {whole:,} bytes are there")


def test_the_superblock_of_version_1_which_other_chunk_b_trees_have(tmp_path):
    path = tmp_path / "a.h5"
    plist = h5py.h5p.create(h5py.h5p.FILE_CREATE)
    assert hdf5_function("H5Pset_istore_k", ctypes.c_uint)(plist.id, 64) >= 0
    access = h5py.h5p.create(h5py.h5p.FILE_ACCESS)
    access.set_libver_bounds(h5py.h5f.LIBVER_EARLIEST, h5py.h5f.LIBVER_LATEST)
    file = h5py.File(h5py.h5f.create(bytes(path), fcpl=plist, fapl=access))
    file["data"] = np.arange(1000)
    file.close()
    assert path.read_bytes()[8] == 1
    whole = path.stat().st_size
    os.truncate(path, whole - 1)
    assert f"{whole - 1:,} of {whole:,} bytes" in message(path)


@pytest.mark.parametrize("nbytes", [3, 8, 9, 30])
def test_only_the_beginning_is_there(tmp_path, nbytes):
    path = tmp_path / "a.h5"
    write(path)
    os.truncate(path, nbytes)
    assert message(path) == f"it is cut short: only {nbytes} bytes are there"


CONTENTS = {
    "Git LFS": b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n",
    "gzip": gzip.compress(b"x" * 100),
    "netCDF-3": b"CDF\x01" + bytes(100),
    "nccopy": b"CDF\x02" + bytes(100),
    "HDF4": b"\x0e\x03\x13\x01" + bytes(100),
    "tar archive": b"name".ljust(257, b"\0") + b"ustar" + bytes(600),
    "web page": b"<!doctype html><html>404</html>",
    "it begins with b'no HDF5 at all, '": b"no HDF5 at all, but text",
    "it begins with b'PK'": b"PK",
    "all zero": bytes(5000),
    "it is empty": b"",
    ".npy": b"\x93NUMPY\x01\x00" + bytes(100),
}


@pytest.mark.parametrize("words", CONTENTS)
def test_what_is_no_hdf5_file(tmp_path, words):
    path = tmp_path / "a.h5"
    path.write_bytes(CONTENTS[words])
    assert words in message(path)
    assert "signature not found" not in message(path)


def test_archives_and_zarr(tmp_path):
    path = tmp_path / "a.h5"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x", b"x")
    assert "a zip archive" in message(path)
    folder = tmp_path / "b.zarr"
    folder.mkdir()
    assert message(folder) == "it is a directory; name a file"
    (folder / "zarr.json").write_text("{}")
    assert "a Zarr directory" in message(folder)


WRITE = """
import sys, h5py
file = h5py.File(sys.argv[1], "w", libver="latest", locking=True)
file["data"] = range(10)
file.flush()
print("open", flush=True)
sys.stdin.read()
"""


def test_locked_by_a_writer(tmp_path, monkeypatch):
    monkeypatch.delenv("HDF5_USE_FILE_LOCKING", raising=False)
    path = tmp_path / "a.h5"
    command = [sys.executable, "-c", WRITE, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as writer:
        assert writer.stdout.readline() == b"open\n"
        found = message(path)
        writer.communicate(timeout=60)
    assert found.startswith("it is locked by a writer: another process has it open for writing")
    assert "HDF5_USE_FILE_LOCKING" in found
    AsyncReader(hdf5_path=path, labels_field=None, device="cpu", num_threads=0).close()


AS_NOBODY = """
import os, sys
from h5async import AsyncReader, ReadError
try:
    AsyncReader(hdf5_path="/there/is/none.h5", device="cpu")  # what is loaded late, is now
except ReadError:
    pass
os.setgid(65534)
os.setuid(65534)
try:
    AsyncReader(hdf5_path=sys.argv[1], labels_field=None, num_threads=0, index_cache=False)
except ReadError as error:
    print(error)
"""


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_a_file_that_may_not_be_read(tmp_path):
    path = tmp_path / "a.h5"
    write(path)
    path.chmod(0)
    for folder in (tmp_path, *list(tmp_path.parents)[:2]):
        folder.chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-c", AS_NOBODY, path], capture_output=True, text=True, timeout=60
    )
    assert done.stdout == f"cannot open {path}: Permission denied\n", done.stderr
