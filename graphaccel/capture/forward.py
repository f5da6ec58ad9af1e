"""Build the canonical forward graph of a model: on the CPU, tied parameters under one name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch
from torch import fx, nn

from graphaccel.capture.batch import Batch
from graphaccel.capture.canonical.canonicalise import canonicalise
from graphaccel.capture.export.export import ForwardGraph, LossFn, export_forward
from graphaccel.capture.trace import Answers
from graphaccel.compat.torch.fakes import fake_mode_of
from graphaccel.ir.place import place


def forward_graph(
    model: nn.Module, batch: Batch, loss_fn: LossFn, answers: Answers | None = None
) -> ForwardGraph:
    """The canonical forward graph of a model with its loss. answers, and errors: as for
    `export_forward`."""
    tied = tied_names(model)
    forward = _merged(_on_cpu(export_forward(model, batch, loss_fn, answers)), tied)
    with fake_mode_of([n for n in forward.graph.graph.nodes if n.op == "placeholder"]):
        canonicalise(forward.graph)
    return forward


def _on_cpu(forward: ForwardGraph) -> ForwardGraph:
    """Move the graph to the CPU. Attention and similar ops are not decomposed yet: from here on
    they are the same ops, with the same rules and plans, for every device. `runtime/bind.py` moves
    graphs to the device where they run."""
    if place(forward.graph, torch.device("cpu")):
        forward.graph.recompile()
    constants = {name: t.to("cpu") for name, t in forward.constants.items()}
    return replace(forward, constants=constants)


def _merged(forward: ForwardGraph, tied: Mapping[str, str]) -> ForwardGraph:
    """Merge tied parameters into one name and one placeholder: they have one gradient."""
    first: dict[str, fx.Node] = {}
    kept = []
    placeholders = [n for n in forward.graph.graph.nodes if n.op == "placeholder"]
    for node, spec in zip(placeholders, forward.inputs, strict=True):
        name = tied.get(spec.name, spec.name)
        if spec.kind == "parameter" and name in first:
            node.replace_all_uses_with(first[name])
            forward.graph.graph.erase_node(node)
            continue
        if spec.kind == "parameter":
            first[name] = node
        kept.append(replace(spec, name=name))
    return replace(forward, inputs=tuple(kept))


def tied_names(model: nn.Module) -> dict[str, str]:
    """Name of every parameter that shares its storage with an earlier one → the earlier name."""
    return tied_among(model.named_parameters(remove_duplicate=False))


def tied_among(named: Iterable[tuple[str, nn.Parameter]]) -> dict[str, str]:
    """`tied_names` of these parameters."""
    first: dict[int, str] = {}
    tied = {}
    for name, parameter in named:
        stands = first.setdefault(id(parameter), name)
        if stands != name:
            tied[name] = stands
    return tied
