"""Peak memory for the rows that really chose each rank's experts.

A prediction counts an even choice; what a step took is compared with the same prediction for the
rows that came, so that nothing but the tokens' own choice is taken out of the comparison.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode

from graphaccel.capture.batch import Batch
from graphaccel.capture.blocks import block_of
from graphaccel.compat.torch import fake_mode_of
from graphaccel.compiler import schedule_of
from graphaccel.handle import Handle
from graphaccel.kernels.expert_rows import EXCHANGE, ROWS
from graphaccel.planner.memory import rank_memory


class ChosenRows(TorchDispatchMode):
    """How many rows each call of `expert_rows` found for this rank."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[int] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is ROWS:
            self.rows.append(len(result[0]))
        return result


def peak_for(handle: Handle, batch: Batch, rows: Sequence[int]) -> int:
    """Predicted peak tensor bytes of this rank if `rows` came, by layer; of one microbatch, in one
    stage. The programs of `handle` are of no use afterwards."""
    plan, program = handle.plan, handle.program
    assert plan is not None
    assert program is not None
    assert plan.pipeline == plan.microbatches == 1
    (stage,) = program.stages
    layers = [block_of(n.meta["module"]) for n in stage.forward.graph.nodes if n.target is ROWS]
    came = dict(zip(layers, rows, strict=False))  # what is behind is of blocks computed again
    for module in (stage.forward, *stage.backwards.values()):
        with fake_mode_of(list(module.graph.nodes)):
            for node in module.graph.nodes:
                _resize(node, came)
    resident = handle._compiler.model.resident(batch, plan, program)
    return rank_memory(program, schedule_of(plan, program), 0, resident).tensors


def _resize(node: fx.Node, came: dict[str, int]) -> None:
    chosen = node.meta.get("chosen", False)
    if not chosen and not any(n.meta.get("chosen") for n in node.all_input_nodes):
        return
    here, value = came.get(block_of(node.meta.get("module", ""))), node.meta.get("val")
    if node.op == "placeholder" or (node.target is EXCHANGE and chosen):
        node.meta["val"] = value.new_empty(here, *value.shape[1:])
    elif node.target is ROWS:
        node.meta["val"] = (value[0].new_empty(here), *value[1:])
    elif node.op == "call_function" and node.target is not EXCHANGE:
        args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda n: n.meta["val"])
        node.meta["val"] = node.target(*args, **kwargs)
