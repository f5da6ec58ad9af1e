"""A process that ends because it was asked to stop."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.distributed.checkpoint import FileSystemWriter

import graphaccel
from graphaccel.checkpoint.stopping import end_stopped
from graphaccel.runtime.launch import STOPPED, STOPPED_FILE
from tests.support.small import Classifier


@pytest.fixture(autouse=True)
def _handler() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def test_a_later_request_does_not_end_it_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python takes handlers of its own away when it ends, and leaves signals that are ignored."""
    monkeypatch.setenv(STOPPED_FILE, str(tmp_path / "stopped"))
    with pytest.raises(SystemExit) as ended:
        end_stopped(3, tmp_path, 0)
    assert ended.value.code == 0
    assert (tmp_path / "stopped").exists()
    signal.raise_signal(signal.SIGTERM)  # nothing happens


def test_without_a_launcher_it_has_an_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(STOPPED_FILE, raising=False)
    with pytest.raises(SystemExit) as ended:
        end_stopped(3, tmp_path, 1)
    assert ended.value.code == STOPPED


@pytest.mark.parametrize("end", [KeyboardInterrupt(), SystemExit(143)])
def test_what_ends_a_process_in_mid_save_is_no_failed_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: BaseException
) -> None:
    """Ctrl-C, or a handler of the script's: a script that goes on without a checkpoint ends."""
    model = Classifier()
    graphaccel.save(tmp_path, model, step=1)

    def write(*_: object) -> None:
        raise end

    with monkeypatch.context() as patch:
        patch.setattr(FileSystemWriter, "write_data", write)
        with pytest.raises(type(end)) as ended:
            graphaccel.save(tmp_path, model, step=2)
    assert ended.value.args == end.args
    assert graphaccel.load(tmp_path, model).step == 1
    graphaccel.save(tmp_path, model, step=2)
    assert graphaccel.load(tmp_path, model).step == 2
