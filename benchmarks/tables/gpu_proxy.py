"""The table of a GPU step that is counted without a GPU."""

from __future__ import annotations

from typing import Any


def proxy_table(result: dict[str, Any]) -> str:
    """Markdown: a model a row, of `benchmarks/results/gpu_proxy.json`."""
    head = (
        "model", "side", "launches", "outside GEMMs", "of torch.compile's", "backward reads",
        "synchronising", "recorded as CUDA graphs", "host time of eager's, toy size",
    )  # fmt: skip
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for row in result["rows"]:
        for side in ("compile", "graphaccel"):
            own, ours = row[side], side == "graphaccel"
            why = own.get("not recorded")
            cells = (
                row["model"], side if ours else "torch.compile", str(own["launches"]),
                f"{own['bytes'] / 1e9:.1f} GB", f"{row['bytes ratio']:.2f}" if ours else "1",
                f"{own['backward inputs'] / 1e9:.1f} GB", str(own["synchronising"]),
                ("no: calls " + why if why else "yes") if ours else "",
                f"{row['host']['graphaccel'] / row['host']['eager']:.2f}" if ours else "",
            )  # fmt: skip
            lines.append(f"| {' | '.join(cells)} |")
    depths = " and ".join(map(str, result["rows"][0]["counted"]))
    full = ", ".join(f"{row['model']} {row['layers']}" for row in result["rows"])
    text = (
        f"Forward and backward on one {result['device']}, {result['pins']['precision']}: counted, "
        f"not measured. Counted with {depths} layers at full width and extrapolated to the whole "
        f"model by layer ({full}). torch {result['machine']['torch']}."
    )
    return "\n".join([*lines, "", text, ""])
