"""The cases of a quick run."""

from __future__ import annotations

from collections.abc import Hashable
from itertools import product

from tests.support.cases import some_cases, weight_of


def _cases(test: str, **values: tuple[Hashable, ...]) -> dict[str, dict[str, Hashable]]:
    """All cases of a test whose parameters take these values."""
    return {
        f"{test}[{'-'.join(map(str, case))}]": dict(zip(values, case, strict=True))
        for case in product(*values.values())
    }


def test_a_third_of_the_cases_and_two_at_least() -> None:
    many = _cases("tests/ir/test_a.py::test_many", a=tuple(range(6)), b=("off", "auto"))
    few = _cases("tests/ir/test_b.py::test_few", a=(0, 1, 2))
    one = {"tests/ir/test_b.py::test_one": {}}
    chosen = some_cases({**many, **few, **one})
    assert len(chosen & set(many)) == 4
    assert len(chosen & set(few)) == 2
    assert chosen >= set(one)


def test_a_twelfth_and_one_at_least_where_cases_take_seconds() -> None:
    many = _cases("tests/gloo/test_a.py::test_many", a=tuple(range(24)))
    few = _cases("tests/gloo/test_b.py::test_few", a=(0, 1, 2))
    chosen = some_cases({**many, **few})
    assert len(chosen & set(many)) == 2
    assert len(chosen & set(few)) == 1


def test_the_order_of_tests_changes_nothing() -> None:
    files = "tests/gloo/test_a.py", "tests/ir/test_b.py"
    tests = [
        _cases(f"{file}::test_{n}", plan=("data", "pipeline"), size=(1, 2, 3))
        for file in files
        for n in range(3)
    ]
    forward = {name: values for test in tests for name, values in test.items()}
    assert some_cases(forward) == some_cases(dict(reversed(forward.items())))


def test_tests_of_a_file_share_the_values_of_a_parameter() -> None:
    plans = ("data", "pipeline", "tensor")
    tests = [_cases(f"tests/gloo/test_a.py::test_{n}", plan=plans) for n in range(3)]
    chosen = some_cases({name: values for test in tests for name, values in test.items()})
    assert len(chosen) == 3
    assert {name.split("[")[1] for name in chosen} == {f"{plan}]" for plan in plans}


def test_every_value_of_a_parameter_occurs() -> None:
    cases = _cases("tests/kernels/test_a.py::test_x", a=tuple(range(20)), b=("p", "q"))
    assert {name[-2] for name in some_cases(cases)} == {"p", "q"}


def test_texts_are_checked_whole() -> None:
    cases = _cases("tests/errors/test_texts.py::test_text", n=tuple(range(9)))
    assert some_cases(cases) == set(cases)


def test_of_equal_cases_those_that_weigh_much_come_last() -> None:
    cases = _cases("tests/gloo/test_a.py::test_x", plan=("a", "b", "c", "d"))
    for few in cases:
        assert some_cases(cases, {name: 2 if name == few else 4 for name in cases}) == {few}
    assert some_cases(cases, {name: 1 + i % 2 for i, name in enumerate(cases)}) == some_cases(cases)


def test_no_heavy_case_is_taken_where_there_are_lighter_ones() -> None:
    plans = _cases("tests/gloo/test_a.py::test_x", plan=tuple("abcdefghijklmn"))
    weights = {name: 8 if name[-2] in "abc" else 4 for name in plans}
    assert all(weights[name] == 4 for name in some_cases(plans, weights))
    only = _cases("tests/gloo/test_a.py::test_y", plan=("a", "b"))
    assert len(some_cases(only, dict.fromkeys(only, 8))) == 1
    texts = _cases("tests/ir/test_a.py::test_x", plan=("a", "b", "c"))
    assert len(some_cases(texts, dict.fromkeys(texts, 8))) == 2


def test_weight_of_a_case() -> None:
    tables = {"PLANS": {"zero": (2, {"data": 2}), "stages": (4, {}), "both": {"data": 2}}}
    assert weight_of({"plan": "zero", "model": "gpt"}, tables) == 2
    assert weight_of({"plan": "stages"}, tables) == 4
    assert weight_of({"plan": "both"}, tables) == 2
    assert weight_of({"pins": {"data": 2, "pipeline": 4, "zero": 3}}, {}) == 8
    assert weight_of({"fusions": True}, {}) == 1
    assert weight_of({"plan": "tensor2-pipeline4"}, {}) == 8
    assert weight_of({"plan": "zero", "model": "t5"}, tables) == 10
