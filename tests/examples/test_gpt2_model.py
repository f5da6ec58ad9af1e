"""examples/gpt2/model.py: a GPT-2 that knows nothing of graphaccel."""

from __future__ import annotations

import math

import pytest
import torch

from .conftest import EXAMPLES


@pytest.fixture
def model_file(gpt2):
    return gpt2("model")


@pytest.fixture
def model(model_file):
    torch.manual_seed(0)
    return model_file.GPT(model_file.GPTConfig(50, 12, layers=2, heads=2, width=16))


def test_it_knows_nothing_of_graphaccel() -> None:
    lines = (EXAMPLES / "gpt2" / "model.py").read_text().splitlines()
    assert not [line for line in lines if "import" in line and "graphaccel" in line]


def test_the_loss_is_the_mean_over_targets_that_count(model) -> None:
    idx = torch.randint(50, (3, 12))
    targets = torch.randint(50, (3, 12))
    targets[0, :9] = -100
    logits, loss = model(idx, targets)
    chosen = logits.log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    assert loss.item() == pytest.approx(-chosen[targets >= 0].mean().item(), rel=1e-6)
    assert loss.item() == pytest.approx(math.log(50), rel=0.05)  # it has learnt nothing yet
    assert model(idx)[1] is None


def test_no_position_sees_a_later_one(model) -> None:
    idx = torch.randint(50, (1, 12))
    changed = idx.clone()
    changed[0, 8:] = (changed[0, 8:] + 1) % 50
    before, after = model(idx)[0], model(changed)[0]
    assert before[0, :8].equal(after[0, :8])
    assert (before[0, 8:] != after[0, 8:]).any(dim=-1).all()


def test_the_head_is_the_token_embedding_and_every_parameter_learns(model) -> None:
    assert model.head.weight is model.tokens.weight
    assert "head.weight" not in dict(model.named_parameters())
    model(torch.randint(50, (2, 12)), torch.randint(50, (2, 12)))[1].backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []


def test_what_writes_to_the_residual_stream_starts_smaller(model_file) -> None:
    torch.manual_seed(0)
    block = model_file.GPT(model_file.GPTConfig(50, 12, 8, 2, 64)).blocks[0]
    assert block.mlp[0].weight.std().item() == pytest.approx(0.02, rel=0.1)
    for layer in (block.mlp[2], block.attention.output):
        assert layer.weight.std().item() == pytest.approx(0.02 / 4, rel=0.1)


def test_dropout_works_in_training_only(model_file) -> None:
    torch.manual_seed(0)
    model = model_file.GPT(model_file.GPTConfig(50, 12, 2, 2, 16, dropout=0.5))
    idx = torch.randint(50, (1, 12))
    assert not model(idx)[0].equal(model(idx)[0])
    model.eval()
    assert model(idx)[0].equal(model(idx)[0])


def test_heads_must_divide_the_width(model_file) -> None:
    with pytest.raises(ValueError, match="width 10 is not divisible by 3 heads"):
        model_file.GPTConfig(heads=3, width=10)
