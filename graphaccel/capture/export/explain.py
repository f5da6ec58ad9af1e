"""Turn failures of a capture into GraphAccelErrors that show the user's own line."""

from __future__ import annotations

import inspect
import linecache
import os
import re
import sysconfig
import traceback
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.nn.utils.rnn import PackedSequence

from graphaccel.capture.batch import Batch
from graphaccel.capture.export.assigned import AssignedWithGradient
from graphaccel.capture.export.buffer_values import asked_now
from graphaccel.capture.export.no_grad import WrittenWithoutGrad
from graphaccel.capture.export.outputs import UnseenOutput
from graphaccel.capture.export.python_function import RuleRefused
from graphaccel.capture.export.watch import INSIDE, TRANSFORMS, GradientInside, OwnGenerator
from graphaccel.capture.export.weights import Unregistered, Weights
from graphaccel.compat.torch.export import DataDependentError, is_known
from graphaccel.compat.torch.ops import is_higher_order, written_by
from graphaccel.errors import (
    CaptureRefused,
    DrawnOutside,
    GradientRuleRefused,
    GraphAccelError,
    TensorBranch,
    UnregisteredWeight,
)
from graphaccel.errors.messages import Location
from graphaccel.ir.calls import arguments

_FORWARD_MODE = (
    "first derivatives in a direction can be captured:  "
    "value, slope = torch.func.jvp(function, (x,), (direction,))"
)
_LOST = {
    False: "a gradient that is taken in the forward reads values that torch.export loses",
    True: "torch.export can not trace this transform of torch.func",
}
_OF_VALUES = (
    "the shape of its result depends on the values of a tensor; torch.where and masked sums keep "
    "the shape"
)
_FIRST = (
    "if the first forward alone does it, run that before:  model(batch)  "
    "# then graphaccel.optimize(model, optimizer)"
)
_LOSSES = "loss = (losses * mask).sum() / mask.sum()"
_EXPERTS = "out = out + expert(x) * (weights * (chosen == i)).sum(-1, keepdim=True)"
_WEIGHED = {
    "index": _LOSSES,
    "masked_select": _LOSSES,
    "where": _EXPERTS,
    "nonzero": _EXPERTS,
    "nonzero_numpy": _EXPERTS,
}
"""Ops whose shapes depend on values → what keeps all rows instead."""
_COND = f"_higher_order_ops{os.sep}cond.py"
_OWN_GRAPHS = "`{}` runs graphs of its own, which no plan splits"
_CHOOSE = "compute both, and choose:  x = torch.where(condition, a, b)"
_INSTEAD_OF = {
    "ndarray": "pass a tensor:  model(torch.from_numpy(x))",
    "Generator": "leave it out, and seed before the call of the model:  torch.manual_seed(0)",
}
_RECURRENT = tuple(f"nn{os.sep}{folder}{os.sep}rnn.py" for folder in ("modules", "utils"))
_PADDED = (
    "for one direction, run it on the padded batch:  outputs, _ = self.rnn(x); "
    "inside = torch.arange(x.shape[1], device=x.device) < lengths[:, None]; "
    "outputs = outputs * inside.unsqueeze(-1); "
    "last = outputs[torch.arange(len(x), device=x.device), lengths - 1]"
)
_NUMBER = re.compile(r"\.(item|tolist)\(\)|\b(float|int|bool)\(")
_LOOP = re.compile(r"\s*for\b")
_BRANCH = re.compile(r"\b(if|elif|while|assert|and|or|not|min|max|range)\b")
"""What a line has that makes a number of a tensor, and what it has that asks for its value."""
_STDLIB = f"{sysconfig.get_paths()['stdlib']}{os.sep}"


def explained(error: Exception, model: nn.Module, weights: Weights) -> Exception:
    """The GraphAccelError that explains why an export of `model` failed."""
    if isinstance(error, GraphAccelError):
        return error
    frame = _user_frame(error)
    location = None if frame is None else _location(frame)
    where = _module_of(error, model)
    if isinstance(error, OwnGenerator):
        return DrawnOutside(
            module=where,
            generator="a `torch.Generator` of its own",
            location=location,
            help_line="leave `generator=` out, and seed before the call of the model:  "
            "torch.manual_seed(0)",
        )
    if _is_packed(error):
        reason = "how a packed sequence is cut depends on the lengths, which are data"
        return CaptureRefused(module=where, location=location, reason=reason, help_line=_PADDED)
    if isinstance(error, WrittenWithoutGrad):
        location = line_of(error.stack_trace)
    if isinstance(error, DataDependentError):
        line = (location.text or "") if location is not None else ""
        asserts = line.lstrip().startswith("assert ")
        number = bool(_NUMBER.search(line)) and not _BRANCH.search(line)
        return TensorBranch(
            module=where,
            location=location,
            assertion=asserts,
            number=number,
            buffer=_asked_buffer(error),
            library=_library_line(error),
            loop=bool(_LOOP.match(line)),
        )
    if isinstance(error, Unregistered):
        result = weights.described(error.tensor)
        return UnregisteredWeight(
            module=where, name=result.name, line=result.line, of=error.of, location=location
        )
    if isinstance(error, RuleRefused):
        inner = None if error.__cause__ is None else _user_frame(error.__cause__)
        location = location if inner is None else _location(inner)
        return GradientRuleRefused(
            module=where,
            rule=error.what,
            reason=error.reason,
            line=error.line,
            location=location,
        )
    return _without_graph(error, where, location)


def _asked_buffer(error: BaseException) -> str:
    """The buffer of a user's module that the line asks for which raised; "" for another value."""
    for frame, number in reversed(list(traceback.walk_tb(error.__traceback__))):
        if frame.f_code.co_filename.startswith(("<", *INSIDE)):
            continue
        owner = frame.f_locals.get("self")
        line = linecache.getline(frame.f_code.co_filename, number)
        held = owner._buffers if isinstance(owner, nn.Module) else {}
        return next((name for name in re.findall(r"\bself\.(\w+)", line) if name in held), "")
    return ""


def _library_line(error: BaseException) -> str:
    """The line of an installed package, below the user's, that raised; "" for the user's own."""
    frames = traceback.extract_tb(error.__traceback__)
    frames = [f for f in frames if not f.filename.startswith(("<", *INSIDE))]
    if not frames or "/site-packages/" not in frames[-1].filename:
        return ""
    return f"{frames[-1].filename.rpartition('/site-packages/')[2]}:{frames[-1].lineno}"


def _is_packed(error: Exception) -> bool:
    """Whether packing, or a recurrent layer that reads a packed sequence, raised the error."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_filename.endswith(_RECURRENT):
            if "pack" in frame.f_code.co_name:
                return True
            if any(isinstance(value, PackedSequence) for value in frame.f_locals.values()):
                return True
    return False


def _without_graph(error: Exception, where: str, location: Location | None) -> CaptureRefused:
    """The CaptureRefused for what has no graph."""
    reason = next((line.strip() for line in str(error).splitlines() if line.strip()), repr(error))
    reason, line = re.sub(r"\s+", " ", reason)[:300], ""
    if isinstance(error, LookupError):  # its text may be a key alone
        reason = f"{type(error).__name__}: {reason}"
    frames = traceback.extract_tb(error.__traceback__)
    inside = next((i for i, f in enumerate(frames) if f.filename.endswith(TRANSFORMS)), 0)
    if isinstance(error, WrittenWithoutGrad):
        once = error.parameter and asked_now()  # as an initialisation from the first batch
        line = _FIRST if once else error.help_line
    elif isinstance(error, AssignedWithGradient):
        location = None
        reason = f"it replaces its buffer `{error.name}` by a value that requires a gradient"
        line = f"self.{error.name.rpartition('.')[2]} = value.detach()"
    elif isinstance(error, UnseenOutput):
        reason = (
            f"it returns an object of class {error.kind}, in which {error.what} is not found "
            "among the attributes"
        )
        line = (
            "return a tensor, a tuple, a dict or a dataclass:  "
            "return {'loss': loss, 'logits': logits}"
        )
    elif isinstance(error, GradientInside):
        own = _own(error.stack)
        location = _location(own[-1]) if own else None
        reason, line = _LOST[error.transformed], _FORWARD_MODE
    elif inside and isinstance(error, AttributeError) and "'Tensor'" in reason:
        own = _own(frames[:inside])
        location = _location(own[-1]) if own else None
        reason, line = _LOST[True], _FORWARD_MODE
    elif any(f.name == "cond" and f.filename.endswith(_COND) for f in frames):
        reason, line = _OWN_GRAPHS.format("torch.cond"), _CHOOSE
    elif "register_dataclass" in reason:
        kind = re.search(r"<class '(?:.*\.)?(\w+)'>", reason)
        name = kind[1] if kind else "Batch"
        reason = f"an input is an object of class {name}, in which no tensor is found"
        line = _INSTEAD_OF.get(
            name, "pass what forward reads of it:  model(x, alpha=settings.alpha)"
        )
    return CaptureRefused(module=where, location=location, reason=reason, help_line=line)


def _location(frame: traceback.FrameSummary) -> Location:
    """The line as the user wrote it, with the columns of the expression where Python knows them."""
    number = frame.lineno or 0
    text = linecache.getline(frame.filename, number).rstrip("\n")
    start, end = getattr(frame, "colno", None), getattr(frame, "end_colno", None)
    several = getattr(frame, "end_lineno", number) != number
    if start is None or end is None or several or "\t" in text:
        return Location(frame.filename, number, text)
    raw = text.encode()  # columns count bytes
    return Location(
        frame.filename, number, text, len(raw[:start].decode()), len(raw[:end].decode())
    )


def _user_frame(error: BaseException) -> traceback.FrameSummary | None:
    """The innermost frame outside torch and graphaccel; the user's own before a library's."""
    frames = traceback.extract_tb(error.__traceback__)
    own = _own(frames)
    return own[-1] if own else None


def _own(frames: Sequence[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    own = [f for f in frames if not f.filename.startswith(("<", *INSIDE))]
    own = [f for f in own if not f.filename.startswith(_STDLIB) or "/site-packages/" in f.filename]
    return [f for f in own if "/site-packages/" not in f.filename] or own


def _module_of(error: BaseException, model: nn.Module) -> str:
    """`Class.method` of the innermost user module that was running."""
    name = f"{type(model).__name__}.forward"
    step = error.__traceback__
    known = {type(module) for module in model.modules()}
    while step is not None:
        code = step.tb_frame.f_code
        owner = step.tb_frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        if type(owner) in known and not code.co_filename.startswith(("<", *INSIDE)):
            name = f"{type(owner).__name__}.{code.co_name}"
        step = step.tb_next
    return name


def line_of(stack_trace: str) -> Location | None:
    """The innermost line outside torch in a node's stack trace."""
    frames = re.findall(r'File "([^"]+)", line (\d+)', stack_trace)
    own = [(f, int(n)) for f, n in frames if not f.startswith(INSIDE)]
    return Location(*own[-1]) if own else None


def refuse_unplannable(graph: fx.Graph, model: nn.Module) -> None:
    """Raises CaptureRefused for values that pass export but cannot be planned."""
    for node in graph.nodes:
        reason, line = _unplannable(node)
        if not reason:
            continue
        stack = list((node.meta.get("nn_module_stack") or {}).values())
        kind = str(stack[-1][1]).rsplit(".", 1)[-1] if len(stack) > 1 else type(model).__name__
        location = line_of(node.meta.get("stack_trace") or "")
        raise CaptureRefused(
            module=f"{kind}.forward", location=location, reason=reason, help_line=line
        )


def refuse_higher_order(graph: fx.Graph, model: nn.Module) -> None:
    """Raises CaptureRefused for operators on graphs (`torch.cond`, an op that writes its
    arguments)."""
    for node in graph.nodes:
        if not is_higher_order(node.target):
            continue
        written = written_by(node)
        raise CaptureRefused(
            module=f"{type(model).__name__}.forward",
            location=line_of(node.meta.get("stack_trace") or ""),
            reason=f"`{written}` writes to its arguments"
            if written
            else _OWN_GRAPHS.format(node.target),
            help_line="let the op return the new value, and write that:  "
            "self.buffer.copy_(op(self.buffer, x))"
            if written
            else _CHOOSE,
        )


def _unplannable(node: fx.Node) -> tuple[str, str]:
    """Why the size of a value is not known in advance, and what to type instead; "" if it is."""
    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else (value,)
    for value in values:
        if not isinstance(value, torch.Tensor):
            continue
        if not all(isinstance(size, int) or is_known(size) for size in value.shape):
            line = _WEIGHED.get(str(node.target).split(".")[1], "")
            return _OF_VALUES, f"keep all rows, and weigh them:  {line}" if line else ""
        if value.layout != torch.strided:
            dense = f"its result is sparse ({value.layout}); a dense tensor can be planned with"
            return dense, ""
    return "", ""


def refuse_lookups(graph: fx.GraphModule, model: nn.Module) -> None:
    """Raises CaptureRefused for embedding tables that are written while they are read (`max_norm`),
    or whose gradient is not a dense tensor (`sparse`)."""
    regions = [m for m in graph.modules() if isinstance(m, fx.GraphModule)]
    for node in (node for region in regions for node in region.graph.nodes):
        if node.op != "call_function" or "embedding" not in str(node.target):
            continue
        if "embedding_renorm" in str(node.target):
            reason = "`max_norm` writes to the table while it is read"
            line = (
                "leave max_norm out, and before each step:  "
                "torch.embedding_renorm_(table.weight.data, tokens, max_norm, 2.0)"
            )
        elif arguments(node).get("sparse"):
            reason = "`sparse=True` gives a gradient that is no dense tensor"
            line = (
                "torch.nn.Embedding(..., sparse=False)  # the same gradient, for an optimizer of "
                "dense ones"
            )
        else:
            continue
        stack = list((node.meta.get("nn_module_stack") or {}).values())
        path = stack[-1][0] if stack else "model"
        raise CaptureRefused(
            module=path.removeprefix("model.")
            if "." in path
            else f"{type(model).__name__}.forward",
            location=line_of(node.meta.get("stack_trace") or ""),
            reason=reason,
            help_line=line,
        )


def refuse_writes(program: Any, batch: Batch, model: nn.Module) -> None:
    """Raises CaptureRefused for writes into inputs or trained parameters, which would be lost; a
    frozen parameter is written back like a buffer."""
    signature = program.graph_signature
    placeholders = [n.name for n in program.graph_module.graph.nodes if n.op == "placeholder"]
    first = len(placeholders) - len(batch.leaves)
    nodes = {node.name: node for node in program.graph_module.graph.nodes}
    for written, name in signature.user_inputs_to_mutate.items():
        given = batch.names[placeholders.index(name) - first]
        called = _parameter_of(model, given)
        raise CaptureRefused(
            module=f"{type(model).__name__}.forward",
            location=line_of(nodes[written].meta.get("stack_trace") or ""),
            reason=f"it writes to its input `{given}`, which the script could read",
            help_line=f"let it write to a copy, in forward:  {called} = {called}.clone()",
        )
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for whole in signature.parameters_to_mutate.values():
        name = whole.removeprefix("model.")
        uses = sum(p is parameters[name] for p in parameters.values())
        if uses == 1 and not parameters[name].requires_grad:
            continue
        raise CaptureRefused(
            module=f"{type(model).__name__}.forward",
            reason=f"it writes to its parameter `{name}`; make it a buffer: "
            "register_buffer(name, tensor)",
        )


def _parameter_of(model: nn.Module, given: str) -> str:
    """How the model's forward calls an input: `args[0]` is its first parameter."""
    place = re.match(r"args\[(\d+)\]", given)
    if place is None:
        return given
    parameters = inspect.signature(model.forward).parameters.values()
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    number = int(place[1])
    return names[number] + given[place.end() :] if number < len(names) else given
