"""Decodes the images of a batch, side by side in all threads, resizes and transforms them.

Encoded images enter, as `Ragged` bytes; arrays of pixels leave, or `Images` where sizes differ.
Pixels lie in memory of the slot, which is taken once where their size is known, and else grows with
the largest batch. An image that several samples of a batch have among their steps is decoded once.
"""

from __future__ import annotations

import bisect
import itertools
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from h5async.codec.images import CHANNELS, ImageHeader, decode_rgb, read_header
from h5async.config import Field, ImageField
from h5async.core.binding import Core
from h5async.errors import DatasetError, ReadError, needs_package
from h5async.fill.columns import Rows
from h5async.fill.reading import transformer
from h5async.fill.records import SlotMemory
from h5async.images import Images
from h5async.index.layout import DatasetLayout
from h5async.io.growing import Growing, plain_memory
from h5async.order.spans import StepSpans
from h5async.order.steps import NO_ROW
from h5async.plan.crops import Box, center_box, is_flipped, random_box, random_numbers
from h5async.plan.transform import RowTransform, image_transform
from h5async.ragged import Ragged

_AREA_ABOVE = 2  # where an image shrinks by more, neighbours are not all there is between

Empty = Callable[[int], NDArray[np.uint8]]  # returns so much memory


class ImageDecoder:
    """Decodes the fields of batches that are images. Safe to use from many threads.

    Parameters
    ----------
    fields, layouts
        By name; layouts of all columns.
    spans
        By column: which images each sample is.
    seed
        Of the reader.
    core
        The compiled core; None: do without.
    slots, rows
        Memory of the slots, and samples that each has room for.
    threads
        That decode at a time, in all processes.
    limit_nbytes
        What pixels may take, in all slots, and beside them while they are decoded.
    left
        Names of fields whose pixels a device transforms: batches have them as they were decoded.
    new_memory
        Returns host memory for the pixels of a slot.

    Raises
    ------
    DatasetError
        If a dataset has no bytes.
    MissingPackageError
        If OpenCV is needed and not installed.
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
        """Images that were replaced so far."""
        return self._broken

    def note_broken(self) -> None:
        """Count an image that was replaced."""
        with self._lock:
            self._broken += 1

    def batch(
        self, arrays: tuple[Any, ...], index: NDArray[np.int64], epoch: int, slot: int | None
    ) -> BatchImages:
        """Begin to decode a batch; `BatchImages.work` does it.

        Parameters
        ----------
        arrays
            Of all fields; those of images are encoded.
        index
            int64 (n,): sample numbers.
        epoch
            On which random numbers depend.
        slot
            Whose memory is used; None: new memory, and pixels are transformed in any case.

        Raises
        ------
        ReadError
            If a header must be read, and is broken, or images take too much memory.
        """
        found, todo, most = list(arrays), [], self._of_batch
        for number, field in (self.fields if slot is None else self._of_slots).items():
            memory = Growing(plain_memory) if slot is None else self._memory[slot][number]
            task = field.task(arrays[number], index, memory.of, most)
            found[number] = task.delivered
            todo.append(task)
        numbers = None
        if any(field.is_random for field in self.fields.values()):
            numbers = random_numbers(self._seed, epoch, index)
        return BatchImages(tuple(found), todo, numbers, self.note_broken)

    def close(self) -> None:
        """Let go of the memory."""
        self._memory = []


class BatchImages:
    """The images of one batch on their way.

    Parameters
    ----------
    arrays
        What is delivered, by field; those of images are filled by `work`.
    tasks
        One for each field of images.
    numbers
        (samples, ...): random numbers by sample.
    note_broken
        Called for each image that is replaced.
    """

    def __init__(
        self,
        arrays: tuple[Any, ...],
        tasks: list[FieldTask],
        numbers: NDArray[np.float64] | None,
        note_broken: Callable[[], None],
    ) -> None:
        self.arrays = arrays
        self._first = [0, *itertools.accumulate(task.count for task in tasks)]
        self.count = self._first[-1]
        self._tasks = tasks
        self._numbers = numbers
        self._note_broken = note_broken
        # Threads take images one by one, as some take much longer than others.
        self._todo = itertools.count()

    def work(self, must_end: Callable[[], bool]) -> None:
        """Decode images until there are none left; in as many threads as one likes.

        Parameters
        ----------
        must_end
            Whether nobody wants them any more.

        Raises
        ------
        ReadError
            If an image is broken.
        """
        while not must_end():
            number = next(self._todo)
            if number >= self.count:
                return
            task = bisect.bisect_right(self._first, number) - 1
            if not self._tasks[task].decode(number - self._first[task], self._numbers):
                self._note_broken()


class Place(NamedTuple):
    """Where an image goes.

    Attributes
    ----------
    out
        Its pixels there.
    row
        Which sample of the batch has it.
    """

    out: NDArray[Any]
    row: int


class FieldTask:
    """The images of one field of a batch.

    Parameters
    ----------
    field
        Decodes them.
    encoded, runs
        The bytes of each image, and its number in the dataset.
    places
        Where each goes: in one place, or several.
    headers
        Theirs, where these were read.
    delivered
        What the batch has.
    missing
        Places in which no image is, but zeros.

    Attributes
    ----------
    count
        Pieces of work.
    """

    def __init__(
        self,
        field: ImageFieldDecoder,
        encoded: Ragged,
        runs: NDArray[np.int64],
        places: Sequence[Sequence[Place]],
        headers: list[ImageHeader] | None,
        delivered: Any,
        missing: Sequence[NDArray[Any]] = (),
    ) -> None:
        self._field = field
        self._encoded = encoded
        self._runs = runs
        self._places = places
        self._headers = headers
        self._missing = missing
        self.delivered = delivered
        self.count = len(places) + bool(missing)

    def decode(self, number: int, numbers: NDArray[np.float64] | None) -> bool:
        """Do a piece of work: decode one image to its places, or put zeros where there is none.

        Parameters
        ----------
        number
            Of the piece.
        numbers
            (samples, ...): random numbers.

        Returns
        -------
        bool
            False where the image is broken, and was replaced.

        Raises
        ------
        ReadError
            If it is broken.
        """
        if number == len(self._places):
            self._field.blacken(self._missing)
            return True
        header = None if self._headers is None else self._headers[number]
        data, places = self._encoded[number], self._places[number]
        return self._field.decode(data, header, places, int(self._runs[number]), numbers)


class ImageFieldDecoder:
    """Decodes the images of one field. Safe to use from many threads.

    Parameters
    ----------
    field, layout
        Its options, and where its bytes lie.
    spans
        Which images each sample is.
    core
        The compiled core; None: do without.
    limit_nbytes
        What an image may take while it is decoded.

    Attributes
    ----------
    is_random
        Whether random numbers are needed.

    Raises
    ------
    DatasetError
        If the dataset has no bytes.
    MissingPackageError
        If OpenCV is needed and not installed.
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
        self._own = threading.local()
        self._cv2 = None if field.size is None and not field.flip else _opencv()
        counts = [count for _, count in layout.file_samples]
        self._ends = np.cumsum(counts or [layout.sample_count])
        # (Shapes come again and again, but there may be very many.)
        self._transforms = lru_cache(256)(partial(self._new_transform, core))

    def _new_transform(self, core: Core | None, shape: tuple[int, int, int]) -> Any:
        transform = image_transform(self._field, shape)
        return transform, None if transform.is_identity else transformer(core, transform)

    def transform(self, shape: tuple[int, int, int]) -> RowTransform:
        """Return how pixels of a shape are delivered."""
        found: RowTransform = self._transforms(shape)[0]
        return found

    def sized_nbytes(self, rows: int) -> int:
        """Return what images take that are resized; 0 where they are not."""
        return sized_nbytes(self._field, rows)

    def task(
        self, encoded: Ragged, index: NDArray[np.int64], empty: Empty, most_nbytes: int
    ) -> FieldTask:
        """Return what is to be done for the images of a batch.

        Raises
        ------
        ReadError
            As `ImageDecoder.batch` says.
        """
        encoded, size = Ragged(encoded.values.view(np.uint8), encoded.offsets), self._field.size
        if size is not None:
            return self._sized_task(encoded, index, empty, self.transform((*size, CHANNELS)))
        headers = [
            self._header(data, sample) for data, sample in zip(encoded, index.tolist(), strict=True)
        ]
        transforms = [self.transform(header.shape) for header in headers]
        offsets = np.zeros(index.size + 1, np.int64)
        np.cumsum([t.nbytes for t in transforms], out=offsets[1:])
        if offsets[-1] > most_nbytes:
            raise ReadError(
                f"{self._where(int(index[0]))} and the others of its batch have"
                f" {offsets[-1]:,} bytes of pixels, more than the {most_nbytes:,} that they may"
                " take; make batch_size smaller, give a size, or set max_batch_bytes if you trust"
                " the file"
            )
        block = empty(int(offsets[-1]))
        first = transforms[0]
        if all(one.row == first.row for one in transforms):
            array = np.ndarray((index.size, *first.row), first.dtype, block)
            return FieldTask(self, encoded, index, _rows_of(array), headers, array)
        shapes = np.array([one.row for one in transforms], np.int64)
        images = Images(block.view(first.dtype), offsets // first.dtype.itemsize, shapes)
        return FieldTask(self, encoded, index, _rows_of(images), headers, images)

    def _sized_task(
        self, encoded: Ragged, index: NDArray[np.int64], empty: Empty, transform: RowTransform
    ) -> FieldTask:
        """Return what is to be done for images of one size."""
        if not isinstance(self._spans, StepSpans):
            block = empty(transform.nbytes * index.size)
            array = np.ndarray((index.size, *transform.row), transform.dtype, block)
            return FieldTask(self, encoded, index, _rows_of(array), None, array)
        runs, at = self._spans.places(index)
        block = empty(transform.nbytes * at.size)
        array = np.ndarray((*at.shape, *transform.row), transform.dtype, block)
        places: list[list[Place]] = [[] for _ in runs]
        missing = []
        for (row, step), number in np.ndenumerate(at):
            if number == NO_ROW:
                missing.append(array[row, step])
            else:
                places[number].append(Place(array[row, step], row))
        return FieldTask(self, encoded, runs, places, None, array, missing)

    def decode(
        self,
        data: NDArray[np.uint8],
        header: ImageHeader | None,
        places: Sequence[Place],
        sample: int,
        numbers: NDArray[np.float64] | None,
    ) -> bool:
        """Decode one image; see `FieldTask.decode`."""
        try:
            header = self._header(data, sample) if header is None else header
            self._decode(data, header, places, sample, numbers)
        except ReadError:
            if self._field.on_error == "raise" or self._field.size is None:
                raise
            self.blacken([place.out for place in places])
            return False
        return True

    def blacken(self, several: Sequence[NDArray[Any]]) -> None:
        """Put zeros, as if they were pixels, in place of images that are resized."""
        assert self._field.size is not None
        pixels = np.zeros((*self._field.size, CHANNELS), np.uint8)
        for out in several:
            self._deliver(pixels, out)

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

    def _decode(
        self,
        data: NDArray[np.uint8],
        header: ImageHeader,
        places: Sequence[Place],
        sample: int,
        numbers: NDArray[np.float64] | None,
    ) -> None:
        field, first = self._field, places[0].out
        goes_there = field.size is None and self._transforms(header.shape)[1] is None
        try:
            pixels = first if goes_there else self._scratch("decoded", header.shape)
            decode_rgb(data, header, pixels)
        except ValueError as error:
            raise ReadError(f"{self._where(sample)} {error}; {_REMEDY}") from error
        for number, (out, row) in enumerate(places):
            if number and numbers is None:
                np.copyto(out, first)
                continue
            self._place(pixels, header, out, [] if numbers is None else numbers[row].tolist())

    def _place(
        self,
        pixels: NDArray[np.uint8],
        header: ImageHeader,
        out: NDArray[Any],
        numbers: list[float],
    ) -> None:
        """Make what is delivered of decoded pixels, in one place; they may lie there already."""
        field = self._field
        if field.size is not None:
            shape = (*field.size, CHANNELS)
            box = self._box(header, numbers)
            part = pixels[box.top : box.top + box.height, box.left : box.left + box.width]
            is_plain = self._transforms(shape)[1] is None
            pixels = out if is_plain else self._scratch("resized", shape)
            self._resize(part, pixels)
        if field.flip and is_flipped(numbers):
            assert self._cv2 is not None
            self._cv2.flip(pixels, 1, dst=pixels)
        if pixels is not out:
            self._deliver(pixels, out)

    def _box(self, header: ImageHeader, numbers: list[float]) -> Box:
        field = self._field
        assert field.size is not None
        if field.crop == "center":
            return center_box(header.height, header.width, field.size)
        bounds = field.crop_scale, field.crop_ratio
        return random_box(header.height, header.width, *bounds, numbers)

    def _resize(self, image: NDArray[np.uint8], out: NDArray[np.uint8]) -> None:
        assert self._cv2 is not None
        height, width = out.shape[:2]
        shrinks = max(image.shape[0] / height, image.shape[1] / width)
        how = self._field.interpolation
        by_area = how == "area" or (how == "auto" and shrinks > _AREA_ABOVE)
        flag = self._cv2.INTER_AREA if by_area else self._cv2.INTER_LINEAR
        self._cv2.resize(image, (width, height), dst=out, interpolation=flag)

    def _deliver(self, pixels: NDArray[np.uint8], out: NDArray[Any]) -> None:
        """Transform pixels to their place."""
        apply = self._transforms(pixels.shape)[1]
        if apply is None:
            np.copyto(out, pixels)
        else:
            apply(pixels[np.newaxis], out[np.newaxis], np.zeros(1, np.int64))

    def _scratch(self, name: str, shape: tuple[int, int, int]) -> NDArray[np.uint8]:
        """Return memory of the calling thread."""
        memory = getattr(self._own, name, None)
        if memory is None:
            memory = Growing(plain_memory)
            setattr(self._own, name, memory)
        nbytes = shape[0] * shape[1] * shape[2]
        found: NDArray[np.uint8] = memory.of(nbytes).reshape(shape)
        return found

    def _where(self, sample: int) -> str:
        """Name an image, for messages."""
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
    """Return a field whose pixels are delivered as they were decoded."""
    return field.model_copy(update={"axes": None, "dtype": None, "scale": None, "offset": None})


def pixel_transform(field: ImageField) -> RowTransform | None:
    """Return how pixels are delivered; None where images keep their sizes.

    Raises
    ------
    ConfigError
        If a scale or offset has another length than the channels.
    """
    return None if field.size is None else image_transform(field, (*field.size, CHANNELS))


def _rows_of(several: Any) -> list[list[Place]]:
    """Return the places of images of which each sample has one."""
    return [[Place(out, row)] for row, out in enumerate(several)]


def sized_nbytes(field: Field | None, rows: int) -> int:
    """Return what the pixels of a field take in a slot where images are resized; else 0."""
    transform = pixel_transform(field) if isinstance(field, ImageField) else None
    if transform is None:
        return 0
    steps = 1 if field is None or field.steps is None else len(field.steps)
    return rows * steps * transform.nbytes


def _opencv() -> Any:
    """Import OpenCV.

    Raises
    ------
    MissingPackageError
        If it is not installed.
    """
    with needs_package("opencv-python-headless", "images that are resized or flipped"):
        import cv2
    return cv2
