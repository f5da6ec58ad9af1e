"""One process in, N out: restarting a script, `graphaccel run`, exit codes, refusals."""

from __future__ import annotations

import builtins
import os
import subprocess
import sys
from pathlib import Path

import pytest

from graphaccel import errors
from graphaccel.runtime import launch

ROOT = Path(__file__).parents[2]

# Fails on rank 1, after the other rank has finished its work, when told to.
SCRIPT = """
import os
import sys

import torch
import torch.distributed as dist

if "--restart" in sys.argv:
    from graphaccel.runtime.launch import ensure_launched
    ensure_launched(2)
    ensure_launched(2)  # in a rank it only returns
dist.init_process_group("gloo")
total = torch.ones(2) * (dist.get_rank() + 1)
dist.all_reduce(total)
# One write a rank: several ranks may share one pipe.
set_up = ("set", os.environ["PYTHONHASHSEED"], int(os.environ["OMP_NUM_THREADS"]) >= 1)
said = ("rank", dist.get_rank(), "of", dist.get_world_size(), total.tolist(), sys.argv[1:])
text = " ".join(map(str, said)) + "\\n" + " ".join(map(str, set_up)) + "\\n"
os.write(1, text.encode())
dist.barrier()
dist.destroy_process_group()
if "--fail" in sys.argv and os.environ["RANK"] == "1":
    print("rank 1 gives up", file=sys.stderr)
    sys.exit(7)
"""

CLEARED = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GRAPHACCEL_LAUNCHED")


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train it.py"  # a space, to see that nothing is split in a shell's way
    path.write_text(SCRIPT)
    return path


def _python(
    *arguments: str | Path, input: str | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    variables = {k: v for k, v in os.environ.items() if k not in (*CLEARED, "PYTHONHASHSEED")}
    variables |= {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", **environment}
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        env=variables,
        input=input,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.multiprocess
def test_plain_script_is_restarted_as_two_ranks(script: Path) -> None:
    given = ["--restart", "a b", "", "--log", "--", "--m"]  # torch's launcher has --log-dir, -m
    result = _python(script, *given)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == [
        f"rank 0 of 2 [3.0, 3.0] {given}",
        "set 0 True",
    ]
    restarts = [line for line in result.stderr.splitlines() if "restarting" in line]
    command = f"graphaccel run --devices 2 '{script}'"
    assert restarts == [f"graphaccel: restarting this script as 2 processes (as {command} does)"]


@pytest.mark.multiprocess
def test_failing_rank_gives_the_exit_code_and_leaves_its_output(
    script: Path, tmp_path: Path
) -> None:
    result = _python(script, "--restart", "--fail", TMPDIR=str(tmp_path))
    assert result.returncode == 7
    assert "rank 1 gives up" in result.stderr
    assert "graphaccel: rank 1 ended first, with exit code 7" in result.stderr
    assert "Traceback" not in result.stderr
    line = "graphaccel: what the other ranks printed is in "
    (folder,) = [x.removeprefix(line) for x in result.stderr.splitlines() if x.startswith(line)]
    (log,) = Path(folder).glob("**/1/stdout.log")
    assert log.read_text().startswith("rank 1 of 2 [3.0, 3.0]")


@pytest.mark.multiprocess
def test_run_command_shows_all_ranks_on_request(script: Path, tmp_path: Path) -> None:
    command = ("-m", "graphaccel", "run", "--devices", "2", "--all-output", script, "--devices=9")
    result = _python(*command, TMPDIR=str(tmp_path))
    assert result.returncode == 0, result.stderr
    ranks = sorted(line for line in result.stdout.splitlines() if line.startswith("rank"))
    assert ranks == [f"rank {i} of 2 [3.0, 3.0] ['--devices=9']" for i in (0, 1)]
    assert list(tmp_path.glob("graphaccel_*")) == []


@pytest.mark.multiprocess
def test_output_is_kept_in_a_folder_for_each_rank(tmp_path: Path) -> None:
    script, logs = tmp_path / "hello.py", tmp_path / "logs"
    script.write_text('import os, sys\nprint("out", os.environ["RANK"])\n'
                      'print("err", os.environ["RANK"], file=sys.stderr)\n')  # fmt: skip
    result = _python("-m", "graphaccel", "run", "--devices", "2", "--log-folder", logs, script)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["out", "0"]
    assert sorted(result.stderr.split()) == ["0", "1", "err", "err"]
    for rank in "01":
        for stream in ("out", "err"):
            (kept,) = logs.glob(f"**/{rank}/std{stream}.log")
            assert kept.read_text() == f"{stream} {rank}\n"


@pytest.mark.multiprocess
def test_killed_rank_is_named_with_its_signal(tmp_path: Path) -> None:
    path = tmp_path / "killed.py"
    path.write_text("import os, signal; os.kill(os.getpid(), signal.SIGKILL)\n")
    result = _python("-m", "graphaccel", "run", "--devices", "1", path)
    assert result.returncode == 128 + 9
    assert "graphaccel: rank 0 ended first, with signal SIGKILL" in result.stderr


def test_too_many_devices_before_anything_starts(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("print('started')\n")
    result = _python("-m", "graphaccel", "run", "--devices", "100000", path)
    assert result.returncode == 1
    assert result.stdout == ""
    assert result.stderr.startswith("error[GA205]: 100000 devices asked for, ")


def test_script_from_standard_input_is_refused() -> None:
    call = "from graphaccel.runtime.launch import ensure_launched; ensure_launched(2)"
    result = _python("-", input=call)
    assert result.returncode == 1
    assert "graphaccel.errors.NeedsLauncher: error[GA403]: devices=2 needs 2" in result.stderr


@pytest.fixture
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Plainly started Python, whose replacement by another program fails the test."""

    def exec_refused(*arguments: object) -> None:
        raise AssertionError(f"would have started {arguments}")

    for name in CLEARED:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "execve", exec_refused)
    return monkeypatch


def test_one_device_needs_no_launcher(no_launcher: pytest.MonkeyPatch) -> None:
    launch.ensure_launched(1)


def test_notebook_is_refused_with_the_command(no_launcher: pytest.MonkeyPatch) -> None:
    no_launcher.setattr(builtins, "get_ipython", lambda: None, raising=False)
    with pytest.raises(errors.NeedsLauncher) as caught:
        launch.ensure_launched(4)
    assert caught.value.command == "graphaccel run --devices 4 train.py"


def test_restart_happens_only_once(no_launcher: pytest.MonkeyPatch) -> None:
    no_launcher.setenv("GRAPHACCEL_LAUNCHED", "1")
    with pytest.raises(errors.NeedsLauncher):
        launch.ensure_launched(2)


def test_too_many_devices_in_a_script(no_launcher: pytest.MonkeyPatch) -> None:
    no_launcher.setattr(launch, "available_devices", lambda: (8, "here"))
    no_launcher.setitem(sys.modules, "torch", __import__("torch"))
    no_launcher.setattr(sys, "argv", ["train.py"])
    with pytest.raises(errors.TooManyDevices) as caught:
        launch.ensure_launched(9)
    assert (caught.value.asked, caught.value.available) == (9, 8)


def test_other_number_of_processes_than_the_launcher_started(
    no_launcher: pytest.MonkeyPatch,
) -> None:
    no_launcher.setenv("WORLD_SIZE", "4")
    no_launcher.setattr(sys, "argv", ["train.py"])
    with pytest.raises(errors.GraphMisuse) as caught:
        launch.ensure_launched(8)
    assert caught.value.what == "devices=8, but the launcher started 4 processes"
    assert caught.value.help_line.endswith("graphaccel run --devices 8 train.py")


def test_every_rank_counts_the_devices_of_its_own_machine(no_launcher: pytest.MonkeyPatch) -> None:
    no_launcher.setattr(launch, "available_devices", lambda: (4, "here"))
    no_launcher.setenv("WORLD_SIZE", "8")
    no_launcher.setenv("LOCAL_WORLD_SIZE", "4")
    launch.ensure_launched(8)
    no_launcher.setenv("LOCAL_WORLD_SIZE", "8")
    with pytest.raises(errors.TooManyDevices):
        launch.ensure_launched(8)
