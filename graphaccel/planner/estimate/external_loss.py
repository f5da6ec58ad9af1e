"""Costs of returning the model's outputs to a script that computes the loss itself."""

from __future__ import annotations

import torch

from graphaccel.capture.stepgraph import StepGraph
from graphaccel.capture.symbols import BATCH
from graphaccel.errors.messages import format_bytes
from graphaccel.ir.values import returned
from graphaccel.planner.cluster.cluster import Cluster
from graphaccel.planner.cluster.communication import all_gather_seconds
from graphaccel.planner.plan.plan import Plan
from graphaccel.planner.profile.cost import Sizes, dims_of


def output_bytes(step: StepGraph, batch: int) -> int:
    """Bytes of what the model returns for `batch` examples; 0 where the loss is in the graph."""
    if step.has_loss:
        return 0
    resolve = Sizes({**step.sizes, **({BATCH: batch} if BATCH in step.sizes else {})})
    size = 0
    for spec, node in zip(step.outputs, returned(step.graph), strict=True):
        value = node.meta["val"] if spec.kind == "output" else None
        if isinstance(value, torch.Tensor):
            count = 1
            for n in dims_of(node, resolve):
                count *= int(n)
            size += count * value.element_size()
    return size


def gather_seconds(step: StepGraph, plan: Plan, cluster: Cluster) -> float:
    """Seconds until every data rank has all outputs of the global batch."""
    return all_gather_seconds(cluster, output_bytes(step, plan.batch), plan.data)


def outside_notes(step: StepGraph, plan: Plan, cluster: Cluster) -> tuple[str, ...]:
    """Notes of a report about a loss outside of the graph."""
    if step.has_loss:
        return ()
    size = format_bytes(output_bytes(step, plan.batch))
    if plan.data > 1:
        cost = (
            f"the outputs of the whole batch ({size}, and as much for their gradients) lie on "
            f"every device, {gather_seconds(step, plan, cluster) * 1e3:.3g} ms to bring there"
        )
    else:
        cost = f"the outputs ({size}) and their gradients are counted"
    return (
        "the loss is outside of the graph: no pipeline cut and no microbatches were considered; "
        "loss_fn= would allow them",
        f"{cost}; what the script's loss keeps is not counted, and with loss_fn= would be",
    )
