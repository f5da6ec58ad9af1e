"""Exports a plan as the configuration of torchtitan, Megatron-LM, DeepSpeed or Accelerate.

Each target gets what it can express; a decision it cannot express is refused, never dropped. Option
names are those of the public sources of August 2026: torchtitan b5bcd76 (`config/configs.py`),
Megatron-LM d98e8a6 (`training/arguments.py`, `model_parallel_config.py`), DeepSpeed edaa722
(`runtime/config.py`, `runtime/zero/config.py`), Accelerate 16cb6eb (`commands/config/cluster.py`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from graphaccel.errors import CannotExport
from graphaccel.planner.plan.axis_order import AXES
from graphaccel.planner.plan.axis_orders import DATA_OUTSIDE
from graphaccel.planner.plan.plan import Plan
from graphaccel.report.facts import Facts

_FP32 = 4


class Refusal(NamedTuple):
    """A decision that a target cannot express. instead: (pin, value) pairs that it can, each to
    plan again with; empty where there are none, or too many."""

    reason: str
    instead: tuple[tuple[str, object], ...] = ()


class _Refused:
    """Collects what a target cannot express."""

    def __init__(self) -> None:
        self.found: list[Refusal] = []

    def add(self, reason: str, instead: tuple[tuple[str, object], ...] = ()) -> None:
        """Add one."""
        self.found.append(Refusal(reason, instead))


_RECOMPUTE_OR_NOT = (("recompute", "none"), ("recompute", "all"))
_NOTHING_AWAY = (("offload", "none"),)
_SHARDED_OR_NOT = (("zero", 0), ("zero", 2), ("zero", 3))
_GATHERS_AGAIN = (("reshard_after_forward", "always"),)


def export(facts: Facts, target: str) -> str:
    """The configuration text for `target`, one of `TARGETS`, with a newline at its end.

    Raises CannotExport (GA209) with every decision that the target cannot express.
    """
    text, refused = _said(facts, target)
    if refused:
        reasons = tuple(one.reason for one in refused)
        raise CannotExport(target=target, plan=facts.plan.name, reasons=reasons)
    return text


def refusals(facts: Facts, target: str) -> tuple[Refusal, ...]:
    """The decisions of the plan that `target` cannot express."""
    return _said(facts, target)[1]


def _said(facts: Facts, target: str) -> tuple[str, tuple[Refusal, ...]]:
    refused = _Refused()
    text = TARGETS[target](facts, refused)
    return text, tuple(refused.found)


def _about(facts: Facts) -> str:
    plan = facts.plan
    return f"{plan.name}: {plan.devices} x {facts.cluster.device.name}, batch {plan.batch}"


def _common(facts: Facts, refused: _Refused, target: str) -> None:
    """Refuse what no target can express."""
    plan = facts.plan
    if plan.placements:
        names = ", ".join(name for name, _ in plan.placements)
        refused.add(f"how single parameters rest ({names}): {target} decides that for a module")
    if plan.reordered and target != "Megatron-LM":
        refused.add(
            f"axes in the order {', '.join(plan.reordered)}: the mesh of {target} has "
            f"{', '.join(axis for axis in AXES if axis in plan.reordered)}"
        )
    if plan.outputs != "loss":
        refused.add(f'outputs="{plan.outputs}": {target} computes the loss only')
    if plan.precision.products == "tfloat32":
        refused.add(
            "products in tfloat32: a setting of the script's own process, "
            'torch.backends.cuda.matmul.fp32_precision = "tf32"'
        )
    if plan.precision.planned_only and target != "Megatron-LM":
        refused.add(f"products in 8 bits: {target} has them by settings of its own")
    if plan.selective:
        refused.add(
            f"which values recomputed blocks save: {target} has that by ops or modules of its own",
            _RECOMPUTE_OR_NOT,
        )
    if "activations" in plan.offload:
        refused.add(
            f"activations on the host: {target} has that by module, or not at all", _NOTHING_AWAY
        )
    if len(facts.stages) > 1 and not all(stage.whole_blocks for stage in facts.stages):
        refused.add(f"cuts inside a block: stages of {target} are whole layers", (("pipeline", 1),))


def _layers(facts: Facts) -> list[int]:
    return [stage.blocks for stage in facts.stages]


def _recomputes_all(facts: Facts) -> bool:
    return bool(facts.plan.recompute) and len(facts.plan.recompute) == facts.model.blocks


def _only_1f1b(plan: Plan, refused: _Refused, target: str) -> None:
    known = "interleaved" if plan.interleave > 1 else "1f1b"
    if plan.pipeline > 1 and plan.schedule != known:
        refused.add(
            f"schedule {plan.schedule}: {target} has 1f1b, plain and interleaved",
            (("schedule", known),),
        )


def _sharded_only(plan: Plan, refused: _Refused) -> None:
    """Refuse parameters on the host with data 1: FSDP offloads shards only, those of parameters,
    gradients and optimizer state together."""
    if "parameters" in plan.offload and plan.data == 1:
        refused.add(
            "parameters on the host with data 1: they are there as shards of its FSDP",
            _NOTHING_AWAY,
        )


_PER_MICROBATCH = "parameters gathered once a step: its FSDP gathers them in each microbatch"


def _torchtitan(facts: Facts, refused: _Refused) -> str:
    """A function over torchtitan's `Trainer.Config`: its command-line flags are frozen and will be
    removed."""
    plan = facts.plan
    _common(facts, refused, "torchtitan")
    if facts.model.tokens is None:
        refused.add("a model without a sequence: torchtitan counts a batch in tokens")
    if plan.precision.compute not in ("float32", "bfloat16"):
        refused.add(f"compute in {plan.precision.compute}: it is float32 or bfloat16 there")
    if plan.zero == 1:
        refused.add("zero 1: its FSDP shards gradients as well", _SHARDED_OR_NOT)
    if "optimizer" in plan.offload and "parameters" not in plan.offload:
        refused.add(
            "optimizer state on the host: its CPU offload takes the parameters along", _NOTHING_AWAY
        )
    _sharded_only(plan, refused)
    if plan.recompute and not _recomputes_all(facts):
        refused.add("recomputing some of the blocks: FullAC takes all of them", _RECOMPUTE_OR_NOT)
    schedules = {"1f1b": "1F1B", "interleaved": "Interleaved1F1B", "gpipe": "GPipe"}
    if plan.pipeline > 1 and plan.schedule not in schedules:
        refused.add(
            f"schedule {plan.schedule}: torch.distributed.pipelining has none like it",
            (("schedule", "1f1b"), ("schedule", "interleaved")),
        )
    if plan.pipeline > 1 and plan.microbatches < plan.stages:
        refused.add(
            f"{plan.microbatches} microbatches for {plan.stages} stages: it takes at least as many",
            (("pipeline", 1),),
        )
    sharded = plan.zero >= 2
    tokens = plan.microbatch_size * (facts.model.tokens or 0)
    again = "always" if plan.zero == 3 and plan.reshard_after_forward == "always" else "never"
    if plan.holds_gathered and plan.microbatches > 1 and plan.pipeline == 1:
        refused.add(_PER_MICROBATCH, _GATHERS_AGAIN)
    rows: list[tuple[str, Any]] = [
        ("parallelism.data_parallel_replicate_degree", plan.num_replicas if sharded else plan.data),
        ("parallelism.data_parallel_shard_degree", plan.shards if sharded else 1),
        ("parallelism.tensor_parallel_degree", plan.tensor),
        ("parallelism.context_parallel_degree", plan.context),
        ("parallelism.expert_parallel_degree", plan.expert),
        ("parallelism.pipeline_parallel_degree", plan.pipeline),
        ("training.num_tokens_per_microbatch_per_dp_rank", tokens),
        ("training.num_tokens_per_train_step", plan.batch * (facts.model.tokens or 0)),
        ("training.max_context_length", facts.model.tokens),
        ("training.mixed_precision_param", plan.precision.compute),
    ]
    if sharded:
        rows.append(("parallelism.fsdp_reshard_after_forward", again))
    if "parameters" in plan.offload:  # together with gradients and optimizer state
        rows.append(("training.enable_cpu_offload", True))
    if plan.pipeline > 1:
        rows += [
            ("parallelism.pipeline_parallel_schedule", schedules.get(plan.schedule)),
            ("parallelism.num_pp_microbatches", plan.microbatches),
            *_titan_stages(_layers(facts), refused),
        ]
    lines = [f"    config.{name} = {value!r}" for name, value in rows]
    policy = "FullAC.Config()" if plan.recompute else "None"
    head = ["# " + _about(facts), f"# torchtitan: NGPU={plan.devices}, and a configuration made of"]
    head += ["# your own by this function (torchtitan/config/README.md).", ""]
    if plan.recompute:
        head = ["from torchtitan.distributed.activation_checkpoint import FullAC", "", *head]
    lines.append(f"    config.activation_checkpoint = {policy}")
    return "\n".join([*head, "def as_planned(config):", *lines, "    return config"]) + "\n"


def _titan_stages(layers: Sequence[int], refused: _Refused) -> list[tuple[str, Any]]:
    """Layers per stage: all equal, except fewer on the first and the last."""
    most = max(layers)
    if any(count != most for count in layers[1:-1]):
        refused.add(
            f"{', '.join(map(str, layers))} layers on the stages: only the first and "
            "the last may differ",
            (("pipeline", 1),),
        )
    return [
        ("parallelism.pipeline_parallel_layers_per_stage", most),
        ("parallelism.pipeline_parallel_first_stage_less_layers", most - layers[0]),
        ("parallelism.pipeline_parallel_last_stage_less_layers", most - layers[-1]),
    ]


def _megatron(facts: Facts, refused: _Refused) -> str:
    """Flags of Megatron-LM's training scripts."""
    plan = facts.plan
    _common(facts, refused, "Megatron-LM")
    _only_1f1b(plan, refused, "Megatron-LM")
    if plan.interleave > 1 and plan.microbatches % plan.pipeline:
        refused.add(
            f"{plan.microbatches} microbatches: its interleaved schedule takes a "
            f"multiple of pipeline {plan.pipeline}",
            (("interleave", 1),),
        )
    flags: list[tuple[str, Any]] = [
        ("tensor-model-parallel-size", plan.tensor),
        ("pipeline-model-parallel-size", plan.pipeline),
        ("context-parallel-size", plan.context),
        ("expert-model-parallel-size", plan.expert),
        ("micro-batch-size", plan.microbatch_size),
        ("global-batch-size", plan.batch),
    ]
    if plan.tensor > 1 and plan.sequence:
        flags.append(("sequence-parallel", None))
    if plan.context > 1 and plan.context_by:
        by = {"heads": "a2a", "sequence": "all_gather"}[plan.context_by]
        flags.append(("cp-comm-type", by))
    if plan.expert > 1:
        flags.append(("moe-token-dispatcher-type", "alltoall"))
    if plan.reordered:
        if plan.reordered != tuple(axis for axis in DATA_OUTSIDE if axis in plan.reordered):
            refused.add(
                f"axes in the order {', '.join(plan.reordered)}: it has pipeline or "
                "data outermost, and tensor innermost"
            )
        flags.append(("use-tp-pp-dp-mapping", None))
    if plan.pipeline > 1:
        flags.append(("pipeline-model-parallel-layout", _layout(_layers(facts))))
        if plan.tensor > 1 and not plan.scatter_sends and not plan.sequence:
            flags.append(("no-scatter-gather-tensors-in-pipeline", None))
    dtypes: Mapping[str, list[str]] = {"float32": [], "bfloat16": ["bf16"], "float16": ["fp16"]}
    flags += [(name, None) for name in dtypes[plan.precision.compute]]
    if plan.precision.planned_only:
        flags.append(("fp8-format", "hybrid"))
    if plan.precision.reduce == "float32" and plan.precision.compute != "float32":
        flags.append(("accumulate-allreduce-grads-in-fp32", None))
    if plan.data > 1:
        flags.append(("overlap-grad-reduce", None))
        if plan.zero <= 1 or plan.holds_gathered:
            flags.append(("ddp-bucket-size", plan.bucket_bytes // _FP32))
    if plan.zero == 1 or plan.holds_gathered:
        flags.append(("use-distributed-optimizer", None))
        if plan.holds_gathered:  # 16-bit weights are replicated there, their masters sharded
            flags.append(("overlap-param-gather", None))
            if plan.microbatches > 1 and plan.accumulation == "shards":
                refused.add(
                    "gradients reduced in each microbatch: its distributed optimizer "
                    "reduces them once a step",
                    (("accumulation", "whole"),),
                )
        if "optimizer" in plan.offload:
            flags += [
                ("use-precision-aware-optimizer", None),
                ("optimizer-cpu-offload", None),
                ("optimizer-offload-fraction", 1.0),
            ]
    elif plan.zero > 1:
        kept = {2: "optim_grads", 3: "optim_grads_params"}[plan.zero]
        flags += [("use-megatron-fsdp", None), ("data-parallel-sharding-strategy", kept)]
        if plan.shard_size:  # `no_shard`: nothing more is sharded over the replicas
            flags.append(("outer-dp-sharding-strategy", "no_shard"))
        if plan.zero == 3 and plan.reshard_after_forward == "never":
            refused.add(
                "reshard_after_forward='never': its FSDP gathers again for the backward",
                _GATHERS_AGAIN,
            )
    if plan.shard_size:
        flags.append(("num-distributed-optimizer-instances", plan.num_replicas))
    if "parameters" in plan.offload:
        refused.add(
            "parameters on the host: its CPU offload is of optimizer state alone", _NOTHING_AWAY
        )
    elif "optimizer" in plan.offload and plan.zero != 1 and not plan.holds_gathered:
        refused.add(
            "optimizer state on the host: it is part of its distributed optimizer, zero 1",
            (("zero", 1), *_NOTHING_AWAY),
        )
    if plan.recompute:
        flags += _megatron_recompute(facts, refused)
    lines = [f"--{name}" if value is None else f"--{name} {_shell(value)}" for name, value in flags]
    return "\n".join([f"# {_about(facts)}", *lines]) + "\n"


def _layout(layers: Sequence[int]) -> str:
    """`Et*2|t*3|t*3L`: embedding, layers, loss, stages separated by `|`."""
    stages = [f"t*{count}" if count > 1 else "t" * count for count in layers]
    return f"E{'|'.join(stages)}L"


def _megatron_recompute(facts: Facts, refused: _Refused) -> list[tuple[str, Any]]:
    """All layers, or the first ones of every rank's stages."""
    if _recomputes_all(facts):
        return [
            ("recompute-granularity", "full"),
            ("recompute-method", "uniform"),
            ("recompute-num-layers", 1),
        ]
    counts = {stage.recomputed for stage in facts.stages}
    if len(counts) > 1 or not all(stage.recomputed_first for stage in facts.stages):
        refused.add(
            "which blocks are recomputed: it is the same number of first layers on "
            "every stage, or all",
            _RECOMPUTE_OR_NOT,
        )
    return [
        ("recompute-granularity", "full"),
        ("recompute-method", "block"),
        ("recompute-num-layers", max(counts)),
    ]


def _shell(value: Any) -> str:
    text = str(value)
    return f'"{text}"' if "|" in text or "*" in text else text


def _deepspeed(facts: Facts, refused: _Refused) -> str:
    """The JSON of `deepspeed.initialize`."""
    plan = facts.plan
    _common(facts, refused, "DeepSpeed")
    if plan.pipeline > 1:
        refused.add(
            f"pipeline {plan.pipeline}: its pipelines need the model rewritten as a PipelineModule",
            (("pipeline", 1),),
        )
    for axis in ("context", "expert"):
        if getattr(plan, axis) > 1:
            refused.add(
                f"{axis} {getattr(plan, axis)}: it is set up in the model's code", ((axis, 1),)
            )
    if plan.recompute:
        refused.add(
            "recomputation: it is called in the model's code, not set in this file",
            (("recompute", "none"),),
        )
    if plan.zero == 3 and plan.reshard_after_forward == "never":
        refused.add(
            "reshard_after_forward='never': its ZeRO-3 gathers again for the backward",
            _GATHERS_AGAIN,
        )
    stage = plan.zero
    if plan.holds_gathered:  # full 16-bit weights, their float32 masters sharded
        stage = 2 if plan.accumulation == "shards" else 1
    elif "parameters" in plan.offload:  # also on one device: the ZeRO stage keeps them there
        stage = 3
    content: dict[str, Any] = {
        "train_batch_size": plan.batch,
        "train_micro_batch_size_per_gpu": plan.microbatch_size,
        "gradient_accumulation_steps": plan.microbatches,
        "zero_optimization": {
            "stage": stage,
            "overlap_comm": True,
            "reduce_bucket_size": plan.bucket_bytes // _FP32,
        },
    }
    if plan.shard_size and stage < 3:
        refused.add(
            f"zero {stage} in groups of {plan.shard_size}: its MiCS is of zero 3",
            (("zero", 3), ("shard_size", plan.data)),
        )
    elif plan.shard_size and plan.offload:
        refused.add(
            f"zero 3 in groups of {plan.shard_size}: its MiCS keeps nothing on the host",
            (("shard_size", plan.data), *_NOTHING_AWAY),
        )
    elif plan.shard_size:
        content["zero_optimization"]["mics_shard_size"] = plan.shard_size
    if "optimizer" in plan.offload and not stage:
        refused.add(
            "optimizer state on the host without zero: it is part of its ZeRO",
            (("zero", 1), *_NOTHING_AWAY),
        )
    elif "optimizer" in plan.offload:
        where = {"device": "cpu", "pin_memory": True}
        content["zero_optimization"]["offload_optimizer"] = where
        if "parameters" in plan.offload:
            content["zero_optimization"]["offload_param"] = where
    if plan.tensor > 1:
        content["tensor_parallel"] = {"autotp_size": plan.tensor}
    if plan.precision.compute == "bfloat16":
        content["bf16"] = {"enabled": True}
    if plan.precision.compute == "float16":
        content["fp16"] = {"enabled": True, "loss_scale": 0 if plan.precision.scaled else 1}
    if plan.precision.compute != "float32":
        content["communication_data_type"] = {"float32": "fp32", "bfloat16": "bf16"}.get(
            plan.precision.reduce, "fp16"
        )
    return json.dumps(content, indent=2) + "\n"


def _accelerate(facts: Facts, refused: _Refused) -> str:
    """The YAML of `accelerate launch --config_file`: FSDP2 where something is sharded."""
    plan = facts.plan
    _common(facts, refused, "Accelerate")
    if plan.pipeline > 1:
        refused.add(
            f"pipeline {plan.pipeline}: its FSDP configuration has no pipeline", (("pipeline", 1),)
        )
    if plan.expert > 1:
        refused.add(
            f"expert {plan.expert}: its FSDP configuration has no expert axis", (("expert", 1),)
        )
    if plan.zero == 1:
        refused.add("zero 1: its FSDP shards gradients as well", _SHARDED_OR_NOT)
    if "optimizer" in plan.offload and "parameters" not in plan.offload:
        refused.add(
            "optimizer state on the host: its FSDP takes the parameters along", _NOTHING_AWAY
        )
    _sharded_only(plan, refused)
    if plan.zero == 0 and (plan.tensor > 1 or plan.context > 1):
        refused.add(
            "tensor or context without zero: it composes them with FSDP only",
            (("zero", 2), ("zero", 3)),
        )
    if plan.recompute and not (_recomputes_all(facts) and plan.zero):
        refused.add(
            "recomputation of some blocks, or without FSDP: it has all blocks of FSDP",
            _RECOMPUTE_OR_NOT,
        )
    mixed = {"float32": "no", "bfloat16": "bf16", "float16": "fp16"}[plan.precision.compute]
    lines = [f"# {_about(facts)}"]
    if plan.microbatches > 1:
        lines.append(
            f"# in the script: Accelerator(gradient_accumulation_steps={plan.microbatches})"
        )
    lines.append(f"# and batches of {plan.microbatch_size} from each process's DataLoader")
    lines += [
        "compute_environment: LOCAL_MACHINE",
        f"distributed_type: {'FSDP' if plan.zero else 'MULTI_GPU' if plan.devices > 1 else 'NO'}",
        f"mixed_precision: '{mixed}'",
        f"num_processes: {plan.devices}",
    ]
    if plan.holds_gathered and plan.microbatches > 1:
        refused.add(_PER_MICROBATCH, _GATHERS_AGAIN)
    if plan.zero:
        again = str(plan.zero == 3 and plan.reshard_after_forward == "always").lower()
        lines += [
            "fsdp_config:",
            "  fsdp_version: 2",
            f"  fsdp_reshard_after_forward: {again}",
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
    return "\n".join(lines) + "\n"


TARGETS: Mapping[str, Callable[[Facts, _Refused], str]] = {
    "torchtitan": _torchtitan,
    "megatron": _megatron,
    "deepspeed": _deepspeed,
    "accelerate": _accelerate,
}
