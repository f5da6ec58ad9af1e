"""Values that a forward asks for and that no input decides: those of small buffers, and of tensors
that are made of numbers and sizes.

    mask = torch.ones(len(x), 16)
    mask[:, 8:] = 0
    if mask.any():                                  # known
    x.view(torch.div(x.shape[1], 2, rounding_mode="trunc"), 2)      # so is a size
    if (mask * x).any():                            # not known

What is called on such tensors is remembered, and computed where the forward asks for the result.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from graphaccel.compat.torch import pytree
from graphaccel.compat.torch.modes import outside_modes
from graphaccel.compat.torch.tensors import version

_LARGEST = 1 << 22
"""Elements of a tensor from which on its values are not computed."""
_ASKS = frozenset("item tolist __bool__ __int__ __float__ __index__ is_nonzero equal".split())
_CREATES, _NEW = ("zeros", "ones", "full"), ("new_zeros", "new_ones", "new_full")
_RESHAPES = ("view", "reshape", "expand", "repeat", "pad", "getitem")
_MAKES = frozenset((*_CREATES, *"arange eye tensor as_tensor scalar_tensor linspace".split()))
_OF_SHAPES = frozenset((*_NEW, *"new_tensor zeros_like ones_like full_like".split()))
"""Functions that read no values of their first tensor."""
_COMPUTES = frozenset(_RESHAPES) | frozenset(
    "eq ne lt le gt ge any all sum max min amax amin abs invert and or xor logical_not logical_and "
    "logical_or to bool int long float double detach clone squeeze unsqueeze flatten add radd sub "
    "rsub mul rmul div rdiv truediv rtruediv floordiv rfloordiv floor_divide pow rpow mod "
    "remainder isfinite isnan isinf count_nonzero neg floor ceil round trunc sqrt exp log sign "
    "clamp minimum maximum where cat concat stack expand_as broadcast_to permute transpose cumsum "
    "prod mean masked_fill tril triu flip contiguous index_select gather".split()
)
"""Functions that are computed of values: without a draw, and with one result."""
_FILLS = frozenset(("setitem", "fill", "zero", "copy"))
"""What is written to a tensor in place, besides what `_COMPUTES` computes."""
_TAKES_SIZES = frozenset((*_CREATES, *_NEW, *_RESHAPES)) | frozenset(
    "arange empty new_empty narrow unflatten as_strided setitem split chunk".split()
)
_IN_PLACE = frozenset(f"__i{n[2:]}" for n in dir(operator) if f"__i{n[2:]}" in dir(operator))
_UNDECLARED = ("batch_norm", "instance_norm", "update_stats", "gather_stats", "with_counts")
"""How the names of functions end that write to running statistics, which no schema of torch's
says."""
_PLAIN = (
    int, float, bool, str, complex, type(None), type(...), torch.dtype, torch.device, torch.Size,
    torch.layout, torch.memory_format,
)  # fmt: skip
_WHOLE = frozenset({torch.int64, torch.int32})
_DEVICES = frozenset("cuda xpu mps".split())

Source = tuple[torch.Tensor, int]
"""A buffer, and how often it was written to."""


class KnownTensor:
    """A tensor without data whose value follows from the call that made it.

    call: (function, arguments, keyword arguments, whether it writes to the first), with known
    tensors in place of tensors. sources: the buffers that the value is computed of.
    """

    def __init__(
        self,
        tensor: torch.Tensor,
        call: tuple[Callable[..., Any], tuple, Mapping[str, Any], bool] | None,
        sources: Mapping[str, Source],
        value: torch.Tensor | None = None,
    ) -> None:
        self.tensor, self.sources = tensor, sources
        self.value, self._call, self._version = value, call, version(tensor)

    @property
    def is_current(self) -> bool:
        """Whether neither it nor a buffer that it is computed of has been written to since."""
        return version(self.tensor) == self._version and all(
            version(tensor) == number for tensor, number in self.sources.values()
        )

    def computed(self) -> torch.Tensor | None:
        """The value; None where it does not fit the tensor."""
        waiting = [self]
        while waiting:
            one = waiting[-1]
            if one.value is None:
                assert one._call is not None
                before = [k for k in _known_in(one._call[1:3]) if k.value is None]
                if before:
                    waiting += before
                    continue
                one.value, one._call = _called(*one._call), None
            if (one.value.dtype, one.value.shape) != (one.tensor.dtype, one.tensor.shape):
                return None
            waiting.pop()
        return self.value


def _known_in(arguments: Any) -> list[KnownTensor]:
    return [x for x in pytree.tree_leaves(arguments) if isinstance(x, KnownTensor)]


def _called(function: Callable[..., Any], args: tuple, kwargs: Any, writes: bool) -> Any:
    """What a function returns on values, or leaves in its first argument; on the host."""

    def value(x: Any) -> Any:
        if isinstance(x, KnownTensor):
            return x.value
        named = isinstance(x, str) and x.partition(":")[0] in _DEVICES
        return _HOST if named or isinstance(x, torch.device) else x

    with outside_modes(), torch.no_grad():
        args, kwargs = pytree.tree_map(value, (args, dict(kwargs)))
        if writes:
            args = (args[0].clone(), *args[1:])
        result = function(*args, **kwargs)
        return args[0] if writes else result


class Answers(TorchFunctionMode):
    """Answers what a forward asks of tensors whose values no input decides.

    buffers: name → value of buffers of `model`, which is a copy without data; those that the
    forward has not written to are known. asked: gets the names of those that it asks for.
    """

    def __init__(
        self, model: nn.Module, buffers: Mapping[str, torch.Tensor], asked: set[str]
    ) -> None:
        super().__init__()
        self._asked = asked
        self._known: dict[int, KnownTensor] = {}
        for name, buffer in model.named_buffers(remove_duplicate=False) if buffers else ():
            if name in buffers:
                source = {name: (buffer, version(buffer))}
                with outside_modes():  # or a copy becomes a constant of the graph
                    value = buffers[name].to("cpu")
                self._known[id(buffer)] = KnownTensor(buffer, None, source, value)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        bare = name.strip("_")
        if bare in _TAKES_SIZES:
            own = args[: bare not in _MAKES and bare != "empty"]
            args = (*own, *map(self._as_number, args[len(own) :]))
            kwargs = {k: self._as_number(x) for k, x in kwargs.items()}
        if bare in ("getitem", "setitem") and self._is_every_row(args[0], args[1]):
            func, args = _EVERY_ROW[bare], (args[0], *args[2:])
        leaves = pytree.tree_leaves((args, kwargs))
        tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
        known = [k for t in tensors if (k := self._of(t)) is not None]
        shaped = bare in _OF_SHAPES and bool(args) and any(args[0] is t for t in tensors[:1])
        needed = tensors[1:] if shaped else tensors
        whole = all(self._of(t) is not None for t in needed) and all(map(_is_plain, leaves))
        if name in _ASKS and known and whole:
            return self._answered(func, args, kwargs, known)
        writes = any(id(t) in self._known for t in tensors) and _writes(name, kwargs)
        remembered = self._remembered(args, kwargs) if whole else ((), {})
        result = func(*args, **kwargs)
        self._forget_written(writes, tensors)
        if not whole or not isinstance(result, torch.Tensor | None):
            return result
        if writes:
            if known and "out" not in kwargs and _is_filled(bare):
                self._note(args[0], (func, *remembered, True), known)
        elif shaped and result is not None:
            like = _unset(args[0] if bare.startswith("new") else result)
            self._note(result, (func, (like, *remembered[0][1:]), remembered[1], False), known)
        elif bare in _MAKES or bare in _COMPUTES or _reads_data(func):
            self._note(result, (func, *remembered, False), known)
        return result

    def _of(self, tensor: torch.Tensor) -> KnownTensor | None:
        known = self._known.get(id(tensor))
        return known if known is not None and known.is_current else None

    def _remembered(self, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        def known(x: Any) -> Any:
            return self._of(x) if isinstance(x, torch.Tensor) else x

        return pytree.tree_map(known, (args, kwargs))

    def _note(self, result: Any, call: Any, known: Iterable[KnownTensor]) -> None:
        """Remember how a result was made."""
        if not isinstance(result, torch.Tensor) or result.device.type == "meta":
            return
        if result.is_inference():  # writes to it are not counted
            return
        if all(isinstance(n, int) for n in result.shape) and result.numel() <= _LARGEST:
            sources = {n: source for one in known for n, source in one.sources.items()}
            self._known[id(result)] = KnownTensor(result, call, sources)

    def _answered(self, func: Any, args: tuple, kwargs: Any, known: list[KnownTensor]) -> Any:
        if any(one.computed() is None for one in known):
            return func(*args, **kwargs)
        self._asked.update(n for one in known for n in one.sources)
        return _called(func, *self._remembered(args, kwargs), False)

    def _as_number(self, value: Any) -> Any:
        """An argument with numbers in place of tensors of one whole number that are known."""
        if isinstance(value, (tuple, list)) and type(value) in (tuple, list):
            return type(value)(map(self._as_number, value))
        if isinstance(value, slice):
            return slice(*map(self._as_number, (value.start, value.stop, value.step)))
        if not isinstance(value, torch.Tensor) or value.dim() or value.dtype not in _WHOLE:
            return value
        known = self._of(value)
        if known is None or known.sources:  # a count in a buffer stays a value of the graph
            return value
        result = known.computed()
        if result is None:
            return value
        with outside_modes():
            return result.item()

    def _is_every_row(self, value: torch.Tensor, index: Any) -> bool:
        """Whether an index is a mask of rows that is known, and leaves none out."""
        if not isinstance(index, torch.Tensor) or index.dtype != torch.bool or index.dim() != 1:
            return False
        known = self._of(index)
        result = None if known is None or known.sources else known.computed()
        if result is None or len(value) != len(index):
            return False
        with outside_modes():
            return bool(result.all())

    def _forget_written(self, writes: bool, tensors: list[torch.Tensor]) -> None:
        """Forget what is computed of buffers that a call may write to without a count of it."""
        known = [self._known[id(t)] for t in tensors if id(t) in self._known] if writes else []
        gone = {source for one in known for source in one.sources}
        if gone:
            for key in [k for k, one in self._known.items() if not gone.isdisjoint(one.sources)]:
                del self._known[key]


_HOST = torch.device("cpu")
_EVERY_ROW: Mapping[str, Callable[..., Any]] = {
    "getitem": torch.clone,
    "setitem": lambda x, value: x.__setitem__(slice(None), value),
}


def _is_plain(value: Any) -> bool:
    """Whether nothing but known tensors decides what a call does with an argument."""
    if isinstance(value, slice):
        return all(x is None or isinstance(x, int) for x in (value.start, value.stop, value.step))
    return isinstance(value, (torch.Tensor, *_PLAIN))


def _unset(like: torch.Tensor) -> torch.Tensor:
    """A tensor of this shape and dtype whose values do not matter."""
    with outside_modes():
        return torch.empty((1,) * like.dim(), dtype=like.dtype).expand(like.shape)


def _reads_data(func: Any) -> bool:
    return func is torch.Tensor.data.__get__  # type: ignore[attr-defined]


def _is_filled(bare: str) -> bool:
    """Whether what a function that writes leaves in its first argument can be computed."""
    return bare in _FILLS or bare in _COMPUTES or bare[1:] in _COMPUTES  # `iadd`


def _writes(name: str, kwargs: Mapping[str, Any]) -> bool:
    """Whether a function may write to one of its tensors."""
    own = name.endswith("_") and not name.endswith("__")
    operators = name in _IN_PLACE or name == "__setitem__"
    return own or operators or "out" in kwargs or name.endswith(_UNDECLARED) or _declared(name)


def _declared(name: str) -> bool:
    """Whether torch's schemas of an operator say that it writes, besides to `out`."""
    packet: Any = getattr(torch.ops.aten, name, None)
    names = packet.overloads() if hasattr(packet, "overloads") else ()
    overloads = [getattr(packet, each) for each in names]
    given = [a for each in overloads for a in each._schema.arguments if "Tensor" in str(a.type)]
    return any(a.alias_info is not None and a.alias_info.is_write and not a.is_out for a in given)
