"""Experts of Hugging Face's models in a form of fixed shapes, while their model is exported.

They loop over the experts that were hit, or sort the whole batch by expert and cut it by their
counts: which rows a call gets then depends on the data. With a weight looked up for every row
(`batched_mm`) no shape does, and a batch can be split; what runs is `kernels.ops.experts`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import nn

_SAME_EXPERTS = {"eager", "grouped_mm"}


@contextmanager
def batched_experts(model: nn.Module) -> Iterator[None]:
    """In this context experts compute with a weight for every row: by the implementation that
    transformers has, or where a model has a loop alone, by a form from here."""
    results: list[Any] = [m for m in model.modules() if hasattr(m, "set_experts_implementation")]
    before = [m.get_experts_implementation() for m in results]
    able = [(m, b) for m, b in zip(results, before, strict=True) if set(b.values()) & _SAME_EXPERTS]
    loops = _loops(model)
    try:
        for module, _ in able:
            module.set_experts_implementation("batched_mm")
        for module, name, form in loops:
            vars(module)[name] = MethodType(form, module)
        yield
    finally:
        for module, said in able:
            module.set_experts_implementation(said)
        for module, name, _ in loops:
            del vars(module)[name]


def _loops(model: nn.Module) -> list[tuple[nn.Module, str, Callable[..., Any]]]:
    """Modules, names of methods and their forms from here. Those of one file are replaced together,
    as they hand each other rows, and only where none is the user's own."""
    results: list[tuple[nn.Module, str, Callable[..., Any]]] = []
    for file, forms in _FORMS.items():
        own, names = [], {kind.partition(".")[0] for kind in forms}
        for module in model.modules():
            kinds = {k.__name__ for k in type(module).__mro__ if k.__module__ == file} & names
            for method, form in forms.items():
                kind, _, name = method.partition(".")
                if kind in kinds:
                    own.append((module, name, form, method))
        if all(_as_in_file(module, name, file, method) for module, name, _, method in own):
            results += [(module, name, form) for module, name, form, _ in own]
    return results


def _as_in_file(module: nn.Module, name: str, file: str, method: str) -> bool:
    function = getattr(type(module), name)
    defined = (function.__module__, function.__qualname__) == (file, method)
    return defined and name not in vars(module)


def _per_row(x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    """Rows [S, K] times the weights [E, N, K] of their experts [S]: [S, N]."""
    return torch.bmm(weights[experts], x.unsqueeze(-1)).squeeze(-1)


def _beside_identities(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """LongCat's: what chose an expert from `num_routed_experts` on stays as it is."""
    chosen, width = top_k_index.reshape(-1), top_k_index.shape[-1]
    rows = hidden_states.repeat_interleave(width, dim=0)
    results = self.identity_expert(rows)
    if self.gate_up_proj is not None:
        own = (chosen < self.num_routed_experts).unsqueeze(-1)
        experts = chosen.clamp(max=self.num_routed_experts - 1)
        # Zeros for the others: no expert overflows on a row that did not choose it.
        given = torch.where(own, rows, torch.zeros_like(rows))
        gate, up = _per_row(given, self.gate_up_proj, experts).chunk(2, dim=-1)
        down = _per_row(self.act_fn(gate) * up, self.down_proj, experts)
        results = torch.where(own, down, results)
    weighted = (results * top_k_weights.reshape(-1, 1)).to(hidden_states.dtype)
    return weighted.view(hidden_states.shape[0], width, -1).sum(dim=1)


def _unsorted(self: Any, hidden_states: torch.Tensor) -> tuple[Any, ...]:
    """JetMoE's gating: for rows in the order of the batch, the gate and the expert of each."""
    logits = self.layer(hidden_states).float()
    values, experts = logits.topk(self.top_k, dim=1)
    gates = torch.softmax(values, dim=1).type_as(hidden_states)
    return None, None, gates.flatten(), experts.flatten(), logits


def _of_chosen(self: Any, inputs: torch.Tensor, expert_size: torch.Tensor) -> torch.Tensor:
    """JetMoE's experts, given the expert of each row."""
    return _per_row(inputs, self.weight, expert_size)


def _mixed(self: Any, layer_input: torch.Tensor) -> torch.Tensor:
    """JetMoE's feed-forward layer."""
    flat = layer_input.reshape(-1, layer_input.shape[-1])
    _, _, gates, experts, _ = self.router(flat)
    rows = flat.repeat_interleave(self.router.top_k, dim=0)
    first, second = self.input_linear(rows, experts).chunk(2, dim=-1)
    rows = self.activation(first) * second
    rows = self.output_linear(rows, experts) * gates.unsqueeze(-1)
    return rows.view(*layer_input.shape[:2], self.router.top_k, -1).sum(dim=2) + self.bias


def _queries(self: Any, layer_input: torch.Tensor) -> tuple[Any, ...]:
    """JetMoE's projection to queries by experts, and what `_reduced` is given."""
    flat = layer_input.reshape(-1, layer_input.shape[-1])
    *_, gates, experts, logits = self.router(flat)
    rows = self.input_linear(flat.repeat_interleave(self.top_k, dim=0), experts)
    return rows.view(*layer_input.shape[:2], self.top_k, -1), logits, (gates, experts)


def _reduced(self: Any, layer_input: torch.Tensor, topo_info: tuple[Any, ...]) -> torch.Tensor:
    """JetMoE's projection of what its attention returns."""
    gates, experts = topo_info
    rows = self.output_linear(layer_input.flatten(0, 2), experts) * gates.unsqueeze(-1)
    return rows.view(*layer_input.shape[:3], -1).sum(dim=2) + self.bias


_FORMS: Mapping[str, Mapping[str, Callable[..., Any]]] = {
    "transformers.models.longcat_flash.modeling_longcat_flash": {
        "LongcatFlashExperts.forward": _beside_identities
    },
    "transformers.models.jetmoe.modeling_jetmoe": {
        "JetMoeTopKGating.forward": _unsorted,
        "JetMoeParallelExperts.forward": _of_chosen,
        "JetMoeMoE.forward": _mixed,
        "JetMoeMoA.map": _queries,
        "JetMoeMoA.reduce": _reduced,
    },
}
"""File → method → its form."""
