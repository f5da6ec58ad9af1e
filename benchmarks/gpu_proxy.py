"""A GPU step counted without a GPU: launches and bytes of ours beside torch.compile's, in one run.

    python -m benchmarks.gpu_proxy                  all models
    python -m benchmarks.gpu_proxy --models gpt2    its row of benchmarks/results/gpu_proxy.json

The models of `benchmarks.gpu`, at full width and at two small depths, from which the full depth is
extrapolated: every count is linear in the number of layers. "compile" is torch.compile's route: AOT
autograd's joint graph of the captured forward in bfloat16, with Inductor's decompositions, its
min-cut, and Inductor for an H200. "graphaccel" is the program of our plan for one H200, as it would
run there: pieces by Inductor, the other calls and what is inside fused ops call by call.

Counted are forward and backward: launches, and bytes of all but matmuls, every tensor that
a launch reads or writes once for reading and once for writing (`benchmarks.shared.launches`);
attention is torch's GPU kernels on both sides, and what is expanded counts once. Host time is
processor time of a training step at toy sizes on this CPU, of FX code, beside eager's. No figure is
a time on a GPU. GPUs are pretended: an H200's properties, no kernels
(`benchmarks.shared.pretend_gpu`).
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from benchmarks.shared.launches import SYNCHRONISING, Launch, count_kernels, launches_of

if __name__ == "__main__":
    count_kernels()  # before any kernel is defined

import torch
from torch import fx, nn

from benchmarks.gpu import REAL, TOY, _batch, _model, _step
from benchmarks.shared import pretend_gpu
from benchmarks.shared.common import RESULTS
from graphaccel.compiler.compiler import Compiler
from graphaccel.compiler.model import as_batch, model_of
from graphaccel.ir.program import StageProgram
from graphaccel.passes.pipeline import prepared
from graphaccel.planner.cluster.catalogue import cluster
from graphaccel.planner.plan.plan import Plan
from graphaccel.runtime.cuda_graphs import declined
from graphaccel.runtime.inductor.partition import Piece, pieces

DEVICE, DEPTHS = "h200-141gb", (2, 3)
PINS = {"precision": "bf16", "fusions": "auto", "microbatches": 1, "recompute": "none"}
FULL = replace(REAL, device="cpu")
Row = dict[str, Any]


def model_of_depth(name: str, layers: int | None = None) -> tuple[nn.Module, int]:
    """A model on the meta device with its first layers only, and how many it has."""
    model = _model(name, REAL, "meta")[1]
    lists = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.ModuleList)]
    whole = max(len(m) for _, m in lists)
    for path, blocks in lists:
        if layers is not None and len(blocks) == whole:
            parent, _, own = path.rpartition(".")
            setattr(model.get_submodule(parent), own, blocks[:layers])
    return model, whole


def counted(name: str, layers: int, compile: str) -> Row:
    """Both sides of a model with so many layers. compile: our plan's."""
    model, _ = model_of_depth(name, layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    where = cluster(DEVICE, 1)
    pins = {**PINS, "compile": compile}
    compiler = Compiler(model_of(model, None, optimizer, "cuda"), where, pins)
    planned = compiler.choose(as_batch(_batch(name, FULL)))
    step, plan, program = planned.step, planned.plan, planned.program
    (stage,) = program.stages
    return {"compile": _compiled(step, plan), "graphaccel": _ours(stage, plan)}


def _compiled(step: Any, plan: Plan) -> Row:
    graphs = pretend_gpu.compiled_phases(prepared(step, plan.decided(fusions=())).forward)
    launches = []
    for found, graph in graphs:
        launches += found
        with pretend_gpu.pretended():
            inside = launches_of(graph, pretend_gpu.is_opaque)
        launches += [k for k in inside if k.attention]  # torch's GPU kernels need no copies
    return _row(launches, graphs[1][1])


def _ours(stage: StageProgram, plan: Plan) -> Row:
    backward = stage.backwards[True, True]
    launches = []
    graphs = [(g, g is backward) for g in (stage.prepare, stage.forward, backward) if g is not None]
    for graph, is_backward in graphs:
        for piece in pieces(graph.graph, layers=not plan.min_cut):
            module = _module(graph, piece)
            compiled = plan.compile != "off" and piece.compiled
            if compiled:
                launches += pretend_gpu.compiled_piece(module, backward=is_backward)
            with pretend_gpu.pretended():
                launches += launches_of(module, pretend_gpu.is_opaque if compiled else None)
    recorded = declined(stage)
    return {**_row(launches, backward), "not recorded": recorded, "fusions": list(plan.fusions)}


def _module(graph: fx.GraphModule, piece: Piece) -> fx.GraphModule:
    """A piece as a graph of its own, with the values of its nodes."""
    made, copies = fx.Graph(), {}
    for node in piece.inputs:
        copies[node] = made.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in piece.nodes:
        copies[node] = made.node_copy(node, lambda n: copies[n])
    made.output(tuple(copies[n] for n in piece.outputs))
    return fx.GraphModule(graph, made)


def _row(launches: Sequence[Launch], backward: fx.GraphModule) -> Row:
    inputs = [n.meta["val"] for n in backward.graph.nodes if n.op == "placeholder"]
    return {
        "launches": len(launches),
        "bytes": sum(k.bytes for k in launches if not k.product),
        "backward inputs": pretend_gpu.bytes_of(inputs),
        "synchronising": sum(k.op.rpartition("::")[2] in SYNCHRONISING for k in launches),
    }


def host_seconds(name: str, side: str) -> float:
    """Processor time of a training step at toy sizes: the median of seven."""
    step = _step(name, side, TOY)
    for _ in range(3):
        step()
    found = []
    for _ in range(7):
        start = time.process_time()
        step()
        found.append(time.process_time() - start)
    return statistics.median(found)


def extrapolated(name: str, found: Sequence[Row]) -> Row:
    """The counts of the full depth, from those of `DEPTHS`."""
    (a, b), (few, more), layers = found, DEPTHS, model_of_depth(name)[1]
    made: Row = {"model": name, "layers": layers, "counted": list(DEPTHS)}
    for side in ("compile", "graphaccel"):
        one, two = a[side], b[side]
        made[side] = {
            key: round(one[key] + (layers - few) * (two[key] - one[key]) / (more - few))
            if isinstance(one[key], int)
            else one[key]
            for key in one
        }
    for key in ("launches", "bytes", "backward inputs"):
        made[f"{key} ratio"] = round(made["graphaccel"][key] / made["compile"][key], 3)
    return made


def _apart(*arguments: str) -> Any:
    """What a process of its own prints last, as JSON."""
    command = [sys.executable, "-m", "benchmarks.gpu_proxy", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    return json.loads(done.stdout.strip().splitlines()[-1])


def shown(row: Row) -> str:
    """A model's line."""
    ours, theirs = row["graphaccel"], row["compile"]
    return (
        f"{row['model']:12} launches {ours['launches']} / {theirs['launches']}   outside GEMMs "
        f"{ours['bytes'] / 1e9:.1f} / {theirs['bytes'] / 1e9:.1f} GB = {row['bytes ratio']:.2f}   "
        f"backward reads {ours['backward inputs'] / 1e9:.1f} / "
        f"{theirs['backward inputs'] / 1e9:.1f} GB   synchronising {ours['synchronising']}   "
        f"{'recorded' if ours['not recorded'] is None else 'not recorded: ' + ours['not recorded']}"
        f"   host {row['host']['graphaccel'] / row['host']['eager']:.2f} of eager"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Count, print and save."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_proxy", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--models", nargs="*", choices=REAL.models, default=list(REAL.models))
    parser.add_argument("--compile", choices=("off", "inductor"), default="inductor")
    parser.add_argument("--one", nargs=2, metavar=("MODEL", "LAYERS"), help=argparse.SUPPRESS)
    parser.add_argument("--host", nargs=2, metavar=("MODEL", "SIDE"), help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    if given.one is not None:
        print(json.dumps(counted(given.one[0], int(given.one[1]), given.compile)))
        return 0
    if given.host is not None:
        print(json.dumps(host_seconds(*given.host)))
        return 0
    rows = []
    for name in given.models:
        counts = [_apart("--one", name, str(n), "--compile", given.compile) for n in DEPTHS]
        toy = name if name in TOY.models else name.replace("medium", "").rstrip("-")
        host = {side: _apart("--host", toy, side) for side in ("eager", "graphaccel")}
        rows.append({**extrapolated(name, counts), "host": host})
        print(shown(rows[-1]), flush=True)
        if given.compile == "inductor":
            _save(rows)
    return 0


def _save(rows: list[Row]) -> None:
    file = RESULTS / "gpu_proxy.json"
    known = json.loads(file.read_text())["rows"] if file.exists() else []
    new = {row["model"]: row for row in (*known, *rows)}
    result = {
        "command": "python -m benchmarks.gpu_proxy",
        "machine": {"torch": torch.__version__, "architecture": platform.machine()},
        "pins": PINS, "device": DEVICE, "rows": list(new.values()),
    }  # fmt: skip
    file.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
