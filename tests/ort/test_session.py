"""Running regions: whose memory is read and written, which sessions there are, what fails."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnxruntime
import pytest
import torch
from torch import Tensor, fx

from graphaccel.compat.torch.fakes import FakeTensorMode
from graphaccel.errors import OrtFailed
from graphaccel.ir.values import propagate
from graphaccel.ort.kernels import Kernels
from graphaccel.ort.partition import fx_graph
from graphaccel.ort.session import Opened, Region, Sessions, session_options
from graphaccel.ort.translate import translate

aten = torch.ops.aten


def product(kernels: Kernels, turned: bool = False) -> tuple[Any, fx.GraphModule, list[Tensor]]:
    """relu(x w) as a model, as a graph, and tensors for it; `turned`: w lies transposed."""
    graph = fx.Graph()
    x, w = graph.placeholder("x"), graph.placeholder("w")
    mm = graph.call_function(aten.mm.default, (x, w))
    relu = graph.call_function(aten.relu.default, (mm,))
    graph.output([mm, relu])
    module = fx.GraphModule({}, graph)
    tensors = [torch.randn(8, 4), torch.randn(6, 4).t() if turned else torch.randn(4, 6)]
    mode = FakeTensorMode()
    propagate(module, [mode.from_tensor(t) for t in tensors])
    values = {n: n.meta["val"] for n in (x, w)}
    return translate([mm, relu], values, [mm, relu], kernels), module, tensors


class Recorder:
    """An I/O binding that notes the pointers it is given."""

    def __init__(self, binding: Any) -> None:
        self.binding = binding
        self.pointers: dict[str, int] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.binding, name)

    def bind_input(self, name: str, *rest: Any) -> None:
        self.pointers[name] = rest[-1]
        self.binding.bind_input(name, *rest)

    def bind_output(self, name: str, *rest: Any) -> None:
        self.pointers[name] = rest[-1]
        self.binding.bind_output(name, *rest)


class RecordedSessions(Sessions):
    """Sessions whose last I/O binding is a `Recorder`."""

    recorder: Recorder

    def get(self, *key: Any) -> Opened:
        opened = super().get(*key)

        def bind() -> Recorder:
            self.recorder = Recorder(opened.session.io_binding())
            return self.recorder

        session = SimpleNamespace(
            io_binding=bind,
            run_with_iobinding=lambda own: opened.session.run_with_iobinding(own.binding),
        )
        return replace(opened, session=session)


@pytest.mark.parametrize("turned", [False, True])
def test_nothing_is_copied(kernels: Kernels, turned: bool) -> None:
    model, module, tensors = product(kernels, turned)
    sessions = RecordedSessions(threads=1)
    region = Region(model, sessions, "a test")
    region(*tensors)
    results = region(*tensors)
    named = {"i0": tensors[0], "i1": tensors[1], "o0": results[0], "o1": results[1]}
    assert sessions.recorder.pointers == {n: t.data_ptr() for n, t in named.items()}
    bound = sessions.recorder.get_outputs()
    assert [o.data_ptr() for o in bound] == [r.data_ptr() for r in results]
    torch.testing.assert_close(results, module(*tensors))


def test_what_lies_otherwise_than_expected_is_still_right(kernels: Kernels) -> None:
    model, module, tensors = product(kernels)
    tensors[1] = tensors[1].t().contiguous().t()
    torch.testing.assert_close(
        Region(model, Sessions(threads=1), "a test")(*tensors), module(*tensors)
    )


def test_equal_models_share_a_session(kernels: Kernels) -> None:
    sessions = Sessions(threads=1)
    for _ in range(2):
        model, _, tensors = product(kernels)
        Region(model, sessions, "a test")(*tensors)
    assert len(sessions) == 1
    other, _, tensors = product(kernels, turned=True)
    Region(other, sessions, "a test")(*tensors)
    assert len(sessions) == 2


def test_fake_tensors_need_no_session(kernels: Kernels) -> None:
    model, _, tensors = product(kernels)
    sessions = Sessions(threads=1)
    mode = FakeTensorMode()
    with mode:
        results = Region(model, sessions, "a test")(*(mode.from_tensor(t) for t in tensors))
    assert [tuple(r.shape) for r in results] == [(8, 6), (8, 6)]
    assert len(sessions) == 0


def test_threads_sleep_while_torch_computes() -> None:
    options = session_options(onnxruntime, 3)
    assert options.intra_op_num_threads == 3
    assert options.get_session_config_entry("session.intra_op.allow_spinning") == "0"
    assert not options.enable_cpu_mem_arena


def test_a_session_that_can_not_be_built(kernels: Kernels) -> None:
    model, _, tensors = product(kernels)
    broken = replace(model, content=model.content.replace(b"Relu", b"Rely"), key="broken")
    with pytest.raises(OrtFailed) as caught:
        Region(broken, Sessions(threads=1), "h.3 (forward)")(*tensors)
    error = caught.value
    assert (error.action, error.region, error.op) == ("build", "h.3 (forward)", "aten.relu")
    assert Path(error.path).read_bytes() == broken.content
    assert "Rely" in error.cause


def test_a_session_that_does_not_run(kernels: Kernels) -> None:
    model, _, tensors = product(kernels)
    tensors[0] = torch.randn(3, 4)
    wrong = (replace(model.inputs[0], shape=(3, 4)), model.inputs[1])
    with pytest.raises(OrtFailed) as caught:
        Region(replace(model, inputs=wrong), Sessions(threads=1), "h.3 (forward)")(*tensors)
    assert caught.value.action == "run"


def test_torch_takes_over_where_that_was_asked_for(
    kernels: Kernels, caplog: pytest.LogCaptureFixture
) -> None:
    model, module, tensors = product(kernels)
    broken = replace(model, content=model.content.replace(b"Relu", b"Rely"), key="broken")
    nodes = [n for n in module.graph.nodes if n.op == "call_function"]
    inputs = [n for n in module.graph.nodes if n.op == "placeholder"]
    spare = fx_graph(nodes, inputs, nodes)
    region = Region(broken, Sessions(threads=1), "h.3 (forward)", spare)
    with caplog.at_level(logging.WARNING, "graphaccel.ort"):
        for _ in range(2):
            torch.testing.assert_close(region(*tensors), module(*tensors))
    (record,) = caplog.records
    assert "GA803" in record.getMessage()


def scaled(kernels: Kernels, rows: int) -> tuple[Any, fx.GraphModule, list[Tensor]]:
    """A mean over rows, taken of x in another shape: its sizes are in a shape and in a number."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    view = graph.call_function(aten.view.default, (x, [2 * rows, 2]))
    total = graph.call_function(aten.mul.Tensor, (view, 1 / rows))
    graph.output([total])
    module = fx.GraphModule({}, graph)
    tensors = [torch.randn(rows, 4)]
    propagate(module, [FakeTensorMode().from_tensor(t) for t in tensors])
    return translate([view, total], {x: x.meta["val"]}, [total], kernels), module, tensors


def test_other_sizes_share_a_session_and_nothing_else_does(kernels: Kernels) -> None:
    sessions = Sessions(threads=1)
    counts = []
    for rows in (4, 6, 5, 4, 7):
        model, module, tensors = scaled(kernels, rows)
        region = Region(model, sessions, "h.0 (forward)")
        torch.testing.assert_close(region(*tensors), list(module(*tensors)))
        counts.append(len(sessions))
    assert counts == [1, 2, 2, 2, 2]
    model, module, tensors = scaled(kernels, 3)  # another part of the model, which has its own
    Region(model, sessions, "h.1 (forward)")(*tensors)
    assert len(sessions) == 3


def test_what_was_thought_to_be_fixed_can_differ_later(kernels: Kernels) -> None:
    """Of 3 and 2 rows, a width of 4 looks fixed; it is not, and the session is made again."""
    sessions = Sessions(threads=1)
    for rows, width in ((3, 4), (2, 4), (2, 6)):
        graph = fx.Graph()
        x = graph.placeholder("x")
        view = graph.call_function(aten.view.default, (x, [width, rows]))
        graph.output([view])
        module = fx.GraphModule({}, graph)
        tensor = torch.randn(rows, width)
        propagate(module, [FakeTensorMode().from_tensor(tensor)])
        model = translate([view], {x: x.meta["val"]}, [view], kernels)
        torch.testing.assert_close(Region(model, sessions, "h")(tensor), list(module(tensor)))
    assert len(sessions) == 2
