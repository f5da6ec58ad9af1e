"""docs/coverage.md: figures of each list, and what is not right, with the reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.coverage.judge import SETTINGS
from benchmarks.coverage.parts import PARTS

PAGE = Path(__file__).parents[2] / "docs" / "coverage.md"
_OUTCOMES = ("right", "refused", "random", "raw", "wrong", "slow", "unmeasured")
_LISTED = ("wrong", "raw", "slow", "refused", "unmeasured")

_HEAD = """# Coverage, measured on lists of others

Written by `python -m benchmarks.coverage --table` from `benchmarks/results/coverage.json`; do not
edit. Found with torch {torch} at {commits}.

Each entry is a small model with its loss, compared with plain eager mode on one device: the loss
and every gradient, in float64 where the entry can, within 1e-8 of the largest value of the tensor.
Models run in float64 with their own casts to float32 lifted; those that do not run so, or have over
40 million parameters, run in float32 as they are, within 1e-4 (`float32` in the JSON). Gradients
under 1e-5 of the model's largest are compared with that. A larger difference counts as rounding
where eager mode changes as much by itself: by up to four times what each gradient (or the median
gradient) changes in four runs, or sixteen, with every weight one unit of rounding higher, lower or
as it is. Deep networks with BatchNorm over a few values are such.

| outcome | |
|---|---|
| right | equal |
| refused | an error of graphaccel's own, with its code |
| random | it ran, but draws random numbers, of which a split has others: not compared |
| raw | any other error, or a crash |
| wrong | something differs |
| slow | more than 60 s of the processor |
| unmeasured | eager fails or gives no gradient; of splits also: no sample has a batch |

Shares are of what was measured and is not random. `one` is one device; the other settings are
data, microbatches, tensor and pipeline, 2 of each, and all else is planned. Those take the first
sample whose examples lie along dim 0, with twice as many. Samples without elements, or with a loss
that is no number, are passed over where there are others. Operators that draw do so from the
generator as it is: torch's list seeds it in each call. Lazy modules are initialised by a call
before, as torch asks.
"""


def page(body: Mapping[str, Any]) -> str:
    """The page of results, as Markdown."""
    found = (
        v for names in body["verdicts"].values() for each in names.values() for v in each.values()
    )
    commits = ", ".join(sorted({v["commit"] for v in found}))
    lines = [_HEAD.format(commits=commits, torch=body["torch"])]
    for part, verdicts in body["verdicts"].items():
        lines += [f"## {part}: {PARTS[part].about}", ""]
        if len(verdicts) < body["entries"][part]:
            lines += [f"{len(verdicts)} of {body['entries'][part]} entries were run.", ""]
        lines += [*_figures(verdicts), ""]
        lines += [*_reasons(verdicts), ""]
    return "\n".join(lines)


def _figures(verdicts: Mapping[str, Mapping[str, Any]]) -> list[str]:
    lines = [
        f"| setting | share right | {' | '.join(_OUTCOMES)} |",
        f"|---|---|{'---|' * len(_OUTCOMES)}",
    ]
    for setting in SETTINGS:
        counts = Counter(v[setting]["outcome"] for v in verdicts.values() if setting in v)
        measured = sum(counts.values()) - counts["unmeasured"] - counts["random"]
        if counts:
            share = f"{100 * counts['right'] / max(measured, 1):.1f} %"
            cells = " | ".join(str(counts[o]) for o in _OUTCOMES)
            lines.append(f"| {setting} | {share} | {cells} |")
    return lines


def _reasons(verdicts: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Entries that are not right, by outcome, code and text."""
    lines: list[str] = []
    for setting in SETTINGS:
        groups: dict[tuple[int, str], list[str]] = {}
        for name, found in sorted(verdicts.items()):
            verdict = found.get(setting)
            if verdict is None or verdict["outcome"] not in _LISTED:
                continue
            text = verdict.get("detail", "").replace("|", "/")
            said = f"{verdict['outcome']} {verdict.get('code', '')}: {text}".replace(" :", ":")
            groups.setdefault((_LISTED.index(verdict["outcome"]), said), []).append(name)
        if groups:
            lines += ["", f"<details><summary>{setting}: not right</summary>", ""]
            for (_, said), names in sorted(groups.items()):
                lines.append(f"- {said} — {', '.join(f'`{n}`' for n in names)}")
            lines += ["", "</details>"]
    return lines
