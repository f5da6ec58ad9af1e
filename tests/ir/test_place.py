"""Graphs are of a CPU's ops wherever the model lies, and put on their device when they are bound;
attention's form for GPUs. The meta device stands in for one; numbers are those of what is spelled
out."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import fx, nn

from graphaccel.capture.batch import Batch
from graphaccel.capture.stepgraph import capture
from graphaccel.compat.torch import pytree
from graphaccel.compat.torch.modes import TorchDispatchMode
from graphaccel.compiler.device_move import on_device
from graphaccel.compiler.model import as_batch
from graphaccel.ir.place import place
from graphaccel.kernels.ops import attention_cuda as gpu

aten = torch.ops.aten
_CPU = aten._scaled_dot_product_flash_attention_for_cpu
_CPU_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward


def _given(dtype: torch.dtype, heads: int = 4, groups: int = 4, width: int = 8) -> list[Any]:
    generator = torch.Generator().manual_seed(1)

    def made(h: int, s: int) -> torch.Tensor:
        return torch.randn(2, s, h, width, generator=generator).to(dtype).transpose(1, 2)

    return [made(heads, 7), made(groups, 7), made(groups, 7)]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_attention_spelled_out_gives_what_the_cpu_gives(masked: bool, causal: bool) -> None:
    if masked and causal:
        pytest.skip("a CPU takes a mask or causality")
    q, k, v = _given(torch.float64)
    mask = torch.randn(2, 1, 7, 7, dtype=torch.float64) if masked else None
    right = _CPU(q, k, v, 0.0, causal, attn_mask=mask, scale=0.3)
    made = gpu.attention(q, k, v, 0.0, causal, attn_mask=mask, scale=0.3)
    for a, b in zip(made, right, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
        assert a.stride() == b.stride()
    grad = torch.randn(right[0].shape, dtype=torch.float64)
    slopes = _CPU_BACKWARD(grad, q, k, v, *right, 0.0, causal, attn_mask=mask, scale=0.3)
    ours = gpu.attention_backward(grad, q, k, v, *made, 0.0, causal, attn_mask=mask, scale=0.3)
    for a, b in zip(ours, slopes, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
        assert a.stride() == b.stride()


def test_grouped_queries_have_the_gradients_of_their_groups() -> None:
    q, k, v = (t.requires_grad_(True) for t in _given(torch.float64, heads=4, groups=2))
    y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    grad = torch.randn_like(y)
    right = torch.autograd.grad(y, (q, k, v), grad)
    with torch.no_grad():
        made = gpu.attention(q, k, v, 0.0, True)
        torch.testing.assert_close(made[0], y.detach(), rtol=1e-12, atol=1e-12)
        ours = gpu.attention_backward(grad, q, k, v, *made, 0.0, True)
    for a, b in zip(ours, right, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


KINDS = [
    pytest.param(torch.bfloat16, None, "flash", id="bf16"),
    pytest.param(torch.float16, None, "flash", id="fp16"),
    pytest.param(torch.bfloat16, (2, 1, 7, 7), "efficient", id="bf16-mask"),
    pytest.param(torch.float32, None, "efficient", id="fp32"),
    pytest.param(torch.float32, (1, 4, 7, 7), "efficient", id="fp32-mask"),
    pytest.param(torch.float64, None, "", id="fp64"),
]


@pytest.mark.parametrize(("dtype", "mask", "kernel"), KINDS)
def test_kernels_are_called_with_what_they_take(
    dtype: torch.dtype, mask: tuple[int, ...] | None, kernel: str
) -> None:
    """By tensors without data: shapes, dtypes and layout are those that a CPU gives."""
    seen: list[str] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            if "attention" in str(func):
                seen.append(str(func))
            return func(*args, **(kwargs or {}))

    def run(device: str, forward: Any, backward: Any) -> list[torch.Tensor]:
        q, k, v = (
            torch.zeros(2, 7, 4, 8, dtype=dtype, device=device).transpose(1, 2) for _ in range(3)
        )
        bias = None if mask is None else torch.zeros(mask, dtype=dtype, device=device)
        made = forward(q, k, v, 0.0, False, attn_mask=bias, scale=0.5)
        grad = torch.empty_like(made[0])
        slopes = backward(grad, q, k, v, *made, 0.0, False, attn_mask=bias, scale=0.5)
        return [*made, *slopes]

    right = run("cpu", _CPU, _CPU_BACKWARD)
    with Watch():
        made = run("meta", gpu.attention, gpu.attention_backward)
    for a, b in zip(made, right, strict=True):
        assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())
    assert len(seen) == (2 if kernel else 0)
    assert all(kernel in name for name in seen)


def test_kernels_read_whole_rows() -> None:
    plain = torch.zeros(2, 7, 4, 8, dtype=torch.bfloat16).transpose(1, 2)
    assert gpu.readable(plain) is plain
    for odd in (
        plain[:1].expand(2, -1, -1, -1),
        torch.zeros(2, 4, 7, 11, dtype=torch.bfloat16)[..., :8],
        torch.zeros(2, 4, 8, 8, dtype=torch.bfloat16).transpose(2, 3),
        torch.zeros(2 * 4 * 7 * 8 + 1, dtype=torch.bfloat16)[1:].view(2, 4, 7, 8),
    ):
        read = gpu.readable(odd)
        assert read.is_contiguous()
        assert read.storage_offset() == 0


def test_the_op_gets_its_kernels_once() -> None:
    assert gpu.attention_on_gpu() is gpu.attention_on_gpu()


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 16)
        self.places = nn.Embedding(8, 16)
        self.head = nn.Linear(8, 50)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        q = x.view(*x.shape[:2], 2, 8).transpose(1, 2)
        y = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
        return nn.functional.cross_entropy(self.head(y.sum(1)).flatten(0, 1), labels.flatten())


def _on(device: str) -> tuple[nn.Module, Batch]:
    model = _Model()
    for module in model.modules():
        for name, p in module.named_parameters(recurse=False):
            setattr(module, name, nn.Parameter(torch.empty(p.shape, device=device)))
    ids = torch.empty(4, 8, dtype=torch.long, device=device)
    return model, as_batch((ids, ids))


def test_a_model_on_another_device_is_the_same_graph() -> None:
    """Fingerprint and all: a plan that was made on a laptop holds. The device that has no data
    stands in: attention is told from its device there, too."""
    there, here = capture(*_on("meta")), capture(*_on("cpu"))
    assert there.text() == here.text()
    assert there.fingerprint == here.fingerprint


def test_a_graph_runs_where_it_is_put() -> None:
    """Every tensor that it makes, and what it gives, lies there, as its notes say."""
    model, batch = _on("cpu")
    graph = copy.deepcopy(capture(model, batch).graph)
    device = torch.device("meta")
    assert place(graph, device)
    graph.recompile()
    placeholders = [n.meta["val"] for n in graph.graph.nodes if n.op == "placeholder"]
    assert {v.device for v in placeholders} == {device}
    given = [torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device=device)
             for v in placeholders]  # fmt: skip
    made = pytree.tree_leaves(fx.Interpreter(graph).boxed_run(given))
    assert {t.device for t in made if isinstance(t, torch.Tensor)} == {device}


def test_a_model_without_room_for_its_gradients_is_not_moved_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, moved = nn.Linear(63, 64), []
    monkeypatch.setattr(nn.Module, "to", lambda _, device: moved.append(device))
    device, size = torch.device("cuda", 0), 4 * 64 * 64
    for room, places in ((2 * size, [device]), (2 * size - 1, [])):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _, room=room: (room, 1 << 40))
        with on_device(model, device):
            assert moved == places
        moved.clear()
