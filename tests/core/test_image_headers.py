"""Headers of images, by the core and by its twin in Python."""

from __future__ import annotations

import ctypes
import struct

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from h5async.codec.imageformats import ImageHeader, header_rows

# Pieces of which images are made, and what nearly is one.
JPEG, PNG, END = b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"\xff\xd9"
bytes_of_any = st.binary(max_size=40)
sizes = st.sampled_from([0, 1, 2, 255, 256, 65535, 1 << 31, (1 << 32) - 1]) | st.integers(0, 999)
markers = st.sampled_from([0, 1, 0xD0, 0xD8, 0xD9, 0xDA, 0xFF, 0xC4, 0xC8, 0xCC]) | st.integers(
    0, 255
)
frames = st.builds(
    lambda marker, *numbers: bytes([0xFF, marker]) + struct.pack(">HBHHB", *numbers),
    st.sampled_from([0xC0, 0xC1, 0xC2, 0xC4, 0xCF]),
    st.just(17),
    st.sampled_from([8, 12]),
    *[sizes.map(lambda size: size % 65536)] * 2,
    st.integers(0, 255),
)
segments = st.builds(
    lambda marker, body, more: bytes([0xFF, marker]) + struct.pack(">H", len(body) + more) + body,
    markers,
    bytes_of_any,
    st.sampled_from([2, 2, 2, 0, 3, 60000]),
)
alone = st.sampled_from([b"\xff", b"\xff\xff", b"\xff\xd0", b"\xff\x01", b"\xff\xd8"])
jpegs = st.builds(
    lambda start, parts, end: start + b"".join(parts) + end,
    st.sampled_from([JPEG[:2], JPEG]),
    st.lists(segments | alone | frames, max_size=6),
    st.sampled_from([b"", END, END[:1], END + b"\0", bytes(9) + END + bytes(9)]),
)
pngs = st.builds(
    lambda name, *numbers: PNG + struct.pack(">I4sII", 13, name, *numbers) + b"\x08\2\0\0\0",
    st.sampled_from([b"IHDR", b"IDAT"]),
    sizes,
    sizes,
)
whole = jpegs | pngs | bytes_of_any
images = whole | st.builds(lambda data, end: data[:end], whole, st.integers(0, 60))


def by_core(core, several, ends):
    """Return the rows of the core, which gets memory that is exactly as large as it says."""
    values = ctypes.create_string_buffer(b"".join(several), sum(map(len, several)) or 1)
    offsets = np.array(ends, np.int64)
    rows = np.full((len(ends) - 1, len(ImageHeader._fields)), 99, np.int64)
    done = core.image_headers(
        values, offsets.ctypes.data, rows.ctypes.data, sum(map(len, several)), len(rows)
    )
    assert done == len(rows)
    return rows


@given(several=st.lists(images, max_size=6))
@example(several=[b"", JPEG, PNG, JPEG + END, JPEG[:2] + END])
def test_the_core_and_its_twin_agree(core, several):
    ends = np.cumsum([0, *map(len, several)])
    wanted = header_rows(np.frombuffer(b"".join(several), np.uint8), ends)
    assert by_core(core, several, ends).tolist() == wanted.tolist()


@given(
    data=images, ends=st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(-2, 99), min_size=2)
)
def test_of_bytes_that_are_not_there_nothing_is_read(core, data, ends):
    for row, begin, end in zip(by_core(core, [data], ends), ends, ends[1:], strict=False):
        is_inside = 0 <= begin <= end <= len(data)
        image = data[begin:end] if is_inside else b""
        wanted = header_rows(np.frombuffer(image, np.uint8), np.array([0, len(image)]))
        assert row.tolist() == wanted[0].tolist()
