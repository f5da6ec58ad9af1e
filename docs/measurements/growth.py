"""Draw how long plans take as machines and models grow, from benchmarks/results/search.json.

    python docs/measurements/growth.py      # writes docs/pictures/growth.svg

A panel for each of devices, layers and kinds of blocks; both axes are logarithmic, that of seconds
the same in all panels. tests/docs fails while it is not that of the results.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import jinja2

from graphaccel.report.format import seconds_text
from graphaccel.report.scales import Scale

ROOT = Path(__file__).resolve().parents[2]
PICTURE = ROOT / "docs" / "pictures" / "growth.svg"
RESULT = ROOT / "benchmarks" / "results" / "search.json"
WIDTH, HEIGHT, GAP = 300, 240, 20
LEFT, TOP, BOTTOM = 56, 24, 34
PANELS = {"devices": "8b-", "layers": "layers-", "kinds": "kinds-"}
"""What grows, and how the cases of `benchmarks.search` are called in which it does."""
SERIES = {"seconds": "in all", "search_seconds": "search"}

_PAGE = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {{ width }} {{ height }}" \
font-family="sans-serif" font-size="11">
<rect width="{{ width }}" height="{{ height }}" fill="white"/>
{% for panel in panels %}
<g transform="translate({{ panel.shift }} 0)">
<text x="{{ left }}" y="14" font-weight="bold">{{ panel.title }}</text>
{% for tick in panel.seconds %}
<line x1="{{ left }}" x2="{{ right }}" y1="{{ tick.at }}" y2="{{ tick.at }}" stroke="#ddd"/>
<text x="{{ left - 6 }}" y="{{ tick.at + 4 }}" text-anchor="end">{{ tick.label }}</text>
{% endfor %}
{% for x, label in panel.places %}
<text x="{{ x }}" y="{{ bottom + 16 }}" text-anchor="middle">{{ label }}</text>
{% endfor %}
{% for line in panel.lines %}
<polyline points="{{ line.points }}" fill="none" stroke="{{ line.color }}" stroke-width="2"/>
{% for x, y, title in line.dots %}
<circle cx="{{ x }}" cy="{{ y }}" r="3" fill="{{ line.color }}"><title>{{ title }}</title></circle>
{% endfor %}
<text x="{{ right - 4 }}" y="{{ line.label_at }}" text-anchor="end" \
fill="{{ line.color }}">{{ line.label }}</text>
{% endfor %}
</g>
{% endfor %}
</svg>
"""


def growth_picture(result: dict[str, dict[str, Any]]) -> str:
    """An SVG of the rows of `benchmarks/results/search.json` in which one thing grows."""
    rows = {
        what: sorted((r for name, r in result.items() if name.startswith(begin)), key=_by(what))
        for what, begin in PANELS.items()
    }
    rows = {what: own for what, own in rows.items() if len(own) > 1}
    seconds = [row[name] for own in rows.values() for row in own for name in SERIES]
    low, high = min(seconds, default=1.0) / 1.5, max(seconds, default=2.0) * 1.5
    up = Scale(low, high, HEIGHT - BOTTOM, TOP, log=True)
    panels = [_panel(what, own, number, up) for number, (what, own) in enumerate(rows.items())]
    return jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(_PAGE).render(
        width=max(1, len(panels)) * (WIDTH + GAP), height=HEIGHT, left=LEFT, right=WIDTH,
        bottom=HEIGHT - BOTTOM, panels=panels,
    ) + "\n"  # fmt: skip


def _by(what: str) -> Any:
    return lambda row: row[what]


def _panel(what: str, rows: list[dict[str, Any]], number: int, up: Scale) -> dict[str, Any]:
    values = [row[what] for row in rows]
    along = Scale(min(values), max(values), LEFT + 16, WIDTH - 16, log=True)
    lines = []
    for (name, label), color in zip(SERIES.items(), ("#555555", "#0b6cff"), strict=True):
        dots = [(along(r[what]), up(r[name]), f"{r[what]:,}: {seconds_text(r[name])}")
                for r in rows]  # fmt: skip
        lines.append({
            "points": " ".join(f"{x},{y}" for x, y, _ in dots), "dots": dots, "label": label,
            "color": color, "label_at": round(dots[-1][1] - 8, 1),
        })  # fmt: skip
    return {
        "shift": number * (WIDTH + GAP), "title": "kinds of blocks" if what == "kinds" else what,
        "seconds": up.ticks(5, seconds_text), "lines": lines,
        "places": [(along(v), f"{v:,}") for v in values],
    }  # fmt: skip


def main() -> None:
    argparse.ArgumentParser(description="Draw how searches grow.").parse_args()
    PICTURE.write_text(growth_picture(json.loads(RESULT.read_text())))


if __name__ == "__main__":
    main()
