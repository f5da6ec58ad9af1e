"""`graphaccel explain FILE:FUNCTION --rules`: the rule of every op, and what others cost."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from graphaccel.capture.stepgraph import capture
from graphaccel.cli import main as cli
from graphaccel.cli.jobs import job_of_function
from graphaccel.compiler.compiler import Compiler
from graphaccel.compiler.model import Model
from graphaccel.errors import MissingRule
from graphaccel.planner.cluster.catalogue import cluster
from graphaccel.report.rules import missing_note, priced_rules

JOB = """\
import torch
from torch import nn

class Evens(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        scale = torch.ops.rulestest.evened(x.detach())
        return (x * scale).square().mean()

def make():
    return Evens(), (torch.ones(8, 64),)
"""
BETWEEN_LAYERS = JOB.replace(
    """\
        for layer in self.layers:
            x = layer(x)
        scale = torch.ops.rulestest.evened(x.detach())
        return (x * scale).square().mean()
""",
    """\
        x = self.layers[0](x)
        scale = torch.ops.rulestest.evened(x.detach())
        return self.layers[1](x * scale).square().mean()
""",
)
MISSING = """\
error[GA301]: 1 op has no sharding rule
  rulestest.evened  f32[8,64]  the model  job.py:12  1 use
  why:  without a rule it is not known whether the batch may be split there
  help: say how it may be split, if so:  graphaccel.sharding_rule("rulestest::evened", \
"n a -> n a", whole="a", example=(torch.randn(8, 64, dtype=torch.float64),))
  help: keep the batch whole:  data=1, microbatches=1
  explain: graphaccel explain GA301
"""
HEAD = """\
13 ops in a step of Evens, prices of one cpu device; 1 without a sharding rule

WITHOUT A RULE: whole on every device, and no split of the batch
  op                uses  GFLOP  bytes    time     of step  shape      module     line
  rulestest.evened  1     0      4.0 KiB  5.20 us  5.4 %    f32[8,64]  the model  job.py:12

say how the first may be split; it is proved by running it on the example:
  graphaccel.sharding_rule("rulestest::evened", "n a -> n a", whole="a", \
example=(torch.randn(8, 64, dtype=torch.float64),))

WITH A RULE: dims of one name are split together; a name that is missing on the
right is summed over, _ is a dim that is not split, 1 one that is repeated
"""


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file with a model that calls an op that no table knows."""

    def evened(x: Tensor) -> Tensor:
        return x / x.sum(-1, keepdim=True)

    library = torch.library.Library("rulestest", "FRAGMENT")
    library.define("evened(Tensor x) -> Tensor")
    library.impl("evened", evened, "CompositeExplicitAutograd")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GRAPHACCEL_QUIET", "1")
    monkeypatch.setattr("graphaccel.cli.rules.cluster_here", lambda n, _: cluster("cpu", n))
    Path("job.py").write_text(JOB)
    yield Path("job.py")
    del library  # the op is gone with it


def test_rules_lists_ops_without_one_first(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "job.py:make", "--rules"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(HEAD)
    rows = {" ".join(line.split()[:2]): line for line in out[len(HEAD) :].splitlines()[1:]}
    assert rows["aten.mm 3"].endswith("m k, k n -> m n")
    assert rows["aten.pow.Tensor_Scalar 2"].endswith("a b -> a b")


def test_strict_is_an_error(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "job.py:make", "--rules", "--strict"]) == 1
    assert capsys.readouterr().err == MISSING


def test_a_pin_that_needs_the_rule(job: Path) -> None:
    job.write_text(BETWEEN_LAYERS)
    made = job_of_function(job, "make")
    compiler = Compiler(Model(made.model, None, 0.0), cluster("cpu", 2), {"data": 2})
    with pytest.raises(MissingRule) as caught:
        compiler.choose(made.batch)
    assert f"{caught.value}\n" == MISSING.replace("job.py:12", "job.py:11")


def test_an_op_of_the_loss_needs_none(job: Path) -> None:
    """Behind all layers it runs once, on the whole batch."""
    made = job_of_function(job, "make")
    compiler = Compiler(Model(made.model, None, 0.0), cluster("cpu", 2), {"data": 2})
    assert compiler.choose(made.batch).plan.data == 2


def test_every_op_has_a_rule(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job.write_text(JOB.replace("torch.ops.rulestest.evened(x.detach())", "x.detach()"))
    assert cli.main(["explain", "job.py:make", "--rules", "--strict"]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[0].endswith("every op has a sharding rule")
    assert "WITHOUT" not in out


def test_a_note_for_reports(job: Path) -> None:
    made = job_of_function(job, "make")
    rows = priced_rules(capture(made.model, made.batch), cluster("cpu", 1).device)
    assert missing_note(rows) == (
        "no sharding rule, whole on every device: rulestest.evened (5.4 % of a step's ops)",
    )
