"""Compile every Triton kernel for sm_80, sm_90 and sm_100 without a GPU, and hold it to limits.

Registers and spills are what ptxas reports. A kernel fails when it spills, when its registers leave
room for fewer than 16 of a multiprocessor's 64 warps, when its shared memory does not fit, or when
its loads of aligned tensors are not 128 bits wide. Kernels that keep whole rows are also compiled
for the widest that they take; the others (pointwise, cross entropy) go through rows in blocks, of
which the largest is among the widths, and rotary's heads know no limit.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from benchmarks.shared.common import RESULTS
from graphaccel.errors.messages import columns
from graphaccel.kernels.jit import next_power_of_2, warps
from graphaccel.kernels.multi_tensor import triton_kernels as steps
from graphaccel.kernels.ops import (
    cross_entropy,
    rotary,
    row_norm,
    row_pointwise,
    softmax,
    softmax_dropout,
)

_REGISTERS = 65536  # of a multiprocessor, all three generations
_FEWEST_WARPS = 16  # of 64: enough loads in flight for a kernel that waits for memory
_SHARED = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}  # CUDA C++ programming guide, table 28
_ALIGNED = [["tt.divisibility", 16]]
# Arguments that 16 divides, as rows are aligned: widths, and what lies between rows.
_EVEN = re.compile(r"[dck]|\w*(stride|step)\w*|[xcsy][0-2]")
TARGETS, WIDTHS = (80, 90, 100), (1024, 4096, 8192)


@dataclass(frozen=True)
class Kernel:
    """types: of each argument in order ("*bf16", "i32", "fp32"); fixed: its constants. widest: the
    longest rows that it is started for, where it keeps them whole."""

    name: str
    function: Any
    types: tuple[str, ...]
    fixed: Mapping[str, Any]
    warps: int
    widest: int | None = None


def _step_kernels() -> list[Kernel]:
    """The optimizer's, in float32 with a bf16 copy; their width is that of a block."""
    fixed: dict[str, Any] = {
        n: triton.language.float32 for n in ("WEIGHT", "GRAD", "STATE", "WIDE")
    }
    fixed |= {n: True for n in ("ALIGNED", "SCALED", "SKIPS", "COPIES", "ZEROES")}
    fixed |= {"COPY": triton.language.bfloat16, "CHUNK": steps.CHUNK, "SIZE": steps.BLOCK}
    types = ("*i64", "*fp64", "*i32", "*fp32", "*fp32")
    momentum = {"MOMENTUM": True, "NESTEROV": True}
    some = {n: fixed[n] for n in ("GRAD", "ALIGNED", "CHUNK", "SIZE")}
    return [
        Kernel("adamw", steps.adam_kernel, types, {**fixed, "DECOUPLED": True}, steps.WARPS),
        Kernel("sgd", steps.sgd_kernel, types, {**fixed, **momentum}, steps.WARPS),
        Kernel("norm", steps.squares_kernel, ("*i64", "*i32", "*fp32"), some, steps.WARPS),
    ]


@dataclass(frozen=True)
class Row:
    """What one compilation gave."""

    kernel: str
    target: int
    width: int
    warps: int
    registers: int
    spills: int
    shared: int
    blocks: int
    wide_loads: int
    narrow_loads: int
    verdict: str


def _row_kernels(name: str, width: int, **flags: bool) -> list[Kernel]:
    """Forward and backward of one norm; flags: the kernels' constants, False where not given."""
    block, centres = next_power_of_2(width), flags.get("CENTRES", False)
    tensors = ("*bf16", "*i64", "*bf16", "*bf16", "*i8", "*bf16", "*bf16", "*bf16", "*bf16")
    forward = (*tensors, "*fp32", "*fp32", "*i64", "i32", "i32", "i32", "i32", "fp32", "fp32")
    names = ("CENTRES", "ADDS", "MORE", "DROPS", "GATHERS", "BIASES", "TOTALS")
    fixed = {n: flags.get(n, False) for n in names} | {"SCALES": True, "BLOCK": block}
    run, most = row_norm.forward_kernel, row_norm.WIDEST_FORWARD
    first = Kernel(f"{name} forward", run, forward, fixed, warps(width), most)
    tensors = ("*bf16", "*bf16", "*bf16", "*i8", "*bf16", "*fp32", "*fp32", "*bf16", "*bf16")
    backward = (*tensors, "*fp32", "*fp32", "i32", "i32", "i32", "fp32")
    fixed = {n: flags.get(n, False) for n in ("CENTRES", "ADDS", "DROPS", "BIASES")}
    fixed |= {"SCALES": True, "WEIGHS": True, "BLOCK": block}
    run, many = row_norm.backward_kernel, row_norm.backward_warps(width)
    most = row_norm.widest(centres)
    return [first, Kernel(f"{name} backward", run, backward, fixed, many, most)]


def _softmax_kernels(width: int) -> list[Kernel]:
    """Forward with a mask [b, 1, q, k] and backward, without dropout and with it; the strides of
    rows divide by 16."""
    mask = {"size_1": 1, "stride_1": 0, "stride_2": 0, "step": 1, "MASKS": True}
    found = []
    for name, module, way, types in (
        ("softmax", softmax, "forward", "*bf16 *bf16 *bf16 i32 i32 fp32 i32 i32 i32 i32"),
        ("softmax", softmax, "backward", "*bf16 *bf16 *bf16 i32 i32 fp32"),
        ("softmax_dropout", softmax_dropout, "forward",
         "*bf16 *bf16 *i64 *bf16 *bf16 i32 i32 fp32 fp32 i32 i32 i32 i32"),
        ("softmax_dropout", softmax_dropout, "backward", "*bf16 *bf16 *bf16 *bf16 i32 i32 fp32"),
    ):  # fmt: skip
        forth = way == "forward"
        each = softmax.FORWARD_EACH if forth else softmax.BACKWARD_EACH
        fixed = {**(mask if forth else {}), **softmax.block(width, each)}
        many = fixed.pop("num_warps")
        function = getattr(module, f"{way}_kernel")
        most = getattr(module, f"WIDEST_{way.upper()}")
        found.append(Kernel(f"{name} {way}", function, tuple(types.split()), fixed, many, most))
    return found


def _loss_kernels(width: int) -> list[Kernel]:
    """Cross entropy of rows of logits, alone and in the place of a head's logits."""
    size = cross_entropy.block(width)
    fixed = {"IGNORED": cross_entropy.IGNORED.default, "BLOCK": size}
    row = ("*fp32", "*fp32")
    strides = ("i32", "i32")
    forward = ("*bf16", "*i64", "*fp32", *row, *strides)
    backward = ("*fp32", "*bf16", "*i64", *row, "*bf16", *strides, "i32")
    in_place = ("*bf16", "*i64", "*fp32", *strides)
    return [
        Kernel(f"cross_entropy {name}", function, types, fixed, warps(size))
        for name, function, types in (
            ("forward", cross_entropy.forward_kernel, forward),
            ("backward", cross_entropy.backward_kernel, backward),
            ("in place", cross_entropy.in_place_kernel, in_place),
        )
    ]


def _pointwise_kernels(width: int) -> list[Kernel]:
    """The gated activations, GELU with a bias and rotary embedding; rows that lie apart."""
    block = min(next_power_of_2(width), row_pointwise.BLOCK)
    found = []

    def add(name: str, function: Any, types: str, **fixed: Any) -> None:
        fixed |= {"BLOCK": block}
        found.append(Kernel(name, function, tuple(types.split()), fixed, block // 256))

    for act, name in (("silu", "swiglu"), ("gelu", "geglu"), ("gelu_tanh", "geglu_tanh")):
        types = "*bf16 *bf16 *bf16 i32 i32 i32 i32"
        add(f"{name} forward", row_pointwise.gated_kernel, types, ACT=act)
        types = "*bf16 *bf16 *bf16 *bf16 *bf16 i32 i32 i32 i32 i32"
        add(f"{name} backward", row_pointwise.gated_backward_kernel, types, ACT=act)
    for act in ("gelu", "gelu_tanh"):
        fixed = {"ACT": act, "ROWS": row_pointwise.ROWS}
        types = "*bf16 *bf16 *bf16 i32 i32 i32 i32"
        add(f"bias_{act} forward", row_pointwise.bias_kernel, types, **fixed)
        types = "*bf16 *bf16 *bf16 *bf16 *fp32 i32 i32 i32 i32 i32 i32"
        back = row_pointwise.bias_backward_kernel
        add(f"bias_{act} backward", back, types, SUMS=True, **fixed)
    half = width // 128  # heads of 16, 64 and 128 elements
    rows, block = rotary.tile(half)
    for table, name in (("*bf16", "rotary"), ("*fp32", "rotary by float32")):
        types = ("*bf16", table, table, "*bf16" if table == "*bf16" else table, *["i32"] * 15)
        for back, way in ((False, "forward"), (True, "backward")):
            tensors = types if not back else (types[3], *types[1:])
            fixed = {"BACK": back, "HALF": half, "ROWS": rows, "BLOCK": block}
            kernel = rotary.turn_kernel
            found.append(Kernel(f"{name} {way}", kernel, tensors, fixed, rotary.WARPS))
    return found


def kernels(width: int) -> list[Kernel]:
    """Every kernel, for rows of `width` bf16 elements."""
    layer = {"CENTRES": True, "BIASES": True}
    added = {"ADDS": True, "TOTALS": True}
    return [
        *_row_kernels("rms_norm", width),
        *_row_kernels("add_rms_norm", width, **added),
        *_row_kernels("dropout_add_rms_norm", width, DROPS=True, **added),
        *_row_kernels("layer_norm", width, **layer),
        *_row_kernels("add_layer_norm", width, **layer, **added),
        *_row_kernels("dropout_add_layer_norm", width, DROPS=True, **layer, **added),
        *_row_kernels("embedding_layer_norm", width, GATHERS=True, MORE=True, **layer, **added)[:1],
        *_softmax_kernels(width),
        *_loss_kernels(width),
        *_pointwise_kernels(width),
    ]


def chosen_kernels(widths: Sequence[int]) -> list[tuple[Kernel, int]]:
    """Every kernel at each of the widths that it takes, and at its widest."""
    limits = {k.widest for k in kernels(widths[0]) if k.widest is not None}
    return [
        (kernel, width)
        for width in sorted({*widths, *limits})
        for kernel in kernels(width)
        if width == kernel.widest
        or (width in widths and (kernel.widest is None or width < kernel.widest))
    ]


def compiled(kernel: Kernel, target: int, width: int) -> Row:
    """Compile one kernel for one target."""
    names = kernel.function.arg_names
    free = [n for n in names if n not in kernel.fixed]
    signature = dict(zip(free, kernel.types, strict=True))
    signature |= dict.fromkeys(kernel.fixed, "constexpr")
    attributes = {
        (names.index(n),): _ALIGNED
        for n, t in zip(free, kernel.types, strict=True)
        if t.startswith("*") or _EVEN.fullmatch(n)
    }
    source = ASTSource(kernel.function, signature, dict(kernel.fixed), attributes)
    options = {"num_warps": kernel.warps}
    made = triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)
    ptx = made.asm["ptx"]
    registers, spills = _resources(ptx, target)
    threads = 32 * kernel.warps
    blocks = _REGISTERS // (registers * threads)
    loads = re.findall(r"ld\.global(\S*)", ptx)
    wide = sum("v4" in kind for kind in loads)
    shared = made.metadata.shared
    # A bf16 row spread over more threads than 8 elements each has narrower loads by need.
    thin = width // threads < 8
    reasons = [
        text
        for text, wrong in (
            ("spills", spills > 0),
            ("too few warps", blocks * kernel.warps < _FEWEST_WARPS),
            ("shared memory", shared > _SHARED[target]),
            ("narrow loads", wide == 0 and not thin),
        )
        if wrong
    ]
    verdict = "FAILS: " + ", ".join(reasons) if reasons else "ok"
    return Row(
        kernel.name, target, width, kernel.warps, registers, spills, shared, blocks, wide,
        len(loads) - wide, verdict,
    )  # fmt: skip


def _resources(ptx: str, target: int) -> tuple[int, int]:
    """Registers a thread and bytes spilled, as ptxas reports them."""
    tool = get_ptxas(target).path  # the one that knows the PTX this Triton writes
    architecture = re.search(r"\.target (\S+)", ptx)
    assert architecture is not None
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.ptx"
        file.write_text(ptx)
        said = subprocess.run(
            [tool, "-v", f"-arch={architecture[1].rstrip(',')}", str(file), "-o", "/dev/null"],
            capture_output=True,
            text=True,
            check=True,
        ).stderr
    registers = max(int(n) for n in re.findall(r"Used (\d+) registers", said))
    spills = sum(int(n) for n in re.findall(r"(\d+) bytes spill", said))
    return registers, spills


def main() -> int:
    """Print the table; without options save benchmarks/results/gate.json. 1 if a kernel fails."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gate", description=__doc__)
    parser.add_argument("--widths", type=int, nargs="+", default=list(WIDTHS))
    parser.add_argument("--targets", type=int, nargs="+", default=list(TARGETS), choices=TARGETS)
    chosen = parser.parse_args()
    rows = [
        compiled(kernel, target, width)
        for kernel, width in chosen_kernels(chosen.widths)
        for target in chosen.targets
    ]
    rows += [compiled(k, target, steps.BLOCK) for k in _step_kernels() for target in chosen.targets]
    head = tuple(asdict(rows[0]))
    print("\n".join(columns([head, *(tuple(str(v) for v in asdict(r).values()) for r in rows)])))
    if (tuple(chosen.widths), tuple(chosen.targets)) == (WIDTHS, TARGETS):
        found = {"command": "python -m benchmarks.gate", "triton": triton.__version__,
                 "rows": [asdict(r) for r in rows]}  # fmt: skip
        (RESULTS / "gate.json").write_text(json.dumps(found, indent=1) + "\n")
    return 1 if any(r.verdict != "ok" for r in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
