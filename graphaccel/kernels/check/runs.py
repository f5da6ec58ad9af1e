"""Runs a fused op, its pattern in eager mode and the pattern in float64 on the same inputs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from graphaccel.compat.torch.modes import TorchDispatchMode
from graphaccel.kernels.check.cases import Case, inputs_of, with_layout
from graphaccel.kernels.check.widened_casts import WidenedCasts
from graphaccel.kernels.fusion import Fusion, T
from graphaccel.kernels.register import op_of, parameters, tensors, wide_form
from graphaccel.kernels.spec import Function


@dataclass(frozen=True)
class Results:
    """Outputs in order, and gradients by input."""

    outputs: list[Tensor]
    gradients: dict[str, Tensor | None]


@dataclass(frozen=True)
class Requested:
    """The outputs with incoming gradients, and the inputs whose gradients are requested."""

    outputs: tuple[str, ...]
    inputs: tuple[str, ...]


class Runs:
    """The op, its pattern in eager mode and the pattern in float64, on the inputs of one case.

    own_random: a random op draws its own numbers, and eager drops what it drops.
    everything: all outputs get gradients, and all differentiable inputs' are requested.
    """

    def __init__(self, fusion: Fusion, case: Case, device: str, own_random: bool) -> None:
        self.fusion, self.case = fusion, case
        form = wide_form(fusion) if case.wide else fusion
        assert form is not None
        self.form = form
        self.op = form.rewrite or op_of(form)
        self.pattern = fusion.patterns[case.pattern]
        self.names = parameters(self.pattern)
        self.values = inputs_of(fusion, case, device)
        self.everything = Requested(tuple(fusion.outputs), self._differentiable())
        self._mask = self._dropout_mask() if own_random and fusion.kept is not None else None

    def fused(self, requested: Requested, which: str = "") -> Results | str:
        """The op's results, or how it fails. which: the gradients requested, in words."""
        try:
            return self._run(lambda inputs: self.op(*inputs.values()), self.all_inputs(), requested)
        except Exception as error:
            return f"it fails{which}: {str(error).splitlines()[0]}"

    def reference(self, requested: Requested) -> tuple[Results, Results]:
        """Eager's results, and the float64 reference."""
        wide = {
            n: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v
            for n, v in self.values.items()
        }
        with _FixedDropout(self._mask) if self._mask is not None else nullcontext():
            eager = self._run(self._eager, self._given(self.values), requested)
            with WidenedCasts():
                return eager, self._run(self._eager, self._given(wide), requested)

    def all_inputs(self) -> dict[str, Any]:
        """Every input of the op; those that this pattern lacks are None or the default."""
        return {
            n: self.values[n]
            if n in self.names
            else (None if isinstance(spec, T) else spec.default)
            for n, spec in self.fusion.inputs.items()
        }

    def incoming(self, outputs: Iterable[Tensor], layout: str) -> list[Tensor]:
        """Gradients of some outputs, the same in every call, with the strides of a layout."""
        generator = torch.Generator().manual_seed(7)
        return [
            with_layout(
                torch.randn(o.shape, generator=generator, dtype=torch.float64).to(o), layout
            )
            for o in outputs
        ]

    def _differentiable(self) -> tuple[str, ...]:
        """Inputs that get a gradient in this case."""
        known = self.fusion.tensors
        return tuple(
            n
            for n in self.names
            if n in known and known[n].differentiable and self.values[n].is_floating_point()
        )

    def _dropout_mask(self) -> Tensor:
        """The mask of elements that the op keeps, with the numbers that it draws."""
        assert self.fusion.kept is not None
        with torch.no_grad(), self._seeded():
            results = tensors(self.op(*self.all_inputs().values()))
        return self.fusion.kept(**dict(zip(self.fusion.results, results, strict=True)))

    @contextmanager
    def _seeded(self) -> Iterator[None]:
        """Use the same random numbers in every run."""
        with torch.random.fork_rng(devices=[], enabled=self.fusion.random):
            if self.fusion.random:
                torch.manual_seed(7)
            yield

    def _eager(self, inputs: Mapping[str, Any]) -> Any:
        """The pattern's outputs in eager mode."""
        low = self.case.dtype if self.case.wide else None
        return self.pattern(
            **{
                n: v.float() if isinstance(v, Tensor) and v.dtype == low else v
                for n, v in inputs.items()
            }
        )

    def _given(self, values: Mapping[str, Any]) -> dict[str, Any]:
        return {n: values[n] for n in self.names}

    def _run(self, call: Function, inputs: dict[str, Any], requested: Requested) -> Results:
        """Outputs, and gradients for the same incoming ones."""
        fresh = {n: _tracked(v) if n in requested.inputs else v for n, v in inputs.items()}
        with torch.enable_grad(), self._seeded():
            outputs = tensors(call(fresh))[: len(self.fusion.outputs)]
        incoming = self.incoming(outputs, self.case.gradients)
        roots = [
            (o, g)
            for n, o, g in zip(self.fusion.outputs, outputs, incoming, strict=True)
            if o.requires_grad and n in requested.outputs
        ]
        gradients: tuple[Tensor | None, ...] = (None,) * len(requested.inputs)
        if roots and requested.inputs:
            gradients = torch.autograd.grad(
                [o for o, _ in roots],
                [fresh[n] for n in requested.inputs],
                [g for _, g in roots],
                allow_unused=True,
            )
        return Results(
            [o.detach() for o in outputs], dict(zip(requested.inputs, gradients, strict=True))
        )


class _FixedDropout(TorchDispatchMode):
    """Dropout keeps the elements in `mask`, in eager's dtype and with its gradient."""

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self._mask = mask

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is not torch.ops.aten.native_dropout.default:
            return func(*args, **(kwargs or {}))
        x, p = args[:2]
        mask = self._mask.reshape(x.shape)
        return x * mask.to(x.dtype) * (1.0 / (1.0 - p)), mask


def _tracked(value: Tensor) -> Tensor:
    """A leaf with the same strides."""
    return value.detach().requires_grad_(True)
