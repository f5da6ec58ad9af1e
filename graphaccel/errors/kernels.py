"""Errors of fused ops (7xx) and of ONNX Runtime (8xx)."""

from __future__ import annotations

from dataclasses import dataclass

from graphaccel.errors.base import GraphAccelError, listed
from graphaccel.errors.messages import Location, Message, columns


@dataclass(kw_only=True, eq=False, repr=False)
class BadFusion(GraphAccelError):
    """A fusion that cannot be registered."""

    code = "GA701"
    name: str
    reason: str
    location: Location | None = None

    def message(self) -> Message:
        return Message(
            f"the fusion `{self.name}` is refused: {self.reason}",
            self.location,
            help=("a fusion that works, to start from:  graphaccel fusion new NAME",),
        )


@dataclass(kw_only=True, eq=False, repr=False)
class KernelFailed(GraphAccelError):
    """A fused op raised while it ran. arguments: shape and dtype of each, or its value."""

    code = "GA702"
    name: str
    op: str
    arguments: tuple[str, ...]
    cause: str
    location: Location | None = None

    def message(self) -> Message:
        return Message(
            f"the fused op `{self.op}` failed",
            self.location,
            details=(f"called with: {', '.join(self.arguments)}", self.cause),
            help=(
                f"without this fusion:  graphaccel.optimize(model, optimizer, "
                f'fusions=("auto", "-{self.name}"))',
                f"its checks on this machine:  graphaccel fusion check {self.name}",
            ),
        )


@dataclass(kw_only=True, eq=False, repr=False)
class UnknownFusion(GraphAccelError):
    """A fusion's name that is not registered. closest: names that are."""

    code = "GA703"
    name: str
    known: tuple[str, ...] = ()
    closest: tuple[str, ...] = ()

    def message(self) -> Message:
        return Message(
            f"no fusion named `{self.name}`",
            details=(f"there are: {listed(self.known)}",),
            help=tuple(f"did you mean:  {name}" for name in self.closest),
        )


@dataclass(kw_only=True, eq=False, repr=False)
class BadFusionPackage(GraphAccelError):
    """An installed package whose fusions cannot be loaded. package: its distribution, with its
    version; point: the entry point as written, "NAME = MODULE"; cause: what was raised."""

    code = "GA704"
    package: str
    version: str
    point: str
    cause: str

    def message(self) -> Message:
        return Message(
            f"the fusions of the installed package `{self.package}` {self.version} can not be "
            "loaded",
            details=columns(
                (("entry point:", f"{self.point}  [graphaccel.fusions]"), ("raised:", self.cause))
            ),
            why="every installed package that offers fusions is imported before one is chosen",
            help=(
                f"mend it:  pip install --upgrade --force-reinstall {self.package}",
                f"or do without it:  pip uninstall {self.package}",
                'or place no fusions:  graphaccel.optimize(model, optimizer, fusions="off")',
            ),
        )


@dataclass(kw_only=True, eq=False, repr=False)
class BadFuel(GraphAccelError):
    """A value of GRAPHACCEL_FUEL that is not a number. sites: how many could be placed."""

    code = "GA705"
    value: str
    sites: int

    def message(self) -> Message:
        return Message(
            f"GRAPHACCEL_FUEL={self.value} is no number of fusions",
            why="it is how many are placed, the first ones in graph order: 0 or more; "
            f"this graph has {self.sites} places",
            help=(
                f"the first half of them:  export GRAPHACCEL_FUEL={self.sites // 2}",
                "all of them:  unset GRAPHACCEL_FUEL",
            ),
        )


@dataclass(kw_only=True, eq=False, repr=False)
class OrtMissing(GraphAccelError):
    """Regions for ONNX Runtime were requested and it cannot be used. asked: e.g. "ort='all'"."""

    code = "GA801"
    asked: str
    reason: str

    def message(self) -> Message:
        return Message(
            f"{self.asked} needs ONNX Runtime, which can not be used here",
            why=self.reason,
            help=(
                "install it:  pip install 'graphaccel[ort]'",
                "or do without:  ort='off'",
            ),
        )


@dataclass(kw_only=True, eq=False, repr=False)
class OrtMismatch(GraphAccelError):
    """A plan was made for another build of ONNX Runtime. planned, installed: "training 1.19.2"."""

    code = "GA802"
    planned: str
    installed: str

    def message(self) -> Message:
        return Message(
            f"the plan was made for ONNX Runtime {self.planned}, and {self.installed} is installed",
            why="builds have different kernels, so regions and predicted memory would differ",
            help=(
                "plan again here:  graphaccel plan FILE --devices N --json plan.json",
                "or install the build of the plan:  pip install 'graphaccel[ort]'"
                if self.planned.startswith("training")
                else "or install the build of the plan:  pip install onnxruntime",
            ),
        )


@dataclass(kw_only=True, eq=False, repr=False)
class OrtFailed(GraphAccelError):
    """A session could not be built or did not run. region: module path and phase. op: the op of
    the model that failed, "" where the error does not say. path: where the ONNX model is."""

    code = "GA803"
    region: str
    action: str
    op: str
    path: str
    cause: str

    def message(self) -> Message:
        return Message(
            f"ONNX Runtime failed to {self.action} the region {self.region}"
            + (f" at {self.op}" if self.op else ""),
            details=columns((("model:", self.path), ("reported:", self.cause))),
            why="the region passed every check when it was placed",
            help=(
                "let torch run such regions:  graphaccel.optimize(model, optimizer, fallback='fx')",
                "or run without ONNX Runtime:  ort='off'",
                "to look at the model:  netron " + self.path,
            ),
        )
