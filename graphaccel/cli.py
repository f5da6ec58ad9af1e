"""The command line: `graphaccel plan | run | calibrate | doctor | explain | fusion`.

Exit codes: 0 done (and for `plan`: it fits), 1 an error, 2 bad arguments, 3 no plan fits, 130 ended
by Ctrl-C (`plan` then shows the best so far).
`run` ends with the exit code of the script. Only the chosen command's modules are imported, so
that `--help` answers without loading torch.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from graphaccel import __version__
from graphaccel.errors import (
    BadCluster,
    GraphAccelError,
    InfeasiblePlan,
    UnknownDevice,
    error_classes,
)
from graphaccel.schedule.table import SCHEDULE_NAMES

NOTHING_FITS = 3
INTERRUPTED = 130  # 128 + SIGINT
_EXIT_CODES = {UnknownDevice: 2, BadCluster: 2, InfeasiblePlan: NOTHING_FITS}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code.

    A GraphAccelError is printed without its traceback, unless GRAPHACCEL_TRACEBACK=full.
    """
    arguments = build_parser().parse_args(argv)
    command: Callable[[argparse.Namespace], int] = arguments.run_command
    try:
        return command(arguments)
    except KeyboardInterrupt:
        print("graphaccel: interrupted", file=sys.stderr)
        return INTERRUPTED
    except GraphAccelError as error:
        if os.environ.get("GRAPHACCEL_TRACEBACK") == "full":
            raise
        print(error, file=sys.stderr)
        return _EXIT_CODES.get(type(error), 1)


class _Parser(argparse.ArgumentParser):
    """A parser of options that are written out: the beginning of one of ours may be an option of
    the script that `run` starts."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, **settings)


def build_parser() -> argparse.ArgumentParser:
    """The whole grammar of the command line."""
    parser = _Parser(
        prog="graphaccel",
        description="Plan how a PyTorch training step is split over devices, and run it so.",
    )
    parser.add_argument("--version", action="version", version=f"graphaccel {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_plan(commands)
    _add_run(commands)
    _add_calibrate(commands)
    doctor = commands.add_parser("doctor", help="what is installed, what is missing, its cost")
    doctor.set_defaults(run_command=_doctor)
    explain = commands.add_parser(
        "explain",
        help="the long form of an error code; which fusions fit a model; or why a plan's ops run "
        "where they run",
    )
    explain.add_argument(
        "subject", metavar="CODE|FILE:FUNCTION|PLAN.json", type=_code_or_target, help="e.g. GA201"
    )
    explain.add_argument("--rules", action="store_true", help="the sharding rule of every op")
    explain.add_argument("--strict", action="store_true", help="with --rules: GA301 if one lacks")
    explain.set_defaults(run_command=_explain)
    _add_fusion(commands)
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
        nargs="?",
        help="FUNCTION() returns (model, example_batch[, loss_fn[, optimizer[, batch_dims]]]); "
        "without it FILE "
        "is run up to its optimize() call, or up to the first training batch",
    )
    plan.add_argument("--devices", type=_positive, metavar="N", help="how many (needed)")
    plan.add_argument(
        "--device", metavar="NAME", help="from the catalogue, e.g. h100-80gb; else what is here"
    )
    plan.add_argument("--cluster", type=Path, metavar="FILE", help="devices and links from a file")
    plan.add_argument("--memory", type=_bytes, metavar="SIZE", help="of one device: 80GiB")
    plan.add_argument("--batch", type=_positive, metavar="N", help="global batch size")
    out = plan.add_argument_group("what to show")
    out.add_argument("--json", type=_output, metavar="FILE", help="save the plan")
    out.add_argument(
        "--save-cluster", type=_output, metavar="FILE", help="what was planned for, for --cluster"
    )
    out.add_argument("--html", type=_output, metavar="FILE", help="save the report as one page")
    out.add_argument("--trace", type=_output, metavar="FILE", help="save the step for Perfetto")
    out.add_argument("--format", choices=("text", "json"), default="text", help="of the report")
    out.add_argument(
        "--check",
        action="store_true",
        help="compare the captured graph with the model in eager code; GA108 where they differ",
    )
    out.add_argument("--explain", action="store_true", help="decision by decision, what would help")
    out.add_argument(
        "--why-not",
        type=_pairs,
        action="append",
        default=[],
        metavar="PINS",
        help='what that plan would be and why it lost: "tensor=4,recompute=none"; several names '
        'with + between: "recompute=h.0+h.1"',
    )
    out.add_argument(
        "--measure",
        type=_positive,
        metavar="STEPS",
        help="run the plan here for some steps, and show what it took beside what was predicted",
    )
    out.add_argument(
        "--refine",
        type=_output,
        metavar="FILE",
        help="with --measure: put what the step took into a cluster file, by which later plans "
        "with --cluster FILE are predicted",
    )
    out.add_argument(
        "--export",
        choices=("torchtitan", "megatron", "deepspeed", "accelerate"),
        help="print the plan as the configuration of that system, and nothing else",
    )
    out.add_argument(
        "--compare", nargs=2, type=Path, metavar="FILE", help="two saved plans instead of a model"
    )
    _add_ort(_add_pins(plan))
    plan.set_defaults(run_command=_plan, usage_error=plan.error)


_COUNTS = {
    "data": "parts of the batch",
    "pipeline": "groups of devices that have a part of the layers each",
    "tensor": "devices that share every matrix product",
    "context": "devices that share every sequence",
    "expert": "devices that share the experts of a mixture",
    "interleave": "stages on each pipeline rank",
    "microbatches": "parts of the batch, one after the other",
}
_CHOICES = {
    "sequence": "tensor: shard activations along the sequence between products",
    "scatter-sends": "tensor and pipeline: each rank sends a part of what all have",
    "gather-again": "zero 3: let go of parameters after the forward, gather them again",
}


def _add_pins(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    pins = parser.add_argument_group("pins", "decide these; the rest is planned around them")
    for name, what in _COUNTS.items():
        pins.add_argument(f"--{name}", type=_positive, metavar="N", help=what)
    pins.add_argument(
        "--order",
        type=_names,
        metavar="AXES",
        help="of the mesh axes over the devices, the outermost first, with commas between",
    )
    pins.add_argument(
        "--zero",
        type=int,
        choices=(0, 1, 2, 3),
        help="shard over data: 1 optimizer state, 2 and gradients, 3 and parameters",
    )
    pins.add_argument(
        "--shard",
        type=_positive,
        metavar="N",
        help="zero: shard over groups of N devices of the data axis, replicated over the rest",
    )
    for name, what in _CHOICES.items():
        pins.add_argument(f"--{name}", action=argparse.BooleanOptionalAction, help=what)
    pins.add_argument(
        "--gather-once",
        dest="gather_again",
        action="store_const",
        const="step",
        help="zero 3: gather parameters once a step, hold them for all microbatches",
    )
    pins.add_argument(
        "--cast-once",
        action=argparse.BooleanOptionalAction,
        help="without zero 3: cast parameters to 16 bits once a step, hold them for all "
        "microbatches",
    )
    pins.add_argument(
        "--context-by",
        choices=("heads", "sequence"),
        help="context: in attention each device has some of the heads, or some of the queries",
    )
    pins.add_argument(
        "--accumulation",
        choices=("whole", "shards"),
        help="zero 2 and 3: reduce gradients in the last microbatch, or in each, for less memory",
    )
    pins.add_argument(
        "--recompute",
        type=_recompute,
        metavar="WHAT",
        help="none, some (as much as memory asks for), selective (of every block what memory asks "
        "for), all, or blocks with commas between",
    )
    pins.add_argument("--schedule", choices=SCHEDULE_NAMES, help="of the pipeline")
    pins.add_argument(
        "--cuts",
        type=_names,
        metavar="NODES",
        help="ops after which a stage ends, with commas between, as the report names them",
    )
    pins.add_argument(
        "--bucket-bytes",
        type=_bytes,
        metavar="SIZE",
        help="of the gradients that are summed at once: 25MiB",
    )
    pins.add_argument("--precision", choices=("fp32", "tf32", "bf16", "bf16-params", "fp16", "fp8"))
    pins.add_argument(
        "--compile", choices=("off", "inductor"), help="let Inductor compile the graphs of stages"
    )
    pins.add_argument(
        "--cuda-graphs",
        action=argparse.BooleanOptionalAction,
        help="on GPUs: record the work of each action once, and replay it in every step",
    )
    pins.add_argument(
        "--fusions",
        type=_fusions,
        metavar="WHAT",
        help="fused ops: off, auto, or names with commas between; -NAME takes one away",
    )
    pins.add_argument(
        "--loss-chunk",
        type=_positive,
        metavar="N",
        help="tokens of which a fused head and loss has the logits at a time",
    )
    pins.add_argument(
        "--offload",
        choices=(
            "none",
            "optimizer",
            "activations",
            "optimizer+activations",
            "optimizer+parameters",
            "optimizer+parameters+activations",
        ),
        help="keep optimizer state on the host and step there, large activations until their "
        "backward, and parameters, which are then copied up for each block; by default only where "
        "nothing fits otherwise, or where a step takes less",
    )
    pins.add_argument(
        "--vocab",
        choices=("data", "tensor"),
        help="where embedding and head rest: a shard on each data rank, or split by words",
    )
    pins.add_argument(
        "--stage",
        dest="stages",
        type=_stage,
        action="append",
        metavar="MODULE=N",
        help="the pipeline stage of a module; may be given again",
    )
    return pins


def _add_ort(pins: argparse._ArgumentGroup) -> None:
    pins.add_argument(
        "--ort",
        type=_ort,
        metavar="WHAT",
        help="what ONNX Runtime runs: off, auto (what was measured to be faster), all, or module "
        "paths with commas between",
    )


def _add_calibrate(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    calibrate = commands.add_parser(
        "calibrate",
        help="measure this machine, for later plans",
        description="Measure how long a model's ops take here, on N processes at once, and the "
        "messages between them; or its regions in torch and in ONNX Runtime, side by side.",
    )
    calibrate.add_argument("target", metavar="FILE[:FUNCTION]", type=_target, help="as for plan")
    calibrate.add_argument(
        "--ort",
        dest="regions",
        action="store_true",
        help="measure regions for ONNX Runtime instead",
    )
    calibrate.add_argument("--devices", type=_positive, default=1, metavar="N", help="of the plan")
    calibrate.add_argument("--threads", type=_positive, metavar="N", help="of each process")
    calibrate.add_argument("--cluster", type=Path, metavar="FILE", help="add to what is in it")
    calibrate.add_argument("--output", type=_output, required=True, metavar="FILE")
    _add_pins(calibrate)
    calibrate.set_defaults(run_command=_calibrate, device=None, memory=None, batch=None, ort=None)


def _add_run(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    run = commands.add_parser(
        "run",
        help="start a script on N devices (torchrun with less typing)",
        description="Start a script once for each device. Standard output is that of the first.",
    )
    run.add_argument("--devices", type=_positive, required=True, metavar="N", help="per machine")
    run.add_argument(
        "--check",
        choices=("first-step", "off"),
        help="before the first step, compare the captured graph with the model in eager code",
    )
    run.add_argument("--all-output", action="store_true", help="show what every rank prints")
    run.add_argument("-m", dest="module", action="store_true", help="SCRIPT is a module's name")
    nodes = run.add_argument_group("several machines", "as in torchrun; start it on each")
    nodes.add_argument("--nnodes", metavar="N")
    nodes.add_argument("--node-rank", metavar="I")
    nodes.add_argument("--rdzv-endpoint", metavar="HOST:PORT")
    nodes.add_argument("--rdzv-backend", metavar="NAME")
    nodes.add_argument("--rdzv-id", metavar="NAME")
    _add_ort(_add_pins(run))
    run.add_argument("script", metavar="SCRIPT")
    run.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="of the script")
    run.set_defaults(run_command=_run)


def _add_fusion(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    fusion = commands.add_parser("fusion", help="list, write, check and time fused ops")
    tasks = fusion.add_subparsers(required=True, metavar="TASK")
    tasks.add_parser("list", help="every fusion that is registered").set_defaults(task="list")
    new = tasks.add_parser("new", help="write a file with a working fusion to start from")
    new.add_argument("name", metavar="NAME", help="a Python name; NAME.py is written here")
    new.set_defaults(task="new")
    check = tasks.add_parser("check", help="prove numbers, patterns and sharding; exit 1 if not")
    check.add_argument("names", nargs="+", metavar="NAME|FILE.py", help="or `all`")
    check.set_defaults(task="check")
    bench = tasks.add_parser("bench", help="time fusions against eager and against a copy")
    bench.add_argument("names", nargs="+", metavar="NAME|FILE.py", help="or `all`")
    bench.add_argument("--json", type=_output, metavar="FILE", help="save the figures")
    bench.set_defaults(task="bench")
    fusion.set_defaults(run_command=_fusion)


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


def _output(text: str) -> Path:
    """A file that can be written: said before anything is searched or measured for it."""
    path = Path(text)
    reason = ""
    if path.is_dir():
        reason = "is a folder"
    elif not path.parent.is_dir():
        reason = f"can not be written: there is no folder {str(path.parent)!r}"
    elif not os.access(path if path.exists() else path.parent, os.W_OK):
        reason = "can not be written"
    if reason:
        raise argparse.ArgumentTypeError(f"{text!r} {reason}")
    return path


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    if not all(names):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of names with commas between")
    return names


def _word_or_names(*words: str) -> Callable[[str], str | tuple[str, ...]]:
    """One of `words`, otherwise names."""
    return lambda text: text if text in words else _names(text)


_ort = _word_or_names("off", "auto", "all")
_fusions = _word_or_names("off", "auto")
_recompute = _word_or_names("none", "some", "selective", "all")


def _stage(text: str) -> tuple[str, int]:
    """("transformer.h.3", 1) of "transformer.h.3=1"."""
    module, equals, stage = text.rpartition("=")
    if not equals or not module or not stage.isdecimal():
        raise argparse.ArgumentTypeError(f"a module and its stage, as in h.3=1, not {text!r}")
    return module, int(stage)


def _target(text: str) -> tuple[Path, str | None]:
    """("model.py", "make_job") of "model.py:make_job"; the function is None without a colon."""
    file, colon, function = text.rpartition(":")
    path, name = (Path(file), function) if colon and function.isidentifier() else (Path(text), None)
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"there is no file {str(path)!r}")
    return path, name


_SAID = {"true": True, "false": False}
_NAMED = {
    "order": _names,
    "ort": _ort,
    "fusions": _fusions,
    "recompute": _recompute,
    "cuts": _names,
}


def _pairs(text: str) -> dict[str, Any]:
    """{"pipeline": 4, "recompute": ("h.0", "h.1")} of "pipeline=4,recompute=h.0+h.1"."""
    found: dict[str, Any] = {}
    for part in text.split(","):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not (name and equals and value):
            raise argparse.ArgumentTypeError(f"{part!r} is not like pipeline=4")
        if name in found:
            raise argparse.ArgumentTypeError(f"{name} is there twice in {text!r}")
        if name in _NAMED:
            found[name] = _NAMED[name](value.replace("+", ","))
        elif name == "bucket_bytes":
            found[name] = _bytes(value)
        else:
            found[name] = int(value) if value.lstrip("-").isdecimal() else _SAID.get(value, value)
    return found


def _code_or_target(text: str) -> str | tuple[Path, str | None]:
    """An error code, or a file (and function) that makes a model."""
    return _target(text) if ".py" in text else _code(text)


def _code(text: str) -> str:
    if text.endswith(".json") and Path(text).is_file():
        return text
    if text.upper() not in error_classes():
        known = ", ".join(error_classes())
        raise argparse.ArgumentTypeError(f"there is no error {text!r}; there are {known}")
    return text.upper()


def _plan(arguments: argparse.Namespace) -> int:
    if arguments.compare is None and (arguments.target is None or arguments.devices is None):
        arguments.usage_error("FILE[:FUNCTION] and --devices N are needed, or --compare FILE FILE")
    if arguments.cluster is not None and (arguments.device, arguments.memory) != (None, None):
        arguments.usage_error("--cluster FILE says which devices: leave --device and --memory out")
    refined = arguments.refine
    if refined is not None and arguments.measure is None:
        arguments.usage_error("--refine FILE is told what --measure STEPS finds: give both")
    if refined is not None and refined.exists() and arguments.cluster != refined:
        arguments.usage_error(f"{refined} exists: add to it with --cluster {refined}")
    if arguments.export is not None:
        beside = {
            "--format json": arguments.format == "json",
            "--explain": arguments.explain,
            "--why-not": arguments.why_not,
            "--measure": arguments.measure is not None and arguments.html is None,
        }
        for option in (option for option, given in beside.items() if given):
            arguments.usage_error(f"--export prints nothing else: leave {option} out")
    from graphaccel.plan_command import plan_command

    return plan_command(arguments)


def _calibrate(arguments: argparse.Namespace) -> int:
    from graphaccel.calibrate_command import calibrate_command

    return calibrate_command(arguments)


def _run(arguments: argparse.Namespace) -> int:
    import json

    from graphaccel.arguments import CHECK, PINS
    from graphaccel.plan_command import pins_of
    from graphaccel.runtime import launch

    pins = pins_of(arguments)
    if pins:
        os.environ[PINS] = json.dumps(pins)  # read by optimize() in every process
    if arguments.check is not None:
        os.environ[CHECK] = arguments.check
    argv = [*(["-m"] if arguments.module else []), arguments.script, *arguments.arguments]
    flags = torchrun_flags(arguments)
    return launch.run_script(arguments.devices, argv, flags, arguments.all_output)


def _doctor(_: argparse.Namespace) -> int:
    from graphaccel import doctor

    return doctor.run()


def _fusion(arguments: argparse.Namespace) -> int:
    from graphaccel import fusion_command

    return fusion_command.run(arguments)


def _explain(arguments: argparse.Namespace) -> int:
    if not isinstance(arguments.subject, str):
        if arguments.rules:
            from graphaccel.rules_command import rules_command

            return rules_command(*arguments.subject, strict=arguments.strict)
        from graphaccel import fusion_command

        return fusion_command.explain(*arguments.subject)
    if arguments.subject.endswith(".json"):
        from graphaccel.report.ort import ort_report

        print(ort_report(Path(arguments.subject)), end="")
        return 0
    package = Path(__file__).parent
    folders = (package / "docs_errors", package.parent / "docs" / "errors")  # wheel, checkout
    pages = [folder / f"{arguments.subject}.md" for folder in folders]
    page = next(page for page in pages if page.is_file())
    print(page.read_text(encoding="utf-8").rstrip())
    return 0


if __name__ == "__main__":
    sys.exit(main())
