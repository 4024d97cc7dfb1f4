"""Fields of encoded images, against Pillow and OpenCV."""

from __future__ import annotations

import io
import itertools
import logging
import math
import struct
import threading
import zlib

import h5py
import numpy as np
import pytest
from conftest import assert_same_bits
from hypothesis import given
from hypothesis import strategies as st
from imagecodecs import png_encode as encode_png

from h5async import AsyncReader, Field, ImageField, Images, MissingPackageError
from h5async.codec import imageformats
from h5async.codec.imageformats import decode_rgb, read_header
from h5async.core.binding import Core, load_core
from h5async.errors import BudgetError, ConfigError, DatasetError, ReadError
from h5async.fill.finishing import BatchDecoder, DecodedBatch
from h5async.plan.crops import are_flipped, center_boxes, random_boxes, random_numbers
from h5async.samples import imagekind

Image = pytest.importorskip("PIL.Image", reason="needs Pillow")
cv2 = pytest.importorskip("cv2", reason="needs OpenCV")


def encoded(size=(20, 30), mode="RGB", form="JPEG", seed=0, **how):
    """Return a smooth random image of a height and a width, as Pillow encodes it."""
    rng = np.random.default_rng(seed)
    small = Image.fromarray(rng.integers(0, 256, (5, 6, 3), np.uint8))
    stream = io.BytesIO()
    small.resize(size[::-1], Image.BILINEAR).convert(mode).save(stream, form, **how)
    return stream.getvalue()


def by_pillow(data):
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


def decoded(data):
    array = np.frombuffer(data, np.uint8)
    header = read_header(array)
    out = np.empty(header.shape, np.uint8)
    decode_rgb(array, header, out)
    return out


def write(path, images, ragged=False):
    """Write images as elements of variable length, or as flat bytes with their ends."""
    with h5py.File(path, "w") as file:
        if ragged:
            file["jpeg"] = np.frombuffer(b"".join(images), np.uint8)
            file["ends"] = np.cumsum([len(one) for one in images])
        else:
            data = file.create_dataset("jpeg", (len(images),), h5py.vlen_dtype("u1"))
            for number, one in enumerate(images):
                data[number] = np.frombuffer(one, np.uint8)
        file["labels"] = np.arange(len(images))
    return path


def reading(path, field=None, **options):
    field = field or ImageField("jpeg")
    given = {"hdf5_path": path, "fields": {"image": field, "label": "labels"}, "batch_size": 4}
    return AsyncReader(**(given | options))


def all_of(path, field=None, **options):
    """Return the image of each sample, and the arrays of all batches."""
    found, batches = {}, []
    with reading(path, field, **options) as reader:
        for batch in reader:
            copied = batch.copy()
            batches.append(copied.image)
            found |= dict(zip(batch.index.tolist(), copied.image, strict=True))
    return found, batches


JPEGS = [("L", {}), ("RGB", {}), ("CMYK", {}), ("RGB", {"progressive": True})]
JPEGS += [("RGB", {"subsampling": 0}), ("RGB", {"quality": 100}), ("RGB", {"optimize": True})]
JPEGS += [("RGB", {"keep_rgb": True}), ("RGB", {"restart_marker_blocks": 2})]
JPEGS += [("RGB", {"exif": b"Exif\0\0" + bytes(3000)}), ("RGB", {"comment": b"\xff\xd9 no end"})]
PNGS = [(mode, {}) for mode in ("1", "L", "LA", "RGB", "RGBA", "P")]
PNGS += [("P", {"transparency": 0}), ("P", {"bits": 4}), ("L", {"transparency": 3})]


@given(
    st.sampled_from([("JPEG", *one) for one in JPEGS] + [("PNG", *one) for one in PNGS]),
    st.tuples(st.integers(1, 70), st.integers(1, 70)),
    st.integers(0, 9),
)
def test_pixels_are_those_of_pillow(kind, size, seed):
    form, mode, how = kind
    data = encoded(size, mode, form, seed, **how)
    assert_same_bits(decoded(data), by_pillow(data))


def png(width, height, depth, colour, rows=b""):
    def chunk(name, body):
        return (
            struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
        )

    head = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    parts = [chunk(b"IHDR", head), chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def test_of_16_bits_of_colour_the_upper_8_are_taken():
    values = np.arange(2 * 3 * 3, dtype=">u2").reshape(2, 3, 3) * 3333
    data = png(3, 2, 16, 2, b"".join(b"\0" + row.tobytes() for row in values))
    assert_same_bits(decoded(data), by_pillow(data))


def test_16_bits_of_grey_are_refused():
    data = png(1, 1, 16, 0, b"\0\1\2")
    with pytest.raises(ValueError, match="16-bit greyscale"):
        decoded(data)


def test_of_16_bits_of_grey_with_transparency_the_upper_8_are_taken():
    values = np.arange(2 * 3 * 2, dtype=">u2").reshape(2, 3, 2) * 5003
    data = png(3, 2, 16, 4, b"".join(b"\0" + row.tobytes() for row in values))
    assert_same_bits(decoded(data), by_pillow(data))


def interlaced(*chunks):
    """An image of one pixel, of which each pass but the first is empty."""
    data = png(1, 1, 8, 2, b"\0\1\2\3")
    head = data[12:28] + b"\1"
    whole = data[:12] + head + struct.pack(">I", zlib.crc32(head))
    return whole + b"".join(chunks) + data[33:]


def test_an_interlaced_image_is_no_reason_to_warn(caplog, capfd):
    assert decoded(interlaced()).tolist() == [[[1, 2, 3]]]
    assert not caplog.records
    assert capfd.readouterr().err == ""


def test_a_decoder_warns_once(caplog, capfd, monkeypatch):
    """Of a chunk that is damaged and not needed, say."""
    monkeypatch.setattr(type(imageformats._warnings), "_count", itertools.count(1))
    damaged = interlaced(struct.pack(">I4s4sI", 4, b"tEXt", b"a\0bc", 0))
    with caplog.at_level("DEBUG"):
        for _ in range(3):
            assert decoded(damaged).tolist() == [[[1, 2, 3]]]
    found = [(one.name, one.levelname) for one in caplog.records]
    assert found == [("h5async.images", level) for level in ("WARNING", "DEBUG", "DEBUG")]
    assert "CRC error" in caplog.messages[0]
    assert capfd.readouterr().err == ""
    logging.getLogger("imagecodecs").warning("of others")
    assert caplog.records[-1].name == "imagecodecs"


@pytest.mark.parametrize("how", [{}, {"progressive": True}, {"restart_marker_blocks": 2}])
def test_what_is_cut_off_in_a_segment_is_refused_as_by_pillow(how):
    """The two bytes of an end do not make it whole."""
    data, refused = encoded((9, 17), **how), 0
    for count in range(20, len(data)):
        cut = data[:count] + b"\xff\xd9"
        try:
            wanted = by_pillow(cut)
        except (OSError, SyntaxError):
            refused += 1
            with pytest.raises(ValueError):  # noqa: PT011
                decoded(cut)
        else:
            assert_same_bits(decoded(cut), wanted)
    assert refused > 100


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """A file of images of many kinds and sizes, and their pixels."""
    kinds = [("JPEG", mode) for mode, _ in JPEGS[:3]] + [("PNG", mode) for mode, _ in PNGS[:6]]
    images = [
        encoded((10 + number % 7, 12 + number % 5), mode, form, number)
        for number, (form, mode) in enumerate(kinds * 2)
    ]
    path = write(tmp_path_factory.mktemp("images") / "mixed.h5", images)
    return path, list(map(by_pillow, images))


@pytest.fixture(scope="module")
def equal(tmp_path_factory):
    """Two files of 11 and 6 images of one size, and all pixels."""
    images = [encoded((60, 80), seed=number) for number in range(17)]
    folder = tmp_path_factory.mktemp("images")
    paths = [write(folder / "a.h5", images[:11]), write(folder / "b.h5", images[11:])]
    return paths, list(map(by_pillow, images))


@pytest.mark.parametrize("threads", [0, 1, 2])
def test_images_of_one_size_are_an_array(equal, threads):
    paths, pixels = equal
    found, batches = all_of(paths, shuffle="full", num_threads=threads)
    assert [batch.shape for batch in batches] == [(4, 60, 80, 3)] * 4 + [(1, 60, 80, 3)]
    for number, image in enumerate(pixels):
        assert_same_bits(found[number], image)


@pytest.mark.parametrize("threads", [0, 2])
@pytest.mark.parametrize("batch_size", [1, 5, 30])
def test_images_of_several_sizes_are_ragged(mixed, threads, batch_size):
    path, pixels = mixed
    found, batches = all_of(path, shuffle="full", num_threads=threads, batch_size=batch_size)
    assert len(found) == len(pixels)
    for number, image in enumerate(pixels):
        assert_same_bits(found[number], image)
    for batch in batches:
        assert isinstance(batch, Images if batch_size > 1 else np.ndarray)


def test_ragged_images(mixed):
    path, pixels = mixed
    with reading(path, batch_size=6) as reader:
        batch = reader.get_next_batch()
        images = batch.image
        assert images.shapes.tolist() == [list(one.shape) for one in pixels[:6]]
        for several in (images, images.copy(), images[:], images[2:5].copy()):
            first = 2 if len(several) == 3 else 0
            assert isinstance(several, Images)
            for number, image in enumerate(several):
                assert_same_bits(image, pixels[first + number])
                assert_same_bits(several[number], image)
        assert np.shares_memory(images[1], images.values)
        assert "6 of differing sizes" in repr(images)
        given = reader.read([7, 3]).image
        assert_same_bits(given[0], pixels[7])
        assert_same_bits(given[1], pixels[3])


def test_flat_bytes_with_ends(tmp_path):
    images = [encoded((9, 8 + number), seed=number) for number in range(7)]
    path = write(tmp_path / "flat.h5", images, ragged=True)
    field = ImageField("jpeg", offsets="ends", offsets_kind="ends")
    for threads in (0, 2):
        found, _ = all_of(path, field, num_threads=threads, shuffle="full")
        for number, image in enumerate(images):
            assert_same_bits(found[number], by_pillow(image))


def test_the_options_of_pixels(equal):
    paths, pixels = equal
    scales, offsets = (0.5, 0.25, 2.0), (1.0, -1.0, 0.0)
    first = ImageField("jpeg", axes=(0, 3, 1, 2))
    field = ImageField("jpeg", axes=(0, 3, 1, 2), scale=scales, offset=offsets)
    planes, scaled = all_of(paths, first)[0], all_of(paths, field)[0]
    for number, image in enumerate(pixels):
        moved = image.transpose(2, 0, 1)
        assert_same_bits(planes[number], np.ascontiguousarray(moved))
        factors = (np.array(f, "f4")[:, None, None] for f in (scales, offsets))
        wanted = moved.astype("f4") * next(factors) + next(factors)
        assert_same_bits(scaled[number], np.ascontiguousarray(wanted))
    halves = all_of(paths, ImageField("jpeg", dtype="f2", size=7))[1][0]
    assert halves.shape == (4, 7, 7, 3)
    assert halves.dtype == np.float16


def test_scaled_images_of_several_sizes(mixed):
    path, pixels = mixed
    found, _ = all_of(path, ImageField("jpeg", axes=(0, 3, 1, 2), scale=1 / 256))
    for number, image in enumerate(pixels):
        wanted = image.transpose(2, 0, 1).astype("f4") / 256
        assert_same_bits(found[number], np.ascontiguousarray(wanted))


@pytest.mark.parametrize(("how", "flag"), [("linear", 1), ("area", 3), ("auto", 1)])
def test_a_part_in_the_middle_is_resized_by_opencv(equal, how, flag):
    paths, pixels = equal
    found, _ = all_of(paths, ImageField("jpeg", size=(36, 32), interpolation=how))
    for number, image in enumerate(pixels):
        part = image[:, 13:66]
        wanted = cv2.resize(part, (32, 36), interpolation=flag)
        assert_same_bits(found[number], wanted)


def test_what_shrinks_to_less_than_half_is_averaged(equal):
    paths, pixels = equal
    found, _ = all_of(paths, ImageField("jpeg", size=20))
    wanted = cv2.resize(pixels[3][:, 10:70], (20, 20), interpolation=cv2.INTER_AREA)
    assert_same_bits(found[3], wanted)


def test_resized_images_are_near_those_of_pillow(equal):
    paths, pixels = equal
    found, _ = all_of(paths, ImageField("jpeg", size=(30, 40)))
    for number, image in enumerate(pixels):
        by = Image.fromarray(image).resize((40, 30), Image.BILINEAR)
        assert np.abs(found[number].astype(int) - np.asarray(by)).mean() < 2


RANDOM = {"size": (24, 20), "crop": "random", "flip": True}


def test_random_parts_depend_on_seed_epoch_and_sample_alone(equal):
    paths, _ = equal
    field = ImageField("jpeg", **RANDOM)

    def epochs(**options):
        with reading(paths, field, **options) as reader:
            found = []
            for _ in range(2):
                found.append({})
                for batch in reader:
                    found[-1] |= dict(zip(batch.index.tolist(), batch.copy().image, strict=True))
            return found

    first = epochs(shuffle="full", num_threads=0)
    for options in (
        {"shuffle": "full", "num_threads": 2},
        {"shuffle": False, "num_threads": 3, "batch_size": 7},
        {"shuffle": "window", "num_threads": 1, "prefetch": 4},
    ):
        for mine, theirs in zip(epochs(**options), first, strict=True):
            assert all(np.array_equal(mine[number], theirs[number]) for number in range(17))
    assert not any(np.array_equal(first[0][number], first[1][number]) for number in range(17))
    other = epochs(shuffle="full", seed=1)
    assert not any(np.array_equal(first[0][number], other[0][number]) for number in range(17))


@pytest.mark.parametrize("size", [None, (24, 20)])
@pytest.mark.parametrize("axes", [(0, 1, 2, 3), (0, 3, 1, 2)])
def test_half_of_the_images_are_flipped(equal, size, axes):
    paths, _ = equal
    plain, _ = all_of(paths, ImageField("jpeg", size=size, axes=axes))
    found, _ = all_of(paths, ImageField("jpeg", size=size, axes=axes, flip=True))
    across = axes.index(2) - 1
    is_flipped = []
    for number in range(17):
        is_flipped.append(not np.array_equal(found[number], plain[number]))
        if is_flipped[-1]:
            assert_same_bits(found[number], np.flip(plain[number], across).copy())
    assert 2 < sum(is_flipped) < 15


def test_two_fields_are_cut_alike(equal):
    paths, _ = equal
    fields = {"a": ImageField("jpeg", **RANDOM), "b": ImageField("jpeg", **RANDOM)}
    with AsyncReader(hdf5_path=paths, fields=fields, shuffle="full", batch_size=5) as reader:
        for batch in reader:
            assert_same_bits(batch.a, batch.b)


def test_random_parts_go_on_after_resume(equal):
    paths, _ = equal
    options = {"field": ImageField("jpeg", **RANDOM), "shuffle": "full", "num_threads": 2}
    with reading(paths, **options) as reader:
        batches = itertools.chain.from_iterable(itertools.repeat(reader))
        for _ in range(3):
            next(batches)
        state = reader.state_dict()
        wanted = [next(batches).copy() for _ in range(5)]
    with reading(paths, **options) as reader:
        reader.load_state_dict(state)
        batches = itertools.chain.from_iterable(itertools.repeat(reader))
        for one in wanted:
            found = next(batches)
            assert_same_bits(found.image, one.image)
            assert np.array_equal(found.index, one.index)


sides = st.integers(1, 2000)
pairs = st.tuples(st.floats(0.01, 1), st.floats(0.01, 1)).map(lambda pair: tuple(sorted(pair)))
ratios = st.tuples(st.floats(0.1, 10), st.floats(0.1, 10)).map(lambda pair: tuple(sorted(pair)))


def one_box(height, width, scale, ratio, numbers):
    """Return what `random_boxes` does of one image, step by step."""
    low, high = math.log(ratio[0]), math.log(ratio[1])
    for number in range(10):
        area = height * width * (scale[0] + (scale[1] - scale[0]) * numbers[number])
        aspect = math.exp(low + (high - low) * numbers[10 + number])
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            return int(numbers[20] * (height - h + 1)), int(numbers[21] * (width - w + 1)), h, w
    h, w = height, width
    if width / height < ratio[0]:
        h = max(1, min(height, round(width / ratio[0])))
    elif width / height > ratio[1]:
        w = max(1, min(width, round(height * ratio[1])))
    return (height - h) // 2, (width - w) // 2, h, w


shapes = st.lists(st.tuples(sides, sides), min_size=1, max_size=20).map(np.array)


@given(shapes, pairs, ratios, st.integers(0, 1 << 40))
def test_random_boxes_lie_in_their_images_and_are_those_of_each_alone(shapes, scale, ratio, sample):
    numbers = random_numbers(3, 1, sample + np.arange(len(shapes)))
    assert ((numbers >= 0) & (numbers < 1)).all()
    boxes = random_boxes(*shapes.T, scale, ratio, numbers)
    assert (boxes[:, 2:] > 0).all()
    assert (boxes[:, :2] >= 0).all()
    assert (boxes[:, :2] + boxes[:, 2:] <= shapes).all()
    alone = zip(shapes.tolist(), numbers.tolist(), strict=True)
    assert boxes.tolist() == [[*one_box(*shape, scale, ratio, row)] for shape, row in alone]


def test_random_boxes_have_the_areas_and_ratios_asked_for():
    numbers = random_numbers(0, 0, np.arange(4000))
    sizes = np.full(4000, 1000), np.full(4000, 1200)
    boxes = random_boxes(*sizes, (0.2, 0.6), (0.5, 2), numbers)
    area = boxes[:, 2] * boxes[:, 3] / 1.2e6
    ratio = np.log2(boxes[:, 3] / boxes[:, 2])
    assert 0.199 < area.min() < 0.21
    assert 0.55 < area.max() < 0.601
    assert abs(area.mean() - 0.4) < 0.02
    assert -1.01 < ratio.min() < -0.9
    assert 0.9 < ratio.max() < 1.01
    assert abs(np.mean(are_flipped(numbers)) - 0.5) < 0.05


@given(shapes, st.tuples(st.integers(1, 300), st.integers(1, 300)))
def test_boxes_in_the_middle(shapes, size):
    boxes = center_boxes(*shapes.T, size)
    for (height, width), (top, left, h, w) in zip(shapes.tolist(), boxes.tolist(), strict=True):
        assert h == min(height, max(1, round(width * size[0] / size[1])))
        assert w == min(width, max(1, round(height * size[1] / size[0])))
        assert h == height or w == width
        assert (top, left) == ((height - h) // 2, (width - w) // 2)


GOOD = encoded((60, 80))
# Images that declare very many pixels in a few bytes.
BOMB = png(30_000, 30_000, 8, 2)
JPEG_BOMB = GOOD[: GOOD.index(b"\xff\xc0") + 5] + b"\xff\xdc\xff\xdc" + GOOD[-800:]
BROKEN = {
    "empty": (b"", "has no bytes"),
    "no image": (b"GIF89a" + bytes(90), "neither a JPEG nor a PNG"),
    "cut off": (GOOD[: len(GOOD) // 2], "its end is missing"),
    "a byte short": (GOOD[:-1], "its end is missing"),
    "cut off in its header": (GOOD[:30], "truncated before it"),
    "only the start": (GOOD[:3], "truncated before it"),
    "no markers": (GOOD[:2] + b"\xff\xe0\0\4" + bytes(50), "no marker at byte"),
    "no tables": (GOOD[:2] + GOOD[GOOD.index(b"\xff\xc0") :], "cannot be decoded"),
    "PNG cut off": (encoded(form="PNG")[:-40], "cannot be decoded"),
    "PNG's start": (encoded(form="PNG")[:20], "PNG without a header"),
    "PNG of no pixels": (png(0, 5, 8, 2), "has 5 x 0 pixels"),
}


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("threads", [0, 2])
def test_a_broken_image_names_file_dataset_and_sample(tmp_path, name, threads):
    data, words = BROKEN[name]
    paths = [write(tmp_path / "a.h5", [GOOD] * 5), write(tmp_path / "b.h5", [GOOD, data, GOOD])]
    where = rf'b\.h5: dataset "jpeg": the image of sample 6 \(sample 1 of this file\) .*{words}'
    for field in (ImageField("jpeg"), ImageField("jpeg", size=9)):
        with reading(paths, field, num_threads=threads) as reader:
            reader.get_next_batch()
            with pytest.raises(ReadError, match=where):
                reader.get_next_batch()
            assert reader.read([7]).image.shape[0] == 1  # it goes on
    zero = ImageField("jpeg", size=9, on_error="zero", offset=1)
    with reading(paths, zero, num_threads=threads, batch_size=8) as reader:
        image = reader.get_next_batch().image
        assert (image[6] == 1).all()
        assert (image[7] == image[0]).all()
        assert (image[0] != 1).any()
        assert reader.stats().broken_images >= 1


@pytest.mark.parametrize("data", [BOMB, JPEG_BOMB], ids=["PNG", "JPEG"])
@pytest.mark.parametrize("field", [ImageField("jpeg"), ImageField("jpeg", size=9)])
def test_declared_sizes_take_no_memory(tmp_path, data, field):
    path = write(tmp_path / "bomb.h5", [GOOD, data])
    with reading(path, field, max_batch_bytes=10_000_000, num_threads=1) as reader:
        with pytest.raises(ReadError, match=r"sample 1 declares .*set max_batch_bytes"):
            reader.get_next_batch()


def test_the_pixels_of_a_batch_are_bounded(tmp_path):
    path = write(tmp_path / "many.h5", [encoded((300, 300))] * 40)
    with reading(path, max_batch_bytes=2_000_000, batch_size=40, num_threads=1) as reader:
        with pytest.raises(ReadError, match="the others of its batch have 10,800,000 bytes"):
            reader.get_next_batch()
    with pytest.raises(BudgetError, match="make batch_size or prefetch smaller"):
        reading(path, ImageField("jpeg", size=300), max_batch_bytes=2_000_000, batch_size=40)


def test_memory_of_slots_is_used_again(equal):
    paths, _ = equal
    for field in (ImageField("jpeg"), ImageField("jpeg", size=8)):
        with reading(paths, field, prefetch=2) as reader:
            places = {
                batch.image.ctypes.data for _ in range(3) for batch in reader if batch.size == 4
            }
        assert len(places) <= 2


def test_postprocess_has_the_pixels(equal):
    paths, pixels = equal

    def means(image, label, rng):
        assert image.shape[1:] == (60, 80, 3)
        return image.mean((1, 2, 3)), label

    found, _ = all_of(paths, postprocess=means)
    assert np.allclose([found[i] for i in range(17)], [one.mean() for one in pixels])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"crop": "random"}, "needs size"),
        ({"on_error": "zero"}, "needs size"),
        ({"pad_to": 9}, "pad_to"),
        ({"size": 0}, "size"),
        ({"size": (3, 4, 5)}, "size"),
        ({"size": 9, "crop_scale": (0.5, 0.2)}, "lower bound first"),
        ({"size": 9, "crop_scale": (0.5, 2)}, "1 or less"),
        ({"size": 9, "crop_ratio": (0, 2)}, "crop_ratio"),
        ({"axes": (0, 1)}, "axes must have"),
        ({"axes": ("a", "b", "c", "d"), "num_dim": 0}, "axes must"),
        ({"decode_cf": True}, "decode_cf"),
        ({"steps": [0, 1]}, "steps"),
        ({"scale": 2, "dtype": "u1"}, "float dtype"),
        ({"sise": 9}, "did you mean 'size'"),
        ({"decode": "scaled"}, "needs size"),
        ({"decode": "scaled", "size": 9, "interpolation": "area"}, "interpolation"),
    ],
)
def test_options_that_do_not_fit(options, words):
    with pytest.raises(ConfigError, match=words):
        ImageField("jpeg", **options)


def test_factors_of_another_number_are_refused_at_opening(equal):
    with pytest.raises(ConfigError, match='images of "jpeg": 2 values of scale'):
        reading(equal[0], ImageField("jpeg", size=9, axes=(0, 3, 1, 2), scale=(1, 2)))


def test_options_in_a_toml_file(equal, tmp_path):
    text = f"""
        hdf5_path = "{equal[0][0]}"
        batch_size = 3
        fields.image = {{ path = "jpeg", kind = "image", size = [8, 9], crop = "random" }}
        fields.label = "labels"
    """
    (tmp_path / "options.toml").write_text(text)
    with AsyncReader(tmp_path / "options.toml") as reader:
        assert reader.get_next_batch().image.shape == (3, 8, 9, 3)


def test_without_opencv_the_error_names_the_package(equal, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "cv2", None)
    with pytest.raises(MissingPackageError, match="pip install opencv-python-headless"):
        reading(equal[0], ImageField("jpeg", size=9))
    assert len(all_of(equal[0])[0]) == 17  # decoding needs none


def test_without_libjpeg_the_error_names_the_package(equal, monkeypatch):
    core = load_core()
    if core is not None:
        monkeypatch.setattr(core, "missing", core.missing | {"jpeg"})
        for found, pixels in zip(all_of(equal[0])[1], (equal[1][:4], equal[1][4:8]), strict=False):
            assert_same_bits(found, np.stack(pixels))
    with pytest.raises(MissingPackageError, match="wheels of imagecodecs"):
        reading(equal[0], ImageField("jpeg", size=9, decode="scaled"))


def test_datasets_of_other_values_are_refused(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("words", (2,), h5py.vlen_dtype("i4"))
        file["flat"] = np.zeros((9, 2))
        file["ends"] = [3, 9]
    for field in (ImageField("words"), ImageField("flat", offsets="ends", offsets_kind="ends")):
        with pytest.raises(DatasetError, match="images are bytes"):
            AsyncReader(hdf5_path=tmp_path / "a.h5", fields={"x": field})


def test_a_mask_of_steps_and_images_do_not_mix(equal):
    fields = {"x": ImageField("jpeg"), "y": Field("labels", steps=[0, 1], pad="edge")}
    with AsyncReader(hdf5_path=equal[0], fields=fields, batch_size=2) as reader:
        batch = reader.get_next_batch()
        assert batch.x.shape == (2, 60, 80, 3)
        assert batch.y.tolist() == [[0, 1], [1, 2]]


def test_damaged_bytes_are_what_pillow_makes_of_them_or_an_error():
    rng = np.random.default_rng(0)
    for number in range(300):
        data = bytearray(encoded((20, 30), form="JPEG", seed=number % 4))
        for _ in range(rng.integers(1, 4)):
            data[rng.integers(0, len(data))] = rng.integers(0, 256)
        try:
            array = np.frombuffer(data, np.uint8)
            header = read_header(array)
            if header.nbytes > 1 << 24:
                continue
            out = np.empty(header.shape, np.uint8)
            decode_rgb(array, header, out)
        except ValueError:
            continue
        assert_same_bits(out, by_pillow(bytes(data)))


SCALED = {"decode": "scaled", "crop": "random", "flip": True}
KINDS = [("JPEG", *one) for one in JPEGS] + [("PNG", "RGB", {})]
SUBSAMPLINGS = [("JPEG", "RGB", {"subsampling": s, "progressive": s == 1}) for s in (0, 1, 2)]


def shapes_and_kinds(most, seed=0):
    """Return images of all kinds, of sizes from one pixel to `most`."""
    rng = np.random.default_rng(seed)
    sizes = [(1, 1), (1, most), (most, 2), *rng.integers(1, most, (40, 2)).tolist()]
    kinds = itertools.cycle(KINDS + SUBSAMPLINGS)
    return [
        encoded(tuple(size), mode, form, number, **how)
        for number, (size, (form, mode, how)) in enumerate(zip(sizes, kinds, strict=False))
    ]


needs_core = pytest.mark.skipif(load_core() is None, reason="needs the compiled core")


@needs_core
@pytest.mark.parametrize("how", [{}, {"axes": (0, 3, 1, 2), "scale": 1 / 255}], ids=["u1", "f4"])
@pytest.mark.parametrize("seed", range(2))
def test_parts_that_do_not_shrink_to_half_are_decoded_to_the_same_pixels(tmp_path, how, seed):
    path = write(tmp_path / "a.h5", shapes_and_kinds(90, seed))
    given = {"size": (46, 61), "interpolation": "linear", "crop_scale": (0.01, 1), **how}
    for options in ({}, {"num_threads": 0, "batch_size": 7}):
        full, _ = all_of(
            path, ImageField("jpeg", **(SCALED | {"decode": "full"}), **given), **options
        )
        scaled, _ = all_of(path, ImageField("jpeg", **SCALED, **given), **options)
        for number in full:
            assert_same_bits(scaled[number], full[number])


@needs_core
def test_random_parts_are_resized_and_flipped_as_by_opencv(tmp_path):
    images = shapes_and_kinds(120, 3)
    path = write(tmp_path / "a.h5", images)
    numbers = random_numbers(0, 0, np.arange(len(images)))
    pixels = [by_pillow(one) for one in images]
    shapes = np.array([one.shape[:2] for one in pixels])
    boxes = random_boxes(*shapes.T, (0.08, 1.0), (3 / 4, 4 / 3), numbers).tolist()
    field = ImageField(
        "jpeg", size=(40, 50), **(SCALED | {"decode": "full"}), interpolation="linear"
    )
    found, _ = all_of(path, field, seed=0)
    for n, ((top, left, height, width), is_flipped) in enumerate(
        zip(boxes, are_flipped(numbers).tolist(), strict=True)
    ):
        wanted = cv2.resize(pixels[n][top : top + height, left : left + width], (50, 40))
        assert_same_bits(found[n], cv2.flip(wanted, 1) if is_flipped else wanted)


@needs_core
@pytest.mark.parametrize("kind", SUBSAMPLINGS + KINDS[:2], ids=lambda kind: str(kind[2]))
@pytest.mark.parametrize("shape", [(200, 340), (331, 257), (700, 530)])
def test_parts_that_shrink_are_near_those_of_whole_images(tmp_path, kind, shape):
    images = [encoded(shape, kind[1], kind[0], seed, **kind[2]) for seed in range(4)]
    path = write(tmp_path / "a.h5", images)
    given = {"size": 60, "crop_scale": (0.5, 1)}
    full, _ = all_of(path, ImageField("jpeg", **(SCALED | {"decode": "full"}), **given))
    scaled, _ = all_of(path, ImageField("jpeg", **SCALED, **given))
    for number in full:
        apart = np.abs(full[number].astype(int) - scaled[number])
        assert apart.mean() < 1.5
        assert apart.max() < 25


@needs_core
def test_damaged_images_are_decoded_to_the_same_parts_or_refused(tmp_path):
    rng, images = np.random.default_rng(0), []
    for number in range(120):
        kind = (KINDS + SUBSAMPLINGS)[number % 14]
        data = bytearray(encoded((60, 80), kind[1], kind[0], number, **kind[2]))
        for _ in range(rng.integers(1, 4)):
            data[rng.integers(20, len(data))] = rng.integers(0, 256)
        images.append(
            bytes(data[: rng.integers(20, len(data))]) if number % 5 == 0 else bytes(data)
        )
    path = write(tmp_path / "a.h5", images)
    given = {"size": 50, "on_error": "zero", "interpolation": "linear"}
    limit = {"max_batch_bytes": 200_000_000, "num_threads": 2}
    full, _ = all_of(path, ImageField("jpeg", **(SCALED | {"decode": "full"}), **given), **limit)
    scaled, _ = all_of(path, ImageField("jpeg", **SCALED, **given), **limit)
    apart = [n for n in full if not np.array_equal(full[n], scaled[n])]
    shrunk = [n for n in apart if full[n].any()]  # else the damage lies below the part
    for number in shrunk:
        header = read_header(np.frombuffer(images[number], np.uint8))
        assert max(header.height, header.width) >= 2 * 50
    assert len(apart) < 12


@needs_core
def test_steps_of_scaled_images(mixed):
    steps = {"size": 20, "steps": range(-1, 2), "pad": "edge", "interpolation": "linear"}
    full, _ = all_of(mixed[0], ImageField("jpeg", crop="random", **steps))
    scaled, _ = all_of(mixed[0], ImageField("jpeg", crop="random", decode="scaled", **steps))
    for number in full:
        assert_same_bits(scaled[number], full[number])


def test_the_next_batch_is_read_before_all_images_of_one_are_decoded(equal, monkeypatch, core):
    parts, decoded, begun = threading.local(), [], threading.Event()
    work, batch = DecodedBatch.work, BatchDecoder.batch
    owner, name = (imagekind, "decode_rgb") if core is None else (Core, "decode_pictures")
    decode = getattr(owner, name)

    def noted_work(self, must_end, end):
        parts.is_half = end < len(self.works)
        work(self, must_end, end)

    def noted_batch(self, arrays, index, *others):
        if index[0] == 8:
            begun.count = len(decoded)
            begun.set()
        return batch(self, arrays, index, *others)

    def slow_decode(*args):
        if not parts.is_half:  # that thread is kept, until the other one has begun the next batch
            assert begun.wait(60)
        decoded.append(0)
        return decode(*args)

    monkeypatch.setattr(DecodedBatch, "work", noted_work)
    monkeypatch.setattr(BatchDecoder, "batch", noted_batch)
    monkeypatch.setattr(owner, name, slow_decode)
    with reading(equal[0], batch_size=8, num_threads=2, prefetch=3) as reader:
        for number, one in enumerate(itertools.islice(reader, 2)):
            for image, pixels in zip(one.image, equal[1][8 * number :], strict=False):
                assert_same_bits(image, pixels)
    assert begun.count <= 4


def test_lifetimes_and_copies(mixed, equal):
    for path, pixels in ((mixed[0], mixed[1]), equal):
        with reading(path, debug_lifetimes=True) as reader:
            kept = [batch.copy() for batch in reader]
        with reading(path, copy=True) as reader:
            batches = list(reader)
        for batch in (*kept, *batches):
            for image, number in zip(batch.image, batch.index.tolist(), strict=True):
                assert_same_bits(image, pixels[number])


def test_tensors_of_images(equal):
    pytest.importorskip("torch")
    from h5async.torch import H5Dataset

    field = ImageField("jpeg", size=9, axes=(0, 3, 1, 2), scale=1 / 255)
    fields = {"image": field, "label": "labels"}
    dataset = H5Dataset(hdf5_path=equal[0], fields=fields, batch_size=5, as_tuple=True)
    for image, label in dataset:
        assert tuple(image.shape) == (len(label), 3, 9, 9)
        assert str(image.dtype) == "torch.float32"


def test_tensors_of_images_of_differing_sizes_are_refused(tmp_path):
    torch = pytest.importorskip("h5async.torch")
    images = [encode_png(np.zeros((n, 4, 3), "u1")) for n in (3, 5)]
    with h5py.File(tmp_path / "a.h5", "w") as file:
        jpeg = file.create_dataset("jpeg", (2,), h5py.vlen_dtype("u1"))
        for number, image in enumerate(images):
            jpeg[number] = np.frombuffer(image, "u1")
    options = {"fields": {"image": ImageField("jpeg")}, "device": "cpu", "batch_size": 2}
    dataset = torch.H5Dataset(hdf5_path=tmp_path / "a.h5", **options)
    with pytest.raises(
        DatasetError, match=r"'image': images of differing sizes.*give the field a size"
    ):
        list(dataset)
    dataset.close()
