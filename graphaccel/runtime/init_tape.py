"""A recording of ops on tensors without memory; computes any of their values by itself.

    recorded                                      value(layers.1.weight)
      0  %w0 = empty([64, 64])                      3  %w1 = empty([64, 64])
      1  uniform_(%w0)           state 17f3..       5  normal_(%w1)            state 9c02..
      3  %w1 = empty([64, 64])
      4  uniform_(%w1)           state a7e0..     5 overwrote all that 4 wrote
      5  normal_(%w1)            state 9c02..

Values are identified by their storage, so views, tied parameters and `.data` need no special case.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from graphaccel.compat.torch import pytree
from graphaccel.compat.torch.modes import without_modes
from graphaccel.compat.torch.tensors import storage_key


@dataclass(frozen=True)
class TensorRef:
    """A tensor of the record: which storage it views, and how."""

    memory: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def on(self, memory: torch.UntypedStorage) -> torch.Tensor:
        """The tensor on allocated memory."""
        empty = torch.empty(0, dtype=self.dtype, device="cpu")
        return empty.set_(memory, self.offset, self.shape, self.stride)  # type: ignore[arg-type]


@dataclass(frozen=True)
class InitCall:
    """One op. reads, writes: storages. fills: the one that it overwrites entirely, if any. state:
    of the generator before it, for an op that draws."""

    op: Any
    args: tuple[Any, ...] = field(repr=False)
    kwargs: Mapping[str, Any] = field(repr=False)
    out: tuple[TensorRef | None, ...]
    reads: frozenset[int]
    writes: frozenset[int]
    fills: frozenset[int]
    state: torch.Tensor | None = field(repr=False)


class InitTape:
    """The ops that were recorded while a model was built."""

    def __init__(self) -> None:
        self.calls: list[InitCall] = []
        self.sizes: dict[int, int] = {}  # bytes of each storage
        self.tensors: dict[str, TensorRef] = {}  # parameters and buffers by name
        self._writers: dict[int, list[int]] = {}
        self._constants: dict[int, torch.Tensor] = {}

    def __deepcopy__(self, _memo: Any) -> InitTape:
        return self  # a copy of a model is initialised in the same way

    def append(self, call: InitCall) -> None:
        """Add an op."""
        for memory in call.writes:
            self._writers.setdefault(memory, []).append(len(self.calls))
        self.calls.append(call)

    def value(self, wanted: str | TensorRef) -> torch.Tensor:
        """A parameter or buffer by name, or any tensor of the record, on the CPU."""
        ref = self.tensors[wanted] if isinstance(wanted, str) else wanted
        memories: dict[int, torch.UntypedStorage] = {}
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            for number in self._needed(ref.memory):
                self._replay(self.calls[number], memories)
            return ref.on(self._memory(ref.memory, memories))

    def _needed(self, memory: int) -> list[int]:
        """Numbers of the calls that the last value of a storage depends on, in order."""
        waiting = [-n for n in self._writers.get(memory, ())]
        heapq.heapify(waiting)
        wanted, chosen = {memory}, []
        while waiting:
            number = -heapq.heappop(waiting)
            call = self.calls[number]
            if (chosen and chosen[-1] == number) or not call.writes & wanted:
                continue
            chosen.append(number)
            wanted -= call.fills
            for source in call.reads - call.fills - wanted:
                wanted.add(source)
                for n in self._writers.get(source, ()):
                    if n < number:
                        heapq.heappush(waiting, -n)
        return chosen[::-1]

    def _replay(self, call: InitCall, memories: dict[int, torch.UntypedStorage]) -> None:
        args, kwargs = pytree.tree_map_only(
            TensorRef,
            lambda r: r.on(self._memory(r.memory, memories)),
            (call.args, dict(call.kwargs)),
        )
        result = _drawn(call.op, args, kwargs, call.state)
        for ref, built in zip(call.out, pytree.tree_leaves(result), strict=True):
            if ref is not None and ref.memory in call.fills:
                memories[ref.memory] = built.untyped_storage()

    def _memory(
        self, memory: int, memories: dict[int, torch.UntypedStorage]
    ) -> torch.UntypedStorage:
        if memory not in memories:
            known = self._constants.get(memory)
            memories[memory] = (
                torch.UntypedStorage(self.sizes[memory])
                if known is None
                else known.untyped_storage()
            )
        return memories[memory]

    def constant(self, tensor: torch.Tensor) -> TensorRef:
        """Record the current values of a tensor that an op reads and that was not created by a
        recorded op."""
        with without_modes():
            kept = tensor.detach().clone()
        memory = storage_key(kept)
        self._constants[memory] = kept
        self.sizes[memory] = kept.untyped_storage().nbytes()
        return ref_of(kept, memory)

    def states(self) -> list[torch.Tensor]:
        """States of the generator before every call that draws."""
        return [c.state for c in self.calls if c.state is not None]

    def with_states(self, states: Iterator[torch.Tensor]) -> None:
        """Use other generator states: those of another rank."""
        self.calls = [c if c.state is None else replace(c, state=next(states)) for c in self.calls]

    def digest(self) -> str:
        """Equal on ranks that built the same model; storages are numbered as they appear."""
        numbers: dict[int, int] = {}
        text = hashlib.blake2b(digest_size=16)

        def plain(ref: TensorRef) -> tuple[Any, ...]:
            number = numbers.setdefault(ref.memory, len(numbers))
            return (number, str(ref.dtype), ref.shape, ref.stride, ref.offset)

        for call in self.calls:
            kwargs = {k: v for k, v in call.kwargs.items() if k != "generator"}  # sent apart
            said = pytree.tree_map_only(TensorRef, plain, (call.args, kwargs, call.out))
            text.update(f"{call.op} {said}".encode())
        return text.hexdigest()


def _drawn(op: Any, args: tuple, kwargs: dict, state: torch.Tensor | None) -> Any:
    """Run an op, with the generator set to `state` if it draws."""
    if state is None:
        return op(*args, **kwargs)
    if kwargs.get("generator") is not None:
        kwargs = {**kwargs, "generator": torch.Generator()}
    (kwargs.get("generator") or torch.default_generator).set_state(state)
    return op(*args, **kwargs)


def ref_of(tensor: torch.Tensor, memory: int | None = None) -> TensorRef:
    return TensorRef(
        storage_key(tensor) if memory is None else memory,
        tensor.dtype,
        tuple(tensor.shape),
        tuple(tensor.stride()),
        int(tensor.storage_offset()),
    )
