"""Models that are built without memory and initialised later, a tensor at a time.

`record(build)` runs `build()` on tensors without memory and records every op on them, with the
state of the random generator before each op that draws (`runtime.init_tape`). Each rank then
computes the values of the tensors it holds, whatever the plan: the same values as on one device.

While recording, the generator advances as it would on one device: each draw is made once on a
buffer that is thrown away. This takes the time of initialising the model, and the memory of its
largest tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from graphaccel.compat.torch import pytree
from graphaccel.compat.torch.fakes import FakeTensor, FakeTensorMode, UnknownValue, clear_fake_memo
from graphaccel.compat.torch.modes import TorchDispatchMode, without_modes
from graphaccel.compat.torch.tensors import storage_key
from graphaccel.errors import CannotInitialise, GraphMisuse
from graphaccel.runtime.execution.answers import from_all, from_first
from graphaccel.runtime.init_tape import InitCall, InitTape, TensorRef, ref_of

aten = torch.ops.aten
# In place, and overwrites the tensor without reading it.
_FILLS = frozenset(
    {
        "uniform_", "normal_", "random_", "exponential_", "geometric_", "cauchy_", "log_normal_",
        "bernoulli_", "fill_", "zero_", "copy_",
    }
)  # fmt: skip
_HELD = ("_parameters", "_buffers", "_modules")  # attributes of a module that are not plain
_READS_VALUES = (aten._local_scalar_dense.default, aten.equal.default)


RECORD = "_graphaccel_record"  # on a model, until it is initialised


def deferred(build: Callable[[], nn.Module]) -> nn.Module:
    """The model that `build()` makes, without memory: its parameters are on the meta device.

        model = graphaccel.deferred(lambda: GPT(config))

    `graphaccel.optimize` initialises them on the ranks that hold them: bitwise with the values that
    `build()` gives on one device with the same random state, which then advances as after
    `build()`.

    Raises CannotInitialise (GA212) where `build` does something that cannot be recorded.
    """
    model, built = record(build)
    vars(model)[RECORD] = built
    return model


def initial_values(
    model: nn.Module, build: Callable[[], nn.Module] | None = None
) -> InitTape | None:
    """How a model on the meta device is initialised; None for one that has its weights.

    build: makes the model anew. Without it: what `deferred` has recorded; and a Hugging Face model
    is built anew from its config. Tensors that modules keep as plain attributes get values.

    Raises CannotInitialise (GA212) where it is not known, GraphMisuse (GA407) for a `build` given
    for a model that has weights.
    """
    name = type(model).__name__
    if not any(p.is_meta for p in nn.Module.parameters(model)):
        if build is not None:
            raise GraphMisuse(
                what=f"init_fn was given, but `{name}` has its weights already",
                help_line="leave init_fn out, or build the model under torch.device('meta')",
            )
        return None
    built = vars(model).get(RECORD)
    if build is None and built is None:
        build = _from_config(model)
        if build is None:
            raise CannotInitialise(
                model=name,
                reason="it was built on the meta device, which keeps no record of how parameters "
                "are filled",
            )
    if build is not None:
        copied, built = record(build, name)
        _give_attributes(model, copied)
    assert built is not None
    _check_same(model, built)
    return built


def _from_config(model: nn.Module) -> Callable[[], nn.Module] | None:
    """A function that builds a Hugging Face model from its config; None for other models."""
    config = getattr(model, "config", None)
    if config is None or not isinstance(config, getattr(model, "config_class", None) or ()):
        return None
    return lambda: type(model)(config)


def _tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]


def _check_same(model: nn.Module, built: InitTape) -> None:
    """Raise unless every tensor of the model was recorded, with the same shape and dtype."""
    for name, tensor in _tensors(model):
        ref = built.tensors.get(name)
        said = None if ref is None else (ref.dtype, ref.shape)
        if said != (tensor.dtype, tuple(tensor.shape)):
            match = "nothing" if said is None else f"{list(said[1])} of {said[0]}"
            raise CannotInitialise(
                model=type(model).__name__,
                reason=f"`{name}` is {list(tensor.shape)} of {tensor.dtype}, and {match} was built"
                " under that name",
            )


def _give_attributes(model: nn.Module, copied: nn.Module) -> None:
    """Replace tensors on the meta device that are neither parameters nor buffers by the twin's."""
    others = dict(copied.named_modules())
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if key not in _HELD and any(_is_meta(x) for x in pytree.tree_leaves(value)):
                vars(module)[key] = vars(others[name])[key]


def _is_meta(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_meta


def record(build: Callable[[], nn.Module], name: str = "Model") -> tuple[nn.Module, InitTape]:
    """Build a model without memory; parameters and buffers are on the meta device. name: of its
    class, for errors.

    Other tensors that modules keep as attributes get their values immediately. Raises
    CannotInitialise (GA212) where `build` does something that cannot be recorded.
    """
    built = InitTape()
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    try:
        with mode, _Recorder(built, mode):
            model = build()
    except (_NotRecorded, *UnknownValue) as error:
        raise CannotInitialise(model=name, reason=f"it can not be recorded: {error}") from error
    if not isinstance(model, nn.Module):
        said = f"init_fn returned a {type(model).__name__}, not a torch.nn.Module"
        raise CannotInitialise(model=name, reason=said)
    _settle(model, built)
    return model, built


def share_record(built: InitTape) -> None:
    """Broadcast rank 0's random states to all ranks. Collective.

    Raises CannotInitialise (GA212) where the ranks built different models.
    """
    mine = built.digest()
    sent = from_first((mine, [s.numpy() for s in built.states()]), "the random states of rank 0")
    same = from_all(sent[0] == mine, "the models of all ranks")
    if not all(same):
        ranks = ", ".join(str(i) for i, equal in enumerate(same) if not equal)
        raise CannotInitialise(
            model="Model", reason=f"rank {ranks} built another model than rank 0, or filled it so"
        )
    built.with_states(iter(torch.from_numpy(s) for s in sent[1]))


class _NotRecorded(Exception):
    """Raised for an op that cannot be recorded."""


def _settle(model: nn.Module, built: InitTape) -> None:
    """Move every parameter and buffer to the meta device, and compute every other tensor of a
    module."""
    held: dict[
        int, tuple[torch.Tensor, TensorRef, torch.Tensor]
    ] = {}  # the tensor keeps its id() valid
    for name, tensor in _tensors(model):
        if id(tensor) not in held:
            fake = isinstance(tensor, FakeTensor)
            ref = ref_of(tensor) if fake else built.constant(tensor)
            held[id(tensor)] = (tensor, ref, _on_meta(tensor))
        built.tensors[name] = held[id(tensor)][1]
    for module in model.modules():
        for own in (module._parameters, module._buffers):
            for name, tensor in own.items():
                if tensor is not None:
                    own[name] = held[id(tensor)][2]  # type: ignore[assignment]
        for name, value in vars(module).items():
            if name not in _HELD:
                if any(isinstance(leaf, FakeTensor) for leaf in pytree.tree_leaves(value)):
                    vars(module)[name] = pytree.tree_map_only(
                        FakeTensor, lambda t: built.value(ref_of(t)), value
                    )


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    if not isinstance(tensor, nn.Parameter):
        return empty
    parameter = nn.Parameter(empty, requires_grad=tensor.requires_grad)
    own = {k: v for k, v in vars(tensor).items() if not isinstance(tensor, FakeTensor)}
    vars(parameter).update(own)
    return parameter


class _Recorder(TorchDispatchMode):
    """Creates tensors without memory, and records the ops on them.

    Tensors with values from elsewhere (`torch.tensor`, numpy) keep them, as long as only they are
    used. An op that only reads a tensor's metadata is answered from the tensor.
    """

    def __init__(self, built: InitTape, mode: FakeTensorMode) -> None:
        super().__init__()
        self.made, self.mode = built, mode
        self._alive: list[Any] = []  # storages, kept alive so that no other one gets the same id

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        device = kwargs.get("device")
        if device is not None and torch.device(device).type not in ("cpu", "meta"):
            raise _NotRecorded(f"{func} makes a tensor on {device}; build the model on the CPU")
        real = any(not isinstance(t, FakeTensor) for t in _written(func, args, kwargs))
        if func in _READS_VALUES or real:
            return self._for_real(func, args, kwargs)
        refs = pytree.tree_map_only(torch.Tensor, self._argument, (args, kwargs))
        state = None
        if torch.Tag.nondeterministic_seeded in func.tags:
            state = self._draw(func, *refs)
        result = func(*args, **kwargs)
        clear_fake_memo(self.mode)
        self._add(func, refs, result, state)
        return result

    def _for_real(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Run on actual values, which the caller needs."""

        def real(tensor: torch.Tensor) -> torch.Tensor:
            return self.made.value(ref_of(tensor)) if isinstance(tensor, FakeTensor) else tensor

        with without_modes():
            args, kwargs = pytree.tree_map_only(torch.Tensor, real, (args, kwargs))
            return func(*args, **kwargs)

    def _argument(self, tensor: torch.Tensor) -> TensorRef:
        if isinstance(tensor, FakeTensor):
            self._keep(tensor)
            return ref_of(tensor)
        return self.made.constant(tensor)

    def _keep(self, tensor: torch.Tensor) -> None:
        memory = storage_key(tensor)
        if memory not in self.made.sizes:
            self.made.sizes[memory] = tensor.untyped_storage().nbytes()
            self._alive.append(tensor.untyped_storage())

    def _add(self, func: Any, refs: Any, result: Any, state: torch.Tensor | None) -> None:
        given = [r for r in pytree.tree_leaves(refs) if isinstance(r, TensorRef)]
        written = frozenset(r.memory for r in _written(func, *refs))
        known = frozenset(r.memory for r in given)
        out = []
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._keep(tensor)
            out.append(ref_of(tensor) if isinstance(tensor, torch.Tensor) else None)
        built = frozenset(r.memory for r in out if r is not None) - known
        if not written and not built:
            return  # a view
        fills = set(built)
        if func._schema.name.removeprefix("aten::") in _FILLS:
            whole = given[0]
            count = self.made.sizes[whole.memory] // whole.dtype.itemsize
            others = [r.memory for r in given[1:]]
            if torch.Size(whole.shape).numel() == count and whole.memory not in others:
                fills.add(whole.memory)
        reads = frozenset(r.memory for r in given) - fills
        args, kwargs = refs
        self.made.append(
            InitCall(
                func, args, kwargs, tuple(out), reads, written | built, frozenset(fills), state
            )
        )

    def _draw(self, func: Any, args: tuple, kwargs: dict) -> torch.Tensor:
        """Draw once and discard it, so that the next draw is that of one device; returns the state
        before."""
        generator = kwargs.get("generator")
        state = (generator or torch.default_generator).get_state()
        fills = func._schema.name.removeprefix("aten::") in _FILLS

        def real(ref: TensorRef) -> torch.Tensor:
            if fills and ref is args[0]:
                return ref.on(torch.UntypedStorage(self.made.sizes[ref.memory]))
            return self.made.value(ref)

        with without_modes():
            real_args, real_kwargs = pytree.tree_map_only(TensorRef, real, (args, kwargs))
            func(*real_args, **real_kwargs)
        return state


def _written(func: Any, args: tuple, kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments that an op writes to: tensors or what stands for them."""
    results: list[Any] = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            leaves = pytree.tree_leaves(value)
            results += [x for x in leaves if isinstance(x, (TensorRef, torch.Tensor))]
    return results
