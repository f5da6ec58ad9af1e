"""Mark the gradients that ZeRO 2 and 3 shard as outputs of kind "shard".

before                                  after (w is sharded by ZeRO 2, b is not)
  return (%dw, %db)                       return (%dw, %db)
  gradient w, gradient b                  shard w, gradient b

The graph does not change. `accumulate_gradients` sums what is a "gradient", `reduce_shards` what is
a "shard".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from graphaccel.ir.program import Owned, StageProgram


def shard_gradients(program: StageProgram, owned: Mapping[str, Owned]) -> StageProgram:
    """The program with outputs "shard" (still full gradients). owned: what ZeRO shards."""
    outputs = tuple(
        replace(value, kind="shard")
        if value.kind == "gradient" and value.name in owned and owned[value.name].level > 1
        else value
        for value in program.backward_outputs
    )
    return replace(program, backward_outputs=outputs)
