"""The keywords that fields, sequences and splits take, with the types of their values.

See `keywords.py`, which has those of readers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, SupportsIndex, TypeAlias, TypedDict

from numpy.typing import ArrayLike, DTypeLike

DatasetPath: TypeAlias = str | bytes
Integer: TypeAlias = int | SupportsIndex  # NumPy's, too
DimensionLike: TypeAlias = Integer | str
SampleDimensionLike: TypeAlias = DimensionLike | Sequence[DimensionLike]


class StepsOptions(TypedDict, total=False):
    """What `Field` takes by keyword alone."""

    steps: str | ArrayLike | range | None
    """Which rows are delivered of each sample, counted from its own: `range(-3, 1)`, or a list; in
    a TOML file also `"-3:1"`. A batch is (samples, steps, ...) then.
    """
    pad: Literal["drop", "edge", "zero"]
    """What becomes of steps that leave the sequence. `drop`: there are no such samples. `edge`: its
    first or last row stands for them. `zero`: zeros do, before `scale` and `offset`.
    """
    pad_mask: DatasetPath | None
    """The name under which a batch has which steps were there: bool (samples, steps)."""


class FieldOptions(StepsOptions, total=False):
    """The parameters of `Field` but its path."""

    num_dim: SampleDimensionLike | None
    """The dimension that counts the samples: its number, or its name, where the file names its
    dimensions; or two of them, those of sequences and of their steps.
    """
    axes: Sequence[DimensionLike] | None
    """The dataset's dimensions in the order of delivery, by number or by name, the sample dimension
    first. None: the sample dimension, then the others in the file's order.
    """
    dtype: DTypeLike | None
    """Delivered dtype. None: the file's, in native byte order; with a `scale` or `offset`: float32.
    """
    scale: ArrayLike | None
    """A factor, or one for each channel (index along the second delivered axis)."""
    offset: ArrayLike | None
    """What is added after scaling: a number, or one for each channel."""
    decode_cf: bool
    """Unpack the values as the dataset's own attributes say (the CF conventions): `scale_factor`
    and `add_offset` are applied, and NaN stands for `_FillValue`, `missing_value`, and what lies
    outside `valid_range`. Without a `dtype`: float32 or float64, as xarray chooses.
    """


class RaggedFieldOptions(FieldOptions, total=False):
    """The parameters of `RaggedField` but its path."""

    offsets: DatasetPath | None
    """Path of the dataset that says where samples begin, if the values have no variable-length
    datatype.
    """
    offsets_kind: Literal["offsets", "ends", "lengths"]
    """What that dataset holds. `offsets`: where each sample begins, and, as one number more, where
    the last one ends. `ends`: where each sample ends. `lengths`: how many values each sample has.
    """
    pad_to: Integer | None
    """Deliver an array (samples, pad_to, ...) in place of `Ragged`: shorter samples end with zeros,
    and of longer ones the first values are taken. The batch has `NAME_mask`, too: bool (samples,
    pad_to), whether it is a value of the sample.
    """


class ImageFieldOptions(RaggedFieldOptions, total=False):
    """The parameters of `ImageField` but its path."""

    size: int | Sequence[int] | None
    """Resize images to this height and width (a number: both), by OpenCV. None: they keep their
    sizes, and a batch of images of differing sizes is `Images`.
    """
    crop: Literal["center", "random"]
    """What part is resized to `size`. `center`: the largest one in the middle that has its
    proportions. `random`: one of random area, proportions and place, as torchvision's
    RandomResizedCrop chooses it.
    """
    crop_scale: Sequence[float]
    """Bounds of the area of a random part, of that of the image."""
    crop_ratio: Sequence[float]
    """Bounds of its width divided by its height."""
    flip: bool
    """Flip every other image, chosen at random, left to right."""
    interpolation: Literal["auto", "linear", "area"]
    """How OpenCV resizes. `linear`: between neighbours. `area`: the mean of an area, which is free
    of aliasing, and slower. `auto`: `area` where an image shrinks to less than half, else `linear`.
    """
    on_error: Literal["raise", "zero"]
    """What becomes of an image that cannot be decoded. `raise`: the batch is a `ReadError`. `zero`:
    it is black, and counted in `ReaderStats.broken_images`; this needs `size`.
    """


class SparseFieldOptions(FieldOptions, total=False):
    """The parameters of `SparseField` but its path."""

    dense: bool
    """Deliver ordinary arrays (samples, columns), of the values' dtype where `dtype` says no other.
    `offset` is added to all of them, also where no value is stored.
    """
    columns: ArrayLike | Sequence[str] | None
    """Which columns: their numbers, a mask, or names, which are looked up in each file in
    `var/_index`; in one of 10x Genomics, names or ids of `features`. They come in this order.
    """
    missing: Literal["zero", "error"]
    """What becomes of a column that is chosen by its name, and that a file lacks. `zero`: it is 0
    there, if another file has it. `error`: the reader is a `DatasetError`.
    """


class SequencesOptions(TypedDict, total=False):
    """The parameters of `Sequences`."""

    groups: DatasetPath | None
    """A pattern of groups, such as `data/demo_*`: each group that matches is a sequence, in natural
    order (`demo_2` before `demo_10`), and the paths of fields begin there.
    """
    only: DatasetPath | None
    """With `groups`: path of a dataset of names; other groups are left out."""
    ends: DatasetPath | None
    """Path of a dataset: the row behind the last one of each sequence."""
    starts: DatasetPath | None
    """Path of a dataset: the first row of each sequence."""
    lengths: DatasetPath | None
    """Path of a dataset: how many rows each sequence has."""
    ids: DatasetPath | None
    """Path of a dataset with a value for each row; a sequence ends where it changes."""
    last: DatasetPath | Sequence[DatasetPath] | None
    """Path of a dataset with a bool for each row, or several: a row for which one of them is true
    is the last of its sequence. Rows behind the last such row are a sequence, too.
    """
    every: Integer
    """Only every so many rows of a sequence is a sample."""


class SplitOptions(TypedDict, total=False):
    """The parameters of `Split` that are given by keyword."""

    seed: Integer
    """Another seed makes other parts."""
    by: DatasetPath | None
    """Path of a dataset: samples for which it has the same value stay together."""
    stratify: DatasetPath | None
    """Path of a dataset: each part has its share of the samples of each value."""
