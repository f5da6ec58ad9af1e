"""Measures how a batch's tokens choose experts, by running the router part of the forward graph.

As much of the graph as the choice depends on is run once on the batch that is planned for, with the
current weights. The memory of a device with experts depends on it: with an untrained router half of
the experts may get two thirds of the tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torch import fx, nn

from graphaccel.capture.batch import Batch
from graphaccel.capture.layers.blocks import block_of
from graphaccel.capture.stepgraph import StepGraph
from graphaccel.capture.symbols import BATCH
from graphaccel.compat.torch.fakes import FakeTensor
from graphaccel.compat.torch.graphs import graph_module
from graphaccel.ir.program import StepProgram
from graphaccel.ir.replication.unfold import distinct_nodes
from graphaccel.kernels.ops.experts import GROUPED_MATMUL
from graphaccel.passes.microbatch.exact_microbatch import exact_microbatch
from graphaccel.planner.memory.exact_memory import rank_memory
from graphaccel.planner.memory.graph_columns import Share, even
from graphaccel.planner.memory.resident import Resident
from graphaccel.planner.plan.plan import Plan
from graphaccel.planner.plan.prediction import Chosen, StageMemory
from graphaccel.planner.profile.cost import Sizes, node_flops
from graphaccel.schedule.table import Schedule

AFFORDED = {"cpu": 2e11, "cuda": 2e14}
"""FLOPs that may be spent on this, by the model's device: a few seconds on either."""


@dataclass(frozen=True)
class TriedChoices:
    """chosen: by block, the experts that tokens choose. unknown: why they are not known, or "": an
    even choice is then assumed."""

    chosen: tuple[Chosen, ...] = ()
    unknown: str = ""


class _Unknown(Exception):
    """The choices can not be tried; its text says why."""


def tried_choices(
    step: StepGraph,
    module: nn.Module,
    batch: Batch,
    plan: Plan,
    sizes: Mapping[sympy.Symbol, int],
) -> TriedChoices:
    """The choices of the tokens of `batch`.

    Of the microbatches of a data rank, the one counts in which a device was chosen most. sizes:
    symbolic sizes of the batch. No weight, buffer or random generator state changes.
    """
    try:
        return TriedChoices(_Trial(step, module, batch, plan, sizes).chosen())
    except _Unknown as reason:
        return TriedChoices(unknown=str(reason))


class _Trial:
    """A forward of the routers, for each part of the batch."""

    def __init__(
        self,
        step: StepGraph,
        module: nn.Module,
        batch: Batch,
        plan: Plan,
        sizes: Mapping[sympy.Symbol, int],
    ) -> None:
        self.step, self.batch, self.plan, self.sizes = step, batch, plan, sizes
        self.held: dict[str, Mapping[str, Any]] = {
            "parameter": dict(module.named_parameters(remove_duplicate=False)),
            "buffer": dict(module.named_parameters(remove_duplicate=False))  # frozen and updated
            | dict(module.named_buffers(remove_duplicate=False)),
            "constant": step.forward.constants,
        }
        self.parts = plan.data * plan.microbatches

    def chosen(self) -> tuple[Chosen, ...]:
        """The choices. Raises _Unknown."""
        at = self._part_sizes()
        device = next(iter(self.held["parameter"].values())).device
        self._check_affordable(device)
        plan = self.plan
        alone = replace(plan, data=1, microbatches=1, batch=at.get(BATCH, plan.batch))
        routes, chosen = _routes(exact_microbatch(self.step, alone, at).graph)
        counted: dict[str, list[list[torch.Tensor]]] = {}
        with torch.no_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []):
            for part in range(self.parts):
                size = at[BATCH] if self.parts > 1 else None
                values = _inputs(self.step, self.held, self.batch, part, size, device)
                result = self._run(routes, values, alone.batch, device)
                for (block, count), experts in zip(chosen, result, strict=True):
                    if count % plan.expert:
                        continue  # these experts are not sharded
                    rows = torch.bincount(experts.flatten(), minlength=count).cpu()
                    shares = rows.view(plan.expert, -1).sum(1) * plan.expert / experts.numel()
                    of_data = counted.setdefault(block, [[] for _ in range(plan.data)])
                    of_data[part // plan.microbatches].append(shares)
        return tuple(
            Chosen(block, tuple(tuple(torch.stack(tried).amax(0).tolist()) for tried in of_data))
            for block, of_data in counted.items()
        )

    def _part_sizes(self) -> dict[sympy.Symbol, int]:
        """Symbolic sizes of one part of the batch. Raises _Unknown without data, or parts."""
        tensors = [t for kind in self.held.values() for t in kind.values()]
        given = (*tensors, *self.batch.tensors.values())
        if any(t.is_meta or isinstance(t, FakeTensor) for t in given):
            raise _Unknown("the model or its batch has no data")
        size, at = self.sizes.get(BATCH, 1), dict(self.sizes)
        if self.parts > 1:
            if size % self.parts:
                raise _Unknown(f"a batch of {size} can not be tried in {self.parts} parts")
            at[BATCH] = self.sizes[BATCH] // self.parts
        return at

    def _check_affordable(self, device: torch.device) -> None:
        """Raises _Unknown where a forward takes too long."""
        afforded, whole = AFFORDED.get(device.type, 0.0), Sizes(self.sizes)
        nodes = distinct_nodes(self.step.graph)
        ahead = [(n, count) for n, count in nodes if n.meta.get("phase") == "forward"]
        flops = sum(count * node_flops(node, whole) for node, count in ahead)
        if flops > afforded:
            said = f"a forward takes {flops:.0e} FLOPs, and {afforded:.0e} are spent on it at most"
            raise _Unknown(said)

    @staticmethod
    def _run(
        routes: fx.GraphModule, values: list[Any], examples: int, device: torch.device
    ) -> Sequence[torch.Tensor]:
        """The results of the routers. Raises _Unknown where they do not run."""
        try:
            return run_routes(routes, values)
        except torch.OutOfMemoryError as error:
            said = f"the model and {examples} examples do not fit on one {device.type}"
            raise _Unknown(said) from error
        except RuntimeError as error:  # no kernel for this dtype, no memory on the host, ...
            said = (str(error) or type(error).__name__).splitlines()[0]
            raise _Unknown(f"trying failed, {said}") from error


def _inputs(
    step: StepGraph,
    held: Mapping[str, Mapping[str, torch.Tensor]],
    batch: Batch,
    part: int,
    size: int | None,
    device: torch.device,
) -> list[Any]:
    """The inputs of a step on the device. held: tensors by kind and name. part: of the batch, in
    parts of `size` examples; None for the whole batch."""
    values: list[Any] = []
    for spec in step.inputs:
        value: Any = held.get(spec.kind, {}).get(spec.name)
        if spec.kind == "batch":
            value, dim = batch.leaves[spec.leaf], step.batch_dims.get(spec.leaf)
            if size is not None and dim is not None:
                value = value.narrow(dim, part * size, size)
        values.append(value.to(device) if isinstance(value, torch.Tensor) else value)
    return values


def share_of(chosen: tuple[Chosen, ...], data: int, expert: int) -> Share:
    """Module path → tokens that chose a device, by its coordinates on the data and the expert axis,
    relative to an even share."""
    shares = {each.block: each.shares[data][expert] for each in chosen}
    return lambda path: shares.get(block_of(path), 1.0)


def fullest(chosen: tuple[Chosen, ...], blocks: Collection[str]) -> tuple[Share, ...]:
    """`share_of` the devices that may need most memory: the one that most tokens of all `blocks`
    chose, for what is saved until the backward, and the one that most tokens of a single block
    chose, for what is recomputed."""
    own = [each.shares for each in chosen if each.block in blocks]
    if not own:
        return (even,)
    places = [(d, e) for d, row in enumerate(own[0]) for e in range(len(row))]
    most = (sum, max)
    results = [max(places, key=lambda at: of([s[at[0]][at[1]] for s in own])) for of in most]
    return tuple(share_of(chosen, *place) for place in dict.fromkeys(results))


def fullest_memory(
    chosen: tuple[Chosen, ...],
    program: StepProgram,
    schedule: Schedule,
    rank: int,
    resident: Resident,
) -> tuple[StageMemory, Share]:
    """The memory of a pipeline rank's fullest device, and its share of the tokens."""
    shares: tuple[Share, ...] = (even,)
    if chosen:
        own = {action.stage for action in schedule[rank]}
        names = (n for stage in program.stages if stage.stage in own for n in stage.parameters)
        shares = fullest(chosen, {block_of(name) for name in names})
    results = [(rank_memory(program, schedule, rank, resident, chosen=s), s) for s in shares]
    return max(results, key=lambda pair: pair[0].peak)


def run_routes(graph: fx.GraphModule, values: Sequence[Any]) -> tuple[torch.Tensor, ...]:
    """The routes that tokens take, interpreted call by call: values are freed after their last
    use, and no code is generated."""
    return fx.Interpreter(graph).run(*values)


def _routes(graph: fx.GraphModule) -> tuple[fx.GraphModule, list[tuple[str, int]]]:
    """The part of the graph that computes all tokens' choices, and for each its block and expert
    count."""
    routes: dict[fx.Node, tuple[str, int]] = {}
    for node in graph.graph.nodes:
        if node.op == "call_function" and node.target is GROUPED_MATMUL:
            experts, count = node.args[2], node.args[4]
            assert isinstance(experts, fx.Node)
            assert isinstance(count, int)
            routes.setdefault(experts, (block_of(node.meta.get("module", "")), count))
    built = fx.Graph()
    known: dict[fx.Node, fx.Node] = {}
    built.graph_copy(graph.graph, known)
    built.output(tuple(known[node] for node in routes))
    built.eliminate_dead_code()
    return graph_module({}, built), list(routes.values())
