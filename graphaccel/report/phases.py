"""Reports the memory that each phase of a training takes (load, step, save, ...)."""

from __future__ import annotations

from graphaccel.errors.messages import format_bytes
from graphaccel.planner.cluster.cluster import Cluster
from graphaccel.planner.plan.prediction import Phases, StageMemory
from graphaccel.report.format import in_unit, unit_of, wrapped

PHASES = {
    "load": ("load", "load_built", "built with weights"),
    "forward": ("first forward", "", ""),
    "backward": ("first backward", "", ""),
    "step": ("optimizer's step", "", ""),
    "later": ("later steps", "", ""),
    "save": ("save", "save_whole", "full_state_dict"),
}
"""Field of `Phases` → (its name, the field of the alternative, what the alternative is)."""


def phase_rows(phases: Phases) -> list[tuple[str, int, str, int]]:
    """(phase, bytes, the alternative, its bytes) in the order of a training."""
    return [
        (name, getattr(phases, field), way, getattr(phases, other) if other else 0)
        for field, (name, other, way) in PHASES.items()
    ]


def phase_lines(m: StageMemory, cluster: Cluster) -> list[str]:
    """Of a rank: the peak of each phase, and what does not fit."""
    if m.phases is None:
        return []
    unit, size = unit_of(m.tensors)
    described = []
    for name, most, way, other in phase_rows(m.phases):
        beside = f" ({way} {in_unit(other, size)})" if way else ""
        described.append(f"{name} {in_unit(most, size)}{beside}")
    lines = wrapped(f"rank {m.rank} by phase, {unit} of tensors: {' · '.join(described)}")
    p = m.phases
    if p.host_load_built:
        lines += wrapped(
            f"its host: load {format_bytes(p.host_load)} (built with weights "
            f"{format_bytes(p.host_load_built)}), full_state_dict {format_bytes(p.host_save_whole)}"
        )
    return lines + [line for said in misfits(p, cluster) for line in wrapped(said)]


def misfits(phases: Phases, cluster: Cluster) -> list[str]:
    """Ways to load and save that do not fit a device, and what to do instead."""
    free = cluster.device.memory - cluster.context_bytes
    results = []
    if phases.load_built > free >= phases.load:
        results.append(
            "a model that is built with weights does not fit while it is loaded: build it under "
            "graphaccel.deferred"
        )
    if phases.save_whole > free >= phases.save:
        results.append("full_state_dict does not fit: save by graphaccel.save()")
    return results
