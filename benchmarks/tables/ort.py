"""Tables of ONNX Runtime's regions and training kernels beside torch."""

from __future__ import annotations

from typing import Any

ORT_COLUMNS = {
    "fx": "torch, same graph",
    "inductor": "Inductor",
    "ort": "training build",
    "plain": "plain build",
    "auto": '`ort="auto"`',
}


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
