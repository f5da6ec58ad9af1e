"""Tokens of Python values that a forward reads."""

from __future__ import annotations

import pytest

from graphaccel.guards import tokens


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
