"""Batches of many lengths: one capture serves all, and programs are dropped and made anew."""

from __future__ import annotations

import copy

import pytest
import torch

import graphaccel
from graphaccel import errors
from tests.compiler.test_ignored_rows import Tagger, shifted
from tests.support.inside import captures_in, executors_in


def _of_length(length: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(length)
    tokens = torch.randint(0, 6, (4, length), generator=generator)
    return tokens, torch.ones(4, length), tokens


def test_many_lengths(capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    plain = Tagger(shifted).double()
    ours = copy.deepcopy(plain)
    graphaccel.optimize(ours, devices=1, max_programs=2, check="off")
    for length in (8, 5, 8, 9, 5, 8):
        for model in (plain, ours):
            model.zero_grad()
            model(*_of_length(length))["loss"].backward()
        for p, q in zip(plain.parameters(), ours.parameters(), strict=True):
            torch.testing.assert_close(q.grad, p.grad, rtol=1e-12, atol=1e-14)
    assert len(captures_in(ours).steps) == 1
    assert len(executors_in(ours)) == 2
    assert capsys.readouterr().err.count("more than max_programs=2 shapes of batches") == 1


@pytest.mark.parametrize("most", [0, 2.5, True, "8"])
def test_what_max_programs_can_not_be(most: object) -> None:
    with pytest.raises(errors.GraphMisuse) as caught:
        graphaccel.optimize(torch.nn.Linear(2, 2), devices=1, max_programs=most)  # type: ignore[arg-type]
    assert str(caught.value).splitlines() == [
        f"error[GA407]: max_programs is a whole number above 0, not {most!r}",
        "  help: graphaccel.optimize(model, optimizer, max_programs=64)",
        "  explain: graphaccel explain GA407",
    ]
