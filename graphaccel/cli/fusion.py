"""`graphaccel fusion`, and the fusion part of `graphaccel explain`: commands for kernel authors."""

from __future__ import annotations

import argparse
import importlib.util
import json
import keyword
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from graphaccel.capture.differentiate import module_path
from graphaccel.capture.stepgraph import capture
from graphaccel.cli.fusion_check import check
from graphaccel.cli.jobs import find_job
from graphaccel.cli.output import writing
from graphaccel.errors import GraphMisuse
from graphaccel.errors.messages import columns
from graphaccel.kernels.register import op_of, parameters, registered, tensors
from graphaccel.kernels.registry import fusion_named, fusions
from graphaccel.kernels.spec import Fusion
from graphaccel.kernels.timed import pattern_of, shapes_of, traffic, values_of
from graphaccel.passes.fusion.fuse import find_sites
from graphaccel.report.format import folded

_BUDGETS = {"cpu": 64 << 20, "cuda": 1 << 30}  # bytes moved in a timing: larger than caches
_WIDTH = 1024
_CALLS, _FEWEST_CALLS, _LONG = 9, 3, 1.0  # seconds of calls after which the fewest calls are enough
_TEMPLATE = Path(__file__).parents[1] / "kernels" / "template.py.txt"


def run(arguments: argparse.Namespace) -> int:
    """Run one of `list`, `new`, `check`, `bench`. Returns 1 when a check finds a fault."""
    if arguments.task == "new":
        return _new(arguments.name)
    if arguments.task == "list":
        rows = [("name", "auto on", "what it computes")]
        rows += [(f.name, ", ".join(f.devices), f.doc.splitlines()[0]) for f in fusions()]
        print("\n".join(columns(rows)))
        return 0
    chosen = [f for name in arguments.names for f in _chosen(name)]
    return _check(chosen) if arguments.task == "check" else _bench(chosen, arguments.json)


def explain(file: Path, function: str | None) -> int:
    """For each fusion: where it matches in a model, or how far its best partial match came."""
    job = find_job(file, function)
    step = capture(job.model, job.batch, job.loss_fn, symbolic=False)
    everything = fusions()
    finder, sites = find_sites(step, everything)
    places: dict[str, list[str]] = defaultdict(list)
    for site in sites:
        places[site.fusion.name].append(site.module or "the model")
    names = {n.name: module_path(n) for n in finder.nodes}
    rows = [("fusion", "found", "where; or the best partial match and where it stopped")]
    for fusion in everything:
        result = places[fusion.name]
        if result:
            rows.append((fusion.name, str(len(result)), folded(result)))
        elif (near := finder.near.get(fusion.name)) is not None:
            inside = names.get(near.node) or "the model"
            said = (
                f"{near.matched} of {near.size} ops, then %{near.node} in {inside}: {near.reason}"
            )
            rows.append((fusion.name, "-", said))
        else:
            rows.append((fusion.name, "-", "its last op does not occur"))
    print("\n".join(columns(rows)))
    return 0


def _chosen(name: str) -> list[Fusion]:
    """The fusions that a word on the command line names."""
    if name == "all":
        return list(fusions())
    if not name.endswith(".py"):
        return [fusion_named(name)]
    path = Path(name)
    spec = importlib.util.spec_from_file_location(f"graphaccel fusion {path.stem}", path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise GraphMisuse(what=f"there is no file {name}", help_line="graphaccel fusion new NAME")
    before = {f.name for f in fusions()}
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    results = [f for f in registered() if f.name not in before]
    if not results:
        raise GraphMisuse(
            what=f"{name} defines no fusion", help_line="@graphaccel.fusion above a class"
        )
    return results


def _new(name: str) -> int:
    path = Path(f"{name}.py")
    if not name.isidentifier() or keyword.iskeyword(name):
        word = keyword.iskeyword(name)
        raise GraphMisuse(
            what=f"{name!r} is no Python name" + (", but a word of the language" if word else ""),
            help_line=f"graphaccel fusion new {name}_op" if word else "letters, digits and _",
        )
    if path.exists():
        raise GraphMisuse(what=f"{path} exists already", help_line="another NAME, or remove it")
    with writing(path):
        path.write_text(_TEMPLATE.read_text().replace("NAME", name))
    print(f"wrote {path}\nprove it:  graphaccel fusion check {path}")
    print(f"time it:   graphaccel fusion bench {path}")
    return 0


def _check(chosen: Sequence[Fusion]) -> int:
    wrong = 0
    for fusion in chosen:
        start = time.perf_counter()
        result = check(fusion)
        took = time.perf_counter() - start
        print(
            f"{fusion.name}: {result.cases} calls against eager and float64, {result.patterns} "
            f"patterns found, {result.negatives} negatives left alone, {result.indices} indices "
            f"sharded: {'ok' if not result.faults else f'{len(result.faults)} FAULTS'} "
            f"({took:.1f} s)"
        )
        for fault in result.faults:
            print(f"  {fault.what}\n      in {fault.case}")
        wrong += bool(result.faults)
    return 1 if wrong else 0


def _bench(chosen: Sequence[Fusion], out: Path | None) -> int:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    bandwidth = _copy_bandwidth(device, dtype)
    head = ("fusion", "inputs", "eager ms", "fused ms", "ratio", "of copy bandwidth")
    rows: list[tuple[str, ...]] = [head]
    data = []
    for fusion in chosen:
        if fusion.rewrite is not None:
            continue
        for phase, entry in timings(fusion, device, dtype).items():
            share = entry["bytes"] / entry["fused"] / bandwidth
            rows.append(
                (
                    f"{fusion.name} {phase}",
                    entry["inputs"],
                    f"{1e3 * entry['eager']:.3f}",
                    f"{1e3 * entry['fused']:.3f}",
                    f"{entry['fused'] / entry['eager']:.2f}",
                    f"{100 * share:.0f} %",
                )
            )
            data.append({"fusion": fusion.name, "phase": phase, **entry, "share": share})
    print(f"{device}, {dtype}, copy {bandwidth / 1e9:.1f} GB/s")
    if len(rows) > 1:
        print("\n".join(columns(rows)))
    for fusion in chosen:
        if fusion.rewrite is not None:
            print(f"{fusion.name}: calls of torch's own, nothing to time")
    if out is not None:
        results = {"device": device, "copy": bandwidth, "rows": data}
        with writing(out):
            out.write_text(json.dumps(results, indent=1))
    return 0


def timings(
    fusion: Fusion, device: str, dtype: torch.dtype, budget: int | None = None
) -> dict[str, dict[str, Any]]:
    """For each phase the seconds of eager and fused, the inputs, and the bytes that the fused ops
    have to move. budget: of these bytes, per direction; by default more than caches hold."""
    shapes = shapes_of(fusion, dtype, _BUDGETS[device] if budget is None else budget, _WIDTH)
    moved = traffic(fusion, dtype, shapes)
    values = {
        n: v.to(device) if isinstance(v, Tensor) else v
        for n, v in values_of(fusion, dtype, shapes).items()
    }
    given = "  ".join(
        f"{n} {'x'.join(map(str, v.shape))}" for n, v in values.items() if isinstance(v, Tensor)
    )
    for name in fusion.differentiable:
        if values[name] is not None:
            values[name].requires_grad_(True)
    pattern = pattern_of(fusion)
    op, outputs = op_of(fusion), len(fusion.outputs)
    sides: dict[str, Callable[[], Any]] = {
        "eager": lambda: pattern(**{n: values[n] for n in parameters(pattern)}),
        "fused": lambda: tensors(op(*values.values()))[:outputs],
    }
    forward = {s: _time(_without_grad(call), device) for s, call in sides.items()}
    results: dict[str, dict[str, Any]] = {
        "forward": {**forward, "bytes": moved.forward, "inputs": given}
    }
    roots = [v for v in values.values() if isinstance(v, Tensor) and v.requires_grad]
    if roots:
        whole = {s: _time(_with_backward(call, roots), device) for s, call in sides.items()}
        both = moved.forward + moved.backward
        results["forward and backward"] = {**whole, "bytes": both, "inputs": given}
    return results


def _without_grad(call: Callable[[], Any]) -> Callable[[], Any]:
    def run_once() -> Any:
        with torch.no_grad():
            return call()

    return run_once


def _with_backward(call: Callable[[], Any], roots: Sequence[Tensor]) -> Callable[[], Any]:
    def run_once() -> None:
        built = [t for t in tensors(call()) if t.grad_fn is not None]
        # Without accumulating into `.grad`, which would read and write it in addition.
        torch.autograd.grad(built, roots, [torch.ones_like(t) for t in built], allow_unused=True)

    return run_once


def _copy_bandwidth(device: str, dtype: torch.dtype) -> float:
    """Bytes per second of a copy: the upper bound for a kernel. The destination is already
    allocated: on a CPU, new pages would take most of the time."""
    source = torch.ones(_BUDGETS[device] // dtype.itemsize // 2, device=device, dtype=dtype)
    target = source.clone()
    return 2 * source.nbytes / _time(lambda: target.copy_(source), device)


def _time(call: Callable[[], Any], device: str) -> float:
    """Median seconds of a call, after a warm-up call; fewer calls if one takes long."""
    call()
    taken: list[float] = []
    while len(taken) < _FEWEST_CALLS or (len(taken) < _CALLS and sum(taken) < _LONG):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)
