"""A fixed part of `python -m benchmarks.coverage`: none of it may be wrong or fail raw."""

import warnings

import pytest
import torch

from benchmarks.coverage.__main__ import main
from benchmarks.coverage.judge import judge, together
from tests.support.casts import lift_loss_cast

ONE = [
    ("op_db", name)
    for name in (
        "addmm",
        "cumsum",
        "diagonal_scatter",
        "einsum",
        "fft.rfft",
        "gather",
        "index_select",
        "linalg.vector_norm",
        "logsumexp",
        "nn.functional.dropout",
        "nn.functional.interpolate.bilinear",
        "nn.functional.rrelu",
        "nn.functional.unfold",
        "scatter_add",
        "var_mean",
        "where",
    )
] + [
    ("module_db", name)
    for name in ("nn.BatchNorm2d", "nn.Conv2d", "nn.FractionalMaxPool2d", "nn.GRUCell")
]
SPLIT = ("nn.BCELoss", "nn.Embedding", "nn.LayerNorm", "nn.Mish", "nn.TransformerEncoderLayer")


def _outcome(part, name, setting):
    with warnings.catch_warnings():
        return together([judge(part, name, setting)])


@pytest.mark.parametrize(("part", "name"), ONE)
def test_one_device(part, name):
    assert _outcome(part, name, "one")["outcome"] == "right"


@pytest.mark.parametrize("name", SPLIT)
def test_microbatches(name):
    verdict = _outcome("module_db", name, "microbatches")
    assert verdict["outcome"] in ("right", "refused"), verdict


def test_a_difference_is_seen(monkeypatch):
    """Gradients that are off, or lost, are wrong."""
    from benchmarks.coverage import judge as module

    planned = module.planned_step

    def off(*args):
        found = planned(*args)
        name = min(found["grads"])
        found["grads"][name] = found["grads"][name] * (1 + 1e-6)
        return found

    def lost(*args):
        found = planned(*args)
        del found["grads"][min(found["grads"])]
        return found

    monkeypatch.setattr(module, "planned_step", off)
    assert _outcome("op_db", "sin", "one")["outcome"] == "wrong"
    monkeypatch.setattr(module, "planned_step", lost)
    assert "no rank has the gradient" in _outcome("op_db", "sin", "one")["detail"]


def test_another_error_is_raw(monkeypatch):
    from benchmarks.coverage import judge as module

    def fails(*args):
        raise KeyError("lost")

    monkeypatch.setattr(module, "planned_step", fails)
    frozen = torch.backends.flags_frozen()
    verdict = _outcome("op_db", "sin", "one")
    assert (verdict["outcome"], verdict["detail"]) == ("raw", "KeyError: 'lost'")
    assert torch.backends.flags_frozen() is frozen


def test_steps_of_time_are_no_batch():
    verdict = _outcome("module_db", "nn.LSTM", "microbatches")
    assert (verdict["outcome"], verdict["detail"]) == ("unmeasured", "no sample has a batch")


def test_lifted_casts_leave_a_captured_value_as_it_was():
    """Torch rebuilds values of a graph on the meta device: another dtype there is an error."""
    with lift_loss_cast():
        assert torch.empty(2, dtype=torch.float32).dtype == torch.float64
        assert torch.empty(2, dtype=torch.float32, device="meta").dtype == torch.float32


def test_a_pattern_of_no_entry_is_refused(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["--only", "module_db:Conv2d"])
    assert "no entry of module_db is Conv2d; one of them is nn." in capsys.readouterr().err
