"""Checks that a plan which was given fits the model, the batch and the cluster that it runs on."""

from __future__ import annotations

from collections.abc import Mapping

import sympy

from graphaccel.capture.stepgraph import StepGraph
from graphaccel.capture.symbols import BATCH
from graphaccel.errors import BatchNotDivisible, NoLoss, PlanMismatch
from graphaccel.passes.pipeline import prepared
from graphaccel.planner.cluster.cluster import Cluster, cluster_name
from graphaccel.planner.plan.plan import Plan
from graphaccel.planner.search.validate_plan import check_fusions, check_given


def check_given_plan(
    plan: Plan, path: str, step: StepGraph, sizes: Mapping[sympy.Symbol, int], cluster: Cluster
) -> None:
    """Check a plan before its programs are built.

    path: what errors call the plan. sizes: symbolic sizes of the batch.

    Raises PlanMismatch (GA204) for a plan of another model, batch or cluster, and what
    `check_fusions` and `check_given` raise.
    """
    here = {
        "model": step.fingerprint,
        "cluster": cluster_name(cluster),
        "devices": str(cluster.count),
        "global batch": str(sizes.get(BATCH, step.batch_size)),
    }
    said = {
        "model": plan.graph,
        "cluster": plan.cluster,
        "devices": str(plan.devices),
        "global batch": str(plan.batch),
    }
    different = tuple((k, said[k], here[k]) for k in here if said[k] != here[k])
    if different:
        raise PlanMismatch(path=path, differences=different)
    check_fusions(plan, path, cluster.device.type)
    check_given(plan, path, prepared(step, plan))


def check_batch(step: StepGraph, plan: Plan, size: int) -> None:
    """Check a batch of another size under a running plan.

    Raises BatchNotDivisible (GA206), and NoLoss (GA103) for a plan that needs the loss in the
    graph.
    """
    if size % (plan.data * plan.microbatches):
        raise BatchNotDivisible(
            batch=size,
            microbatches=plan.microbatches,
            data=plan.data,
            allowed=tuple(n for n in range(1, size + 1) if size % (n * plan.data) == 0),
        )
    for name in ("pipeline", "interleave", "microbatches"):
        if not step.has_loss and getattr(plan, name) > 1:
            raise NoLoss(asked=f"{name}={getattr(plan, name)}")
