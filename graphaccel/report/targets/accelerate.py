"""Exports a plan as the YAML of `accelerate launch --config_file`, FSDP2 where it shards anything.

Option names are those of Accelerate 16cb6eb (`commands/config/cluster.py`), August 2026.
"""

from __future__ import annotations

from graphaccel.planner.plan.plan import Plan
from graphaccel.report.facts import Facts
from graphaccel.report.targets.common import (
    NO_OFFLOAD,
    PER_MICROBATCH,
    RECOMPUTE_OR_NOT,
    RESHARDS,
    SHARDED_OR_NOT,
    Refused,
    about,
    recomputes_all,
    refuse_common,
    refuse_unsharded_parameters,
)


def accelerate(facts: Facts, refused: Refused) -> str:
    """The YAML text."""
    _refuse(facts, refused)
    plan = facts.plan
    mixed = {"float32": "no", "bfloat16": "bf16", "float16": "fp16"}[plan.precision.compute]
    lines = [f"# {about(facts)}"]
    if plan.microbatches > 1:
        lines.append(
            f"# in the script: Accelerator(gradient_accumulation_steps={plan.microbatches})"
        )
    lines += [
        f"# and batches of {plan.microbatch_size} from each process's DataLoader",
        "compute_environment: LOCAL_MACHINE",
        f"distributed_type: {'FSDP' if plan.zero else 'MULTI_GPU' if plan.devices > 1 else 'NO'}",
        f"mixed_precision: '{mixed}'",
        f"num_processes: {plan.devices}",
        *(_fsdp(plan) if plan.zero else ()),
    ]
    return "\n".join(lines) + "\n"


def _refuse(facts: Facts, refused: Refused) -> None:
    plan = facts.plan
    refuse_common(facts, refused, "Accelerate")
    if plan.pipeline > 1:
        refused.add(
            f"pipeline {plan.pipeline}: its FSDP configuration has no pipeline", (("pipeline", 1),)
        )
    if plan.expert > 1:
        refused.add(
            f"expert {plan.expert}: its FSDP configuration has no expert axis", (("expert", 1),)
        )
    if plan.zero == 1:
        refused.add("zero 1: its FSDP shards gradients as well", SHARDED_OR_NOT)
    if "optimizer" in plan.offload and "parameters" not in plan.offload:
        refused.add("optimizer state on the host: its FSDP takes the parameters along", NO_OFFLOAD)
    refuse_unsharded_parameters(plan, refused)
    if plan.zero == 0 and (plan.tensor > 1 or plan.context > 1):
        refused.add(
            "tensor or context without zero: it composes them with FSDP only",
            (("zero", 2), ("zero", 3)),
        )
    if plan.recompute and not (recomputes_all(facts) and plan.zero):
        refused.add(
            "recomputation of some blocks, or without FSDP: it has all blocks of FSDP",
            RECOMPUTE_OR_NOT,
        )
    if plan.holds_gathered and plan.microbatches > 1:
        refused.add(PER_MICROBATCH, RESHARDS)


def _fsdp(plan: Plan) -> list[str]:
    """The lines of FSDP2 and its mesh."""
    reshard = str(plan.zero == 3 and plan.reshard_after_forward == "always").lower()
    return [
        "fsdp_config:",
        "  fsdp_version: 2",
        f"  fsdp_reshard_after_forward: {reshard}",
        "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP",
        f"  fsdp_activation_checkpointing: {str(bool(plan.recompute)).lower()}",
        f"  fsdp_offload_params: {str('parameters' in plan.offload).lower()}",
        "  fsdp_state_dict_type: SHARDED_STATE_DICT",
        "parallelism_config:",
        f"  parallelism_config_dp_replicate_size: {plan.num_replicas}",
        f"  parallelism_config_dp_shard_size: {plan.shards}",
        f"  parallelism_config_tp_size: {plan.tensor}",
        f"  parallelism_config_cp_size: {plan.context}",
    ]
