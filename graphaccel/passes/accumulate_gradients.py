"""Add gradients up where they are produced, in flat buckets, and start each all-reduce early.

before                                          after (a microbatch in the middle)
  %g: f32[64,32] = aten.mm(%a, %b)                %g: f32[64,32] = aten.mm(%a, %b)
  ...                                             %add_: = aten.add_(%acc_w, %g)
  return (%g)                                     ...
                                                  return ()

The first microbatch copies instead of adding, so buckets need no zeroing. In the last one an
all-reduce over the data axis starts as soon as a bucket is complete; the runtime waits for it at
the very end. Gradients are handed out as views of the buckets: nothing is copied back.
Li et al., PyTorch Distributed, VLDB 2020, §3.2 (buckets in the order of the backward pass).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx

from graphaccel.ir.program import StageProgram, Value
from graphaccel.planner.plan import Plan

aten = torch.ops.aten
_SMALLEST = 1 << 20  # bytes: below this a collective is all latency


def accumulate_gradients(program: StageProgram, plan: Plan) -> StageProgram:
    """The program with accumulators, or as it is where one microbatch on one data rank needs
    none."""
    if plan.microbatches == 1 and plan.data == 1:
        return program
    if not any(v.kind == "gradient" for v in program.backward_outputs):
        return program
    module = program.backwards[(True, True)]
    buckets = _buckets(program, module, plan.bucket_bytes)
    last = plan.microbatches - 1
    moments = {(m == 0, m == last) for m in range(plan.microbatches)}
    graphs = {
        moment: _accumulating(program, module, buckets, moment, plan.data) for moment in moments
    }
    names = [name for bucket in buckets for name in bucket]
    inputs = [Value("accumulator", name) for name in names]
    if plan.data > 1:
        inputs += [Value("bucket", str(i)) for i in range(len(buckets))]
    return replace(
        program,
        backwards=graphs,
        backward_inputs=(*program.backward_inputs, *inputs),
        backward_outputs=tuple(v for v in program.backward_outputs if v.kind != "gradient"),
        buckets=buckets,
    )


def _produced(program: StageProgram, module: fx.GraphModule) -> dict[str, fx.Node]:
    """Parameter name → gradient node, in the order the nodes stand."""
    results = module.graph.output_node().args[0]
    order = {node: i for i, node in enumerate(module.graph.nodes)}
    pairs = [
        (order[node], value.name, node)
        for value, node in zip(program.backward_outputs, results, strict=True)
        if value.kind == "gradient"
    ]
    return {name: node for _, name, node in sorted(pairs, key=lambda p: p[:2])}


def _buckets(
    program: StageProgram, module: fx.GraphModule, size: int
) -> tuple[tuple[str, ...], ...]:
    """Buckets of at most `size` bytes, and of a quarter of all where that is less: the first must
    be complete well before the backward is, or nothing overlaps."""
    buckets: list[list[str]] = []
    filled, kind = 0, None
    produced = _produced(program, module)
    total = sum(n.meta["val"].numel() * n.meta["val"].element_size() for n in produced.values())
    size = min(size, max(_SMALLEST, total // 4))
    for name, node in produced.items():
        value = node.meta["val"]
        count = value.numel() * value.element_size()
        if not buckets or value.dtype != kind or filled + count > size:
            buckets.append([])
            filled, kind = 0, value.dtype
        buckets[-1].append(name)
        filled += count
    return tuple(tuple(b) for b in buckets)


def _accumulating(
    program: StageProgram,
    module: fx.GraphModule,
    buckets: tuple[tuple[str, ...], ...],
    moment: tuple[bool, bool],
    data: int,
) -> fx.GraphModule:
    first, last = moment
    graph = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    result = graph.graph_copy(module.graph, made)
    names = [name for bucket in buckets for name in bucket]
    produced = {name: made[node] for name, node in _produced(program, module).items()}
    anchor = next(n for n in graph.nodes if n.op != "placeholder")
    accumulators, flats = {}, []
    with graph.inserting_before(anchor):
        for name in names:
            accumulators[name] = graph.placeholder(f"acc_{produced[name].name}_{len(accumulators)}")
            value = produced[name].meta["val"]
            accumulators[name].meta = {"val": value.new_empty(value.shape), "phase": "input"}
        if data > 1:
            for index, bucket in enumerate(buckets):
                value = produced[bucket[0]].meta["val"]
                count = sum(produced[n].meta["val"].numel() for n in bucket)
                flats.append(graph.placeholder(f"bucket_{index}"))
                flats[-1].meta = {"val": value.new_empty(count), "phase": "input"}
    target = aten.copy_.default if first else aten.add_.Tensor
    order = {node: i for i, node in enumerate(graph.nodes)}
    for index, bucket in enumerate(buckets):
        newest = anchor
        for name in bucket:
            after = produced[name] if order[produced[name]] >= order[anchor] else anchor
            with (
                graph.inserting_after(after)
                if after.op != "placeholder"
                else graph.inserting_before(anchor)
            ):
                added = graph.call_function(target, (accumulators[name], produced[name]))
            added.meta = {**produced[name].meta, "made_by": "accumulate_gradients"}
            newest = added
        if last and data > 1:
            with graph.inserting_after(newest):
                sent = graph.call_function(
                    torch.ops._c10d_functional.all_reduce_.default, (flats[index], "sum", "data")
                )
            sent.meta = {
                "val": flats[index].meta["val"],
                "made_by": "accumulate_gradients",
                "phase": "backward",
            }
    kept = [
        n for n, v in zip(result, program.backward_outputs, strict=True) if v.kind != "gradient"
    ]
    graph.output(kept)
    new = fx.GraphModule(module, graph)
    new.graph.lint()
    return new
