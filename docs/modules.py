"""Write docs/modules.md: every module of graphaccel with the first line of its docstring.

    python docs/modules.py

tests/docs fails while the page is not that of the source.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "modules.md"
HEAD = """# Modules

Written by `python docs/modules.py` from the docstrings; do not edit. How they work together:
[ARCHITECTURE.md](../ARCHITECTURE.md).
"""


def page() -> str:
    """The text of docs/modules.md."""
    return HEAD + "".join(_packages(ROOT / "graphaccel"))


def _packages(package: Path) -> Iterator[str]:
    for folder in sorted({path.parent for path in package.rglob("*.py")}):
        name = folder.relative_to(ROOT).as_posix()
        yield f"\n## {name}/\n\n{_first_line(folder / '__init__.py')}\n\n"
        modules = [path for path in sorted(folder.glob("*.py")) if path.stem != "__init__"]
        if modules:
            yield "| module | |\n|---|---|\n"
        for path in modules:
            yield f"| `{path.name}` | {_first_line(path).replace('|', chr(92) + '|')} |\n"


def _first_line(path: Path) -> str:
    """The first sentence-like line of a module's docstring, unwrapped."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return " ".join(text.split("\n\n")[0].split())


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
