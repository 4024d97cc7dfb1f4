"""Settings of Sphinx: the pages of docs/ and the docstrings become a site. See scripts/docs."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

project = PROJECT["name"]
version = release = PROJECT["version"]
copyright = "the h5async developers, MIT licence"

extensions = [
    "myst_nb",
    "numpydoc",
    "sphinx.ext.autodoc",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_design",
]

# The sources are those of the repository, so that links between pages, and from them to scripts
# and figures, lead to the same places here and in a checkout.
root_doc = "docs/site/index"
include_patterns = [
    "docs/**",
    "CHANGELOG.md",
    "SECURITY.md",
    "sample_data/README.md",
]
exclude_patterns = [".*", "build", "dist", "*.egg-info", "**/__pycache__"]

# Notebooks are Markdown, and run as the site is built; what fails ends the build.
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 120
nb_merge_streams = True

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4  # as GitHub makes them
# `names` in docstrings link to what is there, and all else in backticks is code.
default_role = "name_or_code"
NAME = re.compile(r"[A-Za-z_][\w.]*(\(\))?")

toc_object_entries_show_parents = "hide"
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the signature has them, where they are of use
autodoc_mock_imports = [
    name for name in ("torch", "ray", "pyarrow") if importlib.util.find_spec(name) is None
]
numpydoc_show_class_members = False
numpydoc_xref_param_type = False
highlight_language = "none"  # of blocks that name none: what a command prints, say
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

html_theme = "pydata_sphinx_theme"
html_title = f"h5async {version}"
html_static_path = ["static"]
html_css_files = ["h5async.css"]
html_extra_path = ["extra"]
html_copy_source = False
html_show_sourcelink = False
html_theme_options = {
    "logo": {"text": "h5async"},
    "header_links_before_dropdown": 8,
    "navbar_align": "left",
    "navbar_end": ["theme-switcher"],
    "navbar_persistent": ["search-button"],
    "show_prev_next": True,
    "show_nav_level": 1,
    "navigation_with_keys": False,
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": [],
    "back_to_top_button": False,
}
WITHOUT_SECTION = ("docs/site/index", "docs/tutorial", "docs/performance", "CHANGELOG", "SECURITY")
html_sidebars: dict[str, list[str]] = {page: [] for page in WITHOUT_SECTION}


def name_or_code(
    role: str, raw: str, text: str, line: int, inliner: Any, options: Any = None, content: Any = ()
) -> Any:
    """Make what a docstring has in single backticks a link where it is a name, else code."""
    if NAME.fullmatch(text) is None:
        return [nodes.literal(raw, text)], []
    link = inliner.document.settings.env.get_domain("py").role("obj")
    return link("py:obj", raw, text, line, inliner, options or {}, list(content))


def with_dots(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, signature: str | None, returned: Any
) -> tuple[str | None, Any]:
    """Print the default ... of a signature as it is written."""
    return signature and signature.replace("=Ellipsis", "=..."), returned


def setup(app: Sphinx) -> None:
    """Add to Sphinx what is defined here."""
    app.add_role("name_or_code", name_or_code)
    app.connect("autodoc-process-signature", with_dots)
