"""Scripts that use an optimized model in a way its graph does not allow: class, full text, no change."""

# ruff: noqa: E501 (texts are asserted as they are printed)

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.utils.flop_counter import FlopCounterMode

import graphaccel
from graphaccel import errors
from tests.support.small import WIDTH, Classifier, WithLogits, small_batch, used_optimizer
from tests.support.untouched import refused

ONCE = """\
error[GA402]: the loss can be differentiated only once, to first order
  why:  forward and backward ran together when the model was called; nothing is kept for a second backward
  help: add losses before backward:  (loss_a + loss_b).backward()
  help: or call the model again for the second backward
  explain: graphaccel explain GA402"""
NO_LOGITS = """\
error[GA405]: output `logits` is not kept in training by this plan
  why:  microbatches and stages would have to keep and send it; only the loss is
  help: keep it:  graphaccel.optimize(model, optimizer, outputs='all')
  help: or compute it under torch.no_grad()
  help: or, if the script computes its loss from it:  graphaccel.optimize(model, optimizer, loss_fn='outside')
  explain: graphaccel explain GA405"""


class Optional(Classifier):
    """Without targets it returns logits."""

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        logits = self.out(self.inner(x))
        return logits if y is None else nn.functional.cross_entropy(logits, y)


def watch(*_: Any) -> None:
    """A hook that does nothing."""


def _hook_text(kind: str) -> str:
    number = watch.__code__.co_firstlineno
    return f"""\
error[GA401]: the {kind} on `inner` can not be kept
  --> test_bad_input_script.py:{number}
{number:>5} | def watch(*_: Any) -> None:
      | ^^^^^^^^^^^^^^^^^^^^^^^^^^^
  why:  the step runs as one graph, in which modules are not called any more
  help: remove it before optimize():  handle.remove()
  help: or return what it reads from the model's forward
  explain: graphaccel explain GA401"""


@pytest.mark.parametrize(
    ("register", "kind"),
    [
        ("register_forward_hook", "forward hook"),
        ("register_forward_pre_hook", "forward pre-hook"),
        ("register_full_backward_hook", "backward hook"),
        ("register_full_backward_pre_hook", "backward pre-hook"),
    ],
)
def test_hooks_on_submodules(register: str, kind: str) -> None:
    model, batch = Classifier(), small_batch()
    optimizer = used_optimizer(model, batch)
    handle = getattr(model.inner, register)(watch)
    with refused(errors.HookNotKept, _hook_text(kind), model, optimizer):
        graphaccel.optimize(model, optimizer, example_batch=batch)
    handle.remove()
    graphaccel.optimize(model, optimizer, example_batch=batch)


@pytest.mark.parametrize(
    ("register", "kind"),
    [
        (module_hooks.register_module_forward_hook, "forward hook"),
        (module_hooks.register_module_forward_pre_hook, "forward pre-hook"),
        (module_hooks.register_module_full_backward_hook, "backward hook"),
        (module_hooks.register_module_full_backward_pre_hook, "backward pre-hook"),
    ],
)
def test_hooks_on_every_module(register: Callable[..., Any], kind: str) -> None:
    model, batch = Classifier(), small_batch()
    optimizer = torch.optim.AdamW(model.parameters())
    graphaccel.optimize(model, optimizer, devices=1)
    model(*batch)
    handle = register(watch)
    try:
        text = _hook_text(kind).replace("`inner`", "every module")
        with refused(errors.HookNotKept, text, model, optimizer):
            model(*batch)
    finally:
        handle.remove()
    with FlopCounterMode(display=False):  # torch's own hooks look on
        model(*batch)


def test_a_backward_hook_on_the_model() -> None:
    model, batch = Classifier(), small_batch()
    optimizer = used_optimizer(model, batch)
    model.register_full_backward_hook(watch)
    text = _hook_text("backward hook").replace("`inner`", "the model")
    with refused(errors.HookNotKept, text, model, optimizer):
        graphaccel.optimize(model, optimizer)


def test_a_hook_that_comes_later_is_not_lost_silently() -> None:
    model, batch = Classifier(), small_batch()
    optimizer = torch.optim.AdamW(model.parameters())
    graphaccel.optimize(model, optimizer, example_batch=batch)
    model.inner.register_forward_hook(watch)
    with refused(errors.HookNotKept, _hook_text("forward hook"), model, optimizer):
        model(*batch)


@pytest.mark.parametrize("register", ["register_forward_hook", "register_forward_pre_hook"])
def test_a_hook_on_the_model_beside_loss_fn(register: str) -> None:
    model = nn.Linear(WIDTH, WIDTH)
    graphaccel.optimize(model, loss_fn=nn.functional.mse_loss, devices=1)
    getattr(model, register)(watch)
    with pytest.raises(errors.HookNotKept, match="can not be kept beside loss_fn"):
        model(*torch.randn(2, 4, WIDTH))


def test_hooks_on_the_whole_model_and_on_parameters_stay() -> None:
    model, batch = Classifier(), small_batch()
    calls: list[str] = []
    model.register_forward_pre_hook(lambda *_: calls.append("before"))
    model.register_forward_hook(lambda *_: calls.append("after"))
    model.out.weight.register_hook(lambda _: calls.append("gradient"))
    graphaccel.optimize(model, example_batch=batch)
    model(*batch).backward()
    assert calls == ["before", "after", "gradient"]


def test_backward_twice() -> None:
    model, batch = Classifier(), small_batch()
    optimizer = torch.optim.AdamW(model.parameters())
    graphaccel.optimize(model, optimizer, example_batch=batch)
    loss = model(*batch)
    loss.backward(retain_graph=True)
    with refused(errors.RetainGraph, ONCE, model, optimizer):
        (0.1 * loss).backward()


def test_a_gradient_of_gradients() -> None:
    model, batch = Classifier(), small_batch()
    optimizer = torch.optim.AdamW(model.parameters())
    graphaccel.optimize(model, optimizer, example_batch=batch)
    loss = model(*batch)
    with refused(errors.RetainGraph, ONCE, model, optimizer):
        torch.autograd.grad(loss, list(model.parameters()), create_graph=True)


@pytest.mark.parametrize(
    "read",
    [
        lambda logits: logits.argmax(-1),
        lambda logits: torch.argmax(logits, -1),
        lambda logits: logits / 2,
        lambda logits: logits[0],
        lambda logits: len(logits),
        lambda logits: 2 * logits,
        lambda logits: -logits,
        lambda logits: logits > 0,
    ],
)
def test_an_output_that_is_not_kept(read: Callable[[Any], Any]) -> None:
    model, batch = WithLogits(), small_batch()
    optimizer = torch.optim.AdamW(model.parameters())
    graphaccel.optimize(model, optimizer, example_batch=batch, microbatches=2)
    output = model(*batch)
    assert repr(output["logits"]) == "<logits: not kept in training by this plan>"
    with refused(errors.OutputDropped, NO_LOGITS, model, optimizer):
        read(output["logits"])
    output["loss"].backward()


def test_outputs_are_kept_when_asked_for() -> None:
    plain, batch = WithLogits(), small_batch()
    expected = plain(*batch)["logits"]
    model = graphaccel.optimize(plain, example_batch=batch, microbatches=2, outputs="all")
    torch.testing.assert_close(model(*batch)["logits"], expected.detach())


def test_optimize_twice() -> None:
    model, batch = Classifier(), small_batch()
    optimizer = torch.optim.AdamW(model.parameters())
    graphaccel.optimize(model, optimizer, example_batch=batch)
    text = """\
error[GA407]: this model already runs under a plan
  help: call optimize() once
  explain: graphaccel explain GA407"""
    with refused(errors.GraphMisuse, text, model, optimizer):
        graphaccel.optimize(model, optimizer, example_batch=batch)


def test_another_dtype_later() -> None:
    model, (x, y) = Classifier(), small_batch()
    optimizer = torch.optim.AdamW(model.parameters())
    graphaccel.optimize(model, optimizer)
    model(x, y).backward()
    text = """\
error[GA406]: dtype of args[0] changed: captured with torch.float32, now torch.float64
  why:  the graph and the plan hold for batches like the captured one only
  help: convert it before the call:  x = x.to(torch.float32)
  explain: graphaccel explain GA406"""
    with refused(errors.BatchChanged, text, model, optimizer):
        model(x.double(), y)


def test_other_inputs_later() -> None:
    model, (x, y) = Optional(), small_batch()
    optimizer = torch.optim.AdamW(model.parameters())
    graphaccel.optimize(model, optimizer)
    model(x, y=y).backward()
    text = """\
error[GA406]: the inputs of the model changed: captured with args[0], y, now args[0]
  why:  the graph and the plan hold for batches like the captured one only
  help: call the model with the same inputs in every training step, and with others under torch.no_grad()
  explain: graphaccel explain GA406"""
    with refused(errors.BatchChanged, text, model, optimizer):
        model(x)


@pytest.mark.parametrize("wrapper", [nn.DataParallel, DistributedDataParallel])
def test_wrappers_are_replaced_not_wrapped(wrapper: type[nn.Module]) -> None:
    model = wrapper.__new__(wrapper)
    nn.Module.__init__(model)
    model.module = Classifier()
    text = f"""\
error[GA407]: the model is wrapped in {wrapper.__name__}, which a plan replaces
  help: graphaccel.optimize(model.module, optimizer)
  explain: graphaccel explain GA407"""
    with refused(errors.GraphMisuse, text, model):
        graphaccel.optimize(model)


def test_an_optimizer_of_another_model() -> None:
    model, batch = Classifier(), small_batch()
    optimizer = torch.optim.AdamW(Classifier().parameters())
    text = """\
error[GA407]: the optimizer holds no parameter of this model
  help: make it from the model:  torch.optim.AdamW(model.parameters())
  explain: graphaccel explain GA407"""
    with refused(errors.GraphMisuse, text, model, optimizer):
        graphaccel.optimize(model, optimizer, example_batch=batch)


@pytest.mark.parametrize("bound", [0.0, -1.0, float("inf"), float("nan"), "1", True])
def test_a_norm_that_nothing_can_be_clipped_to(bound: Any) -> None:
    model, batch = Classifier(), small_batch()
    optimizer = used_optimizer(model, batch)
    text = f"""\
error[GA407]: clip_norm is the largest norm of all gradients, a number above 0, not {bound!r}
  help: graphaccel.optimize(model, optimizer, clip_norm=1.0)
  explain: graphaccel explain GA407"""
    with refused(errors.GraphMisuse, text, model, optimizer):
        graphaccel.optimize(model, optimizer, example_batch=batch, clip_norm=bound)


def test_clipping_without_an_optimizer() -> None:
    model = Classifier()
    text = """\
error[GA407]: clip_norm clips in optimizer.step(), and optimize() was given no optimizer
  help: graphaccel.optimize(model, optimizer, clip_norm=1.0)
  explain: graphaccel explain GA407"""
    with refused(errors.GraphMisuse, text, model):
        graphaccel.optimize(model, example_batch=small_batch(), clip_norm=1.0)


def test_clipping_in_an_optimizer_that_calls_its_closure_several_times() -> None:
    model, batch = Classifier(), small_batch()
    optimizer = torch.optim.LBFGS(model.parameters())
    graphaccel.optimize(model, optimizer, example_batch=batch, clip_norm=1.0)
    text = """\
error[GA407]: optimizer.step(closure) with clip_norm=: the gradients that it would clip are made in the step
  help: call the closure first, then optimizer.step()
  explain: graphaccel explain GA407"""
    with refused(errors.GraphMisuse, text, model, optimizer):
        optimizer.step(lambda: 0.0)


def test_what_is_no_model_and_what_is_no_optimizer() -> None:
    model = Classifier()
    with pytest.raises(errors.GraphMisuse, match=r"is a torch\.nn\.Module, not function"):
        graphaccel.optimize(watch)  # type: ignore[call-overload]
    with pytest.raises(errors.GraphMisuse, match=r"is a torch\.optim\.Optimizer, not str"):
        graphaccel.optimize(model, "adam")  # type: ignore[call-overload]
    assert type(model) is Classifier


def _complex() -> nn.Module:
    return Classifier(nn.Linear(WIDTH, WIDTH, dtype=torch.complex64))


def _sparse() -> nn.Module:
    model = Classifier()
    model.inner.register_buffer("mask", torch.eye(WIDTH).to_sparse())
    return model


@pytest.mark.parametrize(
    ("build", "what", "why", "advice"),
    [
        (
            _complex,
            "dtype torch.complex64 of inner.weight",
            "gradients of such a tensor can not be summed over ranks",
            "keep it as two real tensors, or exclude its module",
        ),
        (
            _sparse,
            "layout torch.sparse_coo of inner.mask",
            "parameters must be dense",
            "inner.mask = inner.mask.to_dense()",
        ),
    ],
)
def test_tensors_no_plan_can_hold(
    build: Callable[[], nn.Module], what: str, why: str, advice: str
) -> None:
    text = f"""\
error[GA208]: {what} is not supported
  why:  {why}
  help: {advice}
  explain: graphaccel explain GA208"""
    model = build()
    with refused(errors.Unsupported, text, model):
        graphaccel.optimize(model, example_batch=small_batch())


class Constant(nn.Module):
    """A buffer, and nothing to train."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight).sum()


@pytest.mark.parametrize("build", [nn.Flatten, Constant])
@pytest.mark.parametrize("planned", [False, True])
def test_a_model_without_parameters(build: Callable[[], nn.Module], planned: bool) -> None:
    text = """\
error[GA208]: a model without parameters is not supported
  why:  there is nothing to train
  explain: graphaccel explain GA208"""
    model = build()
    with refused(errors.Unsupported, text, model):
        if planned:
            graphaccel.plan(model, small_batch()[:1], devices=2)
        else:
            graphaccel.optimize(model, example_batch=small_batch()[:1])


class Counted(nn.Module):
    """A loss whose gradient is zero everywhere, so that autograd has none."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.norm(self.layer(x), p=0)


@pytest.mark.parametrize("planned", [False, True])
def test_a_loss_without_a_gradient(planned: bool) -> None:
    text = """\
error[GA208]: a training step in which no parameter gets a gradient is not supported
  why:  the loss depends on no trained parameter, or only through ops whose gradient is zero everywhere
  help: take away what has no gradient between parameters and loss: .detach(), torch.no_grad(), argmax
  help: or call a forward that is not to train so:  with torch.no_grad(): output = model(batch)
  explain: graphaccel explain GA208"""
    model = Counted()
    with refused(errors.Unsupported, text, model):
        if planned:
            graphaccel.plan(model, small_batch()[:1], devices=2)
        else:
            graphaccel.optimize(model, example_batch=small_batch()[:1])


def test_a_forward_that_does_not_train_is_called_without_gradients() -> None:
    model = Counted()
    graphaccel.optimize(model, torch.optim.SGD(model.parameters()), devices=1)
    with torch.no_grad():
        assert model(*small_batch()[:1]).item() > 0
