"""Arguments, exit codes and start-up time of the command line."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from graphaccel import errors
from graphaccel.cli import main as cli
from graphaccel.passes.pipeline import PIPELINE
from graphaccel.planner.plan.pins import NAMES, OFFLOADS

ROOT = Path(__file__).parents[2]


def _fails(error: errors.GraphAccelError):
    def command(_: argparse.Namespace) -> int:
        raise error

    return command


@pytest.fixture
def model_file(tmp_path: Path) -> Path:
    path = tmp_path / "model.py"
    path.write_text("")
    return path


def _infeasible() -> errors.InfeasiblePlan:
    return errors.InfeasiblePlan(
        devices=2, memory=2**30, peak=2**31, stage=0, closest="data 2", breakdown={"param": 2**31}
    )


def test_help_is_fast_and_does_not_import_torch() -> None:
    check = (
        "import sys; from graphaccel.cli.main import build_parser;"
        "text = build_parser().format_help();"
        "heavy = {'torch', 'numpy', 'sympy', 'networkx', 'onnx'} & set(sys.modules);"
        "assert not heavy, heavy; assert 'plan' in text and 'doctor' in text"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    times = []
    for _ in range(3):  # of the processor: others may be using the cores
        before = os.times()
        subprocess.run([sys.executable, "-c", check], check=True, env=environment)
        after = os.times()
        times.append(after.children_user + after.children_system - sum(before[2:4]))
    assert min(times) < 0.3


def test_no_command_is_a_bad_argument(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main([])
    assert exit_.value.code == 2
    assert "the following arguments are required: COMMAND" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--devices", "0"], "'0' is not a whole number above 0"),
        (["--devices", "two"], "'two' is not a whole number above 0"),
        (["--devices", "2", "--memory", "80 stones"], "'80 stones' is no amount of memory"),
        (["--devices", "2", "--memory", "0GiB"], "'0GiB' holds nothing"),
        (["--devices", "2", "--precision", "int8"], "invalid choice: 'int8'"),
        ([], "FILE[:FUNCTION] and --devices N are needed, or --compare FILE FILE"),
        (["--devices", "2", "--cluster", "c.json", "--device", "cpu"], "leave --device and"),
        (["--devices", "2", "--why-not", "tensor"], "'tensor' is not like pipeline=4"),
        (["--devices", "2", "--stage-of", "h.3"], "a module and its stage, as in h.3=1, not 'h.3'"),
        (["--devices", "2", "--compare", "a.json"], "expected 2 arguments"),
        (
            ["--devices", "2", "--why-not", "data=4,data=2"],
            "data is there twice in 'data=4,data=2'",
        ),
        (["--devices", "2", "--json", "nowhere/p.json"], "there is no folder 'nowhere'"),
        (["--devices", "2", "--html", "."], "'.' is a folder"),
        (["--devices", "2", "--cuts", "a,,b"], "'a,,b' is no list of names"),
        (["--devices", "2", "--order", "data,,tensor"], "'data,,tensor' is no list of names"),
        (["--devices", "2", "--schedule", "2f2b"], "invalid choice: '2f2b'"),
        (["--devices", "2", "--export", "deepspeed", "--explain"], "leave --explain out"),
        (["--devices", "2", "--export", "deepspeed", "--why-not", "data=2"], "leave --why-not out"),
        (["--devices", "2", "--export", "deepspeed", "--format", "json"], "leave --format json"),
        (["--devices", "2", "--export", "deepspeed", "--measure", "2"], "leave --measure out"),
    ],
)
def test_bad_arguments_of_plan(
    arguments: list[str], message: str, model_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(["plan", str(model_file), *arguments])
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


def test_plan_of_a_missing_file(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(["plan", "nowhere.py:job", "--devices", "2"])
    assert exit_.value.code == 2
    assert "there is no file 'nowhere.py'" in capsys.readouterr().err


PINNED = (
    "--json p.json --data 2 --pipeline 4 --interleave 2 --microbatches 8 --tensor 2 --context "
    "2 --expert 2 --order data,pipeline --zero 3 --shard-size 2 --no-sequence --context-by "
    "heads --scatter-sends --no-cast-once --reshard-after-forward always"
)
CHOICES = (
    "--recompute some --precision bf16 --html r.html --trace t.json --save-cluster c.json "
    "--accumulation shards --vocab data --stage-of h.3=1 --stage-of h.4=2 --compile inductor "
    "--min-cut --fusions auto,-rotary --cuda-graphs --loss-chunk 512 --offload optimizer "
    "--schedule "
    "interleaved --cuts a,b --bucket-bytes 25MiB"
)
SHOWN = (
    "--format json --measure 3 --explain --why-not pipeline=4,recompute=none --why-not "
    "data=-1 --why-not sequence=False --why-not recompute=h.0+h.1,ort=off --why-not "
    "bucket_bytes=1MiB,fusions=gelu,order=data+pipeline"
)


def test_plan_arguments(model_file: Path) -> None:
    text = f"plan {model_file}:job --devices 8 --device h100-80gb --memory 1.5GiB --batch 64"
    line = f"{text} {PINNED} {CHOICES} {SHOWN}"
    arguments = vars(cli.build_parser().parse_args(line.split()))
    del arguments["run_command"], arguments["usage_error"]
    assert {k: v for k, v in arguments.items() if k not in NAMES or v is not None} == {
        "target": (model_file, "job"),
        "devices": 8,
        "device": "h100-80gb",
        "memory": 3 * 2**29,
        "batch": 64,
        "json": Path("p.json"),
        "data": 2,
        "pipeline": 4,
        "interleave": 2,
        "microbatches": 8,
        "tensor": 2,
        "context": 2,
        "expert": 2,
        "order": ("data", "pipeline"),
        "zero": 3,
        "shard_size": 2,
        "check": False,
        "sequence": False,
        "context_by": "heads",
        "scatter_sends": True,
        "reshard_after_forward": "always",
        "cast_once": False,
        "accumulation": "shards",
        "vocab": "data",
        "stage_of": [("h.3", 1), ("h.4", 2)],
        "recompute": "some",
        "precision": "bf16",
        "compile": "inductor",
        "min_cut": True,
        "cuda_graphs": True,
        "fusions": ("auto", "-rotary"),
        "loss_chunk": 512,
        "offload": "optimizer",
        "html": Path("r.html"),
        "trace": Path("t.json"),
        "format": "json",
        "explain": True,
        "schedule": "interleaved",
        "cuts": ("a", "b"),
        "bucket_bytes": 25 << 20,
        "why_not": [
            {"pipeline": 4, "recompute": "none"},
            {"data": -1},
            {"sequence": False},
            {"recompute": ("h.0", "h.1"), "ort": "off"},
            {"bucket_bytes": 1 << 20, "fusions": ("gelu",), "order": ("data", "pipeline")},
        ],
        "measure": 3,
        **dict.fromkeys(("refine", "sweep", "price", "compare", "export", "cluster")),
        "save_cluster": Path("c.json"),
    }


@pytest.mark.parametrize("command", ["plan", "run"])
def test_every_value_of_offload_can_be_said(model_file: Path, command: str) -> None:
    for value in OFFLOADS:
        target = f"{model_file}:job" if command == "plan" else str(model_file)
        line = [command, "--devices", "2", "--offload", value, target]
        assert cli.build_parser().parse_args(line).offload == value


def test_blocks_to_compute_again_can_be_named(model_file: Path) -> None:
    for said, value in (("all", "all"), ("h.0", ("h.0",)), ("h.0,h.2", ("h.0", "h.2"))):
        line = ["plan", f"{model_file}:job", "--devices", "2", "--recompute", said]
        assert cli.build_parser().parse_args(line).recompute == value


def test_a_file_that_can_not_be_written_is_a_bad_argument(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)  # who runs this may write everywhere
    with pytest.raises(SystemExit) as exit_:
        cli.main(["plan", "--devices", "2", "--trace", str(tmp_path / "t.json")])
    assert exit_.value.code == 2
    assert "t.json' can not be written" in capsys.readouterr().err


def test_plan_without_function_and_pins(model_file: Path) -> None:
    arguments = cli.build_parser().parse_args(["plan", str(model_file), "--devices", "2"])
    assert arguments.target == (model_file, None)
    assert {arguments.data, arguments.memory, arguments.device, arguments.json} == {None}


@pytest.mark.parametrize(("error", "code"), [(_infeasible(), 3), (errors.RetainGraph(), 1)])
def test_errors_are_printed_without_traceback(
    error: errors.GraphAccelError,
    code: int,
    model_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("GRAPHACCEL_TRACEBACK", raising=False)
    monkeypatch.setattr(cli, "_plan", _fails(error))
    assert cli.main(["plan", str(model_file), "--devices", "2"]) == code
    captured = capsys.readouterr()
    assert captured.err == f"{error}\n"
    assert captured.out == ""


def test_full_traceback_on_request(model_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHACCEL_TRACEBACK", "full")
    monkeypatch.setattr(cli, "_plan", _fails(errors.RetainGraph()))
    with pytest.raises(errors.RetainGraph):
        cli.main(["plan", str(model_file), "--devices", "2"])


def test_run_passes_the_script_its_own_options(monkeypatch: pytest.MonkeyPatch) -> None:
    from graphaccel.runtime import launch

    calls = []
    monkeypatch.setattr(launch, "run_script", lambda *arguments: calls.append(arguments) or 5)
    assert cli.main("run --devices 2 train.py --devices 3 -m x".split()) == 5
    assert cli.main("run --devices 2 train.py --p 3 --dev 4 --zero=1 --tensor 2 -- -q".split()) == 5
    assert cli.main("run --devices 2 --all-output -m pkg.train --epochs 3".split()) == 5
    scripts = ["train.py", "--p", "3", "--dev", "4", "--zero=1", "--tensor", "2", "--", "-q"]
    assert calls == [
        (2, ["train.py", "--devices", "3", "-m", "x"], [], False, None),
        (2, scripts, [], False, None),
        (2, ["-m", "pkg.train", "--epochs", "3"], [], True, None),
    ]


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("run --dev 2 t.py", "required: --devices"),
        ("fusion bench all --jso x", "unrecognized arguments: --jso"),
    ],
)
def test_options_are_written_out(
    command: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.build_parser().parse_args(command.split())
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_pins_of_run_come_before_those_of_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    from graphaccel.arguments import PINS, asked_pins
    from graphaccel.runtime import launch

    calls = []
    monkeypatch.setattr(launch, "run_script", lambda *arguments: calls.append(arguments) or 0)
    monkeypatch.setenv(PINS, "{}")
    flags = "--zero 3 --data 2 --stage-of head=1 --no-sequence --ort a,b --recompute h.0,h.1"
    flags += " --schedule gpipe --bucket-bytes 1MiB --cuts a"
    assert cli.main(f"run --devices 2 {flags} train.py --zero 1".split()) == 0
    assert calls == [(2, ["train.py", "--zero", "1"], [], False, None)]
    given = {"zero": 3, "data": 2, "stage_of": {"head": 1}, "sequence": False, "ort": ("a", "b")}
    given |= {"recompute": ("h.0", "h.1"), "schedule": "gpipe", "bucket_bytes": 1 << 20}
    given |= {"cuts": ("a",)}
    assert asked_pins(None, None, {"zero": 1, "tensor": 2}) == {"tensor": 2, **given}


def test_optimize_reads_pins_of_run(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    import graphaccel
    from graphaccel.arguments import PINS

    monkeypatch.setenv(PINS, '{"zero": 5}')
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(errors.BadPin, match="zero=5"):
        graphaccel.plan(torch.nn.Linear(2, 2), torch.zeros(4, 2), devices=1, zero=5)
    model, loss = torch.nn.Linear(2, 2), torch.nn.functional.mse_loss
    batch = (torch.zeros(4, 2), torch.zeros(4, 2))
    with pytest.raises(errors.BadPin, match="zero=5"):
        graphaccel.optimize(model, devices=1, loss_fn=loss, example_batch=batch)


@pytest.mark.parametrize(
    ("text", "flags"),
    [
        ("", []),
        (
            "--nnodes 2 --node-rank 0 --rdzv-endpoint a:29500",
            "--nnodes=2 --node-rank=0 --rdzv-endpoint=a:29500 --rdzv-backend=static "
            "--rdzv-id=graphaccel",
        ),
        (
            "--nnodes 2 --rdzv-endpoint a:29500 --rdzv-id job7",
            "--nnodes=2 --rdzv-endpoint=a:29500 --rdzv-id=job7 --rdzv-backend=c10d",
        ),
        (
            "--nnodes 2 --node-rank 1 --rdzv-endpoint a:29500 --max-restarts 3",
            "--nnodes=2 --rdzv-endpoint=a:29500 --rdzv-backend=c10d --rdzv-id=graphaccel "
            "--max-restarts=3",
        ),
        ("--max-restarts 3", "--max-restarts=3"),
    ],
)
def test_torchrun_flags(text: str, flags: str) -> None:
    arguments = cli.build_parser().parse_args(["run", "--devices", "2", *text.split(), "t.py"])
    assert cli.torchrun_flags(arguments) == (flags.split() if flags else [])


@pytest.mark.parametrize("code", list(errors.error_classes()))
def test_explain_prints_the_page(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", code.lower()]) == 0
    page = (ROOT / "docs" / "errors" / f"{code}.md").read_text(encoding="utf-8")
    assert capsys.readouterr().out == page


def test_explain_prints_the_passes_that_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "passes"]) == 0
    printed = capsys.readouterr().out
    named = re.findall(r"^ ?(\d+)  (\w+) +(\w+)(?: +(exact))?$", printed, flags=re.MULTILINE)
    expected = [
        (str(number), each.name, each.level, "exact" if each.exact else "")
        for number, each in enumerate(PIPELINE, 1)
    ]
    assert named == expected
    assert all(each.why in " ".join(printed.split()) for each in PIPELINE)


def test_explain_unknown_code(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(["explain", "GA999"])
    assert exit_.value.code == 2
    assert "there is no error 'GA999'; there are GA101, GA102" in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(["--version"])
    assert exit_.value.code == 0
    assert capsys.readouterr().out == "graphaccel 0.1.0\n"
