"""The report's lines about fused ops: which are placed, and whether their kernels run."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from graphaccel.capture.symbols import BATCH
from graphaccel.errors.messages import format_bytes
from graphaccel.kernels.jit import has_triton
from graphaccel.kernels.registry import fusion_named
from graphaccel.planner.cluster.cluster import Cluster
from graphaccel.planner.plan.plan import Plan
from graphaccel.planner.profile.chunk_rows import chunk_seconds
from graphaccel.planner.profile.cost import Sizes, chunk_bytes, chunks_of, in_chunks
from graphaccel.planner.profile.efficiency import computing
from graphaccel.planner.profile.profile import Profile


def fusion_notes(placed: Mapping[str, int], device: str) -> tuple[str, ...]:
    """placed: the count of each, by name. device: the type that the plan is for, "cpu" or "cuda".

    There is a second line if the kernels of some of them cannot run and their references run
    instead.
    """
    said = ", ".join(f"{name} {count}" for name, count in placed.items())
    lines = (f"fused ops: {said}" if said else "fused ops: none fits; graphaccel explain says why",)
    if not any(fusion_named(name).cuda_forward for name in placed):
        return lines
    if device == "cpu":
        return (*lines, "they run as calls of torch: their kernels are for GPUs")
    if torch.cuda.is_available() and not has_triton():
        return (
            *lines,
            "they run as calls of torch: Triton, which makes their kernels, is missing",
        )
    return lines


def chunk_notes(profile: Profile, plan: Plan, cluster: Cluster) -> tuple[str, ...]:
    """How many rows a fused head and loss processes at a time, and why; () where the plan has none.
    profile: of the graph that a device of the plan runs."""
    if not plan.loss_chunk:
        return ()
    sizes = Sizes({**profile.step.sizes, BATCH: plan.microbatch_size})
    device, lines = computing(cluster.device, plan.precision), []
    for node in filter(in_chunks, profile.lines.nodes):
        whole = chunks_of(node, sizes, 1).times
        if whole <= plan.loss_chunk:
            lines.append(f"head and loss: all {whole:,} tokens at once")
            continue
        (small, slow), (large, fast) = (
            (format_bytes(chunk_bytes(node, sizes, n)), chunk_seconds([node], sizes, device, n))
            for n in (plan.loss_chunk, whole)
        )
        lines.append(
            f"head and loss: {plan.loss_chunk:,} of {whole:,} tokens at a time take {small}, all "
            f"at once {large}; {slow / fast:.2f} of its time"
        )
    return tuple(lines)
