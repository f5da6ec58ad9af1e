"""Masks that hide later positions are said to attention; any other stays as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

from graphaccel.capture.stepgraph import StepGraph, capture
from graphaccel.compiler.model import as_batch

WIDTH, HEADS = 8, 2


class Attends(nn.Module):
    """One attention with a mask of `make(x)`: inputs and targets [B, T, WIDTH]."""

    def __init__(self, make: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.make, self.inner = make, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        mask = self.make(x)
        heads = self.inner(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        made = F.scaled_dot_product_attention(heads, heads, heads, attn_mask=mask)
        return ((made.transpose(1, 2).flatten(2) - y) ** 2).sum()


def positions(x: Tensor) -> tuple[Tensor, Tensor]:
    at = torch.arange(x.shape[1], device=x.device)
    return at[:, None], at[None]


def causal(x: Tensor) -> Tensor:
    queries, keys = positions(x)
    return keys <= queries


def shifted(x: Tensor) -> Tensor:
    queries, keys = positions(x)
    examples = torch.arange(x.shape[0]).cumsum(0) >= 0
    return (keys < queries + 1) & examples[:, None, None, None]


def triangle(x: Tensor) -> Tensor:
    return torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()


def one_less(x: Tensor) -> Tensor:
    queries, keys = positions(x)
    return (keys < queries) | (queries == 0)


def window(x: Tensor) -> Tensor:
    """Wider than the sequence: it hides nothing here, and would in a longer one."""
    queries, keys = positions(x)
    return (keys <= queries) & (keys > queries - 4096)


def of_the_batch(x: Tensor) -> Tensor:
    return causal(x) & (x[:, None, None, :, 0] > -9)


def added(x: Tensor) -> Tensor:
    return torch.zeros_like(x[0, :, 0]).expand(x.shape[1], -1).masked_fill(~causal(x), -torch.inf)


def lowest(x: Tensor) -> Tensor:
    """Added to scores: 0 where a position is seen."""
    return torch.where(causal(x), torch.zeros(()), torch.finfo(x.dtype).min)


def softly(x: Tensor) -> Tensor:
    return lowest(x).clamp(min=-1.0)


def turned_round(x: Tensor) -> Tensor:
    return lowest(x).to(torch.bool)


def of_integers(x: Tensor) -> Tensor:
    return torch.where(causal(x), torch.zeros((), dtype=torch.int64), -100_000).to(x.dtype)


def attention(step: StepGraph) -> list[dict[str, Any]]:
    """The arguments of every call to attention in the forward."""
    found = []
    for node in step.forward.graph.graph.nodes:
        if node.target is torch.ops.aten.scaled_dot_product_attention.default:
            names = [a.name for a in node.target._schema.arguments]
            found.append(dict(zip(names, node.args, strict=False)) | dict(node.kwargs))
    return found


def captured(model: nn.Module, length: int, examples: int = 4) -> tuple[StepGraph, Any]:
    torch.manual_seed(0)
    shape = (examples, length, WIDTH)
    batch = as_batch((torch.randn(shape), torch.randn(shape)))
    return capture(model, batch), batch


@pytest.mark.parametrize("make", [causal, shifted, triangle, lowest])
@pytest.mark.parametrize("length", [6, 2500])  # the second is computed by rows
def test_a_causal_mask_is_said(make: Callable[[Tensor], Tensor], length: int) -> None:
    torch.manual_seed(0)
    model = Attends(make)
    step, batch = captured(model, length)
    (call,) = attention(step)
    if make is triangle and length > 2048:  # more than comparisons of positions: left as it is
        assert call["attn_mask"] is not None
        return
    assert call["attn_mask"] is None
    assert call["is_causal"] is True
    if length > 6:
        return
    named = dict(model.named_parameters())
    values = [
        named[s.name].detach() if s.kind == "parameter"
        else step.forward.constants[s.name] if s.kind == "constant" else batch.leaves[s.leaf]
        for s in step.inputs
    ]  # fmt: skip
    true = model(*batch.leaves)
    true.backward()
    for spec, value in zip(step.outputs, step.graph(*values), strict=True):
        wanted = true.detach() if spec.kind == "loss" else named[spec.name].grad
        torch.testing.assert_close(value, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("examples", [6, 40])  # as many as positions; more than are computed
def test_of_any_number_of_examples(examples: int) -> None:
    torch.manual_seed(0)
    (call,) = attention(captured(Attends(shifted), 6, examples)[0])
    assert call["is_causal"] is True


OTHERS = [one_less, window, of_the_batch, added, softly, turned_round, of_integers]


@pytest.mark.parametrize("make", OTHERS)
def test_other_masks_stay(make: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    (call,) = attention(captured(Attends(make), 6)[0])
    assert call["attn_mask"] is not None
    assert not call.get("is_causal")


@pytest.mark.parametrize("name", ["Llama", "Qwen2", "OPT", "Mixtral"])
def test_decoders_as_hugging_face_writes_them(name: str) -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    other = (
        {"ffn_dim": 32, "word_embed_proj_dim": 16}
        if name == "OPT"
        else {"intermediate_size": 32, "num_key_value_heads": 1}
    )
    config = getattr(transformers, f"{name}Config")(
        vocab_size=16, use_cache=False, pad_token_id=None, bos_token_id=1, eos_token_id=2,
        **sizes, **other,
    )  # fmt: skip
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    ids = torch.zeros(2, 8, dtype=torch.int64)
    step = capture(model, as_batch({"input_ids": ids, "labels": ids}))
    assert [(a.get("attn_mask"), a.get("is_causal")) for a in attention(step)] == [(None, True)]
