"""The command line: `graphaccel plan | run | doctor | explain`.

Exit codes: 0 done (and for `plan`: it fits), 1 an error, 2 bad arguments, 3 no plan fits.
`run` ends with the exit code of the script. Only the chosen command's modules are imported, so
that `--help` answers without loading torch.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from graphaccel import __version__
from graphaccel.errors import GraphAccelError, InfeasiblePlan, UnknownDevice, error_classes

NOTHING_FITS = 3
_EXIT_CODES = {UnknownDevice: 2, InfeasiblePlan: NOTHING_FITS}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code.

    A GraphAccelError is printed without its traceback, unless GRAPHACCEL_TRACEBACK=full.
    """
    arguments = build_parser().parse_args(argv)
    command: Callable[[argparse.Namespace], int] = arguments.run_command
    try:
        return command(arguments)
    except GraphAccelError as error:
        if os.environ.get("GRAPHACCEL_TRACEBACK") == "full":
            raise
        print(error, file=sys.stderr)
        return _EXIT_CODES.get(type(error), 1)


def build_parser() -> argparse.ArgumentParser:
    """The whole grammar of the command line."""
    parser = argparse.ArgumentParser(
        prog="graphaccel",
        description="Plan how a PyTorch training step is split over devices, and run it so.",
    )
    parser.add_argument("--version", action="version", version=f"graphaccel {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_plan(commands)
    _add_run(commands)
    doctor = commands.add_parser("doctor", help="what is installed, what is missing, its cost")
    doctor.set_defaults(run_command=_doctor)
    explain = commands.add_parser("explain", help="the long form of an error code")
    explain.add_argument("code", metavar="CODE", type=_code, help="e.g. GA201")
    explain.set_defaults(run_command=_explain)
    return parser


def _add_plan(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    plan = commands.add_parser(
        "plan",
        help="choose a plan and predict its memory and time; nothing is trained",
        description="Plan a model for devices that need not exist here. Exit code 3: nothing fits.",
    )
    plan.add_argument(
        "target",
        metavar="FILE[:FUNCTION]",
        type=_target,
        help="FUNCTION() returns (model, example_batch[, loss_fn[, optimizer]]); without it FILE "
        "is run up to its optimize() call, or up to the first training batch",
    )
    plan.add_argument("--devices", type=_positive, required=True, metavar="N")
    plan.add_argument(
        "--device", metavar="NAME", help="from the catalogue, e.g. h100-80gb; else what is here"
    )
    plan.add_argument("--memory", type=_bytes, metavar="SIZE", help="of one device: 80GiB")
    plan.add_argument("--batch", type=_positive, metavar="N", help="global batch size")
    plan.add_argument("--json", type=Path, metavar="FILE", help="save the plan")
    pins = plan.add_argument_group("pins", "decide these; the rest is planned around them")
    for name in ("data", "pipeline", "interleave", "microbatches"):
        pins.add_argument(f"--{name}", type=_positive, metavar="N")
    pins.add_argument("--recompute", choices=("none", "some", "all"))
    pins.add_argument("--precision", choices=("fp32", "bf16", "fp16"))
    plan.set_defaults(run_command=_plan)


def _add_run(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    run = commands.add_parser(
        "run",
        help="start a script on N devices (torchrun with less typing)",
        description="Start a script once for each device. Standard output is that of the first.",
    )
    run.add_argument("--devices", type=_positive, required=True, metavar="N", help="per machine")
    run.add_argument("--all-output", action="store_true", help="show what every rank prints")
    run.add_argument("-m", dest="module", action="store_true", help="SCRIPT is a module's name")
    nodes = run.add_argument_group("several machines", "as in torchrun; start it on each")
    nodes.add_argument("--nnodes", metavar="N")
    nodes.add_argument("--node-rank", metavar="I")
    nodes.add_argument("--rdzv-endpoint", metavar="HOST:PORT")
    nodes.add_argument("--rdzv-backend", metavar="NAME")
    nodes.add_argument("--rdzv-id", metavar="NAME")
    run.add_argument("script", metavar="SCRIPT")
    run.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="of the script")
    run.set_defaults(run_command=_run)


def torchrun_flags(arguments: argparse.Namespace) -> list[str]:
    """The launcher flags of `run`; empty for one machine.

    With a node rank given the machines are numbered by the user (static rendezvous); without,
    they number themselves.
    """
    names = ("nnodes", "node_rank", "rdzv_endpoint", "rdzv_backend", "rdzv_id")
    given = {name: getattr(arguments, name) for name in names if getattr(arguments, name)}
    if given:
        given.setdefault("rdzv_backend", "static" if "node_rank" in given else "c10d")
        given.setdefault("rdzv_id", "graphaccel")
    return [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]


def _bytes(text: str) -> int:
    from graphaccel.planner.cluster import parse_bytes

    try:
        size = parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if size == 0:
        raise argparse.ArgumentTypeError(f"{text!r} holds nothing")
    return size


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _target(text: str) -> tuple[Path, str | None]:
    """("model.py", "make_job") of "model.py:make_job"; the function is None without a colon."""
    file, colon, function = text.rpartition(":")
    path, name = (Path(file), function) if colon and function.isidentifier() else (Path(text), None)
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"there is no file {str(path)!r}")
    return path, name


def _code(text: str) -> str:
    if text.upper() not in error_classes():
        known = ", ".join(error_classes())
        raise argparse.ArgumentTypeError(f"there is no error {text!r}; there are {known}")
    return text.upper()


def _plan(arguments: argparse.Namespace) -> int:
    from graphaccel.plan_command import plan_command

    return plan_command(arguments)


def _run(arguments: argparse.Namespace) -> int:
    from graphaccel.runtime import launch

    argv = [*(["-m"] if arguments.module else []), arguments.script, *arguments.arguments]
    flags = torchrun_flags(arguments)
    return launch.run_script(arguments.devices, argv, flags, arguments.all_output)


def _doctor(_: argparse.Namespace) -> int:
    from graphaccel import doctor

    return doctor.run()


def _explain(arguments: argparse.Namespace) -> int:
    package = Path(__file__).parent
    folders = (package / "docs_errors", package.parent / "docs" / "errors")  # wheel, checkout
    pages = [folder / f"{arguments.code}.md" for folder in folders]
    page = next(page for page in pages if page.is_file())
    print(page.read_text(encoding="utf-8").rstrip())
    return 0


if __name__ == "__main__":
    sys.exit(main())
