"""Steps and sequences beside fields whose samples have any length; Pillow and h5py are right."""

from __future__ import annotations

import io

import h5py
import numpy as np
import pytest
from conftest import assert_same_bits, require_extra

from h5async import (
    AsyncReader,
    ConfigError,
    DatasetError,
    Field,
    ImageField,
    RaggedField,
    ReadError,
    Sequences,
    SparseField,
)
from h5async.samples import imagekind

Image = pytest.importorskip("PIL.Image", reason="needs Pillow")
cv2 = pytest.importorskip("cv2", reason="needs OpenCV")

SIZE = (12, 10)
LENGTHS = (5, 1, 4, 7)


def jpeg(seed):
    """Return a random image, encoded, and what Pillow decodes it to."""
    pixels = np.random.default_rng(seed).integers(0, 256, (3, 4, 3), np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels).resize(SIZE[::-1], Image.BILINEAR).save(stream, "JPEG")
    data = stream.getvalue()
    return data, np.asarray(Image.open(io.BytesIO(data)))


def put_images(group, name, images):
    data = group.create_dataset(name, (len(images),), h5py.vlen_dtype("u1"))
    for number, one in enumerate(images):
        data[number] = np.frombuffer(one, np.uint8)
    group[f"{name}_flat"] = np.frombuffer(b"".join(images), np.uint8)
    group[f"{name}_lengths"] = [len(one) for one in images]


@pytest.fixture(scope="module")
def demos(tmp_path_factory):
    """Two files: one of groups, one of the same rows one after the other; and the pixels."""
    folder = tmp_path_factory.mktemp("demos")
    made = [jpeg(number) for number in range(sum(LENGTHS))]
    images, pixels = [data for data, _ in made], np.stack([array for _, array in made])
    with h5py.File(folder / "groups.h5", "w") as file:
        begin = 0
        for number, length in enumerate(LENGTHS):
            group = file.create_group(f"data/demo_{number}")
            put_images(group, "image", images[begin : begin + length])
            group["actions"] = np.arange(begin, begin + length)
            # One field has a row more.
            group["position"] = np.arange(begin, begin + length + 1) * 10
            begin += length
        file["mask/train"] = np.array(["demo_3", "demo_0"], "S")
    with h5py.File(folder / "flat.h5", "w") as file:
        put_images(file, "image", images)
        file["actions"] = np.arange(len(images))
        file["ends"] = np.cumsum(LENGTHS)
    return folder, pixels


def windows(steps, pad, lengths=LENGTHS):
    """Return the rows of all samples, -1 for zeros, in the order of rows."""
    found, begin = [], 0
    for length in lengths:
        for row in range(length):
            rows = [row + step for step in steps]
            if pad == "drop" and not all(0 <= one < length for one in rows):
                continue
            if pad == "edge":
                rows = [min(max(one, 0), length - 1) for one in rows]
            found.append([begin + one if 0 <= one < length else -1 for one in rows])
        begin += length
    return np.array(found)


FLAT = {"offsets": "image_lengths", "offsets_kind": "lengths"}


@pytest.mark.parametrize("shuffle", [False, "full", "window"])
@pytest.mark.parametrize("pad", ["drop", "edge", "zero"])
@pytest.mark.parametrize("form", ["vlen", "flat"])
@pytest.mark.parametrize("storage", ["groups", "flat"])
@pytest.mark.parametrize("num_threads", [0, 2])
def test_windows_of_images(demos, storage, form, pad, shuffle, num_threads):
    folder, pixels = demos
    steps = range(-2, 2)
    how = {"steps": steps, "pad": pad, "size": SIZE}
    path, more = ("image", {}) if form == "vlen" else ("image_flat", FLAT)
    masks = {} if pad == "drop" else {"pad_mask": "there"}
    fields = {
        "image": ImageField(path, **how, **masks, **more),
        "actions": Field("actions", steps=steps, pad=pad),
    }
    sequences = {"groups": "data/demo_*"} if storage == "groups" else {"ends": "ends"}
    wanted = windows(steps, pad)
    count = 0
    with AsyncReader(
        hdf5_path=folder / f"{storage}.h5",
        fields=fields,
        sequences=sequences,
        batch_size=5,
        shuffle=shuffle,
        num_threads=num_threads,
        device="cpu",
    ) as reader:
        assert reader.num_samples == len(wanted)
        for epoch in range(2):
            seen = set()
            for batch in reader:
                count += batch.size
                at = np.searchsorted(_anchors(wanted, pad), batch.index)
                rows = wanted[at]
                expected = np.where(rows[..., None, None, None] < 0, 0, pixels[rows])
                assert_same_bits(batch.image, expected)
                assert batch.actions.tolist() == np.where(rows < 0, 0, rows).tolist()
                if masks:
                    is_there = _are_there(batch.index, steps)
                    assert batch.there.tolist() == is_there.tolist()
                seen.update(batch.index.tolist())
            assert len(seen) == len(wanted), epoch
    assert count == 2 * len(wanted)


def _anchors(wanted, pad):
    """Return the rows that are samples."""
    if pad != "drop":
        return np.arange(sum(LENGTHS))
    return wanted[:, 2]  # the step 0 of range(-2, 2)


def _are_there(index, steps):
    ends = np.cumsum(LENGTHS)
    number = np.searchsorted(ends, index, side="right")
    rows = index[:, None] + np.array(steps)
    return (rows >= (ends - LENGTHS)[number][:, None]) & (rows < ends[number][:, None])


def test_groups_that_are_named_and_fields_of_a_row_more(demos):
    folder, pixels = demos
    fields = {
        "image": ImageField("image", size=SIZE, steps=[0, 1], pad="edge"),
        "position": "position",
        "raw": RaggedField("image_flat", offsets="image_lengths", offsets_kind="lengths"),
    }
    sequences = Sequences(groups="data/demo_*", only="mask/train")
    with AsyncReader(
        hdf5_path=folder / "groups.h5", fields=fields, sequences=sequences, batch_size=30
    ) as reader:
        batch = reader.get_next_batch()
        rows = [*range(5), *range(10, 17)]
        after = [*range(1, 5), 4, *range(11, 17), 16]
        assert batch.position.tolist() == [10 * row for row in rows]
        assert_same_bits(batch.image, np.stack([pixels[rows], pixels[after]], axis=1))
        for sample, row in zip(batch.raw, rows, strict=True):
            assert_same_bits(np.asarray(Image.open(io.BytesIO(sample.tobytes()))), pixels[row])
        assert batch.sequence.tolist() == [0] * 5 + [1] * 7
        assert batch.step.tolist() == [*range(5), *range(7)]


@pytest.mark.parametrize("kind", ["text", "tokens", "matrix"])
def test_ragged_and_sparse_rows_beside_steps(tmp_path, kind):
    sparse = require_extra("scipy.sparse")
    lengths, path = (3, 2), tmp_path / "a.h5"
    texts = ["one", "", "three", "four", "fünf"]
    matrix = sparse.random(5, 7, 0.5, "csr", np.float32, rng=np.random.default_rng(0))
    with h5py.File(path, "w") as file:
        begin = 0
        for number, length in enumerate(lengths):
            here = slice(begin, begin + length)
            group = file.create_group(f"demo_{number}")
            group["actions"] = np.arange(begin, begin + length)
            group.create_dataset("text", data=texts[here], dtype=h5py.string_dtype())
            own = matrix[here]
            x = group.create_group("matrix")
            x.attrs["encoding-type"], x.attrs["shape"] = "csr_matrix", own.shape
            for name in ("data", "indices", "indptr"):
                x[name] = getattr(own, name)
            group["tokens"] = np.arange(3 * length)
            group["tokens_at"] = np.arange(length + 1) * 3
            begin += length
    fields = {
        "actions": Field("actions", steps=[0, 1], pad="edge"),
        "x": RaggedField("tokens", offsets="tokens_at") if kind == "tokens" else kind,
    }
    with AsyncReader(
        hdf5_path=path, fields=fields, sequences={"groups": "demo_*"}, shuffle="full"
    ) as reader:
        for batch in (reader.get_next_batch(), reader.read([4, 0, 4])):
            assert batch.actions[:, 0].tolist() == batch.index.tolist()
            if kind == "text":
                assert batch.x.to_strings() == [texts[n] for n in batch.index]
            elif kind == "matrix":
                assert_same_bits(batch.x.to_dense(), matrix.toarray()[batch.index])
            else:
                first = [0, 3, 6, 0, 3]
                assert [s.tolist() for s in batch.x] == [
                    [*range(first[n], first[n] + 3)] for n in batch.index
                ]


def test_matrices_of_other_columns_in_groups(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for columns in (3, 4):
            x = file.create_group(f"demo_{columns}/X")
            x.attrs["encoding-type"], x.attrs["shape"] = "csr_matrix", (2, columns)
            x["data"], x["indices"], x["indptr"] = np.ones(2), np.zeros(2, int), [0, 1, 2]
    with pytest.raises(DatasetError, match="the same columns"):
        AsyncReader(hdf5_path=tmp_path / "a.h5", fields={"x": "X"}, sequences={"groups": "demo_*"})


def test_each_image_is_decoded_once_for_a_batch(demos, monkeypatch):

    folder, _ = demos
    decoded = []

    def counting(data, header, out):
        decoded.append(data.tobytes())
        return real(data, header, out)

    real = imagekind.decode_rgb
    monkeypatch.setattr(imagekind, "decode_rgb", counting)
    field = ImageField("image", size=SIZE, steps=range(-3, 1), pad="edge")
    with AsyncReader(
        hdf5_path=folder / "flat.h5", fields={"image": field}, batch_size=17, num_threads=0
    ) as reader:
        assert reader.read(range(17)).image.shape == (17, 4, *SIZE, 3)
    assert len(decoded) == len(set(decoded))
    assert len(decoded) in (16, 17)  # the core decodes the last one, which has one place


def test_random_parts_are_the_same_for_all_steps_of_a_sample(demos):
    folder, _ = demos
    how = {"size": (6, 6), "crop": "random", "flip": True}
    fields = {
        "window": ImageField("image", steps=[-1, 0, 1], pad="edge", **how),
        "one": ImageField("image", **how),
    }
    with AsyncReader(
        hdf5_path=folder / "flat.h5", fields=fields, sequences={"ends": "ends"}, shuffle="full"
    ) as reader:
        batch = reader.get_next_batch().copy()
        assert_same_bits(batch.window[:, 1], batch.one)
        again = reader.read(batch.index)
        assert_same_bits(again.window[:, 1], again.one)
        # In a sequence of one row all steps are that row, cut alike.
        alone = int(np.flatnonzero(batch.index == 5)[0])
        assert_same_bits(batch.window[alone, 0], batch.window[alone, 2])
        assert not np.array_equal(batch.one, again.one)


def test_channels_first_and_scaled(demos):
    folder, pixels = demos
    field = ImageField(
        "image", size=SIZE, steps=[-1, 0], pad="zero", axes=(0, 3, 1, 2), scale=1 / 255, offset=-1
    )
    with AsyncReader(hdf5_path=folder / "flat.h5", fields={"image": field}) as reader:
        batch = reader.get_next_batch()
        wanted = pixels.transpose(0, 3, 1, 2).astype("f4") * np.float32(1 / 255) - 1
        assert batch.image.shape == (17, 2, 3, *SIZE)
        assert_same_bits(batch.image[:, 1], wanted)
        assert_same_bits(batch.image[1:, 0], wanted[:-1])
        assert (batch.image[0, 0] == -1).all()


def test_a_broken_image_of_a_window(tmp_path):
    good, pixels = jpeg(0)
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        for number, images in enumerate(([good, good], [good, b"nothing", good])):
            put_images(file.create_group(f"demo_{number}"), "image", images)
    options = {"hdf5_path": path, "sequences": {"groups": "demo_*"}}
    how = {"steps": [-1, 0], "pad": "zero", "size": SIZE}
    with AsyncReader(**options, fields={"image": ImageField("image", **how)}) as reader:
        with pytest.raises(ReadError, match=r'demo_1/image": the image of element 1 \(sample 3\)'):
            reader.get_next_batch()
    field = ImageField("image", on_error="zero", **how)
    with AsyncReader(**options, fields={"image": field}) as reader:
        images = reader.get_next_batch().image
        assert not images[0, 0].any()
        assert not images[2, 0].any()
        assert not images[3, 1].any()
        assert not images[4, 0].any()
        assert_same_bits(images[4, 1], pixels)
        assert_same_bits(images[3, 0], pixels)
        assert reader.stats().broken_images == 1


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ImageField("x", steps=range(2)), "steps need size"),
        (lambda: RaggedField("x", steps=range(2)), "steps need fields whose samples have one"),
        (lambda: SparseField("x", steps=range(2)), "steps need fields whose samples have one"),
    ],
)
def test_steps_that_do_not_fit(make, words):
    with pytest.raises(ConfigError, match=words):
        make()


def test_a_cache_of_rows_is_refused_and_one_on_disk_is_not(demos, tmp_path):
    fields = {"image": ImageField("image", size=SIZE, steps=[-1, 0], pad="edge")}
    options = {"hdf5_path": demos[0] / "flat.h5", "fields": fields, "device": "cpu"}
    words = 'cache="host" with steps is not supported; leave it out, or set cache="disk"'
    with pytest.raises(ConfigError, match=words):
        AsyncReader(**options, cache="host")
    with AsyncReader(**options) as reader:
        wanted = reader.read(range(9)).image.copy()
    with AsyncReader(**options, cache="disk", cache_dir=tmp_path) as reader:
        assert_same_bits(reader.read(range(9)).image, wanted)
