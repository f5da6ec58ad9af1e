"""Tokens (or examples) a second, model FLOPs utilisation, and the precision, for reports."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from graphaccel.capture.stepgraph import StepGraph
from graphaccel.capture.symbols import BATCH
from graphaccel.ir.replication.unfold import distinct_nodes, input_nodes
from graphaccel.planner.cluster.cluster import Cluster
from graphaccel.planner.plan.plan import Plan
from graphaccel.planner.profile.cost import Sizes, node_flops
from graphaccel.planner.profile.efficiency import computing, peak_flops


@dataclass(frozen=True)
class Throughput:
    """flops: of forward and backward of the model in a step, on all devices together, without what
    a plan recomputes; attention in full, causal or not. peak: FLOP/s of one device in `dtype`, that
    of the matmuls. given: dtype of most parameters as the script has them. faster: how many times
    as fast the same mesh is predicted to be in bf16; None where that was not asked or is no gain.
    """

    flops: int
    peak: float
    dtype: str
    given: str = "float32"
    faster: float | None = None

    def utilisation(self, seconds: float, devices: int) -> float:
        """Model FLOPs utilisation: FLOPs / (seconds x devices x peak)."""
        return self.flops / (seconds * devices * self.peak) if seconds else 0.0


def throughput_of(step: StepGraph, plan: Plan, cluster: Cluster) -> Throughput:
    """The throughput of a plan. step: before it is sharded."""
    sizes = {**step.sizes, BATCH: plan.batch} if BATCH in step.sizes else step.sizes
    resolve = Sizes(sizes)
    flops = sum(count * int(node_flops(n, resolve)) for n, count in distinct_nodes(step.graph))
    dtype = plan.precision.matmul or plan.precision.compute
    counts: Counter[str] = Counter()
    for node, spec in zip(input_nodes(step.graph), step.inputs, strict=True):
        if spec.kind == "parameter":
            value = node.meta["val"]
            counts[str(value.dtype).removeprefix("torch.")] += value.numel()
    given = counts.most_common(1)[0][0] if counts else "float32"
    if dtype == "float32" and not plan.precision.matmul:
        dtype = given  # what the script's own matmuls are in
    peak = peak_flops(computing(cluster.device, plan.precision), dtype)
    return Throughput(flops, peak, dtype, given)


def precision_line(plan: Plan, throughput: Throughput) -> str:
    """The precision, and what another one would gain."""
    if "precision" in plan.pinned or plan.precision.compute != "float32":
        low = plan.precision.stream != "float32"
        kept = "parameters cast to it for every reader" if low else "other ops in float32"
        kept = "every op" if plan.precision.compute == "float32" else f"matmuls; {kept}"
        why = "as pinned" if "precision" in plan.pinned else "the fastest of --precision auto"
        return f"precision {throughput.dtype}, {why} ({kept})"
    said = f"precision {throughput.given} as your script has it"
    if throughput.faster is None:
        return said
    faster = f"bf16 would be {throughput.faster:.1f} x faster"
    return f"{said}: {faster} (--precision bf16; changes numerics)"


def rate_line(plan: Plan, throughput: Throughput, tokens: int | None, seconds: float) -> str:
    """Tokens or examples a second, and the utilisation with its formula."""
    what, each = ("tokens", tokens) if tokens is not None else ("examples", 1)
    rate = plan.batch * each / seconds if seconds else 0.0
    used = throughput.utilisation(seconds, plan.devices)
    return (
        f"{number_text(rate)} {what}/s ({number_text(rate / plan.devices)} a device), "
        f"MFU {used:.1%} = FLOPs of forward and backward / (seconds x devices x "
        f"{number_text(throughput.peak)}FLOP/s {throughput.dtype})"
    )


def number_text(number: float) -> str:
    """Three digits with a decimal prefix: `1.25 M`, `989 T`, `42.0`."""
    for prefix, scale in ((" P", 1e15), (" T", 1e12), (" G", 1e9), (" M", 1e6), (" k", 1e3)):
        if number >= 0.9995 * scale:
            return f"{_three(number / scale)}{prefix}"
    return _three(number)


def _three(value: float) -> str:
    return f"{value:.{0 if value >= 99.95 else 1 if value >= 9.995 else 2}f}"
