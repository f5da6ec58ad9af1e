"""Published training runs: what is read of a row, and why a row is left out."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from benchmarks.validation.mixtures import MIXTURES, mixture_of
from benchmarks.validation.recipes import as_trained
from benchmarks.validation.systems import System, known_system, system_of
from graphaccel.planner.cluster.catalogue import device_names

# Behind the name of a source, by what products round to.
FEWER_BITS = {
    "float8_e4m3fn": ", matmuls in 8 bits", "float4_e2m1fn_x2": ", matmuls in 4 bits",
}  # fmt: skip
FOLDER = Path(__file__).parent / "data"
# Entries of the catalogue by what sources call them, without regard to case, form and size.
DEVICES = {
    "a100": "a100-80gb",
    "h100": "h100-80gb",
    "h200": "h200-141gb",
    "b200": "b200-192gb",
    "b300": "b300-288gb",
    "gb200": "gb200-192gb",
    "gb300": "gb300-288gb",
    "v100": "v100-32gb",
    "t4": "t4-16gb",
    "l4": "l4-24gb",
    "l40s": "l40s-48gb",
    "a6000": "a6000-48gb",
    "3090": "rtx3090-24gb",
    "4090": "rtx4090-24gb",
    "5090": "rtx5090-32gb",
}
PRECISIONS = {"fp16": "float16", "bf16": "bfloat16", "amp_bf16": "bfloat16"}
# Products in 8 or 4 bits between bf16 values; how their scales are found is not told apart.
_EIGHT_BITS = ("fp8", "amp_fp8", "fp8-cs", "fp8-mx", "fp8-rowwise", "fp8-tensorwise", "mxfp8")
_MATMULS = {**dict.fromkeys(_EIGHT_BITS, "float8_e4m3fn"), "nvfp4": "float4_e2m1fn_x2"}
TENSOR_LINK = "tensor axis"
"""The level of a cluster that holds the devices of a run's tensor axis alone."""
COLUMNS = (
    "source", "model", "params", "layers", "hidden", "heads", "seq", "vocab", "gpus", "gpu_type",
    "dp", "tp", "pp", "vpp", "micro_batch", "global_batch", "recompute", "sequence_parallel",
    "zero", "precision", "measured_iter_s", "measured_tflops_per_gpu", "measured_mem_GB", "cp",
    "ep", "ffn_hidden", "kv_heads", "measured_tokens_per_s_per_gpu", "measured_mfu_pct", "notes",
)  # fmt: skip
"""Of a row; sizes are whole numbers, memory is in GiB, what is empty is not stated."""
_NEEDED = ("source", "model", "gpus", "gpu_type", "global_batch")
_SIZES = ("layers", "hidden", "heads", "seq", "gpus", "dp", "tp", "pp", "micro_batch",
          "global_batch", "cp")  # fmt: skip
_LIKE_LLAMA = ("mistral", "qwen", "yi-", "baichuan", "internlm")
_RECOMPUTED = {"full": "all", "selective(op)": "operations", "": ""}
_PADDED_VOCABULARY = 51200  # GPT-2's 50257 as Megatron-LM pads it
_NEMOTRON_VOCABULARY = 256000  # "Nemotron-4 15B Technical Report", arXiv 2402.16819, section 2


# Tables that come out again with each release: of the same models and machines, and one source.
_AGAIN = ("NVIDIA-NeMo/Megatron-Bridge docs/performance-summary", "NVIDIA/dgxc-benchmarking")


def document(source: str) -> str:
    """What is left out at once, where a source is: a table with all of its releases."""
    project = next((p for p in _AGAIN if source.startswith(p)), None)
    if project is None or " docs/" in project:
        return project or source
    return f"{project} {source.split()[1].partition('/')[0]}"


def reported(of: str, products: str) -> str:
    """What figures of a document's runs stand under: runs in 8 bits apart, and those in 4."""
    return of + FEWER_BITS.get(products, "")


@dataclass(frozen=True)
class Run:
    """One published run that can be predicted. seconds: of a step, as measured. memory: bytes at
    the peak as measured, or None. kind: "llama" (SwiGLU, RMS norms, rotary embeddings, grouped
    queries), "nemotron" (squared ReLU in place of SwiGLU), "gpt", or one of `mixtures.MIXTURES`.
    data: ranks with batches of their own, of which each `expert` share the experts, and the batch
    of one of our data ranks. sharing: devices that share the experts of a layer there, each of
    which has whole ones. microbatch, interleave: 0 where the row does not say. recompute:
    "none", "all", or "operations" (torchtitan: all but attention and every second product); ""
    where the row does not say.
    precision, products: torch dtype names, of values and of what products round them to where that
    is another. assumed: what the row does not say."""

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
    kind: str
    system: System
    device: str
    devices: int
    data: int
    tensor: int
    pipeline: int
    context: int
    expert: int
    sharing: int
    interleave: int
    microbatch: int
    batch: int
    recompute: str
    sequence_parallel: bool
    zero: int
    precision: str
    products: str
    seconds: float
    memory: int | None
    assumed: tuple[str, ...]

    @property
    def reported(self) -> str:
        """What its figures stand under."""
        return reported(document(self.source), self.products)

    @property
    def microbatches(self) -> int:
        """Microbatches a step."""
        return self.batch // (self.data * self.microbatch)

    @property
    def gathered_bits(self) -> int:
        """Of a number in rows that the tensor axis gathers."""
        if not self.products or not self.system.gathers_low:
            return 16
        return 4 if self.products.startswith("float4") else 8

    @property
    def shape(self) -> tuple[object, ...]:
        """What the model and its batch depend on."""
        system = replace(
            self.system, started=frozenset(), weighs_biases=False, beside_another=False,
            experts_apart=False, experts_again=False, once_a_node=False, gathers_low=False,
            gathers_whole=False, compiled=False, joined=False, casts=1.0,
        )  # fmt: skip
        return (
            self.layers, self.hidden, self.heads, self.kv_heads, self.ffn, self.sequence,
            self.vocabulary, self.kind, system, self.precision,
        )  # fmt: skip


def read(file: Path) -> Iterator[Run | str]:
    """Each row as a run, or the reason why it is none. Columns that a file does not have are empty.

    Raises ValueError for a file without the columns that every run needs."""
    with file.open(newline="", encoding="utf-8") as text:
        rows = csv.DictReader(text)
        missing = [name for name in _NEEDED if name not in (rows.fieldnames or ())]
        if missing:
            raise ValueError(f"{file} has no column {', '.join(missing)}")
        for found in rows:
            row = {name: (found.get(name) or "").strip() for name in COLUMNS}
            told = as_trained(row)
            try:
                run = _run(told)
            except ValueError as error:
                run = f"no run: {error}"
            except ZeroDivisionError:
                run = "no run: a rate of 0"
            if told != row and isinstance(run, Run):
                said = "the mesh of its recipe, which its table contradicts"
                run = replace(run, assumed=(*run.assumed, said))
            yield run


def _group(row: dict[str, str]) -> str:
    model = f"{row['source']}, {row['model']}, {row['layers']} x {row['hidden']}"
    return f"{model}, {row['gpus']} devices, batch {row['global_batch']}"


def _number(row: dict[str, str], name: str, default: int | None = None) -> int:
    value = int(float(row[name])) if row[name] else int(default if default is not None else 0)
    if value < 0 or (value == 0 and row[name] and name in _SIZES):
        raise ValueError(f"{name} is {row[name]}")
    return value


def _run(row: dict[str, str]) -> Run | str:
    number = partial(_number, row)
    device = _device(row["gpu_type"])
    if device is None:
        return f"device {row['gpu_type']} is not in the catalogue"
    mixture = mixture_of(row["model"])
    if mixture is None and (number("ep", 1) > 1 or "MoE" in row["notes"]):
        return f"the sizes of {row['model']} are not stated"
    known = MIXTURES[mixture] if mixture is not None else None
    if known is None and not (row["layers"] and row["hidden"] and row["heads"]):
        return "layers, hidden or heads not stated"
    system = system_of(row)
    sequence = number("seq", system.sequence)
    if not sequence or not row["global_batch"]:
        return "tokens of a batch not stated"
    tensor, pipeline, context = number("tp", 1), number("pp", 1), number("cp", 1)
    gpus, data = number("gpus"), _data(row, tensor * pipeline * context)
    if data is None:
        return "the axes are not the devices"
    if row["micro_batch"] and number("global_batch") % (data * number("micro_batch")):
        return "the batch does not divide"
    expert, assumed = _expert(number("ep", 1), data)
    kind = mixture or _kind(row["model"].lower())
    usual = _usual_vocabulary(kind, system, tensor)
    hidden = number("hidden", known.hidden if known else None)
    heads = number("heads", known.heads if known else None)
    run = Run(
        source=row["source"],
        group=_group(row),
        name=row["model"],
        layers=number("layers", known.layers if known else None),
        hidden=hidden,
        heads=heads,
        kv_heads=number("kv_heads", known.kv_heads if known else heads),
        ffn=number("ffn_hidden", known.ffn if known else 4 * hidden),
        sequence=sequence,
        vocabulary=number("vocab", known.vocabulary if known else usual),
        kind=kind,
        system=system,
        device=device,
        devices=gpus,
        data=data,
        tensor=tensor,
        pipeline=pipeline,
        context=context,
        expert=expert,
        sharing=number("ep", 1) or 1,
        interleave=number("vpp", 1) or 1,
        microbatch=number("micro_batch"),
        batch=number("global_batch"),
        recompute=_RECOMPUTED.get(row["recompute"], "none"),
        sequence_parallel=tensor > 1 and _sequence_parallel(row, expert, system),
        zero=_zero(row["zero"].strip(), system),
        precision=PRECISIONS.get(row["precision"], "bfloat16"),
        products=_MATMULS.get(row["precision"], ""),
        seconds=0.0,
        memory=int(float(row["measured_mem_GB"]) * 2**30) if row["measured_mem_GB"] else None,
        assumed=(*(known.assumed if known else ()), *assumed),
    )  # fmt: skip
    return _timed(_as_usual(run, row), row)


def _data(row: dict[str, str], replica: int) -> int | None:
    """The size of the data axis, where a replica is so many devices; None where they do not fit."""
    gpus, data = _number(row, "gpus"), _number(row, "dp", 1)
    hybrid = "hsdp" in (row["zero"] + row["notes"]).lower()
    if data * replica != gpus and not (hybrid and gpus % replica == 0):
        return None
    return gpus // replica


def _usual_vocabulary(kind: str, system: System, tensor: int) -> int:
    if system.vocabulary is not None:
        return system.vocabulary // tensor * tensor
    return _NEMOTRON_VOCABULARY if kind == "nemotron" else _PADDED_VOCABULARY


def _kind(model: str) -> str:
    """The architecture of a model without experts, by its name."""
    kind = next((k for k in ("llama", "nemotron") if k in model), None)
    if kind is None:  # others of Llama's architecture
        kind = "llama" if any(family in model for family in _LIKE_LLAMA) else "gpt"
    return kind


def _sequence_parallel(row: dict[str, str], expert: int, system: System) -> bool:
    """Whether a run with a tensor axis shards the sequence: Megatron-LM refuses experts on an axis
    of their own beside a tensor axis without it."""
    usual = system.sequence_parallel and not row["sequence_parallel"]
    return row["sequence_parallel"] == "1" or expert > 1 or usual


def _timed(run: Run, row: dict[str, str]) -> Run | str:
    """The run with its measured seconds."""
    if row["precision"] not in (*PRECISIONS, *_MATMULS, ""):
        return f"precision {row['precision']}"
    seconds, counted = _seconds(row, run)
    if seconds is not None and seconds <= 0:
        raise ValueError(f"a step of {seconds} s")
    if seconds is None:
        return "neither step time nor tokens/s nor FLOP/s"
    return replace(run, seconds=seconds, assumed=(*run.assumed, *counted))


def _zero(said: str, system: System) -> int:
    if said.startswith(("3", "FSDP", "HSDP")):
        return 3
    return int(said) if said.isdigit() else system.zero


def _device(called: str) -> str | None:
    """The catalogue's name of what a source calls "H100-SXM-80GB"; None where it has none."""
    words = [word for word in re.split(r"[^a-z0-9]+", called.lower()) if word]
    sized = [f"{word}-{size}" for word in words for size in words]
    found = [name for name in sized if name in device_names()]
    return next(iter(found + [DEVICES[word] for word in words if word in DEVICES]), None)


def _expert(experts: int, data: int) -> tuple[int, tuple[str, ...]]:
    """Devices on our expert axis, which shares a batch, of so many that share experts there, and
    what is otherwise."""
    if data % experts == 0:
        return experts, ()
    return data, (f"experts are shared by {data}, which cut each over the tensor axis",)


def _as_usual(run: Run, row: dict[str, str]) -> Run:
    """With what its system does unless told otherwise, where the row does not say."""
    said: list[str] = []
    if known_system(row["source"]) is None:
        said.append("plain PyTorch with fused attention: its system is not known")
    if "hsdp" in (row["zero"] + row["notes"]).lower():
        said.append(f"shards over all {run.data} data ranks")
    if not row["precision"]:
        said.append("bfloat16: what its MFU is of")
    if not row["seq"]:
        said.append(f"{run.sequence} tokens: the system's configuration of the model")
    if run.system.fsdp2 and run.pipeline > 1:
        # As many as stages; two stages a rank where they are interleaved (pipelining_utils.py and
        # pipeline_llama.py, pytorch/torchtitan@9dec370).
        stages = run.pipeline * (2 if "Interleaved" in row["notes"] else 1)
        run = replace(run, interleave=stages // run.pipeline)
        if not run.microbatch:
            run = replace(run, microbatch=max(1, run.batch // run.data // run.pipeline))
            said.append(f"{run.pipeline} microbatches: the system's default")
    elif run.pipeline > 1 and not row["vpp"] and run.system.layers_a_stage:
        stages = -(-run.layers // run.system.layers_a_stage)
        run = replace(run, interleave=-(-stages // run.pipeline), microbatch=run.microbatch or 1)
        said.append(f"{run.interleave} stages a rank, as the system has; a sequence a microbatch")
    elif run.pipeline > 1 and not row["vpp"] and not run.microbatch:
        run = replace(run, interleave=0)
    return replace(run, assumed=(*run.assumed, *said))


def _seconds(row: dict[str, str], run: Run) -> tuple[float | None, tuple[str, ...]]:
    """Of a step, and what was assumed to find it."""
    if row["measured_iter_s"]:
        return float(row["measured_iter_s"]), ()
    if row["measured_tokens_per_s_per_gpu"]:
        tokens = run.batch * run.sequence
        return tokens / float(row["measured_tokens_per_s_per_gpu"]) / run.devices, ()
    if not row["measured_tflops_per_gpu"]:
        return None, ()
    b, s, h, layers, v = run.batch, run.sequence, run.hidden, run.layers, run.vocabulary
    said: tuple[str, ...] = ()
    if "HARDWARE flops" in row["notes"]:  # formula of arXiv 2104.04473, section 5.1
        flops = 96 * b * s * layers * h**2 * (1 + s / (6 * h) + v / (16 * layers * h))
    elif run.kind == "gpt":  # `num_floating_point_operations`, megatron/training/training.py
        flops = 72 * b * s * layers * h**2 * (1 + s / (6 * h) + v / (12 * layers * h))
    else:  # six for each weight of a product and token, and attention as far as its mask asks
        layer = h * h * (2 + 2 * run.kv_heads / run.heads) + 3 * h * run.ffn
        flops = 6 * b * s * (layers * layer + h * v) + 6 * layers * b * s * s * h
        said = ("FLOP/s count half of attention, for its mask",)
    return flops / float(row["measured_tflops_per_gpu"]) / 1e12 / run.devices, said
