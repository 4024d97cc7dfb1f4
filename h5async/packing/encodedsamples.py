"""Prepares encoded samples for storage: bytes of files enter; bytes or pixels leave.

Bytes are kept if readers can decode them: JPEG, PNG, and audio that libsndfile reads. Pillow
converts other images to RGB, as torchvision's ``ImageFolder`` does; they are stored as PNG. All
functions are called by many threads.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from h5async.codec.imageformats import ImageHeader, decode_rgb, header_rows
from h5async.core.binding import address, load_core
from h5async.errors import needs_package
from h5async.io.shared import Growing, plain_memory
from h5async.packing.schema import Block, Values
from h5async.packing.writeoptions import image_format
from h5async.plan.crops import center_boxes

Bytes = NDArray[np.uint8]
_MOST_PIXELS = 178_956_970  # Pillow's limit, above which it suspects a decompression bomb
_IMAGES = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n")
_OF_GREY = (0, 4)  # PNG's grey colour types, without and with alpha
_COLOR_TYPE = 25  # the offset of the colour type in a PNG file
_AREA_ABOVE = 2.0  # as ImageField(interpolation="auto")


class Samples(NamedTuple):
    """How the encoded samples of a column are stored.

    `stored` returns the value to store for a sample, and whether Pillow converted it; it raises
    ValueError, with the reason, if the sample is bad. `shape` is that of pixels; None: bytes.
    """

    stored: Callable[[Any], tuple[Any, bool]]
    shape: tuple[int, int, int] | None = None


def samples_of(
    encoded: Mapping[str, str], size: tuple[int, int] | None, *, verifies: bool
) -> dict[str, Samples]:
    """Return how the samples of encoded columns are stored; `size` is that of resized images.

    Images that are not resized are decoded if `verifies`, to find damaged ones; otherwise only
    their headers and ends are checked.
    """
    found = {}
    for name, kind in encoded.items():
        if kind == "audio":
            with needs_package("soundfile", "recordings that are packed"):
                import soundfile
            found[name] = Samples(partial(_recording, soundfile))
        elif size is None:
            found[name] = Samples(partial(_kept_image, _Scratch() if verifies else None))
        else:
            with needs_package("opencv-python-headless", "images that are resized"):
                import cv2
            found[name] = Samples(partial(_resized_image, _Scratch(), cv2, size), (*size, 3))
    return found


def encoded_columns(block: Block, source: Mapping[str, str]) -> dict[str, str]:
    """Return the kinds of columns of encoded images or audio, by name.

    These are the ones declared by the source, and all columns of bytes that begin like JPEG or PNG.
    """
    found = {name: kind for name, kind in source.items() if name in block.columns}
    for name, values in block.columns.items():
        if name not in found and isinstance(values, list) and values:
            if all(isinstance(one, bytes) and one.startswith(_IMAGES) for one in values):
                found[name] = "image"
    return found


def made_block(block: Block, samples: Mapping[str, Samples]) -> Block:
    """Return a block with encoded samples in the form to store, without the bad ones."""
    for name, one in samples.items():
        stored: list[Any] = []
        refused: dict[int, str] = {}
        converted = 0
        for number, content in enumerate(block.columns[name]):
            try:
                value, is_converted = one.stored(content)
            except ValueError as error:
                refused[number] = str(error)
                continue
            stored.append(value)
            converted += is_converted
        kept = block.without(refused)
        values: Values = stored
        if one.shape is not None:
            values = np.array(stored, np.uint8).reshape(-1, *one.shape)
        columns = {**kept.columns, name: values}
        block = kept._replace(columns=columns, converted=block.converted + converted)
    return block


def _recording(soundfile: Any, content: Any) -> tuple[Any, bool]:
    """Return the bytes of encoded audio; ValueError if libsndfile cannot open them."""
    try:
        soundfile.SoundFile(io.BytesIO(memoryview(content))).close()
    except Exception as error:
        raise ValueError(f"libsndfile cannot open it: {error}") from error
    return content, False


def _kept_image(own: _Scratch | None, content: Any) -> tuple[Any, bool]:
    """Return the bytes of an image, or of its conversion to PNG."""
    header, data = header_of(content)
    if header is None or _has_grey_of_16_bits(header, data):
        return encoded_images([_by_pillow(data)], "png")[0], True
    if own is not None:
        _decoded(data, header, own)
    return data, False


def _resized_image(
    own: _Scratch, cv2: Any, size: tuple[int, int], content: Any
) -> tuple[Any, bool]:
    """Return center-cropped pixels, uint8 (height, width, 3), the same as ``ImageField(size)``."""
    header, data = header_of(content)
    pixels = _by_pillow(data) if header is None else _decoded(data, header, own)
    height, width = (np.array([one], np.int64) for one in pixels.shape[:2])
    ((top, left, h, w),) = center_boxes(height, width, size).tolist()
    how = cv2.INTER_AREA if max(h / size[0], w / size[1]) > _AREA_ABOVE else cv2.INTER_LINEAR
    out = np.empty((*size, 3), np.uint8)  # (without `out`, resize may return its input)
    cv2.resize(pixels[top : top + h, left : left + w], size[::-1], out, 0, 0, how)
    return out, False


class _Scratch(threading.local):
    """Thread-local memory for pixels."""

    def __init__(self) -> None:
        self.memory = Growing(plain_memory)


def header_of(content: Any) -> tuple[ImageHeader | None, Bytes]:
    """Return the header of an image (None if it is not a complete JPEG or PNG) and its bytes."""
    core, rows = load_core(), np.zeros((1, len(ImageHeader._fields)), np.int64)
    data, bounds = np.frombuffer(content, np.uint8), np.array([0, len(content)])
    if core is None:
        rows = header_rows(data, bounds)
    else:
        core.image_headers(address(data), address(bounds), address(rows), data.size, 1)
    (header,) = rows.tolist()
    return (ImageHeader._make(header) if header[1] else None), data


def _has_grey_of_16_bits(header: ImageHeader, data: Bytes) -> bool:
    return header.is_png and header.depth == 16 and int(data[_COLOR_TYPE]) in _OF_GREY


def _decoded(data: Bytes, header: ImageHeader, own: _Scratch) -> Bytes:
    """Return the pixels of an image, in the thread's memory; via Pillow if our decoder fails."""
    if header.height * header.width > _MOST_PIXELS:
        raise ValueError(f"it has {header.height:,} x {header.width:,} pixels, which is too many")
    pixels: Bytes = own.memory.of(header.height * header.width * 3).reshape(header.shape)
    try:
        decode_rgb(data, header, pixels)
    except ValueError:
        return _by_pillow(data)
    return pixels


def _by_pillow(data: Bytes) -> Bytes:
    """Return the pixels from Pillow's ``convert("RGB")``; ValueError if that fails."""
    with needs_package("pillow", "images that are neither JPEG nor PNG, or unusual ones,"):
        from PIL import Image, UnidentifiedImageError
    try:
        with Image.open(io.BytesIO(data.tobytes())) as image:
            return np.asarray(image.convert("RGB"))
    except Exception as error:
        first = data[:8].tobytes().hex(" ") or "none"
        # Pillow's text names the object that holds the bytes, by its address.
        is_unknown = isinstance(error, UnidentifiedImageError)
        found = "cannot identify the image" if is_unknown else str(error)
        raise ValueError(f"Pillow: {found} (the first bytes are {first})") from error


def encoded_images(images: Iterable[Bytes], spelled: str) -> list[Bytes]:
    """Return images, uint8 (height, width, 3), as encoded bytes."""
    import imagecodecs

    name, level = image_format(spelled)
    encode = imagecodecs.png_encode if name == "png" else imagecodecs.jpeg8_encode
    return [np.frombuffer(encode(one, level=level), np.uint8) for one in images]
