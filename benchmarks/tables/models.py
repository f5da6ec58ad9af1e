"""Tables of whole models: fused bytes, compiled steps and single timings."""

from __future__ import annotations

from typing import Any

OURS = "graphaccel"


def table(results: list[dict[str, Any]]) -> str:
    """Markdown: one row a timing; a sentence where there are none."""
    results = [r for r in results if "ratio" in r]
    if not results:
        return "No measurements are committed; `benchmarks/README.md` says how to make them.\n"
    rows = ["| command | graphaccel | against | ratio | processor |", "|---|---|---|---|---|"]
    for result in sorted(results, key=lambda r: r["name"]):
        medians = result["median_seconds"]
        (other,) = set(medians) - {OURS}
        rows.append(
            f"| `{result['command']}` | {1e3 * medians[OURS]:.0f} ms "
            f"| {other}: {1e3 * medians[other]:.0f} ms | {result['ratio']:.3f} "
            f"| {_processor(result['machine'])} |"
        )
    machines = {
        f"{m['cores']} cores, torch {m['torch']}, Python {m['python']}"
        for m in (result["machine"] for result in results)
    }
    text = f"Per step on {'; '.join(sorted(machines))}; a ratio below 1 is faster."
    return "\n".join([*rows, "", text, ""])


def _processor(machine: dict[str, Any]) -> str:
    """The processor's name; of files that are older than names, its architecture."""
    return machine.get("processor", f"{machine['architecture']}, not named")


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
        f"{shape} (images of 224 x 224). Floor: matmuls, attention and embeddings alone, of what\n"
        "the model says: where it spells attention out, torch's writes no scores and goes below."
    )
    return "\n".join([*rows, "", text, ""])


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
        f"float32, {s['threads']} thread of {m['cores']} cores ({_processor(m)}), torch "
        f"{m['torch']}. First step: with compiling, the cache empty. Peak: of one step, beyond "
        "weights and optimizer state."
    )
    return "\n".join([*rows, "", text, ""])
