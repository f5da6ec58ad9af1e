"""Plans as configurations of other systems: what they say, and what they refuse."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from graphaccel.errors import CannotExport
from graphaccel.planner.cluster.catalogue import cluster
from graphaccel.planner.plan.base_plan import PRECISIONS
from graphaccel.planner.plan.pins import NAMES
from graphaccel.planner.plan.plan import Plan, Precision, Selective
from graphaccel.report.export import TARGETS, export, refusals
from graphaccel.report.facts import Facts, ModelFacts, StageFacts

BF16 = Precision(compute="bfloat16")
BLOCKS = 8
STATE, ALL = ("optimizer",), ("optimizer", "parameters")

ONCE: dict[str, Any] = {"zero": 3, "reshard_after_forward": "once_per_step"}


def facts(*layers: int, whole: bool = True, **decided: Any) -> Facts:
    """A model of eight blocks, 64 examples of 128 tokens, `layers` blocks on each stage."""
    layers = layers or (BLOCKS,)
    settings = {"data": 1, "batch": 64, **decided}
    plan = Plan(devices=1, **settings)
    plan = replace(plan, devices=plan.data * plan.pipeline * plan.model_parallel_size)
    again, stages = list(plan.recompute), []
    for number, count in enumerate(layers):
        own = [f"h.{i}" in again for i in range(sum(layers[:number]), sum(layers[: number + 1]))]
        ordered = own == sorted(own, reverse=True)
        stages.append(
            StageFacts(
                number, number % plan.pipeline, 1, 1, "", 1.0, 2.0,
                blocks=count, whole_blocks=whole, recomputed=sum(own), recomputed_first=ordered,
            )
        )  # fmt: skip
    model = ModelFacts("GPT", 10, 1, plan.batch, 128, 1, 1, BLOCKS, 1)
    return Facts(model, cluster("h100-80gb", plan.devices), "", plan, tuple(stages), ())


def configured(text: str) -> dict[str, Any]:
    """What torchtitan's function sets, by running it."""
    config = SimpleNamespace(parallelism=SimpleNamespace(), training=SimpleNamespace())
    scope: dict[str, Any] = {"FullAC": SimpleNamespace(Config=lambda: "full")}
    exec(re.sub(r"^from .*$", "", text, flags=re.M), scope)
    made = scope["as_planned"](config)
    return {
        **vars(made.parallelism), **vars(made.training), "ac": made.activation_checkpoint
    }  # fmt: skip


def test_torchtitan_fsdp() -> None:
    said = configured(
        export(facts(data=8, zero=3, precision=BF16, recompute=_blocks(8)), "torchtitan")
    )
    assert said["data_parallel_shard_degree"] == 8
    assert said["data_parallel_replicate_degree"] == 1
    assert said["fsdp_reshard_after_forward"] == "always"
    assert said["num_tokens_per_microbatch_per_dp_rank"] == 8 * 128
    assert said["num_tokens_per_train_step"] == 64 * 128
    assert said["mixed_precision_param"] == "bfloat16"
    assert said["ac"] == "full"
    assert "num_pp_microbatches" not in said


def test_torchtitan_pipeline() -> None:
    settings = {"data": 2, "pipeline": 4, "microbatches": 8, "tensor": 2}
    said = configured(export(facts(1, 3, 3, 1, **settings), "torchtitan"))
    assert said["pipeline_parallel_degree"] == 4
    assert said["pipeline_parallel_schedule"] == "1F1B"
    assert said["num_pp_microbatches"] == 8
    assert said["tensor_parallel_degree"] == 2
    assert said["pipeline_parallel_layers_per_stage"] == 3
    assert said["pipeline_parallel_first_stage_less_layers"] == 2
    assert said["pipeline_parallel_last_stage_less_layers"] == 2
    assert said["data_parallel_replicate_degree"] == 2
    assert said["ac"] is None


def test_megatron() -> None:
    made = facts(
        3, 5, data=2, pipeline=2, tensor=4, microbatches=8, precision=BF16, zero=1,
        recompute=("h.0", "h.3"),
    )  # fmt: skip
    text = export(made, "megatron")
    flags = [line for line in text.splitlines() if not line.startswith("#")]
    assert flags == [
        "--tensor-model-parallel-size 4",
        "--pipeline-model-parallel-size 2",
        "--context-parallel-size 1",
        "--expert-model-parallel-size 1",
        "--micro-batch-size 4",
        "--global-batch-size 64",
        "--sequence-parallel",
        '--pipeline-model-parallel-layout "Et*3|t*5L"',
        "--bf16",
        "--accumulate-allreduce-grads-in-fp32",
        "--overlap-grad-reduce",
        f"--ddp-bucket-size {(25 << 20) // 4}",
        "--use-distributed-optimizer",
        "--recompute-granularity full",
        "--recompute-method block",
        "--recompute-num-layers 1",
    ]


def test_megatron_has_data_outside_the_pipeline() -> None:
    settings = {"data": 2, "pipeline": 2, "tensor": 2, "microbatches": 4}
    usual = export(facts(4, 4, **settings), "megatron")
    assert "--use-tp-pp-dp-mapping" not in usual
    other = facts(4, 4, **settings, order=("data", "pipeline", "expert", "context", "tensor"))
    flags = export(other, "megatron").splitlines()
    assert "--use-tp-pp-dp-mapping" in flags
    assert [flag for flag in flags[1:] if "mapping" not in flag] == usual.splitlines()[1:]


@pytest.mark.parametrize("target", TARGETS)
def test_an_order_that_a_target_does_not_have(target: str) -> None:
    made = facts(
        data=4, tensor=2, zero=2, order=("tensor", "data", "expert", "context", "pipeline")
    )
    with pytest.raises(CannotExport) as caught:
        export(made, target)
    assert sum("in the order tensor, data" in reason for reason in caught.value.reasons) == 1
    order = "data", "pipeline", "expert", "context", "tensor"
    same = replace(made, plan=replace(made.plan, order=order))
    assert export(same, target)  # there is no pipeline


def test_megatron_multiplies_in_8_bits() -> None:
    said = export(facts(data=8, precision=PRECISIONS["fp8"]), "megatron").splitlines()
    assert {"--bf16", "--fp8-format hybrid"} <= set(said)


def test_megatron_sends_tokens_as_ours() -> None:
    said = export(facts(data=4, expert=2, tensor=2, sequence=False), "megatron").splitlines()
    assert {"--expert-model-parallel-size 2", "--moe-token-dispatcher-type alltoall"} <= set(said)
    assert "--sequence-parallel" not in said


@pytest.mark.parametrize(
    ("by", "flags"),
    [
        ("heads", ["--cp-comm-type a2a"]),
        ("sequence", ["--cp-comm-type all_gather"]),
        ("", []),
    ],
)
def test_megatron_splits_attention_as_was_asked(by: str, flags: list[str]) -> None:
    said = export(facts(data=4, context=2, zero=1, context_by=by), "megatron").splitlines()
    assert [flag for flag in said if "cp-comm" in flag] == flags


def test_megatron_fsdp() -> None:
    text = export(facts(data=8, zero=3, recompute=_blocks(8)), "megatron")
    flags = ("--use-megatron-fsdp", "--ckpt-format fsdp_dtensor")
    assert "\n".join((*flags, "--data-parallel-sharding-strategy optim_grads_params\n")) in text
    assert "--recompute-method uniform" in text
    assert "--bf16" not in text


def test_deepspeed() -> None:
    made = facts(
        data=4, tensor=2, microbatches=2, zero=2, precision=Precision("float16", scaled=True)
    )
    assert json.loads(export(made, "deepspeed")) == {
        "train_batch_size": 64,
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {
            "stage": 2,
            "overlap_comm": True,
            "reduce_bucket_size": (25 << 20) // 4,
        },
        "tensor_parallel": {"autotp_size": 2},
        "fp16": {"enabled": True, "loss_scale": 0},
        "communication_data_type": "fp32",
    }


def test_optimizer_state_on_the_host() -> None:
    made = json.loads(export(facts(data=4, zero=2, offload=STATE), "deepspeed"))
    where = {"device": "cpu", "pin_memory": True}
    assert made["zero_optimization"]["offload_optimizer"] == where
    flags = export(facts(data=4, zero=1, offload=STATE), "megatron")
    assert (
        "--use-distributed-optimizer\n--use-precision-aware-optimizer\n--optimizer-cpu-offload\n"
        "--optimizer-offload-fraction 1.0\n"
    ) in flags


@pytest.mark.parametrize("data", [1, 4])
def test_parameters_on_the_host(data: int) -> None:
    """FSDP's CPU offload takes parameters, gradients and optimizer state along: just that."""
    made = facts(data=data, zero=3 if data > 1 else 0, offload=ALL)
    zero = json.loads(export(made, "deepspeed"))["zero_optimization"]
    where = {"device": "cpu", "pin_memory": True}
    assert (zero["stage"], zero["offload_optimizer"], zero["offload_param"]) == (3, where, where)
    if data > 1:
        assert configured(export(made, "torchtitan"))["enable_cpu_offload"] is True
        assert "\n  fsdp_offload_params: true\n" in export(made, "accelerate")
        for offload in ((), STATE):
            said = json.loads(export(facts(data=data, zero=3, offload=offload), "deepspeed"))
            assert "offload_param" not in said["zero_optimization"]
        plain = facts(data=data, zero=3)
        assert "enable_cpu_offload" not in configured(export(plain, "torchtitan"))
        assert "\n  fsdp_offload_params: false\n" in export(plain, "accelerate")


def test_parameters_gathered_once_a_step() -> None:
    """A distributed optimizer has whole weights in 16 bits, and their masters in shards."""
    made = facts(data=4, microbatches=2, precision=BF16, **ONCE)
    flags = export(made, "megatron").splitlines()
    assert {"--use-distributed-optimizer", "--overlap-param-gather"} <= set(flags)
    assert "--use-megatron-fsdp" not in flags
    for accumulation, stage in (("whole", 1), ("shards", 2)):
        made = facts(data=4, microbatches=2, accumulation=accumulation, **ONCE)
        assert json.loads(export(made, "deepspeed"))["zero_optimization"]["stage"] == stage
    text = export(facts(4, 4, data=2, pipeline=2, microbatches=4, **ONCE), "torchtitan")
    assert "config.parallelism.fsdp_reshard_after_forward = 'never'" in text


def test_zero_over_a_part_of_the_data_axis() -> None:
    said = configured(export(facts(data=8, zero=3, shard_size=4), "torchtitan"))
    assert said["data_parallel_replicate_degree"] == 2
    assert said["data_parallel_shard_degree"] == 4
    text = export(facts(data=8, zero=3, shard_size=4), "accelerate")
    assert "parallelism_config_dp_replicate_size: 2\n" in text
    assert "parallelism_config_dp_shard_size: 4\n" in text
    zero = json.loads(export(facts(data=8, zero=3, shard_size=4), "deepspeed"))["zero_optimization"]
    assert (zero["stage"], zero["mics_shard_size"]) == (3, 4)
    assert "--num-distributed-optimizer-instances" not in export(facts(data=8, zero=1), "megatron")
    flags = export(facts(data=8, zero=1, shard_size=2), "megatron")
    assert "--use-distributed-optimizer\n--num-distributed-optimizer-instances 4\n" in flags
    flags = export(facts(data=8, zero=2, shard_size=4), "megatron")
    assert (
        "--data-parallel-sharding-strategy optim_grads\n--outer-dp-sharding-strategy no_shard\n"
        "--num-distributed-optimizer-instances 2\n"
    ) in flags


def test_accelerate() -> None:
    text = export(facts(data=4, tensor=2, microbatches=4, zero=3, precision=BF16), "accelerate")
    rows = dict(re.findall(r"^\s*(\w+): (.+)$", text, flags=re.M))
    assert rows["distributed_type"] == "FSDP"
    assert rows["mixed_precision"] == "'bf16'"
    assert rows["num_processes"] == "8"
    assert rows["fsdp_reshard_after_forward"] == "true"
    assert rows["parallelism_config_dp_shard_size"] == "4"
    assert rows["parallelism_config_tp_size"] == "2"
    assert "# in the script: Accelerator(gradient_accumulation_steps=4)\n" in text
    assert "distributed_type: MULTI_GPU" in export(facts(data=4), "accelerate")


@pytest.mark.parametrize(
    ("target", "made", "reason"),
    [
        ("deepspeed", facts(4, 4, pipeline=2), "pipeline 2: "),
        ("deepspeed", facts(data=2, recompute=("h.0",)), "recomputation: "),
        ("deepspeed", facts(expert=2), "expert 2: "),
        (
            "deepspeed",
            facts(data=2, zero=3, reshard_after_forward="never"),
            "reshard_after_forward='never': ",
        ),
        (
            "megatron",
            facts(data=2, microbatches=2, accumulation="shards", **ONCE),
            "gradients reduced in each microbatch: ",
        ),
        ("torchtitan", facts(data=2, microbatches=2, **ONCE), "parameters gathered once a step: "),
        ("accelerate", facts(data=2, microbatches=2, **ONCE), "parameters gathered once a step: "),
        ("accelerate", facts(4, 4, pipeline=2), "pipeline 2: "),
        ("accelerate", facts(data=2, zero=1), "zero 1: "),
        ("accelerate", facts(data=2, tensor=2), "tensor or context without zero: "),
        ("accelerate", facts(data=2, zero=3, recompute=("h.0",)), "recomputation of some blocks"),
        ("torchtitan", facts(data=2, zero=1), "zero 1: "),
        ("torchtitan", facts(data=2, recompute=("h.0",)), "recomputing some of the blocks: "),
        ("torchtitan", facts(2, 3, 1, 2, pipeline=4, microbatches=4), "2, 3, 1, 2 layers on the"),
        ("torchtitan", facts(4, 4, pipeline=2), "1 microbatches for 2 stages: "),
        ("torchtitan", facts(precision=Precision("float16")), "compute in float16: "),
        ("torchtitan", facts(precision=PRECISIONS["fp8"]), "matmuls in 8 bits: "),
        ("accelerate", facts(precision=PRECISIONS["tf32"]), "matmuls in tfloat32: "),
        ("megatron", facts(4, 4, pipeline=2, schedule="gpipe"), "schedule gpipe: "),
        ("megatron", facts(4, 4, pipeline=2, recompute=("h.1",)), "which blocks are recomputed: "),
        (
            "megatron",
            facts(2, 2, 2, 2, pipeline=2, interleave=2, schedule="interleaved"),
            "1 microbatches: ",
        ),
        ("megatron", facts(data=2, outputs="all"), 'outputs="all": '),
        ("megatron", facts(4, 4, pipeline=2, whole=False), "cuts inside a block: "),
        ("torchtitan", facts(placements=(("w", ()),)), "how single parameters are placed (w): "),
        ("torchtitan", facts(data=2, zero=3, offload=STATE), "optimizer state on the host: "),
        ("accelerate", facts(data=2, zero=3, offload=STATE), "optimizer state on the host: "),
        ("deepspeed", facts(data=2, offload=STATE), "optimizer state on the host without zero: "),
        ("megatron", facts(data=2, offload=STATE), "optimizer state on the host: "),
        ("deepspeed", facts(data=2, zero=2, offload=("activations",)), "activations on the host: "),
        ("deepspeed", facts(data=4, zero=2, shard_size=2), "zero 2 in groups of 2: "),
        (
            "deepspeed",
            facts(data=4, zero=3, shard_size=2, offload=STATE),
            "zero 3 in groups of 2: ",
        ),
        ("megatron", facts(data=2, zero=3, offload=ALL), "parameters on the host: "),
        ("torchtitan", facts(offload=ALL), "parameters on the host with data 1: "),
        ("accelerate", facts(offload=ALL), "parameters on the host with data 1: "),
        (
            "megatron",
            facts(selective=(Selective(("layers.0",), ("add",)),)),
            "which values recomputed blocks save",
        ),
    ],
)
def test_what_a_target_can_not_say_is_refused(target: str, made: Facts, reason: str) -> None:
    with pytest.raises(CannotExport) as caught:
        export(made, target)
    assert caught.value.target == target
    (said,) = caught.value.reasons
    assert said.startswith(reason)
    (refusal,) = refusals(made, target)
    for name, value in refusal.instead:  # a pin, and not what the plan has
        assert name in NAMES
        assert getattr(made.plan, name) != value


@pytest.mark.parametrize("target", TARGETS)
def test_plain_data_parallelism_is_understood_by_all(target: str) -> None:
    text = export(facts(data=8), target)
    assert text.endswith("\n")
    if target != "deepspeed":
        assert "data 8 x pipeline 1: 8 x h100-80gb, batch 64" in text


def _blocks(count: int) -> tuple[str, ...]:
    return tuple(f"h.{i}" for i in range(count))
