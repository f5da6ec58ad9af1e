"""Write what follows from the fields of `graphaccel.planner.plan.pins.Pins`.

    python docs/pins.py

docs/pins.md has the table of pins, graphaccel/planner/plan/pin_types.py the types of their keyword
arguments; tests/docs fails while either is not that of the fields.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from graphaccel.cli.pin_options import option_of
from graphaccel.planner.plan.pins import PINS, Pin

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "pins.md"
TYPES = ROOT / "graphaccel" / "planner" / "plan" / "pin_types.py"
HEAD = """# Pins: decisions of yours

Written by `python docs/pins.py` from `graphaccel/planner/plan/pins.py`; do not edit.

Every decision of a plan can be pinned: as a keyword argument of `graphaccel.optimize` and
`graphaccel.plan`, or as an option of `graphaccel plan`, `run` and `calibrate`. The rest is planned
around it. Pins that contradict one another are refused with what each could be instead (GA210).
Unless the last column says so, a pin changes where and when something is computed, and not what.
"""
GROUPS = {
    "mesh": "Mesh axes",
    "pipeline": "Pipeline",
    "zero": "ZeRO: sharding over data",
    "tensor and context": "Tensor and context axes",
    "memory": "Memory",
    "precision": "Precision",
    "kernels": "Kernels and compilers",
    "placement": "Parameters, modules, outputs",
}
TYPES_HEAD = '''"""Types of keyword arguments that are pins. Written by `python docs/pins.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, TypedDict

from graphaccel.ir.program import Sharded


class PinArguments(TypedDict, total=False):
    """What may be pinned; None counts as left out. docs/pins.md explains each."""

'''


def page() -> str:
    """The text of docs/pins.md."""
    parts = [HEAD]
    for group, title in GROUPS.items():
        parts.append(
            f"\n## {title}\n\n"
            "| pin | values | command line | what it decides | needs | changes numbers |"
        )
        parts.append("\n|---|---|---|---|---|---|\n")
        parts += [_row(name, pin) for name, pin in PINS.items() if pin.group == group]
    return "".join(parts)


def _row(name: str, pin: Pin) -> str:
    option = "" if pin.option is None else f"`{option_of(name)}`"
    cells = (f"`{name}`", _values(pin), option, pin.help, pin.needs, pin.numerics or "no")
    return f"| {' | '.join(cells)} |\n"


def _values(pin: Pin) -> str:
    words = ", ".join(f"`{choice!r}`" for choice in pin.choices)
    kinds = {"count": "a count", "bytes": "bytes", "switch": "`True`, `False`", "names": "names",
             "word or names": f"{words}, or names", "stages": "module path → stage",
             "placements": "parameter or module path → placement"}  # fmt: skip
    return kinds.get(pin.kind, words)


def types() -> str:
    """The text of the module with the types."""
    return TYPES_HEAD + "".join(_lines())


def _lines() -> Iterator[str]:
    for name, pin in PINS.items():
        line = f"    {name}: {pin.type} | None\n"
        if len(line) > 101:
            inner = pin.type.removeprefix("Literal[").removesuffix("]")
            choices = "".join(f"            {choice},\n" for choice in inner.split(", "))
            line = f"    {name}: (\n        Literal[\n{choices}        ]\n        | None\n    )\n"
        yield line.replace("'", '"')


def main() -> None:
    """Write both."""
    PAGE.write_text(page(), encoding="utf-8")
    TYPES.write_text(types(), encoding="utf-8")


if __name__ == "__main__":
    main()
