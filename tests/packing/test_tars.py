"""`pack` of tars, whose values are compared by h5py, and with webdataset where it is installed."""

import io
import json
import lzma
import tarfile

import h5py
import numpy as np
import pytest
from comparing import PNGS, contents, interrupt, opened, values
from pictures import by_pillow, sorts

import h5async
from h5async import AsyncReader, DatasetError, ReadError
from h5async.packing.safefile import SafeFile

pa = pytest.importorskip("pyarrow")


def _tar(path, samples):
    with tarfile.open(path, "w") as tar:
        for key, files in samples.items():
            for extension, content in files.items():
                member = tarfile.TarInfo(f"{key}.{extension}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    return path


def _npy(array):
    into = io.BytesIO()
    np.save(into, array)
    return into.getvalue()


def _tarred(n):
    image = ("jpg", sorts()["plain.jpg"]) if n % 2 else ("png", PNGS[n % 9])
    return dict([image]) | {
        "cls": str(n % 7).encode(),
        "json": json.dumps({"n": n}).encode(),
        "txt": f"text {n}".encode(),
        "npy": _npy(np.full(3, n)),
        "bin": bytes(n),
    }


@pytest.mark.slow
def test_tars(tmp_path):
    whole = {f"some/{n:04}": _tarred(n) for n in range(150)}
    names = list(whole)
    tars = [
        _tar(tmp_path / "a.tar", {name: whole[name] for name in names[:90]}),
        _tar(tmp_path / "b.tar", {name: whole[name] for name in names[90:]}),
    ]
    with opened(tars, tmp_path) as file:
        assert values(file["filenames"]) == names
        assert file["labels"][:].tolist() == [n % 7 for n in range(150)]
        for n, (content, data) in enumerate(zip(whole.values(), file["data"][:], strict=True)):
            assert data.tobytes() == content["jpg" if n % 2 else "png"]
            assert json.loads(file["json"][n]) == {"n": n}
            assert file["bin"][n].tobytes() == bytes(n)
        np.testing.assert_array_equal(file["npy"][:], np.repeat(np.arange(150), 3).reshape(-1, 3))
        assert values(file["txt"]) == [f"text {n}" for n in range(150)]
    with AsyncReader(hdf5_path=tmp_path / "out.h5") as reader:
        data, labels = reader.get_next_batch()
        np.testing.assert_array_equal(data[1], by_pillow(sorts()["plain.jpg"]))
        assert labels[:8].tolist() == [0, 1, 2, 3, 4, 5, 6, 0]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # unclosed files
def test_tars_as_webdataset_reads_them(tmp_path):
    webdataset = pytest.importorskip("webdataset")
    path = _tar(tmp_path / "a.tar", {f"k{n}": _tarred(n) for n in range(20)})
    expected = list(webdataset.WebDataset(str(path), shardshuffle=False, empty_check=False))
    with opened(path, tmp_path) as file:
        assert len(expected) == 20
        for n, sample in enumerate(expected):
            assert file["filenames"].asstr()[n] == sample["__key__"]
            assert file["data"][n].tobytes() == sample.get("jpg", sample.get("png"))
            assert str(file["labels"][n]).encode() == sample["cls"]
            assert file["txt"][n] == sample["txt"]


def test_a_damaged_header_is_not_the_end_of_a_tar(tmp_path):
    path = tmp_path / "x.tar"
    with tarfile.open(path, "w") as tar:
        for name in ("a.txt", "b.txt"):
            tar.addfile(tarfile.TarInfo(name))
    content = bytearray(path.read_bytes())
    content[tarfile.BLOCKSIZE + 150] ^= 1  # in the checksum of the second one
    path.write_bytes(content)
    with pytest.raises(ReadError, match="at byte 512, the header is damaged"):
        opened(path, tmp_path)


def test_sparse_files_in_tars(tmp_path):
    path, member = tmp_path / "x.tar", tarfile.TarInfo("a.txt")
    member.pax_headers = {"GNU.sparse.major": "0", "GNU.sparse.minor": "1"}
    member.pax_headers |= {"GNU.sparse.map": "0,1", "GNU.sparse.size": "9"}
    member.size = 1
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
        tar.addfile(member, io.BytesIO(b"x"))
    with pytest.raises(ReadError, match=r"a.txt is sparse"):
        opened(path, tmp_path)


def test_bad_samples_in_tars(tmp_path):
    samples = {"a": _tarred(1), "b": _tarred(2) | {"cls": b"x"}, "c": _tarred(3), "d": _tarred(4)}
    del samples["c"]["txt"]
    found = h5async.pack(_tar(tmp_path / "a.tar", samples), tmp_path / "out.h5", on_error="skip")
    assert [(name.rpartition(" ")[2], reason) for name, reason in found.bad] == [
        ("b", "invalid literal for int() with base 10: b'x'"),
        ("c", "it has no txt, unlike the first sample"),
    ]
    with h5py.File(tmp_path / "out.h5") as file:
        assert values(file["filenames"]) == ["a", "d"]
    (tmp_path / "b.tar").write_bytes(b"\x1f\x8bno tar")
    with pytest.raises(ReadError, match=r"cannot read .*b\.tar"):
        h5async.pack(tmp_path / "b.tar", tmp_path / "out2.h5")


def _compressed(path, ending):
    """Write a tar compressed, in another folder, and return its path."""
    out = path.parent / ending / f"{path.stem}.{ending}"
    out.parent.mkdir(exist_ok=True)
    with pa.output_stream(str(out), compression=None if ending == "tar.xz" else "detect") as file:
        content = path.read_bytes()
        file.write(lzma.compress(content) if ending == "tar.xz" else content)
    return out


@pytest.mark.parametrize("ending", ["tar.gz", "tar.bz2", "tar.xz", "tar.zst"])
def test_compressed_tars(tmp_path, ending, monkeypatch):
    whole = {f"{n:04}": _tarred(n) for n in range(150)}
    whole["0070"]["cls"] = b"x"
    paths = [_tar(tmp_path / "a.tar", whole), _tar(tmp_path / "b.tar", {"z": _tarred(1)})]
    with opened(paths, tmp_path, on_error="skip") as file:
        expected = contents(file.filename)
    folder = [_compressed(path, ending) for path in paths].pop().parent
    with opened(folder, tmp_path, on_error="skip") as file:
        assert contents(file.filename) == expected
    monkeypatch.setattr(SafeFile, "is_due", True)
    out = tmp_path / "resumed.h5"
    with pytest.raises(KeyboardInterrupt):
        h5async.pack(folder, out, on_error="skip", progress=interrupt)
    h5async.pack(folder, out, on_error="skip", resume=True)
    assert contents(out) == expected
    content = (folder / f"b.{ending}").read_bytes()
    damages = [content[:-9], content[:100], bytes([*content[:100], 77, *content[101:]])]
    for damaged in damages[: 2 if ending == "tar.zst" else 3]:  # which has no checksum here
        (folder / f"b.{ending}").write_bytes(damaged)
        with pytest.raises(ReadError, match=rf"cannot read .*b\.{ending}"):
            h5async.pack(folder, tmp_path / "damaged.h5", on_error="skip", resume=True)
        assert not (tmp_path / "damaged.h5").exists()


@pytest.mark.parametrize("ending", ["tar", "tar.gz"])
def test_two_images_of_a_sample_are_two_columns(tmp_path, ending):
    jpg = sorts()["plain.jpg"]
    samples = {f"k{n}": {"png": PNGS[n], "jpg": jpg, "seg.png": PNGS[n]} for n in range(9)}
    path = _tar(tmp_path / "a.tar", samples)
    path = path if ending == "tar" else _compressed(path, ending)
    with opened(path, tmp_path) as file:
        assert sorted(file) == ["filenames", "jpg", "png", "seg.png"]
        assert [one.tobytes() for one in file["png"]] == PNGS
        assert [one.tobytes() for one in file["jpg"]] == [jpg] * 9
    with AsyncReader(hdf5_path=tmp_path / "out.h5", fields={"x": "png"}) as reader:
        np.testing.assert_array_equal(reader.get_next_batch().x[3], by_pillow(PNGS[3]))
    samples["k1"]["PNG"] = b""
    with pytest.raises(DatasetError, match='sample "k1" has two files of png'):
        opened(_tar(tmp_path / "a.tar", samples), tmp_path)
