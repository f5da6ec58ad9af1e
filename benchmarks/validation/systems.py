"""What systems of published runs train with, by source and row."""

from __future__ import annotations

from dataclasses import dataclass, replace

from benchmarks.validation.mixtures import mixture_of
from benchmarks.validation.recipes import (
    EXPERTS_AGAIN,
    beside_another,
    by_deep_ep,
    release_of,
    started,
    tensor_in_pieces,
)

# Python of an eager framework, for each operation: the least time of a layer on one device in
# vTrain's one-node grid, 3.0 ms, by the 48 operations that its graph has here.
EAGER_LAUNCH = 62e-6
# Of what is started one by one in a mixture of another framework: as its runs say (`fit`).
STARTED_LAUNCH = 52e-6
# So many times as long a process takes where it schedules the parts of two microbatches' layers
# beside each other: as such runs say of Qwen3-235B on B200 and B300, 1.33, 1.66 and 1.68.
SCHEDULED = 1.65
# Of products with a scale for each row, which are cast for the backward once more, by columns: read
# to find a scale and again to be cast, 8 bytes for each number in place of 2 (`matmul_with_hp_or_
# float8_args`, float8/float8_linear.py, torchao). Llama-3 8B on 8 H100s: 5,760 tokens/s in 16 bits,
# 6,424 with scales of rows, 7,186 with those of tensors (pytorch/torchtitan@7a04053). With products
# six tenths of the step in 16 bits, a token's take 69.8 us with the latter; of the 16.5 us that it
# takes longer with the former, casts are 8.5.
_BY_ROWS, _CAST_BY_ROWS = 0.90, 4.0
# Of casts to 4 bits: until May 2026 kernels of their own moved the scales to where products read
# them; with these a cast took 1.18 to 1.36 times as long (NVIDIA/TransformerEngine, pull request
# 3011).
_SCALES_APART, _SCALES_WITHIN = (1.18 + 1.36) / 2, "26.06"


@dataclass(frozen=True)
class System:
    """What a source trained with, where that decides about time or memory.

    Weights are kept in 16 bits, the optimizer has float32 weights and two moments besides: 12 bytes
    a parameter. fused_attention: scores are never written to memory. fusions: kernels of
    `graphaccel.kernels` that stand for those of the system; timed: those that stand for its time
    alone, as they span more than its kernel does. gradient_bytes: of each gradient that
    is added up. launch_seconds: host time to start an operation, network_gigabits: between nodes
    for each device; None: as in the catalogue. reserved: memory was read off the allocator, not off
    the tensors. dropout: of a GPT; what is computed again draws the same numbers again. zero: where
    a row does not say. split: products and the collectives of their tensor axis run beside each
    other, in as many pieces as the axis has ranks. overlaps: gradients are reduced beside the last
    backward, and not after it. gathers_beside: where the optimizer is sharded, what it changed is
    gathered beside the next forward. prefetches: FSDP gathers for the backward beside it; else a
    block's parameters when the backward of the block after it is done.
    vocabulary: where a row does not say; the tensor axis has equal parts of it, and what is left
    over is dropped. recompute: where a row says otherwise and its times do not. attention: rate of
    its fused attention beside that of today's kernels, on A100 and before; attention_hopper: on
    later devices. megatron_core: memory is that of
    Megatron-LM 0.14 with Transformer Engine: for every shape of a weight a tensor that is no
    gradient lies there for autograd (`get_dummy_wgrad`), and an unfused loss works in one float32
    copy of the logits (`tensor_parallel/cross_entropy.py`). sequence: where a row does not say.
    fsdp2: float32 weights in shards over the data and context axes, gathered in bfloat16 for each
    microbatch, or, in a pipeline, once a step. device: GiB and TB/s of its memory, and its power as
    a share of the catalogue's, where it is another. rows_in_parts: each rank of the tensor axis
    sends its part of the rows to their experts (`MoEAlltoAllTokenDispatcher`,
    megatron/core/transformer/moe/token_dispatcher.py).
    gathers_once: FSDP lets go of what it gathered at the end of a step, and sums gradients once.
    sequence_parallel: where a row does not say. layers_a_stage: of a pipeline, where a row does not
    say; 0: the planner's choice. swiglu_again: what it gives is made again for the backward.
    probabilities_inside: rows are weighed between the products of their experts, so that none
    waits behind them (`weighted_bias_swiglu_impl`, megatron/core/fusions/fused_bias_swiglu.py); and
    fused attention takes values narrower than keys. router_rounds: what the router multiplies is of
    16 bits, and summed in float32 (`RouterGatingLinearFunction`,
    megatron/core/transformer/moe/moe_utils.py). once_a_node: rows go once to each node where they
    have experts, and on from there (DeepEP's kernels "with NVLink and RDMA forwarding"). traced:
    times are those of layers that were traced alone, added up (`traced`). scaled: rate of its
    matmuls in 8 bits beside those with one scale for a tensor. started: parts of a mixture's
    layers whose operations a process starts one by one (`recipes`). weighs_biases: experts' biases
    are weighed and added in operations of their own. latent_rotary: of latent attention, all
    between products and attention is two kernels (`latent`). beside_another: rows are sent to their
    experts, and back, while another microbatch is computed, forward beside backward
    (`overlap_moe_expert_parallel_comm`, megatron/core/models/common/model_chunk_schedule_plan.py).
    experts_apart: each expert's products are kernels of their own (`GroupedLinear` of Transformer
    Engine). experts_again: layers with experts are made again for the backward (`recompute_modules`
    of its recipe: "moe"). gathers_low: where products are in 8 or 4 bits, the tensor axis gathers
    rows in those. gathers_whole: it gathers them in one piece, where `split`. compiled: its blocks
    are compiled, with what is made again in them. joined: products of one input are one (`joined`).
    casts: bytes that are moved to cast a number, beside those of Transformer Engine.
    """

    fused_attention: bool = True
    fusions: tuple[str, ...] = ()
    timed: tuple[str, ...] = ()
    gradient_bytes: int = 2
    launch_seconds: float | None = None
    reserved: bool = False
    dropout: float = 0.0
    zero: int = 0
    split: bool = False
    overlaps: bool = True
    gathers_beside: bool = False
    prefetches: bool = True
    vocabulary: int | None = None
    recompute: str | None = None
    attention: float = 1.0
    attention_hopper: float = 1.0
    network_gigabits: float | None = None
    megatron_core: bool = False
    sequence: int | None = None
    fsdp2: bool = False
    device: tuple[float, float, float] | None = None
    rows_in_parts: bool = False
    gathers_once: bool = False
    sequence_parallel: bool = False
    layers_a_stage: int = 0
    swiglu_again: bool = False
    probabilities_inside: bool = False
    router_rounds: bool = False
    once_a_node: bool = False
    traced: bool = False
    scaled: float = 1.0
    started: frozenset[str] = frozenset()
    weighs_biases: bool = False
    latent_rotary: bool = False
    beside_another: bool = False
    experts_apart: bool = False
    experts_again: bool = False
    gathers_low: bool = False
    gathers_whole: bool = False
    compiled: bool = False
    joined: bool = False
    casts: float = 1.0


# Fused: the masked softmax, and bias, dropout and sum (arXiv 2104.04473, section 4.2); the kernel
# that stands for the latter has the norm in it too, which recomputes at another place. Its loss
# works in place, in a few operations on any number of ranks (`_VocabParallelCrossEntropy`,
# megatron/core/tensor_parallel/cross_entropy.py), as a fused one takes. Its wrapper reduces after
# the last backward.
_MEGATRON = System(
    fused_attention=False,
    fusions=("scale_mask_softmax",),
    timed=("dropout_add_layer_norm", "cross_entropy"),
    dropout=0.1,
    overlaps=False,
)
_DEEPSPEED = replace(_MEGATRON, launch_seconds=EAGER_LAUNCH)
# Collectives of the tensor axis run beside products there, gradients are reduced and parameters
# gathered beside the phases (the note on the table of core_v0.8).
_CORE = System(fusions=("cross_entropy",), zero=1, split=True, gathers_beside=True)
_LLAMA = ("add_rms_norm", "cross_entropy", "rms_norm", "rotary", "swiglu")
# Gradients in bfloat16; `ub_tp_comm_overlap`, `overlap_grad_sync`, `overlap_param_sync`
# (NVIDIA/dgxc-benchmarking, nemotron4-15b-synth.yaml, gpt3_175b_hydra.yaml): the tensor axis's
# collectives run in pieces beside products, and those over data by layers beside both phases. Rows
# are gathered as products read them (`gather_along_first_dim` of Transformer Engine, with a
# quantizer).
_NEMO = System(fusions=_LLAMA, zero=1, split=True, gathers_beside=True, rows_in_parts=True,
               probabilities_inside=True, router_rounds=True, experts_apart=True,
               gathers_low=True, joined=True)  # fmt: skip
SYSTEMS = {
    # Megatron-LM of 2021 and its default dropout; its own masked softmax, scores in memory (arXiv
    # 2104.04473, section 4.2).
    "sc21": _MEGATRON,
    "2205.05198": _MEGATRON,
    # What vTrain's simulator says, not runs: times grow by the same microsecond with every
    # microbatch, and from 2 to 4 to 8 data ranks by what its table of all-reduces says, down to
    # dividing by the bus bandwidth above 1 GiB (`compute_comm_time`, src/predictor.py). So its
    # assumptions: words are shared out as they are, `vocab_size // world_size`; gradients are
    # reduced last. Nothing is computed again: 2048 more tokens take a layer of width 2048 4.0 ms;
    # with another forward in it its products would run at 314 TFLOP/s, above the peak.
    "ground_truth_single": replace(
        _MEGATRON,
        timed=("cross_entropy",),  # the others' operations are counted in `EAGER_LAUNCH`
        launch_seconds=EAGER_LAUNCH,
        vocabulary=50257,
        recompute="none",
        traced=True,
    ),
    # Megatron-DeepSpeed, the same run by eager PyTorch; 800 Gb/s a node (VIA-Research/vTrain). Its
    # pipeline engine reduces after the last backward, as Megatron-LM's own wrapper then did.
    "vTrain": replace(_DEEPSPEED, network_gigabits=100),
    # FSDP by Composer in 2023: fused loss; gradients in shards of the reduced dtype (DEFAULT:
    # float32); `backward_prefetch` is BACKWARD_POST unless told otherwise; the first FlashAttention
    # (`attn_impl: triton`): the second is about twice as fast (arXiv 2307.08691), and on H100 the
    # third is 1.5 to 2.0 times as fast as that (arXiv 2407.08608).
    "llm-foundry": System(
        fusions=("cross_entropy",),
        gradient_bytes=4,
        prefetches=False,
        attention=0.5,
        attention_hopper=0.3,
    ),
    # Megatron-LM with Transformer Engine: float32 main gradients, fused kernels; its own loss is
    # not fused unless asked for.
    "SimuMax": System(
        fusions=tuple(f for f in _LLAMA if f != "cross_entropy"),
        gradient_bytes=4,
        megatron_core=True,
        probabilities_inside=True,
        joined=True,
        experts_apart=True,
    ),
    # GPT-3 175B of NeMo trains with dropout, its kernels as below (gpt3_175b_hydra.yaml:
    # `hidden_dropout`, `bias_dropout_add_fusion`, `bias_activation_fusion`).
    "README_175b": replace(_NEMO, timed=("dropout_add_layer_norm",), dropout=0.1),
    "dgxc": _NEMO,
    # Its recipes for measuring set `sequence_parallel` where there is a tensor axis.
    "Megatron-Bridge": replace(_NEMO, sequence_parallel=True, latent_rotary=True),
    # Section 3.3.2: gradients are summed over all microbatches before they are scattered,
    # parameters are not sharded again after the forward; the first stage has only the embedding and
    # the last only the head, so that of 126 layers and these two each is a stage; tensor
    # parallelism is that of Korthikanti et al., which splits the sequence between products. SwiGLU
    # is taken to be that of xformers (`_SwiGLUFusedFunc`).
    "2407.21783": System(
        fusions=_LLAMA,
        gradient_bytes=4,
        gathers_once=True,
        sequence_parallel=True,
        layers_a_stage=1,
        swiglu_again=True,
    ),
    # torch's own attention in 2024 is the second FlashAttention, on H100 too, where the third is
    # 1.5 to 2.0 times as fast (arXiv 2407.08608).
    # 96 GB of HBM2e at 2.4 TB/s, at 500 of 700 W (its documents); llama3_70b.toml has 8192 tokens
    # (pytorch/torchtitan@820504e).
    "torchtitan": System(
        fusions=_LLAMA,
        gradient_bytes=4,
        reserved=True,
        attention_hopper=0.6,
        fsdp2=True,
        gathers_low=True,
        sequence=8192,
        device=(95.0, 2.4, 500 / 700),
    ),
    "core_v0.8": _CORE,
    # Sources of which no run is among ours, by their framework: Megatron-LM before its core and
    # after, NeMo on top of it, and Megatron-DeepSpeed, with which AMP trained (arXiv 2210.07297).
    "Megatron-LM@2": _MEGATRON,
    "Megatron-LM": _CORE,
    "NeMo": _NEMO,
    "/AMP": _DEEPSPEED,
    "DeepSpeed": _DEEPSPEED,
}

# What only the times of that source say: host times, of all operations and of parts of mixtures,
# for which other runs that start operations eagerly say another (`fit`). All others are from what
# is documented of a system: configurations, papers.
_OWN = {
    "ground_truth_single": ("launch_seconds", "gap_seconds"),
    "NVIDIA-NeMo/Megatron-Bridge": ("started_seconds", "scheduled"),
}


def own_shares(source: str) -> tuple[str, ...]:
    """What of a source's system nothing else says: who leaves it out leaves it out."""
    return next((fields for part, fields in _OWN.items() if part in source), ())


def known_system(source: str) -> System | None:
    """What a source trained with, where that is known."""
    return next((system for part, system in SYSTEMS.items() if part in source), None)


def system_of(row: dict[str, str]) -> System:
    """Of the row's source, as far as its note says otherwise."""
    system = known_system(row["source"]) or System()
    if row["recompute"] == "selective":  # makes the scores again in backward, as fused attention
        system = replace(system, fused_attention=True)
    if system.traced and int(row["micro_batch"]) * int(row["heads"]) // int(row["tp"]) % 4:
        # Its masked softmax takes scores by fours (`FusedScaleMaskSoftmax`, src/model).
        fusions = tuple(f for f in system.fusions if f != "scale_mask_softmax")
        system = replace(system, fusions=fusions)
    mixture = mixture_of(row["model"])
    if "Megatron-Bridge" in row["source"] and mixture is not None:
        release = release_of(row["source"])
        parts = started(mixture, row["gpu_type"], row["precision"], release)
        deep = by_deep_ep(mixture, row["gpu_type"], release)
        beside = beside_another(mixture, row["gpu_type"], release)
        system = replace(
            system,
            started=parts,
            # `moe_flex_dispatcher_backend` of its recipe (nemotron_3_workload_base_configs.py).
            once_a_node=mixture == "Nemotron_3_Super" or deep,
            beside_another=not parts or beside,
            experts_apart=bool(parts),
            # In one graph of all, experts are one fused kernel, with their biases in it.
            weighs_biases=mixture == "GPT OSS 120B" and bool(parts),
            experts_again=(mixture, row["gpu_type"]) in EXPERTS_AGAIN,
        )
        if mixture == "GPT OSS 120B":
            # Rotary embeddings are fused for "rope", and not for its "yarn" (`gpt_oss_provider.py`;
            # `validate_rope_fusion_compatibility`, src/megatron/bridge/utils/fusions.py).
            system = replace(system, fusions=tuple(f for f in _LLAMA if f != "rotary"))
    if "Megatron-Bridge" in row["source"]:
        system = replace(system, split=tensor_in_pieces(mixture, row["precision"]))
        if row["precision"] == "nvfp4" and release_of(row["source"]) < _SCALES_WITHIN:
            system = replace(system, casts=_SCALES_APART)
    if system.fsdp2:
        # `PipelineStage.backward_maybe_with_nosync` of torch gathers and sums once a step.
        system = replace(system, gathers_once=row["pp"] not in ("", "1"))
        if "202412" in row["source"]:  # its loss is not compiled (train.py, @9dec370)
            system = replace(system, fusions=tuple(f for f in _LLAMA if f != "cross_entropy"))
        system = replace(system, compiled="eager" not in row["notes"])
        if not system.compiled:
            system = replace(system, fusions=())
        # "float8 all-gather with TP is only supported for tensorwise float8 scaling": others gather
        # 16 bits, and scale between the gather and its products, so that no pass of Inductor finds
        # the two next to each other (`parallelize_llama`, infra/parallelize.py, pytorch/torchtitan;
        # `fuse_all_gather_matmul`, fx_passes/micro_pipeline_tp.py, torch).
        if row["precision"] == "fp8-rowwise":
            system = replace(
                system, scaled=_BY_ROWS, casts=_CAST_BY_ROWS, gathers_low=False, gathers_whole=True
            )
        if "asynctp" in row["notes"].replace(" ", "").lower():  # in pieces beside products
            system = replace(system, split=True)
    return system
