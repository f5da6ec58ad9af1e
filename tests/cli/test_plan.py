"""`graphaccel plan`: finding the model, the report, the saved plan. No process group, no GPU."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import torch

import graphaccel
from graphaccel.cli import main as cli
from graphaccel.cli.jobs import find_job
from graphaccel.planner.plan.plan import Plan

MODEL = """
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(4)))

    def forward(self, x, y):
        return {"loss": (self.layers(x) - y).square().mean()}
"""
JOBS = """
import torch
from torch import nn
from net import Model


def plain():
    return Model(), {"x": torch.zeros(8, 16), "y": torch.zeros(8, 16)}


def meta():
    with torch.device("meta"):
        model = Model(1024)
        example = torch.zeros(8, 1024), torch.zeros(8, 1024)
    return model, example, None, torch.optim.AdamW(model.parameters())


def apart():
    def loss_fn(output, target):
        return (output - target).square().mean()

    example = torch.zeros(8, 16), torch.zeros(8, 16)
    return nn.Linear(16, 16), example, loss_fn


def outside():
    return nn.Linear(16, 16), torch.zeros(8, 16)


def wrong():
    return Model()
"""
SCRIPT = """
import sys
import torch
from net import Model
import graphaccel

assert __name__ == "__main__"
model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = graphaccel.optimize(model, optimizer, devices=64, data=2{settings})
x, y = torch.zeros(8, 16), torch.zeros(8, 16)
with torch.no_grad():
    print("before", model(x, y)["loss"].item() >= 0, len(model.state_dict()))
try:
    model(x=x, y=y)
except Exception:
    print("swallowed")
raise SystemExit("trained")
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Holds net.py and jobs.py; is the working directory of the test."""
    (tmp_path / "net.py").write_text(MODEL)
    (tmp_path / "jobs.py").write_text(JOBS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.delitem(sys.modules, "net", raising=False)
    return tmp_path


def plan(*arguments: str) -> int:
    sys.modules.pop("net", None)  # of another test's folder
    return cli.main(["plan", *arguments])


def test_the_report_of_a_function(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = list(sys.path)
    code = plan("jobs.py:plain", "--devices", "2", "--device", "cpu", "--pipeline", "2")
    out = capsys.readouterr().out
    assert code == 0
    for line in (
        "model   Model   1,088 parameters",
        "cluster 2 x cpu",
        "  pinned: pipeline",
        "WHY",
    ):
        assert f"\n{line}" in f"\n{out}"
    assert "assumed no optimizer state" in out
    assert sys.path == path
    assert not [name for name in sys.modules if name.startswith("graphaccel plan")]


def test_a_model_without_weights(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--devices", "4", "--device", "h100-80gb", "--batch", "64")
    assert plan("jobs.py:meta", *arguments) == 0
    out = capsys.readouterr().out
    assert "4,198,400 parameters in 8 tensors, batch 64" in out
    assert "cluster 4 x h100-80gb" in out
    assert "assumed AdamW" in out


def test_a_loss_function_beside_the_model(folder: Path) -> None:
    saved = folder / "plan.json"
    arguments = ("--devices", "2", "--microbatches", "4", "--data", "2", "--json", str(saved))
    assert plan("jobs.py:apart", *arguments) == 0
    made = Plan.from_json(saved.read_text())
    assert (made.devices, made.data, made.microbatches, made.batch) == (2, 2, 4, 8)
    assert made.pinned == ("data", "microbatches")


def test_a_loss_outside_of_the_model(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("jobs.py:outside", "--devices", "2") == 0
    report = " ".join(capsys.readouterr().out.split())
    assert "data 2 x pipeline 1" in report
    assert "the loss is outside of the graph: no pipeline cut and no microbatches" in report
    assert "the outputs of the whole batch (0.5 KiB, and as much for their gradients)" in report


def test_a_saved_plan_runs_and_is_that_of_the_interface(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan("jobs.py:plain", "--devices", "1", "--microbatches", "2", "--json", "p.json") == 0
    assert 'graphaccel.optimize(model, plan="p.json")' in capsys.readouterr().out
    sys.path.insert(0, str(folder))
    try:
        from net import Model  # type: ignore[import-not-found]
    finally:
        sys.path.remove(str(folder))
    torch.manual_seed(0)
    model, batch = Model(), {"x": torch.randn(8, 16), "y": torch.randn(8, 16)}
    expected = model(**batch)["loss"]
    expected.backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    graphaccel.optimize(model, plan="p.json")
    loss = model(**batch)["loss"]
    loss.backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close([p.grad for p in model.parameters()], gradients)
    assert model.graphaccel.plan.microbatches == 2
    other = graphaccel.plan(Model(), batch, devices=1, microbatches=2)
    assert other.to_json() == Plan.from_json(Path("p.json").read_text()).to_json()


def test_a_saved_plan_for_other_devices_is_refused(folder: Path) -> None:
    assert plan("jobs.py:plain", "--devices", "1", "--device", "a100-80gb", "--json", "p.json") == 0
    assert json.loads(Path("p.json").read_text())["cluster"] == "1 x a100-80gb"
    sys.path.insert(0, str(folder))
    try:
        from net import Model  # type: ignore[import-not-found]
    finally:
        sys.path.remove(str(folder))
    batch = {"x": torch.zeros(8, 16), "y": torch.zeros(8, 16)}
    with pytest.raises(graphaccel.errors.PlanMismatch, match="1 x a100-80gb"):
        graphaccel.optimize(Model(), plan="p.json", example_batch=batch)


@pytest.mark.parametrize(
    ("settings", "printed"),
    [
        ("", "before True 8\n"),
        (", example_batch={'x': torch.zeros(8, 16), 'y': torch.zeros(8, 16)}", ""),
    ],
    ids=["first batch", "example batch"],
)
def test_a_script_is_run_up_to_its_first_training_batch(
    folder: Path, capsys: pytest.CaptureFixture[str], settings: str, printed: str
) -> None:
    (folder / "train.py").write_text(SCRIPT.format(settings=settings))
    argv = list(sys.argv)
    assert plan("train.py", "--devices", "4", "--pipeline", "2") == 0
    captured = capsys.readouterr()
    assert "graphaccel: running train.py up to its first training batch\n" in captured.err
    assert printed in captured.err  # standard output is the report's alone
    precision, model, *_ = captured.out.splitlines()
    assert precision.startswith("precision float32 as your script has it")
    assert model.startswith("model   Model   1,088 parameters")
    assert "PLAN    data 2 x pipeline 2" in captured.out
    assert "pinned: data, pipeline\n" in captured.out
    assert "assumed SGD" in captured.out
    assert sys.argv == argv
    assert "GRAPHACCEL_PLAN_ONLY" not in os.environ


def test_a_file_reads_arguments_of_its_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not those of `graphaccel plan`: a script beside its jobs parses them where it begins."""
    read = "import argparse\nargparse.ArgumentParser().parse_args()\n"
    (folder / "jobs.py").write_text(read + JOBS)
    monkeypatch.setattr(sys, "argv", argv := ["graphaccel", "plan", "jobs.py:plain"])
    assert type(find_job(Path("jobs.py"), "plain").model).__name__ == "Model"
    assert sys.argv is argv


def test_rows_of_one_rank_are_planned_as_those_of_all(folder: Path) -> None:
    (folder / "train.py").write_text(SCRIPT.format(settings=', batch="local"'))
    assert plan("train.py", "--devices", "4", "--json", "p.json") == 0
    assert json.loads(Path("p.json").read_text())["batch"] == 4 * 8


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("jobs.py:nothing", "jobs.py has no function `nothing`"),
        ("jobs.py:wrong", "jobs.py:wrong returned a Model, not a model and its example batch"),
        ("net.py", "net.py ended without training a model under graphaccel.optimize()"),
        ("notes.txt:job", "notes.txt is not a Python file"),
    ],
)
def test_a_file_that_gives_no_model(
    folder: Path, capsys: pytest.CaptureFixture[str], target: str, message: str
) -> None:
    (folder / "notes.txt").write_text("")
    assert plan(target, "--devices", "2") == 1
    assert f"error[GA407]: {message}\n" in capsys.readouterr().err


def test_an_error_of_the_users_file_is_its_own(folder: Path) -> None:
    (folder / "broken.py").write_text("def job():\n    return 1 / 0\n")
    with pytest.raises(ZeroDivisionError):
        plan("broken.py:job", "--devices", "2")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ("--device abacus", 2, "error[GA601]: no device named `abacus` in the catalogue"),
        ("--device h100-80gb --memory 1MiB", 3, "error[GA201]: no plan fits"),
        ("--data 3", 1, "error[GA202]"),
        ("--cuda-graphs", 1, "error[GA903]: cuda_graphs=True needs an NVIDIA GPU"),
    ],
)
def test_exit_codes(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: str, code: int, message: str
) -> None:
    assert plan("jobs.py:meta", "--devices", "2", *arguments.split()) == code
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


def test_the_graphs_of_a_plan_can_be_written_down(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRAPHACCEL_DUMP", "graphs")
    monkeypatch.delenv("RANK", raising=False)
    pins = ("--pipeline", "2", "--interleave", "1", "--microbatches", "4")
    assert plan("jobs.py:plain", "--devices", "2", "--device", "cpu", *pins) == 0
    (made,) = Path("graphs").iterdir()
    assert made.name == "data-1-x-pipeline-2-4-microbatches-of-2"
    files = {file.name for file in made.iterdir()}
    assert {"stage_0_forward.txt", "stage_1_forward.txt"} <= files
    backwards = {"stage_0_backward.txt", "stage_0_backward_first.txt", "stage_1_backward_last.txt"}
    assert backwards <= files
    passes = [file.partition("_")[2] for file in sorted(files) if file[0].isdigit()]
    cut = ("exact_microbatch.txt", "split_phases.txt", "accumulate_gradients.txt")
    assert [name for name in passes if name in cut] == [*cut]
    (part,) = made.glob("*_exact_microbatch.txt")
    assert "f32[2,16]" in part.read_text()
