"""Describes the options of a configuration: types, defaults and meanings, as its class has them.

The command line and the page of options are made from this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from h5async.config.frozen import Words

_PLAIN_TYPES = (bool, int, float, str, Path)


@dataclass(frozen=True)
class Option:
    """One option of a configuration.

    Attributes
    ----------
    name, description, shell
        Its name, what it means, and what it means on the command line.
    type
        The type of one value, as it is typed on a command line: bool, int, float, str or Path; str
        for numbers that are typed in a way of their own, which `values` says.
    choices
        The only values that there are, but None, and numbers where `type` is one; empty: any.
    is_list, is_mapping, is_function
        Whether it takes several values, whether these have names, and whether it takes a function.
    takes_names
        Whether it takes a name in place of an integer.
    is_required, default
        Whether it has to be given, and what it is where it is not given.
    default_text
        The default in words, where its value does not say it; else empty.
    values
        How its values are typed, where `type` and `choices` do not say it; else empty.
    """

    name: str
    description: str
    shell: str
    type: type
    choices: tuple[object, ...]
    is_list: bool
    is_mapping: bool
    is_function: bool
    takes_names: bool
    is_required: bool
    default: Any
    default_text: str
    values: str


def options_of(model: type[BaseModel]) -> list[Option]:
    """Return the options of a configuration, in their order."""
    return [_option(name, field) for name, field in model.model_fields.items()]


def _option(name: str, field: Any) -> Option:
    kinds = list(_kinds(field.annotation))
    origins = [get_origin(kind) for kind in kinds]
    items = [get_args(kind)[0] for kind in kinds if get_origin(kind) is tuple]
    found = [kind for item in [*kinds, *items] for kind in _kinds(item) if kind in _PLAIN_TYPES]
    is_mapping = Mapping in origins
    words = next((one for one in field.metadata if isinstance(one, Words)), Words())
    description = field.description or ""
    return Option(
        name=name,
        description=description,
        shell=words.shell or description,
        type=str if not found or (found[0] is int and words.values) else found[0],
        choices=tuple(v for k in kinds if get_origin(k) is Literal for v in get_args(k)),
        is_list=tuple in origins or is_mapping,
        is_mapping=is_mapping,
        is_function=Callable in origins,
        takes_names=int in found and str in found,
        is_required=field.default is PydanticUndefined,
        default=field.default,
        default_text=words.default_text,
        values=words.values,
    )


def _kinds(annotation: Any) -> Iterator[Any]:
    """Yield the types of which a value may be one, None left out."""
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from _kinds(get_args(annotation)[0])
    elif origin in (Union, UnionType):
        for member in get_args(annotation):
            yield from _kinds(member)
    elif annotation is not NoneType:
        yield annotation
