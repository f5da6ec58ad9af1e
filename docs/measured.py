"""Write the tables of measurements in docs/ from benchmarks/results.

    python docs/measured.py

A table stands between two marks; tests/docs fails while it is not that of the results.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "benchmarks.md"
RESULTS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- measured: python docs/measured.py -->\n", "<!-- end -->\n"
OURS = "graphaccel"
ORT_PAGE = ROOT / "docs" / "onnxruntime.md"
FUSIONS_PAGE = ROOT / "docs" / "fusions.md"
COMPILE_PAGE = ROOT / "docs" / "compile.md"
ACCURACY_PAGE = ROOT / "docs" / "accuracy.md"
ORT_COLUMNS = {
    "fx": "torch, same graph",
    "inductor": "Inductor",
    "ort": "training build",
    "plain": "plain build",
    "auto": '`ort="auto"`',
}


def table(results: list[dict[str, Any]]) -> str:
    """Markdown: one row a timing; a sentence where there are none."""
    results = [r for r in results if "ratio" in r]
    if not results:
        return "No measurements are committed; `benchmarks/README.md` says how to make them.\n"
    rows = ["| command | graphaccel | against | ratio |", "|---|---|---|---|"]
    for result in sorted(results, key=lambda r: r["name"]):
        medians = result["median_seconds"]
        (other,) = set(medians) - {OURS}
        rows.append(
            f"| `{result['command']}` | {1e3 * medians[OURS]:.0f} ms "
            f"| {other}: {1e3 * medians[other]:.0f} ms | {result['ratio']:.3f} |"
        )
    machines = {
        f"{m['cores']} cores ({m['architecture']}), torch {m['torch']}, Python {m['python']}"
        for m in (result["machine"] for result in results)
    }
    text = f"Per step on {'; '.join(sorted(machines))}; a ratio below 1 is faster."
    return "\n".join([*rows, "", text, ""])


def with_table(page: str, folder: Path) -> str:
    """The page with the table of the results in `folder`. Raises ValueError without marks."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"docs/benchmarks.md has no lines {BEGIN!r} and {END!r}")
    results = [json.loads(file.read_text()) for file in folder.glob("*.json")]
    return f"{before}{begin}\n{table(results)}\n{end}{after}"


def _machine(result: dict[str, Any]) -> str:
    m, threads = result["machine"], result["threads"]
    return (
        f"{m['cores']} cores ({m['architecture']}), {threads} thread{'s' * (threads > 1)}, "
        f"torch {m['torch']}, Python {m['python']}; ONNX Runtime {result['build']}"
    )


def ort_table(result: dict[str, Any]) -> str:
    """Markdown: how many times as fast as eager each side is, a row for each region type and model.

    result: `benchmarks/results/ort.json`; the plain build's ratios are to eager in its own process.
    """
    rows = ["| | " + " | ".join(ORT_COLUMNS.values()) + " |", "|---" * (len(ORT_COLUMNS) + 1) + "|"]
    plain = set()
    for name, row in result["rows"].items():
        ratios = dict(row["faster_than_eager"])
        if "plain" in row:
            ratios["plain"] = row["plain"]["faster_than_eager"]["ort"]
            plain.add(row["plain"]["build"])
        cells = [f"{ratios[c]:.2f}" if c in ratios else "" for c in ORT_COLUMNS]
        if "auto" in ratios:
            cells[-1] += f" ({row['auto_regions']} regions)"
        rows.append(f"| {name.replace('_', ' ')} | " + " | ".join(cells) + " |")
    text = f"Times as fast as eager on {_machine(result)}"
    text += "".join(f" and {build}" for build in sorted(plain)) + "; above 1 is faster."
    return "\n".join([*rows, "", text, ""])


def kernel_table(result: dict[str, Any]) -> str:
    """Markdown: each training kernel beside standard operators and torch (`ort_kernels.json`)."""
    rows = ["| kernel | torch | standard operators | kernel |", "|---|---|---|---|"]
    for name, row in result["rows"].items():
        times = row["median_seconds"]
        cells = [f"{1e6 * times[c]:.0f} us" for c in ("torch", "standard", "kernel")]
        rows.append(f"| `{name}` | " + " | ".join(cells) + " |")
    return "\n".join([*rows, "", f"On {_machine(result)}.", ""])


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
        f"the sources, with products in 8 bits by {100 * said['mean_of_eight_bits']:.1f} %. That "
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
        f"Left out: {means[0]} on average over the sources, {means[1]} with products in 8 or 4 "
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


def large_table(result: list[dict[str, Any]]) -> str:
    """Markdown: what planning deeper and deeper models takes, a row a depth (`large.json`)."""
    rows = [
        "| decisions | layers | ops | capture | plan and rewrite | plans built | all nodes "
        "| memory | load |",
        "|---" * 9 + "|",
    ]
    rows += [
        f"| {'the same' if row['same'] else 'planned'} | {row['layers']} | {row['ops']:,} "
        f"| {row['capture_seconds']:.1f} s | {row['plan_and_rewrite_seconds']:.1f} s "
        f"| {row['plans_built']} "
        f"| {row['nodes_seconds']:.1f} s | {row['peak_gb']:.2f} GB | {row['load']:.1f} |"
        for row in result
    ]
    return "\n".join([*rows, ""])


def search_table(result: dict[str, Any]) -> str:
    """Markdown: how long searches took and what they found (`benchmarks/results/search.json`)."""
    rows = [
        "| model | layers | widths | H100s | in all | capture | search | programs | load "
        "| candidates | memory | plan | step | of a device |",
        "|---" * 14 + "|",
    ]
    beside = [
        "| model | H100s | mesh | planned | step | of meshes, guessed faster | faster |",
        "|---" * 7 + "|",
    ]
    for row in result.values():
        known = f"| {row['model']} | "
        rows.append(
            f"{known}{row['layers']} | {row['kinds']} | {_devices(row)} "
            f"| {row['seconds']:.1f} s | {row['capture_seconds']:.1f} s "
            f"| {row['search_seconds']:.1f} s | {row['build_seconds']:.1f} s "
            f"| {row['load']:.1f} | {row['candidates']:,} "
            f"| {row['peak_gb']:.1f} GB | {row['plan']} | {row['predicted_seconds']:.3g} s "
            f"| {row['peak_bytes'] / 2**30:.1f} GiB |"
        )
        for who, theirs in row["published"].items():
            guessed, faster = (
                "" if many is None else f"{many / theirs['meshes']:.2%}"
                for many in (theirs["guessed_faster"], theirs.get("faster"))
            )
            beside.append(
                f"{known}{_devices(row)} | {who} | {theirs['plan']} "
                f"| {theirs['predicted_seconds']:.3g} s | {guessed} | {faster} |"
            )
    return "\n".join([*rows, "", *beside, ""])


def _devices(row: dict[str, Any]) -> str:
    """How many, and which if they are not what the column says."""
    other = row.get("device", "h100-80gb").partition("-")[0].upper()
    return f"{row['devices']:,}" + (f" {other}s" if other != "H100" else "")


def with_ort_tables(page: str, folder: Path) -> str:
    """The page with both tables. Raises ValueError without their marks."""
    return _with(page, folder, {"ort": ort_table, "ort_kernels": kernel_table})


def with_validation(page: str, folder: Path) -> str:
    """The page with the tables of published runs, of deep models and of searches. Raises ValueError
    without their marks."""
    tables = {
        "validation": validation_table,
        "unseen": unseen_table,
        "large": large_table,
        "predicted": predicted_table,
        "search": search_table,
    }
    return _with(page, folder, tables)


def _with(page: str, folder: Path, tables: dict[str, Callable[[dict[str, Any]], str]]) -> str:
    for name, write in tables.items():
        first, last = f"<!-- measured: {name} -->\n", f"<!-- end: {name} -->\n"
        before, begin, rest = page.partition(first)
        _, end, after = rest.partition(last)
        if not begin or not end:
            raise ValueError(f"the page has no lines {first!r} and {last!r}")
        result = json.loads((folder / f"{name}.json").read_text())
        page = f"{before}{begin}\n{write(result)}\n{end}{after}"
    return page


def fusion_table(result: dict[str, Any]) -> str:
    """Markdown: a model in a form a row: bytes of a step, and which fusions were found
    (`benchmarks/results/fusions.json`)."""
    rows = ["| model | form | MB | fused | floor | fusions |", "|---|---|---|---|---|---|"]
    for row in result["rows"]:
        form = row["form"] + (", attention spelled out" if row["attention"] == "eager" else "")
        sizes = [f"{row[f'bytes_{n}'] / 1e6:.0f}" for n in ("before", "after", "floor")]
        found = ", ".join(f"{n} {c}" for n, c in row["fusions"].items())
        rows.append(f"| {row['model']} | {form} | " + " | ".join(sizes) + f" | {found} |")
    shape = f"{result['layers']} layers, batch {result['batch']}, {result['tokens']} tokens"
    text = (
        f"{shape} (images of 224 x 224). Floor: products, attention and embeddings alone, of what\n"
        "the model says: where it spells attention out, torch's writes no scores and goes below."
    )
    return "\n".join([*rows, "", text, ""])


def with_fusion_table(page: str, folder: Path) -> str:
    """The page with its table. Raises ValueError without the marks."""
    first, last = "<!-- measured: fusions -->\n", "<!-- end: fusions -->\n"
    before, begin, rest = page.partition(first)
    _, end, after = rest.partition(last)
    if not begin or not end:
        raise ValueError(f"the page has no lines {first!r} and {last!r}")
    result = json.loads((folder / "fusions.json").read_text())
    return f"{before}{begin}\n{fusion_table(result)}\n{end}{after}"


def compile_table(result: dict[str, Any]) -> str:
    """Markdown: each side of each model beside eager (`benchmarks/results/compile.json`)."""
    rows = ["| model | side | step | of eager | first step | peak |", "|---" * 6 + "|"]
    for model, sides in result["rows"].items():
        eager = sides["eager"]["median_seconds"]
        for side, row in sides.items():
            seconds = row["median_seconds"]
            rows.append(
                f"| {model} | {side} | {1e3 * seconds:.0f} ms | {seconds / eager:.3f} "
                f"| {row['first_step_seconds']:.0f} s | {row['peak_bytes'] / 1e6:.0f} MB |"
            )
    m, s = result["machine"], result["settings"]
    text = (
        f"{s['layers']} layers of width {s['width']}, batch {s['batch']} of {s['tokens']} tokens, "
        f"float32, {s['threads']} thread of {m['cores']} cores ({m['architecture']}), torch "
        f"{m['torch']}. First step: with compiling, the cache empty. Peak: of one step, beyond "
        "weights and optimizer state."
    )
    return "\n".join([*rows, "", text, ""])


def with_compile_table(page: str, folder: Path) -> str:
    """The page with its table. Raises ValueError without the marks."""
    return _with(page, folder, {"compile": compile_table})


GPU_FIRST, GPU_LAST = "<!-- measured: gpu -->\n", "<!-- end: gpu -->\n"
GPU_SIDES = {
    "eager": "eager",
    "compile": "torch.compile, fused AdamW",
    "graphaccel": "graphaccel",
    "inductor": "with Inductor",
    "graphs": "with CUDA graphs",
}


def gpu_tables(result: dict[str, Any] | None) -> str:
    """Markdown: training steps, optimizers and kernels on a GPU (`benchmarks/results/gpu.json`);
    a sentence where there is no such file (None)."""
    if result is None:
        return "On a GPU: not measured: no GPU was at hand (`python -m benchmarks.gpu`).\n"
    m = result["machine"]
    text = (
        f"On {m['device']} (driver {m['driver']}, CUDA {m['cuda']}), torch {m['torch']}, triton "
        f"{m['triton']}, Python {m['python']}; clone {result['clone'] / 1e9:.0f} GB/s. Steps and "
        "their peak memory; kernels and optimizers: share of the clone bandwidth, the lowest over "
        "widths, and time relative to others, below 1 is faster."
    )
    parts = [text, _gpu_steps(result["steps"]), _gpu_kernels(result["kernels"])]
    parts.append(_gpu_optimizers(result["optimizers"]))
    faults = result["faults"]
    parts.append(f"Faults: {len(faults) or 'none'}.")
    parts += ["\n".join(_gpu_faults(faults))] if faults else []
    return "\n\n".join(p for p in parts if p) + "\n"


def _gpu_faults(faults: list[dict[str, Any]]) -> list[str]:
    """A line a kernel: how many, and the first of them."""
    lines = []
    for name in dict.fromkeys(f["name"] for f in faults):
        own = [f for f in faults if f["name"] == name]
        said = f"- `{name}`, {own[0]['case']}: {own[0]['what']}"
        lines.append(said + (f" (and {len(own) - 1} more)" if len(own) > 1 else ""))
    return lines


def _gpu_steps(rows: list[dict[str, Any]]) -> str:
    def cell(row: dict[str, Any], side: str) -> str:
        if row[side] is None:
            return "fails"
        peak = row[f"{side}_bytes"]
        return f"{1e3 * row[side]:.0f} ms" + ("" if peak is None else f", {peak / 1e9:.2f} GB")

    lines = [f"| model | {' | '.join(GPU_SIDES.values())} |", "|---" * (len(GPU_SIDES) + 1) + "|"]
    lines += [f"| {r['model']} | {' | '.join(cell(r, s) for s in GPU_SIDES)} |" for r in rows]
    return "\n".join(lines) if rows else ""


def _gpu_kernels(rows: list[dict[str, Any]]) -> str:
    """A row a kernel: all its widths together."""
    lines = ["| kernel | forward, of clone | backward | of eager | of torch.compile |"]
    lines.append("|---" * 5 + "|")
    for name in dict.fromkeys(r["kernel"] for r in rows):
        own = [r for r in rows if r["kernel"] == name]
        shares = [
            _lowest([r["of_clone"] for r in own if r["phase"] == phase])
            for phase in ("forward", "backward")
        ]
        ratios = [_ratio(own, "seconds", side) for side in ("eager", "compile")]
        lines.append(f"| `{name}` | {' | '.join([*shares, *ratios])} |")
    return "\n".join(lines) if rows else ""


def _gpu_optimizers(rows: list[dict[str, Any]]) -> str:
    lines = ["| optimizer step | of clone | of torch's fused |", "|---|---|---|"]
    lines += [
        f"| {r['kernel']} | {_lowest([r['of_clone']])} | {_ratio([r], 'seconds', 'fused')} |"
        for r in rows
    ]
    return "\n".join(lines) if rows else ""


def _lowest(shares: list[float | None]) -> str:
    known = [s for s in shares if s is not None]
    if len(known) < len(shares):
        return "fails"
    return f"{100 * min(known):.0f} %" if known else ""


def _ratio(rows: list[dict[str, Any]], ours: str, theirs: str) -> str:
    """Their times together, where both sides ran."""
    pairs = [(r[ours], r[theirs]) for r in rows if r[ours] is not None and r[theirs] is not None]
    if not pairs:
        return "fails"
    return f"{sum(p[0] for p in pairs) / sum(p[1] for p in pairs):.2f}"


def with_gpu_tables(page: str, folder: Path) -> str:
    """The page with what was measured on a GPU. Raises ValueError without the marks."""
    before, begin, rest = page.partition(GPU_FIRST)
    _, end, after = rest.partition(GPU_LAST)
    if not begin or not end:
        raise ValueError(f"docs/benchmarks.md has no lines {GPU_FIRST!r} and {GPU_LAST!r}")
    file = folder / "gpu.json"
    result = json.loads(file.read_text()) if file.exists() else None
    return f"{before}{begin}\n{gpu_tables(result)}\n{end}{after}"


def main() -> None:
    argparse.ArgumentParser(description="Update the tables of measurements.").parse_args()
    PAGE.write_text(with_gpu_tables(with_table(PAGE.read_text(), RESULTS), RESULTS))
    ORT_PAGE.write_text(with_ort_tables(ORT_PAGE.read_text(), RESULTS))
    FUSIONS_PAGE.write_text(with_fusion_table(FUSIONS_PAGE.read_text(), RESULTS))
    COMPILE_PAGE.write_text(with_compile_table(COMPILE_PAGE.read_text(), RESULTS))
    ACCURACY_PAGE.write_text(with_validation(ACCURACY_PAGE.read_text(), RESULTS))


if __name__ == "__main__":
    main()
