"""Checks where the processes of a job meet before torch connects to it.

torch waits for a connection in C++, where no signal ends it, and reports a failure with the stack
of its library. Here a machine that has to connect to another one waits in Python, and says for
what; only then torch connects.
"""

from __future__ import annotations

import os
import shlex
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, redirect_stderr
from errno import ECONNREFUSED
from io import StringIO
from typing import Any

from graphaccel.errors import NoMeeting

SECONDS = 300
"""How long a machine waits for the first one: those of a cluster start minutes apart."""
_PORT = 29500
_SAY_AFTER, _PAUSE, _ANSWERS = 3.0, 0.5, 5.0


def meet(flags: Sequence[str], command: str) -> str:
    """Check the place that flags and variables of torch's launcher name, and wait for it.

    command: for the error, with everything that several machines need. Returns the place.

    Raises NoMeeting (GA419).
    """
    from torch.distributed import run

    given = _parsed(flags, command)
    several = str(given.nnodes) not in ("1", "1:1")
    if not several and not given.rdzv_endpoint and given.master_port is None:
        return ""  # torch makes it a job of this machine alone
    given.master_port = given.master_port or _PORT  # torchrun sets it after parsing
    endpoint = run.get_rdzv_endpoint(given)
    if given.standalone or given.rdzv_backend not in ("static", "c10d"):
        return str(endpoint)
    if not endpoint:
        raise NoMeeting(place="", cause="nothing says where", command=command)
    config = dict(pair.split("=", 1) for pair in given.rdzv_conf.split(",") if "=" in pair)
    host, port = _place(endpoint, command)
    static = given.rdzv_backend == "static"
    seconds = float(config.get("timeout", config.get("join_timeout", SECONDS)))
    if not (int(given.node_rank) == 0 if static else _hosts(host, config)):
        _wait_at(host, port, seconds, command)
    elif static:  # otherwise any of the processes of this machine may be the one that listens
        _check_own(host, port, seconds, command)
    return f"{host}:{port}"


@contextmanager
def meeting_by_variables(environment: Mapping[str, str], seconds: float) -> Iterator[None]:
    """The same in a process that a launcher gave `MASTER_ADDR` and `MASTER_PORT`; then what torch
    raises meanwhile is NoMeeting (GA419), too."""
    address, port = environment.get("MASTER_ADDR"), environment.get("MASTER_PORT")
    command = (
        f"MASTER_ADDR=FIRST_MACHINE MASTER_PORT={_PORT} RANK=0 WORLD_SIZE=2 python {_script()}"
    )
    if not address or not port:
        missing = "MASTER_PORT" if address else "MASTER_ADDR"
        raise NoMeeting(place="", cause=f"{missing} is not set", command=command)
    place = _place(f"{address}:{port}", command)
    if environment.get("RANK") != "0":
        _wait_at(*place, seconds, command)
    elif "TORCHELASTIC_RUN_ID" not in environment:  # whose agent has chosen a free port
        _check_own(*place, seconds, command)
    with torch_meets(f"{address}:{port}", command):
        yield


@contextmanager
def torch_meets(
    place: str, command: str, connected: Callable[[], bool] = lambda: False
) -> Iterator[None]:
    """Raise NoMeeting (GA419) for what torch raises where processes do not meet; say that it waits.

    connected: whether the processes have met, where the block goes on after that.
    """
    from torch.distributed import DistError
    from torch.distributed.elastic.rendezvous.api import RendezvousError

    def say() -> None:
        if not connected():
            line = f"at {place} for the other processes of the job"
            print(f"graphaccel: waiting    {line}", file=sys.stderr)

    timer = threading.Timer(_SAY_AFTER, say)
    timer.daemon = True
    if place:
        timer.start()
    try:
        yield
    except (DistError, RendezvousError, ValueError) as error:
        cause = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise NoMeeting(place=place, cause=cause, command=command) from None
    finally:
        timer.cancel()


def _parsed(flags: Sequence[str], command: str) -> Any:
    """Flags and variables as torch's launcher reads them."""
    from torch.distributed import run

    said = StringIO()
    try:
        with redirect_stderr(said):
            given = run.get_args_parser().parse_args([*flags, "script"])
            run.parse_min_max_nnodes(str(given.nnodes))
            int(given.node_rank)
            return given
    except (SystemExit, ValueError, RuntimeError) as error:
        text = said.getvalue() if isinstance(error, SystemExit) else str(error)
        cause = (
            (text.strip() or "torch does not read its flags").splitlines()[-1].split("error: ")[-1]
        )
        variables = [f"{k}={v}" for k, v in sorted(os.environ.items()) if k.startswith("PET_")]
        cause = " ".join([cause, *(f"({', '.join(variables)})",)] if variables else [cause])
        raise NoMeeting(place="", cause=cause, command=command) from None


def _place(endpoint: str, command: str) -> tuple[str, int]:
    """Host and port of `HOST:PORT`; torch's port where there is none. Raises NoMeeting (GA419)."""
    host, colon, port = endpoint.strip().rpartition(":")
    if not colon:
        host, port = port, str(_PORT)
    if not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        cause = "it is no HOST:PORT with a port up to 65535"
        raise NoMeeting(place=endpoint, cause=cause, command=command)
    return host.strip("[]"), int(port)


def _wait_at(host: str, port: int, seconds: float, command: str) -> None:
    """Wait until something listens there. Raises NoMeeting (GA419) where nothing does in time."""

    def connect() -> None:
        seconds_each = max(1.0, min(_ANSWERS, seconds))
        with closing(socket.create_connection((host, port), timeout=seconds_each)) as tried:
            if tried.getsockname() == tried.getpeername():  # its own port by chance
                raise ConnectionRefusedError(ECONNREFUSED, os.strerror(ECONNREFUSED))

    _until_done(connect, f"{host}:{port}", seconds, command)


def _check_own(host: str, port: int, seconds: float, command: str) -> None:
    """Raise NoMeeting (GA419) where the first machine can not listen at its port, or the place is
    not on it. Its own name may be known later than it runs."""

    def listen() -> None:
        with closing(socket.socket()) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("", port))
            if not _is_here(host):  # an address outside that leads here
                listener.listen()
                listener.settimeout(_ANSWERS)
                socket.create_connection((host, port), timeout=_ANSWERS).close()
                listener.accept()[0].close()

    _until_done(listen, f"{host}:{port}", seconds, command, socket.gaierror)


def _until_done(
    action: Callable[[], None],
    endpoint: str,
    seconds: float,
    command: str,
    passing: type[OSError] = OSError,
) -> None:
    """Try an action until it works; passing: what may pass. Raises NoMeeting (GA419)."""
    started = time.monotonic()
    said = False
    while True:
        try:
            return action()
        except OSError as error:
            cause, passes = error.strerror or str(error), isinstance(error, passing)
        waited = time.monotonic() - started
        if not passes or waited >= seconds:
            cause += f", for {seconds:.0f} s" if passes else ", on the first machine itself"
            raise NoMeeting(place=endpoint, cause=cause, command=command)
        if waited >= min(_SAY_AFTER, seconds / 2) and not said:
            said = True
            line = f"for {endpoint}, at most {seconds:.0f} s: {cause}"
            print(f"graphaccel: waiting    {line}", file=sys.stderr)  # of any rank
        time.sleep(_PAUSE)


def _hosts(host: str, config: Mapping[str, str]) -> bool:
    """Whether this machine is the one that listens, of those that number themselves."""
    said = config.get("is_host", "").lower()
    return said in ("1", "true", "t", "yes", "y") if said else _is_here(host)


def _is_here(host: str) -> bool:
    """Whether a name or address is one of this machine's."""
    try:
        addresses = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    for family, kind, protocol, _, address in addresses:
        with closing(socket.socket(family, kind, protocol)) as tried:
            try:
                tried.bind(address)
                return True
            except OSError:
                continue
    return False


def example(devices: int, script: str) -> str:
    """A command line with everything that several machines need."""
    return (
        f"graphaccel run --devices {devices} --nnodes 2 --node-rank 1 "
        f"--rdzv-endpoint FIRST_MACHINE:{_PORT} {script}"
    )


def _script() -> str:
    return shlex.quote(sys.argv[0]) if sys.argv[0].endswith(".py") else "train.py"
