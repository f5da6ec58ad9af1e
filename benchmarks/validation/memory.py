"""The memory of a published run's rank, as its system keeps and counts it."""

from __future__ import annotations

import math

import torch

from benchmarks.validation.mixtures import MIXTURES
from benchmarks.validation.rows import Run
from graphaccel.capture.symbols import BATCH
from graphaccel.kernels.ops.experts import GROUPED_MATMUL as GROUPED_MATMUL
from graphaccel.kernels.register import fusion_of
from graphaccel.planner.cluster.cluster import Cluster
from graphaccel.planner.plan.plan import Plan
from graphaccel.planner.plan.prediction import StageMemory
from graphaccel.planner.profile.cost import Sizes
from graphaccel.planner.profile.profile import Profile
from graphaccel.planner.profile.storages import Tensor

STATE_BYTES = 24
"""Of optimizer state for each 4 bytes of 16-bit weights: float32 weights and two moments."""
_EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")


def as_theirs(memory: StageMemory, run: Run, kept: float) -> int:
    """Bytes of a rank's tensors. Gradients are as wide as those of the system; Megatron-LM shards
    the optimizer over the context axis too. kept: share of what waits for the backward."""
    if run.system.fsdp2:
        return _fsdp2(memory, run, kept)
    wider = int(memory.gradient * (run.system.gradient_bytes / 2 - 1))
    shared = memory.optimizer - memory.optimizer // run.context if run.zero else 0
    if run.zero and run.expert > 1:
        dense = max(0, memory.optimizer - STATE_BYTES // 2 * _of_experts(memory.rank, run))
        shared += dense - dense // run.expert
    more = _megatron_core(memory, run) if run.system.megatron_core else 0
    return memory.tensors + wider - shared - int((1 - kept) * memory.activation) + more


def kept_share(run: Run, profile: Profile, plan: Plan, where: Cluster) -> float:
    """The share that their system keeps of the values that ours saves for the backward.

    Megatron-LM's sequence parallelism shards what the tensor axis has whole, and gathers again in
    the backward what a product read (arXiv 2205.05198, section 4.2.2); we take it where it is
    faster. Attention with grouped queries reads keys and values as they are; as we capture it on a
    CPU, each is repeated for its queries.
    """
    sized = profile.sized(plan.microbatch_size, where.device)
    sizes = Sizes({**profile.step.sizes, BATCH: plan.microbatch_size})
    tokens = run.microbatch * run.sequence // run.context
    whole = theirs = 0.0
    for place in profile.saved(profile.recomputation(plan))[0].tolist():
        tensor, size = profile.tensors[profile.storages.tensor[place]], float(sized.bytes[place])
        dims = tensor.node.meta["dims"]
        dims = dims[tensor.item] if tensor.item >= 0 else dims
        whole += size
        every = bool(dims) and math.prod(map(sizes, dims[:-1])) >= tokens  # and not split already
        if run.sequence_parallel and every and dims[-1] == run.hidden:
            size /= run.tensor
        elif not run.system.fsdp2 and len(dims) == 5 and dims[2] == run.heads // run.kv_heads:
            size /= dims[2]
        theirs += size * _kept_of(tensor, run)
    return theirs / whole if whole else 1.0


def _kept_of(tensor: Tensor, run: Run) -> float:
    """The share that their system keeps of a value that ours saves, by the call that gives it."""
    node, width = tensor.node, tensor.value.shape[-1] if tensor.value.dim() else 0
    fusion = fusion_of(node.target)
    if run.system.swiglu_again and fusion is not None and fusion.name == "swiglu":
        return 0.0
    if run.system.probabilities_inside and run.kind in MIXTURES:
        back = node.target is torch.ops.aten.index_select.default
        if width == MIXTURES[run.kind].rows and (back or node.target is GROUPED_MATMUL):
            return 0.0  # what comes back from the experts
        if (value := MIXTURES[run.kind].more.get("v_head_dim")) is not None:
            if node.target is torch.ops.aten.constant_pad_nd.default:
                return int(str(value)) / width
            if "scaled_dot_product" in str(node.target) and tensor.item == 0:
                return 0.0  # without its padding it waits for the product behind it
    return 1.0


def _of_experts(rank: int, run: Run) -> int:
    """Numbers of the experts that a device of a pipeline rank holds, where its stages have equally
    many layers each. State of the others Megatron-LM shards over all ranks of data, those that
    share experts too."""
    mixture, stages = MIXTURES[run.kind], run.pipeline * run.interleave
    count = next(int(str(mixture.more[n])) for n in _EXPERT_COUNTS if n in mixture.more)
    layers = mixture.ahead + sum(
        mixture.has_experts(layer) and layer * stages // run.layers % run.pipeline == rank
        for layer in range(run.layers)
    )
    return layers * count * mixture.of_an_expert // run.expert // run.tensor


def _fsdp2(memory: StageMemory, run: Run, kept: float) -> int:
    """Bytes of a rank of torchtitan (pytorch/torchtitan@9dec370), as its allocator has them.

    What rests are shards over the data and context axes of float32 weights and two moments: 12
    bytes a number, as we count of the optimizer; no weights of 16 bits besides
    (`apply_fsdp`, `parallel_dims.py`). Gradients are float32; in a pipeline they are whole until
    the last microbatch. Interleaved, with no more microbatches than ranks, every forward is done
    before a backward, and those of one stage are in shards before the next has any
    (`ScheduleInterleaved1F1B`, torch/distributed/pipelining). What shards of gradients leave in
    the allocator is in blocks of other sizes than anything that comes after them. Weights of
    matmuls in 8 bits are gathered in 8 (docs/float8.md, train_configs/llama3_405b.toml). Of what
    is gathered the root, with the embedding and the head, stays so until the backward, and so does
    the last layer. Operations that are kept (`_save_list`): of a layer's products each second one
    from the first on, and attention; eager PyTorch keeps the last product too, which no backward
    reads.
    """
    tokens = run.microbatch * run.sequence // run.context
    held_bytes = memory.optimizer // 6
    words = 2 * run.vocabulary * run.hidden // run.tensor
    gathered, shards = max(0, memory.parameter - held_bytes), 2 * held_bytes // run.context
    width = 1 if run.products.startswith("float8") else 2
    if run.pipeline == 1:
        layer = run.hidden * (2 * run.hidden * (1 + run.kv_heads / run.heads) + 3 * run.ffn)
        gathered = words + width * (gathered // 2 + int(layer) // run.tensor)
        gradient = max(2 * memory.gradient // run.context, shards)
    else:
        embedded = words if memory.rank == 0 else 0
        gathered = embedded + width * (gathered - embedded) // 2
        apart = run.interleave if run.microbatches <= run.pipeline else 1
        gradient = 2 * memory.gradient // apart + shards
    total = memory.optimizer // run.context + gradient + gathered
    if run.recompute == "operations":
        kept_of = 2 * run.hidden + run.kv_heads * run.hidden // run.heads + run.ffn
        kept_of += 0 if run.system.fusions else run.hidden
        total += 2 * tokens * run.layers * kept_of
    at_loss = any(part in memory.at for part in ("log_softmax", "nll_loss", "cross_entropy"))
    if at_loss and "cross_entropy" not in run.system.fusions:
        # Logits of 16 bits are let go of before their gradient is made, but what they leave has no
        # room for it: it is of float32, and what lies beside it is in use.
        total += 2 * tokens * run.vocabulary // run.tensor
    return total + int(kept * memory.activation) + memory.temporary


def _megatron_core(memory: StageMemory, run: Run) -> int:
    """Bytes that `System.megatron_core` has more, or less."""
    head = run.hidden // run.heads
    shapes = {
        (run.hidden + 2 * head * run.kv_heads, run.hidden), (run.hidden, run.hidden),
        ((2 if run.kind == "llama" else 1) * run.ffn, run.hidden), (run.hidden, run.ffn),
    }  # fmt: skip
    at_loss = "cross_entropy" in memory.at
    if at_loss:  # the stage with the head
        shapes.add((run.vocabulary, run.hidden))
    more = sum(2 * rows * columns for rows, columns in shapes) // run.tensor
    if at_loss:  # the float32 copy waits for the backward, and is counted there
        tokens = run.microbatch * run.sequence // run.context
        more += 2 * tokens * run.vocabulary // run.tensor - memory.temporary
    return more
