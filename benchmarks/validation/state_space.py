"""State space layers as fused kernels train them: Mamba-2 (arXiv 2405.21060).

Each kernel of `causal_conv1d` and `mamba_ssm` that training starts is one op here. It says how it
may be sharded and what it multiplies, as any user's op can, and so is planned as what it is: in
plain PyTorch the same layer writes the scores of each chunk to memory.

Tensors are [batch, tokens, groups, heads of a group, width] where they have heads; the heads of a
group read one B (`into`) and one C (`out`), [batch, tokens, groups, state].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.utils.flop_counter import register_flop_formula

import graphaccel

CHUNK = 128
"""Tokens that are scanned as one: `chunk_size` of Megatron-LM and of Hugging Face's classes."""
_TAPS = 4  # of the convolution


def _convolved(rows: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    turned = F.pad(rows.transpose(1, 2), [weight.shape[1] - 1, 0])
    return F.silu(F.conv1d(turned, weight[:, None], bias, groups=weight.shape[0])).transpose(1, 2)


def _scanned(
    rows: Tensor, step: Tensor, decay: Tensor, into: Tensor, out: Tensor, skip: Tensor
) -> Tensor:
    """state = exp(step x decay) state + (step x rows) into; what comes out is state out + skip x
    rows, token after token (arXiv 2405.21060, section 2.1)."""
    batch, tokens, groups, heads, width = rows.shape
    state = rows.new_zeros(batch, groups, heads, width, into.shape[-1])
    found = []
    for at in range(tokens):
        given = (step[:, at, ..., None] * rows[:, at])[..., None] * into[:, at, :, None, None]
        state = torch.exp(step[:, at] * decay)[..., None, None] * state + given
        found.append((state * out[:, at, :, None, None]).sum(-1))
    return torch.stack(found, 1) + skip[..., None] * rows


def _normed(rows: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
    gated = rows * F.silu(gate)
    return weight * gated * torch.rsqrt(gated.pow(2).mean(-1, keepdim=True) + 1e-5)


def _back(made: Callable[..., Tensor], gradient: Tensor, *given: Tensor) -> Any:
    return torch.func.vjp(made, *given)[1](gradient)


@torch.library.custom_op("validation::convolution", mutates_args=())
def convolution(rows: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """SiLU of each channel's convolution with its last tokens. rows: [batch, tokens, channels];
    weight: [channels, taps]; bias: [channels]."""
    return _convolved(rows, weight, bias).contiguous()


@torch.library.custom_op("validation::convolution_backward", mutates_args=())
def _convolution_back(
    gradient: Tensor, rows: Tensor, weight: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return _back(_convolved, gradient, rows, weight, bias)


@torch.library.custom_op("validation::scan", mutates_args=())
def scan(
    rows: Tensor, step: Tensor, decay: Tensor, into: Tensor, out: Tensor, skip: Tensor
) -> Tensor:
    """The state space model of every head. rows: [batch, tokens, groups, heads, width]; step:
    [batch, tokens, groups, heads]; decay, skip: [groups, heads]."""
    return _scanned(rows, step, decay, into, out, skip)


@torch.library.custom_op("validation::scan_backward", mutates_args=())
def _scan_back(
    gradient: Tensor, rows: Tensor, step: Tensor, decay: Tensor, into: Tensor, out: Tensor,
    skip: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return _back(_scanned, gradient, rows, step, decay, into, out, skip)


@torch.library.custom_op("validation::gated_norm", mutates_args=())
def gated_norm(rows: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
    """RMS norm of each group of rows x SiLU(gate), both [batch, tokens, groups, width]; weight:
    [groups, width]."""
    return _normed(rows, gate, weight)


@torch.library.custom_op("validation::gated_norm_backward", mutates_args=())
def _norm_back(
    gradient: Tensor, rows: Tensor, gate: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return _back(_normed, gradient, rows, gate, weight)


def _scan_flops(rows: Any, into: Any) -> dict[str, Any]:
    """Of the products of a chunk (arXiv 2405.21060, section 6): of scores, between tokens, into
    states and out of them."""
    batch, tokens, groups, heads, width = rows
    each = 2 * batch * tokens * groups
    return {
        "scores": each * CHUNK * into[-1],
        "tokens": each * CHUNK * heads * width,
        "states": each * heads * width * into[-1],
    }


def _set_up() -> None:
    """How the ops behave without values, backward, sharded, and what they multiply."""
    pairs = (
        ("convolution", convolution, _convolution_back, "b s d, d k, d -> b s d", "s k", ()),
        ("scan", scan, _scan_back,
         "b s g k p, b s g k, g k, b s g n, b s g n, g k -> b s g k p", "s n", ([0],)),
        ("gated_norm", gated_norm, _norm_back, "b s g w, b s g w, g w -> b s g w", "w", ()),
    )  # fmt: skip

    for name, ahead, back, rule, whole, linear in pairs:
        given, made = rule.split(" -> ")
        shapes = [[2] * len(tensor.split()) for tensor in given.split(", ")]
        example = [torch.rand(shape, dtype=torch.float64) for shape in shapes]
        ahead.register_fake(lambda rows, *_: torch.empty_like(rows))
        back.register_fake(lambda _, *of: tuple(torch.empty_like(t) for t in of))

        def keep(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            ctx.save_for_backward(*inputs)

        def backward(ctx: Any, gradient: Tensor, back: Any = back) -> Any:
            return back(gradient, *ctx.saved_tensors)

        ahead.register_autograd(backward, setup_context=keep)
        graphaccel.sharding_rule(
            f"validation::{name}", rule, whole=whole, linear=linear, example=example
        )
        graphaccel.sharding_rule(
            f"validation::{name}_backward", f"{made}, {given} -> {given}", whole=whole,
            linear=[[0]], example=[torch.rand_like(example[0]), *example],
        )  # fmt: skip

    @register_flop_formula(torch.ops.validation.scan)
    def _(rows: Any, step: Any, decay: Any, into: Any, *_: Any, **__: Any) -> Any:
        found = _scan_flops(rows, into)
        return sum(found.values()) + found["states"]

    @register_flop_formula(torch.ops.validation.scan_backward)
    def _(gradient: Any, rows: Any, step: Any, decay: Any, into: Any, *_: Any, **__: Any) -> Any:
        found = _scan_flops(rows, into)  # two for each of the forward, and what goes in again
        return 3 * found["scores"] + 3 * found["tokens"] + 5 * found["states"]


# Of kernels that scan: bytes that they write for each other and read, and read again, for each
# number of a chunk's states, of the scores of its tokens, and of the rows. States and scores are in
# float32 at first (`_mamba_chunk_scan_combined_fwd`, `_bwd`, mamba_ssm/ops/triton/ssd_combined.py).
_FORWARD, _BACKWARD = (12, 8, 2), (34, 24, 16)


def between_bytes(node: fx.Node, tokens: int) -> int:
    """What the kernels of a scan, or of its backward, move besides what these read and give, of so
    many tokens; 0 for other calls."""
    ahead = node.target is torch.ops.validation.scan.default
    if not ahead and node.target is not torch.ops.validation.scan_backward.default:
        return 0
    rows, _, _, into = node.args[:4] if ahead else node.args[1:5]
    *_, groups, heads, width = rows.meta["val"].shape
    numbers = tokens * groups * heads * width
    states, scores = numbers * into.meta["val"].shape[-1] // CHUNK, tokens * groups * CHUNK
    each = zip(_FORWARD if ahead else _BACKWARD, (states, scores, numbers), strict=True)
    return sum(size * count for size, count in each)


class Mixer(nn.Module):
    """Such a layer, [batch, tokens, hidden] to the same. What Megatron-LM has in one weight is in
    three here, each of parts of one size, so that the tensor axis cuts each."""

    def __init__(self, hidden: int, groups: int, heads: int, width: int, state: int) -> None:
        """heads: of all groups."""
        super().__init__()
        self.groups, self.width = groups, width
        inner, states = heads * width, groups * state
        self.in_proj = nn.Linear(hidden, 2 * inner, bias=False)
        self.states_proj = nn.Linear(hidden, 2 * states, bias=False)
        self.step_proj = nn.Linear(hidden, heads, bias=False)
        self.rows_taps = nn.Parameter(torch.empty(inner, _TAPS))
        self.rows_bias = nn.Parameter(torch.empty(inner))
        self.states_taps = nn.Parameter(torch.empty(2 * states, _TAPS))
        self.states_bias = nn.Parameter(torch.empty(2 * states))
        self.step_bias = nn.Parameter(torch.empty(groups, heads // groups))
        self.decay = nn.Parameter(torch.empty(groups, heads // groups))
        self.skip = nn.Parameter(torch.empty(groups, heads // groups))
        self.norm = nn.Parameter(torch.empty(groups, inner // groups))
        self.out_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, hidden: Tensor, **_: Any) -> Tensor:
        gate, rows = self.in_proj(hidden).chunk(2, -1)
        states = convolution(self.states_proj(hidden), self.states_taps, self.states_bias)
        into, out = (t.unflatten(-1, (self.groups, -1)) for t in states.chunk(2, -1))
        rows = convolution(rows, self.rows_taps, self.rows_bias)
        rows = rows.unflatten(-1, (self.groups, -1, self.width))
        step = self.step_proj(hidden).unflatten(-1, (self.groups, -1))
        step = F.softplus(step + self.step_bias)
        found = scan(rows, step, -torch.exp(self.decay), into, out, self.skip).flatten(-2)
        found = gated_norm(found, gate.unflatten(-1, (self.groups, -1)), self.norm)
        return self.out_proj(found.flatten(-2))


_set_up()
