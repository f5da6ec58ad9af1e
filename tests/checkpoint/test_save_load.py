"""Save and load on one process: what is restored, which checkpoint is the newest, what is kept."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemWriter

import graphaccel
from graphaccel import errors
from graphaccel.checkpoint.folders import LATEST
from graphaccel.checkpoint.manifest import read_manifest
from graphaccel.checkpoint.together import Together

Run = tuple[nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]


def build(seed: int = 0) -> Run:
    """A model with dropout and buffers, its AdamW in two groups, a schedule."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.BatchNorm1d(8), nn.Linear(8, 4))
    groups = [{"params": list(model[0].parameters()), "weight_decay": 0.1}]
    groups.append({"params": [*model[2].parameters(), *model[3].parameters()]})
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)


def train(run: Run, steps: int) -> list[float]:
    model, optimizer, scheduler = run
    losses = []
    for _ in range(steps):
        loss = model(torch.randn(6, 8)).square().mean() * (1 + random.random())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(loss.item())
    return losses


def steps(folder: Path) -> list[str]:
    """What a folder has, but for the link to the newest."""
    return sorted(path.name for path in folder.iterdir() if path.name != LATEST)


def test_a_resumed_run_is_the_undisturbed_one(tmp_path: Path) -> None:
    run = build()
    train(run, 3)
    saved = graphaccel.save(
        tmp_path, *run[:2], step=3, scheduler=run[2], position={"epoch": 1, "files": ["a", "b"]}
    )
    expected = train(run, 3)
    other = build(seed=5)
    random.random()
    loaded = graphaccel.load(tmp_path, *other[:2], scheduler=other[2])
    assert (loaded.step, loaded.folder) == (3, saved.folder)
    assert loaded.more == {"position": {"epoch": 1, "files": ["a", "b"]}}
    assert train(other, 3) == expected


def test_an_empty_folder_is_the_start(tmp_path: Path) -> None:
    model, optimizer, _ = build()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    for folder in (tmp_path, tmp_path / "not yet"):
        assert graphaccel.load(folder, model, optimizer).step == 0
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_a_script_that_is_planned_loads_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer, _ = build()
    graphaccel.save(tmp_path, model, optimizer, step=5)
    monkeypatch.setenv("GRAPHACCEL_PLAN_ONLY", "1")
    assert graphaccel.load(tmp_path, model, optimizer).step == 0
    assert graphaccel.load(None, model, optimizer).step == 0


def test_the_newest_is_the_one_saved_last(tmp_path: Path) -> None:
    model, optimizer, _ = build()
    for step in (20, 10, 10):  # back to step 10, twice
        graphaccel.save(tmp_path, model, optimizer, step=step)
    names = ["step-00000010", "step-00000010.2", "step-00000020"]
    assert steps(tmp_path) == names
    assert graphaccel.load(tmp_path, model).folder == tmp_path / names[1]
    assert graphaccel.load(tmp_path / names[2], model).step == 20


def test_the_last_ones_are_kept_and_what_did_not_complete_is_removed(tmp_path: Path) -> None:
    model, optimizer, _ = build()
    (tmp_path / "step-00000009").mkdir()
    (tmp_path / "step-00000009" / "__0_0.distcp").write_bytes(b"half")
    (tmp_path / "notes").mkdir()
    assert graphaccel.load(tmp_path, model).step == 0
    for step in range(1, 5):
        graphaccel.save(tmp_path, model, optimizer, step=step, keep=2)
    assert steps(tmp_path) == ["notes", "step-00000003", "step-00000004"]


def test_a_manifest_says_what_is_there(tmp_path: Path) -> None:
    model, optimizer, _ = build()
    folder = graphaccel.save(tmp_path, model, optimizer, step=7).folder
    manifest = read_manifest(folder)
    assert manifest.step == 7
    assert manifest.tensors["model.3.weight"] == ("float32", (4, 8))
    assert manifest.files == {
        path.name: path.stat().st_size for path in folder.iterdir() if path.suffix != ".json"
    }
    assert json.loads((folder / "manifest.json").read_text())["torch"] == torch.__version__


def test_models_optimizers_and_objects_beside_the_model(tmp_path: Path) -> None:
    run = build()
    model, optimizer, _ = run
    average = torch.optim.swa_utils.AveragedModel(model)
    train(run, 2)
    average.update_parameters(model)
    other = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    model(torch.randn(6, 8)).sum().backward()
    other.step()
    more: dict[str, Any] = {"average": average, "other": other}
    graphaccel.save(tmp_path, model, optimizer, step=2, **more)

    model_2, optimizer_2, _ = build(seed=3)
    average_2 = torch.optim.swa_utils.AveragedModel(model_2)
    other_2 = torch.optim.SGD(model_2.parameters(), lr=0.1, momentum=0.9)
    graphaccel.load(tmp_path, model_2, optimizer_2, average=average_2, other=other_2)
    assert average_2.n_averaged == 1
    assert other_2.param_groups[0]["lr"] == 0.5
    for one, two in zip(average.parameters(), average_2.parameters(), strict=True):
        assert torch.equal(one, two)
    for p, q in zip(model.parameters(), model_2.parameters(), strict=True):
        assert torch.equal(other.state[p]["momentum_buffer"], other_2.state[q]["momentum_buffer"])


class _Counted(nn.Linear):
    """A layer with an extra state."""

    calls = 0

    def get_extra_state(self) -> int:
        return self.calls

    def set_extra_state(self, state: int) -> None:
        self.calls = state


def test_extra_states_and_optimizers_with_plain_values(tmp_path: Path) -> None:
    model = nn.Sequential(_Counted(4, 4))
    model[0].calls = 3
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    graphaccel.save(tmp_path, model, optimizer, step=1)
    other = nn.Sequential(_Counted(4, 4))
    other_optimizer = torch.optim.LBFGS(other.parameters(), max_iter=2)
    graphaccel.load(tmp_path, other, other_optimizer)
    assert other[0].calls == 3
    first, second = (next(iter(o.state.values())) for o in (optimizer, other_optimizer))
    assert first["func_evals"] == second["func_evals"]
    assert all(map(torch.equal, first["old_dirs"], second["old_dirs"]))


def test_one_optimizer_of_two_models_with_the_same_names(tmp_path: Path) -> None:
    def both() -> tuple[nn.Module, nn.Module, torch.optim.Optimizer]:
        one, two = nn.Linear(3, 3), nn.Linear(3, 3)
        return one, two, torch.optim.Adam([*one.parameters(), *two.parameters()])

    one, two, optimizer = both()
    (one(torch.ones(3)).sum() + 2 * two(torch.ones(3)).sum()).backward()
    optimizer.step()
    graphaccel.save(tmp_path, one, optimizer, step=1, second=two)
    third, fourth, other = both()
    graphaccel.load(tmp_path, third, other, second=fourth)
    for p, q in zip(
        [*one.parameters(), *two.parameters()], other.param_groups[0]["params"], strict=True
    ):
        assert torch.equal(optimizer.state[p]["exp_avg"], other.state[q]["exp_avg"])


class _Around(torch.optim.Optimizer):
    """As Lookahead: steps others, and goes half of the way back in every second step."""

    def __init__(self, parts: list[torch.optim.Optimizer]) -> None:
        super().__init__([g for part in parts for g in part.param_groups], {})
        self.parts = parts
        self.state["count"] = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for part in self.parts:
            part.step()
        self.state["count"] += 1
        for p in [p for group in self.param_groups for p in group["params"]]:
            slow = self.state[p].setdefault("slow", p.detach().clone())
            if self.state["count"] % 2 == 0:
                p.copy_(slow.lerp_(p, 0.5))


def _around() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    parts = [torch.optim.Adam([model.weight], 0.1), torch.optim.SGD([model.bias], 0.1, 0.9)]
    return model, _Around(parts)


def _trained(run: tuple[nn.Module, torch.optim.Optimizer], steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = run[0](torch.ones(2, 4)).square().mean()
        loss.backward()
        run[1].step()
        run[1].zero_grad()
        losses.append(loss.item())
    return losses


def test_optimizers_within_another_and_state_of_no_parameter(tmp_path: Path) -> None:
    run, other = _around(), _around()
    _trained(run, 3)
    graphaccel.save(tmp_path, *run, step=3)
    graphaccel.load(tmp_path, *other)
    assert _trained(other, 3) == _trained(run, 3)


# --- in the background ----------------------------------------------------------------------------


@pytest.fixture
def writer(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], None]], None]:
    """Run a function before each write of tensors."""
    write = FileSystemWriter.write_data

    def patched(before: Callable[[], None]) -> None:
        def slowed(self: Any, *args: Any) -> Any:
            before()
            return write(self, *args)

        monkeypatch.setattr(FileSystemWriter, "write_data", slowed)

    return patched


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path: Path, writer: Any) -> None:
    go = threading.Event()
    writer(lambda: go.wait(30))
    run = build()
    train(run, 2)
    saved = graphaccel.save(tmp_path, *run[:2], step=2, scheduler=run[2], asynchronous=True)
    expected = train(run, 3)  # changes every tensor meanwhile
    assert graphaccel.load(tmp_path, nn.Linear(1, 1)).step == 0  # not complete yet
    go.set()
    saved.wait()
    other = build(seed=1)
    assert graphaccel.load(tmp_path, *other[:2], scheduler=other[2]).step == 2
    assert train(other, 3) == expected


def test_a_failed_write_leaves_the_last_checkpoint(tmp_path: Path, writer: Any) -> None:
    run = build()
    graphaccel.save(tmp_path, *run[:2], step=1)

    def fail() -> None:
        raise OSError(28, "No space left on device", "somewhere")

    writer(fail)
    text = f"""\
error[GA412]: the checkpoint of step 2 could not be saved in `{tmp_path}`
  rank 0: No space left on device: 'somewhere'
  newest complete checkpoint: {tmp_path}/step-00000001
  why:  it counts only when every rank has written its part of it
  help: make room, or save it where there is some:  graphaccel.save('checkpoints', model, optimizer, step=2)
  explain: graphaccel explain GA412"""  # noqa: E501
    with pytest.raises(errors.CheckpointNotSaved) as raised:
        graphaccel.save(tmp_path, *run[:2], step=2)
    assert str(raised.value) == text
    assert steps(tmp_path) == ["step-00000001"]
    saved = graphaccel.save(tmp_path, *run[:2], step=2, asynchronous=True)
    with pytest.raises(errors.CheckpointNotSaved):  # at the next save, which then can be made
        graphaccel.save(tmp_path, *run[:2], step=3)
    saved.wait()
    assert graphaccel.load(tmp_path, *run[:2]).step == 1


LAST = """
import sys
import torch
from torch.distributed.checkpoint import FileSystemWriter
import graphaccel

def fail(*_):
    raise OSError(28, "No space left on device")

if len(sys.argv) > 2:
    FileSystemWriter.write_data = fail
model = torch.nn.Linear(2, 2)
graphaccel.save(sys.argv[1], model, step=1, asynchronous=True)
"""


@pytest.mark.parametrize("more", [(), ("fail",)])
def test_the_last_save_completes_before_the_process_ends_or_fails_it(
    tmp_path: Path, more: tuple[str, ...]
) -> None:
    command = [sys.executable, "-c", LAST, str(tmp_path), *more]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert ended.returncode == len(more), ended.stderr
    assert ("error[GA412]" in ended.stderr) == bool(more)
    assert len(list(tmp_path.glob("step-*/manifest.json"))) == 1 - len(more)


def test_a_model_that_was_saved_can_be_copied_and_pickled(tmp_path: Path) -> None:
    import copy
    import pickle

    model, optimizer, _ = build()
    graphaccel.save(tmp_path, model, optimizer, step=1, asynchronous=True).wait()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert graphaccel.save(tmp_path, other, step=2).step == 2


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ({"step": -1}, "step is a whole number from 0, not -1"),
        ({"step": 1, "keep": 0}, "keep is a whole number from 1, not 0"),
        ({"step": 1, "data": object()}, "tensors and plain values: it is a builtins.object"),
        (
            {"step": 1, "data": {"rows": [1, torch.Generator()]}},
            r"plain values: \['rows'\]\[1\] is a torch._C.Generator",
        ),
    ],
)
def test_arguments(tmp_path: Path, arguments: Any, what: str) -> None:
    model, optimizer, _ = build()
    with pytest.raises(errors.GraphMisuse, match=what):
        graphaccel.save(tmp_path, model, optimizer, **arguments)
    assert graphaccel.load(tmp_path, model).step == 0
    with pytest.raises(errors.GraphMisuse, match=r"the model is a torch.nn.Module, not int"):
        graphaccel.save(tmp_path, 3, step=1)  # type: ignore[arg-type]
    with pytest.raises(errors.GraphMisuse, match="the folder of the checkpoints is None"):
        graphaccel.save(None, model, optimizer, step=1)


def test_process_groups_that_were_destroyed_during_a_save_are_named() -> None:
    def gather() -> None:
        raise ValueError("Group <...> is not registered")

    with pytest.raises(
        errors.GraphMisuse, match="destroyed before a checkpoint was written"
    ) as one:
        Together(rank=0, ranks=2).collective(gather)
    assert "saved.wait(); torch.distributed.destroy_process_group()" in str(one.value)
    with pytest.raises(ValueError, match="is not registered"):
        Together().collective(gather)


def test_what_is_left_out_of_load_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GRAPHACCEL_QUIET", raising=False)
    model, optimizer, scheduler = build()
    average = torch.optim.swa_utils.AveragedModel(model)
    graphaccel.save(tmp_path, model, optimizer, step=1, scheduler=scheduler, ema=average, epoch=3)

    def said(*of_the_run: torch.optim.Optimizer, **more: Any) -> str:
        capsys.readouterr()
        graphaccel.load(tmp_path, model, *of_the_run, **more)
        return capsys.readouterr().err

    whole = {"scheduler": scheduler, "ema": average}
    path = tmp_path / "step-00000001"
    call = "graphaccel.load(folder, model, optimizer, ema=ema, scheduler=scheduler)"
    for names in (["scheduler"], ["ema"], ["scheduler", "ema"]):
        given = {name: value for name, value in whole.items() if name not in names}
        assert f"{', '.join(names)} of {path}, not loaded: {call}" in said(optimizer, **given)
    assert f"optimizer of {path}, not loaded: {call}" in said(**whole)
    assert "left out" not in said(optimizer, **whole)
    assert "left out" not in said()  # to evaluate
    assert "left out" not in said(ema=average)
