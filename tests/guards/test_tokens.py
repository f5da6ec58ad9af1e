"""Tokens of Python values that a forward reads."""

from __future__ import annotations

import pytest

from graphaccel.guards import tokens
from graphaccel.guards.guards import token_text


@pytest.mark.parametrize("value", [{"a": 1, "b": 2}, {"a", "b"}])
def test_a_container_may_change_while_it_is_read(
    value: dict[str, int] | set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a thread that counts what it has loaded."""
    real = tokens.key_of

    def counted(key: object) -> object:
        value.pop("b") if isinstance(value, dict) and "b" in value else None
        value.discard("b") if isinstance(value, set) else None
        return real(key)

    before = tokens.token_of(value)
    monkeypatch.setattr(tokens, "key_of", counted)
    assert tokens.token_of(value) == before
    assert tokens.token_of(value) != before


def test_the_text_of_a_function_is_the_same_in_every_process() -> None:
    def act() -> None:
        pass

    text = token_text(tokens.token_of(act))
    assert text == f"act of test_tokens.py:{act.__code__.co_firstlineno}"
