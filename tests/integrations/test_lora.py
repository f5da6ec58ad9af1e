"""Adapters of peft: a frozen model, a few trained weights, under each plan as on one device."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import (
    AdaLoraConfig,
    LoraConfig,
    PeftModel,
    PromptEncoderConfig,
    get_peft_model,
    get_peft_model_state_dict,
)
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

import graphaccel
from graphaccel.errors import ElsewhereNeeded, PartOfModel
from graphaccel.integrations.transformers import Trainer
from tests.integrations.test_trainer import PLANS, WORDS, Lines, apart, arguments, gpt2
from tests.support.captures import captures_of
from tests.support.pool import Pool

pytestmark = [pytest.mark.multiprocess, pytest.mark.filterwarnings("ignore")]

CLOSE = 1e-6  # the loss of transformers is in float32
ADAPTERS = "adapter_model.safetensors"


def base() -> LlamaForCausalLM:
    torch.manual_seed(0)
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    config = LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, vocab_size=WORDS, **heads
    )
    return LlamaForCausalLM(config).double()


def adapted() -> PeftModel:
    lora = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
    model = get_peft_model(base(), lora).double()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # zero at first, so that A would have no gradient
            torch.nn.init.normal_(parameter, std=0.2)
    return model


def trained(model: Any) -> list[torch.nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def steps(model: Any, optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []
    for row in Lines(3, seed=5).ids:
        rows = torch.stack([row, row.flip(0), row.roll(1), row.roll(2)])
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses


@captures_of("adapters")
def _under(pins: dict[str, Any], folder: str) -> tuple[list[float], float]:
    model = adapted()
    optimizer = torch.optim.AdamW(trained(model), lr=0.05)
    graphaccel.optimize(model, optimizer, devices=2, **pins)
    losses = steps(model, optimizer)
    state = graphaccel.full_state_dict(model)
    if torch.distributed.get_rank() == 0:
        model.save_pretrained(folder, state_dict=state)
    moments = [s[name] for s in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    return losses, sum(t.numel() * t.element_size() for t in moments)


def _plain() -> tuple[list[float], dict[str, torch.Tensor]]:
    model = adapted()
    losses = steps(model, torch.optim.AdamW(trained(model), lr=0.05))
    return losses, get_peft_model_state_dict(model)


@pytest.mark.parametrize("name", PLANS)
def test_losses_and_saved_adapters_are_those_of_one_device(
    pool: Pool, name: str, tmp_path: Path
) -> None:
    expected, adapters = _plain()
    assert max(expected) - min(expected) > 1e-2
    for losses, _ in pool.run(2, _under, PLANS[name], str(tmp_path)):
        assert losses == pytest.approx(expected, abs=CLOSE)
    saved = load_file(tmp_path / ADAPTERS)
    assert saved.keys() == adapters.keys()
    for key, value in adapters.items():
        torch.testing.assert_close(saved[key], value, rtol=1e-5, atol=CLOSE)
    again = PeftModel.from_pretrained(base(), str(tmp_path))
    torch.testing.assert_close(get_peft_model_state_dict(again), saved)


@captures_of("adapters")
def _merged(pins: dict[str, Any]) -> dict[str, torch.Tensor]:
    model = adapted()
    optimizer = torch.optim.AdamW(trained(model), lr=0.05)
    graphaccel.optimize(model, optimizer, devices=2, **pins)
    steps(model, optimizer)
    merged = model.merge_and_unload()
    with pytest.raises(PartOfModel):
        torch.save(merged.state_dict(), os.devnull)
    return graphaccel.full_state_dict(merged)


def test_merged_weights_are_those_of_one_device(pool: Pool) -> None:
    """A model that is no longer optimized, with shards of another's weights."""
    model = adapted()
    steps(model, torch.optim.AdamW(trained(model), lr=0.05))
    expected = model.merge_and_unload().state_dict()
    for state in pool.run(2, _merged, PLANS["zero3"]):
        assert state.keys() == expected.keys()
        for key, value in expected.items():
            torch.testing.assert_close(state[key], value, rtol=1e-5, atol=CLOSE)


def test_memory_is_predicted_for_adapters_only() -> None:
    model = adapted()
    optimizer = torch.optim.AdamW(trained(model), lr=0.05)
    graphaccel.optimize(model, optimizer, devices=1)
    rows = Lines(4, seed=5).ids
    loss = model(input_ids=rows, labels=rows).loss
    loss.backward()
    held = [p for p in model.parameters() if p.grad is not None]
    assert {id(p) for p in held} == {id(p) for p in trained(model)}
    optimizer.step()
    moments = [s[name] for s in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    measured = sum(t.numel() * t.element_size() for t in moments)
    assert measured == 2 * sum(p.numel() * p.element_size() for p in trained(model))
    (predicted,) = model.graphaccel.plan.prediction.memory
    assert predicted.optimizer == measured
    # What is still there after a step: weights, optimizer state, gradients, the batch (twice: as
    # labels, too) and the loss.
    gradients = predicted.phases.save - predicted.parameter - predicted.optimizer
    gradients -= 2 * rows.nbytes + loss.nbytes
    assert gradients == sum(p.grad.nbytes for p in held) == sum(p.nbytes for p in trained(model))


def _fine_tuned(kind: type, folder: str, resume: str | None = None, **more: Any) -> Any:
    transformers.utils.logging.disable_progress_bar()
    trainer = kind(
        model=adapted(),
        args=arguments(folder, eval_strategy="no", load_best_model_at_end=False),
        train_dataset=Lines(40, seed=1),
        **more,
    )
    trainer.train(resume_from_checkpoint=resume)
    rows = trainer.state.log_history
    return [{k: row[k] for k in ("loss", "grad_norm") if k in row} for row in rows if "loss" in row]


@captures_of("adapters")
def _with_trainer(plan: dict[str, Any], root: str) -> tuple[Any, Any, list[str]]:
    history = _fine_tuned(Trainer, f"{root}/planned", optimize=plan)
    torch.distributed.barrier()
    again = _fine_tuned(Trainer, f"{root}/again", f"{root}/planned/checkpoint-2", optimize=plan)
    return history, again, os.listdir(f"{root}/planned/checkpoint-4")


@pytest.mark.release
@pytest.mark.parametrize("name", ["zero3", "pipeline"])
def test_trainer_saves_and_resumes_adapters(pool: Pool, name: str, tmp_path: Path) -> None:
    expected = _fine_tuned(transformers.Trainer, str(tmp_path / "plain"))
    for history, again, files in pool.run(
        2, _with_trainer, PLANS[name], str(tmp_path), timeout_s=300
    ):
        assert apart(expected, history) < CLOSE
        assert apart(expected[2:], again[-2:]) < CLOSE
        assert ADAPTERS in files
        assert "model.safetensors" not in files


def _prompted(kind: type, folder: str, **more: Any) -> None:
    transformers.utils.logging.disable_progress_bar()
    tuning = PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=2, encoder_hidden_size=8)
    trainer = kind(
        model=get_peft_model(base(), tuning).double(),
        args=arguments(folder, eval_strategy="no", load_best_model_at_end=False),
        train_dataset=Lines(40, seed=1),
        **more,
    )
    trainer.train()


@captures_of("prompts")
def _prompted_under(plan: dict[str, Any], folder: str) -> None:
    _prompted(Trainer, folder, optimize=plan)


@pytest.mark.parametrize("name", ["zero3", "pipeline"])
def test_trainer_saves_what_a_prompt_encoder_computes(
    pool: Pool, name: str, tmp_path: Path
) -> None:
    """peft computes it when it saves, from parameters of which a rank has a part."""
    _prompted(transformers.Trainer, str(tmp_path / "plain"))
    pool.run(2, _prompted_under, PLANS[name], str(tmp_path / "planned"), timeout_s=300)
    saved = [
        load_file(tmp_path / kind / f"checkpoint-{step}" / ADAPTERS)["prompt_embeddings"]
        for step in (2, 4)
        for kind in ("plain", "planned")
    ]
    assert (saved[0] - saved[2]).abs().max() > 1e-4
    torch.testing.assert_close(saved[1], saved[0], rtol=0, atol=CLOSE)
    torch.testing.assert_close(saved[3], saved[2], rtol=0, atol=CLOSE)


def _prompts() -> PeftModel:
    torch.manual_seed(3)
    tuning = PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=2, encoder_hidden_size=8)
    return get_peft_model(base(), tuning).double()


@captures_of("prompts")
def _prompts_of_one_rank(plan: dict[str, Any], folder: str) -> None:
    model = _prompts()
    optimizer = torch.optim.AdamW(trained(model), lr=0.05)
    graphaccel.optimize(model, optimizer, **plan)
    steps(model, optimizer)
    state = graphaccel.full_state_dict(model)
    if torch.distributed.get_rank() == 0:
        model.save_pretrained(folder, state_dict=state)


@pytest.mark.parametrize("name", ["zero3", "pipeline"])
def test_one_rank_saves_prompts(pool: Pool, name: str, tmp_path: Path) -> None:
    """The encoder computes them there from the state that it is given: no other rank takes part."""
    model = _prompts()
    steps(model, torch.optim.AdamW(trained(model), lr=0.05))
    expected = get_peft_model_state_dict(model)["prompt_embeddings"]
    pool.run(2, _prompts_of_one_rank, PLANS[name], str(tmp_path), timeout_s=120)
    found = load_file(tmp_path / ADAPTERS)["prompt_embeddings"]
    torch.testing.assert_close(found, expected, rtol=0, atol=CLOSE)


METHODS = {
    "tokens": {"target_modules": ["c_attn"], "trainable_token_indices": [1, 2]},
    "parameters": {"target_modules": [], "target_parameters": ["mlp.c_fc.weight"]},
}
"""Rows of a tied embedding, and a weight that is parametrized for each forward."""


def _by(name: str, **plan: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model = get_peft_model(gpt2(), LoraConfig(r=2, task_type="CAUSAL_LM", **METHODS[name])).double()
    for key, parameter in model.named_parameters():
        if "lora_B" in key:
            torch.nn.init.ones_(parameter)
    optimizer = torch.optim.AdamW(trained(model), lr=0.05)
    if plan:
        graphaccel.optimize(model, optimizer, **plan)
    losses = steps(model, optimizer)
    return losses, graphaccel.full_state_dict(model) if plan else model.state_dict()


@captures_of("methods")
def _by_under(name: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    return _by(name, devices=2, **PLANS["zero3"])


@pytest.mark.parametrize("name", METHODS)
def test_other_weights_than_modules(pool: Pool, name: str) -> None:
    losses, weights = _by(name)
    assert max(losses) - min(losses) > 1e-4
    for found, state in (_by(name, devices=1), *pool.run(2, _by_under, name)):
        assert found == pytest.approx(losses, abs=CLOSE)
        assert state.keys() == weights.keys()
        assert max(float((state[k] - weights[k]).abs().max()) for k in weights) < CLOSE


def _allocated(**plan: Any) -> tuple[list[float], int]:
    """AdaLoRA, which takes ranks away between steps by weights and their gradients: losses, and how
    many are left."""
    ranks = AdaLoraConfig(
        init_r=4, target_r=2, tinit=1, tfinal=1, total_step=5, target_modules=["c_attn"],
        lora_dropout=0.0, fan_in_fan_out=True,
    )  # fmt: skip
    torch.manual_seed(0)
    model = get_peft_model(gpt2(), ranks).double()
    for name, parameter in model.named_parameters():
        if "lora_E" in name:  # zero at first
            torch.nn.init.normal_(parameter)
    optimizer = torch.optim.AdamW(trained(model), lr=0.05)
    if plan:
        graphaccel.optimize(model, optimizer, **plan)
    losses, rows = [], Lines(4, seed=5).ids
    for step in range(5):
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        optimizer.step()
        model.base_model.update_and_allocate(step)
        optimizer.zero_grad()
        losses.append(float(loss))
    state = graphaccel.full_state_dict(model) if plan else model.state_dict()
    return losses, sum(int(state[key].count_nonzero()) for key in state if "lora_E" in key)


@captures_of("ranks")
def _allocated_under(name: str) -> tuple[list[float], int]:
    return _allocated(devices=2, **PLANS[name])


@captures_of("ranks")
def _allocated_elsewhere() -> str:
    with pytest.raises(ElsewhereNeeded) as caught:
        _allocated(devices=2, **PLANS["pipeline"])
    return str(caught.value)


def test_ranks_are_taken_away_as_on_one_device(pool: Pool) -> None:
    losses, left = _allocated()
    assert left == 4
    for found, count in pool.run(2, _allocated_under, "zero3"):
        assert (found, count) == (pytest.approx(losses, abs=CLOSE), left)
    for text in pool.run(2, _allocated_elsewhere):
        assert "GA408" in text


def test_a_parameter_that_the_forward_makes_for_itself() -> None:
    """DoRA of a transposed layer reads `nn.Parameter(weight.T)`: gradients end there."""
    kept = []
    for planned in (False, True):
        dora = LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, use_dora=True)
        model = get_peft_model(gpt2(), dora).double()
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.ones_(parameter)
        optimizer = torch.optim.AdamW(trained(model), lr=0.05)
        if planned:
            graphaccel.optimize(model, optimizer, devices=1)
        kept.append((steps(model, optimizer), [p.detach().clone() for p in trained(model)]))
    (losses, weights), (found, others) = kept
    assert abs(losses[0] - losses[-1]) > 1e-4
    assert found == pytest.approx(losses, abs=CLOSE)
    for weight, other in zip(weights, others, strict=True):
        assert (weight - other).abs().max() < CLOSE
