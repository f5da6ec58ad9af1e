"""Processes that Slurm or MPI started train together, or are refused: never each by itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from graphaccel.errors import NotAlone
from graphaccel.runtime.environment import check_launcher, join_job

SRUN = {
    "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_NNODES": "1",
    "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_NODEID": "0",
    "SLURM_TASKS_PER_NODE": "2",
}  # fmt: skip
NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def _joined(environment: dict[str, str]) -> tuple[str | None, ...]:
    made = dict(environment)
    join_job(False, made)
    return tuple(made.get(name) for name in NAMES)


def test_a_step_of_slurm() -> None:
    assert _joined(SRUN) == ("1", "2", "1", "2", "127.0.0.1", "22387")
    nodes = {
        "SLURM_STEP_NODELIST": "gpu[07-08,11]", "SLURM_STEP_NUM_NODES": "3", "SLURM_NODEID": "1",
        "SLURM_STEP_TASKS_PER_NODE": "4(x2),2", "SLURM_STEP_NUM_TASKS": "10", "SLURM_PROCID": "5",
    }  # fmt: skip
    assert _joined(SRUN | nodes) == ("5", "10", "1", "4", "gpu07", "22387")
    given = {"MASTER_ADDR": "here", "MASTER_PORT": "1", "CUDA_VISIBLE_DEVICES": "3"}
    assert _joined(SRUN | nodes | given) == ("5", "10", "0", "1", "here", "1")


def test_mpi() -> None:
    openmpi = {
        "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    }  # fmt: skip
    assert _joined(openmpi) == ("1", "2", "1", "2", "127.0.0.1", "29500")
    mpich = {"PMI_SIZE": "4", "PMI_RANK": "3", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
    assert _joined(mpich | {"MASTER_ADDR": "one"}) == ("3", "4", "1", "2", "one", "29500")


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_JOB_ID": "1"},
        {"OMPI_COMM_WORLD_SIZE": "1", "PMI_SIZE": "1", "PET_NNODES": "1", "PET_NPROC_PER_NODE": ""},
    ],
)
def test_one_process_is_left_alone(environment: dict[str, str]) -> None:
    assert _joined(environment) == (None,) * len(NAMES)


def test_what_torchrun_says_comes_first() -> None:
    told = dict(zip(NAMES, "352467", strict=True))
    assert _joined(SRUN | told) == tuple("352467")


@pytest.mark.parametrize(
    ("environment", "variable", "command"),
    [
        ({"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}, "SLURM_NTASKS=8", "srun python train.py"),
        ({"SLURM_NPROCS": "8"}, "SLURM_NPROCS=8", "srun python train.py"),
        ({"PET_NNODES": "1:4"}, "PET_NNODES=1:4", "torchrun train.py"),
        ({"PET_NPROC_PER_NODE": "gpu"}, "PET_NPROC_PER_NODE=gpu", "torchrun train.py"),
        (
            {"OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_RANK": "0"},
            "OMPI_COMM_WORLD_SIZE=8",
            "mpirun -x MASTER_ADDR=$(hostname) -x MASTER_PORT=29500 python train.py",
        ),
        (
            {"PMI_SIZE": "8", "PMI_RANK": "0", "MPI_LOCALNRANKS": "4"},
            "PMI_SIZE=8",
            "mpirun -x MASTER_ADDR=$(hostname) -x MASTER_PORT=29500 python train.py",
        ),
    ],
)
def test_a_place_that_is_not_known_is_refused(
    monkeypatch: Any, environment: dict[str, str], variable: str, command: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py"])
    with pytest.raises(NotAlone) as caught:
        join_job(False, dict(environment))
    assert (caught.value.variable, caught.value.command) == (variable, command)
    join_job(True, made := dict(environment))  # the script is restarted as many processes
    assert made == environment


@pytest.mark.parametrize(
    ("text", "evidence", "reason"),
    [
        ("RANK=0", "RANK=0", "WORLD_SIZE is not set"),
        ("RANK=1 LOCAL_RANK=1", "RANK=1", "WORLD_SIZE is not set"),
        ("LOCAL_RANK=1", "LOCAL_RANK=1", "WORLD_SIZE is not set"),
        ("WORLD_SIZE=2", "WORLD_SIZE=2", "RANK is not set"),
        ("WORLD_SIZE=two RANK=0", "WORLD_SIZE=two", "it is no whole number from 1"),
        ("WORLD_SIZE=0 RANK=0", "WORLD_SIZE=0", "it is no whole number from 1"),
        ("WORLD_SIZE= RANK=0", "WORLD_SIZE=", "it is no whole number from 1"),
        ("WORLD_SIZE=2 RANK=-1", "RANK=-1", "it is no whole number from 0"),
        ("WORLD_SIZE=2 RANK=2", "RANK=2", "WORLD_SIZE=2 has no such rank"),
        ("WORLD_SIZE=4 RANK=3 LOCAL_RANK=4", "LOCAL_RANK=4", "WORLD_SIZE=4 has no such rank"),
        (
            "WORLD_SIZE=4 RANK=3 LOCAL_RANK=2 LOCAL_WORLD_SIZE=2", "LOCAL_RANK=2",
            "LOCAL_WORLD_SIZE=2 has no such rank",
        ),
        ("WORLD_SIZE=2 RANK=0 LOCAL_WORLD_SIZE=4", "LOCAL_WORLD_SIZE=4", "WORLD_SIZE=2 is less"),
    ],
)  # fmt: skip
def test_incomplete_variables_are_refused(text: str, evidence: str, reason: str) -> None:
    environment = dict(pair.split("=") for pair in text.split())
    with pytest.raises(NotAlone) as caught:
        join_job(False, environment)
    assert (caught.value.variable, caught.value.reason) == (evidence, reason)
    names = caught.value.alone.removeprefix("unset ").split()
    assert names
    left = {name: value for name, value in environment.items() if name not in names}
    assert _joined(left) == (None,) * len(NAMES)
    typed = dict(part.split("=") for part in caught.value.command.split() if "=" in part)
    assert _joined(typed)[:2] == ("0", "2")


@pytest.mark.parametrize(
    ("text", "evidence"),
    [
        ("WORLD_SIZE=2", "WORLD_SIZE=2"),
        ("WORLD_SIZE=x RANK=0", "WORLD_SIZE=x"),
        ("WORLD_SIZE=2 RANK=2", "RANK=2"),
        ("RANK=1", "RANK=1"),
        ("LOCAL_RANK=0", None),
        ("WORLD_SIZE=1", None),
        ("RANK=0", None),
        ("WORLD_SIZE=2 RANK=1 LOCAL_RANK=1", None),  # a script may say itself where they meet
        ("SLURM_NTASKS=8 SLURM_PROCID=0", None),
    ],
)
def test_variables_that_another_library_reads_first(text: str, evidence: str | None) -> None:
    """TrainingArguments join the process group before a Trainer is made."""
    given = dict(pair.split("=") for pair in text.split())
    if evidence is None:
        check_launcher(given)
        return
    with pytest.raises(NotAlone) as caught:
        check_launcher(given)
    assert caught.value.variable == evidence


def test_a_rank_that_is_not_the_first_does_not_restart_the_script() -> None:
    join_job(True, {"RANK": "0"})
    with pytest.raises(NotAlone):
        join_job(True, {"RANK": "1", "LOCAL_RANK": "1"})


SCRIPT = """
import os, torch, graphaccel
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loss_fn = lambda y: y.square().mean()
model, optimizer = graphaccel.optimize(model, optimizer, loss_fn=loss_fn, timeout=60)
model(torch.ones(8, 4)).backward()
print(torch.distributed.get_world_size(), model.graphaccel.plan.devices, flush=True)
"""


def test_two_tasks_of_slurm_train_together(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    own = {k: v for k, v in os.environ.items() if k not in NAMES}
    tasks = [
        subprocess.Popen(
            [sys.executable, str(script)],
            env=own | SRUN | {"SLURM_PROCID": rank, "SLURM_LOCALID": rank},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in "01"
    ]
    assert [task.communicate(timeout=120)[0].split() for task in tasks] == [["2", "2"]] * 2
    assert [task.returncode for task in tasks] == [0, 0]
