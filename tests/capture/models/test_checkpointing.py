"""Models that were told to compute activations again: the plan does it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers

import graphaccel

pytestmark = pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable")


def llama() -> tuple[Any, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=16, num_attention_heads=2, num_key_value_heads=1, intermediate_size=32,
        vocab_size=96, num_hidden_layers=2, use_cache=False,
    )  # fmt: skip
    tokens = torch.arange(16).reshape(2, 8) * 5 % 96
    return transformers.LlamaForCausalLM(config).double(), {"input_ids": tokens, "labels": tokens}


@pytest.mark.parametrize("reentrant", [True, False])
def test_hugging_faces_models(reentrant: bool) -> None:
    plain, batch = llama()
    plain.gradient_checkpointing_enable({"use_reentrant": reentrant})
    planned = copy.deepcopy(plain)
    pins = {} if reentrant else {"recompute": "none"}
    graphaccel.optimize(planned, devices=1, **pins)
    for model in (plain, planned):
        model.train()(**batch).loss.backward()
    assert bool(planned.graphaccel.plan.recompute) == reentrant
    for (name, true), got in zip(plain.named_parameters(), planned.parameters(), strict=True):
        torch.testing.assert_close(got.grad, true.grad, rtol=1e-6, atol=1e-9, msg=name)


def test_what_is_planned_says_so() -> None:
    model, batch = llama()
    model.gradient_checkpointing_enable()
    plan = graphaccel.plan(model, batch, devices=1, device="h100-80gb")
    assert len(plan.recompute) == 2
    assert graphaccel.plan(llama()[0], batch, devices=1, device="h100-80gb").recompute == ()
