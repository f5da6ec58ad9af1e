"""What a report says of fused ops, once: which are placed, and whether their kernels run."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import nn

import graphaccel
from graphaccel.report import fused
from graphaccel.report.fused import fusion_notes
from tests.support.captures import captures_of

CALLS = "they run as calls of torch: "


@pytest.mark.parametrize(
    ("device", "gpu", "triton", "reason"),
    [
        ("cpu", False, True, "their kernels are for GPUs"),
        ("cuda", True, False, "Triton, which makes their kernels, is missing"),
        ("cuda", True, True, None),
        ("cuda", False, False, None),  # planned here, run elsewhere
    ],
)
def test_references_that_run_in_place_of_kernels(
    device: str, gpu: bool, triton: bool, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(fused, "has_triton", lambda: triton)
    expected = ("fused ops: rms_norm 2, swiglu 1",)
    expected += () if reason is None else (CALLS + reason,)
    assert fusion_notes({"rms_norm": 2, "swiglu": 1}, device) == expected


def test_what_has_no_kernel_of_its_own_needs_no_gpu() -> None:
    assert fusion_notes({"attention": 3}, "cpu") == ("fused ops: attention 3",)


def gpt2(layers: int) -> nn.Module:
    """Twelve layers are captured as few and repeated."""
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=96, n_positions=32, n_embd=32, n_layer=layers, n_head=2, use_cache=False,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )
    )  # fmt: skip


@pytest.mark.parametrize(
    ("layers", "precision"),
    [(2, None), (12, None), pytest.param(12, "bf16", marks=pytest.mark.release)],
)
@captures_of("notes")
def test_the_report_counts_what_is_placed(layers: int, precision: str | None) -> None:
    ids = torch.randint(0, 96, (4, 16))
    batch = {"input_ids": ids, "labels": ids}
    pins = {"devices": 1, "microbatches": 1, "precision": precision}
    names = ("gelu_tanh", "add_layer_norm")
    plan = graphaccel.plan(gpt2(layers), batch, fusions=names, **pins)
    assert f"fused ops: add_layer_norm {layers}, gelu_tanh {layers}" in plan.notes
    assert [n for n in plan.notes if n.startswith(CALLS)] == [CALLS + "their kernels are for GPUs"]
    bare = graphaccel.plan(gpt2(layers), batch, fusions="rotary", **pins)
    assert "fused ops: none fits; graphaccel explain says why" in bare.notes
    assert not any("fused ops" in n for n in graphaccel.plan(gpt2(layers), batch, **pins).notes)


@pytest.mark.parametrize("layers", [4, 12])
@captures_of("notes")
def test_a_block_that_is_computed_again_keeps_one_tensor(layers: int) -> None:
    """With fused sums and norms as without: what it reads, [512, 32, 32] float32."""
    ids = torch.randint(0, 96, (512, 32))
    batch = {"input_ids": ids, "labels": ids}
    pins = {"devices": 1, "microbatches": 1, "recompute": "all"}
    names = ("add_layer_norm", "layer_norm")

    def kept(count: int) -> int:
        plan = graphaccel.plan(gpt2(count), batch, fusions=names, **pins)
        assert plan.prediction is not None
        return plan.prediction.memory[0].activation

    assert kept(layers) - kept(layers - 2) == 2 * 512 * 32 * 32 * 4
