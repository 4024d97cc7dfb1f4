"""Defines the fields whose samples are not stored as arrays of one shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, Unpack

import numpy as np
from numpy.typing import ArrayLike
from pydantic import BeforeValidator, PlainValidator, model_validator
from pydantic import Field as Bound

from h5async.config.field import KINDS, Field, FieldOptions
from h5async.config.frozen import documented, option
from h5async.config.parts import PLAIN, Values, one_dimensional
from h5async.config.values import Bool, DatasetPath, Integer, Name, Natural, Positive

_Pixels = Annotated[int, Bound(ge=1, le=1 << 14)]
_Positive = Annotated[float, Bound(gt=0, allow_inf_nan=False)]


class RaggedFieldOptions(FieldOptions, total=False):
    """The parameters of `RaggedField` except its path."""

    offsets: DatasetPath | None
    """Path of the dataset that tells where samples begin; needed unless the values have a
    variable-length datatype.
    """
    offsets_kind: Literal["offsets", "ends", "lengths"]
    """Contents of that dataset. `offsets`: where each sample begins and, as one more number, where
    the last one ends. `ends`: where each sample ends. `lengths`: the number of values of each
    sample.
    """
    pad_to: Integer | None
    """Deliver an array (samples, pad_to, ...) instead of `Ragged`: shorter samples end with zeros,
    longer ones are cut off. The batch also has `NAME_mask`: bool (samples, pad_to), True for values
    of the sample.
    """
    pack: Integer | None
    """Concatenate the stored samples (documents) of each file, and cut them into windows of this
    size, which become the samples: an array (samples, pack, ...). The last window of a file ends
    with zeros. The batch also has `NAME_documents`, int64, and `NAME_positions`, int32: the
    document of each value, and its position there, or -1. This needs `offsets`.
    """


@documented(RaggedFieldOptions)
class RaggedField(Field):
    """Samples of varying lengths, delivered as `Ragged`.

    Either a dataset of a variable-length datatype, such as strings, or flat values with another
    dataset that tells where samples begin.

    Examples
    --------
    >>> with h5py.File("texts.h5", "w") as file:
    ...     file["tokens"] = [3, 1, 4, 1, 5, 9]
    ...     file["ends"] = [3, 3, 6]
    >>> tokens = RaggedField("tokens", offsets="ends", offsets_kind="ends")
    >>> with AsyncReader(hdf5_path="texts.h5", fields={"tokens": tokens}) as reader:
    ...     batch = reader.get_next_batch()
    >>> batch.tokens.to_padded()[0]
    array([[3, 1, 4],
           [0, 0, 0],
           [1, 5, 9]])
    """

    if TYPE_CHECKING:

        def __init__(self, path: DatasetPath, **options: Unpack[RaggedFieldOptions]) -> None: ...

    offsets: Name | None = None
    offsets_kind: Literal["offsets", "ends", "lengths"] = "offsets"
    pad_to: Natural | None = None
    pack: Positive | None = None

    @model_validator(mode="after")
    def _check_ragged(self) -> RaggedField:
        if not isinstance(self, ImageField):
            _require_no_steps(self)
        _require_first_dimension(self)
        if self.offsets is None and self.offsets_kind != "offsets":
            raise ValueError("offsets_kind needs offsets")
        if self.pack is not None:
            if type(self) is not RaggedField:
                raise ValueError("pack is for ragged fields; leave it out")
            if self.pad_to is not None:
                raise ValueError("pack and pad_to exclude each other; leave one of them out")
            if self.offsets is None:
                raise ValueError(
                    "pack needs offsets: values of a variable-length datatype are not contiguous;"
                    " store them as one flat dataset, with a dataset of offsets"
                )
        return self


class ImageFieldOptions(RaggedFieldOptions, total=False):
    """The parameters of `ImageField` except its path."""

    size: int | Sequence[int] | None
    """Resize images to this height and width (a number: both), with OpenCV. None: images keep their
    sizes, and a batch of images of varying sizes is `Images`.
    """
    crop: Literal["center", "random"]
    """The part to resize to `size`. `center`: the largest one in the middle with its aspect ratio.
    `random`: one of random area, aspect ratio and place, chosen like torchvision's
    RandomResizedCrop.
    """
    crop_scale: Sequence[float]
    """Bounds of the area of a random part, relative to the image's area."""
    crop_ratio: Sequence[float]
    """Bounds of its width divided by its height."""
    flip: bool
    """Flip images left to right at random, half of them on average."""
    interpolation: Literal["auto", "linear", "area"]
    """How OpenCV resizes. `linear`: between neighbours. `area`: the mean of an area, free of
    aliasing, but slower. `auto`: `area` if an image shrinks to less than half, else `linear`.
    """
    decode: Literal["full", "scaled"]
    """How much of a JPEG is decoded if it is resized. `full`: all of it. `scaled`: only the part to
    be resized, and at 1/2, 1/4 or 1/8 of its size if that is enough for `size`, then resized by
    `linear`. Pixels are the same if the part does not shrink to half or less.
    """
    on_error: Literal["raise", "zero"]
    """How to treat an image that cannot be decoded. `raise`: the batch raises `ReadError`. `zero`:
    it is black, and counted in `ReaderStats.broken_images`; this needs `size`.
    """


def _size(value: object) -> object:
    if isinstance(value, int) and not isinstance(value, bool):
        return value, value
    if value is not None and (not isinstance(value, list | tuple) or len(value) != 2):
        raise ValueError("must be a number of pixels, or two: height and width")
    return value


@documented(ImageFieldOptions)
class ImageField(RaggedField):
    """Encoded images (JPEG or PNG), delivered as RGB pixels (samples, height, width, 3).

    The bytes of an image are an element of a variable-length dataset, or flat values with
    `offsets`. `axes`, `dtype`, `scale` and `offset` apply to the pixels: ``axes=(0, 3, 1, 2)``
    delivers channels first. With `steps`, which need `size`: (samples, steps, height, width, 3).

    Examples
    --------
    >>> import imagecodecs
    >>> pixels = np.zeros((8, 6, 3), np.uint8)
    >>> with h5py.File("photographs.h5", "w") as file:
    ...     png = file.create_dataset("png", (10,), h5py.vlen_dtype(np.uint8))
    ...     for number in range(10):
    ...         png[number] = np.frombuffer(imagecodecs.png_encode(pixels), np.uint8)
    >>> image = ImageField("png", axes=(0, 3, 1, 2), scale=1 / 255)
    >>> with AsyncReader(hdf5_path="photographs.h5", fields={"image": image}) as reader:
    ...     print(reader.get_next_batch())
    <Batch 0 of epoch 0: image=(10, 3, 8, 6) float32>
    """

    if TYPE_CHECKING:

        def __init__(self, path: DatasetPath, **options: Unpack[ImageFieldOptions]) -> None: ...

    size: Annotated[tuple[_Pixels, _Pixels] | None, BeforeValidator(_size)] = None
    crop: Literal["center", "random"] = "center"
    crop_scale: tuple[_Positive, _Positive] = (0.08, 1.0)
    crop_ratio: tuple[_Positive, _Positive] = option(
        (3 / 4, 4 / 3), default_text="`(3 / 4, 4 / 3)`"
    )
    flip: Bool = False
    interpolation: Literal["auto", "linear", "area"] = "auto"
    decode: Literal["full", "scaled"] = "full"
    on_error: Literal["raise", "zero"] = "raise"

    @model_validator(mode="after")
    def _check_image(self) -> ImageField:
        if self.pad_to is not None:
            raise ValueError("pad_to is for ragged fields; size gives images one size")
        if self.decode_cf:
            raise ValueError("decode_cf cannot be used with images; use scale and offset")
        if self.axes is not None and sorted(self.axes, key=str) != [0, 1, 2, 3]:
            raise ValueError(
                "axes must have the numbers of samples (0), height (1), width (2) and channels (3)"
            )
        if self.size is None and self.steps is not None:
            raise ValueError("steps need size: all images of a sample must have the same size")
        if self.size is None and self.crop == "random":
            raise ValueError('crop="random" needs size')
        if self.decode == "scaled" and (self.size is None or self.interpolation == "area"):
            raise ValueError('decode="scaled" needs size, and interpolation="auto" or "linear"')
        if self.size is None and self.on_error == "zero":
            raise ValueError('on_error="zero" needs size: the size of a broken image is not known')
        for name, (low, high) in (("scale", self.crop_scale), ("ratio", self.crop_ratio)):
            if low > high:
                raise ValueError(f"crop_{name} must have the lower bound first")
        if self.crop_scale[1] > 1:
            raise ValueError("crop_scale must be 1 or less: a part is no larger than its image")
        return self


class AudioFieldOptions(RaggedFieldOptions, total=False):
    """The parameters of `AudioField` except its path."""

    channels: Integer
    """The number of channels that each recording must have. If there are several, a frame is an
    array of them.
    """
    mono: bool
    """Deliver the mean of all channels, however many there are."""
    sample_rate: Integer | None
    """The sample rate in Hz that each recording must have. None: any. Nothing is resampled."""
    frames: Integer | None
    """The maximum number of frames to deliver of each recording. None: all of them."""
    crop: Literal["start", "random"]
    """The part of a longer recording to deliver. `start`: its first frames. `random`: a random
    part, determined by seed, epoch and sample.
    """
    dense: bool
    """Deliver an array (samples, frames), or (samples, frames, channels), instead of `Ragged`:
    shorter recordings end with zeros. This needs `frames`.
    """


@documented(AudioFieldOptions)
class AudioField(RaggedField):
    """Encoded audio (WAV, FLAC, OGG and others of libsndfile), delivered as `Ragged` frames.

    The bytes of a recording are an element of a variable-length dataset, or flat values with
    `offsets`. `dtype` is float32 (the default), float64, int16 or int32, with soundfile's
    conversions.

    Examples
    --------
    >>> import io, soundfile
    >>> with h5py.File("speech.h5", "w") as file:
    ...     flac = file.create_dataset("flac", (3,), h5py.vlen_dtype(np.uint8))
    ...     for number in range(3):
    ...         encoded = io.BytesIO()
    ...         soundfile.write(encoded, np.zeros(400 + number), 16000, format="FLAC")
    ...         flac[number] = np.frombuffer(encoded.getvalue(), np.uint8)
    >>> with AsyncReader(hdf5_path="speech.h5", fields={"audio": AudioField("flac")}) as reader:
    ...     reader.get_next_batch().audio
    <Ragged: 3 samples, 1,203 values of float32>
    """

    if TYPE_CHECKING:

        def __init__(self, path: DatasetPath, **options: Unpack[AudioFieldOptions]) -> None: ...

    channels: Positive = 1
    mono: Bool = False
    sample_rate: Positive | None = None
    frames: Positive | None = None
    crop: Literal["start", "random"] = "start"
    dense: Bool = False

    @model_validator(mode="after")
    def _check_audio(self) -> AudioField:
        for name in ("axes", "scale", "offset", "decode_cf", "channel_dim", "normalize"):
            if getattr(self, name) not in (None, False):
                raise ValueError(f"{name} cannot be used with audio; compute in postprocess")
        if self.pad_to is not None:
            raise ValueError("pad_to is for ragged fields; give audio frames, and dense=True")
        if self.decoded_dtype.name not in ("float32", "float64", "int16", "int32"):
            raise ValueError(
                f"dtype of audio must be float32, float64, int16 or int32, found {self.dtype}"
            )
        if self.mono and self.channels != 1:
            raise ValueError("mono delivers one channel; leave out channels")
        if self.mono and self.decoded_dtype.kind != "f":
            raise ValueError(f"mono delivers means, which need a float dtype, found {self.dtype}")
        for name, is_given in (('crop="random"', self.crop == "random"), ("dense", self.dense)):
            if is_given and self.frames is None:
                raise ValueError(f"{name} needs frames: how many to deliver of each recording")
        return self

    @property
    def decoded_dtype(self) -> np.dtype[Any]:
        """The delivered dtype."""
        return np.dtype(np.float32) if self.dtype is None else self.dtype


class SparseFieldOptions(FieldOptions, total=False):
    """The parameters of `SparseField` except its path."""

    dense: bool
    """Deliver dense arrays (samples, columns), with the values' dtype unless `dtype` is given.
    `offset` is added everywhere, even if no value is stored.
    """
    columns: ArrayLike | Sequence[str] | None
    """The columns to deliver, in this order: their numbers, a mask, or names, which each file has
    in `var/_index`; in a file of 10x Genomics, names or ids of `features`.
    """
    missing: Literal["zero", "error"]
    """How to treat a column, chosen by name, that a file lacks. `zero`: it is 0 there, if another
    file has it. `error`: raise `DatasetError`.
    """
    totals: str | None
    """Also deliver the sum of the values of each row as an array of this name: float32 (samples,).
    All columns count, also those that are not delivered; nothing is read twice.
    """
    target_sum: float | None
    """Divide the values of each row by its total, and multiply them by this number, as scanpy's
    `normalize_total` does. Values are float32 then.
    """
    log1p: bool
    """Deliver log(1 + value), after `target_sum`. Values are float32 then."""


def _columns(value: object) -> object:
    if value is None or isinstance(value, Values):
        return value
    words = "must be the numbers of columns, a mask, or their names"
    array = one_dimensional(value, words)
    names = array.tolist() if array.dtype.kind in "UTO" else []
    if array.dtype.kind not in "biuUTO" or not all(isinstance(name, str) for name in names):
        raise ValueError(words)
    return tuple(names) if array.dtype.kind in "UTO" else Values(array)


@documented(SparseFieldOptions)
class SparseField(Field):
    """Rows of a sparse matrix in compressed form (CSR), delivered as `Csr`, or as dense rows.

    The path leads to the group of the matrix, as AnnData and 10x Genomics write it.

    Examples
    --------
    >>> with h5py.File("counts.h5", "w") as file:  # as AnnData writes it
    ...     group = file.create_group("X")
    ...     group.attrs["encoding-type"], group.attrs["shape"] = "csr_matrix", (2, 4)
    ...     group["data"], group["indices"], group["indptr"] = [1.0, 2.0], [3, 0], [0, 1, 2]
    >>> fields = {"x": SparseField("X", dense=True)}
    >>> with AsyncReader(hdf5_path="counts.h5", fields=fields) as reader:
    ...     reader.get_next_batch().x
    array([[0., 0., 0., 1.],
           [2., 0., 0., 0.]])
    """

    if TYPE_CHECKING:

        def __init__(self, path: DatasetPath, **options: Unpack[SparseFieldOptions]) -> None: ...

    dense: Bool = False
    columns: Annotated[Any, PlainValidator(_columns), PLAIN] = None
    missing: Literal["zero", "error"] = "zero"
    totals: str | None = None
    target_sum: _Positive | None = None
    log1p: Bool = False

    @model_validator(mode="after")
    def _check_sparse(self) -> SparseField:
        _require_no_steps(self)
        _require_first_dimension(self)
        if self.missing != "zero" and not isinstance(self.columns, tuple):
            raise ValueError("missing is for columns chosen by name")
        if isinstance(self.scale, tuple) or isinstance(self.offset, tuple):
            raise ValueError("scale and offset of sparse rows must be one number each")
        if self.decode_cf:
            raise ValueError("decode_cf cannot be used with sparse rows; use scale and offset")
        for name in ("scale", "offset", "dtype") if self.counts else ():
            if getattr(self, name) is not None and (name, self.dtype) != ("dtype", np.float32):
                raise ValueError(
                    f"{name} cannot be used with totals, target_sum or log1p, which are"
                    " computed from stored values, as float32; leave it out"
                )
        return self

    @property
    def is_scaled(self) -> bool:
        """Whether values are divided by totals, or logarithms are delivered."""
        return self.target_sum is not None or self.log1p

    @property
    def counts(self) -> bool:
        """Whether totals are delivered, or values scaled."""
        return self.totals is not None or self.is_scaled


def _require_no_steps(field: Field) -> None:
    if field.steps is not None:
        raise ValueError(
            "steps need fields whose samples have one shape, or images with a size; leave them out"
        )


def _require_first_dimension(field: Field) -> None:
    for name in ("region", "crop_group", "crop", "flip"):  # images and audio have their own
        is_own = name in ("crop", "flip") and isinstance(field, ImageField | AudioField)
        if getattr(field, name) and not is_own:
            raise ValueError(f"{name} is for fields whose samples have one shape; leave it out")
    if field.axes and field.num_dim == field.axes[0] != 0:
        raise ValueError(
            f"axes must begin with the dimension of the samples, 0, found {field.axes}"
        )
    if field.num_dim != 0:
        raise ValueError(f"num_dim must be 0 for this kind of field, found {field.num_dim}")


KINDS.update(ragged=RaggedField, sparse=SparseField, image=ImageField, audio=AudioField)
