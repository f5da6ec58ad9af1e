"""The table of all ops that can be part of a region, with their translations."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from torch import fx

from graphaccel.compat.torch.ops import schema
from graphaccel.ort.builder import Translate, Translations
from graphaccel.ort.ops import (
    attention,
    factories,
    images,
    indexing,
    losses,
    matmuls,
    normalise,
    pointwise,
    reductions,
    shapes,
)

FAMILIES: Mapping[str, Translations] = MappingProxyType(
    {
        "elementwise": pointwise.OPS,
        "matmuls": matmuls.OPS,
        "shapes": shapes.OPS,
        "factories": factories.OPS,
        "reductions": reductions.OPS,
        "normalisation": normalise.OPS,
        "indexing": indexing.OPS,
        "losses": losses.OPS,
        "attention": attention.OPS,
        "images": images.OPS,
    }
)
TRANSLATIONS: Mapping[Any, Translate] = MappingProxyType(
    {op: translate for family in FAMILIES.values() for op, translate in family.items()}
)


def arguments(node: fx.Node) -> dict[str, Any]:
    """A call's arguments by the names of its schema, defaults filled in."""
    declared = schema(node)
    results = {a.name: node.kwargs.get(a.name, a.default_value) for a in declared}
    return results | {a.name: value for a, value in zip(declared, node.args, strict=False)}
