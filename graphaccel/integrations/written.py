"""Errors name what to type: here as the script writes it, which does not call `optimize` itself."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from contextlib import contextmanager

from graphaccel.errors import GraphAccelError

TRAINER = "Trainer(model=model, ..., optimize={{{}}})"
ACCELERATOR = "Accelerator(optimize={{{}}})"
_CALL = re.compile(r"(?:graphaccel\.)?\boptimize\(model, optimizer, (.+)\)(?=$|  )")
_OTHERS = ("batch=", "loss_fn=loss_fn")
"""Arguments of a loop of one's own: a line that names one is left out."""


@contextmanager
def as_written(form: str) -> Iterator[None]:
    """Errors from inside name `form`, which has a place for arguments, and not `optimize`."""
    try:
        yield
    except GraphAccelError as error:
        lines = (_line(line, form) for line in str(error).split("\n"))
        error.args = ("\n".join(line for line in lines if line is not None), *error.args[1:])
        raise


def _line(line: str, form: str) -> str | None:
    """A line of an error's text; None where it is of no use to such a script."""
    typed = _CALL.search(line)
    if typed is None or not line.startswith("  help: "):
        left_out = line.startswith("  help: ") and 'optimize(..., batch="local"' in line
        return None if left_out else line
    if typed[1].startswith(_OTHERS):
        return None
    try:
        call = ast.parse(f"f({typed[1]})", mode="eval").body
    except SyntaxError:
        return line
    assert isinstance(call, ast.Call)
    pairs = (f'"{k.arg}": {ast.unparse(k.value)}' for k in call.keywords)
    arguments = ", ".join(pairs).replace("'", '"')
    return line.replace(typed[0], form.format(arguments))
