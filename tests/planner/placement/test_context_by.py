"""How attention lies on the context axis, as it was asked for and as the report says."""

from __future__ import annotations

import pytest

from graphaccel.compiler.compiler import Compiler
from graphaccel.compiler.model import Model, as_batch
from graphaccel.planner.cluster.catalogue import cluster
from tests.support.captures import captures_of
from tests.support.zoo import ALL

HEADS = "each device has the whole sequence of some of the heads"
QUERIES = "each device has some of the queries, and gathers keys and values"
WHOLE = "each device does all of it, which takes less than to share it out"


@pytest.mark.parametrize(
    ("name", "by", "said"),
    [
        *((name, "heads", HEADS) for name in ("gpt", "llama", "bert", "t5")),
        *((name, "sequence", QUERIES) for name in ("gpt", "llama", "bert")),
        ("gpt", None, WHOLE),
    ],
)
@captures_of("context by")
def test_attention_lies_as_was_asked(name: str, by: str | None, said: str) -> None:
    """Also of models so small that nothing is worth sharing out."""
    module, batch, loss_fn = ALL[name].build()
    pins = {"context": 2, "context_by": by} if by else {"context": 2}
    compiler = Compiler(Model(module, loss_fn, 2.0), cluster("h100-80gb", 2), pins)
    plan = compiler.choose(as_batch(batch)).plan
    assert f"attention on the context axis: {said}" in plan.notes


def test_nothing_is_said_without_the_axis() -> None:
    module, batch, loss_fn = ALL["gpt"].build()
    compiler = Compiler(Model(module, loss_fn, 2.0), cluster("h100-80gb", 2), {"tensor": 2})
    notes = compiler.choose(as_batch(batch)).plan.notes
    assert not [note for note in notes if "context" in note]
