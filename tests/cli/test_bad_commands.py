"""Damaged files and odd command lines: an error of ours or a usage line, never a traceback."""

from __future__ import annotations

import copy
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import graphaccel
from graphaccel import errors
from graphaccel.cli import main as cli
from graphaccel.cli.fusion import run as fusion_command
from graphaccel.planner.cluster.catalogue import cluster
from graphaccel.planner.cluster.cluster_file import read_cluster
from graphaccel.runtime.launch import ensure_launched
from tests.support.small import Classifier, small_batch

VALUES = (None, True, -1, 0, 3, 10**30, 0.5, "x", "", [], [[]], {}, {"x": 1}, [None, 2], "data")


def _places(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of every value inside of JSON data."""
    items: Any = data.items() if isinstance(data, dict) else enumerate(data)
    for key, value in items:
        yield (*path, key)
        if isinstance(value, (dict, list)):
            yield from _places(value, (*path, key))


def _mutated(data: Any, draw: random.Random) -> Any:
    """One value replaced, removed, or a field added."""
    made = copy.deepcopy(data)
    *parents, last = draw.choice(list(_places(made)))
    inside = made
    for key in parents:
        inside = inside[key]
    action = draw.random()
    if action < 0.15:
        del inside[last]
    elif action < 0.25 and isinstance(inside, dict):
        inside["unknown"] = 1
    else:
        inside[last] = draw.choice(VALUES)
    return made


@pytest.fixture(scope="module")
def plan() -> Any:
    """A saved plan with what a placement in ONNX Runtime and alternatives add."""
    return json.loads(graphaccel.plan(Classifier(), small_batch(), devices=2).to_json())


def test_no_mutation_of_a_plan_is_a_traceback(
    plan: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    region = {"stage": 0, "phase": "forward", "module": "out", "ops": 2, "key": "k"}
    declined = {"op": "x", "reason": "y", "count": 1, "module": "", "location": ""}
    report = {"build": "1", "nodes": 4, "placed": 2, "regions": [region], "declined": [declined]}
    plan = {**plan, "prediction": {**plan["prediction"], "ort": report}}
    whole, file = tmp_path / "whole.json", tmp_path / "plan.json"
    whole.write_text(json.dumps(plan))
    assert cli.main(["explain", str(whole)]) == 0
    refused = 0
    for seed in range(300):
        file.write_text(json.dumps(_mutated(plan, random.Random(seed))))
        refused += cli.main(["explain", str(file)])
        assert cli.main(["plan", "--compare", str(whole), str(file)]) in (0, 1)
    assert refused > 150
    assert "error[GA" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["[" * 100_000, "{", "3", "null", "[]", '{"schema": 1}', ""])
def test_what_is_no_plan(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.json"
    file.write_text(text)
    assert cli.main(["explain", str(file)]) == 1
    assert f"error[GA407]: plan `{file}` can not be read: " in capsys.readouterr().err
    with pytest.raises(errors.BadCluster):
        read_cluster(file)


def test_no_mutation_of_a_cluster_is_a_traceback(tmp_path: Path) -> None:
    data, file, refused = cluster("h100-80gb", 16).to_json(), tmp_path / "cluster.json", 0
    for seed in range(300):
        file.write_text(json.dumps(_mutated(data, random.Random(seed))))
        try:
            read_cluster(file)
        except errors.BadCluster:
            refused += 1
    assert refused > 150


def test_no_command_line_is_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("plan.json").write_text("{}")
    commands = ["plan", "run", "train", "bench", "tokenize", "explain", "fusion", "doctor"]
    words = ["calibrate", "--devices", "2", "-1", "x", "GA201", "--json", "--memory", "80GiB", "-m",
             "--", "--nnodes", "1:2", "--data", "0", "\udc80", "--why-not", "tensor=4", "--format",
             "json", "", "new", "--compare", "--max-restarts", "--microbatches", "two", "plan.json",
             "--precision", "fp7", "--help", "--checkpoint", "--cluster", "1e9", "\0"]  # fmt: skip
    ended: dict[Any, int] = {}
    for seed in range(100):
        draw = random.Random(seed)
        line = [draw.choice(commands), *draw.choices(words, k=draw.randrange(6))]
        try:
            code = cli.main(line)
        except SystemExit as end:
            code = end.code
        ended[code] = ended.get(code, 0) + 1
    assert "Traceback" not in capsys.readouterr().err
    assert {0, 1, 2} == set(ended)
    assert sum(ended.values()) == 100


SCRIPT = """
import sys
from pathlib import Path
import graphaccel
from tests.support.small import Classifier, small_batch
print("the script says hello")
if len(sys.argv) == 1 and Path("end").exists():
    sys.exit(Path("end").read_text() or None)
graphaccel.optimize(Classifier(), example_batch=small_batch())
"""


@pytest.mark.parametrize(
    ("code", "said"), [("", "by sys.exit(), "), ("no data", "by sys.exit('no data'), ")]
)
def test_a_script_that_ends_before_optimize(
    code: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT)
    Path("end").write_text(code)
    assert cli.main(["plan", "train.py", "--devices", "1", "--device", "cpu"]) == 1
    text = f"train.py ended, {said}without training a model under graphaccel.optimize()"
    assert f"error[GA407]: {text}" in capsys.readouterr().err


def test_what_a_script_prints_is_not_in_the_report_and_a_full_disk_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT)
    command = ["plan", "train.py", "--devices", "1", "--device", "cpu", "--format", "json"]
    assert cli.main(command) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["schema"] == 1
    assert "the script says hello" in err
    assert cli.main([*command, "--json", "/dev/full"]) == 1
    said = "error[GA407]: `/dev/full` can not be written: No space left on device"
    assert said in capsys.readouterr().err


NOISY = """
import os
import torch
from torch import nn

class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(4, 4)

    def forward(self, x):
        print("forward says hello")
        return self.out(x).square().mean()

def job():
    os.system("echo a child says hello")
    os.write(1, b"a descriptor says hello\\n")
    return Noisy(), torch.randn(4, 4)
"""


def _command(folder: Path, *words: str, stdout: Any = subprocess.PIPE) -> Any:
    line = [sys.executable, "-m", "graphaccel", *words]
    environment = {**os.environ, "PYTHONPATH": str(Path(graphaccel.__file__).parents[1])}
    return subprocess.run(
        line, cwd=folder, env=environment, stdout=stdout, stderr=subprocess.PIPE, text=True
    )


def test_what_models_and_child_processes_print_is_not_in_the_report(tmp_path: Path) -> None:
    (tmp_path / "noisy.py").write_text(NOISY)
    words = ("plan", "noisy.py:job", "--devices", "1", "--device", "cpu", "--format", "json")
    done = _command(tmp_path, *words)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["schema"] == 1
    for who in ("a child", "a descriptor"):
        assert f"{who} says hello" in done.stderr
    assert "Noisy.forward prints (noisy.py:12): the graph of a step does not" in done.stderr
    assert "forward says hello" not in done.stderr


def test_output_that_can_not_be_written_is_no_traceback(tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        done = _command(tmp_path, "explain", "GA101", stdout=full)
    assert done.returncode == 1
    said = "error[GA407]: standard output can not be written: No space left on device\n"
    assert done.stderr.startswith(said)
    reader, writer = os.pipe()
    os.close(reader)
    done = _command(tmp_path, "explain", "GA101", stdout=writer)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_files_that_are_not_there_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        cli.main(["explain", "plan.json"])
    assert end.value.code == 2
    assert "there is no file 'plan.json'" in capsys.readouterr().err
    assert cli.main(["run", "--devices", "2", "train.py"]) == 1
    assert "error[GA407]: there is no file 'train.py'\n" in capsys.readouterr().err


def test_a_fusion_is_not_named_by_a_keyword(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = cli.build_parser().parse_args(["fusion", "new", "class"])
    said = "'class' is no Python name, but a word of the language\n  help: graphaccel fusion new cl"
    with pytest.raises(errors.GraphMisuse, match=said):
        fusion_command(arguments)
    assert list(tmp_path.iterdir()) == []


def test_tests_are_not_restarted_as_several_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "GRAPHACCEL_LAUNCHED"):
        monkeypatch.delenv(name, raising=False)
    for program in ("/usr/bin/pytest", "site-packages/pytest/__main__.py"):
        monkeypatch.setattr(sys, "argv", [program])
        with pytest.raises(errors.NeedsLauncher):
            ensure_launched(2)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["train", "--learnig-rate", "3"], "arguments: --learnig-rate 3 (is it --learning-rate?)"),
        (["train", "--global_batch=3"], "arguments: --global_batch=3 (is it --global-batch?)"),
        (["doctor", "--halp"], "unrecognized arguments: --halp (is it --help?)"),
        (["train", "--xyz"], "unrecognized arguments: --xyz\n"),
    ],
)
def test_an_unknown_option_is_named_with_the_closest(
    words: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(words)
    assert caught.value.code == 2
    assert text in capsys.readouterr().err


def test_a_wrong_choice_is_one_line_with_the_closest(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", "--task", "causal-ml"])
    said = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2
    assert said[0].endswith("(is it causal-lm?)")
    assert said[1:] == ["  help: graphaccel train --help"]
