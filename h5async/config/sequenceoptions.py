"""Defines the option `sequences`: what the steps of a sample never leave."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Unpack

from pydantic import BeforeValidator, PlainSerializer, model_validator

from h5async.config.frozen import Frozen, documented, option
from h5async.config.values import Name, Positive

if TYPE_CHECKING:
    from h5async.config.partkeywords import SequencesOptions

_KINDS = ("groups", "ends", "starts", "lengths", "ids", "last")


def _names(value: object) -> object:
    """Make a single path a tuple."""
    return (value,) if isinstance(value, str | bytes) else value


@documented
class Sequences(Frozen):
    """The sequences of a dataset: episodes, trajectories, recordings. Steps never leave them.

    One of `groups`, `ends`, `starts`, `lengths`, `ids` and `last` defines the sequences; without
    any, each file is one. The paths are of datasets that each file has.

    Raises
    ------
    ConfigError
        If a value is invalid.

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

    groups: Name | None = option(
        None,
        "A pattern of groups, such as `data/demo_*`: each matching group is a sequence, in"
        " natural order (`demo_2` before `demo_10`), and the paths of fields begin there.",
    )
    only: Name | None = option(
        None, "With `groups`: path of a dataset of names; other groups are left out."
    )
    ends: Name | None = option(None, "Path of a dataset: for each sequence, one past its last row.")
    starts: Name | None = option(None, "Path of a dataset: the first row of each sequence.")
    lengths: Name | None = option(None, "Path of a dataset: the number of rows of each sequence.")
    ids: Name | None = option(
        None, "Path of a dataset with a value per row; a sequence ends where it changes."
    )
    last: Annotated[tuple[Name, ...], BeforeValidator(_names)] | None = option(
        None,
        "Path of a dataset with a bool per row, or several: a row for which one of them is true"
        " is the last of its sequence. Rows after the last such row are a sequence, too.",
    )
    every: Positive = option(
        1, "Use only every n-th row of a sequence as a sample, from its first one on."
    )

    @model_validator(mode="after")
    def _check(self) -> Sequences:
        given = [name for name in _KINDS if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"give {given[0]} or {given[1]}, not both")
        if self.last == ():
            raise ValueError("last needs the path of a dataset, or several")
        if self.only is not None and self.groups is None:
            raise ValueError("only needs groups, and names some of them")
        return self

    @property
    def kind(self) -> str | None:
        """The option that defines the sequences; None if each file is one."""
        return next((name for name in _KINDS if getattr(self, name) is not None), None)


def _sequences(value: object) -> object:
    if value is None or isinstance(value, Sequences):
        return value
    if isinstance(value, Mapping):
        return Sequences(**{str(name): option for name, option in value.items()})
    raise ValueError("must be Sequences, or a mapping of its parameters")


def _plain(value: Any) -> Any:
    return None if value is None else value.model_dump(exclude_defaults=True)


SequencesOption = Annotated[
    Sequences | None,
    BeforeValidator(_sequences),
    PlainSerializer(_plain, when_used="json-unless-none"),
]
