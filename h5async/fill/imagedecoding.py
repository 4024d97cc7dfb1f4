"""Decodes the images of a batch, in parallel in all threads, resizes and transforms them.

Encoded images enter, as `Ragged` bytes; arrays of pixels leave, or `Images` if sizes differ. Pixels
are in memory of the slot, which is allocated once if their size is known, and else grows with the
largest batch. If several samples of a batch share an image by their steps, it is decoded once.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

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
from h5async.core.binding import Core, address
from h5async.errors import DatasetError, ReadError, needs_package
from h5async.fill.reading import transformer
from h5async.index.layout import DatasetLayout
from h5async.io.shared import Growing, plain_memory
from h5async.order.spans import StepSpans
from h5async.plan.crops import are_flipped, center_boxes, random_boxes, random_numbers
from h5async.plan.transform import RowTransform, image_transform, sized_nbytes
from h5async.samples.columns import Rows, SlotMemory
from h5async.samples.images import Images
from h5async.samples.ragged import Ragged

# The shrinking factor above which all pixels are averaged: above 2, neighbours do not suffice.
_AREA_ABOVE = {"auto": 2.0, "area": 0.0, "linear": math.inf}

Empty = Callable[[int], NDArray[np.uint8]]  # returns new memory
ImageWork = Callable[[], bool]  # decodes an image; returns False if it was broken and replaced


class ImageDecoder:
    """Decodes the fields of batches that are images. Safe to use from many threads.

    Raises as `ImageFieldDecoder`.

    Parameters
    ----------
    fields, layouts
        By name; layouts of all columns.
    spans
        By column: the images of each sample.
    seed
        Of the reader.
    core
        The compiled core, if there is one.
    slots, rows
        Memory of the slots, and samples that fit into each.
    threads
        Threads that decode at the same time, in all processes.
    limit_nbytes
        The limit for pixels in all slots, and for the memory that decoding takes beside them.
    left
        Names of fields whose pixels a device transforms: batches have them as decoded.
    new_memory
        Returns host memory for the pixels of a slot.
    """

    def __init__(
        self,
        fields: Mapping[str, Field],
        layouts: Mapping[str, DatasetLayout],
        spans: Mapping[str, Rows],
        seed: int,
        core: Core | None,
        *,
        slots: Sequence[SlotMemory],
        rows: int,
        threads: int,
        limit_nbytes: int,
        left: Collection[str] = (),
        new_memory: Empty = plain_memory,
    ) -> None:
        self._seed = seed
        self._of_batch = limit_nbytes // max(1, len(slots))
        of_image = limit_nbytes // max(1, threads)
        self.fields = {
            number: ImageFieldDecoder(field, layouts[name], spans[name], core, of_image)
            for number, (name, field) in enumerate(fields.items())
            if isinstance(field, ImageField)
        }
        self._of_slots = self.fields | {
            number: ImageFieldDecoder(as_decoded(field), layouts[name], spans[name], core, of_image)
            for number, (name, field) in enumerate(fields.items())
            if isinstance(field, ImageField) and name in left
        }
        self._memory = [
            {
                number: Growing(
                    new_memory, one.sized_nbytes(rows), slot.made[number] if slot.made else None
                )
                for number, one in self._of_slots.items()
            }
            for slot in slots
        ]
        self._lock = threading.Lock()
        self._broken = 0

    @property
    def broken_images(self) -> int:
        """The number of images replaced so far."""
        return self._broken

    def note_broken(self) -> None:
        """Count an image that was replaced."""
        with self._lock:
            self._broken += 1

    def batch(
        self, arrays: tuple[Any, ...], index: NDArray[np.int64], epoch: int, slot: int | None
    ) -> BatchImages:
        """Begin to decode a batch; `BatchImages.work` does it.

        `ReadError` is raised if a header must be read, and is broken, or images take too much
        memory.

        Parameters
        ----------
        arrays
            Of all fields; those of images are encoded.
        index
            int64 (n,): sample numbers.
        epoch
            Random numbers depend on it.
        slot
            Whose memory is used; None: new memory, and pixels are always transformed.
        """
        found, most = list(arrays), self._of_batch
        todo: list[ImageWork] = []
        numbers = None
        if any(field.is_random for field in self.fields.values()):
            numbers = random_numbers(self._seed, epoch, index)
        for number, field in (self.fields if slot is None else self._of_slots).items():
            memory = Growing(plain_memory) if slot is None else self._memory[slot][number]
            found[number], works = field.begin(arrays[number], index, numbers, memory.of, most)
            todo += works
        return BatchImages(tuple(found), todo, self.note_broken)

    def close(self) -> None:
        """Release the memory."""
        self._memory = []


class BatchImages:
    """The images of one batch while they are decoded.

    Parameters
    ----------
    arrays
        The delivered arrays, by field; those of images are filled by `work`.
    works
        One per image; made before any is decoded, as a loop over all is fastest.
    note_broken
        Called for each image that is replaced.
    """

    def __init__(
        self,
        arrays: tuple[Any, ...],
        works: list[ImageWork],
        note_broken: Callable[[], None],
    ) -> None:
        self.arrays = arrays
        self.count = len(works)
        self._works = works
        self._note_broken = note_broken
        # Threads take images one by one, because decoding times differ much.
        self._todo = itertools.count()

    def work(self, must_end: Callable[[], bool], end: int) -> None:
        """Decode images until `end` were begun, or `must_end` is true; any number of threads may.

        `ReadError` is raised if an image is broken.
        """
        while not must_end():
            number = next(self._todo)
            if number >= self.count:
                return
            if not self._works[number]():
                self._note_broken()
            if number + 1 >= end:
                return


class _Scratch(threading.local):
    """Memory of the calling thread."""

    def __init__(self) -> None:
        self._decoded, self._resized = Growing(plain_memory), Growing(plain_memory)

    def decoded(self, shape: tuple[int, int, int]) -> NDArray[np.uint8]:
        """Return memory for a decoded image."""
        found: NDArray[np.uint8] = self._decoded.of(math.prod(shape)).reshape(shape)
        return found

    def resized(self, shape: tuple[int, int, int]) -> NDArray[np.uint8]:
        """Return memory for a resized image."""
        found: NDArray[np.uint8] = self._resized.of(math.prod(shape)).reshape(shape)
        return found


class ImageFieldDecoder:
    """Decodes the images of one field. Safe to use from many threads.

    `spans` are the images of each sample; `limit_nbytes` is the limit for the memory of an image
    while it is decoded. `is_random` says whether random numbers are needed. `DatasetError` is
    raised if the dataset does not hold bytes, `MissingPackageError` if OpenCV is needed and not
    installed.
    """

    def __init__(
        self,
        field: ImageField,
        layout: DatasetLayout,
        spans: Rows,
        core: Core | None,
        limit_nbytes: int,
    ) -> None:
        if layout.dtype.kind not in "iu" or layout.row_nbytes != 1:
            raise DatasetError(
                f'{layout.file}: dataset "{layout.path}": images are bytes (uint8), found'
                f" {layout.dtype}{list(layout.row_shape) or ''}; give the dataset of encoded images"
            )
        self._field = field
        self._layout = layout
        self._spans = spans
        self._limit_nbytes = limit_nbytes
        self.is_random = field.flip or field.crop == "random"
        self._replaces = field.on_error == "zero" and field.size is not None
        self._is_plain = image_transform(field, (1, 1, CHANNELS)).is_identity
        self._core = core
        self._own = _Scratch()
        self._cv2: Any = None if field.size is None and not field.flip else _opencv()
        counts = [count for _, count in layout.file_samples]
        self._ends = np.cumsum(counts or [layout.sample_count])
        # Shapes repeat, but there may be very many.
        self._transforms = lru_cache(256)(partial(self._new_transform, core))

    def _new_transform(self, core: Core | None, shape: tuple[int, int, int]) -> Any:
        transform = image_transform(self._field, shape)
        return transform, transformer(core, transform)

    def transform(self, shape: tuple[int, int, int]) -> RowTransform:
        """Return how pixels of a shape are delivered."""
        found: RowTransform = self._transforms(shape)[0]
        return found

    def sized_nbytes(self, rows: int) -> int:
        """Return the bytes of `rows` resized images; 0 if they are not resized."""
        return sized_nbytes(self._field, rows)

    def begin(
        self,
        encoded: Ragged,
        index: NDArray[np.int64],
        numbers: NDArray[np.float64] | None,
        empty: Empty,
        most_nbytes: int,
    ) -> tuple[Any, list[ImageWork]]:
        """Return the array or `Images` of a batch, and the work that fills it with pixels.

        `ReadError` is raised as in `ImageDecoder.batch`.

        Parameters
        ----------
        encoded
            The bytes of images; if samples consist of steps, those of the batch's runs.
        index
            int64 (n,): sample numbers.
        numbers
            Their random numbers, if needed.
        empty
            Returns memory.
        most_nbytes
            The limit for pixels.
        """
        encoded = Ragged(encoded.values.view(np.uint8), encoded.offsets)
        runs: NDArray[np.int64] = index
        images: NDArray[np.int64] = np.arange(index.size)  # the image of each place
        if isinstance(self._spans, StepSpans):
            runs, images = self._spans.places(index)
        headers = self._headers(encoded, runs)
        if self._field.size is None:
            delivered = outs = self._unsized(headers, index, empty, most_nbytes)
        else:
            transform = self.transform((*self._field.size, CHANNELS))
            block = empty(transform.nbytes * images.size)
            delivered = np.ndarray((*images.shape, *transform.row), transform.dtype, block)
            outs = delivered.reshape(-1, *transform.row)
        if numbers is not None and images.ndim > 1:  # the same for all steps of a sample
            numbers = np.repeat(numbers, images.size // index.size, axis=0)
        places = np.argsort(images, axis=None, kind="stable")  # by image; first those without
        first = np.searchsorted(images.ravel()[places], np.arange(runs.size + 1))
        places, missing, first = places[first[0] :], places[: first[0]], first - first[0]
        numbers = None if numbers is None else numbers[places]
        cuts = self._cuts(headers[images.ravel()[places]], numbers)
        several = [outs[place] for place in places.tolist()]
        works: list[ImageWork] = [
            partial(self._decode, data, ImageHeader._make(header), several[a:b], cuts[a:b], run)
            for data, header, (a, b), run in zip(
                encoded, headers.tolist(), itertools.pairwise(first.tolist()), runs, strict=True
            )
        ]
        if missing.size:
            works.append(partial(self._blacken, [outs[place] for place in missing.tolist()], True))
        return delivered, works

    def _unsized(
        self, headers: NDArray[np.int64], index: NDArray[np.int64], empty: Empty, most_nbytes: int
    ) -> Any:
        """Return an array for images that keep their sizes; `Images` if these differ."""
        shapes = headers[:, 1:3]
        are_equal = bool((shapes == shapes[0]).all())
        kinds = shapes[:1] if are_equal else shapes
        transforms = [self.transform((*shape, CHANNELS)) for shape in kinds.tolist()]
        first, total = transforms[0], sum(transform.nbytes for transform in transforms)
        total = index.size * total if are_equal else total
        if total > most_nbytes:
            raise ReadError(
                f"{self._where(int(index[0]))} and the others of its batch have"
                f" {total:,} bytes of pixels, more than the {most_nbytes:,} that they may"
                " take; make batch_size smaller, give a size, or set max_batch_bytes if you trust"
                " the file"
            )
        block = empty(total)
        if are_equal:
            return np.ndarray((index.size, *first.row), first.dtype, block)
        offsets = np.cumsum([0, *(math.prod(transform.row) for transform in transforms)])
        rows = np.array([transform.row for transform in transforms], np.int64)
        return Images(block.view(first.dtype), offsets, rows)

    def _headers(self, encoded: Ragged, runs: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the headers of images as rows; zeros for those that are to be replaced.

        `ReadError` is raised if one is broken or too large, and is not to be replaced.
        """
        values, offsets = map(np.ascontiguousarray, (encoded.values, encoded.offsets))
        core = self._core
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
            except ReadError:
                if not self._replaces:
                    raise
                rows[number] = 0
        return rows

    def _cuts(
        self, headers: NDArray[np.int64], numbers: NDArray[np.float64] | None
    ) -> Sequence[list[int] | None]:
        """Return, per image, the delivered part; None means all of it, unchanged.

        A part is bounds (top, bottom, left, right), how it is resized, and whether it is flipped.
        `headers` has a row per image; `numbers` has rows of `random_numbers`, if needed.
        """
        field = self._field
        if field.size is None and not field.flip:
            return [None] * len(headers)
        cuts = np.zeros((len(headers), 6), np.int64)
        heights, widths = np.maximum(headers[:, 1:3].T, 1)  # 0 for those to be replaced
        if field.size is not None:
            if field.crop == "center":
                boxes = center_boxes(heights, widths, field.size)
            else:
                assert numbers is not None
                bounds = field.crop_scale, field.crop_ratio
                boxes = random_boxes(heights, widths, *bounds, numbers)
            cuts[:, 0:4:2] = boxes[:, :2]
            cuts[:, 1:4:2] = boxes[:, :2] + boxes[:, 2:]
            shrinks = (boxes[:, 2:] / field.size).max(axis=1)
            by_area = shrinks > _AREA_ABOVE[field.interpolation]
            cuts[:, 4] = np.where(by_area, self._cv2.INTER_AREA, self._cv2.INTER_LINEAR)
        if field.flip:
            assert numbers is not None
            cuts[:, 5] = are_flipped(numbers)
        found: list[list[int]] = cuts.tolist()
        return found

    def _decode(
        self,
        data: NDArray[np.uint8],
        header: ImageHeader,
        outs: Sequence[NDArray[Any]],
        cuts: Sequence[list[int] | None],
        run: np.int64,
    ) -> bool:
        """Decode an image to its places, each with a cut of its own; False if it was replaced.

        `ReadError` is raised if it is broken, and not to be replaced.
        """
        first = outs[0]
        goes_there = self._is_plain and self._field.size is None
        try:
            if not header.height:
                raise ValueError("has no header")
            pixels = first if goes_there else self._own.decoded(header.shape)
            decode_rgb(data, header, pixels)
        except ValueError as error:
            if not self._replaces:
                raise ReadError(f"{self._where(int(run))} {error}; {_REMEDY}") from error
            return self._blacken(outs, False)
        for out, cut in zip(outs, cuts, strict=True):
            if out is not first and not self.is_random:
                np.copyto(out, first)
                continue
            part = pixels if cut is None else self._cut(pixels, out, cut)
            if part is not out:
                self._deliver(part, out)
        return True

    def _cut(
        self, pixels: NDArray[np.uint8], out: NDArray[Any], cut: list[int]
    ) -> NDArray[np.uint8]:
        """Cut, resize and flip decoded pixels; return the result, in `out` if it is final."""
        top, bottom, left, right, how, is_flipped = cut
        size = self._field.size
        if size is not None:
            part, shape = pixels[top:bottom, left:right], (*size, CHANNELS)
            pixels = out if self._is_plain else self._own.resized(shape)
            self._cv2.resize(part, size[::-1], pixels, 0, 0, how)
        if is_flipped:
            self._cv2.flip(pixels, 1, pixels)
        return pixels

    def _blacken(self, several: Sequence[NDArray[Any]], found: bool) -> bool:
        """Fill in zeros in place of images that are resized; return `found`."""
        assert self._field.size is not None
        pixels = np.zeros((*self._field.size, CHANNELS), np.uint8)
        for out in several:
            self._deliver(pixels, out)
        return found

    def _header(self, data: NDArray[np.uint8], sample: int) -> ImageHeader:
        try:
            header = read_header(data)
        except ValueError as error:
            raise ReadError(f"{self._where(sample)} {error}; {_REMEDY}") from error
        if header.nbytes > self._limit_nbytes:
            raise ReadError(
                f"{self._where(sample)} declares {header.height:,} x {header.width:,} pixels, which"
                f" take {header.nbytes:,} bytes, more than the {self._limit_nbytes:,} that a thread"
                " may take for one; set max_batch_bytes if you trust the file"
            )
        return header

    def _deliver(self, pixels: NDArray[np.uint8], out: NDArray[Any]) -> None:
        if self._is_plain:
            np.copyto(out, pixels)
        else:
            apply = self._transforms(pixels.shape)[1]
            apply(pixels[np.newaxis], out[np.newaxis], np.zeros(1, np.int64))

    def _where(self, sample: int) -> str:
        layout, number = self._layout, int(np.searchsorted(self._ends, sample, side="right"))
        if layout.sequences is not None and layout.heaps:  # each of a dataset of its own
            heap = [one for one in layout.heaps if one.first_sample <= sample][-1]
            element = sample - heap.first_sample
            return f"{heap.elements.where}: the image of element {element} (sample {sample})"
        file = layout.file_samples[number][0] if layout.file_samples else layout.file
        first = int(self._ends[number - 1]) if number else 0
        among = f" (sample {sample - first} of this file)" if first else ""
        return f'{file}: dataset "{layout.path}": the image of sample {sample}{among}'


_REMEDY = 'mend the file, leave the sample out by indices, or set on_error="zero" and a size'


def as_decoded(field: ImageField) -> ImageField:
    """Return a field whose pixels are delivered as decoded."""
    return field.model_copy(update={"axes": None, "dtype": None, "scale": None, "offset": None})


def _opencv() -> Any:
    with needs_package("opencv-python-headless", "images that are resized or flipped"):
        import cv2
    return cv2
