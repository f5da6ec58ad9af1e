"""Exports a plan as a function over torchtitan's `Trainer.Config`.

Its command-line flags are frozen and will be removed. Option names are those of torchtitan b5bcd76
(`config/configs.py`), August 2026.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from graphaccel.report.facts import Facts
from graphaccel.report.targets.common import (
    NO_OFFLOAD,
    PER_MICROBATCH,
    RECOMPUTE_OR_NOT,
    RESHARDS,
    SHARDED_OR_NOT,
    Refused,
    about,
    layers,
    recomputes_all,
    refuse_common,
    refuse_unsharded_parameters,
)

_SCHEDULES = {"1f1b": "1F1B", "interleaved": "Interleaved1F1B", "gpipe": "GPipe"}


def torchtitan(facts: Facts, refused: Refused) -> str:
    """The text of the function."""
    _refuse(facts, refused)
    plan = facts.plan
    rows = _rows(facts)
    if plan.pipeline > 1:
        rows += [
            ("parallelism.pipeline_parallel_schedule", _SCHEDULES.get(plan.schedule)),
            ("parallelism.num_pp_microbatches", plan.microbatches),
            *_stages(layers(facts), refused),
        ]
    lines = [f"    config.{name} = {value!r}" for name, value in rows]
    policy = "FullAC.Config()" if plan.recompute else "None"
    head = ["# " + about(facts), f"# torchtitan: NGPU={plan.devices}, and a configuration made of"]
    head += ["# your own by this function (torchtitan/config/README.md).", ""]
    if plan.recompute:
        head = ["from torchtitan.distributed.activation_checkpoint import FullAC", "", *head]
    lines.append(f"    config.activation_checkpoint = {policy}")
    return "\n".join([*head, "def as_planned(config):", *lines, "    return config"]) + "\n"


def _refuse(facts: Facts, refused: Refused) -> None:
    plan = facts.plan
    refuse_common(facts, refused, "torchtitan")
    if facts.model.tokens is None:
        refused.add("a model without a sequence: torchtitan counts a batch in tokens")
    if plan.precision.compute not in ("float32", "bfloat16"):
        refused.add(f"compute in {plan.precision.compute}: it is float32 or bfloat16 there")
    if plan.zero == 1:
        refused.add("zero 1: its FSDP shards gradients as well", SHARDED_OR_NOT)
    if "optimizer" in plan.offload and "parameters" not in plan.offload:
        refused.add(
            "optimizer state on the host: its CPU offload takes the parameters along", NO_OFFLOAD
        )
    refuse_unsharded_parameters(plan, refused)
    if plan.recompute and not recomputes_all(facts):
        refused.add("recomputing some of the blocks: FullAC takes all of them", RECOMPUTE_OR_NOT)
    if plan.pipeline > 1 and plan.schedule not in _SCHEDULES:
        refused.add(
            f"schedule {plan.schedule}: torch.distributed.pipelining has none like it",
            (("schedule", "1f1b"), ("schedule", "interleaved")),
        )
    if plan.pipeline > 1 and plan.microbatches < plan.stages:
        refused.add(
            f"{plan.microbatches} microbatches for {plan.stages} stages: it takes at least as many",
            (("pipeline", 1),),
        )
    if plan.holds_gathered and plan.microbatches > 1 and plan.pipeline == 1:
        refused.add(PER_MICROBATCH, RESHARDS)


def _rows(facts: Facts) -> list[tuple[str, Any]]:
    """(option, value) of everything but the pipeline."""
    plan, tokens = facts.plan, facts.model.tokens or 0
    sharded = plan.zero >= 2
    rows: list[tuple[str, Any]] = [
        ("parallelism.data_parallel_replicate_degree", plan.num_replicas if sharded else plan.data),
        ("parallelism.data_parallel_shard_degree", plan.shards if sharded else 1),
        ("parallelism.tensor_parallel_degree", plan.tensor),
        ("parallelism.context_parallel_degree", plan.context),
        ("parallelism.expert_parallel_degree", plan.expert),
        ("parallelism.pipeline_parallel_degree", plan.pipeline),
        ("training.num_tokens_per_microbatch_per_dp_rank", plan.microbatch_size * tokens),
        ("training.num_tokens_per_train_step", plan.batch * tokens),
        ("training.max_context_length", facts.model.tokens),
        ("training.mixed_precision_param", plan.precision.compute),
    ]
    if sharded:
        always = plan.zero == 3 and plan.reshard_after_forward == "always"
        reshard = "always" if always else "never"
        rows.append(("parallelism.fsdp_reshard_after_forward", reshard))
    if "parameters" in plan.offload:  # together with gradients and optimizer state
        rows.append(("training.enable_cpu_offload", True))
    return rows


def _stages(counts: Sequence[int], refused: Refused) -> list[tuple[str, Any]]:
    """Layers per stage: all equal, except fewer on the first and the last."""
    most = max(counts)
    if any(count != most for count in counts[1:-1]):
        refused.add(
            f"{', '.join(map(str, counts))} layers on the stages: only the first and "
            "the last may differ",
            (("pipeline", 1),),
        )
    return [
        ("parallelism.pipeline_parallel_layers_per_stage", most),
        ("parallelism.pipeline_parallel_first_stage_less_layers", most - counts[0]),
        ("parallelism.pipeline_parallel_last_stage_less_layers", most - counts[-1]),
    ]
