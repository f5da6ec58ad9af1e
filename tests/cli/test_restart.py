"""What a run survives: a killed rank, SIGTERM, a killed launcher; and several machines."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.test_launch import CLEARED, ROOT
from tests.support.pool import Pool
from tests.support.scripts import run_as_rank

pytestmark = pytest.mark.multiprocess

LIMIT = 300

# Trains six steps under a plan and saves after each; in its first life rank 1 is killed in step 4.
TRAINED = """
import os, signal, sys
import torch
from torch import nn
import graphaccel

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.Linear(8, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
x, y = torch.randn(8, 8), torch.randn(8, 4)
graphaccel.optimize(model, optimizer, devices=2, data=2, zero=3, loss_fn=nn.functional.mse_loss,
                    example_batch=(x, y))
start = graphaccel.load(None, model, optimizer).step
for step in range(start + 1, 7):
    loss = model(x, y)
    loss.backward()
    if start == 0 and step == 4 and "--die" in sys.argv and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item(), flush=True)
    graphaccel.save(None, model, optimizer, step=step, every=1, keep=2)
"""

# Trains without end until it is stopped.
ENDLESS = """
import os, sys
import torch
import torch.distributed as dist
import graphaccel

dist.init_process_group("gloo")
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
step = graphaccel.load(sys.argv[1], model, optimizer).step
while True:
    step += 1
    graphaccel.save(sys.argv[1], model, optimizer, step=step, every=10**9)
    if step % 100 == 1:
        os.write(1, f"pid {os.getpid()}\\n".encode())
"""


def _environment(**more: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if k not in CLEARED and not k.startswith("PET_")}
    return kept | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", **more}


def _start(*arguments: str | Path, **more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "graphaccel", "run", *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=_environment(**more), **pipes)  # type: ignore


def _pids(launcher: subprocess.Popen[str], count: int) -> list[int]:
    """Of ranks that are training, as each prints."""
    found: set[int] = set()
    assert launcher.stdout is not None
    while len(found) < count:
        line = launcher.stdout.readline()
        assert line, launcher.communicate()
        found.add(int(line.split()[1]))
    return sorted(found)


def _printed(out: str) -> set[tuple[str, ...]]:
    """Lines of TRAINED: a step and its loss."""
    return {tuple(line.split()) for line in out.splitlines() if line[:1].isdigit()}


@pytest.mark.slow
def test_a_killed_rank_is_restarted_from_the_newest_checkpoint(tmp_path: Path, pool: Pool) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAINED)
    kept = {"GRAPHACCEL_CHECKPOINT": str(tmp_path / "whole")}
    whole = _printed(pool.run(2, run_as_rank, str(script), (), kept)[0])
    options = ("--devices", "2", "--max-restarts", "1", "--checkpoint", tmp_path / "killed")
    run = _start(*options, script, "--die")
    out, error = run.communicate(timeout=LIMIT)
    assert run.returncode == 0, error
    assert sorted(step for step, _ in whole) == list("123456")
    assert _printed(out) == whole  # bitwise, also what both lives did
    assert "step-00000003, step 3" in error
    named = "rank 1 ended first, with signal SIGKILL: all ranks start anew (1 of 1"
    assert error.count(named) == error.count("ended first") == 1
    assert "exitcode" not in error  # torch's own lines about it
    assert sorted(p.name for p in (tmp_path / "killed").iterdir()) == [
        "latest",
        "step-00000005",
        "step-00000006",
    ]


def test_sigterm_saves_and_ends_with_an_exit_code_of_its_own(tmp_path: Path) -> None:
    script, folder = tmp_path / "train.py", tmp_path / "checkpoints"
    script.write_text(ENDLESS)
    options = ("--devices", "2", "--all-output", "--max-restarts", "3")
    run = _start(*options, script, folder)
    _pids(run, 2)
    run.send_signal(signal.SIGTERM)
    _, error = run.communicate(timeout=LIMIT)
    assert run.returncode == 75, error
    (saved,) = folder.glob("step-*/manifest.json")
    step = int(saved.parent.name.removeprefix("step-"))
    line = f"graphaccel: asked to stop: step {step} is saved in {saved.parent}; exit code 75"
    assert line in error.splitlines()


def test_a_run_that_is_asked_to_stop_before_it_can_save_is_not_restarted(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os, time\nos.write(1, f'pid {os.getpid()}\\n'.encode())\ntime.sleep(60)\n"
    )
    run = _start("--devices", "2", "--all-output", "--max-restarts", "3", script)
    _pids(run, 2)
    run.send_signal(signal.SIGTERM)
    out, error = run.communicate(timeout=LIMIT)
    assert run.returncode == 128 + signal.SIGTERM, error
    assert "pid" not in out
    assert "with signal SIGTERM: asked to stop, so no rank starts anew" in error
    assert error.count("ended first") == 1


def test_ranks_die_with_their_launcher(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(ENDLESS)
    run = _start("--devices", "2", "--all-output", script, tmp_path / "checkpoints")
    ends = [os.pidfd_open(pid) for pid in _pids(run, 2)]
    run.kill()
    for end in ends:
        assert select.select([end], [], [], 30)[0], "a rank outlives its launcher"
        os.close(end)
    run.communicate(timeout=LIMIT)


def test_two_machines_by_the_variables_of_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os, sys\n"
        "from graphaccel.runtime.launch import ensure_launched\n"
        "ensure_launched(2)\n"
        "print(os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])\n"
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {"PET_NNODES": "2", "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": port}
    by_command = _start("--devices", "1", script, PET_NODE_RANK="0", **shared)
    by_itself = subprocess.Popen(
        [sys.executable, str(script)],
        env=_environment(PET_NODE_RANK="1", **shared),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert by_command.communicate(timeout=LIMIT)[0] == "0 of 2\n"
    assert by_itself.communicate(timeout=LIMIT)[0] == "1 of 2\n"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--nnodes x", "'x' is neither a number nor LEAST:MOST"),
        ("--nnodes 3:2", "'3:2' is neither a number nor LEAST:MOST"),
        ("--nnodes 2 --node-rank 9", "--node-rank 9 of --nnodes 2: from 0"),
        ("--node-rank one", "'one' is no whole number from 0"),
        ("--max-restarts -1", "'-1' is no whole number from 0"),
    ],
)
def test_options(options: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    from graphaccel.cli.main import main

    with pytest.raises(SystemExit) as ended:
        main(["run", "--devices", "2", *options.split(), "train.py"])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
