"""GPT-2 and BERT of transformers under graphaccel with fusions, for `gpt2.py` and `bert.py`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from benchmarks.shared.common import (
    OURS,
    Settings,
    Step,
    make_batch,
    make_optimizer,
    our_step,
    time_sides,
)


def gpt2(settings: Settings) -> tuple[nn.Module, dict[str, Tensor]]:
    """Causal language model, without dropout."""
    config = transformers.GPT2Config(
        vocab_size=settings.vocabulary, n_positions=settings.tokens, n_embd=settings.width,
        n_layer=settings.layers, n_head=settings.heads, use_cache=False, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return _seeded(lambda: transformers.GPT2LMHeadModel(config)), make_batch(settings)


def bert(settings: Settings) -> tuple[nn.Module, dict[str, Tensor]]:
    """Masked language model, without dropout; labels on a sixth of the tokens."""
    config = transformers.BertConfig(
        vocab_size=settings.vocabulary, max_position_embeddings=settings.tokens,
        hidden_size=settings.width, num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads, intermediate_size=4 * settings.width,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    batch = make_batch(settings)
    hidden = torch.arange(settings.tokens) % 6 != 0
    batch["labels"] = batch["labels"].masked_fill(hidden, -100)
    return _seeded(lambda: transformers.BertForMaskedLM(config)), batch


def _seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(1)
    return make().train()


class _Loss(nn.Module):
    """The loss alone, as the benchmarks' other models return it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        return self.model(input_ids=input_ids, labels=labels).loss


def eager(make: Callable[[Settings], Any], settings: Settings, compiled: bool = False) -> Step:
    """A step of the model as it is, or by `torch.compile`."""
    model, batch = make(settings)
    model = _Loss(model)
    optimizer = make_optimizer(model)
    call: Any = torch.compile(model) if compiled else model

    def step() -> float:
        loss = call(**batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def ours(make: Callable[[Settings], Any], settings: Settings, **pins: Any) -> Step:
    """A step by graphaccel, with fusions unless `pins` say otherwise."""
    model, batch = make(settings)
    plan = {"data": 1, "pipeline": 1, "microbatches": 1, "recompute": "none", "precision": "fp32"}
    return our_step(_Loss(model), batch, **{**plan, "fusions": "auto", **pins})


def sides(make: Callable[[Settings], Any], settings: Settings) -> dict[str, dict[str, Any]]:
    """Both sides on the one rank."""
    makers = {OURS: partial(ours, make, settings), "eager": partial(eager, make, settings)}
    return time_sides(settings, makers)
