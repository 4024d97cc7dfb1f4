"""Options are described once, in `ReaderConfig`; help, docstrings and pages show the same."""

from __future__ import annotations

import inspect
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Literal

import pytest
import typer
from pydantic import Field as Bound
from typer.testing import CliRunner

from h5async import Field, ReaderConfig
from h5async.cli import app
from h5async.cli.options import flag, options_of, reader_options
from h5async.config.frozen import option
from h5async.config.values import Int

ROOT = Path(__file__).parents[1]
OPTIONS = {o.name: o for o in options_of(ReaderConfig)}


def words(text):
    """Return text in one line, without markup."""
    return " ".join(text.replace("`", "").split())


def help_of(command, width=100):
    result = CliRunner().invoke(command, ["--help"], env={"COLUMNS": str(width)})
    assert result.exit_code == 0
    return words(result.stdout)


def shown_default(described):
    """Return what help shows of a default."""
    if described.default_text or described.default is None:
        return described.default_text
    if described.default is False:
        return "none" if described.choices else "no"
    return str(described.default)


def test_every_option_and_parameter_is_described():
    for described in (*options_of(ReaderConfig), *options_of(Field)):
        assert re.match(r"[A-Z].*\.$", described.description), described.name


@pytest.mark.parametrize("command", ["read", "bench"])
def test_help_has_the_description_and_the_default_of_every_option(command):
    result = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "100"})
    text = words(result.stdout)
    for name, described in OPTIONS.items():
        shown = words(described.shell)
        if name == "sampler":  # an object, which cannot be typed
            assert shown not in text
            continue
        assert shown in text, name
        if described.is_required:
            continue
        assert f" {flag(described)} " in text
        told = text[text.index(shown) + len(shown) :]
        told = told.removeprefix(" Repeatable.")
        default = shown_default(described)
        if default:
            assert told.startswith(f" [default: {default}]"), name
        else:
            assert not told.startswith(" [default"), name
    assert "--no-labels" in words(OPTIONS["labels_field"].shell)
    for python in ("None", "False", "True", "Field"):
        assert not re.search(rf"\b{python}\b", text), python
    for choice in ("none|full|window", "thread|process", "auto|host|device", "auto|pread|map"):
        assert choice in text


def test_the_json_schema_has_keywords_of_json_schema_alone():
    schema = ReaderConfig.model_json_schema()
    keywords = {
        "additionalProperties",
        "anyOf",
        "const",
        "default",
        "description",
        "enum",
        "exclusiveMinimum",
        "format",
        "items",
        "maximum",
        "minimum",
        "propertyNames",
        "title",
        "type",
        "$ref",
    }

    def check(part):
        assert set(part) <= keywords, part
        for inner in (*part.get("anyOf", ()), part.get("items"), part.get("additionalProperties")):
            if isinstance(inner, dict):
                check(inner)

    for model in (schema, *schema["$defs"].values()):
        for part in model["properties"].values():
            check(part)
    assert set(schema["properties"]) == set(OPTIONS)


def test_docstrings_describe_every_option():
    for model in (ReaderConfig, Field):
        text = words(model.__doc__)
        for described in options_of(model):
            assert f" {described.name} {words(described.description)} " in text
        assert text.index("Parameters") < text.index("Raises ------")


def test_without_docstrings_help_is_the_same():
    code = "import sys; sys.argv[0] = 'h5async'; from h5async.cli import app; app()"
    results = [
        subprocess.run(
            [sys.executable, *flags, "-c", code, "read", "--help"],
            capture_output=True,
            text=True,
            timeout=60,
        )
        for flags in ([], ["-OO"])
    ]
    with_docstrings, without = (result.stdout for result in results)
    assert [result.stderr for result in results] == ["", ""]
    assert without.partition("Arguments:")[2] == with_docstrings.partition("Arguments:")[2]
    assert "--batch-size" in without


def test_the_page_of_options_is_up_to_date():
    made = runpy.run_path(str(ROOT / "scripts" / "make_options_page.py"))["page"]()
    assert (ROOT / "docs" / "options.md").read_text() == made, "run scripts/make_options_page.py"
    rows = table_of_options(made)
    assert list(rows) == list(OPTIONS)
    for name, row in rows.items():
        assert row[-1] == OPTIONS[name].description


def table_of_options(page):
    """Return the rows of the first table of a page, by the options that they are of."""
    rows = {}
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.replace("\\|", "/").strip("|").split("|")]
        if line.startswith("| `"):
            for name in re.findall(r"`(\w+)`", cells[0]):
                rows[name] = cells[1:]
        elif rows:
            break
    return rows


def test_the_readme_links_to_the_page():
    assert "(docs/options.md)" in (ROOT / "README.md").read_text()


# --- an option that is new -----------------------------------------------------------------------


class Larger(ReaderConfig):
    """`ReaderConfig` with options that it does not have."""

    num_dogs: Annotated[Int, Bound(ge=0)] | None = option(
        None, "Dogs.", default_text="those at home"
    )
    dogs_bark: bool = option(True, "Whether they bark.")
    breed: Literal[False, "pug", "husky"] = option("pug", "What they are.")
    names: tuple[str, ...] = option(
        (), "How they are named; None: not.", values="NAME", shell="How they are named."
    )
    speed: float = option(1.5, "How they run.")


def test_a_new_option_appears_by_itself():
    taken = []

    def command(**typed):
        taken.append(typed)

    parameters = reader_options(Larger)
    command.__signature__ = inspect.Signature(list(parameters.values()))
    command.__annotations__ = {name: p.annotation for name, p in parameters.items()}
    dogs = typer.Typer(add_completion=False, rich_markup_mode=None)
    dogs.command()(command)
    text = help_of(dogs)
    assert "--num-dogs <int> Dogs. [default: those at home]" in text
    assert "--dogs-bark / --no-dogs-bark Whether they bark. [default: yes]" in text
    assert "--breed none|pug|husky What they are. [default: pug]" in text
    assert "--names NAME How they are named. Repeatable." in text
    assert "--speed <float> How they run. [default: 1.5]" in text
    typed = "f.h5 --num-dogs 3 --no-dogs-bark --breed none --names a --names b --speed 2"
    assert CliRunner().invoke(dogs, typed.split()).exit_code == 0
    found = {name: taken[0][name] for name in ("num_dogs", "dogs_bark", "breed", "names", "speed")}
    assert found == {
        "num_dogs": 3,
        "dogs_bark": False,
        "breed": "none",
        "names": ["a", "b"],
        "speed": 2.0,
    }
    assert taken[0]["batch_size"] is None, "what was not typed is no option"
