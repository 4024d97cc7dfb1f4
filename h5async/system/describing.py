"""Generates docstrings and signatures of classes that take options, on access.

Nothing here imports pydantic, so that classes can be defined before their options are loaded.
"""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import textwrap
from collections.abc import Callable
from inspect import Parameter, Signature, signature
from typing import TYPE_CHECKING, Any, TypeVar, cast

from h5async.system.interruptions import suppressing

if TYPE_CHECKING:
    from pydantic import BaseModel

_LINE_LENGTH = 90

Class = TypeVar("Class", bound=type)


class OnAccess:
    """A class attribute that is computed from the class on access."""

    def __init__(self, make: Callable[[type], object]) -> None:
        self._make = make

    def __get__(self, _: object, cls: type) -> Any:
        return self._make(cls)


def takes_options(load: Callable[[], type[BaseModel]]) -> Callable[[Class], Class]:
    """Add the options of the model that `load` returns to a class's docstring and signature.

    Its ``__init__`` takes them as ``**options``. (Editors get them from its annotation.)
    """

    def add(cls: Class) -> Class:
        def made(of: type) -> Signature:
            if of is not cls:
                raise AttributeError("a subclass has a signature of its own")
            own = list(signature(cast("Any", cls).__init__).parameters.values())[1:-1]
            options = [
                Parameter(n, Parameter.KEYWORD_ONLY, default=... if f.is_required() else f.default)
                for n, f in load().model_fields.items()
            ]
            return Signature([*(p.replace(annotation=Parameter.empty) for p in own), *options])

        describe(cls, "Other Parameters", load, "Raises\n")
        cast("Any", cls).__signature__ = OnAccess(made)
        return cls

    return add


def describe(
    cls: type, section: str, load: Callable[[], type[BaseModel]], before: str, more: str = ""
) -> None:
    """Insert a section of a model's options, and `more`, before `before` in a docstring."""
    docstring = cls.__doc__
    if docstring is None:  # python -OO
        return

    def made(_: type) -> str:
        text, found, rest = inspect.cleandoc(docstring).partition(before)
        lines = [section, "-" * len(section)]
        for name, description in descriptions(load()).items():
            lines += [name, textwrap.indent(textwrap.fill(description, _LINE_LENGTH), "    ")]
        return "\n".join([text + lines[0], *lines[1:], "", more + found + rest])

    cls.__doc__ = cast("str", OnAccess(made))


def descriptions(model: type[BaseModel]) -> dict[str, str]:
    """Return the description of each option."""
    told: dict[str, str] = {}
    for base in reversed(model.__mro__):
        for keywords in vars(base).get("keywords", ()):
            told |= _docstrings(keywords)
    fields = model.model_fields.items()
    return {name: field.description or told.get(name, "") for name, field in fields}


@functools.cache
def _docstrings(keywords: type) -> dict[str, str]:
    """Return the docstrings below the keys of a `TypedDict`, by key, from its source code."""
    found: dict[str, str] = {}
    with suppressing(OSError):  # the source is missing
        (of_class,) = ast.parse(inspect.getsource(keywords)).body
        assert isinstance(of_class, ast.ClassDef)
        for name, text in itertools.pairwise(of_class.body):
            if isinstance(name, ast.AnnAssign) and isinstance(text, ast.Expr):
                found[ast.unparse(name.target)] = " ".join(ast.literal_eval(text.value).split())
    return found
