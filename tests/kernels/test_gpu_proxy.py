"""Launches and bytes of a step, counted without a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks import gpu_proxy
from benchmarks.shared.launches import Launch, launches_of
from benchmarks.tables.gpu_proxy import proxy_table
from graphaccel.ir.parse import parse_graph

ROOT = Path(__file__).parents[2]
GRAPH = """\
%x: f32[4,8] = input
%w: f32[8,8] = input
%t: f32[8,8] = aten.t(%w)
%mm: f32[4,8] = aten.mm(%x, %t)
%add: f32[4,8] = aten.add.Tensor(%mm, %x)
return (%add)
"""


def side(launches: int, moved: int) -> dict[str, Any]:
    return {
        "launches": launches, "bytes": moved, "backward inputs": moved, "synchronising": 0,
        "not recorded": None, "fusions": [],
    }  # fmt: skip


def test_views_are_free_and_products_are_known() -> None:
    product, total = launches_of(parse_graph(GRAPH))
    assert total == Launch("aten::add.Tensor", 3 * 4 * 4 * 8)
    assert product.bytes == 4 * (4 * 8 + 8 * 8 + 4 * 8)
    assert (product.product, total.product) == (True, False)


def test_what_is_in_a_fused_op_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def inside(op: Any) -> Any:
        own = op is torch.ops.aten.add.Tensor
        return (lambda x, y: (x * y).exp()) if own else None

    monkeypatch.setattr("benchmarks.shared.launches.gpu_function", inside)
    module = parse_graph(GRAPH)
    found = launches_of(module, lambda n: n.name == "add")
    assert [k.op for k in found] == ["aten::mul.Tensor", "aten::exp"]


def test_the_full_depth_is_extrapolated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_proxy, "model_of_depth", lambda name: (nn.Identity(), 12))
    counts = [
        {"compile": side(10 + 5 * n, 100 * n), "graphaccel": side(8 + 4 * n, 50 * n)}
        for n in gpu_proxy.DEPTHS
    ]
    row = gpu_proxy.extrapolated("gpt2", counts)
    assert row["compile"]["launches"] == 70
    assert row["graphaccel"]["bytes"] == 600
    assert row["bytes ratio"] == 0.5
    row["host"] = {"eager": 1.0, "graphaccel": 0.5}
    assert "recorded   host 0.50 of eager" in gpu_proxy.shown(row)
    result = {
        "device": "h200", "pins": {"precision": "bf16"}, "machine": {"torch": "2"}, "rows": [row],
    }  # fmt: skip
    lines = proxy_table(result).splitlines()
    assert lines[3].startswith("| gpt2 | graphaccel | 56 | 0.0 GB | 0.50 |")


def test_a_model_is_shortened() -> None:
    model, whole = gpu_proxy.model_of_depth("t5-base", 2)
    assert whole == 12
    assert [len(s.block) for s in (model.encoder, model.decoder)] == [2, 2]
    assert all(p.is_meta for p in model.parameters())


INDUCTOR = """
import json, torch
from benchmarks.shared.pretend_gpu import compiled_piece
from graphaccel.ir.parse import parse_graph
before = torch.cuda.is_available
module = parse_graph({graph!r})
found = compiled_piece(module, backward=False)
assert torch.cuda.is_available is before
print(json.dumps([(k.op, k.bytes) for k in found]))
"""


def test_inductor_fuses_for_a_gpu_that_is_not_there() -> None:
    graph = GRAPH.replace("return (%add)", "%exp: f32[4,8] = aten.exp(%add)\nreturn (%exp)")
    code = INDUCTOR.format(graph=graph)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (product, fused) = json.loads(done.stdout)
    assert product[0] in ("aten::mm", "aten::addmm")
    assert fused == ["", 3 * 4 * 4 * 8]
    assert not torch.cuda.is_initialized()
