"""`@graphaccel.fusion`: everything about one fused op in one class.

    @graphaccel.fusion
    class squared_relu_bias:
        inputs = {"x": T("... d"), "bias": T("d")}
        outputs = {"y": T("... d")}

        def pattern(x, bias):                    # plain torch: what is replaced
            return torch.relu(x + bias).square()

        def forward(x, bias):                    # what runs instead; on every device
            return torch.relu(x + bias).square_()

        def backward(grad_y, x, bias):           # names say what is saved: inputs, outputs, `saved`
            slope = torch.relu(x + bias).mul_(2).mul_(grad_y)
            return slope, slope.flatten(0, -2).sum(0)

The class becomes a `Fusion`, plain data, and two ops in torch's own registry:
`torch.ops.graphaccel.squared_relu_bias` and, for its gradient, `..._backward`. Each op refers to
its fusion, so that rules and costs are found from a node of a graph; there is no other registry.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path

from graphaccel.errors import BadFusion
from graphaccel.errors.messages import Location
from graphaccel.kernels.check.definition import check_definition
from graphaccel.kernels.register import is_shipped, register
from graphaccel.kernels.spec import Chunks, Fusion, Scalar, T

__all__ = ["Chunks", "Fusion", "Scalar", "T", "fusion"]

_OPTIONS = tuple(
    f for f in Fusion.__dataclass_fields__ if f not in ("name", "doc", "patterns", "location")
)


def fusion(built: type) -> Fusion:
    """Turn a class of plain functions and attributes into a registered `Fusion`.

    The class's name is the op's. Its attributes are those of `Fusion`; `pattern` (or `patterns`) is
    what is replaced.

    Raises: BadFusion (GA701) with the reason, for an invalid definition: a name that is taken, a
    pattern that cannot be traced or gives other shapes or dtypes than the op, a fake that disagrees
    with the kernel.
    """
    result = _read(built)
    if not is_shipped(result):  # those are checked by their tests: it takes a second and more
        check_definition(result)
    register(result)
    return result


def _read(built: type) -> Fusion:
    given = {k: v for k, v in vars(built).items() if not k.startswith("__")}
    patterns = tuple(given.pop("patterns", ()))
    if (first := given.pop("pattern", None)) is not None:
        patterns = (first, *patterns)
    location = _location(built)
    name = built.__name__

    def refuse(reason: str) -> BadFusion:
        return BadFusion(name=name, reason=reason, location=location)

    helpers = [k for k in given if k not in _OPTIONS]
    given = {k: v for k, v in given.items() if k in _OPTIONS}
    unknown = [k for k in helpers if not k.startswith("_")]
    if unknown:
        raise refuse(f"it has no part called {unknown[0]}; helpers start with an underscore")
    if not patterns:
        raise refuse("it has no pattern")
    for part in ("inputs", "outputs"):
        if not given.get(part):
            raise refuse(f"it does not say what its {part} are")
    if (given.get("forward") is None) == (given.get("rewrite") is None):
        raise refuse("it needs a forward, or else a rewrite")
    fusion = Fusion(
        name, inspect.getdoc(built) or "", patterns=patterns, location=location, **given
    )
    _check_names(fusion, refuse)
    return fusion


def _check_names(fusion: Fusion, refuse: Callable[[str], BadFusion]) -> None:
    for function in (*fusion.patterns, *fusion.negatives):
        for name in inspect.signature(function).parameters:
            if name not in fusion.inputs:
                raise refuse(f"its pattern reads `{name}`, which is no input")
        missing = [
            n
            for n, t in fusion.tensors.items()
            if not t.optional and n not in inspect.signature(function).parameters
        ]
        if missing:
            raise refuse(f"its pattern does not read `{missing[0]}`, which is not optional")
    for name, function in (("forward", fusion.forward), ("cuda_forward", fusion.cuda_forward)):
        if function is not None and list(inspect.signature(function).parameters) != list(
            fusion.inputs
        ):
            raise refuse(f"{name} must take exactly ({', '.join(fusion.inputs)})")
    known = {*(f"grad_{n}" for n in fusion.outputs), *fusion.inputs, *fusion.results, "wanted"}
    for name in fusion.read_back if fusion.forward is not None else ():
        if name not in known:
            raise refuse(f"its backward reads `{name}`, which is not saved")


def _location(built: type) -> Location | None:
    try:
        lines, number = inspect.getsourcelines(built)
        file = inspect.getsourcefile(built) or ""
    except (OSError, TypeError):
        return None
    at = next((i for i, text in enumerate(lines) if text.lstrip().startswith("class ")), 0)
    return Location(str(Path(file)), number + at, lines[at].rstrip("\n"))
