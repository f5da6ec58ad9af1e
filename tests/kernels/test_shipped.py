"""Every shipped fusion passes its own checks; a new author's path works from nothing."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from graphaccel.cli import main as cli
from graphaccel.cli.fusion_check import check_patterns, check_rule
from graphaccel.errors import BadFusion, KernelFailed, UnknownFusion
from graphaccel.kernels.check.definition import check_definition
from graphaccel.kernels.check.numbers import check_numbers
from graphaccel.kernels.fusion import T, fusion
from graphaccel.kernels.registry import enabled, fusion_named, shipped
from tests.support.small import DOUBLED

ROOT = Path(__file__).parents[2]
SHIPPED = [f.name for f in shipped()]


@pytest.mark.parametrize("name", SHIPPED)
def test_the_definition_holds(name: str) -> None:
    """Those of users are checked where they are defined; these are not, at each start."""
    check_definition(fusion_named(name))


@pytest.mark.parametrize("name", SHIPPED)
def test_numbers(name: str) -> None:
    count, faults = check_numbers(fusion_named(name))
    assert count >= 27
    assert not faults, faults


@pytest.mark.parametrize("name", SHIPPED)
def test_patterns(name: str) -> None:
    chosen = fusion_named(name)
    found, negatives, faults = check_patterns(chosen, (torch.float32,))
    assert not faults, faults
    assert (found, negatives) == (len(chosen.patterns), len(chosen.negatives))
    assert negatives


@pytest.mark.parametrize("name", [n for n in SHIPPED if fusion_named(n).rewrite is None])
def test_sharding_rules(name: str) -> None:
    indices, faults = check_rule(fusion_named(name))
    assert indices
    assert not faults, faults


@pytest.mark.parametrize("name", SHIPPED)
def test_the_document_says_what_it_replaces(name: str) -> None:
    table = (ROOT / "docs" / "fusions.md").read_text(encoding="utf-8").split("\n## ")[1]
    assert len(re.findall(rf"^\|[^|]*`{name}`[^|]*\|", table, flags=re.MULTILINE)) == 1


def test_an_author_starts_from_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}

    def run(*arguments: str) -> str:
        command = [sys.executable, "-m", "graphaccel", "fusion", *arguments]
        result = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
        )
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout

    assert cli.main(["fusion", "new", "squared_relu"]) == 0
    assert "wrote squared_relu.py" in capsys.readouterr().out
    lines = (tmp_path / "squared_relu.py").read_text().splitlines()
    assert len(lines) < 60
    assert cli.main(["fusion", "check", "squared_relu.py"]) == 0
    found = capsys.readouterr().out
    assert re.match(
        r"squared_relu: 75 calls .* 3 patterns found, 1 negatives .* 6 indices sharded: ok", found
    )
    assert "squared_relu forward" in run("bench", "squared_relu.py")


def test_the_class_in_the_document_is_one(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "fusions.md").read_text()
    code = next(b for b in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "class " in b)
    file = tmp_path / "squared_relu_of_the_document.py"
    code = code.replace("squared_relu", file.stem).replace(
        "    inputs", "    devices = ()\n    inputs"
    )
    file.write_text(code)
    assert cli.main(["fusion", "check", str(file)]) == 0


def test_names_choose() -> None:
    on_cpu = enabled(None, "cpu")
    assert on_cpu == enabled("auto", "cpu")
    assert "swiglu" not in on_cpu
    assert set(on_cpu) < set(enabled("auto", "cuda"))
    assert enabled("off", "cpu") == ()
    assert enabled(("auto", "swiglu", "-rotary"), "cpu") == tuple(
        sorted({*on_cpu, "swiglu"} - {"rotary"})
    )
    with pytest.raises(UnknownFusion, match="did you mean:  rms_norm"):
        enabled("rmsnorm", "cpu")


def test_what_is_refused_when_it_is_defined() -> None:
    """Besides what tests/errors/test_bad_input_fusion.py has."""

    def refused(**changes: object) -> str:
        with pytest.raises(BadFusion) as caught:
            fusion(type("refused", (), {**DOUBLED, **changes}))
        return caught.value.reason

    assert "has no pattern" in refused(pattern=None, patterns=())
    assert "no part called forwards" in refused(forwards=1)
    fusion(type("taken_name", (), dict(DOUBLED)))
    with pytest.raises(BadFusion, match="registered already"):
        fusion(type("taken_name", (), dict(DOUBLED)))


def test_a_definition_leaves_the_random_state() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x * 2 + torch.rand_like(x) * 0

    drawn = torch.get_rng_state()
    fusion(type("draws_a_number", (), {**DOUBLED, "forward": forward}))
    assert torch.equal(torch.get_rng_state(), drawn)


def test_a_failing_kernel_is_named() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        if x.shape[-1] == 99:
            raise RuntimeError("out of registers")
        return x * 2

    parts = {
        "inputs": {"x": T("... d")},
        "outputs": {"y": T("... d")},
        "devices": (),  # "auto" must not place it in the models of other tests
        "pattern": lambda x: x * 2,
        "forward": forward,
    }
    fusion(type("fails_at_99", (), parts))
    with pytest.raises(KernelFailed) as caught:
        torch.ops.graphaccel.fails_at_99(torch.ones(3, 99))
    assert caught.value.arguments == ("3x99 float32",)
    assert "out of registers" in caught.value.cause


def test_a_device_that_is_full_says_so_itself() -> None:
    """Scripts catch it, and try smaller batches."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        if x.shape[-1] == 98:
            raise torch.OutOfMemoryError("tried to allocate")
        return x * 2

    parts = {
        "inputs": {"x": T("... d")},
        "outputs": {"y": T("... d")},
        "devices": (),
        "pattern": lambda x: x * 2,
        "forward": forward,
    }
    fusion(type("fills_at_98", (), parts))
    with pytest.raises(torch.OutOfMemoryError):
        torch.ops.graphaccel.fills_at_98(torch.ones(3, 98))


def test_a_wide_bias_of_autocast_is_taken() -> None:
    """`linear` under autocast casts its bias; the fused head is given it as it is."""
    x, weight = torch.randn(6, 16).bfloat16(), torch.randn(40, 16).bfloat16()
    bias, target = torch.randn(40), torch.arange(6)
    loss, *_ = torch.ops.graphaccel.linear_cross_entropy(x, weight, bias, target, -100, 0)
    scores = torch.nn.functional.linear(x, weight, bias.bfloat16()).float()
    expected = torch.nn.functional.cross_entropy(scores, target, reduction="sum")
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)


def test_explain_lists_what_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "job.py").write_text(
        "from tests.support.zoo import ZOO\n"
        "def make():\n    model, batch, _ = ZOO['gpt2'].build()\n    return model, batch\n"
    )
    assert cli.main(["explain", f"{tmp_path}/job.py:make"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = {line.split()[0]: line for line in lines[1:]}
    assert "4" in rows["bias_gelu_tanh"].split()
    assert "transformer.h.*.mlp.act x 4" in rows["bias_gelu_tanh"]
    assert "another fusion took it" in rows["gelu_tanh"]
    assert rows["linear_cross_entropy"].split()[:2] == ["linear_cross_entropy", "1"]
    assert " of " in rows["geglu_tanh"]
