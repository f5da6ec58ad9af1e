"""The cases of a quick run."""

from __future__ import annotations

from tests.support.cases import some_cases


def test_a_third_of_the_cases_and_two_at_least() -> None:
    many = [f"tests/gloo/test_a.py::test_many[{a}-{b}]" for a in range(6) for b in ("off", "auto")]
    few = [f"tests/ir/test_b.py::test_few[{n}]" for n in range(3)]
    one = ["tests/ir/test_b.py::test_one"]
    chosen = some_cases([*many, *few, *one])
    assert len(chosen & set(many)) == 4
    assert len(chosen & set(few)) == 2
    assert chosen >= set(one)
    assert chosen == some_cases([*one, *reversed(few), *reversed(many)]), "the same in every run"


def test_every_value_of_a_parameter_is_met() -> None:
    names = [f"tests/kernels/test_a.py::test_x[{a}-{b}]" for a in range(20) for b in "pq"]
    chosen = some_cases(names)
    assert {name[-2] for name in chosen} == {"p", "q"}


def test_texts_are_checked_whole() -> None:
    names = [f"tests/errors/test_texts.py::test_text[{n}]" for n in range(9)]
    assert some_cases(names) == set(names)
