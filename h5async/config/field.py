"""Defines `Field`: the dataset of a field of a batch, and how its samples are delivered."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, SupportsIndex, TypedDict, Unpack

import numpy as np
from numpy.typing import ArrayLike, DTypeLike
from pydantic import (
    AfterValidator,
    BeforeValidator,
    PlainSerializer,
    PlainValidator,
    model_validator,
)

from h5async.config import values
from h5async.config.frozen import REQUIRED, Frozen, documented, hint_for, option
from h5async.config.statistics import Statistics
from h5async.errors import ConfigError
from h5async.spelling import Spell, as_keyword

Per = Literal["sequence", "file", "dataset"]
_NOT_GIVEN: Any = object()


def _normalize(value: object) -> object:
    if value is None or isinstance(value, Statistics):
        return value
    if isinstance(value, Mapping):
        return Statistics.of_dict(value)
    if not isinstance(value, str | os.PathLike) or not os.fspath(value):
        raise ValueError("must be the path of a file of statistics, or Statistics")
    return os.path.expanduser(os.fsdecode(value))


Normalize = Annotated[
    Any,
    PlainValidator(_normalize),
    PlainSerializer(lambda one: one.as_dict() if isinstance(one, Statistics) else one),
]
# By name, in the order in which messages suggest them; `kinds.py` defines them.
KINDS: dict[str, type[Field]] = {}
_RESERVED_NAMES = frozenset(
    "copy count epoch index keys last number sequence size static step".split()
)


class StepsOptions(TypedDict, total=False):
    """The keyword-only parameters that all kinds of fields have."""

    channel_dim: values.DimensionLike | None
    """The dataset's channel dimension, by number or name, for a `scale`, `offset` or `normalize`
    per channel. None: the second delivered dimension; for images, the colors.
    """
    normalize: str | os.PathLike[str] | Statistics | Mapping[str, Any] | None
    """Deliver ``(x - mean) / std``: `Statistics` from `h5async.statistics`, or the path of a file
    saved by these or by `h5async stats`. They become `scale` and `offset`, for each channel or
    feature; a `std` of 0 counts as 1.
    """
    steps: str | ArrayLike | range | None
    """Rows to deliver for each sample, relative to its own row: `range(-3, 1)`, or a list; in a
    TOML file also `"-3:1"`. A batch is then (samples, steps, ...).
    """
    pad: Literal["drop", "edge", "zero"]
    """How to treat steps outside the sequence. `drop`: leave out samples with such steps. `edge`:
    repeat the first or last row. `zero`: deliver zeros, before `scale` and `offset`.
    """
    pad_mask: values.DatasetPath | None
    """Name of an additional array of the batch: bool (samples, steps), True for steps inside the
    sequence.
    """
    per: Per | None
    """Read one value per `sequence`, per `file`, or for the whole `dataset`. Each sample gets the
    value of its sequence or file; the value for the dataset is in ``reader.static`` and
    ``batch.static``. The path may name an attribute: ``group@attribute``.
    """


class PartOptions(StepsOptions, total=False):
    """The keyword-only parameters of `Field`; other kinds of fields lack some of them."""

    categories: bool | Sequence[str | int] | str | None
    """Deliver strings or numbers as int64 codes of categories, which `reader.categories` lists.
    True: all values, sorted. A list: these names. A path: the names in that dataset of each file.
    """
    region: values.RegionLike | None
    """The part of each row to read: a slice for each dimension, by number or by name if the file
    names its dimensions. Other dimensions are read whole.
    """
    crop: values.CropLike | None
    """The size of a part of each row (or of its region) to read: a number of elements for each
    dimension, by number or name; or one number for the last two dimensions. The batch also has
    `NAME_crop`, int64 (samples, dimensions): where each part begins.
    """
    crop_at: values.CropAt
    """Position of the crop. `random`: drawn for each sample and epoch. `center`: in the middle."""
    crop_group: str | None
    """Fields with the same group are cropped at the same positions, and flipped together; None is
    a group, too.
    """
    flip: values.FlipLike
    """Flip crops, or whole rows, at random, half of them on average. True: along the last dimension
    of the crop. A list: along each of these dimensions, independently.
    """


class FieldOptions(StepsOptions, total=False):
    """The parameters of `Field` except its path."""

    num_dim: values.SampleDimensionLike | None
    """The sample dimension, by number, or by name if the file names its dimensions; or a pair: the
    dimensions of sequences and of their steps.
    """
    axes: Sequence[values.DimensionLike] | None
    """The dataset's dimensions in the order of delivery, by number or name, the sample dimension
    first. None: the sample dimension, then the others in the file's order.
    """
    dtype: DTypeLike | None
    """Delivered dtype: NumPy's, PyTorch's, or `"bfloat16"` (from the package ml_dtypes; not on a
    GPU). None: the file's, in native byte order; float32 with a `scale` or `offset`.
    """
    scale: ArrayLike | None
    """A factor, or one per channel (see `channel_dim`), or one per element of a row."""
    offset: ArrayLike | None
    """A number to add after scaling, or one per channel or element, as for `scale`."""
    decode_cf: bool
    """Unpack the values by the dataset's own attributes (CF conventions): apply `scale_factor` and
    `add_offset`; replace `_FillValue`, `missing_value` and values outside `valid_range` with NaN.
    Without a `dtype`: float32 or float64, as in xarray. `scale` and `offset` apply after that.
    """


@documented(FieldOptions, PartOptions, StepsOptions)
class Field(Frozen):
    """A dataset, and how its samples are delivered.

    The delivered value is ``stored.astype(dtype) * scale + offset``, with the dataset's dimensions
    in the order of `axes`. Arithmetic is done in `dtype`. Casts are NumPy's ``astype``: the result
    for a float outside an integer's range is undefined. With `decode_cf`, values are unpacked
    according to the dataset's attributes.

    Examples
    --------
    >>> fields = {"image": Field("data", scale=1 / 16), "digit": "labels"}
    >>> with AsyncReader(hdf5_path="sample_data/digits.h5", fields=fields) as reader:
    ...     batch = reader.get_next_batch()
    >>> batch
    <Batch 0 of epoch 0: image=(32, 8, 8) float32, digit=(32,) int64>
    """

    path: values.Name = option(
        REQUIRED,
        "Path of the dataset in the HDF5 file; ``masks.h5::mask``: in another file, beside it.",
    )
    num_dim: values.SampleDimension = option(0, default_text="0, or the first of `axes`")
    axes: values.Dimensions | None = None
    dtype: values.DType = None
    scale: values.Number | None = None
    offset: values.Number | None = None
    categories: values.CategoryNames = None
    decode_cf: values.Bool = False
    channel_dim: values.Dimension | None = None
    normalize: Normalize = None
    steps: values.Steps = None
    pad: Literal["drop", "edge", "zero"] = "drop"
    pad_mask: values.Name | None = None
    per: Per | None = None
    region: values.Region = None
    crop: values.Crop = None
    crop_at: values.CropAt = "random"
    crop_group: str | None = None
    flip: values.Flip = False

    def __init__(
        self,
        path: values.DatasetPath = _NOT_GIVEN,
        num_dim: values.SampleDimensionLike | None = None,
        axes: Sequence[values.DimensionLike] | None = None,
        dtype: DTypeLike | None = None,
        scale: ArrayLike | None = None,
        offset: ArrayLike | None = None,
        decode_cf: bool = False,
        **others: Unpack[PartOptions],
    ) -> None:
        if num_dim is None:
            first: object = next(iter(axes), 0) if isinstance(axes, Iterable) else 0
            num_dim = first if isinstance(first, str | SupportsIndex) else 0
        of_path = {} if path is _NOT_GIVEN else {"path": path}
        super().__init__(
            num_dim=num_dim,
            axes=axes,
            dtype=dtype,
            scale=scale,
            offset=offset,
            decode_cf=decode_cf,
            **others,
            **of_path,
        )

    @model_validator(mode="after")
    def _check(self) -> Field:
        if self.steps is None and (self.pad != "drop" or self.pad_mask is not None):
            name = "pad" if self.pad != "drop" else "pad_mask"
            raise ValueError(f"{name} needs steps, which say what rows each sample consists of")
        if self.per is not None and (self.steps is not None or type(self) is not Field):
            what = "a field of steps" if self.steps is not None else type(self).__name__
            raise ValueError(f"per is for plain fields, and this is {what}; leave it out")
        parts = [name for name in ("region", "crop", "flip") if getattr(self, name)]
        if self.per is not None and parts:
            raise ValueError(f"{parts[0]} is for rows of samples, and with per there are none")
        if type(self) is Field and self.crop is None and self.crop_at == "center":
            raise ValueError("crop_at needs crop, which says how large the part is")
        self._check_axes()
        if self.categories is not None:
            self._check_categories()
        if self.normalize is not None and (self.scale is not None or self.offset is not None):
            raise ValueError(
                "normalize sets scale and offset; leave these out, or compute in postprocess"
            )
        if self.decode_cf and self.dtype is not None and not values.is_float(self.dtype):
            raise ValueError(
                f"decode_cf delivers NaN for missing values and needs a float dtype, found"
                f" dtype={self.dtype}"
            )
        if self._is_scaled and self.dtype is not None and not values.is_float(self.dtype):
            raise ValueError(
                f"{'normalize needs' if self.normalize is not None else 'scale and offset need'} a"
                f" float dtype, found dtype={self.dtype}; choose a float dtype, or scale in"
                " postprocess"
            )
        return self

    def _check_categories(self) -> None:
        if type(self) is not Field or self.per == "dataset":
            raise ValueError("categories need a plain Field with a value for each sample")
        if self._is_scaled or self.decode_cf or self.axes is not None:
            raise ValueError("categories cannot be used with scale, offset, decode_cf or axes")
        if self.dtype is None:
            self.__dict__["dtype"] = np.dtype(np.int64)
        elif self.dtype.kind != "i":
            raise ValueError(f"categories need a signed integer dtype, found {self.dtype}")

    def _check_axes(self) -> None:
        of_samples = self.num_dim if isinstance(self.num_dim, tuple) else (self.num_dim,)
        if len(set(of_samples)) != len(of_samples):
            raise ValueError(f"num_dim must name two dimensions, found {self.num_dim}")
        if self.axes is not None:
            if len(set(self.axes)) != len(self.axes) or not self.axes:
                raise ValueError(f"axes must name each dimension once, found {self.axes}")
            # (Only the file can tell whether a name and a number are the same dimension.)
            pairs = zip(self.axes, of_samples, strict=False)
            if len(self.axes) < len(of_samples) or any(
                isinstance(a, str) == isinstance(b, str) and a != b for a, b in pairs
            ):
                raise ValueError(
                    f"axes must begin with the sample dimension num_dim={self.num_dim!r},"
                    f" found {self.axes}"
                )

    @classmethod
    def instead_of(cls, name: str, spell: Spell) -> str:
        """Return a suggestion for an unknown name; another kind of field may have it."""
        other, hint = _kind_with(name, cls), hint_for(name, list(cls.model_fields), spell)
        if other is None:
            return super().instead_of(name, spell)
        text = f"{other.capitalize()}Field has it"
        if spell is not as_keyword:
            text = _instead_of_kind(other, spell)
        return text if hint is None else f"{text}; {hint}"

    @property
    def names_axes(self) -> bool:
        """Whether any dimension other than the sample dimension is given by name."""
        parts = [one.dimension for one in self.region or ()]
        parts += [dim for dim, _ in self.crop] if isinstance(self.crop, tuple) else []
        parts += self.flip if isinstance(self.flip, tuple) else []
        named = *(self.axes or ()), self.channel_dim, *parts
        return any(isinstance(axis, str) for axis in named)

    @property
    def delivered_dtype(self) -> np.dtype[Any] | None:
        """The requested dtype, float32 if scaling implies it, or None for the file's own."""
        return np.dtype(np.float32) if self.dtype is None and self._is_scaled else self.dtype

    def normalized(self, name: str) -> Field:
        """Return the field with `normalize`, if set, replaced by a scale and offset.

        `name` is the field's name. ConfigError if the statistics do not have it.
        """
        if self.normalize is None:
            return self
        several, where = self.normalize, "normalize"
        if not isinstance(several, Statistics):
            several, where = Statistics.load(several), f"normalize={str(several)!r}"
        try:
            found = several.of_field(name, self.path)
            scale, offset = found.factors()
            options = {key: getattr(self, key) for key in self.model_fields_set}
            options |= {"normalize": None, "scale": scale, "offset": offset}
            if self.channel_dim is None:
                options["channel_dim"] = found.channel_dim
            return type(self)(**options)
        except ConfigError as error:
            raise ConfigError(f'"{self.path}" ({name}): {where}: {error.marked}') from error

    @property
    def _is_scaled(self) -> bool:
        return any(one is not None for one in (self.scale, self.offset, self.normalize))


def _field(value: object) -> Field:
    if isinstance(value, Field):
        return value
    if isinstance(value, str | bytes):
        return Field(value)
    if isinstance(value, Mapping):
        options = {str(name): option for name, option in value.items()}
        chosen = kind_of(options.pop("kind", None))
        for name in options:
            other = _kind_with(name, chosen)
            if other is not None:
                use = _instead_of_kind(other, as_keyword)
                raise ConfigError(f"unknown option {name!r}; {use}")
        return chosen(**options)
    raise ConfigError(f"must be a path or a Field, found {values.shown(value)}")


def kind_of(name: object) -> type[Field]:
    """Return the field class of a kind's name, or `Field` for None.

    Raises `ConfigError` for an unknown kind.
    """
    if name is None:
        return Field
    if name not in KINDS:
        raise ConfigError(
            f"kind: must be one of {', '.join(sorted(KINDS))}, found {values.shown(name)}"
        )
    return KINDS[str(name)]


def _kind_with(option: str, chosen: type[Field]) -> str | None:
    """Return a kind of field that has an option, or None if the chosen one has it or none does."""
    if option in chosen.model_fields:
        return None
    return next((name for name, kind in KINDS.items() if option in kind.model_fields), None)


def _instead_of_kind(kind: str, spell: Spell) -> str:
    return f"it is an option of {kind} fields: set {spell('kind', (kind,))}"


def _fields(value: object) -> dict[Any, Field]:
    if not isinstance(value, Mapping):
        raise ValueError("must map names to paths or Fields")
    found = {}
    for name, field in value.items():
        try:
            found[name] = _field(field)
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from error
    return found


def _names_that_fit(fields: Mapping[str, Field]) -> Mapping[str, Field]:
    if all(field.per is not None for field in fields.values()):
        which = "whose rows are samples: one without per" if fields else ""
        raise ValueError(f"give at least one field {which}".rstrip())
    names: list[object] = [*fields]
    for name, field in fields.items():
        for by, made in _made_beside(name, field):
            if made in names:
                raise ValueError(
                    f"{name}: {by} delivers {made!r}, which already exists; choose another name"
                )
            names.append(made)
    check_names(names)
    return fields


def _made_beside(name: str, field: Field) -> Iterator[tuple[str, str]]:
    """Yield the options that add arrays beside the field's own to a batch, and their names."""
    if field.pad_mask is not None:
        yield "pad_mask", field.pad_mask
    if getattr(field, "pad_to", None) is not None:
        yield "pad_to", f"{name}_mask"
    if type(field) is Field and field.crop is not None:
        yield "crop", f"{name}_crop"
    if getattr(field, "totals", None) is not None:
        yield "totals", field.totals  # type: ignore[attr-defined]
    if getattr(field, "pack", None) is not None:
        yield from (("pack", f"{name}_{what}") for what in ("documents", "positions"))


def check_names(names: Sequence[object]) -> None:
    """Raise ValueError if a name of an array of a batch is reserved, or is not a string."""
    for name in names:
        if not isinstance(name, str):
            raise ValueError(f"names of arrays must be strings, found {name!r}")
        if name in _RESERVED_NAMES:
            raise ValueError(
                f"a field cannot be named {name!r}, because a batch has an attribute of that name;"
                " choose another name"
            )


Fields = Annotated[
    Mapping[values.Name, Field], BeforeValidator(_fields), AfterValidator(_names_that_fit)
]
