"""Gradients that ZeRO 2 and 3 keep in shards become outputs of a kind of their own.

before                                  after (w is sharded by ZeRO 2, b is not)
  return (%dw, %db)                       return (%dw, %db)
  gradient w, gradient b                  shard w, gradient b

The graph stays as it is. `accumulate_gradients` adds up what is a "gradient", `reduce_shards` sums
what is a "shard".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from graphaccel.ir.program import Owned, StageProgram


def shard_gradients(program: StageProgram, owned: Mapping[str, Owned]) -> StageProgram:
    """The program with outputs "shard" (still whole gradients). owned: what ZeRO shards."""
    outputs = tuple(
        replace(value, kind="shard")
        if value.kind == "gradient" and value.name in owned and owned[value.name].level > 1
        else value
        for value in program.backward_outputs
    )
    return replace(program, backward_outputs=outputs)
