"""`graphaccel.debug.bisect` and `graphaccel plan --check`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import graphaccel.debug
from graphaccel.cli import main as cli
from graphaccel.compiler import captures
from graphaccel.runtime.parameters.remote import Elsewhere, RemoteTensor
from tests.proof.models import Net, Reverse, batch, plain_step, seeded

REVERSED = """
import torch
from tests.proof.models import Net, Reverse, batch


def job():
    return Net(lambda _net, x: Reverse.apply(x)), batch().leaves


def meta():
    with torch.device("meta"):
        return Net(), tuple(torch.empty_like(x) for x in batch().leaves)


def right():
    return Net(), batch().leaves
"""


@pytest.fixture
def forgetful(monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture that forgets what is done in the middle of a `Net`."""
    step, sizes = plain_step()
    monkeypatch.setattr(captures.Captures, "of", lambda *_, **__: (step, sizes))


def test_bisect_of_a_right_capture(capsys: pytest.CaptureFixture) -> None:
    model = seeded(Net)
    found = graphaccel.debug.bisect(model, batch().leaves)
    assert found.equal
    assert found.node is None
    assert "loss and 6 gradients equal eager's (" in str(found)
    assert str(found) in capsys.readouterr().err


def test_bisect_names_the_first_node(forgetful: None, capsys: pytest.CaptureFixture) -> None:
    model = seeded(lambda: Net(lambda _net, x: Reverse.apply(x)))
    found = graphaccel.debug.bisect(model, batch().leaves)
    assert not found.equal
    assert len(found.values) == 4
    assert found.node is not None
    assert (found.node.module, found.node.phase) == ("second", "backward")
    said = capsys.readouterr().err
    assert "on the batch the captured graph differs from eager:" in said
    assert f"begins at {found.node.node} (aten.mm.default, backward) in `second`" in said
    assert "hidden = self.middle(self, self.second(hidden))" in said


def test_bisect_needs_whole_weights(forgetful: None) -> None:
    model = seeded(Net)
    where = Elsewhere(None, frozenset())
    remote = RemoteTensor(model.first.weight.detach(), where, torch.device("cpu"))
    model.first.weight = nn.Parameter(remote)
    with pytest.raises(graphaccel.errors.GraphMisuse, match="not whole on this rank"):
        graphaccel.debug.bisect(model, batch().leaves)


def planned(tmp_path: Path, job: str) -> int:
    file = tmp_path / "jobs.py"
    file.write_text(REVERSED)
    return cli.main(["plan", f"{file}:{job}", "--devices", "1", "--check"])


def test_plan_checks(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRAPHACCEL_QUIET", "0")
    assert planned(tmp_path, "right") == 0
    assert "proved     loss and 6 gradients equal eager's (exactly)" in capsys.readouterr().err
    assert planned(tmp_path, "meta") == 0
    assert "not proved the model has no weights yet" in capsys.readouterr().err


def test_plan_check_of_a_wrong_capture(
    tmp_path: Path, forgetful: None, capsys: pytest.CaptureFixture
) -> None:
    assert planned(tmp_path, "job") == 1
    assert "error[GA108]" in capsys.readouterr().err
