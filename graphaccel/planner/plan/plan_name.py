"""The name of a plan: its mesh and the decisions that change the step most, in one line."""

from __future__ import annotations

from graphaccel.planner.plan.plan import Plan


def plan_name(plan: Plan) -> str:
    """`data 2 x pipeline 2 · 8 microbatches · recompute 4 blocks`."""
    parts = [" x ".join(f"{axis} {size}" for axis, size in plan.mesh.items())]
    if plan.interleave > 1:
        parts[0] += f" x interleave {plan.interleave}"
    if plan.reordered:
        parts[0] += f" in the order {', '.join(plan.reordered)}"
    if plan.pipeline > 1 and plan.schedule not in ("1f1b", "interleaved"):
        parts[0] += f", {plan.schedule.replace('_', ' ')}"
    if plan.zero:
        parts.append(f"zero {plan.zero}")
        parts[-1] += f" in groups of {plan.shard_size}" if plan.shard_size else ""
        if plan.zero == 3 and plan.reshard_after_forward != "always":
            each = " a step" if plan.reshard_after_forward == "once_per_step" else ""
            parts[-1] += f", gathered once{each}"
        if plan.accumulation == "shards":
            parts[-1] += ", reduced in each microbatch"
    if plan.microbatches > 1:
        parts.append(f"{plan.microbatches} microbatches of {plan.microbatch_size}")
    if plan.recompute or plan.selective:
        several = sum(len(own.blocks) for own in plan.selective)
        whole = f"{len(plan.recompute)} blocks" if plan.recompute else ""
        part = f"{several} {'' if whole else 'blocks '}selectively" if several else ""
        parts.append("recompute " + ", ".join(filter(None, (whole, part))))
    if plan.offload:
        parts.append(f"{' and '.join(plan.offload)} on the host")
    if plan.precision.compute != "float32":
        through = plan.precision.stream != "float32"
        parts.append(plan.precision.compute + " parameters" * through)
        parts[-1] += ", cast once a step" * plan.holds_casts
    if plan.precision.matmul:
        parts.append(f"{plan.precision.matmul} matmuls")
    if plan.compile != "off" and "compile" in plan.pinned:
        parts.append(plan.compile)
    if plan.cuda_graphs:
        parts.append("CUDA graphs")
    return " · ".join(parts)
