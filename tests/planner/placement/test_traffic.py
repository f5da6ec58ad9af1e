"""What tensor parallelism says between ranks, at sizes that matter: no more than is known to do.

Megatron-LM (Shoeybi et al., 2019, §3): two all-reduces forward and two backward a transformer
block. With sequence parallelism (Korthikanti et al., 2022, §4.2.2): as many all-gathers and as many
reduce-scatters instead, of the same bytes. Nobody told the solver; it finds them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache

import pytest
import torch
import transformers
from torch import fx
from torch.utils.flop_counter import flop_registry

from graphaccel.capture.stepgraph import StepGraph
from graphaccel.compiler.compiler import Compiler
from graphaccel.compiler.model import Model, as_batch
from graphaccel.ir.calls import counted_packet
from graphaccel.passes.microbatch.exact_microbatch import exact_microbatch
from graphaccel.planner.cluster.catalogue import cluster
from graphaccel.planner.placement.solve_axes import Request, solve_axes
from graphaccel.planner.plan.plan import Plan
from graphaccel.planner.profile.axis_rates import axis_rates
from graphaccel.planner.profile.layout_profiles import rates_of
from graphaccel.sharding.apply.shard_axis import shard_axis
from graphaccel.sharding.solve.placements import solve_placements

BATCH, TOKENS, WIDTH = 4, 512, 1024
RESIDUAL = BATCH * TOKENS * WIDTH  # numbers in the residual stream
MACHINE = cluster("h100-80gb", 8)


@cache
def captured(kind: str) -> StepGraph:
    """Two layers on the meta device."""
    with torch.device("meta"):
        if kind == "llama":
            model = transformers.LlamaForCausalLM(
                transformers.LlamaConfig(
                    hidden_size=WIDTH, intermediate_size=2816, num_hidden_layers=2,
                    num_attention_heads=16, num_key_value_heads=8, vocab_size=8192, use_cache=False,
                )
            )  # fmt: skip
        else:
            model = transformers.GPT2LMHeadModel(
                transformers.GPT2Config(
                    n_embd=WIDTH, n_layer=2, n_head=16, vocab_size=8192, use_cache=False,
                    resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
                    bos_token_id=1, eos_token_id=2,
                )
            )  # fmt: skip
    ids = torch.zeros(BATCH, TOKENS, dtype=torch.long)
    compiler = Compiler(Model(model.train(), None, 2.0), MACHINE, {})
    return compiler.capture(as_batch({"input_ids": ids, "labels": ids}))[0]


def traffic(kind: str, ranks: int, sequence: bool, block: str) -> Counter[tuple[str, str, int]]:
    """(phase, collective, numbers of the whole tensor) in one block → how often."""
    step = captured(kind)
    graph = exact_microbatch(step, Plan(devices=1, batch=BATCH)).graph
    rates = axis_rates(MACHINE, Plan(devices=8, tensor=ranks), "tensor")
    placed = solve_placements(
        graph.graph, step.inputs, step.outputs,
        axis="tensor", ranks=ranks, rates=rates, pins={}, sequence=sequence,
    )  # fmt: skip
    assert not placed.guessed
    made = shard_axis(graph, step.inputs, step.outputs, placed, axis="tensor", ranks=ranks)
    found: Counter[tuple[str, str, int]] = Counter()
    for node in made.graph.graph.nodes:
        name = str(node.target)
        if "c10d" in name and "wait" not in name and node.meta["module"].startswith(block):
            found[(node.meta["phase"], name.split(".")[1], _numbers(node, ranks))] += 1
    return found


def _numbers(node: fx.Node, ranks: int) -> int:
    """Of the larger of what goes in and what comes out."""
    return max(node.meta["val"].numel(), node.args[0].meta["val"].numel())


@pytest.mark.parametrize("ranks", [2, 4])
def test_two_all_reduces_each_way(ranks: int) -> None:
    assert traffic("gpt2", ranks, False, "transformer.h.1.") == {
        ("forward", "all_reduce", RESIDUAL): 2,
        ("backward", "all_reduce", RESIDUAL): 2,
    }


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_sequence_parallel(kind: str) -> None:
    block = {"llama": "model.layers.1.", "gpt2": "transformer.h.1."}[kind]
    found = traffic(kind, 4, True, block)
    both = {"forward": 0, "backward": 0}
    for (phase, name, numbers), count in found.items():
        assert numbers == RESIDUAL
        both[phase] += count * (2 if name == "all_reduce" else 1)
    # An all-reduce is a reduce-scatter and an all-gather: four of these each way.
    assert both == {"forward": 4, "backward": 4}


@pytest.mark.parametrize(
    ("by", "forward", "backward"),
    [
        ("sequence", {"all_gather_into_tensor": 2}, {"reduce_scatter_tensor": 2}),
        ("heads", {"all_to_all_single": 4}, {"all_to_all_single": 4}),
        ("", {"all_to_all_single": 4}, {"all_to_all_single": 4}),  # half as much to send
    ],
)
def test_one_example_is_split_along_its_sequence(
    by: str, forward: dict[str, int], backward: dict[str, int]
) -> None:
    """Context parallelism of a single example, in which tokens are all that there is to split:
    every product on its share of them. In attention each rank has some of the queries, and keys and
    values are gathered; or it has some of the heads, to which queries, keys, values and what comes
    of them are sent."""
    step = captured("llama")
    graph = exact_microbatch(step, Plan(devices=1, batch=1)).graph
    rates = axis_rates(MACHINE, Plan(devices=8, context=4), "context")
    placed = solve_placements(
        graph.graph, step.inputs, step.outputs,
        axis="context", ranks=4, rates=rates, pins={}, context_by=by,
    )  # fmt: skip
    heavy = [n for n in placed.rows if counted_packet(n) in flop_registry]
    assert len(heavy) > 40
    assert all(placed.rows[n].divided for n in heavy)
    made = shard_axis(graph, step.inputs, step.outputs, placed, axis="context", ranks=4)
    sent = [n for n in made.graph.graph.nodes
            if "c10d" in str(n.target) and "wait" not in str(n.target)
            and n.meta["module"].startswith("model.layers.1.")]  # fmt: skip
    assert Counter((n.meta["phase"], str(n.target).split(".")[1]) for n in sent) == {
        **{("forward", name): count for name, count in forward.items()},
        **{("backward", name): count for name, count in backward.items()},
    }
    keys = TOKENS * WIDTH // 2  # half as many heads as queries
    if by == "sequence":
        assert {_numbers(n, 4) for n in sent} == {keys}
    else:
        assert Counter(_numbers(n, 4) for n in sent) == {keys // 4: 4, keys // 2: 4}


@pytest.mark.parametrize(
    ("context", "by"), [(2, "sequence"), (2, "heads"), (2, ""), (4, "sequence"), (4, "")]
)
def test_tensor_splits_what_context_left(context: int, by: str) -> None:
    """Both axes split the sequence: each sends what it sends by itself, tensor of half the tokens;
    of every product and of attention each does an eighth. Heads are shared out where there is one
    of the keys for every device."""
    step = captured("llama")
    plan = Plan(devices=4 * context, tensor=4, context=context, batch=1, context_by=by)
    plan = replace(plan, rates=rates_of(MACHINE, plan))
    graph = exact_microbatch(step, replace(plan, tensor=1, context=1, devices=1)).graph
    alone = _flops(graph)
    made = solve_axes(graph, step, Request(plan)).local.graph
    assert _flops(made) == alone / 4 / context
    both: Counter[tuple[str, str]] = Counter()
    heads = by != "sequence" and context == 2
    sent = 4 if heads else 2
    for node in made.graph.nodes:
        name, module = str(node.target), node.meta.get("module", "")
        if "c10d" in name and "wait" not in name and module.startswith("model.layers.1."):
            axis = node.args[-1]
            kept = TOKENS * WIDTH // 4 // context  # of queries; there are half as many keys
            allowed = {"tensor": (4 * kept,), "context": (kept, kept // 2)}[axis]
            if not heads:
                allowed = {"tensor": (4 * kept,), "context": (TOKENS * WIDTH // 8,)}[axis]
            assert _numbers(node, 1) in allowed, (node, axis)
            both[node.meta["phase"], axis] += 2 if "all_reduce" in name else 1
    assert both == {
        ("forward", "tensor"): 4, ("backward", "tensor"): 4,
        ("forward", "context"): sent, ("backward", "context"): sent,
    }  # fmt: skip


def _flops(graph: fx.GraphModule) -> int:
    """Of products and attention."""
    total = 0
    for node in graph.graph.nodes:
        if node.op == "call_function" and (count := flop_registry.get(counted_packet(node))):
            args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), _shape)
            total += count(*args, **kwargs, out_val=_shape(node))
    return total


def _shape(node: fx.Node) -> object:
    value = node.meta["val"]
    return value.shape if isinstance(value, torch.Tensor) else tuple(v.shape for v in value)


def test_logits_are_never_whole() -> None:
    """The head and the cross-entropy are split over the vocabulary."""
    step = captured("llama")
    graph = exact_microbatch(step, Plan(devices=1, batch=BATCH)).graph
    rates = axis_rates(MACHINE, Plan(devices=8, tensor=4), "tensor")
    placed = solve_placements(
        graph.graph, step.inputs, step.outputs, axis="tensor", ranks=4, rates=rates, pins={}
    )
    made = shard_axis(graph, step.inputs, step.outputs, placed, axis="tensor", ranks=4)
    values = [n.meta["val"] for n in made.graph.graph.nodes if "val" in n.meta]
    largest = max(v.numel() for v in values if isinstance(v, torch.Tensor))
    assert largest <= BATCH * TOKENS * 8192 // 4
