"""Command-line options for pins, generated from `planner.plan.pins.PINS`, and their parsers."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import product
from typing import Any

from graphaccel.planner.plan.option_values import byte_count, positive
from graphaccel.planner.plan.pins import PINS, Pin

Reader = Callable[[str], Any]
_WORDS = {"true": True, "on": True, "false": False, "off": False}


def add_pins(parser: argparse.ArgumentParser, *, without: Collection[str] = ()) -> None:
    """Add an option for every pin that has one. without: pins whose option the command defines
    itself."""
    group = parser.add_argument_group("pins", "decide these; the rest is planned around them")
    for name, pin in PINS.items():
        if pin.option is not None and name not in without:
            group.add_argument(option_of(name), dest=name, help=pin.help, **_settings(pin))


def option_of(name: str) -> str:
    """The option of a pin's name, as in `--reshard-after-forward`."""
    return f"--{name.replace('_', '-')}"


def pins_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """The pins that the command line sets."""
    given = {name: getattr(arguments, name, None) for name, pin in PINS.items()
             if pin.option is not None}  # fmt: skip
    given = {name: value for name, value in given.items() if value is not None}
    if "stage_of" in given:
        given["stage_of"] = dict(given["stage_of"])
    return given


def pin_pairs(text: str) -> dict[str, Any]:
    """{"pipeline": 4, "recompute": ("h.0", "h.1")} from "pipeline=4,recompute=h.0+h.1"."""
    results: dict[str, Any] = {}
    for part in text.split(","):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not (name and equals and value):
            raise argparse.ArgumentTypeError(f"{part!r} is not like pipeline=4")
        if name in results:
            raise argparse.ArgumentTypeError(f"{name} is there twice in {text!r}")
        pin = PINS.get(name)
        if pin is not None and pin.kind in ("names", "word or names"):
            results[name] = _reader(pin)(value.replace("+", ","))
        elif pin is not None and pin.kind == "bytes":
            results[name] = byte_count(value)
        elif pin is not None and pin.kind == "stages":
            results[name] = dict(_stage(piece) for piece in value.split("+"))
        elif pin is not None and pin.kind == "switch":
            results[name] = _WORDS.get(value.lower(), value)
        else:
            results[name] = int(value) if value.lstrip("-").isdecimal() else value
    return results


def pin_grid(text: str, others: Collection[str] = ()) -> tuple[dict[str, Any], ...]:
    """Every combination of "zero=0,1 tensor=1,2": {"zero": 0, "tensor": 1} and three more.

    others: names that are no pins, and could have been meant.
    Raises argparse.ArgumentTypeError for what no pin can be, and for what is there twice.
    """
    columns: dict[str, list[Any]] = {}
    for part in text.split():
        name, _, values = part.partition("=")
        known = [each for each, pin in PINS.items() if pin.option is not None]
        if name not in known:
            names = [*others, *known]
            close = difflib.get_close_matches(name, names, cutoff=0.5) or names
            what = "is no axis of a sweep and no pin" if others else "is no pin"
            raise argparse.ArgumentTypeError(f"{name!r} {what}; there are {', '.join(close)}")
        if name in columns:
            both = f'write "{name}=..." once, with commas between its values'
            raise argparse.ArgumentTypeError(f"{name} is there twice in {text!r}; {both}")
        columns[name] = [_value(name, value) for value in values.split(",")]
        check_once(name, columns[name])
    if not columns:
        raise argparse.ArgumentTypeError('nothing to sweep over; write "zero=0,1 tensor=1,2"')
    return tuple(dict(zip(columns, row, strict=True)) for row in product(*columns.values()))


def check_once(name: str, values: Sequence[Any]) -> None:
    """Raises argparse.ArgumentTypeError for a value of an axis that is there twice."""
    for number, value in enumerate(values):
        if value in values[:number]:
            raise argparse.ArgumentTypeError(f"{name}={_shown(value)} is there twice")


def _value(name: str, text: str) -> Any:
    """A value of an axis of `pin_grid`, which its pin can have."""
    pin, value = PINS[name], pin_pairs(f"{name}={text}")[name]
    if pin.kind == "count":
        return positive(text.strip())
    known = ("true", "false") if pin.kind == "switch" else pin.choices
    wrong = pin.kind in ("choice", "offload", "level") and value not in known
    if wrong or (pin.kind == "switch" and not isinstance(value, bool)):
        listed = ", ".join(map(str, known))
        raise argparse.ArgumentTypeError(f"{name} can not be {text.strip()!r}; it can be {listed}")
    return value


def pins_text(pins: Mapping[str, Any]) -> str:
    """`zero 1, tensor 2`."""
    return ", ".join(f"{name} {_shown(value)}" for name, value in pins.items())


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, Mapping):
        value = [f"{module}={stage}" for module, stage in value.items()]
    return "+".join(map(str, value)) if isinstance(value, (tuple, list)) else str(value)


def _settings(pin: Pin) -> dict[str, Any]:
    """The keyword arguments of argparse's `add_argument` for a pin."""
    if pin.kind == "switch":
        return {"action": argparse.BooleanOptionalAction}
    if pin.kind in ("choice", "offload"):
        return {"choices": pin.choices}
    if pin.kind == "level":
        return {"type": int, "choices": pin.choices}
    metavar = pin.metavar or "N"
    if pin.kind == "stages":
        return {"type": _stage, "action": "append", "metavar": metavar}
    return {"type": _reader(pin), "metavar": metavar}


def _reader(pin: Pin) -> Reader:
    if pin.kind == "count":
        return positive
    if pin.kind == "bytes":
        return byte_count
    words = pin.choices if pin.kind == "word or names" else ()
    return lambda text: text if text in words else _names(text)


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    if not all(names):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of names with commas between")
    return names


def _stage(text: str) -> tuple[str, int]:
    """("transformer.h.3", 1) from "transformer.h.3=1"."""
    module, equals, stage = text.rpartition("=")
    if not equals or not module or not stage.isdecimal():
        raise argparse.ArgumentTypeError(f"a module and its stage, as in h.3=1, not {text!r}")
    return module, int(stage)
