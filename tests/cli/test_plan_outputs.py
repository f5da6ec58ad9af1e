"""What `graphaccel plan` shows besides its report: JSON, trace, why not, two plans; and Ctrl-C."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from graphaccel.cli import main as cli
from graphaccel.cli import plan as plan_command
from graphaccel.planner.plan.plan import Plan
from graphaccel.planner.plan.plan_name import plan_name
from graphaccel.planner.search.record import Record
from graphaccel.report.facts import Facts
from tests.cli.test_plan import JOBS, MODEL
from tests.support.captures import captures_of

JOB = ("jobs.py:meta", "--devices", "2", "--device", "h100-80gb", "--batch", "16")

FUSED = """
import torch
from torch import nn


def job():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 64))
        example = torch.zeros(8, 64), torch.zeros(8, 64)
    return model, example, lambda output, wanted: (output - wanted).square().mean()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working directory of the test; the model of a job is captured once for all tests."""
    (tmp_path / "net.py").write_text(MODEL)
    (tmp_path / "jobs.py").write_text(JOBS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.delitem(sys.modules, "net", raising=False)
    with captures_of("plan outputs"):
        yield tmp_path


def plan(*arguments: str) -> int:
    sys.modules.pop("net", None)
    return cli.main(["plan", *arguments])


def test_json_is_all_there_is_on_standard_output(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(*JOB, "--format", "json", "--json", "p.json", "--trace", "t.json") == 0
    out, err = capsys.readouterr()
    facts = Facts.from_json(out)
    assert json.loads(out)["schema"] == 1
    assert facts.plan == Plan.from_json(Path("p.json").read_text())
    assert facts.model.parameters == 4_198_400
    assert sum(p.chosen for p in facts.candidates) == 1
    assert len(facts.candidates) > 4
    assert "saved p.json: run it with" in err
    assert json.loads(Path("t.json").read_text())["otherData"]["times"] == "predicted"
    assert facts.memory


def test_what_is_planned_only_is_said_to_be(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(*JOB, "--precision", "fp8", "--json", "p.json") == 0
    out = capsys.readouterr().out
    assert "\nsaved p.json: it is planned only, export it\n" in out
    assert "matmuls in 8 bits are planned, not run" in out


def test_parameters_on_the_host_are_exported(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    away = ("--offload", "optimizer+parameters", "--data", "2")
    assert plan(*JOB, *away, "--export", "deepspeed") == 0
    assert json.loads(capsys.readouterr().out)["zero_optimization"]["offload_param"]


def test_why_not_and_explain(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("--why-not", "pipeline=2, microbatches=2", "--why-not", "data=5")
    assert plan(*JOB, "--explain", *asked) == 0
    out = capsys.readouterr().out
    for line in (
        *("\nDECISIONS  ", "\nWHAT WOULD HELP  "),
        "\nSTABILITY  stays the best in ",
        "\nWHY NOT  pipeline=2, microbatches=2\n",
        "\nWHY NOT  data=5\n  can not be: data=5 can not be planned",
    ):
        assert line in out


def test_answers_are_part_of_the_data(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("--why-not", "pipeline=2", "--why-not", "data=5")
    assert plan(*JOB, "--format", "json", "--explain", *asked) == 0
    out, err = capsys.readouterr()
    facts = Facts.from_json(out)
    assert [answer.asked for answer in facts.answers] == ["pipeline=2", "data=5"]
    assert json.loads(out)["answers"][1]["verdict"] == "can not be"
    assert facts.explanation is not None
    assert "WHY NOT" not in err


def test_pins_that_graphs_are_made_for_are_planned_anew(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "fused.py").write_text(FUSED)
    job = ("fused.py:job", *JOB[1:])
    asked = ("fusions", "layer_norm"), ("compile", "off")
    answered = [part for name, value in asked for part in ("--why-not", f"{name}={value}")]
    assert plan(*job, "--format", "json", *answered) == 0
    facts = Facts.from_json(capsys.readouterr().out)
    for (name, value), answer in zip(asked, facts.answers, strict=True):
        assert plan(*job, "--format", "json", f"--{name}", value) == 0
        other = Facts.from_json(capsys.readouterr().out)
        assert answer.seconds == other.prediction.seconds != facts.prediction.seconds
        assert answer.verdict == "slower"


EXTRAS = {
    "--explain": ("explain", "decisions"),
    "--html": ("explain", "decisions"),
    "--why-not": ("why_not", "--why-not"),
}


@pytest.mark.parametrize("option", EXTRAS)
@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_what_was_found_is_shown_when_something_later_fails(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    option: str,
    error: type[BaseException],
) -> None:
    def fails(*_: Any) -> None:
        raise error

    function, left_out = EXTRAS[option]
    monkeypatch.setattr(plan_command.whatif, function, fails)
    value = {"--html": ("r.html",), "--why-not": ("data=1",)}.get(option, ())
    line = (*JOB, option, *value, "--json", "p.json", "--trace", "t.json")
    if error is KeyboardInterrupt:
        assert plan(*line) == 130
    else:
        with pytest.raises(error):
            plan(*line)
    out, err = capsys.readouterr()
    assert out.startswith("precision float32")
    assert "\nmodel   Model" in out
    assert "\nsaved p.json: run it with" in out
    assert f"graphaccel: left out: {left_out}\n" in err
    assert json.loads(Path("t.json").read_text())["traceEvents"]
    assert Plan.from_json(Path("p.json").read_text()).devices == 2
    assert Path("r.html").exists() == (option == "--html")


def test_what_can_not_be_measured_here_is_said_before_anything_else(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_command, "find_job", lambda *_: pytest.fail("it was loaded"))
    assert plan(*JOB, "--measure", "2") == 1
    assert "--measure runs on this machine, which is " in capsys.readouterr().err


def test_what_can_not_be_run_is_not_measured(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_command.Compiler, "choose", lambda *_: pytest.fail("it was planned"))
    line = ("jobs.py:meta", "--devices", "1", "--precision", "fp8", "--measure", "2")
    assert plan(*line) == 1
    assert "error[GA202]" in capsys.readouterr().err


def test_memory_is_that_of_the_devices_that_are_here(monkeypatch: pytest.MonkeyPatch) -> None:
    from graphaccel.planner.cluster.catalogue import cluster

    def here(count: int, device: torch.device) -> Any:
        return cluster("cpu" if device.type == "cpu" else "h200-141gb", count)

    monkeypatch.setattr(plan_command, "cluster_here", here)
    for cuda, name in ((True, "h200-141gb"), (False, "cpu")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda cuda=cuda: cuda)
        line = "plan --devices 4 --memory 5GiB".split()
        found = plan_command.chosen_cluster(cli.build_parser().parse_args(line))
        assert found == cluster(name, 4, memory=5 << 30)


def test_a_device_without_a_name_is_unknown(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan("jobs.py:meta", "--devices", "2", "--device", "", "--memory", "1GiB") == 2
    assert "error[GA601]: no device named ``" in capsys.readouterr().err


def test_pins_that_only_keywords_could_say(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pins = ("--pipeline", "2", "--schedule", "gpipe", "--microbatches", "2")
    line = (*JOB, *pins, "--bucket-bytes", "1MiB", "--recompute", "layers.1")
    assert plan(*line, "--json", "p.json") == 0
    made = Plan.from_json(Path("p.json").read_text())
    assert (made.schedule, made.bucket_bytes, made.recompute) == ("gpipe", 1 << 20, ("layers.1",))
    assert plan(*line, "--cuts", ",".join(made.cuts), "--json", "q.json") == 0
    again = Plan.from_json(Path("q.json").read_text())
    assert again.cuts == made.cuts
    assert "cuts" in again.pinned


@pytest.mark.parametrize("asked", ["tensor", "=2", "a=1,", ""])
def test_why_not_is_a_list_of_pins(capsys: pytest.CaptureFixture[str], asked: str) -> None:
    with pytest.raises(SystemExit) as ended:
        plan(*JOB, "--why-not", asked)
    assert ended.value.code == 2


def test_two_plans_are_compared(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(*JOB, "--json", "a.json") == 0
    assert plan(*JOB, "--json", "b.json", "--pipeline", "2", "--precision", "bf16") == 0
    capsys.readouterr()
    assert plan("--compare", "a.json", "b.json") == 0
    out = capsys.readouterr().out
    a, b = (Plan.from_json(Path(name).read_text()) for name in ("a.json", "b.json"))
    assert out.startswith(
        f"A  a.json: {plan_name(a)}\nB  b.json: {plan_name(b)}\n\nDECISIONS that differ"
    )
    rows = {line.split()[0]: line.split() for line in out.splitlines() if line.startswith("  ")}
    assert rows["pipeline"][1:3] == ["1", "2"]
    assert rows["precision"][1:3] == ["float32", "bfloat16"]
    assert "MADE FOR" not in out
    assert rows["step"][-1].endswith("%)")
    assert plan("--compare", "a.json", "a.json") == 0
    assert "DECISIONS  all the same" in capsys.readouterr().out


def test_plans_for_something_else_are_said_to_be(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(*JOB, "--json", "a.json") == 0
    assert plan(*JOB[:-1], "8", "--json", "b.json") == 0
    capsys.readouterr()
    assert plan("--compare", "a.json", "b.json") == 0
    out = capsys.readouterr().out
    assert "MADE FOR something else" in out
    assert "  global batch " in out
    assert "  model " not in out
    assert plan("jobs.py:apart", *JOB[1:-1], "16", "--json", "c.json") == 0
    capsys.readouterr()
    assert plan("--compare", "a.json", "c.json") == 0
    assert "  model " in capsys.readouterr().out


def test_a_file_to_compare_that_is_no_plan(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("a.json").write_text("{}")
    assert plan("--compare", "a.json", "a.json") == 1
    assert (
        "error[GA407]: plan `a.json` can not be read: plan schema None" in capsys.readouterr().err
    )


@pytest.mark.parametrize("arguments", [(), ("jobs.py:meta",), ("--devices", "2")])
def test_what_is_planned_must_be_said(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    with pytest.raises(SystemExit) as ended:
        plan(*arguments)
    assert ended.value.code == 2
    assert "--devices N are needed" in capsys.readouterr().err


class Stops(plan_command.Progress):
    """Ctrl-C as soon as there is a plan."""

    def __call__(self, record: Record) -> None:
        if record.incumbent() is not None:
            raise KeyboardInterrupt


def test_ctrl_c_shows_the_best_so_far_and_the_gap(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert plan(*JOB, "--format", "json") == 0
    best = Facts.from_json(capsys.readouterr().out)
    monkeypatch.setattr(plan_command, "Progress", Stops)
    assert plan(*JOB, "--format", "json", "--json", "p.json") == 130
    facts = Facts.from_json(capsys.readouterr().out)
    assert ": none of the rest takes less than" in facts.plan.certificate
    gap = float(facts.plan.certificate.rpartition("at most ")[2].rstrip("%")) / 100
    assert facts.prediction.seconds >= best.prediction.seconds
    assert best.prediction.seconds >= facts.prediction.seconds * (1 - gap) * 0.999
    assert Path("p.json").exists()
    assert not facts.memory


def test_ctrl_c_before_there_is_a_plan(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(plan_command, "find_job", interrupted)
    assert plan(*JOB) == 130
    assert capsys.readouterr() == ("", "graphaccel: interrupted\n")


def test_progress_is_one_line_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from graphaccel.planner.search.solve import Outcome

    record = Record()
    record.started(Outcome(), 1.0)
    assert record.outcome is not None
    record.outcome.tally.candidates = 2
    progress = plan_command.Progress(interval=0.0)
    record.tick(1.0, 1)
    progress(record)
    assert capsys.readouterr().err == ""  # no terminal
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    progress(record)
    assert "\r\x1b[Kgraphaccel: plan       1 of 2 candidates" in capsys.readouterr().err
    record.tick(1.0, 2)
    progress(record)
    assert capsys.readouterr().err == "\r\x1b[K"


def test_a_page_and_nothing_else_is_written(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(*JOB, "--html", "r.html") == 0
    out = capsys.readouterr().out
    assert "saved r.html: open it in a browser\n" in out
    assert "DECISIONS" not in out
    page = Path("r.html").read_text(encoding="utf-8")
    for section in ("time", "schedule", "memory", "candidates", "decisions", "prices", "text"):
        assert f'id="{section}"' in page


def test_a_plan_for_another_system(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        plan(*JOB, "--export", "deepspeed", "--data", "2", "--zero", "0", "--json", "p.json") == 0
    )
    out, err = capsys.readouterr()
    assert json.loads(out)["train_batch_size"] == 16
    assert "saved p.json" in err
    assert plan(*JOB, "--export", "accelerate", "--pipeline", "2") == 1
    out, err = capsys.readouterr()
    assert "error[GA209]: accelerate can not run this plan: data 1 x pipeline 2" in err
    assert out == ""


DEMO = Path(__file__).parents[2] / "examples" / "gpt2" / "demo.py"
TIGHT = (f"{DEMO}:job", "--devices", "2", "--device", "h100-80gb")


@pytest.mark.release
def test_what_another_system_can_not_say_is_planned_as_it_can(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """So little memory that blocks are made again, of which the best plan saves single values."""
    tight = (*TIGHT, "--memory", "1600MiB", "--compile", "off", "--fusions", "off")
    assert plan(*tight, "--export", "megatron") == 0
    out, err = capsys.readouterr()
    assert "selectively" in err
    assert "graphaccel: export     --recompute all, as megatron has it: 1." in err
    assert " x the time" in err
    assert "--recompute-granularity full\n--recompute-method uniform\n" in out
    assert plan(*tight, "--export", "megatron", "--recompute", "selective") == 1
    out, err = capsys.readouterr()
    assert "which values recomputed blocks save: Megatron-LM has that" in err
    assert "export  " not in err
    assert out == ""


def test_ctrl_c_while_it_is_planned_for_another_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The plan that was found is not lost."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("graphaccel.cli.plan._PlannedJob.with_pins", interrupted)
    tight = (*TIGHT, "--memory", "1600MiB", "--compile", "off", "--fusions", "off")
    saved = tmp_path / "plan.json"
    assert plan(*tight, "--export", "megatron", "--json", str(saved)) == 1
    out, err = capsys.readouterr()
    assert "error[GA209]" in err
    assert out == ""
    assert json.loads(saved.read_text())["selective"]
