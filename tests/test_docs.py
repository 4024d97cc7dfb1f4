"""Pages name what is there, by links, paths and the map of modules; their snippets are Python."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from urllib.parse import unquote

import pytest
from conftest import require_extra

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    str(page.relative_to(ROOT))
    for page in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("sample_data/*.md"))
)
FENCE = re.compile(r"^```(.*?)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\[\]]*\]\(([^()\s]+)\)")
# Paths as the pages write them: of the repository, of the package, or of one of its floors.
PATH = re.compile(r"(?<![\w/.$<-])((?:\.ci|\w+)/[\w./-]+)(?![\w./*-])")  # and no globs
TOP = ("docs", "scripts", "tests", "sample_data", ".ci", "h5async")
FLOORS = tuple(folder.name for folder in (ROOT / "h5async").iterdir() if folder.is_dir())
EVERY_CASE = pytest.mark.sampled(1000)  # they are cheap, and pages change often
MADE_BY_SCRIPTS = ("scripts/results/gpu",)


def prose(page):
    """Return the text of a page without its blocks of code."""
    return FENCE.sub("", (ROOT / page).read_text())


def anchors(page):
    """Return the anchors of the headings of a page, as GitHub and most sites make them."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def snippets(page):
    """Return the info string, the line and the text of each block of code of a page."""
    text = (ROOT / page).read_text()
    return [
        (found[1].strip(), text.count("\n", 0, found.start()) + 2, found[2])
        for found in FENCE.finditer(text)
    ]


def is_runnable(info):
    return info.split()[:2] == ["python", "runnable"]


def runnable_snippets():
    """Return runnable blocks; one that is "continued" follows those before it, as one program."""
    found = []
    for page in PAGES:
        before = ""
        for info, line, code in snippets(page):
            if is_runnable(info):
                words = info.split()[2:]
                before = before if "continued" in words else ""
                before += "\n" * (line - 1 - before.count("\n")) + code  # errors name its lines
                found.append(pytest.param(page, line, words, before, id=f"{page}:{line}"))
    return found


def other_snippets():
    return [
        pytest.param(page, line, code, id=f"{page}:{line}")
        for page in PAGES
        for info, line, code in snippets(page)
        if info.split()[:1] == ["python"] and not is_runnable(info)
    ]


@EVERY_CASE
@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    missing = []
    for link in LINK.findall(prose(page)):
        if re.match(r"\w+:", link):
            continue
        path, _, anchor = unquote(link).partition("#")
        target = (ROOT / page).parent / path if path else ROOT / page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            missing.append(link)
    assert missing == []


@EVERY_CASE
@pytest.mark.parametrize("page", PAGES)
def test_paths_that_are_named_exist(page):
    missing = []
    for found in PATH.findall((ROOT / page).read_text()):
        path = found.rstrip("./")
        if path.startswith(MADE_BY_SCRIPTS):
            continue
        first = path.split("/")[0]
        if first in TOP:
            exists = (ROOT / path).exists()
        elif first in FLOORS and Path(path).suffix:
            exists = (ROOT / "h5async" / path).exists()
        else:
            continue
        if not exists:
            missing.append(path)
    assert missing == []


@pytest.mark.parametrize(("page", "line", "words", "code"), runnable_snippets())
def test_runnable_snippets_run(page, line, words, code, monkeypatch, capsys):
    if "torch" in words:
        require_extra("torch")
    monkeypatch.chdir(ROOT)
    exec(compile(code, f"{page}:{line}", "exec"), {"__name__": "snippet"})
    assert capsys.readouterr().out


@EVERY_CASE
@pytest.mark.parametrize(("page", "line", "code"), other_snippets())
def test_other_snippets_compile(page, line, code):
    compile(code, f"{page}:{line}", "exec")


@pytest.mark.slow
def test_a_folder_becomes_a_classifier_by_the_commands_of_the_page(tmp_path):
    """Without the first one, which installs."""
    require_extra("torch")
    require_extra("cv2")
    blocks = [code for info, _, code in snippets("docs/packing.md") if info == "sh"]
    install, *commands = next(one for one in blocks if "packed_pictures" in one).splitlines()
    assert install.startswith("pip install")
    assert len(commands) == 4
    (tmp_path / "scripts").symlink_to(ROOT / "scripts")
    folder = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    made = subprocess.run(
        ["sh", "-ec", "\n".join(commands)],
        cwd=tmp_path,
        env={**os.environ, "PATH": folder},
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 0, made.stderr
    assert "600 samples" in made.stdout
    assert float(re.search(r"accuracy (0\.\d+|1\.0+) on", made.stdout)[1]) > 0.8


def test_there_is_a_snippet_that_runs():
    assert [case.values[0] for case in runnable_snippets()].count("README.md") == 1


# --- the map in docs/architecture.md -----------------------------------------------------------


def mapped(root):
    """Return the paths that a map names, in its order, folders with a slash at their end."""
    blocks = (code for _, _, code in snippets("docs/architecture.md"))
    block = next(code for code in blocks if code.startswith(f"{root}/\n"))
    paths, folders = [], []
    for line in block.splitlines():
        depth, odd = divmod(len(line) - len(line.lstrip()), 2)
        name, *words = line.split()
        assert not odd, line
        assert words or depth == 0, f"{name} is not described"
        folders[depth:] = [name]
        paths.append("".join(folders))
    return paths


def test_the_map_names_every_module_and_folder_and_no_other():
    there = {"h5async/"}
    for path in (ROOT / "h5async").rglob("*"):
        if path.suffix in {".py", ".cu", ".c", ".h"}:
            there.add(f"{path.parent.relative_to(ROOT)}/")
            there.add(str(path.relative_to(ROOT)))
    named = mapped("h5async")
    assert len(named) == len(set(named))
    assert set(named) == {path for path in there if not path.endswith("__init__.py")}


def test_the_map_names_every_script_and_no_other():
    there = {"scripts/", "scripts/results/"}
    for path in (ROOT / "scripts").rglob("*"):
        name = str(path.relative_to(ROOT))
        if path.is_file() and "__pycache__" not in name and not name.startswith("scripts/results/"):
            there.add(f"{path.parent.relative_to(ROOT)}/")
            there.add(name)
    named = mapped("scripts")
    assert len(named) == len(set(named))
    assert set(named) == there


def test_the_map_has_the_floors_in_the_order_in_which_they_import():
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())
    layers = options["tool"]["importlinter"]["contracts"][0]["layers"]
    floor_of = {
        name.strip(): number for number, floor in enumerate(layers) for name in floor.split("|")
    }
    named = [path.split("/")[1].removesuffix(".py") for path in mapped("h5async")[1:]]
    floors = [floor_of[name] for name in named]
    assert floors == sorted(floors)


def test_the_readme_fits_two_screens_and_links_every_page():
    readme = (ROOT / "README.md").read_text()
    assert readme.count("\n") <= 110
    linked = set(LINK.findall(readme))
    assert {str(page.relative_to(ROOT)) for page in ROOT.glob("docs/*.md")} <= linked
