"""Describes options: for the command line, the options page, help(), ? and completion.

Editors, which do not run the program, get the same from `ReaderOptions`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from inspect import Parameter, Signature, signature
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from h5async.config.frozen import Words, describe, descriptions
from h5async.config.readerconfig import ReaderConfig

_PLAIN_TYPES = (bool, int, float, str, Path)


@dataclass(frozen=True)
class Option:
    """One option of a configuration; `default_text`, `values` and `shell` are as in `option`.

    `type` is that of one value on a command line: bool, int, float, str or Path. It is str for
    numbers with a syntax of their own. `choices` are the only values, except None, and numbers if
    `type` is one; empty means any. A mapping is a list of values with names.
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
    """Return the options of a configuration, in order."""
    fields = model.model_fields
    return [_option(name, fields[name], text) for name, text in descriptions(model).items()]


def _option(name: str, field: Any, description: str) -> Option:
    kinds = list(_kinds(field.annotation))
    origins = [get_origin(kind) for kind in kinds]
    items = [get_args(kind)[0] for kind in kinds if get_origin(kind) is tuple]
    found = [kind for item in [*kinds, *items] for kind in _kinds(item) if kind in _PLAIN_TYPES]
    is_mapping = Mapping in origins
    words = next((one for one in field.metadata if isinstance(one, Words)), Words())
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
    """Yield the types in a union, except None."""
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from _kinds(get_args(annotation)[0])
    elif origin in (Union, UnionType):
        for member in get_args(annotation):
            yield from _kinds(member)
    elif annotation is not NoneType:
        yield annotation


Class = TypeVar("Class", bound=type)


def takes_options(cls: Class) -> Class:
    """Add the options of `ReaderConfig` to the docstring and the signature of a class.

    Its ``__init__`` takes them as ``**options``. Both are made on access.
    """
    describe(cls, "Other Parameters", ReaderConfig)
    described: Any = cls
    described.__signature__ = _Signature(cls)
    return cls


class _Signature:
    def __init__(self, cls: type) -> None:
        self._of = cls

    def __get__(self, _: object, cls: type) -> Signature:
        if cls is not self._of:
            raise AttributeError("a subclass has a signature of its own")
        of_init: Any = cls
        own = list(signature(of_init.__init__).parameters.values())[1:-1]
        options = [
            Parameter(name, Parameter.KEYWORD_ONLY, default=... if f.is_required() else f.default)
            for name, f in ReaderConfig.model_fields.items()
        ]
        return Signature([*(p.replace(annotation=Parameter.empty) for p in own), *options])
