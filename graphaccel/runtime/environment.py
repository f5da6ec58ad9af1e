"""Finds this process's rank in a job that another launcher than torch's started (Slurm, MPI).

Slurm, Open MPI and MPICH set variables of their own; torch reads RANK, WORLD_SIZE, LOCAL_RANK,
LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT, which are set from them here. A job whose ranks
cannot be determined is refused, also where some of torch's own variables are missing or contradict
each other: otherwise each process of the job would train by itself, or wait for ranks that are not
there.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Mapping, MutableMapping

from graphaccel.errors import NotAlone

_PORTS = range(20_000, 40_000)
_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def join_job(restarts: bool, environment: MutableMapping[str, str] = os.environ) -> None:
    """Set torch's variables from those of the launcher that started this process, if one did.

    restarts: the script asks for a number of processes, and is restarted as that many.

    Raises NotAlone (GA409) where a job of several processes is detected, but not this one's rank.
    """
    if "WORLD_SIZE" in environment:
        _check_ranks(environment)
        return
    try:
        variables = _slurm(environment) or _mpi(environment) or _elastic(environment)
        if not variables:
            _check_alone(environment)
        environment.update(variables)
    except NotAlone:
        if not restarts or environment.get("RANK", "0") != "0":
            raise


def check_launcher(environment: Mapping[str, str] = os.environ) -> None:
    """Check the launcher's variables before a library reads them that starts a process group itself
    and reports what is wrong with a traceback of its own.

    Raises NotAlone (GA409).
    """
    join_job(True, dict(environment))


def _check_ranks(env: Mapping[str, str]) -> None:
    """Raises NotAlone (GA409) where torch's variables do not give this process a place in its job.

    One process has rank 0, whether or not a variable says so.
    """
    world = _count(env, "WORLD_SIZE", 1)
    local = "LOCAL_WORLD_SIZE" if "LOCAL_WORLD_SIZE" in env else "WORLD_SIZE"
    if "RANK" not in env and world > 1:
        raise _misplaced(env, "WORLD_SIZE", "RANK is not set")
    if _count(env, local, 1) > world:
        raise _misplaced(env, local, f"WORLD_SIZE={world} is less")
    for rank, size in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", local)):
        if _count(env, rank, 0) >= _count(env, size, 1):
            raise _misplaced(env, rank, f"{size}={env[size]} has no such rank")


def _check_alone(env: Mapping[str, str]) -> None:
    """Raises NotAlone (GA409) where a process without WORLD_SIZE has the rank of one of several.

    LOCAL_RANK=0 alone is what scripts of one process set for themselves.
    """
    for name in ("RANK", "LOCAL_RANK"):
        if name in env and (name, env[name]) != ("LOCAL_RANK", "0"):
            raise _misplaced(env, name, "WORLD_SIZE is not set")


def _count(env: Mapping[str, str], name: str, least: int) -> int:
    """A variable's value, `least` where it is not set. Raises NotAlone (GA409) for no number."""
    text = env.get(name, str(least))
    number = int(text) if text.isascii() and text.isdigit() else -1
    if number < least:
        raise _misplaced(env, name, f"it is no whole number from {least}")
    return number


def _misplaced(env: Mapping[str, str], name: str, reason: str) -> NotAlone:
    given = [each for each in _RANKS if each in env]
    return NotAlone(
        variable=f"{name}={env[name]}",
        reason=reason,
        command="MASTER_ADDR=FIRST_MACHINE MASTER_PORT=29500 WORLD_SIZE=2 RANK=0 LOCAL_RANK=0 "
        f"python {_script()}",
        alone=f"unset {' '.join(given)}",
    )


def _slurm(env: Mapping[str, str]) -> dict[str, str]:
    names = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")
    name = next((name for name in names if name in env), "")
    tasks = int(env.get(name, "1"))
    if tasks == 1:
        return {}
    started = any(n in env for n in ("SLURM_STEP_ID", "SLURM_LAUNCH_NODE_IPADDR", "MASTER_ADDR"))
    several = int(_of_step(env, "NUM_NODES", "SLURM_NNODES", "1")) > 1
    nodes = _of_step(env, "NODELIST", "SLURM_JOB_NODELIST", "")
    host = _first_host(nodes) or env.get("SLURM_LAUNCH_NODE_IPADDR", "")
    # The shell of a batch job has SLURM_PROCID=0 as well, and no other process was started.
    if not ("SLURM_PROCID" in env and started and (host or not several or "MASTER_ADDR" in env)):
        raise NotAlone(
            variable=f"{name}={tasks}",
            reason="srun did not start this process as one of them",
            command=f"srun python {_script()}",
        )
    counts = _counts(_of_step(env, "TASKS_PER_NODE", "SLURM_TASKS_PER_NODE", str(tasks)))
    node = int(env.get("SLURM_NODEID", "0"))
    job = int(_digits(env.get("SLURM_JOB_ID"))) * 31 + int(_digits(env.get("SLURM_STEP_ID")))
    return _torch_names(
        env,
        rank=env["SLURM_PROCID"],
        world=tasks,
        local=env.get("SLURM_LOCALID", env["SLURM_PROCID"]),
        local_world=counts[node] if node < len(counts) else tasks,
        address=host if several else "127.0.0.1",
        port=_PORTS[job % len(_PORTS)],
    )


def _of_step(env: Mapping[str, str], name: str, job: str, otherwise: str) -> str:
    """Slurm's variable for the step, or else for the whole job."""
    return env.get(f"SLURM_STEP_{name}", env.get(job, otherwise))


_MPI = (  # size, rank, rank on the host, size on the host
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK",
     "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)  # fmt: skip


def _mpi(env: Mapping[str, str]) -> dict[str, str]:
    for size, rank, local, local_size in _MPI:
        world = env.get(size, "1")
        if world == "1":
            continue
        if rank not in env or not ("MASTER_ADDR" in env or env.get(local_size) == world):
            raise NotAlone(
                variable=f"{size}={world}",
                reason="nothing says where they meet",
                command="mpirun -x MASTER_ADDR=$(hostname) -x MASTER_PORT=29500 "
                f"python {_script()}",
            )
        return _torch_names(
            env,
            rank=env[rank],
            world=int(world),
            local=env.get(local, env[rank]),
            local_world=int(env.get(local_size, world)),
            address="127.0.0.1",
            port=29500,
        )
    return {}


def _elastic(env: Mapping[str, str]) -> dict[str, str]:
    """Torchrun's own variables, where torchrun did not start this process."""
    for name in ("PET_NNODES", "PET_NPROC_PER_NODE"):
        if env.get(name, "1").split(":")[-1] not in ("", "1"):
            raise NotAlone(
                variable=f"{name}={env[name]}",
                reason="torchrun, which reads this, did not start this process",
                command=f"torchrun {_script()}",
            )
    return {}


def _torch_names(
    env: Mapping[str, str],
    *,
    rank: str,
    world: int,
    local: str,
    local_world: int,
    address: str,
    port: int,
) -> dict[str, str]:
    """Torch's variables. A process that sees one GPU only is taken as alone on its host."""
    if env.get("CUDA_VISIBLE_DEVICES", "").isdigit():
        local, local_world = "0", 1
    return {
        "RANK": rank,
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": local,
        "LOCAL_WORLD_SIZE": str(local_world),
        "MASTER_ADDR": env.get("MASTER_ADDR", address),
        "MASTER_PORT": env.get("MASTER_PORT", str(port)),
    }


def _first_host(nodes: str) -> str:
    """The first host of a list in Slurm's notation: node[03-07,12],other → node03."""
    match = re.match(r"([^,\[]+)(?:\[([0-9]+))?", nodes)
    return "" if match is None else match[1] + (match[2] or "")


def _counts(text: str) -> list[int]:
    """Tasks of each node: 2(x3),1 → [2, 2, 2, 1]."""
    results = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        results += [int(count)] * int(times or 1)
    return results


def _digits(text: str | None) -> str:
    return re.sub(r"[^0-9]", "", text or "") or "0"


def _script() -> str:
    return shlex.quote(sys.argv[0]) if sys.argv[0].endswith(".py") else "train.py"
