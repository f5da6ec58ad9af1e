"""What one entry of a list gives: a model with its loss inside, and a batch for it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

SEED = 11


class NotMeasured(Exception):
    """The entry can not be measured at all; the text says why, and stands in the table."""


@dataclass(frozen=True)
class Entry:
    """A model in training mode whose result is its loss, and the call `model(*args, **kwargs)`."""

    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] | None = None

    def __call__(self, model: nn.Module | None = None) -> Tensor:
        """The loss of one call, of this entry's model or of one that stands for it."""
        result = (self.model if model is None else model)(*self.args, **(self.kwargs or {}))
        return result if isinstance(result, Tensor) else result[0]


class Weighted(nn.Module):
    """A scalar loss of any outputs: each is scaled by a parameter, bounded by a sine and weighted,
    along all dims but the first: no two positions of an example count alike, examples may be split,
    and what is measured has trained work on both sides, so that a pipeline can be cut around it.
    Scalars are summed as they are: they are losses.

    outputs: what the loss will be asked of, once, to learn the shapes.
    """

    def __init__(self, outputs: Any) -> None:
        super().__init__()
        for i, value in enumerate(_floating(outputs)):
            if value.dim() == 0:
                continue
            count = math.prod(value.shape[1:])
            weights = 1 + 0.5 * torch.cos(torch.arange(count, dtype=value.dtype))
            self.register_buffer(f"weight_{i}", weights.reshape(value.shape[1:]), persistent=False)
            ones = torch.ones(value.shape[1:], dtype=value.dtype)
            self.register_parameter(f"gain_{i}", nn.Parameter(ones))

    def forward(self, outputs: Any) -> Tensor:
        return sum(self._term(i, value) for i, value in enumerate(_floating(outputs)))

    def _term(self, i: int, value: Tensor) -> Tensor:
        if value.dim() == 0:
            return value
        scaled = value * getattr(self, f"gain_{i}")
        return (scaled.sin() * getattr(self, f"weight_{i}")).sum()


def _floating(outputs: Any) -> list[Tensor]:
    """The outputs that a loss can be made of; complex ones as pairs of numbers, those in half
    precision widened: the order of their sum is not to be seen."""
    tensors = [x for x in pytree.tree_leaves(outputs) if isinstance(x, Tensor)]
    real = [torch.view_as_real(x.resolve_conj()) if x.is_complex() else x for x in tensors]
    wide = [x.double() if x.dtype in (torch.half, torch.bfloat16) else x for x in real]
    return [x for x in wide if x.is_floating_point() and (x.requires_grad or x.grad_fn is not None)]


class Scaled(nn.Module):
    """`call` on tensors of which the floating-point ones are scaled by a parameter that is one.

    leaves: the flattened arguments of `call`. Those at `given` are arguments of the model: each
    floating-point one that needs a gradient is multiplied by a parameter of the shape of an example
    (`shape[1:]`). Other tensors are parameters if they need a gradient, else buffers.
    Where `call` is a module, its parameters are the model's too.
    """

    def __init__(
        self,
        call: Callable[..., Any],
        leaves: Sequence[Any],
        spec: Any,
        given: Sequence[int],
    ) -> None:
        super().__init__()
        self.call, self._spec, self._given = call, spec, tuple(given)
        self._plain = [None if isinstance(x, Tensor) else x for x in leaves]
        self._held = []
        for i, leaf in enumerate(leaves):
            if not isinstance(leaf, Tensor):
                continue
            if i in given:
                if trained(leaf):
                    ones = torch.ones(leaf.shape[1:], dtype=leaf.dtype)
                    self.register_parameter(f"scale_{i}", nn.Parameter(ones))
                continue
            self._held.append(i)
            value = leaf.detach().clone()
            if trained(leaf):
                self.register_parameter(f"held_{i}", nn.Parameter(value))
            else:
                self.register_buffer(f"held_{i}", value)
        self.loss: Weighted | None = None

    def outputs(self, *given: Tensor) -> Any:
        """What `call` returns."""
        leaves = list(self._plain)
        for i in self._held:
            leaves[i] = getattr(self, f"held_{i}")
        for i, value in zip(self._given, given, strict=True):
            scale = getattr(self, f"scale_{i}", None)
            leaves[i] = value if scale is None else value * scale
        args, kwargs = pytree.tree_unflatten(leaves, self._spec)
        return self.call(*args, **kwargs)

    def forward(self, *given: Tensor) -> Tensor:
        assert self.loss is not None
        return self.loss(self.outputs(*given))


def trained(leaf: Tensor) -> bool:
    """Whether an argument is something that a model would train, or compute from what it trains."""
    return leaf.requires_grad and (leaf.is_floating_point() or leaf.is_complex())


def scaled_entry(
    call: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    held: Sequence[int] = (),
) -> Entry:
    """`call(*args, **kwargs)` as an entry; tensors at the flat positions `held` are the model's.

    Raises NotMeasured where eager mode fails, or nothing that comes out needs a gradient.
    """
    leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
    given = [i for i, x in enumerate(leaves) if isinstance(x, Tensor) and i not in held]
    model = Scaled(call, leaves, spec, given)
    batch = tuple(leaves[i].detach().clone() for i in given)
    torch.manual_seed(SEED)
    try:
        outputs = model.outputs(*batch)
    except Exception as error:
        raise NotMeasured(f"eager: {first_line(error)}") from error
    if not _floating(outputs):
        raise NotMeasured("no output of the sample needs a gradient")
    model.loss = Weighted(outputs)
    return Entry(model, batch)


def says_something(entry: Entry) -> bool:
    """Whether the loss is a number and the batch has elements: there is nothing to compare
    otherwise, and an empty batch is refused."""
    torch.manual_seed(SEED)
    full = all(x.numel() for x in entry.args if isinstance(x, Tensor))
    return full and bool(torch.isfinite(entry()))


def first_line(error: BaseException) -> str:
    """Class and first line of an error."""
    text = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {text[0][:160]}"
