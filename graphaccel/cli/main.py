"""Parses the command line: `graphaccel plan | run | train | tokenize | calibrate | doctor | ...`.

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
from typing import TypeAlias

from graphaccel import __version__
from graphaccel.cli.bench import add_benchmark
from graphaccel.cli.output import drop_output, flushed
from graphaccel.cli.parser import Parser
from graphaccel.cli.pin_options import add_pins, pin_pairs, pins_of
from graphaccel.cli.train import add_train
from graphaccel.cli.values import (
    NOTHING_FITS,
    code_or_target,
    contradiction_of,
    machines,
    output_file,
    price,
    sweep_sizes,
    target,
    whole_number,
)
from graphaccel.errors import (
    BadCluster,
    BatchNotDivisible,
    GraphAccelError,
    InfeasiblePlan,
    UnknownDevice,
)
from graphaccel.garbage import importing
from graphaccel.planner.plan.option_values import byte_count, positive
from graphaccel.progress import print_styled
from graphaccel.runtime.first_error import said_by_first

INTERRUPTED = 130  # 128 + SIGINT
CLOSED_PIPE = 141  # 128 + SIGPIPE
_EXIT_CODES = {UnknownDevice: 2, BadCluster: 2, InfeasiblePlan: NOTHING_FITS}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    A GraphAccelError is printed without its traceback, unless GRAPHACCEL_TRACEBACK=full.
    """
    arguments = build_parser().parse_args(argv)
    command: Callable[[argparse.Namespace], int] = arguments.run_command
    try:
        with flushed():
            return command(arguments)
    except BrokenPipeError:
        drop_output()
        return CLOSED_PIPE
    except KeyboardInterrupt:
        print("graphaccel: interrupted", file=sys.stderr)
        return INTERRUPTED
    except GraphAccelError as error:
        if os.environ.get("GRAPHACCEL_TRACEBACK") == "full":
            raise
        if not said_by_first(str(error)):
            print_styled(str(error), {f"error[{error.code}]": "bold red"}, sys.stderr)
        return _exit_code(error)


def _exit_code(error: GraphAccelError) -> int:
    if isinstance(error, BatchNotDivisible) and error.devices:  # whatever is pinned
        return NOTHING_FITS
    return _EXIT_CODES.get(type(error), 1)


Commands: TypeAlias = "argparse._SubParsersAction[Parser]"


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    parser = Parser(
        prog="graphaccel",
        description="Plan how a PyTorch training step is split over devices, and run it so.",
    )
    parser.add_argument("--version", action="version", version=f"graphaccel {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_plan(commands)
    _add_run(commands)
    add_train(commands)
    add_benchmark(commands)
    _add_tokenize(commands)
    _add_calibrate(commands)
    doctor = commands.add_parser("doctor", help="what is installed, what is missing, its cost")
    doctor.set_defaults(run_command=_doctor)
    explain = commands.add_parser(
        "explain",
        help="the long form of an error code; which fusions fit a model; how a plan places tensors "
        "and why its ops run where they run; or the passes in their order",
    )
    explain.add_argument(
        "subject", metavar="CODE|FILE:FUNCTION|PLAN.json|passes", type=code_or_target,
        help="e.g. GA201",
    )  # fmt: skip
    explain.add_argument("--rules", action="store_true", help="the sharding rule of every op")
    explain.add_argument("--strict", action="store_true", help="with --rules: GA301 if one lacks")
    explain.set_defaults(run_command=_explain)
    _add_fusion(commands)
    return parser


def _add_plan(commands: Commands) -> None:
    plan = commands.add_parser(
        "plan",
        help="choose a plan and predict its memory and time; nothing is trained",
        description="Plan a model for devices that need not exist here. Exit code 3: nothing fits.",
    )
    plan.add_argument(
        "target",
        metavar="FILE[:FUNCTION]",
        type=target,
        nargs="?",
        help="FUNCTION() returns (model, example_batch[, loss_fn[, optimizer[, batch_dims]]]); "
        "without it FILE "
        "is run up to its optimize() call, or up to the first training batch",
    )
    plan.add_argument("--devices", type=positive, metavar="N", help="how many (needed)")
    plan.add_argument(
        "--device", metavar="NAME", help="from the catalogue, e.g. h100-80gb; else what is here"
    )
    plan.add_argument("--cluster", type=Path, metavar="FILE", help="devices and links from a file")
    plan.add_argument("--memory", type=byte_count, metavar="SIZE", help="of one device: 80GiB")
    plan.add_argument("--batch", type=positive, metavar="N", help="global batch size")
    _add_outputs(plan)
    add_pins(plan)
    plan.set_defaults(run_command=_plan, usage_error=plan.error)


def _add_outputs(plan: argparse.ArgumentParser) -> None:
    """The options of `plan` that say what to show or save."""
    out = plan.add_argument_group("what to show")
    out.add_argument("--json", type=output_file, metavar="FILE", help="save the plan")
    out.add_argument(
        "--save-cluster",
        type=output_file,
        metavar="FILE",
        help="what was planned for, for --cluster",
    )
    out.add_argument("--html", type=output_file, metavar="FILE", help="save the report as one page")
    out.add_argument("--trace", type=output_file, metavar="FILE", help="save the step for Perfetto")
    out.add_argument("--format", choices=("text", "json"), default="text", help="of the report")
    out.add_argument(
        "--check",
        action="store_true",
        help="compare the captured graph with the model in eager code; GA108 where they differ",
    )
    out.add_argument("--explain", action="store_true", help="decision by decision, what would help")
    out.add_argument(
        "--why-not",
        type=pin_pairs,
        action="append",
        default=[],
        metavar="PINS",
        help='what that plan would be and why it lost: "tensor=4,recompute=none"; several names '
        'with + between: "recompute=h.0+h.1"',
    )
    out.add_argument(
        "--measure",
        type=positive,
        metavar="STEPS",
        help="run the plan here for some steps, and show what it took beside what was predicted",
    )
    out.add_argument(
        "--refine",
        type=output_file,
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
        "--sweep",
        type=sweep_sizes,
        metavar="NAME=VALUES",
        help="a table of plans instead of one: devices=8,16,32, batch=..., sequence=..., or "
        'combinations of pins: "zero=0,1 tensor=1,2"',
    )
    out.add_argument(
        "--price", type=price, metavar="X", help="with --sweep: of one device for an hour"
    )
    out.add_argument(
        "--compare", nargs=2, type=Path, metavar="FILE", help="two saved plans instead of a model"
    )


def _add_tokenize(commands: Commands) -> None:
    tokenize = commands.add_parser(
        "tokenize",
        help="write the tokens of JSON lines to a file, as Megatron-LM does",
        description="Write the tokens of JSON lines to PREFIX.bin and PREFIX.idx, a document a "
        "line. Megatron-LM reads them, and so does graphaccel.data.",
    )
    add = tokenize.add_argument
    add("files", nargs="+", type=Path, metavar="FILE", help="an object with a text in each line")
    add("--tokenizer", type=Path, required=True, metavar="FILE", help="tokenizer.json, or a folder")
    add("--output", type=Path, required=True, metavar="PREFIX", help="of PREFIX.bin, PREFIX.idx")
    add("--key", default="text", metavar="NAME", help="of the text in an object (text)")
    add("--end", metavar="TOKEN", help="put behind each document, e.g. '<|endoftext|>'")
    add("--workers", type=positive, default=1, metavar="N", help="processes (1)")
    add("--skip-bad-lines", action="store_true", help="go on after them; they are counted")
    add("--split-sentences", action="store_true", help="a sequence for each sentence")
    tokenize.set_defaults(run_command=_tokenize)


def _tokenize(arguments: argparse.Namespace) -> int:
    from graphaccel.data.tokenize import tokenize

    written = tokenize(
        arguments.files,
        arguments.tokenizer,
        arguments.output,
        key=arguments.key,
        end=arguments.end,
        workers=arguments.workers,
        skip_bad_lines=arguments.skip_bad_lines,
        split_sentences=arguments.split_sentences,
    )
    print(
        f"{arguments.output}.bin: {written.documents:,} documents, {written.tokens:,} tokens; "
        f"{written.skipped} lines skipped"
    )
    return 0


def _add_calibrate(commands: Commands) -> None:
    calibrate = commands.add_parser(
        "calibrate",
        help="measure this machine, for later plans",
        description="Measure how long a model's ops take here, on N processes at once, and the "
        "messages between them; or its regions in torch and in ONNX Runtime, side by side.",
    )
    calibrate.add_argument("target", metavar="FILE[:FUNCTION]", type=target, help="as for plan")
    calibrate.add_argument(
        "--ort",
        dest="regions",
        action="store_true",
        help="measure regions for ONNX Runtime instead",
    )
    calibrate.add_argument("--devices", type=positive, default=1, metavar="N", help="of the plan")
    calibrate.add_argument("--threads", type=positive, metavar="N", help="of each process")
    calibrate.add_argument("--cluster", type=Path, metavar="FILE", help="add to what is in it")
    calibrate.add_argument("--output", type=output_file, required=True, metavar="FILE")
    add_pins(calibrate, without=("ort",))
    calibrate.set_defaults(run_command=_calibrate, device=None, memory=None, batch=None, ort=None)


def _add_run(commands: Commands) -> None:
    run = commands.add_parser(
        "run",
        help="start a script on N devices (torchrun with less typing)",
        description="Start a script once for each device. Standard output is that of the first.",
    )
    run.add_argument("--devices", type=positive, required=True, metavar="N", help="per machine")
    run.add_argument(
        "--check",
        choices=("first-step", "off"),
        help="before the first step, compare the captured graph with the model in eager code",
    )
    run.add_argument("--all-output", action="store_true", help="show what every rank prints")
    run.add_argument(
        "--log-folder", type=Path, metavar="FOLDER", help="also keep it there, a folder for each"
    )
    run.add_argument(
        "--max-restarts", type=whole_number, metavar="N", help="start all ranks anew when one fails"
    )
    run.add_argument(
        "--checkpoint",
        type=Path,
        metavar="FOLDER",
        help="the folder of graphaccel.save(None, ...) and graphaccel.load(None, ...)",
    )
    run.add_argument("-m", dest="module", action="store_true", help="SCRIPT is a module's name")
    nodes = run.add_argument_group("several machines", "as in torchrun; start it on each")
    nodes.add_argument("--nnodes", type=machines, metavar="N", help="or LEAST:MOST")
    nodes.add_argument("--node-rank", type=whole_number, metavar="I", help="from 0")
    nodes.add_argument("--rdzv-endpoint", metavar="HOST:PORT", help="of the first machine")
    nodes.add_argument(
        "--master-addr", metavar="HOST", help="the same as --rdzv-endpoint HOST:PORT"
    )
    nodes.add_argument("--master-port", type=whole_number, metavar="PORT", help="default: 29500")
    nodes.add_argument("--rdzv-backend", metavar="NAME")
    nodes.add_argument("--rdzv-id", metavar="NAME")
    nodes.add_argument(
        "--rdzv-timeout", type=positive, metavar="SECONDS", help="wait for others; default: 300"
    )
    add_pins(run)
    run.add_argument("script", metavar="SCRIPT")
    run.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="of the script")
    run.set_defaults(run_command=_run, usage_error=run.error)


def _add_fusion(commands: Commands) -> None:
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
    bench.add_argument("--json", type=output_file, metavar="FILE", help="save the figures")
    bench.set_defaults(task="bench")
    fusion.set_defaults(run_command=_fusion)


def torchrun_flags(arguments: argparse.Namespace) -> list[str]:
    """The launcher flags of `run`; empty for one machine.

    If a node rank is given, the user numbers the machines (static rendezvous); otherwise, and with
    restarts, they number themselves.
    """
    names = ("nnodes", "node_rank", "rdzv_endpoint", "rdzv_backend", "rdzv_id")
    said = {name: getattr(arguments, name) for name in names}
    given = {name: value for name, value in said.items() if value not in (None, "")}
    if arguments.master_addr and not arguments.rdzv_endpoint:
        given["rdzv_endpoint"] = f"{arguments.master_addr}:{arguments.master_port or 29500}"
    if arguments.rdzv_timeout is not None:
        seconds = arguments.rdzv_timeout
        given["rdzv_conf"] = f"timeout={seconds},join_timeout={seconds}"
    if arguments.max_restarts:  # in a static rendezvous the ranks of a restart meet the old ones'
        given.pop("node_rank", None)
    if given:
        given.setdefault("rdzv_backend", "static" if "node_rank" in given else "c10d")
        given.setdefault("rdzv_id", "graphaccel")
    if arguments.max_restarts is not None:
        given["max_restarts"] = arguments.max_restarts
    return [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]


def _plan(arguments: argparse.Namespace) -> int:
    axis, sizes = arguments.sweep or ("", ())
    twice = contradiction_of(axis, sizes, arguments)
    if twice is not None:
        arguments.usage_error(twice)
    if axis == "devices":  # the most: what is captured is for all
        arguments.devices = max(sizes)
    if arguments.compare is None and (arguments.target is None or arguments.devices is None):
        arguments.usage_error("FILE[:FUNCTION] and --devices N are needed, or --compare FILE FILE")
    if arguments.cluster is not None and (arguments.device, arguments.memory) != (None, None):
        arguments.usage_error("--cluster FILE says which devices: leave --device and --memory out")
    refined = arguments.refine
    if refined is not None and arguments.measure is None:
        arguments.usage_error("--refine FILE is told what --measure STEPS finds: give both")
    if refined is not None and refined.exists() and arguments.cluster != refined:
        arguments.usage_error(f"{refined} exists: add to it with --cluster {refined}")
    if arguments.sweep is not None:
        _check_sweep(arguments)
    elif arguments.price is not None:
        arguments.usage_error("--price is for the table of --sweep NAME=VALUES: give both")
    if arguments.export is not None:
        beside = {
            "--format json": arguments.format == "json",
            "--explain": arguments.explain,
            "--why-not": arguments.why_not,
            "--measure": arguments.measure is not None and arguments.html is None,
        }
        for option in (option for option, given in beside.items() if given):
            arguments.usage_error(f"--export prints nothing else: leave {option} out")
    with importing("graphaccel.cli.plan"):
        from graphaccel.cli.plan import plan_command

    return plan_command(arguments)


def _check_sweep(arguments: argparse.Namespace) -> None:
    """Refuse what is of one plan."""
    for option in ("json", "trace", "export", "measure", "compare", "explain", "why_not"):
        if getattr(arguments, option):
            flag = option.replace("_", "-")
            arguments.usage_error(f"--sweep prints several plans: leave --{flag} out")


def _calibrate(arguments: argparse.Namespace) -> int:
    with importing("graphaccel.cli.calibrate"):
        from graphaccel.cli.calibrate import calibrate_command

    return calibrate_command(arguments)


def _run(arguments: argparse.Namespace) -> int:
    import json

    from graphaccel.arguments import CHECK, PINS
    from graphaccel.runtime import launch

    most = int((arguments.nnodes or "1").split(":")[-1])
    if arguments.node_rank is not None and arguments.node_rank >= most:
        arguments.usage_error(f"--node-rank {arguments.node_rank} of --nnodes {most}: from 0")
    if arguments.checkpoint is not None:
        os.environ["GRAPHACCEL_CHECKPOINT"] = str(arguments.checkpoint.resolve())
    pins = pins_of(arguments)
    if pins:
        os.environ[PINS] = json.dumps(pins)  # read by optimize() in every process
    if arguments.check is not None:
        os.environ[CHECK] = arguments.check
    argv = [*(["-m"] if arguments.module else []), arguments.script, *arguments.arguments]
    flags = torchrun_flags(arguments)
    given = arguments.all_output, arguments.log_folder
    return launch.run_script(arguments.devices, argv, flags, *given)


def _doctor(_: argparse.Namespace) -> int:
    from graphaccel.cli import doctor

    return doctor.run()


def _fusion(arguments: argparse.Namespace) -> int:
    from graphaccel.cli import fusion as fusion_command

    return fusion_command.run(arguments)


def _explain(arguments: argparse.Namespace) -> int:
    with importing("graphaccel.cli.explain"):
        from graphaccel.cli.explain import explain_command

    return explain_command(arguments.subject, rules=arguments.rules, strict=arguments.strict)


if __name__ == "__main__":
    sys.exit(main())
