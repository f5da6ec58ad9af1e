"""Text while a model trains under a plan: the plain model's tokens, with a cache and without."""

from __future__ import annotations

import copy
import time
from typing import Any

import pytest
import torch

import graphaccel
from graphaccel import errors
from tests.support.inside import captures_in
from tests.support.pool import Pool

pytestmark = pytest.mark.multiprocess
transformers = pytest.importorskip("transformers")

PLANS = {
    "pipeline": {"pipeline": 2, "microbatches": 2},
    "tensor": {"tensor": 2},
    "zero": {"data": 2, "zero": 3},
}


def _model() -> Any:
    config = transformers.GPT2Config(
        vocab_size=32, n_embd=16, n_layer=1, n_head=2, n_positions=32,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(config)


def _generated(pins: dict[str, Any]) -> dict[str, float]:
    """Tokens per second, by how they were generated; between training steps, as eager does."""
    plain, ours = _model(), _model()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (plain, ours)]
    graphaccel.optimize(ours, optimizers[1], devices=2, check="off", **pins)
    ids = torch.randint(0, 32, (4, 8), generator=torch.Generator().manual_seed(1))
    prompt, rates = ids[:2, :4], {}
    for _ in range(2):
        for model, optimizer in zip((plain, ours), optimizers, strict=True):
            model.train()
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            model.eval()
        for options in (
            {"use_cache": True},
            {"use_cache": False},
            {"num_beams": 2},
            {"do_sample": True},
        ):
            made = []
            for model in (plain, ours):
                torch.manual_seed(3)
                start = time.perf_counter()
                made.append(
                    model.generate(
                        prompt,
                        attention_mask=torch.ones_like(prompt),
                        max_new_tokens=6,
                        pad_token_id=0,
                        **({"do_sample": False} | options),
                    )
                )
                rates[str(options)] = made[-1][:, 4:].numel() / (time.perf_counter() - start)
            assert torch.equal(*made), options
    with torch.no_grad():  # a plain forward with keys and values
        for model in (plain, ours):
            first = model(prompt, use_cache=True)
            made.append(model(prompt[:, :1], past_key_values=first.past_key_values).logits)
    torch.testing.assert_close(made[-1], made[-2])
    return rates


@pytest.mark.parametrize("plan", PLANS)
def test_the_tokens_of_the_plain_model(pool: Pool, plan: str) -> None:
    rates = pool.run(2, _generated, PLANS[plan], timeout_s=300.0)[0]
    print(plan, *(f"{how}: {rate:.0f} tokens/s" for how, rate in rates.items()))


class Loop(torch.nn.Module):
    """A model whose `generate` is its own, and whose weights are read in many ways."""

    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(16, 8)
        self.attention = torch.nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = torch.nn.LayerNorm(8)
        self.scale = torch.nn.Parameter(torch.ones(8))
        self.register_buffer("shift", torch.linspace(0, 1, 8))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        hidden = self.words(ids)
        mixed, _ = self.attention(hidden, hidden, hidden, need_weights=False)
        hidden = self.norm(hidden + mixed * self.scale + self.shift)
        logits = hidden @ self.words.weight.T
        if labels is None:
            return logits
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    @torch.no_grad()
    def generate(self, ids: torch.Tensor, count: int) -> torch.Tensor:
        """Greedy."""
        for _ in range(count):
            ids = torch.cat([ids, self(ids)[:, -1:].argmax(-1)], 1)
        return ids


def _lengths(pins: dict[str, Any]) -> tuple[int, int]:
    torch.manual_seed(0)
    plain = Loop().double()
    ours = copy.deepcopy(plain)
    graphaccel.optimize(ours, devices=2, check="off", **pins)
    ids = torch.randint(0, 16, (4, 6), generator=torch.Generator().manual_seed(1))
    for model in (plain, ours):
        model(ids, ids).backward()
        model.eval()
    captures = captures_in(ours)
    assert torch.equal(plain.generate(ids, 5), ours.generate(ids, 5))
    generated = len(captures.steps)
    with torch.no_grad():
        for length in (2, 3, 4, 5, 6):  # of which the first is compiled
            torch.testing.assert_close(ours(ids[:, :length]), plain(ids[:, :length]))
    return generated, len(captures.steps)


@pytest.mark.parametrize("plan", ["pipeline", "zero"])
def test_new_lengths_are_not_captured(pool: Pool, plan: str) -> None:
    assert pool.run(2, _lengths, PLANS[plan]) == [(1, 2)] * 2


def _trains_inside() -> None:
    model = Loop()
    graphaccel.optimize(model, devices=2, pipeline=2, check="off")
    ids = torch.arange(12).view(4, 3)
    model(ids, ids).backward()
    with model.graphaccel.generating(), pytest.raises(errors.GraphMisuse) as caught:
        model(ids, ids)
    assert str(caught.value).splitlines() == [
        "error[GA407]: a training step inside of model.generate()",
        "  help: with torch.no_grad(): tokens = model.generate(...)",
        "  explain: graphaccel explain GA407",
    ]
    model(ids, ids).backward()


def test_no_training_step_inside(pool: Pool) -> None:
    pool.run(2, _trains_inside)
