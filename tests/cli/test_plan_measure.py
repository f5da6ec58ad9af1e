"""`graphaccel plan --measure`: the plan is run here, and its memory is what was predicted."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

from graphaccel.cli import main as cli
from graphaccel.cli.jobs import Job
from graphaccel.cli.measure import materialise, random_batch
from graphaccel.compiler.model import as_batch
from graphaccel.planner.cluster.cluster import COLLECTIVES
from graphaccel.planner.cluster.cluster_file import read_cluster
from graphaccel.report.facts import Facts
from tests.cli.test_plan import JOBS, MODEL

# A batch of two: microbatches of one and two are timed.
PAIR = """

def pair():
    return Model(), {"x": torch.zeros(2, 16), "y": torch.zeros(2, 16)}
"""

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="plans for CPU processes")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "net.py").write_text(MODEL)
    (tmp_path / "jobs.py").write_text(JOBS + PAIR)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.delitem(sys.modules, "net", raising=False)
    return tmp_path


@pytest.mark.multiprocess
def test_a_loss_outside_is_measured_too(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = ("jobs.py:outside", "--devices", "1", "--measure", "2", "--format", "json")
    assert cli.main(["plan", *job]) == 0
    measured = Facts.from_json(capsys.readouterr().out).measured
    assert measured is not None
    assert 0 < measured.fastest


@pytest.mark.release
@pytest.mark.multiprocess
def test_a_step_is_measured_and_refines_a_cluster_file(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = ("plan", "jobs.py:meta", "--devices", "2", "--batch", "16")
    pins = ("--pipeline", "2", "--interleave", "1", "--microbatches", "4", "--format", "json")
    told = ("--measure", "3", "--refine", "cluster.json")
    assert cli.main([*job, "--device", "cpu", *pins, *told]) == 0
    out, err = capsys.readouterr()
    ran = Facts.from_json(out)
    measured = ran.measured
    assert measured is not None
    assert measured.steps == 3
    assert 0 < measured.fastest <= measured.seconds <= measured.slowest
    assert measured.where.startswith("2 processes on ")
    assert len(measured.memory) == 2
    for real, predicted in zip(measured.memory, ran.prediction.memory, strict=True):
        assert real == pytest.approx(predicted.tensors, rel=0.02)
    assert ran.calibration is not None
    assert ran.calibration.level == 0
    assert (
        "saved cluster.json: predicted by this step are plans with  --cluster cluster.json" in err
    )
    (step,) = read_cluster(Path("cluster.json")).steps
    assert step.took + step.optimizer_took == pytest.approx(measured.seconds)
    assert cli.main([*job, *pins, "--cluster", "cluster.json"]) == 0
    facts = Facts.from_json(capsys.readouterr().out)
    assert facts.calibration is not None
    assert facts.calibration.level == 2
    assert facts.prediction.seconds == pytest.approx(measured.seconds, rel=0.02)
    assert cli.main([*job, *pins, "--cluster", "cluster.json", "--save-cluster", "same.json"]) == 0
    assert read_cluster(Path("same.json")) == read_cluster(Path("cluster.json"))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("--refine", "new.json"), "--refine FILE is told what --measure STEPS finds: give both"),
        (
            ("--refine", "net.py", "--measure", "1"),
            "net.py exists: add to it with --cluster net.py",
        ),
    ],
)
def test_what_can_not_be_refined(
    folder: Path, capsys: pytest.CaptureFixture[str], given: tuple[str, ...], said: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["plan", "jobs.py:plain", "--devices", "2", *given])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.multiprocess
def test_calibrate_then_plan(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = ("jobs.py:pair", "--devices", "2", "--threads", "1")
    assert cli.main(["calibrate", *job, "--output", "cluster.json"]) == 0
    shown = capsys.readouterr().out
    assert "product" in shown
    assert "\nreduce-scatter: " in shown
    where = read_cluster(Path("cluster.json"))
    assert "product" in {row.op for row in where.device.measured}
    assert all(row.seconds > 0 for row in where.device.measured)
    (link,) = where.links
    assert 0 < link.latency_seconds < 1
    assert 1e6 < link.bandwidth < 1e12
    assert [row.name for row in link.measured] == list(COLLECTIVES)
    assert all(0 < row.latency_seconds < 1 for row in link.measured)
    assert all(1e6 < row.bandwidth for row in link.measured)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    assert where.device.crowd == max(1.0, 2 / (cores or 1))
    asked = ("--devices", "2", "--cluster", "cluster.json", "--format", "json")
    assert cli.main(["plan", "jobs.py:pair", *asked]) == 0
    assert Facts.from_json(capsys.readouterr().out).prediction.seconds > 0


def test_a_plan_for_other_devices_is_not_measured(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = ("jobs.py:plain", "--devices", "2", "--device", "h100-80gb")
    assert cli.main(["plan", *job, "--measure", "1"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert (
        "error[GA407]: --measure runs on this machine, which is cpu, and the plan is for "
        "2 x h100-80gb\n  help: --device cpu, or leave --measure out\n" in err
    )


def test_a_model_without_weights_gets_some() -> None:
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        example = as_batch((torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64)))
    materialise(Job(model, example, None, optimizer))
    assert not any(t.is_meta for t in (*model.parameters(), *model.buffers()))
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [*map(id, model.parameters())]
    assert model[0].weight.std() > 0
    values, labels = random_batch(example).leaves
    assert values.std() > 0
    assert labels.tolist() == [0, 0]


def test_what_has_weights_and_labels_keeps_them() -> None:
    model = torch.nn.Linear(3, 4)
    before = model.weight.detach().clone()
    labels = torch.tensor([3, 1])
    example = as_batch((torch.zeros(2, 3), labels))
    materialise(Job(model, example))
    assert torch.equal(model.weight, before)
    assert torch.equal(random_batch(example).leaves[1], labels)
