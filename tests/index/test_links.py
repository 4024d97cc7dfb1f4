"""Links and external storage: equal to h5py where permitted, an error where not, and no hang."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from cases import each
from conftest import assert_reads_like_h5py, assert_same_bits, poison, truth
from h5py import h5l, h5p
from hdf5files import type_for_h5py

from h5async import AsyncReader, DatasetError, H5AsyncError, ReadError, UnsafeFileError
from h5async.index import links

VALUES = np.arange(60, dtype="<i4").reshape(10, 6) * 7919
GZIP = {"chunks": (4, 4), "compression": "gzip"}


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """Return a directory beside which others may lie."""
    (tmp_path / "here").mkdir()
    return tmp_path / "here"


def read_all(path: Path, name: str = "data", **options: Any) -> np.ndarray:
    with AsyncReader(
        hdf5_path=path,
        data_field=name,
        labels_field=None,
        device="cpu",
        **{"num_threads": 0, "batch_size": 4, **options},
    ) as reader:
        poison(reader)
        return np.concatenate([batch.data.copy() for batch in reader])


def write(path: Path, name: str = "data", **how: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "a") as file:
        file.create_dataset(name, data=VALUES, **how)
    return path


def link(path: Path, **links: Any) -> Path:
    with h5py.File(path, "a") as file:
        for name, target in links.items():
            file[name] = target
    return path


def external(file: str | Path, path: str = "/data") -> h5py.ExternalLink:
    return h5py.ExternalLink(str(file), path)


# --- links within a file -------------------------------------------------------------------------


@each("how", [{}, GZIP])
@pytest.mark.parametrize("kind", ["hard", "soft", "relative", "external"])
@each("place", [0, 1, 2, 3])
def test_link_at_each_component(here, place, kind, how):
    """One of a/b/c/data is a link."""
    parts = ["a", "b", "c", "data"]
    target = "/".join(["", "true", *parts[: place + 1]])
    name = "/".join(parts)
    with h5py.File(here / "f.h5", "w") as file:
        other = file if kind != "external" else h5py.File(here / "other.h5", "w")
        other.create_dataset("/".join(["true", *parts]), data=VALUES, **how)
        above = file.require_group("/".join(["/", *parts[:place]]))
        if kind == "hard":
            above[parts[place]] = file[target]
        elif kind == "soft":
            above[parts[place]] = h5py.SoftLink(target)
        elif kind == "relative":
            above["near"] = file[target]
            above[parts[place]] = h5py.SoftLink("./near")
        else:
            above[parts[place]] = external("other.h5", target)
            other.close()
    assert_reads_like_h5py(here / "f.h5", name, num_threads=2)
    assert_reads_like_h5py(here / "f.h5", f"//{name}/", num_dim=1)


def test_chain_of_links_of_all_kinds(here):
    write(here / "c.h5", "deep/er/data", **GZIP)
    link(here / "c.h5", hard=h5py.SoftLink("/deep/er"), group=h5py.SoftLink("hard"))
    link(here / "b.h5", far=external("c.h5", "/group"), again=h5py.SoftLink("/far"))
    link(here / "b.h5", last=h5py.SoftLink("again/data"))
    link(here / "a.h5", data=external("b.h5", "last"), group=external("b.h5", "/"))
    link(here / "a.h5", twice=h5py.SoftLink("group/last"))
    for name in ("data", "group/last", "group/again/data", "twice"):
        assert_reads_like_h5py(here / "a.h5", name)


def test_relative_soft_link_begins_at_its_own_group(here):
    write(here / "f.h5", "x/data")
    with h5py.File(here / "f.h5", "r+") as file:
        file["data"] = -VALUES
        file["x/link"] = h5py.SoftLink("data")
        file["way"] = h5py.SoftLink("x")
        file["link"] = h5py.SoftLink("data")
    for name in ("x/link", "way/link", "link", "./way/./link"):
        assert_reads_like_h5py(here / "f.h5", name)


def test_external_link_begins_at_the_root_of_the_other_file(here):
    write(here / "other.h5")
    with h5py.File(here / "f.h5", "w") as file:
        file["x/data"] = -VALUES
        file["x/link"] = external("other.h5", "data")
    assert_reads_like_h5py(here / "f.h5", "x/link")


@pytest.mark.parametrize("length", [1, 2, 8, 14])
def test_chain_of_soft_links(here, length):
    write(here / "f.h5", "0")
    link(here / "f.h5", **{str(n): h5py.SoftLink(str(n - 1)) for n in range(1, length + 1)})
    assert_reads_like_h5py(here / "f.h5", str(length))


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "links",
    [
        {"data": "data"},
        {"data": "/other", "other": "/data"},
        {"data": "x", "x": "y", "y": "z", "z": "data"},
        {"data": "data/data"},
        {"data": "./data/x/y"},
        {"data": "x/x", "x": "data/data"},
    ],
    ids=str,
)
def test_loop_of_soft_links_is_an_error(here, links):
    link(here / "f.h5", **{name: h5py.SoftLink(target) for name, target in links.items()})
    for name in ("data", "data/x"):
        with pytest.raises(DatasetError, match=r"f\.h5"):
            read_all(here / "f.h5", name)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("length", [1, 2, 3])
def test_loop_of_external_links_is_an_error(here, length):
    for number in range(length):
        link(here / f"{number}.h5", data=external(f"{(number + 1) % length}.h5"))
    with pytest.raises(H5AsyncError, match=r"\.h5.*links"):
        read_all(here / "0.h5")


@pytest.mark.timeout(120)
def test_loop_of_hard_links_is_no_trap(here):
    with h5py.File(here / "f.h5", "w") as file:
        group = file.create_group("g")
        group["again"] = group
        group["data"] = VALUES
    assert_reads_like_h5py(here / "f.h5", "g/again/again/again/data")
    with pytest.raises(DatasetError, match="there is no dataset"):
        read_all(here / "f.h5", "g/again/nothing")


@pytest.mark.parametrize(
    "target",
    [h5py.SoftLink("/nowhere"), h5py.SoftLink("x"), external("gone.h5"), external("o.h5", "x")],
)
def test_dangling_link_is_an_error_that_names_it(here, target):
    write(here / "o.h5")
    link(here / "f.h5", data=target)
    for name in ("data", "data/more"):
        with pytest.raises(DatasetError) as caught:
            read_all(here / "f.h5", name)
        assert "f.h5" in str(caught.value)
        assert '"data' in str(caught.value)


def test_link_to_a_group_is_no_dataset(here):
    write(here / "o.h5", "group/data")
    link(here / "f.h5", data=external("o.h5", "/group"))
    with pytest.raises(DatasetError, match="group"):
        read_all(here / "f.h5")


def test_path_through_a_dataset_that_is_no_compound_is_an_error(here):
    write(here / "o.h5")
    link(here / "f.h5", link=external("o.h5"))
    for path, name in ((here / "o.h5", "data/x"), (here / "f.h5", "link/x/y")):
        with pytest.raises(DatasetError, match="compound"):
            read_all(path, name)


def test_link_of_a_kind_that_the_user_defined_is_an_error(here):
    """No class is registered for it: HDF5 cannot follow it either."""
    path = write(here / "f.h5")
    link(path, far=external("far.h5", "/x"))
    raw = path.read_bytes()
    assert raw.count(b"far.h5\0/x\0") == 1
    path.write_bytes(raw.replace(b"far.h5\0/x\0", b"far.h5//x\0"))
    with pytest.raises(H5AsyncError):
        read_all(path, "far")
    assert_same_bits(read_all(path), VALUES)


def test_two_fields_may_lie_in_two_linked_files(here):
    write(here / "a.h5", **GZIP)
    with h5py.File(here / "b.h5", "w") as file:
        file["y"] = np.arange(10)
    link(here / "f.h5", data=external("a.h5"), labels=external("b.h5", "y"))
    for num_threads in (0, 2):
        with AsyncReader(
            hdf5_path=here / "f.h5", device="cpu", shuffle="full", num_threads=num_threads
        ) as reader:
            for data, labels in reader:
                assert_same_bits(data, VALUES[labels])
            assert reader.fallback_reads == 0


def test_names_that_look_like_paths(here):
    """HDF5 knows "." but not ".."."""
    with h5py.File(here / "f.h5", "w") as file:
        file["../data"] = VALUES
        file["a/.../b"] = VALUES[::-1]
        file["a/ "] = VALUES + 1
        file["a/link"] = h5py.SoftLink("../data")
        file["a/../data"] = VALUES + 2
    for name in ("../data", "a/.../b", "./a/./.../b", "a/ ", "a/link", "a/../data", "/../data"):
        assert_reads_like_h5py(here / "f.h5", name)


# --- what a link may reach -----------------------------------------------------------------------


def outside(here: Path, how: str) -> str:
    """Write a file outside `here`; return a name that leads to it from there."""
    elsewhere = here.parent / "elsewhere"
    write(elsewhere / "secret.h5")
    if how == "absolute":
        return str(elsewhere / "secret.h5")
    if how == "dots":
        return "../elsewhere/secret.h5"
    if how == "dots behind a folder":
        (here / "inner").mkdir()
        return "inner/../../elsewhere/secret.h5"
    if how == "absolute with dots":
        return f"{here}/../elsewhere/secret.h5"
    if how == "linked file":
        (here / "near.h5").symlink_to(elsewhere / "secret.h5")
        return "near.h5"
    assert how == "linked folder"
    (here / "near").symlink_to("../elsewhere")
    return "near/secret.h5"


WAYS_OUT = [
    "absolute",
    "dots",
    "dots behind a folder",
    "absolute with dots",
    "linked file",
    "linked folder",
]


@pytest.mark.parametrize("how", WAYS_OUT)
@pytest.mark.parametrize("name", ["data", "group/data"])
def test_external_link_outside_is_refused_or_permitted_by_root(here, how, name):
    target = outside(here, how)
    link(here / "f.h5", data=external(target), group=external(target, "/"))
    for allowed in ((), here, [here.parent / "else"], [here / "elsewhere"]):
        with pytest.raises(UnsafeFileError, match=r"secret\.h5"):
            read_all(here / "f.h5", name, allow_external=allowed)
    for allowed in ([here.parent / "elsewhere"], [here, here.parent], "/"):
        found = read_all(here / "f.h5", name, allow_external=allowed)
        assert_same_bits(found, truth(here / "f.h5", name))


def test_root_may_be_a_symbolic_link_or_relative(here, monkeypatch):
    link(here / "f.h5", data=external(outside(here, "dots")))
    (here.parent / "root").symlink_to("elsewhere")
    assert_same_bits(read_all(here / "f.h5", allow_external=here.parent / "root"), VALUES)
    monkeypatch.chdir(here.parent)
    assert_same_bits(read_all(here / "f.h5", allow_external=["elsewhere"]), VALUES)
    file_as_root = here.parent / "elsewhere" / "secret.h5"
    assert_same_bits(read_all(here / "f.h5", allow_external=[file_as_root]), VALUES)


def test_directory_whose_name_begins_alike_is_not_beside(here):
    write(here.parent / "here too" / "o.h5")
    link(here / "f.h5", data=external("../here too/o.h5"))
    with pytest.raises(UnsafeFileError):
        read_all(here / "f.h5")


def test_link_of_a_linked_file_is_judged_from_where_that_lies(here):
    write(here / "x.h5")
    write(here / "below" / "o.h5")
    link(here / "below" / "near.h5", data=external("o.h5"))
    link(here / "below" / "far.h5", data=external("../x.h5"))
    link(here / "f.h5", near=external("below/near.h5"), far=external("below/far.h5"))
    assert_reads_like_h5py(here / "f.h5", "near")
    with pytest.raises(UnsafeFileError, match=r"x\.h5"):
        read_all(here / "f.h5", "far")


def test_file_opened_through_a_symbolic_link(here):
    """Beside the link is looked first, then beside the file itself."""
    write(here / "o.h5")
    link(here / "f.h5", data=external("o.h5"))
    entry = here.parent / "entry"
    entry.mkdir()
    (entry / "f.h5").symlink_to(here / "f.h5")
    assert_reads_like_h5py(entry / "f.h5")
    with h5py.File(entry / "o.h5", "w") as file:
        file["data"] = -VALUES
    assert_reads_like_h5py(entry / "f.h5")
    (here.parent / "folder").symlink_to(here)
    assert_reads_like_h5py(here.parent / "folder" / "f.h5")


@pytest.mark.parametrize("target", ["o.h5", "./o.h5", "below/../o.h5", "below/o.h5"])
def test_external_link_beside_the_file_is_direct(here, target):
    (here / "below").mkdir()
    write(here / target)
    link(here / "f.h5", data=external(target))
    assert_reads_like_h5py(here / "f.h5", num_threads=2)


def test_absolute_name_beside_the_file_is_direct(here):
    write(here / "o.h5")
    link(here / "f.h5", data=external(here / "o.h5"))
    assert_reads_like_h5py(here / "f.h5")


def test_absolute_name_that_is_gone_is_sought_beside_the_file(here):
    """As HDF5 does: files that were moved together are found."""
    write(here / "o.h5")
    link(here / "f.h5", data=external(here / "gone" / "o.h5"))
    assert_reads_like_h5py(here / "f.h5")


def test_decoy_in_the_current_directory_is_never_read(here, monkeypatch):
    decoys = here.parent / "decoys"
    with h5py.File(write(decoys / "o.h5"), "r+") as file:
        file["data"][...] = 66
    monkeypatch.chdir(decoys)
    link(here / "f.h5", data=external("o.h5"))
    with pytest.raises(DatasetError, match=r"o\.h5"):
        read_all(here / "f.h5")
    write(here / "o.h5")
    assert_same_bits(read_all(here / "f.h5"), VALUES)


def test_prefix_of_the_environment_is_tried_first_and_has_to_be_permitted(here, monkeypatch):
    write(here.parent / "elsewhere" / "o.h5")
    with h5py.File(here / "o.h5", "w") as file:
        file["data"] = -VALUES
    link(here / "f.h5", data=external("o.h5"))
    monkeypatch.setenv("HDF5_EXT_PREFIX", str(here.parent / "elsewhere"))
    with pytest.raises(UnsafeFileError):
        read_all(here / "f.h5")
    found = read_all(here / "f.h5", allow_external=here.parent)
    assert_same_bits(found, truth(here / "f.h5"))
    assert_same_bits(found, VALUES)


def test_prefix_that_a_link_was_made_with_is_nothing_to_a_reader(here):
    write(here / "o.h5")
    with h5py.File(here / "f.h5", "w") as file:
        access = h5p.create(h5p.LINK_ACCESS)
        access.set_elink_prefix(str(here.parent).encode())
        file.id.links.create_external(b"data", b"o.h5", b"/data", None, access)
    assert_same_bits(read_all(here / "f.h5"), VALUES)
    with h5py.File(here / "f.h5") as file:
        assert file.id.links.get_info(b"data").type == h5l.TYPE_EXTERNAL


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ["data", "group/data"])
def test_pipe_as_a_target_does_not_hang(here, name):
    os.mkfifo(here / "pipe.h5")
    link(here / "f.h5", data=external("pipe.h5"), group=external("pipe.h5", "/"))
    with pytest.raises(ReadError, match=r"pipe\.h5"):
        read_all(here / "f.h5", name)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("allowed", [(), "/"])
@pytest.mark.parametrize("target", ["/dev/zero", "/dev/stdin", "/proc/self/mem", "/dev/tty"])
def test_device_as_a_target_does_not_hang(here, target, allowed):
    link(here / "f.h5", data=external(target))
    with pytest.raises(ReadError if allowed and Path(target).exists() else H5AsyncError):
        read_all(here / "f.h5", allow_external=allowed)


def test_directory_or_other_file_as_a_target_is_an_error(here):
    (here / "folder.h5").mkdir()
    (here / "text.h5").write_text("no HDF5")
    link(here / "f.h5", folder=external("folder.h5"), text=external("text.h5"))
    for name in ("folder", "text"):
        with pytest.raises(ReadError, match=rf"{name}\.h5"):
            read_all(here / "f.h5", name)


def test_symbolic_links_in_a_loop_are_an_error(here):
    (here / "a.h5").symlink_to("b.h5")
    (here / "b.h5").symlink_to("a.h5")
    link(here / "f.h5", data=external("a.h5"))
    with pytest.raises(H5AsyncError):
        read_all(here / "f.h5")


def test_linked_file_that_h5py_reads_equals_it(here):
    """The dataset is read through h5py, which has to open the file it lies in."""
    with h5py.File(here / "o.h5", "w") as file:
        file.create_dataset("x", data=np.arange(4), dtype=type_for_h5py())
    link(here / "f.h5", data=external("o.h5", "/x"))
    assert_reads_like_h5py(here / "f.h5", fallback="type")


# --- external storage ----------------------------------------------------------------------------


def write_external(
    path: Path, *cuts: int, offset: int = 0, folder: Path | None = None, names: str = "full"
) -> Path:
    """Store the values in files that are cut after some bytes."""
    folder = folder or path.parent
    content = VALUES.tobytes()
    bounds = [0, *cuts, len(content)]
    segments = []
    for number in range(len(bounds) - 1):
        piece = content[bounds[number] : bounds[number + 1]]
        raw = folder / f"part{number}.raw"
        raw.write_bytes(b"\xa5" * offset + piece)
        segments.append((raw.name if names == "short" else str(raw), offset, len(piece)))
    with h5py.File(path, "w") as file:
        file.create_dataset("data", VALUES.shape, VALUES.dtype, external=segments)
    return path


ROW = 24
CUTS = {
    "one segment": (),
    "rows": (ROW, 3 * ROW, 9 * ROW),
    "split rows": (10, 3 * ROW, 3 * ROW + 1),
    "split numbers": (ROW + 2, 100),
}


@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS)
@pytest.mark.parametrize("allowed", ["nothing", "another root"])
def test_external_storage_is_refused_even_beside_the_file(here, cuts, allowed):
    (here / "root").mkdir()
    write_external(here / "f.h5", *cuts)
    roots = () if allowed == "nothing" else [here / "root"]
    with pytest.raises(UnsafeFileError) as caught:
        read_all(here / "f.h5", allow_external=roots)
    for part in ("f.h5", '"data"', "part0.raw", "allow_external"):
        assert part in str(caught.value)


@each("num_threads", [0, 2])
@each("num_dim", [0, 1])
@each("offset", [0, 1, 100])
@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS)
def test_permitted_external_storage_reads_like_h5py(here, cuts, offset, num_dim, num_threads):
    path = write_external(here / "f.h5", *cuts, offset=offset)
    expected = truth(path, "data", num_dim)
    for shuffle in (False, "full"):
        with AsyncReader(
            hdf5_path=path,
            labels_field=None,
            num_dim=num_dim,
            device="cpu",
            batch_size=3,
            shuffle=shuffle,
            num_threads=num_threads,
            allow_external=here,
        ) as reader:
            poison(reader)
            for batch in reader:
                assert_same_bits(batch.data, expected[batch.index])
            is_direct = cuts == () or (num_dim == 0 and all(cut % ROW == 0 for cut in cuts))
            assert (reader.fallback_reads == 0) == is_direct
            assert (reader.layouts["data"].fallback_reason is None) == is_direct


@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS)
def test_one_segment_that_is_not_permitted_refuses_all(here, cuts):
    (here / "root").mkdir()
    path = write_external(here / "f.h5", *cuts, folder=here / "root")
    last = here / "root" / f"part{len(cuts)}.raw"
    moved = here / "moved.raw"
    last.rename(moved)
    last.symlink_to(moved)
    with pytest.raises(UnsafeFileError, match=r"moved\.raw"):
        read_all(path, allow_external=here / "root")
    assert_same_bits(read_all(path, allow_external=here), VALUES)


@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS)
@pytest.mark.parametrize("which", [0, -1])
def test_external_file_that_is_too_short_is_an_error_that_names_it(here, cuts, which):
    path = write_external(here / "f.h5", *cuts, offset=4)
    raw = sorted(here.glob("*.raw"))[which]
    os.truncate(raw, raw.stat().st_size - 1)
    with pytest.raises(ReadError) as caught:
        read_all(path, allow_external=here)
    for part in ("f.h5", '"data"', raw.name):
        assert part in str(caught.value)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", ["missing", "folder", "pipe"])
def test_external_file_that_is_no_file_is_an_error(here, kind):
    path = write_external(here / "f.h5", ROW)
    (here / "part1.raw").unlink()
    if kind == "folder":
        (here / "part1.raw").mkdir()
    elif kind == "pipe":
        os.mkfifo(here / "part1.raw")
    with pytest.raises(ReadError, match=r"part1\.raw"):
        read_all(path, allow_external=here)


@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS)
def test_external_names_are_relative_to_the_current_directory(here, monkeypatch, cuts):
    """So does HDF5: not to the directory of the file."""
    work = here.parent / "work"
    work.mkdir()
    path = write_external(here / "f.h5", *cuts, folder=work, names="short")
    for number in range(len(cuts) + 1):
        (here / f"part{number}.raw").write_bytes(b"\x42" * 240)  # a decoy
    monkeypatch.chdir(work)
    assert_same_bits(truth(path), VALUES)
    with pytest.raises(UnsafeFileError):
        read_all(path, allow_external=here)
    assert_same_bits(read_all(path, allow_external=work), VALUES)


@pytest.mark.parametrize("cuts", [(), (ROW,)], ids=["one", "two"])
def test_current_directory_may_change_while_a_reader_is_open(here, monkeypatch, cuts):
    path = write_external(here / "f.h5", *cuts, names="short")
    monkeypatch.chdir(here)
    options = {"labels_field": None, "device": "cpu", "num_threads": 0, "batch_size": 3}
    with AsyncReader(hdf5_path=path, allow_external=here, **options) as reader:
        monkeypatch.chdir(here.parent)
        for batch in reader:
            assert_same_bits(batch.data, VALUES[batch.index])


PREFIXED = """
import sys
import numpy as np
import h5py
from h5async import AsyncReader
with h5py.File(sys.argv[1]) as file:
    expected = file["data"][...]
with AsyncReader(
    hdf5_path=sys.argv[1], labels_field=None, device="cpu", allow_external=sys.argv[2]
) as reader:
    found = np.concatenate([batch.data.copy() for batch in reader])
assert (found == expected).all(), found
assert (found >= 0).all(), found
"""


@pytest.mark.slow
@pytest.mark.parametrize("prefix", ["{here}", "${{ORIGIN}}", "{here}/../here"])
@pytest.mark.parametrize("kind", ["external storage", "virtual", "link"])
def test_prefix_of_the_environment_is_used_as_by_hdf5(here, kind, prefix):
    """HDF5 reads most of the variables once, when it begins."""
    if kind == "external storage":
        path, variable = write_external(here / "f.h5", ROW, names="short"), "HDF5_EXTFILE_PREFIX"
    elif kind == "link":
        write(here / "o.h5")
        path, variable = link(here / "f.h5", data=external("o.h5")), "HDF5_EXT_PREFIX"
    else:
        write(here / "o.h5")
        layout = h5py.VirtualLayout(VALUES.shape, VALUES.dtype)
        layout[...] = h5py.VirtualSource("o.h5", "data", VALUES.shape)
        path, variable = here / "f.h5", "HDF5_VDS_PREFIX"
        with h5py.File(path, "w") as file:
            file.create_virtual_dataset("data", layout, fillvalue=-9)
    done = subprocess.run(
        [sys.executable, "-c", PREFIXED, str(path), str(here)],
        env={**os.environ, variable: prefix.format(here=here)},
        cwd=here.parent,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("via", ["link", "virtual"])
def test_external_storage_of_another_file_has_to_be_permitted_too(here, via):
    write_external(here / "o.h5", ROW)
    if via == "link":
        link(here / "f.h5", data=external("o.h5"))
    else:
        layout = h5py.VirtualLayout(VALUES.shape, VALUES.dtype)
        layout[...] = h5py.VirtualSource("o.h5", "data", VALUES.shape)
        with h5py.File(here / "f.h5", "w") as file:
            file.create_virtual_dataset("data", layout)
    with pytest.raises(UnsafeFileError, match=r"part0\.raw"):
        read_all(here / "f.h5")
    assert_same_bits(read_all(here / "f.h5", allow_external=here), truth(here / "f.h5"))


def test_same_external_file_may_hold_several_segments(here):
    raw = here / "all.raw"
    raw.write_bytes(VALUES[5:].tobytes() + b"gap" + VALUES[:5].tobytes())
    segments = [(str(raw), 123, 120), (str(raw), 0, 120)]
    with h5py.File(here / "f.h5", "w") as file:
        file.create_dataset("data", VALUES.shape, VALUES.dtype, external=segments)
    for num_dim in (0, 1):
        found = read_all(here / "f.h5", allow_external=here, num_dim=num_dim)
        assert_same_bits(found, truth(here / "f.h5", "data", num_dim))


def test_last_segment_may_be_larger_than_needed_or_unlimited(here):
    raw = here / "all.raw"
    raw.write_bytes(VALUES.tobytes() + b"more" * 9)
    for number, nbytes in enumerate([276, h5py.h5f.UNLIMITED]):
        with h5py.File(here / f"{number}.h5", "w") as file:
            file.create_dataset(
                "data", VALUES.shape, VALUES.dtype, external=[(str(raw), 0, nbytes)]
            )
        found = read_all(here / f"{number}.h5", allow_external=here)
        assert_same_bits(found, truth(here / f"{number}.h5"))


@pytest.mark.parametrize("dtype", [">f4", "?", "S5", "i2,>f4", "V3"])
def test_external_storage_of_other_types_reads_like_h5py(here, dtype):
    dtype = np.dtype(dtype)
    raw = here / "all.raw"
    raw.write_bytes(bytes(range(2, 242)))
    shape = (240 // dtype.itemsize // 4, 4)
    nbytes = int(np.prod(shape)) * dtype.itemsize
    with h5py.File(here / "f.h5", "w") as file:
        file.create_dataset("data", shape, dtype, external=[(str(raw), 0, nbytes)])
    for num_dim in (0, 1):
        found = read_all(here / "f.h5", allow_external=here, num_dim=num_dim)
        assert_same_bits(found, truth(here / "f.h5", "data", num_dim))


def test_external_file_replaced_or_cut_while_reading_gives_no_wrong_values(here):
    path = write_external(here / "f.h5")
    options = {"labels_field": None, "device": "cpu", "num_threads": 0, "batch_size": 5}
    with AsyncReader(hdf5_path=path, allow_external=here, **options) as reader:
        assert_same_bits(reader.get_next_batch().data, VALUES[:5])
        os.truncate(here / "part0.raw", 100)
        with pytest.raises(ReadError, match=r"part0\.raw"):
            [reader.get_next_batch() for _ in range(4)]


def test_no_samples_in_external_files(here):
    (here / "all.raw").write_bytes(b"")
    with h5py.File(here / "f.h5", "w") as file:
        file.create_dataset("data", (0, 3), "i4", external=[(str(here / "all.raw"), 0, 100)])
    with AsyncReader(
        hdf5_path=here / "f.h5", labels_field=None, device="cpu", allow_external=here
    ) as reader:
        assert reader.num_samples == len(reader) == 0


# --- what was checked is what is read -------------------------------------------------------------


def split_rows(path: Path, names: list[str]) -> None:
    """Write a dataset of which only h5py can read the rows: they are split between two files."""
    with h5py.File(path, "w") as file:
        files = [(name, 0, 60) for name in names]
        file.create_dataset("data", (15, 4), "i2", external=files)


def test_external_files_are_those_of_the_folder_at_opening(tmp_path, monkeypatch):
    """HDF5 takes relative names from the current folder, each time that it opens a dataset."""
    ours, others = tmp_path / "ours", tmp_path / "others"
    for number, folder in enumerate((ours, others)):
        folder.mkdir()
        for part in range(2):
            values = np.arange(30, dtype="i2") + 30 * part + 1000 * number
            values.tofile(folder / f"{part}.raw")
    split_rows(ours / "f.h5", ["0.raw", "1.raw"])
    expected = np.arange(60, dtype="i2").reshape(15, 4)
    monkeypatch.chdir(ours)
    for num_threads in (0, 2):
        with AsyncReader(
            hdf5_path="f.h5", labels_field=None, batch_size=4, allow_external=".",
            num_threads=num_threads, device="cpu",
        ) as reader:  # fmt: skip
            assert "split" in reader.layouts["data"].fallback_reason
            for folder in (ours, others, tmp_path, ours):
                monkeypatch.chdir(folder)
                for batch in reader:
                    assert np.array_equal(batch.data, expected[batch.index])
            monkeypatch.setenv("HDF5_EXTFILE_PREFIX", str(others))
            found = []
            with pytest.raises(ReadError, match="HDF5_EXTFILE_PREFIX"):
                # Some of these were read before.
                found.extend(reader.get_next_batch().data.max() for _ in range(4))
            assert all(largest < 1000 for largest in found)
            monkeypatch.delenv("HDF5_EXTFILE_PREFIX")


def test_external_file_that_becomes_a_link_is_refused(tmp_path, monkeypatch):
    ours, secret = tmp_path / "ours", tmp_path / "secret.raw"
    ours.mkdir()
    (np.arange(60, dtype="i2") + 1000).tofile(secret)
    for part in range(2):
        (np.arange(30, dtype="i2") + 30 * part).tofile(ours / f"{part}.raw")
    names = [str(ours / f"{part}.raw") for part in range(2)]
    split_rows(ours / "f.h5", names)
    with AsyncReader(
        hdf5_path=ours / "f.h5", labels_field=None, batch_size=4, allow_external=ours,
        prefetch=1, device="cpu",
    ) as reader:  # fmt: skip
        reader.get_next_batch()
        (ours / "0.raw").unlink()
        (ours / "0.raw").symlink_to(secret)
        for _ in range(6):
            with pytest.raises(ReadError, match=r"0\.raw was replaced"):
                reader.get_next_batch()


@pytest.mark.parametrize("kind", ["link", "source", "external"])
@pytest.mark.parametrize("what", ["file", "folder"])
def test_a_path_that_is_exchanged_between_check_and_opening_is_refused(
    tmp_path, monkeypatch, kind, what
):
    ours, secrets = tmp_path / "ours" / "sub", tmp_path / "secrets"
    for folder in (ours, secrets):
        folder.mkdir(parents=True)
        with h5py.File(folder / "o.h5", "w") as file:
            file["data"] = np.arange(40.0) + 1000 * (folder == secrets)
        np.arange(40.0).tofile(folder / "o.raw")
    path = ours.parent / "f.h5"
    with h5py.File(path, "w") as file:
        if kind == "link":
            file["data"] = h5py.ExternalLink("sub/o.h5", "/data")
        elif kind == "source":
            layout = h5py.VirtualLayout((40,), "f8")
            layout[:] = h5py.VirtualSource("sub/o.h5", "data", (40,))
            file.create_virtual_dataset("data", layout)
        else:
            file.create_dataset("data", (40,), "f8", external=[(str(ours / "o.raw"), 0, 320)])
    permitted = links.Reach.permitted
    is_file = Path.is_file

    def exchange():
        if ours.is_symlink() or (ours / "o.h5").is_symlink():
            return
        if what == "folder":
            ours.rename(tmp_path / "before")
            ours.symlink_to(secrets)
        else:
            for name in ("o.h5", "o.raw"):
                (ours / name).unlink()
                (ours / name).symlink_to(secrets / name)

    def permit_and_exchange(self, target, holder, where):
        found = permitted(self, target, holder, where)
        exchange()
        return found

    def look_and_exchange(self):
        found = is_file(self)
        if self.name == "o.raw":
            exchange()
        return found

    monkeypatch.setattr(links.Reach, "permitted", permit_and_exchange)
    monkeypatch.setattr(Path, "is_file", look_and_exchange)
    with pytest.raises(UnsafeFileError, match="was replaced while"):
        AsyncReader(
            hdf5_path=path, labels_field=None, device="cpu", allow_external=ours.parent
        )  # fmt: skip
