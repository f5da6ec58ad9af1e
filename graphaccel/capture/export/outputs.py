"""Flatten what a model returned, objects with tensors in their attributes included."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from graphaccel.capture.objects import PLAIN, attributes_of, opened
from graphaccel.compat.torch import pytree


class UnseenOutput(Exception):
    """The model returned an object of class `kind` in which `what` is not found."""

    def __init__(self, kind: str, what: str) -> None:
        super().__init__(f"no {what} found in {kind}")
        self.kind, self.what = kind, what


def flatten_output(output: Any) -> tuple[list[Any], Any]:
    """The leaves of what a model returned, and the pytree spec that puts them together."""
    return pytree.tree_flatten(opened(output))


def is_plain(leaf: Any) -> bool:
    """Whether a leaf is a value that a batch of the same sizes gives again, to be kept as it is."""
    return isinstance(leaf, PLAIN)


def output_names(output: Any) -> dict[int, str]:
    """Leaf number → the name by which the script calls it; `output` has numbers as leaves."""
    if isinstance(output, (tuple, list)) and not hasattr(output, "_fields"):
        named: Any = ((f"output[{place}]", value) for place, value in enumerate(output))
    else:
        named = attributes_of(output).items()
        if isinstance(output, Mapping):
            named = (*named, *output.items())
    return {value: f"{name}" for name, value in named if isinstance(value, int)}
