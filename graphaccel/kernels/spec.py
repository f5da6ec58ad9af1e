"""What a fused op is, as plain data: its tensors and numbers, and the functions that make it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from graphaccel.errors.messages import Location

Function = Callable[..., Any]
SCALARS = {float: "float", int: "int", bool: "bool"}


@dataclass(frozen=True)
class T:
    """One tensor of a fused op.

    dims: index names as in einsum; `...` stands for any leading dims, a number for a dim of that
      size. Equal names are equal sizes; the sharding rule is read off them.
    optional: it may be missing (None); of an output: its gradient may be. grad: it gets a gradient;
      low_grad: in 16 bits too.
    below: integers, at least 0 and below the size of this index (or, where some may be ignored,
      -100).
    dtype: of an output or saved tensor, where it is not that of the first input: a torch dtype
      name, the name of an input, or "wide" (float32 for 16-bit inputs, else as the first input). Of
      an input: "bool" or nothing.
    broadcast: dims of size one are broadcast, and leading ones may be missing.
    mask: added to scores: checked with -inf and with fully masked rows; broadcast too.
    """

    dims: str
    optional: bool = False
    grad: bool = True
    low_grad: bool = True
    below: str = ""
    ignored: bool = True
    dtype: str = ""
    broadcast: bool = False
    mask: bool = False

    @property
    def indices(self) -> tuple[str, ...]:
        """The index names."""
        return tuple(self.dims.split())

    @property
    def differentiable(self) -> bool:
        """Whether autograd asks for its gradient."""
        return self.grad and not self.below and self.dtype != "bool"


@dataclass(frozen=True)
class Scalar:
    """A number of a fused op. default: also its value in checks. examples: further values."""

    default: float | int | bool
    examples: tuple[float | int | bool, ...] = ()

    @property
    def type(self) -> str:
        """Its type in the op's schema."""
        return SCALARS[type(self.default)]


@dataclass(frozen=True)
class Chunks:
    """How an op goes over its rows in chunks: `times` over, `rows` of them at a time, each time
    products of [rows, inner] and [inner, columns], as (rows, columns, inner), and `moved` bytes
    besides what products read and write; `calls` operations besides the products."""

    rows: int
    times: int
    products: tuple[tuple[int, int, int], ...]
    moved: int
    calls: int


@dataclass(frozen=True, eq=False)
class Fusion:
    """A fused op as plain data; made by `fusion`.

    inputs, outputs: name → T or Scalar, in the order of the functions' parameters and results.
    saved: tensors that `forward` returns after its outputs, for `backward` alone.
    gradients: input → input whose gradient is the same tensor, and stands for both.
    patterns: functions of (some of) the inputs in plain torch that are replaced. negatives: ones
      that must not be.
    forward, backward: what runs on every device; cuda_forward, cuda_backward: on CUDA instead.
    backward: parameters are `grad_OUTPUT`, names of inputs, outputs or saved, and `wanted` (a list
      of bools, an input each); gives one gradient per differentiable input, None where it is not
      wanted. Missing: autograd through `forward`, computed again.
    inline: the backward is no op: its torch calls become nodes of the joint graph (and may be
      shared out over devices one by one).
    fake: forward on tensors without data; None: `forward` itself.
    rewrite: instead of an op of its own, torch calls that replace the pattern.
    legal: reason why these inputs (fake tensors and numbers, by name) are not for this op, or None.
    whole: indices that can not be sharded. sums: whether an index that outputs lack is summed.
    random: it draws random numbers, none where its number `p` is 0.
    kept: of a random op whose kernels draw numbers of their own, from its results by name: a bool
      tensor, where nothing was dropped. Its check gives eager the same.
    gathered: inputs of which it reads only the rows that it gives; its backward, their shape alone.
    tensor_parallel: False keeps it out of plans with a tensor axis, which shards an index that this
      op needs whole.
    devices: device types on which `fusions="auto"` places it. sizes: sizes of indices in checks.
    masked_rows: whether rows that are masked throughout are as in eager.
    large: the size of large values in checks.
    tolerance: how much larger than eager's its error against float64 may be.
    wide: it computes in float32 of 16-bit inputs, and is derived (`kernels.widened`).
    flops, workspace: of the forward, from inputs by name: FLOPs, for which only `shape` and
      `numel()` may be read; bytes of scratch at its peak.
    chunks: of the forward, from inputs by name: how it goes over its rows in chunks, whose rows the
      number `chunk` among its inputs says; 0 there is what it takes by itself. The plan chooses it
      from this. Of tensors, here and for `workspace`, only `shape`, `numel()`, `len()`, `dtype` and
      `device` may be read.
    """

    name: str
    doc: str
    inputs: Mapping[str, T | Scalar]
    outputs: Mapping[str, T]
    patterns: tuple[Function, ...] = field(repr=False)
    saved: Mapping[str, T] = field(default_factory=dict)
    gradients: Mapping[str, str] = field(default_factory=dict)
    negatives: tuple[Function, ...] = field(default=(), repr=False)
    forward: Function | None = field(default=None, repr=False)
    backward: Function | None = field(default=None, repr=False)
    cuda_forward: Function | None = field(default=None, repr=False)
    cuda_backward: Function | None = field(default=None, repr=False)
    fake: Function | None = field(default=None, repr=False)
    fake_backward: Function | None = field(default=None, repr=False)
    inline: bool = False
    rewrite: Function | None = field(default=None, repr=False)
    legal: Function | None = field(default=None, repr=False)
    whole: tuple[str, ...] = ()
    sums: bool = True
    random: bool = False
    kept: Function | None = field(default=None, repr=False)
    gathered: tuple[str, ...] = ()
    tensor_parallel: bool = True
    devices: tuple[str, ...] = ("cpu", "cuda")
    sizes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    masked_rows: bool = True
    large: float = 300.0
    tolerance: float = 2.0
    flops: Function | None = field(default=None, repr=False)
    workspace: Function | None = field(default=None, repr=False)
    chunks: Function | None = field(default=None, repr=False)
    wide: bool = False
    location: Location | None = field(default=None, repr=False)

    @property
    def op_name(self) -> str:
        """The name of its forward op; that of the backward has `_backward` behind."""
        return f"{self.name}_wide" if self.wide else self.name

    @property
    def tensors(self) -> dict[str, T]:
        """The tensor inputs."""
        return {n: s for n, s in self.inputs.items() if isinstance(s, T)}

    @property
    def scalars(self) -> dict[str, Scalar]:
        """The numbers among the inputs."""
        return {n: s for n, s in self.inputs.items() if isinstance(s, Scalar)}

    @property
    def results(self) -> dict[str, T]:
        """What the forward op returns: outputs, then what is saved."""
        return {**self.outputs, **self.saved}

    @property
    def differentiable(self) -> tuple[str, ...]:
        """Inputs that get a gradient."""
        return tuple(n for n, t in self.tensors.items() if t.differentiable)

    @property
    def returned(self) -> tuple[str, ...]:
        """Inputs whose gradients the backward op returns."""
        return tuple(n for n in self.differentiable if n not in self.gradients)

    @property
    def read_back(self) -> tuple[str, ...]:
        """Names of the backward op's arguments."""
        if self.backward is None:
            return (*(f"grad_{n}" for n in self.outputs), *self.inputs, "wanted")
        return tuple(inspect.signature(self.backward).parameters)
