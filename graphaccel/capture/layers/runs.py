"""Find runs of identical layers, shorten them, and prove that each layer's forward is the same.

The proof: the forward of the full model runs once on tensors without data, and every operator it
calls is recorded with its numbers, shapes and the origin of its tensors. Layers that read their
number, a list of the configuration, or the number of layers, differ in it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from typing import Any

import torch
from torch import nn

from graphaccel.capture.batch import Batch
from graphaccel.capture.export.export import LossFn, with_loss
from graphaccel.capture.state.closures import functions_follow
from graphaccel.compat.torch.export import exporting
from graphaccel.compat.torch.fakes import FakeTensor, fake_factory
from graphaccel.compat.torch.modes import TorchDispatchMode, without_modes
from graphaccel.ir.replication.layers import NotRepeated, Run, among

_PLAIN = (int, float, str, bool, type(None), tuple, torch.dtype, torch.Size)


def find_runs(model: nn.Module, least: int) -> tuple[Run, ...]:
    """Runs of `least` or more identical layers, outermost first.

    Identical: of one class, with parameters, buffers and plain attributes of the same names, types
    and values, except for integers that count the layers (`layer_idx`). Layers that share a
    parameter with another module are excluded.
    """
    shared = _shared(model)
    results: list[Run] = []
    for path, module in model.named_modules():
        if any(_inside(path, run) for run in results):
            continue
        children = list(module._modules.values())
        if [*module._modules] != [str(i) for i in range(len(children))]:
            continue
        start = 0
        for end in range(1, len(children) + 1):
            if end < len(children) and _identical(children[end - 1], children[end]):
                continue
            run = Run(path, start, end - start)
            if run.count >= least and not any(_inside(name, run) for name in shared):
                results.append(run)
            start = end
    return tuple(results)


def shortened(model: nn.Module, runs: Mapping[Run, int]) -> nn.Module:
    """A copy of the model, on the same parameters, with the given number of layers of each run."""
    built = _shallow(model)
    new = {model: built}
    by_path: dict[str, list[Run]] = {}
    for run in runs:
        by_path.setdefault(run.path, []).append(run)
    for path, own in by_path.items():
        holder: Any = built
        for name in path.split(".") if path else ():
            old: Any = holder._modules[name]
            if old not in new.values():
                new[old] = holder._modules[name] = _shallow(old)
            holder = holder._modules[name]
        gone = {i for r in own for i in range(r.first + runs[r], r.first + r.count)}
        kept = [m for i, m in enumerate(holder._modules.values()) if i not in gone]
        holder._modules = {str(i): m for i, m in enumerate(kept)}
    functions_follow(model, new)
    return built


def prove_repeats(
    model: nn.Module, batch: Batch, loss_fn: LossFn, runs: Sequence[Run], kept: int
) -> None:
    """Raises NotRepeated unless each run of the model does in its forward what `kept` layers do,
    with the middle one repeated. model, batch: fake."""
    short = shortened(model, dict.fromkeys(runs, kept))
    few = among(runs, (kept,) * len(runs))
    whole = _segments(model, batch, loss_fn, runs)
    part = _segments(short, batch, loss_fn, few)
    if whole.keys() != part.keys():
        raise NotRepeated("the runs are not all used")
    for key, said in part.items():
        if key[0] < 0:
            same = whole[key] == said
        else:
            own = whole[key]
            middle = own[1:-1]
            same = len(said) == kept and (own[0], own[-1]) == (said[0], said[-1])
            same = same and all(segment == said[1] for segment in (*middle, *said[1:-1]))
        if not same:
            raise NotRepeated("the layers of a run do not all compute the same")


def _inside(name: str, run: Run) -> bool:
    number = run.number(name)
    return number is not None and 0 <= number < run.count


def _shared(model: nn.Module) -> list[str]:
    """Names of parameters and buffers that are the same tensor under several names."""
    names: dict[int, list[str]] = {}
    tensors = (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    )
    for name, tensor in tensors:
        names.setdefault(id(tensor), []).append(name)
    return [n for own in names.values() if len(own) > 1 for n in own]


def _identical(left: nn.Module | None, right: nn.Module | None) -> bool:
    """Whether two neighbours are identical, except for their numbers."""
    if left is None or right is None:
        return left is right
    if type(left) is not type(right) or left._modules.keys() != right._modules.keys():
        return False
    own, other = _attributes(left), _attributes(right)
    if own.keys() != other.keys() or left._forward_hooks or right._forward_hooks:
        return False
    for name, value in own.items():
        given = other[name]
        if isinstance(value, torch.Tensor):
            if not isinstance(given, torch.Tensor) or not _same_values(value, given):
                return False
            continue
        counts = type(value) is int and type(given) is int and given == value + 1
        if not counts and (type(value) is not type(given) or value != given):
            return False
    return all(_identical(m, right._modules[name]) for name, m in left._modules.items())


def _attributes(module: nn.Module) -> dict[str, Any]:
    results = {k: v for k, v in vars(module).items() if isinstance(v, (*_PLAIN, torch.Tensor))}
    tensors = {**module._parameters, **module._buffers}
    results |= {f"tensor {k}": None if t is None else _described(t) for k, t in tensors.items()}
    return results


def _same_values(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two attributes that are not parameters are equal; false where that is unknown."""
    if left is right:
        return True
    known = not (left.is_meta or right.is_meta)
    known = known and not isinstance(left, FakeTensor) and not isinstance(right, FakeTensor)
    return known and _described(left) == _described(right) and torch.equal(left, right)


def _described(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (tensor.dtype, tensor.shape, tensor.stride(), tensor.requires_grad, tensor.device)


def _shallow(module: nn.Module) -> nn.Module:
    built = copy.copy(module)
    built._modules = dict(module._modules)
    return built


class _Watch(TorchDispatchMode):
    """Records every operator: what it is, its numbers, and where its tensors were computed.

    A tensor computed outside the current segment is named by its segment ("before the run", "the
    segment before") and its place there. Parameters and buffers are named by the distance of their
    layer from the current one, tensors from anywhere else by their values.
    """

    def __init__(self, model: nn.Module, runs: Sequence[Run]) -> None:
        super().__init__()
        own = (*model.named_parameters(), *model.named_buffers())
        self._own = {id(tensor): _place_of(name, runs) for name, tensor in own}
        self.segments: dict[tuple[int, int], list[list[Any]]] = {}
        # (run, layer); the segments between the runs are (-1, 0), (-1, 1) ...
        self.here: tuple[int, int] = -1, 0
        self.stretch = 0
        self.runs = runs
        self._made_by: dict[tuple[int, int], Any] = {}
        self._made: dict[int, tuple[tuple[int, int], int]] = {}
        self._alive: list[Any] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if func is torch.ops.prim.device.default:  # queried for every tensor
            return _device(args[0])
        own = self.segments.setdefault(self.here, [])
        call = [func, self._comparable(args), self._comparable(kwargs or {})]
        repeated = self._repeated(call, len(own))
        result = func(*args, **(kwargs or {})) if repeated is None else repeated()
        own.append([*call, self._shapes(result)])
        if repeated is None and self.here[0] >= 0 and self.here[1] == 1:
            self._keep(len(own) - 1, func, result)
        for tensor in _tensors(result):
            self._made[id(tensor)] = (self.here, len(own))
            self._alive.append(tensor)  # or its id could be reused
        return result

    def _keep(self, place: int, func: Any, result: Any) -> None:
        """Record how to rebuild the result of a call of a run's second layer, for later layers:
        unless it writes in place, or its result has a value (a constant of the layer)."""
        run, _ = self.here
        tensors = result if isinstance(result, (tuple, list)) else (result,)
        plain = all(isinstance(t, FakeTensor) and t.constant is None for t in tensors)
        if plain and not any(a.alias_info and a.alias_info.is_write for a in _arguments(func)):
            make = [fake_factory(t) for t in tensors]
            whole = type(result) if isinstance(result, (tuple, list)) else None
            self._made_by[run, place] = lambda: (
                make[0]() if whole is None else whole([each() for each in make])
            )

    def _repeated(self, call: list[Any], place: int) -> Any:
        """A function that rebuilds the result of a call if the layer before made the same call: the
        result depends on nothing else, so the op need not run. None where the calls differ."""
        run, layer = self.here
        before = self.segments.get((run, layer - 1), []) if run >= 0 and layer > 1 else []
        same = place < len(before) and before[place][:3] == call
        return self._made_by.get((run, place)) if same else None

    def _comparable(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return (self._origin(value), self._shapes(value))
        if isinstance(value, (tuple, list)):
            return [self._comparable(v) for v in value]
        if isinstance(value, dict):
            return [(k, self._comparable(v)) for k, v in value.items()]
        return repr(value)

    def _origin(self, tensor: torch.Tensor) -> Any:
        built = self._made.get(id(tensor))
        if built is None and id(tensor) in self._own:
            run, layer, rest = self._own[id(tensor)]
            return (run, self.here[1] - layer if run == self.here[0] >= 0 else layer, rest)
        if built is None:
            return "input" if isinstance(tensor, FakeTensor) else _digest(tensor)
        (run, layer), place = built
        if run < 0 or self.here[0] < 0:
            last = run >= 0 and layer == self.runs[run].count - 1
            return (run, "last" if last else layer, place)
        if run == self.here[0]:
            return (run, "back", self.here[1] - layer, place)
        return (run, "last" if layer == self.runs[run].count - 1 else layer, place)

    def _shapes(self, value: Any) -> Any:
        return [(t.dtype, tuple(t.shape), t.stride(), _device(t)) for t in _tensors(value)]


def _place_of(name: str, runs: Sequence[Run]) -> tuple[int, Any, str]:
    """The run and layer that a parameter belongs to, and its name there; -1 outside of runs, with
    the distance after a run in its place."""
    behind: tuple[int, Any, str] = (-1, "", name)
    for number, run in enumerate(runs):
        at = run.number(name)
        if at is None or at < 0:
            continue
        rest = run.around(name)[1]
        if at < run.count:
            return (number, at, rest)
        behind = (-1, (number, at - run.count), rest)
    return behind


def _digest(tensor: torch.Tensor) -> Any:
    """A key of a tensor's values."""
    if tensor.is_meta or tensor.numel() == 0:
        return (tensor.dtype, tensor.shape)
    with without_modes():
        flat = tensor.detach().contiguous().flatten().cpu().view(torch.uint8)
        return sha256(flat.numpy().tobytes()).hexdigest()


def _device(tensor: torch.Tensor) -> torch.device:
    return tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device


def _arguments(func: Any) -> Sequence[Any]:
    return (*func._schema.arguments, *func._schema.returns)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for v in value:
            yield from _tensors(v)


def _segments(
    model: nn.Module, batch: Batch, loss_fn: LossFn, runs: Sequence[Run]
) -> dict[tuple[int, int], list[Any]]:
    """The calls of the forward before, between and after the runs: {(-1, stretch): [calls]}, and in
    each run: {(run, 0): [calls of each layer]}.

    Calls between two layers belong to the first of them.

    Raises NotRepeated where layers are not called one after another, or the forward needs data.
    """
    fake = next(p for p in nn.Module.parameters(model) if isinstance(p, FakeTensor)).fake_mode
    watch = _Watch(model, runs)
    handles = []
    for number, run in enumerate(runs):
        layers = [*model.get_submodule(run.path)._modules.values()]
        for layer in range(run.count):
            module = layers[run.first + layer]
            assert module is not None
            handles.append(module.register_forward_pre_hook(_enter(watch, number, layer)))
        handles.append(module.register_forward_hook(_leave(watch)))
    args, kwargs = batch.rebuild(batch.leaves)
    try:
        with fake, exporting(), torch.enable_grad(), watch:
            with_loss(model, loss_fn)(*args, **kwargs)
    except NotRepeated:
        raise
    except Exception as error:
        raise NotRepeated(f"its forward does not run without data: {error}") from error
    finally:
        for handle in handles:
            handle.remove()
    results: dict[tuple[int, int], list[Any]] = {}
    for (run, layer), calls in watch.segments.items():
        if run < 0:
            results[run, layer] = calls
        else:
            results.setdefault((run, 0), []).append(calls)
    return results


def _enter(watch: _Watch, run: int, layer: int) -> Any:
    def enter(_module: nn.Module, _args: Any) -> None:
        expected = watch.here[0] < 0 if layer == 0 else watch.here == (run, layer - 1)
        if not expected or (run, layer) in watch.segments:
            raise NotRepeated("layers are not called one after the other, each once")
        watch.here = (run, layer)
        watch.segments[run, layer] = []

    return enter


def _leave(watch: _Watch) -> Any:
    def leave(_module: nn.Module, _args: Any, _result: Any) -> None:
        watch.stretch += 1
        watch.here = (-1, watch.stretch)

    return leave
