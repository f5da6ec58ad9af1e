"""`Fusion`: a fused op as plain data, with its tensors, numbers and functions."""

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
      size. Equal names are equal sizes; the sharding rule is derived from them.
    optional: it may be missing (None); for an output: its gradient may be. grad: it gets a
      gradient; low_grad: in 16 bits too.
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
        """Whether it gets a gradient from autograd."""
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
    """How an op processes its rows in chunks: `times` chunks of `rows` each, each with matmuls of
    [rows, inner] and [inner, columns], as (rows, columns, inner), and `moved` bytes besides what
    the matmuls read and write; `calls` operations besides the matmuls."""

    rows: int
    times: int
    products: tuple[tuple[int, int, int], ...]
    moved: int
    calls: int


@dataclass(frozen=True, eq=False)
class Fusion:
    """A fused op as plain data; created by `fusion`.

    inputs, outputs: name → T or Scalar, in the order of the functions' parameters and results.
    saved: tensors that `forward` returns after its outputs, for `backward` alone.
    gradients: input → input whose gradient is the same tensor, and is used for both.
    patterns: functions of (some of) the inputs in plain torch that are replaced. negatives: ones
      that must not be.
    forward, backward: what runs on every device; cuda_forward, cuda_backward: on CUDA instead.
    backward: parameters are `grad_OUTPUT`, names of inputs, outputs or saved, and `wanted` (a list
      of bools, an input each); returns one gradient per differentiable input, None where it is not
      wanted. Missing: autograd through `forward`, recomputed.
    inline: the backward is not an op: its torch calls become nodes of the joint graph (and may be
      sharded over devices individually).
    fake: forward on tensors without data; None: `forward` itself.
    rewrite: instead of an op of its own, torch calls that replace the pattern.
    legal: why the op does not support these inputs (fake tensors and numbers, by name), or None.
    whole: indices that cannot be sharded. sums: whether an index that outputs lack is summed.
    random: it draws random numbers, except where its number `p` is 0.
    kept: for a random op whose kernels draw numbers of their own, from its results by name: a bool
      tensor, true where nothing was dropped. Its check uses the same mask in eager.
    gathered: inputs of which it reads only the rows in its output; its backward, their shape only.
    tensor_parallel: False keeps it out of plans with a tensor axis, which shards an index that this
      op needs whole.
    devices: device types on which `fusions="auto"` places it. compiled: whether it does so too
      where Inductor compiles for a GPU, which fuses most of these patterns itself. sizes: of
      indices in checks.
    masked_rows: whether fully masked rows are as in eager.
    large: the size of large values in checks.
    tolerance: how much larger than eager's its error against float64 may be.
    wide: it computes in float32 of 16-bit inputs, and is derived (`kernels.widened`).
    flops, workspace: of the forward, from inputs by name: FLOPs, for which only `shape` and
      `numel()` may be read; bytes of scratch at its peak.
    chunks: of the forward, from inputs by name: how it processes its rows in chunks of `chunk`
      rows, a number among its inputs; 0 selects the op's own default. The plan chooses it from
      this. Of tensors, here and for `workspace`, only `shape`, `numel()`, `len()`, `dtype` and
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
    compiled: bool = False
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
        """The name of its forward op; the backward op's has `_backward` appended."""
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
        """The results of the forward op: outputs, then saved tensors."""
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
