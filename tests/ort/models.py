"""Whole models of transformers on ONNX Runtime, compared with eager, in a worker of the pool."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from tests.support.parity import ZERO
from tests.support.zoo import ZOO, double, lift_loss_cast

VOCABULARY = 96
Made = tuple[nn.Module, dict[str, Tensor]]

_SMALL: Mapping[str, Any] = MappingProxyType(
    {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "max_position_embeddings": 40,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "initializer_range": 0.15,
    }
)


def _tokens() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, VOCABULARY, (4, 16), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, 10:] = 0
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "labels": ids.masked_fill(torch.rand(ids.shape, generator=generator) < 0.7, -100),
    }


def _masked(model: Any, config: Any) -> Made:
    torch.manual_seed(4)
    return model(config(**_SMALL)), _tokens()


def _zoo(name: str) -> Made:
    """A model of the zoo, with two layers where it has four: more show nothing else."""
    model, batch, _ = ZOO[name].build()
    assert isinstance(batch, dict)
    for module in list(model.modules()):
        for key, layers in module.named_children():
            if isinstance(layers, nn.ModuleList) and len({type(m) for m in layers}) == 1:
                setattr(module, key, layers[:2] if len(layers) > 3 else layers)
    return model, batch


MODELS: Mapping[str, Callable[[], Made]] = MappingProxyType(
    {
        "bert classification": lambda: _zoo("bert"),
        "bert masked": lambda: _masked(transformers.BertForMaskedLM, transformers.BertConfig),
        "gpt2": lambda: _zoo("gpt2"),
        "t5": lambda: _zoo("t5"),
        "vit": lambda: _zoo("vit"),
        "roberta": lambda: _masked(transformers.RobertaForMaskedLM, transformers.RobertaConfig),
    }
)


def run_model(name: str, dtype: str) -> dict[str, Any]:
    """One forward and backward with ort="all" and in eager.

    Returns relative errors of the loss and of the worst gradient (mathematical zeros by the size of
    the model's largest gradient), coverage, and how many regions and distinct models there are.
    """
    import graphaccel

    model, batch = MODELS[name]()
    model.train()
    if dtype == "float64":
        model, batch = double(model, batch)
    with lift_loss_cast() if dtype == "float64" else contextlib.nullcontext():
        true = model(**batch).loss
        true.backward()
        wanted = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
        optimizer = torch.optim.AdamW(model.parameters())
        model, _ = graphaccel.optimize(model, optimizer, devices=1, ort="all")
        loss = model(**batch).loss
        loss.backward()
    floor = ZERO[dtype] * max(g.abs().max().item() for g in wanted.values())
    worst = 0.0
    for n, p in model.named_parameters():
        if n in wanted:
            size = max(wanted[n].abs().max().item(), floor)
            error = (p.grad - wanted[n]).abs().max().item()
            # A gradient that is zero but for rounding is compared with the floor.
            worst = max(worst, error / size if size > floor else ZERO[dtype] * error / floor)
    report = model.graphaccel.plan.prediction.ort
    return {
        "loss": abs(loss.item() - true.item()) / abs(true.item()),
        "gradient": worst,
        "coverage": report.placed / report.nodes,
        "regions": len(report.regions),
        "distinct": len({r.key for r in report.regions}),
        "declined": [(d.op, d.reason) for d in report.declined],
        "sessions": model.graphaccel.compiler.regions.sessions,
    }


def sizes_of_batches() -> dict[str, Any]:
    """A model in float64 on batches of 4, 2, 3 and 4 rows: the largest relative error of loss and
    gradients with each, and how many sessions there are after each."""
    import graphaccel

    model, batch, _ = ZOO["gpt"].build()
    model, batch = double(model, batch)
    batches = [{k: v[:n] for k, v in batch.items()} for n in (4, 2, 3, 4)]

    def step(given: Any) -> dict[str, Tensor]:
        loss = model(**given)
        loss.backward()
        found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
        return {"": loss.detach(), **found}

    true = [step(b) for b in batches]
    model = graphaccel.optimize(model, devices=1, example_batch=batches[0], ort="all")
    errors, sessions = [], []
    for given, wanted in zip(batches, true, strict=True):
        got = step(given)
        assert got.keys() == wanted.keys()
        errors.append(
            max(float((got[n] - w).abs().max() / w.abs().max()) for n, w in wanted.items())
        )
        sessions.append(model.graphaccel.compiler.regions.sessions)
    return {"errors": errors, "sessions": sessions}
