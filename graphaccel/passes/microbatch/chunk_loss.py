"""Set how many rows a fused head and loss processes at a time, as the plan says.

before (chunk 0: as the op says)                     after, `loss_chunk=2048`
  %l: f32[] = graphaccel.linear_cross_entropy(       %l: f32[] = graphaccel.linear_cross_entropy(
      %x, %w, None, %labels, 0)                          %x, %w, None, %labels, 2048)

The workspace of each chunk is counted from the call, so this pass runs before memory is counted.
"""

from __future__ import annotations

from graphaccel.ir.program import StageProgram
from graphaccel.kernels.register import fusion_of
from graphaccel.planner.plan.plan import Plan
from graphaccel.planner.profile.cost import in_chunks


def chunk_loss(program: StageProgram, plan: Plan) -> StageProgram:
    """The program whose chunked ops have the plan's number of rows a chunk as an argument."""
    if not plan.loss_chunk:
        return program
    for graph in (program.forward, *program.backwards.values()):
        for node in filter(in_chunks, graph.graph.nodes):
            fusion = fusion_of(node.target)
            assert fusion is not None
            node.update_arg(list(fusion.inputs).index("chunk"), plan.loss_chunk)
    return program
