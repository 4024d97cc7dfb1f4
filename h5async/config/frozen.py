"""The base of all configurations: frozen, documented, with messages that name the option."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn, TypeVar, cast

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic import Field as Bound

from h5async.config.describing import OnAccess, describe, descriptions
from h5async.config.hints import Where, hint_for
from h5async.config.values import shown
from h5async.errors import ConfigError
from h5async.spelling import named
from h5async.system.interruptions import interruption, raise_again

REQUIRED: Any = ...
_ANCESTOR_NAMES = {"nthread": "num_threads", "njob": "prefetch", "cuda": "device"}
_RAISES = """\
Raises
------
ConfigError
    If an option is unknown or its value is invalid.

"""

Model = TypeVar("Model", bound=BaseModel)


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
Frozen.copy = OnAccess(_absent)  # type: ignore[assignment,method-assign]


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
        describe(model, "Parameters", lambda: model, "Examples\n", _RAISES)
        return model

    return add


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
