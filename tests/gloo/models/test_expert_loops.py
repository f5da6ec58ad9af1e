"""Experts of `transformers` that loop over those that were hit, or sort the batch by expert."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    JetMoeConfig,
    JetMoeForCausalLM,
    LongcatFlashConfig,
    LongcatFlashForCausalLM,
)

from tests.gloo.models.test_state_space import trained
from tests.support.pool import Pool

pytestmark = pytest.mark.multiprocess

SMALL: dict[str, Any] = {
    "vocab_size": 16, "hidden_size": 8, "num_hidden_layers": 1, "max_position_embeddings": 8,
    "use_cache": False, "initializer_range": 0.5,
}  # fmt: skip


def _longcat() -> nn.Module:
    """Two of six experts are identities."""
    return LongcatFlashForCausalLM(
        LongcatFlashConfig(
            **SMALL, num_layers=1, num_attention_heads=2, ffn_hidden_size=8, q_lora_rank=4,
            kv_lora_rank=4, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=4, head_dim=4,
            moe_topk=2, n_routed_experts=4, zero_expert_num=2, expert_ffn_hidden_size=4,
        )
    )  # fmt: skip


def _jetmoe() -> nn.Module:
    return JetMoeForCausalLM(
        JetMoeConfig(
            **SMALL, num_key_value_heads=1, kv_channels=4, intermediate_size=4,
            num_local_experts=4, num_experts_per_tok=2,
        )
    )  # fmt: skip


MODELS: Mapping[str, Callable[[], nn.Module]] = {"longcat": _longcat, "jetmoe": _jetmoe}
PLANS: Mapping[str, Mapping[str, Any]] = {
    "data": {"data": 2},
    "zero": {"data": 2, "zero": 3},
    "tensor": {"tensor": 2},
    "pipeline": {"pipeline": 2, "microbatches": 2},
}


def _trained(name: str, pins: Mapping[str, Any]) -> float:
    return trained(MODELS[name], pins, "expert loops", torch.optim.AdamW)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", MODELS)
def test_two_steps_are_those_of_one_device(pool: Pool, name: str, plan: str) -> None:
    assert max(pool.run(2, _trained, name, PLANS[plan])) < 1e-8
