"""Finds names that were public under another path, with a deprecation warning."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Mapping
from typing import Any


def moved(module: str, names: Mapping[str, str], name: str) -> Any:
    """The object that `module` had as `name`. names: name → the module that has it now.

    Raises AttributeError for a name that was not public.
    """
    if name not in names:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    text = f"{module}.{name} is {names[name]}.{name} now; the former path goes in the next version"
    warnings.warn(text, DeprecationWarning, stacklevel=3)
    return getattr(importlib.import_module(names[name]), name)
