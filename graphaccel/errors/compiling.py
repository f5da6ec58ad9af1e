"""Errors of compiling stages with Inductor, and of recording CUDA graphs (9xx)."""

from __future__ import annotations

from dataclasses import dataclass

from graphaccel.errors.base import GraphAccelError
from graphaccel.errors.messages import Message, columns

_OFF = "or without it:  graphaccel.optimize(model, optimizer, compile='off')"


@dataclass(kw_only=True, eq=False, repr=False)
class CompilerMissing(GraphAccelError):
    """Compiled stages were requested on a CPU without a C++ compiler, or (triton) on a GPU without
    Triton. asked: the pin."""

    code = "GA901"
    asked: str
    reason: str
    triton: bool = False

    def message(self) -> Message:
        if self.triton:
            return Message(
                f"{self.asked} needs Triton on a GPU, and it is not installed",
                why=self.reason,
                help=("pip install triton", _OFF),
            )
        return Message(
            f"{self.asked} needs a C++ compiler, and none works here",
            why=self.reason,
            help=("install one, or name it:  CXX=/usr/bin/g++", _OFF),
        )


@dataclass(kw_only=True, eq=False, repr=False)
class CompileFailed(GraphAccelError):
    """Inductor raised while it compiled a part of a stage. first: the part's first call."""

    code = "GA902"
    stage: int
    phase: str
    calls: int
    first: str
    cause: str

    def message(self) -> Message:
        return Message(
            f"Inductor failed to compile the {self.phase} of stage {self.stage}",
            details=columns(
                (
                    ("part:", f"{self.calls} calls from {self.first} on"),
                    ("reported:", self.cause),
                )
            ),
            why="what Inductor can not compile is left to torch beforehand; this was not foreseen",
            help=(
                "let torch run that part:  "
                "graphaccel.optimize(model, optimizer, compile='inductor', fallback='fx')",
                "run the graphs as they are:  graphaccel.optimize(model, optimizer, compile='off')",
                "to see more of it:  TORCH_LOGS=+inductor",
            ),
        )


@dataclass(kw_only=True, eq=False, repr=False)
class GraphsNeedGpu(GraphAccelError):
    """CUDA graphs were requested on another device. device: its type."""

    code = "GA903"
    device: str

    def message(self) -> Message:
        return Message(
            f"cuda_graphs=True needs an NVIDIA GPU, and the model runs on {self.device!r}",
            why="a CUDA graph is a recording of what a GPU was told to do",
            help=(
                "leave it out here:  graphaccel.optimize(model, optimizer)",
                "or plan for a GPU:  graphaccel plan FILE:job --device h100-80gb --cuda-graphs",
            ),
        )


@dataclass(kw_only=True, eq=False, repr=False)
class CaptureFailed(GraphAccelError):
    """CUDA refused to record an action. phase: "forward", "backward", "weight" or "prepare"."""

    code = "GA904"
    stage: int
    phase: str
    cause: str

    def message(self) -> Message:
        return Message(
            f"the {self.phase} of stage {self.stage} could not be recorded as a CUDA graph",
            details=columns((("reported:", self.cause),)),
            why="what can not be recorded is left out beforehand; this was not foreseen, as with "
            "an operator of your own that asks the device for a value",
            help=(
                "run the step without:  graphaccel.optimize(model, optimizer, cuda_graphs=False)",
            ),
        )
