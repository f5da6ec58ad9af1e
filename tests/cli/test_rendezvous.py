"""Where the machines of a job meet: one error where they can not, and no wait that nothing ends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from graphaccel.cli.main import main
from graphaccel.errors import NoMeeting
from graphaccel.runtime.rendezvous import meeting_by_variables
from tests.cli.test_restart import LIMIT, _environment, _start

NOWHERE = "no-such-host.invalid"


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text("print('started')")
    return path


@pytest.fixture
def taken() -> Iterator[int]:
    """A port at which something listens."""
    with socket.create_server(("", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def closed() -> Iterator[int]:
    """A port that is taken, so that no other test gets it, and at which nothing listens."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield int(held.getsockname()[1])


@pytest.fixture
def interruptible() -> Iterator[None]:
    """SIGINT reaches what is started meanwhile: in the background of a shell it is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def refused(error: str) -> str:
    """The sentence of the one error that a run ends with."""
    lines = [line for line in error.splitlines() if not line.startswith("graphaccel: waiting")]
    assert [line.split(":")[0] for line in lines] == [
        "error[GA419]",
        "  why",
        "  help",
        "  explain",
    ]
    assert "graphaccel run --devices 1 --nnodes 2 --node-rank 1 --rdzv-endpoint" in lines[2]
    return lines[0].removeprefix("error[GA419]: the processes of this job can not meet")


@pytest.mark.parametrize(
    ("options", "variables", "said"),
    [
        ("--nnodes 2 --rdzv-endpoint HOST:29511", {}, " at HOST:29511: REASON, for 1 s"),
        ("--nnodes 2 --node-rank 1 --master-addr HOST", {}, " at HOST:29500: REASON, for 1 s"),
        (
            "",
            {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "HOST"},
            " at HOST:29500: REASON, for 1 s",
        ),
        ("--nnodes 2 --node-rank 0 --master-addr HOST", {}, " at HOST:29500: REASON, for 1 s"),
        ("--nnodes 2 --rdzv-endpoint here:99999", {}, " at here:99999: it is no HOST:PORT"),
        ("--nnodes 2 --rdzv-endpoint here:x", {}, " at here:x: it is no HOST:PORT"),
        ("--nnodes 2", {}, ": nothing says where"),
        ("", {"PET_NNODES": "x"}, "PET_NNODES=x"),
        ("", {"PET_NODE_RANK": "one"}, "PET_NODE_RANK=one"),
    ],
)
def test_a_place_that_is_none(
    options: str,
    variables: dict[str, str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(socket.gaierror) as reason:
        socket.getaddrinfo(NOWHERE, 0)
    flags = options.replace("HOST", NOWHERE).split()
    if "--nnodes" not in flags:
        variables = variables | {"PET_RDZV_CONF": "timeout=1"}
    else:
        flags += ["--rdzv-timeout", "1"]
    variables = {name: value.replace("HOST", NOWHERE) for name, value in variables.items()}
    expected = said.replace("HOST:2", f"{NOWHERE}:2").replace("REASON", str(reason.value.strerror))
    monkeypatch.setattr(os, "environ", _environment(**variables))
    assert main(["run", "--devices", "1", *flags, __file__]) == 1
    assert expected in refused(capsys.readouterr().err)


def test_a_port_that_nobody_opens(script: Path, closed: int) -> None:
    place = f"127.0.0.1:{closed}"
    options = f"--devices 1 --nnodes 2 --node-rank 1 --rdzv-endpoint {place} --rdzv-timeout 1"
    run = _start(*options.split(), script)
    out, error = run.communicate(timeout=LIMIT)
    assert (run.returncode, out) == (1, "")
    assert refused(error) == f" at {place}: Connection refused, for 1 s"


def test_a_port_that_another_program_has(
    taken: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "environ", _environment())
    place = f"127.0.0.1:{taken}"
    options = f"run --devices 1 --nnodes 2 --node-rank 0 --rdzv-endpoint {place} {__file__}"
    assert main(options.split()) == 1
    said = refused(capsys.readouterr().err)
    assert said == f" at {place}: Address already in use, on the first machine itself"


def test_a_script_whose_launcher_names_no_place(script: Path) -> None:
    script.write_text(
        "import graphaccel, torch\n"
        "model = torch.nn.Linear(2, 2)\n"
        "graphaccel.optimize(model, torch.optim.SGD(model.parameters()), devices=2, timeout=1)\n"
    )
    ranks = {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    environment = _environment(**ranks, MASTER_ADDR=NOWHERE, MASTER_PORT="29500")
    ended = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True
    )
    assert ended.returncode == 1
    said = f"error[GA419]: the processes of this job can not meet at {NOWHERE}:29500: "
    assert said in ended.stderr
    assert "frame #" not in ended.stderr


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"MASTER_PORT": "29500"}, ": MASTER_ADDR is not set"),
        ({"MASTER_ADDR": "127.0.0.1"}, ": MASTER_PORT is not set"),
        ({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "x"}, " at 127.0.0.1:x: it is no HOST:PORT"),
    ],
)
def test_variables_that_name_no_place(variables: dict[str, str], said: str) -> None:
    with pytest.raises(NoMeeting) as caught, meeting_by_variables(variables, 1):
        pass
    assert f"the processes of this job can not meet{said}" in str(caught.value)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_launcher_that_waits_for_other_machines(
    script: Path, number: signal.Signals
) -> None:
    port = free_port()
    options = f"--devices 1 --nnodes 2 --node-rank 0 --rdzv-endpoint 127.0.0.1:{port}"
    run = _start(*options.split(), script)
    assert run.stderr is not None
    said = run.stderr.readline().split()  # once torch listens, and waits for the other machine
    expected = f"graphaccel: waiting at 127.0.0.1:{port} for the other processes of the job"
    assert " ".join(said) == expected
    run.send_signal(number)
    run.communicate(timeout=30)
    assert run.returncode == 128 + number
