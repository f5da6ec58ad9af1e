"""Products of one input as one product.

Megatron multiplies queries, keys and values by one weight, and what a gated activation reads by
another (`linear_qkv`, megatron/core/transformer/attention.py; `linear_fc1`, megatron/core/
transformer/mlp.py); Hugging Face's layers have a weight for each. One product fills more of a
device, reads its input once, and gives one gradient of it, where those of several are added up.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.validation.mixtures import MIXTURES
from benchmarks.validation.rows import Run
from graphaccel.planner.profile.efficiency import Work

_BYTES = 2  # of a number that is multiplied


@dataclass(frozen=True)
class Joined:
    """What a microbatch asks of a device more, all stages together, and how often in each phase;
    what it does not ask, less than no times. What is made again is backward."""

    work: Work
    forward: float
    backward: float

    @property
    def times(self) -> float:
        return self.forward + self.backward


def joined_works(run: Run, again: float) -> list[Joined]:
    """What differs. again: the share of the blocks whose forward is done again."""
    found: list[Joined] = []
    if not run.system.joined:
        return found
    rows = run.microbatch * run.sequence // run.context
    for columns, layers in filter(lambda group: group[1], _groups(run)):
        # Rows that are gathered in fewer bits are cast before, by each rank its own.
        own = 1 / run.tensor if run.gathered_bits < 16 else 1.0
        apart = [(side, -layers, own / len(columns)) for side in columns]
        for side, n, cast in [(sum(columns), layers, own), *apart]:
            found += [
                Joined(_product(rows, side, run.hidden, run.precision, cast), n, n * again),
                # the gradient of its input, and of its weight
                Joined(_product(rows, run.hidden, side, run.precision, 1 / 2), 0, n),
                Joined(_product(side, run.hidden, rows, run.precision, 1 / 2), 0, n),
            ]
        added = Work(bytes=3 * _BYTES * rows * run.hidden, dtype=run.precision)
        found.append(Joined(added, 0, -layers * (len(columns) - 1)))
    return found


def _product(rows: int, columns: int, inner: int, dtype: str, cast: float) -> Work:
    moved = _BYTES * (rows * inner + inner * columns + rows * columns)
    flops = 2 * rows * columns * inner
    return Work("product", flops, moved, dtype, rows, columns, inner, cast=cast)


def _groups(run: Run) -> list[tuple[tuple[int, ...], int]]:
    """(columns of products of one input on a device, in how many layers)."""
    if run.kind == "gpt":  # there they are one
        return []
    mixture = MIXTURES.get(run.kind)
    if mixture is None:
        found = [(_attention(run, run.hidden // run.heads), run.layers)]
        if run.kind == "llama":
            found.append((_gated(run, run.ffn), run.layers))
        return found
    more = {name: int(str(n)) for name, n in mixture.more.items() if str(n).isdigit()}
    sparse = sum(mixture.has_experts(n) for n in range(run.layers))
    if mixture.family == "DeepseekV3":  # of latent attention products are apart there too
        shared = more["moe_intermediate_size"] * more["n_shared_experts"]
        return [(_gated(run, run.ffn), run.layers - sparse), (_gated(run, shared), sparse)]
    pattern = str(mixture.more.get("hybrid_override_pattern", ""))[: run.layers]
    layers = pattern.count("*") + mixture.ahead if pattern else run.layers
    return [(_attention(run, more.get("head_dim", run.hidden // run.heads)), layers)]


def _attention(run: Run, width: int) -> tuple[int, ...]:
    heads = (run.heads, run.kv_heads, run.kv_heads)
    return tuple(max(1, n // run.tensor) * width for n in heads)


def _gated(run: Run, width: int) -> tuple[int, ...]:
    return (width // run.tensor,) * 2
