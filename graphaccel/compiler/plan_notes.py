"""Lines of a plan's report that need its programs: what is not sharded, placed or measured."""

from __future__ import annotations

from collections.abc import Iterator

from graphaccel.capture.stepgraph import StepGraph
from graphaccel.compiler.model import Model, tensor_bytes
from graphaccel.compiler.probe_routing import TriedChoices
from graphaccel.errors.messages import format_bytes
from graphaccel.ir.program import StepProgram
from graphaccel.passes.pipeline import placed_fusions
from graphaccel.planner.cluster.cluster import Cluster
from graphaccel.planner.plan.plan import Plan
from graphaccel.planner.profile.layout_profiles import Layouts
from graphaccel.report.format import folded
from graphaccel.report.fused import chunk_notes, fusion_notes
from graphaccel.report.rules import every_rule, missing_note, priced_rules
from graphaccel.runtime.cuda_graphs import notes as graph_notes
from graphaccel.runtime.inductor.partition import notes as compile_notes


def program_notes(
    step: StepGraph,
    plan: Plan,
    program: StepProgram,
    model: Model,
    cluster: Cluster,
    layouts: Layouts,
    choices: TriedChoices | None,
) -> tuple[str, ...]:
    """The lines, in the order in which they are shown.

    choices: how the batch's tokens choose experts, where that was tried.
    """
    notes = [*_replicated(program), *_without_rules(layouts.whole.step, plan, cluster)]
    notes += [*_whole_over_tensor(model, program, plan), *_assumed_even(choices)]
    notes += _stand_in(cluster)
    if plan.fusions:
        notes += fusion_notes(placed_fusions(step, plan), cluster.device.type)
        notes += chunk_notes(layouts.of(plan), plan, cluster)
    if plan.compile != "off":
        kernels = layouts.whole.compiled
        notes += compile_notes(program, layers=not plan.min_cut, kernels=kernels)
    notes += graph_notes(program) if plan.cuda_graphs else ()
    return tuple(notes)


def _replicated(program: StepProgram) -> Iterator[str]:
    """Parameters that ZeRO leaves replicated, by reason."""
    reasons: dict[str, list[str]] = {}
    for name, reason in program.unsharded.items():
        reasons.setdefault(reason, []).append(name)
    for why, names in reasons.items():
        yield f"kept whole: {', '.join(names)}: {why}"


def _without_rules(step: StepGraph, plan: Plan, cluster: Cluster) -> tuple[str, ...]:
    """What missing rules cost, where work is split over more than the batch."""
    if plan.model_parallel_size == 1 or every_rule(step):
        return ()
    return missing_note(priced_rules(step, cluster.device))


def _whole_over_tensor(model: Model, program: StepProgram, plan: Plan) -> Iterator[str]:
    """Weights that the tensor axis leaves replicated, if they are a twentieth of all."""
    if plan.tensor == 1:
        return
    weights = {n: p for n, p in model.module.named_parameters() if p.dim() > 1}
    whole = [n for n in weights if n not in program.parameter_shards]
    size = sum(tensor_bytes(weights[n]) for n in whole)
    if 20 * size >= sum(map(tensor_bytes, weights.values())):
        yield (
            f"whole on each of the tensor axis, {format_bytes(size)}: {folded(whole)}: it does not "
            "divide their heads or dims, or sending would cost more"
        )


def _assumed_even(choices: TriedChoices | None) -> Iterator[str]:
    if choices is not None and choices.unknown:
        yield f"an even choice of experts is assumed: {choices.unknown}"


def _stand_in(cluster: Cluster) -> Iterator[str]:
    """Which device's rates are planned with, where the detected device has none of its own."""
    device = cluster.device
    if device.stands_for:
        yield (
            f"the rates of {device.stands_for} are taken to be those of {device.name} by its "
            f"{device.processors} processors; `graphaccel calibrate` measures them"
        )
