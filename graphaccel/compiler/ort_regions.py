"""ONNX Runtime build and sessions for placing regions in a model's programs, created on demand."""

from __future__ import annotations

import torch

from graphaccel.errors import OrtMismatch, OrtMissing
from graphaccel.ort.kernels import Kernels, installed, missing_reason
from graphaccel.ort.measure import MARGIN, calibration_name
from graphaccel.ort.session import Sessions
from graphaccel.passes.place_ort import Tools
from graphaccel.planner.cluster.cluster import Cluster
from graphaccel.planner.plan.plan import Plan


class Regions:
    """The installed ONNX Runtime build and its sessions, shared by all programs of a model."""

    def __init__(self) -> None:
        self._tools: Tools | None = None

    def tools(self, plan: Plan, cluster: Cluster, given: Plan | None) -> Tools | None:
        """What placing regions needs; sessions are shared by all programs.

        given: the plan that was given or chosen before, which is run as it is.

        Raises OrtMissing (GA801), OrtMismatch (GA802).
        """
        if plan.ort == "off":
            return None
        if self._tools is None:
            auto = plan.ort == "auto"
            if auto and not cluster.ort and not _chosen(given):
                return None  # nothing was measured: no region is faster, ONNX Runtime not loaded
            kernels = installed()
            if kernels is None:
                if auto and not _chosen(given):
                    return None
                raise OrtMissing(asked=f"ort={plan.ort!r}", reason=missing_reason())
            self._tools = Tools(kernels, Sessions(), _wins(kernels, cluster, given))
        _check_build(plan, self._tools.kernels.name)
        return self._tools

    @property
    def sessions(self) -> int:
        """How many sessions are open."""
        return 0 if self._tools is None else len(self._tools.sessions)

    def watch(self, tools: Tools) -> None:
        """Place nothing, and pass `tools.watch` the programs in which regions would be placed."""
        self._tools = tools


def _wins(kernels: Kernels, cluster: Cluster, given: Plan | None) -> frozenset[str]:
    """Regions of the given plan, which is run as it is; else those measured to be faster, with this
    build and the same number of threads."""
    costs = cluster.ort.get(calibration_name(kernels.name, torch.get_num_threads()), {})
    faster = {k for k, (ours, theirs) in costs.items() if theirs < MARGIN * ours}
    return frozenset(_chosen(given) or faster)


def _chosen(given: Plan | None) -> set[str]:
    if given is None or given.prediction is None or given.prediction.ort is None:
        return set()
    return {region.key for region in given.prediction.ort.regions}


def _check_build(plan: Plan, here: str) -> None:
    """A given plan must run with the kind of build that it was made for."""
    said = plan.prediction.ort if plan.prediction is not None else None
    if said is not None and said.build.split()[0] != here.split()[0]:
        raise OrtMismatch(planned=said.build, installed=here)
