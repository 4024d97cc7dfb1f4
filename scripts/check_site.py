"""Checks a site: its links and anchors lead somewhere, and it loads nothing from elsewhere.

.venv/bin/python scripts/check_site.py build/site
"""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

# Attributes whose addresses a browser loads by itself; those of <a> are followed by people alone.
LOADED = {("script", "src"), ("img", "src"), ("link", "href"), ("iframe", "src"), ("source", "src")}
# Links of these relations are told to robots, and not loaded.
NOT_LOADED = {"canonical", "author", "search", "index", "next", "prev", "genindex"}
IN_STYLES = re.compile(r"""(?:@import\s+|url\()\s*["']?(https?:)?//""")


class Page(HTMLParser):
    """The anchors of a page, what it links to, and what it loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note what a tag says."""
        found = {name: value for name, value in attrs if value is not None}
        self.anchors.update(found[name] for name in ("id", "name") if name in found)
        for name, value in found.items():
            if (tag, name) == ("a", "href"):
                self.links.append(value)
            elif (tag, name) in LOADED and not NOT_LOADED & set(found.get("rel", "").split()):
                self.loaded.append(value)


def faults(site: Path) -> list[str]:
    """Return a line for each link that leads nowhere, and for all that is loaded from elsewhere."""
    paths = [path for path in site.rglob("*.html") if "_static" not in path.parts]  # (templates)
    pages = {path.resolve(): Page(path.read_text()) for path in paths}
    found = []
    for path, page in pages.items():
        where = path.relative_to(site.resolve())
        found += [f"{where}: loads {url}" for url in page.loaded if urlsplit(url).netloc]
        for link in (*page.links, *page.loaded):
            fault = _fault(pages, path, link)
            found += [f"{where}: {link}: {fault}"] if fault else []
    for path in site.rglob("*.css"):
        if IN_STYLES.search(path.read_text()):
            found.append(f"{path.relative_to(site)}: loads something from elsewhere")
    return sorted(set(found))


def _fault(pages: dict[Path, Page], path: Path, link: str) -> str:
    """Say what is wrong with a link of a page; one that leads out of the site is not looked at."""
    parts = urlsplit(link)
    if parts.scheme or parts.netloc:
        return ""
    target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
    if target.is_dir():
        target /= "index.html"
    if not target.exists():
        return "there is no such file"
    anchor = unquote(parts.fragment)
    if anchor and target in pages and anchor not in pages[target].anchors:
        return "there is no such anchor"
    return ""


def main(folder: str) -> int:
    """Print what is wrong with a site; return an exit code."""
    site = Path(folder)
    found = faults(site)
    print("\n".join(found) or f"{site / 'index.html'}: all links lead somewhere")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
