"""Decodes JPEG and PNG images to the same RGB pixels as Pillow.

The header is read first, so that a caller knows how much memory an image needs before it is
allocated. Decoding releases the GIL.
"""

from __future__ import annotations

import itertools
import logging
import re
import struct
import threading
from typing import Any, NamedTuple

import imagecodecs
import numpy as np
from numpy.typing import NDArray

from h5async.system.interruptions import suppressing

_log = logging.getLogger("h5async.images")

_PNG = b"\x89PNG\r\n\x1a\n"
_COLOR_TYPE = 25  # the offset of the colour type in a PNG
_JPEG, _END = b"\xff\xd8\xff", 0xD9
_MARKER = re.compile(rb"\xff[^\x00\x01\xd0-\xd8\xff]", re.DOTALL)  # with a length, or the end
_STAND_ALONE = (0x01, *range(0xD0, 0xD9))  # markers of JPEG without a length
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
CHANNELS = 3
MOST_NBYTES = 513  # the maximum per pixel while decoding any image; see `ImageHeader.nbytes`
_CMYK_NBYTES = 44  # per pixel: itself, and the arrays from which RGB is computed


class ImageHeader(NamedTuple):
    """The properties of an image in its header."""

    is_png: bool
    height: int  # in pixels, 1 or more
    width: int
    components: int  # of a JPEG: 1 (grey), 3 (colour) or 4 (CMYK); 0 for a PNG
    depth: int  # bits of each sample of a pixel

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape of the decoded pixels."""
        return self.height, self.width, CHANNELS

    @property
    def nbytes(self) -> int:
        """The maximum number of bytes allocated while the image is decoded."""
        if self.is_png:
            of_pixel = CHANNELS + (16 if self.depth > 8 else 4)  # 16-bit pixels and high bytes
        else:  # a progressive JPEG keeps coefficients of 16 bits
            of_pixel = CHANNELS + 2 * max(CHANNELS, self.components)
        if self.components == 4:
            of_pixel += _CMYK_NBYTES
        return self.height * self.width * of_pixel


def read_header(data: NDArray[np.uint8]) -> ImageHeader:
    """Read the header of an image.

    `ValueError` is raised if it is not an image, or damaged; its message continues "the image".
    """
    if not data.size:
        raise ValueError("has no bytes")
    start = data[:32].tobytes()
    if start.startswith(_PNG):
        if len(start) < 26 or start[12:16] != b"IHDR":
            raise ValueError("is a PNG without a header")
        width, height = struct.unpack(">II", start[16:24])
        return _checked(ImageHeader(True, height, width, 0, start[24]))
    if start.startswith(_JPEG):
        return _checked(_jpeg_header(data))
    raise ValueError(f"is neither a JPEG nor a PNG (its first bytes are {start[:8].hex(' ')})")


def header_rows(values: NDArray[np.uint8], offsets: NDArray[np.int64]) -> NDArray[np.int64]:
    """Read the headers of several images; the compiled core's `image_headers` does the same.

    Returns int64 (n, 5): an `ImageHeader` per image, or zeros if `read_header` would raise.
    """
    rows = np.zeros((offsets.size - 1, len(ImageHeader._fields)), np.int64)
    for row, (begin, end) in zip(rows, itertools.pairwise(offsets.tolist()), strict=True):
        with suppressing(ValueError):
            row[:] = read_header(values[begin:end])
    return rows


def _checked(header: ImageHeader) -> ImageHeader:
    if not header.height or not header.width:
        raise ValueError(f"has {header.height} x {header.width} pixels")
    return header


def _jpeg_header(array: NDArray[np.uint8]) -> ImageHeader:
    data = array.data
    at, end = 2, len(data)
    while at + 4 <= end:
        if data[at] != 0xFF:
            raise ValueError(f"is a damaged JPEG: there is no marker at byte {at:,}")
        marker = data[at + 1]
        if marker == 0xFF:  # padding
            at += 1
        elif marker in _STAND_ALONE:
            at += 2
        elif marker in _FRAMES:
            if at + 10 > end:
                break
            depth, height, width, components = struct.unpack(">BHHB", data[at + 4 : at + 10])
            _check_end(data, at)
            return ImageHeader(False, height, width, components, depth)
        else:
            at += 2 + int.from_bytes(data[at + 2 : at + 4], "big")
    raise ValueError("is a JPEG without a frame, or truncated before it")


def _check_end(data: memoryview, at: int) -> None:
    """Check that a JPEG has its end marker: the decoder would fill the missing rest with grey."""
    while (found := _MARKER.search(data, at)) is not None:
        at = found.start()
        if data[at + 1] == _END:
            return
        at += 2 + int.from_bytes(data[at + 2 : at + 4], "big") if at + 4 <= len(data) else len(data)
    raise ValueError("is a truncated JPEG: its end is missing")


def decode_rgb(data: NDArray[np.uint8], header: ImageHeader, out: NDArray[np.uint8]) -> None:
    """Decode an image with this header into `out`: uint8 of the header's shape, C-contiguous.

    `ValueError` is raised if the image is damaged, or of an unsupported kind.
    """
    try:
        if header.is_png:
            _decode_png(data, header, out)
        elif header.components == 4:
            cmyk = imagecodecs.jpeg8_decode(data, outcolorspace="CMYK")
            _rgb_of_cmyk(cmyk, out)
        else:
            imagecodecs.jpeg8_decode(data, outcolorspace="RGB", out=out)
    except (imagecodecs.Jpeg8Error, imagecodecs.PngError, ValueError) as error:
        raise ValueError(f"cannot be decoded: {error}") from error


def _decode_png(data: NDArray[np.uint8], header: ImageHeader, out: NDArray[np.uint8]) -> None:
    _warnings.are_ours = True
    try:
        pixels: NDArray[Any] = imagecodecs.png_decode(data)
    finally:
        _warnings.are_ours = False
    if pixels.ndim == 2:
        pixels = pixels[..., np.newaxis]
    if pixels.shape[:2] != header.shape[:2]:
        raise ValueError(f"got {pixels.shape[:2]} pixels, but its header says {header.shape[:2]}")
    is_grey = pixels.shape[2] < CHANNELS
    if pixels.dtype == np.uint16:
        if not data[_COLOR_TYPE]:  # grey without alpha; Pillow treats grey with alpha like colours
            raise ValueError(
                "16-bit greyscale does not fit in 8 bits; store these images as arrays"
            )
        pixels = pixels >> 8
    # Like Pillow, drop transparency.
    np.copyto(out, pixels[..., :1] if is_grey else pixels[..., :CHANNELS], casting="unsafe")


class _Warnings(threading.local, logging.Filter):
    """Logs the first of libpng's warnings in this process as WARNING, and later ones as DEBUG.

    imagecodecs logs one for each image. Warnings about interlaced images are dropped.
    """

    are_ours = False  # whether warnings in the calling thread are from our decoding
    _count = itertools.count(1)

    def filter(self, record: logging.LogRecord) -> bool:
        if not self.are_ours:
            return True
        message = record.getMessage()
        if "Interlace handling" not in message:
            number = next(self._count)
            level = logging.WARNING if number == 1 else logging.DEBUG
            text = "an image was decoded, but: %s (libpng warning %d; later ones: level DEBUG)"
            _log.log(level, text, message, number)
        return False


_warnings = _Warnings()
logging.getLogger("imagecodecs").addFilter(_warnings)


def _rgb_of_cmyk(cmyk: NDArray[np.uint8], out: NDArray[np.uint8]) -> None:
    """Convert CMYK, stored inverted as Adobe does, with Pillow's integer arithmetic."""
    if (*cmyk.shape[:2], CHANNELS) != out.shape:
        raise ValueError(f"got pixels of shape {cmyk.shape}, but its header says {out.shape}")
    black = cmyk[..., 3:].astype(np.int32)
    product = (255 - cmyk[..., :3].astype(np.int32)) * black + 128
    np.copyto(out, np.maximum(black - (((product >> 8) + product) >> 8), 0), casting="unsafe")
