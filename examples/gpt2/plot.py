"""Two loss curves as text and as SVG, with nothing but the standard library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

COLOURS = ("#1f6feb", "#d1242f", "#1a7f37", "#8250df")
Curves = Mapping[str, Sequence[float]]


def largest_difference(a: Sequence[float], b: Sequence[float]) -> tuple[int, float]:
    """The step at which two curves differ most, and by how much; ValueError if lengths differ.

    NaN anywhere is the largest difference there is.
    """
    if len(a) != len(b) or not a:
        raise ValueError(f"curves of {len(a)} and {len(b)} steps can not be compared")
    differences = [abs(x - y) for x, y in zip(a, b, strict=True)]
    step = max(
        range(len(a)), key=lambda i: float("inf") if _nan(differences[i]) else differences[i]
    )
    return step, differences[step]


def side_by_side(curves: Curves, width: int = 42, height: int = 14) -> str:
    """Each curve in a panel of its own, all on the same axes, beside each other.

    `width` and `height` are characters of one panel; the y axis is labelled once, on the left.
    """
    low, high = _range(curves)
    panels = [_panel(values, low, high, width, height) for values in curves.values()]
    lines = [" " * 8 + "".join(f" {name[:width]:<{width}} " for name in curves).rstrip()]
    for row in range(height):
        value = high - (high - low) * row / (height - 1)
        label = f"{value:7.3f}" if row in (0, height // 2, height - 1) else " " * 7
        lines.append(f"{label} " + "".join(f"|{panel[row]}|" for panel in panels))
    last = {name: str(len(values) - 1) for name, values in curves.items()}
    axis = "".join(f" 0{'step ' + end:>{width - 1}} " for end in last.values())
    lines.append(" " * 8 + axis.rstrip())
    return "\n".join(lines)


def svg(curves: Curves, title: str, width: int = 720, height: int = 400) -> str:
    """One SVG document: all curves on the same axes; later ones dashed, so that both are seen."""
    low, high = _range(curves)
    left, right, top, bottom = 60, 20, 40, 40
    steps = max(len(values) for values in curves.values())

    def x_of(step: float) -> float:
        return left + (width - left - right) * step / max(steps - 1, 1)

    def y_of(value: float) -> float:
        return top + (height - top - bottom) * (high - value) / (high - low)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}"'
        f' viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{left}" y="22" font-size="15">{escape(title)}</text>',
    ]
    for tick in range(5):
        value = low + (high - low) * tick / 4
        y = y_of(value)
        parts.append(f'<path d="M{left} {y:.1f}H{width - right}" stroke="#d0d7de"/>')
        parts.append(f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{value:.2f}</text>')
        step = (steps - 1) * tick / 4
        parts.append(
            f'<text x="{x_of(step):.1f}" y="{height - bottom + 18}" text-anchor="middle">'
            f"{step:.0f}</text>"
        )
    parts.append(
        f'<text x="{(left + width - right) / 2}" y="{height - 6}" text-anchor="middle">step</text>'
    )
    for i, (name, values) in enumerate(curves.items()):
        points = " ".join(
            f"{x_of(step):.1f},{y_of(value):.1f}"
            for step, value in enumerate(values)
            if _finite(value)
        )
        colour = COLOURS[i % len(COLOURS)]
        dash = ' stroke-dasharray="6 5"' if i else ""
        stroke = f'stroke="{colour}" stroke-width="{3 - min(i, 2)}"{dash}'
        parts.append(f'<polyline points="{points}" fill="none" {stroke}/>')
        y = top + 12 + 18 * i
        x = width - right - 250
        parts.append(f'<path d="M{x} {y}h28" {stroke}/>')
        parts.append(f'<text x="{x + 36}" y="{y + 4}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>\n"])


def _panel(values: Sequence[float], low: float, high: float, width: int, height: int) -> list[str]:
    grid = [[" "] * width for _ in range(height)]
    for step, value in enumerate(values):
        if _finite(value):
            column = round((width - 1) * step / max(len(values) - 1, 1))
            row = round((height - 1) * (high - value) / (high - low))
            grid[row][column] = "*"
    return ["".join(row) for row in grid]


def _range(curves: Curves) -> tuple[float, float]:
    finite = [value for values in curves.values() for value in values if _finite(value)]
    if not finite:
        raise ValueError("no finite value to plot")
    low, high = min(finite), max(finite)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _nan(value: float) -> bool:
    return value != value


def _finite(value: float) -> bool:
    return abs(value) < float("inf")  # false for NaN too
