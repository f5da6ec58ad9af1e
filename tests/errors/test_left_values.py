"""Values that a forward leaves for the script in a container or an object: refused where the script
reads them after a step, and nowhere else."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphaccel
from graphaccel import errors
from tests.errors.test_kept_tensors import text_of
from tests.support.inside import captures_in

STATS: dict[str, float] = {}
LIST = [0.0]


class Meter:
    """Keeps a value, and reads nothing."""

    def __init__(self) -> None:
        self.last, self.log = 0.0, {}

    def put(self, value: float) -> None:
        self.last = value


METER = Meter()


class Net(nn.Module):
    """`forward(x [8, 4])` → loss; `use(self, h)` leaves something."""

    last = 0.0

    def __init__(self, use: Callable[..., Any]) -> None:
        super().__init__()
        self.layer, self.use = nn.Linear(4, 3), use
        self.log, self.one, self.recent = {"std": 0.0}, [0.0], [1.0, 2.0]
        self.options, self.meter = SimpleNamespace(last=0.0, scale=2.0), Meter()
        self.nested, self.by_name, self.size = {"a": OrderedDict()}, defaultdict(dict), {}

    def forward(self, x: Tensor, *more: Any) -> Tensor:
        h = self.layer(x)
        self.use(self, h, *more)
        return (h * self.options.scale).square().mean()


def _set(holder: Any, key: Any, value: Any) -> None:
    holder[key] = value


def _cleared(s: Any, h: Tensor) -> None:
    s.recent.clear()
    s.recent.append(h.std().item())


LEFT: dict[str, tuple[Callable[[Any, Tensor], Any], Callable[[Any], Any]]] = {
    "an entry": (lambda s, h: _set(s.log, "std", h.std().item()), lambda s: s.log["std"]),
    "a new entry": (lambda s, h: _set(s.log, "max", h.max().item()), lambda s: s.log["max"]),
    "several": (lambda s, h: s.log.update(a=h.std().item(), b=1.0), lambda s: s.log["a"]),
    "a size": (lambda s, h: _set(s.size, "rows", h.shape[0]), lambda s: s.size["rows"]),
    "a key that is no text": (lambda s, h: _set(s.size, 3, h.numel()), lambda s: s.size[3]),
    "an item": (lambda s, h: _set(s.one, 0, h.std().item()), lambda s: s.one[0]),
    "a list that is made anew": (_cleared, lambda s: s.recent[-1]),
    "an object": (
        lambda s, h: setattr(s.options, "last", h.std().item()),
        lambda s: s.options.last,
    ),
    "a parameter": (
        lambda s, h: setattr(s.layer.weight, "seen", h.std().item()),
        lambda s: s.layer.weight.seen,
    ),
    "a method": (lambda s, h: s.meter.put(h.std().item()), lambda s: s.meter.last),
    "nested": (
        lambda s, h: _set(s.nested["a"], "x", h.std().item()),
        lambda s: s.nested["a"]["x"],
    ),
    "a default": (
        lambda s, h: _set(s.by_name["a"], "x", h.std().item()),
        lambda s: s.by_name["a"]["x"],
    ),
    "a tensor": (lambda s, h: _set(s.log, "aux", h.std().detach()), lambda s: s.log["aux"]),
    "a global": (lambda _, h: _set(STATS, "std", h.std().item()), lambda _: STATS["std"]),
    "a global list": (lambda _, h: _set(LIST, 0, h.std().item()), lambda _: LIST[0]),
    "a global object": (lambda _, h: METER.put(h.std().item()), lambda _: METER.last),
    "a class": (lambda _, h: setattr(Net, "last", h.std().item()), lambda _: Net.last),
}


@pytest.mark.parametrize("name", LEFT)
def test_it_is_refused_where_it_is_read(name: str) -> None:
    use, read = LEFT[name]
    model: Any = graphaccel.optimize(Net(use).double(), devices=1)
    for _ in range(2):  # the second step is no other capture
        model(torch.randn(8, 4).double()).backward()
        assert len(captures_in(model).steps) == 1
        with pytest.raises(errors.OutputDropped):
            _ = read(model) + 1.0


OUTSIDE = """\
error[GA405]: `tests.errors.test_left_values.STATS['std']` has no value after a step: the model's forward did not run
  why:  a step runs a graph, which gives what the forward returns and the new values of buffers
  help: add it to the loss in the forward, or return it with the outputs:  return output, value
  help: or hold it in a buffer, to look at it:  self.register_buffer('std', torch.zeros(()))
  explain: graphaccel explain GA405"""  # noqa: E501


def test_the_text_of_a_global() -> None:
    model: Any = graphaccel.optimize(Net(LEFT["a global"][0]), devices=1)
    model(torch.randn(8, 4))
    with pytest.raises(errors.OutputDropped) as raised:
        _ = STATS["std"] + 1.0
    assert text_of(raised.value) == OUTSIDE


def _kept_by_size(s: Any, h: Tensor) -> None:
    if s.size.get("rows") != h.shape[0]:
        s.size["rows"], s.size["twice"] = h.shape[0], 2 * h.shape[0]


def test_what_the_forward_reads_later_stays() -> None:
    model: Any = graphaccel.optimize(Net(_kept_by_size), devices=1)
    model(torch.randn(8, 4)).backward()
    assert not any(type(value).__name__ == "Dropped" for value in model.size.values())


class Deep(nn.Module):
    """Equal blocks, of which a few are run to see what their forward does."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(12)))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x).square().mean()


class Block(nn.Module):
    """Leaves a value in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.log = nn.Linear(4, 4), {}

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        self.log["std"] = h.std().item()
        return x + h


def test_every_block_of_many() -> None:
    model: Any = graphaccel.optimize(Deep(), devices=1)
    model(torch.randn(8, 4)).backward()
    for block in model.blocks:
        with pytest.raises(errors.OutputDropped):
            _ = block.log["std"] + 1.0


ARGUMENT = """\
error[GA106]: the forward puts something into what it is called with: `args[1]NAME`
  --> test_left_values.py:LINE
  why:  a step runs a graph, which gives what the forward returns; the script's own container stays as it is
  help: return it:  return output, value
  help: or, if the script does not read it, copy the container in the forward:  batch = dict(batch)
  explain: graphaccel explain GA106"""  # noqa: E501


def _appended(_: Any, h: Tensor, losses: list[Tensor]) -> None:
    losses.append(h.abs().mean())


def _entered(_: Any, h: Tensor, batch: dict[str, Any]) -> None:
    batch["hidden"] = h


@pytest.mark.parametrize(
    ("use", "argument", "name", "line"),
    [
        (_appended, [], "[0]", "losses.append(h.abs().mean())"),
        (_entered, {}, "['hidden']", 'batch["hidden"] = h'),
        (_entered, {"y": torch.ones(8)}, "['hidden']", 'batch["hidden"] = h'),
    ],
)
def test_a_container_of_the_call(use: Any, argument: Any, name: str, line: str) -> None:
    model: Any = graphaccel.optimize(Net(use), devices=1)
    with pytest.raises(errors.StateFrozen) as raised:
        model(torch.randn(8, 4), argument)
    with open(__file__) as file:
        number = next(i for i, text in enumerate(file, 1) if text.strip() == line)
    assert text_of(raised.value) == ARGUMENT.replace("NAME", name).replace("LINE", str(number))
