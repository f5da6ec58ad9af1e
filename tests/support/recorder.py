"""A recorder on the CPU that is as strict as CUDA graphs are, for tests of `runtime.cuda_graphs`.

As there, recording computes nothing and sends nothing: what a recording makes holds no values
before it is replayed, and what it writes to elsewhere stays as it was. It has to wait for the
collectives that it starts. Results lie in one arena, at the lowest address that is free; what is
freed is filled with NaN (all bits set) there and then, in replays as well. A replay knows addresses
only: it goes through the calls as they were recorded, whatever became of the tensors, and raises
where nothing lies any more at the address of a tensor it was recorded with.
"""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from graphaccel.compat.torch import pytree
from graphaccel.compat.torch.fakes import FakeTensorMode
from graphaccel.compat.torch.modes import TorchDispatchMode
from graphaccel.compat.torch.tensors import storage_key

_ALIGNED = 64
_WAIT = torch.ops._c10d_functional.wait_tensor.default


class Arena:
    """Memory given out from the lowest address that is free."""

    def __init__(self, size: int) -> None:
        self._memory = bytearray(b"\xff" * size)
        self._start = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._size = size
        self.taken: dict[int, int] = {}
        self.freed: list[tuple[int, int]] = []  # since somebody last looked
        self.most = 0

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor's memory is here."""
        return 0 <= tensor.untyped_storage().data_ptr() - self._start < self._size

    def offset(self, tensor: Tensor) -> int:
        """Where its storage begins."""
        return tensor.untyped_storage().data_ptr() - self._start

    def like(self, tensor: Tensor) -> Tensor:
        """A tensor laid out as another, in memory of its own that is free again when it dies."""
        size = max(_ALIGNED, -(-_reach(tensor) // _ALIGNED) * _ALIGNED)
        place = 0
        for start, length in sorted(self.taken.items()):
            if start - place >= size:
                break
            place = start + length
        assert place + size <= self._size, "the arena is too small for this test"
        self.taken[place] = size
        self.most = max(self.most, place + size)
        block = (ctypes.c_char * size).from_buffer(self._memory, place)
        weakref.finalize(block, self._free, place, size)
        return _shown(block, tensor)

    def _free(self, place: int, size: int) -> None:
        del self.taken[place]
        self.freed.append((place, size))
        self.poison(place, size)

    def poison(self, place: int, size: int) -> None:
        """NaN in every dtype of floats."""
        ctypes.memset(self._start + place, 0xFF, size)

    def memory(self) -> bytes:
        """What lies in it."""
        return bytes(self._memory[: self.most])

    def restore(self, memory: bytes) -> None:
        """What lay in it once; nothing in the rest."""
        ctypes.memmove(self._start, memory, len(memory))
        self.poison(len(memory), self._size - len(memory))

    def ghost(self, place: int, like: Tensor) -> Tensor:
        """A tensor at an address, which holds nothing there."""
        return _shown((ctypes.c_char * _reach(like)).from_address(self._start + place), like)


def _reach(tensor: Tensor) -> int:
    """Bytes of its storage that a tensor reaches."""
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    empty = tensor.numel() == 0
    return (tensor.storage_offset() + 1 + (0 if empty else last)) * tensor.element_size()


def _shown(block: Any, like: Tensor) -> Tensor:
    flat = torch.frombuffer(block, dtype=like.dtype)
    return flat.as_strided(like.shape, like.stride(), like.storage_offset())


@dataclass(frozen=True)
class _Address:
    """A tensor as a recording knows it. place: in the arena. outside: the storage it was."""

    like: Tensor
    place: int = -1
    pointer: int = -1
    outside: StorageWeakRef | None = None


@dataclass
class PoolRecording:
    """Calls by address, and what they free."""

    arena: Arena
    calls: list[Callable[[], None]] = field(default_factory=list)
    replays: int = 0

    def replay(self) -> None:
        """All of it, on the memory it was recorded with."""
        self.replays += 1
        for call in self.calls:
            call()


class PoolRecorder:
    """`runtime.cuda_graphs.Recorder` on the CPU."""

    def __init__(self, size: int = 1 << 24) -> None:
        self.arena = Arena(size)
        self.made: list[PoolRecording] = []
        self.warmed = 0

    def warm(self, run: Callable[[], Sequence[Any]]) -> Sequence[Any]:
        self.warmed += 1
        return run()

    def record(self, run: Callable[[], None]) -> PoolRecording:
        recording = PoolRecording(self.arena)
        self.made.append(recording)
        generator = torch.random.get_rng_state()
        before = self.arena.memory()
        watching = _Watching(recording)
        with watching:
            run()
        watching.note_freed()
        assert not watching.in_flight, "a recording does not wait for collectives that it started"
        torch.random.set_rng_state(generator)  # recording draws nothing
        self.arena.restore(before)  # and computes nothing
        return recording


class _Watching(TorchDispatchMode):
    """Notes each call, and puts what it makes into the arena."""

    def __init__(self, recording: PoolRecording) -> None:
        super().__init__()
        self.recording, self.arena = recording, recording.arena
        self.in_flight: set[int] = set()
        self.note_freed()

    def note_freed(self) -> None:
        """A replay does to the memory what happened to it meanwhile."""
        for place, size in self.arena.freed:
            self.recording.calls.append(partial(self.arena.poison, place, size))
        self.arena.freed.clear()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.note_freed()
        kwargs = kwargs or {}
        if func is _WAIT:
            self.in_flight.discard(storage_key(args[0]))
            return args[0]
        leaves, spec = pytree.tree_flatten((args, kwargs))
        given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        known = [self._address(x) if isinstance(x, Tensor) else x for x in leaves]
        written = _written(func, args, kwargs)
        if written:
            # The device does nothing yet: only what a call returns is needed, and it is known.
            if _is_collective(func):
                self.in_flight |= set(map(storage_key, written))
            elif all(self.arena.holds(t) for t in written):
                func(*args, **kwargs)
            made = written[0] if len(written) == 1 else tuple(written)
            if not func._schema.returns:
                made = None
            self._note(func, known, spec, [])
            return made
        made = _like_results(func, args, kwargs) if _is_collective(func) else func(*args, **kwargs)
        results, shape = pytree.tree_flatten(made)
        own = {storage_key(t) for t in given}
        fresh: list[tuple[int, _Address]] = []
        moved: dict[int, Tensor] = {}
        for place, result in enumerate(results):
            if isinstance(result, Tensor) and storage_key(result) not in own:
                key = storage_key(result)
                assert key not in moved, "two results in one new storage"
                moved[key] = results[place] = self.arena.like(result)
                if _is_collective(func):
                    self.in_flight.add(storage_key(results[place]))
                else:
                    results[place].copy_(result)
                fresh.append((place, self._address(results[place])))
        if fresh:
            self._note(func, known, spec, fresh)
        return pytree.tree_unflatten(results, shape)

    def _note(
        self, func: Any, known: list[Any], spec: Any, fresh: list[tuple[int, _Address]]
    ) -> None:
        self.note_freed()  # before what it makes is written there

        def call() -> None:
            leaves = [self._at(x) if isinstance(x, _Address) else x for x in known]
            args, kwargs = pytree.tree_unflatten(leaves, spec)
            results = pytree.tree_leaves(func(*args, **kwargs))
            if _is_collective(func):
                results = [_WAIT(t) for t in results]
            for place, address in fresh:
                self._at(address).copy_(results[place])

        self.recording.calls.append(call)

    def _address(self, tensor: Tensor) -> _Address:
        reach = _reach(tensor) // tensor.element_size()
        flat = torch.empty(reach, dtype=tensor.dtype, device="meta")
        like = flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        if self.arena.holds(tensor):
            return _Address(like, place=self.arena.offset(tensor))
        storage = tensor.untyped_storage()
        return _Address(like, pointer=storage.data_ptr(), outside=StorageWeakRef(storage))

    def _at(self, address: _Address) -> Tensor:
        if address.outside is None:
            return self.arena.ghost(address.place, address.like)
        if address.outside.expired():  # another tensor may lie there now: a device can not tell
            assert _lies_somewhere(address), "a recording reads memory that was given back"
        block = (ctypes.c_char * max(1, _reach(address.like))).from_address(address.pointer)
        return _shown(block, address.like)


def _is_collective(func: Any) -> bool:
    return func.namespace == "_c10d_functional"


def _like_results(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """What a call gives, without a value: nothing is sent."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def fake(leaf: Any) -> Any:
        return mode.from_tensor(leaf) if isinstance(leaf, Tensor) else leaf

    with mode:
        return func(*pytree.tree_map(fake, args), **pytree.tree_map(fake, kwargs))


def _lies_somewhere(address: _Address) -> bool:
    """Whether a live tensor has the memory at an address."""
    end = address.pointer + _reach(address.like)
    for found in gc.get_objects():
        if type(found) in (Tensor, torch.nn.Parameter) and found.device.type == "cpu":
            storage = found.untyped_storage()
            start = storage.data_ptr()
            if start <= address.pointer and end <= start + storage.nbytes():
                return True
    return False


def _written(func: Any, args: tuple, kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that a call writes to, in the order in which it gives them back."""
    declared = func._schema.arguments
    named = {a.name: v for a, v in zip(declared, args, strict=False)} | kwargs
    found = []
    for argument in declared:
        alias = argument.alias_info
        if alias is not None and alias.is_write and argument.name in named:
            found += [x for x in pytree.tree_leaves(named[argument.name]) if isinstance(x, Tensor)]
    return found
