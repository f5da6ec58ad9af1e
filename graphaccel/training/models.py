"""Makes the model of a task from a folder, a configuration or the name of a model type."""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn
from transformers.configuration_utils import PretrainedConfig
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, AutoConfig

from graphaccel.errors import BadTraining
from graphaccel.training.settings import PAIRS, TASKS

_CLASSES = {
    "causal-lm": modeling_auto.AutoModelForCausalLM,
    "masked-lm": modeling_auto.AutoModelForMaskedLM,
    PAIRS: modeling_auto.AutoModelForPreTraining,
    "sequence-classification": modeling_auto.AutoModelForSequenceClassification,
    "seq2seq": modeling_auto.AutoModelForSeq2SeqLM,
    "image-classification": modeling_auto.AutoModelForImageClassification,
}
_COUNTS = re.compile(r"^(n|num)_|_(layers|heads|size|dim)$")
"""Names of fields that are counts."""
_OF_SIZES = (
    ArithmeticError, AssertionError, LookupError, OSError, RuntimeError, TypeError, ValueError,
)  # fmt: skip
"""What the code of a model raises for sizes that it can not have, and a folder for weights that can
not be read; not what is wrong with the code or with what is installed."""
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin")


def read_config(model: str, changes: Sequence[tuple[str, str]]) -> PretrainedConfig:
    """The configuration of a folder, a file or a model type, with some fields changed.

    Raises BadTraining (GA418) for a model that is none of these, for a field it does not have, and
    for a value that the field does not take.
    """
    path = Path(model)
    try:
        config = (
            AutoConfig.from_pretrained(path) if has_files(model) else AutoConfig.for_model(model)
        )
    except (OSError, ValueError) as error:
        if path.exists():
            raise BadTraining(what=f"`{model}` has no configuration", why=_line(error)) from error
        close = difflib.get_close_matches(model, [*CONFIG_MAPPING], cutoff=0.5)
        raise BadTraining(
            what=f"`{model}` is no folder, no file and no model type of transformers",
            help_line=f"--model {' | '.join(close or ['gpt2', 'bert', 't5', 'vit'])}",
        ) from error
    fields = config.to_dict()
    for name, text in changes:
        if name not in fields and not hasattr(config, name):
            close = difflib.get_close_matches(name, fields, cutoff=0.4)
            raise BadTraining(
                what=f"a `{config.model_type}` has no field `{name}`",
                help_line=f"--set {' | '.join(close or sorted(fields)[:8])}=...",
            )
        try:
            setattr(config, name, _parsed(text))
        except Exception as error:  # of the library's checks of types, or of a property
            raise BadTraining(
                what=f"`{name}` of a `{config.model_type}` can not be {text!r}",
                why=(str(error).strip().splitlines() or [type(error).__name__])[-1].strip(),
                help_line=f"--set {name}={getattr(config, name)}",
            ) from error
    _check_counts(config, model)
    return config


def _check_counts(config: PretrainedConfig, model: str) -> None:
    """Raises BadTraining (GA418) for a negative number of layers, heads or features: a model of -1
    layers would be made, and have none."""
    usual = AutoConfig.for_model(config.model_type)
    for name, value in config.to_dict().items():
        if not (isinstance(value, int) and value < 0 and _COUNTS.search(name)):
            continue
        default = getattr(usual, name, None)
        if default == value:
            continue
        positive = default if isinstance(default, int) and default > 0 else 1
        raise BadTraining(
            what=f"`{name}` of `{model}` is {value}, no number of anything",
            help_line=f"--set {name}={positive}",
        )


def has_files(model: str) -> bool:
    """Whether a model is a folder or a configuration file. A model type is none, also beside a
    folder of its name, such as the output of a run."""
    path = Path(model)
    is_type = model in CONFIG_MAPPING and not (path / "config.json").is_file()
    return not is_type and (path.is_dir() or path.suffix == ".json")


def fit_vocabulary(
    config: PretrainedConfig, model: str, vocabulary: int, length: int, *, chosen: bool = False
) -> None:
    """Give a configuration that stands for no weights the sizes of the data; check the others.

    vocabulary: tokens that the tokenizer has. length: tokens in a row. chosen: the size of the
    embedding was, and stays.

    Raises BadTraining (GA418) where the model's embedding or position table is smaller.
    """
    if not has_files(model):
        if not chosen:
            config.vocab_size = vocabulary
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            if (getattr(config, name, None) or 0) >= vocabulary:
                setattr(config, name, vocabulary - 1)
    if config.vocab_size < vocabulary:
        raise BadTraining(
            what=f"the tokenizer has {vocabulary:,} tokens, the model's embedding "
            f"{config.vocab_size:,} rows",
            help_line=f"--tokenizer {model}" if has_files(model) else
            f"--set vocab_size={vocabulary}",
        )  # fmt: skip
    positions = getattr(config, "max_position_embeddings", None)
    if isinstance(positions, int) and 0 < positions < length:
        raise BadTraining(
            what=f"rows of {length:,} tokens, but the model has {positions:,} positions",
            help_line=f"--length {positions}",
        )


def forward_of(task: str, config: PretrainedConfig) -> Callable[..., Any]:
    """The forward of the model that a task and a configuration stand for."""
    return _class(task, config).forward


def _class(task: str, config: PretrainedConfig) -> type[nn.Module]:
    kind = _CLASSES[task]
    if type(config) not in kind._model_mapping:
        fitting = [t for t in TASKS if type(config) in _CLASSES[t]._model_mapping]
        raise BadTraining(
            what=f"transformers has no `{config.model_type}` for {task}",
            help_line=f"--task {' | '.join(fitting)}" if fitting else "",
        )
    result = kind._model_mapping[type(config)]
    return result[0] if isinstance(result, (list, tuple)) else result


def check_positions(model: nn.Module, length: int) -> None:
    """Raises BadTraining (GA418) where a row is longer than a table of positions that begins
    behind the padding token, as RoBERTa's does."""
    for name, table in model.named_modules():
        if not (name.endswith("position_embeddings") and isinstance(table, nn.Embedding)):
            continue
        if table.padding_idx is None or length <= table.num_embeddings - table.padding_idx - 1:
            continue
        first = table.padding_idx + 1
        raise BadTraining(
            what=f"rows of {length:,} tokens, but the model's {table.num_embeddings:,} positions "
            f"begin at {first}, behind the padding token",
            help_line=f"--set max_position_embeddings={first + length}",
        )


def make_model(task: str, model: str, config: PretrainedConfig) -> nn.Module:
    """The model of a task: with the folder's weights, or random ones.

    Raises BadTraining (GA418) where transformers has no such model for the task, or can not make
    it.
    """
    _class(task, config)
    kind = _CLASSES[task]
    try:
        if any((Path(model) / name).is_file() for name in _WEIGHTS):
            return kind.from_pretrained(model, config=config)
        return kind.from_config(config)
    except _OF_SIZES as error:
        if "ignore_mismatched_sizes" in str(error):
            raise _other_sizes(model, config) from None
        raise BadTraining(what="the model can not be made", why=_line(error)) from error


def _other_sizes(model: str, config: PretrainedConfig) -> BadTraining:
    """Weights that do not fit the configuration, to which settings and data have added."""
    trained, kind = read_config(model, ()).num_labels, str(config.model_type)
    if trained != config.num_labels:
        return BadTraining(
            what=f"the data has {config.num_labels} classes, the model in `{model}` {trained}",
            help_line=f"a new model:  --model {kind}",
        )
    return BadTraining(
        what=f"the weights in `{model}` have other sizes than these settings",
        help_line=f"leave --set out, or a new model:  --model {kind}",
    )


def labels_of(config: PretrainedConfig, names: Sequence[str]) -> None:
    """Enter the names of classes into a configuration, in the order of their numbers."""
    config.id2label = dict(enumerate(names))
    config.label2id = {name: number for number, name in enumerate(names)}


def known_labels(config: PretrainedConfig, model: str) -> Mapping[str, int] | None:
    """Numbers of the classes of a model that has been trained on some; None for a new one."""
    known = config.label2id if has_files(model) else None
    return {str(name): int(number) for name, number in known.items()} if known else None


def _parsed(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return {"true": True, "false": False, "null": None}.get(text.lower(), text)


def _line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
