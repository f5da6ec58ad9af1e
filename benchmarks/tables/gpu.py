"""Tables of training steps, optimizers and kernels on a GPU."""

from __future__ import annotations

from typing import Any

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
