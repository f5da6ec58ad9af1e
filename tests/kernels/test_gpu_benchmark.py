"""`python -m benchmarks.gpu` without a GPU: its code at toy sizes, and faults."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import gpu
from benchmarks.shared import gpu_kernels
from graphaccel.kernels.check.numbers import Fault
from graphaccel.kernels.multi_tensor.steps import MultiTensor
from graphaccel.kernels.registry import fusions, shipped
from graphaccel.kernels.spec import Fusion
from tests.support.documents import docs_script

ROOT = Path(__file__).parents[2]
ONE = replace(gpu.TOY, models=())


def tables(result: dict[str, Any]) -> str:
    """As the README has them."""
    module = docs_script("measurements/measured")
    return module.gpu_tables(result)


@pytest.mark.release
def test_everything_runs_at_toy_sizes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "gpu.json"
    assert gpu.main(["--dry", "--models", "vit-large", "--output", str(file)]) == 0
    result = json.loads(file.read_text())
    with_kernels = {f.name for f in fusions() if f.cuda_forward is not None}
    assert {"swiglu", "rotary", "scale_mask_softmax", "linear_cross_entropy"} < with_kernels
    for phase in ("forward", "backward"):
        assert {r["kernel"] for r in result["kernels"] if r["phase"] == phase} == with_kernels
    assert all(r["seconds"] and r["bytes"] and r["of_clone"] for r in result["kernels"])
    assert [r["kernel"] for r in result["optimizers"]] == ["adamw", "adam", "sgd"]
    (step,) = result["steps"]
    assert all(step[side] > 0 for side in gpu.SIDES)
    assert result["faults"] == []
    assert "\nno faults\n" in capsys.readouterr().out
    shown = tables(result)
    for name in (*with_kernels, "adamw", "vit-large"):
        assert f"| {name} |" in shown or f"| `{name}` |" in shown
    assert "fails" not in shown


def test_what_is_wrong_is_told_apart_and_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One kernel whose numbers are wrong, one that fails; the others are measured all the same."""

    def wrong(fusion: Fusion, device: str) -> tuple[int, tuple[Fault, ...]]:
        assert device == "cpu"
        found = (Fault("output `y`: off by 2", "float16, padded"),)
        return 1, found if fusion.name == "rms_norm" else ()

    def failing(fusion: Fusion) -> Any:
        if fusion.name != "swiglu":
            return op_of(fusion)

        def fails(*_: Any) -> Tensor:
            raise RuntimeError("out of registers\nand more")

        return fails

    op_of = gpu_kernels.op_of
    monkeypatch.setattr(gpu_kernels, "check_numbers", wrong)
    monkeypatch.setattr(gpu_kernels, "op_of", failing)
    monkeypatch.setattr(gpu_kernels, "compiled", lambda function: function)
    monkeypatch.setattr(gpu, "TOY", replace(ONE, toy=False))
    monkeypatch.setattr(gpu, "optimizer_rows", lambda *_: ([], []))
    file = tmp_path / "gpu.json"
    names = ["rms_norm", "swiglu", "geglu"]
    given = ["--dry", "--models", "--output", str(file), "--fusions", *names]
    assert gpu.main(given) == 1
    result = json.loads(file.read_text())
    inputs = "gate 64x64 up 64x64"
    assert result["faults"] == [
        {"name": "rms_norm", "what": "output `y`: off by 2", "case": "float16, padded"},
        *(
            {"name": "swiglu", "what": "the kernel fails: RuntimeError: out of registers",
             "case": f"{phase}, {inputs}"}
            for phase in ("forward", "backward", "backward")
        ),
    ]  # fmt: skip
    out = capsys.readouterr().out
    assert out.endswith(f"  swiglu: the kernel fails: RuntimeError: out of registers\n"
                        f"      in backward, {inputs}\n")  # fmt: skip
    assert "\n4 FAULTS\n  rms_norm: output `y`: off by 2\n      in float16, padded\n" in out
    rows = {(r["kernel"], r["phase"]): r for r in result["kernels"]}
    assert rows["swiglu", "forward"]["seconds"] is None
    assert rows["swiglu", "forward"]["eager"] > 0
    assert rows["geglu", "backward"]["alone"] > 0
    shown = tables(result)
    assert "| `swiglu` | fails | fails | fails | fails |" in shown
    assert "Faults: 4." in shown


def test_a_side_of_a_training_step_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(name: str, side: str, _: Any) -> tuple[float, int]:
        if side == "compile":
            raise torch.cuda.OutOfMemoryError("40 GiB")
        return 0.25, 1000

    monkeypatch.setattr(gpu, "measured_step", measured)
    faults: list[dict[str, str]] = []
    row = gpu.step_row("gpt2", ONE, faults)
    assert (row["eager"], row["compile"], row["graphs"]) == (0.25, None, 0.25)
    assert [f["what"] for f in faults] == ["compile fails: OutOfMemoryError: 40 GiB"]


def test_every_size_is_compiled_for_itself() -> None:
    """Ten sizes of one function, with and without gradients: no size is symbolic, and none runs
    eagerly, as beyond torch's recompile limit."""
    seen: list[tuple[int, ...]] = []

    def backend(graph: Any, inputs: list[Any]) -> Any:
        seen.extend(tuple(x.shape) for x in inputs if isinstance(x, Tensor))
        assert not any(isinstance(x, torch.SymInt) for x in inputs)
        return graph

    def function(x: Tensor) -> Tensor:
        return x.sin() * 2

    wanted = []
    for width in range(2, 12):
        run = gpu_kernels.compiled(function, backend)
        for tracks in (False, True):
            with torch.set_grad_enabled(tracks):
                run(torch.ones(3, width, requires_grad=tracks))
            wanted.append((3, width))
    assert seen == wanted
    torch.compiler.reset()


@pytest.mark.parametrize("name", list(gpu_kernels.OPTIMIZERS))
def test_optimizers_that_are_wrong_are_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpu_kernels.optimizer_faults(name, "cpu") == []
    step = "sgd" if name == "sgd" else "adam"
    right = getattr(MultiTensor, step)

    def wrong(self: MultiTensor, params: list[Tensor], *rest: Any) -> Any:
        right(self, params, *rest)
        params[2][-1] += 1e-3  # the last element of a tail

    monkeypatch.setattr(MultiTensor, step, wrong)
    found = gpu_kernels.optimizer_faults(name, "cpu")
    assert [f["case"] for f in found] == ["plain", "unscaled and clipped"]
    assert all(f["what"].startswith("weight of (2049,): off by ") for f in found)


def test_kernels_are_those_that_are_registered() -> None:
    own = {f.name for f in shipped() if f.cuda_forward is not None}
    assert own <= {f.name for f in gpu_kernels.with_kernels(None)}
    assert [f.name for f in gpu_kernels.with_kernels(["swiglu"])] == ["swiglu"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main([]) == 1
    assert "no CUDA device here: nothing was measured" in capsys.readouterr().out
