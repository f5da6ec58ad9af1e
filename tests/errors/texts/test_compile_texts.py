"""The full text of every error about compiled stages; a machine without a C++ compiler, or a
GPU."""

from __future__ import annotations

import contextlib

import pytest
import torch

import graphaccel
from graphaccel import errors
from graphaccel.runtime.inductor.compile import check_compiler
from tests.support.small import Classifier, small_batch, used_optimizer

CASES = [
    (
        errors.CompilerMissing(
            asked="compile='inductor'", reason="No working C++ compiler found: (None, 'g++')"
        ),
        """\
error[GA901]: compile='inductor' needs a C++ compiler, and none works here
  why:  No working C++ compiler found: (None, 'g++')
  help: install one, or name it:  CXX=/usr/bin/g++
  help: or without it:  graphaccel.optimize(model, optimizer, compile='off')
  explain: graphaccel explain GA901""",
    ),
    (
        errors.CompilerMissing(
            asked="compile='inductor'",
            reason="the kernels that Inductor makes for a GPU are Triton's",
            triton=True,
        ),
        """\
error[GA901]: compile='inductor' needs Triton on a GPU, and it is not installed
  why:  the kernels that Inductor makes for a GPU are Triton's
  help: pip install triton
  help: or without it:  graphaccel.optimize(model, optimizer, compile='off')
  explain: graphaccel explain GA901""",
    ),
    (
        errors.CompileFailed(
            stage=1,
            phase="backward",
            calls=212,
            first="aten.mm.default in transformer.h.6",
            cause="CppCompileError: C++ compile error",
        ),
        """\
error[GA902]: Inductor failed to compile the backward of stage 1
  part:      212 calls from aten.mm.default in transformer.h.6 on
  reported:  CppCompileError: C++ compile error
  why:  what Inductor can not compile is left to torch beforehand; this was not foreseen
  help: let torch run that part:  graphaccel.optimize(model, optimizer, compile='inductor', fallback='fx')
  help: run the graphs as they are:  graphaccel.optimize(model, optimizer, compile='off')
  help: to see more of it:  TORCH_LOGS=+inductor
  explain: graphaccel explain GA902""",
    ),
    (
        errors.GraphsNeedGpu(device="cpu"),
        """\
error[GA903]: cuda_graphs=True needs an NVIDIA GPU, and the model runs on 'cpu'
  why:  a CUDA graph is a recording of what a GPU was told to do
  help: leave it out here:  graphaccel.optimize(model, optimizer)
  help: or plan for a GPU:  graphaccel plan FILE:job --device h100-80gb --cuda-graphs
  explain: graphaccel explain GA903""",
    ),
    (
        errors.CaptureFailed(
            stage=1,
            phase="backward",
            cause="CUDA error: operation not permitted when stream is capturing",
        ),
        """\
error[GA904]: the backward of stage 1 could not be recorded as a CUDA graph
  reported:  CUDA error: operation not permitted when stream is capturing
  why:  what can not be recorded is left out beforehand; this was not foreseen, as with an operator of your own that asks the device for a value
  help: run the step without:  graphaccel.optimize(model, optimizer, cuda_graphs=False)
  explain: graphaccel explain GA904""",
    ),
]


@pytest.mark.parametrize(("error", "text"), CASES, ids=lambda value: getattr(value, "code", ""))
def test_text(error: errors.GraphAccelError, text: str) -> None:
    assert str(error) == text


def test_without_a_compiler_nothing_is_changed() -> None:
    import torch._inductor.config as config  # noqa: TID251 -- what CXX says when torch is loaded

    model = Classifier()
    optimizer = used_optimizer(model)
    with config.patch({"cpp.cxx": (None, "/nowhere/g++")}):
        with pytest.raises(errors.CompilerMissing, match="'/nowhere/g"):
            graphaccel.optimize(
                model, optimizer, devices=1, compile="inductor", example_batch=small_batch()
            )
    assert type(model) is Classifier
    assert isinstance(model(*small_batch()), torch.Tensor)


@pytest.mark.parametrize("installed", [True, False])
def test_a_gpu_needs_triton(monkeypatch: pytest.MonkeyPatch, installed: bool) -> None:
    monkeypatch.setattr("graphaccel.runtime.inductor.compile.has_triton", lambda: installed)
    check_compiler("off", torch.device("cuda"))
    raises = contextlib.nullcontext() if installed else pytest.raises(errors.CompilerMissing)
    with raises:
        check_compiler("inductor", torch.device("cuda"))


def test_without_a_gpu_nothing_is_changed() -> None:
    model = Classifier()
    optimizer = used_optimizer(model)
    with pytest.raises(errors.GraphsNeedGpu) as raised:
        graphaccel.optimize(
            model, optimizer, devices=1, cuda_graphs=True, example_batch=small_batch()
        )
    assert str(raised.value) == dict((type(e), text) for e, text in CASES)[errors.GraphsNeedGpu]
    assert type(model) is Classifier
    assert isinstance(model(*small_batch()), torch.Tensor)
