"""How long the plan search takes as models and machines grow, and what it finds for known models.

    python -m benchmarks.search [CASE ...]      # writes benchmarks/results/search.json

A case is a model on a number of GPUs, H100s where nothing else is said, planned from its Hugging
Face class on the meta device, each in a process of its own, with AdamW and parameters cast to bf16
where they are used. Without names all cases run; others keep their row. Seconds: of the model and
its capture, of the search, of building the programs of the plans that it proves, and of all of it
with the text of the report. A published plan is planned with its mesh pinned, and built like ours;
"usual" is one that nobody published. Its place among all meshes is that of
`benchmarks.shared.ranks`.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from dataclasses import dataclass, field
from typing import Any

from benchmarks.shared.common import RESULTS
from graphaccel.planner.plan.plan_name import plan_name

RESULT = RESULTS / "search.json"


@dataclass(frozen=True)
class Case:
    """A model, the global batch and its length in tokens, devices, kinds of blocks (of other widths
    inside), and meshes that were published or are usual: by name, their pins. device: of the
    catalogue. answer: tokens of the decoder, where there is one."""

    model: str
    devices: int
    batch: int
    tokens: int
    layers: int
    kinds: int = 1
    published: dict[str, dict[str, int]] = field(default_factory=dict)
    device: str = "h100-80gb"
    answer: int = 0


def _llama_405b(devices: int, **published: dict[str, int]) -> Case:
    return Case("llama-3-405b", devices, 2048, 8192, 126, published=published)


def _mesh(tensor: int, pipeline: int, context: int = 1) -> dict[str, int]:
    return {"tensor": tensor, "pipeline": pipeline, "context": context}


CASES = {
    # Llama 3 (arXiv 2407.21783), table 4, and NVIDIA's recipes of the same model.
    "405b-1024": _llama_405b(1024, llama3=_mesh(8, 16), nvidia=_mesh(8, 8, 2)),
    "405b-4096": _llama_405b(4096, llama3=_mesh(8, 16), nvidia=_mesh(8, 8, 2)),
    "405b-16384": _llama_405b(16384, llama3=_mesh(8, 16)),
    # NVIDIA/dgxc-benchmarking v25.02, nemo_megatron/README_175b.md, the row of 1,024 H100s, whose
    # batch is 2048: as long as a sequence, of which capturing takes a minute
    # (`capture.canonical.causal`).
    "gpt3-175b-1024": Case(
        "gpt3-175b", 1024, 1536, 2048, 96, 1, {"nvidia": _mesh(4, 8), "usual": _mesh(8, 8)}
    ),
    # Megatron-Bridge, perf_recipes.llama.h100.llama3: llama3_70b_pretrain_64gpu_h100_bf16_config,
    # llama3_8b_pretrain_8gpu_h100_bf16_config; the latter's batch from its performance summary.
    "70b-64": Case(
        "llama-3-70b", 64, 256, 8192, 80, 1, {"nvidia": _mesh(4, 4, 2), "usual": _mesh(4, 4)}
    ),
    "8b-8": Case(
        "llama-3-8b", 8, 128, 8192, 32, 1, {"nvidia": _mesh(1, 1, 2), "usual": _mesh(1, 1)}
    ),
    # NeMo-Framework-Launcher, conf/training: mixtral/mixtral_8x7b.yaml, t5/11b.yaml (which is the
    # size of T5 1.1 XXL, and a decoder of 128 tokens), vit/g_14.yaml. That ViTs are for A100s is
    # said in the NeMo user guide; that T5 is, is taken from its age.
    "mixtral-64": Case(
        "mixtral-8x7b", 64, 256, 4096, 32, 1,
        {"nvidia": {"expert": 8, "pipeline": 4}, "usual": {"expert": 8}},
    ),
    "t5-11b-160": Case(
        "t5-11b", 160, 1920, 512, 24, 1, {"nvidia": _mesh(4, 1)}, "a100-80gb", 128
    ),
    "vit-g-32": Case("vit-g", 32, 4096, 256, 40, 1, {"nvidia": _mesh(1, 1)}, "a100-80gb"),
    # mlcommons/training_results_v3.1, NVIDIA, bert: config_DGXH100_8x8x36x1_pack.sh.
    "bert-large-64": Case("bert-large", 64, 2304, 512, 24, 1, {"nvidia": _mesh(1, 1)}),
    # growing machines and models
    **{f"8b-{n}": Case("llama-3-8b", n, 2048, 8192, 32) for n in (64, 512, 4096, 16384)},
    **{f"layers-{n}": Case("llama-3-8b", 64, 256, 8192, n) for n in (2, 8, 32, 126, 512, 1000)},
    **{f"kinds-{n}": Case("llama-3-8b", 64, 256, 8192, 32, n) for n in (1, 2, 4, 8)},
}  # fmt: skip

_SIZES = {  # hidden, ffn, heads, heads of keys, vocabulary
    "llama-3-405b": (16384, 53248, 128, 8, 128256),
    "llama-3-70b": (8192, 28672, 64, 8, 128256),
    "llama-3-8b": (4096, 14336, 32, 8, 128256),
    "gpt3-175b": (12288, 49152, 96, 96, 51200),
    "mixtral-8x7b": (4096, 14336, 32, 8, 32000),
    "bert-large": (1024, 4096, 16, 16, 30522),
    "t5-11b": (4096, 10240, 64, 64, 29184),
    "vit-g": (1408, 6144, 16, 16, 1000),
}


def model_of(case: Case) -> tuple[Any, Any]:
    """(module, batch) of a case, without weights."""
    import torch
    import transformers as hf

    from graphaccel.compiler.model import as_batch

    hidden, ffn, heads, keys, vocabulary = _SIZES[case.model]
    usual = {
        "hidden_size": hidden, "intermediate_size": ffn, "num_hidden_layers": case.layers,
        "num_attention_heads": heads, "vocab_size": vocabulary,
        "max_position_embeddings": case.tokens,
    }  # fmt: skip
    family = case.model.partition("-")[0]
    with torch.device("meta"):
        ids = torch.empty(case.batch, case.tokens, dtype=torch.int64)
        batch: dict[str, Any] = {"input_ids": ids, "labels": torch.empty_like(ids)}
        model: Any
        if family == "gpt3":
            config = hf.GPT2Config(
                n_embd=hidden, n_inner=ffn, n_layer=case.layers, n_head=heads,
                vocab_size=vocabulary, n_positions=case.tokens, use_cache=False, bos_token_id=0,
                eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
            )  # fmt: skip
            model = hf.GPT2LMHeadModel(config)
        elif family == "mixtral":
            model = hf.MixtralForCausalLM(
                hf.MixtralConfig(**usual, num_key_value_heads=keys, use_cache=False)
            )
        elif family == "bert":
            model = hf.BertForMaskedLM(hf.BertConfig(**usual))
        elif family == "t5":
            config = hf.T5Config(
                d_model=hidden, d_ff=ffn, d_kv=64, num_layers=case.layers, num_heads=heads,
                feed_forward_proj="gated-gelu", pad_token_id=0, decoder_start_token_id=0,
                vocab_size=vocabulary, use_cache=False,
            )  # fmt: skip
            model = hf.T5ForConditionalGeneration(config)
            batch["labels"] = torch.empty(case.batch, case.answer, dtype=torch.int64)
        elif family == "vit":
            model = hf.ViTForImageClassification(
                hf.ViTConfig(**usual, image_size=224, patch_size=14, num_labels=vocabulary)
            )
            batch = {
                "pixel_values": torch.empty(case.batch, 3, 224, 224),
                "labels": torch.empty(case.batch, dtype=torch.int64),
            }
        else:
            model = _llama(hf.LlamaConfig(**usual, num_key_value_heads=keys, use_cache=False), case)
        return model.train(), as_batch(batch)


def _llama(config: Any, case: Case) -> Any:
    """A Llama whose first blocks are of one kind, the next of another, and so on."""
    import transformers as hf

    model = hf.LlamaForCausalLM(config)
    for number, layer in enumerate(model.model.layers):
        kind = number * case.kinds // case.layers
        if kind:
            config.intermediate_size = _SIZES[case.model][1] - 512 * kind
            layer.mlp = hf.models.llama.modeling_llama.LlamaMLP(config)
    return model


def measured(name: str) -> dict[str, Any]:
    """One case in this process."""
    from graphaccel.compiler.compiler import Compiler
    from graphaccel.compiler.model import Model
    from graphaccel.planner.cluster.catalogue import cluster
    from graphaccel.planner.search.record import Record
    from graphaccel.report.text import plan_report

    class Timed(Compiler):
        """Knows how long building programs took."""

        building = 0.0

        def refine(self, *args: Any) -> Any:
            begin = time.perf_counter()
            try:
                return super().refine(*args)
            finally:
                self.building += time.perf_counter() - begin

    case, record = CASES[name], Record()
    begin = time.perf_counter()
    module, batch = model_of(case)
    where, pins = cluster(case.device, case.devices), {"precision": "bf16-params"}
    compiler = Timed(Model(module, None, 2.0), where, pins)
    step, sizes = compiler.capture(batch)
    captured = time.perf_counter()
    chosen = compiler.choose(batch, record)
    step, plan, program = chosen.step, chosen.plan, chosen.program
    chosen = time.perf_counter()
    kept = compiler.layouts(step, sizes)
    plan_report(plan, kept.whole.step, where, model_name="", assumed="", layouts=kept,
                program=program)  # fmt: skip
    end = time.perf_counter()
    assert record.problem is not None
    assert record.outcome is not None
    row: dict[str, Any] = {
        "model": case.model, "devices": case.devices, "device": case.device,
        "layers": case.layers, "kinds": case.kinds,
        "capture_seconds": captured - begin,
        "search_seconds": chosen - captured - compiler.building,
        "build_seconds": compiler.building, "seconds": end - begin,
        "candidates": record.outcome.tally.candidates, "plan": plan_name(plan),
        "predicted_seconds": plan.prediction.seconds, "certificate": plan.certificate,
        "peak_bytes": max(m.peak for m in plan.prediction.memory),
        "peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9,
        "load": os.getloadavg()[0], "published": {},
    }  # fmt: skip
    if case.published:
        row["published"] = _published(case, compiler, batch, record.problem, pins)
    return row


def _published(case: Case, compiler: Any, batch: Any, problem: Any, pins: dict) -> dict[str, Any]:
    """By who published it: a plan for the case's mesh, and its place among all meshes."""
    from benchmarks.shared.ranks import Meshes
    from graphaccel.planner.plan.base_plan import base_plan
    from graphaccel.planner.plan.pins import Pins

    decided = Pins(precision="bf16-params")
    base = base_plan(decided, case.devices, case.batch, "", "", "loss")
    meshes, found = Meshes(problem, decided, base, case.batch), {}
    for who, mesh in case.published.items():
        theirs = compiler.with_pins(pins | mesh).choose(batch).plan
        assert theirs.prediction is not None
        found[who] = {
            "plan": theirs.name, "predicted_seconds": theirs.prediction.seconds,
            **meshes.place(theirs),
        }  # fmt: skip
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--one", help="in this process; prints JSON")
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measured(args.one)))
        return
    rows = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    for name in args.cases or CASES:
        command = [sys.executable, "-m", "benchmarks.search", "--one", name]
        out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        rows[name] = json.loads(out.splitlines()[-1])
        rows = {key: rows[key] for key in CASES if key in rows}
        RESULT.write_text(json.dumps(rows, indent=1) + "\n")
        row = rows[name]
        print(
            f"{name:16} {row['seconds']:6.1f} s: capture {row['capture_seconds']:.1f}, search "
            f"{row['search_seconds']:.1f}, build {row['build_seconds']:.1f}; "
            f"{row['candidates']:,} candidates, "
            f"{row['peak_gb']:.1f} GB: {row['plan']}, {row['predicted_seconds']:.4g} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
