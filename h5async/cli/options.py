"""Describes options, adds them to commands, and makes a `ReaderConfig` of those typed."""

from __future__ import annotations

import functools
import re
import sys
import tomllib
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from inspect import Parameter, Signature, signature
from pathlib import Path
from types import GenericAlias, NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import typer
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from h5async.config import ReaderConfig
from h5async.config.files import kind_of_file, load_file, map_paths, with_variables
from h5async.config.frozen import Words
from h5async.errors import ConfigError
from h5async.packing.writeoptions import PackOptions
from h5async.spelling import as_keyword, in_file, named, shell_word, spelled, toml_value
from h5async.system.describing import descriptions

_CONFIG = typer.Option(
    metavar="FILE", help="File of options (TOML, .json, .yaml); those typed here win."
)
_NO_LABELS = typer.Option("--no-labels", help="Read no labels.")

_PLAIN_TYPES = (bool, int, float, str, Path)
_OBJECTS = ("sampler",)  # cannot be typed
_TABLES = ("indices", "weights")  # may be typed as tables of TOML

Command = TypeVar("Command", bound=Callable[..., None])


@dataclass(frozen=True, kw_only=True)
class Option(Words):
    """One option of a configuration, with the texts of `Words`.

    `type` is that of one value on a command line: bool, int, float, str or Path. It is str for
    numbers with a syntax of their own. `choices` are the only valid values, besides None, and
    numbers if `type` is numeric; empty means any. A mapping is a list of values with names.
    """

    name: str
    description: str
    type: type
    choices: tuple[object, ...]
    is_list: bool
    is_mapping: bool
    takes_names: bool
    is_required: bool
    default: Any


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
        **(vars(words) | {"shell": words.shell or description}),
        name=name,
        description=description,
        type=str if not found or (found[0] is int and words.values) else found[0],
        choices=tuple(v for k in kinds if get_origin(k) is Literal for v in get_args(k)),
        is_list=tuple in origins or is_mapping,
        is_mapping=is_mapping,
        takes_names=int in found and str in found,
        is_required=field.default is PydanticUndefined,
        default=field.default,
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


def takes(
    model: type[BaseModel], names: Iterable[str] | None = None
) -> Callable[[Command], Command]:
    """Give a command the options of a configuration, or some, passed as ``**typed``."""
    found = reader_options(model)
    return lambda command: _with_parameters(command, {n: found[n] for n in names or found})


def takes_reader(command: Command) -> Command:
    """Give a command all options of `ReaderConfig`, and a file of options, as ``**typed``."""
    options = reader_options(ReaderConfig)
    parameters = {
        "hdf5_path": options.pop("hdf5_path"),
        "config": _parameter("config", Path, _CONFIG),
        "no_labels": _parameter("no_labels", bool, _NO_LABELS, default=False),
    }
    return _with_parameters(command, parameters | options)


def reader_options(model: type[BaseModel]) -> dict[str, Parameter]:
    """Return the parameters of a command for all options of a configuration.

    Their default is None; the option's own is only shown, as it would override a config file.
    """
    return {
        option.name: _parameter(option.name, _type(option), _declaration(option))
        for option in options_of(model)
        if option.name not in _OBJECTS
    }


def _with_parameters(command: Command, added: Mapping[str, Parameter]) -> Command:
    """Declare parameters instead of a command's ``**typed``."""
    own = signature(command, eval_str=True).parameters.values()
    kept = [p.replace(kind=Parameter.KEYWORD_ONLY) for p in own if p.kind is not p.VAR_KEYWORD]
    parameters = [*kept, *added.values()]
    declared: Any = command
    declared.__signature__ = Signature(parameters)
    declared.__annotations__ = {p.name: p.annotation for p in parameters}
    return command


def _parameter(name: str, kind: Any, declaration: Any, default: Any = None) -> Parameter:
    annotation: Any = Annotated[kind | None if default is None else kind, declaration]
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _type(option: Option) -> Any:
    # `Path("")` would be "."; and a choice may be a number, too.
    as_text = option.type is Path or option.takes_names or option.choices
    kind = str if as_text else option.type
    return GenericAlias(list, (kind,)) if option.is_list else kind


def _declaration(option: Option) -> Any:
    text = option.shell.replace("`", "")
    if option.is_required:
        return typer.Argument(metavar="FILE...", help=f"{text} May be left to --config.")
    names = flag(option)
    if option.type is bool:
        names = f"{names}/--no-{names[2:]}"
    repeatable = " Repeatable." if option.is_list else ""
    default = _default_text(option)
    shown = f" [default: {default}]" if default else ""
    words = list(map(_typed_choice, option.choices))

    def complete(incomplete: str) -> list[str]:
        return [word for word in words if word.startswith(incomplete)]

    return typer.Option(
        names,
        metavar=option.values or "|".join(words) or None,
        autocompletion=complete if words else None,
        help=f"{text}{repeatable}{shown}",
        show_default=False,
    )


def flag(option: Option) -> str:
    """Return the flag of an option, in the singular if it takes names and values."""
    name = option.name.removesuffix("s") if option.is_mapping else option.name
    return f"--{name.replace('_', '-')}"


def _default_text(option: Option) -> str:
    default = option.default
    if option.default_text or default is None:
        return option.default_text
    if option.choices:
        return _typed_choice(default)
    return ("yes" if default else "no") if option.type is bool else str(default)


def _typed_choice(choice: object) -> str:
    """Return how a choice is typed: False is "none", True "default", and a mapping a table."""
    if isinstance(choice, Mapping):
        return toml_value(choice)
    if isinstance(choice, bool):
        return "default" if choice else "none"
    return str(choice)


def reader_config(typed: Mapping[str, Any]) -> ReaderConfig:
    """Return the configuration that was typed, or raise `H5AsyncError` or `typer.BadParameter`."""
    path = typed.get("config")
    if not typed["hdf5_path"] and path is None:
        raise typer.BadParameter("give it, or --config with an hdf5_path", param_hint="FILE")
    given = typed_options(typed)
    try:
        config = ReaderConfig.load(path, **given)
    except ConfigError as error:
        if path is None:
            raise
        raise ConfigError(_spelled_as_in(path, error.marked, given)) from error
    if config.postprocess is not None:
        sys.path.insert(0, "")  # like `python -m`, find modules in the current folder
    return config


def _spelled_as_in(path: Path, message: str, typed: Container[str]) -> str:
    """Spell options that come from a file, and were not typed, as in the file."""
    try:
        in_path = load_file(path)
    except ConfigError:
        return message
    spell = in_file(kind_of_file(path))
    is_there = [name for name in in_path if name not in typed]
    return spelled(
        message, lambda name, value: spell(name, value) if name in is_there else named(name, *value)
    )


def spell_in_shell(name: str, value: tuple[Any, ...]) -> str:
    """Spell an option in a message as it is typed in a shell."""
    option = _options().get(name)
    if option is None or name in _OBJECTS:
        return as_keyword(name, value)
    if option.is_required:
        return " ".join(map(shell_word, map(str, value))) or "FILE"
    if name == "labels_field" and value == (None,):
        return "--no-labels"
    typed = flag(option)
    if not value:
        return typed
    if option.is_mapping:
        return f"{in_file('toml')(name, value)} in the file of --config"
    if option.type is bool:
        return typed if value[0] else f"--no-{typed[2:]}"
    several = value[0] if isinstance(value[0], list | tuple) else value
    return " ".join(f"{typed} {shell_word(_typed_choice(one))}" for one in several)


@functools.cache
def _options() -> dict[str, Option]:
    return {one.name: one for model in (PackOptions, ReaderConfig) for one in options_of(model)}


def typed_options(
    typed: Mapping[str, Any], model: type[BaseModel] = ReaderConfig
) -> dict[str, Any]:
    """Return the options that the user typed; in paths, ~ and variables are resolved."""
    options: dict[str, Any] = {}
    for option in options_of(model):
        value = typed.get(option.name)
        if value is None or value in ([], ()):
            continue
        if option.is_mapping:
            value = mapping_of(value, flag(option), option.values)
        elif option.name == "sequences" or (option.name in _TABLES and value.startswith("{")):
            value = _table(value, flag(option))
        elif option.takes_names and re.fullmatch(r"[-+]?\d+", value):
            value = int(value)
        of_bools = [one for one in option.choices if isinstance(one, bool)]
        options[option.name] = next((b for b in of_bools if value == _typed_choice(b)), value)
    if len(options.get("hdf5_path", ())) == 1:
        options["hdf5_path"] = options["hdf5_path"][0]
    if typed.get("no_labels"):
        if "labels_field" in options:
            raise typer.BadParameter(
                "give one of them, not both", param_hint="--labels-field, --no-labels"
            )
        options["labels_field"] = None
    return map_paths(options, with_variables)


def _table(text: str, name: str) -> object:
    try:
        return tomllib.loads(f"table = {text}")["table"]
    except tomllib.TOMLDecodeError as error:
        raise typer.BadParameter(f"is not a table of TOML: {error}", param_hint=name) from error


def mapping_of(entries: Iterable[str], name: str, form: str) -> dict[str, Any]:
    """Parse NAME=VALUE, or NAME= and a table of options; `form` is the syntax, for users."""
    pairs = [entry.partition("=") for entry in entries]
    if not all(key and value for key, _, value in pairs):
        raise typer.BadParameter(f"must be {form}", param_hint=name)
    found = {
        key: _table(value, name) if value.lstrip().startswith("{") else value
        for key, _, value in pairs
    }
    if len(found) < len(pairs):
        raise typer.BadParameter("two have the same name", param_hint=name)
    return found
