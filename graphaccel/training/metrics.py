"""Writes what a run logs, as JSON lines and for TensorBoard: losses, rates, seconds of a step,
tokens a second."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers.trainer_callback import TrainerCallback

from graphaccel.errors import BadTraining


class MetricsFile:
    """JSON lines: a line for each log. resumes: lines are added to those of the file.

    Raises BadTraining (GA418) where it can not be written.
    """

    def __init__(self, file: Path, *, resumes: bool) -> None:
        self.file, self.resumes = file, resumes

    def begin(self) -> None:
        """Create the file, or empty it, unless the run resumes."""
        if not self.resumes:
            with self._written():
                self.file.parent.mkdir(parents=True, exist_ok=True)
                self.file.write_text("")

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Add the line of a log."""
        with self._written(), self.file.open("a") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")

    @contextmanager
    def _written(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise BadTraining(
                what=f"`metrics` `{self.file}` can not be written: {error.strerror or error}",
                help_line="make room, or name a file elsewhere",
            ) from None


class MetricsBoard:
    """Scalars for TensorBoard, `train/loss` and `eval/loss`. folder: of its event files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._writer: Any = None

    def begin(self) -> None:
        """Open the event file."""
        from torch.utils.tensorboard import SummaryWriter  # an optional dependency

        self._writer = SummaryWriter(str(self.folder))

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Add a scalar for each number of a log."""
        for name, value in values.items():
            if isinstance(value, (int, float)):
                evaluated = name.startswith("eval_")
                shown = f"eval/{name.removeprefix('eval_')}" if evaluated else f"train/{name}"
                self._writer.add_scalar(shown, value, step)
        self._writer.flush()


class Metrics(TrainerCallback):
    """What Trainer logs and what is measured beside it, given to writers by the first rank.

    rows: in an update. tokens: in a row; None for pictures. The time of a step leaves evaluations
    and checkpoints out. `predicted_seconds` is the plan's for a step, of which accumulation makes
    several an update; `mfu` is model FLOPs utilisation.
    """

    def __init__(
        self, writers: Sequence[MetricsFile | MetricsBoard], rows: int, tokens: int | None
    ) -> None:
        self.writers, self.rows, self.tokens = writers, rows, tokens
        self._began, self._seconds, self._steps = 0.0, 0.0, 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for writer in self.writers if state.is_world_process_zero else ():
            writer.begin()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._seconds += time.perf_counter() - self._began
        self._steps += 1

    def on_log(
        self, args: Any, state: Any, control: Any, logs: Any = None, model: Any = None, **_: Any
    ) -> None:
        if not state.is_world_process_zero:
            return
        line = dict(logs or {})
        if self._steps:
            seconds = self._seconds / self._steps
            line |= {"seconds": round(seconds, 6), "rows_per_second": round(self.rows / seconds, 3)}
            if self.tokens is not None:
                line["tokens_per_second"] = round(self.rows * self.tokens / seconds, 1)
            self._seconds, self._steps = 0.0, 0
        line |= _memory()
        handle = getattr(model, "graphaccel", None)
        if handle is not None and handle.plan is not None:
            line |= _planned(handle, line, self.rows)
        for writer in self.writers:
            writer.write(state.global_step, line)


def _planned(handle: Any, line: Mapping[str, Any], rows: int) -> dict[str, Any]:
    """What the plan says of a step, and how busy the devices were. rows: in an update."""
    said = {
        "predicted_seconds": handle.predicted_step_seconds,
        "predicted_peak_bytes": handle.predicted_peak_bytes,
    }
    if "seconds" in line:
        said["mfu"] = handle.utilisation(line["seconds"] * handle.plan.batch / rows)
    if handle.loss_scale is not None:
        said["loss_scale"] = handle.loss_scale
    return said


def _memory() -> dict[str, int]:
    """The most bytes that this rank's GPU held in tensors; without one, that the process held, with
    Python and torch."""
    if torch.cuda.is_available():
        return {"peak_bytes": torch.cuda.max_memory_allocated()}
    import resource

    unit = 1 if sys.platform == "darwin" else 1024  # elsewhere ru_maxrss is in KiB
    return {"resident_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}
