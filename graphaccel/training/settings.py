"""The settings of `graphaccel train`: a frozen dataclass, from which its options are made."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from graphaccel.errors import BadTraining
from graphaccel.planner.plan.option_values import positive
from graphaccel.planner.plan.pins import NAMES as PIN_NAMES
from graphaccel.training.exclusive import drop_replaced
from graphaccel.training.places import check_places

PAIRS = "next-sentence"
"""The kind of model for masked-lm with `next_sentence`."""
TASKS = ("causal-lm", "masked-lm", "sequence-classification", "seq2seq", "image-classification")
_BATCH = "batch: global = micro x data ranks x microbatches x accumulation"
DECAYS = ("cosine", "linear", "constant")


def _option(group: str, help: str, default: Any = None, **more: Any) -> Any:
    return field(default=default, metadata={"group": group, "help": help, **more})


def _rate(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0")
    return number


def _above_zero(text: str) -> float:
    number = _rate(text)
    if number == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return number


def _share(text: str) -> float:
    number = _rate(text)
    if number > 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not between 0 and 1")
    return number


def _seed(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) < 2**32):  # what NumPy takes
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 below 2^32")
    return int(text)


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (equals and name.isidentifier()):
        raise argparse.ArgumentTypeError(f"{text!r} is not like n_layer=4")
    return name, value


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What to train, on what, and how. Counts are whole numbers above 0.

    task: one of TASKS. model: a folder with a `config.json` (and weights), a configuration file, or
    a model type of transformers. data: JSON lines, token files or pictures. model_settings: fields
    of the configuration, as (name, text). A run has `steps` updates or `epochs` passes over the
    data.
    """

    task: str = _option("what to train", "what the model learns", choices=TASKS)
    model: str = _option(
        "what to train",
        "a folder (its weights are read), a config.json, or a model type such as gpt2 "
        "(random weights)",
        metavar="FOLDER|FILE|TYPE",
    )
    model_settings: tuple[tuple[str, str], ...] = _option(
        "what to train",
        "a field of the model's configuration; may be given again",
        (),
        type=_pair,
        action="append",
        metavar="FIELD=VALUE",
        flag="--set",
    )
    output: Path = _option(  # noqa: RUF009
        "what to train", "folder of checkpoints and of the trained model", Path("trained"),
        type=Path, metavar="FOLDER",
    )  # fmt: skip

    data: tuple[str, ...] = _option(
        "data",
        "JSON lines; PREFIX of token files; for images a folder of classes, or .npz",
        (),
        nargs="+",
        metavar="FILE",
    )
    validation: tuple[str, ...] = _option(
        "data", "the same, to evaluate on (else a part of --data)", (), nargs="+", metavar="FILE"
    )
    split: str = _option(
        "data", "shares of --data to train and evaluate on (95,5)", "95,5", metavar="A,B"
    )
    tokenizer: str | None = _option(
        "data",
        "tokenizer.json or a folder; `bytes` for a token a byte (else the model's folder)",
        metavar="FILE|bytes",
    )
    length: int = _option("data", "tokens in a row (128)", 128, type=positive, metavar="N")
    reset_documents: bool = _option(
        "data",
        "positions restart at each document, and no document sees another",
        False,
        action="store_true",
    )
    mask_probability: float = _option(
        "data", "masked-lm: share of tokens to predict (0.15)", 0.15, type=_share, metavar="P",
        also=("--mask-prob",),
    )  # fmt: skip
    next_sentence: bool = _option(
        "data", "masked-lm: pairs, and whether the second follows the first, as BERT", False,
        action="store_true",
    )  # fmt: skip
    short_sequence_probability: float = _option(
        "data", "next-sentence: share of shorter pairs (0.1)", 0.1, type=_share, metavar="P",
        also=("--short-seq-prob",),
    )  # fmt: skip
    skip_bad_lines: bool = _option(
        "data", "go on after lines that are no JSON; they are counted", False, action="store_true"
    )

    global_batch: int = _option(
        _BATCH,
        "rows in an update (16)",
        16,
        type=positive,
        metavar="N",
    )
    micro_batch: int | None = _option(
        _BATCH,
        "rows that a data rank computes at once (planned)",
        type=positive,
        metavar="N",
    )
    gradient_accumulation: int = _option(
        _BATCH,
        "steps whose gradients are added up before an update (1)",
        1,
        type=positive,
        metavar="N",
    )

    steps: int | None = _option(
        "schedule", "updates to train for", type=positive, metavar="N", also=("--train-iters",)
    )
    epochs: float | None = _option(
        "schedule", "or passes over the data (1)", type=_above_zero, metavar="N"
    )
    learning_rate: float = _option(
        "schedule", "the largest (5e-4)", 5e-4, type=_above_zero, metavar="RATE", also=("--lr",)
    )
    min_learning_rate: float = _option(
        "schedule", "cosine: the last (0)", 0.0, type=_rate, metavar="RATE", also=("--min-lr",)
    )
    decay: str = _option(
        "schedule", "of the rate (cosine)", "cosine", choices=DECAYS, also=("--lr-decay-style",)
    )
    warmup_steps: int | None = _option(
        "schedule", "updates in which the rate rises", type=positive, metavar="N"
    )
    warmup_fraction: float = _option(
        "schedule", "or a share of all updates (0)", 0.0, type=_share, metavar="P",
        also=("--lr-warmup-fraction",),
    )  # fmt: skip
    weight_decay: float = _option("schedule", "of AdamW (0.01)", 0.01, type=_rate, metavar="X")
    clip: float = _option(
        "schedule", "largest norm of all gradients; 0: none (1)", 1.0, type=_rate, metavar="X"
    )
    seed: int = _option("schedule", "of weights, order and masks (0)", 0, type=_seed, metavar="N")

    save_interval: int | None = _option(
        "checkpoints", "updates between two (at the end)", type=positive, metavar="N"
    )
    keep: int = _option("checkpoints", "the newest N stay (2)", 2, type=positive, metavar="N")
    resume: bool = _option(
        "checkpoints", "go on from the newest, under any plan", False, action="store_true"
    )

    eval_interval: int | None = _option(
        "evaluation and log", "updates between two (at the end)", type=positive, metavar="N"
    )
    eval_batches: int | None = _option(
        "evaluation and log", "batches of an evaluation (all)", type=positive, metavar="N",
        also=("--eval-iters",),
    )  # fmt: skip
    log_interval: int = _option(
        "evaluation and log", "updates between two lines (10)", 10, type=positive, metavar="N"
    )
    tensorboard: bool = _option(
        "evaluation and log", "the same for TensorBoard, in the folder `runs` of the output", False,
        action="store_true",
    )  # fmt: skip
    metrics: Path | None = _option(  # noqa: RUF009
        "evaluation and log", "JSON lines with what is logged", type=Path, metavar="FILE"
    )


def model_task(settings: Settings) -> str:
    """The task that the model is made for."""
    return PAIRS if settings.next_sentence else settings.task


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Add an option for every setting, in the groups of `Settings`. A default is
    absent from what is parsed, so that a file can give another one."""
    groups: dict[str, argparse._ArgumentGroup] = {}
    for setting in dataclasses.fields(Settings):
        more = dict(setting.metadata)
        group = more.pop("group")
        names = (more.pop("flag", f"--{setting.name.replace('_', '-')}"), *more.pop("also", ()))
        if group not in groups:
            groups[group] = parser.add_argument_group(group)
        groups[group].add_argument(*names, dest=setting.name, default=argparse.SUPPRESS, **more)


def settings_of(
    arguments: argparse.Namespace, file: Path | None
) -> tuple[Settings, dict[str, Any]]:
    """The settings of a file with those of the command line over them, and the file's pins. Of two
    settings of which a run takes one, the typed one goes before the file's.

    file: YAML (or JSON), or TOML where its name ends so: settings by name, and `pins`.

    Raises BadTraining (GA418) for an unknown name, a value of another kind, and what is missing.
    """
    said, pins = _of_file(file) if file is not None else ({}, {})
    if file is not None:
        drop_replaced(said, pins, arguments, file)
    names = [setting.name for setting in dataclasses.fields(Settings)]
    fields = [*said.get("model_settings", ()), *getattr(arguments, "model_settings", ())]
    said |= {name: getattr(arguments, name) for name in names if hasattr(arguments, name)}
    said["model_settings"] = tuple(dict(fields).items())  # field by field
    for name in ("data", "validation"):
        said[name] = tuple(said.get(name, ()))
    for name, option in (("task", "--task causal-lm"), ("model", "--model gpt2")):
        if not said.get(name):
            raise BadTraining(what=f"`{name}` is missing", help_line=option)
    if not said["data"]:
        raise BadTraining(what="`data` is missing", help_line="--data text.jsonl")
    settings = Settings(**said)
    _check(settings)
    _check_schedule(settings)
    check_places(settings.output, settings.metrics, tensorboard=settings.tensorboard)
    return settings, pins


def _of_file(file: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    try:
        content = _parsed(file)
    except (OSError, ValueError) as error:
        raise BadTraining(what=f"`{file}` can not be read", why=str(error)) from error
    if not isinstance(content, dict):
        raise BadTraining(what=f"`{file}` has no settings by name", help_line="task: causal-lm")
    pins = content.pop("pins", None) or {}
    if not isinstance(pins, dict):
        raise BadTraining(
            what=f"`pins` of `{file}` has no pins by name", help_line="pins: {precision: bf16}"
        )
    kinds = {setting.name: setting for setting in dataclasses.fields(Settings)}
    said = {}
    for name, value in content.items():
        if name not in kinds:
            raise BadTraining(
                what=f"`{file}` has `{name}`, which is no setting",
                help_line=_meant(str(name), value, kinds),
            )
        if value is not None:  # as if it were left out
            said[name] = _value(file, name, value, kinds[name].metadata)
    return said, pins


def _parsed(file: Path) -> Any:
    """What a file holds. Raises OSError, ValueError."""
    if file.suffix != ".toml":
        return _yaml(file.read_text())
    if sys.version_info < (3, 11):
        raise ValueError("TOML needs Python 3.11; write YAML")
    import tomllib

    return tomllib.loads(file.read_text())


def _yaml(text: str) -> Any:
    """As `yaml.safe_load`, but the first value of a key that is there twice is not lost: both lines
    are named. Raises ValueError."""
    import yaml

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            lines: dict[str, int] = {}
            for key, _ in node.value:
                line = key.start_mark.line + 1
                if (first := lines.get(str(key.value))) is not None:
                    raise ValueError(f"`{key.value}` is there twice: on lines {first} and {line}")
                lines[str(key.value)] = line
            return super().construct_mapping(node, deep)

    try:
        return yaml.load(text, Loader)
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(str(error)) from error


def _value(file: Path, name: str, value: Any, kind: Mapping[str, Any]) -> Any:
    """A value of a file as the command line would give it."""
    if name == "model_settings":
        if not isinstance(value, dict):
            raise BadTraining(what=f"`{name}` of `{file}` has no fields by name")
        return tuple((str(field), str(text)) for field, text in value.items())
    if kind.get("nargs") == "+":
        return tuple(map(str, value if isinstance(value, list) else [value]))
    if kind.get("action") == "store_true":
        if not isinstance(value, bool):
            raise BadTraining(what=f"`{name}` of `{file}` is {value!r}, not true or false")
        return value
    read: Callable[[str], Any] = kind.get("type", str)
    try:
        parsed = read(str(value))
    except (argparse.ArgumentTypeError, ValueError) as error:
        raise BadTraining(what=f"`{name}` of `{file}`: {error}") from error
    if "choices" in kind and parsed not in kind["choices"]:
        raise BadTraining(
            what=f"`{name}` of `{file}` is {value!r}", help_line=" | ".join(kind["choices"])
        )
    return parsed


def _meant(name: str, value: Any, known: Mapping[str, Any]) -> str:
    """What to write instead of a name that is no setting."""
    import difflib

    name = name.replace("-", "_")
    pin = "data" if name == "data_parallel" else name
    if name == "devices":
        return f"on the command line:  --devices {value}"
    if (pin in PIN_NAMES and pin not in known) or name == "data_parallel":
        return f"pins: {{{pin}: {value}}}"
    options = {"set": "model_settings", **{each: each for each in known}}
    for setting, own in known.items():
        options |= {
            option[2:].replace("-", "_"): setting for option in own.metadata.get("also", ())
        }
    close = difflib.get_close_matches(name, options, cutoff=0.4)
    return ", ".join(dict.fromkeys(options[each] for each in close)) or ", ".join(known)


def _check(settings: Settings) -> None:
    """Raises BadTraining (GA418) where two settings contradict each other."""
    parts = settings.gradient_accumulation
    if settings.global_batch % parts:
        raise BadTraining(
            what=f"a global batch of {settings.global_batch} rows has no {parts} "
            "equal parts for accumulation",
            help_line=f"--global-batch {parts * -(-settings.global_batch // parts)}",
        )
    if settings.next_sentence and (settings.task != "masked-lm" or settings.reset_documents):
        raise BadTraining(
            what="`next_sentence` is for the task masked-lm, without reset_documents",
            help_line="--task masked-lm --next-sentence",
        )
    if settings.task == "causal-lm" and settings.length < 2:
        raise BadTraining(
            what="a row of one token has no next token to learn", help_line="--length 128"
        )


def _check_schedule(settings: Settings) -> None:
    """Raises BadTraining (GA418) for a schedule that can not be followed."""
    if settings.steps is not None and settings.epochs is not None:
        raise BadTraining(what="`steps` and `epochs` are both given", help_line="--steps 1000")
    if settings.warmup_steps is not None and settings.warmup_fraction:
        raise BadTraining(
            what="`warmup_steps` and `warmup_fraction` are both given",
            help_line=f"--warmup-steps {settings.warmup_steps}",
        )
    if settings.min_learning_rate > settings.learning_rate:
        raise BadTraining(
            what="`min_learning_rate` is above `learning_rate`, from which the rate falls",
            help_line=f"--min-learning-rate {settings.learning_rate / 10:g}",
        )
    if settings.steps is not None:
        check_warmup(settings, settings.steps)
    _check_adamw(settings)
    if settings.min_learning_rate and settings.decay != "cosine":
        raise BadTraining(
            what=f"`min_learning_rate` has no effect with decay {settings.decay}",
            help_line=f"--decay cosine --min-learning-rate {settings.min_learning_rate:g}",
        )


def check_warmup(settings: Settings, updates: int) -> None:
    """Raises BadTraining (GA418) for a warm-up that is longer than the run."""
    if (settings.warmup_steps or 0) > updates:
        raise BadTraining(
            what=f"the rate rises over {settings.warmup_steps} updates, and the run has {updates}",
            help_line=f"--warmup-steps {max(1, updates // 10)}",
        )


def _check_adamw(settings: Settings) -> None:
    """Raises BadTraining (GA418) for rates that leave nothing of the weights in an update."""
    rate = settings.learning_rate
    if rate > 1:
        raise BadTraining(
            what=f"`learning_rate` is {rate:g}",
            why="AdamW changes every weight by about the rate in an update, whatever its gradient",
            help_line="--learning-rate 5e-4",
        )
    if rate * settings.weight_decay >= 1:
        raise BadTraining(
            what=f"`weight_decay` is {settings.weight_decay:g} with a rate of {rate:g}",
            why="AdamW takes the share rate x decay off every weight in an update, here all of it",
            help_line="--weight-decay 0.01",
        )
