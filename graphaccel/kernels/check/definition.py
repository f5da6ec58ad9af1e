"""Checks the shapes, dtypes and strides of a fusion's definition on a small example."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from graphaccel.errors import BadFusion
from graphaccel.kernels.examples import example, fakes
from graphaccel.kernels.register import narrowed, parameters, tensors
from graphaccel.kernels.spec import Function, Fusion, T


def check_definition(fusion: Fusion) -> None:
    """Compare a definition's pattern, op and fakes on one small example, in float32 and bfloat16.
    The random state is left as it is, whatever the op draws.

    Raises: BadFusion (GA701): a pattern that can not be traced or gives other shapes or dtypes than
    the op, a kernel that fails, a fake that disagrees with the kernel.
    """
    with torch.random.fork_rng(devices=()):
        for dtype in (torch.float32, torch.bfloat16):
            values = example(fusion, dtype)
            if fusion.forward is not None:
                _check_fake(fusion, fusion.forward, values)
            for pattern in fusion.patterns:
                _check_pattern(fusion, pattern, values)


def _check_pattern(fusion: Fusion, pattern: Function, values: dict[str, Any]) -> None:
    """Check that the pattern has no data-dependent step, and gives the same as the op."""
    names = parameters(pattern)
    with fakes(values) as given:
        try:
            wanted = tensors(pattern(**{n: given[n] for n in names}))
        except Exception as error:
            line = str(error).strip().splitlines()[0] if str(error).strip() else ""
            raise _refused(
                fusion,
                f"its pattern can not be traced without data: {type(error).__name__}: {line[:160]}",
            ) from error
        full = {n: given[n] if n in names else _missing(fusion, n) for n in fusion.inputs}
        replacing = fusion.rewrite or fusion.fake or fusion.forward
        assert replacing is not None
        built = narrowed(fusion, tensors(replacing(**full)), wanted)
    if len(wanted) != len(fusion.outputs):
        raise _refused(
            fusion, f"a pattern gives {len(wanted)} values, outputs are {len(fusion.outputs)}"
        )
    _compare(fusion, "pattern", wanted, built)


def _check_fake(fusion: Fusion, forward: Function, values: dict[str, Any]) -> None:
    """Check that fakes of forward and backward agree with the kernels: dtypes, shapes, strides."""
    real = tensors(_tried(fusion, "forward", forward, values))
    if len(real) != len(fusion.results):
        raise _refused(
            fusion,
            f"forward gives {len(real)} tensors, outputs and saved are {len(fusion.results)}",
        )
    with fakes(values) as given:
        fake = tensors((fusion.fake or forward)(**given))
    _compare(fusion, "fake", real, fake, strides=True)
    if fusion.backward is None:
        return
    known = {**values, **dict(zip(fusion.results, real, strict=True))}
    known |= {f"grad_{n}": torch.ones_like(known[n]) for n in fusion.outputs}
    known["wanted"] = [True] * len(fusion.inputs)
    known = {n: known[n] for n in fusion.read_back}
    real = tensors(_tried(fusion, "backward", fusion.backward, known))
    with fakes(known) as given:
        fake = tensors((fusion.fake_backward or fusion.backward)(**given))
    if len(real) != len(fusion.returned):
        raise _refused(
            fusion, f"backward gives {len(real)} gradients for {len(fusion.returned)} inputs"
        )
    _compare(fusion, "fake of the backward", real, fake, strides=True)


def _tried(fusion: Fusion, what: str, run: Function, values: dict[str, Any]) -> Any:
    try:
        return run(**values)
    except Exception as error:
        line = str(error).strip().splitlines()[0] if str(error).strip() else ""
        raise _refused(
            fusion, f"its {what} fails on an example: {type(error).__name__}: {line[:160]}"
        ) from error


def _missing(fusion: Fusion, name: str) -> Any:
    spec = fusion.inputs[name]
    return None if isinstance(spec, T) else spec.default


def _compare(
    fusion: Fusion, who: str, left: list[Tensor], right: list[Tensor], strides: bool = False
) -> None:
    names = (
        [f"gradient of `{n}`" for n in fusion.returned]
        if "backward" in who
        else [f"output `{n}`" for n in fusion.results]
    )
    for name, a, b in zip(names, left, right, strict=False):
        for kind in ("dtype", "shape", "stride") if strides else ("dtype", "shape"):
            x, y = (tuple(v.stride()) if kind == "stride" else getattr(v, kind) for v in (a, b))
            if x != y:
                x, y = (tuple(v) if isinstance(v, torch.Size) else v for v in (x, y))
                said = (
                    f"it would change {kind} {x} to {y}"
                    if who == "pattern"
                    else f"its {who} says {kind} {y}, the kernel gives {x}"
                )
                raise _refused(fusion, f"{said} ({name})")


def _refused(fusion: Fusion, reason: str) -> BadFusion:
    return BadFusion(name=fusion.name, reason=reason, location=fusion.location)
