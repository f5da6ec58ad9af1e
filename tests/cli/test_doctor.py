"""`graphaccel doctor`: what it finds and how it is printed."""

from __future__ import annotations

from importlib import metadata

import pytest
from packaging.requirements import Requirement

from graphaccel.cli import doctor
from graphaccel.cli import main as cli
from graphaccel.cli.doctor import Finding

COMPLETE = {
    "torch": "2.13.0+cpu",
    "numpy": "2.1.0",
    "networkx": "3.4",
    "sympy": "1.14.0",
    "onnx": "1.19.0",
    "rich": "15.0.0",
    "onnxruntime-training-cpu": "1.19.2",
    "triton": "3.5.0",
    **dict.fromkeys((*doctor.REQUIRED, *doctor.OPTIONAL), "1.0"),
}


def _of(versions: dict[str, str]) -> dict[str, Finding]:
    return {finding.name: finding for finding in doctor.package_findings(versions.get)}


def test_nothing_is_amiss_with_everything_installed() -> None:
    findings = _of(COMPLETE)
    assert [f.name for f in findings.values() if f.cost or f.fatal] == []
    assert findings["onnxruntime"].state == "1.19.2 (onnxruntime-training-cpu)"


def test_each_declared_dependency_is_listed() -> None:
    declared = [Requirement(line) for line in metadata.requires("graphaccel") or ()]
    extras = ("gpu", "ort", "examples", "integrations", "lightning")
    names = {
        r.name
        for r in declared
        if r.marker is None or any(f'extra == "{extra}"' in str(r.marker) for extra in extras)
    }
    assert names <= {*COMPLETE, "onnxruntime-training-cpu"}


@pytest.mark.parametrize("name", ["torch", *doctor.REQUIRED])
def test_missing_requirement_is_fatal(name: str) -> None:
    finding = _of({k: v for k, v in COMPLETE.items() if k != name})[name]
    assert finding.fatal
    assert finding.state == "missing"
    assert finding.cost != ""


@pytest.mark.parametrize("version", ["2.10.1", "2.14.0", "3.0.0"])
def test_torch_outside_of_the_supported_range(version: str) -> None:
    finding = _of({**COMPLETE, "torch": version})["torch"]
    assert finding == Finding(
        "torch", version, "untested; needs 2.11 up to before 2.14", fatal=True
    )


@pytest.mark.parametrize("version", ["2.11.0", "2.13.0+cu130", "2.13.1"])
def test_supported_torch(version: str) -> None:
    assert _of({**COMPLETE, "torch": version})["torch"] == Finding("torch", version)


def test_plain_onnxruntime_has_no_training_kernels() -> None:
    versions = {k: v for k, v in COMPLETE.items() if not k.startswith("onnxruntime")}
    assert _of(versions)["onnxruntime"].state == "missing"
    finding = _of({**versions, "onnxruntime": "1.22.0"})["onnxruntime"]
    assert finding.state == "1.22.0 (onnxruntime)"
    assert finding.cost.startswith("without training kernels: ")
    assert not finding.fatal


def test_missing_triton_is_no_error() -> None:
    finding = _of({k: v for k, v in COMPLETE.items() if k != "triton"})["triton"]
    assert (finding.state, finding.fatal) == ("missing", False)


def test_report_text() -> None:
    findings = [
        Finding("torch", "missing", "nothing runs", fatal=True),
        Finding("cores", "2"),
        Finding("cuda", "no device", "training runs on CPU processes"),
    ]
    assert doctor.report(findings) == (
        "graphaccel 0.1.0\n"
        "x torch  missing    -> nothing runs\n"
        "  cores  2\n"
        "! cuda   no device  -> training runs on CPU processes\n"
        "2 to look at, marked ! or x"
    )
    assert doctor.report([Finding("cores", "2")]).endswith("\nnothing is missing")


def test_doctor_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor"]) == 0
    lines = [line[2:].split() for line in capsys.readouterr().out.splitlines()]
    assert ["torch", metadata.version("torch")] in lines  # without the build
    assert ["gloo", "available"] in lines
    assert any(words[0].startswith("cuda") for words in lines)


def test_exit_code_says_when_nothing_can_work(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = Finding("sympy", "missing", "graphaccel needs it", fatal=True)
    monkeypatch.setattr(doctor, "package_findings", lambda _: [broken])
    monkeypatch.setattr(doctor, "machine_findings", lambda: [])
    assert cli.main(["doctor"]) == 1
    assert "x sympy" in capsys.readouterr().out
