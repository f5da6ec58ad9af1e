"""Expert parallelism: which tokens go to which rank, and the all-to-all that sends them and back.

The number of rows is known only when the step runs. Every rank sends and receives, even if it is
nothing, so that no rank waits for another that has no tokens. In a graph sizes are those of an even
choice: as many rows arrive as leave.

Source: Lepikhin et al., GShard, 2020, §3.1 (all-to-all over experts), without capacities: no row is
dropped and none is padded, as in Gale et al., MegaBlocks, MLSys 2023, §3.
"""

from __future__ import annotations

import torch
from torch import Tensor

_c10d = torch.ops._c10d_functional


@torch.library.custom_op("graphaccel::expert_rows", mutates_args=())
def expert_rows(
    experts: Tensor, first: int, held: int, start: int, ranks: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute which rows go where.

    experts: int64 [S], the expert of every row of all ranks, rank after rank. first, held: first
    expert and number of experts of this rank, the same number on each. start: its first row; each
    has ceil(S / ranks).

    Returns own [~S / ranks], the rows that chose this rank's experts, ascending; order [S / ranks],
    this rank's rows sorted by the rank of their expert; back, the inverse of order; counts [2,
    ranks] on the host, rows that it sends to and receives from each rank. Synchronises with the
    device once.
    """
    share = -(-experts.shape[0] // ranks)
    to = torch.div(experts, held, rounding_mode="floor")
    mine = to == first // held
    sends = torch.bincount(to[start : start + share], minlength=ranks)
    source = torch.arange(experts.shape[0], device=experts.device) // share
    gets = torch.zeros_like(sends).index_add_(0, source, mine.to(sends.dtype))
    counts = torch.stack([sends, gets]).cpu()
    result = torch.argsort(mine, descending=True, stable=True)
    own = result[: int(counts[1].sum())].clone()
    order = torch.argsort(to[start : start + share], stable=True)
    return own, order, torch.argsort(order), counts


@expert_rows.register_fake
def _(
    experts: Tensor, first: int, held: int, start: int, ranks: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    share = -(-experts.shape[0] // ranks)
    built = [experts.new_empty(share) for _ in range(3)]
    return built[0], built[1], built[2], torch.empty(2, ranks, dtype=torch.int64, device="cpu")


@torch.library.custom_op("graphaccel::exchange_rows", mutates_args=())
def exchange_rows(x: Tensor, counts: Tensor, back: bool, group: str) -> Tensor:
    """All-to-all of rows of x [n, ...] over the ranks of a group, in their order: [m, ...].

    counts: of `expert_rows`; back: with senders and receivers swapped. The result must be waited
    for, as for any functional collective (`wait_tensor`).
    """
    sends, gets = counts.tolist()
    if back:
        sends, gets = gets, sends
    return _c10d.all_to_all_single(x, gets, sends, group)


@exchange_rows.register_fake
def _(x: Tensor, counts: Tensor, back: bool, group: str) -> Tensor:
    return x.new_empty(x.shape)


ROWS = torch.ops.graphaccel.expert_rows.default
EXCHANGE = torch.ops.graphaccel.exchange_rows.default
