"""File systems with all that a mount may be called, and others mounted in their place."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest

from h5async.io import source as localfiles

NAMES = {
    "not UTF-8": b"\xff\xfe",
    "a space": b"a b",
    "a line's end": b"a\nb",
    "a tab": b"a\tb",
    "a backslash": rb"a\b",
    "what looks like an escape": rb"a\040b\xff\u00e9",
    "not ASCII": "größe-\u96ea".encode(),
}

# Mounts are seen by nobody else: the process has a table of mounts of its own.
MOUNT = ["unshare", "--mount", "--propagation", "private"]

BEGIN = """
import os, subprocess, sys
from pathlib import Path
import h5py, numpy as np
from h5async import AsyncReader
from h5async.io.source import can_map, may_map

place, plain = map(os.fsencode, sys.argv[1:])

def mount(kind, at=place):
    subprocess.run(["mount", "-t", kind, "none", at], check=True)

def is_mapped(path, io="auto"):
    return may_map(os.fsdecode(path), io)

def write(path):
    data = np.arange(1000.0)
    with open(path, "wb") as target, h5py.File(target, "w") as file:
        file["data"] = data
    return data

def check_reader(path, data):
    with AsyncReader(
        hdf5_path=os.fsdecode(path), labels_field=None, batch_size=1000, device="cpu"
    ) as reader:
        assert np.array_equal(next(iter(reader)).data, data)
"""


@functools.cache
def can_mount() -> bool:
    """Tell whether this user may mount file systems."""
    try:
        return not subprocess.run([*MOUNT, "mount", "-t", "tmpfs", "none", "/mnt"]).returncode
    except FileNotFoundError:
        return False


def run(body: str, place: bytes, plain: Path) -> None:
    if not can_mount():
        pytest.skip("nothing can be mounted here")
    command = [*MOUNT, sys.executable, "-c", BEGIN + body, place, os.fsencode(plain)]
    done = subprocess.run(command, capture_output=True, timeout=100)
    assert done.returncode == 0, done.stderr.decode(errors="replace")


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    path = tmp_path / "plain.h5"
    with h5py.File(path, "w") as file:
        file["data"] = np.arange(10.0)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES.values(), ids=list(NAMES))
def test_a_mount_of_any_name(tmp_path: Path, plain: Path, name: bytes) -> None:
    """Files in it, files that have nothing to do with it, and a type that is not to be mapped."""
    body = """
before = is_mapped(plain)
mount("tmpfs")
path = place + b"/data.h5"
data = write(path)
assert is_mapped(path)
assert is_mapped(plain) == before
check_reader(plain, np.arange(10.0))
check_reader(path, data)
mount("devpts")  # over the first one, which is taken for a disk where the name is not understood
assert not can_map(os.fsdecode(place + b"/ptmx"))
assert not can_map(os.fsdecode(place))
"""
    place = os.fsencode(tmp_path) + b"/" + name
    os.mkdir(place)
    run(body, place, plain)


@pytest.mark.slow
def test_what_was_mounted_before_does_not_count(tmp_path: Path, plain: Path) -> None:
    """Device numbers that come free are given to the next mounts."""
    body = """
seen = {"tmpfs": set(), "devpts": set()}
for turn in range(200):
    kind = ("tmpfs", "devpts")[turn % 2]
    mount(kind)
    seen[kind].add(os.stat(place).st_dev)
    assert can_map(os.fsdecode(place)) == (kind == "tmpfs")
    subprocess.run(["umount", place], check=True)
    if turn > 8 and seen["tmpfs"] & seen["devpts"]:
        break
else:
    raise AssertionError("no number came back: the test shows nothing")
"""
    place = tmp_path / "place"
    place.mkdir()
    run(body, os.fsencode(place), plain)


@pytest.mark.slow
def test_bind_mounts_and_links_lead_to_the_file_itself(tmp_path: Path, plain: Path) -> None:
    body = """
mount("tmpfs")
data = write(place + b"/data.h5")
others = [os.path.join(os.path.dirname(place), name) for name in (b"bound", b"bound.h5", b"link")]
os.mkdir(others[0])
open(others[1], "wb").close()
subprocess.run(["mount", "--bind", place, others[0]], check=True)
subprocess.run(["mount", "--bind", place + b"/data.h5", others[1]], check=True)
os.symlink(place, others[2])
for path in (others[0] + b"/data.h5", others[1], others[2] + b"/data.h5"):
    assert is_mapped(path)
    check_reader(path, data)
null = os.path.join(os.path.dirname(place), b"proc")
open(null, "wb").close()
subprocess.run(["mount", "--bind", "/proc/version", null], check=True)
assert not can_map(os.fsdecode(null))
"""
    place = tmp_path / "place"
    place.mkdir()
    run(body, os.fsencode(place), plain)


@pytest.mark.slow
def test_the_descriptor_counts_where_the_path_leads_elsewhere(tmp_path: Path, plain: Path) -> None:
    """A file system that is mounted over an open file is none of the file's."""
    body = """
mount("tmpfs")
write(place + b"/ptmx")
with open(place + b"/ptmx", "rb") as file:
    mount("devpts")
    assert can_map(file.fileno())
    assert not can_map(os.fsdecode(place + b"/ptmx"))
    subprocess.run(["umount", "--lazy", place], check=True)
    subprocess.run(["umount", "--lazy", place], check=True)  # in no table of mounts any longer
    assert can_map(file.fileno())
"""
    place = tmp_path / "place"
    place.mkdir()
    run(body, os.fsencode(place), plain)


FUSE = """
import ctypes, errno, struct

ATTRIBUTES = struct.Struct("=6Q10I")  # inode, size, blocks, times; nanoseconds, mode, links, ...

def attributes(node, size):
    mode = 0o40755 if node == 1 else 0o100644
    return ATTRIBUTES.pack(node, size, 0, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0)

def serve(device, content):
    sizes = {1: 0, 2: len(content)}
    while True:
        try:
            request = os.read(device, 1 << 20)
        except OSError as error:
            if error.errno == errno.ENODEV:  # it was unmounted
                return
            raise
        _, code, unique, node = struct.unpack_from("=IIQQ", request)
        body, failure, answer = request[40:], 0, b""
        if code == 26:  # INIT
            answer = struct.pack("=4I2H2I36x", 7, 31, 1 << 16, 0, 8, 8, 1 << 16, 1)
        elif code == 17:  # STATFS
            answer = struct.pack("=5Q10I", 100, 50, 50, 10, 5, 4096, 255, 4096, *[0] * 7)
        elif code == 1 and body == b"data.h5\\0":  # LOOKUP
            answer = struct.pack("=4Q2I", 2, 0, 60, 60, 0, 0) + attributes(2, sizes[2])
        elif code == 3:  # GETATTR
            answer = struct.pack("=QII", 60, 0, 0) + attributes(node, sizes[node])
        elif code == 14:  # OPEN
            answer = struct.pack("=QII", 1, 0, 0)
        elif code == 15:  # READ
            _, offset, size = struct.unpack_from("=QQI", body)
            answer = content[offset : offset + size]
        elif code in (2, 42):  # FORGET, which nobody answers
            continue
        elif code not in (18, 25):  # RELEASE, FLUSH
            failure = errno.ENOENT if code == 1 else errno.ENOSYS
        os.write(device, struct.pack("=IiQ", 16 + len(answer), -failure, unique) + answer)

content = Path(os.fsdecode(plain)).read_bytes()
device = os.open("/dev/fuse", os.O_RDWR)
options = f"fd={device},rootmode=40000,user_id=0,group_id=0".encode()
libc = ctypes.CDLL(None, use_errno=True)
assert not libc.mount(b"fuse", place, b"fuse", 0, options), os.strerror(ctypes.get_errno())
if not os.fork():
    serve(device, content)
    os._exit(0)
os.close(device)
path = place + b"/data.h5"
try:
    assert not is_mapped(path)
    assert is_mapped(path, "map")
    assert not is_mapped(path, "pread")
    assert is_mapped(plain) == can_map(os.fsdecode(plain))
    check_reader(path, np.arange(10.0))
finally:
    subprocess.run(["umount", "--lazy", place], check=True)
"""


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/dev/fuse"), reason="the system has no FUSE")
@pytest.mark.parametrize("name", ["plain", "größe", "a b"])
def test_a_file_that_a_program_serves(tmp_path: Path, plain: Path, name: str) -> None:
    """FUSE: where that program fails, a map is a signal."""
    place = tmp_path / name
    place.mkdir()
    run(FUSE, os.fsencode(place), plain)


@pytest.mark.slow
def test_without_proc(tmp_path: Path, plain: Path) -> None:
    """In a container that mounts none, files are mapped as elsewhere."""
    body = """
before = is_mapped(plain)
mount("tmpfs", b"/proc")
assert is_mapped(plain) == before
check_reader(plain, np.arange(10.0))
"""
    run(body, os.fsencode(tmp_path), plain)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell types so")
def test_files_that_are_none_of_a_disk() -> None:
    assert not localfiles.can_map("/proc/version")
    assert not localfiles.can_map("/nowhere/at/all")
    assert not localfiles.can_map(-1)
    with open("/proc/version") as file:
        assert not localfiles.can_map(file.fileno())


def test_nothing_is_mapped_where_types_are_not_told(
    plain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    localfiles._statfs.cache_clear()
    try:
        assert not localfiles.may_map(str(plain), "auto")
    finally:
        localfiles._statfs.cache_clear()
