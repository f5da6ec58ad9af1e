"""A script of Accelerate under a plan: its losses, weights and checkpoints are its own."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from graphaccel.errors import GraphMisuse
from graphaccel.integrations.accelerate import Accelerator
from tests.integrations.test_trainer import CLOSE, GPT2, PLANS, Lines, gpt2
from tests.support.captures import captures_of
from tests.support.pool import Pool

pytestmark = [pytest.mark.multiprocess, pytest.mark.filterwarnings("ignore")]

ROOT = Path(__file__).parents[2]
STEPS = 8


def script(accelerator: Any, folder: str, resume: str | None = None) -> list[float]:
    """A loop as Accelerate's examples have it; the losses of the steps it ran."""
    model = gpt2()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4)
    accelerate.utils.set_seed(1)
    order = torch.Generator().manual_seed(3)
    rows = Lines(8 * STEPS, seed=1)
    loader = torch.utils.data.DataLoader(rows, batch_size=8, shuffle=True, generator=order)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    done = 0
    if resume is not None:
        accelerator.load_state(resume)
        done = STEPS // 2
        loader = accelerator.skip_first_batches(loader, done)
    losses = []
    for step, batch in enumerate(loader, done):
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(float(accelerator.gather_for_metrics(loss.detach()).mean()))
        if step == STEPS // 2 - 1 and resume is None:
            accelerator.save_state(f"{folder}/half")
    accelerator.save_model(model, f"{folder}/model")
    accelerator.unwrap_model(model).save_pretrained(
        f"{folder}/pretrained",
        is_main_process=accelerator.is_main_process,
        state_dict=accelerator.get_state_dict(model),
    )
    return losses


@captures_of(GPT2)
def _planned(plan: dict[str, Any], other: dict[str, Any], root: str) -> list[Any]:
    losses = script(Accelerator(gradient_accumulation_steps=2, optimize=plan), f"{root}/whole")
    resumed = Accelerator(gradient_accumulation_steps=2, optimize=other)
    return [losses, script(resumed, f"{root}/resumed", resume=f"{root}/whole/half")]


@pytest.mark.parametrize("name", ["zero3", "pipeline"])
def test_equal_to_plain_accelerate(pool: Pool, name: str, tmp_path: Path) -> None:
    """Accumulation, clipping, a scheduler, shuffling; resuming under another plan."""
    other = PLANS["tensor" if name == "zero3" else "data"]
    expected = script(accelerate.Accelerator(gradient_accumulation_steps=2), f"{tmp_path}/plain")
    assert len(expected) == STEPS
    assert abs(expected[0] - expected[2]) > 1e-5
    for losses, resumed in pool.run(2, _planned, PLANS[name], other, str(tmp_path), timeout_s=300):
        assert losses == pytest.approx(expected, abs=1e-6)
        assert resumed == pytest.approx(expected[STEPS // 2 :], abs=1e-6)
    plain = load_file(f"{tmp_path}/plain/model/model.safetensors")
    for run in ("whole", "resumed"):
        for kind in ("model", "pretrained"):
            found = load_file(f"{tmp_path}/{run}/{kind}/model.safetensors")
            assert found.keys() == plain.keys()
            assert max(float((found[k] - plain[k]).abs().max()) for k in plain) < CLOSE


def returning(accelerator: Any, folder: str) -> list[float]:
    """Goes back to a state of its own in mid-run, and ends when a rank sets the trigger."""
    model = gpt2()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = torch.utils.data.DataLoader(Lines(8 * STEPS, seed=1), batch_size=8)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    last = dist.get_world_size() - 1 if dist.is_initialized() else 0
    losses = []
    for step, batch in enumerate(loader):
        if step == 2:
            accelerator.save_state(folder)
        if step == 4:
            accelerator.load_state(folder)
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        if step == 5 and accelerator.process_index == last:
            accelerator.set_trigger()
        if accelerator.check_trigger():
            break
    return losses


@captures_of(GPT2)
def _returned(plan: dict[str, Any], folder: str) -> list[float]:
    return returning(Accelerator(optimize=plan), folder)


def test_a_state_loaded_in_mid_run(pool: Pool, tmp_path: Path) -> None:
    """Weights are shards by then. A trigger of the last rank ends the loop on all of them."""
    expected = returning(accelerate.Accelerator(), f"{tmp_path}/plain")
    assert len(expected) == 6
    for losses in pool.run(2, _returned, PLANS["zero3"], f"{tmp_path}/planned", timeout_s=300):
        assert losses == pytest.approx(expected, abs=1e-6)


def in_phases(accelerator: Any, folder: str) -> list[float]:
    """Another optimizer for the same model in mid-run, whose state is saved and loaded."""
    model, losses = gpt2(), list[float]()
    for phase, kind in enumerate((torch.optim.SGD, torch.optim.AdamW)):
        loader = torch.utils.data.DataLoader(Lines(32, seed=1), batch_size=8)
        model, optimizer, loader = accelerator.prepare(
            model, kind(model.parameters(), lr=1e-2), loader
        )
        for step, batch in enumerate(loader):
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
            if phase and step == 1:
                accelerator.save_state(folder)
                accelerator.load_state(folder)
    return losses


@captures_of(GPT2)
def _in_phases_under(plan: dict[str, Any], folder: str) -> list[float]:
    return in_phases(Accelerator(optimize=plan), folder)


def test_a_model_is_prepared_with_another_optimizer(pool: Pool, tmp_path: Path) -> None:
    expected = in_phases(accelerate.Accelerator(), f"{tmp_path}/plain")
    for losses in pool.run(2, _in_phases_under, PLANS["zero3"], f"{tmp_path}/planned"):
        assert losses == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("given", "instead"),
    [
        ({"fsdp_plugin": object()}, 'optimize={"zero": 3}'),
        ({"dynamo_backend": "inductor"}, 'optimize={"compile": "inductor"}'),
    ],
)
def test_what_the_plan_decides_is_refused(given: dict[str, Any], instead: str) -> None:
    (name,) = given
    with pytest.raises(GraphMisuse) as caught:
        Accelerator(**given)
    assert str(caught.value) == (
        f"error[GA407]: Accelerator({name}=...) asks for what the plan decides\n"
        f"  help: leave it out; the plan's own is:  {instead}\n"
        "  explain: graphaccel explain GA407"
    )


@pytest.mark.parametrize("given", [((), {"mixed_precision": "bf16"}), ((True, False, "bf16"), {})])
def test_another_precision_is_refused(given: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
    args, kwargs = given
    with pytest.raises(GraphMisuse) as caught:
        Accelerator(*args, **kwargs, optimize={"precision": "fp32"})
    assert str(caught.value) == (
        "error[GA407]: Accelerator(mixed_precision='bf16'), but optimize={'precision': 'fp32'}\n"
        "  help: leave one out, or pin the same:  optimize={'precision': 'bf16'}\n"
        "  explain: graphaccel explain GA407"
    )


@pytest.mark.parametrize("call", ["prepare", "prepare_model"])
def test_a_model_without_its_optimizer_is_refused(call: str) -> None:
    accelerator = Accelerator()
    with pytest.raises(GraphMisuse) as caught:
        getattr(accelerator, call)(gpt2())
    assert str(caught.value) == (
        f"error[GA407]: {call}() got a model with 0 optimizers of its parameters; "
        "a plan needs one\n"
        "  help: model, optimizer = accelerator.prepare(model, optimizer)\n"
        "  help: or, to evaluate alone:  "
        "model = accelerator.prepare_model(model, evaluation_mode=True)\n"
        "  explain: graphaccel explain GA407"
    )
    model = accelerator.prepare_model(gpt2(), evaluation_mode=True)
    assert not hasattr(model, "graphaccel")


def test_a_frozen_model_stays_plain() -> None:
    teacher = gpt2().requires_grad_(False)
    assert not hasattr(Accelerator().prepare(teacher), "graphaccel")


LAUNCHED = """
import json, torch
from graphaccel.integrations.accelerate import Accelerator

def training():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)

def small(accelerator):
    model, optimizer = training()
    rows = torch.randn(48, 4, generator=torch.Generator().manual_seed(1))
    loader = torch.utils.data.DataLoader(rows, batch_size=8)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for batch in loader:
        loss = model(batch).square().mean()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return model, losses

if __name__ == "__main__":
    accelerator = Accelerator()
    model, losses = small(accelerator)
    if accelerator.is_main_process:
        print("FOUND", json.dumps([model.graphaccel.plan.devices, losses]), flush=True)
    Accelerator(optimize={"tensr": 2}).prepare(*training())
"""


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 1])
def test_accelerate_launch_starts_it(processes: int, tmp_path: Path) -> None:
    """As many devices as it starts, the losses of plain Accelerate, and an error is said once."""
    script = tmp_path / "train.py"
    script.write_text(LAUNCHED)
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    own = {"HF_HOME": str(tmp_path), "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    several = "--cpu" if processes == 1 else "--multi_gpu"  # --cpu starts one, whatever it is told
    done = subprocess.run(
        [
            sys.executable, "-m", "accelerate.commands.launch", several, "--num_processes",
            str(processes), "--num_machines", "1", "--main_process_port", "0",
            "--mixed_precision", "no", "--dynamo_backend", "no", str(script),
        ],
        env=kept | own, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    lines = [each for each in done.stdout.splitlines() if each.startswith("FOUND ")]
    assert len(lines) == 1, done.stderr
    devices, losses = json.loads(lines[0].removeprefix("FOUND "))
    assert devices == processes
    _, expected = runpy.run_path(str(script))["small"](accelerate.Accelerator(cpu=True))
    assert losses == pytest.approx(expected, abs=1e-6)
    assert abs(losses[0] - losses[-1]) > 1e-3
    assert done.returncode == 1
    assert done.stderr.count("error[GA202]: tensr=2") == done.stderr.count("error[GA") == 1
