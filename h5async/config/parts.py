"""Defines options that choose samples: `indices`, `Split`, `weights`, `Sequences`, `sampler`."""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict, Unpack

import numpy as np
from numpy.typing import NDArray
from pydantic import BeforeValidator, PlainSerializer, PlainValidator, model_validator

from h5async.config.frozen import REQUIRED, Frozen, documented, option
from h5async.config.values import DatasetPath, Int, Integer, Name, Natural, Positive, shown
from h5async.errors import ConfigError

_WORDS = (
    "must be a slice, a range, an array of integers or of bools, a path in the file, the path of a"
    " .npy file, or a Split"
)
_WEIGHT_WORDS = (
    'must be an array of numbers, a path in the file, "balanced", or map files to numbers'
)
_NOT_GIVEN: Any = object()


class Values:
    """A copy of a one-dimensional array as an option's value: comparable and read-only."""

    def __init__(self, array: NDArray[Any]) -> None:
        self.array = np.array(array)
        self.array.setflags(write=False)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Values)
            and self.array.dtype == other.array.dtype
            and np.array_equal(self.array, other.array)
        )

    def __hash__(self) -> int:
        return hash(self.array.tobytes())

    def __repr__(self) -> str:
        return repr(self.array)


class SplitOptions(TypedDict, total=False):
    """The keyword parameters of `Split`."""

    seed: Integer
    """Another seed gives other parts."""
    by: DatasetPath | None
    """Name of a field, or path of a dataset: samples with the same value stay together."""
    stratify: DatasetPath | None
    """Name of a field, or path of a dataset: each part has its share of each value's samples."""


@documented(SplitOptions)
class Split(Frozen):
    """One of several disjoint parts of a dataset.

    Parts come from a keyed permutation: they are the same on every machine, and nothing is stored.
    Give the same `parts`, `seed`, `by` and `stratify` for each of them.

    Examples
    --------
    >>> parts = {"train": 0.9, "val": 0.1}
    >>> for name in parts:
    ...     split = Split(name, parts, stratify="labels")
    ...     with AsyncReader(hdf5_path="sample_data/digits.h5", indices=split) as reader:
    ...         print(name, reader.num_samples)
    train 1618
    val 179
    """

    name: str = option(REQUIRED, "Name of the part.")
    parts: Mapping[str, float] = option(
        REQUIRED,
        "The share of each part, by name. They sum up to 1, or less: the rest is in no part.",
    )
    seed: Int = 0
    by: Name | None = None
    stratify: Name | None = None

    def __init__(
        self,
        name: str = _NOT_GIVEN,
        parts: Mapping[str, float] = _NOT_GIVEN,
        **options: Unpack[SplitOptions],
    ) -> None:
        given = {"name": name, "parts": parts}
        found = {key: value for key, value in given.items() if value is not _NOT_GIVEN}
        super().__init__(**options, **found)

    @model_validator(mode="after")
    def _check(self) -> Split:
        shares = list(self.parts.values())
        if self.name not in self.parts:
            raise ValueError(f"there is no part {self.name!r} among {', '.join(self.parts)}")
        if not all(0 <= share <= 1 for share in shares) or sum(shares) > 1 + 1e-9:
            raise ValueError(
                f"the shares of parts must be numbers from 0 to 1, and sum up to 1 at most, found"
                f" {shown(dict(self.parts))}"
            )
        return self


def _indices(value: object) -> object:
    if value is None or isinstance(value, Split | Values | range):
        return value
    if isinstance(value, Mapping):
        return Split(**{str(name): given for name, given in value.items()})
    if isinstance(value, slice):
        return _of_slice(value)
    if isinstance(value, str | os.PathLike):
        text = os.fspath(value)
        if not isinstance(text, str) or not text:
            raise ValueError(_WORDS)
        return text
    array = one_dimensional(value, _WORDS)
    if not array.size and not isinstance(value, np.ndarray):
        array = array.astype(np.int64)
    if array.dtype.kind not in "biu":
        raise ValueError(_WORDS)
    return Values(array)


def one_dimensional(value: object, words: str) -> NDArray[Any]:
    """Return a value as an array; raise `ValueError` with `words` unless it has one dimension."""
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(words) from error
    if array.ndim != 1:
        raise ValueError(words)
    return array


def _of_slice(value: slice) -> str:
    try:
        ends = [
            "" if end is None else str(operator.index(end))
            for end in (value.start, value.stop, value.step)
        ]
    except TypeError as error:
        raise ValueError(_WORDS) from error
    return ":".join(ends if ends[2] else ends[:2])


def _weights(value: object) -> object:
    if value is None or isinstance(value, Values):
        return value
    if isinstance(value, Mapping):
        found = {os.fspath(file): weight for file, weight in value.items()}
        if not found or not all(_is_weight(weight) for weight in found.values()):
            raise ValueError(_WEIGHT_WORDS)
        return found
    if isinstance(value, str) and value:
        return value
    array = one_dimensional(value, _WEIGHT_WORDS)
    if array.dtype.kind not in "biuf":
        raise ValueError(_WEIGHT_WORDS)
    return Values(array.astype(np.float64))


def _is_weight(value: object) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return 0 <= value < math.inf


def plain_selection(value: object) -> object:
    """Return a value of these options in a form that JSON and the option accept.

    Raises `ConfigError` for a sampler, which is an object of the caller.
    """
    if isinstance(value, range | tuple):
        return list(value)
    if isinstance(value, Split):
        return value.model_dump()
    if isinstance(value, Values):
        return value.array.tolist()
    if value is None or isinstance(value, str | Mapping):
        return value
    raise ConfigError(f"sampler: {shown(value)} cannot be saved; leave it out")


def _sampler(value: object) -> object:
    if value is None or (hasattr(value, "__iter__") and not isinstance(value, str | bytes | dict)):
        return value
    raise ValueError("must be an iterable of sample numbers, or of lists of them")


_KINDS_OF_SEQUENCES = ("groups", "ends", "starts", "lengths", "ids", "last")


# A single path is a tuple, too.
_Names = Annotated[
    tuple[Name, ...], BeforeValidator(lambda it: (it,) if isinstance(it, str | bytes) else it)
]


class SequencesOptions(TypedDict, total=False):
    """The parameters of `Sequences`."""

    groups: DatasetPath | None
    """A pattern of groups, such as `data/demo_*`: each matching group is a sequence, in natural
    order (`demo_2` before `demo_10`), and the paths of fields are relative to it.
    """
    only: DatasetPath | None
    """With `groups`: path of a dataset of names of groups; others are left out."""
    ends: DatasetPath | None
    """Path of a dataset: for each sequence, one past its last row."""
    starts: DatasetPath | None
    """Path of a dataset: the first row of each sequence."""
    lengths: DatasetPath | None
    """Path of a dataset: the number of rows of each sequence."""
    ids: DatasetPath | None
    """Path of a dataset with a value per row; a sequence ends where it changes."""
    last: DatasetPath | Sequence[DatasetPath] | None
    """Path of a dataset with a bool per row, or several: a row where any of them is true is the
    last of its sequence. Rows after the last such row are a sequence, too.
    """
    across: Literal["files"] | None
    """With `files`, consecutive files, in the order of `hdf5_path`, are one sequence: years of
    weather, shards of a recording. Steps reach from one file into the next.
    """
    every: Integer
    """Use only every n-th row of a sequence as a sample, from its first one on."""
    offset: Integer | Literal["random"]
    """With `every`: the first row of a sequence that is a sample. `random`: each epoch, all samples
    of a sequence are shifted by a number of rows below `every`, drawn from seed and epoch; those
    shifted beyond its end continue at its start.
    """


@documented(SequencesOptions)
class Sequences(Frozen):
    """The sequences of a dataset: episodes, trajectories, recordings. Steps never leave them.

    One of `groups`, `ends`, `starts`, `lengths`, `ids`, `last` and `across` defines the sequences;
    without any, each file is one. The paths are those of datasets in each file.

    Examples
    --------
    >>> with h5py.File("demos.h5", "w") as file:
    ...     for number in range(3):
    ...         file[f"data/demo_{number}/actions"] = np.zeros((10, 7))
    >>> with AsyncReader(
    ...     hdf5_path="demos.h5",
    ...     fields={"actions": Field("actions", steps=range(4))},
    ...     sequences=Sequences(groups="data/demo_*"),
    ... ) as reader:
    ...     print(reader.num_samples, reader.get_next_batch())
    21 <Batch 0 of epoch 0: actions=(21, 4, 7) float64>
    """

    if TYPE_CHECKING:

        def __init__(self, **options: Unpack[SequencesOptions]) -> None: ...

    groups: Name | None = None
    only: Name | None = None
    ends: Name | None = None
    starts: Name | None = None
    lengths: Name | None = None
    ids: Name | None = None
    last: _Names | None = None
    across: Literal["files"] | None = None
    every: Positive = 1
    offset: Natural | Literal["random"] = 0

    @model_validator(mode="after")
    def _check(self) -> Sequences:
        kinds = *_KINDS_OF_SEQUENCES, "across"
        given = [name for name in kinds if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"give {given[0]} or {given[1]}, not both")
        if self.last == ():
            raise ValueError("last needs the path of a dataset, or several")
        if self.only is not None and self.groups is None:
            raise ValueError("only needs groups, and names some of them")
        if self.offset == "random" and self.every == 1:
            raise ValueError(
                'offset="random" needs every: it moves samples by fewer rows than that'
            )
        if self.offset != "random" and self.offset >= self.every:
            raise ValueError(f"offset must be below every={self.every}, found {self.offset}")
        return self

    @property
    def is_drawn(self) -> bool:
        """Whether epochs have different samples."""
        return self.offset == "random"

    @property
    def kind(self) -> str | None:
        """The option that defines the sequences; None if each file is one."""
        return next((name for name in _KINDS_OF_SEQUENCES if getattr(self, name) is not None), None)


def _sequences(value: object) -> object:
    if value is None or isinstance(value, Sequences):
        return value
    if isinstance(value, Mapping):
        return Sequences(**{str(name): option for name, option in value.items()})
    raise ValueError("must be Sequences, or a mapping of its parameters")


SequencesOption = Annotated[
    Sequences | None,
    BeforeValidator(_sequences),
    PlainSerializer(lambda it: it.model_dump(exclude_defaults=True), when_used="json-unless-none"),
]


PLAIN = PlainSerializer(plain_selection, when_used="json-unless-none")
Indices = Annotated[str | Any, PlainValidator(_indices), PLAIN]
Weights = Annotated[str | Any, PlainValidator(_weights), PLAIN]
Sampler = Annotated[Any, BeforeValidator(_sampler), PLAIN]
