"""The comparison itself: it must find what is wrong, or nothing it passes means anything."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch.optim import AdamW

from tests.support import parity
from tests.support.parity import Reference, compare, reference
from tests.support.zoo import ZOO, call, lift_loss_cast, loss_of


@pytest.fixture(scope="module")
def gpt() -> Reference:
    return reference("gpt", steps=2)


def _result(expected: Reference, **changes: Any) -> dict[str, Any]:
    same = {"loss": expected.loss, "losses": expected.losses}
    return {**same, "grads": dict(expected.grads), "state": expected.state, **changes}


def test_equal_results_have_no_error(gpt: Reference) -> None:
    found = compare(gpt, [_result(gpt), _result(gpt)])
    found.check(loss=0.0, grads=0.0)
    assert max(found.state.values()) == 0


def test_stages_together_hold_every_gradient_and_tied_ones_by_either_name(gpt: Reference) -> None:
    assert gpt.first_name["head.weight"] == "token.weight"
    names = [name for name in gpt.grads if name != "token.weight"]
    halves = [dict.fromkeys(names[:20]), dict.fromkeys(names[20:])]
    parts = [_result(gpt, grads={name: gpt.grads[name] for name in half}) for half in halves]
    compare(gpt, parts).check(loss=0.0, grads=0.0)


def test_a_missing_gradient_is_named(gpt: Reference) -> None:
    grads = {name: grad for name, grad in gpt.grads.items() if "blocks.3.down" not in name}
    with pytest.raises(AssertionError, match=r"no rank has .*blocks\.3\.down\.bias"):
        compare(gpt, [_result(gpt, grads=grads)])


def test_an_extra_gradient_is_named() -> None:
    audio = reference("wav2vec2")
    unused = "wav2vec2.masked_spec_embed"
    assert unused not in audio.grads
    grads = {**audio.grads, unused: torch.zeros(32, dtype=torch.float64)}
    with pytest.raises(AssertionError, match=unused):
        compare(audio, [_result(audio, grads=grads)])


@pytest.mark.parametrize("value", [1e-8, float("nan")])
def test_one_wrong_number_on_one_rank_is_found(gpt: Reference, value: float) -> None:
    grads = {name: grad.clone() for name, grad in gpt.grads.items()}
    grads["blocks.1.up.bias"][3] += value
    found = compare(gpt, [_result(gpt), _result(gpt, grads=grads), _result(gpt)])
    with pytest.raises(AssertionError, match=r"gradient of blocks\.1\.up\.bias off by"):
        found.check(loss=0.0, grads=1e-10)


def test_a_wrong_loss_on_one_rank_or_step_is_found(gpt: Reference) -> None:
    found = compare(gpt, [_result(gpt), _result(gpt, loss=gpt.loss * 1.001)])
    with pytest.raises(AssertionError, match=r"loss off by 1\.0e-03"):
        found.check(loss=1e-10)
    curve = (gpt.loss, gpt.losses[1] * 1.001)
    with pytest.raises(AssertionError, match=r"loss curve off by 1\.0e-03"):
        compare(gpt, [_result(gpt, losses=curve)]).check(loss=1e-10)


def test_a_gradient_that_should_be_zero_is_compared_absolutely() -> None:
    bert = reference("bert")
    noise = {name: grad + 1e-16 for name, grad in bert.grads.items()}
    found = compare(bert, [_result(bert, grads=noise)])
    assert sorted(found.zero) == [
        f"bert.encoder.layer.{layer}.attention.self.key.bias" for layer in range(4)
    ]
    found.check(loss=0.0, grads=1e-10)
    wrong = {name: grad + 1e-6 * (name in found.zero) for name, grad in bert.grads.items()}
    with pytest.raises(AssertionError, match="should be zero"):
        compare(bert, [_result(bert, grads=wrong)]).check(loss=0.0, grads=1e-10)


def test_a_state_dict_with_other_names_or_values_is_found(gpt: Reference) -> None:
    state = {name: value.clone() for name, value in gpt.state.items()}
    state["norm.weight"][0] *= 2
    assert compare(gpt, [_result(gpt, state=state)]).state["norm.weight"] > 0.1
    del state["norm.weight"]
    with pytest.raises(AssertionError, match=r"norm\.weight"):
        compare(gpt, [_result(gpt, state=state)])


@pytest.mark.parametrize("name", list(ZOO))
def test_rows_alone_give_the_gradient_of_the_batch(name: str) -> None:
    """Two halves, weighted by their share of the loss's terms: the zoo itself is well behaved.

    Not for BatchNorm, where it must fail: `mixes_rows` says so.
    """
    expected = reference(name)
    with lift_loss_cast():
        model, batch, loss_fn = parity.build(name, "float64")
        assert isinstance(batch, dict)
        terms = _terms(name, batch["labels"])
        total = 0.0
        for rows in (slice(0, 3), slice(3, None)):
            half = {key: value[rows] for key, value in batch.items()}
            weight = _terms(name, half["labels"]) / terms
            loss = loss_of(call(model, half), half, loss_fn) * weight
            loss.backward()
            total += loss.item()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    got = _result(expected, loss=total, grads=grads)
    check = partial(compare(replace(expected), [got]).check, loss=1e-12, grads=1e-10)
    if ZOO[name].mixes_rows:
        with pytest.raises(AssertionError, match="loss off by"):
            check()
    else:
        check()


def _terms(name: str, labels: torch.Tensor) -> int:
    """How many labels the mean of the loss is over; a causal model shifts its labels by one."""
    counted = labels[:, 1:] if name in ("gpt2", "llama") else labels
    return int((counted != -100).sum())


def test_upcasts_are_told_right() -> None:
    """Lifting changes exactly those models that are marked."""
    changed = {n: reference(n).loss != reference(n, lift=False).loss for n in ZOO}
    assert changed == {name: entry.upcasts for name, entry in ZOO.items()}


def test_peak_of_a_step_counts_what_is_alive_but_not_the_tests_own() -> None:
    model, batch, loss_fn = ZOO["gpt"].build()
    optimizer = AdamW(model.parameters())
    parity.train(model, optimizer, batch, loss_fn, 1)
    measure = partial(parity.peak_of_a_step, model, batch, loss_fn)
    others = [t.untyped_storage() for t in parity.tensors_alive()]
    assert isinstance(batch, dict)
    bare = measure(others)
    model.zero_grad()
    forgotten = torch.ones(1000)
    assert measure(others) == bare + forgotten.nbytes
    model.zero_grad()
    parameters = sum(p.nbytes for p in model.parameters())
    everything = measure([])
    assert everything >= bare + 3 * parameters
