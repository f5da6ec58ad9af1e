"""Write the table of measurements in README.md from benchmarks/results/*.json.

    python docs/measured.py

The table stands between two marks; tests/docs fails while it is not that of the results.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
RESULTS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- measured: python docs/measured.py -->\n", "<!-- end -->\n"
OURS = "graphaccel"


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


def with_table(readme: str, folder: Path) -> str:
    """The README with the table of the results in `folder`. Raises ValueError without marks."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"README.md has no lines {BEGIN!r} and {END!r}")
    results = [json.loads(file.read_text()) for file in folder.glob("*.json")]
    return f"{before}{begin}\n{table(results)}\n{end}{after}"


def main() -> None:
    argparse.ArgumentParser(description="Update the measurements in README.md.").parse_args()
    README.write_text(with_table(README.read_text(), RESULTS))


if __name__ == "__main__":
    main()
