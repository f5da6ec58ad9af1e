"""That the recorder on the CPU is strict: what it let pass, no test could find."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.support.recorder import PoolRecorder


def keep(place: Tensor, value: Tensor) -> None:
    place.copy_(value)


def test_recording_computes_nothing_and_writes_nowhere() -> None:
    recorder = PoolRecorder(1 << 12)
    source, target, made = torch.ones(4), torch.zeros(4), []

    def work() -> None:
        made.append(source + 1)
        target.add_(made[0])

    recording = recorder.record(work)
    assert made[0].isnan().all()
    assert target.eq(0).all()
    recording.replay()
    recording.replay()
    assert made[0].eq(2).all()
    assert target.eq(4).all()


def test_a_replay_knows_addresses_only() -> None:
    """New values at an old address are read; a tensor elsewhere is not looked at; memory that was
    given back is an error."""
    recorder = PoolRecorder(1 << 12)
    source, result = torch.ones(4), torch.zeros(4)
    recording = recorder.record(lambda: keep(result, source * 2))
    source.fill_(3.0)
    recording.replay()
    assert result.eq(6).all()
    source = torch.full((4,), 5.0)
    with pytest.raises(AssertionError, match="given back"):
        recording.replay()


def test_another_tensor_at_an_old_address_is_read() -> None:
    """As on a device: an allocator gives the same memory out again."""
    recorder = PoolRecorder(1 << 12)
    memory = bytearray(16)
    source = [torch.frombuffer(memory, dtype=torch.float32).fill_(1.0)]
    result = torch.zeros(4)
    recording = recorder.record(lambda: keep(result, source[0] * 2))
    source.clear()
    source.append(torch.frombuffer(memory, dtype=torch.float32).fill_(4.0))
    recording.replay()
    assert result.eq(8).all()
    source.clear()
    with pytest.raises(AssertionError, match="given back"):
        recording.replay()


def test_what_is_freed_is_taken_by_later_recordings_and_what_is_kept_is_not() -> None:
    recorder = PoolRecorder(1 << 12)
    source, kept, result = torch.ones(4), [], torch.zeros(4)
    first = recorder.record(lambda: kept.extend([source + 1, source + 2]))
    address = kept[0].data_ptr()
    first.replay()
    stays: Tensor = kept[1]
    kept.clear()  # the first of the two is free

    def later() -> None:
        other = source + 7
        assert other.data_ptr() == address
        result.copy_(other + stays)

    second = recorder.record(later)
    for _ in range(2):
        first.replay()
        second.replay()
        assert result.eq(8 + 3).all()
        assert stays.eq(3).all()
        assert recorder.arena.ghost(0, torch.empty(4, device="meta")).isnan().all(), "freed again"


def test_a_recording_draws_no_random_numbers() -> None:
    recorder = PoolRecorder(1 << 12)
    result = torch.zeros(8)
    torch.manual_seed(2)
    recording = recorder.record(lambda: keep(result, torch.rand(8)))
    recording.replay()
    torch.manual_seed(2)
    assert torch.equal(result, torch.rand(8))
