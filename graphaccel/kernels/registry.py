"""The registry of fusions: this package's, those of installed packages, and of the user's script.

Installed packages name a module (or a fusion in one) in the entry-point group `graphaccel.fusions`;
importing it registers its fusions. A script registers its own with `@graphaccel.fusion`.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Sequence
from functools import cache
from importlib.metadata import EntryPoint, entry_points

from graphaccel.errors import BadFusionPackage, UnknownFusion
from graphaccel.kernels.register import is_shipped, registered
from graphaccel.kernels.spec import Fusion

GROUP = "graphaccel.fusions"
SHIPPED = (
    "activations",
    "attention",
    "cross_entropy",
    "dropout_norm",
    "embedding_norm",
    "layer_norm",
    "linear_cross_entropy",
    "rms_norm",
    "rotary",
    "softmax",
    "softmax_dropout",
)
"""Modules of this package that define fusions; among patterns of equal size, earlier ones are tried
first."""


@cache
def _load() -> None:
    """Import every module that registers fusions, once per process: ops are registered once."""
    for name in SHIPPED:
        importlib.import_module(f"graphaccel.kernels.ops.{name}")
    for point in sorted(entry_points(group=GROUP), key=lambda p: p.name):
        _load_installed(point)


def _load_installed(point: EntryPoint) -> None:
    try:
        point.load()
    except Exception as error:  # another package's module may raise anything on import
        package = point.dist
        raise BadFusionPackage(
            package=point.module.partition(".")[0] if package is None else package.name,
            version="" if package is None else package.version,
            point=f"{point.name} = {point.value}",
            cause=f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}",
        ) from error


def fusions() -> tuple[Fusion, ...]:
    """Every fusion known in this process, by name. Raises: BadFusionPackage (GA704)."""
    _load()
    return registered()


def shipped() -> tuple[Fusion, ...]:
    """The fusions of this package."""
    return tuple(f for f in fusions() if is_shipped(f))


def fusion_named(name: str) -> Fusion:
    """One fusion. Raises: UnknownFusion (GA703), BadFusionPackage (GA704)."""
    known = {f.name: f for f in fusions()}
    if name not in known:
        close = tuple(difflib.get_close_matches(name, known, n=2))
        raise UnknownFusion(name=name, known=tuple(known), closest=close)
    return known[name]


def enabled(
    choice: str | Sequence[str] | None, device: str, *, compiled: bool = False
) -> tuple[str, ...]:
    """Names of the fusions that may be placed.

    choice: "auto" (or None), "off", or names; among names "auto" stands for those it places, and
    "-NAME" removes one. device: a device type; on it "auto" places what is not slower there.
    compiled: Inductor compiles the graphs; on a GPU "auto" then leaves to it what it fuses itself.

    Raises: UnknownFusion (GA703), BadFusionPackage (GA704).
    """
    given = ("auto",) if choice is None else (choice,) if isinstance(choice, str) else tuple(choice)
    chosen: dict[str, None] = {}
    for name in given:
        if name == "auto":
            left = compiled and device == "cuda"
            chosen |= {
                f.name: None for f in fusions() if device in f.devices and (f.compiled or not left)
            }
        elif name.startswith("-"):
            chosen.pop(fusion_named(name[1:]).name, None)
        elif name != "off":
            chosen[fusion_named(name).name] = None
    return tuple(sorted(chosen))


def without_tensor_axis(names: Sequence[str]) -> tuple[str, ...]:
    """The fusions that a plan with a tensor axis may place."""
    return tuple(n for n in names if fusion_named(n).tensor_parallel)
