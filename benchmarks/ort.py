"""Regions and whole models on ONNX Runtime, against eager, torch's own code of the same graph, and
Inductor; forward and backward, without an optimizer step.

    python -m benchmarks.ort                                   # all, minutes
    python -m benchmarks.ort layer_norm mlp --plain PYTHON     # some; PYTHON has the plain build

All sides of a row are timed in turn in one process. Whole models under `off` and `auto` are timed
on three copies each: the same program on other memory differs by some percent, which `spread` says
(slowest over fastest copy). Where `auto` places no region it is the program of `off`.

`--plain` names an interpreter in which the plain build is installed instead: it times eager and
ONNX Runtime in turn in a second process. The committed ratios are to eager in the same process;
above 1 is faster. Rows that are not asked for stay as they are in benchmarks/results/ort.json.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import graphaccel
from benchmarks.shared.common import RESULTS, machine
from graphaccel.cli.calibrate import region_costs
from graphaccel.compiler.compiler import Compiler
from graphaccel.compiler.model import Model, as_batch
from graphaccel.ort.kernels import installed
from graphaccel.ort.measure import calibration_name
from graphaccel.planner.cluster.catalogue import cluster

BATCH, TOKENS, WIDTH, HEADS, VOCABULARY = 8, 128, 256, 4, 1024
LEAST_SECONDS = 0.06
COPIES = 3
Step = Callable[[], Any]
Job = tuple[nn.Module, dict[str, Tensor]]


class Loss(nn.Module):
    """A module and a loss of its result, so that a step is a forward and a backward."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.scale = nn.Parameter(torch.ones(WIDTH))  # what comes before needs a gradient too

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x * self.scale).square().mean()


class Attention(nn.Module):
    """Softmax attention written out, as in nanoGPT without its fused path."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.fused = fused
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b, s, d = x.shape
        q, k, v = (t.view(b, s, HEADS, d // HEADS).transpose(1, 2) for t in self.qkv(x).split(d, 2))
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v)
        else:
            y = ((q @ k.transpose(-2, -1)) * (d // HEADS) ** -0.5).softmax(-1) @ v
        return self.out(y.transpose(1, 2).reshape(b, s, d))


class Embedding(nn.Module):
    """Token and position embeddings and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.norm(self.token(tokens) + self.place(places)).square().mean()


class CrossEntropy(nn.Module):
    """A bias on logits, and their cross-entropy."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(VOCABULARY))

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy((logits + self.bias).flatten(0, 1), labels.flatten())


def _layer() -> nn.Module:
    return nn.TransformerEncoderLayer(
        WIDTH, HEADS, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True
    )


def _x() -> dict[str, Tensor]:
    return {"x": torch.randn(BATCH, TOKENS, WIDTH)}


def _tokens() -> Tensor:
    return torch.randint(VOCABULARY, (BATCH, TOKENS))


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))


def _bert(width: int = WIDTH, layers: int = 4, heads: int = HEADS, tokens: int = 1024) -> Job:
    import transformers

    config = transformers.BertConfig(
        vocab_size=tokens, hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads,
        intermediate_size=4 * width, max_position_embeddings=TOKENS, num_labels=5,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    batch = {"input_ids": _tokens(), "labels": torch.randint(5, (BATCH,))}
    return transformers.BertForSequenceClassification(config), batch


def _t5() -> Job:
    import transformers

    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=WIDTH, d_ff=4 * WIDTH, d_kv=WIDTH // HEADS, num_layers=2,
        num_heads=HEADS, dropout_rate=0.0, use_cache=False, decoder_start_token_id=0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config), {
        "input_ids": _tokens(),
        "labels": _tokens(),
    }


def _vit() -> Job:
    import transformers

    config = transformers.ViTConfig(
        hidden_size=WIDTH, num_hidden_layers=4, num_attention_heads=HEADS,
        intermediate_size=4 * WIDTH, image_size=176, patch_size=16, num_labels=5,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    batch = {"pixel_values": torch.randn(BATCH, 3, 176, 176), "labels": torch.randint(5, (BATCH,))}
    return transformers.ViTForImageClassification(config), batch


def _gpt2() -> Job:
    import transformers

    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=TOKENS, n_embd=WIDTH, n_layer=4, n_head=HEADS,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    tokens = _tokens()
    return transformers.GPT2LMHeadModel(config), {"input_ids": tokens, "labels": tokens}


ROWS: Mapping[str, Callable[[], Job]] = MappingProxyType(
    {
        "layer_norm": lambda: (Loss(nn.LayerNorm(WIDTH)), _x()),
        "gelu_mlp": lambda: (Loss(_mlp()), _x()),
        "attention": lambda: (Loss(Attention(fused=False)), _x()),
        "attention_sdpa": lambda: (Loss(Attention(fused=True)), _x()),
        "encoder_layer": lambda: (Loss(_layer()), _x()),
        "embedding_norm": lambda: (Embedding(), {"tokens": _tokens()}),
        "softmax_cross_entropy": lambda: (
            CrossEntropy(),
            {"logits": torch.randn(BATCH, TOKENS, VOCABULARY), "labels": _tokens()},
        ),
        "bert": _bert,
        "gpt2": _gpt2,
        "t5": _t5,
        "vit": _vit,
        "bert_base": lambda: _bert(768, 12, 12, 30522),
    }
)
MODELS = ("bert", "gpt2", "t5", "vit", "bert_base")


def sides_of(job: Job, inductor: bool, auto: bool) -> tuple[dict[str, Step], dict[str, Any]]:
    """What is timed: a step of each side, on copies of one model. auto: measure regions first."""
    model, batch = job
    model.train()

    def step(run: Callable[..., Any], parameters: list[nn.Parameter]) -> Step:
        def once() -> Any:
            out = run(**batch)
            loss = out if isinstance(out, Tensor) else out.loss
            loss.backward()
            for parameter in parameters:
                parameter.grad = None
            return loss.detach()

        return once

    def planned(**settings: Any) -> nn.Module:
        made = copy.deepcopy(model)
        return graphaccel.optimize(made, devices=1, example_batch=batch, **settings)

    eager = copy.deepcopy(model)
    sides = {"eager": step(eager, list(eager.parameters()))}
    modules = {"fx": planned(ort="off"), "ort": planned(ort="all")}
    counts: dict[str, Any] = {}
    if auto:
        where = _calibrated(model, batch)
        first = planned(ort="auto", cluster=where)
        report = first.graphaccel.plan.prediction.ort
        counts = {"auto_regions": 0 if report is None else len(report.regions)}
        if counts["auto_regions"]:
            modules["auto"] = first
            for number in range(2, COPIES + 1):
                modules[f"fx {number}"] = planned(ort="off")
                modules[f"auto {number}"] = planned(ort="auto", cluster=where)
    if inductor:
        modules["inductor"] = torch.compile(copy.deepcopy(model))
    for name, module in modules.items():
        sides[name] = step(module, list(module.parameters()))
    return sides, counts


def _calibrated(model: nn.Module, batch: dict[str, Tensor]) -> Any:
    """This machine with every region of the model measured."""
    kernels = installed()
    assert kernels is not None
    where = cluster("cpu", 1)
    compiler = Compiler(Model(model, None, 0.0), where, {"ort": "auto"})
    found = region_costs(compiler, as_batch(batch), kernels)
    costs = {c.key: (c.torch, c.ort) for c in found}
    name = calibration_name(kernels.name, torch.get_num_threads())
    return replace(where, ort={name: costs})


def timed(sides: dict[str, Step], rounds: int) -> dict[str, float]:
    """Median seconds of a step of each side; all in turn, every other round backwards."""
    losses = {name: step() for name, step in sides.items()}
    for name, loss in losses.items():
        torch.testing.assert_close(loss, losses["eager"], rtol=1e-4, atol=1e-6, msg=name)
    repeats = {}
    for name, step in sides.items():
        step()
        start = time.perf_counter()
        step()
        repeats[name] = max(1, int(LEAST_SECONDS / max(time.perf_counter() - start, 1e-6)))
    times: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds):
        for name in sides if number % 2 == 0 else reversed(sides):
            start = time.perf_counter()
            for _ in range(repeats[name]):
                sides[name]()
            times[name].append((time.perf_counter() - start) / repeats[name])
    return {name: statistics.median(found) for name, found in times.items()}


def row(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """One row: medians, and ratios to eager in the same process."""
    torch.manual_seed(0)
    sides, counts = sides_of(ROWS[name](), not args.no_inductor, name in MODELS and args.auto)
    medians, spread = _joined(timed(sides, args.rounds))
    if counts.get("auto_regions") == 0:
        medians["auto"] = medians["fx"]
    if spread:
        counts["spread"] = spread
    ratios = {side: medians["eager"] / t for side, t in medians.items() if side != "eager"}
    return {"median_seconds": medians, "faster_than_eager": ratios, **counts}


def _joined(medians: dict[str, float]) -> tuple[dict[str, float], dict[str, float]]:
    """Of the copies of a side the median, and the slowest over the fastest."""
    copies: dict[str, list[float]] = {}
    for name, seconds in medians.items():
        copies.setdefault(name.partition(" ")[0], []).append(seconds)
    spread = {side: max(found) / min(found) for side, found in copies.items() if len(found) > 1}
    return {side: statistics.median(found) for side, found in copies.items()}, spread


def _plain(args: argparse.Namespace) -> dict[str, Any]:
    """The same rows by the interpreter that has the plain build."""
    command = [args.plain, "-m", "benchmarks.ort", *args.rows, "--no-inductor", "--print"]
    command += ["--rounds", str(args.rounds), "--threads", str(args.threads)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ort")
    parser.add_argument("rows", nargs="*", choices=[*ROWS, []], metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--plain", metavar="PYTHON", help="an interpreter with the plain build")
    parser.add_argument("--no-inductor", action="store_true", help="it takes a minute to compile")
    parser.add_argument("--auto", action="store_true", help="whole models: calibrated regions too")
    parser.add_argument("--print", action="store_true", help="JSON on one line; nothing is saved")
    args = parser.parse_args()
    args.rows = args.rows or list(ROWS)
    torch.set_num_threads(args.threads)
    os.environ["GRAPHACCEL_QUIET"] = "1"
    kernels = installed()
    assert kernels is not None, "pip install 'graphaccel[ort]'"
    found = {name: row(name, args) for name in args.rows}
    if args.print:
        print(json.dumps({"build": kernels.name, "rows": found}))
        return
    plain = _plain(args) if args.plain else {"rows": {}}
    for name, result in found.items():
        if name in plain["rows"]:
            result["plain"] = {"build": plain["build"], **plain["rows"][name]}
        ratios = dict(result["faster_than_eager"])
        if "plain" in result:
            ratios[plain["build"]] = result["plain"]["faster_than_eager"]["ort"]
        print(f"{name:22}", "  ".join(f"{side} {ratio:.2f}" for side, ratio in ratios.items()))
    _save(found, kernels.name, args)


def _save(found: dict[str, Any], build: str, args: argparse.Namespace) -> None:
    path = RESULTS / "ort.json"
    result = json.loads(path.read_text()) if path.exists() else {"rows": {}}
    result |= {
        "name": "ort",
        "command": "python -m benchmarks.ort",
        "build": build,
        "threads": args.threads,
        "rounds": args.rounds,
        "machine": machine(),
    }
    result["rows"] = {n: found.get(n, result["rows"].get(n)) for n in ROWS}
    result["rows"] = {n: r for n, r in result["rows"].items() if r is not None}
    path.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
