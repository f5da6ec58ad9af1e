"""What a region allocates, measured by the kernel, against the prediction."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, fx, nn

import graphaccel
from graphaccel.compat.torch.fakes import FakeTensorMode
from graphaccel.ir.values import propagate
from graphaccel.ort.kernels import installed
from graphaccel.ort.session import Region, Sessions
from graphaccel.ort.translate import translate
from graphaccel.runtime.host_memory.reuse import KEEP
from tests.support.pool import Pool

aten = torch.ops.aten
ROWS, WIDTH = 2048, 512
_MMAP_THRESHOLD, _MMAP_MAX = -3, -4  # names of mallopt
_STATUS, _REFERENCES = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def peak_of(run: Callable[[], Any]) -> int:
    """Bytes of memory that a call uses at most beyond what was in use: the kernel's own high-water
    mark, which is set back first. Large blocks are given back to the kernel at once."""
    library = ctypes.CDLL(None)
    assert library.mallopt(_MMAP_MAX, 1 << 16) == 1  # a step before may have had pages kept
    assert library.mallopt(_MMAP_THRESHOLD, 1 << 20) == 1
    library.malloc_trim(0)
    _REFERENCES.write_text("5")
    before = _status("VmRSS")
    run()
    return _status("VmHWM") - before


def _status(name: str) -> int:
    line = next(x for x in _STATUS.read_text().splitlines() if x.startswith(f"{name}:"))
    return int(line.split()[1]) << 10


def forward(graph: fx.Graph) -> list[fx.Node]:
    """gelu(x w) w' + x: two wide values alive at once."""
    x, w, v = (graph.placeholder(n) for n in "xwv")
    wide = graph.call_function(aten.mm.default, (x, w))
    active = graph.call_function(aten.gelu.default, (wide,))
    narrow = graph.call_function(aten.mm.default, (active, v))
    return [graph.call_function(aten.add.Tensor, (narrow, x))]


def attention(graph: fx.Graph) -> list[fx.Node]:
    """softmax(x xᵀ) x."""
    x = graph.placeholder("x")
    scores = graph.call_function(aten.mm.default, (x, graph.call_function(aten.t.default, (x,))))
    weights = graph.call_function(aten._softmax.default, (scores, -1, False))
    return [graph.call_function(aten.mm.default, (weights, x))]


def scratch_peak(make: Callable[[fx.Graph], list[fx.Node]]) -> tuple[int, int]:
    """(predicted, measured) bytes of a region: of what it is given and returns, and its scratch."""
    torch.set_num_threads(1)
    found = installed()
    assert found is not None
    graph = fx.Graph()
    graph.output(make(graph))
    module = fx.GraphModule({}, graph)
    shapes = {"x": (2048, 512), "w": (512, 4096), "v": (4096, 512)}
    nodes = [n for n in graph.nodes if n.op == "placeholder"]
    tensors = [torch.randn(shapes[n.name]) for n in nodes]
    mode = FakeTensorMode()
    propagate(module, [mode.from_tensor(t) for t in tensors])
    calls = [n for n in graph.nodes if n.op == "call_function"]
    values = {n: n.meta["val"] for n in nodes}
    model = translate(calls, values, list(graph.output_node().args[0]), found)
    assert model.scratch > 0
    region = Region(model, Sessions(threads=1), "a test")
    results: list[torch.Tensor] = []
    region(*tensors)
    peak = peak_of(lambda: results.extend(region(*tensors)))
    given = sum(t.nbytes for t in tensors)
    return given + sum(r.nbytes for r in results) + model.scratch, given + peak


@pytest.fixture
def fresh() -> Iterator[Pool]:
    """A process in which no earlier test has left free memory that a region would be given."""
    workers = Pool()
    yield workers
    workers.close()


@pytest.mark.multiprocess
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("make", [forward, attention])
def test_scratch(fresh: Pool, make: Callable[[fx.Graph], list[fx.Node]]) -> None:
    ((predicted, measured),) = fresh.run(1, scratch_peak, make)
    assert measured == pytest.approx(predicted, rel=0.03)


class Block(nn.Module):
    """A wide layer, its activation, and back."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def step_peak() -> tuple[int, int]:
    """(predicted, measured) peak of a step with ort="all": bytes of tensors, those inside ONNX
    Runtime included. Measured: tensors that exist between steps, and what the kernel counts more
    during a step."""
    torch.set_num_threads(1)
    peak_of(lambda: None)  # from here on what is freed does not stay in use
    x = torch.randn(ROWS, WIDTH)
    with patch.dict(os.environ, {KEEP: "0"}):
        model = graphaccel.optimize(Net(), devices=1, example_batch=(x,), ort="all")
    (rank,) = model.graphaccel.plan.prediction.memory

    def step() -> None:
        model(x).backward()

    for _ in range(2):
        step()
        model.zero_grad()
    held_bytes = x.nbytes + sum(p.nbytes for p in model.parameters())
    return rank.peak - rank.other, held_bytes + peak_of(step)


@pytest.mark.multiprocess
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_peak_of_a_step(pool: Pool) -> None:
    ((predicted, measured),) = pool.run(1, step_peak)
    assert measured == pytest.approx(predicted, rel=0.03)
