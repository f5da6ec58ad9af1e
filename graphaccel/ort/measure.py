"""Times regions in torch and in ONNX Runtime, side by side, on this machine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import fx

from graphaccel.ir.program import StageProgram
from graphaccel.ort.choose import Chooser
from graphaccel.ort.kernels import Kernels
from graphaccel.ort.partition import fx_graph
from graphaccel.ort.session import Region, Sessions
from graphaccel.ort.translate import RegionModel

# A region is used only if it is clearly faster: the margin is the difference between two runs of
# the same region.
MARGIN = 0.9
# A step has to gain this much to be worth another program.
_WORTH_A_PROGRAM = 0.99
_LEAST_SECONDS = 0.02
_ROUNDS = 7


def calibration_name(build: str, threads: int) -> str:
    """The build and threads that measured costs are valid for: `training 1.19.2, 2 threads`."""
    return f"{build}, {threads} {'thread' if threads == 1 else 'threads'}"


@dataclass(frozen=True)
class RegionCost:
    """The measurement of one region. module, phase: where it first occurs. ops: of the model.
    torch, ort: median seconds of a run."""

    key: str
    module: str
    phase: str
    ops: int
    torch: float
    ort: float

    @property
    def wins(self) -> bool:
        """Whether ONNX Runtime is clearly faster."""
        return self.ort < MARGIN * self.torch


@dataclass(frozen=True)
class _Candidate:
    module: str
    phase: str
    model: RegionModel
    graph: fx.GraphModule
    inputs: tuple[torch.Tensor, ...]


def measure(
    programs: Sequence[StageProgram],
    kernels: Kernels,
    ours: Callable[[fx.GraphModule], fx.GraphModule],
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> list[RegionCost]:
    """Every distinct region that "auto" could choose in these programs; programs without regions.

    ours: applies the later passes to a graph that stays in torch. Inputs are random; integers are
    0, which every lookup allows.
    """
    results: dict[str, _Candidate] = {}
    for program in programs:
        for phase, graph in (
            ("forward", program.forward),
            *(("backward", g) for g in program.backwards.values()),
        ):
            for candidate in _candidates(graph.graph, phase, kernels, ours):
                results.setdefault(candidate.model.key, candidate)
    sessions = Sessions()
    costs = []
    for number, (key, candidate) in enumerate(results.items()):
        region = Region(candidate.model, sessions, f"{candidate.module} ({candidate.phase})")
        inputs = [_real(v) for v in candidate.inputs]
        seconds = side_by_side(partial(candidate.graph, *inputs), partial(region, *inputs))
        ops = len(candidate.model.ops)
        costs.append(RegionCost(key, candidate.module, candidate.phase, ops, *seconds))
        progress(number + 1, len(results))
    return costs


def _candidates(
    graph: fx.Graph,
    phase: str,
    kernels: Kernels,
    ours: Callable[[fx.GraphModule], fx.GraphModule],
) -> list[_Candidate]:
    chooser = Chooser(graph, kernels)
    results = []
    for part, model, (nodes, inputs, outputs) in chooser.candidates():
        values = tuple(n.meta["val"] for n in inputs)
        body = ours(fx_graph(nodes, inputs, outputs))
        body.recompile()
        results.append(_Candidate(part.label or "", phase, model, body, values))
    return results


def side_by_side(
    first: Callable[[], object], second: Callable[[], object], rounds: int = _ROUNDS
) -> tuple[float, float]:
    """Median seconds of a run of each, in alternating rounds."""
    sides = (first, second)
    with torch.no_grad():
        repeats = [_repeats(side) for side in sides]
        times: list[list[float]] = [[], []]
        for number in range(rounds):
            for which in (0, 1) if number % 2 == 0 else (1, 0):
                start = time.perf_counter()
                for _ in range(repeats[which]):
                    sides[which]()
                times[which].append((time.perf_counter() - start) / repeats[which])
    return statistics.median(times[0]), statistics.median(times[1])


def example_inputs(graph: fx.Graph) -> list[torch.Tensor]:
    """A tensor for each input of a graph: random numbers, 0 for integers, in its memory layout."""
    return [_real(n.meta["val"]) for n in graph.nodes if n.op == "placeholder"]


def in_step(
    costs: Sequence[RegionCost],
    calls: Mapping[str, int],
    without: Sequence[float],
    with_regions: Sequence[float],
) -> list[RegionCost]:
    """The costs as whole steps show them: the slowdown of a region's neighbours is added to it.

    In isolation a region is timed on warm memory of its own. In a step its results are fresh memory
    in ONNX Runtime's layout, and previous ops have evicted the caches. The difference between the
    step's gain and what the regions promise is divided among their calls. Where the gain is not
    larger than noise, none of them counts as faster: the slowest step with regions has to be faster
    than the fastest without.

    calls: how often each region runs in a step. without, with_regions: seconds of the step, each on
    memory of its own: the same program on other memory was measured to differ by 7 %.
    """
    if max(with_regions) > _WORTH_A_PROGRAM * min(without):
        return [replace(c, ort=max(c.ort, c.torch)) if c.key in calls else c for c in costs]
    promised = sum(calls.get(c.key, 0) * (c.torch - c.ort) for c in costs)
    lost = promised - (statistics.median(without) - statistics.median(with_regions))
    each = max(0.0, lost) / max(1, sum(calls.values()))
    return [replace(c, ort=c.ort + each) if c.key in calls else c for c in costs]


def _real(fake: torch.Tensor) -> torch.Tensor:
    built = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device=fake.device)
    return built.normal_() if fake.dtype.is_floating_point else built.zero_()


def _repeats(run: Callable[[], object]) -> int:
    """How often to run so that a round is long enough to be timed; also warms up."""
    run()
    run()
    start = time.perf_counter()
    run()
    once = time.perf_counter() - start
    return max(1, min(200, int(_LEAST_SECONDS / max(once, 1e-6))))
