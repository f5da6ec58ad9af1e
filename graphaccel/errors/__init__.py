"""All error classes, each with its code, fields and text; their pages are in `docs/errors/`."""

from __future__ import annotations

from graphaccel.errors.base import GraphAccelError
from graphaccel.errors.capture import (
    CaptureDiffers,
    CaptureRefused,
    GradientRuleRefused,
    MissingRule,
    NoLoss,
    PlanDiffers,
    RuleWrong,
    TensorBranch,
    UnregisteredWeight,
    UpdateDiffers,
)
from graphaccel.errors.catalogue import BadCluster, UnknownDevice
from graphaccel.errors.checkpoint import (
    CheckpointDamaged,
    CheckpointDiffers,
    CheckpointNotSaved,
    CheckpointUntrusted,
)
from graphaccel.errors.compiling import (
    CaptureFailed,
    CompileFailed,
    CompilerMissing,
    GraphsNeedGpu,
)
from graphaccel.errors.data import BadData, BadTraining
from graphaccel.errors.kernels import (
    BadFuel,
    BadFusion,
    BadFusionPackage,
    KernelFailed,
    OrtFailed,
    OrtMismatch,
    OrtMissing,
    UnknownFusion,
)
from graphaccel.errors.messages import Location
from graphaccel.errors.plan import (
    BadPin,
    BatchNotDivisible,
    CannotExport,
    CannotInitialise,
    ConflictingPins,
    InfeasiblePlan,
    NotElementwise,
    PlanMismatch,
    ScheduleRefused,
    SplitRefused,
    TooManyDevices,
    TooManyStages,
    Unsupported,
)
from graphaccel.errors.running import DeviceOutOfMemory, NonFiniteLoss, RankLost
from graphaccel.errors.script import (
    BatchChanged,
    BatchesDiffer,
    ElsewhereNeeded,
    GraphMisuse,
    HookNotKept,
    NeedsLauncher,
    NoMeeting,
    NotAlone,
    OutputDropped,
    PartOfModel,
    RetainGraph,
    WrappedModel,
)
from graphaccel.errors.state import DrawnOutside, StateFrozen


def error_classes() -> dict[str, type[GraphAccelError]]:
    """Every code and its class, in the order of the codes."""
    return dict(sorted((cls.code, cls) for cls in GraphAccelError.__subclasses__()))


__all__ = [
    "BadCluster",
    "BadData",
    "BadFuel",
    "BadFusion",
    "BadFusionPackage",
    "BadPin",
    "BadTraining",
    "BatchChanged",
    "BatchNotDivisible",
    "BatchesDiffer",
    "CannotExport",
    "CannotInitialise",
    "CaptureDiffers",
    "CaptureFailed",
    "CaptureRefused",
    "CheckpointDamaged",
    "CheckpointDiffers",
    "CheckpointNotSaved",
    "CheckpointUntrusted",
    "CompileFailed",
    "CompilerMissing",
    "ConflictingPins",
    "DeviceOutOfMemory",
    "DrawnOutside",
    "ElsewhereNeeded",
    "GradientRuleRefused",
    "GraphAccelError",
    "GraphMisuse",
    "GraphsNeedGpu",
    "HookNotKept",
    "InfeasiblePlan",
    "KernelFailed",
    "Location",
    "MissingRule",
    "NeedsLauncher",
    "NoLoss",
    "NoMeeting",
    "NonFiniteLoss",
    "NotAlone",
    "NotElementwise",
    "OrtFailed",
    "OrtMismatch",
    "OrtMissing",
    "OutputDropped",
    "PartOfModel",
    "PlanDiffers",
    "PlanMismatch",
    "RankLost",
    "RetainGraph",
    "RuleWrong",
    "ScheduleRefused",
    "SplitRefused",
    "StateFrozen",
    "TensorBranch",
    "TooManyDevices",
    "TooManyStages",
    "UnknownDevice",
    "UnknownFusion",
    "UnregisteredWeight",
    "Unsupported",
    "UpdateDiffers",
    "WrappedModel",
    "error_classes",
]
