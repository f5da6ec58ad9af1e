"""The `com.microsoft` kernels that could replace standard operators, one by one: torch, standard
operators and the kernel, timed in turn in one process.

    python -m benchmarks.ort_kernels

A translation takes a kernel only if it is faster here (`graphaccel/ort/ops/`). Results:
benchmarks/results/ort_kernels.json; a kernel that the installed build lacks is left out.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import operator
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx

from benchmarks.shared.common import RESULTS, machine
from graphaccel.compat.torch.fakes import FakeTensorMode
from graphaccel.ir.values import propagate
from graphaccel.ort.builder import MICROSOFT, Builder, Declined, OnnxValue
from graphaccel.ort.kernels import PLAIN, Kernels, installed
from graphaccel.ort.session import Region, Sessions
from graphaccel.ort.translate import Port, RegionModel, translate

aten = torch.ops.aten
ROWS, WIDTH, WIDE, HEADS, TOKENS, VOCABULARY = 1024, 256, 1024, 32, 128, 1024
LEAST_SECONDS = 0.02


@dataclass(frozen=True)
class Case:
    """A call, and what a kernel would do in its place.

    arguments: of the call; tensors become inputs. kernel: the same with com.microsoft. take: which
    results of the call are compared.
    """

    target: Any  # None: the two calls from the loss to the logits
    arguments: Callable[[], tuple[Any, ...]]
    kernel: Callable[..., list[OnnxValue]]
    keywords: Mapping[str, Any] = field(default_factory=dict)
    take: Sequence[int] = (0,)


def _one(kind: str, **attributes: Any) -> Callable[..., list[OnnxValue]]:
    """The kernel on the tensors of the call, with the result of the first's shape."""

    def kernel(b: Builder, *given: OnnxValue) -> list[OnnxValue]:
        return [b.op(kind, *given, domain=MICROSOFT, **attributes)]

    return kernel


def _layer_norm(
    b: Builder,
    grad: OnnxValue,
    x: OnnxValue,
    mean: OnnxValue,
    scale: OnnxValue,
    weight: OnnxValue,
    bias: OnnxValue,
) -> list[OnnxValue]:
    results = [(v.shape, v.dtype) for v in (x, weight, weight)]
    given = (grad, x, weight, mean, scale)
    return b.ops("LayerNormalizationGrad", *given, results=results, domain=MICROSOFT, axis=-1)


def _dropout(b: Builder, grad: OnnxValue, mask: OnnxValue) -> list[OnnxValue]:
    return [b.op("DropoutGrad", grad, mask, b.constant(0.1, torch.float32), domain=MICROSOFT)]


def _loss(
    b: Builder, grad: OnnxValue, y: OnnxValue, target: OnnxValue, total: OnnxValue
) -> list[OnnxValue]:
    """From log-probabilities to the gradient of logits: two calls of the graph in one."""
    settings: dict[str, Any] = {"reduction": "mean", "ignore_index": -100}
    name = "SoftmaxCrossEntropyLossGrad"
    return [b.op(name, grad, y, target, shape=y.shape, domain=MICROSOFT, **settings)]


def _embedding(b: Builder, grad: OnnxValue, tokens: OnnxValue) -> list[OnnxValue]:
    shape = (VOCABULARY, WIDTH)
    sizes = b.integers(shape)
    return [b.op("GatherGrad", sizes, tokens, grad, shape=shape, dtype=grad.dtype, domain=MICROSOFT,
                 axis=0)]  # fmt: skip


def _statistics() -> tuple[Any, ...]:
    x, weight, bias = torch.randn(ROWS, WIDTH), torch.randn(WIDTH), torch.randn(WIDTH)
    _, mean, scale = aten.native_layer_norm(x, [WIDTH], weight, bias, 1e-5)
    mask = [True, True, True]
    return torch.randn(ROWS, WIDTH), x, [WIDTH], mean, scale, weight, bias, mask


def _pair(*shape: int, sizes: Sequence[Any] = ()) -> Callable[[], tuple[Any, ...]]:
    return lambda: (torch.randn(*shape), torch.randn(*shape), *sizes)


def _probabilities() -> tuple[Any, ...]:
    y = torch.randn(HEADS, TOKENS, TOKENS).softmax(-1)
    return torch.randn_like(y), y, -1, torch.float32


def _logarithms() -> tuple[Any, ...]:
    y = torch.randn(ROWS, VOCABULARY).log_softmax(-1)
    return torch.randn_like(y), y, -1, torch.float32


def _labelled() -> tuple[Any, ...]:
    y = torch.randn(ROWS, VOCABULARY).log_softmax(-1)
    return torch.ones(()), y, torch.randint(VOCABULARY, (ROWS,)), torch.tensor(float(ROWS))


CASES: Mapping[str, Case] = MappingProxyType(
    {
        "SoftmaxGrad_13": Case(
            aten._softmax_backward_data.default, _probabilities, _one("SoftmaxGrad_13", axis=2)
        ),
        "LogSoftmaxGrad_13": Case(
            aten._log_softmax_backward_data.default, _logarithms, _one("LogSoftmaxGrad_13", axis=1)
        ),
        "LayerNormalizationGrad": Case(
            aten.native_layer_norm_backward.default, _statistics, _layer_norm, take=(0, 1, 2)
        ),
        "GeluGrad": Case(aten.gelu_backward.default, _pair(ROWS, WIDE), _one("GeluGrad")),
        "FastGeluGrad": Case(
            aten.gelu_backward.default,
            _pair(ROWS, WIDE),
            _one("FastGeluGrad"),
            {"approximate": "tanh"},
        ),
        "FastGelu": Case(
            aten.gelu.default,
            lambda: (torch.randn(ROWS, WIDE),),
            _one("FastGelu"),
            {"approximate": "tanh"},
        ),
        "DropoutGrad": Case(
            aten.native_dropout_backward.default,
            lambda: (torch.randn(ROWS, WIDTH), torch.rand(ROWS, WIDTH) > 0.1, 1 / 0.9),
            _dropout,
        ),
        "SoftmaxCrossEntropyLossGrad": Case(None, _labelled, _loss),
        "SigmoidGrad": Case(
            aten.sigmoid_backward.default, _pair(ROWS, WIDE), _one("SigmoidGrad")
        ),
        "TanhGrad": Case(aten.tanh_backward.default, _pair(ROWS, WIDE), _one("TanhGrad")),
        "ReluGrad": Case(
            aten.threshold_backward.default, _pair(ROWS, WIDE, sizes=[0]), _one("ReluGrad")
        ),
        "GatherGrad": Case(
            aten.embedding_dense_backward.default,
            lambda: (
                torch.randn(ROWS, WIDTH),
                torch.randint(VOCABULARY, (ROWS,)),
                VOCABULARY,
                -1,
                False,
            ),
            _embedding,
        ),
    }
)  # fmt: skip


def _graph(case: Case, arguments: tuple[Any, ...]) -> tuple[fx.GraphModule, list[Tensor]]:
    """The call (or calls) as a graph, and its tensors."""
    graph = fx.Graph()
    tensors = [a for a in arguments if isinstance(a, Tensor)]
    nodes = iter([graph.placeholder(f"x{i}") for i in range(len(tensors))])
    given = [next(nodes) if isinstance(a, Tensor) else a for a in arguments]
    if case.target is None:
        grad, y, target, total = given
        inner = graph.call_function(
            aten.nll_loss_backward.default, (grad, y, target, None, 1, -100, total)
        )
        results = [
            graph.call_function(
                aten._log_softmax_backward_data.default, (inner, y, -1, torch.float32)
            )
        ]
    else:
        call = graph.call_function(case.target, tuple(given), dict(case.keywords))
        several = len(case.take) > 1
        results = (
            [graph.call_function(operator.getitem, (call, i)) for i in case.take]
            if several
            else [call]
        )
    graph.output(results)
    module = fx.GraphModule({}, graph)
    mode = FakeTensorMode()
    propagate(module, [mode.from_tensor(t) for t in tensors])
    return module, tensors


def _by_kernel(case: Case, tensors: Sequence[Tensor], kernels: Kernels) -> RegionModel:
    builder = Builder(kernels, training=True)
    given = [OnnxValue(f"i{n}", t.dtype, tuple(t.shape)) for n, t in enumerate(tensors)]
    builder.values |= {v.name: v for v in given}
    made = builder.name_outputs(case.kernel(builder, *given))
    content = builder.model(given, made).SerializeToString(deterministic=True)
    ports = [tuple(Port(v.dtype, v.shape) for v in values) for values in (given, made)]
    return RegionModel(content, hashlib.sha256(content).hexdigest()[:16], *ports, ())


def _timed(sides: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Median seconds of a call, sides in turn."""
    repeats = {}
    for name, run in sides.items():
        run()
        start = time.perf_counter()
        run()
        repeats[name] = max(1, int(LEAST_SECONDS / max(time.perf_counter() - start, 1e-6)))
    times: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds):
        for name in sides if number % 2 == 0 else reversed(sides):
            start = time.perf_counter()
            for _ in range(repeats[name]):
                sides[name]()
            times[name].append((time.perf_counter() - start) / repeats[name])
    return {name: statistics.median(found) for name, found in times.items()}


def row(name: str, kernels: Kernels, rounds: int) -> dict[str, Any] | None:
    """Medians of the three sides, after comparing their results; None without the kernel."""
    case = CASES[name]
    module, tensors = _graph(case, case.arguments())
    nodes = [n for n in module.graph.nodes if n.op == "call_function"]
    inputs = {n: n.meta["val"] for n in module.graph.nodes if n.op == "placeholder"}
    results = list(module.graph.output_node().args[0])
    standard = translate(nodes, inputs, results, Kernels(PLAIN, kernels.version))
    try:
        special = _by_kernel(case, tensors, kernels)
    except Declined:
        return None
    sessions = Sessions()
    sides = {
        "torch": lambda: module(*tensors),
        "standard": lambda: region(*tensors),
        "kernel": lambda: other(*tensors),
    }
    region, other = (Region(m, sessions, name) for m in (standard, special))
    with torch.no_grad():
        for side in ("standard", "kernel"):
            torch.testing.assert_close(sides[side](), sides["torch"](), rtol=1e-4, atol=1e-4)
        return {"median_seconds": _timed(sides, rounds)}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ort_kernels")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    kernels = installed()
    assert kernels is not None, "pip install 'graphaccel[ort]'"
    rows = {}
    for name in CASES:
        found = row(name, kernels, args.rounds)
        if found is None:
            print(f"{name:28} not in this build")
            continue
        rows[name] = found
        times = found["median_seconds"]
        found["faster_than_standard"] = times["standard"] / times["kernel"]
        print(f"{name:28}", "  ".join(f"{s} {1e6 * t:8.0f} us" for s, t in times.items()))
    result = {
        "name": "ort_kernels",
        "command": "python -m benchmarks.ort_kernels",
        "build": kernels.name,
        "threads": args.threads,
        "rounds": args.rounds,
        "machine": machine(),
        "rows": rows,
    }
    (RESULTS / "ort_kernels.json").write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
