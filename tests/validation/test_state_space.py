"""State space layers of published runs: what their fused kernels compute, in each its one op."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.validation.state_space import (
    CHUNK,
    Mixer,
    between_bytes,
    convolution,
    gated_norm,
    scan,
)


def test_a_layer_computes_what_hugging_face_s_does() -> None:
    from transformers import NemotronHConfig
    from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMamba2Mixer

    groups, heads, width, state, hidden = 2, 4, 3, 5, 8
    config = NemotronHConfig(
        hidden_size=hidden, mamba_num_heads=heads, mamba_head_dim=width, ssm_state_size=state,
        n_groups=groups, chunk_size=4, time_step_min=0.0, layers_block_type=["linear_attention"],
        num_hidden_layers=1,
    )  # fmt: skip
    torch.manual_seed(0)
    theirs, ours = NemotronHMamba2Mixer(config, 0), Mixer(hidden, groups, heads, width, state)
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    inner, states = heads * width, 2 * groups * state
    gate_rows, into_out, step = theirs.in_proj.weight.split([2 * inner, states, heads])
    taps, bias = theirs.conv1d.weight[:, 0], theirs.conv1d.bias
    assert bias is not None
    given = {
        "in_proj.weight": gate_rows, "states_proj.weight": into_out, "step_proj.weight": step,
        "rows_taps": taps[:inner], "states_taps": taps[inner:], "rows_bias": bias[:inner],
        "states_bias": bias[inner:], "step_bias": theirs.dt_bias, "decay": theirs.A_log,
        "skip": theirs.D, "norm": theirs.norm.weight, "out_proj.weight": theirs.out_proj.weight,
    }  # fmt: skip
    shapes = {name: value.shape for name, value in ours.named_parameters()}
    ours.load_state_dict({name: value.view(shapes[name]) for name, value in given.items()})
    rows = torch.randn(2, 10, hidden)
    torch.testing.assert_close(ours(rows), theirs(rows), rtol=1e-4, atol=1e-5)


def _example(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    return [torch.rand(s, dtype=torch.float64, requires_grad=True) for s in shapes]


@pytest.mark.parametrize(
    ("op", "shapes"),
    [(convolution, [(2, 5, 3), (3, 4), (3,)]),
     (scan, [(1, 3, 2, 2, 2), (1, 3, 2, 2), (2, 2), (1, 3, 2, 4), (1, 3, 2, 4), (2, 2)]),
     (gated_norm, [(1, 3, 2, 4), (1, 3, 2, 4), (2, 4)])],
)  # fmt: skip
def test_gradients(op: torch.library.CustomOpDef, shapes: list[tuple[int, ...]]) -> None:
    given = _example(*shapes)
    assert torch.autograd.gradcheck(op, given)
    torch.library.opcheck(op, tuple(given), test_utils=("test_schema", "test_faketensor"))


def test_flops_of_a_scan_are_those_of_its_chunks() -> None:
    """Twice for each multiplication of the products of one chunk, in arXiv 2405.21060, section 6:
    scores of a group, what tokens read of each other, what goes into states and comes out."""
    groups, heads, width, state = 2, 3, 4, 8
    given = [
        torch.empty(shape, device="meta") for shape in (
            (1, CHUNK, groups, heads, width), (1, CHUNK, groups, heads), (groups, heads),
            (1, CHUNK, groups, state), (1, CHUNK, groups, state), (groups, heads),
        )
    ]  # fmt: skip
    with FlopCounterMode(display=False) as counter:
        scan(*given)
    scores, tokens = CHUNK * CHUNK * state, heads * CHUNK * CHUNK * width
    states = 2 * heads * CHUNK * width * state
    assert counter.get_total_flops() == 2 * groups * (scores + tokens + states)


def test_what_kernels_of_a_scan_write_for_each_other() -> None:
    """Of a chunk's states, 4 bytes written and read, and 2; of the scores of its tokens 4 written
    and read; and the rows once more."""
    groups, heads, width, state = 2, 3, 4, 8
    graph = torch.fx.Graph()
    shapes = ((1, CHUNK, groups, heads, width), (1,), (1,), (1, CHUNK, groups, state), (1,), (1,))
    given = [graph.placeholder(f"given_{number}") for number in range(len(shapes))]
    for node, shape in zip(given, shapes, strict=True):
        node.meta["val"] = torch.empty(shape, device="meta")
    ahead = graph.call_function(torch.ops.validation.scan.default, tuple(given))
    states, scores = groups * heads * width * state, groups * CHUNK * CHUNK
    rows = CHUNK * groups * heads * width
    assert between_bytes(ahead, CHUNK) == (4 + 4 + 2 + 2) * states + (4 + 4) * scores + 2 * rows
    back = graph.call_function(torch.ops.validation.scan_backward.default, (ahead, *given))
    assert between_bytes(back, CHUNK) > 2 * between_bytes(ahead, CHUNK)
    assert between_bytes(given[0], CHUNK) == 0
