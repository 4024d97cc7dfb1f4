"""Defines the kind of image fields, whose pixels are decoded, cropped and resized.

Encoded images enter, as `Ragged` bytes; an array of pixels leaves, or `Images` if sizes differ. An
image that several samples of a batch share through their steps is decoded once.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from h5async.codec.imageformats import (
    CHANNELS,
    MOST_NBYTES,
    ImageHeader,
    decode_rgb,
    header_rows,
    read_header,
)
from h5async.config import Field, ImageField
from h5async.core.binding import PICTURE_NUMBERS, Core, address
from h5async.errors import DamagedError, MissingPackageError, ReadError, needs_package
from h5async.index.layout import DatasetLayout
from h5async.io.shared import Growing, plain_memory
from h5async.order.rows import StepSpans
from h5async.plan.crops import are_flipped, center_boxes, random_boxes
from h5async.plan.records import Int64s
from h5async.plan.transform import RowTransform, Transformer, factor_of, transformer
from h5async.samples.fieldkind import (
    IMAGE,
    CanTransform,
    DecodingWork,
    EncodedBatch,
    EncodedKind,
    FieldDecoder,
    FieldKind,
    Outline,
    Rows,
    Transforms,
)
from h5async.samples.ragged import Images, Ragged

# The shrinking factor above which areas are averaged: above 2, linear resizing skips pixels.
_AREA_ABOVE = {"auto": 2.0, "area": 0.0, "linear": math.inf}
_MOST_DENOMINATOR = 8  # of the scales at which libjpeg decodes
# A call of the core decodes a group of images: 4 ms of work, or less so that threads share a batch.
_GROUP_PIXELS, _GROUPS = 1_200_000, 8
# Members of `Picture` in core/src/jpeg.c; `_SIZES`: height and width, encoded and delivered.
_OUT, _IMAGE, _SIZES = 8, 13, np.array([[2, 3], [9, 10]])
_REMEDY = 'mend the file, leave the sample out by indices, or set on_error="zero" and a size'


class ImageKind(EncodedKind):
    """Encoded images."""

    of: ClassVar[type[Field]] = ImageField
    found_as = IMAGE
    field: ImageField

    def outline(self, transforms: Transforms, can_transform: CanTransform) -> Outline:
        """Return how the field is assembled; a device transforms pixels of one size if it can."""
        outline, field = super().outline(transforms, can_transform), self.field
        if can_transform is None or field.size is None or field.steps is not None:
            return outline
        pixels = _pixel_transform(field, (*field.size, CHANNELS))
        if pixels.is_identity or not can_transform(pixels):
            return outline
        return outline._replace(pixels=pixels, is_left=True)

    def decoded_nbytes(self, rows: int) -> int:
        """Return the bytes of resized images, and of their steps; 0 if they keep their sizes."""
        field = self.field
        if field.size is None:
            return 0
        steps = 1 if field.steps is None else len(field.steps)
        return rows * steps * _pixel_transform(field, (*field.size, CHANNELS)).nbytes

    @property
    def as_decoded(self) -> FieldKind:
        """The images without the transform of pixels, which a device applies."""
        as_decoded = {"axes": None, "dtype": None, "scale": None, "offset": None}
        return ImageKind(self.name, self.field.model_copy(update=as_decoded))

    def channel_axis(self, transform: RowTransform) -> int:
        """Return the channel dimension of delivered pixels."""
        return _channel_of(self.field)

    def decoder(
        self, layout: DatasetLayout, rows: Rows, core: Core | None, limit_nbytes: int
    ) -> FieldDecoder:
        """Return the decoder; MissingPackageError if OpenCV is needed and not installed."""
        return _ImageDecoder(self.field, layout, rows, core, limit_nbytes)


class _Found(NamedTuple):
    """The images of a batch; one that several steps share is there once.

    Image i goes to `places[first[i] : first[i + 1]]` of `outs`, each with its row of `cuts`.
    """

    encoded: Ragged
    headers: Int64s
    runs: Int64s
    places: Int64s
    first: Int64s
    outs: Any
    cuts: Int64s


class _Scratch(threading.local):
    """Scratch memory of the calling thread."""

    def __init__(self) -> None:
        self.decoded, self.resized = Growing(plain_memory), Growing(plain_memory)


class _ImageDecoder(FieldDecoder):
    def __init__(
        self,
        field: ImageField,
        layout: DatasetLayout,
        rows: Rows,
        core: Core | None,
        limit_nbytes: int,
    ) -> None:
        super().__init__("image", layout, rows)
        self._field = field
        self._limit_nbytes = limit_nbytes
        self.is_random = field.flip or field.crop == "random"
        self._replaces = field.on_error == "zero" and field.size is not None
        self._is_plain = _pixel_transform(field, (1, 1, CHANNELS)).is_identity
        self._core = core
        self._own = _Scratch()
        if field.size is not None or field.flip:
            with needs_package("opencv-python-headless", "images that are resized or flipped"):
                import cv2
            self._cv2: Any = cv2
        if field.decode == "scaled" and (core is None or "jpeg" in core.missing):
            raise MissingPackageError(
                'decode="scaled" needs the compiled core of h5async, and libjpeg-turbo as a shared'
                " library, which wheels of imagecodecs have; install both from wheels for this"
                ' platform, or use decode="full"'
            )
        # Transforms by shape of pixels. Shapes repeat, but there may be very many.
        self._transforms = lru_cache(256)(partial(_transforms, field, core))

    def begin(self, batch: EncodedBatch) -> tuple[Any, list[DecodingWork]]:
        """Return the array or `Images` of a batch, and the work that fills it with pixels."""
        index, numbers = batch.samples, batch.numbers
        values = np.ascontiguousarray(batch.encoded.values.view(np.uint8))
        encoded = Ragged(values, np.ascontiguousarray(batch.encoded.offsets))
        runs: Int64s = index
        images: Int64s = np.arange(index.size)  # the image of each place
        places, first, missing = images, np.arange(index.size + 1), images[:0]
        if isinstance(self._spans, StepSpans):
            runs, images = self._spans.places(index)
            places = np.argsort(images, axis=None, kind="stable")  # by image, missing ones first
            first = np.searchsorted(images.ravel()[places], np.arange(runs.size + 1))
            places, missing, first = places[first[0] :], places[: first[0]], first - first[0]
        headers = self._headers(encoded, runs, batch.refuse)
        if self._field.size is None:
            delivered = outs = self._unsized(headers, batch)
        else:
            transform, _ = self._transforms((*self._field.size, CHANNELS))
            block = batch.empty(transform.nbytes * images.size)
            delivered = np.ndarray((*images.shape, *transform.row), transform.dtype, block)
            outs = delivered.reshape(-1, *transform.row)
        if numbers is not None and images.ndim > 1:  # the same for all steps of a sample
            numbers = np.repeat(numbers, math.prod(images.shape[1:]), axis=0)
        numbers = None if numbers is None else numbers[places]
        cuts = self._cuts(headers[images.ravel()[places]], numbers)
        found = _Found(encoded, headers, runs, places, first, outs, cuts)
        works = self._works(found)
        if missing.size:
            works.append(partial(self._blacken, [outs[place] for place in missing.tolist()]))
        return delivered, works

    def _works(self, found: _Found) -> list[DecodingWork]:
        pictures = self._pictures(found)
        is_left = np.ones(found.runs.size, np.bool_)
        is_left[pictures[:, _IMAGE]] = False
        several = np.flatnonzero(is_left).tolist()
        works: list[DecodingWork] = [partial(self._alone, found, one) for one in several]
        if len(pictures):
            sizes = pictures[:, _SIZES].prod(axis=2).max(axis=1)
            most = min(_GROUP_PIXELS, int(sizes.sum()) // _GROUPS + 1)
            ends = np.flatnonzero(np.diff(np.cumsum(sizes) // most)) + 1
            groups = np.split(pictures, ends)
            works += [partial(self._decode_group, found, group) for group in groups]
        return works

    def _unsized(self, headers: Int64s, batch: EncodedBatch) -> Any:
        shapes, index, most_nbytes = headers[:, 1:3], batch.samples, batch.most_nbytes
        if not index.size:  # all were left out: any size will do
            shapes = np.ones((1, 2), np.int64)
        are_equal = bool((shapes == shapes[0]).all())
        kinds = shapes[:1] if are_equal else shapes
        transforms = [self._transforms((*shape, CHANNELS))[0] for shape in kinds.tolist()]
        first, total = transforms[0], sum(transform.nbytes for transform in transforms)
        total = index.size * total if are_equal else total
        if total > most_nbytes:
            raise ReadError(
                f"{self._where(int(index[0]))} and the others of its batch have"
                f" {total:,} bytes of pixels, more than the {most_nbytes:,} that they may"
                " take; make batch_size smaller, give a size, or set max_batch_bytes if you trust"
                " the file"
            )
        block = batch.empty(total)
        if are_equal:
            return np.ndarray((index.size, *first.row), first.dtype, block)
        offsets = np.cumsum([0, *(math.prod(transform.row) for transform in transforms)])
        rows = np.array([transform.row for transform in transforms], np.int64)
        return Images(block.view(first.dtype), offsets, rows)

    def _headers(
        self, encoded: Ragged, runs: Int64s, refuse: Callable[[DamagedError], None]
    ) -> Int64s:
        """Return the headers of images as rows; zeros for images to be replaced.

        Images that are broken or too large are refused unless they are to be replaced.
        """
        values, offsets, core = encoded.values, encoded.offsets, self._core
        if core is None:
            rows = header_rows(values, offsets)
        else:
            rows = np.empty((runs.size, len(ImageHeader._fields)), np.int64)
            core.image_headers(*map(address, (values, offsets, rows)), values.size, runs.size)
        nbytes = rows[:, 1].astype(np.float64) * rows[:, 2] * MOST_NBYTES
        is_strange = (nbytes == 0) | (nbytes > self._limit_nbytes)
        for number in np.flatnonzero(is_strange).tolist():
            try:
                rows[number] = self._header(encoded[number], int(runs[number]))
            except DamagedError as error:
                if not self._replaces:
                    refuse(error)
                rows[number] = 0
        return rows

    def _cuts(self, headers: Int64s, numbers: NDArray[np.float64] | None) -> Int64s:
        """Return the part of an image to be delivered to each place, int64 (places, 7).

        Its numbers are bounds (top, bottom, left, right), OpenCV's interpolation, whether it is
        flipped, and, if only the part is to be decoded, the denominator of the scale that suffices.
        `headers` has a row per place; `numbers` has rows of `random_numbers`, if needed.
        """
        field = self._field
        cuts = np.zeros((len(headers), 7), np.int64)
        heights, widths = np.maximum(headers[:, 1:3].T, 1)  # 0 for images to be replaced
        cuts[:, 1], cuts[:, 3] = heights, widths
        if field.size is not None:
            if field.crop == "center":
                boxes = center_boxes(heights, widths, field.size)
            else:
                assert numbers is not None
                bounds = field.crop_scale, field.crop_ratio
                boxes = random_boxes(heights, widths, *bounds, numbers)
            cuts[:, 0:4:2] = boxes[:, :2]
            cuts[:, 1:4:2] = boxes[:, :2] + boxes[:, 2:]
            shrinks = boxes[:, 2:] / field.size
            by_area = shrinks.max(axis=1) > _AREA_ABOVE[field.interpolation]
            cuts[:, 4] = np.where(by_area, self._cv2.INTER_AREA, self._cv2.INTER_LINEAR)
            if field.decode == "scaled":
                least = np.clip(shrinks.min(axis=1), 1, _MOST_DENOMINATOR)
                cuts[:, 6] = 2 ** np.floor(np.log2(least)).astype(np.int64)
        if field.flip:
            assert numbers is not None
            cuts[:, 5] = are_flipped(numbers)
        return cuts

    def _pictures(self, found: _Found) -> Int64s:
        field, headers, core = self._field, found.headers, self._core
        is_alone = np.diff(found.first) == 1  # in one place; others are decoded once for all places
        is_taken = is_alone & (headers[:, 4] == 8)
        is_taken &= (headers[:, 3] == 1) | (headers[:, 3] == CHANNELS)  # components
        if core is None or "jpeg" in core.missing or not (self._is_plain or field.size):
            is_taken[:] = False
        cuts = found.cuts[np.minimum(found.first[:-1], len(found.cuts) - 1)]
        if field.size is not None and field.decode == "full":
            is_taken &= cuts[:, 4] == self._cv2.INTER_LINEAR
        images = np.flatnonzero(is_taken)
        cuts, headers = cuts[images], headers[images]
        pictures = np.empty((images.size, PICTURE_NUMBERS), np.int64)
        begins, ends = found.encoded.offsets[images], found.encoded.offsets[images + 1]
        pictures[:, _IMAGE] = images
        pictures[:, 0] = address(found.encoded.values) + begins
        pictures[:, 1], pictures[:, 2:4] = ends - begins, headers[:, 1:3]
        pictures[:, 4:8], pictures[:, 11:13] = cuts[:, :4], cuts[:, 5:]
        pictures[:, 9:11] = headers[:, 1:3] if field.size is None else field.size
        if self._is_plain:
            places, outs = found.places[found.first[images]], found.outs
            is_array = isinstance(outs, np.ndarray)
            offsets = places * outs.strides[0] if is_array else outs.offsets[places]
            pictures[:, _OUT] = address(outs if is_array else outs.values) + offsets
        return pictures

    def _decode_group(self, found: _Found, pictures: Int64s) -> list[DecodingWork]:
        assert self._core is not None
        images, size = pictures[:, _IMAGE], self._field.size
        if not self._is_plain:
            assert size is not None
            pixels = _image(self._own.resized, (images.size, *size, CHANNELS))
            pictures[:, _OUT] = address(pixels) + np.arange(images.size) * pixels[0].nbytes
        is_done = self._core.decode_pictures(pictures)
        assert is_done is not None
        if not self._is_plain:
            apply = self._transforms(pixels.shape[1:])[1]
            places = found.places[found.first[images]]
            for some in np.split(np.arange(images.size), np.flatnonzero(np.diff(places) != 1) + 1):
                a, b = places[some[0]], places[some[-1]] + 1
                apply(pixels[some[0] : some[-1] + 1], found.outs[a:b], np.zeros(b - a, np.int64))
        return [partial(self._alone, found, one) for one in images[~is_done].tolist()]

    def _alone(self, found: _Found, image: int) -> bool:
        """Decode one image into all its places; False if it was replaced."""
        a, b = found.first[image : image + 2].tolist()
        outs = [found.outs[place] for place in found.places[a:b].tolist()]
        header = ImageHeader._make(found.headers[image].tolist())
        data, cuts = found.encoded[image], found.cuts[a:b].tolist()
        return self._decode(data, header, outs, cuts, found.runs[image])

    def _decode(
        self,
        data: NDArray[np.uint8],
        header: ImageHeader,
        outs: Sequence[NDArray[Any]],
        cuts: Sequence[list[int]],
        run: np.int64,
    ) -> bool:
        """Decode an image into its places, each with its own cut; False if it was replaced.

        Raises `ReadError` if it is broken, and not to be replaced.
        """
        first = outs[0]
        goes_there = self._is_plain and self._field.size is None
        try:
            if not header.height:
                raise ValueError("has no header")
            pixels = first if goes_there else _image(self._own.decoded, header.shape)
            decode_rgb(data, header, pixels)
        except ValueError as error:
            if not self._replaces:
                raise self.broken(int(run), f"{error}; {_REMEDY}") from error
            return not self._blacken(outs)
        for out, cut in zip(outs, cuts, strict=True):
            if out is not first and not self.is_random:
                np.copyto(out, first)
                continue
            part = self._cut(pixels, out, cut)
            if part is not out:
                self._deliver(part, out)
        return True

    def _cut(
        self, pixels: NDArray[np.uint8], out: NDArray[Any], cut: list[int]
    ) -> NDArray[np.uint8]:
        """Cut, resize and flip decoded pixels; return the result, in `out` if it is final."""
        top, bottom, left, right, how, is_flipped, _ = cut
        size = self._field.size
        if size is not None:
            part, shape = pixels[top:bottom, left:right], (*size, CHANNELS)
            pixels = out if self._is_plain else _image(self._own.resized, shape)
            self._cv2.resize(part, size[::-1], pixels, 0, 0, how)
        if is_flipped:
            self._cv2.flip(pixels, 1, pixels)
        return pixels

    def _blacken(self, several: Sequence[NDArray[Any]]) -> bool:
        """Deliver black images of the field's size; return True."""
        assert self._field.size is not None
        pixels = np.zeros((*self._field.size, CHANNELS), np.uint8)
        for out in several:
            self._deliver(pixels, out)
        return True

    def _header(self, data: NDArray[np.uint8], sample: int) -> ImageHeader:
        try:
            header = read_header(data)
        except ValueError as error:
            raise self.broken(sample, f"{error}; {_REMEDY}") from error
        if header.nbytes > self._limit_nbytes:
            raise self.broken(
                sample,
                f"declares {header.height:,} x {header.width:,} pixels, which"
                f" take {header.nbytes:,} bytes, more than the {self._limit_nbytes:,} that a thread"
                " may take for one; set max_batch_bytes if you trust the file",
            )
        return header

    def _deliver(self, pixels: NDArray[np.uint8], out: NDArray[Any]) -> None:
        if self._is_plain:
            np.copyto(out, pixels)
        else:
            apply = self._transforms(pixels.shape)[1]
            apply(pixels[np.newaxis], out[np.newaxis], np.zeros(1, np.int64))


def _pixel_transform(field: ImageField, shape: tuple[int, int, int]) -> RowTransform:
    """Return the transform of decoded images of a shape, from the options of their field.

    Raises `ConfigError` if the length of a scale or offset is not the number of channels.
    """
    axes = field.axes or (0, 1, 2, 3)
    order = tuple(axis for axis in axes if isinstance(axis, int))
    row = tuple(shape[axis - 1] for axis in order[1:])
    dtype = np.dtype(np.uint8) if field.delivered_dtype is None else field.delivered_dtype
    where, channel = f'images of "{field.path}"', _channel_of(field)
    return RowTransform(
        raw_row=shape,
        raw_dtype=np.dtype(np.uint8),
        row=row,
        dtype=dtype,
        permutation=order,
        scale=factor_of(field.scale, row, dtype, where, channel),
        offset=factor_of(field.offset, row, dtype, where, channel),
    )


def _channel_of(field: ImageField) -> int:
    dimension = 3 if field.channel_dim is None else field.channel_dim
    return (field.axes or (0, 1, 2, 3)).index(dimension) - 1


def _transforms(
    field: ImageField, core: Core | None, shape: tuple[int, int, int]
) -> tuple[RowTransform, Transformer]:
    transform = _pixel_transform(field, shape)
    return transform, transformer(core, transform)


def _image(memory: Growing, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    found: NDArray[np.uint8] = memory.of(math.prod(shape)).reshape(shape)
    return found
