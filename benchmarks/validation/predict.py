"""The step of a published run, predicted as `graphaccel plan` does it for any model."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.validation.rows import Run
from graphaccel.capture.batch import Batch
from graphaccel.capture.symbols import BATCH
from graphaccel.compiler import Compiler
from graphaccel.ir.program import Sharded
from graphaccel.model import Model, as_batch
from graphaccel.planner.cluster import Cluster, cluster
from graphaccel.planner.communication import INTERFERENCE, all_gather_seconds, exposed_seconds
from graphaccel.planner.cost import Sizes, node_work
from graphaccel.planner.efficiency import Work, computing
from graphaccel.planner.footprint import gathered_sizes
from graphaccel.planner.layouts import Layouts
from graphaccel.planner.pins import replicate
from graphaccel.planner.plan import Plan, Precision, StageMemory
from graphaccel.planner.profile import Profile
from graphaccel.planner.search import search
from graphaccel.planner.works import held_parameters

# Bytes of optimizer state for each 4 bytes of 16-bit weights: float32 weights and two moments.
_STATE = 24
_ENDLESS = 2**60
# How Megatron-LM shards over the tensor axis (arXiv 1909.08053, section 3): names of parameters by
# their end. A fused query, key and value weight is cut in three.
_SHARDED = {
    "embed_tokens.weight": Sharded("tensor", 0), "lm_head.weight": Sharded("tensor", 0),
    "q_proj.weight": Sharded("tensor", 0), "k_proj.weight": Sharded("tensor", 0),
    "v_proj.weight": Sharded("tensor", 0), "o_proj.weight": Sharded("tensor", 1),
    "gate_proj.weight": Sharded("tensor", 0), "up_proj.weight": Sharded("tensor", 0),
    "down_proj.weight": Sharded("tensor", 1),
    "wte.weight": Sharded("tensor", 0), "c_proj.weight": Sharded("tensor", 0),
    "c_attn.weight": Sharded("tensor", 1, 3), "c_attn.bias": Sharded("tensor", 0, 3),
    "c_fc.weight": Sharded("tensor", 1), "c_fc.bias": Sharded("tensor", 0),
}  # fmt: skip


@dataclass(frozen=True)
class Predicted:
    """seconds of a step; bytes at the peak of the fullest rank, as the source counts them; what is
    said of memory: "safe", "likely", "risky" or "impossible" ("not told": of products in 8 bits);
    what it was predicted on."""

    seconds: float
    memory: int
    verdict: str
    plan: Plan
    where: Cluster = field(repr=False)
    profile: Profile = field(repr=False)

    def works(self) -> list[tuple[Work, int]]:
        """What a microbatch asks of a device, all stages together, and how often."""
        step = self.profile.step
        sizes = Sizes({**step.sizes, BATCH: self.plan.microbatch_size})
        kinds, first = self.profile.alike
        numbers = [self.profile.block_names.index(name) for name in self.plan.recompute]
        again = np.isin(self.profile.block_at, numbers)[self.profile.node_position]
        again &= self.profile.node_forward
        times = np.bincount(np.concatenate([kinds, kinds[again]]), minlength=len(first))
        works = [(node_work(node, sizes), int(n)) for node, n in zip(first, times, strict=True)]
        return [(work, n) for work, n in works if work.calls]


class _Redrawn(Layouts):
    """Of systems that do all of a block's forward again where they recompute it, drawing random
    numbers and sending; ours does what the backward reads again, and keeps both."""

    def of(self, plan: Plan) -> Profile:
        """The profile of the graph that a device of `plan` runs."""
        profile = super().of(plan)
        profile.storages.kept[:] = False
        profile.whole_again = True
        return profile


class Predictor:
    """Predicts runs; keeps the capture and the layouts of each shape of model."""

    def __init__(self, most: int) -> None:
        """most: devices of the largest run; links are those of that many."""
        self._most = most
        self._layouts: dict[Any, Layouts] = {}

    def predict(self, run: Run) -> Predicted:
        """Raises what planning raises, but for memory: a run that really ran is never refused."""
        where, system = _cluster(run, run.devices), run.system
        plan, profile = self._planned(run, system.fusions, where)
        assert plan.prediction is not None
        kept = _kept(run, profile, plan, where)
        timed, profile = self._planned(run, system.fusions + system.timed, where)
        assert timed.prediction is not None
        fullest = max(_as_theirs(m, run, kept) for m in plan.prediction.memory)
        real = cluster(run.device, run.devices)
        said = int(fullest * (1 + real.fragmentation)) if run.system.reserved else fullest
        # What products in 8 bits keep for the backward is in 8 bits there, and not counted so here.
        verdict = real.verdict(fullest) if not run.products else "not told"
        seconds = timed.prediction.seconds + _waited(run, profile, timed, where)
        return Predicted(seconds, said, verdict, timed, where, profile)

    def _planned(self, run: Run, fusions: tuple[str, ...], where: Cluster) -> tuple[Plan, Profile]:
        """The run's plan with such kernels, and what a device of it runs."""
        captured = self._captured(run, fusions)
        plan = search(
            captured.whole.step,
            where,
            pins=_pins(run, captured.whole),
            optimizer_bytes=_STATE,
            batch=run.batch,
            profiles=captured,
        )
        return plan, captured.of(plan)

    def _captured(self, run: Run, fusions: tuple[str, ...]) -> Layouts:
        """The layouts of the run's model on devices of this kind."""
        shape = run.shape, run.device
        if (known := self._layouts.get((shape, fusions))) is None:
            module, batch = _made(run)
            where = _cluster(run, self._most)
            pins = {"fusions": fusions or "off"}
            compiler = Compiler(Model(module, None, _STATE / 4), where, pins)
            step, sizes = compiler.capture(batch)
            made = compiler.layouts(step, {**sizes, BATCH: 2})
            known = _Redrawn(made.whole, made.localise)
            same = {key: made for key, made in self._layouts.items() if key[0] == shape}
            self._layouts = {**same, (shape, fusions): known}  # runs come sorted by shape
        return known


def _cluster(run: Run, devices: int) -> Cluster:
    """Of devices that hold everything and otherwise are as the run's system made use of them."""
    where, system = cluster(run.device, devices), run.system
    device = replace(
        where.device,
        memory=_ENDLESS,
        launch_seconds=system.launch_seconds or where.device.launch_seconds,
    )
    older = run.device.startswith(("a100", "v100"))
    attention = system.attention if older else system.attention_hopper
    if run.context > 1:  # rows of a causal mask are spread evenly there; ours are under a mask
        attention *= 2
    device = replace(
        device,
        attention=attention * device.attention,
        attention_backward=attention * device.attention_backward,
    )
    device = computing(device, Precision(run.precision, products=run.products))
    inner, *outer = where.links
    # In pieces beside products all but one piece hides, as over data.
    exposed = exposed_seconds(device, 1.0, 1 / run.tensor, 1.0) if system.split else 1.0
    inner = replace(
        inner,
        bandwidth=inner.bandwidth / exposed,
        latency_seconds=inner.latency_seconds * exposed,
    )
    if system.network_gigabits:
        outer = [replace(x, bandwidth=system.network_gigabits * 1e9 / 8 * 0.95) for x in outer]
    return replace(where, device=device, links=(inner, *outer))


def _pins(run: Run, profile: Profile) -> dict[str, object]:
    pins: dict[str, object] = {
        "data": run.data,
        "pipeline": run.pipeline,
        "tensor": run.tensor,
        "context": run.context,
        "expert": 1,
        "microbatches": run.microbatches,
        "recompute": run.system.recompute or run.recompute,
        **_zero(run),
        "sequence": run.sequence_parallel,
    }
    if run.tensor > 1 or run.context > 1:
        pins["pins"] = _megatron(profile, run.tensor)
    if run.pipeline > 1:
        pins["interleave"] = run.interleave
        pins["schedule"] = "1f1b" if run.interleave == 1 else "interleaved"
        if (cuts := _cuts(run, profile)) is not None:
            pins["cuts"] = cuts
        if run.tensor > 1:
            pins["scatter_sends"] = True  # Megatron-LM does so unless told otherwise
    if not run.system.overlaps:
        pins["bucket_bytes"] = _ENDLESS  # one all-reduce, after the last backward
    return pins


def _zero(run: Run) -> dict[str, object]:
    """What is sharded over data. FSDP's SHARD_GRAD_OP gathers a block's parameters once in each
    microbatch, and sums after every one."""
    if run.data == 1:
        return {"zero": 0}
    if run.zero >= 2:
        return {"zero": 3, "gather_again": run.zero == 3, "accumulation": "shards"}
    if run.zero and run.system.gathers_beside:
        return {"zero": 3, "gather_again": "step"}
    return {"zero": run.zero}


def _waited(run: Run, profile: Profile, plan: Plan, where: Cluster) -> float:
    """Seconds a step waits longer for parameters that are gathered for the backward, where no
    computing runs beside it."""
    if run.system.prefetches or plan.gather_again is not True or plan.zero < 3:
        return 0.0
    span = 0, len(profile)
    sizes = gathered_sizes(profile, held_parameters(profile, [span]), plan)
    each = [all_gather_seconds(where, size, plan.data, plan.replica) for size in sizes]
    return plan.microbatches * (1 - INTERFERENCE) * (sum(each) - max(each, default=0.0))


def _megatron(profile: Profile, tensor: int) -> dict[str, Sharded | tuple[Sharded, ...]]:
    """Where weights rest; on no other axis are they split."""
    found: dict[str, Sharded | tuple[Sharded, ...]] = {}
    for parameter in profile.parameters:
        end = ".".join(parameter.name.split(".")[-2:])
        if end in _SHARDED:
            found[parameter.name] = _SHARDED[end] if tensor > 1 else replicate()
    return found


def _cuts(run: Run, profile: Profile) -> tuple[str, ...] | None:
    """Where stages of whole layers end: of equally many, or with one less in the first and the last
    (Llama 3, arXiv 2407.21783, section 3.3.2); None where neither is possible."""
    stages = run.pipeline * run.interleave
    for fewer in (0, 1):
        if (run.layers + 2 * fewer) % stages == 0:
            each = (run.layers + 2 * fewer) // stages
            ends = [each * (stage + 1) - fewer for stage in range(stages - 1)]
            starts = [int((profile.block_at == b).argmax()) for b in range(run.layers)]
            behind = profile.block_at[starts[-1] :] != run.layers - 1
            starts.append(starts[-1] + int(behind.argmax()))
            return tuple(profile.names[starts[end] - 1] for end in ends)
    return None


def _as_theirs(memory: StageMemory, run: Run, kept: float) -> int:
    """Bytes of a rank's tensors. Gradients are as wide as those of the system; Megatron-LM shards
    the optimizer over the context axis too. kept: share of what waits for the backward."""
    wider = int(memory.gradient * (run.system.gradient_bytes / 2 - 1))
    shared = memory.optimizer - memory.optimizer // run.context if run.zero else 0
    more = _megatron_core(memory, run) if run.system.megatron_core else 0
    return memory.tensors + wider - shared - int((1 - kept) * memory.activation) + more


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


def _kept(run: Run, profile: Profile, plan: Plan, where: Cluster) -> float:
    """The share that their system keeps of the values that ours saves for the backward.

    Megatron-LM's sequence parallelism shards what the tensor axis has whole, and gathers again in
    the backward what a product read (arXiv 2205.05198, section 4.2.2); we take it where it is
    faster. Attention with grouped queries reads keys and values as they are; as we capture it on a
    CPU, each is repeated for its queries.
    """
    sized = profile.sized(plan.microbatch_size, where.device)
    whole = theirs = 0.0
    for place in profile.saved(profile.again(plan))[0].tolist():
        tensor, size = profile.tensors[profile.storages.tensor[place]], float(sized.bytes[place])
        dims = tensor.node.meta["dims"]
        dims = dims[tensor.item] if tensor.item >= 0 else dims
        whole += size
        if run.sequence_parallel and dims and dims[-1] == run.hidden:
            size /= run.tensor
        elif len(dims) == 5 and dims[2] == run.heads // run.kv_heads:
            size /= dims[2]
        theirs += size
    return theirs / whole if whole else 1.0


def _made(run: Run) -> tuple[nn.Module, Batch]:
    import transformers

    attention = "sdpa" if run.system.fused_attention else "eager"
    common: dict[str, Any] = {
        "vocab_size": run.vocabulary, "use_cache": False, "attn_implementation": attention,
    }  # fmt: skip
    if run.kind != "gpt":
        common |= {
            "hidden_size": run.hidden, "intermediate_size": run.ffn,
            "num_hidden_layers": run.layers, "num_attention_heads": run.heads,
            "num_key_value_heads": run.kv_heads, "max_position_embeddings": run.sequence,
        }  # fmt: skip
    if run.kind == "llama":
        module: Any = transformers.LlamaForCausalLM, transformers.LlamaConfig(**common)
    elif run.kind == "nemotron":
        module = transformers.NemotronForCausalLM, transformers.NemotronConfig(**common)
    else:
        config = transformers.GPT2Config(
            n_embd=run.hidden, n_inner=run.ffn, n_layer=run.layers, n_head=run.heads,
            n_positions=run.sequence, resid_pdrop=run.system.dropout,
            embd_pdrop=run.system.dropout,
            attn_pdrop=0.0 if run.system.fused_attention else run.system.dropout,
            bos_token_id=0, eos_token_id=0, activation_function="gelu_pytorch_tanh", **common,
        )  # fmt: skip
        module = transformers.GPT2LMHeadModel, config
    with torch.device("meta"):
        made = module[0](module[1]).train().to(getattr(torch, run.precision))
        tokens = torch.zeros(2, run.sequence, dtype=torch.int64)
    return made, as_batch({"input_ids": tokens, "labels": tokens})
