"""Compares a captured graph with eager code once, on part of a batch and in one precision."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from graphaccel.capture.batch import Batch
from graphaccel.capture.export.export import LossFn
from graphaccel.capture.stepgraph import StepGraph
from graphaccel.capture.symbols import BATCH, evaluate
from graphaccel.compat.torch.modes import TorchDispatchMode
from graphaccel.errors import GraphMisuse
from graphaccel.ir.calls import is_random
from graphaccel.ir.replication.unfold import input_nodes
from graphaccel.proof.eager_step import Subject, run_eager
from graphaccel.proof.graph_step import Inputs, Keep, Observer, run_graph
from graphaccel.proof.modes import NARROW, SameDraws, Widened, WriteGuard
from graphaccel.proof.recorded_draws import RecordDraws, ReplayDraws
from graphaccel.proof.results import Deviation, Results, deviations
from graphaccel.proof.untouched import RandomState, untouched
from graphaccel.runtime.module import own_forward
from graphaccel.runtime.parameters.remote import RemoteTensor
from graphaccel.runtime.parameters.sharded import ShardTensor


@dataclass(frozen=True)
class Setting:
    """How to compare. rows: number of batch rows; None: all. wide: in float64. by_shape: random
    draws depend on their shape only."""

    rows: int | None = None
    wide: bool = False
    by_shape: bool = False


@dataclass(frozen=True)
class Pair:
    """A model and the step captured from it, with a batch and the values of its symbolic sizes.

    of: the step of all layers, where model and step have a few of them (`proof.layers`). held:
    bytes of weights in memory beside the model's. gathered: the model is a copy on gathered
    weights.
    """

    subject: Subject
    step: StepGraph
    batch: Batch
    sizes: Mapping[sympy.Symbol, int]
    of: StepGraph | None = None
    held: int = 0
    gathered: bool = False

    def dtype(self, setting: Setting) -> torch.dtype:
        """The dtype that both compute in, for choosing bounds."""
        if setting.wide:
            return torch.float64
        given = {t.dtype for t in nn.Module.parameters(self.subject.model) if t.is_floating_point()}
        return torch.float64 if given == {torch.float64} else torch.float32

    def compare(
        self, setting: Setting, seen: Callable[[Results], Any] | None = None
    ) -> tuple[Deviation, ...]:
        """Deviations of every value. The model is restored afterwards. seen: as in `run`."""
        graph, eager = self.run(setting, seen=seen)
        return deviations(graph, eager, self.dtype(setting))

    def compare_step(
        self, seen: Callable[[Results], Any] | None = None
    ) -> tuple[Deviation, ...] | None:
        """`compare` for the whole batch, with the draws that a training step makes; None where
        eager code draws otherwise. For a graph that `can_be_recorded`."""
        setting, record = Setting(), RecordDraws()
        replay: list[ReplayDraws] = []

        def draws_of_graph() -> ReplayDraws:
            replay.append(ReplayDraws(record.made))
            return replay[0]

        graph, eager = self._both(setting, lambda: record, draws_of_graph, seen=seen)
        if not replay[0].matched:
            return None
        return deviations(graph, eager, self.dtype(setting))

    def compare_eager(self, setting: Setting) -> tuple[Deviation, ...]:
        """Compare eager with itself: a value that differs depends on more than the inputs."""
        first, second = self._eager(setting), self._eager(setting)
        return deviations(second, replace(first, strangers=()), self.dtype(setting))

    def run(
        self,
        setting: Setting,
        observe: Observer | None = None,
        watch: Callable[[], Any] | None = None,
        seen: Callable[[Results], Any] | None = None,
    ) -> tuple[Results, Results]:
        """(the graph's, eager's). observe: called with the nodes of the graph. watch: returns a
        dispatch mode in which eager code also runs. seen: called with the graph's results, all
        buffers included."""

        def same() -> SameDraws:
            return SameDraws(by_shape=setting.by_shape)

        return self._both(setting, same, same, observe, watch, seen)

    def _both(
        self,
        setting: Setting,
        of_graph: Callable[[], TorchDispatchMode],
        of_eager: Callable[[], TorchDispatchMode],
        observe: Observer | None = None,
        watch: Callable[[], Any] | None = None,
        seen: Callable[[Results], Any] | None = None,
    ) -> tuple[Results, Results]:
        """`run`, with the modes that decide what each of the two draws."""
        model = self.subject.model
        batch = part(self.batch, self.step, setting, self.subject.device)
        with untouched(model, wide=setting.wide) as guard:
            state = RandomState.here()
            with precision(setting), of_graph():
                graph = self.graph(batch, setting, observe)
            if seen is not None:
                seen(graph)
            changed = _changed(model, graph.buffers)
            state.restore()
            with self._plain(setting, guard, of_eager()), ExitStack() as stack:
                if watch is not None:
                    stack.enter_context(watch())
                eager = run_eager(self.subject, batch, tangent, guard)
        # One that only one of the two changes, may be by rounding, is as it was in the other.
        held = dict((*model.named_parameters(), *model.named_buffers()))
        kept = {
            n: held[n].detach().to(t.dtype) for n, t in changed.items() if n not in eager.buffers
        }
        ours = {n: t for n, t in graph.buffers.items() if n in changed or n in eager.buffers}
        # A step hands out no gradient of what is frozen after the first capture.
        trained = {n for n, p in model.named_parameters() if p.requires_grad}
        gradients = {n: g for n, g in graph.gradients.items() if n in trained}
        graph = replace(graph, buffers=ours, gradients=gradients)
        return graph, replace(eager, buffers={**eager.buffers, **kept})

    def eager_runs(self) -> None:
        """Run eager code on the whole batch. Raises what the user's model raises."""
        self._eager(Setting())

    def _eager(self, setting: Setting) -> Results:
        batch = part(self.batch, self.step, setting, self.subject.device)
        with (
            untouched(self.subject.model, wide=setting.wide) as guard,
            self._plain(setting, guard, SameDraws(by_shape=setting.by_shape)),
        ):
            return run_eager(self.subject, batch, tangent, guard)

    @contextmanager
    def _plain(
        self, setting: Setting, guard: WriteGuard, draws: TorchDispatchMode
    ) -> Iterator[None]:
        """The modes that eager code runs in. On a GPU its attention is decomposed, with a dropout
        that can be matched; the kernels have a random generator inside."""
        with ExitStack() as stack:
            if self.subject.device.type == "cuda":
                stack.enter_context(sdpa_kernel(SDPBackend.MATH))
            stack.enter_context(guard)
            stack.enter_context(precision(setting))
            stack.enter_context(draws)
            yield

    def graph(
        self,
        batch: Batch,
        setting: Setting,
        observe: Observer | None = None,
        keep: Keep | None = None,
    ) -> Results:
        """The graph's results alone, for a batch made by `part`. keep: as in `run_graph`."""
        model, step = self.subject.model, self.step
        sizes = dict(self.sizes)
        if setting.rows is not None:
            sizes[BATCH] = setting.rows
        parameters = dict(model.named_parameters(remove_duplicate=False))
        buffers = dict(model.named_buffers(remove_duplicate=False))
        device = self.subject.device
        tangents = {}
        for node, spec in zip(input_nodes(step.graph), step.inputs, strict=True):
            if spec.kind == "tangent":
                shape = [int(evaluate(d, sizes)) for d in node.meta["dims"]]
                dtype = torch.float64 if setting.wide else node.meta["val"].dtype
                like = torch.empty(shape, dtype=dtype, device=device)
                tangents[spec.leaf] = tangent(spec.leaf, like)
        inputs = Inputs(parameters, buffers, batch.leaves, tangents, device)
        built = run_graph(step, sizes, inputs, observe, keep)
        first = {id(b): n for n, b in model.named_buffers()}
        first |= {id(p): n for n, p in model.named_parameters()}
        held = {**parameters, **buffers}
        new = {first[id(held[n])]: value for n, value in built.buffers.items()}
        sizes_of = {first[id(held[n])]: size for n, size in built.magnitudes.items()}
        return replace(built, buffers=new, magnitudes=sizes_of)


def pair_of(
    model: nn.Module,
    loss_fn: LossFn,
    step: StepGraph,
    batch: Batch,
    sizes: Mapping[sympy.Symbol, int],
) -> Pair:
    """A model as its user calls it, beside the step captured from it.

    Raises GraphMisuse (GA407) where this rank does not hold the full weights.
    """
    if any(isinstance(p, (RemoteTensor, ShardTensor)) for p in nn.Module.parameters(model)):
        raise GraphMisuse(
            what="the model's weights are not whole on this rank, as eager code needs them",
            help_line="compare before the first training step:  "
            "graphaccel.debug.bisect(model, batch)",
        )
    return Pair(Subject(model, own_forward(model), loss_fn), step, batch, sizes)


def _changed(model: nn.Module, buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """New values that differ from the model's."""
    held = dict((*model.named_parameters(), *model.named_buffers()))
    return {n: t for n, t in buffers.items() if not torch.equal(t, held[n].detach())}


@contextmanager
def precision(setting: Setting) -> Iterator[None]:
    """Compute everything in float64, if the setting says so."""
    if not setting.wide:
        yield
        return
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with Widened():
            yield
    finally:
        torch.set_default_dtype(before)


def part(batch: Batch, step: StepGraph, setting: Setting, device: torch.device) -> Batch:
    """Copies of the first rows of a batch, on a device: a forward may write to its inputs. Leaves
    that are the same tensor stay the same tensor."""
    built: dict[int, Tensor] = {}
    leaves: list[Any] = []
    for i, leaf in enumerate(batch.leaves):
        if not isinstance(leaf, Tensor):
            leaves.append(leaf)
            continue
        if id(leaf) not in built:
            rows = leaf.detach()
            if setting.rows is not None and i in step.batch_dims:
                rows = rows.narrow(step.batch_dims[i], 0, setting.rows)
            dtype = torch.float64 if setting.wide and leaf.dtype in NARROW else leaf.dtype
            built[id(leaf)] = rows.to(device, dtype, copy=True).requires_grad_(leaf.requires_grad)
        leaves.append(built[id(leaf)])
    return Batch(tuple(leaves), batch.names, batch.spec)


def tangent(leaf: int, like: Tensor) -> Tensor:
    """A gradient for an output: numbers that depend only on its leaf and their position."""
    numbers = torch.arange(like.numel(), dtype=torch.float32, device=like.device)
    return torch.cos(1.7 * numbers + leaf).reshape(like.shape).to(like.dtype)


def graph_results(pair: Pair, keep: Keep) -> Results:
    """The graph's results for the whole batch, with the draws that a step would make; each reduced
    by `keep`."""
    model = pair.subject.model
    batch = part(pair.batch, pair.step, Setting(), pair.subject.device)
    with untouched(model):
        return pair.graph(batch, Setting(), keep=keep)


def draws(step: StepGraph) -> bool:
    """Whether the step draws random numbers."""
    return any(n.op == "call_function" and is_random(n) for n in step.graph.graph.nodes)
