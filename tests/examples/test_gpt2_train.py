"""examples/gpt2/train.py and demo.py."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from .conftest import EXAMPLES

SMALL = (
    "--layers=2 --width=32 --heads=2 --sequence=32 --batch=8 --steps=12 --warmup=2 "
    "--vocabulary=300 --corpus-bytes=300000 --evaluate-every=6 --evaluate-batches=2 --log-every=4"
).split()


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"--cache={tmp_path_factory.mktemp('text')}"


@pytest.mark.parametrize("kind", ["plain", "hf"])
def test_it_learns_without_graphaccel_and_writes_its_curve(
    run_here, cache: str, tmp_path: Path, kind: str
) -> None:
    curve = tmp_path / "curves" / "one.json"
    out = run_here("gpt2/train.py", *SMALL, cache, "--eager", f"--model={kind}", f"--curve={curve}")
    result = json.loads(curve.read_text())
    assert (result["model"], result["eager"], len(result["losses"])) == (kind, True, 12)
    assert result["losses"][0] == pytest.approx(math.log(300), rel=0.05)
    assert result["losses"][-1] < result["losses"][0] - 0.1
    assert [step for step, _ in result["validation"]] == [0, 6, 12]
    assert result["validation"][-1][1] < result["validation"][0][1] - 0.1
    progress = (
        r"^step +4/12  loss \d\.\d{4}  [\d,]+ tokens/s  step \d+\.\d{3} s  peak \d+ MiB resident$"
    )
    assert re.search(progress, out, re.MULTILINE), out


def test_the_same_seed_gives_the_same_curve(run_here, cache: str, tmp_path: Path) -> None:
    curves = []
    for seed in (0, 0, 1):
        curve = tmp_path / "curve.json"
        run_here("gpt2/train.py", *SMALL, cache, "--eager", f"--seed={seed}", f"--curve={curve}")
        curves.append(json.loads(curve.read_text())["losses"])
    assert curves[0] == curves[1] != curves[2]


def test_the_learning_rate_rises_and_falls(gpt2) -> None:
    cosine = gpt2("train").cosine
    assert [cosine(step, 4, 10) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert cosine(4, 4, 10) == 1.0
    assert cosine(7, 4, 10) == pytest.approx(0.55)
    assert cosine(10, 4, 10) == pytest.approx(0.1)
    assert cosine(0, 0, 10) == 1.0


def test_weights_decay_but_biases_and_norms_do_not(gpt2) -> None:
    train = gpt2("train")
    args = train.arguments([*SMALL, "--eager"])
    model, _ = train.build_model(args, 300)
    decayed, others = train.build_optimizer(model, args).param_groups
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    assert {p.dim() for p in decayed["params"]} == {2}
    assert {p.dim() for p in others["params"]} == {1}
    assert len(decayed["params"]) + len(others["params"]) == len(list(model.parameters()))


def test_predictions_stand_beside_what_was_measured(gpt2) -> None:
    train = gpt2("train")
    predicted = SimpleNamespace(predicted_step_seconds=0.25, predicted_peak_bytes=3 << 20)
    assert train.step_time(0.5, predicted) == "step 0.500 s (predicted 0.250)"
    assert train.step_time(0.5, None) == "step 0.500 s"
    text = r"peak [\d.]+ MiB (resident|allocated) \(predicted 3\.0 in tensors\)"
    assert re.fullmatch(text, train.peak_memory(predicted))


def test_eager_is_one_device(gpt2, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        gpt2("train").arguments(["--eager", "--devices=2"])
    assert stopped.value.code == 2
    expected = "--eager is plain PyTorch on one device; leave out --devices"
    assert expected in capsys.readouterr().err


def test_the_demo_plans_the_model_that_it_trains(gpt2) -> None:
    demo, train = gpt2("demo"), gpt2("train")
    planned, batch, loss_fn, optimizer = demo.job()
    assert loss_fn is None
    assert isinstance(optimizer, torch.optim.AdamW)
    args = train.arguments(demo.settings(steps=8))
    trained, loss_of = train.build_model(args, args.vocabulary)
    shapes = [(name, p.shape) for name, p in trained.named_parameters()]
    assert shapes == [(name, p.shape) for name, p in planned.named_parameters()]
    assert batch[0].shape == (args.batch, args.sequence)
    with torch.no_grad():
        loss = loss_of(planned, *batch)
    assert loss.shape == ()


def stand_in(processes: int, many: list[float], one: list[float]) -> Callable[..., None]:
    """In place of demo.run: writes the curves that the two runs of train.py would."""

    def run(title: str, command: list[str]) -> None:
        if "--curve" in command:
            eager = "--eager" in command
            curve = {"processes": 1 if eager else processes, "losses": one if eager else many}
            Path(command[command.index("--curve") + 1]).write_text(json.dumps(curve))

    return run


@pytest.mark.parametrize(
    ("many", "code", "verdict"),
    [
        ([3.0, 2.0005], 0, "largest difference 5.00e-04 (step 1), within 0.001"),
        ([3.002, 2.0], 1, "largest difference 2.00e-03 (step 0), NOT within 0.001"),
        ([3.0, math.nan], 1, "largest difference nan (step 1), NOT within 0.001"),
    ],
)
def test_the_demo_fails_where_the_curves_differ(
    gpt2, monkeypatch, capsys, tmp_path: Path, many: list[float], code: int, verdict: str
) -> None:
    demo, plot = gpt2("demo"), tmp_path / "loss.svg"
    monkeypatch.setattr(demo, "run", stand_in(4, many, [3.0, 2.0]))
    assert demo.main(["--steps=2", f"--svg={plot}"]) == code
    assert verdict in capsys.readouterr().out
    assert plot.read_text().startswith("<svg ")


def test_the_demo_fails_where_it_did_not_run_on_four_processes(gpt2, monkeypatch) -> None:
    demo = gpt2("demo")
    monkeypatch.setattr(demo, "run", stand_in(1, [3.0, 2.0], [3.0, 2.0]))
    with pytest.raises(SystemExit, match="pipeline 2` ran on 1 processes"):
        demo.main(["--steps=2"])


def test_the_demo_stops_with_the_exit_code_of_what_failed(gpt2) -> None:
    with pytest.raises(SystemExit, match="demo: `this` failed with exit code 3"):
        gpt2("demo").run("this", [sys.executable, "-c", "raise SystemExit(3)"])


@pytest.mark.multiprocess
@pytest.mark.parametrize("kind", ["plain", "hf"])
def test_two_processes_have_the_curve_of_one(
    run_here, run_apart, run_ranks, cache: str, tmp_path: Path, kind: str
) -> None:
    """The plain model's script starts its own second process."""
    one, two = tmp_path / "one.json", tmp_path / "two.json"
    same = [*SMALL, cache, f"--model={kind}"]
    run_here("gpt2/train.py", *same, "--eager", f"--curve={one}")
    plan = ("--devices=2", "--pipeline=2", "--interleave=1", "--report", f"--curve={two}")
    if kind == "plain":
        out = run_apart(str(EXAMPLES / "gpt2" / "train.py"), *same, *plan)
    else:
        out = run_ranks("gpt2/train.py", *same, *plan)
    expected, got = json.loads(one.read_text()), json.loads(two.read_text())
    assert got["losses"] == pytest.approx(expected["losses"], abs=1e-4)
    for (step, loss), (_, reference) in zip(got["validation"], expected["validation"], strict=True):
        assert loss == pytest.approx(reference, abs=1e-4), step
    assert (expected["processes"], got["processes"]) == (1, 2)
    assert got["predicted_step_seconds"] > 0
    assert got["predicted_peak_bytes"] > 0
    assert len(re.findall(r"^step +12/12 ", out, re.MULTILINE)) == 1  # of rank 0 only
    assert "pipeline 2" in out
