"""Compiles pieces of stage graphs (`runtime.inductor.partition`) with Inductor, and runs them.

A graph keeps its calling convention: one list of inputs, which is emptied. An input that a piece
reads for the last time is removed from the list, so that Inductor's code frees it as early as the
FX code would.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from graphaccel.compat.torch.fakes import fakes_like
from graphaccel.compat.torch.graphs import BoxedCode, graph_module
from graphaccel.compat.torch.inductor import compile_graph, missing_cpp_compiler
from graphaccel.errors import CompileFailed, CompilerMissing
from graphaccel.ir.program import StageProgram
from graphaccel.ir.values import returned
from graphaccel.kernels.jit import has_triton
from graphaccel.planner.cluster.cluster import Cluster
from graphaccel.runtime.inductor.partition import Piece, pieces, signature

Boxed = Callable[[list[Any]], Sequence[Any]]
Report = Callable[[str, str, float], None]
PHASES = ("forward", "backward", "weight")


def check_compiler(compile: str, device: torch.device) -> None:
    """Raises CompilerMissing (GA901) where this machine cannot do what `compile` asks for."""
    reason = missing_cpp_compiler() if compile != "off" and device.type == "cpu" else None
    if reason is not None:
        raise CompilerMissing(asked=f"compile={compile!r}", reason=reason)
    if compile != "off" and device.type == "cuda" and not has_triton():
        reason = "the kernels that Inductor makes for a GPU are Triton's"
        raise CompilerMissing(asked=f"compile={compile!r}", reason=reason, triton=True)


def here(pins: Mapping[str, Any], device: torch.device, cluster: Cluster) -> dict[str, Any]:
    """The pins for this machine. What runs the graphs of stages is "off" by default on a GPU
    without Triton, with a warning; it and fused ops are, where a plan for GPUs runs on a CPU.

    device: that of this process. cluster: the devices that a plan is made for.
    """
    asked = pins.get("compile")
    if device.type != cluster.device.type:
        return {"compile": "off", "fusions": "off", **pins}
    if asked not in (None, "auto") or device.type != "cuda" or has_triton():
        return dict(pins)
    warnings.warn(
        "graphaccel: stages run as FX code, not compiled: Triton is missing (pip install triton)",
        stacklevel=3,
    )
    return {**pins, "compile": "off"}


@dataclass(frozen=True)
class StageCompiler:
    """Compiles the graphs of stages. report: called with (phase, what, seconds) for each stage.
    layers: whether graphs are cut at the ends of identical layers, one of which is compiled for
      all, or are compiled whole, which fuses across them.
    strict: an error of Inductor is CompileFailed (GA902); else torch runs that piece as FX code,
      with a warning that names it.
    known: compiled code by signature: identical pieces share it."""

    report: Report
    layers: bool = True
    strict: bool = True
    known: dict[Hashable, Boxed] = field(default_factory=dict, repr=False)

    def stage(self, program: StageProgram, phases: Sequence[str] = PHASES) -> StageProgram:
        """The stage with compiled graphs of some phases in place of FX code.

        Raises CompileFailed (GA902), where `strict`.
        """
        start = time.perf_counter()
        before = len(self.known)
        done: list[int] = []

        def each(phase: str, graphs: Mapping[Any, Any]) -> dict[Any, Any]:
            if phase not in phases:
                return dict(graphs)
            return {m: self._graph(g, program.stage, phase, done) for m, g in graphs.items()}

        built = replace(
            program,
            forward=each("forward", {0: program.forward})[0],
            backwards=each("backward", program.backwards),
            weights=each("weight", program.weights),
        )
        built_now = len(self.known) - before
        what = f"stage {program.stage}, {len(done)} pieces by Inductor, {built_now} unlike"
        self.report("compile", what, time.perf_counter() - start)
        return built

    def _graph(self, module: fx.GraphModule, stage: int, phase: str, done: list[int]) -> Any:
        parts = pieces(module.graph, layers=self.layers)
        if not any(piece.compiled for piece in parts):
            return module
        runs: list[Boxed] = []
        for piece in parts:
            if not piece.compiled:
                runs.append(_plain(module, piece))
                continue
            try:
                runs.append(self._compiled(module, piece))
            except Exception as error:  # Inductor's errors have no common base
                self._refused(piece, stage, phase, error)
                runs.append(_plain(module, piece))
                continue
            done.append(len(piece.nodes))
        return Compiled(module, parts, runs)

    def _refused(self, piece: Piece, stage: int, phase: str, error: Exception) -> None:
        calls, first, cause = len(piece.nodes), _place(piece.nodes[0]), _message(error)
        if self.strict:
            raise CompileFailed(
                stage=stage, phase=phase, calls=calls, first=first, cause=cause
            ) from error
        warnings.warn(
            f"graphaccel: stage {stage}, {phase}: {calls} calls from {first} on run as FX code; "
            f"Inductor refused them: {cause}",
            stacklevel=2,
        )

    def _compiled(self, module: fx.GraphModule, piece: Piece) -> Boxed:
        kind = signature(piece)
        if kind not in self.known:
            self.known[kind] = _compiled(module, piece)
        return _Checked(self.known[kind], piece)


class Compiled:
    """A graph as a sequence of pieces. `compiled(inputs) -> outputs` empties the list of inputs."""

    def __init__(
        self, module: fx.GraphModule, parts: Sequence[Piece], runs: Sequence[Boxed]
    ) -> None:
        self.graph = module.graph
        self._parts = parts
        given = [n for n in module.graph.nodes if n.op == "placeholder"]
        slots = {n: i for i, n in enumerate(given)}
        for piece in parts:
            slots |= {n: len(slots) + i for i, n in enumerate(piece.outputs)}
        results = returned(module)
        self._results = [slots[r] if isinstance(r, fx.Node) else None for r in results]
        self._size = len(slots)
        last: dict[fx.Node, int] = {}
        for number, piece in enumerate(parts):
            last |= dict.fromkeys(piece.inputs, number)
        kept = {r for r in results if isinstance(r, fx.Node)}
        self._steps = []
        for number, (piece, run) in enumerate(zip(parts, runs, strict=True)):
            reads = tuple(slots[n] for n in piece.inputs)
            frees = tuple(slots[n] for n in piece.inputs if last[n] == number and n not in kept)
            start = slots[piece.outputs[0]] if piece.outputs else 0
            self._steps.append((run, reads, frees, start, start + len(piece.outputs)))

    def with_runs(self, change: Callable[[Boxed, Sequence[fx.Node]], Boxed]) -> Compiled:
        """The same with other code for each piece: `change` of its code and its calls."""
        other = copy(self)
        other._steps = [
            (change(run, piece.nodes), *rest)
            for piece, (run, *rest) in zip(self._parts, self._steps, strict=True)
        ]
        return other

    def __call__(self, boxed: list[Any]) -> list[Any]:
        values = boxed + [None] * (self._size - len(boxed))
        boxed.clear()
        for run, reads, frees, start, end in self._steps:
            given = [values[i] for i in reads]
            for i in frees:
                values[i] = None
            values[start:end] = run(given)
        return [None if i is None else values[i] for i in self._results]


def _graph_of(piece: Piece) -> tuple[fx.Graph, list[fx.Node]]:
    """A piece as a graph of its own, and the copies of its output nodes."""
    graph = fx.Graph()
    built: dict[fx.Node, fx.Node] = {}
    for node in piece.inputs:
        built[node] = graph.placeholder(node.name)
    for node in piece.nodes:
        built[node] = graph.node_copy(node, lambda n: built[n])
        built[node].meta = {}
    return graph, [built[n] for n in piece.outputs]


def _plain(module: fx.GraphModule, piece: Piece) -> Boxed:
    graph, results = _graph_of(piece)
    graph.output(results)
    graph.set_codegen(BoxedCode())
    return graph_module(module, graph)


def _compiled(module: fx.GraphModule, piece: Piece) -> Boxed:
    graph, results = _graph_of(piece)
    graph.output(tuple(results))
    inputs = fakes_like([n.meta["val"] for n in piece.inputs])
    return compile_graph(graph_module(module, graph), inputs, {})


class _Checked:
    """A compiled piece. The memory layout of its outputs must be that of the graph's fake values:
    messages and the following FX code rely on it. The first call checks it; shapes are static."""

    def __init__(self, run: Boxed, piece: Piece) -> None:
        self._run: Boxed = run
        self._piece: Piece | None = piece

    def __call__(self, given: list[Any]) -> Sequence[Any]:
        built = self._run(given)
        if self._piece is not None:
            for node, tensor in zip(self._piece.outputs, built, strict=True):
                if _layout(tensor) != _layout(node.meta["val"]):
                    raise AssertionError(f"{node.name}: {_layout(tensor)} by Inductor")
            self._piece = None
        return built


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    steps = (s for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1)
    return tensor.dtype, tuple(tensor.shape), tuple(steps)


def _place(node: fx.Node) -> str:
    where = node.meta.get("module")
    return f"{node.target}" + (f" in {where}" if where else "")


def _message(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]
