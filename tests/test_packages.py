"""What is said of a missing core, and that the files about the package agree with each other."""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from conftest import require_extra
from typer.testing import CliRunner

from h5async.cli import app
from h5async.core import binding

ROOT = Path(__file__).parents[1]
DIGITS = ROOT / "sample_data" / "digits.h5"
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
COST = "everything is read through h5py"


def yaml_of(path):
    return require_extra("yaml").safe_load((ROOT / path).read_text())


@pytest.fixture
def forget(monkeypatch):
    """Let this test find the core anew."""
    monkeypatch.delenv("H5ASYNC_CORE", raising=False)
    anew = functools.cache(binding._core_or_reason.__wrapped__)
    monkeypatch.setattr(binding, "_core_or_reason", anew)


def test_with_the_core_nothing_is_said(core, forget):
    assert binding.why_no_core() is None
    result = CliRunner().invoke(app, ["inspect", str(DIGITS)])
    assert (result.exit_code, result.stderr) == (0, "")


def test_switched_off(forget, monkeypatch):
    monkeypatch.setenv("H5ASYNC_CORE", "0")
    told = binding.why_no_core()
    assert told.startswith("the compiled core is switched off by H5ASYNC_CORE=0: ")
    assert COST in told


def test_not_built(forget, monkeypatch):
    monkeypatch.setattr(binding, "_installed", list)
    told = binding.why_no_core()
    assert told.startswith("the compiled core is missing: ")
    assert COST in told
    assert told.endswith("build h5async with a C compiler, or install a wheel for this platform")


def test_a_source_tree_without_a_core_takes_the_installed_one(core, forget, monkeypatch, tmp_path):
    tree, site = tmp_path / "tree" / "core", tmp_path / "site"
    (site / "h5async-0.1.0.dist-info").mkdir(parents=True)
    (site / "h5async-0.1.0.dist-info/METADATA").write_text("Name: h5async\nVersion: 0.1.0\n")
    (site / "h5async-0.1.0.dist-info/RECORD").write_text("h5async/core/_core.abi3.so,,\n")
    installed = site / "h5async/core/_core.abi3.so"
    installed.parent.mkdir(parents=True)
    shutil.copy(core.path, installed)
    monkeypatch.setattr(binding, "__file__", str(tree / "binding.py"))
    monkeypatch.syspath_prepend(site)
    assert binding.load_core().path == installed


def test_built_for_something_else(forget, monkeypatch, tmp_path):
    path = tmp_path / "_core.so"
    path.write_bytes(b"no library")
    monkeypatch.setattr(binding, "_installed", lambda: [path])
    told = binding.why_no_core()
    assert told.startswith("the compiled core cannot be loaded (")
    assert str(path) in told
    assert COST in told


@pytest.mark.slow
def test_inspect_says_so_on_standard_error_and_as_json():
    def inspect(*options):
        command = [sys.executable, "-m", "h5async", "inspect", str(DIGITS), *options]
        return subprocess.run(
            command,
            env={**os.environ, "H5ASYNC_CORE": "0"},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )

    shown = inspect()
    assert "in order, shuffled: " in shown.stdout
    assert "core is" not in shown.stdout
    assert shown.stderr.strip().startswith("the compiled core is switched off")
    document = inspect("--json")
    assert document.stderr == ""
    found = json.loads(document.stdout)
    assert found["core"] is False
    assert COST in found["no_core_because"]


# --- files about the package ------------------------------------------------------------------


def test_one_version_everywhere():
    version = PROJECT["version"]
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    assert yaml_of("recipe/recipe.yaml")["context"]["version"] == version
    changes = (ROOT / "CHANGELOG.md").read_text()
    assert re.search(r"^## (\S+)", changes, re.MULTILINE)[1] == version


def test_the_recipe_has_the_dependencies_of_the_package():
    recipe = yaml_of("recipe/recipe.yaml")
    python, *others = recipe["requirements"]["run"]
    assert python == "python >=${{ python_min }}"
    assert f">={recipe['context']['python_min']}" == PROJECT["requires-python"]
    assert [other.replace(" ", "") for other in others] == PROJECT["dependencies"]


def test_classifiers_name_the_versions_of_python_that_are_tested():
    prefix = "Programming Language :: Python :: 3."
    named = [c.removeprefix(prefix) for c in PROJECT["classifiers"] if c.startswith(prefix)]
    assert f">=3.{named[0]}" == PROJECT["requires-python"]
    for script in ("test_versions", "check_packages"):
        loop = re.search(r"for version in ([\d. ]+)", (ROOT / "scripts" / script).read_text())[1]
        assert set(loop.split()) <= {f"3.{minor}" for minor in named}
    assert PYPROJECT["tool"]["cibuildwheel"]["build"] == [f"cp3{minor}-*" for minor in named]


@pytest.mark.parametrize(
    "path",
    [
        str(path.relative_to(ROOT))
        for path in (
            *ROOT.glob(".github/**/*.yml"),
            *ROOT.glob("recipe/*.yaml"),
            ROOT / ".pre-commit-config.yaml",
            ROOT / "CITATION.cff",
        )
    ],
)
def test_files_of_yaml_can_be_read_and_name_what_is_there(path):
    assert isinstance(yaml_of(path), dict)
    for script in re.findall(
        r"(?<![\w./])((?:scripts|\.ci)/\w+(?:\.\w+)?)", (ROOT / path).read_text()
    ):
        assert (ROOT / script).exists() or script == "scripts/check_", script


def test_hooks_run_what_scripts_check_runs():
    check = (ROOT / "scripts" / "check").read_text()
    (repository,) = yaml_of(".pre-commit-config.yaml")["repos"]
    for hook in repository["hooks"]:
        command = re.match(r"\.venv/bin/\S+( check| format)?", hook["entry"])[0]
        assert command in check
