"""Errors name what to type: here as the script writes it, which does not call `optimize` itself."""

from __future__ import annotations

import ast
import re
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from graphaccel.errors import GraphAccelError
from graphaccel.errors.base import WRITTEN

_BATCH, _LOSS = "batch=", "loss_fn=loss_fn"


@dataclass(frozen=True)
class Form:
    """How a script of a library writes `graphaccel.optimize(model, optimizer, ...)`.

    arguments: with a place for arguments. quoted: they are items of a dict. alone: without any.
    others: arguments of a loop of one's own; a line that names one is left out.
    """

    arguments: str
    alone: str
    quoted: bool = True
    others: tuple[str, ...] = (_BATCH, _LOSS)


TRAINER = Form("Trainer(model=model, ..., optimize={{{}}})", "Trainer(model=model, ...)")
ACCELERATOR = Form(
    "Accelerator(optimize={{{}}})", "accelerator.prepare(model, optimizer)", others=(_BATCH,)
)
LIGHTNING = Form(
    "Trainer(strategy=PlannedStrategy({}), devices=1)", "trainer.fit(module)", quoted=False,
    others=(_BATCH,),
)  # fmt: skip
_HELP, _OWN = "  help: ", "in a loop of your own:"
_CALL = re.compile(r"(?:graphaccel\.)?\boptimize\(model, optimizer(?:, (.+))?\)(?=$|  )")


@contextmanager
def as_written(form: Form) -> Iterator[None]:
    """Errors from inside name `form`, and not `optimize`."""
    try:
        yield
    except GraphAccelError as error:
        error.args = (rewritten(str(error), form), *error.args[1:])
        raise


def write_for(owner: object, form: Form) -> None:
    """From now on, while `owner` lives, errors of this thread name `form`: a script's own loop has
    no call of the library's around all that may raise one."""
    known = weakref.ref(owner)
    WRITTEN.set(lambda text: text if known() is None else rewritten(text, form))


def rewritten(text: str, form: Form) -> str:
    """An error's text with the lines to type as such a script has them."""
    lines = (_line(line, form) for line in text.split("\n"))
    return "\n".join(line for line in lines if line is not None)


def _line(line: str, form: Form) -> str | None:
    """A line of an error's text; None where it is of no use to such a script."""
    typed = _CALL.search(line)
    if _OWN in line:
        return line
    if typed is None or not line.startswith(_HELP):
        left_out = line.startswith(_HELP) and 'optimize(..., batch="local"' in line
        return None if left_out else line
    if typed[1] is None:
        return line.replace(typed[0], form.alone)
    if typed[1].startswith(form.others):
        return None
    try:
        call = ast.parse(f"f({typed[1]})", mode="eval").body
    except SyntaxError:
        return line
    assert isinstance(call, ast.Call)
    sign = '"{}": {}' if form.quoted else "{}={}"
    pairs = (sign.format(k.arg, ast.unparse(k.value)) for k in call.keywords)
    arguments = ", ".join(pairs).replace("'", '"')
    return line.replace(typed[0], form.arguments.format(arguments))
