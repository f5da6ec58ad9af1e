"""Published training runs: what is read of a row, and why a row is left out."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent / "data"
DEVICES = {
    "A100": "a100-80gb",
    "A100-80GB": "a100-80gb",
    "A100-40GB": "a100-40gb",
    "H100": "h100-80gb",
    "H100-80GB": "h100-80gb",
    "H100-SXM-80GB": "h100-80gb",
    "H100-96GB-HBM2e(500W)": "h100-80gb",
    "B200": "b200-192gb",
    "B200-SXM": "b200-192gb",
}
PRECISIONS = {"fp16": "fp16", "bf16": "bf16", "amp_bf16": "bf16"}
# Before fused attention was usual: these runs wrote the scores to memory.
_UNFUSED = ("sc21", "2205.05198", "vTrain")
_PADDED_VOCABULARY = 51200  # GPT-2's 50257 as Megatron-LM pads it


@dataclass(frozen=True)
class Run:
    """One published run that can be predicted. seconds: of a step, as measured. memory: bytes at
    the peak as measured, or None. llama: SwiGLU, RMS norms, rotary embeddings, grouped queries."""

    source: str
    group: str
    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    sequence: int
    vocabulary: int
    llama: bool
    fused_attention: bool
    device: str
    devices: int
    data: int
    tensor: int
    pipeline: int
    context: int
    interleave: int
    microbatch: int
    batch: int
    recompute: str
    sequence_parallel: bool
    zero: int
    precision: str
    seconds: float
    memory: int | None

    @property
    def microbatches(self) -> int:
        """Microbatches a step."""
        return self.batch // (self.data * self.microbatch)

    @property
    def shape(self) -> tuple[object, ...]:
        """What the model and its batch depend on."""
        return (
            self.layers, self.hidden, self.heads, self.kv_heads, self.ffn, self.sequence,
            self.vocabulary, self.llama, self.fused_attention,
        )  # fmt: skip


def read(file: Path) -> Iterator[Run | str]:
    """Each row as a run, or the reason why it is none."""
    with file.open(newline="", encoding="utf-8") as text:
        for row in csv.DictReader(text):
            yield _run(row)


def _run(row: dict[str, str]) -> Run | str:
    def number(name: str, default: int | None = None) -> int:
        return int(float(row[name])) if row[name] else int(default if default is not None else 0)

    if row["gpu_type"] not in DEVICES:
        return f"device {row['gpu_type']} is not in the catalogue"
    if row["precision"] not in PRECISIONS:
        return f"precision {row['precision'] or 'not stated'}"
    if number("ep", 1) > 1 or "MoE" in row["notes"] or "deepseek" in row["model"].lower():
        return "mixture of experts"
    missing = [
        n for n in ("layers", "hidden", "heads", "seq", "global_batch", "micro_batch") if not row[n]
    ]
    if missing:
        return f"{', '.join(missing)} not stated"
    seconds = _seconds(row)
    if seconds is None:
        return "neither step time nor tokens/s"
    if row["recompute"] == "selective(op)":
        return "recomputation of single ops"
    tensor, pipeline, context = number("tp", 1), number("pp", 1), number("cp", 1)
    gpus, data = number("gpus"), number("dp", 1)
    if data * tensor * pipeline * context != gpus:
        return "the axes are not the devices"
    if number("global_batch") % (data * number("micro_batch")):
        return "the batch does not divide"
    zero = row["zero"].strip()
    llama = "llama" in row["model"].lower()
    kv_heads = number("kv_heads", number("heads"))
    return Run(
        source=row["source"],
        group=", ".join(
            (row["source"], row["model"], f"{row['layers']} x {row['hidden']}",
             f"{row['gpus']} devices", f"batch {row['global_batch']}")
        ),
        name=row["model"],
        layers=number("layers"),
        hidden=number("hidden"),
        heads=number("heads"),
        kv_heads=kv_heads,
        ffn=number("ffn_hidden", 4 * number("hidden")),
        sequence=number("seq"),
        vocabulary=number("vocab", _PADDED_VOCABULARY),
        llama=llama,
        # Selective recomputation makes the scores again in backward, as fused attention does.
        fused_attention=row["recompute"] == "selective"
        or not any(s in row["source"] for s in _UNFUSED),
        device=DEVICES[row["gpu_type"]],
        devices=gpus,
        data=data,
        tensor=tensor,
        pipeline=pipeline,
        context=context,
        interleave=number("vpp", 1) or 1,
        microbatch=number("micro_batch"),
        batch=number("global_batch"),
        recompute={"full": "all"}.get(row["recompute"], "none"),
        sequence_parallel=row["sequence_parallel"] == "1",
        zero=3 if zero.startswith(("3", "FSDP")) else int(zero) if zero.isdigit() else 0,
        precision=PRECISIONS[row["precision"]],
        seconds=seconds,
        memory=int(float(row["measured_mem_GB"]) * 2**30) if row["measured_mem_GB"] else None,
    )  # fmt: skip


def _seconds(row: dict[str, str]) -> float | None:
    if row["measured_iter_s"]:
        return float(row["measured_iter_s"])
    if row["measured_tokens_per_s_per_gpu"]:
        tokens = int(row["global_batch"]) * int(row["seq"])
        return tokens / float(row["measured_tokens_per_s_per_gpu"]) / int(row["gpus"])
    if "HARDWARE flops" in row["notes"]:  # formula of arXiv 2104.04473, section 5.1
        b, s, h = (int(row[n]) for n in ("global_batch", "seq", "hidden"))
        layers, v = int(row["layers"]), int(row["vocab"])
        flops = 96 * b * s * layers * h**2 * (1 + s / (6 * h) + v / (16 * layers * h))
        return flops / float(row["measured_tflops_per_gpu"]) / 1e12 / int(row["gpus"])
    return None
