"""Everything graphaccel uses of torch that torch does not promise to keep.

The only file that may import names with an underscore from torch. Each name says what it is used
for, so that a new torch version is checked here and nowhere else.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import fx

# Which ops are made of others, and which of these stay whole where no op is decomposed on purpose
# (capture/decompose.py does what `ExportedProgram.run_decompositions({})` does).
from torch._export.utils import _is_cia_op, _is_preservable_cia_op

# What fake tensors say of single ops.
from torch._subclasses.fake_impls import op_implementations_dict, register_op_impl

# Tensors with shapes and no data: tracing and propagation.
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)

# Meshes of owners, to present parameters as DTensors (runtime/parameters/state.py).
from torch.distributed.device_mesh import DeviceMesh

# A dim cut section by section: as DTensor says what runtime/parameters/layout.py calls `outer`.
from torch.distributed.tensor.placement_types import _StridedShard

# Graphs that are compiled when they are first called.
from torch.fx._lazy_graph_module import _LazyGraphModule

# Raised by export where the user's code branches on the value of a tensor (capture/export.py).
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode as DataDependentError
from torch.fx.experimental.symbolic_shapes import ShapeEnv

# Graphs as Python source: the calling convention of stage graphs (BoxedCode).
from torch.fx.graph import CodeGen

# Trees with key paths; torch.utils.pytree of later versions has them publicly.
from torch.nn.utils import parametrize
from torch.utils import _pytree as pytree

# Sees every operator that runs, also inside backward: measuring tensor bytes (runtime/meter.py);
# and values computed for real while others are recorded (runtime/deferred.py).
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    is_traceable_wrapper_subclass,
)
from torch.utils._python_dispatch import (
    _disable_current_modes as without_modes,
)


def _tell_attention_as_it_is() -> None:
    """Attention on a CPU gives the log-sum-exp of float64 in float64. Fake tensors of torch 2.11
    and 2.12 say float32; since 2.13 they say what the kernel gives."""
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    since = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if since >= (2, 13) or attention in op_implementations_dict:
        return

    def fake(mode: FakeTensorMode, op: Any, query: torch.Tensor, *_: Any, **__: Any) -> Any:
        if query.dtype != torch.float64:
            return NotImplemented  # then torch's own
        batch, heads, length, _width = query.shape
        return torch.empty_like(query), query.new_empty((batch, length, heads)).transpose(1, 2)

    register_op_impl(attention)(fake)
    FakeTensorMode.cache_clear()  # of what was asked before


_tell_attention_as_it_is()

# What a fake tensor raises where its values are asked for (runtime/deferred.py).
UnknownValue = (DataDependentOutputException, DynamicOutputShapeException)


class BareDispatchMode(TorchDispatchMode):
    """A mode that compiled code never runs in: keeping that away from each of its calls takes
    longer than most of them."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def forgetful_fakes() -> FakeTensorMode:
    """A mode that keeps nothing of what calls gave, for who keeps it himself: telling calls apart
    costs about as much as a call."""
    mode = FakeTensorMode()
    mode.cache_enabled = False
    return mode


def fake_of(mode: FakeTensorMode, meta: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A fake tensor of `mode` on a device, like a tensor of the meta device."""
    return FakeTensor(mode, meta, device)


def decides_alone(target: Any) -> bool:
    """Whether a call's op says itself what it gives, on any device: it is not made of other ops,
    which some devices' kernels choose (as those of attention are)."""
    if target in _PLAIN_VIEWS:
        return True
    if not isinstance(target, torch._ops.OpOverload) or target in op_implementations_dict:
        return False  # those of the latter are corrected for fake tensors
    return target.has_kernel_for_dispatch_key(torch._C.DispatchKey.Meta)


_PLAIN_VIEWS = frozenset(
    {
        torch.ops.aten.reshape.default, torch.ops.aten.view.default,
        torch.ops.aten._unsafe_view.default, torch.ops.aten.select.int,
        torch.ops.aten.slice.Tensor,
    }
)  # fmt: skip
"""Views that fake tensors treat apart where sizes are symbols."""


@contextmanager
def beneath_modes() -> Iterator[None]:
    """Tensors that are not fake are not looked at by modes of fake tensors."""
    guard = torch._C._DisableTorchDispatch()
    try:
        yield
    finally:
        del guard


def forget(mode: FakeTensorMode) -> None:
    """Drop a mode's weak references to its tensors: `module.to(dtype)` can not swap one that has
    any."""
    mode.fake_tensor_converter.meta_converter.tensor_memo.clear()


def schema(node: fx.Node) -> list[Any]:
    """The declared arguments (name, type, default_value, kwarg_only) of a call to an ATen op."""
    target: Any = node.target
    return list(target._schema.arguments)


def written_arguments(node: fx.Node) -> list[fx.Node]:
    """The nodes whose memory a call writes to."""
    declared = getattr(getattr(node.target, "_schema", None), "arguments", ())
    given = {a.name: v for a, v in zip(declared, node.args, strict=False)} | dict(node.kwargs)
    written = [a.name for a in declared if a.alias_info is not None and a.alias_info.is_write]
    values = pytree.tree_leaves([given[name] for name in written if name in given])
    return [v for v in values if isinstance(v, fx.Node)]


def is_view(node: fx.Node) -> bool:
    """Whether a call only looks at memory of its input."""
    declared = getattr(node.target, "_schema", None)
    if declared is None or declared.is_mutable:
        return False
    return any(r.alias_info is not None for r in declared.returns)


def decomposes(op: Any, devices: Iterable[torch.device]) -> bool:
    """Whether an op on tensors of these devices is made of others where gradients are recorded: it
    then comes as these."""

    def has(key: str) -> bool:
        return torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key)

    own = {torch._C._dispatch_key_for_device(device.type) for device in devices}
    return has("CompositeImplicitAutograd") and not any(map(has, own))


def is_composite(op: Any) -> bool:
    """Whether an op is made of others, on all devices alike."""
    return _is_cia_op(op)


def stays_whole(op: Any) -> bool:
    """Whether an op that is made of others stays one call in a functional graph: it gives no view
    of what it reads, and writes nothing."""
    return _is_preservable_cia_op(op)


def writes_unsaid(op: Any) -> bool:
    """Whether an op may write what its schema does not say: batch norms their running statistics
    (torch calls them "prim ops with a wrong schema")."""
    return "batch_norm" in str(op)


def lone_fakes(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Fake tensors laid out as the given ones, in a mode of their own."""
    with FakeTensorMode(shape_env=ShapeEnv()):
        made = []
        for t in tensors:
            offset = int(t.storage_offset())
            reach = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
            flat = torch.empty(offset + max(0, reach), dtype=t.dtype, device=t.device)
            made.append(flat.as_strided(t.shape, t.stride(), offset))
    return made


def compile_graph(
    module: fx.GraphModule, inputs: Sequence[torch.Tensor], settings: Mapping[str, Any]
) -> Callable[[list[Any]], Sequence[Any]]:
    """A graph as code by Inductor; it is called with a list of tensors, which it empties.

    module: functional, returns a tuple of tensors. inputs: fakes, of `lone_fakes`. settings: of
    `torch._inductor.config`. Compiled code is kept on disk by Inductor, by the hash of the graph
    (TORCHINDUCTOR_CACHE_DIR). Raises whatever Inductor raises.
    """
    from torch._inductor import standalone_compile  # seconds

    for node in module.graph.find_nodes(op="call_function", target=onednn_linear()):
        # Inductor's lowering of it asserts that the weight is a constant.
        node.target, node.args = opaque_linear(), node.args[:3]
    module.recompile()
    if inputs:
        for node in module.graph.output_node().all_input_nodes:
            node.meta["example_value"] = inputs[0]  # one of them is asked for the mode
    options = {"config_patches": dict(settings)}
    made = standalone_compile(module, list(inputs), dynamic_shapes="from_graph", options=options)
    run = getattr(made, "_compiled_fn", None)
    while run is not None:  # inside, one that takes a list, and so frees inputs at their last use
        code = getattr(run, "__code__", None)
        if code is not None and code.co_argcount == 1 and not code.co_flags & inspect.CO_VARARGS:
            return run
        run = getattr(run, "__wrapped__", None)
    return lambda given: made(*given)


def missing_cpp_compiler() -> str | None:
    """Why Inductor can not compile for the CPU here, or None."""
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except RuntimeError as error:
        return str(error)
    return None


class BoxedCode(CodeGen):
    """Code of a graph that takes one list and empties it, so that inputs die after their last
    use."""

    def gen_fn_def(self, free_vars: list[str], maybe_return_annotation: str, **_: Any) -> str:
        """The head of the generated function: unpack the list, then empty it."""
        names = [v.split(":")[0].split("=")[0].strip() for v in free_vars if v != "self"]
        unpack = f"\n    {', '.join(names)}, = boxed" if names else ""
        return f"def forward(self, boxed):{unpack}\n    boxed.clear()"


@contextmanager
def exporting() -> Iterator[None]:
    """Models that ask whether they are being exported (masks that depend on the batch) hear yes."""
    flags = torch.compiler._is_compiling_flag, torch.compiler._is_exporting_flag
    torch.compiler._is_compiling_flag = torch.compiler._is_exporting_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag, torch.compiler._is_exporting_flag = flags


def graph_module(root: Any, graph: fx.Graph) -> fx.GraphModule:
    """A module of a graph whose Python code is made when it is first called: most graphs are
    rewritten before that."""
    return _LazyGraphModule(root, graph)


class _Deferred(_LazyGraphModule):
    """A module whose graph is made when somebody asks for it."""

    def __init__(self, root: Any, make: Callable[[], fx.Graph], source: Any) -> None:
        torch.nn.Module.__init__(self)
        self.__dict__["_unmade"] = (root, make, source)

    def __getattr__(self, name: str) -> Any:
        if name == "_graph" and "_unmade" in self.__dict__:
            root, make, _ = self.__dict__.pop("_unmade")
            super().__init__(root, make())
            return self.__dict__["_graph"]
        if "_unmade" in self.__dict__ and not name.startswith("__"):
            _ = self.graph  # everything else comes with it
            return getattr(self, name)
        return super().__getattr__(name)

    def __deepcopy__(self, memo: Any) -> fx.GraphModule:
        return _LazyGraphModule(self, self.graph).__deepcopy__(memo)


def deferred_module(root: Any, make: Callable[[], fx.Graph], source: Any) -> fx.GraphModule:
    """A module of a graph that `make` makes when it is first read. source: for `deferred_from`."""
    return _Deferred(root, make, source)


def deferred_from(module: fx.GraphModule) -> Any:
    """The source of a module whose graph nobody has read yet; None for any other."""
    unmade = module.__dict__.get("_unmade")
    return None if unmade is None else unmade[2]


def is_deferred(module: fx.GraphModule) -> bool:
    """Whether nobody has read the module's graph yet, which is then not made."""
    return "_unmade" in module.__dict__


def boxed(module: fx.GraphModule) -> fx.GraphModule:
    """The module with `BoxedCode`; where its graph is not made yet, from when it is."""
    unmade = module.__dict__.get("_unmade")
    if unmade is not None:
        root, make, source = unmade
        module.__dict__["_unmade"] = (root, lambda: _boxed(make()), source)
    else:
        _boxed(module.graph)
        module.recompile()
    return module


def _boxed(graph: fx.Graph) -> fx.Graph:
    graph.set_codegen(BoxedCode())
    return graph


def stand_ins(tensor: FakeTensor) -> Callable[[], FakeTensor]:
    """Makes fake tensors of a tensor's dtype, shape, strides and device, without asking an op."""
    mode, device = tensor.fake_mode, tensor.fake_device
    with without_modes():
        like = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return lambda: FakeTensor(mode, like, device)


def storage_key(tensor: torch.Tensor) -> int:
    """Equal for tensors that share memory, fake ones included."""
    return tensor.untyped_storage()._cdata


def storage_uses(tensor: torch.Tensor) -> int:
    """How many tensors and handles share a tensor's memory: to know when a buffer is free again."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


def without_storage(
    cls: type,
    shape: Any,
    dtype: torch.dtype,
    device: torch.device,
    requires_grad: bool = False,
    strides: Any = None,
) -> Any:
    """A tensor of a subclass that has shape, dtype and device but no memory
    (runtime/parameters/remote.py).

    strides: those of a contiguous tensor where None.
    """
    return torch.Tensor._make_wrapper_subclass(
        cls, shape, strides, dtype=dtype, device=device, requires_grad=requires_grad
    )


@contextmanager
def without_onednn() -> Iterator[None]:
    """Ops of oneDNN are not chosen inside. The public flag can not be set in a process that froze
    torch's global flags, as one that imports torch.testing does."""
    enabled = torch.backends.mkldnn.enabled
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(enabled)


def blas_lags() -> bool:
    """Whether float32 matmuls by MKL run far below this CPU's speed while oneDNN's do not: MKL
    takes its AVX-512 code on Intel's processors only."""
    if not (torch.backends.mkldnn.is_available() and torch.backends.mkl.is_available()):
        return False
    if not torch.backends.mkldnn.enabled or "AVX512" not in torch.backends.cpu.get_cpu_capability():
        return False
    try:
        with open("/proc/cpuinfo") as file:
            return "GenuineIntel" not in file.read(4096)
    except OSError:
        return False


def onednn_linear() -> Any:
    """`(x [m, k], w [n, k], bias [n] or None, "none", [], "")` → x wᵀ + bias by oneDNN."""
    return torch.ops.mkldnn._linear_pointwise.default


def opaque_linear() -> Any:
    """oneDNN's product as an op that compilers call as it is."""
    name, ops = "onednn_linear", torch.ops.graphaccel
    if not hasattr(ops, name):
        library = torch.library.Library("graphaccel", "FRAGMENT")
        library.define(f"{name}(Tensor x, Tensor weight, Tensor? bias) -> Tensor")

        def run(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            return onednn_linear()(x, weight, bias, "none", [], "")

        def fake(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            return x.new_empty((*x.shape[:-1], weight.shape[0]))

        library.impl(name, run, "CPU")
        torch.library.register_fake(f"graphaccel::{name}", fake, lib=library)
        ops.onednn_linear.default.graphaccel_library = library  # it lives as long as its op
    return ops.onednn_linear.default


def version(tensor: torch.Tensor) -> int:
    """How often a tensor's memory was written to in place; views of it count with it."""
    return tensor._version


@contextmanager
def without_tensor_hooks(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Meanwhile leaves have no hooks and no gradient: a backward adds to none that is there, and
    calls nobody. Both are back afterwards."""
    kept = [(t, t.grad, t._backward_hooks, t._post_accumulate_grad_hooks) for t in tensors]
    # Autograd keeps the dict of post-accumulate hooks itself, whatever the attribute is set to.
    after = [(hooks, dict(hooks)) for *_, hooks in kept if hooks]
    try:
        for tensor, *_ in kept:
            tensor.grad = None
            tensor._backward_hooks = None
        for hooks, _ in after:
            hooks.clear()
        yield
    finally:
        for tensor, gradient, before, _ in kept:
            tensor.grad = gradient
            tensor._backward_hooks = before
        for hooks, held in after:
            hooks.update(held)


def keeps_graph() -> bool:
    """Whether the backward that runs now was asked to keep what it read (retain_graph=True)."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


def submesh(device: str, ranks: torch.Tensor, rank: int, names: tuple[str, ...] = ()) -> DeviceMesh:
    """A mesh of some ranks without process groups of its own; `rank` need not be one of them."""
    named = names or None
    return DeviceMesh(device, ranks, mesh_dim_names=named, _init_backend=False, _rank=rank)


# For tensor subclasses whose functions are those of plain tensors (runtime/parameters/sharded.py).
no_torch_function = torch._C._disabled_torch_function_impl


def StridedShard(dim: int, sections: int) -> Any:
    """Placement: `dim` seen as [sections, ...], each of them sharded."""
    return _StridedShard(dim, split_factor=sections)


def is_known(size: torch.SymInt) -> bool:
    """Whether a size has a value: one that stems from the data of a tensor has none."""
    return size.node.has_hint()


def fake_mode_of(nodes: list[fx.Node]) -> Any:
    """The fake-tensor mode that the values of `nodes` belong to."""
    for node in nodes:
        if isinstance(node.meta.get("val"), FakeTensor):
            return node.meta["val"].fake_mode
    return FakeTensorMode()


# Calls in it compute real tensors though a fake-tensor mode is on (constants of a capture).
without_fakes = unset_fake_temporarily


def graph_bytes(value: Any) -> bytes:
    """Anything that holds fx graphs, as bytes; fake tensors without data, others with theirs."""
    from torch.fx._graph_pickler import GraphPickler, Options  # it loads Inductor: a second

    options = Options(ops_filter=None)
    if hasattr(options, "node_metadata_key_filter"):
        options.node_metadata_key_filter = None  # module paths are read again by passes
    return GraphPickler.dumps(value, options)


def graph_from_bytes(data: bytes) -> Any:
    """What `graph_bytes` was given; its fake tensors are of one new mode."""
    from torch.fx._graph_pickler import GraphPickler

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch reads its own deprecated names
        return GraphPickler.loads(data, FakeTensorMode())


__all__ = [
    "DataDependentError", "TorchDispatchMode", "is_traceable_wrapper_subclass", "pytree",
    "without_modes",
]  # fmt: skip


def fused_adam(
    params: list[torch.Tensor],
    grads: list[torch.Tensor],
    exp_avgs: list[torch.Tensor],
    exp_avg_sqs: list[torch.Tensor],
    steps: list[torch.Tensor],
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled: bool,
    grad_scale: torch.Tensor | None,
) -> None:
    """torch's fused Adam or AdamW (decoupled), in place; `steps` are those of this update."""
    run = torch._fused_adamw_ if decoupled else torch._fused_adam_
    run(
        params, grads, exp_avgs, exp_avg_sqs, [], steps, lr=lr, beta1=beta1, beta2=beta2,
        weight_decay=weight_decay, eps=eps, amsgrad=False, maximize=False, grad_scale=grad_scale,
    )  # fmt: skip


def fused_sgd(
    params: list[torch.Tensor],
    grads: list[torch.Tensor],
    buffers: list[torch.Tensor],
    *,
    lr: float,
    momentum: float,
    dampening: float,
    nesterov: bool,
    weight_decay: float,
    first: bool,
    grad_scale: torch.Tensor | None,
) -> None:
    """torch's fused SGD, in place; buffers: empty without momentum. first: they have no values."""
    torch._fused_sgd_(
        params, grads, buffers, weight_decay=weight_decay, momentum=momentum, lr=lr,
        dampening=dampening, nesterov=nesterov, maximize=False, is_first_step=first,
        grad_scale=grad_scale,
    )  # fmt: skip


def unscale(gradients: list[torch.Tensor], scale: torch.Tensor) -> torch.Tensor:
    """Divide gradients by a scale, in place; 1 where one of them is not finite then, else 0: a
    float32 scalar on the device of `scale`. One pass over each."""
    found = torch.zeros((), device=scale.device)
    kinds: dict[torch.dtype, list[torch.Tensor]] = {}
    for gradient in gradients:
        kinds.setdefault(gradient.dtype, []).append(gradient)
    for some in kinds.values():
        torch._amp_foreach_non_finite_check_and_unscale_(some, found, scale.reciprocal())
    return found


def update_scale(
    scale: torch.Tensor, good: torch.Tensor, found: torch.Tensor, interval: int
) -> None:
    """torch.amp.GradScaler's new scale after a step, in place: half after an overflow (`found`),
    twice after `interval` steps without one. good: how many there were, int32."""
    torch._amp_update_scale_(scale, good, found, 2.0, 0.5, interval)


def order_step_hooks(optimizer: torch.optim.Optimizer, before: int, after: int) -> bool:
    """Whether the pre-hook of id `before` is the last one; the post-hook `after` becomes the
    first."""
    hooks = optimizer._optimizer_step_post_hooks
    if next(iter(hooks)) != after:
        hooks.move_to_end(after, last=False)
    return next(reversed(optimizer._optimizer_step_pre_hooks)) == before


def grad_region(node: fx.Node) -> tuple[bool, str, tuple[fx.Node, ...]] | None:
    """Of a call of a graph in which gradients are recorded or not, as export keeps
    `torch.set_grad_enabled`: whether they are, the graph's attribute, and its inputs."""
    if node.target is not torch.ops.higher_order.wrap_with_set_grad_enabled:
        return None
    enabled, graph, *inputs = node.args
    return bool(enabled), str(graph.target), tuple(inputs)  # type: ignore[union-attr, arg-type]


@contextmanager
def parametrizations_computed() -> Iterator[None]:
    """In the caller's `parametrize.cached()` each parametrized weight is computed once meanwhile,
    and not read from another forward."""
    before, parametrize._cache = parametrize._cache, {}
    try:
        yield
    finally:
        parametrize._cache = before


@contextmanager
def inference_as_no_grad() -> Iterator[None]:
    """Meanwhile `torch.inference_mode` is `torch.no_grad`: export does not see the former. In an
    inference mode of the caller's, where nothing has a gradient, it stays what it is."""
    if torch.is_inference_mode_enabled():
        yield
        return
    kind = torch.inference_mode
    enter, leave = kind.__enter__, kind.__exit__
    before: list[bool] = []

    def begin(mode: torch.inference_mode) -> None:
        before.append(torch.is_grad_enabled())
        torch.set_grad_enabled(before[-1] and not mode.mode)

    def end(mode: torch.inference_mode, *error: Any) -> None:
        torch.set_grad_enabled(before.pop())

    try:
        kind.__enter__, kind.__exit__ = begin, end  # type: ignore[method-assign, assignment]
        yield
    finally:
        kind.__enter__, kind.__exit__ = enter, leave  # type: ignore[method-assign]


@contextmanager
def outside_modes() -> Iterator[None]:
    """Meanwhile no mode sees what is called, of functions or of ops: apart from a trace."""
    with without_modes(), torch._C.DisableTorchFunction():
        yield


@contextmanager
def functions_applied_by(
    apply: Callable[[type, tuple[Any, ...]], Any], refuse: Callable[[type], None]
) -> Iterator[None]:
    """Meanwhile a call of `Function.apply`, also by another name that it was given before, is
    `apply(the class, its arguments)`; inside of a transform of torch.func it is refused."""

    def applied(kind: type, *args: Any) -> Any:
        return apply(kind, args)

    def transformed(kind: type, *_: Any, **__: Any) -> None:
        refuse(kind)

    module = torch.autograd.function
    with (
        patch.object(module._SingleLevelFunction, "apply", classmethod(applied), create=True),
        patch.object(module, "custom_function_call", transformed),
    ):
        yield


def apply_function(kind: type, *args: Any) -> Any:
    """`kind.apply(*args)`, whatever `functions_applied_by` says."""
    return super(torch.autograd.function._SingleLevelFunction, kind).apply(*args)  # type: ignore[misc]


def is_checkpoint(kind: type) -> bool:
    """Whether an autograd function is that of `checkpoint(use_reentrant=True)`."""
    return kind is torch.utils.checkpoint.CheckpointFunction


@contextmanager
def checkpoints_called() -> Iterator[None]:
    """Meanwhile `checkpoint(use_reentrant=False)` calls its function and saves what that saves."""

    def nothing_around(*_: Any, **__: Any) -> Iterator[None]:
        yield

    name = "_checkpoint_without_reentrant_generator"
    with patch.object(torch.utils.checkpoint, name, nothing_around):
        yield


@contextmanager
def gradient_nodes_refused(refuse: Callable[[], None]) -> Iterator[None]:
    """Meanwhile `torch.autograd.graph` calls `refuse` when it looks for a tensor's node, to hook
    it (register_multi_grad_hook) or to hand it out (get_gradient_edge)."""
    with patch.object(torch.autograd.graph, "_get_grad_fn_or_grad_acc", lambda _: refuse()):
        yield


def forward_class(node: Any) -> type | None:
    """The `torch.autograd.Function` that made a node of an autograd graph; None for others."""
    return getattr(type(node), "_forward_cls", None)


@contextmanager
def causal_masks_as_given() -> Iterator[None]:
    """Meanwhile `nn.Transformer` does not look into masks for a causal one, which would branch on a
    tensor: it uses them as the masks they are, with the same result."""

    def hint(mask: Any, is_causal: bool | None = None, size: int | None = None) -> bool:
        return is_causal is True

    with patch.object(torch.nn.modules.transformer, "_detect_is_causal_mask", hint):
        yield


def forget_flat_weights(model: torch.nn.Module) -> None:
    """Recurrent layers note by weak references whether their weights were exchanged, and a tensor
    that has some can not be swapped. Ours keep their identity: there is nothing to note."""
    for module in model.modules():
        if isinstance(module, torch.nn.RNNBase):
            module._flat_weight_refs = []


def all_gather_flat(whole: torch.Tensor, part: torch.Tensor, **options: Any) -> Any:
    """`dist.all_gather_single`, under the name that torch before 2.13 has for it."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(whole, part, **options)


def is_compiled(model: torch.nn.Module) -> bool:
    """Whether `torch.compile` is wrapped around a module, or set on it in place."""
    return hasattr(model, "_orig_mod") or getattr(model, "_compiled_call_impl", None) is not None
