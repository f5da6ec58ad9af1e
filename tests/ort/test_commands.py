"""Calibrating, planning with what was measured, and explaining; bad input."""

from __future__ import annotations

import dataclasses
import json
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

from graphaccel.cli import main as cli
from graphaccel.compiler.compiler import Compiler
from graphaccel.compiler.model import Model, as_batch
from graphaccel.errors import BadPin, OrtMismatch, OrtMissing
from graphaccel.ort import kernels as kernels_module
from graphaccel.ort.kernels import Kernels
from graphaccel.ort.measure import calibration_name
from graphaccel.planner.cluster.catalogue import cluster
from graphaccel.planner.cluster.cluster import Cluster
from graphaccel.planner.cluster.cluster_file import read_cluster
from graphaccel.planner.plan.plan import Plan
from tests.ort.test_place_ort import Net

JOB = """
    import torch
    from tests.ort.test_place_ort import Net

    def job():
        return Net(2), (torch.randn(4, 8),)
"""

pytestmark = pytest.mark.usefixtures("shared_captures")


@pytest.fixture
def job(tmp_path: Path) -> str:
    path = tmp_path / "model.py"
    path.write_text(textwrap.dedent(JOB))
    return f"{path}:job"


def choose(where: Cluster, plan: Plan | None = None, **pins: Any) -> Plan:
    example = as_batch((torch.randn(4, 8),))
    return Compiler(Model(Net(2), None, 2.0), where, pins, plan).choose(example).plan


def test_calibrate_then_plan(job: str, tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "cluster.json"
    assert cli.main(["calibrate", job, "--ort", "--output", str(file)]) == 0
    shown = capsys.readouterr().out
    assert "regions are faster than torch" in shown
    (name,) = read_cluster(file).ort
    assert name == calibration_name(kernels_module.installed().name, torch.get_num_threads())
    measured = read_cluster(file).ort[name]
    assert measured
    assert all(a > 0 and b > 0 for a, b in measured.values())
    where = ["--devices", "1", "--cluster", str(file), "--ort", "auto"]
    assert cli.main(["plan", job, *where]) == 0
    assert "onnxruntime" in capsys.readouterr().out


def test_auto_takes_what_was_faster_and_nothing_else(kernels: Kernels) -> None:
    everything = choose(cluster("cpu", 1), ort="all").prediction.ort
    chosen = {r.key for r in everything.regions if r.module.startswith("blocks.")}
    name = calibration_name(kernels.name, torch.get_num_threads())
    costs = {r.key: (1.0, 0.5 if r.key in chosen else 2.0) for r in everything.regions}
    where = dataclasses.replace(cluster("cpu", 1), ort={name: costs})
    report = choose(where).prediction.ort
    assert {r.key for r in report.regions} == chosen
    other = dataclasses.replace(where, ort={"plain 0.1, 1 thread": costs})
    assert choose(other).prediction.ort.regions == ()
    slow = dataclasses.replace(where, ort={name: {k: (1.0, 0.99) for k in costs}})
    assert choose(slow).prediction.ort.regions == ()


def test_a_saved_plan_runs_the_regions_it_names(kernels: Kernels) -> None:
    everything = choose(cluster("cpu", 1), ort="all").prediction.ort
    name = calibration_name(kernels.name, torch.get_num_threads())
    key = everything.regions[0].key
    costs = {key: (1.0, 0.5)}
    plan = choose(dataclasses.replace(cluster("cpu", 1), ort={name: costs}))
    again = choose(cluster("cpu", 1), Plan.from_json(plan.to_json()))
    assert again.prediction.ort == plan.prediction.ort
    assert {r.key for r in again.prediction.ort.regions} == {key}


def test_nothing_measured_nothing_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "graphaccel.compiler.ort_regions.installed", lambda: pytest.fail("not needed")
    )
    assert choose(cluster("cpu", 1)).prediction.ort is None


def test_explain_a_plan(job: str, tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "plan.json"
    assert cli.main(["plan", job, "--devices", "1", "--ort", "blocks.0", "--json", str(file)]) == 0
    shown = capsys.readouterr().out
    assert "2 regions, 2 distinct" in shown
    assert cli.main(["explain", str(file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("onnxruntime ")
    assert "ort=blocks.0: 2 regions" in lines[0]
    keys = [r["key"] for r in json.loads(file.read_text())["prediction"]["ort"]["regions"]]
    assert [line.split()[-1] for line in lines[3:5]] == keys


def test_what_draws_random_numbers_says_so() -> None:
    class Dropping(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(torch.nn.functional.dropout(x))

    example = as_batch((torch.randn(4, 8),))
    compiler = Compiler(Model(Dropping(1), None, 2.0), cluster("cpu", 1), {"ort": "all"})
    report = compiler.choose(example).plan.prediction.ort
    (declined,) = [d for d in report.declined if "dropout" in d.op]
    assert declined.op == "aten.native_dropout"
    assert declined.reason == "it draws random numbers"


def test_complex_numbers_are_declined_with_the_line(kernels: Kernels) -> None:
    class Turning(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(torch.fft.ifft(torch.fft.fft(x)).real)

    example = as_batch((torch.randn(4, 8),))
    compiler = Compiler(Model(Turning(1), None, 2.0), cluster("cpu", 1), {"ort": "all"})
    report = compiler.choose(example).plan.prediction.ort
    places = {d.location for d in report.declined if "fft" in d.op}
    assert any("test_commands.py:" in place for place in places), report.declined


@pytest.mark.parametrize("value", ["some", ["no.such.module"], 3])
def test_pins_that_can_not_be(value: Any) -> None:
    with pytest.raises(BadPin):
        choose(cluster("cpu", 1), ort=value)


def test_without_onnxruntime(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphaccel.compiler.ort_regions.installed", lambda: None)
    with pytest.raises(OrtMissing, match="ort='all' needs ONNX Runtime"):
        choose(cluster("cpu", 1), ort="all")
    measured = dataclasses.replace(cluster("cpu", 1), ort={"plain 1.0, 1 thread": {"k": (2, 1)}})
    assert choose(measured).prediction.ort is None


def test_a_plan_of_another_build() -> None:
    plan = choose(cluster("cpu", 1), ort="all")
    report = dataclasses.replace(plan.prediction.ort, build="other 1.0")
    prediction = dataclasses.replace(plan.prediction, ort=report)
    with pytest.raises(OrtMismatch, match=r"made for ONNX Runtime other 1\.0"):
        choose(cluster("cpu", 1), dataclasses.replace(plan, prediction=prediction))
