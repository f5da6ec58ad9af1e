"""Pointer tables and launches of the `multi_tensor` kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from graphaccel.kernels.jit import tl
from graphaccel.kernels.multi_tensor.triton_kernels import (
    BLOCK,
    CHUNK,
    WARPS,
    adam_kernel,
    sgd_kernel,
    squares_kernel,
)


@dataclass(frozen=True)
class _Table:
    addresses: tuple[int, ...]
    counts: tuple[int, ...]
    table: Tensor
    chunks: Tensor
    aligned: bool


@dataclass
class Tables:
    """Launches, with the tables of the last ones: rebuilt only where a tensor moved or has another
    size (a part of it begins at the same address)."""

    tables: dict[Any, _Table] = field(default_factory=dict)

    def adam(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        exp_avgs: Sequence[Tensor],
        exp_avg_sqs: Sequence[Tensor],
        steps: Sequence[Tensor],
        rows: Sequence[tuple[float, ...]],
        decoupled: Sequence[bool],
        scale: Tensor | None,
        found_inf: Tensor | None,
        zero: bool,
        copies: Sequence[Tensor] | None,
    ) -> None:
        """One launch for each combination of dtypes. rows: lr, betas, eps, decay of each tensor."""
        given = list(zip(params, grads, exp_avgs, exp_avg_sqs, copies or params, strict=True))
        kinds = [(*(t.dtype for t in line), d) for line, d in zip(given, decoupled, strict=True)]
        for kind, places in _places(kinds).items():
            some = [given[i] for i in places]
            known = self._table(("adam", kind), some)
            device = params[0].device
            on_host = steps[0].device.type == "cpu"
            numbers = [(*rows[i], float(steps[i]) if on_host else 0.0) for i in places]
            table = _sent(torch.tensor(numbers, dtype=torch.float64), device)
            if not on_host:
                table[:, 5].copy_(torch.stack([steps[i] for i in places]))
            adam_kernel[(len(known.chunks),)](
                known.table, table, known.chunks, table if scale is None else scale,
                table if found_inf is None else found_inf,
                **_dtypes(kind[:5]), ALIGNED=known.aligned, DECOUPLED=kind[5],
                SCALED=scale is not None, SKIPS=found_inf is not None, COPIES=copies is not None,
                ZEROES=zero, CHUNK=CHUNK, SIZE=BLOCK, num_warps=WARPS,
            )  # fmt: skip

    def sgd(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        buffers: Sequence[Tensor | None],
        rows: Sequence[tuple[float, ...]],
        kinds: Sequence[tuple[bool, bool]],
        scale: Tensor | None,
        found_inf: Tensor | None,
        zero: bool,
        copies: Sequence[Tensor] | None,
    ) -> None:
        """One launch for each combination of dtypes and of momentum. rows: lr, momentum, dampening,
        decay of each tensor, 1 where its buffer is empty. kinds: (has momentum, nesterov)."""
        states = [p if b is None else b for p, b in zip(params, buffers, strict=True)]
        given = list(zip(params, grads, states, states, copies or params, strict=True))
        keys = [(*(t.dtype for t in line), *k) for line, k in zip(given, kinds, strict=True)]
        for kind, places in _places(keys).items():
            known = self._table(("sgd", kind), [given[i] for i in places])
            numbers = torch.tensor([(*rows[i], 0.0) for i in places], dtype=torch.float64)
            table = _sent(numbers, params[0].device)
            sgd_kernel[(len(known.chunks),)](
                known.table, table, known.chunks, table if scale is None else scale,
                table if found_inf is None else found_inf,
                **_dtypes(kind[:5]), ALIGNED=known.aligned, MOMENTUM=kind[5], NESTEROV=kind[6],
                SCALED=scale is not None, SKIPS=found_inf is not None, COPIES=copies is not None,
                ZEROES=zero, CHUNK=CHUNK, SIZE=BLOCK, num_warps=WARPS,
            )  # fmt: skip

    def squares(self, grads: Sequence[Tensor]) -> Tensor:
        """The sum of squares of all gradients, a float32 scalar on their device."""
        found_inf = []
        for kind, places in _places([g.dtype for g in grads]).items():
            known = self._table(("squares", kind), [(grads[i],) * 5 for i in places])
            partial = grads[0].new_empty(len(known.chunks), dtype=torch.float32)
            squares_kernel[(len(known.chunks),)](
                known.table, known.chunks, partial, GRAD=_triton(kind), ALIGNED=known.aligned,
                CHUNK=CHUNK, SIZE=BLOCK, num_warps=WARPS,
            )  # fmt: skip
            found_inf.append(partial.sum())
        return torch.stack(found_inf).sum()

    def _table(self, key: Any, lines: Sequence[Sequence[Tensor]]) -> _Table:
        addresses = tuple(t.data_ptr() for line in lines for t in line)
        counts = tuple([line[0].numel() for line in lines])
        known = self.tables.get(key)  # the key contains their dtypes
        if known is not None and known.addresses == addresses and known.counts == counts:
            return known
        device = lines[0][0].device
        table = [(*(t.data_ptr() for t in line), n) for line, n in zip(lines, counts, strict=True)]
        chunks = [(i, k) for i, n in enumerate(counts) for k in range(-(-n // CHUNK))]
        table = _Table(
            addresses,
            counts,
            _sent(torch.tensor(table, dtype=torch.int64), device),
            _sent(torch.tensor(chunks, dtype=torch.int32), device),
            all(a % 16 == 0 for a in addresses),
        )
        self.tables[key] = table
        return table


def _sent(values: Tensor, device: torch.device) -> Tensor:
    """On the device, by an asynchronous copy."""
    if device.type == "cpu":
        return values
    return values.pin_memory().to(device, non_blocking=True)


def _places(keys: Sequence[Any]) -> dict[Any, list[int]]:
    found_inf: dict[Any, list[int]] = {}
    for place, key in enumerate(keys):
        found_inf.setdefault(key, []).append(place)
    return found_inf


def _triton(dtype: torch.dtype) -> Any:
    return getattr(tl, str(dtype).removeprefix("torch."))


def _dtypes(kinds: Sequence[torch.dtype]) -> dict[str, Any]:
    weight, grad, state, _, copy = (_triton(k) for k in kinds)
    wide = tl.float64 if kinds[0] == torch.float64 else tl.float32
    return {"WEIGHT": weight, "GRAD": grad, "STATE": state, "COPY": copy, "WIDE": wide}
