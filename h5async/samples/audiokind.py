"""Defines the kind of audio fields, whose frames libsndfile decodes.

Encoded recordings enter, as `Ragged` bytes; `Ragged` frames leave, or an array if `dense`.
"""

from __future__ import annotations

import io
import itertools
import math
from functools import partial
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from h5async.config import AudioField, Field
from h5async.core.binding import Core
from h5async.errors import DamagedError, ReadError, needs_package
from h5async.index.layout import DatasetLayout
from h5async.plan.crops import random_start
from h5async.samples.fieldkind import (
    AUDIO,
    DecodingWork,
    EncodedBatch,
    EncodedKind,
    FieldDecoder,
    Rows,
)
from h5async.samples.ragged import Ragged
from h5async.system.interruptions import suppressing

_MIXED_NBYTES = 1 << 20  # decoded at a time to average channels
_UNKNOWN = (1 << 63) - 1  # frames, according to libsndfile, of a FLAC written to a pipe


class AudioKind(EncodedKind):
    """Encoded audio."""

    of: ClassVar[type[Field]] = AudioField
    found_as = AUDIO
    field: AudioField

    def decoded_nbytes(self, rows: int) -> int:
        """Return the bytes of parts of one length; 0 if lengths differ."""
        field = self.field
        if field.frames is None or not field.dense:
            return 0
        return rows * field.frames * field.channels * field.decoded_dtype.itemsize

    def decoder(
        self, layout: DatasetLayout, rows: Rows, core: Core | None, limit_nbytes: int
    ) -> FieldDecoder:
        """Return the decoder; MissingPackageError if soundfile is not installed."""
        return _AudioDecoder(self.field, layout, rows)


class _AudioDecoder(FieldDecoder):
    def __init__(self, field: AudioField, layout: DatasetLayout, rows: Rows) -> None:
        super().__init__("recording", layout, rows)
        with needs_package("soundfile", "audio"):
            import soundfile
        self._soundfile: Any = soundfile
        self._field = field
        self.is_random = field.crop == "random"
        # The shape of a frame: a single channel has no dimension, as in soundfile.
        self._frame = () if field.channels == 1 else (field.channels,)

    def begin(self, batch: EncodedBatch) -> tuple[Any, list[DecodingWork]]:
        """Return the array or `Ragged` of a batch, and the work that fills it with frames."""
        index, numbers = batch.samples, batch.numbers
        starts = np.zeros(index.size) if numbers is None else random_start(numbers)
        sources: list[Any] = list(batch.encoded)
        delivered: NDArray[Any] | Ragged
        if self._field.dense:
            dtype, shape = self._field.decoded_dtype, (index.size, self._field.frames, *self._frame)
            delivered = np.ndarray(shape, dtype, batch.empty(math.prod(shape) * dtype.itemsize))
        else:
            sources = [self._opened(*one, batch) for one in zip(sources, index, strict=True)]
            if None in sources:
                return batch.encoded, []
            delivered = self._unequal(list(map(self._count, sources)), batch)
        several = zip(sources, delivered, index.tolist(), starts.tolist(), strict=True)
        return delivered, [partial(self._decode, *one) for one in several]

    def _unequal(self, counts: list[int], batch: EncodedBatch) -> Ragged:
        ends, dtype = [*itertools.accumulate(counts, initial=0)], self._field.decoded_dtype
        nbytes = ends[-1] * math.prod(self._frame) * dtype.itemsize
        if nbytes > batch.most_nbytes:
            longest = max(counts)
            raise ReadError(
                f"{self._where(int(batch.samples[counts.index(longest)]))} declares {longest:,}"
                f" frames, and its batch {nbytes:,} bytes of audio, more than the"
                f" {batch.most_nbytes:,} that it may take; make batch_size smaller, give frames, or"
                " set max_batch_bytes if you trust the file"
            )
        values: NDArray[Any] = np.ndarray((ends[-1], *self._frame), dtype, batch.empty(nbytes))
        return Ragged(values, np.array(ends, np.int64))

    def _opened(self, data: NDArray[Any], sample: np.int64, batch: EncodedBatch) -> Any:
        """Open a recording of a batch; None if it was refused."""
        try:
            return self._open(data, int(sample))
        except DamagedError as error:
            return batch.refuse(error)

    def _open(self, data: NDArray[Any], sample: int) -> Any:
        """Open a recording; `ReadError` if it is invalid, or does not match the field's options."""
        try:
            file = self._soundfile.SoundFile(_Bytes(data.tobytes()))
        except self._soundfile.SoundFileError as error:
            first = data[:8].tobytes().hex(" ") or "none"
            raise self._broken(sample, f"{_said(error)} (its first bytes are {first})") from error
        field = self._field
        if field.sample_rate not in (None, file.samplerate):
            raise ReadError(
                f"{self._where(sample)} has a sample rate of {file.samplerate:,} Hz, and"
                f" sample_rate is {field.sample_rate:,}; resample it, or leave the sample out by"
                " indices"
            )
        if not field.mono and file.channels != field.channels:
            raise ReadError(
                f"{self._where(sample)} has {file.channels} channels, and channels is"
                f" {field.channels}; set channels, or mono=True to have the mean of all channels"
            )
        if file.frames == _UNKNOWN and (field.frames is None or self.is_random):
            raise self._unknown(sample)
        return file

    def _count(self, file: Any) -> int:
        frames = self._field.frames
        return int(file.frames if frames is None else min(frames, file.frames))

    def _decode(self, source: Any, out: NDArray[Any], sample: int, start: float) -> bool:
        """Decode a part of a recording into `out`, padded with zeros.

        `source` is its bytes, or the open file, which is closed. `start`, from 0 to below 1, is the
        position among all possible parts.
        """
        file = self._open(source, sample) if isinstance(source, np.ndarray) else source
        count = self._count(file)
        read = _read_mean if self._field.mono else _read
        try:
            with file:
                first = int(start * (file.frames - count + 1))
                # As soundfile.read does: without a seek, frames of MP3s are rounded otherwise.
                if first or file.subtype.startswith("MPEG"):
                    file.seek(first)
                got = read(file, out[:count])
        except self._soundfile.SoundFileError as error:
            if file.frames == _UNKNOWN:  # libsndfile cannot find its end
                raise self._unknown(sample) from error
            raise self._broken(sample, _said(error)) from error
        if got < count:
            raise self._broken(sample, f"{count - got:,} of {count:,} frames are missing")
        out[count:] = 0
        return True

    def _unknown(self, sample: int) -> ReadError:
        return ReadError(
            f"{self._where(sample)} does not declare its number of frames, like a FLAC written"
            ' to a pipe; encode it to a file, or give fewer frames than it has, with crop="start"'
        )

    def _broken(self, sample: int, found: str) -> DamagedError:
        remedy = "mend the file, or leave the sample out by indices"
        return self.broken(sample, f"cannot be decoded: {found}; {remedy}")


class _Bytes(io.BytesIO):
    """Bytes for libsndfile, which may seek anywhere if the header is damaged."""

    def seek(self, offset: int, whence: int = 0) -> int:
        with suppressing(ValueError, OverflowError):  # libsndfile gets the returned position
            super().seek(offset, whence)
        return self.tell()


def _read(file: Any, out: NDArray[Any]) -> int:
    return len(file.read(out=out))


def _read_mean(file: Any, out: NDArray[Any]) -> int:
    most, done = max(1, _MIXED_NBYTES // (file.channels * out.itemsize)), 0
    while done < len(out):
        wanted = min(most, len(out) - done)
        block = file.read(wanted, out.dtype.name, always_2d=True)
        with np.errstate(all="ignore"):  # for infinite floats
            np.mean(block, axis=1, out=out[done : done + len(block)])
        done += len(block)
        if len(block) < wanted:
            break
    return done


def _said(error: Exception) -> str:
    return str(getattr(error, "error_string", error)).rstrip(".")
