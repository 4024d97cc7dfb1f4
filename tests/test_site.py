"""The documentation site: pictures are current, the map is whole, and checks find faults."""

from __future__ import annotations

import importlib.util
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SITE = ROOT / "docs" / "site"


def script(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# --- pictures ------------------------------------------------------------------------------------

pictures = script("make_pictures")


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_pictures_are_as_the_script_draws_them(name):
    made = pictures.PICTURES[name]()
    assert (ROOT / "docs" / "images" / name).read_text() == made, "run scripts/make_pictures.py"


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_pictures_are_documents_that_nothing_sticks_out_of(name):
    root = ET.fromstring(pictures.PICTURES[name]())
    width, height = float(root.get("width")), float(root.get("height"))
    for shape in root.iter("{http://www.w3.org/2000/svg}rect"):
        x, y, wide, high = (float(shape.get(key)) for key in ("x", "y", "width", "height"))
        assert 0 <= x <= x + wide <= width
        assert 0 <= y <= y + high <= height


def test_all_pictures_are_drawn_by_the_script():
    assert {path.name for path in (ROOT / "docs" / "images").iterdir()} == set(pictures.PICTURES)


def test_the_floors_are_those_of_the_imports():
    drawn = [name for name, _ in pictures.floor_rows() if name]
    folders = {
        path.name for path in (ROOT / "h5async").iterdir() if (path / "__init__.py").exists()
    }
    assert set(drawn) == folders
    assert drawn.index("deliver") < drawn.index("fill") < drawn.index("io")


def test_speeds_are_written_with_their_unit():
    assert pictures.written(9.5322, "GB/s") == "9.5 GB/s"
    assert pictures.written(0.4972, "GB/s") == "0.50 GB/s"
    assert pictures.written(16345.7, "windows/s") == "16,300/s"


# --- links ---------------------------------------------------------------------------------------

check_site = script("check_site")


@pytest.fixture
def site(tmp_path):
    (tmp_path / "index.html").write_text('<h1 id="top">A</h1><a href="b/page.html#part">b</a>')
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "page.html").write_text(
        '<p id="part"></p><a href="../index.html#top"></a><a href="https://example.org">c</a>'
    )
    return tmp_path


def test_a_whole_site_has_no_faults(site):
    assert check_site.faults(site) == []
    assert check_site.main(str(site)) == 0


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ('<a href="nowhere.html">', "nowhere.html: there is no such file"),
        ('<a href="page.html#nothing">', "page.html#nothing: there is no such anchor"),
        ('<a href="#nothing">', "#nothing: there is no such anchor"),
        ('<img src="picture.svg">', "picture.svg: there is no such file"),
        ('<script src="https://example.org/a.js"></script>', "loads https://example.org/a.js"),
        ('<link rel="stylesheet" href="//example.org/a.css">', "loads //example.org/a.css"),
    ],
)
def test_faults_of_a_site_are_found(site, text, fault, capsys):
    with (site / "b" / "page.html").open("a") as page:
        page.write(text)
    assert [found.partition(": ")[2] for found in check_site.faults(site)] == [fault]
    assert check_site.main(str(site)) == 1
    assert fault in capsys.readouterr().out


def test_fonts_from_elsewhere_are_found(site):
    (site / "a.css").write_text("@font-face { src: url(https://example.org/a.woff2) }")
    assert check_site.faults(site) == ["a.css: loads something from elsewhere"]


# --- the map of the site -------------------------------------------------------------------------


def test_every_page_is_in_the_navigation():
    """Sphinx would warn of such a page, too, but only where it is installed."""
    named = set()
    for page in SITE.rglob("*.md"):
        for block in re.findall(r"```\{toctree\}\n(.*?)```", page.read_text(), re.DOTALL):
            for line in block.splitlines():
                target = (re.search(r"<(.*)>", line) or [None, line])[1].strip()
                if target and not target.startswith(":"):
                    named.add((page.parent / f"{target}.md").resolve())
    pages = {*ROOT.glob("docs/**/*.md"), ROOT / "CHANGELOG.md"}
    pages.add(ROOT / "SECURITY.md")
    assert pages - {SITE / "index.md"} <= named
    assert all(page.exists() for page in named)
