"""Imports the scripts of `docs/` that write pages and pictures."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

DOCS = Path(__file__).resolve().parents[2] / "docs"


def docs_script(name: str) -> ModuleType:
    """The module `docs/NAME.py`, where NAME may have a folder: `measurements/growth`."""
    spec = importlib.util.spec_from_file_location(Path(name).name, DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
