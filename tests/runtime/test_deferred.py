"""Models built without memory: every value made later is that of one device, bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import transformers
from torch import Tensor, nn

import graphaccel
from graphaccel.errors import CannotInitialise, GraphMisuse
from graphaccel.runtime.deferred import initial_values, record
from graphaccel.runtime.meter import PeakMeter
from tests.support.gpt import GPT
from tests.support.zoo import ALL


class Odd(nn.Module):
    """All that a constructor may do with its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 5)
        self.padded = nn.Embedding(10, 6, padding_idx=3)
        nn.init.orthogonal_(self.first.weight)
        self.cut = nn.Parameter(nn.init.trunc_normal_(torch.empty(4, 5), std=0.5, a=-0.6, b=0.6))
        self.sum = nn.Parameter(torch.randn(3, 4) * 0.1 + torch.arange(4))
        self.register_buffer("mask", torch.tril(torch.ones(4, 4)))
        self.steps = torch.linspace(0, 1, 5)
        self.rates = [rate.item() for rate in torch.linspace(0, 0.1, 3)]
        with torch.no_grad():
            self.first.bias.copy_(torch.tensor([1.0, 2, 3, 4, 5]))
            self.sum[1].mul_(self.cut[0, :4])
        self.recurrent = nn.LSTM(4, 4)
        self.again = self.first
        self.double = nn.Linear(3, 3).double()
        self.drawn = nn.Parameter(torch.rand(5, generator=torch.Generator().manual_seed(4)))
        self.order = nn.Parameter(torch.randperm(5), requires_grad=False)


class Scaled(nn.Module):
    """A tensor that is neither a parameter nor a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.scale = torch.arange(3.0)


def tensors(model: nn.Module) -> dict[str, Tensor]:
    both = (model.named_parameters, model.named_buffers)
    return {n: t for named in both for n, t in named(remove_duplicate=False)}


BUILDS: dict[str, Callable[[], nn.Module]] = {"odd": Odd, "plain gpt": GPT}
BUILDS |= {name: (lambda entry=entry: entry.build()[0]) for name, entry in ALL.items()}


@pytest.mark.parametrize("name", BUILDS)
def test_values_are_those_of_one_device(name: str) -> None:
    torch.manual_seed(5)
    true = BUILDS[name]()
    after = torch.get_rng_state()
    torch.manual_seed(5)
    made, kept = record(BUILDS[name])
    assert torch.equal(after, torch.get_rng_state()), "the script goes on with other numbers"
    wanted, got = tensors(true), tensors(made)
    assert set(wanted) == set(got)
    for key, value in reversed(wanted.items()):  # in any order
        found = kept.value(key)
        assert got[key].is_meta
        assert got[key].requires_grad == value.requires_grad
        assert (found.dtype, found.stride()) == (value.dtype, value.stride()), key
        assert torch.equal(found, value), key
    assert torch.equal(after, torch.get_rng_state())
    for module, other in zip(true.modules(), made.modules(), strict=True):
        for key, value in vars(module).items():
            assert not isinstance(value, Tensor) or torch.equal(value, vars(other)[key]), key


def test_a_value_needs_its_own_memory_only() -> None:
    _, kept = record(lambda: nn.Sequential(*(nn.Linear(64, 64) for _ in range(10))))
    with PeakMeter() as meter:
        for name in kept.tensors:
            kept.value(name)
    assert meter.peak <= 2 * 64 * 64 * 4


def test_models_that_know_how_they_are_built() -> None:
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1,
    )  # fmt: skip
    torch.manual_seed(1)
    true = tensors(transformers.LlamaForCausalLM(config))
    torch.manual_seed(1)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    kept = initial_values(model)
    assert kept is not None
    assert all(torch.equal(kept.value(name), value) for name, value in true.items())

    with torch.device("meta"):
        scaled = Scaled()
    assert initial_values(scaled, Scaled) is not None
    assert torch.equal(scaled.scale, torch.arange(3.0))
    assert initial_values(graphaccel.deferred(GPT)) is not None
    assert initial_values(GPT(layers=1)) is None


def test_what_can_not_be_known_is_refused() -> None:
    with torch.device("meta"):
        model = GPT(layers=1)
    with pytest.raises(CannotInitialise) as caught:
        initial_values(model)
    assert str(caught.value) == (
        "error[GA212]: the initial weights of `GPT` are not known\n"
        "  why:  it was built on the meta device, which keeps no record of how parameters are "
        "filled\n"
        "  help: say how it is built:  graphaccel.optimize(model, optimizer, "
        "init_fn=lambda: GPT(...))\n"
        "  help: or build it so:  model = graphaccel.deferred(lambda: GPT(...))\n"
        "  explain: graphaccel explain GA212"
    )
    with pytest.raises(CannotInitialise, match=r"`position.weight` is \[32, 32\] of torch.float32"):
        initial_values(model, lambda: GPT(layers=1, context=16))
    with pytest.raises(CannotInitialise, match=r"`token.weight` is .* of torch.float64"):
        initial_values(graphaccel.deferred(GPT).double())
    with pytest.raises(CannotInitialise, match="init_fn returned a int"):
        initial_values(model, lambda: 3)  # type: ignore[arg-type, return-value]
    with pytest.raises(GraphMisuse, match="init_fn was given, but `GPT` has its weights already"):
        initial_values(GPT(layers=1), GPT)


def test_reading_a_whole_tensor_while_building_is_refused() -> None:
    def build() -> nn.Module:
        model = nn.Linear(3, 3)
        model.rows = model.weight.nonzero()
        return model

    with pytest.raises(CannotInitialise, match="it can not be recorded"):
        graphaccel.deferred(build)
