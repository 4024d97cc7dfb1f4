"""`pack` of folders of images, compared with Pillow, and with torchvision where it is installed."""

import json
import os
import sys

import h5py
import numpy as np
import pytest
from pictures import by_pillow, damaged, encoded, pixels, sorts, write
from PIL import Image
from typer.testing import CliRunner

import h5async
from h5async import AsyncReader, ConfigError, DatasetError, ImageField, ReadError, cli
from h5async.packing.sources import folders

KEPT = [name for name in sorts() if name.lower().endswith(("g", "jpeg")) and name != "deep.png"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    names = sorted(sorts())
    several = {name: sorts()[name] for name in names}
    small = {f"{n:03}.png": encoded(Image.fromarray(pixels(3, 4, n)), "PNG") for n in range(150)}
    classes = {
        "b_sorts": several,
        "a_small": small,
        "c": {"x.txt": b"", "one.jpg": several["plain.jpg"]},
    }
    return write(tmp_path_factory.mktemp("images"), classes)


@pytest.fixture(scope="module")
def packed(folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("packed") / "train.h5"
    return out, h5async.pack(folder, out)


def test_bytes_are_kept_and_names_and_classes_too(folder, packed):
    out, found = packed
    assert (found.samples, found.path, found.bad) == (165, out, [])
    assert found.converted == 5
    with h5py.File(out) as file:
        names = file["filenames"].asstr()[:].tolist()
        assert names == sorted(names)
        assert file["classes"].asstr()[:].tolist() == ["a_small", "b_sorts", "c"]
        assert file["labels"].attrs["classes"].tolist() == ["a_small", "b_sorts", "c"]
        assert file["labels"].dtype == np.int64
        assert file["labels"][:].tolist() == [0] * 150 + [1] * 14 + [2]
        for name, data in zip(names, file["data"][:], strict=True):
            if name.startswith("a_small") or name.split("/")[1] in KEPT:
                assert data.tobytes() == (folder / name).read_bytes()


def test_a_reader_gives_the_pixels_of_pillow_without_options(folder, packed):
    out, _ = packed
    with h5py.File(out) as file:
        names = file["filenames"].asstr()[:].tolist()
    with AsyncReader(hdf5_path=out, batch_size=50) as reader:
        for data, labels in reader:
            for image, label in zip(data, labels, strict=True):
                name = names.pop(0)
                np.testing.assert_array_equal(image, by_pillow((folder / name).read_bytes()), name)
                assert label == "abc".index(name[0])


def test_it_is_what_torchvision_reads(folder, packed):
    try:
        from torchvision import datasets
    except (ImportError, RuntimeError):  # a build for another PyTorch
        pytest.skip("torchvision is not installed")
    expected = datasets.ImageFolder(folder)
    with AsyncReader(hdf5_path=packed[0], batch_size=1) as reader:
        assert reader.num_samples == len(expected)
        for (image, label), (data, labels) in zip(expected, reader, strict=True):
            np.testing.assert_array_equal(np.asarray(image), data[0])
            assert label == labels[0]


@pytest.mark.parametrize("size", [16, "8x24"])
def test_resized_images_are_those_of_a_reader_with_that_size(folder, packed, tmp_path, size):
    h5async.pack(folder, tmp_path / "sized.h5", size=size, chunk_samples=4)
    shape = (16, 16) if size == 16 else (8, 24)
    whole = {"x": ImageField("data", size=shape), "y": "labels"}
    with AsyncReader(hdf5_path=packed[0], fields=whole, batch_size=165) as reader:
        expected, labels = reader.get_next_batch()
        with h5py.File(tmp_path / "sized.h5") as file:
            assert file["data"].chunks == (4, *shape, 3)
            np.testing.assert_array_equal(file["data"][:], expected)
            np.testing.assert_array_equal(file["labels"][:], labels)


def test_a_folder_without_folders_has_no_labels(tmp_path):
    (tmp_path / "a.png").write_bytes(encoded(Image.fromarray(pixels(2, 2)), "PNG"))
    h5async.pack(tmp_path, tmp_path / "out.h5")
    with h5py.File(tmp_path / "out.h5") as file:
        assert sorted(file) == ["data", "filenames"]


def test_names_that_are_no_utf8(tmp_path):
    name, content = b"\xff\n.png", encoded(Image.fromarray(pixels(3, 3, 1)), "PNG")
    folder = os.fsencode(tmp_path / "in") + b"/\xfe"
    os.makedirs(folder)
    with open(folder + b"/" + name, "wb") as file:
        file.write(content)
    h5async.pack(tmp_path / "in", tmp_path / "out.h5")
    with h5py.File(tmp_path / "out.h5") as file:
        assert file["filenames"][:].tolist() == [b"\xfe/" + name]
        assert file["classes"][:].tolist() == [b"\xfe"]
        assert [os.fsencode(one) for one in file["labels"].attrs["classes"]] == [b"\xfe"]


def test_order_is_shuffled_by_seed(folder, packed, tmp_path):
    orders = []
    for number, seed in enumerate([7, 7, 8]):
        h5async.pack(folder, tmp_path / f"{number}.h5", shuffle=True, seed=seed)
        with h5py.File(tmp_path / f"{number}.h5") as file, h5py.File(packed[0]) as plain:
            names = file["filenames"].asstr()[:].tolist()
            place = {name: at for at, name in enumerate(plain["filenames"].asstr()[:])}
            at = [place[name] for name in names]
            np.testing.assert_array_equal(file["labels"][:], plain["labels"][:][at])
            for one, other in zip(file["data"][:], plain["data"][:][at], strict=True):
                np.testing.assert_array_equal(one, other)
            orders.append(at)
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0]) == sorted(orders[2]) == list(range(165)) != orders[0]


@pytest.mark.parametrize("options", [{}, {"size": 8}])
def test_bad_images_are_named_or_left_out(tmp_path, options):
    classes = {
        "a": damaged() | {"good.jpg": sorts()["plain.jpg"]},
        "b": {"b.png": sorts()["plain.png"]},
    }
    folder, out = write(tmp_path / "in", classes), tmp_path / "out.h5"
    with pytest.raises(ReadError, match=r'a/cut\.jpg cannot be packed: .*on_error="skip"'):
        h5async.pack(folder, out, **options)
    assert not out.exists()
    found = h5async.pack(folder, out, on_error="skip", resume=True, **options)
    assert [name for name, _ in found.bad] == [
        str(folder / "a" / name) for name in sorted(damaged())
    ]
    assert not any("0x" in why for _, why in found.bad)  # no object's address
    with h5py.File(out) as file:
        assert file["filenames"].asstr()[:].tolist() == ["a/good.jpg", "b/b.png"]
        assert file["labels"][:].tolist() == [0, 1]


def test_damage_inside_is_found_by_decoding(tmp_path):
    content = bytearray(sorts()["plain.png"])
    content[-30] ^= 255
    folder = write(tmp_path / "in", {"a": {"a.png": bytes(content)}})
    h5async.pack(folder, tmp_path / "unseen.h5")
    with pytest.raises(ReadError, match=r"a\.png cannot be packed: Pillow"):
        h5async.pack(folder, tmp_path / "seen.h5", verify=True)


def test_appending_adds_samples_and_classes(tmp_path):
    first = write(tmp_path / "one", {"cat": sorts(), "dog": {"d.png": sorts()["plain.png"]}})
    second = write(tmp_path / "two", {"ant": {"a.png": sorts()["bits.png"]}, "dog": sorts()})
    out = tmp_path / "out.h5"
    h5async.pack(first, out, chunk_samples=4, size=8)
    found = h5async.pack(second, out, append=True, chunk_samples=4, size=8)
    assert found.samples == 30
    again = h5async.pack(second, out, append=True, resume=True, chunk_samples=4, size=8)
    assert again.samples == 30
    with h5py.File(out) as file:
        assert file["classes"].asstr()[:].tolist() == ["cat", "dog", "ant"]
        assert file["labels"][:].tolist() == [0] * 14 + [1, 2] + [1] * 14
        np.testing.assert_array_equal(file["data"][:14], file["data"][16:])
    h5async.pack(first, tmp_path / "twice.h5", size=8)
    for _ in range(2):  # the second time, it is there already
        found = h5async.pack(first, tmp_path / "twice.h5", append=True, resume=True, size=8)
        assert found.samples == 30
    with h5py.File(tmp_path / "foreign.h5", "w") as file:
        file["data"] = np.zeros(3)
    with pytest.raises(ConfigError, match="was not made by pack"):
        h5async.pack(second, tmp_path / "foreign.h5", append=True)


def test_files_that_change_meanwhile_are_noticed(tmp_path, monkeypatch):
    folder = write(tmp_path / "in", {"a": {f"{n}.png": sorts()["plain.png"] for n in range(4)}})
    list_files = folders._list_files

    def listing(*arguments):
        list_files(*arguments)
        (folder / "a" / "3.png").write_bytes(sorts()["plain.jpg"])

    monkeypatch.setattr(folders, "_list_files", listing)
    with pytest.raises(ReadError, match=r"3\.png was changed while it was being packed"):
        h5async.pack(folder, tmp_path / "out.h5")


def _run(*typed):
    return CliRunner().invoke(cli.app, ["pack", *map(str, typed)])


def test_the_command_says_what_it_will_do_and_what_it_did(folder, tmp_path):
    out = tmp_path / "train.h5"
    found = _run(folder, "-o", out, "--dry-run")
    assert found.exit_code == 0, found.output
    assert found.stdout.startswith("165 samples")
    assert not out.exists()
    found = _run(folder, "-o", out, "--json", "--size", "8x16", "--filter", "gzip:1")
    content = json.loads(found.stdout)["packed"]
    assert content["samples"] == 165
    assert content["columns"]["data"] == "uint8 8x16x3, chunks of 128, filter gzip:1"
    found = _run(folder, "-o", out)
    assert found.exit_code == 1
    assert "--overwrite" in found.stderr


def test_several_folders_are_one_dataset_with_all_classes(tmp_path):
    a, b, c = (sorts()[name] for name in ("plain.jpg", "plain.png", "grey.jpg"))
    write(tmp_path / "train", {"cat": {"x.jpg": a, "y.png": b}, "dog": {"x.jpg": c}})
    write(tmp_path / "val", {"ant": {"x.png": b}, "dog/deep": {"x.jpg": a}})
    out = tmp_path / "out.h5"
    h5async.pack([tmp_path / "train", tmp_path / "val"], out)
    with h5py.File(out) as file:
        assert file["classes"].asstr()[:].tolist() == ["ant", "cat", "dog"]
        assert file["labels"][:].tolist() == [1, 1, 2, 0, 2]
        names = ["train/cat/x.jpg", "train/cat/y.png", "train/dog/x.jpg"]
        names += ["val/ant/x.png", "val/dog/deep/x.jpg"]
        assert file["filenames"].asstr()[:].tolist() == names
        assert [one.tobytes() for one in file["data"][:]] == [a, b, c, b, a]
    before = out.read_bytes()
    h5async.pack(tmp_path / "[tv]*", out, overwrite=True)
    assert out.read_bytes() == before
    write(tmp_path / "flat", {"": {"x.jpg": a}})
    with pytest.raises(DatasetError, match=r'the folder ".*flat" would be a class'):
        h5async.pack([tmp_path / "train", tmp_path / "flat"], tmp_path / "other.h5")


def test_a_long_list_of_files_takes_few_bytes(tmp_path):
    listing = folders._Listing()
    for n in range(10_000):
        listing.append(f"class {n % 10}/image_{n:06}.jpg", n, n << 40)
    assert listing[9_999] == ("class 9/image_009999.jpg", 9_999, 9_999 << 40)
    parts = (listing._names, listing._ends, listing._sizes, listing._times)
    assert sum(map(sys.getsizeof, parts)) < 60 * len(listing)
