"""Restarts the script as N processes under torchrun, which starts and watches the ranks.

`ensure_launched` restarts a plainly started script (`python train.py`) once; `graphaccel run` calls
`launch` directly. Both end in torch's own launcher, run inside this process so that a failing rank
becomes one line and an exit code instead of the launcher's traceback.
"""

from __future__ import annotations

import builtins
import logging
import multiprocessing
import os
import shlex
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from graphaccel.errors import GraphAccelError, GraphMisuse, NeedsLauncher, TooManyDevices
from graphaccel.runtime.rendezvous import example, meet, torch_meets

PROCESSES_PER_CORE = 4
"""CPU ranks share cores; with more than this, gloo times out before the job progresses."""

STOPPED = 75
"""Exit code of a run that was asked to stop (SIGTERM) and saved: EX_TEMPFAIL, "try later"."""
STOPPED_FILE = "GRAPHACCEL_STOPPED"
"""Environment variable with a file that a rank creates when it ends in this way."""

_STARTED = "GRAPHACCEL_LAUNCHED"
_TETHER = Path(__file__).with_name("tether.py")
_ALL_OUTPUT = "GRAPHACCEL_ALL_OUTPUT"
_HANDLED = 2.0
"""Seconds that a signal is given to reach its handler."""


def ensure_launched(devices: int, world: int | None = None) -> None:
    """Returns in a process that is one of `devices` ranks, or does not return at all.

    world: size of the process group that the script joined itself, if it did.

    Without a launcher (no WORLD_SIZE) and with `devices` > 1 the whole program is restarted under
    torch's launcher: what the script did before this call is repeated by every rank.

    Raises:
        TooManyDevices: more devices than this machine has (GA205).
        NeedsLauncher: this program cannot be restarted: notebook, REPL, stdin (GA403).
        GraphMisuse: a launcher has started another number of processes (GA407).
    """
    if devices <= 1:
        return
    started = os.environ.get("WORLD_SIZE") if world is None else world
    if started is not None:
        if int(started) != devices:
            raise GraphMisuse(
                what=f"devices={devices}, but the launcher started {started} processes",
                help_line=f"leave devices out, or start {devices}:  {_command(devices)}",
            )
        check_devices(int(os.environ.get("LOCAL_WORLD_SIZE", started)))
        return
    devices = _on_this_machine(devices)
    if "torch" in sys.modules:  # otherwise each rank checks: not worth 6 s of imports before exec
        check_devices(devices)
    if not _restartable():
        raise NeedsLauncher(devices=devices, command=_command(devices))
    arguments = ["-m", "graphaccel.runtime.launch", str(devices), sys.executable]
    print(
        f"graphaccel: restarting this script as {devices} processes (as {_command(devices)} does)",
        file=sys.stderr,
    )
    sys.stdout.flush()
    sys.stderr.flush()
    environment = {**os.environ, _STARTED: "1"}
    os.execve(sys.executable, [sys.executable, *arguments, *sys.orig_argv[1:]], environment)


def run_script(
    devices: int,
    argv: Sequence[str],
    torchrun_flags: Sequence[str] = (),
    all_output: bool = False,
    log_folder: Path | None = None,
) -> int:
    """Runs `python *argv` as `devices` processes on this machine and waits.

    argv: a script and its arguments, or options of Python and then those.
    torchrun_flags: further flags of torch's launcher, e.g. ("--nnodes=2", "--node-rank=0", ...);
        without any, the job is this machine alone.
    all_output: show every rank's standard output, not only the first's.
    log_folder: where each rank's output is kept, in a folder of its own.
    Returns the exit code: 0, STOPPED, or that of the first rank that failed (128 + signal when
    killed).

    Raises:
        TooManyDevices: more devices than this machine has (GA205).
        GraphMisuse: there is no such script (GA407).
        NoMeeting: the machines of the job can not connect to each other (GA419).
    """
    if not (argv[0].startswith("-") or os.path.exists(argv[0])):
        raise GraphMisuse(
            what=f"there is no file {argv[0]!r}",
            help_line=f"graphaccel run --devices {devices} train.py",
        )
    return launch(devices, [sys.executable, "-u", *argv], torchrun_flags, all_output, log_folder)


def launch(
    devices: int,
    command: Sequence[str],
    torchrun_flags: Sequence[str] = (),
    all_output: bool = False,
    log_folder: Path | None = None,
) -> int:
    """`run_script` for any command line; `command` starts with the program."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    check_devices(devices)
    # Iteration over sets decides batch order in some scripts: it must be the same on every rank.
    os.environ.setdefault("PYTHONHASHSEED", "0")
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, _cores() // devices)))
    # The agent's store keeps what the ranks of an earlier start wrote: those of a restart would
    # connect to addresses of processes that ended. With this each start has a store of its own.
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    # A rank that is gone is an error of ours; torch warns of each connection to it as well, with
    # the stack of its library.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    logs = tempfile.mkdtemp(prefix="graphaccel_")
    flags = [*_alone(torchrun_flags), *torchrun_flags, f"--nproc-per-node={devices}"]
    flags += [f"--log-dir={log_folder or logs}", "--no-python"]
    stopped = Path(logs) / "stopped"
    os.environ[STOPPED_FILE] = str(stopped)
    # Behind "--" torch does not read an option of the script (`--log`) as a part of one of its own.
    tether = ["--", sys.executable, "-I", "-S", str(_TETHER), str(os.getpid())]
    hidden = devices > 1 and not all_output and os.environ.get(_ALL_OUTPUT) != "1"
    if hidden:
        flags.append("--redirects=" + ",".join(f"{rank}:1" for rank in range(1, devices)))
    if log_folder is not None:  # shown as before, and kept
        shown = [2 if hidden and rank else 3 for rank in range(devices)]
        flags.append("--tee=" + ",".join(f"{rank}:{kind}" for rank, kind in enumerate(shown)))
        os.environ.setdefault("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", " ")
    keep = False
    script = next((shlex.quote(part) for part in command if part.endswith(".py")), "train.py")
    several = example(devices, script)
    try:
        asked = threading.Event()
        with _stop_requests(logs, asked) as signals, _restarts_named(flags, asked):
            place = meet(flags, several)
            with torch_meets(place, several, _started):
                run.main([*flags, *signals, *tether, *command])
        return STOPPED if stopped.exists() else 0
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        code = failure.exitcode
        print(f"graphaccel: rank {rank} ended first, with {_how(code)}", file=sys.stderr)
        keep = hidden and _any_output(logs)
        if keep:
            print(f"graphaccel: what the other ranks printed is in {logs}", file=sys.stderr)
        return code if code > 0 else 128 - code
    except SignalException as error:
        return STOPPED if stopped.exists() else 128 + int(error.sigval)
    finally:
        if not keep:
            shutil.rmtree(logs)


def _how(code: int) -> str:
    """How a process ended, in words."""
    return f"exit code {code}" if code > 0 else f"signal {signal.Signals(-code).name}"


class _Failures(logging.Filter):
    """Of what torch's launcher logs, says in one line which rank failed, where all start anew.

    The failure that ends the run is said by `launch`. Torch's own lines stay where LOGLEVEL is set.
    asked: whether the run is asked to stop; a rank that then ends before it can save is no reason
    to train on.
    """

    def __init__(self, restarts: int, asked: threading.Event, *, alone: bool) -> None:
        super().__init__()
        self._restarts, self._done, self._asked = restarts, 0, asked
        self._place = "" if alone else " of this machine"

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a record is to be logged."""
        known = list(record.args) if isinstance(record.args, tuple) else []
        if str(record.msg).startswith("failed (exitcode") and self._done < self._restarts:
            self._done += 1
            code, rank = int(str(known[0])), known[1]
            if self._asked.is_set():
                self._end(f"rank {rank}{self._place} ended first, with {_how(code)}")
            print(
                f"graphaccel: rank {rank}{self._place} ended first, with {_how(code)}: all ranks "
                f"start anew ({self._done} of {self._restarts} restarts)",
                file=sys.stderr,
            )
        return "LOGLEVEL" in os.environ or record.levelno >= logging.CRITICAL

    def _end(self, ended: str) -> NoReturn:
        """Ends the launcher, which calls this before it starts the ranks anew."""
        from torch.distributed.elastic.multiprocessing.api import SignalException

        print(f"graphaccel: {ended}: asked to stop, so no rank starts anew", file=sys.stderr)
        raise SignalException("asked to stop", signal.SIGTERM)


@contextmanager
def _restarts_named(flags: Sequence[str], asked: threading.Event) -> Iterator[None]:
    """Meanwhile each failure of a rank that is followed by a restart is said in a line."""
    given = [flag.partition("=")[2] for flag in flags if flag.startswith("--max-restarts=")]
    number = (given or [os.environ.get("PET_MAX_RESTARTS", "")])[-1]
    alone = bool(_alone(flags))
    failures = _Failures(int(number) if number.isdigit() else 0, asked, alone=alone)
    logger = logging.getLogger("torch.distributed.elastic.multiprocessing.api")
    logger.addFilter(failures)
    try:
        yield
    finally:
        logger.removeFilter(failures)


def _alone(flags: Sequence[str]) -> list[str]:
    """The flag for a job on this machine alone: without flags and variables about others."""
    several = any(flag.startswith(("--nnodes", "--node-rank", "--rdzv")) for flag in flags)
    names = ("PET_NODE_RANK", "PET_RDZV_ENDPOINT", "PET_RDZV_BACKEND", "PET_MASTER_ADDR")
    several = several or os.environ.get("PET_NNODES", "1") not in ("", "1", "1:1")
    several = several or any(os.environ.get(name) for name in names)
    return [] if several else ["--standalone"]


def _on_this_machine(devices: int) -> int:
    """How many of all ranks this machine starts, where torchrun's variables name several machines.

    Raises GraphMisuse (GA407) where the machines do not divide them.
    """
    nodes = os.environ.get("PET_NNODES", "1")
    if not nodes.isdigit() or int(nodes) <= 1:
        return devices
    if devices % int(nodes):
        raise GraphMisuse(
            what=f"devices={devices}, but PET_NNODES={nodes} machines start the same number each",
            help_line=f"graphaccel run --devices {-(-devices // int(nodes))} train.py",
        )
    return devices // int(nodes)


@contextmanager
def _stop_requests(logs: str, asked: threading.Event) -> Iterator[list[str]]:
    """Meanwhile a SIGTERM is passed on to the ranks, which may save before they end, without the
    launcher's limit of 30 s. Gives the flags that leave this signal to us.

    asked: set then. logs: a folder to remove where there are no ranks yet. Only on Linux, where a
    process can ask for its children.
    """
    if not _children().exists():
        yield []
        return

    def pass_on(number: int, _: object) -> None:
        asked.set()
        ranks = _ranks()
        for rank in ranks:
            with suppress(ProcessLookupError):
                os.killpg(rank, number)
        if not ranks:
            sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, pass_on)
    try:
        with _ended_while_it_waits(logs):
            yield ["--signals-to-handle=SIGINT,SIGHUP,SIGQUIT"]
    finally:
        signal.signal(signal.SIGTERM, before)


def _children() -> Path:
    return Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")


def _ranks() -> list[int]:
    """The processes of the ranks, which have sessions of their own."""
    ranks = []
    for child in map(int, _children().read_text().split()):
        with suppress(ProcessLookupError):
            ranks += [child] if os.getpgid(child) == child else []
    return ranks


def _started() -> bool:
    """Whether ranks run, as far as the system lists them."""
    return not _children().exists() or bool(_ranks())


@contextmanager
def _ended_while_it_waits(logs: str) -> Iterator[None]:
    """Meanwhile SIGTERM and SIGINT end this process also where torch waits for other machines in
    C++: Python calls no handler there, but the number of a signal arrives at a file at once."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def watch() -> None:
        while numbers := os.read(reader, 1):
            if numbers[0] in (signal.SIGTERM, signal.SIGINT) and not _ranks():
                time.sleep(_HANDLED)  # by Python, where it can
                if not _ranks():
                    shutil.rmtree(logs, ignore_errors=True)
                    os._exit(128 + numbers[0])

    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    threading.Thread(target=watch, name="graphaccel-signals", daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(writer)


def available_devices() -> tuple[int, str]:
    """How many ranks this machine can run, and what was counted. Imports torch."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.device_count(), "CUDA devices; CUDA_VISIBLE_DEVICES= uses the CPU"
    cores = _cores()
    counted = f"no CUDA device; {PROCESSES_PER_CORE} processes for each of {cores} CPU cores"
    return cores * PROCESSES_PER_CORE, counted


def check_devices(devices: int) -> None:
    """Raises TooManyDevices (GA205) when this machine cannot run that many ranks."""
    available, where = available_devices()
    if devices > available:
        raise TooManyDevices(asked=devices, available=available, where=where)


def _cores() -> int:
    """CPU cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _any_output(logs: str) -> bool:
    files = [os.path.join(folder, name) for folder, _, names in os.walk(logs) for name in names]
    return any(name.endswith("stdout.log") and os.path.getsize(name) for name in files)


def _restartable() -> bool:
    """Whether `sys.orig_argv` starts this very program again."""
    interactive = hasattr(sys, "ps1") or sys.flags.interactive or hasattr(builtins, "get_ipython")
    piped = sys.argv[0] in ("", "-")
    child = multiprocessing.parent_process() is not None
    return not (interactive or piped or child or _in_pytest() or _STARTED in os.environ)


def _in_pytest() -> bool:
    """Whether pytest started this program: restarted, it would take the place of all tests and
    their output."""
    path = Path(sys.argv[0])
    run = path.name in ("pytest", "py.test") or path.parts[-2:] == ("pytest", "__main__.py")
    return "pytest" in sys.modules and (run or "xdist" in sys.modules)


def _command(devices: int) -> str:
    """The command line that starts this program under the launcher, as typed in a shell."""
    return f"graphaccel run --devices {devices} {_script()}"


def _script() -> str:
    """The script as typed in a shell, or an example of one."""
    notebook = hasattr(builtins, "get_ipython")
    return shlex.quote(sys.argv[0]) if sys.argv[0].endswith(".py") and not notebook else "train.py"


def _main() -> int:
    try:
        return launch(int(sys.argv[1]), sys.argv[2:])
    except GraphAccelError as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(_main())
