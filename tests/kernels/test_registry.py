"""Which fusions may be placed."""

from __future__ import annotations

from graphaccel.kernels.registry import enabled


def test_inductor_on_a_gpu_is_left_what_it_fuses_itself() -> None:
    assert enabled("auto", "cuda", compiled=True) == ("attention", "linear_cross_entropy")
    assert {"layer_norm", "gelu_tanh", "rotary"} < set(enabled("auto", "cuda"))
    assert enabled("auto", "cpu", compiled=True) == enabled("auto", "cpu")


def test_named_fusions_are_placed_where_inductor_compiles_too() -> None:
    names = ("auto", "layer_norm", "-attention")
    assert enabled(names, "cuda", compiled=True) == ("layer_norm", "linear_cross_entropy")
