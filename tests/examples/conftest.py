"""The examples are scripts whose modules import each other by bare name (`from model import …`)."""

from __future__ import annotations

import importlib
import os
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.support.pool import Pool
from tests.support.scripts import run_as_rank

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


@contextmanager
def importing_from(folder: Path) -> Iterator[None]:
    """`folder` first on sys.path; afterwards its modules are forgotten and torch's RNG is back."""
    names = {file.stem for file in folder.glob("*.py")}
    hidden = {name: sys.modules.pop(name) for name in names & sys.modules.keys()}
    sys.path.insert(0, str(folder))
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        sys.path.remove(str(folder))
        for name in names:
            sys.modules.pop(name, None)
        sys.modules.update(hidden)


@pytest.fixture
def gpt2() -> Iterator[Callable[[str], ModuleType]]:
    """`gpt2("data")` imports examples/gpt2/data.py."""
    with importing_from(EXAMPLES / "gpt2"):
        yield importlib.import_module


@pytest.fixture
def run_here(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """`run_here("nanogpt/train_plain.py", "--resume")` runs it in this process: its stdout."""

    def run(script: str, *arguments: str) -> str:
        path = EXAMPLES / script
        monkeypatch.setattr(sys, "argv", [str(path), *arguments])
        capsys.readouterr()
        with importing_from(path.parent):
            runpy.run_path(str(path), run_name="__main__")
        return capsys.readouterr().out

    return run


@pytest.fixture
def run_ranks(pool: Pool) -> Callable[..., str]:
    """`run_ranks("nanogpt/train.py", "--resume")` runs it as two ranks: the stdout of rank 0.
    Starting processes is tested in tests/cli."""

    def run(script: str, *arguments: str) -> str:
        return pool.run(2, run_as_rank, str(EXAMPLES / script), arguments, {})[0]

    return run


@pytest.fixture
def run_apart(tmp_path: Path) -> Callable[..., str]:
    """`run_apart("-m", "graphaccel", …)` runs Python in a new process: its stdout."""

    def run(*arguments: str) -> str:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    return run
