"""What graphaccel can train, of lists that others keep.

    python -m benchmarks.coverage [--only PART[:PATTERN] ...] [--settings one,data,...] [--resume]

Each entry of torch's `op_db` (differentiable operators) and `module_db` (`torch.nn`), of
transformers' auto-model classes and of timm and torchvision is run in a small model under each
setting: one device, data 2, microbatches 2, tensor 2, pipeline 2. The loss and every gradient are
compared with plain eager mode's in float64 where the entry can: right, wrong, refused (by an error
of ours, with its code), raw (any other error, or a crash), slow (more than 60 s), random (draws
numbers that a split has others of: it ran, and is not compared), unmeasured (eager mode gives no
gradient, or fails).

Verdicts go to a file of JSON lines as they are found (`--lines`); `--resume` leaves out those that
stand there. At the end benchmarks/results/coverage.json gets them, beside those of entries that
were not run, and docs/coverage.md the table of them (`--table` does nothing else). What the model
libraries need is the extra `coverage`: pip install 'graphaccel[coverage]'.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import subprocess
from pathlib import Path
from typing import Any

from benchmarks.coverage.judge import SETTINGS, ranks_of
from benchmarks.coverage.lanes import Task, run
from benchmarks.coverage.parts import PARTS
from benchmarks.coverage.table import PAGE, page
from benchmarks.shared.common import RESULTS

RESULT = RESULTS / "coverage.json"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=[*PARTS], metavar="PART[:PATTERN]")
    parser.add_argument("--settings", default=",".join(SETTINGS), help="by commas")
    parser.add_argument("--lines", type=Path, default=Path("coverage.jsonl"), metavar="FILE")
    parser.add_argument("--resume", action="store_true", help="go on where FILE stops")
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="entries at once")
    parser.add_argument("--keep", action="store_true", help="write FILE only")
    parser.add_argument("--table", action="store_true", help="write docs/coverage.md; run nothing")
    args = parser.parse_args(arguments)
    if args.table:
        PAGE.write_text(page(json.loads(RESULT.read_text())))
        return
    settings = args.settings.split(",")
    if unknown := set(settings) - set(SETTINGS):
        parser.error(f"no setting {min(unknown)}; there are {', '.join(SETTINGS)}")
    done = _read(args.lines) if args.resume else {}
    if not args.resume:
        args.lines.unlink(missing_ok=True)
    commit = _commit()
    tasks = _tasks(parser, args.only, settings, done)
    for part, name, setting, verdict in run(tasks, args.processes):
        verdict["commit"] = commit
        done[part, name, setting] = verdict
        line = {"part": part, "name": name, "setting": setting, **verdict}
        with args.lines.open("a") as file:
            file.write(json.dumps(line) + "\n")
        said = f"{verdict['outcome']:10} {verdict.get('code', ''):5} {verdict.get('detail', '')}"
        print(f"{part:12} {name:44} {setting:12} {said}", flush=True)
    if not args.keep:
        RESULT.write_text(json.dumps(_body(done), indent=0, sort_keys=True) + "\n")
        PAGE.write_text(page(json.loads(RESULT.read_text())))  # in the order of the file


def _tasks(
    parser: argparse.ArgumentParser, only: list[str], settings: list[str], done: dict[Any, Any]
) -> list[Task]:
    tasks = []
    in_order = sorted(settings, key=ranks_of, reverse=True)  # their captures serve one rank too
    for wanted in only:
        part, _, pattern = wanted.partition(":")
        if part not in PARTS:
            parser.error(f"no part {part}; there are {', '.join(PARTS)}")
        names = PARTS[part].names()
        matching = fnmatch.filter(names, pattern or "*")
        if not matching:
            parser.error(f"no entry of {part} is {pattern}; one of them is {next(iter(names))}")
        for name in matching:
            left = tuple(s for s in in_order if (part, name, s) not in done)
            if left:
                tasks.append((part, name, left))
    return tasks


def _read(path: Path) -> dict[tuple[str, str, str], dict[str, Any]]:
    if not path.exists():
        return {}
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return {(r.pop("part"), r.pop("name"), r.pop("setting")): r for r in rows}


def _body(done: dict[tuple[str, str, str], dict[str, Any]]) -> dict[str, Any]:
    """The known results with the new ones in their place, and where they are from."""
    import torch

    known = json.loads(RESULT.read_text()) if RESULT.exists() else {"verdicts": {}}
    verdicts = known["verdicts"]
    for (part, name, setting), verdict in done.items():
        kept = {k: v for k, v in verdict.items() if k != "seconds"}
        verdicts.setdefault(part, {}).setdefault(name, {})[setting] = kept
    ran = {part for part, _, _ in done}  # the libraries of others need not be installed
    entries = {**known.get("entries", {}), **{p: len(PARTS[p].names()) for p in PARTS if p in ran}}
    return {"torch": torch.__version__, "entries": entries, "verdicts": verdicts}


def _commit() -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


if __name__ == "__main__":
    main()
