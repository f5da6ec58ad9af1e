"""How sphinx makes the site (`make docs`): the pages, their order, and the look.

The root of the site is that of the repository, so that a link means the same in both. The order is
that of docs/README.md: a section of the site for each of its headings, a page for each link.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parents[1]
FRONT, INDEX, ERRORS = "README.md", "docs/README.md", "docs/errors/README.md"
LINK = re.compile(r"\]\(([^)\s#]+)")


def sections() -> dict[str, list[str]]:
    """Headings of docs/README.md → the pages that are linked below each, as paths from the root."""
    parts = (ROOT / INDEX).read_text(encoding="utf-8").split("\n## ")[1:]
    return {
        part.partition("\n")[0]: [_from_root(to) for to in LINK.findall(part)] for part in parts
    }


def pages() -> list[str]:
    """The pages of the site, as paths from the root."""
    errors = sorted(
        path.relative_to(ROOT).as_posix() for path in (ROOT / ERRORS).parent.glob("GA*")
    )
    return [FRONT, INDEX, *(page for part in sections().values() for page in part), *errors]


def setup(app: Sphinx) -> None:
    app.connect("source-read", _with_contents)


def _with_contents(_: Sphinx, name: str, source: list[str]) -> None:
    """Append the table of contents to the front page, and the list of errors to their page."""
    if name == FRONT.removesuffix(".md"):
        parts = {"Documents": [INDEX]} | sections()
        source[0] += "".join(_toctree(f":caption: {each}\n", to) for each, to in parts.items())
    if name == ERRORS.removesuffix(".md"):
        source[0] += _toctree(":glob:\n", ["docs/errors/GA*"])


def _toctree(options: str, members: list[str]) -> str:
    hidden = "" if "glob" in options else ":hidden:\n"
    entries = "".join(f"/{member.removesuffix('.md')}\n" for member in members)
    return f"\n\n```{{toctree}}\n{hidden}{options}\n{entries}```\n"


def _from_root(link: str) -> str:
    return (ROOT / INDEX).parent.joinpath(link).resolve().relative_to(ROOT).as_posix()


project = "graphaccel"
extensions = ["myst_parser"]
root_doc = "README"
include_patterns = pages()
html_theme = "furo"
html_title = "graphaccel"
html_copy_source = False
myst_heading_anchors = 4
sys.dont_write_bytecode = True
