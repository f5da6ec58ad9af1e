"""The site: every document is a page of it, every link has a target, and it builds unwarned."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.documents import docs_script

ROOT = Path(__file__).resolve().parents[2]
PICTURES_AND_FILES = re.compile(r"\]\(([^)\s]+)\)")
CODE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)


@pytest.fixture(scope="module")
def conf() -> ModuleType:
    return docs_script("conf")


def _anchors(path: Path) -> set[str]:
    """The anchors of a page's headings, as the code host and the site name them."""
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    titles = re.findall(r"^#+ (.*)", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_every_document_is_a_page(conf: ModuleType) -> None:
    everywhere = ("*.md", "docs/**/*.md", "benchmarks/*.md", "examples/*/*.md", "tests/*.md")
    documents = {p.relative_to(ROOT).as_posix() for each in everywhere for p in ROOT.glob(each)}
    assert len(conf.pages()) == len(set(conf.pages()))
    assert set(conf.pages()) == documents


def test_every_link_has_a_target(conf: ModuleType) -> None:
    missing = []
    for page in conf.pages():
        text = CODE.sub("", (ROOT / page).read_text(encoding="utf-8"))
        for link in PICTURES_AND_FILES.findall(text):
            name, _, anchor = link.partition("#")
            target = (ROOT / page).parent / name if name else ROOT / page
            known = "://" in link or target.is_file()
            if not known or (anchor and "://" not in link and anchor not in _anchors(target)):
                missing.append(f"{page}: {link}")
    assert missing == []


def test_a_missing_anchor_is_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# One: a step's `loss`\n\n```sh\n# no heading\n```\n\n## Two, three\n")
    assert _anchors(page) == {"one-a-steps-loss", "two-three"}


def test_the_reference_is_that_of_the_docstrings() -> None:
    script = docs_script("reference")
    assert script.PAGE.read_text(encoding="utf-8") == script.page(), "run python docs/reference.py"


def test_the_reference_has_every_public_name() -> None:
    import graphaccel

    text = docs_script("reference").PAGE.read_text(encoding="utf-8")
    named = set(re.findall(r"^## graphaccel\.(\w+)", text, flags=re.MULTILINE))
    assert named - {"debug"} == set(graphaccel.__all__) - {"__version__", "errors"}


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("myst_parser")
    pytest.importorskip("furo")
    strict = ["--fail-on-warning", "--keep-going", "--quiet"]
    command = [sys.executable, "-m", "sphinx", *strict, "-c", "docs", ".", str(tmp_path)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")
    contents = (tmp_path / "README.html").read_text(encoding="utf-8")
    assert 'href="docs/training.html"' in contents
    assert 'href="GA101.html"' in (tmp_path / "docs/errors/README.html").read_text("utf-8")
