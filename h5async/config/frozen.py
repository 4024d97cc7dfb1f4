"""The base of all configurations: frozen, documented, with messages that name the option."""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import re
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from inspect import Parameter, Signature, signature
from typing import Any, ClassVar, NoReturn, TypeVar, cast

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic import Field as Bound

from h5async.config.hints import Where, hint_for
from h5async.config.values import shown
from h5async.errors import ConfigError
from h5async.spelling import named
from h5async.system.interruptions import interruption, raise_again, suppressing

REQUIRED: Any = ...
_ANCESTOR_NAMES = {"nthread": "num_threads", "njob": "prefetch", "cuda": "device"}
_LINE_LENGTH = 90
_RAISES = """\
Raises
------
ConfigError
    If an option is unknown or its value is invalid.

"""

Model = TypeVar("Model", bound=BaseModel)
Class = TypeVar("Class", bound=type)


class _OnAccess:
    """An attribute that is made when it is asked for, from the class."""

    def __init__(self, make: Callable[[type], object]) -> None:
        self._make = make

    def __get__(self, _: object, cls: type) -> Any:
        return self._make(cls)


def _add_descriptions(schema: dict[str, Any], model: type[BaseModel]) -> None:
    for name, description in descriptions(model).items():
        schema["properties"][name]["description"] = description


class Frozen(BaseModel):
    """A configuration: unknown options and invalid values raise `ConfigError`."""

    keywords: ClassVar[tuple[type, ...]] = ()  # see `documented`

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        arbitrary_types_allowed=True,
        defer_build=True,
        json_schema_extra=_add_descriptions,
    )

    def __init__(self, **options: Any) -> None:
        self.check_names(options)
        try:
            super().__init__(**options)
        except ValidationError as error:
            for item in error.errors():
                found = interruption(item.get("ctx", {}).get("error"))
                if found is not None:
                    raise_again(found)
            raise ConfigError(_message(error)) from None

    @classmethod
    def check_names(cls, names: Iterable[str], where: Where = "keyword") -> None:
        """Check that names are options; else raise `ConfigError`, spelled as in `where`."""
        for name in names:
            if name not in cls.model_fields:
                raise ConfigError(f"unknown option {name!r}; {cls.instead_of(name, where)}")

    @classmethod
    def instead_of(cls, name: str, where: Where) -> str:
        """Return what to write for an unknown name: its meaning elsewhere, or a similar name."""
        import difflib

        known = list(cls.model_fields)
        expected = hint_for(name, known, where)
        if expected is not None:
            return expected
        near = _ANCESTOR_NAMES.get(name)
        if near not in known:
            snake = re.sub(r"(?<=[a-z0-9])([A-Z])", r"_\1", name).lower()
            near = next(iter(difflib.get_close_matches(snake, known, n=1, cutoff=0.5)), None)
        return f"did you mean {near!r}?" if near else f"options are: {', '.join(known)}"


def _absent(_: type) -> NoReturn:
    raise AttributeError


# pydantic's deprecated method: `copy` may be the name of an option.
Frozen.copy = _OnAccess(_absent)  # type: ignore[assignment,method-assign]


@dataclass(frozen=True)
class Words:
    """Texts about an option: metadata of its type, which pydantic ignores.

    `shell` is its meaning on the command line, if different; `default_text`, the default in words,
    if its value does not tell; `values`, the syntax of its values, if its type does not tell:
    ``"auto|cpu|cuda"``.
    """

    default_text: str = ""
    values: str = ""
    shell: str = ""


def option(default: Any, description: str = "", **words: str) -> Any:
    """Declare an option, with its default or `REQUIRED`, and `Words`.

    `description` is its meaning, unless a docstring tells; see `documented`.
    """
    declared = Bound(default, description=description or None)
    declared.metadata.append(Words(**words))
    return declared


def documented(*keywords: type) -> Callable[[type[Model]], type[Model]]:
    """Add the descriptions of all options, and what is raised, to a class's docstring.

    They are the docstrings in `keywords`: in `TypedDict`s of the options, where editors find them.
    """

    def add(model: type[Model]) -> type[Model]:
        cast("Any", model).keywords = keywords
        _describe(model, "Parameters", model, "Examples\n", _RAISES)
        return model

    return add


def takes_options(model: type[BaseModel]) -> Callable[[Class], Class]:
    """Add the options of a model to the docstring and the signature of a class.

    Its ``__init__`` takes them as ``**options``. (Editors get the same from its annotation.)
    """

    def add(cls: Class) -> Class:
        def made(of: type) -> Signature:
            if of is not cls:
                raise AttributeError("a subclass has a signature of its own")
            own = list(signature(cast("Any", cls).__init__).parameters.values())[1:-1]
            options = [
                Parameter(n, Parameter.KEYWORD_ONLY, default=... if f.is_required() else f.default)
                for n, f in model.model_fields.items()
            ]
            return Signature([*(p.replace(annotation=Parameter.empty) for p in own), *options])

        _describe(cls, "Other Parameters", model, "Raises\n")
        cast("Any", cls).__signature__ = _OnAccess(made)
        return cls

    return add


def _describe(cls: type, section: str, model: type[BaseModel], before: str, more: str = "") -> None:
    """Add a section with a model's options to a class's docstring, and more, before another one."""
    docstring = cls.__doc__
    if docstring is None:  # python -OO
        return

    def made(_: type) -> str:
        text, found, rest = inspect.cleandoc(docstring).partition(before)
        lines = [section, "-" * len(section)]
        for name, description in descriptions(model).items():
            lines += [name, textwrap.indent(textwrap.fill(description, _LINE_LENGTH), "    ")]
        return "\n".join([text + lines[0], *lines[1:], "", more + found + rest])

    cls.__doc__ = cast("str", _OnAccess(made))


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
    """Return the docstrings below the names of a `TypedDict`, which only its source has."""
    found: dict[str, str] = {}
    with suppressing(OSError):  # there is no source
        (of_class,) = ast.parse(inspect.getsource(keywords)).body
        assert isinstance(of_class, ast.ClassDef)
        for name, text in itertools.pairwise(of_class.body):
            if isinstance(name, ast.AnnAssign) and isinstance(text, ast.Expr):
                found[ast.unparse(name.target)] = " ".join(ast.literal_eval(text.value).split())
    return found


def _message(error: ValidationError) -> str:
    """Describe all invalid options in one line."""
    lines = []
    for item in error.errors():
        names = [str(part) for part in item["loc"]]
        message = item["msg"].removeprefix("Value error, ")
        if message.startswith("Input should "):  # pydantic's words for "must"
            message = f"must {message.removeprefix('Input should ')}"
        if not names:
            lines.append(message)
        elif item["type"] == "missing":
            lacks = " is required" if len(names) == 1 else ": must have more values"
            lines.append(f"{named(names[0])}{lacks}")
        else:
            inner = "".join(f".{name}" for name in names[1:] if name.isidentifier())
            where = f"{named(names[0])}{inner}"
            line = f"{where}: {message[0].lower()}{message[1:]}"
            is_told = isinstance(item.get("ctx", {}).get("error"), ConfigError)
            lines.append(line if is_told else f"{line}, found {shown(item['input'])}")
    return "; ".join(dict.fromkeys(lines))
