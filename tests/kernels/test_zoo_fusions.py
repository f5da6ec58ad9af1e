"""Which fusions are found in the zoo's models, with attention by torch and spelled out, in float32
and under autocast; and that gradients stay what they are."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from graphaccel.capture.batch import as_call, flatten_call
from graphaccel.capture.stepgraph import StepGraph, capture
from graphaccel.kernels.registry import enabled, fusion_named
from graphaccel.passes.fusion.fuse import find_sites, fuse
from graphaccel.passes.lower_precision import lower_precision
from graphaccel.planner.plan.plan import Plan
from tests.kernels.test_fuse import AUTOCAST
from tests.support.zoo import ALL, double, lift_loss_cast

# Norms behind a sum are one with it where both are of one block: the second of a block that begins
# with a norm, and both of BERT's.
GPT = {"add_layer_norm": 4, "layer_norm": 5, "linear_cross_entropy": 1}
CLASSES = {"add_layer_norm": 4, "layer_norm": 5, "bias_gelu": 4, "cross_entropy": 1}
BERT = {"add_layer_norm": 8, "bias_gelu": 4, "embedding_layer_norm": 1, "cross_entropy": 1}
BART = {"add_layer_norm": 15, "bias_gelu": 6, "embedding_layer_norm": 2, "cross_entropy": 1}
T5 = {"add_rms_norm": 9, "rms_norm": 8, "linear_cross_entropy": 1}
SWIN = {"add_layer_norm": 6, "bias_gelu": 4, "layer_norm": 5, "cross_entropy": 1}
SPEECH = {"add_layer_norm": 9, "layer_norm": 1, "bias_gelu": 4, "cross_entropy": 1}
LLAMA = {
    "add_rms_norm": 4, "rms_norm": 5, "rotary": 8, "swiglu": 4, "linear_cross_entropy": 1
}  # fmt: skip
# What is found with attention by torch; and besides with attention spelled out, in float32 and
# under autocast: a learned mask is not for torch's attention in 16 bits.
FOUR = {"attention": 4}
FOUND: dict[str, tuple[dict[str, int], dict[str, int], dict[str, int]]] = {
    "gpt": ({**GPT, "bias_gelu": 4}, {}, {}),
    "gpt2": ({**GPT, "bias_gelu_tanh": 4}, FOUR, FOUR),
    "bert": (BERT, FOUR, FOUR),
    "t5": (T5, {"attention": 9}, {"attention": 3, "scale_mask_softmax": 6}),
    "bart": (BART, {"attention": 9}, {"attention": 9}),
    "vit": (CLASSES, FOUR, FOUR),
    "swin": (SWIN, FOUR, {}),
    "llama": (LLAMA, FOUR, FOUR),
    "mixtral": (LLAMA, FOUR, FOUR),
    "wav2vec2": (SPEECH, FOUR, FOUR),
    "resnet": ({"cross_entropy": 1}, {}, {}),
}
OWN = ("gpt", "resnet")  # no attention, or no choice of it


@cache
def captured(name: str, spelled_out: bool, wide: bool) -> tuple[StepGraph, Any, Any]:
    model, batch, loss = ALL[name].build()
    if spelled_out:
        model.set_attn_implementation("eager")
    if wide:
        model, batch = double(model, batch)
    with lift_loss_cast() if wide else nullcontext():
        step = capture(model, flatten_call(*as_call(batch)), loss)
    return step, model, batch


def counts(step: StepGraph) -> dict[str, int]:
    _, sites = find_sites(step, tuple(fusion_named(n) for n in enabled("auto", "cuda")))
    return dict(Counter(s.fusion.name for s in sites))


def gradients(step: StepGraph, model: Any, batch: Any) -> dict[tuple[str, str], Tensor]:
    """What the joint graph gives for the model's own weights, by what it is."""
    leaves = flatten_call(*as_call(batch)).leaves
    held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    held |= step.forward.constants
    values = [leaves[i.leaf] if i.kind == "batch" else held[i.name].detach() for i in step.inputs]
    made = step.graph(*values)
    return {
        (o.kind, o.name): v
        for o, v in zip(step.outputs, made, strict=True)
        if o.kind in ("loss", "gradient") and isinstance(v, Tensor)
    }


def autocast(step: StepGraph) -> StepGraph:
    return lower_precision(step, Plan(1, precision=AUTOCAST))


@pytest.mark.parametrize("name", FOUND)
def test_every_fusion_is_found_where_a_reader_sees_it(name: str) -> None:
    step, _, _ = captured(name, False, False)
    assert counts(step) == FOUND[name][0]
    assert counts(autocast(step)) == FOUND[name][0]


@pytest.mark.parametrize("name", [n for n in FOUND if n not in OWN])
def test_and_attention_where_it_is_spelled_out(name: str) -> None:
    step, _, _ = captured(name, True, False)
    common, plain, low = FOUND[name]
    assert counts(step) == {**common, **plain}
    assert counts(autocast(step)) == {**common, **low}


@pytest.mark.parametrize("name", FOUND)
def test_and_changes_no_gradient(name: str) -> None:
    step, model, batch = captured(name, name not in OWN, True)
    fused = fuse(step, Plan(1, fusions=enabled("auto", "cuda"), outputs="loss"))
    before, after = (gradients(s, model, batch) for s in (step, fused))
    assert len(after) > 1
    assert after.keys() == before.keys()
    for place, value in after.items():
        largest = before[place].abs().max().item()
        torch.testing.assert_close(value, before[place], rtol=1e-9, atol=1e-11 * max(largest, 1))
