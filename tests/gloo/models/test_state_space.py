"""Mamba and Mamba 2 of `transformers` over two data ranks and over a pipeline's microbatches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Mamba2Config, Mamba2ForCausalLM, MambaConfig, MambaForCausalLM

import graphaccel
from tests.gloo.scripts.test_semantics import furthest
from tests.support.captures import captures_of
from tests.support.casts import lift_loss_cast
from tests.support.pool import Pool

pytestmark = pytest.mark.multiprocess

SMALL: dict[str, Any] = {
    "vocab_size": 16, "hidden_size": 8, "num_hidden_layers": 1, "state_size": 2, "use_cache": False,
}  # fmt: skip


class WithLoss(nn.Module):
    """`forward(tokens)` → the loss of a causal language model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(input_ids=tokens, labels=tokens).loss


MODELS: Mapping[str, Callable[[], nn.Module]] = {
    "mamba": lambda: MambaForCausalLM(MambaConfig(**SMALL)),
    "mamba2": lambda: Mamba2ForCausalLM(
        Mamba2Config(**SMALL, num_heads=4, head_dim=4, n_groups=2, chunk_size=2)
    ),
}


def trained(
    make: Callable[[], nn.Module],
    pins: Mapping[str, Any],
    captures: str,
    optimizer_of: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
) -> float:
    """How far two steps under a plan of two devices are from those of one, in float64."""
    states = []
    tokens = torch.randint(0, 16, (4, 4), generator=torch.Generator().manual_seed(1))
    for planned in (False, True):
        torch.manual_seed(0)
        model = WithLoss(make()).double()
        optimizer = optimizer_of(model.parameters(), lr=0.1)
        if planned:
            graphaccel.optimize(model, optimizer, devices=2, **pins)
        with lift_loss_cast(), captures_of(captures):
            for _ in range(2):
                optimizer.zero_grad()
                model(tokens).backward()
                optimizer.step()
        states.append(graphaccel.full_state_dict(model) if planned else model.state_dict())
    return furthest(*states)


def _trained(name: str, pins: Mapping[str, Any]) -> float:
    return trained(MODELS[name], pins, "state space")


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("pins", [{"data": 2}, {"pipeline": 2, "microbatches": 2}], ids=str)
def test_state_space_models(pool: Pool, name: str, pins: dict[str, Any]) -> None:
    assert max(pool.run(2, _trained, name, pins)) <= 1e-10
