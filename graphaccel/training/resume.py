"""What a checkpoint of `graphaccel train` was made with: a run that resumes goes on with the same.

Trainer finds its place in the data by the number of updates: other rows, or another number of them
in an update, would be skipped than those that were read.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from transformers.configuration_utils import PretrainedConfig
from transformers.trainer_callback import TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from graphaccel.errors import BadTraining
from graphaccel.training.settings import Settings

FILE = "train_settings.json"
_KEPT = (
    "task", "length", "reset_documents", "mask_probability", "next_sentence",
    "short_sequence_probability", "global_batch", "seed",
)  # fmt: skip
"""Settings that decide which rows an update reads, and what they are; besides those of files."""
_MAY_DIFFER = re.compile("^_|architectures|dtype|transformers_version|drop")
"""Fields of a configuration that say how it was saved, or how the model trains."""


class Record(TrainerCallback):
    """Writes what the run is made with into every checkpoint, once."""

    def __init__(self, settings: Settings, config: PretrainedConfig) -> None:
        self._text = json.dumps(_record_of(settings, config), indent=1)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write it beside what Trainer has saved."""
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        if state.is_world_process_zero and folder.is_dir():
            (folder / FILE).write_text(self._text)


def checkpoint_of(settings: Settings, config: PretrainedConfig, updates: int) -> str | None:
    """The newest checkpoint of the output folder, where the run is to resume.

    updates: that the run has. Raises BadTraining (GA418) where there is no checkpoint, where it was
    made with other settings or another model, and where it has all the updates.
    """
    if not settings.resume:
        return None
    folder = Path(settings.output)
    newest = get_last_checkpoint(str(folder)) if folder.is_dir() else None
    if newest is None:
        raise BadTraining(what=f"`{folder}` has no checkpoint", help_line="leave --resume out")
    _check_same(Path(newest), _record_of(settings, config))
    done = int(newest.rpartition("-")[2])
    if done >= updates:
        raise BadTraining(
            what=f"`{newest}` has {done} updates, and the run is to have {updates}",
            help_line=f"--steps {2 * done}",
        )
    return newest


def _record_of(settings: Settings, config: PretrainedConfig) -> dict[str, Any]:
    """Of files the name and size, not the folder: they may have moved."""
    model = {name: each for name, each in config.to_dict().items() if not _MAY_DIFFER.search(name)}
    kept: dict[str, Any] = {name: getattr(settings, name) for name in _KEPT}
    kept["data"] = [_named(path) for path in settings.data]
    kept["tokenizer"] = settings.tokenizer and Path(settings.tokenizer).name
    kept["validation"] = bool(settings.validation)
    kept["split"] = None if settings.validation else settings.split
    return json.loads(json.dumps({"settings": kept, "model": model}, default=str))


def _named(path: str) -> str:
    file = next((f for f in (Path(path), Path(path + ".bin")) if f.is_file()), None)
    size = "" if file is None else f" ({file.stat().st_size:,} bytes)"
    return f"{Path(path).name}{size}"


def _check_same(checkpoint: Path, now: dict[str, Any]) -> None:
    """Raises BadTraining (GA418) for the first thing that is another one now. A checkpoint without
    a record, of an older version, is taken."""
    file = checkpoint / FILE
    if not file.is_file():
        return
    then = json.loads(file.read_text())
    for part, option in (("settings", "--"), ("model", "--set ")):
        for name, before in then[part].items():
            if name in now[part] and before != (given := now[part][name]):
                raise BadTraining(
                    what=f"`{name}` was {_shown(before)} in `{checkpoint}` and is {_shown(given)}",
                    why="the run would go on with other rows or another model than it began with",
                    help_line=_typed(name, before, option),
                )


def _shown(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _typed(name: str, value: Any, option: str) -> str:
    """What gives a setting its former value, or begins anew."""
    anew = "(or another --output, without --resume)"
    if option == "--set ":
        return f"--set {name}={value}  {anew}"
    typed = f"--{name.replace('_', '-')}"
    if name == "data":
        return f"{typed} with the files as they were  {anew}"
    if value is None or value is False:
        return f"leave {typed} out  {anew}"
    text = ("" if name != "validation" else " FILE") if value is True else f" {_shown(value)}"
    return f"{typed}{text}  {anew}"
