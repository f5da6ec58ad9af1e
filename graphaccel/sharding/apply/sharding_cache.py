"""Cache shared by the sharded graphs of one step that are profiled and not run.

See `compiler.profile_graph`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sympy
from torch import fx

from graphaccel.ir.fakes import Fakes


class ShardingCache:
    """fakes: results of calls. parts: graphs of few examples, with their prime and symbol sizes, by
    step. first: graphs sharded over the first axis, by request. primes: numbers of examples that
    divide no size, by step, sizes and axes."""

    def __init__(self) -> None:
        self.fakes = Fakes()
        self.parts: dict[Any, tuple[fx.GraphModule, int, Mapping[sympy.Symbol, int]]] = {}
        self.first: dict[Any, Any] = {}
        self.primes: dict[Any, int] = {}
