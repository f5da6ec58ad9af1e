"""Predictions against published training runs, without hardware.

    python -m benchmarks.validation [--sources vTrain,sc21] [--least-devices 9] [--limit N] [--fit]

Every run of `benchmarks/validation/data/*.csv` that can be predicted (others are counted, with the
reason) goes through the path of any user's model: built on the meta device, captured, laid out on
the cluster of the catalogue with the published decisions pinned, and with the kernels and the state
that its system had (`systems`). `--fit` says which shares of a device's peak the runs support,
and the error of each source with those that the others support (`fit`). `--ranks` finds the place
of published meshes among all that our search has, until so many minutes are over. `--unseen` are
runs in `data/unseen`, of models that no other row has: nothing is fitted on them, and their figures
are in `benchmarks/results/unseen.json`. `--rows FILE ...` predicts runs of your own, tables with
those of the columns `rows.COLUMNS` that you have; `--out FILE` keeps what is found.

Prints and writes `benchmarks/results/validation.json`: error of the step time by source, by grid of
runs of one model on one number of devices the rank correlation (Spearman) and the regret (how much
slower than the best run is the one that is predicted to be best; the same of predictions corrected
on the grid's own times, `grids`), error of the peak memory where it was published, and runs that
are wrongly said not to fit. Runs of earlier calls that are not predicted again are kept.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.shared.common import RESULTS
from benchmarks.validation import fit
from benchmarks.validation.grids import ranking
from benchmarks.validation.processes import results
from benchmarks.validation.ranked import fastest, ranks
from benchmarks.validation.rows import FEWER_BITS, FOLDER, Run, document, read, reported

RESULT, UNSEEN = RESULTS / "validation.json", RESULTS / "unseen.json"
_GRID = 5  # runs of one model on one number of devices that are ranked


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--sources", default="", help="parts of sources' names, by commas")
    parser.add_argument("--least-devices", type=int, default=1, metavar="N")
    parser.add_argument("--limit", type=int, metavar="N", help="at most so many runs")
    parser.add_argument("--fit", action="store_true", help="shares of the peaks, and left out")
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="at once")
    parser.add_argument(
        "--ranks", type=float, metavar="MINUTES", help="of the fastest runs' meshes"
    )
    parser.add_argument("--summary", action="store_true", help="of what is known; predict nothing")
    parser.add_argument("--unseen", action="store_true", help="runs that nothing is fitted on")
    parser.add_argument("--rows", nargs="+", type=Path, metavar="FILE", help="runs of your own")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="of --rows: what is found, as JSON"
    )
    return parser


def main() -> None:
    parser = _parser()
    args = parser.parse_args()
    if args.rows and (args.fit or args.unseen or args.summary or args.ranks is not None):
        parser.error("--rows predicts runs of your own: nothing is fitted or ranked with them")
    if args.out and not args.rows:
        parser.error("--out is of --rows")
    folder, result = (FOLDER / "unseen", UNSEEN) if args.unseen else (FOLDER, RESULT)
    files = sorted(folder.glob("*.csv"))
    if args.rows:
        files, result = args.rows, args.out
    try:
        rows = [row for file in files for row in read(file)]
    except (OSError, ValueError) as error:
        parser.error(str(error))
    left_out = Counter(row for row in rows if isinstance(row, str))
    wanted = args.sources.split(",")
    runs = [
        row
        for row in rows
        if isinstance(row, Run)
        and row.devices >= args.least_devices
        and any(part in row.source for part in wanted)
    ]
    if args.ranks is not None:
        _rank([r for r in runs if r.microbatch and r.interleave], 60 * args.ranks)
        return
    runs.sort(key=_order)
    chosen = [] if args.summary else runs[: args.limit]
    whole = len(chosen) == sum(isinstance(row, Run) for row in rows)
    known: dict[str, Any] = {}
    if not args.rows and result.exists() and not whole:
        known = json.loads(result.read_text())["runs"]
    samples: list[fit.Sample] = []
    most = max((run.devices for run in runs), default=1)
    for run, found, sample in results(chosen, most, args.processes):
        known[_key(run)] = found
        if sample is not None:
            samples.append(sample)
        print(_line(found), flush=True)
    samples = sorted(samples, key=lambda s: _key(s.run)) if args.fit and not args.unseen else []
    found_shares = fit.fitted(samples) if samples else None
    if not known:
        said = "".join(f"\n  {n} rows: {why}" for why, n in left_out.most_common())
        parser.exit(1, f"none of {len(rows)} rows is a run that can be predicted{said}\n")
    body = _body(result, known, left_out, len(rows), found_shares if whole else None)
    if result is not None:
        result.write_text(json.dumps(body, indent=1, sort_keys=True) + "\n")
    print(text(body))
    if found_shares is not None:
        print(fit.text(found_shares))


def _rank(runs: Sequence[Run], seconds: float) -> None:
    """The place of the fastest runs' meshes among all, into the results as they are found; those
    that are there already are kept."""
    known = json.loads(RESULT.read_text()).get("ranks", {}) if RESULT.exists() else {}
    left = [run for run in fastest(runs) if _place(run) not in known]
    for run, found in ranks(left, seconds):
        result = json.loads(RESULT.read_text())
        known[_place(run)] = {"seconds": run.seconds, **found}
        RESULT.write_text(json.dumps({**result, "ranks": known}, indent=1, sort_keys=True) + "\n")
        print(_place_text(_place(run), found), flush=True)


def _place(run: Run) -> str:
    """A name for what is ranked, by which results know it."""
    axes = f"{run.data} x {run.tensor} x {run.pipeline} x {run.context}"
    experts = f" experts {run.expert}" if run.expert > 1 else ""
    what = f"{run.name}, batch {run.batch} x {run.sequence}, {run.devices} {run.device}"
    return f"{run.reported}: {what}, {axes}{experts}"


def _place_text(name: str, found: Mapping[str, Any]) -> str:
    if "refused" in found:
        return f"{name}: {found['refused']}"
    share = 100 * found["faster"] / found["meshes"]
    return f"{found['faster']:5} of {found['meshes']:7,} meshes are faster ({share:.2f} %)  {name}"


def _order(run: Run) -> tuple[object, ...]:
    """Runs of one model and layout together, and those that differ in what they took alone."""
    axes = run.tensor, run.context, run.devices, run.expert, run.pipeline, run.interleave
    return str(run.shape), run.device, *axes, run.microbatch, run.batch, run.products, run.zero


def _key(run: Run) -> str:
    axes = (run.data, run.tensor, run.pipeline, run.context, run.interleave, run.microbatch)
    shape = (run.layers, run.hidden, run.heads, run.sequence, run.batch, run.recompute, run.zero)
    return " ".join(map(str, (run.source, run.name, run.device, *shape, *axes, run.seconds)))


def _error(run: dict[str, Any]) -> float:
    return run["predicted_seconds"] / run["seconds"] - 1


def _line(run: dict[str, Any]) -> str:
    axes = f"{run['data']} x {run['tensor']} x {run['pipeline']} x {run['context']}"
    head = f"{run['name'][:24]:24} {run['devices']:6} {axes:18}"
    if "refused" in run:
        return f"{head} {run['refused']}"
    times = f"{run['predicted_seconds']:9.3f} s for {run['seconds']:9.3f} s"
    return f"{head} {times} {100 * _error(run):+7.1f} %  {run['verdict']}"


def summary(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Figures of the runs, all of them and by source; by grid the ranking."""
    done = [run for run in runs if "refused" not in run]
    by_source: dict[str, list[dict[str, Any]]] = defaultdict(list)
    grids: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for run in done:
        by_source[reported(document(run["source"]), run["products"])].append(run)
        grids[run["group"]].append(run)
    ranked = {name: grid for name, grid in grids.items() if len(grid) >= _GRID}
    return {
        "predicted": len(done),
        "refused": len(runs) - len(done),
        "verdicts": dict(Counter(run["verdict"] for run in done)),
        "sources": {name: _figures(found) for name, found in sorted(by_source.items())},
        "mean_of_sources": _mean(by_source, fewer_bits=False),
        "mean_of_eight_bits": _mean(by_source, fewer_bits=True),
        "grids": {name: ranking(grid) for name, grid in sorted(ranked.items())},
        "apart": _apart(done),
    }


_OWN = ("source", "group", "seconds", "memory", "assumed", "predicted_seconds", "predicted_memory",
        "verdict", "parts", "name")  # fmt: skip
_APART = 1.2  # how much slower the slowest of equal runs is, beyond which they are named


def _apart(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Runs that differ in nothing that is published but their times: how much slower the slowest
    is, and the least mean error that any one prediction of them has."""
    same: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for run in runs:
        same[json.dumps({k: v for k, v in run.items() if k not in _OWN})].append(run)
    found = {}
    for each in same.values():
        times = [run["seconds"] for run in each]
        if max(times) > _APART * min(times):
            one = each[0]
            axes = f"{one['data']} x {one['tensor']} x {one['pipeline']} x {one['context']}"
            name = (
                f"{one['name']}, {one['devices']} {one['device']}, {axes}, experts {one['expert']}"
            )
            name += f", batch {one['batch']}{FEWER_BITS.get(one['products'], '')}"
            least = min(statistics.mean(abs(t / s - 1) for s in times) for t in times)
            found[name] = {
                "runs": len(each),
                "slowest": max(times) / min(times),
                "least_mean_absolute": least,
            }
    return dict(sorted(found.items()))


def _mean(by_source: Mapping[str, Sequence[dict[str, Any]]], *, fewer_bits: bool) -> float:
    """Of the sources' errors, each counting the same; 0 where there is none."""
    few = tuple(FEWER_BITS.values())
    chosen = [runs for name, runs in by_source.items() if name.endswith(few) == fewer_bits]
    return statistics.fmean([_figures(r)["mean_absolute"] for r in chosen]) if chosen else 0.0


def _figures(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    errors = [_error(run) for run in runs]
    memory = [run["predicted_memory"] / run["memory"] - 1 for run in runs if run["memory"]]
    figures = {
        "runs": len(runs),
        "mean_absolute": statistics.mean(map(abs, errors)),
        "bias": statistics.mean(errors),
        "worst": max(errors, key=abs),
    }
    if memory:
        figures["memory_mean_absolute"] = statistics.mean(map(abs, memory))
    return figures


def text(result: dict[str, Any]) -> str:
    """The summary as lines."""
    said = result["summary"]
    lines = [
        f"{said['predicted']} runs predicted, {said['refused']} refused; "
        f"{sum(result['left_out'].values())} of {result['rows']} rows left out",
        *(f"{n} left out: {why}" for why, n in result["left_out"].items()),
        "memory: " + ", ".join(f"{n} {verdict}" for verdict, n in said["verdicts"].items()),
    ]
    for name, f in said["sources"].items():
        memory = f.get("memory_mean_absolute")
        lines.append(
            f"{f['runs']:5} runs  mean |error| {100 * f['mean_absolute']:5.1f} %  bias "
            f"{100 * f['bias']:+6.1f} %  worst {100 * f['worst']:+7.1f} %"
            + ("" if memory is None else f"  memory {100 * memory:5.1f} %")
            + f"  {name}"
        )
    means = {
        "the sources": "mean_of_sources",
        "those with matmuls in 8 or 4 bits": "mean_of_eight_bits",
    }
    lines += [
        f"mean over {of}: {100 * said[name]:.1f} %" for of, name in means.items() if said[name]
    ]
    for name, grid in said["grids"].items():
        corrected = "".join(
            f", by a {kind} {one['spearman']:.2f} {100 * one['regret']:.1f} %"
            for kind, one in grid.get("corrected", {}).items()
        )
        lines.append(
            f"{grid['runs']:5} runs  Spearman {grid['spearman']:5.2f}  regret "
            f"{100 * grid['regret']:5.1f} %{corrected}  {name}"
        )
    lines += [
        f"{one['runs']:5} runs of the same, the slowest {one['slowest']:.2f} x the fastest: no one "
        f"prediction is off by less than {100 * one['least_mean_absolute']:.0f} %  {name}"
        for name, one in said.get("apart", {}).items()
    ]
    lines += [_place_text(name, found) for name, found in result.get("ranks", {}).items()]
    return "\n".join(lines)


def _body(
    file: Path | None,
    known: dict[str, Any],
    left_out: Counter[str],
    rows: int,
    shares: dict[str, Any] | None,
) -> dict[str, Any]:
    """What a file has of runs. shares: of a fit of all; None keeps those that are there."""
    ours = file in (RESULT, UNSEEN)
    before = json.loads(file.read_text()) if file is not None and ours and file.exists() else {}
    return {
        "name": "validation",
        "ranks": before.get("ranks", {}),
        "command": "python -m benchmarks.validation"
        + (" --unseen" if file == UNSEEN else "" if ours else " --rows"),
        "rows": rows,
        "left_out": dict(left_out.most_common()),
        "fit": shares or before.get("fit"),
        "summary": summary(list(known.values())),
        "runs": known,
    }


if __name__ == "__main__":
    main()
