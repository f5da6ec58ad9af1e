"""What all ranks of a machine can not do is said once; what one can not do, by that one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import distributed, nn

import graphaccel
from graphaccel.arguments import check_arguments
from graphaccel.cli.main import main
from graphaccel.compat.torch import distributed as compat
from graphaccel.dispatch.uncaught import hooked
from graphaccel.errors import GraphAccelError, GraphMisuse
from graphaccel.runtime import first_error
from graphaccel.runtime.first_error import said_by_first
from graphaccel.runtime.launch import STOPPED_FILE

WRONG = ["train", "--task", "causal-lm", "--model", "gpt2", "--data", "a", "--lr", "2"]


@pytest.fixture(autouse=True)
def _launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STOPPED_FILE, str(tmp_path / "stopped"))
    monkeypatch.setattr(first_error, "_SECONDS", 0.2)


def said(rank: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    monkeypatch.setenv("LOCAL_RANK", str(rank))
    assert main(WRONG) == 1
    return capsys.readouterr().err


def test_the_first_rank_says_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "error[GA418]: `learning_rate` is 2" in said(0, monkeypatch, capsys)
    assert said(1, monkeypatch, capsys) == ""


def test_another_rank_says_what_the_first_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "error[GA418]" in said(1, monkeypatch, capsys)
    (tmp_path / "error").write_text("another error")
    assert "error[GA418]" in said(1, monkeypatch, capsys)
    monkeypatch.delenv(STOPPED_FILE)
    assert "error[GA418]" in said(1, monkeypatch, capsys)


def test_a_script_ends_with_the_traceback_of_the_first_rank_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown = []
    monkeypatch.setattr(sys, "excepthook", lambda *given: shown.append(given[1]))
    assert hooked() is hooked()
    same = "the same"
    own = [GraphMisuse(what=same) for _ in range(2)]
    of_script = [ValueError("x") for _ in range(2)]
    for rank, error in (
        (0, own[0]),
        (1, own[1]),
        (1, ValueError("of one rank alone")),
        (1, GraphMisuse(what="y")),
        (0, of_script[0]),
        (1, of_script[1]),
    ):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        sys.excepthook(type(error), error, None)
    assert [type(error) for error in shown] == [GraphMisuse, ValueError, GraphMisuse, ValueError]
    assert shown[-1] is of_script[0]


@pytest.mark.parametrize("joined", [False, True], ids=["agent", "process group"])
def test_under_another_launcher_the_lowest_rank_that_has_it_says_it(
    joined: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(STOPPED_FILE)
    store = distributed.TCPStore("127.0.0.1", 0, 1, True)
    if joined:
        monkeypatch.setattr(distributed, "is_initialized", lambda: True)
        monkeypatch.setattr(compat, "default_store", lambda: store)
    variables = {
        "WORLD_SIZE": "4",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    of = {rank: variables | {"RANK": str(rank)} for rank in range(4)}
    assert not said_by_first("of 1 and 3", of[1])
    assert said_by_first("of 1 and 3", of[3])
    assert not said_by_first("of 3 alone", of[3])
    assert not said_by_first("alone", variables | {"RANK": "1", "WORLD_SIZE": "1"})
    if not joined:  # nothing says where the store is: each says it
        assert not said_by_first("of 1 and 3", of[3] | {"TORCHELASTIC_USE_AGENT_STORE": "False"})


def _fails() -> None:
    """A frame of ours, of torch and of the script above the error, as in a step."""
    model = nn.Linear(1, 1)
    model.forward = lambda x: check_arguments(None, None, {}, None, None)  # type: ignore
    try:
        raise RuntimeError("of the backend")
    except RuntimeError as error:
        try:
            model(1)
        except GraphAccelError as own:
            raise own from error


def test_frames_of_ours_are_not_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    hook = hooked()
    for full in ("", "full"):
        monkeypatch.setenv("GRAPHACCEL_TRACEBACK", full)
        with pytest.raises(GraphAccelError) as caught:
            _fails()
        before = caught.value.__traceback__, caught.value.__cause__
        hook(type(caught.value), caught.value, caught.value.__traceback__)
        assert (caught.value.__traceback__, caught.value.__cause__) == before
        said = capsys.readouterr().err
        assert "error[GA407]" in said
        assert "in _fails" in said
        assert ("arguments.py" in said) == ("torch/nn/modules" in said) == (full == "full")
        assert said.count("Traceback") == 1 + ("of the backend" in said)
    hook.remove()
    assert sys.excepthook is sys.__excepthook__


def _fails_in_its_forward() -> None:
    class Wrong(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).view(7).mean()

    graphaccel.optimize(Wrong(2, 2), devices=1)(torch.ones(4, 2))


def test_the_scripts_own_error_has_no_frames_of_ours_above_its_forward(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    monkeypatch.setenv("LOCAL_RANK", "0")
    for full in ("", "full"):
        monkeypatch.setenv("GRAPHACCEL_TRACEBACK", full)
        with pytest.raises(RuntimeError, match="shape") as caught:
            _fails_in_its_forward()
        hooked()(RuntimeError, caught.value, caught.value.__traceback__)
        said = capsys.readouterr().err
        assert "x).view(7)" in said
        assert "in _fails_in_its_forward" in said
        assert ("optimized_model.py" in said) == (full == "full")


class _Model:
    steps = None


def test_the_hook_goes_with_the_last_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    models = [_Model() for _ in range(2)]
    for model in models:
        hooked().explain_memory(model, torch.device("cpu"))
    models.pop(0)
    del model
    assert sys.excepthook is not sys.__excepthook__
    models.clear()
    assert sys.excepthook is sys.__excepthook__
