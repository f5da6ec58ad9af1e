"""What the graphs of one step share that are made to be measured, not run
(`passes.profile_graph`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sympy
from torch import fx

from graphaccel.ir.fakes import Fakes


class Drafts:
    """fakes: what calls give. parts: graphs of few examples, with a prime and their sizes, by the
    step. first: graphs over the first axis, by what was asked of them."""

    def __init__(self) -> None:
        self.fakes = Fakes()
        self.parts: dict[Any, tuple[fx.GraphModule, int, Mapping[sympy.Symbol, int]]] = {}
        self.first: dict[Any, Any] = {}
