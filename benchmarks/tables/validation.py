"""Tables of predictions beside published and measured runs."""

from __future__ import annotations

import re
from collections import defaultdict
from statistics import fmean, median
from typing import Any


def validation_table(result: dict[str, Any]) -> str:
    """Markdown: how far predictions of published runs are off, a row a source; with the source left
    out where `--fit` was asked (`result["fit"]`)."""
    said = result["summary"]
    apart = (result.get("fit") or {"sources": {}})["sources"]
    more = " left out |" if apart else ""
    rows = [
        f"| source | runs | step time off by | bias |{more} memory off by |",
        "|---" * (6 if apart else 5) + "|",
    ]
    for name, found in said["sources"].items():
        memory = found.get("memory_mean_absolute")
        told = "" if memory is None else f"{100 * memory:.1f} %"
        left = apart.get(name, {}).get("left_out")
        known = "" if left is None else f"{100 * left:.1f} %"
        own = f" {known} |" if apart else ""
        rows.append(
            f"| {_source(name)} | {found['runs']} | {100 * found['mean_absolute']:.1f} % "
            f"| {100 * found['bias']:+.1f} % |{own} {told} |"
        )
    verdicts = said["verdicts"]
    text = (
        f"{said['predicted']} runs; off by {100 * said['mean_of_sources']:.1f} % on average over "
        f"the sources, with matmuls in 8 bits by {100 * said['mean_of_eight_bits']:.1f} %. That "
        "they fit is called "
        + ", ".join(f"{kind} for {n}" for kind, n in sorted(verdicts.items(), key=lambda v: -v[1]))
        + "."
    )
    grids, ranks = _grids(said.get("grids", {})), _places(result.get("ranks", {}))
    return "\n".join([*rows, "", text, *_left_out(apart), *grids, *ranks, ""])


_RANKED, _REGRET = 0.9, 0.03  # bars of each grid: at least, at most


def _grids(grids: dict[str, dict[str, Any]]) -> list[str]:
    """How many of the grids are ranked well, and when corrected on their own times
    (`benchmarks/validation/grids.py`); nothing where there are none."""
    if not grids:
        return []

    def well(one: dict[str, Any]) -> bool:
        return one["spearman"] >= _RANKED and one["regret"] <= _REGRET

    every = grids.values()
    ranked = sum(one["spearman"] >= _RANKED for one in every)
    chosen = sum(one["regret"] <= _REGRET for one in every)
    text = (
        f"Of {len(grids)} grids, runs of one model on as many devices, {ranked} have a Spearman of "
        f"{_RANKED} or more, {chosen} a regret of {100 * _REGRET:.0f} % or less, "
        f"{sum(map(well, every))} both."
    )
    missed = [one["corrected"] for one in every if "corrected" in one and not well(one)]
    for kind in ("line", "parabola"):
        known = [one[kind] for one in missed if kind in one]
        text += (
            f" Of the {len(known)} that miss one and can be corrected by a {kind} fitted on their "
            f"own times, {len(known) - sum(map(well, known))} still do then."
        )
    return ["", text]


def _places(ranks: dict[str, dict[str, Any]]) -> list[str]:
    """Markdown: the place of published meshes among ours; nothing where none was looked for."""
    rows = []
    for name, one in ranks.items():
        source, _, what = name.partition(": ")
        told = one.get("refused", "")
        if not told:
            share = 100 * one["faster"] / one["meshes"]
            told = f"{one['faster']} of {one['meshes']:,} ({share:.2f} %)"
        rows.append(f"| {_source(source)} | {what} | {told} |")
    if not rows:
        return []
    head = "Of the fastest run of a source, a model and a number of devices, how many of our meshes"
    return ["", f"{head} fit and are faster:", "",
            "| source | run | meshes that are faster |", "|---|---|---|", *rows]  # fmt: skip


_FEWER_BITS = (" in 8 bits", " in 4 bits")
_BAR = 0.1  # of the mean error of a step's time, of a source that had no say


def _left_out(sources: dict[str, dict[str, Any]]) -> list[str]:
    """What is to be said of errors with the source left out; nothing where there are none."""
    known = {name: one for name, one in sources.items() if one["left_out"] is not None}
    if not known:
        return []
    kinds = [
        [one["left_out"] for name, one in known.items() if name.endswith(_FEWER_BITS) == fewer]
        for fewer in (False, True)
    ]
    means = [f"{100 * sum(kind) / len(kind):.1f} %" if kind else "none" for kind in kinds]
    rows = sum(one["left_out"] for one in known.values()) / len(known)
    many = sum(one["runs"] for one in known.values())
    runs = sum(one["runs"] * one["left_out"] for one in known.values()) / many
    over = {name: one for name, one in known.items() if one["left_out"] > _BAR}
    lines = [
        "",
        f"Left out: {means[0]} on average over the sources, {means[1]} with matmuls in 8 or 4 "
        f"bits; {100 * rows:.1f} % over all rows of the table, {100 * runs:.1f} % over all runs. "
        f"Against a bar of {100 * _BAR:.0f} %: {len(known) - len(over)} of {len(known)} rows are "
        "within it" + (", above it are:" if over else "."),
    ]
    if over:
        lines.append("")
    for name, one in over.items():
        own = f", without its {' and '.join(one['without'])}" if one["without"] else ""
        lines.append(
            f"- {_source(name)}: {100 * one['left_out']:.1f} % over {one['runs']} runs{own}"
        )
    return lines


def _source(name: str) -> str:
    """Without what it is in brackets."""
    return re.sub(r" \(.*\)", "", name)


def unseen_table(result: dict[str, Any]) -> str:
    """Markdown: how far runs are off of models that nothing is fitted on, a row a model and device
    (`unseen.json`)."""
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for run in result["runs"].values():
        error = run["predicted_seconds"] / run["seconds"] - 1
        found[run["name"], run["device"]].append(error)
    rows = ["| model | device | runs | step time off by | bias | worst |", "|---" * 6 + "|"]
    rows += [
        f"| {model} | {device} | {len(errors)} | {100 * fmean(map(abs, errors)):.1f} % "
        f"| {100 * fmean(errors):+.1f} % | {100 * max(errors, key=abs):+.1f} % |"
        for (model, device), errors in sorted(found.items())
    ]
    every = [abs(error) for errors in found.values() for error in errors]
    within = sum(error <= 0.1 for error in every)
    text = (
        f"{len(every)} runs, off by {100 * fmean(every):.1f} % on average, half of them by no more "
        f"than {100 * median(every):.1f} %; {within} are within 10 %."
    )
    return "\n".join([*rows, "", text, ""])


def predicted_table(result: dict[str, Any]) -> str:
    """Markdown: steps predicted after `graphaccel calibrate`, and run (`predicted.json`)."""
    rows = ["| model | processes | plan | predicted | measured | off by |", "|---" * 6 + "|"]
    rows += [
        f"| {row['model']} | {row['processes']} | {row['plan']}{'' if row['pins'] else ' (own)'} "
        f"| {1e3 * row['predicted']:.0f} ms | {1e3 * row['measured']:.0f} ms "
        f"| {100 * (row['predicted'] / row['measured'] - 1):+.1f} % |"
        for row in result["rows"]
    ]
    order = ", ".join(f"{name} {value:.2f}" for name, value in result["spearman"].items())
    lost = ", ".join(
        f"{name} {100 * value:+.1f} %" for name, value in result["own_choice_loses"].items()
    )
    text = (
        f"Pinned plans are off by {100 * result['mean_error']:.1f} % on average; rank correlation "
        f"of predicted and measured: {order}. The plan that is chosen by itself (*own*), against "
        f"the fastest of those pinned for as many processes: {lost}."
    )
    return "\n".join([*rows, "", text, ""])
