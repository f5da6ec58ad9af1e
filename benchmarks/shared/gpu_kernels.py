"""The kernels' part of `benchmarks.gpu`: every fusion that has kernels of its own, and the
optimizers' steps. Checked against float64, then timed beside eager, torch.compile and a copy."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from graphaccel.kernels.check.numbers import check_numbers
from graphaccel.kernels.multi_tensor.steps import AdamRule, Around, MultiTensor, SGDRule
from graphaccel.kernels.ops.attention_cuda import attention, attention_backward
from graphaccel.kernels.register import op_of, parameters, tensors
from graphaccel.kernels.registry import fusions
from graphaccel.kernels.spec import Fusion
from graphaccel.kernels.timed import (
    Shapes,
    backward_arguments,
    backward_call,
    pattern_of,
    shapes_of,
    traffic,
    values_of,
)

Call = Callable[[], Any]
Row = dict[str, Any]
Fault = dict[str, str]
DTYPE = torch.bfloat16
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any], int]] = {
    "adamw": (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1}, 28),
    "adam": (torch.optim.Adam, {"lr": 1e-2, "weight_decay": 0.1}, 28),
    "sgd": (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.1}, 20),
}
"""How torch makes them, and the bytes a weight that a step in float32 moves."""
_MAX_NORM, _SCALE = 0.5, 8.0


@dataclass(frozen=True)
class Scale:
    """How large everything is. budget: bytes that a kernel moves. toy: on the CPU, where nothing is
    compiled and `graphaccel fusion check all` compares numbers."""

    device: str
    widths: tuple[int, ...]
    budget: int
    rounds: int
    models: tuple[str, ...]
    toy: bool = False


def seconds(call: Callable[..., Any], scale: Scale, ready: Call | None = None) -> float:
    """Median seconds of a call on the device, its caches flushed before each. ready: makes, each
    time anew and untimed, the one argument of the call."""
    marks: list[tuple[Any, Any]] = []
    on_cpu = scale.device == "cpu"
    flush = None if on_cpu else torch.empty(1 << 28, dtype=torch.int8, device="cuda")
    for turn in range(-1 if scale.toy else -3, scale.rounds):
        given = () if ready is None else (ready(),)
        if flush is not None:
            flush.zero_()
        start = _mark(on_cpu)
        call(*given)
        stop = _mark(on_cpu)
        if turn >= 0:
            marks.append((start, stop))
    if on_cpu:
        return statistics.median(stop - start for start, stop in marks)
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(stop) for start, stop in marks) / 1e3


def _mark(on_cpu: bool) -> Any:
    """A moment: on the device, in the order of its work."""
    if on_cpu:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def clone_bandwidth(scale: Scale) -> float:
    """Bytes a second that `clone` moves: what a kernel can reach."""
    source = torch.ones(scale.budget // 4, dtype=DTYPE, device=scale.device)
    return 2 * source.nbytes / seconds(source.clone, scale)


def compiled(function: Callable[..., Any], backend: Any = "inductor") -> Callable[..., Any]:
    """`torch.compile`, for the shapes that it is called with and nothing that was compiled before:
    later shapes of the same code would be symbolic, and from the ninth on (recompile_limit) it
    would run eagerly."""
    torch.compiler.reset()
    return torch.compile(function, backend=backend, dynamic=False)


def timed_or_told(side: str, call: Call, faults: list[Fault], where: Fault) -> Any:
    """What a call gives, or None where it fails, which becomes a fault."""
    try:
        return call()
    except Exception as error:  # one side of one row; the others are still worth measuring
        said = (str(error).splitlines() or [""])[0]
        faults.append({**where, "what": f"{side} fails: {type(error).__name__}: {said}"})
        return None


def with_kernels(names: Iterable[str] | None) -> tuple[Fusion, ...]:
    """Every registered fusion that has kernels of its own, or those of these names."""
    own = tuple(f for f in fusions() if f.cuda_forward is not None)
    return own if names is None else tuple(f for f in own if f.name in set(names))


def kernel_rows(
    scale: Scale, clone: float, names: Iterable[str] | None
) -> tuple[list[Row], list[Fault]]:
    """Each kernel at each width, forward and backward: seconds beside eager and torch.compile, and
    its share of the clone bandwidth; and what is wrong."""
    rows: list[Row] = []
    faults: list[Fault] = []
    for fusion in with_kernels(names):
        if not scale.toy:
            found = timed_or_told(
                "its check", lambda f=fusion: check_numbers(f, scale.device), faults,
                {"name": fusion.name, "case": "check"},
            )  # fmt: skip
            for fault in found[1] if found else ():
                faults.append({"name": fusion.name, "what": fault.what, "case": fault.case})
        known: list[Shapes] = []
        for width in scale.widths:
            shapes = shapes_of(fusion, DTYPE, scale.budget, width)
            if shapes not in known:  # a loss of logits has no width
                known.append(shapes)
                rows += _phases(fusion, shapes, clone, scale, faults)
    return rows, faults


def _phases(
    fusion: Fusion, shapes: Shapes, clone: float, scale: Scale, faults: list[Fault]
) -> Iterator[Row]:
    values = {
        n: v.to(scale.device) if isinstance(v, Tensor) else v
        for n, v in values_of(fusion, DTYPE, shapes).items()
    }
    given = {n: "x".join(map(str, v.shape)) for n, v in values.items() if isinstance(v, Tensor)}
    where = {"name": fusion.name, "case": " ".join(f"{n} {s}" for n, s in given.items())}
    moved, op, sides = traffic(fusion, DTYPE, shapes), op_of(fusion), _sides(fusion, scale)

    def forward(run: Callable[[dict[str, Any]], Any]) -> float:
        with torch.no_grad():
            return seconds(lambda: run(values), scale)

    def backward(run: Callable[[dict[str, Any]], Any]) -> float:
        fresh = {
            n: v.detach().requires_grad_(True)
            if n in fusion.differentiable and v is not None
            else v
            for n, v in values.items()
        }
        roots = [v for v in fresh.values() if isinstance(v, Tensor) and v.requires_grad]
        like = [torch.ones_like(t) for t in tensors(run(fresh)) if t.requires_grad]

        def back(made: list[Tensor]) -> Any:
            return torch.autograd.grad(made, roots, like, allow_unused=True)

        # A graph for each: compiled ones let go of what they saved (donated buffers).
        return seconds(back, scale, lambda: [t for t in tensors(run(fresh)) if t.requires_grad])

    def alone() -> float:
        """The backward as the runtime calls it: without autograd."""
        with torch.no_grad():
            arguments = backward_arguments(fusion, values, tensors(op(*values.values())))
            call = backward_call(fusion)
            return seconds(lambda: call(*arguments.values()), scale)

    phases = {"forward": (forward, moved.forward)}
    phases |= {"backward": (backward, moved.backward)} if fusion.differentiable else {}
    for phase, (measure, size) in phases.items():
        at = {**where, "case": f"{phase}, {where['case']}"}
        row: Row = {"kernel": fusion.name, "phase": phase, "inputs": given, "bytes": size}
        for side, run in sides.items():
            said = "the kernel" if side == "seconds" else side
            row[side] = timed_or_told(said, lambda m=measure, r=run: m(r), faults, at)
        if phase == "backward":
            row["alone"] = timed_or_told("the kernel", alone, faults, at)
        taken = row["alone"] if phase == "backward" else row["seconds"]
        row["of_clone"] = None if taken is None else size / taken / clone
        yield row


def _sides(fusion: Fusion, scale: Scale) -> dict[str, Callable[[dict[str, Any]], Any]]:
    """The op, its pattern in eager mode and the pattern compiled, each by the row's key."""
    op, pattern, outputs = op_of(fusion), pattern_of(fusion), len(fusion.outputs)
    names = parameters(pattern)
    by_compiler = pattern if scale.toy else compiled(pattern)
    return {
        "seconds": lambda values: tensors(op(*values.values()))[:outputs],
        "eager": lambda values: pattern(**{n: values[n] for n in names}),
        "compile": lambda values: by_compiler(**{n: values[n] for n in names}),
    }


def attention_faults(device: str) -> list[Fault]:
    """`kernels.ops.attention_cuda`, forward and backward, against float64: no further off than
    twice torch's own attention in the same dtype, and two units in the last place of the largest;
    in float64, where the two only sum in another order, than 1e-12 of that."""
    found: list[Fault] = []
    dtypes = (torch.float64,)
    if device == "cuda":
        dtypes = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
    for dtype in dtypes:
        for groups in (4, 2):
            for form in ("plain", "causal", "mask"):
                given = _attention_case(dtype, groups, form, device)
                sides = _attention_sides(*given, form == "causal")
                for name, (ours, eager, true) in sides.items():
                    off, allowed = ((x.double() - true).abs().max().item() for x in (ours, eager))
                    unit = max(2 * torch.finfo(dtype).eps, 1e-12) * true.abs().max().item()
                    if not off <= 2 * allowed + unit:
                        what = f"{name}: off by {off:.2g}, eager by {allowed:.2g}"
                        case = f"{dtype}, {form}, {groups} groups of keys"
                        found.append({"name": "attention of graphs", "what": what, "case": case})
    return found


def _attention_case(
    dtype: torch.dtype, groups: int, form: str, device: str
) -> tuple[list[Tensor], Tensor | None, Tensor]:
    """q, k and v, a mask or None, and a gradient: 77 queries of 64 values, 4 heads."""
    generator = torch.Generator().manual_seed(1)

    def made(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    parts = [made(2, 77, h, 64).transpose(1, 2) for h in (4, groups, groups)]
    mask = made(2, 1, 77, 77) if form == "mask" else None
    return parts, mask, made(1, 4, 77, 64).expand(2, -1, -1, -1)


def _attention_sides(
    parts: list[Tensor], mask: Tensor | None, grad: Tensor, causal: bool
) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """Of the result and of each gradient: ours, torch's in this dtype, and in float64."""
    made = attention(*parts, 0.0, causal, attn_mask=mask)
    ours = (made[0], *attention_backward(grad, *parts, *made, 0.0, causal, attn_mask=mask))
    sides = [ours]
    for wide in (parts[0].dtype, torch.float64):
        leaves = [p.detach().to(wide).requires_grad_(True) for p in parts]
        bias = None if mask is None else mask.to(wide)
        y = F.scaled_dot_product_attention(
            *leaves, attn_mask=bias, is_causal=causal, enable_gqa=True
        )
        slopes = torch.autograd.grad(y, leaves, grad.to(wide).contiguous())
        sides.append((y.detach(), *slopes))
    names = ("y", "gradient of q", "gradient of k", "gradient of v")
    return dict(zip(names, zip(*sides, strict=True), strict=True))


def optimizer_rows(
    shapes: Sequence[torch.Size], scale: Scale, clone: float
) -> tuple[list[Row], list[Fault]]:
    """A step of each optimizer over weights of these shapes, beside torch's fused one."""
    rows: list[Row] = []
    faults: list[Fault] = []
    for name, (kind, numbers, each) in OPTIMIZERS.items():
        where = {"name": name, "case": f"{len(shapes)} weights"}
        check = timed_or_told(
            "its check", lambda n=name: optimizer_faults(n, scale.device), faults, where
        )
        faults += check or []
        params = [nn.Parameter(torch.randn(s, device=scale.device) * 0.02) for s in shapes]
        for p in params:
            p.grad = torch.randn_like(p) * 1e-3
        moved = each * sum(p.numel() for p in params)
        row: Row = {"kernel": name, "bytes": moved}
        stepped = _stepper(name, params)
        row["seconds"] = timed_or_told(
            "the kernel", lambda s=stepped: seconds(s, scale), faults, where
        )
        theirs = kind(params, fused=True, **numbers)
        row["fused"] = timed_or_told(
            "torch's fused step", lambda o=theirs: seconds(o.step, scale), faults, where
        )
        row["of_clone"] = None if row["seconds"] is None else moved / row["seconds"] / clone
        rows.append(row)
    return rows, faults


def _stepper(name: str, params: Sequence[Tensor], around: Around | None = None) -> Call:
    """Steps by graphaccel with the gradients that the parameters have."""
    _, numbers, _ = OPTIMIZERS[name]
    around = Around() if around is None else around
    weights = [p.detach() for p in params]
    first, second = ([torch.zeros_like(p) for p in weights] for _ in range(2))
    # On the device, where a step may be left out there.
    steps = [torch.zeros((), device=weights[0].device) for _ in weights]
    many, done = MultiTensor(), [0]

    def step() -> None:
        grads = [p.grad for p in params if p.grad is not None]
        if name == "sgd":
            rule = SGDRule(numbers["lr"], numbers["momentum"], 0.0, False, numbers["weight_decay"])
            new = [done[0] == 0] * len(weights)
            many.sgd(weights, grads, first, new, [rule] * len(weights), around)
        else:
            rule = AdamRule(
                numbers["lr"], 0.9, 0.999, 1e-8, numbers["weight_decay"], name == "adamw"
            )
            many.adam(weights, grads, first, second, steps, [rule] * len(weights), around)
        done[0] += 1

    return step


def optimizer_faults(name: str, device: str) -> list[Fault]:
    """Weights after three steps, alone and with unscaling and clipping, against torch's in float64:
    no further off than twice torch's in float32, and a unit in the last place of the largest.
    What torch's are off by is told over all weights: three numbers alone may be exact by luck."""
    kind, numbers, _ = OPTIMIZERS[name]
    shapes = ((40_000,), (3,), (2049,), (33, 65))  # two chunks, less than a block, a block and one
    found: list[Fault] = []
    for case, clips in (("plain", False), ("unscaled and clipped", True)):
        around = Around(torch.tensor(_SCALE, device=device), max_norm=_MAX_NORM, finite=True)
        sides: dict[str, list[Tensor]] = {}
        for side, wide in (("ours", torch.float32), ("eager", torch.float32),
                           ("true", torch.float64)):  # fmt: skip
            generator = torch.Generator().manual_seed(1)
            params = [
                nn.Parameter(torch.randn(s, generator=generator).to(device, wide)) for s in shapes
            ]
            theirs = kind(params, foreach=False, **numbers)
            step = _stepper(name, params, around if clips else None)
            for _ in range(3):
                for p in params:
                    p.grad = torch.randn(p.shape, generator=generator).to(device, wide)
                    if clips and side == "ours":
                        p.grad.mul_(_SCALE)
                if side == "ours":
                    step()
                    continue
                if clips:
                    nn.utils.clip_grad_norm_(params, _MAX_NORM)
                theirs.step()
            sides[side] = [p.detach().double() for p in params]
        allowed = max(
            (eager - true).abs().max().item()
            for eager, true in zip(sides["eager"], sides["true"], strict=True)
        )
        for i, (ours, true) in enumerate(zip(sides["ours"], sides["true"], strict=True)):
            off = (ours - true).abs().max().item()
            unit = torch.finfo(torch.float32).eps * true.abs().max().item()
            if not off <= 2 * allowed + unit:
                what = f"weight of {shapes[i]}: off by {off:.2g}, eager by {allowed:.2g}"
                found.append({"name": name, "what": what, "case": case})
    return found
