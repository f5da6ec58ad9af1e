"""Models on the meta device, initialised where they will lie: the values and the first step of one
device, under every kind of plan, and no more memory than what a rank holds and one tensor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.optim import SGD

import graphaccel
from graphaccel.runtime.meter import PeakMeter
from graphaccel.runtime.parameters.sharded import local_of
from tests.support.gpt import GPT
from tests.support.pool import Pool
from tests.support.zoo import loss_of

PLANS: dict[str, dict[str, Any]] = {
    "data2": {"data": 2},
    "pipeline2": {"pipeline": 2, "microbatches": 2},
    "tensor2": {"tensor": 2},
    "zero3": {"data": 2, "zero": 3},
}

CASES = [*zip(("llama", "gpt", "gpt2", "gpt"), PLANS, strict=True)]


def build(name: str) -> nn.Module:
    """Two layers from the present random state; dropout 0."""
    if name == "gpt":
        return GPT(width=256, layers=2, deviation=0.1)  # large beside what the runtime itself holds
    if name == "gpt2":
        return transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                vocab_size=96, n_positions=32, n_embd=32, n_layer=2, n_head=4, use_cache=False,
                resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=1, eos_token_id=2,
            )
        )  # fmt: skip
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, use_cache=False,
        )
    )  # fmt: skip


def batch() -> dict[str, Tensor]:
    ids = torch.arange(8 * 16).view(8, 16) % 96
    return {"input_ids": ids, "labels": ids}


def run_deferred(name: str, pins: dict[str, Any]) -> dict[str, Any]:
    """This rank's loss, weights after a step, bytes held and peak while it was initialised."""
    torch.manual_seed(torch.distributed.get_rank())  # rank 0's numbers are drawn everywhere
    if name == "gpt2":
        model = graphaccel.deferred(lambda: build(name))
    else:
        with torch.device("meta"):
            model = build(name)
    model.train()
    init_fn = (lambda: build(name).train()) if name == "gpt" else None
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    with PeakMeter() as meter:
        model, optimizer = graphaccel.optimize(
            model, optimizer, init_fn=init_fn, example_batch=batch(), **pins
        )
    first = graphaccel.full_state_dict(model)
    held = {id(p): local_of(p.detach()) for p in model.parameters()}
    here = [t for t in held.values() if type(t) is Tensor]
    loss = loss_of(model(**batch()), batch())
    loss.backward()
    optimizer.step()
    return {
        "first": first,
        "loss": loss.item(),
        "then": graphaccel.full_state_dict(model),
        "held": sum(t.numel() * t.element_size() for t in here),
        "peak": meter.peak,
        "draw": float(torch.rand(())),
    }


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("name", "plan"), [*zip(("llama", "gpt", "gpt2", "gpt"), PLANS, strict=True)]
)
def test_values_and_first_step(pool: Pool, name: str, plan: str) -> None:
    got = pool.run(2, run_deferred, name, PLANS[plan])
    torch.manual_seed(0)
    model = build(name).train()
    for rank in got:
        for key, value in model.state_dict().items():
            assert torch.equal(rank["first"][key], value), key
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    loss = loss_of(model(**batch()), batch())
    loss.backward()
    optimizer.step()
    largest = max(p.numel() * p.element_size() for p in model.parameters())
    whole = sum(p.numel() * p.element_size() for p in model.parameters())
    for rank in got:
        assert rank["loss"] == pytest.approx(loss.item(), rel=1e-5)
        for key, value in model.state_dict().items():
            assert torch.allclose(rank["then"][key], value, atol=1e-6), key
        if plan != "data2":
            assert rank["held"] < 0.75 * whole
        if name == "gpt":
            assert rank["peak"] <= rank["held"] + 2 * largest + 2**19 < whole
    assert got[0]["draw"] == got[1]["draw"]
