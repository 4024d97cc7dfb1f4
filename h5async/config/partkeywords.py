"""The keywords of fields, sequences and splits, with the types of their values.

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
    """The keyword-only parameters of `Field`."""

    steps: str | ArrayLike | range | None
    """Rows to deliver for each sample, counted from its own: `range(-3, 1)`, or a list; in a TOML
    file also `"-3:1"`. A batch is then (samples, steps, ...).
    """
    pad: Literal["drop", "edge", "zero"]
    """How to treat steps that leave the sequence. `drop`: there are no such samples. `edge`: repeat
    its first or last row. `zero`: deliver zeros, before `scale` and `offset`.
    """
    pad_mask: DatasetPath | None
    """Name of another field of the batch, which tells the steps inside the sequence: bool (samples,
    steps).
    """


class FieldOptions(StepsOptions, total=False):
    """The parameters of `Field` except its path."""

    num_dim: SampleDimensionLike | None
    """The dimension that counts the samples, by number, or by name if the file names its
    dimensions; or a pair: those of sequences and of their steps.
    """
    axes: Sequence[DimensionLike] | None
    """The dataset's dimensions in the order of delivery, by number or name, the sample dimension
    first. None: the sample dimension, then the others in the file's order.
    """
    dtype: DTypeLike | None
    """Delivered dtype. None: the file's, in native byte order; float32 with a `scale` or `offset`.
    """
    scale: ArrayLike | None
    """A factor, or one per channel (index along the second delivered axis)."""
    offset: ArrayLike | None
    """A number to add after scaling, or one per channel."""
    decode_cf: bool
    """Unpack the values by the dataset's own attributes (CF conventions): apply `scale_factor` and
    `add_offset`; replace `_FillValue`, `missing_value` and values outside `valid_range` by NaN.
    Without a `dtype`: float32 or float64, as xarray chooses.
    """


class RaggedFieldOptions(FieldOptions, total=False):
    """The parameters of `RaggedField` except its path."""

    offsets: DatasetPath | None
    """Path of the dataset that tells where samples begin, if the values have no variable-length
    datatype.
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
    on_error: Literal["raise", "zero"]
    """How to treat an image that cannot be decoded. `raise`: the batch raises `ReadError`. `zero`:
    it is black, and counted in `ReaderStats.broken_images`; this needs `size`.
    """


class SparseFieldOptions(FieldOptions, total=False):
    """The parameters of `SparseField` except its path."""

    dense: bool
    """Deliver dense arrays (samples, columns), with the values' dtype unless `dtype` is given.
    `offset` is added everywhere, even if no value is stored.
    """
    columns: ArrayLike | Sequence[str] | None
    """The columns to deliver, in this order: their numbers, a mask, or names, which are looked up
    in each file in `var/_index`; in a file of 10x Genomics, names or ids of `features`.
    """
    missing: Literal["zero", "error"]
    """How to treat a column, chosen by name, that a file lacks. `zero`: it is 0 there, if another
    file has it. `error`: raise `DatasetError`.
    """


class SequencesOptions(TypedDict, total=False):
    """The parameters of `Sequences`."""

    groups: DatasetPath | None
    """A pattern of groups, such as `data/demo_*`: each matching group is a sequence, in natural
    order (`demo_2` before `demo_10`), and the paths of fields begin there.
    """
    only: DatasetPath | None
    """With `groups`: path of a dataset of names; other groups are left out."""
    ends: DatasetPath | None
    """Path of a dataset: for each sequence, one past its last row."""
    starts: DatasetPath | None
    """Path of a dataset: the first row of each sequence."""
    lengths: DatasetPath | None
    """Path of a dataset: the number of rows of each sequence."""
    ids: DatasetPath | None
    """Path of a dataset with a value per row; a sequence ends where it changes."""
    last: DatasetPath | Sequence[DatasetPath] | None
    """Path of a dataset with a bool per row, or several: a row for which one of them is true is the
    last of its sequence. Rows after the last such row are a sequence, too.
    """
    every: Integer
    """Use only every n-th row of a sequence as a sample, from its first one on."""


class SplitOptions(TypedDict, total=False):
    """The keyword parameters of `Split`."""

    seed: Integer
    """Another seed makes other parts."""
    by: DatasetPath | None
    """Path of a dataset: samples with the same value there stay together."""
    stratify: DatasetPath | None
    """Path of a dataset: each part has its share of the samples of each value."""
